"""What test predictions are worth: figures of rows and of groups of them, and their intervals.

Shapes: n rows of T scores.
"""

import statistics
from collections import Counter
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

import metrics
from analyse_rivals import rivals, with_baseline
from data_tables import Tables
from run_results import Predictions

PROFILE = 20  # targets: with more of them, a row is a profile
MOST = 3  # of deletions and unseen genes; rows with more are counted with those
LEVELS = 12  # most that are shown as groups of rows
CELLS = 10**8  # rows x targets x resamples of an interval, about, which takes half a minute


def analyse(rows: Predictions, loss: str = "squared", threshold: float | None = None) -> dict:
    """Returns `summary` of all rows, of groups of them, and the figures of each of several targets.

    Groups are by number of unseen genes, by number of deletions, and by level if there are 2 to 12.
    """
    options = {
        "loss": loss,
        "threshold": threshold,
        "resamples": number_of_resamples(rows.y.numel()),
    }
    unit = rows.unit()
    result = summary(rows, unit, **options)
    result["resamples"] = options["resamples"]
    num_drawn = Counter(kind for kind, _ in set(chain.from_iterable(rows.units())))
    result["sets_drawn"] = num_drawn["set"]
    result["genes_drawn"] = num_drawn["gene"]

    def of_group(is_in_group: Tensor) -> dict:
        """Returns the figures of a group of scores, bool [n, T] or, of whole rows, [n, 1]."""
        return summary(rows.select(is_in_group), unit[is_in_group.any(dim=1)], **options)

    for name, count in {"unseen": rows.unseen, "deletions": rows.deletions().unsqueeze(1)}.items():
        group = count.clamp(max=MOST)
        result[f"by_{name}"] = {}
        for k in group.unique().tolist():
            result[f"by_{name}"][str(k)] = of_group(group == k)
    levels = rows.levels()
    result["by_level"] = {}
    groups = set(levels) - {""}
    if 1 < len(groups) <= LEVELS:
        numbers = sorted(groups - {"several"}, key=float)
        for level in [*numbers, *groups.intersection({"several"})]:
            is_at_level = torch.tensor([row_level == level for row_level in levels])
            result["by_level"][level] = of_group(is_at_level.unsqueeze(1))
    if len(rows.targets) > 1:
        each = target_figures(rows, loss, threshold)
        result["targets"] = {}
        for t, target in enumerate(rows.targets):
            figures = {name: values[t].item() for name, values in each.items()}
            result["targets"][target] = figures
    return result


def summary(
    rows: Predictions, unit: Tensor, loss: str, threshold: float | None, resamples: int
) -> dict:
    """Returns the number of rows, the means over targets of `target_figures`, and `gain`.

    That is the 95 % interval of Pearson's r less the baseline's, for which rows of the same `unit`,
    long [n, 2], are drawn together. `n` are the rows with a score. Of profiles, also
    `profile_figures`, the 95 % interval of Pearson's r over the targets of a row less the
    baseline's, and quartiles over the targets.
    """
    y = rows.y
    each = target_figures(rows, loss, threshold)
    means = means_of(each)
    gains = metrics.resampled_pearson(y, rows.prediction, unit, resamples)
    gains -= metrics.resampled_pearson(y, rows.baseline, unit, resamples)
    num_scored = int((~y.isnan()).any(dim=1).sum())
    result = {"n": num_scored, **means, "gain": metrics.interval(gains)}
    result["cells"] = int((~y.isnan()).sum())
    if num_scored < len(y):
        result["rows"] = len(y)
    if y.size(1) > PROFILE:
        gain = means["pearson"] - means["baseline_pearson"]
        result["gain"] = metrics.interval(metrics.centred(gains, gain))
        quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        for name in ("pearson", "baseline_pearson"):
            result[f"{name}_quartiles"] = each[name].nanquantile(quartiles).tolist()
        result |= profile_figures(rows)
        row_gains = metrics.pearson_of_rows(y, rows.prediction)
        row_gains -= metrics.pearson_of_rows(y, rows.baseline)
        result["row_gain"] = metrics.interval(metrics.resampled_mean(row_gains, unit, resamples))
    return result


def means_of(figures: dict[str, Tensor]) -> dict[str, float]:
    """Returns the mean over the targets of each figure [T], without nan."""
    return {name: values.nanmean().item() for name, values in figures.items()}


def profile_figures(rows: Predictions) -> dict[str, float]:
    """Returns the means over rows of Pearson's r over the targets, and of the squared error.

    That is the error of the targets that change most in each row.
    """
    largest = rows.y.abs().nan_to_num().topk(PROFILE, dim=1).indices
    error = (rows.prediction - rows.y).square().gather(1, largest)
    figures = {
        "row_pearson": metrics.pearson_of_rows(rows.y, rows.prediction),
        "baseline_row_pearson": metrics.pearson_of_rows(rows.y, rows.baseline),
        "mse_top20": error,
    }
    return means_of(figures)


