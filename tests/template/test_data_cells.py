"""Reading the rows of a table's file: headers, names, cells, lines and missing values."""

import bz2
import gzip
import lzma
import re
from dataclasses import replace
from pathlib import Path

import pytest

from data import DataConfig, load
from data_cells import read_header, read_rows
from data_tables import Tables, pack, read_edges, read_knockouts
from errors import DataError
from tests.template.cells import read_cells
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
    plain = read_under(tmp_path / "plain")
    headers = []
    for header in (EDGE_HEADER, SCORE_HEADER, FEATURE_HEADER):
        headers.append([f" {name}  " if k % 2 else f"{name} " for k, name in enumerate(header)])
    tables = read_under(tmp_path / "blanks", *headers)
    assert tables.fingerprint() == plain.fingerprint()
    assert list(tables.targets) == ["score"]
    assert list(tables.feature_names) == ["size", "Weight"]
    assert tables.edge_weight.tolist() == [0.5, 2, 4]
    assert tables.weight.tolist() == [1, 1 / 16, 1 / 4]
    assert list(tables.notes) == []
    weighted = read_under(tmp_path / "weight", scores=("genes", "score", "split", "weight "))
    assert list(weighted.targets) == ["score"]
    assert weighted.weight.tolist() == [1, 4, 2]


@pytest.mark.parametrize(
    ("edges", "scores", "features", "roles"),
    [
        (EDGE_HEADER, ("genes", "score", "split", "SD"), FEATURE_HEADER, {"SD": "sd"}),
        (
            EDGE_HEADER,
            ("Genes", "score", " Split", "sD "),
            FEATURE_HEADER,
            {"Genes": "genes", "Split": "split", "sD": "sd"},
        ),
        ((*EDGE_HEADER[:3], "WEIGHT "), SCORE_HEADER, FEATURE_HEADER, {"WEIGHT": "weight"}),
        (
            ("Source", " TARGET", "Relation", "Weight"),
            SCORE_HEADER,
            ("GENE", "size", "Weight"),
            {
                "Source": "source",
                "TARGET": "target",
                "Relation": "relation",
                "Weight": "weight",
                "GENE": "gene",
            },
        ),
    ],
)
def test_a_column_with_a_meaning_may_be_written_in_another_case_with_a_note(
    tmp_path, edges, scores, features, roles
):
    """The features of nodes do not have such columns, even if one is called Weight."""
    plain = read_under(tmp_path / "plain")
    tables = read_under(tmp_path / "cases", edges, scores, features)
    assert tables.fingerprint() == plain.fingerprint()
    found = [note.partition(".tsv: ")[2] for note in tables.notes]
    # Notes on the table of features come last.
    for note, (name, role) in zip(found, roles.items(), strict=True):
        assert note.startswith(f"the column {name} is read as {role}, ")
    assert notes_on(tables) == list(tables.notes)
    assert len(tables.notes) == len(roles)
    again = read_under(tmp_path / "cases", edges, scores, features)  # from the cache
    assert list(again.notes) == list(tables.notes)


def test_a_note_on_a_column_names_the_table(tmp_path):
    headers = (("Source", *EDGE_HEADER[1:]), (*SCORE_HEADER[:3], "Weight"), ("Gene", "size", "b"))
    notes = read_under(tmp_path, *headers).notes
    files = [Path(note.partition(": ")[0]).name for note in notes]
    assert files == ["edges.tsv", "scores.tsv", "features.tsv"]


@pytest.mark.parametrize("name", ["Weight", "SD", "Split", " weighT "])
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
        ({"scores": ("genes", "weight", "s", "Weight")}, "scores"),
        ({"scores": ("genes", "split", "s", " Genes ")}, "scores"),
        ({"edges": ("source", "target", "relation", "Weight", "weight ")}, "edges"),
        ({"features": ("gene", "size", "size ")}, "features"),
    ],
)
def test_two_columns_with_the_same_name_are_an_error(tmp_path, headers, file):
    message = rf"{file}\.tsv:1: two columns have the name '.*': "
    with pytest.raises(DataError, match=message):
        read_under(tmp_path, **headers)


