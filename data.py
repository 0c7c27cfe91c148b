"""Tables in, batches out: the shared graph, knock-out samples, splits, and the order in which ranks
see the samples.

Edge table: header `source<TAB>target<TAB>relation` and optionally `weight` and features of the
edges. Knock-out table: header `genes` (or `nodes`), then one or more scores of any names, and
optionally `split` (train, val, test) and `weight`, or `sd`, from which the weight is 1 / sd**2. The
perturbed nodes are separated by commas (empty for an intact control). `A` is knocked out; `A=0.3`
sends 0.3 of its messages, unless a node of the edges has that name. Feature table: header
`gene` (or `node`), then the features' names. An empty score or feature, or NA, is missing. All may
be gzipped (`.gz`), and any cell in quotes.

Shapes: N nodes, E edges, each of F features, n samples of T scores; B samples with P perturbed
nodes in a batch.
"""

import contextlib
import csv
import fcntl
import functools
import gzip
import hashlib
import json
import logging
import math
import os
import re
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from modulefinder import ModuleFinder
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_convert
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    coalesce,
    cumsum,
    lexsort,
    remove_self_loops,
    scatter,
    to_torch_coo_tensor,
    to_undirected,
)

log = logging.getLogger(__name__)
SPLITS = ("train", "val", "test")
CHUNK = 2**23  # characters of a table that are parsed at once
EXAMPLE = Path(__file__).with_name("tests") / "example"  # tables that are read if none are given
TARGETS_AT_ONCE = 64  # in the fit of the additive baseline, whose numbers then stay in cache
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # of the additive baseline: 0.1 to 1000
POWERS = (1.0, 0.4, 0.6, 1.5)  # of levels in the additive baseline


class DataError(ValueError):
    """The input data is wrong: one sentence that names the file and, if known, the line."""


@dataclass(frozen=True)
class DataConfig:
    edges: str = ""
    perturbations: str = ""
    features: str = ""
    scores: list = field(default_factory=list)
    undirected: bool = False
    batch_size: int = 128
    split: Literal["random", "nodes"] = "random"
    split_seed: int = 0
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    workers: int = 0
    cache_dir: str = ".cache"

    def __post_init__(self):
        if bool(self.edges) != bool(self.perturbations):
            raise ValueError("data.edges and data.perturbations go together: set both or neither")


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

    def target_nodes(self) -> Tensor:
        """Returns the node of each target, long [T]; raises `DataError` if one is no node."""
        number = {gene: node for node, gene in enumerate(self.genes)}
        try:
            return torch.tensor([number[name] for name in self.targets])
        except KeyError as error:
            raise DataError(
                f"the score {error} is no node of the graph, which model.readout=nodes needs: "
                "remove that column, or set model.readout=both"
            ) from None

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

    def summary(self) -> str:
        """Returns the numbers of nodes, edges and samples as a line for the log, and a warning."""
        knocked_out = self.perturbed.unique()
        has_edge = np.isin(knocked_out, self.edge_index)  # ten times faster than torch
        isolated = knocked_out[~has_edge]
        knockouts = self.perturbed_ptr.diff()
        splits = ", ".join(f"{len(self.rows(split)):,} {split}" for split in SPLITS)
        some_targets = ", ".join(self.targets[:5])
        text = (
            f"{len(self.genes):,} nodes of {self.features.size(1):,} features "
            f"({len(isolated):,} of {len(knocked_out):,} knocked-out ones isolated), "
            f"{len(self.edge_type):,} edges in {len(self.relations)} relations "
            f"of {self.edge_attr.size(1):,} features, "
            f"{len(self.y):,} samples of {knockouts.min()} to {knockouts.max()} knock-outs: "
            f"{splits}, {(self.split < 0).sum():,} in no split; "
            f"{len(self.targets):,} scores: {some_targets}"
        )
        if self.left_out:
            text += f"; columns left out: {', '.join(self.left_out)}"
        if 2 * len(isolated) >= len(knocked_out) > 0:
            names = ", ".join(self.genes[node] for node in isolated[:10].tolist())
            text += f"\nnote      no edges: {names:.300}: do the tables use the same names?"
        return text


