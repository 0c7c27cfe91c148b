"""The baseline: a prediction from the perturbed nodes of a row, without message passing.

Training starts from the baseline, and every metric of the model is reported next to the metric of
the baseline. It is fitted to the training rows, and the validation rows choose its penalty. The
graph is only used to impute effects: imputed effects replace the effects that no training row
identifies.

Shapes: N nodes, n samples of T targets, B of them in a batch with P perturbed nodes, K effects of a
node.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, scatter, to_torch_coo_tensor, to_undirected

from baseline_combination import SUM, Combination, combine
from baseline_ridge import ROWS_AT_ONCE, Design, Doses, Targets, effective_share
from data import basis_of, mean_one_weight, training_mean_and_std
from data_tables import Tables, cached_by_code
from losses import LOSSES
from mask import SharedGraph, doses, num_samples, sum_by_sample
from run_progress import progress_bar

TARGETS_AT_ONCE = 64  # targets that are fitted at once; more would not fit in the CPU's cache
# The candidate penalties on the effects, from 0.1 to 1000.
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))
# A combination must reduce the loss of a sum by at least this share. If the reduction is smaller,
# networks that start from the sum are as good or better.
LEAST_GAIN = 0.1
# The reduction must also be this many standard errors, because a combination is the best of many.
LEAST_ERRORS = 2.0
LEAST_VALIDATED = 20  # fewest validation scores of a target for which a combination is tried
# Largest number of perturbed nodes times targets for which combinations are tried: about a minute.
MOST_COMBINED = 2**21
FEWEST = 2**13  # a fit of fewer perturbed nodes takes as long as a fit of this number


@dataclass
class Baseline:
    """A fitted baseline and its predictions of all rows; see `baseline_combination` for its form.

    A node's response is the sum of its effects, each multiplied by a dose. The doses are the
    `mask.doses` of its level times `basis`. For optim.loss=binary, the sum of all terms is a logit.
    """

    intercept: Tensor  # float64 [T]
    slope: Tensor  # float64 [T], factor of 1 - level, the same for all nodes
    effect: Tensor  # float32 [N, K, T]; imputed if no training row identifies it
    imputed: Tensor  # float32 [N, K, T], imputed effects of all nodes, also of identified ones
    weights: Tensor  # float64 [3, T], weights of the sum, the largest and the smallest response
    prediction: Tensor  # float64 [n, T], in the units of y
    basis: Tensor  # float64 [3, K], maps `mask.doses` to the doses of a node's effects
    is_combined: bool = True  # whether combinations were allowed, and not only a sum

    def notes(self, task: Any) -> list[str]:
        """Returns notes for the log, if only a sum was fitted or if training ignores the fit."""
        notes = []
        if not self.is_combined:
            notes.append("the table is large, so the baseline is a plain sum of effects")
        if task.config.model.readout == "global":
            notes.append(
                "with model.readout=global, training starts from the mean, not from the baseline"
            )
        return notes

    def in_basis(self, basis: Tensor) -> "Baseline":
        """Returns the same baseline with its effects expressed in a different basis, [3, K].

        The given basis must distinguish all effects that the basis of this baseline distinguishes.
        """
        if torch.equal(basis, self.basis):
            return self
        # Projecting on each column is sufficient, because the columns of a basis are orthogonal.
        change = (basis.T @ self.basis) / basis.square().sum(dim=0).unsqueeze(1)  # [K, own K]
        effect, imputed = ((change @ x.double()).float() for x in (self.effect, self.imputed))
        return replace(self, effect=effect, imputed=imputed, basis=basis)


def load_baseline(tables: Tables, fingerprint: str, cache_dir: str, loss: str) -> Baseline:
    """Returns the result of `fit_baseline`, cached by fingerprint of the tables, loss and code."""
    key = f"{fingerprint} {loss}"
    fields = cached_by_code(
        cache_dir, "baseline", fit_baseline, key, lambda: vars(fit_baseline(tables, loss))
    )
    return Baseline(**fields)


def additive_baseline(tables: Tables, loss: str = "squared") -> Baseline:
    """Returns the best baseline among sums of responses; see `fit_baseline`."""
    return fit_baseline(tables, loss, is_combined=False)


def fit_baseline(tables: Tables, loss: str = "squared", is_combined: bool = True) -> Baseline:
    """Returns the baseline, fitted to the training rows.

    The fit is a ridge regression or, for the loss `binary`, a logistic regression. The validation
    rows choose the penalty of each target. If `is_combined` is set and the tables are not too
    large, they also choose between a sum of responses and a combination.
    For each target, a node has only the effects that the target's own training rows can
    distinguish. These depend on the kinds of levels in the rows. Targets whose rows have the same
    kinds of levels are fitted together.
    """
    size = max(len(tables.perturbed), FEWEST) * tables.y.size(1)
    is_combined = is_combined and size <= MOST_COMBINED
    kind_number = kinds_of_levels(tables).unique(dim=0, return_inverse=True)[1]
    blocks = []
    for number in range(int(kind_number.max()) + 1):
        of_kind = (kind_number == number).nonzero().flatten()
        basis = basis_of(replace(tables, y=tables.y[:, of_kind]))
        blocks += [(basis, targets) for targets in of_kind.split(TARGETS_AT_ONCE)]
    fits = []
    title = f"fitting the baseline, {TARGETS_AT_ONCE} scores at once"
    for basis, targets in progress_bar(blocks, title):
        fit = fit_targets(replace(tables, y=tables.y[:, targets]), basis, loss, is_combined)
        fits.append(fit.in_basis(basis_of(tables)))
    return join_targets(fits, torch.cat([targets for _, targets in blocks]))


def kinds_of_levels(tables: Tables) -> Tensor:
    """Returns which kinds of levels the training rows of each target have, bool [T, 3].

    The kinds are deletions, levels between 0 and 1, and levels above 1. They decide `basis_of`.
    """
    level = tables.level
    is_of_kind = torch.stack([level == 0, (level > 0) & (level < 1), level > 1], dim=1).double()
    of_rows = scatter(is_of_kind, tables.sample(), dim_size=len(tables.y))  # [n, 3]
    is_trained = ~tables.y.isnan() & tables.is_in("train").unsqueeze(1)
    return is_trained.double().T @ of_rows > 0


def join_targets(baselines: list[Baseline], targets: Tensor) -> Baseline:
    """Returns one baseline for all targets, given one baseline for each block of targets.

    `targets` are the numbers of the targets, in the order of the blocks, [T].
    """
    joined = dict(vars(baselines[0]))
    for name in joined.keys() - {"basis", "is_combined"}:
        of_blocks = torch.cat([getattr(of_block, name) for of_block in baselines], dim=-1)
        joined[name] = of_blocks[..., targets.argsort()]
    return Baseline(**joined)


def fit_targets(tables: Tables, basis: Tensor, loss: str, is_combined: bool) -> Baseline:
    """Returns the baseline of a few targets, which `fit_baseline` joins.

    `basis`, [3, K], maps `mask.doses` to the doses of a node's effects.
    """
    weight = mean_one_weight(tables)
    criterion = LOSSES[loss]
    mean, std = criterion.origin_and_unit(*training_mean_and_std(tables))
    doses, mean_sum = doses_of(tables, basis)
    squares = mean_squares(tables, doses)
    targets, has_val = targets_of(tables, weight, std, loss, squares)
    design = Design(doses)
    additive = fit_validated(design, targets, has_val, mean)
    node_weight = mean_weight_of_nodes(tables, weight, doses)
    x = additive
    weights = x.new_tensor(SUM).unsqueeze(1).repeat(1, x.size(1))
    if is_combined:
        of_whole_rows, _ = targets_of(tables, weight, std, loss, squares, whole=True)
        x, weights = combined_where_better(
            tables, design, of_whole_rows, weight, node_weight, additive
        )
    x, imputed = with_imputed(tables, node_weight, x)
    prediction = design.predict(x)
    for t in (weights[0] != 1).nonzero().flatten().tolist():
        prediction[:, t : t + 1] = Combination(doses, x[:, t : t + 1], weights[:, t]).predict()
    prediction = criterion.inverse_link(prediction)
    constant, slope, effect = x.tensor_split([1, 2])
    size = (len(tables.genes), basis.size(1), x.size(1))
    return Baseline(
        intercept=(constant - slope * mean_sum).flatten(),
        slope=slope.flatten(),
        effect=effect.view(size).float(),
        imputed=imputed.view(size).float(),
        weights=weights,
        prediction=prediction,
        basis=basis,
        is_combined=is_combined,
    )


def with_imputed(tables: Tables, node_weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Imputes the effects in the coefficients x [2 + NK, T] that no training row identifies.

    Returns the coefficients with imputed effects, and the imputed effects of all nodes, [N, KT].
    Each of the K effects of a node is imputed separately. `node_weight` is the result of
    `mean_weight_of_nodes`, [N, KT].
    """
    line, effect = x.tensor_split([2])
    effect = effect.view(len(tables.genes), -1)
    imputed = impute_effects(tables, node_weight, effect)
    effect = effect.where(node_weight > 0, imputed)
    return torch.cat([line, effect.view(-1, x.size(1))]), imputed


