"""Tests of plans of the states that knock-outs change, of the choice of route, and of other models.

Plans are compared with plain loops. test_model.py compares predictions of planned batches with
predictions on copies of the graph.
"""

import math

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from data import KnockoutDataset
from mask import SharedGraph
from mask_product import CSR
from model import GlobalReadout, KnockoutConv, KnockoutGNN, ModelConfig
from model_nodes import NodeReadout
from model_reach import SparseProduct, is_exact, layers_of, plan_route, record_states
from model_reach_plan import ReachBlock, ReachedStates, ReachPlanner
from tests.loops import DEAD, LEVELS, NUM_NODES, graph_of_9_nodes, make_batch
from tests.sets import tables_of
from tests.template.models import full_model
from tests.template.small_graph import SETS, edges_of


@pytest.fixture
def graph() -> HeteroData:
    return graph_of_9_nodes()


ANY_NUMBER = math.inf  # limit of the number of edges of a planned layer


@pytest.fixture
def shared(graph: HeteroData) -> SharedGraph:
    return SharedGraph(graph)


def planner_of(shared: SharedGraph, num_layers: int) -> ReachPlanner:
    """Returns a planner that plans `num_layers` layers, even if they are slow."""
    planner = ReachPlanner(shared, num_layers)
    planner.max_edges = ANY_NUMBER
    return planner


def states_of(layer: ReachedStates, num_samples: int) -> list[set[int]]:
    """Returns the nodes of each sample whose states the layer changes."""
    nodes = [set() for _ in range(num_samples)]
    for node, sample in zip(layer.node.tolist(), layer.sample.tolist(), strict=True):
        nodes[sample].add(node)
    return nodes


def reach_in_a_layer(
    edges: list[list[int]], senders: list[set[int]], dead: list[list[int]]
) -> list[set[int]]:
    """Returns the living nodes of each sample to which an edge leads from one of its senders."""
    reached = []
    for senders_of_sample, dead_of_sample in zip(senders, dead, strict=True):
        targets = {target for source, target in edges if source in senders_of_sample}
        reached.append(targets - set(dead_of_sample))
    return reached


def reach_by_a_loop(
    edges: list[list[int]], sets: list, dead: list[list[int]], num_layers: int
) -> list[list[set[int]]]:
    """Returns the set of nodes whose states differ, for each layer and each sample."""
    reached = [set() for _ in sets]
    layers = []
    for _ in range(num_layers):
        senders = [nodes | set(perturbed) for nodes, perturbed in zip(reached, sets, strict=True)]
        added = reach_in_a_layer(edges, senders, dead)
        reached = [before | after for before, after in zip(reached, added, strict=True)]
        layers.append(reached)
    return layers


def test_nodes_at_a_level_change_the_same_states_as_deleted_nodes_and_live(graph, shared):
    planner = planner_of(shared, 3)
    perturbed = [[node for node, level in nodes.items() if level != 1] for nodes in LEVELS]
    expected = reach_by_a_loop(edges_of(graph), perturbed, DEAD, 3)
    for _ in range(2):  # a batch must not leave its levels in the planner's memory
        (block,) = planner(make_batch(shared, LEVELS)).plan
        assert [states_of(layer, len(LEVELS)) for layer in block.layers] == expected
        planner(make_batch(shared, [{}]))


@pytest.mark.parametrize("order", [1, -1])
def test_reached_states_equal_a_plain_loop(graph, shared, order):
    """The plan of a batch must not depend on the batches that have been planned before."""
    planner = planner_of(shared, 3)
    for sets in (SETS, SETS[::-1], [[]], [], SETS * 9)[::order]:
        expected = reach_by_a_loop(edges_of(graph), sets, sets, 3)
        blocks = planner(make_batch(shared, sets)).plan
        for depth in range(3):
            reached = []
            for block in blocks:
                reached += states_of(block.layers[depth], block.num_samples)
            assert reached == expected[depth]


