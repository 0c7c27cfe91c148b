"""Reads the rows of a table's file, and converts cells to numbers, names and sets of nodes.

A file is text with a header line and with tabs between the cells. It may be gzipped, and any cell
may be quoted. Error messages name the file and, if possible, the line.

Shapes: n rows.
"""

import contextlib
import csv
import gzip
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from errors import DataError, counted, reason_of

SPLITS = ("train", "val", "test")
ALIASES = {"node": "gene", "nodes": "genes"}  # {alternative name of a table's first column: name}
# Missing values as pandas, R and spreadsheets write them. A cell is also missing if float() reads
# it as nan.
MISSING = {"", "NA", "N/A", "#N/A", "None", "null", "NULL", "<NA>"}
GZIP = b"\x1f\x8b"  # first bytes of a gzipped file
CHUNK = 2**20  # number of cells that are parsed at once
# The default limit of 131,072 characters is too small for a cell that lists all nodes.
csv.field_size_limit(2**31 - 1)


@dataclass
class Rows:
    """Some consecutive rows of a table."""

    path: str
    lines: Sequence[int]  # line number of each row in the file
    cells: dict[str, list[str]]  # {column: cells of the rows}

    def place(self, row: int) -> str:
        """Returns the file and the line of a row, for errors."""
        return f"{self.path}:{self.lines[row]}"

    def error(self, row: int, column: str, problem: str) -> DataError:
        """Returns the error for a wrong cell.

        The message names the file, the line and the column, quotes the cell, and ends with
        `problem`, such as "is not a number: correct it".
        """
        cell = self.cells[column][row]
        return DataError(f"{self.place(row)}: the {column:.60} {cell!r:.60} {problem}")

    def numbers(self, column: str, positive: bool = False, advice: str = ": correct it") -> Tensor:
        """Returns a column of numbers, float64 [n], nan if missing.

        Raises `DataError` for a cell that is not a number in the permitted range. The message ends
        with `advice` and, for a score column of words, with a hint at a recipe. If values must be
        `positive`, a missing value is an error, too.
        """
        values = [parse_number(cell) for cell in self.cells[column]]
        numbers = torch.from_numpy(np.array(values, dtype=np.float64))
        numbers[numbers.isnan()] = math.nan  # because nan and -nan have different bits
        least = 1e-30 if positive else -1e30
        valid = (least < numbers) & (numbers < 1e30)
        if not positive:
            valid |= numbers.isnan()
        if not valid.all():
            row = int((~valid).nonzero()[0])
            raise self.error(row, column, f"is not a number from {least:g} to 1e+30{advice}")
        return numbers

    def table(self, columns: Sequence[str], advice: str = ": correct or empty this cell") -> Tensor:
        """Returns C columns of numbers, float64 [n, C], nan if missing; see `numbers`."""
        table = torch.empty(len(self.lines), len(columns), dtype=torch.float64)
        for c, column in enumerate(columns):
            table[:, c] = self.numbers(column, advice=advice)
        return table

    def names(self, column: str) -> list[str]:
        """Returns a column of names, without blanks around them.

        Raises `DataError` for an empty name.
        """
        names = [cell.strip() for cell in self.cells[column]]
        if "" in names:
            raise self.error(names.index(""), column, "is empty: write a name, or remove the row")
        return names

    def node_names(self, column: str) -> list[str]:
        """Returns a column of node names, without blanks around them.

        Raises `DataError` for a name that is empty, that means a missing value, or that contains a
        tab, a comma or an equals sign.
        """
        names = self.names(column)
        for name in dict.fromkeys(names):
            problem = ""
            if "," in name or "=" in name:
                problem = "has a comma or =, which separate nodes and levels: rename the node"
            if is_missing_name(name):
                problem = "is a missing value: remove the row or, if this is a node, rename it"
            if problem:
                raise self.error(names.index(name), column, problem)
        return names

    def splits(self) -> Tensor:
        """Returns the column split as indices of `SPLITS`, int8 [n].

        Raises `DataError` for a cell that is not the name of a split.
        """
        names = [cell.strip() for cell in self.cells["split"]]
        for row, name in enumerate(names):
            if name not in SPLITS:
                raise self.error(row, "split", "is not train, val or test: correct this cell")
        return torch.tensor([SPLITS.index(name) for name in names], dtype=torch.int8)

    def sets(self) -> tuple[Tensor, Tensor, list[str], Tensor]:
        """Returns the nodes and the levels in the column genes, from cells such as `A,B=0.3`.

        A node at level 1 is included. If a row repeats a node, the node counts once.

        Returns:
            row: The row of each perturbed node, long [total].
            name: The index of its name in `names`, long [total].
            names: The distinct names.
            level: The level of each perturbed node, float64 [total].

        Raises:
            DataError: A name is empty, a level is invalid, or a row has a node at
                two levels.
        """
        cells = self.cells["genes"]
        filled = [cell for cell in cells if cell.strip()]
        counts = [cell.count(",") + 1 if cell.strip() else 0 for cell in cells]
        row = torch.repeat_interleave(torch.from_numpy(np.array(counts, dtype=np.int64)))
        # Even ten million rows have few distinct texts, so parsing each distinct text only once
        # saves most of the time.
        texts = ",".join(filled).split(",") if filled else []
        text_number = {}
        text = number_names(texts, text_number)
        parsed = list(map(split_level, text_number))
        names = [name for name, _ in parsed]
        level_of_text = torch.tensor([level for _, level in parsed], dtype=torch.float64)
        if level_of_text.isnan().any():
            wrong = int(level_of_text[text].isnan().nonzero()[0])
            problem = f"contain {texts[wrong].strip()!r:.60}, which is not a node such as A, "
            problem += "or A=0.3 with a level from 0 to 10,000: separate nodes by single commas"
            raise self.error(int(row[wrong]), "genes", problem)
        name_number = {}  # two texts may have the same name
        name = number_names(names, name_number)[text]
        names = list(name_number)
        level = level_of_text[text]
        # First occurrence of each name in its row, and the place of each text's name in `first`.
        pairs = (row * len(names) + name).numpy()
        _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
        first_level = level[first][place]
        has_two_levels = level != first_level
        if has_two_levels.any():
            wrong = int(has_two_levels.nonzero()[0])
            level_text = f"{first_level[wrong].item()} and {level[wrong].item()}"
            problem = f"contain {names[name[wrong]]} at two levels, {level_text}: remove one"
            raise self.error(int(row[wrong]), "genes", problem)
        return row[first], name[first], names, level[first]


