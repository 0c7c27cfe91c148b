"""Requirements for a replaced model.py or data.py: `./launch.sh test -m contract` checks them.

The tests use the model and the tables of config.yaml, or of the file after the option --config. A
test that fails prints a usual cause; docs/runs.md has a table of further causes.
"""

import copy
import dataclasses
import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import metrics
from data import load
from data_loader import StepSampler, make_loader
from data_tables import Tables
from errors import DataError
from parts import is_here
from task import KnockoutTask, make_dataset
from tests.causes import assert_close, suspects
from tests.few_rows import few_rows
from tests.sets import pack_levels, pack_sets
from tests.syncs import CountSynchronisations
from train import read_config

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def arguments(request):
    file = request.config.option.config
    return ["--config", os.path.abspath(file)] if file else []


@pytest.fixture(scope="module")
def config(arguments):
    return read_config(arguments)


@pytest.fixture(scope="module")
def tables(config):
    return few_rows(load(config.data))


@pytest.fixture(scope="module")
def task(tables, config):
    return KnockoutTask.from_tables(tables, config)


@pytest.fixture(scope="module")
def graph(task):
    return copy.deepcopy(task.graph).float()


@pytest.fixture
def model(task):
    return disturbed_model(task)


def disturbed_model(task: KnockoutTask) -> nn.Module:
    """Returns the model of the task, with noise added to its parameters and saved buffers.

    Without the noise, values that start neutral, such as zeros, would hide errors.
    """
    torch.manual_seed(0)
    model = task.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, value in model.state_dict().items():
            if name not in dict(model.named_parameters()) and value.is_floating_point():
                value += 0.1 * torch.rand_like(value)  # a variance stays positive
    return model.eval()


def model_on_copies(task: KnockoutTask, model: nn.Module) -> nn.Module | None:
    """Returns the same model with message passing on masked copies of the graph.

    Returns None if this copy, or the configured model, does not have this route.
    """
    has_copies = is_here("mask_copies")
    if not has_copies or task.config.model.message_passing not in ("auto", "shared", "reach"):
        return None
    options = dataclasses.replace(task.config.model, message_passing="expanded")
    config = dataclasses.replace(task.config, model=options)
    other = dataclasses.replace(task, config=config).build_model().double().eval()
    other.load_state_dict(model.state_dict())
    return other


def dataset_of(
    task: KnockoutTask, samples: Tables, transform: Callable[[Data], Data] | None = None
) -> Dataset:
    """Returns the dataset of some samples, with the functions that `make_dataset` adds."""
    return dataclasses.replace(task.dataset.with_samples(samples), transform=transform)


@pytest.fixture
def batch_of(task, tables, sets):
    """batch_of(chosen_sets) builds the batch of some of `sets`.

    Each set has the other data, such as added columns, of a row of the tables.
    """
    perturbed, ptr = pack_sets(sets)
    y = torch.zeros(len(sets), *tables.y.shape[1:])
    samples = dataclasses.replace(
        tables, perturbed=perturbed, perturbed_ptr=ptr, level=None, y=y, weight=None
    )

    def build(chosen_sets, transform=None):
        batch = dataset_of(task, samples, transform).__getitems__(
            [sets.index(nodes) for nodes in chosen_sets]
        )
        batch.seed = torch.tensor(0)
        return batch

    return build


@pytest.fixture
def sets(tables):
    """Sets of knocked-out nodes: one of each size in the first 200 rows, others, an empty set."""
    bounds = tables.perturbed_ptr[:200].tolist()
    nodes = tables.perturbed.tolist()
    rows = [nodes[start:end] for start, end in itertools.pairwise(bounds)]
    by_size = {len(row): row for row in rows}
    return [*by_size.values(), *rows[:3], []]


