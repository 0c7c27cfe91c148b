"""Simulated CUDA graphs on the CPU, which replace `make_graphed_callables` and `torch.cuda.graph`.

A replay calls the recorded operators again, on the same memory, with the numbers that Python passed
to them. As on a GPU, each replay overwrites static inputs, outputs and gradients, does not run
Python code, and advances torch's generators. A recording keeps the tensors that it created, but not
the tensors that it read. If the memory of such a tensor has been freed, a GPU would read arbitrary
numbers, and this replay raises an error.

A GPU cannot capture copies from the host. This module does not detect them, because all tensors are
on the CPU; `fake_gpu` detects them.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parts import optional
from tests.syncs import CountSynchronisations

SPARSE = 0  # the value of `memory_of` for sparse tensors, whose memory is in other tensors


def simulate_gpu(free: int = 2**40) -> None:
    """Makes the template capture steps on the CPU, as on a GPU with `free` bytes of free memory.

    Nothing undoes this: tests restore the modules themselves.
    """
    from mask import SharedGraph

    SharedGraph.is_on_gpu = True
    replace_graphs(free)


def replace_graphs(free: int) -> None:
    """Makes the optional part model_graphs.py use the simulated graphs of this module.

    `free` is the free memory of the GPU, in bytes.
    """
    model_graphs = optional("model_graphs")
    if model_graphs is None:
        return
    model_graphs.make_graphed_callables = make_graphed_callables
    model_graphs.CUDAGraph = Capture
    model_graphs.cuda_graph = lambda graph, capture_error_mode: graph
    model_graphs.mem_get_info = lambda device: (free, free)
    # A CPU does not have streams, and its generator does not wait for the end of a capture.
    model_graphs.undone_if_failed = contextlib.nullcontext


class Recording(CountSynchronisations):
    """Records the operators that are called in the `with` block.

    As in a capture on a GPU, operators that make the host wait raise `RuntimeError`.
    """

    def __init__(self, made: set[int] = frozenset()):
        """`made` are identifiers of the memory that other recordings keep."""
        super().__init__()
        self.calls = []
        self.made = {SPARSE, *made}

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        super().__exit__(kind, *details)
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def record(self, operator: str) -> None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {operator}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = (args, kwargs or {})
        read = {memory_of(value) for value in tensors_of(arguments)} - self.made
        result = super().__torch_dispatch__(func, types, *arguments)
        self.made |= {memory_of(value) for value in tensors_of(result)} - read

        def kept(value: Any) -> Any:
            is_read = isinstance(value, Tensor) and memory_of(value) not in self.made
            return ReadTensor(value) if is_read else value

        self.calls.append((func, tree_map(kept, (*arguments, result))))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Calls the operators again, and writes their results to the memory of the recording."""
        with torch.autocast("cpu", enabled=False):
            for func, call in self.calls:
                leaves = tree_leaves(call)
                if any(isinstance(leaf, ReadTensor) and leaf.memory() is None for leaf in leaves):
                    raise RuntimeError(f"{func} would read memory that is freed")
                args, kwargs, result = tree_map(ReadTensor.again, call)
                again = func(*args, **kwargs)
                for new, old in zip(tensors_of(again), tensors_of(result), strict=True):
                    if new.layout == torch.strided and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class Capture(Recording):
    """Replaces `torch.cuda.graph`, which captures operators without executing them.

    The operators are executed here, so their in-place changes are undone afterwards.
    """

    def __init__(self):
        super().__init__()
        self.before = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self.before.append((value, value.detach().clone()))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        try:
            super().__exit__(kind, *details)
        finally:
            with torch.no_grad():
                for value, number in reversed(self.before):
                    value.copy_(number)
            self.before.clear()


class ReadTensor:
    """A reference to a tensor that does not keep the tensor's memory alive."""

    def __init__(self, tensor: Tensor):
        value = getattr(tensor, "value", tensor)  # the CPU tensor in a `GPUTensor`
        self.memory = weakref.ref(value.untyped_storage())
        self.place = (value.storage_offset(), value.size(), value.stride())
        self.dtype = value.dtype
        self.kind = type(tensor)
        self.device = tensor.device

    def again(self: Any) -> Any:
        """Returns the tensor; returns values that are not a `ReadTensor` unchanged."""
        if not isinstance(self, ReadTensor):
            return self
        value = torch.empty(0, dtype=self.dtype).set_(self.memory(), *self.place)
        return value if self.device == value.device else self.kind(value, self.device)


def memory_of(tensor: Tensor) -> int:
    """Returns an identifier of the memory that a tensor uses."""
    value = getattr(tensor, "value", tensor)
    return value.untyped_storage()._cdata if value.layout == torch.strided else SPARSE


def tensors_of(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def make_graphed_callables(
    module: nn.Module, inputs: tuple[Tensor, ...], allow_unused_input: bool = False
) -> nn.Module:
    """Replaces the `forward` of a module with a replay of its operators; returns the module.

    It replaces `torch.cuda.make_graphed_callables`, for inputs of the same shapes.
    """
    if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
        raise RuntimeError("make_graphed_callables does not support the autocast caching")
    parameters = tuple(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def gradients(output: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(output, trained, upstream, allow_unused=allow_unused_input)

    for _ in range(3):
        output = module(*inputs)
        gradients(output, torch.empty_like(output))
    forward = Recording()
    with forward:
        output = module(*inputs)
    upstream = torch.zeros_like(output)
    backward = Recording(forward.made)
    with backward:
        found = iter(gradients(output, upstream))
    static = [next(found) if parameter.requires_grad else None for parameter in parameters]
    module.forward = replays(inputs, parameters, output, upstream, static, forward, backward)
    return module


def replays(
    inputs: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    output: Tensor,
    upstream: Tensor,
    static: list[Tensor | None],
    forward: Recording,
    backward: Recording,
) -> Callable[..., Tensor]:
    """Returns a function of the inputs that replays both recordings, as part of autograd."""

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values: Tensor) -> Tensor:
            for place, value in zip(inputs, values[: len(inputs)], strict=True):
                place.copy_(value)
            forward.replay()
            return output.detach()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
            upstream.copy_(grad)
            backward.replay()
            of_parameters = [None if value is None else value.detach() for value in static]
            return (*[None] * len(inputs), *of_parameters)

    return lambda *values: Replay.apply(*values, *parameters)
