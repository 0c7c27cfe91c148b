"""One graph for all samples, and the nodes and edges that each sample removes or scales.

A sample perturbs a few nodes. At level 0, a node is dead, and so are all edges that touch it. At
any other level, it lives, and its messages are multiplied by the level. Exactly the edges of dead
nodes are masked, and summation is linear. Therefore, the sums over the living edges of B samples
need no copy of the graph:

    sum over living edges = keep * (A @ (level * X))     X: [N, B, H], level: [N, B, 1], A: [N, N]

Here, `level` is the level of each node, 1 if it is intact, and `keep` is True where it is not 0.
`SharedGraph.levels`, `SharedGraph.keep` and `SharedGraph.propagate` compute the factors. If all
samples have the same states, as in the first layer, `SharedGraph.propagate_from_one` needs one
product for all. Layers that need a value for each edge, such as attention, use `expand` and
`EdgeMasks`: B block-diagonal copies of the graph, and a boolean for each copied edge.

Shapes: N nodes, R relations, E edges over all relations, E_r edges of relation r, H channels, B
samples in the batch, P perturbed nodes in the batch, D dead edges in the batch.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.typing import EdgeType
from torch_geometric.utils import cumsum, scatter

from mask_product import RelationStack, Samples, messages_of_perturbed


def num_samples(batch: Data) -> int:
    """Returns the number of samples in a batch, B."""
    return batch.perturbed_ptr.numel() - 1


def sum_by_sample(values: Tensor, batch: Data) -> Tensor:
    """Returns the sum of values [P, ...] over each sample's perturbed nodes, [B, ...]."""
    return scatter(values, batch.perturbed_batch, dim_size=num_samples(batch))


def starts_of_samples(perturbed: Tensor, ptr: Tensor, out_degree: Tensor) -> np.ndarray:
    """Returns the offsets of each sample's perturbed nodes and of their out-edges, [2, B + 1]."""
    return torch.stack([ptr, cumsum(out_degree[perturbed])[ptr]]).numpy()


# The basis of a node with one effect, whose dose is 1 - level, [3, 1].
LINEAR = torch.tensor([[1.0], [1.0], [0.0]])


def doses(level: Tensor) -> Tensor:
    """Returns loss, gain and deletion of nodes at these levels [P], [P, 3].

    They are max(0, 1 - level), min(0, 1 - level), and 1 at level 0.
    """
    change = 1 - level
    return torch.stack([change.clamp(min=0), change.clamp(max=0), (level == 0).to(change)], dim=1)


