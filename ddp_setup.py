"""The process group, the device of this process, and agreement between ranks.

`run` calls a program with a `Distributed`, which has the rank, the device and the collectives of
this process. Its interface is the same for one process and for many, so that a program does not
need to distinguish them. For example, this program prints the number of ranks:

    def program(ddp: Distributed) -> None:
        total = ddp.sum(torch.ones(1, device=ddp.device))
        if ddp.rank == 0:
            print(total.item())

    ddp_ends.end_process(run(program, DDPConfig()))
"""

import contextlib
import gc
import itertools
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddp_ends import Heartbeat, StopRequest, explain_failure, report_error, write_error_file
from errors import UserError, counted, reason_of
from parts import optional

group_numbers = itertools.count()  # numbers the process groups that this process joins
# Arguments of DistributedDataParallel that ddp.options accepts, besides bucket_cap_mb. init_sync is
# not one of them, because all ranks must start from the parameters of rank 0.
FLAGS = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
AGREEMENT_S = 0.5  # approximate seconds between two agreements of the ranks on whether to stop


@dataclass(frozen=True)
class DDPConfig:
    """The options of the section `ddp` in config.yaml, which explains them."""

    device_ids: list[int] = field(default_factory=list)
    startup_timeout_s: float = field(default=1800.0, metadata={"min": 1, "max": 1e6})
    timeout_s: float = field(default=300.0, metadata={"min": 1, "max": 1e6})
    sync_batchnorm: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, value in self.options.items():
            is_flag = name in FLAGS and type(value) is bool
            is_size = name == "bucket_cap_mb" and type(value) in (int, float)
            if not is_flag and not (is_size and 0 < value <= 1e6):
                advice = f"give {', '.join(FLAGS)} as true or false"
                advice += ", or bucket_cap_mb as a number above 0 and up to 1e6"
                raise ValueError(f"ddp.options: {name}: {value!r} is invalid: {advice}")


