"""Tables in, batches out: the shared graph, knock-out samples, splits, and the order in which ranks see the samples.

Edge table: header `source<TAB>target<TAB>relation`. Knock-out table: header `genes<TAB>score[<TAB>split]`, with
comma-separated genes (empty for an intact control) and split one of train, val, test. Both may be gzipped (`.gz`).

Shapes: N nodes, E_r edges of relation r, n samples in the table, B samples in a batch, P knocked-out nodes in a batch.
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
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_convert
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import coalesce, to_undirected

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
    y: Tensor  # float64 [n], the measured effects
    split: Tensor | None = None  # int8 [n], index into `SPLITS`, -1 for rows in none
    signal: Tensor | None = None  # float64 [n], y without its noise, where that is known

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
        return torch.corrcoef(torch.stack([self.y, self.signal])[:, self.rows("test")])[0, 1].item()

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
    tsv = config.source == "tsv"
    # The key includes this file, so that editing the parser or generator invalidates the cache.
    key = hashlib.sha256(Path(__file__).read_bytes() + f"{config.preset} {config.undirected}".encode())
    for option in ("edges", "perturbations") if tsv else ():
        path = Path(getattr(config, option))
        try:
            key.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise DataError(f"data.{option}: cannot read {path}: {error.strerror}") from None
    build = partial(read_tables, config) if tsv else partial(synthetic_tables, PRESETS[config.preset], seed=0)
    tables = _cached(Path(config.cache_dir, f"tables-{key.hexdigest()[:32]}.pt"), build)
    if tables.split is not None and config.split == "nodes":
        raise DataError(f"{config.perturbations} has a column split: remove it, or set data.split=random to use it")
    if tables.split is None:
        tables.split = (node_split if config.split == "nodes" else random_split)(tables, config)
    if empty := [split for split in SPLITS if len(tables.rows(split)) == 0]:
        table = config.perturbations if tsv else "the synthetic table"
        found = f"no rows in the {empty[0]} split of {len(tables.y)} rows (data.split={config.split})"
        raise DataError(f"{table}: {found}: change data.val_fraction and data.test_fraction, or add rows")
    return tables


def read_tables(config: DataConfig) -> Tables:
    """Returns both files as `Tables`; nodes are numbered by sorted gene name, and duplicate edges are merged."""
    edges = read_edges(config.edges)
    knockouts, scores, splits = read_knockouts(config.perturbations)
    genes = sorted({gene for pair in edges.values() for side in pair for gene in side}.union(*knockouts))
    number = {gene: i for i, gene in enumerate(genes)}
    merge = to_undirected if config.undirected else coalesce
    edge_indices = [merge(torch.tensor([[number[gene] for gene in side] for side in pair])) for pair in edges.values()]
    perturbed, perturbed_ptr = pack([[number[gene] for gene in names] for names in knockouts])
    y = torch.tensor(scores, dtype=torch.float64)
    split = torch.tensor([SPLITS.index(name) for name in splits], dtype=torch.int8) if all(splits) else None
    return Tables(genes, list(edges), edge_indices, perturbed, perturbed_ptr, y, split)


def read_edges(path: str) -> dict[str, tuple[list[str], list[str]]]:
    """Returns {relation: (sources, targets)}, in order of first appearance; raises `DataError`."""
    edges: dict[str, tuple[list[str], list[str]]] = {}
    for line, cells in _read_rows(path, ("source", "target", "relation"), required=3):
        source, target, relation = (cell.strip() for cell in cells)
        if not (source and target and relation):
            raise DataError(f"{path}:{line}: an empty source, target or relation")
        sources, targets = edges.setdefault(relation, ([], []))
        sources.append(source)
        targets.append(target)
    if not edges:
        raise DataError(f"{path}: no edges below the header")
    return edges


def read_knockouts(path: str, scored: bool = True) -> tuple[list[list[str]], list[float], list[str | None]]:
    """Returns each row's genes, scores and splits; with `scored=False` only genes. Raises `DataError`."""
    knockouts, scores, splits = [], [], []
    for line, (genes, score, split) in _read_rows(path, ("genes", "score", "split"), required=2 if scored else 1):
        knockouts.append([gene.strip() for gene in genes.split(",")] if genes.strip() else [])
        if "" in knockouts[-1]:
            raise DataError(f"{path}:{line}: an empty gene name in '{genes}'")
        if not scored:
            continue
        try:
            scores.append(float(score))
        except ValueError:
            scores.append(math.nan)
        if not abs(scores[-1]) < 1e30 or "_" in score:
            raise DataError(f"{path}:{line}: the score '{score}' is not a finite number")
        if split not in (None, *SPLITS):
            raise DataError(f"{path}:{line}: the split '{split}' is not one of {', '.join(SPLITS)}")
        splits.append(split)
    if not knockouts:
        raise DataError(f"{path}: no samples below the header")
    return knockouts, scores, splits


