"""The mask kernel, compared with a plain loop over the edges of a small graph."""

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from data import KnockoutDataset
from mask import SharedGraph
from tests.sets import tables_of
from tests.syncs import CountSynchronisations

NUM_NODES = 9
# Node 4 is never knocked out, node 5 is at a level alone, and node 2 is listed as intact.
LEVELS = [{0: 0.3, 3: 0.0}, {}, {5: 3.0}, {8: 0.0}, {2: 1.0, 0: 0.0, 7: 2.5, 1: 0.0}]
DEAD = [[node for node, level in nodes.items() if level == 0] for nodes in LEVELS]


@pytest.fixture
def graph() -> HeteroData:
    """Three relations: one with self-loops and a duplicate edge, an empty one, a weighted one."""
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
    """Returns the level of each node in each sample, float32 [N, B], one at a time."""
    return torch.tensor([[nodes.get(node, 1.0) for nodes in sets] for node in range(NUM_NODES)])


def test_a_node_lives_where_its_level_is_above_0(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    assert torch.equal(shared.levels(batch), loop_levels(LEVELS))
    assert torch.equal(shared.keep(batch), loop_levels(LEVELS) > 0)


def test_an_edge_lives_where_both_of_its_nodes_do(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    masks = shared.edge_masks(batch)
    expected = loop_masks(graph, DEAD)
    assert list(masks) == graph.edge_types
    assert all(torch.equal(masks[relation], expected[relation]) for relation in graph.edge_types)
    assert not all(mask.all() for mask in masks.values())
    dead = shared.dead_edges(batch)
    assert torch.equal(dead.unique(), (~torch.cat(list(expected.values()))).nonzero().flatten())


@pytest.mark.parametrize("sets", [[], [[]], [[], []]])
def test_samples_without_knock_outs_leave_the_graph_intact(graph, sets):
    shared = SharedGraph(graph)
    batch = make_batch(shared, sets)
    assert shared.keep(batch).shape == (NUM_NODES, len(sets)) and shared.keep(batch).all()
    assert shared.dead_edges(batch).numel() == 0
    assert all(mask.all() for mask in shared.edge_masks(batch).values())


def test_a_node_sends_its_state_times_its_level(graph):
    """Along each edge, by its gate and its normalised weight, also backwards."""
    shared = SharedGraph(graph).double()
    batch = make_batch(shared, LEVELS)
    matrices = torch.zeros(len(graph.edge_types), NUM_NODES, NUM_NODES, dtype=torch.float64)
    for matrix, relation in zip(matrices, graph.edge_types, strict=True):
        source, target = graph[relation].edge_index
        weight = graph[relation].get("edge_weight", torch.ones(len(source))).double()
        in_degree = torch.bincount(target, weight, minlength=NUM_NODES)
        for s, t, w in zip(source.tolist(), target.tolist(), weight, strict=True):
            matrix[t, s] += w / (weight.sum() / NUM_NODES * in_degree[t]).sqrt()
    x = torch.randn(NUM_NODES, len(LEVELS), 4, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    level = loop_levels(LEVELS).double()
    expected = torch.einsum("rts,sb,sbh,rh->tbh", matrices, level, x, gate)
    sums = shared.propagate(x, gate, level=shared.levels(batch))
    upstream = torch.randn_like(sums)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(sums, (x, gate), upstream)
    references = torch.autograd.grad(expected, (x, gate), upstream)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=1e-6)


def test_masks_are_made_without_waiting_for_the_device(graph):
    """Counts, on the CPU, the operators that would synchronise on a GPU."""
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    with CountSynchronisations() as count:
        shared.levels(batch)
        shared.keep(batch)
        shared.dead_edges(batch)
        shared.edge_masks(batch)
    assert count.seen == []
    with CountSynchronisations() as count:  # the counter itself works
        batch.perturbed[batch.perturbed > 2].sum().item()
    assert len(count.seen) > 1
