"""Trains a knock-out GNN on one large graph that all samples share.

    python train.py                                     one process
    torchrun --standalone --nproc_per_node=4 train.py   four processes, each on a GPU or on the CPU

All options are in config.yaml. On the command line, section.key=value overrides an option for this
run, for example:

    python train.py run.name=first optim.lr=0.003

If the run folder is empty, this command starts the run. Otherwise, it resumes the run from its
newest checkpoint. To stop the run early, press Ctrl-C, send a signal such as SIGTERM, or create a
file STOP in the run folder. train.py then saves a checkpoint and exits.

Exit status: 0 if the run finished or was stopped on request, 1 if it failed, 2 if the configuration
or the input data is wrong.
"""

import copy
import hashlib
import logging
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

# OpenMP reads this variable when torch is imported. It limits how long a thread spins while it
# waits for work. By default, threads spin for a long time, and slow down other threads on the same
# cores.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")
# Search this folder first for imports, because other folders may have modules with the same names.
# Without this line, Python would not search this folder at all if PYTHONSAFEPATH is set.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # raised when PyG is imported

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data

from config import Config, Parser, all_options_text, load_config, run_command
from data_loader import StepSampler, make_loader
from ddp_ends import StopRequest, StopTraining, end_process
from ddp_setup import Distributed, library_versions
from errors import RunError, counted
from evaluate import predict_rows
from metrics import metrics_text, quality
from optim import OptimConfig, build_optimizer, may_step, schedule, set_learning_rates
from parts import check_parts, is_here, module_names, optional
from run_checkpoint import TrainState
from run_folder import RunFolder
from run_progress import progress_bar
from task import KnockoutTask

log = logging.getLogger("train")

RSS_UNIT = 1 if sys.platform == "darwin" else 2**10  # number of bytes in the unit of ru_maxrss
# With optim.on_nonfinite=skip, the run fails after this number of non-finite steps in a row.
MAX_SKIPS = 10


class StepParts(NamedTuple):
    """The components of a training step. With CUDA graphs, `capture` replaces all of them."""

    model: nn.Module  # the model that a step calls; wrapped in DDP if torchrun launched the process
    dataset: Dataset  # the dataset of the training batches
    # A function with the interface of `update_parameters`, which clips and applies the gradients.
    update: Callable[[TrainState, float], Tensor]
    note: str = ""  # a text that is appended to the log line about the model


