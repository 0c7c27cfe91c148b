"""Tests of the model: all routes of message passing agree, and samples do not affect each other.

The reference is message_passing=expanded, which runs on masked copies of the graph.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import model as model_module
from config import Config
from data import DataConfig
from mask import SharedGraph
from model import FirstConv, ModelConfig, uniform
from model_reach import select
from model_reach_plan import ReachPlanner
from task import KnockoutTask
from task import make_dataset as make_planned_dataset
from tests.bench.host import count_kernels, tiny_step
from tests.sets import tables_of
from tests.template.models import full_model
from tests.template.small_model import (
    NUM_NODES,
    SETS,
    graph_of_12_nodes,
    make_batch,
    make_dataset,
    make_model,
    outputs_and_gradients,
)


@pytest.fixture
def set_block(monkeypatch) -> Callable[[int], None]:
    """set_block(k) makes the model process k samples at once, whatever fits in the cache."""

    def set_size(size: int) -> None:
        monkeypatch.setattr(SharedGraph, "samples_at_once", lambda graph, states: size)

    return set_size


@pytest.fixture
def shared() -> SharedGraph:
    return graph_of_12_nodes()


def test_selecting_few_states_of_the_wild_type_gives_a_sparse_gradient():
    """The cost of a sparse gradient does not depend on the number of nodes."""
    for num_rows in (3, 4):
        states = torch.ones(4, 1, 8, requires_grad=True)
        select(make_model(), states, torch.arange(num_rows)).sum().backward()
        assert states.grad.is_sparse is (num_rows == 3)
        assert states.grad.sum() == 8 * num_rows


def test_training_and_prediction_use_planned_batches(train, predict):
    of_training = train(0, fault="print_plans").check().stdout
    of_prediction = predict(0, "all-singles", "runs/default", fault="print_plans").check().stdout
    for output in (of_training, of_prediction):
        assert "planned: True" in output
        assert "planned: False" not in output


def test_a_dataset_plans_the_layers_that_the_model_needs(shared):
    tables = tables_of(SETS, torch.zeros(len(SETS)))
    tables.split = torch.zeros(len(SETS), dtype=torch.int8)  # training rows
    for options, num_layers, route in (
        ({"readout": "local"}, None, "no knock-out pass, because model.readout=local"),
        ({"message_passing": "expanded"}, None, "message_passing=expanded"),
        ({"message_passing": "reach", "layers": 3}, 3, "3 layers; message_passing=reach"),
    ):
        config = Config(model=ModelConfig(**options))
        dataset, text = make_planned_dataset(tables, shared, config)
        assert getattr(dataset.transform, "num_layers", None) == num_layers
        assert text.endswith(route)


@pytest.mark.parametrize("readout", ["both", "nodes"])
def test_gradients_of_blocks_of_samples_add_up_in_full_precision(shared, set_block, readout):
    """The 96 samples are processed in 96 blocks, or in three blocks of a plan.

    Under autocast, the gradients of 96 blocks must be about as exact as the gradients of three.
    """
    set_block(1)
    errors = []
    for layers in (1, 2):
        gradients = []
        for dtype in (None, torch.bfloat16):
            model = make_model(readout=readout)
            planner = ReachPlanner(shared, layers)
            planner.max_edges = math.inf
            sets = [[node % NUM_NODES, node % 7] for node in range(96)]
            batch = make_batch(shared, sets, planner)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                prediction = model(shared, batch)
            prediction.sum().backward()
            gradients.append(model.encoder.layers[0].root.weight.grad)
        in_full, in_half = gradients
        errors.append((in_half - in_full).norm() / in_full.norm())
    assert errors[0] < 3 * errors[1] < 0.05


def test_local_readout_runs_no_knock_out_pass(shared, set_block, monkeypatch):
    passes = []
    original = FirstConv.forward

    def counted(self, *arguments, **options):
        x = original(self, *arguments, **options)
        passes.append(x.size(1))
        return x

    monkeypatch.setattr(FirstConv, "forward", counted)
    batch = make_batch(shared, SETS)
    make_model(readout="local")(shared, batch)
    assert passes == [1]
    with pytest.raises(RuntimeError, match="batch is on meta but the graph is on cpu"):
        make_model(readout="local")(shared, batch.clone().to("meta"))
    passes.clear()
    set_block(2)
    make_model(readout="both")(shared, batch)
    assert passes == [1, 2, 2, 1]  # one wild-type pass per batch, then blocks of samples


def test_training_hides_identities_and_effects_and_prediction_does_not(shared):
    """Imputed effects replace hidden effects. Hidden slopes and identities are 0."""
    model = make_model(dropout=1e-9)
    readout = model.terms["without_graph"].readout
    torch.nn.init.normal_(readout.imputed)
    batch = make_batch(shared, [[0, 3], [5], [8, 1], [2, 7], [4, 6, 9, 11]])
    model.unseen = 1.0
    hidden = model.train()(shared, batch)
    assert not model.eval()(shared, batch).isclose(hidden).any()
    with torch.no_grad():
        readout.effect.copy_(readout.imputed)
        readout.slope.zero_()
        model.encoder.identity.zero_()
    assert model.train()(shared, batch).equal(hidden)
    torch.testing.assert_close(model.eval()(shared, batch), hidden)
    model.unseen = 0.5
    first = model.train()(shared, batch)
    is_shown, _ = model.draw(shared, batch).is_shown
    with torch.no_grad():
        readout.effect[~is_shown] += 1.0
        model.encoder.identity[~is_shown] += 1.0  # the identity is hidden if the effect is hidden
    assert model(shared, batch).equal(first)
    batch.seed += 1
    assert not first.equal(model(shared, batch))


def test_both_passes_drop_the_same_channels(shared):
    """Otherwise, dropout would look like a knock-out: states without knock-outs would change."""
    model = make_model(readout="global", dropout=0.5).train()
    pooled = []
    head = model.terms["knockout"].head
    head.register_forward_pre_hook(lambda head, inputs: pooled.append(inputs[0]))
    model(shared, make_batch(shared, [[], [0]]))
    nothing, connected = pooled[0].abs().amax(dim=1)
    assert nothing < 1e-5 < connected
    assert (pooled[0][1] == 0).any()  # the readout also drops features of each row
    batch = make_batch(shared, [[0]])
    first = model(shared, batch)
    batch.seed += 1
    assert first != model(shared, batch)  # dropout is active


def test_dropout_applies_to_messages_and_to_the_local_readout(shared):
    model = make_model(readout="local", dropout=0.5).train()
    local = model.terms["local"]
    inputs = []
    for layer in (model.encoder.first.norm, local.embed, local.head[0]):
        layer.register_forward_pre_hook(lambda layer, values: inputs.append(values[0]))
    model(shared, make_batch(shared, SETS))
    dropped = [(values == 0).double().mean().item() for values in inputs]
    assert len(dropped) == 3 and all(0.3 < share < 0.7 for share in dropped), dropped


def test_rows_and_nodes_with_the_same_number_have_different_random_numbers(shared):
    batch = make_batch(shared, SETS)
    draws = make_model(dropout=0.5).train().draw(shared, batch)
    assert not draws.row_dropout.equal(draws.node_dropout[batch.index])


@pytest.mark.parametrize("readout", ["both", "local", "global", "nodes"])
def test_all_routes_give_the_same_results_with_dropout(shared, set_block, monkeypatch, readout):
    """The random numbers do not depend on the route, the batches of a step, and padding, -1.

    The plans have the first layer, all layers, or different numbers of layers in each block.
    """
    shared = shared.double()
    options = {"dropout": 0.4, "layers": 3, "readout": readout}
    set_block(2)
    expanded = make_model(torch.float64, message_passing="expanded", **options).train()
    expanded.unseen = 0.3
    references = outputs_and_gradients(expanded, shared, make_batch(shared, SETS))
    expected, _ = references
    monkeypatch.setattr(ReachPlanner, "BLOCK", 3)
    planners = [None]
    for layers, max_edges in ((1, math.inf), (3, math.inf), (3, 30)):
        planners.append(ReachPlanner(shared, layers))
        planners[-1].max_edges = max_edges
    depths = [len(block.layers) for block in make_batch(shared, SETS, planners[-1]).plan]
    assert len(set(depths)) > 1
    for planner, checkpointing in itertools.product(planners, (False, True)):
        model = make_model(torch.float64, checkpointing=checkpointing, **options).train()
        model.unseen = 0.3
        results = outputs_and_gradients(model, shared, make_batch(shared, SETS, planner))
        for result, reference in zip(results, references, strict=True):
            assert (result - reference).norm() <= 1e-10 * reference.norm()
    dataset = make_dataset(shared, SETS)
    for rows in ([3, 0], [-1, 4, 2, 1, -1]):
        batch = dataset.__getitems__(rows)
        batch.seed = torch.tensor(0)
        is_real = batch.index >= 0
        prediction = model(shared, batch)[is_real]
        expected_of_rows = expected[batch.index[is_real]]
        torch.testing.assert_close(prediction, expected_of_rows, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(model.eval()(shared, make_batch(shared, SETS)), expected, rtol=1e-3)


def test_no_random_numbers_are_drawn_in_evaluation_or_without_dropout(shared, monkeypatch):
    monkeypatch.setattr(model_module, "uniform", None)
    batch = make_batch(shared, SETS)
    model = make_model(dropout=0.4).eval()
    model.unseen = 0.5
    expected = model(shared, batch)
    assert make_model(dropout=0.0).train()(shared, batch).equal(expected)
    with pytest.raises(TypeError):
        model.train()(shared, batch)


def of_position(seed: int, key: int, column: int) -> float:
    """Returns one number of `uniform`, computed with Python's unlimited integers."""
    golden = 2**64 - 0x61C8864680B583EB
    x = ((seed + key) * golden + column) % 2**64
    for _ in range(2):
        upper = x >> 32 | (0xFFFFFFFF00000000 if x >> 63 else 0)
        x = (x ^ upper) * golden % 2**64
    return (x - 2**64 if x >> 63 else x) / 2**64 + 0.5


