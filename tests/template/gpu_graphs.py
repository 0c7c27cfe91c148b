"""The checks of `python -m tests.check gpu` of CUDA graphs, and of the speed of predictions.

Each check returns whether it is OK, and a text. The model is this template's model.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Data

import data
import model_graphs
from config import Config
from data import DataConfig, random_split
from data_loader import StepSampler, make_loader
from data_tables import Tables
from evaluate import predict_rows
from model import ModelConfig
from model_graphs import GraphedUpdate, capture
from optim import OptimConfig, build_optimizer, set_learning_rates
from run_checkpoint import TrainState
from task import KnockoutTask
from tests.bench.synthetic import PRESETS, synthetic_tables
from tests.template.gpu_checks import (
    NUM_SAMPLES,
    NUM_STEPS,
    SMALL,
    Runs,
    distance,
    no_waiting,
    rank_on,
    small_task,
)
from tests.tools.diagnose import read_trace
from tests.tools.parity import parameter_differences
from train import (
    Meter,
    StepParts,
    autocast,
    train_step,
    update_parameters,
)

CAPTURED = "; CUDA graphs"  # the note in the log
TIMED_STEPS = 100
TIMED_ROWS = 50_000
# Largest difference of a tensor of two models, divided by the norm of the model, in float64.
OVER_THE_MODEL = 1e-8


def build_model(task: KnockoutTask) -> nn.Module:
    """Returns the task's model, on its device."""
    torch.manual_seed(0)
    return task.build_model().to(task.graph.device, task.config.optim.dtype).train()


def sampler_of(task: KnockoutTask, batch_size: int = NUM_SAMPLES) -> StepSampler:
    return StepSampler(task.rows("train"), batch_size, accumulate=1, world_size=1, rank=0, seed=0)


# ---- Captured and eager steps --------------------------------------------------------------------
def replays(
    device: torch.device,
    model: ModelConfig,
    optim: OptimConfig,
    tolerance: float,
    folder: Path,
) -> tuple[bool, str]:
    """Compares losses and gradients of captured and eager steps.

    It compares two batches, and the sums of the gradients of both batches.
    """
    task = small_task(model, optim, device, folder)
    module = build_model(task)
    with torch.no_grad():
        for parameter in module.parameters():  # parameters that start at zero would hide errors
            parameter += 0.1 * torch.randn_like(parameter)
    steps, _ = captured(task, module, sampler_of(task))
    if steps.note != CAPTURED:
        return False, steps.note
    batches = []
    for seed, rows in zip(range(2), sampler_of(task), strict=False):
        batches.append(steps.dataset.__getitems__(rows).to(device))
        batches[-1].seed = torch.full((), seed, device=device)
    errors = []
    for some in (batches[:1], batches[1:], batches):
        by_hand = loss_and_gradients(module, module, task, some)
        by_graphs = loss_and_gradients(steps.model, module, task, some)
        errors.append(distance(by_graphs, by_hand))
    again = loss_and_gradients(steps.model, module, task, batches)
    same = all(map(torch.equal, by_graphs, again))
    figure = f"relative error {max(errors):.1e}, the same bits again: {same}"
    is_deterministic = same or not torch.are_deterministic_algorithms_enabled()
    return max(errors) <= tolerance and is_deterministic, figure


