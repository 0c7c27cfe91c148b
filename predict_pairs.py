"""Explains the term `pairs` of predictions: computes how much each pair of nodes contributes to it.

The term is a function of the sum of the features of all pairs of perturbed nodes in a sample. The
contribution of a pair is the term, minus the term with an average training pair instead of this
pair. In a sample of two nodes, this is the complete term. The contribution of a feature of a pair
is the same difference if only this feature is replaced. The contributions of several pairs do not
add up to the term, because the function contains an MLP.

Shapes: B samples in a batch, Q pairs in some samples, F features, T targets, K listed pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from mask import SharedGraph
from model import KnockoutGNN
from model_pairs import (
    PairIndex,
    PairTerm,
    features_of,
    num_pairs,
    pair_index,
    pair_names,
    pairs_of_samples,
)

MOST_FEATURES = 3  # number of features that are listed for a pair
NUM_COLUMNS = 3 + MOST_FEATURES  # of the result of `largest_pairs`
VALUES_AT_ONCE = 2**22  # largest number of values of a tensor; in double precision, 32 MB


@dataclass
class Pairs:
    """All pairs of perturbed nodes in some samples of a batch, from `pairs_of_samples`."""

    sample: Tensor  # index of each pair's sample in the batch, long [Q]
    nodes: Tensor  # the two nodes of each pair, long [2, Q]
    factor: Tensor  # weight of each pair: the product of its nodes' 1 - level, float64 [Q]

    def __getitem__(self, some: Tensor) -> "Pairs":
        """Returns the pairs with some indices."""
        return Pairs(self.sample[some], self.nodes[:, some], self.factor[some])

    def features(self, index: PairIndex) -> Tensor:
        """Returns the features of each pair multiplied by its weight, float64 [Q, F]."""
        features = [index.of_pairs(*piece) for piece in index.in_pieces(self.nodes)]
        return self.factor.unsqueeze(1) * torch.cat(features)


class PairsPart:
    """The term `pairs` of a model's predictions for a batch.

    Args:
        model: a model with features of pairs.
        unit: the scale of the model's predictions, float64 [T].
        graph: the graph of the batch.
        batch: B samples.
        features: the sum of the features of each sample's pairs, [B, F].
    """

    def __init__(
        self, model: KnockoutGNN, unit: Tensor, graph: SharedGraph, batch: Data, features: Tensor
    ):
        self.unit = unit
        self.num_columns = model.num_columns
        self.term = model.terms["pairs"]
        self.scaled = self.term.scaled(features, num_pairs(batch))
        wild = model.wild_type(graph, batch)
        _, self.hidden = model.terms["local"].inputs(wild, model.dose(wild, batch), batch)

    def contributions(self, sample: Tensor, shares: Tensor) -> Tensor:
        """Returns the term minus its value without each of S shares, float64 [S, T].

        A share, [S, F], is the summand of a pair, or of one feature of a pair, in the scaled sum of
        the features of a sample. `sample` is the sample of each share, long [S].
        """
        scaled = self.scaled[sample]
        hidden = self.hidden[sample]
        part = self.term.of_scaled(scaled, hidden)
        without = self.term.of_scaled(scaled - shares, hidden)
        difference = (part - without)[:, :: self.num_columns]  # the first column of each target
        return self.unit * difference


def has_pairs(model: torch.nn.Module) -> bool:
    """Returns whether a model has features of pairs."""
    terms = dict(getattr(model, "terms", {}))  # a model of a different class may have no terms
    return isinstance(terms.get("pairs"), PairTerm)


def largest_pairs(
    models: Sequence[KnockoutGNN],
    units: Sequence[Tensor],
    graph: SharedGraph,
    most: int,
    batch: Data,
) -> Tensor:
    """Returns the pairs that contribute most to each sample, float64 [B, T, K, NUM_COLUMNS].

    The last dimension has the contribution of a pair, the indices of its two nodes, and the
    features that contribute most, from `largest_features`. The contribution is 0 for missing pairs.
    It is a mean over the models. Models without features of pairs count as 0 in this mean.

    Args:
        models, units: the models, and the scale of each model's predictions, float64 [T].
        graph: the graph of the batch.
        most: K.
        batch: the samples.
    """
    largest = units[0].new_zeros(len(batch.y), len(units[0]), most, NUM_COLUMNS)
    index = pair_index(graph)
    features = features_of(graph, batch)
    parts = []
    for model, unit in zip(models, units, strict=True):
        if has_pairs(model):
            parts.append(PairsPart(model, unit, graph, batch, features))
    if not most or not parts:
        return largest
    widest = max(features.size(1), 2 * models[0].config.hidden, len(units[0]))
    at_once = VALUES_AT_ONCE // widest + 1
    for pairs in whole_samples(batch, at_once):
        contribution = contributions_of_pairs(parts, index, pairs, at_once)
        place, number = largest_of_samples(contribution, pairs.sample, most)
        features_of_pairs = largest_features(parts, index, pairs, number, at_once)
        mean = contribution.gather(0, number).unsqueeze(2) / len(models)
        columns = torch.cat([mean, pairs.nodes.T[number], features_of_pairs], dim=2)
        largest[pairs.sample[number[:, 0]], :, place] = columns
    return largest


def whole_samples(batch: Data, at_once: int) -> Iterator[Pairs]:
    """Yields the pairs of a batch in pieces of about `at_once` pairs.

    A piece has all pairs of its samples, and can therefore be larger.
    """
    sample, nodes, factor = pairs_of_samples(batch)
    piece = sample.bincount().cumsum(0)[sample] // at_once
    sizes = piece.unique_consecutive(return_counts=True)[1].tolist()
    for pairs in zip(sample.split(sizes), nodes.split(sizes, 1), factor.split(sizes), strict=True):
        yield Pairs(*pairs)


def contributions_of_pairs(
    parts: Sequence[PairsPart], index: PairIndex, pairs: Pairs, at_once: int
) -> Tensor:
    """Returns the contribution of each pair, summed over the models, float64 [Q, T]."""
    total = parts[0].unit.new_zeros(len(pairs.sample), len(parts[0].unit))
    for some in torch.arange(len(total), device=total.device).split(at_once):
        piece = pairs[some]
        features = piece.features(index)
        for part in parts:
            shares = part.term.scaled(features, piece.factor)
            total[some] += part.contributions(piece.sample, shares)
    return total


def largest_of_samples(contribution: Tensor, sample: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the pairs that contribute most to each sample and target.

    The result has L lines: up to `most` lines for each sample. The first tensor is the position of
    each line in its sample's list, from 0, long [L]. The second tensor has the index of a pair for
    each line and target, long [L, T].
    """
    number = contribution.abs().argsort(dim=0, descending=True, stable=True)
    by_sample = sample[number].argsort(dim=0, stable=True)
    number = number.gather(0, by_sample)
    size = sample.bincount()
    first = (size.cumsum(0) - size)[sample]
    place = torch.arange(len(sample), device=sample.device) - first
    is_named = place < most
    return place[is_named], number[is_named]


