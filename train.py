"""Trains a knock-out GNN on one large shared graph, with one process or many.

    python train.py                                         one process
    torchrun --standalone --nproc_per_node=4 train.py       one process per GPU (without GPUs, on CPU over gloo)
    python train.py --predict TABLE --checkpoint FILE       predictions for a table of knock-out sets

Options are listed in config.yaml; `section.key=value` on the command line overrides the file. The same command starts
and resumes a run; a signal or a file STOP in the run folder ends it cleanly. Exit status: 0 finished or stopped on
request, 1 failure, 2 wrong configuration or input data.
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
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, get_args

if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads these variables when torch is imported
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # or idle threads spin on cores that other processes need

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch_geometric.data import Data
from tqdm import tqdm

import data
from data import DataConfig, DataError, KnockoutDataset, StepSampler, Tables
from ddp_setup import DDPConfig, Distributed, RunError, StopRequest, UserError, describe, library_versions, run
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig, choose_route

log = logging.getLogger("train")
PEARSON = "Pearson {pearson:.4f}, additive baseline {baseline_pearson:.4f}"

# dtype of parameters and optimiser, and of autocast (None: off)
PRECISIONS = {
    "fp64": (torch.float64, None), "bf16": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, None), "fp16": (torch.float32, torch.float16),
}  # fmt: skip
TQDM_OPTIONS = {} if sys.stderr.isatty() else {"mininterval": 30, "delay": 30}  # keeps log files short
MAX_SKIPS = 10  # consecutive non-finite steps after which even optim.on_nonfinite=skip ends the run


# ---- Configuration; config.yaml documents the options ---------------------------------------------------------------
@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    dir: str = "runs"
    seed: int = 0
    deterministic: bool = False
    resume: str = "auto"


@dataclass(frozen=True)
class OptimConfig:
    epochs: int = 20
    lr: float = 0.01
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    patience: int = 0
    loss: Literal["squared", "binary"] = "squared"
    accumulate: int = 1
    zero: bool = False
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    on_nonfinite: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000
    keep_last: int = 2


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = 10
    threshold: float = -math.inf
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


def main() -> None:
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    console.addFilter(lambda record: record.levelno < logging.ERROR)  # errors go to stderr
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[console])
    logging.raiseExceptions = False  # stdout may be a closed pipe
    try:
        arguments = parse_arguments(sys.argv[1:])
        config, config_error = load_config(arguments), None
    except UserError as error:
        config, config_error = Config(), error

    def program(env: Distributed) -> None:
        with env.sync_errors():  # so that a wrong configuration is reported once, not by every rank
            if config_error:
                raise config_error
        if arguments.predict:
            predict(config, env, arguments.predict, arguments.checkpoint)
        else:
            train(config, env)

    run(program, config.ddp)


# ---- Training -------------------------------------------------------------------------------------------------------
def train(config: Config, env: Distributed) -> None:
    """Trains or resumes a run. On every rank, raises `UserError` for wrong input and `RunError` for a later failure."""
    env.stop = StopRequest(Path(config.run.dir, config.run.name, "STOP"))
    if config.run.deterministic:
        use_deterministic_algorithms()
    optim, batch_size, seed = config.optim, config.data.batch_size, config.run.seed
    (dtype, autocast_dtype), shares = PRECISIONS[optim.precision], env.world_size * optim.accumulate
    with env.sync_errors(DataError):
        if batch_size % shares:
            larger = batch_size + -batch_size % shares
            raise UserError(f"data.batch_size must be a multiple of {shares} (ranks x optim.accumulate): try {larger}")
        tables = data.load(config.data)
        check_scores(tables, config)
        fingerprint = tables.fingerprint()
        effect, baseline, summary = data.derive(tables, fingerprint, config.data)
        torch.manual_seed(seed)
        model = build_model(config, tables, effect).to(env.device, dtype)
        folder = RunFolder(config, env, fingerprint)
        checkpoint = folder.open(model)
    env.check_equal({**asdict(config), "data (hash)": folder.fingerprint, **library_versions()})
    optimizer = build_optimizer(model, optim, env)
    scaler = torch.amp.GradScaler(env.device.type, init_scale=2.0**16 if optim.precision == "fp16" else 1.0)
    state = TrainState(model, optimizer, scaler)
    if (checkpoint := env.broadcast(checkpoint)) is not None:
        state.load_state_dict(checkpoint, optim)
    ranks = describe(env)
    with env.sync_errors():
        folder.start(state, ranks)

    graph = SharedGraph(tables.graph()).to(env.device, dtype)
    if env.device.type == "cuda" and autocast_dtype and (dense := graph.densify(autocast_dtype)):
        log.info(f"graph     dense, on tensor cores in {optim.precision}: {', '.join(dense)}")
    dataset = KnockoutDataset(tables.perturbed, tables.perturbed_ptr, tables.y, graph.degree, tables.weight)
    sampler = StepSampler(tables.rows("train"), batch_size, optim.accumulate, env.world_size, env.rank, seed)
    loader = data.make_loader(dataset, sampler, config.data.workers, pin=env.device.type == "cuda")
    steps_per_epoch, total_steps = sampler.steps_per_epoch, sampler.steps_per_epoch * optim.epochs
    if config.model.compile:
        model.compile()
    ddp_model = env.wrap(model)
    autocast = torch.autocast(env.device.type, autocast_dtype, enabled=autocast_dtype is not None)
    log.info(f"data      {summary}")
    route = choose_route(config.model, graph, dataset)
    log.info(f"model     {sum(p.numel() for p in model.parameters()):,} parameters; {route}")
    share = f"{batch_size // shares} samples x {optim.accumulate} accumulation = {batch_size}"
    log.info(f"batch     {env.world_size} ranks x {share}; {steps_per_epoch} steps per epoch, {total_steps} in total")

    profile, progress = profiler(config, env, folder.path), ""
    for epoch in range(state.epoch, optim.epochs + 1):
        if state.best is None or epoch > state.epoch:  # the state that enters the epoch has not been validated
            prediction = predict_rows(model, graph, dataset, tables.rows("val"), config, env)
            if reason := env.stop_reason(state.step):
                folder.save(state)
                return folder.stop(state, reason)
            val = metrics(tables.rows("val"), prediction, tables, baseline, config)
            if improved := env.broadcast(state.best is None or quality(val) > quality(state.best)):
                state.best, state.best_model = {"step": state.step, **val}, copy.deepcopy(model.state_dict())
            state.epoch = epoch
            folder.write("val", state, **val)
            folder.save(state, improved)
            title = f"epoch {epoch}/{optim.epochs}  step {state.step}  {progress}"
            log.info(f"{title}val loss {val['loss']:.4f}, {PEARSON.format(**val)}")
        waited = epoch - state.best["step"] // steps_per_epoch
        if epoch == optim.epochs or (optim.patience and waited >= optim.patience):
            break
        sampler.set_epoch(epoch, first_step=state.step - epoch * steps_per_epoch)
        model.train()
        batches, meter, steps = iter(loader), Meter(env, optim), range(sampler.first_step, steps_per_epoch)
        bar = tqdm(steps, f"epoch {epoch + 1}/{optim.epochs}", leave=False, disable=env.rank != 0, **TQDM_OPTIONS)
        for step_in_epoch in bar:
            seed_step(seed, state.step, env.rank)
            for group in optimizer.param_groups:
                group["lr"] = lr = learning_rate(state.step, total_steps, optim)
            rows = sampler.rows_in_step(step_in_epoch)
            num_samples, num_scores = len(rows), dataset.num_scores(rows)
            for micro in range(optim.accumulate):
                with env.phase("data"):
                    batch = next(batches).to(env.device, non_blocking=True)
                with env.accumulating(ddp_model, last=micro == optim.accumulate - 1):
                    with env.phase("forward"), autocast:
                        prediction = ddp_model(graph, batch)
                    with env.phase("backward"):
                        loss = criterion(prediction, batch, model, optim.loss)
                        # Mean over the scores of the whole step; world_size undoes DDP's averaging over ranks.
                        scaler.scale(loss * (env.world_size / max(1, num_scores))).backward()
                meter.loss += loss.detach()
            with env.phase("optimiser"):
                grad_norm = optimizer_step(model, optimizer, scaler, optim)
            state.step += 1
            meter.count(num_samples, num_scores, grad_norm, scaler)
            profile.step()

            reason = env.stop_reason(state.step)
            end_of_epoch = state.step % steps_per_epoch == 0
            save_now = state.step % config.checkpoint.every_steps == 0 and not end_of_epoch
            if reason or save_now or end_of_epoch or state.step % config.log.every_steps == 0:
                row, meter = meter.read(state), Meter(env, optim)
                folder.write("train", state, lr=lr, **row)
                progress = f"loss {row['loss']:.4f}  {row['samples_per_s']:,.0f} samples/s  "
                bar.set_postfix_str(progress, refresh=False)
            if reason or save_now:
                folder.save(state)
            if reason:
                return folder.stop(state, reason)

    profile.stop()
    model.load_state_dict(state.best_model)
    prediction = predict_rows(model, graph, dataset, tables.rows("test"), config, env)
    if reason := env.stop_reason(state.step):
        return folder.stop(state, reason)
    folder.write("test", state, **test_metrics(prediction, tables, baseline, config), best_step=state.best["step"])
    folder.event("finished", state)
    log.info(f"run       {folder.path}, model of step {state.best['step']}")


def use_deterministic_algorithms() -> None:
    """Makes a GPU compute the same bits each time; what has no deterministic form is named in the log."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    logging.captureWarnings(True)
    torch.use_deterministic_algorithms(True, warn_only=True)


