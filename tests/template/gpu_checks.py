"""The checks of `python -m tests.check gpu`. Each returns whether it is OK, and a text.

Some checks compare results of this template's model on a GPU with results on the CPU in float64, on
synthetic graphs. The other checks run the template's programs, and test how the programs exit.
"""

import argparse
import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from config import Config
from data import DataConfig, random_split
from data_tables import Tables
from ddp_setup import DDPConfig, Distributed
from losses import LOSSES
from mask import SharedGraph
from mask_product import CSR, _segment_product, sparse_product, sum_relations
from model import KnockoutGNN, ModelConfig, uniform
from optim import OptimConfig, build_optimizer
from run_checkpoint import TrainState
from task import KnockoutTask
from tests.bench.synthetic import PRESETS, build_graph, synthetic_tables, write
from tests.tools.faults import faults
from tests.tools.parity import parity
from tests.tools.runs import ROOT, difference, read_metrics
from train import Meter, StepParts, autocast, train_step, update_parameters

NUM_SAMPLES = 16  # number of samples in a batch
NUM_STEPS = 10  # number of steps in which the host must not wait
SMALL = ("data.batch_size=64", "optim.epochs=2", "log.every_steps=1", "checkpoint.every_steps=20")
YEAST = ("model.hidden=64", "model.layers=3")
# Largest number of columns of states in a product, for a block of samples of a small graph.
MOST_COLUMNS = 2**21


# ---- Sums over neighbours ------------------------------------------------------------------------
def distance(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Returns the largest relative difference between a tensor and its reference."""
    errors = []
    for value, expected in zip(ours, reference, strict=True):
        difference = value.double().cpu() - expected
        errors.append((difference.norm() / expected.norm()).item())
    return max(errors)


@cache
def host_graph(preset: str) -> SharedGraph:
    """Returns the graph of a preset on the CPU. Copy it before you call `to`, which moves it."""
    return SharedGraph(build_graph(preset))


class Products:
    """Compares `SharedGraph.propagate`, its gradients and the deterministic product with float64.

    The reference in float64 is computed on the CPU.
    """

    def __init__(self, preset: str):
        self.preset = preset

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The states, the gates and the gradient of the result, in float64."""
        host = host_graph(self.preset)
        size = (host.num_nodes, 2, 64)
        gates = (len(host.relations), 64)
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).double() for shape in (size, gates, size)]

    def results(self, graph: SharedGraph) -> list[Tensor]:
        """Returns the sums, and the gradients of states and gates, in the graph's dtype."""
        dtype = graph.edge_weight.dtype
        x, gate, upstream = (value.to(graph.device, dtype) for value in self.inputs)
        inputs = [x.requires_grad_(), gate.requires_grad_()]
        result = graph.propagate(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs, upstream)]

    @cached_property
    def reference(self) -> list[Tensor]:
        return self.results(copy.deepcopy(host_graph(self.preset)).double())

    def agree(self, device: torch.device, precision: str, tolerance: float) -> tuple[bool, str]:
        optim = OptimConfig(precision=precision)
        half = optim.autocast_dtype
        graph = copy.deepcopy(host_graph(self.preset)).to(device, optim.dtype)
        with torch.autocast(device.type, half, enabled=half is not None):
            error = distance(self.results(graph), self.reference)
        return error <= tolerance, f"relative error {error:.1e}"

    def are_deterministic(self, device: torch.device) -> tuple[bool, str]:
        host = host_graph(self.preset)
        x = self.inputs[0]
        stack = copy.deepcopy(host).to(device).stack
        columns = x.flatten(1).to(device, torch.float32)
        sums = [_segment_product(stack.by_target.csr, columns) for _ in range(3)]
        expected = copy.deepcopy(host).double().propagate(x)
        gate = columns.new_ones(len(host.relations), x.size(2))
        of_rows = sums[0].clone().unflatten(1, x.shape[1:])
        total = sum_relations(of_rows, gate, stack.by_target, len(x))
        error = distance([total], [expected])
        same = all(torch.equal(sums[0], other) for other in sums)
        return error <= 1e-5 and same, f"relative error {error:.1e}, the same bits: {same}"


