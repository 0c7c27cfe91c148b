"""Computes only the states that a batch's knock-outs change, instead of the states of all nodes.

On a sparse graph, most states in a sample are the same as on the intact graph: after the first
layer, only the targets of the perturbed nodes differ; after the second layer, their targets differ,
too. This module computes only the states that differ, and `model.py` computes all states:

1. `ReachPlanner` makes a *plan* of each batch on the CPU: for each layer, a list of the states that
   differ, and a sparse matrix that sums the changes of their messages. A plan depends only on the
   edges, the perturbed nodes and their levels, not on the parameters of the model.
2. `ReachPlan.pooled` computes these states, and returns the same result as `KnockoutTerm.pooled`.
3. `plan_route` decides whether plans are faster, and `plan_fits` checks whether they are correct.

This part is optional: a copy with model.message_passing=shared does not need this file. It supports
the layers `FirstConv` and `KnockoutConv` (see `update_of_reached`), the readout `GlobalReadout`,
and readouts whose class has a method `pool_reached`. All other readouts get the states of all nodes
after the last layer.

Shapes: N nodes, R relations, B samples in the batch, b samples in a block of the batch, P perturbed
nodes in a block, H hidden channels. For each layer of a plan: S states that differ after the layer,
L states that differ before it, and K pairs of a sender and a relation.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.utils import cumsum

from errors import counted
from mask import Samples, SharedGraph, num_samples, starts_of_samples
from mask_product import CSR, sparse_product
from model import FirstConv, GlobalReadout, KnockoutConv, KnockoutGNN, KnockoutTerm, WildType

log = logging.getLogger("model_reach")


# ---- Plans ---------------------------------------------------------------------------------------
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


class ReachPlan(NamedTuple):
    """The plan of a batch, `batch.plan`."""

    blocks: list[ReachBlock]

    def pooled(self, term: KnockoutTerm, graph: SharedGraph, wild: WildType) -> Tensor:
        """Returns the pooled changes of all samples, [B, width], as `KnockoutTerm.pooled` does.

        For each block, `encode_reached` computes the planned layers, with only the states that
        differ. If these are all layers, the readout `term` pools only the states that differ, if it
        can. Otherwise, `pool_all` runs the remaining layers on all nodes, and pools all states.
        """
        encoder = wild.encoder
        pooled = []
        for block in self.blocks:
            reached = encoder.checkpointed(encode_reached, block, wild)
            pool = None
            if len(block.layers) == len(wild.layers):
                pool = pool_of_reached(type(term))
            if pool is not None:
                before = select(wild, wild.final, block.layers[-1].node)
                change = encoder.norm(reached) - before
                pooled.append(pool(term, change, before, block, wild))
            else:
                pooled += pool_all(term, graph, block, reached, wild)
        return torch.cat(pooled)


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

    As the `transform` of a `data.KnockoutDataset`, it adds a field `plan`, a `ReachPlan`, to each
    batch. A layer changes the states of the living nodes to which an edge leads from a perturbed
    node, or from a node whose state differed before the layer. States that differed before the
    layer also differ after it. The plan of a block ends before the first layer that would be faster
    on all nodes, and after at most `num_layers` layers.
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

    def plan(self, batch: Data) -> ReachPlan:
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
        return ReachPlan(blocks)

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


# ---- The pass ------------------------------------------------------------------------------------
def encode_reached(block: ReachBlock, wild: WildType) -> Tensor:
    """Returns the states of a block that differ after its planned layers, [S, H].

    The states are in the order of `block.layers[-1]`. The update of a layer is a linear function of
    h. For a state that differs, it is therefore the update on the intact graph, plus the
    contributions of all changes of h. `change` lists these changes, [P + L, H]. A dead node sends
    nothing, so the change of its h is -h. If a perturbed node is not dead, the plan multiplies this
    change by 1 - level. The other L changes belong to the states that differed before the layer:
    their new h minus their h on the intact graph. Sums are computed in place, because allocating
    new memory takes longer than the sums.
    """
    x = node = None
    layers = [wild.encoder.first, *wild.encoder.layers]
    for depth, plan in enumerate(block.layers):
        layer = layers[depth]
        states = wild.layers[depth]
        x_before = select(wild, states.x, plan.node)
        if depth == 0:
            change = -select(wild, states.h, block.perturbed)  # dead nodes send nothing
        else:
            h_before = select(wild, states.h, torch.cat([block.perturbed, node]))
            h_perturbed, h_reached = h_before.tensor_split([len(block.perturbed)])
            change = torch.cat([-h_perturbed, layer.norm(x) - h_reached])
            x_before.index_copy_(0, plan.previous, x)
        node = plan.node
        update = select(wild, states.update, node).add_(update_of_reached(layer, change, plan))
        x = x_before.add_(nn.functional.gelu(update))
    return x


def update_of_reached(layer: KnockoutConv, change: Tensor, plan: ReachedStates) -> Tensor:
    """Returns the changes of a layer's update in the states that differ after it, [S, H].

    `change` [P + L, H] are the changes of h of the perturbed nodes and of the states that differed
    before the layer. The update is root(h) + out(sums over the edges). Here, root and out come
    first, and the matrix of the plan then computes the sums. The order does not matter, because all
    three are linear.
    """
    gate = (layer.SCALE * layer.gate).index_select(0, plan.relation)
    by_relation = layer.out(change.index_select(0, plan.sender) * gate)  # [K, H]
    _, change_of_reached = change.tensor_split([len(change) - len(plan.previous)])
    by_root = nn.functional.linear(change_of_reached, layer.root.weight)
    return spmm(plan.matrix, plan.transpose, torch.cat([by_relation, by_root]))


def spmm(matrix: CSR, transpose: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x, [M, H], in the dtype of x [columns, H].

    The backward pass uses `transpose`, which must be the transpose of the matrix [M, columns].
    """
    return _SparseProduct.apply(x, matrix, transpose)


