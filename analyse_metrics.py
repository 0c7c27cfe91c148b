"""Metrics of test predictions: of all rows and of groups of them, with their intervals.

Shapes: n rows of T targets.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

import analyse_intervals
import metrics
from analyse_results import Results, are_equal_in_files
from losses import LOSSES

PROFILE = 20  # targets: with more of them, a row is a profile
MOST = 3  # of deletions and unseen genes; rows with more are counted with those
LEVELS = 12  # most that are shown as groups of rows
CELLS = 10**8  # rows x targets x resamples of an interval, about, which takes half a minute


def metrics_by_group(rows: Results, loss: str = "squared", threshold: float | None = None) -> dict:
    """Returns the metrics of all rows, of groups of them, and of each of several targets.

    Those of rows are `metrics_of_rows`. Groups are by the number of unseen genes, by the number of
    deletions, and by level if there are 2 to 12 of them.
    """
    options = {
        "loss": loss,
        "threshold": threshold,
        "resamples": number_of_resamples(rows.y.numel()),
    }
    cluster = rows.cluster_numbers()
    grouped = metrics_of_rows(rows, cluster, **options)
    grouped["resamples"] = options["resamples"]
    clusters = set(chain.from_iterable(rows.clusters()))
    num_drawn = Counter(kind for kind, _ in clusters)
    grouped["sets_drawn"] = num_drawn["set"]
    grouped["genes_drawn"] = num_drawn["gene"]

    def of_group(is_in_group: Tensor) -> dict:
        """Returns the metrics of a group of scores, bool [n, T] or, of whole rows, [n, 1]."""
        cluster_of_group = cluster[is_in_group.any(dim=1)]
        return metrics_of_rows(rows.select(is_in_group), cluster_of_group, **options)

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
    if len(rows.targets) > 1:
        each = target_metrics(rows, loss, threshold)
        grouped["targets"] = {}
        num_scored = (~rows.y.isnan()).sum(dim=0).tolist()
        for t, target in enumerate(rows.targets):
            of_target = {name: metric[t].item() for name, metric in each.items()}
            grouped["targets"][target] = {"n": num_scored[t], **of_target}
    return grouped


def metrics_of_rows(
    rows: Results, cluster: Tensor, loss: str, threshold: float | None, resamples: int
) -> dict:
    """Returns the number of rows, and the means over targets of `target_metrics`.

    If rows have a rival, there are also the `gains` over the first one, for which rows of the same
    `cluster`, long [n, 2], are drawn together. `n` is the number of rows with a score. Where rows
    are profiles, there are also `profile_metrics`.
    """
    y = rows.y
    each = target_metrics(rows, loss, threshold)
    means = nanmeans(each)
    num_scored = int((~y.isnan()).any(dim=1).sum())
    by_name = {"n": num_scored, **means}
    rival = next(iter(rows.rivals), None)
    if rival is not None:
        by_name |= gains(rows, rival, means, cluster, resamples)
    by_name["cells"] = int((~y.isnan()).sum())
    if num_scored < len(y):
        by_name["rows"] = len(y)
    if y.size(1) > PROFILE:
        by_name |= profile_metrics(rows)
    return by_name


def gains(
    rows: Results, rival: str, means: dict[str, float], cluster: Tensor, resamples: int
) -> dict[str, list[float]]:
    """Returns the 95 % intervals of metrics less the rival's, each by its `name_of_gain`.

    They are those `with_pearson`. `means` are of `target_metrics`, over the targets.
    """
    options = {"cluster": cluster, "resamples": resamples, "weight": rows.row_weight}
    intervals = {}
    for name, metric in with_pearson().items():
        resampled = partial(analyse_intervals.resampled, metric, rows.y, **options)
        differences = resampled(rows.prediction) - resampled(rows.rivals[rival])
        if rows.y.size(1) > PROFILE:
            gain = means[name] - means[f"{rival}_{name}"]
            differences = analyse_intervals.centred(differences, gain)
        intervals[name_of_gain(name)] = analyse_intervals.interval(differences)
    return intervals


def with_pearson() -> dict[str, Callable[..., Tensor]]:
    """Returns the metrics that stand beside the rivals': Pearson's r and `metrics.METRICS`."""
    return {"pearson": metrics.pearson} | metrics.METRICS


def name_of_gain(metric: str) -> str:
    """Returns the name of the interval of a metric: `gain` of `pearson`, `x_gain` of another."""
    return f"{metric}_gain".replace("pearson_gain", "gain")


def nanmeans(each: dict[str, Tensor]) -> dict[str, float]:
    """Returns the mean of each metric's values, such as one per target, without nan."""
    return {name: metric.nanmean().item() for name, metric in each.items()}


def profile_metrics(rows: Results) -> dict[str, float]:
    """Returns the means over rows of Pearson's r within a row, and of the largest scores' error.

    That is the squared error of the `PROFILE` largest absolute scores of each row. All rows count
    alike.
    """
    largest = rows.y.abs().nan_to_num().topk(PROFILE, dim=1).indices
    error = (rows.prediction - rows.y).square().gather(1, largest)
    each = {"row_pearson": analyse_intervals.pearson_of_rows(rows.y, rows.prediction)}
    for name, prediction in rows.rivals.items():
        each[f"{name}_row_pearson"] = analyse_intervals.pearson_of_rows(rows.y, prediction)
    each["mse_top20"] = error
    return nanmeans(each)


