"""Trains a knock-out GNN on one large shared graph, on one process or many.

    python train.py                                         one process
    torchrun --standalone --nproc_per_node=4 train.py       one process per GPU (without GPUs, on CPU over gloo)
    torchrun ... train.py --config my.yaml optim.lr=1e-3 run.name=slow
    python train.py --predict TABLE --checkpoint FILE       predictions for a table of knock-out sets

Options stand in config.yaml; `section.key=value` on the command line overrides the file. The same command starts a run
and resumes it; a signal or a file STOP in the run folder ends it cleanly. Exit status: 0 finished or stopped on
request, 1 failure, 2 the configuration or the input data is wrong.
"""

import argparse
import contextlib
import difflib
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch_geometric.data import Data
from tqdm import tqdm

from data import (
    DataConfig,
    DataError,
    KnockoutDataset,
    StepSampler,
    Tables,
    additive_baseline,
    load,
    make_loader,
    pack,
    read_knockouts,
    shard,
)
from ddp_setup import (
    DDPConfig,
    Distributed,
    RunError,
    SetupError,
    StopRequest,
    describe,
    leave,
    library_versions,
    setup,
    unread_note,
    unread_variables,
)
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig

log = logging.getLogger("train")


# dtype of parameters and optimiser, and of autocast (None: off)
PRECISIONS = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


LINE_S = 30.0  # between lines that say how far the run is, where there is no progress bar


class ConfigError(ValueError):
    """The configuration is wrong; the message is one sentence for the user."""


@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    dir: str = "runs"
    seed: int = 0
    resume: str = "auto"

    def __post_init__(self):
        if self.name in ("", "..") or self.name != Path(self.name).name:
            raise ValueError(f"run.name must be a plain folder name, not '{self.name}'")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"run.seed must be from 0 to 2**32 - 1, not {self.seed}")


@dataclass(frozen=True)
class OptimConfig:
    epochs: int = 20
    local_epochs: int = 0
    lr: float = 0.01
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    zero: bool = False
    precision: str = "fp32"
    on_nonfinite: str = "stop"
    max_skips: int = 10

    def __post_init__(self):
        if min(self.epochs, self.accumulate, self.max_skips) < 1:
            raise ValueError("optim.epochs, optim.accumulate and optim.max_skips must be at least 1")
        if not 0 <= self.local_epochs < self.epochs:
            raise ValueError(f"optim.local_epochs must be from 0 to optim.epochs - 1, not {self.local_epochs}")
        if min(self.lr, self.clip) <= 0 or self.weight_decay < 0 or not 0 <= self.warmup < 1:
            raise ValueError(
                "optim.lr and optim.clip must be over 0, optim.weight_decay 0 or more, optim.warmup in [0, 1)"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"optim.precision must be one of {', '.join(PRECISIONS)}, not '{self.precision}'")
        if self.on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"optim.on_nonfinite must be stop or skip, not '{self.on_nonfinite}'")


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000
    keep_last: int = 2

    def __post_init__(self):
        if min(self.every_steps, self.keep_last) < 1:
            raise ValueError("checkpoint.every_steps and checkpoint.keep_last must be at least 1")


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = 10
    profile_steps: int = 0
    tensorboard: bool = False

    def __post_init__(self):
        if self.every_steps < 1 or self.profile_steps < 0:
            raise ValueError("log.every_steps must be at least 1, log.profile_steps 0 (no profile) or more")


@dataclass(frozen=True)
class Config:
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    ddp: DDPConfig = DDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


def main() -> None:
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    console.addFilter(lambda record: record.levelno < logging.ERROR)  # those are on stderr already
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[console])
    logging.raiseExceptions = False  # nobody may be reading stdout any more
    env, config, problem = None, Config(), None
    try:
        arguments = parse_arguments(sys.argv[1:])
        config = load_config(arguments)
    except ConfigError as error:
        problem = error
    try:
        env = setup(config.ddp)
        with env.together(ConfigError):
            if problem:
                raise problem
        if arguments.predict:
            predict(config, env, arguments.predict, arguments.checkpoint)
        else:
            train(config, env)
        env.close()
    except SetupError as error:
        leave(str(error), env)
    except BaseException as error:  # a rank that leaves by sys.exit fails the others too
        if env is None:
            raise
        env.crash(error)


