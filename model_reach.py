"""The pass over the states that a batch's knock-outs change, in place of all; choice of route.

Most states do not differ from the intact graph's. `ReachPlanner` lists those that do, layer by
layer, from the topology alone, and `ReachPlan.pooled` computes from these what
`KnockoutTerm.pooled` does. `plan_route` decides whether that pays, `plan_fits` whether it may.

A copy can do without this file: with model.message_passing=shared, all states are computed. It
knows the layer `KnockoutConv` (see `update_of_reached`), `GlobalReadout` and readouts whose class
has a method `pool_reached`; for another, the last states of all nodes are put together.

Shapes: N nodes, R relations, B samples with P perturbed nodes in the batch, H hidden channels.
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

from mask import Samples, SharedGraph, num_samples, starts_of_samples
from mask_product import CSR, sparse_product
from model import FirstConv, GlobalReadout, KnockoutConv, KnockoutGNN, KnockoutTerm, WildType

log = logging.getLogger("model_reach")


# ---- Plans ---------------------------------------------------------------------------------------
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
    matrix: CSR
    transpose: CSR


class ReachBlock(NamedTuple):
    """Some consecutive samples of a batch: what they change in the first `len(layers)` layers."""

    perturbed: Tensor  # and the next four as in a batch
    perturbed_batch: Tensor
    perturbed_ptr: Tensor
    level: Tensor
    starts: np.ndarray
    layers: Sequence[ReachedStates] = ()

    @property
    def num_samples(self) -> int:
        return len(self.perturbed_ptr) - 1


class ReachPlan(NamedTuple):
    """The plan of a batch, `batch.plan`."""

    blocks: list[ReachBlock]

    def pooled(self, term: KnockoutTerm, graph: SharedGraph, wild: WildType) -> Tensor:
        """Returns the pooled changes of all samples, [B, width], as `KnockoutTerm.pooled`.

        In the layers that the plan covers, only states that change are computed; further layers run
        on all nodes.
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
    """Memory for the states of a block, numbered sample * N + node.

    Only entries of reached states are written, as most states are not. Those of `level` and
    `is_reached` are set back before a next block uses them.
    """

    level: np.ndarray  # float64, 1 but in a block's plan
    is_reached: np.ndarray  # bool, False but in the plan of a layer
    row: np.ndarray  # int32, of reached states, in the plan of a layer

    @classmethod
    def of_size(cls, num_states: int) -> "Scratch":
        level = np.ones(num_states)
        is_reached = np.zeros(num_states, dtype=bool)
        return cls(level, is_reached, row=np.empty(num_states, dtype=np.int32))


class ReachPlanner:
    """Finds the states that samples change, layer by layer, from the topology alone, on the CPU.

    A layer changes the living out-neighbours of the perturbed nodes and of the nodes that the layer
    before has changed. As the `transform` of a `data.KnockoutDataset` it adds `plan` to each
    batch, a `ReachPlan`. A block's plan ends before the first layer that is cheaper on all
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
        self.out_degree = graph.out_degree
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
        self.num_states = self.block * self.num_nodes
        self.scratch = []  # one, but while a batch is planned

    def __call__(self, batch: Data) -> Data:
        """Adds `plan` to a batch on the CPU, and returns it."""
        batch.plan = self.plan(batch)
        return batch

    def plan(self, batch: Data) -> ReachPlan:
        """Returns the plan of a batch on the CPU, in blocks of samples."""
        # An interrupted plan does not give it back: its entries may not be set back.
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
            first_state = senders - sender_node  # of the same sample
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
        """Returns the living states that edges reach, ascending, and matrix and transpose.

        Column k has the edges of group[k] times factor[k], which lead to states of the sample whose
        node 0 is first_state[k]. `previous` are the states that reach themselves.
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

        # Marking states takes a third of sorting them, and gives them in ascending order, too.
        scratch.is_reached[target] = True
        reached = np.flatnonzero(scratch.is_reached)
        scratch.is_reached[reached] = False
        scratch.row[reached] = np.arange(len(reached))

        row = scratch.row[target]
        # Of equal rows, the first comes first. Sorting distinct numbers takes half the time of a
        # stable argsort.
        num_entries = len(row)
        key = row.astype(np.int64) * num_entries + np.arange(num_entries)
        order = torch.from_numpy(np.sort(key) % max(1, num_entries))
        row = torch.from_numpy(row)
        row_ptr = index2ptr(row.index_select(0, order), len(reached))
        matrix = CSR(row_ptr, column.index_select(0, order), weight.index_select(0, order))
        transpose = CSR(index2ptr(column, len(group) + len(previous)), row, weight)
        return reached, matrix, transpose


def ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Returns the numbers from first[i] to last[i] - 1 for each i, one after the other."""
    length = last - first
    end = length.cumsum()
    return np.arange(length.sum()) + np.repeat(last - end, length)


# ---- The pass ------------------------------------------------------------------------------------
def encode_reached(block: ReachBlock, wild: WildType) -> Tensor:
    """Returns the states that the block's knock-outs change, after the layers it plans, [S, H].

    A layer's update is linear in h, so it is that of the intact graph plus what the changes of h
    add; the h of a dead node, which sends nothing, changes to zero. Where a perturbed node has
    another level, the plan scales its changes. It adds in place, as fresh memory costs more than
    the sums.
    """
    x = node = None
    layers = [wild.encoder.first, *wild.encoder.layers]
    for depth, plan in enumerate(block.layers):
        layer = layers[depth]
        states = wild.layers[depth]
        x_before = select(wild, states.x, plan.node)
        if depth == 0:
            change = -select(wild, states.h, block.perturbed)  # the dead send nothing
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
    """Maps changes of h [C, H] to those of the layer's update where they reach, [S, H]."""
    gate = (layer.SCALE * layer.gate).index_select(0, plan.relation)
    by_relation = layer.out(change.index_select(0, plan.sender) * gate)  # [K, H]
    _, change_of_reached = change.tensor_split([len(change) - len(plan.previous)])
    by_root = nn.functional.linear(change_of_reached, layer.root.weight)
    return spmm(plan.matrix, plan.transpose, torch.cat([by_relation, by_root]))


