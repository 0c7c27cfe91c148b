"""Tables in, batches out: the shared graph, the knock-out samples, their splits, and the order in which ranks see them.

`load` gives `Tables` from TSV files or from the synthetic generator; `KnockoutDataset` builds whole batches from row
numbers; `StepSampler` deals the rows of each optimiser step out to the ranks.

Edge table: header `source<TAB>target<TAB>relation`. Knock-out table: header `genes<TAB>score[<TAB>split]`, genes
comma-separated (none at all for an intact control), split one of train, val, test. Either may end in `.gz`.

Letters in shapes: N nodes, n samples of the whole table, B samples of a batch, P knocked-out nodes of the batch.
"""

import contextlib
import fcntl
import gzip
import hashlib
import logging
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import coalesce, to_undirected

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")


class DataError(ValueError):
    """The input data is wrong; the message is one sentence for the user."""


@dataclass(frozen=True)
class DataConfig:
    source: str = "synthetic"
    preset: str = "small"
    synthetic_seed: int = 0
    edges: str = ""
    perturbations: str = ""
    undirected: bool = False
    batch_size: int = 128
    split_seed: int = 0
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    workers: int = 0
    cache_dir: str = ".cache"

    def __post_init__(self):
        if self.source not in ("synthetic", "tsv"):
            raise ValueError(f"data.source must be synthetic or tsv, not '{self.source}'")
        if self.preset not in PRESETS:
            raise ValueError(f"data.preset must be one of {', '.join(PRESETS)}, not '{self.preset}'")
        if self.source == "tsv" and not (self.edges and self.perturbations):
            raise ValueError("data.source=tsv needs two files: set data.edges and data.perturbations")
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1, not {self.batch_size}")
        if min(self.val_fraction, self.test_fraction) <= 0 or self.val_fraction + self.test_fraction >= 1:
            raise ValueError("data.val_fraction and data.test_fraction must be over 0 and leave rows for training")
        if not (0 <= self.split_seed < 2**32 and 0 <= self.synthetic_seed < 2**32):
            raise ValueError("data.split_seed and data.synthetic_seed must be from 0 to 2**32 - 1")
        if self.workers < 0:
            raise ValueError(f"data.workers must be at least 0, not {self.workers}")


@dataclass(frozen=True)
class Preset:
    """Shape of a synthetic problem; `deletions` are the least and the most knock-outs of a sample."""

    num_nodes: int
    num_edges: dict[str, int]
    num_modules: int
    num_samples: int
    deletions: tuple[int, int]


PRESETS = {
    "small": Preset(
        num_nodes=400,
        num_edges={"physical": 2400, "regulatory": 800, "coexpression": 4800},
        num_modules=16,
        num_samples=6000,
        deletions=(1, 3),
    ),
    "yeast": Preset(
        num_nodes=6607,
        num_edges={
            "regulatory": 9_753,
            "physical": 139_463,
            "tflink": 201_898,
            "neighborhood": 147_874,
            "fusion": 11_810,
            "cooccurence": 11_115,
            "coexpression": 1_002_538,
            "experimental": 825_101,
            "database": 73_818,
        },
        num_modules=120,
        num_samples=20_000,
        deletions=(3, 3),
    ),
}


