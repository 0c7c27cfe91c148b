"""Metrics, ranks and intervals beside their definitions, computed in another way."""

import math

import numpy as np
import pytest
import torch

from analyse_intervals import (
    average_precision,
    interval,
    resampled_mean,
    resampled_pearson,
    uncertainty,
)
from analyse_metrics import target_metrics
from metrics import METRICS, as_ranked, first_metric, mse, pearson, quality, r2, rank, spearman
from tests.tools.runs import predictions_of, read_metrics

FIRST = first_metric()


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*size: int) -> torch.Tensor:
    """Returns numbers from -4 to 4, of which many are equal."""
    return torch.randint(-4, 5, size, generator=torch.Generator().manual_seed(0)).double()


# ---- Which model is the best ---------------------------------------------------------------------
def test_an_own_metric_is_logged_and_chooses_the_best_model(train, tmp_path):
    train(0).check()  # whose best validation has no such metric
    result = train(0, "optim.epochs=3", "optim.lr=0.1", fault="own_metric").check()
    rows = read_metrics(tmp_path / "runs/default", "val")[2:]
    assert len(rows) == 2
    for row in rows:
        assert row["worst"] == -row[FIRST]
        assert row["baseline_worst"] == -row[f"baseline_{FIRST}"]
    (test,) = read_metrics(tmp_path / "runs/default", "test")
    assert test["best_step"] == max(rows, key=lambda row: row["worst"])["step"]
    title = f"loss {test['loss']:.4f}"
    for name in ("worst", *METRICS):
        baseline = test[f"baseline_{name}"]
        title += f", {name.title()} {test[name]:.4f}, baseline {baseline:.4f}"
    assert f"test      {title}" in result.stdout


def test_models_with_an_undefined_metric_are_ranked_by_loss():
    """A constant prediction, whose Pearson is undefined, ranks as one of 0.

    A loss of no rows, which is nan, is the worst.
    """
    results = [
        {FIRST: -0.5, "loss": math.nan},
        {FIRST: -0.5, "loss": 1.0},
        {FIRST: math.nan, "loss": math.nan},
        {FIRST: 0.0, "loss": 3.0},
        {FIRST: math.nan, "loss": 2.0},
        {FIRST: math.nan, "loss": 1.0},
        {FIRST: 0.1, "loss": math.nan},
        {FIRST: 0.1, "loss": 4.0},
    ]
    assert sorted([results[i] for i in (6, 2, 0, 7, 3, 1, 5, 4)], key=quality) == results


def test_the_weighted_metric_chooses_the_best_model_if_there_is_one():
    worse = {FIRST: 0.9, f"weighted_{FIRST}": 0.1, "loss": 1.0}
    better = {FIRST: 0.1, f"weighted_{FIRST}": 0.9, "loss": 1.0}
    assert quality(better) > quality(worse)


# ---- Figures of scores and predictions -----------------------------------------------------------
def test_a_whole_weight_counts_as_that_many_rows():
    y, prediction = whole_numbers(2, 60, 2)
    y[::7, 0] = math.nan
    weight = 1 + torch.arange(60) % 4
    expected = pearson(y.repeat_interleave(weight, 0), prediction.repeat_interleave(weight, 0))
    torch.testing.assert_close(pearson(y, prediction, weight.double().unsqueeze(1)), expected)


def test_probabilities_are_ranked_however_small_they_are():
    logit = 10 * normal(50, 1) - 25
    y = (normal(50, 1, seed=1) > 0).double()
    ranks = rank(logit)
    assert torch.equal(rank(as_ranked(y, logit.sigmoid())), ranks)
    torch.testing.assert_close(spearman(y, logit.sigmoid()), pearson(rank(y), ranks))


def test_metrics_equal_their_definitions():
    y, prediction = whole_numbers(2, 60, 1)
    noise = 1e-12 * normal(60, 1)
    rho = spearman(y, prediction)
    assert torch.equal(spearman(y, prediction * (1 + noise)), rho)  # rounding orders nothing
    expected_y, expected_prediction = y[:, 0].numpy(), prediction[:, 0].numpy()

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])

    r = np.corrcoef(expected_y, expected_prediction)[0, 1]
    assert pearson(y, prediction).item() == pytest.approx(r)
    expected = np.corrcoef(ranks(expected_y), ranks(expected_prediction))[0, 1]
    assert rho.item() == pytest.approx(expected)
    error = (expected_y - expected_prediction) ** 2
    assert mse(y, prediction).item() == pytest.approx(error.mean())


