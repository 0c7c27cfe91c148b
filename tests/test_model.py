"""The model: both message-passing routes agree, and samples of a batch do not affect each other."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch_geometric.data import Data

import model as model_module
from data import KnockoutDataset
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig, uniform
from reach import ReachPlanner, block_size, plan_route
from tests.bench.host import count_kernels, tiny_step
from tests.tools.runs import small_graph, tables_of
from tests.tools.syncs import CountSynchronisations

NUM_NODES, NUM_FEATURES = 12, 3
SETS = [[0, 3], [], [5], [8, 1], [2, 0, 7, 1, 11]]  # ragged; node 10 has no edge
TARGETS = [5, 0, 10, 8, 2, 6]  # the nodes of the scores for the readout `nodes`


@pytest.fixture
def shared() -> SharedGraph:
    generator = torch.Generator().manual_seed(0)
    graph = small_graph(generator)
    graph["gene"].x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator)
    graph["gene", "b", "gene"].edge_weight = torch.rand(25, generator=generator) + 0.1
    return SharedGraph(graph)


def make_batch(
    shared: SharedGraph, sets: list[list[int]], planner: ReachPlanner | None = None
) -> Data:
    dataset = KnockoutDataset(
        tables_of(sets, torch.arange(len(sets)) / 3), shared.degree, transform=planner
    )
    batch = dataset.__getitems__(list(range(len(sets))))
    batch.seed = torch.tensor(0)
    return batch


def make_model(dtype: torch.dtype = torch.float32, **options) -> KnockoutGNN:
    torch.manual_seed(0)
    config = ModelConfig(**{"hidden": 8, "layers": 2, "dropout": 0.0, **options})
    num_targets = len(TARGETS) if config.readout == "nodes" else 1
    scale = {"y_offset": [0.3] * num_targets, "y_std": [2.0] * num_targets}
    model = KnockoutGNN(
        config, NUM_NODES, 3, NUM_FEATURES, **scale, target_nodes=torch.tensor(TARGETS)
    ).to(dtype)
    for parameter in model.parameters():  # parts that are initialised to zero would hide errors
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def outputs_and_gradients(
    model: KnockoutGNN, shared: SharedGraph, batch: Data
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predictions [B], and the gradient of all parameters as one vector."""
    prediction = model(shared, batch)
    (prediction - batch.y).square().sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return prediction.detach(), torch.cat([parameter.grad.flatten() for parameter in trained])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("readout", ["both", "local", "global", "nodes"])
@pytest.mark.parametrize(("layers", "embedding"), [(1, True), (2, True), (2, False), (3, True)])
def test_shared_and_expanded_routes_agree_in_outputs_and_gradients(
    shared, dtype, tolerance, readout, layers, embedding
):
    shared, options = (
        shared.to(dtype),
        {"readout": readout, "layers": layers, "embedding": embedding},
    )
    batch = make_batch(shared, SETS)
    routes = [
        outputs_and_gradients(make_model(dtype, message_passing=route, **options), shared, batch)
        for route in ("shared", "expanded")
    ]
    for ours, reference in zip(*routes, strict=True):
        assert reference.norm() > 0
        assert (ours - reference).norm() <= tolerance * reference.norm()


@pytest.fixture
def limited_planner(monkeypatch) -> Callable[..., ReachPlanner]:
    """limited_planner(graph, layers, max_edges) plans small blocks.

    It does so as long as they have so many edges per sample.
    """

    def make(graph: SharedGraph, layers: int, max_edges: float) -> ReachPlanner:
        monkeypatch.setattr(ReachPlanner, "BLOCK", 3)
        planner = ReachPlanner(graph, layers)
        planner.max_edges = max_edges
        return planner

    return make


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("layers", "readout"), [(1, "both"), (2, "both"), (3, "both"), (4, "both"), (3, "nodes")]
)
def test_reached_states_give_what_masked_copies_give(
    shared, set_block, limited_planner, dtype, tolerance, layers, readout
):
    """For all layers, for the first one, and for different numbers of layers.

    The last are those for which blocks of a batch are planned.
    """
    shared, everything = shared.to(dtype), list(range(NUM_NODES))
    sets = [*SETS, [10], everything, *([node] for node in range(NUM_NODES)), [0, 10], []]
    reference = outputs_and_gradients(
        make_model(dtype, layers=layers, readout=readout, message_passing="expanded"),
        shared,
        make_batch(shared, sets),
    )
    set_block(2)
    mixed = False
    for depth, max_edges, checkpointing in itertools.product(
        {1, layers}, (30, math.inf), (False, True)
    ):
        batch = make_batch(shared, sets, limited_planner(shared, depth, max_edges))
        depths = {len(block.layers) for block in batch.reach}
        mixed |= len(depths) > 1
        assert max_edges == 30 or depths == {depth}
        model = make_model(
            dtype, layers=layers, readout=readout, checkpointing=checkpointing
        ).train()
        for ours, expected in zip(
            outputs_and_gradients(model, shared, batch), reference, strict=True
        ):
            assert (ours - expected).norm() <= tolerance * expected.norm(), (depth, max_edges)
    assert mixed


