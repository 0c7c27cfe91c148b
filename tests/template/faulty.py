"""Runs a command of the template with faults. A fault is the name of a function of this file.

    python tests/template/faulty.py stop_at_step:4 simulate_gpu -- train.py ARGUMENTS...

The arguments of a fault follow its name, after colons. Under torchrun, a fault happens on all ranks
unless it has an argument `rank`. Step n starts after n completed steps.
"""

import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import data
import data_loader
import ddp_ends
import ddp_setup
import metrics
import optim
import predictor
import run_checkpoint
import task
import train
from data import DataConfig, KnockoutDataset
from optim import OptimConfig
from run_folder import RunFolder
from task import KnockoutTask

RANK = os.environ.get("RANK", "0")


def main() -> None:
    split = sys.argv.index("--")
    faults = sys.argv[1:split]
    command = sys.argv[split + 1]
    sys.argv[1:] = sys.argv[split + 2 :]
    for fault in faults:
        name, *arguments = fault.split(":")
        globals()[name](*arguments)
    ddp_ends.end_process(importlib.import_module(command.removesuffix(".py")).main())


def call_before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Makes the function `name` of a module or class first call `action` with its arguments."""
    original = getattr(owner, name)

    def replacement(*arguments, **options):
        action(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, replacement)


def kill_this_process(signal_name: str) -> None:
    os.kill(os.getpid(), signal.Signals[signal_name])


def sleep_in_a_library() -> NoReturn:
    """Waits in a C library for ever. Unlike `time.sleep`, it does not react to signals."""
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


# ---- Signals -------------------------------------------------------------------------------------
def stop_at_step(step: str) -> None:
    """The process gets SIGTERM at the start of a step. Ranks react after this step."""
    ddp_setup.AGREEMENT_S = 0.0  # ranks agree in each step

    def stop(current: int, *arguments: object) -> None:
        if current == int(step):
            kill_this_process("SIGTERM")

    call_before(train, "schedule", stop)


def stop_in_evaluation(number: str) -> None:
    """The process gets SIGTERM at the start of an evaluation; the first one has the number 1."""
    calls = []

    def stop(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == int(number):
            kill_this_process("SIGTERM")

    call_before(train, "predict_rows", stop)


def kill_at_step(step: str, rank: str) -> None:
    """A rank is killed at the start of a step."""

    def kill(current: int, *arguments: object) -> None:
        if current == int(step) and rank == RANK:
            kill_this_process("SIGKILL")

    call_before(train, "schedule", kill)


def kill_in_optimiser(rank: str) -> None:
    """A rank is killed in its first step of the optimiser, after its gradients were summed."""

    def kill(*arguments: object) -> None:
        if rank == RANK:
            kill_this_process("SIGKILL")

    call_before(train, "may_step", kill)


def signal_while_loading(target: str, signal_name: str) -> None:
    """When rank 0 reads the tables, it sends a signal to itself (`rank`) or its `torchrun`."""

    def send(config: DataConfig) -> None:
        if RANK == "0":
            process = os.getppid() if target == "torchrun" else os.getpid()
            os.kill(process, signal.Signals[signal_name])

    call_before(data, "load", send)


# ---- Hangs and exceptions ------------------------------------------------------------------------
def hang_in_optimiser(rank: str) -> None:
    """A rank waits in a C library for ever in its first step of the optimiser."""

    def hang(*arguments: object) -> None:
        if rank == RANK:
            sleep_in_a_library()

    call_before(train, "may_step", hang)


def fail_beside_a_busy_rank() -> None:
    """When the third batch of rows is made, rank 0 sleeps and the other ranks divide by zero."""
    calls = []

    def fail(dataset: KnockoutDataset, rows: object) -> None:
        if not isinstance(rows, list):  # a batch for pair features, which one rank computes for all
            return
        calls.append(rows)
        if len(calls) == 3 and RANK == "0":
            time.sleep(1000)
        elif len(calls) == 3:
            _ = 1 / 0

    call_before(KnockoutDataset, "__getitems__", fail)


def slow_data(rank: str, seconds: str) -> None:
    """A rank sleeps before it makes each batch."""

    def sleep(*arguments: object) -> None:
        if rank == RANK:
            time.sleep(float(seconds))

    call_before(KnockoutDataset, "__getitems__", sleep)


# ---- Numbers -------------------------------------------------------------------------------------
def save_an_infinite_weight() -> None:
    """Each checkpoint contains an infinite weight."""
    state_dict = run_checkpoint.TrainState.state_dict

    def spoiled(state: run_checkpoint.TrainState) -> dict[str, Any]:
        saved = state_dict(state)
        saved["model"]["encoder.embedding"][3, 1] = float("inf")
        return saved

    run_checkpoint.TrainState.state_dict = spoiled


def spoil_a_step_and_stop(step: str) -> None:
    """From this step on, all losses are nan, and the process gets SIGTERM.

    A file `done` in the working directory records that this has happened, so that it happens once.
    """
    loss = KnockoutTask.loss

    def spoiled(*arguments: object) -> torch.Tensor:
        return loss(*arguments) * float("nan")

    def spoil(current: int, *arguments: object) -> None:
        if current == int(step) and not Path("done").exists():
            Path("done").touch()
            KnockoutTask.loss = spoiled
            kill_this_process("SIGTERM")

    call_before(train, "schedule", spoil)


# ---- Disks and loader processes ------------------------------------------------------------------
def fill_disk_in_test() -> None:
    """When test.tsv is written, files may not become larger than 500 bytes."""

    def fill(*arguments: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    call_before(task, "result_lines", fill)


def fill_disk_in_prediction() -> None:
    """From the first prediction on, files may not become larger than 500 bytes."""

    def fill(*arguments: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    call_before(predictor.Ensemble, "predict", fill)


def predict_at_once(num_rows: str) -> None:
    """predict.py predicts and writes at most this number of rows at once."""
    predictor.MOST = int(num_rows)


def die_in_prediction() -> None:
    """The process is killed when it starts to predict the first rows."""
    call_before(predictor.Ensemble, "predict", lambda *arguments: kill_this_process("SIGKILL"))


def spawn_loader() -> None:
    """Processes of the DataLoader are spawned, as on a machine with a GPU."""

    def spawned(*arguments: object, **options: object) -> DataLoader:
        if options["num_workers"]:
            options["multiprocessing_context"] = "spawn"
        return DataLoader(*arguments, **options)

    data_loader.DataLoader = spawned


def unsendable_batch() -> None:
    """Batches contain a function, which a process of the DataLoader cannot send."""
    make_batch = KnockoutDataset.__getitems__

    def with_a_function(dataset: KnockoutDataset, rows: list[int]) -> Data:
        batch = make_batch(dataset, rows)
        batch.function = lambda: 0
        return batch

    KnockoutDataset.__getitems__ = with_a_function


# ---- Edits that a user might make, and reports ---------------------------------------------------
def own_metric() -> None:
    """The first metric is `doubled`, twice the template's first one."""
    metric = metrics.METRICS[metrics.first_metric()]
    own = {"doubled": lambda y, prediction, weight: 2 * metric(y, prediction, weight)}
    metrics.METRICS = own | metrics.METRICS


