"""Eight processes on one machine, with a tiny model: they train, stop, fail, resume as two do."""

import json
import os
import signal
import time
from pathlib import Path

from tests.template.fixtures import fork_ranks, join
from tests.tools.runs import difference, read_metrics

NUM_RANKS = 8
VICTIM = 5
SETTINGS = [
    "data.batch_size=32",
    "model.hidden=4",
    "optim.epochs=6",
    "log.every_steps=1",
    "checkpoint.every_steps=2",
]


def test_eight_ranks_lose_nothing(tmp_path, tables):
    """One gets a signal, then is killed in a run, which must end as an undisturbed one."""
    arguments = [*tables, *SETTINGS, "ddp.timeout_s=8"]
    run = tmp_path / "runs/disturbed"

    def start(name: str) -> tuple:
        return fork_ranks(tmp_path, NUM_RANKS, "train.py", [*arguments, f"run.name={name}"])

    def disturb(number: int) -> dict:
        """Signals one rank after two steps; returns status.json once the others have ended."""
        last = state(run).get("step", 0)
        _store, ranks = start("disturbed")
        wait_for_step(run, last + 2, ranks)
        os.kill(ranks[VICTIM].pid, number)
        others = ranks[:VICTIM] + ranks[VICTIM + 1 :]
        deadline = time.monotonic() + 120
        for rank in others:
            rank.join(max(0, deadline - time.monotonic()))
        ranks[VICTIM].kill()
        join(ranks, 10)
        return state(run) | {"codes": {rank.exitcode for rank in others}}

    _store, ranks = start("whole")
    assert set(join(ranks, 240)) == {0}
    stopped = disturb(signal.SIGTERM)
    assert (stopped["state"], stopped["reason"], stopped["codes"]) == ("stopped", "SIGTERM", {0})
    killed = disturb(signal.SIGKILL)
    assert killed["state"] == "failed" and killed["codes"] == {1}
    assert "another rank was killed or cannot be reached" in killed["reason"]
    _store, ranks = start("disturbed")
    assert set(join(ranks, 240)) == {0}
    assert difference(run, tmp_path / "runs/whole") == ""


def state(run: Path) -> dict:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def wait_for_step(run: Path, step: int, ranks: list) -> None:
    deadline = time.monotonic() + 120
    while last_step(run) < step:
        assert time.monotonic() < deadline and all(rank.exitcode is None for rank in ranks)
        time.sleep(0.05)


def last_step(run: Path) -> int:
    """Returns that of the last row of metrics.jsonl, 0 if there is none, as at the start."""
    if not (run / "metrics.jsonl").exists():
        return 0
    return max([row["step"] for row in read_metrics(run)], default=0)
