"""What a replaced model.py or data.py must satisfy: `./launch.sh test -m contract`.

The model and tables are those that config.yaml configures, or the file of the option --config.
"""

import copy
import dataclasses
import gzip
import itertools
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baseline import additive_baseline
from data import KnockoutDataset, StepSampler, load, make_loader, with_example
from errors import DataError
from mask import SharedGraph
from tests.conftest import fork_ranks, join, launch_forked
from tests.tools import parity
from tests.tools.runs import pack_levels, pack_sets
from tests.tools.syncs import CountSynchronisations
from train import build_model, criterion, make_dataset, read_config

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
    return load(config.data)


@pytest.fixture(scope="module")
def graph(tables):
    return SharedGraph(tables.graph())


@pytest.fixture(scope="module")
def baseline(config, tables):
    return additive_baseline(tables, config.optim.loss)


@pytest.fixture
def model(config, tables, baseline):
    """The model as training builds it, plus noise: parts that start at zero would hide errors."""
    torch.manual_seed(0)
    model = build_model(config, tables, baseline)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def batch_of(graph, tables, sets):
    """Batches of some of `sets`, each with whatever else the tables say of its row."""
    perturbed, ptr = pack_sets(sets)
    y = torch.zeros(len(sets), *tables.y.shape[1:])
    samples = dataclasses.replace(
        tables, perturbed=perturbed, perturbed_ptr=ptr, level=None, y=y, weight=None
    )

    def build(some_sets, transform=None):
        dataset = KnockoutDataset(samples, graph.degree, transform)
        batch = dataset.__getitems__([sets.index(nodes) for nodes in some_sets])
        batch.seed = torch.tensor(0)
        return batch

    return build


@pytest.fixture
def sets(tables):
    """Sets of knocked-out nodes of every size in the first 200 rows, and an empty one."""
    bounds, nodes = tables.perturbed_ptr.tolist(), tables.perturbed.tolist()
    rows = [nodes[a:b] for a, b in itertools.pairwise(bounds[:200])]
    by_size = {len(row): row for row in rows}
    return [*by_size.values(), *rows[:3], []]


def test_every_row_is_in_one_split_and_every_node_in_the_graph(tables):
    splits = [tables.rows(split) for split in ("train", "val", "test")]
    assert sum(map(len, splits)) == len(torch.cat(splits).unique()) <= len(tables.y)
    assert all(len(rows) for rows in splits)
    assert not tables.y.isinf().any()  # a missing score is nan
    assert tables.perturbed.min() >= 0 and tables.perturbed.max() < len(tables.genes)


def test_an_epoch_yields_each_training_row_once_on_any_number_of_ranks(config, tables, graph):
    dataset, _ = make_dataset(config, tables, graph)
    rows = tables.rows("train")[:100]
    for world_size in (1, 2, 3):
        seen = []
        for rank in range(world_size):
            sampler = StepSampler(rows, 6 * world_size, 2, world_size, rank, seed=0)
            for batch in make_loader(dataset, sampler, workers=0, device=torch.device("cpu")):
                seen += batch.index[batch.index >= 0].tolist()
        assert sorted(seen) == rows.tolist()


def test_predictions_have_one_finite_value_per_sample(model, graph, batch_of, sets):
    batch = batch_of(sets)
    prediction = model(graph, batch)
    assert prediction.shape == batch.y.shape and prediction.isfinite().all()


def test_a_batch_of_one_an_empty_batch_and_an_empty_knock_out_set_work(
    model, graph, batch_of, sets
):
    assert len(model(graph, batch_of(sets[:1]))) == 1
    assert len(model(graph, batch_of([]))) == 0
    assert model(graph, batch_of([[]])).isfinite().all()