def dense_sums(block: ReachBlock, depth: int) -> Tensor:
    """Returns the matrix of a planned layer as a dense matrix, [S, K + L]."""
    layer = block.layers[depth]
    size = (len(layer.matrix.ptr) - 1, len(layer.transpose.ptr) - 1)
    matrix = torch.sparse_csr_tensor(*layer.matrix, size).to_dense()
    transposed = torch.sparse_csr_tensor(*layer.transpose, size[::-1]).to_dense()
    assert matrix.T.equal(transposed)
    return matrix


def test_a_plan_contains_the_weight_of_each_edge_from_a_sender(graph, shared):
    """The factor of a weight is 1 - level for a perturbed node, and level for a reached node."""
    (block,) = planner_of(shared, 2)(make_batch(shared, LEVELS)).plan
    num_relations = len(shared.relations)
    weights = torch.zeros(num_relations, NUM_NODES, NUM_NODES)  # [relation, source, target]
    for r, (edges, weight) in enumerate(
        zip(
            shared.by_relation(shared.edge_index.T),
            shared.by_relation(shared.edge_weight),
            strict=True,
        )
    ):
        weights[r].index_put_(tuple(edges.T), weight, accumulate=True)
    reached_before = []  # sample and node of each state that differs before the layer
    for depth, layer in enumerate(block.layers):
        perturbed = list(zip(block.perturbed_batch.tolist(), block.perturbed.tolist(), strict=True))
        senders = perturbed + reached_before
        reached = list(zip(layer.sample.tolist(), layer.node.tolist(), strict=True))
        of_edges = torch.zeros(len(reached), len(senders), num_relations)
        of_states = torch.zeros(len(reached), len(reached_before))
        for row, (sample, node) in enumerate(reached):
            for column, (sample_of_sender, sender) in enumerate(senders):
                if sample_of_sender != sample:
                    continue
                level = LEVELS[sample].get(sender, 1.0)
                is_perturbed = column < len(perturbed)
                factor = 1 - level if is_perturbed else level
                of_edges[row, column] = factor * weights[:, sender, node]
                if sender == node and not is_perturbed:
                    of_states[row, column - len(perturbed)] = 1
        in_columns = of_edges[:, layer.sender, layer.relation]
        expected = torch.cat([in_columns, of_states], dim=1)
        torch.testing.assert_close(dense_sums(block, depth), expected)
        assert of_edges.count_nonzero() == in_columns.count_nonzero()
        places = {state: place for place, state in enumerate(reached)}
        assert layer.previous.tolist() == [places[state] for state in reached_before]
        reached_before = reached


