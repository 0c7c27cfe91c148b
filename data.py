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

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_convert
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import coalesce, to_undirected

log = logging.getLogger(__name__)
SPLITS = ("train", "val", "test")


class DataError(ValueError):
    """The input data is wrong; the message is one sentence for the user."""


@dataclass(frozen=True)
class DataConfig:
    source: Literal["synthetic", "tsv"] = "synthetic"
    preset: Literal["small", "yeast"] = "small"
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
        if self.source == "tsv" and not (self.edges and self.perturbations):
            raise ValueError("data.source=tsv needs two files: set data.edges and data.perturbations")
        if min(self.val_fraction, self.test_fraction) <= 0 or self.val_fraction + self.test_fraction >= 1:
            raise ValueError("data.val_fraction and data.test_fraction must be over 0 and leave rows for training")


@dataclass(frozen=True)
class Preset:
    """The size of a synthetic problem; `deletions` are the least and the most knock-outs of a sample."""

    num_nodes: int
    num_edges: dict[str, int]
    num_modules: int
    num_samples: int
    deletions: tuple[int, int]


PRESETS = {
    "small": Preset(
        num_nodes=400, num_modules=16, num_samples=6000, deletions=(1, 3),
        num_edges={"physical": 2400, "regulatory": 800, "coexpression": 4800},
    ),
    "yeast": Preset(
        num_nodes=6607, num_modules=120, num_samples=20_000, deletions=(3, 3),
        num_edges={
            "regulatory": 9_753, "physical": 139_463, "tflink": 201_898, "neighborhood": 147_874, "fusion": 11_810,
            "cooccurence": 11_115, "coexpression": 1_002_538, "experimental": 825_101, "database": 73_818,
        },
    ),
}  # fmt: skip


@dataclass
class Tables:
    """A graph and the samples on it."""

    genes: list[str]  # name of each node
    relations: list[str]  # name of each relation
    edge_indices: list[Tensor]  # [2, E_r] of each relation
    perturbed: Tensor  # [total], the nodes that each sample knocks out, one sample after another
    perturbed_ptr: Tensor  # [n + 1]; those of sample i are `perturbed[perturbed_ptr[i] : perturbed_ptr[i + 1]]`
    y: Tensor  # float64 [n]
    split: Tensor | None = None  # int8 [n], a position in `SPLITS`
    signal: Tensor | None = None  # float64 [n], y without its noise, where that is known

    def graph(self) -> HeteroData:
        """Returns the graph with node type `gene` and an edge type for each relation."""
        graph = HeteroData()
        graph["gene"].num_nodes = len(self.genes)
        for relation, edge_index in zip(self.relations, self.edge_indices, strict=True):
            graph["gene", relation, "gene"].edge_index = edge_index
        return graph

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split in ascending order."""
        return (self.split == SPLITS.index(split)).nonzero().flatten()

    def fingerprint(self) -> str:
        """Hashes all fields, also those that you add; ranks with the same data have the same hash."""

        def described(tensor: Tensor) -> list:
            content = torch.as_tensor(tensor).contiguous().flatten().view(torch.uint8).numpy()
            return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]

        return hashlib.sha256(json.dumps(vars(self), default=described).encode()).hexdigest()

    def noise_ceiling(self) -> float | None:
        """Returns Pearson's r of y and its noise-free part on the test rows, which no model can be expected to pass."""
        if self.signal is None:
            return None
        rows = self.rows("test")
        return torch.corrcoef(torch.stack([self.y[rows], self.signal[rows]]))[0, 1].item()

    def summary(self) -> str:
        """Counts genes, edges and samples in a line for the log."""
        touched = torch.cat(self.edge_indices, dim=1).unique().numel()
        counts = self.perturbed_ptr.diff()
        return (
            f"{len(self.genes):,} genes ({len(self.genes) - touched:,} isolated), "
            f"{sum(e.size(1) for e in self.edge_indices):,} edges in {len(self.relations)} relations, "
            f"{len(self.y):,} samples of {counts.min()} to {counts.max()} deletions: "
            + ", ".join(f"{len(self.rows(split)):,} {split}" for split in SPLITS)
        )


