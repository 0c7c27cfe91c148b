"""Reading, caching and splitting tables, and building batches from them."""

import gzip
import hashlib
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch.utils.data import DataLoader

import baseline
import data
import metrics
import tables
import train
from baseline import additive_baseline
from data import (
    DataConfig,
    KnockoutDataset,
    Numbers,
    StepSampler,
    load,
    make_loader,
    node_split,
    random_split,
)
from errors import DataError
from predict import read_sets
from tables import Tables, pack, read_knockouts
from tests.bench import synthetic
from tests.bench.synthetic import PRESETS, failure_losses, generate, synthetic_tables
from tests.conftest import write_table
from tests.tools.runs import pack_sets, tables_of

EDGES = [
    ("source", "target", "relation"),
    ("b", "a", "x"),
    ("a", "c", "y"),
    ("c", "c", "x"),
    ("b", "a", "x"),
]
SCORES = [
    ("genes", "score", "split"),
    ("a,b", 0.5, "train"),
    ("d", -1, "val"),
    ("", "2e-1", "test"),
]


def config(folder: Path, edges=EDGES, scores=SCORES, **options) -> DataConfig:
    paths = {"edges": folder / "edges.tsv", "perturbations": folder / "scores.tsv"}
    for path, rows in zip(paths.values(), (edges, scores), strict=True):
        write_table(path, rows)
    return DataConfig(
        **{k: str(v) for k, v in paths.items()}, cache_dir=str(folder / "cache"), **options
    )


def test_tables_are_read_correctly(tmp_path):
    tables = load(config(tmp_path))
    assert tables.genes == ["a", "b", "c", "d"]  # d has no edge
    assert tables.relations == ["x", "y"]
    assert tables.edge_index.tolist() == [[1, 2, 0], [0, 2, 2]]  # no duplicate edge
    assert tables.edge_type.tolist() == [0, 0, 1]
    assert [index.tolist() for index in tables.graph().edge_index_dict.values()] == [
        [[1, 2], [0, 2]],
        [[0], [2]],
    ]
    assert tables.perturbed.tolist() == [0, 1, 3]
    assert tables.perturbed_ptr.tolist() == [0, 2, 3, 3]
    assert tables.y.tolist() == [[0.5], [-1.0], [0.2]]
    assert [tables.rows(split).tolist() for split in tables.SPLITS] == [[0], [1], [2]]
    assert tables.summary() == (
        "4 nodes of 0 features (1 of 3 knocked-out ones isolated), 3 edges in 2 relations of 0 "
        "features, "
        "3 samples of 0 to 2 knock-outs: 1 train, 1 val, 1 test, 0 in no split; 1 scores: score"
    )


def test_undirected_adds_reverse_edges_but_no_second_self_loop(tmp_path):
    tables = load(config(tmp_path, undirected=True))
    assert tables.edge_index.T.tolist() == [[0, 1], [1, 0], [2, 2], [0, 2], [2, 0]]
    assert tables.edge_type.tolist() == [0, 0, 0, 1, 1]


def test_gzipped_tables_with_crlf_line_ends_are_read(tmp_path):
    plain = load(config(tmp_path))
    packed = config(tmp_path)
    for path in (packed.edges, packed.perturbations):
        text = Path(path).read_bytes().replace(b"\n", b"\r\n") + b"\r\n"
        Path(path + ".gz").write_bytes(gzip.compress(text))
    again = load(DataConfig(edges=packed.edges + ".gz", perturbations=packed.perturbations + ".gz"))
    assert again.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(
    ("edges", "scores", "message"),
    [
        (
            [("source", "target")],
            SCORES,
            r"edges.tsv:1: the header is 'source\\ttarget': begin with "
            r"'source\\ttarget\\trelation'",
        ),
        (EDGES[:1], SCORES, "edges.tsv: no rows below the header"),
        ([*EDGES, ("a", "b")], SCORES, "edges.tsv:6: 2 fields where the header has 3"),
        ([*EDGES, ("a", "", "x")], SCORES, "edges.tsv:6: the target '' is empty"),
        (EDGES, SCORES[:1], "scores.tsv: no rows below the header"),
        (EDGES, [], r"scores.tsv:1: the header is '': begin with 'genes', name each column once"),
        (
            EDGES,
            [*SCORES, ("a", "high", "train")],
            "scores.tsv:5: the score 'high' is not a number",
        ),
        (EDGES, [*SCORES, ("a", "nan", "train")], "scores.tsv:5: the score 'nan' is not a number"),
        (
            EDGES,
            [*SCORES, ("a", "1e39", "train")],
            "scores.tsv:5: the score '1e39' is not a number",
        ),
        (EDGES, [*SCORES, ("a", "1_0", "train")], "scores.tsv:5: the score '1_0' is not a number"),
        (EDGES, [*SCORES, ("", "one", "train")], "scores.tsv:5: the score 'one' is not a number"),
        (
            EDGES,
            [*SCORES, ("a", 1, "dev")],
            "scores.tsv:5: the split 'dev' is not one of train, val, test",
        ),
        (
            EDGES,
            [*SCORES, ("a,,b", 1, "val")],
            "scores.tsv:5: the genes 'a,,b' have '': no name, or no level from 0 to 10,000",
        ),
        (EDGES, SCORES[:3], "scores.tsv: no rows in the test split of 2 rows"),
        (
            EDGES,
            [("genes", "score"), ("a", 1)],
            "no rows in the train split|no rows in the val split",
        ),
    ],
)
def test_errors_in_tables_name_file_and_line(tmp_path, edges, scores, message):
    with pytest.raises(DataError, match=message):
        load(config(tmp_path, edges, scores))
    assert not list(tmp_path.glob("cache/*.tmp"))


