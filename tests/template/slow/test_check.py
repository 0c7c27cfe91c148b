"""The check parity passes on the template, and fails on broken copies of it."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import check
from tests.few_rows import few_rows
from tests.sets import tables_of
from tests.template.fixtures import copy_template
from tests.template.slow.recipes import edited, parity_holds
from tests.tools.runs import relative_difference

PARITY = [sys.executable, "-m", "tests.check", "parity", "model.hidden=8"]
LOSS_FACTOR = "ddp.world_size / (num_rows * task.num_targets)"
PLACE = """        self.register_buffer("basis", basis.clone())
"""
A_BUFFER_OF_INTEGERS = f"""{PLACE}
        num_ranks = int(__import__("os").environ.get("WORLD_SIZE", 1))
        self.register_buffer("num_ranks", torch.tensor(num_ranks))
"""
BROKEN = {  # {name: (module, correct code, wrong code)}
    "loss divided by the local batch": (
        "train.py",
        "state.scaler.scale(loss.sum() * loss_factor)",
        "state.scaler.scale(loss.sum() * ddp.world_size / batch.weight.sum().clamp(min=1))",
    ),
    "gradients exchanged too early": (
        "train.py",
        "is_last = micro_step == optim.accumulate - 1",
        "is_last = micro_step == 0",
    ),
    "errors of float32": ("train.py", LOSS_FACTOR, f"{LOSS_FACTOR} * (1 + 6e-8 * ddp.rank)"),
    "a buffer of integers": ("model.py", PLACE, A_BUFFER_OF_INTEGERS),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_template(tmp_path_factory.mktemp("check") / "copy")


@pytest.fixture
def checked(monkeypatch, capsys) -> Callable[..., tuple]:
    """checked(*arguments) calls `tests.check` here; returns the exit status, stdout and stderr."""

    def call(*arguments: str) -> tuple:
        monkeypatch.setattr(sys, "argv", ["check", *arguments])
        with pytest.raises(SystemExit) as ended:
            check.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_help_of_a_check_describes_only_this_check(checked):
    for name, word in (("rows", "not finite"), ("gpu", "CUDA graphs"), ("trace", "RUN_FOLDER")):
        status, shown, _ = checked(name, "--help")
        assert status == 0 and word in shown
        assert "trains your model for a few steps" not in shown
    shown = checked("--help")[1]
    assert all(f"\n{name}  " in shown for name in check.CHECKS)


def test_parity_holds_on_1_2_and_4_ranks(run, tables, tmp_path):
    """A third of the nodes have levels."""
    path = tmp_path / "scores.tsv"
    path.write_text(re.sub(r"[036]\b(?=[,\t])", r"\g<0>=0.3", path.read_text()))
    assert path.read_text().count("=0.3") > 50
    result = run([*PARITY, *tables], timeout=240).check()
    _, *lines, verdict = result.stdout.splitlines()
    assert verdict == "PASS"
    expected = [(ranks, accumulate) for ranks in ("1", "2", "4") for accumulate in ("1", "2")]
    found = [re.match(r"(\d) ranks?, accumulate (\d) ", line).groups() for line in lines]
    assert found == expected[1:]


@pytest.mark.parametrize("name", BROKEN)
def test_parity_fails_on_a_broken_copy(copy, capsys, name):
    file, right, wrong = BROKEN[name]
    with edited(copy / file, {right: wrong}):
        assert not parity_holds(copy, "model.hidden=8")
    output = capsys.readouterr().out
    assert " is the tensor " in output
    assert ("num_ranks is the tensor " in output) == (name == "a buffer of integers")


def test_parity_uses_the_rows_with_scores():
    """Only one row in twenty has a score, and these rows are the last ones of each split."""
    y = torch.arange(600.0).double()
    split = torch.arange(600) % 3
    tables = replace(tables_of([[row % 5] for row in range(600)], y), split=split.to(torch.int8))
    tables.y[:570] = math.nan
    few = few_rows(tables)
    for name, num_rows in (("train", 77), ("val", 7), ("test", 7)):
        rows = few.rows(name)
        assert len(rows) == num_rows
        assert (rows >= 570).sum() == min(10, num_rows)


def test_integers_and_bools_are_compared_by_equality():
    norm = torch.tensor(5.0)
    for value, other in (([True, False], [False, True]), (2**53, 2**53 + 1)):
        assert relative_difference(torch.tensor(value), torch.tensor(value), norm) == 0
        assert relative_difference(torch.tensor(value), torch.tensor(other), norm) == math.inf
    numbers = torch.tensor([3.0, 4.5])
    difference = relative_difference(numbers, torch.tensor([3.0, 4.0]), norm)
    assert difference == pytest.approx(0.1)


def test_a_check_that_cannot_run_gives_the_reason(checked):
    status, _, error = checked("parity", "optim.rate=1")
    assert status == 2 and "unknown option optim.rate" in error
