"""Which states a batch's knock-outs change, so that only these are computed; choice of route.

Most states do not differ from the intact graph's. `ReachPlanner` lists those that do, layer by
layer, from the topology alone; `plan_route` decides whether that pays.

Shapes: N nodes, R relations, B samples with P perturbed nodes in the batch, H hidden channels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.utils import cumsum

from mask import SharedGraph, num_samples


class ReachedStates(NamedTuple):
    """Which S states differ from the intact graph's after one layer, in a block of samples.

    They are sorted by sample and node. The matrix [S, K + L] sums what the senders contribute to
    them: the perturbed nodes, of whose states 1 - level is taken back, and after these the L states
    that differed before the layer, sent times their level. Column k < K holds the out-edges of
    `sender[k]` by `relation[k]`, column K + l state l itself.
    """

    node: Tensor  # long [S]
    sample: Tensor  # long [S], counted from the block's first sample
    previous: Tensor  # long [L], where the states of the layer before stand among these
    sender: Tensor  # long [K]
    relation: Tensor  # long [K]
    matrix: tuple[Tensor, ...]  # for `spmm`


class ReachBlock(NamedTuple):
    """Some consecutive samples of a batch: what they change in the first `len(layers)` layers."""

    perturbed: Tensor  # and the next three as in a batch
    perturbed_batch: Tensor
    perturbed_ptr: Tensor
    level: Tensor
    layers: Sequence[ReachedStates] = ()

    @classmethod
    def of(cls, batch: Data) -> "ReachBlock":
        """Returns all samples of a batch as one block without a plan."""
        return cls(batch.perturbed, batch.perturbed_batch, batch.perturbed_ptr, batch.level)

    @property
    def num_samples(self) -> int:
        return len(self.perturbed_ptr) - 1


class ReachPlanner:
    """Finds the states that samples change, layer by layer, from the topology alone, on the CPU.

    A layer changes the living out-neighbours of the perturbed nodes and of the nodes that the layer
    before has changed. As the `transform` of a `data.KnockoutDataset` it adds `reach` to each
    batch, a list of `ReachBlock`. A block's plan ends before the first layer that is cheaper on all
    nodes.
    """

    BLOCK = 32  # samples whose reached states stay in a core's cache; a GPU has fewer launches
    STATES = 2**23  # in a block, on all nodes: with 32 channels, they take 1 GB
    REACHED = 2**18  # of them: with 32 channels, 32 MB, the most that malloc keeps for another use
    # A layer on all nodes costs as much as this share of all edges in a plan, and so many edges per
    # node (measured).
    EDGE_SHARE = 0.04
    EDGES_PER_NODE = 13.0

    def __init__(self, graph: SharedGraph, num_layers: int):
        self.num_nodes = graph.num_nodes
        self.num_layers = num_layers
        num_edges = sum(graph.num_edges.values())
        self.max_edges = self.EDGE_SHARE * num_edges + self.EDGES_PER_NODE * self.num_nodes
        # The edges sorted by source and, of each source, by relation: a group is those of both.
        source, target = graph.edge_index.cpu()
        num_relations = len(graph.relations)
        relation = torch.repeat_interleave(graph.edge_counts.cpu())
        group, order = (source * num_relations + relation).sort(stable=True)
        self.target = target[order].numpy()
        self.weight = graph.edge_weight.cpu()[order]
        group, size = group.unique_consecutive(return_counts=True)
        self.group_relation = (group % num_relations).numpy()
        self.group_ptr = cumsum(size).numpy()  # of edges
        self.node_ptr = index2ptr(group // num_relations, self.num_nodes).numpy()  # of groups
        self.block = max(1, self.STATES // self.num_nodes)
        if graph.device.type == "cpu":
            self.block = min(self.BLOCK, self.block)
        # Of the states of a block, numbered sample * N + node. Only entries of reached states are
        # written, as most states are not, and those of `level` and `is_reached` are set back.
        num_states = self.block * self.num_nodes
        self.level = np.ones(num_states)
        self.is_reached = np.zeros(num_states, dtype=bool)
        self.row = np.empty(num_states, dtype=np.int32)  # in the plan of a layer

    def __call__(self, batch: Data) -> Data:
        """Adds `reach` to a batch on the CPU, and returns it."""
        batch.reach = self.plan(batch)
        return batch

    def plan(self, batch: Data) -> list[ReachBlock]:
        """Returns the plan of a batch on the CPU, in blocks of samples."""
        blocks = []
        for first in range(0, max(1, num_samples(batch)), self.block):
            ptr = batch.perturbed_ptr[first : first + self.block + 1]
            knockouts = slice(ptr[0], ptr[-1])
            sample = batch.perturbed_batch[knockouts] - first
            block = ReachBlock(
                batch.perturbed[knockouts], sample, ptr - ptr[0], batch.level[knockouts]
            )
            blocks.append(block._replace(layers=self._plan_layers(block)))
        return blocks

    def _plan_layers(self, block: ReachBlock) -> list[ReachedStates]:
        perturbed = (block.perturbed_batch * self.num_nodes + block.perturbed).numpy()
        self.level[perturbed] = block.level
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
            factor = np.concatenate([1 - self.level[perturbed], self.level[reached]])
            first_state = senders - sender_node  # of the same sample
            previous = reached
            reached, matrix = self._layer(group, first_state[sender], factor[sender], previous)
            reached_sample, reached_node = np.divmod(reached, self.num_nodes)
            layers.append(
                ReachedStates(
                    node=torch.from_numpy(reached_node),
                    sample=torch.from_numpy(reached_sample),
                    previous=torch.from_numpy(self.row[previous]).long(),
                    sender=torch.from_numpy(sender),
                    relation=torch.from_numpy(self.group_relation[group]),
                    matrix=matrix,
                )
            )
        self.level[perturbed] = 1
        return layers

    def _layer(
        self, group: np.ndarray, first_state: np.ndarray, factor: np.ndarray, previous: np.ndarray
    ) -> tuple[np.ndarray, tuple[Tensor, ...]]:
        """Returns the living states that edges reach, ascending, and the matrix of `ReachedStates`.

        Column k has the edges of group[k] times factor[k], which lead to states of the sample whose
        node 0 is first_state[k]. `previous` are the states that reach themselves.
        """
        first_edge = self.group_ptr[group]
        last_edge = self.group_ptr[group + 1]
        column = np.repeat(np.arange(len(group), dtype=np.int32), last_edge - first_edge)
        edge = ranges(first_edge, last_edge)
        target = first_state[column] + self.target[edge]
        alive = self.level[target] > 0
        column = column[alive]
        weight = self.weight.index_select(0, torch.from_numpy(edge[alive]))
        if (factor != 1).any():
            weight.mul_(torch.from_numpy(factor[column]))
        target = np.concatenate([target[alive], previous])
        of_previous = len(group) + np.arange(len(previous), dtype=np.int32)
        column = torch.from_numpy(np.concatenate([column, of_previous]))
        weight = torch.cat([weight, weight.new_ones(len(previous))])

        # Marking states takes a third of sorting them, and gives them in ascending order, too.
        self.is_reached[target] = True
        reached = np.flatnonzero(self.is_reached)
        self.is_reached[reached] = False
        self.row[reached] = np.arange(len(reached))

        row = self.row[target]
        # Of equal rows, the first comes first. Sorting distinct numbers takes half the time of a
        # stable argsort.
        num_entries = len(row)
        key = row.astype(np.int64) * num_entries + np.arange(num_entries)
        order = torch.from_numpy(np.sort(key) % max(1, num_entries))
        row = torch.from_numpy(row)
        row_ptr = index2ptr(row.index_select(0, order), len(reached))
        by_row = (row_ptr, column.index_select(0, order), weight.index_select(0, order))
        by_column = (index2ptr(column, len(group) + len(previous)), row, weight)
        return reached, (*by_row, *by_column)


def ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Returns the numbers from first[i] to last[i] - 1 for each i, one after the other."""
    length = last - first
    end = length.cumsum()
    return np.arange(length.sum()) + np.repeat(last - end, length)


