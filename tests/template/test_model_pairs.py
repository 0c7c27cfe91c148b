"""Tests of the features of pairs of nodes, compared with dense matrices, and of their term."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu
from torch.utils.data import DataLoader, default_convert
from torch_geometric.data import Data, HeteroData

import model_pairs
from data import DataConfig, KnockoutDataset, load
from mask import SharedGraph
from model_pairs import (
    FEATURES,
    MOST_RELATIONS,
    PairIndex,
    PairTerm,
    num_pairs,
    pair_index,
    pair_names,
    units_of_pairs,
)
from tests.sets import pack_levels, tables_of
from tests.template.fixtures import write_table
from tests.template.tasks import small_graph
from tests.tools.runs import difference


def dense_features(edge_index: Tensor, relation: Tensor, weight: Tensor, size: tuple) -> Tensor:
    """Returns the features of all pairs, computed with dense matrices, [F, N, N].

    `size` is (R, N, N).
    """
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


def index_of(
    edge_index: Tensor, relation: Tensor, weight: Tensor, names: list[str], num_nodes: int
) -> PairIndex:
    """Returns the index of a graph with these edges; `relation` is an index in `names`."""
    graph = HeteroData()
    graph["gene"].num_nodes = num_nodes
    for number, name in enumerate(names):
        is_of_relation = relation == number
        graph["gene", name, "gene"].edge_index = edge_index[:, is_of_relation]
        graph["gene", name, "gene"].edge_weight = weight[is_of_relation]
    return PairIndex(SharedGraph(graph))


def random_index(seed: int) -> tuple[PairIndex, Tensor]:
    """Returns the index of a random graph with loops and duplicate edges, and `dense_features`."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes, num_relations, num_edges = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((1, 30), (1, 5), (-30, 120))
    )
    num_edges = max(num_edges, 0)  # a fifth of the graphs have no edges
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    relation = torch.randint(num_relations, (num_edges,), generator=generator)
    if seed % 3 == 0:  # an undirected graph
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        relation = relation.repeat(2)
    weight = torch.rand(len(relation), generator=generator) + 0.1
    if seed % 3 == 0:
        weight = torch.ones_like(weight)
    names = [str(number) for number in range(num_relations)]
    size = (num_relations, num_nodes, num_nodes)
    dense = dense_features(edge_index, relation, weight, size)
    return index_of(edge_index, relation, weight, names, num_nodes), dense


@pytest.mark.parametrize("seed", range(30))
def test_features_of_all_pairs_equal_dense_matrices(seed):
    index, dense = random_index(seed)
    first, second = torch.triu_indices(index.num_nodes, index.num_nodes, 1)
    found = index.of_pairs(first, second)
    assert found.shape == (len(first), len(index.names))
    torch.testing.assert_close(found, dense[:, first, second].T, rtol=0, atol=1e-12)
    assert torch.equal(index.of_pairs(second, first), found)


@pytest.mark.parametrize("at_once", [1, 50, 2**20])
def test_features_of_a_sample_are_the_sum_over_its_pairs_for_any_piece_size(monkeypatch, at_once):
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


def test_neighbours_of_the_node_with_more_neighbours_are_not_looked_up(monkeypatch):
    """A pair consists of a hub and a node with three neighbours. The hub has two of them, too."""
    num_keys = []
    searchsorted = torch.searchsorted

    def count_keys(keys: Tensor, found: Tensor) -> Tensor:
        num_keys.append(len(found))
        return searchsorted(keys, found)

    leaves = torch.arange(1, 1000)
    of_hub = torch.stack([torch.zeros_like(leaves), leaves])
    of_partner = torch.tensor([[1000, 1000, 1000], [1, 2, 1001]])
    edge_index = torch.cat([of_hub, of_partner], dim=1)
    relation = torch.zeros(edge_index.size(1), dtype=torch.long)
    index = index_of(edge_index, relation, torch.ones(len(relation)), ["r"], 1002)
    monkeypatch.setattr(torch, "searchsorted", count_keys)
    monkeypatch.setattr(model_pairs, "AT_ONCE", 100)
    batch = Data(**pack_levels([{0: 0.0, 1000: 0.0}] * 2))
    batch.perturbed_batch = torch.tensor([0, 0, 1, 1])
    common_targets = index.of_samples(batch)[:, index.names.index("common targets by r")]
    assert common_targets.tolist() == pytest.approx([torch.tensor(3.0).log().item()] * 2)
    assert num_keys == [6]  # three keys for each of two pairs, in one piece