def train(config: Config, env: Distributed) -> None:
    """The whole run: data, model, resume, epochs, test.

    Raises:
        SetupError: on every rank, for everything that the user can mend before the first step.
        RunError: for what goes wrong later, and is no bug.
    """
    env = replace(env, stop_request=StopRequest(Path(config.run.dir, config.run.name, "STOP")))
    optim, batch_size, shares = config.optim, config.data.batch_size, env.world_size * config.optim.accumulate
    dtype, autocast_dtype = PRECISIONS[optim.precision]
    with env.together(ConfigError, DataError):
        if optim.local_epochs and config.model.readout == "global":
            raise ConfigError("optim.local_epochs trains the local part first, which model.readout=global leaves out")
        if env.launched and config.ddp.static_graph and optim.accumulate > 1:
            raise ConfigError("ddp.static_graph=true needs optim.accumulate=1: torch's DDP fails with both")
        if batch_size % shares:
            below = batch_size // shares * shares
            raise ConfigError(
                f"data.batch_size={batch_size} does not divide by {env.world_size} ranks x {optim.accumulate} "
                f"accumulation steps: use a multiple of {shares}, such as {below or shares} or {below + shares}"
            )
        tables = load(config.data)
    fingerprint = tables.fingerprint()
    env.check_equal({"config": asdict(config), "data (hash)": fingerprint, **library_versions()})

    graph = SharedGraph(tables.graph()).to(env.device, dtype)
    dataset = KnockoutDataset(tables.perturbed, tables.perturbed_ptr, tables.y, graph.degree)
    sampler = StepSampler(tables.rows("train"), batch_size, optim.accumulate, env.world_size, env.rank, config.run.seed)
    loader = make_loader(dataset, sampler, config.data.workers, pin=env.device.type == "cuda")
    steps_per_epoch = sampler.steps_per_epoch
    total_steps = steps_per_epoch * optim.epochs
    local_epochs = 0 if config.model.readout == "local" else optim.local_epochs

    torch.manual_seed(config.run.seed)
    model = build_model(config, tables).to(env.device, dtype)
    if config.model.compile:
        model.compile()
    optimizer = build_optimizer(model, optim, env)
    scaler = torch.amp.GradScaler(env.device.type, init_scale=2.0**16 if optim.precision == "fp16" else 1.0)
    state = TrainState(model, optimizer, scaler, SkippedSteps(optim))

    folder = RunFolder(config, env, fingerprint)
    with env.together(ConfigError):
        folder.open(model)
    if (checkpoint := env.from_main(lambda: folder.checkpoint)) is not None:
        if checkpoint["config"]["optim"]["precision"] != optim.precision:
            checkpoint["scaler"] = scaler.state_dict()  # the loss scale belongs to the precision
        state.load_state_dict(checkpoint)
        optimizer.param_groups[0]["weight_decay"] = optim.weight_decay  # the configuration's, not the checkpoint's
    ranks = describe(env)
    with env.together(ConfigError):
        folder.start(state, ranks)
    ddp_model = env.wrap(model, config.ddp)
    env.check_ready(ddp_model, graph)
    env.check_equal({"parameters (hash)": state_hash(model), "batches an epoch": len(loader)})

    log.info("\n".join(ranks))
    notes = [unread_note(unread_variables()), *unread_options(config, env.launched)]
    for note in filter(None, notes):
        log.warning(f"note      {note}")
    baseline, ceiling = additive_baseline(tables), tables.noise_ceiling()
    log.info(f"data      {tables.summary()}")
    if ceiling is not None:
        log.info(f"ceiling   test Pearson {ceiling:.4f}, which is all that the noise leaves to any model")
    log.info(f"model     {sum(p.numel() for p in model.parameters()):,} parameters")
    log.info(
        f"batch     {env.world_size} ranks x {batch_size // shares} samples x {optim.accumulate} accumulation = "
        f"{batch_size}; {steps_per_epoch} steps an epoch, {total_steps} in {optim.epochs} epochs"
    )
    log.info(f"run       {folder.path}, {f'resumed at step {state.step}' if state.step else 'from the start'}")

    profile = Profile(config.log.profile_steps, env, folder.path)
    first_step, progress, next_line = state.step, "", time.monotonic() + LINE_S

    def refuse_nonfinite_steps(epoch: int, knock_out: bool) -> None:  # before anything is logged or saved
        if bad_step := state.skipped.too_many(env, state.step):
            rows = sampler.rows_in_step(bad_step - 1 - epoch * steps_per_epoch)
            bad_rows = rows_without_loss(model, graph, dataset, rows, knock_out)
            raise RunError(state.skipped.explain(bad_step, bad_rows, rows))

    for epoch in range(state.epoch(steps_per_epoch), optim.epochs):
        sampler.set_epoch(epoch, first_step=state.step - epoch * steps_per_epoch)
        knock_out = epoch >= local_epochs
        model.train()
        batches, clock = iter(loader), Clock()

        bar = tqdm(
            range(sampler.first_step, steps_per_epoch),
            desc=f"epoch {epoch + 1}/{optim.epochs}",
            disable=not (env.is_main and sys.stderr.isatty()),
            leave=False,
        )
        for step_in_epoch in bar:
            profile.step()
            if reason := env.stopping(state.step):
                refuse_nonfinite_steps(epoch, knock_out)
                folder.save(state)
                return folder.stop(state.step, epoch + 1, reason)
            seed_step(config.run.seed, state.step, env.rank)
            lr = learning_rate(state.step, total_steps, optim)
            for group in optimizer.param_groups:
                group["lr"] = lr
            num_samples = sampler.samples_in_step(step_in_epoch)
            loss = torch.zeros((), device=env.device, dtype=dtype)
            for micro in range(optim.accumulate):
                env.phase("data")
                with clock.waiting_for_data():
                    batch = next(batches)
                env.phase("transfer")
                batch = batch.to(env.device, non_blocking=True)
                with env.accumulating(ddp_model, last=micro == optim.accumulate - 1):
                    env.phase("forward")
                    with torch.autocast(env.device.type, autocast_dtype, enabled=autocast_dtype is not None):
                        prediction = ddp_model(graph, batch, knock_out)
                    # The mean over the samples of the whole step: world_size undoes DDP's average over ranks.
                    part = squared_error(prediction, batch, model) / num_samples
                    loss += part.detach()
                    env.phase("backward")
                    # A loss that is not finite makes every gradient NaN, on every rank.
                    scaler.scale(part * env.world_size * (1 + 0 * part.detach())).backward()
            env.phase("optimiser")
            if state.step == first_step and env.launched and not config.ddp.find_unused_parameters:
                with env.together(ConfigError):
                    refuse_unused_parameters(model)
            grad_norm = optimizer_step(model, optimizer, scaler, optim)
            state.step += 1
            state.skipped.judge(loss, grad_norm, scaler)
            clock.count(num_samples)

            end_of_epoch = state.step % steps_per_epoch == 0
            log_now = state.step % config.log.every_steps == 0 or end_of_epoch
            save_now = state.step % config.checkpoint.every_steps == 0 and not end_of_epoch
            if log_now or save_now:
                refuse_nonfinite_steps(epoch, knock_out)
            if log_now:
                train_loss = env.sum(loss).item()
                timings = clock.read(env.device)
                folder.write(
                    "train", state.step, epoch + 1,
                    loss=train_loss, lr=lr, grad_norm=grad_norm.item(), skipped=state.skipped.total, **timings,
                )  # fmt: skip
                progress = f"  loss {train_loss:.4f}  {timings['samples_per_s']:,.0f} samples/s"
                bar.set_postfix_str(f"{progress.strip()}  val Pearson {shown(folder.last('val', 'pearson'))}")
                if time.monotonic() > next_line and not end_of_epoch:
                    next_line = time.monotonic() + LINE_S
                    left = timedelta(seconds=round((total_steps - state.step) * timings["step_ms"] / 1e3))
                    if bar.disable:
                        log.info(f"step {state.step}/{total_steps}{progress}  {left} left")
            if save_now:
                folder.save(state)

        env.phase("evaluation", state.step)
        val = evaluate(model, graph, dataset, baseline, tables.rows("val"), batch_size, env, knock_out)
        if reason := env.stopping(state.step):
            folder.save(state)
            return folder.stop(state.step, epoch + 1, reason)
        improved = knock_out and (state.best is None or rank_of(val) > rank_of(state.best))
        if improved:
            state.best = {"step": state.step, **val}
        state.evaluated = state.step
        folder.write("val", state.step, epoch + 1, **val)
        folder.save(state, improved)
        folder.draw()
        log.info(
            f"epoch {epoch + 1}/{optim.epochs}  step {state.step}{progress}  val loss {val['loss']:.4f}  "
            f"val Pearson {shown(val['pearson'])} (additive baseline {shown(val['baseline_pearson'])})"
        )

    profile.finish()
    if state.best:
        model.load_state_dict(env.from_main(lambda: folder.best_model(state.best["step"])))
    test = evaluate(model, graph, dataset, baseline, tables.rows("test"), batch_size, env)
    if reason := env.stopping(state.step):
        return folder.stop(state.step, optim.epochs, reason)
    best_step = state.best["step"] if state.best else state.step
    folder.write("test", state.step, optim.epochs, **test, noise_ceiling=ceiling, best_step=best_step)
    folder.status("finished", state.step, optim.epochs)
    limit = "" if ceiling is None else f", noise ceiling {ceiling:.4f}"
    log.info(
        f"test      Pearson {shown(test['pearson'])}, additive baseline {shown(test['baseline_pearson'])}{limit} "
        f"({test['n']} samples, model of step {best_step})"
    )
    log.info(f"run       {folder.path}")


