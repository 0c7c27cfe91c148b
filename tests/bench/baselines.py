"""What can be known about a knock-out's effect without a trained model: predictors in closed form.

Each function in `BASELINES` maps a `Problem` to predictions of all its rows, float64 [n]. It is
fitted on the training rows, and its settings are those with the least squared error on the
validation rows.

Shapes: K nodes that are knocked out in some row, n rows, q ordered pairs of nodes of one row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, to_undirected

from baseline import PENALTIES as SHRINKAGES
from baseline import additive_baseline, fit_baseline, fit_targets
from data_tables import Tables
from mask import LINEAR, doses

RANKS = (2, 8, 32)  # of the low-rank pairs
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)  # of the low-rank pairs, in units of the residuals
TEMPERATURES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
WEIGHTS = [("cosine", temperature) for temperature in TEMPERATURES]  # of the graph neighbours
WEIGHTS += [("hops", shrinkage) for shrinkage in SHRINKAGES]


class KnockedOut:
    """The K nodes that are knocked out, numbered from 0, and how alike they are in the graph."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.num_rows = len(tables.y)
        # [K], and [total] as tables.perturbed
        self.nodes, self.member = tables.perturbed.unique(return_inverse=True)
        self.row = tables.sample()  # [total]
        self.train = tables.is_in("train")  # [n]
        self.seen = torch.zeros(len(self.nodes), dtype=torch.bool)  # [K], in a training row
        self.seen[self.member[self.train[self.row]]] = True

    @cached_property
    def cosine(self) -> Tensor:
        """The cosine of each two nodes' adjacency rows, float64 [K, K], 0 for nodes without edges.

        A row is that of all relations and both directions, joined end to end, with the edges'
        weights.
        """
        size = len(self.nodes)
        number = torch.full((len(self.tables.genes),), -1)  # of each node among the K
        number[self.nodes] = torch.arange(size)
        product = torch.zeros(size, size, dtype=torch.float64)
        edge_index = self.tables.edge_index
        edge_type = self.tables.edge_type
        weight = self.tables.edge_weight
        shape = (size, len(self.tables.relations) * len(number))
        for end, other in (edge_index, edge_index.flip(0)):
            is_chosen = number[end] >= 0
            index = torch.stack([number[end], edge_type * len(number) + other])[:, is_chosen]
            adjacency = torch.sparse_coo_tensor(
                index, weight[is_chosen].double(), shape, check_invariants=False
            )
            product += torch.sparse.mm(adjacency, adjacency.T).to_dense()
        norm = product.diagonal()
        norm = norm.where(norm > 0, 1).rsqrt()
        return norm.unsqueeze(1) * product * norm

    @cached_property
    def hops(self) -> Tensor:
        """The sum over relations of A @ A + A, float64 [K, K].

        A is the normalised adjacency of the undirected graph.
        """
        num_nodes = len(self.tables.genes)
        matrix = torch.zeros(len(self.nodes), len(self.nodes), dtype=torch.float64)
        for relation in range(len(self.tables.relations)):
            chosen = self.tables.edge_type == relation
            edges = to_undirected(
                self.tables.edge_index[:, chosen], self.tables.edge_weight[chosen]
            )
            edges = remove_self_loops(*edges)
            edge_index, weight = gcn_norm(*edges, num_nodes, add_self_loops=False)
            adjacency = torch.sparse_coo_tensor(edge_index, weight.double(), (num_nodes, num_nodes))
            rows = adjacency.index_select(0, self.nodes)
            matrix += torch.sparse.mm(rows, rows.T).to_dense()
            matrix += rows.index_select(1, self.nodes).to_dense()
        return matrix

    def weight(self, kind: str, setting: float) -> Tensor:
        """Returns with which weights nodes stand in for each other, float64 [K, K].

        They are exp(cosine / temperature), or `hops` plus a constant, which shrinks a mean to that
        of all seen nodes.
        """
        if kind == "cosine":
            return (self.cosine / setting).exp()
        return self.hops + setting / self.seen.sum()

    def impute(self, values: Tensor, kind: str, setting: float) -> Tensor:
        """Returns `values` [K, ...]; nodes in no training row get the others' weighted mean."""
        weight = self.weight(kind, setting)[~self.seen] * self.seen
        weight = weight / weight.sum(1, keepdim=True)
        imputed = values.clone()
        imputed[~self.seen] = weight.to(values.dtype) @ values
        return imputed