# ---- Rank, collectives, stopping and failing -----------------------------------------------------
class Distributed:
    """The rank, the device and the collectives of this process.

    All ranks must call a collective, in the same order. Without torchrun, the process is rank 0 of
    1, and collectives return at once. A new object does not belong to a process group yet: `run`
    calls `setup`, which joins the group and selects the device.

    Args:
        config: the options of the section `ddp`.

    Attributes:
        is_distributed: whether the process joins a process group, as it does under torchrun.
        rank: the global rank, from 0 to `world_size` - 1.
        world_size: the number of ranks.
        local_rank: the rank among the processes of this machine.
        local_world_size: the number of processes of this machine.
        device: the GPU of this rank, or the CPU.
    """

    def __init__(self, config: DDPConfig):
        self.config = config
        self.is_distributed = "WORLD_SIZE" in os.environ or "RANK" in os.environ
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1
        self.device = torch.device("cpu")
        self.threads = ""  # number of threads of this process, and the reason for it
        # A key-value store that all ranks share; without torchrun, a store of this process.
        self.store: dist.Store | None = None
        self.stop: StopRequest | None = None  # set by train.py; it stops training
        # A function that is called with the reason if the job fails.
        self.on_failure: Callable[[str], None] | None = None
        self.heartbeat = Heartbeat()
        self.last_phase = ""  # the phase that was entered last
        self.agreed_at = 0.0  # time of the last agreement on whether to stop
        self.steps_since = 0  # number of steps since the last agreement
        self.steps_between = 1  # number of steps from the last agreement to the next
        # Number of seconds without progress after which a watchdog ends the job.
        self.limit_s = config.startup_timeout_s
        self.num_pieces = 1  # number of pieces into which evaluate.py splits a batch
        self.seconds = defaultdict(float)  # number of seconds spent in each phase
        self.command = sys.argv  # the command line, for records
        self.cleanup = contextlib.ExitStack()  # `close` calls its callbacks in reverse order

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Returns a context manager that labels a phase of the work, such as "forward".

        The name appears in reports of hangs and in profiler traces. The duration of the block is
        added to `seconds[name]`, unless the block raises an exception. Phases can be nested.
        """
        step, changes, outer, entered = self.heartbeat
        is_other = name != self.last_phase
        self.heartbeat = Heartbeat(step, changes + is_other, name, entered + 1)
        self.last_phase = name
        start = time.perf_counter()
        try:
            with record_function(name):
                yield
        finally:
            self.heartbeat = self.heartbeat._replace(phase=outer)
        self.seconds[name] += time.perf_counter() - start

    @property
    def device_ids(self) -> list[int] | None:
        """The `device_ids` of `DistributedDataParallel`: this rank's GPU, or None on the CPU."""
        return [self.device.index] if self.device.type == "cuda" else None

    def prepare_for_ddp(self, model: nn.Module) -> nn.Module:
        """Prepares a model for `DistributedDataParallel`, and returns the model to wrap.

        With ddp.sync_batchnorm, the BatchNorm layers of the returned model are SyncBatchNorm
        layers. If the model has running statistics, like BatchNorm, DDP broadcasts its buffers in
        every forward pass. Otherwise, its buffers are constant, and DDP does not broadcast them. If
        a parameter does not get a gradient, the error of DDP contains its name.

        Args:
            model: a model whose parameters are already on `device`.

        Raises:
            UserError: ddp.sync_batchnorm is set, but the device is the CPU.
        """
        if self.config.sync_batchnorm:
            if self.device.type == "cpu":
                raise UserError("ddp.sync_batchnorm=true needs GPUs: set it to false")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
        dist.set_debug_level_from_env()  # makes DDP name the parameters without a gradient
        buffers = [name for name, _ in model.named_buffers()]
        has_statistics = any(name.endswith("running_mean") for name in buffers)
        if not has_statistics:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
        return model

    def step_done(self, step: int) -> None:
        """Records that `step` training steps are done; call it after each of them."""
        self.heartbeat = self.heartbeat._replace(step=step, changes=0, phase="other work")
        self.steps_since += 1
        # Until the first step is done, the limit is longer, because the step loads libraries.
        self.limit_s = self.config.timeout_s

    def stop_reason(self, at_once: bool = True) -> str:
        """Returns the reason why all ranks must stop, or "" to continue.

        All ranks must call this method after the same steps, and all of them get the same answer. A
        request on a single rank is sufficient. To save time, the ranks communicate only about every
        `AGREEMENT_S` seconds; the calls in between return "". At each agreement, every rank
        estimates the number of steps until the next agreement from its own speed, and all ranks use
        the smallest number. The number at most doubles from one agreement to the next, because a
        host that is ahead of its GPU overestimates the speed.

        Args:
            at_once: if True, the ranks communicate in this call in any case.
        """
        if self.steps_since < self.steps_between and not at_once:
            return ""
        proposed = self.steps_between
        if self.steps_since:
            steps = AGREEMENT_S * self.steps_since / (time.perf_counter() - self.agreed_at)
            proposed = max(1, min(int(steps), 2 * self.steps_between))
        code = self.stop.code() if self.stop else 0
        # Uses the backend of the device: with 1,000 ranks, gloo would take tens of milliseconds.
        values = torch.tensor([code, -proposed], device=self.device)
        code, steps = self._reduce(values, dist.ReduceOp.MAX).tolist()
        self.agreed_at = time.perf_counter()
        self.steps_since = 0
        self.steps_between = -steps
        return StopRequest.REASONS[code]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the elementwise sum of a tensor over all ranks. A collective.

        The argument `values` must have the same shape on every rank. It is not modified.
        """
        return self._reduce(values.clone(), dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, op: dist.ReduceOp) -> Tensor:
        if self.is_distributed:
            with self.phase("agreement"):
                dist.all_reduce(values, op)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Returns the value of the rank `source` on every rank. A collective.

        The value must be picklable. The values of the other ranks are ignored.
        """
        values = [value]
        if self.is_distributed:
            dist.broadcast_object_list(values, source)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns a list with the value of each rank, in the order of ranks. A collective.

        Every rank gets the same list. The values must be picklable.
        """
        values = [value] * self.world_size
        if self.is_distributed:
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def sync_errors(self, phase: str = "set-up") -> Iterator[None]:
        """Returns a context manager after which either all ranks continue, or all ranks fail.

        Without it, the other ranks would wait forever for a rank that has raised an error. The
        ranks communicate at the end of the block. If the block raises `UserError` on some ranks,
        every rank raises the error of the lowest of them. An `OSError` with a file name is
        converted to a `UserError`. Any other exception is raised only on its own rank.

        The block must not contain a collective or another such block, because the other ranks would
        wait in it for a rank that has failed.

        Args:
            phase: the name of the block in reports of hangs.
        """
        problem = None
        try:
            with self.phase(phase):
                yield
        except UserError as error:
            problem = error
        except OSError as error:
            if error.filename is None:
                raise
            problem = UserError(f"cannot use {error.filename}: {reason_of(error)}")
        ranks_left = torch.tensor(self.world_size - self.rank if problem else 0)
        # The tensor is on the CPU, because this rank may not have a GPU.
        most = int(self._reduce(ranks_left, dist.ReduceOp.MAX))
        if most:
            raise self.broadcast(problem, self.world_size - most)

    def check_equal(self, values: dict[str, Any]) -> None:
        """Checks that every key has the same value on all ranks that have the key. A collective.

        A key may be missing on some ranks. For example, a rank that reads tables from the cache
        loads fewer modules, and does not have the hashes of the other modules.

        Raises:
            UserError: two ranks have different values of a key. Every rank raises this error, which
                names the key, both ranks, and their values or the difference of two sets.
        """
        first = {}  # for each key, the first rank that has the key, and its value there
        for rank, others in enumerate(self.gather(values)):
            for name, value in others.items():
                first_rank, first_value = first.setdefault(name, (rank, value))
                if value == first_value:
                    continue
                found = f"{value} on rank {rank}, {first_value} on rank {first_rank}"
                if isinstance(value, frozenset):
                    only = ", ".join(sorted(value ^ first_value))
                    found = f"only one of rank {first_rank} and rank {rank} has {only}"
                problem = f"{name} differs between ranks: {found}"
                raise UserError(f"{problem}: make it the same on all ranks")

    def close(self) -> None:
        """Leaves the process group, and undoes what this object has changed in the process.

        It ends threads, closes files and restores signal handlers. With several ranks, call it only
        after success. After a failure, another rank could be in a collective, and leaving the group
        would hang.
        """
        # The hook may refer to a DDP module, which must not outlive the group.
        self.on_failure = None
        self.cleanup.close()

    def first_failure(self, reason: str) -> tuple[str, bool]:
        """Records a reason for the failure of the job, and returns the first recorded reason.

        The ranks share this record. If another rank has already recorded a reason, that reason is
        kept and returned, because the failure of this rank is usually its consequence.

        Returns:
            The first reason, and whether this rank has recorded it.
        """
        with contextlib.suppress(dist.DistError):  # torchrun may have exited
            if self.store:
                recorded = self.store.compare_set("end", "", f"{self.rank} {reason}").decode()
                rank, _, first = recorded.partition(" ")
                return first, int(rank) == self.rank
        return reason, True

    def report_failure(self, error: BaseException) -> int:
        """Reports an error that ends the job, and returns the exit status of this process.

        Only the rank that fails first prints its error. All ranks log their own error. The report
        contains the traceback if `explain_failure` returns one. The exit status is the `status` of
        a `UserError`, and 1 for all other exceptions.
        """
        trace, reason = explain_failure(error, self.rank)
        first, is_first = self.first_failure(reason)
        report_error(f"{trace}error: {reason}", is_printed=is_first)
        self.publish_failure(first, trace if is_first else "")
        return getattr(error, "status", 1)

    def publish_failure(self, reason: str, trace: str = "") -> None:
        """Passes the reason of a failure to torchrun and to the hook `on_failure`, if any."""
        if self.is_distributed:
            write_error_file(f"{trace}error: {reason}")
        if self.on_failure:
            with contextlib.suppress(UserError):  # the hook may write to a disk that is full
                self.on_failure(reason)


# ---- Set-up --------------------------------------------------------------------------------------
def setup(ddp: Distributed) -> Distributed:
    """Joins the process group, selects this rank's device, and returns `ddp`.

    Raises:
        UserError: the environment variables are incomplete, the other ranks cannot be reached, or
            the GPUs do not suffice. If the ranks can communicate, all of them raise this error.
    """
    if ddp.is_distributed:
        # torchrun reports this text if the process is killed before it can report another reason.
        write_error_file(
            "this process was ended by a signal, for example by SIGKILL when memory ran out: "
            "repeat the command to resume from the last checkpoint"
        )
        try:
            ddp.rank = int(os.environ["RANK"])
            ddp.local_rank = int(os.environ["LOCAL_RANK"])
            ddp.world_size = int(os.environ["WORLD_SIZE"])
            ddp.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"WORLD_SIZE or RANK is set in the environment, but not by torchrun (missing or "
                f"invalid: {error}): use torchrun, or unset these variables"
            ) from None
        join_group(ddp)
    else:
        ddp.store = dist.HashStore()
    ddp.cleanup.callback(torch.set_num_threads, torch.get_num_threads())
    threads = optional("ddp_threads")
    reason = "chosen by torch" if threads is None else threads.set_threads(ddp.local_world_size)
    ddp.threads = f"{torch.get_num_threads()} ({reason})"
    with ddp.sync_errors():  # otherwise, the other ranks would wait for a rank without a device
        ddp.device = choose_device(ddp)
        if ddp.device.type == "cuda":
            torch.cuda.set_device(ddp.device)
            gpu = torch.cuda.get_device_properties(ddp.device).uuid
            first = int(ddp.store.compare_set(f"gpu/{gpu}", "", str(ddp.rank)))
            if first != ddp.rank:
                problem = f"ranks {first} and {ddp.rank} share a GPU"
                advice = "start one process per GPU, or set CUDA_VISIBLE_DEVICES= to use the CPU"
                raise UserError(f"{problem}: {advice}")
    # Ranks on a CPU and ranks on a GPU use different backends, and would wait for each other.
    ddp.check_equal({"device": ddp.device.type})
    return ddp


def join_group(ddp: Distributed) -> None:
    """Joins the process group, and starts the watchdog; raises `UserError` if this fails."""
    startup_s = ddp.config.startup_timeout_s
    # This timeout is longer than the watchdog's limit, so that the watchdog reports a hang first.
    timeout = timedelta(seconds=startup_s + ddp.config.timeout_s)
    # With gloo in addition to nccl, ranks can agree on errors even if one of them has no GPU.
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    try:
        store = find_store(startup_s)
        store.set_timeout(timeout)
        # torchrun keeps its store when it restarts the ranks, and a process may join several groups
        # in turn. Without the prefix, ranks would use addresses of dead ranks.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        ddp.store = dist.PrefixStore(f"restart {restart}, group {next(group_numbers)}", store)
        watchdog = optional("ddp_watchdog")
        # Without a watchdog, a hang ends with a timeout, whose message does not name the rank.
        if watchdog is not None:
            watchdog.start_watchdog(ddp)
        dist.init_process_group(
            backend, store=ddp.store, rank=ddp.rank, world_size=ddp.world_size, timeout=timeout
        )
        ddp.cleanup.callback(dist.destroy_process_group)
        # Runs before: deletes DDP modules, because a module that outlives the group can deadlock
        # with a gloo thread.
        ddp.cleanup.callback(gc.collect)
    except (RuntimeError, OSError, ValueError, futures.TimeoutError) as error:
        reason = str(error) or "no answer"
        address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"rank {ddp.rank} on {platform.node()} cannot reach the other ranks at "
            f"MASTER_ADDR={address} MASTER_PORT={port} ({reason.splitlines()[0]}): "
            "set the address of rank 0 and a free port there, open all ports between the machines, "
            "or set GLOO_SOCKET_IFNAME to the network interface"
        ) from None


def find_store(longest_s: float) -> dist.Store:
    """Returns the store at MASTER_ADDR and MASTER_PORT.

    torchrun usually creates the store. Otherwise, rank 0 creates it. Raises `futures.TimeoutError`
    if the store does not answer, for example because a different program uses the port.
    """
    # If torchrun has created the store, it exists before this process. Otherwise, rank 0 may start
    # much later than this rank.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit_s = min(40.0 if is_there else 300.0, longest_s)
    rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=limit_s))
    thread = futures.ThreadPoolExecutor(1)
    store, _, _ = thread.submit(next, rendezvous).result(1.25 * limit_s)
    thread.shutdown()
    return store


def choose_device(ddp: Distributed) -> torch.device:
    """Returns this rank's GPU, or the CPU if the machine has no GPU.

    With ddp.device_ids, a rank gets the GPU at the position of its local rank in this list.

    Raises:
        UserError: there are fewer GPUs than processes, or a listed GPU does not exist.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = ddp.config.device_ids or list(range(visible))
    if not chosen:
        return torch.device("cpu")
    if visible == 1 and ddp.local_world_size > 1 and not ddp.config.device_ids:
        return torch.device("cuda", 0)  # a scheduler may assign a different GPU to each process
    missing = set(chosen) - set(range(visible))
    if missing or ddp.local_world_size > len(chosen):
        raise UserError(
            f"{platform.node()} has {counted(visible, 'GPU')} for "
            f"{counted(ddp.local_world_size, 'process', 'processes')} with "
            f"ddp.device_ids={chosen}: set --nproc_per_node (NPROC of launch.sh) to the number of "
            "GPUs to use. To run on the CPU, set CUDA_VISIBLE_DEVICES= and 'ddp.device_ids=[]'"
        )
    return torch.device("cuda", chosen[ddp.local_rank])


