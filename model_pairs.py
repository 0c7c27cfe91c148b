"""Features of pairs of nodes, such as common neighbours, which the states of nodes do not contain.

Message passing computes a state for each node separately. Therefore, it cannot count the neighbours
that two nodes share (Zhang et al. 2021, arXiv:2010.16103). `PairIndex` counts them, for each
relation, and for the union of all relations. `PairTerm` is the term of the model that reads these
features. docs/adapting.md has the formulas of the features.

Shapes: N nodes, E edges, R relations (the last can be the union of all), M entries of the index, Q
pairs, B samples, P perturbed nodes in the batch, F features, H hidden channels, T targets of C
columns each.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.utils import scatter

from data import KnockoutDataset
from data_tables import cached_by_code
from mask import SharedGraph, num_samples, sum_by_sample
from model import WildType
from run_progress import progress_bar

log = logging.getLogger("model_pairs")

# Names of the features of a pair for each relation. The features `DIRECTED` are only computed for
# relations that contain an edge without an edge in the opposite direction.
FEATURES = ("edge", "common neighbours", "cosine", "Adamic-Adar")
DIRECTED = ("edges both ways", "common targets", "common sources", "paths of two")
MOST_RELATIONS = 64  # with more relations, features are only computed for the union of all
TOGETHER = "all relations"  # name of the union
# Number of pairs and of their neighbours that are looked up at once. They need about 100 MB.
AT_ONCE = 2**20
ROWS_AT_ONCE = 1024  # number of rows whose features are computed at once
MOST_ROWS = 100_000  # largest number of training rows from which units of features are computed
# Largest size of the features of all rows in bytes. Larger features are computed with each batch.
MOST_BYTES = 2**31
# Smallest relative deviation of a feature that varies. It is larger than rounding errors.
LEAST_DEVIATION = 1e-6


class PairIndex(nn.Module):
    """A sorted list of the neighbours of each node in each relation, and the features of pairs.

    An *entry* of the list is a node, a relation and a neighbour of the node: at least one edge of
    the relation leads from the node to the neighbour, or from the neighbour to the node. A node
    with a self-loop is its own neighbour. The weights of duplicate edges are added. The list is
    sorted by the key (node * R + relation) * N + neighbour. The entries of a node are therefore
    adjacent, and a binary search finds the entry of a given neighbour. The edges have the weights
    of the table of edges. The index is on the device of the graph.
    """

    def __init__(self, graph: SharedGraph):
        super().__init__()
        self.num_nodes = graph.num_nodes
        self.relations = [name for _, name, _ in graph.relations]
        edge_index = graph.edge_index
        relation = torch.repeat_interleave(graph.edge_counts)
        weight = graph.edge_weight_as_given.double()
        num_relations = len(self.relations)
        if num_relations > MOST_RELATIONS:
            log.info(
                "note      pair features are computed only for the union of all relations, because "
                f"there are {num_relations:,} relations"
            )
            self.relations = [TOGETHER]
            relation = torch.zeros_like(relation)
        elif num_relations > 1:
            self.relations.append(TOGETHER)
            all_together = torch.full_like(relation, num_relations)
            edge_index = edge_index.repeat(1, 2)
            relation = torch.cat([relation, all_together])
            weight = weight.repeat(2)
        self._add_entries(edge_index, relation, weight)
        self._name_features()

    def _add_entries(self, edge_index: Tensor, relation: Tensor, weight: Tensor) -> None:
        """Stores the entries of the index: key, neighbour, relation, directions and weight, [M]."""
        source, target = edge_index
        row_of_source = source * len(self.relations) + relation
        row_of_target = target * len(self.relations) + relation
        key_of_source = row_of_source * self.num_nodes + target
        key_of_target = row_of_target * self.num_nodes + source
        key, entry = torch.cat([key_of_source, key_of_target]).unique(return_inverse=True)
        entry_of_source, entry_of_target = entry.chunk(2)
        sent = scatter(weight, entry_of_source, dim_size=len(key))
        received = scatter(weight, entry_of_target, dim_size=len(key))
        row = key // self.num_nodes
        self._buffer("key", key)
        self._buffer("neighbour", key % self.num_nodes)
        self._buffer("relation", row % len(self.relations))
        self._buffer("ptr", index2ptr(row // len(self.relations), self.num_nodes))
        self._buffer("is_sent", sent > 0)  # whether an edge leads to the neighbour
        self._buffer("is_received", received > 0)  # whether an edge comes from the neighbour
        self._buffer("weight", torch.maximum(sent, received))
        # For each node and relation, [N, R]: the number of neighbours, and the Euclidean norm of
        # their weights.
        size = self.num_nodes * len(self.relations)
        degree = row.bincount(minlength=size)
        length = scatter(self.weight.square(), row, dim_size=size).sqrt()
        self._buffer("degree", degree.view(self.num_nodes, -1))
        self._buffer("length", length.view(self.num_nodes, -1))

    def _name_features(self) -> None:
        """Stores the names of the F features, and their columns among the features of all kinds."""
        is_one_way = (self.is_sent != self.is_received).int()
        num_one_way = scatter(is_one_way, self.relation, dim_size=len(self.relations)).tolist()
        self.names = []
        columns = []
        for number, name in enumerate(self.relations):
            features = FEATURES + DIRECTED if num_one_way[number] else FEATURES
            self.names += [f"{feature} by {name}" for feature in features]
            first = number * len(FEATURES + DIRECTED)
            columns += range(first, first + len(features))
        self._buffer("columns", torch.tensor(columns, device=self.key.device))

    def _buffer(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def of_samples(self, batch: Data, dtype: torch.dtype = torch.double) -> Tensor:
        """Returns the weighted sum of the features over all pairs of nodes in each sample, [B, F].

        The weight of a pair is the product of 1 - level of its two nodes. A sample with fewer than
        two nodes does not have pairs, so its sums are 0. The sums are computed in double precision,
        and then converted to `dtype`.
        """
        sample, pair, factor = pairs_of_samples(batch)
        total = torch.zeros(num_samples(batch), len(self.names), dtype=torch.double)
        total = total.to(pair.device)
        start = 0
        for piece in self.in_pieces(pair):
            some = slice(start, start + piece.size(1))
            features = factor[some].unsqueeze(1) * self.of_pairs(*piece)
            total.index_add_(0, sample[some], features)
            start += piece.size(1)
        return total.to(dtype)

    def in_pieces(self, pair: Tensor) -> tuple[Tensor, ...]:
        """Splits pairs of nodes, long [2, Q], into pieces, long [2, Q_i].

        The features of a piece are computed at once. Its pairs have at most about `AT_ONCE` entries
        to look up.
        """
        num_entries = self.ptr.diff()[pair]
        piece = (num_entries.amin(dim=0) + 1).cumsum(0) // AT_ONCE
        return pair.split(piece.bincount().tolist(), dim=1)

    def of_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns the features of pairs of nodes, float64 [Q, F].

        For each pair, the entries of the node with fewer entries are looked up among the entries of
        the other node. The cost of a pair therefore depends on the node with fewer neighbours.

        Args:
            first, second: the two nodes of each pair, long [Q] each. Their order does not matter.
        """
        num_relations = len(self.relations)
        num_entries = self.ptr.diff()
        has_fewer = num_entries[first] <= num_entries[second]
        fewer = first.where(has_fewer, second)
        more = second.where(has_fewer, first)

        # `entry` has all entries of the nodes with fewer entries. `place` has the position of the
        # other node's entry for the same relation and neighbour, if it exists (`is_shared`).
        size = num_entries[fewer]
        pair = torch.repeat_interleave(size)
        first_entry = self.ptr[fewer] - size.cumsum(0) + size
        entry = torch.arange(len(pair), device=pair.device) + first_entry[pair]
        keys_between = (more - fewer) * num_relations * self.num_nodes
        key = self.key[entry] + keys_between[pair]
        place = torch.searchsorted(self.key, key).clamp(max=len(self.key) - 1)
        is_shared = self.key[place] == key
        is_edge = self.neighbour[entry] == more[pair]

        row = pair * num_relations + self.relation[entry]
        num_rows = len(first) * num_relations
        shared = self.of_shared(entry[is_shared], place[is_shared])
        shared = scatter(shared, row[is_shared], dim_size=num_rows)
        count, product, adamic_adar, targets, sources, paths = shared.unbind(1)
        edges = self.of_edges(entry[is_edge])
        weight, both_ways = scatter(edges, row[is_edge], dim_size=num_rows).unbind(1)
        lengths = (self.length[first] * self.length[second]).double().flatten()
        cosine = product / lengths.where(lengths > 0, 1.0)
        undirected = [weight, count.log1p(), cosine, adamic_adar]
        directed = [both_ways, targets.log1p(), sources.log1p(), paths.log1p()]
        features = torch.stack([*undirected, *directed], dim=1)
        width = num_relations * len(FEATURES + DIRECTED)
        return features.view(len(first), width).index_select(1, self.columns)

    def of_shared(self, entry: Tensor, other: Tensor) -> Tensor:
        """Returns the summands of shared neighbours, float64 [shared, 6].

        The sums of the columns over the shared neighbours of a pair are:

        1. the number of shared neighbours
        2. the sum of the products of the weights
        3. the sum of 1 / log(degree of the neighbour) (Adamic and Adar 2003)
        4. the number of neighbours that are targets of both nodes
        5. the number of neighbours that are sources of both nodes
        6. the number of paths of two edges from one node to the other

        Args:
            entry, other: the entries of both nodes for each shared neighbour, long [shared] each.
        """
        degree = self.degree[self.neighbour[entry], self.relation[entry]].double()
        is_sent = self.is_sent[entry]
        is_received = self.is_received[entry]
        columns = [
            torch.ones_like(degree),
            self.weight[entry].double() * self.weight[other],
            1 / degree.log(),
            (is_sent & self.is_sent[other]).double(),
            (is_received & self.is_received[other]).double(),
            (is_sent & self.is_received[other]).double(),
        ]
        columns[-1] += is_received & self.is_sent[other]
        return torch.stack(columns, dim=1)

    def of_edges(self, entry: Tensor) -> Tensor:
        """Returns the summands of entries that connect the two nodes of a pair, float64 [edges, 2].

        They are the weight of the entry, and 1 if there are edges in both directions, otherwise 0.
        """
        is_both_ways = self.is_sent[entry] & self.is_received[entry]
        return torch.stack([self.weight[entry].double(), is_both_ways.double()], dim=1)


