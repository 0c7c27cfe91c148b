"""Explains predictions by the knocked-out nodes, and by the living nodes whose states change.

The contribution of a knocked-out node is the prediction minus that of the sample without it. The
contributions of pairs of knocked-out nodes are in `predict_pairs`.

The readout of the knock-out pass reads how each living node's state differs from the intact graph.
With readout=nodes, the effect on a target is a function of that node's change, and of its level if
it is perturbed; all of it is the node's own contribution. With `GlobalReadout`, the effect is a
function of the sum of all changes. It is divided among the nodes by integrated gradients
(Sundararajan, Taly and Yan 2017, arXiv:1703.01365), along the straight line from no change to the
sum. The contributions add up to the knock-out pass minus its value for no change.

Shapes: N nodes, n samples, B of them in a batch, H hidden channels, T targets.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from run_results import NUMBER

POINTS = 32  # points on the line from no change to the sum of changes


class Contribution(NamedTuple):
    """The contribution of a node or of a pair to a prediction.

    A node contributes by its own knock-out, or by the change of its state.
    """

    node: str  # name of a node, or `A,B` for a pair of perturbed nodes
    # In the unit of the score; for binary scores, of the logit, except for a node's own knock-out.
    contribution: float
    # The features that contribute most to a pair, separated by commas; a comma in a name is written
    # `\,`.
    features: str = ""
    # The prediction if the node were intact; None: not a node's own knock-out.
    without: float | None = None


def knockout_term(model: torch.nn.Module) -> KnockoutTerm | None:
    """Returns a model's knock-out pass, None if it has none that can be explained."""
    terms = dict(getattr(model, "terms", {}))  # a model of a different class may have no terms
    term = terms.get("knockout")
    return term if isinstance(term, GlobalReadout) or reads_targets(term) else None


def reads_targets(term: torch.nn.Module | None) -> bool:
    """Returns whether a term reads each target from the state of only that node."""
    return hasattr(term, "target_nodes")


def without_each(samples: Tables) -> Iterator[Tables]:
    """Yields the samples without the first perturbed node of each, without the second, and so on.

    The number of yields is the number of nodes in the largest sample. Smaller samples are unchanged
    after their last node.
    """
    row = samples.sample()
    # Position of the node in its sample.
    number = torch.arange(len(row)) - samples.perturbed_ptr[row]
    for left_out in range(max(samples.perturbed_ptr.diff().tolist(), default=0)):
        level = samples.level.masked_fill(number == left_out, 1.0)
        perturbations = pack(row, samples.perturbed, level, len(samples.y))
        yield replace(samples, **perturbations)


class LargestChanges(NamedTuple):
    """The nodes whose changes contribute most to B samples: K for each sample and target."""

    node: Tensor  # long [B, T, K]
    contribution: Tensor  # float64 [B, T, K], 0 for missing nodes

    @classmethod
    def none(cls, num_samples: int, num_targets: int, number: int) -> "LargestChanges":
        """Returns K empty entries, which contribute nothing."""
        node = torch.zeros(num_samples, num_targets, number, dtype=torch.long)
        return cls(node, node.double())


def largest_changes(
    models: Sequence[KnockoutGNN],
    units: Sequence[Tensor],
    graph: SharedGraph,
    num_nodes: int,
    batch: Data,
) -> LargestChanges:
    """Returns the nodes whose changes contribute most, as means over the models, on the CPU.

    `units` are the units of each model's predictions, float64 [T]. If all readouts are `nodes`,
    only the target's own node contributes. In a model without a knock-out pass that can be
    explained, no node contributes.
    """
    largest = LargestChanges.none(len(batch.y), len(units[0]), num_nodes)
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
        largest.node[:, :, 0] = knockout_term(model).target_nodes
        largest.contribution[:, :, 0] = total / len(models)
        return largest
    of_models = [contributions(model, graph, batch) for _, model in explained]
    for sample, of_sample in enumerate(zip(*of_models, strict=True)):
        total = 0.0
        for (unit, _), of_model in zip(explained, of_sample, strict=True):
            total = total + unit.unsqueeze(1) * of_model
        node = total.abs().topk(num_nodes, dim=1).indices
        largest.node[sample] = node
        largest.contribution[sample] = total.gather(1, node) / len(models)
    return largest


