"""Reading the rows of a table's file: headers, names, cells, lines and missing values."""

import bz2
import codecs
import gzip
import lzma
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import DataConfig, load
from data_cells import Rows, read_header, read_rows
from data_tables import Tables, pack, read_edges, read_knockouts
from errors import DataError
from tests.template.fixtures import write_table
from tests.template.tables import EDGES, SCORES, asked, notes_on, write_tables

EDGE_ROWS = [("a", "b", "x", 0.5), ("b", "c", "x", 2), ("c", "d", "y", 4)]
SCORE_ROWS = [("a,b", 0.5, "train", 1), ("d", -1, "val", 4), ("", 2, "test", 2)]
FEATURE_ROWS = [("a", 1, 5), ("c", 3, 6)]
EDGE_HEADER = ("source", "target", "relation", "weight")
SCORE_HEADER = ("genes", "score", "split", "sd")
FEATURE_HEADER = ("gene", "size", "Weight")


# ---- Headers -------------------------------------------------------------------------------------
def read_under(
    folder: Path, edges=EDGE_HEADER, scores=SCORE_HEADER, features=FEATURE_HEADER, chosen=()
) -> Tables:
    """Returns the tables of the same rows under these headers, with the `chosen` scores."""
    folder.mkdir(exist_ok=True)
    path = write_table(folder / "features.tsv", [features, *FEATURE_ROWS])
    options = write_tables(folder, [edges, *EDGE_ROWS], [scores, *SCORE_ROWS], features=str(path))
    return load(replace(options, scores=list(chosen)))


def test_blanks_around_the_cells_of_a_header_do_not_count(tmp_path):
    """In each table. Otherwise, a column weight would be read as a score or a feature."""
    headers = []
    for header in (EDGE_HEADER, SCORE_HEADER, FEATURE_HEADER):
        headers.append([f" {name}  " if k % 2 else f"{name} " for k, name in enumerate(header)])
    tables = read_under(tmp_path / "blanks", *headers)
    assert tables.fingerprint() == read_under(tmp_path / "plain").fingerprint()
    assert list(tables.feature_names) == ["size", "Weight"]
    assert tables.weight.tolist() == [1, 1 / 16, 1 / 4]
    assert list(tables.notes) == []


@pytest.mark.parametrize(
    "headers",
    [
        {"edges": ("Source", " TARGET", "Relation", "weight ")},
        {"scores": ("Genes", "score", " split", "sd ")},
        # The features of nodes do not have such columns, even if one is called Weight.
        {"features": ("GENE", "size", "Weight")},
    ],
)
def test_the_names_of_the_first_columns_may_be_in_upper_or_lower_case(tmp_path, headers):
    tables = read_under(tmp_path / "cases", **headers)
    assert tables.fingerprint() == read_under(tmp_path / "plain").fingerprint()
    assert notes_on(tables) == []


@pytest.mark.parametrize("name", ["SD", "Split", "weighT"])
def test_a_column_such_as_weight_in_another_case_is_an_error(tmp_path, name):
    problem = rf"scores\.tsv:1: the column '{name}' is not '{name.lower()}', which is in lower case"
    with pytest.raises(DataError, match=problem):
        read_under(tmp_path, scores=("genes", "score", "fold", name))


@pytest.mark.parametrize("name", ["SD", "Split", " weighT "])
def test_a_column_such_as_weight_in_another_case_is_a_score_if_data_scores_lists_it(tmp_path, name):
    header = ("genes", "score", "split", name)
    tables = read_under(tmp_path, scores=header, chosen=[name.strip()])
    assert list(tables.targets) == [name.strip()]
    assert tables.y.flatten().tolist() == [1, 4, 2]
    assert tables.weight is None
    assert list(tables.notes) == []
    assert list(tables.left_out) == ["score"]


def test_the_column_weight_itself_cannot_be_a_score(tmp_path):
    with pytest.raises(DataError, match=r"data\.scores=\['weight'\] contains names that are not"):
        read_under(tmp_path, scores=("genes", "score", "split", "weight"), chosen=["weight"])


@pytest.mark.parametrize(
    ("headers", "file"),
    [
        ({"scores": ("genes", "split", "s", " s")}, "scores"),
        ({"edges": ("source", "target", "relation", "weight", "weight ")}, "edges"),
        ({"features": ("gene", "size", "size ")}, "features"),
    ],
)
def test_two_columns_with_the_same_name_are_an_error(tmp_path, headers, file):
    message = rf"{file}\.tsv:1: two columns have the name '.*': "
    with pytest.raises(DataError, match=message):
        read_under(tmp_path, **headers)


