"""The knock-out GNN: a sum of terms, which read node states with and without the knocked-out nodes.

1. The *encoder* computes the states of all nodes on the intact graph, [N, 1, H]. This result is the
   *wild type*. It is computed once for each batch.
2. The term *local* reads the wild-type states of the perturbed nodes of each sample. It is a set
   function: the order of the nodes does not matter.
3. The term *knockout* runs the encoder's layers again, for every sample on the graph without its
   dead nodes, [N, B, H]. It reads how the states of the living nodes differ from the wild type.

`KnockoutTask.build_model` assembles these and further terms.

Shapes: N nodes, R relations, B samples in the batch, b samples in a block of the batch, P perturbed
nodes in the batch, H hidden channels, K effects of a node, T targets of C columns each (see
losses.py; the columns of a target are adjacent). Node states are node-major, [N, B, H], so that one
sparse product serves all samples at once (see mask.py).
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
        """Whether the model also computes the states on the graph without the knocked-out nodes."""
        return self.readout != "local"

    @property
    def has_local(self) -> bool:
        """Whether the model reads the wild-type states of the knocked-out nodes."""
        return self.readout in ("local", "both")

    @property
    def has_pairs(self) -> bool:
        """Whether the model also reads features of pairs of knocked-out nodes."""
        return self.pairs and self.has_local


class Draws(NamedTuple):
    """The random masks and factors of a training step. In evaluation, all are True or 1."""

    # Bool [2, N]. Row 0 is False for nodes whose identity and effect in the baseline are hidden.
    # Row 1 is False for nodes whose slope in the baseline is hidden.
    is_shown: Tensor
    # Dropout factors of the nodes' states, [N, H]. The passes with and without the dead nodes use
    # the same factors, because a difference between them would look like a knock-out.
    node_dropout: Tensor
    row_dropout: Tensor  # dropout factors of each sample's features in the readouts, [B, H]


class WildType(NamedTuple):
    """The result of the encoder on the intact graph, the same for all samples of a batch."""

    encoder: "Encoder"  # the encoder that computed it
    x: Tensor  # the nodes' identities, which are their states before the first layer, [N, 1, H]
    sent: Tensor  # the embeddings that the nodes send in the first layer, not normalised, [N, 1, H]
    final: Tensor  # normalised states after the last layer, [N, 1, H]
    draws: Draws  # the random masks and factors of the step
    # Tensors that a term stores for a later term. The term local stores "hidden" for pairs.
    kept: dict[str, Tensor]
    # Computes the pooled changes of a batch's samples: `pool_in_blocks` or a faster function.
    pool_batch: Callable[..., Tensor]


class KnockoutGNN(nn.Module):
    """Predicts the effect of each sample's knock-outs, in standard deviations from the mean.

    The output, [B, T * C], is the sum of `terms`. Each term is a module that maps the graph, the
    `WildType`, the doses of the perturbed nodes, [P, K], and the batch to [B, T * C]. All terms
    except the baseline are 0 at the start of training. The order of the terms does not matter, with
    one exception: pairs must follow local, because pairs adds inputs to local's MLP. The states of
    each node are normalised separately, so a prediction never depends on the other samples of its
    batch.

    Args:
        config: options of the model.
        num_nodes, num_relations: N and R of the graph.
        num_features: number of the features that each node has in the graph.
        unseen: fraction of nodes whose own identity and effect are hidden in a training step, so
            that the model learns to predict nodes that no training row knocks out. Nothing is
            hidden if dropout is 0.
        basis: matrix that maps the three `mask.doses` of a level to the K doses of a node's
            effects, [3, K].
        num_columns: C.
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
        self.terms = nn.ModuleDict()  # is empty here: `KnockoutTask.build_model` adds the terms

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns the outputs of a batch, [B, T * C].

        In training, all random numbers are functions of `batch.seed`, a long tensor, and
        `batch.index`. Raises `RuntimeError` if the batch and the graph are on different devices.
        """
        output = sum(self.parts(graph, batch).values())
        return output.to(self.encoder.norm.weight.dtype)

    def parts(self, graph: SharedGraph, batch: Data) -> dict[str, Tensor]:
        """Returns the value of each term by its name, [B, T * C] each. Their sum is the output."""
        wild = self.wild_type(graph, batch)
        dose = self.dose(wild, batch)
        return {name: term(graph, wild, dose, batch) for name, term in self.terms.items()}

    def dose(self, wild: WildType, batch: Data) -> Tensor:
        """Returns the K doses of each perturbed node, [P, K]. The doses of intact nodes are 0."""
        return (doses(batch.level) @ self.basis.to(batch.level.dtype)).to(wild.final.dtype)

    def wild_type(self, graph: SharedGraph, batch: Data) -> WildType:
        """Returns the result of the encoder on the intact graph.

        Raises `RuntimeError` if the batch and the graph are on different devices.
        """
        graph.check(batch)
        return self.encoder(graph, self.draw(graph, batch))

    def draw(self, graph: SharedGraph, batch: Data) -> Draws:
        """Returns the random masks and factors of a training step.

        The random numbers of a node depend only on `batch.seed` and the node. The random numbers of
        a sample depend only on `batch.seed` and its row in the table, `batch.index`.
        """
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
        # The baseline's slope is hidden, too. Otherwise, the slope would explain most of the effect
        # of an unseen node, and the terms that use the graph would learn little about such nodes.
        is_shown = for_hiding.narrow(0, 0, num_nodes).t() >= self.unseen
        factors = for_dropout.ge_(rate).div_(1 - rate)
        return Draws(is_shown, *factors.tensor_split([num_nodes]))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters without weight decay.

        They are all vectors, and all parameters of the baseline.
        """
        parameters = dict(self.named_parameters())
        prefix = "terms.without_graph."
        return {name for name in parameters if parameters[name].dim() == 1 or prefix in name}


