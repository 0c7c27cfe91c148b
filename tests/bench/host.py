"""What a training step asks of the host: how many kernels it launches, its time on a tiny graph.

    python -m tests.bench.host [--json FILE]

The step is that of the yeast preset (9 relations, hidden 64, 3 layers, the route `shared`) on 16
nodes and 4 samples, so that next to nothing is computed. Kernels are counted from the dispatched
operators, less those that only change a view. A step cannot be faster than the host.
"""

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import HeteroData

from ddp_setup import DDPConfig, Distributed
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from optim import OptimConfig, build_optimizer, optimizer_step
from tests.bench import arguments, build_batch, report, synchronize
from train import Meter, criterion

NUM_NODES, NUM_RELATIONS, NUM_SAMPLES = 16, 9, 4


class CountKernels(TorchDispatchMode):
    """Counts operators that launch a kernel on a GPU.

    Use it as `with CountKernels() as count`, then `count.kernels`.
    """

    FREE = (
        "detach",
        "empty",
        "new_empty",
        "empty_like",
        "_unsafe_view",
        "_record_function_enter_new",
    )
    FREE += ("_record_function_exit",)

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in self.FREE:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


def tiny_step(device: torch.device) -> Callable[[], None]:
    """Returns a function that does one training step, as in train.py."""
    generator, graph = torch.Generator().manual_seed(0), HeteroData()
    graph["gene"].num_nodes = NUM_NODES
    for r in range(NUM_RELATIONS):
        graph["gene", f"r{r}", "gene"].edge_index = torch.randint(
            NUM_NODES, (2, 30), generator=generator
        )
    shared, config, optim = (
        SharedGraph(graph).to(device),
        ModelConfig(64, 3, message_passing="shared"),
        OptimConfig(),
    )
    model = KnockoutGNN(config, NUM_NODES, NUM_RELATIONS).to(device).train()
    env = Distributed(DDPConfig())
    env.device = device
    optimizer, scaler = (
        build_optimizer(model, optim, env),
        torch.amp.GradScaler(device.type, init_scale=1.0),
    )
    batch, meter = build_batch(shared, NUM_SAMPLES, model=config), Meter(env, optim)

    def step() -> None:
        loss = criterion(model(shared, batch), batch, model)
        scaler.scale(loss * (1 / NUM_SAMPLES)).backward()
        meter.loss += loss.detach()
        meter.count(NUM_SAMPLES, NUM_SAMPLES, optimizer_step(model, optimizer, scaler, optim))

    return step


def count_kernels(step: Callable[[], None]) -> Counter:
    """Returns how many kernels of each kind the third step launches.

    The first two create the optimiser's state.
    """
    step(), step()
    with CountKernels() as count:
        step()
    return count.kernels


def main() -> None:
    options = arguments(__doc__, repeats={"type": int, "default": 100})
    device = torch.device(options.device)
    torch.set_num_threads(1)
    step, times = tiny_step(device), []
    kernels = count_kernels(step)
    for _ in range(options.repeats):
        synchronize(device)
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    row = {
        "kernels": kernels.total(),
        "fastest step, ms": times[0],
        "median, ms": times[len(times) // 2],
    }
    kinds = [{"operator": name, "in a step": count} for name, count in kernels.most_common(12)]
    report({"Host work of a tiny step": [row], "Most frequent": kinds}, device, options.json)


if __name__ == "__main__":
    main()
