"""What is known of the scores without the graph: an additive function of the perturbed nodes.

Training starts from it, and every result stands beside it. Its tables are those of one split.

Shapes: N nodes, n samples of T scores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, scatter, to_torch_coo_tensor, to_undirected

from cache import cached, source_digest
from tables import Tables, mean_and_std

TARGETS_AT_ONCE = 64  # whose numbers stay in cache
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # on the effects: 0.1 to 1000
POWERS = (1.0, 0.4, 0.6, 1.5)  # of levels


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
    num_levels = len(tables.level.unique())
    powers = POWERS if num_levels > 1 else (1.0,)  # nothing tells the power of a single level
    best = None
    least = math.inf
    for power in powers:
        fits = []
        for y in tables.y.split(TARGETS_AT_ONCE, dim=1):
            dosed = replace(tables, y=y, level=tables.level**power)
            fits.append(fit_baseline(dosed, loss))
        fit = join_targets(fits, power)
        error = (fit.prediction[rows] - tables.y[rows]) / fit.std
        total = error.square().nansum()
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
    mean, std = mean_and_std(tables.y[tables.rows("train")])
    if loss == "binary":
        mean = mean.logit(eps=1e-3)
        std = torch.ones_like(std)
    design = Design(tables)
    fit = fit_validated(tables, design, mean, loss)
    constant, slope, effect = fit.tensor_split([1, 2])
    is_seen = tables.is_seen()
    imputed = impute_effects(tables, is_seen, effect)
    effect = effect.where(is_seen, imputed)
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
    )


def fit_validated(tables: Tables, design: "Design", mean: Tensor, loss: str) -> Tensor:
    """Returns the function of `design` that suits the validation rows best, [2 + N, T].

    The penalty of a target without validation scores is the one that suits a third of its training
    rows best, when it is fitted to the others; it is then fitted to all of them.
    """
    present = ~tables.y.isnan()
    is_train = present & tables.is_in("train").unsqueeze(1)
    is_validated = present & tables.is_in("val").unsqueeze(1)
    has_val = is_validated.any(dim=0)
    if not has_val.all():
        is_third = (tables.set_number() % 3 == 0).unsqueeze(1)
        is_validated |= is_train & is_third & ~has_val
    y = tables.y.nan_to_num()
    weight = (is_train & ~is_validated).double()
    regress = logistic_ridge if loss == "binary" else ridge
    fit = y.new_zeros(2 + len(tables.genes), y.size(1))
    fit[0] = mean
    best = fit
    best_penalty = torch.ones_like(mean)
    least = torch.full_like(mean, math.inf)
    for penalty in reversed(PENALTIES):  # each starts from the one before
        fit = regress(design, y, weight, penalty, fit)
        if loss == "binary":
            logit = design.predict(fit)
            error = binary_cross_entropy_with_logits(logit, y, reduction="none")
        else:
            error = (design.predict(fit) - y).square()
        error = (error * is_validated).sum(0)
        is_better = error < least
        best = fit.where(is_better, best)
        best_penalty[is_better] = penalty
        least = least.minimum(error)
    if not has_val.all():
        fit = regress(design, y, is_train.double(), best_penalty, best)
        best = best.where(has_val, fit)
    return best


def impute_effects(tables: Tables, is_seen: Tensor, effect: Tensor) -> Tensor:
    """Returns the mean effect [N, T] of the seen nodes one and two hops from each node, but itself.

    It is weighted by A @ A + A, with A the normalised adjacency of the undirected graph, and shrunk
    to the mean of all seen nodes; how far is chosen by the error on these. `is_seen` [N, T] says
    for which scores a node is; elsewhere, `effect` [N, T] is 0.
    """
    num_nodes = len(effect)
    edges = remove_self_loops(*to_undirected(tables.edge_index, tables.edge_weight))
    edge_index, weight = gcn_norm(*edges, add_self_loops=False)
    adjacency = to_torch_coo_tensor(edge_index, weight, num_nodes)
    values = torch.cat([is_seen, effect], dim=1)
    one_hop = adjacency @ values
    to_itself = scatter(weight.square(), edge_index[0], dim_size=num_nodes).unsqueeze(1)
    sums = adjacency @ one_hop + one_hop - to_itself * values
    total, sums = sums.chunk(2, dim=1)
    mean = effect.sum(0) / is_seen.sum(0).clamp(min=1)
    best = mean
    least = torch.full_like(mean, math.inf)
    for shrinkage in PENALTIES:
        imputed = (sums + shrinkage * mean) / (total + shrinkage)
        error = ((imputed - effect) * is_seen).square().sum(0)
        best = imputed.where(error < least, best)
        least = least.minimum(error)
    return best


class Design:
    """The matrix of an additive function x [2 + N, T]: a constant, a slope, and the nodes' effects.

    The constant is the function at the mean sum of doses, 1 - level; effects count times the doses.
    """

    def __init__(self, tables: Tables):
        size = (len(tables.y), len(tables.genes))
        dose = 1 - tables.level
        self.nodes = torch.sparse_csr_tensor(
            tables.perturbed_ptr, tables.perturbed, dose, size
        )  # [n, N]
        self.transposed = self.nodes.to_sparse_csc().transpose(0, 1)
        count = self.nodes @ dose.new_ones(size[1], 1)
        self.mean_count = count.mean()
        self.line = torch.cat([torch.ones_like(count), count - self.mean_count], dim=1)  # [n, 2]

    def predict(self, x: Tensor) -> Tensor:
        """Returns the function of each row, [n, T]."""
        return self.line @ x[:2] + self.nodes @ x[2:]

    def collect(self, values: Tensor) -> Tensor:
        """Returns the product of the transposed matrix and values [n, T], [2 + N, T]."""
        return torch.cat([self.line.T @ values, self.transposed @ values])


def logistic_ridge(design: Design, y: Tensor, weight: Tensor, penalty: float, x: Tensor) -> Tensor:
    """Returns a penalised logistic regression, by iteratively reweighted least squares from x."""
    for _ in range(8):
        logit = design.predict(x)
        probability = logit.sigmoid()
        variance = (probability * (1 - probability)).clamp(min=1e-3)
        response = logit + (y - probability) / variance
        weighted = weight * variance
        x = ridge(design, response, weighted, penalty, x)
    return x


def ridge(design: Design, y: Tensor, weight: Tensor, penalty: float, x: Tensor) -> Tensor:
    """Returns a penalised linear regression, by conjugate gradients from x."""

    def product(x: Tensor) -> Tensor:
        result = design.collect(weight * design.predict(x))
        result[2:] += penalty * x[2:]
        return result

    return conjugate_gradients(product, design.collect(weight * y), x)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, x: Tensor, tolerance: float = 1e-8
) -> Tensor:
    """Returns the solution of product(x) = right for each column, from x.

    It ends when no residual is over the tolerance times `right`, in norms, or after 200 steps.
    """
    residual = direction = right - product(x)
    norm = residual.square().sum(0)
    least = tolerance**2 * right.square().sum(0)
    for _ in range(200):
        if (norm <= least).all():
            break
        change = product(direction)
        # The numbers of a solved column would become too small to divide by.
        step = (norm / (direction * change).sum(0)).where(norm > least, 0.0)
        x = x + step * direction
        residual = residual - step * change
        previous = norm
        norm = residual.square().sum(0)
        direction = residual + (norm / previous).nan_to_num() * direction
    return x