def number_names(names: Sequence[str], number: dict[str, int]) -> Tensor:
    """Returns the number of each name, long [n], and adds new names to `number`.

    A new name gets the next number, `len(number)`.
    """
    for name in dict.fromkeys(names):
        number.setdefault(name, len(number))
    numbers = map(number.__getitem__, names)
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(names)))


def split_level(text: str) -> tuple[str, float]:
    """Returns the name and the level in a text `A` or `A=0.3`.

    The level of `A` is 0. The returned level is nan if the name is empty, or if the level is not a
    number from 0 to 10,000. A larger level would reduce the precision of all other levels.
    """
    name, sign, level_text = text.partition("=")
    name = name.strip()
    level = parse_number(level_text) if sign else 0.0
    is_right = name != "" and 0 <= level <= 1e4
    return name, abs(level) if is_right else math.nan  # abs changes -0 to 0


def parse_number(cell: str) -> float:
    """Returns the number in a cell: nan if it is missing, and inf if it is not a number.

    Unlike in Python, a number must not contain an underscore.
    """
    try:
        value = float(cell)
    except ValueError:
        return math.nan if cell.strip() in MISSING else math.inf
    return math.inf if "_" in cell else value


def is_missing_name(name: str) -> bool:
    """Returns whether a text means that a name is missing, such as `-` or NA."""
    return name == "-" or math.isnan(parse_number(name))


def check_is_no_pipe(path: str) -> None:
    """Raises `DataError` for a pipe or a device.

    A table is read more than once, and reading a pipe a second time would wait forever.
    """
    file = Path(path)
    if file.is_fifo() or file.is_char_device():
        raise DataError(
            f"{path} is a pipe or a device, which cannot be read twice: write its content to a file"
        )


