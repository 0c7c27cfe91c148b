"""Files to `Tables`: the graph, and the samples measured on it.

`read_edges`, `read_knockouts` and `read_features` read the three tables, which docs/tables.md
describes. All may be gzipped (`.gz`), and any cell in quotes.

Shapes: N nodes, E edges, each of F features, n samples of T scores.
"""

import contextlib
import csv
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.utils import coalesce, lexsort, to_undirected

from errors import DataError

SPLITS = ("train", "val", "test")
CHUNK = 2**23  # characters of a table that are parsed at once


@dataclass
class Tables:
    """The graph, and the samples measured on it."""

    genes: list[str]  # name of each node
    relations: list[str]  # name of each relation
    edge_index: Tensor  # long [2, E], the edges of one relation after another
    edge_type: Tensor  # long [E], index into `relations`
    perturbed: Tensor  # long [total], the perturbed nodes of all samples, concatenated
    perturbed_ptr: Tensor  # long [n + 1]; sample i has, each once, those from ptr[i] to ptr[i + 1]
    y: Tensor  # float64 [n, T], or [n], the measured effects, nan where one is missing
    split: Tensor | None = None  # int8 [n], index into `SPLITS`, -1 for rows in none
    weight: Tensor | None = None  # float64 [n], of each sample in the loss
    targets: Sequence[str] = ("score",)  # name of each of the T effects
    left_out: Sequence[str] = ()  # columns of the samples' table that are not read
    edge_weight: Tensor | None = None  # float64 [E]; None: all are 1
    edge_attr: Tensor | None = None  # float32 [E, F], features of the edges; None: they have none
    features: Tensor | None = None  # float32 [N, F], of the nodes; None: they have none
    level: Tensor | None = None  # float64 [total], of each of `perturbed`; None: all are 0, deleted

    def __post_init__(self):
        if self.y.dim() == 1:
            self.y = self.y.unsqueeze(1)
        num_edges = len(self.edge_type)
        if self.edge_weight is None:
            self.edge_weight = torch.ones(num_edges, dtype=torch.float64)
        if self.edge_attr is None:
            self.edge_attr = torch.empty(num_edges, 0)
        if self.features is None:
            self.features = torch.empty(len(self.genes), 0)
        if self.level is None:
            self.level = torch.zeros(len(self.perturbed), dtype=torch.float64)

    def graph(self) -> HeteroData:
        """Returns the graph, with node type `gene` and one edge type per relation."""
        graph = HeteroData()
        graph["gene"].num_nodes = len(self.genes)
        graph["gene"].x = self.features
        for r, relation in enumerate(self.relations):
            chosen = self.edge_type == r
            edges = graph["gene", relation, "gene"]
            edges.edge_index = self.edge_index[:, chosen]
            edges.edge_weight = self.edge_weight[chosen]
            edges.edge_attr = self.edge_attr[chosen]
        return graph

    def is_in(self, split: str) -> Tensor:
        """Returns which rows are in a split, bool [n]."""
        return self.split == SPLITS.index(split)

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split, in ascending order."""
        return self.is_in(split).nonzero().flatten()

    def sample(self) -> Tensor:
        """Returns the row of each entry of `perturbed`, long [total]."""
        return torch.repeat_interleave(self.perturbed_ptr.diff())

    def name(self, node: int, level: float) -> str:
        """Returns what stands in the table for a perturbed node: `A`, or `A=0.3`."""
        return f"{self.genes[node]}={level:.15g}".removesuffix("=0")

    def is_seen(self) -> Tensor:
        """Returns which nodes a training row knocks out, bool [N]."""
        in_train = self.is_in("train")[self.sample()]
        return torch.bincount(self.perturbed[in_train], minlength=len(self.genes)) > 0

    def unseen(self) -> Tensor:
        """Returns how many of each row's knocked-out nodes no training row does, long [n]."""
        is_unseen = ~self.is_seen()[self.perturbed]
        return torch.bincount(self.sample()[is_unseen], minlength=len(self.y))

    def fingerprint(self) -> str:
        """Returns a hash of all fields, added ones too, but what is left out of the table."""

        def encode(tensor: Tensor) -> list:
            content = torch.as_tensor(tensor).ravel().view(torch.uint8).numpy()
            return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]

        digest = hashlib.sha256()
        for name, value in vars(self).items():
            if name == "left_out":
                continue
            digest.update(json.dumps([name, value], default=encode).encode())
        return digest.hexdigest()


