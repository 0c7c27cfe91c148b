"""Masked copies of the graph: for layers with values for each edge, and as the reference.

Shapes: N nodes, H channels, B samples in the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from mask import Samples, SharedGraph, num_samples


class CopiedGraph:
    """B block-diagonal copies of a graph for a batch, with the methods of `SharedGraph`.

    A node sends its state times its level. A dead edge becomes a self-loop at a spare node, number
    B * N, because the host would have to wait for the GPU to remove it. This is the reference for
    message_passing=shared, and the base for layers that need a value for each edge.
    """

    def __init__(self, graph: SharedGraph, batch: Data):
        self.num_samples = num_samples(batch)
        self.num_nodes = graph.num_nodes
        self.level = graph.levels(batch).unsqueeze(-1)
        weights = graph.by_relation(graph.edge_weight)
        self.weights = [weight.repeat(self.num_samples) for weight in weights]
        copied = graph.expand(batch)
        # The next batch overwrites these masks. Autograd does not keep them, because they are only
        # used for edge indices, which have no gradient.
        alive = graph.reused_masks(batch)
        spare = self.num_samples * self.num_nodes
        self.edge_indices = [copied[name].where(alive[name], spare) for name in graph.relations]

    def in_blocks(self, batch: Data, states: Tensor) -> Iterator[Samples]:
        """Yields all samples of the batch at once."""
        yield Samples(batch, 0, self.level.squeeze(-1))

    def propagate_from_one(self, x: Tensor, gate: Tensor, samples: Samples | None) -> Tensor:
        """Returns `propagate` of x [N, 1, H], the same states in all samples, [N, B, H]."""
        return self.propagate(x, gate)

    def propagate(self, x: Tensor, gate: Tensor, level: Tensor | None = None) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ (level * x)), [N, B, H].

        `level` is ignored, because the copies have the levels of their nodes.
        """
        copies = self.copy(x)
        sums = 0.0
        for edge_index, weight, gated in zip(self.edge_indices, self.weights, gate, strict=True):
            source, target = edge_index
            message = (copies * gated).index_select(0, source) * weight.unsqueeze(1)
            sums = sums + scatter(message, target, dim=0, dim_size=len(copies), reduce="sum")
        return self.by_node(sums)

    def copy(self, x: Tensor) -> Tensor:
        """Returns what the copies of nodes with states [N, B, H] or [N, 1, H] send, [B * N + 1, H].

        It is sample-major. The last row belongs to the spare node.
        """
        copies = (self.level * x).transpose(0, 1).flatten(0, 1)
        return nn.functional.pad(copies, (0, 0, 0, 1))

    def by_node(self, states: Tensor) -> Tensor:
        """Returns states of the copies [B * N + 1, H] as [N, B, H]."""
        states = states.narrow(0, 0, self.num_samples * self.num_nodes)
        return states.view(self.num_samples, self.num_nodes, states.size(1)).transpose(0, 1)


def intact_batch(device: torch.device) -> Data:
    """Returns a batch of one sample without knock-outs."""
    none = torch.empty(0, dtype=torch.long, device=device)
    ptr = none.new_zeros(2)
    return Data(
        perturbed=none, perturbed_batch=none, perturbed_ptr=ptr, level=none, num_dead_edges=0
    )