def asked(path: str, names: list[str]) -> tuple[list[str], list[bool], list[list[int]], list[str]]:
    """Returns the cells of a table to predict, the known rows, their sets of nodes, all names."""
    graph = Tables(
        names,
        ["r"],
        torch.empty(2, 0).long(),
        torch.empty(0).long(),
        *pack_sets([[0]]),
        torch.zeros(1),
    )
    number = Numbers({name: node for node, name in enumerate(names)})
    ((genes, is_known, samples),) = read_sets(path, number, graph)
    assert samples.y.shape == (int(is_known.sum()), 1) and samples.y.isnan().all()
    sets = [
        nodes.tolist() for nodes in samples.perturbed.split(samples.perturbed_ptr.diff().tolist())
    ]
    return list(genes), is_known.tolist(), sets, list(number)


def quote(path: Path) -> None:
    """Puts quotes around each cell of a table."""
    lines = path.read_text().splitlines()
    path.write_text(
        "".join("\t".join(f'"{cell}"' for cell in line.split("\t")) + "\n" for line in lines)
    )


def test_cells_in_quotes_are_read(tmp_path):
    """As spreadsheets write them, in each table and its header; quotes in a name are its own."""
    options = config(tmp_path, features=str(tmp_path / "features.tsv"))
    write_table(tmp_path / "features.tsv", [("gene", "size, um"), ("a", 1), ("d", 2)])
    plain = load(options)
    for path in tmp_path.glob("*.tsv"):
        quote(path)
    assert load(options).fingerprint() == plain.fingerprint()
    (tmp_path / "ask.tsv").write_text('genes\n"a,b"\n""\n"ant(2"")-Ia, c"\nant(2")-Ia\nb"\n')
    genes, _, sets, names = asked(str(tmp_path / "ask.tsv"), ["a", "b"])
    assert genes == ["a,b", "", 'ant(2")-Ia, c', 'ant(2")-Ia', 'b"'] and sets == [[0, 1], []]
    assert names == ["a", "b", 'ant(2")-Ia', "c", 'b"']


@pytest.mark.parametrize(
    "cells",
    [
        '"a,b\t1',
        'b,"a"\t1',
        '"a","b"\t1',
        '"a"b\t1',
        '""""\t1',
        ' "a,b"\t1',
        '"a,b\nc"\t1',
        'a\t"1\n"',
    ],
)
def test_quotes_that_enclose_no_whole_cell_are_refused(tmp_path, cells):
    (tmp_path / "scores.tsv").write_text(f"genes\tscore\na\t1\n\n{cells}\nd\t1\ne\t1\n")
    with pytest.raises(DataError, match=r"scores\.tsv:4: .* has quotes that enclose no whole cell"):
        read_knockouts(str(tmp_path / "scores.tsv"), Numbers())


def test_quotes_about_a_tab_make_fields(tmp_path):
    (tmp_path / "scores.tsv").write_text('genes\tscore\n"a\tb"\t1\n')
    with pytest.raises(DataError, match=r"scores\.tsv:2: 3 fields where the header has 2"):
        read_knockouts(str(tmp_path / "scores.tsv"), Numbers())


def test_scores_may_be_named_and_other_columns_are_left_out(tmp_path):
    scores = [
        ("genes", "drug", "a", "b", "split"),
        ("a", "MMS", 1, 2, "train"),
        ("b", "-", 3, 4, "val"),
    ]
    scores += [("c", "-", 5, 6, "test")]
    with pytest.raises(
        DataError, match=r"scores\.tsv:2: the drug 'MMS' is not .*: to leave .* in data\.scores"
    ):
        load(config(tmp_path, scores=scores))
    tables = load(replace(config(tmp_path, scores=scores), scores=["b"]))
    assert (
        tables.targets == ["b"]
        and tables.y.tolist() == [[2], [4], [6]]
        and tables.left_out == ["drug", "a"]
    )
    assert tables.summary().endswith("; 1 scores: b; columns left out: drug, a")
    assert load(replace(config(tmp_path, scores=scores), scores=["b", "a"])).y[0].tolist() == [2, 1]
    assert (
        load(replace(config(tmp_path, scores=scores), scores=["b"])).fingerprint()
        == tables.fingerprint()
    )
    for wrong in (["c"], [["b"]], ["split"], [1]):
        with pytest.raises(
            DataError,
            match=r"scores\.tsv:1: data\.scores=.*, but the scores are \['drug', 'a', 'b'\]",
        ):
            load(replace(config(tmp_path, scores=scores), scores=wrong))
    fewer = [(row[0], *row[2:]) for row in scores]
    assert (
        load(replace(config(tmp_path, scores=fewer), scores=["b"])).fingerprint()
        == tables.fingerprint()
    )


@pytest.mark.parametrize(
    ("names", "isolated"), [("abx", ""), ("axy", "x, y"), ("wxyz", "w, x, y, z")]
)
def test_knocked_out_nodes_are_named_if_half_of_them_have_no_edge(tmp_path, names, isolated):
    rows = [
        (name, 1, split)
        for name, split in zip(names, ("train", "val", "test", "test"), strict=False)
    ]
    summary = load(config(tmp_path, scores=[("genes", "score", "split"), *rows])).summary()
    note = summary.partition("\nnote      ")[2]
    assert note == (f"no edges: {isolated}: do the tables use the same names?" if isolated else "")


def test_a_long_cell_is_cut_in_errors(tmp_path):
    long = "7" * 400
    wrong_rows = [("a,," + long, 1, "val"), ("a", long, "val"), ("a", 1, long)]
    tables = [(EDGES, [*SCORES, row]) for row in wrong_rows]
    tables += [(EDGES, [("genes", long), ("a", "one")]), (EDGES, [(long, "score")])]
    tables += [([(*EDGES[0], "width"), (*EDGES[1], long)], SCORES)]
    for edges, scores in tables:
        options = config(tmp_path, edges, scores)
        with pytest.raises(DataError, match=r"\.tsv:\d+: ") as error:
            load(options)
        assert len(str(error.value).removeprefix(str(tmp_path))) < 220


