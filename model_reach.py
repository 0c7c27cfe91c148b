"""Computes only the states that a batch's knock-outs change, and chooses the route.

Most states are the same as on the intact graph. `ReachPlanner` lists those that differ, layer by
layer, from the topology only. `ReachPlan.pooled` then gives the same result as
`KnockoutTerm.pooled`. `plan_route` decides whether a plan is faster, and `plan_fits` whether it is
correct.

This part is optional: a copy with model.message_passing=shared, which computes all states, does not
need this file. It supports the layer `KnockoutConv` (see `update_of_reached`), `GlobalReadout`, and
readouts whose class has a method `pool_reached`. For other readouts, the last states of all nodes
are assembled.

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
    """The S states that differ from the intact graph's after one layer, in a block of samples.

    They are sorted by sample and node. The matrix [S, K + L] sums the contributions of the senders
    to them. The first senders are the perturbed nodes, whose messages are reduced by 1 - level
    times their state. They are followed by the L states that differed before the layer, which are
    sent times their level. Column k < K has the out-edges of `sender[k]` by `relation[k]`, and
    column K + l has state l itself.
    """

    node: Tensor  # long [S]
    sample: Tensor  # long [S], relative to the block's first sample
    previous: Tensor  # long [L], position of the previous layer's states among these
    sender: Tensor  # long [K]
    relation: Tensor  # long [K]
    matrix: CSR
    transpose: CSR


class ReachBlock(NamedTuple):
    """Some consecutive samples of a batch, and the states that they change in the first layers."""

    perturbed: Tensor  # this and the next four are as in a batch
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
        """Returns the pooled changes of all samples, [B, width], as `KnockoutTerm.pooled` does.

        In the layers of the plan, only the states that change are computed. All later layers run on
        all nodes.
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
    """Reused memory for the states of a block, which are numbered sample * N + node.

    Only the entries of reached states are written, because most states are not reached. `level` and
    `is_reached` are reset before the next block uses them.
    """

    level: np.ndarray  # float64, 1 except while a block is planned
    is_reached: np.ndarray  # bool, False except while a layer is planned
    row: np.ndarray  # int32, index of each reached state while a layer is planned

    @classmethod
    def of_size(cls, num_states: int) -> "Scratch":
        level = np.ones(num_states)
        is_reached = np.zeros(num_states, dtype=bool)
        return cls(level, is_reached, row=np.empty(num_states, dtype=np.int32))