def plan_route(
    graph: SharedGraph, dataset: Dataset, message_passing: str, num_layers: int
) -> tuple[ReachPlanner | None, str]:
    """Returns what plans batches as the option `message_passing` needs, and a line for the log.

    `auto` takes `reach` if the plan of some hundred rows of the dataset covers more than the first
    layer. `shared` plans that one, too: all samples enter it with the same states, so little of it
    changes on any graph. Any other, such as `expanded`, works on copies and needs no plan.
    """
    if message_passing not in ("auto", "shared", "reach"):
        return None, message_passing
    if message_passing == "auto" and graph.device.type == "cuda":
        message_passing = "shared"  # a GPU computes all states sooner than the CPU plans (measured)
    planner = ReachPlanner(graph, 1 if message_passing == "shared" else num_layers)
    some_rows = range(0, len(dataset), len(dataset) // 128 + 1)  # evenly spaced
    blocks = planner.plan(dataset.__getitems__(some_rows))
    num_planned = min(len(block.layers) for block in blocks)
    if message_passing != "reach":
        planner.num_layers = num_planned
    route = message_passing
    if route == "auto":
        route = "reach" if num_planned >= min(2, num_layers) else "shared"
    percentages = []
    for depth in range(num_planned):
        num_reached = sum(len(block.layers[depth].node) for block in blocks) / len(some_rows)
        planner.block = min(planner.block, max(1, int(planner.REACHED / max(1, num_reached))))
        percentages.append(f"{100 * num_reached / graph.num_nodes:.2g}")
    reached = f"{', '.join(percentages)} % of the nodes in {num_planned} of {num_layers} layers"
    return planner, f"a knock-out reaches {reached}: {route}"


def block_size(wild_type: Tensor, num_relations: int) -> int:
    """Returns for how many samples states fit in 1 MB, about a CPU core's cache.

    On a GPU, it is for how many each relation's sums of states fit in 4 GB together.
    """
    size = 2**32 // num_relations if wild_type.is_cuda else 2**20
    return max(1, size // (wild_type.numel() * wild_type.element_size()))
