"""What two nodes of a graph have in common: features of pairs, which states of nodes cannot tell.

Message passing gives each node a state of its own, and so cannot count the neighbours that two
nodes share (Zhang et al. 2021, arXiv:2010.16103). `PairIndex` counts them, by each relation and by
all together; docs/adapting.md has the formulas.

Shapes: N nodes, R relations (the last may be all together), M entries, Q pairs, B samples, P
perturbed nodes in the batch, F features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.utils import scatter

from data_cache import cached, source_digest
from mask import SharedGraph, num_samples
from run_progress import progress_bar

# The features of a pair by each relation; the last four are of relations whose edges have
# directions.
FEATURES = ("edge", "common neighbours", "cosine", "Adamic-Adar")
DIRECTED = ("edges both ways", "common targets", "common sources", "paths of two")
MOST_RELATIONS = 64  # of more, only all together have features
AT_ONCE = 2**20  # pairs and looked up neighbours, which take some 100 MB
ROWS_AT_ONCE = 1024
MOST_BYTES = 2**31  # of the features of all rows, which are otherwise computed with each batch


class PairIndex(nn.Module):
    """The neighbours of each node by each relation, in which shared ones are looked up.

    An *entry* is a node, a relation and a neighbour, to which an edge leads or from which one
    comes. A node with a self-loop is its own neighbour; weights of duplicate edges add up. Entries
    are sorted, those of a node lie together, and each is found by its key.

    Args:
        edge_index, relation, weight: of all edges, long [2, E], long [E] and positive [E].
        relations: name of each relation.
        num_nodes: N.
    """

    def __init__(
        self,
        edge_index: Tensor,
        relation: Tensor,
        weight: Tensor,
        relations: Sequence[str],
        num_nodes: int,
    ):
        super().__init__()
        self.num_nodes = num_nodes
        self.relations = list(relations)
        if len(relations) > MOST_RELATIONS:
            self.relations = ["all"]
            relation = torch.zeros_like(relation)
        elif len(relations) > 1:
            self.relations.append("all")
            together = torch.full_like(relation, len(relations))
            edge_index = edge_index.repeat(1, 2)
            relation = torch.cat([relation, together])
            weight = weight.repeat(2)

        source, target = edge_index
        key_of_source = self._key(source, relation, target)
        key_of_target = self._key(target, relation, source)
        key, entry = torch.cat([key_of_source, key_of_target]).unique(return_inverse=True)
        entry_of_source, entry_of_target = entry.chunk(2)
        weight = weight.double()
        to_neighbour = scatter(weight, entry_of_source, dim_size=len(key))
        from_neighbour = scatter(weight, entry_of_target, dim_size=len(key))
        self._buffer("key", key)
        self._buffer("ptr", index2ptr(self._row(key) // len(self.relations), num_nodes))
        self._buffer("sends", to_neighbour > 0)
        self._buffer("receives", from_neighbour > 0)
        self._buffer("weight", torch.maximum(to_neighbour, from_neighbour))

        # Of each node by each relation, [N * R]: its neighbours, and their weights' length.
        num_rows = num_nodes * len(self.relations)
        row = self._row(key)
        self._buffer("degree", row.bincount(minlength=num_rows))
        square = scatter(self.weight.square(), row, dim_size=num_rows)
        self._buffer("length", square.sqrt())

        has_directions = (self.sends != self.receives).int()
        of_relation = row % len(self.relations)
        is_directed = scatter(has_directions, of_relation, dim_size=len(self.relations)) > 0
        self.names = []
        columns = []
        for number, name in enumerate(self.relations):
            features = FEATURES + DIRECTED if is_directed[number] else FEATURES
            self.names += [f"{feature} by {name}" for feature in features]
            first = number * len(FEATURES + DIRECTED)
            columns += range(first, first + len(features))
        self._buffer("columns", torch.tensor(columns, device=key.device))

    def _buffer(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def _key(self, node: Tensor, relation: Tensor, neighbour: Tensor) -> Tensor:
        """Returns the keys of entries, by which they are sorted."""
        return (node * len(self.relations) + relation) * self.num_nodes + neighbour

    def _row(self, key: Tensor) -> Tensor:
        """Returns node * R + relation of entries with these keys."""
        return key // self.num_nodes

    def of_samples(self, batch: Data) -> Tensor:
        """Returns the sum over the pairs of each sample of their features, float32 [B, F].

        A pair counts by the product of its nodes' 1 - level. A sample of one node has none, and so
        only zeros.
        """
        first, second = pairs_of_samples(batch)
        size = (num_samples(batch), len(self.names))
        total = torch.zeros(size, dtype=torch.float64, device=self.key.device)
        change = (1 - batch.level).double()
        perturbed = batch.perturbed
        num_lookups = self.num_lookups(perturbed[first], perturbed[second])
        piece = (num_lookups + 1).cumsum(0) // AT_ONCE
        sizes = piece.bincount().tolist()
        for one, other in zip(first.split(sizes), second.split(sizes), strict=True):
            features = self.of_pairs(perturbed[one], perturbed[other])
            factor = (change[one] * change[other]).unsqueeze(1)
            total.index_add_(0, batch.perturbed_batch[one], factor * features)
        return total.float()

    def num_lookups(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns how many entries are looked up for each pair, those of the node with fewer."""
        num_entries = self.ptr.diff()
        return torch.minimum(num_entries[first], num_entries[second])

    def of_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns the features of pairs of nodes, long [Q] each, float64 [Q, F]."""
        num_relations = len(self.relations)
        num_entries = self.ptr.diff()
        is_less = num_entries[first] <= num_entries[second]
        fewer = first.where(is_less, second)
        more = second.where(is_less, first)

        # Each entry of the node with fewer ones, and the same of the other.
        num_lookups = num_entries[fewer]
        pair = torch.repeat_interleave(num_lookups)
        offset = self.ptr[fewer] - (num_lookups.cumsum(0) - num_lookups)
        entry = torch.arange(len(pair), device=pair.device) + offset[pair]
        key = self.key[entry] + (more - fewer)[pair] * (num_relations * self.num_nodes)
        place = torch.searchsorted(self.key, key).clamp(max=len(self.key) - 1)
        is_shared = self.key[place] == key
        shared = entry[is_shared]
        other = place[is_shared]
        is_edge = self.key[entry] % self.num_nodes == more[pair]
        edge = entry[is_edge]

        row = self._row(self.key[shared])
        neighbour = self.key[shared] % self.num_nodes
        relation = row % num_relations
        degree = self.degree[neighbour * num_relations + relation].double()
        sends = self.sends[shared]
        receives = self.receives[shared]
        other_sends = self.sends[other]
        other_receives = self.receives[other]
        of_shared = [
            torch.ones_like(degree),
            self.weight[shared].double() * self.weight[other],
            1 / degree.clamp(min=2).log(),
            sends & other_sends,
            receives & other_receives,
            (sends & other_receives).int() + (receives & other_sends).int(),
        ]
        of_edges = [self.weight[edge], self.sends[edge] & self.receives[edge]]

        num_rows = len(first) * num_relations
        row_of_shared = pair[is_shared] * num_relations + relation
        of_shared = torch.stack([values.double() for values in of_shared], dim=1)
        sums = scatter(of_shared, row_of_shared, dim_size=num_rows)
        count, product, adamic_adar, targets, sources, paths = sums.unbind(1)
        row_of_edge = pair[is_edge] * num_relations + self._row(self.key[edge]) % num_relations
        of_edges = torch.stack([values.double() for values in of_edges], dim=1)
        edge_weight, both_ways = scatter(of_edges, row_of_edge, dim_size=num_rows).unbind(1)

        length = self.length.double().view(self.num_nodes, num_relations)
        lengths = (length[first] * length[second]).flatten()
        cosine = product / lengths.where(lengths > 0, 1.0)
        undirected = [edge_weight, count.log1p(), cosine, adamic_adar]
        directed = [both_ways, targets.log1p(), sources.log1p(), paths.log1p()]
        features = torch.stack([*undirected, *directed], dim=1)
        return features.view(len(first), -1).index_select(1, self.columns)


def pairs_of_samples(batch: Data) -> tuple[Tensor, Tensor]:
    """Returns the positions of both nodes of all pairs in the samples of a batch, long [Q] each."""
    position = torch.arange(len(batch.perturbed), device=batch.perturbed.device)
    num_later = batch.perturbed_ptr[1:][batch.perturbed_batch] - 1 - position
    first = torch.repeat_interleave(num_later)
    number = torch.arange(len(first), device=first.device)
    second = number - (num_later.cumsum(0) - num_later)[first] + first + 1
    return first, second


def pair_index(graph: SharedGraph) -> PairIndex:
    """Returns the `PairIndex` of a graph, which keeps it, on the graph's device."""
    if graph.pairs is None:
        relation = torch.repeat_interleave(graph.edge_counts)
        names = [name for _, name, _ in graph.relations]
        graph.pairs = PairIndex(
            graph.edge_index, relation, graph.raw_weight, names, graph.num_nodes
        )
    return graph.pairs


