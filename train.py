"""Trains a knock-out GNN on one large shared graph, with one process or many.

    python train.py                                         one process
    torchrun --standalone --nproc_per_node=4 train.py       one process per GPU, or CPU over gloo
    python train.py --predict TABLE --checkpoint FILE       predictions for a table of knock-outs

Options are listed in config.yaml; `section.key=value` on the command line overrides the file. The
same command starts and resumes a run; a signal or a file STOP in the run folder ends it cleanly.
Exit status: 0 finished or stopped on request, 1 failure, 2 wrong configuration or input data.
"""

import argparse
import contextlib
import copy
import difflib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import resource
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

# OpenMP reads this when torch is imported; by default, idle threads spin on others' cores.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch_geometric.data import Data
from tqdm import tqdm

import data
from data import Baseline, DataConfig, DataError, KnockoutDataset, StepSampler, Tables
from ddp_setup import (
    DDPConfig,
    Distributed,
    RunError,
    StopRequest,
    UserError,
    describe,
    library_versions,
    run,
)
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig, plan_route

log = logging.getLogger("train")

# dtype of parameters and optimiser, and of autocast (None: off)
PRECISIONS = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
TQDM_OPTIONS = {} if sys.stderr.isatty() else {"mininterval": 30, "delay": 30}  # short log files
PROFILE = 20  # targets: with more of them, a row is a profile
MUST_STAY = ("run.seed", "data.batch_size", "optim.loss", "optim.lr_mult")  # in a resumed run
ROWS_OF = {"embedding": "nodes", "identity": "nodes", "gate": "relations"}
MAX_SKIPS = 10  # non-finite steps in a row after which even optim.on_nonfinite=skip ends the run


# ---- Configuration; config.yaml documents the options --------------------------------------------
@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    dir: str = "runs"
    seed: int = 0
    deterministic: bool = False
    resume: str = "auto"
    init: str = ""


@dataclass(frozen=True)
class OptimConfig:
    epochs: int = 20
    lr: float = 0.01
    warmup: float = 0.05
    weight_decay: float = 0.1
    lr_mult: dict = field(default_factory=dict)
    clip: float = 1.0
    patience: int = 0
    loss: Literal["squared", "binary"] = "squared"
    accumulate: int = 1
    zero: bool = False
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    on_nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self):
        for key, value in self.lr_mult.items():
            with contextlib.suppress(TypeError, ValueError):  # YAML reads 1e-3 as a string
                if isinstance(key, str) and 0 <= float(value) < 2**32:
                    continue
            raise ValueError(f"optim.lr_mult: {key}: {value} is no part of a name and a factor")


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000
    keep_last: int = 2


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = 10
    profile_steps: int = 0


@dataclass(frozen=True)
class Config:
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    ddp: DDPConfig = DDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self):
        if not (self.model.embedding or self.data.features):
            raise ValueError("model.embedding=false needs node features: set data.features")
        if self.run.init and self.run.resume != "auto":
            raise ValueError("run.init and run.resume exclude each other: set one of them")


def main() -> None:
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    console.addFilter(lambda record: record.levelno < logging.ERROR)  # errors go to stderr
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[console])
    logging.raiseExceptions = False  # stdout may be a closed pipe
    config, config_error = Config(), None
    try:
        arguments = parse_arguments(sys.argv[1:])
        config = load_config(arguments)
    except UserError as error:
        config_error = error

    def program(env: Distributed) -> None:
        with env.sync_errors():  # so that a wrong configuration is reported once, not by every rank
            if config_error:
                raise config_error
        if arguments.predict:
            predict(arguments, config, env)
        else:
            train(config, env)

    run(program, config.ddp)


