"""`python -m tests.check rows` finds rows that cause a step that is not finite.

`python -m tests.check trace` shows how the steps of a run spent their time.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ddp_setup import Distributed, setup
from errors import UserError, counted
from evaluate import compute_rows, evaluation_batch_size, predict_rows
from run_checkpoint import load_model
from run_folder import RunFolder
from task import KnockoutTask
from train import autocast, read_config

SPLITS = ("train", "val", "test")
SHOWN = 20  # largest number of bad rows to print
LARGEST = 5  # number of rows to print if no row is bad
WORST = 3  # largest number of scores to print for each row
PHASES = ("data", "forward", "backward", "optimiser", "agreement", "evaluation", "save")


# ---- Rows ----------------------------------------------------------------------------------------
def rows(options: argparse.Namespace) -> bool:
    """Prints the rows whose loss is not finite with the model of the newest checkpoint.

    If there are no such rows, it prints the training rows with the largest losses, and returns
    True. Otherwise, it returns False.
    """
    config = read_config(options.arguments)
    ddp = setup(Distributed(config.ddp))
    task = KnockoutTask.load(config, ddp)
    torch.manual_seed(config.run.seed)
    model = newest_model(task, ddp).to(ddp.device, config.optim.dtype)
    broken = [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        print(
            "the model has parameters that are not finite, so the cause cannot be traced to rows: "
            f"{', '.join(broken)}"
        )
        return False

    model.eval()
    of_split = {split: task.rows(split) for split in SPLITS}
    chosen = torch.cat(list(of_split.values()))
    with autocast(config.optim, ddp):
        losses = losses_of_rows(model, task, chosen, ddp)
    loss_of_row = losses.sum(dim=1)
    bad = (~loss_of_row.isfinite()).nonzero().flatten()
    if len(bad):
        print(
            f"rows whose loss is not finite: {len(bad)} of {len(chosen)}. Rows are numbered from "
            f"0.{f' The first {SHOWN} are:' if len(bad) > SHOWN else ''}"
        )
        shown = bad[:SHOWN]
    else:
        print(
            "all losses are finite. If the gradient of a step is not finite, decrease optim.lr. "
            "The training rows with the largest losses are:"
        )
        order = loss_of_row[: len(of_split["train"])].argsort(descending=True)
        shown = order[:LARGEST]
    with autocast(config.optim, ddp):
        output = predict_rows(model, task, chosen[shown], ddp)
    for place, output_of_row in zip(shown, output, strict=True):
        row = int(chosen[place])
        (split,) = [split for split, rows in of_split.items() if row in rows]
        text = describe_row(task, row, output_of_row, losses[place])
        print(f"  row {row} ({split}): {text}loss {loss_of_row[place]:.3g}")
    return len(bad) == 0


def losses_of_rows(model: nn.Module, task: KnockoutTask, rows: Tensor, ddp: Distributed) -> Tensor:
    """Returns the loss of each score of n rows, float64 [n, T], 0 for scores with weight 0.

    The loss of a batch is the weighted sum of the losses of its scores. The loss of a score is
    therefore the derivative of this sum with respect to its weight.
    """

    def losses(batch: Data) -> Tensor:
        output = model(task.graph, batch)
        batch.weight.requires_grad_()
        with torch.enable_grad():
            (of_scores,) = torch.autograd.grad(task.loss(output, batch).sum(), batch.weight)
        return of_scores.where(batch.weight != 0, 0.0).view(-1, task.num_targets)

    size = evaluation_batch_size(task)
    return compute_rows(losses, task.dataset, rows, size, (task.num_targets,), ddp)


def newest_model(task: KnockoutTask, ddp: Distributed) -> nn.Module:
    """Returns the model of the run's newest checkpoint, or the initial model if there is none."""
    with ddp.sync_errors():
        model = task.build_model()
        folder = RunFolder(task.config, ddp, task.origin({}))
        checkpoint = folder.newest_checkpoint()
        source = "step 0 (no checkpoint found)"
        if checkpoint is not None:
            load_model(model, checkpoint)
            source = f"step {checkpoint['step']}"
    print(f"{folder.path}: model of {source}")
    return model


