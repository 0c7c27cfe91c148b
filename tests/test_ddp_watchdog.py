"""How ranks notice that they must end: when they agree on it, and the watchdog."""

import contextlib
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ddp_setup
import ddp_watchdog
from ddp_ends import Heartbeat, StopRequest
from ddp_setup import DDPConfig, Distributed
from ddp_watchdog import Watchdog
from run_progress import bars_call, progress_bar


def test_a_rank_that_waits_for_a_slow_one_is_not_stuck(capsys):
    env = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    env.world_size = 2
    env.store = dist.HashStore()
    thread = Watchdog(env)
    thread.store = env.store
    beats = round(3 / thread.heartbeat_s / 2)

    def look(place: list, moving: bool = False, silent: bool = False) -> str:
        """Returns the reason to end the job, if any.

        Rank 0 waits in evaluation and rank 1 is at `place`.
        """
        thread.seen.clear()
        env.store.delete_key("end")
        for beat in range(beats + 1):
            env.store.set("heartbeat/0", json.dumps([beat, [9, 7, "evaluation", 20]]))
            heartbeat = 0 if silent else beat
            entered = beat if moving else 0
            env.store.set("heartbeat/1", json.dumps([heartbeat, [*place, entered]]))
            thread.observe_ranks()
            thread.check_ranks()
        return env.record_end_reason("")[0]

    assert look([9, 7, "evaluation"], moving=True) == ""
    assert look([9, 6, "save"], moving=True) == ""
    assert look([9, 6, "save"]).endswith(": rank 1: in save of step 9")
    assert look([9, 7, "evaluation"]).endswith(
        ": rank 0: in evaluation of step 9; rank 1: in evaluation of step 9"
    )
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
    assert env.heartbeat.step == 8


def test_a_heartbeat_counts_the_phases_entered():
    env = Distributed(DDPConfig())
    for name in ("data", "forward", "forward"):
        with env.phase(name):
            pass
    assert env.heartbeat == Heartbeat(step=0, changes=2, phase="start", entered=3)


def test_a_heartbeat_names_the_phase_that_a_rank_is_in():
    env = Distributed(DDPConfig())
    with env.phase("set-up"):
        with env.phase("agreement"):
            assert env.heartbeat.phase == "agreement"
        assert env.heartbeat.phase == "set-up"
        with contextlib.suppress(KeyError), env.phase("save"):
            raise KeyError
        assert env.heartbeat.phase == "set-up"
    env.step_done(9)
    assert env.heartbeat == Heartbeat(step=9, changes=0, phase="other work", entered=3)


class EndedError(Exception):
    pass


def watched(
    monkeypatch, events: dict[int, Callable] | None = None
) -> tuple[Distributed, Watchdog, Iterator[int]]:
    """Returns one rank, its watchdog, and the counter of heartbeats, instant ones each 3/8 s.

    `events` are called at some of the heartbeats.
    """
    env = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    env.store = dist.HashStore()
    thread = Watchdog(env)
    thread.store = env.store
    beats = itertools.count(1)

    def wait(seconds: float) -> bool:
        assert seconds == 3 / 8
        event = (events or {}).get(next(beats))
        return bool(event and event(env, thread))

    def end(reason: str, status: int) -> None:
        assert status == 1
        raise EndedError(reason)

    thread.finished = SimpleNamespace(wait=wait)
    monkeypatch.setattr(env, "exit_now", end)
    monkeypatch.setattr(ddp_watchdog, "GRACE_S", 1)
    monkeypatch.setattr(ddp_watchdog, "SIGTERM_S", 1)
    return env, thread, beats


def test_the_watchdog_ends_a_rank_that_the_store_does_not_answer(monkeypatch):
    def reply(env, thread):
        thread.replies += 1

    def move(env, thread):
        env.heartbeat = Heartbeat(step=1)

    _, thread, beats = watched(monkeypatch, {5: reply, 9: move})
    with pytest.raises(EndedError, match="torchrun's store does not answer"):
        thread.watch_store()
    assert next(beats) - 1 == 9 + 9  # 9 heartbeats of 3/8 s are more than 3 s


def test_the_watchdog_ends_a_rank_that_hangs(monkeypatch, capsys):
    def move(env, thread):
        env.heartbeat = Heartbeat(step=7, phase="forward")

    env, thread, beats = watched(monkeypatch, {4: move})
    monkeypatch.setattr(thread, "watch_store", lambda: None)
    with pytest.raises(EndedError, match=r"no progress for 3 s .* rank 0: in forward of step 7"):
        thread.run()
    # Half of the limit unobserved, half observed, more than GRACE_S to end.
    assert next(beats) - 1 == 4 + 4 + 4 + 2
    assert "stack of rank 0" in capsys.readouterr().err
    assert json.loads(env.store.get("heartbeat/0"))[1][0] == 7


