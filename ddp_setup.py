"""The process group, the device of this process, DDP, and agreement between ranks.

`Distributed` is the same for one process and for many. As a script this is the preflight check of the machines:

    torchrun --standalone --nproc_per_node=4 ddp_setup.py
"""

import contextlib
import gc
import inspect
import itertools
import json
import logging
import os
import platform
import signal
import statistics
import sys
import threading
import time
import timeit
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

log = logging.getLogger("ddp_setup")
log.addHandler(logging.NullHandler())  # as a script it only prints

PARENT = os.getppid()  # torchrun, if it started this process
GRACE_S = 5.0  # seconds that a rank gets to end by itself after another one has failed


class UserError(Exception):
    """What the user can mend, in one sentence; ends the process with this status."""

    status = 2


class RunError(UserError):
    """The same after the first step: the run has failed."""

    status = 1


@dataclass(frozen=True)
class DDPConfig:
    device_ids: list = field(default_factory=list)
    startup_timeout_s: float = 1800.0
    timeout_s: float = 300.0
    sync_batchnorm: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        known, ours = inspect.signature(DistributedDataParallel).parameters, ("module", "device_ids", "process_group")
        for name, value in self.options.items():
            kind = bool if name in known and known[name].default is False else int | float
            if name in ours or name not in known or not isinstance(value, kind):
                raise ValueError(f"ddp.options: torch's DistributedDataParallel takes no {name}={value!r}")


