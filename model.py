"""The knock-out GNN: node states on the intact graph and without the knocked-out nodes, and a readout comparing them.

A *wild-type* pass runs once per batch on the intact graph. The *local* part of the readout is a set function of the
wild-type states of the knocked-out nodes. A *knock-out* pass runs for every sample on the graph without its dead nodes;
the *global* part of the readout pools how the states of the remaining nodes change between the two passes.

Shapes: N nodes, R relations, E_r edges of relation r, B samples, P knocked-out nodes in the batch, H hidden channels.
Node states are node-major, [N, B, H], so that one sparse product serves all samples at once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from mask import SharedGraph


@dataclass(frozen=True)
class ModelConfig:
    hidden: int = 32
    layers: int = 2
    dropout: float = 0.1
    message_passing: Literal["shared", "expanded"] = "shared"
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
        num_nodes, num_relations: size of the graph that `forward` takes.
        y_mean, y_std: mean and standard deviation of the training targets, saved in checkpoints as buffers.
    """

    def __init__(
        self, config: ModelConfig, num_nodes: int, num_relations: int, y_mean: float = 0.0, y_std: float = 1.0
    ):
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.embedding = nn.Parameter(torch.randn(num_nodes, hidden))
        self.layers = nn.ModuleList(KnockoutConv(hidden, num_relations) for _ in range(config.layers))
        self.norm = nn.LayerNorm(hidden)
        self.local_readout = LocalReadout(num_nodes, hidden, config.dropout) if config.readout != "global" else None
        self.global_readout = GlobalReadout(hidden, config.dropout) if config.readout != "local" else None
        self.register_buffer("y_mean", torch.tensor(y_mean))
        self.register_buffer("y_std", torch.tensor(y_std))

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns predictions [B]; raises `RuntimeError` if the batch and the graph are on different devices."""
        graph.check(batch)
        # Both passes share one dropout mask per layer: with different masks, noise would drown the knock-outs' effect.
        ones = self.embedding.new_ones(len(self.layers) + 1, *self.embedding.shape)
        masks = nn.functional.dropout(ones, self.config.dropout, self.training).unsqueeze(2)
        expanded = self.config.message_passing == "expanded"
        intact = ExpandedMessages(graph, intact_batch(graph.device)) if expanded else IntactMessages(graph)
        wild_type = self.encode(intact, masks)  # [N, 1, H]
        prediction = 0.0
        if self.local_readout is not None:
            prediction = prediction + self.local_readout(wild_type.squeeze(1), batch)
        if self.global_readout is not None:
            prediction = prediction + self.global_readout(self.changes(graph, batch, masks, intact, wild_type))
        return self.y_mean + self.y_std * prediction.to(self.y_mean.dtype)

    def changes(self, graph: SharedGraph, batch: Data, masks: Tensor, intact: "Messages", wild_type: Tensor) -> Tensor:
        """Returns the change that knock-outs make to the states of living nodes, pooled over these nodes, [B, H]."""
        keep = graph.keep(batch)

        def pool(messages: Messages, alive: Tensor) -> Tensor:
            return self.global_readout.pool(wild_type, self.encode(messages, masks), alive)

        if self.config.checkpointing and self.training:
            pool = partial(checkpoint, pool, use_reentrant=False)
        if self.config.message_passing == "expanded":
            return pool(ExpandedMessages(graph, batch), keep)
        # Each block of samples runs through the whole network, so that its states stay in cache.
        size = block_size(wild_type)
        blocks = zip(keep.split(size, dim=1), intact.lost_messages(batch).split(size, dim=1), strict=True)
        return torch.cat([pool(SharedMessages(intact, alive, lost), alive) for alive, lost in blocks])

    def encode(self, messages: "Messages", masks: Tensor) -> Tensor:
        """Returns node states [N, B, H] after all layers; `masks` [layers + 1, N, 1, H] are dropout factors."""
        input_mask, *layer_masks = masks
        x = self.embedding.unsqueeze(1) * input_mask
        for depth, (layer, mask) in enumerate(zip(self.layers, layer_masks, strict=True)):
            x = x + mask * layer(x, messages, depth)
        return self.norm(x)


class KnockoutConv(nn.Module):
    """gelu(root(h) + out(scale * sum over relations r, living edges of r: weight * gate_r * h_source)), h = norm(x).

    A relational graph convolution whose messages are the source's state times a vector of the relation (CompGCN,
    Vashishth et al. 2020, arXiv:1911.03082). The root term is not masked: nothing reads the states of dead nodes.
    """

    # With weights 1/sqrt(d_i * d_j) the sums are small: 0.3 on yeast, where h has a standard deviation of 1. Scaling
    # makes neighbours outweigh a node's own embedding, which carries no information about other nodes.
    SCALE = 10.0

    def __init__(self, hidden: int, num_relations: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.root = nn.Linear(hidden, hidden)
        self.gate = nn.Parameter(torch.randn(num_relations, hidden) / num_relations**0.5)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, messages: "Messages", depth: int) -> Tensor:
        """Maps x [N, B, H] to [N, B, H]; at depth 0, x is [N, 1, H], the same for all samples."""
        h = self.norm(x)
        return nn.functional.gelu(self.root(h) + self.out(messages(h, self.SCALE * self.gate, depth)))


class IntactMessages:
    """Sums messages over all edges of the graph: x [N, 1, H] and gate [R, H] give [N, 1, H].

    In the first layer all samples have the same states, so a sample's sums are those of the intact graph minus the
    messages of its dead nodes: `first_sums - lost_messages(batch)`. Later layers have no such shortcut.
    """

    def __init__(self, graph: SharedGraph):
        self.graph = graph

    def __call__(self, x: Tensor, gate: Tensor, depth: int) -> Tensor:
        sums = aggregate(self.graph, x, gate)
        if depth == 0:
            self.first_x, self.first_gate, self.first_sums = x, gate, sums
        return sums

    def lost_messages(self, batch: Data) -> Tensor:
        """Returns the part of the first layer's sums that came from each sample's dead nodes, [N, B, H].

        Rows of dead nodes also contain the messages sent to them, some twice; nothing reads these rows.
        """
        x = self.first_x.squeeze(1)  # [N, H]
        sample, relation, source, target, weight = self.graph.dead_messages(batch)
        message = x.index_select(0, source) * self.first_gate.index_select(0, relation) * weight.unsqueeze(1)
        num_samples = batch.perturbed_ptr.numel() - 1
        lost = message.new_zeros(len(x) * num_samples, x.size(1))
        return lost.index_add(0, target * num_samples + sample, message).view(len(x), num_samples, x.size(1))


class SharedMessages:
    """Sums messages over each sample's live edges on the one shared graph: A @ (keep * x).

    The left factor of keep * (A @ (keep * x)) is left out: it would only zero sums of dead nodes, which nothing reads.
    """

    def __init__(self, intact: IntactMessages, keep: Tensor, lost: Tensor):
        self.graph = intact.graph
        self.keep = keep.unsqueeze(-1)  # [N, B, 1]
        self.first_sums = intact.first_sums - lost

    def __call__(self, x: Tensor, gate: Tensor, depth: int) -> Tensor:
        return self.first_sums if depth == 0 else aggregate(self.graph, self.keep * x, gate)


def aggregate(graph: SharedGraph, x: Tensor, gate: Tensor) -> Tensor:
    """Returns the sum over relations r of A_r @ (gate_r * x), for x [N, B, H] and gate [R, H]."""
    return sum(graph.propagate(r, (x * gate_r).flatten(1)) for r, gate_r in enumerate(gate)).view_as(x)


class ExpandedMessages:
    """Sums the same messages, in either pass, over B block-diagonal copies of the graph with masked edges.

    This is the reference for the shared route, and the one to use for layers that need per-edge values.
    """

    def __init__(self, graph: SharedGraph, batch: Data):
        edge_index, edge_masks = graph.expand(batch), graph.edge_masks(batch)
        self.num_samples = batch.perturbed_ptr.numel() - 1
        self.edges = []
        for r, relation in enumerate(graph.relations):
            value = graph.weight(r).repeat(self.num_samples) * edge_masks[relation]
            self.edges.append((*edge_index[relation], value))

    def __call__(self, x: Tensor, gate: Tensor, depth: int) -> Tensor:
        x = x.expand(-1, self.num_samples, -1)
        copies = x.transpose(0, 1).flatten(0, 1)  # sample-major, [B * N, H]
        out = 0.0
        for (source, target, value), relation_gate in zip(self.edges, gate, strict=True):
            message = (copies * relation_gate).index_select(0, source) * value.unsqueeze(-1)
            out = out + scatter(message, target, dim=0, dim_size=len(copies), reduce="sum")
        return out.view(self.num_samples, len(x), x.size(2)).transpose(0, 1)


Messages = IntactMessages | SharedMessages | ExpandedMessages


def intact_batch(device: torch.device) -> Data:
    """Returns a batch of one sample without knock-outs."""
    none = torch.empty(0, dtype=torch.long, device=device)
    ptr = torch.zeros(2, dtype=torch.long, device=device)
    return Data(perturbed=none, perturbed_batch=none, perturbed_ptr=ptr, num_dead_edges=0)


class LocalReadout(nn.Module):
    """A permutation-invariant function of the wild-type states of any number of knocked-out nodes.

    It adds a learned effect per node, a weighted product per pair of nodes (a factorisation machine, Rendle 2010), and
    an MLP of the summed node and pair features.
    """

    def __init__(self, num_nodes: int, hidden: int, dropout: float):
        super().__init__()
        self.effect = nn.Parameter(torch.zeros(num_nodes))
        self.embed = nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, 2 * hidden))
        self.pair = nn.Linear(2 * hidden, 1, bias=False)
        self.norm = nn.LayerNorm(4 * hidden)
        self.head = readout_head(4 * hidden, 2 * hidden, dropout)

    def forward(self, wild_type: Tensor, batch: Data) -> Tensor:
        """Maps wild_type [N, H] to [B]."""
        num_samples = batch.perturbed_ptr.numel() - 1

        def total(values: Tensor) -> Tensor:
            out = values.new_zeros(num_samples, *values.shape[1:])
            return out.index_add(0, batch.perturbed_batch, values)

        state = self.embed(wild_type.index_select(0, batch.perturbed))  # [P, 2H]
        nodes = total(state)
        pairs = (nodes.square() - total(state.square())) / 2  # sum over pairs i < j of state_i * state_j
        effects = total(self.effect.index_select(0, batch.perturbed))
        return effects + self.pair(pairs).squeeze(1) + self.head(self.norm(torch.cat([nodes, pairs], dim=1)))


class GlobalReadout(nn.Module):
    """An MLP of the difference between knock-out and wild-type states, summed over the living nodes.

    The MLP's last layer is initialised to zero, so that training starts from the local part alone.
    """

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.head = readout_head(hidden, 2 * hidden, dropout)
        nn.init.zeros_(self.head[-2].weight)
        nn.init.zeros_(self.head[-2].bias)

    def pool(self, wild_type: Tensor, knocked_out: Tensor, keep: Tensor) -> Tensor:
        """Maps wild_type [N, 1, H], knocked_out [N, B, H] and keep [N, B] to [B, H], scaled by 1 / sqrt(N)."""
        return torch.einsum("nbh,nb->bh", knocked_out - wild_type, keep.to(knocked_out.dtype)) / len(keep) ** 0.5

    def forward(self, pooled: Tensor) -> Tensor:
        """Maps pooled [B, H] to [B]; asinh compresses the large sums that a hub's thousands of neighbours give."""
        return self.head(torch.asinh(pooled))


def readout_head(inputs: int, hidden: int, dropout: float) -> nn.Module:
    """Returns an MLP that maps [B, inputs] to [B]."""
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 1), nn.Flatten(0))


def block_size(wild_type: Tensor) -> int:
    """Returns how many samples' states fit in 1 MB, about a CPU core's cache, or in 1 GB on a GPU; at least 1."""
    size = 2**30 if wild_type.is_cuda else 2**20
    return max(1, size // (wild_type.numel() * wild_type.element_size()))
