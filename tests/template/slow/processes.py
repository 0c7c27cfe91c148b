"""Helpers of the tests that kill, signal and watch runs."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.template.fixtures import ROOT

SETTINGS = [
    "data.batch_size=32",
    "model.hidden=8",
    "optim.epochs=8",
    "optim.accumulate=2",
    "log.every_steps=1",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=3",
]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for_growth(path: Path, ranks: Sequence[Any] = ()) -> None:
    """Waits a minute until a file grows, or one of the processes has ended."""
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
    """Starts a command in `folder`, in its own process group, which does not outlive the block."""
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