def spmm(matrix: CSR, transpose: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x, in the dtype of x, for a sparse matrix given with its transpose."""
    return _SparseProduct.apply(x, matrix, transpose)


class _SparseProduct(torch.autograd.Function):
    """`spmm`; autograd's own sparse product sorts the transpose in each backward pass."""

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
    """Yields what `KnockoutTerm.pooled` does of some samples of a block each, [b, width].

    The layers that the plan leaves out run on all nodes, for as few samples at once as there.
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
    """Returns the pooled changes [b, width], given the states [N, b, H] after `depth` layers."""
    encoder = wild.encoder
    for conv in encoder.layers[depth - 1 :]:
        x = conv(x, graph, samples.level)
    return term.pool(encoder.norm(x) - wild.final, samples.level > 0, wild)


def select(wild: WildType, states: Tensor, node: Tensor) -> Tensor:
    """Returns states[node], [S, H], of states [N, 1, H].

    The gradient is sparse if that is smaller than a dense one, so that its cost does not follow N.
    It is added to dense gradients from the rest of the wild-type pass; with the readout `global`,
    the last states have none. The dense one of index_select takes less than half of embedding's
    time on the CPU.
    """
    if wild.encoder.config.readout != "global" and len(node) < len(states):
        return nn.functional.embedding(node, states.squeeze(1), sparse=True)
    return states.squeeze(1).index_select(0, node)


# ---- What readouts pool -------------------------------------------------------------------------
@functools.cache
def pool_of_reached(readout: type[KnockoutTerm]) -> Callable[..., Tensor] | None:
    """Returns what does of the states that change what a readout's `pool` does of all, or None.

    It is a function of the readout, the changes of these states [S, H], what they are on the intact
    graph [S, H], their block and the wild type. One that a class inherits may not be the same as a
    `pool` of its own. For None, a line in the log says, once, that the readout runs on all nodes.
    """
    if readout is GlobalReadout:
        return sum_reached
    if "pool_reached" not in vars(readout):
        log.info(
            f"note      {readout.__name__} has no method pool_reached, so it reads the states of "
            "all nodes"
        )
        return None
    return readout.pool_reached


def sum_reached(
    readout: GlobalReadout, change: Tensor, before: Tensor, block: ReachBlock, wild: WildType
) -> Tensor:
    """Returns the same as `GlobalReadout.pool`, [B, H]."""
    total = change.new_zeros(block.num_samples, change.size(1))
    return total.index_add(0, block.layers[-1].sample, change)  # whose gradient is a copy


# ---- Choice of route -----------------------------------------------------------------------------
def plan_route(
    graph: SharedGraph, dataset: Dataset, message_passing: str, num_layers: int
) -> tuple[ReachPlanner | None, str]:
    """Returns the planner of batches for `message_passing`, and a line for the log.

    `auto` takes `reach` if the plan of some hundred rows of the dataset covers more than the first
    layer. `shared` plans that one, too: all samples enter it with the same states, so little of it
    changes on any graph. A GPU finds these sooner by itself (measured): both plan nothing there.
    """
    if graph.is_on_gpu and message_passing != "reach":
        return None, "shared"
    planner = ReachPlanner(graph, 1 if message_passing == "shared" else num_layers)
    some_rows = range(0, len(dataset), len(dataset) // 128 + 1)  # evenly spaced
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
    reached = (
        f"{', '.join(percentages)} % of the node states in {num_planned} of {num_layers} layers"
    )
    return planner, f"a knock-out changes {reached}: {route}"


def plan_fits(model: KnockoutGNN, graph: SharedGraph, dataset: Dataset) -> bool:
    """Returns whether the plan of a dataset's batches `is_exact`; if not, a note says so."""
    fits = is_exact(model, graph, dataset.__getitems__([0, 0, 0]), dataset.transform)
    if not fits:
        log.warning(
            "note      model_reach.py no longer computes the same state changes as model.py, so "
            "the slower model.py is used: edit model_reach.py to match, or delete it and set "
            "model.message_passing=shared"
        )
    return fits


@torch.no_grad()
def is_exact(model: KnockoutGNN, graph: SharedGraph, batch: Data, planner: ReachPlanner) -> bool:
    """Returns whether planned changes are the same as the model's own, for three samples.

    They are not if an edited layer or readout is another function than the one above. The samples
    are those of a batch on the CPU, with other perturbed nodes: some with edges to others. The
    parameters are others, too, as those that start at zero would hide a difference.
    """
    layers = [model.encoder.first, *model.encoder.layers]
    if any(type(layer) not in (FirstConv, KnockoutConv) for layer in layers):
        return False
    senders = graph.out_degree.argsort()[(graph.out_degree == 0).sum() :]
    if len(senders) == 0:
        return True
    quartiles = torch.tensor([0.25, 0.5, 0.75]) * len(senders)  # neither few nor most edges
    batch.perturbed = senders[quartiles.long()]
    batch.perturbed_batch = torch.arange(3)
    batch.perturbed_ptr = torch.arange(4)
    batch.level = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    batch.starts = starts_of_samples(batch.perturbed, batch.perturbed_ptr, graph.out_degree)
    batch = planner(batch).to(graph.device)
    batch.seed = torch.zeros((), dtype=torch.long, device=graph.device)
    probe = copy.deepcopy(model).train()
    generator = torch.Generator().manual_seed(0)
    for parameter in probe.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    term = probe.terms["knockout"]
    wild = probe.wild_type(graph, batch)
    planned = batch.plan.pooled(term, graph, wild)
    blocks = graph.in_blocks(batch, wild.final)
    expected = torch.cat([term.pooled(graph, samples, wild) for samples in blocks])
    # Rounding of the states of thousands of nodes adds up.
    tolerance = 1e-3 * (1 + expected.abs().amax())
    return bool((planned - expected).abs().amax() <= tolerance)