def uniform(seed: Tensor, key: Tensor, width: int) -> Tensor:
    """Returns `width` uniform random numbers in [0, 1] for each key, float32 [keys, width].

    Each number is a function of only the seed, the key and the column, and has the same bits on all
    devices. The bits are mixed as in SplitMix64 (Steele, Lea and Flood 2014), except that its first
    multiplier is used in each round.

    Args:
        seed: a long scalar.
        key: long [keys].
    """
    golden = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed 64-bit integer
    x = (seed + key.unsqueeze(1)) * golden + torch.arange(width, device=key.device)
    for _ in range(2):
        x ^= x >> 32
        x *= golden
    return (x * 2**-64).add_(0.5)


# ---- Layers --------------------------------------------------------------------------------------
class Encoder(nn.Module):
    """The embeddings of the nodes and the graph layers, which compute a state for each node."""

    def __init__(self, config: ModelConfig, num_nodes: int, num_relations: int, num_features: int):
        super().__init__()
        self.config = config
        hidden = config.hidden
        if config.embedding:
            # The vector that a node sends in the first layer.
            self.embedding = nn.Parameter(torch.randn(num_nodes, hidden))
            # The state of a node before the first layer.
            self.identity = nn.Parameter(torch.zeros(num_nodes, hidden))
        self.project = None  # maps the node features to summands of both vectors
        if num_features:
            self.project = nn.Linear(num_features, 2 * hidden, bias=False)
        self.first = FirstConv(hidden, num_relations)
        layers = [KnockoutConv(hidden, num_relations) for _ in range(config.layers - 1)]
        self.layers = nn.ModuleList(layers)
        # With readout=global, the model reads only differences of states. A bias would cancel in
        # them, and its gradient would consist only of rounding errors.
        self.norm = nn.LayerNorm(hidden, bias=config.readout != "global")

    def forward(self, graph: SharedGraph, draws: Draws) -> WildType:
        """Returns the wild type."""
        x, sent = self.embed(graph, draws)
        graph = self.living(graph)
        states = self.first(x, sent, graph)
        for conv in self.layers:
            states = conv(states, graph)
        final = self.norm(states)
        return WildType(self, x, sent, final, draws, kept={}, pool_batch=pool_in_blocks)

    def embed(self, graph: SharedGraph, draws: Draws) -> tuple[Tensor, Tensor]:
        """Returns the nodes' identities, and the embeddings that they send, [N, 1, H] each.

        An identity is the state of a node before the first layer. A hidden identity is 0. Projected
        node features are added to both, and dropout is applied to the embeddings.
        """
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
        """Returns an object with the methods of `SharedGraph` that the layers call.

        It is the graph itself. If message_passing requires copies of the graph, it is one copy for
        each sample of the batch, or one intact copy if there is no batch.
        """
        if self.config.message_passing not in ON_COPIES:
            return graph
        from mask_copies import CopiedGraph, intact_batch  # an optional part

        return CopiedGraph(graph, intact_batch(graph.device) if batch is None else batch)

    def checkpointed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Returns `function(*arguments)`.

        With model.checkpointing, the backward pass computes the activations of the function again,
        instead of storing them.
        """
        # Without this, autocast would use one low-precision copy of each weight in all calls of
        # this method, and would sum the gradients of the calls in low precision.
        torch.clear_autocast_cache()
        if self.config.checkpointing and self.training:
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)


class KnockoutConv(nn.Module):
    """A graph layer with residual connection, whose messages are masked by the nodes' levels.

    The new state of a node is

        x + gelu(root(h) + out(SCALE * sums)),  with h = norm(x)

    and `sums` is the sum over the living edges that lead to the node: the weight of the edge, times
    the vector `gate` of its relation, times the h of its source, times the level of its source.
    This is a relational graph convolution whose messages are products of the source and the
    relation (CompGCN, Vashishth et al. 2020, arXiv:1911.03082). The term root(h) is not masked,
    because nothing reads the states of dead nodes.
    """

    # With normalised weights, the sums have a small standard deviation: 0.2 for one of yeast's
    # relations, if h has 1. With this factor, the neighbours contribute more than the node's own
    # embedding, which does not carry information about other nodes.
    SCALE = 10.0

    def __init__(self, hidden: int, num_relations: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        # The bias gives some channels a constant part. Its sums count the living neighbours.
        nn.init.normal_(self.norm.bias.data[: hidden // 8], std=0.3)
        self.root = nn.Linear(hidden, hidden)
        self.gate = nn.Parameter(torch.randn(num_relations, hidden) / num_relations**0.5)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.activation = nn.GELU()

    def forward(self, x: Tensor, graph: SharedGraph, level: Tensor | None = None) -> Tensor:
        """Returns the states of the nodes after the layer, [N, B, H].

        Args:
            x: states before the layer, [N, B, H].
            graph: the graph, or an object with its method `propagate`.
            level: level of each node in each sample, [N, B]. None: all nodes are intact.
        """
        h = self.norm(x)
        root = self.root(h)
        sums = graph.propagate(h, self.SCALE * self.gate, level)  # over the living edges
        return self.add(x, root + self.out(sums))

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Returns x + gelu(update), [N, B, H]."""
        # Gradients of sparse products must not be summed in half precision.
        return x + self.activation(update.to(x.dtype))


