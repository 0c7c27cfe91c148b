"""`python -m tests.check devices` and `syncs`: audits of real training steps."""

import argparse
import contextlib
import dataclasses
import inspect
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import config
import optim
import run_folder
import train
from ddp_setup import Distributed, run
from tests.tools.runs import ROOT, gather, launch
from tests.tools.syncs import CountSynchronisations

WARM_UP, STEPS = 3, 10


class AuditDone(Exception):
    """Raised to end training once the audit has seen enough."""


def devices(options: argparse.Namespace) -> bool:
    return audit("devices", max(1, torch.cuda.device_count()), options)


def syncs(options: argparse.Namespace) -> bool:
    return audit("syncs", 1, options)


def audit(name: str, world_size: int, options: argparse.Namespace) -> bool:
    status, output = launch(
        world_size, ["audit-worker", name, *options.arguments], options.timeout, cpu=False
    )
    if status:
        raise RuntimeError(f"the audit failed:\n{output}")
    print(output, end="")
    return "MISPLACED" not in output and "WAITS" not in output


def audit_worker(name: str, arguments: list[str]) -> None:
    config, never = train.read_config(arguments), 2**31

    def program(env: Distributed) -> None:
        with tempfile.TemporaryDirectory() as folder:
            short = dataclasses.replace(
                config,
                run=run_folder.RunConfig(dir=env.broadcast(folder)),
                optim=dataclasses.replace(config.optim, epochs=max(config.optim.epochs, 30)),
                log=run_folder.LogConfig(every_steps=never),
                checkpoint=run_folder.CheckpointConfig(every_steps=never),
            )
            (audit_devices if name == "devices" else audit_syncs)(short, env)

    run(program, config.ddp)


