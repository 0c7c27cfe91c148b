"""What the training rows of a run have. Predictions of other rows are extrapolations.

Shapes: N nodes, n samples.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from data_tables import Tables

KINDS = (
    "nodes that no training row knocks out",
    "levels outside those of training",
    "more nodes than any training row",
)


def training_range(tables: Tables) -> dict[str, Any]:
    """Returns what the training rows with a score have, as a checkpoint keeps it.

    `seen`, bool [N], says which nodes they knock out, `lowest` and `highest` are the extreme
    levels, and `largest` is the number of nodes in the largest set. Level 1 is always among the
    levels: it is that of intact nodes.
    """
    is_trained = tables.is_in("train") & ~tables.y.isnan().all(dim=1)
    level = tables.level[is_trained[tables.sample()]]
    level = torch.cat([level.new_ones(1), level])
    return {
        "seen": tables.is_seen().any(dim=1),
        "lowest": level.min().item(),
        "highest": level.max().item(),
        "largest": (tables.perturbed_ptr.diff() * is_trained).max().item(),
    }


def is_beyond(samples: Tables, trained: dict[str, Any]) -> Tensor:
    """Returns whether each sample has each of the `KINDS` of a `training_range`, bool [3, n]."""
    level = samples.level
    is_outside = (level < trained["lowest"]) | (level > trained["highest"])
    of_nodes = torch.stack([~trained["seen"][samples.perturbed], is_outside])
    of_samples = scatter(of_nodes.int(), samples.sample(), dim=1, dim_size=len(samples.y)) > 0
    is_larger = samples.perturbed_ptr.diff() > trained["largest"]
    return torch.cat([of_samples, is_larger.unsqueeze(0)])


class Extrapolations:
    """Counts the rows that are beyond the training of all runs, for notes.

    Args:
        ranges: the `training_range` of each run, None of one whose checkpoint has none: nothing is
            counted then.
    """

    def __init__(self, ranges: Sequence[dict[str, Any] | None]):
        self.ranges = ranges
        self.count = [0] * len(KINDS)
        self.first = [""] * len(KINDS)

    def add(self, sets: Sequence[str], is_known: Tensor, samples: Tables, asked: range) -> None:
        """Counts those of some rows that are asked for, given the texts of all.

        The `samples` are the rows that are known, bool [rows].
        """
        if None in self.ranges:
            return
        row = is_known.nonzero().flatten()
        is_asked = (row >= asked.start) & (row < asked.stop)
        of_runs = torch.stack([is_beyond(samples, trained) for trained in self.ranges])
        for kind, is_of_kind in enumerate(of_runs.all(dim=0) & is_asked):
            rows = row[is_of_kind].tolist()
            if rows and not self.count[kind]:
                self.first[kind] = sets[rows[0]]
            self.count[kind] += len(rows)

    def notes(self) -> list[str]:
        """Returns a sentence for each kind of extrapolation that was counted."""
        notes = []
        for kind, count, first in zip(KINDS, self.count, self.first, strict=True):
            if count:
                notes.append(f"{count:,} rows have {kind}, first {first}: these are extrapolations")
        return notes
