"""Explains predictions by pairs of perturbed nodes and the features that they have in common.

The part `pairs` of a prediction is a function of the sum of the features of all pairs in a sample.
The contribution of a pair is the part minus the part with an average training pair in its place. In
a sample of two nodes, it is the complete part. The contribution of a feature of a pair is defined
in the same way. Because of the MLP, the contributions of several pairs do not add up to the part.

Shapes: B samples in a batch, Q pairs in some samples, F features, T targets, K listed pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

MOST_FEATURES = 3  # features that are listed for a pair
VALUES_AT_ONCE = 2**22  # numbers of one tensor, which take 32 MB


@dataclass
class Pairs:
    """All pairs of some samples of a batch, as from `pairs_of_samples`."""

    sample: Tensor  # long [Q]
    nodes: Tensor  # long [2, Q]
    factor: Tensor  # float64 [Q]

    def __getitem__(self, some: Tensor) -> "Pairs":
        """Returns some of the pairs."""
        return Pairs(self.sample[some], self.nodes[:, some], self.factor[some])

    def features(self, index: PairIndex) -> Tensor:
        """Returns the weighted features of each pair, float64 [Q, F]."""
        features = [index.of_pairs(*piece) for piece in index.in_pieces(self.nodes)]
        return self.factor.unsqueeze(1) * torch.cat(features)


class PairsPart:
    """The part `pairs` of a model's predictions of a batch.

    `unit` is the unit of the predictions, float64 [T], and `features` are those of the batch,
    [B, F].
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
        """Returns the part minus its value without each of some shares, float64 [shares, T].

        A share is the summand of a pair, or of one of its features, in `scaled` of a sample,
        [shares, F].
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


class LargestPairs(NamedTuple):
    """The pairs that contribute most to B samples: K for each sample and target."""

    nodes: Tensor  # long [B, T, K, 2]
    contribution: Tensor  # float64 [B, T, K], 0 for missing pairs
    # long [B, T, K, MOST_FEATURES], the features that contribute most, -1 for missing ones
    feature: Tensor
    # bool of the same shape; False if the pair lacks the feature, such as an edge
    has_feature: Tensor

    @classmethod
    def none(cls, num_samples: int, num_targets: int, number: int) -> "LargestPairs":
        """Returns K empty entries, which contribute nothing."""
        nodes = torch.zeros(num_samples, num_targets, number, 2, dtype=torch.long)
        feature = nodes.new_full((*nodes.shape[:3], MOST_FEATURES), -1)
        return cls(nodes, nodes[..., 0].double(), feature, feature >= 0)


def largest_pairs(
    models: Sequence[KnockoutGNN],
    units: Sequence[Tensor],
    graph: SharedGraph,
    most: int,
    batch: Data,
) -> LargestPairs:
    """Returns the pairs that contribute most, as means over the models, on the CPU.

    `units` are the units of each model's predictions, float64 [T]. In a model without features of
    pairs, no pair contributes.
    """
    largest = LargestPairs.none(len(batch.y), len(units[0]), most)
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
        feature, has_feature = largest_features(parts, index, pairs, number, at_once)
        entry = (pairs.sample[number[:, 0]].cpu(), slice(None), place.cpu())
        largest.nodes[entry] = pairs.nodes.T[number].cpu()
        largest.contribution[entry] = (contribution.gather(0, number) / len(models)).cpu()
        largest.feature[entry] = feature.cpu()
        largest.has_feature[entry] = has_feature.cpu()
    return largest


def whole_samples(batch: Data, at_once: int) -> Iterator[Pairs]:
    """Yields the pairs of a batch in pieces of whole samples, with about `at_once` pairs each."""
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
    """Returns the rank of each line in its sample, and the pairs that contribute most.

    Ranks are counted from 0, long [lines]. The pairs are numbers, one for each target, long
    [lines, T].
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
) -> tuple[Tensor, Tensor]:
    """Returns the features that contribute most to pairs, long [lines, T, MOST_FEATURES].

    `number` has the numbers of the pairs, [lines, T]. Missing features are -1. The second tensor is
    True if the pair has the feature; for example, a pair without an edge does not have the feature
    edge.
    """
    largest = number.new_full((*number.shape, MOST_FEATURES), -1)
    has_feature = torch.zeros_like(largest, dtype=torch.bool)
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
        is_there = (features != 0).unsqueeze(2).expand_as(total).gather(1, feature)
        contributes = total.gather(1, feature) != 0
        line, target = torch.isin(number, chosen).nonzero().unbind(1)
        place = torch.searchsorted(chosen, number[line, target])
        largest[line, target] = feature.where(contributes, -1)[place, :, target]
        has_feature[line, target] = (is_there & contributes)[place, :, target]
    return largest, has_feature


def name_pairs(
    largest: LargestPairs, graph: SharedGraph, genes: Sequence[str]
) -> list[list[list[tuple[str, float, str]]]]:
    """Returns the pairs of each sample and target that contribute, as texts.

    For each pair, that is `A,B`, its contribution, and its features separated by commas; a comma in
    a name is written `\\,`. `no ` precedes a feature that the pair does not have.
    """
    feature_names = [name.replace(",", r"\,") for name in pair_names(graph)]

    def name_pair(
        nodes: list[int], value: float, features: list[int], has: list[bool]
    ) -> tuple[str, float, str]:
        first, second = nodes
        named = []
        for feature, has_feature in zip(features, has, strict=True):
            if feature >= 0:
                name = feature_names[feature]
                named.append(name if has_feature else f"no {name}")
        return f"{genes[first]},{genes[second]}", value, ",".join(named)

    samples = []
    for of_sample in zip(*(field.tolist() for field in largest), strict=True):
        targets = []
        for of_target in zip(*of_sample, strict=True):
            pairs = [name_pair(*of_pair) for of_pair in zip(*of_target, strict=True)]
            targets.append([pair for pair in pairs if pair[1]])
        samples.append(targets)
    return samples
