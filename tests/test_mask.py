"""The mask kernel, compared with a plain loop over the edges of a small graph."""

import pytest
import torch
from torch_geometric.data import HeteroData

from mask import SharedGraph
from tests.loops import (
    DEAD,
    LEVELS,
    NUM_NODES,
    graph_of_9_nodes,
    loop_levels,
    loop_masks,
    make_batch,
)
from tests.syncs import CountSynchronisations


@pytest.fixture
def graph() -> HeteroData:
    return graph_of_9_nodes()


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
    """It sends along each edge, times gate and normalised weight; gradients are tested, too."""
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
    with CountSynchronisations() as count:  # check that the counter itself works
        batch.perturbed[batch.perturbed > 2].sum().item()
        batch.perturbed[batch.perturbed > 2] = 0
        batch.perturbed.repeat_interleave(batch.perturbed)
    assert len(count.seen) >= 3  # which operators wait depends on torch
