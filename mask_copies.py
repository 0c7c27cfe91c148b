"""Masked copies of the graph, for layers with values for each edge, and as the reference.

Shapes: N nodes, H channels, B samples in the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from mask import Samples, SharedGraph, num_samples


class CopiedGraph:
    """B block-diagonal copies of a graph for a batch, which sum as `SharedGraph` does.

    A node sends its state times its level. A dead edge is a loop at a spare node, number B * N: to
    leave it out, the host would wait for the GPU. This is the reference for the shared route, and
    the one for layers that need per-edge values.
    """

    def __init__(self, graph: SharedGraph, batch: Data):
        self.num_samples = num_samples(batch)
        self.num_nodes = graph.num_nodes
        self.level = graph.levels(batch).unsqueeze(-1)
        weights = graph.by_relation(graph.edge_weight)
        self.weights = [weight.repeat(self.num_samples) for weight in weights]
        copied = graph.expand(batch)
        # The next batch overwrites these masks. Autograd keeps none of them, as only the ends of
        # edges are made of them, which have no gradient.
        alive = graph.reused_masks(batch)
        spare = self.num_samples * self.num_nodes
        self.edge_indices = [copied[name].where(alive[name], spare) for name in graph.relations]

    def in_blocks(self, batch: Data, states: Tensor) -> Iterator[Samples]:
        """Yields all samples of the batch at once."""
        yield Samples(batch, 0, self.level.squeeze(-1))

    def propagate_from_one(self, x: Tensor, gate: Tensor, samples: Samples | None) -> Tensor:
        """Returns `propagate` of states that are alike in all samples, [N, B, H] of x [N, 1, H]."""
        return self.propagate(x, gate)

    def propagate(self, x: Tensor, gate: Tensor, level: Tensor | None = None) -> Tensor:
        """Returns the sum over relations r of gate_r * (A_r @ (level * x)), [N, B, H].

        The copies know the levels of their nodes.
        """
        copies = self.copy(x)
        sums = 0.0
        for edge_index, weight, gated in zip(self.edge_indices, self.weights, gate, strict=True):
            source, target = edge_index
            message = (copies * gated).index_select(0, source) * weight.unsqueeze(1)
            sums = sums + scatter(message, target, dim=0, dim_size=len(copies), reduce="sum")
        return self.by_node(sums)

    def copy(self, x: Tensor) -> Tensor:
        """Maps states [N, B, H], or [N, 1, H] alike in all samples, to what nodes send of them.

        That is [B * N + 1, H], sample-major, and the last is that of the spare node.
        """
        copies = (self.level * x).transpose(0, 1).flatten(0, 1)
        return nn.functional.pad(copies, (0, 0, 0, 1))

    def by_node(self, states: Tensor) -> Tensor:
        """Maps states of the copies [B * N + 1, H] to [N, B, H]."""
        states = states.narrow(0, 0, self.num_samples * self.num_nodes)
        return states.view(self.num_samples, self.num_nodes, states.size(1)).transpose(0, 1)


def intact_batch(device: torch.device) -> Data:
    """Returns a batch of one sample without knock-outs."""
    none = torch.empty(0, dtype=torch.long, device=device)
    ptr = none.new_zeros(2)
    return Data(
        perturbed=none, perturbed_batch=none, perturbed_ptr=ptr, level=none, num_dead_edges=0
    )