def features_of_rows(
    graph: SharedGraph, dataset: Dataset, cache_dir: str, fingerprint: str
) -> Tensor | None:
    """Returns the features of all rows of a dataset, float32 [n, F], cached by a fingerprint.

    It is None if they take more than `MOST_BYTES`.
    """
    index = pair_index(graph)
    if 4 * len(dataset) * len(index.names) > MOST_BYTES:
        return None

    def compute() -> dict[str, Tensor]:
        batches = torch.arange(len(dataset)).split(ROWS_AT_ONCE)
        features = []
        for rows in progress_bar(batches, f"pair features, {ROWS_AT_ONCE:,} rows at once"):
            batch = dataset.__getitems__(rows).to(graph.device)
            features.append(index.of_samples(batch).cpu())
        return {"features": torch.cat(features)}

    key = f"{source_digest(PairIndex)} {fingerprint}"
    return cached(cache_dir, "pairs", key, compute)["features"]


class PairFeatures(nn.Module):
    """What the perturbed nodes of a sample have in common in the graph, in standard units.

    Each feature is divided by its root mean square over the training rows that have pairs, which
    the checkpoint keeps: without a pair, all are 0.

    Args:
        of_training: features of training rows, [rows, F].
    """

    LARGEST = 10.0  # as a few pairs of hubs have very much in common

    def __init__(self, of_training: Tensor):
        super().__init__()
        has_pairs = (of_training != 0).any(dim=1)
        square = of_training.double().square().sum(dim=0) / has_pairs.sum().clamp(min=1)
        scale = square.sqrt().float()
        self.register_buffer("scale", scale.where(scale > 0, 1.0))

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns the features of a batch, [B, F], which it may bring as `pair_features`."""
        if "pair_features" in batch:
            features = batch.pair_features
        else:
            features = pair_index(graph).of_samples(batch)
        scaled = features.to(self.scale.dtype) / self.scale
        return scaled.clamp(-self.LARGEST, self.LARGEST)
