"""`python -m tests.check gpu`: what only a machine with GPUs can prove, in less than ten minutes.

The values and the steps without waiting are those of this template's model on synthetic graphs. The
programs' runs take the user's `--config` and options first, then what each check needs: batches of
64 for 2 or 6 epochs, for which tables of some thousand rows are enough. Speed is measured on the
user's tables or, if the configuration names none, on synthetic ones of the size of yeast's.
"""

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

import checkpoint
import optim
import train
from data import DataConfig
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from mask import SharedGraph, _segment_product
from model import KnockoutGNN, ModelConfig, uniform
from tests.bench import build_batch
from tests.bench.synthetic import PRESETS, build_graph, synthetic_tables, write
from tests.tools.faults import faults
from tests.tools.parity import parity
from tests.tools.runs import ROOT, difference, read_metrics

LIMIT_S = 600.0  # no check and no program starts later
SMALL = ("data.batch_size=64", "optim.epochs=2", "log.every_steps=1", "checkpoint.every_steps=20")
YEAST = ("model.hidden=64", "model.layers=3")
OPTIONS = {  # of runs that must train
    "bf16": ("optim.precision=bf16",),
    "fp16": ("optim.precision=fp16",),
    "fp64, checkpointing, accumulation and loader processes": (
        "optim.precision=fp64", "model.checkpointing=true", "optim.accumulate=2", "data.workers=2"),
}  # fmt: skip
ROUTES = (  # message passing and readout
    ("shared", "both"),
    ("reach", "both"),
    ("expanded", "both"),
    ("auto", "local"),
    ("shared", "nodes"),
    ("reach", "nodes"),
)


def gpu(options: argparse.Namespace) -> bool:
    """Prints OK or WRONG and a figure for each check; returns whether there are any, all OK."""
    if not torch.cuda.is_available():
        raise UserError(
            "tests.check gpu needs a GPU, and torch sees none: run it where nvidia-smi lists one"
        )
    config = train.read_config(options.arguments)
    report = Report(options.only, options.timeout)
    device = torch.device("cuda", 0)
    products(report, device, "yeast")
    models(report, device)
    draws(report, device)
    steps(report, device)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = Runs(report, Path(folder), options.arguments)
        tables = SpeedTables(config.data, Path(folder, "tables"))
        programs(runs, tables)
        count = torch.cuda.device_count()
        if count > 1:
            several(runs, tables, count)
        else:
            print("one GPU: parity, a killed rank, SyncBatchNorm and scaling need two")
    print(f"{report.right} of {report.right + report.wrong} checks are OK")
    return report.right > 0 and report.wrong == 0


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
        self.right = 0
        self.wrong = 0
        self.start = time.monotonic()

    def check(
        self, name: str, function: Callable[..., tuple[bool, str]], *arguments: object
    ) -> None:
        """Prints what `function` returns, if all is well and a figure; an exception is WRONG."""
        if self.only not in name:
            return
        try:
            self.timeout()  # which raises if it is too late
            ok, figure = function(*arguments)
        except Exception as error:
            ok = False
            figure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.right += ok
        self.wrong += not ok
        seconds = time.monotonic() - self.start
        print(f"{'OK' if ok else 'WRONG':6s} {name:66s} {figure}  [{seconds:.0f} s]", flush=True)

    def timeout(self) -> float:
        """Returns the seconds that a program may take, 60 at least.

        Raises `TimeoutError` if it is too late for one.
        """
        left = self.limit_s - (time.monotonic() - self.start)
        if left <= 0:
            raise TimeoutError("not reached within ten minutes")
        return min(self.longest_s, max(60.0, left))


