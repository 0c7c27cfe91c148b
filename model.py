"""The knock-out GNN: a sum of terms, which read node states with and without the knocked-out nodes.

The *encoder* computes the states of all nodes on the intact graph, once for each batch: the *wild
type*. The term *local* is a set function of the wild-type states of the knocked-out nodes. The term
*knockout* runs the encoder's layers for every sample on the graph without its dead nodes, and reads
how the states of the living nodes change. `KnockoutTask.build_model` assembles the terms. `record`,
`has_plan` and `LayerStates` are used only for batches with a plan, an optional part of the
template. Otherwise, `record` is None.

Shapes: N nodes, R relations, B samples, P perturbed nodes in the batch, H hidden channels, T
targets of C columns each (see losses.py; the columns of a target are adjacent), K effects of a
node. Node states are node-major, [N, B, H]: one sparse product serves all samples at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from mask import LINEAR, Samples, SharedGraph, doses, sum_by_sample

ON_COPIES = ("expanded",)  # values of message_passing that copy the graph for each sample


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
        """Whether the model also computes the states of the graph without the knocked-out nodes."""
        return self.readout != "local"

    @property
    def has_local(self) -> bool:
        """Whether the model reads the wild-type states of the knocked-out nodes."""
        return self.readout in ("local", "both")

    @property
    def has_pairs(self) -> bool:
        """Whether the model also reads features of pairs of knocked-out nodes."""
        return self.pairs and self.has_local


class LayerStates(NamedTuple):
    """States of one layer that are the same in all samples, [N, 1, H] each."""

    x: Tensor  # states before the layer
    h: Tensor  # the normalised states that the nodes send
    update: Tensor  # gelu of this is added to x
    after: Tensor  # states after the layer


class Draws(NamedTuple):
    """The random masks and factors of a training step; all True and 1 in evaluation."""

    # False where a node's identity and effect (row 0) or its slope (row 1) are hidden, bool [2, N]
    is_shown: Tensor
    node_dropout: Tensor  # dropout factors of the nodes' states, [N, H], the same in both passes
    row_dropout: Tensor  # dropout factors of each sample's features in the readouts, [B, H]


class WildType(NamedTuple):
    """The result of the pass on the intact graph, with B = 1."""

    encoder: "Encoder"  # the encoder that computed it
    x: Tensor  # the nodes' identities: their states before the first layer, [N, 1, H]
    sent: Tensor  # what the nodes send in the first layer, before normalisation, [N, 1, H]
    layers: list[LayerStates]  # one per layer if the batch has a plan, otherwise empty
    final: Tensor  # normalised states after the last layer, [N, 1, H]
    draws: Draws
    # Results that a term stores for a later one: "hidden", from local for pairs.
    kept: dict[str, Tensor]


class KnockoutGNN(nn.Module):
    """Predicts the effect of each sample's knock-outs, in standard deviations from the mean.

    The output is the sum of `terms`: modules that map the graph, the `WildType`, the doses of the
    perturbed nodes and the batch to [B, T * C]. All terms except the baseline are 0 at the start of
    training. Their order does not matter, except that pairs must follow local, because it adds an
    input to local's MLP. Normalisation is per node, so a prediction never depends on the other
    samples of its batch.

    Args:
        unseen: the fraction of nodes whose own identity and effect are hidden in a training step,
            so that the model learns to predict nodes that no training row knocks out. Nothing is
            hidden if dropout is 0.
        basis: maps the three `mask.doses` of a level to the K doses of a node's effects, [3, K].
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
        self.terms = nn.ModuleDict()  # a new term is added after all others

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns outputs [B, T * C]; raises `RuntimeError` if the batch is on a different device.

        In training, all random numbers follow from `batch.seed`, a long tensor, and `batch.index`.
        """
        output = sum(self.parts(graph, batch).values())
        return output.to(self.encoder.norm.weight.dtype)

    def parts(self, graph: SharedGraph, batch: Data) -> dict[str, Tensor]:
        """Returns the terms of the output by name, [B, T * C] each."""
        wild = self.wild_type(graph, batch)
        dose = self.dose(wild, batch)
        return {name: term(graph, wild, dose, batch) for name, term in self.terms.items()}

    def dose(self, wild: WildType, batch: Data) -> Tensor:
        """Returns the K doses of each perturbed node, which are 0 for an intact one, [P, K]."""
        return (doses(batch.level) @ self.basis.to(batch.level.dtype)).to(wild.final.dtype)

    def wild_type(self, graph: SharedGraph, batch: Data) -> WildType:
        """Returns the pass on the intact graph; raises `RuntimeError` as `forward` does."""
        graph.check(batch)
        draws = self.draw(graph, batch)
        return self.encoder(graph, draws, has_plan="plan" in batch)

    def draw(self, graph: SharedGraph, batch: Data) -> Draws:
        """Returns the random masks and factors of a step, drawn by node and by row of the table."""
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
        # The baseline's slope is hidden, too. Otherwise, it would explain most of an unseen node's
        # effect, and the graph would learn little about such nodes.
        is_shown = for_hiding.narrow(0, 0, num_nodes).t() >= self.unseen
        factors = for_dropout.ge_(rate).div_(1 - rate)
        return Draws(is_shown, *factors.tensor_split([num_nodes]))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters without weight decay: vectors and the baseline."""
        names = set()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 or name.startswith("terms.without_graph."):
                names.add(name)
        return names


