"""Explains predictions: computes how much knocked-out nodes and living nodes contribute to them.

The contribution of a knocked-out node is the difference of two predictions: the prediction for the
sample, minus the prediction for the sample without this knock-out. `predict_pairs` computes the
contributions of pairs of knocked-out nodes.

Living nodes contribute by their state changes, which are the differences between their states with
and without the knock-outs. The readout of the knock-out pass is a function of these changes:

- With readout=nodes, the term of a target is a function of the change of the target's own node, and
  of this node's level if it is perturbed. The complete term is the contribution of this node.
- With `GlobalReadout`, the term is a function of the sum of all changes. Integrated gradients
  (Sundararajan, Taly and Yan 2017, arXiv:1703.01365) divide it among the nodes, along the straight
  line from no change to the sum. The contributions add up to the term minus its value for no
  change.

Shapes: N nodes, n samples, B samples in a batch, H hidden channels, T targets, K listed nodes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from data import KnockoutDataset
from data_tables import Tables, pack
from evaluate import compute_rows, evaluation_batch_size
from mask import SharedGraph
from model import GlobalReadout, KnockoutGNN, KnockoutTerm, WildType
from parts import optional
from predict_tables import Chunk

POINTS = 32  # number of points on the line from no change to the sum of changes
NEGLIGIBLE = 1e-6  # contributions below this fraction of the score's unit are rounding errors


class Contribution(NamedTuple):
    """The contribution of a knock-out, of a pair of knock-outs, or of a node's state change."""

    node: str  # name of the node, or `A,B` for a pair of perturbed nodes
    # Contribution to the prediction, in the unit of the score. For binary scores, a knock-out
    # contributes to the probability; pairs and state changes contribute to the logit.
    contribution: float
    # For a pair, its features that contribute most, separated by commas. A comma in the name of a
    # feature is written as `\,`.
    features: str = ""
    # For a knock-out, the prediction if this node were intact; otherwise None.
    without: float | None = None


def knockout_term(model: torch.nn.Module) -> KnockoutTerm | None:
    """Returns a model's knock-out pass, or None if it does not have one that can be explained."""
    terms = dict(getattr(model, "terms", {}))  # a model of a different class may have no terms
    term = terms.get("knockout")
    return term if isinstance(term, GlobalReadout) or reads_targets(term) else None


def reads_targets(term: torch.nn.Module | None) -> bool:
    """Returns whether a term predicts each target from the state of the target's own node only."""
    return hasattr(term, "target_nodes")


def without_each(samples: Tables) -> Iterator[Tables]:
    """Yields the samples without the first perturbed node of each, without the second, and so on.

    It yields all samples as often as the largest sample has nodes. Smaller samples are unchanged in
    the last yields.
    """
    row = samples.sample()
    # Position of the node in its sample.
    number = torch.arange(len(row)) - samples.perturbed_ptr[row]
    for left_out in range(max(samples.perturbed_ptr.diff().tolist(), default=0)):
        level = samples.level.masked_fill(number == left_out, 1.0)
        perturbations = pack(row, samples.perturbed, level, len(samples.y))
        yield replace(samples, **perturbations)


def largest_changes(
    models: Sequence[KnockoutGNN],
    units: Sequence[Tensor],
    graph: SharedGraph,
    num_nodes: int,
    batch: Data,
) -> Tensor:
    """Returns the nodes whose state changes contribute most to each sample, float64 [B, T, K, 2].

    The last dimension has the contribution of a node, and the index of this node. The contribution
    is 0 for missing nodes. It is a mean over the models. Models without a knock-out pass that can
    be explained count as 0 in this mean. If all other models have readout=nodes, only the target's
    own node contributes.

    Args:
        models, units: the models, and the scale of each model's predictions, float64 [T].
        graph: the graph of the batch.
        num_nodes: K.
        batch: the samples.
    """
    largest = units[0].new_zeros(len(batch.y), len(units[0]), num_nodes, 2)
    explained = []
    for unit, model in zip(units, models, strict=True):
        if knockout_term(model) is not None:
            explained.append((unit, model))
    if not explained:
        return largest
    if all(reads_targets(knockout_term(model)) for _, model in explained):
        total = 0.0
        for unit, model in explained:
            total = total + unit * model.parts(graph, batch)["knockout"]
        largest[:, :, 0, 0] = total / len(models)
        largest[:, :, 0, 1] = knockout_term(model).target_nodes
        return largest
    of_models = [contributions(model, graph, batch) for _, model in explained]
    for sample, of_sample in enumerate(zip(*of_models, strict=True)):
        total = 0.0
        for (unit, _), of_model in zip(explained, of_sample, strict=True):
            total = total + unit.unsqueeze(1) * of_model
        node = total.abs().topk(num_nodes, dim=1).indices
        largest[sample] = torch.stack([total.gather(1, node) / len(models), node], dim=2)
    return largest