def test_a_few_rows_of_the_wild_type_states_have_a_sparse_gradient():
    """So that its cost does not follow the number of nodes."""
    for num_rows in (3, 4):
        states = torch.ones(4, 1, 8, requires_grad=True)
        make_model().select(states, torch.arange(num_rows)).sum().backward()
        assert states.grad.is_sparse is (num_rows == 3)
        assert states.grad.sum() == 8 * num_rows


def test_reached_states_keep_dropout_and_need_no_host(shared, limited_planner):
    results = []
    for planner in (None, limited_planner(shared, 3, math.inf)):
        batch, model = make_batch(shared, SETS, planner), make_model(dropout=0.4, layers=3).train()
        with CountSynchronisations() as count:
            results.append(model(shared, batch))
        assert count.seen == []
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_the_route_is_chosen_by_what_the_knock_outs_reach(shared, monkeypatch):
    batch = make_batch(shared, SETS)
    dataset = KnockoutDataset(tables_of(SETS, torch.zeros(len(SETS))), shared.degree)
    monkeypatch.setattr(ReachPlanner, "EDGE_SHARE", 0.0)
    for edges_per_node, chosen, planned in ((99.0, "reach", 3), (0.01, "shared", 0)):
        monkeypatch.setattr(ReachPlanner, "EDGES_PER_NODE", edges_per_node)
        planner, line = plan_route(ModelConfig(layers=3), shared, dataset)
        assert (
            line.endswith(f" in {planned} of 3 layers: {chosen}") and planner.num_layers == planned
        )
    monkeypatch.setattr(ReachPlanner, "EDGES_PER_NODE", 99.0)
    for route, planned in (("shared", 1), ("reach", 3)):
        planner, line = plan_route(ModelConfig(layers=3, message_passing=route), shared, dataset)
        assert line.endswith(f": {route}") and planner.num_layers == planned
        reached = sum(len(block.layers[0].node) for block in planner.plan(batch))
        assert f" reaches {100 * reached / (len(SETS) * NUM_NODES):.2g}" in line
    assert plan_route(ModelConfig(message_passing="expanded"), shared, dataset) == (
        None,
        "expanded",
    )
    planner, line = plan_route(ModelConfig(readout="local"), shared, dataset)
    assert planner is None and line == "no knock-out pass, as model.readout=local"


REPORT_PLANS = """
import train
changes = train.KnockoutGNN.changes
def report(model, graph, batch, wild):
    print("planned:", "reach" in batch)
    return changes(model, graph, batch, wild)
train.KnockoutGNN.changes = report
train.main()
"""


def test_training_and_prediction_take_planned_batches(train, tmp_path):
    (tmp_path / "report.py").write_text(REPORT_PLANS)
    for arguments in (
        (),
        ("--predict", "all-singles", "--checkpoint", "runs/default/checkpoints/best.pt"),
    ):
        output = train(0, *arguments, script=tmp_path / "report.py").check().stdout
        assert "planned: True" in output and "planned: False" not in output


@pytest.mark.parametrize("route", ["shared", "expanded"])
def test_a_prediction_does_not_depend_on_its_batch(shared, route):
    model = make_model(torch.float64, message_passing=route)
    shared = shared.double()
    together = model(shared, make_batch(shared, SETS))
    alone = torch.cat([model(shared, make_batch(shared, [nodes])) for nodes in SETS])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert len(together.unique()) == len(SETS)


@pytest.mark.parametrize("route", ["shared", "expanded"])
@pytest.mark.parametrize("readout", ["both", "local", "global"])
def test_an_empty_batch_gives_no_predictions(shared, route, readout):
    model = make_model(message_passing=route, readout=readout)
    prediction = model(shared, make_batch(shared, []))
    assert prediction.shape == (0, 1)
    prediction.sum().backward()


@pytest.fixture
def set_block(monkeypatch) -> Callable[[int], None]:
    """set_block(k) makes the model process k samples at a time.

    The small states here would fit in one block.
    """
    return lambda size: monkeypatch.setattr(
        model_module, "block_size", lambda wild_type, num_relations: size
    )