def other_groups() -> None:
    """The first group of parameters is split into two."""
    groups_of = optim.parameter_groups

    def own_groups(model: nn.Module, options: OptimConfig) -> list[dict[str, Any]]:
        first, *others = groups_of(model, options)
        params = first["params"]
        return [{**first, "params": params[:1]}, {**first, "params": params[1:]}, *others]

    optim.parameter_groups = own_groups


def other_optimiser() -> None:
    """Trains with stochastic gradient descent, whose state does not contain a number of steps."""

    def build_sgd(model: nn.Module, options: OptimConfig, ddp: Any) -> torch.optim.Optimizer:
        groups = optim.parameter_groups(model, options)
        return torch.optim.SGD(groups, lr=options.lr, momentum=0.9)

    train.build_optimizer = build_sgd


def closed_pipe() -> None:
    """The program that reads the output of the command has exited."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w")  # has a buffer, even if PYTHONUNBUFFERED is set


def terminal() -> None:
    """stderr claims to be a terminal, so progress bars are shown."""
    sys.stderr.isatty = lambda: True


def steps_left() -> None:
    """The time left for the run is shown as a number of steps."""

    def progress(folder: RunFolder, step: int) -> str:
        return f"{step - folder.first_step} done, {folder.last_step - step} left"

    RunFolder.progress = progress


def layer_without_gradient() -> None:
    """The model has a layer that is never called."""
    build_model = KnockoutTask.build_model

    def build_with_layer(task: KnockoutTask) -> nn.Module:
        model = build_model(task)
        model.unused = nn.Linear(2, 1)
        return model

    KnockoutTask.build_model = build_with_layer


def other_shape() -> None:
    """The model returns twice as many outputs as the loss needs."""
    from model import KnockoutGNN

    forward = KnockoutGNN.forward
    KnockoutGNN.forward = lambda *arguments: forward(*arguments).repeat(1, 2)


def own_term() -> None:
    """The model has a custom term, which adds 0.25 to every output."""
    from torch import nn

    from task import KnockoutTask

    class Quarter(nn.Module):
        def forward(self, graph: object, wild: object, dose: object, batch: Data) -> torch.Tensor:
            return torch.full((len(batch.y), 1), 0.25)

    build_model = KnockoutTask.build_model

    def with_quarter(task: KnockoutTask) -> nn.Module:
        model = build_model(task)
        model.terms["quarter"] = Quarter()
        return model

    KnockoutTask.build_model = with_quarter


def other_option_on_rank_1(option: str) -> None:
    """Rank 1 has a different option on its command line."""
    if RANK == "1":
        sys.argv.append(option)


def other_cuda_on_rank_1() -> None:
    """Rank 1 reports a different version of CUDA."""
    if RANK == "1":
        torch.version.cuda = "99.9"


def simulate_gpu() -> None:
    """Steps are captured and replayed as on a GPU, with simulated CUDA graphs on the CPU."""
    from tests.tools import graphs

    graphs.simulate_gpu()


def fake_gpu() -> None:
    """The command runs on a simulated GPU."""
    from tests.tools import fake_gpu

    fake_gpu.install()


def keep_no_pair_features() -> None:
    """The dataset computes pair features for each batch, because it may not keep them in memory."""
    import model_pairs

    model_pairs.MOST_BYTES = 0


def wait_in_optimiser() -> None:
    """The host waits for a value in each step of the optimiser."""

    def wait(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
        grad_norm.item()

    call_before(train, "may_step", wait)


def kill_while_capturing(rank: str) -> None:
    """A rank is killed while it captures steps. This needs the fault `simulate_gpu`, too."""
    import model_graphs

    def kill(*arguments: object, **options: object) -> None:
        if rank == RANK:
            kill_this_process("SIGKILL")

    call_before(model_graphs, "make_graphed_callables", kill)


def wait_in_model() -> None:
    """In training, the model reads a value on the host, and uses torch's random generator."""
    from model import KnockoutGNN

    def wait(model: nn.Module, graph: nn.Module, batch: Data) -> None:
        if model.training:
            torch.rand(1, device=graph.device)
            int(batch.seed)

    call_before(KnockoutGNN, "forward", wait)


