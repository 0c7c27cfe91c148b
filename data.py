"""Tables in, batches out: the shared graph, knock-out samples, splits, and the order in which ranks see the samples.

Edge table: header `source<TAB>target<TAB>relation` and optionally `weight`. Knock-out table: header `genes`, then one
or more scores of any names, and optionally `split` (train, val, test) and `weight`, or `sd`, from which the weight is
1 / sd**2. Genes are separated by commas (empty for an intact control). Feature table: header `gene`, then the features'
names. An empty score or feature, or NA, is missing. All may be gzipped (`.gz`).

Shapes: N nodes of F features, E_r edges of relation r, n samples of T scores; B samples with P knocked-out nodes in a
batch.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import logging
import math
import os
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_convert
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.utils import coalesce, to_undirected
from tqdm import tqdm

log = logging.getLogger(__name__)
SPLITS = ("train", "val", "test")
ARRAYS = (".npy", ".pt")  # node features beside a .txt file that names their rows
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # of the additive baseline, from 0.1 to 1000


class DataError(ValueError):
    """The input data is wrong; the message is one sentence that names the file and, if known, the line."""


@dataclass(frozen=True)
class DataConfig:
    source: Literal["synthetic", "tsv"] = "synthetic"
    preset: Literal["small", "yeast", "network"] = "small"
    edges: str = ""
    perturbations: str = ""
    features: str = ""
    undirected: bool = False
    batch_size: int = 128
    split: Literal["random", "nodes"] = "random"
    split_seed: int = 0
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    workers: int = 0
    cache_dir: str = ".cache"

    def __post_init__(self):
        if self.source == "tsv" and not (self.edges and self.perturbations):
            raise ValueError("data.source=tsv needs two files: set data.edges and data.perturbations")
        if self.source == "synthetic" and (self.edges or self.perturbations or self.features):
            raise ValueError("data.source=synthetic reads no files: set data.source=tsv")
        if min(self.val_fraction, self.test_fraction) <= 0 or self.val_fraction + self.test_fraction >= 1:
            raise ValueError("data.val_fraction and data.test_fraction must be positive and leave rows for training")


@dataclass(frozen=True)
class Preset:
    """The size of a synthetic problem; `deletions` is the smallest and largest number of knock-outs in a sample."""

    num_nodes: int
    num_edges: dict[str, int]
    num_modules: int
    num_samples: int
    deletions: tuple[int, int]
    rounds: int = 0  # of failures that spread along edges, which then make the scores: see `failure_losses`


PRESETS = {
    "small": Preset(
        num_nodes=400, num_modules=16, num_samples=6000, deletions=(1, 3),
        num_edges={"physical": 2400, "regulatory": 800, "coexpression": 4800}),
    "yeast": Preset(
        num_nodes=6607, num_modules=120, num_samples=20_000, deletions=(3, 3),
        num_edges={
            "regulatory": 9_753, "physical": 139_463, "tflink": 201_898, "neighborhood": 147_874, "fusion": 11_810,
            "cooccurence": 11_115, "coexpression": 1_002_538, "experimental": 825_101, "database": 73_818}),
    "network": Preset(
        num_nodes=400, num_modules=16, num_samples=8000, deletions=(1, 3), rounds=3,
        num_edges={"physical": 1600, "regulatory": 800}),
}  # fmt: skip


@dataclass
class Tables:
    """The graph, and the samples measured on it."""

    genes: list[str]  # name of each node
    relations: list[str]  # name of each relation
    edge_indices: list[Tensor]  # long [2, E_r] for each relation
    perturbed: Tensor  # long [total], the knocked-out nodes of all samples, concatenated
    perturbed_ptr: Tensor  # long [n + 1]; sample i knocks out `perturbed[perturbed_ptr[i] : perturbed_ptr[i + 1]]`
    y: Tensor  # float64 [n, T], or [n], the measured effects, nan where one is missing
    split: Tensor | None = None  # int8 [n], index into `SPLITS`, -1 for rows in none
    weight: Tensor | None = None  # float64 [n], of each sample in the loss
    targets: Sequence[str] = ("score",)  # name of each of the T effects
    edge_weights: list[Tensor | None] | None = None  # float [E_r] for each relation; None: all are 1
    features: Tensor | None = None  # float32 [N, F], standardised, 0 where missing
    signal: Tensor | None = None  # float64 [n, 1], y without its noise, where that is known

    def __post_init__(self):
        self.y = self.y if self.y.dim() > 1 else self.y.unsqueeze(1)

    def graph(self) -> HeteroData:
        """Returns the graph, with node type `gene` and one edge type per relation."""
        graph, weights = HeteroData(), self.edge_weights or [None] * len(self.relations)
        graph["gene"].num_nodes, graph["gene"].x = len(self.genes), self.features
        for relation, edge_index, weight in zip(self.relations, self.edge_indices, weights, strict=True):
            edges = graph["gene", relation, "gene"]
            edges.edge_index, edges.edge_weight = edge_index, weight
        return graph

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split, in ascending order."""
        return (self.split == SPLITS.index(split)).nonzero().flatten()

    def sample(self) -> Tensor:
        """Returns the row of each entry of `perturbed`, long [total]."""
        return torch.repeat_interleave(self.perturbed_ptr.diff())

    def unseen(self) -> Tensor:
        """Returns how many of each row's knocked-out nodes occur in no training row, long [n]."""
        row = self.sample()
        seen = torch.zeros(len(self.genes), dtype=torch.bool)
        seen[self.perturbed[self.split[row] == SPLITS.index("train")]] = True
        return torch.bincount(row[~seen[self.perturbed]], minlength=len(self.y))

    def fingerprint(self) -> str:
        """Returns a hash of all fields, including any you add; it is equal on ranks that have the same data."""

        def encode(tensor: Tensor) -> list:
            content = torch.as_tensor(tensor).contiguous().flatten().view(torch.uint8).numpy()
            return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]

        return hashlib.sha256(json.dumps(vars(self), default=encode).encode()).hexdigest()

    def noise_ceiling(self) -> float | None:
        """Returns Pearson's r of y and its noise-free part on the test rows, a model's limit; None if unknown."""
        if self.signal is None:
            return None
        return torch.corrcoef(torch.cat([self.y, self.signal], dim=1)[self.rows("test")].T)[0, 1].item()

    def summary(self) -> str:
        """Returns the numbers of genes, edges and samples as one line for the log."""
        edges, counts, unused = torch.cat(self.edge_indices, dim=1), self.perturbed_ptr.diff(), (self.split < 0).sum()
        x = torch.empty(0, 0) if self.features is None else self.features
        features = f", {(x != 0).any(dim=1).sum():,} with {x.size(1):,} features" * (len(x) > 0)
        splits = ", ".join(f"{len(self.rows(split)):,} {split}" for split in SPLITS)
        return (
            f"{len(self.genes):,} genes ({len(self.genes) - len(edges.unique()):,} isolated{features}), "
            f"{edges.size(1):,} edges in {len(self.relations)} relations, "
            f"{len(self.y):,} samples of {counts.min()} to {counts.max()} deletions: {splits} "
            f"({self.shared_pairs():,} with two nodes of a training row), {unused:,} in no split; scores: "
            f"{', '.join(self.targets)}"
        )

    def shared_pairs(self) -> int:
        """Returns how many test rows knock out two nodes of a training row, among rows of at most 10 deletions."""
        row, n = self.sample(), len(self.genes)
        few = self.perturbed_ptr.diff()[row] <= 10
        row, node = row[few], self.perturbed[few]
        pairs = [torch.stack([node[:-k] * n + node[k:], row[:-k]])[:, row[:-k] == row[k:]] for k in range(1, 10)]
        pair, row = torch.cat(pairs, dim=1)
        train, test = (self.split[row] == SPLITS.index(split) for split in ("train", "test"))
        return len(row[test][torch.isin(pair[test], pair[train])].unique())


