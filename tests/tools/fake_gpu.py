"""Simulated GPUs: runs a command as on a GPU, but on the CPU, to find errors without a GPU.

    python -m tests.tools.fake_gpu train.py [section.key=value ...]
    torchrun --standalone --nproc_per_node=2 -m tests.tools.fake_gpu train.py ...

Tensors report that they are on cuda:0, and have real numbers. Commands run unchanged, with
autograd, autocast, fused AdamW, DDP over gloo, and the simulated CUDA graphs of `graphs`.

The following raise an error:

- an operator that mixes devices, as on a GPU
- a copy from the host while steps are captured, as on a GPU
- a replay that reads memory that has been freed; a GPU would read arbitrary numbers
- an operator that writes to pinned memory while an asynchronous copy to a GPU may still read it
- an operation that makes the host wait in an epoch. Only the first step, the log, checkpoints and
  the agreements of ranks may wait
- in deterministic mode, an operation that is not deterministic on a GPU

New memory contains nan, so that reading it before it is written becomes visible. In the first
evaluation, memory runs out once, so that the code for this case runs, too.

The simulation cannot show memory use, streams, speed, NCCL, an order of collectives that differs
between ranks, the limits and rounding of kernels, `p.data = other`, and writes to pinned memory by
NumPy or in other threads. It needs a build of torch for CPUs only. A library that
`fake_gpu_library` compiles makes this torch believe that there are GPUs, and `GPUTensor` runs each
operator on the CPU tensor that it contains.
"""

# ruff: noqa: E402 (the library is loaded before torch is imported)

import importlib.util
import itertools
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tools import fake_gpu_library

LIBRARY = fake_gpu_library.load()

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.syncs import waits

ROOT = str(Path(__file__).resolve().parents[2])
CPU = torch.device("cpu")
MEMORY = 2**36  # memory of each GPU in bytes, all of it free
MAY_CROSS_DEVICES = ("aten.copy_.default", "aten._to_copy.default")
# Operators that do not accept tensors of a single number on a different device.
WITHOUT_NUMBERS = ("aten.stack.", "aten.embedding.", "aten.index_select.")
# Operators that return memory that has not been written.
FRESH = ("aten.empty.", "aten.empty_like.", "aten.empty_strided.", "aten.new_empty")
# Operators that are not deterministic on a GPU.
UNSTEADY = ("aten.index_reduce", "aten.put_.", "aten.kthvalue.", "aten.median.dim", "aten.histc.")
UNSTEADY += ("aten._embedding_bag", "aten.grid_sampler", "aten.nll_loss2d")
INDEXED = ("aten.index.Tensor", "aten.index_put.", "aten.index_put_.", "aten._index_put_impl_.")


class State:
    """The state of this process's simulated GPUs."""

    current = 0  # number of the current GPU
    may_wait = True  # whether the host may wait for a GPU
    is_watched = False  # whether an epoch or a capture is running
    num_waits = 0  # how often the host has waited for a GPU outside epochs and captures


class GPUTensor(Tensor):
    """A tensor on a simulated GPU. `value` is the CPU tensor with its numbers."""

    @staticmethod
    def __new__(cls, value: Tensor, device: torch.device, requires_grad: bool = False):
        place = {}
        # For sparse gradients; other sparse layouts cannot be declared.
        if value.layout == torch.sparse_coo:
            place = {"layout": value.layout}
        if value.layout == torch.strided:
            place = {"strides": value.stride(), "storage_offset": value.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            dtype=value.dtype,
            device=device,
            requires_grad=requires_grad,
            **place,
        )
        tensor.value = value
        return tensor

    def __repr__(self, **options: Any) -> str:
        wait("repr")
        return f"GPUTensor({self.value}, {self.device})"

    def __format__(self, form: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), form)

    def __deepcopy__(self, memo: dict) -> "GPUTensor":
        new = GPUTensor(self.value.detach().clone(), self.device, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.value.detach().__reduce_ex__(protocol)  # so that `torch.save` can write it

    def data_ptr(self) -> int:
        return self.value.data_ptr() if self.value.layout == torch.strided else 0

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        return torch.ops.aten.contiguous(self)  # the method of Tensor requires a real GPU

    def pin_memory(self, *arguments: Any) -> None:
        raise RuntimeError("only dense CPU tensors can be pinned")

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def tolist(self) -> list:
        wait("tolist")
        return self.value.tolist()

    def numpy(self, *arguments: Any, **options: Any) -> None:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})


