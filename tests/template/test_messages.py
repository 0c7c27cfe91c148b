"""Tests of `propagate_from_one`, for states that are the same in all samples, on random graphs.

Its results are compared with `propagate`, which computes a product for each sample.
"""

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import mask
from data import KnockoutDataset
from mask import SharedGraph
from mask_product import Samples, messages_of_perturbed
from tests.sets import tables_of
from tests.syncs import CountSynchronisations

HIDDEN = 3


def draw(number: int) -> tuple[SharedGraph, list[dict[int, float]]]:
    """Returns a random graph in float64, and the level of each perturbed node of random samples.

    The graph has self-loops and duplicate edges. If it has many relations, `RelationStack` does not
    store rows without edges.
    """
    generator = torch.Generator().manual_seed(number)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_nodes = integer(1, 12)
    graph = HeteroData()
    graph["gene"].num_nodes = num_nodes
    for relation in range(integer(1, 6)):
        edges = torch.randint(num_nodes, (2, integer(0, 2 * num_nodes)), generator=generator)
        edges = torch.cat([edges, edges[:, :2], edges[:1, :1].expand(2, -1)], dim=1)
        graph["gene", str(relation), "gene"].edge_index = edges
        weight = torch.rand(edges.size(1), generator=generator) + 0.1
        graph["gene", str(relation), "gene"].edge_weight = weight
    samples = []
    for _ in range(integer(1, 7)):
        nodes = torch.randperm(num_nodes, generator=generator)[: integer(0, num_nodes)].tolist()
        samples.append({node: (0.0, 0.3, 1.0, 2.5)[integer(0, 3)] for node in nodes})
    return SharedGraph(graph).double(), samples


def batch_of(graph: SharedGraph, samples: list[dict[int, float]]) -> Data:
    tables = tables_of(samples, torch.zeros(len(samples)))
    dataset = KnockoutDataset(tables, graph.degree, out_degree=graph.out_degree)
    return dataset.__getitems__(range(len(samples)))


def in_blocks(graph: SharedGraph, batch: Data, size: int, x: Tensor, gate: Tensor) -> Tensor:
    """Returns the sums of all samples, [N, B, H], computed in blocks of `size` samples."""
    sums = [x.new_empty(graph.num_nodes, 0, HIDDEN)]
    first = 0
    for level in graph.levels(batch).split(size, dim=1):
        sums.append(graph.propagate_from_one(x, gate, Samples(batch, first, level)))
        first += level.size(1)
    return torch.cat(sums, dim=1)


@pytest.mark.parametrize("number", range(25))
def test_shared_sums_and_gradients_equal_separate_products(number, monkeypatch):
    """Each block of samples computes only the messages of its own out-edges, without waiting."""
    counts = []

    def counted(*arguments: object) -> tuple[Tensor, Tensor]:
        states, messages = messages_of_perturbed(*arguments)
        counts.append(len(messages))
        return states, messages

    monkeypatch.setattr(mask, "messages_of_perturbed", counted)
    graph, samples = draw(number)
    batch = batch_of(graph, samples)
    torch.manual_seed(number)
    x = torch.randn(graph.num_nodes, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(len(graph.relations), HIDDEN, dtype=torch.float64, requires_grad=True)
    repeated = x.expand(-1, len(samples), -1)
    expected = graph.propagate(repeated, gate, graph.levels(batch))
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, gate), upstream)
    starts = batch.starts
    exact = sum(int(graph.out_degree[node]) for node in batch.perturbed)
    num_edges = sum(graph.num_edges.values())
    for size in (1, 2, 3, len(samples) + 1):
        for bound in (None, exact, exact + min(1, num_edges), exact + 5 * num_edges, "unknown"):
            batch.starts = starts
            batch.num_out_edges = bound
            if bound == "unknown":
                del batch.starts, batch.num_out_edges
            counts.clear()
            with CountSynchronisations() as count:
                sums = in_blocks(graph, batch, size, x, gate)
            assert bound == "unknown" or count.seen == []
            is_padded = size >= len(samples) and isinstance(bound, int)
            assert sum(counts) == (bound if is_padded else exact)
            torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
            found = torch.autograd.grad(sums, (x, gate), upstream)
            torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)


def test_some_random_graphs_have_rows_that_are_not_stored():
    stacks = [draw(number)[0].stack for number in range(25)]
    num_left_out = sum(stack.by_source.relation is not None for stack in stacks)
    assert 2 < num_left_out < 23
