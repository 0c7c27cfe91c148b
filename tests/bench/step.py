"""A training step (forward, backward, optimiser) on the shared graph against masked copies of it.

    python -m tests.bench.step [--json FILE]

`expanded` copies the graph per sample and runs with the largest batch, up to 28, that fits in
memory. The floor of a `shared` row is the least time that its arithmetic or memory traffic would
take at this machine's measured rates: dense and sparse products at the rate of a large matrix
product, bytes at the rate of a copy. The traffic counts each node state, message sum and gradient
once, and the edges (index and value) once per block of samples, layer and direction.
"""

import time

import torch

from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from reach import block_size
from tests.bench import arguments, build_batch, in_turn, peak_mb, report, synchronize
from tests.bench.synthetic import build_graph
from train import criterion


class Step:
    """One optimiser step of the benchmark's model on one batch."""

    def __init__(
        self,
        shared: SharedGraph,
        route: str,
        num_samples: int,
        hidden: int,
        layers: int,
        dtype=None,
    ):
        torch.manual_seed(0)
        config = ModelConfig(hidden=hidden, layers=layers, dropout=0.0, message_passing=route)
        self.model = KnockoutGNN(config, shared.num_nodes, len(shared.relations)).to(shared.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.shared, self.batch, self.dtype = (
            shared,
            build_batch(shared, num_samples, model=config),
            dtype,
        )

    def __call__(self) -> None:
        with torch.autocast(self.shared.device.type, self.dtype, enabled=self.dtype is not None):
            prediction = self.model(self.shared, self.batch)
        (criterion(prediction, self.batch, self.model) / len(self.batch.y)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def floor(self) -> tuple[float, float]:
        """Returns the least GFLOP and GB that a step on the shared graph needs.

        Backward counts as twice forward.
        """
        config, shared, num_samples = self.model.config, self.shared, len(self.batch.y)
        num_edges, num_nodes, hidden = shared.edge_index.size(1), shared.num_nodes, config.hidden
        state = num_nodes * hidden
        block = block_size(
            torch.empty(num_nodes, 1, hidden, device=shared.device), len(shared.relations)
        )
        dense = (
            3 * 2 * 2 * state * hidden
        )  # two products of [N, H] with [H, H], and two more for each in backward
        sparse = 2 * 2 * num_edges * hidden
        # All samples and the intact graph pass each layer, but the first layer sums messages on the
        # intact graph only.
        flop = (num_samples + 1) * config.layers * dense + (
            (num_samples + 1) * (config.layers - 1) + 1
        ) * sparse
        edges = 2 * 8 * num_edges * (-(-num_samples // block) * (config.layers - 1) + config.layers)
        states = (
            (num_samples + 1) * config.layers * 3 * 2 * 4 * state
        )  # state and sum, forward, backward and re-read
        return flop / 1e9, (edges + states) / 1e9


def rates(device: torch.device) -> tuple[float, float]:
    """Returns GFLOP/s of a large float32 matrix product and GB/s of a copy (read plus write).

    Both are the best of five.
    """
    a = torch.randn(2048, 2048, device=device)
    b = torch.empty(2**26, device=device)
    c = torch.randn(2**26, device=device)
    best = [0.0, 0.0]
    for _ in range(5):
        for i, (function, work) in enumerate(
            ((lambda: a @ a, 2 * 2048**3), (lambda: b.copy_(c), 2 * b.nbytes))
        ):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            best[i] = max(best[i], work / (time.perf_counter() - start) / 1e9)
    return best[0], best[1]


def available_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**20
    with open("/proc/meminfo") as file:
        return (
            next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 2**10
        )


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

    def make(route: str, num_samples: int, dtype=None) -> Step:
        return Step(shared, route, num_samples, options.hidden, options.layers, dtype)

    one, two = (peak_mb(make("expanded", n), device) for n in (1, 2))
    copies = max(1, min(28, int((0.8 * available_mb(device) - one) / max(two - one, 1)) + 1))
    steps = {f"expanded, B={copies}": make("expanded", copies)}
    steps |= {f"shared, B={n}": make("shared", n) for n in options.batches}
    if device.type == "cuda":
        steps |= {
            f"shared, B={n}, bf16": make("shared", n, torch.bfloat16) for n in options.batches
        }
    memory = {name: peak_mb(step, device) for name, step in steps.items()}
    repeats = {name: options.repeats if name.startswith("shared") else 1 for name in steps}
    times = in_turn(steps, device, repeats, warm=True)

    samples = {name: len(step.batch.y) for name, step in steps.items()}
    reference = next(iter(steps))
    rows = []
    for name, step in steps.items():
        row = {
            "step": name,
            "speed-up per sample": times[reference]
            / samples[reference]
            / (times[name] / samples[name]),
            "samples/s": 1e3 * samples[name] / times[name],
            "ms per sample": times[name] / samples[name],
            "it/s": 1e3 / times[name],
            "peak MB per sample": memory[name] / samples[name],
            "peak MB": memory[name],
        }
        gflop, gbyte = step.floor()
        floor_ms = 1e3 * max(gflop / gflops, gbyte / gbytes)
        row |= {
            "GFLOP": gflop,
            "GB": gbyte,
            "floor ms": floor_ms,
            "times the floor": times[name] / floor_ms,
        }
        if step.model.config.message_passing == "expanded":
            row |= dict.fromkeys(("GFLOP", "GB", "floor ms", "times the floor"), "")
        rows.append(row)
    edges = sum(shared.num_edges.values())
    title = (
        f"Training step: hidden {options.hidden}, {options.layers} layers, 3 deletions, {edges:,} "
        "edges; "
        f"this machine: {gflops:,.0f} GFLOP/s, {gbytes:,.1f} GB/s"
    )
    report({title: rows}, device, options.json)


if __name__ == "__main__":
    main()
