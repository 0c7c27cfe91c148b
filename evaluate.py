"""The loop that computes predictions for validation, test and other tables.

`predict_rows` and `compute_rows` are collectives: all ranks must call them. Each rank computes its
share of the rows, and every rank gets the results of all rows.

Shapes: N nodes, n rows, B samples in a batch, T scores of C columns each.
"""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Data

from data_loader import make_loader
from ddp_setup import Distributed
from run_progress import progress_bar
from task import KnockoutTask

log = logging.getLogger("evaluate")
# Number of samples that are predicted at once if each needs little memory. Larger batches need
# fewer kernel launches.
LARGE_BATCH = 8192
# Largest number of levels, N * B, in such a batch. In float32, they take 256 MiB.
MOST_LEVELS = 2**26


def evaluation_batch_size(task: KnockoutTask) -> int:
    """Returns the number of samples that are predicted at once, over all ranks.

    A knock-out pass needs the levels of all nodes in each sample, so large graphs have small
    batches.
    """
    batch_size = task.config.data.batch_size
    size = LARGE_BATCH if task.is_cheap_per_sample else batch_size
    if task.graph is not None and task.config.model.has_knockout_pass:
        size = min(size, MOST_LEVELS // task.graph.num_nodes)
    return max(size, batch_size)


def predict_rows(model: nn.Module, task: KnockoutTask, rows: Tensor, ddp: Distributed) -> Tensor:
    """Returns the model's outputs for the given rows, float64 [n, T, C], on every rank.

    Raises `RunError` if an output of the model has the wrong shape.
    """
    model.eval()

    def output(batch: Data) -> Tensor:
        return task.by_score(model(task.graph, batch), batch)

    size = evaluation_batch_size(task)
    return compute_rows(output, task.dataset, rows, size, task.output_shape, ddp)


@torch.no_grad()
def compute_rows(
    function: Callable[[Data], Tensor],
    dataset: Dataset,
    rows: Tensor,
    batch_size: int,
    shape: tuple[int, ...],
    ddp: Distributed,
) -> Tensor:
    """Returns the values of a function for n rows of a dataset, float64 [n, *shape], on every rank.

    Each row is computed on only one rank, and its value is 0 on all other ranks. The all-reduce of
    the values only adds these zeros, and is therefore exact.

    Args:
        function: takes a batch on the device, and returns a value of this shape for each sample.
        batch_size: the number of samples that are computed at once, over all ranks.
    """
    size = math.ceil(batch_size / ddp.world_size)
    batches = rows[ddp.rank :: ddp.world_size].split(size)
    loader = make_loader(dataset, batches, workers=0, device=ddp.device)
    values = torch.zeros(len(rows), *shape, dtype=torch.float64, device=ddp.device)
    values_of_batches = values[ddp.rank :: ddp.world_size].split(size)  # views of `values`
    bar = progress_bar(loader, "predicting", unit="batch", is_shown=ddp.rank == 0)
    for batch, values_of_batch in zip(bar, values_of_batches, strict=True):
        with ddp.phase("evaluation"):
            if ddp.stop and ddp.stop.code():  # all ranks will stop and discard the result
                break
            values_of_batch[:] = in_pieces(function, batch, dataset, ddp)
    return ddp.sum(values).cpu()


def in_pieces(
    function: Callable[[Data], Tensor], batch: Data, dataset: Dataset, ddp: Distributed
) -> Tensor:
    """Returns a function's values for a batch, which is split into `ddp.num_pieces` pieces.

    If a piece does not fit in the memory, the number of pieces is doubled, also for later batches.
    """
    rows = batch.index  # on the CPU, because the batch has not been moved
    pieces = [batch]
    while True:
        if ddp.num_pieces > 1:
            pieces = (dataset.__getitems__(piece.tolist()) for piece in rows.chunk(ddp.num_pieces))
        try:
            values = [function(piece.to(ddp.device, non_blocking=True)) for piece in pieces]
            return torch.cat(values)
        except torch.OutOfMemoryError:
            if ddp.num_pieces >= len(rows):
                raise
        # This must be outside `except`, because the error refers to all tensors of the failed call,
        # so their memory cannot be freed before.
        torch.cuda.empty_cache()
        ddp.num_pieces *= 2
        log.warning(f"note      memory ran out, so batches are split into {ddp.num_pieces} pieces")