def test_a_blank_line_of_a_one_column_table_is_a_sample_without_knock_outs(tmp_path):
    path = write_table(tmp_path / "ask.tsv", [("genes",), ("a,b",), ("",), ("x,b",), ("c,a",)])
    genes, is_known, sets, names = asked(str(path), ["a", "b", "c"])
    assert genes == ["a,b", "", "x,b", "c,a"] and is_known == [True, True, False, True]
    assert sets == [[0, 1], [], [0, 2]] and names == ["a", "b", "c", "x"]


def test_all_sets_of_one_or_two_names():
    singles = asked("all-singles", ["a", "b", "c"])
    assert singles == (["a", "b", "c"], [True] * 3, [[0], [1], [2]], ["a", "b", "c"])
    genes, _, sets, _ = asked("all-pairs", ["a", "b", "c"])
    assert genes == ["a,b", "a,c", "b,c"] and sets == [[0, 1], [0, 2], [1, 2]]


def test_a_table_is_read_in_parts_that_count_its_lines(tmp_path, monkeypatch):
    """Blank lines, spaces, controls and an error, at some 100 lines a part."""
    monkeypatch.setattr(data, "CHUNK", 1500)
    lines = [f"g{i % 50},g{i % 37} ,g{i % 50}\t{i}" for i in range(1500)]
    lines[7], lines[1200], lines[1300] = "\t1.5", "", "  \t2.5"
    path = tmp_path / "scores.tsv"
    path.write_text("\n".join(["genes\tscore", *lines, ""]))
    columns = read_knockouts(str(path), number := Numbers())
    assert (
        columns["targets"] == ["score"]
        and columns["left_out"] == []
        and not {"split", "weight"} & columns.keys()
    )
    row, node, y = columns["row"], columns["node"], columns["y"]
    perturbed, ptr, _ = pack(row, node, columns["level"], len(y)).values()
    rows = [line.split("\t") for line in lines if line]
    expected = [
        sorted({number[gene.strip()] for gene in genes.split(",") if gene.strip()})
        for genes, _ in rows
    ]
    assert y.tolist() == [[float(score)] for _, score in rows]
    assert [part.tolist() for part in perturbed.split(ptr.diff().tolist())] == expected
    for line, wrong in (
        (1401, "g1,,g2\t0"),
        (1402, "g1\tNaN"),
        (1403, "g1\t1\t2"),
        (1404, "g1\t1_0"),
    ):
        path.write_text(
            "\n".join(["genes\tscore", *lines[: line - 2], wrong, *lines[line - 2 :], ""])
        )
        with pytest.raises(DataError, match=rf"scores.tsv:{line}: "):
            read_knockouts(str(path), Numbers())


def test_unreadable_files_are_named(tmp_path):
    options = config(tmp_path)
    for content in (b"\xff\xfe\x00", "source".encode("utf-16"), b"source\ttarget\trelation\n\xe9"):
        Path(options.edges).write_bytes(content)
        with pytest.raises(DataError, match=r"edges\.tsv is not UTF-8 text: save it as UTF-8"):
            load(options)
    Path(options.edges).unlink()
    with pytest.raises(DataError, match=r"cannot read .*edges\.tsv: No such file"):
        load(options)


def test_tables_are_hashed_by_what_python_3_10_has(tmp_path, monkeypatch):
    monkeypatch.delattr(hashlib, "file_digest", raising=False)
    assert load(config(tmp_path)).genes == ["a", "b", "c", "d"]


def test_the_cache_is_reused_while_its_inputs_are_unchanged(tmp_path, monkeypatch):
    options = config(tmp_path)
    first = load(options)
    calls = []
    original = tables.read_tables
    monkeypatch.setattr(data, "read_tables", lambda c: calls.append(1) or original(c))
    assert load(options).fingerprint() == first.fingerprint()
    assert calls == []
    assert (
        load(replace(options, split_seed=1, batch_size=7, workers=2)).fingerprint()
        == first.fingerprint()
    )
    assert calls == []
    write_table(Path(options.perturbations), [*SCORES, ("c", 3, "train")])
    assert len(load(options).y) == 4
    assert calls == [1]
    assert (load(replace(options, undirected=True)).edge_type == 1).sum() == 2
    assert calls == [1, 1]
    assert not list(tmp_path.glob("cache/*.tmp"))


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_a_damaged_cache_is_rebuilt(tmp_path, damage, caplog):
    options = config(tmp_path)
    first = load(options)
    (cached,) = (tmp_path / "cache").glob("*.pt")
    cached.write_bytes(cached.read_bytes()[:-100] if damage is None else damage)
    assert load(options).fingerprint() == first.fingerprint()
    assert "damaged" in caplog.text
    caplog.clear()
    assert load(options).fingerprint() == first.fingerprint()
    assert caplog.text == ""


@pytest.mark.parametrize("damage", [None, b"not a checkpoint"])
def test_one_process_builds_the_cache_and_the_others_wait(tmp_path, damage):
    built, options = [], DataConfig(cache_dir=str(tmp_path / "cache"))
    if damage:
        tables.cached(options, "numbers", "key", dict)
        (path,) = (tmp_path / "cache").glob("*.pt")
        path.write_bytes(damage)

    def build() -> dict:
        built.append(1)
        time.sleep(0.3)
        return {"numbers": torch.arange(5)}

    with ThreadPoolExecutor(
        4
    ) as pool:  # flock is per open file, so threads can stand in for processes
        results = list(
            pool.map(lambda _: tables.cached(options, "numbers", "key", build), range(4))
        )
    assert len(built) == 1
    assert all(result["numbers"].tolist() == [0, 1, 2, 3, 4] for result in results)
    assert tables.cached(options, "numbers", "another key", dict) == {}


def test_the_cache_is_written_atomically(tmp_path, monkeypatch, caplog):
    """A full disk leaves no partial file behind."""
    content = {"numbers": torch.arange(5)}

    def full(content: dict, file: Path) -> None:
        file.write_bytes(b"a part")
        assert not list(tmp_path.glob("*.pt"))
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch, "save", full)
    assert (
        tables.cached(DataConfig(cache_dir=str(tmp_path)), "numbers", "key", lambda: content)
        is content
    )
    assert "cannot be written: no space left" in caplog.text
    assert [left.suffix for left in tmp_path.iterdir()] == [".lock"]


