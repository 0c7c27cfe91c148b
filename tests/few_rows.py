"""Trains on a few rows of the configured tables, which takes only seconds.

    python tests/few_rows.py [section.key=value ...]

If the environment variable DIE_AT_STEP is set, the process kills itself in the training step with
this number.
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
from task import KnockoutTask

# Largest number of rows of each split. With 24 rows per step, the last step of an epoch has 5 rows.
NUM_ROWS = {"train": 77, "val": 7, "test": 7}


def few_rows(tables: Any) -> Any:
    """Returns the tables with only a few rows in each split.

    The rows have different numbers of knock-outs. Among the rows with the same number, those with
    the most scores are chosen, because training needs scores.
    """
    num_scores = (~tables.y.isnan()).sum(dim=1)
    num_knockouts = tables.perturbed_ptr.diff()
    split = torch.full_like(tables.split, -1)
    for number, (name, size) in enumerate(NUM_ROWS.items()):
        rows = tables.rows(name)
        rows = rows[num_scores[rows].argsort(descending=True, stable=True)]
        # Position of each row among the rows with the same number of knock-outs.
        turn = torch.zeros(len(rows), dtype=torch.long)
        for count in num_knockouts[rows].unique():
            is_of_count = num_knockouts[rows] == count
            turn[is_of_count] = torch.arange(int(is_of_count.sum()))
        split[rows[turn.argsort(stable=True)[:size]]] = number
    return dataclasses.replace(tables, split=split)


@contextmanager
def load_few_rows() -> Iterator[None]:
    """In the block, runs only use a few rows of their tables.

    If data.py of this copy has no function `load`, each split of the task has only its first rows.
    """
    if hasattr(data, "load"):
        owner, name = data, "load"
    else:
        owner, name = KnockoutTask, "rows"
    original = getattr(owner, name)

    def few_rows_of_split(task: Any, split: str) -> Any:
        return original(task, split)[: NUM_ROWS[split]]

    def load(config: Any) -> Any:
        return few_rows(original(config))

    setattr(owner, name, load if name == "load" else few_rows_of_split)
    try:
        yield
    finally:
        setattr(owner, name, original)


def die_in_step(number: int) -> None:
    """Makes this process kill itself at the start of training step `number`, counted from 1."""
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