def pack(sets: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns `perturbed` [total] and `perturbed_ptr` [n + 1] for n node sets, sorted and without duplicates."""
    sets = [sorted(set(nodes)) for nodes in sets]
    pointer = torch.tensor([0] + [len(nodes) for nodes in sets]).cumsum(0)
    return torch.tensor([node for nodes in sets for node in nodes], dtype=torch.long), pointer


def random_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a random split, int8 [n], seeded by `split_seed`; rows with the same knock-outs stay together."""
    groups: dict[tuple[int, ...], int] = {}
    bounds, nodes = tables.perturbed_ptr.tolist(), tables.perturbed.tolist()
    group = [groups.setdefault(tuple(nodes[a:b]), len(groups)) for a, b in pairwise(bounds)]
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(config.split_seed))
    num_test, num_val = (round(len(groups) * f) for f in (config.test_fraction, config.val_fraction))
    split_of_group = torch.zeros(len(groups), dtype=torch.int8)
    split_of_group[order[:num_test]] = SPLITS.index("test")
    split_of_group[order[num_test : num_test + num_val]] = SPLITS.index("val")
    return split_of_group[torch.tensor(group)]


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

    A batch is a PyG `Data` with `perturbed` [P], `perturbed_batch` [P], `perturbed_ptr` [B + 1], `y` [B], `weight` [B]
    (0 for padding), `index` [B] (the row, -1 for padding) and `num_dead_edges`, an int that sizes the masks' tensors.

    Args:
        perturbed, perturbed_ptr, y: as in `Tables`; duplicate nodes within a sample are dropped.
        degree: `SharedGraph.degree`, long [N].
    """

    def __init__(self, perturbed: Tensor, perturbed_ptr: Tensor, y: Tensor, degree: Tensor):
        sets = perturbed.split(perturbed_ptr.diff().tolist())
        self.perturbed, self.perturbed_ptr = pack([nodes.tolist() for nodes in sets])
        self.y, self.degree, self.transform = y.float(), degree, None  # transforms batches, as `mask.ReachPlanner`

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
        scores = {"y": self.y[row] * real, "weight": real.float(), "index": index}
        batch = Data(**knockouts, **scores, num_dead_edges=int(self.degree[perturbed].sum()))
        return self.transform(batch) if self.transform else batch


class StepSampler(DistributedSampler):
    """Batch sampler that yields this rank's rows of each micro-batch, as a list.

    Each epoch has one permutation, from (seed, epoch). A step takes the same `batch_size` rows for any world size; the
    last step of an epoch takes what is left. Row counts that do not divide evenly are padded with -1.
    """

    def __init__(self, rows: Tensor, batch_size: int, accumulate: int, world_size: int, rank: int, seed: int):
        super().__init__(rows, num_replicas=world_size, rank=rank, seed=seed)
        self.rows, self.batch_size, self.accumulate = rows, batch_size, accumulate
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.first_step = 0

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Sets the epoch to iterate next; `first_step` skips the steps that a resumed epoch has already done."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def samples_in_step(self, step: int) -> int:
        """Returns the number of rows in a step of the epoch over all ranks and micro-batches, without padding."""
        return min(self.batch_size, len(self.rows) - step * self.batch_size)

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = self.rows[torch.randperm(len(self.rows), generator=generator)]
        for rows in order.split(self.batch_size)[self.first_step :]:
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


def shard(rows: Tensor, batch_size: int, world_size: int, rank: int) -> list[list[int]]:
    """Returns this rank's evaluation batches of row numbers: each row is on exactly one rank, without padding."""
    return [part.tolist() for part in rows[rank::world_size].split(batch_size)] if rank < len(rows) else []


