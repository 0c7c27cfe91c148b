"""The process group, the device of this process, DDP wrapping, and agreement between ranks.

`setup` gives the same small object for one process and for many, so that nothing else asks which it is. Run as a script
it shows what each rank got and whether the ranks can add up a number:

    torchrun --standalone --nproc_per_node=4 ddp_setup.py
"""

import contextlib
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class SetupError(RuntimeError):
    """This launch cannot work; the message is one sentence for the user."""


@dataclass(frozen=True)
class DDPConfig:
    device_ids: tuple[int, ...] = ()
    timeout_s: float = 600.0
    sync_batchnorm: bool = False
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float = 25.0

    def __post_init__(self):
        if len(set(self.device_ids)) < len(self.device_ids) or min(self.device_ids, default=0) < 0:
            raise ValueError(f"ddp.device_ids must name each GPU once, not {list(self.device_ids)}")
        if min(self.timeout_s, self.bucket_cap_mb) <= 0:
            raise ValueError("ddp.timeout_s and ddp.bucket_cap_mb must be over 0")


@dataclass(frozen=True)
class Distributed:
    """This process among the others. Without torchrun: rank 0 of 1, and no process group."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    launched: bool

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module, config: DDPConfig) -> nn.Module:
        """`model` (already on the device) under DDP, which starts all ranks from rank 0's parameters.

        Raises:
            SetupError: on every rank, for ddp.sync_batchnorm on the CPU, where torch has none.
        """
        if not self.launched:
            return model  # which sees whole batches: there is nothing to synchronise
        if config.sync_batchnorm:
            if self.device.type != "cuda":
                raise SetupError(
                    "ddp.sync_batchnorm=true needs GPUs, torch's SyncBatchNorm does not run on the CPU: set it to false"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            broadcast_buffers=config.broadcast_buffers,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            bucket_cap_mb=config.bucket_cap_mb,
        )

    def accumulating(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """The context of a micro-batch's forward and backward: only the last one of a step exchanges gradients."""
        return contextlib.nullcontext() if last or not self.launched else model.no_sync()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on every rank; `values` stays as it is."""
        values = values.clone()
        if self.launched:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list:
        """The picklable `value` of each rank, by rank, on every rank."""
        if not self.launched:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on rank 0, on every rank; the others do not call it."""
        values = [make() if self.is_main else None]
        if self.launched:
            dist.broadcast_object_list(values)
        return values[0]

    @contextlib.contextmanager
    def together(self, *errors: type[Exception]) -> Iterator[None]:
        """If the block raises one of `errors` on any rank, every rank raises `SetupError` with that message.

        Every rank must reach the block, and nothing inside it may wait for another rank.
        """
        problem = None
        try:
            yield
        except errors as error:
            problem = str(error)
        self._refuse(self.gather(problem))

    def check_equal(self, values: dict[str, Any]) -> None:
        """Raise `SetupError` on every rank, naming rank and field, if a value is not what rank 0 has."""
        first, *others = self.gather(values)
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise SetupError(f"rank {rank} has another {name} than rank 0: {other[name]} and {value}")

    def check_ready(self, ddp_model: nn.Module, *modules: nn.Module) -> None:
        """Raise `SetupError` on every rank unless ranks will exchange gradients and all tensors are on their device."""
        problem = None  # the first one
        if self.launched and not isinstance(ddp_model, DistributedDataParallel):
            problem = "torchrun started this process but the model is not under DDP: train the model that wrap() gives"
        for module in (ddp_model, *modules):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if problem is None and tensor.device != self.device:
                    problem = f"{type(module).__name__}.{name} is on {tensor.device}: move the module to {self.device}"
        self._refuse(self.gather(problem))

    def close(self) -> None:
        """Only after success: destroying the group while another rank is in a collective makes both hang.

        The model that `wrap` gave must be out of scope.
        """
        if self.launched:
            # A DDP module (in a reference cycle, often) frees a group that it outlives without letting go of the GIL,
            # and so may wait for ever for a gloo thread that needs it.
            gc.collect()
            dist.destroy_process_group()

    def _refuse(self, problems: list[str | None]) -> None:
        for problem in problems:
            if problem is not None:
                raise SetupError(problem)


