"""Tables in, batches out: the shared graph, knock-out samples, splits, and the order in which ranks see the samples.

Edge table: header `source<TAB>target<TAB>relation`. Knock-out table: header `genes`, then one or more scores of any
names, and optionally `split` (train, val, test) and `weight`, or `sd`, from which the weight is 1 / sd**2. Genes are
separated by commas (empty for an intact control); an empty score or NA is missing. Both may be gzipped (`.gz`).

Shapes: N nodes, E_r edges of relation r, n samples of T scores; B samples with P knocked-out nodes in a batch.
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
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # of the additive baseline, from 0.1 to 1000


class DataError(ValueError):
    """The input data is wrong; the message is one sentence that names the file and, if known, the line."""


@dataclass(frozen=True)
class DataConfig:
    source: Literal["synthetic", "tsv"] = "synthetic"
    preset: Literal["small", "yeast", "network"] = "small"
    edges: str = ""
    perturbations: str = ""
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
    signal: Tensor | None = None  # float64 [n, 1], y without its noise, where that is known

    def __post_init__(self):
        self.y = self.y if self.y.dim() > 1 else self.y.unsqueeze(1)

    def graph(self) -> HeteroData:
        """Returns the graph, with node type `gene` and one edge type per relation."""
        graph = HeteroData()
        graph["gene"].num_nodes = len(self.genes)
        for relation, edge_index in zip(self.relations, self.edge_indices, strict=True):
            graph["gene", relation, "gene"].edge_index = edge_index
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
        splits = ", ".join(f"{len(self.rows(split)):,} {split}" for split in SPLITS)
        return (
            f"{len(self.genes):,} genes ({len(self.genes) - len(edges.unique()):,} isolated), {edges.size(1):,} edges "
            f"in {len(self.relations)} relations, {len(self.y):,} samples of {counts.min()} to {counts.max()} deletions"
            f": {splits} ({self.shared_pairs():,} with two nodes of a training row), {unused:,} in no split"
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

    Raises `DataError` if a file is missing, malformed or empty, or a split has no rows.
    """
    tsv, key = config.source == "tsv", f"{config.preset} {config.undirected}"
    for option in ("edges", "perturbations") if tsv else ():
        path, digest = Path(getattr(config, option)), hashlib.sha256()
        try:
            with path.open("rb") as file:
                while part := file.read(2**20):
                    digest.update(part)
        except OSError as error:
            raise DataError(f"data.{option}: cannot read {path}: {error.strerror}") from None
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
        table = config.perturbations if tsv else "the synthetic table"
        found = f"no rows in the {empty[0]} split of {len(tables.y)} rows (data.split={config.split})"
        raise DataError(f"{table}: {found}: change data.val_fraction and data.test_fraction, or add rows")
    return tables


def read_tables(config: DataConfig) -> Tables:
    """Returns both files as `Tables`; nodes are numbered by sorted gene name, and duplicate edges are merged."""
    number = Numbers()
    relations, relation, edges = read_edges(config.edges, number)
    row, node, y, split, weight, targets = read_knockouts(config.perturbations, number)
    genes = sorted(number)
    order = torch.empty(len(genes), dtype=torch.long)
    order[torch.tensor([number[gene] for gene in genes])] = torch.arange(len(genes))
    edges, merge = order[edges], to_undirected if config.undirected else coalesce
    edge_indices = [merge(edges[:, relation == r]) for r in range(len(relations))]
    perturbed, perturbed_ptr = pack_arrays(row, order[node], len(y))
    return Tables(genes, relations, edge_indices, perturbed, perturbed_ptr, y, split, weight, targets)


class Numbers(dict):
    """Numbers names from 0 in order of first appearance: `Numbers()[name]`."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number

    def of(self, names: Sequence[str]) -> Tensor:
        """Returns the numbers of these names, long [n]."""
        return torch.from_numpy(np.fromiter(map(self.__getitem__, names), dtype=np.int64, count=len(names)))


def read_edges(path: str, number: Numbers) -> tuple[list[str], Tensor, Tensor]:
    """Returns the relations' names, each edge's relation [E] and its source and target [2, E], numbered by `number`.

    Raises `DataError`.
    """
    relations, parts = Numbers(), []
    for lines, table in _read_rows(path, "source", "target", "relation"):
        columns = [[cell.strip() for cell in column] for column in table.values()]
        if any("" in column for column in columns):
            line = next(line for line, *cells in zip(lines, *columns, strict=True) if "" in cells)
            raise DataError(f"{path}:{line}: an empty source, target or relation")
        parts.append(torch.stack([relations.of(columns[2]), number.of(columns[0]), number.of(columns[1])]))
    relation, source, target = torch.cat(parts, dim=1)
    return list(relations), relation, torch.stack([source, target])


def read_knockouts(
    path: str, number: Numbers
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, list[str]]:
    """Returns the table's knock-outs and, as in `Tables`, its y, split, weight and targets.

    The knock-outs are the row and the node of each, [total]; nodes are numbered by `number`. Raises `DataError`.
    """
    parts, num_rows = [], 0
    for lines, table in _read_rows(path, "genes", others=True):
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
    if path in ("all-singles", "all-pairs"):
        size = ("all-singles", "all-pairs").index(path) + 1
        sets = combinations(list(number), size)
        while part := list(islice(sets, 100_000)):
            row = torch.arange(len(part)).repeat_interleave(size)
            yield list(map(",".join, part)), row, number.of([name for names in part for name in names])
        return
    for lines, table in _read_rows(path, "genes", others=True):
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
    values = []
    for line, cell in zip(lines, cells, strict=True):
        missing = cell in ("", "NA") and kind == "finite"
        try:
            values.append(math.nan if missing else float(cell))
        except ValueError:
            values.append(math.inf)
        if not (missing or (-1e30 if kind == "finite" else 0) < values[-1] < 1e30) or "_" in cell:
            raise DataError(f"{path}:{line}: the {name} '{cell}' is not a {kind} number")
    return torch.tensor(values, dtype=torch.float64)


def pack(sets: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns `perturbed` [total] and `perturbed_ptr` [n + 1] for n node sets, sorted and without duplicates."""
    counts = torch.tensor([len(nodes) for nodes in sets], dtype=torch.long)
    nodes = torch.tensor([node for nodes in sets for node in nodes], dtype=torch.long)
    return pack_arrays(torch.repeat_interleave(counts), nodes, len(sets))


