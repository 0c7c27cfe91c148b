"""The knock-out GNN: a sum of terms, made of node states with and without the knocked-out nodes.

The *encoder* gives all nodes states on the intact graph, once for each batch: the *wild type*. The
term *local* is a set function of the wild-type states of the knocked-out nodes. The term *knockout*
runs the encoder's layers for every sample on the graph without its dead nodes, and reads how the
states of the living nodes change. `KnockoutTask.build_model` puts the terms together. `record`,
`has_plan` and `LayerStates` are there for a plan of batches alone: without, `record` is None.

Shapes: N nodes, R relations, B samples, P perturbed nodes in the batch, H hidden channels, T
targets of C columns each (see losses.py; those of a target lie together), K responses of a node to
its level. Node states are node-major, [N, B, H]: one sparse product serves all samples at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from mask import LINEAR, Samples, SharedGraph, doses, sum_by_sample

ON_COPIES = ("expanded",)  # values of message_passing for which the graph is copied


@dataclass(frozen=True)
class ModelConfig:
    hidden: int = field(default=32, metadata={"min": 1, "resume": "fixed"})
    layers: int = field(default=2, metadata={"min": 1, "resume": "fixed"})
    dropout: float = field(default=0.1, metadata={"min": 0, "max": 0.99})
    embedding: bool = True
    message_passing: Literal["auto", "shared", "reach", "expanded"] = field(
        default="auto", metadata={"resume": "free"}
    )
    readout: Literal["both", "local", "global", "nodes"] = "both"
    pairs: bool = True
    start: Literal["baseline", "mean"] = "baseline"
    checkpointing: bool = field(default=False, metadata={"resume": "free"})
    cuda_graphs: bool = field(default=True, metadata={"resume": "free"})

    @property
    def has_knockout_pass(self) -> bool:
        """Whether states are computed without the knocked-out nodes, too."""
        return self.readout != "local"

    @property
    def has_local(self) -> bool:
        """Whether the states of the knocked-out nodes are read."""
        return self.readout in ("local", "both")

    @property
    def has_pairs(self) -> bool:
        """Whether what the knocked-out nodes have in common is read, too."""
        return self.pairs and self.has_local


class LayerStates(NamedTuple):
    """What a layer makes of states that are alike in all samples, each [N, 1, H]."""

    x: Tensor  # states before the layer
    h: Tensor  # what the nodes send
    update: Tensor  # gelu of this is added to x
    after: Tensor  # states after the layer


class Draws(NamedTuple):
    """The random masks and factors of a training step; all True and 1 in evaluation."""

    is_shown: Tensor  # whether a node's identity and effect, and its slope are not hidden, [2, N]
    node_dropout: Tensor  # factors of the nodes' states, [N, H], the same in both passes
    row_dropout: Tensor  # factors of what the readouts know of each sample, [B, H]


class WildType(NamedTuple):
    """The pass on the intact graph, B = 1."""

    encoder: "Encoder"  # whose pass it is
    x: Tensor  # the nodes' identities, the states before the first layer, [N, 1, H]
    sent: Tensor  # what the nodes send in the first layer, before its norm, [N, 1, H]
    layers: list[LayerStates]  # of a batch with a plan
    final: Tensor  # normalised states after the last layer, [N, 1, H]
    draws: Draws
    kept: dict[str, Tensor]  # "hidden", which the term local leaves to the term pairs behind it


class KnockoutGNN(nn.Module):
    """Predicts the effect of each sample's knock-outs, in standard deviations from the mean.

    It is the sum of `terms`, modules that map the graph, the `WildType`, the `dose` of perturbed
    nodes and the batch to [B, T * C]. Each starts at 0, but for what is known without the graph.
    Only the order of local and pairs matters: what the nodes share is a further input of local's
    MLP. Normalisation is per node, so a prediction never depends on the other samples of its batch.

    Args:
        unseen: share of nodes whose own identity and effect a training step hides, so that the
            model learns to predict nodes that no training row knocks out; none if dropout is 0.
        basis: of which `mask.doses` each response of a node is the sum, [3, K].
    """

    def __init__(
        self,
        config: ModelConfig,
        num_nodes: int,
        num_relations: int,
        num_features: int = 0,
        unseen: float = 0.0,
        basis: Tensor = LINEAR,
        num_columns: int = 1,
    ):
        super().__init__()
        self.config = config
        self.unseen = unseen
        self.num_columns = num_columns
        self.register_buffer("basis", basis.clone())
        self.encoder = Encoder(config, num_nodes, num_relations, num_features)
        self.terms = nn.ModuleDict()  # a new one is added behind all others

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns outputs [B, T * C]; raises `RuntimeError` if the batch is on another device.

        In training, all that is random follows from `batch.seed`, a long tensor, and `batch.index`.
        """
        output = sum(self.parts(graph, batch).values())
        return output.to(self.encoder.norm.weight.dtype)

    def parts(self, graph: SharedGraph, batch: Data) -> dict[str, Tensor]:
        """Returns the terms of the output by name, [B, T * C] each."""
        wild = self.wild_type(graph, batch)
        dose = self.dose(wild, batch)
        return {name: term(graph, wild, dose, batch) for name, term in self.terms.items()}

    def dose(self, wild: WildType, batch: Data) -> Tensor:
        """Returns how far perturbed nodes are from intact, in the ways they respond, [P, K]."""
        return (doses(batch.level) @ self.basis.to(batch.level.dtype)).to(wild.final.dtype)

    def wild_type(self, graph: SharedGraph, batch: Data) -> WildType:
        """Returns the pass on the intact graph; raises as `forward` does."""
        graph.check(batch)
        draws = self.draw(graph, batch)
        return self.encoder(graph, draws, has_plan="plan" in batch)

    def draw(self, graph: SharedGraph, batch: Data) -> Draws:
        """Returns all that is random, drawn at once, by node and by row of the table."""
        num_nodes = graph.num_nodes
        hidden = self.config.hidden
        rate = self.config.dropout if self.training else 0.0
        node = torch.arange(num_nodes, device=graph.device)
        key = torch.cat([node, num_nodes + batch.index])
        if rate > 0:
            numbers = uniform(batch.seed, key, hidden + 2)
        else:
            numbers = torch.ones(len(key), hidden + 2, device=graph.device)
        for_dropout, for_hiding = numbers.tensor_split([hidden], 1)
        # The slope is the baseline's. Were it never hidden, it would leave the graph little to
        # explain of unseen nodes.
        is_shown = for_hiding.narrow(0, 0, num_nodes).t() >= self.unseen
        factors = for_dropout.ge_(rate).div_(1 - rate)
        return Draws(is_shown, *factors.tensor_split([num_nodes]))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters without weight decay: vectors, and the baseline's."""
        names = set()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 or name.startswith("terms.without_graph."):
                names.add(name)
        return names


