"""The watchdog: a thread of each rank that ends the job with a report if a rank hangs."""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from ddp_ends import Heartbeat, report_error

GRACE_S = 5.0  # seconds in which a rank can exit by itself after another rank has failed
# After SIGTERM, a rank ends if it makes no progress for this many seconds. This is half of the time
# that torchrun waits before SIGKILL. After the death of a rank, torchrun waits 30 s.
SIGTERM_S = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) / 2
SIGTERM_AFTER_DEATH_S = min(15.0, SIGTERM_S)
SILENCE_S = 10.0  # a rank without a heartbeat for this many seconds counts as dead


class Observed(NamedTuple):
    """The state of a rank in the store, and for how long it has not changed.

    Times are counted in heartbeats of the watchdog that observes.
    """

    replies: int | None  # `Watchdog.replies` of the observed rank
    heartbeat: Heartbeat | None  # `Distributed.heartbeat` of the observed rank
    silent: int  # time since the observed rank last wrote to the store
    stalled: int  # time since the observed rank last made progress


def detect_sigterm(cleanup: contextlib.ExitStack) -> Callable[[], bool]:
    """Returns a function that returns whether a SIGTERM has arrived since its last call.

    It detects SIGTERM as soon as it arrives, even if the main thread hangs. Python runs signal
    handlers in the main thread, between its instructions. A handler therefore does not run during a
    call that never returns. The function reads the file to which Python writes the numbers of all
    signals that have a handler in Python. `cleanup` undoes this when it is closed.
    """
    received, sender = os.pipe()
    for end_of_pipe in (received, sender):
        os.set_blocking(end_of_pipe, False)
        cleanup.callback(os.close, end_of_pipe)
    # Only the main thread can set this file.
    if threading.current_thread() is threading.main_thread():
        earlier_fd = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        cleanup.callback(signal.set_wakeup_fd, earlier_fd)

    def has_sigterm() -> bool:
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(received, 64)
        return False

    return has_sigterm


