"""Graphs of runs, sets to predict, and warnings about extrapolations and leaks."""

import math
import re
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
    is_beyond,
    read_sets,
    tables_of_graph,
)
from run_results import fields_of_graph, named_sets, training_range
from task import KnockoutTask
from tests.bench.synthetic import PRESETS, synthetic_tables
from tests.sets import tables_of
from tests.template.fixtures import write_table
from tests.template.tables import sets_of
from train import read_config


# ---- The graph of a run --------------------------------------------------------------------------
@pytest.mark.parametrize("weighted", [False, True])
def test_graph_pt_has_the_graph_of_the_tables(tmp_path, weighted):
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


def test_a_custom_field_of_training_rows_is_empty_in_rows_to_predict(monkeypatch):
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
    """Returns the cell of each row to predict, and the levels of its nodes on the graph `NAMED`."""
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
def test_all_sets_are_distinct_and_can_be_read_again(tmp_path, screen, num_sets, level):
    expected = sets_in(screen + level)
    assert len(dict(expected)) == num_sets
    for _, nodes in expected:
        assert set(nodes.values()) <= {float(level.removeprefix("=") or 0)}
    rows = [(cell,) for cell, _ in expected]
    assert sets_in(write_table(tmp_path / "again.tsv", [("genes",), *rows])) == expected


@pytest.mark.parametrize("screen", ["all-pairs=", "all-singles=-0.1", "all-singles=high"])
def test_a_wrong_level_of_all_sets_raises(screen):
    with pytest.raises(UserError, match=f"^{screen}: the level must be a number"):
        sets_in(screen)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("header", ["genes", "genes\tscore", "nodes\tscore\tsplit"])
def test_an_empty_line_is_a_row_without_knock_outs(tmp_path, header, end):
    """In any line and with any number of columns. The end of the last line is not a row."""
    more = "\tNA" * header.count("\t")
    lines = [header, "", f"a{more}", "", "", f"d{more}", more, "", ""]
    path = tmp_path / "ask.tsv"
    for last in ("", end):
        path.write_bytes((end.join([*lines, f"a{more}"]) + last).encode())
        assert [cell for cell, _ in sets_in(path)] == ["", "a", "", "", "d", "", "", "", "a"]
    path.write_text("genes\tscore\na\t1\n  \n")
    with pytest.raises(DataError, match=r"ask.tsv:3: "):
        sets_in(path)


# ---- Rows beyond training ------------------------------------------------------------------------
def test_the_training_range_is_from_training_rows_with_a_score():
    """Validation rows and rows without a score do not count. Level 1 always counts."""
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
    """Changes a graph.pt, as if no training row of the run knocked out a node."""
    graph = torch.load(file, weights_only=True)
    graph["trained"]["seen"][node] = False
    torch.save(graph, file)


@pytest.fixture
def notes(predict: Callable, tmp_path: Path) -> Callable[..., list[str]]:
    """notes(nproc, *arguments) returns predict.py's notes about extrapolations, for six rows."""
    sets = ["Y01,Y02", "Y29", "Y01,NOPE", "Y01=3", "Y29=4", "Y01,Y02,Y03,Y04,Y05"]
    write_table(tmp_path / "table.tsv", [("genes",), *[(each,) for each in sets]])

    def run(nproc: int, *arguments: str) -> list[str]:
        lines = predict(nproc, "table.tsv", *arguments).check().stdout.splitlines()
        return [line.partition("note      ")[2] for line in lines if "extrapolations" in line]

    return run


UNSEEN = "predictions are extrapolations for {} with nodes that no training row knocks out"
LEVELS = "predictions are extrapolations for {} with levels outside the range of training"
LARGER = "predictions are extrapolations for {} with more nodes than any training row"


@pytest.mark.parametrize("nproc", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_extrapolations_are_counted(trained, notes, tmp_path, nproc):
    trained("run.name=a")
    trained("run.name=b", "run.seed=1")
    first, second = (tmp_path / f"runs/{name}/graph.pt" for name in "ab")
    hide(first, 29)
    found = notes(nproc, "runs/a")
    assert found == [
        UNSEEN.format("2 rows"),
        LEVELS.format("2 rows"),
        LARGER.format("1 row"),
    ]
    # With --rows, only these rows count.
    assert notes(nproc, "runs/a", "--rows", "4:5") == [
        UNSEEN.format("1 row"),
        LEVELS.format("1 row"),
    ]
    # With several runs, a row counts if it is an extrapolation for all of them.
    assert notes(nproc, "runs/a", "runs/b") == found[1:]
    hide(second, 29)
    assert notes(nproc, "runs/a", "runs/b", "--explain", "2") == found


@pytest.mark.parametrize("split", ["nodes", "random"])
def test_test_rows_on_which_a_checkpoint_was_trained_are_counted(
    trained, tables, tmp_path, monkeypatch, split
):
    """This also works if the nodes of the two graphs have different indices."""
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
        assert f"sets or nodes of {num_rows} of {len(tested)} test rows, " in note
    same = task("data.fold=0/3", "data.batch_size=7")
    assert not [note for note in same.notes() if file in note]
    (tmp_path / "runs/default/graph.pt").unlink()
    (note,) = [note for note in same.notes() if file in note]
    assert note.startswith(f"{file}: cannot check whether ")


def test_a_set_that_is_also_in_training_here_is_not_counted(trained, tables, tmp_path, monkeypatch):
    """With data.split=random, the levels of a set are in different splits."""
    monkeypatch.chdir(tmp_path)
    sets = [f"Y{k:02d}={level}" for k in range(30) for level in (0.0, 0.3, 0.6)]
    rows = [(one_set, k % 7) for k, one_set in enumerate(sets)]
    levels = write_table(tmp_path / "levels.tsv", [("genes", "score"), *rows])
    options = [*tables, f"data.perturbations={levels}", "data.split=random"]
    trained(*options)
    config = read_config([*options, "run.init=runs/default/checkpoints/best.pt"])
    task = KnockoutTask.from_tables(load(config.data), config)
    assert not [note for note in task.notes() if "best.pt" in note]


def test_rows_with_a_trained_set_are_counted(trained, predict, tables, tmp_path, monkeypatch):
    """The levels do not matter. Rows without nodes are not counted."""
    monkeypatch.chdir(tmp_path)
    trained("run.name=run")
    tables = load(read_config(tables).data)
    sets = [",".join(tables.genes[node] for node in nodes) for nodes in sets_of(tables)]
    is_trained = tables.is_in("train").tolist()
    known = {frozenset(sets[row].split(",")) for row, used in enumerate(is_trained) if used}
    asked = [*sets[:50], "Y01=0.3", "", "Y00,Y01,Y02,Y03,Y04"]
    write_table(tmp_path / "ask.tsv", [("genes",), *[(one_set,) for one_set in asked]])
    count = sum(frozenset(re.sub("=0.3", "", names).split(",")) in known for names in asked)
    assert 0 < count < 51
    output = predict(0, "ask.tsv", "runs/run").check().stdout
    assert f"a run was trained on: {count};" in output