def check_scores(tables: Tables, config: Config) -> None:
    """Raises `UserError` for scores that optim.loss cannot take; notes options that do not suit the scores."""
    y = tables.y[tables.rows("train")]
    if empty := [name for name, missing in zip(tables.targets, y.isnan().all(dim=0).tolist(), strict=True) if missing]:
        raise UserError(f"no training row has a score '{empty[0]}': remove that column, or change the split")
    binary = bool(((tables.y == 0) | (tables.y == 1) | tables.y.isnan()).all())
    if config.optim.loss == "binary" and not binary:
        raise UserError("optim.loss=binary needs scores of 0 and 1: set optim.loss=squared")
    if config.optim.loss == "squared" and binary:
        log.warning("note      all scores are 0 or 1: optim.loss=binary predicts probabilities")
    if -math.inf < config.log.threshold and not (tables.y < config.log.threshold).any():
        log.warning(f"note      no score is below log.threshold={config.log.threshold:g}")


def build_model(config: Config, tables: Tables, effect: Tensor | None = None) -> nn.Module:
    """Returns a model that starts from the additive baseline with this `effect` of each node, if given, [N, T]."""
    mean, std = data.mean_and_std(tables.y[tables.rows("train")])
    effect = mean.new_zeros(len(tables.genes), len(mean)) if effect is None else effect
    if config.optim.loss == "binary":  # logits, which are the baseline's for rows of one deletion
        effect, mean, std = torch.logit(mean + effect, eps=1e-3), torch.logit(mean, eps=1e-3), torch.ones_like(std)
        effect = effect - mean
    rows = tables.rows("val")  # training hides as many nodes as are unseen there
    unseen = tables.unseen()[rows].sum() / tables.perturbed_ptr.diff()[rows].sum().clamp(min=1)
    size = len(tables.genes), len(tables.relations), 0 if tables.features is None else tables.features.size(1)
    model = KnockoutGNN(config.model, *size, mean.tolist(), std.tolist(), unseen.item())
    if model.local_readout is not None:
        model.local_readout.effect.data = (effect / std).float().flatten()
    return model


