"""An independent implementation of docs/tables.md, with dense numpy arrays and plain loops.

Its results must equal the results of the program. It uses only one constant of the program: the
penalties that the baseline chooses from.

Shapes: N nodes, n rows of T scores, R relations, K effects of a node, F features of pairs.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from baseline import PENALTIES


@dataclass
class Oracle:
    sets: list[dict[str, float]]  # nodes and levels of each row
    y: np.ndarray  # [n, T], nan if a score is missing
    split: np.ndarray  # [n]: 0 train, 1 val, 2 test, -1 none
    weight: np.ndarray  # [n]
    edges: list[tuple[str, str, str, float]]  # source, target, relation, weight
    features: dict[str, float]  # feature of each listed node, nan if it is missing
    undirected: bool
    binary: bool

    def __post_init__(self):
        names = {name for row in self.sets for name in row}
        self.nodes = sorted(names.union(*(edge[:2] for edge in self.edges)))
        self.level = np.array([[row.get(name, 1.0) for name in self.nodes] for row in self.sets])
        self.perturbs = self.level != 1  # [n, N]
        self.present = ~np.isnan(self.y)
        self.in_train = self.present & (self.split == 0)[:, None]
        self.seen = self.perturbs.T.astype(int) @ self.in_train > 0  # [N, T]
        self.doses = self.responses()  # [K, n, N]
        scales = []
        for y, rows in zip(self.y.T, self.in_train.T, strict=True):
            scales.append(moments(y[rows], self.weight[rows]))
        self.mean, self.std = np.array(scales).T
        if self.binary:
            share = self.mean.clip(1e-3, 1 - 1e-3)
            self.mean, self.std = np.log(share / (1 - share)), np.ones_like(share)
        relations = list(dict.fromkeys(edge[2] for edge in self.edges))
        copies = {}
        for source, target, relation, weight in self.edges:
            r, a, b = relations.index(relation), self.nodes.index(source), self.nodes.index(target)
            for place in {(r, b, a), (r, a, b)} if self.undirected else {(r, b, a)}:
                copies.setdefault(place, []).append(weight)
        self.graph = np.zeros((len(relations), len(self.nodes), len(self.nodes)))  # [R, to, from]
        for place, weights in copies.items():
            self.graph[place] = np.mean(weights)

    def unseen(self) -> np.ndarray:
        """Returns the number of nodes of each row that are unseen for each score, [n, T]."""
        return self.perturbs.astype(int) @ ~self.seen

    def rows_of_choice(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns masks of the rows that score t is fitted to, and that choose its penalty."""
        train, val = self.in_train[:, t], self.present[:, t] & (self.split == 1)
        told = val & self.perturbs[:, self.seen[:, t]].any(axis=1)
        if told.any():
            return train, told | (val & ~self.perturbs.any(axis=1))
        number = np.unique(self.set_code, return_inverse=True)[1]
        assert len(np.unique(np.column_stack([number, self.level]), axis=0)) == number.max() + 1
        third = train & np.isin(number, np.unique(number[train])[::3])
        fitted = train & ~third
        return fitted, third & self.perturbs[:, self.perturbs[fitted].any(axis=0)].any(axis=1)

    def responses(self) -> np.ndarray:
        """Returns the doses of each node in each row, [K, n, N].

        There are as many kinds of doses as the levels of the training rows can distinguish.
        """
        level = self.level
        loss, gain, dead = 1 - level.clip(max=1), 1 - level.clip(1), 1.0 * (level == 0)
        in_train = self.perturbs & self.in_train.any(axis=1)[:, None]
        levels = level[in_train]
        ways = [loss, gain] if (levels < 1).any() and (levels > 1).any() else [1 - level]
        if (levels == 0).any() and ((levels > 0) & (levels < 1)).any():
            ways.append(dead)
        sizes = [way[in_train & (way != 0)] for way in ways]
        self.units = [np.sqrt(np.square(size).mean()) if len(size) else 1.0 for size in sizes]
        return np.array([way / unit for way, unit in zip(ways, self.units, strict=True)])

    def baselines(self, t: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the predictions of score t by a sum of effects, [n], and imputed effects, [N, K].

        If several fits have nearly the smallest error, the results of all these fits are returned.
        """
        fit = logistic if self.binary else ridge
        y, train = self.y[:, t], self.in_train[:, t]
        rows, judges = self.rows_of_choice(t)
        weight = self.weight / self.weight[train].mean()
        share = 1 / np.square(weight[train]).mean()  # Kish's effective number of rows / rows
        total = (1 - self.level).sum(axis=1)
        design = np.column_stack([np.ones(len(total)), total, *self.doses])
        held = share * np.append([0, 0], self.mean_squares(train).repeat(len(self.nodes)))
        errors = []
        for penalty in PENALTIES:
            x = fit(design[rows], y[rows], penalty * held, weight[rows])
            of_judges = losses(design[judges] @ x, y[judges], self.binary)
            errors.append((weight[judges] * of_judges).sum())
        found = []
        for k in near_least(errors) if judges.any() else [0]:
            x = fit(design[train], y[train], PENALTIES[k] * held, weight[train])
            choices = []
            for way, effect in zip(self.doses, x[2:].reshape(len(self.doses), -1), strict=True):
                choices.append(self.with_imputed(effect, self.node_weight(way, weight, t)))
            for choice in itertools.product(*choices):
                effects, imputed = zip(*choice, strict=True)
                prediction = design @ np.concatenate([x[:2], *effects])
                found.append((prediction, np.stack(imputed, axis=1)))
        return found

    def mean_squares(self, train: np.ndarray) -> np.ndarray:
        """Returns the mean square of the non-zero doses in the training rows, 1 if none, [K]."""
        doses = self.doses[:, train]
        count = (doses != 0).sum(axis=(1, 2))
        return np.where(count > 0, np.square(doses).sum(axis=(1, 2)) / count.clip(1), 1)

    def node_weight(self, way: np.ndarray, weight: np.ndarray, t: int) -> np.ndarray:
        """Returns the mean weight of the training rows that have a dose of each node, [N].

        It is 0 if there are no such rows.
        """
        has_dose = (way != 0)[self.in_train[:, t]]
        total = weight[self.in_train[:, t]] @ has_dose
        return total / has_dose.sum(axis=0).clip(1)

    def with_imputed(self, effect: np.ndarray, weight: np.ndarray) -> list[tuple]:
        """Returns the effects with imputed effects for unseen nodes, and all imputed effects, [N].

        The result is a list: if several imputations have nearly the smallest error, it contains the
        effects of all these imputations.
        """
        seen = weight > 0
        others = 1 - np.eye(len(seen))
        mean = (weight @ effect) / weight.sum() if seen.any() else 0.0
        relations = (self.graph + self.graph.transpose(0, 2, 1)) * others
        choices = []
        for whole in (relations.sum(axis=0), *relations):  # all relations, or one relation
            degree = whole.sum(axis=1).clip(1e-99)
            adjacency = whole / np.sqrt(np.outer(degree, degree))
            near = (adjacency @ adjacency + adjacency) * others * weight
            choices += [(near @ effect + s * mean) / (near.sum(axis=1) + s) for s in PENALTIES]
        errors = [weight @ np.square(imputed - effect) for imputed in choices]
        return [(np.where(seen, effect, choices[k]), choices[k]) for k in near_least(errors)]

    def forward(self, model: "Parameters", targets: list[str]) -> np.ndarray:
        """Returns the outputs of a model for all rows, [n, T], in standardised units."""
        intact = self.states(model, np.ones(len(self.nodes)))
        return np.array([self.predict(model, level, intact, targets) for level in self.level])

    def states(self, model: "Parameters", level: np.ndarray) -> np.ndarray:
        """Returns the final states of the nodes, given their levels [N]."""
        degree = self.graph.sum(axis=2, keepdims=True)
        scale = np.sqrt(degree * degree.mean(axis=1, keepdims=True)).clip(1e-99)
        graph = (self.graph / scale).astype(np.float32) * np.outer(level > 0, level)
        x = sent = 0
        if self.features:
            values = np.array([self.features.get(node, math.nan) for node in self.nodes])
            mean, std = moments(values, np.ones(len(values)))
            values = np.nan_to_num((values - mean) / std).astype(np.float32)
            x, sent = np.split(np.outer(values, model["encoder.project.weight"]), 2, axis=1)
        if "encoder.embedding" in model:
            x, sent = x + model["encoder.identity"], sent + model["encoder.embedding"]
        for depth in range(sum(name.endswith("gate") for name in model)):
            layer = f"encoder.layers.{depth - 1}" if depth else "encoder.first"
            h = model.norm(x if depth else sent, f"{layer}.norm")
            gates = 10 * model[f"{layer}.gate"]
            total = sum(matrix @ h * gate for matrix, gate in zip(graph, gates, strict=True))
            root = model.linear(h if depth else x, f"{layer}.root")
            x = x + gelu(root + model.linear(total, f"{layer}.out"))
        return model.norm(x, "encoder.norm")

    def predict(self, model: "Parameters", level, intact, targets) -> np.ndarray:
        nodes = np.flatnonzero(level != 1)
        row = int((self.level == level).all(axis=1).argmax())
        doses = self.doses[:, row, nodes]  # [K, nodes]
        prediction = np.zeros(len(targets))
        if "terms.without_graph.readout.effect" in model:
            start = "terms.without_graph.readout"
            effect = model[f"{start}.effect"].reshape(len(level), len(doses), len(targets))
            prediction += model[f"{start}.intercept"]
            prediction += (1 - level).sum() * model[f"{start}.slope"]
            weights = model[f"{start}.weights"].reshape(3, -1)
            prediction += combination(weights, np.einsum("kp,pkt->pt", doses, effect[nodes]))
        if "terms.local.pair.weight" in model:
            embedded = model.linear(intact[nodes], "terms.local.embed")
            size = (len(nodes), len(doses), 2 * intact.shape[1])
            each = np.einsum("kp,pkh->ph", doses, embedded.reshape(size))
            pairs = [each[i] * each[:i].sum(axis=0) for i in range(len(nodes))]
            pairs = np.sum([0 * intact[0].repeat(2), *pairs], axis=0)
            both = model.norm(np.append(each.sum(axis=0), pairs), "terms.local.norm")
            prediction += model.linear(pairs, "terms.local.pair")
            mean, scale = model["terms.pairs.units"]
            scaled = (self.pair_features(level) - weight_of_pairs(level) * mean) * scale
            scaled = scaled.clip(-10, 10)
            prediction += model.linear(scaled, "terms.pairs.linear")
            hidden = model.linear(both, "terms.local.head.0")
            hidden = hidden + model.linear(scaled, "terms.pairs.input")
            prediction += model.linear(gelu(hidden), "terms.local.head.2")
        change = (self.states(model, level) - intact) * (level > 0)[:, None]
        if "terms.knockout.head.0.weight" in model:
            total = np.arcsinh(change.sum(axis=0) / math.sqrt(len(level)))
            prediction += model.head(total, "terms.knockout.head")
        if "terms.knockout.dead.weight" in model:
            response = gelu(model.linear(change, "terms.knockout.change"))
            effect = (response * model.linear(intact, "terms.knockout.weight")).sum(axis=1)
            effect += (1 - level) * model.linear(intact, "terms.knockout.dead")[:, 0]
            prediction += effect[[self.nodes.index(name) for name in targets]]
        return prediction

    def pair_features(self, level: np.ndarray) -> np.ndarray:
        """Returns the sum of the features of all pairs of perturbed nodes, [F]."""
        if not len(self.graph):
            return np.zeros(0)
        relations = list(
            self.graph.transpose(0, 2, 1).astype(np.float32).astype(float)
        )  # [from, to]
        if len(relations) > 1:
            relations.append(np.sum(relations, axis=0))
        pairs = list(itertools.combinations(np.flatnonzero(level != 1), 2))
        features = []
        for weight in relations:
            has_edge = 1 * (weight > 0)
            either = np.maximum(weight, weight.T)
            near = 1 * (either > 0)
            degree = near.sum(axis=0)
            length = np.sqrt(np.square(either).sum(axis=0))
            lengths = np.outer(length, length)
            matrices = [
                either,
                np.log1p(near @ near),
                either @ either / np.where(lengths > 0, lengths, 1),
                near / np.log(degree.clip(2)) @ near,
            ]
            if (has_edge != has_edge.T).any():
                paths = has_edge @ has_edge
                matrices += [
                    has_edge * has_edge.T,
                    np.log1p(has_edge @ has_edge.T),
                    np.log1p(has_edge.T @ has_edge),
                    np.log1p(paths + paths.T),
                ]
            for matrix in matrices:
                features.append(
                    sum(matrix[i, j] * (1 - level[i]) * (1 - level[j]) for i, j in pairs)
                )
        return np.array(features, dtype=float)

    def units_of_pairs(self) -> np.ndarray:
        """Returns the mean and the scale of each feature of pairs, [2, F]."""
        levels = self.level[(self.split == 0) & (self.perturbs.sum(axis=1) > 1)]
        features = np.array([self.pair_features(level) for level in levels])
        if not len(levels):
            return np.zeros((2, len(self.pair_features(self.level[0]))))
        number = np.array([weight_of_pairs(level) for level in levels])
        mean = number @ features / (number @ number)
        deviation = np.sqrt(np.square(features - np.outer(number, mean)).mean(axis=0))
        varies = deviation > 1e-6 * np.sqrt(np.square(features).mean(axis=0))
        return np.array([mean, varies / np.where(varies, deviation, 1)])

    def loss(self, prediction: np.ndarray, split: int) -> float:
        """Returns the loss over the rows of a split, given predictions or logits of all rows."""
        of_scores = []
        for t, std in enumerate(self.std):
            rows = self.present[:, t] & (self.split == split)
            loss = losses(prediction[rows, t], self.y[rows, t], self.binary) / std**2
            if rows.any():
                of_scores.append((self.weight[rows] * loss).sum() / self.weight[rows].sum())
        return np.mean(of_scores) if of_scores else math.nan


class Parameters(dict):
    """The parameters of a model by name, and the layers that use them."""

    def linear(self, x, name):
        return x @ self[f"{name}.weight"].T + self.get(f"{name}.bias", 0)

    def norm(self, x, name):
        unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return unit * self[f"{name}.weight"] + self.get(f"{name}.bias", 0)

    def head(self, x, name):
        return self.linear(gelu(self.linear(x, f"{name}.0")), f"{name}.2")


def weight_of_pairs(level):
    """Returns the sum over all pairs of nodes of the product of 1 - level of both nodes."""
    return np.triu(np.outer(1 - level, 1 - level), 1).sum()


def combination(weights, responses):
    """Returns the combination of the responses of nodes, [nodes, T]: [T]."""
    largest = responses.max(axis=0, initial=0)
    smallest = responses.min(axis=0, initial=0)
    return weights[0] * responses.sum(axis=0) + weights[1] * largest + weights[2] * smallest


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def moments(values, weight):
    """Returns the mean and the standard deviation of the values that are not nan."""
    present = ~np.isnan(values)
    values, weight = values[present], weight[present]
    mean = np.average(values, weights=weight)
    variance = np.average(np.square(values - mean), weights=weight)
    return mean, 1.0 if is_constant(values) else math.sqrt(variance)


def is_constant(values):
    return np.ptp(values) <= 1e-12 * np.abs(values).max()


def losses(prediction, y, binary):
    return np.logaddexp(0, prediction) - y * prediction if binary else np.square(prediction - y)


def near_least(errors):
    """Returns the positions of all errors that are equal to the smallest error up to rounding."""
    return [k for k, error in enumerate(errors) if error <= min(errors) * (1 + 1e-6) + 1e-12]


def ridge(design, y, penalty, weight):
    """Returns the coefficients of a ridge regression, with a penalty for each column.

    The first two columns, intercept and slope, are not penalised.
    """
    held = np.diag(np.sqrt(penalty))[2:]
    matrix = np.vstack([design * np.sqrt(weight)[:, None], held])
    scale = np.sqrt(np.square(matrix).sum(axis=0))
    right = np.append(y * np.sqrt(weight), 0 * held[:, 0])
    return np.linalg.lstsq(matrix / scale, right, rcond=None)[0] / scale


def logistic(design, y, held, weight):
    """Returns the coefficients of a logistic ridge regression, with a penalty for each column.

    The function makes Newton steps. Each step is halved until it reduces the objective.
    """
    scale = np.sqrt(weight @ np.square(design) + held)

    def error(x):
        return weight @ losses(design @ x, y, True) + (held * x**2).sum() / 2

    x = 0 * scale
    step = x + 1
    while np.abs(step * scale).max() > 1e-9:
        probability = (1 + np.tanh(design @ x / 2)) / 2
        variance = weight * probability * (1 - probability)
        curvature = (design.T * variance) @ design + np.diag(held)
        gradient = design.T @ (weight * (probability - y)) + held * x
        step = np.linalg.lstsq(curvature / np.outer(scale, scale), gradient / scale, rcond=None)[0]
        step = step / scale
        while error(x - step) >= error(x) and np.abs(step * scale).max() > 1e-9:
            step = step / 2
        x = x - step
    return x


def figures(y, prediction, weight):
    a, b, weight = (values[~np.isnan(y)] for values in (y, prediction, weight))
    if not len(a):
        return dict.fromkeys(("mse", "pearson", "r2", "spearman", "auroc"), math.nan)
    mse = np.average(np.square(a - b), weights=weight)
    variance = np.average(np.square(a - np.average(a, weights=weight)), weights=weight)
    r = pearson(a, b, weight)
    ranked = b - a.mean()
    if np.isin(a, (0, 1)).all() and (b >= 0).all() and (b <= 1).all():
        with np.errstate(divide="ignore"):  # probabilities of 0 and 1 have infinite logits
            ranked = np.log(b / (1 - b))
    ranked = ranked.astype(np.float32).astype(float)
    positive, negative = ranked[a == 1, None], ranked[a == 0]
    wins = (positive > negative).astype(int) - (positive < negative)
    return {
        "mse": mse,
        "pearson": r,
        "r2": math.nan if math.isnan(r) else 1 - mse / variance,
        "spearman": pearson(ranks(a), ranks(ranked), weight),
        "auroc": (1 + wins.mean()) / 2 if wins.size else math.nan,
    }


def pearson(a, b, weight):
    if is_constant(a):
        return math.nan
    covariance = np.cov(a, b, ddof=0, aweights=weight)
    return 0.0 if is_constant(b) else covariance[0, 1] / np.sqrt(covariance.diagonal().prod())


def ranks(values):
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])