def target_figures(
    rows: Predictions, loss: str = "squared", threshold: float | None = None
) -> dict[str, Tensor]:
    """Returns the figures of each target, [T], nan where undefined.

    If rows have weights, Pearson's r is also with these; if they have an `sd`, there is also the
    ceiling of R2, and of Pearson's r, its root, which predictions without an error would have.
    With a threshold, or binary scores, these are also how well rows are found: scores below the
    threshold by low predictions, scores of 1 by high ones.
    """
    y = rows.y
    prediction = rows.prediction
    result = {}
    for metric in (metrics.mse, metrics.r2, metrics.pearson, metrics.spearman):
        result[metric.__name__] = metric(y, prediction)
    result["baseline_pearson"] = metrics.pearson(y, rows.baseline)
    if rows.weight is not None:
        weight = rows.weight.unsqueeze(1)
        result["weighted_pearson"] = metrics.pearson(y, prediction, weight)
        result["baseline_weighted_pearson"] = metrics.pearson(y, rows.baseline, weight)
    if rows.sd is not None:
        result["ceiling_r2"] = metrics.noise_ceiling(y, rows.sd.unsqueeze(1))
        result["ceiling_pearson"] = result["ceiling_r2"].sqrt()
        result["r2_of_ceiling"] = result["r2"] / result["ceiling_r2"]
    positive = None
    certainty = metrics.as_ranked(y, prediction)
    if threshold is not None:
        positive = y < threshold
        certainty = -certainty
    elif loss == "binary":
        positive = y == 1
    if positive is not None:
        result["auroc"] = metrics.auroc(positive, certainty)
        result["average_precision"] = metrics.average_precision(positive, certainty)
    return result


def number_of_resamples(num_cells: int) -> int:
    """Returns how many resamples an interval takes from a table of so many scores."""
    return max(100, min(1000, CELLS // num_cells))


# ---- Several runs --------------------------------------------------------------------------------
def ensemble_of(members: dict[str, Predictions]) -> tuple[Predictions, Tensor]:
    """Returns the members' rows with their mean prediction, and its standard deviation, [n, T]."""
    predictions = torch.stack([rows.prediction for rows in members.values()])
    std, mean = torch.std_mean(predictions, dim=0)
    first = next(iter(members.values()))
    return replace(first, prediction=mean), std


def figures_together(
    members: dict[str, Predictions], ensemble: Predictions, loss: str, threshold: float | None
) -> dict[str, dict]:
    """Returns the `figures` of each member by name, their `mean`, and those of the `ensemble`.

    Those of a member are `means_of` its `target_figures`, those of the ensemble its `summary`.
    """
    figures = {}
    for name, rows in members.items():
        figures[name] = means_of(target_figures(rows, loss, threshold))
    mean = {}
    for name in figures[next(iter(members))]:
        mean[name] = statistics.fmean(of_member[name] for of_member in figures.values())
    resamples = number_of_resamples(ensemble.y.numel())
    return {
        "figures": figures,
        "mean": mean,
        "ensemble": summary(ensemble, ensemble.unit(), loss, threshold, resamples),
    }


def difference_of_best(members: dict[str, Predictions], loss: str) -> dict:
    """Returns the names of the two `runs` of the highest Pearson's r, and its `difference`.

    `gain` is the 95 % interval of that, for which rows are drawn as in `summary`, and for both runs
    the same ones.
    """
    correlation = {}
    for name, rows in members.items():
        correlation[name] = metrics.pearson(rows.y, rows.prediction).nanmean().item()
    best, second = sorted(correlation, key=correlation.__getitem__, reverse=True)[:2]
    rows = replace(members[best], baseline=members[second].prediction)
    figures = summary(rows, rows.unit(), loss, None, number_of_resamples(rows.y.numel()))
    return {
        "runs": [best, second],
        "difference": figures["pearson"] - figures["baseline_pearson"],
        "gain": figures["gain"],
    }


# ---- Without the model ---------------------------------------------------------------------------
def beside_rivals(rows: Predictions, tables: Tables, loss: str) -> dict[str, dict]:
    """Returns the figures of predictions without the model by name, the best first.

    `gain` is the 95 % interval of the model's Pearson's r less theirs.
    """
    resamples = number_of_resamples(rows.y.numel())
    unit = rows.unit()
    figures = {}
    for name, prediction in with_baseline(rivals(tables, loss), rows.baseline).items():
        turned = replace(rows, prediction=prediction, baseline=rows.prediction)
        of_rival = summary(turned, unit, loss, None, resamples)
        low, high = of_rival["gain"]
        figures[name] = {key: of_rival[key] for key in ("pearson", "r2", "spearman")}
        figures[name]["gain"] = [-high, -low]
    return dict(sorted(figures.items(), key=lambda item: item[1]["pearson"], reverse=True))
