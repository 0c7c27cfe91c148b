"""Metrics of test predictions, for all rows and for groups of rows, with confidence intervals.

Shapes: n rows of T targets, R resamples, C bootstrap clusters.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch_geometric.utils import scatter

import metrics
from analyse_results import Results
from losses import LOSSES
from metrics import apply, first_metric, outputs_of
from run_progress import progress_bar

PROFILE = 20  # if there are more targets than this, a row is a profile
# The last group of rows by number of deletions or of unseen genes: rows with this number or more.
MOST = 3
LEVELS = 12  # if there are more levels than this, rows are not grouped by level
# Largest rows * targets * resamples of an interval. It then takes about half a minute.
CELLS = 10**8


def metrics_by_group(rows: Results, loss: str = "squared") -> dict:
    """Returns the metrics of all rows, of groups of rows, and of each target if there are several.

    The metrics of all rows and of groups are the result of `metrics_of_rows`, the metrics of a
    target the result of `target_metrics`. Rows are grouped by the number of unseen genes, by the
    number of deletions (all perturbed genes, at any level), and by level if there are 2 to 12
    levels.
    """
    resamples = number_of_resamples(rows.y.numel())
    cluster = rows.cluster_numbers()
    grouped = metrics_of_rows(rows, cluster, loss, resamples)
    grouped["resamples"] = resamples
    clusters = set(chain.from_iterable(rows.clusters()))
    num_drawn = Counter(kind for kind, _ in clusters)
    grouped["sets_drawn"] = num_drawn["set"]
    grouped["genes_drawn"] = num_drawn["gene"]
    bar = progress_bar(0, "resampling groups of rows", " groups")

    def of_group(is_in_group: Tensor) -> dict:
        """Returns the metrics of a group: scores, bool [n, T], or complete rows, bool [n, 1]."""
        bar.update()
        cluster_of_group = cluster[is_in_group.any(dim=1)]
        return metrics_of_rows(rows.select(is_in_group), cluster_of_group, loss, resamples)

    for name, count in {"unseen": rows.unseen, "deletions": rows.deletions().unsqueeze(1)}.items():
        group = count.clamp(max=MOST)
        grouped[f"by_{name}"] = {}
        for k in group.unique().tolist():
            grouped[f"by_{name}"][str(k)] = of_group(group == k)
    levels = rows.levels()
    grouped["by_level"] = {}
    groups = set(levels) - {""}
    if 1 < len(groups) <= LEVELS:
        for level in sorted(groups, key=float):
            is_at_level = torch.tensor([row_level == level for row_level in levels])
            grouped["by_level"][level] = of_group(is_at_level.unsqueeze(1))
    bar.close()
    if len(rows.targets) > 1:
        each = target_metrics(rows, loss)
        grouped["targets"] = {}
        num_scored = (~rows.y.isnan()).sum(dim=0).tolist()
        for t, target in enumerate(rows.targets):
            of_target = {name: metric[t].item() for name, metric in each.items()}
            grouped["targets"][target] = {"n": num_scored[t], **of_target}
    return grouped


def metrics_of_rows(rows: Results, cluster: Tensor, loss: str, resamples: int) -> dict:
    """Returns the metrics of rows by name: means over targets of `target_metrics`, and counts.

    `n` is the number of rows with a score, `cells` is the number of scores. `rows` is the number of
    all rows, and exists only if some rows do not have a score. If `rows` has rivals, the result
    includes the `gains` over the first rival, from `resamples` resamples of the clusters,
    `cluster` [n, 2]. If rows are profiles, the result includes `profile_metrics`.
    """
    y = rows.y
    means = nanmeans(target_metrics(rows, loss))
    num_scored = int((~y.isnan()).any(dim=1).sum())
    by_name = {"n": num_scored, **means}
    if rows.rivals:
        by_name |= gains(rows, cluster, resamples)
    by_name["cells"] = int((~y.isnan()).sum())
    if num_scored < len(y):
        by_name["rows"] = len(y)
    if y.size(1) > PROFILE:
        by_name |= profile_metrics(rows)
    return by_name


def gains(rows: Results, cluster: Tensor, resamples: int) -> dict:
    """Returns 95 % intervals of the difference in each metric between the model and a rival.

    The rival is the first one in `rows`; its metric is subtracted. The intervals are by
    `name_of_gain`. The metrics are `with_pearson`, except for metrics that need predictions that
    rivals do not have, such as an `sd`. Rows are drawn as in `resampled_pearson`.
    """
    of_rival = {"prediction": next(iter(rows.rivals.values()))}
    intervals = {}
    for name, metric in with_pearson().items():
        if outputs_of(metric, but=of_rival):
            continue
        values = []
        means = []
        for predictions in (rows.predictions, of_rival):
            values.append(resampled(metric, rows, predictions, cluster, resamples))
            means.append(apply(metric, rows.y, predictions, rows.row_weight).nanmean())
        differences = values[0] - values[1]
        if rows.y.size(1) > PROFILE:
            differences = centred(differences, means[0] - means[1])
        intervals[name_of_gain(name)] = interval(differences)
    return intervals


def with_pearson() -> dict[str, Callable[..., Tensor]]:
    """Returns the metrics that rivals have, too: Pearson's r and all of `metrics.METRICS`."""
    return {"pearson": metrics.pearson} | metrics.METRICS


