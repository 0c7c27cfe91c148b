"""The loop over rows that are predicted: in validation, in the test and later.

Every function is called on all ranks, which share the rows.

Shapes: n rows, B samples in a batch, T scores of C columns each.
"""

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

LARGE_BATCH = 8192  # samples at once where each takes little memory: fewer kernels to launch


def evaluation_batch_size(task: KnockoutTask) -> int:
    """Returns the number of samples that are predicted at once, over all ranks."""
    batch_size = task.config.data.batch_size
    return max(batch_size, LARGE_BATCH) if task.is_cheap_per_sample else batch_size


def predict_rows(model: nn.Module, task: KnockoutTask, rows: Tensor, ddp: Distributed) -> Tensor:
    """Returns the model's output of rows, float64 [n, T, C], on every rank; raises `RunError`."""
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
    """Returns a function of n rows of a dataset on every rank, float64 [n, *shape].

    It takes a batch on the device, and gives as many rows as the batch has samples. A batch is
    spread over the ranks, so each row is computed on one rank; the all-reduce adds only zeros to it
    and is therefore exact.
    """
    rows_of_rank = rows[ddp.rank :: ddp.world_size]
    batches = rows_of_rank.split(math.ceil(batch_size / ddp.world_size))
    loader = make_loader(dataset, batches, workers=0, device=ddp.device)
    values = torch.zeros(len(rows), *shape, dtype=torch.float64, device=ddp.device)
    values_of_rank = values[ddp.rank :: ddp.world_size]  # a view
    start = 0
    num_pieces = 1  # of a batch
    for batch in progress_bar(loader, "predicting", unit="batch", is_shown=ddp.rank == 0):
        with ddp.phase("evaluation"):
            if ddp.stop and ddp.stop.code():  # all ranks will stop; the result is discarded
                break
            of_batch, num_pieces = in_pieces(function, batch, num_pieces, dataset, ddp)
            values_of_rank[start : start + len(of_batch)] = of_batch
            start += len(of_batch)
    return ddp.sum(values).cpu()


def in_pieces(
    function: Callable[[Data], Tensor],
    batch: Data,
    num_pieces: int,
    dataset: Dataset,
    ddp: Distributed,
) -> tuple[Tensor, int]:
    """Returns a function of a batch of the dataset, computed in pieces, and their number.

    Where memory runs out, they are twice as many.
    """
    rows = batch.index  # on the CPU
    pieces = [batch]
    while True:
        if num_pieces > 1:
            pieces = (dataset.__getitems__(piece.tolist()) for piece in rows.chunk(num_pieces))
        try:
            values = [function(piece.to(ddp.device, non_blocking=True)) for piece in pieces]
            return torch.cat(values), num_pieces
        except torch.OutOfMemoryError:
            if num_pieces >= len(rows):
                raise
        # Only here is the error gone, which holds all that was computed.
        torch.cuda.empty_cache()
        num_pieces *= 2
