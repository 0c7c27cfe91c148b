"""Messages of the perturbed nodes alone, along the edges that leave them.

Shapes: N nodes, R relations, H channels, P perturbed nodes in the batch, b samples of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from mask_product import CSR


class Samples(NamedTuple):
    """Some consecutive samples of a batch."""

    batch: Data
    first: int  # the number of the first of them
    level: Tensor  # of each node, 1 if intact and 0 if dead, [N, b]


def messages_of_perturbed(
    x: Tensor, gate: Tensor, samples: Samples, out_ptr: Tensor, by_source: CSR
) -> tuple[Tensor, Tensor]:
    """Returns the places of the states that messages reach, [M], and the messages, [M, H].

    Places are those in the states [N * b]. A message is what a perturbed node, whose state is a row
    of x [N, H], sends along an edge, less what it sends at level 1. `out_ptr` is that of
    `SharedGraph`, and so is the matrix. A batch can bring a bound of M, `num_out_edges`; else, a
    GPU's host waits.
    """
    batch = samples.batch
    size = samples.level.size(1)
    relation = torch.arange(len(gate), device=x.device)
    row = (relation * len(x) + batch.perturbed.unsqueeze(1)).flatten()  # [P * R]
    sample = batch.perturbed_batch - samples.first
    is_here = (sample >= 0) & (sample < size)
    start = out_ptr.index_select(0, row)
    length = out_ptr.index_select(0, row + 1) - start
    length = length * is_here.repeat_interleave(len(relation))
    change = (batch.level - 1).to(x.dtype).unsqueeze(1) * x.index_select(0, batch.perturbed)
    sent = (change.unsqueeze(1) * gate).flatten(0, 1)  # [P * R, H]

    # Segment k * R + r holds the edges of relation r that leave perturbed node number k. The
    # last one is what is left up to the bound: zeros, sent along any edges.
    bound = batch.get("num_out_edges")
    number = torch.arange(int(length.sum()) if bound is None else bound, device=x.device)
    end = length.cumsum(0)
    segment = torch.searchsorted(end, number, right=True)
    sent = nn.functional.pad(sent, (0, 0, 0, 1))
    sample = nn.functional.pad(sample, (0, 1))
    first = nn.functional.pad(start - end + length, (0, 1))  # edge less number
    _, col, weight = by_source
    edge = (number + first.index_select(0, segment)).remainder(max(1, len(col)))
    node = col.index_select(0, edge).long()
    state = node * size + sample.index_select(0, segment // len(relation))
    weight = weight.index_select(0, edge).to(x.dtype).unsqueeze(1)
    return state, sent.index_select(0, segment) * weight