def test_training_predicts_what_every_other_route_does(
    config, tables, baseline, graph, model, batch_of, sets
):
    """Training plans its batches, and the other tests here do not.

    `expanded`, if there is one, is the reference.
    """
    graph, model = copy.deepcopy(graph).double(), model.double()
    dataset, _ = make_dataset(config, tables, graph)
    expected = model(graph, batch_of(sets))
    torch.testing.assert_close(
        model(graph, batch_of(sets, dataset.transform)), expected, rtol=1e-9, atol=1e-9
    )
    if config.model.message_passing in ("auto", "shared", "reach"):
        changed = dataclasses.replace(config.model, message_passing="expanded")
        other = (
            build_model(dataclasses.replace(config, model=changed), tables, baseline)
            .double()
            .eval()
        )
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(graph, batch_of(sets)), expected, rtol=1e-9, atol=1e-9)


def test_a_prediction_does_not_depend_on_its_batch_or_on_the_order_of_its_nodes(
    model, graph, batch_of, sets
):
    model, graph = model.double(), copy.deepcopy(graph).double()
    together = model(graph, batch_of(sets))
    backwards = model(graph, batch_of(sets[::-1]))
    alone = torch.cat([model(graph, batch_of([nodes])) for nodes in sets])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together, backwards.flip(0), rtol=1e-9, atol=1e-9)
    batch = batch_of(sets[:1])
    batch.perturbed = batch.perturbed.flip(0)
    torch.testing.assert_close(model(graph, batch), alone[:1], rtol=1e-9, atol=1e-9)


def test_a_level_of_1_is_intact_and_others_are_heeded_alike_on_every_route(
    config, tables, baseline, graph, model, sets
):
    """Or the dataset refuses them, as a copy whose nodes die by rules does."""
    graph, model = copy.deepcopy(graph).double(), model.double()
    node = max(sets, key=len)[0]
    sets = [
        {node: 1.0},
        {},
        {node: 0.0},
        {node: 0.3},
        {node: 3.0},
        dict(zip(max(sets, key=len), (2.0, 0.0, 0.5), strict=False)),
    ]
    packed = pack_levels(sets)
    y = torch.zeros(len(sets), *tables.y.shape[1:])
    samples = dataclasses.replace(tables, **packed, y=y, weight=None)
    try:
        batch = KnockoutDataset(samples, graph.degree).__getitems__(range(len(sets)))
    except DataError as error:
        pytest.skip(str(error))
    predictions = model(graph, batch)
    # Each set is the first row, as a batch may also have what else the tables say of its rows.
    alone = []
    for nodes in sets:
        first = dataclasses.replace(samples, **pack_levels([nodes] * len(sets)))
        alone.append(model(graph, KnockoutDataset(first, graph.degree).__getitems__([0])))
    alone = torch.cat(alone)
    torch.testing.assert_close(alone[0], alone[1], rtol=1e-9, atol=1e-9)
    different = torch.cdist(alone[1:5], alone[1:5]) > 1e-9
    assert different.sum() == 4 * 3, alone
    transform = make_dataset(config, tables, graph)[0].transform
    planned = KnockoutDataset(samples, graph.degree, transform).__getitems__(range(len(sets)))
    torch.testing.assert_close(model(graph, planned), predictions, rtol=1e-9, atol=1e-9)
    if config.model.message_passing in ("auto", "shared", "reach"):
        changed = dataclasses.replace(config.model, message_passing="expanded")
        other = (
            build_model(dataclasses.replace(config, model=changed), tables, baseline)
            .double()
            .eval()
        )
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(graph, batch), predictions, rtol=1e-9, atol=1e-9)


def test_every_parameter_gets_a_finite_gradient(config, model, graph, batch_of, sets):
    """Even for a batch of nothing but padding.

    A rank without rows in the last step still joins the all-reduce.
    """
    model.train()
    for batch in (batch_of(sets), batch_of([[]])):
        model.zero_grad()
        criterion(model(graph, batch), batch, model, config.optim.loss).backward()
        trained = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        wrong = [
            name for name, grad in trained.items() if grad is None or not grad.isfinite().all()
        ]
        assert not wrong, f"no finite gradient: {wrong}"
    batch.weight.zero_()
    model.zero_grad()
    criterion(model(graph, batch), batch, model, config.optim.loss).backward()
    assert all((model.get_parameter(name).grad == 0).all() for name in trained)


