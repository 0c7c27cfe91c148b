"""Generates random tables whose scores depend on the graph in a known way.

    python -m tests.bench.synthetic small|yeast|network|expression|dose|planted... FOLDER

This writes `edges.tsv` and `scores.tsv` to FOLDER, and prints the options of train.py that select
them. The graph has hubs and modules. A sample knocks out a few nodes, which are often related.
Noise is added to all scores. A score of each preset is:

- small, yeast: a sum of effects of single nodes, of pairs within a module, and of short paths
  between the nodes. `small` is the example. The graph of `yeast` has the size of the real graph.
- network: the activity that living nodes lose if failures spread along edges.
- expression: the change of one node. A sample has a score for each node, which is its profile.
  Knock-outs change the nodes within two edges.
- dose: a sum of responses that saturate. A perturbed node has one of five levels, from 0 to 3.
- planted and presets whose names begin with it: a sum of effects of two nodes and of counts in the
  graph between them, such as common neighbours.
"""

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.utils import cumsum, to_undirected

from data_cells import SPLITS
from data_tables import Tables, pack


@dataclass(frozen=True)
class Preset:
    """The size of a synthetic problem, and the kind of its scores."""

    num_nodes: int
    num_edges: dict[str, int]
    num_modules: int
    num_samples: int
    deletions: tuple[int, int]  # the smallest and largest number of knock-outs in a sample
    # Number of rounds in which failures or responses spread along edges. If it is above 0, scores
    # are `failure_losses` or, with levels, `dose_responses`.
    rounds: int = 0
    # Number of samples of two nodes, if scores are profiles. In other samples, each of these nodes
    # is knocked out alone.
    num_doubles: int | None = None
    # Levels of perturbed nodes, if scores are `dose_responses`; (): all nodes are deleted.
    levels: tuple[float, ...] = ()
    rules: tuple[str, ...] = ()  # counts from `RULES`, if scores are `planted_scores`


PLANTED = Preset(
    num_nodes=300,
    num_edges={"physical": 1500, "regulatory": 3000},
    num_modules=1,
    num_samples=1500,
    deletions=(2, 2),
    rules=("common neighbours", "common targets"),
)

PRESETS = {
    "small": Preset(
        num_nodes=400,
        num_edges={"physical": 2400, "regulatory": 800, "coexpression": 4800},
        num_modules=16,
        num_samples=6000,
        deletions=(1, 3),
    ),
    "yeast": Preset(
        num_nodes=6607,
        num_edges={
            "regulatory": 9_753,
            "physical": 139_463,
            "tflink": 201_898,
            "neighborhood": 147_874,
            "fusion": 11_810,
            "cooccurence": 11_115,
            "coexpression": 1_002_538,
            "experimental": 825_101,
            "database": 73_818,
        },
        num_modules=120,
        num_samples=20_000,
        deletions=(3, 3),
    ),
    "network": Preset(
        num_nodes=400,
        num_edges={"physical": 1600, "regulatory": 800},
        num_modules=16,
        num_samples=8000,
        deletions=(1, 3),
        rounds=3,
    ),
    "expression": Preset(
        num_nodes=6000,
        num_edges={"activates": 20_000, "represses": 20_000, "binds": 20_000},
        num_modules=1,
        num_samples=1484,
        deletions=(1, 2),
        num_doubles=100,
    ),
    "dose": Preset(
        num_nodes=400,
        num_edges={"physical": 1600, "regulatory": 800},
        num_modules=16,
        num_samples=8000,
        deletions=(1, 3),
        rounds=2,
        levels=(0.0, 0.25, 0.5, 2.0, 3.0),
    ),
    "planted": PLANTED,
    "planted-neighbours": replace(PLANTED, rules=("common neighbours",)),
    "planted-targets": replace(PLANTED, rules=("common targets",)),
    "planted-edge": replace(PLANTED, rules=("edge",)),
    "planted-paths": replace(PLANTED, rules=("paths of two",)),
}
# Effect of the loss of a source on its targets, for each relation.
REGULATION = {"activates": -1.0, "represses": 0.8, "binds": -0.2}
# Effect of each count between two nodes on their score.
RULES = {"common neighbours": -1.0, "common targets": 0.8, "edge": -1.0, "paths of two": 1.0}


