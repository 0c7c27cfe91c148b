"""What a replaced model.py or data.py must satisfy: `./launch.sh test -m contract`.

The model and the tables are those of config.yaml, or of the file of the option --config.
"""

import copy
import dataclasses
import itertools
import os

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import metrics
from data import KnockoutDataset, load
from data_loader import StepSampler, make_loader
from data_tables import Tables
from errors import DataError
from parts import is_here
from task import KnockoutTask, make_dataset
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
    """Returns the model of training, plus noise, because terms at zero would hide errors."""
    torch.manual_seed(0)
    model = task.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def model_on_copies(task: KnockoutTask, model: nn.Module) -> nn.Module | None:
    """Returns the same model on masked copies of the graph, None if there is no such route."""
    has_copies = is_here("mask_copies")
    if not has_copies or task.config.model.message_passing not in ("auto", "shared", "reach"):
        return None
    options = dataclasses.replace(task.config.model, message_passing="expanded")
    config = dataclasses.replace(task.config, model=options)
    other = dataclasses.replace(task, config=config).build_model().double().eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture
def batch_of(graph, tables, sets):
    """Builds batches of some of `sets`, with all other data of the rows in the tables."""
    perturbed, ptr = pack_sets(sets)
    y = torch.zeros(len(sets), *tables.y.shape[1:])
    samples = dataclasses.replace(
        tables, perturbed=perturbed, perturbed_ptr=ptr, level=None, y=y, weight=None
    )

    def build(chosen_sets, transform=None):
        dataset = KnockoutDataset(samples, graph.degree, transform)
        batch = dataset.__getitems__([sets.index(nodes) for nodes in chosen_sets])
        batch.seed = torch.tensor(0)
        return batch

    return build


@pytest.fixture
def sets(tables):
    """Sets of knocked-out nodes of each size in the first 200 rows, and an empty set."""
    bounds = tables.perturbed_ptr[:200].tolist()
    nodes = tables.perturbed.tolist()
    rows = [nodes[start:end] for start, end in itertools.pairwise(bounds)]
    by_size = {len(row): row for row in rows}
    return [*by_size.values(), *rows[:3], []]


def test_every_row_is_in_one_split_and_every_node_in_the_graph(tables):
    splits = [tables.rows(split) for split in ("train", "val", "test")]
    assert sum(map(len, splits)) == len(torch.cat(splits).unique()) <= len(tables.y)
    assert all(len(rows) for rows in splits)
    assert not tables.y.isinf().any()  # missing scores are nan
    assert tables.perturbed.min() >= 0 and tables.perturbed.max() < len(tables.genes)


def test_an_epoch_yields_each_training_row_once_on_any_number_of_ranks(task):
    rows = task.rows("train")[:100]
    for world_size in (1, 2, 3):
        seen = []
        for rank in range(world_size):
            sampler = StepSampler(rows, 6 * world_size, 2, world_size, rank, seed=0)
            for batch in make_loader(task.dataset, sampler, workers=0, device=torch.device("cpu")):
                seen += batch.index[batch.index >= 0].tolist()
        assert sorted(seen) == rows.tolist()


def test_a_metric_is_larger_where_predictions_are_better(task):
    """The true scores, with all their predictions, must be better than shuffled ones."""
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
            f"{name} of metrics.METRICS falls where predictions get better: return it negative, "
            "as everywhere, the largest is the best"
        )


def test_outputs_are_finite_and_as_many_as_the_loss_takes(task, model, graph, batch_of, sets):
    batch = batch_of(sets)
    output = model(graph, batch)
    assert output.shape == (len(batch.y), task.num_outputs)
    predictions = task.predictions(task.by_score(output, batch)).values()
    assert all(values.isfinite().all() for values in [output, *predictions])


def test_a_batch_of_one_an_empty_batch_and_an_empty_knock_out_set_work(
    model, graph, batch_of, sets
):
    assert len(model(graph, batch_of(sets[:1]))) == 1
    assert len(model(graph, batch_of([]))) == 0
    assert model(graph, batch_of([[]])).isfinite().all()


def test_training_predicts_what_every_other_route_does(task, graph, model, batch_of, sets):
    """Training plans its batches, but the other tests in this file do not.

    The route `expanded`, if it exists, is the reference.
    """
    graph = copy.deepcopy(graph).double()
    model = model.double()
    expected = model(graph, batch_of(sets))
    dataset, _ = make_dataset(task.tables, graph, task.config)
    planned = model(graph, batch_of(sets, dataset.transform))
    torch.testing.assert_close(planned, expected, rtol=1e-9, atol=1e-9)
    on_copies = model_on_copies(task, model)
    if on_copies is not None:
        prediction = on_copies(graph, batch_of(sets))
        torch.testing.assert_close(prediction, expected, rtol=1e-9, atol=1e-9)