def name_of_gain(metric: str) -> str:
    """Returns the name of a metric's interval: `gain` for `pearson`, `x_gain` for a metric `x`."""
    return "gain" if metric == "pearson" else f"{metric}_gain"


def nanmeans(each: dict[str, Tensor]) -> dict[str, float]:
    """Returns the mean of each metric over its values that are not nan."""
    return {name: metric.nanmean().item() for name, metric in each.items()}


def profile_metrics(rows: Results) -> dict[str, float]:
    """Returns the metrics of profiles: `row_pearson` and `mse_top20`.

    `row_pearson` is the mean over rows of Pearson's r over the targets of a row. The same metric of
    each rival is `<rival>_row_pearson`. `mse_top20` is the mean squared error of the `PROFILE`
    scores of each row with the largest absolute values. Rows are not weighted.
    """
    largest = rows.y.abs().nan_to_num().topk(PROFILE, dim=1).indices
    error = (rows.prediction - rows.y).square().gather(1, largest)
    each = {"row_pearson": metrics.pearson(rows.y.T, rows.prediction.T)}
    for name, prediction in rows.rivals.items():
        each[f"{name}_row_pearson"] = metrics.pearson(rows.y.T, prediction.T)
    each["mse_top20"] = error
    return nanmeans(each)


def target_metrics(rows: Results, loss: str = "squared") -> dict[str, Tensor]:
    """Returns the metrics of each target by name, [T] each, nan if undefined.

    The metrics of `with_pearson` are also computed for the rivals. For binary scores, AUROC
    measures how well high predictions find the rows with score 1. It is not weighted.
    """
    y = rows.y
    prediction = rows.prediction
    weight = rows.row_weight
    each = {}
    for metric in (metrics.mse, r2, metrics.pearson, metrics.spearman):
        each[metric.__name__] = metric(y, prediction, weight)
    each |= metrics.metrics_beside_rivals(y, rows.predictions, rows.rivals, weight, with_pearson())
    if LOSSES[loss].is_binary:
        each["auroc"] = auroc(y == 1, metrics.as_ranked(y, prediction))
    return each


