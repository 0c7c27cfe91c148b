"""The rivals in analyse.py: simple predictions of the test rows without a model."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from analyse import table_of_rivals
from analyse_metrics import metrics_of_rivals, r2
from analyse_rivals import pair_rival, pair_terms, rivals
from baseline import additive_baseline
from data_tables import Tables
from metrics import pearson
from tests.sets import pack_levels
from tests.template.results import normal
from tests.template.tasks import predictions_of

ONE_EDGE = torch.tensor([[0], [1]])
SINGLES = ["sum", "largest", "smallest", "product"]


def tables_of_sets(
    sets: list[list[int]], y: Tensor, split: list[int], edges: Tensor = ONE_EDGE
) -> Tables:
    return Tables(
        genes=[f"g{k:02}" for k in range(30)],
        relations=["r"],
        edge_index=edges,
        edge_type=torch.zeros_like(edges[0]),
        **pack_levels([dict.fromkeys(nodes, 0.0) for nodes in sets]),
        y=y,
        split=torch.tensor(split, dtype=torch.int8),
    )


def all_pairs(function: str, num_triples: int = 0) -> Tables:
    """Returns an intact row, two rows for each of 30 nodes, all pairs, and some triples.

    Of three consecutive pairs, one is in each split. The intact score is 1, and the scores of
    single nodes are between 0 and 1. The scores of pairs and triples are a function of them.
    """
    generator = torch.Generator().manual_seed(0)
    single = torch.rand(30, dtype=torch.float64, generator=generator)
    nodes = [[], *([k] for k in range(30)), *([k] for k in range(30))]
    nodes += torch.combinations(torch.arange(30)).tolist()
    nodes += torch.combinations(torch.arange(30), 3)[: 7 * num_triples : 7].tolist()
    combine = {
        "sum": lambda values: 1 + sum(value - 1 for value in values),
        "largest": lambda values: max(values, default=1.0),
        "smallest": lambda values: min(values, default=1.0),
        "product": lambda values: math.prod(values),
    }[function]
    y = torch.tensor([combine(single[row].tolist()) for row in nodes], dtype=torch.float64)
    y[1:31] += 0.01
    y[31:61] -= 0.01
    split = [0] * 61 + [k % 3 for k in range(435)] + [2] * num_triples
    return tables_of_sets(nodes, y, split)


@pytest.mark.parametrize("function", SINGLES)
def test_a_function_of_single_scores_is_found(function):
    tables = all_pairs(function)
    found = rivals(tables, "squared")
    assert list(found) == [
        "mean",
        "sum of effects",
        *(f"{name} of single scores" for name in SINGLES),
    ]
    y = tables.y[tables.rows("test")]
    torch.testing.assert_close(found[f"{function} of single scores"], y, rtol=0, atol=1e-6)
    for name, prediction in found.items():
        assert prediction.shape == y.shape
        if name != f"{function} of single scores" and {name[:3], function[:3]} != {"sum"}:
            assert pearson(y, prediction) < 0.99, name


def test_a_line_is_fitted_only_to_training_rows():
    """The scores of pairs are 0.5 * the smallest single score + a constant."""
    tables = all_pairs("smallest")
    is_pair = tables.perturbed_ptr.diff() == 2
    tables.y[is_pair] = 0.5 * tables.y[is_pair] + 7
    expected = tables.y.clone()
    tables.y[tables.rows("test")] += 100
    found = rivals(tables, "squared")["smallest of single scores"]
    torch.testing.assert_close(found, expected[tables.rows("test")], rtol=0, atol=1e-6)


def test_without_pairs_in_training_the_single_score_is_the_prediction():
    tables = all_pairs("largest")
    is_pair = tables.perturbed_ptr.diff() == 2
    tables.split[is_pair] = 2
    tables.split[1] = 1
    found = rivals(tables, "squared")["largest of single scores"]
    torch.testing.assert_close(found, tables.y[tables.rows("test")], rtol=0, atol=0.011)


def test_sets_without_one_node_predict_larger_sets():
    """The smallest score of a pair determines a triple; single scores are not informative."""
    tables = all_pairs("smallest", num_triples=200)
    generator = torch.Generator().manual_seed(0)
    of_pairs = torch.rand(435, dtype=torch.float64, generator=generator)
    tables.y[61:496, 0] = of_pairs
    tables.split[61:496] = 0
    number = {
        tuple(pair): k for k, pair in enumerate(torch.combinations(torch.arange(30)).tolist())
    }
    for row in range(496, 696):
        start = tables.perturbed_ptr[row]
        a, b, c = tables.perturbed[start : start + 3].tolist()
        tables.y[row] = of_pairs[[number[a, b], number[a, c], number[b, c]]].min()
    tables.split[496:700:2] = 0
    tables.split[0] = 1
    found = rivals(tables, "squared")
    y = tables.y[tables.rows("test")]
    name = "smallest of scores without a node"
    torch.testing.assert_close(found[name], y, rtol=0, atol=1e-6)
    assert pearson(y, found["smallest of single scores"]) < 0.5


@pytest.mark.parametrize("loss", ["squared", "binary"])
def test_an_unseen_node_has_no_effect_or_the_mean_effect_of_its_neighbours(loss):
    """The genes form three groups. Genes of a group are connected and have the same effect."""
    group = torch.arange(30) % 3
    joined = (group.unsqueeze(1) == group).fill_diagonal_(False)
    pairs = torch.combinations(torch.arange(30))
    y = torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64)[group][pairs].sum(dim=1, keepdim=True)
    if loss == "binary":
        y = (y > 0).double()
    is_unseen = (pairs < 6).any(dim=1)
    split = torch.where(is_unseen, 2, torch.arange(len(pairs)) % 4 == 0)
    tables = tables_of_sets(pairs.tolist(), y, split.tolist(), joined.nonzero().T)
    found = rivals(tables, loss)
    name = "sum of effects, unseen: graph neighbours"
    assert list(found) == ["mean", "sum of effects", name]
    y = tables.y[tables.rows("test")]
    assert pearson(y, found[name]) > (0.999 if loss == "squared" else 0.9)
    assert pearson(y, found["sum of effects"]) < pearson(y, found[name]) - 0.1
    both_unseen = (pairs[tables.rows("test")] < 6).all(dim=1)
    assert found["sum of effects"][both_unseen].std() < 1e-6 < found[name][both_unseen].std()
    baseline = additive_baseline(tables, loss).prediction[tables.rows("test")]
    torch.testing.assert_close(found[name], baseline)


def test_a_node_at_two_levels_is_two_different_sets():
    tables = all_pairs("smallest")
    tables.level[30:60] = 0.5  # the second row of each node
    tables.y[31:61] = normal(30, 1)
    found = rivals(tables, "squared")["smallest of single scores"]
    torch.testing.assert_close(found, tables.y[tables.rows("test")], rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", ["squared", "binary"])
def test_rivals_need_enough_single_scores_and_estimate_missing_scores(loss):
    tables = all_pairs("smallest")
    if loss == "binary":
        tables.y = (tables.y > tables.y.median()).double()
    tables.y[1:61:2] = math.nan  # every other row, but each node has two rows
    assert len(rivals(tables, loss)) == 6
    tables.y[1:20] = math.nan
    tables.y[31:50] = math.nan  # all rows of 19 of the 30 nodes
    assert list(rivals(tables, loss)) == ["mean", "sum of effects"]
    tables = all_pairs("smallest")
    tables.y[[3, 33]] = math.nan  # only the rows of node 2
    found = rivals(tables, "squared")["smallest of single scores"]
    assert pearson(tables.y[tables.rows("test")], found) > 0.98


def test_each_target_has_its_own_lines_and_weights_are_used():
    tables = all_pairs("smallest")
    y = torch.cat([tables.y, all_pairs("product").y], dim=1)
    tables = replace(tables, y=y, targets=("a", "b"))
    found = rivals(tables, "squared")
    y = y[tables.rows("test")]
    for t, function in enumerate(("smallest", "product")):
        prediction = found[f"{function} of single scores"][:, t]
        torch.testing.assert_close(prediction, y[:, t], rtol=0, atol=1e-6)
    train = tables.rows("train")
    misled = train[tables.perturbed_ptr.diff()[train] == 2][::2]
    tables.y[misled] = 50.0
    tables.weight = torch.ones(len(tables.y), dtype=torch.float64)
    tables.weight[misled] = 1e-9
    prediction = rivals(tables, "squared")["smallest of single scores"][:, 0]
    torch.testing.assert_close(prediction, y[:, 0], rtol=0, atol=1e-4)


def test_the_product_is_not_used_if_it_is_huge_because_the_intact_score_is_nearly_0(monkeypatch):
    tables = all_pairs("smallest", num_triples=200)
    additive = additive_baseline(tables)
    additive = replace(additive, intercept=torch.full_like(additive.intercept, 1e-17))
    monkeypatch.setattr("analyse_rivals.additive_baseline", lambda tables, loss: additive)
    assert rivals(tables, "squared")["product of single scores"].abs().max() < 10


# ---- Features of pairs ---------------------------------------------------------------------------
def pairs_with_common_neighbours(num_edges: int = 150) -> Tables:
    """Returns all pairs of 30 nodes. Their score is both effects - 1.2 * common neighbours."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(30, (2, num_edges), generator=generator)
    source, target = edge_index
    is_edge = torch.zeros(30, 30, dtype=torch.float64)
    is_edge[source, target] = 1.0
    is_edge[target, source] = 1.0
    effect = torch.randn(30, dtype=torch.float64, generator=generator)
    pairs = torch.combinations(torch.arange(30))
    first, second = pairs.T
    y = effect[pairs].sum(dim=1) - 1.2 * (is_edge @ is_edge)[first, second]
    split = torch.randint(4, (len(pairs),), generator=generator).clamp(max=2)
    return tables_of_sets(pairs.tolist(), y.unsqueeze(1), split.tolist(), edge_index)