def uniform(seed: Tensor, key: Tensor, width: int) -> Tensor:
    """Returns `width` numbers in [0, 1] for each key, float32 [K, width], given keys, long [K].

    A number is a function of the seed, the key and its column, the same on any device. They are
    mixed in the way of SplitMix64 (Steele, Lea and Flood 2014), with its first factor each time.
    """
    golden = -0x61C8864680B583EB  # 2**64 over the golden ratio, as a signed number
    x = (seed + key.unsqueeze(1)) * golden + torch.arange(width, device=key.device)
    for _ in range(2):
        x ^= x >> 32
        x *= golden
    return (x * 2**-64).add_(0.5)


# ---- Layers --------------------------------------------------------------------------------------
class Encoder(nn.Module):
    """Embeddings and layers, which give all nodes a state."""

    def __init__(self, config: ModelConfig, num_nodes: int, num_relations: int, num_features: int):
        super().__init__()
        self.config = config
        hidden = config.hidden
        if config.embedding:
            self.embedding = nn.Parameter(torch.randn(num_nodes, hidden))  # sent in the first layer
            self.identity = nn.Parameter(torch.zeros(num_nodes, hidden))  # the states before it
        self.project = None  # features add to both
        if num_features:
            self.project = nn.Linear(num_features, 2 * hidden, bias=False)
        self.first = FirstConv(hidden, num_relations)
        layers = [KnockoutConv(hidden, num_relations) for _ in range(config.layers - 1)]
        self.layers = nn.ModuleList(layers)
        # From differences of states alone, a bias would only learn rounding errors.
        self.norm = nn.LayerNorm(hidden, bias=config.readout != "global")

    def forward(self, graph: SharedGraph, draws: Draws, has_plan: bool) -> WildType:
        """Returns the pass on the intact graph, for a plan with the states of each layer."""
        x, sent = self.embed(graph, draws)
        graph = self.living(graph)
        layers = []
        record = layers if has_plan else None
        states = self.first(x, sent, graph, record=record)
        for conv in self.layers:
            states = conv(states, graph, record=record)
        return WildType(self, x, sent, layers, self.norm(states), draws, kept={})

    def embed(self, graph: SharedGraph, draws: Draws) -> tuple[Tensor, Tensor]:
        """Returns the nodes' identities, and what they send in the first layer, [N, 1, H] each."""
        if self.config.embedding:
            x = self.identity * draws.is_shown.select(0, 0).unsqueeze(1)
            sent = self.embedding
        else:
            x = sent = self.norm.weight.new_zeros(graph.num_nodes, self.config.hidden)
        if self.project is not None:
            for_x, for_sent = self.project(graph.x).to(x.dtype).chunk(2, dim=1)
            x = x + for_x
            sent = sent + for_sent
        return x.unsqueeze(1), (sent * draws.node_dropout).unsqueeze(1)

    def living(self, graph: SharedGraph, batch: Data | None = None) -> Any:
        """Returns the graph, or its copies for a batch, by default one intact sample."""
        if self.config.message_passing not in ON_COPIES:
            return graph
        from mask_copies import CopiedGraph, intact_batch  # a part, which need not be here

        return CopiedGraph(graph, intact_batch(graph.device) if batch is None else batch)

    def checkpointed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Calls `function`, whose activations model.checkpointing recomputes in backward."""
        # Or gradients of the same low-precision copy of a weight add up over all calls.
        torch.clear_autocast_cache()
        if self.config.checkpointing and self.training:
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)


class KnockoutConv(nn.Module):
    """x + gelu(root(h) + out(scale * sum of weight * gate_relation * h_source)), with h = norm(x).

    The sum is over the living edges that lead to a node. It is a relational graph convolution whose
    messages are the source's h times a vector of the relation (CompGCN, Vashishth et al. 2020,
    arXiv:1911.03082). The root term is not masked: nothing reads the states of dead nodes.
    """

    # With normalised weights the sums are small: 0.2 for one of yeast's relations, where h has a
    # standard deviation of 1. Scaling makes neighbours outweigh a node's own embedding, which
    # carries no information about other nodes.
    SCALE = 10.0

    def __init__(self, hidden: int, num_relations: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.norm.bias.data[: hidden // 8], std=0.3)  # they count living neighbours
        self.root = nn.Linear(hidden, hidden)
        self.gate = nn.Parameter(torch.randn(num_relations, hidden) / num_relations**0.5)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        graph: SharedGraph,
        level: Tensor | None = None,
        record: list[LayerStates] | None = None,
    ) -> Tensor:
        """Returns the states after the layer, [N, B, H], given those before it and levels [N, B].

        Without levels, all nodes are intact.
        """
        h = self.norm(x)
        root = self.root(h)
        sums = graph.propagate(h, self.SCALE * self.gate, level)  # over the living edges
        return self.add(x, h, root + self.out(sums), record)

    def add(self, x: Tensor, h: Tensor, update: Tensor, record: list | None) -> Tensor:
        """Returns x + gelu(update), and records all of them."""
        update = update.to(x.dtype)  # sparse gradients do not add up in half
        after = x + nn.functional.gelu(update)
        if record is not None:
            record.append(LayerStates(x, h, update, after))
        return after


class FirstConv(KnockoutConv):
    """The first layer, which all samples enter with the same states.

    What the nodes send is the norm h of their embedding. The root term takes x, the nodes'
    identities, which for a node that no training row knocks out are learnt only from what it sends
    to others in later layers.
    """

    def forward(
        self,
        x: Tensor,
        sent: Tensor,
        graph: SharedGraph,
        samples: Samples | None = None,
        record: list[LayerStates] | None = None,
    ) -> Tensor:
        """Returns the states [N, B, H], given identities x and embeddings `sent`, [N, 1, H] each.

        Without samples, all nodes are intact, and B is 1.
        """
        h = self.norm(sent)
        root = self.root(x)
        sums = graph.propagate_from_one(h, self.SCALE * self.gate, samples)  # over the living edges
        return self.add(x, h, root + self.out(sums), record)


# ---- Terms ---------------------------------------------------------------------------------------
class LocalReadout(nn.Module):
    """A permutation-invariant function of the wild-type states of any number of perturbed nodes.

    A node has features for each of its responses, which count times the doses. It adds a weighted
    product per pair of nodes (a factorisation machine, Rendle 2010) and an MLP of the summed node
    and pair features. Both start at zero.
    """

    def __init__(self, hidden: int, num_outputs: int, num_effects: int = 1):
        super().__init__()
        self.embed = nn.Linear(hidden, num_effects * 2 * hidden)
        self.pair = nn.Linear(2 * hidden, num_outputs, bias=False)
        self.norm = nn.LayerNorm(4 * hidden)
        self.head = readout_head(4 * hidden, hidden, num_outputs)
        nn.init.zeros_(self.pair.weight)

    def forward(self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C]."""
        pairs, hidden = self.inputs(wild, dose, batch)
        wild.kept["hidden"] = hidden  # features of pairs are inputs of the MLP, too
        return self.pair(pairs) + self.read(hidden)

    def inputs(self, wild: WildType, dose: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
        """Returns the products of pairs and what the MLP's first layer gives, [B, 2H] each."""
        states = wild.final.squeeze(1).index_select(0, batch.perturbed)
        factors = wild.draws.node_dropout.index_select(0, batch.perturbed)
        of_responses = self.embed(states * factors).unflatten(1, (dose.size(1), -1))
        state = (dose.unsqueeze(2) * of_responses).sum(dim=1)  # [P, 2H]
        nodes = sum_by_sample(state, batch)
        squares = sum_by_sample(state.square(), batch)
        pairs = (nodes.square() - squares) / 2  # sum over i < j of state_i * state_j, [B, 2H]
        features = self.norm(torch.cat([nodes, pairs], dim=1)).unflatten(1, (4, -1))
        features = features * wild.draws.row_dropout.unsqueeze(1)
        return pairs, self.head[0](features.flatten(start_dim=1))

    def read(self, hidden: Tensor) -> Tensor:
        """Returns the MLP's output [B, T * C], given its first layer's values [B, 2H]."""
        return self.head[1:](hidden)


class KnockoutTerm(nn.Module):
    """What the changes of the living nodes' states add, by two methods of a subclass.

    The changes are those of the states after the encoder's layers. `pool` sums up those of some
    samples, as `GlobalReadout.pool` does, and `read` maps what it returns of all samples to the
    term, [B, T * C].
    """

    def forward(self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C], of few samples at a time, which stay in cache."""
        if "plan" in batch:  # a faster way to the same numbers
            return self.read(batch.plan.pooled(self, graph, wild), wild, batch)
        living = wild.encoder.living(graph, batch)
        blocks = []
        for samples in living.in_blocks(batch, wild.final):
            blocks.append(wild.encoder.checkpointed(self.pooled, living, samples, wild))
        return self.read(torch.cat(blocks), wild, batch)

    def pooled(self, graph: SharedGraph, samples: Samples, wild: WildType) -> Tensor:
        """Returns the changes of the states of b samples, pooled by `pool`, [b, width]."""
        encoder = wild.encoder
        x = encoder.first(wild.x, wild.sent, graph, samples)  # [N, b, H]
        for conv in encoder.layers:
            x = conv(x, graph, samples.level)
        change = encoder.norm(x) - wild.final
        return self.pool(change, samples.level > 0, wild)


class GlobalReadout(KnockoutTerm):
    """An MLP of the changes of the living nodes' states, summed over the nodes."""

    def __init__(self, num_nodes: int, hidden: int, num_outputs: int):
        super().__init__()
        self.scale = num_nodes**-0.5
        self.head = readout_head(hidden, hidden, num_outputs)

    def pool(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Sums the changes [N, b, H] of the nodes that are `alive` [N, b], to [b, H]."""
        return (change * alive.unsqueeze(-1)).sum(0)

    def read(self, pooled: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Maps the sums of all samples, [B, H], to [B, T * C]."""
        features = torch.asinh(self.scale * pooled)  # as thousands of neighbours add up
        return self.head(features * wild.draws.row_dropout)


def readout_head(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Returns an MLP from [B, inputs] to [B, outputs] whose outputs start at zero."""
    last = nn.Linear(2 * hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, 2 * hidden), nn.GELU(), last)