def contributions(model: KnockoutGNN, graph: SharedGraph, batch: Data) -> Iterator[Tensor]:
    """Yields the contributions of all nodes to a sample's predictions, [T, N], for each sample."""
    term = knockout_term(model)
    if reads_targets(term):
        target = term.target_nodes.unsqueeze(1)
        for effect in model.parts(graph, batch)["knockout"]:
            of_targets = effect.new_zeros(len(target), graph.num_nodes)
            yield of_targets.scatter(1, target, effect.unsqueeze(1))
        return
    wild = model.wild_type(graph, batch)
    for change in changes_of_samples(graph, batch, wild):
        yield mean_gradient(term, change.sum(0), model.num_columns) @ change.T


class EveryChange(KnockoutTerm):
    """A term without a readout. Its method `pooled` yields the state changes of all nodes."""

    def pool(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Returns the changes of b samples, [N, b, H], as [b, N, H], with 0 for dead nodes."""
        return (change * alive.unsqueeze(2)).transpose(0, 1)


def changes_of_samples(graph: SharedGraph, batch: Data, wild: WildType) -> Iterator[Tensor]:
    """Yields the state changes of all nodes, [N, H], for each sample; they are 0 for dead nodes.

    The changes are computed for a few samples at once, to limit the memory.
    """
    living = wild.encoder.living(graph, batch)
    for samples in living.in_blocks(batch, wild.final):
        yield from EveryChange().pooled(living, samples, wild)


def mean_gradient(readout: GlobalReadout, total: Tensor, num_columns: int) -> Tensor:
    """Returns the mean gradient of predictions on the line from no change to `total`, [T, H].

    It is the gradient of the first column of each target. The points of the Gauss-Legendre
    quadrature are densest at the start of the line, where asinh has the largest curvature.
    """
    position, weight = np.polynomial.legendre.leggauss(POINTS)  # from -1 to 1
    u = torch.from_numpy((1 + position) / 2).to(total)
    way = u**3
    step = torch.from_numpy(weight / 2).to(total) * 3 * u**2

    def output(changes: Tensor) -> Tensor:
        return readout.head(torch.asinh(readout.scale * changes))[::num_columns]

    gradients = torch.func.vmap(torch.func.jacrev(output))(way.unsqueeze(1) * total)
    return torch.tensordot(step, gradients, dims=1)


def name_contributions(
    samples: Tables,
    predictions: Tensor,
    without: Tensor,
    pairs: Sequence[Sequence[list[tuple]]],
    changes: Tensor,
) -> Iterator[list[list[Contribution]]]:
    """Yields up to K contributions to each score, for each sample.

    The knocked-out nodes come first, then pairs of them, and then the nodes whose states change. In
    each group, the largest contributions come first. Pairs and state changes with contribution 0
    are left out.

    Args:
        samples: n samples.
        predictions: their predictions, float64 [n, T].
        without: predictions for the samples of `without_each`, float64 [n, T, nodes of the largest
            sample].
        pairs: for each sample and target, up to K pairs, from `predict_pairs.name_pairs`.
        changes: the result of `largest_changes`, float64 [n, T, K, 2].
    """
    ptr = samples.perturbed_ptr.tolist()
    for row, of_targets in enumerate(pairs):
        perturbed = samples.perturbed[ptr[row] : ptr[row + 1]]
        names = [samples.genes[node] for node in perturbed]
        named = []
        for target, of_pairs in enumerate(of_targets):
            prediction = predictions[row, target].item()
            contributions = []
            for name, value in zip(names, without[row, target].tolist(), strict=False):
                contributions.append(Contribution(name, prediction - value, without=value))
            contributions.sort(key=lambda each: -abs(each.contribution))
            contributions += [Contribution(*pair) for pair in of_pairs]
            for contribution, node in changes[row, target].tolist():
                if contribution:
                    contributions.append(Contribution(samples.genes[int(node)], contribution))
            named.append(contributions[: changes.size(2)])
        yield named


class Explainer:
    """Explains the predictions of a `predictor.Ensemble`.

    All ranks call `explain` or `lines`. Each rank computes some of the samples, and all ranks get
    the complete result.
    """

    columns = Contribution._fields

    def __init__(self, ensemble: Any):
        self.ensemble = ensemble

    def explain(self, samples: Tables, num_nodes: int) -> Iterator[list[list[Contribution]]]:
        """Computes up to `num_nodes` contributions to each score.

        Returns an iterator over the samples. Only the ranks that use it spend time on names.
        """
        ensemble = self.ensemble
        predictions = ensemble.predict(samples)[:, :, 0]
        without = [predictions.new_empty(*predictions.shape, 0)]
        for others in without_each(samples):
            without.append(ensemble.predict(others)[:, :, :1])
        # Number of pairs in the largest sample.
        num_pairs = min(num_nodes, math.comb(len(without) - 1, 2))
        pairs = self._pairs(samples, num_pairs)
        changes = self._largest(largest_changes, samples, num_nodes, 2)
        return name_contributions(samples, predictions, torch.cat(without, dim=2), pairs, changes)

    def lines(self, chunk: Chunk, num_nodes: int) -> Iterator[str]:
        """Explains the rows of a chunk, and returns an iterator over `num_nodes` lines per score.

        If a score has fewer contributions, its last lines only have the row and the score. The
        iterator formats the lines, so only the rank that writes them spends time on it.
        """
        return self._lines(chunk, self.explain(chunk.samples, num_nodes), num_nodes)

    def _lines(
        self, chunk: Chunk, explained: Iterator[list[list[Contribution]]], num_nodes: int
    ) -> Iterator[str]:
        """Yields the lines of all rows, given the contributions to the rows with known nodes."""
        targets = self.ensemble.targets
        for genes, is_known in zip(chunk.sets, chunk.is_known.tolist(), strict=True):
            nodes_of_targets = next(explained) if is_known else [[] for _ in targets]
            for target, nodes in zip(targets, nodes_of_targets, strict=True):
                for name, contribution, features, without in nodes:
                    prediction = "" if without is None else repr(without)
                    cells = (name, repr(contribution), features, prediction)
                    yield "\t".join((genes, target, *cells)) + "\n"
                for _ in range(num_nodes - len(nodes)):
                    yield f"{genes}\t{target}" + "\t" * len(Contribution._fields) + "\n"

    def _pairs(self, samples: Tables, number: int) -> list[list[list[tuple]]]:
        """Returns up to `number` pairs that contribute, for each sample and target.

        The lists are empty if no model has features of pairs, or if this optional part is missing.
        """
        predict_pairs = optional("predict_pairs")
        models = self.ensemble.models
        if not number or predict_pairs is None or not any(map(predict_pairs.has_pairs, models)):
            return [[[] for _ in self.ensemble.targets] for _ in samples.y]
        width = predict_pairs.NUM_COLUMNS
        largest = self._largest(predict_pairs.largest_pairs, samples, number, width)
        return predict_pairs.name_pairs(largest, self.ensemble.graph, samples.genes)

    def _largest(
        self, function: Callable[..., Tensor], samples: Tables, number: int, width: int
    ) -> Tensor:
        """Applies `largest_changes` or `largest_pairs` to n samples, batch by batch, on all ranks.

        Returns the result of the function for all samples, float64 [n, T, number, width], on the
        CPU. Contributions that are rounding errors are set to 0.
        """
        ensemble = self.ensemble
        graph = ensemble.graph
        dataset = KnockoutDataset(samples, graph.degree, out_degree=graph.out_degree)
        rows = torch.arange(len(samples.y))
        batch_size = evaluation_batch_size(ensemble.tasks[0])
        units = [task.criterion.std for task in ensemble.tasks]
        function = partial(function, ensemble.models, units, graph, number)
        shape = (len(ensemble.targets), number, width)
        with ensemble.lock:
            largest = compute_rows(function, dataset, rows, batch_size, shape, ensemble.ddp)
        least = NEGLIGIBLE * torch.stack(units).mean(dim=0).cpu().unsqueeze(1)  # [T, 1]
        contribution = largest[..., 0]
        contribution[contribution.abs() < least] = 0.0
        return largest

    def unexplained(self) -> list[str]:
        """Returns the files of the models without a knock-out pass that can be explained."""
        files = zip(self.ensemble.files, self.ensemble.models, strict=True)
        return [file for file, model in files if knockout_term(model) is None]