def combined_where_better(
    tables: Tables,
    design: Design,
    targets: Targets,
    weight: Tensor,
    node_weight: Tensor,
    additive: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the coefficients x [2 + NK, T] and weights [3, T] of the better fit of each target.

    The combination is used if it is sufficiently better than the sum, whose coefficients are
    `additive`. Both fits predict the validation rows with several nodes, with imputed effects, and
    their losses are weighted by `weight` [n, T]. Rows with one node cannot show how responses are
    combined, so they are left out.
    """
    weights = additive.new_tensor(SUM).unsqueeze(1).repeat(1, additive.size(1))
    is_judge = tables.is_in("val") & (tables.perturbed_ptr.diff() > 1)
    judges = weight * is_judge.unsqueeze(1)
    is_judged = (judges > 0).sum(dim=0) >= LEAST_VALIDATED
    if not is_judged.any():
        return additive, weights
    combined, combined_weights = combine(design, targets, additive, is_judged)
    sums, _ = with_imputed(tables, node_weight, additive)
    others, _ = with_imputed(tables, node_weight, combined)
    predictions = []
    for t in range(others.size(1)):
        function = Combination(design.doses, others[:, t : t + 1], combined_weights[:, t])
        predictions.append(function.predict())
    prediction = torch.cat(predictions, dim=1)
    is_better = gains_enough(targets, judges, design.predict(sums), prediction)
    return combined.where(is_better, additive), combined_weights.where(is_better, weights)


def gains_enough(targets: Targets, weight: Tensor, prediction: Tensor, combined: Tensor) -> Tensor:
    """Returns whether `combined` is sufficiently better than `prediction`, bool [T].

    Both are predictions, [n, T], of rows with a weight [n, T]. The weighted loss of `combined` must
    be smaller by more than the share `LEAST_GAIN`, and the difference must be larger than
    `LEAST_ERRORS` standard errors.
    """
    loss = targets.regression.loss
    losses = weight * loss(prediction, targets.y)
    gains = losses - weight * loss(combined, targets.y)
    is_counted = weight > 0
    num_counted = is_counted.sum(dim=0)
    gain = gains.sum(dim=0)
    mean = gain / num_counted.clamp(min=1)
    error = ((gains - mean).square() * is_counted).sum(dim=0).sqrt()
    is_large = gain > LEAST_GAIN * losses.sum(dim=0)
    return is_large & (gain > LEAST_ERRORS * error)


def doses_of(tables: Tables, basis: Tensor) -> tuple[Doses, Tensor]:
    """Returns the `Doses` of all rows, and the mean sum of 1 - level in the training rows, []."""
    num_rows = len(tables.y)
    total = scatter(1 - tables.level, tables.sample(), dim_size=num_rows).unsqueeze(1)
    # Sums are centred on the mean of the training rows. If all training rows have the same sum, no
    # row identifies the slope. The centred sums are then 0, so that the fitted slope remains 0.
    mean_sum = total[tables.is_in("train")].mean()
    line = torch.cat([torch.ones_like(total), total - mean_sum], dim=1)
    # Doses are computed in blocks, because the three doses of ten million nodes would take more
    # memory than everything else.
    dose = torch.cat([doses(level) @ basis for level in tables.level.split(ROWS_AT_ONCE)])
    return Doses(tables.perturbed, tables.perturbed_ptr, dose, line, len(tables.genes)), mean_sum


def mean_weight_of_nodes(tables: Tables, weight: Tensor, doses: Doses) -> Tensor:
    """Returns the mean weight of the training scores that identify an effect, float64 [N, KT].

    A score identifies an effect of a node if the node's dose of this effect is not 0 in the row of
    the score. The mean is 0 if no score identifies the effect.
    """
    is_train = tables.is_in("train")[tables.sample()]
    of_scores = weight[tables.sample()[is_train]].unsqueeze(1)
    is_identified = (doses.dose[is_train] != 0).unsqueeze(2)
    of_entries = (of_scores * is_identified).flatten(start_dim=1)
    node = tables.perturbed[is_train]
    num_nodes = len(tables.genes)
    total = scatter(of_entries, node, dim_size=num_nodes)
    count = scatter((of_entries > 0).double(), node, dim_size=num_nodes)
    return total / count.clamp(min=1)


def mean_squares(tables: Tables, doses: Doses) -> Tensor:
    """Returns the mean square of the non-zero doses of each target's training rows, float64 [K, T].

    `basis_of` scales the doses so that this mean is 1 over the training rows of all targets
    together. Penalties are multiplied by the mean of each target, as if the doses were scaled for
    this target. A target's baseline then does not depend on rows without its score.
    """
    num_rows = len(tables.y)
    is_train = tables.is_in("train").unsqueeze(1)
    is_counted = (is_train & ~tables.y.isnan()).double()
    total = scatter(doses.dose.square(), doses.sample, dim_size=num_rows).T @ is_counted
    count = scatter((doses.dose != 0).double(), doses.sample, dim_size=num_rows).T @ is_counted
    return (total / count).nan_to_num(1.0)


def targets_of(
    tables: Tables, weight: Tensor, std: Tensor, loss: str, squares: Tensor, whole: bool = False
) -> tuple[Targets, Tensor]:
    """Returns the `Targets` of the fits, and whether validation rows choose each fit, bool [T].

    `weight` is [n, T], and `squares` is the result of `mean_squares`, [K, T]. A validation row is
    used if at least one of its nodes or, with `whole`, all of its nodes occur in training rows with
    the target's score. If a target does not have such a row, a third of its training rows chooses
    among fits to the other two thirds. Otherwise, validation rows without nodes are used, too.
    """
    present = ~tables.y.isnan()
    is_train = present & tables.is_in("train").unsqueeze(1)
    is_val = present & tables.is_in("val").unsqueeze(1)
    is_validated = is_val & are_nodes_fitted(tables, is_train, whole)
    has_val = is_validated.any(dim=0)
    is_intact = (tables.perturbed_ptr.diff() == 0).unsqueeze(1)
    is_validated |= is_val & is_intact
    is_fitted = is_train
    if not has_val.all():
        is_third = third_of_sets(tables, is_train)
        is_fitted = is_train & (has_val | ~is_third)
        is_validated_third = is_third & are_nodes_fitted(tables, is_fitted, whole)
        is_validated = is_validated.where(has_val, is_validated_third)
    of_train = weight * is_train
    targets = Targets(
        y=tables.y.nan_to_num(),
        weight=of_train,
        fitted=weight * is_fitted,
        validated=weight * is_validated,
        std=std,
        scale=effective_share(of_train) * squares.repeat(len(tables.genes), 1),
        is_binary=LOSSES[loss].is_binary,
    )
    return targets, has_val


def fit_validated(design: Design, targets: Targets, has_val: Tensor, mean: Tensor) -> Tensor:
    """Returns the coefficients x [2 + NK, T] of the best sum of responses for each target.

    A sum is fitted with each of the `PENALTIES`. The best sum has the smallest loss on the scores
    with a weight in `targets.validated`. If these are training scores (`has_val`, bool [T], is
    False), a sum with the same penalty is then fitted to all training scores.
    """
    y = targets.y
    to_fitted = targets.regression(design, y, targets.fitted, targets.std)
    fit = y.new_zeros(2 + len(targets.scale), y.size(1))
    fit[0] = mean
    best = fit
    best_penalty = torch.ones_like(targets.scale)
    least = torch.full_like(mean, math.inf)
    penalties = list(reversed(PENALTIES))  # each fit starts from the previous one
    for penalty in progress_bar(penalties, "fitting sums of responses"):
        fit = to_fitted.fit(penalty * targets.scale, fit)
        losses = to_fitted.loss(design.predict(fit), y)
        error = losses.mul_(targets.validated).sum(0)
        is_better = error <= least
        best = fit.where(is_better, best)
        best_penalty = (penalty * targets.scale).where(is_better, best_penalty)
        least = least.minimum(error)
    if has_val.all():
        return best
    to_all = targets.regression(design, y, targets.weight, targets.std)
    return best.where(has_val, to_all.fit(best_penalty, best))


def third_of_sets(tables: Tables, is_chosen: Tensor) -> Tensor:
    """Returns a mask of a third of the chosen scores, bool [n, T], given a mask of all of them.

    For each target, it selects every third set of nodes with a chosen score. The sets are in the
    order of their random codes, because the order of the rows may have a meaning.
    """
    set_code = tables.set_code(tables.node_code())
    set_number = set_code.unique(return_inverse=True)[1]
    has_chosen = scatter(is_chosen.int(), set_number, dim_size=len(tables.y)) > 0
    position = has_chosen.cumsum(0) - 1  # position of each set among the target's sets
    return is_chosen & (position % 3 == 0)[set_number]


def are_nodes_fitted(tables: Tables, is_fitted: Tensor, whole: bool) -> Tensor:
    """Returns whether the nodes of each row occur in rows that are fitted, bool [n, T].

    `is_fitted`, bool [n, T], marks the rows that each target is fitted to. With `whole`, all nodes
    of a row must occur in them, otherwise at least one node. Rows without nodes are False.
    """
    sample = tables.sample()
    num_nodes = len(tables.genes)
    is_seen = scatter(is_fitted[sample].int(), tables.perturbed, dim_size=num_nodes) > 0
    num_seen = scatter(is_seen[tables.perturbed].int(), sample, dim_size=len(tables.y))
    most = tables.perturbed_ptr.diff().unsqueeze(1) if whole else 1
    return (num_seen > 0) & (num_seen >= most)


def impute_effects(tables: Tables, node_weight: Tensor, effect: Tensor) -> Tensor:
    """Returns the imputed effect of each node, [N, T]: the mean effect of seen nodes near it.

    Nodes are near if they are one or two hops away. The mean does not include the node's own
    effect, and it is shrunk towards the mean effect of all seen nodes. The hops are along the edges
    of all relations, or along the edges of one relation. For each target, the function uses the
    edges and the shrinkage with the smallest error on the seen nodes. `node_weight` [N, T] contains
    the weights of the effects [N, T] in the means. It is 0 for unseen nodes.
    """
    total_weight = node_weight.sum(0)
    mean = (node_weight * effect).sum(0) / total_weight.where(total_weight > 0, 1.0)
    best = mean
    least = torch.full_like(mean, math.inf)
    values = torch.cat([node_weight, node_weight * effect], dim=1)
    for edges in relation_masks(tables):
        near = sum_of_neighbours(tables.edge_index[:, edges], tables.edge_weight[edges], values)
        weight_near, effect_near = near.chunk(2, dim=1)
        for shrinkage in PENALTIES:
            imputed = (effect_near + shrinkage * mean) / (weight_near + shrinkage)
            error = (node_weight * (imputed - effect).square()).sum(0)
            # If no seen node is near another seen node, all errors are equal up to rounding.
            is_better = error < least * (1 - 1e-9)
            best = imputed.where(is_better, best)
            least = least.where(~is_better, error)
    return best


def relation_masks(tables: Tables) -> Iterator[Tensor]:
    """Yields a mask of the edges of all relations, bool [E], then one mask for each relation."""
    yield torch.ones_like(tables.edge_type, dtype=torch.bool)
    if len(tables.relations) > 1:
        for relation in range(len(tables.relations)):
            yield tables.edge_type == relation


def sum_of_neighbours(edge_index: Tensor, edge_weight: Tensor, values: Tensor) -> Tensor:
    """Returns (A @ A + A) @ values, with zeros on the diagonal of A @ A, for values [N, ...].

    A is the normalised adjacency matrix of the undirected graph without self-loops.
    """
    num_nodes = len(values)
    edges = remove_self_loops(*to_undirected(edge_index, edge_weight))
    edge_index, weight = gcn_norm(*edges, add_self_loops=False, num_nodes=num_nodes)
    adjacency = to_torch_coo_tensor(edge_index, weight, num_nodes)
    one_hop = adjacency @ values
    to_itself = scatter(weight.square(), edge_index[0], dim_size=num_nodes).unsqueeze(1)
    return adjacency @ one_hop + one_hop - to_itself * values


# ---- The term of the model -----------------------------------------------------------------------
class BaselineReadout(nn.Module):
    """The baseline as a module whose parameters are trained further; see `Baseline`.

    The parameters are the slope, the effects, and the weights of the sum, the largest and the
    smallest response. A node's response is the sum of its effects, each multiplied by its dose.
    """

    def __init__(self, num_nodes: int, num_targets: int, num_effects: int):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(num_targets))
        self.effect = nn.Parameter(torch.zeros(num_nodes, num_effects, num_targets))
        of_sum_alone = torch.tensor([1.0, 0.0, 0.0]).unsqueeze(1)
        self.weights = nn.Parameter(of_sum_alone.repeat(1, num_targets))
        self.register_buffer("intercept", torch.zeros(num_targets))
        # These effects replace the effects of hidden nodes.
        imputed = torch.zeros(num_nodes, num_effects, num_targets)
        self.register_buffer("imputed", imputed, persistent=False)

    @torch.no_grad()
    def start_from(self, baseline: Baseline, mean: Tensor, std: Tensor) -> None:
        """Copies the parameters of a baseline.

        The outputs of the module are then the baseline's predictions minus `mean`, divided by
        `std`, [T] each.
        """
        self.intercept.copy_((baseline.intercept - mean) / std)
        self.slope.copy_(baseline.slope / std)
        self.effect.copy_(baseline.effect / std)
        self.weights.copy_(baseline.weights)
        self.imputed.copy_(baseline.imputed / std)

    def forward(self, is_shown: Tensor, dose: Tensor, batch: Data) -> Tensor:
        """Returns the baseline of each sample, [B, T], given the doses of perturbed nodes, [P, K].

        `is_shown`, bool [2, N], is False for hidden effects (row 0) and hidden slopes (row 1). A
        hidden effect is replaced by the imputed effect, and a hidden slope by 0.
        """
        node = batch.perturbed
        shows_effect, shows_slope = is_shown.index_select(1, node).unsqueeze(2)
        effect = self.effect.index_select(0, node)
        imputed = self.imputed.index_select(0, node)
        effect = effect.where(shows_effect.unsqueeze(2), imputed)
        response = (dose.unsqueeze(2) * effect).sum(dim=1)  # [P, T]
        change = (1 - batch.level).to(dose.dtype).unsqueeze(1)
        of_sum, of_largest, of_smallest = self.weights
        sums = sum_by_sample(change * self.slope * shows_slope + of_sum * response, batch)
        largest, smallest = extremes_by_sample(response, batch)
        return self.intercept + sums + of_largest * largest + of_smallest * smallest


def extremes_by_sample(values: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
    """Returns the largest and the smallest value of each sample's perturbed nodes, [B, T] each.

    `values` are the values of the nodes, [P, T]. A largest value below 0 and a smallest value above
    0 are replaced by 0.
    """
    both = torch.cat([values, -values], dim=1)
    sample = batch.perturbed_batch.unsqueeze(1).expand_as(both)
    none = both.new_zeros(num_samples(batch), both.size(1))
    largest, opposite = none.scatter_reduce(0, sample, both, "amax").chunk(2, dim=1)
    return largest, -opposite


class WithoutGraph(nn.Module):
    """A term of the model that does not use the graph, such as the baseline.

    It is added to the first column of each target's outputs. `readout` maps `is_shown` of
    `model.Draws`, the doses and the batch to the values of the term, [B, T].
    """

    def __init__(self, readout: nn.Module, num_columns: int):
        super().__init__()
        self.readout = readout
        self.num_columns = num_columns

    def forward(self, graph: SharedGraph, wild: Any, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C], with 0 in all but the first of a target's C columns.

        `wild` is a `model.WildType`. This file does not import `model`, because cached fits would
        then depend on the code of `model`.
        """
        values = self.readout(wild.draws.is_shown, dose, batch)
        columns = nn.functional.pad(values.unsqueeze(2), (0, self.num_columns - 1))
        return columns.flatten(start_dim=1)


def baseline_term(task: Any) -> WithoutGraph:
    """Returns the term of the model that is the baseline, for a `KnockoutTask`.

    Its parameters are copied from the task's baseline. If training starts from the mean, its output
    is 0 at first.
    """
    tables = task.tables
    readout = BaselineReadout(len(tables.genes), len(tables.targets), task.basis.size(1))
    if task.baseline is not None:
        criterion = task.criterion.to("cpu")
        readout.start_from(task.baseline, criterion.mean, criterion.std)
    if task.config.model.readout == "nodes":
        # These parameters are not trained: thousands of effects per node would learn noise.
        readout.requires_grad_(False)
    return WithoutGraph(readout, len(task.criterion.columns))