def run(program: Callable[[Distributed], None], config: DDPConfig) -> int:
    """Calls `program` with this process's `Distributed`, and returns the exit status.

    An exception on any rank ends the job. With several ranks, the caller must then exit with the
    returned status, so that torchrun ends the other ranks. A single process can continue: the
    function undoes its changes to the process, whether the program succeeds or fails.

    Returns:
        0 after success, 1 after a failure, or the `status` of a `UserError`.
    """
    ddp = Distributed(config)
    try:
        program(setup(ddp))
        ddp.close()
        return 0
    except BaseException as error:  # includes SystemExit, because the other ranks would hang
        try:
            return ddp.report_failure(error)
        finally:
            if ddp.world_size == 1:
                ddp.close()
            else:
                # This keeps the objects of DDP alive, because freeing them can hang.
                sys.last_value = error


def library_versions() -> dict[str, str]:
    """Returns versions, and the precision of float32 products, which must agree on all ranks."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def describe(ddp: Distributed) -> str:
    """Returns a text that describes all ranks, for the log. A collective.

    It has one line for each rank: its machine, process, device, threads and versions. On a CPU,
    lines with warnings about unused devices of this rank's machine follow.
    """
    device = str(ddp.device)
    if ddp.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ddp.device)
        device += f" ({torch.cuda.get_device_name(ddp.device)}, {free / 2**30:.1f} GB free)"
    process = f"rank {ddp.rank}, host {platform.node()}, pid {os.getpid()}"
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    lines = ddp.gather(f"{process}, device {device}, threads {ddp.threads}, {versions}")
    threads = optional("ddp_threads")
    if ddp.device.type == "cpu" and threads is not None:
        lines += threads.notes_on_devices()
    return "\n".join(lines)
