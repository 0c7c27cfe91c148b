"""`python -m tests.check gpu`: what only a machine with GPUs can prove, in less than ten minutes."""

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
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import train
from ddp_setup import DDPConfig, Distributed, UserError
from mask import SharedGraph, _segment_product
from model import KnockoutGNN, ModelConfig
from tests.bench import build_batch
from tests.bench.synthetic import PRESETS, build_graph, synthetic_tables, write
from tests.tools.faults import faults
from tests.tools.parity import parity
from tests.tools.runs import ROOT, difference, read_metrics

SMALL = ("data.batch_size=64", "optim.epochs=2", "log.every_steps=1", "checkpoint.every_steps=20")
YEAST = ("data.batch_size=28", "model.hidden=64", "model.layers=3", "log.every_steps=10")
OPTIONS = {  # of runs that must train
    "bf16": ("optim.precision=bf16",),
    "fp16": ("optim.precision=fp16",),
    "fp64, checkpointing, accumulation and loader processes": (
        "optim.precision=fp64", "model.checkpointing=true", "optim.accumulate=2", "data.workers=2"),
    "compile": ("model.compile=true",),
}  # fmt: skip


def gpu(options: argparse.Namespace) -> bool:
    """Prints OK or WRONG and a figure for each check; returns whether all are OK."""
    if not torch.cuda.is_available():
        raise UserError("tests.check gpu needs a GPU, and torch sees none: run it where nvidia-smi lists one")
    report, device, count = Report(), torch.device("cuda", 0), torch.cuda.device_count()
    products(report, device, "yeast")
    models(report, device)
    steps(report, device)
    with tempfile.TemporaryDirectory() as folder:
        yeast = [*write(synthetic_tables(PRESETS["yeast"]), Path(folder, "tables")), *YEAST]
        programs(report, Path(folder), yeast, options.timeout)
        if count > 1:
            several(report, Path(folder), yeast, count, options)
        else:
            print("one GPU: parity, a killed rank, SyncBatchNorm and scaling need two")
    return not report.wrong


class Report:
    """Prints a line for each check, and counts those that are wrong."""

    def __init__(self):
        self.wrong, self.start = 0, time.perf_counter()

    def __call__(self, name: str, ok: bool, figure: str) -> None:
        self.wrong += not ok
        seconds = time.perf_counter() - self.start
        print(f"{'OK' if ok else 'WRONG':6s} {name:66s} {figure}  [{seconds:.0f} s]", flush=True)

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Reports an exception as WRONG, so that the checks after it still run."""
        try:
            yield
        except Exception as error:
            self(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


# ---- Values, and waiting --------------------------------------------------------------------------------------------
def distance(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Returns the largest relative difference of a tensor."""
    pairs = zip(ours, reference, strict=True)
    return max(((a.double().cpu() - b).norm() / b.norm()).item() for a, b in pairs)


def densify(graph: SharedGraph, dtype: torch.dtype | None) -> list[str]:
    """Returns the relations that a copy with tests/recipes/dense.patch multiplies in `dtype`, as training does."""
    return graph.densify(dtype) if dtype and hasattr(graph, "densify") else []


def products(report: Report, device: torch.device, preset: str) -> None:
    """`SharedGraph.propagate`, its gradients and the deterministic product against float64 on the CPU."""
    host = SharedGraph(build_graph(preset))
    size, gates = (host.num_nodes, 2, 64), (len(host.relations), 64)
    generator = torch.Generator().manual_seed(0)
    x, gate, upstream = (torch.randn(shape, generator=generator).double() for shape in (size, gates, size))

    def results(graph: SharedGraph) -> list[Tensor]:
        dtype, where = graph.edge_weight.dtype, graph.device
        inputs = [value.to(where, dtype).requires_grad_() for value in (x, gate)]
        result = graph.propagate(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs, upstream.to(where, dtype))]

    reference = results(copy.deepcopy(host).double())
    for precision, tolerance in {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}.items():
        with report.guard(name := f"sums over neighbours, {preset}, {precision}"):
            dtype, half = train.PRECISIONS[precision]
            graph = copy.deepcopy(host).to(device, dtype)
            dense = densify(graph, half)
            with torch.autocast(device.type, half, enabled=half is not None):
                error = distance(results(graph), reference)
            figure = f"relative error {error:.1e}"
            if dense:
                figure += f", dense: {', '.join(dense)}"
            report(name, error <= tolerance, figure)
    with report.guard(name := f"sums over neighbours, {preset}, deterministic"):
        graph = copy.deepcopy(host).to(device)
        matrix = graph.stack.forward_ptr, graph.stack.forward_col, graph.stack.forward_weight
        sums = [_segment_product(*matrix, x.flatten(1).to(device, torch.float32)) for _ in range(3)]
        expected = copy.deepcopy(host).double().propagate(x)
        error = distance([sums[0].view(-1, *size).sum(0)], [expected])
        same = all(torch.equal(sums[0], other) for other in sums)
        report(name, error <= 1e-5 and same, f"relative error {error:.1e}, the same bits: {same}")


