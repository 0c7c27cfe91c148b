"""Small tables with random damage are read, or are an error with one message.

The damage is typical for people and their programs. If it is harmless, predictions keep their bits.
"""

import contextlib
import gzip
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import data
from errors import UserError
from task import KnockoutTask
from tests.template.fixtures import DEFAULTS, SMALL, write_defaults
from train import read_config

GENES = [
    "HLA-A",
    "MARCH1",
    "YAL001C",
    "ENSG01",
    "nanos",
    "b2",
    "a1",
    "x_y",
    "TRUE",
    "1e5",
    "c3",
    "d4",
]
CASES = 12  # number of tables with each kind of harmless damage
NUM_DAMAGED = 200  # number of tables with random damage
Table = dict[str, list[list[str]]]  # lines of cells, by the name of the file


def make_tables() -> Table:
    """Returns tables with many kinds of names, numbers and missing values."""
    draw = random.Random(0)
    edges = [["source", "target", "relation", "weight"]]
    for _ in range(40):
        edges.append([*draw.sample(GENES, 2), draw.choice("xy"), f"{draw.uniform(0.1, 2):.3f}"])
    scores = [["genes", "growth", "size", "split"]]
    for k in range(60):
        names = [gene + draw.choice(["", "=0.5"]) for gene in draw.sample(GENES, k % 3)]
        values = [f"{draw.gauss(0, 1):.3f}", draw.choice(["", "-1.5", f"{draw.gauss(0, 1):.2e}"])]
        scores.append([",".join(names), *values, ("train", "val", "test", "train")[k % 4]])
    features = [["gene", "length", "age"]]
    features += [[gene, f"{draw.gauss(0, 1):.3f}", "NA"] for gene in GENES[:8]]
    features[1][2] = "3"
    return {"edges": edges, "scores": scores, "features": features}


# ---- Damage --------------------------------------------------------------------------------------
def table_of(tables: Table, draw: random.Random) -> list[list[str]]:
    return tables[draw.choice(list(tables))]


def spaces(tables: Table, draw: random.Random) -> None:
    """There are blanks around names of nodes and numbers."""
    for name, table in tables.items():
        for line in table[1:]:
            column = draw.randrange(3 if name == "scores" else len(line))
            line[column] = f" {line[column]}  ".replace(",", " , ")


def missing(tables: Table, draw: random.Random) -> None:
    """Missing values are written as in another program."""
    text = draw.choice(["NA", "N/A", "#N/A", "NaN", "nan", "None", "null", "NULL", "<NA>", " "])
    for name in ("scores", "features"):
        for line in tables[name][1:]:
            line[1:3] = [text if cell in ("", "NA") else cell for cell in line[1:3]]


def other_numbers(tables: Table, draw: random.Random) -> None:
    """The same numbers are written in a different notation."""
    for line in tables["scores"][1:]:
        with contextlib.suppress(ValueError):  # earlier damage may have replaced the number
            line[1] = draw.choice(["{:.6f}", "{:+.3f}", "{:.9e}", "{:g}"]).format(float(line[1]))


def order_of_names(tables: Table, draw: random.Random) -> None:
    for line in tables["scores"][1:]:
        names = line[0].split(",")
        draw.shuffle(names)
        line[0] = ",".join([*names, names[0]] if line[0] else names)  # repeats the first name


def intact(tables: Table, draw: random.Random) -> None:
    """Each row also lists an intact node, with level 1."""
    for line in tables["scores"][1:]:
        names = set(re.findall(r"[^,=]+(?=,|=|$)", line[0]))
        spare = [gene for gene in GENES if gene not in names]
        line[0] = ",".join(filter(None, [line[0], f"{draw.choice(spare)}=1"]))


HARMLESS = [spaces, missing, other_numbers, order_of_names, intact]


def any_cell(tables: Table, draw: random.Random) -> None:
    """A cell is replaced by another text, deleted or duplicated."""
    texts = ["", "-", "inf", "1,5", "0x1F", "1e400", "#REF!", "ctrl", "a1+b2", "a1;b2", "a1="]
    texts += ["=0.5", "a1=-1", "a1=2,a1=3", "1-Mar", "é", "\x00", "\ufeff", "a" * 10**4]
    line = draw.choice(table_of(tables, draw))
    column = draw.randrange(len(line))
    line[column : column + 1] = draw.choice([[], [line[column]] * 2, *([text] for text in texts)])


def any_character(tables: Table, draw: random.Random) -> None:
    """A character is deleted or replaced."""
    line = draw.choice(table_of(tables, draw))
    column = draw.randrange(len(line))
    cell = list(line[column]) or [""]
    cell[draw.randrange(len(cell))] = draw.choice(["", "0", ",", "=", '"', " ", ".", "-", "\t"])
    line[column] = "".join(cell)


def lost_lines(tables: Table, draw: random.Random) -> None:
    table = table_of(tables, draw)
    first = draw.randrange(len(table))
    del table[first : first + draw.choice([1, 3, 30, 100])]


def twice(tables: Table, draw: random.Random) -> None:
    """A line or a column is duplicated."""
    table = table_of(tables, draw)
    if draw.random() < 0.5:
        table.insert(draw.randrange(len(table) + 1), list(draw.choice(table)))
    else:
        column = draw.randrange(len(table[0]))
        for line in table:
            line.append(line[column % len(line)])


