"""Notes on what tables have in the place of scores, codes, units, relations, weights and names."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import data_tables
import parts
from data import DataConfig, load
from data_cells import Rows
from data_notes import behind_gap, kind_of_values, meanings, note_on_unknown, notes_on
from data_tables import read_tables
from errors import DataError
from predict_sets import unknown_nodes
from tests.template.fixtures import ROOT, write_table
from tests.tools.cells import read_cells

NODES = [f"q{k:02d}" for k in range(30)]
RING = [(node, other, "x") for node, other in zip(NODES, NODES[1:] + NODES[:1], strict=True)]
EDGE_HEADER = ("source", "target", "relation")


def notes_on_scores(
    folder: Path, header: tuple, rows: list[tuple], scores: tuple = ()
) -> list[str]:
    """Returns the notes on a table of knock-outs, without its name."""
    edges = write_table(folder / "edges.tsv", [EDGE_HEADER, *RING])
    path = write_table(folder / "scores.tsv", [("genes", *header), *rows])
    notes = read_tables(str(edges), str(path), "", list(scores), undirected=False).notes
    return [note.removeprefix(f"{path}:") for note in notes]


def rows_of(*columns: Callable[[random.Random, int], object], count: int = 200) -> list[tuple]:
    """Returns rows of one knock-out each, with a cell that each function draws for its number."""
    draw = random.Random(0)
    rows = []
    for k in range(count):
        rows.append((NODES[k % 30], *(column(draw, k) for column in columns)))
    return rows


def score(draw: random.Random, k: int) -> str:
    return f"{draw.gauss(0, 1):.4f}"


def notes_on_edges(folder: Path, header: tuple, rows: list[tuple]) -> list[str]:
    """Returns the notes on a table of edges, without its name."""
    path = write_table(folder / "edges.tsv", [(*EDGE_HEADER, *header), *rows])
    scores = write_table(folder / "scores.tsv", [("genes", "score"), *rows_of(score, count=20)])
    notes = read_tables(str(path), str(scores), "", [], undirected=False).notes
    return [note.removeprefix(f"{path}: ") for note in notes]


# ---- Columns that are no scores ------------------------------------------------------------------
def test_columns_of_a_published_table_that_are_no_scores_are_named(tmp_path):
    header = ("score", "P-value", "batch", "replicate", "n_cells", "plate 4")
    rows = rows_of(
        score,
        lambda draw, k: f"{draw.random():.4g}",
        lambda draw, k: 1 + k % 4,
        lambda draw, k: 1 + k % 2,
        lambda draw, k: draw.randrange(20, 900),
        lambda draw, k: k % 3,
    )
    (note,) = notes_on_scores(tmp_path, header, rows)
    assert note.endswith(
        "these may be none: P-value (name), batch (name, few values), replicate (name, few "
        "values), n_cells (name, whole numbers), plate 4 (few values): write data.scores=[score]"
    )
    assert notes_on_scores(tmp_path, header, rows, scores=("score", "batch")) == []
    assert notes_on_scores(tmp_path, header[1:2], [row[:1] + row[2:3] for row in rows]) == []


@pytest.mark.parametrize(
    "name",
    [
        *("P-value", "pvalue", "adj.P.Val", "p_adj", "FDR", "q-value", "growth_sd", "SE", "std"),
        *("stderr", "Standard Error", "variance", "batch", "plate_id", "replicate", "level"),
        *("fold", "dose", "temperature", "cell_count", "nCells", "num_reads", "weights"),
        "Double mutant fitness standard deviation",
    ],
)
def test_a_column_is_judged_by_its_name(tmp_path, name):
    rows = rows_of(score, score, count=10)
    (note,) = notes_on_scores(tmp_path, ("growth", name), rows)
    assert f"{name} (name): write data.scores=[growth]" in note
    (note,) = notes_on_scores(tmp_path, ("NO", name), rows)
    assert note.endswith("write data.scores=['NO']")


def test_names_of_scores_and_of_nodes_are_not_noted(tmp_path):
    names = ("log2 fold change", "expression level", "dose_response", "essential", "posed", "NSE")
    columns = [score] * (len(names) + 1)
    assert notes_on_scores(tmp_path, (*names, "rep1"), rows_of(*columns, count=10)) == []
    RING.append(("SE", "q00", "x"))
    try:
        assert notes_on_scores(tmp_path, ("q01", "SE"), rows_of(score, score, count=10)) == []
    finally:
        RING.pop()


def test_values_speak_against_a_column_only_beside_others(tmp_path):
    def grade(draw, k):
        return draw.randrange(4)

    assert notes_on_scores(tmp_path, ("a", "b"), rows_of(grade, grade)) == []
    (note,) = notes_on_scores(tmp_path, ("a", "b"), rows_of(grade, score))
    assert "these may be none: a (few values): write data.scores=[b]" in note


def test_the_kind_of_values_is_found_behind_the_first_ones():
    values = torch.cat([torch.zeros(5000), torch.rand(1000)]).double()
    assert kind_of_values(values) == ""
    assert kind_of_values(values.round()) == "few values"
    assert kind_of_values(torch.arange(100.0)) == "whole numbers"
    assert kind_of_values(torch.zeros(20)) == ""  # as they are few


# ---- Codes and units -----------------------------------------------------------------------------
@pytest.mark.parametrize("every", [3, 5, 17, 40])
@pytest.mark.parametrize("code", [-999, 1e6, -99])
def test_codes_of_missing_scores_are_noted_however_many_they_are(tmp_path, every, code):
    rows = rows_of(lambda draw, k: score(draw, k) if k % every else code)
    (note,) = notes_on_scores(tmp_path, ("score",), rows)
    count = len(range(0, 200, every))
    assert note.startswith(f"2: the score is {code:g}, far from most, as are {count} scores of 1 ")


def test_codes_in_one_of_many_columns_are_noted(tmp_path, monkeypatch):
    """Of so many, every third row is looked at."""
    monkeypatch.setattr("data_notes.MOST_SCORES", 4000)
    rows = rows_of(*[score] * 39, lambda draw, k: -999 if k % 9 == 3 else score(draw, k))
    (note,) = notes_on_scores(tmp_path, tuple(f"s{k}" for k in range(40)), rows)
    assert note.startswith("5: the s39 is -999, far from most, as are 22 scores of 1 columns")


def test_scores_of_several_modes_or_with_long_tails_are_no_codes():
    """Dead strains beside living ones, scores of two or three values, and long tails."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, generator=generator, dtype=torch.float64)
    dead = (1 + 0.1 * normal).where(torch.arange(2000) % 20 > 0, 0.0)
    two = (normal > 1).double()
    three = two - (normal < -1.5).double()
    tails = normal**5
    missing = normal.where(normal < 1, torch.nan)
    y = torch.stack([normal, dead, two, three, tails, missing], dim=1)
    assert not behind_gap(y).any()
    assert not behind_gap(torch.full((100, 1), torch.nan)).any()