def test_a_prediction_does_not_depend_on_its_batch_or_on_the_order_of_its_nodes(
    model, graph, batch_of, sets
):
    graph = copy.deepcopy(graph).double()
    model = model.double()
    together = model(graph, batch_of(sets))
    backwards = model(graph, batch_of(sets[::-1]))
    alone = torch.cat([model(graph, batch_of([nodes])) for nodes in sets])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together, backwards.flip(0), rtol=1e-9, atol=1e-9)
    batch = batch_of(sets[:1])
    batch.perturbed = batch.perturbed.flip(0)
    torch.testing.assert_close(model(graph, batch), alone[:1], rtol=1e-9, atol=1e-9)


def samples_of(tables: Tables, sets: list[dict[int, float]]) -> Tables:
    """Returns samples of {node: level} on the graph of the tables."""
    y = torch.zeros(len(sets), *tables.y.shape[1:])
    return dataclasses.replace(tables, **pack_levels(sets), y=y, weight=None)


def batch_at_levels(task: KnockoutTask, sets: list[dict[int, float]]) -> Data:
    """Returns the batch of some samples; raises `DataError` if the dataset rejects levels."""
    samples = samples_of(task.tables, sets)
    return KnockoutDataset(samples, task.dataset.degree).__getitems__(range(len(sets)))


def test_a_level_of_1_is_intact_and_others_are_heeded_alike_on_every_route(
    task, graph, model, sets
):
    """A dataset may also reject levels, as in a copy whose nodes die according to rules."""
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
    # Each set is in the first row, because a batch may have further data of its rows.
    alone = []
    for nodes in sets:
        first = samples_of(task.tables, [nodes] * len(sets))
        alone.append(model(graph, KnockoutDataset(first, graph.degree).__getitems__([0])))
    alone = torch.cat(alone)
    torch.testing.assert_close(alone[0], alone[1], rtol=1e-9, atol=1e-9)
    different = torch.cdist(alone[1:5], alone[1:5]) > 1e-9
    assert different.sum() == 4 * 3, alone
    dataset, _ = make_dataset(task.tables, graph, task.config)
    dataset.tables = samples_of(task.tables, sets)
    planned = model(graph, dataset.__getitems__(range(len(sets))))
    torch.testing.assert_close(planned, predictions, rtol=1e-9, atol=1e-9)
    on_copies = model_on_copies(task, model)
    if on_copies is not None:
        torch.testing.assert_close(on_copies(graph, batch), predictions, rtol=1e-9, atol=1e-9)


def test_every_parameter_gets_a_finite_gradient(task, model, graph, batch_of, sets):
    """This must also hold for a batch that consists of padding only.

    In the last step, a rank without rows still takes part in the all-reduce.
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
        assert not wrong, f"no finite gradient: {wrong}"
    batch.weight.zero_()
    model.zero_grad()
    task.loss(model(graph, batch), batch).sum().backward()
    assert all((parameter.grad == 0).all() for parameter in trained)


def with_targets_on_nodes(task: KnockoutTask) -> KnockoutTask:
    """Returns a task whose scores are named after nodes, with readout=nodes."""
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
    """Returns a task of tables with the same shapes, but whose model starts from different values.

    The targets are in reverse order. The levels differ, unless the dataset rejects levels. The
    scores, which the loss must accept, are sorted by the responses to them.
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
    assert not torch.allclose(elsewhere.basis, task.basis)
    return elsewhere


@pytest.mark.parametrize("readout", ["configured", "nodes"])
def test_the_state_dict_holds_all_that_a_prediction_depends_on(
    config, task, graph, sets, readout, tmp_path
):
    """A model of other tables that has loaded the state dict makes bitwise equal predictions."""
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
    assert not torch.allclose(other(graph, batch), expected)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    prediction = other(graph, batch)
    assert torch.equal(prediction, expected)


def test_the_seed_determines_the_weights_and_the_dropout(task, graph, batch_of, sets):
    batch = batch_of(sets)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        model = task.build_model().train()
        results.append((model(graph, batch), *model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_forward_stays_on_its_device_and_does_not_wait_for_it(model, graph, task):
    """On the device `meta`, which has no values, mistakes raise an error.

    Mistakes are the use of a tensor that was created on the CPU, and reading a value.
    """
    batch = dataclasses.replace(task.dataset, transform=None).__getitems__(range(8))
    batch.seed = torch.zeros((), dtype=torch.long)
    with CountSynchronisations() as count:
        model(graph, batch)
    assert count.seen == []
    assert model.to("meta")(copy.deepcopy(graph).to("meta"), batch.to("meta")).device.type == "meta"
