"""`python -m tests.check rows` and `trace`: the rows behind a non-finite step, a step's times."""

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import torch

import baseline
import data
import errors
import optim
import run_folder
import task
import train
from ddp_setup import Distributed, setup
from errors import UserError
from mask import SharedGraph

SHOWN = 20  # bad rows printed at most
WORST = 3  # scores printed of each, at most
PHASES = ("data", "forward", "backward", "optimiser", "agreement", "evaluation", "save")


def rows(options: argparse.Namespace) -> bool:
    """Prints the rows whose squared error under the newest model is not finite.

    Returns whether there are none.
    """
    config = train.read_config(options.arguments)
    env = setup(Distributed(config.ddp))
    dtype, autocast_dtype = optim.PRECISIONS[config.optim.precision]
    with env.sync_errors(errors.DataError):
        tables = data.load(config.data)
        torch.manual_seed(config.run.seed)
        baseline = baseline.load_baseline(
            tables, tables.fingerprint(), config.data, config.optim.loss
        )
        model = train.build_model(config, tables, baseline)
        folder = run_folder.RunFolder(config, env, tables, tables.fingerprint())
        if checkpoint := folder.newest_checkpoint():
            checkpoint.load_model(model, checkpoint)
    model = model.to(env.device, dtype)
    source = f"step {checkpoint['step']}" if checkpoint else "step 0 (no checkpoint found)"
    print(f"{folder.path}: model of {source}")
    if broken := [
        name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()
    ]:
        print(f"the model has non-finite weights, so no row is to blame: {', '.join(broken)}")
        return False

    graph = SharedGraph(tables.graph()).to(env.device, dtype)
    dataset, _ = train.make_dataset(config, tables, graph)
    chosen, training = (
        torch.cat([tables.rows(split) for split in tables.SPLITS]),
        tables.rows("train"),
    )
    with torch.autocast(env.device.type, autocast_dtype, enabled=autocast_dtype is not None):
        prediction = torch.zeros(tables.y.shape, dtype=dtype)
        prediction[chosen] = task.predict_rows(model, graph, dataset, chosen, config, env).to(dtype)
    error = (
        (prediction - tables.y.float()) / model.y_std.cpu()
    ).square()  # overflows where the training loss does
    error_by_score = error.where(~tables.y.isnan(), 0.0)
    error = error_by_score.sum(1)
    bad = chosen[~error[chosen].isfinite()]
    if len(bad):
        print(
            f"{len(bad)} of {len(chosen)} rows (numbered from 0) have a non-finite squared error:"
        )
    else:
        print(
            "every squared error is finite; if a step is not, lower optim.lr. Largest in the "
            "training split:"
        )
    for row in (
        bad[:SHOWN] if len(bad) else training[error[training].argsort(descending=True)[:5]]
    ).tolist():
        own = slice(tables.perturbed_ptr[row], tables.perturbed_ptr[row + 1])
        genes = map(tables.name, tables.perturbed[own].tolist(), tables.level[own].tolist())
        worst = error_by_score[row].nan_to_num(math.inf).argsort(descending=True)[:WORST]
        scores = [
            f"{tables.targets[t]} {tables.y[row, t]:g}, prediction {prediction[row, t]:g}"
            for t in worst.tolist()
        ]
        print(
            f"  row {row} ({tables.SPLITS[tables.split[row]]}): genes {','.join(genes)}, "
            f"{'; '.join(scores)}, squared error {error[row]:.3g}"
        )
    return not len(bad)


def trace(options: argparse.Namespace) -> None:
    """Prints where the time went in the steps that `log.profile_steps` traced.

    It is over all ranks of a run folder.
    """
    if len(options.arguments) != 1:
        raise UserError("trace takes one run folder, such as runs/default")
    folder = Path(options.arguments[0])
    ranks = {
        path.name.removeprefix("trace.").removesuffix(".json"): path
        for path in folder.glob("trace.rank*.json")
    }
    if not ranks:
        raise UserError(f"{folder} contains no trace.rank*.json: train with log.profile_steps=5")
    times = {rank: read_trace(path) for rank, path in ranks.items()}
    mean = {
        name: statistics.mean(time[name] for time in times.values())
        for name in next(iter(times.values()))
    }
    print(f"{mean['steps']:g} steps of {mean['step']:.1f} ms, mean of {len(times)} ranks:")
    for name in (*PHASES, "rest"):
        print(f"  {name:10s} {100 * mean[name] / mean['step']:5.1f} %")
    print(
        "communication not overlapped with computation, in the above: "
        f"{100 * mean['exposed'] / mean['step']:.1f} %"
    )
    own = {rank: time["step"] - time["agreement"] - time["exposed"] for rank, time in times.items()}
    slowest, median = max(own, key=own.__getitem__), statistics.median(own.values())
    print(
        f"slowest: {slowest} with {own[slowest]:.1f} ms of its own work per step, median "
        f"{median:.1f}"
    )
    print(
        "open the traces in ui.perfetto.dev; on GPUs, phases are those of the host, which runs "
        "ahead of the device"
    )


def read_trace(path: Path) -> dict[str, float]:
    """Returns the number of steps in a rank's trace, and ms per step.

    The times are in total, per phase, outside phases, and exposed.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "X":
                spans[kind(event)].append((event["ts"], event["ts"] + event["dur"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable trace: {error}") from None
    if not (steps := len(spans["ProfilerStep"])):
        raise UserError(
            f"{path} contains no complete step: set log.profile_steps to less than the run's steps "
            "minus 3"
        )
    busy, exchange = spans["device"], spans["nccl"]
    if not busy:  # a CPU trace; agreement is a phase of its own, not exposed communication
        busy, exchange = spans["host"] + spans["agreement"], spans["gloo"]
    length = {
        "step": covered(spans["ProfilerStep"]),
        **{phase: covered(spans[phase]) for phase in PHASES},
    }
    length["rest"] = length["step"] - sum(length[phase] for phase in PHASES)
    length["exposed"] = covered(busy + exchange) - covered(busy)
    return {
        "steps": steps,
        **{name: microseconds / 1e3 / steps for name, microseconds in length.items()},
    }


def kind(event: dict) -> str:
    """Returns `ProfilerStep`, a phase, `gloo`, `nccl`, `device`, `host`, or "".

    `device` is kernels and copies, `host` operators.
    """
    category, name = event.get("cat"), event["name"]
    if category == "user_annotation":  # "ProfilerStep#3", "gloo:all_reduce"
        return name.replace("#", ":").split(":")[0]
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        return "nccl" if name.startswith("nccl") else "device"
    return "host" if category == "cpu_op" and not name.startswith("c10d::") else ""


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    length, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
