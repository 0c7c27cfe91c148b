"""analyse_metrics.py: metrics of test rows and of groups, and intervals, equal definitions."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import analyse_metrics
from analyse import table, table_of_rivals
from analyse_metrics import (
    interval,
    metrics_by_group,
    metrics_of_all,
    metrics_of_rivals,
    resampled_pearson,
)
from analyse_results import Results
from metrics import pearson, spearman
from tests.template.results import log_likelihood, make_rows, normal

pytestmark = pytest.mark.usefixtures("few_resamples")


def chosen_rows(rows: Results, chosen: torch.Tensor) -> Results:
    """Returns the rows that are True in `chosen`, bool [n]."""
    numbers = chosen.nonzero().flatten().tolist()
    fields = {"targets": rows.targets}
    for name in ("genes", "unseen_genes"):
        fields[name] = [getattr(rows, name)[row] for row in numbers]
    for name in ("unseen", "y"):
        fields[name] = getattr(rows, name)[chosen]
    for name in ("predictions", "rivals"):
        fields[name] = {key: values[chosen] for key, values in getattr(rows, name).items()}
    if rows.sd is not None:
        fields["sd"] = rows.sd[chosen]
    return Results(**fields)


def test_ranks_do_not_depend_on_an_offset():
    offset = 1e9
    rows = make_rows(200)
    expected = spearman(rows.y, rows.prediction)
    found = spearman(rows.y + offset, rows.prediction + offset)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("has_sd", [False, True])
def test_the_metrics_of_a_group_equal_the_metrics_of_its_rows(has_sd):
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
            # All rows without genes are in one cluster, so their interval is nan. Texts are
            # compared, because nan != nan.
            assert json.dumps(group) == json.dumps({key: alone[key] for key in group})
            assert group["n"] == (~part.y.isnan()).any(dim=1).sum()
    for name in result["targets"]["t0"].keys() - {"n"}:
        mean = sum(metrics[name] for metrics in result["targets"].values()) / 2
        assert result[name] == pytest.approx(mean)
    counts = (~rows.y.isnan()).sum(dim=0).tolist()
    assert [metrics["n"] for metrics in result["targets"].values()] == counts
    assert "targets" not in metrics_by_group(make_rows(20))


def test_a_metric_in_METRICS_has_columns_and_intervals_and_sorts_rivals(monkeypatch):
    """A metric that is 1 - Pearson's r has the same intervals, with the opposite sign."""

    def own(y, prediction, weight):
        return 1 - pearson(y, prediction, weight)

    monkeypatch.setattr("metrics.METRICS", {"own": own, "pearson": pearson})
    monkeypatch.setattr("analyse_metrics.number_of_resamples", lambda num_cells: 20)
    rows = replace(make_rows(40), weight=torch.linspace(1, 2, 40).double())
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
    assert " bad;" in table_of_rivals(of_rivals)[-1]


def test_metrics_that_need_an_sd_exist_for_each_group(monkeypatch):
    """Rivals do not have an sd, so they do not have these metrics."""
    monkeypatch.setattr("metrics.METRICS", {"fit": log_likelihood})
    rows = make_rows(60)
    narrow = {"prediction": rows.prediction, "sd": 1 + normal(60, 1, seed=5).abs()}
    rows = replace(rows, predictions=narrow, weight=torch.linspace(1, 2, 60).double())
    fit = Normal(rows.prediction, narrow["sd"]).log_prob(rows.y.nan_to_num())
    found = metrics_by_group(rows)
    for group, numbers in ((found, slice(60)), (found["by_deletions"]["1"], slice(1, 60, 6))):
        weight = (rows.row_weight * ~rows.y.isnan())[numbers]
        expected = (fit[numbers] * weight).sum() / weight.sum()
        assert group["fit"] == pytest.approx(expected.item())
        assert not {"baseline_fit", "fit_gain"} & group.keys()
    header, *_ = table(found, rows.rivals)
    assert "  Fit" in header
    of_rivals = metrics_of_rivals(rows, {"bad": normal(60, 1, seed=9)}, "squared")
    assert list(of_rivals) == ["baseline", "bad"]  # by Pearson's r
    assert " baseline;" in table_of_rivals(of_rivals)[-1]


def test_rows_are_grouped_by_level_if_all_their_genes_have_the_same_level():
    rows = make_rows(54)
    cells = ["A", "A=0.3", "A=0.3,B=0.3", "A=0.3,B", "", "C=2"]
    levels = ["0", "0.3", "0.3", None, None, "2"]
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
    rows.genes = ["A=0.3", "B=0.3,C=0.3"] * 27
    assert metrics_by_group(rows)["by_level"] == {}