# ---- Names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("column", ["source", "target"])
@pytest.mark.parametrize("name", ["a,b", "a=0.3", "nan", "NA", "null", "-", " NaN "])
def test_an_end_of_an_edge_cannot_have_a_comma_or_a_level_or_be_missing(tmp_path, column, name):
    """A table of knock-outs could not contain such a name.

    All edges with an unknown end would share a node, which would be a hub.
    """
    row = {"source": "a", "target": "b", "relation": "x", column: name}
    path = write_table(tmp_path / "edges.tsv", [*EDGES, tuple(row.values())])
    problem = "has a comma or =, " if name[0] == "a" else "is a missing value: "
    with pytest.raises(DataError, match=rf"edges\.tsv:6: the {column} '{name}' {problem}"):
        read_edges(str(path), {})


def test_a_relation_may_have_a_comma(tmp_path):
    path = write_table(tmp_path / "edges.tsv", [*EDGES, ("a", "b", "binds, in vitro")])
    relations, *_ = read_edges(str(path), {})
    assert relations == ["x", "y", "binds, in vitro"]


# ---- Cells ---------------------------------------------------------------------------------------
def test_cells_in_quotes_are_read(tmp_path):
    """Spreadsheets write such cells in any table, also in its header.

    Quotes within a cell belong to the name.
    """
    options = write_tables(tmp_path, features=str(tmp_path / "features.tsv"))
    write_table(tmp_path / "features.tsv", [("gene", "size, um"), ("a", 1), ("d", 2)])
    plain = load(options)
    for path in tmp_path.glob("*.tsv"):
        path.write_text(re.sub(r"[^\t\n]+", r'"\g<0>"', path.read_text()))
    assert load(options).fingerprint() == plain.fingerprint()
    (tmp_path / "ask.tsv").write_text('genes\n"a,b"\n""\n"ant(2"")-Ia, c"\nant(2")-Ia\nb"\n')
    genes, _, sets, unknown = asked(str(tmp_path / "ask.tsv"), ["a", "b"])
    assert genes == ["a,b", "", 'ant(2")-Ia, c', 'ant(2")-Ia', 'b"']
    assert sets == [[0, 1], []]
    assert unknown == ['ant(2")-Ia', "c", 'b"']


@pytest.mark.parametrize("cells", ['"a,b\t1', '"a","b"\t1', '"a"b\t1', '"a,b\nc"\t1', 'a\t"1\n"'])
def test_quotes_that_do_not_enclose_a_complete_cell_are_refused(tmp_path, cells):
    (tmp_path / "scores.tsv").write_text(f"genes\tscore\na\t1\n\n{cells}\nd\t1\ne\t1\n")
    with pytest.raises(DataError, match=r"scores\.tsv:4: .*(put quotes|contains a line break)"):
        read_knockouts(str(tmp_path / "scores.tsv"), {})


def test_a_long_cell_is_cut_in_errors(tmp_path):
    long = "7" * 400
    wrong = [(EDGES, [*SCORES, row]) for row in (("a,," + long, 1, "val"), ("a", long, "val"))]
    wrong += [(EDGES, [(long, "score")]), ([(*EDGES[0], long)], SCORES)]
    for edges, scores in wrong:
        with pytest.raises(DataError, match=r"\.tsv:\d+: ") as error:
            load(write_tables(tmp_path, edges, scores))
        assert len(str(error.value).removeprefix(str(tmp_path))) < 300


# ---- Lines ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("skips", [True, False])
def test_a_blank_line_is_skipped_or_a_row_of_empty_cells(tmp_path, skips):
    (tmp_path / "t.tsv").write_text("genes\tscore\tsd\n\na\t1\t2\n\n\nb\t3\t4\n\n")
    header = read_header(str(tmp_path / "t.tsv"), ("genes",))
    (rows,) = read_rows(str(tmp_path / "t.tsv"), header, skip_blank=skips)
    if skips:
        assert rows.cells == {"genes": ["a", "b"], "score": ["1", "3"], "sd": ["2", "4"]}
        assert list(rows.lines) == [3, 6]
    else:
        assert rows.cells["genes"] == ["", "a", "", "", "b", ""]
        assert rows.cells["sd"] == ["", "2", "", "", "4", ""]
        assert list(rows.lines) == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("header", ["genes", "genes\tscore", "Nodes\tsplit\ta\tb"])
