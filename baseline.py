"""What is known of the scores without the graph: an additive function of the perturbed nodes.

Training starts from it, and every result stands beside it. Its tables are those of one split.

Shapes: N nodes, n samples of T scores.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, scatter, to_torch_coo_tensor, to_undirected

from cache import cached, source_digest
from tables import Tables, mean_and_std

TARGETS_AT_ONCE = 64  # whose numbers stay in cache
ROWS_AT_ONCE = 2**17  # the same, of one target
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-2, 7))  # on the effects: 0.1 to 1000
POWERS = (1.0, 0.4, 0.6, 1.5)  # of levels
TOLERANCE = 1e-7  # of a fit, in standard deviations of the scores
REWEIGHTED = 1e-5  # the same, at which a logistic regression ends
MOST_STEPS = 1000  # of conjugate gradients
MOST_REWEIGHTINGS = 100  # of a logistic regression
REDUCTION = 0.01  # of the distance from the solution, by one of its steps
MOST_HALVINGS = 30  # of such a step
UNSOLVED = 1e-4  # the same, from which on the log says that a fit has ended before


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
    tables: Tables, design: "Design", weight: Tensor, mean: Tensor, std: Tensor, loss: str
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


@dataclass
class DesignBlock:
    """Some consecutive rows of a `Design`, m of them."""

    nodes: Tensor  # sparse float64 [m, N], the dose of each node
    transposed: Tensor  # the same, [N, m]
    line: Tensor  # float64 [m, 2], 1 and the sum of doses, less its mean

    def predict(self, x: Tensor) -> Tensor:
        """Returns the function of each row, [m, T]."""
        return (self.nodes @ x[2:]).add_(self.line @ x[:2])

    def collect(self, values: Tensor) -> Tensor:
        """Returns the product of the transposed rows and values [m, T], [2 + N, T]."""
        return torch.cat([self.line.T @ values, self.transposed @ values])

    def collect_squared(self, values: Tensor) -> Tensor:
        """Returns the product of the squares of the transposed rows and values, as `collect`."""
        squares = torch.sparse_csr_tensor(
            self.transposed.crow_indices(),
            self.transposed.col_indices(),
            self.transposed.values().square(),
            self.transposed.shape,
        )
        return torch.cat([self.line.square().T @ values, squares @ values])


class Design:
    """The matrix of an additive function x [2 + N, T]: a constant, a slope, and the nodes' effects.

    The constant is the function at the training rows' mean sum of doses, 1 - level; effects count
    times the doses. The rows are in blocks: a product of ten million at once takes twice as long.
    """

    def __init__(self, tables: Tables):
        dose = 1 - tables.level
        self.largest_dose = torch.cat([dose.abs(), dose.new_ones(1)]).amax()  # 1 at least
        num_nodes = len(tables.genes)
        of_blocks = []
        for first in range(0, len(tables.y), ROWS_AT_ONCE):
            ptr = tables.perturbed_ptr[first : first + ROWS_AT_ONCE + 1]
            entries = slice(ptr[0], ptr[-1])
            nodes = torch.sparse_csr_tensor(
                (ptr - ptr[0]).int(),
                tables.perturbed[entries].int(),  # products read fewer bytes than of long ones
                dose[entries],
                (len(ptr) - 1, num_nodes),
            )
            of_blocks.append(nodes)
        count = torch.cat([nodes @ dose.new_ones(num_nodes, 1) for nodes in of_blocks])
        # Of training rows: where all of these have the same sum, nothing is known of the slope.
        self.mean_count = count[tables.is_in("train")].mean()
        line = torch.cat([torch.ones_like(count), count - self.mean_count], dim=1)  # [n, 2]
        self.blocks = []
        for nodes, block_line in zip(of_blocks, line.split(ROWS_AT_ONCE), strict=True):
            transposed = nodes.to_sparse_csc().transpose(0, 1)
            self.blocks.append(DesignBlock(nodes, transposed, block_line))

    def predict(self, x: Tensor) -> Tensor:
        """Returns the function of each row, [n, T]."""
        return torch.cat([block.predict(x) for block in self.blocks])

    def collect(self, values: Tensor) -> Tensor:
        """Returns the product of the transposed matrix and values [n, T], [2 + N, T]."""
        return sum(block.collect(rows) for block, rows in self.split(values))

    def collect_squared(self, values: Tensor) -> Tensor:
        """Returns the product of the squares of the transposed matrix and values, as `collect`."""
        return sum(block.collect_squared(rows) for block, rows in self.split(values))

    def collect_predicted(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns what `collect` does of the function times a weight [n, T]."""
        total = torch.zeros_like(x)
        for block, block_weight in self.split(weight):
            total += block.collect(block.predict(x).mul_(block_weight))
        return total

    def split(self, values: Tensor) -> Iterator[tuple[DesignBlock, Tensor]]:
        """Yields each block and its own rows of values [n, T]."""
        return zip(self.blocks, values.split(ROWS_AT_ONCE), strict=True)