def test_metrics_of_profiles_equal_their_definitions():
    """The last row has only two scores. Both are among its twenty largest scores."""
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


def one_each(cluster: torch.Tensor) -> torch.Tensor:
    """Returns the clusters [n, 2] of rows that are each in one cluster, [n]."""
    return torch.stack([cluster, torch.full_like(cluster, -1)], dim=1)


@pytest.mark.parametrize("num_targets", [1, 30])
def test_intervals_are_from_drawn_clusters(num_targets):
    """Four rows share a set or an unseen gene. Intervals of profiles contain the difference."""
    genes = [f"G{row // 4}" for row in range(160)]
    unseen_genes = [gene if row < 100 else "" for row, gene in enumerate(genes)]
    rows = replace(make_rows(160, num_targets), genes=genes, unseen_genes=unseen_genes)
    rows.rivals = {"rival": normal(160, num_targets, seed=3)}
    found = metrics_by_group(rows)
    assert (found["sets_drawn"], found["genes_drawn"]) == (15, 25)
    difference = found["pearson"] - found["rival_pearson"]
    cluster = one_each(torch.arange(160) // 4)
    gains = resampled_pearson(rows.y, rows.prediction, cluster, 100)
    gains -= resampled_pearson(rows.y, rows.rivals["rival"], cluster, 100)
    if num_targets > 1:
        gains += difference - gains.mean()
    expected = pytest.approx(interval(gains))
    assert found["gain"] == metrics_of_all(rows, "squared")["gain"] == expected
    of_rivals = metrics_of_rivals(rows, {}, "squared")
    assert of_rivals["rival"]["gain"] == expected


def test_the_number_of_resamples_is_limited_by_the_size_of_the_table(monkeypatch):
    """The groups of rows have the same number of resamples as the complete table."""
    asked = []

    def count(
        y: torch.Tensor, prediction: torch.Tensor, cluster: torch.Tensor, resamples: int, weight
    ) -> torch.Tensor:
        asked.append(resamples)
        return torch.zeros(resamples)

    monkeypatch.setattr("analyse_metrics.resampled_pearson", count)
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


# ---- Resampled rows, and their intervals ---------------------------------------------------------
def test_resampled_pearson_equals_the_correlation_of_torch_on_the_same_rows():
    """The predictions of the second target are constant, so its correlation is 0.

    The scores of the third target are constant, so it is not part of the mean.
    """
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


def test_a_resample_with_one_distinct_row_is_nan():
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


def test_rows_of_a_cluster_are_drawn_together():
    """Clusters have 1 to 9 rows, in random order, and numbers that are not consecutive."""
    y = normal(45, 1)
    y[3] = math.nan
    prediction = normal(45, 1, seed=1)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(0))
    cluster = 7 * torch.arange(9).repeat_interleave(torch.arange(1, 10))[order] + 20
    generator = torch.Generator().manual_seed(0)
    for r in resampled_pearson(y, prediction, one_each(cluster), 40):
        drawn = torch.randint(9, (9,), generator=generator)
        rows = torch.cat([(cluster == 7 * number + 20).nonzero().flatten() for number in drawn])
        rows = rows[~y[rows, 0].isnan()]
        expected = torch.corrcoef(torch.cat([y, prediction], dim=1)[rows].T)[0, 1]
        torch.testing.assert_close(r, expected)


def test_a_row_in_two_clusters_is_counted_as_often_as_the_product_of_both_counts():
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


@pytest.mark.parametrize("cluster", [[3, 7], [5, -1]])
def test_the_interval_is_nan_if_all_rows_are_in_the_same_clusters(cluster):
    clusters = torch.tensor([cluster]).repeat(20, 1)
    values = resampled_pearson(normal(20, 1), normal(20, 1, seed=1), clusters, 10)
    assert values.isnan().all()
    assert all(math.isnan(end) for end in interval(values))


def test_an_interval_contains_the_middle_95_percent():
    assert interval(torch.linspace(0, 1, 1001)) == pytest.approx([0.025, 0.975])


def test_means_over_runs_are_in_double_precision():
    members = {str(num_rows): make_rows(num_rows) for num_rows in (50, 60, 70)}
    analysis = analyse_metrics.metrics_of_each(members, "squared")
    values = [figures["mse"] for figures in analysis["figures"].values()]
    assert analysis["mean"]["mse"] == pytest.approx(np.mean(values), rel=1e-14)
    assert analysis["sd"]["mse"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