def test_with_many_relations_only_their_union_has_features():
    num_relations = MOST_RELATIONS + 1
    edge_index = torch.stack([torch.arange(num_relations), torch.arange(num_relations) + 1])
    names = [str(number) for number in range(num_relations)]
    weight = torch.ones(num_relations)
    index = index_of(edge_index, torch.arange(num_relations), weight, names, num_relations + 1)
    assert index.names[0] == "edge by all relations"
    assert len(index.names) == len(FEATURES + model_pairs.DIRECTED)
    features = index.of_pairs(torch.tensor([3]), torch.tensor([5]))
    found = dict(zip(index.names, features[0].tolist(), strict=True))
    assert found["edge by all relations"] == 0
    assert found["paths of two by all relations"] == pytest.approx(torch.tensor(2.0).log().item())


# ---- Small graphs and samples --------------------------------------------------------------------
def wild_type(num_samples: int, hidden: int) -> Any:
    """Returns a stand-in for a wild type, with random values of the field that `PairTerm` reads."""
    return SimpleNamespace(kept={"hidden": torch.randn(num_samples, 2 * hidden)})


def read(hidden: Tensor) -> Tensor:
    """Returns one output for each sample, as a stand-in for `LocalReadout.read`."""
    return gelu(hidden).sum(dim=1, keepdim=True)


def test_a_node_that_occurs_twice_in_a_sample_counts_once(tmp_path):
    edges = [("source", "target", "relation"), ("a", "c", "r"), ("b", "c", "r"), ("a", "a", "r")]
    samples = ["a,b", "b,a,b", "a,a", "a", "a,b,c,c"]
    splits = ["train", "train", "train", "val", "test"]
    rows = zip(samples, range(len(samples)), splits, strict=True)
    scores = [("genes", "score", "split"), *rows]
    config = DataConfig(
        edges=str(write_table(tmp_path / "edges.tsv", edges)),
        perturbations=str(write_table(tmp_path / "scores.tsv", scores)),
        cache_dir=str(tmp_path / "cache"),
    )
    tables = load(config)
    graph = SharedGraph(tables.graph())
    batch = KnockoutDataset(tables, graph.degree).__getitems__(range(len(samples)))
    features = pair_index(graph).of_samples(batch)
    assert features[0].abs().max() > 0
    assert torch.equal(features[0], features[1])
    assert features[2].abs().max() == features[3].abs().max() == 0
    assert num_pairs(batch).tolist() == [1, 1, 0, 0, 3]


def test_the_log_reports_if_only_the_union_has_features(caplog):
    caplog.set_level("INFO", logger="model_pairs")
    for num_relations in (MOST_RELATIONS, MOST_RELATIONS + 1):
        graph = HeteroData()
        graph["gene"].num_nodes = 4
        for number in range(num_relations):
            edge_index = torch.tensor([[number % 4], [number * 3 % 4]])
            graph["gene", f"r{number}", "gene"].edge_index = edge_index
        is_by_all = [name.endswith(" by all relations") for name in pair_names(SharedGraph(graph))]
        assert all(is_by_all) == (num_relations > MOST_RELATIONS)
    (note,) = caplog.messages
    assert "pair features" in note and f"{num_relations:,} relations" in note


# ---- The readout ---------------------------------------------------------------------------------
def small_dataset(levels: list[dict[int, float]]) -> tuple[SharedGraph, KnockoutDataset]:
    """Returns a graph, and a dataset of training rows with these levels of perturbed nodes."""
    graph = SharedGraph(small_graph(torch.Generator().manual_seed(0)))
    tables = tables_of(levels, torch.zeros(len(levels)))
    tables.split = torch.zeros(len(levels), dtype=torch.int8)
    return graph, KnockoutDataset(tables, graph.degree)


