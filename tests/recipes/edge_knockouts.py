"""Tests of a copy with edge_knockouts.patch, on the tables of its config.yaml.

    python -m pytest tests/recipes/edge_knockouts.py

The table of scores must contain three names of the form `A>B`, whose edges are removed or scaled.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import load_config
from data import KnockoutDataset, load
from errors import DataError
from mask import SharedGraph
from mask_copies import CopiedGraph
from tests.sets import tables_of


@pytest.fixture
def options():
    return load_config().data


@pytest.fixture
def tables(options):
    return load(options)


@pytest.fixture
def pairs(tables):
    return [name for name in tables.genes if ">" in name]


@pytest.fixture
def samples(pairs):
    """{name: level} of each of six samples."""
    a, b, c = pairs
    (start_a, _), (start_b, _), (start_c, end_c) = (pair.split(">") for pair in pairs)
    return [
        {},
        {a: 0.0, b: 0.0},
        {start_c: 0.0, a: 0.0},
        {start_c: 0.5, c: 0.25, a: 2.0},
        {start_a: 3.0, a: 0.0, b: 0.3},
        {start_b: 0.0, b: 0.5, end_c: 0.75},
    ]


def test_levels_of_pairs_are_read(tables, pairs):
    node = tables.genes.index(pairs[1])
    assert tables.level[tables.perturbed == node].unique().tolist() == [0.3, 2]


def test_sums_equal_a_loop_over_the_edges(tables, samples):
    number = {name: node for node, name in enumerate(tables.genes)}
    graph = SharedGraph(tables.graph()).double()
    sets = [{number[name]: level for name, level in levels.items()} for levels in samples]
    dataset = KnockoutDataset(tables_of(sets, torch.zeros(len(sets))), graph.degree)
    batch = dataset.__getitems__(range(len(sets)))
    x = torch.randn(graph.num_nodes, len(sets), 4, dtype=torch.float64)
    sums = graph.propagate(x, level=graph.levels(batch))
    copies = CopiedGraph(graph, batch).propagate(x, x.new_ones(len(graph.relations), 4))
    masks = [mask.view(len(sets), -1) for mask in graph.edge_masks(batch).values()]
    masks = torch.cat(masks, dim=1)

    expected = torch.zeros_like(sums)
    edges = zip(tables.edge_index.T.tolist(), graph.edge_weight, strict=True)
    for edge, ((start, target), weight) in enumerate(edges):
        source_name = tables.genes[start].split(">")[0]
        target_name = tables.genes[target]
        names = (source_name, f"{source_name}>{target_name}", target_name)
        for sample, levels in enumerate(samples):
            of_source, of_edge, of_target = (levels.get(name, 1.0) for name in names)
            assert (of_source * of_edge * of_target > 0) == masks[sample, edge]
            # The sums of dead targets are not masked.
            sent = of_source * of_edge * x[number[source_name], sample]
            expected[target, sample] += weight * sent
    torch.testing.assert_close(sums, expected, rtol=1e-7, atol=1e-7)
    is_alive = graph.keep(batch)
    torch.testing.assert_close(copies[is_alive], expected[is_alive], rtol=1e-7, atol=1e-7)
    assert masks[0].all()
    assert not masks[1].all()


def test_a_missing_edge_is_an_error(options, tables, tmp_path):
    scores = Path(options.perturbations).read_text()
    table = tmp_path / "scores.tsv"
    for name in ("A>B", f"{tables.genes[1]}>B", f"A>{tables.genes[0]}"):
        table.write_text(f"{scores}{name}\t1\n")
        with pytest.raises(DataError) as error:
            load(replace(options, perturbations=str(table)))
        assert str(error.value).startswith(f"{table}: there is no edge {name}: ")