def test_what_a_process_killed_while_writing_the_cache_leaves_is_overwritten(tmp_path, monkeypatch):
    def killed(content: dict, file: Path) -> None:
        file.write_bytes(b"a part" * 1000)
        os._exit(9)

    content, options = {"numbers": torch.arange(5)}, DataConfig(cache_dir=str(tmp_path))
    if (child := os.fork()) == 0:
        monkeypatch.setattr(torch, "save", killed)
        tables.cached(options, "numbers", "key", lambda: content)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 2
    tables.cached(options, "numbers", "key", lambda: content)
    assert sorted(left.suffix for left in tmp_path.iterdir()) == [".lock", ".pt"]
    assert tables.cached(options, "numbers", "key", dict)["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_a_cache_that_cannot_be_locked_is_read_but_not_written(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError("no locks available")

    content, options = {"numbers": torch.arange(5)}, DataConfig(cache_dir=str(tmp_path))
    tables.cached(options, "numbers", "key", lambda: content)
    before = sorted(tmp_path.glob("*.pt"))
    monkeypatch.setattr(data.fcntl, "flock", no_locks)
    assert tables.cached(options, "numbers", "key", dict)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert caplog.text == ""
    assert tables.cached(options, "numbers", "another key", dict) == {}
    assert "cannot be written: no locks available" in caplog.text
    assert sorted(tmp_path.glob("*.pt")) == before and not list(tmp_path.glob("*.tmp"))


def test_an_unwritable_cache_folder_only_disables_the_cache(tmp_path, caplog):
    options = config(tmp_path)
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert len(load(options).y) == 3
    assert "cannot be written" in caplog.text


def test_fractions_that_leave_a_split_without_rows_are_refused(tmp_path):
    rows = [
        ("genes", "score"),
        *((gene, 1) for gene in ("a", "b", "c", "a,b", "a,c", "b,c", "a,b,c", "d", "", "a,d")),
    ]
    options = config(tmp_path, scores=rows)
    assert load(options).split.unique().tolist() == [0, 1, 2]
    for fractions, split in (
        ({"val_fraction": 0.0}, "val"),
        ({"test_fraction": 0.95}, "val|train"),
    ):
        with pytest.raises(
            DataError,
            match=f"no rows in the ({split}) split of 10 rows .*: change data.val_fraction",
        ):
            load(replace(options, **fractions))


def test_wrong_options_are_refused():
    for files in ({"edges": "edges.tsv"}, {"perturbations": "scores.tsv"}):
        with pytest.raises(
            ValueError,
            match=r"data\.edges and data\.perturbations go together: set both or neither",
        ):
            DataConfig(**files)


def test_the_example_is_what_the_preset_small_gives(tmp_path, monkeypatch):
    """In any working directory; only the scores are rounded and the edges in another order."""
    monkeypatch.chdir(tmp_path)
    example, expected = load(DataConfig()), synthetic_tables(PRESETS["small"])
    for name in ("genes", "relations", "targets"):
        assert list(getattr(example, name)) == list(getattr(expected, name))
    for name in ("perturbed", "perturbed_ptr"):
        assert torch.equal(getattr(example, name), getattr(expected, name))
    assert torch.equal(example.split, random_split(expected, DataConfig()))
    torch.testing.assert_close(example.y, expected.y, rtol=5.1e-11, atol=1e-12)  # 11 digits
    graphs = example.graph(), expected.graph()
    for ours, drawn in zip(*(graph.edge_index_dict.values() for graph in graphs), strict=True):
        assert ours.T.tolist() == sorted(drawn.T.tolist())


def test_a_preset_is_written_as_tables_that_train_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["synthetic", "network", str(tmp_path / "new/tables")])
    synthetic.main()
    overrides = [*capsys.readouterr().out.split(), "--config", os.devnull]
    tables = load(train.read_config([*overrides, f"data.cache_dir={tmp_path}"]).data)
    expected = synthetic_tables(PRESETS["network"])
    assert torch.equal(tables.perturbed_ptr, expected.perturbed_ptr)
    assert torch.equal(tables.perturbed, expected.perturbed)
    torch.testing.assert_close(tables.y, expected.y, rtol=5.1e-11, atol=1e-12)
    assert tables.edge_type.bincount().tolist() == expected.edge_type.bincount().tolist()


def test_without_the_example_the_tables_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "EXAMPLE", tmp_path / "example")
    with pytest.raises(
        DataError, match=r"no example in .*/example: set data\.edges and data\.perturbations"
    ):
        load(DataConfig(cache_dir=str(tmp_path)))
    assert len(load(config(tmp_path)).y) == 3


def test_features_may_be_added_to_the_example(tmp_path):
    write_table(tmp_path / "features.tsv", [("gene", "size"), ("G00001", 1), ("G00002", 2)])
    tables = load(DataConfig(features=str(tmp_path / "features.tsv"), cache_dir=str(tmp_path)))
    assert tables.features.ne(0).flatten().nonzero().flatten().tolist() == [1, 2]


