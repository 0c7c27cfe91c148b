"""The additive baseline: it equals dense solutions, also for missing scores and unusual tables."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from baseline import PENALTIES, Baseline, additive_baseline, impute_effects
from baseline_ridge import conjugate_gradients
from data import DataConfig, random_split, training_mean_and_std
from data_tables import Tables
from mask import doses
from tests.bench.synthetic import PRESETS, synthetic_tables
from tests.sets import pack_sets, tables_of
from tests.template.tables import above_median, dense_design, on_one_relation


def mixed_tables() -> Tables:
    """Returns 400 samples of up to five of 30 genes, with three scores, of which some are missing.

    The mean effect of the genes is 1. Four genes do not occur in training rows. Two of these have
    a neighbour.
    """
    random = Random(0)
    generator = torch.Generator().manual_seed(0)
    sets = [random.sample(range(26), random.choice([0, 1, 1, 2, 3, 5])) for _ in range(360)]
    sets += [random.sample(range(30), 2) for _ in range(40)]
    effect = 1 + torch.randn(30, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(400, 3, dtype=torch.float64, generator=generator)
    y = 5 + 0.3 * noise + torch.stack([effect[nodes].sum(0) for nodes in sets])
    y[torch.rand(400, 3, generator=generator) < 0.2] = math.nan
    tables = on_one_relation(tables_of(sets, y), 30, [[0, 26, 27], [1, 3, 5]])
    tables.split = torch.tensor([0, 0, 0, 1] * 90 + [1, 2] * 20, dtype=torch.int8)
    return tables


def some_weights(tables: Tables) -> torch.Tensor:
    """Returns a random weight from 0.01 to 100 for each row."""
    generator = torch.Generator().manual_seed(3)
    return 10 ** (4 * torch.rand(len(tables.y), dtype=torch.float64, generator=generator) - 2)


@pytest.mark.parametrize(
    ("sizes", "is_weighted"), [("mixed", False), ("mixed", True), ("pairs", False)]
)
def test_additive_baseline_is_the_ridge_solution(sizes, is_weighted, monkeypatch):
    """The intercept and the slope are not penalised. Weights are scaled to a mean of 1 per score.

    If all rows knock out two nodes, no row identifies the slope, and it is 0.
    """
    tables = mixed_tables()
    if is_weighted:
        tables.weight = some_weights(tables)
    if sizes == "pairs":
        tables.perturbed_ptr = torch.arange(0, 801, 2)
        tables.level = torch.zeros(800, dtype=torch.float64)
        tables.perturbed = torch.randint(26, (800,), generator=torch.Generator().manual_seed(1))
        tables.perturbed[1::2] = (tables.perturbed[::2] + 1 + torch.arange(400) % 20) % 26
    design = dense_design(tables)
    if sizes == "mixed":
        monkeypatch.setattr("baseline.TARGETS_AT_ONCE", 2)
        monkeypatch.setattr("baseline_ridge.ROWS_AT_ONCE", 70)
    monkeypatch.setattr("baseline.PENALTIES", (2.0,))
    found = additive_baseline(tables)
    seen = tables.is_seen()
    assert seen.tolist() == [[True] * 3] * 26 + [[False] * 3] * 4
    unpenalised = [0] if sizes == "pairs" else [0, 1]
    columns = [*unpenalised, *range(2, design.size(1))]
    penalty = 2 * torch.eye(len(columns), dtype=torch.float64)
    penalty[: len(unpenalised)] = 0
    for t in range(3):
        rows = tables.rows("train")
        rows = rows[~tables.y[rows, t].isnan()]
        x = design[rows][:, columns]
        y = tables.y[rows, t]
        weight = torch.ones(len(rows), dtype=torch.float64)
        if is_weighted:
            weight = tables.weight[rows] / tables.weight[rows].mean()
        weighted = x.T * weight
        share = 1 / weight.square().mean()  # effective number of rows, divided by all rows
        solution = torch.linalg.solve(weighted @ x + share * penalty, weighted @ y)
        solution[-4:] = found.imputed[-4:, 0, t]
        prediction = design[:, columns] @ solution
        torch.testing.assert_close(found.prediction[:, t], prediction, rtol=1e-6, atol=1e-6)
        effect = solution[len(unpenalised) :]
        torch.testing.assert_close(found.effect[:, 0, t].double(), effect, rtol=1e-6, atol=1e-6)
        mean = (weight * y).mean()
        std = (weight * (y - mean).square()).mean().sqrt()
        found_mean, found_std = training_mean_and_std(tables)
        assert found_mean[t] == pytest.approx(mean.item())
        assert found_std[t] == pytest.approx(std.item())
    if sizes == "mixed":
        assert found.effect.shape == (30, 1, 3)
        assert found.slope.sub(1).abs().max() < 0.6
        assert found.intercept.sub(5).abs().max() < 0.6
    else:
        assert (found.slope == 0).all()


@pytest.mark.parametrize("loss", ["squared", "binary"])
def test_the_baseline_of_a_target_does_not_depend_on_other_targets(loss):
    """Different scores of the other targets are missing."""
    tables = mixed_tables()
    if loss == "binary":
        tables.y = above_median(tables.y)
    together = additive_baseline(tables, loss)
    alone = [additive_baseline(replace(tables, y=y), loss) for y in tables.y.split(1, dim=1)]
    names = vars(together).keys() - {"basis", "is_combined"}
    assert len(names) == 6
    for name in names:
        expected = torch.cat([getattr(baseline, name) for baseline in alone], dim=-1)
        torch.testing.assert_close(getattr(together, name), expected, rtol=1e-7, atol=1e-7)


KINDS = {
    "deletions": [0.0],
    "losses": [0.3, 0.6],
    "gains": [2.0, 10.0],
    "deletions and losses": [0.0, 0.5],
    "all": [0.0, 0.5, 10.0],
}


@pytest.mark.parametrize("others", KINDS)
@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("loss", ["squared", pytest.param("binary", marks=pytest.mark.slow)])
def test_the_baseline_of_a_target_does_not_depend_on_the_levels_of_rows_that_lack_it(
    loss, own, others
):
    """Its responses do not depend on them either, at any level.

    The rows of both targets decide the basis in which the effects are stored.
    """
    tables = levelled_tables(KINDS[own], 0.5 * (len(KINDS[own]) > 1), num_rows=300)
    further = levelled_tables(KINDS[others], 0.5 * (len(KINDS[others]) > 1), 1, num_rows=300)
    asked = tables_of([{k % 80: (0.0, 0.3, 3.0)[k % 3]} for k in range(240)], torch.zeros(240))
    if loss == "binary":
        tables.y = above_median(tables.y)
        further.y = above_median(further.y)
    blocks = [tables, further, asked]
    counts = torch.cat([block.perturbed_ptr.diff() for block in blocks])
    y = torch.full((len(counts), 2), math.nan, dtype=torch.float64)
    y[300:600, :1] = further.y
    y[:300, 1:] = tables.y
    both = replace(
        tables,
        perturbed=torch.cat([block.perturbed for block in blocks]),
        perturbed_ptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        level=torch.cat([block.level for block in blocks]),
        y=y,
        split=torch.cat([tables.split, further.split, torch.full((240,), 2)]),
        targets=["a", "b"],
    )
    alone = additive_baseline(replace(both, y=y[:, 1:]), loss)
    beside = additive_baseline(both, loss)
    _, std = training_mean_and_std(tables)
    difference = beside.prediction[:, 1] - alone.prediction[:, 0]
    assert difference.abs().max() < 1e-4 * std

    def responses(baseline: Baseline, target: int) -> torch.Tensor:
        dose = doses(asked.level) @ baseline.basis
        return (dose * baseline.effect[asked.perturbed, :, target]).sum(dim=1)

    difference = responses(beside, 1) - responses(alone, 0)
    assert difference.abs().max() < 1e-4 * std


def test_an_unseen_node_gets_the_mean_effect_of_nodes_one_and_two_hops_away():
    """The imputed effects equal dense products.

    For each score, they are computed on the graph with the smallest error on the nodes that are
    seen for the score. Node 6 does not have edges, and node 7 only has an edge to itself. Both get
    the mean effect of all seen nodes.
    """
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(6, (2, 14), generator=generator)
    edge_index[:, 0] = 7
    edge_type = torch.tensor([0] * 9 + [1] * 5)
    weight = torch.rand(14, dtype=torch.float64, generator=generator) + 0.5
    perturbed, perturbed_ptr = pack_sets([[0]])
    tables = Tables(
        genes=list("abcdefgh"),
        relations=["r", "s"],
        edge_index=edge_index,
        edge_type=edge_type,
        edge_weight=weight,
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.ones(1),
    )
    is_seen = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 1]]).bool().T
    effect = torch.randn(8, 2, dtype=torch.float64, generator=generator) * is_seen
    node_weight = (torch.rand(8, 2, dtype=torch.float64, generator=generator) + 0.1) * is_seen
    found = impute_effects(tables, node_weight, effect)

    def kernel_of(edges: torch.Tensor) -> torch.Tensor:
        adjacency = torch.zeros(8, 8, dtype=torch.float64)
        for (source, target), value in zip(
            edge_index[:, edges].T.tolist(), weight[edges], strict=True
        ):
            if source != target:
                adjacency[source, target] += value
                adjacency[target, source] += value
        degree = adjacency.sum(1)
        adjacency = adjacency / (degree.outer(degree)).sqrt().where(adjacency > 0, 1.0)
        return (adjacency @ adjacency + adjacency).fill_diagonal_(0.0)

    kernels = [kernel_of(edge_type >= 0), kernel_of(edge_type == 0), kernel_of(edge_type == 1)]
    chosen = set()
    for t in range(2):
        seen = is_seen[:, t].nonzero().flatten()
        own = effect[seen, t]
        importance = node_weight[seen, t]
        mean = (importance * own).sum() / importance.sum()
        errors = []
        imputed = []
        for kernel in kernels:
            for shrinkage in PENALTIES:
                total = kernel[:, seen] @ importance + shrinkage
                values = (kernel[:, seen] @ (importance * own) + shrinkage * mean) / total
                errors.append((importance * (values[seen] - own).square()).sum().item())
                imputed.append(values)
        least = errors.index(min(errors))
        chosen.add(least // len(PENALTIES))
        torch.testing.assert_close(found[:, t], imputed[least])
        torch.testing.assert_close(found[6:, t], mean.expand(2))
    assert chosen != {0}  # for one score, a single relation is better than all relations


def test_the_logistic_baseline_is_the_penalised_maximum_of_the_likelihood(monkeypatch):
    tables = mixed_tables()
    tables.y = above_median(tables.y)
    tables.weight = some_weights(tables)
    monkeypatch.setattr("baseline.PENALTIES", (2.0,))
    found = additive_baseline(tables, "binary")
    design = dense_design(tables)
    seen = tables.is_seen()
    for t in range(3):
        rows = tables.rows("train")
        rows = rows[~tables.y[rows, t].isnan()]
        line = torch.stack([found.intercept[t], found.slope[t]])
        parameters = torch.cat([line, found.effect[:, 0, t]])
        probability = (design @ parameters).sigmoid()
        torch.testing.assert_close(found.prediction[:, t], probability)
        weight = tables.weight[rows] / tables.weight[rows].mean()
        gradient = design[rows].T @ (weight * (probability[rows] - tables.y[rows, t]))
        share = 1 / weight.square().mean()  # effective number of rows, divided by all rows
        gradient[2:] += 2 * share * parameters[2:] * seen[:, t]
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


def test_the_validation_rows_choose_the_penalty_of_the_additive_baseline(monkeypatch):
    tables = synthetic_tables(PRESETS["small"], seed=1)
    tables.split = random_split(tables, DataConfig())
    order = torch.randperm(len(tables.y), generator=torch.Generator().manual_seed(0))
    tables.y = tables.y[order]  # in random order, the scores are only noise
    val = tables.rows("val")

    def prediction(*penalties: float) -> torch.Tensor:
        monkeypatch.setattr("baseline.PENALTIES", penalties)
        return additive_baseline(tables).prediction

    errors = [(prediction(p) - tables.y)[val].square().mean() for p in (0.1, 10.0, 1000.0)]
    assert errors[0] > errors[1] > errors[2]
    torch.testing.assert_close(prediction(0.1, 10.0, 1000.0), prediction(1000.0))


def test_noisy_rows_hardly_affect_the_fit_and_the_choice_of_the_penalty():
    """The weight of a row is 1 / variance. The variances differ by a factor of a million."""
    random = Random(0)
    sets = [random.sample(range(100), 2) for _ in range(1500)]
    generator = torch.Generator().manual_seed(0)
    effect = torch.randn(100, dtype=torch.float64, generator=generator)
    truth = torch.stack([effect[nodes].sum() for nodes in sets])
    sd = 10 ** (3 * torch.rand(len(sets), dtype=torch.float64, generator=generator) - 1.5)
    perturbed, perturbed_ptr = pack_sets(sets)
    tables = Tables(
        genes=[f"g{i:02}" for i in range(100)],
        relations=["r"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=truth + sd * torch.randn(len(sets), dtype=torch.float64, generator=generator),
        split=torch.tensor([0, 0, 0, 1, 2] * 300, dtype=torch.int8),
    )
    test = tables.rows("test")

    def pearson_with_truth() -> float:
        prediction = additive_baseline(tables).prediction[test, 0]
        return torch.corrcoef(torch.stack([prediction, truth[test]]))[0, 1].item()

    assert pearson_with_truth() < 0.9
    tables.weight = sd**-2
    assert pearson_with_truth() > 0.99
    prediction = additive_baseline(tables).prediction
    tables.weight = tables.weight * 1e6
    torch.testing.assert_close(additive_baseline(tables).prediction, prediction)


def test_a_column_that_is_solved_early_does_not_change_until_all_columns_are_solved():
    """Otherwise, its residual would become too small to divide by."""
    matrix = torch.logspace(-1, 3, 200, dtype=torch.float64).diag()
    b = torch.randn(200, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b[5:, 1:] = 0
    least = 1e-24 * b.square().sum(0)
    x = conjugate_gradients(lambda x: matrix @ x, b, torch.ones_like(b), least)
    torch.testing.assert_close((matrix @ x)[:, 1:], b[:, 1:], rtol=0, atol=1e-9)


def test_the_additive_baseline_is_a_constant_if_no_training_row_knocks_out_a_node():
    perturbed, perturbed_ptr = pack_sets([[], [], [0], [0, 1]])
    tables = Tables(
        genes=["a", "b"],
        relations=["r"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float64),
        split=torch.tensor([0, 0, 1, 2], dtype=torch.int8),
    )
    found = additive_baseline(tables)
    torch.testing.assert_close(found.prediction, torch.full((4, 1), 1.5, dtype=torch.float64))
    assert (found.effect == 0).all()
    assert found.slope == 0


@pytest.mark.parametrize("num_test", [1, 30])
def test_the_baseline_does_not_depend_on_which_rows_are_tested(num_test):
    """All training rows delete one node, so they cannot identify the slope.

    The baseline of a pair is then the intercept plus both effects.
    """
    sets = [[0]] * 4 + [[1], [2]] + [[0], [0, 1], [0, 2]] + [[0, 1, 2]] * num_test
    perturbed, perturbed_ptr = pack_sets(sets)
    y = torch.tensor([3, 3.1, 2.9, 3, 1, 0.5, 3, 4, 3.5] + [4.5] * num_test, dtype=torch.float64)
    tables = Tables(
        genes=["a", "b", "c"],
        relations=["r"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=y,
        split=torch.tensor([0] * 6 + [1] * 3 + [2] * num_test, dtype=torch.int8),
    )
    found = additive_baseline(tables)
    assert found.slope == 0
    effect = found.effect[:, 0, 0].double()
    expected = found.intercept + effect[0] + effect[1]
    torch.testing.assert_close(found.prediction[7], expected, rtol=1e-6, atol=1e-6)


def test_additive_baseline_does_not_depend_on_the_unit_of_the_scores():
    tables = synthetic_tables(PRESETS["small"], seed=1)
    tables.split = random_split(tables, DataConfig())
    reference = additive_baseline(tables).prediction
    tables.y *= 1e-12
    found = 1e12 * additive_baseline(tables).prediction
    torch.testing.assert_close(found, reference, rtol=1e-8, atol=1e-8)


# ---- High levels ---------------------------------------------------------------------------------
def levelled_tables(
    levels: list[float], share: float, seed: int = 0, num_rows: int = 1000
) -> Tables:
    """Returns samples of up to three of 80 genes, with additive scores and noise.

    The first of `levels` is the most frequent. A `share` of the knock-outs have other levels.
    """
    random = Random(seed)
    weights = [1 - share, *[share / (len(levels) - 1)] * (len(levels) - 1)] if share else [1]
    sets = []
    for _ in range(num_rows):
        nodes = random.sample(range(80), random.randint(0, 3))
        sets.append(dict(zip(nodes, random.choices(levels, weights, k=3), strict=False)))
    tables = on_one_relation(tables_of(sets, torch.zeros(num_rows, dtype=torch.float64)), 80)
    tables.split = torch.tensor(random.choices([0, 1, 2], [14, 3, 3], k=num_rows), dtype=torch.int8)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(82, 1, dtype=torch.float64, generator=generator)
    noise = torch.randn(num_rows, 1, dtype=torch.float64, generator=generator)
    tables.y = 3 + dense_design(tables)[:, 2:] @ x[2:] + 0.5 * noise
    return tables


def least_squares(tables: Tables, basis: torch.Tensor, penalty: float) -> np.ndarray:
    """Returns the predictions of a ridge regression for the only score, [n], by a dense solver."""
    design = dense_design(tables, basis).numpy()
    train = tables.rows("train")
    penalties = np.diag([0, 0, *[math.sqrt(penalty)] * (design.shape[1] - 2)])
    matrix = np.concatenate([design[train], penalties])
    scale = np.linalg.norm(matrix, axis=0)
    right = np.concatenate([tables.y[train, 0].numpy(), np.zeros(len(penalties))])
    solution = np.linalg.lstsq(matrix / scale, right, rcond=1e-15)[0] / scale
    return design @ solution


@pytest.mark.parametrize("penalty", [0.1, 1000.0])
@pytest.mark.parametrize(
    ("levels", "share"),
    [([0.0, 1e4], 0.01), ([0.0, 0.3, 1e4], 0.5), ([0.9999], 0), ([0.999, 0.9999, 1000], 0.4)],
)
def test_the_fit_equals_a_dense_solution_for_levels_up_to_10000_and_close_to_1(
    monkeypatch, levels, share, penalty
):
    monkeypatch.setattr("baseline.PENALTIES", (penalty,))
    tables = levelled_tables(levels, share)
    found = additive_baseline(tables)
    assert tables.is_seen().all()
    expected = least_squares(tables, found.basis, penalty)
    _, std = training_mean_and_std(tables)
    difference = np.abs(found.prediction[:, 0].numpy() - expected) / std.item()
    assert difference.max() < 1e-5


@pytest.mark.parametrize("penalty", [0.1, 1000.0])
@pytest.mark.parametrize(
    ("levels", "share"), [([0.0, 100.0], 0.5), ([0.0, 1e4], 0.1), ([0.0, 0.3, 1e4], 0.5)]
)
def test_the_gradient_of_a_logistic_fit_vanishes_for_levels_up_to_10000(
    monkeypatch, levels, share, penalty
):
    monkeypatch.setattr("baseline.PENALTIES", (penalty,))
    tables = levelled_tables(levels, share)
    tables.y = above_median(tables.y)
    found = additive_baseline(tables, "binary")
    train = tables.rows("train")
    design = dense_design(tables, found.basis)[train]
    gradient = design.T @ (found.prediction - tables.y)[train, 0]
    gradient[2:] += penalty * found.effect.double().flatten()
    assert (gradient / design.norm(dim=0).clamp(min=1)).abs().max() < 1e-4


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_logistic_fit_of_equal_scores_ends(value):
    """It ends although the likelihood of such scores does not have a maximum."""
    tables = levelled_tables([0.0], 0)
    tables.y = torch.full_like(tables.y, value)
    found = additive_baseline(tables, "binary")
    torch.testing.assert_close(found.prediction, tables.y, rtol=0, atol=1e-5)
