"""How ranks notice that they must end: requests to stop, and the watchdog."""

import json
import os
import signal

import torch.distributed as dist

from ddp_setup import DDPConfig, Distributed, StopRequest, Watchdog


def test_stop_requests_have_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_FILE", str(tmp_path / "slurm.stop"))
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    try:
        for name in ("STOP", "slurm.stop"):
            stop = StopRequest(tmp_path / "STOP")
            assert StopRequest.REASONS[stop.code()] == ""
            (tmp_path / name).touch()
            stop.next_check = 0
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
    assert env.stop_reason(8) == "" and env.limit_s == 3
    assert env.progress.step == 8
