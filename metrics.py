"""Metrics: functions of scores and predictions that return one value for each target.

To log a further metric, write a function and add it to `METRICS`. Its first three arguments are the
scores y [n, T], which are nan if they are missing; the predictions [n, T]; and the weights of the
rows, [n, 1] or 1. It returns [T], with nan for each target for which the metric is undefined.

Further parameters can have the name of another entry of `Criterion.predictions`, such as `sd`
[n, T]. Such a metric is left out for rivals, and for losses that do not predict this entry.

Shapes: n rows of T targets.
"""

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from errors import UserError

log = logging.getLogger("metrics")
Metric = Callable[..., Tensor]


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Returns the weighted mean over rows, [T], given values and weights [n, T].

    It is nan if all weights of a target are 0.
    """
    return (values * weight).sum(dim=0) / weight.sum(dim=0)


def mean_and_std(values: Tensor, weight: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation of values [n, T] over rows, [T] each.

    Values that are nan are ignored. `weight` contains the weights of the values, [n, T]. A standard
    deviation of 0 is replaced by 1.
    """
    # The median is subtracted first, so that the mean of equal values is exact.
    middle = values.nanmedian(dim=0).values
    mean = middle + mean_present(values - middle, values, weight)
    std = mean_present((values - mean).square(), values, weight).sqrt()
    largest = values.nan_to_num().abs().amax(dim=0)
    return mean, std.where(std > 1e-12 * largest, 1.0)