# ---- This process among the others ----------------------------------------------------------------------------------
class Distributed:
    """Rank, device and collectives of this process. Without torchrun: rank 0 of 1, and no process group."""

    def __init__(self, config: DDPConfig):
        self.config = config
        self.launched = "WORLD_SIZE" in os.environ
        self.rank, self.local_rank, self.world_size, self.local_world_size = 0, 0, 1, 1
        self.device = torch.device("cpu")
        self.store: dist.Store | None = None  # of this launch; set together with the watchdog
        self.watchdog: Watchdog | None = None
        self.stop: StopRequest | None = None
        self.on_failure: list[Callable[[str], None]] = []  # called with the reason before a failed exit
        # Where this rank is: steps done, changes of phase since then, the phase, and how many phases were entered.
        self.place = (0, 0, "start", 0)
        self.limit_s = config.startup_timeout_s  # without progress, for the watchdog
        self.seconds: dict[str, float] = defaultdict(float)  # spent in each phase

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this rank does, for the report of a hang, the times in metrics.jsonl and the ranges of a profile."""
        step, changes, before, entered = self.place
        self.place = (step, changes + (name != before), name, entered + 1)
        start = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name] += time.perf_counter() - start

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` (already on the device) under DDP, which starts all ranks from rank 0's parameters."""
        if not self.launched:
            return model
        if self.config.sync_batchnorm:
            if self.device.type == "cpu":
                raise UserError("ddp.sync_batchnorm=true needs GPUs, torch has none for the CPU: set it to false")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
            dist.set_debug_level(dist.DebugLevel.INFO)  # DDP then names parameters that got no gradient
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, **self.config.options)

    def accumulating(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """Around a micro-batch's forward and backward: only the last one of a step exchanges gradients."""
        return contextlib.nullcontext() if last or not self.launched else model.no_sync()

    def agree(self, flag: int) -> int:
        """The largest flag of all ranks; whatever makes ranks branch is decided here, on the CPU."""
        if not self.launched:
            return flag
        votes = torch.tensor(flag)
        with self.phase("agreement"):
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return int(votes)

    def stopping(self, step: int) -> str:
        """After `step` steps: why all ranks must stop here, or "" (see `StopRequest.REASONS`)."""
        self.place = (step, 0, *self.place[2:])
        self.limit_s = self.config.timeout_s
        return StopRequest.REASONS[self.agree(self.stop.code() if self.stop else 0)]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on every rank; `values` stays as it is."""
        values = values.clone()
        if self.launched:
            with self.phase("agreement"):
                dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list:
        """The picklable `value` of each rank, by rank, on every rank."""
        values = [value] * self.world_size
        if self.launched:
            dist.all_gather_object(values, value)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's picklable `value`, on every rank."""
        values = [value]
        if self.launched:
            dist.broadcast_object_list(values)
        return values[0]

    @contextlib.contextmanager
    def together(self, *errors: type[Exception], phase: str = "set-up") -> Iterator[None]:
        """If the block raises a `UserError` (or one of `errors`) on any rank, every rank raises the first rank's.

        Nothing inside the block may wait for another rank.
        """
        problem = None
        try:
            with self.phase(phase):
                yield
        except (UserError, *errors) as error:
            problem = error if isinstance(error, UserError) else UserError(str(error))
        if self.agree(problem is not None):
            raise next(found for found in self.gather(problem) if found)

    def check_equal(self, values: dict[str, Any]) -> None:
        """Raise `UserError` on every rank, naming rank and field, if a value is not what rank 0 has."""
        first, *others = self.gather(values)
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise UserError(f"rank {rank} has another {name} than rank 0: {other[name]} and {value}")

    def close(self) -> None:
        """Only after success: destroying the group while another rank is in a collective makes both hang."""
        if self.launched:
            self.watchdog.ended.set()
            self.watchdog.join()
            gc.collect()  # a DDP module that outlives the group may wait for ever for a gloo thread that needs the GIL
            dist.destroy_process_group()

    def claim(self, reason: str) -> tuple[str, bool]:
        """Why the job ends, by the first rank that gave a reason, and whether that is this rank."""
        with contextlib.suppress(dist.DistError):  # torchrun is gone
            if self.store:
                rank, _, first = self.store.compare_set("end", "", f"{self.rank} {reason}").decode().partition(" ")
                return first, int(rank) == self.rank
        return reason, True

    def fail(self, error: BaseException) -> NoReturn:
        """End this process with the status of a `UserError`, else with 1 and a traceback; the first rank says why."""
        trace, reason = "", str(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in reason):
            reason = f"rank {self.rank}: another rank was killed or cannot be reached ({' '.join(reason.split())[:99]})"
        elif not isinstance(error, UserError):
            trace = "".join(traceback.format_exception(error))
            reason = f"rank {self.rank}: {type(error).__name__}: {reason}"
        first, is_first = self.claim(reason)
        (log_and_print if is_first else log.error)(f"{trace}error: {reason}")
        self.leave(first, getattr(error, "status", 1))

    def leave(self, reason: str, status: int) -> NoReturn:
        """At once: interpreter shutdown can wait for ever for other ranks."""
        for hook in self.on_failure:
            with contextlib.suppress(UserError):  # perhaps nothing can be written any more
                hook(reason)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


class StopRequest:
    """Whether this process was asked to stop: by a signal, by a file, or by the end of the torchrun that started it."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    REASONS = ("", "the file STOP", "the end of torchrun", *(number.name for number in SIGNALS))

    def __init__(self, file: Path):
        self.files = [file, Path(os.environ.get("STOP_FILE", file))]  # the second one is launch.sh's, under SLURM
        self.asked, self.next_look = 0, 0.0
        self.pid = os.getpid()
        for number in self.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup ignores
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self.pid:  # a loader process inherits this handler; its parent decides when it ends
            return
        reason = self.REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT and self.asked == reason:
            os._exit(128 + number)  # Ctrl-C twice: at once
        self.asked = reason

    def code(self) -> int:
        """A position in `REASONS`. The files are looked for once a second."""
        if not self.asked and dist.is_torchelastic_launched() and os.getppid() != PARENT:
            self.asked = 2
        if not self.asked and time.monotonic() > self.next_look:
            self.asked, self.next_look = int(any(file.exists() for file in self.files)), time.monotonic() + 1
        return self.asked


class Watchdog(threading.Thread):
    """Ends the job, in words, when a rank makes no progress for too long.

    With each beat every rank's thread puts into the store where its rank is. One whose rank stands still for half the
    limit looks at all of them for the other half; if those that are furthest behind have not moved, it names them, and
    every rank shows its stack and ends. Time is counted in beats, which cease while a job is suspended.
    """

    def __init__(self, env: Distributed):
        super().__init__(name="watchdog", daemon=True)
        self.env, self.store = env, env.store.clone()  # a connection of its own: a wait on the other must not block it
        self.beat_s = max(0.1, min(2.0, env.config.timeout_s / 8, env.config.startup_timeout_s / 8))
        self.ended, self.answers = threading.Event(), 0  # beats in which the store has answered
        self.seen: dict[int, tuple] = {}  # by rank: its beat and place, and for how many beats each has been the same

    def run(self) -> None:
        threading.Thread(target=self.guard, name="watchdog guard", daemon=True).start()
        place, still, ending = None, 0, 0  # the last two count beats
        for beat in itertools.count():
            place, still = self.env.place, still + 1 if place == self.env.place else 0
            with contextlib.suppress(dist.DistError):  # torchrun is gone, which StopRequest notices
                self.store.set(f"place/{self.env.rank}", json.dumps([beat, place]))
                if still * self.beat_s < self.env.limit_s / 2:
                    self.seen.clear()
                else:
                    self.look()
                ending += self.store.check(["end"])
                if ending * self.beat_s > GRACE_S:  # this rank is busy, or waits in vain
                    self.end(self.env.claim("")[0])
                self.answers += 1
            if self.ended.wait(self.beat_s):
                return

    def guard(self) -> None:
        """The store of a machine that is cut off neither answers nor fails: a question to it never ends."""
        last, still = None, 0
        while not self.ended.wait(self.beat_s):
            here = (self.answers, self.env.place)
            last, still = here, still + 1 if here == last else 0
            if still * self.beat_s > self.env.limit_s:
                self.end("no progress, and torchrun's store does not answer: its machine is gone or cut off")

    def look(self) -> None:
        """Name the ranks that are furthest behind as the reason to end, if none of them has moved for too long."""
        for rank in range(self.env.world_size):
            known = self.store.check([f"place/{rank}"])
            beat, place = json.loads(self.store.get(f"place/{rank}")) if known else (-1, [0, -1, "start", 0])
            last_beat, last_place, silent, still = self.seen.get(rank, (None, None, 0, 0))
            silent, still = silent + 1 if beat == last_beat else 0, still + 1 if place == last_place else 0
            self.seen[rank] = (beat, place, silent, still)
        last, half = min(place[:2] for _, place, _, _ in self.seen.values()), self.env.limit_s / 2
        behind = {rank: seen for rank, seen in self.seen.items() if seen[1][:2] == last}
        if any(still * self.beat_s < half for *_, still in behind.values()):
            return
        where = []
        for rank, (_, (step, _, phase, _), silent, _) in behind.items():
            frozen = "frozen, or its machine is gone, last " if silent * self.beat_s >= half else ""
            where.append(f"rank {rank}: {frozen}in {phase} of step {step}")
        verdict = f"no progress for {self.env.limit_s:.0f} s (ddp.timeout_s, ddp.startup_timeout_s): {'; '.join(where)}"
        if self.env.claim(verdict)[1]:
            log_and_print(f"error: {verdict}")

    def end(self, reason: str) -> NoReturn:
        stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident]))
        log_and_print(f"rank {self.env.rank} is here ({reason}):\n{stack}")
        self.env.leave(reason, 1)


# ---- Set-up ---------------------------------------------------------------------------------------------------------
def setup(env: Distributed) -> Distributed:
    """Join the process group and take the device of LOCAL_RANK; returns `env`, or raises `UserError`."""
    if env.launched:
        try:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            env.rank, env.local_rank, env.world_size, env.local_world_size = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise UserError(f"WORLD_SIZE is set, {error} is not: start with torchrun, or unset it") from None
        join_group(env)
    with env.together():  # a rank without a device leaves with all others, so that none waits for it
        env.device = choose_device(env)
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    gpus = env.gather(str(torch.cuda.get_device_properties(env.device).uuid) if env.device.type == "cuda" else "")
    if shared := [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]:
        raise UserError(f"ranks {shared} share a GPU: start one process a GPU, or CUDA_VISIBLE_DEVICES= for the CPU")
    return env


def join_group(env: Distributed) -> None:
    seconds = env.config.startup_timeout_s
    # The watchdog ends a hang earlier; this is for where it cannot.
    timeout = timedelta(seconds=seconds + env.config.timeout_s)
    # gloo beside nccl: agreement between ranks stays off the GPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=min(300.0, seconds))))
        store.set_timeout(timeout)
        # torchrun keeps its store when it restarts ranks, who would wait for the addresses of the dead ones.
        env.store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        env.watchdog = Watchdog(env)
        env.watchdog.start()
        dist.init_process_group(backend, store=env.store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    except (RuntimeError, OSError, ValueError) as error:
        address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"rank {env.rank} on {platform.node()} cannot meet the others by MASTER_ADDR={address} MASTER_PORT={port} "
            f"({str(error).splitlines()[0]}): set the address of rank 0, let the machines connect to each other on all "
            "ports, or name the network interface in GLOO_SOCKET_IFNAME"
        ) from None


def choose_device(env: Distributed) -> torch.device:
    """Raises `UserError` if this machine has GPUs, but fewer than processes."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = env.config.device_ids or list(range(visible))
    if not chosen:
        return torch.device("cpu")
    if visible == 1 and env.local_world_size > 1 and not env.config.device_ids:
        return torch.device("cuda", 0)  # a scheduler may show each process a GPU of its own
    if any(gpu not in range(visible) for gpu in chosen) or env.local_world_size > len(chosen):
        raise UserError(
            f"{env.local_world_size} processes on {platform.node()} but {visible} GPUs, ddp.device_ids={chosen}: "
            "set --nproc_per_node to the number of GPUs to use, or CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return torch.device("cuda", chosen[env.local_rank])


def run(program: Callable[[Distributed], None], config: DDPConfig) -> None:
    """Call `program` on all ranks; whatever goes wrong on one of them ends all, in words."""
    env = Distributed(config)
    try:
        program(setup(env))
        env.close()
    except BaseException as error:  # a rank that leaves by sys.exit fails the others too
        env.fail(error)


def log_and_print(text: str) -> None:
    log.error(text)
    with contextlib.suppress(OSError):  # nobody may be reading any more
        print(text, file=sys.stderr, flush=True)


def library_versions() -> dict[str, str]:
    """The versions that must be the same on all ranks."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    cuda = torch.version.cuda or "none"
    return {"python": platform.python_version(), "torch": torch.__version__, "CUDA": cuda, "NCCL": nccl}


def describe(env: Distributed) -> list[str]:
    """A table of where each rank runs and with what, as lines; the same on every rank."""
    gpu = env.device.type == "cuda"
    row = {"rank": env.rank, "host": platform.node(), "pid": os.getpid(), "LOCAL_RANK": env.local_rank}
    row |= {"device": env.device, "name": torch.cuda.get_device_name(env.device) if gpu else platform.machine()}
    row |= {"free GB": f"{torch.cuda.mem_get_info(env.device)[0] / 2**30:.1f}" if gpu else "-"}
    row |= {"threads": torch.get_num_threads(), **library_versions()}
    cells = [list(row), *(list(map(str, other.values())) for other in env.gather(row))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


# ---- Preflight ------------------------------------------------------------------------------------------------------
def preflight(env: Distributed) -> None:
    """Print who runs where, and what works between the ranks and how fast; raises `UserError` for what must not be."""

    def report(name: str, finding: str, is_well: bool = True) -> None:
        if env.rank == 0:
            print(f"{'OK' if is_well else 'NOTE':6s} {name:12s} {finding}", flush=True)

    def slowest(function: Callable[[], object]) -> tuple[list[float], int]:
        """Milliseconds of a call on each rank, and the slowest rank."""
        times = env.gather(1e3 * statistics.median(timeit.repeat(function, number=1, repeat=6)[1:]))
        return times, max(range(env.world_size), key=times.__getitem__)

    report("ranks", "\n".join(["", *describe(env)]))
    env.check_equal(library_versions())
    report("versions", "the same on all ranks")
    matrix = torch.ones(1024, 1024, device=env.device)
    times, rank = slowest(lambda: (matrix @ matrix).sum().item())
    finding = f"a matrix product takes {min(times):.1f} to {times[rank]:.1f} ms, longest on rank {rank}"
    report("speed", finding, times[rank] <= 1.5 * statistics.median_low(times))
    if not env.launched:
        return
    total, expected = env.sum(torch.tensor(env.rank + 1.0, device=env.device)).item(), sum(range(env.world_size + 1))
    if total != expected:
        raise RunError(f"an all-reduce gives {total} instead of {expected}: do not train on these machines")
    for size in (10**3, 10**5, 10**7, 10**8):
        tensor = torch.zeros(size // 4, device=env.device)
        times, rank = slowest(lambda tensor=tensor: env.sum(tensor)[0].item())
        report("all-reduce", f"{size:11,d} bytes in {times[rank]:9.2f} ms, {size / times[rank] / 1e6:6.2f} GB/s")


if __name__ == "__main__":
    run(preflight, DDPConfig(startup_timeout_s=30.0))
