"""Metrics of unusual scores, and the choice of the best model.

test_oracle.py compares metrics with their definitions.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import metrics
from analyse_metrics import r2
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
from tests.tools.runs import read_metrics

FIRST = first_metric()


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
    y, prediction, first, second = normal(4, 60, 1)
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
        metrics.check_metrics(tables.y[tables.rows("train")], LOSSES[loss](mean, std), loss)


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
def test_probabilities_are_ranked_however_small_they_are():
    logit = 10 * normal(50, 1) - 25
    y = (normal(50, 1, seed=1) > 0).double()
    ranks = rank(logit)
    assert torch.equal(rank(as_ranked(y, logit.sigmoid())), ranks)
    torch.testing.assert_close(spearman(y, logit.sigmoid()), pearson(rank(y), ranks))


def test_constant_scores_have_no_r2_and_no_pearson():
    y = torch.ones(5, 1).double()
    prediction = normal(5, 1)
    assert r2(y, prediction).isnan()
    assert pearson(y, prediction).isnan()
    assert mse(y, prediction) > 0