def setup(config: DDPConfig) -> Distributed:
    """Device from LOCAL_RANK, threads, process group.

    Raises:
        SetupError: on every rank, if any rank has no device of its own.
    """
    launched = "WORLD_SIZE" in os.environ
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if launched and missing:
        raise SetupError(f"WORLD_SIZE is set but {', '.join(missing)} is not: start with torchrun, or unset WORLD_SIZE")
    rank, local_rank, world_size, local_world_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    )
    torch.set_num_threads(cpu_threads(local_world_size))
    device, problem = choose_device(local_rank, local_world_size, config.device_ids)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched:
        # gloo beside nccl: agreement between ranks stays off the GPU.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s))
    env = Distributed(rank, local_rank, world_size, local_world_size, device, launched)
    # A rank without a device leaves only now, together with all others, so that none waits for it.
    env._refuse(env.gather(problem))
    return env


def choose_device(
    local_rank: int, local_world_size: int, device_ids: tuple[int, ...]
) -> tuple[torch.device, str | None]:
    """The device of this process, and what is wrong with this machine's devices, if anything."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu = torch.device("cpu")
    where = f"on {platform.node()}"
    if not set(device_ids) <= set(range(visible)):
        return (
            cpu,
            f"ddp.device_ids={list(device_ids)} but {visible} GPUs are visible {where}: name those, or none",
        )
    if visible == 0:
        return cpu, None
    chosen = device_ids or tuple(range(visible))
    if local_world_size > len(chosen):
        return cpu, (
            f"{local_world_size} processes but {len(chosen)} GPUs to use {where}: "
            f"set --nproc_per_node to {len(chosen)} or less, or CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return torch.device("cuda", chosen[local_rank]), None


def cpu_threads(local_world_size: int) -> int:
    """OMP_NUM_THREADS if the user set it, else this machine's cores divided by its processes.

    torchrun sets OMP_NUM_THREADS=1 where the user set nothing, so under torchrun a 1 counts only if torchrun itself was
    started with it.
    """
    value = os.environ.get("OMP_NUM_THREADS", "")
    by_user = value.isdecimal() and int(value) > 0
    if value == "1" and dist.is_torchelastic_launched():
        try:
            by_user = b"OMP_NUM_THREADS=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
        except OSError:
            by_user = False
    if by_user:
        return int(value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // local_world_size)


def leave(message: str, status: int = 2) -> NoReturn:
    """Say `message` once and end this process; every rank must call it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        dist.barrier()
    # At once: torchrun kills the slower ones as soon as one is gone, and interpreter shutdown is slow.
    sys.stdout.flush()
    os._exit(status)


def describe(env: Distributed) -> list[str]:
    """One line a rank: host, pid, device, threads and versions; the same on every rank."""
    device = str(env.device)
    if env.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(env.device)})"
    backend = dist.get_backend_config() if env.launched else "none"
    line = (
        f"rank {env.rank}: {platform.node()} pid {os.getpid()}, LOCAL_RANK {env.local_rank}, {device}, "
        f"backend {backend}, {torch.get_num_threads()} CPU threads, "
        f"python {platform.python_version()}, torch {torch.__version__}"
    )
    return env.gather(line)


def main() -> None:
    env = setup(DDPConfig())
    lines = describe(env)
    total = env.sum(torch.tensor([float(env.rank)], device=env.device)).item()
    expected = env.world_size * (env.world_size - 1) / 2
    if env.is_main:
        print(*lines, sep="\n")
        print(f"all-reduce over {env.world_size} ranks: {'OK' if total == expected else f'{total}, not {expected}'}")
    if total != expected:
        sys.exit(1)
    env.close()


if __name__ == "__main__":
    main()