def most_columns(device: torch.device) -> tuple[bool, str]:
    """Compares a sparse product of the largest number of columns with a dense product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(100, 100, generator=generator)
    weight *= torch.rand(100, 100, generator=generator) < 0.1
    entries = weight.to_sparse_csr()
    parts = (entries.crow_indices(), entries.col_indices(), entries.values())
    x = torch.rand(100, MOST_COLUMNS, generator=generator)
    sums = sparse_product(CSR(*(part.to(device) for part in parts)), x.to(device))
    error = distance([sums], [weight.double() @ x.double()])
    return error <= 1e-5, f"relative error {error:.1e}"


# ---- The complete model, and its steps -----------------------------------------------------------
def small_tables(readout: str) -> Tables:
    """Returns 200 samples of the preset small. For readout=nodes, they have scores of 50 nodes."""
    tables = synthetic_tables(replace(PRESETS["small"], num_samples=200))
    tables.split = random_split(tables, DataConfig())
    if readout == "nodes":
        generator = torch.Generator().manual_seed(0)
        nodes = torch.randperm(len(tables.genes), generator=generator)[:50]
        mean, std = torch.randn(2, 50, generator=generator).double()
        scores = torch.randn(len(tables.y), 50, generator=generator).double()
        tables.targets = [tables.genes[node] for node in nodes.tolist()]
        tables.y = mean + (0.5 + std.abs()) * scores
    return tables


def small_task(
    model: ModelConfig, optim: OptimConfig, device: torch.device, folder: Path
) -> KnockoutTask:
    """Returns the task of `small_tables`, whose baseline is cached in `folder`."""
    config = Config(data=DataConfig(cache_dir=str(folder)), model=model, optim=optim)
    tables = small_tables(model.readout)
    if LOSSES[optim.loss].is_binary:
        tables.y = (tables.y > tables.y.median(dim=0).values).double()
    return KnockoutTask.from_tables(tables, config, device)


def first_batch(task: KnockoutTask) -> Data:
    """Returns a batch of `NUM_SAMPLES` training rows, on the CPU."""
    batch = task.dataset.__getitems__(task.rows("train")[:NUM_SAMPLES])
    batch.seed = torch.tensor(0)
    return batch


def rank_on(device: torch.device) -> Distributed:
    """Returns the `Distributed` of a run with one rank, on a device."""
    ddp = Distributed(DDPConfig())
    ddp.device = device
    return ddp


class WholeModel:
    """Compares predictions and gradients of the template's model with float64 on the CPU.

    The tables are `small_tables`.
    """

    def __init__(self, route: str, readout: str, folder: Path):
        self.options = ModelConfig(dropout=0.0, message_passing=route, readout=readout)
        self.folder = folder

    def task(self, device: torch.device, precision: str) -> KnockoutTask:
        return small_task(self.options, OptimConfig(precision=precision), device, self.folder)

    @cached_property
    def model(self) -> KnockoutGNN:
        torch.manual_seed(0)
        model = self.task(torch.device("cpu"), "fp64").build_model()
        for parameter in model.parameters():
            # Parameters that start at zero would hide errors.
            torch.nn.init.normal_(parameter, std=0.3)
        return model.double()

    def results(self, device: torch.device, precision: str) -> list[Tensor]:
        """Returns the predictions and the gradients of all trained parameters."""
        task = self.task(device, precision)
        model = copy.deepcopy(self.model).to(device, task.config.optim.dtype)
        batch = first_batch(task).to(device)
        with autocast(task.config.optim, rank_on(device)):
            prediction = model(task.graph, batch)
        task.loss(prediction, batch).sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [parameter.grad.to_dense().flatten() for parameter in trained]
        return [prediction.detach(), torch.cat(gradients)]

    @cached_property
    def reference(self) -> list[Tensor]:
        return self.results(torch.device("cpu"), "fp64")

    def agrees(self, device: torch.device, precision: str, tolerance: float) -> tuple[bool, str]:
        error = distance(self.results(device, precision), self.reference)
        return error <= tolerance, f"relative error {error:.1e}"


def same_draws(device: torch.device) -> tuple[bool, str]:
    seed = torch.tensor(2**55 + 12345)
    key = torch.arange(-1, 2**17)
    expected = uniform(seed, key, 66)
    numbers = uniform(seed.to(device), key.to(device), 66).cpu()
    return torch.equal(numbers, expected), f"mean of {numbers.numel():,}: {numbers.mean():.4f}"


def ten_steps(
    device: torch.device, precision: str, checkpointing: bool, route: str, folder: Path
) -> tuple[bool, str]:
    optim = OptimConfig(precision=precision)
    options = ModelConfig(checkpointing=checkpointing, message_passing=route)
    task = small_task(options, optim, device, folder)
    ddp = rank_on(device)
    model = task.build_model().to(device, optim.dtype).train()
    optimizer = build_optimizer(model, optim, ddp)
    is_half = precision == "fp16"
    # With the usual scale, fp16 would skip the first steps.
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=is_half)
    state = TrainState(model, optimizer, scaler)
    steps = StepParts(model, task.dataset, update_parameters)
    meter = Meter(task, ddp)
    batch = first_batch(task)
    weight = batch.weight.double().sum(dim=0)  # total weight of each score
    if device.type == "cuda":
        batch = batch.pin_memory()
    # Each step gets a copy, because `to` moves a batch in place.
    batches = (copy.copy(batch) for _ in range(NUM_STEPS))
    with no_waiting(device):
        for _ in range(NUM_STEPS):
            norm_and_scale = train_step(task, state, steps, batches, NUM_SAMPLES, meter, ddp)
            meter.count(NUM_SAMPLES, weight, norm_and_scale)
            state.step += 1
    row = meter.read(state)
    return row["skipped"] == 0, f"mean loss {row['loss']:.3f}"


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """In the block, each operation that makes the host wait for a GPU raises an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


