"""A small graph with sets of knocked-out nodes, and its masks, computed with plain loops."""

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from data import KnockoutDataset
from mask import SharedGraph
from tests.sets import tables_of

NUM_NODES = 9
# Node 4 is never knocked out, node 5 only has a level, and node 2 is listed as intact.
LEVELS = [{0: 0.3, 3: 0.0}, {}, {5: 3.0}, {8: 0.0}, {2: 1.0, 0: 0.0, 7: 2.5, 1: 0.0}]
DEAD = [[node for node, level in nodes.items() if level == 0] for nodes in LEVELS]


def graph_of_9_nodes() -> HeteroData:
    """Returns a graph of three relations.

    The first has self-loops and a duplicate edge, the second is empty, and the third is weighted.
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
    """Returns the batch of all sets, which are lists of deleted nodes or {node: level}."""
    tables = tables_of(sets, torch.zeros(len(sets)))
    dataset = KnockoutDataset(tables, shared.degree, out_degree=shared.out_degree)
    return dataset.__getitems__(list(range(len(sets))))


def loop_masks(graph: HeteroData, sets: list[list[int]]) -> dict:
    """Returns which edges live in samples without these nodes, one edge at a time."""
    masks = {}
    for relation in graph.edge_types:
        mask = []
        for dead in sets:
            for source, target in graph[relation].edge_index.T.tolist():
                mask.append(source not in dead and target not in dead)
        masks[relation] = torch.tensor(mask, dtype=torch.bool)
    return masks


def loop_levels(sets: list[dict[int, float]]) -> Tensor:
    """Returns the level of each node in each sample, float32 [N, B], one level at a time."""
    return torch.tensor([[nodes.get(node, 1.0) for nodes in sets] for node in range(NUM_NODES)])