def test_splits_do_not_overlap_and_perturbed_nodes_are_in_the_graph(tables):
    splits = [tables.rows(split) for split in ("train", "val", "test")]
    assert sum(map(len, splits)) == len(torch.cat(splits).unique()) <= len(tables.y), (
        "A row is in two splits, or a split lists a row twice or a row that does not exist. "
        "Usually `Tables.rows` in data_tables.py was changed."
    )
    assert all(len(rows) for rows in splits), (
        "One of the splits train, val and test has no row. Usually `load` in data.py does not set "
        "`Tables.split`, or the tables have too few rows."
    )
    assert not tables.y.isinf().any(), (
        "A score is infinite. A score that is missing must be nan. Usually the code that reads "
        "scores, in data_tables.py or data.py, does not check them."
    )
    assert tables.perturbed.min() >= 0 and tables.perturbed.max() < len(tables.genes), (
        "A row perturbs a node that is not in the graph. `Tables.perturbed` must contain "
        "positions in `Tables.genes`. Usually the names of nodes were sorted or filtered after "
        "the rows had been read."
    )


def test_epoch_contains_each_training_row_once_on_any_number_of_ranks(task):
    rows = task.rows("train")[:100]
    for world_size in (1, 2, 3):
        seen = []
        for rank in range(world_size):
            sampler = StepSampler(rows, 6 * world_size, 2, world_size, rank, seed=0)
            for batch in make_loader(task.dataset, sampler, workers=0, device=torch.device("cpu")):
                seen += batch.index[batch.index >= 0].tolist()
        assert sorted(seen) == rows.tolist(), (
            f"On {world_size} ranks, an epoch skips or repeats training rows. Usually "
            "`batch.index` is not the row number, with -1 for padding (`__getitems__` in data.py), "
            "or `StepSampler` in data_loader.py was changed."
        )


def test_epochs_have_different_orders_of_rows(task):
    sampler = StepSampler(task.rows("train")[:100], 6, 1, world_size=1, rank=0, seed=0)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1], (
        "Two epochs have the same order of rows. Usually `StepSampler.set_epoch` in data_loader.py "
        "does not use the epoch."
    )


def test_metrics_are_larger_for_better_predictions(task):
    """Predictions that equal the scores must not be worse than the same predictions, shuffled."""
    y = task.tables.y[~task.tables.y.isnan().any(dim=1)]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    output = torch.zeros(len(y), *task.output_shape, dtype=torch.float64)
    output[:, :, 0] = task.criterion.standardise(y, y.dtype)
    truth = {**task.predictions(output), "prediction": y}
    shuffled = {name: values[order] for name, values in truth.items()}
    of_truth = metrics.metrics_beside_rivals(y, truth, {})
    of_shuffled = metrics.metrics_beside_rivals(y, shuffled, {})
    for name, value in of_truth.items():
        difference = value - of_shuffled[name]
        assert not (difference < 0).any(), (
            f"The metric {name} is smaller for perfect predictions than for shuffled ones. Usually "
            "it is an error: return its negative in metrics.py, so that larger values are better."
        )


def numbers_of(model: nn.Module) -> dict[str, object]:
    """Returns {name: value} of the buffers of a model, and of its attributes that are numbers."""
    numbers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float):
                numbers[f"{path}.{name}"] = value
    return numbers


@pytest.mark.parametrize("is_training", [False, True])
def test_outputs_do_not_depend_on_earlier_batches_scores_and_weights(
    model, graph, batch_of, sets, is_training
):
    model.train(is_training)
    batch = batch_of(sets)
    before = numbers_of(model)
    expected = model(graph, batch)
    changed = [name for name, value in numbers_of(model).items() if value != before.get(name)]
    assert_close(
        model(graph, batch),
        expected,
        "A second pass of the same batch gives different outputs. Usually the model contains "
        "`nn.Dropout` (draw from `batch.seed` with `uniform` of model.py), or `forward` changes a "
        f"buffer or an attribute, which then differs between ranks. Changed here: {changed}.",
        tolerance=0,
    )
    batch.y = 5 - batch.y
    batch.weight = 3 * batch.weight
    assert_close(
        model(graph, batch),
        expected,
        "The output changes with the scores or weights of the batch, which are unknown in "
        "predictions. Usually `forward` reads `batch.y` or `batch.weight`: only the loss may.",
        tolerance=0,
    )


