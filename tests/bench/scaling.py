"""How a training step scales over the processes of this machine, and a prediction for more of them.

    python -m tests.bench.scaling [--processes N] [--network-gbytes 12.5] [--network-us 20]
        [--json FILE]

Everything is measured in turn in one launch of N processes (default: one per GPU, or per core). For
each k up to N, the first k train while the others wait, with a batch each (weak scaling) or a share
of one batch (strong), under DDP and without communication; the latter, k independent processes on
the same machine, is the best achievable. Each process has an N-th of the machine's threads, as if
it had its own device. Times are those of the slowest process, as medians over rounds; ratios are
medians of each round's ratio.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from data import KnockoutDataset
from ddp_ends import end_process
from ddp_setup import DDPConfig, Distributed, run
from mask import SharedGraph
from tests.bench import arguments, count_cores, report, synchronize
from tests.bench.ranks import agreement_share
from tests.bench.step import Step, mean_loss
from tests.bench.synthetic import PRESETS, build_graph, synthetic_tables

PREDICTED = (8, 64, 256, 1024)
BACKWARD = 2 / 3  # of a step's computation, which an all-reduce can overlap with


class ScaledStep(Step):
    """A step of `accumulate` equal micro-batches, under DDP if `group` is given."""

    def __init__(
        self,
        shared: SharedGraph,
        num_samples: int,
        options: argparse.Namespace,
        group: dist.ProcessGroup | None = None,
        accumulate: int = 1,
        hook: Callable | None = None,
        **settings,
    ):
        super().__init__(shared, "shared", num_samples, options.hidden, options.layers)
        self.accumulate = accumulate
        self.net = self.model
        if group is not None:
            ids = [shared.device.index] if shared.device.type == "cuda" else None
            self.net = DistributedDataParallel(
                self.model, device_ids=ids, process_group=group, **settings
            )
            if hook is not None:
                self.net.register_comm_hook(group, hook)

    def __call__(self) -> None:
        for micro in range(self.accumulate):
            is_last = micro == self.accumulate - 1
            with contextlib.nullcontext() if is_last else self.net.no_sync():
                prediction = self.net(self.shared, self.batch)
                mean_loss(prediction, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Timings:
    """The seconds of steps in each round, on the slowest rank."""

    def __init__(self, seconds: dict[Any, list[float]]):
        self.seconds = seconds

    def ms(self, key: Any) -> float:
        return 1e3 * statistics.median(self.seconds[key])

    def ratio(self, key: Any, other: Any) -> float:
        """Returns the median over rounds of the ratio of two steps' times."""
        pairs = zip(self.seconds[key], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


def measure(options: argparse.Namespace, ddp: Distributed) -> None:
    shared = SharedGraph(build_graph(options.preset)).to(ddp.device)
    num_processes = ddp.world_size
    plan = plan_steps(num_processes, options.batch)
    variants = variants_of(ddp.device)
    steps = make_steps(shared, plan, variants, options, ddp)
    timings = Timings(in_turn_together(steps, ddp, options.rounds))
    points = time_all_reduces(ddp)
    data_ms = time_data(options, shared)
    if ddp.rank != 0:
        return

    model = steps["weak", num_processes, "ddp"].model
    compute_ms = timings.ms(("weak", num_processes, "alone"))
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    latency_ms, rate = fit_line(points)
    network = (
        f"{options.network_gbytes:g} GB/s per process and {options.network_us:g} us per message"
    )
    title = (
        f"{options.preset}, hidden {options.hidden}, {options.layers} layers, "
        f"{gradient_bytes / 1e6:.1f} MB gradients"
    )
    all_reduces = (
        f"All-reduce over {num_processes} processes here: "
        f"{latency_ms:.2f} ms + bytes / {rate:.2f} GB/s"
    )
    predicted = (
        f"Predicted: a ring all-reduce and agreement, {network}, {options.batch} samples each, "
        "as fast as here"
    )
    tables = {
        f"Steps ({title})": step_rows(plan, timings),
        f"Variants on {num_processes} processes": variant_rows(variants, num_processes, timings),
        all_reduces: all_reduce_rows(points),
        predicted: predict(compute_ms, gradient_bytes, options, ddp.device),
    }
    report(tables, ddp.device, options.json)
    alone = timings.ratio(("weak", num_processes, "alone"), ("weak", num_processes, "ddp"))
    data_share = data_ms / (data_ms + compute_ms)
    print("", *advice(1 - alone, data_share, model, options.batch), sep="\n")


def plan_steps(num_processes: int, batch: int) -> dict[tuple[str, int], int]:
    """Returns {(scaling, processes): samples per process}."""
    sizes = {num_processes}
    sizes.update(2**i for i in range(num_processes.bit_length()))
    plan = {}
    for k in sorted(sizes):
        plan["weak", k] = batch
    for k in sorted(sizes):
        if k > 1 and batch % k == 0:
            plan["strong", k] = batch // k
    return plan


def variants_of(device: torch.device) -> dict[str, dict]:
    """Returns the settings of `ScaledStep` that are tried beside DDP's default."""
    variants = {
        "ddp.options={bucket_cap_mb: 1}": {"bucket_cap_mb": 1},
        "ddp.options={gradient_as_bucket_view: true}": {"gradient_as_bucket_view": True},
        "ddp.options={forward_sync_buffers: false}": {"forward_sync_buffers": False},
        "ddp.options={static_graph: true}": {"static_graph": True},
        "optim.accumulate=4": {"accumulate": 4},
    }
    if device.type == "cuda":
        variants["bf16 compression hook"] = {"hook": bf16_compress_hook}
    else:  # where torch does not support bf16
        variants["fp16 compression hook"] = {"hook": fp16_compress_hook}
    return variants


def make_steps(
    shared: SharedGraph,
    plan: dict[tuple[str, int], int],
    variants: dict[str, dict],
    options: argparse.Namespace,
    ddp: Distributed,
) -> dict[tuple, Callable]:
    """Returns the steps of this rank, which does nothing in those of fewer processes."""
    steps: dict[tuple, Callable] = {}
    groups = {}
    for _, k in plan:
        if k not in groups:
            groups[k] = dist.new_group(range(k))  # by every rank: it is a collective call
    for (scaling, k), num_samples in plan.items():
        alone: Callable = do_nothing
        synced: Callable = do_nothing
        if ddp.rank < k:
            alone = ScaledStep(shared, num_samples, options)
            synced = ScaledStep(shared, num_samples, options, groups[k])
        steps[scaling, k, "alone"] = alone
        steps[scaling, k, "ddp"] = synced
    group = groups[ddp.world_size]
    for name, settings in variants.items():
        steps["variant", name] = ScaledStep(shared, options.batch, options, group, **settings)
    return steps


def do_nothing() -> None:
    pass


def step_rows(plan: dict[tuple[str, int], int], timings: Timings) -> list[dict]:
    rows = []
    first = ("weak", 1, "alone")
    for (scaling, k), num_samples in plan.items():
        alone = (scaling, k, "alone")
        ddp = (scaling, k, "ddp")
        work = k if scaling == "weak" else 1  # of all processes, in that of the first
        rows.append(
            {
                "scaling": scaling,
                "processes": k,
                "samples per process": num_samples,
                "computation, ms": timings.ms(alone),
                "exposed communication, ms": max(0.0, timings.ms(ddp) - timings.ms(alone)),
                "speed-up": work * timings.ratio(first, ddp),
                "achievable speed-up": work * timings.ratio(first, alone),
                "efficiency, %": 100 * timings.ratio(alone, ddp),
            }
        )
    return rows


def variant_rows(variants: dict[str, dict], num_processes: int, timings: Timings) -> list[dict]:
    rows = []
    for name, settings in variants.items():
        num_batches = settings.get("accumulate", 1)
        ratio = timings.ratio(("variant", name), ("weak", num_processes, "ddp"))
        rows.append(
            {
                "variant": name,
                "ms per batch": timings.ms(("variant", name)) / num_batches,
                "of DDP's default, %": 100 * ratio / num_batches,
            }
        )
    return rows


def time_all_reduces(ddp: Distributed) -> list[tuple[float, float]]:
    """Returns bytes and ms of all-reduces of several sizes."""
    calls = {}
    for size in (10**i for i in range(3, 9)):
        calls[size] = partial(dist.all_reduce, torch.zeros(size // 4, device=ddp.device))
    timings = Timings(in_turn_together(calls, ddp, 7))
    return [(size, timings.ms(size)) for size in calls]


def all_reduce_rows(points: list[tuple[float, float]]) -> list[dict]:
    latency_ms, rate = fit_line(points)
    rows = []
    for size, ms in points:
        fitted = latency_ms + size / rate / 1e6
        rows.append({"bytes": size, "ms": ms, "fitted, ms": fitted})
    return rows


def predict(
    compute_ms: float, gradient_bytes: int, options: argparse.Namespace, device: torch.device
) -> list[dict]:
    """Returns a row for each number of processes."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    rows = []
    for k in PREDICTED:
        exchange = ring_ms(gradient_bytes, k, options.network_us, options.network_gbytes)
        exposed = max(0.0, exchange - BACKWARD * compute_ms)
        agreed = agreement_share(k, compute_ms, options.network_us, backend) * compute_ms
        rows.append(
            {
                "processes": k,
                "all-reduce, ms": exchange,
                "agreement, ms": agreed,
                "efficiency, no overlap, %": 100 * compute_ms / (compute_ms + agreed + exchange),
                "efficiency, overlap, %": 100 * compute_ms / (compute_ms + agreed + exposed),
            }
        )
    return rows


def time_data(options: argparse.Namespace, shared: SharedGraph) -> float:
    """Returns the ms of building a batch."""
    tables = synthetic_tables(PRESETS[options.preset])
    dataset = KnockoutDataset(tables, shared.degree)
    start = time.perf_counter()
    for _ in range(5):
        dataset.__getitems__(range(options.batch))
    return 1e3 * (time.perf_counter() - start) / 5


def in_turn_together(
    steps: dict[Any, Callable], ddp: Distributed, rounds: int
) -> dict[Any, list[float]]:
    """Returns, on every rank, the seconds of the slowest rank.

    They are for each step in each round after a warm-up.
    """
    times: dict[Any, list[float]] = {key: [] for key in steps}
    for turn in range(-1, rounds):
        for key, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            with ddp.phase("step"):  # counts as progress for the watchdog
                step()
                synchronize(ddp.device)
            slowest = max(ddp.gather(time.perf_counter() - start))
            if turn >= 0:
                times[key].append(slowest)
    return times


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Fits a line to points (bytes, ms) by least squared relative errors.

    Returns latency in ms and rate in GB/s.
    """
    x = torch.tensor(points, dtype=torch.float64)
    weight = 1 / x[:, 1:]
    design = torch.stack([torch.ones(len(x), dtype=x.dtype), x[:, 0]], dim=1)
    line = torch.linalg.lstsq(weight * design, weight * x[:, 1:])
    latency, per_byte = line.solution.flatten().tolist()
    return max(0.0, latency), 1e-6 / max(per_byte, 1e-12)


def ring_ms(num_bytes: float, processes: int, latency_us: float, gbytes: float) -> float:
    """Returns the ms of a ring all-reduce: 2 (k - 1) messages of a k-th of the bytes, in turn."""
    return 2 * (processes - 1) * (1e-3 * latency_us + num_bytes / processes / gbytes / 1e6)


def advice(exchange: float, data: float, model: nn.Module, num_samples: int) -> list[str]:
    """Returns advice that follows from the shares of a step and the model: 0 to 3 lines."""
    sentences = []
    if exchange > 0.3:
        sentences.append(
            f"advice: communication takes {exchange:.0%} of a step: use more samples per process "
            "or optim.accumulate."
        )
    if data > 0.1:
        sentences.append(f"advice: building batches takes {data:.0%} of a step: set data.workers.")
    kinds = [type(module) for module in model.modules()]
    has_batch_norm = any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds)
    if num_samples < 16 and has_batch_norm:
        sentences.append(
            f"advice: BatchNorm sees {num_samples} samples per process: "
            "set ddp.sync_batchnorm=true."
        )
    return sentences


def main() -> None:
    number = {"type": int}
    options = arguments(
        __doc__,
        **{
            "processes": {**number, "default": torch.cuda.device_count() or count_cores()},
            "batch": {**number, "default": 4, "help": "samples per process (default: %(default)s)"},
            "hidden": {**number, "default": 64},
            "layers": {**number, "default": 3},
            "rounds": {**number, "default": 5},
            "network-gbytes": {
                "type": float,
                "default": 12.5,
                "help": "GB/s that each process sends (default: 12.5)",
            },
            "network-us": {
                "type": float,
                "default": 20.0,
                "help": "latency per message in us (default: 20)",
            },
        },
    )
    if "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // options.processes)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={options.processes}", "-m", "tests.bench.scaling"]
        os.execv(sys.executable, command + sys.argv[1:])
    end_process(run(partial(measure, options), DDPConfig()))


if __name__ == "__main__":
    main()