@pytest.mark.parametrize("readout", ["both", "nodes"])
def test_gradients_of_blocks_of_samples_add_up_in_full_precision(shared, set_block, readout):
    """Under autocast, sums over 96 passes are as exact as those of reached states in three."""
    set_block(1)
    errors = []
    for layers in (1, 2):
        gradients = []
        for dtype in (None, torch.bfloat16):
            model, planner = make_model(readout=readout), ReachPlanner(shared, layers)
            planner.max_edges = math.inf
            batch = make_batch(
                shared, [[node % NUM_NODES, node % 7] for node in range(96)], planner
            )
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                prediction = model(shared, batch)
            prediction.sum().backward()
            gradients.append(model.layers[1].root.weight.grad)
        expected, found = gradients
        errors.append((found - expected).norm() / expected.norm())
    assert errors[0] < 3 * errors[1] < 0.05


@pytest.mark.parametrize("block", [1, 2, 4, 100])
def test_the_block_size_does_not_change_the_result(shared, set_block, block):
    shared = shared.double()
    batch = make_batch(shared, SETS)
    expected = outputs_and_gradients(make_model(torch.float64), shared, batch)
    set_block(block)
    for value, reference in zip(
        outputs_and_gradients(make_model(torch.float64), shared, batch), expected, strict=True
    ):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


def test_a_block_fits_the_cache_and_is_never_empty():
    assert block_size(torch.empty(6607, 1, 32), 9) == 1
    assert block_size(torch.empty(400, 1, 32), 3) == 20
    assert block_size(torch.empty(10**6, 1, 64, device="meta"), 3) == 1


def test_the_order_of_the_knocked_out_nodes_does_not_matter(shared):
    shared, model = shared.double(), make_model(torch.float64)
    batch = make_batch(shared, [[0, 3, 7]])
    expected = model(shared, batch)
    for order in itertools.permutations([0, 3, 7]):
        batch.perturbed = torch.tensor(order)
        torch.testing.assert_close(model(shared, batch), expected, rtol=1e-12, atol=1e-12)


def test_the_knock_out_reaches_the_prediction_through_the_graph(shared):
    """With the global readout alone, only a node's edges matter.

    Knocking out a node without any changes nothing.
    """
    model = make_model(readout="global")
    nothing, isolated, connected = (
        model(shared, make_batch(shared, [[], [10], [0]])).flatten().tolist()
    )
    assert isolated == pytest.approx(nothing, abs=1e-6)
    assert abs(connected - nothing) > 1e-3


def test_local_readout_runs_no_knock_out_pass(shared, set_block, monkeypatch):
    passes = []
    original = KnockoutGNN.encode

    def counted(self, *arguments):
        x, trace = original(self, *arguments)
        passes.append(x.size(1))
        return x, trace

    monkeypatch.setattr(KnockoutGNN, "encode", counted)
    batch = make_batch(shared, SETS)
    make_model(readout="local")(shared, batch)
    assert passes == [1]
    passes.clear()
    set_block(2)
    make_model(readout="both")(shared, batch)
    assert passes == [1, 2, 2, 1]  # one wild-type pass per batch, then blocks of samples


def test_training_hides_what_nodes_know_of_themselves_and_prediction_does_not(shared):
    """With everything hidden, neither a node's effect nor identity matters to a training step."""
    model, batch = make_model(dropout=1e-9), make_batch(shared, [[0, 3], [5], [8, 1]])
    model.unseen = 1.0
    hidden, shown = train.train()(shared, batch), model.eval()(shared, batch)
    with torch.no_grad():
        model.additive.effect.add_(1.0)
        model.additive.slope.add_(1.0)
        model.identity.add_(torch.randn(model.identity.shape))
    assert train.train()(shared, batch).equal(hidden)
    assert not model.eval()(shared, batch).isclose(shown).any()
    model.unseen = 0.5
    first = train.train()(shared, batch)
    batch.seed += 1
    assert not first.equal(model(shared, batch))


def test_dropout_does_not_look_like_a_knock_out(shared):
    """Both passes drop the same channels.

    So a sample without knock-outs does not differ from the wild type.
    """
    model = make_model(readout="global", dropout=0.5).train()
    pooled = []
    model.change_readout.head.register_forward_pre_hook(
        lambda head, inputs: pooled.append(inputs[0])
    )
    model(shared, make_batch(shared, [[], [0]]))
    assert pooled[0][0].abs().max() < 1e-5 < pooled[0][1].abs().max()
    batch = make_batch(shared, [[0]])
    first = model(shared, batch)
    batch.seed += 1
    assert first != model(shared, batch)  # dropout is active