def build_model(config: Config, tables: Tables) -> KnockoutGNN:
    y = tables.y[tables.rows("train")]
    spread = y.std(correction=0).item()
    spread = spread if spread > 1e-30 else 1.0  # constant scores
    return KnockoutGNN(config.model, len(tables.genes), len(tables.relations), y.mean().item(), spread)


def build_optimizer(model: nn.Module, optim: OptimConfig, env: Distributed) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if optim.zero and env.launched:
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=optim.lr, fused=True)
    # The fused one obeys GradScaler's verdict on the device; the others (ZeRO's, too) wait for it.
    return torch.optim.AdamW(groups, lr=optim.lr, fused=True)


def state_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_unused_parameters(model: nn.Module) -> None:
    """DDP waits for the gradient of every parameter, and without one for ever or with a riddle."""
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if unused:
        raise ConfigError(
            f"the loss of the first step does not depend on {', '.join(unused)}: use or delete these parameters, "
            "or set ddp.find_unused_parameters=true"
        )


def squared_error(prediction: Tensor, batch: Data, model: KnockoutGNN) -> Tensor:
    """Sum over the batch of the weighted squared errors, in units of the training targets' variance."""
    return (batch.weight * ((prediction - batch.y) / model.y_std).square()).sum()


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, optim: OptimConfig
) -> Tensor:
    """Unscale, clip, step, clear; returns the gradient norm before clipping.

    The scaler lets the optimiser step only if all gradients are finite. Without fp16 its scale stays 1.
    """
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
    scaler.step(optimizer)
    scaler.update(None if optim.precision == "fp16" else 1.0)
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


class SkippedSteps:
    """Counts the steps whose loss or gradients were not finite; a step leaves its verdict on the device, for later.

    Under fp16 a step whose gradients overflowed at a scale over 1 is GradScaler's routine and does not count.
    """

    def __init__(self, optim: OptimConfig):
        self.limit = optim.max_skips if optim.on_nonfinite == "skip" else 1
        self.total, self.in_row, self.last = 0, 0, 0
        self.verdicts: list[Tensor] = []  # of the steps since the last look, by this rank

    def judge(self, loss: Tensor, grad_norm: Tensor, scaler: torch.amp.GradScaler) -> None:
        scale = scaler.scale(torch.ones((), device=loss.device))
        self.verdicts.append(~loss.isfinite() | (~grad_norm.isfinite() & (scale <= 1)))

    def too_many(self, env: Distributed, step: int) -> int:
        """The first step up to `step` that must be the last one, as all ranks agree, or 0."""
        if not self.verdicts:
            return 0
        verdicts, self.verdicts = env.agree(*torch.stack(self.verdicts).long().tolist()), []
        for number, bad in enumerate(verdicts, start=step - len(verdicts) + 1):
            self.total += bad
            self.in_row = (self.in_row + 1) * bad
            if bad:
                self.last = number
            if self.in_row >= self.limit:
                return number
        if any(verdicts):
            log.warning(f"skipped   {self.total} steps so far that were not finite, the last one is step {self.last}")
        return 0

    def state_dict(self) -> list[int]:
        return [self.total, self.in_row, self.last]

    def load_state_dict(self, state: list[int]) -> None:
        self.total, self.in_row, self.last = state
        self.in_row = min(self.in_row, self.limit - 1)  # the limit may have been higher

    def explain(self, step: int, bad_rows: list[int], rows: Tensor) -> str:
        what = f"the prediction or score of rows {shortened(bad_rows)} is not"
        if not bad_rows:
            what = f"a gradient of rows {shortened(rows.tolist())} is not"
        times = f" for {self.limit} steps in a row" if self.limit > 1 else ", see optim.on_nonfinite"
        return f"step {step} is not finite{times}: {what}; lower optim.lr or optim.clip, or mend the rows"


def shortened(items: list[int]) -> str:
    return ", ".join(map(str, items[:10])) + (f" and {len(items) - 10} more" if len(items) > 10 else "")


