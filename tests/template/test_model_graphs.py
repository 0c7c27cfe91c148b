"""Tests of batches of fixed shape, and of captured and replayed steps.

They run on the CPU, with a stand-in for CUDA graphs, `tests.tools.graphs`.
"""

import contextlib
import functools
import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import model_graphs
from config import Config
from data import KnockoutDataset
from data_loader import StepSampler
from data_tables import Tables
from ddp_setup import DDPConfig, Distributed
from mask import SharedGraph, sum_by_sample
from model import Encoder, KnockoutGNN, ModelConfig
from model_graphs import (
    FixedShape,
    GraphedModel,
    GraphedUpdate,
    capture,
    undone_if_failed,
)
from optim import OptimConfig, build_optimizer, set_learning_rates
from run_checkpoint import TrainState
from task import KnockoutTask
from tests.sets import tables_of
from tests.syncs import CountSynchronisations
from tests.template.fixtures import restored_modules
from tests.template.gpu_checks import small_tables
from tests.tools import graphs
from train import StepParts, update_parameters

CPU = torch.device("cpu")
SIZE = 8  # number of samples in a batch
READOUTS = ("local", "global", "both", "nodes")


@pytest.fixture
def gpu() -> Iterator[None]:
    with restored_modules():
        graphs.simulate_gpu()
        yield


@functools.cache
def tables_with_levels(readout: str, loss: str) -> Tables:
    """Returns `small_tables`, in which nodes are deleted or have a level of 0.3 or 2.5."""
    tables = small_tables(readout)
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor([0.0, 0.3, 2.5], dtype=torch.float64)
    drawn = torch.randint(len(levels), tables.perturbed.shape, generator=generator)
    tables.level = levels[drawn]
    if loss == "binary":
        tables.y = (tables.y > tables.y.median(dim=0).values).double()
    return tables


def make_task(loss: str = "squared", precision: str = "fp32", **options: object) -> KnockoutTask:
    """Returns a task of small tables; `options` are options of the model."""
    model = ModelConfig(hidden=8, **{"dropout": 0.3, **options})
    optim = OptimConfig(loss=loss, precision=precision)
    config = Config(model=model, optim=optim)
    config = replace(config, data=replace(config.data, batch_size=SIZE))
    return KnockoutTask.from_tables(tables_with_levels(model.readout, loss), config)


def build_model(task: KnockoutTask) -> nn.Module:
    """Returns the task's model with noise: parameters that start at zero would hide errors."""
    torch.manual_seed(0)
    model = task.build_model().to(dtype=task.config.optim.dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def sampler_of(task: KnockoutTask, accumulate: int = 1) -> StepSampler:
    return StepSampler(task.rows("train"), SIZE, accumulate, world_size=1, rank=0, seed=0)


def steps_of(model: nn.Module, task: KnockoutTask) -> StepParts:
    return captured(model, task, sampler_of(task), Distributed(DDPConfig()))


def captured(
    model: nn.Module, task: KnockoutTask, sampler: StepSampler, ddp: Distributed
) -> StepParts:
    steps = StepParts(model, task.dataset, update_parameters)
    optimizer = build_optimizer(model, task.config.optim, ddp)
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    return capture(steps, state, task, sampler, ddp)


def batches_of(task: KnockoutTask, dataset: KnockoutDataset, number: int = 3) -> list[Data]:
    """Returns the first batches of an epoch."""
    batches = []
    for seed, rows in zip(range(number), sampler_of(task), strict=False):
        batches.append(dataset.__getitems__(rows).to(CPU))
        batches[-1].seed = torch.tensor(seed)
    return batches


def add_gradients(function: nn.Module, task: KnockoutTask, batch: Data) -> Tensor:
    """Returns the prediction of a batch, and adds its gradients to those of the parameters."""
    low = task.config.optim.autocast_dtype
    with torch.autocast("cpu", low, enabled=low is not None):
        prediction = function(task.graph, batch)
    task.loss(prediction, batch).sum().backward()
    return prediction.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of a model by name, and deletes them from the model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.to_dense().clone()
    model.zero_grad()
    return gradients


def shape_of(task: KnockoutTask) -> FixedShape:
    return FixedShape.of_rows(task.dataset, task.rows("train"), SIZE)


# ---- Batches of fixed shape ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("readout", "loss"), [*((readout, "squared") for readout in READOUTS), ("both", "binary")]
)
def test_padding_does_not_change_predictions_or_gradients(gpu, readout, loss):
    task = make_task(loss, "fp64", readout=readout)
    model = build_model(task)
    padded = replace(task.dataset, transform=shape_of(task))
    task.dataset.columns = {}  # batches without columns, for which the model computes pair features
    for dataset in (padded, replace(padded, columns={})):
        plain = batches_of(task, task.dataset)
        for batch, other in zip(plain, batches_of(task, dataset), strict=True):
            assert len(other.perturbed) > len(batch.perturbed)
            assert other.num_out_edges > batch.starts[1, -1]
            expected = add_gradients(model, task, batch)
            gradients = gradients_of(model)
            found = add_gradients(model, task, other)
            found_gradients = gradients_of(model)
            assert found_gradients.keys() == gradients.keys()
            # This readout does not multiply a matrix with a row for each perturbed node.
            if readout == "global":
                assert found.equal(expected)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found_gradients, gradients, rtol=1e-12, atol=1e-12)