def load(config: DataConfig) -> Tables:
    """Returns the tables of `config`, or of the example, with their split, cached if possible.

    Weights are scaled to a mean of 1 over the training rows. Raises `DataError` if a file is
    missing, malformed or empty, or a split has no rows.
    """
    config = with_example(config)
    files = [config.edges, config.perturbations, config.features]
    key = f"{config.undirected} {config.scores}"
    for path in filter(None, files):
        key += f" {file_digest(path)}"
    tables = Tables(**cached(config, "tables", key, lambda: vars(read_tables(config))))
    if tables.split is None:
        make_split = node_split if config.split == "nodes" else random_split
        key += f" {config.split} {config.split_seed} {config.val_fraction} {config.test_fraction}"
        tables.split = cached(config, "split", key, lambda: make_split(tables, config))
    elif config.split == "nodes":
        raise DataError(
            f"{config.perturbations} has a column split: remove it, "
            "or set data.split=random to use it"
        )
    for split in SPLITS:
        if len(tables.rows(split)) == 0:
            raise DataError(
                f"{config.perturbations}: no rows in the {split} split of "
                f"{len(tables.y)} rows (data.split={config.split}): "
                "change data.val_fraction and data.test_fraction, or add rows"
            )
    if tables.weight is not None:
        tables.weight = tables.weight / tables.weight[tables.rows("train")].mean()
    return tables


def with_example(config: DataConfig) -> DataConfig:
    """Returns `config`, with the example's tables if it names none.

    Raises `DataError` if this copy of the template is without them.
    """
    if config.edges:
        return config
    if not EXAMPLE.is_dir():
        raise DataError(f"no example in {EXAMPLE}: set data.edges and data.perturbations")
    return replace(
        config,
        edges=str(EXAMPLE / "edges.tsv"),
        perturbations=str(EXAMPLE / "scores.tsv"),
    )


