"""The process group, the device of this process, DDP wrapping, and how ranks agree.

`Distributed` has the same interface for one process and for many. Run as a script, this file is the
preflight check:

    torchrun --standalone --nproc_per_node=4 ddp_setup.py
"""

import contextlib
import gc
import inspect
import json
import logging
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

log = logging.getLogger("ddp_setup")
log.addHandler(logging.NullHandler())  # or the preflight check prints errors twice

PARENT_PID = os.getppid()  # torchrun, if it launched this process
AGREEMENT_S = 0.5  # seconds from one agreement of the ranks on whether to stop to the next
GRACE_S = 5.0  # seconds a rank has to exit by itself after another one has failed
# After SIGTERM, seconds without progress until a rank gives up: half of those that torchrun waits,
# which are 30 where a rank has died.
SIGTERM_S = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) / 2
SIGTERM_AFTER_DEATH_S = min(15.0, SIGTERM_S)
SILENCE_S = 10.0  # without a heartbeat, after which a rank counts as dead
OBSERVERS = 8  # ranks that look at all ranks when these stall, far apart: one machine may be gone


class UserError(Exception):
    """An error that the user can fix, in one sentence; the process exits with `status`."""

    status = 2


class RunError(UserError):
    """A failure of a run that had started, explained in one sentence as a `UserError` is."""

    status = 1


@dataclass(frozen=True)
class DDPConfig:
    device_ids: list = field(default_factory=list)
    startup_timeout_s: float = 1800.0
    timeout_s: float = 300.0
    sync_batchnorm: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        try:
            inspect.signature(DistributedDataParallel).bind(None, device_ids=None, **self.options)
        except TypeError as error:
            raise ValueError(f"ddp.options: DistributedDataParallel: {error}") from None


# ---- Rank, collectives, stopping and failing -----------------------------------------------------
class Progress(NamedTuple):
    """How far a rank has come."""

    step: int = 0  # steps done
    changes: int = 0  # of the phase, since the last step
    phase: str = "start"  # what it is doing
    entered: int = 0  # phases entered in total, the same one again included


