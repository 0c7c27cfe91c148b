"""The combination: a baseline from the sum, the largest and the smallest response of the nodes.

It is suitable for bottlenecks: for example, growth is limited by the scarcest resource, and a power
grid fails at its most loaded line. The value of a sample is

    intercept + slope * sum of doses + u * sum of responses
        + v * max(0, largest response) + w * min(0, smallest response)

If it is known which responses are the largest and the smallest, the value is linear in the
responses. If the responses are known, it is linear in the weights u, v and w. Responses and weights
are therefore fitted in turn.

Shapes: N nodes, n samples of T targets, `total` perturbed nodes in all samples, K effects of a
node.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

import torch
from torch import Tensor
from torch_geometric.utils import scatter
from tqdm import tqdm

from baseline_ridge import Design, Doses, Ridge, Targets
from run_progress import progress_bar

SUM = (1.0, 0.0, 0.0)  # the weights u, v and w of a sum
# The weights u, v and w that fits start from. The result of a fit depends on its start.
STARTS = (SUM, (0.3, 1.0, 0.0), (0.3, 0.0, 1.0))
# Candidate penalties on the responses. The smallest penalty is for targets without noise: if a row
# perturbs only one node, its score then determines the response of this node exactly.
PENALTIES = (3.0, 0.3, 0.01, 0.0001)
# Every setting (a start and a penalty) has 4 rounds; the `MOST_SETTINGS` best have 9 more.
ROUNDS = (4, 9)
MOST_SETTINGS = 2
STEPS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # step sizes towards the responses that a round fits
# With larger values of TOLERANCE and REDUCTION, results would depend on rounding errors.
TOLERANCE = 1e-8  # tolerance of the responses in a round, in standard deviations of y
REDUCTION = 1e-7  # a step of a logistic regression reduces the distance from the goal to this share
EQUAL = 1e-7  # differences below this share of the largest response are rounding errors


@dataclass
class Combination:
    """The combination of one target: responses and the weights of their sum and extremes."""

    doses: Doses
    x: Tensor  # float64 [2 + NK, 1], coefficients of `baseline_ridge.Design`
    weights: Tensor  # float64 [3]: u, v and w

    @cached_property
    def shares(self) -> Tensor:
        """The share of each response in the sum and the extremes of its sample, float64 [3, total].

        Row 0 contains the shares in the sum, which are 1. Rows 1 and 2 contain the shares in the
        largest and in the smallest response; see `share_of_largest`.
        """
        response = self.doses.responses(self.x)
        largest = share_of_largest(response, self.doses)
        smallest = share_of_largest(-response, self.doses)
        return torch.stack([torch.ones_like(response), largest, smallest])

    def predict(self) -> Tensor:
        """Returns the combination of each sample, float64 [n, 1]."""
        return self.features() @ self.line_and_weights()

    def features(self) -> Tensor:
        """Returns the design matrix of intercept, slope, u, v and w, float64 [n, 5].

        Its columns are 1, the centred sum of 1 - level, and the sum, the largest and the smallest
        response.
        """
        responses = self.shares * self.doses.responses(self.x)
        of_samples = scatter(responses, self.doses.sample, dim=1, dim_size=len(self.doses.line))
        return torch.cat([self.doses.line.T, of_samples]).T

    def line_and_weights(self) -> Tensor:
        """Returns the coefficients intercept, slope, u, v and w, float64 [5, 1]."""
        return torch.cat([self.x[:2, 0], self.weights]).unsqueeze(1)


def share_of_largest(response: Tensor, doses: Doses) -> Tensor:
    """Returns 1 for the largest response of each sample if it is positive, otherwise 0, [total].

    Responses that are equal up to rounding share the 1 evenly. A response that is 0 up to rounding
    does not count as positive. Such responses occur if u is 0: if a node is not an extreme of any
    sample, its response is not fitted to anything, and the penalty reduces the response to 0.
    """
    rounding = EQUAL * response.abs().max()
    sample = doses.sample
    num_samples = len(doses.line)
    largest = scatter(response, sample, dim_size=num_samples, reduce="max")
    is_largest = (response >= largest[sample] - rounding) & (response > rounding)
    is_largest = is_largest.double()
    num_largest = scatter(is_largest, sample, dim_size=num_samples)
    return is_largest / num_largest[sample].clamp(min=1)


def combine(
    design: Design, targets: Targets, additive: Tensor, is_tried: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the coefficients x [2 + NK, T] and weights [3, T] of each target's best combination.

    The best combination has the smallest loss on the scores with a weight in `targets.validated`.
    If no combination has a smaller loss than the sum of responses, the sum is returned. Fits start
    from the coefficients of the sum, `additive` [2 + NK, T]. No combinations are tried for targets
    that are False in `is_tried`, bool [T].
    """
    x = additive.clone()
    weights = additive.new_tensor(SUM).unsqueeze(1).repeat(1, additive.size(1))
    tried = is_tried.nonzero().flatten().tolist()
    num_fits = len(tried) * (len(STARTS) * len(PENALTIES) + MOST_SETTINGS)
    with ExitStack() as undo, progress_bar(num_fits, "fitting combinations of responses") as bar:
        # The operations of the fits are so small that several threads would mostly wait for each
        # other.
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for t in tried:
            best = combine_target(design, targets.of_target(t), additive[:, t : t + 1], bar)
            if best is not None:
                x[:, t] = best.x[:, 0]
                weights[:, t] = best.weights
    return x, weights