def test_one_sd_of_scores_in_other_units_is_noted(tmp_path):
    def large(draw, k):
        return f"{draw.gauss(0, 1000):.1f}"

    rows = rows_of(score, large, lambda draw, k: 0.7)
    (note,) = notes_on_scores(tmp_path, ("a", "b", "sd"), rows)
    assert note.startswith(" sd is in the unit of all scores, but the deviations of b and a differ")
    assert notes_on_scores(tmp_path, ("a", "b", "weight"), rows) == []
    assert (
        notes_on_scores(tmp_path, ("a", "b", "sd"), rows_of(score, score, lambda draw, k: 0.7))
        == []
    )
    assert notes_on_scores(tmp_path, ("a", "b", "sd"), rows, scores=("a",)) == []


# ---- Edges ---------------------------------------------------------------------------------------
def test_many_relations_that_are_numbers_are_noted(tmp_path):
    rows = [(source, target, 150 + k) for k, (source, target, _) in enumerate(RING)]
    (note,) = notes_on_edges(tmp_path, (), rows)
    assert note.startswith("30 relations are numbers, such as 150: if these are scores, name that ")
    few = [(source, target, 1 + k % 9) for k, (source, target, _) in enumerate(RING)]
    named = [(source, target, f"set{k}") for k, (source, target, _) in enumerate(RING)]
    assert notes_on_edges(tmp_path, (), few) == notes_on_edges(tmp_path, (), named) == []