def pairs_of_samples(batch: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all pairs of nodes in the samples of a batch, sorted by sample.

    Returns:
        The sample of each pair, long [Q]; its two nodes, long [2, Q]; and its weight, which is the
        product of 1 - level of its two nodes, float64 [Q].
    """
    position = torch.arange(len(batch.perturbed), device=batch.perturbed.device)
    num_later = batch.perturbed_ptr[1:][batch.perturbed_batch] - 1 - position
    # Padding can follow the last sample, but does not have pairs.
    num_later = num_later.clamp(min=0)
    first = torch.repeat_interleave(num_later)
    number = torch.arange(len(first), device=first.device)
    second = number - (num_later.cumsum(0) - num_later)[first] + first + 1
    pair = torch.stack([batch.perturbed[first], batch.perturbed[second]])
    change = (1 - batch.level).double()
    return batch.perturbed_batch[first], pair, change[first] * change[second]


def pair_index(graph: SharedGraph) -> PairIndex:
    """Returns the `PairIndex` of a graph, on its device.

    The first call builds the index, and stores it in the graph.
    """
    if not hasattr(graph, "pairs"):
        graph.pairs = PairIndex(graph)
    return graph.pairs


def pair_names(graph: SharedGraph) -> list[str]:
    """Returns the names of the F features of pairs in a graph."""
    return pair_index(graph).names


def add_pair_features(
    dataset: KnockoutDataset, graph: SharedGraph, cache_dir: str, fingerprint: str
) -> None:
    """Adds a column `pair_features` to a dataset: the pair features of each row.

    A batch then has a field `pair_features` [B, F], the result of `PairIndex.of_samples` in the
    graph's dtype. The features of all rows are computed once. If they need more than `MOST_BYTES`,
    the dataset instead computes the features of each batch, on the CPU. The model could compute
    them on the GPU, but the host would have to wait.

    Args:
        dataset: the dataset, which is changed.
        graph: the graph.
        cache_dir: folder in which the features of all rows are cached.
        fingerprint: hash of the tables, by which the cache finds the features.
    """
    index = pair_index(graph)
    dtype = graph.edge_weight.dtype
    size = len(dataset) * len(index.names) * dtype.itemsize

    def compute() -> dict[str, Tensor]:
        batches = batches_of(graph, dataset, torch.arange(len(dataset)), "pair features")
        features = [index.of_samples(batch, dtype).cpu() for batch in batches]
        return {"features": torch.cat(features)}

    if size > MOST_BYTES:
        log.warning(
            "note      pair features are computed for each batch, in data.workers if there are "
            f"any, because the features of all rows would need {size / 1e9:.1f} GB"
        )
        if graph.is_on_gpu:
            index = copy.deepcopy(index).cpu()
        features = partial(index.of_samples, dtype=dtype)
    else:
        key = f"{fingerprint} {dtype}"
        features = cached_by_code(cache_dir, "pairs", PairIndex, key, compute)["features"]
    dataset.columns = {**dataset.columns, "pair_features": features}


def batches_of(
    graph: SharedGraph, dataset: KnockoutDataset, rows: Tensor, name: str
) -> Iterator[Data]:
    """Yields batches of some rows, long [rows], on the graph's device, with a progress bar.

    The batches do not have the columns of the dataset. `name` is the name of the progress bar.
    """
    alone = replace(dataset, transform=None, columns={})
    for some in progress_bar(rows.split(ROWS_AT_ONCE), f"{name}, {ROWS_AT_ONCE:,} rows at once"):
        yield alone.__getitems__(some).to(graph.device)


def num_pairs(batch: Data) -> Tensor:
    """Returns the sum of the weights of the pairs in each sample, [B].

    The weights are the same as in `PairIndex.of_samples`.
    """
    change = 1 - batch.level
    squares = sum_by_sample(change.square(), batch)
    return (sum_by_sample(change, batch).square() - squares) / 2


def units_of_pairs(graph: SharedGraph, dataset: KnockoutDataset) -> Tensor:
    """Returns the mean and the scale of each pair feature in training, float64 [2, F] on the CPU.

    They are computed from `rows_of_units`. Tables to predict do not have such rows: their units are
    0 here, and come from the checkpoint. The mean is the feature of an average pair: the least
    squares fit of features = n * mean, if n is the weighted number of pairs in a row. The scale is
    1 over the root mean square of features - n * mean. It is 0 for a feature that does not vary,
    because the weights of such a feature cannot be trained.

    The features are computed here in float64, instead of read from batches. In float32, rounding
    errors would make constant features vary.
    """
    index = pair_index(graph)
    rows = rows_of_units(dataset)
    if not len(rows):
        return torch.zeros(2, len(index.names), dtype=torch.float64)
    features = []
    number = []
    for batch in batches_of(graph, dataset, rows, "units of pair features"):
        features.append(index.of_samples(batch).cpu())
        number.append(num_pairs(batch).double().cpu())
    features = torch.cat(features)
    number = torch.cat(number)
    mean = number @ features / number.square().sum()
    deviation = root_mean_square(features - number.unsqueeze(1) * mean)
    varies = deviation > LEAST_DEVIATION * root_mean_square(features)
    scale = (1 / deviation).where(varies, 0.0)
    return torch.stack([mean, scale])


def rows_of_units(dataset: KnockoutDataset) -> Tensor:
    """Returns the training rows with at least two nodes, long [rows].

    If there are very many, it returns at most `MOST_ROWS` of them, which are evenly spaced.
    """
    rows = dataset.tables.rows("train")
    rows = rows[dataset.tables.perturbed_ptr.diff()[rows] > 1]
    return rows[:: len(rows) // MOST_ROWS + 1]


def root_mean_square(values: Tensor) -> Tensor:
    """Returns the root mean square of each column of values [rows, F], [F]."""
    return values.square().mean(dim=0).sqrt()


class PairTerm(nn.Module):
    """The term of the model that reads the pair features of each sample, [B, T * C].

    The features are centred and scaled with the `units_of_pairs` of the training rows, which are
    stored in the checkpoint. The term is the sum of two parts:

    - a linear function of the features, which is 0 at the start of training
    - the change of the output of the local readout's MLP if the features are added to its inputs

    The second part uses the MLP of the local readout, because a separate MLP for the features
    learns less (measured). The term is 0 for a sample without pairs.

    Args:
        units: result of `units_of_pairs`, [2, F].
        hidden: H.
        num_outputs: T * C.
        read: method `LocalReadout.read`, which maps the output of the MLP's first layer, [B, 2H],
            to the output of the MLP, [B, T * C].
    """

    LARGEST = 10.0  # limit of the scaled features, because a few pairs of hubs have larger values

    def __init__(self, units: Tensor, hidden: int, num_outputs: int, read: Callable):
        super().__init__()
        num_features = units.size(1)
        self.register_buffer("units", units.float())
        self.linear = nn.Linear(num_features, num_outputs, bias=False)
        self.input = nn.Linear(num_features, 2 * hidden, bias=False)
        nn.init.zeros_(self.linear.weight)
        # The same bound as torch's default for one layer with the MLP's inputs and the features.
        # With larger weights, the model fits noise first (measured).
        bound = (4 * hidden + num_features) ** -0.5
        nn.init.uniform_(self.input.weight, -bound, bound)
        # This is a method instead of the module, so that the local readout's parameters are not
        # registered a second time.
        self.read = read

    def forward(self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C]."""
        scaled = self.scaled(features_of(graph, batch), num_pairs(batch))
        return self.of_scaled(scaled, wild.kept["hidden"])

    def scaled(self, features: Tensor, number: Tensor) -> Tensor:
        """Returns the features, centred and scaled, [B, F].

        Args:
            features: weighted sums of the features of each sample, [B, F].
            number: weighted number of pairs in each sample, `num_pairs`, [B].
        """
        features = features.to(self.units.dtype)
        number = number.to(self.units.dtype).unsqueeze(1)
        mean, scale = self.units
        return (features - number * mean) * scale

    def of_scaled(self, scaled: Tensor, hidden: Tensor) -> Tensor:
        """Returns the term, [B, T * C].

        Args:
            scaled: centred and scaled features, [B, F].
            hidden: output of the MLP's first layer without the features, [B, 2H].
        """
        scaled = scaled.clamp(-self.LARGEST, self.LARGEST)
        change = self.read(hidden + self.input(scaled)) - self.read(hidden)
        return self.linear(scaled) + change


def features_of(graph: SharedGraph, batch: Data) -> Tensor:
    """Returns the pair features of a batch, [B, F].

    They are the field `pair_features` of the batch. If it does not exist, they are computed.
    """
    if "pair_features" in batch:
        return batch.pair_features
    return pair_index(graph).of_samples(batch)
