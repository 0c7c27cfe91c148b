"""Which weighting of scores that are unequally often missing serves better.

    python -m tests.bench.weighting --first TABLE --second TABLE [--config FILE] [data.edges=FILE]

It joins two tables of knock-outs on the same graph to one of two scores, which most rows have not
both, splits it at random, and thins out the training scores of neither, of the second and of the
first to one in ten. On each, runs minimise what is reported, in which each score counts the same,
or the mean over all scores that are there, in which the frequent one counts more. Figures are those
of the test rows, means over the splits.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import task
import train
from analyse_results import read_results
from data_cells import SPLITS
from data_tables import Tables
from ddp_ends import end_process
from metrics import pearson
from tests.bench import report
from tests.tools.runs import ROOT, read_metrics

SHARES = {  # of the training scores that are left
    "all": (1.0, 1.0),
    "a tenth of the second": (1.0, 0.1),
    "a tenth of the first": (0.1, 1.0),
}
WEIGHTINGS = ("by score", "by cell")


def main() -> None:
    if sys.argv[1:2] == ["by cell"]:  # a run that this program starts
        del sys.argv[1]
        task.weight_scale = scale_by_cell
        end_process(train.main())
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", metavar="TABLE", type=Path, required=True)
    parser.add_argument("--second", metavar="TABLE", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--config", type=Path, default=ROOT / "tests/bench/yeast.yaml")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options, overrides = parser.parse_known_args()
    overrides.append(f"--config={options.config.resolve()}")
    scores = [read_scores(options.first), read_scores(options.second)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shares in SHARES.items():
            results = {weighting: [] for weighting in WEIGHTINGS}
            for seed in range(options.splits):
                table = Path(folder, "scores.tsv")
                write_table(table, scores, shares, seed)
                for weighting in WEIGHTINGS:
                    results[weighting].append(run(weighting, table, overrides))
            for weighting in WEIGHTINGS:
                figures = means(results[weighting])
                rows.append({"training scores": name, "weights": weighting, **figures})
    title = f"Test rows, means over {options.splits} random splits"
    report({title: rows}, torch.device("cpu"), options.json)


def scale_by_cell(tables: Tables) -> Tensor:
    """Returns a scale that is the same for all scores, in place of `data.weight_scale`."""
    rows = tables.rows("train")
    total = tables.score_weight(rows).sum(dim=0)
    return torch.full_like(total, len(rows) * len(total) / total.sum().item())


def read_scores(path: Path) -> dict[str, str]:
    """Returns the score of each set of a table with one score, as a text."""
    scores = {}
    for line in path.read_text().splitlines()[1:]:
        genes, score = line.split("\t")
        scores[",".join(sorted(genes.split(",")))] = score
    return scores


def write_table(
    path: Path, scores: Sequence[dict[str, str]], shares: Sequence[float], seed: int
) -> None:
    """Writes both scores of each set, of which these shares are left in training rows."""
    generator = random.Random(seed)
    lines = ["genes\tfirst\tsecond\tsplit"]
    for genes in sorted(set(scores[0]) | set(scores[1])):
        (split,) = generator.choices(SPLITS, [0.8, 0.1, 0.1])
        cells = [genes]
        for of_sets, share in zip(scores, shares, strict=True):
            is_left = split != "train" or generator.random() < share
            cells.append(of_sets.get(genes, "") if is_left else "")
        lines.append("\t".join([*cells, split]))
    path.write_text("\n".join(lines) + "\n")


def run(weighting: str, table: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Trains, and returns loss and Pearson's r, the mean and of each score, of the test rows."""
    with tempfile.TemporaryDirectory() as folder:
        where = [f"data.perturbations={table}", f"run.dir={folder}", "run.name=run"]
        command = [sys.executable, "-m"]
        command += ["tests.bench.weighting", weighting] if weighting == "by cell" else ["train"]
        subprocess.run(
            [*command, *overrides, *where], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
        )
        (test,) = read_metrics(Path(folder, "run"), "test")
        predictions = read_results(Path(folder, "run", "test.tsv"))
    first, second = pearson(predictions.y, predictions.prediction).tolist()
    result = {"loss": test["loss"], "Pearson": test["pearson"], "first": first, "second": second}
    print(json.dumps({"weights": weighting, **result}), file=sys.stderr, flush=True)
    return result


def means(results: Sequence[dict[str, float]]) -> dict[str, str]:
    """Returns the mean of each figure as a text."""
    names = results[0]
    return {name: f"{statistics.mean(result[name] for result in results):.3f}" for name in names}


if __name__ == "__main__":
    main()
