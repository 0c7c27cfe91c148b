"""Compares training steps on one shared graph with training steps on masked copies of the graph.

    python -m tests.bench.step [--json FILE]

A step is the forward pass, the backward pass and the optimiser's step. The route `expanded` copies
the graph for each sample. Its batch is the largest that fits in memory, but at most 28 samples.
"""

import torch
from torch import Tensor
from torch_geometric.data import Data

from mask import SharedGraph
from model import ModelConfig
from tests.bench import arguments, build_batch, in_turn, peak_mb, report
from tests.bench.synthetic import build_graph
from tests.template.models import full_model


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
        self.model = full_model(config, shared.num_nodes, len(shared.relations)).to(shared.device)
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


def mean_loss(prediction: Tensor, batch: Data) -> Tensor:
    """Returns the mean squared error of a batch, whose scores are standardised."""
    y = batch.y.to(prediction.dtype)
    return (batch.weight * (prediction - y).square()).sum() / len(y)


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
        rows.append(row)
    edges = sum(shared.num_edges.values())
    title = (
        f"Training step: hidden {options.hidden}, {options.layers} layers, 3 deletions, "
        f"{edges:,} edges"
    )
    report({title: rows}, device, options.json)


if __name__ == "__main__":
    main()
