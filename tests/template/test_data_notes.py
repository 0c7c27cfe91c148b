"""Notes on what tables have in the place of scores, codes, units, relations, weights and names."""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_uppercase
from unittest.mock import Mock

import pytest
import torch

import data_tables
import parts
from data import DataConfig, load
from data_cells import Rows
from data_notes import codes, details, kind_of_values, meanings, note_on_unknown, notes_on
from data_tables import read_tables
from predict_sets import unknown_nodes
from tests.sets import tables_of
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
        *("fold", "dose", "temperature", "nCells", "num_reads", "weights"),
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
    names = ("log2 fold change", "expression level", "dose_response", "essential", "log counts")
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
    assert kind_of_values(torch.arange(100.0) // 2) == "whole numbers"
    assert kind_of_values(torch.arange(100.0)) == ""  # as they may be ranks
    assert kind_of_values(torch.zeros(20)) == ""  # as they are few


# ---- Codes and units -----------------------------------------------------------------------------
@pytest.mark.parametrize("every", [3, 5, 17, 40])
@pytest.mark.parametrize("code", [-999, 1e6, -99])
def test_codes_of_missing_scores_are_noted_however_many_they_are(tmp_path, every, code):
    rows = rows_of(lambda draw, k: score(draw, k) if k % every else code)
    *_, note = notes_on_scores(tmp_path, ("score",), rows)
    count = len(range(0, 200, every))
    assert note.startswith(f" {count} values of the column score are {code:g}, far from all others")


def normal(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("share", [0.01, 0.4, 0.8])
@pytest.mark.parametrize(
    ("spread", "found"), [(1, [-999, 999]), (1, [-99]), (1, [1e6]), (100, [-999]), (1e3, [1e30])]
)
def test_codes_are_found_on_both_sides_and_in_most_rows(share, spread, found):
    values = spread * normal(400)
    for k, code in enumerate(found):
        values[k :: round(len(found) / min(share, 0.4))] = code
    if share == 0.8:
        values = torch.cat([values, torch.full((1600,), float(found[0]), dtype=torch.float64)])
    assert sorted(codes(values).tolist()) == sorted(found)


def test_scores_of_several_modes_or_with_long_tails_are_no_codes():
    """Dead strains beside living ones, scores of two or three values, and long tails."""
    scores = normal(2000)
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


def test_codes_among_the_features_are_noted(tmp_path):
    edges = write_table(tmp_path / "edges.tsv", [EDGE_HEADER, *RING])
    scores = write_table(tmp_path / "scores.tsv", [("genes", "score"), *rows_of(score)])
    rows = [
        (node, k % 7 / 9 + k, -999 if k % 9 == 1 else 1000 + 20 * k) for k, node in enumerate(NODES)
    ]
    path = write_table(tmp_path / "features.tsv", [("gene", "a", "b"), *rows])
    (note,) = read_tables(str(edges), str(scores), str(path), [], undirected=False).notes
    assert note.startswith(f"{path}: 4 values of the column b are -999, far from all others: where")


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
    [
        ("HLA\u2013DRA", "HLA-DRA"),
        ("HLA\u2011DRA", "HLA-DRA"),
        ("ge\u0301ne", "g\u00e9ne"),
        ("Q03", "q03"),
        ("q_03", "q03"),
        ("\uff5103", "q03"),
    ],
)
def test_nodes_of_the_edges_in_two_spellings_are_noted(tmp_path, name, same):
    rows = [*RING, (name, "q10", "x"), ("q10", name, "x"), (same, "q11", "x"), ("q11", same, "x")]
    (note,) = notes_on_edges(tmp_path, (), rows)
    assert note.startswith("1 nodes are named as others but for case or signs: ")
    assert f"{name} ({same}?)" in note or f"{same} ({name}?)" in note
    assert notes_on_edges(tmp_path, (), [*RING, *rows[-2:]]) == []


@pytest.mark.parametrize("code", [-999, 99999])
def test_codes_among_the_features_of_edges_are_noted(tmp_path, code):
    rows = [
        (*edge, 3 + k % 7, code if k % 9 == 1 else 1000 + 20 * k) for k, edge in enumerate(RING)
    ]
    (note,) = notes_on_edges(tmp_path, ("a", "b"), rows)
    assert note.startswith(f"4 values of the column b are {code}, far from all others: where that")
    assert notes_on_edges(tmp_path, ("a",), [row[:4] for row in rows]) == []


def test_names_that_are_told_apart_by_case_are_not_noted(tmp_path):
    """As all proteins and their genes are."""
    proteins = [(f"Ara{k:02}", f"ara{(k + 3) % 30:02}", "regulates") for k in range(30)]
    assert notes_on_edges(tmp_path, (), [*RING, *proteins]) == []


def test_dates_and_numbers_among_the_ends_of_edges_are_noted(tmp_path):
    odd = [("1-Mar", "q00", "x"), ("q01", "2.31E+13", "x"), ("0.7", "q02", "x")]
    (note,) = notes_on_edges(tmp_path, (), [*RING, *odd])
    assert note.startswith("3 nodes are dates or numbers, as nearly all others are not: 0.7, 1-Mar")
    numbers = [(str(k), str(k + 1), "x") for k in range(30)]
    assert notes_on_edges(tmp_path, (), [*RING, *numbers]) == []


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


def test_without_the_part_tables_are_read_the_same(tmp_path, monkeypatch):
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


def test_the_example_has_no_note():
    files = [str(ROOT / "example" / name) for name in ("edges.tsv", "scores.tsv")]
    assert read_tables(*files, "", [], undirected=False).notes == []


# ---- Controls and levels -------------------------------------------------------------------------
def notes_on_sets(folder: Path, sets: list[str]) -> list[str]:
    draw = random.Random(0)
    return notes_on_scores(folder, ("score",), [(genes, score(draw, 0)) for genes in sets])


SINGLES = NODES * 4
PAIRS = [f"{a},{b}" for a in NODES for b in NODES if a < b]


@pytest.mark.parametrize("name", ["NegCtrl0", "AAVS1", "DMSO", "mock", "LacZ", "no such word"])
def test_a_name_without_an_edge_in_many_rows_may_be_a_control(tmp_path, name):
    tables = {
        "beside nodes": SINGLES + [f"{node},{name}" for node in NODES],
        "alone": SINGLES + [name] * 10,
        "alone beside pairs": PAIRS + [name] * 30,
    }
    for sets in tables.values():
        (note,) = notes_on_sets(tmp_path, sets)
        assert note.startswith(
            f" {name} without an edge, as nearly all others have one, stands in "
        )
        assert "if it is a control, leave it out, as an intact sample has an empty cell" in note
        assert "if it is a node, give it an edge, such as a loop" in note


def test_numbered_controls_count_together(tmp_path):
    guides = [f"{node},INTERGENIC_{k % 5}" for k, node in enumerate(NODES)]
    (note,) = notes_on_sets(tmp_path, SINGLES + guides)
    assert note.startswith(" INTERGENIC_0, INTERGENIC_1, INTERGENIC_2, INTERG")


def test_nodes_without_an_edge_in_as_many_rows_as_others_are_no_controls(tmp_path):
    queries = [f"{a},{b}" for a in ("q00", "q01", "new") for b in NODES[2:]]
    families = [f"LOC{k}" for k in range(9)]
    many_unknown = SINGLES + [f"x{k}y" for k in range(10)] * 2 + ["AAVS1"] * 20
    for sets in (
        PAIRS + [f"{node},new" for node in NODES],
        queries,
        SINGLES + families,
        many_unknown,
    ):
        assert notes_on_sets(tmp_path, sets) == []


def test_a_level_behind_the_last_of_several_names_is_noted(tmp_path):
    singles = [f"{node}=0.2" for node in NODES]
    (note,) = notes_on_sets(tmp_path, singles + [f"{pair}=0.2" for pair in PAIRS])
    assert "A,B=0.2 deletes A and keeps 0.2 of B" in note
    both = [f"{pair}=0.2".replace(",", "=0.2,") for pair in PAIRS]
    for sets in (singles + both, NODES + [f"{pair}=0.2" for pair in PAIRS], singles, both):
        assert notes_on_sets(tmp_path, sets) == []


# ---- Names that nearly are nodes -----------------------------------------------------------------
NEAR = [  # a name, and the node that it nearly is
    ("g0", "G0"),
    ("yal001c", "YAL001C"),
    ("HLA_A", "HLA-A"),
    ("hla a", "HLA-A"),
    ("HLA-A\u200b", "HLA-A"),
    ("HLA\u2013A", "HLA-A"),
    ("HLA\u2212A", "HLA-A"),
    ("TP53\u2060", "TP53"),
    ("e\u0301tat", "\u00e9tat"),
    ("\uff34\uff3053", "TP53"),
]
DATES = ("1-Mar", "01-Sep", "Mar-01", "2001-03-01", "2024-09-02 00:00:00")


def test_a_name_is_nearly_a_node():
    for name, node in NEAR:
        assert meanings([name], ["other", node, "G11", "more"]) == {name: node}, name


@pytest.mark.parametrize(
    "joint", ["~", ".", "..", "--", ">", "->", "*", " x ", "\u00d7", "\u2013", "#", "^"]
)
def test_pairs_that_any_sign_joins_are_noted(tmp_path, joint):
    nodes = ["A", "HLA-B", "c"]
    (note,) = read_cells(tmp_path, nodes, ["A", f"A{joint}HLA-B", "c,HLA-B"])
    assert note == f"1 of 4 knocked-out nodes have no edge: A{joint}HLA-B (A,HLA-B?)"
    joined = f"A{joint}c{joint}B"
    assert meanings([joined], [*nodes, "B"]) == {joined: "A,c,B"}


def test_a_number_of_pandas_joins_no_nodes():
    assert meanings(["7.0"], ["0", "7"]) == {}


FORMS = ("A_KO", "A KO", "A.1", "A-1", "A(KO)", "\u0394A", "Ag1", "sgA", "A@0.2", "9606.A", "A-ko")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_several_nodes_is_noted(form):
    nodes = [*NODES, "x-y", "x_z", "a b", "c.d", "g#", "h@(i)"]
    written = [form.replace("A", node) for node in nodes[:3]]
    assert meanings(written, nodes) == dict(zip(written, nodes[:3], strict=True))


def test_names_that_only_begin_as_others_are_no_forms():
    """Of one name alone, where nodes have that sign; of numbers; and where two nodes differ so."""
    genes = [f"YAL{k:03}C" for k in range(40)]
    assert meanings(["YAL003C-A", "YAL004C-A", "YAL005C-A"], genes) == {}
    assert meanings(["YAL003C-x1"], [*genes, "YAL001C-A"]) == {}
    unknown = ["YAL003C-A", "YAL004C-A", "YAL005C-B"]
    assert meanings(unknown, [*genes, "YAL001C-A", "YAL001C-B"]) == {}
    assert meanings(["RPL11", "RPL21", "RPL31"], ["RPL1", "RPL2", "RPL3"]) == {}
    assert meanings(["RPL1P3", "RPL2P4", "RPS3P1"], ["RPL1", "RPL2", "RPS3", "RPS3P7"]) == {}
    assert meanings(["abx", "cdx", "efx"], ["ab", "cd", "ef"]) == {}


def test_names_that_stand_beside_those_around_which_they_have_text_are_others(tmp_path):
    """As a gene and the antisense RNA of it, but not where most have none.

    A tenth of the names or more are forms of the others.
    """
    nodes = ["TP53", "HOTAIR", "MYC", *(f"GENE{letter}" for letter in ascii_uppercase)]
    antisense = ["TP53-AS1", "HOTAIR-AS1", "MYC-AS2"]
    assert read_cells(tmp_path, nodes, [*nodes, *antisense]) == []
    for knocked_out in (nodes[2:], nodes[:20]):
        (note,) = read_cells(tmp_path, nodes, [*knocked_out, *antisense])
        assert "knocked-out nodes have no edge: HOTAIR-AS1 (HOTAIR?), MYC-AS2" in note


def test_the_part_of_a_name_with_a_comma_is_named(tmp_path):
    note = "1 of 4 knocked-out nodes have no edge: 2 (part of a name with a comma?)"
    assert read_cells(tmp_path, ["DUR1", "b", "c"], ["b", "c", '"DUR1,2"']) == [note]
    assert read_cells(tmp_path, ["DUR1", "b", "1"], ["b", "1", '"DUR1,2"']) == []


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
    named = "1-Mar (a spreadsheet's date?), 2-Sep (a spreadsheet's date?)"
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
    assert notes == ([note] if note else [])


def test_a_note_shows_ten_names_first_those_that_mean_something():
    known = [f"P{k}" for k in range(78)]
    nodes = [*(f"G{k}" for k in range(40)), "A-B", *known]
    unknown = [f"g{k}" for k in range(20)] + ["A_B", "zzz"]
    shown = ", ".join(f"g{k} (G{k}?)" for k in range(10))
    note = f"22 of 100 knocked-out nodes have no edge: {shown}"
    assert note_on_unknown([*unknown, *known], nodes) == note
    most = note_on_unknown([*unknown, *known[:18]], nodes)
    assert most == f"MOST KNOCKED-OUT NODES, 22 of 40, HAVE NO EDGE: {shown}"
    few = note_on_unknown(["zzz", "A_B", "yyy", *known], nodes)
    assert few == "3 of 81 knocked-out nodes have no edge: A_B (A-B?), zzz, yyy"


def test_what_a_run_says_of_its_tables():
    """Rows by size, replicates, missing scores, nodes that are not trained on or not described."""
    sets = [[0], [0], [1, 2], [1, 2], [], [3], [4]]
    tables = tables_of(sets, torch.tensor([[1.0, math.nan]] * 3 + [[0.0, 2.0]] * 4))
    tables.genes = list("abcde")
    tables.split = torch.tensor([0, 0, 0, 0, 0, 1, 2], dtype=torch.int8)
    text = (
        "rows by knock-outs: 1 of 0, 4 of 1, 2 of 2, in 5 distinct sets; "
        "1 rows in no split; rows with each score: 7, 4; "
        "2 of 5 knocked-out nodes isolated, 2 in no training row; features: "
    )
    tables.split[0] = -1
    tables.edge_index = torch.tensor([[0, 1], [1, 2]])
    assert details(tables) == f"{text}0 of nodes, 0 of edges"
    tables.feature_names = ["a"]
    tables.features = torch.tensor([[0.0], *[[1.0]] * (len(tables.genes) - 1)])
    tables.left_out = ["b"]
    found = details(tables)
    assert found.startswith(f"columns left out: b; {text}1 of nodes, ")
    assert found.endswith("; 1 nodes without features")
    tables.y = torch.arange(7 * 11, dtype=torch.float64).view(7, 11)
    tables.y[0, 3] = math.nan
    tables.perturbed_ptr = torch.tensor([0, 0, 0, 0, 0, 0, 0, 8])
    tables.left_out = []
    assert details(tables).startswith("rows by knock-outs: 6 of 0, 1 of 8, in 2 distinct sets; ")
    assert "rows with each score: 6 to 7; " in details(tables)


def test_nodes_without_edges_that_look_like_no_other_are_not_noted(tmp_path):
    assert note_on_unknown(list("abc"), list("abcd")) == ""
    assert note_on_unknown(list("abcxy"), list("abc")) == ""
    assert read_cells(tmp_path, ["a", "b", "c"], ["a", "b", "c", "x"]) == []
    assert read_cells(tmp_path, ["a", "b", "c"], ["a", "b", "c", "A"]) == [
        "1 of 4 knocked-out nodes have no edge: A (a?)"
    ]
