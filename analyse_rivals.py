"""The rivals: simple predictions of the test rows without a model.

A model should be better than these rivals, which only need a line or two of arithmetic. If single
nodes have training scores, the sum, maximum, minimum or product of these scores predicts a set of
nodes. The training scores of sets without one of the nodes predict the set in the same way. Another
rival is the baseline plus a ridge regression on features of pairs of nodes in the graph.

Shapes: n rows of T targets, `total` perturbed nodes in all rows, F features of pairs.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_geometric.utils import scatter

from baseline import Baseline, additive_baseline, load_baseline
from baseline_combination import least_squares, normal_equations
from data import KnockoutDataset, mean_one_weight
from data_tables import Tables
from losses import LOSSES
from mask import SharedGraph, doses
from metrics import mean_and_std, weighted_mean
from parts import is_here

FEATURES = ("sum", "largest", "smallest", "product")
WITH_NEIGHBOURS = "sum of effects, unseen: graph neighbours"
PAIRS_BY_RIDGE = "pair features by ridge"
LEAST_ROWS = 10  # smallest number of training rows that a line or a ridge regression is fitted to
# Candidate penalties on the weights of standardised features of pairs.
PAIR_PENALTIES = (10000.0, 1000.0, 100.0, 10.0, 1.0)


def rivals(tables: Tables, loss: str) -> dict[str, Tensor]:
    """Returns the rivals' predictions of the test rows, by name, float64 [test rows, T] each.

    Several rivals use the scores of single nodes. If no training row perturbs only a certain node,
    the score of this node is estimated as intercept plus effect. If no training row perturbs the
    node at all, its effect is estimated as the mean effect of nearby nodes in the graph.
    """
    test = tables.rows("test")
    weight = mean_one_weight(tables)
    train = tables.rows("train")
    mean = weighted_mean(tables.y[train].nan_to_num(), weight[train])
    additive = additive_baseline(tables, loss)
    inverse_link = LOSSES[loss].inverse_link
    predictions = {"mean": mean.expand(len(test), -1), "sum of effects": additive.prediction[test]}
    if tables.unseen("test").any():
        of_seen = replace(additive, effect=additive.effect * tables.is_seen().unsqueeze(1))
        terms = node_terms(tables, of_seen)
        total = scatter(terms, tables.sample(), dim_size=len(tables.y))
        predictions["sum of effects"] = inverse_link(additive.intercept + total)[test]
        predictions[WITH_NEIGHBOURS] = additive.prediction[test]
    intact = inverse_link(additive.intercept)
    node_code = tables.node_code()
    set_code = tables.set_code(node_code)
    single = measured_means(tables, weight, set_code, node_code)
    if not are_mostly_measured(tables, single, least_nodes=2):
        return predictions
    estimated = inverse_link(additive.intercept + node_terms(tables, additive))
    single = single.where(~single.isnan(), estimated)
    sums = dict.fromkeys(FEATURES, additive.prediction)
    of_singles = fitted_lines(tables, weight, single, intact, 2, sums)
    for name in FEATURES:
        predictions[f"{name} of single scores"] = of_singles[name][test]
    code_without_node = set_code[tables.sample()] - node_code
    smaller = measured_means(tables, weight, set_code, code_without_node)
    if are_mostly_measured(tables, smaller, least_nodes=3):
        of_smaller = fitted_lines(tables, weight, smaller, intact, 3, of_singles)
        for name in FEATURES:
            predictions[f"{name} of scores without a node"] = of_smaller[name][test]
    return predictions


def are_mostly_measured(tables: Tables, means: Tensor, least_nodes: int) -> bool:
    """Returns whether more than half of the means [total, T] are not nan.

    Only the means for perturbed nodes of test rows with at least `least_nodes` nodes count.
    """
    is_counted = tables.is_in("test") & (tables.perturbed_ptr.diff() >= least_nodes)
    counted = means[is_counted[tables.sample()]]
    return 2 * (~counted.isnan()).sum() > counted.numel()


def fitted_lines(
    tables: Tables,
    weight: Tensor,
    means: Tensor,
    intact: Tensor,
    least_nodes: int,
    otherwise: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Returns the predictions of all rows from each of the `FEATURES`, by name, [n, T] each.

    A feature combines the `means` of the nodes of a row, [total, T], and a line is fitted to it.
    Rows with fewer than `least_nodes` nodes, or with a mean that is nan, get the predictions in
    `otherwise`.
    """
    has_nodes = (tables.perturbed_ptr.diff() >= least_nodes).unsqueeze(1)
    features = features_of_sets(tables, means, intact)
    predictions = {}
    for name in FEATURES:
        line = fitted_line(tables, weight, features[name].where(has_nodes, math.nan))
        predictions[name] = line.where(line.isfinite(), otherwise[name])
    return predictions


def node_terms(tables: Tables, additive: Baseline) -> Tensor:
    """Returns what each perturbed node adds to the prediction of the additive baseline, [total, T].

    This is its response plus slope * (1 - level).
    """
    dose = (doses(tables.level) @ additive.basis).unsqueeze(2)
    response = (dose * additive.effect[tables.perturbed]).sum(dim=1)
    change = (1 - tables.level).unsqueeze(1)
    return additive.slope * change + response