def test_the_watchdog_ends_a_rank_that_waits_after_sigterm(monkeypatch):
    env, thread, beats = watched(monkeypatch)
    env.stop = SimpleNamespace(told_to_end=lambda: True)
    monkeypatch.setattr(thread, "watch_store", lambda: None)
    with pytest.raises(EndedError, match="rank 0: SIGTERM while it waits in"):
        thread.run()
    assert next(beats) - 1 == 1 + 3  # 3 heartbeats of 3/8 s are more than SIGTERM_S


def test_the_watchdog_rests_when_training_is_over(monkeypatch):
    _, thread, beats = watched(monkeypatch, {2: lambda env, thread: True})
    monkeypatch.setattr(thread, "watch_store", lambda: None)
    thread.run()
    assert next(beats) - 1 == 2


class CountedStore:
    """Counts the calls of each method of a store, and the keys that `multi_get` asks for."""

    def __init__(self, store: dist.Store):
        self.store = store
        self.calls = Counter()
        self.keys = 0

    def __getattr__(self, name: str) -> Callable:
        self.calls[name] += 1
        return getattr(self.store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        self.keys += len(keys)
        return self.store.multi_get(keys)


class InstantBeats:
    """Lets several watchdogs go on together, at once, until one has recorded why the job ends."""

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


def end_of_a_hang(monkeypatch, frozen: set[int]) -> tuple[str, list[CountedStore], float]:
    """Returns why the watchdogs of 32 ranks ended the job, their stores, and after how many limits.

    The ranks `frozen` froze before their first heartbeat.
    """
    monkeypatch.setattr(ddp_watchdog, "log_and_print", lambda text: None)
    store = dist.HashStore()
    beats = InstantBeats(store, 32 - len(frozen))
    watchdogs = []
    for rank in range(32):
        env = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
        env.store = store
        env.rank = rank
        env.world_size = 32
        env.heartbeat = Heartbeat(step=3, phase="backward")
        env.exit_now = lambda reason, status: sys.exit()  # of the thread
        watchdogs.append(Watchdog(env))
        watchdogs[rank].store = CountedStore(store)
        watchdogs[rank].finished = beats
        monkeypatch.setattr(watchdogs[rank], "watch_store", lambda: None)
    alive = [thread for thread in watchdogs if thread.env.rank not in frozen]
    for thread in alive:
        thread.start()
    for thread in alive:
        thread.join()
    stores = [thread.store for thread in watchdogs]
    return store.get("end").decode(), stores, beats.number * watchdogs[0].heartbeat_s / 3


def test_few_ranks_observe_all_with_one_call_for_each_heartbeat(monkeypatch):
    reason, stores, _ = end_of_a_hang(monkeypatch, frozen={3})
    reporter, _, text = reason.partition(" ")
    assert int(reporter) % 4 == 0
    assert "rank 3: frozen, or its machine is gone, last in start of step 0" in text
    for rank, store in enumerate(stores):
        observed = 32 if rank % 4 == 0 else 8
        assert store.calls["compare_set"] in (0, observed)  # the first heartbeat that observes
        assert store.calls["multi_get"] <= store.calls["set"]
        assert store.keys == store.calls["multi_get"] * observed
    assert sum(store.calls["multi_get"] for store in stores) > 8


def test_other_ranks_name_the_observers_if_all_are_frozen(monkeypatch):
    reason, _, limits = end_of_a_hang(monkeypatch, frozen=set(range(0, 32, 4)))
    reporter, _, text = reason.partition(" ")
    assert int(reporter) % 4 != 0
    assert text.count("frozen, or its machine is gone") == 8 and "rank 28: frozen" in text
    assert limits < 1.6  # heartbeats of an eighth of the limit


def test_other_ranks_name_no_observer_that_is_alive():
    env = Distributed(DDPConfig(timeout_s=3, startup_timeout_s=3))
    env.rank = 1
    env.world_size = 32
    env.store = dist.HashStore()
    thread = Watchdog(env)
    thread.store = env.store
    for beat in range(20):  # observers wait for a rank that is slow
        for rank in range(0, 32, 4):
            env.store.set(f"heartbeat/{rank}", json.dumps([beat, [9, 7, "evaluation", 20]]))
        thread.observe_ranks()
        thread.check_ranks()
    assert env.record_end_reason("")[0] == ""


class SimulatedRanks:
    """Ranks whose agreements are one after the other, in one process, on a clock of their own."""

    def __init__(self, monkeypatch, num_ranks: int):
        self.now = 100.0
        self.agreements: list[tuple[int, float]] = []  # step and time
        monkeypatch.setattr(ddp_setup, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.envs = [Distributed(DDPConfig()) for _ in range(num_ranks)]
        self.requests = [0] * num_ranks
        for rank, env in enumerate(self.envs):
            env.stop = SimpleNamespace(code=lambda rank=rank: self.requests[rank])

    def step(self, seconds: list[float], at_once: bool = False) -> list[str]:
        """Does a step that takes each rank so long before the others wait for it.

        Returns what each rank is told.
        """
        proposals = []
        start = self.now
        self.now += max(seconds)
        for env, own in zip(self.envs, seconds, strict=True):
            env.step_done(env.heartbeat.step + 1)
            env._reduce = lambda values, op: proposals.append(values) or values
            self.now = start + own
            env.agreed_before = vars(env).copy()
            env.stop_reason(at_once)
        assert len(proposals) in (0, len(self.envs))  # all agree at the same step, or none
        told = [""] * len(self.envs)
        if proposals:
            self.agreements.append((self.envs[0].heartbeat.step, start + max(seconds)))

            def reduce(values: torch.Tensor, op: object) -> torch.Tensor:
                self.now = start + max(seconds)
                return torch.stack(proposals).amax(dim=0)

            for rank, env in enumerate(self.envs):
                vars(env).update(env.agreed_before)
                env._reduce = reduce
                self.now = start + seconds[rank]
                told[rank] = env.stop_reason(at_once)
        self.now = start + max(seconds)
        return told


def test_ranks_agree_twice_a_second_after_a_number_of_steps_that_all_know(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 3)
    draw = random.Random(0)
    for _ in range(1000):  # each rank measures another speed
        assert ranks.step([draw.uniform(0.001, 0.02) for _ in range(3)]) == ["", "", ""]
    gaps = [later - before for (_, before), (_, later) in itertools.pairwise(ranks.agreements)]
    assert all(0.3 < gap < 0.7 for gap in gaps[6:])  # six to double from one step
    assert len(gaps) < 50


def test_an_evaluation_does_not_make_ranks_agree_more_often(monkeypatch):
    """An epoch ends with agreements that no step, or few steps, separate from the last one."""
    ranks = SimulatedRanks(monkeypatch, 2)
    for _ in range(500):
        ranks.step([0.01, 0.01])
    ranks.agreements.clear()
    start = ranks.now
    for _ in range(100):  # epochs of 1.2 s
        for _ in range(120):
            ranks.step([0.01, 0.01])
        for _ in range(2):
            ranks.now += 0.05
            for env in ranks.envs:
                env._reduce = lambda values, op: values  # which are equal
                env.stop_reason()
    assert len(ranks.agreements) < 2.2 * (ranks.now - start)


def test_all_ranks_learn_of_a_request_of_one_at_the_same_step(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 3)
    for _ in range(200):
        ranks.step([0.02] * 3)
    ranks.requests[1] = StopRequest.REASONS.index("SIGTERM")
    asked = ranks.now
    told = ["", "", ""]
    while told == ["", "", ""]:
        told = ranks.step([0.02] * 3)
    assert told == ["SIGTERM"] * 3 and ranks.now - asked < 0.55


def test_slow_steps_agree_each_time(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    for _ in range(200):
        ranks.step([0.005, 0.005])
    ranks.agreements.clear()
    for _ in range(120):
        ranks.step([60.0, 60.0])
    steps = [step for step, _ in ranks.agreements]
    assert steps[-1] - steps[0] == len(steps) - 1  # each step
    assert len(steps) > 20  # after the last interval of short steps


def test_ranks_agree_at_once_at_the_end_of_an_epoch(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    for _ in range(200):
        ranks.step([0.005, 0.005])
    ranks.agreements.clear()
    ranks.requests[0] = 1
    assert ranks.step([0.005, 0.005], at_once=True) == ["STOP file"] * 2


def test_a_process_alone_is_not_ended():
    """It may stand in a debugger, or be the kernel of a notebook."""
    env = ddp_setup.setup(Distributed(DDPConfig(timeout_s=0.2, startup_timeout_s=0.2)))
    try:
        time.sleep(0.6)
        assert env.watchdog.replies > 3
        assert env.record_end_reason("by the test")[0] == "by the test"
    finally:
        env.close()


@pytest.mark.parametrize("is_shown", [False, True])
def test_steps_of_a_bar_are_progress(is_shown):
    """Reading and fitting take hours on large tables; other ranks show no bar."""
    env = Distributed(DDPConfig())
    seen = [env.heartbeat]
    with bars_call(env.make_progress):
        for _ in progress_bar(range(3), "fitting", is_shown=is_shown):
            seen.append(env.heartbeat)
        with progress_bar(2, "reading", is_shown=is_shown) as bar:
            bar.update()
        seen.append(env.heartbeat)
    assert len(set(seen[1:])) == 4
    assert {heartbeat[:3] for heartbeat in seen} == {(0, 0, "start")}
    list(progress_bar(range(3), "fitting"))
    assert env.heartbeat == seen[-1]