def test_outputs_are_finite_and_have_the_shape_that_the_loss_needs(
    task, model, graph, batch_of, sets
):
    batch = batch_of(sets)
    output = model(graph, batch)
    assert output.shape == (len(batch.y), task.num_outputs), (
        "The model must return one row for each sample, and one column for each score and each "
        "of `columns` of the loss (losses.py). Usually `build_model` in task.py passes a different "
        "number of outputs to the model."
    )
    predictions = task.predictions(task.by_score(output, batch)).values()
    assert all(values.isfinite().all() for values in [output, *predictions]), (
        "An output or a prediction is nan or infinite. Usually the model divides by a number that "
        "can be 0, such as the number of living neighbours, or `predictions` of the loss takes a "
        "logarithm or a square root of a negative number."
    )


def test_model_accepts_one_sample_no_sample_and_a_sample_without_knock_outs(
    model, graph, batch_of, sets
):
    assert len(model(graph, batch_of(sets[:1]))) == 1, (
        "A batch of one sample must give one row of outputs. Usually the model calls `squeeze` "
        "without a dimension."
    )
    assert len(model(graph, batch_of([]))) == 0, (
        "An empty batch must give no row of outputs. Usually the model counts the samples in "
        "`batch.perturbed_batch`; use `len(batch.y)`."
    )
    assert model(graph, batch_of([[]])).isfinite().all(), (
        "The outputs of a sample without knock-outs are not finite. Usually the model computes a "
        "mean or a maximum over the perturbed nodes, and there are none."
    )


# The usual causes if two routes of message passing differ.
OF_PLAN = (
    "Batches with a plan, which training uses, give different predictions from batches without. "
    "Usually a layer or a readout in model.py was changed, but not in the optional part reach: "
    "make the same change there, or set model.message_passing=shared."
)
OF_COPIES = (
    "The shared graph and masked copies of the graph (model.message_passing=expanded) give "
    "different predictions. Usually a layer or a mask was changed for one of the two only."
)


def test_all_routes_of_message_passing_give_the_same_predictions(
    task, graph, model, batch_of, sets
):
    """Batches have a plan, as in training, or no plan, as in the other tests of this file.

    The route `expanded`, if it exists, is the reference.
    """
    graph = copy.deepcopy(graph).double()
    model = model.double()
    expected = model(graph, batch_of(sets))
    dataset, _ = make_dataset(task.tables, graph, task.config)
    planned = model(graph, batch_of(sets, dataset.transform))
    assert_close(planned, expected, OF_PLAN)
    on_copies = model_on_copies(task, model)
    if on_copies is not None:
        assert_close(on_copies(graph, batch_of(sets)), expected, OF_COPIES)


def test_predictions_do_not_depend_on_the_batch_or_the_order_of_nodes(model, graph, batch_of, sets):
    graph = copy.deepcopy(graph).double()
    model = model.double()
    together = model(graph, batch_of(sets))
    backwards = model(graph, batch_of(sets[::-1]))
    alone = torch.cat([model(graph, batch_of([nodes])) for nodes in sets])
    assert_close(
        together,
        alone,
        "A prediction depends on the other samples of its batch. Usually the model contains "
        "BatchNorm, or a sum or a mean over the samples.",
    )
    assert_close(
        together,
        backwards.flip(0),
        "A prediction depends on the position of its sample in the batch. Usually the model "
        "does not use `batch.perturbed_batch` or `batch.perturbed_ptr` to find the nodes of a "
        "sample.",
    )
    batch = batch_of(sets[:1])
    batch.perturbed = batch.perturbed.flip(0)
    assert_close(
        model(graph, batch),
        alone[:1],
        "A prediction depends on the order in which a row lists its nodes. Usually the model "
        "concatenates the states of the perturbed nodes, or reads only one of them: sum them.",
    )


def samples_of(tables: Tables, sets: list[dict[int, float]]) -> Tables:
    """Returns samples on the graph of the tables, given {node: level} of each sample."""
    y = torch.zeros(len(sets), *tables.y.shape[1:])
    return dataclasses.replace(tables, **pack_levels(sets), y=y, weight=None)


def batch_at_levels(task: KnockoutTask, sets: list[dict[int, float]]) -> Data:
    """Returns the batch of samples, given {node: level} of each sample.

    Raises `DataError` if the dataset rejects levels.
    """
    samples = samples_of(task.tables, sets)
    return dataset_of(task, samples).__getitems__(range(len(sets)))


