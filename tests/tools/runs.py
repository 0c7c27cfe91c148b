"""Launches runs of the template and reads their results."""

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
from torch_geometric.data import HeteroData

from analyse_results import Results
from config import Config
from data import KnockoutDataset
from losses import LOSSES
from mask import LINEAR, SharedGraph
from run_results import result_lines
from task import KnockoutTask

ROOT = Path(__file__).resolve().parents[2]
BEST = "runs/{}/checkpoints/best.pt"  # the best model of a run
TIMES = ("samples_per_s", "data_ms", "step_ms", "memory_mb")


def small_graph(generator: torch.Generator) -> HeteroData:
    """Returns 12 nodes in three relations, of which one is empty; node 10 has no edge."""
    graph = HeteroData()
    graph["gene"].num_nodes = 12
    nodes = torch.tensor([node for node in range(12) if node != 10])
    for relation, count in (("a", 40), ("none", 0), ("b", 25)):
        drawn = torch.randint(len(nodes), (2, count), generator=generator)
        graph["gene", relation, "gene"].edge_index = nodes[drawn]
    return graph


def task_of(
    graph: SharedGraph, dataset: KnockoutDataset, config: Config | None = None
) -> KnockoutTask:
    """Returns the task of a dataset, without a baseline; its models predict the scores themselves.

    It is on the device of the graph.
    """
    config = config or Config()
    zeros = torch.zeros(len(dataset.tables.targets), dtype=torch.float64, device=graph.device)
    return KnockoutTask(
        config=config,
        tables=dataset.tables,
        fingerprint="",
        graph=graph,
        criterion=LOSSES[config.optim.loss](zeros, zeros + 1),
        dataset=dataset,
        route="",
        basis=LINEAR,
    )


def output_for(task: KnockoutTask, prediction: Tensor) -> Tensor:
    """Returns the output [n, T, 1] of a model that predicts these scores [n, T]."""
    if task.criterion.is_binary:
        prediction = prediction.logit()
    return ((prediction - task.criterion.mean) / task.criterion.std).unsqueeze(2)


def lines_of_test(task: KnockoutTask, prediction: Tensor) -> list[str]:
    """Returns the lines of test.tsv, given predictions of the test rows."""
    rivals = task.rivals_of(task.rows("test"))
    return list(result_lines(task.tables, prediction, rivals))


def predictions_of(y: Tensor, prediction: Tensor, baseline: Tensor) -> Results:
    """Returns what a test.tsv says of scores, predictions and baseline [n, T], of no genes."""
    n, num_targets = y.shape
    return Results(
        genes=[""] * n,
        unseen=torch.zeros(n, num_targets, dtype=torch.long),
        unseen_genes=[""] * n,
        targets=[f"score{t}" for t in range(num_targets)],
        y=y,
        prediction=prediction,
        rivals={"baseline": baseline},
    )


def read_table(path: Path) -> tuple[list[str], list[str], Tensor]:
    """Returns header, sets and numbers of predictions, nan where a cell is empty."""
    header, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    numbers = [[float(cell or "nan") for cell in row[1:]] for row in rows]
    return header, [row[0] for row in rows], torch.tensor(numbers, dtype=torch.float64)


def read_metrics(folder: Path, kind: str | None = None) -> list[dict]:
    """Returns the rows of a run folder's metrics.jsonl, or only those of one kind."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


def series(folder: Path) -> list[dict]:
    """Returns the train, val and test rows without times: equal if runs computed the same."""
    rows = [row for row in read_metrics(folder) if row["kind"] != "event"]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*.pt"))


def zero_a_block(path: Path) -> None:
    """Fills the middle of the largest tensor of a file that torch wrote with zeros.

    The file keeps its size, as after a crash of a disk, and torch reads it without a word.
    """
    with zipfile.ZipFile(path) as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    largest = max(tensors, key=lambda entry: entry.file_size)
    with path.open("r+b") as file:
        file.seek(largest.header_offset + 26)  # the sizes of the two last fields of its header
        sizes = struct.unpack("<HH", file.read(4))
        file.seek(sum(sizes) + largest.file_size // 4, os.SEEK_CUR)
        file.write(bytes(largest.file_size // 2))


def parameters(folder: Path) -> dict[str, Tensor]:
    """Returns the model's state dict from the newest checkpoint."""
    return torch.load(newest_checkpoint(folder), map_location="cpu", weights_only=True)["model"]


def equal(value: object, other: object, tolerance: float) -> bool:
    """Returns whether two values of a metrics row differ by at most the relative tolerance."""
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= tolerance * abs(other)
    return value == other


def relative_difference(value: Tensor, reference: Tensor, norm: Tensor) -> float:
    """Returns the norm of the difference over `norm`; inf for unequal integers or bools."""
    if torch.equal(value, reference):
        return 0.0
    if not reference.is_floating_point():
        return math.inf
    return ((value - reference).norm() / norm.clamp(min=1e-300)).item()


def difference(folder: Path, reference: Path, tolerance: float = 0.0) -> str:
    """Returns which tensor or metric first differs between two runs, or "".

    It differs by more than the relative tolerance.
    """
    ours, theirs = parameters(folder), parameters(reference)
    for name, value in theirs.items():
        if not relative_difference(ours[name], value, value.double().norm()) <= tolerance:
            return f"the final {name} differs from the undisturbed run's"
    rows, others = series(folder), series(reference)
    if len(rows) != len(others):
        return f"metrics.jsonl has {len(rows)} rows, the undisturbed run's {len(others)}"
    for row, other in zip(rows, others, strict=True):
        for key, value in other.items():
            if not equal(row.get(key), value, tolerance):
                return f"{key} differs from the undisturbed run's: {row} and {other}"
    return ""


def launch(
    world_size: int,
    arguments: list[str],
    timeout: float = 120,
    torchrun: tuple[str, ...] = ("--standalone",),
    variables: dict[str, str] | None = None,
    cpu: bool = True,
    prefix: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Runs `tests.check` with `arguments` under torchrun, or plain python if `world_size` is 1.

    `cpu` hides the GPUs. With a `prefix`, such as that of a network namespace, the command begins
    with it and is always under torchrun.

    Returns the exit status and the output.

    Raises:
        RuntimeError: The processes did not finish within `timeout` seconds.
    """
    command = [*prefix, sys.executable]
    if world_size > 1 or prefix:
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
        raise RuntimeError(f"{world_size} processes did not finish within {timeout} s") from None
    return process.returncode, output
