"""analyse_intervals.py: intervals beside their definitions, computed in another way."""

import math

import pytest
import torch

from analyse_intervals import interval, resampled_pearson, uncertainty
from tests.bench.quality import resampled_mean
from tests.template.results import normal


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
    assert uncertainty(y, 3 * sd, sd) == pytest.approx(1.0)
    assert abs(uncertainty(y, sd.flip(0), sd)) < 0.1
