"""Metrics: each is one vectorised function of scores and predictions, a figure per target.

To log another one, write a function of y [n, T], nan where a score is missing, predictions [n, T],
and the rows' weight, [n, 1] or 1, that returns [T], nan where it is undefined; add it to `METRICS`.

Shapes: n rows of T scores.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from data_tables import mean_and_std, standardise, weighted_mean


def mean_present(values: Tensor, y: Tensor) -> Tensor:
    """Returns the mean of each target's values [n, T] where y is not nan, [T]."""
    present = ~y.isnan()
    return weighted_mean(values.where(present, 0.0), present)


def mean_defined(values: Tensor, weight: Tensor | float) -> Tensor:
    """Returns the `weighted_mean` of the values that are not nan."""
    is_defined = ~values.isnan()
    return weighted_mean(values.where(is_defined, 0.0), weight * is_defined)


def mse(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns the mean squared error, [T]."""
    return mean_present((prediction - y).square(), y)


def r2(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns the explained part of the variance, [T], nan where y is constant."""
    _, std = mean_and_std(y)
    is_defined = ~pearson(y, prediction).isnan()
    return (1 - mse(y, prediction) / std.square()).where(is_defined, math.nan)


def pearson(y: Tensor, prediction: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns Pearson's r, [T], in which rows count by their weight, [n, 1].

    It is nan where y is constant, so that such targets count in no mean, and 0 where only the
    prediction is, so that the means of all predictions are over the same targets.
    """
    a = standardise(y, weight)
    b = standardise(prediction.where(~y.isnan(), math.nan), weight)
    varies = mean_defined(a.square(), weight) > 0.5
    return mean_defined(a * b, weight).where(varies, math.nan)


def noise_ceiling(y: Tensor, sd: Tensor) -> Tensor:
    """Returns the R2 of predictions that are right but for the noise of the scores, [T].

    `sd` is the noise's standard deviation, [n, 1]. It is nan where y varies no more than the noise.
    """
    noise = mean_present(sd.square().expand(y.shape), y)
    _, std = mean_and_std(y)
    ceiling = 1 - noise / std.square()
    varies = ~pearson(y, y).isnan()
    return ceiling.where(varies & (ceiling > 0), math.nan)


def spearman(y: Tensor, prediction: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns the `pearson` of the ranks, Spearman's rank correlation."""
    return pearson(rank(y), rank(as_ranked(y, prediction)), weight)


def pearson_of_rows(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns Pearson's r over the scores of each row, [n], nan where undefined."""
    return pearson(y.T, prediction.T)


# All are logged, each beside the baseline's; the first is drawn and chooses best.pt. The larger,
# the better.
METRICS = {"pearson": pearson}


# ---- Ranks ---------------------------------------------------------------------------------------
def rank(values: Tensor) -> Tensor:
    """Returns ranks from 1 among each target's values [n, T], float64; equal ones share the mean.

    A nan takes no rank and stays.
    """
    columns = values.T.nan_to_num(math.inf).contiguous()  # nan comes last
    ordered, order = columns.sort(dim=1)
    smaller = torch.searchsorted(ordered, ordered)
    not_larger = torch.searchsorted(ordered, ordered, right=True)
    ordered_ranks = (smaller + not_larger + 1).double() / 2
    ranks = torch.empty_like(ordered_ranks).scatter(1, order, ordered_ranks).T
    return ranks.where(~values.isnan(), math.nan)


def as_ranked(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns the predictions of scores that are there, less the mean of these, float32 [n, T].

    Others are nan. In float64, rounding would order equal ones.
    """
    mean, _ = mean_and_std(y)
    return (prediction - mean).float().where(~y.isnan(), math.nan)


def auroc(positive: Tensor, certainty: Tensor) -> Tensor:
    """Returns the AUROC of finding each target's `positive` rows, bool [n, T], by certainty, [T].

    A nan certainty is no row. It is nan without two classes.
    """
    ranks = rank(certainty)
    num_positive = positive.sum(dim=0)
    num_negative = (~ranks.isnan()).sum(dim=0) - num_positive
    mean_rank = ranks.where(positive, math.nan).nanmean(dim=0)
    negatives_below = mean_rank - (num_positive + 1) / 2
    return negatives_below / num_negative


def average_precision(positive: Tensor, certainty: Tensor) -> Tensor:
    """Returns the average precision of finding the `positive` rows as in `auroc`, [T]."""
    found = at_least_as_certain(certainty, positive)
    precision = found / at_least_as_certain(certainty, ~certainty.isnan())
    return precision.where(positive, math.nan).nanmean(dim=0)


def at_least_as_certain(certainty: Tensor, counted: Tensor) -> Tensor:
    """Returns for each row how many of the `counted` rows, bool [n, T], are at least as certain."""
    doubt = (-certainty).T.nan_to_num(math.inf).contiguous()
    ordered = doubt.where(counted.T, math.inf).contiguous().sort(dim=1).values
    return torch.searchsorted(ordered, doubt, right=True).T


# ---- Intervals -----------------------------------------------------------------------------------
def resampled_pearson(y: Tensor, prediction: Tensor, unit: Tensor, resamples: int) -> Tensor:
    """Returns Pearson's r, the targets' mean, of rows in units drawn with replacement, [resamples].

    `unit` are the numbers of each row's units, long [n, 2], -1 where it has only one: all rows of a
    unit are drawn together, and as many units as there are. A row of two counts as often as the
    product of both says (the pigeonhole bootstrap, Owen 2007). Calls for the same units draw the
    same ones, so that the results of two predictions can be compared in pairs.
    """
    present = ~y.isnan()
    a = standardise(y).nan_to_num()
    b = standardise(prediction.where(present, math.nan)).nan_to_num()
    products = torch.stack([present.double(), a, b, a * a, b * b, a * b], dim=1)
    count, *sums = resampled_sums(products, unit, resamples).unbind(dim=1)
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = (total / count for total in sums)
    variance_a = mean_aa - mean_a.square()
    variance_b = mean_bb - mean_b.square()
    r = (mean_ab - mean_a * mean_b) / (variance_a * variance_b).sqrt()
    # As in `pearson`; what differs by rounding is constant.
    r = r.where(variance_b > 1e-12, 0.0).where(variance_a > 1e-12, math.nan)
    return r.nanmean(dim=1)


def resampled_mean(values: Tensor, unit: Tensor, resamples: int) -> Tensor:
    """Returns the mean of the values [n] that are not nan, [resamples].

    The rows are those of `resampled_pearson`.
    """
    present = ~values.isnan()
    columns = torch.stack([values.nan_to_num(), present.double()], dim=1)
    total, count = resampled_sums(columns, unit, resamples).T
    return total / count


def resampled_sums(values: Tensor, unit: Tensor, resamples: int) -> Tensor:
    """Returns the sums of values [n, ...] over the rows that are drawn, float64 [resamples, ...].

    Where all rows have the same units they are nan, as nothing is known of what others would give.
    """
    units = unit[unit >= 0].unique()
    num_units = len(units)
    number = torch.searchsorted(units, unit).where(unit >= 0, num_units)
    pairs, pair = number.unique(dim=0, return_inverse=True)
    if len(pairs) < 2:
        return values.new_full((resamples, *values.shape[1:]), math.nan)
    of_pairs = scatter(values, pair, dim_size=len(pairs)).flatten(start_dim=1)
    generator = torch.Generator().manual_seed(0)
    sums = []
    for start in range(0, resamples, 32):
        draws = []
        for _ in range(min(32, resamples - start)):
            drawn = torch.randint(num_units, (num_units,), generator=generator)
            draws.append(torch.bincount(drawn, minlength=num_units + 1).double())
        draws = torch.stack(draws)
        draws[:, -1] = 1  # in place of a second unit
        first, second = draws[:, pairs].unbind(dim=2)
        sums.append((first * second) @ of_pairs)
    return torch.cat(sums).view(resamples, *values.shape[1:])


def centred(resampled: Tensor, estimate: float | Tensor) -> Tensor:
    """Returns resampled figures [R, ...] of profiles, moved so that their mean is the estimate.

    A target that one row changes loses its signal in a third of the resamples, which draw that row
    not once: Pearson's r of resamples is lower than that of the rows, often by more than it varies.
    """
    return resampled - resampled.nanmean(dim=0) + estimate


def interval(values: Tensor) -> list[float]:
    """Returns the ends of the interval that holds the middle 95 % of the values [R]."""
    return values.nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()


def uncertainty(y: Tensor, prediction: Tensor, sd: Tensor) -> tuple[float, list[float]]:
    """Returns Spearman's correlation of `sd` and the absolute error, and the error by `sd`.

    The latter is the mean in each fifth. Both are means over the targets; all are [n, T].
    """
    error = (prediction - y).abs()
    ranks = rank(sd.where(~y.isnan(), math.nan))
    correlation = pearson(rank(error), ranks).nanmean().item()
    fifth = ((ranks - 0.5) * 5 / (~y.isnan()).sum(dim=0)).floor()
    errors = [error.where(fifth == k, math.nan).nanmean(dim=0).nanmean().item() for k in range(5)]
    return correlation, errors


# ---- Results -------------------------------------------------------------------------------------
def compare(
    y: Tensor, prediction: Tensor, baseline: Tensor, weight: Tensor | None
) -> dict[str, Tensor]:
    """Returns each of `METRICS` of the predictions and of the baseline, as `baseline_<name>`.

    If rows have a weight, [n], each follows with it, too, as `weighted_<name>`.
    """
    figures = {}
    for name, metric in METRICS.items():
        figures[name] = metric(y, prediction, 1.0)
        figures[f"baseline_{name}"] = metric(y, baseline, 1.0)
        if weight is not None:
            of_rows = weight.unsqueeze(1)
            figures[f"weighted_{name}"] = metric(y, prediction, of_rows)
            figures[f"baseline_weighted_{name}"] = metric(y, baseline, of_rows)
    return figures


def names_in(result: dict[str, Any]) -> list[str]:
    """Returns the names of the metrics that a result has."""
    names = []
    for name in METRICS:
        names += [name, f"weighted_{name}"]
    return [name for name in names if name in result]


def first_metric() -> str:
    """Returns the name of the metric that chooses the best model."""
    return next(iter(METRICS))


def quality(result: dict[str, Any]) -> tuple[float, float]:
    """Returns a sort key, larger is better: the first metric (0 if undefined), then the loss.

    If rows have weights, it is the weighted one. A loss that is nan is the worst.
    """
    first = first_metric()
    value = result.get(first, -math.inf)  # as in a checkpoint from before an edit
    value = result.get(f"weighted_{first}", value)
    loss = result["loss"]
    return 0.0 if math.isnan(value) else value, -math.inf if math.isnan(loss) else -loss


def result_text(result: dict[str, Any]) -> str:
    """Returns metrics as a part of a line for the log."""
    text = f"loss {result['loss']:.4f}"
    for name in names_in(result):
        title = name.replace("_", " ").title()
        baseline = result[f"baseline_{name}"]
        text += f", {title} {result[name]:.4f}, baseline {baseline:.4f}"
    return text
