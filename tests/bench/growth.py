"""How the cost of a training step on the shared graph grows: edges, samples, deletions per sample.

    python -m tests.bench.growth [--json FILE] [--nodes N ...]

Expect it to be linear in edges and samples, and nearly flat in deletions. The number of nodes is
fixed as edges are added, so a part of the time does not grow with them. The last table is of
reached states, on random graphs of 10 edges per node: what 127 more samples cost, beyond the
wild-type pass, should hardly depend on the number of nodes.
"""

import torch
from torch_geometric.data import HeteroData

from mask import SharedGraph
from tests.bench import arguments, build_batch, in_turn, report
from tests.bench.step import Step
from tests.bench.synthetic import build_graph


def main() -> None:
    options = arguments(
        __doc__,
        hidden={"type": int, "default": 64},
        layers={"type": int, "default": 3},
        repeats={"type": int, "default": 3},
        nodes={"type": int, "nargs": "+", "default": [10_000, 100_000, 1_000_000]},
    )
    device = torch.device(options.device)
    graphs = {}
    for share in (0.25, 0.5, 1, 2):
        graphs[share] = SharedGraph(build_graph(options.preset, share)).to(device)

    def step(share: float = 1, num_samples: int = 8, deletions: int = 3) -> Step:
        made = Step(graphs[share], "shared", num_samples, options.hidden, options.layers)
        made.batch = build_batch(graphs[share], num_samples, deletions, made.model.config)
        return made

    deletions = [n for n in (1, 3, 30, 300) if n < graphs[1].num_nodes]
    series = {
        "edges (x the preset's)": {share: step(share=share) for share in graphs},
        "samples": {n: step(num_samples=n) for n in (4, 8, 16, 32, 64)},
        "deletions per sample": {n: step(deletions=n) for n in deletions},
    }
    tables = {}
    for title, steps in series.items():
        times = in_turn(steps, device, dict.fromkeys(steps, options.repeats))
        first = times[next(iter(times))]
        rows = []
        for size, made in steps.items():
            num_samples = len(made.batch.y)
            rows.append(
                {
                    title: size,
                    "ms per step": times[size],
                    "ms per sample": times[size] / num_samples,
                    "relative to the first": times[size] / first,
                    "dead edges per sample": made.batch.num_dead_edges / num_samples,
                }
            )
        tables[f"Step time against {title}"] = rows
    title = (
        f"Step time against nodes (reached states, 10 edges per node, hidden {options.hidden}, "
        "2 layers)"
    )
    tables[title] = [
        reached(num_nodes, options.hidden, options.repeats, device) for num_nodes in options.nodes
    ]
    report(tables, device, options.json)


def reached(num_nodes: int, hidden: int, repeats: int, device: torch.device) -> dict:
    """Returns a row of the last table: the times of steps with 1 and 128 samples of 3 deletions."""
    graph = HeteroData()
    graph["gene"].num_nodes = num_nodes
    graph["gene", "edge", "gene"].edge_index = torch.randint(num_nodes, (2, 10 * num_nodes))
    shared = SharedGraph(graph).to(device)
    steps = {}
    for num_samples in (1, 128):
        steps[num_samples] = Step(shared, "reach", num_samples, hidden, layers=2)
    times = in_turn(steps, device, dict.fromkeys(steps, repeats))
    return {
        "nodes": num_nodes,
        "ms, B=1": times[1],
        "ms, B=128": times[128],
        "difference": times[128] - times[1],
    }


if __name__ == "__main__":
    main()
