"""Plans which states a batch's knock-outs change, layer by layer, for `model_reach.py`.

Shapes: N nodes, R relations, B samples in the batch, b samples in a block of the batch, P perturbed
nodes in a block, H hidden channels. For each layer of a plan: S states that differ after the layer,
L states that differ before it, and K pairs of a sender and a relation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.utils import cumsum

from mask import SharedGraph, num_samples, starts_of_samples
from mask_product import CSR


class ReachedStates(NamedTuple):
    """The S states of a block that differ from the intact graph after one layer, and how.

    The states are sorted by sample and node. They differ because some nodes send different
    messages. These *senders* are, in this order:

    - the P perturbed nodes. Intact, they would send their h. At a level, they send level * h, so
      their contribution is (1 - level) * (-h).
    - the L states that already differed before the layer. Their contribution is their level times
      the change of their h.

    A sender has a contribution for each relation, because each relation has its own gate. The
    matrix [S, K + L] sums these contributions. Column k < K belongs to `sender[k]` and
    `relation[k]`. It contains the weights of the sender's edges in this relation, times the factor
    1 - level or level from the list. Column K + l belongs to the l-th state that differed before
    the layer. It is 1 in the row of this state, because the state changes its own root term.
    """

    node: Tensor  # node of each state, long [S]
    sample: Tensor  # sample of each state, relative to the block's first sample, long [S]
    previous: Tensor  # index of each state of the previous layer among these states, long [L]
    sender: Tensor  # index of the sender of each column, from 0 to P + L - 1, long [K]
    relation: Tensor  # relation of each column, long [K]
    matrix: CSR  # [S, K + L]
    transpose: CSR  # its transpose, [K + L, S], for the backward pass


class ReachBlock(NamedTuple):
    """A block of b consecutive samples of a batch, and the states that differ in its first layers.

    The first five fields are the same as in a batch of only these samples.
    """

    perturbed: Tensor  # perturbed nodes of all samples, long [P]
    perturbed_batch: Tensor  # sample of each perturbed node, from 0 to b - 1, long [P]
    perturbed_ptr: Tensor  # offset of each sample's perturbed nodes, long [b + 1]
    level: Tensor  # level of each perturbed node, [P]
    starts: np.ndarray  # result of `starts_of_samples`, [2, b + 1]
    layers: Sequence[ReachedStates] = ()  # one for each planned layer, beginning with the first

    @property
    def num_samples(self) -> int:
        return len(self.perturbed_ptr) - 1


class Scratch(NamedTuple):
    """Reused memory of the planner, with an entry for each state of a block, [b * N].

    The state of node n in sample k has the number k * N + n. The planner writes only the entries of
    states that differ or belong to perturbed nodes, which are few. It resets `level` and
    `is_reached` before it plans the next block.
    """

    level: np.ndarray  # level of the node, float64; 1 except while a block is planned
    is_reached: np.ndarray  # whether a layer changes the state; False except while it is planned
    row: np.ndarray  # index of the state among the states that a layer changes, int32

    @classmethod
    def of_size(cls, num_states: int) -> "Scratch":
        level = np.ones(num_states)
        is_reached = np.zeros(num_states, dtype=bool)
        return cls(level, is_reached, row=np.empty(num_states, dtype=np.int32))


class ReachPlanner:
    """Plans which states of a batch differ from the intact graph, layer by layer, on the CPU.

    As the `transform` of a `data.KnockoutDataset`, it adds a field `plan` to each batch, a list of
    `ReachBlock`s. A layer changes the states of the living nodes to which an edge leads from a
    perturbed node, or from a node whose state differed before the layer. States that differed
    before the layer also differ after it. The plan of a block ends before the first layer that
    would be faster on all nodes, and after at most `num_layers` layers.
    """

    # Largest number of samples in a block on a CPU: the states that differ should fit in the cache
    # of a core. On a GPU, blocks are larger, because this needs fewer kernel launches.
    BLOCK = 32
    STATES = 2**23  # largest number of all states in a block; with 32 channels, they need 1 GB
    # Largest number of states in a block that differ, estimated at the start. With 32 channels,
    # they need 32 MB, which is the most that malloc keeps for reuse.
    REACHED = 2**18
    # Largest number of edges of a planned layer for each sample: this fraction of all edges, plus
    # this number for each node. With more edges, a layer on all nodes is faster (measured).
    EDGE_SHARE = 0.04
    EDGES_PER_NODE = 13.0

    def __init__(self, graph: SharedGraph, num_layers: int):
        self.num_nodes = graph.num_nodes
        self.num_layers = num_layers
        self.out_degree = graph.out_degree
        num_edges = sum(graph.num_edges.values())
        self.max_edges = self.EDGE_SHARE * num_edges + self.EDGES_PER_NODE * self.num_nodes
        # The edges are sorted by source and relation. A group consists of all edges with the same
        # source and relation.
        source, target = graph.edge_index.cpu()
        num_relations = len(graph.relations)
        relation = torch.repeat_interleave(graph.edge_counts.cpu())
        group, order = (source * num_relations + relation).sort(stable=True)
        self.target = target[order].numpy()
        self.weight = graph.edge_weight.cpu()[order]
        group, size = group.unique_consecutive(return_counts=True)
        self.group_relation = (group % num_relations).numpy()
        self.group_ptr = cumsum(size).numpy()  # offset of the edges of each group
        # Offset of the groups of each source.
        self.node_ptr = index2ptr(group // num_relations, self.num_nodes).numpy()
        self.block = max(1, self.STATES // self.num_nodes)
        if graph.device.type == "cpu":
            self.block = min(self.BLOCK, self.block)
        self.num_states = self.block * self.num_nodes
        self.scratch = []  # one `Scratch`, except while a batch is planned

    def __call__(self, batch: Data) -> Data:
        """Adds the field `plan` to a batch on the CPU, and returns the batch."""
        batch.plan = self.plan(batch)
        return batch

    def plan(self, batch: Data) -> list[ReachBlock]:
        """Returns the plan of a batch on the CPU, in blocks of at most `self.block` samples."""
        # If planning is interrupted, this list remains empty: the memory may not have been reset.
        scratch = self.scratch.pop() if self.scratch else Scratch.of_size(self.num_states)
        blocks = []
        for first in range(0, max(1, num_samples(batch)), self.block):
            ptr = batch.perturbed_ptr[first : first + self.block + 1]
            knockouts = slice(ptr[0], ptr[-1])
            sample = batch.perturbed_batch[knockouts] - first
            perturbed = batch.perturbed[knockouts]
            starts = starts_of_samples(perturbed, ptr - ptr[0], self.out_degree)
            level = batch.level[knockouts]
            block = ReachBlock(perturbed, sample, ptr - ptr[0], level, starts)
            blocks.append(block._replace(layers=self._plan_layers(block, scratch)))
        self.scratch = [scratch]
        return blocks

    def _plan_layers(self, block: ReachBlock, scratch: Scratch) -> list[ReachedStates]:
        """Returns the states of a block that differ after each layer.

        The list ends before the first layer with more than `self.max_edges` edges for each sample.
        """
        perturbed = (block.perturbed_batch * self.num_nodes + block.perturbed).numpy()
        scratch.level[perturbed] = block.level
        layers = []
        reached = perturbed[:0]
        for _ in range(self.num_layers):
            senders = np.concatenate([perturbed, reached])
            sender_node = senders % self.num_nodes
            first_group = self.node_ptr[sender_node]
            last_group = self.node_ptr[sender_node + 1]
            num_edges = (self.group_ptr[last_group] - self.group_ptr[first_group]).sum()
            if num_edges + len(senders) > block.num_samples * self.max_edges:
                break
            sender = np.repeat(np.arange(len(senders)), last_group - first_group)
            group = ranges(first_group, last_group)
            factor = np.concatenate([1 - scratch.level[perturbed], scratch.level[reached]])
            first_state = senders - sender_node  # number of the state of node 0 in the same sample
            previous = reached
            reached, *matrices = self._layer(
                group, first_state[sender], factor[sender], previous, scratch
            )
            reached_sample, reached_node = np.divmod(reached, self.num_nodes)
            layers.append(
                ReachedStates(
                    node=torch.from_numpy(reached_node),
                    sample=torch.from_numpy(reached_sample),
                    previous=torch.from_numpy(scratch.row[previous]).long(),
                    sender=torch.from_numpy(sender),
                    relation=torch.from_numpy(self.group_relation[group]),
                    matrix=matrices[0],
                    transpose=matrices[1],
                )
            )
        scratch.level[perturbed] = 1
        return layers

    def _layer(
        self,
        group: np.ndarray,
        first_state: np.ndarray,
        factor: np.ndarray,
        previous: np.ndarray,
        scratch: Scratch,
    ) -> tuple[np.ndarray, CSR, CSR]:
        """Returns the states that differ after a layer, and the matrix of `ReachedStates`.

        Args:
            group: group of edges of each column, long [K].
            first_state: number of the state of node 0 in the sample of each column, long [K].
            factor: factor of the edge weights in each column, 1 - level or level, [K].
            previous: numbers of the states that differed before the layer, long [L].
            scratch: memory to use.

        Returns:
            The numbers of the states in ascending order, long [S]; the matrix, [S, K + L]; and its
            transpose.
        """
        first_edge = self.group_ptr[group]
        last_edge = self.group_ptr[group + 1]
        column = np.repeat(np.arange(len(group), dtype=np.int32), last_edge - first_edge)
        edge = ranges(first_edge, last_edge)
        target = first_state[column] + self.target[edge]
        alive = scratch.level[target] > 0
        column = column[alive]
        weight = self.weight.index_select(0, torch.from_numpy(edge[alive]))
        if (factor != 1).any():
            weight.mul_(torch.from_numpy(factor[column]))
        target = np.concatenate([target[alive], previous])
        of_previous = len(group) + np.arange(len(previous), dtype=np.int32)
        column = torch.from_numpy(np.concatenate([column, of_previous]))
        weight = torch.cat([weight, weight.new_ones(len(previous))])

        # This lists the distinct states in ascending order, in a third of the time of sorting them.
        scratch.is_reached[target] = True
        reached = np.flatnonzero(scratch.is_reached)
        scratch.is_reached[reached] = False
        scratch.row[reached] = np.arange(len(reached))

        row = scratch.row[target]
        # The order of the entries by row. Entries of the same row keep their order. Sorting
        # distinct keys takes half the time of a stable argsort.
        num_entries = len(row)
        key = row.astype(np.int64) * num_entries + np.arange(num_entries)
        order = torch.from_numpy(np.sort(key) % max(1, num_entries))
        row = torch.from_numpy(row)
        row_ptr = index2ptr(row.index_select(0, order), len(reached))
        matrix = CSR(row_ptr, column.index_select(0, order), weight.index_select(0, order))
        transpose = CSR(index2ptr(column, len(group) + len(previous)), row, weight)
        return reached, matrix, transpose


def ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Returns the concatenation of the ranges from first[i] to last[i] - 1, for all i."""
    length = last - first
    end = length.cumsum()
    return np.arange(length.sum()) + np.repeat(last - end, length)