def standardise(values: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns (values - mean) / standard deviation of values [n, T] over rows; nan remains nan."""
    mean, std = mean_and_std(values, weight)
    return (values - mean) / std


def mean_present(values: Tensor, y: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns the `weighted_mean` of values [n, T] over the rows with a score in y [n, T], [T]."""
    present = ~y.isnan()
    return weighted_mean(values.where(present, 0.0), (weight * present).to(values.dtype))


def mse(y: Tensor, prediction: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns the mean squared error, [T]."""
    return mean_present((prediction - y).square(), y, weight)


def pearson(y: Tensor, prediction: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns Pearson's r, [T].

    It is nan if y is constant, so that means over targets leave out such targets. It is 0 if only
    the prediction is constant, so that means of different predictions include the same targets.
    """
    a = standardise(y, weight)
    b = standardise(prediction.where(~y.isnan(), math.nan), weight)
    products = a * b
    varies = mean_present(a.square(), y, weight) > 0.5
    return mean_present(products, products, weight).where(varies, math.nan)


def spearman(y: Tensor, prediction: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns Spearman's rank correlation, the `pearson` of the ranks, [T]."""
    return pearson(rank(y), rank(as_ranked(y, prediction)), weight)


# All metrics are logged, for the model and its rivals. The first metric is plotted, and it chooses
# best.pt. Larger values must be better.
METRICS = {
    "pearson": pearson,
}


# ---- Ranks ---------------------------------------------------------------------------------------
def rank(values: Tensor) -> Tensor:
    """Returns the ranks of each target's values, float64 [n, T]; nan remains nan.

    The smallest value has rank 1. Equal values have the mean of their ranks.
    """
    columns = values.T.nan_to_num(math.inf).contiguous()  # nan is sorted to the end
    ordered, order = columns.sort(dim=1)
    smaller = torch.searchsorted(ordered, ordered)
    not_larger = torch.searchsorted(ordered, ordered, right=True)
    ordered_ranks = (smaller + not_larger + 1).double() / 2
    ranks = torch.empty_like(ordered_ranks).scatter(1, order, ordered_ranks).T
    return ranks.where(~values.isnan(), math.nan)


def as_ranked(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns the values by which predictions are ranked, float32 [n, T]; nan if y is missing.

    The mean of y is subtracted from the predictions before they are rounded to float32. In float64,
    predictions that are equal up to rounding would get different ranks. Probabilities of scores of
    0 and 1 are replaced by their logits, because many of them may be close to 0.
    """
    mean, _ = mean_and_std(y)
    is_binary = ((y == 0) | (y == 1) | y.isnan()).all(dim=0)
    is_probability = is_binary & ((prediction >= 0) & (prediction <= 1)).all(dim=0)
    ranked = (prediction - mean).where(~is_probability, prediction.logit())
    return ranked.float().where(~y.isnan(), math.nan)


# ---- For the log and the best model --------------------------------------------------------------
def outputs_of(metric: Metric, but: Collection[str] = ()) -> list[str]:
    """Returns the names of the further predictions that a metric needs, such as `sd`.

    They are its parameters after the weight, without a default. Names in `but` are left out.
    """
    parameters = list(inspect.signature(metric).parameters.values())[3:]
    names = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return [name for name in names if name not in but]


def apply(
    metric: Metric, y: Tensor, predictions: dict[str, Tensor], weight: Tensor | float = 1.0
) -> Tensor:
    """Returns the value of a metric, [T], given {name: predictions, [n, T]}."""
    outputs = {name: predictions[name] for name in outputs_of(metric)}
    return metric(y, predictions["prediction"], weight, **outputs)


def metrics_beside_rivals(
    y: Tensor,
    predictions: dict[str, Tensor],
    rivals: dict[str, Tensor],
    weight: Tensor | float = 1.0,
    functions: dict[str, Metric] | None = None,
) -> dict[str, Tensor]:
    """Returns {name: value, [T]} of the metrics of the model and of each rival.

    The names of a rival's metrics begin with its name, as in `baseline_pearson`.

    Args:
        predictions: the predictions of the model, {name: [n, T]}.
        rivals: {name of a rival: its predictions, [n, T]}.
        functions: {name: metric}, by default `METRICS`.
    """
    sources = {"": predictions}
    for rival, prediction in rivals.items():
        sources[f"{rival}_"] = {"prediction": prediction}
    metrics = {}
    for name, metric in (functions or METRICS).items():
        for prefix, predicted in sources.items():
            if not outputs_of(metric, but=predicted):
                metrics[prefix + name] = apply(metric, y, predicted, weight)
    return metrics


def check_metrics(y: Tensor, criterion: Any, loss: str) -> None:
    """Logs a warning for each metric that needs a prediction that the loss lacks, such as sd.

    The first metric chooses the best model. Raises `UserError` if it needs such a prediction, or if
    it is larger for shuffled scores than for the scores themselves, y [n, T].
    """
    generator = torch.Generator().manual_seed(0)
    y = y[torch.randperm(len(y), generator=generator)[:1000]]
    predictions = criterion.predictions(y.new_zeros(*y.shape, len(criterion.columns)))
    shapes = {values.shape for values in predictions.values()}
    if next(iter(predictions)) != "prediction" or shapes != {y.shape}:
        problem = f"optim.loss={loss}: `predictions` must return `prediction` first"
        raise UserError(f"{problem}, and one value for each row and score, [n, T]: see losses.py")
    # The true scores as predictions, with further predictions such as an `sd`.
    truth = predictions | {"prediction": y.where(~y.isnan(), y.nanmean(dim=0))}
    first = first_metric()
    for name, metric in METRICS.items():
        for missing in outputs_of(metric, but=truth):
            problem = f"the metric {name} needs {missing}, which optim.loss={loss} does not predict"
            if name == first:
                raise UserError(f"{problem}: set another loss, or another first metric")
            log.warning(f"note      {problem}, so it is omitted")
    order = torch.randperm(len(y), generator=generator)
    shuffled = {name: values[order] for name, values in truth.items()}
    gain = apply(METRICS[first], y, truth) - apply(METRICS[first], y, shuffled)
    if gain.nanmean() < 0:
        problem = f"the first metric of metrics.METRICS, {first}, is smaller for better predictions"
        raise UserError(f"{problem}: return its negative, because larger values must be better")


def names_in(metrics: dict[str, Any]) -> list[str]:
    """Returns the names of the `METRICS` that are keys of `metrics`."""
    return [name for name in METRICS if name in metrics]


def first_metric(figures: Collection[str] | None = None) -> str:
    """Returns the name of the metric that chooses the best model: the first of `METRICS`.

    With `figures`, a collection of names, it is the first metric that they include.
    """
    names = (name for name in METRICS if figures is None or name in figures)
    return next(names, "pearson")


def quality(metrics: dict[str, Any]) -> tuple[float, float]:
    """Returns a key by which results are compared; a larger key is better.

    Results are compared by the first metric, then by minus the loss. If the first metric is
    undefined, it counts as 0. A loss that is nan is the worst.
    """
    name = first_metric()
    value = metrics.get(name, -math.inf)  # missing if METRICS was edited after the checkpoint
    if math.isnan(value):
        value = 0.0
    loss = metrics["loss"]
    if math.isnan(loss):
        loss = math.inf
    return value, -loss


def metrics_text(metrics: dict[str, Any], rivals: Iterable[str]) -> str:
    """Returns a text for the log: the loss, and each metric of the model and then of the rivals."""
    text = f"loss {metrics['loss']:.4f}"
    for name in names_in(metrics):
        title = name.replace("_", " ").title()
        text += f", {title} {metrics[name]:.4f}"
        for rival in rivals:
            if f"{rival}_{name}" in metrics:
                text += f", {rival} {metrics[f'{rival}_{name}']:.4f}"
    return text