def share_gpu() -> None:
    """Several ranks share a GPU and communicate with gloo, because NCCL does not allow this."""
    properties_of = torch.cuda.get_device_properties
    join = ddp_setup.dist.init_process_group

    class OwnProperties:
        """The properties of the GPU, with a different `uuid` on each rank."""

        def __init__(self, device: torch.device | int | None = None):
            self.properties = properties_of(device)
            self.uuid = f"{self.properties.uuid} of rank {RANK}"

        def __getattr__(self, name: str) -> object:
            return getattr(self.properties, name)

    torch.cuda.get_device_properties = OwnProperties
    ddp_setup.dist.init_process_group = lambda backend, **options: join("gloo", **options)


def print_plans() -> None:
    """Prints for each batch whether it has a plan of the states that its knock-outs change."""

    from model import KnockoutTerm

    def report(term: KnockoutTerm, *arguments: object) -> None:
        print("planned:", "plan" in arguments[-1])

    call_before(KnockoutTerm, "forward", report)


def print_determinism() -> None:
    """Each evaluation prints how deterministic torch is, and calls a non-deterministic operator."""

    def report(*arguments: object) -> None:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        print("deterministic", torch.are_deterministic_algorithms_enabled(), workspace)

    call_before(train, "predict_rows", report)


if __name__ == "__main__":
    main()
