"""Warnings about probable mistakes in tables, and names that are refused."""

import math
import random
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
from data_notes import (
    codes,
    details,
    is_control,
    meanings,
    misread,
    notes_on_knocked_out,
    notes_on_outliers,
    notes_on_training,
)
from data_tables import read_tables
from errors import DataError, counted
from model import ModelConfig
from predict_tables import read_sets, unknown_nodes
from tests.sets import tables_of
from tests.template.cells import read_cells
from tests.template.fixtures import ROOT, write_table
from tests.template.results import normal

NODES = [f"q{k:02d}" for k in range(30)]
RING = [(node, other, "x") for node, other in zip(NODES, NODES[1:] + NODES[:1], strict=True)]
EDGE_HEADER = ("source", "target", "relation")
PAIRS = [f"{a},{b}" for a in NODES for b in NODES if a < b]


def notes_on_scores(
    folder: Path, header: tuple, rows: list[tuple], scores: tuple = (), edges: tuple = ()
) -> list[str]:
    """Returns the notes on a table of knock-outs, without the path of the file.

    The graph is a ring of `NODES` with further `edges`.
    """
    edges_path = write_table(folder / "edges.tsv", [EDGE_HEADER, *RING, *edges])
    path = write_table(folder / "scores.tsv", [("genes", *header), *rows])
    notes = read_tables(str(edges_path), str(path), "", list(scores), undirected=False).notes
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
OTHERS = [
    *("P-value", "pvalue", "adj.P.Val", "p_adj", "FDR", "q-value", "growth_sd", "SE", "std"),
    *("stderr", "Standard Error", "variance", "batch", "plate_id", "replicate", "level"),
    *("fold", "dose", "temperature", "nCells", "num_reads", "weights"),
    "Double mutant fitness standard deviation",
]
SCORES = ["log2 fold change", "expression level", "dose_response", "essential", "rep1", "log n"]


def test_columns_whose_names_do_not_look_like_scores_are_noted(tmp_path):
    rows = rows_of(score, score, count=10)
    for name in OTHERS:
        (note,) = notes_on_scores(tmp_path, ("growth", name), rows)
        assert note.startswith("all 2 columns are used as scores, ")
        assert f"({name})" in note and "data.scores" in note
    assert notes_on_scores(tmp_path, ("growth", "SE"), rows, scores=("growth",)) == []
    assert notes_on_scores(tmp_path, ("SE",), [row[:2] for row in rows]) == []
    assert notes_on_scores(tmp_path, ("q01", "SE"), rows, edges=[("SE", "q00", "x")]) == []
    rows = rows_of(*[score] * len(SCORES), count=10)
    assert notes_on_scores(tmp_path, tuple(SCORES), rows) == []


@pytest.mark.parametrize("share", [0.01, 0.4, 0.8])
@pytest.mark.parametrize(
    ("spread", "found"), [(1, [-999, 999]), (1, [-99]), (1, [1e6]), (100, [-999]), (1e3, [1e29])]
)
def test_codes_for_missing_values_are_found_whatever_their_share(tmp_path, share, spread, found):
    values = spread * normal(400).flatten()
    for k, code in enumerate(found):
        values[k :: round(len(found) / min(share, 0.4))] = code
    if share == 0.8:
        values = torch.cat([values, torch.full((1600,), float(found[0]), dtype=torch.float64)])
    assert sorted(codes(values).tolist()) == sorted(found)
    rows = [(NODES[k % 30], value) for k, value in enumerate(values.tolist())]
    notes = notes_on_scores(tmp_path, ("growth",), rows)
    for code in found:
        count = int((values == code).sum())
        text = f"{count:,} values of the column growth are {code:g}, far from "
        assert any(note.startswith(text) for note in notes)


