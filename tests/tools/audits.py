"""`python -m tests.check devices` and `syncs`: audits of training steps of the user's model.

`devices` lists tensors on a wrong device, and `syncs` operations that make the host wait.
"""

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

import train
from config import Config
from ddp_ends import end_process
from ddp_setup import Distributed, run
from run_folder import CheckpointConfig, LogConfig, RunConfig
from task import KnockoutTask
from tests.syncs import CountSynchronisations
from tests.tools.runs import ROOT, launch

WARM_UP = 3  # number of steps before `audit_syncs` starts to watch
STEPS = 10  # number of steps that it watches
NEVER = 2**31  # more steps than a run has


class AuditDone(Exception):
    """Ends training when the audit is complete."""


def devices(options: argparse.Namespace) -> bool:
    """Prints the devices of the tensors of a step; returns whether all are correct."""
    return audit("devices", max(1, torch.cuda.device_count()), options)


def syncs(options: argparse.Namespace) -> bool:
    """Prints the operations of a step that make the host wait; returns whether there are none."""
    return audit("syncs", 1, options)


def audit(name: str, world_size: int, options: argparse.Namespace) -> bool:
    """Prints the output of an audit on `world_size` ranks; returns whether it found no problem."""
    arguments = ["audit-worker", name, *options.arguments]
    status, output = launch(world_size, arguments, options.timeout, cpu=False)
    if status:
        raise RuntimeError(f"the training steps of this check failed:\n{output}")
    print(output, end="")
    return "MISPLACED" not in output and "WAITS" not in output


def audit_worker(name: str, arguments: list[str]) -> None:
    """Runs an audit of the user's configuration on this rank, in a temporary run folder."""
    config = train.read_config(arguments)
    audits = {"devices": audit_devices, "syncs": audit_syncs}

    def program(ddp: Distributed) -> None:
        with tempfile.TemporaryDirectory() as folder:
            quiet = dataclasses.replace(
                config,
                run=RunConfig(dir=ddp.broadcast(folder)),
                optim=dataclasses.replace(config.optim, epochs=max(config.optim.epochs, 30)),
                log=LogConfig(every_steps=NEVER),
                checkpoint=CheckpointConfig(every_steps=NEVER),
            )
            audits[name](quiet, ddp)

    end_process(run(program, config.ddp))


# ---- Devices -------------------------------------------------------------------------------------
def audit_devices(config: Config, ddp: Distributed) -> None:
    """Prints the device of each tensor in the second step, for each rank."""
    found: dict[str, Any] = {}
    record_tensors(found)
    with contextlib.suppress(AuditDone):
        train.train(config, ddp)
    for lines in ddp.gather(placement(found, ddp.device)):
        if ddp.rank == 0:
            print(f"on {lines[0]}", *lines[1:], sep="\n")


