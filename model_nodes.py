"""The readout `nodes`, for scores that are effects on nodes, such as expression profiles.

The name of each score must be the name of a node. The effect on a node is computed from the change
of the state of the same node.

Shapes: N nodes, B samples with P perturbed nodes in the batch, b samples in a block of the batch, T
targets, H hidden channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from data_tables import Tables
from errors import DataError, UserError, counted
from model import KnockoutTerm, WildType


class NodeReadout(KnockoutTerm):
    """The effects on all target nodes, [B, T], each computed from the change of the node's state.

    The effect on a node is the sum of two terms, which are 0 at the start of training:

    - For living nodes: sum over channels of gelu(change(c)) * weight(w), where c is the change of
      the node's state and w is its wild-type state. It is 0 if the state does not change.
    - For perturbed nodes: (1 - level) * dead(w). A deleted node does not have a state that could
      change, so this is the only term.

    Args:
        num_nodes: N.
        target_nodes: node of each target, long [T].
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
        """Returns effects on nodes, [...], given their changes and wild-type states, [..., H]."""
        response = nn.functional.gelu(self.change(change))
        return (response * self.weight(wild_type)).sum(-1).to(change.dtype)

    def pool(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Returns the effects on all nodes, [b, N]. They are 0 for dead nodes.

        Args:
            change: change of each node's state in each sample, [N, b, H].
            alive: whether each node lives in each sample, bool [N, b].
            wild: the wild type.
        """
        return (self.effect(change * wild.draws.node_dropout.unsqueeze(1), wild.final) * alive).T

    def pool_reached(self, change: Tensor, before: Tensor, block: Any, wild: WildType) -> Tensor:
        """Returns the same effects as `pool`, [b, N], given only the S states that change.

        This method is for `model_reach.py`.

        Args:
            change: change of each of these states, [S, H].
            before: their values in the wild type, [S, H].
            block: a `ReachBlock` of b samples, which lists the node and the sample of each state.
            wild: the wild type.
        """
        last = block.layers[-1]
        change = change * wild.draws.node_dropout.index_select(0, last.node)
        none = change.new_zeros(block.num_samples, self.width)
        return none.index_put((last.sample, last.node), self.effect(change, before))

    def read(self, pooled: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Returns the effects on the targets, [B, T].

        It adds the direct effects of the perturbed nodes on themselves to the effects on all nodes,
        `pooled` [B, N], and selects the targets.
        """
        states = wild.final.squeeze(1).index_select(0, batch.perturbed)
        direct = ((1 - batch.level) * self.dead(states).squeeze(1)).to(pooled.dtype)
        entries = (batch.perturbed_batch, batch.perturbed)
        effects = pooled.index_put(entries, direct, accumulate=True)
        return effects.index_select(1, self.target_nodes)


def node_readout(task: Any) -> NodeReadout:
    """Returns the readout for the model of a `KnockoutTask`.

    Raises `UserError` if a score has several outputs or is not named after a node.
    """
    columns = task.criterion.columns
    if len(columns) > 1:
        raise UserError(
            f"optim.loss={task.config.optim.loss} needs several outputs for each score "
            f"({', '.join(columns)}), but model.readout=nodes has only one: set model.readout=both"
        )
    nodes = target_nodes(task.tables)
    return NodeReadout(len(task.tables.genes), task.config.model.hidden, nodes)


def target_nodes(tables: Tables) -> Tensor:
    """Returns the node of each target, long [T].

    Raises `DataError` if the name of a target is not the name of a node.
    """
    number = {gene: node for node, gene in enumerate(tables.genes)}
    others = [name for name in tables.targets if name not in number]
    if others:
        raise DataError(
            "model.readout=nodes needs scores that are named after nodes, but there is no node for "
            f"{', '.join(others):.300} ({len(others):,} of {counted(len(tables.targets), 'score')})"
            ": remove these columns, or set model.readout=both"
        )
    return torch.tensor([number[name] for name in tables.targets])