def pack_arrays(row: Tensor, node: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """As `pack`, from the row and the node of each entry, [total] each."""
    low, high = node.aminmax() if len(node) else (0, 0)
    size = int(high - low) + 1
    row, node = map(torch.from_numpy, np.divmod(np.unique((row * size + node - low).numpy()), size))
    return node + low, index2ptr(row, num_rows)


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
    sizes the masks' tensors.

    Args:
        perturbed, perturbed_ptr, y: as in `Tables`; a node is listed once in a sample, as `pack` sees to.
        degree: `SharedGraph.degree`, long [N].
        weight: as in `Tables`; scaled to a mean of 1.
    """

    def __init__(
        self, perturbed: Tensor, perturbed_ptr: Tensor, y: Tensor, degree: Tensor, weight: Tensor | None = None
    ):
        self.perturbed, self.perturbed_ptr, self.y = perturbed, perturbed_ptr, y if y.dim() > 1 else y.unsqueeze(1)
        self.weight = y.new_ones(len(y)) if weight is None else weight / weight.mean()
        self.degree, self.transform = degree, None  # transforms batches, as `mask.ReachPlanner`

    def __len__(self) -> int:
        return len(self.y)

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

    def __init__(
        self,
        rows: Tensor,
        batch_size: int,
        accumulate: int,
        world_size: int,
        rank: int,
        seed: int,
        y: Tensor | None = None,
    ):
        super().__init__(rows, num_replicas=world_size, rank=rank, seed=seed)
        self.rows, self.batch_size, self.accumulate, self.y = rows, batch_size, accumulate, y
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

    def scores_in_step(self, step: int) -> int:
        """Returns the number of scores in these rows that `y` has, one of each row without `y`."""
        rows = self.rows_in_step(step)
        return len(rows) if self.y is None else int(np.isfinite(self.y[rows].numpy()).sum())

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


def shard(rows: Tensor, batch_size: int, world_size: int, rank: int) -> Iterator[list[int]]:
    """Yields this rank's evaluation batches of row numbers: each row is on exactly one rank, without padding."""
    part = rows[rank::world_size]
    return (part[start : start + batch_size].tolist() for start in range(0, len(part), batch_size))


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
    rows = zip(torch.stack(columns, dim=1).tolist(), deletions.tolist(), strict=True)
    perturbed, perturbed_ptr = pack([nodes[:count] for nodes, count in rows])

    genes = [f"G{i:05d}" for i in range(n)]
    graph = genes, list(edge_indices), list(edge_indices.values())

    def tables(signal: Tensor, noise: float) -> Tables:
        y = signal + noise * signal.std() * normal(num_samples)
        return Tables(*graph, perturbed, perturbed_ptr, y, signal=signal.unsqueeze(1))

    if preset.rounds:
        return tables(failure_losses(graph[2], n, perturbed, perturbed_ptr, preset.rounds), noise=0.2)

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
    return tables(signal, noise=0.4)


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
def _read_rows(
    path: str, *first: str, others: bool = False
) -> Iterator[tuple[Sequence[int], dict[str, tuple[str, ...]]]]:
    """Yields, for up to 100,000 data lines at once, their numbers and {column: cells}; `others` may follow `first`."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            header = next(file, "").rstrip("\r\n").split("\t")
            if tuple(header[: None if not others else len(first)]) != first or len(set(header)) < len(header):
                found, expected = "\t".join(header)[:80], "\t".join(first) + ", then distinct names" * others
                raise DataError(f"{path}:1: the header is {found!r}, not {expected!r}")
            hidden = True if os.environ.get("RANK", "0") != "0" else None  # None: unless on a terminal
            start, empty = 2, True
            bar = tqdm(desc=f"reading {path}", unit=" lines", unit_scale=True, delay=5, leave=False, disable=hidden)
            while cells := [line.rstrip("\r\n").split("\t") for line in islice(file, 100_000)]:
                lines = range(start, start + len(cells))
                start += len(cells)
                if len(header) > 1 and [""] in cells:  # blank lines
                    lines = [number for number, row in zip(lines, cells, strict=True) if row != [""]]
                    cells = [row for row in cells if row != [""]]
                for number, row in zip(lines, cells, strict=True):
                    if len(row) != len(header):
                        raise DataError(f"{path}:{number}: {len(row)} fields where the header has {len(header)}")
                if cells:
                    empty = False
                    yield lines, dict(zip(header, zip(*cells, strict=True), strict=True))
                bar.update(len(cells))
            bar.close()
            if empty:
                raise DataError(f"{path}: no rows below the header")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
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