# ---- Values, and waiting -------------------------------------------------------------------------
def distance(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Returns the largest relative difference of a tensor."""
    pairs = zip(ours, reference, strict=True)
    return max(((a.double().cpu() - b).norm() / b.norm()).item() for a, b in pairs)


def densify(graph: SharedGraph, dtype: torch.dtype | None) -> list[str]:
    """Returns the relations that a copy multiplies in `dtype`, as training does.

    It has tests/recipes/dense.patch.
    """
    return graph.densify(dtype) if dtype and hasattr(graph, "densify") else []


@cache
def host_graph(preset: str) -> SharedGraph:
    """Returns the preset's graph on the CPU; use a copy, as `to` moves it."""
    return SharedGraph(build_graph(preset))


class Products:
    """`SharedGraph.propagate`, its gradients, deterministic products: all against float64, CPU."""

    def __init__(self, preset: str):
        self.preset = preset

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The states, the gates and the gradient of the result, float64."""
        host = host_graph(self.preset)
        size = (host.num_nodes, 2, 64)
        gates = (len(host.relations), 64)
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).double() for shape in (size, gates, size)]

    def results(self, graph: SharedGraph) -> list[Tensor]:
        dtype = graph.edge_weight.dtype
        x, gate, upstream = (value.to(graph.device, dtype) for value in self.inputs)
        inputs = [x.requires_grad_(), gate.requires_grad_()]
        result = graph.propagate(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs, upstream)]

    @cached_property
    def reference(self) -> list[Tensor]:
        return self.results(copy.deepcopy(host_graph(self.preset)).double())

    def agree(self, device: torch.device, precision: str, tolerance: float) -> tuple[bool, str]:
        dtype, half = optim.PRECISIONS[precision]
        graph = copy.deepcopy(host_graph(self.preset)).to(device, dtype)
        dense = densify(graph, half)
        with torch.autocast(device.type, half, enabled=half is not None):
            error = distance(self.results(graph), self.reference)
        figure = f"relative error {error:.1e}"
        if dense:
            figure += f", dense: {', '.join(dense)}"
        return error <= tolerance, figure

    def are_deterministic(self, device: torch.device) -> tuple[bool, str]:
        host = host_graph(self.preset)
        x = self.inputs[0]
        stack = copy.deepcopy(host).to(device).stack
        columns = x.flatten(1).to(device, torch.float32)
        matrix = stack.forward_ptr, stack.forward_col, stack.forward_weight
        sums = [_segment_product(*matrix, columns) for _ in range(3)]
        expected = copy.deepcopy(host).double().propagate(x)
        error = distance([sums[0].view(-1, *x.shape).sum(0)], [expected])
        same = all(torch.equal(sums[0], other) for other in sums)
        return error <= 1e-5 and same, f"relative error {error:.1e}, the same bits: {same}"


def products(report: Report, device: torch.device, preset: str) -> None:
    """The sums over neighbours by precision, and the deterministic ones."""
    sums = Products(preset)
    for precision, tolerance in {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}.items():
        report.check(
            f"sums over neighbours, {preset}, {precision}", sums.agree, device, precision, tolerance
        )
    report.check(f"sums over neighbours, {preset}, deterministic", sums.are_deterministic, device)


class WholeModel:
    """Predictions and gradients of our model on the preset small against float64 on the CPU."""

    def __init__(self, route: str, readout: str):
        self.config = ModelConfig(dropout=0.0, message_passing=route, readout=readout)

    @cached_property
    def model(self) -> KnockoutGNN:
        graph = host_graph("small")
        size = graph.num_nodes, len(graph.relations)
        torch.manual_seed(0)
        if self.config.readout == "nodes":
            targets = torch.randperm(graph.num_nodes)[:50]
            offset = torch.randn(50).tolist()
            std = torch.rand(50).add(0.5).tolist()
            model = KnockoutGNN(self.config, *size, 0, offset, std, target_nodes=targets)
        else:
            model = KnockoutGNN(self.config, *size)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # parts that start at zero would hide errors
        return model.double()

    @cached_property
    def batch(self) -> Data:
        return build_batch(
            host_graph("small"), 16, model=self.config, num_targets=len(self.model.y_std)
        )

    def results(self, device: torch.device, precision: str) -> list[Tensor]:
        """Returns the predictions and the gradients of all trained parameters."""
        dtype, half = optim.PRECISIONS[precision]
        graph = copy.deepcopy(host_graph("small")).to(device, dtype)
        densify(graph, half)
        model = copy.deepcopy(self.model).to(device, dtype)
        batch = copy.copy(self.batch).to(device)
        with torch.autocast(device.type, half, enabled=half is not None):
            prediction = model(graph, batch)
        train.criterion(prediction.float() if half else prediction, batch, model).backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [parameter.grad.to_dense().flatten() for parameter in trained]
        return [prediction.detach(), torch.cat(gradients)]

    @cached_property
    def reference(self) -> list[Tensor]:
        return self.results(torch.device("cpu"), "fp64")

    def agrees(self, device: torch.device, precision: str, tolerance: float) -> tuple[bool, str]:
        error = distance(self.results(device, precision), self.reference)
        return error <= tolerance, f"relative error {error:.1e}"


def models(report: Report, device: torch.device) -> None:
    """The whole model by route, readout and precision."""
    for route, readout in ROUTES:
        model = WholeModel(route, readout)
        tolerances = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
        if (route, readout) == ("shared", "nodes"):
            tolerances["bf16"] = (
                0.3  # each node's small change is the difference of two rounded passes
            )
        for precision, tolerance in tolerances.items():
            name = f"model, {route}, readout={readout}, {precision}"
            report.check(name, model.agrees, device, precision, tolerance)


def draws(report: Report, device: torch.device) -> None:
    """The random numbers of a step, which must have the same bits on any device."""
    report.check("random numbers, the same bits as the CPU's", same_draws, device)


def same_draws(device: torch.device) -> tuple[bool, str]:
    seed, key = torch.tensor(2**55 + 12345), torch.arange(-1, 2**17)
    numbers = [
        uniform(seed.to(where), key.to(where), 66).cpu() for where in (torch.device("cpu"), device)
    ]
    return torch.equal(*numbers), f"mean of {numbers[1].numel():,}: {numbers[1].mean():.4f}"


def steps(report: Report, device: torch.device) -> None:
    """Ten training steps in CUDA's synchronisation debug mode, which raises if the host waits."""
    for precision, checkpointing, route in product(
        ("fp32", "bf16", "fp16"), (False, True), ("shared", "reach")
    ):
        what = f"{route}, {precision}"
        if checkpointing:
            what += ", checkpointing"
        report.check(
            f"ten steps without waiting, {what}", ten_steps, device, precision, checkpointing, route
        )


def ten_steps(
    device: torch.device, precision: str, checkpointing: bool, route: str
) -> tuple[bool, str]:
    optim = optim.OptimConfig(precision=precision)
    half = optim.PRECISIONS[precision][1]
    config = ModelConfig(checkpointing=checkpointing, message_passing=route)
    host = host_graph("small")
    graph = copy.deepcopy(host).to(device)
    densify(graph, half)
    env = Distributed(DDPConfig())
    env.device = device
    model = KnockoutGNN(config, host.num_nodes, len(host.relations)).to(device).train()
    optimizer = optim.build_optimizer(model, optim, env)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10 if precision == "fp16" else 1.0)
    meter = train.Meter(env, optim)
    state = checkpoint.TrainState(model, optimizer, scaler, step=10)
    batch = build_batch(host, 16, model=config)
    if device.type == "cuda":
        batch = batch.pin_memory()
    with no_waiting(device):
        for _ in range(10):
            there = copy.copy(batch).to(
                device, non_blocking=True
            )  # Data.to moves the batch in place
            with torch.autocast(device.type, half, enabled=half is not None):
                prediction = model(graph, there)
            loss = train.criterion(prediction, there, model)
            scaler.scale(loss / 16).backward()
            meter.loss += loss.detach()
            meter.count(16, 16, optim.optimizer_step(model, optimizer, scaler, optim))
    row = meter.read(state)
    return row["skipped"] == 0, f"mean loss {row['loss']:.3f}"


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


