"""What grows with the number of ranks: finding a hang, agreeing whether to stop, exchanges.

The last are predicted for a thousand ranks.

    python -m tests.bench.ranks [--ranks 1024] [--limit 40] [--step-ms 25] [--network-us 20]
        [--json FILE]

Hangs: the real watchdogs of so many ranks, each with a connection of its own, in four processes
without a model, and a store as torchrun's; their time is real. They have just stalled when the
measurement begins. Agreement: 2 to 32 real processes over gloo, which sleep for a step's time and
then agree after each step, or as training does, in turn. Calls at the start: counted on 2 to 8 real
processes, on the example's tables.
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
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import config
import ddp_setup
import run_folder
import train
import watchdog
from ddp_setup import AGREEMENT_S, DDPConfig, Distributed, run
from tests.bench import arguments, report
from tests.tools.runs import ROOT, gather
from watchdog import OBSERVERS, Progress, Watchdog

LONG = timedelta(hours=1)
PROCESSES = 4  # of the simulated ranks
STEPS, ROUNDS = 60, 3  # of real ranks
PREDICTED = (8, 64, 256, 1024)
ROW_STEPS = 10  # from one train row to the next, each with a sum over ranks
WAITING = Progress(9, 7, "backward", 70)
BEHIND = Progress(9, 5, "data", 68)


# ---- Hangs ---------------------------------------------------------------------------------------
class CountedStore(dist.Store):
    """Counts the calls of each method of a store, those of C++ included, those of clones not."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store = store
        self.calls = Counter()


def counted(name: str) -> Callable:
    def call(self: CountedStore, *arguments) -> object:
        self.calls[name] += 1
        return getattr(self.store, name)(*arguments)

    return call


for method in (
    "set",
    "get",
    "add",
    "check",
    "compare_set",
    "wait",
    "multi_get",
    "multi_set",
    "append",
):
    setattr(CountedStore, method, counted(method))
for method in ("clone", "set_timeout", "has_extended_api"):
    setattr(
        CountedStore,
        method,
        lambda self, *arguments, name=method: getattr(self.store, name)(*arguments),
    )