class FakeGPUs(TorchDispatchMode):
    """Makes each tensor that is created on a GPU in the `with` block a `GPUTensor`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_of_gpu = any(isinstance(value, GPUTensor) for value in tree_leaves((args, kwargs)))
        if is_of_gpu or is_gpu(kwargs.get("device")):
            return call(func, args, kwargs)
        if func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
            check_writes(func, args, kwargs)
        return func(*args, **kwargs)


# ---- Operators -----------------------------------------------------------------------------------
def call(func: Any, args: tuple, kwargs: dict) -> Any:
    """Calls an operator that reads tensors on a GPU, or that has a result on a GPU."""
    name = str(func)
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, GPUTensor)]
    if name not in MAY_CROSS_DEVICES:
        check_devices(name, args, tensors)
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError(
            f"Expected a 'cuda' device type for generator but found 'cpu' ({name}): only torch's "
            "default generator is simulated"
        )
    if on_gpu and waits(name, args, kwargs):
        wait(name)
    if torch.are_deterministic_algorithms_enabled() and is_unsteady(name, args, on_gpu):
        raise RuntimeError(f"{name} is not deterministic on a GPU")
    device = device_of_result(name, args, kwargs, on_gpu)
    if name in MAY_CROSS_DEVICES:
        check_copy(name, args, kwargs, device)
    results = call_on_cpu(func, args, kwargs)
    if name.startswith(FRESH) and device != CPU and results.dtype != torch.bool:
        is_whole = not results.is_floating_point()
        results.fill_(torch.iinfo(results.dtype).max if is_whole else math.nan)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # changes the shape of the wrapper
    # An operator may return one of its arguments.
    wrappers = {id(tensor.value): tensor for tensor in on_gpu}

    def wrapped(result: Any) -> Any:
        if not isinstance(result, Tensor) or isinstance(result, GPUTensor) or device == CPU:
            return result
        if id(result) in wrappers:
            return wrappers[id(result)]
        return GPUTensor(result, device)

    return tree_map(wrapped, results)


def call_on_cpu(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the result of an operator for the CPU tensors of its arguments."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}

    def value_of(argument: Any) -> Any:
        return argument.value if isinstance(argument, GPUTensor) else argument

    args, kwargs = tree_map(value_of, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def device_of_result(
    name: str, args: tuple, kwargs: dict, on_gpu: Sequence[Tensor]
) -> torch.device:
    if name == "aten.copy_.default":
        return args[0].device
    if kwargs.get("device") is not None:
        return resolved(kwargs["device"])
    return on_gpu[0].device


def is_unsteady(name: str, args: tuple, on_gpu: Sequence[Tensor]) -> bool:
    """Returns whether an operator is not deterministic on a GPU."""
    if name.startswith(("aten.cumsum.", "aten.bincount.")):
        return any(tensor.is_floating_point() for tensor in on_gpu)
    if name.startswith("aten.scatter_reduce"):
        return "amax" not in args and "amin" not in args
    has_sparse = any(tensor.value.layout == torch.sparse_csr for tensor in on_gpu)
    return name.startswith(UNSTEADY) or (has_sparse and "mm" in name)


def check_devices(name: str, args: tuple, tensors: Sequence[Tensor]) -> None:
    """Raises `RuntimeError` if an operator mixes devices, as on a GPU.

    A tensor of a single number may be on the CPU. A tensor on a GPU may be indexed with a tensor on
    the CPU, but this makes the host wait.
    """
    first = args[0] if args else None
    if name.startswith(INDEXED) and isinstance(first, GPUTensor):
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        if any(index.device == CPU for index in indices):
            wait(f"{name} with indices on the CPU")
            tensors = [tensor for tensor in tensors if not is_one_of(tensor, indices)]
    if not name.startswith(WITHOUT_NUMBERS):
        tensors = [tensor for tensor in tensors if tensor.dim() or tensor.device != CPU]
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(devices))}! ({name})"
        )


def is_one_of(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def check_copy(name: str, args: tuple, kwargs: dict, device: torch.device) -> None:
    """Calls `wait` if a copy between the host and a GPU is not asynchronous.

    Otherwise, the GPU may read the memory of the source until the host waits. Waits in an epoch do
    not count, because they are rarer on a real GPU: agreements of ranks depend on the time.
    """
    source = args[1] if name == "aten.copy_.default" else args[0]
    if (source.device == CPU) == (device == CPU):
        return
    is_asynchronous = kwargs.get("non_blocking") or (name == "aten.copy_.default" and any(args[2:]))
    if device == CPU or not is_asynchronous:
        wait(f"{name} from {source.device} to {device}")
    elif not hasattr(source.untyped_storage(), "is_pinned_here"):
        wait(f"{name} from memory that is not pinned")
    else:
        source.untyped_storage().waits_before_copy = State.num_waits


def check_writes(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises `RuntimeError` if an operator writes to memory that a GPU may still read."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[number] if number < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(written):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            memory = tensor.untyped_storage()
            if getattr(memory, "waits_before_copy", None) == State.num_waits:
                raise RuntimeError(
                    f"{place_in_project()}: {func} writes to pinned memory while an asynchronous "
                    "copy to the GPU may still read it: write to new memory instead"
                )


def is_gpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def resolved(device: torch.device | str) -> torch.device:
    """Returns a device with its index; raises `RuntimeError` if there is no GPU of this index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", State.current)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
    return device


