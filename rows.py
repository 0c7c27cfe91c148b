"""The rows of a table's file: cells to numbers, names and sets of nodes, or one error.

A file is text with tabs between its cells, under a header; it may be gzipped (`.gz`), and any cell
may stand in quotes. Errors name file and line.

Shapes: n rows.
"""

import contextlib
import csv
import gzip
import math
import re
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch
from torch import Tensor

from errors import DataError

SPLITS = ("train", "val", "test")
ALIASES = {"node": "gene", "nodes": "genes"}  # of a table's first column
CHUNK = 2**23  # characters of a table that are parsed at once


@dataclass
class Rows:
    """Some consecutive rows of a table."""

    path: str
    lines: Sequence[int]  # number of each row's line in the file
    cells: dict[str, list[str]]  # by column

    def error(self, row: int, column: str, problem: str) -> DataError:
        cell = self.cells[column][row]
        return DataError(f"{self.path}:{self.lines[row]}: the {column:.60} {cell!r:.60} {problem}")

    def numbers(self, column: str, positive: bool = False, advice: str = "") -> Tensor:
        """Returns a column, float64 [n], nan where missing, unless all must be `positive`."""
        values = [parse_number(cell) for cell in self.cells[column]]
        numbers = torch.tensor(values, dtype=torch.float64)
        least = 1e-30 if positive else -1e30
        valid = (least < numbers) & (numbers < 1e30)
        if not positive:
            valid |= numbers.isnan()
        if not valid.all():
            row = int((~valid).nonzero()[0])
            problem = f"is not a number from {least:g} to 1e+30{advice}"
            raise self.error(row, column, problem)
        return numbers

    def table(self, columns: Sequence[str], advice: str = "") -> Tensor:
        """Returns columns of numbers, float64 [n, C], nan where missing."""
        table = torch.empty(len(self.lines), len(columns), dtype=torch.float64)
        for c, column in enumerate(columns):
            table[:, c] = self.numbers(column, advice=advice)
        return table

    def names(self, column: str) -> list[str]:
        names = [cell.strip() for cell in self.cells[column]]
        if "" in names:
            raise self.error(names.index(""), column, "is empty")
        return names

    def node_names(self, column: str) -> list[str]:
        names = self.names(column)
        for row, name in enumerate(names):
            if "," in name:
                raise self.error(row, column, "has a comma, which separates nodes: rename it")
        return names

    def splits(self) -> Tensor:
        """Returns the column split, int8 [n], as in `Tables`."""
        for row, cell in enumerate(self.cells["split"]):
            if cell not in SPLITS:
                raise self.error(row, "split", f"is not one of {', '.join(SPLITS)}")
        positions = [SPLITS.index(cell) for cell in self.cells["split"]]
        return torch.tensor(positions, dtype=torch.int8)

    def sets(self, node_names: Container[str]) -> tuple[Tensor, list[str], Tensor]:
        """Returns row, name and level of each perturbed node in the column genes: `A,B=0.3`.

        A name with `=` is one of `node_names`. One that stands twice in a row is returned once.
        """
        counts = []
        names = []
        levels = []
        for row, cell in enumerate(self.cells["genes"]):
            level_of = {}
            for text in cell.split(",") if cell.strip() else []:
                name = text.strip()
                level = 0.0
                if "=" in name and name not in node_names:
                    name, level = split_level(name)
                if not name or ("=" in name and name not in node_names) or level is None:
                    problem = f"have {name!r:.60}: no name, or no level from 0 to 10,000"
                    raise self.error(row, "genes", problem)
                if level_of.setdefault(name, level) != level:
                    problem = f"have {name} at {level_of[name]} and {level}"
                    raise self.error(row, "genes", problem)
            counts.append(len(level_of))
            names += level_of
            levels += level_of.values()
        row = torch.repeat_interleave(torch.tensor(counts))
        return row, names, torch.tensor(levels, dtype=torch.float64)