def test_level_1_means_intact_and_all_routes_agree_on_other_levels(task, graph, model, sets):
    """A dataset may also reject levels, as in a copy with rules for the nodes that die."""
    graph = copy.deepcopy(graph).double()
    model = model.double()
    largest = max(sets, key=len)
    node = largest[0]
    mixed = dict(zip(largest, (2.0, 0.0, 0.5), strict=False))
    sets = [{node: 1.0}, {}, {node: 0.0}, {node: 0.3}, {node: 3.0}, mixed]
    try:
        batch = batch_at_levels(task, sets)
    except DataError as error:
        pytest.skip(str(error))
    predictions = model(graph, batch)
    # Each set is predicted in the first row, because a batch may contain further data of its rows.
    alone = []
    for nodes in sets:
        first = samples_of(task.tables, [nodes] * len(sets))
        alone.append(model(graph, dataset_of(task, first).__getitems__([0])))
    alone = torch.cat(alone)
    assert_close(
        alone[0],
        alone[1],
        "A sample with a node at level 1 must have the same prediction as an intact sample. "
        "Usually the model reads `batch.perturbed`, but not `batch.level`.",
    )
    different = torch.cdist(alone[1:5], alone[1:5]) > 1e-9
    assert different.sum() == 4 * 3, (
        "An intact sample and samples with a node at the levels 0, 0.3 and 3 must have four "
        "different predictions. Usually the model treats every perturbed node as deleted: use "
        f"`batch.level`, or `SharedGraph.levels` of mask.py. The predictions are {alone}."
    )
    dataset, _ = make_dataset(task.tables, graph, task.config)
    dataset.tables = samples_of(task.tables, sets)
    planned = model(graph, dataset.__getitems__(range(len(sets))))
    assert_close(planned, predictions, OF_PLAN)
    on_copies = model_on_copies(task, model)
    if on_copies is not None:
        assert_close(on_copies(graph, batch), predictions, OF_COPIES)


def test_every_parameter_gets_a_finite_gradient(task, model, graph, batch_of, sets):
    """This includes a batch without knock-outs, and a batch that consists of padding only.

    In the last step of an epoch, a rank without rows still takes part in the all-reduce.
    """
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for batch in (batch_of(sets), batch_of([[]])):
        model.zero_grad()
        task.loss(model(graph, batch), batch).sum().backward()
        wrong = []
        for name, parameter in model.named_parameters():
            has_gradient = parameter.grad is not None and parameter.grad.isfinite().all()
            if parameter.requires_grad and not has_gradient:
                wrong.append(name)
        assert not wrong, (
            f"These parameters have no gradient, or a gradient that is not finite: {wrong}. "
            "Usually the loss does not depend on this part of the model (use it, or remove it), or "
            "the model takes a square root or a norm of 0."
        )
    batch.weight.zero_()
    model.zero_grad()
    task.loss(model(graph, batch), batch).sum().backward()
    assert all((parameter.grad == 0).all() for parameter in trained), (
        "A batch of padding has a gradient that is not 0. Usually `KnockoutTask.loss` in task.py "
        "does not multiply each loss by `batch.weight`, which is 0 for padding."
    )


def with_targets_on_nodes(task: KnockoutTask) -> KnockoutTask:
    """Returns a task whose scores are named after nodes, with model.readout=nodes.

    Skips the test if this copy, or its model, does not have this readout.
    """
    if not is_here("model_nodes"):
        pytest.skip("no readout of nodes")
    config = task.config
    if not hasattr(config.model, "readout"):
        pytest.skip("the model has no readout of nodes")
    options = dataclasses.replace(config.model, readout="nodes")
    try:
        config = dataclasses.replace(config, model=options)
    except ValueError as error:  # an option of an adapted copy requires a different readout
        pytest.skip(str(error))
    if len(task.criterion.columns) > 1:
        pytest.skip("the loss has several columns")
    genes = task.tables.genes
    tables = dataclasses.replace(
        task.tables,
        targets=[genes[2], genes[0], genes[1]],
        y=task.tables.y[:, [0, 0, 0]],
    )
    return KnockoutTask.from_tables(tables, config)


