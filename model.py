"""The knock-out GNN: node states on the intact graph and without the knocked-out nodes, and a readout comparing them.

A *wild-type* pass runs once per batch on the intact graph. The *local* part of the readout is a set function of the
wild-type states of the knocked-out nodes. A *knock-out* pass runs for every sample on the graph without its dead nodes;
the *global* part of the readout pools how the states of the remaining nodes change between the two passes.

Shapes: N nodes, R relations, E_r edges of relation r, B samples, P knocked-out nodes in the batch, H hidden channels.
Node states are node-major, [N, B, H], so that one sparse product serves all samples at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from mask import ReachBlock, ReachPlanner, SharedGraph, spmm

Messages = Callable[[Tensor, Tensor], Tensor]  # sums gate_r * h, of h [N, B, H] and gate [R, H], over live edges of r


@dataclass(frozen=True)
class ModelConfig:
    hidden: int = 32
    layers: int = 2
    dropout: float = 0.1
    embedding: bool = True
    message_passing: Literal["auto", "shared", "reach", "expanded"] = "auto"
    readout: Literal["both", "local", "global"] = "both"
    checkpointing: bool = False
    compile: bool = False

    def __post_init__(self):
        if self.dropout >= 1:
            raise ValueError(f"model.dropout must be in [0, 1), not {self.dropout}")


class KnockoutGNN(nn.Module):
    """Predicts the effect of each sample's knock-outs, in the units of `y`.

    Normalisation is per node, so a prediction never depends on the other samples of its batch.

    Args:
        num_nodes, num_relations, num_features: size of the graph that `forward` takes.
        y_mean, y_std: mean and standard deviation of each training target, [T], saved in checkpoints as buffers.
        unseen: share of nodes whose own identity and effect a training step hides, so that the model learns to predict
            nodes that no training row knocks out; 0 if dropout is.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_nodes: int,
        num_relations: int,
        num_features: int = 0,
        y_mean: Sequence[float] = (0.0,),
        y_std: Sequence[float] = (1.0,),
        unseen: float = 0.0,
    ):
        super().__init__()
        self.config, self.unseen, hidden = config, unseen * (config.dropout > 0), config.hidden
        if config.embedding:
            self.embedding = nn.Parameter(torch.randn(num_nodes, hidden))  # what nodes send in the first layer
            self.identity = nn.Parameter(torch.zeros(num_nodes, hidden))  # their states before it
        self.project = nn.Linear(num_features, 2 * hidden, bias=False) if num_features else None  # features add to both
        self.layers = nn.ModuleList(KnockoutConv(hidden, num_relations) for _ in range(config.layers))
        self.norm = nn.LayerNorm(hidden)
        size = hidden, config.dropout, len(y_mean)
        self.local_readout = LocalReadout(num_nodes, *size) if config.readout != "global" else None
        self.global_readout = readout_head(hidden, *size) if config.readout != "local" else None
        self.register_buffer("y_mean", torch.tensor(y_mean))
        self.register_buffer("y_std", torch.tensor(y_std))

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns predictions [B, T]; raises `RuntimeError` if the batch and the graph are on different devices."""
        graph.check(batch)
        expanded = self.config.message_passing == "expanded"
        messages = ExpandedMessages(graph, intact_batch(graph.device)) if expanded else graph.propagate
        known = nn.functional.dropout(self.y_mean.new_ones(graph.num_nodes), self.unseen, self.training) > 0
        nodes = self.y_mean.new_zeros(graph.num_nodes, 2 * self.config.hidden)
        x, sent = (nodes if self.project is None else nodes + self.project(graph.x)).chunk(2, dim=1)
        if self.config.embedding:
            x, sent = x + self.identity * known.unsqueeze(1), sent + self.embedding
        sent = nn.functional.dropout(sent, self.config.dropout, self.training)  # the same in both passes
        x, intact = self.encode(x.unsqueeze(1), self.layers[0].norm(sent).unsqueeze(1), messages)
        wild_type = self.norm(x)  # [N, 1, H]
        prediction = 0.0
        if self.local_readout is not None:
            prediction = prediction + self.local_readout(wild_type.squeeze(1), known, batch)
        if self.global_readout is not None:
            pooled = self.changes(graph, batch, intact, wild_type)
            prediction = prediction + self.global_readout(torch.asinh(pooled))  # a hub's thousands of neighbours add up
        return self.y_mean + self.y_std * prediction.to(self.y_mean.dtype)

    def encode(self, x: Tensor, h: Tensor, messages: Messages, depth: int = 0) -> tuple[Tensor, list]:
        """Returns `x` [N, B, H] after the layers from `depth` on, the first sending `h`, and (x, h, p) of each one."""
        trace = []
        for i, layer in enumerate(self.layers[depth:], depth):
            h = h if i == depth else layer.norm(x)
            p = layer(h if i else x, h, messages).to(x.dtype)  # as sparse gradients do not add up in half precision
            trace.append((x, h, p))
            x = x + nn.functional.gelu(p)
        return x, trace

    def encode_reached(self, block: ReachBlock, intact: list) -> Tensor:
        """Returns the states that the block's knock-outs change, after the layers that it plans, [S, H].

        p is linear in h, so it is that of the intact graph plus what the changes of h add; the h of a dead node, which
        sends nothing, changes to zero.
        """
        x, node = self.y_mean.new_zeros(0, self.config.hidden), block.dead.new_empty(0)
        for layer, reached, trace in zip(self.layers, block.layers, intact, strict=False):
            wild_x, wild_h, wild_p = (states.squeeze(1) for states in trace)
            change = torch.cat([-self.rows(wild_h, block.dead), layer.norm(x) - self.rows(wild_h, node)])
            node = reached.node
            p = self.rows(wild_p, node) + layer.propagate_change(change, reached.matrix)
            x = self.rows(wild_x, node).index_copy_(0, reached.previous, x) + nn.functional.gelu(p)
        return x

    def changes(self, graph: SharedGraph, batch: Data, intact: list, wild_type: Tensor) -> Tensor:
        """Returns the change that knock-outs make to the states of living nodes, summed and over sqrt(N), [B, H].

        In the layers that the batch's plan covers, only states that change are computed (see `mask.ReachPlanner`);
        further layers, or all of a batch without a plan, run on all nodes.
        """
        checkpointing = self.config.checkpointing and self.training
        run = partial(checkpoint, use_reentrant=False) if checkpointing else lambda part, *arguments: part(*arguments)

        def pool(x: Tensor, messages: Messages, alive: Tensor, depth: int) -> Tensor:
            h = self.layers[depth].norm(x) if depth else intact[0][1]
            change = self.norm(self.encode(x, h, messages, depth)[0]) - wild_type
            return (change * alive.unsqueeze(-1)).sum(0) / len(alive) ** 0.5

        if self.config.message_passing == "expanded":
            return run(pool, intact[0][0], ExpandedMessages(graph, batch), graph.keep(batch), 0)
        # Inductor has no sparse gradients; before torch 2.14, its gradients of gathers may be wrong (pytorch #185509).
        planned = "reach" in batch and not torch.compiler.is_compiling()
        blocks = batch.reach if planned else [ReachBlock(graph.check(batch), batch.perturbed, [], [])]
        pooled, last = [wild_type.new_zeros(0, wild_type.size(2))], 0
        keep = graph.keep(batch) if any(len(block.layers) < len(self.layers) for block in blocks) else None
        for block in blocks:
            first, last = last, last + block.num_samples
            depth, x = len(block.layers), run(self.encode_reached, block, intact)
            if depth == len(self.layers):
                change = self.norm(x) - self.rows(wild_type.squeeze(1), block.layers[-1].node)
                total = change.new_zeros(block.num_samples, change.size(1))
                pooled.append(total.index_add(0, block.layers[-1].sample, change) / len(wild_type) ** 0.5)
                continue
            # Few samples at once run through the remaining layers, so that their states stay in cache.
            size = block_size(wild_type)
            for start in range(0, block.num_samples, size):
                count = min(size, block.num_samples - start)
                alive = keep.narrow(1, first + start, count)
                dense = intact[depth][0].expand(-1, count, -1)
                if depth:
                    part = block.row_ptr[start], block.row_ptr[start + count] - block.row_ptr[start]
                    rows = block.layers[-1].node, block.layers[-1].sample, x
                    node, sample, reached = (values.narrow(0, *part) for values in rows)
                    dense = dense.index_put((node, sample - start), reached)
                pooled.append(run(pool, dense, partial(graph.propagate, keep=alive), alive, depth))
        return torch.cat(pooled)

    def rows(self, states: Tensor, node: Tensor) -> Tensor:
        """Returns states[node], [S, H].

        The gradient is sparse if that is smaller than a dense one, so that its cost does not follow N. It is added to
        dense gradients from the rest of the wild-type pass; without the local readout, the last states have none.
        """
        sparse = self.local_readout is not None and len(node) < len(states)
        return nn.functional.embedding(node, states, sparse=sparse)


class KnockoutConv(nn.Module):
    """gelu(root(h) + out(scale * sum over relations r, living edges of r: weight * gate_r * h_source)), h = norm(x).

    A relational graph convolution whose messages are the source's state times a vector of the relation (CompGCN,
    Vashishth et al. 2020, arXiv:1911.03082). The root term is not masked: nothing reads the states of dead nodes.

    In the first layer, h is the normalised embedding, but the root term takes x, the nodes' identities, which for a
    node that no training row knocks out are learnt only from what it sends to others in later layers.
    """

    # With weights 1/sqrt(d_i * d_j) the sums are small: 0.3 on yeast, where h has a standard deviation of 1. Scaling
    # makes neighbours outweigh a node's own embedding, which carries no information about other nodes.
    SCALE = 10.0

    def __init__(self, hidden: int, num_relations: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.norm.bias.data[: hidden // 8], std=0.3)  # these channels count living neighbours
        self.root = nn.Linear(hidden, hidden)
        self.gate = nn.Parameter(torch.randn(num_relations, hidden) / num_relations**0.5)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, own: Tensor, h: Tensor, messages: Messages) -> Tensor:
        """Maps the nodes' own and sent states, each [N, B, H], to the argument of gelu [N, B, H], linear in both."""
        return self.root(own) + self.out(messages(h, self.SCALE * self.gate))

    def propagate_change(self, change: Tensor, matrix: tuple[Tensor, ...]) -> Tensor:
        """Maps changes of h [C, H] to changes of `forward` at the nodes they reach [S, H] (see `mask.ReachedRows`)."""
        by_relation = self.out(change.unsqueeze(1) * (self.SCALE * self.gate))  # [C, R, H]
        by_root = nn.functional.linear(change, self.root.weight).unsqueeze(1)
        return spmm(*matrix, torch.cat([by_relation, by_root], dim=1).flatten(0, 1))


