"""One graph shared by every sample: its topology on one device, and the nodes and edges that each sample removes.

A sample knocks out a few nodes, and every edge that touches one of them is dead. Because exactly the edges of dead
nodes are masked and summation is linear, aggregation over the live edges of B samples needs no copy of the graph:

    sum over live edges = keep * (A @ (keep * X))        X: [N, B, H], keep: [N, B, 1], A: one shared [N, N] matrix

`SharedGraph.keep` and `SharedGraph.propagate` compute the two factors, keep and A. Layers that need per-edge values
(attention, say) use `expand` and `edge_masks`: B block-diagonal copies of the graph and a boolean per copied edge. Most
states do not differ from the intact graph's; `ReachPlanner` lists those that do, for a model that computes only these.

Shapes: N nodes, R relations, E edges over all relations, E_r edges of relation r, H channels, B samples in the batch,
P knocked-out nodes in the batch, D dead edges in the batch.
"""

import warnings
from functools import partialmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.typing import EdgeType

# torch warns once per process about sparse tensors, which users can do nothing about.
for _message in "Sparse CSR tensor support is in beta state", "Sparse invariant checks are implicitly disabled":
    warnings.filterwarnings("ignore", message=_message)


class SharedGraph(nn.Module):
    """The graph's topology on one device, without parameters or entries in the state dict.

    All tensors except `degree` are non-persistent buffers, so one `.to(device)` moves the graph. Keep it out of the
    module that DDP wraps, or DDP broadcasts it in every forward pass. Batches come from `data.KnockoutDataset`; one
    on another device raises `RuntimeError`. Methods that take a batch never synchronise with the host.

    Args:
        graph: a `HeteroData` whose edge types all connect `node_type` with itself, each with an `edge_index` [2, E_r]
            and, unless all are 1, `edge_weight` [E_r], positive; nodes may have features `x` [N, F].
        node_type: the type of the nodes that are knocked out.

    Raises:
        ValueError: there are no edge types, or one has another node type, a wrong shape or a node outside [0, N).
    """

    DENSITY = 0.007  # share of all N * N edges from which a relation is cheaper as a dense matrix on tensor cores

    def __init__(self, graph: HeteroData, node_type: str = "gene"):
        super().__init__()
        self.num_nodes = num_nodes = int(graph[node_type].num_nodes)
        self.relations: list[EdgeType] = list(graph.edge_types)
        if not self.relations:
            raise ValueError("the graph has no edge types")
        edges = [_edge_index(graph, relation, node_type) for relation in self.relations]
        counts = [edge_index.size(1) for edge_index in edges]
        self.num_edges: dict[EdgeType, int] = dict(zip(self.relations, counts, strict=True))
        self.edge_ranges = [(sum(counts[:r]), count) for r, count in enumerate(counts)]  # (first edge, number of edges)

        edge_index = torch.cat(edges, dim=1)
        source, target = edge_index
        relation = torch.repeat_interleave(torch.tensor(counts))
        self.index_dtype = torch.int32 if edge_index.size(1) < 2**31 else torch.int64

        # Incidence as CSR with one row per (node, relation): row n * R + r lists the edges of r that touch n.
        proper = (source != target).nonzero().squeeze(1)  # list self-loops once
        incident = torch.cat([torch.arange(len(source)), proper])
        rows, order = (torch.cat([source, target[proper]]) * len(counts) + relation[incident]).sort(stable=True)
        self._buffer("incidence", incident[order].to(self.index_dtype))
        self._buffer("incidence_ptr", index2ptr(rows, num_nodes * len(counts)))
        self.degree = self.incidence_ptr[:: len(counts)].diff()  # edges that die with each node, [N], always on the CPU

        # As in GCN (Kipf and Welling 2017), per relation: weight / sqrt(out-degree of source * in-degree of target).
        weight = torch.cat([graph[r].get("edge_weight", torch.ones(n)) for r, n in self.num_edges.items()]).double()
        sender, receiver = relation * num_nodes + source, relation * num_nodes + target
        norm = sender.bincount(weight)[sender] * receiver.bincount(weight)[receiver]
        self._buffer("x", graph[node_type].get("x", torch.empty(num_nodes, 0)).float())
        self._buffer("edge_index", edge_index)
        self._buffer("edge_weight", (weight * norm.rsqrt()).float())
        self._buffer("dense", None)  # see `densify`

        # For each relation: its number of edges, and the id of its first edge.
        self._buffer("edge_counts", torch.tensor(counts))
        self._buffer("edge_offsets", self.edge_counts.cumsum(0) - self.edge_counts)
        self._store("", torch.arange(len(counts)))
        # The memory that `edge_masks` reuses, and the positions that its last call set to False.
        self._buffer("alive", torch.ones(0, dtype=torch.bool))
        self._buffer("last_dead", torch.empty(0, dtype=torch.long))

    _buffer = partialmethod(nn.Module.register_buffer, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    def check(self, batch: Data) -> int:
        """Returns the number of samples B; raises `RuntimeError` if the batch is on another device than the graph."""
        if batch.perturbed.device != self.device:
            advice = f"call batch = batch.to('{self.device}') before the model sees it"
            raise RuntimeError(f"the batch is on {batch.perturbed.device} but the graph is on {self.device}: {advice}")
        return batch.perturbed_ptr.numel() - 1

    def keep(self, batch: Data) -> Tensor:
        """Returns bool [N, B], True where the node is alive in the sample."""
        keep = torch.ones(self.num_nodes, self.check(batch), dtype=torch.bool, device=self.device)
        return keep.index_put_((batch.perturbed, batch.perturbed_batch), keep.new_zeros(()))

    def dead_edges(self, batch: Data) -> Tensor:
        """Returns the flat ids of the dead edges, long [D], in O(D); an edge between two dead nodes is listed twice.

        An id is a position in `torch.cat(list(edge_masks(batch).values()))`: by relation, sample, then `edge_index`.
        """
        num_samples, size = self.check(batch), len(self.relations)
        ptr = self.incidence_ptr.unfold(0, size + 1, size).index_select(0, batch.perturbed)  # [P, R + 1]
        start, length = ptr.narrow(1, 0, size).flatten(), ptr.diff().flatten()
        # Dead edge i, in segment s = p * R + r, is entry start[s] + (i - first[s]) of the incidence lists.
        segment = torch.repeat_interleave(length, output_size=batch.num_dead_edges)
        first = length.cumsum(0) - length
        position = (start - first).index_select(0, segment)
        position.add_(torch.arange(batch.num_dead_edges, device=self.device))
        base = batch.perturbed_batch.unsqueeze(1) * self.edge_counts + (num_samples - 1) * self.edge_offsets
        return base.flatten().index_select(0, segment).add_(self.incidence.index_select(0, position))

    def edge_masks(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True where the edge is alive; sample k is `[k * E_r, (k + 1) * E_r)`.

        The next call reuses their memory, because filling B * E bytes is most of the cost: do not modify the masks, and
        clone what must outlive it. A backward pass through earlier masks raises autograd's in-place `RuntimeError`.
        """
        num_samples = self.check(batch)
        dead, size = self.dead_edges(batch), num_samples * self.edge_index.size(1)
        if self.alive.numel() < size:
            self.alive = torch.ones(size, dtype=torch.bool, device=self.device)
        else:
            self.alive.index_fill_(0, self.last_dead, True)
        self.alive.index_fill_(0, dead, False)
        self.last_dead = dead
        masks = self.alive.narrow(0, 0, size).split([num_samples * count for count in self.num_edges.values()])
        return dict(zip(self.relations, masks, strict=True))

    def expand(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: long [2, B * E_r]}, block-diagonal edge indices; node n of sample k is `k * N + n`."""
        num_samples = self.check(batch)
        offset = torch.arange(num_samples, device=self.device).view(1, -1, 1) * self.num_nodes
        blocks = [(self.edge_index.narrow(1, *part).unsqueeze(1) + offset).flatten(1) for part in self.edge_ranges]
        return dict(zip(self.relations, blocks, strict=True))

    def weight(self, relation: int) -> Tensor:
        """Returns the relation's fixed edge weights, float [E_r], in the order of its `edge_index`."""
        return self.edge_weight.narrow(0, *self.edge_ranges[relation])

    def propagate(self, x: Tensor, gate: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ (keep * x)), [N, B, H], for x [N, B, H].

        `gate` is [R, H], `keep` [N, B]; without them, all are ones. Sums of dead nodes, which nothing reads, stay.
        Products are in the graph's dtype, those of dense relations under autocast in `densify`'s; the result is in x's.
        """
        x = x if keep is None else keep.unsqueeze(-1) * x
        value = x.to(self.edge_weight.dtype)
        gate = (x.new_ones(len(self.relations), x.size(2)) if gate is None else gate).to(value.dtype)
        if self.dense is None or not torch.is_autocast_enabled(x.device.type):
            return _Propagate.apply(value, gate, *self._stored("")).to(x.dtype)
        messages = value * gate.index_select(0, self.dense_ids).view(-1, 1, 1, x.size(2))
        messages = nn.functional.pad(messages.to(self.dense.dtype), (0, 0, 0, 0, 0, -len(x) % 8))
        sums = self.dense @ messages.view(self.dense.size(1), -1)
        others = _Propagate.apply(value, gate.index_select(0, self.sparse_ids), *self._stored("sparse_"))
        return (others + sums.view_as(x)).to(x.dtype)

    def densify(self, dtype: torch.dtype) -> list[str]:
        """Makes `propagate` take dense relations as one matrix of `dtype` under autocast; returns their names.

        It takes at most an eighth of the free GPU memory. Rows are padded to 16-byte multiples, or cuBLAS is slow.
        """
        size = self.num_nodes + -self.num_nodes % 8
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 2**63
        fit = free // (8 * self.num_nodes * size * dtype.itemsize)
        dense = [r for r, (_, count) in enumerate(self.edge_ranges) if count > self.DENSITY * self.num_nodes**2]
        if dense := dense[:fit]:
            matrix = torch.zeros(self.num_nodes, len(dense), size, dtype=dtype, device=self.device)
            for i, r in enumerate(dense):
                source, target = self.edge_index.narrow(1, *self.edge_ranges[r])
                matrix[:, i].index_put_((target, source), self.weight(r).to(dtype), accumulate=True)
            sparse = [r for r in range(len(self.relations)) if r not in dense]
            self._buffer("dense", matrix.flatten(1))
            self._buffer("dense_ids", torch.tensor(dense, device=self.device))
            self._buffer("sparse_ids", torch.tensor(sparse, dtype=torch.long, device=self.device))
            self._store("sparse_", self.sparse_ids)
        return [self.relations[r][1] for r in dense]

    def _store(self, prefix: str, relations: Tensor) -> None:
        """Stores the A_r of some relations, in order, and their transposes, each as one CSR matrix [n * N, N]."""
        relation = torch.repeat_interleave(self.edge_counts)
        edges = torch.isin(relation, relations).nonzero().squeeze(1)
        first_row = torch.searchsorted(relations, relation[edges]) * self.num_nodes  # of the edge's relation
        source, target = self.edge_index[:, edges]
        for name, row, col in (("forward", first_row + target, source), ("backward", first_row + source, target)):
            order = torch.argsort(row * self.num_nodes + col)
            ptr = index2ptr(row[order], len(relations) * self.num_nodes)
            self._buffer(f"{prefix}{name}_ptr", ptr.to(self.index_dtype))
            self._buffer(f"{prefix}{name}_col", col[order].to(self.index_dtype))
            self._buffer(f"{prefix}{name}_weight", self.edge_weight[edges[order]])

    def _stored(self, prefix: str) -> list[Tensor]:
        names = "forward_ptr", "forward_col", "forward_weight", "backward_ptr", "backward_col", "backward_weight"
        return [getattr(self, prefix + name) for name in names]


class ReachedRows(NamedTuple):
    """The states that differ from the intact graph's after one layer, in a block of samples, by sample and node.

    Its matrix [S, C * (R + 1)] sums what the C senders contribute to them: the dead nodes, and the states that differed
    before the layer. Column c * (R + 1) + r holds the out-edges of sender c by relation r, the last the sender itself.
    """

    node: Tensor  # long [S]
    sample: Tensor  # long [S], counted from the block's first sample
    previous: Tensor  # long, the position of each state of the layer before among these
    matrix: tuple[Tensor, ...]  # for `spmm`


class ReachBlock(NamedTuple):
    """What the knock-outs of some consecutive samples of a batch change, in the first `len(layers)` layers."""

    num_samples: int
    dead: Tensor  # long, the knocked-out nodes, one sample after another
    layers: list[ReachedRows]
    row_ptr: list[int]  # the last layer's rows of sample k are `row_ptr[k] : row_ptr[k + 1]`


class ReachPlanner:
    """Finds the states that knock-outs change, layer by layer, from the topology alone, on the CPU.

    A layer changes the living out-neighbours of the dead nodes and of the nodes that the layer before has changed. As
    the `transform` of a `data.KnockoutDataset` it adds `reach` to each batch, a list of `ReachBlock`. A block's plan
    ends before the first layer that is cheaper on all nodes.
    """

    BLOCK = 32  # samples whose reached states stay in cache
    # A layer on all nodes costs as much as this share of the edges and so many edges per node in a plan (measured).
    MAX_EDGES = 0.04, 13.0

    def __init__(self, graph: SharedGraph, num_layers: int):
        self.num_nodes, self.num_layers = graph.num_nodes, num_layers
        self.max_edges = self.MAX_EDGES[0] * sum(graph.num_edges.values()) + self.MAX_EDGES[1] * graph.num_nodes
        # Out-edges by relation, and from each node to itself.
        ptr = graph.backward_ptr.cpu().unfold(0, graph.num_nodes + 1, graph.num_nodes)
        loops, weight = torch.arange(graph.num_nodes + 1), graph.backward_weight.cpu()
        self.ptr = torch.cat([ptr, len(weight) + loops.unsqueeze(0)]).numpy()  # [R + 1, N + 1]
        self.col = torch.cat([graph.backward_col.cpu(), loops[:-1]]).numpy()
        self.weight = torch.cat([weight, weight.new_ones(graph.num_nodes)])
        self.position = np.zeros(self.BLOCK * graph.num_nodes, dtype=np.int32)  # of a state; -1 where the node is dead

    def __call__(self, batch: Data) -> Data:
        """Adds `reach` to a batch on the CPU, and returns it."""
        ptr = batch.perturbed_ptr.tolist()
        starts = range(0, len(ptr) - 1, self.BLOCK)
        batch.reach = [self._block(batch, ptr[start : start + self.BLOCK + 1], start) for start in starts]
        return batch

    def _block(self, batch: Data, ptr: list[int], first: int) -> ReachBlock:
        part, num_samples = slice(ptr[0], ptr[-1]), len(ptr) - 1
        node = batch.perturbed[part]
        dead = (node + (batch.perturbed_batch[part] - first) * self.num_nodes).numpy()  # states are sample * N + node
        self.position[dead] = -1
        layers, states = [], dead[:0]
        for _ in range(self.num_layers):
            senders = np.concatenate([dead, states])
            sender = senders % self.num_nodes
            start = self.ptr[:, sender].T.ravel()
            length = self.ptr[:, sender + 1].T.ravel() - start
            if length.sum() > num_samples * self.max_edges:
                break
            column = np.repeat(np.arange(len(length), dtype=np.int32), length)
            edge = np.arange(len(column)) + np.repeat(start - length.cumsum() + length, length)
            target = np.repeat(senders - sender, length.reshape(-1, len(self.ptr)).sum(1)) + self.col[edge]
            alive = self.position[target] >= 0
            column, edge, target = column[alive], edge[alive], target[alive]
            self.position[target] = np.arange(len(target))  # the last edge into a state stays: it stands for the state
            reached = np.sort(target[self.position[target] == np.arange(len(target))])
            self.position[reached] = np.arange(len(reached))
            row, column, weight = torch.from_numpy(self.position[target]), torch.from_numpy(column), self.weight[edge]
            order = torch.argsort(row, stable=True)
            matrix = (index2ptr(row[order], len(reached)), column[order], weight[order])
            matrix += (index2ptr(column, len(length)), row, weight)
            sample, reached_node = map(torch.from_numpy, np.divmod(reached, self.num_nodes))
            layers.append(ReachedRows(reached_node, sample, torch.from_numpy(self.position[states]).long(), matrix))
            states = reached
        self.position[dead] = 0
        row_ptr = np.searchsorted(states, np.arange(num_samples + 1) * self.num_nodes).tolist()
        return ReachBlock(num_samples, node, layers, row_ptr)


class _Propagate(torch.autograd.Function):
    """`SharedGraph.propagate` for stacked matrices; autograd alone would keep the sums of each relation for gate."""

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
        return sums.mul_(gate.view(-1, 1, 1, x.size(2))).sum(0), grad_gate, *(None,) * 6


@torch.library.custom_op("shared_graph::spmm", mutates_args=())
def spmm(ptr: Tensor, col: Tensor, value: Tensor, ptr_t: Tensor, col_t: Tensor, value_t: Tensor, x: Tensor) -> Tensor:
    """Returns A @ x, in the dtype of x, for a CSR matrix A, given with its transpose for the backward pass.

    A custom op: autograd's own sparse product sorts the transpose in each backward pass and cannot be traced.
    """
    y, size = x.to(value.dtype), (ptr.numel() - 1, x.size(0))
    if col.numel() == 0:
        return x.new_zeros(size[0], x.size(1))
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _segment_product(ptr, col, value, y).to(x.dtype)
    matrix = torch.sparse_csr_tensor(ptr, col, value, size, check_invariants=False)
    out = y.new_empty(size[0], y.size(1))
    with torch.autocast(x.device.type, enabled=False):  # sparse products do not support half precision
        torch.addmm(out, matrix, y.contiguous(), beta=0, out=out)  # matrix @ y would first fill it with zeros
    return out.to(x.dtype)


def _segment_product(ptr: Tensor, col: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """Returns A @ x with the same bits each time, unlike cuSPARSE; 64 columns at once, as it keeps all messages."""
    messages = (columns.index_select(0, col) * value.unsqueeze(1) for columns in x.split(64, dim=1))
    return torch.cat([torch.segment_reduce(part, "sum", offsets=ptr, initial=0) for part in messages], dim=1)


def _spmm_backward(ctx, grad):
    *forward, ptr_t, col_t, value_t = ctx.saved_tensors  # activation checkpointing allows reading this once
    return *(None,) * 6, spmm(ptr_t, col_t, value_t, *forward, grad)


# Contiguous like the result, for any strides of x.
spmm.register_fake(lambda ptr, col, value, ptr_t, col_t, value_t, x: x.new_empty(ptr.numel() - 1, x.size(1)))
spmm.register_autograd(_spmm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:6]))


def _edge_index(graph: HeteroData, relation: EdgeType, node_type: str) -> Tensor:
    if (relation[0], relation[2]) != (node_type, node_type):
        raise ValueError(f"edge type {relation} does not connect '{node_type}' with itself")
    edge_index = graph[relation].edge_index.cpu().long()
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index of {relation} has shape {tuple(edge_index.shape)}, not [2, E]")
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < graph[node_type].num_nodes:
        raise ValueError(f"edge_index of {relation} contains a node outside [0, {graph[node_type].num_nodes})")
    return edge_index
