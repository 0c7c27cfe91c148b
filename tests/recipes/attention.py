"""Tests of a copy with attention.patch: `python -m pytest tests/recipes/attention.py`."""

import numpy as np
import pytest
import torch

from data import load
from mask import SharedGraph
from mask_copies import CopiedGraph
from tests.template.slow.recipes import LEVELS, batch_of, graph_of_20
from tests.template.tables import EDGES, write_tables


# ---- Features of edges ---------------------------------------------------------------------------
@pytest.mark.parametrize("undirected", [False, True])
def test_further_columns_of_edges_are_features_of_the_edges(tmp_path, undirected):
    """Features are standardised. Duplicate edges have the mean of their values that are present.

    If all values are missing, the feature is 0.
    """
    rows = [
        ("a", "b", "x", 2, 1, "NA"),
        ("a", "b", "x", "", 1, "NA"),
        ("a", "b", "x", 6, 1, 5),
        ("a", "b", "y", 3, 1, 1),  # in a different relation
        ("b", "c", "x", "NA", 1, 7),
        ("c", "d", "x", 9, 1, "NA"),
        ("d", "c", "x", 1, 1, "NA"),
        ("c", "c", "x", 8, 1, 3),
    ]
    table = [(*EDGES[0], "length", "weight", "age"), *rows]
    tables = load(write_tables(tmp_path, table, undirected=undirected))
    present = {
        ("a", "b", "x"): ([2, 6], [5]),
        ("a", "b", "y"): ([3], [1]),
        ("b", "c", "x"): ([], [7]),
        ("c", "d", "x"): ([9], []),
        ("d", "c", "x"): ([1], []),
        ("c", "c", "x"): ([8], [3]),
    }
    if undirected:
        present[("c", "d", "x")] = present[("d", "c", "x")] = ([9, 1], [])
        for (source, target, relation), values in list(present.items()):
            present[(target, source, relation)] = values
    expected = {}
    for edge, values_of_edge in present.items():
        expected[edge] = []
        for column, values in zip(([2, 6, 3, 9, 1, 8], [5, 1, 7, 3]), values_of_edge, strict=True):
            mean, std = np.mean(column), np.std(column)
            expected[edge].append((np.mean(values) - mean) / std if values else 0.0)
    graph = SharedGraph(tables.graph())
    ends = graph.edge_index.T.tolist()
    relations = torch.repeat_interleave(graph.edge_counts).tolist()
    found = {}
    for (a, b), r, values in zip(ends, relations, graph.edge_attr, strict=True):
        found[(tables.genes[a], tables.genes[b], tables.relations[r])] = values.tolist()
    assert found.keys() == expected.keys()
    for edge, values in found.items():
        assert values == pytest.approx(expected[edge], abs=1e-6), edge
    plain = load(write_tables(tmp_path, [row[:3] for row in table], undirected=undirected))
    assert plain.edge_attr.shape == (len(found), 0)
    assert plain.fingerprint() != tables.fingerprint()


# ---- The layer -----------------------------------------------------------------------------------
@pytest.fixture
def graph():
    """A graph whose edges have one feature: their number."""
    graph = graph_of_20()
    graph.edge_attr = torch.arange(90.0).unsqueeze(1)
    return graph


@pytest.fixture
def layer():
    from attention import AttentionConv

    return AttentionConv(4, 2, edge_dim=2)


def test_dead_edges_are_loops_at_the_spare_node(graph, layer):
    seen = []
    for conv in layer.convs:
        conv.register_forward_pre_hook(lambda conv, inputs: seen.append(inputs[1:]))
    batch = batch_of(graph, [[1, 5], [], [7]])
    layer(torch.randn(20, 3, 4), CopiedGraph(graph, batch))
    masks = graph.edge_masks(batch)
    copies = graph.expand(batch)
    spare = 3 * 20
    for relation, (edge_index, edge_values) in zip(graph.relations, seen, strict=True):
        is_alive = masks[relation]
        assert torch.equal(edge_index[:, is_alive], copies[relation][:, is_alive])
        assert (edge_index[:, ~is_alive] == spare).all()
        assert not is_alive.all()
        first, count = (0, 60) if relation[1] == "physical" else (60, 30)
        assert edge_values[:, 1].tolist() == 3 * list(range(first, first + count))


@pytest.mark.parametrize("is_first", [True, False])
def test_attention_equals_a_loop_over_living_edges(graph, is_first):
    from attention import AttentionConv, FirstAttention

    x, sent = torch.randn(2, 20, 3, 4)
    copies = CopiedGraph(graph, batch_of(graph, LEVELS))
    if is_first:
        layer = FirstAttention(4, 2, edge_dim=2)
        h = layer.norm(sent)
        root = layer.root(x)
        found = layer(x, sent, copies)
    else:
        layer = AttentionConv(4, 2, edge_dim=2)
        h = layer.norm(x)
        root = layer.root(h)
        found = layer(x, copies)
    for sample, levels in enumerate(LEVELS):
        for node in range(20):
            if levels.get(node) != 0:
                sums = attention_by_loop(layer, graph, h[:, sample], levels, node)
                update = torch.nn.functional.gelu(root[node, sample] + sums)
                expected = x[node, sample] + update
                torch.testing.assert_close(found[node, sample], expected, rtol=1e-4, atol=1e-5)


def attention_by_loop(layer, graph, h, levels, node):
    """Returns the sum that a node receives in a sample, [H].

    `h` are the states of all nodes in this sample, [N, H], and `levels` is {node: level}.
    """
    total = torch.zeros(4)
    for conv, edges in zip(layer.convs, (range(60), range(60, 90)), strict=True):
        logits = []
        values = []
        for edge in edges:
            source, target = graph.edge_index[:, edge].tolist()
            level = levels.get(source, 1.0)
            if target == node and level > 0:
                value = level * h[source] @ conv.lin_l.weight.T
                of_edge = torch.stack([graph.edge_weight[edge], torch.tensor(float(edge))])
                key = value + h[node] @ conv.lin_r.weight.T + of_edge @ conv.lin_edge.weight.T
                activated = torch.nn.functional.leaky_relu(key, 0.2)
                logits.append((activated * conv.att.flatten()).sum())
                values.append(value)
        if values:
            total = total + torch.stack(logits).softmax(0) @ torch.stack(values)
    return total
