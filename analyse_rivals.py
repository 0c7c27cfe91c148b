"""What can be said of test rows without a model, each by a line or two of arithmetic.

Where nodes were measured alone, the sum, the largest, the smallest or the product of their scores
may tell much of sets of them; where sets that lack one node of a row were measured, so do these.

Shapes: n rows of T scores, `total` perturbed nodes in all rows.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from baseline import Baseline, additive_baseline, mean_one_weight
from baseline_combination import least_squares
from data_tables import Tables, weighted_mean
from mask import doses

FEATURES = ("sum", "largest", "smallest", "product")
WITH_NEIGHBOURS = "sum of effects, unseen: graph neighbours"
LEAST_ROWS = 10  # of training, to which a line is fitted


def rivals(tables: Tables, loss: str) -> dict[str, Tensor]:
    """Returns predictions of the test rows by name of the rival, float64 [n, T].

    In place of the score of a node that no training row has alone, its effect counts. That of a
    node that no training row has at all is the mean of its neighbours in the graph.
    """
    test = tables.rows("test")
    weight = mean_one_weight(tables)
    train = tables.rows("train")
    mean = weighted_mean(tables.y[train].nan_to_num(), weight[train])
    additive = additive_baseline(tables, loss)
    predictions = {"mean": mean.expand(len(test), -1), "sum of effects": additive.prediction[test]}
    if tables.unseen("test").any():
        of_seen = replace(additive, effect=additive.effect * tables.is_seen().unsqueeze(1))
        predictions["sum of effects"] = sums_of_effects(tables, of_seen, loss)[test]
        predictions[WITH_NEIGHBOURS] = additive.prediction[test]
    intact = additive.intercept.sigmoid() if loss == "binary" else additive.intercept
    node_code = tables.node_code()
    set_code = tables.set_code(node_code)
    single = measured_scores(tables, weight, set_code, node_code)
    if not is_known_mostly(tables, single, least_nodes=2):
        return predictions
    single = single.where(~single.isnan(), single_scores(tables, additive, loss))
    sums = dict.fromkeys(FEATURES, additive.prediction)
    of_singles = on_lines(tables, weight, single, intact, 2, sums)
    for name in FEATURES:
        predictions[f"{name} of single scores"] = of_singles[name][test]
    smaller = measured_scores(tables, weight, set_code, set_code[tables.sample()] - node_code)
    if is_known_mostly(tables, smaller, least_nodes=3):
        of_smaller = on_lines(tables, weight, smaller, intact, 3, of_singles)
        for name in FEATURES:
            predictions[f"{name} of scores without a node"] = of_smaller[name][test]
    return predictions


def with_baseline(predictions: dict[str, Tensor], baseline: Tensor) -> dict[str, Tensor]:
    """Returns predictions [n, T] by name with those of the baseline, which may be one of them."""
    tolerance = 1e-4 * baseline.std(dim=0, correction=0)  # digits of a file
    named = {}
    for name, prediction in predictions.items():
        is_baseline = ((prediction - baseline).abs() <= tolerance).all()
        named[f"baseline: {name}" if is_baseline else name] = prediction
    if named.keys() == predictions.keys():
        named["baseline"] = baseline
    return named


def is_known_mostly(tables: Tables, scores: Tensor, least_nodes: int) -> bool:
    """Returns whether more than half of the scores [total, T] of larger test rows are there."""
    is_asked = tables.is_in("test") & (tables.perturbed_ptr.diff() >= least_nodes)
    asked = scores[is_asked[tables.sample()]]
    return 2 * (~asked.isnan()).sum() > asked.numel()


def on_lines(
    tables: Tables,
    weight: Tensor,
    scores: Tensor,
    intact: Tensor,
    least_nodes: int,
    otherwise: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Returns `on_line` of each of the features of rows with so many nodes, by name, [n, T].

    Where a score is not known, and for other rows, it is what `otherwise` has of that name.
    """
    has_nodes = (tables.perturbed_ptr.diff() >= least_nodes).unsqueeze(1)
    features = features_of_sets(tables, scores, intact)
    predictions = {}
    for name in FEATURES:
        line = on_line(tables, weight, features[name].where(has_nodes, math.nan))
        predictions[name] = line.where(line.isfinite(), otherwise[name])
    return predictions


def single_scores(tables: Tables, additive: Baseline, loss: str) -> Tensor:
    """Returns what the sum of effects says of each perturbed node alone, [total, T]."""
    score = additive.intercept + responses(tables, additive)
    return score.sigmoid() if loss == "binary" else score


