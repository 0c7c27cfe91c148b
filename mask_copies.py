"""Masked copies of the graph: the reference for `SharedGraph`, and for layers with edge values.

Tests compare the results of `SharedGraph` with the results on copies. Layers that need a value for
each edge, such as attention, can only run on copies.

Shapes: N nodes, R relations, E_r edges of relation r, H channels, B samples in the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from mask import Samples, SharedGraph, num_samples


class CopiedGraph:
    """B block-diagonal copies of a graph for a batch, one for each sample.

    The encoder's layers can call it instead of `SharedGraph`, because it has the same methods
    `propagate`, `propagate_from_one` and `in_blocks`. The copy of node n in sample k has the number
    k * N + n. It sends its state times its level.

    A dead edge is not removed, because the host would have to wait for the GPU to count the living
    edges. Instead, both ends of a dead edge are moved to a spare node with the number B * N, which
    sends zeros, and whose state is never read.

    Args:
        graph: the graph, on the same device as the batch.
        batch: a batch of a `data.KnockoutDataset`.
    """

    def __init__(self, graph: SharedGraph, batch: Data):
        self.num_samples = num_samples(batch)
        self.num_nodes = graph.num_nodes
        self.level = graph.levels(batch).unsqueeze(-1)
        weights = graph.by_relation(graph.edge_weight)
        self.weights = [weight.repeat(self.num_samples) for weight in weights]
        copied = graph.expand(batch)
        # The next batch overwrites these masks, which is safe: autograd does not store them,
        # because they are only used for edge indices, which have no gradient.
        alive = graph.reused_masks(batch)
        spare = self.num_samples * self.num_nodes
        self.edge_indices = [copied[name].where(alive[name], spare) for name in graph.relations]

    def in_blocks(self, batch: Data, states: Tensor) -> Iterator[Samples]:
        """Yields one block with all samples of the batch; `SharedGraph.in_blocks` yields several.

        `states` is ignored.
        """
        yield Samples(batch, 0, self.level.squeeze(-1))

    def propagate_from_one(self, x: Tensor, gate: Tensor, samples: Samples | None) -> Tensor:
        """Returns the result of `propagate` if all samples have the same states, [N, B, H].

        `x` [N, 1, H] are these states, and `gate` is [R, H]. `samples` is ignored.
        """
        return self.propagate(x, gate)

    def propagate(self, x: Tensor, gate: Tensor, level: Tensor | None = None) -> Tensor:
        """Returns the weighted sums of the messages that each node receives, [N, B, H].

        They are the sum over the relations r of gate_r * (A_r @ (level * x)), and 0 for dead nodes.

        Args:
            x: states of the nodes in each sample, [N, B, H], or in all samples, [N, 1, H].
            gate: factor of each relation and channel, [R, H].
            level: is ignored, because the copies have the levels of their nodes.
        """
        copies = self.copy(x)
        sums = 0.0
        for edge_index, weight, gated in zip(self.edge_indices, self.weights, gate, strict=True):
            source, target = edge_index
            message = (copies * gated).index_select(0, source) * weight.unsqueeze(1)
            sums = sums + scatter(message, target, dim=0, dim_size=len(copies), reduce="sum")
        return self.by_node(sums)

    def copy(self, x: Tensor) -> Tensor:
        """Returns the states that the copies of the nodes send, [B * N + 1, H].

        They are the states `x`, [N, B, H] or [N, 1, H], times the levels of the nodes. Row
        k * N + n belongs to node n in sample k. The last row belongs to the spare node, and is 0.
        """
        copies = (self.level * x).transpose(0, 1).flatten(0, 1)
        return nn.functional.pad(copies, (0, 0, 0, 1))

    def by_node(self, states: Tensor) -> Tensor:
        """Returns the states [B * N + 1, H] of the copies as [N, B, H], without the spare node."""
        states = states.narrow(0, 0, self.num_samples * self.num_nodes)
        return states.view(self.num_samples, self.num_nodes, states.size(1)).transpose(0, 1)


def intact_batch(device: torch.device) -> Data:
    """Returns a batch of one sample that does not perturb any node, on a device."""
    none = torch.empty(0, dtype=torch.long, device=device)
    ptr = none.new_zeros(2)
    return Data(
        perturbed=none, perturbed_batch=none, perturbed_ptr=ptr, level=none, num_dead_edges=0
    )