@pytest.mark.parametrize("name", ["combined_score", "importance", "Score", "weights", "edgeWeight"])
def test_a_column_of_edges_that_looks_like_a_weight_is_noted(tmp_path, name):
    rows = [(*edge, 0.5 + k) for k, edge in enumerate(RING)]
    (note,) = notes_on_edges(tmp_path, (name,), rows)
    assert note.startswith(f"the column {name} weighs no edge, ")
    assert notes_on_edges(tmp_path, ("length",), rows) == []
    weighted = [(*row, 2) for row in rows]
    assert notes_on_edges(tmp_path, (name, "weight"), weighted) == []


@pytest.mark.parametrize(
    ("name", "same"),
    [("HLA\u2013DRA", "HLA-DRA"), ("HLA\u2011DRA", "HLA-DRA"), ("ge\u0301ne", "g\u00e9ne")],
)
def test_nodes_of_the_edges_in_two_forms_of_unicode_are_noted(tmp_path, name, same):
    rows = [*RING, (name, "q00", "x"), (same, "q01", "x")]
    (note,) = notes_on_edges(tmp_path, (), rows)
    assert note.startswith("1 nodes are named as others, in other characters of Unicode: ")
    assert f"{name} ({same}?)" in note or f"{same} ({name}?)" in note
    assert notes_on_edges(tmp_path, (), rows[:-1]) == []


# ---- Other readers, and no notes -----------------------------------------------------------------
def test_a_row_of_another_reader_is_named_by_its_line(tmp_path, monkeypatch):
    """Nothing opens the file again as if it were a table."""
    draw = random.Random(0)
    samples = [{"genes": NODES[k % 30], "score": draw.gauss(0, 1)} for k in range(200)]
    samples[70]["score"] = 500.0
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    edges = write_table(tmp_path / "edges.tsv", [EDGE_HEADER, *RING])
    read_header = data_tables.read_header
    read_rows = data_tables.read_rows

    def header_of(file: str, *arguments: object, **options: object) -> list[str]:
        if file == str(path):
            return ["genes", "score"]
        return read_header(file, *arguments, **options)

    def rows_of_file(file: str, *arguments: object, **options: object) -> Iterator[Rows]:
        if file != str(path):
            yield from read_rows(file, *arguments, **options)
            return
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        cells = {name: [str(line[name]) for line in lines] for name in ("genes", "score")}
        yield Rows(file, range(1, 201), cells)

    monkeypatch.setattr(data_tables, "read_header", header_of)
    monkeypatch.setattr(data_tables, "read_rows", rows_of_file)
    tables = read_tables(str(edges), str(path), "", [], undirected=False)
    (note,) = tables.notes
    assert note.startswith(f"{path}:71: the score makes ")
    tables.line = None
    (note,) = notes_on(tables, str(edges), str(path), "", [], are_chosen=True)
    assert note.startswith(f"{path}: row 70: the score makes ")