def test_a_blank_line_of_a_table_to_predict_is_an_intact_sample(tmp_path, header):
    more = "\t1" * header.count("\t")
    path = tmp_path / "ask.tsv"
    path.write_text(f"{header}\na,b{more}\n\nx,b{more}\n\nc,a{more}\n")
    genes, is_known, sets, unknown = asked(str(path), ["a", "b", "c"])
    assert genes == ["a,b", "", "x,b", "", "c,a"]
    assert is_known == [True, True, False, True, True]
    assert sets == [[0, 1], [], [], [0, 2]]
    assert unknown == ["x"]


def test_a_table_is_read_in_chunks_with_the_right_line_numbers(tmp_path, monkeypatch):
    """Blank lines, spaces, intact samples and errors, with three lines in a chunk."""
    monkeypatch.setattr("data_cells.CHUNK", 6)
    lines = [f"g{i % 5},g{i % 7} ,g{i % 5}\t{i}" for i in range(50)]
    lines[7], lines[30] = "\t1.5", "  \t2.5"
    lines[12:12] = ["", "", "", ""]
    path = write_table(tmp_path / "scores.tsv", [("genes", "score"), *((line,) for line in lines)])
    number = {}
    columns = read_knockouts(str(path), number)
    packed = pack(columns["row"], columns["node"], columns["level"], len(columns["y"]))
    found = packed["perturbed"].split(packed["perturbed_ptr"].diff().tolist())
    rows = [line.split("\t") for line in lines if line]
    assert columns["y"].tolist() == [[float(score)] for _, score in rows]
    assert columns["line"].tolist() == [k for k, line in enumerate(lines, 2) if line]
    for nodes, (genes, _) in zip(found, rows, strict=True):
        names = {name.strip() for name in genes.split(",")} - {""}
        assert nodes.tolist() == sorted(number[name] for name in names)
    for wrong in ("g1,,g2\t0", "g1\tinf", "g1\t1\t2", "g1\t1_0"):
        (tmp_path / "wrong.tsv").write_text(path.read_text() + wrong)
        with pytest.raises(DataError, match=r"wrong.tsv:56: "):
            read_knockouts(str(tmp_path / "wrong.tsv"), {})


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    """If its path is relative, the error contains the working directory."""
    monkeypatch.chdir(tmp_path)
    place = re.escape(str(tmp_path))
    for read in (lambda path: load(DataConfig(path, path)), lambda path: read_header(path, ())):
        with pytest.raises(DataError, match=f"cannot read none.tsv: No such .*{place}"):
            read("none.tsv")
        with pytest.raises(
            DataError, match=r"cannot read /.*none\.tsv: No such file or directory$"
        ):
            read(f"{tmp_path}/none.tsv")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"gene\n\xe9", bz2.compress(b"gene"), lzma.compress(b"gene")]
)
def test_files_in_other_formats_are_refused_whatever_their_name_is(tmp_path, content):
    for name in ("edges.tsv", "edges.tsv.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is not UTF-8 text"):
            list(read_rows(str(tmp_path / name), ["gene"]))


def test_a_gzipped_table_is_recognised_by_its_content(tmp_path):
    """Its lines may end with CRLF, and it may begin with a byte order mark."""
    options = write_tables(tmp_path)
    expected = load(options).fingerprint()
    text = Path(options.edges).read_bytes().replace(b"\n", b"\r\n") + b"\r\n"
    text = codecs.BOM_UTF8 + text
    for name, content in {"edges.tsv": gzip.compress(text), "text.gz": text}.items():
        (tmp_path / name).write_bytes(content)
        assert load(replace(options, edges=str(tmp_path / name))).fingerprint() == expected


def test_an_error_explains_row_names_that_r_has_written(tmp_path):
    (tmp_path / "r.tsv").write_text('"genes"\t"score"\n"1"\t"a"\t0.5\n')
    message = r"r\.tsv:2: this line has 3 cells, but the header has 2: .* row.names=FALSE"
    with pytest.raises(DataError, match=message):
        read_knockouts(str(tmp_path / "r.tsv"), {})


# ---- Missing values and columns without a name ---------------------------------------------------
@pytest.mark.parametrize(
    "cell", ["", " ", "NA", "N/A", "#N/A", "-nan", "None", "null", "NULL", "<NA>", " NA "]
)
def test_missing_values_of_other_tools_are_the_same_nan(cell):
    number = Rows("scores.tsv", [2], {"score": [cell]}).numbers("score")
    assert (
        number.view(torch.long).tolist()
        == torch.tensor([math.nan]).double().view(torch.long).tolist()
    )


def test_a_column_without_a_name_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"scores.tsv:1: column 5 has no name: "):
        read_under(tmp_path, scores=(*SCORE_HEADER, ""))