def describe_row(task: KnockoutTask, row: int, output: Tensor, losses: Tensor) -> str:
    """Returns a text with the nodes of a row, and its scores and predictions with large losses.

    The text is "" for a task without tables of knock-outs.

    Args:
        task: the task.
        row: number of the row.
        output: the model's output for the row, [T, C].
        losses: the loss of each score of the row, [T].
    """
    if not hasattr(task, "tables"):
        return ""
    tables = task.tables
    prediction = task.predictions(output.unsqueeze(0))["prediction"][0]
    start, end = tables.perturbed_ptr[row : row + 2].tolist()
    nodes = ",".join(tables.names(tables.perturbed[start:end], tables.level[start:end]))
    scores = []
    for target in losses.nan_to_num(math.inf).argsort(descending=True)[:WORST].tolist():
        name = tables.targets[target]
        scores.append(f"{name} {tables.y[row, target]:g}, prediction {prediction[target]:g}")
    return f"genes {nodes}, {'; '.join(scores)}, "


# ---- Traces --------------------------------------------------------------------------------------
def trace(options: argparse.Namespace) -> None:
    """Prints how the steps that `log.profile_steps` traced spent their time, and the slowest rank.

    The shares are means over all ranks.
    """
    if len(options.arguments) != 1:
        raise UserError("trace needs one run folder: give its path, such as runs/default")
    folder = Path(options.arguments[0])
    times = {}  # {"rank0": result of `read_trace`}
    for path in folder.glob("trace.rank*.json"):
        rank = path.name.removeprefix("trace.").removesuffix(".json")
        times[rank] = read_trace(path)
    if not times:
        raise UserError(
            f"{folder} does not contain trace.rank*.json: train with log.profile_steps=5"
        )
    names = next(iter(times.values()))
    mean = {name: statistics.mean(time[name] for time in times.values()) for name in names}
    steps = counted(round(mean["steps"]), "step")
    print(f"{steps} of {mean['step']:.1f} ms, mean of {counted(len(times), 'rank')}:")
    for name in (*PHASES, "rest"):
        print(f"  {name:10s} {100 * mean[name] / mean['step']:5.1f} %")
    print(
        "communication that does not overlap with computation (part of the above): "
        f"{100 * mean['exposed'] / mean['step']:.1f} %"
    )
    work = {
        rank: time["step"] - time["agreement"] - time["exposed"] for rank, time in times.items()
    }
    slowest = max(work, key=work.get)
    print(
        f"slowest: {slowest} with {work[slowest]:.1f} ms of work per step (median of all "
        f"ranks: {statistics.median(work.values()):.1f} ms)"
    )
    print(
        "To see details, open the traces in ui.perfetto.dev. On GPUs, the times of phases are "
        "times of the host, which runs ahead of the GPU."
    )


def read_trace(path: Path) -> dict[str, float]:
    """Returns the number of steps in the trace of a rank, and several times per step in ms.

    The keys are `steps`; `step`, the complete time; each of `PHASES`; `rest`, the time outside
    phases; and `exposed`, the time of communication that does not overlap with computation.
    """
    spans = read_spans(path)
    num_steps = len(spans["ProfilerStep"])
    if not num_steps:
        raise UserError(
            f"{path} does not contain a complete step: set log.profile_steps to at most the number "
            "of steps of the run minus 4"
        )
    busy = spans["device"]
    exchange = spans["nccl"]
    if not busy:  # in a trace of a CPU, agreement is not exposed communication, but its own phase
        busy = spans["host"] + spans["agreement"]
        exchange = spans["gloo"]
    length = {"step": covered(spans["ProfilerStep"])}
    for phase in PHASES:
        length[phase] = covered(spans[phase])
    length["rest"] = length["step"] - sum(length[phase] for phase in PHASES)
    length["exposed"] = covered(busy + exchange) - covered(busy)
    times = {name: microseconds / 1e3 / num_steps for name, microseconds in length.items()}
    return {"steps": num_steps, **times}


def read_spans(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Returns {kind: [(start, end), ...]} of the events in a trace, in microseconds."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "X":
                spans[kind(event)].append((event["ts"], event["ts"] + event["dur"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read the trace {path}: {error}: remove it, and train with log.profile_steps=5"
        ) from None
    return spans


def kind(event: dict) -> str:
    """Returns the kind of an event, or "" for other events.

    The kind is `ProfilerStep`, a phase, `gloo`, `nccl`, `device` for kernels and copies on a GPU,
    or `host` for operators.
    """
    category = event.get("cat")
    name = event["name"]
    if category == "user_annotation":  # "ProfilerStep#3", "gloo:all_reduce"
        return name.replace("#", ":").split(":")[0]
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        return "nccl" if name.startswith("nccl") else "device"
    if category == "cpu_op" and not name.startswith("c10d::"):
        return "host"
    return ""


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    length = 0.0
    end_so_far = -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, end_so_far))
        end_so_far = max(end_so_far, end)
    return length
