"""A small graph, samples on it, and their levels and masks, computed with plain loops.

These loops are the reference for mask.py.
"""

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from data import KnockoutDataset
from mask import SharedGraph
from tests.sets import tables_of

NUM_NODES = 9
# {node: level} of five samples. Node 4 is never perturbed, node 5 is only at level 3, and node 2 is
# listed although it is intact.
LEVELS = [{0: 0.3, 3: 0.0}, {}, {5: 3.0}, {8: 0.0}, {2: 1.0, 0: 0.0, 7: 2.5, 1: 0.0}]
# The dead nodes of these samples.
DEAD = [[node for node, level in nodes.items() if level == 0] for nodes in LEVELS]


def graph_of_9_nodes() -> HeteroData:
    """Returns a graph with three relations.

    The first relation has self-loops and a duplicate edge, the second has no edges, and the edges
    of the third have weights.
    """
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["gene"].num_nodes = NUM_NODES
    edges = torch.randint(NUM_NODES, (2, 30), generator=generator)
    edges[:, :4] = torch.tensor([[0, 5, 2, 2], [0, 5, 3, 3]])
    graph["gene", "a", "gene"].edge_index = edges
    graph["gene", "none", "gene"].edge_index = torch.empty(2, 0, dtype=torch.long)
    graph["gene", "b", "gene"].edge_index = torch.randint(NUM_NODES, (2, 12), generator=generator)
    graph["gene", "b", "gene"].edge_weight = torch.rand(12, generator=generator) + 0.1
    return graph


def make_batch(shared: SharedGraph, sets: list) -> Data:
    """Returns one batch with a sample for each set: a list of deleted nodes, or {node: level}."""
    tables = tables_of(sets, torch.zeros(len(sets)))
    dataset = KnockoutDataset(tables, shared.degree, out_degree=shared.out_degree)
    return dataset.__getitems__(list(range(len(sets))))


def loop_masks(graph: HeteroData, sets: list[list[int]]) -> dict:
    """Returns whether each edge is alive in each sample, {edge type: bool [B * E_r]}.

    Args:
        graph: the graph.
        sets: the dead nodes of each of B samples.
    """
    masks = {}
    for relation in graph.edge_types:
        mask = []
        for dead in sets:
            for source, target in graph[relation].edge_index.T.tolist():
                mask.append(source not in dead and target not in dead)
        masks[relation] = torch.tensor(mask, dtype=torch.bool)
    return masks


def loop_levels(sets: list[dict[int, float]]) -> Tensor:
    """Returns the level of each node in each sample, float32 [N, B], given {node: level}."""
    return torch.tensor([[nodes.get(node, 1.0) for nodes in sets] for node in range(NUM_NODES)])
