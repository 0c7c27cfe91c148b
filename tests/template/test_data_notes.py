"""Warnings about probable mistakes in tables, and names that are refused."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import data_notes
import parts
from config import Config
from data import DataConfig, load
from data_tables import read_tables
from errors import DataError
from model import ModelConfig
from predict_tables import read_sets, unknown_nodes
from tests.sets import tables_of
from tests.template.fixtures import ROOT, write_table
from tests.template.results import normal

NODES = [f"q{k:02d}" for k in range(30)]
RING = [(node, other, "x") for node, other in zip(NODES, NODES[1:] + NODES[:1], strict=True)]
EDGE_HEADER = ("source", "target", "relation")
PAIRS = [f"{a},{b}" for a in NODES for b in NODES if a < b]


def notes_on_scores(folder: Path, header, rows, scores=(), edges=(), features="") -> list[str]:
    """Returns the notes on a table of knock-outs, without the path of the file.

    The graph is a ring of `NODES` with further `edges`.
    """
    edges_path = write_table(folder / "edges.tsv", [EDGE_HEADER, *RING, *edges])
    path = write_table(folder / "scores.tsv", [("genes", *header), *rows])
    notes = read_tables(str(edges_path), str(path), features, list(scores), False).notes
    return [note.partition(".tsv:")[2].strip() for note in notes]


def rows_of(*columns: Callable[[random.Random, int], object], count: int = 200) -> list[tuple]:
    """Returns rows with one knock-out each, and with a cell from each function for the row."""
    draw = random.Random(0)
    rows = []
    for k in range(count):
        rows.append((NODES[k % 30], *(column(draw, k) for column in columns)))
    return rows


def score(draw: random.Random, k: int) -> str:
    return f"{draw.gauss(0, 1):.4f}"


# ---- Scores --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spread", "found"), [(1, [-999, 999]), (1, [-99]), (1, [1e6]), (100, [-999]), (1e3, [1e29])]
)
def test_codes_for_missing_values_are_found(spread, found):
    values = spread * normal(400).flatten()
    for k, code in enumerate(found):
        values[k::5] = code
    assert data_notes.codes(values).tolist() == found


def test_codes_among_features_and_scores_are_noted(tmp_path):
    rows = [(node, k, -999 if k % 9 == 1 else 1000 + 20 * k) for k, node in enumerate(NODES)]
    features = write_table(tmp_path / "features.tsv", [("gene", "a", "b"), *rows])
    notes = notes_on_scores(tmp_path, ("a", "b"), rows, features=str(features))
    assert len(notes) == 2
    for note in notes:
        assert note.startswith("4 values of the column b are -999, far from ")


def test_scores_with_several_modes_or_long_tails_are_not_codes():
    """Such as dead strains among living ones, scores with two or three values, and long tails."""
    scores = normal(2000).flatten()
    is_dead = torch.arange(2000) % 20 == 0
    classes = (scores > 1).double() - (scores < -1.5).double()
    columns = [scores, scores**5, scores.exp(), classes, classes.abs(), torch.full((9,), torch.nan)]
    columns += [(1 + spread * scores).where(~is_dead, 0.0) for spread in (0.001, 0.3)]
    columns.append((0.1 * scores).where(~is_dead, -4.0))
    assert [data_notes.codes(column).tolist() for column in columns] == [[]] * len(columns)


def outliers(y: torch.Tensor, **fields: torch.Tensor) -> list[str]:
    """Returns the notes on rows of scores [n, T] that dominate the loss."""
    tables = tables_of([[0]] * len(y), y)
    tables.targets = [f"score{k}" for k in range(y.size(1))]
    return list(data_notes.notes_on_outliers(replace(tables, **fields), "scores.tsv"))


def test_a_row_that_dominates_the_variance_is_noted_with_its_line():
    y = normal(60, 25)
    y[17] = 1e6
    (note,) = outliers(y[:, :1], line=torch.arange(60) + 4)
    assert note.startswith("scores.tsv:21: this row accounts for 98% of the variance of score0, ")
    assert ["score1," in note for note in outliers(y[:, :2])] == [False, True]
    (note,) = outliers(y)  # from a reader that does not set the lines
    assert "row 17: this row accounts for 98% of the variance of all 25 scores" in note
    weight = torch.ones(60, dtype=torch.float64).index_fill(0, torch.tensor(17), 1e-15)
    assert outliers(y, weight=weight) == outliers(normal(60, 25)) == []
    assert outliers(y[10:50]) == []  # in only 40 rows, a share of a quarter is not suspicious
    assert outliers((y > 1e5).double()) == []  # scores of 0 and 1


SAME = "have the same nodes and levels as training rows"
DIFFERENT = "have the same nodes as training rows, at different levels"
AB = {0: 0.0, 1: 0.0}  # the level of each node of a row
DOSED = {0: 0.3, 1: 0.0}


@pytest.mark.parametrize(
    # The rows are training, validation, test, training ...
    ("sets", "expected"),
    [
        ([[0], [1], AB, [0], [1], AB], []),  # replicates in the same split
        ([[], [], [], [0], [1], AB], []),  # intact rows may be in all splits
        ([AB, AB, [0], [1], [1], AB], [f"1 test row and 2 validation rows {SAME}"]),
        ([DOSED, AB, [1], [2], AB, AB], [f"1 test row and 2 validation rows {DIFFERENT}"]),
    ],
)
def test_held_out_rows_with_the_nodes_of_training_rows_are_counted(sets, expected):
    tables = tables_of(sets, torch.arange(6.0))
    tables.genes = ["a", "b", "c"]
    tables.split = torch.arange(6, dtype=torch.int8) % 3
    for note, start in zip(data_notes.notes_on_training(tables, Config()), expected, strict=True):
        assert note.startswith(start)


def test_levels_of_only_the_last_of_several_names_are_noted(tmp_path):
    def notes(sets: list[str]) -> list[str]:
        return notes_on_scores(tmp_path, ("score",), [(genes, 1) for genes in sets])

    singles = [f"{node}=0.2" for node in NODES]
    (note,) = notes(singles + [f"{pair}=0.2" for pair in PAIRS])
    assert "A,B=0.2 deletes A and sets B to level 0.2" in note
    both = [f"{pair}=0.2".replace(",", "=0.2,") for pair in PAIRS]
    for sets in (singles + both, NODES + [f"{pair}=0.2" for pair in PAIRS], singles, both):
        assert notes(sets) == []


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        ([("=0", 1), ("", 1)], "30 rows have an empty cell "),
        ([("=1", 1), ("=0.5", 1.2)], "30 rows have only nodes at level 1, "),
        ([("=30", 1), ("=100", 1)], "all positive levels are above 1, "),
        ([("=0", 1), ("", 0.3)], ""),
        ([("=0.5", 1), ("=1", 0)], ""),
        ([("=3", 1), ("=2", 1)], ""),  # activations
        ([("=30", 1), ("=0.3", 1)], ""),
    ],
)
def test_levels_and_intact_rows_with_a_different_meaning_are_noted(tmp_path, kinds, problem):
    """The cells of each kind of rows have this end, and their scores this standard deviation."""
    draw = random.Random(0)
    rows = []
    for end, deviation in kinds:
        for node in NODES:
            rows.append((node + end if end else "", draw.gauss(5, deviation)))
    notes = notes_on_scores(tmp_path, ("score",), rows)
    assert len(notes) == bool(problem) and "".join(notes).startswith(problem)


def test_unequal_weights_and_scores_of_nodes_are_noted(monkeypatch):
    """A row with nearly all weight, and scores of nodes with a readout for other scores."""
    tables = tables_of([[0], [1]] * 50, normal(100, 1))
    tables.split = torch.zeros(100, dtype=torch.int8)
    tables.weight = torch.ones(100, dtype=torch.float64).index_fill(0, torch.tensor(3), 1e6)
    tables.genes = ["g0", "g1"]
    (note,) = data_notes.notes_on_training(tables, Config())
    assert "trained on only 1.0% of the rows: " in note
    tables.weight = None
    tables.targets = ["g1"]
    (note,) = data_notes.notes_on_training(tables, Config())
    assert note.startswith("all scores are named after nodes ")
    assert "model.readout=both" in note and "model.readout=nodes" in note
    assert (
        list(data_notes.notes_on_training(tables, Config(model=ModelConfig(readout="nodes")))) == []
    )
    monkeypatch.setattr(data_notes, "is_here", lambda module: module != "model_nodes")
    assert list(data_notes.notes_on_training(tables, Config())) == []


# ---- Names ---------------------------------------------------------------------------------------
NEAR = {"g0": "G0", "HLA_A": "HLA-A", "hla\u2013a": "HLA-A", "\uff34\uff3053": "TP53"}
DATES = {"1-Mar": ("MARCH1", "MARC1", "MARCHF1", "Mar-01"), "Sep-07": ("SEPT7", "SEPTIN7", "7-Sep")}


def test_a_name_that_is_nearly_a_node_means_this_node():
    for name, node in NEAR.items():
        assert data_notes.meanings([name], ["other", node, "G11", "more"]) == {name: node}, name
    for name, nodes in DATES.items():
        for node in nodes:
            assert data_notes.meanings([name], ["other", node]) == {name: node}
    assert data_notes.meanings(["MARCH1"], ["1-Mar"]) == {"MARCH1": "1-Mar"}
    assert data_notes.meanings(["1-Mar"], ["MARC1", "MARCH1"]) == {"1-Mar": "MARC1 or MARCH1"}
    for name in ("01-Sep", "Mar-01", "2001-03-01", "2024-09-02 00:00:00"):
        assert data_notes.meanings([name], ["a", "MARCH2"]) == {name: "a spreadsheet's date"}
    for joint in (".", "->", " x ", "\u00d7"):
        name = f"A{joint}HLA-B"
        assert data_notes.meanings([name], ["A", "HLA-B", "c"]) == {name: "A,HLA-B"}
    assert data_notes.meanings(["2"], ["DUR1", "b"]) == {"2": "part of a name with a comma"}


def test_other_names_have_no_meaning():
    """Genes of C. elegans may differ in only a number.

    A number such as 7.0, which pandas writes, does not join nodes.
    """
    names = ["F09G8.9", "MARCH2", "sep-1", "MAR1", "abd", "x2", "March", "+"]
    assert data_notes.meanings(names, ["F09G8.3", "MARCH1", "abc", "x1", "-"]) == {}
    assert data_notes.meanings(["7.0", "2"], ["0", "7"]) == {}


def test_knocked_out_names_without_an_edge_are_noted():
    """The note lists ten names, first the names with a meaning.

    Without meanings, there is only a note if at least half of the knocked-out nodes have no edge.
    """

    def note_on(perturbed: list[str], nodes: list[str]) -> str:
        tables = tables_of([list(range(len(perturbed)))], torch.zeros(1))
        tables.genes = perturbed
        return "".join(data_notes.notes_on_knocked_out(tables, "t", nodes)).removeprefix("t: ")

    near = [f"g{k}" for k in range(20)]
    note = note_on(["zzz", *near, "P0"], [*map(str.upper, near), "P0"])
    assert note.startswith("THE TABLE OF EDGES DOES NOT CONTAIN 21 OF 22 KNOCKED-OUT NODES, ")
    shown = ", ".join(f"g{k} (G{k}?)" for k in range(10))
    assert note.endswith(f"meaning in brackets is right: {shown}")
    few = note_on(["zzz", "A_B", "a", "b", "c"], ["A-B", "a", "b", "c"])
    assert few.startswith("the table of edges does not contain 2 of 5 ")
    assert few.endswith(": A_B (A-B?), zzz")
    assert note_on(list("abxy"), list("ab")).endswith("all tables use the same names: x, y")
    assert note_on(list("abcxy"), list("abc")) == note_on([], list("abc")) == ""


@pytest.mark.parametrize(
    ("names", "start", "end"),
    [
        ("A B c 1-Mar", "the other tables do not contain 2 of 4", "c (C?), 1-Mar (a spreadsheet's"),
        ("A B C D a b", "", ""),  # the nodes A and B have features
        ("A x1 x2", "THE OTHER TABLES DO NOT CONTAIN 2 OF 3", "use the same names: x1, x2"),
        ("A B x1 x2 x3", "", ""),  # such as a complete genome for a small graph
    ],
)
def test_names_in_the_features_are_judged_like_knocked_out_names(names, start, end):
    described = dict.fromkeys(names.split(), torch.zeros(1))
    tables = Mock(genes=list("ABCD"), feature_names=["length"])
    notes = "".join(data_notes.notes_on_features(tables, "", described)).removeprefix(": ")
    assert bool(notes) == bool(start)
    assert notes.startswith(start) and end in notes


# ---- Names that are refused ----------------------------------------------------------------------
def read_cells(folder: Path, nodes: list[str], cells: list[str]) -> list[str]:
    """Returns the notes on a table of knock-outs whose column genes has these cells."""
    edges = [(node, node, "x") for node in nodes]
    return notes_on_scores(folder, ("score",), [(cell, 1) for cell in cells], edges=edges)


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("b,a=0, 5", "contain a level with a decimal comma"),
        ("a,-", "contain the missing value -, "),
        ("a,wild type", "contain the control wild type, "),
        ("a,a1 + b2=0.3", "contain a1 + b2, which joins names "),
        ("a=0.3;b", "contain 'a=0.3;b', which is not a node such as A, "),
    ],
)
def test_text_that_is_not_a_node_is_refused(tmp_path, cell, problem):
    text = re.escape(f"scores.tsv:3: the genes '{cell}' {problem}")
    with pytest.raises(DataError, match=text):
        read_cells(tmp_path, ["a", "b", "a1", "b2"], ["a", cell, "b"])


def test_a_node_may_have_the_name_of_a_control_or_of_joined_nodes(tmp_path):
    nodes = ["a", "a1", "b2", "5", "wild type", "a1 + b2"]
    assert read_cells(tmp_path, nodes, ["a=0.5,5", "a1,b2", "wild type,a1 + b2"]) == []


def test_names_of_controls_are_recognised():
    controls = "ctrl,Control_1,WT,wild-type,Non_Targeting_00012,NTC,negative control,neg_ctrl"
    assert all(map(data_notes.is_control, controls.split(",")))
    genes = "WT1,NT5E,CTRB1,CONTROLLER,WTAP,NTC20"
    assert not any(map(data_notes.is_control, genes.split(",")))


def test_joined_names_are_split_at_the_signs_between_nodes():
    nodes = {"a", "b", "MT_CO1", "c", "1", "3"}
    for joint in (";", "|", ":", "/", "&", "  ", "_", "+"):
        assert "write a,b or, " in data_notes.misread(f"a{joint}b", nodes), joint
    for name, written in {"MT_CO1+a": "MT_CO1,a", "a+ctrl": "a", "3+ctrl": "3"}.items():
        assert f"write {written} or, " in data_notes.misread(name, nodes)
    for name in ("ctrl+ctrl", "WT + NT", "NT 3"):
        assert "the control" in data_notes.misread(name, nodes), name
    for name in ("a+d", "a-b", "+", "ab", "a.b"):
        assert data_notes.misread(name, nodes) == "", name


def test_the_same_names_are_refused_in_tables_to_predict(tmp_path):
    tables = replace(tables_of([[0]], torch.zeros(1)), genes=["a", "b", "c"])
    path = write_table(tmp_path / "new.tsv", [("genes",), ("c",), ("a+b",)])
    with pytest.raises(DataError, match=r"new\.tsv:3: .*write a,b"):
        list(read_sets(str(path), tables))


# ---- The log, and no notes -----------------------------------------------------------------------
def test_without_the_part_tables_are_read_the_same(tmp_path, monkeypatch):
    """The tables do not come from the cache that contains notes."""
    rows = rows_of(score, lambda draw, k: score(draw, k) if k else 500)
    notes_on_scores(tmp_path, ("a", "SE"), [*rows, ("Q01", 1, 1)])
    options = DataConfig(
        edges=str(tmp_path / "edges.tsv"),
        perturbations=str(tmp_path / "scores.tsv"),
        cache_dir=str(tmp_path / "cache"),
    )
    tables = load(options)
    assert len(tables.notes) == 2
    monkeypatch.setattr(parts, "is_here", lambda module: module != "data_notes")
    without = load(options)
    assert not without.notes
    assert without.fingerprint() == tables.fingerprint()
    assert unknown_nodes(["A", "x"], Mock(genes=["a"])).endswith(": A, x")


def test_the_example_has_no_notes():
    files = [str(ROOT / "example" / name) for name in ("edges.tsv", "scores.tsv")]
    assert read_tables(*files, "", [], undirected=False).notes == []


def test_details_count_rows_scores_nodes_and_features():
    """Sets, replicates, missing scores, unseen nodes, and bare nodes."""
    sets = [[0], [0], [1, 2], [1, 2], [], [3], [4]]
    tables = tables_of(sets, torch.tensor([[1.0, math.nan]] * 3 + [[0.0, 2.0]] * 4))
    tables.split = torch.tensor([-1, 0, 0, 0, 0, 1, 2], dtype=torch.int8)
    tables = replace(tables, genes=list("abcde"), left_out=["b"], feature_names=["a"])
    tables.features = torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0]])
    tables.edge_index = torch.tensor([[0, 1], [1, 2]])
    assert data_notes.details(tables) == (
        "5 distinct sets of 0 to 2 nodes; 1 row in no split; each score in 4 to 7 rows; "
        "5 knocked-out nodes, 2 of them without edges, 2 in no training row with a score; "
        "unused columns: b; 1 node feature; 1 node without features"
    )