def build_optimizer(model: nn.Module, optim: OptimConfig, env: Distributed) -> torch.optim.Optimizer:
    """Returns AdamW, whose state `optim.zero` shards over ranks; only matrices get weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if optim.zero and env.launched:
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=optim.lr, fused=True)
    # With fused AdamW, GradScaler skips a non-finite step without a host sync; other optimisers (and ZeRO) sync.
    return torch.optim.AdamW(groups, lr=optim.lr, fused=True)


def criterion(prediction: Tensor, batch: Data, model: nn.Module, loss: str = "squared") -> Tensor:
    """Returns the weighted sum of squared errors over the training variance, or of the cross-entropies of logits."""
    if loss == "binary":
        y = batch.y.to(prediction)
        return nn.functional.binary_cross_entropy_with_logits(prediction, y, batch.weight, reduction="sum")
    return (batch.weight * ((prediction - batch.y) / model.y_std).square()).sum()


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, optim: OptimConfig
) -> Tensor:
    """Unscales, clips, steps if all gradients are finite, and clears them; returns their norm before clipping."""
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), optim.clip or math.inf)
    scaler.step(optimizer)
    scaler.update(None if optim.precision == "fp16" else 1.0)  # without fp16, the scale stays 1
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Returns the learning rate of a step: linear warm-up, then half a cosine to 0. Resuming needs no state for it."""
    warmup = max(1, round(optim.warmup * total_steps))
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch from (seed, step, rank), so that checkpoints need no generator state."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))


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
        return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any], optim: OptimConfig) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        inner = getattr(self.optimizer, "optim", self.optimizer)
        for parameter, values in inner.state.items():  # ZeRO leaves steps on the CPU, fused AdamW needs its own device
            values["step"] = values["step"].to(parameter.device)
        self.optimizer.param_groups[0]["weight_decay"] = optim.weight_decay  # the configuration's, not the checkpoint's
        if state["config"]["optim"]["precision"] == optim.precision:  # the loss scale depends on it
            self.scaler.load_state_dict(state["scaler"])
        for name in ("step", "epoch", "best", "best_model", "skipped", "skipped_in_row"):
            setattr(self, name, state[name])


