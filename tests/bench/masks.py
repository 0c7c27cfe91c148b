"""Compares ways to compute which edges of each sample are alive.

    python -m tests.bench.masks [--json FILE]

A batch has 32 samples with 3 deletions each. The deleted nodes differ between calls. The ways are:

- loop: a Python loop with one `.item()` for each sample, knocked-out node and relation.
- padded: a table of incident edges [N, largest degree] for each relation, for all samples at once.
- edge_masks: `mask.SharedGraph.edge_masks`, which allocates the masks in each call.
- EdgeMasks: `mask.EdgeMasks`, which returns the same masks, but reuses its memory.
- dead_edges: `mask.SharedGraph.dead_edges`, which returns the indices of dead edges.

All results are checked against the results of edge_masks.
"""

import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.data import Data, HeteroData

from mask import EdgeMasks, SharedGraph
from tests.bench import arguments, build_batch, in_turn, report
from tests.bench.synthetic import build_graph
from tests.syncs import CountSynchronisations

NUM_BATCHES = 7


def incident_edges(edge_index: Tensor, num_nodes: int) -> list[Tensor]:
    """Returns the indices of the edges from or to each node."""
    source, target = edge_index
    once = source != target
    ids = torch.arange(edge_index.size(1), device=edge_index.device)
    nodes = torch.cat([source, target[once]])
    edges = torch.cat([ids, ids[once]])
    counts = torch.bincount(nodes, minlength=num_nodes).tolist()
    return list(edges[nodes.argsort()].split(counts))


class Loop:
    """Computes masks in a loop over relations, samples and knocked-out nodes."""

    def __init__(self, graph: HeteroData):
        self.num_edges = {relation: graph[relation].num_edges for relation in graph.edge_types}
        num_nodes = graph["gene"].num_nodes
        self.incident = {}
        self.bytes = 0
        for relation in graph.edge_types:
            lists = incident_edges(graph[relation].edge_index, num_nodes)
            self.incident[relation] = lists
            self.bytes += sum(ids.nbytes for ids in lists)

    def __call__(self, batch: Data) -> dict[tuple, Tensor]:
        num_samples = len(batch.y)
        masks = {}
        for relation, lists in self.incident.items():
            size = (num_samples, self.num_edges[relation])
            mask = torch.ones(size, dtype=torch.bool, device=batch.y.device)
            pairs = zip(batch.perturbed_batch.unbind(), batch.perturbed.unbind(), strict=True)
            for sample, node in pairs:
                mask[sample, lists[node.item()]] = False
            masks[relation] = mask.flatten()
        return masks


class Padded:
    """Computes masks from tables of incident edges, padded with -1 to the largest degree."""

    def __init__(self, graph: HeteroData):
        self.num_edges = {relation: graph[relation].num_edges for relation in graph.edge_types}
        self.tables = {}
        for relation in graph.edge_types:
            lists = incident_edges(graph[relation].edge_index, graph["gene"].num_nodes)
            self.tables[relation] = pad_sequence(lists, batch_first=True, padding_value=-1)
        self.bytes = sum(table.nbytes for table in self.tables.values())

    def __call__(self, batch: Data) -> dict[tuple, Tensor]:
        num_samples = len(batch.y)
        masks = {}
        for relation, table in self.tables.items():
            num_edges = self.num_edges[relation]
            mask = torch.ones(num_samples * num_edges, dtype=torch.bool, device=table.device)
            edges = table[batch.perturbed]  # [P, largest degree]
            sample = batch.perturbed_batch.unsqueeze(1).expand_as(edges)
            real = edges >= 0
            if real.any():
                mask[sample[real] * num_edges + edges[real]] = False
            masks[relation] = mask
        return masks


def on_each(function: Callable[[Data], object], batches: list[Data]) -> Callable[[], object]:
    """Returns a function without arguments. Each of its calls applies `function` to the next batch.

    After the last batch, it starts again with the first.
    """
    endless = cycle(batches)
    return lambda: function(next(endless))


def main() -> None:
    options = arguments(
        __doc__, samples={"type": int, "default": 32}, repeats={"type": int, "default": 20}
    )
    device = torch.device(options.device)
    graph = build_graph(options.preset).to(device)
    built = {}
    seconds = {}
    for name, kind in (("loop", Loop), ("padded", Padded), ("shared", SharedGraph)):
        start = time.perf_counter()
        built[name] = kind(graph)
        seconds[name] = time.perf_counter() - start
    shared = built["shared"].to(device)
    incidence = shared.incidence.nbytes + shared.incidence_ptr.nbytes
    batches = [build_batch(shared, options.samples, seed=seed) for seed in range(NUM_BATCHES)]
    functions = {
        "loop": built["loop"],
        "padded": built["padded"],
        "edge_masks": shared.edge_masks,
        "EdgeMasks": EdgeMasks(shared),
        "dead_edges": shared.dead_edges,
    }
    for batch in batches:
        masks = shared.edge_masks(batch)
        for name in ("loop", "padded", "EdgeMasks"):
            for relation, mask in functions[name](batch).items():
                assert torch.equal(mask, masks[relation]), (name, relation)
        alive = torch.cat(list(masks.values()))
        assert torch.equal(shared.dead_edges(batch).unique(), (~alive).nonzero().flatten())

    calls = {name: on_each(function, batches) for name, function in functions.items()}
    times = in_turn(calls, device, dict.fromkeys(calls, options.repeats))
    rows = []
    for name, call in calls.items():
        with CountSynchronisations() as count:
            call()
        kept = built[name].bytes if name in built else incidence
        if name == "EdgeMasks":
            alive, _ = functions[name].memory
            kept += alive.nbytes
        rows.append(
            {
                "masks": name,
                "speed-up over padded": times["padded"] / times[name],
                "ms per batch": times[name],
                "synchronisations": len(count.seen),
                "MB held": kept / 2**20,
                "build s": seconds.get(name, seconds["shared"]),
            }
        )
    edges = sum(shared.num_edges.values())
    title = (
        f"Masks: {options.samples} samples, 3 deletions each, {len(shared.relations)} relations, "
        f"{edges:,} edges"
    )
    report({title: rows}, device, options.json)


if __name__ == "__main__":
    main()