class Distributed:
    """Rank, device and collectives of this process; without torchrun, it is rank 0 of 1."""

    def __init__(self, config: DDPConfig):
        self.config = config
        self.launched = "WORLD_SIZE" in os.environ
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1
        self.device = torch.device("cpu")
        self.store: dist.Store | None = None  # torchrun's, or one of this process
        self.watchdog: Watchdog | None = None
        self.stop: StopRequest | None = None
        self.on_failure: Callable[[str], None] | None = None  # called with the reason on exit
        self.progress = Progress()
        self.agreed_at = 0.0  # when ranks last agreed whether to stop
        self.steps_since = 0
        self.steps_between = 1  # that and the next time, as they agreed
        self.limit_s = config.startup_timeout_s  # without progress: the watchdog ends the job
        self.seconds = defaultdict(float)  # time spent in each phase

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Labels what this rank is doing, for hang reports, metrics.jsonl and profiler traces."""
        before = self.progress
        changes = before.changes if name == before.phase else before.changes + 1
        self.progress = Progress(before.step, changes, name, before.entered + 1)
        start = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name] += time.perf_counter() - start

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns `model`, which must be on its device, in DDP; without torchrun, unchanged."""
        if not self.launched:
            return model
        if self.config.sync_batchnorm:
            if self.device.type == "cpu":
                raise UserError(
                    "ddp.sync_batchnorm=true needs GPUs, SyncBatchNorm has no CPU version: "
                    "set it to false"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
        dist.set_debug_level_from_env()  # so that DDP names parameters without a gradient
        buffers = [name for name, _ in model.named_buffers()]
        if not any(name.endswith("running_mean") for name in buffers):  # constants: no broadcast
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, **self.config.options)

    def accumulating(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """Wraps a micro-batch, so that only the last one of a step all-reduces gradients."""
        return contextlib.nullcontext() if last or not self.launched else model.no_sync()

    def step_done(self, step: int) -> None:
        """Records that `step` steps are done."""
        self.progress = self.progress._replace(step=step, changes=0)
        self.steps_since += 1
        self.limit_s = self.config.timeout_s  # only the first one loads libraries

    def stop_reason(self, at_once: bool = True) -> str:
        """Returns why all ranks must stop, "" if they need not.

        Ranks agree `at_once` or about every `AGREEMENT_S`; in between, this returns "". A part of
        each agreement is the number of steps until the next one: the smallest that a rank proposes
        from its own speed, at most twice the last, as the host can be ahead of the device. If steps
        become f times as slow, that takes f times `AGREEMENT_S`. It travels on the device's
        backend, as on gloo it would cost a thousand ranks tens of milliseconds.
        """
        if self.steps_since < self.steps_between and not at_once:
            return ""
        factor = min(2, AGREEMENT_S / (time.perf_counter() - self.agreed_at))
        proposed = max(1, int(factor * self.steps_since))
        code = self.stop.code() if self.stop else 0
        values = torch.tensor([code, -proposed], device=self.device)
        code, steps = self._reduce(values, dist.ReduceOp.MAX).tolist()
        self.agreed_at = time.perf_counter()
        self.steps_since = 0
        self.steps_between = -steps
        return StopRequest.REASONS[code]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks, on every rank; `values` is not modified."""
        return self._reduce(values.clone(), dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, op: dist.ReduceOp) -> Tensor:
        if self.launched:
            with self.phase("agreement"):
                dist.all_reduce(values, op)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Returns the picklable `value` of the rank `source` on every rank."""
        values = [value]
        if self.launched:
            dist.broadcast_object_list(values, source)
        return values[0]

    @contextlib.contextmanager
    def sync_errors(self, *errors: type[Exception], phase: str = "set-up") -> Iterator[None]:
        """If the block raises `UserError` on any rank, every rank raises that of the lowest one.

        Exceptions of the types `errors` count as `UserError`. The block must hold no collective: it
        could hang.
        """
        problem = None
        try:
            with self.phase(phase):
                yield
        except (UserError, *errors) as error:
            problem = error if isinstance(error, UserError) else UserError(str(error))
        ranks_left = torch.tensor(self.world_size - self.rank if problem else 0)
        most = int(self._reduce(ranks_left, dist.ReduceOp.MAX))  # on the CPU: there may be no GPU
        if most:
            raise self.broadcast(problem, self.world_size - most)

    def check_equal(self, values: dict[str, Any]) -> None:
        """Raises `UserError` on every rank, naming rank and key, if a value is not rank 0's."""
        first = self.broadcast(values)
        with self.sync_errors():
            for name, value in first.items():
                if values[name] != value:
                    raise UserError(
                        f"{name} differs between ranks: {values[name]} on rank {self.rank}, "
                        f"{value} on rank 0"
                    )

    def close(self) -> None:
        """Destroys the process group. Only after success: a rank in a collective would hang."""
        self.watchdog.finished.set()
        self.watchdog.join()
        if self.launched:
            gc.collect()  # a DDP module that outlives the group can deadlock with a gloo thread
            dist.destroy_process_group()

    def record_end_reason(self, reason: str) -> tuple[str, bool]:
        """Records why the job ends, if no rank has yet.

        Returns the recorded reason and whether it is this rank's.
        """
        with contextlib.suppress(dist.DistError):  # torchrun is gone
            if self.store:
                recorded = self.store.compare_set("end", "", f"{self.rank} {reason}").decode()
                rank, _, first = recorded.partition(" ")
                return first, int(rank) == self.rank
        return reason, True

    def fail(self, error: BaseException) -> NoReturn:
        """Exits with the status of a `UserError`, else with 1 and a traceback.

        Only the first rank to fail prints.
        """
        trace, reason = "", str(error)
        of_gloo = isinstance(error, RuntimeError) and "/gloo/" in reason
        allocated = re.search(r"tried to allocate ([\d.]+ \w+)", reason, re.IGNORECASE)
        if isinstance(error, dist.DistError) or of_gloo:
            detail = " ".join(reason.split())[:99]
            reason = f"rank {self.rank}: another rank was killed or cannot be reached ({detail})"
        elif allocated:
            reason = (
                f"rank {self.rank}: there is no memory for another {allocated[1]}: lower "
                "model.hidden or data.batch_size, or raise optim.accumulate"
            )
        elif not isinstance(error, UserError):
            trace = "".join(traceback.format_exception(error))
            reason = f"rank {self.rank}: {type(error).__name__}: {reason}"
        first, is_first = self.record_end_reason(reason)
        report = log_and_print if is_first else log.error
        report(f"{trace}error: {reason}")
        self.exit_now(first, getattr(error, "status", 1))

    def exit_now(self, reason: str, status: int) -> NoReturn:
        """Exits after the hook `on_failure`, without interpreter shutdown, which can hang."""
        if self.on_failure:
            with contextlib.suppress(UserError):  # the disk may be full
                self.on_failure(reason)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


class StopRequest:
    """Notices a request to stop: a signal, a STOP file, or the exit of this process's torchrun."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    REASONS = ("", "STOP file", "torchrun exited", *(number.name for number in SIGNALS))

    def __init__(self, file: Path):
        self.files = [file, Path(os.environ.get("STOP_FILE", file))]  # launch.sh sets it for SLURM
        self.reason = 0  # a position in REASONS
        self.is_training = False  # until then, there is nothing to save: a signal ends the process
        # Python runs handlers between its instructions; the watchdog also sees signals while a call
        # never returns.
        self.received, sender = os.pipe()
        os.set_blocking(self.received, False)
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            by_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not by_nohup:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        reason = self.REASONS.index(signal.Signals(number).name)
        is_second = number == signal.SIGINT and self.reason == reason  # Ctrl-C
        if is_second or not self.is_training:
            os._exit(128 + number)
        self.reason = reason

    def told_to_end(self) -> bool:
        """Returns whether a SIGTERM has arrived since the last call, even if no handler ran."""
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self.received, 64)
        return False

    def code(self) -> int:
        """Returns a position in `REASONS`, 0 for no request."""
        if not self.reason and dist.is_torchelastic_launched() and os.getppid() != PARENT_PID:
            self.reason = self.REASONS.index("torchrun exited")
        if not self.reason and any(file.exists() for file in self.files):
            self.reason = self.REASONS.index("STOP file")
        return self.reason


class Observed(NamedTuple):
    """What a watchdog has seen of a rank."""

    heartbeat: int | None
    progress: Progress | None
    silent: int  # heartbeats of this rank during which the other's has not changed
    stalled: int  # and its progress has not


class Watchdog(threading.Thread):
    """Ends the job with a report when a rank makes no progress for too long.

    With each heartbeat, every rank writes its progress to the store. If a few of the ranks, the
    observers, have stalled for half of `limit_s`, they observe all for the other half; if those
    furthest behind have not moved, they name them, and every rank prints its stack and exits. The
    other ranks observe the observers, a little later: they name these if they are silent. Time is
    counted in heartbeats, which pause while the job is suspended.
    """

    def __init__(self, env: Distributed):
        super().__init__(name="watchdog", daemon=True)
        self.env = env
        self.store = env.store.clone()  # an own connection: waits on the other would block it
        shorter = min(env.config.timeout_s, env.config.startup_timeout_s)
        self.heartbeat_s = max(0.1, min(2.0, shorter / 8))
        self.finished = threading.Event()
        self.replies = 0  # heartbeats that reached the store
        distance = max(1, env.world_size // OBSERVERS)
        self.is_observer = env.rank % distance == 0
        self.observed = range(0, env.world_size, 1 if self.is_observer else distance)
        self.seen = {}  # an `Observed` of each rank

    def run(self) -> None:
        threading.Thread(target=self.watch_store, name="watchdog of the store", daemon=True).start()
        progress, told_to_end = None, False
        stalled = 0  # heartbeats without progress
        waited = 0  # of these, heartbeats after SIGTERM
        ending = 0  # heartbeats since a rank has recorded why the job ends
        while not self.finished.wait(self.heartbeat_s):
            stalled = stalled + 1 if progress == self.env.progress else 0
            progress = self.env.progress
            # A rank that waits in NCCL for a dead one cannot handle torchrun's SIGTERM.
            told_to_end = told_to_end or bool(self.env.stop and self.env.stop.told_to_end())
            waited = waited + 1 if told_to_end and stalled else 0
            silence_s = self.heartbeat_s * max(
                [seen.silent for seen in self.seen.values()], default=0
            )
            limit_s = SIGTERM_AFTER_DEATH_S if silence_s > SILENCE_S else SIGTERM_S
            if waited * self.heartbeat_s > limit_s:
                reason = f"SIGTERM while it waits in {progress.phase} of step {progress.step}"
                self.abort(self.env.record_end_reason(f"rank {self.env.rank}: {reason}")[0])
            with contextlib.suppress(dist.DistError):  # torchrun is gone, as StopRequest notices
                state = json.dumps([self.replies, progress])
                self.store.set(f"progress/{self.env.rank}", state)
                share = 0.5 if self.is_observer else 0.6
                is_stalled = stalled * self.heartbeat_s >= self.env.limit_s * share
                if is_stalled or told_to_end:
                    self.observe_ranks()
                else:
                    self.seen.clear()
                if is_stalled:
                    self.check_ranks()
                ending += self.store.check(["end"])
                if ending * self.heartbeat_s > GRACE_S:  # the main thread is busy or hangs
                    self.abort(self.env.record_end_reason("")[0])
                self.replies += 1

    def watch_store(self) -> None:
        """Ends this rank when calls to the store never return, as of an unreachable machine."""
        last, stalled = None, 0
        while not self.finished.wait(self.heartbeat_s):
            current = (self.replies, self.env.progress)
            stalled = stalled + 1 if current == last else 0
            last = current
            if stalled * self.heartbeat_s > self.env.limit_s:
                self.abort(
                    "no progress, and torchrun's store does not answer: "
                    "its machine is gone or cut off"
                )

    def observe_ranks(self) -> None:
        """Counts the heartbeats since each rank was last heard of, and since it last moved."""
        keys = [f"progress/{rank}" for rank in self.observed]
        if not self.seen:
            for key in keys:  # `multi_get` would wait for a rank that has not written
                self.store.compare_set(key, "", "[-1, [0, -1]]")  # behind all others
        for rank, state in zip(self.observed, self.store.multi_get(keys), strict=True):
            heartbeat, progress = json.loads(state)
            progress = Progress(*progress)
            last = self.seen.get(rank, Observed(None, None, 0, 0))
            silent = last.silent + 1 if heartbeat == last.heartbeat else 0
            stalled = last.stalled + 1 if progress == last.progress else 0
            self.seen[rank] = Observed(heartbeat, progress, silent, stalled)

    def check_ranks(self) -> None:
        """Records the ranks furthest behind as the reason to end, if none has moved for long."""
        least = min(seen.progress[:2] for seen in self.seen.values())
        behind = {rank: seen for rank, seen in self.seen.items() if seen.progress[:2] == least}
        half = self.env.limit_s / 2 / self.heartbeat_s  # in heartbeats
        found = []
        for rank, seen in behind.items():
            idle = seen.stalled if self.is_observer else seen.silent
            if idle < half:
                return
            frozen = "frozen, or its machine is gone, last " if seen.silent >= half else ""
            found.append(
                f"rank {rank}: {frozen}in {seen.progress.phase} of step {seen.progress.step}"
            )
        reason = (
            f"no progress for {self.env.limit_s:.0f} s (ddp.timeout_s, ddp.startup_timeout_s): "
            f"{'; '.join(found)}"
        )
        if self.env.record_end_reason(reason)[1]:
            log_and_print(f"error: {reason}")

    def abort(self, reason: str) -> NoReturn:
        stack = "".join(
            traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
        )
        log_and_print(f"stack of rank {self.env.rank} ({reason}):\n{stack}")
        self.env.exit_now(reason, 1)


# ---- Set-up --------------------------------------------------------------------------------------
def setup(env: Distributed) -> Distributed:
    """Joins the process group, selects this rank's device and returns `env`; raises `UserError`."""
    if env.launched:
        try:
            env.rank = int(os.environ["RANK"])
            env.local_rank = int(os.environ["LOCAL_RANK"])
            env.world_size = int(os.environ["WORLD_SIZE"])
            env.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"WORLD_SIZE is set, but not by torchrun ({error}): use torchrun, or unset it"
            ) from None
        join_group(env)
    else:
        env.store = dist.HashStore()
        start_watchdog(env)
    with env.sync_errors():  # if one rank finds no device, all exit rather than wait for it
        env.device = choose_device(env)
        if env.device.type == "cuda":
            torch.cuda.set_device(env.device)
            gpu = torch.cuda.get_device_properties(env.device).uuid
            first = int(env.store.compare_set(f"gpu/{gpu}", "", str(env.rank)))
            if first != env.rank:
                raise UserError(
                    f"ranks {first} and {env.rank} share a GPU: start one process per GPU, "
                    "or set CUDA_VISIBLE_DEVICES= for CPU"
                )
    return env


