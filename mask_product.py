"""Sparse products with the adjacency matrices of all relations at once.

`RelationStack` sums the messages of all nodes. `messages_of_perturbed` computes only the messages
that perturbed nodes change.

Shapes: N nodes, E edges of all relations, R relations, H channels, B samples in the batch, P
perturbed nodes in the batch, b samples in a block of the batch.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.index import index2ptr

# torch warns once per process about sparse tensors, but users cannot change anything about it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")


class CSR(NamedTuple):
    """A sparse matrix with M rows in compressed sparse row format, as in `torch.sparse_csr`."""

    ptr: Tensor  # int [M + 1], offset of the entries of each row
    col: Tensor  # int [entries], column of each entry
    value: Tensor  # [entries], value of each entry


class RelationMatrix(nn.Module):
    """The adjacency matrices of R relations, [N, N] each, stacked vertically, [M, N].

    If all rows are stored, M is R * N, row r * N + i belongs to relation r and node i, and
    `relation` and `node` are None. If less than half of the rows have edges, only these rows are
    stored, because a product would spend nearly all of its time on empty rows. `relation` and
    `node` are then the relation and the node of each row, long [M].

    Args:
        edge_index: row node and column node of each edge, long [2, E].
        relation: relation of each edge, long [E].
        weight: weight of each edge, [E].
    """

    SPARSE = 0.5  # below this fraction of rows with edges, empty rows are not stored (measured)

    def __init__(
        self,
        edge_index: Tensor,
        relation: Tensor,
        weight: Tensor,
        num_relations: int,
        num_nodes: int,
    ):
        super().__init__()
        row_node, col = edge_index
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
        self.register_buffer("ptr", index2ptr(row, num_rows).int(), persistent=False)
        self.register_buffer("col", col[order].int(), persistent=False)
        self.register_buffer("value", weight[order], persistent=False)
        self.register_buffer("relation", stored_relation, persistent=False)
        self.register_buffer("node", stored_node, persistent=False)

    @property
    def csr(self) -> CSR:
        return CSR(self.ptr, self.col, self.value)


class RelationStack(nn.Module):
    """The matrices A_r of all relations, and also their transposes.

    A_r[i, j] is the weight of the edge of relation r that leads from node j to node i. In
    `by_target`, row r * N + i has the edges of relation r that lead to node i. In `by_source`, it
    has the edges that leave node i.

    The arguments are those of `RelationMatrix`; `edge_index` has the source and the target of each
    edge.
    """

    def __init__(self, edge_index: Tensor, *arguments: Any):
        super().__init__()
        self.by_source = RelationMatrix(edge_index, *arguments)
        self.by_target = RelationMatrix(edge_index.flip(0), *arguments)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum over the relations r of gate_r * (A_r @ x), [N, B, H].

        `x` [N, B, H] are the states of the nodes in each sample, and `gate` is [R, H].
        """
        return _Propagate.apply(x, gate, self.by_target, self.by_source)


class _Propagate(torch.autograd.Function):
    """Implements `RelationStack.forward` with its gradients.

    It stores only x and gate for the backward pass. Autograd would also store the sums of each
    relation, [M, B, H].
    """

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
    """Returns the sum over the relations of gate * sums, [N, B, H]. It overwrites `sums`.

    Args:
        sums: a sum for each row of `rows` and each sample, [M, B, H].
        gate: factor of each relation and channel, [R, H].
        rows: the matrix whose product gave `sums`. It gives the relation and the node of each row.
        num_nodes: N.
    """
    if rows.relation is None:
        sums = sums.view(len(gate), num_nodes, *sums.shape[1:])
        return sums.mul_(gate.view(len(gate), 1, 1, -1)).sum(0)
    sums.mul_(gate.index_select(0, rows.relation).unsqueeze(1))
    return sums.new_zeros(num_nodes, *sums.shape[1:]).index_add_(0, rows.node, sums)


