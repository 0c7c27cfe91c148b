"""The combination: a baseline of the sum, the largest and the smallest of the nodes' responses.

Growth is limited by what is scarcest, a grid fails at its most loaded line. A sample's value is

    intercept + slope * sum of doses + u * sum of responses
        + v * max(0, largest response) + w * min(0, smallest response)

Given which response is the largest and which the smallest, it is linear in the responses, and given
the responses, in the weights u, v and w: they are fitted in turn.

Shapes: N nodes, n samples of T targets, `total` perturbed nodes in all samples, K effects of a
node.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product

import torch
from torch import Tensor
from torch_geometric.utils import scatter
from tqdm import tqdm

from baseline_ridge import Design, Doses, Ridge, Targets
from run_progress import progress_bar

SUM = (1.0, 0.0, 0.0)  # weights u, v and w of a sum
# Where fits start; where they end depends on it.
STARTS = (SUM, (0.3, 1.0, 0.0), (0.3, 0.0, 1.0))
# On the responses. Targets without noise need none: a node that was measured alone is known.
PENALTIES = (3.0, 0.3, 0.01, 0.0001)
ROUNDS = (4, 9)  # for each start and penalty, and for the `MOST_SETTINGS` best of these then
MOST_SETTINGS = 2
STEPS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # towards the responses that a round fits
# What looser fits leave depends on rounding.
TOLERANCE = 1e-8  # of the responses in a round, in standard deviations of y
REDUCTION = 1e-7  # of the distance from them, by a step of a logistic regression
EQUAL = 1e-7  # of the largest response of all, a difference by rounding


@dataclass
class Combination:
    """The combination of one target: responses and the weights of their sum and extremes."""

    doses: Doses
    x: Tensor  # float64 [2 + NK, 1], as in `baseline_ridge.Design`
    weights: Tensor  # float64 [3]: u, v and w

    @cached_property
    def shares(self) -> Tensor:
        """Shares of each response in its sample's sum, largest and smallest, float64 [3, total].

        They are 1 for the sum, `share_of_largest` for the largest, and likewise for the smallest.
        """
        response = self.doses.responses(self.x)
        largest = share_of_largest(response, self.doses)
        smallest = share_of_largest(-response, self.doses)
        return torch.stack([torch.ones_like(response), largest, smallest])

    def factor(self) -> Tensor:
        """Returns the coefficient of each perturbed node's response, float64 [total].

        It is u + v * its share in the largest + w * its share in the smallest.
        """
        return self.weights @ self.shares

    def predict(self) -> Tensor:
        """Returns the combination of each sample, float64 [n, 1]."""
        return self.features() @ self.line_and_weights()

    def features(self) -> Tensor:
        """Returns the design matrix of intercept, slope, u, v and w, float64 [n, 5].

        Its columns are 1, the sum of 1 - level less its mean, and the sum, the largest and the
        smallest response.
        """
        responses = self.shares * self.doses.responses(self.x)
        of_samples = scatter(responses, self.doses.sample, dim=1, dim_size=len(self.doses.line))
        return torch.cat([self.doses.line.T, of_samples]).T

    def line_and_weights(self) -> Tensor:
        """Returns the coefficients intercept, slope, u, v and w, float64 [5, 1]."""
        return torch.cat([self.x[:2, 0], self.weights]).unsqueeze(1)


def share_of_largest(response: Tensor, doses: Doses) -> Tensor:
    """Returns 1 for the largest response of each sample if it is positive, 0 for others, [total].

    Several that are equally large, but for rounding, share the 1 evenly. One that is 0 but for
    rounding is not positive: a node that is no sample's extreme is fitted to nothing if u is 0, and
    the penalty takes its response to 0.
    """
    rounding = EQUAL * response.abs().max()
    sample = doses.sample
    num_samples = len(doses.line)
    largest = scatter(response, sample, dim_size=num_samples, reduce="max")
    is_largest = (response >= largest[sample] - rounding) & (response > rounding)
    is_largest = is_largest.double()
    num_largest = scatter(is_largest, sample, dim_size=num_samples)
    return is_largest / num_largest[sample].clamp(min=1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread: several wait for each other longer than the fits take."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def combine(
    doses: Doses, design: Design, targets: Targets, additive: Tensor, is_tried: Tensor
) -> tuple[Tensor, Tensor]:
    """Fits combinations; returns x [2 + NK, T] and weights [3, T] of the best for each target.

    The best has the smallest loss on the validated scores. `additive` is the x [2 + NK, T] of the
    sum of responses, where fits start. Targets that are not to be tried, bool [T], keep the sum.
    """
    x = additive.clone()
    weights = additive.new_tensor(SUM).unsqueeze(1).repeat(1, additive.size(1))
    tried = is_tried.nonzero().flatten().tolist()
    num_fits = len(tried) * (len(STARTS) * len(PENALTIES) + MOST_SETTINGS)
    with one_thread(), progress_bar(num_fits, "fitting combinations of responses") as bar:
        for t in tried:
            x_of_sum = additive[:, t : t + 1]
            best = combine_target(doses, design, targets.of_target(t), x_of_sum, bar)
            if best is not None:
                x[:, t] = best.x[:, 0]
                weights[:, t] = best.weights
    return x, weights


def combine_target(
    doses: Doses, design: Design, target: Targets, additive: Tensor, bar: tqdm
) -> Combination | None:
    """Returns the best combination for one target, None if the sum of responses is the best.

    The bar counts the settings, pairs of a start and a penalty; `MOST_SETTINGS` count twice.
    """
    loss = target.regression.loss

    def validate(prediction: Tensor) -> float:
        return (target.validated * loss(prediction, target.y)).sum().item()

    least = validate(design.predict(additive))
    best = None
    losses = {}  # of each setting, the least so far
    candidates = {}
    for setting in product(STARTS, PENALTIES):
        of_setting = rounds(doses, design, target, target.fitted, additive, *setting)
        candidates[setting] = enumerate(of_setting)
    settings = list(candidates)
    for num_rounds in ROUNDS:
        for setting in settings:
            for number, candidate in islice(candidates[setting], num_rounds):
                total = validate(candidate.predict())
                losses[setting] = min(total, losses.get(setting, total))
                if total < least:
                    least = total
                    best = (candidate, setting, number)
            bar.update()
        settings = sorted(settings, key=losses.__getitem__)[:MOST_SETTINGS]
    if best is None:
        return None
    candidate, setting, number = best
    if torch.equal(target.fitted, target.weight):
        return candidate
    to_all = rounds(doses, design, target, target.weight, additive, *setting)
    *_, last = islice(to_all, number + 1)
    return last


def rounds(
    doses: Doses,
    design: Design,
    target: Targets,
    weight: Tensor,
    additive: Tensor,
    start: tuple[float, float, float],
    penalty: float,
) -> Iterator[Combination]:
    """Yields the combination after each round of fits, until no round lowers what a fit minimises.

    A round fits the responses, given the weights u, v and w and which responses are the extremes,
    and then the weights, given the responses. As the extremes may be others then, it goes the
    largest of the `STEPS` towards the fitted responses that lowers losses and penalty together:
    rounds that raise them amplify rounding until it decides. The fits are to the scores of one
    target, whose rows count by `weight`, [n, 1]. The first that it yields is the sum with this
    penalty.
    """
    scaled_penalty = penalty * target.scale

    def regression(design: Design) -> Ridge:
        return target.regression(design, target.y, weight, target.std, TOLERANCE, REDUCTION)

    def objective(state: Combination) -> Tensor:
        return regression(design).objective(scaled_penalty, state.x, state.predict())

    x = regression(design).improve(scaled_penalty, additive)
    yield Combination(doses, x, additive.new_tensor(SUM))
    state = Combination(doses, x, additive.new_tensor(start))
    least = objective(state)
    is_lower = True
    while is_lower:
        of_factors = regression(design.scaled(state.factor()))
        change = of_factors.improve(scaled_penalty, state.x) - state.x
        for step in STEPS:
            moved = Combination(doses, state.x + step * change, state.weights)
            candidate = refit_weights(moved, target, weight)
            total = objective(candidate)
            is_lower = bool(total < least)
            if is_lower:
                state = candidate
                least = total
                yield state
                break


def refit_weights(state: Combination, target: Targets, weight: Tensor) -> Combination:
    """Returns the combination with intercept, slope, u, v and w refitted by least squares.

    None of u, v and w is negative: rows of two nodes are fitted as well by differences of large
    weights, which rows of other sizes do not follow. The responses are scaled so that
    u + (v + w) / 2 is 1.
    """
    features = state.features()
    prediction = features @ state.line_and_weights()
    residual, curvature = target.regression.linearise(prediction, target.y)
    # Less the intercept: of large scores, the losses of `non_negative` would differ by rounding.
    intercept = state.x[0]
    refitted = prediction - intercept + residual
    solution = non_negative(features, refitted, weight * curvature)
    change, slope, *weights = solution
    weights = torch.stack(weights)
    u, v, w = weights
    size = u + (v + w) / 2
    if size < 1e-3:
        size = torch.ones_like(size)
    line = torch.cat([intercept + change, slope.unsqueeze(0)])
    x = torch.cat([line, state.x[2:, 0] * size]).unsqueeze(1)
    return Combination(state.doses, x, weights / size)


def non_negative(features: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Returns `least_squares` with no negative coefficient but for the first two, [F].

    It tries all subsets of the last three features, and takes the best that is allowed.
    """
    subsets = product((0, 1), repeat=3)
    is_used = torch.tensor([(1, 1, *subset) for subset in subsets]).double()
    matrix, right = normal_equations(features, target, weight)
    masked = is_used.unsqueeze(2) * matrix * is_used.unsqueeze(1)
    solutions = is_used * solve_small(masked, is_used * right)
    losses = ((solutions @ matrix) * solutions).sum(dim=1) - 2 * solutions @ right
    is_allowed = (solutions[:, 2:] >= 0).all(dim=1)
    return solutions[losses.where(is_allowed, torch.inf).argmin()]


def least_squares(features: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Returns the weighted least-squares coefficients of the features, [F].

    Features are [n, F], target and weight [n, 1]. Where several solutions fit as well, it is the
    one of the smallest norm, in units of the features.
    """
    return solve_small(*normal_equations(features, target, weight))


def normal_equations(features: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns matrix [F, F] and right side [F] of the normal equations of a least-squares fit."""
    weighted = features * weight
    return weighted.T @ features, (weighted.T @ target).flatten()


def solve_small(matrix: Tensor, right: Tensor) -> Tensor:
    """Returns the minimum-norm solutions [..., F] of normal equations [..., F, F] and [..., F]."""
    size = matrix.diagonal(dim1=-2, dim2=-1).sqrt()  # of each feature
    size = size.where(size > 0, 1.0)
    scaled = matrix / size.unsqueeze(-1) / size.unsqueeze(-2)
    inverse = torch.linalg.pinv(scaled, rtol=1e-10, hermitian=True)
    solution = inverse @ (right / size).unsqueeze(-1)
    return solution.squeeze(-1) / size
