"""One graph shared by every sample: its topology on one device, and the nodes and edges that each sample removes.

A sample knocks out a few nodes, and every edge that touches one of them is dead. Because exactly the edges of dead
nodes are masked and summation is linear, aggregation over the live edges of B samples needs no copy of the graph:

    sum over live edges = keep * (A @ (keep * X))        X: [N, B, H], keep: [N, B, 1], A: one shared [N, N] matrix

`SharedGraph.keep` and `SharedGraph.propagate` compute the two factors, keep and A. Layers that need per-edge values
(attention, say) use `expand` and `edge_masks`: B block-diagonal copies of the graph and a boolean per copied edge.

Shapes: N nodes, R relations, E edges over all relations, E_r edges of relation r, H channels, B samples in the batch,
P knocked-out nodes in the batch, D dead edges in the batch.
"""

import warnings

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

EdgeType = tuple[str, str, str]

# torch warns once per process that CSR is in beta, which users can do nothing about.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


class SharedGraph(nn.Module):
    """The graph's topology on one device, without parameters or entries in the state dict.

    All tensors except `degree` are non-persistent buffers, so one `.to(device)` moves the graph. Keep it out of the
    module that DDP wraps, or DDP broadcasts it in every forward pass. Batches come from `data.KnockoutDataset`; one
    on another device raises `RuntimeError`. Methods that take a batch never synchronise with the host.

    Args:
        graph: a `HeteroData` whose edge types all connect `node_type` with itself, each with an `edge_index` [2, E_r].
        node_type: the type of the nodes that are knocked out.

    Raises:
        ValueError: there are no edge types, or one has another node type, a wrong shape or a node outside [0, N).
    """

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
        relation = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.long))
        index_dtype = torch.int32 if edge_index.size(1) < 2**31 else torch.int64

        # Incidence as CSR with one row per (node, relation): row n * R + r lists the edges of r that touch n.
        edge_id = torch.arange(edge_index.size(1))
        proper = source != target  # list self-loops once
        rows = torch.cat([source, target[proper]]) * len(counts) + torch.cat([relation, relation[proper]])
        incident = torch.cat([edge_id, edge_id[proper]])
        order = torch.argsort(rows, stable=True)
        self._buffer("incidence", incident[order].to(index_dtype))
        self._buffer("incidence_ptr", _row_pointer(rows, num_nodes * len(counts)))
        self.degree = self.incidence_ptr[:: len(counts)].diff()  # edges that die with each node, [N], always on the CPU

        # Weights as in GCN (Kipf and Welling 2017), per relation: 1 / sqrt(out-degree of source * in-degree of target).
        out_degree = torch.bincount(relation * num_nodes + source, minlength=num_nodes * len(counts))
        in_degree = torch.bincount(relation * num_nodes + target, minlength=num_nodes * len(counts))
        norm = out_degree[relation * num_nodes + source] * in_degree[relation * num_nodes + target]
        weight = norm.double().rsqrt().float()
        self._buffer("edge_index", edge_index)
        self._buffer("edge_weight", weight)

        # A (rows are targets) and, for the backward pass, its transpose, as one CSR matrix per relation.
        forward_order = torch.argsort((relation * num_nodes + target) * num_nodes + source)
        backward_order = torch.argsort((relation * num_nodes + source) * num_nodes + target)
        forward_ptr = torch.stack([_row_pointer(rows, num_nodes) for rows in target.split(counts)])
        backward_ptr = torch.stack([_row_pointer(rows, num_nodes) for rows in source.split(counts)])
        self._buffer("forward_ptr", forward_ptr.to(index_dtype))
        self._buffer("forward_col", source[forward_order].to(index_dtype))
        self._buffer("forward_weight", weight[forward_order])
        self._buffer("backward_ptr", backward_ptr.to(index_dtype))
        self._buffer("backward_col", target[backward_order].to(index_dtype))
        self._buffer("backward_weight", weight[backward_order])

        # For each relation: its number of edges, and the id of its first edge.
        self._buffer("edge_counts", torch.tensor(counts, dtype=torch.long))
        self._buffer("edge_offsets", self.edge_counts.cumsum(0) - self.edge_counts)
        self._buffer("relation_ids", torch.arange(len(counts)))
        # The memory that `edge_masks` reuses, and the positions that its last call set to False.
        self._buffer("alive", torch.ones(0, dtype=torch.bool))
        self._buffer("last_dead", torch.empty(0, dtype=torch.long))

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    def check(self, batch: Data) -> int:
        """Returns the number of samples B; raises `RuntimeError` if the batch is on another device than the graph."""
        if batch.perturbed.device != self.device:
            raise RuntimeError(
                f"the batch is on {batch.perturbed.device} but the graph is on {self.device}: "
                f"call batch = batch.to('{self.device}') before the model sees it"
            )
        return batch.perturbed_ptr.numel() - 1

    def keep(self, batch: Data) -> Tensor:
        """Returns bool [N, B], True where the node is alive in the sample."""
        num_samples = self.check(batch)
        keep = torch.ones(self.num_nodes * num_samples, dtype=torch.bool, device=self.device)
        keep.index_fill_(0, batch.perturbed * num_samples + batch.perturbed_batch, False)
        return keep.view(self.num_nodes, num_samples)

    def dead_edges(self, batch: Data) -> Tensor:
        """Returns the flat ids of the dead edges, long [D], in O(D); an edge between two dead nodes is listed twice.

        An id is a position in `torch.cat(list(edge_masks(batch).values()))`: ordered by relation, then by sample, then
        as in the relation's `edge_index`.
        """
        num_samples = self.check(batch)
        edge, segment = self._dead(batch)
        base = batch.perturbed_batch.unsqueeze(1) * self.edge_counts + (num_samples - 1) * self.edge_offsets
        if num_samples * self.edge_index.size(1) < 2**31:
            base = base.int()  # half the memory traffic
        return base.flatten().index_select(0, segment).add_(edge).long()

    def dead_messages(self, batch: Data) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns sample, relation, source, target and weight of dead edges, each [D], in the order of `dead_edges`."""
        self.check(batch)
        edge, segment = self._dead(batch)
        source, target = self.edge_index.index_select(1, edge)
        sample = batch.perturbed_batch.index_select(0, segment // len(self.relations))
        return sample, segment % len(self.relations), source, target, self.edge_weight.index_select(0, edge)

    def edge_masks(self, batch: Data) -> dict[EdgeType, Tensor]:
        """Returns {edge type: bool [B * E_r]}, True where the edge is alive; sample k is `[k * E_r, (k + 1) * E_r)`.

        The masks are valid until the next call, which reuses their memory and resets only the dead entries, because
        filling B * E bytes is most of the cost. Do not modify them; clone what must outlive the next call. A backward
        pass through masks of an earlier call raises autograd's `RuntimeError` about in-place modification.
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

    def propagate(self, relation: int, x: Tensor) -> Tensor:
        """Returns A_r @ x, [N, C], for x [N, C]: each node's weighted sum over its in-neighbours by one relation.

        The result has the dtype of x; the product is computed in the dtype of the graph's weights.
        """
        forward = self._block(relation, self.forward_ptr, self.forward_col, self.forward_weight)
        backward = self._block(relation, self.backward_ptr, self.backward_col, self.backward_weight)
        return _spmm(*forward, *backward, x.to(self.edge_weight.dtype)).to(x.dtype)

    def _block(self, relation: int, ptr: Tensor, col: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns one relation's CSR matrix from all relations' `ptr` [R, N + 1], `col` [E] and `weight` [E]."""
        part = self.edge_ranges[relation]
        return ptr.select(0, relation), col.narrow(0, *part), weight.narrow(0, *part)

    def _dead(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Returns edge ids [D] and segments [D]: p * R + r for an edge of relation r that touches `perturbed[p]`."""
        row = (batch.perturbed.unsqueeze(1) * len(self.relations) + self.relation_ids).flatten()
        start = self.incidence_ptr.index_select(0, row)
        length = self.incidence_ptr.index_select(0, row + 1) - start
        segment = torch.repeat_interleave(length, output_size=batch.num_dead_edges)
        # Dead edge i, in segment s, is entry start[s] + (i - first[s]) of the incidence lists.
        first = length.cumsum(0) - length
        position = (start - first).index_select(0, segment)
        position.add_(torch.arange(batch.num_dead_edges, device=self.device))
        return self.incidence.index_select(0, position), segment

    def _buffer(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)


@torch.library.custom_op("shared_graph::spmm", mutates_args=())
def _spmm(
    ptr: Tensor, col: Tensor, weight: Tensor, ptr_t: Tensor, col_t: Tensor, weight_t: Tensor, x: Tensor
) -> Tensor:
    """Returns A @ x for a CSR matrix A, given with its transpose for the backward pass.

    A custom op, because autograd's own sparse product would sort the transpose in every backward pass and cannot be
    traced with fake tensors.
    """
    if col.numel() == 0:
        return x.new_zeros(x.shape)
    matrix = torch.sparse_csr_tensor(ptr, col, weight, (ptr.numel() - 1, x.size(0)), check_invariants=False)
    with torch.autocast(x.device.type, enabled=False):  # sparse products do not support half precision
        return matrix @ x.contiguous()


@_spmm.register_fake
def _(ptr, col, weight, ptr_t, col_t, weight_t, x):
    return x.new_empty(x.shape)  # contiguous like the result, for any strides of x


def _spmm_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])


def _spmm_backward(ctx, grad):
    *forward, ptr_t, col_t, weight_t = ctx.saved_tensors  # activation checkpointing allows reading this once
    return *(None,) * 6, _spmm(ptr_t, col_t, weight_t, *forward, grad)


_spmm.register_autograd(_spmm_backward, setup_context=_spmm_setup_context)


def _edge_index(graph: HeteroData, relation: EdgeType, node_type: str) -> Tensor:
    if (relation[0], relation[2]) != (node_type, node_type):
        raise ValueError(f"edge type {relation} does not connect '{node_type}' with itself")
    edge_index = graph[relation].edge_index.cpu().long()
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index of {relation} has shape {tuple(edge_index.shape)}, not [2, E]")
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < graph[node_type].num_nodes:
        raise ValueError(f"edge_index of {relation} contains a node outside [0, {graph[node_type].num_nodes})")
    return edge_index


def _row_pointer(rows: Tensor, num_rows: int) -> Tensor:
    """Returns the row pointer of a CSR matrix, long [num_rows + 1], from the row of each entry."""
    pointer = torch.zeros(num_rows + 1, dtype=torch.long)
    pointer[1:] = torch.bincount(rows, minlength=num_rows).cumsum(0)
    return pointer