@dataclass
class Tables:
    """A graph and the samples on it.

    Attributes:
        genes: name of each node.
        relations, edge_indices: name and [2, E_r] of each relation.
        perturbed, perturbed_ptr: [total], [n + 1]; row i knocks out `perturbed[perturbed_ptr[i]:perturbed_ptr[i + 1]]`.
        y: float64 [n].
        split: int8 [n], a position in `SPLITS`.
        signal: float64 [n], y without its noise, where that is known.
    """

    genes: list[str]
    relations: list[str]
    edge_indices: list[Tensor]
    perturbed: Tensor
    perturbed_ptr: Tensor
    y: Tensor
    split: Tensor | None = None
    signal: Tensor | None = field(default=None)

    def graph(self) -> HeteroData:
        graph = HeteroData()
        graph["gene"].num_nodes = len(self.genes)
        for relation, edge_index in zip(self.relations, self.edge_indices, strict=True):
            graph["gene", relation, "gene"].edge_index = edge_index
        return graph

    def rows(self, split: str) -> Tensor:
        """Row numbers of one split, ascending."""
        return (self.split == SPLITS.index(split)).nonzero().flatten()

    def fingerprint(self) -> str:
        """A hash of all fields: the same data has the same one everywhere.

        Raises:
            TypeError: for a field that is not made of tensors, text and numbers.
        """
        digest = hashlib.sha256()

        def add(value: object) -> None:
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype} {list(value.shape)}\n".encode())
                digest.update(value.detach().flatten().view(torch.uint8).numpy().tobytes())
            elif isinstance(value, list | tuple | dict):
                digest.update(f"{type(value).__name__} {len(value)}\n".encode())
                for part in value.items() if isinstance(value, dict) else value:
                    add(part)
            elif value is None or isinstance(value, str | int | float):
                digest.update(f"{value!r}\n".encode())
            else:
                raise TypeError(f"Tables holds a {type(value).__name__}: make it a tensor, for ranks to compare it")

        add(vars(self))
        return digest.hexdigest()

    def noise_ceiling(self) -> float | None:
        """Pearson of y with its noise-free part over the test rows: what the best possible model would reach."""
        if self.signal is None:
            return None
        rows = self.rows("test")
        return torch.corrcoef(torch.stack([self.y[rows], self.signal[rows]]))[0, 1].item()

    def summary(self) -> str:
        touched = torch.cat(self.edge_indices, dim=1).unique().numel()
        counts = self.perturbed_ptr.diff()
        return (
            f"{len(self.genes):,} genes ({len(self.genes) - touched:,} isolated), "
            f"{sum(e.size(1) for e in self.edge_indices):,} edges in {len(self.relations)} relations, "
            f"{len(self.y):,} samples of {counts.min()} to {counts.max()} deletions: "
            + ", ".join(f"{len(self.rows(split)):,} {split}" for split in SPLITS)
        )


def load(config: DataConfig) -> Tables:
    """The tables that `config` names, from the cache where they have been read before.

    Raises:
        DataError: a file that is missing, malformed or empty, or a split without rows.
    """
    # This file is part of the key, so an edited parser or generator never meets its old results.
    key = hashlib.sha256(Path(__file__).read_bytes())
    if config.source == "tsv":
        for name in ("edges", "perturbations"):
            content = _read_bytes(getattr(config, name), f"data.{name}")
            key.update(hashlib.sha256(content).digest())
        key.update(str(config.undirected).encode())
        tables = _cached(config.cache_dir, key.hexdigest(), lambda: read_tables(config))
    else:
        preset = PRESETS[config.preset]
        key.update(repr((preset, config.synthetic_seed)).encode())
        tables = _cached(config.cache_dir, key.hexdigest(), lambda: synthetic_tables(preset, config.synthetic_seed))
    if tables.split is None:
        tables.split = random_split(tables, config)
    for split in SPLITS:
        if len(tables.rows(split)) == 0:
            where = config.perturbations if config.source == "tsv" else "the synthetic table"
            raise DataError(
                f"{where}: no rows in the {split} split of {len(tables.y)} rows in all, where rows with the same "
                "knock-outs stay together: set data.val_fraction and data.test_fraction, or give more rows"
            )
    y = tables.y[tables.rows("train")]
    if y.mean().abs() > 1e5 * y.std(correction=0) > 0:
        raise DataError(
            f"{config.perturbations}: scores around {y.mean():.6g} differ by only {y.std(correction=0):.2g}, which "
            "float32 cannot tell apart: subtract a constant from all scores"
        )
    return tables