def file_digest(path: str) -> str:
    """Returns the SHA-256 hash of a file; raises `DataError` if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def read_tables(config: DataConfig) -> Tables:
    """Returns the files as `Tables`: nodes sorted by name, duplicate edges merged by mean."""
    number = Numbers()
    relations, edge_index, edge_type, edge_values = read_edges(config.edges, number)
    columns = read_knockouts(config.perturbations, number, config.scores)
    genes = sorted(number)
    position = number.of(genes).argsort()  # of each number, the position of its name
    node = position[columns.pop("node")]
    row = columns.pop("row")
    perturbations = pack(row, node, columns.pop("level"), len(columns["y"]))
    # Each relation has its own range of node numbers, so that all are merged at once.
    merge = to_undirected if config.undirected else coalesce
    edge_index = position[edge_index] + edge_type * len(genes)
    edge_index, edge_values = merge(edge_index, edge_values, reduce="mean")
    features = read_features(config.features, genes) if config.features else None
    return Tables(
        genes=genes,
        relations=relations,
        edge_index=edge_index % len(genes),
        edge_type=edge_index[0] // len(genes),
        edge_weight=edge_values[:, 0],
        edge_attr=edge_values[:, 1:].float(),
        features=features,
        **perturbations,
        **columns,
    )


class Numbers(dict):
    """Numbers names from 0 in order of first appearance: to look one up adds it, if it is unknown.

    So `train.predict` knows the names that are no nodes of the graph: they follow its nodes'.
    """

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number

    def of(self, names: Sequence[str]) -> Tensor:
        """Returns the numbers of these names, long [n]."""
        numbers = map(self.__getitem__, names)
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
        return torch.tensor(list(map(SPLITS.index, self.cells["split"])), dtype=torch.int8)

    def sets(self, number: Numbers) -> tuple[Tensor, ...]:
        """Returns row, node and level of each name in the cells of the column genes: `A,B=0.3`.

        A name with `=` is one that `number` knows, as those of the edges' nodes. One that stands
        twice in a row is returned once.
        """
        counts, names, levels = [], [], []
        for row, cell in enumerate(self.cells["genes"]):
            own = {}
            for text in cell.split(",") if cell.strip() else []:
                level = 0.0
                if "=" in text and text.strip() not in number:
                    text, _, level_text = text.rpartition("=")
                    level = parse_number(level_text)
                name = text.strip()
                # Higher levels would cost the digits of others.
                if not name or ("=" in name and name not in number) or not 0 <= level <= 1e4:
                    raise self.error(
                        row, "genes", f"have {name!r:.60}: no name, or no level from 0 to 10,000"
                    )
                if own.setdefault(name, level) != level:
                    raise self.error(row, "genes", f"have {name} at {own[name]} and {level}")
            counts.append(len(own))
            names += own
            levels += own.values()
        row = torch.repeat_interleave(torch.tensor(counts))
        # A level of -0 is 0.
        return row, number.of(names), torch.tensor(levels, dtype=torch.float64).abs()


def parse_number(cell: str) -> float:
    """Returns the number in a cell; nan if it is missing, inf if it is something else."""
    if cell in ("", "NA"):
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(value) or "_" in cell else value


def read_rows(path: str, *first: str) -> Iterator[Rows]:
    """Yields the rows of a table, those of some megabytes at once.

    Its columns must begin with `first`. Raises `DataError`.
    """
    open_file = gzip.open if path.endswith(".gz") else open
    try:
        with open_file(path, "rt", encoding="utf-8-sig") as file:
            yield from parse_rows(path, file, first)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def parse_rows(path: str, file: TextIO, first: tuple[str, ...]) -> Iterator[Rows]:
    header = split_line(next(file, ""), f"{path}:1")
    header[0] = {"node": "gene", "nodes": "genes"}.get(header[0], header[0])
    if tuple(header[: len(first)]) != first or len(set(header)) < len(header):
        found, expected = "\t".join(header), "\t".join(first)
        raise DataError(
            f"{path}:1: the header is {found!r:.60}: begin with {expected!r}, name each column once"
        )
    next_line, is_empty = 2, True
    while texts := file.readlines(CHUNK):
        # One list of cells: one per row would keep the garbage collector busy.
        lines, cells = [], []
        for line, text in enumerate(texts, next_line):
            row = split_line(text, f"{path}:{line}")
            if len(header) > 1 and row == [""]:  # a blank line
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}:{line}: {len(row)} fields where the header has {len(header)}"
                )
            lines.append(line)
            cells += row
        next_line += len(texts)
        if lines:
            is_empty = False
            yield Rows(
                path, lines, {name: cells[i :: len(header)] for i, name in enumerate(header)}
            )
    if is_empty:
        raise DataError(f"{path}: no rows below the header")


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


def read_edges(path: str, number: Numbers) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Returns the relations' names and, as in `Tables`, edge_index and edge_type.

    The last are the values of each edge, float64 [E, 1 + F]: its weight and then its features,
    standardised, and 0 where missing. Nodes are numbered by `number`. Raises `DataError`.
    """
    relations = Numbers()
    edges, values = [], []
    for rows in read_rows(path, "source", "target", "relation"):
        weight = torch.ones(len(rows.lines), dtype=torch.float64)
        features = list(rows.cells)[3:]
        if "weight" in features:
            features.remove("weight")
            weight = rows.numbers("weight", positive=True)
        values.append(torch.stack([weight, *map(rows.numbers, features)], dim=1))
        source, target, relation = map(rows.names, ("source", "target", "relation"))
        edges.append(torch.stack([number.of(source), number.of(target), relations.of(relation)]))
    edges = torch.cat(edges, dim=1)
    values = torch.cat(values)
    values[:, 1:] = standardise(values[:, 1:]).nan_to_num()
    return list(relations), edges[:2], edges[2], values


