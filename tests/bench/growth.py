"""How time and memory of a training step grow with the problem, and how they should.

    python -m tests.bench.growth [--json FILE] [--series NAME ...] [--repeats N]

A series changes one size of a random problem, whose other sizes stand in `Problem`. A step builds
and plans its batch and does forward, backward and optimiser. An exponent is the slope, on a
logarithmic scale, from a row to the next: 1 is linear growth. `bound` says what the algorithm
allows: all states of a batch on the route `shared`; those that the knock-outs reach, beside one
pass over the intact graph, on `reach`.
"""

import argparse
import gc
import math
from dataclasses import dataclass, replace

import torch
from torch_geometric.data import HeteroData

from data import KnockoutDataset
from mask import SharedGraph
from model import ModelConfig
from model_reach import plan_route
from tests.bench import arguments, milliseconds, peak_mb, report
from tests.bench.step import mean_loss
from tests.sets import tables_of
from tests.tools.models import full_model


@dataclass(frozen=True)
class Problem:
    """The sizes of a random problem."""

    route: str
    nodes: int = 5_000
    edges: int = 50_000
    relations: int = 4
    samples: int = 32
    knockouts: int = 2  # of each sample
    hub: int = 0  # edges of node 0, which every third sample knocks out, too


@dataclass(frozen=True)
class Series:
    """Problems that differ in one size."""

    problem: Problem
    field: str  # the size
    sizes: tuple[int, ...]
    bound: str  # how a step grows at most


SHARED = Problem("shared")
REACH = Problem("reach")
SERIES = {
    "nodes": Series(REACH, "nodes", (10_000, 100_000, 1_000_000), "1: the intact graph's pass"),
    "edges": Series(SHARED, "edges", (50_000, 200_000, 800_000), "1"),
    "samples-shared": Series(SHARED, "samples", (8, 32, 128), "1"),
    "samples-reach": Series(REACH, "samples", (8, 32, 128), "1"),
    "knockouts-shared": Series(SHARED, "knockouts", (1, 10, 100), "0"),
    "knockouts-reach": Series(REACH, "knockouts", (1, 10, 100), "1, until all nodes are reached"),
    "hub": Series(
        replace(REACH, nodes=100_000, edges=400_000, relations=1, samples=64, knockouts=1),
        "hub",
        (600, 6_000, 60_000),
        "1: states that the hub reaches",
    ),
    "relations-shared": Series(SHARED, "relations", (3, 30, 300), "1, until rows have no edges"),
    "relations-reach": Series(REACH, "relations", (3, 30, 300), "1, until rows have no edges"),
}


def random_graph(problem: Problem) -> SharedGraph:
    """Returns random edges, spread evenly over the relations, and those of the hub, both ways."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(problem.nodes, (2, problem.edges), generator=generator)
    if problem.hub:
        others = 1 + torch.randperm(problem.nodes - 1, generator=generator)[: problem.hub]
        to_others = torch.stack([torch.zeros_like(others), others])
        edges = torch.cat([edges, to_others, to_others.flip(0)], dim=1)
    graph = HeteroData()
    graph["gene"].num_nodes = problem.nodes
    for number, of_relation in enumerate(edges.tensor_split(problem.relations, dim=1)):
        graph["gene", f"r{number}", "gene"].edge_index = of_relation
    return SharedGraph(graph)


def random_sets(problem: Problem) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    sets = []
    for number in range(problem.samples):
        nodes = torch.randint(1, problem.nodes, (problem.knockouts,), generator=generator).tolist()
        if problem.hub and number % 3 == 0:
            nodes.append(0)
        sets.append(sorted(set(nodes)))
    return sets


class Step:
    """One training step on the same rows each time."""

    def __init__(self, problem: Problem, hidden: int, layers: int, device: torch.device):
        torch.manual_seed(0)
        self.device = device
        self.graph = random_graph(problem)
        scores = torch.randn(problem.samples)
        tables = tables_of(random_sets(problem), scores)
        out_degree = self.graph.out_degree
        self.dataset = KnockoutDataset(tables, self.graph.degree, out_degree=out_degree)
        config = ModelConfig(hidden=hidden, layers=layers, message_passing=problem.route)
        self.dataset.transform, _ = plan_route(self.graph, self.dataset, problem.route, layers)
        self.graph.to(device)
        self.model = full_model(config, problem.nodes, problem.relations).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def __call__(self) -> None:
        batch = self.dataset.__getitems__(range(len(self.dataset))).to(self.device)
        batch.seed = torch.zeros((), dtype=torch.long, device=self.device)
        mean_loss(self.model(self.graph, batch), batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(series: Series, options: argparse.Namespace, device: torch.device) -> list[dict]:
    """Returns a row for each size of a series."""
    rows = []
    for size in series.sizes:
        problem = replace(series.problem, **{series.field: size})
        step = Step(problem, options.hidden, options.layers, device)
        step()
        memory = peak_mb(step, device)
        time = min(milliseconds(step, device) for _ in range(options.repeats))
        row = {
            series.field: size,
            "ms per step": time,
            "ms per sample": time / problem.samples,
            "MB": memory,
            "exponent of time": "",
            "of memory": "",
            "bound": series.bound,
        }
        if rows:
            last = rows[-1]
            growth = math.log(size / last[series.field])
            row["exponent of time"] = math.log(time / last["ms per step"]) / growth
            row["of memory"] = math.log(max(memory, 1) / max(last["MB"], 1)) / growth
        rows.append(row)
        del step
        gc.collect()
    return rows


def main() -> None:
    options = arguments(
        __doc__,
        hidden={"type": int, "default": 32},
        layers={"type": int, "default": 2},
        repeats={"type": int, "default": 3},
        series={"nargs": "+", "choices": SERIES, "default": list(SERIES)},
    )
    device = torch.device(options.device)
    tables = {}
    for name in options.series:
        series = SERIES[name]
        title = f"{name}: route {series.problem.route}, hidden {options.hidden}"
        tables[title] = measure(series, options, device)
    report(tables, device, options.json)


if __name__ == "__main__":
    main()