class NormalEquations:
    """Those of a penalised linear regression on a design, with a weight of each score, [n, T]."""

    def __init__(self, design: Design, weight: Tensor):
        self.design = design
        self.weight = weight
        self.squares = design.collect_squared(weight)

    def product(self, penalty: float | Tensor, x: Tensor) -> Tensor:
        """Returns the product of their matrix and x, [2 + N, T]."""
        product = self.design.collect_predicted(x, self.weight)
        product[2:] += penalty * x[2:]
        return product

    def diagonal(self, penalty: float | Tensor) -> Tensor:
        """Returns the diagonal of their matrix, [2 + N, T], 1 where it would be 0."""
        diagonal = torch.cat([self.squares[:2], self.squares[2:] + penalty])
        return diagonal.where(diagonal > 0, 1.0)

    def gradient(self, residual: Tensor, penalty: float | Tensor, x: Tensor) -> Tensor:
        """Returns what x leaves of their right side, given what it leaves of the scores, [n, T]."""
        gradient = self.design.collect(self.weight * residual)
        gradient[2:] -= penalty * x[2:]
        return gradient

    def distance(self, residual: Tensor, penalty: float | Tensor, x: Tensor) -> Tensor:
        """Returns the square of how far x is from the solution, [T], given what it leaves."""
        gradient = self.gradient(residual, penalty, x)
        return (gradient.square() / self.diagonal(penalty)).sum(0)

    def solve(
        self,
        residual: Tensor,
        penalty: float | Tensor,
        x: Tensor,
        least: Tensor,
        reduction: float = 0.0,
    ) -> Tensor:
        """Returns the solution, given what x leaves of the scores, [n, T].

        The square of its distance from it may be `least` [T], or `reduction`**2 times that of x.
        """
        right = self.gradient(residual, penalty, x)
        diagonal = self.diagonal(penalty)
        least = least.maximum(reduction**2 * (right.square() / diagonal).sum(0))
        return x + conjugate_gradients(partial(self.product, penalty), right, diagonal, least)


