"""Computes only the states that a batch's knock-outs change, instead of the states of all nodes.

On a sparse graph, most states in a sample are the same as on the intact graph: after the first
layer, only the targets of the perturbed nodes differ; after the second layer, their targets differ,
too. This module computes only the states that differ, and `model.py` computes all states:

1. `ReachPlanner` makes a *plan* of each batch on the CPU: for each layer, a list of the states that
   differ, and a sparse matrix that sums the changes of their messages. A plan depends only on the
   edges, the perturbed nodes and their levels, not on the parameters of the model.
2. `WildStates` records the states of each layer on the intact graph, with hooks on the encoder.
3. `pool_planned` computes the states that differ, and returns the same result as
   `model.pool_in_blocks`.
4. `plan_route` decides whether plans are faster. `use_plans` makes a model use them if they are
   correct for the model.

This part is optional: a copy with model.message_passing=shared does not need this file and
model_reach_plan.py. It supports the layers `FirstConv` and `KnockoutConv` (see
`update_of_reached`), the readout `GlobalReadout`, and readouts whose class has a method
`pool_reached`. All other readouts get the states of all nodes after the last layer.

The shapes are explained in model_reach_plan.py.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Data

from errors import counted
from mask import Samples, SharedGraph, starts_of_samples
from mask_product import CSR, sparse_product
from model import (
    Encoder,
    FirstConv,
    GlobalReadout,
    KnockoutConv,
    KnockoutGNN,
    KnockoutTerm,
    WildType,
    pool_in_blocks,
)
from model_reach_plan import ReachBlock, ReachedStates, ReachPlanner

log = logging.getLogger("model_reach")


# ---- States on the intact graph ------------------------------------------------------------------
class LayerStates(NamedTuple):
    """The states of one layer on the intact graph, the same in all samples, [N, 1, H] each."""

    x: Tensor  # states before the layer
    h: Tensor  # normalised states, which the nodes send
    update: Tensor  # the layer adds gelu(update) to x
    after: Tensor  # states after the layer, x + gelu(update)


class WildStates:
    """Records the `LayerStates` of each layer while an encoder computes the wild type.

    It registers hooks on the encoder, which then returns a wild type that uses the plan of a batch.
    """

    def __init__(self, encoder: Encoder):
        # The input and the output of each module that is called in `Encoder.forward`: for each
        # layer, of its normalisation, its activation and the layer itself. None outside of it.
        self.calls = None
        encoder.register_forward_pre_hook(self.begin)
        encoder.register_forward_hook(self.end)
        for layer in layers_of(encoder):
            for module in (layer.norm, layer.activation, layer):
                module.register_forward_hook(self.keep)

    def begin(self, encoder: Encoder, inputs: tuple) -> None:
        self.calls = []

    def keep(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if self.calls is not None:
            self.calls.append((inputs[0], output))

    def end(self, encoder: Encoder, inputs: tuple, wild: WildType) -> WildType | None:
        """Returns the wild type that uses plans, or None if a call has not been recorded."""
        calls = self.calls
        self.calls = None
        if len(calls) != 3 * len(layers_of(encoder)):
            return None
        layers = []
        for number in range(0, len(calls), 3):
            (_, h), (update, _), (x, after) = calls[number : number + 3]
            layers.append(LayerStates(x, h, update, after))
        return wild._replace(pool_batch=functools.partial(pool_planned, layers))


def record_states(model: KnockoutGNN) -> bool:
    """Makes a model use the plans of its batches, and returns whether it has supported layers."""
    members = ("norm", "root", "gate", "out", "activation")
    for layer in layers_of(model.encoder):
        has_members = all(hasattr(layer, name) for name in members)
        if type(layer) not in (FirstConv, KnockoutConv) or not has_members:
            return False
    if not hasattr(model.encoder, "wild_states"):
        model.encoder.wild_states = WildStates(model.encoder)
    return True


def layers_of(encoder: Encoder) -> list[nn.Module]:
    """Returns the layers of an encoder, beginning with the first."""
    return [encoder.first, *encoder.layers]


# ---- The pass ------------------------------------------------------------------------------------
def pool_planned(
    layers: list[LayerStates], term: KnockoutTerm, graph: SharedGraph, wild: WildType, batch: Data
) -> Tensor:
    """Returns the pooled changes of all samples, [B, width], as `pool_in_blocks` does.

    For each block of the batch's plan, `encode_reached` computes the planned layers, with only the
    states that differ. If these are all layers, the readout `term` pools only the states that
    differ, if it can. Otherwise, `pool_all` runs the remaining layers on all nodes, and pools all
    states. `layers` are the states of all layers on the intact graph.
    """
    if "plan" not in batch:
        return pool_in_blocks(term, graph, wild, batch)
    encoder = wild.encoder
    pooled = []
    for block in batch.plan:
        reached = encoder.checkpointed(encode_reached, block, layers, wild)
        pool = None
        if len(block.layers) == len(layers):
            pool = pool_of_reached(type(term))
        if pool is not None:
            before = select(wild, wild.final, block.layers[-1].node)
            change = encoder.norm(reached) - before
            pooled.append(pool(term, change, before, block, wild))
        else:
            pooled += pool_all(term, graph, block, reached, layers, wild)
    return torch.cat(pooled)


def encode_reached(block: ReachBlock, layers: list[LayerStates], wild: WildType) -> Tensor:
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
    modules = layers_of(wild.encoder)
    for depth, plan in enumerate(block.layers):
        layer = modules[depth]
        states = layers[depth]
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
    by_column = torch.cat([by_relation, by_root])
    return SparseProduct.apply(by_column, plan.matrix, plan.transpose)


class SparseProduct(torch.autograd.Function):
    """Computes matrix @ x, [M, H], in the dtype of x [columns, H].

    The backward pass uses `transpose`, which must be the transpose of the matrix [M, columns].
    torch's own sparse product sorts the transpose in each backward pass.
    """

    @staticmethod
    def forward(ctx, x: Tensor, matrix: CSR, transpose: CSR) -> Tensor:
        ctx.matrix = matrix
        ctx.transpose = transpose
        return sparse_product(matrix, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return SparseProduct.apply(grad, ctx.transpose, ctx.matrix), None, None


def pool_all(
    term: KnockoutTerm,
    graph: SharedGraph,
    block: ReachBlock,
    reached: Tensor,
    layers: list[LayerStates],
    wild: WildType,
) -> Iterator[Tensor]:
    """Yields the result of `KnockoutTerm.pooled` for a few samples of a block at a time.

    A result is [samples, width]. The results contain each of the b samples of the block once. The
    states after the planned layers are the states on the intact graph, except for `reached` [S, H],
    the result of `encode_reached`. All later layers then run on all nodes, with as many samples at
    once as in `pool_in_blocks`.
    """
    depth = len(block.layers)
    encoder = wild.encoder
    blocks = graph.in_blocks(Data(**block._asdict()), wild.final)
    if depth == 0:
        for samples in blocks:
            yield encoder.checkpointed(term.pooled, graph, samples, wild)
        return
    x = layers[depth - 1].after.transpose(0, 1).expand(block.num_samples, -1, -1)
    x = x.index_put((block.layers[-1].sample, block.layers[-1].node), reached)
    for states, samples in zip(x.split(graph.samples_at_once(wild.final)), blocks, strict=True):
        states = states.transpose(0, 1).contiguous()
        yield encoder.checkpointed(pool_further, term, graph, states, depth, samples, wild)


def pool_further(
    term: KnockoutTerm, graph: SharedGraph, x: Tensor, depth: int, samples: Samples, wild: WildType
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
    blocks = planner.plan(dataset.__getitems__(some_rows))
    num_planned = min(len(block.layers) for block in blocks)
    if message_passing != "reach":
        planner.num_layers = num_planned
    route = message_passing
    if route == "auto":
        route = "reach" if num_planned >= min(2, num_layers) else "shared"
    for depth in range(num_planned):
        num_reached = sum(len(block.layers[depth].node) for block in blocks) / len(some_rows)
        planner.block = min(planner.block, max(1, int(planner.REACHED / max(1, num_reached))))
    planned = f"{num_planned} of {counted(num_layers, 'layer')}"
    return planner, f"only changed states are computed in {planned}; message_passing={route}"


def use_plans(model: KnockoutGNN, graph: SharedGraph, dataset: Dataset) -> bool:
    """Makes a model use the plans of its batches, and returns whether they are correct for it.

    Logs a warning if they are not, see `is_exact`. The dataset's `transform` must be a
    `ReachPlanner`.
    """
    batch = dataset.__getitems__([0, 0, 0])
    fits = record_states(model) and is_exact(model, graph, batch, dataset.transform)
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
    if wild.pool_batch is pool_in_blocks:
        return False
    planned = wild.pool_batch(term, graph, wild, batch)
    expected = pool_in_blocks(term, graph, wild, batch)
    # The rounding errors of the states of thousands of nodes add up.
    tolerance = 1e-3 * (1 + expected.abs().amax())
    return bool((planned - expected).abs().amax() <= tolerance)