class ExpandedMessages:
    """Sums what `SharedGraph.propagate` does, in either pass, over B block-diagonal copies of the graph, edges masked.

    This is the reference for the shared route, and the one to use for layers that need per-edge values.
    """

    def __init__(self, graph: SharedGraph, batch: Data):
        self.num_samples, self.edges = graph.check(batch), []
        edge_index, edge_masks = graph.expand(batch), graph.edge_masks(batch)
        for r, relation in enumerate(graph.relations):
            value = graph.weight(r).repeat(self.num_samples) * edge_masks[relation]
            self.edges.append((*edge_index[relation], value))

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x.expand(-1, self.num_samples, -1)
        copies = x.transpose(0, 1).flatten(0, 1)  # sample-major, [B * N, H]
        out = 0.0
        for (source, target, value), relation_gate in zip(self.edges, gate, strict=True):
            message = (copies * relation_gate).index_select(0, source) * value.unsqueeze(-1)
            out = out + scatter(message, target, dim=0, dim_size=len(copies), reduce="sum")
        return out.view(self.num_samples, len(x), x.size(2)).transpose(0, 1)


def intact_batch(device: torch.device) -> Data:
    """Returns a batch of one sample without knock-outs."""
    none = torch.empty(0, dtype=torch.long, device=device)
    return Data(perturbed=none, perturbed_batch=none, perturbed_ptr=none.new_zeros(2), num_dead_edges=0)