def load(config: DataConfig) -> Tables:
    """Returns the tables that `config` names, from the cache where they have been read before, with their split.

    Raises:
        DataError: a file is missing, malformed or empty, or a split has no rows.
    """
    tsv = config.source == "tsv"
    # This file is part of the key, so an edited parser or generator never meets its old results.
    key = hashlib.sha256(Path(__file__).read_bytes() + f"{config.preset} {config.undirected}".encode())
    for option in ("edges", "perturbations") if tsv else ():
        path = Path(getattr(config, option))
        try:
            key.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise DataError(f"data.{option}: cannot read {path}: {error.strerror}") from None
    build = partial(read_tables, config) if tsv else partial(synthetic_tables, PRESETS[config.preset], seed=0)
    tables = _cached(Path(config.cache_dir, f"tables-{key.hexdigest()[:32]}.pt"), build)
    if tables.split is None:
        tables.split = random_split(tables, config)
    if empty := [split for split in SPLITS if len(tables.rows(split)) == 0]:
        raise DataError(
            f"{config.perturbations if tsv else 'the synthetic table'}: no rows in the {empty[0]} split of "
            f"{len(tables.y)} rows in all, where rows with the same knock-outs stay together: set data.val_fraction "
            "and data.test_fraction, or give more rows"
        )
    return tables


def read_tables(config: DataConfig) -> Tables:
    """Reads both files; genes are numbered in alphabetical order, and an edge that stands twice counts once."""
    edges = read_edges(config.edges)
    knockouts, scores, splits = read_knockouts(config.perturbations)
    genes = sorted({gene for pair in edges.values() for side in pair for gene in side}.union(*knockouts))
    number = {gene: i for i, gene in enumerate(genes)}
    merge = to_undirected if config.undirected else coalesce
    edge_indices = [merge(torch.tensor([[number[gene] for gene in side] for side in pair])) for pair in edges.values()]
    perturbed, perturbed_ptr = pack([[number[gene] for gene in names] for names in knockouts])
    y = torch.tensor(scores, dtype=torch.float64)
    split = torch.tensor([SPLITS.index(name) for name in splits], dtype=torch.int8) if splits else None
    return Tables(genes, list(edges), edge_indices, perturbed, perturbed_ptr, y, split)


def read_edges(path: str) -> dict[str, tuple[list[str], list[str]]]:
    """Returns {relation: (sources, targets)}, the relations in the order of their first line."""
    edges: dict[str, tuple[list[str], list[str]]] = {}
    for line, cells in _table(path, ("source", "target", "relation"), required=3):
        source, target, relation = (cell.strip() for cell in cells)
        if not (source and target and relation):
            raise DataError(f"{path}:{line}: an empty source, target or relation")
        sources, targets = edges.setdefault(relation, ([], []))
        sources.append(source)
        targets.append(target)
    if not edges:
        raise DataError(f"{path}: no edges below the header")
    return edges


def read_knockouts(path: str, scored: bool = True) -> tuple[list[list[str]], list[float], list[str]]:
    """Returns genes, score and split of each row; without `scored` the table needs its `genes` column only."""
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
    """Turns n node sets into `perturbed` [total] and `perturbed_ptr` [n + 1]; a node named twice counts once."""
    sets = [sorted(set(nodes)) for nodes in sets]
    pointer = torch.tensor([0] + [len(nodes) for nodes in sets]).cumsum(0)
    return torch.tensor([node for nodes in sets for node in nodes], dtype=torch.long), pointer


def random_split(tables: Tables, config: DataConfig) -> Tensor:
    """Draws the split of each row, int8 [n], from `split_seed` alone; rows with the same knock-outs stay together."""
    groups: dict[tuple[int, ...], int] = {}
    bounds, nodes = tables.perturbed_ptr.tolist(), tables.perturbed.tolist()
    group = [groups.setdefault(tuple(nodes[a:b]), len(groups)) for a, b in pairwise(bounds)]
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(config.split_seed))
    num_test, num_val = (round(len(groups) * f) for f in (config.test_fraction, config.val_fraction))
    split_of_group = torch.zeros(len(groups), dtype=torch.int8)
    split_of_group[order[:num_test]] = SPLITS.index("test")
    split_of_group[order[num_test : num_test + num_val]] = SPLITS.index("val")
    return split_of_group[torch.tensor(group)]