def dataset_of(sets: list[list[int]]) -> KnockoutDataset:
    """Returns a dataset of sets of perturbed nodes. Of four nodes, node n has n out-edges."""
    out_degree = torch.arange(4)
    tables = tables_of(sets, torch.zeros(len(sets)))
    return KnockoutDataset(tables, out_degree, out_degree=out_degree)


def test_the_fixed_shape_fits_the_largest_rows_in_any_order():
    sets = [[], [3], [0, 1], [0, 1, 2, 3], [2], [0]]
    for order in (torch.arange(6), torch.tensor([3, 5, 1, 0, 2, 4])):
        shape = FixedShape.of_rows(dataset_of([sets[row] for row in order]), torch.arange(6), 3)
        assert (shape.num_samples, shape.num_perturbed, shape.num_out_edges) == (3, 7, 11)
    shape = FixedShape.of_rows(dataset_of(sets), torch.tensor([0, 1, 5]), 2)  # only these rows
    assert (shape.num_perturbed, shape.num_out_edges) == (2, 3)


@pytest.mark.parametrize("rows", [[3, 4, 3], [0, 0, 0], [2, 1, -1], [3, 3, 3]])
def test_padding_consists_of_nodes_that_a_sample_does_not_perturb(rows):
    sets = [[], [3], [0, 1], [0, 1, 2, 3], [0], [2, 0, 1]]
    dataset = dataset_of(sets)
    dataset.transform = FixedShape(3, num_perturbed=12, num_out_edges=18)
    batch = dataset.__getitems__(rows).to(CPU)
    assert len(batch.perturbed) == len(batch.perturbed_batch) == len(batch.level) == 12
    assert batch.num_out_edges == 18
    pairs = list(zip(batch.perturbed_batch.tolist(), batch.perturbed.tolist(), strict=True))
    num_real = int(batch.perturbed_ptr[-1])
    real, padding = pairs[:num_real], pairs[num_real:]
    assert not set(real) & set(padding)
    assert (batch.level[:num_real] == 0).all() and (batch.level[num_real:] == 1).all()
    assert batch.perturbed.max() < 4


@pytest.mark.parametrize("rows", [[0, 1], [1, 2, 3, 0], [3, 3, 0], [1, 1, 1]])
def test_a_batch_of_a_different_size_is_not_padded(rows):
    """The batches have fewer or more samples, or more perturbed nodes or out-edges of these."""
    dataset = dataset_of([[], [3], [0, 1], [0, 1, 2, 3]])
    expected = dataset.__getitems__(rows)
    dataset.transform = FixedShape(3, num_perturbed=7, num_out_edges=8)
    batch = dataset.__getitems__(rows)
    assert batch.perturbed.equal(expected.perturbed)
    assert "num_out_edges" not in batch


def test_a_padded_batch_is_pinned_and_moved_as_one_tensor():
    dataset = dataset_of([[], [3], [0, 1], [0, 1, 2, 3]])
    dataset.transform = FixedShape(3, num_perturbed=9, num_out_edges=11)
    packed = dataset.__getitems__([1, 2, 3])
    before = packed.to(CPU)
    moved = torch.empty_like(packed.packed).copy_(packed.packed)
    with mock.patch.object(Tensor, "pin_memory", lambda tensor: moved):
        assert packed.pin_memory() is packed
    batch = packed.to(CPU)
    first = moved.data_ptr()
    assert len(batch.to_dict()) == len(before.to_dict()) == 10
    for name, value in before.to_dict().items():
        if isinstance(value, Tensor):
            assert batch[name].equal(value) and batch[name].dtype == value.dtype
            assert first <= batch[name].data_ptr() < first + len(moved)
        else:
            assert batch[name] is value