def test_features_of_pairs_predict_more_than_the_sum_of_effects(tmp_path):
    tables = pairs_with_common_neighbours()
    (found,) = pair_rival(tables, "squared", str(tmp_path)).values()
    y = tables.y[tables.rows("test")]
    assert pearson(y, rivals(tables, "squared")["sum of effects"]) < 0.8
    assert pearson(y, found) > 0.9
    assert r2(y, found) > 0.8


def test_there_is_no_rival_with_pair_features_without_enough_pairs(tmp_path):
    tables = pairs_with_common_neighbours()
    assert not pair_rival(tables, "binary", str(tmp_path))
    single = replace(tables, perturbed=tables.perturbed[::2])
    single = replace(single, perturbed_ptr=tables.perturbed_ptr // 2, level=tables.level[::2])
    assert not pair_rival(single, "squared", str(tmp_path))
    few_edges = pairs_with_common_neighbours(num_edges=3)
    assert not pair_rival(few_edges, "squared", str(tmp_path))


def test_a_ridge_on_features_of_pairs_equals_a_dense_solution():
    """There are two scores with missing values, and rows have weights."""
    tables = pairs_with_common_neighbours()
    generator = torch.Generator().manual_seed(1)
    num_rows = len(tables.y)
    features = torch.rand(num_rows, 4, generator=generator) * torch.tensor([1.0, 50.0, 1e-3, 0.0])
    noise = torch.randn(num_rows, 2, dtype=torch.float64, generator=generator)
    residual = features[:, :2].double() * torch.tensor([0.3, 0.5]) + noise
    residual[noise > 1] = math.nan
    weight = 0.1 + torch.rand(num_rows, dtype=torch.float64, generator=generator)
    tables = replace(tables, y=residual, weight=weight, targets=("a", "b"))
    found = pair_terms(tables, residual, features)

    train, val, test = (tables.rows(split).numpy() for split in ("train", "val", "test"))
    x = features.double().numpy()
    x = x - x[train].mean(axis=0)
    x[:, :3] /= x[train, :3].std(axis=0)
    for t in range(2):
        y = residual[:, t].numpy()
        has_score = ~np.isnan(y)
        rows = train[has_score[train]]
        judges = val[has_score[val]]
        w = weight.numpy() / weight[rows].mean().item()
        fits = {}
        for penalty in (1, 10, 100, 1000, 10000):
            centre = np.average(x[rows], axis=0, weights=w[rows])
            mean = np.average(y[rows], weights=w[rows])
            centred = (x[rows] - centre) * w[rows, None]
            matrix = centred.T @ (x[rows] - centre) + penalty * np.eye(4)
            line = np.linalg.solve(matrix, centred.T @ (y[rows] - mean))
            prediction = mean + (x - centre) @ line
            error = np.average((y - prediction)[judges] ** 2, weights=w[judges])
            fits[error] = prediction[test]
        expected = torch.from_numpy(fits[min(fits)])
        torch.testing.assert_close(found[:, t], expected, rtol=1e-9, atol=1e-9)


# ---- The printed table ---------------------------------------------------------------------------
def test_rivals_are_listed_by_their_correlation():
    tables = all_pairs("smallest")
    y = tables.y[tables.rows("test")]
    rows = predictions_of(y, y + 0.1 * normal(*y.shape), torch.full_like(y, 0.5))
    figures = metrics_of_rivals(rows, rivals(tables, "squared"), "squared")
    assert list(figures) == sorted(figures, key=lambda name: -figures[name]["pearson"])
    header, *lines, sentence = table_of_rivals(figures)
    assert re.split(r"\s{2,}", header.strip())[:2] == ["Pearson", "difference (95 % CI)"]
    assert len(lines) == len(figures) == 7
    assert sentence.startswith("strongest rival: smallest of single scores; ")
