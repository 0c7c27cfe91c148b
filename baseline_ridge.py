"""Ridge regressions, linear and logistic, on the perturbed nodes of samples.

Shapes: N nodes, n samples of T targets, `total` perturbed nodes in all samples, K effects of a
node.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

ROWS_AT_ONCE = 2**17  # rows of a block; their values for one target fit in the CPU's cache
TOLERANCE = 1e-7  # tolerance of a fit, in standard deviations of y
REWEIGHTED = 100  # a logistic regression ends at this multiple of the tolerance
MOST_STEPS = 1000  # largest number of iterations of conjugate gradients
MOST_REWEIGHTINGS = 100  # largest number of steps of a logistic regression
# Each of these steps solves a least-squares problem. It ends if the distance from the solution of
# this problem is at most this share of the distance at its start.
REDUCTION = 0.01
MOST_HALVINGS = 30  # how often a step of a logistic regression may be halved


@dataclass
class Doses:
    """The regressors of a fit: the doses of each perturbed node, and the line of each sample."""

    node: Tensor  # long [total], the perturbed nodes of all samples, concatenated
    ptr: Tensor  # long [n + 1]; the nodes of sample i are node[ptr[i] : ptr[i + 1]]
    dose: Tensor  # float64 [total, K], factors of the node's effects
    line: Tensor  # float64 [n, 2]: 1 and the centred sum of 1 - level
    num_nodes: int

    @cached_property
    def sample(self) -> Tensor:
        """The sample of each perturbed node, long [total]."""
        return torch.repeat_interleave(self.ptr.diff())

    def responses(self, x: Tensor) -> Tensor:
        """Returns the response of each perturbed node, [total], given coefficients x [2 + NK]."""
        effect = x[2:].view(self.num_nodes, -1).index_select(0, self.node)
        return (self.dose * effect).sum(dim=1)


@dataclass
class DesignBlock:
    """A block of m consecutive rows of a `Design`."""

    nodes: Tensor  # sparse float64 [m, NK], the doses of the nodes
    # Sparse int32 [NK, m], the place of each value of the transpose of `nodes` in `nodes.values()`.
    places: Tensor
    line: Tensor  # float64 [m, 2]

    @cached_property
    def transposed(self) -> Tensor:
        """The transpose of `nodes`, [NK, m]."""
        return with_values(self.places, self.nodes.values().index_select(0, self.places.values()))

    def scaled(self, factor: Tensor) -> "DesignBlock":
        """Returns the same rows with each value of `nodes` multiplied by a factor, [values]."""
        nodes = with_values(self.nodes, self.nodes.values() * factor)
        return replace(self, nodes=nodes)

    def predict(self, x: Tensor) -> Tensor:
        """Returns the prediction of each row, [m, T], given coefficients x [2 + NK, T]."""
        return (self.nodes @ x[2:]).add_(self.line @ x[:2])

    def collect(self, values: Tensor) -> Tensor:
        """Returns the product of the transposed rows and values [m, T], [2 + NK, T]."""
        return torch.cat([self.line.T @ values, self.transposed @ values])

    def collect_squared(self, values: Tensor) -> Tensor:
        """Returns `collect` of the same values [m, T] for rows with squared elements."""
        squares = with_values(self.transposed, self.transposed.values().square())
        return torch.cat([self.line.square().T @ values, squares @ values])


def with_values(matrix: Tensor, values: Tensor) -> Tensor:
    """Returns a sparse CSR matrix with the pattern of `matrix` and the given values."""
    return torch.sparse_csr_tensor(
        matrix.crow_indices(), matrix.col_indices(), values, matrix.shape
    )


class Design:
    """The design matrix of a fit, [n, 2 + NK]: the two columns of `doses.line`, and all doses.

    The coefficients x [2 + NK, T] are an intercept, a slope and the effects of the nodes. The rows
    are stored in blocks, because one product with ten million rows takes twice as long.
    """

    def __init__(self, doses: Doses):
        self.doses = doses
        # At least 1.
        self.largest_dose = torch.cat([doses.dose.abs().flatten(), doses.dose.new_ones(1)]).amax()
        num_effects = doses.dose.size(1)
        number = torch.arange(num_effects)
        self.blocks = []
        for first in range(0, len(doses.line), ROWS_AT_ONCE):
            ptr = doses.ptr[first : first + ROWS_AT_ONCE + 1]
            entries = slice(ptr[0], ptr[-1])
            column = doses.node[entries].unsqueeze(1) * num_effects + number
            nodes = torch.sparse_csr_tensor(
                ((ptr - ptr[0]) * num_effects).int(),
                column.flatten().int(),  # with int32, products read fewer bytes than with int64
                doses.dose[entries].flatten(),
                (len(ptr) - 1, doses.num_nodes * num_effects),
            )
            place = torch.arange(len(nodes.values()), dtype=torch.int32)
            places = with_values(nodes, place).to_sparse_csc().transpose(0, 1)
            line = doses.line[first : first + ROWS_AT_ONCE]
            self.blocks.append(DesignBlock(nodes, places, line))

    def scaled(self, factor: Tensor) -> "Design":
        """Returns the matrix with each perturbed node's doses multiplied by a factor, [total].

        Its attributes `doses` and `largest_dose` do not change.
        """
        scaled = copy.copy(self)
        factors = factor.repeat_interleave(self.doses.dose.size(1))
        sizes = [len(block.nodes.values()) for block in self.blocks]
        pairs = zip(self.blocks, factors.split(sizes), strict=True)
        scaled.blocks = [block.scaled(of_block) for block, of_block in pairs]
        return scaled

    def predict(self, x: Tensor) -> Tensor:
        """Returns the prediction of each row, which is the matrix times x [2 + NK, T]: [n, T]."""
        return torch.cat([block.predict(x) for block in self.blocks])

    def collect(self, values: Tensor) -> Tensor:
        """Returns the product of the transposed matrix and values [n, T], [2 + NK, T]."""
        return sum(block.collect(rows) for block, rows in self.split(values))

    def collect_squared(self, values: Tensor) -> Tensor:
        """Returns `collect` of the same values [n, T] for a matrix with squared elements."""
        return sum(block.collect_squared(rows) for block, rows in self.split(values))

    def collect_predicted(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns `collect` of the predictions of x, multiplied by weights [n, T]: [2 + NK, T]."""
        total = torch.zeros_like(x)
        for block, block_weight in self.split(weight):
            total += block.collect(block.predict(x).mul_(block_weight))
        return total

    def split(self, values: Tensor) -> Iterator[tuple[DesignBlock, Tensor]]:
        """Yields each block of rows, and the same rows of `values` [n, T]."""
        return zip(self.blocks, values.split(ROWS_AT_ONCE), strict=True)