def test_without_the_part_tables_are_read_and_refused_the_same(tmp_path, monkeypatch):
    rows = rows_of(score, lambda draw, k: score(draw, k) if k else 500, lambda draw, k: k % 3)
    rows.append(("Q01", 1, 1, 1))
    header = ("a", "b", "batch")
    assert len(notes_on_scores(tmp_path, header, rows)) == 3
    files = (str(tmp_path / "edges.tsv"), str(tmp_path / "scores.tsv"), "")
    tables = read_tables(*files, [], undirected=False)
    monkeypatch.setattr(parts, "is_here", lambda module: module != "data_notes")
    assert notes_on_scores(tmp_path, header, rows) == []
    assert read_tables(*files, [], undirected=False).fingerprint() == tables.fingerprint()
    chunk = Mock(genes=["a"])
    assert unknown_nodes(["A", "x"], chunk) == "2 nodes are not in the graph: A, x"
    with pytest.raises(DataError, match=r"scores\.tsv:202: .* have ctrl, a control"):
        notes_on_scores(tmp_path, header, [*rows[:200], ("q01,ctrl", 1, 1, 1)])


def test_the_example_has_no_note():
    files = [str(ROOT / "example" / name) for name in ("edges.tsv", "scores.tsv")]
    assert read_tables(*files, "", [], undirected=False).notes == []


# ---- Names that nearly are nodes -----------------------------------------------------------------
NEAR = [  # a name, and the node that it nearly is
    ("g0", "G0"),
    ("yal001c", "YAL001C"),
    ("HLA_A", "HLA-A"),
    ("hla a", "HLA-A"),
    ("HLA-A\u200b", "HLA-A"),
    ("ENSG01.12", "ENSG01"),
    ("G1.1", "G1"),
    ("G1_1", "G1"),
    ("G1+new", "G1"),
    ("HLA\u2013A", "HLA-A"),
    ("HLA\u2212A", "HLA-A"),
    ("TP53\u2060", "TP53"),
    ("e\u0301tat", "\u00e9tat"),
    ("\uff34\uff3053", "TP53"),
    ("G1-1", "G1"),
    ("1-Mar", "MARCH1"),
    ("Mar-01", "MARCHF1"),
    ("MARCH1", "MARCHF1"),
    ("1-Mar", "MAR1"),
    ("2-Sep", "SEPT2"),
    ("02-Sep", "SEPTIN2"),
    ("1-DEC", "DEC1"),
    ("4-Oct", "OCT4"),
]
DATES = ("1-Mar", "01-Sep", "Mar-01", "2001-03-01", "2024-09-02 00:00:00")


def test_a_name_is_nearly_a_node():
    for name, node in NEAR:
        assert meanings([name], ["other", node, "G11", "more"]) == {name: node}, name


@pytest.mark.parametrize(
    "joint", ["-", "~", ".", "..", "--", ">", "->", "*", " x ", "\u00d7", "\u2013", "#", "^"]
)
def test_pairs_that_any_sign_joins_are_noted(tmp_path, joint):
    nodes = ["A", "HLA-B", "c"]
    (note,) = read_cells(tmp_path, nodes, ["A", f"A{joint}HLA-B", "c,HLA-B"])
    assert note == f"1 of 4 knocked-out nodes have no edge: A{joint}HLA-B (A,HLA-B?)"
    joined = f"A{joint}c{joint}HLA-B"
    assert meanings([joined], nodes) == {joined: "A,c,HLA-B"}


def test_a_number_of_pandas_joins_no_nodes():
    assert meanings(["7.0"], ["0", "7"]) == {"7.0": "7"}


def test_a_guide_is_of_the_gene_and_not_of_another_one():
    for name in ("GENE1-1", "GENE1_1", "GENE1.1"):
        assert meanings([name], ["GENE11", "GENE1"]) == {name: "GENE1"}
        assert meanings([name], ["GENE11"]) == {}


def test_other_names_are_no_nodes():
    """Two versions are two names, as in C. elegans."""
    nodes = ["F09G8.3", "MARCH1", "abc", "x1", "-"]
    for name in ("F09G8.9", "MARCH2", "sep-1", "abd", "x2", "March", "+"):
        assert meanings([name], nodes) == {}, name