def record_tensors(found: dict[str, Any]) -> None:
    """Makes training fill `found`, and raise `AuditDone` after the second step."""
    original_model = KnockoutTask.build_model
    original_loss = KnockoutTask.loss
    original_optimizer = train.build_optimizer
    num_steps = 0

    def build_model(task: KnockoutTask) -> nn.Module:
        model = original_model(task)
        names = list(inspect.signature(model.forward).parameters)

        def record(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            found.update(zip(names, args, strict=False), **kwargs, output=output)

        model.register_forward_hook(record, with_kwargs=True)
        found["model"] = model
        if hasattr(task, "criterion"):
            found["scale"] = vars(task.criterion)
        return model

    def build_optimizer(*args: object) -> torch.optim.Optimizer:
        optimizer = original_optimizer(*args)
        optimizer.register_step_post_hook(stop_after_two)
        found["optimizer"] = optimizer
        return optimizer

    def stop_after_two(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise AuditDone

    def loss(*args: object) -> Tensor:
        found["loss"] = original_loss(*args)
        return found["loss"]

    KnockoutTask.build_model = build_model
    KnockoutTask.loss = loss
    train.build_optimizer = build_optimizer


def placement(found: dict[str, Any], device: torch.device) -> list[str]:
    """Returns lines: the correct device, the devices of each kind of tensor, misplaced tensors."""
    kinds: dict[str, Counter] = {}
    misplaced = []
    for kind, path, tensor in tensors(found):
        kinds.setdefault(kind, Counter())[str(tensor.device)] += 1
        if tensor.device != device:
            misplaced.append(f"  MISPLACED  {path} is on {tensor.device}: move it to {device}")
    lines = []
    for kind, counts in kinds.items():
        numbers = [f"{count} on {where}" for where, count in counts.items()]
        lines.append(f"  {kind:17s} {', '.join(numbers)}")
    return [str(device), *lines, *misplaced]


def tensors(found: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields kind, full path and tensor of each tensor that a step uses."""
    names = {parameter: name for name, parameter in found["model"].named_parameters()}
    for name, value in found.items():
        if isinstance(value, nn.Module):
            yield from module_tensors(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            for parameter, state in value.state.items():
                path = f"{name}.state[{names.get(parameter, '?')}]"
                for state_path, tensor in nested_tensors(path, state):
                    yield f"{name} state", state_path, tensor
        else:
            for path, tensor in nested_tensors(name, value):
                yield name, path, tensor


def module_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yields kind, full path and tensor of each parameter, gradient and buffer of a module."""
    for path, parameter in module.named_parameters():
        yield f"{name} parameters", f"{name}.{path}", parameter
        if parameter.grad is not None:
            yield f"{name} gradients", f"{name}.{path}.grad", parameter.grad
    for path, buffer in module.named_buffers():
        yield f"{name} buffers", f"{name}.{path}", buffer


def nested_tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the full path of each tensor in nested batches, mappings and lists, and the tensor."""
    if isinstance(value, Data):
        value = value.to_dict()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from nested_tensors(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from nested_tensors(f"{path}[{position}]", item)


# ---- Waiting -------------------------------------------------------------------------------------
def audit_syncs(config: Config, ddp: Distributed) -> None:
    """Prints the lines of code that make the host wait in ten steps.

    The ends of epochs are not watched, because logging and saving must wait.
    """
    watch = WatchOnGPU() if ddp.device.type == "cuda" else WatchOnCPU(ddp)
    places = Counter()
    done = 0  # number of watched steps
    last_step = 0
    phase = ddp.phase
    stop_reason = ddp.stop_reason

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
        step = ddp.heartbeat.step
        if step > max(last_step, WARM_UP):
            watch.begin()
        last_step = step
        return reason

    ddp.phase = watched_phase
    ddp.stop_reason = watched_stop_reason
    try:
        train.train(config, ddp)
    except AuditDone:
        print(f"{STEPS} steps on {ddp.device}")
        for (place, what), count in sorted(places.items()):
            print(f"  WAITS  {place}: {what}, in {count} of {STEPS} steps")
        if places:
            print("  Read values only when they are logged, as `Meter.read` in train.py does.")
        else:
            print("  no operation makes the host wait")
        return
    raise RuntimeError("the epochs have too few steps for this check: decrease data.batch_size")


class WatchOnCPU(CountSynchronisations):
    """Records operators that would make the host wait for a GPU.

    Operators are ignored in the phases `data` and `agreement`, whose data are on the host.
    """

    def __init__(self, ddp: Distributed):
        super().__init__()
        self.ddp = ddp
        self.active = False
        self.found: set[tuple[str, str]] = set()

    def begin(self) -> None:
        self.found = set()
        self.__enter__()
        self.active = True

    def record(self, operator: str) -> None:
        if self.ddp.heartbeat.phase not in ("data", "agreement"):
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
        notice = "Synchronization debug mode is a prototype"
        warnings.filterwarnings("ignore", notice)
        warnings.showwarning = self.record
        torch.cuda.set_sync_debug_mode("warn")
        self.active = True

    def record(self, message: Warning | str, *_: object, **__: object) -> None:
        what = str(message).split(" (")[0]
        self.found.add((caller(), what))

    def end(self) -> set[tuple[str, str]]:
        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(None, None, None)
        self.active = False
        return self.found


def caller() -> str:
    """Returns the file and line of the innermost call in a module next to train.py."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).parent == ROOT]
    if not frames:
        return "outside"
    innermost = frames[-1]
    return f"{Path(innermost.filename).name}:{innermost.lineno} ({innermost.line})"