def test_figures_equal_their_definitions():
    y, prediction, baseline = whole_numbers(3, 60, 1)
    found = target_metrics(predictions_of(y, prediction, baseline), threshold=-1.5)
    missing = torch.full((20, 1), math.nan)
    rows = predictions_of(
        torch.cat([y, missing]),
        torch.cat([prediction, normal(20, 1)]),
        torch.cat([baseline, normal(20, 1)]),
    )
    with_gaps = target_metrics(rows, threshold=-1.5)
    for name, value in found.items():
        torch.testing.assert_close(with_gaps[name], value)
    found = {name: value.item() for name, value in found.items()}
    ones = target_metrics(predictions_of((y < -1.5).double(), -prediction, baseline), loss="binary")
    for name in ("auroc", "average_precision"):
        assert ones[name].item() == found[name]
    y, prediction, baseline = (values[:, 0].numpy() for values in (y, prediction, baseline))
    squared_error = (y - prediction) ** 2
    assert found["mse"] == pytest.approx(squared_error.mean())
    explained = 1 - squared_error.sum() / ((y - y.mean()) ** 2).sum()
    assert found["r2"] == pytest.approx(explained)
    assert found["pearson"] == pytest.approx(np.corrcoef(y, prediction)[0, 1])
    assert found["baseline_pearson"] == pytest.approx(np.corrcoef(y, baseline)[0, 1])
    hit = prediction[y < -1.5]
    miss = prediction[y >= -1.5]
    wins = (hit[:, None] < miss).mean() + (hit[:, None] == miss).mean() / 2
    assert found["auroc"] == pytest.approx(wins)
    precision = [(y[prediction <= value] < -1.5).mean() for value in hit]
    assert found["average_precision"] == pytest.approx(np.mean(precision))


def test_scores_that_are_constant_have_no_r2():
    y = torch.ones(5, 1).double()
    prediction = normal(5, 1)
    assert r2(y, prediction).isnan()
    assert pearson(y, prediction).isnan()
    assert mse(y, prediction) > 0


def test_rows_of_several_targets_are_found_as_those_of_each_alone():
    """Without the warning of torch.searchsorted about memory that is not contiguous."""
    certainty = normal(40, 3)
    certainty[::7, 1] = math.nan
    positive = (normal(40, 3, seed=1) > 0.5) & ~certainty.isnan()
    found = average_precision(positive, certainty)
    for target in range(3):
        alone = average_precision(positive[:, [target]], certainty[:, [target]])
        torch.testing.assert_close(found[[target]], alone)


def test_ranks_are_those_of_each_target_alone():
    """Equal values share the mean rank, a nan takes none, infinite values come last or first."""
    values = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0)).double()
    values[::3, 1] = math.nan
    values[:, 2] = math.nan
    values[1, 1] = values[5, 1] = math.inf
    values[4, 1] = -math.inf
    for column, found in zip(values.T, rank(values).T, strict=True):
        expected = [((column < v).sum() + ((column == v).sum() + 1) / 2).item() for v in column]
        expected = torch.tensor(expected, dtype=torch.float64).where(~column.isnan(), math.nan)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ---- Intervals -----------------------------------------------------------------------------------
def one_each(cluster: torch.Tensor) -> torch.Tensor:
    """Returns clusters of rows [n] that have no second one, [n, 2]."""
    return torch.stack([cluster, torch.full_like(cluster, -1)], dim=1)


def test_resampled_pearson_equals_that_of_torch_on_the_same_rows():
    """The third target's scores are constant, the second's predictions: it counts as 0."""
    y = torch.stack([normal(50), 1000 + normal(50, seed=1), torch.full((50,), 0.1).double()], dim=1)
    prediction = torch.stack(
        [y[:, 0] + normal(50, seed=2), torch.full((50,), 0.7).double(), normal(50)], dim=1
    )
    y[10:15, 0] = math.nan
    generator = torch.Generator().manual_seed(0)
    for r in resampled_pearson(y, prediction, one_each(torch.arange(50)), 5):
        rows = torch.randint(50, (50,), generator=generator)
        rows = rows[~y[rows, 0].isnan()]
        expected = torch.corrcoef(torch.stack([y[rows, 0], prediction[rows, 0]]))[0, 1]
        torch.testing.assert_close(r, expected / 2)


def test_a_resample_of_one_row_has_no_pearson():
    y = normal(3, 1)
    prediction = normal(3, 1, seed=1)
    generator = torch.Generator().manual_seed(0)
    undefined = 0
    for r in resampled_pearson(y, prediction, one_each(torch.arange(3)), 200):
        rows = torch.randint(3, (3,), generator=generator)
        if len(rows.unique()) == 1:
            undefined += 1
            assert r.isnan()
        else:
            expected = torch.corrcoef(torch.cat([y, prediction], dim=1)[rows].T)[0, 1]
            torch.testing.assert_close(r, expected)
    assert undefined > 10