def start_watchdog(env: Distributed) -> None:
    env.watchdog = Watchdog(env)
    env.watchdog.start()


def join_group(env: Distributed) -> None:
    startup_s = env.config.startup_timeout_s
    timeout = timedelta(seconds=startup_s + env.config.timeout_s)  # the watchdog is earlier
    # gloo as well as nccl, so that ranks can agree on errors without a GPU.
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    # Or NCCL kills this process when another one dies, before status.json says so.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        rendezvous_timeout = timedelta(seconds=min(300.0, startup_s))
        store, _, _ = next(dist.rendezvous("env://", timeout=rendezvous_timeout))
        store.set_timeout(timeout)
        # torchrun keeps its store across restarts: without the prefix, ranks would use addresses of
        # dead ones.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        env.store = dist.PrefixStore(f"restart {restart}", store)
        start_watchdog(env)
        dist.init_process_group(
            backend, store=env.store, rank=env.rank, world_size=env.world_size, timeout=timeout
        )
    except (RuntimeError, OSError, ValueError) as error:
        address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"rank {env.rank} on {platform.node()} cannot reach the others at "
            f"MASTER_ADDR={address} MASTER_PORT={port} ({str(error).splitlines()[0]}): "
            "set the address of rank 0, open all ports between the machines, "
            "or name the network interface in GLOO_SOCKET_IFNAME"
        ) from None


