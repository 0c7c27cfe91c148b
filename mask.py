"""One graph for all samples of a batch: message passing without dead nodes, and without copies.

A sample perturbs a few nodes, and gives each of them a level. At level 0, a node is dead, and all
edges that touch it are dead, too. At any other level, a node lives, and the messages that it sends
are multiplied by its level. All nodes that a sample does not perturb have level 1.

The usual approach in PyG is to copy the graph B times, and to multiply the message of each copied
edge by a mask. Here, all samples share one graph, because an edge is dead exactly if its source or
its target is dead. A dead source sends its state times its level, which is 0. The sum that a dead
target receives can be set to 0 after the summation. Summation is linear, so one sparse product
gives the sums over the living edges of all samples:

    sums = keep * (A @ (level * X))

    X      [N, B, H]  states of the nodes in each sample
    level  [N, B, 1]  level of each node in each sample: 1 if it is intact, 0 if it is dead
    A      [N, N]     adjacency matrix, shared by all samples: A[i, j] is the weight of edge j -> i
    keep   [N, B, 1]  True for living nodes, level > 0
    sums   [N, B, H]  sum of the messages that each node receives in each sample

The product treats the states as a dense matrix [N, B * H]. `SharedGraph.levels` returns `level`,
and `SharedGraph.keep` returns `keep`. `SharedGraph.propagate` returns `A @ (level * X)`, summed
over the relations. It does not multiply by `keep`, because dead nodes send nothing and readouts
omit them, so nothing reads their sums. In the first layer, the states are the same in all samples,
X: [N, 1, H]. `SharedGraph.propagate_from_one` then computes one product for all samples, and
corrects the messages of the perturbed nodes.

Layers that need a value for each edge, such as attention, use B block-diagonal copies of the graph
instead: `SharedGraph.expand` returns the edge indices of the copies, and `SharedGraph.edge_masks`
a boolean for each copied edge. `EdgeMasks` computes the same masks, but reuses their memory.

Shapes: N nodes, R relations, E edges over all relations, E_r edges of relation r, H channels, B
samples in the batch, P perturbed nodes in the batch, D dead edges in the batch, b samples in a
block of the batch.
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
    """Returns the sum of `values` over the perturbed nodes of each sample, [B, ...].

    `values` [P, ...] has one entry for each perturbed node of the batch.
    """
    return scatter(values, batch.perturbed_batch, dim_size=num_samples(batch))


def starts_of_samples(perturbed: Tensor, ptr: Tensor, out_degree: Tensor) -> np.ndarray:
    """Returns the offsets of each sample in two lists of a batch, int64 [2, B + 1].

    The first row has the offsets in the list of perturbed nodes, which are `ptr` itself. The second
    row has the offsets in the list of the edges that leave these nodes.

    Args:
        perturbed: the perturbed nodes of all samples, long [P].
        ptr: offset of each sample's perturbed nodes, long [B + 1].
        out_degree: number of edges that leave each node, long [N].
    """
    return torch.stack([ptr, cumsum(out_degree[perturbed])[ptr]]).numpy()


# Maps the three `doses` of a level to the only dose of a node with one effect, 1 - level, [3, 1].
LINEAR = torch.tensor([[1.0], [1.0], [0.0]])


def doses(level: Tensor) -> Tensor:
    """Returns three doses of each perturbed node, [P, 3], given the levels [P].

    The columns are the loss, max(0, 1 - level); the gain, min(0, 1 - level), which is negative; and
    the deletion, which is 1 at level 0 and otherwise 0. All three are 0 for an intact node.
    """
    change = 1 - level
    return torch.stack([change.clamp(min=0), change.clamp(max=0), (level == 0).to(change)], dim=1)


class SharedGraph(nn.Module):
    """The graph's edges on one device, for message passing in all samples of a batch.

    The graph has no parameters, and no entries in the state dict. All its tensors except the
    degrees are non-persistent buffers, so one `.to(device)` moves the graph. Keep it out of the
    module that DDP wraps, because DDP would broadcast it in every forward pass.

    Methods with an argument `batch` expect a batch of a `data.KnockoutDataset`. They raise
    `RuntimeError` if the batch is on a different device. They never make the host wait for the GPU.

    Args:
        graph: a `HeteroData` whose edge types all connect `node_type` with itself. Each edge type
            has an `edge_index` [2, E_r] and, unless all weights are 1, a positive `edge_weight`
            [E_r]. Nodes may have features `x` [N, F].
        node_type: name of the node type.

    Raises:
        ValueError: the graph has no edge types, an edge type connects a different node type, or an
            `edge_index` has a wrong shape or a node outside [0, N).
    """

    def __init__(self, graph: HeteroData, node_type: str = "gene"):
        super().__init__()
        self.num_nodes = int(graph[node_type].num_nodes)
        self.relations: list[EdgeType] = list(graph.edge_types)
        if not self.relations:
            raise ValueError("the graph has no edge types: add one with an edge_index")
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
        """Stores the ids of the edges that touch each node, as CSR.

        Row n * R + r contains the edges of relation r that touch node n.
        """
        source, target = self.edge_index
        num_relations = len(self.relations)
        no_loop = (source != target).nonzero().squeeze(1)  # list a self-loop only once
        edge = torch.cat([torch.arange(len(source)), no_loop])
        node = torch.cat([source, target[no_loop]])
        row, order = (node * num_relations + relation[edge]).sort(stable=True)
        self._buffer("incidence", edge[order].int())
        self._buffer("incidence_ptr", index2ptr(row, self.num_nodes * num_relations))
        # Number of edges that die with each node, [N]. It stays on the CPU, where datasets use it.
        self.degree = self.incidence_ptr[::num_relations].diff()

    def _add_out_edges(self, relation: Tensor) -> None:
        """Stores the offsets of each node's out-edges in the entries of `stack.by_source`.

        Entry r * N + n of `out_ptr` is the offset of the edges of relation r that leave node n.
        """
        row = relation * self.num_nodes + self.edge_index[0]
        count = row.bincount(minlength=len(self.relations) * self.num_nodes)
        self._buffer("out_ptr", cumsum(count))
        # Number of edges that leave each node, [N]. It stays on the CPU, where datasets use it.
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
            problem = f"the batch is on {batch.perturbed.device} but the graph is on {self.device}"
            advice = f"call batch = batch.to('{self.device}') before you pass it to the model"
            raise RuntimeError(f"{problem}: {advice}")

    def levels(self, batch: Data) -> Tensor:
        """Returns the level of each node in each sample, [N, B], in the graph's dtype.

        Nodes that a sample does not perturb have level 1.
        """
        self.check(batch)
        levels = self.edge_weight.new_ones(self.num_nodes, num_samples(batch))
        changed = batch.level.to(levels.dtype)
        return levels.index_put_((batch.perturbed, batch.perturbed_batch), changed)

    def keep(self, batch: Data) -> Tensor:
        """Returns whether each node is alive in each sample, bool [N, B]."""
        return self.levels(batch) > 0

    def samples_at_once(self, states: Tensor) -> int:
        """Returns the number of samples to process at once, given the states [N, 1, H] of a sample.

        On a CPU, the states of these samples, [N, b, H], fit in the cache of a core. On a GPU,
        their sums for all relations, [R * N, b, H], fit in 4 GiB. The number is at least 1.
        """
        # Largest size of the states in bytes. 1 MiB is about the cache of a CPU core.
        size = 2**32 // len(self.relations) if states.is_cuda else 2**20
        return max(1, size // (states.numel() * states.element_size()))

    def in_blocks(self, batch: Data, states: Tensor) -> Iterator[Samples]:
        """Yields a batch in blocks of up to `samples_at_once(states)` samples."""
        first = 0
        for level in self.levels(batch).split(self.samples_at_once(states), dim=1):
            yield Samples(batch, first, level)
            first += level.size(1)

    def dead_edges(self, batch: Data) -> Tensor:
        """Returns the ids of the dead edges of all samples, long [D].

        An id is an index into `torch.cat(list(edge_masks(batch).values()))`. An edge between two
        dead nodes is listed twice. Time and memory are proportional to the number of dead edges and
        perturbed nodes, and do not depend on the number of all edges.
        """
        self.check(batch)
        num_relations = len(self.relations)
        # Segment k * R + r has the edges of relation r that die with perturbed node number k.
        bounds = self.incidence_ptr.unfold(0, num_relations + 1, num_relations)  # [N, R + 1]
        bounds = bounds.index_select(0, batch.perturbed)
        start = bounds.narrow(1, 0, num_relations).flatten()  # [P * R]
        length = (bounds.diff() * (batch.level == 0).unsqueeze(1)).flatten()
        # Dead edge number i is entry i - first[s] of its segment s.
        first = length.cumsum(0) - length
        segment = torch.repeat_interleave(length, output_size=batch.num_dead_edges)
        position = torch.arange(batch.num_dead_edges, device=self.device)
        position += (start - first).index_select(0, segment)
        edge = self.incidence.index_select(0, position)
        # `edge` is the index if there is only one copy of each edge. In the concatenated masks, the
        # other copies of all earlier relations also precede the edge, and so do the copies of its
        # own relation in earlier samples.
        sample = batch.perturbed_batch.unsqueeze(1)
        num_others = num_samples(batch) - 1
        preceding = num_others * self.edge_offsets + sample * self.edge_counts  # [P, R]
        return preceding.flatten().index_select(0, segment).add_(edge)

    def edge_masks(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns the mask of the copied edges, {edge type: bool [B * E_r]}, True for living edges.

        Sample k has the entries `[k * E_r, (k + 1) * E_r)`, in the order of `expand`. `EdgeMasks`
        returns the same masks, but reuses its memory.
        """
        return EdgeMasks(self)(batch)

    def expand(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns the edge indices of B copies of the graph, {edge type: long [2, B * E_r]}.

        They are block-diagonal, as in a PyG `Batch`: node n of sample k has the number `k * N + n`.
        The edges of each sample have the same order as the graph's `edge_index`. If the edges have
        values [E_r, F], the copies of the edges have the values `values.repeat(B, 1)`.
        """
        self.check(batch)
        sample = torch.arange(num_samples(batch), device=self.device).unsqueeze(1)
        offset = sample * self.num_nodes
        edge_indices = self.edge_index.unsqueeze(1).split(list(self.num_edges.values()), dim=2)
        copies = [(edge_index + offset).flatten(1) for edge_index in edge_indices]
        return dict(zip(self.relations, copies, strict=True))

    def by_relation(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits values of the edges, [E, ...], into one tensor for each relation, [E_r, ...]."""
        return values.split(list(self.num_edges.values()))

    def propagate(
        self, x: Tensor, gate: Tensor | None = None, level: Tensor | None = None
    ) -> Tensor:
        """Returns the weighted sums of the messages that each node receives, [N, B, H].

        They are the sum over the relations r of gate_r * (A_r @ (level * x)). Here, A_r[i, j] is
        the normalised weight of the edge of relation r that leads from node j to node i. The sums
        of dead nodes are not masked, because nothing reads them. Products are computed in the
        graph's dtype, and the result has the dtype of level * x.

        Args:
            x: states of the nodes in each sample, [N, B, H].
            gate: factor of each relation and channel, [R, H], 1 by default.
            level: level of each node in each sample, [N, B], 1 by default.
        """
        if level is not None:
            x = level.unsqueeze(-1) * x
        if gate is None:
            gate = x.new_ones(len(self.relations), x.size(2))
        dtype = self.edge_weight.dtype
        return self.stack(x.to(dtype), gate.to(dtype)).to(x.dtype)

    def propagate_from_one(self, x: Tensor, gate: Tensor, samples: Samples | None) -> Tensor:
        """Returns the result of `propagate` for states that all samples share, [N, b, H].

        The sums are computed once, for intact nodes. A perturbed node sends level * x instead of x.
        Therefore, (level - 1) times its message is added to the sums at the targets of its edges,
        in each sample that perturbs it.

        Args:
            x: states of the nodes in all samples, [N, 1, H].
            gate: factor of each relation and channel, [R, H].
            samples: a block of b samples. None: all nodes are intact, and b is 1.
        """
        sums = self.propagate(x, gate)
        if samples is None:
            return sums
        sums = sums.expand(-1, samples.level.size(1), -1)
        csr = self.stack.by_source.csr
        state, message = messages_of_perturbed(x.squeeze(1), gate, samples, self.out_ptr, csr)
        return sums.flatten(0, 1).index_add(0, state, message).view(sums.shape)


class EdgeMasks:
    """Computes the masks of `SharedGraph.edge_masks` in reused memory.

    The masks are valid until the next call, which overwrites them. A call only writes the entries
    of dead edges: it sets the dead edges of the previous batch to True, and the dead edges of its
    own batch to False. With new memory, each call would have to write all B * E entries.
    """

    def __init__(self, graph: SharedGraph):
        self.graph = graph
        # The masks of all relations as one tensor, and the ids of the dead edges of the previous
        # batch. Only the entries of these edges are False. None: there is no memory to reuse.
        self.memory: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns the masks of the copies, {edge type: bool [B * E_r]}, True for living edges."""
        graph = self.graph
        dead_edges = graph.dead_edges(batch)
        sizes = [num_samples(batch) * count for count in graph.num_edges.values()]
        size = sum(sizes)
        memory = self.memory
        self.memory = None  # if this call is interrupted, the content of the memory is unknown
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
    """Returns the normalised weights of the edges, [E].

    They are weight / sqrt(in-degree of the target * mean in-degree of all nodes). An in-degree
    is the sum of the weights of the edges of the same relation that lead to a node. GCN (Kipf and
    Welling 2017) uses the out-degree of the source instead of the mean degree. With the out-degree,
    the knock-out of a node with many targets would have less effect on each of them.

    Args:
        weight: weight of each edge, [E].
        target: target node of each edge, long [E].
        relation: relation of each edge, long [E].
    """
    mean = relation.bincount(weight)[relation] / num_nodes
    target = relation * num_nodes + target
    return weight * (mean * target.bincount(weight)[target]).rsqrt()
