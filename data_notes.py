"""Sentences for the log on what may be wrong with the tables that were read.

Shapes: n rows of T targets.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data_cells import SPLITS, read_header, read_rows
from metrics import weighted_mean

OUTLYING = 0.25  # share of the variance, from which on a row is noted
FEWEST_SCORES = 50  # of a column; one of fewer may well have such a share
FEW_TARGETS = 20  # up to which each is looked at by itself


def note_outliers(tables: Any, path: str) -> None:
    """Notes scores that make so much of the variance that they would make most of the loss.

    Of more than `FEW_TARGETS` columns, it notes rows that do so on average.
    """
    weight = tables.score_weight(slice(None))
    mean = weighted_mean(tables.y.nan_to_num(), weight)  # without a median, which takes seconds
    squares = weight * (tables.y - mean).nan_to_num().square()
    shares = (squares / squares.sum(dim=0)).nan_to_num()
    names = [f"the {target:.60}" for target in tables.targets]
    if len(names) > FEW_TARGETS:
        shares = shares.mean(dim=1, keepdim=True)
        names = [f"the row of {len(names):,} scores"]
    largest, row_of_largest = shares.max(dim=0)
    present = (~tables.y.isnan()).sum(dim=0)
    # Of fewer scores, or of 0 and 1, any may have such a share.
    is_binary = ((tables.y == 0) | (tables.y == 1) | tables.y.isnan()).all(dim=0)
    is_judged = (present >= FEWEST_SCORES) & ~is_binary
    if len(names) < len(is_judged):
        is_judged = is_judged.any(dim=0, keepdim=True)
    is_noted = is_judged & (largest > OUTLYING)
    for k in is_noted.nonzero().flatten().tolist():
        line = line_of_row(path, int(row_of_largest[k]))
        tables.notes.append(
            f"{path}:{line}: {names[k]} makes {largest[k]:.0%} of the variance of all rows: "
            "remove it, give it a small weight, or clip or rank the scores"
        )


def line_of_row(path: str, row: int) -> int:
    """Returns the number of a row's line in its file; rows count from 0, without blank lines."""
    for rows in read_rows(path, read_header(path, [], ("genes",))):
        if row < len(rows.lines):
            return rows.lines[row]
        row -= len(rows.lines)
    raise IndexError(row)


def note_replicates(tables: Any, path: str) -> None:
    """Notes the number of sets of perturbed nodes whose rows are in more than one split."""
    if tables.split is None:
        return
    perturbs = tables.perturbed_ptr.diff() > 0
    set_number = tables.set_number()[perturbs]
    split_number = set_number * len(SPLITS) + tables.split[perturbs]
    num_splits = torch.bincount(split_number.unique() // len(SPLITS))  # of each set
    num_shared = int((num_splits > 1).sum())
    if num_shared:
        tables.notes.append(
            f"{path}: sets of knock-outs that the column split puts on both sides: {num_shared:,}; "
            "a random split keeps their rows together"
        )


def note_empty_columns(path: str, names: Sequence[str], values: Tensor, notes: list[str]) -> None:
    """Notes the named columns of values [n, F] that are all nan."""
    for name, is_empty in zip(names, values.isnan().all(dim=0).tolist(), strict=True):
        if is_empty:
            notes.append(f"{path}: the column {name:.60} has no value, and says nothing")