def read_tables(config: DataConfig) -> Tables:
    edges = read_edges(config.edges)
    knockouts, scores, splits = read_knockouts(config.perturbations)
    genes = sorted({gene for pair in edges.values() for side in pair for gene in side}.union(*knockouts))
    number = {gene: i for i, gene in enumerate(genes)}
    edge_indices = []
    for pair in edges.values():
        edge_index = torch.tensor([[number[gene] for gene in side] for side in pair])
        edge_indices.append(to_undirected(edge_index) if config.undirected else coalesce(edge_index))
    perturbed, perturbed_ptr = pack([[number[gene] for gene in genes] for genes in knockouts])
    return Tables(
        genes=genes,
        relations=list(edges),
        edge_indices=edge_indices,
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.tensor(scores, dtype=torch.float64),
        split=torch.tensor([SPLITS.index(split) for split in splits], dtype=torch.int8) if splits else None,
    )


def read_edges(path: str) -> dict[str, tuple[list[str], list[str]]]:
    """{relation: (sources, targets)}, relations in the order of their first line."""
    edges: dict[str, tuple[list[str], list[str]]] = {}
    for line, fields in _table(path, ("source", "target", "relation")):
        source, target, relation = (field.strip() for field in fields)
        if not (source and target and relation):
            raise DataError(f"{path}:{line}: an empty source, target or relation")
        sources, targets = edges.setdefault(relation, ([], []))
        sources.append(source)
        targets.append(target)
    if not edges:
        raise DataError(f"{path}: no edges below the header")
    return edges


def read_knockouts(path: str, scored: bool = True) -> tuple[list[list[str]], list[float], list[str]]:
    """Genes, score and split of each row; without `scored` the table needs its `genes` column only."""
    knockouts, scores, splits = [], [], []
    for line, (genes, score, split) in _table(path, ("genes", "score", "split"), required=2 if scored else 1):
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
        if split is not None:
            if split not in SPLITS:
                raise DataError(f"{path}:{line}: the split '{split}' is not one of {', '.join(SPLITS)}")
            splits.append(split)
    if not knockouts:
        raise DataError(f"{path}: no samples below the header")
    return knockouts, scores, splits


def pack(sets: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """`perturbed` [total] and `perturbed_ptr` [n + 1] of node sets; a node named twice in a set stands once."""
    sets = [sorted(set(nodes)) for nodes in sets]
    pointer = torch.tensor([0] + [len(nodes) for nodes in sets]).cumsum(0)
    return torch.tensor([node for nodes in sets for node in nodes], dtype=torch.long), pointer


def random_split(tables: Tables, config: DataConfig) -> Tensor:
    """Int8 [n], from `split_seed` alone. Rows with the same knock-outs go together: a replicate in training would give
    the test answer away."""
    groups: dict[tuple[int, ...], int] = {}
    bounds = tables.perturbed_ptr.tolist()
    nodes = tables.perturbed.tolist()
    group = [groups.setdefault(tuple(nodes[a:b]), len(groups)) for a, b in pairwise(bounds)]
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(config.split_seed))
    num_test, num_val = (round(len(groups) * f) for f in (config.test_fraction, config.val_fraction))
    split_of_group = torch.zeros(len(groups), dtype=torch.int8)
    split_of_group[order[:num_test]] = SPLITS.index("test")
    split_of_group[order[num_test : num_test + num_val]] = SPLITS.index("val")
    return split_of_group[torch.tensor(group)]


