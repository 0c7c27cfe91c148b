"""The additive baseline of unusual tables. test_oracle.py compares it with dense solutions."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from baseline import Baseline, additive_baseline
from baseline_ridge import conjugate_gradients
from data import training_mean_and_std
from data_tables import Tables
from mask import doses
from tests.sets import tables_of
from tests.template.tables import above_median, dense_design, on_one_relation

KINDS = {
    "deletions": [0.0],
    "losses": [0.3, 0.6],
    "gains": [2.0, 10.0],
    "deletions and losses": [0.0, 0.5],
    "all": [0.0, 0.5, 10.0],
}


@pytest.mark.parametrize("others", ["deletions and losses", "all"])
@pytest.mark.parametrize("own", KINDS)
def test_the_baseline_of_a_target_does_not_depend_on_the_levels_of_rows_that_lack_it(own, others):
    """Its responses do not depend on them either, at any level.

    The rows of both targets decide the basis in which the effects are stored.
    """
    tables = levelled_tables(KINDS[own], 0.5 * (len(KINDS[own]) > 1), num_rows=300)
    further = levelled_tables(KINDS[others], 0.5 * (len(KINDS[others]) > 1), 1, num_rows=300)
    asked = tables_of([{k % 80: (0.0, 0.3, 3.0)[k % 3]} for k in range(240)], torch.zeros(240))
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
    alone = additive_baseline(replace(both, y=y[:, 1:]))
    beside = additive_baseline(both)
    _, std = training_mean_and_std(tables)
    difference = beside.prediction[:, 1] - alone.prediction[:, 0]
    assert difference.abs().max() < 1e-4 * std

    def responses(baseline: Baseline, target: int) -> torch.Tensor:
        dose = doses(asked.level) @ baseline.basis
        return (dose * baseline.effect[asked.perturbed, :, target]).sum(dim=1)

    difference = responses(beside, 1) - responses(alone, 0)
    assert difference.abs().max() < 1e-4 * std


def test_noisy_rows_hardly_affect_the_fit_and_the_choice_of_the_penalty():
    """The weight of a row is 1 / variance. The variances differ by a factor of a million."""
    random = Random(0)
    sets = [random.sample(range(100), 2) for _ in range(1500)]
    generator = torch.Generator().manual_seed(0)
    effect = torch.randn(100, dtype=torch.float64, generator=generator)
    truth = torch.stack([effect[nodes].sum() for nodes in sets])
    sd = 10 ** (3 * torch.rand(len(sets), dtype=torch.float64, generator=generator) - 1.5)
    y = truth + sd * torch.randn(len(sets), dtype=torch.float64, generator=generator)
    tables = on_one_relation(tables_of(sets, y), 100)
    tables.split = torch.tensor([0, 0, 0, 1, 2] * 300, dtype=torch.int8)
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
    y = torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float64)
    tables = on_one_relation(tables_of([[], [], [0], [0, 1]], y), 2)
    tables.split = torch.tensor([0, 0, 1, 2], dtype=torch.int8)
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
    y = torch.tensor([3, 3.1, 2.9, 3, 1, 0.5, 3, 4, 3.5] + [4.5] * num_test, dtype=torch.float64)
    tables = on_one_relation(tables_of(sets, y), 3)
    tables.split = torch.tensor([0] * 6 + [1] * 3 + [2] * num_test, dtype=torch.int8)
    found = additive_baseline(tables)
    assert found.slope == 0
    effect = found.effect[:, 0, 0].double()
    expected = found.intercept + effect[0] + effect[1]
    torch.testing.assert_close(found.prediction[7], expected, rtol=1e-6, atol=1e-6)


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
