"""Finds the operators that would make the host wait for a GPU. This also works without a GPU."""

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Parts of the names of operators that wait.
WAITING = ("_local_scalar_dense", "is_nonzero", "aten.nonzero.", "masked_select", "unique")
WAITING += ("aten.equal.", "allclose", "bincount", "histc", "to_sparse", "_linalg_check_errors")
WAITING += ("aten._coalesce.", "aten.coalesce.")


class CountSynchronisations(TorchDispatchMode):
    """Lists the operators that make the host wait if their tensors are on a GPU.

    Use it as `with CountSynchronisations() as count`; `count.seen` then lists the operators. Such
    an operator reads a value, or the shape of its result depends on values. Examples are nonzero,
    boolean indexing, unique, and repeat_interleave without `output_size`.
    """

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if waits(str(func), args, kwargs):
            self.record(str(func))
        return func(*args, **kwargs)

    def record(self, operator: str) -> None:
        self.seen.append(operator)


def waits(name: str, args: tuple, kwargs: dict) -> bool:
    """Returns whether a call of the operator `name` makes the host wait for a GPU."""
    if "repeat_interleave.Tensor" in name and kwargs.get("output_size") is None:
        return True
    if "index_put" in name and gets_number(*args[:3]):
        # With a single mask, the operator is a masked fill, which does not wait.
        return len(args[1]) > 1 or not has_boolean(args[1])
    if "aten.index" in name and len(args) > 1 and has_boolean(args[1]):
        return True
    return any(part in name for part in WAITING)


def gets_number(tensor: torch.Tensor, indices: object, value: torch.Tensor) -> bool:
    """Returns whether an assignment `tensor[indices] = value` puts a number of the CPU on a GPU."""
    return value.dim() == 0 and value.device.type == "cpu" and tensor.device.type != "cpu"


def has_boolean(indices: object) -> bool:
    """Returns whether `indices` is a sequence with a boolean mask."""
    if not isinstance(indices, Sequence):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
