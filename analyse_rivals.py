"""The rivals: predictions of the test rows without a model, each by a line or two of arithmetic.

If there are scores of single nodes, their sum, maximum, minimum or product predicts a set of these
nodes. If there are scores of the sets without one node, they predict the set, too. A ridge
regression on features of pairs of nodes in the graph adds to the baseline.

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
LEAST_ROWS = 10  # smallest number of training rows that a line is fitted to
# Penalties on the weights of standardised features.
PAIR_PENALTIES = (10000.0, 1000.0, 100.0, 10.0, 1.0)


def rivals(tables: Tables, loss: str) -> dict[str, Tensor]:
    """Returns the rivals' predictions of the test rows, by name, float64 [test rows, T] each.

    If no training row has only this node, its score is estimated as intercept plus effect. If no
    training row has the node at all, its effect is estimated as the mean effect of its neighbours
    in the graph.
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

    Only the perturbed nodes of test rows with at least `least_nodes` nodes count.
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
    """Returns the predictions of a line fitted to each of the `FEATURES`, by name, [n, T].

    Rows with fewer than `least_nodes` nodes, or with a mean that is nan, get the predictions
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
    """Returns the term of each perturbed node in the additive baseline, [total, T]."""
    dose = (doses(tables.level) @ additive.basis).unsqueeze(2)
    response = (dose * additive.effect[tables.perturbed]).sum(dim=1)
    change = (1 - tables.level).unsqueeze(1)
    return additive.slope * change + response


def measured_means(tables: Tables, weight: Tensor, set_code: Tensor, wanted: Tensor) -> Tensor:
    """Returns the mean training score of the set with each wanted code [total], [total, T].

    It is nan if no training row with that score has the set. Weights are [n, T].
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
    """Returns each row's sum, largest, smallest and product of its nodes' means [total, T].

    They are by name, [n, T] each, and nan if a mean is nan. Sums are of differences from the intact
    score [T], products of ratios to it.
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
        # A ratio to an intact score of 0 is meaningless, and no valid score is this large.
        features[name] = feature.where(is_known & (feature.abs() < 1e30), math.nan)
    return features


def fitted_line(tables: Tables, weight: Tensor, feature: Tensor) -> Tensor:
    """Fits y = constant + slope * feature on the training rows; returns it for all rows, [n, T].

    The feature is [n, T]. A target with too few rows to fit a line gets the feature itself.
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
    """Returns the predictions of the baseline plus features of pairs, by name, as `rivals` does.

    It returns {} for binary scores, if fewer than `LEAST_ROWS` training rows have pairs with
    features, if the features of all rows do not fit in memory, and without the optional part
    `model_pairs`.
    """
    if LOSSES[loss].is_binary or (tables.perturbed_ptr.diff() < 2).all():
        return {}
    if not is_here("model_pairs"):
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
    """Returns a ridge regression of the residual [n, T] on features [n, F], [test rows, T].

    Each target has its own regression, fitted to the training rows, which also standardise the
    features. Its penalty, which does not apply to the constant, has the smallest squared error on
    the validation rows.
    """
    from model_pairs import MOST_ROWS

    train = tables.rows("train")
    train = train[:: len(train) // MOST_ROWS + 1]
    mean, std = mean_and_std(features[train].double())

    def columns(rows: Tensor) -> Tensor:
        """Returns 1 and the standardised features of some rows, [rows, 1 + F]."""
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
