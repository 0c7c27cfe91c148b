"""The knock-out GNN: node states on the intact graph and without the knocked-out nodes, and a
readout comparing them.

A *wild-type* pass runs once per batch on the intact graph. The *local* part of the readout is a set
function of the wild-type states of the knocked-out nodes. A *knock-out* pass runs for every sample
on the graph without its dead nodes; the *global* part of the readout pools how the states of the
remaining nodes change between the two passes. Where the targets are effects on nodes, the readout
*nodes* predicts each from how the state of that node changes.

Shapes: N nodes, R relations, B samples, P perturbed nodes in the batch, H hidden channels, T
targets of C columns each (see losses.py; those of a target lie together), K responses of a node to
its level. Node states are node-major, [N, B, H]: one sparse product serves all samples at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from mask import LINEAR, SharedGraph, doses, sum_by_sample
from mask_messages import SharedMessages
from model_pairs import PairReadout

ENTRIES_OF_EMBED = (("embed.weight", "responses", 0), ("embed.bias", "responses", 0))
ENTRIES_OF_HEAD = (("head.2.weight", "outputs", 0), ("head.2.bias", "outputs", 0))
ON_COPIES = ("expanded",)  # values of message_passing for which the graph is copied
# What a prediction is the sum of: what is known without the graph, the local readout, of that the
# features of pairs, and the knock-out pass.
PARTS = ("without_graph", "local", "pairs", "knockout")

# Sums gate_r * h over the living edges of each relation r, for h [N, B, H] and gate [R, H].
Messages = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    hidden: int = field(default=32, metadata={"min": 1})
    layers: int = field(default=2, metadata={"min": 1})
    dropout: float = 0.1
    embedding: bool = True
    message_passing: Literal["auto", "shared", "reach", "expanded"] = field(
        default="auto", metadata={"resume": "free"}
    )
    readout: Literal["both", "local", "global", "nodes"] = "both"
    pairs: bool = True
    start: Literal["baseline", "mean"] = "baseline"
    checkpointing: bool = field(default=False, metadata={"resume": "free"})
    cuda_graphs: bool = field(default=True, metadata={"resume": "free"})

    def __post_init__(self):
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1), not {self.dropout}")

    @property
    def has_knockout_pass(self) -> bool:
        """Whether states are computed without the knocked-out nodes, too."""
        return self.readout != "local"

    @property
    def has_pairs(self) -> bool:
        """Whether the local readout sees what the knocked-out nodes have in common."""
        return self.pairs and self.readout in ("local", "both")


class LayerStates(NamedTuple):
    """What a layer takes and gives, each [N, B, H], or [N, 1, H] if alike in all samples."""

    x: Tensor  # states before the layer
    h: Tensor  # what the nodes send
    update: Tensor  # gelu of this is added to x

    @property
    def after(self) -> Tensor:
        """The states after the layer."""
        return self.x + nn.functional.gelu(self.update)


class Draws(NamedTuple):
    """The random masks and factors of a training step; all True and 1 in evaluation."""

    is_known: Tensor  # whether a node's effect, and whether its slope, are known, bool [2, N]
    node_dropout: Tensor  # factors of the nodes' states, [N, H], the same in both passes
    row_dropout: Tensor  # factors of what the readouts know of each sample, [B, H]


class WildType(NamedTuple):
    """The pass on the intact graph, B = 1."""

    x: Tensor  # the nodes' identities, the states before the first layer, [N, 1, H]
    sent: Tensor  # what the nodes send in the first layer, before its norm, [N, 1, H]
    layers: list[LayerStates]
    final: Tensor  # normalised states after the last layer, [N, 1, H]
    draws: Draws


class KnockoutGNN(nn.Module):
    """Predicts the effect of each sample's knock-outs, in standard deviations from the mean.

    Normalisation is per node, so a prediction never depends on the other samples of its batch.

    Args:
        num_nodes, num_relations, num_features: size of the graph that `forward` takes.
        num_targets: number of scores, T.
        unseen: share of nodes whose own identity and effect a training step hides, so that the
            model learns to predict nodes that no training row knocks out; none if dropout is 0.
        target_nodes: the node of each target, long [T], for the readout `nodes`.
        basis: of which `mask.doses` each response of a node is the sum, [3, K].
        pairs: `model_pairs.units_of_pairs`, [2, F], for the local readout.
        num_columns: C, 1 for the readout `nodes`. What is known without the graph adds to the
            first column of each target.
    """

    # Parameters with an entry for each node, feature, relation or output, and in which dimension,
    # by which `run.init` takes them from a run on other tables; it takes none of the baseline's.
    ENTRIES = (
        ("embedding", "nodes", 0),
        ("identity", "nodes", 0),
        ("project.weight", "features", 1),
    )

    def __init__(
        self,
        config: ModelConfig,
        num_nodes: int,
        num_relations: int,
        num_features: int = 0,
        num_targets: int = 1,
        unseen: float = 0.0,
        target_nodes: Tensor | None = None,
        basis: Tensor = LINEAR,
        pairs: Tensor | None = None,
        num_columns: int = 1,
    ):
        super().__init__()
        self.config = config
        self.unseen = unseen
        self.num_columns = num_columns
        num_outputs = num_targets * num_columns
        hidden = config.hidden
        self.register_buffer("basis", basis.clone())
        num_effects = basis.size(1)
        if config.embedding:
            self.embedding = nn.Parameter(torch.randn(num_nodes, hidden))  # sent in the first layer
            self.identity = nn.Parameter(torch.zeros(num_nodes, hidden))  # the states before it
        self.project = None  # features add to both
        if num_features:
            self.project = nn.Linear(num_features, 2 * hidden, bias=False)
        layers = [KnockoutConv(hidden, num_relations) for _ in range(config.layers)]
        self.layers = nn.ModuleList(layers)
        # From differences of states alone, a bias would only learn rounding errors.
        self.norm = nn.LayerNorm(hidden, bias=config.readout != "global")
        self.baseline = self.local_readout = self.change_readout = None
        if config.start == "baseline" and config.readout != "global":
            from baseline_term import BaselineReadout  # a part, which need not be here

            self.baseline = BaselineReadout(num_nodes, num_targets, num_effects)
        if config.readout in ("local", "both"):
            self.local_readout = LocalReadout(hidden, num_outputs, num_effects, pairs)
        if config.readout in ("global", "both"):
            self.change_readout = GlobalReadout(num_nodes, hidden, num_outputs)
        if config.readout == "nodes":
            if self.baseline is not None:
                # Thousands of effects per node would learn noise.
                self.baseline.requires_grad_(False)
            self.change_readout = NodeReadout(num_nodes, hidden, target_nodes)

    @classmethod
    def from_tables(
        cls,
        config: ModelConfig,
        tables: Any,
        basis: Tensor,
        target_nodes: Tensor | None = None,
        pairs: Tensor | None = None,
        num_columns: int = 1,
    ) -> "KnockoutGNN":
        """Returns a model for `data_tables.Tables`, which starts from the mean of the scores."""
        return cls(
            config,
            num_nodes=len(tables.genes),
            num_relations=len(tables.relations),
            num_features=tables.features.size(1),
            num_targets=len(tables.targets),
            unseen=tables.unseen_share("val"),  # training hides as many nodes
            basis=basis,
            target_nodes=target_nodes,
            pairs=pairs,
            num_columns=num_columns,
        )

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns outputs [B, T * C]; raises `RuntimeError` if the batch is on another device.

        In training, all that is random follows from `batch.seed`, a long tensor, and `batch.index`.
        """
        first, *others = self.parts(graph, batch).values()
        return sum(others, start=first).to(self.norm.weight.dtype)

    def parts(self, graph: SharedGraph, batch: Data) -> dict[str, Tensor]:
        """Returns the terms that add up to the output, [B, T * C] each, by name, as in `PARTS`."""
        wild = self.wild_type(graph, batch)
        dose = self.dose(wild, batch)
        parts = {}
        if self.baseline is not None:
            baseline = self.baseline(wild.draws.is_known, dose, batch)
            parts["without_graph"] = in_first_column(baseline, self.num_columns)
        if self.local_readout is not None:
            parts |= self.local_readout(graph, wild, dose, batch)
        if self.change_readout is not None:
            changes = self.changes(graph, batch, wild)
            parts["knockout"] = self.change_readout(changes, wild, batch)
        return parts

    def dose(self, wild: WildType, batch: Data) -> Tensor:
        """Returns how far perturbed nodes are from intact, in the ways they respond, [P, K]."""
        return (doses(batch.level) @ self.basis.to(batch.level.dtype)).to(wild.final.dtype)

    def wild_type(self, graph: SharedGraph, batch: Data) -> WildType:
        """Returns the pass on the intact graph; raises as `forward` does."""
        graph.check(batch)
        messages = graph.propagate
        if self.config.message_passing in ON_COPIES:
            messages = messages_on_copies(graph)
        draws = self.draw(graph, batch)
        x, sent = self.embed(graph, draws)
        final, layers = self.encode(x, sent, messages)
        return WildType(x, sent, layers, self.norm(final), draws)

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
        # Were the slope never hidden, it would leave the graph little to explain of unseen nodes.
        is_known = for_hiding.narrow(0, 0, num_nodes).t() >= self.unseen
        factors = for_dropout.ge_(rate).div_(1 - rate)
        return Draws(is_known, *factors.tensor_split([num_nodes]))

    def embed(self, graph: SharedGraph, draws: Draws) -> tuple[Tensor, Tensor]:
        """Returns the nodes' identities, and what they send in the first layer, [N, 1, H] each."""
        if self.config.embedding:
            x = self.identity * draws.is_known.select(0, 0).unsqueeze(1)
            sent = self.embedding
        else:
            x = sent = self.norm.weight.new_zeros(graph.num_nodes, self.config.hidden)
        if self.project is not None:
            for_x, for_sent = self.project(graph.x).to(x.dtype).chunk(2, dim=1)
            x = x + for_x
            sent = sent + for_sent
        return x.unsqueeze(1), (sent * draws.node_dropout).unsqueeze(1)

    def encode(
        self, x: Tensor, sent: Tensor, messages: Messages, first: int = 0
    ) -> tuple[Tensor, list[LayerStates]]:
        """Returns the states after the layers from `first` on, [N, B, H], and those of each layer.

        `x` are the states before them, `sent` is as in `WildType`; alike in all samples: [N, 1, H].
        """
        layers = []
        for depth, layer in enumerate(self.layers[first:], first):
            states = layer(x, messages, sent if depth == 0 else None)
            layers.append(states)
            x = states.after
        return x, layers

    def changes(self, graph: SharedGraph, batch: Data, wild: WildType) -> Tensor:
        """Returns the changes of the living nodes' states, as the readout sums them up, [B, width].

        A batch with a plan, as of `model_reach.py`, brings a faster way to the same numbers.
        """
        if "plan" in batch:
            return batch.plan.changes(self, graph, wild)
        changes = []
        for messages, level in self.passes(graph, batch):
            changes.append(self.checkpointed(self.read_changes, messages, level, wild))
        return torch.cat(changes)

    def passes(self, graph: SharedGraph, batch: Data) -> Iterator[tuple[Messages, Tensor]]:
        """Yields the messages between the living nodes of some samples, and their levels [N, b].

        Few samples run through all layers at once, so that they stay in cache.
        """
        levels = graph.levels(batch)
        if self.config.message_passing in ON_COPIES:
            yield messages_on_copies(graph, batch), levels
            return
        states = self.norm.weight.expand(graph.num_nodes, 1, -1)
        first = 0
        for level in levels.split(graph.samples_at_once(states), dim=1):
            yield SharedMessages(graph, batch, level, first), level
            first += level.size(1)

    def read_changes(self, messages: Messages, level: Tensor, wild: WildType) -> Tensor:
        """Returns `changes` of some samples, [b, width]."""
        change = self.change_of_states(messages, level, wild)
        return self.change_readout.keep(change, level > 0, wild)

    def change_of_states(self, messages: Messages, level: Tensor, wild: WildType) -> Tensor:
        """Returns the states of all nodes less those of the intact graph, [N, b, H]."""
        final, _ = self.encode(wild.x, wild.sent, messages)
        return self.norm(final) - wild.final

    def checkpointed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Calls `function`, whose activations model.checkpointing recomputes in backward."""
        # Or gradients of the same low-precision copy of a weight add up over all calls.
        torch.clear_autocast_cache()
        if self.config.checkpointing and self.training:
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters without weight decay: vectors, and the baseline's."""
        names = set()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 or name.startswith("baseline."):
                names.add(name)
        return names