def audit_devices(config: config.Config, env: Distributed) -> None:
    """Prints the device of every tensor in the second step, for each rank."""
    found: dict[str, Any] = {}

    def build_model(*args, **kwargs) -> nn.Module:
        found["model"] = model = original_model(*args, **kwargs)
        names = list(inspect.signature(model.forward).parameters)

        def record(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            found.update(zip(names, args, strict=False), **kwargs, output=output)

        model.register_forward_hook(record, with_kwargs=True)
        return model

    def build_optimizer(*args, **kwargs) -> torch.optim.Optimizer:
        found["optimizer"] = optimizer = original_optimizer(*args, **kwargs)
        steps = Counter()

        def stop_after_two(*_: object) -> None:
            steps["done"] += 1
            if steps["done"] == 2:
                raise AuditDone

        optimizer.register_step_post_hook(stop_after_two)
        return optimizer

    def criterion(*args, **kwargs) -> Tensor:
        found["loss"] = original_criterion(*args, **kwargs)
        return found["loss"]

    original_model, original_optimizer = train.build_model, optim.build_optimizer
    original_criterion = train.criterion
    train.build_model, optim.build_optimizer, train.criterion = (
        build_model,
        build_optimizer,
        criterion,
    )
    try:
        train.train(config, env)
    except AuditDone:
        for lines in gather(placement(found, env.device), env):
            if env.rank == 0:
                print(f"on {lines[0]}", *lines[1:], sep="\n")


def placement(found: dict[str, Any], device: torch.device) -> list[str]:
    """Returns the device, a line per kind of tensor in `found`, a line per misplaced tensor."""
    kinds: dict[str, Counter] = {}
    misplaced = []
    for kind, path, tensor in tensors(found):
        kinds.setdefault(kind, Counter())[str(tensor.device)] += 1
        if tensor.device != device:
            misplaced.append(f"  MISPLACED  {path} is on {tensor.device}: move it to {device}")
    lines = [
        f"  {kind:17s} " + ", ".join(f"{n} on {where}" for where, n in counts.items())
        for kind, counts in kinds.items()
    ]
    return [str(device), *lines, *misplaced]


def tensors(found: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields kind, full path and tensor of everything that a step uses."""
    names = {parameter: name for name, parameter in found["model"].named_parameters()}
    for name, value in found.items():
        if isinstance(value, nn.Module):
            for path, parameter in value.named_parameters():
                yield f"{name} parameters", f"{name}.{path}", parameter
                if parameter.grad is not None:
                    yield f"{name} gradients", f"{name}.{path}.grad", parameter.grad
            for path, buffer in value.named_buffers():
                yield f"{name} buffers", f"{name}.{path}", buffer
        elif isinstance(value, torch.optim.Optimizer):
            for parameter, state in value.state.items():
                for key, tensor in state.items():
                    if isinstance(tensor, Tensor):
                        yield (
                            f"{name} state",
                            f"{name}.state[{names.get(parameter, '?')}].{key}",
                            tensor,
                        )
        else:
            for path, tensor in nested_tensors(name, value):
                yield name, path, tensor


def nested_tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping | Data):
        for key, item in value.to_dict().items() if isinstance(value, Data) else value.items():
            yield from nested_tensors(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from nested_tensors(f"{path}[{i}]", item)


def audit_syncs(config: config.Config, env: Distributed) -> None:
    """Prints the lines that make the host wait in ten steps.

    Leaves out the ends of epochs, which log and save.
    """
    watch = WatchOnGPU() if env.device.type == "cuda" else WatchOnCPU(env)
    places, done, last_step = Counter(), 0, 0
    phase, stop_reason = env.phase, env.stop_reason

    def watched_phase(name: str) -> contextlib.AbstractContextManager:
        if name == "evaluation" and watch.active:
            watch.end()
        return phase(name)

    def watched_stop_reason(at_once: bool = True) -> str:
        nonlocal done, last_step
        if watch.active:
            done += 1
            places.update(watch.end())
        if done == STEPS:
            raise AuditDone
        reason = stop_reason(at_once)
        step = env.progress.step
        if step > max(last_step, WARM_UP):
            watch.begin()
        last_step = step
        return reason

    env.phase, env.stop_reason = watched_phase, watched_stop_reason
    try:
        train.train(config, env)
    except AuditDone:
        print(f"{STEPS} steps on {env.device}")
        for (place, what), count in sorted(places.items()):
            print(f"  WAITS  {place}: {what}, in {count} of {STEPS} steps")
        if not places:
            print("  nothing waits for the device")
        return
    raise RuntimeError("an epoch has too few steps to audit: set a smaller data.batch_size")


class WatchOnCPU(CountSynchronisations):
    """Records the operators that would make the host wait on a GPU, except those on host data."""

    def __init__(self, env: Distributed):
        super().__init__()
        self.active, self.env = False, env
        self.found: set[tuple[str, str]] = set()

    def begin(self) -> None:
        self.found = set()
        self.__enter__()
        self.active = True

    def record(self, operator: str) -> None:
        if self.env.progress.phase not in ("data", "agreement"):
            self.found.add((caller(), operator))

    def end(self) -> set[tuple[str, str]]:
        self.__exit__(None, None, None)
        self.active = False
        return self.found


class WatchOnGPU:
    """Records the warnings of CUDA's synchronisation debug mode."""

    def __init__(self):
        self.active = False
        self.found: set[tuple[str, str]] = set()

    def begin(self) -> None:
        self.found = set()
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("always")
        warnings.filterwarnings(
            "ignore", "Synchronization debug mode is a prototype"
        )  # on setting it
        warnings.showwarning = lambda message, *_, **__: self.found.add(
            (caller(), str(message).split(" (")[0])
        )
        torch.cuda.set_sync_debug_mode("warn")
        self.active = True

    def end(self) -> set[tuple[str, str]]:
        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(None, None, None)
        self.active = False
        return self.found


def caller() -> str:
    """Returns file and line of the innermost frame in the template's own modules."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).parent == ROOT]
    return (
        f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})"
        if frames
        else "outside"
    )
