"""A training step (forward, backward, optimiser) on the shared graph against masked copies of it.

    python -m tests.bench.step [--json FILE]

`expanded` copies the graph per sample and runs with the largest batch, up to 28, that fits in
memory. The floor of a `shared` row is the least time that its arithmetic or memory traffic would
take at this machine's measured rates: dense and sparse products at the rate of a large matrix
product, bytes at the rate of a copy. The traffic counts each node state, message sum and gradient
once, and the edges (index and value) once per block of samples, layer and direction.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.data import Data

from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from tests.bench import arguments, build_batch, in_turn, milliseconds, peak_mb, report
from tests.bench.synthetic import build_graph


class Step:
    """One optimiser step of the benchmark's model on one batch."""

    def __init__(
        self,
        shared: SharedGraph,
        route: str,
        num_samples: int,
        hidden: int,
        layers: int,
        dtype: torch.dtype | None = None,
    ):
        torch.manual_seed(0)
        config = ModelConfig(hidden=hidden, layers=layers, dropout=0.0, message_passing=route)
        self.model = KnockoutGNN(config, shared.num_nodes, len(shared.relations)).to(shared.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.shared = shared
        self.batch = build_batch(shared, num_samples, model=config)
        self.dtype = dtype

    def __call__(self) -> None:
        with torch.autocast(self.shared.device.type, self.dtype, enabled=self.dtype is not None):
            prediction = self.model(self.shared, self.batch)
        mean_loss(prediction, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def floor(self) -> tuple[float, float]:
        """Returns the least GFLOP and GB that a step on the shared graph needs.

        Backward counts as twice forward.
        """
        shared = self.shared
        hidden = self.model.config.hidden
        layers = self.model.config.layers
        num_edges = shared.edge_index.size(1)
        state = shared.num_nodes * hidden  # numbers in the state of one sample
        states = torch.empty(shared.num_nodes, 1, hidden, device=shared.device)
        num_samples = len(self.batch.y)
        num_blocks = math.ceil(num_samples / shared.samples_at_once(states))
        # Two products of [N, H] with [H, H], and two more for each in backward.
        dense = 3 * 2 * 2 * state * hidden
        sparse = 2 * 2 * num_edges * hidden
        # All samples and the intact graph pass each layer, but the first layer sums messages on the
        # intact graph only.
        num_passes = (num_samples + 1) * layers
        num_sums = (num_samples + 1) * (layers - 1) + 1
        flop = num_passes * dense + num_sums * sparse
        edge_bytes = 2 * 8 * num_edges * (num_blocks * (layers - 1) + layers)
        # State and sum, forward, backward and re-read.
        state_bytes = num_passes * 3 * 2 * 4 * state
        return flop / 1e9, (edge_bytes + state_bytes) / 1e9


def mean_loss(prediction: Tensor, batch: Data) -> Tensor:
    """Returns the mean squared error of a batch; its scores are standardised."""
    y = batch.y.to(prediction.dtype)
    return (batch.weight * (prediction - y).square()).sum() / len(y)


def rates(device: torch.device) -> tuple[float, float]:
    """Returns GFLOP/s of a large float32 matrix product and GB/s of a copy (read plus write).

    Both are the best of five.
    """
    a = torch.randn(2048, 2048, device=device)
    b = torch.empty(2**26, device=device)
    c = torch.randn(2**26, device=device)

    def seconds(function: Callable[[], object]) -> float:
        times = [milliseconds(function, device) for _ in range(5)]
        return min(times) / 1e3

    gflops = 2 * 2048**3 / seconds(lambda: a @ a) / 1e9
    gbytes = 2 * b.nbytes / seconds(lambda: b.copy_(c)) / 1e9
    return gflops, gbytes


def available_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**20
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 2**10


def main() -> None:
    options = arguments(
        __doc__,
        hidden={"type": int, "default": 64},
        layers={"type": int, "default": 3},
        repeats={"type": int, "default": 3},
        batches={"type": int, "nargs": "+", "default": [1, 4, 28, 64]},
    )
    device = torch.device(options.device)
    shared = SharedGraph(build_graph(options.preset)).to(device)
    gflops, gbytes = rates(device)

    def make(route: str, num_samples: int, dtype: torch.dtype | None = None) -> Step:
        return Step(shared, route, num_samples, options.hidden, options.layers, dtype)

    one = peak_mb(make("expanded", 1), device)
    two = peak_mb(make("expanded", 2), device)
    further = int((0.8 * available_mb(device) - one) / max(two - one, 1))
    copies = max(1, min(28, 1 + further))
    steps = {f"expanded, B={copies}": make("expanded", copies)}
    for n in options.batches:
        steps[f"shared, B={n}"] = make("shared", n)
    if device.type == "cuda":
        for n in options.batches:
            steps[f"shared, B={n}, bf16"] = make("shared", n, torch.bfloat16)
    memory = {name: peak_mb(step, device) for name, step in steps.items()}
    repeats = {name: options.repeats if name.startswith("shared") else 1 for name in steps}
    times = in_turn(steps, device, repeats, warm=True)

    per_sample = {name: times[name] / len(step.batch.y) for name, step in steps.items()}
    reference = next(iter(steps))
    rows = []
    for name, step in steps.items():
        row = {
            "step": name,
            "speed-up per sample": per_sample[reference] / per_sample[name],
            "samples/s": 1e3 / per_sample[name],
            "ms per sample": per_sample[name],
            "it/s": 1e3 / times[name],
            "peak MB per sample": memory[name] / len(step.batch.y),
            "peak MB": memory[name],
        }
        if step.model.config.message_passing == "expanded":
            row |= dict.fromkeys(("GFLOP", "GB", "floor ms", "times the floor"), "")
        else:
            gflop, gbyte = step.floor()
            floor_ms = 1e3 * max(gflop / gflops, gbyte / gbytes)
            row["GFLOP"] = gflop
            row["GB"] = gbyte
            row["floor ms"] = floor_ms
            row["times the floor"] = times[name] / floor_ms
        rows.append(row)
    edges = sum(shared.num_edges.values())
    title = (
        f"Training step: hidden {options.hidden}, {options.layers} layers, 3 deletions, "
        f"{edges:,} edges; this machine: {gflops:,.0f} GFLOP/s, {gbytes:,.1f} GB/s"
    )
    report({title: rows}, device, options.json)


if __name__ == "__main__":
    main()