@torch.no_grad()
def rows_without_loss(
    model: KnockoutGNN, graph: SharedGraph, dataset: KnockoutDataset, rows: Tensor, knock_out: bool
) -> list[int]:
    """Those of `rows` whose squared error is not finite; the model is as it was before their step or a few steps on."""
    model.eval()
    bad = []
    for row in rows.tolist():
        batch = dataset[row].to(graph.device)
        if not squared_error(model(graph, batch, knock_out), batch, model).isfinite():
            bad.append(row)
    return bad


@dataclass
class TrainState:
    """All that a checkpoint restores."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    skipped: SkippedSteps
    step: int = 0
    evaluated: int = 0  # the step of the last validation
    best: dict | None = None  # its metrics and its step

    def epoch(self, steps_per_epoch: int) -> int:
        """The epoch to go on with; one that ended without its validation is not over."""
        epoch, steps = divmod(self.step, steps_per_epoch)
        return epoch - (steps == 0 and self.evaluated < self.step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped.state_dict(),
            "step": self.step,
            "evaluated": self.evaluated,
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.skipped.load_state_dict(state["skipped"])
        self.step, self.evaluated, self.best = state["step"], state["evaluated"], state["best"]


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Linear warm-up, then a half cosine down to 0; a pure function of the step, so a resumed run needs no state."""
    warmup = max(1, round(optim.warmup * total_steps))
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Every step draws its random numbers from (seed, step, rank), so no generator state needs saving."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))


@torch.no_grad()
def evaluate(
    model: KnockoutGNN,
    graph: SharedGraph,
    dataset: KnockoutDataset,
    baseline: Tensor,
    rows: Tensor,
    batch_size: int,
    env: Distributed,
    knock_out: bool = True,
) -> dict[str, Any]:
    """Loss, mse, Pearson and the additive baseline's Pearson over all ranks' rows, the same on every rank.

    The bare model runs on this rank's shard without communication; float64 moments are summed once at the end.
    """
    model.eval()
    batches = shard(rows, math.ceil(batch_size / env.world_size), env.world_size, env.rank)
    moments = torch.zeros(13, dtype=torch.float64, device=env.device)
    for batch in make_loader(dataset, batches, workers=0, pin=env.device.type == "cuda"):
        env.phase("evaluation")
        if env.asked_to_stop:  # all ranks will agree on that after the exchange below; nobody wants the result
            break
        reference = baseline[batch.index].to(env.device)
        batch = batch.to(env.device, non_blocking=True)
        prediction = model(graph, batch, knock_out)
        # Centred by a constant, so that squares lose no digits.
        values = torch.stack([batch.y.double(), prediction.double(), reference]) - model.y_mean.double()
        count = values.new_full((1,), values.size(1))
        moments += torch.cat([count, values.sum(1), (values @ values.T).flatten()])
    moments = env.sum(moments)
    n, mean, second = moments[0], moments[1:4] / moments[0], moments[4:].view(3, 3) / moments[0]
    covariance = second - torch.outer(mean, mean)
    std = covariance.diagonal().clamp(min=0).sqrt()
    correlation = (covariance / torch.outer(std, std))[0].tolist()
    pearson, baseline_pearson = (value if math.isfinite(value) else None for value in correlation[1:])
    mse = (second[0, 0] - 2 * second[0, 1] + second[1, 1]).item()
    return {
        "loss": mse / model.y_std.item() ** 2,
        "mse": mse,
        "pearson": pearson,
        "baseline_pearson": baseline_pearson,
        "n": int(n.item()),
    }


def rank_of(result: dict[str, Any]) -> tuple[float, float]:
    """The larger, the better: Pearson, and the loss where Pearson is undefined or equal."""
    return -2.0 if result["pearson"] is None else result["pearson"], -result["loss"]


def shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


class Clock:
    """Where the time of the steps since the last `read` went."""

    def __init__(self):
        self.start, self.data_s, self.steps, self.samples = time.perf_counter(), 0.0, 0, 0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.data_s += time.perf_counter() - start

    def count(self, samples: int) -> None:
        self.steps += 1
        self.samples += samples

    def read(self, device: torch.device) -> dict[str, float]:
        elapsed = time.perf_counter() - self.start
        unit = 2**20 if sys.platform == "darwin" else 2**10  # of ru_maxrss, a MB in it
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        row = {
            "samples_per_s": round(self.samples / elapsed, 1),
            "data_ms": round(1e3 * self.data_s / self.steps, 3),
            "step_ms": round(1e3 * elapsed / self.steps, 3),
            "memory_mb": round(torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else memory, 1),
        }
        self.__init__()
        return row


