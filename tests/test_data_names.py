"""Names that no edge has: what they may mean, and what one is told."""

from pathlib import Path

import pytest

from data import DataConfig, load
from data_names import is_control, meanings, misread, note_on_unknown
from errors import DataError
from predict_sets import read_sets
from tests.conftest import write_table

SPLITS = ("train", "val", "test")


def read(folder: Path, nodes: list[str], cells: list[str]) -> list[str]:
    """Returns the notes on a table of these cells, and a ring of these nodes."""
    edges = [(node, other, "x") for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
    rows = [(cell, k, SPLITS[k % 3]) for k, cell in enumerate(cells)]
    options = DataConfig(
        edges=str(write_table(folder / "edges.tsv", [("source", "target", "relation"), *edges])),
        perturbations=str(write_table(folder / "scores.tsv", [("genes", "score", "split"), *rows])),
        cache_dir=str(folder / "cache"),
    )
    return [note.partition("scores.tsv: ")[2] for note in load(options).notes]


def refused(folder: Path, nodes: list[str], cells: list[str]) -> str:
    """Returns the error, from the table's name on, of a table of these cells."""
    with pytest.raises(DataError) as caught:
        read(folder, nodes, cells)
    return str(caught.value).removeprefix(f"{folder}/")


# ---- Controls and joined names -------------------------------------------------------------------
def test_controls_are_refused_unless_they_are_nodes(tmp_path):
    for name in ("ctrl", "wild type", "non-targeting_00012"):
        error = refused(tmp_path, ["a", "b"], ["b", f"a,{name}", "a"])
        assert error.startswith(f"scores.tsv:3: the genes 'a,{name}' have {name}, a control: ")
        assert read(tmp_path, ["a", "b", name], ["b", f"a,{name}", "a"]) == []


def test_controls_are_known_by_their_names():
    controls = (
        *("ctrl", "CTRL", "control", "Control_1", "WT", "wild-type", "wild type", "Wildtype"),
        *("non-targeting", "Non_Targeting", "non-targeting_00012", "NT", "NTC"),
        *("non-targeting control 3", "negative control", "neg_ctrl", "Wild_Type_3"),
    )
    assert [name for name in controls if not is_control(name)] == []
    genes = ("WT1", "NT5", "NT5E", "CTRB1", "CONTROLLER", "WTAP", "SAFE", "CTRLP", "NTC20")
    assert [name for name in genes if is_control(name)] == []


def test_names_that_are_joined_are_refused_unless_they_are_one_node(tmp_path):
    for joint, level in (("+", ""), (" + ", "=0.3"), ("_", ""), ("; ", "=0.3"), ("  ", "")):
        name = f"a1{joint}b2"
        cells = ["c", "a1", f"c,{name}{level}"]
        error = refused(tmp_path, ["a1", "b2", "c"], cells)
        assert error.startswith(f"scores.tsv:4: the genes 'c,{name}{level}' have {name}, ")
        assert "joins names: write a1,b2;" in error
        assert read(tmp_path, ["a1", "b2", "c", name], cells) == []


def test_names_are_joined_by_any_of_the_usual_signs():
    for joint in ("+", " + ", "_", ";", "; ", "|", ":", "/", "&", " ", "  "):
        assert "write a1,b2" in misread(f"a1{joint}b2", {"a1", "b2"}), joint


def test_names_are_joined_only_where_all_are_nodes():
    nodes = {"a", "b", "MT_CO1", "c"}
    assert "write a,b,c;" in misread("a+b+c", nodes)
    assert "write MT_CO1,a;" in misread("MT_CO1+a", nodes)
    assert "write a;" in misread("a+ctrl", nodes)
    assert "write a;" in misread("a;", nodes)
    for name in ("ctrl+ctrl", "WT + NT", "control_1", "WT_1", "NT 3"):
        assert "a control" in misread(name, {*nodes, "1", "3"}), name
    assert "write 3;" in misread("3+ctrl", {*nodes, "3"})
    for name in ("a+d", "a-b", "+", "ab", "a.b"):
        assert misread(name, nodes) == "", name


def test_tables_to_predict_are_read_by_the_same_rules(tmp_path):
    read(tmp_path, ["a", "b", "c"], ["a", "b", "c"])
    tables = load(
        DataConfig(
            edges=str(tmp_path / "edges.tsv"),
            perturbations=str(tmp_path / "scores.tsv"),
            cache_dir=str(tmp_path / "cache"),
        )
    )
    for cell, problem in (("a+b", "write a,b"), ("a,ctrl", "a control")):
        path = write_table(tmp_path / "new.tsv", [("genes",), ("c",), (cell,)])
        with pytest.raises(DataError, match=rf"new\.tsv:3: .*{problem}"):
            list(read_sets(str(path), tables))


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("a=0,5", "have a level with a decimal comma: write a point"),
        ("b,a=0, 5", "have a level with a decimal comma: write a point"),
        ("NA", "have NA, a missing value, but an intact sample has an empty cell"),
        ("a,-", "have -, a missing value, but an intact sample has an empty cell"),
        ("a,None", "have None, a missing value, but an intact sample has an empty cell"),
        ("a=0.3;b", r"have 'a=0.3;b': no name, or no level .*\(a comma separates nodes\)"),
    ],
)
def test_what_else_is_no_name_is_refused(tmp_path, cell, problem):
    with pytest.raises(DataError, match=f"scores.tsv:3: the genes '{cell}' {problem}"):
        read(tmp_path, ["a", "b"], ["a", cell, "b"])
    assert read(tmp_path, ["a", "b", "5"], ["a", "a=0.5,5", "b"]) == []


@pytest.mark.parametrize("name", ["nan", "NA", "None", "null", "-", " NaN "])
@pytest.mark.parametrize("end", [0, 1])
def test_a_missing_value_is_no_end_of_an_edge(tmp_path, name, end):
    """As pandas writes them, which would make a hub of all edges whose end is not known."""
    read(tmp_path, ["a", "b", "c"], ["a", "b", "c"])
    cells = ["c", "c", "x"]
    cells[end] = name
    rows = [("source", "target", "relation"), ("a", "b", "x"), cells, cells]
    options = DataConfig(
        edges=str(write_table(tmp_path / "edges.tsv", rows)),
        perturbations=str(tmp_path / "scores.tsv"),
        cache_dir=str(tmp_path / "cache"),
    )
    column = ("source", "target")[end]
    with pytest.raises(DataError, match=rf"edges\.tsv:3: the {column} .* is a missing value: "):
        load(options)


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
    (note,) = read(tmp_path, nodes, ["A", f"A{joint}HLA-B", "c,HLA-B"])
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
    assert read(tmp_path, ["a", "b", "c"], ["a", "b", "c", "a,1-Mar"]) == [note]
    assert read(tmp_path, ["a", "b", "c", "1-Mar"], ["a", "b", "c", "a,1-Mar"]) == []


def test_a_spreadsheets_date_among_the_features_is_named(tmp_path):
    read(tmp_path, ["a", "b", "MARCH1"], ["a", "b", "MARCH1"])
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
    read(tmp_path, ["A", "B", "C", "D"], ["A", "B", "C"])
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
    assert read(tmp_path, ["a", "b", "c"], ["a", "b", "c", "x"]) == []
    assert read(tmp_path, ["a", "b", "c"], ["a", "b", "c", "A"]) == [
        "1 of 4 knocked-out nodes have no edge: A (a?)"
    ]
