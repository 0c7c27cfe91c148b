"""The rows of a table's file: cells to numbers, names and sets of nodes, or one error.

A file is text with tabs between its cells, under a header; it may be gzipped, and any cell may
stand in quotes. Errors name file and line.

Shapes: n rows.
"""

import contextlib
import csv
import gzip
import math
import os
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from errors import DataError, reason_of
from run_progress import progress_bar

SPLITS = ("train", "val", "test")
ALIASES = {"node": "gene", "nodes": "genes"}  # of a table's first column
# What pandas, R and spreadsheets write for a missing value; any text that is a float's nan is one.
MISSING = {"", "NA", "N/A", "#N/A", "None", "null", "NULL", "<NA>"}
GZIP = b"\x1f\x8b"  # what such a file begins with
CHUNK = 2**20  # cells of a table that are parsed at once
csv.field_size_limit(2**31 - 1)  # of a cell, which may name all nodes


@dataclass
class Rows:
    """Some consecutive rows of a table."""

    path: str
    lines: Sequence[int]  # number of each row's line in the file
    cells: dict[str, list[str]]  # by column

    def place(self, row: int) -> str:
        """Returns where a row stands, for errors."""
        return f"{self.path}:{self.lines[row]}"

    def error(self, row: int, column: str, problem: str) -> DataError:
        cell = self.cells[column][row]
        return DataError(f"{self.place(row)}: the {column:.60} {cell!r:.60} {problem}")

    def numbers(self, column: str, positive: bool = False, advice: str = "") -> Tensor:
        """Returns a column, float64 [n], nan where missing; raises `DataError`.

        If it must be `positive`, a missing number is an error, too.
        """
        values = [parse_number(cell) for cell in self.cells[column]]
        numbers = torch.from_numpy(np.array(values, dtype=np.float64))
        numbers[numbers.isnan()] = math.nan  # of the same bits, whatever its text
        least = 1e-30 if positive else -1e30
        valid = (least < numbers) & (numbers < 1e30)
        if not positive:
            valid |= numbers.isnan()
        if not valid.all():
            row = int((~valid).nonzero()[0])
            raise self.error(row, column, f"is not a number from {least:g} to 1e+30{advice}")
        return numbers

    def table(self, columns: Sequence[str], advice: str = "") -> Tensor:
        """Returns columns of numbers, float64 [n, C], nan where missing."""
        table = torch.empty(len(self.lines), len(columns), dtype=torch.float64)
        for c, column in enumerate(columns):
            table[:, c] = self.numbers(column, advice=advice)
        return table

    def names(self, column: str) -> list[str]:
        """Returns a column of names, stripped; raises `DataError`, also for a tab in quotes."""
        names = [cell.strip() for cell in self.cells[column]]
        for name in dict.fromkeys(names):
            if name == "" or "\t" in name:
                problem = "has a tab, the separator of cells: rename it" if name else "is empty"
                raise self.error(names.index(name), column, problem)
        return names

    def node_names(self, column: str) -> list[str]:
        """Returns a column of nodes' names, stripped; raises `DataError`."""
        names = self.names(column)
        for name in dict.fromkeys(names):
            problem = ""
            if "," in name or "=" in name:
                problem = "has a comma or =, which separate nodes and levels: rename the node"
            if is_missing_name(name):
                problem = "is a missing value: remove the row or, if it is a node, rename it"
            if problem:
                raise self.error(names.index(name), column, problem)
        return names

    def splits(self) -> Tensor:
        """Returns the column split, int8 [n], as in `Tables`."""
        names = [cell.strip() for cell in self.cells["split"]]
        for row, name in enumerate(names):
            if name not in SPLITS:
                raise self.error(row, "split", f"is not one of {', '.join(SPLITS)}")
        positions = [SPLITS.index(name) for name in names]
        return torch.tensor(positions, dtype=torch.int8)

    def sets(self) -> tuple[Tensor, Tensor, list[str], Tensor]:
        """Parses the column genes, such as `A,B=0.3`; a name that a row repeats counts once.

        Returns for each perturbed node the row and the number of the name, long [total]; the names
        by number; and for each node its level, float64 [total]. Raises `DataError`.
        """
        cells = self.cells["genes"]
        filled = [cell for cell in cells if cell.strip()]
        counts = [cell.count(",") + 1 if cell.strip() else 0 for cell in cells]
        row = torch.repeat_interleave(torch.from_numpy(np.array(counts, dtype=np.int64)))
        # Ten million rows have few different texts: parsing each of these once saves most of it.
        texts = ",".join(filled).split(",") if filled else []
        text_number = {}
        text = number_names(texts, text_number)
        for one in text_number:
            if "\t" in one:
                problem = f"contain {one!r:.60}, which has a tab, the separator of cells: rename it"
                raise self.error(int(row[texts.index(one)]), "genes", problem)
        parsed = list(map(split_level, text_number))
        names = [name for name, _ in parsed]
        level_of_text = torch.tensor([level for _, level in parsed], dtype=torch.float64)
        if level_of_text.isnan().any():
            wrong = int(level_of_text[text].isnan().nonzero()[0])
            problem = f"contain {texts[wrong].strip()!r:.60}, which has no name or no level from 0 "
            problem += "to 10,000 (nodes are separated by commas)"
            raise self.error(int(row[wrong]), "genes", problem)
        name_number = {}  # two texts may be one name
        name = number_names(names, name_number)[text]
        names = list(name_number)
        level = level_of_text[text]
        order = stable_order(row * len(name_number) + name)
        row = row[order]
        name = name[order]
        level = level[order]
        is_first = torch.ones(len(row), dtype=torch.bool)  # of its name in the row
        is_first[1:] = (row.diff() != 0) | (name.diff() != 0)
        has_two_levels = ~is_first[1:] & (level.diff() != 0)
        if has_two_levels.any():
            first = int(has_two_levels.nonzero()[0])
            level_text = f"{level[first].item()} and {level[first + 1].item()}"
            problem = f"have {names[name[first]]} at {level_text}"
            raise self.error(int(row[first]), "genes", problem)
        return row[is_first], name[is_first], names, level[is_first]


