"""The rows of a table's file: converts cells to numbers, names and sets of nodes.

A file is text with tabs between the cells, and with a header. It may be gzipped, and any cell may
be quoted. Errors name the file and the line.

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
ALIASES = {"node": "gene", "nodes": "genes"}  # other names of a table's first column
# Missing values as pandas, R and spreadsheets write them. Any text that float() reads as nan is
# missing, too.
MISSING = {"", "NA", "N/A", "#N/A", "None", "null", "NULL", "<NA>"}
GZIP = b"\x1f\x8b"  # first bytes of a gzipped file
CHUNK = 2**20  # number of cells that are parsed at once
csv.field_size_limit(2**31 - 1)  # characters of a cell, which may list all nodes


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
        """Returns the error for a wrong cell, with file, line, column and cell."""
        cell = self.cells[column][row]
        return DataError(f"{self.place(row)}: the {column:.60} {cell!r:.60} {problem}")

    def numbers(self, column: str, positive: bool = False, advice: str = "") -> Tensor:
        """Returns a column, float64 [n], nan if missing; raises `DataError`.

        If values must be `positive`, a missing value is an error, too.
        """
        values = [parse_number(cell) for cell in self.cells[column]]
        numbers = torch.from_numpy(np.array(values, dtype=np.float64))
        numbers[numbers.isnan()] = math.nan  # the same bits for every text of nan
        least = 1e-30 if positive else -1e30
        valid = (least < numbers) & (numbers < 1e30)
        if not positive:
            valid |= numbers.isnan()
        if not valid.all():
            row = int((~valid).nonzero()[0])
            raise self.error(row, column, f"is not a number from {least:g} to 1e+30{advice}")
        return numbers

    def table(self, columns: Sequence[str], advice: str = "") -> Tensor:
        """Returns some columns of numbers, float64 [n, C], nan if missing; raises `DataError`."""
        table = torch.empty(len(self.lines), len(columns), dtype=torch.float64)
        for c, column in enumerate(columns):
            table[:, c] = self.numbers(column, advice=advice)
        return table

    def names(self, column: str) -> list[str]:
        """Returns a column of names without outer blanks; raises `DataError`, also for a tab."""
        names = [cell.strip() for cell in self.cells[column]]
        for name in dict.fromkeys(names):
            if name == "" or "\t" in name:
                problem = "has a tab, the separator of cells: rename it" if name else "is empty"
                raise self.error(names.index(name), column, problem)
        return names

    def node_names(self, column: str) -> list[str]:
        """Returns a column of node names without outer blanks; raises `DataError`."""
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
        """Returns the column split, int8 [n], as in `Tables`; raises `DataError`."""
        names = [cell.strip() for cell in self.cells["split"]]
        for row, name in enumerate(names):
            if name not in SPLITS:
                raise self.error(row, "split", f"is not one of {', '.join(SPLITS)}")
        positions = [SPLITS.index(name) for name in names]
        return torch.tensor(positions, dtype=torch.int8)

    def sets(self) -> tuple[Tensor, Tensor, list[str], Tensor]:
        """Parses the column genes, such as `A,B=0.3`; a node that a row repeats counts once.

        Returns for each perturbed node its row and the number of its name, long [total] each; the
        list of names; and the level of each perturbed node, float64 [total]. Raises `DataError`.
        """
        cells = self.cells["genes"]
        filled = [cell for cell in cells if cell.strip()]
        counts = [cell.count(",") + 1 if cell.strip() else 0 for cell in cells]
        row = torch.repeat_interleave(torch.from_numpy(np.array(counts, dtype=np.int64)))
        # Ten million rows have few distinct texts. Parsing each distinct text once saves most of
        # the time.
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
        name_number = {}  # two texts may have the same name
        name = number_names(names, name_number)[text]
        names = list(name_number)
        level = level_of_text[text]
        order = stable_order(row * len(name_number) + name)
        row = row[order]
        name = name[order]
        level = level[order]
        # Whether this is the first occurrence of the name in its row.
        is_first = torch.ones(len(row), dtype=torch.bool)
        is_first[1:] = (row.diff() != 0) | (name.diff() != 0)
        has_two_levels = ~is_first[1:] & (level.diff() != 0)
        if has_two_levels.any():
            first = int(has_two_levels.nonzero()[0])
            level_text = f"{level[first].item()} and {level[first + 1].item()}"
            problem = f"have {names[name[first]]} at {level_text}"
            raise self.error(int(row[first]), "genes", problem)
        return row[is_first], name[is_first], names, level[is_first]


def number_names(names: Sequence[str], number: dict[str, int]) -> Tensor:
    """Returns the number of each name, long [n]; adds new names to `number`."""
    for name in dict.fromkeys(names):
        number.setdefault(name, len(number))
    numbers = map(number.__getitem__, names)
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(names)))


def stable_order(keys: Tensor) -> Tensor:
    """Returns a stable argsort of nearly sorted keys; numpy is five times as fast as torch."""
    return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))


def split_level(text: str) -> tuple[str, float]:
    """Returns the name and the level of a text `A` or `A=0.3`; the level is nan if either is wrong.

    A level is a number from 0 to 10,000. A higher one would reduce the precision of the others.
    """
    name, sign, level_text = text.partition("=")
    name = name.strip()
    level = parse_number(level_text) if sign else 0.0
    is_right = name != "" and 0 <= level <= 1e4
    return name, abs(level) if is_right else math.nan  # turns -0 into 0


def parse_number(cell: str) -> float:
    """Returns the number in a cell; nan if it is missing, inf if it is not a number."""
    try:
        value = float(cell)
    except ValueError:
        return math.nan if cell.strip() in MISSING else math.inf
    return math.inf if "_" in cell else value


def is_missing_name(name: str) -> bool:
    """Returns whether a text is a usual way to write that a name is missing."""
    return name == "-" or math.isnan(parse_number(name))


def check_is_no_pipe(path: str) -> None:
    """Raises `DataError` for a pipe or a device: reading it a second time would wait forever."""
    file = Path(path)
    if file.is_fifo() or file.is_char_device():
        raise DataError(f"{path} is a pipe, which cannot be read twice: write it to a file")


def unreadable(path: str, error: Exception) -> DataError:
    """Returns the error for an unreadable file; for a missing one, with the working directory."""
    text = f"cannot read {path}: {reason_of(error)}"
    if isinstance(error, FileNotFoundError) and not os.path.isabs(path):
        text += f" (paths are relative to the working directory, {os.getcwd()})"
    return DataError(text)


@contextlib.contextmanager
def open_table(path: str) -> Iterator[TextIO]:
    """Opens a table of UTF-8 text, which may be gzipped; raises `DataError` if it is unreadable."""
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
    """Returns the column names of a table; they must begin with `first`. Raises `DataError`.

    A name that differs from one of `first` or `roles` only in case is replaced by it, unless it is
    in `kept`. This adds a warning to `notes`. `ALIASES` of the first column are replaced, too.
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

    A blank line is skipped; without `skip_blank`, it is a row of empty cells. With `has_bar`, a
    progress bar counts the bytes of the file.
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
            # One list for all rows: with one list per row, the garbage collector would be busy.
            cells = []
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
    """Yields each row's line number, and as many cells as in the header; raises `DataError`."""
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