def test_codes_among_features_are_noted(tmp_path):
    edges = write_table(tmp_path / "edges.tsv", [EDGE_HEADER, *RING])
    scores = write_table(tmp_path / "scores.tsv", [("genes", "score"), *rows_of(score)])
    rows = [(node, k, -999 if k % 9 == 1 else 1000 + 20 * k) for k, node in enumerate(NODES)]
    path = write_table(tmp_path / "features.tsv", [("gene", "a", "b"), *rows])
    (note,) = read_tables(str(edges), str(scores), str(path), [], undirected=False).notes
    assert note.startswith(f"{path}: 4 values of the column b are -999, far from ")


def test_scores_with_several_modes_or_long_tails_are_not_codes():
    """Such as dead strains among living ones, scores with two or three values, and long tails."""
    scores = normal(2000).flatten()
    is_dead = torch.arange(2000) % 20 == 0
    columns = [scores, scores**5, scores.exp(), scores.where(scores < 1, torch.nan)]
    for spread in (0.001, 0.02, 0.1, 0.3):
        columns.append((1 + spread * scores).where(~is_dead, 0.0))
    columns.append((0.1 * scores).where(~is_dead, -4.0))
    columns.append((50 + 10 * scores).clamp(0, 70).round())
    columns.append((scores > 1).double())
    columns.append((scores > 1).double() - (scores < -1.5).double())
    columns.append(torch.full((100,), torch.nan))
    assert [codes(column).tolist() for column in columns] == [[]] * len(columns)


def outliers(y: torch.Tensor, **fields: torch.Tensor) -> list[str]:
    """Returns the notes on rows of scores [n, T] that dominate the loss."""
    tables = tables_of([[0]] * len(y), y)
    tables.targets = [f"score{k}" for k in range(y.size(1))]
    return list(notes_on_outliers(replace(tables, **fields), "scores.tsv"))


def test_a_row_that_dominates_the_variance_is_noted_with_its_line():
    y = normal(60, 25)
    y[17] = 1e6
    line = torch.arange(60) + 4
    (note,) = outliers(y[:, :1], line=line)
    assert note.startswith("scores.tsv:21: this row accounts for 98% of the variance of score0, ")
    (note,) = outliers(y[:, :1])  # from a reader that does not set the lines
    assert note.startswith("scores.tsv: row 17: this row accounts for 98%")
    assert ["score0," in note for note in outliers(y[:, :2])] == [True, False]
    assert ["score1," in note for note in outliers(y[:, :2])] == [False, True]
    (note,) = outliers(y)
    assert "row 17: this row accounts for 98% of the variance of all 25 scores" in note
    weight = torch.ones(60, dtype=torch.float64).index_fill(0, torch.tensor(17), 1e-15)
    assert outliers(y, weight=weight) == outliers(normal(60, 25)) == []
    assert outliers(y[10:50]) == []  # in only 40 rows, a share of a quarter is not suspicious
    assert outliers((y > 1e5).double()) == []  # scores of 0 and 1


@pytest.mark.parametrize(
    # The rows are training, validation, test, training ...; `same` and `different` are the numbers
    # of test and validation rows with the nodes of training rows at the same or different levels.
    ("sets", "same", "different"),
    [
        (["a", "b", "c", "d", "a,b", "c,d"], (0, 0), (0, 0)),
        (["a,b", "b , a", "a,b,c=1", "c", "c", "a"], (1, 2), (0, 0)),
        (["b=0.3,a", "a=0,b=0.30", "b=0.3", "a,b"], (0, 1), (0, 0)),
        (["b=0.3,a", "b=0.1,a", "a,b", "d", "d=2", "a,b=0.3"], (1, 0), (1, 2)),
        (["a", "b", "c", "a", "b", "c"], (0, 0), (0, 0)),  # replicates in the same split
        (["", "", "", "a=1", "b=1,c=1", "a"], (0, 0), (0, 0)),  # intact rows may be in all splits
    ],
)
def test_held_out_rows_with_the_nodes_of_training_rows_are_counted(tmp_path, sets, same, different):
    read_cells(tmp_path, list("abcd"), sets)
    files = {name: str(tmp_path / f"{name}.tsv") for name in ("edges", "scores")}
    tables = load(DataConfig(edges=files["edges"], perturbations=files["scores"], cache_dir=""))
    expected = []
    for (num_test, num_val), advice in (
        (same, "check the column split"),
        (different, "data.split=sets"),
    ):
        if num_test + num_val:
            test_rows = counted(num_test, "test row")
            validation_rows = counted(num_val, "validation row")
            expected.append((f"{test_rows} and {validation_rows} have", advice))
    tables.weight = None
    notes = list(notes_on_training(tables, Config()))
    for note, (rows, advice) in zip(notes, expected, strict=True):
        assert note.startswith(rows) and advice in note


