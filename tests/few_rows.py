"""Trains on a few rows of the configured tables, so that it ends within seconds.

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

NUM_ROWS = {"train": 77, "val": 7, "test": 7}  # the last step of 24 rows has 5


def few_rows(tables: Any) -> Any:
    """Returns tables with few rows in each split, of different numbers of knock-outs.

    Of each number, they are those with the most scores, as training needs rows that have some.
    """
    num_scores = (~tables.y.isnan()).sum(dim=1)
    num_knockouts = tables.perturbed_ptr.diff()
    split = torch.full_like(tables.split, -1)
    for number, (name, size) in enumerate(NUM_ROWS.items()):
        rows = tables.rows(name)
        rows = rows[num_scores[rows].argsort(descending=True, stable=True)]
        turn = torch.zeros(len(rows), dtype=torch.long)  # among the rows of as many knock-outs
        for count in num_knockouts[rows].unique():
            is_of_count = num_knockouts[rows] == count
            turn[is_of_count] = torch.arange(int(is_of_count.sum()))
        split[rows[turn.argsort(stable=True)[:size]]] = number
    return dataclasses.replace(tables, split=split)


@contextmanager
def load_few_rows() -> Iterator[None]:
    """In the block, lets `data.load` return few rows, if this copy still has it."""
    load = getattr(data, "load", None)
    if load is not None:
        data.load = lambda config: few_rows(load(config))
    try:
        yield
    finally:
        if load is not None:
            data.load = load


def die_in_step(number: int) -> None:
    """Lets this process kill itself in a training step, counted from 1."""
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