class ReachPlanner:
    """Finds the states that samples change, layer by layer, from the topology only, on the CPU.

    A layer changes the living out-neighbours of the perturbed nodes and of the nodes that the
    previous layer changed. As the `transform` of a `data.KnockoutDataset`, it adds `plan`, a
    `ReachPlan`, to each batch. The plan of a block ends before the first layer that is faster on
    all nodes.
    """

    # Samples of a block on a CPU, so that their reached states fit in a core's cache; larger blocks
    # on a GPU need fewer launches.
    BLOCK = 32
    STATES = 2**23  # states of a block on all nodes; with 32 channels, they take 1 GB
    # Reached states of a block; with 32 channels, 32 MB, the most that malloc keeps for reuse.
    REACHED = 2**18
    # A layer on all nodes takes as long as a plan with this share of all edges and this number of
    # edges per node (measured).
    EDGE_SHARE = 0.04
    EDGES_PER_NODE = 13.0

    def __init__(self, graph: SharedGraph, num_layers: int):
        self.num_nodes = graph.num_nodes
        self.num_layers = num_layers
        self.out_degree = graph.out_degree
        num_edges = sum(graph.num_edges.values())
        self.max_edges = self.EDGE_SHARE * num_edges + self.EDGES_PER_NODE * self.num_nodes
        # The edges sorted by source and relation. A group has the edges with the same source and
        # relation.
        source, target = graph.edge_index.cpu()
        num_relations = len(graph.relations)
        relation = torch.repeat_interleave(graph.edge_counts.cpu())
        group, order = (source * num_relations + relation).sort(stable=True)
        self.target = target[order].numpy()
        self.weight = graph.edge_weight.cpu()[order]
        group, size = group.unique_consecutive(return_counts=True)
        self.group_relation = (group % num_relations).numpy()
        self.group_ptr = cumsum(size).numpy()  # offsets of the edges
        # Offsets of the groups.
        self.node_ptr = index2ptr(group // num_relations, self.num_nodes).numpy()
        self.block = max(1, self.STATES // self.num_nodes)
        if graph.device.type == "cpu":
            self.block = min(self.BLOCK, self.block)
        self.num_states = self.block * self.num_nodes
        self.scratch = []  # one `Scratch`, except while a batch is planned

    def __call__(self, batch: Data) -> Data:
        """Adds `plan` to a batch on the CPU, and returns it."""
        batch.plan = self.plan(batch)
        return batch

    def plan(self, batch: Data) -> ReachPlan:
        """Returns the plan of a batch on the CPU, in blocks of samples."""
        # If planning is interrupted, the memory is not returned, because it may not have been
        # reset.
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
            first_state = senders - sender_node  # state of node 0 in the same sample
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
        """Returns the living states that edges reach, in ascending order, and matrix and transpose.

        Column k has the edges of group[k] times factor[k], which lead to states of the sample whose
        node 0 is first_state[k]. The states `previous` also reach themselves.
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

        # Marking states takes a third of the time of sorting them, and also gives them in ascending
        # order.
        scratch.is_reached[target] = True
        reached = np.flatnonzero(scratch.is_reached)
        scratch.is_reached[reached] = False
        scratch.row[reached] = np.arange(len(reached))

        row = scratch.row[target]
        # Equal rows keep their order. Sorting distinct keys takes half the time of a stable
        # argsort.
        num_entries = len(row)
        key = row.astype(np.int64) * num_entries + np.arange(num_entries)
        order = torch.from_numpy(np.sort(key) % max(1, num_entries))
        row = torch.from_numpy(row)
        row_ptr = index2ptr(row.index_select(0, order), len(reached))
        matrix = CSR(row_ptr, column.index_select(0, order), weight.index_select(0, order))
        transpose = CSR(index2ptr(column, len(group) + len(previous)), row, weight)
        return reached, matrix, transpose


def ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Returns the numbers from first[i] to last[i] - 1 for each i, concatenated."""
    length = last - first
    end = length.cumsum()
    return np.arange(length.sum()) + np.repeat(last - end, length)


# ---- The pass ------------------------------------------------------------------------------------
def encode_reached(block: ReachBlock, wild: WildType) -> Tensor:
    """Returns the states that the block's knock-outs change, after the planned layers, [S, H].

    The update of a layer is linear in h. It is therefore the intact graph's update plus the
    contributions of the changes of h. A dead node sends nothing, so its h changes to zero. If a
    perturbed node has a different level, the plan scales its change. Sums are computed in place,
    because new memory costs more than the sums.
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
    """Returns the changes of the layer's update, [S, H], given the changes of h, [C, H]."""
    gate = (layer.SCALE * layer.gate).index_select(0, plan.relation)
    by_relation = layer.out(change.index_select(0, plan.sender) * gate)  # [K, H]
    _, change_of_reached = change.tensor_split([len(change) - len(plan.previous)])
    by_root = nn.functional.linear(change_of_reached, layer.root.weight)
    return spmm(plan.matrix, plan.transpose, torch.cat([by_relation, by_root]))


def spmm(matrix: CSR, transpose: CSR, x: Tensor) -> Tensor:
    """Returns matrix @ x in the dtype of x, for a sparse matrix given with its transpose."""
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
    """Yields the result of `KnockoutTerm.pooled` for some samples of a block at a time, [b, width].

    The layers that are not planned run on all nodes, with as few samples at once as there.
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
    """Returns states[node], [S, H], given states [N, 1, H].

    The gradient is sparse if that is smaller than a dense one, so that its cost does not depend on
    N. It is added to dense gradients of the rest of the wild-type pass. With readout=global, the
    last states have no such dense gradient. The dense gradient of index_select takes less than half
    the time of embedding's on the CPU.
    """
    if wild.encoder.config.readout != "global" and len(node) < len(states):
        return nn.functional.embedding(node, states.squeeze(1), sparse=True)
    return states.squeeze(1).index_select(0, node)


# ---- Pooling of reached states -------------------------------------------------------------------
@functools.cache
def pool_of_reached(readout: type[KnockoutTerm]) -> Callable[..., Tensor] | None:
    """Returns the function that pools only the states that change as a readout's `pool` does.

    It takes the readout, the changes of these states [S, H], their values on the intact graph
    [S, H], their block and the wild type. An inherited `pool_reached` is not used, because it may
    not fit the subclass's own `pool`. If there is none, this returns None, and logs once that the
    readout runs on all nodes.
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
    """Returns the same result as `GlobalReadout.pool`, [B, H]."""
    total = change.new_zeros(block.num_samples, change.size(1))
    # The gradient of index_add is only a copy.
    return total.index_add(0, block.layers[-1].sample, change)


# ---- Choice of route -----------------------------------------------------------------------------
def plan_route(
    graph: SharedGraph, dataset: Dataset, message_passing: str, num_layers: int
) -> tuple[ReachPlanner | None, str]:
    """Returns the planner of batches for `message_passing`, and a line for the log.

    `auto` uses `reach` if the plan of about a hundred rows of the dataset covers more than the
    first layer. `shared` also plans the first layer, because all samples enter it with the same
    states and it changes few of them on any graph. On a GPU, neither plans anything, because the
    GPU finds these states faster (measured).
    """
    if graph.is_on_gpu and message_passing != "reach":
        return None, "shared"
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
    reached = (
        f"{', '.join(percentages)} % of the node states in {num_planned} of {num_layers} layers"
    )
    return planner, f"a knock-out changes {reached}: {route}"


def plan_fits(model: KnockoutGNN, graph: SharedGraph, dataset: Dataset) -> bool:
    """Returns whether the plan of a dataset's batches `is_exact`; logs a warning if it is not."""
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

    They differ if an edited layer or readout computes a different function from this module. The
    samples are those of a batch on the CPU, but with perturbed nodes that have out-edges. The
    parameters are changed, because those that start at zero would hide a difference.
    """
    layers = [model.encoder.first, *model.encoder.layers]
    if any(type(layer) not in (FirstConv, KnockoutConv) for layer in layers):
        return False
    senders = graph.out_degree.argsort()[(graph.out_degree == 0).sum() :]
    if len(senders) == 0:
        return True
    # Nodes with neither few nor most edges.
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
    for parameter in probe.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    term = probe.terms["knockout"]
    wild = probe.wild_type(graph, batch)
    planned = batch.plan.pooled(term, graph, wild)
    blocks = graph.in_blocks(batch, wild.final)
    expected = torch.cat([term.pooled(graph, samples, wild) for samples in blocks])
    # The rounding errors of thousands of nodes' states add up.
    tolerance = 1e-3 * (1 + expected.abs().amax())
    return bool((planned - expected).abs().amax() <= tolerance)
