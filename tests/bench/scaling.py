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
from ddp_setup import DDPConfig, Distributed, run
from mask import SharedGraph
from tests.bench import arguments, count_cores, report, synchronize
from tests.bench.ranks import agreement_share
from tests.bench.step import Step
from tests.bench.synthetic import PRESETS, build_graph, synthetic_tables
from tests.tools.runs import gather
from train import criterion

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
        self.accumulate, self.net = accumulate, self.model
        if group is not None:
            ids = [shared.device.index] if shared.device.type == "cuda" else None
            self.net = DistributedDataParallel(
                self.model, device_ids=ids, process_group=group, **settings
            )
            if hook:
                self.net.register_comm_hook(group, hook)

    def __call__(self) -> None:
        for micro in range(self.accumulate):
            last = micro == self.accumulate - 1
            with contextlib.nullcontext() if last else self.net.no_sync():
                prediction = self.net(self.shared, self.batch)
                (criterion(prediction, self.batch, self.model) / len(self.batch.y)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(options: argparse.Namespace, env: Distributed) -> None:
    shared = SharedGraph(build_graph(options.preset)).to(env.device)
    n, B = env.world_size, options.batch
    sizes = [k for k in (*(2**i for i in range(n.bit_length())), n) if k <= n]
    sizes = sorted(set(sizes))
    groups = {
        k: dist.new_group(range(k)) for k in sizes
    }  # a collective call: every rank must create every group
    plan = {("weak", k): B for k in sizes} | {
        ("strong", k): B // k for k in sizes[1:] if B % k == 0
    }
    variants = {
        "ddp.options={bucket_cap_mb: 1}": {"bucket_cap_mb": 1},
        "ddp.options={gradient_as_bucket_view: true}": {"gradient_as_bucket_view": True},
        "ddp.options={forward_sync_buffers: false}": {"forward_sync_buffers": False},
        "ddp.options={static_graph: true}": {"static_graph": True},
        **(
            {"bf16 compression hook": {"hook": bf16_compress_hook}}
            if env.device.type == "cuda"
            else {
                "fp16 compression hook": {"hook": fp16_compress_hook}
            }  # torch does not support bf16 here on the CPU
        ),
        "optim.accumulate=4": {"accumulate": 4},
    }

    steps: dict[tuple, Callable] = {}
    for (scaling, k), samples in plan.items():
        if env.rank < k:
            steps[scaling, k, "alone"] = ScaledStep(shared, samples, options)
            steps[scaling, k, "ddp"] = ScaledStep(shared, samples, options, groups[k])
        else:
            steps[scaling, k, "alone"] = steps[scaling, k, "ddp"] = lambda: None
    for name, settings in variants.items():
        steps["variant", n, name] = ScaledStep(shared, B, options, groups[n], **settings)
    times = in_turn_together(steps, env, options.rounds)
    ms = {key: 1e3 * statistics.median(values) for key, values in times.items()}

    def ratio(key: tuple, other: tuple) -> float:
        return statistics.median(a / b for a, b in zip(times[key], times[other], strict=True))

    rows = [
        {
            "scaling": scaling,
            "processes": k,
            "samples per process": samples,
            "computation, ms": ms[scaling, k, "alone"],
            "exposed communication, ms": max(0.0, ms[scaling, k, "ddp"] - ms[scaling, k, "alone"]),
            "speed-up": ratio(("weak", 1, "alone"), (scaling, k, "ddp"))
            * (k if scaling == "weak" else 1),
            "achievable speed-up": ratio(("weak", 1, "alone"), (scaling, k, "alone"))
            * (k if scaling == "weak" else 1),
            "efficiency, %": 100 * ratio((scaling, k, "alone"), (scaling, k, "ddp")),
        }
        for (scaling, k), samples in plan.items()
    ]
    trials = []
    for name, settings in variants.items():
        micro = settings.get("accumulate", 1)
        share = 100 * ratio(("variant", n, name), ("weak", n, "ddp")) / micro
        trials.append(
            {
                "variant": name,
                "ms per batch": ms["variant", n, name] / micro,
                "of DDP's default, %": share,
            }
        )

    model, compute = steps["weak", n, "ddp"].model, ms["weak", n, "alone"]
    grad_bytes = sum(parameter.nbytes for parameter in model.parameters())
    tensors = {
        size: torch.zeros(size // 4, device=env.device) for size in (10**i for i in range(3, 9))
    }
    calls = {size: partial(dist.all_reduce, tensor) for size, tensor in tensors.items()}
    points = [
        (size, 1e3 * statistics.median(values))
        for size, values in in_turn_together(calls, env, 7).items()
    ]
    latency_ms, rate = fit_line(points)
    here = [
        {"bytes": size, "ms": ms, "fitted, ms": latency_ms + size / rate / 1e6}
        for size, ms in points
    ]
    predicted = []
    for k in PREDICTED:
        exchange = ring_ms(grad_bytes, k, options.network_us, options.network_gbytes)
        left = max(0.0, exchange - BACKWARD * compute)
        backend = "nccl" if env.device.type == "cuda" else "gloo"
        agreed = agreement_share(k, compute, options.network_us, backend) * compute
        row = {"processes": k, "all-reduce, ms": exchange, "agreement, ms": agreed}
        row["efficiency, no overlap, %"] = compute / (compute + agreed + exchange)
        row["efficiency, overlap, %"] = compute / (compute + agreed + left)
        predicted.append({name: 100 * v if "%" in name else v for name, v in row.items()})

    tables = synthetic_tables(PRESETS[options.preset])
    dataset = KnockoutDataset(tables, shared.degree)
    start = time.perf_counter()
    for _ in range(5):
        dataset.__getitems__(range(B))
    data_ms = 1e3 * (time.perf_counter() - start) / 5
    if env.rank != 0:
        return
    network = (
        f"{options.network_gbytes:g} GB/s per process and {options.network_us:g} us per message"
    )
    title = (
        f"{options.preset}, hidden {options.hidden}, {options.layers} layers, "
        f"{grad_bytes / 1e6:.1f} MB gradients"
    )
    report(
        {
            f"Steps ({title})": rows,
            f"Variants on {n} processes": trials,
            f"All-reduce over {n} processes here: {latency_ms:.2f} ms + bytes / {rate:.2f} "
            "GB/s": here,
            f"Predicted: a ring all-reduce and agreement, {network}, {B} samples each, as fast as "
            "here": predicted,
        },
        env.device,
        options.json,
    )
    exchange = 1 - ratio(("weak", n, "alone"), ("weak", n, "ddp"))
    print("", *advice(exchange, data_ms / (data_ms + compute), model, B), sep="\n")


def in_turn_together(
    steps: dict[Any, Callable], env: Distributed, rounds: int
) -> dict[Any, list[float]]:
    """Returns, on every rank, the seconds of the slowest rank.

    They are for each step in each round after a warm-up.
    """
    times: dict[Any, list[float]] = {key: [] for key in steps}
    for turn in range(-1, rounds):
        for key, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            with env.phase("step"):  # counts as progress for the watchdog
                step()
                synchronize(env.device)
            slowest = max(gather(time.perf_counter() - start, env))
            if turn >= 0:
                times[key].append(slowest)
    return times


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Fits a line to points (bytes, ms) by least squared relative errors.

    Returns latency in ms and rate in GB/s.
    """
    x = torch.tensor(points, dtype=torch.float64)
    weight = 1 / x[:, 1:]
    line = torch.linalg.lstsq(
        weight * torch.stack([torch.ones(len(x), dtype=x.dtype), x[:, 0]], 1), weight * x[:, 1:]
    )
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
    if num_samples < 16 and any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    ):
        sentences.append(
            f"advice: BatchNorm sees {num_samples} samples per process: set "
            "ddp.sync_batchnorm=true."
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
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={options.processes}",
        ]
        os.execv(
            sys.executable, [sys.executable, *torchrun, "-m", "tests.bench.scaling", *sys.argv[1:]]
        )
    run(partial(measure, options), DDPConfig())


if __name__ == "__main__":
    main()