def deterministic_replays(*arguments: object) -> tuple[bool, str]:
    """Calls `replays` with run.deterministic: replays of a batch must then have the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return replays(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)


def loss_and_gradients(
    function: nn.Module, model: nn.Module, task: KnockoutTask, batches: list[Data]
) -> list[Tensor]:
    """Returns the sums of the losses and of the gradients of some batches, in float64 on the CPU.

    `function` computes the outputs. It is the model or its `GraphedModel`.
    """
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        with autocast(task.config.optim, rank_on(task.graph.device)):
            prediction = function(task.graph, batch)
        of_batch = task.loss(prediction, batch).sum()
        of_batch.backward()
        loss = loss + of_batch.detach().double().cpu()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad.to_dense().flatten().double().cpu() for parameter in trained]
    return [loss, torch.cat(gradients)]


@contextmanager
def liveness_checked() -> Iterator[None]:
    """In the block, a replay raises an error if a tensor that it reads has been freed.

    This requires torch 2.13. It does not work for graphs of the model, because torch's check does
    not support sparse matrices.
    """
    capture_graph = model_graphs.cuda_graph
    if "check_input_liveness" in inspect.signature(capture_graph).parameters:
        capture_graph = partial(capture_graph, check_input_liveness=True)
    with mock.patch.object(model_graphs, "cuda_graph", capture_graph):
        yield


@liveness_checked()
def replayed_updates(device: torch.device, precision: str, folder: Path) -> tuple[bool, str]:
    """Checks that parameters have the same bits after replayed updates and after eager updates.

    Otherwise, a rank that cannot capture its updates would drift away from the other ranks. The
    learning rate changes in each step, and the gradient norm of one step is not finite.
    """
    optim = OptimConfig(lr=0.003, precision=precision)  # a learning rate that float32 rounds
    task = small_task(ModelConfig(), optim, device, folder)
    states = [state_of(task, build_model(task)) for _ in range(2)]
    graphed = GraphedUpdate(update_parameters, states[0])
    found = []
    for state, update in zip(states, (graphed, update_parameters), strict=True):
        generator = torch.Generator().manual_seed(0)
        parameters = list(state.model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for step in range(8):
            set_learning_rates(state.optimizer, 0.5**step)
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad.copy_(noise if step != 5 else math.nan * noise)
            update(state, 1.0)
            for parameter in parameters:
                if parameter.grad is None:  # an eager update frees the gradients
                    parameter.grad = torch.zeros_like(parameter)
        found.append(torch.cat([parameter.detach().flatten().cpu() for parameter in parameters]))
    error = distance(found[:1], found[1:])
    is_replayed = graphed.graph is not None
    return is_replayed and error == 0, f"relative error {error:.1e}, replayed: {is_replayed}"


def failed_update(device: torch.device, folder: Path) -> tuple[bool, str]:
    """Compares losses of captured and eager steps whose optimiser's part waits for a value.

    This part cannot be captured, but replays of the model must continue.
    """
    losses = []
    for use in (True, False):
        task = small_task(ModelConfig(dropout=0.3), OptimConfig(), device, folder)
        model = build_model(task)
        sampler = sampler_of(task)
        steps, state = captured(task, model, sampler, waiting_update)
        if not use:
            steps = steps._replace(model=model)
        meter = Meter(task, rank_on(device))
        batches = full_batches(steps.dataset, sampler, device)
        for _ in range(6):
            train_step(task, state, steps, batches, NUM_SAMPLES, meter, rank_on(device))
            state.step += 1
        losses.append(meter.loss.cpu())
        was_captured = isinstance(steps.update, GraphedUpdate)
        was_refused = was_captured and not steps.update.can_capture
    error = distance(losses[:1], losses[1:])
    return was_refused and error <= 1e-5, f"relative error {error:.1e}, refused: {was_refused}"


def waiting_update(state: TrainState, clip: float) -> Tensor:
    norm_and_scale = update_parameters(state, clip)
    norm_and_scale.sum().item()
    return norm_and_scale


def captured(
    task: KnockoutTask,
    model: nn.Module,
    sampler: StepSampler,
    update: Callable[..., Tensor] = update_parameters,
) -> tuple[StepParts, TrainState]:
    """Returns the training steps of a model as train.py captures them, and their state."""
    state = state_of(task, model)
    steps = StepParts(model, task.dataset, update)
    return capture(steps, state, task, sampler, rank_on(task.graph.device)), state


def state_of(task: KnockoutTask, model: nn.Module) -> TrainState:
    ddp = rank_on(task.graph.device)
    optimizer = build_optimizer(model, task.config.optim, ddp)
    return TrainState(model, optimizer, torch.amp.GradScaler(ddp.device.type, enabled=False))


# ---- Without graphs ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Refusal:
    """A condition under which steps must not be captured, and a text that the log must contain."""

    reason: str
    model: ModelConfig = ModelConfig()
    context: Callable[[], AbstractContextManager] = nullcontext


REFUSALS = {
    "expanded": Refusal(
        "model.message_passing=expanded",
        ModelConfig(message_passing="expanded"),
    ),
    "too little memory": Refusal(
        "9.5e-07 GB free",
        context=partial(mock.patch.object, model_graphs, "mem_get_info", lambda _: (1024, 1024)),
    ),
}


def refused(device: torch.device, refusal: Refusal, folder: Path) -> tuple[bool, str]:
    """Checks that steps remain eager, and that the log gives the reason."""
    task = small_task(refusal.model, OptimConfig(), device, folder)
    model = build_model(task)
    with refusal.context():
        steps, _ = captured(task, model, sampler_of(task))
    note = steps.note.removeprefix("; ")
    is_right = note.startswith("no CUDA graphs, because ") and refusal.reason in note
    return is_right and steps.model is model, note


# ---- Speed ---------------------------------------------------------------------------------------
@cache
def tables_of(name: str) -> Tables:
    """Returns the tables of the example, or 3,000 samples of a preset."""
    if name == "example":
        return data.load(DataConfig())
    tables = synthetic_tables(replace(PRESETS[name], num_samples=3000))
    tables.split = random_split(tables, DataConfig())
    return tables


@cache
def task_of(name: str, model: ModelConfig, device: torch.device, folder: Path) -> KnockoutTask:
    config = Config(data=DataConfig(cache_dir=str(folder)), model=model)
    return KnockoutTask.from_tables(tables_of(name), config, device)


def steps_by_graphs(
    device: torch.device, name: str, model: ModelConfig, batch_size: int, folder: Path
) -> tuple[bool, str]:
    """Measures training steps per second with and without CUDA graphs, in a process without DDP.

    The host must not wait for the GPU in any step.
    """
    task = task_of(name, model, device, folder)
    speeds = []
    for use in (True, False):
        module = build_model(task)
        sampler = sampler_of(task, batch_size)
        if use:
            steps, state = captured(task, module, sampler)
            note = steps.note
        else:
            steps = StepParts(module, task.dataset, update_parameters)
            state = state_of(task, module)
        speeds.append(steps_a_second(task, state, steps, sampler))
    by_graphs, eager = speeds
    return note == CAPTURED, f"{by_graphs:.1f} it/s, without graphs {eager:.1f}{note}"


def steps_a_second(
    task: KnockoutTask, state: TrainState, steps: StepParts, sampler: StepSampler
) -> float:
    ddp = rank_on(task.graph.device)
    batches = full_batches(steps.dataset, sampler, ddp.device)
    weight = torch.ones(len(task.tables.targets), dtype=torch.float64)
    for num_steps in (NUM_STEPS, TIMED_STEPS):  # the first ones load libraries
        meter = Meter(task, ddp)
        with no_waiting(ddp.device):
            for _ in range(num_steps):
                norm_and_scale = train_step(
                    task, state, steps, batches, sampler.batch_size, meter, ddp
                )
                meter.count(sampler.batch_size, weight, norm_and_scale)
                state.step += 1
        row = meter.read(state)
    return 1e3 / row["step_ms"]


def full_batches(dataset: Dataset, sampler: StepSampler, device: torch.device) -> Iterator[Data]:
    """Yields the full batches of each epoch, for an infinite number of epochs."""
    loader = make_loader(dataset, sampler, workers=0, device=device)
    num_full = len(sampler.rows) // sampler.batch_size
    while True:
        yield from islice(loader, num_full)


def predictions(
    device: torch.device, name: str, model: ModelConfig, folder: Path
) -> tuple[bool, str]:
    """Measures predictions per second in large batches, and compares them with a small batch."""
    task = task_of(name, model, device, folder)
    module = build_model(task)
    ddp = rank_on(device)
    num_rows = len(task.tables.y)
    rows = torch.arange(num_rows).repeat(TIMED_ROWS // num_rows + 1)[:TIMED_ROWS]
    few = predict_rows(module, task, rows[:NUM_SAMPLES], ddp)
    predict_rows(module, task, rows[:num_rows], ddp)  # loads libraries
    start = perf_counter()
    prediction = predict_rows(module, task, rows, ddp)
    speed = len(rows) / (perf_counter() - start)
    error = distance([prediction[:NUM_SAMPLES]], [few])
    return error <= 1e-4, f"{speed:,.0f} samples/s, relative error {error:.1e}"


# ---- Programs ------------------------------------------------------------------------------------
def uncaptured(runs: Runs) -> tuple[bool, str]:
    """Checks that a run trains without CUDA graphs if its model waits for a value."""
    name = "uncaptured"
    problem = runs.train(name, *SMALL, faults=("wait_in_model",))
    if problem:
        return False, problem
    note = runs.note_on_graphs(name)
    return note.startswith("no CUDA graphs"), note


def profiled(runs: Runs) -> tuple[bool, str]:
    """Checks that a run writes a trace, although it captures steps while the profiler warms up."""
    name = "profiled"
    problem = runs.train(name, *SMALL, "log.profile_steps=2")
    if problem:
        return False, problem
    times = read_trace(runs.folder / name / "trace.rank0.json")
    return True, f"a trace of {times['steps']} steps; {runs.note_on_graphs(name)}"


def as_one_rank(
    runs: Runs, nproc: int, name: str, options: tuple[str, ...] = (), faults: tuple[str, ...] = ()
) -> tuple[bool, str]:
    """Checks that ranks end with the parameters of one rank without these options, in float64."""
    common = (*SMALL, "optim.epochs=1", "optim.precision=fp64")
    reference = runs.folder / "one rank"
    problem = "" if reference.exists() else runs.train(reference.name, *common)
    if not problem:
        problem = runs.train(name, *common, *options, nproc=nproc, faults=faults)
    if problem:
        return False, problem
    differences = parameter_differences(runs.folder / name, reference)
    error = max(differences.values())
    return error <= OVER_THE_MODEL, f"relative difference {error:.1e}; {runs.note_on_graphs(name)}"