def combine_target(
    design: Design, target: Targets, additive: Tensor, bar: tqdm
) -> Combination | None:
    """Returns the best combination for one target, or None if the sum of responses is better.

    Each pair of a start and a penalty is a setting. The bar advances after a setting's rounds, so
    the `MOST_SETTINGS` best settings advance it twice.
    """
    loss = target.regression.loss

    def validate(prediction: Tensor) -> float:
        return (target.validated * loss(prediction, target.y)).sum().item()

    least = validate(design.predict(additive))
    best = None
    losses = {}  # {setting: its smallest loss so far}
    candidates = {}
    for setting in product(STARTS, PENALTIES):
        of_setting = rounds(design, target, target.fitted, additive, *setting)
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
    to_all = rounds(design, target, target.weight, additive, *setting)
    *_, last = islice(to_all, number + 1)
    return last


def rounds(
    design: Design, target: Targets, weight: Tensor, additive: Tensor, start: tuple, penalty: float
) -> Iterator[Combination]:
    """Yields the combination after each round, until a round does not reduce the objective.

    The combinations are fitted to the scores of one target, with `weight` [n, 1]. The first one is
    the sum of responses, fitted with this penalty. `start` are the weights u, v and w from which
    the fit starts.

    A round first fits the responses, for given weights u, v and w, and for given nodes with the
    largest and smallest responses. It then fits the weights for given responses. After that, other
    nodes may have the largest and smallest responses, so the objective, the sum of losses and
    penalty, can increase. A round therefore tries the `STEPS` towards the fitted responses, from
    large to small, and makes the first step that reduces the objective. Rounds that increase the
    objective would amplify rounding errors.
    """
    scaled_penalty = penalty * target.scale

    def regression(design: Design) -> Ridge:
        return target.regression(design, target.y, weight, target.std, TOLERANCE, REDUCTION)

    def objective(state: Combination) -> Tensor:
        return regression(design).objective(scaled_penalty, state.x, state.predict())

    x = regression(design).improve(scaled_penalty, additive)
    yield Combination(design.doses, x, additive.new_tensor(SUM))
    state = Combination(design.doses, x, additive.new_tensor(start))
    least = objective(state)
    is_lower = True
    while is_lower:
        # The coefficients of the responses: u + v * share in the largest + w * share in the
        # smallest response.
        factor = state.weights @ state.shares
        of_factors = regression(design.scaled(factor))
        change = of_factors.improve(scaled_penalty, state.x) - state.x
        for step in STEPS:
            moved = replace(state, x=state.x + step * change)
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

    The weights u, v and w are never negative. Differences of large weights would fit rows with two
    nodes equally well, but would not predict rows with other numbers of nodes. Weights and
    responses are scaled so that `u + (v + w) / 2` is 1.
    """
    features = state.features()
    prediction = features @ state.line_and_weights()
    residual, curvature = target.regression.linearise(prediction, target.y)
    # The fit is to the scores minus the intercept. Without this, rounding errors could decide in
    # `non_negative`, because the losses of large scores are nearly equal.
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
    """Returns the `least_squares` coefficients [F], of which the last three must not be negative.

    The function solves the problem for all subsets of the last three features, and returns the best
    solution without a negative coefficient among them.
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

    `features` are [n, F], `target` and `weight` are [n, 1]. If there are several solutions, the
    function returns the solution with the smallest norm, after scaling all features to norm 1.
    """
    return solve_small(*normal_equations(features, target, weight))


def normal_equations(features: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the matrix [F, F] and right side [F] of the normal equations of a weighted fit."""
    weighted = features * weight
    return weighted.T @ features, (weighted.T @ target).flatten()


def solve_small(matrix: Tensor, right: Tensor) -> Tensor:
    """Returns the minimum-norm solutions [..., F] of normal equations.

    `matrix` is [..., F, F], and `right` is the right side, [..., F].
    """
    size = matrix.diagonal(dim1=-2, dim2=-1).sqrt()  # norm of each feature
    size = size.where(size > 0, 1.0)
    scaled = matrix / size.unsqueeze(-1) / size.unsqueeze(-2)
    inverse = torch.linalg.pinv(scaled, rtol=1e-10, hermitian=True)
    solution = inverse @ (right / size).unsqueeze(-1)
    return solution.squeeze(-1) / size
