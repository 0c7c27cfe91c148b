"""analyse_metrics.py: metrics of test predictions beside their definitions, also of groups."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import analyse_metrics
from analyse_intervals import resampled_pearson
from analyse_metrics import (
    difference_of_best,
    metrics_by_group,
    metrics_of_rivals,
    target_metrics,
)
from analyse_results import Results
from analyse_text import table, table_of_rivals
from metrics import pearson
from tests.template.results import make_rows, normal
from tests.tools.runs import predictions_of


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Intervals of 100 resamples, in a tenth of the time."""
    monkeypatch.setattr("analyse_metrics.CELLS", 1)


def chosen_rows(rows: Results, chosen: torch.Tensor) -> Results:
    """Returns some of the rows, bool [n]."""
    numbers = chosen.nonzero().flatten().tolist()
    fields = {"targets": rows.targets}
    for name in ("genes", "unseen_genes"):
        fields[name] = [getattr(rows, name)[row] for row in numbers]
    for name in ("unseen", "y", "prediction"):
        fields[name] = getattr(rows, name)[chosen]
    fields["rivals"] = {"baseline": rows.rivals["baseline"][chosen]}
    if rows.sd is not None:
        fields["sd"] = rows.sd[chosen]
    return Results(**fields)


def test_the_noise_ceiling_is_what_predictions_without_an_error_reach():
    """Of 4,000 rows whose scores have a known noise; a third of one score is missing.

    By weight, 1 / sd**2, the noise has the variance 0.5, the truth 1.
    """
    truth = normal(4000, 2)
    sd = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sd = 0.5 + 0.5 * sd
    y = truth + sd.unsqueeze(1) * normal(4000, 2, seed=1)
    y[::3, 1] = math.nan
    rows = replace(predictions_of(y, truth, 0 * truth), sd=sd)
    metrics = {name: values.tolist() for name, values in target_metrics(rows).items()}
    assert metrics["ceiling_r2"] == pytest.approx([0.667, 0.667], abs=0.02)
    assert metrics["r2"] == pytest.approx(metrics["ceiling_r2"], abs=0.02)
    assert metrics["pearson"] == pytest.approx(metrics["ceiling_pearson"], abs=0.02)
    constant = replace(rows, y=0 * truth)
    assert target_metrics(constant)["ceiling_r2"].isnan().all()