def contributions(model: KnockoutGNN, graph: SharedGraph, batch: Data) -> Iterator[Tensor]:
    """Yields the contribution of each node to the predictions of each sample, [T, N]."""
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
    """A term without a readout: its pooled changes are those of all nodes' states."""

    def pool(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Returns the changes [N, b, H] as [b, N, H], with 0 for dead nodes."""
        return (change * alive.unsqueeze(2)).transpose(0, 1)


def changes_of_samples(graph: SharedGraph, batch: Data, wild: WildType) -> Iterator[Tensor]:
    """Yields each sample's changes of the nodes' states, [N, H], with 0 for dead nodes.

    All states are computed, for a few samples at once.
    """
    living = wild.encoder.living(graph, batch)
    for samples in living.in_blocks(batch, wild.final):
        yield from EveryChange().pooled(living, samples, wild)


def mean_gradient(readout: GlobalReadout, total: Tensor, num_columns: int) -> Tensor:
    """Returns the mean gradient of predictions on the line from no change to a total, [T, H].

    A prediction is the first column of a target. The points are densest at the start of the line,
    where asinh is most curved.
    """
    position, weight = np.polynomial.legendre.leggauss(POINTS)  # from -1 to 1
    u = torch.from_numpy((1 + position) / 2).to(total)
    way = u**3
    step = torch.from_numpy(weight / 2).to(total) * 3 * u**2

    def output(changes: Tensor) -> Tensor:
        return readout.head(torch.asinh(readout.scale * changes))[::num_columns]

    gradients = torch.func.vmap(torch.func.jacrev(output))(way.unsqueeze(1) * total)
    return torch.tensordot(step, gradients, dims=1)


class Explanation(NamedTuple):
    """The contributions to the predictions of n samples."""

    prediction: Tensor  # float64 [n, T]
    without: Tensor  # predictions of `without_each`, float64 [n, T, nodes of the largest sample]
    pairs: Sequence[Sequence[list[Contribution]]]  # up to K for each sample and target
    changes: LargestChanges


def name_contributions(
    explanation: Explanation, samples: Tables
) -> Iterator[list[list[Contribution]]]:
    """Yields up to K contributions to each score of each sample.

    The knocked-out nodes come first, then their pairs, then changes of states. In each group, the
    largest contributions come first. Pairs and changes with contribution 0 are left out.
    """
    num_nodes = explanation.changes.node.size(2)
    ptr = samples.perturbed_ptr.tolist()
    for row, of_targets in enumerate(explanation.pairs):
        perturbed = samples.perturbed[ptr[row] : ptr[row + 1]]
        names = [samples.genes[node] for node in perturbed]
        named = []
        for target, of_pairs in enumerate(of_targets):
            prediction = explanation.prediction[row, target].item()
            contributions = []
            of_nodes = explanation.without[row, target, : len(names)].tolist()
            for name, without in zip(names, of_nodes, strict=True):
                contributions.append(Contribution(name, prediction - without, without=without))
            contributions.sort(key=lambda each: -abs(each.contribution))
            contributions += of_pairs
            nodes = explanation.changes.node[row, target].tolist()
            values = explanation.changes.contribution[row, target].tolist()
            for node, value in zip(nodes, values, strict=True):
                if value:
                    contributions.append(Contribution(samples.genes[node], value))
            named.append(contributions[:num_nodes])
        yield named


class Explainer:
    """Explains the predictions of a `predictor.Ensemble`.

    All ranks call `explain` and `lines`, share the samples, and get the same result.
    """

    columns = Contribution._fields

    def __init__(self, ensemble: Any):
        self.ensemble = ensemble

    def explain(self, samples: Tables, num_nodes: int) -> Iterator[list[list[Contribution]]]:
        """Returns up to `num_nodes` contributions to each score of each sample."""
        return name_contributions(self.compute(samples, num_nodes), samples)

    def lines(self, chunk: Chunk, num_nodes: int) -> Iterator[str]:
        """Yields `num_nodes` lines for each row and score, which are formatted when they are read.

        If there are fewer contributions, the last lines are empty.
        """
        return self._lines(chunk, self.explain(chunk.samples, num_nodes), num_nodes)

    def _lines(
        self, chunk: Chunk, explained: Iterator[list[list[Contribution]]], num_nodes: int
    ) -> Iterator[str]:
        """Yields the lines of rows, given the contributions to the known rows."""
        targets = self.ensemble.targets
        for genes, is_known in zip(chunk.sets, chunk.is_known.tolist(), strict=True):
            nodes_of_targets = next(explained) if is_known else [[] for _ in targets]
            for target, nodes in zip(targets, nodes_of_targets, strict=True):
                for name, contribution, features, without in nodes:
                    prediction = "" if without is None else f"{without:{NUMBER}}"
                    cells = (name, f"{contribution:{NUMBER}}", features, prediction)
                    yield "\t".join((genes, target, *cells)) + "\n"
                for _ in range(num_nodes - len(nodes)):
                    yield f"{genes}\t{target}" + "\t" * len(Contribution._fields) + "\n"

    def compute(self, samples: Tables, num_nodes: int) -> Explanation:
        """Returns the explanation of n predictions, with up to `num_nodes` entries for each."""
        ensemble = self.ensemble
        prediction = ensemble.predict(samples)[:, :, 0]
        without = [prediction.new_empty(*prediction.shape, 0)]
        for others in without_each(samples):
            without.append(ensemble.predict(others)[:, :, :1])
        # Number of pairs in the largest sample.
        num_pairs = min(num_nodes, math.comb(len(without) - 1, 2))
        pairs = self._pairs(samples, num_pairs)
        none = LargestChanges.none(0, len(ensemble.targets), num_nodes)
        changes = self._largest(largest_changes, none, samples, num_nodes)
        return Explanation(prediction, torch.cat(without, dim=2), pairs, changes)

    def _pairs(self, samples: Tables, number: int) -> list[list[list[Contribution]]]:
        """Returns up to `number` contributing pairs for each sample and target."""
        targets = self.ensemble.targets
        predict_pairs = optional("predict_pairs")
        models = self.ensemble.models
        if not number or predict_pairs is None or not any(map(predict_pairs.has_pairs, models)):
            return [[[] for _ in targets] for _ in samples.y]
        none = predict_pairs.LargestPairs.none(0, len(targets), number)
        largest = self._largest(predict_pairs.largest_pairs, none, samples, number)
        named = predict_pairs.name_pairs(largest, self.ensemble.graph, samples.genes)
        pairs = []
        for of_targets in named:
            pairs.append([])
            for of_target in of_targets:
                pairs[-1].append([Contribution(*of_pair) for of_pair in of_target])
        return pairs

    def _largest(
        self, function: Callable[..., NamedTuple], none: Any, samples: Tables, number: int
    ) -> Any:
        """Returns the named tuple that a function makes of batches, for n samples, on the CPU.

        `none` is its result for no samples. The fields are [n, T, number, ...].
        """
        ensemble = self.ensemble
        graph = ensemble.graph
        dataset = KnockoutDataset(samples, graph.degree, out_degree=graph.out_degree)
        rows = torch.arange(len(samples.y))
        batch_size = evaluation_batch_size(ensemble.tasks[0])
        units = [task.criterion.std for task in ensemble.tasks]
        widths = [math.prod(field.shape[3:]) for field in none]

        def as_numbers(batch: Data) -> Tensor:  # as numbers, which ranks can sum
            found = function(ensemble.models, units, graph, number, batch)
            columns = []
            for field, width in zip(found, widths, strict=True):
                columns.append(field.double().view(*field.shape[:3], width))
            return torch.cat(columns, dim=3)

        shape = (len(ensemble.targets), number, sum(widths))
        with ensemble.lock:
            numbers = compute_rows(as_numbers, dataset, rows, batch_size, shape, ensemble.ddp)
        fields = []
        for field, columns in zip(none, numbers.split(widths, dim=3), strict=True):
            fields.append(columns.reshape(len(rows), *field.shape[1:]).to(field.dtype))
        return type(none)(*fields)

    def unexplained(self) -> list[str]:
        """Returns the files of the models without a knock-out pass that can be explained."""
        files = zip(self.ensemble.files, self.ensemble.models, strict=True)
        return [file for file, model in files if knockout_term(model) is None]