@pytest.mark.parametrize(
    ("reached", "states", "block"),
    [(10**6, 10**6, 32), (1, 10**6, 1), (10**6, NUM_NODES, 1), (10**6, 1, 1)],
)
def test_blocks_are_small_if_they_have_many_states(shared, monkeypatch, reached, states, block):
    """The states of all nodes must fit in memory, and the states that differ in the cache."""
    dataset = KnockoutDataset(tables_of(SETS, torch.zeros(len(SETS))), shared.degree)
    monkeypatch.setattr(ReachPlanner, "REACHED", reached)
    monkeypatch.setattr(ReachPlanner, "STATES", states)
    planner, _ = plan_route(shared, dataset, "reach", 2)
    sizes = [of_block.num_samples for of_block in planner.plan(make_batch(shared, SETS))]
    assert sizes == [min(block, len(SETS))] * max(1, len(SETS) // block)
    intact = KnockoutDataset(tables_of([[]] * 3, torch.zeros(3)), shared.degree)
    assert plan_route(shared, intact, "reach", 2)[0].block == block


def test_the_route_depends_on_the_number_of_states_that_change(shared, monkeypatch):
    dataset = KnockoutDataset(tables_of(SETS, torch.zeros(len(SETS))), shared.degree)
    monkeypatch.setattr(ReachPlanner, "EDGE_SHARE", 0.0)
    for edges_per_node, end, planned in (
        (99.0, " in 3 of 3 layers; message_passing=reach", 3),
        (1.5, " in 1 of 3 layers; message_passing=shared", 1),
        (0.01, " in 0 of 3 layers; message_passing=shared", 0),
    ):
        monkeypatch.setattr(ReachPlanner, "EDGES_PER_NODE", edges_per_node)
        planner, line = plan_route(shared, dataset, "auto", 3)
        assert line.endswith(end)
        assert planner.num_layers == planned
    monkeypatch.setattr(ReachPlanner, "EDGES_PER_NODE", 99.0)
    for route, planned in (("shared", 1), ("reach", 3)):
        planner, line = plan_route(shared, dataset, route, 3)
        assert line.endswith(f"; message_passing={route}") and planner.num_layers == planned


def test_on_a_gpu_auto_has_no_plan_and_reach_has_one_block(shared, monkeypatch):
    sets = SETS * 40
    batch = make_batch(shared, sets)
    dataset = KnockoutDataset(tables_of(sets, torch.zeros(len(sets))), shared.degree)
    monkeypatch.setattr(ReachPlanner, "EDGES_PER_NODE", 99.0)
    planner, line = plan_route(shared, dataset, "auto", 3)
    assert line.endswith("message_passing=reach") and len(planner.plan(batch)) > 1
    monkeypatch.setattr(SharedGraph, "device", torch.device("cuda"))
    assert plan_route(shared, dataset, "auto", 3) == (None, "message_passing=shared")
    planner, line = plan_route(shared, dataset, "reach", 3)
    assert line.endswith("message_passing=reach") and len(planner.plan(batch)) == 1


def test_a_block_of_samples_fits_in_the_cache_and_is_not_empty(shared):
    assert shared.samples_at_once(torch.empty(6607, 1, 32)) == 1
    assert shared.samples_at_once(torch.empty(400, 1, 32)) == 20
    assert shared.samples_at_once(torch.empty(10**6, 1, 64, device="meta")) == 1


# ---- Other layers and readouts -------------------------------------------------------------------
def tiny_model(readout: str) -> KnockoutGNN:
    torch.manual_seed(0)
    config = ModelConfig(hidden=8, readout=readout)
    target_nodes = torch.tensor([1, 4, 5])
    num_targets = 3 if readout == "nodes" else 1
    return full_model(config, NUM_NODES, 3, num_targets=num_targets, target_nodes=target_nodes)


def is_planned_exactly(model: KnockoutGNN, shared: SharedGraph, num_layers: int) -> bool:
    """Returns whether plans fit a model. `is_exact` replaces the samples: here, they are intact."""
    return record_states(model) and is_exact(
        model, shared, make_batch(shared, [{}] * 3), planner_of(shared, num_layers)
    )


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("readout", ["both", "global", "nodes"])
def test_a_plan_is_exact_for_the_supported_layer_and_readouts(shared, readout, num_layers):
    model = tiny_model(readout)
    before = [parameter.clone() for parameter in model.parameters()]
    assert is_planned_exactly(model, shared, num_layers)
    assert all(map(torch.equal, model.parameters(), before))
    assert model.training


def test_a_plan_of_a_graph_with_one_sender_or_none_is_exact():
    for edges in ([[3], [3]], [[3], [4]], [[], []]):
        few_edges = HeteroData()
        few_edges["gene"].num_nodes = NUM_NODES
        for relation in ("a", "b", "c"):
            few_edges["gene", relation, "gene"].edge_index = torch.tensor(edges, dtype=torch.long)
        assert is_planned_exactly(tiny_model("both"), SharedGraph(few_edges), 2), edges


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("readout", ["both", "nodes"])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_plan_is_not_exact_for_an_edited_layer(
    shared, monkeypatch, readout, num_layers, is_buffer
):
    """This must be detected even if the edit uses a parameter or buffer that is 0 at the start."""
    add = KnockoutConv.add

    def squared(layer, x, update) -> Tensor:
        return add(layer, x, update + layer.more * update.square())

    model = tiny_model(readout)
    for layer in (model.encoder.first, *model.encoder.layers):
        if is_buffer:
            layer.register_buffer("more", torch.zeros(8))
        else:
            layer.more = torch.nn.Parameter(torch.zeros(8))
    monkeypatch.setattr(KnockoutConv, "add", squared)
    assert not is_planned_exactly(model, shared, num_layers)


def test_a_plan_is_not_used_if_a_layer_does_not_call_its_activation(shared, monkeypatch):
    """The hooks on the activation then record nothing."""
    monkeypatch.setattr(KnockoutConv, "add", lambda layer, x, update: x + update.relu())
    assert not is_planned_exactly(tiny_model("both"), shared, 2)


@pytest.mark.parametrize("number", [0, 1])
def test_a_plan_is_not_used_if_a_layer_lacks_a_module(shared, number):
    model = tiny_model("both")
    del layers_of(model.encoder)[number].gate
    assert not is_planned_exactly(model, shared, 2)


@pytest.mark.parametrize("readout", [GlobalReadout, NodeReadout])
def test_a_plan_is_not_exact_for_an_edited_readout(shared, monkeypatch, readout):
    pool = readout.pool
    monkeypatch.setattr(readout, "pool", lambda *arguments: 2 * pool(*arguments))
    model = tiny_model("nodes" if readout is NodeReadout else "both")
    assert not is_planned_exactly(model, shared, 2)


def test_a_readout_with_a_custom_pool_reads_the_states_of_all_nodes(shared, caplog):
    """The log reports this once. The layers still compute only the states that change."""

    class DoubledEffects(NodeReadout):
        def pool(self, change: Tensor, alive: Tensor, wild: object) -> Tensor:
            return 2 * super().pool(change, alive, wild)

    caplog.set_level("INFO")
    model = tiny_model("nodes")
    model.terms["knockout"] = DoubledEffects(NUM_NODES, 8, torch.tensor([1, 4, 5]))
    for _ in range(2):
        assert is_planned_exactly(model, shared, 2)
    (note,) = caplog.messages
    assert "DoubledEffects" in note and "pool_reached" in note


def test_a_readout_with_pool_reached_reads_only_reached_states(shared, caplog):
    calls = []

    class Squares(GlobalReadout):
        def pool(self, change: Tensor, alive: Tensor, wild: object) -> Tensor:
            return (change.square() * alive.unsqueeze(-1)).sum(0)

        def pool_reached(
            self, change: Tensor, before: Tensor, block: ReachBlock, wild: object
        ) -> Tensor:
            calls.append(block)
            total = change.new_zeros(block.num_samples, change.size(1))
            return total.index_add(0, block.layers[-1].sample, change.square())

    caplog.set_level("INFO")
    model = tiny_model("both")
    model.terms["knockout"] = Squares(NUM_NODES, 8, 1)
    assert is_planned_exactly(model, shared, 2)
    assert calls and not caplog.records


def test_the_product_and_its_gradients_equal_a_dense_matrix(graph):
    """This holds for any strides of x, and for second derivatives."""
    matrix = SharedGraph(graph).double().stack.by_target.csr
    csr = torch.sparse_csr_tensor(*matrix, (3 * NUM_NODES, NUM_NODES))
    transposed_csr = csr.to_sparse_coo().T.coalesce().to_sparse_csr()
    transpose = CSR(
        transposed_csr.crow_indices().int(),
        transposed_csr.col_indices().int(),
        transposed_csr.values().clone(),
    )
    contiguous = torch.randn(NUM_NODES, 6).double()
    transposed = torch.randn(6, NUM_NODES).double().T
    expanded = torch.randn(NUM_NODES, 1).double().expand(-1, 6)

    def function(x: Tensor) -> Tensor:
        return SparseProduct.apply(x, matrix, transpose)

    for x in (contiguous, transposed, expanded):
        torch.testing.assert_close(function(x), csr.to_dense() @ x)
    for x in (contiguous, transposed):
        assert torch.autograd.gradcheck(function, x.requires_grad_())
        assert torch.autograd.gradgradcheck(function, x)