def load(config: DataConfig) -> Tables:
    """Returns the tables that `config` names, with their split; tables that were read before come from the cache.

    Weights are scaled to a mean of 1 over the training rows.

    Raises `DataError` if a file is missing, malformed or empty, or a split has no rows.
    """
    tsv, key = config.source == "tsv", f"{config.preset} {config.undirected}"
    files = [config.edges, config.perturbations, config.features]
    if config.features.endswith(ARRAYS):
        files.append(str(Path(config.features).with_suffix(".txt")))
    for path in filter(None, files):
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                while part := file.read(2**20):
                    digest.update(part)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        key += f" {digest.hexdigest()}"
    build = partial(read_tables, config) if tsv else partial(synthetic_tables, PRESETS[config.preset], seed=0)
    tables = Tables(**cached(config, "tables", key, lambda: vars(build())))
    if tables.split is not None and config.split == "nodes":
        raise DataError(f"{config.perturbations} has a column split: remove it, or set data.split=random to use it")
    if tables.split is None:
        split = partial(node_split if config.split == "nodes" else random_split, tables, config)
        key += f" {config.split} {config.split_seed} {config.val_fraction} {config.test_fraction}"
        tables.split = cached(config, "split", key, lambda: {"split": split()})["split"]
    if empty := [split for split in SPLITS if len(tables.rows(split)) == 0]:
        table = config.perturbations or "the synthetic table"
        found = f"no rows in the {empty[0]} split of {len(tables.y)} rows (data.split={config.split})"
        raise DataError(f"{table}: {found}: change data.val_fraction and data.test_fraction, or add rows")
    if tables.weight is not None:
        tables.weight = tables.weight / tables.weight[tables.rows("train")].mean()
    return tables


