"""Tests of the readout nodes: the names of its scores, and the states that an effect depends on.

test_model.py and test_model_reach.py test that all routes of message passing give the same effects.
"""

import pytest
import torch

from errors import DataError
from model_nodes import target_nodes
from tests.sets import tables_of
from tests.template.small_model import (
    NUM_NODES,
    TARGETS,
    graph_of_12_nodes,
    make_batch,
    make_model,
)


def test_the_error_lists_all_scores_that_are_not_nodes():
    tables = tables_of([[0], [1]], torch.zeros(2))
    tables.genes = ["g0", "g1", "g2"]
    tables.targets = ["g2", "g0"]
    assert target_nodes(tables).tolist() == [2, 0]
    tables.targets = ["g0", "x", "g1", "y"]
    with pytest.raises(DataError, match=r"^model\.readout=nodes .*x, y \(2 of 4 scores\)"):
        target_nodes(tables)


def test_an_effect_on_a_node_depends_on_the_change_of_its_own_state():
    """The baseline is subtracted first. A target that is knocked out also has a direct effect."""
    model = make_model(readout="nodes", layers=1).double()
    shared = graph_of_12_nodes().double()
    sets = [[], [10], [0], [5, 8]]
    batch = make_batch(shared, sets)
    is_shown = torch.ones(2, NUM_NODES, dtype=torch.bool)
    baseline = model.terms["without_graph"].readout
    additive = baseline(is_shown, dose=torch.ones(4, 1).double(), batch=batch)
    effects = model(shared, batch) - additive
    source, target = shared.edge_index
    for sample, nodes in enumerate(sets):
        reached = set(target[torch.isin(source, torch.tensor(nodes))].tolist()) | set(nodes)
        for t, node in enumerate(TARGETS):
            assert (effects[sample, t].abs() > 1e-6) == (node in reached), (nodes, node)
    model.terms["knockout"].dead.bias.data += 1.0
    changed = model(shared, batch) - additive - effects
    expected = [[float(node in nodes) for node in TARGETS] for nodes in sets]
    torch.testing.assert_close(changed, torch.tensor(expected).double())