def sum_products(sums: Tensor, x: Tensor, rows: RelationMatrix, num_relations: int) -> Tensor:
    """Returns the sum of x * sums over the nodes and the samples, for each relation, [R, H].

    `x` [N, B, H] has a state for each node, and `sums` [M, B, H] has a sum for each row of `rows`.
    The result is the gradient of the gates.
    """
    if rows.relation is None:
        return (sums.view(num_relations, *x.shape) * x).sum((1, 2))
    of_row = (sums * x.index_select(0, rows.node)).sum(1)
    return x.new_zeros(num_relations, x.size(2)).index_add_(0, rows.relation, of_row)


def sparse_product(matrix: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x, [M, columns], in the dtype of x [N, columns]."""
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
    # `csr @ y` would first fill its result with zeros, and autocast would reduce its precision.
    torch.addmm(out, csr, y.contiguous(), beta=0, out=out)
    return out.to(x.dtype)


def _segment_product(matrix: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x with reproducible bits, which cuSPARSE does not guarantee.

    It computes the message of each entry, and then sums the messages of each row.
    """
    sums = []
    for columns in x.split(64, dim=1):  # in blocks, because all messages of a block are stored
        messages = columns.index_select(0, matrix.col) * matrix.value.unsqueeze(1)
        sums.append(torch.segment_reduce(messages, "sum", offsets=matrix.ptr, initial=0))
    return torch.cat(sums, dim=1)


# ---- Messages of the perturbed nodes -------------------------------------------------------------
class Samples(NamedTuple):
    """A block of b consecutive samples of a batch."""

    batch: Data
    first: int  # index of the block's first sample in the batch
    level: Tensor  # level of each node in each sample of the block, 1 if intact, 0 if dead, [N, b]


def perturbed_of(samples: Samples) -> tuple[slice, int | None]:
    """Returns the slice of a block's nodes in `batch.perturbed`, and the number of their edges.

    The number counts the edges that leave these nodes. If the block is a complete batch with a
    field `num_out_edges`, the number is this field, which is an upper bound. Otherwise, the number
    is exact. It is None if the batch has no field `starts`, because only the device can compute it.
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
    """Returns the M changes of messages that the perturbed nodes of a block cause.

    There is one change for each edge that leaves a perturbed node, in each sample that perturbs the
    node. A change is the message at the node's level minus its message at level 1, which is
    (level - 1) * weight * gate * x. The number M may include padding, with changes of 0.

    If the batch has no field `starts`, the host has to wait for the GPU.

    Args:
        x: states of the nodes, the same in all samples, [N, H].
        gate: factor of each relation and channel, [R, H].
        samples: the block.
        out_ptr: offsets of each node's edges in `by_source`, `SharedGraph.out_ptr`.
        by_source: the edges sorted by relation and source, `RelationStack.by_source.csr`.

    Returns:
        The index of each change's target in the states [N, b, H], flattened to [N * b, H], long
        [M]; and the changes, [M, H].
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

    # Segment k * R + r has the edges of relation r that leave perturbed node number k. If `bound`
    # is larger than the number of these edges, the difference is padding. It is the last segment,
    # with messages of 0 along arbitrary edges.
    number = torch.arange(int(length.sum()) if bound is None else bound, device=x.device)
    end = length.cumsum(0)
    segment = torch.searchsorted(end, number, right=True)
    sent = nn.functional.pad(sent, (0, 0, 0, 1))
    sample = nn.functional.pad(sample, (0, 1))
    # Edge number i, in segment s, is entry i + first[s] of `by_source`.
    first = nn.functional.pad(start - end + length, (0, 1))
    _, col, weight = by_source
    edge = (number + first.index_select(0, segment)).remainder(max(1, len(col)))
    node = col.index_select(0, edge).long()
    state = node * size + sample.index_select(0, segment // len(relation))
    weight = weight.index_select(0, edge).to(x.dtype).unsqueeze(1)
    return state, sent.index_select(0, segment) * weight
