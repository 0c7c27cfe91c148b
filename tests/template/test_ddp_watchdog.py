"""ddp_watchdog.py: the ranks that a watchdog reports, and the time at which it ends a job."""

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import ddp_setup
import ddp_watchdog
from ddp_ends import Heartbeat
from ddp_setup import DDPConfig, Distributed
from ddp_watchdog import Watchdog, detect_sigterm


def test_a_rank_that_waits_for_a_slow_rank_is_not_reported(capsys):
    ddp = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    ddp.world_size = 2
    ddp.store = dist.HashStore()
    thread = Watchdog(ddp, lambda: False)
    thread.store = ddp.store
    beats = round(3 / thread.heartbeat_s / 2)

    def look(place: list, moving: bool = False, silent: bool = False) -> str:
        """Returns the reason to end the job, or "".

        Rank 0 waits in the phase evaluation. `place` is the step, the number of changes and the
        phase of rank 1.
        """
        thread.seen.clear()
        ddp.store.delete_key("end")
        for beat in range(beats + 1):
            ddp.store.set("heartbeat/0", json.dumps([beat, [9, 7, "evaluation", 20]]))
            heartbeat = 0 if silent else beat
            entered = beat if moving else 0
            ddp.store.set("heartbeat/1", json.dumps([heartbeat, [*place, entered]]))
            thread.observe_ranks()
            thread.check_ranks()
        return ddp.first_failure("")[0]

    assert look([9, 7, "evaluation"], moving=True) == ""
    assert look([9, 6, "save"], moving=True) == ""
    assert look([9, 6, "save"]).endswith(": rank 1: in save of step 9")
    assert look([9, 7, "evaluation"]).endswith(
        ": rank 0: in evaluation of step 9; rank 1: in evaluation of step 9"
    )
    assert look([9, 6, "save"], silent=True).endswith(
        ": rank 1: frozen or its machine has failed, last seen in save of step 9"
    )
    assert capsys.readouterr().err.count("error: no progress for 3 s") == 3


class EndedError(Exception):
    pass


def watched(
    monkeypatch, events: dict[int, Callable] | None = None
) -> tuple[Distributed, Watchdog, Iterator[int]]:
    """Returns a rank, its watchdog, and a counter of heartbeats.

    A heartbeat counts as 3/8 s, but takes no time. `events` are functions that are called at the
    heartbeats with these numbers.
    """
    ddp = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    ddp.store = dist.HashStore()
    thread = Watchdog(ddp, lambda: False)
    thread.store = ddp.store
    beats = itertools.count(1)

    def wait(seconds: float) -> bool:
        assert seconds == 3 / 8
        event = (events or {}).get(next(beats))
        return bool(event and event(ddp, thread))

    def end(reason: str) -> None:
        raise EndedError(reason)

    thread.finished = SimpleNamespace(wait=wait)
    monkeypatch.setattr(ddp, "publish_failure", end)
    monkeypatch.setattr(ddp_watchdog, "GRACE_S", 1)
    monkeypatch.setattr(ddp_watchdog, "SIGTERM_S", 1)
    return ddp, thread, beats


def test_the_watchdog_ends_a_rank_if_the_store_does_not_answer(monkeypatch):
    def reply(ddp, thread):
        thread.replies += 1

    def move(ddp, thread):
        ddp.heartbeat = Heartbeat(step=1)

    _, thread, beats = watched(monkeypatch, {5: reply, 9: move})
    with pytest.raises(EndedError, match="store does not answer"):
        thread.watch_store()
    assert next(beats) - 1 == 9 + 9  # 9 heartbeats of 3/8 s are more than 3 s


def test_the_watchdog_ends_a_rank_that_hangs(monkeypatch, capsys):
    def move(ddp, thread):
        ddp.heartbeat = Heartbeat(step=7, phase="forward")

    ddp, thread, beats = watched(monkeypatch, {4: move})
    monkeypatch.setattr(thread, "watch_store", lambda: None)
    with pytest.raises(EndedError, match=r"no progress for 3 s .* rank 0: in forward of step 7"):
        thread.run()
    # The last progress is at heartbeat 4. Each half of the limit takes 4 heartbeats. GRACE_S, in
    # which the rank could exit by itself, is over after 2 more.
    assert next(beats) - 1 == 4 + 4 + 4 + 2
    assert "stack of rank 0" in capsys.readouterr().err
    assert json.loads(ddp.store.get("heartbeat/0"))[1][0] == 7