def uniform(seed: Tensor, key: Tensor, width: int) -> Tensor:
    """Returns `width` random numbers in [0, 1] for each long key, float32 [K, width].

    Each number is a function of seed, key and column, and is the same on all devices. The bits are
    mixed as in SplitMix64 (Steele, Lea and Flood 2014), but always with its first multiplier.
    """
    golden = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
    x = (seed + key.unsqueeze(1)) * golden + torch.arange(width, device=key.device)
    for _ in range(2):
        x ^= x >> 32
        x *= golden
    return (x * 2**-64).add_(0.5)


# ---- Layers --------------------------------------------------------------------------------------
class Encoder(nn.Module):
    """Embeddings and graph layers, which compute a state for each node."""

    def __init__(self, config: ModelConfig, num_nodes: int, num_relations: int, num_features: int):
        super().__init__()
        self.config = config
        hidden = config.hidden
        if config.embedding:
            # What a node sends in the first layer.
            self.embedding = nn.Parameter(torch.randn(num_nodes, hidden))
            # The state of a node before the first layer.
            self.identity = nn.Parameter(torch.zeros(num_nodes, hidden))
        self.project = None  # node features are projected and added to both
        if num_features:
            self.project = nn.Linear(num_features, 2 * hidden, bias=False)
        self.first = FirstConv(hidden, num_relations)
        layers = [KnockoutConv(hidden, num_relations) for _ in range(config.layers - 1)]
        self.layers = nn.ModuleList(layers)
        # With readout=global, only differences of states are read: a bias cancels and would learn
        # only rounding errors.
        self.norm = nn.LayerNorm(hidden, bias=config.readout != "global")

    def forward(self, graph: SharedGraph, draws: Draws, has_plan: bool) -> WildType:
        """Returns the pass on the intact graph; with a plan, also the states of each layer."""
        x, sent = self.embed(graph, draws)
        graph = self.living(graph)
        layers = []
        record = layers if has_plan else None
        states = self.first(x, sent, graph, record=record)
        for conv in self.layers:
            states = conv(states, graph, record=record)
        return WildType(self, x, sent, layers, self.norm(states), draws, kept={})

    def embed(self, graph: SharedGraph, draws: Draws) -> tuple[Tensor, Tensor]:
        """Returns the nodes' identities and what they send in the first layer, [N, 1, H] each."""
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
        """Returns the graph, or one copy of it for each sample if message_passing requires copies.

        Without a batch, there is one intact sample.
        """
        if self.config.message_passing not in ON_COPIES:
            return graph
        from mask_copies import CopiedGraph, intact_batch  # an optional part

        return CopiedGraph(graph, intact_batch(graph.device) if batch is None else batch)

    def checkpointed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Calls `function`; model.checkpointing recomputes its activations in backward."""
        # Otherwise, autocast reuses one low-precision copy of each weight in all calls, and its
        # gradient is summed in low precision.
        torch.clear_autocast_cache()
        if self.config.checkpointing and self.training:
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)


class KnockoutConv(nn.Module):
    """x + gelu(root(h) + out(scale * sum of weight * gate_relation * h_source)), with h = norm(x).

    The sum is over the living edges that lead to a node. This is a relational graph convolution
    whose messages are the h of the source times a vector of the relation (CompGCN, Vashishth et al.
    2020, arXiv:1911.03082). The root term is not masked, because nothing reads the states of dead
    nodes.
    """

    # With normalised weights, the sums are small: 0.2 for one of yeast's relations, where h has a
    # standard deviation of 1. With this factor, neighbours outweigh a node's own embedding, which
    # carries no information about other nodes.
    SCALE = 10.0

    def __init__(self, hidden: int, num_relations: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        # Constant channels, whose sums count the living neighbours.
        nn.init.normal_(self.norm.bias.data[: hidden // 8], std=0.3)
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
        sums = graph.propagate(h, self.SCALE * self.gate, level)
        return self.add(x, h, root + self.out(sums), record)

    def add(self, x: Tensor, h: Tensor, update: Tensor, record: list | None) -> Tensor:
        """Returns x + gelu(update), and appends all states of the layer to `record`."""
        # Gradients of sparse products must not be summed in half precision.
        update = update.to(x.dtype)
        after = x + nn.functional.gelu(update)
        if record is not None:
            record.append(LayerStates(x, h, update, after))
        return after


class FirstConv(KnockoutConv):
    """The first layer, whose input states are the same in all samples.

    Nodes send their normalised embedding, h. The root term uses x, the identities of the nodes. The
    identity of a node that no training row knocks out is learnt only from the messages that the
    node sends in later layers.
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
        sums = graph.propagate_from_one(h, self.SCALE * self.gate, samples)
        return self.add(x, h, root + self.out(sums), record)


