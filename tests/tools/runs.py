"""Launches runs and checks of the template, and reads the results of runs."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from errors import counted

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("samples_per_s", "data_ms", "step_ms", "memory_mb")  # values that differ between runs


def read_metrics(folder: Path, kind: str | None = None) -> list[dict]:
    """Returns the rows of metrics.jsonl in a run folder, or only the rows of one kind."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


def series(folder: Path) -> list[dict]:
    """Returns the train, val and test rows of a run, without `TIMES`.

    Two runs that compute the same numbers have equal rows.
    """
    rows = [row for row in read_metrics(folder) if row["kind"] != "event"]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*.pt"))


def zero_a_block(path: Path) -> None:
    """Overwrites the middle of the largest tensor in a file of torch with zeros.

    This simulates a damaged disk. The file keeps its size, and torch reads it without an error.
    """
    with zipfile.ZipFile(path) as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    largest = max(tensors, key=lambda entry: entry.file_size)
    with path.open("r+b") as file:
        file.seek(largest.header_offset + 26)  # the sizes of the last two fields of its header
        sizes = struct.unpack("<HH", file.read(4))
        file.seek(sum(sizes) + largest.file_size // 4, os.SEEK_CUR)
        file.write(bytes(largest.file_size // 2))


def parameters(folder: Path) -> dict[str, Tensor]:
    """Returns the model's state dict from the newest checkpoint."""
    return torch.load(newest_checkpoint(folder), map_location="cpu", weights_only=True)["model"]


def equal(value: object, other: object, tolerance: float) -> bool:
    """Returns whether two values of a metrics row are equal up to a relative tolerance."""
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= tolerance * abs(other)
    return value == other


def relative_difference(value: Tensor, reference: Tensor, norm: Tensor) -> float:
    """Returns the norm of the difference divided by `norm`, or inf if integers or bools differ."""
    if torch.equal(value, reference):
        return 0.0
    if not reference.is_floating_point():
        return math.inf
    return ((value - reference).norm() / norm.clamp(min=1e-300)).item()


def difference(folder: Path, reference: Path, tolerance: float = 0.0) -> str:
    """Returns a text that names the first tensor or metric that differs between two runs, or "".

    Relative differences up to the tolerance are ignored.
    """
    ours, theirs = parameters(folder), parameters(reference)
    for name, value in theirs.items():
        if not relative_difference(ours[name], value, value.double().norm()) <= tolerance:
            return f"the final {name} differs from the undisturbed run"
    rows, others = series(folder), series(reference)
    if len(rows) != len(others):
        return (
            f"number of rows in metrics.jsonl: {len(rows)}, but {len(others)} in the undisturbed "
            "run"
        )
    for row, other in zip(rows, others, strict=True):
        for key, value in other.items():
            if not equal(row.get(key), value, tolerance):
                return f"{key} differs from the undisturbed run: {row} and {other}"
    return ""


def launch(
    world_size: int,
    arguments: list[str],
    timeout: float = 120,
    torchrun: tuple[str, ...] = ("--standalone",),
    variables: dict[str, str] | None = None,
    cpu: bool = True,
) -> tuple[int, str]:
    """Runs `tests.check` with `arguments`; returns the exit status and the output.

    The command uses torchrun, or plain python if `world_size` is 1.

    Args:
        world_size: number of processes.
        arguments: command-line arguments of `tests.check`.
        timeout: largest duration in seconds.
        torchrun: options of torchrun.
        variables: environment variables to add.
        cpu: whether to hide the GPUs.

    Raises:
        RuntimeError: the processes did not finish within `timeout` seconds.
    """
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={world_size}", *torchrun]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {}),
        **(variables or {}),
    }
    process = subprocess.Popen(
        [*command, "-m", "tests.check", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        # On SIGTERM, torchrun stops its workers, which are in their own sessions.
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        processes = counted(world_size, "process", "processes")
        raise RuntimeError(f"{processes} did not finish within {timeout} s") from None
    return process.returncode, output