def task_elsewhere(task: KnockoutTask) -> KnockoutTask:
    """Returns a task with tables of the same shapes, whose model starts from different values.

    The targets are in reverse order. The levels differ, unless the dataset rejects levels. The
    values of the scores stay the same, so that the loss accepts them, but they are assigned to the
    rows in the order of random responses to the levels.
    """
    generator = torch.Generator().manual_seed(1)
    tables = task.tables
    level = tables.level.where(tables.level < 1, 1.1 * tables.level) * 0.9
    is_trained = tables.is_in("train")[tables.sample()]
    if (level[is_trained] == 0).all():
        level = torch.full_like(level, 0.2)
    size = (len(tables.genes), tables.y.size(1))
    effect = 1 + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)
    responses = (1 - level).unsqueeze(1) * effect[tables.perturbed]
    total = scatter(responses, tables.sample(), dim_size=len(tables.y))
    is_present = ~tables.y.isnan()
    y = tables.y.clone()
    for target, present in enumerate(is_present.T):
        order = total[present, target].argsort().argsort()
        y[present, target] = tables.y[present, target].sort().values[order]
    targets = list(tables.targets)[::-1]
    other = dataclasses.replace(tables, level=level, y=y, targets=targets)
    try:
        elsewhere = KnockoutTask.from_tables(other, task.config)
    except DataError:
        other = dataclasses.replace(tables, y=y, targets=targets)
        return KnockoutTask.from_tables(other, task.config)
    assert not torch.allclose(elsewhere.basis, task.basis), (
        "Tables with different levels have the same `basis`, so this test cannot show that the "
        "state dict contains it. Usually `basis_of` in data.py was changed."
    )
    return elsewhere


@pytest.mark.parametrize("readout", ["configured", "nodes"])
def test_state_dict_contains_everything_that_predictions_depend_on(
    config, task, graph, sets, readout, tmp_path
):
    """A model built from other tables makes bitwise equal predictions after loading it."""
    data = dataclasses.replace(config.data, cache_dir=str(tmp_path))
    task = dataclasses.replace(task, config=dataclasses.replace(config, data=data))
    if readout == "nodes":
        task = with_targets_on_nodes(task)
    model = disturbed_model(task)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    elsewhere = task_elsewhere(task)
    other = elsewhere.build_model().eval()
    try:
        batch = batch_at_levels(task, [dict.fromkeys(nodes, 0.3) for nodes in sets])
    except DataError:
        batch = batch_at_levels(task, [dict.fromkeys(nodes, 0.0) for nodes in sets])
    expected = model(graph, batch)
    assert not torch.allclose(other(graph, batch), expected), (
        "Before it loads the state dict, the model of other tables already makes the same "
        "predictions, so this test shows nothing. Usually the outputs do not depend on the "
        "parameters."
    )
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_close(
        other(graph, batch),
        expected,
        "A model that has loaded the state dict makes different predictions. Usually a tensor is a "
        "plain attribute of the model, or a list contains layers: use `register_buffer` or "
        f"`nn.ModuleList`. Check these parts of the model: {suspects(model)}.",
        tolerance=0,
    )


def test_seed_determines_the_weights_and_the_dropout(task, graph, batch_of, sets):
    batch = batch_of(sets)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        model = task.build_model().train()
        results.append((model(graph, batch), *model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (
        "Two models with the same seed have different weights or outputs. Usually random numbers "
        "come from Python's or NumPy's generator, or the model iterates over a set: use torch's "
        "generator for weights, and `batch.seed` for dropout."
    )


def test_forward_uses_one_device_and_does_not_wait_for_it(model, graph, task):
    """The device `meta` has no values, so mistakes raise an error.

    Such mistakes are the use of a tensor that was created on the CPU, and reading a value.
    """
    batch = dataclasses.replace(task.dataset, transform=None).__getitems__(range(8))
    batch.seed = torch.zeros((), dtype=torch.long)
    with CountSynchronisations() as count:
        model(graph, batch)
    assert count.seen == [], (
        "These operators make the host wait for a GPU. Usually the model calls `item`, `tolist` or "
        "`int`, has an `if` that depends on a tensor, or selects with a boolean mask."
    )
    output = model.to("meta")(copy.deepcopy(graph).to("meta"), batch.to("meta"))
    assert output.device.type == "meta", (
        "The outputs are not on the device of the model. Usually `forward` creates a tensor "
        "without `device=`."
    )