# ---- Terms ---------------------------------------------------------------------------------------
class LocalReadout(nn.Module):
    """A permutation-invariant function of the wild-type states of any number of perturbed nodes.

    A node has a feature vector for each of its K effects; they are multiplied by the doses and
    summed. The term is a weighted product of each pair of nodes (a factorisation machine, Rendle
    2010) plus an MLP of the summed features of nodes and pairs. Both are 0 at the start of
    training.
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
        """Returns the products of pairs, summed, and the MLP's first-layer values, [B, 2H] each."""
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
        """Returns the MLP's output [B, T * C], given the values of its first layer, [B, 2H]."""
        return self.head[1:](hidden)


class KnockoutTerm(nn.Module):
    """Base class of terms that read the changes of the living nodes' states.

    These are the changes after the encoder's last layer. A subclass has two methods: `pool` sums
    the changes of some samples over the nodes, as `GlobalReadout.pool` does, and `read` maps the
    pooled changes of all samples to the term, [B, T * C].
    """

    def forward(self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C].

        Without a plan, it is computed for a few samples at a time, whose states fit in the cache.
        """
        if "plan" in batch:  # a faster method with the same result
            return self.read(batch.plan.pooled(self, graph, wild), wild, batch)
        living = wild.encoder.living(graph, batch)
        blocks = []
        for samples in living.in_blocks(batch, wild.final):
            blocks.append(wild.encoder.checkpointed(self.pooled, living, samples, wild))
        return self.read(torch.cat(blocks), wild, batch)

    def pooled(self, graph: SharedGraph, samples: Samples, wild: WildType) -> Tensor:
        """Returns the pooled changes of the states of b samples, [b, width]."""
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
        """Returns the changes [N, b, H] summed over the nodes that are `alive` [N, b], [b, H]."""
        return (change * alive.unsqueeze(-1)).sum(0)

    def read(self, pooled: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Returns the term [B, T * C], given the sums of all samples, [B, H]."""
        features = torch.asinh(self.scale * pooled)  # compresses sums over thousands of neighbours
        return self.head(features * wild.draws.row_dropout)


def readout_head(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Returns an MLP from [B, inputs] to [B, outputs], whose outputs start at 0."""
    last = nn.Linear(2 * hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, 2 * hidden), nn.GELU(), last)