class LocalReadout(nn.Module):
    """A permutation-invariant function of the wild-type states of any number of knocked-out nodes.

    It adds a learned effect per node, a weighted product per pair of nodes (a factorisation machine, Rendle 2010), and
    an MLP of the summed node and pair features. The last two start at zero, so that training starts from the effects,
    which `train.build_model` sets to the additive baseline's.
    """

    def __init__(self, num_nodes: int, hidden: int, dropout: float, num_targets: int):
        super().__init__()
        self.effect = nn.Parameter(torch.zeros(num_nodes * num_targets))  # no matrix: without weight decay
        self.embed = nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, 2 * hidden))
        self.pair = nn.Linear(2 * hidden, num_targets, bias=False)
        self.norm = nn.LayerNorm(4 * hidden)
        self.head = readout_head(4 * hidden, hidden, dropout, num_targets)
        nn.init.zeros_(self.pair.weight)

    def forward(self, wild_type: Tensor, known: Tensor, batch: Data) -> Tensor:
        """Maps wild_type [N, H] to [B, T]; nodes that are not `known` [N] have no effect of their own."""
        total = partial(scatter, index=batch.perturbed_batch, dim_size=batch.perturbed_ptr.numel() - 1)
        state = self.embed(wild_type.index_select(0, batch.perturbed))  # [P, 2H]
        nodes = total(state)
        pairs = (nodes.square() - total(state.square())) / 2  # sum over pairs i < j of state_i * state_j
        effects = total((self.effect.view(len(known), -1) * known.unsqueeze(1)).index_select(0, batch.perturbed))
        return effects + self.pair(pairs) + self.head(self.norm(torch.cat([nodes, pairs], dim=1)))