def generate(preset: Preset, seed: int = 0) -> tuple[Tables, Tensor]:
    """Returns tables without a split, and their scores without noise.

    The scores without noise are float64 [n], or [n, N] if they are profiles. The preset determines
    the function that computes them: `expression_tables` with `num_doubles`, `dose_responses` with
    `levels`, `failure_losses` with `rounds`, `planted_scores` with `rules`, and otherwise
    `interaction_scores`.
    """
    draw = Draw(preset, seed)
    if preset.num_doubles is not None:
        return expression_tables(draw, preset)
    n = preset.num_nodes
    edge_indices = {relation: draw.edges(count) for relation, count in preset.num_edges.items()}
    physical = to_undirected(edge_indices["physical"], num_nodes=n)  # sorted by source
    perturbed, perturbed_ptr = draw.knockouts(preset, physical)
    edges = list(edge_indices.values())
    level = torch.zeros(len(perturbed), dtype=torch.float64)
    if preset.levels:
        noise = 0.2
        number = draw.integers(len(preset.levels), (len(perturbed),))
        level = torch.tensor(preset.levels, dtype=torch.float64)[number]
        signal = dose_responses(draw, edges, perturbed, perturbed_ptr, level, preset.rounds)
    elif preset.rounds:
        noise = 0.2
        signal = failure_losses(edges, n, perturbed, perturbed_ptr, preset.rounds)
    elif preset.rules:
        noise = 0.17
        signal = planted_scores(draw, preset, physical, edge_indices["regulatory"], perturbed)
    else:
        noise = 0.4
        signal = interaction_scores(draw, preset, physical, perturbed, perturbed_ptr)
    num_edges = torch.tensor([edge_index.size(1) for edge_index in edges])
    tables = Tables(
        genes=[f"G{i:05d}" for i in range(n)],
        relations=list(edge_indices),
        edge_index=torch.cat(edges, dim=1),
        edge_type=torch.arange(len(edges)).repeat_interleave(num_edges),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        level=level,
        y=signal + noise * signal.std() * draw.normal(preset.num_samples),
    )
    return tables, signal


def synthetic_tables(preset: Preset, seed: int = 0) -> Tables:
    """Returns only the tables of `generate`, without a split."""
    tables, _ = generate(preset, seed)
    return tables


def build_graph(name: str, share: float = 1.0) -> HeteroData:
    """Returns a graph with the shape of the preset `name` and `share` times its edges."""
    preset = PRESETS[name]
    edges = {relation: max(1, round(count * share)) for relation, count in preset.num_edges.items()}
    return synthetic_tables(replace(preset, num_edges=edges, num_samples=200)).graph()