def read_knockouts(path: str, number: Numbers, scores: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of `Tables` that a table of knock-outs has; raises `DataError`.

    In place of its perturbations stand the `row`, `node` and `level` of each, [total]; nodes are
    numbered by `number`. Without names of `scores`, all columns are scores that are nothing else.
    """
    parts, num_rows = [], 0
    for rows in read_rows(path, "genes"):
        names = rows.cells.keys()
        others = [name for name in names if name not in ("genes", "split", "weight", "sd")]
        targets = list(dict.fromkeys(map(str, scores))) or others  # each once; 1 is the name "1"
        if not set(targets) <= set(others):
            raise DataError(f"{path}:1: data.scores={scores}, but the scores are {others[:20]}")
        if not targets or {"weight", "sd"} <= names:
            problem = "the header needs scores after genes, and weight or sd, not both"
            raise DataError(f"{path}:1: {problem}")
        row, node, level = rows.sets(number)
        advice = ": to leave that column out, name the others in data.scores"
        y = torch.stack([rows.numbers(name, advice=advice) for name in targets], dim=1)
        columns = {"row": row + num_rows, "node": node, "level": level, "y": y}
        if "split" in names:
            columns["split"] = rows.splits()
        if "weight" in names:
            columns["weight"] = rows.numbers("weight", positive=True)
        if "sd" in names:
            columns["weight"] = rows.numbers("sd", positive=True) ** -2
        parts.append(columns)
        num_rows += len(y)
    fields = {name: torch.cat([part[name] for part in parts]) for name in columns}
    left_out = [name for name in others if name not in targets]
    return {**fields, "targets": targets, "left_out": left_out}


def read_sets(
    path: str, number: Numbers, tables: Tables
) -> Iterator[tuple[Sequence[str], Tensor, Tables]]:
    """Yields, for some rows of a table at once, what they are predicted from.

    That is their cells of the column `genes`, which of them have only nodes of the graph, bool [n],
    and `tables` with these as its samples. Whatever else a batch is made of must be read here, too.
    The paths `all-singles` and `all-pairs` stand for all sets of one or of two nodes, and
    `all-singles=0.3` for these at a level. Raises `DataError`.
    """
    kind, sign, level_text = path.partition("=")
    size = {"all-singles": 1, "all-pairs": 2}.get(kind)
    names = [name + sign + level_text for name in tables.genes]
    all_rows = read_rows(path, "genes") if size is None else all_sets(path, names, size)
    for rows in all_rows:
        row, node, level = rows.sets(number)
        is_known = torch.ones(len(rows.lines), dtype=torch.bool)
        is_known[row[node >= len(tables.genes)]] = False
        num_known = int(is_known.sum())
        number_of_row = is_known.cumsum(0) - 1
        chosen = is_known[row]
        perturbations = pack(number_of_row[row[chosen]], node[chosen], level[chosen], num_known)
        y = tables.y.new_full((num_known, len(tables.targets)), math.nan)
        samples = replace(tables, **perturbations, y=y, split=None, weight=None)
        yield rows.cells["genes"], is_known, samples


def all_sets(path: str, names: Sequence[str], size: int) -> Iterator[Rows]:
    """Yields the rows of a table of all sets of `size` names."""
    sets = combinations(names, size)
    while some_sets := list(islice(sets, 100_000)):
        yield Rows(path, range(len(some_sets)), {"genes": list(map(",".join, some_sets))})


def read_features(path: str, genes: list[str]) -> Tensor:
    """Returns the nodes' features, float32 [N, F], standardised, and 0 where missing.

    Raises `DataError`.
    """
    row_of = {}  # by name
    parts = []
    for rows in read_rows(path, "gene"):
        _, *features = rows.cells
        if not features:
            raise DataError(f"{path}:1: the header has no features after gene")
        for row, name in enumerate(rows.names("gene")):
            if name in row_of:
                raise rows.error(row, "gene", "stands twice")
            row_of[name] = len(row_of)
        parts.append(torch.stack([rows.numbers(name) for name in features], dim=1))
    row = torch.tensor([row_of.get(gene, -1) for gene in genes])
    if (row < 0).all():
        problem = "none of its nodes is in the tables of edges and knock-outs"
        raise DataError(f"{path}: {problem}")
    values = torch.cat(parts)[row].where(row.unsqueeze(1) >= 0, math.nan)
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


def random_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a random split, int8 [n], where rows of the same nodes and levels stay together."""
    # Equal sets have equal sums of random 64-bit codes times numbers that stand for the levels, 1
    # for 0; others have with a probability of about n * n / 2**64.
    codes = np.random.default_rng(0).integers(-(2**63), 2**63, len(tables.genes))
    codes = torch.from_numpy(codes)
    terms = codes[tables.perturbed] * (1 + tables.level.view(torch.int64))
    total = scatter(terms, tables.sample(), dim_size=len(tables.y))
    _, first, group = np.unique(total.numpy(), return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))  # groups in order of their first rows

    generator = torch.Generator().manual_seed(config.split_seed)
    order = torch.randperm(len(first), generator=generator)
    return split_in_order(order, config, len(first))[torch.from_numpy(number[group])]