def read_tables(config: DataConfig) -> Tables:
    """Returns the files as `Tables`; nodes are numbered by sorted gene name, and duplicate edges merged by mean."""
    number = Numbers()
    relations, relation, edges, edge_weight = read_edges(config.edges, number)
    row, node, y, split, weight, targets = read_knockouts(config.perturbations, number)
    genes = sorted(number)
    order = number.of(genes).argsort()  # of each number, the position of its gene
    edges, merge = order[edges], to_undirected if config.undirected else coalesce
    chosen = (relation == r for r in range(len(relations)))
    merged = [merge(edges[:, r], None if edge_weight is None else edge_weight[r], reduce="mean") for r in chosen]
    edge_indices, edge_weights = map(list, zip(*merged, strict=True))
    knockouts = *pack(row, order[node], len(y)), y, split, weight, targets
    features = read_features(config.features, genes) if config.features else None
    return Tables(genes, relations, edge_indices, *knockouts, edge_weights, features)


class Numbers(dict):
    """Numbers names from 0 in order of first appearance: `Numbers()[name]`."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number

    def of(self, names: Sequence[str]) -> Tensor:
        """Returns the numbers of these names, long [n]."""
        return torch.from_numpy(np.fromiter(map(self.__getitem__, names), dtype=np.int64, count=len(names)))


def read_edges(path: str, number: Numbers) -> tuple[list[str], Tensor, Tensor, Tensor | None]:
    """Returns the relations' names and each edge's relation [E], source and target [2, E], and weight [E], if any.

    Nodes are numbered by `number`. Raises `DataError`.
    """
    relations, parts, weights = Numbers(), [], []
    for lines, table in _read_rows(path, "source", "target", "relation"):
        if list(table)[3:] not in ([], ["weight"]):
            raise DataError(f"{path}:1: after relation the header may have weight, not {', '.join(list(table)[3:])}")
        if "weight" in table:
            weights.append(_numbers(path, lines, "weight", table.pop("weight"), "positive"))
        columns = [[cell.strip() for cell in column] for column in table.values()]
        if any("" in column for column in columns):
            line = next(line for line, *cells in zip(lines, *columns, strict=True) if "" in cells)
            raise DataError(f"{path}:{line}: an empty source, target or relation")
        parts.append(torch.stack([relations.of(columns[2]), number.of(columns[0]), number.of(columns[1])]))
    relation, source, target = torch.cat(parts, dim=1)
    return list(relations), relation, torch.stack([source, target]), torch.cat(weights) if weights else None


def read_features(path: str, genes: list[str]) -> Tensor:
    """Returns the genes' features, float32 [N, F], each with mean 0 and standard deviation 1, and 0 where missing.

    They come from a table, or from an array [n, F] (.npy, or .pt by `torch.save`) beside a text file of the same name
    that has a line with the gene of each row. Raises `DataError`.
    """
    lines, names, parts, source = [], [], [], path
    if path.endswith(ARRAYS):
        source = str(Path(path).with_suffix(".txt"))
        try:
            names = [line.strip() for line in Path(source).read_text(encoding="utf-8-sig").splitlines()]
            load_array = np.load if path.endswith(".npy") else partial(torch.load, map_location="cpu")
            lines, values = range(1, len(names) + 1), torch.as_tensor(load_array(path)).detach().to_dense().double()
        except Exception as error:  # a damaged file fails in many ways
            raise DataError(f"cannot read {path} with {source}: {' '.join(str(error).split())[:300]}") from None
    else:
        for numbers, table in _read_rows(path, "gene"):
            if len(table) == 1:
                raise DataError(f"{path}:1: the header has no features after gene")
            lines += numbers
            names += map(str.strip, table.pop("gene"))
            parts.append(torch.stack([_numbers(path, numbers, *column) for column in table.items()], dim=1))
        values = torch.cat(parts)
    if values.dim() != 2 or len(values) != len(names) or values.numel() == 0:
        raise DataError(f"{path} has the shape {list(values.shape)}, not one row for each of the {len(names)} genes")
    row = {name: i for i, name in enumerate(names)}
    for i, (line, large) in enumerate(zip(lines, (values.abs() >= 1e30).any(dim=1).tolist(), strict=True)):
        if large or row[names[i]] != i:
            problem = "has a number beyond 1e30" if large else "stands twice"
            raise DataError(f"{source}:{line}: the gene '{names[i]}' {problem}")
    position = torch.tensor([row.get(gene, -1) for gene in genes])
    if (position < 0).all():
        raise DataError(f"{source}: none of its genes is in the tables of edges and knock-outs")
    values = values[position].where(position.unsqueeze(1) >= 0, math.nan)
    mean, std = mean_and_std(values)
    return ((values - mean) / std).nan_to_num().float()


def read_knockouts(path: str, number: Numbers) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, list]:
    """Returns the table's knock-outs and, as in `Tables`, its y, split, weight and targets.

    The knock-outs are the row and the node of each, [total]; nodes are numbered by `number`. Raises `DataError`.
    """
    parts, num_rows = [], 0
    for lines, table in _read_rows(path, "genes"):
        column = partial(_numbers, path, lines)
        row, node = _sets(path, lines, table.pop("genes"), number)
        splits, weight, sd = (table.pop(name, None) for name in ("split", "weight", "sd"))
        if not table or (weight and sd):
            raise DataError(f"{path}:1: the header needs scores after genes, and weight or sd, not both")
        if splits and (unknown := set(splits) - set(SPLITS)):
            line, found = next(pair for pair in zip(lines, splits, strict=True) if pair[1] in unknown)
            raise DataError(f"{path}:{line}: the split '{found}' is not one of {', '.join(SPLITS)}")
        y = torch.stack([column(name, cells) for name, cells in table.items()], dim=1)
        split = splits and torch.tensor(list(map(SPLITS.index, splits)), dtype=torch.int8)
        weight = column("sd", sd, "positive") ** -2 if sd else weight and column("weight", weight, "positive")
        parts.append((row + num_rows, node, y, split, weight))
        num_rows += len(lines)
    row, node, y, split, weight = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
    return row, node, y, split, weight, list(table)


def read_sets(path: str, number: Numbers) -> Iterator[tuple[Sequence[str], Tensor, Tensor]]:
    """Yields, for some rows at once, their cells of the column `genes`, and the row and node of each knock-out.

    The paths `all-singles` and `all-pairs` stand for all sets of one or of two names in `number`. Raises `DataError`.
    """
    if size := {"all-singles": 1, "all-pairs": 2}.get(path):
        sets = combinations(number, size)
        while part := list(islice(sets, 100_000)):
            row = torch.arange(len(part)).repeat_interleave(size)
            yield list(map(",".join, part)), row, number.of([name for names in part for name in names])
        return
    for lines, table in _read_rows(path, "genes"):
        yield table["genes"], *_sets(path, lines, table["genes"], number)


def _sets(path: str, lines: Sequence[int], genes: Sequence[str], number: Numbers) -> tuple[Tensor, Tensor]:
    """Returns the row and the node of each gene in cells such as `A,B`; raises `DataError` for an empty name."""
    names = [name.strip() for name in ",".join(genes).split(",")]
    row = torch.arange(len(genes)).repeat_interleave(torch.tensor([cell.count(",") + 1 for cell in genes]))
    if "" in names:
        for line, cell in zip(lines, genes, strict=True):
            if cell.strip() and not all(name.strip() for name in cell.split(",")):
                raise DataError(f"{path}:{line}: an empty gene name in '{cell}'")
        row, names = row[[name != "" for name in names]], [name for name in names if name]
    return row, number.of(names)


def _numbers(path: str, lines: Sequence[int], name: str, cells: Sequence[str], kind: str = "finite") -> Tensor:
    """Returns a column of `kind` numbers, float64 [n], nan where a finite one is missing; else raises `DataError`."""
    values, least = [], -1e30 if kind == "finite" else 1e-30
    for line, cell in zip(lines, cells, strict=True):
        missing = cell in ("", "NA") and kind == "finite"
        try:
            values.append(math.nan if missing else float(cell))
        except ValueError:
            values.append(math.inf)
        if not (missing or least < values[-1] < 1e30) or "_" in cell:
            raise DataError(f"{path}:{line}: the {name} '{cell}' is not a {kind} number from {least:g} to 1e+30")
    return torch.tensor(values, dtype=torch.float64)


def pack(row: Tensor, node: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns `perturbed` [total] and `perturbed_ptr` [num_rows + 1] from the row and node of each knock-out, once."""
    low, high = node.aminmax() if len(node) else (0, 0)
    size = int(high - low) + 1
    row, node = map(torch.from_numpy, np.divmod(np.unique((row * size + node - low).numpy()), size))
    return node + low, index2ptr(row, num_rows)