def write(tables: Tables, folder: Path) -> list[str]:
    """Writes `edges.tsv` and `scores.tsv`, and returns the options of train.py that select them.

    Scores have 11 digits. A run on `small` is then bit for bit the same as with the exact scores.
    Scores of profiles have three decimals, because there are millions of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "edges.tsv").open("w") as file:
        file.write("source\ttarget\trelation\n")
        edge_type = tables.edge_type.tolist()
        for (source, target), r in zip(tables.edge_index.T.tolist(), edge_type, strict=True):
            names = (tables.genes[source], tables.genes[target], tables.relations[r])
            file.write("\t".join(names) + "\n")
    names = tables.names(tables.perturbed, tables.level)
    number = "\t%.11g" if len(tables.targets) == 1 else "\t%.3f"
    template = number * len(tables.targets)
    header = ["genes", *tables.targets]
    if tables.split is not None:
        header.append("split")
    with (folder / "scores.tsv").open("w") as file:
        file.write("\t".join(header) + "\n")
        for row, count in enumerate(tables.perturbed_ptr.diff().tolist()):
            genes = ",".join(islice(names, count))
            cells = template % tuple(tables.y[row].tolist())
            line = genes + cells.replace("\tnan", "\tNA")
            if tables.split is not None:
                line += "\t" + SPLITS[int(tables.split[row])]
            file.write(line + "\n")
    return [f"data.edges={folder}/edges.tsv", f"data.perturbations={folder}/scores.tsv"]


class Draw:
    """Draws random numbers, nodes with power-law weights, edges, and knock-outs."""

    def __init__(self, preset: Preset, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.uniform = partial(torch.rand, dtype=torch.float64, generator=generator)
        self.normal = partial(torch.randn, dtype=torch.float64, generator=generator)
        self.integers = partial(torch.randint, generator=generator)
        self.permutation = partial(torch.randperm, generator=generator)
        n = preset.num_nodes
        self.num_nodes = n
        # Nodes are sorted by module: a module is an interval of `total`, the cumulative weight.
        self.module = self.integers(preset.num_modules, (n,)).sort().values
        weight = torch.arange(1, n + 1, dtype=torch.float64)[self.permutation(n)].pow(-0.5)
        self.total = cumsum(weight)  # [n + 1]
        self.low = self.total[torch.searchsorted(self.module, self.module)]
        self.high = self.total[torch.searchsorted(self.module, self.module, right=True)]

    def nodes(self, count: int) -> Tensor:
        """Returns random nodes of the graph; the probability of a node is its weight."""
        return self._at(self.uniform(count) * self.total[-1])

    def partners(self, node: Tensor) -> Tensor:
        """Returns a random node from the module of each given node; the weights count, too."""
        low, high = self.low[node], self.high[node]
        return self._at(low + self.uniform(len(node)) * (high - low))

    def _at(self, weight: Tensor) -> Tensor:
        return torch.searchsorted(self.total[1:], weight).clamp(max=self.num_nodes - 1)

    def edges(self, count: int) -> Tensor:
        """Returns [2, count] distinct edges without self-loops, most of them within a module."""
        n = self.num_nodes
        codes = torch.empty(0, dtype=torch.long)
        while len(codes) < count:
            source = self.nodes(2 * (count - len(codes)) + 64)
            within = self.uniform(len(source)) < 0.8
            target = torch.where(within, self.partners(source), self.nodes(len(source)))
            codes = torch.cat([codes, (source * n + target)[source != target]]).unique()
        codes = codes[self.permutation(len(codes))[:count]]
        return torch.stack([codes // n, codes % n])

    def knockouts(self, preset: Preset, physical: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the knocked-out nodes of all samples, as `perturbed` and `perturbed_ptr`.

        A sample has a first node, and partners that are in the same module, are neighbours by
        `physical` edges (sorted by source), or are random.
        """
        num_samples = preset.num_samples
        source, target = physical
        degree = torch.bincount(source, minlength=self.num_nodes)
        first_edge = degree.cumsum(0) - degree
        first = self.integers(self.num_nodes, (num_samples,))
        columns = [first]
        for _ in range(preset.deletions[1] - 1):
            edge = first_edge[first] + (self.uniform(num_samples) * degree[first]).long()
            neighbour = target[edge.clamp(max=len(target) - 1)]
            partner = self.integers(self.num_nodes, (num_samples,))
            choice = self.uniform(num_samples)
            partner = torch.where(choice < 0.7, self.partners(first), partner)
            partner = torch.where(choice < 0.3, neighbour, partner)
            while True:
                taken = (torch.stack(columns) == partner).any(0)
                if not taken.any():
                    break
                other = self.integers(self.num_nodes, (num_samples,))
                partner = torch.where(taken, other, partner)
            columns.append(partner)
        low, high = preset.deletions
        count = low + self.integers(high + 1 - low, (num_samples,))
        row, column = (torch.arange(high) < count.unsqueeze(1)).nonzero().T
        packed = pack(row, torch.stack(columns)[column, row], torch.zeros(len(row)), num_samples)
        return packed["perturbed"], packed["perturbed_ptr"]


def interaction_scores(
    draw: Draw, preset: Preset, physical: Tensor, perturbed: Tensor, perturbed_ptr: Tensor
) -> Tensor:
    """Returns a weighted sum of three terms for each sample, float64 [n].

    The terms are the effects of the knocked-out nodes, an effect for each pair within a module, and
    the paths of one or two `physical` edges between each pair.
    """
    n = preset.num_nodes
    num_modules = preset.num_modules
    num_samples = preset.num_samples
    own_effect = draw.normal(n)
    module_effect = draw.normal(num_modules)
    sample = torch.repeat_interleave(perturbed_ptr.diff())
    additive = own_effect.new_zeros(num_samples).index_add(0, sample, own_effect[perturbed])

    place = draw.module[perturbed] * num_samples + sample
    counts = torch.bincount(place, minlength=num_modules * num_samples).view(num_modules, -1)
    in_module = module_effect @ (counts * (counts - 1) / 2).double()

    sparse = partial(torch.sparse_coo_tensor, check_invariants=False)
    source, target = physical
    norm = torch.bincount(source, minlength=n).double().clamp(min=1).rsqrt()
    value = norm[source] * norm[target]
    ones = norm.new_ones(len(perturbed))
    dead = sparse(torch.stack([perturbed, sample]), ones, (n, num_samples))
    reached = torch.sparse.mm(sparse(physical, value, (n, n)), dead)  # one edge from dead nodes
    own_paths = torch.zeros_like(norm).index_add(0, source, value.square())  # from a node to itself
    paths = (((dead + reached) * reached).sum(0).to_dense() - own_paths @ dead) / 2
    terms = ((0.55, additive), (0.55, in_module), (0.45, paths))
    return sum(share * term / term.std() for share, term in terms)


