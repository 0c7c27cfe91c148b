"""`python -m tests.check gpu`: checks that need a GPU. They take 7 minutes, with several GPUs 14.

Some checks compare values, and count waits of the host, with this template's model on synthetic
graphs. The other checks run programs. These runs use the user's `--config` and options, and also
the options that the check needs: batches of 64 for 2 or 6 epochs, for which tables of a few
thousand rows are enough. Speed is measured on the user's tables. If the configuration does not
contain tables, it is measured on synthetic tables of the size of yeast's.

This module contains the list of the checks, and the report of their results. The checks themselves
are in `gpu_checks` and `gpu_graphs`.
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

# No check and no program starts after this time. Checks of several GPUs have the same time again.
LIMIT_S = 420.0
SHARING = (2, 4)  # numbers of ranks that share a GPU
SUM_TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
MODEL_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
GRAPH_TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 0.1, "fp16": 0.1}
READOUTS = ("both", "local", "global", "nodes")
OF_YEAST = ModelConfig(hidden=64, layers=3)
TIMED = (  # tables, model and batch size of the steps whose speed is measured
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
OPTIONS = {  # options of runs that must train
    "bf16": ("optim.precision=bf16",),
    "fp16": ("optim.precision=fp16",),
    "fp64, checkpointing, accumulation and loader processes": (
        "optim.precision=fp64",
        "model.checkpointing=true",
        "optim.accumulate=2",
        "data.workers=2",
    ),
}

# Options of runs on several GPUs, which must give the same result as one rank without the options.
DDP_OPTIONS = {
    "ddp.options": ("ddp.options={static_graph: true, gradient_as_bucket_view: true}",),
    "ZeRO": ("ddp.options={find_unused_parameters: true}", "optim.accumulate=2", "optim.zero=true"),
    "no CUDA graphs": ("model.cuda_graphs=false",),
}
FAULTS = ("a rank killed in the forward pass", "a rank hanging in data", "an index out of bounds")


def gpu(options: argparse.Namespace) -> bool:
    """Runs all checks, and prints OK or WRONG and a figure for each check.

    Returns whether at least one check was run and all checks are OK.
    """
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
            print("checks of parity, faults of a rank, SyncBatchNorm and scaling need two GPUs")
    num_checks = report.num_right + report.num_wrong
    print(f"checks that are OK: {report.num_right} of {num_checks}")
    return report.num_right > 0 and report.num_wrong == 0


class Report:
    """Runs the checks whose name contains `only`, prints a line for each, and counts the results.

    Args:
        only: part of the names of the checks to run.
        longest_s: largest number of seconds that a program may take.
        limit_s: number of seconds after which no check and no program starts.
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
        """Calls `function`, and prints its result: whether the check is OK, and a figure.

        If the function raises an exception, the check is WRONG.
        """
        if self.only not in name:
            return
        try:
            self.timeout()  # raises if it is too late to start
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
        """Returns the number of seconds that a program may take, at least 60.

        Raises `TimeoutError` if it is too late to start a program.
        """
        left = self.limit_s - (time.monotonic() - self.start)
        if left <= 0:
            raise TimeoutError(f"the checks before took more than {self.limit_s:.0f} s")
        return min(self.longest_s, max(60.0, left))


# ---- Steps as CUDA graphs ------------------------------------------------------------------------
def graphs(report: Report, device: torch.device, folder: Path) -> None:
    """Checks that captured steps equal eager steps, and that impossible captures are refused."""
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
    """Measures steps per second with and without CUDA graphs, and predictions per second."""
    for tables, model, batch_size in TIMED:
        name = f"steps by graphs, {tables}, readout={model.readout}, {batch_size} samples"
        report.check(name, steps_by_graphs, device, tables, model, batch_size, folder)
    for tables, model in (("example", ModelConfig()), ("yeast", OF_YEAST)):
        report.check(f"predictions, {tables}", predictions, device, tables, model, folder)


# ---- Values, and waiting -------------------------------------------------------------------------
def products(report: Report, device: torch.device, preset: str) -> None:
    """Checks the sums over neighbours in each precision, and the deterministic sums."""
    sums = Products(preset)
    for precision, tolerance in SUM_TOLERANCES.items():
        name = f"sums over neighbours, {preset}, {precision}"
        report.check(name, sums.agree, device, precision, tolerance)
    report.check(f"sums over neighbours, {preset}, deterministic", sums.are_deterministic, device)
    report.check("a product of two million columns", most_columns, device)


def models(report: Report, device: torch.device, folder: Path) -> None:
    """Checks the complete model for each route, readout and precision."""
    for route, readout in ROUTES:
        model = WholeModel(route, readout, folder)
        for precision, tolerance in MODEL_TOLERANCES.items():
            if (route, readout, precision) == ("shared", "nodes", "bf16"):
                # The small change of a node is the difference of two rounded states.
                tolerance = 0.3
            name = f"model, {route}, readout={readout}, {precision}"
            report.check(name, model.agrees, device, precision, tolerance)


def draws(report: Report, device: torch.device) -> None:
    """Checks that the random numbers of a step have the same bits on the GPU and the CPU."""
    report.check("random numbers, the same bits as the CPU's", same_draws, device)


def steps(report: Report, device: torch.device, folder: Path) -> None:
    """Makes ten training steps in CUDA's synchronisation debug mode, in which waiting raises."""
    for precision, checkpointing, route in product(
        ("fp32", "bf16", "fp16"), (False, True), ("shared", "reach")
    ):
        name = f"ten steps without waiting, {route}, {precision}"
        if checkpointing:
            name += ", checkpointing"
        report.check(name, ten_steps, device, precision, checkpointing, route, folder)


def failed_captures(report: Report, device: torch.device, folder: Path) -> None:
    """Checks steps after a failed capture. After it, torch before 2.13 cannot capture anything."""
    report.check("graphs, an optimiser's part that waits", failed_update, device, folder)


# ---- Programs ------------------------------------------------------------------------------------
def programs(report: Report, runs: Runs, tables: SpeedTables) -> None:
    """Runs programs: steps without CUDA graphs, the preflight check, resuming, options, speed."""
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
    """Runs checks that need two GPUs: equal results, faults of a rank, SyncBatchNorm, scaling."""
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