class FirstConv(KnockoutConv):
    """The first layer, whose input states are the same in all samples.

    It differs from `KnockoutConv` in its inputs. Nodes send their normalised embeddings,
    h = norm(sent), and the root term, root(x), reads the identities of the nodes. If no training
    row knocks out a node, its identity is learnt only from the messages that the node sends in
    later layers.
    """

    def forward(
        self, x: Tensor, sent: Tensor, graph: SharedGraph, samples: Samples | None = None
    ) -> Tensor:
        """Returns the states of the nodes after the layer, [N, b, H].

        Args:
            x: identities of the nodes, [N, 1, H].
            sent: embeddings of the nodes, [N, 1, H].
            graph: the graph, or an object with its method `propagate_from_one`.
            samples: a block of b samples. None: all nodes are intact, and b is 1.
        """
        h = self.norm(sent)
        root = self.root(x)
        sums = graph.propagate_from_one(h, self.SCALE * self.gate, samples)
        return self.add(x, root + self.out(sums))


# ---- Terms ---------------------------------------------------------------------------------------
class LocalReadout(nn.Module):
    """A permutation-invariant function of the wild-type states of any number of perturbed nodes.

    The wild-type state of a node is mapped to K vectors, one for each effect. The node's feature
    vector, [2H], is the sum of these vectors, each times its dose. The feature vector of a pair of
    nodes is the element-wise product of their vectors. The term is the sum of two parts, which are
    0 at the start of training:

    - a linear function of the sum over all pairs (a factorisation machine, Rendle 2010)
    - an MLP of the sum over all nodes and the sum over all pairs
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
        """Returns two tensors, [B, 2H] each.

        The first is the sum of the feature vectors of all pairs of nodes in each sample. The second
        is the output of the MLP's first layer, before its activation.
        """
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
        """Returns the MLP's output, [B, T * C], given the output of its first layer, [B, 2H]."""
        return self.head[1:](hidden)