def test_random_split_depends_on_its_seed_alone_and_keeps_replicates_together():
    sets = [[i % 50] for i in range(200)]
    tables = Tables(
        ["g"] * 50,
        ["r"],
        torch.zeros(2, 0).long(),
        torch.zeros(0).long(),
        *pack_sets(sets),
        y=torch.zeros(200),
    )
    splits = [random_split(tables, DataConfig(split_seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(splits[0], splits[1]) and not torch.equal(splits[0], splits[2])
    assert torch.bincount(splits[0].int()).tolist() == [160, 20, 20]
    assert torch.equal(splits[0].view(4, 50)[0].expand(4, 50), splits[0].view(4, 50))


def make_dataset(num_rows: int, num_nodes: int = 7) -> KnockoutDataset:
    sets = [[(row + k) % num_nodes for k in range(row % 4)] for row in range(num_rows)]
    return KnockoutDataset(tables_of(sets, torch.arange(num_rows) / 2), torch.arange(num_nodes))


def test_a_batch_holds_its_rows_and_padding_has_zero_weight():
    dataset = make_dataset(9)
    batch = dataset.__getitems__([2, -1, 0, 7])
    assert batch.perturbed.tolist() == [2, 3, 0, 1, 2]
    assert batch.perturbed_batch.tolist() == [0, 0, 3, 3, 3]
    assert batch.perturbed_ptr.tolist() == [0, 2, 2, 2, 5]
    assert batch.y.tolist() == [[1.0], [0.0], [0.0], [3.5]]
    assert batch.weight.tolist() == [[1.0], [0.0], [1.0], [1.0]]
    assert batch.index.tolist() == [2, -1, 0, 7]
    assert batch.num_dead_edges == 2 + 3 + 0 + 1 + 2 and isinstance(batch.num_dead_edges, int)
    assert dataset[7].perturbed.tolist() == [0, 1, 2]
    assert dataset.__getitems__([]).perturbed_ptr.tolist() == [0]


def test_a_node_listed_twice_in_a_sample_counts_once():
    dataset = KnockoutDataset(tables_of([[3, 3, 1], [], [2, 3]], torch.zeros(3)), torch.arange(5))
    batch = dataset.__getitems__([0, 1, 2])
    assert batch.perturbed.tolist() == [1, 3, 2, 3]
    assert batch.perturbed_ptr.tolist() == [0, 2, 2, 4]
    assert batch.num_dead_edges == 1 + 3 + 2 + 3


def test_loader_workers_give_the_same_batches():
    assert loader_of_compared_workers("cpu", 2).multiprocessing_context is None


def loader_of_compared_workers(device: str, workers: int) -> DataLoader:
    dataset, batches = make_dataset(20), [[0, 5, 6], [7, -1, 19]]
    loader = make_loader(dataset, batches, workers, torch.device(device))
    for ours, reference in zip(
        loader, make_loader(dataset, batches, 0, torch.device("cpu")), strict=True
    ):
        assert ours.to_dict().keys() == reference.to_dict().keys()
        assert all(
            torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(reference[key]))
            for key in ours.to_dict()
        )
    return loader


@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (3, 2)]
)
def test_a_step_takes_the_same_rows_with_any_world_size(world_size, accumulate):
    rows = torch.arange(100, 153)
    alone = StepSampler(rows, 12, 1, 1, 0, seed=3)
    ranks = [
        StepSampler(rows, 12, accumulate, world_size, rank, seed=3) for rank in range(world_size)
    ]
    for sampler in (alone, *ranks):
        sampler.set_epoch(2)
    steps = list(alone)
    assert len(steps) == alone.steps_per_epoch == 5
    assert sorted(row for step in steps for row in step) == rows.tolist()
    dealt = [list(sampler) for sampler in ranks]
    assert (
        [len(batches) for batches in dealt]
        == [len(sampler) for sampler in ranks]
        == [5 * accumulate] * world_size
    )
    for number, step in enumerate(steps):
        parts = [batches[number * accumulate : (number + 1) * accumulate] for batches in dealt]
        together = [row for part in parts for batch in part for row in batch]
        assert len({len(batch) for part in parts for batch in part}) == 1
        assert sorted(row for row in together if row >= 0) == sorted(step)
        assert sorted(ranks[0].rows_in_step(number).tolist()) == sorted(step)


def test_epochs_and_seeds_differ_and_a_resumed_epoch_continues():
    sampler = StepSampler(torch.arange(50), 8, 1, 1, 0, seed=0)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1]
    assert list(StepSampler(torch.arange(50), 8, 1, 1, 0, seed=1)) not in orders
    sampler.set_epoch(1, first_step=4)
    assert len(sampler) == 3
    assert list(sampler) == orders[1][4:]


def small_tables(sets: list[list[int]], num_nodes: int = 20) -> Tables:
    y = torch.arange(len(sets), dtype=torch.float64)
    return Tables(
        [f"g{i:02}" for i in range(num_nodes)],
        ["r"],
        torch.tensor([[0], [1]]),
        torch.tensor([0]),
        *pack_sets(sets),
        y,
    )


def test_the_node_split_trains_on_no_test_node_and_its_folds_cover_all_nodes():
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randperm(20, generator=generator)[: k % 4].tolist() for k in range(400)]
    tables, tested = small_tables(sets), []
    for fold in range(6):
        split = node_split(
            tables, DataConfig(split="nodes", split_seed=fold, test_fraction=0.2, val_fraction=0.1)
        )
        rows = list(zip(sets, split.tolist(), strict=True))
        train, val, test = (
            {node for nodes, s in rows if s == k for node in nodes} for k in range(3)
        )
        val, test = val - train, test - train
        assert len(train) == 14 and len(val) == 2 and len(test) == 4
        for nodes, s in rows:
            assert s == (
                -1
                if test & {*nodes} and val & {*nodes}
                else 2
                if test & {*nodes}
                else bool(val & {*nodes})
            )
        tested.append(test)
    assert set.union(*tested[:5]) == set(range(20)) and tested[5] == tested[0]


def test_unseen_nodes_are_counted_by_row():
    sets = [[0, 1, 2], [3], [], [0, 1], [0, 2, 4], [0, 3], [4, 5], [1, 2]]
    tables = small_tables(sets)
    tables.split = torch.tensor([0, 0, 0, 2, 2, 2, 2, 1], dtype=torch.int8)
    assert tables.unseen().tolist() == [0, 0, 0, 0, 1, 0, 2, 0]