# ---- Files --------------------------------------------------------------------------------------
def read_tables(
    edges: str, perturbations: str, features: str, scores: Sequence[str], undirected: bool
) -> Tables:
    """Returns the files as `Tables`: nodes sorted by name, duplicate edges merged by mean.

    The arguments are the options of section `data`. Raises `DataError`.
    """
    node_number = {}
    relations, edge_index, edge_type, edge_values = read_edges(edges, node_number)
    columns = read_knockouts(perturbations, node_number, scores)
    genes = sorted(node_number)
    position = number_names(genes, node_number).argsort()  # of each number, that of its name
    perturbed = position[columns.pop("node")]
    row = columns.pop("row")
    level = columns.pop("level")
    samples = pack(row, perturbed, level, len(columns["y"]))
    # Each relation has its own range of node numbers, so that all are merged at once.
    merge = to_undirected if undirected else coalesce
    edge_index = position[edge_index] + edge_type * len(genes)
    edge_index, edge_values = merge(edge_index, edge_values, reduce="mean")
    return Tables(
        genes=genes,
        relations=relations,
        edge_index=edge_index % len(genes),
        edge_type=edge_index[0] // len(genes),
        edge_weight=edge_values[:, 0],
        edge_attr=edge_values[:, 1:].float(),
        features=read_features(features, genes) if features else None,
        **samples,
        **columns,
    )


def number_names(names: Sequence[str], number: dict[str, int]) -> Tensor:
    """Returns the number of each name, long [n]; unknown ones get the next numbers, in order."""
    for name in dict.fromkeys(names):
        number.setdefault(name, len(number))
    numbers = map(number.__getitem__, names)
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(names)))


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

    def names(self, column: str) -> list[str]:
        names = [cell.strip() for cell in self.cells[column]]
        if "" in names:
            raise self.error(names.index(""), column, "is empty")
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


def read_header(path: str, *first: str) -> list[str]:
    """Returns the names of a table's columns, which must begin with `first`; raises `DataError`."""
    with open_table(path) as file:
        header = split_line(next(file, ""), f"{path}:1")
    header[0] = {"node": "gene", "nodes": "genes"}.get(header[0], header[0])
    if tuple(header[: len(first)]) != first or len(set(header)) < len(header):
        found = "\t".join(header)
        expected = "\t".join(first)
        raise DataError(
            f"{path}:1: the header is {found!r:.60}: begin with {expected!r}, name each column once"
        )
    return header


def read_rows(path: str, header: list[str]) -> Iterator[Rows]:
    """Yields the rows of a table, those of some megabytes at once; raises `DataError`."""
    is_empty = True
    next_line = 2
    with open_table(path) as file:
        next(file)
        while texts := file.readlines(CHUNK):
            lines, cells = split_lines(path, texts, next_line, len(header))
            next_line += len(texts)
            if lines:
                is_empty = False
                columns = {name: cells[i :: len(header)] for i, name in enumerate(header)}
                yield Rows(path, lines, columns)
    if is_empty:
        raise DataError(f"{path}: no rows below the header")


def split_lines(
    path: str, texts: list[str], next_line: int, num_columns: int
) -> tuple[list[int], list[str]]:
    """Returns the number of each line that is not blank, and the cells of all in one list.

    One list per line would keep the garbage collector busy. Raises `DataError` for a line of
    another number of cells.
    """
    lines = []
    cells = []
    for line, text in enumerate(texts, next_line):
        row = split_line(text, f"{path}:{line}")
        if num_columns > 1 and row == [""]:
            continue
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


