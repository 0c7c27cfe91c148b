"""Rivals of the model for one score: predictions in closed form, without a trained network.

Each function in `BASELINES` maps a `Problem` to predictions of all its rows, float64 [n]. It is
fitted on the training rows. Its settings are chosen by the squared error on the validation rows.

Shapes: n rows, K nodes that are perturbed in at least one row, q ordered pairs of nodes of the same
row, `total` perturbed nodes of all rows.
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

RANKS = (2, 8, 32)  # ranks of the low-rank pairs
# Penalties of the low-rank pairs, in units of the residuals, and of the ridge on node features.
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)
TEMPERATURES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
# Settings of `KnockedOut.weight`, from which the rivals that use graph neighbours choose.
WEIGHTS = [("cosine", temperature) for temperature in TEMPERATURES]
WEIGHTS += [("hops", shrinkage) for shrinkage in SHRINKAGES]


class KnockedOut:
    """The K perturbed nodes, called members, and their similarity in the graph."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.num_rows = len(tables.y)
        # The node of each member, [K], and the member of each entry of tables.perturbed, [total].
        self.nodes, self.member = tables.perturbed.unique(return_inverse=True)
        self.row = tables.sample()  # row of each entry of tables.perturbed, [total]
        self.train = tables.is_in("train")  # whether each row is a training row, [n]
        # Whether each member is perturbed in a training row, [K].
        self.seen = torch.zeros(len(self.nodes), dtype=torch.bool)
        self.seen[self.member[self.train[self.row]]] = True

    @cached_property
    def cosine(self) -> Tensor:
        """The cosine similarity of the adjacency rows of all pairs of members, float64 [K, K].

        The adjacency row of a node has the weights of its edges in all relations and both
        directions. The cosine is 0 for nodes without edges.
        """
        size = len(self.nodes)
        number = torch.full((len(self.tables.genes),), -1)  # member of each node, -1 for others
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
        """The sum over relations of A @ A + A for all pairs of members, float64 [K, K].

        A is the normalised adjacency matrix of a relation, as an undirected graph without loops.
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
        """Returns the weights with which members replace each other, float64 [K, K].

        For the kind "cosine", they are exp(cosine / setting). For the kind "hops", they are `hops`
        plus a constant, which shrinks a weighted mean towards the mean of all seen nodes.
        """
        if kind == "cosine":
            return (self.cosine / setting).exp()
        return self.hops + setting / self.seen.sum()

    def impute(self, values: Tensor, kind: str, setting: float) -> Tensor:
        """Returns `values` [K, ...], in which unseen nodes have the weighted mean of seen nodes."""
        weight = self.weight(kind, setting)[~self.seen] * self.seen
        weight = weight / weight.sum(1, keepdim=True)
        imputed = values.clone()
        imputed[~self.seen] = weight.to(values.dtype) @ values
        return imputed


class Problem(KnockedOut):
    """The data of a split with one target, in the form that the baselines need.

    All pairs of nodes in the same row are listed in both orders.
    """

    def __init__(self, tables: Tables):
        super().__init__(tables)
        (self.y,) = tables.y.T  # one target
        baseline = additive_baseline(tables)
        self.additive = baseline.prediction.squeeze(1)  # [n]
        self.residual = self.y - self.additive
        # Effect of deleting each member, in addition to the effect that all nodes share, [K].
        dose_of_deletion = doses(torch.zeros(1, dtype=torch.float64)) @ baseline.basis
        self.effect = baseline.effect[self.nodes, :, 0].double() @ dose_of_deletion[0]
        pairs = [torch.empty(3, 0, dtype=torch.long)]
        pair_doses = [torch.empty(0, dtype=torch.float64)]
        dose = 1 - tables.level
        self.dose = dose  # [total]
        for k in range(1, int(tables.perturbed_ptr.diff().max())):  # pairs k positions apart
            triples = torch.stack([self.member[:-k], self.member[k:], self.row[:-k]])
            is_pair = self.row[:-k] == self.row[k:]
            pairs.append(triples[:, is_pair])
            pair_doses.append((dose[:-k] * dose[k:])[is_pair])
        swapped = [triples[[1, 0, 2]] for triples in pairs]
        self.pairs = torch.cat(pairs + swapped, dim=1)  # [3, q]: two members and their row
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
        """Returns the change of each row's prediction if effects of unseen nodes are imputed, [n].

        They are imputed from the effects of seen nodes, with `weight(*weights)`.
        """
        difference = self.impute(self.effect, *weights) - self.effect
        return self.add(self.row, difference[self.member])


def mean(problem: Problem) -> Tensor:
    return problem.y[problem.train].mean().expand(problem.num_rows)


def ridge(problem: Problem) -> Tensor:
    """The additive ridge, in which unseen nodes do not have an effect."""
    effect_of_unseen = problem.effect * ~problem.seen
    return problem.additive - problem.add(problem.row, effect_of_unseen[problem.member])


def additive(problem: Problem) -> Tensor:
    """The additive ridge, in which unseen nodes have the effect from `baseline.impute_effects`."""
    return problem.additive


def combination(problem: Problem) -> Tensor:
    """The baseline from which our model starts.

    It also uses the largest and the smallest response of a row if this improves predictions.
    """
    return fit_baseline(problem.tables).prediction.squeeze(1)


def recurring_pairs(problem: Problem) -> Tensor:
    """The additive ridge with a further effect for each pair in at least two training rows."""
    tables = problem.tables
    once = problem.pairs[0] < problem.pairs[1]
    i, j, row = problem.pairs[:, once]
    pair = i * len(problem.nodes) + j
    train_pairs, count = pair[problem.train[row]].unique(return_counts=True)
    recurring = train_pairs[count > 1]
    is_recurring = torch.isin(pair, recurring)
    # Each recurring pair is an additional node, whose index follows the indices of the nodes.
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
    """The additive ridge, plus u_i v_j + u_j v_i for each pair (i, j) of a row.

    The rank and the penalty are chosen by validation.
    """
    return problem.best(add_pairs(problem, u, v) for u, v in factorisations(problem))


def add_pairs(problem: Problem, u: Tensor, v: Tensor) -> Tensor:
    i, j, row = problem.pairs
    return problem.additive + problem.add(row, (u[i] * v[j]).sum(1))


def factorisations(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields factors u and v, each [K, rank], that fit the residuals of the additive ridge.

    It yields them for all ranks and penalties. They are computed by alternating least squares: if v
    is fixed, u is the solution of a ridge regression. The equations of the nodes of a row are
    coupled, so the regression is solved for all nodes at once. This takes a few conjugate-gradient
    steps from the last u (Takács, Pilászy and Tikk 2011, doi:10.1145/2043932.2043987). Factors of
    unseen nodes are 0.
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
    """The additive ridge, plus interactions of pairs that are averaged over similar nodes.

    A weight w_ac of `KnockedOut.weight` describes how similar node c is to node a. The kind of the
    weights is chosen by validation.

    - An unseen node gets the weighted mean of the effects of seen nodes.
    - The interaction of a training pair is the residual of its row, divided evenly among the pairs
      of the row.
    - The interaction of nodes a and b is the weighted mean of the interactions of the training
      pairs (c, b) with weights w_ac, and (a, d) with weights w_bd. If a is unseen, only the pairs
      (c, b) exist. If both are unseen, it is the mean over all training pairs (c, d) with weights
      w_ac w_bd.
    """
    i, j, row = problem.pairs
    unseen = ~problem.seen
    num_pairs = problem.add(row, torch.full(row.shape, 0.5).double())  # pairs in each row
    residual = (problem.residual / num_pairs)[problem.train_pairs[2]]  # for each training pair
    index = problem.train_pairs[:2]
    size = (len(problem.nodes), len(problem.nodes))
    total = torch.sparse_coo_tensor(index, residual, size, check_invariants=False)
    count = torch.sparse_coo_tensor(index, torch.ones_like(residual), size, check_invariants=False)

    def predict(kind: str, setting: float) -> Tensor:
        weight = problem.weight(kind, setting)
        sums = torch.sparse.mm(total, weight)  # [K, K], for each b and a, over all (c, b)
        weights = torch.sparse.mm(count, weight)
        interaction = (sums + sums.T) / (weights + weights.T)
        of_unseen = weight[unseen]
        far = (of_unseen @ sums[:, unseen]) / (of_unseen @ weights[:, unseen])
        # For two unseen nodes, `sums` and `weights` are 0.
        interaction[unseen.nonzero(), unseen.nonzero().T] = far
        # Without any training pair, an interaction is nan: it counts as 0.
        pairs = problem.add(row, interaction[i, j].nan_to_num(0.0)) / 2
        return problem.additive + problem.unseen_effects(kind, setting) + pairs

    return problem.best(predict(*weight) for weight in weights)


def features(problem: Problem) -> Tensor:
    """The additive ridge, in which the effects of unseen nodes are predicted from their features.

    The predictor is a ridge regression of the effects of seen nodes on their features. Its penalty
    is chosen by validation. If the table has no features, this is only the additive ridge.
    """
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
    """The low-rank pairs, in which unseen nodes get mean effects and factors of similar nodes.

    The means have the weights of `neighbours`. Rank, penalty and weights are chosen by validation.
    """

    def predict(u: Tensor, v: Tensor, kind: str, setting: float) -> Tensor:
        imputed_u = problem.impute(u, kind, setting)
        imputed_v = problem.impute(v, kind, setting)
        pairs = add_pairs(problem, imputed_u, imputed_v)
        return pairs + problem.unseen_effects(kind, setting)

    weights = WEIGHTS[:1] if problem.seen.all() else WEIGHTS  # only unseen nodes need them
    return problem.best(
        predict(u, v, *weight) for u, v in factorisations(problem) for weight in weights
    )


def one_curve(problem: Problem) -> Tensor:
    """The additive ridge with one effect for each node, whose dose is 1 - level."""
    return linear_ridge(problem.tables)


def linear_ridge(tables: Tables) -> Tensor:
    """Returns the prediction of the additive ridge whose dose is 1 - level, [n]."""
    fit = fit_targets(tables, LINEAR.double(), "squared", is_combined=False)
    return fit.prediction.squeeze(1)


def curve_of_each(problem: Problem) -> Tensor:
    """The ridge of `one_curve` with a second effect of each node, with dose (1 - level)^2."""
    dose = 1 - problem.tables.level
    return with_second_effect(problem.tables, dose.square())


def logarithm_of_each(problem: Problem) -> Tensor:
    """The ridge of `one_curve` with a second effect of each node, with dose log(level + 0.03)."""
    return with_second_effect(problem.tables, (problem.tables.level + 0.03).log())


def with_second_effect(tables: Tables, second_dose: Tensor) -> Tensor:
    """Returns the prediction of a ridge with two effects for each node, [n].

    The second effect is the effect of an additional node, which is perturbed with the node.
    """
    level = torch.stack([tables.level, 1 - second_dose], dim=1).flatten()
    second = tables.perturbed + len(tables.genes)  # the additional node
    perturbed = torch.stack([tables.perturbed, second], dim=1).flatten()
    genes = [*tables.genes, *(f"{gene} again" for gene in tables.genes)]
    doubled = replace(tables, genes=genes, features=None, perturbed=perturbed, level=level)
    doubled.perturbed_ptr = 2 * tables.perturbed_ptr
    return linear_ridge(doubled)


def effect_of_each_level(problem: Problem) -> Tensor:
    """A ridge with a separate effect for each node and level.

    The effect is 0 for a node and level that do not occur in training rows.
    """
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


LEVELS: dict[str, Callable[[Problem], Tensor]] = {  # additional rivals for tables with levels
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