# ---- Replays -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        *(("fp32", {"readout": readout}) for readout in ("local", "global", "nodes")),
        *((precision, {}) for precision in ("fp64", "bf16")),
        ("fp32", {"checkpointing": True}),
        ("fp32", {"dropout": 0.0, "pairs": False}),
    ],
)
def test_replays_equal_the_model_and_do_not_overwrite_results(gpu, precision, options):
    """The gradients of several batches must add up, too. They are freed after each comparison."""
    task = make_task(precision=precision, **options)
    model = build_model(task)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = steps_of(model, task)
    assert steps.note == "; CUDA graphs" and isinstance(steps.model, GraphedModel)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    batches = batches_of(task, steps.dataset)
    assert all(steps.model.fits(batch) for batch in batches)
    kept = []
    for numbers in ([0], [1], [0, 1, 2]):
        expected = [add_gradients(model, task, batches[number]) for number in numbers]
        gradients = gradients_of(model)
        with CountSynchronisations() as count:
            found = [add_gradients(steps.model, task, batches[number]) for number in numbers]
        assert count.seen == []
        found_gradients = gradients_of(model)
        kept += zip(expected, found, strict=True)
        # Captured steps do not use autocast's cache, so the gradients of a layer that is called
        # twice are added in float32.
        tolerance = 0.03 if task.config.optim.autocast_dtype else 1e-6
        torch.testing.assert_close(found_gradients, gradients, rtol=tolerance, atol=tolerance)
    for expected, found in kept:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("world_size", "accumulate", "batch_size"),
    [(3, 1, SIZE), (2, 2, SIZE), (1, 20, SIZE), (2, 1, 1000)],
)
def test_all_full_batches_of_all_ranks_are_replayed(gpu, world_size, accumulate, batch_size):
    task = make_task(readout="local")
    model = build_model(task)
    for rank in range(world_size):
        training = task.rows("train")
        sampler = StepSampler(training, batch_size, accumulate, world_size, rank, seed=0)
        steps = captured(model, task, sampler, Distributed(DDPConfig()))
        assert steps.note == "; CUDA graphs"
        rows_of_batches = list(sampler)
        assert len(rows_of_batches) == sampler.steps_per_epoch * accumulate
        num_full = len(training) // batch_size * accumulate
        for rows in rows_of_batches[: max(1, num_full)]:
            batch = steps.dataset.__getitems__(rows).to(CPU)
            batch.seed = torch.tensor(0)
            assert steps.model.fits(batch)


def test_different_batches_and_predictions_use_the_eager_model(gpu, monkeypatch):
    task = make_task()
    model = build_model(task)
    steps = steps_of(model, task)
    calls = []
    original = KnockoutGNN.forward
    monkeypatch.setattr(
        KnockoutGNN, "forward", lambda *arguments: calls.append(1) or original(*arguments)
    )
    full, *_ = batches_of(task, steps.dataset)
    larger = full.clone()
    larger.num_out_edges += 1
    short = steps.dataset.__getitems__([0, 1])
    short.seed = torch.tensor(0)
    (plain,) = batches_of(task, task.dataset, 1)
    steps.model(task.graph, full)
    assert len(calls) == 0
    for batch in (short, plain, larger):
        steps.model(task.graph, batch)
    without_features = full.clone()
    del without_features.pair_features
    assert not steps.model.fits(without_features)
    with torch.no_grad():
        steps.model(task.graph, full)
    model.eval()
    steps.model(task.graph, full)
    assert len(calls) == 5


def freeze(model: nn.Module) -> None:
    model.encoder.embedding.requires_grad_(False)


def move(model: nn.Module) -> None:
    model.encoder.norm.weight.data = 2 * model.encoder.norm.weight.data


def move_buffer(model: nn.Module) -> None:
    baseline = model.terms["without_graph"].readout
    baseline.intercept.data = 2 * baseline.intercept


@pytest.mark.parametrize("change", [freeze, move, move_buffer])
def test_changed_parameters_end_the_replays(gpu, caplog, change):
    """The results are the same as in eager steps, and the log reports this once."""
    task = make_task()
    model = build_model(task)
    steps = steps_of(model, task)
    (batch,) = batches_of(task, steps.dataset, 1)
    add_gradients(steps.model, task, batch)
    assert steps.model.is_as_captured() and not caplog.messages
    model.zero_grad(set_to_none=False)  # as a replayed step of the optimiser does
    change(model)
    found = [add_gradients(steps.model, task, batch) for _ in range(3)]
    found_gradients = gradients_of(model)
    expected = [add_gradients(model, task, batch) for _ in range(3)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found_gradients, gradients_of(model), rtol=0, atol=0)
    (note,) = caplog.messages
    assert "CUDA graphs are no longer used" in note


