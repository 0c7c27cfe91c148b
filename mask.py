"""One graph shared by every sample: its topology on one device, and the nodes and edges that each
sample removes or scales.

A sample perturbs a few nodes. At level 0 a node is dead, and so is every edge that touches it; at
another level it lives, and sends its messages times the level. Because exactly the edges of dead
nodes are masked and summation is linear, aggregation over the live edges of B samples needs no copy
of the graph:

    sum over live edges = keep * (A @ (level * X))     X: [N, B, H], level: [N, B, 1], A: [N, N]

with `level` that of each node, 1 if intact, and `keep` where it is not 0. `SharedGraph.levels`,
`SharedGraph.keep` and `SharedGraph.propagate` compute the factors. Where all samples have the same
states, as before the first layer, `SharedGraph.propagate_from_one` needs one product for all.
Layers that need values for each edge (attention, say) use `expand` and `EdgeMasks`: B
block-diagonal copies of the graph and a boolean per copied edge.

Shapes: N nodes, R relations, E edges over all relations, E_r edges of relation r, H channels,
B samples in the batch, P perturbed nodes in the batch, D dead edges in the batch.
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
    """Returns the sum over the perturbed nodes of each sample, [B, ...], of values [P, ...]."""
    return scatter(values, batch.perturbed_batch, dim_size=num_samples(batch))


def starts_of_samples(perturbed: Tensor, ptr: Tensor, out_degree: Tensor) -> np.ndarray:
    """Returns where the perturbed nodes of each sample, and their out-edges, begin, [2, B + 1]."""
    return torch.stack([ptr, cumsum(out_degree[perturbed])[ptr]]).numpy()


# The basis, [3, 1], of one response to the level: 1 - level, whether it is a loss or a gain.
LINEAR = torch.tensor([[1.0], [1.0], [0.0]])


def doses(level: Tensor) -> Tensor:
    """Returns loss, gain and deletion of nodes at these levels [P], [P, 3].

    They are max(0, 1 - level), min(0, 1 - level), and 1 at level 0.
    """
    change = 1 - level
    return torch.stack([change.clamp(min=0), change.clamp(max=0), (level == 0).to(change)], dim=1)


class SharedGraph(nn.Module):
    """The graph's topology on one device, without parameters or entries in the state dict.

    All tensors but the degrees are non-persistent buffers, so one `.to(device)` moves the graph.
    Keep it out of the module that DDP wraps, or DDP broadcasts it in every forward pass. Batches
    come from `data.KnockoutDataset`; one on another device raises `RuntimeError`. Methods that take
    a batch never synchronise with the host.

    Args:
        graph: a `HeteroData` whose edge types all connect `node_type` with itself, each with an
            `edge_index` [2, E_r] and, unless all are 1, `edge_weight` [E_r], positive; nodes may
            have features `x` [N, F].

    Raises:
        ValueError: there are no edge types, or one has another node type, a wrong shape or a node
            outside [0, N).
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
            edges = graph[relation].clone().cpu()  # which moves in place
            edge_indices.append(edges.edge_index.long())
            weights.append(edges.get("edge_weight", torch.ones(edges.num_edges)).double())
        counts = [edge_index.size(1) for edge_index in edge_indices]
        self.num_edges: dict[EdgeType, int] = dict(zip(self.relations, counts, strict=True))

        # The edges of all relations, one relation after another.
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
        """Stores, as CSR, which edges of relation r touch node n in row n * R + r."""
        source, target = self.edge_index
        num_relations = len(self.relations)
        no_loop = (source != target).nonzero().squeeze(1)  # as a self-loop is listed once
        edge = torch.cat([torch.arange(len(source)), no_loop])
        node = torch.cat([source, target[no_loop]])
        row, order = (node * num_relations + relation[edge]).sort(stable=True)
        self._buffer("incidence", edge[order].int())
        self._buffer("incidence_ptr", index2ptr(row, self.num_nodes * num_relations))
        # How many edges die with each node, [N]: for datasets, which stay on the CPU.
        self.degree = self.incidence_ptr[::num_relations].diff()

    def _add_out_edges(self, relation: Tensor) -> None:
        """Stores at r * N + n where relation r's edges from node n begin in `stack.by_source`."""
        row = relation * self.num_nodes + self.edge_index[0]
        count = row.bincount(minlength=len(self.relations) * self.num_nodes)
        self._buffer("out_ptr", cumsum(count))
        # How many edges leave each node, [N]: for datasets, which stay on the CPU.
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
        """Raises `RuntimeError` if the batch is on another device than the graph."""
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
        """Returns True where a node is alive in a sample, bool [N, B]."""
        return self.levels(batch) > 0

    def samples_at_once(self, states: Tensor) -> int:
        """Returns for how many samples states [N, B, H] such as these of one sample stay in cache.

        On a GPU, it is for how many each relation's sums of states fit in 4 GB together.
        """
        size = 2**32 // len(self.relations) if states.is_cuda else 2**20  # about a CPU core's
        return max(1, size // (states.numel() * states.element_size()))

    def in_blocks(self, batch: Data, states: Tensor) -> Iterator[Samples]:
        """Yields as many samples of a batch at a time as `samples_at_once` says of these states."""
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
        # B copies of each earlier relation precede it, of which `edge` counts one, and a copy of
        # its own relation for each earlier sample.
        sample = batch.perturbed_batch.unsqueeze(1)
        num_others = num_samples(batch) - 1
        preceding = num_others * self.edge_offsets + sample * self.edge_counts  # [P, R]
        return preceding.flatten().index_select(0, segment).add_(edge)

    def edge_masks(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True where the edge is alive.

        Sample k is `[k * E_r, (k + 1) * E_r)`. `EdgeMasks` gives the same without fresh memory.
        """
        return EdgeMasks(self)(batch)

    def expand(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: long [2, B * E_r]}, block-diagonal edge indices.

        Node n of sample k is `k * N + n`. The edges of each sample are in the order of the graph's
        `edge_index`, so that `values.repeat(B, 1)` are those of the copies for values [E_r, F].
        """
        self.check(batch)
        sample = torch.arange(num_samples(batch), device=self.device).unsqueeze(1)
        offset = sample * self.num_nodes
        edge_indices = self.edge_index.unsqueeze(1).split(list(self.num_edges.values()), dim=2)
        copies = [(edge_index + offset).flatten(1) for edge_index in edge_indices]
        return dict(zip(self.relations, copies, strict=True))

    def by_relation(self, values: Tensor) -> tuple[Tensor, ...]:
        """Returns values of the edges, [E, ...], as those of each relation."""
        return values.split(list(self.num_edges.values()))

    def propagate(
        self, x: Tensor, gate: Tensor | None = None, level: Tensor | None = None
    ) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ (level * x)), [N, B, H].

        `x` is [N, B, H], `gate` [R, H], `level` [N, B]; without them, all are ones. Sums of dead
        nodes, which nothing reads, stay. Products are in the graph's dtype, the result is in that
        of level * x.
        """
        if level is not None:
            x = level.unsqueeze(-1) * x
        if gate is None:
            gate = x.new_ones(len(self.relations), x.size(2))
        dtype = self.edge_weight.dtype
        return self.stack(x.to(dtype), gate.to(dtype)).to(x.dtype)

    def propagate_from_one(self, x: Tensor, gate: Tensor, samples: Samples | None) -> Tensor:
        """Returns `propagate` of states that are alike in all samples, [N, b, H] of x [N, 1, H].

        As summation is linear, they are summed once, and what the perturbed nodes of each sample
        send more than at level 1 is added at the ends of their edges. Without samples, b is 1.
        """
        sums = self.propagate(x, gate)
        if samples is None:
            return sums
        sums = sums.expand(-1, samples.level.size(1), -1)
        csr = self.stack.by_source.csr
        state, message = messages_of_perturbed(x.squeeze(1), gate, samples, self.out_ptr, csr)
        return sums.flatten(0, 1).index_add(0, state, message).view(sums.shape)


class EdgeMasks:
    """The masks of `SharedGraph.edge_masks` in memory of their own, valid until the next call.

    A call revives the edges that the batch before has killed, so that it costs the dead edges of
    two batches, where fresh masks cost B * E.
    """

    def __init__(self, graph: SharedGraph):
        self.graph = graph
        # A mask, and the dead edges of the batch before, where alone it is False; or nothing.
        self.memory: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True where the edge is alive."""
        graph = self.graph
        dead_edges = graph.dead_edges(batch)
        sizes = [num_samples(batch) * count for count in graph.num_edges.values()]
        size = sum(sizes)
        memory = self.memory
        self.memory = None  # after an interrupt, nobody would know which edges are dead
        if memory is None or len(memory[0]) < size or memory[0].device != graph.device:
            alive = torch.ones(size, dtype=torch.bool, device=graph.device)
        else:
            alive, revived = memory
            alive.scatter_(0, revived, True)  # takes half of index_fill_'s time
        alive.scatter_(0, dead_edges, False)
        self.memory = (alive, dead_edges)
        masks = alive.narrow(0, 0, size).split(sizes)
        return dict(zip(graph.relations, masks, strict=True))


def normalised(weight: Tensor, target: Tensor, relation: Tensor, num_nodes: int) -> Tensor:
    """Returns weight / sqrt(in-degree of target * mean degree), sums of the relation's weights.

    GCN (Kipf and Welling 2017) has the source's out-degree in place of the mean, so that the loss
    of a node would count the less for each neighbour, the more it has.
    """
    mean = relation.bincount(weight)[relation] / num_nodes
    target = relation * num_nodes + target
    return weight * (mean * target.bincount(weight)[target]).rsqrt()