class KnockoutTerm(nn.Module):
    """Base class of terms that read how knock-outs change the states of the living nodes.

    A change is the normalised state of a node after the encoder's last layer, minus its state in
    the wild type. A subclass needs two methods, with the arguments of `GlobalReadout`:

    - `pool` maps the changes of b samples, [N, b, H], to one vector for each sample, [b, width]
    - `read` maps these vectors of all samples, [B, width], to the term, [B, T * C]
    """

    def forward(self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C]."""
        return self.read(wild.pool_batch(self, graph, wild, batch), wild, batch)

    def pooled(self, graph: SharedGraph, samples: Samples, wild: WildType) -> Tensor:
        """Returns the pooled changes of a block of b samples, [b, width].

        It runs all layers of the encoder on the graph without the dead nodes of each sample.
        """
        encoder = wild.encoder
        x = encoder.first(wild.x, wild.sent, graph, samples)  # [N, b, H]
        for conv in encoder.layers:
            x = conv(x, graph, samples.level)
        change = encoder.norm(x) - wild.final
        return self.pool(change, samples.level > 0, wild)


def pool_in_blocks(term: KnockoutTerm, graph: SharedGraph, wild: WildType, batch: Data) -> Tensor:
    """Returns the pooled changes of all samples of a batch, [B, width].

    The samples are processed in blocks, because the states of a few samples fit in the cache (see
    `SharedGraph.samples_at_once`).
    """
    living = wild.encoder.living(graph, batch)
    blocks = []
    for samples in living.in_blocks(batch, wild.final):
        blocks.append(wild.encoder.checkpointed(term.pooled, living, samples, wild))
    return torch.cat(blocks)


class GlobalReadout(KnockoutTerm):
    """An MLP of the changes of the living nodes' states, summed over the nodes."""

    def __init__(self, num_nodes: int, hidden: int, num_outputs: int):
        super().__init__()
        self.scale = num_nodes**-0.5
        self.head = readout_head(hidden, hidden, num_outputs)

    def pool(self, change: Tensor, alive: Tensor, wild: WildType) -> Tensor:
        """Returns the sum of the changes over the living nodes of each sample, [b, H].

        Args:
            change: change of each node's state in each sample, [N, b, H].
            alive: whether each node lives in each sample, bool [N, b].
            wild: the wild type.
        """
        return (change * alive.unsqueeze(-1)).sum(0)

    def read(self, pooled: Tensor, wild: WildType, batch: Data) -> Tensor:
        """Returns the term, [B, T * C], given the sums of all samples, `pooled` [B, H]."""
        features = torch.asinh(self.scale * pooled)  # compresses sums over thousands of neighbours
        return self.head(features * wild.draws.row_dropout)


def readout_head(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Returns an MLP that maps [B, inputs] to [B, outputs], and whose outputs are 0 at first."""
    last = nn.Linear(2 * hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, 2 * hidden), nn.GELU(), last)
