"""Functions of tests that build graphs and tasks, and that write and read results."""

from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from analyse_results import Results
from config import Config
from data import KnockoutDataset
from losses import LOSSES
from mask import LINEAR, SharedGraph
from run_results import result_lines
from task import KnockoutTask

BEST = "runs/{}/checkpoints/best.pt"  # path of the best checkpoint of a run, by its name


def small_graph(generator: torch.Generator) -> HeteroData:
    """Returns a random graph of 12 nodes. One of its three relations and node 10 have no edges."""
    graph = HeteroData()
    graph["gene"].num_nodes = 12
    nodes = torch.tensor([node for node in range(12) if node != 10])
    for relation, count in (("a", 40), ("none", 0), ("b", 25)):
        drawn = torch.randint(len(nodes), (2, count), generator=generator)
        graph["gene", relation, "gene"].edge_index = nodes[drawn]
    return graph


def task_of(
    graph: SharedGraph, dataset: KnockoutDataset, config: Config | None = None
) -> KnockoutTask:
    """Returns the task of a dataset without a baseline, on the device of the graph.

    Its models predict the scores in their own units, because the mean is 0 and the unit is 1.
    """
    config = config or Config()
    zeros = torch.zeros(len(dataset.tables.targets), dtype=torch.float64, device=graph.device)
    return KnockoutTask(
        config=config,
        tables=dataset.tables,
        fingerprint="",
        graph=graph,
        criterion=LOSSES[config.optim.loss](zeros, zeros + 1),
        dataset=dataset,
        route="",
        basis=LINEAR,
    )


def lines_of_test(task: KnockoutTask, prediction: Tensor) -> list[str]:
    """Returns the lines of test.tsv, given predictions of the test rows."""
    rivals = task.rivals_of(task.rows("test"))
    return list(result_lines(task.tables, {"prediction": prediction}, rivals))


def predictions_of(y: Tensor, prediction: Tensor, baseline: Tensor) -> Results:
    """Returns the `Results` of scores, predictions and baseline, [n, T] each, without nodes."""
    n, num_targets = y.shape
    return Results(
        genes=[""] * n,
        unseen=torch.zeros(n, num_targets, dtype=torch.long),
        unseen_genes=[""] * n,
        targets=[f"score{t}" for t in range(num_targets)],
        y=y,
        predictions={"prediction": prediction},
        rivals={"baseline": baseline},
    )


def read_table(path: Path) -> tuple[list[str], list[str], Tensor]:
    """Returns the header, the first cell of each row, and the other cells as numbers.

    Empty cells are nan.
    """
    header, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    numbers = [[float(cell or "nan") for cell in row[1:]] for row in rows]
    return header, [row[0] for row in rows], torch.tensor(numbers, dtype=torch.float64)