def test_torch_accepts_the_arguments_of_the_replaced_functions():
    for function, arguments, options in (
        (torch.cuda.make_graphed_callables, (nn.Identity(), ()), {"allow_unused_input": True}),
        (torch.cuda.CUDAGraph, (), {}),
        (torch.cuda.graph, (None,), {"capture_error_mode": "thread_local"}),
        (torch.cuda.mem_get_info, (CPU,), {}),
    ):
        inspect.signature(function).bind(*arguments, **options)


def test_capturing_does_not_change_random_generators(gpu):
    task = make_task()
    model = OwnModel.of_task(task)
    numbers = []
    for is_captured in (False, True):
        torch.manual_seed(7)
        if is_captured:
            steps_of(model, task)
        numbers.append(torch.rand(2).tolist())
    assert numbers[0] == numbers[1]


# ---- Custom models -------------------------------------------------------------------------------
class OwnModel(KnockoutGNN):
    """A model that multiplies its predictions by a factor, which subclasses compute in Python."""

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        return super().forward(graph, batch) * self.factor(batch)

    def factor(self, batch: Data) -> float | Tensor:
        return 1.0

    @classmethod
    def of_task(cls, task: KnockoutTask) -> "OwnModel":
        model = build_model(task)
        model.__class__ = cls
        return model


class Random(OwnModel):
    def factor(self, batch: Data) -> float:
        return 1 + random.random()


class CountsNodes(OwnModel):
    """A model whose factor depends on the number of perturbed nodes, including padding."""

    def factor(self, batch: Data) -> Tensor:
        number = sum_by_sample(torch.ones_like(batch.level), batch)
        return 1 + 0.1 * number.unsqueeze(1)


class Waiting(OwnModel):
    def factor(self, batch: Data) -> float:
        return 2.0 if batch.seed > 0 else 1.0


class Statistics(OwnModel):
    """A model that counts in a buffer, and uses torch's dropout. Both can be captured."""

    @classmethod
    def of_task(cls, task: KnockoutTask) -> "Statistics":
        model = super().of_task(task)
        model.register_buffer("count", torch.zeros(()))
        return model

    def factor(self, batch: Data) -> Tensor:
        self.count += 1
        return nn.functional.dropout(torch.ones(1), 0.5)


@pytest.mark.parametrize("own", [Random, CountsNodes])
def test_a_model_that_replays_or_padding_would_change_is_not_captured(gpu, caplog, own):
    task = make_task()
    model = own.of_task(task)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = steps_of(model, task)
    assert steps.model is model and steps.dataset is task.dataset
    assert steps.note.startswith("; no CUDA graphs") and "the loss" in steps.note
    assert "the loss of a batch differs" in caplog.text
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class FrozenAtTheStart(OwnModel):
    """A model with a gradient that depends on a random number of Python.

    At the start, this gradient is 0, because the readout is 0.
    """

    def forward(self, *arguments: object) -> Tensor:
        self.encoder.__class__ = FrozenEncoder
        return super().forward(*arguments)


class FrozenEncoder(Encoder):
    def embed(self, *arguments: object) -> tuple[Tensor, Tensor]:
        x, sent = super().embed(*arguments)
        return x, sent.detach() + (1 + random.random()) * (sent - sent.detach())


def test_parameters_that_start_at_zero_do_not_hide_a_difference(gpu):
    task = make_task()
    model = task.build_model()
    model.__class__ = FrozenAtTheStart
    steps = steps_of(model, task)
    assert steps.model is model
    assert "the gradient of encoder.embedding" in steps.note


def test_a_model_that_waits_for_a_value_cannot_be_captured(gpu, caplog):
    task = make_task()
    model = Waiting.of_task(task)
    steps = steps_of(model, task)
    assert steps.model is model and steps.note.endswith("capturing them failed")
    assert "captured: RuntimeError" in caplog.text
    assert "aten._local_scalar_dense" in caplog.text or "is_nonzero" in caplog.text
    assert model_graphs.reason(ValueError("one line\nmore lines")) == "ValueError: one line"


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_failed_capture_restores_the_stream_and_the_generator(monkeypatch, error):
    set_stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    generators = [mock.Mock(), mock.Mock()]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    with contextlib.suppress(ValueError), undone_if_failed(torch.device("cuda", 1)):
        if error:
            raise error
    expected = []
    if error:
        expected.append(mock.call("stream of cuda:1"))
    assert set_stream.call_args_list == expected
    state = generators[1].clone_state.return_value
    assert generators[1].graphsafe_set_state.call_args_list == [mock.call(state)] * len(expected)
    assert not generators[0].mock_calls