def unreadable(path: str, error: Exception) -> DataError:
    """Returns the error for an unreadable file.

    If the file is missing and its path is relative, the message names the working directory.
    """
    text = f"cannot read {path}: {reason_of(error)}"
    if isinstance(error, FileNotFoundError) and not os.path.isabs(path):
        text += f" (paths are relative to the working directory, {os.getcwd()})"
    return DataError(text)


@contextlib.contextmanager
def open_table(path: str) -> Iterator[TextIO]:
    """Opens a table of UTF-8 text, which may be gzipped.

    Raises `DataError` if the file cannot be read or decoded, also while it is open.
    """
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
            "for example with to_csv(..., sep='\\t', index=False) of pandas"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def read_header(path: str, first: Sequence[str]) -> list[str]:
    """Returns the column names of a table, without blanks around them.

    The names of the first columns can be in upper or lower case, and can be aliases. They are
    replaced by `first`. Raises `DataError` if the table begins with different columns, if a column
    does not have a name, or if two columns have the same name.
    """
    with open_table(path) as file:
        _, cells = next(numbered_rows(path, file), (1, []))
    header = [cell.strip() for cell in cells]
    lower = [name.lower() for name in header[: len(first)]]
    if [ALIASES.get(name, name) for name in lower] != list(first):
        text = "\t".join(header)
        expected = ", ".join(map(repr, first))
        problem = f"the header is {text!r:.60}, but it must start with {expected}"
        advice = "rename or reorder the columns, and separate them by tabs, not by commas"
        raise DataError(f"{path}:1: {problem}: {advice}")
    header[: len(first)] = first
    for number, name in enumerate(header, 1):
        if not name:
            raise DataError(f"{path}:1: column {number} has no name: remove or rename it")
    for name, count in Counter(header).items():
        if count > 1:
            raise DataError(f"{path}:1: two columns have the name {name!r:.60}: rename one of them")
    return header


def read_rows(path: str, header: list[str], skip_blank: bool = True) -> Iterator[Rows]:
    """Yields the rows of a table, about `CHUNK` cells at once.

    With `skip_blank`, blank lines are skipped. Otherwise, a blank line is a row of empty cells.
    Raises `DataError` if a line is malformed or if there are no rows.
    """
    is_empty = True
    with open_table(path) as file:
        rows = whole_rows(path, file, header, skip_blank)
        while True:
            lines = []
            # One list contains the cells of all rows, because millions of lists, one for each row,
            # would slow down the garbage collector.
            cells = []
            for line, row in islice(rows, max(1, CHUNK // len(header))):
                lines.append(line)
                cells += row
            if not lines:
                break
            is_empty = False
            columns = {name: cells[i :: len(header)] for i, name in enumerate(header)}
            yield Rows(path, lines, columns)
    if is_empty:
        raise DataError(f"{path}: there are no rows below the header: check how it was written")


def numbered_rows(path: str, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line, counted from 1, and its cells.

    Raises `DataError` if a quoted cell contains a line break, or if quotes are malformed.
    """
    reader = csv.reader(file, delimiter="\t", strict=True)
    line = 0
    try:
        for line, row in enumerate(reader, 1):
            if reader.line_num != line or "\t" in "".join(row):
                problem = "a quoted cell contains a line break or a tab: remove it"
                raise DataError(f"{path}:{line}: {problem}")
            yield line, row
    except csv.Error as error:
        raise DataError(
            f"{path}:{line + 1}: this line cannot be split into cells ({error}): put quotes around "
            "complete cells, or remove them"
        ) from None


def whole_rows(
    path: str, file: TextIO, header: list[str], skip_blank: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each row below the header.

    Raises `DataError` for a row that does not have as many cells as the header. See `read_rows` for
    `skip_blank`.
    """
    for line, row in islice(numbered_rows(path, file), 1, None):
        starts_empty = not row or not row[0]
        if skip_blank and starts_empty and not "".join(row).strip():
            continue
        if not row:
            row = [""] * len(header)
        if len(row) != len(header):
            problem = f"this line has {counted(len(row), 'cell')}, but the header has {len(header)}"
            advice = "add or remove cells, or correct the header"
            if len(row) == len(header) + 1 and row[-1].strip():
                advice = "if the first cell is a row name of R, write with row.names=FALSE"
            raise DataError(f"{path}:{line}: {problem}: {advice}")
        yield line, row