class Meter:
    """Accumulates loss, times and non-finite steps since the last train row, without a device sync before `read`."""

    def __init__(self, env: Distributed, optim: OptimConfig):
        self.env, self.optim, self.start = env, optim, time.perf_counter()
        self.loss = torch.zeros((), dtype=torch.float64, device=env.device)  # of this rank's samples
        self.num_samples, self.num_scores, self.norms, self.scales = 0, 0, [], []
        env.seconds.clear()

    def count(self, num_samples: int, num_scores: int, grad_norm: Tensor, scaler: torch.amp.GradScaler) -> None:
        self.num_samples += num_samples
        self.num_scores += num_scores
        self.norms.append(grad_norm)
        self.scales.append(scaler.scale(torch.ones_like(grad_norm)))

    def read(self, state: TrainState) -> dict[str, Any]:
        """Returns the values of the train row; raises `RunError`, on every rank, for too many non-finite steps."""
        steps, elapsed = len(self.norms), time.perf_counter() - self.start
        values = torch.cat([torch.stack(part).double() for part in (self.norms, self.scales, [self.loss])])
        *values, loss = values.tolist()  # waits for the device, once
        norms, scales = values[:steps], values[steps:]
        # Gradients are equal on all ranks. Under fp16 GradScaler itself handles overflows while the scale is above 1.
        nonfinite = [not math.isfinite(norm) and scale <= 1 for norm, scale in zip(norms, scales, strict=True)]
        limit = MAX_SKIPS if self.optim.on_nonfinite == "skip" else 1
        for step, is_nonfinite in enumerate(nonfinite, start=state.step - steps + 1):
            state.skipped += is_nonfinite
            state.skipped_in_row = (state.skipped_in_row + 1) * is_nonfinite
            if state.skipped_in_row >= limit:
                found = f"step {step} is not finite, {limit} in a row (optim.on_nonfinite)"
                check = "find bad rows with `python -m tests.check rows` and the same options"
                raise RunError(f"{found}: lower optim.lr or optim.clip, or {check}")
        if any(nonfinite):
            log.warning(f"skipped   {sum(nonfinite)} steps that were not finite, {state.skipped} in total")
        gpu, kilobytes = self.env.device.type == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "loss": self.env.sum(torch.tensor(loss, dtype=torch.float64)).item() / max(1, self.num_scores),
            "grad_norm": norms[-1],
            "skipped": state.skipped,
            "samples_per_s": round(self.num_samples / elapsed, 1),
            "data_ms": round(1e3 * self.env.seconds["data"] / steps, 3),
            "step_ms": round(1e3 * elapsed / steps, 3),
            "memory_mb": round(torch.cuda.max_memory_allocated() / 2**20 if gpu else kilobytes / 2**10, 1),
        }


def profiler(config: Config, env: Distributed, path: Path) -> torch.profiler.profile | SimpleNamespace:
    """Returns a started profiler that skips three steps, then traces log.profile_steps; a no-op if that is 0."""
    if not config.log.profile_steps:
        return SimpleNamespace(step=lambda: None, stop=lambda: None)
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=config.log.profile_steps, repeat=1)
    file = str(path / f"trace.rank{env.rank}.json")
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=lambda done: done.export_chrome_trace(file))
    profile.start()
    return profile


# ---- Evaluation and prediction --------------------------------------------------------------------------------------
@torch.no_grad()
def predict_rows(
    model: nn.Module, graph: SharedGraph, dataset: KnockoutDataset, rows: Tensor, config: Config, env: Distributed
) -> Tensor:
    """Returns float64 [len(rows), T] on every rank: predictions of `rows`; probabilities if optim.loss=binary.

    Each row is predicted on one rank, by the bare model; the all-reduce adds only zeros to it and is therefore exact.
    """
    model.eval()
    batch_size = config.data.batch_size if config.model.readout != "local" else max(config.data.batch_size, 8192)
    predictions = torch.zeros(len(rows), dataset.y.size(1), dtype=torch.float64, device=env.device)
    own, start = predictions[env.rank :: env.world_size], 0
    batches = rows[env.rank :: env.world_size].split(math.ceil(batch_size / env.world_size))
    for batch in data.make_loader(dataset, batches, workers=0, pin=env.device.type == "cuda"):
        with env.phase("evaluation"):
            if env.stop and env.stop.code():  # all ranks will stop; the result is discarded
                break
            output = model(graph, batch.to(env.device, non_blocking=True)).double()
            own[start : start + len(output)] = output.sigmoid() if config.optim.loss == "binary" else output
            start += len(output)
    return env.sum(predictions).cpu()


def metrics(rows: Tensor, prediction: Tensor, tables: Tables, baseline: Tensor, config: Config) -> dict[str, Any]:
    """Returns metrics of the predictions of `rows`, beside the additive baseline's Pearson; nan where undefined.

    They are means over the targets, whose own are in `targets` if there are several. `average_precision` and `auroc`
    are those of finding scores of 1 (optim.loss=binary) or below log.threshold.
    """
    scores, spreads, parts = tables.y[rows], data.mean_and_std(tables.y[tables.rows("train")])[1], {}
    binary = config.optim.loss == "binary"
    for name, *columns, spread in zip(tables.targets, scores.T, prediction.T, baseline[rows].T, spreads, strict=True):
        missing = columns[0].isnan()
        y, p, additive = (column[~missing | missing.all()] for column in columns)  # never no rows
        mse = (p - y).square().mean()
        loss = nn.functional.binary_cross_entropy(p, y) if binary else mse / spread.square()
        part = {"loss": loss, "mse": mse, "r2": pearson(y, y) - mse / y.var(correction=0), "pearson": pearson(y, p)}
        p = p.float()  # rounding must not order the predictions of equal rows
        part |= {"spearman": pearson(rank(y), rank(p)), "baseline_pearson": pearson(y, additive)}
        positive, p = (y == 1, p) if binary else (y < config.log.threshold, -p)
        if positive.any():
            count = int(positive.sum())
            _, group, size = (-p).unique(return_inverse=True, return_counts=True)
            hits = torch.bincount(group[positive], minlength=len(size)).double()  # per distinct p, best first
            part["average_precision"] = (hits * hits.cumsum(0) / size.cumsum(0)).sum() / count
            part["auroc"] = (rank(p)[positive].mean() - (count + 1) / 2) / (len(y) - count)
        parts[name] = {key: value.item() for key, value in part.items()}
    result = {}
    for key in dict.fromkeys(key for part in parts.values() for key in part):
        values = [part[key] for part in parts.values() if not math.isnan(part.get(key, math.nan))]
        result[key] = sum(values) / len(values) if values else math.nan
    return result | ({"targets": parts} if len(parts) > 1 else {}) | {"n": len(rows)}