def planted_scores(
    draw: Draw, preset: Preset, physical: Tensor, regulatory: Tensor, perturbed: Tensor
) -> Tensor:
    """Returns the sum of the effects of two nodes and of `preset.rules`, float64 [n].

    Effects and rules have the same variance. A rule counts common neighbours by `physical` edges
    (in both directions), common targets of `regulatory` edges, a `physical` edge between the nodes,
    or paths of two `regulatory` edges between them.
    """
    n = preset.num_nodes
    near = torch.zeros(n, n, dtype=torch.float64)
    near[tuple(physical)] = 1
    regulates = torch.zeros(n, n, dtype=torch.float64)
    regulates[tuple(regulatory)] = 1
    paths = regulates @ regulates
    counts = {
        "common neighbours": near @ near,
        "common targets": regulates @ regulates.T,
        "edge": near,
        "paths of two": paths + paths.T,
    }
    first, second = perturbed.view(-1, 2).T
    own_effect = draw.normal(n)
    additive = own_effect[first] + own_effect[second]
    between = torch.zeros_like(additive)
    for rule in preset.rules:
        count = counts[rule][first, second]
        between += RULES[rule] * count / count.std()
    return additive / additive.std() + between / between.std()


def failure_losses(
    edge_indices: list[Tensor], num_nodes: int, perturbed: Tensor, ptr: Tensor, rounds: int
) -> Tensor:
    """Returns the total activity that the living nodes of each sample lose, float64 [n].

    The graph is a supply network: the source of an edge supplies its target. A supplier by the
    second relation has half the weight of a supplier by the first, and so on. In each round, the
    activity of a node becomes a steep function of the weighted share of its suppliers that have
    failed. It is one half if 40 % have failed. Most nodes therefore survive the loss of one
    supplier, but not of two suppliers that replace each other, and their failure spreads. All nodes
    have the same properties, so that only the position of a node in the damaged graph matters.
    """
    weight = relation_weights(edge_indices)
    source, target = torch.cat(edge_indices, dim=1)
    share = weight / weight.new_zeros(num_nodes).index_add(0, target, weight)[target]
    supply = torch.sparse_coo_tensor(
        torch.stack([target, source]), share, (num_nodes, num_nodes), check_invariants=False
    )
    alive = weight.new_ones(num_nodes, len(ptr))  # the last column is the intact graph
    alive[perturbed, torch.repeat_interleave(ptr.diff())] = 0
    activity = alive
    for _ in range(rounds):
        failed = torch.sparse.mm(supply, 1 - activity)
        activity = alive * torch.sigmoid(12 * (0.4 - failed))
    return (alive * (activity[:, -1:] - activity))[:, :-1].sum(0)


def relation_weights(edge_indices: list[Tensor]) -> Tensor:
    """Returns the weight of each edge, float64 [E]: 1 for the first relation, 1/2 for the second.

    In general, the weight of a relation is half of the weight of the relation before it.
    """
    weights = []
    for r, edge_index in enumerate(edge_indices):
        weights.append(torch.full((edge_index.size(1),), 0.5**r, dtype=torch.float64))
    return torch.cat(weights)


def dose_responses(
    draw: Draw,
    edge_indices: list[Tensor],
    perturbed: Tensor,
    ptr: Tensor,
    level: Tensor,
    rounds: int,
) -> Tensor:
    """Returns a weighted sum of the changes of activity of all living nodes, float64 [n].

    A node sends its activity times its level to the targets of its edges. Relations and nodes have
    different weights. The input x of a target is the weighted mean of what it receives. In each
    round, its activity becomes 1.5 x / (x + 0.5), which saturates like an enzyme: it is 0 without
    input, 1 in the intact graph, and 1.29 at three times the input.
    """
    n = draw.num_nodes
    source, target = torch.cat(edge_indices, dim=1)
    weight = relation_weights(edge_indices) * (draw.normal(n) / 2).exp()[source]
    share = weight / weight.new_zeros(n).index_add(0, target, weight)[target]
    matrix = torch.sparse_coo_tensor(
        torch.stack([target, source]), share, (n, n), check_invariants=False
    )
    is_fed = torch.bincount(target, minlength=n).unsqueeze(1) > 0
    importance = draw.normal(len(draw.module.unique()))[draw.module] + 0.5 * draw.normal(n)
    sent = share.new_ones(n, len(ptr) - 1)
    sent[perturbed, torch.repeat_interleave(ptr.diff())] = level.double()
    activity = torch.ones_like(sent)
    for _ in range(rounds):
        given = torch.sparse.mm(matrix, activity * sent)
        activity = (1.5 * given / (given + 0.5)).where(is_fed, 1.0)
    return importance @ ((activity - 1) * (sent > 0))