@dataclass
class Targets:
    """The targets of a fit: y, and the weights for fitting and for choosing among candidates."""

    y: Tensor  # float64 [n, T], 0 if missing
    # float64 [n, T], weights of the training scores; 0 for all other scores
    weight: Tensor
    # float64 [n, T], weights of the training scores that candidates are fitted to; otherwise 0
    fitted: Tensor
    # float64 [n, T], weights of the scores that choose the best candidate; otherwise 0
    validated: Tensor
    std: Tensor  # float64 [T], standard deviation of y in training
    scale: Tensor  # float64 [NK, T], factor of the penalty of each effect
    is_binary: bool

    def of_target(self, t: int) -> "Targets":
        """Returns the same object for target `t` only, with T = 1."""
        columns = {}
        for name, value in vars(self).items():
            columns[name] = value[..., t : t + 1] if isinstance(value, Tensor) else value
        return Targets(**columns)

    @property
    def regression(self) -> "type[Ridge]":
        return LogisticRidge if self.is_binary else Ridge


class NormalEquations:
    """The normal equations of a ridge regression on a design, with weights [n, T] of y.

    All methods have an argument `penalty` [NK, T], the penalty on the square of each effect.
    """

    def __init__(self, design: Design, weight: Tensor):
        self.design = design
        self.weight = weight
        self.squares = design.collect_squared(weight)

    def product(self, penalty: Tensor, x: Tensor) -> Tensor:
        """Returns the product of the matrix of the equations and x, [2 + NK, T]."""
        product = self.design.collect_predicted(x, self.weight)
        product[2:] += penalty * x[2:]
        return product

    def diagonal(self, penalty: Tensor) -> Tensor:
        """Returns the diagonal of the matrix of the equations, [2 + NK, T], with 1 instead of 0."""
        diagonal = torch.cat([self.squares[:2], self.squares[2:] + penalty])
        return diagonal.where(diagonal > 0, 1.0)

    def gradient(self, residual: Tensor, penalty: Tensor, x: Tensor) -> Tensor:
        """Returns the right side minus the matrix times x, [2 + NK, T].

        `residual` is y minus the prediction of x, [n, T].
        """
        gradient = self.design.collect(self.weight * residual)
        gradient[2:] -= penalty * x[2:]
        return gradient

    def solve(
        self, residual: Tensor, penalty: Tensor, x: Tensor, least: Tensor, reduction: float = 0.0
    ) -> Tensor:
        """Returns the solution of the equations, [2 + NK, T], by iterations that start from x.

        `residual` is y minus the prediction of x, [n, T]. The iterations end when the squared,
        preconditioned norm of the gradient is at most `least` [T], or at most `reduction`**2 times
        its value at x.
        """
        right = self.gradient(residual, penalty, x)
        diagonal = self.diagonal(penalty)
        distance = (right.square() / diagonal).sum(0)
        least = least.maximum(reduction**2 * distance)
        return x + conjugate_gradients(partial(self.product, penalty), right, diagonal, least)