def target_metrics(
    rows: Results, loss: str = "squared", threshold: float | None = None
) -> dict[str, Tensor]:
    """Returns the metrics of each target by name, [T] each, nan where undefined.

    Those `with_pearson` stand beside the rivals'. If rows have an `sd`, there are also the ceilings
    of R2 and of Pearson's r, which predictions without an error would reach. With a threshold, or
    binary scores, there are also AUROC and average precision of finding the rows below the
    threshold by low predictions, or those of 1 by high ones. In these two, all rows count alike.
    """
    y = rows.y
    prediction = rows.prediction
    weight = rows.row_weight
    each = {}
    for metric in (metrics.mse, metrics.r2, metrics.pearson, metrics.spearman):
        each[metric.__name__] = metric(y, prediction, weight)
    each |= metrics.metrics_beside_rivals(y, prediction, rows.rivals, weight, with_pearson())
    if rows.sd is not None:
        each["ceiling_r2"] = analyse_intervals.noise_ceiling(y, rows.sd.unsqueeze(1), weight)
        each["ceiling_pearson"] = each["ceiling_r2"].sqrt()
        each["r2_of_ceiling"] = each["r2"] / each["ceiling_r2"]
    positive = None
    certainty = metrics.as_ranked(y, prediction)
    if threshold is not None:
        positive = y < threshold
        certainty = -certainty
    elif LOSSES[loss].is_binary:
        positive = y == 1
    if positive is not None:
        each["auroc"] = analyse_intervals.auroc(positive, certainty)
        each["average_precision"] = analyse_intervals.average_precision(positive, certainty)
    return each


def number_of_resamples(num_cells: int) -> int:
    """Returns the number of resamples of an interval: 1,000, fewer for more than 100,000 scores."""
    return max(100, min(1000, CELLS // num_cells))


# ---- Several runs --------------------------------------------------------------------------------
def ensemble_of(members: dict[str, Results]) -> tuple[Results, Tensor]:
    """Returns the rows with the members' mean prediction, and their standard deviation, [n, T]."""
    predictions = torch.stack([rows.prediction for rows in members.values()])
    std, mean = torch.std_mean(predictions, dim=0)
    first = next(iter(members.values()))
    return replace(first, prediction=mean), std


def metrics_together(
    members: dict[str, Results], ensemble: Results, loss: str, threshold: float | None
) -> dict[str, dict]:
    """Returns the metrics of each member as `figures`, their `mean`, and those of the `ensemble`.

    Those of a member are the means of its `target_metrics`, those of the ensemble its
    `metrics_of_rows`.
    """
    by_member = {}
    for name, rows in members.items():
        by_member[name] = nanmeans(target_metrics(rows, loss, threshold))
    mean = {}
    for name in by_member[next(iter(members))]:
        mean[name] = statistics.fmean(of_member[name] for of_member in by_member.values())
    resamples = number_of_resamples(ensemble.y.numel())
    cluster = ensemble.cluster_numbers()
    of_ensemble = metrics_of_rows(ensemble, cluster, loss, threshold, resamples)
    return {"figures": by_member, "mean": mean, "ensemble": of_ensemble}


def difference_of_best(members: dict[str, Results], loss: str) -> dict:
    """Returns the names of the two best `runs`, and their `difference` in the first of METRICS.

    `gain` is the 95 % interval of the difference. Rows are drawn as in `metrics_of_rows`, the same
    ones for both runs.
    """
    metric = metrics.first_metric()
    quality = {}
    for name, rows in members.items():
        quality[name] = nanmeans(target_metrics(rows, loss))[metric]
    best, second = sorted(quality, key=quality.__getitem__, reverse=True)[:2]
    rows = replace(members[best], rivals={"second": members[second].prediction})
    resamples = number_of_resamples(rows.y.numel())
    of_best = metrics_of_rows(rows, rows.cluster_numbers(), loss, None, resamples)
    return {
        "runs": [best, second],
        "difference": of_best[metric] - of_best[f"second_{metric}"],
        "gain": of_best[name_of_gain(metric)],
    }


# ---- Without the model ---------------------------------------------------------------------------
def metrics_of_rivals(rows: Results, predictions: dict[str, Tensor], loss: str) -> dict[str, dict]:
    """Returns the metrics of rivals, the best first, given the prediction [n, T] of each by name.

    They are ordered by the first of METRICS. `gain` is the 95 % interval of the model's Pearson's r
    less theirs; that of another first metric is there, too.
    """
    first = metrics.first_metric()
    resamples = number_of_resamples(rows.y.numel())
    cluster = rows.cluster_numbers()
    by_rival = {}
    for name, prediction in with_rivals(predictions, rows.rivals).items():
        turned = replace(rows, prediction=prediction, rivals={"model": rows.prediction})
        of_rival = metrics_of_rows(turned, cluster, loss, None, resamples)
        shown = dict.fromkeys(("pearson", first, "r2", "spearman"))
        by_rival[name] = {key: of_rival[key] for key in shown}
        for key in dict.fromkeys(("gain", name_of_gain(first))):
            low, high = of_rival[key]
            by_rival[name][key] = [-high, -low]
    best_first = sorted(by_rival, key=lambda name: by_rival[name][first], reverse=True)
    return {name: by_rival[name] for name in best_first}


def with_rivals(predictions: dict[str, Tensor], rivals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns predictions [n, T] by name, and behind them those of test.tsv's rivals.

    One that predicts the same as a rival of test.tsv gets the rival's name and a colon in front,
    in place of that.
    """
    for rival, of_rival in rivals.items():
        named = {}
        for name, prediction in predictions.items():
            is_equal = are_equal_in_files(prediction, of_rival)
            title = f"{rival}: {name}" if is_equal else name
            named[title] = prediction
        if named.keys() == predictions.keys():
            named[rival] = of_rival
        predictions = named
    return predictions