# ---- Training ------------------------------------------------------------------------------------
def train(config: Config, env: Distributed) -> None:
    """Trains or resumes a run.

    On every rank, raises `UserError` for wrong input and `RunError` for a later failure.
    """
    env.stop = StopRequest(Path(config.run.dir, config.run.name, "STOP"))
    if config.run.deterministic:
        use_deterministic_algorithms()
    optim, seed = config.optim, config.run.seed
    dtype, autocast_dtype = PRECISIONS[optim.precision]
    tables, baseline, state, folder = prepare_run(config, env)
    env.stop.is_training = True
    model = state.model
    graph = SharedGraph(tables.graph()).to(env.device, dtype)
    dataset, route = make_dataset(config, tables, graph)
    sampler = StepSampler(
        tables.rows("train"),
        config.data.batch_size,
        accumulate=optim.accumulate,
        world_size=env.world_size,
        rank=env.rank,
        seed=seed,
    )
    loader = data.make_loader(dataset, sampler, config.data.workers, env.device)
    ddp_model = env.wrap(model)
    autocast = torch.autocast(env.device.type, autocast_dtype, enabled=autocast_dtype is not None)
    if env.launched:
        with autocast:
            order_buckets(ddp_model, graph, dataset)
    total_steps = sampler.steps_per_epoch * optim.epochs
    log.info(f"model     {sum(p.numel() for p in model.parameters()):,} parameters; {route}")
    log.info(
        f"batch     {config.data.batch_size} samples over {env.world_size} ranks "
        f"and {optim.accumulate} micro-batches, {sampler.steps_per_epoch} steps per epoch"
    )

    meter, progress = Meter(env, optim), ""
    profile = profiler(config, env, folder.path)
    # Each round validates the state after `epoch` epochs, then trains one more.
    for epoch in range(min(state.epoch, optim.epochs), optim.epochs + 1):
        if state.best is None or epoch > state.epoch:  # the state has not been validated
            prediction = predict_rows(model, graph, dataset, tables.rows("val"), config, env)
            if reason := env.stop_reason():
                folder.save(state)
                return folder.stop(state, reason)
            val = metrics(tables.rows("val"), prediction, tables, baseline, config)
            state.epoch = epoch
            folder.save_validation(state, val)
            title = f"epoch {epoch}/{optim.epochs}  step {state.step}  {progress}"
            log.info(f"{title}val {result_text(val)}")
        waited = epoch - state.best["step"] // sampler.steps_per_epoch
        if epoch == optim.epochs or (optim.patience and waited >= optim.patience):
            option = "epochs" if epoch == optim.epochs else "patience"
            log.info(f"trained   {state.epoch} epochs: raise optim.{option} to train on")
            break

        sampler.set_epoch(epoch, first_step=state.step - epoch * sampler.steps_per_epoch)
        batches = iter(loader)
        model.train()
        meter.restart()
        steps = range(sampler.first_step, sampler.steps_per_epoch)
        title = f"epoch {epoch + 1}/{optim.epochs}"
        bar = tqdm(steps, title, leave=False, disable=env.rank != 0, **TQDM_OPTIONS)
        for step_in_epoch in bar:
            step_seed = seed_step(seed, state.step, env)
            share_of_lr = schedule(state.step, total_steps, optim)
            set_learning_rates(state.optimizer, share_of_lr)
            rows = sampler.rows_in_step(step_in_epoch)
            num_scores = dataset.num_scores(rows)
            for micro in range(optim.accumulate):
                with env.phase("data"):
                    batch = next(batches).to(env.device, non_blocking=True)
                    batch.seed = step_seed
                with env.accumulating(ddp_model, last=micro == optim.accumulate - 1):
                    with env.phase("forward"), autocast:
                        prediction = ddp_model(graph, batch)
                    with env.phase("backward"):
                        loss = criterion(prediction, batch, model, optim.loss)
                        # The mean over the whole step; world_size undoes DDP's over ranks.
                        share = env.world_size / max(1, num_scores)
                        state.scaler.scale(loss * share).backward()
                meter.loss += loss.detach()
            with env.phase("optimiser"):
                norm_and_scale = optimizer_step(model, state.optimizer, state.scaler, optim)
            state.step += 1
            meter.count(len(rows), num_scores, norm_and_scale)
            if profile:
                profile.step()

            env.step_done(state.step)
            end_of_epoch = state.step % sampler.steps_per_epoch == 0
            reason = env.stop_reason(at_once=end_of_epoch)
            save_now = state.step % config.checkpoint.every_steps == 0 and not end_of_epoch
            log_now = state.step % config.log.every_steps == 0
            if reason or save_now or log_now or end_of_epoch:
                row = meter.read(state)
                folder.write("train", state, lr=share_of_lr * optim.lr, **row)
                progress = f"loss {row['loss']:.4f}  {row['samples_per_s']:,.0f} samples/s  "
                bar.set_postfix_str(progress, refresh=False)
            if reason or save_now:
                folder.save(state)
            if reason:
                return folder.stop(state, reason)

    if profile:
        profile.stop()
    model.load_state_dict(state.best_model)
    prediction = predict_rows(model, graph, dataset, tables.rows("test"), config, env)
    if reason := env.stop_reason():
        return folder.stop(state, reason)
    test = metrics(tables.rows("test"), prediction, tables, baseline, config)
    folder.finish(state, test, tables, prediction, baseline.prediction)


def prepare_run(
    config: Config, env: Distributed
) -> tuple[Tables, Baseline, "TrainState", "RunFolder"]:
    """Returns the tables, what is known without the graph, the state to train from, and the folder.

    Whatever can be wrong with the input is found here; every rank raises that `UserError`.
    """
    with env.sync_errors(DataError):
        check_batch_size(config, env.world_size)
        tables = data.load(config.data)
        check_scores(tables, config)
        fingerprint = tables.fingerprint()
        baseline = data.load_baseline(tables, fingerprint, config.data, config.optim.loss)
        torch.manual_seed(config.run.seed)
        dtype, _ = PRECISIONS[config.optim.precision]
        model = build_model(config, tables, baseline).to(env.device, dtype)
        folder = RunFolder(config, env, tables, fingerprint)
        checkpoint = folder.open(model)
    options = by_key(asdict(config))
    env.check_equal({**options, "data (hash)": fingerprint, **library_versions()})
    optimizer = build_optimizer(model, config.optim, env)
    scale = (
        2.0**16 if config.optim.precision == "fp16" else 1.0
    )  # and stays 1, see `optimizer_step`
    scaler = torch.amp.GradScaler(env.device.type, init_scale=scale)
    state = TrainState(model, optimizer, scaler)
    checkpoint = env.broadcast(checkpoint)
    if checkpoint is not None:
        state.load_state_dict(checkpoint, config.optim)
    ranks = describe(env)
    with env.sync_errors():
        folder.start(state, ranks)
    log.info(f"data      {tables.summary()}")
    return tables, baseline, state, folder


def use_deterministic_algorithms() -> None:
    """Makes a GPU compute the same bits each time; the log names what cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    logging.captureWarnings(True)
    torch.use_deterministic_algorithms(True, warn_only=True)


def check_batch_size(config: Config, world_size: int) -> None:
    """Raises `UserError` if a step's samples cannot be shared evenly."""
    shares = world_size * config.optim.accumulate
    if config.data.batch_size % shares:
        larger = math.ceil(config.data.batch_size / shares) * shares
        raise UserError(
            f"data.batch_size must be a multiple of {shares} (ranks x optim.accumulate): "
            f"try {larger}"
        )


def check_scores(tables: Tables, config: Config) -> None:
    """Raises `UserError` for scores that optim.loss cannot take; notes options that do not suit."""
    for name, scores in zip(tables.targets, tables.y[tables.rows("train")].T, strict=True):
        if scores.isnan().all():
            raise UserError(
                f"no training row has a score '{name}': remove that column, or change the split"
            )
    binary = bool(((tables.y == 0) | (tables.y == 1) | tables.y.isnan()).all())
    if config.optim.loss == "binary" and not binary:
        raise UserError("optim.loss=binary needs scores of 0 and 1: set optim.loss=squared")
    if config.optim.loss == "squared" and binary:
        log.warning("note      all scores are 0 or 1: optim.loss=binary predicts probabilities")
    if config.model.readout != "nodes" and set(tables.targets) <= set(tables.genes):
        log.warning("note      all scores are named after nodes: model.readout=nodes suits them")


def make_dataset(config: Config, tables: Tables, graph: SharedGraph) -> tuple[KnockoutDataset, str]:
    """Returns the dataset of any tables on the graph, and how the model passes messages, a text."""
    dataset = KnockoutDataset(tables, graph.degree)
    dataset.transform, route = plan_route(config.model, graph, dataset)
    return dataset, route