def number_names(names: Sequence[str], number: dict[str, int]) -> Tensor:
    """Returns the number of each name, long [n]; names that `number` lacks are added to it."""
    for name in dict.fromkeys(names):
        number.setdefault(name, len(number))
    numbers = map(number.__getitem__, names)
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(names)))


def stable_order(keys: Tensor) -> Tensor:
    """Returns a stable argsort of nearly sorted keys: numpy takes a fifth of torch's time."""
    return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))


def split_level(text: str) -> tuple[str, float]:
    """Returns name and level of a text `A` or `A=0.3`; the level is nan if either is wrong.

    A level is a number from 0 to 10,000: higher ones would cost the digits of others.
    """
    name, sign, level_text = text.partition("=")
    name = name.strip()
    level = parse_number(level_text) if sign else 0.0
    is_right = name != "" and 0 <= level <= 1e4
    return name, abs(level) if is_right else math.nan  # -0 is 0


def parse_number(cell: str) -> float:
    """Returns the number in a cell; nan if it is missing, inf if it is something else."""
    try:
        value = float(cell)
    except ValueError:
        return math.nan if cell.strip() in MISSING else math.inf
    return math.inf if "_" in cell else value


def is_missing_name(name: str) -> bool:
    """Returns whether a text is what people and programs write for a name that is not there."""
    return name == "-" or math.isnan(parse_number(name))


def check_is_no_pipe(path: str) -> None:
    """Raises `DataError` for a pipe or a device, at whose second reading one would wait forever."""
    file = Path(path)
    if file.is_fifo() or file.is_char_device():
        raise DataError(f"{path} is a pipe, which cannot be read twice: write it to a file")


def unreadable(path: str, error: Exception) -> DataError:
    """Returns the error for a file that cannot be read, which says where a missing one was."""
    text = f"cannot read {path}: {reason_of(error)}"
    if isinstance(error, FileNotFoundError) and not os.path.isabs(path):
        text += f" (paths are relative to the working directory, {os.getcwd()})"
    return DataError(text)


