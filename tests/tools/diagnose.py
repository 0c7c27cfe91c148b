"""`python -m tests.check rows` and `trace`: rows that cause a non-finite step, times of steps."""

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
from errors import UserError
from evaluate import compute_rows, evaluation_batch_size, predict_rows
from run_checkpoint import load_model
from run_folder import RunFolder
from task import KnockoutTask
from train import autocast, read_config

SPLITS = ("train", "val", "test")
SHOWN = 20  # largest number of bad rows that are printed
LARGEST = 5  # number of rows that are printed if none is bad
WORST = 3  # largest number of scores that are printed for a row
PHASES = ("data", "forward", "backward", "optimiser", "agreement", "evaluation", "save")


# ---- Rows ----------------------------------------------------------------------------------------
def rows(options: argparse.Namespace) -> bool:
    """Prints the rows whose loss under the newest model is not finite.

    Returns whether there are none.
    """
    config = read_config(options.arguments)
    ddp = setup(Distributed(config.ddp))
    task = KnockoutTask.load(config, ddp)
    torch.manual_seed(config.run.seed)
    model = newest_model(task, ddp).to(ddp.device, config.optim.dtype)
    broken = [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        print(f"the model has non-finite weights, so no row can be blamed: {', '.join(broken)}")
        return False

    model.eval()
    of_split = {split: task.rows(split) for split in SPLITS}
    chosen = torch.cat(list(of_split.values()))
    with autocast(config.optim, ddp):
        losses = losses_of_rows(model, task, chosen, ddp)
    loss_of_row = losses.sum(dim=1)
    bad = (~loss_of_row.isfinite()).nonzero().flatten()
    if len(bad):
        print(f"{len(bad)} of {len(chosen)} rows (numbered from 0) have a non-finite loss:")
        shown = bad[:SHOWN]
    else:
        print(
            "all losses are finite. If the gradient of a step is not, lower optim.lr. Training "
            "rows with the largest losses:"
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
    """Returns the loss of each score of n rows, float64 [n, T], 0 for scores without weight.

    The loss of a batch is the sum of the losses times their weights. Each loss is therefore the
    derivative by its weight.
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
    """Returns the model of the run's newest checkpoint or, if there is none, of its start."""
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
    """Returns a text with a row's nodes and the scores with its largest losses, [T].

    `output` is the model's output for the row. The text is "" for a task without tables of
    knock-outs.
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
    """Prints where the time went in the steps that `log.profile_steps` traced, over all ranks."""
    if len(options.arguments) != 1:
        raise UserError("trace needs one run folder, such as runs/default")
    folder = Path(options.arguments[0])
    times = {}  # {rank: its times}
    for path in folder.glob("trace.rank*.json"):
        rank = path.name.removeprefix("trace.").removesuffix(".json")
        times[rank] = read_trace(path)
    if not times:
        raise UserError(f"{folder} contains no trace.rank*.json: train with log.profile_steps=5")
    names = next(iter(times.values()))
    mean = {name: statistics.mean(time[name] for time in times.values()) for name in names}
    print(f"{mean['steps']:g} steps of {mean['step']:.1f} ms, mean of {len(times)} ranks:")
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
        f"slowest: {slowest} with {work[slowest]:.1f} ms of its own work per step; the median is "
        f"{statistics.median(work.values()):.1f} ms"
    )
    print(
        "to see details, open the traces in ui.perfetto.dev; on GPUs, the times of phases are "
        "those of the host, which runs ahead of the device"
    )


def read_trace(path: Path) -> dict[str, float]:
    """Returns the number of steps in a rank's trace, and times per step in ms.

    The times are in total, per phase, outside phases, and for exposed communication.
    """
    spans = read_spans(path)
    num_steps = len(spans["ProfilerStep"])
    if not num_steps:
        raise UserError(
            f"{path} contains no complete step: set log.profile_steps to less than the number of "
            "steps of the run minus 3"
        )
    busy = spans["device"]
    exchange = spans["nccl"]
    if not busy:  # a CPU trace, in which agreement is a separate phase, not exposed communication
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
    """Returns the start and end of each event in a trace, in microseconds, by its `kind`."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "X":
                spans[kind(event)].append((event["ts"], event["ts"] + event["dur"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable trace: {error}") from None
    return spans


def kind(event: dict) -> str:
    """Returns `ProfilerStep`, a phase, `gloo`, `nccl`, `device`, `host`, or "".

    `device` is for kernels and copies, and `host` for operators.
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
