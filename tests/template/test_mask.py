"""Tests of the masks and the sparse products of a graph that are not in tests/test_mask.py."""

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, HeteroData

from mask import EdgeMasks, SharedGraph, num_samples
from mask_copies import CopiedGraph
from mask_product import RelationMatrix, _segment_product, sparse_product
from tests.loops import (
    DEAD,
    LEVELS,
    NUM_NODES,
    graph_of_9_nodes,
    loop_masks,
    make_batch,
)
from tests.syncs import CountSynchronisations
from tests.template.results import normal
from tests.template.small_graph import SETS, edges_of


@pytest.fixture
def graph() -> HeteroData:
    return graph_of_9_nodes()


def test_levels_have_the_precision_of_the_graph(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, SETS)
    assert num_samples(batch) == len(SETS)
    assert shared.keep(batch).dtype == torch.bool
    assert shared.levels(batch).dtype == torch.float32
    assert shared.double().levels(batch).dtype == torch.float64


def test_a_node_at_a_level_keeps_its_edges(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, LEVELS)
    assert batch.num_dead_edges == len(shared.dead_edges(batch).unique())
    copied = shared.expand(batch)
    expected_copies = shared.expand(make_batch(shared, DEAD))
    for relation in graph.edge_types:
        assert torch.equal(copied[relation], expected_copies[relation])


def test_reused_masks_equal_fresh_masks_for_batches_of_any_size(graph):
    shared = SharedGraph(graph)
    masks = EdgeMasks(shared)
    hub = int(shared.degree.argmax())
    batches = [SETS, [[hub]], [[]], [[hub]] * 7, [], SETS[::-1], LEVELS, [[hub, 3]] * 6]
    for sets in batches:
        batch = make_batch(shared, sets)
        reused = masks(batch)
        for relation, fresh in shared.edge_masks(batch).items():
            assert torch.equal(reused[relation], fresh), (relation, sets)
    largest = max(map(len, batches)) * sum(shared.num_edges.values())
    assert len(masks.memory[0]) == largest


def test_later_batches_do_not_change_fresh_masks(graph):
    shared = SharedGraph(graph)
    masks = shared.edge_masks(make_batch(shared, SETS))
    shared.edge_masks(make_batch(shared, [[]] * len(SETS)))
    expected = loop_masks(graph, [[0, 3], [], [5], [8], [2, 0, 7, 1]])
    assert all(torch.equal(masks[relation], expected[relation]) for relation in graph.edge_types)


def test_gradients_on_copies_do_not_depend_on_later_batches(graph):
    shared = SharedGraph(graph).double()
    gate = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(NUM_NODES, len(SETS), 4, dtype=torch.float64, requires_grad=True)
    first = make_batch(shared, SETS)
    sums = CopiedGraph(shared, first).propagate(x, gate)
    expected = torch.autograd.grad(sums.sin().sum(), [x, gate])
    copies = CopiedGraph(shared, first)
    other_copies = CopiedGraph(shared, make_batch(shared, SETS[::-1]))
    sums = copies.propagate(x, gate)
    other_copies.propagate(x, gate).sum().backward()
    gradients = torch.autograd.grad(sums.sin().sum(), [x, gate])
    assert all(map(torch.equal, gradients, expected))


def test_degree_counts_a_self_loop_once(graph):
    edges = edges_of(graph)
    expected = [sum(node in edge for edge in edges) for node in range(NUM_NODES)]
    assert SharedGraph(graph).degree.tolist() == expected


@pytest.mark.parametrize("sets", [SETS, [[]]])
def test_expand_has_the_layout_of_a_pyg_batch(graph, sets):
    shared = SharedGraph(graph)
    expanded = shared.expand(make_batch(shared, sets))
    expected = Batch.from_data_list([graph] * len(sets))
    for relation in graph.edge_types:
        assert torch.equal(expanded[relation], expected[relation].edge_index), relation


