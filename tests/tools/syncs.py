"""Counts what would make the host wait for a GPU, on any device."""

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountSynchronisations(TorchDispatchMode):
    """Counts, on any device, the operators that make the host wait for a GPU.

    Use it as `with CountSynchronisations() as count`. These operators read a value, or their shape
    depends on values: nonzero, boolean indexing, unique, repeat_interleave without `output_size`.
    `count.seen` lists their names.
    """

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = str(func), kwargs or {}
        unsized = "repeat_interleave.Tensor" in name and kwargs.get("output_size") is None
        boolean = "aten.index" in name and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for indices in args[1:2]
            if isinstance(indices, Sequence)
            for index in indices
        )
        if unsized or boolean or any(part in name for part in self.WAITING):
            self.record(name)
        return func(*args, **kwargs)

    def record(self, operator: str) -> None:
        self.seen.append(operator)
