"""Measures the host's work in a training step: the number of kernels that the host launches.

    python -m tests.bench.host [--json FILE]

The step has 9 relations, hidden 64, 3 layers and the route `shared`, as with the preset `yeast`.
However, the graph has only 16 nodes and the batch 4 samples, so that the computation takes almost
no time. The kernels are the dispatched operators, except for operators that only create a view. The
time of this step is a lower limit for larger graphs.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import HeteroData

from config import Config
from data import KnockoutDataset
from ddp_setup import Distributed
from mask import SharedGraph
from model import ModelConfig
from optim import OptimConfig, build_optimizer
from run_checkpoint import TrainState
from tests.bench import arguments, build_batch, milliseconds, report
from tests.sets import tables_of
from tests.template.models import full_model
from tests.template.tasks import task_of
from train import Meter, StepParts, train_step, update_parameters

NUM_NODES = 16
NUM_RELATIONS = 9
NUM_SAMPLES = 4


class CountKernels(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU.

    Use it as `with CountKernels() as count`; then `count.kernels` has the number for each operator.
    """

    FREE = ("detach", "empty", "new_empty", "empty_like", "_unsafe_view")
    FREE += ("_record_function_enter_new", "_record_function_exit", "sparse_compressed_tensor")

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in self.FREE:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


def tiny_step(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes one training step, like train.py."""
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["gene"].num_nodes = NUM_NODES
    for r in range(NUM_RELATIONS):
        edge_index = torch.randint(NUM_NODES, (2, 30), generator=generator)
        graph["gene", f"r{r}", "gene"].edge_index = edge_index
    shared = SharedGraph(graph).to(device)
    optim = OptimConfig()
    config = Config(model=ModelConfig(hidden=64, layers=3, message_passing="shared"), optim=optim)
    model = full_model(config.model, NUM_NODES, NUM_RELATIONS).to(device).train()
    ddp = Distributed(config.ddp)
    ddp.device = device
    optimizer = build_optimizer(model, optim, ddp)
    state = TrainState(model, optimizer, torch.amp.GradScaler(device.type, enabled=False))
    batch = build_batch(shared, NUM_SAMPLES, model=config.model)
    samples = tables_of([[]] * NUM_SAMPLES, torch.zeros(NUM_SAMPLES))
    task = task_of(shared, KnockoutDataset(samples, shared.degree), config)
    meter = Meter(task, ddp)
    weight = samples.score_weight(torch.arange(NUM_SAMPLES)).sum(dim=0)  # total for each score
    batches = itertools.repeat(batch)
    steps = StepParts(model, task.dataset, update_parameters)

    def step() -> None:
        norm_and_scale = train_step(task, state, steps, batches, NUM_SAMPLES, meter, ddp)
        meter.count(NUM_SAMPLES, weight, norm_and_scale)

    return step


def count_kernels(step: Callable[[], None]) -> Counter:
    """Returns how often the third step launches each kernel.

    The first two steps differ, because they create the optimiser's state.
    """
    step()
    step()
    with CountKernels() as count:
        step()
    return count.kernels


def main() -> None:
    options = arguments(__doc__, repeats={"type": int, "default": 100})
    device = torch.device(options.device)
    torch.set_num_threads(1)
    step = tiny_step(device)
    kernels = count_kernels(step)
    times = [milliseconds(step, device) for _ in range(options.repeats)]
    row = {
        "kernels": kernels.total(),
        "fastest step, ms": min(times),
        "median, ms": statistics.median(times),
    }
    kinds = [{"operator": name, "in a step": count} for name, count in kernels.most_common(12)]
    report({"Host work of a tiny step": [row], "Most frequent": kinds}, device, options.json)


if __name__ == "__main__":
    main()
