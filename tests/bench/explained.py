"""Whether `Predictor.explain` names the nodes through which knock-outs act, where that is known.

    python -m tests.bench.explained [--runs 3] [--dir FOLDER] [--json FILE] [section.key=value ...]

In the tables `network` of `tests.bench.synthetic`, failures spread along edges, and a score is what
living nodes lose of their activity. The mediators of a sample are the nodes that lose more than
`LOST` of it, of samples with `FEWEST` of them or more. Models are trained by train.py with the
options, and explain the test rows, each alone and all together. Beside them stand rankings that
know the graph and the knocked-out nodes only: nodes by degree, those that a knocked-out node has an
edge to by degree, and nodes by the share of their suppliers that is knocked out. A figure is the
share of the mediators that are among the first ten, or as many as there are mediators, if they are
fewer than ten.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.utils import degree, scatter

import data
from config import load_config
from data_tables import Tables
from predict import Predictor
from run_folder import read_metrics
from tests.bench import report
from tests.bench.synthetic import PRESETS, lost_activity, synthetic_tables, write
from tests.tools.runs import ROOT

PRESET = PRESETS["network"]
LOST = 0.1
FEWEST = 3
FIRST = 10


def train_runs(folder: Path, num_runs: int, options: list[str]) -> list[Path]:
    """Returns the folders of runs on the tables, which are trained unless they are there."""
    tables = write(synthetic_tables(PRESET), folder)
    runs = []
    for seed in range(num_runs):
        run = folder / "runs" / str(seed)
        own = [f"run.dir={folder}/runs", f"run.name={seed}", f"run.seed={seed}"]
        command = [sys.executable, str(ROOT / "train.py"), *tables, *own, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runs.append(run)
    return runs


def activity_lost(tables: Tables) -> Tensor:
    """Returns what each living node loses in each sample, float64 [n, N]."""
    edge_indices = [
        tables.edge_index[:, tables.edge_type == relation]
        for relation in range(len(tables.relations))
    ]
    size = (len(tables.genes), tables.perturbed, tables.perturbed_ptr)
    return lost_activity(edge_indices, *size, PRESET.rounds).T


def rankings(tables: Tables, test: Tensor) -> dict[str, Tensor]:
    """Returns a value of each node by which it may be ranked, float64 [rows, N], by name."""
    num_nodes = len(tables.genes)
    source, target = tables.edge_index
    degrees = (degree(source, num_nodes) + degree(target, num_nodes)).double()
    dead = torch.zeros(len(tables.y), num_nodes, dtype=torch.float64)
    dead[tables.sample(), tables.perturbed] = 1
    dead = dead[test]
    edges_from_dead = scatter(dead[:, source], target, dim=1, dim_size=num_nodes)
    num_suppliers = degree(target, num_nodes).clamp(min=1)
    living = 1 - dead
    return {
        "degree": living * degrees,
        "targets of knocked-out nodes, by degree": living * (edges_from_dead > 0) * degrees,
        "share of suppliers knocked out": living * edges_from_dead / num_suppliers,
    }


def share_found(value: Tensor, is_mediator: Tensor) -> float:
    """Returns the mean share of each row's mediators that have the largest values.

    Both are [rows, N].
    """
    first = value.topk(FIRST, dim=1).indices
    num_found = is_mediator.gather(1, first).sum(dim=1)
    return (num_found / is_mediator.sum(dim=1).clamp(max=FIRST)).mean().item()


def explained(runs: list[Path], sets: list[str], number: dict[str, int]) -> Tensor:
    """Returns the sizes of the contributions that are named of each node, float64 [rows, N]."""
    value = torch.zeros(len(sets), len(number), dtype=torch.float64)
    num_knocked_out = max(len(one_set.split(",")) for one_set in sets)  # named first, then pairs
    num_pairs = math.comb(num_knocked_out, 2)
    explained = Predictor(*runs).explain(sets, FIRST + num_knocked_out + num_pairs)
    for row, (contributions,) in enumerate(explained):
        for each in contributions:
            if each.without is None and each.node in number:  # no pair
                value[row, number[each.node]] = abs(each.contribution)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("runs/explained"))
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the table to this file"
    )
    options, overrides = parser.parse_known_args()
    runs = train_runs(options.dir, options.runs, overrides)
    config = load_config([runs[0] / "config.yaml"])
    tables = data.load(config.data)
    number = {gene: node for node, gene in enumerate(tables.genes)}
    test = tables.rows("test")
    is_mediator = (activity_lost(tables) > LOST)[test]
    has_enough = is_mediator.sum(dim=1) >= FEWEST
    is_mediator = is_mediator[has_enough]
    test = test[has_enough]
    names = list(tables.names(tables.perturbed, tables.level))
    ptr = tables.perturbed_ptr.tolist()
    sets = [",".join(names[ptr[row] : ptr[row + 1]]) for row in test.tolist()]

    values = rankings(tables, test)
    pearson = {}
    for run in runs:
        values[f"run {run.name}"] = explained([run], sets, number)
        pearson[f"run {run.name}"] = read_metrics(run / "metrics.jsonl")[-2].get("pearson")
    values["all runs together"] = explained(runs, sets, number)
    rows = []
    for name, value in values.items():
        rows.append({"ranking": name, "mediators found": share_found(value, is_mediator)})
        rows[-1]["test Pearson"] = pearson.get(name, "")
    most = is_mediator.sum(dim=1)
    title = (
        f"Mediators of {len(sets)} of {len(tables.rows('test'))} test rows, "
        f"{most.min()} to {most.max()}, {most.float().mean():.1f} in the mean"
    )
    report({title: rows}, torch.device("cpu"), options.json)


if __name__ == "__main__":
    main()