def test_replays_update_buffers_and_draw_new_random_numbers(gpu):
    task = make_task()
    model = Statistics.of_task(task)
    steps = steps_of(model, task)
    assert steps.note == "; CUDA graphs" and model.count == 0
    (batch,) = batches_of(task, steps.dataset, 1)
    predictions = {}
    for function in (model, steps.model):
        torch.manual_seed(3)
        predictions[function] = torch.stack([function(task.graph, batch) for _ in range(8)])
    assert model.count == 16
    assert predictions[model].equal(predictions[steps.model])
    assert len(predictions[model][:, 0].unique()) == 2


def test_a_parameter_without_a_gradient_prevents_capture(gpu):
    task = make_task()
    model = build_model(task)
    model.unused = nn.Linear(2, 1)
    assert steps_of(model, task).note.endswith("capturing them failed")


# ---- Options and machines ------------------------------------------------------------------------
def test_the_log_gives_the_reason_why_there_are_no_graphs(gpu, monkeypatch):
    of_expanded = make_task(message_passing="expanded")
    steps = steps_of(build_model(of_expanded), of_expanded)
    assert steps.note.startswith("; no CUDA graphs, because ")
    assert "message_passing=expanded" in steps.note
    task = make_task()
    model = build_model(task)
    ddp = replace(task.config.ddp, sync_batchnorm=True)
    of_ranks = replace(task, config=replace(task.config, ddp=ddp))
    assert "ddp.sync_batchnorm=true" in steps_of(model, of_ranks).note
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_anomaly_enabled", lambda: True)
        assert "anomaly detection" in steps_of(model, task).note
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        assert "CUDA_LAUNCH_BLOCKING" in steps_of(model, task).note
    with monkeypatch.context() as patch:
        patch.setattr(SharedGraph, "samples_at_once", lambda graph, states: SIZE - 1)
        assert "batches are so large" in steps_of(model, task).note
        of_local = make_task(readout="local")
        assert steps_of(build_model(of_local), of_local).note == "; CUDA graphs"
    graphs.simulate_gpu(free=100_000)
    assert "GB of 9.3e-05 GB free" in steps_of(model, task).note


def test_all_ranks_are_eager_if_one_rank_must_be(gpu, monkeypatch):
    task = make_task()
    model = build_model(task)
    ddp = Distributed(DDPConfig())
    monkeypatch.setattr(ddp, "gather", lambda reason: [reason, "rank 1 has too little"])
    steps = captured(model, task, sampler_of(task), ddp)
    assert steps.model is model and steps.note.endswith("rank 1 has too little")


# ---- The optimiser's part -----------------------------------------------------------------------
def state_of(task: KnockoutTask, enabled: bool = False) -> TrainState:
    """Returns a state with learning rates that are exact in float32, the dtype in a graph."""
    model = build_model(task)
    optim = replace(task.config.optim, lr=1 / 128, lr_mult={"layers": 0.25, "norm": 0})
    optimizer = build_optimizer(model, optim, Distributed(DDPConfig()))
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=enabled))


