"""Graphs of runs, sets to predict, notes on rows beyond training, and the table that grows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from data import load
from data_cells import Rows
from data_tables import OF_GRAPH, Tables
from errors import DataError, UserError
from predict_tables import (
    chunk_of,
    fields_of_graph,
    is_beyond,
    named_sets,
    read_sets,
    tables_of_graph,
    training_range,
)
from task import KnockoutTask
from tests.bench.synthetic import PRESETS, synthetic_tables
from tests.sets import tables_of
from tests.template.fixtures import write_table
from tests.template.tables import sets_of
from train import read_config


# ---- The graph of a run --------------------------------------------------------------------------
@pytest.mark.parametrize("weighted", [False, True])
def test_the_graph_of_a_run_is_that_of_its_tables(tmp_path, weighted):
    tables = synthetic_tables(PRESETS["small"])
    if weighted:
        tables.edge_weight = torch.rand(len(tables.edge_type), dtype=torch.float64)
        tables.features = torch.rand(len(tables.genes), 3)
        tables.feature_names = ["f", "g", "h"]
    torch.save(fields_of_graph(tables), tmp_path / "graph.pt")
    loaded = tables_of_graph(torch.load(tmp_path / "graph.pt", weights_only=True))
    assert loaded.fingerprint(OF_GRAPH) == tables.fingerprint(OF_GRAPH)
    assert len(loaded.y) == 0 and loaded.y.size(1) == 1
    changed = replace(tables, y=tables.y + 1)
    assert changed.fingerprint(OF_GRAPH) == tables.fingerprint(OF_GRAPH)
    assert changed.fingerprint() != tables.fingerprint()


def test_a_field_of_rows_that_is_not_read_is_missing_and_not_that_of_other_rows(monkeypatch):
    @dataclass
    class Warmed(Tables):
        temperature: torch.Tensor | None = None  # float64 [n]

    small = synthetic_tables(PRESETS["small"])
    tables = Warmed(**vars(small), temperature=torch.arange(len(small.y)))
    monkeypatch.setattr("predict_tables.Tables", Warmed)
    of_run = tables_of_graph(fields_of_graph(tables))
    rows = Rows("new.tsv", [2], {"genes": [small.genes[0]]})
    assert chunk_of(rows, of_run).samples.temperature is None
    assert tables.fingerprint(OF_GRAPH) == small.fingerprint(OF_GRAPH)


# ---- Sets ----------------------------------------------------------------------------------------
NAMED = replace(tables_of([[0]], torch.zeros(1, 1)), genes=["a", "b", "c", "d"])


def sets_in(path: Path | str) -> list[tuple[str, dict[int, float]]]:
    """Returns the rows to predict on the graph `NAMED`: their cells, and the levels of nodes."""
    rows = []
    for chunk in read_sets(str(path), NAMED, most=2):
        assert chunk.is_known.all()
        ptr = chunk.samples.perturbed_ptr.diff().tolist()
        nodes = chunk.samples.perturbed.split(ptr)
        levels = chunk.samples.level.split(ptr)
        for cell, *of_row in zip(chunk.sets, nodes, levels, strict=True):
            node, level = (values.tolist() for values in of_row)
            rows.append((cell, dict(zip(node, level, strict=True))))
    return rows


@pytest.mark.parametrize("level", ["", "=0.3", "=1e-5", "=0.333333333333333", "=1"])
@pytest.mark.parametrize(("screen", "num_sets"), [("all-singles", 4), ("all-pairs", 6)])
def test_a_screen_has_each_set_once_and_is_read_again_as_it_is_written(
    tmp_path, screen, num_sets, level
):
    expected = sets_in(screen + level)
    assert len(dict(expected)) == num_sets
    for _, nodes in expected:
        assert set(nodes.values()) <= {float(level.removeprefix("=") or 0)}
    rows = [(cell,) for cell, _ in expected]
    assert sets_in(write_table(tmp_path / "again.tsv", [("genes",), *rows])) == expected


@pytest.mark.parametrize("screen", ["all-pairs=", "all-singles=-0.1", "all-singles=high"])
def test_a_screen_at_no_level_is_refused(screen):
    with pytest.raises(UserError, match=f"^{screen}: the level must be a number from 0 to 10,000$"):
        sets_in(screen)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("header", ["genes", "genes\tscore", "nodes\tscore\tsplit"])
def test_an_empty_line_is_a_row_without_knock_outs(tmp_path, header, end):
    """Wherever it stands, and however many columns there are; the end of the last line is none."""
    more = "\tNA" * header.count("\t")
    lines = [header, "", f"a{more}", "", "", f"d{more}", more, "", ""]
    path = tmp_path / "ask.tsv"
    for last in ("", end):
        path.write_bytes((end.join([*lines, f"a{more}"]) + last).encode())
        assert [cell for cell, _ in sets_in(path)] == ["", "a", "", "", "d", "", "", "", "a"]
    path.write_text("genes\tscore\na\t1\n  \n")
    with pytest.raises(DataError, match=r"ask.tsv:3: 1 cells, but the header has 2$"):
        sets_in(path)


# ---- Rows beyond training ------------------------------------------------------------------------
def test_the_range_is_that_of_training_rows_with_a_score():
    """Not of validation rows, nor of a row without a score; intact nodes have level 1."""
    y = torch.tensor([1.0, 2.0, math.nan, 4.0], dtype=torch.float64).unsqueeze(1)
    tables = tables_of([{0: 0.5}, {0: 0.2, 2: 0.5}, {1: 0.0, 2: 0.0, 3: 3.0}, [1, 2, 3]], y)
    split = torch.tensor([0, 0, 0, 1], dtype=torch.int8)
    tables = replace(tables, genes=list("abcd"), split=split)
    found = training_range(tables)
    assert found.pop("seen").tolist() == [True, False, True, False]
    assert found.pop("sets").equal(named_sets(tables)[:2].unique())
    assert found == {"lowest": 0.2, "highest": 1.0, "largest": 2}

    sets = [{0: 0.2}, {1: 0.5}, {0: 0.1}, {2: 1.1}, {0: 0.5, 2: 0.5, 1: 0.5}, {0: 0.5, 2: 0.5}]
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


UNSEEN = "{} rows have nodes that no training row knocks out: predictions are extrapolations"
LEVELS = "{} rows have levels outside the range of training: predictions are extrapolations"
LARGER = "{} rows have more nodes than any training row: predictions are extrapolations"


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


@pytest.mark.parametrize("split", ["nodes", "random"])
def test_rows_and_nodes_that_a_checkpoint_knows_but_a_run_tests_are_counted(
    trained, tables, tmp_path, monkeypatch, split
):
    """Also on a graph with another node before the others."""
    monkeypatch.chdir(tmp_path)
    tables = [*tables, f"data.split={split}", "data.cache_dir="]
    trained(*tables, "data.fold=0/3")
    file = "runs/default/checkpoints/best.pt"

    def task(*options: str) -> KnockoutTask:
        config = read_config([*tables, f"run.init={file}", *options])
        return KnockoutTask.from_tables(load(config.data), config)

    (tmp_path / "more.tsv").write_text((tmp_path / "edges.tsv").read_text() + "A\tA\tloop\n")
    first = task("data.fold=0/3").tables
    names = [frozenset(first.genes[node] for node in nodes) for nodes in sets_of(first)]
    known = {names[row] for row in first.rows("train").tolist()}
    seen = frozenset().union(*known)
    for options in (["data.fold=1/3"], ["data.fold=2/3", "data.edges=more.tsv"]):
        second = task(*options)
        tested = [names[row] for row in second.rows("test").tolist()]
        own = frozenset().union(*(names[row] for row in second.rows("train").tolist()))
        unseen = seen - own
        assert (len(unseen) > 0) == (split == "nodes")
        num_rows = sum(nodes in known or bool(nodes & unseen) for nodes in tested)
        (note,) = [note for note in second.notes() if file in note]
        assert f"trained on sets or nodes of {num_rows} of {len(tested)} test rows, so " in note
    same = task("data.fold=0/3", "data.batch_size=7")
    assert not [note for note in same.notes() if file in note]
    (tmp_path / "runs/default/graph.pt").unlink()
    (note,) = [note for note in same.notes() if file in note]
    assert note.startswith(f"{file}: cannot check whether it was trained on test rows, ")