def test_levels_of_only_the_last_of_several_names_are_noted(tmp_path):
    def notes(sets: list[str]) -> list[str]:
        return notes_on_scores(tmp_path, ("score",), [(genes, 1) for genes in sets])

    singles = [f"{node}=0.2" for node in NODES]
    (note,) = notes(singles + [f"{pair}=0.2" for pair in PAIRS])
    assert "A,B=0.2 deletes A and sets B to level 0.2" in note
    both = [f"{pair}=0.2".replace(",", "=0.2,") for pair in PAIRS]
    for sets in (singles + both, NODES + [f"{pair}=0.2" for pair in PAIRS], singles, both):
        assert notes(sets) == []


def test_levels_and_intact_rows_with_a_different_probable_meaning_are_noted(tmp_path):
    """Lost names, level 1 for a knock-out, and percentages. Real controls are not noted."""
    draw = random.Random(0)

    def notes(*kinds: tuple[str, float], nodes: int = 30) -> list[str]:
        """Returns the notes on rows whose cells have this end and whose scores this deviation."""
        rows = []
        for end, deviation in kinds:
            for node in NODES:
                rows.append((node + end if end else "", draw.gauss(5, deviation)))
        return notes_on_scores(tmp_path, ("score",), rows)

    (note,) = notes(("=0", 1), ("", 1))
    assert note.startswith("30 rows have an empty cell ")
    for kinds in ([("=1", 1)], [("=1", 1), ("=0.5", 1.2)]):
        (note,) = notes(*kinds)
        assert note.startswith("30 rows have only nodes at level 1, ")
    (note,) = notes(("=30", 1), ("=100", 1))
    assert "levels are above 1, " in note and "by up to 100: " in note
    for kinds in (
        [("=0", 1), ("", 0.3)],
        [("=0.5", 1), ("=1", 0)],
        [("=3", 1), ("=2", 1)],  # activations
        [("=30", 1), ("=0.3", 1)],
    ):
        assert notes(*kinds) == []


def test_unequal_weights_and_scores_of_nodes_are_noted(monkeypatch):
    """A row with nearly all weight, and scores of nodes with a readout for other scores."""
    tables = tables_of([[0], [1]] * 50, normal(100, 1))
    tables.split = torch.zeros(100, dtype=torch.int8)
    tables.weight = torch.ones(100, dtype=torch.float64).index_fill(0, torch.tensor(3), 1e6)
    tables.genes = ["g0", "g1"]
    (note,) = notes_on_training(tables, Config())
    assert "trained on only 1.0% of the rows: " in note
    tables.weight = None
    tables.targets = ["g1"]
    (note,) = notes_on_training(tables, Config())
    assert note.startswith("all scores are named after nodes ")
    assert "model.readout=both" in note and "model.readout=nodes" in note
    assert list(notes_on_training(tables, Config(model=ModelConfig(readout="nodes")))) == []
    monkeypatch.setattr(data_notes, "is_here", lambda module: module != "model_nodes")
    assert list(notes_on_training(tables, Config())) == []