class Problem(KnockedOut):
    """A split with one target as the baselines read it: pairs stand in both orders."""

    def __init__(self, tables: Tables):
        super().__init__(tables)
        (self.y,) = tables.y.T  # one target
        baseline = additive_baseline(tables)
        self.additive = baseline.prediction.squeeze(1)  # [n]
        self.residual = self.y - self.additive
        # Of a deletion of each node, beyond what every node has, [K].
        dose_of_deletion = doses(torch.zeros(1, dtype=torch.float64)) @ baseline.basis
        self.effect = baseline.effect[self.nodes, :, 0].double() @ dose_of_deletion[0]
        pairs = [torch.empty(3, 0, dtype=torch.long)]
        pair_doses = [torch.empty(0, dtype=torch.float64)]
        dose = 1 - tables.level
        self.dose = dose  # [total]
        for k in range(1, int(tables.perturbed_ptr.diff().max())):  # k positions apart in a row
            triples = torch.stack([self.member[:-k], self.member[k:], self.row[:-k]])
            is_pair = self.row[:-k] == self.row[k:]
            pairs.append(triples[:, is_pair])
            pair_doses.append((dose[:-k] * dose[k:])[is_pair])
        swapped = [triples[[1, 0, 2]] for triples in pairs]
        self.pairs = torch.cat(pairs + swapped, dim=1)  # [3, q]: i, j, row
        self.pair_dose = torch.cat(pair_doses * 2)  # [q]: 1 for two deleted nodes
        self.train_pairs = self.pairs[:, self.train[self.pairs[2]]]

    def add(self, row: Tensor, values: Tensor) -> Tensor:
        """Returns the sum of the values of each row, [n]."""
        return values.new_zeros(self.num_rows).index_add(0, row, values)

    def best(self, predictions: Iterable[Tensor]) -> Tensor:
        """Returns the prediction [n] with the least squared error on the validation rows."""
        rows = self.tables.rows("val")

        def error(prediction: Tensor) -> float:
            return (prediction - self.y)[rows].square().mean().item()

        return min(predictions, key=error)

    def unseen_effects(self, *weights: Any) -> Tensor:
        """Returns what effects imputed with these weights add to each row, [n].

        They are those of nodes in no training row, from the other nodes' effects.
        """
        difference = self.impute(self.effect, *weights) - self.effect
        return self.add(self.row, difference[self.member])


def mean(problem: Problem) -> Tensor:
    return problem.y[problem.train].mean().expand(problem.num_rows)


def ridge(problem: Problem) -> Tensor:
    """The additive ridge, in which a node in no training row has no effect."""
    effect_of_unseen = problem.effect * ~problem.seen
    return problem.additive - problem.add(problem.row, effect_of_unseen[problem.member])


def additive(problem: Problem) -> Tensor:
    """The same, in which it has the effect that `baseline.impute_effects` gives it."""
    return problem.additive


def combination(problem: Problem) -> Tensor:
    """What our model starts from: also the largest and smallest responses, if they tell more."""
    return fit_baseline(problem.tables).prediction.squeeze(1)


def recurring_pairs(problem: Problem) -> Tensor:
    """The additive ridge with an effect also for each pair that several training rows share."""
    tables = problem.tables
    once = problem.pairs[0] < problem.pairs[1]
    i, j, row = problem.pairs[:, once]
    pair = i * len(problem.nodes) + j
    train_pairs, count = pair[problem.train[row]].unique(return_counts=True)
    recurring = train_pairs[count > 1]
    is_recurring = torch.isin(pair, recurring)
    # Pairs are numbered after the nodes.
    number = len(tables.genes) + torch.searchsorted(recurring, pair[is_recurring])
    rows, order = torch.cat([problem.row, row[is_recurring]]).sort(stable=True)
    perturbed = torch.cat([tables.perturbed, number])[order]
    level = 1 - torch.cat([problem.dose, problem.pair_dose[once][is_recurring]])[order]
    pointer = torch.bincount(rows + 1, minlength=problem.num_rows + 1).cumsum(0)
    genes = [*tables.genes, *map(str, recurring.tolist())]
    with_pairs = replace(
        tables, genes=genes, perturbed=perturbed, perturbed_ptr=pointer, level=level
    )
    return linear_ridge(with_pairs)


