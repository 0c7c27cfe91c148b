"""Functions of the perturbed nodes that are no sums: also of their largest and smallest responses.

Growth is limited by what is scarcest, a grid fails at its most loaded line. A sample's function is

    intercept + slope * sum of doses + u * sum of responses
        + v * max(0, largest response) + w * min(0, smallest response)

Given which response is the largest and which the smallest, it is linear in the responses, and given
the responses, in the weights u, v and w: they are fitted in turn.

Shapes: N nodes, n samples of T scores, `total` perturbed nodes in all samples, K responses of a
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

from baseline_ridge import Design, Doses, Scores
from run_progress import ProgressBar, progress_bar

SUM = (1.0, 0.0, 0.0)  # weights u, v and w of a sum
# Those from which the fits start, as it depends on these where they end.
STARTS = (SUM, (0.3, 1.0, 0.0), (0.3, 0.0, 1.0))
# On the responses. Scores without noise need none: a node that was measured alone is known.
PENALTIES = (3.0, 0.3, 0.01, 0.0001)
ROUNDS = (4, 9)  # of all starts and penalties, and more of the few that suit best by then
MOST_SETTINGS = 2  # of these
TOLERANCE = 1e-4  # of the responses in a round, in standard deviations of the scores


@dataclass
class Combination:
    """A function of the perturbed nodes, of one target."""

    doses: Doses
    x: Tensor  # float64 [2 + NK, 1], as in `baseline_ridge.Design`
    weights: Tensor  # float64 [3]: u, v and w

    @cached_property
    def parts(self) -> Tensor:
        """How far each response is in what u, v and w are multiplied with, float64 [3, total]."""
        response = self.doses.responses(self.x)
        largest = share_of_largest(response, self.doses)
        smallest = share_of_largest(-response, self.doses)
        return torch.stack([torch.ones_like(response), largest, smallest])

    def factor(self) -> Tensor:
        """Returns by what the response of each perturbed node counts, float64 [total]."""
        return self.weights @ self.parts

    def predict(self) -> Tensor:
        """Returns the function of each sample, float64 [n, 1]."""
        return self.features() @ self.line_and_weights()

    def features(self) -> Tensor:
        """Returns what intercept, slope, u, v and w are multiplied with, float64 [n, 5]."""
        parts = self.parts * self.doses.responses(self.x)
        of_samples = scatter(parts, self.doses.sample, dim=1, dim_size=len(self.doses.line))
        return torch.cat([self.doses.line.T, of_samples]).T

    def line_and_weights(self) -> Tensor:
        """Returns intercept, slope, u, v and w, float64 [5, 1]."""
        return torch.cat([self.x[:2, 0], self.weights]).unsqueeze(1)


def share_of_largest(response: Tensor, doses: Doses) -> Tensor:
    """Returns 1 for the largest response of each sample if it is positive, 0 for others, [total].

    Of several that are equal, each is a part of 1.
    """
    sample = doses.sample
    num_samples = len(doses.line)
    largest = scatter(response, sample, dim_size=num_samples, reduce="max")
    is_largest = ((response == largest[sample]) & (response > 0)).double()
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
    doses: Doses, design: Design, scores: Scores, additive: Tensor, is_tried: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns x [2 + NK, T] and weights [3, T] of what suits the validated scores best.

    `additive` is the sum of responses, x [2 + NK, T], of `design`. It stays for the targets that
    are not to be tried, bool [T].
    """
    x = additive.clone()
    weights = additive.new_tensor(SUM).unsqueeze(1).repeat(1, additive.size(1))
    targets = is_tried.nonzero().flatten().tolist()
    num_fits = len(targets) * (len(STARTS) * len(PENALTIES) + MOST_SETTINGS)
    with one_thread(), progress_bar(num_fits, "fitting combinations of responses") as bar:
        for t in targets:
            x_of_sum = additive[:, t : t + 1]
            best = combine_target(doses, design, scores.of_target(t), x_of_sum, bar)
            if best is not None:
                x[:, t] = best.x[:, 0]
                weights[:, t] = best.weights
    return x, weights