def test_a_node_split_beside_a_split_column_or_without_rows_is_an_error(tmp_path):
    with pytest.raises(
        DataError, match=r"has a column split: remove it, or set data.split=random to use it"
    ):
        load(config(tmp_path, split="nodes"))
    unsplit = [row[:2] for row in SCORES]
    with pytest.raises(
        DataError, match=r"no rows in the val split of 3 rows \(data.split=nodes\): change"
    ):
        load(config(tmp_path, scores=unsplit, split="nodes", test_fraction=0.4))


def mixed_tables() -> Tables:
    """Returns 400 samples of none to five of 30 genes, with three gappy scores.

    The genes' effects have a mean. Four of the genes occur in no training row.
    """
    random, generator = Random(0), torch.Generator().manual_seed(0)
    sets = [random.sample(range(26), random.choice([0, 1, 1, 2, 3, 5])) for _ in range(360)]
    sets += [random.sample(range(30), 2) for _ in range(40)]
    effect = 1 + torch.randn(30, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(400, 3, dtype=torch.float64, generator=generator)
    y = 5 + 0.3 * noise + torch.stack([effect[nodes].sum(0) for nodes in sets])
    y[torch.rand(400, 3, generator=generator) < 0.2] = math.nan
    edges = torch.tensor([[0], [1]]), torch.tensor([0])
    tables = Tables(
        [f"g{i:02}" for i in range(30)], ["r"], *edges, *pack_sets(sets), y, targets=["a", "b", "c"]
    )
    tables.split = torch.tensor([0, 0, 0, 1] * 90 + [1, 2] * 20, dtype=torch.int8)
    return tables


def dense_design(tables: Tables) -> torch.Tensor:
    """Returns the columns intercept, number of knock-outs, and an indicator of each node."""
    design = torch.zeros(len(tables.y), len(tables.genes), dtype=torch.float64)
    design[tables.sample(), tables.perturbed] = 1
    return torch.cat([torch.ones(len(design), 1), design.sum(1, keepdim=True), design], dim=1)


@pytest.mark.parametrize("sizes", ["mixed", "pairs"])
def test_additive_baseline_is_the_ridge_solution(sizes, monkeypatch):
    """Intercept and count are not penalised.

    Where all rows knock out two nodes, the count says nothing.
    """
    tables = mixed_tables()
    if sizes == "pairs":
        tables.perturbed_ptr = torch.arange(0, 801, 2)
        tables.level = torch.zeros(800, dtype=torch.float64)
        tables.perturbed = torch.randint(26, (800,), generator=torch.Generator().manual_seed(1))
        tables.perturbed[1::2] = (tables.perturbed[::2] + 1 + torch.arange(400) % 20) % 26
    design = dense_design(tables)
    if sizes == "mixed":
        monkeypatch.setattr("baseline.TARGETS_AT_ONCE", 2)
    monkeypatch.setattr("baseline.PENALTIES", (2.0,))
    found = additive_baseline(tables)
    seen = tables.is_seen()
    assert seen.tolist() == [True] * 26 + [False] * 4
    unpenalised = [0] if sizes == "pairs" else [0, 1]
    columns = [*unpenalised, *range(2, design.size(1))]
    penalty = 2 * torch.eye(len(columns), dtype=torch.float64)
    penalty[: len(unpenalised)] = 0
    for t in range(3):
        rows = tables.rows("train")
        rows = rows[~tables.y[rows, t].isnan()]
        x, y = design[rows][:, columns], tables.y[rows, t]
        solution = torch.linalg.solve(x.T @ x + penalty, x.T @ y)
        solution[-4:] = found.imputed[~seen, t]
        torch.testing.assert_close(
            found.prediction[:, t], design[:, columns] @ solution, rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            found.effect[:, t].double(), solution[len(unpenalised) :], rtol=1e-6, atol=1e-6
        )
        assert found.mean[t] == pytest.approx(y.mean().item()) and found.std[t] == pytest.approx(
            y.std(correction=0).item()
        )
    if sizes == "mixed":
        assert found.effect.shape == (30, 3)
        assert found.slope.sub(1).abs().max() < 0.5 and found.intercept.sub(5).abs().max() < 0.5
    else:
        assert (found.slope == 0).all()


@pytest.mark.parametrize("loss", ["squared", "binary"])
def test_the_baseline_of_a_target_is_the_same_alone_and_beside_others(loss):
    """Although the gaps of the others differ."""
    tables = mixed_tables()
    if loss == "binary":
        tables.y = (
            (tables.y > tables.y.nanmedian(dim=0).values)
            .double()
            .where(~tables.y.isnan(), math.nan)
        )
    together = additive_baseline(tables, loss)
    alone = [additive_baseline(replace(tables, y=y), loss) for y in tables.y.split(1, dim=1)]
    tensors = zip(*(baseline[:-1] for baseline in alone), strict=True)
    for field, expected in zip(together[:-1], map(torch.cat, tensors, [-1] * 7), strict=True):
        torch.testing.assert_close(field, expected, rtol=1e-7, atol=1e-7)


def test_an_unseen_node_gets_the_mean_effect_of_those_one_and_two_hops_away():
    """Equal to dense products.

    Node 6 has no edges and node 7 only one to itself: they get the mean of all.
    """
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(6, (2, 14), generator=generator)
    edge_index[:, 0] = 7
    edge_type = torch.tensor([0] * 9 + [1] * 5)
    weight = torch.rand(14, dtype=torch.float64, generator=generator) + 0.5
    tables = Tables(
        list("abcdefgh"), ["r", "s"], edge_index, edge_type, *pack_sets([[0]]), torch.ones(1)
    )
    tables.edge_weight = weight
    is_seen = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1]).bool()
    effect = torch.randn(8, 2, dtype=torch.float64, generator=generator) * is_seen.unsqueeze(1)
    found = baseline.impute_effects(tables, is_seen, effect)

    adjacency = torch.zeros(8, 8, dtype=torch.float64)
    for (source, target), value in zip(edge_index.T.tolist(), weight, strict=True):
        if source != target:
            adjacency[source, target] += value
            adjacency[target, source] += value
    degree = adjacency.sum(1)
    adjacency = adjacency / (degree.outer(degree)).sqrt().where(adjacency > 0, 1.0)
    kernel = (adjacency @ adjacency + adjacency).fill_diagonal_(0.0)[:, is_seen]
    own = effect[is_seen]
    for t in range(2):
        imputed = []
        for shrinkage in baseline.PENALTIES:
            total = kernel.sum(1) + shrinkage
            imputed.append((kernel @ own[:, t] + shrinkage * own[:, t].mean()) / total)
        best = min(imputed, key=lambda values: (values[is_seen] - own[:, t]).square().sum())
        torch.testing.assert_close(found[:, t], best)
    torch.testing.assert_close(found[6:], own.mean(0).expand(2, -1))