def sums_and_gradients(
    shared: SharedGraph, gate: Tensor | None, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """Returns the sums of random states over neighbours, and the gradients of states and gate."""
    dtype = shared.edge_weight.dtype
    x, upstream = normal(2, NUM_NODES, 2, 8).to(dtype)
    inputs = [x.requires_grad_()]
    if gate is not None:
        inputs.append(gate.to(dtype, copy=True).requires_grad_())
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        sums = shared.propagate(*inputs)
    return [sums, *torch.autograd.grad(sums, inputs, upstream)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("sparse", [0, 2])  # 0: all rows are stored; 2: only rows with edges
def test_sums_and_gradients_have_the_precision_of_the_graph(
    graph, monkeypatch, gated, autocast, sparse
):
    """Sums over many neighbours need it. They are compared with sums in float64.

    tests/test_mask.py compares sums in float64 with dense matrices.
    """
    gate = normal(3, 8, seed=1) if gated else torch.ones(3, 8)
    expected = sums_and_gradients(SharedGraph(graph).double(), gate)
    monkeypatch.setattr(RelationMatrix, "SPARSE", sparse)
    shared = SharedGraph(graph)
    assert (shared.stack.by_target.node is None) == (sparse == 0)
    found = sums_and_gradients(shared, gate if gated else None, autocast)
    for result, reference in zip(found, expected, strict=gated):
        assert result.dtype == torch.float32
        assert (result - reference).norm() <= 1e-6 * reference.norm()


def test_many_rows_without_edges_are_not_stored(graph, monkeypatch):
    for number in range(10):
        edge_index = torch.tensor([[number % NUM_NODES], [3]])
        graph["gene", f"few{number}", "gene"].edge_index = edge_index
    shared = SharedGraph(graph)
    ends = torch.cat([graph[relation].edge_index for relation in graph.edge_types], dim=1)
    relation = torch.repeat_interleave(torch.tensor([30, 0, 12, *[1] * 10]))
    for end, matrix in ((1, shared.stack.by_target), (0, shared.stack.by_source)):
        rows = (relation * NUM_NODES + ends[end]).unique()
        assert len(matrix.csr.ptr) == len(rows) + 1
        assert matrix.relation.equal(rows // NUM_NODES)
        assert matrix.node.equal(rows % NUM_NODES)
    found = sums_and_gradients(shared, normal(13, 8))
    monkeypatch.setattr(RelationMatrix, "SPARSE", 0)
    expected = sums_and_gradients(SharedGraph(graph), normal(13, 8))
    torch.testing.assert_close(found, expected)


def test_the_stacked_matrices_are_sorted_by_row_and_column(graph):
    stack = SharedGraph(graph).stack
    for ptr, col, _ in (stack.by_target.csr, stack.by_source.csr):
        row = torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff())
        assert (row * NUM_NODES + col).diff().ge(0).all()


def test_segment_product_equals_sparse_product(graph):
    x = torch.randn(NUM_NODES, 100)
    matrix = SharedGraph(graph).stack.by_target.csr  # the matrices of all relations, [27, 9]
    expected = sparse_product(matrix, x)
    torch.testing.assert_close(_segment_product(matrix, x), expected, rtol=1e-6, atol=1e-7)


def test_buffers_move_with_the_module_and_are_not_saved(graph):
    shared = SharedGraph(graph)
    assert not shared.state_dict() and not list(shared.parameters())
    tensors = {name for name, value in vars(shared).items() if isinstance(value, Tensor)}
    assert tensors == {"degree", "out_degree"}  # these stay on the CPU
    assert all(buffer.device.type == "meta" for buffer in SharedGraph(graph).to("meta").buffers())
    assert shared.degree.device == shared.out_degree.device == torch.device("cpu")


def test_a_batch_on_a_different_device_raises_an_error_with_advice(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, SETS)
    shared.check(batch)
    message = r"batch is on meta but the graph is on cpu.*batch\.to\('cpu'\)"
    calls = (shared.check, shared.levels, shared.keep)
    calls += (shared.dead_edges, shared.edge_masks, shared.expand)
    for call in calls:
        with pytest.raises(RuntimeError, match=message):
            call(batch.clone().to("meta"))


@pytest.mark.parametrize("node", [-1, NUM_NODES])
def test_the_error_for_a_node_outside_the_graph_contains_its_number(graph, node):
    shared = SharedGraph(graph)
    with pytest.raises(IndexError, match=rf"sample 1: .*node {node} .*\[0, {NUM_NODES}\)"):
        make_batch(shared, [[1], [2, node]])


def test_the_given_graph_is_not_moved(graph, monkeypatch):
    """`SharedGraph` must copy the edges first, because PyG moves the stores of a graph in place."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    stores = [graph["gene", name, "gene"] for name in "ab"]
    before = [store.edge_index for store in stores]
    SharedGraph(graph)
    assert all(store.edge_index is tensor for store, tensor in zip(stores, before, strict=True))


def test_invalid_graphs_raise_errors(graph):
    with pytest.raises(ValueError, match="no edge types"):
        empty = HeteroData()
        empty["gene"].num_nodes = 3
        SharedGraph(empty)
    graph["drug"].num_nodes = 1
    graph["gene", "to", "drug"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="does not connect 'gene'"):
        SharedGraph(graph)
    graph["gene", "a", "gene"].edge_index[0, 0] = NUM_NODES
    with pytest.raises(ValueError, match="larger source indices than the number of nodes"):
        SharedGraph(graph)


def test_copies_are_made_without_waiting_for_the_device(graph):
    shared = SharedGraph(graph)
    batch = make_batch(shared, SETS)
    with CountSynchronisations() as count:
        shared.expand(batch)
        CopiedGraph(shared, batch)
    assert count.seen == []