def largest_features(
    parts: Sequence[PairsPart], index: PairIndex, pairs: Pairs, number: Tensor, at_once: int
) -> Tensor:
    """Returns the features that contribute most to pairs, long [L, T, MOST_FEATURES].

    `number` has the indices of the pairs, long [L, T], from `largest_of_samples`. Missing entries
    are -1. The lack of a feature can contribute, too, such as the lack of an edge. If a pair does
    not have the feature f of F features, the entry is F + f.
    """
    largest = number.new_full((*number.shape, MOST_FEATURES), -1)
    num_features = len(index.names)
    for chosen in number.unique().split(at_once // num_features + 1):
        piece = pairs[chosen]
        features = piece.features(index)
        sample = piece.sample.repeat_interleave(num_features)
        total = 0.0
        for part in parts:
            shares = part.term.scaled(features, piece.factor).diag_embed()  # [pairs, F, F]
            total = total + part.contributions(sample, shares.flatten(0, 1))
        total = total.unflatten(0, (len(chosen), num_features))  # [pairs, F, T]
        feature = total.abs().topk(MOST_FEATURES, dim=1).indices
        is_lacking = (features == 0).unsqueeze(2).expand_as(total).gather(1, feature)
        contributes = total.gather(1, feature) != 0
        entry = (feature + num_features * is_lacking).where(contributes, -1)
        line, target = torch.isin(number, chosen).nonzero().unbind(1)
        place = torch.searchsorted(chosen, number[line, target])
        largest[line, target] = entry[place, :, target]
    return largest


def name_pairs(
    largest: Tensor, graph: SharedGraph, genes: Sequence[str]
) -> list[list[list[tuple[str, float, str]]]]:
    """Returns the pairs that contribute to each sample and target, with names.

    A pair is a tuple: the names of its nodes `A,B`, its contribution, and the names of its features
    separated by commas. A comma in the name of a feature is written as `\\,`. A feature that the
    pair does not have begins with `no `. `largest` is the result of `largest_pairs`.
    """
    feature_names = [name.replace(",", r"\,") for name in pair_names(graph)]
    feature_names += [f"no {name}" for name in feature_names]

    def name_pair(contribution: float, *numbers: float) -> tuple[str, float, str]:
        first, second, *features = map(int, numbers)
        names = [feature_names[feature] for feature in features if feature >= 0]
        return f"{genes[first]},{genes[second]}", contribution, ",".join(names)

    samples = []
    for of_sample in largest.tolist():
        targets = []
        for of_target in of_sample:
            targets.append([name_pair(*pair) for pair in of_target if pair[0]])
        samples.append(targets)
    return samples