def test_features_are_centred_on_an_average_pair_and_single_nodes_have_none():
    sets = [{a: 0.0, b: 0.0} for a, b in itertools.combinations(range(9), 2)] + [{4: 0.0}]
    graph, dataset = small_dataset(sets)
    batch = dataset.__getitems__(range(len(sets)))
    units = units_of_pairs(graph, dataset)
    features = pair_index(graph).of_samples(batch)[:-1]
    torch.testing.assert_close(units[0], features.mean(dim=0))
    deviation = features.std(dim=0, correction=0)
    varies = deviation > 1e-6 * features.square().mean(dim=0).sqrt()
    torch.testing.assert_close(units[1], (1 / deviation).where(varies, 0.0))
    readout = PairTerm(units, hidden=4, num_outputs=1, read=read)
    torch.nn.init.ones_(readout.linear.weight)
    part = readout(graph, wild_type(len(sets), hidden=4), None, batch)
    assert part[-1].abs().max() == 0
    assert part[:-1].abs().max() > 0


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e12])
def test_scaled_features_do_not_depend_on_the_unit_of_the_weights(scale):
    """Deviations are relative: a feature with small values does not count as constant."""
    sets = [{a: 0.0, b: 0.0} for a, b in itertools.combinations(range(9), 2)]
    scaled = []
    for factor in (1.0, scale):
        graph = small_graph(torch.Generator().manual_seed(0))
        for edge_type in graph.edge_types:
            graph[edge_type].edge_weight = factor * (1.0 + torch.arange(graph[edge_type].num_edges))
        graph = SharedGraph(graph)
        _, dataset = small_dataset(sets)
        mean, unit = units_of_pairs(graph, dataset)
        batch = dataset.__getitems__(range(len(sets)))
        scaled.append((pair_index(graph).of_samples(batch) - mean) * unit)
    is_edge = torch.tensor([name.startswith("edge by") for name in pair_names(graph)])
    assert scaled[0][:, is_edge].any()
    torch.testing.assert_close(scaled[1], scaled[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", [0.998, -49.5])
def test_features_of_pairs_at_any_level_have_units(level):
    sets = [{a: level, b: level} for a, b in itertools.combinations(range(9), 2)]
    deleted = [dict.fromkeys(nodes, 0.0) for nodes in sets]
    mean, scale = units_of_pairs(*small_dataset(sets))
    expected_mean, expected_scale = units_of_pairs(*small_dataset(deleted))
    assert (expected_scale > 0).sum() > 8
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(scale * (1 - level) ** 2, expected_scale)


@pytest.mark.parametrize("most_bytes", [0, model_pairs.MOST_BYTES])
def test_rounding_does_not_make_a_constant_feature_vary(monkeypatch, tmp_path, most_bytes):
    """In float32, as in batches, rounding makes sums of equal pairs deviate from average pairs."""
    monkeypatch.setattr(model_pairs, "MOST_BYTES", most_bytes)
    graph = HeteroData()
    graph["gene"].num_nodes = 12
    pairs = torch.tensor(list(itertools.permutations(range(12), 2)))
    graph["gene", "r", "gene"].edge_index = pairs.T
    graph = SharedGraph(graph)
    sets = []
    for size in range(2, 13):
        sets += [dict.fromkeys(range(size), level) for level in (0.0, 0.3, 50.5)]
    _, dataset = small_dataset(sets)
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "")
    assert dataset[0].pair_features.dtype == torch.float32
    _, scale = units_of_pairs(graph, dataset)
    assert not scale.any()


def test_units_are_computed_from_training_rows():
    sets = [{a: 0.0, b: 0.0} for a, b in itertools.combinations(range(5), 2)]
    expected = units_of_pairs(*small_dataset(sets[:6]))
    graph, dataset = small_dataset(sets)
    assert not torch.equal(units_of_pairs(graph, dataset), expected)
    dataset.tables.split[6:8] = 1
    dataset.tables.split[8:] = 2
    assert torch.equal(units_of_pairs(graph, dataset), expected)
    dataset.tables.split[:] = -1  # not training rows, such as the rows of tables to predict
    assert not units_of_pairs(graph, dataset).any()


def test_units_of_many_rows_are_computed_from_evenly_spaced_rows(monkeypatch):
    sets = [{a: 0.0, b: 0.0} for a, b in itertools.combinations(range(5), 2)]
    expected = units_of_pairs(*small_dataset(sets[::3]))
    graph, dataset = small_dataset(sets)
    monkeypatch.setattr(model_pairs, "MOST_ROWS", 4)
    assert torch.equal(units_of_pairs(graph, dataset), expected)


def test_the_term_is_a_linear_function_plus_a_change_of_the_mlp():
    """Features are centred according to the number of pairs, scaled, and limited to 10."""
    torch.manual_seed(0)
    units = torch.tensor([[1.0, 0.5], [2.0, 100.0]])
    term = PairTerm(units, hidden=2, num_outputs=1, read=read)
    assert term.linear.weight.abs().max() == 0
    torch.nn.init.normal_(term.linear.weight)
    batch = Data(**pack_levels([{0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0, 2: 0.5}, {2: 0.0}]))
    batch.perturbed_batch = torch.repeat_interleave(batch.perturbed_ptr.diff())
    batch.pair_features = torch.tensor([[1.5, 0.25], [3.0, 1.01], [0.0, 0.0]])
    # The weighted numbers of pairs are 1, 2 and 0.
    scaled = torch.tensor([[1.0, -10.0], [2.0, 1.0], [0.0, 0.0]])
    wild = wild_type(3, hidden=2)
    hidden = wild.kept["hidden"]
    with torch.no_grad():
        change = read(hidden + scaled @ term.input.weight.T) - read(hidden)
        expected = scaled @ term.linear.weight.T + change
        found = term(None, wild, None, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert found[2] == 0


def test_features_without_training_pairs_do_not_change_a_prediction():
    """No training row has a pair, so the weights of the features keep their random values."""
    graph, dataset = small_dataset([{0: 0.0}, {1: 0.0}, {0: 0.0, 1: 0.0}])
    dataset.tables.split[2] = 2
    batch = dataset.__getitems__([2])
    assert pair_index(graph).of_samples(batch).abs().max() > 0
    term = PairTerm(units_of_pairs(graph, dataset), hidden=4, num_outputs=1, read=read)
    torch.nn.init.ones_(term.linear.weight)
    assert not term(graph, wild_type(1, hidden=4), None, batch).any()


def test_features_in_a_batch_equal_computed_features(tmp_path):
    sets = [{0: 0.0, 1: 0.0, 4: 0.5}, {2: 0.0}, {5: 0.0, 6: 0.0}]
    graph, dataset = small_dataset(sets)
    computed = pair_index(graph).of_samples(dataset.__getitems__([2, 0, 1])).float()
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "")
    assert torch.equal(dataset.__getitems__([2, 0, 1]).pair_features, computed)
    assert dataset.__getitems__([-1, -1]).pair_features.abs().max() == 0
    assert pair_index(graph) is pair_index(graph)
    others = dataset.with_samples(replace(dataset.tables))
    assert "pair_features" not in others.__getitems__([0])


def test_features_of_different_tables_and_precisions_have_separate_caches(tmp_path):
    graph, dataset = small_dataset([{0: 0.0, 1: 0.0}])
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "of these tables")
    features = dataset.columns["pair_features"]
    graph, dataset = small_dataset([{0: 0.0, 2: 0.0}])
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "of others")
    assert not torch.equal(dataset.columns["pair_features"], features)
    graph.to("cpu", torch.float64)
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "of others")
    assert dataset.columns["pair_features"].dtype == torch.float64