def train(config: Config, ddp: Distributed) -> None:
    """Trains a run from its start, or resumes it from its newest checkpoint.

    All ranks must call this function. It raises `UserError` on every rank if the options or the
    tables are wrong, and `RunError` on every rank if training fails after it has started.
    """
    optim = config.optim
    if config.run.deterministic:
        # cuBLAS is only deterministic if its workspace has a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Log torch's warnings, which name operators without a deterministic version.
        logging.captureWarnings(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
    task = KnockoutTask.load(config, ddp)
    torch.manual_seed(config.run.seed)  # all ranks draw the same initial parameters
    model = task.build_model().to(ddp.device, optim.dtype)
    task.check_plan(model)
    optimizer = build_optimizer(model, optim, ddp)
    # With fp16, GradScaler multiplies the loss by a large factor, so that small gradients do not
    # become 0. With any other precision, it is disabled, and its methods have no effect.
    scaler = torch.amp.GradScaler(ddp.device.type, enabled=optim.precision == "fp16")
    state = TrainState(model, optimizer, scaler)
    changes = optional("run_changes")
    code = {} if changes is None else changes.code_of_steps()
    shared = {**config.shared_options(), "data (hash)": task.fingerprint}
    # Ranks must not differ in their libraries, code, options or tables.
    ddp.check_equal({**library_versions(), **code, **shared, "the list of modules": module_names()})

    # `StepSampler` replaces DistributedSampler, whose batch size is per rank. Here, data.batch_size
    # is the total over all ranks and micro-batches. A step therefore has the same rows for any
    # number of ranks, and the learning rate need not be adapted.
    sampler = StepSampler(
        task.rows("train"),
        config.data.batch_size,
        accumulate=optim.accumulate,
        world_size=ddp.world_size,
        rank=ddp.rank,
        seed=config.run.seed,
    )
    folder = RunFolder(config, ddp, task.origin(code), list(task.rivals))
    folder.resume(state, sampler.steps_per_epoch)
    if task.graph is not None:
        from run_results import write_graph  # copies without a graph do not have this module

        write_graph(folder, task.tables)
    # After this call, a signal or the file STOP stops training after the same step on all ranks.
    ddp.stop = StopRequest(folder.path / "STOP", ddp.cleanup)
    step_parts = StepParts(model, task.dataset, update_parameters)
    if task.captures_steps:
        from model_graphs import capture

        # Capture before the DataLoader exists, because torch.cuda.make_graphed_callables fails if a
        # different thread allocates memory during the capture.
        step_parts = capture(step_parts, state, task, sampler, ddp)
    train_loader = make_loader(step_parts.dataset, sampler, config.data.workers, ddp.device)
    if ddp.is_distributed:
        # In the backward pass, DDP averages the gradients over all ranks, so every rank makes the
        # same step. Only training steps use this wrapper. Validation and checkpoints use
        # `state.model`, which has the same parameters.
        ddp_model = DistributedDataParallel(
            ddp.prepare_for_ddp(step_parts.model), device_ids=ddp.device_ids, **config.ddp.options
        )
        order_buckets(ddp_model, task, ddp)
        step_parts = step_parts._replace(model=ddp_model)
    log_plan(task, model, sampler, step_parts.note)
    folder.write_status("running")  # adds the warnings of `log_plan` to status.json
    try:
        if state.best is None:
            # Validate the starting point, because it is also a candidate for the best model.
            validate(task, state, folder, ddp, ends_epoch=False)
        with folder.profile():
            while not state.is_trained(optim, sampler.steps_per_epoch):
                # A run that resumes in the middle of an epoch skips the steps that it has made.
                first_step = state.step - state.epoch * sampler.steps_per_epoch
                sampler.set_epoch(state.epoch, first_step=first_step)
                train_epoch(task, state, step_parts, folder, train_loader, ddp)
                validate(task, state, folder, ddp, ends_epoch=True)
        option = "epochs" if state.epoch >= optim.epochs else "patience"
        epochs = counted(state.epoch, "epoch")
        log.info(f"trained   {epochs}: increase optim.{option} to train further")
        test(task, state, folder, ddp)
    except StopTraining as stop:  # every rank raises it after the same step
        folder.stop(state, str(stop))


def train_epoch(
    task: KnockoutTask,
    state: TrainState,
    step_parts: StepParts,
    folder: RunFolder,
    loader: DataLoader,
    ddp: Distributed,
) -> None:
    """Trains one epoch. If the run was resumed in the middle of an epoch, trains the rest of it.

    Raises `StopTraining` on every rank if a stop was requested, and `RunError` on every rank if
    training fails.
    """
    config = task.config
    optim = config.optim
    sampler = loader.batch_sampler
    total_steps = sampler.steps_per_epoch * optim.epochs
    meter = Meter(task, ddp)
    batches = iter(loader)
    state.model.train()
    steps_left = range(sampler.first_step, sampler.steps_per_epoch)
    title = f"epoch {state.epoch + 1}/{optim.epochs}"
    bar = progress_bar(steps_left, title, delay=0, is_shown=ddp.rank == 0)
    for step_in_epoch in bar:
        lr_factor = schedule(state.step, total_steps, optim)
        set_learning_rates(state.optimizer, lr_factor)
        rows = sampler.rows_in_step(step_in_epoch)
        norm_and_scale = train_step(task, state, step_parts, batches, len(rows), meter, ddp)
        meter.count(len(rows), task.dataset.total_weight(rows), norm_and_scale)
        state.step += 1
        folder.profile_step()
        ddp.step_done(state.step)

        is_last = step_in_epoch == sampler.steps_per_epoch - 1
        # In most steps, `stop_reason` returns "" without any communication between the ranks.
        reason = ddp.stop_reason(at_once=False)
        save_now = state.step % config.checkpoint.every_steps == 0 and not is_last
        log_now = state.step % config.log.every_steps == 0
        if reason or save_now or log_now or is_last:
            row = meter.read(state)
            meter = Meter(task, ddp)
            largest_lr = max(group["lr"] for group in state.optimizer.param_groups)
            folder.write("train", state, lr=largest_lr, **row)
            folder.loss_and_speed = f"loss {row['loss']:.4f}  {row['samples_per_s']:,.0f} samples/s"
            bar.set_postfix_str(folder.progress(state.step), refresh=False)
        if reason or save_now:
            folder.save(state)  # a collective: all ranks call it, and rank 0 writes the file
        if reason:
            raise StopTraining(reason)


def train_step(
    task: KnockoutTask,
    state: TrainState,
    step_parts: StepParts,
    batches: Iterator[Data],
    num_rows: int,
    meter: "Meter",
    ddp: Distributed,
) -> Tensor:
    """Makes one optimiser step; returns its gradient norm and loss scale, [2].

    Args:
        batches: yields this rank's micro-batches.
        num_rows: the number of rows in the step, over all ranks and micro-batches.
        meter: receives the loss of each micro-batch.
    """
    optim = task.config.optim
    ddp_model = step_parts.model
    seed = seed_step(task.config.run.seed, state.step, ddp)
    # `task.loss` returns sums over the rows of a micro-batch. The loss of a step is the mean over
    # all of its rows and scores, so the sums are divided by the numbers of rows and scores. DDP
    # averages gradients over ranks; the factor world_size turns this average into a sum.
    loss_factor = ddp.world_size / (num_rows * task.num_targets)
    for micro_step in range(optim.accumulate):
        with ddp.phase("data"):
            batch = next(batches).to(ddp.device, non_blocking=True)
            batch.seed = seed
        is_last = micro_step == optim.accumulate - 1
        # Without no_sync, DDP would all-reduce the gradients in every backward pass. The all-reduce
        # is only needed for the last micro-batch. Before this, each rank accumulates its gradients.
        # The block contains the forward pass, because DDP prepares the all-reduce in this pass.
        with nullcontext() if is_last or not ddp.is_distributed else ddp_model.no_sync():
            with ddp.phase("forward"), autocast(optim, ddp):
                output = ddp_model(task.graph, batch)
            with ddp.phase("backward"):
                loss = task.loss(output, batch)  # one loss per score, [T]
                state.scaler.scale(loss.sum() * loss_factor).backward()
        meter.add_loss(loss.detach())
    with ddp.phase("optimiser"):
        return step_parts.update(state, optim.clip or math.inf)


def update_parameters(state: TrainState, clip: float) -> Tensor:
    """Clips the gradients to the norm `clip`, makes the optimiser's step and zeroes the gradients.

    Returns the gradient norm before clipping and the scale of the loss, [2]. With CUDA graphs,
    later steps usually do not call this function, but only replay its tensor operations.
    """
    parameters = list(state.model.parameters())
    # `scale` is the loss scale. Without fp16, it is 1. `get_scale` would wait for the GPU.
    scale = state.scaler.scale(torch.ones((), device=parameters[0].device))
    # Divide the gradients by the scale, because `clip` is for gradients of the unscaled loss.
    state.scaler.unscale_(state.optimizer)
    grad_norm = clip_grad_norm_(parameters, clip)
    # `scaler.step` is not used here, because it only checks the gradients if the precision is fp16.
    if may_step(state.optimizer, grad_norm):
        state.optimizer.step()
    state.scaler.update()
    state.optimizer.zero_grad()
    return torch.stack([grad_norm, scale.to(grad_norm)])


def validate(
    task: KnockoutTask, state: TrainState, folder: RunFolder, ddp: Distributed, ends_epoch: bool
) -> None:
    """Validates the model and saves a checkpoint, also as best.pt if the model is the best so far.

    `ends_epoch` is True if this validation completes an epoch. If a stop was requested, the state
    before the validation is saved instead, and every rank raises `StopTraining`. A resumed run then
    repeats the validation.
    """
    output = predict_rows(state.model, task, task.rows("val"), ddp)
    reason = ddp.stop_reason()
    if reason:
        folder.save(state)
        raise StopTraining(reason)
    val = task.metrics("val", output)
    if ends_epoch:
        state.epoch += 1
    # Rank 0 decides for all ranks.
    is_best = ddp.broadcast(state.best is None or quality(val) > quality(state.best))
    if is_best:
        state.best = {"step": state.step, **val}
        state.best_model = copy.deepcopy(state.model.state_dict())
    folder.write("val", state, **val)
    folder.save(state, is_best)
    title = f"epoch {state.epoch}/{task.config.optim.epochs}  step {state.step}"
    texts = [title, folder.progress(state.step), f"val {metrics_text(val, task.rivals)}"]
    log.info("  ".join(filter(None, texts)))


def test(task: KnockoutTask, state: TrainState, folder: RunFolder, ddp: Distributed) -> None:
    """Tests the best model and finishes the run.

    If a stop was requested, every rank raises `StopTraining`. A resumed run then repeats the test.
    """
    state.model.load_state_dict(state.best_model)
    output = predict_rows(state.model, task, task.rows("test"), ddp)
    reason = ddp.stop_reason()
    if reason:
        raise StopTraining(reason)
    result = task.metrics("test", output)
    folder.finish(state, result, task.result_lines(output))
    log.info(f"test      {metrics_text(result, task.rivals)} ({counted(result['n'], 'sample')})")


class Meter:
    """Accumulates losses, times and non-finite steps for one train row of metrics.jsonl.

    Only `read` waits for the device. If each step read its loss, the host could not launch kernels
    in advance, and a GPU would be idle between steps.
    """

    def __init__(self, task: KnockoutTask, ddp: Distributed):
        self.optim = task.config.optim
        self.ddp = ddp
        self.start = time.perf_counter()
        # Sums for each score, [T]: the losses of this rank, and the weights over all ranks.
        self.loss = torch.zeros(task.num_targets, dtype=torch.float64, device=ddp.device)
        self.weight = torch.zeros(task.num_targets, dtype=torch.float64)
        self.num_samples = 0
        # The loss of this rank in the current step, over all scores.
        self.loss_of_step = torch.zeros((), device=ddp.device)
        self.steps = []  # for each step, a tensor [3]: gradient norm, loss scale and loss
        ddp.seconds.clear()

    def add_loss(self, loss: Tensor) -> None:
        """Adds this rank's loss of a micro-batch, one value for each score, [T]."""
        self.loss += loss.view_as(self.loss)
        self.loss_of_step += loss.sum()

    def count(self, num_samples: int, weight: Tensor, norm_and_scale: Tensor) -> None:
        """Ends a step, given its number of samples and the sum of each score's weights, [T].

        The number and the sums are totals over all ranks. `norm_and_scale` [2] is the result of
        `train_step`.
        """
        self.num_samples += num_samples
        self.weight += weight
        self.steps.append(torch.cat([norm_and_scale, self.loss_of_step.to(norm_and_scale).view(1)]))
        self.loss_of_step.zero_()

    def read(self, state: TrainState) -> dict[str, Any]:
        """Returns the metrics of all steps, for a row of metrics.jsonl.

        All ranks must call this method. It raises `RunError` on every rank if too many steps in a
        row were not finite.
        """
        num_steps = len(self.steps)
        norm, scale, loss_of_rank = torch.stack(self.steps).unbind(dim=1)
        # `cpu` waits until the device has finished all steps.
        losses = self.ddp.sum(torch.cat([self.loss, loss_of_rank])).cpu()
        elapsed = time.perf_counter() - self.start
        loss_of_scores, loss_of_steps = losses.split([len(self.loss), num_steps])
        steps = zip(norm.tolist(), scale.tolist(), loss_of_steps.tolist(), strict=True)
        self._count_skipped(list(steps), state)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
        if self.ddp.device.type == "cuda":
            # `max_memory_allocated` would not include the memory that CUDA graphs need for replays.
            memory = torch.cuda.max_memory_reserved()
        mean_of_score = loss_of_scores / self.weight
        return {
            "loss": mean_of_score.nanmean().item(),
            "grad_norm": norm[-1].item(),
            "skipped": state.skipped,
            "samples_per_s": round(self.num_samples / elapsed, 1),
            "data_ms": round(1e3 * self.ddp.seconds["data"] / num_steps, 3),
            "step_ms": round(1e3 * elapsed / num_steps, 3),
            "memory_mb": round(memory / 2**20, 1),
        }

    def _count_skipped(self, steps: list[tuple[float, float, float]], state: TrainState) -> None:
        """Counts the non-finite steps in `state`; raises `RunError` if there are too many in a row.

        `steps` contains the gradient norm, the loss scale and the loss of each step. They are the
        same on all ranks, so all ranks raise the error.
        """
        limit = MAX_SKIPS if self.optim.on_nonfinite == "skip" else 1
        first = state.step - len(steps) + 1
        for step, (norm, scale, loss) in enumerate(steps, first):
            # With fp16, a gradient overflows if the loss scale is too large. GradScaler then
            # decreases the scale, so such a step is not counted. If the scale is 1, or the loss is
            # not finite either, the scale is not the cause.
            is_overflow = scale > 1 and math.isfinite(loss)
            if math.isfinite(norm) or is_overflow:
                state.skipped_in_row = 0
                continue
            state.skipped += 1
            state.skipped_in_row += 1
            if state.skipped_in_row < limit:
                count = counted(state.skipped, "skipped step")
                reason = "because its gradient is not finite"
                log.warning(f"skipped   step {step}, {reason} ({count} so far)")
                continue
            advice = "decrease optim.lr or optim.clip"
            if is_here("tests/check"):
                advice += ", or find bad rows with `python -m tests.check rows` and your options"
            count = counted(limit, "such step", "such steps in a row")
            raise RunError(
                f"the gradient of step {step} is not finite, and optim.on_nonfinite="
                f"{self.optim.on_nonfinite} ends the run after {count}: {advice}"
            )


def autocast(optim: OptimConfig, ddp: Distributed) -> torch.autocast:
    """Returns torch's autocast for a forward pass; it only has an effect with bf16 and fp16."""
    dtype = optim.autocast_dtype
    return torch.autocast(ddp.device.type, dtype, enabled=dtype is not None)


def seed_step(seed: int, step: int, ddp: Distributed) -> Tensor:
    """Returns the seed of the model's random numbers in a step, a long scalar tensor.

    This seed is the same on all ranks, so the model draws the same numbers for a node or a row on
    any rank. The function also seeds torch's generators, for layers such as nn.Dropout. Their seed
    differs between ranks. Both seeds are computed only from run.seed, the step and the rank, so a
    checkpoint need not contain the states of generators.
    """
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest()
    step_seed = int.from_bytes(digest, "big")
    torch.manual_seed(step_seed + ddp.rank)
    return torch.full((), step_seed, device=ddp.device)


def order_buckets(ddp_model: nn.Module, task: KnockoutTask, ddp: Distributed) -> None:
    """Makes DDP order its buckets before the first step, with a backward pass that changes nothing.

    DDP all-reduces gradients in buckets, and reorders the buckets after the first backward pass of
    a process. With three or more ranks, the position of a gradient in its bucket determines the
    order of summation over ranks, and therefore the rounding. Without this extra pass, the first
    step of a resumed run would differ in rounding from the same step of an uninterrupted run.
    """
    # The row number -1 stands for padding, whose loss has the weight 0.
    padding = task.dataset.__getitems__([-1, -1]).to(ddp.device)
    ddp_model.eval()  # otherwise, the statistics of BatchNorm would include the padding
    with autocast(task.config.optim, ddp):
        output = ddp_model(task.graph, padding)
    task.loss(output, padding).sum().backward()
    ddp_model.zero_grad(set_to_none=True)


def log_plan(task: KnockoutTask, model: nn.Module, sampler: StepSampler, graphs: str) -> None:
    """Logs the data, warnings about tables and options, the model and the batch size.

    `graphs` says whether steps are captured. It is appended to the line about the model.
    """
    config = task.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(f"data      {task.summary()}")
    for note in task.notes():
        log.warning(f"note      {note}")
    log.info(f"model     {num_parameters:,} parameters; {task.route}{graphs}")
    log.info(
        f"batch     {counted(config.data.batch_size, 'sample')} over "
        f"{counted(sampler.num_replicas, 'rank')} and "
        f"{counted(config.optim.accumulate, 'micro-batch', 'micro-batches')}, "
        f"{counted(sampler.steps_per_epoch, 'step')} per epoch"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with the options of a command line; returns the exit status.

    `arguments` are the words of the command line after train.py, by default `sys.argv[1:]`.
    """
    return run_command(arguments, read_config, train)


def read_config(arguments: Sequence[str] | None = None) -> Config:
    """Returns the options of a command line, by default `sys.argv[1:]`; raises `UserError`."""
    parser = Parser(__doc__, epilog=all_options_text())
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="also read options from this YAML file, which overrides config.yaml and earlier files",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="set an option, such as optim.lr=0.1; this overrides all files",
    )
    parsed = parser.parse_intermixed_args(arguments)
    config = load_config(parsed.config, parsed.overrides)
    check_parts(config.options())
    return config


if __name__ == "__main__":
    end_process(main())
