"""The ends of a run: requests to stop it, failures and hangs.

`StopRequest` notices signals and STOP files. `Watchdog` is a thread that ends the job with a report
when a rank makes no progress for too long.
"""

import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from errors import UserError

log = logging.getLogger("ddp_watchdog")
log.addHandler(logging.NullHandler())  # or the preflight prints errors twice

PARENT_PID = os.getppid()  # torchrun, if it launched this process
GRACE_S = 5.0  # seconds a rank has to exit by itself after another one has failed
# After SIGTERM, seconds without progress until a rank gives up: half of those that torchrun waits,
# which are 30 where a rank has died.
SIGTERM_S = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) / 2
SIGTERM_AFTER_DEATH_S = min(15.0, SIGTERM_S)
SILENCE_S = 10.0  # without a heartbeat, after which a rank counts as dead
OBSERVERS = 8  # ranks that look at all ranks when these stall, far apart: one machine may be gone


def log_and_print(text: str) -> None:
    log.error(text)
    with contextlib.suppress(OSError):  # stderr may be a closed pipe
        print(text, file=sys.stderr, flush=True)


class StopTraining(Exception):
    """Training ends on request; every rank raises this after the same step."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """Notices a request to stop: a signal, a STOP file, or the exit of this process's torchrun."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    REASONS = ("", "STOP file", "torchrun exited", *(number.name for number in SIGNALS))

    def __init__(self, file: Path):
        self.files = [file, Path(os.environ.get("STOP_FILE", file))]  # launch.sh sets it for SLURM
        self.reason = 0  # a position in REASONS
        # Python runs handlers between its instructions; the watchdog also sees signals while a call
        # never returns.
        self.received, self.sender = os.pipe()
        os.set_blocking(self.received, False)
        os.set_blocking(self.sender, False)
        self.undo = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():  # no other one can
            self._take_signals()

    def _take_signals(self) -> None:
        earlier_fd = signal.set_wakeup_fd(self.sender, warn_on_full_buffer=False)
        self.undo.callback(signal.set_wakeup_fd, earlier_fd)
        for number in self.SIGNALS:
            by_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not by_nohup:
                self.undo.callback(signal.signal, number, signal.signal(number, self._handle))

    def _handle(self, number: int, frame: object) -> None:
        reason = self.REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT and self.reason == reason:  # the second Ctrl-C
            raise KeyboardInterrupt
        self.reason = reason

    def close(self) -> None:
        """Gives signals the effects that they had before."""
        self.undo.close()
        os.close(self.sender)
        os.close(self.received)

    def told_to_end(self) -> bool:
        """Returns whether a SIGTERM has arrived since the last call, even if no handler ran."""
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self.received, 64)
        return False

    def code(self) -> int:
        """Returns a position in `REASONS`, 0 for no request."""
        if not self.reason and dist.is_torchelastic_launched() and os.getppid() != PARENT_PID:
            self.reason = self.REASONS.index("torchrun exited")
        if not self.reason and any(map(os.path.exists, self.files)):
            self.reason = self.REASONS.index("STOP file")
        return self.reason


class Heartbeat(NamedTuple):
    """How far a rank has come, as it tells the other ranks."""

    step: int = 0  # steps done
    changes: int = 0  # of the phase, since the last step
    phase: str = "start"  # what it is doing
    entered: int = 0  # phases entered in total, the same one again included

    def enter(self, phase: str, is_other: bool) -> "Heartbeat":
        """Returns it in a phase, which counts as a change if it `is_other` than the last one."""
        return Heartbeat(self.step, self.changes + is_other, phase, self.entered + 1)


class Observed(NamedTuple):
    """What a watchdog has seen of a rank."""

    replies: int | None  # as `Watchdog.replies`
    heartbeat: Heartbeat | None
    silent: int  # heartbeats of this rank during which the other has sent none
    stalled: int  # and during which the other has not come further


