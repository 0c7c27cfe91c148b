"""The readout `nodes`: if each score is the effect on a node, it is read from that node's state.

Shapes: N nodes, B samples with P perturbed nodes, T targets, H hidden channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from data_tables import Tables
from errors import DataError, UserError
from model import KnockoutTerm, WildType


class NodeReadout(KnockoutTerm):
    """The effect on each target node, computed from the change of that node's own state.

    An effect is a sum over channels: a function of the change, which is 0 for no change, weighted
    with a function of the node's wild-type state. If the target itself is perturbed, 1 - level
    times another function of its wild-type state is added. Deleted targets have no state of their
    own. Both terms are 0 at the start of training.

    Args:
        target_nodes: the node of each target, long [T].
    """

    def __init__(self, num_nodes: int, hidden: int, target_nodes: Tensor):
        super().__init__()
        self.width = num_nodes
        self.change = nn.Linear(hidden, 2 * hidden, bias=False)
        self.weight = nn.Linear(hidden, 2 * hidden)
        self.dead = nn.Linear(hidden, 1)
        for layer in (self.weight, self.dead):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.register_buffer("target_nodes", target_nodes)

    def effect(self, change: Tensor, wild_type: Tensor) -> Tensor:
        """Returns the effects on nodes, [...], given their changes and wild types, [..., H]."""
        response = nn.functional.gelu(self.change(change))
        return (response * self.weight(wild_type)).sum(-1).to(change.dtype)

    def pool(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Returns the effects [b, N], given all changes [N, b, H]; effects on dead nodes are 0."""
        return (self.effect(change * wild.draws.node_dropout.unsqueeze(1), wild.final) * alive).T

    def pool_reached(self, change: Tensor, before: Tensor, block: Any, wild: WildType) -> Tensor:
        """Returns the effects [b, N], given only the S states that change.

        This method is for `model_reach.py`. The states are `before` in the wild type and change by
        `change`, [S, H] each, in the samples of a `ReachBlock`.
        """
        last = block.layers[-1]
        change = change * wild.draws.node_dropout.index_select(0, last.node)
        none = change.new_zeros(block.num_samples, self.width)
        return none.index_put((last.sample, last.node), self.effect(change, before))

    def read(self, pooled: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Returns the effects on the targets, [B, T], given those on all nodes, [B, N].

        It adds the direct effects of the perturbed nodes on themselves.
        """
        states = wild.final.squeeze(1).index_select(0, batch.perturbed)
        direct = ((1 - batch.level) * self.dead(states).squeeze(1)).to(pooled.dtype)
        entries = (batch.perturbed_batch, batch.perturbed)
        effects = pooled.index_put(entries, direct, accumulate=True)
        return effects.index_select(1, self.target_nodes)


def node_readout(task: Any) -> NodeReadout:
    """Returns the readout for the model of a `KnockoutTask`; raises `UserError`."""
    columns = task.criterion.columns
    if len(columns) > 1:
        raise UserError(
            f"optim.loss={task.config.optim.loss} needs several outputs for each score "
            f"({', '.join(columns)}), but model.readout=nodes has one: set model.readout=both"
        )
    nodes = target_nodes(task.tables)
    return NodeReadout(len(task.tables.genes), task.config.model.hidden, nodes)


def target_nodes(tables: Tables) -> Tensor:
    """Returns the node of each target, long [T]; raises `DataError` if a target is not a node."""
    number = {gene: node for node, gene in enumerate(tables.genes)}
    others = [name for name in tables.targets if name not in number]
    if others:
        raise DataError(
            f"model.readout=nodes needs scores that are named after nodes, but {len(others):,} of "
            f"{len(tables.targets):,} are not: {', '.join(others):.300}: remove these columns, or "
            "set model.readout=both"
        )
    return torch.tensor([number[name] for name in tables.targets])