def test_a_spreadsheets_date_that_no_edge_has_is_named_whatever_the_nodes_are(tmp_path):
    for name in DATES:
        assert meanings([name], ["a", "MARCH2"]) == {name: "a spreadsheet's date"}
    note = "1 of 4 knocked-out nodes have no edge: 1-Mar (a spreadsheet's date?)"
    assert read_cells(tmp_path, ["a", "b", "c"], ["a", "b", "c", "a,1-Mar"]) == [note]
    assert read_cells(tmp_path, ["a", "b", "c", "1-Mar"], ["a", "b", "c", "a,1-Mar"]) == []


def test_a_spreadsheets_date_among_the_features_is_named(tmp_path):
    read_cells(tmp_path, ["a", "b", "MARCH1"], ["a", "b", "MARCH1"])
    rows = [("gene", "length"), ("a", 1), ("b", 2), ("other", 3), ("1-Mar", 4), ("2-Sep", 5)]
    options = DataConfig(
        edges=str(tmp_path / "edges.tsv"),
        perturbations=str(tmp_path / "scores.tsv"),
        features=str(write_table(tmp_path / "features.tsv", rows)),
        cache_dir=str(tmp_path / "cache"),
    )
    (note,) = load(options).notes
    named = "1-Mar (MARCH1?), 2-Sep (a spreadsheet's date?)"
    assert note.endswith(f"features.tsv: 2 names are no nodes: {named}")


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["A", "b", "c", "d"], "MOST NAMES, 3 of 4, ARE NO NODES: b (B?), c (C?), d (D?)"),
        (["A", "B", "c", "other"], "1 names are no nodes: c (C?)"),
        (["A", "B", "C", "D", "E", "F"], ""),
        (["A", "B", "C", "D", "a", "b"], ""),  # these nodes have features
        (["A", "x1", "x2"], "MOST NAMES, 2 of 3, ARE NO NODES: x1, x2"),
        (["A", "B", "x1", "x2", "x3"], ""),  # a whole genome for a small graph
        (["A"], ""),
    ],
)
def test_names_of_the_features_are_judged_as_those_of_knock_outs(tmp_path, names, note):
    read_cells(tmp_path, ["A", "B", "C", "D"], ["A", "B", "C"])
    rows = [("gene", "length"), *((name, k) for k, name in enumerate(names))]
    options = DataConfig(
        edges=str(tmp_path / "edges.tsv"),
        perturbations=str(tmp_path / "scores.tsv"),
        features=str(write_table(tmp_path / "features.tsv", rows)),
        cache_dir=str(tmp_path / "cache"),
    )
    notes = [text.partition("features.tsv: ")[2] for text in load(options).notes]
    notes = [text for text in notes if "says nothing" not in text]  # of one node alone
    assert notes == ([note] if note else [])


def test_a_note_shows_ten_names_first_those_that_mean_something():
    nodes = [f"G{k}" for k in range(40)] + ["A-B"]
    unknown = [f"g{k}" for k in range(20)] + ["A_B", "zzz"]
    shown = ", ".join(f"g{k} (G{k}?)" for k in range(10))
    note = f"22 of 100 knocked-out nodes have no edge: {shown}"
    assert note_on_unknown(unknown, nodes, 100) == note
    most = note_on_unknown(unknown, nodes, 40)
    assert most == f"MOST KNOCKED-OUT NODES, 22 of 40, HAVE NO EDGE: {shown}"
    few = note_on_unknown(["zzz", "A_B", "yyy"], nodes, 100)
    assert few == "3 of 100 knocked-out nodes have no edge: A_B (A-B?), zzz, yyy"


def test_nodes_without_edges_that_look_like_no_other_are_not_noted(tmp_path):
    assert note_on_unknown([], ["a"], 5) == ""
    assert note_on_unknown(["x", "y"], ["a"], 5) == ""
    assert read_cells(tmp_path, ["a", "b", "c"], ["a", "b", "c", "x"]) == []
    assert read_cells(tmp_path, ["a", "b", "c"], ["a", "b", "c", "A"]) == [
        "1 of 4 knocked-out nodes have no edge: A (a?)"
    ]