def choose_device(env: Distributed) -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none; raises `UserError` for too few GPUs."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = env.config.device_ids or list(range(visible))
    if not chosen:
        return torch.device("cpu")
    if visible == 1 and env.local_world_size > 1 and not env.config.device_ids:
        return torch.device("cuda", 0)  # a scheduler may expose a different GPU to each process
    missing = set(chosen) - set(range(visible))
    if missing or env.local_world_size > len(chosen):
        raise UserError(
            f"{env.local_world_size} processes on {platform.node()} but {visible} GPUs, "
            f"ddp.device_ids={chosen}: set --nproc_per_node to the number of GPUs to use, "
            "or CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return torch.device("cuda", chosen[env.local_rank])


def run(program: Callable[[Distributed], None], config: DDPConfig) -> None:
    """Calls `program` with this process's `Distributed`; an exception on any rank ends the job."""
    env = Distributed(config)
    try:
        program(setup(env))
        env.close()
    except BaseException as error:  # even SystemExit: the other ranks would hang
        env.fail(error)


def log_and_print(text: str) -> None:
    log.error(text)
    with contextlib.suppress(OSError):  # stderr may be a closed pipe
        print(text, file=sys.stderr, flush=True)


def library_versions() -> dict[str, str]:
    """Returns the versions that must be the same on all ranks."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
    }


def describe(env: Distributed) -> str:
    """Returns, on rank 0, a line for each rank with its host, device, threads and versions."""
    device = str(env.device)
    if env.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(env.device)
        device += f" ({torch.cuda.get_device_name(env.device)}, {free / 2**30:.1f} GB free)"
    row = {
        "rank": env.rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "device": device,
        "threads": torch.get_num_threads(),
        **library_versions(),
    }
    line = ", ".join(f"{name} {value}" for name, value in row.items())
    lines = [line] * env.world_size
    if env.launched:
        dist.gather_object(line, lines if env.rank == 0 else None)
    return "\n".join(lines)


if __name__ == "__main__":
    from tests.tools.preflight import main  # which imports this file as a module

    main()
