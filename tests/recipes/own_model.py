"""Tests of a copy with own_model.patch: `python -m pytest tests/recipes/own_model.py`."""

import pytest
import torch

from model import ModelConfig
from task import GCN
from tests.template.slow.recipes import LEVELS, batch_of, graph_of_20


@pytest.fixture
def graph():
    return graph_of_20()


@pytest.fixture
def gcn():
    return GCN(ModelConfig(hidden=4), 20, 1).eval()


def test_predictions_equal_products_of_dense_matrices(graph, gcn):
    source, target = graph.edge_index
    matrix = torch.zeros(20, 20)
    matrix.index_put_((target, source), graph.edge_weight, accumulate=True)
    for levels, prediction in zip(LEVELS, gcn(graph, batch_of(graph, LEVELS)), strict=True):
        level = torch.ones(20, 1)
        for node, value in levels.items():
            level[node] = value
        x = gcn.embedding
        for norm, linear in gcn.layers:
            x = x + torch.nn.functional.gelu(matrix @ (level * linear(norm(x))))
        torch.testing.assert_close(prediction, gcn.head((level * x).sum(0) / 20**0.5))


def test_dead_nodes_and_edges_do_not_affect_predictions(graph, gcn):
    batch = batch_of(graph, [[1, 5], [], [7]])
    prediction = gcn(graph, batch)[0]
    prediction.backward()
    has_gradient = gcn.embedding.grad.abs().sum(1) > 0
    assert has_gradient.equal(graph.keep(batch)[:, 0])
    ptr, col, weight = graph.stack.by_target.csr
    target = torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff()) % graph.num_nodes
    ends = torch.stack([col, target])
    is_dead = torch.isin(ends, batch.perturbed[:2]).any(0)
    weight[is_dead] = 0
    assert is_dead.any()
    assert torch.equal(gcn(graph, batch)[0], prediction)
