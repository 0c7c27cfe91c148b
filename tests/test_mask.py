"""The masks and sums of mask.py, compared with plain loops over the edges of a small graph.

If a test fails, mask.py or mask_product.py was usually changed: compare it with tests/loops.py.
"""

import pytest
import torch
from torch_geometric.data import HeteroData

from mask import SharedGraph
from tests.causes import assert_close
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


def test_nodes_are_alive_if_their_level_is_above_0(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    assert torch.equal(shared.levels(batch), loop_levels(LEVELS)), (
        "A node has a wrong level in a sample. Usually `SharedGraph.levels` in mask.py was changed."
    )
    assert torch.equal(shared.keep(batch), loop_levels(LEVELS) > 0), (
        "A node is alive at level 0, or dead at a level above 0. Usually `SharedGraph.keep` in "
        "mask.py was changed."
    )


def test_edges_are_alive_if_both_of_their_nodes_are(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    masks = shared.edge_masks(batch)
    expected = loop_masks(graph, DEAD)
    assert list(masks) == graph.edge_types, (
        "A relation has no mask. Usually `SharedGraph` skips relations without edges, or sorts "
        "relations."
    )
    assert all(torch.equal(masks[relation], expected[relation]) for relation in graph.edge_types), (
        "An edge is alive although one of its nodes is dead, or dead although both are alive. "
        "Usually `SharedGraph.edge_masks` or `dead_edges` in mask.py was changed."
    )
    assert not all(mask.all() for mask in masks.values()), (
        "No edge is dead, so this test shows nothing. Usually the graph or the samples in "
        "tests/loops.py were changed."
    )
    dead = shared.dead_edges(batch)
    dead_in_loops = (~torch.cat(list(expected.values()))).nonzero().flatten()
    assert torch.equal(dead.unique(), dead_in_loops), (
        "`SharedGraph.dead_edges` does not list exactly the dead edges. Usually it counts edges "
        "in a different order from `edge_masks`: relation by relation, then sample by sample."
    )


@pytest.mark.parametrize("sets", [[], [[]], [[], []]])
def test_samples_without_knock_outs_leave_the_graph_intact(graph, sets):
    shared = SharedGraph(graph)
    batch = make_batch(shared, sets)
    is_alive = shared.keep(batch)
    assert is_alive.shape == (NUM_NODES, len(sets)) and is_alive.all(), (
        "All nodes must be alive in samples without knock-outs, [N, B]. Usually the code counts "
        "the samples in `batch.perturbed_batch`, which is empty here; use `len(batch.y)`."
    )
    assert shared.dead_edges(batch).numel() == 0, (
        "An edge is dead although no node is. Usually `SharedGraph.dead_edges` in mask.py was "
        "changed."
    )
    assert all(mask.all() for mask in shared.edge_masks(batch).values()), (
        "An edge is masked although no node is dead. Usually `SharedGraph.edge_masks` in mask.py "
        "was changed."
    )


def test_messages_are_states_times_level_gate_and_normalised_weight(graph):
    """Their sums and gradients are compared with products of dense matrices."""
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
    assert_close(
        sums,
        expected,
        "The sums over neighbours are wrong. Usually `SharedGraph.propagate`, or the "
        "normalisation of the weights in `SharedGraph.__init__`, was changed.",
        tolerance=1e-6,
    )
    gradients = torch.autograd.grad(sums, (x, gate), upstream)
    references = torch.autograd.grad(expected, (x, gate), upstream)
    for gradient, reference in zip(gradients, references, strict=True):
        assert_close(
            gradient,
            reference,
            "The sums are right, but a gradient is wrong. Usually the backward pass in "
            "mask_product.py does not match its forward pass.",
            tolerance=1e-6,
        )


def test_masks_are_computed_without_waiting_for_the_device(graph):
    """Counts the operators that would make the host wait for a GPU; this needs no GPU."""
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    with CountSynchronisations() as count:
        shared.levels(batch)
        shared.keep(batch)
        shared.dead_edges(batch)
        shared.edge_masks(batch)
    assert count.seen == [], (
        "These operators make the host wait for a GPU. Usually the code calls `item`, has an `if` "
        "that depends on a tensor, or selects with a boolean mask."
    )
    with CountSynchronisations() as count:  # check that the counter itself works
        batch.perturbed[batch.perturbed > 2].sum().item()
        batch.perturbed[batch.perturbed > 2] = 0
        batch.perturbed.repeat_interleave(batch.perturbed)
    assert len(count.seen) >= 3, (
        "The counter misses operators that wait. Usually a different version of torch has other "
        "names for them: see `WAITING` in tests/syncs.py."
    )
