"""The cache: its files are built by one process, and again if something they depend on changes."""

import inspect
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import data_notes
import data_tables
import parts
from baseline import load_baseline
from data import DataConfig, load
from data_cache import cached, source_digest
from tests.template.fixtures import ROOT, write_table
from tests.template.tables import SCORES, write_tables
from tests.tools.runs import zero_a_block

CONTENT = {"numbers": torch.arange(5)}


def caches(folder: Path) -> list[Path]:
    """Returns the paths of the values in a cache."""
    return sorted(folder.glob("*.pt"))


# ---- Files ---------------------------------------------------------------------------------------
def test_the_cache_is_reused_while_its_inputs_are_unchanged(tmp_path, monkeypatch):
    options = write_tables(tmp_path)
    first = load(options)
    read_edges = data_tables.read_edges
    calls = []

    def count(*arguments):
        calls.append(arguments)
        return read_edges(*arguments)

    monkeypatch.setattr(data_tables, "read_edges", count)
    assert load(options).fingerprint() == first.fingerprint()
    other_options = replace(options, batch_size=7, workers=2)
    assert load(other_options).fingerprint() == first.fingerprint()
    assert len(calls) == 0
    write_table(Path(options.perturbations), [*SCORES, ("c", 3, "train")])
    assert len(load(options).y) == 4
    assert len(calls) == 1
    undirected = load(replace(options, undirected=True))
    assert (undirected.edge_type == 1).sum() == 2
    assert len(calls) == 2
    assert not list(tmp_path.glob("cache/*.tmp"))


def test_a_full_disk_only_disables_the_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("no space left")))
    assert cached(tmp_path, "numbers", "key", lambda: CONTENT) is CONTENT
    assert "cannot be written" in caplog.text and ": no space left" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", "cut", "zeros"])
def test_a_damaged_cache_is_rebuilt(tmp_path, damage, caplog):
    options = write_tables(tmp_path)
    first = load(options)
    (path,) = caches(tmp_path / "cache")
    if damage == "zeros":
        zero_a_block(path)
    else:
        path.write_bytes(path.read_bytes()[:-100] if damage == "cut" else damage)
    assert load(options).fingerprint() == first.fingerprint()
    assert "damaged" in caplog.text
    caplog.clear()
    assert load(options).fingerprint() == first.fingerprint()
    assert caplog.text == ""


@pytest.mark.parametrize("damage", [None, b"not a checkpoint"])
def test_one_process_builds_the_cache_and_the_others_wait(tmp_path, damage):
    """The test uses threads instead of processes, because a lock belongs to an open file."""
    folder = str(tmp_path / "cache")
    built = []
    if damage:
        cached(folder, "numbers", "key", dict)
        (path,) = caches(tmp_path / "cache")
        path.write_bytes(damage)

    def build() -> dict:
        built.append(1)
        time.sleep(0.3)
        return CONTENT

    def read(_: int) -> dict:
        return cached(folder, "numbers", "key", build)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(read, range(4)))
    assert len(built) == 1
    assert all(result["numbers"].tolist() == [0, 1, 2, 3, 4] for result in results)
    assert cached(folder, "numbers", "another key", dict) == {}


