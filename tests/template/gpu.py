"""`python -m tests.check gpu`: what only one GPU can prove in seven minutes, several in 14.

The values and the steps without waiting are those of this template's model on synthetic graphs. The
programs' runs take the user's `--config` and options first, then what each check needs: batches of
64 for 2 or 6 epochs, for which tables of some thousand rows are enough. Speed is measured on the
user's tables or, if the configuration names none, on synthetic ones of the size of yeast's.

Here are the frame and the list of the checks; the checks themselves are in `gpu_checks` and
`gpu_graphs`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

from errors import UserError
from model import ModelConfig
from optim import OptimConfig
from tests.template.gpu_checks import (
    Products,
    Runs,
    SpeedTables,
    WholeModel,
    batchnorm,
    fault_on_gpus,
    most_columns,
    parity_on_gpus,
    preflight,
    resuming,
    same_draws,
    ten_steps,
    training,
    training_speed,
    two_ranks,
)
from tests.template.gpu_graphs import (
    REFUSALS,
    as_one_rank,
    deterministic_replays,
    failed_update,
    predictions,
    profiled,
    refused,
    replayed_updates,
    replays,
    steps_by_graphs,
    uncaptured,
)
from train import read_config

LIMIT_S = 420.0  # no check and no program starts later; those of several GPUs have as long again
SHARING = (2, 4)  # ranks on a GPU
SUM_TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
MODEL_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
GRAPH_TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 0.1, "fp16": 0.1}
READOUTS = ("both", "local", "global", "nodes")
OF_YEAST = ModelConfig(hidden=64, layers=3)
TIMED = (  # tables, model and batch size of steps
    ("example", ModelConfig(), 128),
    ("example", ModelConfig(), 32),
    ("example", ModelConfig(readout="local"), 128),
    ("yeast", OF_YEAST, 28),
    ("yeast", OF_YEAST, 7),
)
ROUTES = (  # message passing and readout
    ("shared", "both"),
    ("reach", "both"),
    ("expanded", "both"),
    ("auto", "local"),
    ("shared", "nodes"),
    ("reach", "nodes"),
)
OPTIONS = {  # of runs that must train
    "bf16": ("optim.precision=bf16",),
    "fp16": ("optim.precision=fp16",),
    "fp64, checkpointing, accumulation and loader processes": (
        "optim.precision=fp64",
        "model.checkpointing=true",
        "optim.accumulate=2",
        "data.workers=2",
    ),
}

DDP_OPTIONS = {  # of runs on several GPUs that must train as one rank without them
    "ddp.options": ("ddp.options={static_graph: true, gradient_as_bucket_view: true}",),
    "ZeRO": ("ddp.options={find_unused_parameters: true}", "optim.accumulate=2", "optim.zero=true"),
    "no CUDA graphs": ("model.cuda_graphs=false",),
}
FAULTS = ("a rank killed in the forward pass", "a rank hanging in data", "an index out of bounds")


def gpu(options: argparse.Namespace) -> bool:
    """Prints OK or WRONG and a figure for each check; returns whether there are any, all OK."""
    if not torch.cuda.is_available():
        raise UserError(
            "tests.check gpu needs a GPU, but torch finds none: run it on a machine where "
            "nvidia-smi lists a GPU"
        )
    config = read_config(options.arguments)
    report = Report(options.only, options.timeout)
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        graphs(report, device, folder)
        speeds(report, device, folder)
        products(report, device, "yeast")
        models(report, device, folder)
        draws(report, device)
        steps(report, device, folder)
        failed_captures(report, device, folder)
        runs = Runs(report.timeout, folder, options.arguments)
        tables = SpeedTables(config.data, folder / "tables")
        programs(report, runs, tables)
        count = torch.cuda.device_count()
        if count > 1:
            several(report, runs, tables, count)
        else:
            print("one GPU: parity, faults of a rank, SyncBatchNorm and scaling need two")
    print(f"{report.num_right} of {report.num_right + report.num_wrong} checks are OK")
    return report.num_right > 0 and report.num_wrong == 0


class Report:
    """Runs the checks whose name contains `only`, and prints a line for each.

    Counts those that are right and wrong.

    Args:
        longest_s: seconds that a program may take at most.
        limit_s: seconds after which no check and no program starts.
    """

    def __init__(self, only: str = "", longest_s: float = LIMIT_S, limit_s: float = LIMIT_S):
        self.only = only
        self.longest_s = longest_s
        self.limit_s = limit_s
        self.num_right = 0
        self.num_wrong = 0
        self.start = time.monotonic()

    def check(
        self, name: str, function: Callable[..., tuple[bool, str]], *arguments: object
    ) -> None:
        """Prints what `function` returns, if all is well and a figure; an exception is WRONG."""
        if self.only not in name:
            return
        try:
            self.timeout()  # which raises if it is too late
            is_right, figure = function(*arguments)
        except Exception as error:
            is_right = False
            figure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if is_right:
            self.num_right += 1
        else:
            self.num_wrong += 1
        verdict = "OK" if is_right else "WRONG"
        seconds = time.monotonic() - self.start
        print(f"{verdict:6s} {name:66s} {figure}  [{seconds:.0f} s]", flush=True)

    def timeout(self) -> float:
        """Returns the seconds that a program may take, 60 at least.

        Raises `TimeoutError` if it is too late for one.
        """
        left = self.limit_s - (time.monotonic() - self.start)
        if left <= 0:
            raise TimeoutError(f"not reached within {self.limit_s:.0f} s")
        return min(self.longest_s, max(60.0, left))


# ---- Steps as CUDA graphs ------------------------------------------------------------------------
def graphs(report: Report, device: torch.device, folder: Path) -> None:
    """Steps by graphs and by hand, by readout, precision and loss; and what does without."""
    for readout, (precision, tolerance) in product(READOUTS, GRAPH_TOLERANCES.items()):
        model = ModelConfig(readout=readout)
        name = f"graphs, readout={readout}, {precision}"
        optim = OptimConfig(precision=precision)
        report.check(name, replays, device, model, optim, tolerance, folder)
    tolerance = GRAPH_TOLERANCES["fp32"]
    for readout in READOUTS:
        model = ModelConfig(readout=readout)
        name = f"graphs, readout={readout}, optim.loss=binary"
        report.check(name, replays, device, model, OptimConfig(loss="binary"), tolerance, folder)
    model = ModelConfig(checkpointing=True)
    name = "graphs, model.checkpointing"
    report.check(name, replays, device, model, OptimConfig(), tolerance, folder)
    name = "graphs, run.deterministic"
    options = (ModelConfig(), OptimConfig())
    report.check(name, deterministic_replays, device, *options, tolerance, folder)
    for precision in ("fp32", "fp64"):
        name = f"graphs, the optimiser's part, {precision}"
        report.check(name, replayed_updates, device, precision, folder)
    for name, refusal in REFUSALS.items():
        report.check(f"no graphs, {name}", refused, device, refusal, folder)


def speeds(report: Report, device: torch.device, folder: Path) -> None:
    """Steps a second with and without graphs, and predictions a second."""
    for tables, model, batch_size in TIMED:
        name = f"steps by graphs, {tables}, readout={model.readout}, {batch_size} samples"
        report.check(name, steps_by_graphs, device, tables, model, batch_size, folder)
    for tables, model in (("example", ModelConfig()), ("yeast", OF_YEAST)):
        report.check(f"predictions, {tables}", predictions, device, tables, model, folder)


# ---- Values, and waiting -------------------------------------------------------------------------
def products(report: Report, device: torch.device, preset: str) -> None:
    """The sums over neighbours by precision, and the deterministic ones."""
    sums = Products(preset)
    for precision, tolerance in SUM_TOLERANCES.items():
        name = f"sums over neighbours, {preset}, {precision}"
        report.check(name, sums.agree, device, precision, tolerance)
    report.check(f"sums over neighbours, {preset}, deterministic", sums.are_deterministic, device)
    report.check("a product of two million columns", most_columns, device)


def models(report: Report, device: torch.device, folder: Path) -> None:
    """The whole model by route, readout and precision."""
    for route, readout in ROUTES:
        model = WholeModel(route, readout, folder)
        for precision, tolerance in MODEL_TOLERANCES.items():
            if (route, readout, precision) == ("shared", "nodes", "bf16"):
                tolerance = 0.3  # a node's small change is the difference of two rounded passes
            name = f"model, {route}, readout={readout}, {precision}"
            report.check(name, model.agrees, device, precision, tolerance)


def draws(report: Report, device: torch.device) -> None:
    """The random numbers of a step, which must have the same bits on any device."""
    report.check("random numbers, the same bits as the CPU's", same_draws, device)


def steps(report: Report, device: torch.device, folder: Path) -> None:
    """Ten training steps in CUDA's synchronisation debug mode, which raises if the host waits."""
    for precision, checkpointing, route in product(
        ("fp32", "bf16", "fp16"), (False, True), ("shared", "reach")
    ):
        name = f"ten steps without waiting, {route}, {precision}"
        if checkpointing:
            name += ", checkpointing"
        report.check(name, ten_steps, device, precision, checkpointing, route, folder)


