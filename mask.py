"""One graph shared by every sample: its topology on one device, and the nodes and edges that each
sample removes or scales.

A sample perturbs a few nodes. At level 0 a node is dead, and so is every edge that touches it; at
another level it lives, and sends its messages times the level. Because exactly the edges of dead
nodes are masked and summation is linear, aggregation over the live edges of B samples needs no copy
of the graph:

    sum over live edges = alive * (A @ (keep * X))     X: [N, B, H], keep: [N, B, 1], A: [N, N]

with `keep` the level of each node, 1 if intact, and `alive` where it is not 0.
`SharedGraph.keep` and `SharedGraph.propagate` compute the two factors, keep and A. Layers that need
per-edge values (attention, say) use `expand` and `edge_masks`: B block-diagonal copies of the graph
and a boolean per copied edge. Most states do not differ from the intact graph's; `ReachPlanner`
lists those that do, for a model that computes only these.

Shapes: N nodes, R relations, E edges over all relations, E_r edges of relation r, H channels,
B samples in the batch, P perturbed nodes in the batch, D dead edges in the batch.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.typing import EdgeType

# torch warns once per process about sparse tensors, which users can do nothing about.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")


class SharedGraph(nn.Module):
    """The graph's topology on one device, without parameters or entries in the state dict.

    All tensors except `degree` are non-persistent buffers, so one `.to(device)` moves the graph.
    Keep it out of the module that DDP wraps, or DDP broadcasts it in every forward pass. Batches
    come from `data.KnockoutDataset`; one on another device raises `RuntimeError`. Methods that take
    a batch never synchronise with the host.

    Args:
        graph: a `HeteroData` whose edge types all connect `node_type` with itself, each with an
            `edge_index` [2, E_r] and, unless all are 1, `edge_weight` [E_r], positive; edges may
            have features `edge_attr` [E_r, F], and nodes `x` [N, F].
        node_type: the type of the nodes that are knocked out.

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
        edge_indices, weights, attributes = [], [], []
        for relation in self.relations:
            if {relation[0], relation[2]} != {node_type}:
                raise ValueError(f"edge type {relation} does not connect '{node_type}' with itself")
            edges = graph[relation].clone().cpu()  # which moves in place
            edge_indices.append(edges.edge_index.long())
            weights.append(edges.get("edge_weight", torch.ones(edges.num_edges)).double())
            attributes.append(edges.get("edge_attr", torch.empty(edges.num_edges, 0)).float())
        counts = [edge_index.size(1) for edge_index in edge_indices]
        self.num_edges: dict[EdgeType, int] = dict(zip(self.relations, counts, strict=True))

        # The edges of all relations, one relation after another.
        edge_index = torch.cat(edge_indices, dim=1)
        relation = torch.repeat_interleave(torch.tensor(counts))
        weight = _normalised(torch.cat(weights), edge_index[1], relation, self.num_nodes).float()
        self._buffer("edge_index", edge_index)
        self._buffer("edge_weight", weight)
        self._buffer("edge_attr", torch.cat(attributes))
        self._buffer("edge_counts", torch.tensor(counts))
        self._buffer("edge_offsets", self.edge_counts.cumsum(0) - self.edge_counts)
        self._buffer("x", graph[node_type].get("x", torch.empty(self.num_nodes, 0)).float().cpu())

        self.stack = RelationStack(edge_index, relation, weight, len(counts), self.num_nodes)
        self._add_incidence(relation)

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

    def _buffer(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    def check(self, batch: Data) -> int:
        """Returns the number of samples B; raises `RuntimeError` if the batch is elsewhere."""
        if batch.perturbed.device != self.device:
            raise RuntimeError(
                f"the batch is on {batch.perturbed.device} but the graph is on {self.device}: "
                f"call batch = batch.to('{self.device}') before the model sees it"
            )
        return batch.perturbed_ptr.numel() - 1

    def keep(self, batch: Data) -> Tensor:
        """Returns the level of each node in each sample, [N, B], in the graph's dtype.

        It is 1 for an intact node and 0 for a dead one.
        """
        keep = self.edge_weight.new_ones(self.num_nodes, self.check(batch))
        level = batch.level.to(keep.dtype)
        return keep.index_put_((batch.perturbed, batch.perturbed_batch), level)

    def dead_edges(self, batch: Data) -> Tensor:
        """Returns the flat ids of the dead edges, long [D], in O(D).

        An id is a position in `torch.cat(list(edge_masks(batch).values()))`. An edge between two
        dead nodes is listed twice.
        """
        num_samples = self.check(batch)
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
        preceding = (num_samples - 1) * self.edge_offsets + sample * self.edge_counts  # [P, R]
        return preceding.flatten().index_select(0, segment).add_(edge)

    def edge_masks(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True where the edge is alive.

        Sample k is `[k * E_r, (k + 1) * E_r)`.
        """
        num_samples = self.check(batch)
        size = num_samples * self.edge_index.size(1)
        alive = torch.ones(size, dtype=torch.bool, device=self.device)
        alive.index_fill_(0, self.dead_edges(batch), False)
        sizes = [num_samples * count for count in self.num_edges.values()]
        return dict(zip(self.relations, alive.split(sizes), strict=True))

    def expand(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: long [2, B * E_r]}, block-diagonal edge indices.

        Node n of sample k is `k * N + n`. The edges of each sample are in the order of the graph's
        `edge_index`, so that `values.repeat(B, 1)` are those of the copies for values [E_r, F].
        """
        offset = torch.arange(self.check(batch), device=self.device).unsqueeze(1) * self.num_nodes
        edge_indices = self.edge_index.unsqueeze(1).split(list(self.num_edges.values()), dim=2)
        copies = [(edge_index + offset).flatten(1) for edge_index in edge_indices]
        return dict(zip(self.relations, copies, strict=True))

    def by_relation(self, values: Tensor) -> tuple[Tensor, ...]:
        """Returns values of the edges, such as `edge_attr` [E, F], as those of each relation."""
        return values.split(list(self.num_edges.values()))

    def propagate(
        self, x: Tensor, gate: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ (keep * x)), [N, B, H].

        `x` is [N, B, H], `gate` [R, H], `keep` [N, B]; without them, all are ones. Sums of dead
        nodes, which nothing reads, stay. Products are in the graph's dtype, the result is in that
        of keep * x.
        """
        if keep is not None:
            x = keep.unsqueeze(-1) * x
        if gate is None:
            gate = x.new_ones(len(self.relations), x.size(2))
        dtype = self.edge_weight.dtype
        return self.stack(x.to(dtype), gate.to(dtype)).to(x.dtype)


class RelationStack(nn.Module):
    """The A_r one below the other as a CSR matrix [R * N, N], and their transposes as another."""

    def __init__(
        self,
        edge_index: Tensor,
        relation: Tensor,
        weight: Tensor,
        num_relations: int,
        num_nodes: int,
    ):
        super().__init__()
        source, target = edge_index
        ends = {"forward": (target, source), "backward": (source, target)}
        # Registered in the order in which `spmm` takes them.
        for name, (row, col) in ends.items():
            row = relation * num_nodes + row
            order = torch.argsort(row * num_nodes + col)
            ptr = index2ptr(row[order], num_relations * num_nodes)
            self.register_buffer(f"{name}_ptr", ptr.int(), persistent=False)
            self.register_buffer(f"{name}_col", col[order].int(), persistent=False)
            self.register_buffer(f"{name}_weight", weight[order], persistent=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ x), [N, B, H]."""
        return _Propagate.apply(x, gate, *self.buffers())


class ReachedStates(NamedTuple):
    """Which S states differ from the intact graph's after one layer, in a block of samples.

    They are sorted by sample and node. The matrix [S, C * (R + 1)] sums what the C senders
    contribute to them: the perturbed nodes, of whose states 1 - level is taken back, and the states
    that differed before the layer, sent times their level. Column c * (R + 1) + r holds the
    out-edges of sender c by relation r, the last the sender itself.
    """

    node: Tensor  # long [S]
    sample: Tensor  # long [S], counted from the block's first sample
    previous: Tensor  # long, where the states of the layer before stand among these
    matrix: tuple[Tensor, ...]  # for `spmm`


class ReachBlock(NamedTuple):
    """Some consecutive samples of a batch: what they change in the first `len(layers)` layers."""

    perturbed: Tensor  # and the next three as in a batch
    perturbed_batch: Tensor
    perturbed_ptr: Tensor
    level: Tensor
    layers: Sequence[ReachedStates] = ()

    @property
    def num_samples(self) -> int:
        return len(self.perturbed_ptr) - 1


class ReachPlanner:
    """Finds the states that samples change, layer by layer, from the topology alone, on the CPU.

    A layer changes the living out-neighbours of the perturbed nodes and of the nodes that the layer
    before has changed. As the `transform` of a `data.KnockoutDataset` it adds `reach` to each
    batch, a list of `ReachBlock`. A block's plan ends before the first layer that is cheaper on all
    nodes.
    """

    BLOCK = 32  # samples whose reached states stay in cache
    STATES = 2**23  # in a block, on all nodes: with 32 channels, they take 1 GB
    # A layer on all nodes costs as much as this share of all edges in a plan, and so many edges per
    # node (measured).
    EDGE_SHARE = 0.04
    EDGES_PER_NODE = 13.0

    def __init__(self, graph: SharedGraph, num_layers: int):
        self.num_nodes = graph.num_nodes
        self.num_layers = num_layers
        num_edges = sum(graph.num_edges.values())
        self.max_edges = self.EDGE_SHARE * num_edges + self.EDGES_PER_NODE * self.num_nodes
        # The out-edges of each node by relation and, as if by one more, from each node to itself.
        node = torch.arange(self.num_nodes + 1)
        ptr = graph.stack.backward_ptr.cpu().unfold(0, len(node), self.num_nodes)  # [R, N + 1]
        col = graph.stack.backward_col.cpu()
        weight = graph.stack.backward_weight.cpu()
        self.ptr = torch.cat([ptr, len(col) + node.unsqueeze(0)]).numpy()
        self.col = torch.cat([col, node[:-1]]).numpy()
        self.weight = torch.cat([weight, weight.new_ones(self.num_nodes)])
        self.block = min(self.BLOCK, max(1, self.STATES // self.num_nodes))
        # Of the states of a block, numbered sample * N + node. Only entries of reached states are
        # written, as most states are not.
        num_states = self.block * self.num_nodes
        self.level = np.ones(num_states)
        self.last_edge = np.empty(num_states, dtype=np.int32)
        self.row = np.empty(num_states, dtype=np.int32)  # in the plan of a layer

    def __call__(self, batch: Data) -> Data:
        """Adds `reach` to a batch on the CPU, and returns it."""
        batch.reach = self.plan(batch)
        return batch

    def plan(self, batch: Data) -> list[ReachBlock]:
        """Returns the plan of a batch on the CPU, in blocks of samples."""
        blocks = []
        for first in range(0, max(1, len(batch.perturbed_ptr) - 1), self.block):
            ptr = batch.perturbed_ptr[first : first + self.block + 1]
            knockouts = slice(ptr[0], ptr[-1])
            sample = batch.perturbed_batch[knockouts] - first
            block = ReachBlock(
                batch.perturbed[knockouts], sample, ptr - ptr[0], batch.level[knockouts]
            )
            blocks.append(block._replace(layers=self._plan_layers(block)))
        return blocks

    def _plan_layers(self, block: ReachBlock) -> list[ReachedStates]:
        perturbed = (block.perturbed_batch * self.num_nodes + block.perturbed).numpy()
        self.level[perturbed] = block.level
        layers = []
        reached = perturbed[:0]
        for _ in range(self.num_layers):
            senders = np.concatenate([perturbed, reached])
            sender_node = senders % self.num_nodes
            # Column c * (R + 1) + r: the out-edges of sender c by relation r.
            start = self.ptr[:, sender_node]
            length = self.ptr[:, sender_node + 1] - start
            if length.sum() > block.num_samples * self.max_edges:
                break
            length[-1, : len(perturbed)] = 0  # what a node sends does not change its own state
            scale = np.ones(start.shape)
            scale[:-1] = np.concatenate([1 - self.level[perturbed], self.level[reached]])
            first_state = np.repeat(senders - sender_node, len(self.ptr))  # of the same sample
            previous = reached
            columns = (values.T.ravel() for values in (start, length, scale))
            reached, matrix = self._layer(first_state, *columns)
            reached_sample, reached_node = np.divmod(reached, self.num_nodes)
            layers.append(
                ReachedStates(
                    torch.from_numpy(reached_node),
                    torch.from_numpy(reached_sample),
                    torch.from_numpy(self.row[previous]).long(),
                    matrix,
                )
            )
        self.level[perturbed] = 1
        return layers

    def _layer(
        self, first_state: np.ndarray, start: np.ndarray, length: np.ndarray, scale: np.ndarray
    ) -> tuple[np.ndarray, tuple[Tensor, ...]]:
        """Returns the living states that out-edges reach, ascending, and the matrix [S, columns].

        The edges of a column are `start[column] : start[column] + length[column]`, are weighted by
        `scale[column]`, and lead to states of the sample whose node 0 is `first_state[column]`.
        """
        column = np.repeat(np.arange(len(length), dtype=np.int32), length)
        edge = np.arange(len(column)) + np.repeat(start - (length.cumsum() - length), length)
        target = np.repeat(first_state, length) + self.col[edge]
        alive = self.level[target] > 0
        column = column[alive]
        edge = edge[alive]
        target = target[alive]

        # As np.unique(target), but sorting only distinct states.
        number = np.arange(len(target))
        self.last_edge[target] = number
        reached = np.sort(target[self.last_edge[target] == number])
        self.row[reached] = np.arange(len(reached))

        row = torch.from_numpy(self.row[target])
        weight = self.weight[edge].mul_(torch.from_numpy(scale[column]))
        column = torch.from_numpy(column)
        order = torch.argsort(row, stable=True)
        by_row = (index2ptr(row[order], len(reached)), column[order], weight[order])
        by_column = (index2ptr(column, len(length)), row, weight)
        return reached, (*by_row, *by_column)


class _Propagate(torch.autograd.Function):
    """`RelationStack.forward`; autograd alone would keep the sums of each relation for gate."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, *matrices)
        sums = spmm(*matrices, x.flatten(1)).view(len(gate), *x.shape)
        return sums.mul_(gate.view(-1, 1, 1, x.size(2))).sum(0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, *matrices = ctx.saved_tensors
        sums = spmm(*matrices[3:], *matrices[:3], grad.flatten(1)).view(len(gate), *x.shape)
        grad_gate = (sums * x).sum((1, 2))
        grad_x = sums.mul_(gate.view(-1, 1, 1, x.size(2))).sum(0)
        return grad_x, grad_gate, *[None] * len(matrices)


@torch.library.custom_op("shared_graph::spmm", mutates_args=())
def spmm(
    ptr: Tensor,
    col: Tensor,
    value: Tensor,
    ptr_t: Tensor,
    col_t: Tensor,
    value_t: Tensor,
    x: Tensor,
) -> Tensor:
    """Returns A @ x, in the dtype of x, for a CSR matrix A, given with its transpose.

    A custom op: autograd's own sparse product sorts the transpose in each backward pass and cannot
    be traced.
    """
    num_rows = ptr.numel() - 1
    if col.numel() == 0:
        return x.new_zeros(num_rows, x.size(1))
    y = x.to(value.dtype)
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _segment_product(ptr, col, value, y).to(x.dtype)
    size = (num_rows, x.size(0))
    matrix = torch.sparse_csr_tensor(ptr, col, value, size, check_invariants=False)
    out = y.new_empty(num_rows, y.size(1))
    with torch.autocast(x.device.type, enabled=False):  # sparse products need full precision
        torch.addmm(out, matrix, y.contiguous(), beta=0, out=out)  # matrix @ y would fill it first
    return out.to(x.dtype)


def _segment_product(ptr: Tensor, col: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """Returns A @ x with the same bits each time, unlike cuSPARSE."""
    sums = []
    for columns in x.split(64, dim=1):  # as it keeps all messages
        messages = columns.index_select(0, col) * value.unsqueeze(1)
        sums.append(torch.segment_reduce(messages, "sum", offsets=ptr, initial=0))
    return torch.cat(sums, dim=1)


@spmm.register_fake
def _spmm_shape(ptr, col, value, ptr_t, col_t, value_t, x):
    return x.new_empty(ptr.numel() - 1, x.size(1))  # contiguous, for any strides of x


def _spmm_backward(ctx, grad):
    # Activation checkpointing allows reading the saved tensors once.
    ptr, col, value, ptr_t, col_t, value_t = ctx.saved_tensors
    return *[None] * 6, spmm(ptr_t, col_t, value_t, ptr, col, value, grad)


def _save_matrix(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])


spmm.register_autograd(_spmm_backward, setup_context=_save_matrix)


def _normalised(weight: Tensor, target: Tensor, relation: Tensor, num_nodes: int) -> Tensor:
    """Returns weight / sqrt(in-degree of target * mean degree), sums of the relation's weights.

    GCN (Kipf and Welling 2017) has the source's out-degree in place of the mean, so that the loss
    of a node would count the less for each neighbour, the more it has.
    """
    mean = relation.bincount(weight)[relation] / num_nodes
    target = relation * num_nodes + target
    return weight * (mean * target.bincount(weight)[target]).rsqrt()