# ---- Batches --------------------------------------------------------------------------------------------------------
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
        self.y, self.degree = y.float(), degree

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Data:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Data:
        """Builds the batch of these rows; raises `IndexError` for a knocked-out node outside [0, N)."""
        index = torch.as_tensor(rows, dtype=torch.long)
        real, row = index >= 0, index.clamp(min=0)
        start = self.perturbed_ptr[row]
        count = (self.perturbed_ptr[row + 1] - start) * real
        ptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
        sample = torch.repeat_interleave(torch.arange(len(index)), count)
        perturbed = self.perturbed[torch.arange(len(sample)) + (start - ptr[:-1])[sample]]
        outside = (perturbed < 0) | (perturbed >= len(self.degree))
        if outside.any():
            first = outside.nonzero()[0]
            what = f"sample {index[sample[first]].item()}: knocked-out node {perturbed[first].item()}"
            raise IndexError(f"{what} is outside [0, {len(self.degree)}), the graph's nodes")
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
        self.rows, self.batch_size, self.accumulate = rows, batch_size, accumulate
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.first_step = 0

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Sets the epoch to deal next; `first_step` skips the steps of a resumed epoch that are done."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def samples_in_step(self, step: int) -> int:
        """Counts the rows that an epoch's step takes, over all ranks and micro-batches, without padding."""
        return min(self.batch_size, len(self.rows) - step * self.batch_size)

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self._order().split(self.batch_size)[self.first_step :]:
            share = math.ceil(len(rows) / (self.num_replicas * self.accumulate))
            padded = rows.new_full((self.accumulate * share * self.num_replicas,), -1)
            padded[: len(rows)] = rows
            yield from padded.view(self.accumulate, share, self.num_replicas)[:, :, self.rank].tolist()

    def _order(self) -> Tensor:
        """Returns the epoch's permutation of the rows; step s takes the s-th `batch_size` of them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return self.rows[torch.randperm(len(self.rows), generator=generator)]


def make_loader(dataset: Dataset, batches: StepSampler | list[list[int]], workers: int, pin: bool) -> DataLoader:
    """Returns a loader of the batches whose rows `batches` lists; the dataset builds them, so nothing is collated."""
    settings = {"num_workers": workers, "persistent_workers": workers > 0, "worker_init_fn": _ignore_sigterm}
    return DataLoader(dataset, batch_sampler=batches, collate_fn=default_convert, pin_memory=pin, **settings)


def _ignore_sigterm(worker_id: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the workers, too; their rank ends them


def shard(rows: Tensor, batch_size: int, world_size: int, rank: int) -> list[list[int]]:
    """Lists this rank's batches of row numbers for evaluation: every row is on exactly one rank, nothing is padded."""
    return [part.tolist() for part in rows[rank::world_size].split(batch_size)] if rank < len(rows) else []