class Ridge:
    """A penalised linear regression of scores y [n, T] on a design.

    Args:
        weight: of each score, 0 for those that are not fitted, [n, T].
        std: unit of the scores, in which a fit is exact to `TOLERANCE`, [T].
    """

    def __init__(self, design: Design, y: Tensor, weight: Tensor, std: Tensor):
        self.design = design
        self.y = y
        self.weight = weight
        # Errors of effects count times the doses, which make the matrix harder to solve, too.
        self.unit = std.square() / design.largest_dose**3
        self.least = TOLERANCE**2 * self.unit

    @cached_property
    def equations(self) -> NormalEquations:
        return NormalEquations(self.design, self.weight)

    def losses(self, x: Tensor) -> Tensor:
        """Returns the loss of each score, [n, T]."""
        return self.residual(x).square_()

    def residual(self, x: Tensor) -> Tensor:
        """Returns what x leaves of the scores, [n, T]."""
        return self.design.predict(x).neg_().add_(self.y)

    def fit(self, penalty: float | Tensor, x: Tensor) -> Tensor:
        """Returns the solution for a penalty, or one for each score [T], starting from x."""
        x = self.equations.solve(self.residual(x), penalty, x, self.least)
        if self.design.largest_dose > 1:  # rounding adds up over the steps: solve what it left, too
            x = self.equations.solve(self.residual(x), penalty, x, self.least)
        return x

    def error(self, penalty: float | Tensor, x: Tensor) -> Tensor:
        """Returns how far x is from the solution, [T], as `TOLERANCE`."""
        distance = self.equations.distance(self.residual(x), penalty, x)
        return (distance / self.unit).sqrt()


class LogisticRidge(Ridge):
    """A penalised logistic regression of scores of 0 and 1, by reweighted least squares."""

    def losses(self, x: Tensor) -> Tensor:
        logit = self.design.predict(x)
        return binary_cross_entropy_with_logits(logit, self.y, reduction="none")

    def fit(self, penalty: float | Tensor, x: Tensor) -> Tensor:
        for _ in range(MOST_REWEIGHTINGS):
            if (self.error(penalty, x) <= REWEIGHTED).all():
                break
            probability = self.design.predict(x).sigmoid()
            variance = variance_of(probability, least=1e-15)
            residual = (self.y - probability) / variance
            equations = NormalEquations(self.design, self.weight * variance)
            goal = equations.solve(residual, penalty, x, self.least, REDUCTION)
            change = goal - x
            x = x + self.step(penalty, x, change) * change
        return x

    def step(self, penalty: float | Tensor, x: Tensor, change: Tensor) -> Tensor:
        """Returns the largest of 1, 1/2, 1/4 ... of a change that is no step up, [T].

        A whole one would go too far where scores are certain.
        """

        def total(x: Tensor) -> Tensor:
            penalties = (penalty * x[2:].square()).sum(0) / 2
            return (self.weight * self.losses(x)).sum(0) + penalties

        most = total(x) * (1 + 1e-12)  # more than rounding
        step = torch.ones_like(most)
        for _ in range(MOST_HALVINGS):
            is_up = total(x + step * change) > most
            if not is_up.any():
                break
            step = step.where(~is_up, step / 2)
        return step

    def error(self, penalty: float | Tensor, x: Tensor) -> Tensor:
        probability = self.design.predict(x).sigmoid()
        variance = variance_of(probability)
        equations = NormalEquations(self.design, self.weight * variance)
        distance = equations.distance((self.y - probability) / variance, penalty, x)
        return (distance / self.unit).sqrt()


def variance_of(probability: Tensor, least: float = 1e-3) -> Tensor:
    """Returns the variance of scores of 0 and 1, of which that of certain ones is `least`."""
    return (probability * (1 - probability)).clamp(min=least)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor, least: Tensor
) -> Tensor:
    """Returns the solution of product(x) = right for each column.

    `diagonal` is that of the matrix, the preconditioner (Jacobi's). It ends when no column's sum of
    residual**2 / diagonal is over `least` [T], or after `MOST_STEPS`.
    """
    x = torch.zeros_like(right)
    residual = right
    scaled = residual / diagonal
    direction = scaled
    norm = (residual * scaled).sum(0)
    for _ in range(MOST_STEPS):
        if (norm <= least).all():
            break
        change = product(direction)
        # The numbers of a solved column would become too small to divide by.
        step = (norm / (direction * change).sum(0)).where(norm > least, 0.0)
        x = x + step * direction
        residual = residual - step * change
        scaled = residual / diagonal
        previous = norm
        norm = (residual * scaled).sum(0)
        direction = scaled + (norm / previous).nan_to_num() * direction
    return x
