"""Notes on what tables have in the place of scores, codes, units, relations and weights."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_notes import behind_gap, kind_of_values
from data_tables import read_tables
from tests.conftest import ROOT, write_table

NODES = [f"q{k:02d}" for k in range(30)]
RING = [(node, other, "x") for node, other in zip(NODES, NODES[1:] + NODES[:1], strict=True)]
EDGE_HEADER = ("source", "target", "relation")


def notes_on(folder: Path, header: tuple, rows: list[tuple], scores: tuple = ()) -> list[str]:
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
    (note,) = notes_on(tmp_path, header, rows)
    assert note.endswith(
        "these may be none: P-value (name), batch (name, few values), replicate (name, few "
        "values), n_cells (name, whole numbers), plate 4 (few values): write data.scores=[score]"
    )
    assert notes_on(tmp_path, header, rows, scores=("score", "batch")) == []
    assert notes_on(tmp_path, header[1:2], [row[:1] + row[2:3] for row in rows]) == []


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
    (note,) = notes_on(tmp_path, ("growth", name), rows)
    assert f"{name} (name): write data.scores=[growth]" in note
    (note,) = notes_on(tmp_path, ("NO", name), rows)
    assert note.endswith("write data.scores=['NO']")


def test_names_of_scores_and_of_nodes_are_not_noted(tmp_path):
    names = ("log2 fold change", "expression level", "dose_response", "essential", "posed", "NSE")
    columns = [score] * (len(names) + 1)
    assert notes_on(tmp_path, (*names, "rep1"), rows_of(*columns, count=10)) == []
    RING.append(("SE", "q00", "x"))
    try:
        assert notes_on(tmp_path, ("q01", "SE"), rows_of(score, score, count=10)) == []
    finally:
        RING.pop()


def test_values_speak_against_a_column_only_beside_others(tmp_path):
    def grade(draw, k):
        return draw.randrange(4)

    assert notes_on(tmp_path, ("a", "b"), rows_of(grade, grade)) == []
    (note,) = notes_on(tmp_path, ("a", "b"), rows_of(grade, score))
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
    (note,) = notes_on(tmp_path, ("score",), rows)
    count = len(range(0, 200, every))
    assert note.startswith(f"2: the score is {code:g}, far from most, as are {count} scores of 1 ")


def test_codes_in_one_of_many_columns_are_noted(tmp_path, monkeypatch):
    """Of so many, every third row is looked at."""
    monkeypatch.setattr("data_notes.MOST_SCORES", 4000)
    rows = rows_of(*[score] * 39, lambda draw, k: -999 if k % 9 == 3 else score(draw, k))
    (note,) = notes_on(tmp_path, tuple(f"s{k}" for k in range(40)), rows)
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
    (note,) = notes_on(tmp_path, ("a", "b", "sd"), rows)
    assert note.startswith(" sd is in the unit of all scores, but the deviations of b and a differ")
    assert notes_on(tmp_path, ("a", "b", "weight"), rows) == []
    assert notes_on(tmp_path, ("a", "b", "sd"), rows_of(score, score, lambda draw, k: 0.7)) == []
    assert notes_on(tmp_path, ("a", "b", "sd"), rows, scores=("a",)) == []


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
    weighted = [(*row, 1) for row in rows]
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


def test_the_example_has_no_note():
    files = [str(ROOT / "example" / name) for name in ("edges.tsv", "scores.tsv")]
    assert read_tables(*files, "", [], undirected=False).notes == []