# ---- Programs ------------------------------------------------------------------------------------
def torchrun(nproc: int, timeout: float, *arguments: str, **variables: str) -> tuple[int, str]:
    """Runs a script or module under torchrun; returns its exit status and output.

    The status is 124 after `timeout` seconds.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={nproc}",
        *arguments,
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    with tempfile.TemporaryFile(
        "w+", errors="replace"
    ) as output:  # a pipe lasts until the last worker is gone
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end(process)
        output.seek(0)
        return status, output.read()


def end(process: subprocess.Popen) -> None:
    """Ends torchrun, if it still runs."""
    if process.poll() is None:
        process.terminate()  # torchrun stops its workers, which have their own sessions
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def ended(folder: Path, status: int, output: str, state: str = "finished") -> str:
    """Returns what is wrong with the end of a run, or ""."""
    path = folder / "status.json"
    found = json.loads(path.read_text())["state"] if path.exists() else "none"
    return (
        ""
        if (status, found) == (0, state)
        else f"exit status {status}, {found}: {' '.join(output.split())[-300:]}"
    )


def speed(folder: Path) -> str:
    """Returns the median speed and the memory of a run's later training rows."""
    rows = read_metrics(folder, "train")
    rows = rows[len(rows) // 2 :]
    step_ms = sorted(row["step_ms"] for row in rows)[len(rows) // 2]
    return (
        f"{1e3 / step_ms:.1f} it/s, {rows[-1]['samples_per_s']:,.0f} samples/s, "
        f"{rows[-1]['memory_mb']:,.0f} MB"
    )


def stop_after(folder: Path, steps: int, seconds: float = 1e9) -> None:
    """Asks a run to stop, from a thread, after so many steps or so many seconds of training."""

    def watch() -> None:
        start = None
        while True:
            time.sleep(0.1)
            rows = read_metrics(folder, "train") if (folder / "metrics.jsonl").exists() else []
            start = time.monotonic() if rows and start is None else start
            if rows and (rows[-1]["step"] >= steps or time.monotonic() > start + seconds):
                return (folder / "STOP").touch()

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Runs:
    """Runs of the template's programs in `folder`.

    Those of train.py take the user's options, `arguments`, first.
    """

    report: Report
    folder: Path
    arguments: list[str]

    def program(self, nproc: int, *arguments: str, **variables: str) -> tuple[int, str]:
        return torchrun(nproc, self.report.timeout(), *arguments, **variables)

    def train(self, name: str, *options: str, nproc: int = 1, state: str = "finished") -> str:
        """Returns what is wrong with the end of the run, or ""."""
        where = f"run.dir={self.folder}", f"run.name={name}", f"data.cache_dir={self.folder}/cache"
        status, output = self.program(nproc, f"{ROOT}/train.py", *self.arguments, *where, *options)
        return ended(self.folder / name, status, output, state)


class SpeedTables:
    """The tables that speed is measured on: the user's, or the preset yeast's if there are none.

    They are those that `config` names.
    """

    def __init__(self, config: DataConfig, folder: Path):
        self.folder = folder
        self.are_own = bool(config.edges or config.perturbations)
        self.name = "your tables" if self.are_own else "yeast"
        self.batch_size = config.batch_size if self.are_own else 28

    @cached_property
    def options(self) -> list[str]:
        """The options of train.py; yeast's tables are written when they are first needed."""
        if self.are_own:
            return ["optim.epochs=100000", "optim.patience=0"]  # until it is stopped
        return [*write(synthetic_tables(PRESETS["yeast"]), self.folder), *YEAST]


def programs(runs: Runs, tables: SpeedTables) -> None:
    """The preflight check, training by precision and option, stopping and resuming, the speed."""
    check = runs.report.check
    check("preflight with NCCL", preflight, runs)
    check("two ranks on one GPU are refused", two_ranks, runs)
    for number, (name, options) in enumerate(OPTIONS.items()):
        check(f"training: {name}", training, runs, str(number), options)
    check("stopped and resumed, run.deterministic", resuming, runs, "", ())
    check(
        "stopped and resumed, run.deterministic, ZeRO",
        resuming,
        runs,
        ", ZeRO",
        ("optim.zero=true",),
    )
    for precision in ("fp32", "bf16"):
        name = f"a training step of {tables.name}, {precision}, {tables.batch_size} samples"
        check(
            name,
            training_speed,
            runs,
            tables,
            f"speed, {precision}",
            1,
            (f"optim.precision={precision}",),
        )


def preflight(runs: Runs) -> tuple[bool, str]:
    status, output = runs.program(1, f"{ROOT}/ddp_setup.py")
    for line in output.splitlines():
        if line.startswith("OK     all-reduce"):
            return status == 0, line
    return False, f"exit status {status}: {' '.join(output.split())[-300:]}"


def two_ranks(runs: Runs) -> tuple[bool, str]:
    status, output = runs.program(2, f"{ROOT}/ddp_setup.py", CUDA_VISIBLE_DEVICES="0")
    return "ranks [0, 1] share a GPU" in output, f"exit status {status}"


def training(runs: Runs, name: str, options: tuple[str, ...]) -> tuple[bool, str]:
    """A run whose model must not be much worse than the baseline that it starts from."""
    problem = runs.train(name, *SMALL, *options)
    if problem:
        return False, problem
    (test,) = read_metrics(runs.folder / name, "test")
    figure = f"test Pearson {test['pearson']:.3f}, baseline {test['baseline_pearson']:.3f}, "
    return test["pearson"] >= test["baseline_pearson"] - 0.05, figure + speed(runs.folder / name)


def resuming(runs: Runs, suffix: str, options: tuple[str, ...]) -> tuple[bool, str]:
    """A stopped and resumed run must end with the bits of an undisturbed one."""
    options = (
        *SMALL,
        "optim.epochs=6",
        "run.deterministic=true",
        *options,
    )  # long enough to be stopped
    whole = runs.folder / f"whole{suffix}"
    parts = runs.folder / f"parts{suffix}"
    problem = runs.train(whole.name, *options)
    if not problem:
        stop_after(parts, 30)
        problem = runs.train(parts.name, *options, state="stopped")
    problem = problem or runs.train(parts.name, *options)
    problem = problem or difference(parts, whole)
    return not problem, problem or "the same bits"


def training_speed(
    runs: Runs, tables: SpeedTables, name: str, nproc: int, options: tuple[str, ...]
) -> tuple[bool, str]:
    """The speed of a run that is stopped after 20 seconds.

    Each rank takes as many samples, whatever their number.
    """
    options = (
        *tables.options,
        f"data.batch_size={tables.batch_size * nproc}",
        "log.every_steps=10",
        *options,
    )
    stop_after(runs.folder / name, 10**6, 20.0)
    problem = runs.train(name, *options, nproc=nproc, state="stopped")
    return not problem, problem or speed(runs.folder / name)


def several(runs: Runs, tables: SpeedTables, count: int) -> None:
    """What needs two GPUs: equal results on any number, a killed rank, SyncBatchNorm, scaling."""
    check = runs.report.check
    check("parity on 1 and 2 GPUs", parity_on_gpus, runs)
    check("a killed rank", killed_rank, runs)
    check("SyncBatchNorm", batchnorm, runs)
    for nproc in (1, count):
        name = f"{tables.batch_size} samples per GPU, GPUs: {nproc}"
        check(name, training_speed, runs, tables, f"scaling {nproc}", nproc, ())


def parity_on_gpus(runs: Runs) -> tuple[bool, str]:
    options = argparse.Namespace(
        cpu=False, world_sizes=[1, 2], arguments=runs.arguments, timeout=runs.report.timeout()
    )
    return parity(options), "see above"


def killed_rank(runs: Runs) -> tuple[bool, str]:
    options = argparse.Namespace(
        cpu=False,
        only="a rank killed in the forward pass",
        arguments=[*runs.arguments, "run.deterministic=true"],
        timeout=runs.report.timeout(),
    )
    return faults(options), "see above"


def batchnorm(runs: Runs) -> tuple[bool, str]:
    status, output = runs.program(2, "-m", "tests.workers", "batchnorm")
    return status == 0, f"exit status {status} {' '.join(output.split())[-200:]}"