def node_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a split of the knocked-out nodes, int8 [n]: test nodes are never trained on.

    The knocked-out nodes are shuffled once. The test nodes are fold number `split_seed`, a share
    `test_fraction` of them; validation nodes are the first of those that follow. Rows with a test
    node are test rows, rows with a validation node validation rows, and rows with both in neither.
    """
    nodes = tables.perturbed.unique()
    fold = config.split_seed * round(len(nodes) * config.test_fraction)
    order = nodes[np.random.default_rng(0).permutation(len(nodes))].roll(-fold)
    split_of_node = split_in_order(order, config, len(tables.genes)).long()
    has = torch.zeros(len(tables.y), len(SPLITS), dtype=torch.bool)
    has[tables.sample(), split_of_node[tables.perturbed]] = True
    _, val, test = has.T.long()
    return torch.tensor([0, 1, 2, -1], dtype=torch.int8)[val + 2 * test]


def split_in_order(order: Tensor, config: DataConfig, size: int) -> Tensor:
    """Returns a split, int8 [size]: `order` begins with those to test and to validate."""
    num_test = round(len(order) * config.test_fraction)
    num_val = round(len(order) * config.val_fraction)
    split = torch.zeros(size, dtype=torch.int8)
    split[order[:num_test]] = SPLITS.index("test")
    split[order[num_test : num_test + num_val]] = SPLITS.index("val")
    return split


# ---- Batches -------------------------------------------------------------------------------------
@dataclass
class KnockoutDataset(Dataset):
    """Builds a whole batch of the tables' rows at once from a list of their numbers; -1 is padding.

    A batch is a PyG `Data` with `perturbed` [P], `perturbed_batch` [P], `perturbed_ptr` [B + 1],
    `level` [P] (0 for deleted nodes), `y` [B, T], `weight` [B, T] (0 for missing scores and
    padding), `index` [B] (the row, -1 for padding) and `num_dead_edges`, an int that sizes the
    masks' tensors. `degree` is that of `SharedGraph`, long [N]; `transform`, such as
    `mask.ReachPlanner`, takes each batch and returns what the model gets.
    """

    tables: Tables
    degree: Tensor
    transform: Callable[[Data], Data] | None = None

    def __len__(self) -> int:
        return len(self.tables.y)

    def num_scores(self, rows: Tensor) -> int:
        """Returns how many scores of these rows are not missing."""
        return int(np.isfinite(self.tables.y[rows].numpy()).sum())

    def __getitem__(self, row: int) -> Data:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Data:
        """Returns these rows' batch; raises `IndexError` for a knocked-out node outside [0, N)."""
        index = torch.as_tensor(rows, dtype=torch.long)
        is_real = index >= 0
        row = index.clamp(min=0)
        start = self.tables.perturbed_ptr[row]
        ptr = cumsum((self.tables.perturbed_ptr[row + 1] - start) * is_real)
        sample = torch.repeat_interleave(ptr.diff())
        position = torch.arange(len(sample)) + (start - ptr[:-1])[sample]
        perturbed = self.tables.perturbed[position]
        level = self.tables.level[position]
        num_nodes = len(self.degree)
        for i in ((perturbed < 0) | (perturbed >= num_nodes)).nonzero().flatten().tolist():
            raise IndexError(
                f"sample {index[sample[i]]}: knocked-out node {perturbed[i]} "
                f"is outside [0, {num_nodes}), the graph's nodes"
            )
        y = self.tables.y[row].float()
        weight = is_real.float()
        if self.tables.weight is not None:
            weight *= self.tables.weight[row]
        batch = Data(
            perturbed=perturbed,
            perturbed_batch=sample,
            perturbed_ptr=ptr,
            level=level,
            y=y.nan_to_num() * is_real.unsqueeze(1),
            weight=weight.unsqueeze(1) * ~y.isnan(),
            index=index,
            num_dead_edges=int(self.degree[perturbed[level == 0]].sum()),
        )
        return self.transform(batch) if self.transform else batch