def messages_on_copies(graph: SharedGraph, batch: Data | None = None) -> Messages:
    """Returns sums over masked copies of the graph for a batch, by default one intact sample."""
    from mask_copies import ExpandedMessages, intact_batch  # a part, which need not be here

    if batch is None:
        batch = intact_batch(graph.device)
    return ExpandedMessages(graph, batch)


def in_first_column(values: Tensor, num_columns: int) -> Tensor:
    """Returns outputs [B, T * C] whose first columns are values [B, T]; others are 0."""
    return nn.functional.pad(values.unsqueeze(2), (0, num_columns - 1)).flatten(start_dim=1)


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


class KnockoutConv(nn.Module):
    """x + gelu(update), update = root(h) + out(scale * sum of weight * gate_relation * h_source).

    The sum is over the living edges that lead to a node.

    A relational graph convolution of h = norm(x), whose messages are the source's state times a
    vector of the relation (CompGCN, Vashishth et al. 2020, arXiv:1911.03082). The root term is not
    masked: nothing reads the states of dead nodes.

    In the first layer, h is the norm of the embedding that the nodes send, but the root term takes
    x, the nodes' identities, which for a node that no training row knocks out are learnt only from
    what it sends to others in later layers.
    """

    # With normalised weights the sums are small: 0.2 for one of yeast's relations, where h has a
    # standard deviation of 1. Scaling makes neighbours outweigh a node's own embedding, which
    # carries no information about other nodes.
    SCALE = 10.0
    ENTRIES = (("gate", "relations", 0),)  # as of `KnockoutGNN`

    def __init__(self, hidden: int, num_relations: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.norm.bias.data[: hidden // 8], std=0.3)  # they count living neighbours
        self.root = nn.Linear(hidden, hidden)
        self.gate = nn.Parameter(torch.randn(num_relations, hidden) / num_relations**0.5)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, messages: Messages, sent: Tensor | None = None) -> LayerStates:
        """Returns x, h and update, as above, given the states x [N, B, H], or alike ones [N, 1, H].

        `messages` sums over the living edges; `sent` is the embedding, in the first layer alone.
        """
        if sent is None:
            h = self.norm(x)
            root = self.root(h)
        else:
            h = self.norm(sent)
            root = self.root(x)
        update = root + self.out(messages(h, self.SCALE * self.gate))
        return LayerStates(x, h, update.to(x.dtype))  # sparse gradients do not add up in half


class LocalReadout(nn.Module):
    """A permutation-invariant function of the wild-type states of any number of perturbed nodes.

    A node has features for each of its responses, which count times the doses. It adds a weighted
    product per pair of nodes (a factorisation machine, Rendle 2010) and an MLP of the summed node
    and pair features. Both start at zero.
    """

    ENTRIES = (*ENTRIES_OF_EMBED, ("pair.weight", "outputs", 0), *ENTRIES_OF_HEAD)

    def __init__(
        self, hidden: int, num_outputs: int, num_effects: int = 1, pairs: Tensor | None = None
    ):
        super().__init__()
        self.pair_readout = None
        if pairs is not None:
            self.pair_readout = PairReadout(pairs, hidden, num_outputs)
        self.embed = nn.Linear(hidden, num_effects * 2 * hidden)
        self.pair = nn.Linear(2 * hidden, num_outputs, bias=False)
        self.norm = nn.LayerNorm(4 * hidden)
        self.head = readout_head(4 * hidden, hidden, num_outputs)
        nn.init.zeros_(self.pair.weight)

    def forward(
        self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data
    ) -> dict[str, Tensor]:
        """Returns the readout's terms of the output, [B, T * C], that of pairs by itself."""
        pairs, hidden = self.inputs(wild, dose, batch)
        parts = {"local": self.pair(pairs) + self.head[1:](hidden)}
        if self.pair_readout is not None:
            parts["pairs"] = self.pair_readout(graph, batch, hidden, self.head[1:])
        return parts

    def inputs(self, wild: WildType, dose: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
        """Returns the products of pairs and what the MLP's first layer gives, [B, 2H] each."""
        states = wild.final.squeeze(1).index_select(0, batch.perturbed)
        factors = wild.draws.node_dropout.index_select(0, batch.perturbed)
        of_responses = self.embed(states * factors).unflatten(1, (dose.size(1), -1))
        state = (dose.unsqueeze(2) * of_responses).sum(dim=1)  # [P, 2H]
        nodes = sum_by_sample(state, batch)
        squares = sum_by_sample(state.square(), batch)
        pairs = (nodes.square() - squares) / 2  # sum over i < j of state_i * state_j
        features = self.norm(torch.cat([nodes, pairs], dim=1)).unflatten(1, (4, -1))
        features = features * wild.draws.row_dropout.unsqueeze(1)
        return pairs, self.head[0](features.flatten(start_dim=1))


class GlobalReadout(nn.Module):
    """An MLP of the changes of the living nodes' states, summed over the nodes."""

    ENTRIES = ENTRIES_OF_HEAD

    def __init__(self, num_nodes: int, hidden: int, num_outputs: int):
        super().__init__()
        self.scale = num_nodes**-0.5
        self.head = readout_head(hidden, hidden, num_outputs)

    def keep(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Sums the changes [N, b, H] of the nodes that are `alive` [N, b], to [b, H]."""
        return (change * alive.unsqueeze(-1)).sum(0)

    def forward(self, changes: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Maps what `keep` returns of all samples, [B, H], to [B, T * C]."""
        features = torch.asinh(self.scale * changes)  # as thousands of neighbours add up
        return self.head(features * wild.draws.row_dropout)


class NodeReadout(nn.Module):
    """The effect on each target node, from how that node's own state changes.

    An effect is a sum over channels of a function of the change, 0 for no change, weighted by a
    function of the node's wild-type state. To a target that is itself perturbed, and has no state
    if it is deleted, adds 1 - level times a function of its wild-type state. Both start at zero.
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
        """Maps changes and wild-type states, [..., H], to the effects on these nodes, [...]."""
        response = nn.functional.gelu(self.change(change))
        return (response * self.weight(wild_type)).sum(-1).to(change.dtype)

    def keep(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Returns the effects [b, N], given all changes [N, b, H]; those on dead nodes are 0."""
        return (self.effect(change * wild.draws.node_dropout.unsqueeze(1), wild.final) * alive).T

    def forward(self, effects: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Returns the effects on the targets, [B, T], of those on all nodes, [B, N]."""
        return self.with_direct(effects, wild, batch).index_select(1, self.target_nodes)

    def with_direct(self, effects: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Returns effects [B, N], with those of a node's own level on itself."""
        states = wild.final.squeeze(1).index_select(0, batch.perturbed)
        direct = ((1 - batch.level) * self.dead(states).squeeze(1)).to(effects.dtype)
        entries = (batch.perturbed_batch, batch.perturbed)
        return effects.index_put(entries, direct, accumulate=True)


def readout_head(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Returns an MLP from [B, inputs] to [B, outputs] whose outputs start at zero."""
    last = nn.Linear(2 * hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, 2 * hidden), nn.GELU(), last)