def test_the_logistic_baseline_is_the_penalised_maximum_of_the_likelihood(monkeypatch):
    tables = mixed_tables()
    tables.y = (
        (tables.y > tables.y.nanmedian(dim=0).values).double().where(~tables.y.isnan(), math.nan)
    )
    monkeypatch.setattr("baseline.PENALTIES", (2.0,))
    found = additive_baseline(tables, "binary")
    design, seen = dense_design(tables), tables.is_seen()
    for t in range(3):
        rows = tables.rows("train")
        rows = rows[~tables.y[rows, t].isnan()]
        parameters = torch.cat(
            [found.intercept[t : t + 1], found.slope[t : t + 1], found.effect[:, t]]
        )
        probability = (design @ parameters).sigmoid()
        torch.testing.assert_close(found.prediction[:, t], probability)
        gradient = design[rows].T @ (probability[rows] - tables.y[rows, t])
        gradient[2:] += 2 * parameters[2:] * seen
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)
    assert found.std.tolist() == [1, 1, 1]


def test_the_additive_baseline_takes_the_penalty_that_suits_the_validation_rows(monkeypatch):
    tables = synthetic_tables(PRESETS["small"], seed=1)
    tables.split = random_split(tables, DataConfig())
    tables.y = tables.y[
        torch.randperm(len(tables.y), generator=torch.Generator().manual_seed(0))
    ]  # only noise
    val = tables.rows("val")

    def prediction(*penalties: float) -> torch.Tensor:
        monkeypatch.setattr("baseline.PENALTIES", penalties)
        return additive_baseline(tables).prediction

    errors = [(prediction(p) - tables.y)[val].square().mean() for p in (0.1, 10.0, 1000.0)]
    assert errors[0] > errors[1] > errors[2]
    torch.testing.assert_close(prediction(0.1, 10.0, 1000.0), prediction(1000.0))


def test_a_column_that_is_solved_early_rests_until_the_slowest_is():
    """Its residual would go on to the smallest numbers, by which nothing can be divided."""
    matrix = torch.logspace(-1, 3, 200, dtype=torch.float64).diag()
    b = torch.randn(200, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b[5:, 1:] = 0
    x = baseline.conjugate_gradients(lambda x: matrix @ x, b, torch.zeros_like(b), tolerance=1e-12)
    torch.testing.assert_close((matrix @ x)[:, 1:], b[:, 1:], rtol=0, atol=1e-9)


def test_the_additive_baseline_is_a_constant_if_no_training_row_knocks_out_a_node():
    y = torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float64)
    edges = torch.tensor([[0], [1]]), torch.tensor([0])
    tables = Tables(["a", "b"], ["r"], *edges, *pack_sets([[], [], [0], [0, 1]]), y)
    tables.split = torch.tensor([0, 0, 1, 2], dtype=torch.int8)
    found = additive_baseline(tables)
    torch.testing.assert_close(found.prediction, torch.full((4, 1), 1.5, dtype=torch.float64))
    assert (found.effect == 0).all() and found.slope == 0


