"""Metrics of resampled rows, their intervals, and others that only analyse.py has.

Shapes: n rows of T targets, R resamples, C bootstrap clusters.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from metrics import mean_and_std, mean_present, pearson, rank, standardise


def noise_ceiling(y: Tensor, sd: Tensor, weight: Tensor | float) -> Tensor:
    """Returns the largest R2 that noise in y allows, 1 - noise variance / variance of y, [T].

    `sd` is the noise's standard deviation, [n, 1]. The ceiling is nan where y varies no more than
    the noise.
    """
    noise = mean_present(sd.square().expand(y.shape), y, weight)
    _, std = mean_and_std(y, weight)
    ceiling = 1 - noise / std.square()
    varies = ~pearson(y, y).isnan()
    return ceiling.where(varies & (ceiling > 0), math.nan)


def pearson_of_rows(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns Pearson's r over the targets of each row, [n], nan where undefined."""
    return pearson(y.T, prediction.T)


def auroc(positive: Tensor, certainty: Tensor) -> Tensor:
    """Returns the AUROC, [T], of finding the `positive` rows, bool [n, T], by certainty [n, T].

    A row whose certainty is nan does not count. The AUROC is nan without two classes.
    """
    ranks = rank(certainty)
    num_positive = positive.sum(dim=0)
    num_negative = (~ranks.isnan()).sum(dim=0) - num_positive
    mean_rank = ranks.where(positive, math.nan).nanmean(dim=0)
    negatives_below = mean_rank - (num_positive + 1) / 2
    return negatives_below / num_negative


def average_precision(positive: Tensor, certainty: Tensor) -> Tensor:
    """Returns the average precision of finding the `positive` rows as in `auroc`, [T]."""
    num_positive = at_least_as_certain(certainty, positive)
    num_rows = at_least_as_certain(certainty, ~certainty.isnan())
    precision = num_positive / num_rows
    return precision.where(positive, math.nan).nanmean(dim=0)


def at_least_as_certain(certainty: Tensor, counted: Tensor) -> Tensor:
    """Returns the number of `counted` rows, bool [n, T], as certain as each row or more, [n, T]."""
    doubt = (-certainty).T.nan_to_num(math.inf).contiguous()
    ordered = doubt.where(counted.T, math.inf).contiguous().sort(dim=1).values
    return torch.searchsorted(ordered, doubt, right=True).T


def resampled_pearson(
    y: Tensor,
    prediction: Tensor,
    cluster: Tensor,
    resamples: int,
    weight: Tensor | float = 1.0,
) -> Tensor:
    """Returns the mean over targets of Pearson's r in each resample of the rows, [R].

    Rows count by their weight, [n, 1], as in `pearson`.

    A resample draws C of the C clusters with replacement, each with all its rows. `cluster` has the
    numbers of each row's clusters, long [n, 2], -1 where it has only one. A row in two clusters
    counts as often as the product of their counts (the pigeonhole bootstrap, Owen 2007). The same
    clusters are drawn in each call, so that two predictions can be compared in pairs.
    """
    present = ~y.isnan()
    a = standardise(y, weight).nan_to_num()
    b = standardise(prediction.where(present, math.nan), weight).nan_to_num()
    ones = torch.ones_like(a)
    products = torch.stack([ones, a, b, a * a, b * b, a * b], dim=1)
    products *= (weight * present).unsqueeze(1)
    count, *sums = resampled_sums(products, cluster, resamples).unbind(dim=1)
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = (total / count for total in sums)
    variance_a = mean_aa - mean_a.square()
    variance_b = mean_bb - mean_b.square()
    r = (mean_ab - mean_a * mean_b) / (variance_a * variance_b).sqrt()
    # As in `pearson`; what differs by rounding is constant.
    r = r.where(variance_b > 1e-12, 0.0).where(variance_a > 1e-12, math.nan)
    return r.nanmean(dim=1)


def resampled(
    metric: Callable[..., Tensor],
    y: Tensor,
    prediction: Tensor,
    cluster: Tensor,
    resamples: int,
    weight: Tensor | float = 1.0,
) -> Tensor:
    """Returns the mean over targets of one of `metrics.METRICS` in each resample of the rows, [R].

    The resamples are those of `resampled_pearson`. A row counts by its weight as often as it is
    drawn.
    """
    if metric is pearson:
        return resampled_pearson(y, prediction, cluster, resamples, weight)
    pairs, pair, num_clusters = pairs_of_clusters(cluster)
    values = []
    for counts in drawn_pairs(pairs, num_clusters, resamples):
        for count in counts[:, pair].unsqueeze(2):  # [n, 1]
            values.append(metric(y, prediction, weight * count).nanmean())
    return torch.stack(values)


def resampled_sums(values: Tensor, cluster: Tensor, resamples: int) -> Tensor:
    """Returns the sum of values [n, ...] over the rows of each resample, float64 [R, ...].

    It is nan where all rows have the same clusters, as no other ones can be drawn.
    """
    pairs, pair, num_clusters = pairs_of_clusters(cluster)
    if len(pairs) < 2:
        return values.new_full((resamples, *values.shape[1:]), math.nan)
    of_pairs = scatter(values, pair, dim_size=len(pairs)).flatten(start_dim=1)
    sums = [count @ of_pairs for count in drawn_pairs(pairs, num_clusters, resamples)]
    return torch.cat(sums).view(resamples, *values.shape[1:])


def pairs_of_clusters(cluster: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns the pairs of clusters of rows, long [pairs, 2], that of each row, [n], and C.

    Clusters are numbered from 0 to C - 1 here; C stands in place of a second one.
    """
    clusters = cluster[cluster >= 0].unique()
    number = torch.searchsorted(clusters, cluster).where(cluster >= 0, len(clusters))
    pairs, pair = number.unique(dim=0, return_inverse=True)
    return pairs, pair, len(clusters)


def drawn_pairs(pairs: Tensor, num_clusters: int, resamples: int) -> Iterator[Tensor]:
    """Yields how often each pair of clusters is drawn in 32 resamples, float64 [32, pairs]."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, resamples, 32):
        counts = []
        for _ in range(min(32, resamples - start)):
            drawn = torch.randint(num_clusters, (num_clusters,), generator=generator)
            counts.append(torch.bincount(drawn, minlength=num_clusters + 1).double())
        count = torch.stack(counts)  # [32, C + 1], how often each cluster is drawn
        count[:, -1] = 1  # in place of a second cluster
        first, second = count[:, pairs].unbind(dim=2)
        yield first * second


def centred(resampled: Tensor, estimate: float | Tensor) -> Tensor:
    """Returns a resampled metric [R, ...], shifted so that its mean is the estimate.

    In profiles, a single row may change a target. A third of the resamples lack that row, and so
    the target's signal: their Pearson's r is lower than that of all rows, often by more than it
    varies.
    """
    return resampled - resampled.nanmean(dim=0) + estimate


def interval(values: Tensor) -> list[float]:
    """Returns the ends of the interval that holds the middle 95 % of the values [R]."""
    return values.nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()


def uncertainty(y: Tensor, prediction: Tensor, sd: Tensor) -> float:
    """Returns Spearman's correlation of `sd` with the absolute error, the mean over targets.

    The arguments are [n, T].
    """
    error = (prediction - y).abs()
    return pearson(rank(error), rank(sd.where(~y.isnan(), math.nan))).nanmean().item()