class Watchdog(threading.Thread):
    """Ends the job with a report if a rank makes no progress for too long.

    Every rank runs a watchdog, which writes the rank's heartbeat to the store every `heartbeat_s`
    seconds. If a rank has made no progress for the first half of `ddp.limit_s`, its watchdog
    observes all ranks during the second half. If the ranks that are furthest behind make no
    progress in this time, the watchdog reports them. Then every rank that does not exit by itself
    prints its stack and exits. Time is counted in heartbeats, so that it stops while the job is
    suspended.

    Args:
        ddp: the `ddp_setup.Distributed` of this rank.
        has_sigterm: a function that returns whether a SIGTERM has arrived since its last call.
    """

    def __init__(self, ddp: Any, has_sigterm: Callable[[], bool]):
        super().__init__(name="watchdog", daemon=True)
        self.ddp = ddp
        # The watchdog needs its own connection, because a wait on the other one would block it.
        self.store = ddp.store.clone()
        shorter = min(ddp.config.timeout_s, ddp.config.startup_timeout_s)
        self.heartbeat_s = max(0.1, min(2.0, shorter / 8))
        self.has_sigterm = has_sigterm
        self.finished = threading.Event()
        self.replies = 0  # number of heartbeats that have reached the store
        # The watchdog observes the ranks after this fraction of `limit_s` without progress.
        self.patience = 0.5
        self.seen = {}  # the `Observed` of each rank, by rank

    def run(self) -> None:
        of_store = threading.Thread(target=self.watch_store, name="store watchdog", daemon=True)
        of_store.start()
        heartbeat = None
        told_to_end = False
        stalled = 0  # number of heartbeats without progress
        waited = 0  # number of heartbeats without progress after SIGTERM
        ending = 0  # number of heartbeats since a rank recorded the reason for a failure
        while not self.finished.wait(self.heartbeat_s):
            stalled = stalled + 1 if heartbeat == self.ddp.heartbeat else 0
            heartbeat = self.ddp.heartbeat
            # A rank that waits in NCCL for a dead rank cannot handle torchrun's SIGTERM.
            told_to_end = told_to_end or self.has_sigterm()
            waited = waited + 1 if told_to_end and stalled else 0
            silent = max((seen.silent for seen in self.seen.values()), default=0)
            is_rank_dead = silent * self.heartbeat_s > SILENCE_S
            limit_s = SIGTERM_AFTER_DEATH_S if is_rank_dead else SIGTERM_S
            if waited * self.heartbeat_s > limit_s:
                reason = f"SIGTERM while waiting in {heartbeat.phase} of step {heartbeat.step}"
                self.abort(self.ddp.first_failure(f"rank {self.ddp.rank}: {reason}")[0])
            # The store is missing if torchrun has exited, which `StopRequest` detects.
            with contextlib.suppress(dist.DistError):
                state = json.dumps([self.replies, heartbeat])
                self.store.set(f"heartbeat/{self.ddp.rank}", state)
                is_stalled = stalled * self.heartbeat_s >= self.ddp.limit_s * self.patience
                if is_stalled or told_to_end:
                    self.observe_ranks()
                else:
                    self.seen.clear()
                if is_stalled:
                    self.check_ranks()
                ending += self.store.check(["end"])
                if ending * self.heartbeat_s > GRACE_S:  # the main thread is busy or hangs
                    self.abort(self.ddp.first_failure("")[0])
                self.replies += 1
        of_store.join()

    def watch_store(self) -> None:
        """Ends this rank if calls to the store never return.

        This happens if the machine of the store cannot be reached. It runs in a separate thread,
        because the watchdog itself waits for the store then.
        """
        last, stalled = None, 0
        while not self.finished.wait(self.heartbeat_s):
            current = (self.replies, self.ddp.heartbeat)
            stalled = stalled + 1 if current == last else 0
            last = current
            if stalled * self.heartbeat_s > self.ddp.limit_s:
                self.abort(
                    "no progress, and torchrun's store does not answer: its machine has failed or "
                    "cannot be reached"
                )

    def observe_ranks(self) -> None:
        """Updates `seen` with the heartbeats of all ranks in the store."""
        keys = [f"heartbeat/{rank}" for rank in range(self.ddp.world_size)]
        if not self.seen:
            # `multi_get` would wait for a rank that has not written a heartbeat yet. This value
            # marks such a rank as furthest behind.
            for key in keys:
                self.store.compare_set(key, "", "[-1, [0, -1]]")
        for rank, state in enumerate(self.store.multi_get(keys)):
            replies, fields = json.loads(state)
            heartbeat = Heartbeat(*fields)
            last = self.seen.get(rank, Observed(None, None, 0, 0))
            silent = last.silent + 1 if replies == last.replies else 0
            stalled = last.stalled + 1 if heartbeat == last.heartbeat else 0
            self.seen[rank] = Observed(replies, heartbeat, silent, stalled)

    def check_ranks(self) -> None:
        """Reports the ranks that are furthest behind, if all of them have stalled.

        A rank has stalled if it has made no progress for half of `limit_s`. The report is the
        reason for the failure of the job.
        """
        least = min(seen.heartbeat[:2] for seen in self.seen.values())
        behind = {rank: seen for rank, seen in self.seen.items() if seen.heartbeat[:2] == least}
        half = self.ddp.limit_s / 2 / self.heartbeat_s  # number of heartbeats
        found = []
        for rank, seen in behind.items():
            if seen.stalled < half:
                return
            frozen = "frozen or its machine has failed, last seen " if seen.silent >= half else ""
            found.append(
                f"rank {rank}: {frozen}in {seen.heartbeat.phase} of step {seen.heartbeat.step}"
            )
        reason = (
            f"no progress for {self.ddp.limit_s:.0f} s (ddp.timeout_s, ddp.startup_timeout_s): "
            f"{'; '.join(found)}"
        )
        if self.ddp.first_failure(reason)[1]:
            report_error(f"error: {reason}")

    def abort(self, reason: str) -> NoReturn:
        """Reports the stack of the main thread and the reason, and ends this process."""
        frame = sys._current_frames()[threading.main_thread().ident]
        stack = "".join(traceback.format_stack(frame))
        report_error(f"stack of rank {self.ddp.rank} ({reason}):\n{stack}")
        self.ddp.publish_failure(reason)
        os._exit(1)  # sys.exit would only end this thread


def start_watchdog(ddp: Any) -> None:
    """Starts the watchdog of this rank, which runs until `ddp` is closed.

    If there is only one rank, its watchdog does not limit the time without progress, because no
    other rank waits, and the process may be in a debugger. It only ends the process if it hangs
    after SIGTERM.

    Args:
        ddp: the `ddp_setup.Distributed` of this rank.
    """
    # Otherwise, when another rank dies or the own GPU fails, NCCL kills this process before it
    # writes status.json.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    watchdog = Watchdog(ddp, detect_sigterm(ddp.cleanup))
    if ddp.world_size == 1:
        watchdog.patience = math.inf
    watchdog.start()
    ddp.cleanup.callback(watchdog.join)
    ddp.cleanup.callback(watchdog.finished.set)  # the last callback is called first