def test_additive_baseline_does_not_depend_on_the_unit_of_the_scores():
    tables = synthetic_tables(PRESETS["small"], seed=1)
    tables.split = random_split(tables, DataConfig())
    reference = additive_baseline(tables).prediction
    tables.y *= 1e-12
    torch.testing.assert_close(
        1e12 * additive_baseline(tables).prediction, reference, rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("preset", ["small", "network"])
def test_a_quick_preset_has_the_declared_shape(preset):
    compare_with_preset(preset)


def compare_with_preset(preset: str) -> None:
    shape = PRESETS[preset]
    tables, signal = generate(shape)
    tables.split = random_split(tables, DataConfig())
    assert len(tables.genes) == shape.num_nodes
    assert (
        dict(zip(tables.relations, tables.edge_type.bincount().tolist(), strict=True))
        == shape.num_edges
    )
    for edge_index in tables.graph().edge_index_dict.values():
        source, target = edge_index
        assert (source != target).all()
        assert len((source * shape.num_nodes + target).unique()) == edge_index.size(1)
    counts = tables.perturbed_ptr.diff()
    assert (counts.min(), counts.max()) == shape.deletions
    degree = torch.bincount(tables.edge_index.flatten(), minlength=shape.num_nodes)
    assert degree.max() > 5 * degree.float().mean()  # hubs
    assert preset != "yeast" or degree.max() > 5000
    rows = tables.rows("test")
    assert 0.85 < metrics.pearson(tables.y[rows], signal[rows, None]).item() < 0.99


def test_synthetic_scores_depend_on_the_graph():
    """The residual of the additive baseline is larger for pairs of genes that an edge joins."""
    tables, signal = generate(PRESETS["small"])
    tables.split = random_split(tables, DataConfig())
    pairs = (tables.perturbed_ptr.diff() == 2).nonzero().flatten()
    first, second = (tables.perturbed[tables.perturbed_ptr[pairs] + k] for k in (0, 1))
    physical = tables.graph()["physical"].edge_index
    linked = torch.zeros(len(tables.genes), len(tables.genes), dtype=torch.bool)
    linked[physical[0], physical[1]] = linked[physical[1], physical[0]] = True
    residual = (signal[:, None] - additive_baseline(tables).prediction)[pairs]
    joined = linked[first, second]
    assert joined.sum() > 100 and (~joined).sum() > 100
    assert residual[joined].mean() > residual[~joined].mean() + 0.5 * residual.std()


def test_failures_spread_as_a_loop_over_nodes_says():
    edge_indices = [
        torch.tensor([[0, 1, 2, 3], [2, 2, 3, 4]]),
        torch.tensor([[0, 4, 5], [3, 5, 4]]),
    ]
    perturbed, perturbed_ptr = pack_sets([[], [0], [0, 1], [2, 5]])
    losses = failure_losses(edge_indices, 6, perturbed, perturbed_ptr, rounds=3)
    suppliers = [
        [(i, 0.5**r) for r, e in enumerate(edge_indices) for i, j in e.T.tolist() if j == k]
        for k in range(6)
    ]

    def activities(dead: list[int]) -> list[float]:
        now = [float(k not in dead) for k in range(6)]
        for _ in range(3):
            lost = [
                sum(w * (1 - now[i]) for i, w in pairs) / (sum(w for _, w in pairs) or 1)
                for pairs in suppliers
            ]
            now = [(k not in dead) / (1 + math.exp(-12 * (0.4 - lost[k]))) for k in range(6)]
        return now

    for loss, dead in zip(losses.tolist(), ([], [0], [0, 1], [2, 5]), strict=True):
        intact, now = activities([]), activities(dead)
        assert loss == pytest.approx(
            sum(intact[k] - now[k] for k in range(6) if k not in dead), abs=1e-12
        )


def test_synthetic_tables_depend_on_their_seed_alone():
    one, same, other = (synthetic_tables(PRESETS["small"], seed) for seed in (0, 0, 1))
    for tables in (one, same, other):
        tables.split = random_split(tables, DataConfig())
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_the_fingerprint_depends_on_every_field():
    tables = synthetic_tables(PRESETS["small"], 0)
    tables.split, tables.weight = (
        random_split(tables, DataConfig()),
        torch.arange(float(len(tables.y))),
    )
    tables.features, tables.edge_weight = torch.arange(400.0).view(-1, 1), torch.arange(8000.0)
    tables.edge_attr = torch.arange(16000.0).view(-1, 2)
    tables.level = torch.arange(len(tables.perturbed)).double()
    for name, value in vars(tables).items():
        if name == "left_out":  # of which nothing depends
            continue
        if isinstance(value, list | tuple):
            other = [*value[:-1], "another"]
        elif isinstance(value, torch.Tensor) and value.numel():
            other = value.flip(0)
        else:  # a field of a copy that the example leaves empty
            other = "another"
        assert replace(tables, **{name: other}).fingerprint() != tables.fingerprint(), name


def test_the_cache_depends_on_every_module_that_data_imports(tmp_path, monkeypatch):
    """Those that they import, too, but not on others, such as the model's."""
    (tmp_path / "data.py").write_text("import json\ndef read():\n    from reader import lines\n")
    (tmp_path / "reader.py").write_text("import units\nlines = []\n")
    monkeypatch.setattr(data, "__file__", str(tmp_path / "data.py"))
    read = data.source_code.__wrapped__  # a process reads them once
    seen = set()
    for name in ("units.py", "reader.py", "data.py"):
        with (tmp_path / name).open("a") as file:
            file.write("scale = 100\n")
        seen.add(read())
        (tmp_path / "model.py").write_text(f"after = '{name}'")
        seen.add(read())
    assert len(seen) == 3


def test_the_fingerprint_covers_added_fields():
    tables = synthetic_tables(PRESETS["small"], 0)

    def fingerprint(added: object) -> str:
        tables.added = added
        return tables.fingerprint()

    one, other = torch.zeros(2000), torch.zeros(2000).index_fill(0, torch.tensor(1000), 1.0)
    forms = [
        lambda x: x,
        lambda x: [x],
        lambda x: {"a": (x,)},
        torch.Tensor.bfloat16,
        torch.Tensor.bool,
    ]
    for form in (
        *forms,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        lambda x: torch.stack([x, x], 1)[:, 0],
    ):
        assert fingerprint(form(one)) == fingerprint(form(one.clone())) != fingerprint(form(other))
    zeros = (
        torch.zeros(2),
        torch.zeros(1, 2),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, dtype=torch.float64),
    )
    assert len({fingerprint(same_bytes) for same_bytes in zeros}) == 4
    assert fingerprint(["a\nb", "c"]) != fingerprint(["a", "b\nc"])
    assert fingerprint({"a": "1"}) != fingerprint({"a": 1}) != fingerprint({"b": 1})
    assert (
        len({fingerprint(value) for value in (0, 0.5, "", None, False, [], {}, torch.tensor(0))})
        == 8
    )


def test_a_part_of_blank_lines_alone_is_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CHUNK", 3)  # a row at once, or four blank lines
    rows = "a\t1\nb\t2\nc\t3\n"
    (tmp_path / "scores.tsv").write_text(f"genes\tscore\n{rows}\n\n\n\n{rows}\n")
    columns = read_knockouts(str(tmp_path / "scores.tsv"), Numbers())
    row, node, y, *_ = columns.values()
    assert row.tolist() == [0, 1, 2, 3, 4, 5] and node.tolist() == [0, 1, 2] * 2 and len(y) == 6
    (tmp_path / "blank.tsv").write_text("genes\tscore\n\n\n")
    with pytest.raises(DataError, match="no rows below the header"):
        read_knockouts(str(tmp_path / "blank.tsv"), Numbers())


def test_a_table_of_intact_samples_alone_has_a_fingerprint(tmp_path):
    rows = [("", k, split) for k, split in enumerate(("train", "val", "test"))]
    tables = load(config(tmp_path, EDGES, [SCORES[0], *rows]))
    assert tables.perturbed.shape == (0,) and len(tables.fingerprint()) == 64