# ---- Names ---------------------------------------------------------------------------------------
def test_many_relations_that_are_numbers_are_noted(tmp_path):
    def notes(relations: list) -> list[str]:
        edges = [("q00", "q09", relation) for relation in relations]
        return notes_on_scores(tmp_path, ("score",), rows_of(score, count=20), edges=edges)

    (note,) = notes(list(range(150, 180)))
    assert note.startswith("30 relations are numbers, such as 150, ")
    assert notes(list(range(9))) == notes([f"set{k}" for k in range(30)]) == []


NEAR = [  # names, and the nodes with nearly the same spelling
    ("g0", "G0"),
    ("HLA_A", "HLA-A"),
    ("hla a", "HLA-A"),
    ("HLA-A\u200b", "HLA-A"),
    ("HLA\u2013A", "HLA-A"),
    ("e\u0301tat", "\u00e9tat"),
    ("\uff34\uff3053", "TP53"),
    *[("1-Mar", node) for node in ("MARCH1", "MAR1", "MARC1", "MARCHF1", "Mar-01")],
    *[("Sep-07", node) for node in ("SEPT7", "SEPTIN7", "7-Sep")],
    ("MARCH1", "1-Mar"),
]
JOINTS = ("~", ".", "..", "--", ">", "->", "*", " x ", "\u00d7", "\u2013", "#", "^")
NOT_NEAR = ("F09G8.9", "MARCH2", "sep-1", "MAR1", "abd", "x2", "March", "+")


def test_a_name_that_is_nearly_a_node_means_this_node():
    for name, node in NEAR:
        assert meanings([name], ["other", node, "G11", "more"]) == {name: node}, name
    assert meanings(["1-Mar"], ["MARC1", "MARCH1"]) == {"1-Mar": "MARC1 or MARCH1"}
    for name in ("1-Mar", "01-Sep", "Mar-01", "2001-03-01", "2024-09-02 00:00:00"):
        assert meanings([name], ["a", "MARCH2"]) == {name: "a spreadsheet's date"}
    for joint in JOINTS:
        name = f"A{joint}HLA-B"
        assert meanings([name], ["A", "HLA-B", "c"]) == {name: "A,HLA-B"}
    assert meanings(["2"], ["DUR1", "b"]) == {"2": "part of a name with a comma"}


def test_other_names_have_no_meaning():
    """Genes of C. elegans may differ in only a number.

    A number such as 7.0, which pandas writes, does not join nodes.
    """
    for name in NOT_NEAR:
        assert meanings([name], ["F09G8.3", "MARCH1", "abc", "x1", "-"]) == {}, name
    assert meanings(["7.0", "2"], ["0", "7"]) == {}


def test_knocked_out_names_without_an_edge_are_noted(tmp_path):
    """The note lists ten names, first the names with a meaning.

    Without meanings, there is only a note if at least half of the knocked-out nodes have no edge.
    """

    def note_on(perturbed: list[str], nodes: list[str]) -> str:
        tables = tables_of([list(range(len(perturbed)))], torch.zeros(1))
        tables.genes = perturbed
        return "".join(notes_on_knocked_out(tables, "t", nodes)).removeprefix("t: ")

    known = [f"P{k}" for k in range(78)]
    nodes = [*(f"G{k}" for k in range(40)), "A-B", *known]
    unknown = [f"g{k}" for k in range(20)] + ["A_B", "zzz"]
    shown = ", ".join(f"g{k} (G{k}?)" for k in range(10))
    note = note_on([*unknown, *known], nodes)
    assert note.startswith("the table of edges does not contain 22 of 100 knocked-out nodes, ")
    assert note.endswith(f"meaning in brackets is right: {shown}")
    most = note_on([*unknown, *known[:18]], nodes)
    assert most.startswith("THE TABLE OF EDGES DOES NOT CONTAIN 22 OF 40 KNOCKED-OUT NODES, ")
    assert most.endswith(f": {shown}")
    few = note_on(["zzz", "A_B", "yyy", *known], nodes)
    assert few.startswith("the table of edges does not contain 3 of 81 ") and few.endswith(
        ": A_B (A-B?), zzz, yyy"
    )
    half = note_on(list("abxy"), list("ab"))
    assert half.startswith("THE TABLE OF EDGES DOES NOT CONTAIN 2 OF 4 KNOCKED-OUT NODES, ")
    assert half.endswith("check that all tables use the same names: x, y")
    assert note_on(list("abcxy"), list("abc")) == note_on([], list("abc")) == ""
    assert read_cells(tmp_path, ["a", "b", "c", "1-Mar"], ["a", "b", "c", "a,1-Mar"]) == []


