"""What pairs of nodes have in common, against dense matrices, and its part of a prediction."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import model_pairs
from data import KnockoutDataset
from mask import SharedGraph
from model_pairs import (
    MOST_RELATIONS,
    PairIndex,
    PairReadout,
    num_pairs,
    pair_index,
    units_of_pairs,
)
from tests.tools.runs import pack_levels, small_graph


def dense_features(edge_index: Tensor, relation: Tensor, weight: Tensor, size: tuple) -> Tensor:
    """Returns the features of all pairs by dense matrices, [F, N, N]."""
    weights = torch.zeros(size, dtype=torch.float64)
    weights.index_put_((relation, *edge_index), weight.double(), accumulate=True)
    relations = list(weights)
    if len(relations) > 1:
        relations.append(weights.sum(dim=0))
    features = []
    for out in relations:
        sends = (out > 0).double()
        either = torch.maximum(out, out.T)
        near = (either > 0).double()
        length = either.norm(dim=1)
        lengths = torch.outer(length, length)
        rarity = 1 / near.sum(dim=1).clamp(min=2).log()
        features += [
            either,
            (near @ near).log1p(),
            either @ either / lengths.where(lengths > 0, 1.0),
            near @ torch.diag(rarity) @ near,
        ]
        if not torch.equal(sends, sends.T):
            paths = sends @ sends
            features += [
                sends * sends.T,
                (sends @ sends.T).log1p(),
                (sends.T @ sends).log1p(),
                (paths + paths.T).log1p(),
            ]
    return torch.stack(features)


def random_index(seed: int) -> tuple[PairIndex, Tensor]:
    """Returns the index of a random graph, with loops and duplicates, and its dense features."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes, num_relations, num_edges = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((2, 30), (1, 5), (0, 120))
    )
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    relation = torch.randint(num_relations, (num_edges,), generator=generator)
    if seed % 3 == 0:  # without directions
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        relation = relation.repeat(2)
    weight = torch.rand(len(relation), generator=generator) + 0.1
    if seed % 3 == 0:
        weight = torch.ones_like(weight)
    names = [str(number) for number in range(num_relations)]
    size = (num_relations, num_nodes, num_nodes)
    dense = dense_features(edge_index, relation, weight, size)
    return PairIndex(edge_index, relation, weight, names, num_nodes), dense


@pytest.mark.parametrize("seed", range(100))
def test_features_of_all_pairs_are_those_of_dense_matrices(seed):
    index, dense = random_index(seed)
    first, second = torch.triu_indices(index.num_nodes, index.num_nodes, 1)
    found = index.of_pairs(first, second)
    assert found.shape == (len(first), len(index.names))
    torch.testing.assert_close(found, dense[:, first, second].T, rtol=0, atol=1e-12)
    assert torch.equal(index.of_pairs(second, first), found)