class KnockoutDataset(Dataset):
    """Batches of samples, built at once from a list of row numbers; -1 stands for padding.

    A batch is a PyG `Data` with `perturbed` [P], `perturbed_batch` [P], `perturbed_ptr` [B + 1], `y` [B], `weight` [B]
    (0 for padding), `index` [B] (the row, -1 for padding) and `num_dead_edges`, an int that sizes the mask kernel.

    Args:
        perturbed, perturbed_ptr, y: as in `Tables`; a node that stands twice in a sample counts once.
        degree: `SharedGraph.degree` [N].
    """

    def __init__(self, perturbed: Tensor, perturbed_ptr: Tensor, y: Tensor, degree: Tensor):
        sets = perturbed.split(perturbed_ptr.diff().tolist())
        self.perturbed, self.perturbed_ptr = pack([nodes.tolist() for nodes in sets])
        self.y = y.float()
        self.degree = degree

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Data:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Data:
        """The batch of these rows.

        Raises:
            IndexError: a knocked-out node outside [0, N).
        """
        index = torch.as_tensor(rows, dtype=torch.long)
        real = index >= 0
        row = index.clamp(min=0)
        start = self.perturbed_ptr[row]
        count = (self.perturbed_ptr[row + 1] - start) * real
        ptr = torch.zeros(len(index) + 1, dtype=torch.long)
        ptr[1:] = count.cumsum(0)
        sample = torch.repeat_interleave(torch.arange(len(index)), count)
        perturbed = self.perturbed[torch.arange(len(sample)) + (start - ptr[:-1])[sample]]
        outside = (perturbed < 0) | (perturbed >= len(self.degree))
        if outside.any():
            first = outside.nonzero()[0]
            raise IndexError(
                f"sample {index[sample[first]].item()}: knocked-out node {perturbed[first].item()} is outside "
                f"[0, {len(self.degree)}), the graph's nodes"
            )
        return Data(
            perturbed=perturbed,
            perturbed_batch=sample,
            perturbed_ptr=ptr,
            y=self.y[row] * real,
            weight=real.float(),
            index=index,
            num_dead_edges=int(self.degree[perturbed].sum()),
        )


class StepSampler(DistributedSampler):
    """Deals the rows of each optimiser step out to the ranks: a batch sampler of one list of rows per micro-batch.

    One permutation per epoch, from (seed, epoch). Step s takes the same `batch_size` rows whatever the world size; the
    last step takes what is left. Where the rows of a step do not divide, -1 pads them to equal counts on every rank.
    """

    def __init__(self, rows: Tensor, batch_size: int, accumulate: int, world_size: int, rank: int, seed: int):
        super().__init__(rows, num_replicas=world_size, rank=rank, seed=seed)
        self.rows = rows
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.first_step = 0

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Call before each epoch; `first_step` skips the steps of a resumed epoch that are done."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def samples_in_step(self, step: int) -> int:
        """How many rows an epoch's step takes, over all ranks and micro-batches, padding left out."""
        return min(self.batch_size, len(self.rows) - step * self.batch_size)

    def rows_in_step(self, step: int) -> Tensor:
        """The rows that a step of this epoch takes, over all ranks and micro-batches."""
        return self._order()[step * self.batch_size :][: self.batch_size]

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(self.first_step, self.steps_per_epoch):
            rows = order[step * self.batch_size :][: self.batch_size]
            share = math.ceil(len(rows) / (self.num_replicas * self.accumulate))
            padded = rows.new_full((self.accumulate * share * self.num_replicas,), -1)
            padded[: len(rows)] = rows
            yield from padded.view(self.accumulate, share, self.num_replicas)[:, :, self.rank].tolist()

    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return self.rows[torch.randperm(len(self.rows), generator=generator)]


def make_loader(
    dataset: KnockoutDataset, batches: StepSampler | list[list[int]], workers: int, pin: bool
) -> DataLoader:
    """A loader of the batches that `batches` lists by row numbers."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=_as_is,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin,
    )


def shard(rows: Tensor, batch_size: int, world_size: int, rank: int) -> list[list[int]]:
    """This rank's batches of row numbers for evaluation: every row on exactly one rank, nothing padded."""
    return [part.tolist() for part in rows[rank::world_size].split(batch_size)] if rank < len(rows) else []