def read_edges(path: str, node_number: dict[str, int]) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Returns the relations' names and, as in `Tables`, edge_index and edge_type.

    The last are the values of each edge, float64 [E, 1 + F]: its weight and then its features,
    standardised, and 0 where missing. Nodes that `node_number` lacks are added to it. Raises
    `DataError`.
    """
    header = read_header(path, "source", "target", "relation")
    features = [name for name in header[3:] if name != "weight"]
    relation_number = {}
    edges = []
    values = []
    for rows in read_rows(path, header):
        source = number_names(rows.names("source"), node_number)
        target = number_names(rows.names("target"), node_number)
        relation = number_names(rows.names("relation"), relation_number)
        edges.append(torch.stack([source, target, relation]))
        weight = torch.ones(len(rows.lines), dtype=torch.float64)
        if "weight" in header:
            weight = rows.numbers("weight", positive=True)
        values.append(torch.stack([weight, *map(rows.numbers, features)], dim=1))
    edges = torch.cat(edges, dim=1)
    values = torch.cat(values)
    values[:, 1:] = standardise(values[:, 1:]).nan_to_num()
    return list(relation_number), edges[:2], edges[2], values


def read_knockouts(
    path: str, node_number: dict[str, int], scores: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of `Tables` that a table of knock-outs has; raises `DataError`.

    In place of its perturbations stand the `row`, `node` and `level` of each, [total]. Nodes that
    `node_number` lacks are added to it. Without names of `scores`, all columns are scores that are
    nothing else.
    """
    header = read_header(path, "genes")
    score_columns = [name for name in header[1:] if name not in ("split", "weight", "sd")]
    if not score_columns or {"weight", "sd"} <= set(header):
        problem = "the header needs scores after genes, and weight or sd, not both"
        raise DataError(f"{path}:1: {problem}")
    targets = list(dict.fromkeys(map(str, scores))) or score_columns  # 1 is the name "1"
    if not set(targets) <= set(score_columns):
        problem = f"data.scores={scores}, but the scores are {score_columns[:20]}"
        raise DataError(f"{path}:1: {problem}")
    chunks = []
    num_rows = 0
    for rows in read_rows(path, header):
        row, names, level = rows.sets(node_number)
        node = number_names(names, node_number)
        advice = ": to leave that column out, name the others in data.scores"
        y = torch.stack([rows.numbers(name, advice=advice) for name in targets], dim=1)
        chunk = {"row": row + num_rows, "node": node, "level": level, "y": y}
        if "split" in header:
            chunk["split"] = rows.splits()
        if "weight" in header:
            chunk["weight"] = rows.numbers("weight", positive=True)
        if "sd" in header:
            chunk["weight"] = rows.numbers("sd", positive=True) ** -2
        chunks.append(chunk)
        num_rows += len(y)
    fields = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    left_out = [name for name in score_columns if name not in targets]
    return {**fields, "targets": targets, "left_out": left_out}


def read_features(path: str, genes: list[str]) -> Tensor:
    """Returns the nodes' features, float32 [N, F], standardised, and 0 where missing.

    Raises `DataError`.
    """
    header = read_header(path, "gene")
    if len(header) == 1:
        raise DataError(f"{path}:1: the header has no features after gene")
    row_of = {}  # by name
    chunks = []
    for rows in read_rows(path, header):
        for row, name in enumerate(rows.names("gene")):
            if name in row_of:
                raise rows.error(row, "gene", "stands twice")
            row_of[name] = len(row_of)
        chunks.append(torch.stack([rows.numbers(name) for name in header[1:]], dim=1))
    row = torch.tensor([row_of.get(gene, -1) for gene in genes])
    if (row < 0).all():
        problem = "none of its nodes is in the tables of edges and knock-outs"
        raise DataError(f"{path}: {problem}")
    values = torch.cat(chunks)[row].where(row.unsqueeze(1) >= 0, math.nan)
    return standardise(values).nan_to_num().float()


def pack(row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> dict:
    """Returns `perturbed`, `perturbed_ptr` and `level` of `Tables`, given those of each name."""
    order = lexsort([node, row])
    return {
        "perturbed": node[order],
        "perturbed_ptr": index2ptr(row[order], num_rows),
        "level": level[order],
    }


def mean_and_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean [T] and standard deviation [T], 1 where it would be 0, of values [n, T].

    Values that are nan do not count.
    """
    middle = values.nanmedian(dim=0).values  # so that the mean of equal values is exact
    mean = middle + (values - middle).nanmean(dim=0)
    std = (values - mean).square().nanmean(dim=0).sqrt()
    largest = values.nan_to_num().abs().amax(dim=0)
    return mean, std.where(std > 1e-12 * largest, 1.0)


def standardise(values: Tensor) -> Tensor:
    """Returns the values [n, T] less their mean and over their standard deviation; nan stays."""
    mean, std = mean_and_std(values)
    return (values - mean) / std