def test_a_partial_file_of_a_killed_process_is_overwritten(tmp_path, monkeypatch):
    def killed(content: dict, file: Path) -> None:
        file.write_bytes(b"a part" * 1000)
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(torch, "save", killed)
        cached(str(tmp_path), "numbers", "key", lambda: CONTENT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert sorted(left.suffix for left in tmp_path.iterdir()) == [".lock", ".tmp"]
    cached(str(tmp_path), "numbers", "key", lambda: CONTENT)
    assert sorted(left.suffix for left in tmp_path.iterdir()) == [".lock", ".pt"]
    found = cached(str(tmp_path), "numbers", "key", dict)
    assert found["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_a_cache_that_cannot_be_locked_is_read_but_not_written(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError("no locks available")

    cached(str(tmp_path), "numbers", "key", lambda: CONTENT)
    before = caches(tmp_path)
    monkeypatch.setattr("data_cache.fcntl.flock", no_locks)
    found = cached(str(tmp_path), "numbers", "key", dict)
    assert found["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert caplog.text == ""
    assert cached(str(tmp_path), "numbers", "another key", dict) == {}
    assert "cannot be written" in caplog.text and ": no locks available" in caplog.text
    assert caches(tmp_path) == before
    assert not list(tmp_path.glob("*.tmp"))


def test_an_unwritable_cache_folder_only_disables_the_cache(tmp_path, caplog):
    options = write_tables(tmp_path)
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert len(load(options).y) == 3
    assert "cannot be written" in caplog.text


def test_without_a_cache_folder_tables_are_read_at_each_start(tmp_path, monkeypatch):
    """No files are left in the working directory."""
    options = replace(write_tables(tmp_path), cache_dir="")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = load(options)
    read_edges = Mock(wraps=data_tables.read_edges)
    monkeypatch.setattr(data_tables, "read_edges", read_edges)
    tables = load(options)
    assert read_edges.call_count == 1
    load_baseline(tables, tables.fingerprint(), options.cache_dir, "squared")
    assert tables.fingerprint() == first.fingerprint()
    assert list((tmp_path / "here").iterdir()) == []


def test_without_the_part_a_cache_folder_is_ignored(tmp_path, monkeypatch):
    """The options of an older run may name a folder, for example if the run is analysed."""
    monkeypatch.setattr(parts, "is_here", lambda module: module != "data_cache")
    options = write_tables(tmp_path)
    assert len(load(options).y) == 3
    assert not Path(options.cache_dir).exists()


def test_tables_are_read_again_if_data_notes_has_changed(tmp_path, monkeypatch):
    """`source_digest` does not include it, because it is imported with `optional`."""
    options = write_tables(tmp_path)
    load(options)
    (tmp_path / "data_notes.py").write_text(Path(data_notes.__file__).read_text() + "# edited\n")
    monkeypatch.setattr(data_notes, "__file__", str(tmp_path / "data_notes.py"))
    for _ in range(2):
        load(options)
        assert len(caches(tmp_path / "cache")) == 2


# ---- Code ----------------------------------------------------------------------------------------
@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with copies of the modules, whose code the cache hashes in this test."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    original = inspect.getsourcefile

    def in_copy(function: Callable) -> str:
        return str(folder / Path(original(function)).name)

    monkeypatch.setattr("data_cache.inspect.getsourcefile", in_copy)
    source_digest.cache_clear()  # because a process hashes each module only once
    yield folder
    source_digest.cache_clear()


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def remade(options: DataConfig) -> list[str]:
    """Loads tables and baseline like a run; returns the kinds of the files that are written."""
    folder = Path(options.cache_dir)
    before = caches(folder)
    source_digest.cache_clear()
    tables = load(options)
    load_baseline(tables, tables.fingerprint(), options.cache_dir, "squared")
    return sorted(path.name.partition("-")[0] for path in caches(folder) if path not in before)


ALL = ["baseline", "split", "tables"]


HARMLESS = [  # edits after which the cache is used
    ("data_cells.py", "\nimport csv\n", "\n# a comment\nimport csv  # and another\n"),
    ("data_cells.py", "CHUNK = 2**20  #", "CHUNK = (\n    2**20\n)  # another comment:"),
    ("data_tables.py", '"""From files to `Tables`: ', '"""Files to `Tables`: '),
    ("data_cells.py", '"""Returns a column of numbers', '"""Gives a column of numbers'),
    ("data_cells.py", '"""Some consecutive rows', '"""Consecutive rows'),
    ("model.py", "SCALE = 10.0", "SCALE = 12.0"),
    ("baseline.py", '"""The baseline: a prediction', '"""The baseline: predictions'),
    ("data.py", "* config.test_fraction", "* (config.test_fraction)"),
]
CHANGES = [  # edits, and the kinds of files that are written again after them
    ("data_cells.py", "valid = (least < numbers)", "valid = (least <= numbers)", ALL),
    ("data_cells.py", "2**20", "2**19", ALL),
    ("errors.py", "status = 2", "status = 3", ALL),
    ("baseline.py", "TARGETS_AT_ONCE = 64", "TARGETS_AT_ONCE = 32", ["baseline"]),
    ("data.py", "default_rng(seed)", "default_rng(1)", ["baseline", "split"]),
]


@pytest.mark.slow
def test_the_cache_is_built_again_if_its_code_is_edited(tmp_path, sources):
    scores = [("genes", "score"), *((name, k) for k, name in enumerate("abcd" * 5))]
    options = write_tables(tmp_path, scores=scores, val_fraction=0.25, test_fraction=0.25)
    assert remade(options) == ALL
    for file, old, new in HARMLESS:
        replace_text(sources / file, old, new)
    assert remade(options) == []
    for file, old, new, expected in CHANGES:
        replace_text(sources / file, old, new)
        assert remade(options) == expected, (file, new)
    assert remade(options) == []


def test_all_modules_that_a_reader_imports_are_part_of_the_key(sources):
    """Within a function, from a package, and by such a module."""
    replace_text(
        sources / "data_tables.py",
        "    node_number = {}",
        "    from formats.reader import lines\n\n    node_number = {}",
    )
    (sources / "formats").mkdir()
    (sources / "formats/__init__.py").write_text("")
    (sources / "formats/reader.py").write_text("import units\n\nlines = []\n")
    (sources / "units.py").write_text("SCALE = 1\n")
    digests = set()
    for name in ("units.py", "formats/reader.py", "formats/__init__.py", "data_tables.py"):
        source_digest.cache_clear()
        digests.add(source_digest(data_tables.read_tables))
        with (sources / name).open("a") as file:
            file.write("ADDED = 1\n")
    (sources / "unrelated.py").write_text("import tables\n")
    source_digest.cache_clear()
    digests.add(source_digest(data_tables.read_tables))
    assert len(digests) == 5