class StepSampler(DistributedSampler):
    """Batch sampler that yields this rank's rows of each micro-batch, as a list.

    Each epoch has one permutation, from (seed, epoch). A step takes the same `batch_size` rows for
    any world size; the last step of an epoch takes what is left. Row counts that do not divide
    evenly are padded with -1.
    """

    def __init__(
        self, rows: Tensor, batch_size: int, accumulate: int, world_size: int, rank: int, seed: int
    ):
        self.rows = rows.int()  # there may be ten million
        super().__init__(self.rows, num_replicas=world_size, rank=rank, seed=seed)
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Sets the epoch to iterate next; `first_step` skips steps that a resumed one has done."""
        super().set_epoch(epoch)
        self.first_step = first_step
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        self.order = torch.randperm(len(self.rows), generator=generator, dtype=torch.int32)

    def rows_in_step(self, step: int) -> Tensor:
        """Returns the rows of a step over all ranks and micro-batches, without padding."""
        return self.rows[self.order[step * self.batch_size : (step + 1) * self.batch_size]]

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps_per_epoch):
            rows = self.rows_in_step(step)
            shares = self.num_replicas * self.accumulate
            size = math.ceil(len(rows) / shares)  # of one rank's micro-batch
            padded = rows.new_full((shares * size,), -1)
            padded[: len(rows)] = rows
            dealt = padded.view(self.accumulate, size, self.num_replicas)
            yield from dealt[:, :, self.rank].tolist()


def make_loader(
    dataset: Dataset,
    batches: StepSampler | Sequence[Tensor],
    workers: int,
    device: torch.device,
) -> DataLoader:
    """Returns a loader of the batches whose row numbers `batches` lists; the dataset collates.

    They stay on the CPU, in pinned memory if they are for a GPU.
    """
    pin = device.type == "cuda"
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=default_convert,
        pin_memory=pin,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        multiprocessing_context="spawn" if pin and workers else None,  # NCCL survives no fork
    )


def _start_worker(worker_id: int) -> None:
    # Each tensor of a batch would take a file descriptor, of which 1,024 may be allowed.
    torch.multiprocessing.set_sharing_strategy("file_system")
    Queue._on_queue_feeder_error = staticmethod(_end_worker)
    # torchrun signals workers, too, but their rank stops them.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _end_worker(error: Exception, batch: Any) -> None:
    # Or the rank would wait for a batch that cannot be sent.
    traceback.print_exception(error)
    os._exit(1)


# ---- Baseline ------------------------------------------------------------------------------------
class Baseline(NamedTuple):
    """What is known of the scores without the graph: an additive function of the knocked-out nodes.

    It is intercept + the sum over them of (slope + effect) times the dose, 1 - level**power; a
    logit for optim.loss=binary.
    """

    intercept: Tensor  # float64 [T]
    slope: Tensor  # float64 [T], the same for every node
    effect: Tensor  # float32 [N, T], of each node; imputed if no training row knocks it out
    imputed: Tensor  # float32 [N, T], what it would be for each node in that case
    mean: Tensor  # float64 [T], of the training scores; for binary ones, of their logits
    std: Tensor  # float64 [T], of the training scores; 1 for binary ones
    prediction: Tensor  # float64 [n, T], for each row, in the units of y
    power: float


def load_baseline(tables: Tables, fingerprint: str, config: DataConfig, loss: str) -> Baseline:
    """Returns the `additive_baseline` of tables with this fingerprint, cached."""
    key = f"{fingerprint} {loss}"
    fields = cached(config, "baseline", key, lambda: tuple(additive_baseline(tables, loss)))
    return Baseline(*fields)


def additive_baseline(tables: Tables, loss: str = "squared") -> Baseline:
    """Returns the ridge regression on the training rows that suits the validation rows best.

    For the loss `binary`, it is a logistic one. The penalty is chosen for each target, the power of
    levels for all.
    """
    some_targets = tables.y.split(TARGETS_AT_ONCE, dim=1)
    least = math.inf
    for power in POWERS if (tables.level.unique() != 1).sum() > 1 else POWERS[:1]:
        dosed = replace(tables, level=tables.level**power)
        baselines = [fit_baseline(replace(dosed, y=y), loss) for y in some_targets]
        fit = Baseline(*(torch.cat(part, dim=-1) for part in zip(*baselines, strict=True)), power)
        error = (fit.prediction - tables.y)[tables.rows("val")] / fit.std
        total = error.square().nansum()
        if total < least:
            least = total
            best = fit
    return best


def fit_baseline(tables: Tables, loss: str) -> tuple:
    """Returns the fields of the `additive_baseline` of a few targets, with power 1."""
    present = ~tables.y.isnan()
    weight = (present & tables.is_in("train").unsqueeze(1)).double()
    is_validated = present & tables.is_in("val").unsqueeze(1)
    y = tables.y.nan_to_num()
    mean, std = mean_and_std(tables.y[tables.rows("train")])
    if loss == "binary":
        mean = mean.logit(eps=1e-3)
        std = torch.ones_like(std)
    design = Design(tables)
    fit = y.new_zeros(2 + len(tables.genes), y.size(1))
    fit[0] = mean
    best = fit
    least = torch.full_like(mean, math.inf)
    for penalty in reversed(PENALTIES):  # each starts from the one before
        if loss == "binary":
            fit = logistic_ridge(design, y, weight, penalty, fit)
            logit = design.predict(fit)
            error = binary_cross_entropy_with_logits(logit, y, reduction="none")
        else:
            fit = ridge(design, y, weight, penalty, fit)
            error = (design.predict(fit) - y).square()
        error = (error * is_validated).sum(0)
        best = fit.where(error < least, best)
        least = least.minimum(error)
    constant, slope = best[:2]
    effect = best[2:]
    is_seen = tables.is_seen()
    imputed = impute_effects(tables, is_seen, effect)
    effect[~is_seen] = imputed[~is_seen]  # in place, and so in `best`
    prediction = design.predict(best)
    if loss == "binary":
        prediction = prediction.sigmoid()
    intercept = constant - slope * design.mean_count
    return intercept, slope, effect.float(), imputed.float(), mean, std, prediction


def impute_effects(tables: Tables, is_seen: Tensor, effect: Tensor) -> Tensor:
    """Returns the mean effect [N, T] of the seen nodes one and two hops from each node, but itself.

    It is weighted by A @ A + A, with A the normalised adjacency of the undirected graph, and shrunk
    to the mean of all seen nodes; how far is chosen by the error on these. `effect` [N, T] is 0 for
    other nodes.
    """
    num_nodes = len(effect)
    edges = remove_self_loops(*to_undirected(tables.edge_index, tables.edge_weight))
    edge_index, weight = gcn_norm(*edges, add_self_loops=False)
    adjacency = to_torch_coo_tensor(edge_index, weight, num_nodes)
    values = torch.cat([is_seen.unsqueeze(1), effect], dim=1)
    one_hop = adjacency @ values
    to_itself = scatter(weight.square(), edge_index[0], dim_size=num_nodes).unsqueeze(1)
    sums = adjacency @ one_hop + one_hop - to_itself * values
    total, sums = sums.tensor_split([1], dim=1)
    mean = effect.sum(0) / is_seen.sum().clamp(min=1)
    best = mean
    least = torch.full_like(mean, math.inf)
    for shrinkage in PENALTIES:
        imputed = (sums + shrinkage * mean) / (total + shrinkage)
        error = (imputed - effect)[is_seen].square().sum(0)
        best = imputed.where(error < least, best)
        least = least.minimum(error)
    return best


class Design:
    """The matrix of an additive function x [2 + N, T]: a constant, a slope, and the nodes' effects.

    The constant is the function at the mean sum of doses, 1 - level; effects count times the doses.
    """

    def __init__(self, tables: Tables):
        size = (len(tables.y), len(tables.genes))
        dose = 1 - tables.level
        self.nodes = torch.sparse_csr_tensor(
            tables.perturbed_ptr, tables.perturbed, dose, size
        )  # [n, N]
        self.transposed = self.nodes.to_sparse_csc().transpose(0, 1)
        count = self.nodes @ dose.new_ones(size[1], 1)
        self.mean_count = count.mean()
        self.line = torch.cat([torch.ones_like(count), count - self.mean_count], dim=1)  # [n, 2]

    def predict(self, x: Tensor) -> Tensor:
        """Returns the function of each row, [n, T]."""
        return self.line @ x[:2] + self.nodes @ x[2:]

    def collect(self, values: Tensor) -> Tensor:
        """Returns the product of the transposed matrix and values [n, T], [2 + N, T]."""
        return torch.cat([self.line.T @ values, self.transposed @ values])


def logistic_ridge(design: Design, y: Tensor, weight: Tensor, penalty: float, x: Tensor) -> Tensor:
    """Returns a penalised logistic regression, by iteratively reweighted least squares from x."""
    for _ in range(8):
        logit = design.predict(x)
        probability = logit.sigmoid()
        variance = (probability * (1 - probability)).clamp(min=1e-3)
        response = logit + (y - probability) / variance
        weighted = weight * variance
        x = ridge(design, response, weighted, penalty, x)
    return x


def ridge(design: Design, y: Tensor, weight: Tensor, penalty: float, x: Tensor) -> Tensor:
    """Returns a penalised linear regression, by conjugate gradients from x."""

    def product(x: Tensor) -> Tensor:
        result = design.collect(weight * design.predict(x))
        result[2:] += penalty * x[2:]
        return result

    return conjugate_gradients(product, design.collect(weight * y), x)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, x: Tensor, tolerance: float = 1e-8
) -> Tensor:
    """Returns the solution of product(x) = right for each column, from x.

    It ends when no residual is over the tolerance times `right`, in norms, or after 200 steps.
    """
    residual = direction = right - product(x)
    norm = residual.square().sum(0)
    least = tolerance**2 * right.square().sum(0)
    for _ in range(200):
        if (norm <= least).all():
            break
        change = product(direction)
        # The numbers of a solved column would become too small to divide by.
        step = (norm / (direction * change).sum(0)).where(norm > least, 0.0)
        x = x + step * direction
        residual = residual - step * change
        previous = norm
        norm = residual.square().sum(0)
        direction = residual + (norm / previous).nan_to_num() * direction
    return x


# ---- Cache ---------------------------------------------------------------------------------------
def cached(config: DataConfig, kind: str, key: str, build: Callable[[], Any]) -> Any:
    """Returns the result of `build`, cached in a file; one process builds while others wait.

    The file is that of `key` and of `source_code`, so that editing the parser, a split or the
    baseline makes another one. Its tensors are mapped into memory, which the processes of a machine
    share.
    """
    digest = hashlib.sha256(source_code() + key.encode()).hexdigest()
    path = Path(config.cache_dir, f"{kind}-{digest[:32]}.pt")
    if not path.exists():
        log.info(f"cache     making {path}")
    with contextlib.ExitStack() as stack:
        failure = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # what is there can be read, but two might write at once
            failure = error
        if path.exists():
            try:
                return torch.load(path, weights_only=True, mmap=True)
            except Exception as error:  # a damaged file fails in many ways
                log.warning(
                    f"cache     {path} is damaged and will be rebuilt: {type(error).__name__}"
                )
        content = build()
        temporary = path.with_suffix(".tmp")  # overwrites what a killed process has left
        try:
            if failure:
                raise failure
            torch.save(content, temporary)
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            log.warning(f"cache     {path} cannot be written: {error}")
            with contextlib.suppress(OSError):
                temporary.unlink()
    return content


@functools.cache
def source_code() -> bytes:
    """Returns the content of this file and of the modules beside it that it imports, and so on."""
    finder = ModuleFinder([str(Path(__file__).parent)])
    finder.run_script(__file__)
    files = [module.__file__ for module in finder.modules.values()]
    return b"".join(Path(file).read_bytes() for file in sorted(filter(None, files)))