def sums_of_effects(tables: Tables, additive: Baseline, loss: str) -> Tensor:
    """Returns what the sum of effects says of each row, [n, T]."""
    total = scatter(responses(tables, additive), tables.sample(), dim_size=len(tables.y))
    score = additive.intercept + total
    return score.sigmoid() if loss == "binary" else score


def responses(tables: Tables, additive: Baseline) -> Tensor:
    """Returns what each perturbed node adds to the intercept, [total, T]."""
    dose = (doses(tables.level) @ additive.basis).unsqueeze(2)
    response = (dose * additive.effect[tables.perturbed]).sum(dim=1)
    change = (1 - tables.level).unsqueeze(1)
    return additive.slope * change + response


def measured_scores(tables: Tables, weight: Tensor, set_code: Tensor, wanted: Tensor) -> Tensor:
    """Returns the mean training score of the sets with the wanted codes, [total, T].

    It is nan where no training row with that score has the set. Weights are [n, T].
    """
    is_train = tables.is_in("train")
    codes, number = set_code[is_train].unique(return_inverse=True)
    of_rows = weight[is_train]
    total_weight = scatter(of_rows, number, dim_size=len(codes))
    total = scatter(of_rows * tables.y[is_train].nan_to_num(), number, dim_size=len(codes))
    place = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    is_measured = (codes[place] == wanted).unsqueeze(1)
    return (total / total_weight)[place].where(is_measured, math.nan)


def features_of_sets(tables: Tables, scores: Tensor, intact: Tensor) -> dict[str, Tensor]:
    """Returns what each row makes of the scores [total, T] of its entries, by name, [n, T].

    Sums and products are of differences from the intact score [T], and of ratios to it. They are
    nan where a score is not known.
    """
    row = tables.sample()
    num_rows = len(tables.y)
    is_known = scatter(scores.isnan().int(), row, dim_size=num_rows) == 0
    scores = scores.nan_to_num()
    total = scatter(scores - intact, row, dim_size=num_rows)
    ratio = scatter(scores / intact, row, dim_size=num_rows, reduce="mul")
    features = {
        "sum": intact + total,
        "largest": scatter(scores, row, dim_size=num_rows, reduce="max"),
        "smallest": scatter(scores, row, dim_size=num_rows, reduce="min"),
        "product": intact * ratio,
    }
    for name, feature in features.items():
        # A ratio to an intact score of 0 says nothing, and no score is as large.
        features[name] = feature.where(is_known & (feature.abs() < 1e30), math.nan)
    return features


def on_line(tables: Tables, weight: Tensor, feature: Tensor) -> Tensor:
    """Returns what the training rows say that a score is for a feature, by a line, [n, T].

    It is the feature, [n, T], if there are too few of them to fit a line.
    """
    is_fitted = tables.is_in("train").unsqueeze(1) & feature.isfinite() & (weight > 0)
    predictions = feature.clone()
    for t in (is_fitted.sum(dim=0) >= LEAST_ROWS).nonzero().flatten().tolist():
        rows = is_fitted[:, t]
        of_rows = feature[rows, t]
        columns = torch.stack([torch.ones_like(of_rows), of_rows], dim=1)
        y = tables.y[rows, t : t + 1]
        constant, slope = least_squares(columns, y, weight[rows, t : t + 1])
        predictions[:, t] = constant + slope * feature[:, t]
    return predictions


def shared_pairs(tables: Tables) -> int:
    """Returns how many test rows knock out two nodes of a training row, both of 2 to 10 nodes."""
    row = tables.sample()
    has_few = tables.perturbed_ptr.diff()[row] <= 10
    row = row[has_few]
    node = tables.perturbed[has_few]
    pairs = []  # number of the pair, row
    for distance in range(1, 10):  # of two nodes in the same row
        first_row = row[:-distance]
        is_pair = first_row == row[distance:]
        number = node[:-distance] * len(tables.genes) + node[distance:]
        pairs.append(torch.stack([number, first_row])[:, is_pair])
    number, row_of_pair = torch.cat(pairs, dim=1)
    is_train = tables.is_in("train")[row_of_pair]
    is_test = tables.is_in("test")[row_of_pair]
    is_shared = torch.isin(number[is_test], number[is_train])
    return len(row_of_pair[is_test][is_shared].unique())