def mean_and_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean [T] and standard deviation [T], 1 where it would be 0, of the values [n, T] that are not nan."""
    middle = values.nanmedian(dim=0).values  # so that the mean of equal values is exact
    mean = middle + (values - middle).nanmean(dim=0)
    std = (values - mean).square().nanmean(dim=0).sqrt()
    return mean, std.where(std > 1e-12 * values.nan_to_num().abs().amax(dim=0), 1.0)


def random_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a random split, int8 [n], seeded by `split_seed`; rows with the same knock-outs stay together."""
    # Equal sets have equal sums of random 64-bit codes; others have with a probability of n * n / 2**64.
    codes = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, len(tables.genes)))
    total = codes.new_zeros(len(tables.y)).index_add(0, tables.sample(), codes[tables.perturbed])
    _, first, group = np.unique(total.numpy(), return_index=True, return_inverse=True)
    groups = np.argsort(np.argsort(first))  # numbered in order of first appearance
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(config.split_seed))
    num_test, num_val = (round(len(first) * f) for f in (config.test_fraction, config.val_fraction))
    split_of_group = torch.zeros(len(first), dtype=torch.int8)
    split_of_group[order[:num_test]] = SPLITS.index("test")
    split_of_group[order[num_test : num_test + num_val]] = SPLITS.index("val")
    return split_of_group[torch.from_numpy(groups[group])]