@pytest.mark.parametrize("readout", ["both", "local", "global", "nodes"])
def test_all_routes_draw_the_same(shared, set_block, limited_planner, readout):
    """And so does any split of a step into batches.

    A row that is not there, -1, changes no other's.
    """
    shared, options = shared.double(), {"dropout": 0.4, "layers": 3, "readout": readout}
    set_block(2)
    expanded = make_model(torch.float64, message_passing="expanded", **options).train()
    expanded.unseen = 0.3
    expected, gradient = outputs_and_gradients(expanded, shared, make_batch(shared, SETS))
    for planner, checkpointing in itertools.product(
        (None, limited_planner(shared, 1, math.inf), limited_planner(shared, 3, math.inf)),
        (False, True),
    ):
        model = make_model(torch.float64, checkpointing=checkpointing, **options).train()
        model.unseen = 0.3
        ours = outputs_and_gradients(model, shared, make_batch(shared, SETS, planner))
        assert (ours[0] - expected).norm() <= 1e-10 * expected.norm()
        assert (ours[1] - gradient).norm() <= 1e-10 * gradient.norm()
    dataset = KnockoutDataset(tables_of(SETS, torch.zeros(len(SETS))), shared.degree)
    for rows in ([3, 0], [-1, 4, 2, 1, -1]):
        some = dataset.__getitems__(rows)
        some.seed = torch.tensor(0)
        present = some.index >= 0
        torch.testing.assert_close(
            model(shared, some)[present], expected[some.index[present]], rtol=1e-10, atol=1e-10
        )
    assert not torch.allclose(model.eval()(shared, make_batch(shared, SETS)), expected, rtol=1e-3)


def test_nothing_is_drawn_in_evaluation_or_without_dropout(shared, monkeypatch):
    monkeypatch.setattr(model_module, "uniform", None)
    batch = make_batch(shared, SETS)
    model = make_model(dropout=0.4).eval()
    model.unseen = 0.5
    expected = model(shared, batch)
    assert make_model(dropout=0.0).train()(shared, batch).equal(expected)
    with pytest.raises(TypeError):
        train.train()(shared, batch)


def of_position(seed: int, key: int, column: int) -> float:
    """What `uniform` computes, in integers without a bound."""
    golden = 2**64 - 0x61C8864680B583EB
    x = ((seed + key) * golden + column) % 2**64
    for _ in range(2):
        upper = x >> 32 | (0xFFFFFFFF00000000 if x >> 63 else 0)
        x = (x ^ upper) * golden % 2**64
    return (x - 2**64 if x >> 63 else x) / 2**64 + 0.5


def test_random_numbers_are_those_of_integer_arithmetic():
    for seed, keys in ((0, [0, 1, 2]), (2**56 - 1, [-1, 10**7, 3 * 10**12])):
        expected = [[of_position(seed, key, column) for column in range(66)] for key in keys]
        found = uniform(torch.tensor(seed), torch.tensor(keys), 66)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-7)


def test_random_numbers_are_uniform_and_independent():
    """Deviations of ten million numbers in units of their standard error.

    The largest of so many is below 5.
    """
    width = 64
    for seed in (0, 8, 0x5DEECE66D1234):
        numbers, other = (
            uniform(torch.tensor(seed + later), torch.arange(160_000), width).double() - 0.5
            for later in (0, 0x1B873593CC9E2D)  # another step's
        )
        count = numbers.numel()
        assert count > 1e7
        assert abs(numbers.mean()) * (12 * count) ** 0.5 < 5
        assert abs(numbers.var() - 1 / 12) * (180 * count) ** 0.5 < 5
        assert (numbers.mean(0).abs() * (12 * len(numbers)) ** 0.5).max() < 5  # of each column
        assert (
            numbers.mean(1).abs() * (12 * width) ** 0.5
        ).max() < 6  # of each key: there are many
        pairs = [(numbers[step:], numbers[:-step]) for step in (1, 2, 3, 64, 1000)]
        pairs += [(numbers[:, step:], numbers[:, :-step]) for step in (1, 2, 32)]
        pairs += [
            (numbers[1:, 1:], numbers[:-1, :-1]),
            (numbers[1:, :-1], numbers[:-1, 1:]),
            (numbers, other),
        ]
        for a, b in pairs:
            assert abs((a * b).sum()) * 12 / a.numel() ** 0.5 < 5
        correlation = numbers.T.corrcoef() - torch.eye(width)
        assert correlation.abs().max() * len(numbers) ** 0.5 < 5.5  # of any two columns
        sixteenths = (numbers * 16 + 8).long().clamp(max=15)
        for a, b in ((sixteenths[1:], sixteenths[:-1]), (sixteenths[:, 1:], sixteenths[:, :-1])):
            share = (16 * a + b).flatten().bincount(minlength=256) / a.numel()
            assert (256 * share - 1).abs().max() * (
                a.numel() / 256
            ) ** 0.5 < 5  # of pairs of sixteenths


