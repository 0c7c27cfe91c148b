"""Which pairs of perturbed nodes a prediction hangs on, by what the two have in common.

The part `pairs` of a prediction is a function of the features of all pairs in a sample, added up.
A pair contributes the part less what it is with an average pair of training in its place: of two
nodes, all of the part. A feature of a pair contributes in the same way. With the MLP, contributions
of several pairs do not add up to the part.

Shapes: B samples in a batch, Q pairs of a sample, F features, T targets, K pairs that are named.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from mask import SharedGraph
from model import KnockoutGNN
from model_pairs import PairIndex, features_of, num_pairs, pair_index, pairs_of_samples

MOST_FEATURES = 3  # that are named of a pair
VALUES_AT_ONCE = 2**22  # of one tensor, which take 32 MB


class PairsOfSample(NamedTuple):
    """All pairs of the perturbed nodes of one sample."""

    sample: int  # its number in the batch
    nodes: Tensor  # long [2, Q]
    factor: Tensor  # by what each pair counts, float64 [Q]


class PairsPart:
    """The part `pairs` of a model's predictions of a batch.

    `unit` is that of the predictions, float64 [T], and `features` are those of the batch, [B, F].
    """

    def __init__(
        self, model: KnockoutGNN, unit: Tensor, graph: SharedGraph, batch: Data, features: Tensor
    ):
        self.unit = unit
        self.readout = model.local_readout.pair_readout
        self.scaled = self.readout.scaled(features, num_pairs(batch))
        wild = model.wild_type(graph, batch)
        _, self.hidden = model.local_readout.inputs(wild, model.dose(wild, batch), batch)
        self.head = model.local_readout.head[1:]

    def contributions(self, sample: int, shares: Tensor) -> Tensor:
        """Returns the part less what it is without each of some shares, float64 [shares, T].

        A share is what a pair, or one of its features, adds to `scaled`, [shares, F].
        """
        scaled = self.scaled[sample].expand_as(shares)
        hidden = self.hidden[sample].expand(len(shares), -1)
        part = self.readout.of_scaled(scaled, hidden, self.head)
        without = self.readout.of_scaled(scaled - shares, hidden, self.head)
        return self.unit * (part - without)


def has_pairs(model: torch.nn.Module) -> bool:
    """Returns whether a model has features of pairs."""
    local_readout = getattr(model, "local_readout", None)
    return getattr(local_readout, "pair_readout", None) is not None


def largest_pairs(
    models: Sequence[KnockoutGNN],
    units: Sequence[Tensor],
    graph: SharedGraph,
    most: int,
    batch: Data,
) -> Tensor:
    """Returns the pairs that contribute most, float64 [B, T, most, 3 + MOST_FEATURES].

    Of each, that is its two nodes, its contribution, the mean over the models, and its
    `largest_features`. Each model has the unit of its predictions, float64 [T]. In a model without
    features of pairs, none contributes.
    """
    largest = units[0].new_zeros(len(batch.y), len(units[0]), most, 3 + MOST_FEATURES)
    if not most or not any(has_pairs(model) for model in models):
        return largest
    index = pair_index(graph)
    features = features_of(graph, batch)
    parts = []
    for model, unit in zip(models, units, strict=True):
        if has_pairs(model):
            parts.append(PairsPart(model, unit, graph, batch, features))
    for pairs in each_sample(batch):
        contribution, number = largest_of_sample(parts, index, pairs, most)
        of_sample = largest[pairs.sample, :, : number.size(1)]
        of_sample[:, :, :2] = pairs.nodes.T[number]
        of_sample[:, :, 2] = contribution / len(models)
        of_sample[:, :, 3:] = largest_features(parts, index, pairs, number)
    return largest


def each_sample(batch: Data) -> Iterator[PairsOfSample]:
    """Yields the pairs of each sample of a batch that has some."""
    sample, nodes, factor = pairs_of_samples(batch)
    sizes = sample.bincount(minlength=len(batch.y)).tolist()
    of_samples = zip(nodes.split(sizes, dim=1), factor.split(sizes), strict=True)
    for number, (nodes_of_sample, factor_of_sample) in enumerate(of_samples):
        if sizes[number]:
            yield PairsOfSample(number, nodes_of_sample, factor_of_sample)


def largest_of_sample(
    parts: Sequence[PairsPart], index: PairIndex, pairs: PairsOfSample, most: int
) -> tuple[Tensor, Tensor]:
    """Returns the largest contributions, the sum over the models, and of which pairs, [T, K] each.

    Pairs are taken a piece at a time.
    """
    num_targets = len(parts[0].unit)
    contribution = parts[0].unit.new_zeros(num_targets, 0)
    number = pairs.nodes.new_zeros(num_targets, 0)
    width = max(len(index.names), parts[0].hidden.size(1), num_targets)
    all_numbers = torch.arange(len(pairs.factor), device=number.device)
    for some in all_numbers.split(max(1, VALUES_AT_ONCE // width)):
        factor = pairs.factor[some]
        features = factor.unsqueeze(1) * features_of_pairs(index, pairs.nodes[:, some])
        total = 0.0
        for part in parts:
            shares = part.readout.scaled(features, factor)
            total = total + part.contributions(pairs.sample, shares)
        contribution = torch.cat([contribution, total.T], dim=1)
        number = torch.cat([number, some.expand(num_targets, -1)], dim=1)
        place = contribution.abs().topk(min(most, number.size(1)), dim=1).indices
        contribution = contribution.gather(1, place)
        number = number.gather(1, place)
    return contribution, number


def largest_features(
    parts: Sequence[PairsPart], index: PairIndex, pairs: PairsOfSample, number: Tensor
) -> Tensor:
    """Returns the features by which pairs contribute most, float64 [T, K, MOST_FEATURES].

    `number` says which pairs, [T, K]. Features are numbered from 1 on, and one that is 0, as of a
    pair without an edge, has a minus. Where no other feature contributes, there is a 0.
    """
    largest = parts[0].unit.new_zeros(*number.shape, MOST_FEATURES)
    for one in number.unique().unsqueeze(1):
        factor = pairs.factor[one]
        features = factor * index.of_pairs(*pairs.nodes[:, one])  # [1, F]
        total = 0.0
        for part in parts:
            shares = part.readout.scaled(features, factor).squeeze(0).diag()
            total = total + part.contributions(pairs.sample, shares)  # [F, T]
        feature = total.abs().topk(MOST_FEATURES, dim=0).indices
        sign = torch.where(features[0, feature] == 0, -1, 1)
        sign = sign.where(total.gather(0, feature) != 0, 0)
        target, place = (number == one).nonzero().unbind(1)
        largest[target, place] = (sign * (feature + 1)).T[target].double()
    return largest


def features_of_pairs(index: PairIndex, pair: Tensor) -> Tensor:
    """Returns the features of pairs, float64 [Q, F], as `PairIndex.of_pairs` in pieces."""
    return torch.cat([index.of_pairs(*piece) for piece in index.in_pieces(pair)])


def name_features(numbers: Sequence[float], names: Sequence[str]) -> str:
    """Returns features as `largest_features` numbers them, by commas; one in a name is `\\,`.

    A feature that the pair has not begins with `no `.
    """
    named = []
    for number in numbers:
        if number:
            name = names[abs(int(number)) - 1].replace(",", r"\,")
            named.append(name if number > 0 else f"no {name}")
    return ",".join(named)