def models(report: Report, device: torch.device) -> None:
    """Predictions and gradients of the whole model against float64 on the CPU, by route, readout and precision."""
    host, tolerances = SharedGraph(build_graph("small")), {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
    for route, readout in (("shared", "both"), ("reach", "both"), ("expanded", "both"), ("auto", "local")):
        config = ModelConfig(dropout=0.0, message_passing=route, readout=readout)
        torch.manual_seed(0)
        model = KnockoutGNN(config, host.num_nodes, len(host.relations)).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # parts that start at zero would hide errors
        batch = build_batch(host, 16, model=config)

        def results(where: torch.device, precision: str, model=model, batch=batch) -> list[Tensor]:
            dtype, half = train.PRECISIONS[precision]
            graph, ours, there = copy.deepcopy(host).to(where, dtype), copy.deepcopy(model), copy.copy(batch).to(where)
            ours.to(where, dtype)
            densify(graph, half)
            with torch.autocast(where.type, half, enabled=half is not None):
                prediction = ours(graph, there)
            train.criterion(prediction.float() if half else prediction, there, ours).backward()
            gradients = [parameter.grad.to_dense().flatten() for parameter in ours.parameters()]
            return [prediction.detach(), torch.cat(gradients)]

        reference = results(torch.device("cpu"), "fp64")
        for precision, tolerance in tolerances.items():
            with report.guard(name := f"model, {route}, readout={readout}, {precision}"):
                error = distance(results(device, precision), reference)
                report(name, error <= tolerance, f"relative error {error:.1e}")


def steps(report: Report, device: torch.device) -> None:
    """Ten training steps in CUDA's synchronisation debug mode, which raises where the host waits."""
    host = SharedGraph(build_graph("small"))
    graph, env = copy.deepcopy(host).to(device), Distributed(DDPConfig())
    env.device = device
    for precision, checkpointing, route in product(("fp32", "bf16", "fp16"), (False, True), ("shared", "reach")):
        what = f"{route}, {precision}{', checkpointing' * checkpointing}"
        with report.guard(name := f"ten steps without waiting, {what}"):
            optim, half = train.OptimConfig(precision=precision), train.PRECISIONS[precision][1]
            config = ModelConfig(checkpointing=checkpointing, message_passing=route)
            model = KnockoutGNN(config, host.num_nodes, len(host.relations)).to(device).train()
            optimizer = train.build_optimizer(model, optim, env)
            scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10 if precision == "fp16" else 1.0)
            meter, state = train.Meter(env, optim), train.TrainState(model, optimizer, scaler, step=10)
            batch = build_batch(host, 16, model=config)
            batch = batch.pin_memory() if device.type == "cuda" else batch
            with no_waiting(device):
                for _ in range(10):
                    there = copy.copy(batch).to(device, non_blocking=True)  # Data.to moves the batch in place
                    with torch.autocast(device.type, half, enabled=half is not None):
                        prediction = model(graph, there)
                    loss = train.criterion(prediction, there, model)
                    scaler.scale(loss / 16).backward()
                    meter.loss += loss.detach()
                    meter.count(16, 16, train.optimizer_step(model, optimizer, scaler, optim), scaler)
            row = meter.read(state)
            report(name, row["skipped"] == 0, f"mean loss {row['loss']:.3f}")


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


