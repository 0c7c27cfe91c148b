"""The order in which ranks read the rows of a dataset, and the loader of their batches."""

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_convert

from ddp_ends import StopRequest


class StepSampler(DistributedSampler):
    """A batch sampler that yields this rank's micro-batches, as lists of row numbers.

    Each epoch has a random order of the rows, which depends only on the seed and the epoch. A step
    has the next `batch_size` rows of this order, and the last step of an epoch has the remaining
    rows. The rows of a step are divided among all ranks and micro-batches, so a step has the same
    rows for any world size. DistributedSampler would repeat some rows to give each rank the same
    number of rows. This sampler pads with the row number -1 instead, whose weight in the loss is 0.
    """

    def __init__(
        self, rows: Tensor, batch_size: int, accumulate: int, world_size: int, rank: int, seed: int
    ):
        self.rows = rows.int()  # int32 saves memory if there are millions of rows
        super().__init__(self.rows, num_replicas=world_size, rank=rank, seed=seed)
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Selects the epoch of the next iteration.

        A resumed run skips the steps of the epoch before `first_step`.
        """
        super().set_epoch(epoch)
        self.first_step = first_step
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        self.order = torch.randperm(len(self.rows), generator=generator, dtype=torch.int32)

    def rows_in_step(self, step: int) -> Tensor:
        """Returns the rows of a step over all ranks and micro-batches, without padding."""
        return self.rows[self.order[step * self.batch_size : (step + 1) * self.batch_size]]

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps_per_epoch):
            rows = self.rows_in_step(step)
            num_batches = self.num_replicas * self.accumulate
            padded = torch.nn.functional.pad(rows, (0, -len(rows) % num_batches), value=-1)
            # In each micro-batch, the rows are dealt to the ranks in turn.
            dealt = padded.view(self.accumulate, -1, self.num_replicas)
            yield from dealt[:, :, self.rank].tolist()


def make_loader(
    dataset: Dataset, batches: StepSampler | Sequence[Tensor], workers: int, device: torch.device
) -> DataLoader:
    """Returns a DataLoader that yields a batch, on the CPU, for each list of row numbers.

    The dataset builds a complete batch from the list, so the loader does not have to collate.
    """
    pin = device.type == "cuda"  # pinned memory allows asynchronous copies to the GPU
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=default_convert,
        pin_memory=pin,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        # A process that uses NCCL must not be forked.
        multiprocessing_context="spawn" if pin and workers else None,
    )


def _start_worker(worker_id: int) -> None:
    # Otherwise, each tensor of a batch would need a file descriptor, and their number is limited,
    # often to 1,024.
    torch.multiprocessing.set_sharing_strategy("file_system")
    Queue._on_queue_feeder_error = staticmethod(_end_worker)
    # torchrun also sends signals to workers. Only their rank should react to them: it stops them.
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_worker(error: Exception, batch: Any) -> None:
    # Otherwise, the rank would wait forever for a batch that cannot be sent.
    problem = f"error: a DataLoader worker cannot send a batch ({error})"
    advice = "if /dev/shm is full, free some space there, or set data.workers=0"
    print(f"{problem}: {advice}", file=sys.stderr, flush=True)
    os._exit(1)