def test_two_ranks_train_the_same_model_as_one(arguments, monkeypatch):
    monkeypatch.setattr(parity, "launch", partial(launch_forked, cwd=os.getcwd()))
    assert parity.parity(
        SimpleNamespace(world_sizes=[1, 2], arguments=arguments, timeout=600, cpu=True)
    )


IN_A_FOLDER = """
import os, sys, data, torch, train
from tests.tools.parity import few_rows
folder, load, build_model = sys.argv.pop(), data.load, train.build_model
def load_and_enter(options):
    tables = few_rows(load(options))
    os.chdir(folder)  # paths in the configuration are relative to where the tests run
    return tables
def build_and_disturb(*arguments):
    model = build_model(*arguments)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # or zeros would hide errors
    return model
data.load, train.build_model = load_and_enter, build_and_disturb
train.main()
"""


def test_a_checkpoint_predicts_what_its_run_wrote_of_the_test_rows(
    arguments, config, tables, tmp_path
):
    """Were a field of batches forgotten in --predict, it would silently predict something else."""
    (tmp_path / "run.py").write_text(IN_A_FOLDER)

    def start(*options):
        arguments_of_run = [*arguments, *options, str(tmp_path)]
        _store, ranks = fork_ranks(
            tmp_path, 1, str(tmp_path / "run.py"), arguments_of_run, cwd=os.getcwd()
        )
        assert join(ranks, 600) == [0], (tmp_path / "rank0.stderr").read_text()

    start("run.dir=runs", "run.name=run", "run.init=", "run.resume=auto", "optim.epochs=2")
    header, *rows = [
        line.split("\t") for line in (tmp_path / "runs/run/test.tsv").read_text().splitlines()
    ]
    written = [
        [float(row[header.index(f"{name}_prediction")]) for name in tables.targets] for row in rows
    ]
    lines = ["genes", *(row[0] for row in rows)]
    table = Path(with_example(config.data).perturbations).read_bytes()
    if table.startswith(b"\x1f\x8b"):
        table = gzip.decompress(table)
    if table.startswith(
        (b"genes\t", b"nodes\t")
    ):  # with all its columns, whatever else --predict reads
        lines = [line for line in table.decode("utf-8-sig").splitlines() if line]
        lines = [
            lines[0],
            *(lines[1 + row] for row in parity.few_rows(tables).rows("test").tolist()),
        ]
    (tmp_path / "ask.tsv").write_text("\n".join([*lines, ""]))
    start("--predict", "ask.tsv", "--checkpoint", str(tmp_path / "runs/run/checkpoints/best.pt"))
    _, *rows = [
        line.split("\t") for line in (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    ]
    predicted = [[float(cell) for cell in row[1:]] for row in rows]
    torch.testing.assert_close(torch.tensor(predicted), torch.tensor(written), rtol=1e-4, atol=1e-4)


def test_the_state_dict_holds_everything(
    config, tables, baseline, model, graph, batch_of, sets, tmp_path
):
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = build_model(config, tables, baseline).eval()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    batch = batch_of(sets)
    assert torch.equal(other(graph, batch), model(graph, batch))


def test_the_seed_determines_the_weights_and_the_dropout(
    config, tables, baseline, graph, batch_of, sets
):
    batch, results = batch_of(sets), []
    for _ in range(2):
        torch.manual_seed(5)
        model = build_model(config, tables, baseline).train()
        results.append((model(graph, batch), *model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_forward_stays_on_its_device_and_does_not_wait_for_it(model, graph, batch_of, sets):
    """On `meta`, a device without values, mistakes raise.

    They are using a tensor made on the CPU, and reading a value.
    """
    batch = batch_of(sets)
    with CountSynchronisations() as count:
        model(graph, batch)
    assert count.seen == []
    assert model.to("meta")(copy.deepcopy(graph).to("meta"), batch.to("meta")).device.type == "meta"
