"""Builds small `Tables` without files, from sets of deleted nodes or from levels of nodes."""

import torch
from torch import Tensor

from data_tables import Tables, pack


def pack_levels(sets: list[dict[int, float]]) -> dict[str, Tensor]:
    """Returns the result of `data_tables.pack`, given {node: level} of each sample."""
    row = torch.repeat_interleave(torch.tensor([len(nodes) for nodes in sets], dtype=torch.long))
    node = torch.tensor([node for nodes in sets for node in nodes], dtype=torch.long)
    level = torch.tensor([level for nodes in sets for level in nodes.values()], dtype=torch.float64)
    return pack(row, node, level, len(sets))


def pack_sets(sets: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns the fields `perturbed` and `perturbed_ptr` of `Tables`.

    `sets` are the deleted nodes of each sample. If a set repeats a node, the node counts once.
    """
    packed = pack_levels([dict.fromkeys(nodes, 0.0) for nodes in sets])
    return packed["perturbed"], packed["perturbed_ptr"]


def tables_of(sets: list, y: Tensor) -> Tables:
    """Returns tables without a graph, with one sample for each set.

    A set is a list of deleted nodes, or {node: level}. `y` are the scores, [n] or [n, T].
    """
    levels = [nodes if isinstance(nodes, dict) else dict.fromkeys(nodes, 0.0) for nodes in sets]
    return Tables(
        genes=[],
        relations=[],
        edge_index=torch.empty(2, 0, dtype=torch.long),
        edge_type=torch.empty(0, dtype=torch.long),
        **pack_levels(levels),
        y=y,
        targets=["score"] if y.dim() == 1 else [f"score{t}" for t in range(y.size(1))],
    )
