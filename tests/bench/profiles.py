"""Rivals of the model for profiles, which are one score per node, without a trained network.

Each function in `RIVALS` maps `Profiles` to predictions of all rows, float64 [n, T]. It is fitted
on the training rows. Its settings are chosen by the squared error on the validation rows. Missing
scores are left out.

Shapes: N nodes, K nodes that are knocked out in at least one row, n rows of T scores, R relations,
F features of a score.
"""

import itertools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from baseline import additive_baseline
from baseline_ridge import conjugate_gradients
from data_tables import Tables
from model_nodes import target_nodes
from tests.bench.baselines import WEIGHTS, KnockedOut

# Penalties of the nodes' effects. With 1, a node in a single row gets half of the row's deviation.
PENALTIES = (0.3, 1.0, 3.0, 10.0)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# An edge of a path is divided by the degrees of its source and target, to the power of these.
EXPONENTS = ((0.0, 0.0), (0.5, 0.5), (0.0, 0.5), (0.0, 1.0))
SHRINKAGES = (math.inf, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)  # penalties that pull scales towards 1
PATH_PENALTIES = (1e-6, 1e-3, 1e-1)  # penalties of path weights, in units of the squared features
TOLERANCE = 1e-5  # relative tolerance of the nodes' effects
BLOCK = 64  # number of rows whose paths are counted at once


def are_profiles(tables: Tables) -> bool:
    """Returns whether there are several scores, all of them named after nodes of the graph."""
    return len(tables.targets) > 1 and set(tables.targets) <= set(tables.genes)


