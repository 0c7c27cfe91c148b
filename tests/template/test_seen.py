"""A node is seen if a training row measures it, and intact at level 1.

The tests check this in the tables, the baseline, test.tsv and predictions.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baseline import additive_baseline
from config import Config
from data import DataConfig, load
from data_tables import Tables
from metrics import pearson
from predict_tables import read_sets
from task import KnockoutTask
from tests.template.fixtures import write_table
from tests.template.tables import EDGES, write_tables
from tests.template.tasks import lines_of_test

EFFECTS = (-3.0, -2.0, -1.0, 1.0, 2.0, 3.0)  # effect of the nodes in each module
NODES = [f"g{k:02}" for k in range(60)]
TEST_NODES = [name for name in NODES if name[-1] in "01"]


# ---- Tables --------------------------------------------------------------------------------------
def module_rows(num_scores: int = 1) -> list[tuple]:
    """Returns rows for 60 nodes in six modules, each node at three levels, with little noise.

    All nodes of a module have the same effect. In each module, two nodes are only in test rows, and
    one is only in validation rows.
    """
    draw = random.Random(0)
    rows = []
    for k, name in enumerate(NODES):
        split = {"0": "test", "1": "test", "2": "val"}.get(name[-1], "train")
        for level in (0, 0.3, 0.6):
            score = EFFECTS[k // 10] * (1 - level)
            scores = [f"{score + draw.gauss(0, 0.05):.4f}" for _ in range(num_scores)]
            rows.append((f"{name}={level}", *scores, split))
    return rows


def read(folder: Path, edges: list[tuple], rows: list[tuple]) -> Tables:
    """Returns tables with these edges and rows. A row has genes, scores and a split."""
    folder.mkdir(exist_ok=True)
    targets = [f"score{t}" for t in range(len(rows[0]) - 2)]
    return load(write_tables(folder, edges, [("genes", *targets, "split"), *rows]))


def read_modules(folder: Path, rows: list[tuple]) -> Tables:
    """Returns tables with these rows, on a graph that connects all nodes within each module."""
    edges = [EDGES[0]]
    for a in NODES:
        edges += [(a, b, "x") for b in NODES if a < b and a[:2] == b[:2]]
    return read(folder, edges, rows)


def task_of(folder: Path, tables: Tables) -> KnockoutTask:
    return KnockoutTask.from_tables(tables, Config(data=DataConfig(cache_dir=str(folder))))


def of_test_rows(tables: Tables) -> tuple[Tensor, Tensor]:
    """Returns the scores of the test rows and the predictions of the baseline, [n, T] each."""
    rows = tables.rows("test")
    return tables.y[rows], additive_baseline(tables).prediction[rows]


# ---- Seen ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("cells", [("{}", "NA"), ("{}=0.3", ""), ("{}=1", "0.01")])
def test_a_row_without_a_score_or_at_level_1_does_not_make_a_node_seen(tmp_path, cells):
    """The baseline then imputes the effect of the node from the graph, as for any unseen node."""
    genes, score = cells
    plain = read_modules(tmp_path / "plain", module_rows())
    rows = [(genes.format(name), score, "train") for name in TEST_NODES]
    tables = read_modules(tmp_path / "more", module_rows() + rows)
    y, expected = of_test_rows(plain)
    assert pearson(y, expected) > 0.998
    y, found = of_test_rows(tables)
    assert pearson(y, found) > 0.998
    if score != "0.01":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not tables.is_seen()[::10].any()
    assert tables.unseen("test").eq(1).all()
    assert tables.unseen_share("test") == 1
    lines = lines_of_test(task_of(tmp_path, tables), torch.zeros(len(y), 1))
    cells = [line.split("\t")[:3] for line in lines[1:]]
    assert {tuple(row[1:]) for row in cells} == {("1", name) for name in TEST_NODES}


@pytest.mark.parametrize("loss", ["squared", "binary"])
@pytest.mark.parametrize("cells", [("{}", "NA"), ("{}=0.6", "NA"), ("{}=1", "NA")])
def test_nodes_without_scores_do_not_influence_their_neighbours(tmp_path, loss, cells):
    """In each module, training rows measure two nodes, and lack the scores of five other nodes."""
    genes, score = cells
    rows = [row for row in module_rows() if row[0][2] in "01234"]
    if loss == "binary":
        rows = [(name, int(float(value) > 0), split) for name, value, split in rows]
    unmeasured = [name for name in NODES if name[-1] in "56789"]
    more = [(genes.format(name), score, "train") for name in unmeasured]
    plain = read_modules(tmp_path / "plain", rows)
    tables = read_modules(tmp_path / "more", rows + more)
    expected = additive_baseline(plain, loss).prediction
    found = additive_baseline(tables, loss).prediction[: len(expected)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    test_rows = plain.rows("test")
    assert pearson(plain.y[test_rows], found[test_rows]) > 0.97


def test_test_tsv_lists_unseen_nodes_with_their_number_for_each_score(tmp_path):
    """If the number is the same for all scores, it is written once."""
    rows = [("a", "NA", 1, "train"), ("b=0.5", 1, "NA", "train"), ("c", 1, 1, "train")]
    rows += [("c", 1, 2, "val"), ("b=0.3,d", 1, 1, "test"), ("a,b", 1, 1, "test")]
    tables = read(tmp_path, EDGES, [*rows, ("a,d,b", 1, "NA", "test")])
    lines = lines_of_test(task_of(tmp_path, tables), torch.zeros(3, 2))
    expected = [["b=0.3,d", "1,2", "b,d"], ["a,b", "1", "a,b"], ["a,b,d", "2", "a,d"]]
    assert [line.split("\t")[:3] for line in lines[1:]] == expected


def test_training_hides_the_share_of_nodes_that_are_unseen_in_validation(tmp_path):
    rows = [("a", 1, "NA", "train"), ("b", "NA", 2, "train"), ("c=1", 1, 3, "train")]
    rows.append(("a,b", 3, 2, "val"))  # one of two nodes is unseen for each score
    rows.append(("a", "NA", 1, "val"))  # one of one node is unseen
    rows.append(("c,d", "NA", "NA", "val"))  # does not count, because it does not have a score
    rows += [("", 1, 2, "val"), ("a", 1, 1, "test")]
    tables = read(tmp_path, EDGES, rows)
    assert tables.unseen_share("val") == pytest.approx(3 / 5)
    assert task_of(tmp_path, tables).build_model().unseen == pytest.approx(3 / 5)


# ---- Level 1 -------------------------------------------------------------------------------------
def test_a_row_at_level_1_is_an_intact_control(tmp_path):
    """This holds for the fingerprint, the baseline, tables to predict and the model."""
    cells = ["", "a", "b=0.3,c", "a,b", "c", "b,d=0.5"]
    controls = ["a=1,c=1", "a,d=1", "b=0.3,c,a=1.0", "a,b", "c,d=1e0", "b,d=0.5"]
    scores = [0.5, 1.5, -1.0, 2.0, 0.7, 1.1]
    splits = ["train", "train", "train", "val", "test", "train"]
    plain = read(tmp_path / "plain", EDGES, list(zip(cells, scores, splits, strict=True)))
    tables = read(tmp_path / "levels", EDGES, list(zip(controls, scores, splits, strict=True)))
    assert tables.fingerprint() == plain.fingerprint()
    task = task_of(tmp_path, tables)
    torch.testing.assert_close(task.rivals["baseline"], additive_baseline(plain).prediction)

    ask = write_table(tmp_path / "ask.tsv", [("genes",), ("a=1",), ("",), ("b,a=1",), ("b",)])
    (chunk,) = read_sets(str(ask), tables)
    assert list(chunk.sets) == ["a=1", "", "b,a=1", "b"]
    intact = chunk.samples.perturbed_ptr.diff().tolist()
    assert intact == [0, 0, 1, 1]
