"""Levels of nodes: in tables and splits, and with all routes and readouts of a model.

`A=0.3` in a table means that node A sends its messages times 0.3. Level 0 is a knock-out.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import (
    DataConfig,
    load,
    node_split,
    random_split,
)
from data_tables import Tables
from errors import DataError, UserError
from mask import SharedGraph
from model_reach_plan import ReachPlanner
from predict_tables import read_sets
from tests.bench.synthetic import dose_responses
from tests.sets import pack_levels, tables_of
from tests.syncs import CountSynchronisations
from tests.template.fixtures import write_table
from tests.template.small_model import (
    graph_of_12_nodes,
    make_batch,
    make_model,
    outputs_and_gradients,
)

EDGES = [
    ("source", "target", "relation"),
    ("a", "b", "x"),
    ("b", "c", "x"),
    ("c", "d", "y"),
    ("d", "a", "y"),
]
HEADER = ("genes", "score", "split")
SETS = [
    {0: 0.0, 3: 0.3},
    {},
    {5: 3.0},
    {8: 0.0, 1: 1.0},
    {2: 0.0, 0: 2.5, 7: 0.0, 1: 0.7, 11: 1.0},
    {10: 0.5},
    {4: 0.01},
]


# ---- Tables --------------------------------------------------------------------------------------
def read(folder: Path, cells: list[str]) -> Tables:
    """Returns tables whose column genes has these cells."""
    edges = write_table(folder / "edges.tsv", EDGES)
    rows = [(cell, k, ("train", "val", "test")[k % 3]) for k, cell in enumerate(cells)]
    scores = write_table(folder / "scores.tsv", [HEADER, *rows])
    return load(DataConfig(str(edges), str(scores), cache_dir=str(folder / "cache")))


def levels_of(tables: Tables) -> list[dict[str, float]]:
    """Returns the level of each node in each row, by the names of the nodes."""
    names = [tables.genes[node] for node in tables.perturbed.tolist()]
    pairs = zip(names, tables.level.tolist(), strict=True)
    counts = tables.perturbed_ptr.diff().tolist()
    return [dict(itertools.islice(pairs, count)) for count in counts]


def test_a_name_may_have_a_level(tmp_path):
    cells = ["b=2 , a = 0.3", "a,b", "", "c=0.3", "c=0.4,b=1e-1", "a=1,a=1.0,b=3", "a,a=0,z=0.5"]
    tables = read(tmp_path, cells)
    assert tables.genes == ["a", "b", "c", "d", "z"]
    expected = [
        {"a": 0.3, "b": 2.0},
        {"a": 0.0, "b": 0.0},
        {},
        {"c": 0.3},
        {"b": 0.1, "c": 0.4},
        {"b": 3.0},
        {"a": 0.0, "z": 0.5},
    ]
    for levels, expected_levels in zip(levels_of(tables), expected, strict=True):
        assert levels == pytest.approx(expected_levels)
    levels = torch.tensor([0.0, 0.3, 3.0], dtype=torch.float64)
    named = tables.names(torch.tensor([0, 0, 1]), levels)
    assert list(named) == ["a", "a=0.3", "b=3"]


WRONG = [
    "a=-0.1",
    "a=",
    "a=b",
    "a=nan",
    "a=inf",
    "a=NA",
    "a=1_0",
    "=",
    "=0.3",
    "a=10001",
    "a=0.3=0.5",
]


@pytest.mark.parametrize("cell", WRONG)
def test_a_level_that_is_not_a_number_from_0_to_10000_is_an_error(tmp_path, cell):
    message = rf"scores.tsv:3: the genes 'b,{cell}' contain '.*', which is not a node"
    with pytest.raises(DataError, match=message):
        read(tmp_path, ["a", f"b,{cell}", "c"])


def test_minus_0_is_0(tmp_path):
    tables = read(tmp_path, ["a=-0", "b", "a=0"])
    assert tables.level.tolist() == [0, 0, 0]
    assert not tables.level.signbit().any()


def test_levels_are_written_with_all_their_digits(tmp_path):
    levels = [0.123456789, 1 / 3, 1e-5, 9999.5, 0.1 + 0.2]
    tables = read(tmp_path, [f"a={level:.15g}" for level in levels])
    names = list(tables.names(tables.perturbed, tables.level))
    again = read(tmp_path, names)
    assert torch.equal(again.level, tables.level)
    assert names[0] == "a=0.123456789"


def test_the_dose_of_a_level_does_not_depend_on_its_position_in_the_batch(shared):
    model = make_model(torch.float64, readout="local")
    levels = torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()
    for level in levels:
        in_batch = model(shared, make_batch(shared, [{3: level}] * 41))
        single = model(shared, make_batch(shared, [{3: level}]))
        torch.testing.assert_close(in_batch, single.expand(41, -1), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("cell", "levels"), [("a=0.3,b,a=0.5", "0.3 and 0.5"), ("a,a=2", "0.0 and 2.0")]
)
def test_two_levels_of_a_node_in_a_row_are_an_error_that_names_both(tmp_path, cell, levels):
    with pytest.raises(DataError, match=rf"scores.tsv:3: the genes '{cell}' .* a .* {levels}: "):
        read(tmp_path, ["a", cell, "c"])


def asked(path: str, tables: Tables) -> tuple[list[str], list[bool], list[dict[str, float]]]:
    """Returns the cells of a table to predict, which rows are known, and the levels in known rows.

    A row is known if the graph has all of its nodes.
    """
    (chunk,) = read_sets(path, tables)
    return list(chunk.sets), chunk.is_known.tolist(), levels_of(chunk.samples)


def test_tables_and_all_sets_to_predict_may_have_levels(tmp_path):
    tables = read(tmp_path, ["a", "b=0.5", "c"])
    rows = [("genes",), ("b=0.25,a",), ("x=3",), ("c=0.3",), ("",)]
    path = write_table(tmp_path / "ask.tsv", rows)
    cells, is_known, sets = asked(str(path), tables)
    assert cells == ["b=0.25,a", "x=3", "c=0.3", ""]
    assert is_known == [True, False, True, True]
    assert sets == [{"a": 0.0, "b": 0.25}, {"c": 0.3}, {}]
    cells, _, sets = asked("all-singles=0.3", tables)
    assert cells == ["a=0.3", "b=0.3", "c=0.3", "d=0.3"]
    assert sets == [{name: 0.3} for name in tables.genes]
    _, _, sets = asked("all-pairs=2", tables)
    assert len(sets) == 6
    assert sets[0] == {"a": 2.0, "b": 2.0}
    with pytest.raises(UserError, match="all-singles=x: "):
        asked("all-singles=x", tables)


def test_rows_of_the_same_nodes_and_levels_stay_together_in_a_split():
    """This includes sets that only differ in which of two nodes has which of two levels."""
    sets = [{k: 0.0, k + 1: level} for k in range(0, 60, 2) for level in (0.0, 0.3, 3.0)]
    sets += [{k: 0.3, k + 1: 3.0} for k in range(0, 60, 2)]
    sets += [{k: 3.0, k + 1: 0.3} for k in range(0, 60, 2)]
    tables = tables_of(sets * 2, torch.zeros(300))
    tables.genes = [f"g{k}" for k in range(61)]
    for seed in range(3):
        split = random_split(tables, DataConfig(split_seed=seed))
        assert split[:150].equal(split[150:])
        # No group is larger than two rows.
        assert torch.bincount(split.int()).tolist() == [240, 30, 30]
    assert len(split[:90].view(30, 3).unique(dim=0)) > 3
    by_node = node_split(tables, DataConfig(split="nodes"))
    no_levels = node_split(replace(tables, level=None), DataConfig(split="nodes"))
    assert by_node.equal(no_levels)


# ---- Model ---------------------------------------------------------------------------------------
@pytest.fixture
def shared() -> SharedGraph:
    return graph_of_12_nodes().double()


@pytest.mark.parametrize("readout", ["both", "local", "global", "nodes"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_all_routes_agree_for_levels_and_deletions(shared, monkeypatch, readout, layers):
    """Compares values and gradients on copies of the graph with plans for 0 to all layers."""
    options = {"layers": layers, "readout": readout}
    reference = make_model(torch.float64, message_passing="expanded", **options)
    expected = outputs_and_gradients(reference, shared, make_batch(shared, SETS))
    monkeypatch.setattr(SharedGraph, "samples_at_once", lambda graph, states: 2)
    monkeypatch.setattr(ReachPlanner, "BLOCK", 3)
    for planned in range(layers + 1):
        planner = ReachPlanner(shared, planned)
        planner.max_edges = math.inf
        batch = make_batch(shared, SETS, planner)
        assert {len(block.layers) for block in batch.plan} == {planned}
        with CountSynchronisations() as count:
            found = outputs_and_gradients(make_model(torch.float64, **options), shared, batch)
        assert count.seen == []
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# ---- The synthetic preset ------------------------------------------------------------------------
def test_dose_responses_equal_values_calculated_by_hand():
    class SameForAll:
        """Replaces random numbers, so that all targets, edges and nodes are equal."""

        num_nodes = 3
        module = torch.zeros(3, dtype=torch.long)

        def normal(self, count: int) -> torch.Tensor:
            value = 0.0 if count == 3 else 1.0
            return torch.full((count,), value, dtype=torch.float64)

    edges = [torch.tensor([[0, 1], [2, 2]])]
    packed = pack_levels([{0: 0.0}, {0: 3.0, 1: 0.5}, {}, {2: 0.0}])
    found = dose_responses(SameForAll(), edges, *packed.values(), rounds=1)
    expected = [1.5 * x / (x + 0.5) - 1 for x in (0.5, 1.75, 1.0)] + [0.0]
    assert found.tolist() == pytest.approx(expected)