def split_level(text: str) -> tuple[str, float | None]:
    """Returns name and level of `A=0.3`; the level is None if it is no number from 0 to 10,000.

    Higher levels would cost the digits of others.
    """
    name, _, level_text = text.rpartition("=")
    level = parse_number(level_text)
    is_valid = 0 <= level <= 1e4
    return name.strip(), abs(level) if is_valid else None  # -0 is 0


def parse_number(cell: str) -> float:
    """Returns the number in a cell; nan if it is missing, inf if it is something else."""
    if cell in ("", "NA"):
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(value) or "_" in cell else value


@contextlib.contextmanager
def open_table(path: str) -> Iterator[TextIO]:
    """Opens a table of UTF-8 text, maybe gzipped; raises `DataError` if it cannot be read."""
    open_file = gzip.open if path.endswith(".gz") else open
    try:
        with open_file(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def read_header(
    path: str,
    notes: list[str],
    first: Sequence[str],
    optional: Sequence[str] = (),
    kept: Container[str] = (),
) -> list[str]:
    """Returns the names of a table's columns, which must begin with `first`; raises `DataError`.

    One of `first` or `optional` in another case is that column, as `notes` then say, unless it is
    `kept`.
    """
    with open_table(path) as file:
        cells = split_line(next(file, ""), f"{path}:1")
    header = [cell.strip() for cell in cells]
    for i, name in enumerate(header):
        role = name.lower()
        is_in_another_case = role != name
        if i == 0:
            role = ALIASES.get(role, role)
        if role in (*first, *optional) and name not in kept:
            header[i] = role
            if is_in_another_case:
                notes.append(f"{path}: the column {name} is read as {role}")
    if header[: len(first)] != list(first) or len(set(header)) < len(header):
        found = "\t".join(cells)
        expected = "\t".join(first)
        raise DataError(
            f"{path}:1: the header is {found!r:.60}: begin with {expected!r}, name each column once"
        )
    return header


def read_rows(path: str, header: list[str], skip_blank: bool = True) -> Iterator[Rows]:
    """Yields the rows of a table, those of some megabytes at once; raises `DataError`.

    A blank line is skipped, or a row of empty cells.
    """
    is_empty = True
    next_line = 2
    with open_table(path) as file:
        next(file)
        while texts := file.readlines(CHUNK):
            lines, cells = split_lines(path, texts, next_line, len(header), skip_blank)
            next_line += len(texts)
            if lines:
                is_empty = False
                columns = {name: cells[i :: len(header)] for i, name in enumerate(header)}
                yield Rows(path, lines, columns)
    if is_empty:
        raise DataError(f"{path}: no rows below the header")


def split_lines(
    path: str, texts: list[str], next_line: int, num_columns: int, skip_blank: bool
) -> tuple[list[int], list[str]]:
    """Returns the number of each line but blank ones to skip, and the cells of all in one list.

    One list per line would keep the garbage collector busy. Raises `DataError` for a line of
    another number of cells.
    """
    lines = []
    cells = []
    for line, text in enumerate(texts, next_line):
        row = split_line(text, f"{path}:{line}")
        if row == [""]:
            if skip_blank:
                continue
            row = [""] * num_columns
        if len(row) != num_columns:
            problem = f"{len(row)} fields where the header has {num_columns}"
            raise DataError(f"{path}:{line}: {problem}")
        lines.append(line)
        cells += row
    return lines, cells


def split_line(text: str, place: str) -> list[str]:
    """Returns the cells of a line, of which those in quotes, such as "A,B", follow RFC 4180.

    Raises `DataError` for other quotes at the start of a cell or name; those within it are its own.
    """
    text = text.rstrip("\r\n")
    if '"' in text:
        with contextlib.suppress(csv.Error):
            text = "\t".join(next(csv.reader([text], delimiter="\t", strict=True)))
        if re.search(r'(^|[\t,]) *"', text):
            raise DataError(f"{place}: {text!r:.60} has quotes that enclose no whole cell")
    return text.split("\t")