def failed_captures(report: Report, device: torch.device, folder: Path) -> None:
    """Steps after a failed capture, behind which torch before 2.13 captures nothing."""
    report.check("graphs, an optimiser's part that waits", failed_update, device, folder)


# ---- Programs ------------------------------------------------------------------------------------
def programs(report: Report, runs: Runs, tables: SpeedTables) -> None:
    """Graphs, the preflight check, stopping and resuming, training by option, the speed."""
    report.check("a model that cannot be captured", uncaptured, runs)
    report.check("a profiled run", profiled, runs)
    for nproc in SHARING:
        name = f"{nproc} ranks that share a GPU over gloo"
        report.check(name, as_one_rank, runs, nproc, name, (), ("share_gpu",))
    name = "stopped and resumed, run.deterministic"
    report.check(name, resuming, runs, "", ())
    report.check(f"{name}, ZeRO", resuming, runs, ", ZeRO", ("optim.zero=true",))
    report.check("preflight with NCCL", preflight, runs)
    report.check("two ranks on one GPU are refused", two_ranks, runs)
    for number, (name, options) in enumerate(OPTIONS.items()):
        report.check(f"training: {name}", training, runs, str(number), options)
    for precision in ("fp32", "bf16"):
        name = f"a training step of {tables.name}, {precision}, {tables.batch_size} samples"
        options = (f"optim.precision={precision}",)
        report.check(name, training_speed, runs, tables, f"speed, {precision}", 1, options)


def several(report: Report, runs: Runs, tables: SpeedTables, count: int) -> None:
    """What needs two GPUs: equal results on any number, faults, SyncBatchNorm, scaling."""
    report.limit_s += LIMIT_S
    report.check(f"preflight with NCCL on {count} GPUs", preflight, runs, count)
    report.check("parity on 1 and 2 GPUs", parity_on_gpus, runs)
    for option, options in DDP_OPTIONS.items():
        name = f"{count} GPUs as one rank, {option}"
        report.check(name, as_one_rank, runs, count, name, options)
    suffix = f", ZeRO on {count} GPUs"
    name = f"stopped and resumed, run.deterministic{suffix}"
    report.check(name, resuming, runs, suffix, ("optim.zero=true",), count)
    for fault in FAULTS:
        report.check(fault, fault_on_gpus, runs, fault)
    report.check("SyncBatchNorm", batchnorm, runs)
    for nproc in (1, count):
        name = f"{tables.batch_size} samples per GPU, GPUs: {nproc}"
        report.check(name, training_speed, runs, tables, f"scaling {nproc}", nproc, ())
