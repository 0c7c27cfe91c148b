"""What is known of the scores without the graph: an additive function of the perturbed nodes.

Training starts from it, and every result stands beside it. Its tables are those of one split.

Shapes: N nodes, n samples of T scores.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, scatter, to_torch_coo_tensor, to_undirected

from cache import cached, source_digest
from ridge import Design, LogisticRidge, Ridge
from tables import Tables, mean_and_std

TARGETS_AT_ONCE = 64  # whose numbers stay in cache
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # on the effects: 0.1 to 1000
POWERS = (1.0, 0.4, 0.6, 1.5)  # of levels
UNSOLVED = 1e-4  # error of a fit, from which on the log says that it has ended before


@dataclass
class Baseline:
    """What is known of the scores without the graph: an additive function of the perturbed nodes.

    It is intercept + the sum over them of (slope + effect) times the dose, 1 - level**power; a
    logit for optim.loss=binary.
    """

    intercept: Tensor  # float64 [T]
    slope: Tensor  # float64 [T], the same for every node
    effect: Tensor  # float32 [N, T], of each node; imputed where it is not seen for the score
    imputed: Tensor  # float32 [N, T], what it would be for each node in that case
    mean: Tensor  # float64 [T], of the training scores; for binary ones, of their logits
    std: Tensor  # float64 [T], of the training scores; 1 for binary ones
    prediction: Tensor  # float64 [n, T], for each row, in the units of y
    error: Tensor  # float64 [T], how far the fit is from its solution, as `TOLERANCE`
    power: float = 1.0


def load_baseline(tables: Tables, fingerprint: str, cache_dir: str, loss: str) -> Baseline:
    """Returns the `additive_baseline` of tables with this fingerprint, cached."""
    key = f"{source_digest(additive_baseline)} {fingerprint} {loss}"
    fields = cached(cache_dir, "baseline", key, lambda: vars(additive_baseline(tables, loss)))
    return Baseline(**fields)


def additive_baseline(tables: Tables, loss: str = "squared") -> Baseline:
    """Returns the ridge regression on the training rows that suits the validation rows best.

    For the loss `binary`, it is a logistic one. The penalty is chosen for each target, the power of
    levels for all.
    """
    rows = tables.rows("val")
    levels = tables.level.unique()
    powers = POWERS if len(levels) > 1 else (1.0,)  # nothing tells the power of a single level
    best = None
    least = math.inf
    for power in powers:
        fits = []
        # Powers of equal numbers, each by itself, may differ in the last bit, and so would sets.
        level = (levels**power)[torch.searchsorted(levels, tables.level)]
        for y in tables.y.split(TARGETS_AT_ONCE, dim=1):
            dosed = replace(tables, y=y, level=level)
            fits.append(fit_baseline(dosed, loss))
        fit = join_targets(fits, power)
        error = (fit.prediction[rows] - tables.y[rows].nan_to_num()) / fit.std
        total = (tables.score_weight(rows) * error.square()).sum()
        if total < least:
            least = total
            best = fit
    return best


def join_targets(baselines: list[Baseline], power: float) -> Baseline:
    """Returns the baselines of some targets each as that of all."""
    joined = {}
    for name, value in vars(baselines[0]).items():
        if isinstance(value, Tensor):
            joined[name] = torch.cat([getattr(part, name) for part in baselines], dim=-1)
    return Baseline(**joined, power=power)


def fit_baseline(tables: Tables, loss: str) -> Baseline:
    """Returns the `additive_baseline` of a few targets, with power 1."""
    weight = mean_one_weight(tables)
    train = tables.rows("train")
    mean, std = mean_and_std(tables.y[train], weight[train])
    if loss == "binary":
        mean = mean.logit(eps=1e-3)
        std = torch.ones_like(std)
    design = Design(tables)
    fit, error = fit_validated(tables, design, weight, mean, std, loss)
    constant, slope, effect = fit.tensor_split([1, 2])
    imputed = impute_effects(tables, mean_weight_of_nodes(tables, weight), effect)
    effect = effect.where(tables.is_seen(), imputed)
    prediction = design.predict(torch.cat([constant, slope, effect]))
    if loss == "binary":
        prediction = prediction.sigmoid()
    return Baseline(
        intercept=(constant - slope * design.mean_count).flatten(),
        slope=slope.flatten(),
        effect=effect.float(),
        imputed=imputed.float(),
        mean=mean,
        std=std,
        prediction=prediction,
        error=error,
    )


def mean_one_weight(tables: Tables) -> Tensor:
    """Returns the weight of each score, whose mean over the training rows that have it is 1.

    It is float64 [n, T], 0 where a score is missing.
    """
    weight = tables.score_weight(slice(None))
    of_train = tables.score_weight(tables.rows("train"))
    return weight * ((of_train > 0).sum(dim=0) / of_train.sum(dim=0))


def effective_share(weight: Tensor) -> Tensor:
    """Returns the effective number of rows (Kish 1965) over that of rows with a weight, [T].

    It is 1 for equal weights [n, T], and small where a few rows have nearly all of it: the others
    then have small weights, and need small penalties.
    """
    effective = weight.sum(dim=0).square() / weight.square().sum(dim=0)
    return effective / (weight > 0).sum(dim=0)


def mean_weight_of_nodes(tables: Tables, weight: Tensor) -> Tensor:
    """Returns the mean weight of the training scores of each node, float64 [N, T], 0 if none is."""
    is_train = tables.is_in("train")[tables.sample()]
    of_entries = weight[tables.sample()[is_train]]
    node = tables.perturbed[is_train]
    num_nodes = len(tables.genes)
    total = scatter(of_entries, node, dim_size=num_nodes)
    count = scatter((of_entries > 0).double(), node, dim_size=num_nodes)
    return total / count.clamp(min=1)


def fit_validated(
    tables: Tables, design: Design, weight: Tensor, mean: Tensor, std: Tensor, loss: str
) -> tuple[Tensor, Tensor]:
    """Returns the function of `design` that suits the validation rows best, and its error.

    They are [2 + N, T] and, as in `Baseline`, [T]. Scores count by their weight, [n, T]. Where no
    validation row tells anything of the effects on a target, its penalty is the one that suits a
    third of its training rows best, when it is fitted to the others; it is then fitted to all.
    """
    present = ~tables.y.isnan()
    is_train = present & tables.is_in("train").unsqueeze(1)
    is_val = present & tables.is_in("val").unsqueeze(1)
    is_validated = is_val & tells_effects(tables, is_train)
    has_val = is_validated.any(dim=0)
    is_intact = (tables.perturbed_ptr.diff() == 0).unsqueeze(1)
    is_validated |= is_val & is_intact
    is_fitted = is_train
    if not has_val.all():
        is_third = third_of_sets(tables, is_train)
        is_fitted = is_train & (has_val | ~is_third)
        is_told = is_third & tells_effects(tables, is_fitted)
        is_validated = is_validated.where(has_val, is_told)
    scale = effective_share(weight * is_train)
    y = tables.y.nan_to_num()
    regression = LogisticRidge if loss == "binary" else Ridge
    to_fitted = regression(design, y, weight * is_fitted, std)
    fit = y.new_zeros(2 + len(tables.genes), y.size(1))
    fit[0] = mean
    best = fit
    best_penalty = torch.ones_like(mean)
    least = torch.full_like(mean, math.inf)
    for penalty in reversed(PENALTIES):  # each starts from the one before
        fit = to_fitted.fit(penalty * scale, fit)
        error = to_fitted.losses(fit).mul_(weight * is_validated).sum(0)
        is_better = error <= least
        best = fit.where(is_better, best)
        best_penalty[is_better] = penalty * scale[is_better]
        least = least.minimum(error)
    if has_val.all():
        return best, to_fitted.error(best_penalty, best)
    to_all = regression(design, y, weight * is_train, std)
    best = best.where(has_val, to_all.fit(best_penalty, best))
    return best, to_all.error(best_penalty, best)


def third_of_sets(tables: Tables, is_chosen: Tensor) -> Tensor:
    """Returns which of the chosen scores are of a third of their target's sets, bool [n, T].

    It is every third of the sets that have a chosen score of the target, from the first on.
    """
    set_number = tables.set_number()
    has_chosen = scatter(is_chosen.int(), set_number, dim_size=len(tables.y)) > 0
    position = has_chosen.cumsum(0) - 1  # of each set among those of the target
    return is_chosen & (position % 3 == 0)[set_number]


def tells_effects(tables: Tables, is_fitted: Tensor) -> Tensor:
    """Returns which scores are of rows with a node that a fitted score's row perturbs, bool [n, T].

    `is_fitted` says to which scores the effects are fitted, [n, T].
    """
    sample = tables.sample()
    num_nodes = len(tables.genes)
    is_seen = scatter(is_fitted[sample].int(), tables.perturbed, dim_size=num_nodes) > 0
    num_seen = scatter(is_seen[tables.perturbed].int(), sample, dim_size=len(tables.y))
    return num_seen > 0


def impute_effects(tables: Tables, node_weight: Tensor, effect: Tensor) -> Tensor:
    """Returns the mean effect [N, T] of the seen nodes one and two hops from each node, but itself.

    It is shrunk to the mean of all seen nodes. How far, and whether the hops are on all relations
    together or on one of them, is chosen for each target by the error on the seen nodes. An effect
    [N, T] counts by its `node_weight`, [N, T], 0 where the node is not seen for the score.
    """
    total_weight = node_weight.sum(0)
    mean = (node_weight * effect).sum(0) / total_weight.where(total_weight > 0, 1.0)
    best = mean
    least = torch.full_like(mean, math.inf)
    values = torch.cat([node_weight, node_weight * effect], dim=1)
    for edges in edges_of_choice(tables):
        near = sum_of_neighbours(tables.edge_index[:, edges], tables.edge_weight[edges], values)
        weight_near, effect_near = near.chunk(2, dim=1)
        for shrinkage in PENALTIES:
            imputed = (effect_near + shrinkage * mean) / (weight_near + shrinkage)
            error = (node_weight * (imputed - effect).square()).sum(0)
            # Where no seen node is near another, all errors are equal but for rounding.
            is_better = error < least * (1 - 1e-9)
            best = imputed.where(is_better, best)
            least = least.where(~is_better, error)
    return best


def edges_of_choice(tables: Tables) -> Iterator[Tensor]:
    """Yields which edges are of all relations, and then of each, bool [E]."""
    yield torch.ones_like(tables.edge_type, dtype=torch.bool)
    if len(tables.relations) > 1:
        for relation in range(len(tables.relations)):
            yield tables.edge_type == relation


def sum_of_neighbours(edge_index: Tensor, edge_weight: Tensor, values: Tensor) -> Tensor:
    """Returns A @ A + A, without its diagonal, times values [N, ...].

    A is the normalised adjacency of the undirected graph, without edges from a node to itself.
    """
    num_nodes = len(values)
    edges = remove_self_loops(*to_undirected(edge_index, edge_weight))
    edge_index, weight = gcn_norm(*edges, add_self_loops=False, num_nodes=num_nodes)
    adjacency = to_torch_coo_tensor(edge_index, weight, num_nodes)
    one_hop = adjacency @ values
    to_itself = scatter(weight.square(), edge_index[0], dim_size=num_nodes).unsqueeze(1)
    return adjacency @ one_hop + one_hop - to_itself * values