def pinned(tensor: Tensor) -> Tensor:
    """Replaces `Tensor.pin_memory`: returns a copy that is marked as pinned."""
    copy = tensor.clone()
    copy.untyped_storage().is_pinned_here = True
    return copy


# ---- Waiting -------------------------------------------------------------------------------------
@contextmanager
def no_waiting(may_wait: bool = False) -> Iterator[None]:
    """Makes operators that wait for a GPU raise in the `with` block, unless `may_wait` is set."""
    before = State.may_wait
    was_watched = State.is_watched
    State.may_wait = may_wait
    State.is_watched = True
    try:
        yield
    finally:
        State.may_wait = before
        State.is_watched = was_watched


def wait(name: str) -> None:
    """Reports that the operation `name` waits for a GPU; raises `RuntimeError` if it must not."""
    if not State.is_watched:
        State.num_waits += 1
    if State.may_wait:
        return
    place = place_in_project()
    if place:
        raise RuntimeError(f"{place}: the host waits for the GPU in an epoch or a capture ({name})")


def place_in_project() -> str:
    """Returns the file and the line of this project that called the current operator.

    Returns "" if DDP called it, because gloo reads gradients on the CPU, unlike NCCL.
    """
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.endswith("nn/parallel/distributed.py"):
            return ""
        is_ours = frame.filename.startswith(ROOT) and "site-packages" not in frame.filename
        if is_ours and frame.filename != __file__:
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