class _SparseProduct(torch.autograd.Function):
    """Implements `spmm`; torch's own sparse product sorts the transpose in each backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, matrix: CSR, transpose: CSR) -> Tensor:
        ctx.matrix = matrix
        ctx.transpose = transpose
        return sparse_product(matrix, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return spmm(ctx.transpose, ctx.matrix, grad), None, None


def pool_all(
    term: KnockoutTerm, graph: SharedGraph, block: ReachBlock, reached: Tensor, wild: WildType
) -> Iterator[Tensor]:
    """Yields the result of `KnockoutTerm.pooled` for a few samples of a block at a time.

    A result is [samples, width]. The results contain each of the b samples of the block once. The
    states after the planned layers are the states on the intact graph, except for `reached` [S, H],
    the result of `encode_reached`. All later layers then run on all nodes, with as many samples at
    once as in `KnockoutTerm.forward`.
    """
    depth = len(block.layers)
    encoder = wild.encoder
    blocks = graph.in_blocks(Data(**block._asdict()), wild.final)
    if depth == 0:
        for samples in blocks:
            yield encoder.checkpointed(term.pooled, graph, samples, wild)
        return
    x = wild.layers[depth - 1].after.transpose(0, 1).expand(block.num_samples, -1, -1)
    x = x.index_put((block.layers[-1].sample, block.layers[-1].node), reached)
    for states, samples in zip(x.split(graph.samples_at_once(wild.final)), blocks, strict=True):
        states = states.transpose(0, 1).contiguous()
        yield encoder.checkpointed(pool_further, term, graph, states, depth, samples, wild)


def pool_further(
    term: KnockoutTerm,
    graph: SharedGraph,
    x: Tensor,
    depth: int,
    samples: Samples,
    wild: WildType,
) -> Tensor:
    """Returns the pooled changes of some samples, [samples, width].

    `x` [N, samples, H] are the states of all nodes after the first `depth` layers, at least one. It
    runs the other layers, and pools the changes of the states after the last layer.
    """
    encoder = wild.encoder
    for conv in encoder.layers[depth - 1 :]:
        x = conv(x, graph, samples.level)
    return term.pool(encoder.norm(x) - wild.final, samples.level > 0, wild)


def select(wild: WildType, states: Tensor, node: Tensor) -> Tensor:
    """Returns the states of some nodes on the intact graph, `states[node]`, [S, H].

    `states` are [N, 1, H], and `node` is long [S]. The gradient of `states` is sparse if S < N, so
    that its cost does not depend on N. Autograd adds it to the dense gradient from the rest of the
    pass on the intact graph. With readout=global, the last states do not have such a dense
    gradient, so the gradients are always dense. For a dense gradient on a CPU, `index_select` takes
    less than half the time of `embedding`.
    """
    if wild.encoder.config.readout != "global" and len(node) < len(states):
        return nn.functional.embedding(node, states.squeeze(1), sparse=True)
    return states.squeeze(1).index_select(0, node)


# ---- Pooling of reached states -------------------------------------------------------------------
@functools.cache
def pool_of_reached(readout: type[KnockoutTerm]) -> Callable[..., Tensor] | None:
    """Returns a function that computes the result of a readout's `pool` from changed states only.

    Its arguments are the readout, the changes of the S states that differ, [S, H], their values on
    the intact graph, [S, H], their block with b samples, and the wild type. Its result is
    [b, width]. If the class `readout` does not define a method `pool_reached`, this returns None,
    and logs once that the readout gets the states of all nodes. An inherited method is not used,
    because a subclass may define a different `pool`.
    """
    if readout is GlobalReadout:
        return sum_reached
    if "pool_reached" not in vars(readout):
        log.info(
            f"note      {readout.__name__} reads the states of all nodes, because it does not have "
            "a method pool_reached"
        )
        return None
    return readout.pool_reached


def sum_reached(
    readout: GlobalReadout, change: Tensor, before: Tensor, block: ReachBlock, wild: WildType
) -> Tensor:
    """Returns the result of `GlobalReadout.pool`, the sums of the changes in each sample, [b, H].

    `change` [S, H] are the changes of the states that differ. All other changes are 0.
    """
    total = change.new_zeros(block.num_samples, change.size(1))
    # The backward pass of index_add is cheap: its gradient is only a copy.
    return total.index_add(0, block.layers[-1].sample, change)


# ---- Choice of route -----------------------------------------------------------------------------
def plan_route(
    graph: SharedGraph, dataset: Dataset, message_passing: str, num_layers: int
) -> tuple[ReachPlanner | None, str]:
    """Decides which layers are planned, and returns the planner and a text for the log.

    It plans about a hundred rows of the dataset, and counts the layers that are faster with a plan
    in all blocks of these rows. Then:

    - `reach` plans as many layers of each block as are faster with a plan.
    - `shared` plans at most the first layer, which changes few states on any graph.
    - `auto` is `reach` if at least two layers, or the only layer, are faster with a plan. If not,
      it is `shared`.

    On a GPU, `shared` and `auto` do not plan anything, and the planner is None, because the GPU
    finds these states faster than the CPU (measured).
    """
    if graph.is_on_gpu and message_passing != "reach":
        return None, "message_passing=shared"
    planner = ReachPlanner(graph, 1 if message_passing == "shared" else num_layers)
    some_rows = range(0, len(dataset), len(dataset) // 128 + 1)  # evenly spaced rows
    blocks = planner.plan(dataset.__getitems__(some_rows)).blocks
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
    layers = f"{num_planned} of {counted(num_layers, 'layer')}"
    changed = f"{' %, '.join(percentages)} % of the node states in {layers}"
    if num_planned == 0:
        changed = "too many node states to plan any layer"
    return planner, f"a knock-out changes {changed}; message_passing={route}"


def plan_fits(model: KnockoutGNN, graph: SharedGraph, dataset: Dataset) -> bool:
    """Returns whether plans of a dataset's batches are correct for a model, see `is_exact`.

    Logs a warning if they are not. The dataset's `transform` must be a `ReachPlanner`.
    """
    fits = is_exact(model, graph, dataset.__getitems__([0, 0, 0]), dataset.transform)
    if not fits:
        log.warning(
            "note      all states are computed, which is slower, because model_reach.py does not "
            "compute the same state changes as the model: edit model_reach.py to match the model, "
            "or delete it and set model.message_passing=shared"
        )
    return fits


@torch.no_grad()
def is_exact(model: KnockoutGNN, graph: SharedGraph, batch: Data, planner: ReachPlanner) -> bool:
    """Returns whether a plan gives the same pooled changes as the model itself, for three samples.

    They differ if an edited layer or readout computes a different function than this module. The
    comparison uses a copy of the model with noise on its parameters and saved buffers, because
    values that start neutral, such as zeros, would hide a difference. `batch` has three samples and
    is on the CPU. Each sample is replaced: it perturbs one node from which edges leave, at the
    levels 0, 0.3 and 2.
    """
    layers = [model.encoder.first, *model.encoder.layers]
    if any(type(layer) not in (FirstConv, KnockoutConv) for layer in layers):
        return False
    senders = graph.out_degree.argsort()[(graph.out_degree == 0).sum() :]
    if len(senders) == 0:
        return True
    # The nodes at the quartiles of the out-degree.
    quartiles = torch.tensor([0.25, 0.5, 0.75]) * len(senders)
    batch.perturbed = senders[quartiles.long()]
    batch.perturbed_batch = torch.arange(3)
    batch.perturbed_ptr = torch.arange(4)
    batch.level = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    batch.starts = starts_of_samples(batch.perturbed, batch.perturbed_ptr, graph.out_degree)
    batch = planner(batch).to(graph.device)
    batch.seed = torch.zeros((), dtype=torch.long, device=graph.device)
    probe = copy.deepcopy(model).train()
    generator = torch.Generator().manual_seed(0)
    for value in probe.state_dict().values():
        if value.is_floating_point():
            value += 0.1 * torch.rand(value.shape, generator=generator).to(value)
    term = probe.terms["knockout"]
    wild = probe.wild_type(graph, batch)
    planned = batch.plan.pooled(term, graph, wild)
    blocks = graph.in_blocks(batch, wild.final)
    expected = torch.cat([term.pooled(graph, samples, wild) for samples in blocks])
    # The rounding errors of the states of thousands of nodes add up.
    tolerance = 1e-3 * (1 + expected.abs().amax())
    return bool((planned - expected).abs().amax() <= tolerance)