def test_features_of_too_many_rows_are_computed_with_each_batch(monkeypatch, tmp_path):
    """They have the same bits as cached features, for samples and padding, and the same units."""
    graph, dataset = small_dataset([{0: 0.0, 1: 0.0, 4: 0.3}, {2: 0.0}, {5: 0.0, 6: 0.7}])
    kept = replace(dataset)
    model_pairs.add_pair_features(kept, graph, str(tmp_path), "")
    assert not dataset.columns
    size = kept.columns["pair_features"].nbytes
    monkeypatch.setattr(model_pairs, "MOST_BYTES", size - 1)
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "")
    assert callable(dataset.columns["pair_features"])
    for rows in ([2, -1, 0, 1], [-1, -1]):
        expected = kept.__getitems__(rows).pair_features
        assert torch.equal(dataset.__getitems__(rows).pair_features, expected)
    assert torch.equal(units_of_pairs(graph, dataset), units_of_pairs(graph, kept))
    others = dataset.with_samples(replace(dataset.tables))
    assert torch.equal(others[0].pair_features, kept[0].pair_features)


@pytest.mark.slow
def test_features_are_computed_in_spawned_loader_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(model_pairs, "MOST_BYTES", 0)
    graph, dataset = small_dataset([{0: 0.0, 1: 0.0, 4: 0.3}, {2: 0.0}, {5: 0.0, 6: 0.7}])
    model_pairs.add_pair_features(dataset, graph, str(tmp_path), "")
    loader = DataLoader(
        dataset,
        batch_sampler=[[2, -1, 0]],
        collate_fn=default_convert,
        num_workers=1,
        multiprocessing_context="spawn",
        timeout=100,
    )
    (batch,) = loader
    assert batch.pair_features.abs().max() > 0
    assert torch.equal(batch.pair_features, dataset.__getitems__([2, -1, 0]).pair_features)


def test_a_run_is_the_same_with_cached_and_computed_features(train, tmp_path, monkeypatch):
    options = ["optim.epochs=2", "model.readout=local"]
    note = "pair features are computed for each batch"
    assert note not in train(0, *options, "run.name=kept").check().stdout
    monkeypatch.setattr(model_pairs, "MOST_BYTES", 0)
    assert note in train(0, *options, "run.name=computed", "data.workers=1").check().stdout
    assert difference(tmp_path / "runs/computed", tmp_path / "runs/kept") == ""


def test_a_relation_may_be_called_all():
    edge_index = torch.tensor([[0, 1], [2, 2]])
    index = index_of(edge_index, torch.tensor([0, 1]), torch.ones(2), ["all", "r"], 3)
    assert len(set(index.names)) == len(index.names)