def additive_baseline(tables: Tables, ridge: float = 1.0, iterations: int = 200) -> Tensor:
    """Float64 [n]: every row predicted as the sum of one effect per knocked-out node, plus a constant.

    Ridge regression on the training rows, solved by conjugate gradients on the normal equations: what the set of
    knocked-out nodes says without any graph.
    """
    sample = torch.repeat_interleave(torch.arange(len(tables.y)), tables.perturbed_ptr.diff())
    train = (tables.split == SPLITS.index("train")).double()
    mean = (tables.y * train).sum() / train.sum()

    def predict(effect: Tensor) -> Tensor:
        return torch.zeros_like(tables.y).index_add(0, sample, effect[tables.perturbed])

    def collect(values: Tensor) -> Tensor:
        return effect.new_zeros(len(tables.genes)).index_add(0, tables.perturbed, (values * train)[sample])

    effect = torch.zeros(len(tables.genes), dtype=torch.float64)
    residual = collect(tables.y - mean)
    direction, norm = residual, residual.square().sum()
    enough = 1e-20 * norm
    for _ in range(iterations):
        if norm <= enough:
            break
        image = collect(predict(direction)) + ridge * direction
        step = norm / (direction * image).sum()
        effect = effect + step * direction
        residual = residual - step * image
        norm, previous = residual.square().sum(), norm
        direction = residual + norm / previous * direction
    return mean + predict(effect)