def hangs(options: argparse.Namespace) -> list[dict]:
    """Returns a row for each kind of hang."""
    number = options.ranks
    machine = range(number // 8, number // 8 + number // 16)
    observers = range(0, number, max(1, number // OBSERVERS))
    kinds = {
        "one frozen rank": ([number // 3], []),
        f"a dead machine of {len(machine)} ranks, with an observer": (list(machine), []),
        "all wait for one rank": ([], [number // 3]),
        "all observers frozen": (list(observers), []),
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
        own = range(index, options.ranks, PROCESSES)
        results.append(
            pool.submit(simulate, store.port, own, options.ranks, options.limit, frozen, behind)
        )
    while store.add("ready", 0) < PROCESSES:
        time.sleep(0.1)
    store.set("go", "")
    start = time.monotonic()
    store.wait(["end"], LONG)
    named_s = time.monotonic() - start
    calls = sum((result.result() for result in results), Counter())
    ended_s = time.monotonic() - start
    reason = store.get("end").decode()
    assert {int(rank) for rank in re.findall(r"rank (\d+):", reason)} == {*frozen, *behind}, reason
    row = {
        "named after, s": named_s,
        "of the limit, %": 100 * named_s / options.limit,
        "all ended after, s": ended_s,
    }
    return row | {
        "calls per s": calls.total() / ended_s,
        "of them multi_get": calls["multi_get"] / ended_s,
    }


def simulate(
    port: int, own: range, world_size: int, limit_s: float, frozen: list[int], behind: list[int]
) -> Counter[str]:
    """Runs the watchdogs of the ranks `own` until they end the job; returns the calls they made."""
    watchdog.log_and_print = lambda text: None
    threading.stack_size(2**18)
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=LONG)

    def watchdog_of(rank: int) -> Watchdog:
        env = Distributed(DDPConfig(timeout_s=limit_s, startup_timeout_s=limit_s))
        env.rank, env.world_size, env.store = rank, world_size, store
        env.progress = BEHIND if rank in behind else WAITING
        env.exit_now = lambda reason, status: sys.exit()  # of its thread
        watchdog = Watchdog(env)
        watchdog.store = CountedStore(watchdog.store)
        watchdog.watch_store = lambda: None  # which asks nothing of the store
        return watchdog

    for rank in set(own) & set(frozen):
        store.set(f"progress/{rank}", json.dumps([1, BEHIND]))
    with ThreadPoolExecutor(32) as pool:  # as each connection may wait for a name server
        watchdogs = list(pool.map(watchdog_of, sorted(set(own) - set(frozen))))
    store.add("ready", 1)
    store.wait(["go"], LONG)
    for watchdog in watchdogs:
        watchdog.start()
    for watchdog in watchdogs:
        watchdog.join()
    return sum((watchdog.store.calls for watchdog in watchdogs), Counter())


# ---- Real processes ------------------------------------------------------------------------------
def torchrun(number: int, variables: dict[str, str], *arguments: str) -> str:
    """Runs this module in so many processes on the CPU; returns what they print."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={number}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    command += ["-m", "tests.bench.ranks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


# ---- Agreement -----------------------------------------------------------------------------------
def agreement(options: argparse.Namespace) -> list[dict]:
    """Returns a row for each number of real processes."""
    rows = []
    for number in (2, 4, 8, 16, 32):
        printed = torchrun(number, {}, "--step-ms", str(options.step_ms))
        each, rarely, alone = map(float, printed.split()[-3:])
        row = {"processes": number, "an agreement, ms": alone, "after each step, ms per step": each}
        row |= {
            "as training does, ms per step": rarely,
            "of a step, %": 100 * rarely / options.step_ms,
        }
        rows.append(row)
    return rows


def measure_agreement(options: argparse.Namespace, env: Distributed) -> None:
    """Prints a call's ms, and the ms that steps gain by agreement.

    After each step, and after as many as training waits.
    """

    def steps(agree: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            time.sleep(options.step_ms / 1e3)
            env.step_done(env.progress.step + 1)
            agree()
        dist.barrier()
        return 1e3 * (time.perf_counter() - start) / STEPS

    def calls() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            env.stop_reason()
        return 1e3 * (time.perf_counter() - start) / STEPS

    kinds = (lambda: None, env.stop_reason, lambda: env.stop_reason(at_once=False))
    none, each, rarely = zip(*([steps(kind) for kind in kinds] for _ in range(ROUNDS)), strict=True)
    alone = statistics.median(calls() for _ in range(ROUNDS))
    gains = [
        statistics.median(a - b for a, b in zip(times, none, strict=True))
        for times in (each, rarely)
    ]
    gains = [max(values) for values in zip(*gather(gains, env), strict=True)]
    if env.rank == 0:
        print(*gains, alone)


# ---- Start-up ------------------------------------------------------------------------------------
class CountedCollectives(TorchDispatchMode):
    """Counts the collective calls of this thread."""

    calls = 0

    def __torch_dispatch__(
        self, function: Callable, types: tuple, arguments: tuple = (), options: dict | None = None
    ):
        self.calls += function.namespace == "c10d"
        return function(*arguments, **(options or {}))


def start_up() -> list[dict]:
    """Returns a row for each number of real processes, with the calls of each."""
    rows = []
    for number in (2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            printed = torchrun(number, {"COUNT_IN": folder})
        rows.append({"processes": number, **json.loads(printed.splitlines()[-1])})
    return rows


def count_start_up(folder: str) -> None:
    """Prints the calls that parts of this rank's start make on the store and to collectives.

    All ranks make as many.
    """
    counts, stores = {}, []
    rendezvous = dist.rendezvous

    def counted_rendezvous(*arguments, **options) -> Iterator[tuple]:
        for store, *place in rendezvous(*arguments, **options):
            stores.append(CountedStore(store))
            yield stores[-1], *place

    def end_part(name: str, env: Distributed) -> None:
        part = f"{collectives.calls}; {stores[-1].calls.total()}"
        assert set(gather(part, env)) == {part}
        counts[name] = part
        collectives.calls = 0
        stores[-1].calls.clear()

    def program(env: Distributed) -> None:
        end_part("set-up", env)
        env.check_equal({"CUDA": "none"})
        end_part("check_equal", env)
        ddp_setup.describe(env)
        end_part("describe", env)
        config = config.Config(run=run_folder.RunConfig(dir=folder))
        *_, state, run_folder = train.prepare_run(config, env)
        end_part("a new run", env)
        run_folder.save(state)
        if env.rank == 0:
            run_folder.lock.close()
        collectives.calls = 0
        train.prepare_run(config, env)
        end_part("a resumed run", env)
        if env.rank == 0:
            print(json.dumps(counts))

    dist.rendezvous = counted_rendezvous
    with CountedCollectives() as collectives:
        run(program, DDPConfig())


# ---- Prediction ----------------------------------------------------------------------------------
def small_reduction_ms(processes: int, latency_us: float, backend: str) -> float:
    """Returns the ms of an all-reduce of a few bytes.

    Messages go round a ring twice (gloo), or up and down a tree.
    """
    messages = 2 * (processes - 1) if backend == "gloo" else 2 * math.ceil(math.log2(processes))
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
            row[f"{backend}: an agreement, ms"] = once
            row[f"{backend}: agreements, % of a step"] = (
                100 * once / max(options.step_ms, 1e3 * AGREEMENT_S)
            )
            row[f"{backend}: loss sums, %"] = 100 * once / ROW_STEPS / options.step_ms
        row["gradients, %"] = (
            100 * ring_ms(3.7e6, number, options.network_us, 12.5) / options.step_ms
        )
        rows.append(row)
    return rows


def main() -> None:
    options = arguments(
        __doc__,
        **{
            "ranks": {"type": int, "default": 1024, "help": "simulated (default: %(default)s)"},
            "limit": {
                "type": float,
                "default": 40.0,
                "help": "ddp.timeout_s of these (default: %(default)s)",
            },
            "step-ms": {
                "type": float,
                "default": 25.0,
                "help": "a step's time (default: %(default)s)",
            },
            "network-us": {
                "type": float,
                "default": 20.0,
                "help": "latency per message in us (default: 20)",
            },
        },
    )
    if "COUNT_IN" in os.environ:
        return count_start_up(os.environ["COUNT_IN"])
    if "WORLD_SIZE" in os.environ:
        return run(lambda env: measure_agreement(options, env), DDPConfig())
    os.environ.setdefault(
        "RES_OPTIONS", "timeout:1 attempts:1"
    )  # torch looks up a host name for each connection
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # and warns if there is none
    network = f"{options.network_us:g} us per message, steps of {options.step_ms:g} ms"
    report(
        {
            f"Hangs of {options.ranks} simulated ranks, limit {options.limit:g} s": hangs(options),
            "Calls of each rank at its start: collectives; on the store, gloo's "
            "included": start_up(),
            f"Agreement over gloo here, steps of {options.step_ms:g} ms": agreement(options),
            f"Predicted: {network}, 3.7 MB of gradients at 12.5 GB/s, a train row each {ROW_STEPS} "
            "steps": predict(options),
        },
        torch.device("cpu"),
        options.json,
    )


if __name__ == "__main__":
    main()