def test_the_watchdog_ends_a_rank_that_waits_after_sigterm(monkeypatch):
    _, thread, beats = watched(monkeypatch)
    thread.has_sigterm = lambda: True
    monkeypatch.setattr(thread, "watch_store", lambda: None)
    with pytest.raises(EndedError, match="rank 0: SIGTERM while waiting in"):
        thread.run()
    assert next(beats) - 1 == 1 + 3  # 3 heartbeats of 3/8 s are more than SIGTERM_S


def test_the_watchdog_ends_when_it_is_closed(monkeypatch):
    _, thread, beats = watched(monkeypatch, {2: lambda ddp, thread: True})
    monkeypatch.setattr(thread, "watch_store", lambda: None)
    thread.run()
    assert next(beats) - 1 == 2


class InstantBeats:
    """Heartbeats of several watchdogs that take no time, until a failure is recorded.

    All watchdogs have the same number of heartbeats, because they wait for each other.
    """

    def __init__(self, store: dist.Store, num_watchdogs: int):
        self.store = store
        self.barrier = threading.Barrier(num_watchdogs, self.count, timeout=30)
        self.number = 0
        self.has_ended = False

    def count(self) -> None:
        self.number += 1
        self.has_ended = self.store.check(["end"])

    def wait(self, seconds: float) -> bool:
        self.barrier.wait()
        return self.has_ended


@pytest.mark.parametrize("frozen", [{3}, {0, 5}, set(range(7))])
def test_frozen_ranks_are_reported_by_the_ranks_that_wait(monkeypatch, frozen):
    """Some of 8 ranks froze before their first heartbeat. The other ranks wait for them."""
    monkeypatch.setattr(ddp_watchdog, "report_error", lambda text: None)
    store = dist.HashStore()
    beats = InstantBeats(store, 8 - len(frozen))
    alive = []
    for rank in set(range(8)) - frozen:
        ddp = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
        ddp.store = store
        ddp.rank = rank
        ddp.world_size = 8
        ddp.heartbeat = Heartbeat(step=3, phase="backward")
        thread = Watchdog(ddp, lambda: False)
        ddp.publish_failure = lambda reason: sys.exit()  # ends the thread
        thread.store = store
        thread.finished = beats
        monkeypatch.setattr(thread, "watch_store", lambda: None)
        alive.append(thread)
    for thread in alive:
        thread.start()
    for thread in alive:
        thread.join()
    reporter, _, reason = store.get("end").decode().partition(" ")
    assert int(reporter) not in frozen
    named = re.findall(
        r"rank (\d): frozen or its machine has failed, last seen in start of", reason
    )
    assert set(map(int, named)) == frozen
    assert beats.number * thread.heartbeat_s < 3 * 1.4  # a heartbeat is an eighth of the limit


def test_a_single_process_without_torchrun_has_no_watchdog():
    """It may be in a debugger, or be the kernel of a notebook."""
    ddp = ddp_setup.setup(Distributed(DDPConfig()))
    try:
        assert not any(isinstance(thread, Watchdog) for thread in threading.enumerate())
        assert ddp.first_failure("by the test")[0] == "by the test"
    finally:
        ddp.close()


def test_a_rank_that_hangs_after_sigterm_ends_before_torchrun_kills_it():
    until_sigkill_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    assert until_sigkill_s > 1.5 * ddp_watchdog.SIGTERM_S


def test_sigterm_is_detected_without_running_its_handler(monkeypatch):
    pipe = os.pipe()
    monkeypatch.setattr(os, "pipe", lambda: pipe)
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    wakeup_fd = signal.set_wakeup_fd(-1)
    try:
        with contextlib.ExitStack() as cleanup:
            has_sigterm = detect_sigterm(cleanup)
            assert not has_sigterm()
            os.kill(os.getpid(), signal.SIGTERM)
            assert has_sigterm()
            assert not has_sigterm()
        assert signal.set_wakeup_fd(-1) == -1
        for end_of_pipe in pipe:
            with pytest.raises(OSError):
                os.fstat(end_of_pipe)
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        signal.signal(signal.SIGTERM, earlier)