def build_model(config: Config, tables: Tables, baseline: Baseline) -> nn.Module:
    """Returns the model that is trained."""
    return KnockoutGNN.from_tables(config.model, tables, baseline)


def build_optimizer(
    model: nn.Module, optim: OptimConfig, env: Distributed
) -> torch.optim.Optimizer:
    """Returns AdamW, whose state `optim.zero` shards over ranks."""
    groups = parameter_groups(model, optim)
    # With fused AdamW, GradScaler skips a non-finite step without a host sync; others (and ZeRO)
    # sync.
    if optim.zero and env.launched:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes half a second

        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=optim.lr, fused=True)
    return torch.optim.AdamW(groups, lr=optim.lr, fused=True)


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Returns groups of parameters with the same learning rate; only matrices get weight decay.

    The rate is optim.lr times the value of the longest key of optim.lr_mult that the parameter's
    name contains; one of 0 freezes it. Raises `UserError` for a key that no name contains, or if
    nothing is left to train.
    """
    keys = sorted(optim.lr_mult, key=len)
    unused = set(keys)
    groups = {}  # by multiplier and whether they are matrices
    for name, parameter in model.named_parameters():
        fitting = [key for key in keys if key in name]
        unused -= set(fitting)
        multiplier = float(optim.lr_mult[fitting[-1]]) if fitting else 1.0
        if multiplier == 0:
            parameter.requires_grad_(False)
        is_matrix = parameter.dim() > 1
        group = groups.setdefault((multiplier, is_matrix), {"params": []})
        group["params"].append(parameter)
        group["lr"] = multiplier * optim.lr
        group["weight_decay"] = optim.weight_decay if is_matrix else 0.0
    if unused or not any(parameter.requires_grad for parameter in model.parameters()):
        names = ", ".join(name for name, _ in model.named_parameters())
        raise UserError(f"optim.lr_mult={optim.lr_mult} fits none or freezes all of {names:.300}")
    return list(groups.values())


def order_buckets(ddp_model: nn.Module, graph: SharedGraph, dataset: KnockoutDataset) -> None:
    """Makes DDP order its buckets now, by a backward pass that changes nothing.

    DDP does so after the first backward pass of a process, and the order in which the numbers of
    three or more ranks are added depends on their places in a bucket: otherwise, the first step of
    a resumed run would differ from the same step of an undisturbed run.
    """
    padding = dataset.__getitems__([-1, -1]).to(graph.device)
    ddp_model.eval()  # or the padding would count in BatchNorm's statistics
    ddp_model(graph, padding).sum().backward()
    ddp_model.zero_grad(set_to_none=True)


def criterion(prediction: Tensor, batch: Data, model: nn.Module, loss: str = "squared") -> Tensor:
    """Returns a weighted sum of cross-entropies, or of squared errors over the variance."""
    if loss == "binary":
        y = batch.y.to(prediction)
        cross_entropy = nn.functional.binary_cross_entropy_with_logits
        return cross_entropy(prediction, y, batch.weight, reduction="sum")
    return (batch.weight * ((prediction - batch.y) / model.y_std).square()).sum()


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    optim: OptimConfig,
) -> Tensor:
    """Unscales and clips the gradients, steps if their norm is finite, and clears them.

    Returns the norm before clipping and the scale of the loss, [2].
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    gradients[0] += norm - norm  # nan if the norm is not finite, so that GradScaler skips the step
    scaler.unscale_(optimizer)
    scale = scaler.scale(torch.ones_like(norm))
    grad_norm = norm / scale
    nn.utils.clip_grads_with_norm_(model.parameters(), optim.clip or math.inf, grad_norm)
    scaler.step(optimizer)
    scaler.update(None if optim.precision == "fp16" else 1.0)  # without fp16, the scale stays 1
    optimizer.zero_grad(set_to_none=True)
    return torch.stack([grad_norm, scale])