def combine_target(
    doses: Doses, design: Design, scores: Scores, additive: Tensor, bar: ProgressBar
) -> Combination | None:
    """Returns what `combine` does for one target, None if the sum of responses suits best.

    The bar counts the settings that are tried, `MOST_SETTINGS` of them twice.
    """
    loss = scores.regression.loss

    def validate(prediction: Tensor) -> float:
        return (scores.validated * loss(prediction, scores.y)).sum().item()

    least = validate(design.predict(additive))
    best = None
    losses = {}  # of each setting, the least so far
    candidates = {}
    for setting in product(STARTS, PENALTIES):
        of_setting = rounds(doses, design, scores, scores.fitted, additive, *setting)
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
    if torch.equal(scores.fitted, scores.weight):
        return candidate
    to_all = rounds(doses, design, scores, scores.weight, additive, *setting)
    return next(islice(to_all, number, None))


def rounds(
    doses: Doses,
    design: Design,
    scores: Scores,
    weight: Tensor,
    additive: Tensor,
    start: tuple[float, float, float],
    penalty: float,
) -> Iterator[Combination]:
    """Yields what each round of fits to scores with a weight [n, 1] ends with, without an end.

    The first is the sum with this penalty.
    """

    def improve(design: Design, x: Tensor) -> Tensor:
        regression = scores.regression(design, scores.y, weight, scores.std, TOLERANCE)
        return regression.improve(penalty * scores.scale, x)

    x = improve(design, additive)
    yield Combination(doses, x, additive.new_tensor(SUM))
    state = Combination(doses, x, additive.new_tensor(start))
    while True:
        x = improve(design.scaled(state.factor()), state.x)
        state = refit_weights(Combination(doses, x, state.weights), scores, weight)
        yield state


def refit_weights(state: Combination, scores: Scores, weight: Tensor) -> Combination:
    """Returns the function with intercept, slope and weights by a least-squares fit.

    No weight is negative: of rows of two nodes, differences of large weights would say what no
    other rows follow. The responses are scaled so that u + (v + w) / 2 is 1.
    """
    features = state.features()
    prediction = features @ state.line_and_weights()
    residual, curvature = scores.regression.linearise(prediction, scores.y)
    solution = non_negative(features, prediction + residual, weight * curvature)
    line, weights = solution.tensor_split([2])
    u, v, w = weights
    size = u + (v + w) / 2
    if size < 1e-3:
        size = torch.ones_like(size)
    x = torch.cat([line, state.x[2:, 0] * size]).unsqueeze(1)
    return Combination(state.doses, x, weights / size)


def non_negative(features: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Returns what `least_squares` does where none but the first two may be negative, [F].

    It is the best one of all choices of features to leave out.
    """
    is_used = torch.tensor([(1, 1, *chosen) for chosen in product((0, 1), repeat=3)]).double()
    matrix, right = moments(features, target, weight)
    masked = is_used.unsqueeze(2) * matrix * is_used.unsqueeze(1)
    solutions = is_used * solve_small(masked, is_used * right)
    losses = ((solutions @ matrix) * solutions).sum(dim=1) - 2 * solutions @ right
    is_allowed = (solutions[:, 2:] >= 0).all(dim=1)
    return solutions[losses.where(is_allowed, torch.inf).argmin()]


def least_squares(features: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Returns what a target is of a few features, [F]; of what they do not tell, the least.

    Features are [n, F], target and weight [n, 1].
    """
    return solve_small(*moments(features, target, weight))


def moments(features: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns matrix [F, F] and right side [F] of the normal equations."""
    weighted = features * weight
    return weighted.T @ features, (weighted.T @ target).flatten()


def solve_small(matrix: Tensor, right: Tensor) -> Tensor:
    """Returns the smallest solutions [..., F] of normal equations [..., F, F] and [..., F]."""
    unit = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    unit = unit.where(unit > 0, 1.0)
    scaled = matrix / unit.unsqueeze(-1) / unit.unsqueeze(-2)
    inverse = torch.linalg.pinv(scaled, rtol=1e-10, hermitian=True)
    return (inverse @ (right / unit).unsqueeze(-1)).squeeze(-1) / unit
