"""Helpers for tests that kill, signal and watch runs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.template.fixtures import ROOT, clean_environment, fork_ranks, join
from tests.tools.runs import read_metrics

SETTINGS = [
    "data.batch_size=32",
    "model.hidden=8",
    "optim.epochs=8",
    "optim.accumulate=2",
    "log.every_steps=1",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=3",
]
# Options of runs on several machines.
SMALL = ["model.hidden=8", "model.readout=local", "log.every_steps=1"]
VARIABLES = {
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
}


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for_growth(path: Path, ranks: Sequence[Any] = ()) -> None:
    """Waits for up to a minute until a file grows, or until a process has exited."""
    before = size_of(path)
    deadline = time.monotonic() + 60
    while size_of(path) <= before and time.monotonic() < deadline:
        if any(process.exitcode is not None for process in ranks):
            return
        time.sleep(0.01)


def status_of(run: Path) -> dict[str, Any]:
    """Returns a run's status.json."""
    return json.loads((run / "status.json").read_text())


@contextlib.contextmanager
def started(
    command: Sequence[str | Path], folder: Path, **variables: str
) -> Iterator[subprocess.Popen]:
    """Starts a command in `folder`, in its own process group, which is killed after the block."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def sh(*arguments: str, timeout: float = 30, **variables: str) -> str:
    environment = {**clean_environment(), **VARIABLES, **variables}
    result = subprocess.run(
        arguments, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )
    assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def events(folder: Path) -> list[str]:
    return [row["event"] for row in read_metrics(folder, "event")]


def wait_until(condition: Callable[[], object], seconds: float, message: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.1)


def has_a_checkpoint(folder: Path) -> bool:
    """Returns whether a run has made a step. From then on, ddp.timeout_s is the limit of a hang."""
    paths = (folder / "checkpoints").glob("step_*.pt")
    return any(path.name > "step_00000000.pt" for path in paths)


def run_on_one_machine(folder: Path, tables: list[str], world_size: int, *overrides: str) -> Path:
    """Trains without interruption in `folder`, on forked ranks; returns the folder of the run."""
    arguments = [*tables, *SMALL, *overrides, "run.name=one"]
    _store, ranks = fork_ranks(folder, world_size, "train.py", arguments)
    assert join(ranks) == [0] * world_size, (folder / "rank0.stderr").read_text()
    return folder / "runs/one"
