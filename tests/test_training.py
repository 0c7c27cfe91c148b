"""One run on few rows of the configured tables: its files, two ranks, and resuming after a kill."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.few_rows import load_few_rows

TOLERANCE = 1e-9  # difference of a tensor over the norm of the model, in float64
TIMES = ("samples_per_s", "data_ms", "step_ms", "memory_mb")


@pytest.fixture(scope="module")
def train(run_here, launch, options, tmp_path_factory) -> Callable[..., Path]:
    """train(name) trains or resumes a short run, and returns its folder.

    train(name, nproc, ...) does so in new processes, with `launch`.
    """
    folder = tmp_path_factory.mktemp("runs")
    overrides = [f"run.dir={folder}", "run.init=", "run.resume=auto", "data.batch_size=24"]
    overrides += ["optim.precision=fp64", "optim.epochs=2", "optim.accumulate=1"]
    overrides += ["log.every_steps=1", "checkpoint.every_steps=1"]

    def start(name: str, nproc: int = 0, **launched: object) -> Path:
        arguments = [*overrides, f"run.name={name}", *options]
        if nproc:
            launch(nproc, "tests/few_rows.py", *arguments, **launched)
        else:
            with load_few_rows():
                run_here("train", *arguments)
        return folder / name

    return start


@pytest.fixture(scope="module")
def one_rank(train) -> Path:
    """The folder of an undisturbed run with one process."""
    return train("one")


def parameters(run: Path) -> dict[str, Tensor]:
    """Returns the model's state dict from the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*.pt"))
    return torch.load(newest, weights_only=True)["model"]


def rows_of_log(run: Path) -> list[dict]:
    """Returns the rows of metrics.jsonl for training, validation and test, without times."""
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in ("train", "val", "test"):
            rows.append({name: value for name, value in row.items() if name not in TIMES})
    return rows


def test_a_run_ends_with_a_test_of_its_best_model(one_rank):
    kinds = [row["kind"] for row in rows_of_log(one_rank)]
    assert kinds.count("val") == 3  # at the start, and after each epoch
    assert kinds.count("train") > 2 and kinds[-1] == "test"
    assert json.loads((one_rank / "status.json").read_text())["state"] == "finished"
    _header, *lines = (one_rank / "test.tsv").read_text().splitlines()
    assert len(lines) == rows_of_log(one_rank)[-1]["rows"]
    assert (one_rank / "checkpoints/best.pt").exists()


def test_two_ranks_train_the_same_model_as_one(train, one_rank):
    expected = parameters(one_rank)
    found = parameters(train("two", nproc=2))
    differences = {}
    squares = []
    for name, value in expected.items():
        if value.is_floating_point():
            differences[name] = (found[name] - value).norm()
            squares.append(value.square().sum())
    norm = torch.stack(squares).sum().sqrt()
    worst = max(differences, key=differences.get)
    assert differences[worst] <= TOLERANCE * norm, worst


def test_a_killed_run_resumes_to_the_same_bits(train, one_rank):
    killed = train("killed", nproc=1, status=-9, DIE_AT_STEP="6")
    assert len(rows_of_log(killed)) < len(rows_of_log(one_rank))
    train("killed")
    assert rows_of_log(killed) == rows_of_log(one_rank)
    expected = parameters(one_rank)
    found = parameters(killed)
    assert found.keys() == expected.keys()
    different = [name for name in expected if not found[name].equal(expected[name])]
    assert not different