# ---- Names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("column", ["source", "target"])
@pytest.mark.parametrize("name", ["a,b", "a=0.3", "complex 1, a"])
def test_a_node_of_an_edge_is_refused_if_its_name_has_a_comma_or_a_level(tmp_path, column, name):
    """A table of knock-outs could not contain such a name."""
    row = {"source": "a", "target": "b", "relation": "x", column: f'"{name}"'}
    path = write_table(tmp_path / "edges.tsv", [*EDGES, tuple(row.values())])
    message = rf"edges\.tsv:6: the {column} '{name}' has a comma or =, "
    with pytest.raises(DataError, match=message):
        read_edges(str(path), {}, [])


def test_a_relation_may_have_a_comma(tmp_path):
    path = write_table(tmp_path / "edges.tsv", [*EDGES, ("a", "b", "binds, in vitro")])
    relations, *_ = read_edges(str(path), {}, [])
    assert relations == ["x", "y", "binds, in vitro"]


# ---- Cells ---------------------------------------------------------------------------------------
def quote(path: Path) -> None:
    """Puts quotes around each cell of a table."""
    lines = []
    for line in path.read_text().splitlines():
        lines.append("\t".join(f'"{cell}"' for cell in line.split("\t")) + "\n")
    path.write_text("".join(lines))


def test_cells_in_quotes_are_read(tmp_path):
    """Spreadsheets write such cells in any table, also in its header.

    Quotes within a cell belong to the name.
    """
    options = write_tables(tmp_path, features=str(tmp_path / "features.tsv"))
    write_table(tmp_path / "features.tsv", [("gene", "size, um"), ("a", 1), ("d", 2)])
    plain = load(options)
    for path in tmp_path.glob("*.tsv"):
        quote(path)
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
        read_knockouts(str(tmp_path / "scores.tsv"), {}, [])


def test_a_long_cell_is_cut_in_errors(tmp_path):
    long = "7" * 400
    wrong = [(EDGES, [*SCORES, row]) for row in (("a,," + long, 1, "val"), ("a", long, "val"))]
    wrong.append((EDGES, [*SCORES, ("a", 1, long)]))
    wrong.append((EDGES, [("genes", long), ("a", "one")]))
    wrong.append((EDGES, [(long, "score")]))
    wrong.append(([(*EDGES[0], "weight"), (*EDGES[1], "x" * 400)], SCORES))
    wrong.append(([(*EDGES[0], long)], SCORES))
    for edges, scores in wrong:
        options = write_tables(tmp_path, edges, scores)
        with pytest.raises(DataError, match=r"\.tsv:\d+: ") as error:
            load(options)
        assert len(str(error.value).removeprefix(str(tmp_path))) < 300


# ---- Lines ---------------------------------------------------------------------------------------
def test_a_blank_line_of_a_table_to_predict_is_an_intact_sample(tmp_path):
    path = write_table(tmp_path / "ask.tsv", [("genes",), ("a,b",), ("",), ("x,b",), ("c,a",)])
    genes, is_known, sets, unknown = asked(str(path), ["a", "b", "c"])
    assert genes == ["a,b", "", "x,b", "c,a"]
    assert is_known == [True, True, False, True]
    assert sets == [[0, 1], [], [0, 2]]
    assert unknown == ["x"]