@pytest.mark.parametrize(
    ("names", "start", "end"),
    [
        (["A", "b", "c", "d"], "THE OTHER TABLES DO NOT CONTAIN 3 OF 4", "b (B?), c (C?), d (D?)"),
        (
            ["A", "B", "c", "1-Mar"],
            "the other tables do not contain 2 of 4 names",
            "c (C?), 1-Mar (a spreadsheet's date?)",
        ),
        (["A", "B", "C", "D", "a", "b"], "", ""),  # the nodes A and B have features
        (["A", "x1", "x2"], "THE OTHER TABLES DO NOT CONTAIN 2 OF 3", "use the same names: x1, x2"),
        (["A", "B", "x1", "x2", "x3"], "", ""),  # such as a complete genome for a small graph
    ],
)
def test_names_in_the_features_are_judged_like_knocked_out_names(tmp_path, names, start, end):
    read_cells(tmp_path, ["A", "B", "C", "D"], ["A", "B", "C"])
    rows = [("gene", "length"), *((name, k) for k, name in enumerate(names))]
    features = write_table(tmp_path / "features.tsv", rows)
    files = [str(tmp_path / name) for name in ("edges.tsv", "scores.tsv")]
    notes = read_tables(*files, str(features), [], undirected=False).notes
    assert len(notes) == bool(start)
    assert "".join(notes).startswith(f"{features}: {start}" if start else "")
    assert "".join(notes).endswith(end)


# ---- Names that are refused ----------------------------------------------------------------------
def refused(folder: Path, nodes: list[str], cells: list[str]) -> str:
    """Returns the error for a table of these cells, without the folder of the table."""
    with pytest.raises(DataError) as caught:
        read_cells(folder, nodes, cells)
    return str(caught.value).removeprefix(f"{folder}/")


def test_controls_are_refused_unless_they_are_nodes(tmp_path):
    error = refused(tmp_path, ["a", "b"], ["b", "a,wild type", "a"])
    assert error.startswith("scores.tsv:3: the genes 'a,wild type' contain the control wild type, ")
    assert read_cells(tmp_path, ["a", "b", "wild type"], ["b", "a,wild type", "a"]) == []
    controls = (
        *("ctrl", "CTRL", "control", "Control_1", "WT", "wild-type", "wild type", "Wildtype"),
        *("non-targeting", "Non_Targeting", "non-targeting_00012", "NT", "NTC"),
        *("non-targeting control 3", "negative control", "neg_ctrl", "Wild_Type_3"),
    )
    assert [name for name in controls if not is_control(name)] == []
    genes = ("WT1", "NT5", "NT5E", "CTRB1", "CONTROLLER", "WTAP", "SAFE", "CTRLP", "NTC20")
    assert [name for name in genes if is_control(name)] == []