def test_by_default_predictions_are_not_scaled_and_no_node_is_hidden():
    model = KnockoutGNN(ModelConfig(hidden=8), NUM_NODES, num_relations=3)
    assert model.y_std.tolist() == [1.0] and model.y_offset.tolist() == [0.0] and model.unseen == 0


def test_the_global_readout_starts_at_zero_and_is_trained(shared):
    """It adds nothing to the local readout at first, but gets a gradient from the first step on."""
    torch.manual_seed(0)
    model = KnockoutGNN(ModelConfig(hidden=8, dropout=0.0), NUM_NODES, num_relations=3)
    batch, last = make_batch(shared, SETS), model.change_readout.head[-1]
    added = []
    model.change_readout.register_forward_hook(lambda readout, inputs, output: added.append(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model(shared, batch) - batch.y).square().sum().backward()
    assert (added[0] == 0).all() and last.weight.grad.abs().max() > 0
    optimizer.step()
    model(shared, batch)
    assert added[1].abs().max() > 1e-3


@pytest.mark.parametrize("route", ["shared", "expanded"])
def test_checkpointing_saves_memory_and_changes_nothing(shared, set_block, route):
    results, kept = [], []
    set_block(1)
    for checkpointing in (False, True):
        model = make_model(dropout=0.3, checkpointing=checkpointing, message_passing=route).train()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.append(t.nbytes) or t, lambda t: t
        ):
            prediction = model(shared, make_batch(shared, SETS))
        prediction.square().sum().backward()
        results.append((prediction, *(parameter.grad for parameter in model.parameters())))
        kept.append(sum(sizes))
    assert kept[1] < 0.7 * kept[0]
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference)


def test_every_parameter_is_used(shared):
    """DDP waits for the gradient of every parameter, even for a batch of nothing but padding."""
    for readout, sets in itertools.product(["both", "local", "global", "nodes"], [SETS, [[]]]):
        model = make_model(readout=readout)
        model(shared, make_batch(shared, sets)).sum().backward()
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        assert [name for name, parameter in trained.items() if parameter.grad is None] == []
        fixed = {"additive.slope", "additive.effect"} if readout == "nodes" else set()
        assert {name for name, _ in model.named_parameters()} - trained.keys() == fixed


def test_an_effect_on_a_node_comes_from_the_change_of_its_own_state(shared):
    """Beyond the additive part, nothing changes where no state does.

    A target that is knocked out has its own part.
    """
    model = make_model(readout="nodes", layers=1).double()
    shared = shared.double()
    sets = [[], [10], [0], [5, 8]]
    batch = make_batch(shared, sets)
    additive = model.y_offset + model.y_std * model.additive(
        torch.ones(2, NUM_NODES).bool(), torch.ones(4, 1), batch
    )
    effects = model(shared, batch) - additive
    source, target = shared.edge_index
    for sample, nodes in enumerate(sets):
        reached = set(target[torch.isin(source, torch.tensor(nodes))].tolist()) | set(nodes)
        for t, node in enumerate(TARGETS):
            assert (effects[sample, t].abs() > 1e-6) == (node in reached), (nodes, node)
    model.change_readout.dead.bias.data += 1.0
    changed = (model(shared, batch) - additive - effects) / model.y_std
    expected = [[float(node in nodes) for node in TARGETS] for nodes in sets]
    torch.testing.assert_close(changed, torch.tensor(expected).double())


def test_predictions_are_in_units_of_y_and_checkpoints_hold_the_scale(shared):
    model = make_model()
    assert {"y_offset", "y_std"} <= set(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(
        model(shared, make_batch(shared, SETS)), torch.full((len(SETS), 1), 0.3)
    )


def test_a_step_launches_at_most_381_kernels():
    kernels = count_kernels(tiny_step(torch.device("cpu")))
    assert 200 < kernels.total() <= 381, kernels
    assert (
        kernels["spmm"] == 12
    )  # one each way for 5 layers on all nodes, whatever the number of relations, and a reached one