@pytest.mark.parametrize("skips", [True, False])
def test_a_blank_line_is_skipped_or_a_row_of_empty_cells(tmp_path, skips):
    (tmp_path / "t.tsv").write_text("genes\tscore\tsd\n\na\t1\t2\n\n\nb\t3\t4\n\n")
    header = read_header(str(tmp_path / "t.tsv"), [], ("genes",))
    (rows,) = read_rows(str(tmp_path / "t.tsv"), header, skip_blank=skips)
    if skips:
        assert rows.cells == {"genes": ["a", "b"], "score": ["1", "3"], "sd": ["2", "4"]}
        assert list(rows.lines) == [3, 6]
    else:
        assert rows.cells["genes"] == ["", "a", "", "", "b", ""]
        assert rows.cells["sd"] == ["", "2", "", "", "4", ""]
        assert list(rows.lines) == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("header", ["genes", "genes\tscore", "Nodes\tsplit\ta\tb"])
def test_a_blank_line_of_a_table_to_predict_is_a_row_with_any_columns(tmp_path, header):
    more = "\t1" * header.count("\t")
    path = tmp_path / "ask.tsv"
    path.write_text(f"{header}\na,b{more}\n\nx{more}\n\nc{more}\n")
    genes, is_known, sets, unknown = asked(str(path), ["a", "b", "c"])
    assert genes == ["a,b", "", "x", "", "c"]
    assert is_known == [True, True, False, True, True]
    assert sets == [[0, 1], [], [], [2]]
    assert unknown == ["x"]


def test_a_table_is_read_in_chunks_with_the_right_line_numbers(tmp_path, monkeypatch):
    """Blank lines, spaces, intact samples and errors, with 100 lines in a chunk."""
    monkeypatch.setattr("data_cells.CHUNK", 200)
    lines = [f"g{i % 50},g{i % 37} ,g{i % 50}\t{i}" for i in range(1500)]
    lines[7], lines[1200], lines[1300] = "\t1.5", "", "  \t2.5"
    path = tmp_path / "scores.tsv"
    path.write_text("\n".join(["genes\tscore", *lines, ""]))
    number = {}
    columns = read_knockouts(str(path), number, [])
    assert columns["targets"] == ["score"]
    assert columns["left_out"] == []
    assert not {"split", "weight"} & columns.keys()
    y = columns["y"]
    packed = pack(columns["row"], columns["node"], columns["level"], len(y))
    rows = [line.split("\t") for line in lines if line]
    assert y.tolist() == [[float(score)] for _, score in rows]
    expected = []
    for genes, _ in rows:
        names = {name.strip() for name in genes.split(",")} - {""}
        expected.append(sorted(number[name] for name in names))
    found = packed["perturbed"].split(packed["perturbed_ptr"].diff().tolist())
    assert [nodes.tolist() for nodes in found] == expected
    wrong_lines = {1401: "g1,,g2\t0", 1402: "g1\tinf", 1403: "g1\t1\t2", 1404: "g1\t1_0"}
    for number_of_line, wrong in wrong_lines.items():
        before = lines[: number_of_line - 2]
        after = lines[number_of_line - 2 :]
        path.write_text("\n".join(["genes\tscore", *before, wrong, *after, ""]))
        with pytest.raises(DataError, match=rf"scores.tsv:{number_of_line}: "):
            read_knockouts(str(path), {}, [])