def test_metrics(prediction: Tensor, tables: Tables, baseline: Tensor, config: Config) -> dict[str, Any]:
    """Logs and returns the metrics of the test rows, also by the numbers of unseen and of knocked-out nodes.

    `gain` is the 95 % interval of Pearson's r less the additive baseline's, by a paired bootstrap over the rows.
    """
    rows, generator, gains = tables.rows("test"), torch.Generator().manual_seed(0), []
    test = metrics(rows, prediction, tables, baseline, config)
    y, additive = tables.y[rows], baseline[rows]
    for _ in range(max(100, min(1000, 10**8 // len(rows)))):  # a minute at most
        chosen = torch.randint(len(rows), (len(rows),), generator=generator)
        gains.append(pearson(y[chosen], prediction[chosen]) - pearson(y[chosen], additive[chosen]))
    test["gain"] = torch.stack(gains).nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    test["noise_ceiling"] = tables.noise_ceiling()
    limit = "" if test["noise_ceiling"] is None else f", noise ceiling {test['noise_ceiling']:.4f}"
    log.info(f"test      loss {test['loss']:.4f}, {PEARSON.format(**test)}{limit} ({len(rows):,} samples)")
    log.info("test      Pearson less the baseline's: {:.4f} to {:.4f} (95 % interval)".format(*test["gain"]))
    for name, counts in {"unseen": tables.unseen(), "deletions": tables.perturbed_ptr.diff()}.items():
        groups, test[f"by_{name}"] = counts[rows].clamp(max=3), {}
        for k in groups.unique().tolist():
            part = metrics(rows[groups == k], prediction[groups == k], tables, baseline, config)
            test[f"by_{name}"][k] = part
            if part["n"] < len(rows):  # there are several groups
                log.info(f"test      {name} {k}{'+' * (k == 3)}: {PEARSON.format(**part)} ({part['n']:,} samples)")
    return test


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Returns Pearson's r of a and b, [n, T], where a is not nan: its mean over targets for which a varies.

    It is 0 for a constant b, so that the means of all predictions are over the same targets.
    """
    moments = ((x, *data.mean_and_std(x)) for x in (a, b.where(~a.isnan(), math.nan)))
    a, b = ((x - mean) / std for x, mean, std in moments)
    return (a * b).nanmean(dim=0).where(a.square().nanmean(dim=0) > 0.5, math.nan).nanmean()


def rank(values: Tensor) -> Tensor:
    """Returns ranks from 1, float64 [n], of which equal values share the mean; nan stays."""
    _, group, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[group].where(~values.isnan(), math.nan)


def quality(result: dict[str, Any]) -> tuple[float, float]:
    """Returns a sort key, larger is better: Pearson's r, then the loss where that is undefined or equal."""
    return 0.0 if math.isnan(result["pearson"]) else result["pearson"], -result["loss"]


def predict(config: Config, env: Distributed, table: str, checkpoint: str) -> None:
    """Writes a prediction for each row of `table`, in order, to `<table>.predictions.tsv` in the working directory.

    Rows with unknown genes get an empty cell. `table` may be `all-singles` or `all-pairs`, of the graph's genes.
    """
    with env.sync_errors(DataError):
        state = read_checkpoint(checkpoint)
        tables = data.load(config.data)
        if state["data"] != tables.fingerprint():
            raise UserError(f"{checkpoint} was trained on different data from the configuration's")
        if (loss := state["config"]["optim"].get("loss", "squared")) != config.optim.loss:
            raise UserError(f"{checkpoint} was trained with optim.loss={loss}, not {config.optim.loss}")
        model = build_model(config, tables)
        load_model(model, state["model"], checkpoint)
    graph, model = SharedGraph(tables.graph()).to(env.device), model.to(env.device)
    trained = KnockoutDataset(tables.perturbed, tables.perturbed_ptr, tables.y, graph.degree)
    choose_route(config.model, graph, trained)
    number = data.Numbers(zip(tables.genes, range(graph.num_nodes), strict=True))
    output = Path(Path(table).name.removesuffix(".gz").removesuffix(".tsv") + ".predictions.tsv")
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    columns = tables.targets if len(tables.targets) > 1 else ["prediction"]
    sets, mode, text = data.read_sets(table, number), "w", "\t".join(["genes", *columns]) + "\n"
    num_rows = num_predicted = 0
    try:
        while text:
            with env.sync_errors(DataError), explain_write_errors(output, UserError, "change the working folder"):
                genes, row, node = next(sets, ((), *torch.empty(2, 0, dtype=torch.long)))
                if env.rank == 0:
                    with temporary.open(mode) as file:
                        file.write(text)
                    if not genes:
                        os.replace(temporary, output)
            known = torch.ones(len(genes), dtype=torch.bool).index_fill(0, row[node >= graph.num_nodes], False)
            knockouts = data.pack(row, node, len(genes))
            dataset = KnockoutDataset(*knockouts, tables.y.new_zeros(len(genes), len(columns)), graph.degree)
            dataset.transform = trained.transform
            predictions = predict_rows(model, graph, dataset, known.nonzero().flatten(), config, env)
            cells = ("\t".join(map(str, scores)) for scores in predictions.tolist())
            rows, empty = zip(genes, known.tolist(), strict=True), "\t" * (len(columns) - 1)
            mode, text = "a", "".join(f"{names}\t{next(cells) if ok else empty}\n" for names, ok in rows)
            num_rows, num_predicted = num_rows + len(genes), num_predicted + len(predictions)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    if unknown := list(number)[graph.num_nodes :]:
        names = ", ".join(unknown[:10]) + " ..." * (len(unknown) > 10)
        log.warning(f"{num_rows - num_predicted} rows have no prediction: these genes are not in the graph: {names}")
    log.info(f"{num_predicted} predictions written to {output}")


# ---- The run folder -------------------------------------------------------------------------------------------------
class RunFolder:
    """The run's files; only global rank 0 writes them, except for each rank's own log."""

    def __init__(self, config: Config, env: Distributed, fingerprint: str):
        self.config, self.env, self.fingerprint = config, env, fingerprint
        self.path = Path(config.run.dir, config.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.rows: list[dict] = []

    def open(self, model: nn.Module) -> dict | None:
        """On rank 0, locks the folder and returns the checkpoint to resume from, if any; raises `UserError`."""
        if self.env.rank != 0:
            return None
        with explain_write_errors(self.path, UserError):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "log.rank0.txt").open("a")
        for _ in range(100):  # ranks of a killed torchrun, and their DataLoader workers, take seconds to exit
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            raise UserError(f"another process is training in {self.path}: wait for it or set another run.name")
        if (checkpoint := self.newest_checkpoint()) is None:
            return None
        load_model(model, checkpoint["model"], self.path)
        for section, name in (("run", "seed"), ("data", "batch_size"), ("optim", "loss")):
            saved, value = checkpoint["config"][section].get(name, "squared"), asdict(self.config)[section][name]
            if saved != value:
                raise UserError(f"{self.path} has {section}.{name}={saved}, not {value}: set another run.name")
        if checkpoint["data"] != self.fingerprint:
            raise UserError(f"{self.path} was trained on different data or splits: set another run.name")
        return checkpoint

    def start(self, state: TrainState, ranks: list[str]) -> None:
        """Opens each rank's log, records configuration and environment, drops metrics rows that will be repeated."""
        with explain_write_errors(self.path, UserError):
            self.path.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(self.path / f"log.rank{self.env.rank}.txt")
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            logging.getLogger().addHandler(handler)
            self.env.progress = (state.step, *self.env.progress[1:])
            if self.env.rank != 0:
                return
            write_atomically(self.path / "config.yaml", yaml.safe_dump(asdict(self.config), sort_keys=False))
            folder = shlex.quote(str(Path(__file__).resolve().parent))
            commit = subprocess.getoutput(f"git -C {folder} describe --always --dirty --abbrev=40")
            packages = [f"{name}: {version(name)}" for name in ("torch", "torch-geometric", "pyyaml", "tqdm")]
            lines = [f"command: {shlex.join([sys.executable, *sys.argv])}", f"git commit: {commit}", *packages, *ranks]
            write_atomically(self.path / "environment.txt", "\n".join([*lines, ""]))
            metrics = self.path / "metrics.jsonl"
            for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else []:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a line cut off by a kill
                    row = json.loads(line)
                    validated = state.best is not None and row["epoch"] <= state.epoch
                    keep = {"train": row["step"] <= state.step, "val": validated, "test": False}
                    self.rows += [row] if keep.get(row["kind"], True) else []
            write_atomically(metrics, "".join(json.dumps(row) + "\n" for row in self.rows))
            self.metrics = metrics.open("a")
        resumed = state.step or state.best
        self.event("resumed" if resumed else "started", state, world_size=self.env.world_size)
        self.env.on_failure.append(lambda reason: self.event("failed", state, reason))
        log.info("\n".join(ranks))
        log.info(f"run       {self.path}, {f'resumed at step {state.step}' if resumed else 'from the start'}")

    def write(self, kind: str, state: TrainState, **values: Any) -> None:
        """Appends a row to metrics.jsonl, with null for non-finite numbers; a val row also redraws curves.svg."""
        if self.env.rank != 0:
            return
        values = json.loads(json.dumps(values), parse_constant=lambda name: None)
        self.rows.append({"kind": kind, "step": state.step, "epoch": state.epoch + (kind == "train"), **values})
        with explain_write_errors(self.path / "metrics.jsonl"):
            self.metrics.write(json.dumps(self.rows[-1]) + "\n")
            self.metrics.flush()
            if kind == "val":
                write_atomically(self.path / "curves.svg", curves_svg(self.rows))

    def save(self, state: TrainState, improved: bool = False) -> None:
        """A collective: writes this step's checkpoint, and best.pt if `improved`; raises `RunError` on every rank."""
        if isinstance(state.optimizer, ZeroRedundancyOptimizer):
            state.optimizer.consolidate_state_dict()  # each rank holds a shard
        with self.env.sync_errors(phase="save"):
            if self.env.rank != 0:
                return
            checkpoint = {**state.state_dict(), "config": asdict(self.config), "data": self.fingerprint}
            for name, tensor in checkpoint["model"].items():
                if not tensor.isfinite().all():
                    raise RunError(f"{name} is not finite at step {state.step}, no checkpoint is saved: lower optim.lr")
            path = self.checkpoints / f"step_{state.step:08d}.pt"
            with explain_write_errors(path):
                os.fsync(self.metrics.fileno())  # never a checkpoint without its rows
                if improved:
                    write_atomically(self.checkpoints / "best.pt", checkpoint)
                write_atomically(path, checkpoint)
                saved = [other for other in self.step_files() if other.name <= path.name]
                for other in saved[self.config.checkpoint.keep_last :]:
                    other.unlink()

    def event(self, event: str, state: TrainState, reason: str = "", **values: Any) -> None:
        """Records started, resumed, stopped, failed or finished in status.json and metrics.jsonl."""
        if self.env.rank == 0:
            status = "running" if event in ("started", "resumed") else event
            row = {"state": status, "step": state.step, "epoch": state.epoch, "reason": reason}
            with explain_write_errors(self.path / "status.json"):
                write_atomically(self.path / "status.json", json.dumps(row) + "\n")
            self.write("event", state, event=event, reason=reason, time=time.time(), **values)

    def stop(self, state: TrainState, reason: str) -> None:
        """Records that the run stopped on request, after its checkpoint was saved, and removes the file STOP."""
        if self.env.local_rank == 0:  # on every machine: the disk need not be shared
            with contextlib.suppress(OSError):
                (self.path / "STOP").unlink()
        self.event("stopped", state, reason)
        log.info(f"stopped   at step {state.step} ({reason}): the same command resumes the run")

    def step_files(self) -> list[Path]:
        """Returns the paths of the step checkpoints, newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def newest_checkpoint(self) -> dict | None:
        """Returns the folder's newest readable checkpoint, else that of run.resume, if set; raises `UserError`."""
        for path in [*self.step_files(), *self.checkpoints.glob("best.pt")]:
            try:
                return read_checkpoint(path)
            except UserError as error:
                log.warning(f"skipped a damaged checkpoint: {error}")
        return None if self.config.run.resume == "auto" else read_checkpoint(self.config.run.resume)


def read_checkpoint(path: str | Path) -> dict:
    """Returns a checkpoint with its tensors on the CPU; raises `UserError` if it is missing, damaged or holds code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: state[name] for name in (*(f.name for f in fields(TrainState)), "config", "data")}
    except FileNotFoundError:
        raise UserError(f"the checkpoint {path} does not exist") from None
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(f"{path} is not a readable checkpoint ({type(error).__name__})") from None


def load_model(model: nn.Module, state: dict[str, Tensor], where: str | Path) -> None:
    """Loads a state dict into `model`; raises `UserError` naming the keys or shapes that do not match."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"the model saved in {where} does not match: {' '.join(str(error).split())[:300]}") from None


@contextlib.contextmanager
def explain_write_errors(path: Path, kind: type[UserError] = RunError, advice: str = "set run.dir") -> Iterator[None]:
    """Turns a failure to write `path` into an error of type `kind`, which says why in one sentence, with `advice`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save may wrap an OSError
        reason = getattr(error, "strerror", None) or getattr(error.__context__, "strerror", error)
        raise kind(f"cannot write {path}: {reason}; fix that or {advice}, and start again") from None


def write_atomically(path: Path, content: str | dict) -> None:
    """Writes a file that appears complete or not at all; a dict is written by `torch.save`."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode()) if isinstance(content, str) else torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # on a full disk, logging the error needs its space


def curves_svg(rows: list[dict]) -> str:
    """Returns an SVG of loss and Pearson's r against the optimiser step, with a dotted line where a run resumed."""
    orange, blue, grey, width, height = "#e8590c", "#228be6", "#868e96", 380, 240
    dotted = f'stroke="{grey}" stroke-dasharray="1 4"'
    loss = [("train", "loss", "training", blue, ""), ("val", "loss", "validation", orange, "")]
    pearson = [("val", "pearson", "model", orange, ""), ("val", "baseline_pearson", "additive baseline", grey, "6 4")]
    panels = {"Loss": loss, "Pearson correlation, validation": pearson}
    last = max((row["step"] for row in rows), default=0) or 1
    resumed = sorted({row["step"] for row in rows if row.get("event") == "resumed"})
    svg = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 360" font-family="sans-serif" font-size="12">']
    svg.append("<style>text{fill:#495057} @media(prefers-color-scheme:dark){text{fill:#ced4da}}</style>")
    for left, (title, curves) in zip((56, 516), panels.items(), strict=True):
        svg.append(f'<g transform="translate({left} 64)"><text y="-44" font-weight="bold">{title}</text>')
        points = [
            [(row["step"], row[key]) for row in rows if row["kind"] == kind and row.get(key) is not None]
            for kind, key, *_ in curves
        ]
        low, *_, high = ticks = nice_ticks([value for curve in points for _, value in curve] or [0.0, 1.0])
        for tick in ticks:
            y = height * (high - tick) / (high - low)
            svg.append(f'<path d="M0 {y:.1f}h{width}" stroke="{grey}" stroke-opacity=".3"/>')
            svg.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        for step in (tick for tick in nice_ticks([0, last]) if tick <= last):
            svg.append(f'<text x="{width * step / last:.1f}" y="{height + 18}" text-anchor="middle">{step:,.0f}</text>')
        svg.append(f'<text x="{width / 2}" y="{height + 38}" text-anchor="middle">optimiser step</text>')
        svg += [f'<path d="M{width * step / last:.1f} 0v{height}" {dotted}/>' for step in resumed]
        legend = 0
        for (_, _, label, colour, dashes), curve in zip(curves, points, strict=True):
            line = " ".join(f"{width * x / last:.1f},{height * (high - y) / (high - low):.1f}" for x, y in curve)
            style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
            svg.append(f'<polyline points="{line}" {style}/><path d="M{legend} -24h22" {style}/>')
            svg.append(f'<text x="{legend + 28}" y="-20">{label}</text>')
            legend += 54 + 6.5 * len(label)
        if resumed:
            svg.append(f'<path d="M{legend} -24h22" {dotted}/><text x="{legend + 28}" y="-20">resumed</text>')
        svg.append("</g>")
    return "\n".join([*svg, "</svg>\n"])


def nice_ticks(values: list[float]) -> list[float]:
    """Returns a few evenly spaced round numbers that span `values`."""
    low, high = min(values), max(values)
    span = max(high - low, 1e-9 * max(1.0, abs(low), abs(high)))
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


# ---- Command line ---------------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    options = Path(__file__).with_name("config.yaml").read_text()
    parser = Parser(description=__doc__, epilog=options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="an option of config.yaml")
    parser.add_argument("--config", metavar="FILE", help="default: config.yaml beside train.py, or the checkpoint's")
    parser.add_argument("--predict", metavar="TABLE", help="a table of knock-out sets, all-singles or all-pairs")
    parser.add_argument("--checkpoint", metavar="FILE", help="the trained model for --predict")
    parsed = parser.parse_intermixed_args(arguments)
    if bool(parsed.predict) != bool(parsed.checkpoint):
        raise UserError("--predict TABLE and --checkpoint FILE go together")
    return parsed


class UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in keys[:i]:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def load_config(arguments: argparse.Namespace) -> Config:
    """Returns the file's options, overridden by the command line; raises `UserError` for a wrong file or option."""
    options = {f"{section.name}.{f.name}": f for section in fields(Config) for f in fields(section.type)}
    default = arguments.checkpoint or Path(__file__).with_name("config.yaml")
    source = default if arguments.config is None else arguments.config
    try:
        if source == arguments.checkpoint:
            sections = read_checkpoint(source)["config"]
        else:
            sections = yaml.load(Path(source).read_text(), UniqueKeyLoader) or {}
        given = {f"{name}.{key}": value for name, values in sections.items() for key, value in (values or {}).items()}
        for source in arguments.overrides:
            key, _, text = source.partition("=")
            given[key] = text if key in options and options[key].type is str else yaml.safe_load(text)
    except AttributeError:
        raise UserError(f"{source} does not contain sections of options: see config.yaml") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the configuration {source}: {' '.join(str(error).split())}") from None
    sections = {section.name: {} for section in fields(Config)}
    for key, value in given.items():
        if key not in options:
            nearest = difflib.get_close_matches(key, options, n=1, cutoff=0)[0]
            raise UserError(f"unknown option {key}: did you mean {nearest}?")
        section, name = key.split(".")
        sections[section][name] = convert(key, value, options[key])
    try:
        return Config(**{section.name: section.type(**sections[section.name]) for section in fields(Config)})
    except ValueError as error:
        raise UserError(str(error)) from None


def convert(key: str, value: Any, option: Field) -> Any:
    """Returns `value` as the option's type; raises `UserError` if that would lose information or is out of range."""
    kind, choices = option.type, get_args(option.type)
    # An int may be 0 only if that is its default, a float negative only if its default is.
    least = 1 if kind is int and option.default else min(0, option.default if kind is float else 0)
    if kind is float and type(value) in (int, str):  # YAML reads 1e-3 as a string
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    valid = value in choices if choices else type(value) is kind
    if not valid or (kind in (int, float) and not least <= value < 2**32):
        expected = " or ".join(choices) or f"{kind.__name__}{f' >= {least}' * (kind in (int, float))}"
        raise UserError(f"{key} must be {expected}, not {value!r}")
    return value


if __name__ == "__main__":
    main()
