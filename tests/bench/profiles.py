"""What can be known about a knock-out's profile, a score per node, without a trained model.

Each function in `RIVALS` maps a `Profiles` to predictions of all its rows, float64 [n, T]. It is
fitted on the training rows, and its settings are those with the least squared error on the
validation rows. Missing scores are left out.

Shapes: N nodes, of which K are knocked out in some row; n rows of T scores; R relations; F features
of a score.
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

# Of the nodes' effects: at 1, a node of a single row gets half of its score.
PENALTIES = (0.3, 1.0, 3.0, 10.0)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Of the degrees of its source and target, by which an edge of a path is divided.
EXPONENTS = ((0.0, 0.0), (0.5, 0.5), (0.0, 0.5), (0.0, 1.0))
SHRINKAGES = (math.inf, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)  # of the targets' scales towards 1
PATH_PENALTIES = (1e-6, 1e-3, 1e-1)  # of the paths' weights, in units of their features' squares
TOLERANCE = 1e-5  # of the nodes' effects, relative to what is to be solved
BLOCK = 64  # rows whose paths are counted at once


def are_profiles(tables: Tables) -> bool:
    """Returns whether there are several scores, all of them named after nodes of the graph."""
    return len(tables.targets) > 1 and set(tables.targets) <= set(tables.genes)


class Profiles(KnockedOut):
    """A split whose scores are profiles, as the rivals read it."""

    def __init__(self, tables: Tables):
        super().__init__(tables)
        self.y = tables.y
        self.mean = self.y[self.train].nanmean(0).nan_to_num()  # [T]
        self.effects: dict[float, Tensor] = {}  # by penalty

    def sum_rows(self, rows: Tensor, values: Tensor) -> Tensor:
        """Returns the sums of the values [K, ...] of each row's nodes, [len(rows), ...]."""
        place, member = self.places(rows)
        sums = values.new_zeros(len(rows), *values.shape[1:])
        return sums.index_add_(0, place, values[member])

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the perturbed nodes of these rows: the row's place in `rows`, and the member."""
        place_of_row = torch.full((self.num_rows,), -1)
        place_of_row[rows] = torch.arange(len(rows))
        place = place_of_row[self.row]
        is_chosen = place >= 0
        return place[is_chosen], self.member[is_chosen]

    def best(self, predict: Callable[..., Tensor], settings: Iterable[tuple]) -> Tensor:
        """Returns `predict(rows, *setting)` of all rows, with validation rows' best setting."""
        rows = self.tables.rows("val")
        y = self.y[rows]

        def error(setting: tuple) -> float:
            return (predict(rows, *setting) - y).square().nanmean().item()

        return predict(torch.arange(self.num_rows), *min(settings, key=error))

    def effect(self, penalty: float) -> Tensor:
        """Returns what each node adds to the mean profile, float32 [K, T].

        It is found by ridge regression; without rows, it is 0.
        """
        if penalty not in self.effects:
            self.effects[penalty] = self.fit_effects(penalty)
        return self.effects[penalty]

    def fit_effects(self, penalty: float) -> Tensor:
        """Solves the normal equations of all targets at once."""
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
    """The mean profile and the nodes' effects, where a node in no training row has the mean of the
    others' effects, with a weight of `KnockedOut.weight`; it and the penalty by validation."""

    def predict(rows: Tensor, penalty: float, weight: tuple[str, float]) -> Tensor:
        effect = problem.impute(problem.effect(penalty), *weight)
        return problem.mean + problem.sum_rows(rows, effect)

    return problem.best(predict, itertools.product(PENALTIES, WEIGHTS))


def low_rank(problem: Profiles) -> Tensor:
    """The same with the effects projected on their first singular vectors; validated rank, too."""
    factors = {}
    for penalty in PENALTIES:
        effect = problem.effect(penalty)
        _, vectors = torch.linalg.eigh((effect @ effect.T).double())
        vectors = vectors.flip(1)[:, : max(RANKS)].float()  # the largest first
        factors[penalty] = vectors, vectors.T @ effect  # [K, rank], [rank, T]

    def predict(rows: Tensor, penalty: float, rank: int, weight: tuple[str, float]) -> Tensor:
        vectors, profiles = factors[penalty]
        coefficients = problem.impute(vectors[:, :rank], *weight)
        return problem.mean + problem.sum_rows(rows, coefficients) @ profiles[:rank]

    return problem.best(predict, itertools.product(PENALTIES, RANKS, WEIGHTS))


# ---- Paths ---------------------------------------------------------------------------------------
class Paths:
    """Counts paths of one and two edges, by relation, from a row's knock-outs to each target.

    An edge counts as its weight over its source's and its target's degree, each to the power of an
    exponent. There are F = R + R * R features. The sums are over the training rows in which the
    target has a score.
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
        self.matrices = []  # [target, source] of each relation
        for r in range(len(tables.relations)):
            chosen = tables.edge_type == r
            index = tables.edge_index.flip(0)[:, chosen]
            matrix = torch.sparse_coo_tensor(index, value[chosen], size, check_invariants=False)
            self.matrices.append(matrix.coalesce())
        self.target = target_nodes(tables)
        self.sum_training_rows()

    def features(self, rows: Tensor) -> Tensor:
        """Returns the features of these rows' scores, float32 [T, F, len(rows)]."""
        one_hot = torch.zeros(self.num_nodes, len(rows))
        place, member = self.problem.places(rows)
        one_hot[self.problem.nodes[member], place] = 1
        products = [torch.sparse.mm(matrix, one_hot) for matrix in self.matrices]
        one_edge = torch.stack(products, dim=1)  # [N, R, rows]
        # No path goes through a knocked-out node.
        onward = (one_edge * (1 - one_hot).unsqueeze(1)).flatten(1)
        two_edges = [torch.sparse.mm(matrix, onward).view_as(one_edge) for matrix in self.matrices]
        return torch.cat([one_edge, *two_edges], dim=1)[self.target]

    def sum_training_rows(self) -> None:
        """Sets the features' means [T, F] and, all centred, two kinds of products.

        They are those of the features [T, F, F], and of the features with the scores [T, F].
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
        # The deviations add up to 0 over these rows, so that they need no centring.
        self.products = products - totals.unsqueeze(2) * self.means.unsqueeze(1)
        self.with_score = with_score

    def fit(self, penalty: float, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Returns weights [F], scales [T]: a score is mean + scale * weights @ centred features.

        Each is a ridge regression for given values of the other; the scales' penalty is for
        distance from 1.
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
    """The mean profile and a weight for each kind of path from the knocked-out nodes to the target,
    times a scale of the target's; how edges count, penalty and shrinkage by validation."""
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