def test_blank_lines_in_the_size_of_a_chunk_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("data_cells.CHUNK", 6)
    rows = "a\t1\nb\t2\nc\t3\n"
    (tmp_path / "scores.tsv").write_text(f"genes\tscore\n{rows}\n\n\n\n{rows}\n")
    columns = read_knockouts(str(tmp_path / "scores.tsv"), {}, [])
    assert columns["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert columns["node"].tolist() == [0, 1, 2] * 2
    assert len(columns["y"]) == 6
    (tmp_path / "blank.tsv").write_text("genes\tscore\n\n\n")
    with pytest.raises(DataError, match="no rows below the header"):
        read_knockouts(str(tmp_path / "blank.tsv"), {}, [])


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    options = write_tables(tmp_path)
    for content in (b"\xff\xfe\x00", "source".encode("utf-16"), b"source\ttarget\trelation\n\xe9"):
        Path(options.edges).write_bytes(content)
        with pytest.raises(DataError, match=r"edges\.tsv is not UTF-8 text"):
            load(options)
    Path(options.edges).unlink()
    with pytest.raises(DataError, match=r"cannot read .*edges\.tsv: No such file or directory$"):
        load(options)
    monkeypatch.chdir(tmp_path)
    place = re.escape(str(tmp_path))
    for function in (load, lambda options: read_header(options.edges, [], ())):
        with pytest.raises(DataError, match=f"cannot read edges.tsv: No such .*{place}"):
            function(replace(options, edges="edges.tsv"))


@pytest.mark.parametrize("content", [bz2.compress, lzma.compress, lambda text: b"\x89HDF" + text])
def test_files_in_other_formats_are_refused_whatever_their_name_is(tmp_path, content):
    options = write_tables(tmp_path)
    for name in ("edges.tsv", "edges.tsv.gz"):
        path = tmp_path / name
        path.write_bytes(content(Path(options.edges).read_bytes()))
        with pytest.raises(DataError, match=rf"{name} is not UTF-8 text"):
            load(replace(options, edges=str(path)))


@pytest.mark.parametrize("name", ["edges.tsv.GZ", "edges.tsv", "edges.gz"])
def test_a_gzipped_table_is_recognised_by_its_content(tmp_path, name):
    options = write_tables(tmp_path)
    expected = load(options)
    content = Path(options.edges).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content))
    assert (
        load(replace(options, edges=str(tmp_path / name))).fingerprint() == expected.fingerprint()
    )
    (tmp_path / "text.gz").write_bytes(content)
    assert load(replace(options, edges=str(tmp_path / "text.gz"))).genes == expected.genes


def test_an_error_explains_row_names_that_r_has_written(tmp_path):
    (tmp_path / "r.tsv").write_text('"genes"\t"score"\n"1"\t"a"\t0.5\n')
    message = r"r\.tsv:2: this line has 3 cells, but the header has 2: .* row.names=FALSE"
    with pytest.raises(DataError, match=message):
        read_knockouts(str(tmp_path / "r.tsv"), {}, [])


# ---- Missing values and columns without a name ---------------------------------------------------
@pytest.mark.parametrize(
    "cell",
    ["", " ", "NA", "N/A", "#N/A", "NaN", "nan", "-nan", "None", "null", "NULL", "<NA>", " NA "],
)
def test_missing_values_of_other_tools_are_missing(tmp_path, cell):
    """This test covers scores and features."""
    tables = read_under(tmp_path / "plain")
    rows = [("a", "", "train", 1), *SCORE_ROWS]
    others = [("a", cell, "train", 1), *SCORE_ROWS]
    found = []
    for folder, score_rows in (("empty", rows), ("cell", others)):
        path = write_table(
            tmp_path / f"{folder}.tsv", [FEATURE_HEADER, *FEATURE_ROWS, ("b", cell, 3)]
        )
        (tmp_path / folder).mkdir()
        options = write_tables(
            tmp_path / folder,
            [EDGE_HEADER, *EDGE_ROWS],
            [SCORE_HEADER, *score_rows],
            features=str(path),
        )
        found.append(load(options))
    assert found[0].fingerprint() == found[1].fingerprint()
    assert found[1].y.isnan().sum() == tables.y.isnan().sum() + 1


def test_a_column_without_a_name_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"scores.tsv:1: column 5 has no name: "):
        rows = [(*SCORE_HEADER, ""), *((*row, "") for row in SCORE_ROWS)]
        load(write_tables(tmp_path, [EDGE_HEADER, *EDGE_ROWS], rows))


@pytest.mark.parametrize("name", ["nan", "NA", "None", "null", "-", " NaN "])
@pytest.mark.parametrize("end", [0, 1])
def test_a_missing_value_cannot_be_an_end_of_an_edge(tmp_path, name, end):
    """Otherwise, all edges with an unknown end would share a node, which would be a hub."""
    read_cells(tmp_path, ["a", "b", "c"], ["a", "b", "c"])
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