def readout_head(inputs: int, hidden: int, dropout: float, outputs: int) -> nn.Module:
    """Returns an MLP that maps [B, inputs] to [B, outputs], at first to zeros, so that training starts without it."""
    last = nn.Linear(2 * hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, 2 * hidden), nn.GELU(), last)


def choose_route(config: ModelConfig, graph: SharedGraph, dataset: Any) -> str:
    """Makes the dataset plan its batches as `message_passing` needs; returns the route, with what it is chosen by.

    `auto` takes `reach` if the plan of some hundred samples, evenly spaced, covers more than the first layer. `shared`
    plans that one, too: all samples enter it with the same states, so little of it changes on any graph.
    """
    if config.message_passing == "expanded" or config.readout == "local":
        return config.message_passing
    planner = ReachPlanner(graph, 1 if config.message_passing == "shared" else config.layers)
    sample = planner(dataset.__getitems__(range(0, len(dataset), len(dataset) // 128 + 1)))
    planned = min((len(block.layers) for block in sample.reach), default=0)
    counts = [sum(len(block.layers[depth].node) for block in sample.reach) for depth in range(planned)]
    route = "shared" if planned < min(2, config.layers) else "reach"
    planner.num_layers = config.layers if config.message_passing == "reach" else planned
    dataset.transform = planner
    shares = ", ".join(f"{100 * count / len(sample.y) / graph.num_nodes:.2g}" for count in counts)
    reached = f"a knock-out reaches {shares} % of the nodes in {planned} of {config.layers} layers"
    return f"{reached}: {route if config.message_passing == 'auto' else config.message_passing}"


def block_size(wild_type: Tensor) -> int:
    """Returns how many samples' states fit in 1 MB, about a CPU core's cache, or in 1 GB on a GPU; at least 1."""
    size = 2**30 if wild_type.is_cuda else 2**20
    return max(1, size // (wild_type.numel() * wild_type.element_size()))