@dataclass
class Ridge:
    """A linear ridge regression of y on a design."""

    design: Design
    y: Tensor  # the values that are fitted, [n, T]
    weight: Tensor  # weight of each value, 0 for values that are not fitted, [n, T]
    std: Tensor  # standard deviation of y, the unit of the tolerance, [T]
    tolerance: float = TOLERANCE  # a fit ends if the distance from the solution is at most this
    # A step of a logistic regression also ends if the distance from the solution of this step is at
    # most this share of the distance at its start.
    reduction: float = REDUCTION

    # Factor of squared effects in `objective`. It is 1, because the squared errors are not halved.
    penalty_factor = 1.0

    @property
    def unit(self) -> Tensor:
        """The square of the unit of the tolerance, [T].

        Large doses require a smaller tolerance: they multiply the errors of effects, and they make
        the equations ill-conditioned.
        """
        return self.std.square() / self.design.largest_dose**3

    @cached_property
    def equations(self) -> NormalEquations:
        return NormalEquations(self.design, self.weight)

    def objective(self, penalty: Tensor, x: Tensor, prediction: Tensor) -> Tensor:
        """Returns the objective of a fit at x [2 + NK, T]: the sum of losses and penalty, [T]."""
        penalties = self.penalty_factor * (penalty * x[2:].square()).sum(0)
        return (self.weight * self.loss(prediction, self.y)).sum(0) + penalties

    @staticmethod
    def loss(prediction: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of each prediction, [n, T]."""
        return (y - prediction).square()

    @staticmethod
    def linearise(prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual and the curvature of the loss at the predictions, [n, T] each.

        A least-squares fit to the residual, weighted with the curvature, is a Newton step.
        """
        return y - prediction, torch.ones_like(y)

    def fit(self, penalty: Tensor, x: Tensor) -> Tensor:
        """Returns the solution for a penalty [NK, T], by iterations from x [2 + NK, T]."""
        x = self.improve(penalty, x)
        # Rounding errors add up over the iterations. A second solution, for the remaining residual,
        # removes them.
        if self.design.largest_dose > 1:
            x = self.improve(penalty, x)
        return x

    def improve(self, penalty: Tensor, x: Tensor) -> Tensor:
        """Returns x after a Newton step, which reaches the solution if the loss is squared."""
        residual = self.y - self.design.predict(x)
        return self.equations.solve(residual, penalty, x, self.tolerance**2 * self.unit)


class LogisticRidge(Ridge):
    """A logistic ridge regression of binary y, by iteratively reweighted least squares."""

    penalty_factor = 0.5

    @staticmethod
    def loss(prediction: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(prediction, y, reduction="none")

    @staticmethod
    def linearise(
        prediction: Tensor, y: Tensor, least_variance: float = 1e-3
    ) -> tuple[Tensor, Tensor]:
        probability = prediction.sigmoid()
        variance = (probability * (1 - probability)).clamp(min=least_variance)
        return (y - probability) / variance, variance

    def fit(self, penalty: Tensor, x: Tensor) -> Tensor:
        for _ in range(MOST_REWEIGHTINGS):
            if (self.error(penalty, x) <= REWEIGHTED * self.tolerance).all():
                break
            x = self.improve(penalty, x)
        return x

    def error(self, penalty: Tensor, x: Tensor) -> Tensor:
        """Returns the distance of x from the solution, [T], in the unit of the tolerance."""
        residual, curvature = self.linearise(self.design.predict(x), self.y)
        equations = NormalEquations(self.design, self.weight * curvature)
        gradient = equations.gradient(residual, penalty, x)
        distance = (gradient.square() / equations.diagonal(penalty)).sum(0)
        return (distance / self.unit).sqrt()

    def improve(self, penalty: Tensor, x: Tensor) -> Tensor:
        prediction = self.design.predict(x)
        residual, curvature = self.linearise(prediction, self.y, least_variance=1e-15)
        equations = NormalEquations(self.design, self.weight * curvature)
        least = self.tolerance**2 * self.unit
        change = equations.solve(residual, penalty, x, least, self.reduction) - x
        return x + self.step(penalty, x, change) * change

    def step(self, penalty: Tensor, x: Tensor, change: Tensor) -> Tensor:
        """Returns the largest step of 1, 1/2, 1/4 ... that does not increase the objective, [T].

        `change` is a complete Newton step. It is too large if predictions are nearly 0 or 1.
        """

        def total(x: Tensor) -> Tensor:
            return self.objective(penalty, x, self.design.predict(x))

        most = total(x) * (1 + 1e-12)  # allows for rounding errors
        step = torch.ones_like(most)
        for _ in range(MOST_HALVINGS):
            is_up = total(x + step * change) > most
            if not is_up.any():
                break
            step = step.where(~is_up, step / 2)
        return step


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor, least: Tensor
) -> Tensor:
    """Returns the solution of product(x) = right for each column, in the shape of `right`.

    `diagonal` is the diagonal of the matrix, for Jacobi's preconditioner. The method ends when the
    sum of residual**2 / diagonal is at most `least` [T] in all columns, or after `MOST_STEPS`.
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
        # Solved columns do not change any more: their values would become too small to divide by.
        step = (norm / (direction * change).sum(0)).where(norm > least, 0.0)
        x = x + step * direction
        residual = residual - step * change
        scaled = residual / diagonal
        previous = norm
        norm = (residual * scaled).sum(0)
        direction = scaled + (norm / previous).nan_to_num() * direction
    return x


def effective_share(weight: Tensor) -> Tensor:
    """Returns the effective number of rows (Kish 1965), divided by the number of rows, [T].

    Only rows with a weight above 0 count. The result is 1 if their weights [n, T] are equal, and
    small if a few rows have nearly all of the weight. In that case, all other weights are small, so
    penalties must be small, too.
    """
    effective = weight.sum(dim=0).square() / weight.square().sum(dim=0)
    return effective / (weight > 0).sum(dim=0)
