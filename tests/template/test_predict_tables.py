"""What training rows have, and the notes on predictions of rows beyond it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from predict_tables import is_beyond, training_range
from tests.sets import tables_of
from tests.template.fixtures import write_table


def test_the_range_is_that_of_training_rows_with_a_score():
    """Not of validation rows, nor of a row without a score; intact nodes have level 1."""
    y = torch.tensor([1.0, 2.0, math.nan, 4.0], dtype=torch.float64).unsqueeze(1)
    tables = tables_of([{0: 0.5}, {0: 0.2, 2: 0.5}, {1: 0.0, 2: 0.0, 3: 3.0}, [1, 2, 3]], y)
    split = torch.tensor([0, 0, 0, 1], dtype=torch.int8)
    tables = replace(tables, genes=list("abcd"), split=split)
    found = training_range(tables)
    assert found.pop("seen").tolist() == [True, False, True, False]
    assert found == {"lowest": 0.2, "highest": 1.0, "largest": 2}

    sets = [{0: 0.2}, {1: 0.5}, {0: 0.1}, {2: 1.1}, {0: 0.5, 2: 0.5, 1: 0.5}, {}]
    asked = tables_of(sets, torch.zeros(6, 1))
    beyond = is_beyond(asked, training_range(tables))
    assert beyond.int().tolist() == [[0, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]


def hide(file: Path, node: int) -> None:
    """Lets a graph.pt say that the run's training rows did not knock out a node."""
    graph = torch.load(file, weights_only=True)
    graph["trained"]["seen"][node] = False
    torch.save(graph, file)


@pytest.fixture
def notes(predict: Callable, tmp_path: Path) -> Callable[..., list[str]]:
    """notes(nproc, *arguments) are those of predict.py on extrapolations, in a table of six."""
    sets = ["Y01,Y02", "Y29", "Y01,NOPE", "Y01=3", "Y29=4", "Y01,Y02,Y03,Y04,Y05"]
    write_table(tmp_path / "table.tsv", [("genes",), *[(each,) for each in sets]])

    def run(nproc: int, *arguments: str) -> list[str]:
        lines = predict(nproc, "table.tsv", *arguments).check().stdout.splitlines()
        return [line.partition("note      ")[2] for line in lines if "extrapolations" in line]

    return run


UNSEEN = "{} rows have nodes that no training row knocks out: these are extrapolations"
LEVELS = "{} rows have levels outside those of training: these are extrapolations"
LARGER = "{} rows have more nodes than any training row: these are extrapolations"


@pytest.mark.parametrize("nproc", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_predictions_of_what_training_lacks_are_counted(trained, notes, tmp_path, nproc):
    trained("run.name=a")
    trained("run.name=b", "run.seed=1")
    first, second = (tmp_path / f"runs/{name}/graph.pt" for name in "ab")
    hide(first, 29)
    found = notes(nproc, "runs/a")
    assert found == [
        UNSEEN.format(2),
        LEVELS.format(2),
        LARGER.format(1),
    ]
    # Of a piece, its rows alone; of several runs, what all of them lack.
    assert notes(nproc, "runs/a", "--rows", "4:5") == [
        UNSEEN.format(1),
        LEVELS.format(1),
    ]
    assert notes(nproc, "runs/a", "runs/b") == found[1:]
    hide(second, 29)
    assert notes(nproc, "runs/a", "runs/b", "--explain", "2") == found
