"""What grows with the number of ranks: agreeing whether to stop, and exchanges.

    python -m tests.bench.ranks [--step-ms 25] [--network-us 20] [--json FILE]

Agreement: 2 to 32 real processes over gloo, which sleep for a step's time and then agree after each
step, or as training does, in turn. Exchanges are predicted for a thousand ranks.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_ends import end_process
from ddp_setup import AGREEMENT_S, DDPConfig, Distributed, run
from tests.bench import arguments, report
from tests.tools.runs import ROOT

STEPS = 60  # of real ranks, in each round
ROUNDS = 3
PREDICTED = (8, 64, 256, 1024)
DEFAULT = "(default: %(default)s)"
ROW_STEPS = 10  # from one train row to the next, each with a sum over ranks


# ---- Real processes ------------------------------------------------------------------------------
def torchrun(number: int, *arguments: str) -> str:
    """Runs this module in so many processes on the CPU; returns what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={number}", "-m", "tests.bench.ranks", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return process.stdout


# ---- Agreement -----------------------------------------------------------------------------------
def agreement(options: argparse.Namespace) -> list[dict]:
    """Returns a row for each number of real processes."""
    rows = []
    for number in (2, 4, 8, 16, 32):
        printed = torchrun(number, "--step-ms", str(options.step_ms))
        each, rarely, alone = map(float, printed.split()[-3:])
        rows.append(
            {
                "processes": number,
                "an agreement, ms": alone,
                "after each step, ms per step": each,
                "as training does, ms per step": rarely,
                "of a step, %": 100 * rarely / options.step_ms,
            }
        )
    return rows


def measure_agreement(options: argparse.Namespace, ddp: Distributed) -> None:
    """Prints a call's ms, and the ms that steps gain by agreement.

    After each step, and after as many as training waits.
    """

    def steps(agree: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            time.sleep(options.step_ms / 1e3)
            ddp.step_done(ddp.heartbeat.step + 1)
            agree()
        dist.barrier()
        return 1e3 * (time.perf_counter() - start) / STEPS

    def calls() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            ddp.stop_reason()
        return 1e3 * (time.perf_counter() - start) / STEPS

    gains_each = []
    gains_rarely = []
    for _ in range(ROUNDS):
        none = steps(lambda: None)
        gains_each.append(steps(ddp.stop_reason) - none)
        gains_rarely.append(steps(lambda: ddp.stop_reason(at_once=False)) - none)
    alone = statistics.median(calls() for _ in range(ROUNDS))
    each = max(ddp.gather(statistics.median(gains_each)))
    rarely = max(ddp.gather(statistics.median(gains_rarely)))
    if ddp.rank == 0:
        print(each, rarely, alone)


# ---- Prediction ----------------------------------------------------------------------------------
def small_reduction_ms(processes: int, latency_us: float, backend: str) -> float:
    """Returns the ms of an all-reduce of a few bytes.

    Messages go round a ring twice (gloo), or up and down a tree.
    """
    depth = math.ceil(math.log2(processes))
    messages = 2 * (processes - 1) if backend == "gloo" else 2 * depth
    return messages * latency_us / 1e3


def agreement_share(processes: int, step_ms: float, latency_us: float, backend: str) -> float:
    """Returns the share of a step that agreement and the sums for train rows take."""
    per_step = min(1, step_ms / 1e3 / AGREEMENT_S) + 1 / ROW_STEPS
    return per_step * small_reduction_ms(processes, latency_us, backend) / step_ms


def predict(options: argparse.Namespace) -> list[dict]:
    from tests.bench.scaling import ring_ms  # which imports this module

    rows = []
    for number in PREDICTED:
        row = {"processes": number}
        for backend in ("nccl", "gloo"):
            once = small_reduction_ms(number, options.network_us, backend)
            between_ms = max(options.step_ms, 1e3 * AGREEMENT_S)
            row[f"{backend}: an agreement, ms"] = once
            row[f"{backend}: agreements, % of a step"] = 100 * once / between_ms
            row[f"{backend}: loss sums, %"] = 100 * once / ROW_STEPS / options.step_ms
        gradients_ms = ring_ms(3.7e6, number, options.network_us, 12.5)
        row["gradients, %"] = 100 * gradients_ms / options.step_ms
        rows.append(row)
    return rows


def main() -> None:
    options = arguments(
        __doc__,
        **{
            "step-ms": {"type": float, "default": 25.0, "help": f"a step's time {DEFAULT}"},
            "network-us": {"type": float, "default": 20.0, "help": f"us per message {DEFAULT}"},
        },
    )
    if "WORLD_SIZE" in os.environ:
        end_process(run(lambda ddp: measure_agreement(options, ddp), DDPConfig()))
        return
    # torch looks up a host name for each connection, and warns if there is none.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    steps = f"steps of {options.step_ms:g} ms"
    network = f"{options.network_us:g} us per message, {steps}"
    gradients = "3.7 MB of gradients at 12.5 GB/s"
    tables = {
        f"Agreement over gloo here, {steps}": agreement(options),
        f"Predicted: {network}, {gradients}, a train row each {ROW_STEPS} steps": predict(options),
    }
    report(tables, torch.device("cpu"), options.json)


if __name__ == "__main__":
    main()