@contextlib.contextmanager
def open_table(path: str) -> Iterator[TextIO]:
    """Opens a table of UTF-8 text, maybe gzipped; raises `DataError` if it cannot be read."""
    check_is_no_pipe(path)
    try:
        with open(path, "rb") as file:
            start = file.read(len(GZIP))
        open_file = gzip.open if start.startswith(GZIP) else open
        with open_file(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not UTF-8 text, plain or gzipped: unpack it, or save it as text with tabs, "
            "for example by pandas' to_csv(..., sep='\\t', index=False)"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def read_header(
    path: str,
    notes: list[str],
    first: Sequence[str],
    roles: Sequence[str] = (),
    kept: Container[str] = (),
) -> list[str]:
    """Returns the names of a table's columns, which must begin with `first`; raises `DataError`.

    A name of `first` or `roles` in another case is changed to that name, unless it is `kept`, and
    `notes` get a sentence.
    """
    with open_table(path) as file:
        _, cells = next(numbered_rows(path, file), (1, []))
    header = [cell.strip() for cell in cells]
    for i, name in enumerate(header):
        role = name.lower()
        if i == 0:
            role = ALIASES.get(role, role)
        if role in (*first, *roles) and name not in kept:
            header[i] = role
            if role not in (name, ALIASES.get(name)):
                notes.append(f"{path}: the column {name} is read as {role}")
    if header[: len(first)] != list(first):
        text = "\t".join(header)
        advice = f"it must start with {', '.join(map(repr, first))}"
        if len(header) == 1:
            advice += ", separated by tabs, not by commas, semicolons or spaces"
        raise DataError(f"{path}:1: the header is {text!r:.60}: {advice}")
    for number, name in enumerate(header, 1):
        if not name or "\t" in name:
            problem = "a tab in its name" if name else "no name"
            raise DataError(f"{path}:1: column {number} has {problem}: remove it, or name it")
        if header.count(name) > 1:
            raise DataError(f"{path}:1: two columns have the name {name!r:.60}: rename one of them")
    return header


def read_rows(
    path: str, header: list[str], skip_blank: bool = True, has_bar: bool = False
) -> Iterator[Rows]:
    """Yields the rows of a table, about `CHUNK` cells at once; raises `DataError`.

    A blank line is skipped or, without `skip_blank`, a row of empty cells. With `has_bar`, a bar
    counts the bytes of the file on the disk.
    """
    is_empty = True
    title = f"reading {Path(path).name}"
    with (
        open_table(path) as file,
        progress_bar(os.fstat(file.fileno()).st_size, title, "B", is_shown=has_bar) as bar,
    ):
        rows = whole_rows(path, file, header, skip_blank)
        while True:
            lines = []
            cells = []  # of all rows: a list for each would keep the garbage collector busy
            for line, row in islice(rows, max(1, CHUNK // len(header))):
                lines.append(line)
                cells += row
            if not lines:
                break
            is_empty = False
            bar.update(os.lseek(file.fileno(), 0, os.SEEK_CUR) - bar.n)
            columns = {name: cells[i :: len(header)] for i, name in enumerate(header)}
            yield Rows(path, lines, columns)
    if is_empty:
        raise DataError(f"{path}: there are no rows below the header")


def numbered_rows(path: str, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line, from 1, and its cells; raises `DataError`."""
    reader = csv.reader(file, delimiter="\t", strict=True)
    line = 0
    try:
        for line, row in enumerate(reader, 1):
            if reader.line_num != line:
                raise DataError(f"{path}:{line}: a quoted cell has a line break: remove it")
            yield line, row
    except csv.Error as error:
        raise DataError(f"{path}:{line + 1}: {error}: quotes must enclose whole cells") from None


def whole_rows(
    path: str, file: TextIO, header: list[str], skip_blank: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yields line and cells, as many as the header has, of each row; raises `DataError`."""
    for line, row in islice(numbered_rows(path, file), 1, None):
        starts_empty = not row or not row[0]
        if skip_blank and starts_empty and not "".join(row).strip():
            continue
        if not row:
            row = [""] * len(header)
        if len(row) != len(header):
            problem = f"{len(row)} cells, but the header has {len(header)}"
            if len(row) == len(header) + 1 and row[-1].strip():
                problem += ": if the first one is a row name of R, write with row.names=FALSE"
            raise DataError(f"{path}:{line}: {problem}")
        yield line, row