def schedule(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Returns a step's share of the peak learning rate: linear warm-up, then half a cosine to 0."""
    warmup = max(1, round(optim.warmup * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    angle = math.pi * (step - warmup) / max(1, total_steps - warmup)
    return 0.5 * (1 + math.cos(angle))


def set_learning_rates(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Sets each parameter group's learning rate to a share of the one it was made with."""
    for group in optimizer.param_groups:
        group["lr"] = share * group.setdefault("initial_lr", group["lr"])


def seed_step(seed: int, step: int, env: Distributed) -> Tensor:
    """Returns the seed of all that the model draws in a step, long [], equal on all ranks.

    It also seeds torch, for layers that draw by rank, so that checkpoints need no generator state.
    """
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest()
    step_seed = int.from_bytes(digest, "big")
    torch.manual_seed(step_seed + env.rank)
    return torch.full((), step_seed, device=env.device)


@dataclass
class TrainState:
    """Everything that a checkpoint restores."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    epoch: int = 0  # epochs completed, including their validation
    best: dict | None = None  # step and metrics of the best validation
    best_model: dict | None = None  # the model's state dict at that step
    skipped: int = 0  # non-finite steps so far, which were not applied
    skipped_in_row: int = 0

    def state_dict(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name, part in state.items():
            if hasattr(part, "state_dict"):
                state[name] = part.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], optim: OptimConfig) -> None:
        load_model(self.model, state)
        groups = self.optimizer.param_groups
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise UserError(
                f"the parameters' groups differ from the checkpoint's ({error}): in an empty run "
                f"folder, run.init={state['file']} alone starts from its parameters"
            ) from None
        self.optimizer.param_groups = groups  # with the configuration's rates
        # ZeRO leaves the step counts on the CPU, but fused AdamW needs them on its own device.
        inner = getattr(self.optimizer, "optim", self.optimizer)
        for parameter, values in inner.state.items():
            values["step"] = values["step"].to(parameter.device)
        if state["config"]["optim"]["precision"] == optim.precision:  # the scale depends on it
            self.scaler.load_state_dict(state["scaler"])
        for name in ("step", "epoch", "best", "best_model", "skipped", "skipped_in_row"):
            setattr(self, name, state[name])


class Meter:
    """Accumulates loss, times and non-finite steps since the last train row.

    It does not wait for the device before `read`.
    """

    def __init__(self, env: Distributed, optim: OptimConfig):
        self.env = env
        self.optim = optim
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()
        self.loss = torch.zeros((), dtype=torch.float64, device=self.env.device)  # this rank's
        self.num_samples = self.num_scores = 0
        self.steps = []  # what `optimizer_step` returned
        self.env.seconds.clear()

    def count(self, num_samples: int, num_scores: int, norm_and_scale: Tensor) -> None:
        self.num_samples += num_samples
        self.num_scores += num_scores
        self.steps.append(norm_and_scale)

    def read(self, state: TrainState) -> dict[str, Any]:
        """Returns the values of the train row, and restarts.

        Raises `RunError`, on every rank, for too many non-finite steps.
        """
        num_steps = len(self.steps)
        elapsed = time.perf_counter() - self.start
        steps = torch.stack(self.steps).tolist()  # waits for the device
        self._count_skipped(steps, state)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
        if self.env.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        total = self.env.sum(self.loss).item()
        row = {
            "loss": total / max(1, self.num_scores),
            "grad_norm": steps[-1][0],
            "skipped": state.skipped,
            "samples_per_s": round(self.num_samples / elapsed, 1),
            "data_ms": round(1e3 * self.env.seconds["data"] / num_steps, 3),
            "step_ms": round(1e3 * elapsed / num_steps, 3),
            "memory_mb": round(memory / 2**20, 1),
        }
        self.restart()
        return row

    def _count_skipped(self, steps: list, state: TrainState) -> None:
        # Gradients are equal on all ranks. Under fp16, GradScaler handles overflows while its scale
        # is above 1.
        limit = MAX_SKIPS if self.optim.on_nonfinite == "skip" else 1
        first = state.step - len(steps) + 1
        for step, (norm, scale) in enumerate(steps, first):
            if math.isfinite(norm) or scale > 1:
                state.skipped_in_row = 0
                continue
            state.skipped += 1
            state.skipped_in_row += 1
            if state.skipped_in_row >= limit:
                raise RunError(
                    f"step {step} is not finite, {limit} in a row (optim.on_nonfinite): "
                    "lower optim.lr or optim.clip, or find bad rows with "
                    "`python -m tests.check rows` and the same options"
                )
            log.warning(f"skipped   step {step}, which is not finite, {state.skipped} in total")


def profiler(config: Config, env: Distributed, path: Path) -> torch.profiler.profile | None:
    """Returns a started profiler that skips three steps, then traces log.profile_steps, if any."""
    if not config.log.profile_steps:
        return None
    file = str(path / f"trace.rank{env.rank}.json")
    profile = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=1, warmup=2, active=config.log.profile_steps, repeat=1
        ),
        on_trace_ready=lambda done: done.export_chrome_trace(file),
    )
    profile.start()
    return profile


# ---- Evaluation ----------------------------------------------------------------------------------
@torch.no_grad()
def predict_rows(
    model: nn.Module,
    graph: SharedGraph,
    dataset: KnockoutDataset,
    rows: Tensor,
    config: Config,
    env: Distributed,
) -> Tensor:
    """Returns predictions of `rows` on every rank, float64 [len(rows), T].

    They are probabilities if optim.loss=binary. Each row is predicted on one rank, by the bare
    model; the all-reduce adds only zeros to it and is therefore exact.
    """
    model.eval()
    batch_size = config.data.batch_size
    if config.model.readout == "local":
        batch_size = max(batch_size, 8192)
    size = (len(rows), dataset.tables.y.size(1))
    predictions = torch.zeros(size, dtype=torch.float64, device=env.device)
    own = predictions[env.rank :: env.world_size]  # a view
    batches = rows[env.rank :: env.world_size].split(math.ceil(batch_size / env.world_size))
    start = 0
    for batch in data.make_loader(dataset, batches, workers=0, device=env.device):
        with env.phase("evaluation"):
            if env.stop and env.stop.code():  # all ranks will stop; the result is discarded
                break
            output = model(graph, batch.to(env.device, non_blocking=True)).double()
            if config.optim.loss == "binary":
                output = output.sigmoid()
            own[start : start + len(output)] = output
            start += len(output)
    return env.sum(predictions).cpu()


def metrics(
    rows: Tensor,
    prediction: Tensor,
    tables: Tables,
    baseline: Baseline,
    config: Config,
) -> dict[str, float]:
    """Returns metrics of the predictions [len(rows), T] of `rows`, and the baseline's Pearson.

    A metric is the mean over the targets for which it is defined, nan if there are none.
    """
    y = tables.y[rows]
    additive = baseline.prediction[rows]
    mse = mean_present((prediction - y).square(), y)
    per_target = {
        "loss": mse / baseline.std.square(),
        "mse": mse,
    }
    for name, metric in METRICS.items():
        per_target[name] = metric(y, prediction)
        per_target[f"baseline_{name}"] = metric(y, additive)
    if config.optim.loss == "binary":
        cross_entropy = nn.functional.binary_cross_entropy(
            prediction, y.nan_to_num(), reduction="none"
        )
        per_target["loss"] = mean_present(cross_entropy, y)
    if y.size(1) > PROFILE:  # the mean is over the rows
        per_target["row_pearson"] = pearson(y.T, prediction.T)
        per_target["baseline_row_pearson"] = pearson(y.T, additive.T)
    means = {name: values.nanmean().item() for name, values in per_target.items()}
    return {**means, "n": len(rows)}


def mean_present(values: Tensor, y: Tensor) -> Tensor:
    """Returns the mean of each target's values [n, T] where y is not nan, [T]."""
    present = ~y.isnan()
    return values.where(present, 0.0).sum(dim=0) / present.sum(dim=0)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Returns Pearson's r of a and b, [n, T], over the rows where a is not nan, for each target.

    It is nan where a is constant, so that such targets count in no mean, and 0 where only b is, so
    that the means of all predictions are over the same targets.
    """
    a = data.standardise(a)
    b = data.standardise(b.where(~a.isnan(), math.nan))
    varies = a.square().nanmean(dim=0) > 0.5
    return (a * b).nanmean(dim=0).where(varies, math.nan)


# Of scores and predictions [n, T], a figure per target: the larger, the better, nan for none. All
# are logged, and the first is drawn and chooses best.pt.
METRICS = {"pearson": pearson}
FIRST = next(iter(METRICS))


def result_text(result: dict[str, Any]) -> str:
    """Returns metrics as a part of a line for the log."""
    text = f"loss {result['loss']:.4f}"
    for name, value in result.items():
        if f"baseline_{name}" in result:
            baseline = result[f"baseline_{name}"]
            text += f", {name.title()} {value:.4f}, additive baseline {baseline:.4f}"
    return text


def quality(result: dict[str, Any]) -> tuple[float, float]:
    """Returns a sort key, larger is better: the first metric (0 if undefined), then the loss."""
    value = result.get(FIRST, -math.inf)  # as in a checkpoint from before an edit
    return 0.0 if math.isnan(value) else value, -result["loss"]


# ---- Prediction ----------------------------------------------------------------------------------
class Member(NamedTuple):
    """A trained model, the only one or one of an ensemble."""

    config: Config
    model: nn.Module
    dataset: KnockoutDataset  # of what it was trained on, with its plan of batches


def predict(arguments: argparse.Namespace, config: Config, env: Distributed) -> None:
    """Writes a prediction for each row of a table, in order, to `<table>.predictions.tsv`.

    That file is in the working directory. Rows with unknown nodes get an empty cell. The table may
    be `all-singles` or `all-pairs`, of the graph's nodes, or these at a level: `all-singles=0.3`.
    Of several checkpoints, it is the mean of their predictions, and their standard deviation stands
    beside it.
    """
    table = arguments.predict
    with env.sync_errors(DataError):
        tables = data.load(config.data)
        fingerprint = tables.fingerprint()
        graph = SharedGraph(tables.graph()).to(env.device)
        members = []
        for checkpoint in arguments.checkpoint:
            member = load_member(checkpoint, arguments, config, tables, fingerprint, graph)
            members.append(member)
    number = data.Numbers()
    number.of(tables.genes)
    output = Path(f"{Path(table).name.removesuffix('.gz').removesuffix('.tsv')}.predictions.tsv")
    temporary = Path(f"{output}.{uuid.uuid4().hex}.tmp")

    columns = prediction_columns(tables.targets, len(members))
    lines = ["\t".join(["genes", *columns]) + "\n"]
    parts = data.read_sets(table, number, tables)
    num_rows = num_predicted = 0
    try:
        while True:
            with env.sync_errors(DataError):
                if env.rank == 0:
                    explained = explain_write_errors(output, UserError, "change the working folder")
                    with explained, temporary.open("a") as file:
                        file.writelines(lines)
                part = next(parts, None)
            if part is None:
                break
            genes, is_known, samples = part
            cells = tables.y.new_full((len(genes), len(columns)), math.nan)
            cells[is_known] = predict_samples(members, graph, samples, env)
            lines = table_lines(iter(genes), cells)
            num_rows += len(genes)
            num_predicted += len(samples.y)
        if env.rank == 0:
            os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    if unknown := list(number)[graph.num_nodes :]:
        missing = f"{num_rows - num_predicted} rows have no prediction"
        names = ", ".join(unknown[:10])
        log.warning(f"{missing}: {len(unknown)} nodes are not in the graph: {names}")
    log.info(f"{num_predicted} predictions written to {output}")


def prediction_columns(targets: Sequence[str], num_members: int) -> list[str]:
    """Returns the names of the columns that `predict_samples` fills."""
    if len(targets) == 1:
        return ["prediction", "sd"] if num_members > 1 else ["prediction"]
    if num_members == 1:
        return list(targets)
    return [column for name in targets for column in (name, f"{name}_sd")]


def predict_samples(
    members: list[Member], graph: SharedGraph, samples: Tables, env: Distributed
) -> Tensor:
    """Returns for each row of the samples each target's mean over the members, float64 [n, T].

    Of several members, the standard deviation follows each mean, [n, 2 * T].
    """
    rows = torch.arange(len(samples.y))
    predictions = []
    for member in members:
        dataset = replace(member.dataset, tables=samples)
        prediction = predict_rows(member.model, graph, dataset, rows, member.config, env)
        predictions.append(prediction)
    if len(members) == 1:
        return prediction
    std, mean = torch.std_mean(torch.stack(predictions), dim=0)
    return torch.stack([mean, std], dim=2).flatten(start_dim=1)


def load_member(
    checkpoint: str,
    arguments: argparse.Namespace,
    first: Config,
    tables: Tables,
    fingerprint: str,
    graph: SharedGraph,
) -> Member:
    """Returns the model of a checkpoint, with its own options unless `arguments` say otherwise.

    Raises `UserError` if its data are not the tables, or its loss is not that of the `first` one.
    """
    state = read_checkpoint(checkpoint)
    own_arguments = copy.copy(arguments)
    own_arguments.checkpoint = [checkpoint]
    config = load_config(own_arguments)
    if state["data"] != fingerprint:
        raise UserError(f"{checkpoint} was trained on different data from the configuration's")
    loss = state["config"]["optim"]["loss"]
    if loss != first.optim.loss:
        raise UserError(f"{checkpoint} was trained with optim.loss={loss}, not {first.optim.loss}")
    baseline = data.load_baseline(tables, fingerprint, config.data, loss)
    model = build_model(config, tables, baseline)
    load_model(model, state)
    dataset, _ = make_dataset(config, tables, graph)
    return Member(config, model.to(graph.device), dataset)


# ---- The run folder ------------------------------------------------------------------------------
class RunFolder:
    """The run's files; only global rank 0 writes them, except for each rank's own log."""

    def __init__(self, config: Config, env: Distributed, tables: Tables, fingerprint: str):
        self.config = config
        self.env = env
        self.origin = {
            "config": asdict(config),
            "data": fingerprint,
            "nodes": tables.genes,
            "relations": tables.relations,
        }
        self.path = Path(config.run.dir, config.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.rows = []  # of metrics.jsonl

    def open(self, model: nn.Module) -> dict | None:
        """On rank 0, locks the folder and returns the checkpoint to resume from, if any.

        Raises `UserError` if the checkpoint is that of another run.
        """
        if self.env.rank != 0:
            return None
        with explain_write_errors(self.path, UserError):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "log.rank0.txt").open("a")
            if not self._acquire_lock():
                raise UserError(
                    f"another process is training in {self.path}: "
                    "wait for it or set another run.name"
                )
            self._log_to_file()
        init = self.config.run.init
        checkpoint = self.newest_checkpoint()
        if checkpoint is None:
            if init:  # the other ranks get the parameters from DDP
                take_parameters(model, read_checkpoint(init), self.origin)
            return None
        file = checkpoint["file"]
        advice = f"in an empty run folder, run.init={file} alone starts from its parameters"
        if checkpoint["data"] != self.origin["data"]:
            raise UserError(f"{file} was trained on different data or splits: {advice}")
        options = by_key(asdict(self.config))
        for key, saved in by_key(checkpoint["config"]).items():
            if key in MUST_STAY and saved != options[key]:
                raise UserError(
                    f"{file} was trained with {key}={saved}, not {options[key]}: "
                    f"set it so, or, {advice}"
                )
        return checkpoint

    def _acquire_lock(self) -> bool:
        """Waits for ranks of a killed torchrun and their DataLoader workers, which take seconds."""
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.1)
        return False

    def _log_to_file(self) -> None:
        handler = logging.FileHandler(self.path / f"log.rank{self.env.rank}.txt")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)

    def start(self, state: TrainState, ranks: str) -> None:
        """Opens the other ranks' logs, and records configuration, environment and metrics."""
        self.env.progress = self.env.progress._replace(step=state.step)
        with explain_write_errors(self.path, UserError):
            if self.env.rank != 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._log_to_file()
                return
            config = yaml.safe_dump(asdict(self.config), sort_keys=False)
            write_atomically(self.path / "config.yaml", [config])
            write_atomically(self.path / "environment.txt", [environment(ranks)])
            (self.path / "test.tsv").unlink(missing_ok=True)  # of an earlier end
            self._open_metrics(state)
        resumed = state.step or state.best
        self.event("resumed" if resumed else "started", state)
        self.env.on_failure = lambda reason: self.event("failed", state, reason)
        log.info(ranks)
        start = f"resumed at step {state.step}" if resumed else "from the start"
        log.info(f"run       {self.path}, {start}")

    def _open_metrics(self, state: TrainState) -> None:
        """Opens metrics.jsonl without the rows that the run will repeat."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line cut off by a kill
                row = json.loads(line)
                is_past = row["kind"] != "test" and row.get("step", 0) <= state.step
                if row["kind"] == "val":
                    is_past = state.best is not None and row["epoch"] <= state.epoch
                if is_past or row["kind"] == "event":
                    self.rows.append(row)
        write_atomically(path, (json.dumps(row) + "\n" for row in self.rows))
        self.metrics = path.open("a")

    def write(self, kind: str, state: TrainState, **values: Any) -> None:
        """Appends a row to metrics.jsonl, with null for non-finite numbers.

        A val row also redraws curves.svg.
        """
        if self.env.rank != 0:
            return
        epoch = state.epoch + 1 if kind == "train" else state.epoch
        row = {"kind": kind, "step": state.step, "epoch": epoch, **values}
        self.rows.append(json.loads(json.dumps(row), parse_constant=lambda name: None))
        with explain_write_errors(self.path / "metrics.jsonl"):
            self.metrics.write(json.dumps(self.rows[-1]) + "\n")
            self.metrics.flush()
            if kind == "val":
                write_atomically(self.path / "curves.svg", [curves_svg(self.rows)])

    def save_validation(self, state: TrainState, val: dict[str, Any]) -> None:
        """Writes a val row and a checkpoint, and best.pt if no earlier validation was as good."""
        improved = state.best is None or quality(val) > quality(state.best)
        improved = self.env.broadcast(improved)
        if improved:
            state.best = {"step": state.step, **val}
            state.best_model = copy.deepcopy(state.model.state_dict())
        self.write("val", state, **val)
        self.save(state, improved)

    def save(self, state: TrainState, improved: bool = False) -> None:
        """A collective: writes this step's checkpoint, and best.pt if `improved`.

        Raises `RunError` on every rank.
        """
        if hasattr(state.optimizer, "consolidate_state_dict"):  # ZeRO
            state.optimizer.consolidate_state_dict()  # each rank holds a shard
        with self.env.sync_errors(phase="save"):
            if self.env.rank != 0:
                return
            checkpoint = state.state_dict() | self.origin
            for name, tensor in checkpoint["model"].items():
                if not tensor.isfinite().all():
                    raise RunError(
                        f"{name} is not finite at step {state.step}, no checkpoint is saved: "
                        "lower optim.lr"
                    )
            path = self.checkpoints / f"step_{state.step:08d}.pt"
            with explain_write_errors(path):
                os.fsync(self.metrics.fileno())  # never a checkpoint without its rows
                if improved:
                    write_atomically(self.checkpoints / "best.pt", checkpoint)
                write_atomically(path, checkpoint)
                saved = [other for other in self.step_files() if other.name <= path.name]
                for other in saved[self.config.checkpoint.keep_last :]:
                    other.unlink()

    def event(self, event: str, state: TrainState, reason: str = "") -> None:
        """Records started, resumed, stopped, failed or finished in status.json and the metrics."""
        if self.env.rank != 0:
            return
        status = "running" if event in ("started", "resumed") else event
        row = {"state": status, "step": state.step, "epoch": state.epoch, "reason": reason}
        with explain_write_errors(self.path / "status.json"):
            write_atomically(self.path / "status.json", [json.dumps(row), "\n"])
        self.write(
            "event",
            state,
            event=event,
            reason=reason,
            time=time.time(),
            world_size=self.env.world_size,
        )

    def finish(
        self,
        state: TrainState,
        test: dict[str, Any],
        tables: Tables,
        prediction: Tensor,
        baseline: Tensor,
    ) -> None:
        """A collective: writes test.tsv, see `result_lines`, and records the end of the run.

        Raises `RunError` on every rank.
        """
        path = self.path / "test.tsv"
        with self.env.sync_errors(phase="save"), explain_write_errors(path):
            if self.env.rank == 0:
                write_atomically(path, result_lines(tables, prediction, baseline))
        self.write("test", state, **test, best_step=state.best["step"])
        self.event("finished", state)
        log.info(f"run       {self.path}, model of step {state.best['step']}")
        log.info(f"test      {result_text(test)} ({test['n']:,} samples)")
        command = f"python -m tests.check test {shlex.quote(str(self.path))}"
        log.info(f"test      intervals, groups of rows and a plot: {command}")

    def stop(self, state: TrainState, reason: str) -> None:
        """Records that the run stopped on request, and removes the file STOP."""
        # Every rank, as the disk need not be shared; another one may have been faster.
        (self.path / "STOP").unlink(missing_ok=True)
        self.event("stopped", state, reason)
        log.info(f"stopped   at step {state.step} ({reason}): the same command resumes the run")

    def step_files(self) -> list[Path]:
        """Returns the paths of the step checkpoints, newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def newest_checkpoint(self) -> dict | None:
        """Returns the folder's newest readable checkpoint, else that of run.resume, if set."""
        resume = self.config.run.resume
        for path in [*self.step_files(), *self.checkpoints.glob("best.pt")]:
            try:
                checkpoint = read_checkpoint(path)
            except UserError as error:
                log.warning(f"skipped a damaged checkpoint: {error}")
                continue
            if self.config.run.init or resume != "auto":
                ignored = "run.init and run.resume are ignored"
                log.info(f"note      {self.path} goes on from {path}: {ignored}")
            return checkpoint
        return None if resume == "auto" else read_checkpoint(resume)


def result_lines(tables: Tables, prediction: Tensor, baseline: Tensor) -> Iterator[str]:
    """Yields the lines of test.tsv: for each test row its nodes, how many of them no training row
    has, and for each target score, prediction [len(rows), T] and additive baseline [n, T].

    A missing score is an empty cell.
    """
    header = ["genes", "unseen"]
    for name in tables.targets:
        header += [name, f"{name}_prediction", f"{name}_baseline"]
    yield "\t".join(header) + "\n"

    rows = tables.rows("test")
    chosen = tables.is_in("test")[tables.sample()]
    names = map(tables.name, tables.perturbed[chosen].tolist(), tables.level[chosen].tolist())
    counts = tables.perturbed_ptr.diff()[rows].tolist()
    sets = (",".join(islice(names, count)) for count in counts)
    unseen = tables.unseen()[rows].unsqueeze(1)
    scores = torch.stack([tables.y[rows], prediction, baseline[rows]], dim=2)
    yield from table_lines(sets, torch.cat([unseen, scores.flatten(start_dim=1)], dim=1))


def table_lines(sets: Iterator[str], values: Tensor) -> Iterator[str]:
    """Yields a line for each row of values [n, C]: its set, and a cell each, empty for nan."""
    template = "\t%.7g" * values.size(1) + "\n"
    for part in values.split(100):  # as lists, they take four times the memory
        for row in part.tolist():
            yield next(sets) + (template % tuple(row)).replace("\tnan", "\t")


def environment(ranks: str) -> str:
    """Returns the command, the git commit, the packages' versions and the table of ranks."""
    folder = shlex.quote(str(Path(__file__).resolve().parent))
    commit = subprocess.getoutput(f"git -C {folder} describe --always --dirty --abbrev=40")
    packages = ("torch", "torch-geometric", "pyyaml", "tqdm")
    lines = [
        f"command: {shlex.join([sys.executable, *sys.argv])}",
        f"git commit: {commit}",
        *(f"{name}: {version(name)}" for name in packages),
        ranks,
    ]
    return "\n".join(lines) + "\n"


def read_checkpoint(path: str | Path) -> dict:
    """Returns a checkpoint on the CPU and its `file`; raises `UserError` if it is damaged."""
    names = [field.name for field in fields(TrainState)] + ["config", "data"]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {**state, **{name: state[name] for name in names}, "file": str(path)}
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(f"{path} is not a readable checkpoint ({type(error).__name__})") from None


def load_model(model: nn.Module, checkpoint: dict) -> None:
    """Loads the parameters; raises `UserError` naming the keys or shapes that do not match."""
    try:
        model.load_state_dict(checkpoint["model"])
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        file = checkpoint["file"]
        raise UserError(f"the model saved in {file} does not match: {reason}") from None


def take_parameters(model: nn.Module, checkpoint: dict, origin: dict) -> None:
    """Copies what a checkpoint of any tables has under the same names, in the same shapes.

    Parameters in `ROWS_OF` have a row for each node or relation, and go by the names of these. The
    additive readout stays, as it starts from the tables' own baseline.
    """
    taken, left = [], []
    for name, parameter in model.named_parameters():
        saved = checkpoint["model"].get(name, torch.empty(0))
        rows = saved_rows = ...
        text = name
        kind = ROWS_OF.get(name.rpartition(".")[2])
        if kind and len(saved) and parameter.shape[:1] == (len(origin[kind]),):
            names = checkpoint.get(kind, [])
            both, rows, saved_rows = np.intersect1d(origin[kind], names, return_indices=True)
            text += f" of {len(both):,} of {len(origin[kind]):,} {kind}"
        if name.startswith("additive.") or saved[saved_rows].shape != parameter[rows].shape:
            left.append(name)
        else:
            parameter.data[rows] = saved[saved_rows].to(parameter)
            taken.append(text)
    file = checkpoint["file"]
    log.info(f"init      from {file}: {', '.join(taken)}; not from it: {', '.join(left)}")


@contextlib.contextmanager
def explain_write_errors(
    path: Path, kind: type[UserError] = RunError, advice: str = "set run.dir"
) -> Iterator[None]:
    """Turns a failure to write `path` into an error of type `kind`: one sentence with `advice`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save may wrap an OSError
        reason = getattr(error.__context__, "strerror", error)
        reason = getattr(error, "strerror", None) or reason
        raise kind(
            f"cannot write {path}: {reason}; fix that or {advice}, and start again"
        ) from None


def write_atomically(path: Path, content: Iterable[str] | dict) -> None:
    """Writes parts of a text or, by `torch.save`, a dict; the file is never seen incomplete."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, dict):
                torch.save(content, file)
            else:
                file.writelines(part.encode() for part in content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # on a full disk, logging the error needs its space


# ---- Curves --------------------------------------------------------------------------------------
WIDTH, HEIGHT = 380, 240  # of a panel
GREY = "#868e96"


# The curves of each panel: a column of the rows of one kind, its label and its colour.
PANELS = {
    "Loss": (
        ("train", "loss", "training", "#228be6"),
        ("val", "loss", "validation", "#e8590c"),
    ),
    f"{FIRST.title()}, validation": (
        ("val", FIRST, "model", "#e8590c"),
        ("val", f"baseline_{FIRST}", "additive baseline", GREY),
    ),
}


def curves_svg(rows: list[dict]) -> str:
    """Returns an SVG of the loss and the first metric against the optimiser step."""
    style = f'font-family="sans-serif" font-size="12" fill="{GREY}"'
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 360" {style}>']
    for left, (title, curves) in zip((56, 516), PANELS.items(), strict=True):
        svg += [
            f'<g transform="translate({left} 64)">',
            f'<text y="-44" font-weight="bold">{title}</text>',
            '<text x="190" y="278" text-anchor="middle">optimiser step</text>',
            *panel_svg(curves, rows),
            "</g>",
        ]
    return "\n".join([*svg, "</svg>\n"])


def panel_svg(curves: Sequence[tuple], rows: list[dict]) -> list[str]:
    """Returns the lines of one panel: a grid with five numbers on each axis, and the curves."""
    points = []
    for kind, key, _, _ in curves:
        own = [row for row in rows if row["kind"] == kind and row.get(key) is not None]
        points.append([(row["step"], row[key]) for row in own])
    values = [value for pairs in points for _, value in pairs] or [0.0]
    low = min(values)
    span = (max(values) - low) or 1.0
    last = max([1, *(row.get("step", 0) for row in rows)])

    svg = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = WIDTH * share
        y = HEIGHT * (1 - share)
        svg += [
            f'<path d="M0 {y}h{WIDTH}" stroke="{GREY}" stroke-opacity=".3"/>',
            f'<text x="-8" y="{y}" dy="4" text-anchor="end">{low + share * span:.3g}</text>',
            f'<text x="{x}" y="258" text-anchor="middle">{share * last:,.0f}</text>',
        ]
    for left, curve, pairs in zip((0, 120), curves, points, strict=True):
        _, _, label, colour = curve
        line = ""
        for step, value in pairs:
            y = HEIGHT * (1 - (value - low) / span)
            line += f"{WIDTH * step / last:.1f},{y:.1f} "
        svg += [
            f'<text x="{left}" y="-24" fill="{colour}">{label}</text>',
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        ]
    return svg


# ---- Command line --------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    options = Path(__file__).with_name("config.yaml").read_text()
    parser = Parser(
        description=__doc__, epilog=options, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="an option of config.yaml"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="default: config.yaml beside train.py, or the checkpoint's"
    )
    parser.add_argument(
        "--predict", metavar="TABLE", help="a table, or all-singles or all-pairs[=0.3]"
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", nargs="+", default=[], help="trained models, for --predict"
    )
    parsed = parser.parse_intermixed_args(arguments)
    # It also takes the options that follow it.
    words = parsed.checkpoint
    parsed.overrides += [word for word in words if re.match(r"\w+\.\w+=", word)]
    parsed.checkpoint = [word for word in words if word not in parsed.overrides]
    if bool(parsed.predict) != bool(parsed.checkpoint):
        raise UserError("--predict TABLE and --checkpoint FILE go together")
    return parsed


def load_config(arguments: argparse.Namespace) -> Config:
    """Returns the file's options, overridden by the command line.

    Raises `UserError` for a wrong file or option.
    """
    defaults = by_key(asdict(Config()))
    options = {**defaults, **given_options(arguments, defaults)}
    for key in options:
        if key not in defaults:
            nearest = difflib.get_close_matches(key, defaults, n=1, cutoff=0)[0]
            raise UserError(f"unknown option {key}: did you mean {nearest}?")
    sections = {}
    try:
        for section in fields(Config):
            values = {}
            for option in fields(section.type):
                key = f"{section.name}.{option.name}"
                values[option.name] = convert(key, options[key], option)
            sections[section.name] = section.type(**values)
        return Config(**sections)
    except ValueError as error:
        raise UserError(str(error)) from None


def given_options(arguments: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns {section.key: value} of the file and the command line; raises `UserError`."""
    source = arguments.config
    if source is None:
        source = Path(__file__).with_name("config.yaml")
    try:
        if arguments.checkpoint and arguments.config is None:
            sections = read_checkpoint(arguments.checkpoint[0])["config"]
        else:
            sections = yaml.safe_load(Path(source).read_text()) or {}
        given = by_key(sections)
        for source in arguments.overrides:
            key, _, text = source.partition("=")
            is_text = isinstance(defaults.get(key), str)
            given[key] = text if is_text else yaml.safe_load(text)
    except AttributeError:
        raise UserError(f"{source} does not contain sections of options: see config.yaml") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read the configuration {source}: {reason}") from None
    return given


def by_key(sections: dict[str, dict | None]) -> dict[str, Any]:
    """Returns {section.key: value} of {section: {key: value}}."""
    given = {}
    for section, values in sections.items():
        for name, value in (values or {}).items():
            given[f"{section}.{name}"] = value
    return given


def convert(key: str, value: Any, option: Field) -> Any:
    """Returns `value` as the option's type.

    Raises `UserError` if that would lose information or is out of range.
    """
    kind, choices = option.type, get_args(option.type)
    if kind is float and type(value) in (int, str):  # YAML reads 1e-3 as a string
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    if choices:
        valid, expected = value in choices, " or ".join(choices)
    elif kind in (int, float):
        # An int may be 0 only if that is its default.
        least = 0 if kind is float else min(1, option.default)
        valid = type(value) is kind and least <= value < 2**32
        expected = f"{kind.__name__} >= {least}"
    else:
        valid, expected = type(value) is kind, kind.__name__
    if not valid:
        raise UserError(f"{key} must be {expected}, not {value!r}")
    return value


if __name__ == "__main__":
    main()