def test_random_numbers_equal_exact_integer_arithmetic():
    for seed, keys in ((0, [0, 1, 2]), (2**56 - 1, [-1, 10**7, 3 * 10**12])):
        expected = [[of_position(seed, key, column) for column in range(66)] for key in keys]
        found = uniform(torch.tensor(seed), torch.tensor(keys), 66)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-7)


def test_random_numbers_are_uniform_and_independent():
    """Deviations of a million numbers must be smaller than about 5 standard errors."""
    check_random_numbers(8, num_keys=16_000)


def check_random_numbers(seed: int, num_keys: int) -> None:
    """Checks mean, variance, correlations and frequencies of the random numbers of some keys."""
    width = 64
    numbers, of_another_step = (
        uniform(torch.tensor(seed + later), torch.arange(num_keys), width).double() - 0.5
        for later in (0, 0x1B873593CC9E2D)
    )
    count = numbers.numel()
    assert abs(numbers.mean()) * (12 * count) ** 0.5 < 5
    assert abs(numbers.var() - 1 / 12) * (180 * count) ** 0.5 < 5
    of_columns = numbers.mean(0).abs() * (12 * len(numbers)) ** 0.5
    assert of_columns.max() < 5
    of_keys = numbers.mean(1).abs() * (12 * width) ** 0.5
    assert of_keys.max() < 6  # the maximum of many keys is larger
    pairs = [(numbers[step:], numbers[:-step]) for step in (1, 2, 3, 64, 1000)]
    pairs += [(numbers[:, step:], numbers[:, :-step]) for step in (1, 2, 32)]
    pairs += [(numbers[1:, 1:], numbers[:-1, :-1]), (numbers[1:, :-1], numbers[:-1, 1:])]
    pairs += [(numbers, of_another_step)]
    for a, b in pairs:
        assert abs((a * b).sum()) * 12 / a.numel() ** 0.5 < 5
    correlation = numbers.T.corrcoef() - torch.eye(width)
    assert correlation.abs().max() * len(numbers) ** 0.5 < 5.5  # for any two columns
    sixteenths = (numbers * 16 + 8).long().clamp(max=15)
    for a, b in ((sixteenths[1:], sixteenths[:-1]), (sixteenths[:, 1:], sixteenths[:, :-1])):
        frequency = (16 * a + b).flatten().bincount(minlength=256) / a.numel()
        deviation = (256 * frequency - 1).abs().max() * (a.numel() / 256) ** 0.5
        assert deviation < 5  # for the frequency of each pair of sixteenths