# ---- Programs -------------------------------------------------------------------------------------------------------
def torchrun(nproc: int, timeout: float, *arguments: str, **variables: str) -> tuple[int, str]:
    """Runs a script or module of the template under torchrun; returns its exit status and output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, start_new_session=True, **streams)
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun stops its workers, which have their own sessions
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        return 124, process.communicate()[0]


def ended(folder: Path, status: int, output: str, state: str = "finished") -> str:
    """Returns what is wrong with the end of a run, or ""."""
    path = folder / "status.json"
    found = json.loads(path.read_text())["state"] if path.exists() else "none"
    return "" if (status, found) == (0, state) else f"exit status {status}, {found}: {' '.join(output.split())[-300:]}"


def speed(folder: Path) -> str:
    """Returns the median speed and the memory of a run's later training rows."""
    rows = read_metrics(folder, "train")
    rows = rows[len(rows) // 2 :]
    step_ms = sorted(row["step_ms"] for row in rows)[len(rows) // 2]
    return f"{1e3 / step_ms:.1f} it/s, {rows[-1]['samples_per_s']:,.0f} samples/s, {rows[-1]['memory_mb']:,.0f} MB"


def stop_after(folder: Path, steps: int, seconds: float = 1e9) -> None:
    """Asks a run to stop, from a thread, once it has done so many steps or has trained for so many seconds."""

    def watch() -> None:
        start = None
        while True:
            time.sleep(0.1)
            rows = read_metrics(folder, "train") if (folder / "metrics.jsonl").exists() else []
            start = time.monotonic() if rows and start is None else start
            if rows and (rows[-1]["step"] >= steps or time.monotonic() > start + seconds):
                return (folder / "STOP").touch()

    threading.Thread(target=watch, daemon=True).start()


def programs(report: Report, folder: Path, yeast: list[str], timeout: float) -> None:
    """The preflight check, training by precision and option, stopping and resuming, and the speed on `yeast` tables."""

    def run(name: str, *options: str, nproc: int = 1) -> tuple[int, str]:
        where = f"run.dir={folder}", f"run.name={name}", f"data.cache_dir={folder}/cache"
        return torchrun(nproc, timeout, "train.py", *where, *options)

    status, output = torchrun(1, timeout, "ddp_setup.py")
    line = next((line for line in output.splitlines()[::-1] if line.startswith("OK     all-reduce")), output[-300:])
    report("preflight with NCCL", status == 0 and line.startswith("OK"), line.strip())
    status, output = torchrun(2, timeout, "ddp_setup.py", CUDA_VISIBLE_DEVICES="0")
    report("two ranks on one GPU are refused", "ranks [0, 1] share a GPU" in output, f"exit status {status}")
    for number, (name, options) in enumerate(OPTIONS.items()):
        problem = ended(folder / str(number), *run(str(number), *SMALL, *options))
        figure = problem
        if not problem:
            (test,) = read_metrics(folder / str(number), "test")
            problem = test["pearson"] < test["baseline_pearson"] - 0.05
            figure = f"test Pearson {test['pearson']:.3f}, baseline {test['baseline_pearson']:.3f}, "
            figure += speed(folder / str(number))
        report(f"training: {name}", not problem, figure)
    for name, options in {"": (), ", ZeRO": ("optim.zero=true",)}.items():
        options = (*SMALL, "optim.epochs=6", "run.deterministic=true", *options)  # long enough to be stopped
        whole, parts = folder / f"whole{name}", folder / f"parts{name}"
        problem = ended(whole, *run(whole.name, *options))
        stop_after(parts, 30)
        problem = problem or ended(parts, *run(parts.name, *options), "stopped")
        problem = problem or ended(parts, *run(parts.name, *options))
        problem = problem or difference(parts, whole)
        report(f"stopped and resumed, run.deterministic{name}", not problem, problem or "the same bits")
    for precision in ("fp32", "bf16"):
        name = f"yeast, {precision}"
        stop_after(folder / name, 10**6, 20.0)
        problem = ended(folder / name, *run(name, *yeast, f"optim.precision={precision}"), "stopped")
        report(f"a training step of {name}, 28 samples", not problem, problem or speed(folder / name))


def several(report: Report, folder: Path, yeast: list[str], count: int, options: argparse.Namespace) -> None:
    """What needs two GPUs: the same result on any number, a killed rank, SyncBatchNorm, and the gain in speed."""
    options.cpu, options.world_sizes, options.only = False, [1, 2], "a rank killed in the forward pass"
    report("parity on 1 and 2 GPUs", parity(options), "see above")
    options.arguments = [*options.arguments, "run.deterministic=true"]
    report("a killed rank", faults(options), "see above")
    status, output = torchrun(2, options.timeout, "-m", "tests.workers", "batchnorm")
    report("SyncBatchNorm", status == 0, f"exit status {status} {' '.join(output.split())[-200:]}")
    for nproc in (1, count):
        name, where = f"scaling {nproc}", (f"run.dir={folder}", f"data.cache_dir={folder}/cache")
        stop_after(folder / name, 10**6, 20.0)
        settings = (*yeast, f"data.batch_size={28 * nproc}", f"run.name={name}")
        status, output = torchrun(nproc, options.timeout, "train.py", *where, *settings)
        problem = ended(folder / name, status, output, "stopped")
        report(f"28 samples on each of {nproc} GPUs", not problem, problem or speed(folder / name))