class SharedGraph(nn.Module):
    """The graph's topology on one device, without parameters or entries in the state dict.

    All tensors except the degrees are non-persistent buffers, so one `.to(device)` moves the graph.
    Keep it out of the module that DDP wraps, because DDP would broadcast it in every forward pass.
    Batches come from `data.KnockoutDataset`; a batch on a different device raises `RuntimeError`.
    Methods that take a batch never synchronise with the host.

    Args:
        graph: a `HeteroData` whose edge types all connect `node_type` with itself. Each has an
            `edge_index` [2, E_r] and, unless all weights are 1, a positive `edge_weight` [E_r].
            Nodes may have features `x` [N, F].

    Raises:
        ValueError: there are no edge types, or one has a different node type, a wrong shape or a
            node outside [0, N).
    """

    def __init__(self, graph: HeteroData, node_type: str = "gene"):
        super().__init__()
        self.num_nodes = int(graph[node_type].num_nodes)
        self.relations: list[EdgeType] = list(graph.edge_types)
        if not self.relations:
            raise ValueError("the graph has no edge types")
        graph.validate()
        edge_indices = []
        weights = []
        for relation in self.relations:
            if {relation[0], relation[2]} != {node_type}:
                raise ValueError(f"edge type {relation} does not connect '{node_type}' with itself")
            edges = graph[relation].clone().cpu()  # a copy, because `cpu` moves the edges in place
            edge_indices.append(edges.edge_index.long())
            weights.append(edges.get("edge_weight", torch.ones(edges.num_edges)).double())
        counts = [edge_index.size(1) for edge_index in edge_indices]
        self.num_edges: dict[EdgeType, int] = dict(zip(self.relations, counts, strict=True))

        # Edges are sorted by relation.
        edge_index = torch.cat(edge_indices, dim=1)
        relation = torch.repeat_interleave(torch.tensor(counts))
        as_given = torch.cat(weights)
        edge_weight = normalised(as_given, edge_index[1], relation, self.num_nodes).float()
        self._buffer("edge_index", edge_index)
        self._buffer("edge_weight", edge_weight)
        self._buffer("edge_weight_as_given", as_given.float())
        self._buffer("edge_counts", torch.tensor(counts))
        self._buffer("edge_offsets", self.edge_counts.cumsum(0) - self.edge_counts)
        self._buffer("x", graph[node_type].get("x", torch.empty(self.num_nodes, 0)).float().cpu())

        self.stack = RelationStack(edge_index, relation, edge_weight, len(counts), self.num_nodes)
        self._add_incidence(relation)
        self._add_out_edges(relation)
        self.reused_masks = EdgeMasks(self)

    def _add_incidence(self, relation: Tensor) -> None:
        """Stores, as CSR, the edges of relation r that touch node n in row n * R + r."""
        source, target = self.edge_index
        num_relations = len(self.relations)
        no_loop = (source != target).nonzero().squeeze(1)  # list a self-loop only once
        edge = torch.cat([torch.arange(len(source)), no_loop])
        node = torch.cat([source, target[no_loop]])
        row, order = (node * num_relations + relation[edge]).sort(stable=True)
        self._buffer("incidence", edge[order].int())
        self._buffer("incidence_ptr", index2ptr(row, self.num_nodes * num_relations))
        # The number of edges that die with each node, [N]. Datasets use it, so it stays on the CPU.
        self.degree = self.incidence_ptr[::num_relations].diff()

    def _add_out_edges(self, relation: Tensor) -> None:
        """Stores at r * N + n the offset of relation r's edges from node n in `stack.by_source`."""
        row = relation * self.num_nodes + self.edge_index[0]
        count = row.bincount(minlength=len(self.relations) * self.num_nodes)
        self._buffer("out_ptr", cumsum(count))
        # The number of edges that leave each node, [N]. Datasets use it, so it stays on the CPU.
        self.out_degree = count.view(-1, self.num_nodes).sum(0)

    def _buffer(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def check(self, batch: Data) -> None:
        """Raises `RuntimeError` if the batch and the graph are on different devices."""
        if batch.perturbed.device != self.device:
            raise RuntimeError(
                f"the batch is on {batch.perturbed.device} but the graph is on {self.device}: "
                f"call batch = batch.to('{self.device}') before the model sees it"
            )

    def levels(self, batch: Data) -> Tensor:
        """Returns the level of each node in each sample, [N, B], in the graph's dtype."""
        self.check(batch)
        levels = self.edge_weight.new_ones(self.num_nodes, num_samples(batch))
        changed = batch.level.to(levels.dtype)
        return levels.index_put_((batch.perturbed, batch.perturbed_batch), changed)

    def keep(self, batch: Data) -> Tensor:
        """Returns whether each node is alive in each sample, bool [N, B]."""
        return self.levels(batch) > 0

    def samples_at_once(self, states: Tensor) -> int:
        """Returns how many samples to process at once, given the states [N, 1, H] of one sample.

        On a CPU, their states fit in the cache. On a GPU, the sums of all relations fit in 4 GB.
        """
        # About the cache of a CPU core.
        size = 2**32 // len(self.relations) if states.is_cuda else 2**20
        return max(1, size // (states.numel() * states.element_size()))

    def in_blocks(self, batch: Data, states: Tensor) -> Iterator[Samples]:
        """Yields a batch in blocks of `samples_at_once(states)` samples."""
        first = 0
        for level in self.levels(batch).split(self.samples_at_once(states), dim=1):
            yield Samples(batch, first, level)
            first += level.size(1)

    def dead_edges(self, batch: Data) -> Tensor:
        """Returns the flat ids of the dead edges, long [D], in O(D).

        An id is a position in `torch.cat(list(edge_masks(batch).values()))`. An edge between two
        dead nodes is listed twice.
        """
        self.check(batch)
        num_relations = len(self.relations)
        # Segment k * R + r holds the edges of relation r that die with perturbed node number k.
        bounds = self.incidence_ptr.unfold(0, num_relations + 1, num_relations)  # [N, R + 1]
        bounds = bounds.index_select(0, batch.perturbed)
        start = bounds.narrow(1, 0, num_relations).flatten()  # [P * R]
        length = (bounds.diff() * (batch.level == 0).unsqueeze(1)).flatten()
        # Dead edge i is entry i - first[s] of its segment s.
        first = length.cumsum(0) - length
        segment = torch.repeat_interleave(length, output_size=batch.num_dead_edges)
        position = torch.arange(batch.num_dead_edges, device=self.device)
        position += (start - first).index_select(0, segment)
        edge = self.incidence.index_select(0, position)
        # The edge is preceded by the copies of all earlier relations and by the copies of its own
        # relation in earlier samples. `edge` already counts one copy of each earlier relation.
        sample = batch.perturbed_batch.unsqueeze(1)
        num_others = num_samples(batch) - 1
        preceding = num_others * self.edge_offsets + sample * self.edge_counts  # [P, R]
        return preceding.flatten().index_select(0, segment).add_(edge)

    def edge_masks(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True for living edges.

        Sample k has the entries `[k * E_r, (k + 1) * E_r)`. `EdgeMasks` gives the same masks, but
        reuses its memory.
        """
        return EdgeMasks(self)(batch)

    def expand(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: long [2, B * E_r]}, block-diagonal edge indices.

        Node n of sample k is `k * N + n`. The edges of each sample have the order of the graph's
        `edge_index`. Values [E_r, F] of the edges become those of the copies with
        `values.repeat(B, 1)`.
        """
        self.check(batch)
        sample = torch.arange(num_samples(batch), device=self.device).unsqueeze(1)
        offset = sample * self.num_nodes
        edge_indices = self.edge_index.unsqueeze(1).split(list(self.num_edges.values()), dim=2)
        copies = [(edge_index + offset).flatten(1) for edge_index in edge_indices]
        return dict(zip(self.relations, copies, strict=True))

    def by_relation(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits values of the edges [E, ...] into one tensor for each relation."""
        return values.split(list(self.num_edges.values()))

    def propagate(
        self, x: Tensor, gate: Tensor | None = None, level: Tensor | None = None
    ) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ (level * x)), [N, B, H].

        `x` is [N, B, H], `gate` is [R, H] and `level` is [N, B]; gate and level are 1 by default.
        The sums of dead nodes are not masked, because nothing reads them. Products have the graph's
        dtype, and the result has the dtype of level * x.
        """
        if level is not None:
            x = level.unsqueeze(-1) * x
        if gate is None:
            gate = x.new_ones(len(self.relations), x.size(2))
        dtype = self.edge_weight.dtype
        return self.stack(x.to(dtype), gate.to(dtype)).to(x.dtype)

    def propagate_from_one(self, x: Tensor, gate: Tensor, samples: Samples | None) -> Tensor:
        """Returns `propagate` of x [N, 1, H], the same states in all b samples, [N, b, H].

        The sums are computed once for intact nodes. For each sample, the differences of the
        messages that its perturbed nodes send are then added to the targets of their edges. Without
        samples, b is 1.
        """
        sums = self.propagate(x, gate)
        if samples is None:
            return sums
        sums = sums.expand(-1, samples.level.size(1), -1)
        csr = self.stack.by_source.csr
        state, message = messages_of_perturbed(x.squeeze(1), gate, samples, self.out_ptr, csr)
        return sums.flatten(0, 1).index_add(0, state, message).view(sums.shape)


class EdgeMasks:
    """The masks of `SharedGraph.edge_masks` in reused memory, valid until the next call.

    A call only resets the dead edges of the previous batch and clears those of the new one. New
    masks would have to write B * E entries.
    """

    def __init__(self, graph: SharedGraph):
        self.graph = graph
        # A mask, and the dead edges of the previous batch, which are its only False entries; or
        # None.
        self.memory: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True for living edges."""
        graph = self.graph
        dead_edges = graph.dead_edges(batch)
        sizes = [num_samples(batch) * count for count in graph.num_edges.values()]
        size = sum(sizes)
        memory = self.memory
        self.memory = None  # if this call is interrupted, the state of the mask is unknown
        if memory is None or len(memory[0]) < size or memory[0].device != graph.device:
            alive = torch.ones(size, dtype=torch.bool, device=graph.device)
        else:
            alive, revived = memory
            alive.scatter_(0, revived, True)  # twice as fast as index_fill_
        alive.scatter_(0, dead_edges, False)
        self.memory = (alive, dead_edges)
        masks = alive.narrow(0, 0, size).split(sizes)
        return dict(zip(graph.relations, masks, strict=True))


def normalised(weight: Tensor, target: Tensor, relation: Tensor, num_nodes: int) -> Tensor:
    """Returns weight / sqrt(in-degree of target * mean degree), [E].

    The degrees are sums of the weights of a relation. GCN (Kipf and Welling 2017) uses the
    out-degree of the source instead of the mean degree. The knock-out of a node with many
    neighbours would then have less effect on each of them.
    """
    mean = relation.bincount(weight)[relation] / num_nodes
    target = relation * num_nodes + target
    return weight * (mean * target.bincount(weight)[target]).rsqrt()