class Profile:
    """Traces some steps of this process, after the first three: a Chrome trace a rank, and a summary in the log.

    While it runs, a phase begins only when the device has done the one before.
    """

    SKIPPED = 3  # steps in which memory is allocated and DDP plans its buckets
    PHASES = ("data", "transfer", "forward", "backward", "optimiser", "agreement")

    def __init__(self, steps: int, env: Distributed, path: Path):
        self.env, self.path = env, path
        self.last = self.SKIPPED + steps if steps else 0
        self.steps, self.profiler = 0, None

    def step(self) -> None:
        """A step begins."""
        if self.profiler and self.steps == self.last:
            self.finish()
        self.steps += 1
        if self.profiler is None and self.SKIPPED < self.steps <= self.last:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
            self.seconds = dict.fromkeys(self.PHASES, 0.0)
            self.phase, self.range, self.since = "", contextlib.ExitStack(), time.perf_counter()
            self.env.on_phase.append(self.enter)

    def enter(self, phase: str, step: int | None = None) -> None:
        if self.env.device.type == "cuda":
            torch.cuda.synchronize()
        self.range.close()
        since, self.since = self.since, time.perf_counter()
        if self.phase in self.seconds:
            self.seconds[self.phase] += self.since - since
        self.range.enter_context(torch.profiler.record_function(phase))
        self.phase = phase

    def finish(self) -> None:
        """Write the trace and the summary, if it runs."""
        if self.profiler is None or self.enter not in self.env.on_phase:
            return
        self.enter("end")
        self.range.close()
        self.env.on_phase.remove(self.enter)
        self.profiler.stop()
        with writing(self.path / f"trace.rank{self.env.rank}.json"):
            self.profiler.export_chrome_trace(str(self.path / f"trace.rank{self.env.rank}.json"))
        steps = min(self.steps, self.last) - self.SKIPPED
        mine = {phase: 1e3 * seconds / steps for phase, seconds in self.seconds.items()}
        waiting = min(exposed_ms(self.profiler.events(), self.env.device) / steps, mine["backward"])
        mine["backward"] -= waiting
        mine["communication not hidden"] = waiting
        ranks = self.env.gather(mine)
        mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in mine}
        total = sum(mean.values())
        shares = ", ".join(f"{name} {100 * value / total:.1f} %" for name, value in mean.items())
        log.info(f"profile   {steps} steps of {total:.1f} ms: {shares}")
        own = [sum(rank[name] for name in self.PHASES if name != "agreement") for rank in ranks]
        slowest = max(range(len(own)), key=own.__getitem__)
        log.info(
            f"profile   the slowest is rank {slowest} with {own[slowest]:.1f} ms of its own a step, the median is "
            f"{statistics.median(own):.1f}; traces for ui.perfetto.dev in {self.path}/trace.rank*.json"
        )


def exposed_ms(events: Iterable, device: torch.device) -> float:
    """Milliseconds in which gradients were exchanged and this rank computed nothing."""
    exchange, busy = [], []
    for event in events:
        kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        computes = kernel if device.type == "cuda" else event.name.startswith(("aten::", "autograd::", "torch::"))
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(("gloo:", "ncclDevKernel")):
            exchange.append(span)
        elif computes or event.name == "agreement":
            busy.append(span)
    return (covered(exchange + busy) - covered(busy)) / 1e3


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    length, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


