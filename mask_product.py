"""Sparse products with the adjacency matrices of all relations at once.

Shapes: N nodes, R relations, H channels, B samples in the batch, P perturbed nodes in the batch, b
samples of a block of the batch.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.index import index2ptr

# torch warns once per process about sparse tensors, but users cannot do anything about it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")


class CSR(NamedTuple):
    """A sparse matrix with M rows in compressed row format."""

    ptr: Tensor  # int [M + 1], offset of the entries of each row
    col: Tensor  # int [entries]
    value: Tensor  # [entries]


class RelationMatrix(NamedTuple):
    """The adjacency matrices of R relations, stacked vertically, [M, N].

    If only rows with edges are stored, `relation` and `node` are the relation and the node of each
    row, long [M]. If all R * N rows are stored, both are None.
    """

    csr: CSR
    relation: Tensor | None
    node: Tensor | None


class RelationStack(nn.Module):
    """The matrices A_r of all relations as one CSR matrix [R * N, N], and their transposes.

    If few of the rows have edges, only these M rows are stored. Otherwise, empty rows would take
    nearly all of the time.
    """

    SPARSE = 0.5  # below this share of rows with edges, empty rows are left out (measured)

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
        for name, row_node, col in (("by_target", target, source), ("by_source", source, target)):
            row = relation * num_nodes + row_node
            order = torch.argsort(row * num_nodes + col)
            row = row[order]
            stored, place = row.unique_consecutive(return_inverse=True)
            stored_relation = stored_node = None
            num_rows = num_relations * num_nodes
            if len(stored) < self.SPARSE * num_rows:
                num_rows = len(stored)
                row = place
                stored_relation = stored // num_nodes
                stored_node = stored % num_nodes
            self._buffer(f"{name}_ptr", index2ptr(row, num_rows).int())
            self._buffer(f"{name}_col", col[order].int())
            self._buffer(f"{name}_weight", weight[order])
            self._buffer(f"{name}_relation", stored_relation)
            self._buffer(f"{name}_node", stored_node)

    def _buffer(self, name: str, tensor: Tensor | None) -> None:
        self.register_buffer(name, tensor, persistent=False)

    @property
    def by_target(self) -> RelationMatrix:
        """A matrix whose row r * N + i has the edges of relation r that lead to node i."""
        csr = CSR(self.by_target_ptr, self.by_target_col, self.by_target_weight)
        return RelationMatrix(csr, self.by_target_relation, self.by_target_node)

    @property
    def by_source(self) -> RelationMatrix:
        """A matrix whose row r * N + i has the edges of relation r that leave node i."""
        csr = CSR(self.by_source_ptr, self.by_source_col, self.by_source_weight)
        return RelationMatrix(csr, self.by_source_relation, self.by_source_node)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ x), [N, B, H]."""
        return _Propagate.apply(x, gate, self.by_target, self.by_source)


class _Propagate(torch.autograd.Function):
    """Implements `RelationStack.forward`; plain autograd would store the sums of each relation."""

    @staticmethod
    def forward(
        ctx, x: Tensor, gate: Tensor, by_target: RelationMatrix, by_source: RelationMatrix
    ) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.by_source = by_source
        sums = sparse_product(by_target.csr, x.flatten(1)).unflatten(1, x.shape[1:])
        return sum_relations(sums, gate, by_target, len(x))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gate = ctx.saved_tensors
        sums = sparse_product(ctx.by_source.csr, grad.flatten(1)).unflatten(1, x.shape[1:])
        grad_gate = sum_products(sums, x, ctx.by_source, len(gate))
        grad_x = sum_relations(sums, gate, ctx.by_source, len(x))
        return grad_x, grad_gate, None, None


def sum_relations(sums: Tensor, gate: Tensor, rows: RelationMatrix, num_nodes: int) -> Tensor:
    """Returns the sum over relations of gate * sums, [N, B, H]; overwrites sums [M, B, H]."""
    if rows.relation is None:
        sums = sums.view(len(gate), num_nodes, *sums.shape[1:])
        return sums.mul_(gate.view(len(gate), 1, 1, -1)).sum(0)
    sums.mul_(gate.index_select(0, rows.relation).unsqueeze(1))
    return sums.new_zeros(num_nodes, *sums.shape[1:]).index_add_(0, rows.node, sums)