@pytest.mark.parametrize("at_once", [1, 50, 2**20])
def test_a_sample_has_the_sum_over_its_pairs_in_any_pieces(monkeypatch, at_once):
    monkeypatch.setattr(model_pairs, "AT_ONCE", at_once)
    index, dense = random_index(1)
    sets = [{0: 0.0, 3: 0.5, 5: 2.0}, {}, {1: 0.0}, {2: 0.0, 4: 0.0}]
    packed = pack_levels(sets)
    ptr = packed["perturbed_ptr"]
    batch = Data(perturbed_batch=torch.repeat_interleave(ptr.diff()), **packed)
    expected = torch.zeros(len(sets), len(dense), dtype=torch.float64)
    numbers = torch.zeros(len(sets), dtype=torch.float64)
    for row, nodes in enumerate(sets):
        for a, b in itertools.combinations(nodes, 2):
            factor = (1 - nodes[a]) * (1 - nodes[b])
            expected[row] += factor * dense[:, a, b]
            numbers[row] += factor
    torch.testing.assert_close(index.of_samples(batch), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(num_pairs(batch), numbers)


def test_of_very_many_relations_all_together_have_features():
    num_relations = MOST_RELATIONS + 1
    edge_index = torch.stack([torch.arange(num_relations), torch.arange(num_relations) + 1])
    names = [str(number) for number in range(num_relations)]
    weight = torch.ones(num_relations)
    index = PairIndex(edge_index, torch.arange(num_relations), weight, names, num_relations + 1)
    assert index.names[0] == "edge by all"
    assert len(index.names) == len(model_pairs.FEATURES + model_pairs.DIRECTED)
    features = index.of_pairs(torch.tensor([3]), torch.tensor([5]))
    found = dict(zip(index.names, features[0].tolist(), strict=True))
    assert found["edge by all"] == 0
    assert found["paths of two by all"] == pytest.approx(torch.tensor(2.0).log().item())


def small_dataset(levels: list[dict[int, float]]) -> tuple[SharedGraph, KnockoutDataset]:
    from tests.tools.runs import tables_of

    graph = SharedGraph(small_graph(torch.Generator().manual_seed(0)))
    tables = tables_of(levels, torch.zeros(len(levels)))
    tables.split = torch.zeros(len(levels), dtype=torch.int8)
    return graph, KnockoutDataset(tables, graph.degree)


def test_features_are_centred_by_those_of_an_average_pair_and_a_single_has_none():
    sets = [{a: 0.0, b: 0.0} for a, b in itertools.combinations(range(9), 2)] + [{4: 0.0}]
    graph, dataset = small_dataset(sets)
    batch = dataset.__getitems__(range(len(sets)))
    units = units_of_pairs(graph, dataset)
    features = pair_index(graph).of_samples(batch)[:-1]
    torch.testing.assert_close(units[0], features.mean(dim=0))
    deviation = features.std(dim=0, correction=0)
    torch.testing.assert_close(units[1], (1 / deviation).where(deviation > 1e-6, 0.0))
    readout = PairReadout(units, hidden=4, num_targets=1)
    torch.nn.init.ones_(readout.linear.weight)
    part = readout(graph, batch, torch.zeros(len(sets), 8), torch.nn.Identity())
    assert part[-1].abs().max() == 0
    assert part[:-1].abs().max() > 0


def test_what_training_rows_do_not_tell_adds_nothing_to_a_prediction():
    """No training row has a pair: weights of features stay as they were drawn."""
    graph, dataset = small_dataset([{0: 0.0}, {1: 0.0}, {0: 0.0, 1: 0.0}])
    dataset.tables.split[2] = 2
    batch = dataset.__getitems__([2])
    assert pair_index(graph).of_samples(batch).abs().max() > 0
    readout = PairReadout(units_of_pairs(graph, dataset), hidden=4, num_targets=1)
    torch.nn.init.ones_(readout.linear.weight)
    part = readout(graph, batch, torch.zeros(1, 8), torch.nn.Identity())
    assert part.abs().max() == 0


def test_features_that_a_batch_brings_are_those_that_are_computed(tmp_path):
    sets = [{0: 0.0, 1: 0.0, 4: 0.5}, {2: 0.0}, {5: 0.0, 6: 0.0}]
    graph, dataset = small_dataset(sets)
    computed = pair_index(graph).of_samples(dataset.__getitems__([2, 0, 1])).float()
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "")
    assert torch.equal(dataset.__getitems__([2, 0, 1]).pair_features, computed)
    assert dataset.__getitems__([-1, -1]).pair_features.abs().max() == 0
    others = dataset.with_samples(replace(dataset.tables))
    assert "pair_features" not in others.__getitems__([0])


def test_features_of_too_many_rows_come_with_each_batch(monkeypatch, tmp_path):
    monkeypatch.setattr(model_pairs, "MOST_BYTES", 1)
    graph, dataset = small_dataset([{0: 0.0, 1: 0.0}])
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "")
    assert dataset.pair_features is None
