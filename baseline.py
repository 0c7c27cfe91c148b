"""What is known of the scores without the graph: a function of the perturbed nodes.

Training starts from it, and every result stands beside it. Its tables are those of one split.

Shapes: N nodes, n samples of T scores, K responses of a node.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, scatter, to_torch_coo_tensor, to_undirected

from baseline_combination import SUM, Combination, combine
from baseline_ridge import ROWS_AT_ONCE, Design, Doses, Scores
from data_cache import cached, source_digest
from data_tables import Tables, mean_and_std
from mask import doses
from run_progress import progress_bar

TARGETS_AT_ONCE = 64  # whose numbers stay in cache
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # on the responses: 0.1 to 1000
UNSOLVED = 1e-4  # error of a fit, from which on the log says that it has ended before
LEAST_GAIN = 0.1  # of the loss of a sum; below it, networks that start from the sum are better
LEAST_ERRORS = 2.0  # standard errors of a gain, which is the best of many
LEAST_VALIDATED = 20  # scores, as fewer tell little of the error
MOST_COMBINED = 2**21  # perturbed nodes times scores, of which the fit takes a minute
FEWEST = 2**13  # perturbed nodes, of which the fit takes no longer than of fewer


@dataclass
class Baseline:
    """What is known of the scores without the graph: a function of the perturbed nodes.

    It is the one of `combination`. A node responds by the sum of its effects, each times a dose:
    `mask.doses` of its level, times `basis`. For optim.loss=binary it is a logit.
    """

    intercept: Tensor  # float64 [T]
    slope: Tensor  # float64 [T], the same for every node, times 1 - level
    effect: Tensor  # float32 [N, K, T], of each node; imputed where nothing tells it
    imputed: Tensor  # float32 [N, K, T], what it would be for each node in that case
    weights: Tensor  # float64 [3, T], of the sum, the largest and the smallest response
    mean: Tensor  # float64 [T], of the training scores; for binary ones, of their logits
    std: Tensor  # float64 [T], of the training scores; 1 for binary ones
    prediction: Tensor  # float64 [n, T], for each row, in the units of y
    error: Tensor  # float64 [T], how far the additive fit is from its solution, as `TOLERANCE`
    basis: Tensor  # float64 [3, K], of the effects' doses
    is_combined: bool = True  # whether other weights than those of a sum were tried


def blank_baseline(num_nodes: int, num_targets: int, basis: Tensor) -> Baseline:
    """Returns a baseline that says 0, for a model whose parameters a checkpoint replaces."""
    zeros = torch.zeros(num_targets, dtype=torch.float64)
    effect = torch.zeros(num_nodes, basis.size(1), num_targets)
    return Baseline(
        intercept=zeros,
        slope=zeros,
        effect=effect,
        imputed=effect,
        weights=zeros.new_tensor(SUM).unsqueeze(1).repeat(1, num_targets),
        mean=zeros,
        std=torch.ones_like(zeros),
        prediction=zeros.new_empty(0, num_targets),
        error=zeros,
        basis=basis,
    )


def load_baseline(tables: Tables, fingerprint: str, cache_dir: str, loss: str) -> Baseline:
    """Returns `fit_baseline` of tables with this fingerprint, cached."""
    key = f"{source_digest(fit_baseline)} {fingerprint} {loss}"
    fields = cached(cache_dir, "baseline", key, lambda: vars(fit_baseline(tables, loss)))
    return Baseline(**fields)


def additive_baseline(tables: Tables, loss: str = "squared") -> Baseline:
    """Returns the best sum of responses for the validation rows."""
    return fit_baseline(tables, loss, is_combined=False)


def fit_baseline(tables: Tables, loss: str = "squared", is_combined: bool = True) -> Baseline:
    """Returns the function, fitted on the training rows, that suits the validation rows best.

    It is a ridge regression or, for the loss `binary`, a logistic one. The penalty is chosen for
    each target, and whether more than the sum of responses counts, if the tables are not too large
    to try.
    """
    size = max(len(tables.perturbed), FEWEST) * tables.y.size(1)
    is_combined = is_combined and size <= MOST_COMBINED
    basis = basis_of(tables)
    fits = []
    blocks = tables.y.split(TARGETS_AT_ONCE, dim=1)
    for y in progress_bar(blocks, f"fitting the baseline, {TARGETS_AT_ONCE} scores at once"):
        fits.append(fit_targets(replace(tables, y=y), basis, loss, is_combined))
    return join_targets(fits)


def join_targets(baselines: list[Baseline]) -> Baseline:
    """Returns the baselines of some targets each as that of all."""
    joined = dict(vars(baselines[0]))
    for name in vars(baselines[0]).keys() - {"basis", "is_combined"}:
        joined[name] = torch.cat([getattr(part, name) for part in baselines], dim=-1)
    return Baseline(**joined)


def fit_targets(tables: Tables, basis: Tensor, loss: str, is_combined: bool) -> Baseline:
    """Returns the `fit_baseline` of a few targets, whose nodes respond as `basis` says, [3, K]."""
    weight = mean_one_weight(tables)
    train = tables.rows("train")
    mean, std = mean_and_std(tables.y[train], weight[train])
    if loss == "binary":
        mean = mean.logit(eps=1e-3)
        std = torch.ones_like(std)
    doses, mean_sum = doses_of(tables, basis)
    scores, has_val = scores_of(tables, weight, std, loss)
    design = Design(doses)
    additive, error = fit_validated(design, scores, has_val, mean)
    node_weight = mean_weight_of_nodes(tables, weight, doses)
    x = additive
    weights = x.new_tensor(SUM).unsqueeze(1).repeat(1, x.size(1))
    if is_combined:
        of_whole_rows, _ = scores_of(tables, weight, std, loss, whole=True)
        x, weights = combined_where_better(
            tables, doses, design, of_whole_rows, weight, node_weight, additive
        )
    x, imputed = with_imputed(tables, node_weight, x)
    prediction = design.predict(x)
    for t in (weights[0] != 1).nonzero().flatten().tolist():
        prediction[:, t : t + 1] = Combination(doses, x[:, t : t + 1], weights[:, t]).predict()
    if loss == "binary":
        prediction = prediction.sigmoid()
    constant, slope, effect = x.tensor_split([1, 2])
    size = (len(tables.genes), basis.size(1), x.size(1))
    return Baseline(
        intercept=(constant - slope * mean_sum).flatten(),
        slope=slope.flatten(),
        effect=effect.view(size).float(),
        imputed=imputed.view(size).float(),
        weights=weights,
        mean=mean,
        std=std,
        prediction=prediction,
        error=error,
        basis=basis,
        is_combined=is_combined,
    )


def with_imputed(tables: Tables, node_weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the function x [2 + NK, T] with imputed effects where nothing tells them.

    Also returns what they would be for all, [N, KT]. A node's responses are imputed each by itself.
    """
    line, effect = x.tensor_split([2])
    effect = effect.view(len(tables.genes), -1)
    imputed = impute_effects(tables, node_weight, effect)
    effect = effect.where(node_weight > 0, imputed)
    return torch.cat([line, effect.view(-1, x.size(1))]), imputed