class RunFolder:
    """The run's files, written by global rank 0 alone, but for each rank's own log."""

    def __init__(self, config: Config, env: Distributed, fingerprint: str):
        self.config, self.env, self.fingerprint = config, env, fingerprint
        self.path = Path(config.run.dir) / config.run.name
        self.checkpoints = self.path / "checkpoints"
        self.checkpoint: dict | None = None
        self.rows: list[dict] = []
        self.tensorboard = None

    def open(self, model: nn.Module) -> None:
        """Rank 0: take the folder for this run and find the checkpoint to resume from, if any, as `self.checkpoint`.

        Raises:
            ConfigError: a folder that cannot be written or is in use, or a checkpoint that does not fit this run.
        """
        if not self.env.is_main:
            return
        resume = self.config.run.resume
        fresh = resume == "never" and not self.env.noted("run folder")  # torchrun's restarts go on in their own
        if fresh and self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(f"run.resume=never but {self.path} is not empty: choose another run.name")
        self.branch = resume not in ("auto", "never") and not self._is_same_run()
        if self.branch:
            self.checkpoint = read_checkpoint(resume)
            if self._step_files() and not any(path.samefile(resume) for path in self.checkpoints.iterdir()):
                raise ConfigError(f"{self.path} holds another run than {resume} comes from: choose another run.name")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "log.rank0.txt").open("a")
            self._lock()
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {self.path}: {error.strerror}; set run.dir") from None
        if fresh and (self.path / "config.yaml").exists():
            raise ConfigError(f"run.resume=never but another process has begun in {self.path}: choose another run.name")
        self.env.note("run folder")
        if not self.branch:
            self.checkpoint = self._newest_checkpoint()
        if self.checkpoint is not None:
            self._check_fits(model)
            best, path = self.checkpoint["best"], self.checkpoints / "best.pt"
            try:
                if not path.exists() or (best and read_checkpoint(path)["step"] != best["step"]):
                    self.checkpoint["best"] = None  # of another branch
            except ConfigError as error:
                log.warning(f"the best model is chosen anew: {error}")
                self.checkpoint["best"] = None

    def _lock(self, patience_s: float = 5.0) -> None:
        """Workers whose torchrun was killed need a moment to leave."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process trains in {self.path}: wait for it or choose another run.name"
                    ) from None
            time.sleep(0.1)

    def start(self, state: TrainState, ranks: list[str]) -> None:
        """Open each rank's log; write down what runs where; drop what lies beyond the step, which will come again."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(self.path / f"log.rank{self.env.rank}.txt")
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            logging.getLogger().addHandler(handler)
            if self.env.is_main:
                self._start_files(state, ranks)
                self.env.on_failure.append(self.fail)
        except OSError as error:
            where = error.filename or self.path
            raise ConfigError(f"cannot write {where}: {error.strerror}; set run.dir or run.name") from None

    def _start_files(self, state: TrainState, ranks: list[str]) -> None:
        step = state.step
        if self.branch:  # what it replaces must not come back
            for path in self._step_files():
                if step_of(path) > step:
                    path.unlink()
        if state.best is None:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.checkpoints / "best.pt", self.checkpoints / "best.old.pt")
        write_atomically(self.path / "config.yaml", yaml.safe_dump(plain(self.config), sort_keys=False))
        write_atomically(self.path / "environment.txt", environment(ranks))
        metrics = self.path / "metrics.jsonl"
        for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else []:
            with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):  # the last line of a killed run
                row = json.loads(line)
                last = {"event": math.inf, "train": step, "val": state.evaluated, "test": -1}[row["kind"]]
                if 0 <= row["step"] <= last and row["epoch"] >= 0:
                    self.rows.append(row)
        write_atomically(metrics, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.metrics = metrics.open("a")
        if self.config.log.tensorboard:
            self.tensorboard = summary_writer(self.path / "tensorboard", step)
        epoch = self.rows[-1]["epoch"] if self.rows else 0
        event = "resumed" if step else "started"
        self.write("event", step, epoch, event=event, time=time.time(), world_size=self.env.world_size)
        self.status("running", step, epoch)

    def write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        """Append a row to metrics.jsonl; a number that is not finite becomes null."""
        if self.env.is_main:
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self.rows.append({"kind": kind, "step": step, "epoch": epoch, **values})
            with writing(self.path / "metrics.jsonl"):
                self.metrics.write(json.dumps(self.rows[-1]) + "\n")
                self.metrics.flush()
                for key, value in values.items() if self.tensorboard and kind != "event" else ():
                    if value is not None:
                        self.tensorboard.add_scalar(f"{kind}/{key}", value, step)

    def last(self, kind: str, key: str) -> float | None:
        """Of the newest row of that kind; on rank 0, which alone keeps the rows."""
        return next((row.get(key) for row in reversed(self.rows) if row["kind"] == kind), None)

    def save(self, state: TrainState, improved: bool = False) -> None:
        """Write the checkpoint of this step, also as best.pt if `improved`; it appears whole or not at all.

        Every rank must call it: under ZeRO each has a part of the optimiser state.

        Raises:
            RunError: on every rank; the checkpoints before this one are as they were.
        """
        self.env.phase("save", state.step)
        if isinstance(state.optimizer, ZeroRedundancyOptimizer):
            state.optimizer.consolidate_state_dict()
        with self.env.together(RunError):
            if self.env.is_main:
                self._save({**state.state_dict(), "config": plain(self.config), "data": self.fingerprint}, improved)

    def _save(self, checkpoint: dict[str, Any], improved: bool) -> None:
        step = checkpoint["step"]
        for name, tensor in checkpoint["model"].items():
            if not tensor.isfinite().all():
                raise RunError(f"{name} is not finite at step {step}, which is not saved: lower optim.lr")
        temporary, link = self.checkpoints / "saving.tmp", self.checkpoints / "best.tmp"
        with writing(self.checkpoints / f"step_{step:08d}.pt"):
            os.fsync(self.metrics.fileno())  # no checkpoint without the rows that led to it
            if self.tensorboard:
                self.tensorboard.flush()
            try:
                with temporary.open("wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()  # its space is needed to say why
                raise
            if improved:
                link.unlink(missing_ok=True)
                os.link(temporary, link)
                os.replace(link, self.checkpoints / "best.pt")
            os.replace(temporary, self.checkpoints / f"step_{step:08d}.pt")
            sync_folder(self.checkpoints)
            done = [path for path in self._step_files() if step_of(path) <= step]
            for path in done[self.config.checkpoint.keep_last :]:
                path.unlink()

    def best_model(self, step: int) -> dict[str, Tensor]:
        """The weights of best.pt, which must be of that step."""
        try:
            best = read_checkpoint(self.checkpoints / "best.pt")
        except ConfigError as error:
            raise RunError(f"{error}; the same command tests the last model instead") from None
        if best["step"] != step:
            raise RunError(f"{self.checkpoints}/best.pt is of step {best['step']}, not {step}: somebody replaced it")
        return best["model"]

    def status(self, state: str, step: int, epoch: int, reason: str = "") -> None:
        if self.env.is_main:
            if self.tensorboard:
                self.tensorboard.flush()
            row = {"state": state, "step": step, "epoch": epoch, "reason": reason}
            with writing(self.path / "status.json"):
                write_atomically(self.path / "status.json", json.dumps(row) + "\n")

    def stop(self, step: int, epoch: int, reason: str) -> None:
        """The end of a run that was asked to stop and has saved."""
        if self.env.local_rank == 0:  # each machine may have a disk of its own
            with contextlib.suppress(OSError):
                (self.path / "STOP").unlink()
        self.write("event", step, epoch, event="stopped", reason=reason)
        self.status("stopped", step, epoch, reason)
        log.info(f"stopped   at step {step}, asked by {reason}: the same command goes on from there")

    def fail(self, reason: str) -> None:
        """The end of a run that cannot go on; perhaps nothing can be written any more."""
        step, epoch = self.rows[-1]["step"], self.rows[-1]["epoch"]
        with contextlib.suppress(RunError):
            self.status("failed", step, epoch, reason)
        with contextlib.suppress(RunError):
            self.write("event", step, epoch, event="failed", reason=reason)

    def draw(self) -> None:
        if self.env.is_main:
            with writing(self.path / "curves.svg"):
                write_atomically(self.path / "curves.svg", curves_svg(self.rows))

    def _step_files(self) -> list[Path]:
        """Newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), key=step_of, reverse=True)

    def _newest_checkpoint(self) -> dict | None:
        for path in [*self._step_files(), *self.checkpoints.glob("best.pt")]:
            try:
                state = read_checkpoint(path)
                if path.name not in ("best.pt", f"step_{state['step']:08d}.pt"):
                    raise ConfigError(f"{path} is of step {state['step']}")
                return state
            except ConfigError as error:
                log.warning(f"passed over a damaged checkpoint: {error}")
        return None

    def _is_same_run(self) -> bool:
        """Whether the run of this very configuration, `run.resume` included, is in the folder and only goes on."""
        try:
            return read_yaml(self.path / "config.yaml") == plain(self.config) and bool(self._step_files())
        except ConfigError:
            return False

    def _check_fits(self, model: nn.Module) -> None:
        """Raise `ConfigError` if the checkpoint belongs to other data, another model or another order of samples."""
        state, config = self.checkpoint, plain(self.config)
        check_model_state(state["model"], model, self.path)
        for section, name in (("run", "seed"), ("data", "batch_size")):
            then, value = state["config"][section][name], config[section][name]
            if then != value:
                raise ConfigError(
                    f"{self.path} was trained with {section}.{name}={then}, not {value}: set another run.name"
                )
        if state["data"] != self.fingerprint:
            raise ConfigError(f"{self.path} was trained on other data or splits: set another run.name")


def read_checkpoint(path: str | Path) -> dict:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        keys = {"model", "optimizer", "scaler", "skipped", "step", "evaluated", "best", "config", "data"}
        if not keys <= set(state):
            raise ValueError("not a checkpoint of train.py")
    except FileNotFoundError:
        raise ConfigError(f"the checkpoint {path} does not exist") from None
    except Exception as error:  # a damaged file fails in many ways
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{path} is not a readable checkpoint: {reason[0].split('. ')[0]}") from None
    return state


def check_model_state(state: dict[str, Tensor], model: nn.Module, where: str | Path) -> None:
    """Raise `ConfigError` naming the keys or shapes in which a saved model differs from `model`."""
    here = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    there = {key: tuple(value.shape) for key, value in state.items()}
    differ = [
        f"{key} is {there.get(key, 'absent')} there and {here.get(key, 'absent')} here"
        for key in here | there
        if here.get(key) != there.get(key)
    ]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"the model saved in {where} is another one: {'; '.join(differ[:3])}{more}")


def summary_writer(path: Path, step: int) -> Any:
    """TensorBoard's, which drops what an earlier process wrote beyond `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("log.tensorboard=true needs the package tensorboard: install it, or set false") from None
    return SummaryWriter(str(path), purge_step=step + 1)


def curves_svg(rows: list[dict]) -> str:
    """Loss and Pearson against the optimiser step, in two panels; a dotted line where the run was resumed."""
    orange, blue, grey = "#e8590c", "#228be6", "#868e96"
    panels = [
        (
            "Squared error / variance of the training scores",
            [("train", "loss", "training", blue, ""), ("val", "loss", "validation", orange, "")],
        ),
        (
            "Pearson correlation, validation",
            [
                ("val", "pearson", "model", orange, ""),
                ("val", "baseline_pearson", "additive baseline", grey, "6 4"),
            ],
        ),
    ]
    last = max((row["step"] for row in rows), default=0) or 1
    restarts = sorted({row["step"] for row in rows if row.get("event") == "resumed"})
    top, width, height = 64, 380, 240
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 360" font-family="sans-serif" font-size="12">'
        "<style>text{fill:#495057} @media(prefers-color-scheme:dark){text{fill:#ced4da}}</style>"
    ]

    def text(x: float, y: float, content: str, more: str = "") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{content}</text>')

    for panel, (title, curves) in enumerate(panels):
        left = 56 + 460 * panel
        points = {
            (kind, key): [(row["step"], row[key]) for row in rows if row["kind"] == kind and row.get(key) is not None]
            for kind, key, *_ in curves
        }
        ticks = nice_ticks([value for curve in points.values() for _, value in curve] or [0.0, 1.0])
        low, high = ticks[0], ticks[-1]

        def place(step: float, value: float, left: int = left, low: float = low, high: float = high) -> str:
            return f"{left + width * step / last:.1f},{top + height * (high - value) / (high - low):.1f}"

        text(left, 20, title, 'font-weight="bold"')
        for tick in ticks:
            start = place(0, tick)
            parts.append(f'<path d="M{start}h{width}" stroke="{grey}" stroke-opacity=".3"/>')
            text(left - 8, float(start.split(",")[1]) + 4, f"{tick:.4g}", 'text-anchor="end"')
        for step in nice_ticks([0, last]):
            if step <= last:
                text(left + width * step / last, top + height + 18, f"{step:,.0f}", 'text-anchor="middle"')
        text(left + width / 2, top + height + 38, "optimiser step", 'text-anchor="middle"')
        for step in restarts:
            parts.append(f'<path d="M{place(step, high)}v{height}" stroke="{grey}" stroke-dasharray="1 4"/>')
        legend = left
        for kind, key, label, colour, dashes in curves:
            line = " ".join(place(*point) for point in points[kind, key])
            style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
            parts.append(f'<polyline points="{line}" {style}/><path d="M{legend} 40h22" {style}/>')
            text(legend + 28, 44, label)
            legend += 54 + 6.5 * len(label)
        if restarts:
            parts.append(f'<path d="M{legend:.0f} 40h22" stroke="{grey}" stroke-dasharray="1 4"/>')
            text(legend + 28, 44, "resumed")
    return "\n".join([*parts, "</svg>\n"])


def nice_ticks(values: list[float]) -> list[float]:
    """Four to nine round numbers, evenly spaced, that span `values`."""
    low, high = min(values), max(values)
    span = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-9)
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 7)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def predict(config: Config, env: Distributed, table: str, checkpoint: str) -> None:
    """Write a prediction for each row of `table`, in its order, to `<table>.predictions.tsv` in the working folder."""
    with env.together(ConfigError, DataError):
        state = read_checkpoint(checkpoint)
        tables = load(config.data)
        if state["data"] != tables.fingerprint():
            raise ConfigError(f"{checkpoint} was trained on other data than the configuration names")
        knockouts, _, _ = read_knockouts(table, scored=False)
        model = build_model(config, tables)
        check_model_state(state["model"], model, checkpoint)
    model.load_state_dict(state["model"])
    model.to(env.device).eval()
    graph = SharedGraph(tables.graph()).to(env.device)

    number = {gene: i for i, gene in enumerate(tables.genes)}
    known = torch.tensor([i for i, genes in enumerate(knockouts) if all(gene in number for gene in genes)])
    perturbed, ptr = pack([[number[gene] for gene in genes if gene in number] for genes in knockouts])
    dataset = KnockoutDataset(perturbed, ptr, torch.zeros(len(knockouts)), graph.degree)
    predicted = {}
    with torch.no_grad():
        for batch in make_loader(dataset, shard(known, config.data.batch_size, env.world_size, env.rank), 0, pin=False):
            env.phase("evaluation")
            predicted.update(zip(batch.index.tolist(), model(graph, batch.to(env.device)).tolist(), strict=True))
    by_row = {row: value for part in env.gather(predicted) for row, value in part.items()}

    output = Path(Path(table).name.removesuffix(".gz").removesuffix(".tsv") + ".predictions.tsv")
    with env.together(ConfigError):
        if env.is_main:
            lines = ["genes\tprediction"]
            lines += [f"{','.join(genes)}\t{by_row.get(row, '')}" for row, genes in enumerate(knockouts)]
            try:
                write_atomically(output, "\n".join(lines) + "\n")
            except OSError as error:
                raise ConfigError(f"cannot write {output.absolute()}: {error.strerror}") from None
    unknown = sorted({gene for genes in knockouts for gene in genes} - set(number))
    if unknown:
        log.warning(
            "%d rows have no prediction, their genes are not in the graph: %s%s",
            len(knockouts) - len(known), ", ".join(unknown[:10]), " ..." if len(unknown) > 10 else "",
        )  # fmt: skip
    log.info("%d predictions in %s", len(known), output)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    default = Path(__file__).with_name("config.yaml")
    options = default.read_text() if default.exists() else ""
    parser = Parser(description=__doc__, epilog=options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="an option of config.yaml")
    parser.add_argument(
        "--config", metavar="FILE", help="default: config.yaml beside train.py, or the checkpoint's own"
    )
    parser.add_argument(
        "--predict", metavar="TABLE", help="predict for this table of knock-out sets instead of training"
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="the trained model for --predict")
    arguments = parser.parse_intermixed_args(words)
    if bool(arguments.predict) != bool(arguments.checkpoint):
        raise ConfigError("--predict TABLE and --checkpoint FILE go together")
    return arguments


