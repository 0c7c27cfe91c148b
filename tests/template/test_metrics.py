"""Metrics and ranks, compared with simple implementations of their definitions."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import metrics
import task
from analyse_metrics import average_precision, r2, target_metrics
from data import training_mean_and_std
from errors import UserError
from losses import LOSSES
from metrics import (
    METRICS,
    as_ranked,
    first_metric,
    metrics_beside_rivals,
    metrics_text,
    mse,
    pearson,
    quality,
    rank,
    spearman,
)
from tests.template.results import normal
from tests.template.tables import additive_tables
from tests.template.tasks import predictions_of
from tests.tools.runs import read_metrics

FIRST = first_metric()


def whole_numbers(*size: int) -> torch.Tensor:
    """Returns whole numbers from -4 to 4, so many of them are equal."""
    return torch.randint(-4, 5, size, generator=torch.Generator().manual_seed(0)).double()


# ---- The best model ------------------------------------------------------------------------------
def test_a_custom_metric_is_logged_and_chooses_the_best_model(train, tmp_path):
    train(0).check()  # its best validation does not have the custom metric
    result = train(0, "optim.epochs=3", "optim.lr=0.1", fault="own_metric").check()
    rows = read_metrics(tmp_path / "runs/default", "val")[2:]
    assert len(rows) == 2
    for row in rows:
        assert row["doubled"] == 2 * row[FIRST]
        assert row["baseline_doubled"] == 2 * row[f"baseline_{FIRST}"]
    (test,) = read_metrics(tmp_path / "runs/default", "test")
    assert test["best_step"] == max(rows, key=lambda row: row["doubled"])["step"]
    title = f"loss {test['loss']:.4f}"
    for name in ("doubled", *METRICS):
        baseline = test[f"baseline_{name}"]
        title += f", {name.title()} {test[name]:.4f}, baseline {baseline:.4f}"
    assert f"test      {title}" in result.stdout


def test_each_metric_is_followed_by_the_metric_of_every_rival():
    y, prediction, first, second = whole_numbers(4, 60, 1)
    rivals = {"first": first, "second": second}
    weight = torch.arange(60.0).double().unsqueeze(1)
    found = metrics_beside_rivals(y, {"prediction": prediction}, rivals, weight)
    names = []
    for name in METRICS:
        names += [f"{rival}{name}" for rival in ("", "first_", "second_")]
    assert list(found) == names
    assert found[f"second_{FIRST}"] == METRICS[FIRST](y, second, weight)
    numbers = {name: value.item() for name, value in found.items()}
    text = metrics_text({"loss": 1.0, **numbers}, rivals)
    of_rivals = [f"{rival} {numbers[f'{rival}_{FIRST}']:.4f}" for rival in rivals]
    assert text.startswith(f"loss 1.0000, {FIRST.title()} {numbers[FIRST]:.4f}, {of_rivals[0]}")


def test_models_with_an_undefined_metric_are_ranked_by_loss():
    """An undefined metric counts as 0. A loss of nan, as in a split without scores, is worst."""
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
    for worse, better in itertools.pairwise(map(quality, results)):
        assert worse < better


def check_with_first_metric(metric: Callable[..., torch.Tensor], loss: str = "squared") -> None:
    """Checks `METRICS` that begin with a metric, on the tables of 300 rows."""
    tables = additive_tables(1.0)
    mean, std = training_mean_and_std(tables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "METRICS", {"first": metric})
        patch.setattr(task, "METRICS", {"first": metric})
        task.check_metrics(tables, LOSSES[loss](mean, std), loss)


@pytest.mark.parametrize("metric", [mse, lambda *arguments: mse(*arguments).sqrt()])
def test_a_first_metric_that_is_an_error_is_refused(metric):
    with pytest.raises(UserError, match="first, is smaller for better predictions"):
        check_with_first_metric(metric)


def test_other_first_metrics_are_accepted():
    def accuracy(y, prediction, weight):
        return (y == prediction).double().mean(dim=0)

    def undefined(y, prediction, weight):
        return y.new_full((y.size(1),), math.nan)

    def top_share(y, prediction, weight, share=0.1):
        return (prediction > 1 - share).double().mean(dim=0)

    for metric in (*METRICS.values(), r2, spearman, accuracy, undefined, top_share):
        check_with_first_metric(metric)


# ---- Metrics -------------------------------------------------------------------------------------
@pytest.mark.parametrize("metric", [pearson, mse, r2])
def test_a_row_with_weight_n_counts_as_n_rows(metric):
    y, prediction = whole_numbers(2, 60, 2)
    y[::7, 0] = math.nan
    weight = 1 + torch.arange(60) % 4
    expected = metric(y.repeat_interleave(weight, 0), prediction.repeat_interleave(weight, 0))
    torch.testing.assert_close(metric(y, prediction, weight.double().unsqueeze(1)), expected)


def test_probabilities_are_ranked_however_small_they_are():
    logit = 10 * normal(50, 1) - 25
    y = (normal(50, 1, seed=1) > 0).double()
    ranks = rank(logit)
    assert torch.equal(rank(as_ranked(y, logit.sigmoid())), ranks)
    torch.testing.assert_close(spearman(y, logit.sigmoid()), pearson(rank(y), ranks))


def test_metrics_equal_their_definitions():
    """There are 60 rows with a score, and 20 rows without a score, which are ignored."""
    y, prediction, baseline = whole_numbers(3, 80, 1)
    y = (y > 1.5).double()
    y[60:] = math.nan
    found = target_metrics(predictions_of(y, prediction, baseline), loss="binary")
    found = {name: value.item() for name, value in found.items()}
    y, prediction, baseline = (values[:60, 0].numpy() for values in (y, prediction, baseline))
    squared_error = (y - prediction) ** 2
    assert found["mse"] == pytest.approx(squared_error.mean())
    assert found["r2"] == pytest.approx(1 - squared_error.mean() / y.var())
    assert found["pearson"] == pytest.approx(np.corrcoef(y, prediction)[0, 1])
    assert found["baseline_pearson"] == pytest.approx(np.corrcoef(y, baseline)[0, 1])
    hit = prediction[y == 1]
    miss = prediction[y == 0]
    wins = (hit[:, None] > miss).mean() + (hit[:, None] == miss).mean() / 2
    assert found["auroc"] == pytest.approx(wins)
    precision = [y[prediction >= value].mean() for value in hit]
    assert found["average_precision"] == pytest.approx(np.mean(precision))


def test_constant_scores_have_no_r2_and_no_pearson():
    y = torch.ones(5, 1).double()
    prediction = normal(5, 1)
    assert r2(y, prediction).isnan()
    assert pearson(y, prediction).isnan()
    assert mse(y, prediction) > 0


def test_average_precision_of_several_targets_equals_that_of_each_target():
    """torch.searchsorted does not warn about non-contiguous memory, which pytest makes an error."""
    certainty = normal(40, 3)
    certainty[::7, 1] = math.nan
    positive = (normal(40, 3, seed=1) > 0.5) & ~certainty.isnan()
    found = average_precision(positive, certainty)
    for target in range(3):
        alone = average_precision(positive[:, [target]], certainty[:, [target]])
        torch.testing.assert_close(found[[target]], alone)


def test_ranks_are_computed_for_each_target_separately():
    """Equal values have their mean rank, nan has no rank, and infinite values are first or last."""
    values = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0)).double()
    values[::3, 1] = math.nan
    values[:, 2] = math.nan
    values[1, 1] = values[5, 1] = math.inf
    values[4, 1] = -math.inf
    for column, found in zip(values.T, rank(values).T, strict=True):
        expected = [((column < v).sum() + ((column == v).sum() + 1) / 2).item() for v in column]
        expected = torch.tensor(expected, dtype=torch.float64).where(~column.isnan(), math.nan)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