def combined_where_better(
    tables: Tables,
    doses: Doses,
    design: Design,
    scores: Scores,
    weight: Tensor,
    node_weight: Tensor,
    additive: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns `combine`, but the sum, x [2 + NK, T], where it is not better by enough.

    Validation rows of several nodes judge both, with imputed effects, by their weight [n, T]: rows
    of one node say nothing of how nodes combine.
    """
    weights = additive.new_tensor(SUM).unsqueeze(1).repeat(1, additive.size(1))
    is_judge = tables.is_in("val") & (tables.perturbed_ptr.diff() > 1)
    judges = weight * is_judge.unsqueeze(1)
    is_judged = (judges > 0).sum(dim=0) >= LEAST_VALIDATED
    if not is_judged.any():
        return additive, weights
    combined, combined_weights = combine(doses, design, scores, additive, is_judged)
    sums, _ = with_imputed(tables, node_weight, additive)
    others, _ = with_imputed(tables, node_weight, combined)
    predictions = []
    for t in range(others.size(1)):
        function = Combination(doses, others[:, t : t + 1], combined_weights[:, t])
        predictions.append(function.predict())
    prediction = torch.cat(predictions, dim=1)
    is_better = gains_enough(scores, judges, design.predict(sums), prediction)
    return combined.where(is_better, additive), combined_weights.where(is_better, weights)


def gains_enough(scores: Scores, weight: Tensor, prediction: Tensor, combined: Tensor) -> Tensor:
    """Returns for which targets the combined predictions are better by enough, bool [T].

    Their gain over the others, [n, T], in rows with a weight, is a tenth of the others' loss and
    twice its standard error.
    """
    loss = scores.regression.loss
    losses = weight * loss(prediction, scores.y)
    gains = losses - weight * loss(combined, scores.y)
    is_counted = weight > 0
    num_counted = is_counted.sum(dim=0)
    gain = gains.sum(dim=0)
    mean = gain / num_counted.clamp(min=1)
    error = ((gains - mean).square() * is_counted).sum(dim=0).sqrt()
    is_large = gain > LEAST_GAIN * losses.sum(dim=0)
    return is_large & (gain > LEAST_ERRORS * error)


def basis_of(tables: Tables) -> Tensor:
    """Returns of which `mask.doses` each response of a node is made, float64 [3, K].

    Responses are as many as the levels of the training rows can tell apart: activations from
    losses, and what only a deletion does from a part of it. The mean square of their doses that are
    not 0 is 1 in these rows, so that one penalty suits all.
    """
    is_trained = tables.is_in("train") & ~tables.y.isnan().all(dim=1)
    level, count = tables.level[is_trained[tables.sample()]].unique(return_counts=True)
    count = count.double()
    responses = [[1.0, 1.0, 0.0]]  # 1 - level
    if (level < 1).any() and (level > 1).any():
        responses = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    if (level == 0).any() and ((level > 0) & (level < 1)).any():
        responses.append([0.0, 0.0, 1.0])
    basis = torch.tensor(responses, dtype=torch.float64).T
    dose = doses(level) @ basis
    mean_square = (count @ dose.square()) / (count @ (dose != 0).double())
    return basis / mean_square.sqrt().nan_to_num(1.0)


def doses_of(tables: Tables, basis: Tensor) -> tuple[Doses, Tensor]:
    """Returns the doses of the samples, and the mean sum of 1 - level of the training rows, []."""
    num_rows = len(tables.y)
    total = scatter(1 - tables.level, tables.sample(), dim_size=num_rows).unsqueeze(1)
    # Of training rows: where all of these have the same sum, nothing is known of the slope.
    mean_sum = total[tables.is_in("train")].mean()
    line = torch.cat([torch.ones_like(total), total - mean_sum], dim=1)
    # The three doses of ten million nodes at once would take more memory than all else.
    dose = torch.cat([doses(level) @ basis for level in tables.level.split(ROWS_AT_ONCE)])
    return Doses(tables.perturbed, tables.perturbed_ptr, dose, line, len(tables.genes)), mean_sum


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


def mean_weight_of_nodes(tables: Tables, weight: Tensor, doses: Doses) -> Tensor:
    """Returns the mean weight of the training scores that tell an effect, float64 [N, KT].

    It is 0 where none does.
    """
    is_train = tables.is_in("train")[tables.sample()]
    of_scores = weight[tables.sample()[is_train]].unsqueeze(1)
    is_told = (doses.dose[is_train] != 0).unsqueeze(2)
    of_entries = (of_scores * is_told).flatten(start_dim=1)
    node = tables.perturbed[is_train]
    num_nodes = len(tables.genes)
    total = scatter(of_entries, node, dim_size=num_nodes)
    count = scatter((of_entries > 0).double(), node, dim_size=num_nodes)
    return total / count.clamp(min=1)


def scores_of(
    tables: Tables, weight: Tensor, std: Tensor, loss: str, whole: bool = False
) -> tuple[Scores, Tensor]:
    """Returns the scores for the fits, and for which targets validation rows choose, bool [T].

    Scores count by their weight, [n, T]. Rows choose that have a node of a training row or, for
    `whole`, no other ones. For a target without such validation rows, a third of its training rows
    chooses, by fits to the others.
    """
    present = ~tables.y.isnan()
    is_train = present & tables.is_in("train").unsqueeze(1)
    is_val = present & tables.is_in("val").unsqueeze(1)
    is_validated = is_val & tells_effects(tables, is_train, whole)
    has_val = is_validated.any(dim=0)
    is_intact = (tables.perturbed_ptr.diff() == 0).unsqueeze(1)
    is_validated |= is_val & is_intact
    is_fitted = is_train
    if not has_val.all():
        is_third = third_of_sets(tables, is_train)
        is_fitted = is_train & (has_val | ~is_third)
        is_told = is_third & tells_effects(tables, is_fitted, whole)
        is_validated = is_validated.where(has_val, is_told)
    of_train = weight * is_train
    scores = Scores(
        y=tables.y.nan_to_num(),
        weight=of_train,
        fitted=weight * is_fitted,
        validated=weight * is_validated,
        std=std,
        scale=effective_share(of_train),
        is_binary=loss == "binary",
    )
    return scores, has_val


def fit_validated(
    design: Design, scores: Scores, has_val: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the function of `design` that suits the validated scores best, and its error.

    They are [2 + NK, T] and, as in `Baseline`, [T].
    """
    y = scores.y
    to_fitted = scores.regression(design, y, scores.fitted, scores.std)
    fit = y.new_zeros(design.width, y.size(1))
    fit[0] = mean
    best = fit
    best_penalty = torch.ones_like(mean)
    least = torch.full_like(mean, math.inf)
    penalties = list(reversed(PENALTIES))  # each fit starts from the one before
    for penalty in progress_bar(penalties, "fitting sums of responses"):
        fit = to_fitted.fit(penalty * scores.scale, fit)
        error = to_fitted.losses(fit).mul_(scores.validated).sum(0)
        is_better = error <= least
        best = fit.where(is_better, best)
        best_penalty[is_better] = penalty * scores.scale[is_better]
        least = least.minimum(error)
    if has_val.all():
        return best, to_fitted.error(best_penalty, best)
    to_all = scores.regression(design, y, scores.weight, scores.std)
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


def tells_effects(tables: Tables, is_fitted: Tensor, whole: bool) -> Tensor:
    """Returns which scores are of rows with a node that a fitted score's row perturbs, bool [n, T].

    `is_fitted` says to which scores the effects are fitted, [n, T]. For `whole`, all nodes of the
    row are such.
    """
    sample = tables.sample()
    num_nodes = len(tables.genes)
    is_seen = scatter(is_fitted[sample].int(), tables.perturbed, dim_size=num_nodes) > 0
    num_seen = scatter(is_seen[tables.perturbed].int(), sample, dim_size=len(tables.y))
    most = tables.perturbed_ptr.diff().unsqueeze(1) if whole else 1
    return (num_seen > 0) & (num_seen >= most)


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