def test_a_resampled_mean_is_of_the_rows_of_a_resampled_pearson():
    values = normal(50)
    values[10:15] = math.nan
    generator = torch.Generator().manual_seed(0)
    found = resampled_mean(values, one_each(torch.arange(50)), 70)
    assert len(found) == 70
    for mean in found:
        rows = torch.randint(50, (50,), generator=generator)
        torch.testing.assert_close(mean, values[rows].nanmean())


def test_rows_of_a_unit_are_drawn_together():
    """Units of 1 to 9 rows in any order, whatever their numbers."""
    y = normal(45, 1)
    y[3] = math.nan
    prediction = normal(45, 1, seed=1)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(0))
    cluster = 7 * torch.arange(9).repeat_interleave(torch.arange(1, 10))[order] + 20
    generator = torch.Generator().manual_seed(0)
    means = resampled_mean(y[:, 0], one_each(cluster), 40)
    found = resampled_pearson(y, prediction, one_each(cluster), 40)
    for r, mean in zip(found, means, strict=True):
        drawn = torch.randint(9, (9,), generator=generator)
        rows = torch.cat([(cluster == 7 * number + 20).nonzero().flatten() for number in drawn])
        torch.testing.assert_close(mean, y[rows, 0].nanmean())
        rows = rows[~y[rows, 0].isnan()]
        expected = torch.corrcoef(torch.cat([y, prediction], dim=1)[rows].T)[0, 1]
        torch.testing.assert_close(r, expected)


def test_a_row_of_two_clusters_counts_as_often_as_the_product_of_both():
    y = normal(30, 1)
    prediction = normal(30, 1, seed=1)
    cluster = torch.combinations(torch.arange(9))[:30]
    cluster[::5, 1] = -1
    generator = torch.Generator().manual_seed(0)
    for r in resampled_pearson(y, prediction, cluster, 40):
        drawn = torch.randint(9, (9,), generator=generator).tolist()
        count = [
            drawn.count(first) * (drawn.count(second) if second >= 0 else 1)
            for first, second in cluster.tolist()
        ]
        rows = torch.arange(30).repeat_interleave(torch.tensor(count))
        expected = torch.corrcoef(torch.cat([y, prediction], dim=1)[rows].T)[0, 1]
        torch.testing.assert_close(r, expected)


def test_rows_that_all_have_the_same_two_clusters_have_no_interval():
    y = normal(20, 1)
    cluster = torch.tensor([[3, 7]]).repeat(20, 1)
    assert resampled_pearson(y, normal(20, 1, seed=1), cluster, 10).isnan().all()


@pytest.mark.parametrize("copies", [2, 10])
def test_replicates_tell_nothing_more_of_an_interval(copies):
    y = normal(60, 2)
    prediction = y + normal(60, 2, seed=1)
    cluster = one_each(torch.arange(60))
    expected = resampled_pearson(y, prediction, cluster, 100)
    rows = torch.arange(60).repeat(copies)
    found = resampled_pearson(y[rows], prediction[rows], cluster[rows], 100)
    torch.testing.assert_close(found, expected)
    found = resampled_mean(y[rows, 0], cluster[rows], 100)
    torch.testing.assert_close(found, resampled_mean(y[:, 0], cluster, 100))


@pytest.mark.parametrize("num_rows", [1, 20])
def test_fewer_than_two_clusters_have_no_interval(num_rows):
    y = normal(num_rows, 2)
    cluster = one_each(torch.full((num_rows,), 5))
    assert resampled_pearson(y, normal(num_rows, 2, seed=1), cluster, 10).isnan().all()
    assert resampled_mean(y[:, 0], cluster, 10).isnan().all()
    low, high = interval(resampled_mean(y[:, 0], cluster, 10))
    assert math.isnan(low)
    assert math.isnan(high)


def test_an_interval_holds_the_middle():
    assert interval(torch.linspace(0, 1, 1001)) == pytest.approx([0.025, 0.975])


def test_the_spread_tells_the_error_or_does_not():
    sd = torch.rand(1000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(1000, 2, dtype=torch.float64)
    y[::7, 1] = math.nan
    correlation, errors = uncertainty(y, 3 * sd, sd)
    assert correlation == pytest.approx(1.0)
    assert errors == pytest.approx([0.3, 0.9, 1.5, 2.1, 2.7], abs=0.1)
    correlation, errors = uncertainty(y, sd.flip(0), sd)
    assert abs(correlation) < 0.1
    assert max(errors) - min(errors) < 0.1
