"""What a copy with attention.patch must hold: `python -m pytest tests/recipes/attention.py`."""

import pytest
import torch

from mask_copies import CopiedGraph
from tests.template.slow.recipes import LEVELS, batch_of, graph_of_20


@pytest.fixture
def graph():
    """Edges have one feature: their number."""
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
def test_attention_is_that_of_a_loop_over_living_edges(graph, is_first):
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
    """Returns what a node receives, [H], given the nodes' states in a sample, [N, H]."""
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