def update_all(
    state: TrainState,
    num_steps: int,
    factor: Callable[[int], float],
    clip: float = 1.0,
    update: Callable[..., Tensor] = update_parameters,
) -> list[Tensor]:
    """Makes steps with random gradients times `factor(step)`.

    Returns the gradient norm and the scale of each step, [2] each.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(num_steps):
        set_learning_rates(state.optimizer, 0.5**step)
        for parameter in state.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad += factor(step) * noise
        found.append(update(state, clip))
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_replayed_updates_equal_the_function(gpu, precision):
    """Learning rates change, gradients are clipped, and the norm of one step is not finite."""
    task = make_task(precision=precision)
    calls = []

    def update(state: TrainState, clip: float) -> Tensor:
        calls.append(1)
        return update_parameters(state, clip)

    def factor(step: int) -> float:
        return math.nan if step == 5 else 0.01 * 4**step

    state = state_of(task)
    other = state_of(task)
    found = update_all(state, 8, factor, update=GraphedUpdate(update, state))
    expected = update_all(other, 8, factor)
    # The first two steps are eager. In the third step, all tensors have the same addresses as in
    # the step before, so the third call is the capture. The other steps are replays.
    assert len(calls) == 3
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    states = [one.model.state_dict() for one in (state, other)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    saved, expected = (one.optimizer.state_dict() for one in (state, other))
    torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=0)
    # Checkpoints contain these options, so a capture must not leave tensors in them.
    assert saved["param_groups"] == expected["param_groups"]


def move_gradients(state: TrainState) -> None:
    """Moves all gradients to different memory, as DDP does."""
    for parameter in state.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def change_weight_decay(state: TrainState) -> None:
    state.optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize(
    ("change", "next_clip"),
    [
        (move_gradients, 1.0),
        (change_weight_decay, 1.0),
        (lambda state: None, 0.5),
    ],
)
def test_an_update_is_captured_again_after_a_change(gpu, change, next_clip):
    task = make_task()
    calls = []

    def update(state: TrainState, clip: float) -> Tensor:
        calls.append(1)
        return update_parameters(state, clip)

    state = state_of(task)
    graphed = GraphedUpdate(update, state)
    other = state_of(task)
    kept = []  # keeps old tensors, so that new tensors cannot get the same addresses
    for num_calls, clip in ((3, 1.0), (5, next_clip)):
        found = update_all(state, 4, lambda step: 1.0, clip, graphed)
        expected = update_all(other, 4, lambda step: 1.0, clip)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        states = [one.model.state_dict() for one in (state, other)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        assert len(calls) == num_calls
        kept += [parameter.grad for parameter in state.model.parameters()]
        kept += state.optimizer.state.values()
        change(state)
        change(other)


class CountingAdamW(torch.optim.AdamW):
    """A subclass of AdamW, which could execute additional Python code in each step."""


@pytest.mark.parametrize("obstacle", ["scaler", "subclass", "failure"])
def test_an_update_that_cannot_be_captured_is_eager(gpu, caplog, obstacle):
    task = make_task()
    states = [state_of(task, enabled=obstacle == "scaler") for _ in range(2)]
    if obstacle == "subclass":
        for state in states:
            state.optimizer = CountingAdamW(state.model.parameters(), lr=1 / 128, fused=True)
    first, second = states

    calls = []

    def update(state: TrainState, clip: float) -> Tensor:
        calls.append(1)
        if obstacle == "failure":
            # `item` waits for the device, which makes the capture fail.
            assert state.model.encoder.norm.weight.grad.sum().item() != 0
        return update_parameters(state, clip)

    found = update_all(first, 4, lambda step: 1.0, update=GraphedUpdate(update, first))
    assert len(calls) == 4 + (obstacle == "failure")
    torch.testing.assert_close(found, update_all(second, 4, lambda step: 1.0), rtol=0, atol=0)
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=0, atol=0)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (obstacle == "failure")
    if warnings:
        assert "capture failed: RuntimeError: operation not permitted" in warnings[0]


def test_the_simulated_graphs_do_not_replay_an_operator_that_reads_freed_memory():
    number = torch.ones(3)
    recording = graphs.Recording()
    with recording:
        number.add(1)
    recording.replay()
    del number
    with pytest.raises(RuntimeError, match=r"add.* would read memory that is freed"):
        recording.replay()


# ---- Complete runs -------------------------------------------------------------------------------
def test_a_run_replays_its_steps_and_starts_loaders_after_the_capture(train, monkeypatch):
    """The threads of a loader would allocate pinned memory, which fails during captures."""
    calls = []
    for owner, name in (
        (graphs, "make_graphed_callables"),
        (DataLoader, "__iter__"),
        (GraphedModel, "forward"),
        (graphs.Capture, "replay"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), calls))
    options = ["data.workers=1", "optim.epochs=2", "optim.accumulate=2"]
    train(0, *options, fault="simulate_gpu").check()
    assert calls[0] == "make_graphed_callables"
    assert calls.count("make_graphed_callables") == 1 and calls.count("__iter__") > 1
    # Two calls compare captured with eager passes. Then, each step has two micro-batches.
    assert calls.count("forward") == 2 + 2 * 5 * 2
    # The optimiser's part is replayed from the third step on.
    assert calls.count("replay") == 2 * 5 - 2


def counted(function: Callable, calls: list[str]) -> Callable:
    @functools.wraps(function)
    def wrapper(*arguments: object, **options: object) -> object:
        calls.append(function.__name__)
        return function(*arguments, **options)

    return wrapper
