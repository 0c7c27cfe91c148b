"""Trains on a few rows of the configured tables, so that training takes only seconds.

    python tests/few_rows.py [section.key=value ...]

With the environment variable DIE_AT_STEP, the process kills itself in that training step.
"""

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import data
import train
from ddp_ends import end_process

NUM_ROWS = {"train": 77, "val": 7, "test": 7}  # with 24 rows per step, the last step has 5


def few_rows(tables: Any) -> Any:
    """Returns tables with few rows in each split, with different numbers of knock-outs.

    For each number of knock-outs, the rows with the most scores are chosen, because training needs
    rows with scores.
    """
    num_scores = (~tables.y.isnan()).sum(dim=1)
    num_knockouts = tables.perturbed_ptr.diff()
    split = torch.full_like(tables.split, -1)
    for number, (name, size) in enumerate(NUM_ROWS.items()):
        rows = tables.rows(name)
        rows = rows[num_scores[rows].argsort(descending=True, stable=True)]
        # Position among the rows with as many knock-outs.
        turn = torch.zeros(len(rows), dtype=torch.long)
        for count in num_knockouts[rows].unique():
            is_of_count = num_knockouts[rows] == count
            turn[is_of_count] = torch.arange(int(is_of_count.sum()))
        split[rows[turn.argsort(stable=True)[:size]]] = number
    return dataclasses.replace(tables, split=split)


@contextmanager
def load_few_rows() -> Iterator[None]:
    """In the block, `data.load` returns few rows, if this copy still has that function."""
    load = getattr(data, "load", None)
    if load is not None:
        data.load = lambda config: few_rows(load(config))
    try:
        yield
    finally:
        if load is not None:
            data.load = load


def die_in_step(number: int) -> None:
    """Makes this process kill itself in a training step, counted from 1."""
    train_step = train.train_step
    steps = []

    def train_step_or_die(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*arguments)

    train.train_step = train_step_or_die


if __name__ == "__main__":
    if "DIE_AT_STEP" in os.environ:
        die_in_step(int(os.environ["DIE_AT_STEP"]))
    with load_few_rows():
        status = train.main()
    end_process(status)