# ---- Baseline and synthetic tables ----------------------------------------------------------------------------------
def additive_baseline(tables: Tables, ridge: float = 1.0, iterations: int = 200) -> Tensor:
    """Predicts every row, float64 [n], as the sum of one effect per knocked-out node, plus a constant.

    It is a ridge regression on the training rows, solved by conjugate gradients on the normal equations: what the set
    of knocked-out nodes says without any graph.
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
    """Draws a graph with hubs and modules, and scores that follow from it.

    Nodes belong to modules; most edges stay within one, and both ends are drawn by a power-law weight. A score is the
    sum of the nodes' own effects, of an effect for every pair in one module, of the paths of one or two `physical`
    edges between each pair, and of noise. Partners of a knock-out come from its module, its neighbours, or anywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = partial(torch.rand, dtype=torch.float64, generator=generator)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    n, num_samples = preset.num_nodes, preset.num_samples

    # Nodes in module order; `total` runs through their weights, so a range of it is a module and a point is a node.
    module = torch.randint(preset.num_modules, (n,), generator=generator).sort().values
    weight = torch.arange(1, n + 1, dtype=torch.float64)[torch.randperm(n, generator=generator)].pow(-0.5)
    total = weight.cumsum(0)
    total_before = torch.cat([total.new_zeros(1), total])
    low = total_before[torch.searchsorted(module, module)]  # [n], where each node's module begins
    high = total_before[torch.searchsorted(module, module, right=True)]  # [n], where it ends

    def draw(count: int) -> Tensor:
        return torch.searchsorted(total, uniform(count) * total[-1]).clamp(max=n - 1)

    def draw_from_module(of: Tensor) -> Tensor:
        return torch.searchsorted(total, low[of] + uniform(len(of)) * (high - low)[of]).clamp(max=n - 1)

    def draw_edges(count: int) -> Tensor:
        """Draws [2, count] distinct edges without self-loops."""
        pairs = torch.empty(0, dtype=torch.long)
        while len(pairs) < count:
            source = draw(2 * (count - len(pairs)) + 64)
            target = torch.where(uniform(len(source)) < 0.8, draw_from_module(source), draw(len(source)))
            pairs = torch.cat([pairs, (source * n + target)[source != target]]).unique()
        pairs = pairs[torch.randperm(len(pairs), generator=generator)[:count]]
        return torch.stack([pairs // n, pairs % n])

    edge_indices = {relation: draw_edges(count) for relation, count in preset.num_edges.items()}

    # Knock-outs: a first node, then partners from its module, among its physical neighbours, or anywhere.
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

    # Scores, of 2000 samples at once: `dead` [N, samples] marks what each of them knocks out.
    additive, in_module, paths = torch.zeros(3, num_samples, dtype=torch.float64)
    own_effect, module_effect = normal(n), normal(preset.num_modules)
    norm = degree.double().clamp(min=1).rsqrt()
    value = norm[source] * norm[target]
    adjacency = torch.sparse_coo_tensor(physical, value, (n, n), check_invariants=False)
    own_paths = torch.zeros_like(norm).index_add(0, source, value.square())  # there and back again
    sample = torch.repeat_interleave(torch.arange(num_samples), perturbed_ptr.diff())
    for chunk in torch.arange(num_samples).split(2000):
        part = slice(perturbed_ptr[chunk[0]], perturbed_ptr[chunk[-1] + 1])
        dead = torch.zeros(n, len(chunk), dtype=torch.float64)
        dead[perturbed[part], sample[part] - chunk[0]] = 1
        reached = torch.sparse.mm(adjacency, dead)  # paths of one edge from the dead nodes
        by_module = dead.new_zeros(preset.num_modules, len(chunk)).index_add(0, module, dead)
        additive[chunk] = own_effect @ dead
        in_module[chunk] = module_effect @ (by_module * (by_module - 1) / 2)
        paths[chunk] = (((dead + reached) * reached).sum(0) - own_paths @ dead) / 2
    signal = sum(share * part / part.std() for share, part in ((0.55, additive), (0.55, in_module), (0.45, paths)))
    y = signal + 0.4 * signal.std() * normal(num_samples)
    genes = [f"G{i:05d}" for i in range(n)]
    return Tables(genes, list(edge_indices), list(edge_indices.values()), perturbed, perturbed_ptr, y, signal=signal)


# ---- Helpers --------------------------------------------------------------------------------------------------------
def _table(path: str, columns: tuple[str, ...], required: int) -> Iterator[tuple[int, list[str | None]]]:
    """Yields number and cells of each line below the header; columns beyond the first `required` may be missing."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            header = next(file, "").rstrip("\r\n").split("\t")
            if tuple(header) != columns[: max(len(header), required)]:
                found, wanted = "\t".join(header)[:80], "\t".join(columns[:required])
                raise DataError(f"{path}:1: the header is {found!r}, not {wanted!r}")
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
    """Returns what `build` gives, kept in a file: of several processes one builds, and the others wait for its file."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where the folder cannot be written, which is reported below
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            try:
                return Tables(**torch.load(path, weights_only=True))
            except Exception as error:  # a damaged file fails in many ways, and all of them mean: build
                log.warning("cache %s is damaged (%s) and is made again", path, type(error).__name__)
        tables = build()
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # renamed when it is whole
                torch.save(vars(tables), Path(folder, path.name))
                os.replace(Path(folder, path.name), path)
        except (OSError, RuntimeError) as error:  # torch.save says RuntimeError when the disk is full
            log.warning("the tables are not cached: %s", error)
    return tables