def node_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a split of the knocked-out nodes, int8 [n]: no node of a test row that is a test node is ever trained on.

    The knocked-out nodes are shuffled once. The test nodes are fold number `split_seed`, a share `test_fraction` of
    them; validation nodes are the first of those that follow. Rows with both are left out, with neither they train.
    """
    nodes = tables.perturbed.unique()
    num_test = round(len(nodes) * config.test_fraction)
    order = nodes[np.random.default_rng(0).permutation(len(nodes))].roll(-config.split_seed * num_test)
    split_of_node = torch.zeros(len(tables.genes), dtype=torch.long)
    split_of_node[order[:num_test]] = SPLITS.index("test")
    split_of_node[order[num_test : num_test + round(len(nodes) * config.val_fraction)]] = SPLITS.index("val")
    contains = torch.zeros(len(tables.y), len(SPLITS), dtype=torch.bool)
    contains[tables.sample(), split_of_node[tables.perturbed]] = True
    _, val, test = contains.T
    return (val * SPLITS.index("val") + test * SPLITS.index("test")).where(~(val & test), -1).to(torch.int8)


# ---- Batches --------------------------------------------------------------------------------------------------------
class KnockoutDataset(Dataset):
    """Builds a whole batch at once from a list of row numbers, in which -1 is padding.

    A batch is a PyG `Data` with `perturbed` [P], `perturbed_batch` [P], `perturbed_ptr` [B + 1], `y` [B, T], `weight`
    [B, T] (0 for missing scores and padding), `index` [B] (the row, -1 for padding) and `num_dead_edges`, an int that
    sizes the masks' tensors. The arguments are as in `Tables`, where a node is listed once in a sample, as `pack` sees
    to, but for `degree`, which is `SharedGraph.degree`, long [N].
    """

    def __init__(
        self, perturbed: Tensor, perturbed_ptr: Tensor, y: Tensor, degree: Tensor, weight: Tensor | None = None
    ):
        self.perturbed, self.perturbed_ptr, self.y = perturbed, perturbed_ptr, y if y.dim() > 1 else y.unsqueeze(1)
        self.weight = y.new_ones(1).expand(len(y)) if weight is None else weight
        self.degree, self.transform = degree, None  # transforms batches, as `mask.ReachPlanner`

    def __len__(self) -> int:
        return len(self.y)

    def num_scores(self, rows: Tensor) -> int:
        """Returns how many scores of these rows are not missing."""
        return int(np.isfinite(self.y[rows].numpy()).sum())

    def __getitem__(self, row: int) -> Data:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Data:
        """Returns the batch of these rows; raises `IndexError` for a knocked-out node outside [0, N)."""
        index = torch.as_tensor(rows, dtype=torch.long)
        real, row = index >= 0, index.clamp(min=0)
        start = self.perturbed_ptr[row]
        count = (self.perturbed_ptr[row + 1] - start) * real
        ptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
        sample = torch.repeat_interleave(count)
        perturbed = self.perturbed[torch.arange(len(sample)) + (start - ptr[:-1])[sample]]
        outside = (perturbed < 0) | (perturbed >= len(self.degree))
        if outside.any():
            first = outside.nonzero()[0]
            found = f"sample {index[sample[first]].item()}: knocked-out node {perturbed[first].item()}"
            raise IndexError(f"{found} is outside [0, {len(self.degree)}), the graph's nodes")
        knockouts = {"perturbed": perturbed, "perturbed_batch": sample, "perturbed_ptr": ptr}
        y, weight = self.y[row].float(), (self.weight[row] * real).float().unsqueeze(1)
        scores = {"y": y.nan_to_num() * real.unsqueeze(1), "weight": weight * ~y.isnan(), "index": index}
        batch = Data(**knockouts, **scores, num_dead_edges=int(self.degree[perturbed].sum()))
        return self.transform(batch) if self.transform else batch


class StepSampler(DistributedSampler):
    """Batch sampler that yields this rank's rows of each micro-batch, as a list.

    Each epoch has one permutation, from (seed, epoch). A step takes the same `batch_size` rows for any world size; the
    last step of an epoch takes what is left. Row counts that do not divide evenly are padded with -1.
    """

    def __init__(self, rows: Tensor, batch_size: int, accumulate: int, world_size: int, rank: int, seed: int):
        rows = rows.int()  # there may be ten million
        super().__init__(rows, num_replicas=world_size, rank=rank, seed=seed)
        self.rows, self.batch_size, self.accumulate = rows, batch_size, accumulate
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Sets the epoch to iterate next; `first_step` skips the steps that a resumed epoch has already done."""
        super().set_epoch(epoch)
        self.first_step = first_step
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.order = torch.randperm(len(self.rows), generator=generator, dtype=torch.int32)

    def rows_in_step(self, step: int) -> Tensor:
        """Returns the rows of a step of the epoch over all ranks and micro-batches, without padding."""
        return self.rows[self.order[step * self.batch_size : (step + 1) * self.batch_size]]

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps_per_epoch):
            rows = self.rows_in_step(step)
            size = math.ceil(len(rows) / (self.num_replicas * self.accumulate))  # of one rank's micro-batch
            padded = rows.new_full((self.accumulate * size * self.num_replicas,), -1)
            padded[: len(rows)] = rows
            yield from padded.view(self.accumulate, size, self.num_replicas)[:, :, self.rank].tolist()


