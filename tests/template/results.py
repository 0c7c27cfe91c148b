"""Rows of test.tsv for the tests of several modules."""

import math
from pathlib import Path

import torch

import run_results
from analyse_results import Results
from metrics import mean_present

HEADER = ("genes", "unseen", "unseen_genes", "score", "score_prediction", "score_baseline")


def read_results(path: Path) -> Results:
    return Results(**run_results.read_results(path))


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_likelihood(y, prediction, weight, sd):
    """A metric that needs a prediction in addition to the score, the `sd`."""
    density = ((y - prediction) / sd).square() / -2 - (sd * math.sqrt(2 * math.pi)).log()
    return mean_present(density, y, weight)


def make_rows(num_rows: int, num_targets: int = 1) -> Results:
    """Returns rows of 0 to 5 genes, some or all of which are unseen.

    No two rows share a gene. About a fifth of the scores are missing.
    """
    y = normal(num_rows, num_targets)
    prediction = y + normal(num_rows, num_targets, seed=1)
    baseline = y + 2 * normal(num_rows, num_targets, seed=2)
    y[normal(num_rows, num_targets, seed=3) > 0.84] = math.nan
    genes = [[f"G{row}.{i}" for i in range(row % 6)] for row in range(num_rows)]
    unseen = [row % (row % 6 + 1) for row in range(num_rows)]
    return Results(
        genes=[",".join(names) for names in genes],
        unseen=torch.tensor(unseen).unsqueeze(1).expand(-1, num_targets),
        unseen_genes=[",".join(names[:k]) for names, k in zip(genes, unseen, strict=True)],
        targets=[f"t{t}" for t in range(num_targets)],
        y=y,
        predictions={"prediction": prediction},
        rivals={"baseline": baseline},
    )