def test_joined_names_are_refused_unless_they_are_one_node(tmp_path):
    for name, level in (("a1+b2", ""), ("a1 + b2", "=0.3"), ("a1_b2", ""), ("a1; b2", "=0.3")):
        cells = ["c", "a1", f"c,{name}{level}"]
        error = refused(tmp_path, ["a1", "b2", "c"], cells)
        assert error.startswith(f"scores.tsv:4: the genes 'c,{name}{level}' contain {name}, ")
        assert "which joins names " in error and ": write a1,b2 or, " in error
        assert read_cells(tmp_path, ["a1", "b2", "c", name], cells) == []
    for joint in (";", "|", ":", "/", "&", " ", "  "):
        assert "write a1,b2" in misread(f"a1{joint}b2", {"a1", "b2"}), joint
    nodes = {"a", "b", "MT_CO1", "c", "1", "3"}
    for name, written in (("a+b+c", "a,b,c"), ("MT_CO1+a", "MT_CO1,a"), ("a+ctrl", "a")):
        assert f"write {written} or, " in misread(name, nodes)
    assert "write 3 or, " in misread("3+ctrl", nodes)
    for name in ("ctrl+ctrl", "WT + NT", "control_1", "WT_1", "NT 3"):
        assert "the control" in misread(name, nodes), name
    for name in ("a+d", "a-b", "+", "ab", "a.b"):
        assert misread(name, nodes) == "", name


def test_the_same_names_are_refused_in_tables_to_predict(tmp_path):
    tables = replace(tables_of([[0]], torch.zeros(1)), genes=["a", "b", "c"])
    for cell, problem in (("a+b", "write a,b"), ("a,ctrl", "the control")):
        path = write_table(tmp_path / "new.tsv", [("genes",), ("c",), (cell,)])
        with pytest.raises(DataError, match=rf"new\.tsv:3: .*{problem}"):
            list(read_sets(str(path), tables))


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("b,a=0, 5", "contain a level with a decimal comma"),
        ("a,-", "contain the missing value -, "),
        ("a,None", "contain the missing value None, "),
        ("a=0.3;b", "contain 'a=0.3;b', which is not a node such as A, "),
    ],
)
def test_other_text_that_is_not_a_node_is_refused(tmp_path, cell, problem):
    error = refused(tmp_path, ["a", "b"], ["a", cell, "b"])
    assert error.startswith(f"scores.tsv:3: the genes '{cell}' {problem}")
    assert read_cells(tmp_path, ["a", "b", "5"], ["a", "a=0.5,5", "b"]) == []


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
    assert len(tables.notes) == 3
    monkeypatch.setattr(parts, "is_here", lambda module: module != "data_notes")
    without = load(options)
    assert without.notes == []
    assert without.fingerprint() == tables.fingerprint()
    assert unknown_nodes(["A", "x"], Mock(genes=["a"])).endswith(": A, x")


def test_the_example_has_no_notes():
    files = [str(ROOT / "example" / name) for name in ("edges.tsv", "scores.tsv")]
    assert read_tables(*files, "", [], undirected=False).notes == []


def test_details_count_rows_scores_nodes_and_features():
    """Rows by number of knock-outs, replicates, missing scores, unseen nodes, and bare nodes."""
    sets = [[0], [0], [1, 2], [1, 2], [], [3], [4]]
    tables = tables_of(sets, torch.tensor([[1.0, math.nan]] * 3 + [[0.0, 2.0]] * 4))
    tables.genes = list("abcde")
    tables.split = torch.tensor([-1, 0, 0, 0, 0, 1, 2], dtype=torch.int8)
    tables.edge_index = torch.tensor([[0, 1], [1, 2]])
    text = (
        "1 row with 0 knock-outs, 4 rows with 1 knock-out, 2 rows with 2 knock-outs; "
        "5 distinct sets; 1 row in no split; rows with each score: 7, 4; "
        "5 knocked-out nodes, 2 of them without edges, 2 in no training row with a score"
    )
    assert details(tables) == text
    tables.feature_names = ["a"]
    tables.features = torch.tensor([[0.0], *[[1.0]] * (len(tables.genes) - 1)])
    tables.left_out = ["b"]
    more = "; unused columns: b; 1 node feature; 1 node without features"
    assert details(tables) == f"{text}{more}"
    tables.y = torch.arange(7 * 11, dtype=torch.float64).view(7, 11)
    tables.y[0, 3] = math.nan
    assert "rows with each score: 6 to 7; " in details(tables)