def low_rank(problem: Problem) -> Tensor:
    """The additive ridge and, for each pair (i, j) of a row, u_i v_j + u_j v_i.

    Rank and penalty are chosen by validation.
    """
    return problem.best(add_pairs(problem, u, v) for u, v in factorisations(problem))


def add_pairs(problem: Problem, u: Tensor, v: Tensor) -> Tensor:
    i, j, row = problem.pairs
    return problem.additive + problem.add(row, (u[i] * v[j]).sum(1))


def factorisations(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields factors u and v of the ridge's residuals, each [K, rank], for all ranks and penalties.

    Alternating least squares: with v fixed, u is a ridge regression. The equations of a row's nodes
    are coupled, so it is solved for all nodes at once, by a few conjugate-gradient steps from the
    last u (Takács, Pilászy and Tikk 2011, doi:10.1145/2043932.2043987). Factors of nodes in no
    training row are zero.
    """
    i, j, row = problem.train_pairs
    spread = problem.residual[problem.train].std().clamp(min=1e-30)
    target = problem.residual / spread

    def solve(u: Tensor, v: Tensor, penalty: float, steps: int = 3) -> Tensor:
        factor = v[j]  # [pairs, rank]

        def predict(u: Tensor) -> Tensor:
            return problem.add(row, (u[i] * factor).sum(1))

        def collect(values: Tensor) -> Tensor:
            return torch.zeros_like(u).index_add(0, i, factor * values[row].unsqueeze(1))

        residual = collect(target - predict(u)) - penalty * u
        direction = residual
        norm = residual.square().sum()
        for _ in range(steps):
            product = collect(predict(direction)) + penalty * direction
            step = norm / (direction * product).sum().clamp(min=1e-300)
            u = u + step * direction
            residual = residual - step * product
            previous = norm
            norm = residual.square().sum()
            direction = residual + norm / previous.clamp(min=1e-300) * direction
        return u

    for rank in RANKS:
        for penalty in PENALTIES:
            generator = torch.Generator().manual_seed(0)
            size = (2, len(problem.nodes), rank)
            start = torch.randn(size, dtype=torch.float64, generator=generator)
            u, v = 0.3 * start * problem.seen.unsqueeze(1)
            for _ in range(10):
                u = solve(u, v, penalty)
                v = solve(v, u, penalty)
            yield spread * u, v


def neighbours(problem: Problem, weights: Iterable[tuple[str, float]] = WEIGHTS) -> Tensor:
    """The additive ridge and interactions averaged over graph neighbours, weights by validation.

    Node c stands in for node a with a weight w_ac of `KnockedOut.weight`. A node in no training row
    gets the weighted mean of the others' effects. The interaction of a and b is the weighted mean
    of those of the training pairs (c, b) and (a, d): if a is in no training row, of the profiles of
    the nodes like a. If b is in none either, it is the mean over all training pairs (c, d), with
    weights w_ac w_bd. The interaction of a training pair is the residual of its row, shared evenly
    by the pairs of that row.
    """
    i, j, row = problem.pairs
    unseen = ~problem.seen
    num_pairs = problem.add(row, torch.full(row.shape, 0.5).double())  # of each row
    residual = (problem.residual / num_pairs)[problem.train_pairs[2]]  # of each training pair
    index = problem.train_pairs[:2]
    size = (len(problem.nodes), len(problem.nodes))
    total = torch.sparse_coo_tensor(index, residual, size, check_invariants=False)
    count = torch.sparse_coo_tensor(index, torch.ones_like(residual), size, check_invariants=False)

    def predict(kind: str, setting: float) -> Tensor:
        weight = problem.weight(kind, setting)
        sums = torch.sparse.mm(total, weight)  # [K, K], over (c, b) and a
        weights = torch.sparse.mm(count, weight)
        interaction = (sums + sums.T) / (weights + weights.T)
        of_unseen = weight[unseen]
        far = (of_unseen @ sums[:, unseen]) / (of_unseen @ weights[:, unseen])
        interaction[unseen.nonzero(), unseen.nonzero().T] = far  # where `sums` and `weights` are 0
        # An interaction is 0 without any pair in training rows.
        pairs = problem.add(row, interaction[i, j].nan_to_num(0.0)) / 2
        return problem.additive + problem.unseen_effects(kind, setting) + pairs

    return problem.best(predict(*weight) for weight in weights)


def features(problem: Problem) -> Tensor:
    """The additive ridge, where nodes in no training row get the effects that a ridge regression of
    the others' effects on their features predicts, with a penalty by validation; without features,
    the additive ridge alone."""
    if not problem.tables.features.size(1):
        return problem.additive
    x = problem.tables.features[problem.nodes].double()
    x_of_seen = x[problem.seen]
    effect = problem.effect
    mean = effect[problem.seen].mean()

    def predict(penalty: float) -> Tensor:
        matrix = x_of_seen.T @ x_of_seen + penalty * torch.eye(x.size(1), dtype=torch.float64)
        weight = torch.linalg.solve(matrix, x_of_seen.T @ (effect[problem.seen] - mean))
        difference = (mean + x @ weight - effect) * ~problem.seen
        return problem.additive + problem.add(problem.row, difference[problem.member])

    return problem.best(map(predict, PENALTIES))


def low_rank_neighbours(problem: Problem) -> Tensor:
    """The low-rank pairs, where a node in no training row gets the effects and factors of the
    others, averaged with the weights of `neighbours`; rank, penalty and weights by validation."""

    def predict(u: Tensor, v: Tensor, kind: str, setting: float) -> Tensor:
        imputed_u = problem.impute(u, kind, setting)
        imputed_v = problem.impute(v, kind, setting)
        pairs = add_pairs(problem, imputed_u, imputed_v)
        return pairs + problem.unseen_effects(kind, setting)

    weights = WEIGHTS[:1] if problem.seen.all() else WEIGHTS  # they matter for such nodes only
    return problem.best(
        predict(u, v, *weight) for u, v in factorisations(problem) for weight in weights
    )


def one_curve(problem: Problem) -> Tensor:
    """The additive ridge, but that a node has one effect, which counts 1 - level times."""
    return linear_ridge(problem.tables)


def linear_ridge(tables: Tables) -> Tensor:
    fit = fit_targets(tables, LINEAR.double(), "squared", is_combined=False)
    return fit.prediction.squeeze(1)


def curve_of_each(problem: Problem) -> Tensor:
    """The same, with a second effect of each node, which counts the square of 1 - level."""
    dose = 1 - problem.tables.level
    return with_second_effect(problem.tables, dose.square())


def logarithm_of_each(problem: Problem) -> Tensor:
    """The same, but that the second effect counts the logarithm of the level, of 0.03 more."""
    return with_second_effect(problem.tables, (problem.tables.level + 0.03).log())


def with_second_effect(tables: Tables, second_dose: Tensor) -> Tensor:
    level = torch.stack([tables.level, 1 - second_dose], dim=1).flatten()
    second = tables.perturbed + len(tables.genes)  # the node that has the second effect
    perturbed = torch.stack([tables.perturbed, second], dim=1).flatten()
    genes = [*tables.genes, *(f"{gene} again" for gene in tables.genes)]
    doubled = replace(tables, genes=genes, features=None, perturbed=perturbed, level=level)
    doubled.perturbed_ptr = 2 * tables.perturbed_ptr
    return linear_ridge(doubled)


def effect_of_each_level(problem: Problem) -> Tensor:
    """The ridge of one effect per node and level, of those that no training row has 0."""
    tables = problem.tables
    pairs = torch.stack([tables.perturbed.double(), tables.level], dim=1)
    _, number = pairs.unique(dim=0, return_inverse=True)
    genes = [str(k) for k in range(int(number.max()) + 1)]
    edges = {
        "edge_index": torch.tensor([[0], [1]]),
        "edge_type": torch.tensor([0]),
        "edge_weight": None,
    }
    apart = replace(tables, genes=genes, perturbed=number, level=None, features=None, **edges)
    return ridge(Problem(apart))


LEVELS: dict[str, Callable[[Problem], Tensor]] = {  # beside `BASELINES`, if nodes have levels
    "ridge, 1 - level": one_curve,
    "ridge, 1 - level and its square": curve_of_each,
    "ridge, 1 - level and its logarithm": logarithm_of_each,
    "ridge of nodes and levels": effect_of_each_level,
}
BASELINES: dict[str, Callable[[Problem], Tensor]] = {
    "mean": mean,
    "additive ridge": ridge,
    "additive ridge + imputed": additive,
    "combination, the start": combination,
    "ridge + recurring pairs": recurring_pairs,
    "ridge + low-rank pairs": low_rank,
    "graph neighbours": neighbours,
    "ridge + features": features,
    "low-rank pairs + neighbours": low_rank_neighbours,
}