def make_loader(dataset: Dataset, batches: StepSampler | list[list[int]], workers: int, pin: bool) -> DataLoader:
    """Returns a loader of the batches whose row numbers `batches` lists; the dataset itself collates them."""
    settings = {"num_workers": workers, "persistent_workers": workers > 0, "worker_init_fn": _ignore_sigterm}
    if pin and workers:
        settings["multiprocessing_context"] = "spawn"  # NCCL and CUDA do not survive a fork
    return DataLoader(dataset, batch_sampler=batches, collate_fn=default_convert, pin_memory=pin, **settings)


def _ignore_sigterm(worker_id: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals workers, too, but their rank stops them


# ---- Baseline and synthetic tables ----------------------------------------------------------------------------------
def derive(tables: Tables, fingerprint: str, config: DataConfig) -> tuple[Tensor, Tensor, str]:
    """Returns the `additive_baseline` and the summary of tables with this fingerprint, from the cache if possible."""
    return cached(config, "derived", fingerprint, lambda: (*additive_baseline(tables), tables.summary()))


def additive_baseline(tables: Tables, penalties: Sequence[float] = PENALTIES) -> tuple[Tensor, Tensor]:
    """Returns an effect per node, float64 [N, T], and predictions that add up the training mean and effects, [n, T].

    The effects are a ridge regression on the training rows, by conjugate gradients on the normal equations, with the
    penalty that suits the validation rows best: what can be predicted from the set of knocked-out nodes alone.
    """
    row, present = tables.sample(), ~tables.y.isnan()
    train, val = (present & (tables.split == SPLITS.index(split)).unsqueeze(1) for split in ("train", "val"))
    y = tables.y.nan_to_num()
    mean = (y * train).sum(0) / train.sum(0)

    def predict(effect: Tensor) -> Tensor:
        return torch.zeros_like(y).index_add(0, row, effect[tables.perturbed])

    def collect(values: Tensor) -> Tensor:
        return effect.new_zeros(effect.shape).index_add(0, tables.perturbed, (values * train)[row])

    effect, found = y.new_zeros(len(tables.genes), y.size(1)), []
    tolerance = 1e-20 * collect(y - mean).square().sum(0)
    for penalty in sorted(penalties, reverse=True):  # each starts from the solution for the next larger one
        direction = residual = collect(y - mean - predict(effect)) - penalty * effect
        norm = residual.square().sum(0)
        for _ in range(200):
            if (norm <= tolerance).all():
                break
            product = collect(predict(direction)) + penalty * direction
            step = (norm / (direction * product).sum(0)).nan_to_num()  # of a target that is done, 0 / 0
            effect, residual = effect + step * direction, residual - step * product
            norm, previous = residual.square().sum(0), norm
            direction = residual + (norm / previous).nan_to_num() * direction
        found.append((((mean + predict(effect) - y).square() * val).sum(0), effect))
    errors, effects = (torch.stack(parts) for parts in zip(*found, strict=True))  # [P, T] and [P, N, T]
    effect = torch.take_along_dim(effects, errors.argmin(0).view(1, 1, -1), dim=0).squeeze(0)
    return effect, mean + predict(effect)


def synthetic_tables(preset: Preset, seed: int) -> Tables:
    """Returns a random graph with hubs and modules, and samples whose scores depend on it.

    Most edges stay within a module, and their ends are drawn with power-law weights. A score is a weighted sum of the
    knocked-out nodes' own effects, an effect per pair within a module, the paths of one or two `physical` edges between
    each pair, and noise. Nodes knocked out together share a module, are neighbours, or are drawn at random. With
    `preset.rounds`, a score is the sample's `failure_losses` and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = partial(torch.rand, dtype=torch.float64, generator=generator)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    n, num_samples = preset.num_nodes, preset.num_samples

    # Nodes are sorted by module: a module is an interval of `total`, the cumulative weight that `draw` samples from.
    module = torch.randint(preset.num_modules, (n,), generator=generator).sort().values
    weight = torch.arange(1, n + 1, dtype=torch.float64)[torch.randperm(n, generator=generator)].pow(-0.5)
    total = torch.cat([weight.new_zeros(1), weight]).cumsum(0)  # [n + 1]
    low = total[torch.searchsorted(module, module)]  # [n], where the node's module begins in `total`
    high = total[torch.searchsorted(module, module, right=True)]  # [n], and where it ends

    def draw(count: int) -> Tensor:
        return torch.searchsorted(total[1:], uniform(count) * total[-1]).clamp(max=n - 1)

    def draw_from_module(node: Tensor) -> Tensor:
        return torch.searchsorted(total[1:], low[node] + uniform(len(node)) * (high - low)[node]).clamp(max=n - 1)

    def draw_edges(count: int) -> Tensor:
        """Returns [2, count] distinct edges without self-loops."""
        pairs = torch.empty(0, dtype=torch.long)
        while len(pairs) < count:
            source = draw(2 * (count - len(pairs)) + 64)
            target = torch.where(uniform(len(source)) < 0.8, draw_from_module(source), draw(len(source)))
            pairs = torch.cat([pairs, (source * n + target)[source != target]]).unique()
        pairs = pairs[torch.randperm(len(pairs), generator=generator)[:count]]
        return torch.stack([pairs // n, pairs % n])

    edge_indices = {relation: draw_edges(count) for relation, count in preset.num_edges.items()}

    # Knock-outs: a first node, then partners from its module, its physical neighbours, or anywhere.
    physical = to_undirected(edge_indices["physical"], num_nodes=n)  # sorted by source
    source, target = physical
    degree = torch.bincount(source, minlength=n)
    first_edge = degree.cumsum(0) - degree
    first = torch.randint(n, (num_samples,), generator=generator)
    columns = [first]
    for _ in range(preset.deletions[1] - 1):
        edge = first_edge[first] + (uniform(num_samples) * degree[first]).long()
        neighbour = target[edge.clamp(max=len(target) - 1)]
        anywhere = torch.randint(n, (num_samples,), generator=generator)
        choice = uniform(num_samples)
        partner = torch.where(choice < 0.3, neighbour, torch.where(choice < 0.7, draw_from_module(first), anywhere))
        while (taken := (torch.stack(columns) == partner).any(0)).any():
            partner = torch.where(taken, torch.randint(n, (num_samples,), generator=generator), partner)
        columns.append(partner)
    deletions = torch.randint(preset.deletions[0], preset.deletions[1] + 1, (num_samples,), generator=generator)
    row, column = (torch.arange(len(columns)) < deletions.unsqueeze(1)).nonzero().T
    perturbed, perturbed_ptr = pack(row, torch.stack(columns)[column, row], num_samples)

    edges, noise = list(edge_indices.values()), 0.2 if preset.rounds else 0.4
    if preset.rounds:
        signal = failure_losses(edges, n, perturbed, perturbed_ptr, preset.rounds)
    else:
        sample = torch.repeat_interleave(perturbed_ptr.diff())
        own_effect, module_effect = normal(n), normal(preset.num_modules)
        additive = torch.zeros(num_samples, dtype=torch.float64).index_add(0, sample, own_effect[perturbed])
        counts = torch.bincount(module[perturbed] * num_samples + sample, minlength=preset.num_modules * num_samples)
        in_module = module_effect @ (counts * (counts - 1) / 2).double().view(-1, num_samples)
        sparse = partial(torch.sparse_coo_tensor, check_invariants=False)
        norm = degree.double().clamp(min=1).rsqrt()
        value = norm[source] * norm[target]
        dead = sparse(torch.stack([perturbed, sample]), norm.new_ones(len(perturbed)), (n, num_samples))
        reached = torch.sparse.mm(sparse(physical, value, (n, n)), dead)  # one-edge paths from the dead nodes
        own_paths = torch.zeros_like(norm).index_add(0, source, value.square())  # paths from a node to itself
        paths = (((dead + reached) * reached).sum(0).to_dense() - own_paths @ dead) / 2
        signal = sum(share * part / part.std() for share, part in ((0.55, additive), (0.55, in_module), (0.45, paths)))
    y, genes = signal + noise * signal.std() * normal(num_samples), [f"G{i:05d}" for i in range(n)]
    return Tables(genes, list(edge_indices), edges, perturbed, perturbed_ptr, y, signal=signal.unsqueeze(1))


def failure_losses(edge_indices: list[Tensor], num_nodes: int, perturbed: Tensor, ptr: Tensor, rounds: int) -> Tensor:
    """Returns how much activity the living nodes lose in all when failures spread along edges, float64 [n].

    It is a supply network: an edge's source supplies its target, with half the weight of the relation before. In each
    round, a node's activity becomes a steep function of the weighted share of its suppliers that work, one half where
    40 % have failed: most nodes survive the loss of one supplier, but not of two that back each other up, and their
    failure is passed on. All nodes count alike, so that what matters is where a node lies in the damaged graph.
    """
    weight = torch.cat([torch.full((e.size(1),), 0.5**r, dtype=torch.float64) for r, e in enumerate(edge_indices)])
    source, target = torch.cat(edge_indices, dim=1)
    share = weight / weight.new_zeros(num_nodes).index_add(0, target, weight)[target]
    shares = torch.sparse_coo_tensor(torch.stack([target, source]), share, (num_nodes,) * 2, check_invariants=False)

    alive = weight.new_ones(num_nodes, len(ptr))  # the last column is the intact graph
    alive[perturbed, torch.repeat_interleave(ptr.diff())] = 0
    activity = alive
    for _ in range(rounds):
        activity = alive * torch.sigmoid(12 * (0.4 - torch.sparse.mm(shares, 1 - activity)))
    return (alive * (activity[:, -1:] - activity)).sum(0)[:-1]


# ---- Helpers --------------------------------------------------------------------------------------------------------
def _read_rows(path: str, *first: str) -> Iterator[tuple[Sequence[int], dict[str, Sequence[str]]]]:
    """Yields, for up to 100,000 data lines at once, their numbers and {column: cells}, of which `first` come first."""
    settings = {"unit": " lines", "unit_scale": True, "delay": 5, "leave": False}
    settings["disable"] = True if os.environ.get("RANK", "0") != "0" else None  # None: unless on a terminal
    open_file, start, empty = gzip.open if path.endswith(".gz") else open, 2, True
    try:
        with open_file(path, "rt", encoding="utf-8-sig") as file, tqdm(desc=f"reading {path}", **settings) as bar:
            header = next(file, "").rstrip("\r\n").split("\t")
            if tuple(header[: len(first)]) != first or len(set(header)) < len(header):
                found, expected = "\t".join(header)[:80], "\t".join(first)
                raise DataError(f"{path}:1: the header is {found!r}: begin with {expected!r}, name each column once")
            while rows := [line.rstrip("\r\n").split("\t") for line in islice(file, 100_000)]:
                numbers, start = range(start, start + len(rows)), start + len(rows)
                if len(header) > 1 and [""] in rows:  # blank lines
                    numbers = [number for number, row in zip(numbers, rows, strict=True) if row != [""]]
                    rows = [row for row in rows if row != [""]]
                for number, row in zip(numbers, rows, strict=True):
                    if len(row) != len(header):
                        raise DataError(f"{path}:{number}: {len(row)} fields where the header has {len(header)}")
                if rows:
                    empty = False
                    yield numbers, dict(zip(header, zip(*rows, strict=True), strict=True))
                bar.update(len(rows))
            if empty:
                raise DataError(f"{path}: no rows below the header")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def cached(config: DataConfig, kind: str, key: str, build: Callable[[], Any]) -> Any:
    """Returns the result of `build`, cached in a file; of several processes, one builds while the others wait.

    The file is that of `key` and of this file's content, so that editing the parser, a split or the baseline makes
    another one. Its tensors are mapped into memory, which the processes of a machine share.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes() + key.encode()).hexdigest()
    path = Path(config.cache_dir, f"{kind}-{digest[:32]}.pt")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # an unwritable folder is reported below
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            try:
                return torch.load(path, weights_only=True, mmap=True)
            except Exception as error:  # a damaged file fails in many ways
                log.warning("cache %s is damaged (%s) and will be rebuilt", path, type(error).__name__)
        content = build()
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # renamed once complete
                torch.save(content, Path(folder, path.name))
                os.replace(Path(folder, path.name), path)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            log.warning("%s is not cached: %s", path.name, error)
    return content