def sum_products(sums: Tensor, x: Tensor, rows: RelationMatrix, num_relations: int) -> Tensor:
    """Returns the sum of x [N, B, H] * sums [M, B, H] over nodes and samples, [R, H]."""
    if rows.relation is None:
        return (sums.view(num_relations, *x.shape) * x).sum((1, 2))
    of_row = (sums * x.index_select(0, rows.node)).sum(1)
    return x.new_zeros(num_relations, x.size(2)).index_add_(0, rows.relation, of_row)


def sparse_product(matrix: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x in the dtype of x."""
    ptr, col, value = matrix
    num_rows = ptr.numel() - 1
    if col.numel() == 0 or x.is_meta:
        return x.new_zeros(num_rows, x.size(1))
    y = x.to(value.dtype)
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _segment_product(matrix, y).to(x.dtype)
    size = (num_rows, x.size(0))
    csr = torch.sparse_csr_tensor(ptr, col, value, size, check_invariants=False)
    out = y.new_empty(num_rows, y.size(1))
    # `csr @ y` would first fill its result with zeros, and autocast would lower the precision.
    torch.addmm(out, csr, y.contiguous(), beta=0, out=out)
    return out.to(x.dtype)


def _segment_product(matrix: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x with reproducible bits, unlike cuSPARSE."""
    sums = []
    for columns in x.split(64, dim=1):  # in blocks, because all messages of a block are stored
        messages = columns.index_select(0, matrix.col) * matrix.value.unsqueeze(1)
        sums.append(torch.segment_reduce(messages, "sum", offsets=matrix.ptr, initial=0))
    return torch.cat(sums, dim=1)


# ---- Messages that only the perturbed nodes send -------------------------------------------------
class Samples(NamedTuple):
    """A block of consecutive samples of a batch."""

    batch: Data
    first: int  # index of its first sample in the batch
    level: Tensor  # level of each node, 1 if intact and 0 if dead, [N, b]


def perturbed_of(samples: Samples) -> tuple[slice, int | None]:
    """Returns the slice of these samples' perturbed nodes, and the number of their out-edges.

    The number may be an upper bound. It is None if it is not known on the host.
    """
    batch, first, level = samples
    bound = batch.get("num_out_edges")
    if bound is not None and level.size(1) == batch.perturbed_ptr.numel() - 1:
        return slice(None), bound
    ends = [first, first + level.size(1)]
    if "starts" not in batch:
        return slice(*batch.perturbed_ptr[ends].tolist()), None
    nodes, edges = batch.starts[:, ends].tolist()
    return slice(*nodes), edges[1] - edges[0]


def messages_of_perturbed(
    x: Tensor, gate: Tensor, samples: Samples, out_ptr: Tensor, by_source: CSR
) -> tuple[Tensor, Tensor]:
    """Returns the targets [M] and the values [M, H] of the perturbed nodes' changed messages.

    A target is an index of the states [N * b]. A value is the message that a perturbed node, with
    its state in x [N, H], sends along an edge, minus its message at level 1. `out_ptr` is that of
    `SharedGraph`, and `by_source` is the matrix of its stack. For a block of a batch without
    `starts`, the host waits for the GPU.
    """
    batch = samples.batch
    size = samples.level.size(1)
    nodes, bound = perturbed_of(samples)
    perturbed = batch.perturbed[nodes]
    sample = batch.perturbed_batch[nodes] - samples.first
    relation = torch.arange(len(gate), device=x.device)
    row = (relation * len(x) + perturbed.unsqueeze(1)).flatten()  # [P * R]
    start = out_ptr.index_select(0, row)
    length = out_ptr.index_select(0, row + 1) - start
    change = (batch.level[nodes] - 1).to(x.dtype).unsqueeze(1) * x.index_select(0, perturbed)
    sent = (change.unsqueeze(1) * gate).flatten(0, 1)  # [P * R, H]

    # Segment k * R + r holds the edges of relation r that leave perturbed node number k. The last
    # segment fills the rest up to the bound with zero messages along arbitrary edges.
    number = torch.arange(int(length.sum()) if bound is None else bound, device=x.device)
    end = length.cumsum(0)
    segment = torch.searchsorted(end, number, right=True)
    sent = nn.functional.pad(sent, (0, 0, 0, 1))
    sample = nn.functional.pad(sample, (0, 1))
    # Offset of the edge relative to its number.
    first = nn.functional.pad(start - end + length, (0, 1))
    _, col, weight = by_source
    edge = (number + first.index_select(0, segment)).remainder(max(1, len(col)))
    node = col.index_select(0, edge).long()
    state = node * size + sample.index_select(0, segment // len(relation))
    weight = weight.index_select(0, edge).to(x.dtype).unsqueeze(1)
    return state, sent.index_select(0, segment) * weight