# ---- torch, and the template ---------------------------------------------------------------------
def install() -> None:
    """Makes this process use simulated GPUs until it exits, one for each rank of this machine."""
    LIBRARY.show_fake_gpus()
    if torch.accelerator.current_accelerator() is None:
        raise RuntimeError(
            "torch was imported before the library of fake_gpu was loaded: import "
            "tests.tools.fake_gpu first"
        )
    replace_in_cuda(count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    Tensor.pin_memory = pinned
    torch.tensor = copying(torch.tensor)
    torch.as_tensor = copying(torch.as_tensor)
    torch.asarray = copying(torch.asarray)
    torch.load = loading(torch.load)
    torch.sparse_csr_tensor = sparse_csr_tensor(torch.sparse_csr_tensor)
    torch.distributed.is_nccl_available = lambda: False
    # This function measures times with CUDA events.
    torch.distributed.Logger.set_runtime_stats_and_log = lambda logger: None
    replace_in_template()
    FakeGPUs().__enter__()


def replace_in_cuda(count: int) -> None:
    """Replaces the functions of `torch.cuda` that require a GPU."""

    def set_device(device: torch.device | str | int) -> None:
        State.current = device if isinstance(device, int) else resolved(device).index

    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        number = State.current if device is None else resolved(device).index
        return SimpleNamespace(
            uuid=f"GPU {number} of {socket.gethostname()}", name="simulated", major=9, minor=0,
            total_memory=MEMORY, multi_processor_count=100,
        )  # fmt: skip

    def set_sync_debug_mode(mode: str | int) -> None:
        State.may_wait = mode != "error"

    torch.cuda.set_device = set_device
    torch.cuda.set_sync_debug_mode = set_sync_debug_mode
    torch.cuda.current_device = lambda: State.current
    torch.cuda.synchronize = lambda device=None: wait("torch.cuda.synchronize")
    torch.cuda.get_device_properties = get_device_properties
    results = {
        "is_available": True,
        "device_count": count,
        "get_device_name": "simulated",
        "mem_get_info": (MEMORY, MEMORY),
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "is_current_stream_capturing": False,
    }
    names = ("_lazy_init", "empty_cache", "reset_peak_memory_stats")
    names += ("set_rng_state", "manual_seed", "manual_seed_all")
    results |= dict.fromkeys(names)
    for name, result in results.items():
        setattr(torch.cuda, name, lambda *arguments, result=result, **options: result)


def copying(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement for a function such as `torch.tensor`.

    Such a function copies numbers to a GPU without an operator that `FakeGPUs` could see.
    """

    def replacement(data: Any, *arguments: Any, device: Any = None, **options: Any) -> Tensor:
        if not is_gpu(device) or isinstance(data, GPUTensor):
            return make(data, *arguments, device=device, **options)
        wait(f"torch.{make.__name__} to {device}")
        return GPUTensor(make(data, *arguments, **options), resolved(device))

    return replacement


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement for `torch.load`, which creates tensors without an operator."""

    def replacement(file: Any, map_location: Any = None, **options: Any) -> Any:
        if not is_gpu(map_location):
            return load(file, map_location, **options)

        def on_gpu(value: Any) -> Any:
            return GPUTensor(value, resolved(map_location)) if isinstance(value, Tensor) else value

        return tree_map(on_gpu, load(file, CPU, **options))

    return replacement


def sparse_csr_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement for `torch.sparse_csr_tensor`, which requires a real GPU."""

    def replacement(ptr: Tensor, col: Tensor, value: Tensor, *arguments: Any, **options: Any):
        parts = (ptr, col, value)
        if not any(isinstance(part, GPUTensor) for part in parts):
            return make(*parts, *arguments, **options)
        check_devices("sparse_csr_tensor", (), parts)
        on_cpu = [part.detach().value for part in parts]
        return GPUTensor(make(*on_cpu, *arguments, **options), value.device)

    return replacement


def replace_in_template() -> None:
    """Replaces CUDA graphs with simulated ones, and watches epochs and captures for waits."""
    import evaluate
    import train
    from ddp_setup import Distributed
    from run_folder import RunFolder
    from tests.tools import graphs

    graphs.replace_graphs(free=MEMORY)
    enter = graphs.Recording.__enter__
    leave = graphs.Recording.__exit__

    def start(recording: graphs.Recording) -> graphs.Recording:
        recording.block = no_waiting()
        recording.block.__enter__()
        return enter(recording)

    def end(recording: graphs.Recording, *error: Any) -> None:
        recording.block.__exit__(None, None, None)
        leave(recording, *error)

    graphs.Recording.__enter__ = start
    graphs.Recording.__exit__ = end

    evaluate.in_pieces = running_out_of_memory(evaluate.in_pieces)
    train.train_epoch = watched(train.train_epoch, may_wait=[])
    # The first step may wait, because it creates much of the state.
    train.train_step = watched(train.train_step, may_wait=[True])
    always = itertools.repeat(True)
    for owner, name in ((train.Meter, "read"), (RunFolder, "save"), (Distributed, "stop_reason")):
        setattr(owner, name, watched(getattr(owner, name), always))


def watched(function: Callable[..., Any], may_wait: Iterable[bool]) -> Callable[..., Any]:
    """Returns the function, so that it may wait only in the calls that `may_wait` allows.

    `may_wait` has a value for each of the first calls. Later calls may not wait.
    """
    answers = iter(may_wait)

    def replacement(*arguments: Any, **options: Any) -> Any:
        with no_waiting(next(answers, False)):
            return function(*arguments, **options)

    return replacement


def running_out_of_memory(in_pieces: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the function of evaluate.py, for which memory runs out once, in its first batch."""
    fails = iter([True])

    def replacement(function: Callable[..., Tensor], batch: Any, *others: Any) -> Tensor:
        can_be_split = len(batch.index) > 1

        def function_of_piece(piece: Any) -> Tensor:
            values = function(piece)
            if can_be_split and next(fails, False):
                raise torch.OutOfMemoryError(
                    "tried to allocate 1 GiB: simulated once, in the first evaluation"
                )
            return values

        return in_pieces(function_of_piece, batch, *others)

    return replacement


def main() -> None:
    command = "".join(sys.argv[1:2]).removesuffix(".py")
    if not command or importlib.util.find_spec(command) is None:
        sys.exit(__doc__)
    del sys.argv[1]
    install()
    from ddp_ends import end_process

    end_process(importlib.import_module(command).main())


if __name__ == "__main__":
    main()