def measured_means(tables: Tables, weight: Tensor, set_code: Tensor, wanted: Tensor) -> Tensor:
    """Returns the weighted mean training score of each wanted set of nodes, [total, T].

    `wanted` are the codes of these sets, [total], `set_code` are the codes of all rows, [n], and
    weights are [n, T]. The mean is nan if no training row with the score has the set.
    """
    is_train = tables.is_in("train")
    codes, number = set_code[is_train].unique(return_inverse=True)
    train_weight = weight[is_train]
    weighted = train_weight * tables.y[is_train].nan_to_num()
    total_weight = scatter(train_weight, number, dim_size=len(codes))
    total = scatter(weighted, number, dim_size=len(codes))
    place = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    is_measured = (codes[place] == wanted).unsqueeze(1)
    return (total / total_weight)[place].where(is_measured, math.nan)


def features_of_sets(tables: Tables, means: Tensor, intact: Tensor) -> dict[str, Tensor]:
    """Returns the sum, largest, smallest and product of the means of each row's nodes, by name.

    `means` are the means of all perturbed nodes, [total, T]. The features are [n, T] each, and nan
    if one of the means is nan. `intact` [T] is the score of a row without perturbed nodes. The sum
    adds the differences of the means from it, the product multiplies it by their ratios to it.
    """
    row = tables.sample()
    num_rows = len(tables.y)
    is_known = scatter(means.isnan().int(), row, dim_size=num_rows) == 0
    means = means.nan_to_num()
    total = scatter(means - intact, row, dim_size=num_rows)
    ratio = scatter(means / intact, row, dim_size=num_rows, reduce="mul")
    features = {
        "sum": intact + total,
        "largest": scatter(means, row, dim_size=num_rows, reduce="max"),
        "smallest": scatter(means, row, dim_size=num_rows, reduce="min"),
        "product": intact * ratio,
    }
    for name, feature in features.items():
        # If the intact score is 0 or nearly 0, the product is meaningless, infinite or huge. No
        # valid score is this large.
        features[name] = feature.where(is_known & (feature.abs() < 1e30), math.nan)
    return features


def fitted_line(tables: Tables, weight: Tensor, feature: Tensor) -> Tensor:
    """Fits the line constant + slope * feature to the training rows; predicts all rows, [n, T].

    The feature is [n, T]. If a target has fewer than `LEAST_ROWS` rows for the fit, the feature is
    the prediction.
    """
    is_fitted = tables.is_in("train").unsqueeze(1) & feature.isfinite() & (weight > 0)
    predictions = feature.clone()
    has_line = is_fitted.sum(dim=0) >= LEAST_ROWS
    for t in has_line.nonzero().flatten().tolist():
        rows = is_fitted[:, t]
        fitted = feature[rows, t]
        columns = torch.stack([torch.ones_like(fitted), fitted], dim=1)
        y = tables.y[rows, t : t + 1]
        constant, slope = least_squares(columns, y, weight[rows, t : t + 1])
        predictions[:, t] = constant + slope * feature[:, t]
    return predictions


def pair_rival(tables: Tables, loss: str, cache_dir: str) -> dict[str, Tensor]:
    """Returns {name: predictions of the test rows, [test rows, T]} of a rival with pair features.

    The rival is the baseline plus a ridge regression on features of pairs. The result is {} in four
    cases: scores are binary, fewer than `LEAST_ROWS` training rows have features that are not 0,
    the features of all rows do not fit in memory, or the optional part `model_pairs` is missing.
    """
    has_pairs = tables.perturbed_ptr.diff().max() > 1
    if LOSSES[loss].is_binary or not has_pairs or not is_here("model_pairs"):
        return {}
    from model_pairs import add_pair_features

    fingerprint = tables.fingerprint()
    graph = SharedGraph(tables.graph())
    dataset = KnockoutDataset(tables, graph.degree)
    add_pair_features(dataset, graph, cache_dir, fingerprint)
    features = dataset.columns["pair_features"]
    if callable(features) or features[tables.rows("train")].any(dim=1).sum() < LEAST_ROWS:
        return {}
    baseline = load_baseline(tables, fingerprint, cache_dir, loss).prediction
    terms = pair_terms(tables, tables.y - baseline, features)
    return {PAIRS_BY_RIDGE: baseline[tables.rows("test")] + terms}


def pair_terms(tables: Tables, residual: Tensor, features: Tensor) -> Tensor:
    """Returns predictions of the residual [n, T] from features [n, F]: [test rows, T].

    For each target, a ridge regression is fitted to at most `model_pairs.MOST_ROWS` training rows.
    The features are standardised over the same rows. The penalty does not apply to the constant.
    The penalty with the smallest squared error on the validation rows is used.
    """
    from model_pairs import MOST_ROWS

    train = tables.rows("train")
    train = train[:: len(train) // MOST_ROWS + 1]
    mean, std = mean_and_std(features[train].double())

    def columns(rows: Tensor) -> Tensor:
        """Returns a column of ones and the standardised features of rows, [rows, 1 + F]."""
        return pad((features[rows].double() - mean) / std, (1, 0), value=1.0)

    val = tables.rows("val")
    of_train, of_val, of_test = map(columns, (train, val, tables.rows("test")))
    penalised = torch.eye(of_train.size(1), dtype=torch.float64)
    penalised[0, 0] = 0.0
    penalties = torch.tensor(PAIR_PENALTIES, dtype=torch.float64).view(-1, 1, 1) * penalised
    residual = residual.nan_to_num()
    weight = mean_one_weight(tables)
    terms = []
    for y, row_weight in zip(residual.split(1, dim=1), weight.split(1, dim=1), strict=True):
        matrix, right = normal_equations(of_train, y[train], row_weight[train])
        fits = torch.linalg.solve(matrix + penalties, right)  # [penalties, 1 + F]
        errors = (y[val] - of_val @ fits.T).square() * row_weight[val]
        best = errors.sum(dim=0).argmin()
        terms.append(of_test @ fits[best])
    return torch.stack(terms, dim=1)