@pytest.mark.parametrize("readout", ["both", "local", "global", "nodes"])
def test_terms_have_the_order_of_the_parts_of_a_prediction(tmp_path, readout):
    """All terms are trained, except for the baseline with readout=nodes."""
    sets = 2 * SETS
    tables = replace(
        tables_of(sets, torch.randn(len(sets)).double()),
        genes=[f"Y{node}" for node in range(NUM_NODES)],
        relations=["a"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        edge_weight=torch.ones(1).double(),
        features=torch.empty(NUM_NODES, 0),
        split=torch.tensor([0, 1], dtype=torch.int8).repeat_interleave(len(SETS)),
        targets=["Y0" if readout == "nodes" else "score"],
    )
    data = DataConfig(cache_dir=str(tmp_path))
    task = KnockoutTask.from_tables(tables, Config(model=ModelConfig(readout=readout), data=data))
    expected = {
        "both": ["without_graph", "local", "pairs", "knockout"],
        "local": ["without_graph", "local", "pairs"],
        "global": ["knockout"],
        "nodes": ["without_graph", "knockout"],
    }
    model = task.build_model()
    assert list(model.terms) == expected[readout]
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    of_baseline = {f"terms.without_graph.readout.{name}" for name in ("slope", "effect", "weights")}
    assert fixed == (of_baseline if readout == "nodes" else set())


def test_a_model_without_tables_predicts_zero_and_hides_no_nodes(shared):
    """An output of 0 is the mean of the scores, because outputs are deviations from the mean."""
    model = full_model(ModelConfig(hidden=8), NUM_NODES, num_relations=3)
    assert model.unseen == 0
    assert (model.eval()(shared, make_batch(shared, SETS)) == 0).all()


def test_the_global_readout_starts_at_zero_and_is_trained(shared):
    """Its term is 0 at first, but its last layer gets a gradient in the first step."""
    torch.manual_seed(0)
    model = full_model(ModelConfig(hidden=8, dropout=0.0), NUM_NODES, num_relations=3)
    batch = make_batch(shared, SETS)
    last = model.terms["knockout"].head[-1]
    added = []
    model.terms["knockout"].register_forward_hook(
        lambda readout, inputs, output: added.append(output)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model(shared, batch) - batch.y).square().sum().backward()
    assert (added[0] == 0).all() and last.weight.grad.abs().max() > 0
    optimizer.step()
    model(shared, batch)
    assert added[1].abs().max() > 1e-3


@pytest.mark.parametrize("route", ["shared", "expanded"])
def test_checkpointing_saves_memory_and_changes_nothing(shared, set_block, route):
    results = []
    kept_bytes = []
    set_block(1)
    for checkpointing in (False, True):
        model = make_model(dropout=0.3, checkpointing=checkpointing, message_passing=route).train()
        sizes = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            prediction = model(shared, make_batch(shared, SETS))
        prediction.square().sum().backward()
        results.append((prediction, *(parameter.grad for parameter in model.parameters())))
        kept_bytes.append(sum(sizes))
    assert kept_bytes[1] < 0.7 * kept_bytes[0]
    for result, reference in zip(*results, strict=True):
        torch.testing.assert_close(result, reference)


def test_a_step_launches_at_most_418_kernels():
    kernels = count_kernels(tiny_step(torch.device("cpu")))
    assert 200 < kernels.total() <= 418, kernels
    # There are 10 products of dense matrices. The number of sparse products does not depend on the
    # number of relations: one in each pass, forward and backward, for 5 layers on all nodes and for
    # one layer on reached states.
    assert kernels["addmm"] == 10 + 12