def load_config(arguments: argparse.Namespace) -> Config:
    """The file's values, then the command line's over them; what neither names keeps its default.

    Raises:
        ConfigError: an unreadable file, an unknown option (with the nearest known one), a wrong type or value.
    """
    if arguments.checkpoint and arguments.config is None:
        source, values = arguments.checkpoint, read_checkpoint(arguments.checkpoint)["config"]
    else:
        source = str(Path(__file__).with_name("config.yaml")) if arguments.config is None else arguments.config
        values = read_yaml(source)
    known = {f"{section.name}.{f.name}": f.type for section in fields(Config) for f in fields(section.type)}
    given: dict[str, Any] = {}
    for section, options in values.items():
        if not isinstance(options, dict):
            raise ConfigError(f"{source}: {section} must be a section of options, not {options!r}")
        given.update({f"{section}.{name}": (source, value) for name, value in options.items()})
    for word in arguments.overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' on the command line is not of the form section.key=value")
        given[key] = ("the command line", text if known.get(key) is str else parse_scalar(key, text))
    sections: dict[str, dict[str, Any]] = {section.name: {} for section in fields(Config)}
    for key, (where, value) in given.items():
        if key not in known:
            raise ConfigError(f"unknown option {key} in {where}: did you mean {nearest(key, known)}?")
        section, name = key.split(".")
        sections[section][name] = converted(key, value, known[key])
    try:
        return Config(**{section.name: section.type(**sections[section.name]) for section in fields(Config)})
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_yaml(path: str) -> dict:
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must hold sections of options, not {values!r}")
    return values or {}