def expression_tables(draw: Draw, preset: Preset) -> tuple[Tables, Tensor]:
    """Returns tables whose scores are profiles, and the scores without noise, float64 [n, N].

    A profile is one score per node. A few nodes are the sources of most edges. A knock-out changes
    the targets of its edges. The change depends on the relation and on the target's reaction. A
    changed target then changes its own targets: a decrease acts like a knock-out, and an increase
    acts in the opposite direction. The score of a knocked-out node itself is missing.
    """
    n = preset.num_nodes
    num_samples = preset.num_samples
    # With Pareto's distribution, a few sources have thousands of targets.
    weight = draw.uniform(n).pow(-2 / 3) - 0.8
    reaction = (draw.normal(n) / 2).exp()
    edge_indices = [regulations(draw, weight, count) for count in preset.num_edges.values()]
    edge_index = torch.cat(edge_indices, dim=1)
    num_edges = torch.tensor([edges.size(1) for edges in edge_indices])
    edge_type = torch.arange(len(edge_indices)).repeat_interleave(num_edges)
    strengths = [REGULATION[relation] for relation in preset.num_edges]
    strength = torch.tensor(strengths, dtype=torch.float64)
    value = strength[edge_type] * reaction[edge_index[1]]
    # [target, source]
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), value, (n, n), check_invariants=False)

    perturbed, perturbed_ptr = single_and_double(draw, preset)
    sample = torch.repeat_interleave(perturbed_ptr.diff())
    dead = torch.zeros(n, num_samples, dtype=torch.float64)
    dead[perturbed, sample] = 1
    first = torch.sparse.mm(matrix, dead) * (1 - dead)
    second = -0.3 * torch.sparse.mm(matrix, first.tanh())
    signal = 1.5 * ((first + second) / 2).tanh()
    signal = signal.T.contiguous()
    y = signal + 0.05 * draw.normal(num_samples, n)
    y[sample, perturbed] = math.nan
    genes = [f"G{i:05d}" for i in range(n)]
    relations = list(preset.num_edges)
    tables = Tables(
        genes, relations, edge_index, edge_type, perturbed, perturbed_ptr, y, targets=genes
    )
    return tables, signal


def regulations(draw: Draw, weight: Tensor, count: int) -> Tensor:
    """Returns [2, count] distinct edges without self-loops.

    The probability of a source is its weight, [N]. All targets have the same probability.
    """
    n = len(weight)
    total = weight.cumsum(0)
    codes = torch.empty(0, dtype=torch.long)
    while len(codes) < count:
        number = 2 * (count - len(codes)) + 64
        source = torch.searchsorted(total, draw.uniform(number) * total[-1]).clamp(max=n - 1)
        target = draw.integers(n, (number,))
        codes = torch.cat([codes, (source * n + target)[source != target]]).unique()
    codes = codes[draw.permutation(len(codes))[:count]]
    return torch.stack([codes // n, codes % n])


def single_and_double(draw: Draw, preset: Preset) -> tuple[Tensor, Tensor]:
    """Returns the knocked-out nodes of all samples, as `perturbed` and `perturbed_ptr`.

    Samples of one node come first, then samples of two of these nodes.
    """
    num_singles = preset.num_samples - preset.num_doubles
    single = draw.permutation(preset.num_nodes)[:num_singles]
    one = draw.integers(num_singles, (preset.num_doubles,))
    other = (one + draw.integers(1, num_singles, (preset.num_doubles,))) % num_singles
    node = torch.cat([single, single[one], single[other]])
    double = torch.arange(num_singles, preset.num_samples)
    row = torch.cat([torch.arange(num_singles), double, double])
    packed = pack(row, node, torch.zeros(len(row)), preset.num_samples)
    return packed["perturbed"], packed["perturbed_ptr"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(*write(synthetic_tables(PRESETS[options.preset]), options.folder))


if __name__ == "__main__":
    main()