def synthetic_tables(preset: Preset, seed: int) -> Tables:
    """A graph with hubs and modules, and scores that follow from it.

    Nodes belong to modules; most edges stay within one, and both ends are drawn by a power-law weight. A score is the
    sum of the nodes' own effects, of an effect for every pair in one module, of the paths of one or two `physical`
    edges between each pair, and of noise. Partners of a knock-out come from its module, its neighbours, or anywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    n = preset.num_nodes

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, dtype=torch.float64, generator=generator)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    # Nodes in module order; `total` runs through their weights, so a range of it is a module and a point is a node.
    module = torch.randint(preset.num_modules, (n,), generator=generator).sort().values
    weight = torch.arange(1, n + 1, dtype=torch.float64)[torch.randperm(n, generator=generator)].pow(-0.5)
    total = weight.cumsum(0)
    size = torch.bincount(module, minlength=preset.num_modules)
    end = size.cumsum(0)
    low, high = torch.cat([total.new_zeros(1), total])[torch.stack([end - size, end])][:, module]

    def draw(count: int) -> Tensor:
        return torch.searchsorted(total, uniform(count) * total[-1]).clamp(max=n - 1)

    def draw_from_module(of: Tensor) -> Tensor:
        point = low[of] + uniform(len(of)) * (high - low)[of]
        return torch.searchsorted(total, point).clamp(max=n - 1)

    def draw_edges(count: int) -> Tensor:
        """[2, count] distinct edges, no self-loops."""
        pairs = torch.empty(0, dtype=torch.long)
        while len(pairs) < count:
            source = draw(2 * (count - len(pairs)) + 64)
            target = torch.where(uniform(len(source)) < 0.8, draw_from_module(source), draw(len(source)))
            pairs = torch.cat([pairs, (source * n + target)[source != target]]).unique()
        pairs = pairs[torch.randperm(len(pairs), generator=generator)[:count]]
        return torch.stack([pairs // n, pairs % n])

    edge_indices = {relation: draw_edges(count) for relation, count in preset.num_edges.items()}

    # Knock-outs: a first node, then partners from its module, among its physical neighbours, or anywhere.
    physical = to_undirected(edge_indices["physical"], num_nodes=n)
    degree = torch.bincount(physical[0], minlength=n)
    first_edge = degree.cumsum(0) - degree
    first = torch.randint(n, (preset.num_samples,), generator=generator)
    columns = [first]
    for _ in range(preset.deletions[1] - 1):
        edge = first_edge[first] + (uniform(len(first)) * degree[first]).long()
        neighbour = physical[1][edge.clamp(max=physical.size(1) - 1)]
        anywhere = torch.randint(n, first.shape, generator=generator)
        choice = uniform(len(first))
        partner = torch.where(choice < 0.3, neighbour, torch.where(choice < 0.7, draw_from_module(first), anywhere))
        while (taken := (torch.stack(columns) == partner).any(0)).any():
            partner = torch.where(taken, torch.randint(n, first.shape, generator=generator), partner)
        columns.append(partner)
    deletions = torch.randint(preset.deletions[0], preset.deletions[1] + 1, first.shape, generator=generator)
    sets = [row[:k] for row, k in zip(torch.stack(columns, 1).tolist(), deletions.tolist(), strict=True)]
    perturbed, perturbed_ptr = pack(sets)

    additive, in_module, paths = (torch.zeros(preset.num_samples, dtype=torch.float64) for _ in range(3))
    own_effect, module_effect = normal(n), normal(preset.num_modules)
    norm = degree.double().clamp(min=1).rsqrt()
    value = norm[physical[0]] * norm[physical[1]]
    adjacency = torch.sparse_coo_tensor(physical, value, (n, n), check_invariants=False)
    own_paths = torch.zeros(n, dtype=torch.float64).index_add(0, physical[0], value.square())  # there and back again
    sample = torch.repeat_interleave(torch.arange(preset.num_samples), perturbed_ptr.diff())
    for chunk in torch.arange(preset.num_samples).split(2000):
        part = slice(perturbed_ptr[chunk[0]], perturbed_ptr[chunk[-1] + 1])
        dead = torch.zeros(n, len(chunk), dtype=torch.float64)
        dead[perturbed[part], sample[part] - chunk[0]] = 1
        reached = torch.sparse.mm(adjacency, dead)  # [N, samples]: paths of one edge from the dead nodes
        by_module = dead.new_zeros(preset.num_modules, len(chunk)).index_add(0, module, dead)
        additive[chunk] = own_effect @ dead
        in_module[chunk] = module_effect @ (by_module * (by_module - 1) / 2)
        paths[chunk] = (((dead + reached) * reached).sum(0) - own_paths @ dead) / 2

    parts = ((0.55, additive), (0.55, in_module), (0.45, paths))
    signal = sum(share * part / part.std() for share, part in parts)
    noise = 0.4 * signal.std() * normal(preset.num_samples)
    return Tables(
        genes=[f"G{i:05d}" for i in range(n)],
        relations=list(edge_indices),
        edge_indices=list(edge_indices.values()),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=signal + noise,
        signal=signal,
    )


def _as_is(batch: Data) -> Data:
    return batch


def _read_bytes(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{key}: cannot read {path}: {error.strerror}") from None


def _table(path: str, columns: tuple[str, ...], required: int | None = None) -> Iterator[tuple[int, list[str | None]]]:
    """Line number and fields of each line below the header; columns beyond `required` may be missing from the right."""
    required = len(columns) if required is None else required
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            header = tuple(next(file, "").rstrip("\r\n").split("\t"))
            if header != columns[: max(len(header), required)]:
                raise DataError(f"{path}:1: the header is {_shown(header)}, not {_shown(columns[:required])}")
            absent = [None] * (len(columns) - len(header))
            for line, text in enumerate(file, start=2):
                if not text.rstrip("\r\n") and len(header) > 1:
                    continue
                fields = text.rstrip("\r\n").split("\t")
                if len(fields) != len(header):
                    raise DataError(f"{path}:{line}: {len(fields)} fields where the header has {len(header)}")
                yield line, fields + absent
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _shown(fields: Sequence[str]) -> str:
    return "'" + "<TAB>".join(fields)[:80] + "'"


def _cached(folder: str, key: str, build: Callable[[], Tables]) -> Tables:
    """What `build` gives, kept in a file that appears whole or not at all.

    Of several processes one builds while the others wait for its file.
    """
    path = Path(folder) / f"tables-{key[:32]}.pt"
    if (tables := _read_cache(path)) is not None:
        return tables
    temporary = None
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (tables := _read_cache(path)) is not None:
                return tables
        except OSError:  # this folder cannot be written, which is said below, or cannot be locked
            pass
        tables = build()
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                torch.save(vars(tables), file)
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch.save says RuntimeError when the disk is full
            log.warning("the tables are not cached: %s", error)
            if temporary:
                Path(temporary).unlink(missing_ok=True)
    return tables


def _read_cache(path: Path) -> Tables | None:
    try:
        return Tables(**torch.load(path, weights_only=True))
    except OSError:
        pass
    except Exception as error:  # a damaged file fails in many ways, and all of them mean: read the tables again
        log.warning("cache %s is damaged (%s) and is made again", path, type(error).__name__)
        with contextlib.suppress(OSError):
            path.unlink()
    return None