def test_ranks_do_not_depend_on_an_offset():
    offset = 1e9
    rows = make_rows(200)
    metrics = target_metrics(rows, threshold=0.5)
    moved = replace(rows, y=rows.y + offset, prediction=rows.prediction + offset)
    found = target_metrics(moved, threshold=offset + 0.5)
    for name in ("spearman", "auroc", "average_precision"):
        torch.testing.assert_close(found[name], metrics[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize("has_sd", [False, True])
def test_groups_are_analysed_as_their_rows_alone(has_sd):
    rows = make_rows(120, 2)
    if has_sd:
        sd = torch.rand(120, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rows = replace(rows, sd=0.1 + 0.2 * sd)
    result = metrics_by_group(rows)
    deletions = rows.deletions()
    assert deletions.tolist()[:7] == [0, 1, 2, 3, 4, 5, 0]
    for name, count in (("by_unseen", rows.unseen[:, 0]), ("by_deletions", deletions)):
        assert result[name].keys() == {"0", "1", "2", "3"}
        for k, group in result[name].items():
            chosen = (count == int(k)) if k != "3" else (count >= 3)
            part = chosen_rows(rows, chosen)
            alone = metrics_by_group(part)
            # Those without genes are one cluster, so that their interval is nan.
            assert json.dumps(group) == json.dumps({key: alone[key] for key in group})
            assert group["n"] == (~part.y.isnan()).any(dim=1).sum()
    for name in result["targets"]["t0"].keys() - {"n"}:
        mean = sum(metrics[name] for metrics in result["targets"].values()) / 2
        assert result[name] == pytest.approx(mean)
    assert "targets" not in metrics_by_group(make_rows(20))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_what_stands_in_metrics_has_columns_and_intervals_and_decides(monkeypatch, is_weighted):
    """The same metric by another name has the same intervals, computed row by row."""

    def own(y, prediction, weight):
        return 1 - pearson(y, prediction, weight)

    monkeypatch.setattr("metrics.METRICS", {"own": own, "pearson": pearson})
    rows = make_rows(40)
    if is_weighted:
        rows.weight = torch.linspace(1, 2, 40).double()
    found = metrics_by_group(rows)
    assert found["own"] == pytest.approx(1 - found["pearson"])
    assert found["baseline_own"] == pytest.approx(1 - found["baseline_pearson"])
    low, high = found["gain"]
    assert found["own_gain"] == pytest.approx([-high, -low])
    header, *_ = table(found, rows.rivals)
    assert "Own" in re.split(r"  +", header)

    good, bad = rows.rivals["baseline"], normal(40, 1, seed=9)
    of_rivals = metrics_of_rivals(replace(rows, rivals={}), {"good": good, "bad": bad}, "squared")
    assert list(of_rivals) == ["bad", "good"]
    assert "own_gain" in of_rivals["bad"]
    assert "strongest without the model: bad" in table_of_rivals(of_rivals)[-1]
    members = {"good": replace(rows, prediction=good), "bad": replace(rows, prediction=bad)}
    best = difference_of_best(members, "squared")
    assert best["runs"] == ["bad", "good"]
    assert best["gain"][0] < best["difference"] < best["gain"][1]


def test_rows_are_grouped_by_the_level_that_all_their_genes_have():
    rows = make_rows(63)
    cells = ["A", "A=0.3", "A=0.3,B=0.3", "A=0.3,B", "", "A=B", "C=2"]
    levels = ["0", "0.3", "0.3", None, None, "0", "2"]
    rows.genes = 9 * cells
    of_row = 9 * levels
    result = metrics_by_group(rows)
    assert list(result["by_level"]) == ["0", "0.3", "2"]
    for level, group in result["by_level"].items():
        chosen = torch.tensor([of_this == level for of_this in of_row])
        assert group["n"] == (chosen & ~rows.y[:, 0].isnan()).sum()
        squared_error = (rows.y - rows.prediction)[chosen].square()
        assert group["mse"] == pytest.approx(squared_error.nanmean().item())
    assert any(line.startswith("level 0.3 ") for line in table(result, rows.rivals))
    rows.genes = [*["A=0.3", "B=0.3,C=0.3"] * 31, "A=0.3"]
    assert metrics_by_group(rows)["by_level"] == {}


def test_figures_of_profiles_equal_their_definitions():
    """The last row has two scores, which are among its twenty largest."""
    rows = make_rows(30, 40)
    rows.y[-1, 2:] = math.nan
    found = metrics_by_group(rows)
    r = []
    baseline_r = []
    errors = []
    for y, prediction, baseline in zip(
        *(x.numpy() for x in (rows.y, rows.prediction, rows.rivals["baseline"])), strict=True
    ):
        is_there = ~np.isnan(y)
        y, prediction, baseline = (values[is_there] for values in (y, prediction, baseline))
        r.append(np.corrcoef(y, prediction)[0, 1])
        baseline_r.append(np.corrcoef(y, baseline)[0, 1])
        largest = sorted(range(len(y)), key=lambda t, y=y: -abs(y[t]))[:20]
        errors += list((y - prediction)[largest] ** 2)
    assert found["row_pearson"] == pytest.approx(np.mean(r))
    assert found["baseline_row_pearson"] == pytest.approx(np.mean(baseline_r))
    assert found["mse_top20"] == pytest.approx(np.mean(errors))
    assert "row_pearson" in found["by_unseen"]["0"]
    assert "row_pearson" not in metrics_by_group(make_rows(30, 20))


def test_the_interval_of_profiles_holds_the_difference_though_few_rows_change_a_score():
    signal = torch.zeros(60, 60, dtype=torch.float64)
    signal[range(60), range(60)] = 3.0  # each row changes a score of its own
    y = signal + 0.5 * normal(60, 60)
    baseline = normal(60, 60, seed=1)
    rows = replace(make_rows(60, 60), y=y, prediction=signal, rivals={"baseline": baseline})
    rows.genes = [f"G{row}" for row in range(60)]
    rows.unseen_genes = [""] * 60
    result = metrics_by_group(rows)
    low, high = result["gain"]
    gain = result["pearson"] - result["baseline_pearson"]
    assert low < gain < high < 1
    cluster = rows.cluster_numbers()
    gains = resampled_pearson(y, signal, cluster, 100)
    gains -= resampled_pearson(y, baseline, cluster, 100)
    assert gains.quantile(0.975) < gain  # as resamples lack some of these rows


def test_the_interval_of_the_gain_holds_the_difference():
    rows = make_rows(2000)
    rows.genes = [f"G{row}" for row in range(2000)]
    rows.unseen_genes = [""] * 2000
    result = metrics_by_group(rows)
    low, high = result["gain"]
    assert low < result["pearson"] - result["baseline_pearson"] < high
    assert 0.05 < high - low < 0.2


def test_intervals_take_a_bounded_number_of_resamples(monkeypatch):
    """The number is that of the whole table for its groups, too."""
    asked = []

    def count(
        y: torch.Tensor, prediction: torch.Tensor, cluster: torch.Tensor, resamples: int, weight
    ) -> torch.Tensor:
        asked.append(resamples)
        return torch.zeros(resamples)

    monkeypatch.setattr("analyse_intervals.resampled_pearson", count)
    for cells, expected in ((10**8, 1000), (50_000, 500), (10, 100)):
        monkeypatch.setattr(analyse_metrics, "CELLS", cells)
        metrics_by_group(make_rows(50, 2))
        assert set(asked) == {expected}
        asked.clear()


def test_a_row_with_one_of_several_scores_has_a_score():
    rows = make_rows(30, 2)
    rows.y[:10] = math.nan
    rows.y[0, 1] = 1.0
    rows.y[10:] = rows.y[10:].nan_to_num()
    result = metrics_by_group(rows)
    assert (result["n"], result["rows"]) == (21, 30)
    assert "rows" not in metrics_by_group(chosen_rows(rows, torch.arange(30) >= 10))
