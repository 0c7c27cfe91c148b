"""Which nodes the knock-out pass of a prediction hangs on.

The readout of changes gets how each living node's state differs from the intact graph's. Of a
readout `nodes`, the effect on a target is a function of that node's change, and of its level if it
is perturbed itself: the node's own contribution is all of it. That of `GlobalReadout` is a function
of the sum of all changes: it is divided among the nodes by integrated gradients (Sundararajan, Taly
and Yan 2017, arXiv:1703.01365), on the straight way from no change to the sum. Contributions add up
to the knock-out pass less what it gives for no change.

Shapes: N nodes, B samples, H hidden channels, T targets.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import index2ptr

from data_tables import Tables
from errors import UserError
from mask import SharedGraph
from model import GlobalReadout, KnockoutGNN, NodeReadout, WildType

POINTS = 32  # on the way from no change to the sum of changes


class Contribution(NamedTuple):
    """What one node adds to a prediction by the change of its state."""

    node: str
    contribution: float  # in the unit of the score; of a binary one, of its logit
    steps: int  # edges on the shortest way from a perturbed node, 0 for one of these
    relations: str  # of the last edges of all such ways, by commas; one in a name is `\,`


def check_explained(model: torch.nn.Module, name: str) -> None:
    """Raises `UserError` if what the knock-out pass of a model hangs on cannot be said."""
    readout = getattr(model, "change_readout", None)
    if not isinstance(readout, GlobalReadout | NodeReadout):
        raise UserError(
            f"the model of {name} has no knock-out pass that can be explained: "
            "train one with model.readout=both, global or nodes"
        )


def largest_contributions(
    models: Sequence[KnockoutGNN],
    units: Sequence[Tensor],
    graph: SharedGraph,
    num_nodes: int,
    batch: Data,
) -> Tensor:
    """Returns the nodes whose changes contribute most, float64 [B, T, num_nodes, 2].

    Of each, that is its number and its contribution, the mean over the models. Each model has the
    unit of its predictions, float64 [T]. Where readouts are all `nodes`, no node but the target's
    own contributes.
    """
    largest = units[0].new_zeros(len(batch.y), len(units[0]), num_nodes, 2)
    if all(isinstance(model.change_readout, NodeReadout) for model in models):
        total = 0.0
        for unit, model in zip(units, models, strict=True):
            total = total + unit * effects_on_targets(model, graph, batch)
        largest[:, :, 0, 0] = models[0].change_readout.target_nodes
        largest[:, :, 0, 1] = total / len(models)
        return largest
    of_models = [contributions(model, graph, batch) for model in models]
    for sample, of_sample in enumerate(zip(*of_models, strict=True)):
        total = 0.0
        for unit, of_model in zip(units, of_sample, strict=True):
            total = total + unit.unsqueeze(1) * of_model
        node = total.abs().topk(num_nodes, dim=1).indices
        largest[sample, :, :, 0] = node
        largest[sample, :, :, 1] = total.gather(1, node) / len(models)
    return largest


def effects_on_targets(model: KnockoutGNN, graph: SharedGraph, batch: Data) -> Tensor:
    """Returns what a readout `nodes` adds to the predictions of a batch, [B, T]."""
    wild = model.wild_type(graph, batch)
    return model.change_readout(model.changes(graph, batch, wild), wild, batch)


def contributions(model: KnockoutGNN, graph: SharedGraph, batch: Data) -> Iterator[Tensor]:
    """Yields the contribution of each node to the predictions of each sample, [T, N]."""
    readout = model.change_readout
    wild = model.wild_type(graph, batch)
    if isinstance(readout, NodeReadout):
        target = readout.target_nodes.unsqueeze(1)
        effects = readout.with_direct(model.changes(graph, batch, wild), wild, batch)
        for effect in effects:
            of_targets = effect.new_zeros(len(target), len(effect))
            yield of_targets.scatter(1, target, effect[target])
        return
    for change in changes_of_samples(model, graph, batch, wild):
        yield mean_gradient(readout, change.sum(0)) @ change.T


def changes_of_samples(
    model: KnockoutGNN, graph: SharedGraph, batch: Data, wild: WildType
) -> Iterator[Tensor]:
    """Yields the changes of the nodes' states by each sample, [N, H], 0 for dead nodes.

    All states are computed, a few samples at once.
    """
    for messages, level in model.passes(graph, batch):
        changes = model.change_of_states(messages, level, wild) * (level > 0).unsqueeze(2)
        yield from changes.unbind(1)


def mean_gradient(readout: GlobalReadout, total: Tensor) -> Tensor:
    """Returns the mean gradient of the outputs on the way from no change to a total, [T, H].

    asinh bends most where the way begins, so the points are densest there.
    """
    position, weight = np.polynomial.legendre.leggauss(POINTS)  # in -1 to 1
    u = torch.from_numpy((1 + position) / 2).to(total)
    way = u**3
    step = torch.from_numpy(weight / 2).to(total) * 3 * u**2

    def output(changes: Tensor) -> Tensor:
        return readout.head(torch.asinh(readout.scale * changes))

    gradients = torch.func.vmap(torch.func.jacrev(output))(way.unsqueeze(1) * total)
    return torch.tensordot(step, gradients, dims=1)


class ShortestWays:
    """The shortest ways from knocked-out nodes to others, on the edges of all relations."""

    def __init__(self, tables: Tables):
        self.num_nodes = len(tables.genes)
        self.relations = tables.relations
        source, target = tables.edge_index
        by_target = target.argsort(stable=True)
        self.target = target[by_target].numpy()
        self.target_ptr = index2ptr(target[by_target], self.num_nodes).numpy()
        self.source = source[by_target].numpy()
        self.relation = tables.edge_type[by_target].numpy()

    def steps(self, perturbed: np.ndarray) -> np.ndarray:
        """Returns the distance of each node from the nearest perturbed one, in edges, long [N].

        It is -1 for a node that none leads to.
        """
        steps = np.full(self.num_nodes, -1)
        steps[perturbed] = 0
        is_reached = steps == 0
        num_steps = 0
        while is_reached.any():
            num_steps += 1
            is_target = np.zeros(self.num_nodes, dtype=bool)
            is_target[self.target[is_reached[self.source]]] = True
            is_reached = is_target & (steps < 0)
            steps[is_reached] = num_steps
        return steps

    def last_relations(self, node: int, steps: np.ndarray) -> str:
        """Returns the relations of the last edges on the ways to a node, given all `steps`."""
        edges = slice(self.target_ptr[node], self.target_ptr[node + 1])
        is_last = (steps[node] > 0) & (steps[self.source[edges]] == steps[node] - 1)
        numbers = np.unique(self.relation[edges][is_last])
        return ",".join(self.relations[number].replace(",", r"\,") for number in numbers)


def name_contributions(
    values: Tensor, samples: Tables, ways: ShortestWays
) -> Iterator[list[list[Contribution]]]:
    """Yields the contributions to each score of each sample, without those of 0.

    `values` are `largest_contributions` of n samples, [n, T, K, 2].
    """
    ptr = samples.perturbed_ptr.tolist()
    for row, of_targets in enumerate(values.tolist()):
        steps = ways.steps(samples.perturbed[ptr[row] : ptr[row + 1]].numpy())
        named = []
        for pairs in of_targets:
            contributions = []
            for number, value in pairs:
                node = int(number)
                if value and steps[node] >= 0:
                    relations = ways.last_relations(node, steps)
                    name = samples.genes[node]
                    contributions.append(Contribution(name, value, int(steps[node]), relations))
            named.append(contributions)
        yield named
