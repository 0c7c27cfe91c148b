"""What grows with the number of ranks: finding a hang, agreeing whether to stop, exchanges.

The last are predicted for a thousand ranks.

    python -m tests.bench.ranks [--ranks 128] [--limit 40] [--step-ms 25] [--network-us 20]
        [--json FILE]

Hangs: the real watchdogs of so many ranks, each with a connection of its own, in four processes
without a model, and a store as torchrun's; their time is real. They have just stalled when the
measurement begins. Agreement: 2 to 32 real processes over gloo, which sleep for a step's time and
then agree after each step, or as training does, in turn.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

import ddp_watchdog
from ddp_ends import Heartbeat, end_process
from ddp_setup import AGREEMENT_S, DDPConfig, Distributed, run
from ddp_watchdog import Watchdog
from tests.bench import arguments, report
from tests.tools.runs import ROOT

LONG = timedelta(hours=1)
PROCESSES = 4  # of the simulated ranks
STEPS = 60  # of real ranks, in each round
ROUNDS = 3
PREDICTED = (8, 64, 256, 1024)
DEFAULT = "(default: %(default)s)"
ROW_STEPS = 10  # from one train row to the next, each with a sum over ranks
WAITING = Heartbeat(9, 7, "backward", 70)
BEHIND = Heartbeat(9, 5, "data", 68)


# ---- Hangs ---------------------------------------------------------------------------------------
COUNTED = ("set", "get", "add", "check", "compare_set", "wait", "multi_get", "multi_set", "append")
NOT_COUNTED = ("clone", "set_timeout", "has_extended_api")


class CountedStore(dist.Store):
    """Counts the calls of each method of a store, those of C++ included, those of clones not."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store = store
        self.calls = Counter()


def add_method(name: str) -> None:
    """Gives `CountedStore` a method that calls the store's."""

    def call(self: CountedStore, *arguments) -> object:
        if name in COUNTED:
            self.calls[name] += 1
        return getattr(self.store, name)(*arguments)

    setattr(CountedStore, name, call)


for method in COUNTED + NOT_COUNTED:
    add_method(method)


def hangs(options: argparse.Namespace) -> list[dict]:
    """Returns a row for each kind of hang."""
    number = options.ranks
    machine = range(number // 8, number // 8 + number // 16)
    kinds = {
        "one frozen rank": ([number // 3], []),
        f"a dead machine of {len(machine)} ranks": (list(machine), []),
        "all wait for one rank": ([], [number // 3]),
    }
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return [{"hang": name, **hang(options, pool, *kind)} for name, kind in kinds.items()]


def hang(
    options: argparse.Namespace, pool: ProcessPoolExecutor, frozen: list[int], behind: list[int]
) -> dict:
    """Returns how long the watchdogs take to name frozen or late ranks, and their calls."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    results = []
    for index in range(PROCESSES):
        ranks = range(index, options.ranks, PROCESSES)
        arguments = (store.port, ranks, options.ranks, options.limit, frozen, behind)
        results.append(pool.submit(simulate, *arguments))
    while store.add("ready", 0) < PROCESSES:
        time.sleep(0.1)
    store.set("go", "")
    start = time.monotonic()
    store.wait(["end"], LONG)
    named_s = time.monotonic() - start
    calls = sum((result.result() for result in results), Counter())
    ended_s = time.monotonic() - start
    reason = store.get("end").decode()
    named = {int(rank) for rank in re.findall(r"rank (\d+):", reason)}
    assert named == {*frozen, *behind}, reason
    return {
        "named after, s": named_s,
        "of the limit, %": 100 * named_s / options.limit,
        "all ended after, s": ended_s,
        "calls per s": calls.total() / ended_s,
        "of them multi_get": calls["multi_get"] / ended_s,
    }


def simulate(
    port: int, ranks: range, world_size: int, limit_s: float, frozen: list[int], behind: list[int]
) -> Counter[str]:
    """Runs the watchdogs of some ranks until they end the job; returns the calls they made."""
    ddp_watchdog.log_and_print = lambda text: None
    threading.stack_size(2**18)
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=LONG)

    def watchdog_of(rank: int) -> Watchdog:
        ddp = Distributed(DDPConfig(timeout_s=limit_s, startup_timeout_s=limit_s))
        ddp.rank = rank
        ddp.world_size = world_size
        ddp.store = store
        ddp.heartbeat = BEHIND if rank in behind else WAITING
        made = Watchdog(ddp, lambda: False)
        made.exit_now = lambda reason: sys.exit()  # of its thread
        made.store = CountedStore(made.store)
        made.watch_store = lambda: None  # which asks nothing of the store
        return made

    for rank in set(ranks) & set(frozen):
        store.set(f"heartbeat/{rank}", json.dumps([1, BEHIND]))
    with ThreadPoolExecutor(32) as pool:  # as each connection may wait for a name server
        watchdogs = list(pool.map(watchdog_of, sorted(set(ranks) - set(frozen))))
    store.add("ready", 1)
    store.wait(["go"], LONG)
    for thread in watchdogs:
        thread.start()
    for thread in watchdogs:
        thread.join()
    return sum((thread.store.calls for thread in watchdogs), Counter())


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
            "ranks": {"type": int, "default": 128, "help": f"simulated {DEFAULT}"},
            "limit": {"type": float, "default": 40.0, "help": f"ddp.timeout_s of these {DEFAULT}"},
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
        f"Hangs of {options.ranks} simulated ranks, limit {options.limit:g} s": hangs(options),
        f"Agreement over gloo here, {steps}": agreement(options),
        f"Predicted: {network}, {gradients}, a train row each {ROW_STEPS} steps": predict(options),
    }
    report(tables, torch.device("cpu"), options.json)


if __name__ == "__main__":
    main()