# ---- Running programs ----------------------------------------------------------------------------
def torchrun(nproc: int, timeout: float, *arguments: str, **variables: str) -> tuple[int, str]:
    """Runs a script or module under torchrun; returns its exit status and output.

    The status is 124 after `timeout` seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={nproc}", *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,  # not a pipe, which would stay open until the last worker exits
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
    """Ends torchrun if it is still running."""
    if process.poll() is None:
        process.terminate()  # torchrun stops its workers, which have their own sessions
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def last_words(output: str, length: int = 300) -> str:
    """Returns the last `length` characters of an output, on one line."""
    return " ".join(output.split())[-length:]


def ended(folder: Path, status: int, output: str, state: str = "finished") -> str:
    """Returns a message if a run has not ended in the expected state, otherwise "".

    Args:
        folder: folder of the run.
        status: exit status of its program.
        output: output of its program.
        state: expected state in status.json.
    """
    path = folder / "status.json"
    found = json.loads(path.read_text())["state"] if path.exists() else "none"
    if status == 0 and found == state:
        return ""
    return f"exit status {status}, {found}: {last_words(output)}"


def speed(folder: Path) -> str:
    """Returns a text with speed and memory of a run, from the second half of its training rows."""
    rows = read_metrics(folder, "train")
    rows = rows[len(rows) // 2 :]
    step_ms = sorted(row["step_ms"] for row in rows)[len(rows) // 2]
    return (
        f"{1e3 / step_ms:.1f} it/s, {rows[-1]['samples_per_s']:,.0f} samples/s, "
        f"{rows[-1]['memory_mb']:,.0f} MB"
    )


def stop_after(folder: Path, steps: int, seconds: float = 1e9) -> None:
    """Starts a thread that stops a run after a number of steps or of seconds of training."""

    def watch() -> None:
        start = None
        while True:
            time.sleep(0.1)
            rows = read_metrics(folder, "train") if (folder / "metrics.jsonl").exists() else []
            if rows and start is None:
                start = time.monotonic()
            if rows and (rows[-1]["step"] >= steps or time.monotonic() > start + seconds):
                (folder / "STOP").touch()
                return

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Runs:
    """Runs the template's programs.

    Args:
        timeout: a function that returns the number of seconds that a program may take, or raises an
            error if it is too late to start a program.
        folder: folder for the runs.
        arguments: the user's options, the first options of each run of train.py.
    """

    timeout: Callable[[], float]
    folder: Path
    arguments: list[str]

    def program(self, nproc: int, *arguments: str, **variables: str) -> tuple[int, str]:
        return torchrun(nproc, self.timeout(), *arguments, **variables)

    def train(
        self,
        name: str,
        *options: str,
        nproc: int = 1,
        state: str = "finished",
        faults: tuple[str, ...] = (),
    ) -> str:
        """Runs train.py, and returns a message if it has not ended in `state`, otherwise "".

        `faults` are the names of faults in faulty.py.
        """
        script = (f"{ROOT}/train.py",)
        if faults:
            script = (f"{ROOT}/tests/template/faulty.py", *faults, "--", "train.py")
        where = f"run.dir={self.folder}", f"run.name={name}", f"data.cache_dir={self.folder}/cache"
        status, output = self.program(nproc, *script, *self.arguments, *where, *options)
        return ended(self.folder / name, status, output, state)

    def note_on_graphs(self, name: str) -> str:
        """Returns the note on CUDA graphs in the log of a run, or "" if there is none."""
        log = (self.folder / name / "log.rank0.txt").read_text()
        notes = re.findall(r"parameters; .*; (.*CUDA graphs.*)", log)
        return notes[-1] if notes else ""


class SpeedTables:
    """The tables on which speed is measured.

    They are the tables in `config`, or, if it does not contain any, the tables of the preset yeast.
    """

    def __init__(self, config: DataConfig, folder: Path):
        self.folder = folder
        self.are_own = bool(config.edges or config.perturbations)
        self.name = "your tables" if self.are_own else "yeast"
        self.batch_size = config.batch_size if self.are_own else 28

    @cached_property
    def options(self) -> list[str]:
        """The options of train.py for these tables. The first use writes the tables of yeast."""
        if self.are_own:
            return ["optim.epochs=100000", "optim.patience=0"]  # train until the run is stopped
        return [*write(synthetic_tables(PRESETS["yeast"]), self.folder), *YEAST]


# ---- Checks of programs --------------------------------------------------------------------------
def preflight(runs: Runs, nproc: int = 1) -> tuple[bool, str]:
    status, output = runs.program(nproc, f"{ROOT}/ddp_machines.py")
    for line in output.splitlines():
        if line.startswith("OK     all-reduce"):
            return status == 0, line
    return False, f"exit status {status}: {last_words(output)}"


def two_ranks(runs: Runs) -> tuple[bool, str]:
    status, output = runs.program(2, f"{ROOT}/ddp_machines.py", CUDA_VISIBLE_DEVICES="0")
    is_refused = re.search(r"ranks (0 and 1|1 and 0) share a GPU", output) is not None
    return is_refused, f"exit status {status}"


def training(runs: Runs, name: str, options: tuple[str, ...]) -> tuple[bool, str]:
    """Checks that a trained model is not much worse than the baseline, from which it starts."""
    problem = runs.train(name, *SMALL, *options)
    if problem:
        return False, problem
    (test,) = read_metrics(runs.folder / name, "test")
    figure = f"test Pearson {test['pearson']:.3f}, baseline {test['baseline_pearson']:.3f}, "
    return test["pearson"] >= test["baseline_pearson"] - 0.05, figure + speed(runs.folder / name)


def resuming(runs: Runs, suffix: str, options: tuple[str, ...], nproc: int = 1) -> tuple[bool, str]:
    """Checks that a stopped and resumed run ends with the same bits as an undisturbed run."""
    long_enough = "optim.epochs=6"  # long enough to stop the run
    options = (*SMALL, long_enough, "run.deterministic=true", *options)
    whole = runs.folder / f"whole{suffix}"
    parts = runs.folder / f"parts{suffix}"
    problem = runs.train(whole.name, *options, nproc=nproc)
    if not problem:
        stop_after(parts, 30)
        problem = runs.train(parts.name, *options, nproc=nproc, state="stopped")
    if not problem:
        problem = runs.train(parts.name, *options, nproc=nproc)
    if not problem:
        problem = difference(parts, whole)
    if problem:
        return False, problem
    return True, f"the same bits; {runs.note_on_graphs(parts.name)}"


def training_speed(
    runs: Runs, tables: SpeedTables, name: str, nproc: int, options: tuple[str, ...]
) -> tuple[bool, str]:
    """Measures the speed of a run, which is stopped after 10 seconds.

    Each rank has the same number of samples for any number of ranks.
    """
    batch_size = f"data.batch_size={tables.batch_size * nproc}"
    options = (*tables.options, batch_size, "log.every_steps=10", *options)
    stop_after(runs.folder / name, 10**6, 10.0)
    problem = runs.train(name, *options, nproc=nproc, state="stopped")
    return not problem, problem or speed(runs.folder / name)


def parity_on_gpus(runs: Runs) -> tuple[bool, str]:
    options = argparse.Namespace(
        cpu=False, world_sizes=[1, 2], arguments=runs.arguments, timeout=runs.timeout()
    )
    return parity(options), "see above"


def fault_on_gpus(runs: Runs, name: str) -> tuple[bool, str]:
    options = argparse.Namespace(
        cpu=False,
        only=name,
        arguments=[*runs.arguments, "run.deterministic=true"],
        timeout=runs.timeout(),
    )
    return faults(options), "see above"


def batchnorm(runs: Runs) -> tuple[bool, str]:
    status, output = runs.program(2, "-m", "tests.template.workers", "batchnorm")
    return status == 0, f"exit status {status} {last_words(output, 200)}"