def other_names(tables: Table, draw: random.Random) -> None:
    """Names in a column are written in upper or lower case, or have a different end."""
    end = draw.choice([".1", "+ctrl", ",ctrl", "_b2", ";a1"])
    change = draw.choice([str.upper, str.lower, lambda name: name and name + end])
    for line in table_of(tables, draw)[1:]:
        if draw.random() < 0.5:
            line[0] = change(line[0])


def decimal_commas(tables: Table, draw: random.Random) -> None:
    for line in table_of(tables, draw)[1:]:
        line[1:] = [cell.replace(".", ",") for cell in line[1:]]


def other_columns(tables: Table, draw: random.Random) -> None:
    """Two columns are swapped, with or without their header."""
    table = table_of(tables, draw)
    a, b = draw.sample(range(len(table[0])), 2)
    for line in table[draw.choice([0, 1]) :]:
        line[a], line[b] = line[b], line[a]


HARMFUL = [any_cell, any_character, lost_lines, twice, other_names, decimal_commas, other_columns]


# ---- Damage to the bytes -------------------------------------------------------------------------
def as_bytes(tables: Table) -> dict[str, bytes]:
    files = {}
    for name, table in tables.items():
        files[name] = "".join("\t".join(line) + "\n" for line in table).encode(errors="replace")
    return files


HARMLESS_BYTES = [
    lambda text: text,
    lambda text: text.replace(b"\n", b"\r\n"),
    lambda text: b"\xef\xbb\xbf" + text.rstrip(b"\n"),  # a byte-order mark
    lambda text: text + b"\n\n",
]
HARMFUL_BYTES = {
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "Latin-1": lambda text: text.replace(b"a1", b"\xe9"),
    "semicolons": lambda text: text.replace(b"\t", b";"),
    "old Mac line ends": lambda text: text.replace(b"\n", b"\r"),
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "gzip without its name": gzip.compress,
    "zeros": lambda text: text + bytes(100),
}


# ---- The tests -----------------------------------------------------------------------------------
class Reader:
    """Writes tables into a folder, reads them, and predicts with a small model."""

    def __init__(self, folder: Path):
        self.folder = folder
        write_defaults(folder)
        self.number = 0

    def read(self, files: dict[str, bytes]) -> Tensor | str:
        """Returns predictions of an untrained model and of its baseline, or the error message."""
        self.number += 1
        folder = self.folder / str(self.number)
        folder.mkdir()
        for name, content in files.items():
            (folder / f"{name}.tsv").write_bytes(content)
        options = ["--config", str(self.folder / DEFAULTS), f"data.cache_dir={folder / 'cache'}"]
        options += [
            f"data.edges={folder / 'edges.tsv'}",
            f"data.features={folder / 'features.tsv'}",
        ]
        options += [f"data.perturbations={folder / 'scores.tsv'}", *SMALL]
        try:
            return self.predict(options)
        except UserError as error:
            text = str(error)
            assert text and "\n" not in text and len(text) < 900, text
            return text

    def predict(self, options: list[str]) -> Tensor:
        config = read_config(options)
        task = KnockoutTask.from_tables(data.load(config.data), config)
        task.notes()
        task.summary()
        torch.manual_seed(0)
        model = task.build_model().eval()
        batch = task.dataset.__getitems__(task.rows("test").tolist()[:4])
        prediction = model(task.graph, batch).detach().double()
        assert task.rivals["baseline"].isfinite().all() and prediction.isfinite().all()
        predictions = task.predictions(task.by_score(prediction, batch))
        return torch.cat([predictions["prediction"], task.rivals["baseline"]])


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    return Reader(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def expected(reader) -> Tensor:
    found = reader.read(as_bytes(make_tables()))
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("damage", HARMLESS, ids=lambda damage: damage.__name__)
def test_harmless_damage_changes_no_bit(reader, expected, damage):
    for seed in range(CASES):
        draw = random.Random(seed)
        tables = make_tables()
        damage(tables, draw)
        change = draw.choice(HARMLESS_BYTES)
        files = {name: change(content) for name, content in as_bytes(tables).items()}
        found = reader.read(files)
        assert isinstance(found, Tensor), f"seed {seed}: {found}"
        assert torch.equal(found, expected), f"seed {seed}"


@pytest.mark.parametrize("change", HARMFUL_BYTES.values(), ids=HARMFUL_BYTES)
def test_damaged_bytes_are_read_or_are_an_error_with_one_message(reader, change):
    for name in ("edges", "scores", "features"):
        files = as_bytes(make_tables())
        files[name] = change(files[name])
        reader.read(files)


def test_damaged_tables_are_read_or_are_an_error_with_one_message(reader):
    kinds: list[Callable] = [*HARMLESS, *HARMFUL]
    num_refused = 0
    for seed in range(NUM_DAMAGED):
        draw = random.Random(seed)
        tables = make_tables()
        for damage in sorted(draw.sample(kinds, draw.choice([1, 2, 3])), key=kinds.index):
            damage(tables, draw)
        num_refused += isinstance(reader.read(as_bytes(tables)), str)
    assert 0.1 * NUM_DAMAGED < num_refused < 0.9 * NUM_DAMAGED
