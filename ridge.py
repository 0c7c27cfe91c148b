"""Ridge regressions, linear and logistic, on the perturbed nodes of samples.

Shapes: N nodes, n samples of T scores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from tables import Tables

ROWS_AT_ONCE = 2**17  # whose numbers of one target stay in cache
TOLERANCE = 1e-7  # of a fit, in standard deviations of the scores
REWEIGHTED = 1e-5  # the same, at which a logistic regression ends
MOST_STEPS = 1000  # of conjugate gradients
MOST_REWEIGHTINGS = 100  # of a logistic regression
REDUCTION = 0.01  # of the distance from the solution, by one of its steps
MOST_HALVINGS = 30  # of such a step


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