class Watchdog(threading.Thread):
    """Ends the job with a report when a rank makes no progress for too long.

    Every rank writes its heartbeat to the store, every `heartbeat_s`. If a few of the ranks, the
    observers, have stalled for half of `limit_s`, they observe all for the other half; if those
    furthest behind have not moved, they name them, and every rank prints its stack and exits. The
    other ranks observe the observers, a little later: they name these if they are silent. Time is
    counted in heartbeats, which pause while the job is suspended.
    """

    def __init__(self, env: Any):  # a `ddp_setup.Distributed`
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
        # Of `limit_s`, the part without progress after which this rank looks at others.
        self.patience = 0.5 if self.is_observer else 0.6
        self.seen = {}  # an `Observed` of each rank

    def run(self) -> None:
        of_store = threading.Thread(
            target=self.watch_store, name="watchdog of the store", daemon=True
        )
        of_store.start()
        heartbeat = None
        told_to_end = False
        stalled = 0  # heartbeats without progress
        waited = 0  # of these, heartbeats after SIGTERM
        ending = 0  # heartbeats since a rank has recorded why the job ends
        while not self.finished.wait(self.heartbeat_s):
            stalled = stalled + 1 if heartbeat == self.env.heartbeat else 0
            heartbeat = self.env.heartbeat
            # A rank that waits in NCCL for a dead one cannot handle torchrun's SIGTERM.
            told_to_end = told_to_end or bool(self.env.stop and self.env.stop.told_to_end())
            waited = waited + 1 if told_to_end and stalled else 0
            silence_s = self.heartbeat_s * max(
                [seen.silent for seen in self.seen.values()], default=0
            )
            limit_s = SIGTERM_AFTER_DEATH_S if silence_s > SILENCE_S else SIGTERM_S
            if waited * self.heartbeat_s > limit_s:
                reason = f"SIGTERM while it waits in {heartbeat.phase} of step {heartbeat.step}"
                self.abort(self.env.record_end_reason(f"rank {self.env.rank}: {reason}")[0])
            with contextlib.suppress(dist.DistError):  # torchrun is gone, as StopRequest notices
                state = json.dumps([self.replies, heartbeat])
                self.store.set(f"heartbeat/{self.env.rank}", state)
                is_stalled = stalled * self.heartbeat_s >= self.env.limit_s * self.patience
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
        of_store.join()

    def watch_store(self) -> None:
        """Ends this rank when calls to the store never return, as of an unreachable machine."""
        last, stalled = None, 0
        while not self.finished.wait(self.heartbeat_s):
            current = (self.replies, self.env.heartbeat)
            stalled = stalled + 1 if current == last else 0
            last = current
            if stalled * self.heartbeat_s > self.env.limit_s:
                self.abort(
                    "no progress, and torchrun's store does not answer: "
                    "its machine is gone or cut off"
                )

    def observe_ranks(self) -> None:
        """Counts the heartbeats since each rank was last heard of, and since it last moved."""
        keys = [f"heartbeat/{rank}" for rank in self.observed]
        if not self.seen:
            for key in keys:  # `multi_get` would wait for a rank that has not written
                self.store.compare_set(key, "", "[-1, [0, -1]]")  # behind all others
        for rank, state in zip(self.observed, self.store.multi_get(keys), strict=True):
            replies, fields = json.loads(state)
            heartbeat = Heartbeat(*fields)
            last = self.seen.get(rank, Observed(None, None, 0, 0))
            silent = last.silent + 1 if replies == last.replies else 0
            stalled = last.stalled + 1 if heartbeat == last.heartbeat else 0
            self.seen[rank] = Observed(replies, heartbeat, silent, stalled)

    def check_ranks(self) -> None:
        """Records the ranks furthest behind as the reason to end, if none has moved for long."""
        least = min(seen.heartbeat[:2] for seen in self.seen.values())
        behind = {rank: seen for rank, seen in self.seen.items() if seen.heartbeat[:2] == least}
        half = self.env.limit_s / 2 / self.heartbeat_s  # in heartbeats
        found = []
        for rank, seen in behind.items():
            idle = seen.stalled if self.is_observer else seen.silent
            if idle < half:
                return
            frozen = "frozen, or its machine is gone, last " if seen.silent >= half else ""
            found.append(
                f"rank {rank}: {frozen}in {seen.heartbeat.phase} of step {seen.heartbeat.step}"
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


# ---- Failures ------------------------------------------------------------------------------------
def explain_failure(error: BaseException, rank: int) -> tuple[str, str]:
    """Returns the traceback of an error, "" for one that says enough, and the reason as a text."""
    reason = str(error)
    of_gloo = isinstance(error, RuntimeError) and "/gloo/" in reason
    allocated = re.search(r"tried to allocate ([\d.]+ \w+)", reason, re.IGNORECASE)
    if isinstance(error, UserError):
        return "", reason
    if isinstance(error, KeyboardInterrupt):
        return "", "interrupted"
    if isinstance(error, dist.DistError) or of_gloo:
        detail = " ".join(reason.split())[:99]
        return "", f"rank {rank}: another rank was killed or cannot be reached ({detail})"
    if allocated:
        return "", (
            f"rank {rank}: there is no memory for another {allocated[1]}: lower model.hidden or "
            "data.batch_size, or raise optim.accumulate"
        )
    if reason.startswith("DataLoader worker"):
        return "", (
            f"rank {rank}: a process that loads batches was killed, as where memory or /dev/shm is "
            f"short ({reason.splitlines()[0][:99]}): get more of these, or lower data.workers"
        )
    trace = "".join(traceback.format_exception(error))
    return trace, f"rank {rank}: {type(error).__name__}: {reason}"


def tell_torchrun(text: str) -> None:
    """Writes why this process has failed where torchrun looks, whose report ends with it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


def end_process(status: int) -> None:
    """Ends this process after a failure: a rank without interpreter shutdown, which can hang.

    One process alone may be a notebook's kernel, which SystemExit does not end. After success, this
    returns unless stdout is a closed pipe, of which Python would complain.
    """
    try:
        print(end="", flush=True)
    except OSError:
        os._exit(status)
    if status and "WORLD_SIZE" in os.environ:
        os._exit(status)
    if status:
        sys.exit(status)


def start_watchdog(env: Any) -> Watchdog:
    """Returns the watchdog of a `ddp_setup.Distributed`, which is running.

    It ends one process alone after SIGTERM only: nobody waits for it, and it may be in a debugger.
    """
    watchdog = Watchdog(env)
    if env.world_size == 1:
        watchdog.patience = math.inf
    watchdog.start()
    return watchdog
