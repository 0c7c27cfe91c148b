"""How ranks notice that they must end: requests to stop, and the watchdog."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import ddp_setup
from ddp_setup import DDPConfig, Distributed, Progress, StopRequest, Watchdog


def test_stop_requests_have_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_FILE", str(tmp_path / "slurm.stop"))
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    try:
        for name in ("STOP", "slurm.stop"):
            stop = StopRequest(tmp_path / "STOP")
            assert StopRequest.REASONS[stop.code()] == ""
            (tmp_path / name).touch()
            assert StopRequest.REASONS[stop.code()] == "STOP file"
            (tmp_path / name).unlink()
            assert stop.code()  # a request cannot be withdrawn
        stop.is_training = True
        os.kill(os.getpid(), signal.SIGUSR1)
        assert StopRequest.REASONS[stop.code()] == "SIGUSR1"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_rank_that_waits_for_a_slow_one_is_not_stuck(capsys):
    env = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    env.world_size, env.store = 2, dist.HashStore()
    watchdog = Watchdog(env)
    watchdog.store = env.store
    beats = round(3 / watchdog.heartbeat_s / 2)

    def look(place: list, moving: bool = False, silent: bool = False) -> str:
        """Returns the reason to end the job, if any, while rank 0 waits in evaluation and rank 1 is at `place`."""
        watchdog.seen.clear()
        env.store.delete_key("end")
        for beat in range(beats + 1):
            env.store.set("progress/0", json.dumps([beat, [9, 7, "evaluation", 20]]))
            env.store.set("progress/1", json.dumps([0 if silent else beat, [*place, beat if moving else 0]]))
            watchdog.observe_ranks()
            watchdog.check_ranks()
        return env.record_end_reason("")[0]

    assert look([9, 7, "evaluation"], moving=True) == ""
    assert look([9, 6, "save"], moving=True) == ""
    assert look([9, 6, "save"]).endswith(": rank 1: in save of step 9")
    assert look([9, 7, "evaluation"]).endswith(": rank 0: in evaluation of step 9; rank 1: in evaluation of step 9")
    assert look([9, 6, "save"], silent=True).endswith(
        ": rank 1: frozen, or its machine is gone, last in save of step 9"
    )
    assert capsys.readouterr().err.count("error: no progress for 3 s") == 3


def test_the_watchdog_waits_longer_until_the_first_step_is_over():
    env = Distributed(DDPConfig(startup_timeout_s=9, timeout_s=3))
    with env.phase("forward"):
        assert env.limit_s == 9
    assert env.stop_reason() == "" and env.limit_s == 9
    env.step_done(8)
    assert env.limit_s == 3
    assert env.progress.step == 8


def test_progress_counts_the_phases_entered():
    env = Distributed(DDPConfig())
    for name in ("data", "forward", "forward"):
        with env.phase(name):
            pass
    assert env.progress == Progress(step=0, changes=2, phase="forward", entered=3)


class EndedError(Exception):
    pass


def watched(monkeypatch, events: dict[int, Callable] | None = None) -> tuple[Distributed, Watchdog, Iterator[int]]:
    """Returns one rank, its watchdog with a heartbeat of 3/8 s that takes no time, and the counter of heartbeats.

    `events` are called at some of the heartbeats.
    """
    env = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    env.store = dist.HashStore()
    watchdog = Watchdog(env)
    watchdog.store = env.store
    beats = itertools.count(1)

    def wait(seconds: float) -> bool:
        assert seconds == 3 / 8
        event = (events or {}).get(next(beats))
        return bool(event and event(env, watchdog))

    def end(reason: str, status: int) -> None:
        assert status == 1
        raise EndedError(reason)

    watchdog.finished = SimpleNamespace(wait=wait)
    monkeypatch.setattr(env, "exit_now", end)
    monkeypatch.setattr(ddp_setup, "GRACE_S", 1)
    monkeypatch.setattr(ddp_setup, "SIGTERM_S", 1)
    return env, watchdog, beats


def test_the_watchdog_ends_a_rank_that_the_store_does_not_answer(monkeypatch):
    def reply(env, watchdog):
        watchdog.replies += 1

    def move(env, watchdog):
        env.progress = Progress(step=1)

    _, watchdog, beats = watched(monkeypatch, {5: reply, 9: move})
    with pytest.raises(EndedError, match="torchrun's store does not answer"):
        watchdog.watch_store()
    assert next(beats) - 1 == 9 + 9  # 9 heartbeats of 3/8 s are more than 3 s


def test_the_watchdog_ends_a_rank_that_hangs(monkeypatch, capsys):
    def move(env, watchdog):
        env.progress = Progress(step=7, phase="forward")

    env, watchdog, beats = watched(monkeypatch, {4: move})
    monkeypatch.setattr(watchdog, "watch_store", lambda: None)
    with pytest.raises(EndedError, match=r"no progress for 3 s .* rank 0: in forward of step 7"):
        watchdog.run()
    assert next(beats) - 1 == 4 + 4 + 4 + 2  # half of the limit unobserved, half observed, more than GRACE_S to end
    assert "stack of rank 0" in capsys.readouterr().err
    assert json.loads(env.store.get("progress/0"))[1][0] == 7


def test_the_watchdog_ends_a_rank_that_waits_after_sigterm(monkeypatch):
    env, watchdog, beats = watched(monkeypatch)
    env.stop = SimpleNamespace(told_to_end=lambda: True)
    monkeypatch.setattr(watchdog, "watch_store", lambda: None)
    with pytest.raises(EndedError, match="rank 0: SIGTERM while it waits in"):
        watchdog.run()
    assert next(beats) - 1 == 1 + 3  # 3 heartbeats of 3/8 s are more than SIGTERM_S


def test_the_watchdog_rests_when_training_is_over(monkeypatch):
    _, watchdog, beats = watched(monkeypatch, {2: lambda env, watchdog: True})
    monkeypatch.setattr(watchdog, "watch_store", lambda: None)
    watchdog.run()
    assert next(beats) - 1 == 2
