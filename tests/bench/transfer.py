"""What the parameters of another table's run are worth where data are few.

It compares run.init with a start from scratch.

    python -m tests.bench.transfer --first TABLE --second TABLE [--split nodes] [--config FILE]
        [data.edges=FILE ...]

For each order of the two tables of knock-outs on the same graph, a run on all training rows of one,
and on a part of those of the other, chosen at random, one run from scratch and one from the
parameters of the first, for run.seed 0 to `--seeds` - 1. Figures are Pearson's r on the test rows,
and the difference of the two runs of each seed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import data
from data_tables import SPLITS
from errors import DataError, UserError
from tests.bench import report
from tests.tools.runs import ROOT, read_metrics
from train import read_config

FEW = 10  # one of so many training rows is kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", metavar="TABLE", type=Path, required=True)
    parser.add_argument("--second", metavar="TABLE", type=Path, required=True)
    parser.add_argument("--split", choices=("random", "nodes"), default="random")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--config", metavar="FILE", type=Path, default=ROOT / "tests/bench/yeast.yaml"
    )
    parser.add_argument("--json", metavar="FILE", type=Path)
    options, overrides = parser.parse_known_args()
    overrides = [f"--config={options.config.resolve()}", *overrides, f"data.split={options.split}"]
    first = options.first.resolve()
    second = options.second.resolve()
    with tempfile.TemporaryDirectory() as folder:
        try:
            few_of_first = few_rows(first, Path(folder), overrides)
            few_of_second = few_rows(second, Path(folder), overrides)
        except (UserError, OSError) as error:
            sys.exit(str(error))
        rows = [
            compare(first, few_of_second, folder, overrides, options.seeds),
            compare(second, few_of_first, folder, overrides, options.seeds),
        ]
    title = (
        f"Test Pearson, split by {options.split}, one in {FEW} training rows, "
        f"{options.seeds} seeds: mean (sd)"
    )
    report({title: rows}, torch.device("cpu"), options.json)


def few_rows(table: Path, folder: Path, overrides: list[str]) -> Path:
    """Writes a table with one in `FEW` of its training rows, and all to validate and to test."""
    config = read_config([*overrides, f"data.perturbations={table}"])
    tables = data.load(config.data)
    generator = torch.Generator().manual_seed(0)
    kept = (torch.rand(len(tables.y), generator=generator) < 1 / FEW) | ~tables.is_in("train")
    kept &= tables.split >= 0
    header, *lines = (line for line in table.read_text().split("\n") if line)
    if "split" in header.split("\t"):
        raise DataError(f"{table} has a column split: remove it")
    path = folder / table.name
    with path.open("w") as file:
        file.write(f"{header}\tsplit\n")
        for row in kept.nonzero().flatten().tolist():
            file.write(f"{lines[row]}\t{SPLITS[tables.split[row]]}\n")
    return path


def compare(
    other: Path, few: Path, folder: str, overrides: list[str], seeds: int
) -> dict[str, str]:
    """Returns the cells of a row: from scratch, and from a run on the `other` table."""
    scratch = []
    tuned = []
    baseline = math.nan
    for seed in range(seeds):
        run(f"{other.stem}-{seed}", other, folder, [*overrides, f"run.seed={seed}"])
        init = f"run.init={folder}/{other.stem}-{seed}/checkpoints/best.pt"
        with_split = [*overrides, "data.split=random", f"run.seed={seed}"]
        test = run(f"{few.stem}-scratch-{seed}", few, folder, with_split)
        scratch.append(test["pearson"])
        tuned.append(run(f"{few.stem}-tuned-{seed}", few, folder, [*with_split, init])["pearson"])
        baseline = test["baseline_pearson"]
    return {
        "from": other.name,
        "baseline": f"{baseline:.3f}",
        "from scratch": mean_and_sd(scratch),
        "from the other": mean_and_sd(tuned),
        "difference": mean_and_sd([a - b for a, b in zip(tuned, scratch, strict=True)]),
    }


def run(name: str, table: Path, folder: str, overrides: list[str]) -> dict:
    """Trains, and returns the test row of metrics.jsonl."""
    where = [f"data.perturbations={table}", f"run.dir={folder}", f"run.name={name}"]
    command = [sys.executable, str(ROOT / "train.py"), *overrides, *where]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    (test,) = read_metrics(Path(folder, name), "test")
    print(json.dumps({"run": name, "pearson": test["pearson"]}), file=sys.stderr, flush=True)
    return test


def mean_and_sd(values: list[float]) -> str:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ({sd:.3f})"


if __name__ == "__main__":
    main()
