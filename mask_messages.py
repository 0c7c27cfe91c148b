"""Messages between the living nodes of a batch, without copies of the graph.

Shapes: N nodes, R relations, H channels, B samples in the batch, P perturbed nodes in the batch.
"""

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from mask import SharedGraph


class SharedMessages:
    """Sums over the living edges of some samples of a batch, as products with the shared graph.

    States [N, 1, H], which are alike in all samples, are summed once. As summation is linear, what
    the perturbed nodes of each sample send more than 1 times their state is added at the ends of
    their edges. Of these, a batch can bring a bound, `num_out_edges`; else, a GPU's host waits.

    Args:
        level: of each node in b samples of the batch, [N, b], the first of which is number `first`.
    """

    def __init__(self, graph: SharedGraph, batch: Data, level: Tensor, first: int = 0):
        self.graph = graph
        self.batch = batch
        self.level = level
        self.first = first

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns `SharedGraph.propagate` of x, [N, b, H] or [N, 1, H], at these levels."""
        size = self.level.size(1)
        if x.size(1) == size:
            return self.graph.propagate(x, gate, self.level)
        sums = self.graph.propagate(x, gate).expand(-1, size, -1)
        state, message = self.changes(x.squeeze(1), gate)
        return sums.flatten(0, 1).index_add(0, state, message).view(sums.shape)

    def changes(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which of the states [N * b] each message reaches, [M], and the messages, [M, H].

        A message is what a perturbed node, whose state is a row of x [N, H], sends along an edge,
        less what it sends at level 1.
        """
        graph, batch = self.graph, self.batch
        size = self.level.size(1)
        relation = torch.arange(len(graph.relations), device=x.device)
        row = (relation * graph.num_nodes + batch.perturbed.unsqueeze(1)).flatten()  # [P * R]
        sample = batch.perturbed_batch - self.first
        is_here = (sample >= 0) & (sample < size)
        start = graph.out_ptr.index_select(0, row)
        length = graph.out_ptr.index_select(0, row + 1) - start
        length = length * is_here.repeat_interleave(len(relation))
        change = (batch.level - 1).to(x.dtype).unsqueeze(1) * x.index_select(0, batch.perturbed)
        sent = (change.unsqueeze(1) * gate).flatten(0, 1)  # [P * R, H]

        # Segment k * R + r holds the edges of relation r that leave perturbed node number k. The
        # last one is what is left up to the bound: zeros, sent along any edges.
        bound = batch.get("num_out_edges")
        number = torch.arange(int(length.sum()) if bound is None else bound, device=x.device)
        end = length.cumsum(0)
        segment = torch.searchsorted(end, number, right=True)
        sent = nn.functional.pad(sent, (0, 0, 0, 1))
        sample = nn.functional.pad(sample, (0, 1))
        first = nn.functional.pad(start - end + length, (0, 1))  # edge less number
        _, col, weight = graph.stack.by_source.csr
        edge = (number + first.index_select(0, segment)).remainder(max(1, len(col)))
        node = col.index_select(0, edge).long()
        state = node * size + sample.index_select(0, segment // len(relation))
        weight = weight.index_select(0, edge).to(x.dtype).unsqueeze(1)
        return state, sent.index_select(0, segment) * weight
