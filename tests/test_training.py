"""Short runs on few rows of the configured tables: their files, two ranks, resuming after a kill.

A test that fails prints a usual cause; docs/runs.md has a table of further causes.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_loader import make_loader
from ddp_setup import Distributed
from task import KnockoutTask
from tests.few_rows import load_few_rows
from train import read_config

# Largest norm of the difference of a tensor, divided by the norm of the model, in float64.
TOLERANCE = 1e-9
TIMES = ("samples_per_s", "data_ms", "step_ms", "memory_mb")  # values that differ between runs


@pytest.fixture(scope="module")
def train(run_here, launch, options, tmp_path_factory) -> Callable[..., Path]:
    """train(name) trains or resumes a short run in this process, and returns its folder.

    train(name, nproc, ...) does the same in `nproc` new processes, with `launch`.
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


class RecordedBatches:
    """A batch sampler that appends the rows of each epoch to `orders`."""

    def __init__(self, sampler: Iterable[list[int]], orders: list[list[int]]):
        self.sampler = sampler
        self.orders = orders

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.sampler)
        self.orders.append([row for batch in batches for row in batch])
        return iter(batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


@pytest.fixture(scope="module")
def orders() -> list[list[int]]:
    """The row numbers of each epoch of `one_rank`, in the order of training."""
    return []


@pytest.fixture(scope="module")
def one_rank(train, orders) -> Path:
    """The folder of an undisturbed run with one process."""

    def make_recorded_loader(dataset: Any, sampler: Any, *arguments: Any) -> Any:
        return make_loader(dataset, RecordedBatches(sampler, orders), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.make_loader", make_recorded_loader)
        return train("one")


@pytest.fixture(scope="module")
def model(options) -> nn.Module:
    """The model of the runs, before training."""
    config = read_config(options)
    ddp = Distributed(config.ddp)
    ddp.is_distributed = False  # even if torchrun has started the tests
    with load_few_rows():
        return KnockoutTask.load(config, ddp).build_model()


def parameters(run: Path) -> dict[str, Tensor]:
    """Returns the model's state dict from the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*.pt"))
    return torch.load(newest, weights_only=True)["model"]


def rows_of_log(run: Path) -> list[dict]:
    """Returns the rows of metrics.jsonl for training, validation and test, without `TIMES`."""
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in ("train", "val", "test"):
            rows.append({name: value for name, value in row.items() if name not in TIMES})
    return rows


def test_a_run_ends_with_a_test_of_its_best_model(one_rank):
    kinds = [row["kind"] for row in rows_of_log(one_rank)]
    assert kinds.count("val") == 3, (
        "A run of two epochs must validate at its start and after each epoch. Usually "
        "`optim.patience` ends the run earlier, or the loop in train.py was changed."
    )
    assert kinds.count("train") > 2 and kinds[-1] == "test", (
        "metrics.jsonl must have one row for each step, and end with the test. Usually the code "
        "that writes rows, in train.py, was changed."
    )
    assert json.loads((one_rank / "status.json").read_text())["state"] == "finished", (
        "The run has not finished. The reason is in status.json, and in the log of the run."
    )
    _header, *lines = (one_rank / "test.tsv").read_text().splitlines()
    assert len(lines) == rows_of_log(one_rank)[-1]["rows"], (
        "test.tsv must have one line for each test row. Usually `result_lines` in task.py was "
        "changed, or a cell contains a line break."
    )
    assert (one_rank / "checkpoints/best.pt").exists(), (
        "There is no best.pt. Usually `validate` in train.py does not save, or `RunFolder.save` in "
        "run_folder.py was changed."
    )


def test_each_epoch_trains_on_the_rows_in_a_different_order(one_rank, orders):
    first, second = orders
    assert first != second, (
        "Both epochs have the same order of rows. Usually the loop in train.py does not call "
        "`sampler.set_epoch(state.epoch)` before each epoch."
    )


def test_two_ranks_train_the_same_model_as_one(train, one_rank, model):
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
    buffers = [name for name, _ in model.named_buffers() if differences.get(name, 0) > 0]
    assert differences[worst] <= TOLERANCE * norm, (
        "Two ranks train a different model from one rank. The tensor with the largest difference "
        f"is {worst}, and these buffers differ: {buffers}. Usually the loss in task.py is a mean "
        "per rank (use a sum weighted by `batch.weight`), or `forward` depends on other samples of "
        "its batch: by a mean, a buffer, BatchNorm, or `nn.Dropout` (draw from `batch.seed`)."
    )


# The usual cause if a resumed run differs from an undisturbed run.
OF_STATE = (
    "Usually a counter, a random generator or, if only the test row differs, a moving average is a "
    "global variable or a plain attribute, which no checkpoint contains: make it a field of "
    "`TrainState` in run_checkpoint.py, or a buffer of the model. If `lr` differs, `schedule` in "
    "optim.py does not compute it from `state.step`."
)


def test_a_run_that_was_killed_and_resumed_has_the_same_bits(train, one_rank):
    killed = train("killed", nproc=1, status=-9, DIE_AT_STEP="6")
    rows = rows_of_log(one_rank)
    assert len(rows_of_log(killed)) < len(rows), (
        "The run was not killed before its end, so this test shows nothing. Usually `train_step` "
        "in train.py is not called once for each step."
    )
    train("killed")
    for row, row_of_resumed in zip(rows, rows_of_log(killed), strict=False):
        different = [name for name, value in row.items() if row_of_resumed.get(name) != value]
        assert not different, (
            f"After a kill, the resumed run writes different numbers in metrics.jsonl, first "
            f"{different} of the {row['kind']} row of step {row['step']}. {OF_STATE}"
        )
    assert len(rows_of_log(killed)) == len(rows), (
        f"After a kill, the resumed run writes a different number of rows. {OF_STATE}"
    )
    expected = parameters(one_rank)
    found = parameters(killed)
    assert found.keys() == expected.keys(), (
        "The resumed run has different parameters. Usually the model is built differently after "
        "its first step."
    )
    different = [name for name in expected if not found[name].equal(expected[name])]
    assert not different, (
        f"After a kill, the resumed run ends with different bits in {different}. {OF_STATE}"
    )