def number_of_resamples(num_cells: int) -> int:
    """Returns the number of resamples of an interval: 1,000, or fewer for over 100,000 scores."""
    return max(100, min(1000, CELLS // num_cells))


# ---- Several runs --------------------------------------------------------------------------------
def ensemble_of(members: list[Results], loss: str) -> Results:
    """Returns the rows with the predictions of an ensemble, combined by the method of the loss.

    `members` are the same rows with the predictions of each member.
    """
    of_members = {}
    for name in members[0].predictions:
        of_members[name] = torch.stack([rows.predictions[name] for rows in members])
    together = LOSSES[loss].together(of_members)
    return replace(members[0], predictions={name: together[name] for name in of_members})


def metrics_of_each(members: dict[str, Results], loss: str) -> dict[str, dict]:
    """Returns the metrics of each member as `figures`, their `mean` and standard deviation `sd`.

    The metrics of a member are the means over targets of its `target_metrics`.
    """
    by_member = {}
    for name, rows in members.items():
        by_member[name] = nanmeans(target_metrics(rows, loss))
    mean = {}
    sd = {}
    for name in by_member[next(iter(members))]:
        of_members = [of_member[name] for of_member in by_member.values()]
        values = torch.tensor(of_members, dtype=torch.float64)
        mean[name] = values.mean().item()
        sd[name] = values.std().item()
    return {"figures": by_member, "mean": mean, "sd": sd}


def metrics_of_all(rows: Results, loss: str) -> dict:
    """Returns the result of `metrics_of_rows` for all rows."""
    resamples = number_of_resamples(rows.y.numel())
    return metrics_of_rows(rows, rows.cluster_numbers(), loss, resamples)


# ---- Without the model ---------------------------------------------------------------------------
def metrics_of_rivals(rows: Results, predictions: dict[str, Tensor], loss: str) -> dict[str, dict]:
    """Returns the metrics of each rival, sorted by `first_metric`, best rival first.

    `predictions` are the predictions of the rivals by name, [n, T] each. The rivals in `rows` are
    included; see `with_rivals`. `gain` is the 95 % interval of the Pearson's r of the model minus
    the Pearson's r of the rival. If the first metric is not Pearson's r, the result also contains
    the interval of the first metric.
    """
    resamples = number_of_resamples(rows.y.numel())
    cluster = rows.cluster_numbers()
    by_rival = {}
    of_rivals = with_rivals(predictions, rows.rivals).items()
    for name, prediction in progress_bar(of_rivals, "resampling for rivals", " rivals"):
        of_model = {"model": rows.prediction}
        turned = replace(rows, predictions={"prediction": prediction}, rivals=of_model)
        of_rival = metrics_of_rows(turned, cluster, loss, resamples)
        first = first_metric(of_rival)
        shown = dict.fromkeys(("pearson", first, "r2", "spearman"))
        by_rival[name] = {key: of_rival[key] for key in shown}
        for key in dict.fromkeys(("gain", name_of_gain(first))):
            low, high = of_rival[key]
            by_rival[name][key] = [-high, -low]
    first = first_metric(next(iter(by_rival.values())))
    best_first = sorted(by_rival, key=lambda name: by_rival[name][first], reverse=True)
    return {name: by_rival[name] for name in best_first}


def with_rivals(predictions: dict[str, Tensor], rivals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `predictions` [n, T] by name, followed by the predictions of `rivals` in test.tsv.

    If a prediction equals the prediction of a rival in test.tsv, the rival is not added. Instead,
    the prediction gets the name "<rival>: <name>". The predictions are equal if they differ by at
    most 1e-4 of their standard deviation over the rows, because numbers in files may be rounded.
    """
    for rival, of_rival in rivals.items():
        tolerance = 1e-4 * of_rival.std(dim=0, correction=0)
        named = {}
        for name, prediction in predictions.items():
            is_equal = ((prediction - of_rival).abs() <= tolerance).all()
            title = f"{rival}: {name}" if is_equal else name
            named[title] = prediction
        if named.keys() == predictions.keys():
            named[rival] = of_rival
        predictions = named
    return predictions


# ---- Metrics that only the analysis has ----------------------------------------------------------
def r2(y: Tensor, prediction: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns R2, the explained share of the variance, [T]; nan for a target with constant y."""
    _, std = metrics.mean_and_std(y, weight)
    is_defined = ~metrics.pearson(y, prediction, weight).isnan()
    return (1 - metrics.mse(y, prediction, weight) / std.square()).where(is_defined, math.nan)


def auroc(positive: Tensor, certainty: Tensor) -> Tensor:
    """Returns the AUROC for finding the `positive` rows, bool [n, T], by their certainty: [T].

    `certainty` [n, T] is larger if a row is more likely to be positive. Rows with certainty nan are
    ignored. The AUROC is nan if all rows are positive, or if no row is.
    """
    ranks = metrics.rank(certainty)
    num_positive = positive.sum(dim=0)
    num_negative = (~ranks.isnan()).sum(dim=0) - num_positive
    mean_rank = ranks.where(positive, math.nan).nanmean(dim=0)
    negatives_below = mean_rank - (num_positive + 1) / 2
    return negatives_below / num_negative


# ---- Resampled rows, and their intervals ---------------------------------------------------------
def resampled_pearson(
    y: Tensor, prediction: Tensor, cluster: Tensor, resamples: int, weight: Tensor | float = 1.0
) -> Tensor:
    """Returns the mean over targets of Pearson's r in each resample of the rows, [R].

    A resample consists of C clusters, drawn with replacement from all C clusters, with all their
    rows. If a row is in two clusters, it is counted as often as the product of the two counts (the
    pigeonhole bootstrap, Owen 2007). Each call draws the same clusters, so that two predictions can
    be compared in each resample.

    Args:
        y: the scores, [n, T].
        prediction: their predictions, [n, T].
        cluster: the numbers of each row's clusters, long [n, 2], -1 instead of a second cluster.
        resamples: the number of resamples.
        weight: the weight of each row, [n, 1].
    """
    present = ~y.isnan()
    a = metrics.standardise(y, weight).nan_to_num()
    b = metrics.standardise(prediction.where(present, math.nan), weight).nan_to_num()
    ones = torch.ones_like(a)
    products = torch.stack([ones, a, b, a * a, b * b, a * b], dim=1)
    products *= (weight * present).unsqueeze(1)
    pairs, pair, num_clusters = pairs_of_clusters(cluster)
    of_pairs = scatter(products, pair, dim_size=len(pairs)).flatten(start_dim=1)
    sums = [drawn @ of_pairs for drawn in drawn_pairs(pairs, num_clusters, resamples)]
    count, *sums = torch.cat(sums).unflatten(1, products.shape[1:]).unbind(dim=1)
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = (total / count for total in sums)
    variance_a = mean_aa - mean_a.square()
    variance_b = mean_bb - mean_b.square()
    r = (mean_ab - mean_a * mean_b) / (variance_a * variance_b).sqrt()
    # As in `metrics.pearson`, values that differ only by rounding errors are constant.
    r = r.where(variance_b > 1e-12, 0.0).where(variance_a > 1e-12, math.nan)
    return r.nanmean(dim=1)


def resampled(
    metric: Callable[..., Tensor],
    rows: Results,
    predictions: dict[str, Tensor],
    cluster: Tensor,
    resamples: int,
) -> Tensor:
    """Returns the mean over targets of one of `metrics.METRICS` in each resample of the rows, [R].

    Rows are drawn as in `resampled_pearson`. The weight of a row is multiplied by the number of
    times that it is drawn.
    """
    if metric is metrics.pearson:
        prediction = predictions["prediction"]
        return resampled_pearson(rows.y, prediction, cluster, resamples, rows.row_weight)
    pairs, pair, num_clusters = pairs_of_clusters(cluster)
    values = []
    for counts in drawn_pairs(pairs, num_clusters, resamples):
        for count in counts[:, pair].unsqueeze(2):  # [n, 1]
            values.append(apply(metric, rows.y, predictions, rows.row_weight * count).nanmean())
    return torch.stack(values)


def pairs_of_clusters(cluster: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns the distinct pairs of clusters, the pair of each row, and the number of clusters C.

    The pairs are long [pairs, 2], with clusters renumbered from 0 to C - 1. C replaces a missing
    second cluster. The pair of each row is an index into them, long [n].
    """
    clusters = cluster[cluster >= 0].unique()
    number = torch.searchsorted(clusters, cluster).where(cluster >= 0, len(clusters))
    pairs, pair = number.unique(dim=0, return_inverse=True)
    return pairs, pair, len(clusters)


def drawn_pairs(pairs: Tensor, num_clusters: int, resamples: int) -> Iterator[Tensor]:
    """Yields how often each pair of clusters is drawn, float64 [32, pairs] for 32 resamples.

    If there is only one pair, all resamples would be equal. These numbers are then nan, so that the
    weighted metrics of the resamples are nan.
    """
    generator = torch.Generator().manual_seed(0)
    for start in range(0, resamples, 32):
        counts = []
        for _ in range(min(32, resamples - start)):
            drawn = torch.randint(num_clusters, (num_clusters,), generator=generator)
            counts.append(torch.bincount(drawn, minlength=num_clusters + 1).double())
        count = torch.stack(counts)  # how often each cluster is drawn, [32, C + 1]
        count[:, -1] = 1  # for rows without a second cluster
        if len(pairs) < 2:
            count.fill_(math.nan)
        first, second = count[:, pairs].unbind(dim=2)
        yield first * second


def centred(values: Tensor, estimate: float | Tensor) -> Tensor:
    """Returns a resampled metric [R, ...], shifted so that its mean is the estimate.

    Without this, an interval may not contain the estimate. In profiles, the signal of a target may
    come from a single row, and more than a third of the resamples do not contain this row. In these
    resamples, Pearson's r is lower than over all rows, often by more than its variation.
    """
    return values - values.nanmean(dim=0) + estimate


def interval(values: Tensor) -> list[float]:
    """Returns the ends of the interval that contains the middle 95 % of the values [R]."""
    return values.nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