def parse_scalar(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{key}: cannot make sense of '{text}'") from None


def nearest(key: str, known: Iterable[str]) -> str:
    """The known option most like `key`, which may lack its section."""

    def likeness(option: str) -> float:
        forms = (option, option.split(".")[1])
        return max(difflib.SequenceMatcher(None, key, form).ratio() for form in forms)

    return max(known, key=likeness)


def converted(key: str, value: Any, kind: type) -> Any:
    """`value` as the option's type, where that loses nothing."""
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):  # YAML reads 1e-3 as text
            if math.isfinite(float(value)):
                return float(value)
    elif kind == tuple[int, ...] and isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    elif type(value) is kind:
        return value
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    raise ConfigError(f"{key} must be {names.get(kind, 'a list of whole numbers')}, not {value!r}")


def unread_options(config: Config, launched: bool) -> list[str]:
    """A sentence for each option that is not at its default and has no effect beside the others."""
    tsv, local = config.data.source == "tsv", config.model.readout == "local"
    unread = {
        "data.source=tsv": ("data.preset", "data.synthetic_seed") if tsv else (),
        "data.source=synthetic": () if tsv else ("data.edges", "data.perturbations", "data.undirected"),
        "model.readout=local": ("model.checkpointing", "model.block", "optim.local_epochs") if local else (),
        "model.message_passing=expanded": ("model.block",) if config.model.message_passing == "expanded" else (),
        "optim.on_nonfinite=stop": ("optim.max_skips",) if config.optim.on_nonfinite == "stop" else (),
        "a single process": [f"ddp.{f.name}" for f in fields(DDPConfig) if f.name != "device_ids"]
        + ["optim.zero"] if not launched else (),
    }  # fmt: skip
    here, default = plain(config), plain(Config())

    def is_set(option: str) -> bool:
        section, name = option.split(".")
        return here[section][name] != default[section][name]

    return [f"{o} is set but has no effect with {why}" for why, options in unread.items() for o in options if is_set(o)]


def plain(config: Config) -> dict:
    """The configuration as YAML and a checkpoint hold it: dicts, lists and scalars."""
    return json.loads(json.dumps(asdict(config)))


def environment(ranks: list[str]) -> str:
    def git(*words: str) -> str:
        result = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD") or "none"
        commit += " with uncommitted changes" if git("status", "--porcelain") else ""
    except OSError:
        commit = "unknown, git is not installed"
    lines = [
        f"command: {shlex.join([sys.executable, *sys.argv])}",
        f"git commit: {commit}",
        f"python: {platform.python_version()} on {platform.platform()}",
        *(f"{name}: {version(name)}" for name in ("torch", "torch-geometric", "pyyaml", "tqdm")),
        f"cuda: {torch.version.cuda}",
        *ranks,
    ]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence that a file of the running run cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save wraps what it meets
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise RunError(
            f"cannot write {path}: {getattr(cause, 'strerror', cause)}; "
            "mend that, and the same command goes on from the last checkpoint"
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


if __name__ == "__main__":
    main()