class Profiles(KnockedOut):
    """The data of a split whose scores are profiles, in the form that the rivals need."""

    def __init__(self, tables: Tables):
        super().__init__(tables)
        self.y = tables.y
        self.mean = self.y[self.train].nanmean(0).nan_to_num()  # mean profile, [T]
        self.effects: dict[float, Tensor] = {}  # effects of the nodes for each penalty

    def sum_rows(self, rows: Tensor, values: Tensor) -> Tensor:
        """Returns the sums of `values` [K, ...] over the nodes of each row, [len(rows), ...]."""
        place, member = self.places(rows)
        sums = values.new_zeros(len(rows), *values.shape[1:])
        return sums.index_add_(0, place, values[member])

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the perturbed nodes of some rows: the index in `rows`, and the member of each."""
        place_of_row = torch.full((self.num_rows,), -1)
        place_of_row[rows] = torch.arange(len(rows))
        place = place_of_row[self.row]
        is_chosen = place >= 0
        return place[is_chosen], self.member[is_chosen]

    def best(self, predict: Callable[..., Tensor], settings: Iterable[tuple]) -> Tensor:
        """Returns `predict(rows, *setting)` for all rows, with the setting chosen by validation."""
        rows = self.tables.rows("val")
        y = self.y[rows]

        def error(setting: tuple) -> float:
            return (predict(rows, *setting) - y).square().nanmean().item()

        return predict(torch.arange(self.num_rows), *min(settings, key=error))

    def effect(self, penalty: float) -> Tensor:
        """Returns the effect of each node, which is added to the mean profile, float32 [K, T].

        The effects are from a ridge regression. An unseen node has the effect 0.
        """
        if penalty not in self.effects:
            self.effects[penalty] = self.fit_effects(penalty)
        return self.effects[penalty]

    def fit_effects(self, penalty: float) -> Tensor:
        """Returns the effects for a penalty; solves the normal equations of all targets at once."""
        rows = self.train.nonzero().flatten()
        deviation = (self.y[rows] - self.mean).float()
        present = ~deviation.isnan()
        place, member = self.places(rows)

        def collect(values: Tensor) -> Tensor:
            sums = values.new_zeros(len(self.nodes), values.size(1))
            return sums.index_add_(0, member, (values * present)[place])

        def normal(effect: Tensor) -> Tensor:
            return collect(self.sum_rows(rows, effect)) + penalty * effect

        right = collect(deviation.nan_to_num())
        diagonal = collect(torch.ones_like(deviation)) + penalty
        squared_norm = (right.square() / diagonal).sum(0)
        return conjugate_gradients(normal, right, diagonal, TOLERANCE**2 * squared_norm)


def mean_profile(problem: Profiles) -> Tensor:
    return problem.mean.expand(problem.num_rows, -1)


def additive_profiles(problem: Profiles) -> Tensor:
    return additive_baseline(problem.tables).prediction


def neighbours(problem: Profiles) -> Tensor:
    """The mean profile plus the effects of a row's nodes.

    An unseen node gets the mean effect of similar nodes, weighted by `KnockedOut.weight`. The
    weights and the penalty are chosen by validation.
    """

    def predict(rows: Tensor, penalty: float, weight: tuple[str, float]) -> Tensor:
        effect = problem.impute(problem.effect(penalty), *weight)
        return problem.mean + problem.sum_rows(rows, effect)

    return problem.best(predict, itertools.product(PENALTIES, WEIGHTS))


def low_rank(problem: Profiles) -> Tensor:
    """Like `neighbours`, but the effects are projected on their first singular vectors.

    The number of singular vectors is chosen by validation, too.
    """
    factors = {}
    for penalty in PENALTIES:
        effect = problem.effect(penalty)
        _, vectors = torch.linalg.eigh((effect @ effect.T).double())
        vectors = vectors.flip(1)[:, : max(RANKS)].float()  # largest singular values first
        factors[penalty] = vectors, vectors.T @ effect  # [K, rank], [rank, T]

    def predict(rows: Tensor, penalty: float, rank: int, weight: tuple[str, float]) -> Tensor:
        vectors, profiles = factors[penalty]
        coefficients = problem.impute(vectors[:, :rank], *weight)
        return problem.mean + problem.sum_rows(rows, coefficients) @ profiles[:rank]

    return problem.best(predict, itertools.product(PENALTIES, RANKS, WEIGHTS))


# ---- Paths ---------------------------------------------------------------------------------------
class Paths:
    """Predicts scores from the paths of one and two edges from the knocked-out nodes to the target.

    The features of a score are the sums of these paths for each relation, and for each pair of
    relations: F = R + R * R. A path is the product of its edges. An edge is its weight, divided by
    the degrees of its source and its target to the power of `exponents`. The regression uses the
    training rows in which the target has a score.
    """

    def __init__(self, problem: Profiles, exponents: tuple[float, float]):
        self.problem = problem
        tables = problem.tables
        self.num_nodes = len(tables.genes)
        source, target = tables.edge_index
        value = tables.edge_weight.float()
        for end, exponent in zip((source, target), exponents, strict=True):
            degree = torch.bincount(end, minlength=self.num_nodes).float()
            value = value / degree[end].pow(exponent)
        size = (self.num_nodes, self.num_nodes)
        self.matrices = []  # sparse [target, source], one for each relation
        for r in range(len(tables.relations)):
            chosen = tables.edge_type == r
            index = tables.edge_index.flip(0)[:, chosen]
            matrix = torch.sparse_coo_tensor(index, value[chosen], size, check_invariants=False)
            self.matrices.append(matrix.coalesce())
        self.target = target_nodes(tables)
        self.sum_training_rows()

    def features(self, rows: Tensor) -> Tensor:
        """Returns the features of the scores of some rows, float32 [T, F, len(rows)]."""
        one_hot = torch.zeros(self.num_nodes, len(rows))
        place, member = self.problem.places(rows)
        one_hot[self.problem.nodes[member], place] = 1
        products = [torch.sparse.mm(matrix, one_hot) for matrix in self.matrices]
        one_edge = torch.stack(products, dim=1)  # [N, R, rows]
        # Paths through a knocked-out node do not count.
        onward = (one_edge * (1 - one_hot).unsqueeze(1)).flatten(1)
        two_edges = [torch.sparse.mm(matrix, onward).view_as(one_edge) for matrix in self.matrices]
        return torch.cat([one_edge, *two_edges], dim=1)[self.target]

    def sum_training_rows(self) -> None:
        """Computes sums over the training rows, from which the weights are fitted.

        These are the means of the features [T, F], the products of the centred features [T, F, F],
        and the products of the centred features with the centred scores [T, F].
        """
        count = 0.0
        totals = 0.0
        products = 0.0
        with_score = 0.0
        for rows in self.problem.tables.rows("train").split(BLOCK):
            deviation = (self.problem.y[rows] - self.problem.mean).float().T
            deviation = deviation.unsqueeze(2)  # [T, rows, 1]
            present = ~deviation.isnan()
            features = self.features(rows) * present.transpose(1, 2)
            count = count + present.sum(1)
            totals = totals + features.sum(2)
            products = products + features @ features.transpose(1, 2)
            with_score = with_score + (features @ deviation.nan_to_num()).squeeze(2)
        self.means = totals / count.clamp(min=1)
        # The deviations add up to 0 over these rows, so the second product need not be centred.
        self.products = products - totals.unsqueeze(2) * self.means.unsqueeze(1)
        self.with_score = with_score

    def fit(self, penalty: float, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Returns weights [F] and scales [T]: a score is mean + scale * weights @ centred features.

        Weights and scales are fitted in turn, each by a ridge regression with the other fixed. The
        penalty of the scales is for their distance from 1.
        """
        scale = torch.ones(len(self.target))
        for _ in range(1 if math.isinf(shrinkage) else 10):
            matrix = torch.tensordot(scale.square(), self.products, dims=1).double()
            ridge = penalty * matrix.diagonal() + 1e-30
            right = (scale @ self.with_score).double()
            weight = torch.linalg.solve(matrix + ridge.diag(), right).float()
            if math.isinf(shrinkage):
                break
            squares = self.products @ weight @ weight  # [T]
            least = shrinkage * squares.mean() + 1e-30
            scale = (self.with_score @ weight + least) / (squares + least)
        return weight, scale

    def predict(self, rows: Tensor, penalty: float, shrinkage: float) -> Tensor:
        weight, scale = self.fit(penalty, shrinkage)
        centre = self.means @ weight
        predictions = []
        for some_rows in rows.split(BLOCK):
            sums = torch.einsum("tfn,f->nt", self.features(some_rows), weight)
            predictions.append(self.problem.mean + (scale * (sums - centre)).double())
        return torch.cat(predictions)


def edge_paths(problem: Profiles) -> Tensor:
    """The mean profile plus a weighted sum of the paths from the knocked-out nodes to the target.

    Each kind of path has a weight, and each target has a scale. The exponents of the degrees, the
    penalty and the shrinkage are chosen by validation.
    """
    paths = {exponents: Paths(problem, exponents) for exponents in EXPONENTS}

    def predict(
        rows: Tensor, exponents: tuple[float, float], penalty: float, shrinkage: float
    ) -> Tensor:
        return paths[exponents].predict(rows, penalty, shrinkage)

    return problem.best(predict, itertools.product(EXPONENTS, PATH_PENALTIES, SHRINKAGES))


RIVALS: dict[str, Callable[[Profiles], Tensor]] = {
    "mean profile": mean_profile,
    "additive profiles": additive_profiles,
    "graph neighbours": neighbours,
    "low rank + neighbours": low_rank,
    "edge paths": edge_paths,
}
