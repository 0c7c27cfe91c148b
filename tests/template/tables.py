"""Tables for several test files, in memory or written into a folder, and functions on tables."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data import DataConfig, KnockoutDataset, random_split
from data_tables import Tables
from mask import SharedGraph
from predict_tables import read_sets
from task import KnockoutTask
from tests.sets import tables_of
from tests.template.fixtures import write_table
from tests.template.tasks import task_of

NUM_NODES = 60  # nodes of `combined_tables`
EDGES = [
    ("source", "target", "relation"),
    ("b", "a", "x"),
    ("a", "c", "y"),
    ("c", "c", "x"),
    ("b", "a", "x"),
]
SCORES = [
    ("genes", "score", "split"),
    ("a,b", 0.5, "train"),
    ("d", -1, "val"),
    ("", "2e-1", "test"),
]


def write_tables(folder: Path, edges=EDGES, scores=SCORES, **options) -> DataConfig:
    """Writes two tables; returns options with these tables and a cache in the same folder."""
    return DataConfig(
        edges=str(write_table(folder / "edges.tsv", edges)),
        perturbations=str(write_table(folder / "scores.tsv", scores)),
        cache_dir=str(folder / "cache"),
        **options,
    )


def task_of_tables(tables: Tables) -> KnockoutTask:
    graph = SharedGraph(tables.graph())
    return task_of(graph, KnockoutDataset(tables, graph.degree))


def summary_of(tables: Tables) -> str:
    """Returns the log line of a run that describes the tables."""
    return task_of_tables(tables).summary()


def notes_on(tables: Tables) -> list[str]:
    """Returns the notes on the tables that a run logs."""
    return task_of_tables(tables).notes()


def sets_of(tables: Tables) -> list[list[int]]:
    """Returns the perturbed nodes of each row."""
    sets = tables.perturbed.split(tables.perturbed_ptr.diff().tolist())
    return [nodes.tolist() for nodes in sets]


def asked(path: str, names: list[str]) -> tuple[list[str], list[bool], list[list[int]], list[str]]:
    """Reads a table to predict, on a graph whose nodes have these names.

    Returns the cell of each row, whether the graph has all nodes of the row, the sets of nodes of
    the rows for which it has, and the names that are not nodes.
    """
    (chunk,) = read_sets(path, replace(tables_of([[0]], torch.zeros(1)), genes=names))
    y = chunk.samples.y
    assert y.shape == (int(chunk.is_known.sum()), 1)
    assert y.isnan().all()
    return list(chunk.sets), chunk.is_known.tolist(), sets_of(chunk.samples), chunk.unknown


def write_binary_scores(folder: Path) -> None:
    """Replaces the scores of the fixture `tables`: 1 for rows with one of five genes, else 0."""
    chosen = {"Y01", "Y02", "Y03", "Y04", "Y05"}
    rows = [("genes", "score")]
    for line in (folder / "scores.tsv").read_text().splitlines()[1:]:
        genes = line.split("\t")[0]
        rows.append((genes, int(not chosen.isdisjoint(genes.split(",")))))
    write_table(folder / "scores.tsv", rows)


def gappy_tables(folder: Path, num_rows: int = 300) -> list[str]:
    """Writes a table with two scores in different units, and edges; returns the options.

    A third of the scores are missing.
    """
    draw = random.Random(0)
    genes = [f"Y{i:02d}" for i in range(30)]
    edges = [("source", "target", "relation")]
    for _ in range(120):
        edges.append((*draw.sample(genes, 2), draw.choice(["physical", "regulatory"])))
    effect = {gene: draw.gauss(0, 1) for gene in genes}
    rows = [("genes", "fitness", "size", "weight")]
    for _ in range(num_rows):
        dead = draw.sample(genes, draw.randint(1, 3))
        total = sum(effect[gene] for gene in dead)
        cells = []
        for score in (total + draw.gauss(0, 0.1), 1000 - 50 * total**2 + draw.gauss(0, 1)):
            cells.append(f"{score:.4f}" if draw.random() > 1 / 3 else draw.choice(["", "NA"]))
        rows.append((",".join(dead), *cells, draw.choice([0.5, 1, 2])))
    write_table(folder / "edges.tsv", edges)
    write_table(folder / "gaps.tsv", rows)
    return ["data.edges=edges.tsv", "data.perturbations=gaps.tsv"]


def on_one_relation(tables: Tables, num_nodes: int, edges: Sequence = ((0,), (1,))) -> Tables:
    """Returns tables with the nodes g00, g01, ... and these edges in a single relation.

    `edges` has the sources and the targets.
    """
    return replace(
        tables,
        genes=[f"g{k:02}" for k in range(num_nodes)],
        relations=["r"],
        edge_index=torch.tensor(edges),
        edge_type=torch.zeros(len(edges[0]), dtype=torch.long),
        edge_weight=None,  # weights and features are set to their defaults for these edges
        features=None,
    )


def additive_tables(noise: float, num_scores: int = 2, num_rows: int = 400) -> Tables:
    """Returns rows with one or two of 30 nodes, whose scores are sums of effects plus noise."""
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    sets = [draw.sample(range(30), draw.choice([1, 2])) for _ in range(num_rows)]
    targets = [f"score{t}" for t in range(num_scores)]
    effect = torch.randn(30, num_scores, dtype=torch.float64, generator=generator)
    y = noise * torch.randn(num_rows, num_scores, dtype=torch.float64, generator=generator)
    y += torch.stack([effect[nodes].sum(0) for nodes in sets])
    tables = on_one_relation(replace(tables_of(sets, y), targets=targets), 30)
    tables.split = torch.tensor([0, 0, 0, 1, 2] * (num_rows // 5), dtype=torch.int8)
    return tables


def without_validation(tables: Tables, *targets: int) -> Tables:
    """Returns tables in which these scores of the validation rows are missing."""
    y = tables.y.clone()
    for t in targets:
        y[tables.rows("val"), t] = math.nan
    return replace(tables, y=y)


def combined_tables(
    weights: tuple[float, float, float] = (0.0, 0.0, 2.0),
    noise: float = 0.1,
    levels: tuple[float, ...] = (0.0,),
    num_rows: int = 1500,
    seed: int = 0,
) -> Tables:
    """Returns singles, pairs and triples whose score is a combination of the nodes' effects.

    `weights` are the weights of the sum, the largest and the smallest response of the nodes. A
    response is the node's effect times 1 - level, and an intact node's response, 0, is included.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    effect = torch.randn(NUM_NODES, dtype=torch.float64, generator=generator)
    sets = []
    responses = []
    for k in range(num_rows):
        nodes = [k] if k < NUM_NODES else draw.sample(range(NUM_NODES), draw.choice([2, 2, 3]))
        sets.append({node: draw.choice(levels) for node in nodes})
        responses.append([effect[node] * (1 - level) for node, level in sets[-1].items()])
    u, v, w = weights
    y = [u * sum(row) + v * max(0, *row, 0) + w * min(0, *row, 0) for row in responses]
    y = torch.stack(y) + noise * torch.randn(num_rows, dtype=torch.float64, generator=generator)
    tables = on_one_relation(tables_of(sets, 5 + y), NUM_NODES)
    tables.split = random_split(tables, DataConfig())
    return tables


def above_median(y: torch.Tensor) -> torch.Tensor:
    """Returns 1 for scores above the median of their target, else 0, and nan for missing scores."""
    return (y > y.nanmedian(dim=0).values).double().where(~y.isnan(), math.nan)


def dense_design(tables: Tables, basis: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the design matrix of the baseline, [n, 2 + NK].

    The columns are the intercept, the sum of 1 - level, and the K doses of each node. A dose is
    1 - level or, with a basis [3, K], the doses of loss, gain and deletion times the basis.
    """
    level = torch.ones(len(tables.y), len(tables.genes), dtype=torch.float64)
    level[tables.sample(), tables.perturbed] = tables.level
    change = 1 - level
    doses = change
    if basis is not None:
        ways = [change.clamp(min=0), change.clamp(max=0), (level == 0).double()]
        doses = (torch.stack(ways, dim=2) @ basis).flatten(start_dim=1)
    intercept = torch.ones(len(level), 1)
    return torch.cat([intercept, change.sum(1, keepdim=True), doses], dim=1)