# ---- Baseline and synthetic tables ----------------------------------------------------------------------------------
def additive_baseline(tables: Tables, penalties: Sequence[float] = PENALTIES) -> tuple[Tensor, Tensor]:
    """Returns an effect per node, float64 [N], and predictions that add them up and the training mean, float64 [n].

    The effects are a ridge regression on the training rows, by conjugate gradients on the normal equations, with the
    penalty that suits the validation rows best: what can be predicted from the set of knocked-out nodes alone.
    """
    row, val = tables.sample(), tables.rows("val")
    weight, mean = (tables.split == SPLITS.index("train")).double(), tables.y[tables.rows("train")].mean()

    def predict(effect: Tensor) -> Tensor:
        return torch.zeros_like(tables.y).index_add(0, row, effect[tables.perturbed])

    def collect(values: Tensor) -> Tensor:
        return effect.new_zeros(len(tables.genes)).index_add(0, tables.perturbed, (values * weight)[row])

    effect, found = torch.zeros(len(tables.genes), dtype=torch.float64), []
    tolerance = 1e-20 * collect(tables.y - mean).square().sum()
    for penalty in sorted(penalties, reverse=True):  # each starts from the solution for the next larger one
        direction = residual = collect(tables.y - mean - predict(effect)) - penalty * effect
        norm = residual.square().sum()
        for _ in range(200):
            if norm <= tolerance:
                break
            product = collect(predict(direction)) + penalty * direction
            step = norm / (direction * product).sum()
            effect, residual = effect + step * direction, residual - step * product
            norm, previous = residual.square().sum(), norm
            direction = residual + norm / previous * direction
        prediction = mean + predict(effect)
        found.append(((prediction - tables.y)[val].square().mean(), effect, prediction))
    return min(found, key=lambda solution: solution[0])[1:]


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
    tables = partial(Tables, genes, list(edge_indices), list(edge_indices.values()), perturbed, perturbed_ptr)
    if preset.rounds:
        signal = failure_losses(list(edge_indices.values()), n, perturbed, perturbed_ptr, preset.rounds)
        return tables(y=signal + 0.2 * signal.std() * normal(num_samples), signal=signal)

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
    return tables(y=signal + 0.4 * signal.std() * normal(num_samples), signal=signal)


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
def _read_rows(path: str, columns: tuple[str, ...], required: int) -> Iterator[tuple[int, list[str | None]]]:
    """Yields each data line's number and cells; columns after the first `required` may be absent (cell None)."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            header = next(file, "").rstrip("\r\n").split("\t")
            if tuple(header) != columns[: max(len(header), required)]:
                found, expected = "\t".join(header)[:80], "\t".join(columns[:required])
                raise DataError(f"{path}:1: the header is {found!r}, not {expected!r}")
            for number, line in enumerate(file, start=2):
                cells = line.rstrip("\r\n").split("\t")
                if cells == [""] and len(header) > 1:
                    continue
                if len(cells) != len(header):
                    raise DataError(f"{path}:{number}: {len(cells)} fields where the header has {len(header)}")
                yield number, cells + [None] * (len(columns) - len(header))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _cached(path: Path, build: Callable[[], Tables]) -> Tables:
    """Returns the result of `build`, cached in a file; of several processes, one builds while the others wait."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # an unwritable folder is reported below
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            try:
                return Tables(**torch.load(path, weights_only=True))
            except Exception as error:  # a damaged file fails in many ways
                log.warning("cache %s is damaged (%s) and will be rebuilt", path, type(error).__name__)
        tables = build()
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # renamed once complete
                torch.save(vars(tables), Path(folder, path.name))
                os.replace(Path(folder, path.name), path)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            log.warning("the tables are not cached: %s", error)
    return tables
