"""The process group, the device of this process, DDP's arguments, and agreement between ranks.

`Distributed` has the same interface for one process and for many.
"""

import contextlib
import gc
import inspect
import itertools
import logging
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddp_ends import Heartbeat, StopRequest, explain_failure, log_and_print, write_error_file
from errors import UserError, reason_of
from parts import optional

log = logging.getLogger("ddp_setup")
log.addHandler(logging.NullHandler())  # otherwise, the preflight would print errors twice

group_numbers = itertools.count()  # numbers the process groups that this process joins
NO_COLLECTIVE = "a collective within sync_errors would hang if a rank has failed: move it out"
AGREEMENT_S = 0.5  # seconds between two agreements of the ranks on whether to stop


@dataclass(frozen=True)
class DDPConfig:
    device_ids: list[int] = field(default_factory=list)
    startup_timeout_s: float = field(default=1800.0, metadata={"min": 1})
    timeout_s: float = field(default=300.0, metadata={"min": 1})
    sync_batchnorm: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        arguments = inspect.signature(DistributedDataParallel).parameters
        for name, value in self.options.items():
            kinds = (int, float) if name == "bucket_cap_mb" else (bool,)
            if name not in arguments or type(value) not in kinds:
                raise ValueError(
                    f"ddp.options: {name}: {value!r} is invalid: give arguments of "
                    "DistributedDataParallel that are true or false, or bucket_cap_mb and a number"
                )


# ---- Rank, collectives, stopping and failing -----------------------------------------------------
class Distributed:
    """Rank, device and collectives of this process. Without torchrun, it is rank 0 of 1."""

    def __init__(self, config: DDPConfig):
        self.config = config
        self.is_distributed = "WORLD_SIZE" in os.environ or "RANK" in os.environ
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1
        self.device = torch.device("cpu")
        self.threads = ""  # number of threads of this process, and the reason for it
        self.store: dist.Store | None = None  # torchrun's store, or a store of this process
        self.stop: StopRequest | None = None
        # Called with the reason if the job fails.
        self.on_failure: Callable[[str], None] | None = None
        self.syncs_errors = False  # whether this rank is inside a block of `sync_errors`
        self.heartbeat = Heartbeat()
        self.last_phase = ""  # the phase that was entered last
        self.agreed_at = 0.0  # time of the last agreement on whether to stop
        self.steps_since = 0
        self.steps_between = 1  # steps from the last agreement to the next
        # Seconds without progress until a watchdog ends the job.
        self.limit_s = config.startup_timeout_s
        self.seconds = defaultdict(float)  # seconds spent in each phase
        self.command = sys.argv
        self.cleanup = contextlib.ExitStack()  # callbacks of `close`, called in reverse order

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Labels what this rank is doing, for hang reports, metrics.jsonl and profiler traces."""
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
        """`device_ids` for `DistributedDataParallel`: this rank's GPU, or None on the CPU."""
        return [self.device.index] if self.device.type == "cuda" else None

    def prepare_for_ddp(self, model: nn.Module) -> nn.Module:
        """Returns the model to wrap in `DistributedDataParallel`; it must be on its device.

        With ddp.sync_batchnorm, BatchNorm layers become SyncBatchNorm; on the CPU, this raises
        `UserError`. Buffers are only broadcast if some of them are running statistics.
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

    def stop_on_request(self, file: Path) -> None:
        """Makes signals and the file STOP end training, until this object is closed."""
        self.stop = StopRequest(file)
        self.cleanup.callback(self.stop.close)

    def step_done(self, step: int) -> None:
        """Records that `step` steps are done."""
        self.heartbeat = self.heartbeat._replace(step=step, changes=0, phase="other work")
        self.steps_since += 1
        # Only the first step has the longer limit, because it loads libraries.
        self.limit_s = self.config.timeout_s

    def stop_reason(self, at_once: bool = True) -> str:
        """Returns the reason why all ranks must stop, "" if there is none.

        Ranks communicate only if `at_once` is set, or about every `AGREEMENT_S`; otherwise, this
        returns "". At each agreement, every rank proposes the number of steps until the next one
        from its own speed, and the smallest number is used. This number at most doubles, because a
        host that is ahead of its device overestimates the speed. The agreement uses the backend of
        the device, because gloo would take tens of milliseconds with a thousand ranks.
        """
        if self.steps_since < self.steps_between and not at_once:
            return ""
        proposed = self.steps_between
        if self.steps_since:
            steps = AGREEMENT_S * self.steps_since / (time.perf_counter() - self.agreed_at)
            proposed = max(1, min(int(steps), 2 * self.steps_between))
        code = self.stop.code() if self.stop else 0
        values = torch.tensor([code, -proposed], device=self.device)
        code, steps = self._reduce(values, dist.ReduceOp.MAX).tolist()
        self.agreed_at = time.perf_counter()
        self.steps_since = 0
        self.steps_between = -steps
        return StopRequest.REASONS[code]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks, on every rank; `values` is not modified."""
        return self._reduce(values.clone(), dist.ReduceOp.SUM)

    def _reduce(self, values: Tensor, op: dist.ReduceOp) -> Tensor:
        assert not self.syncs_errors, NO_COLLECTIVE
        if self.is_distributed:
            with self.phase("agreement"):
                dist.all_reduce(values, op)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Returns, on every rank, the `value` of the rank `source`, which must be picklable."""
        assert not self.syncs_errors, NO_COLLECTIVE
        values = [value]
        if self.is_distributed:
            dist.broadcast_object_list(values, source)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns, on every rank, the `value` of every rank in rank order; it must be picklable."""
        assert not self.syncs_errors, NO_COLLECTIVE
        values = [value] * self.world_size
        if self.is_distributed:
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def sync_errors(self, phase: str = "set-up") -> Iterator[None]:
        """If the block raises `UserError` on any rank, every rank raises that of the lowest rank.

        An `OSError` with a file name is converted to a `UserError`. The block must not contain a
        collective or another such block; otherwise, it raises `AssertionError`.
        """
        problem = None
        is_within = self.syncs_errors
        self.syncs_errors = True
        try:
            with self.phase(phase):
                yield
        except UserError as error:
            problem = error
        except OSError as error:
            if error.filename is None:
                raise
            problem = UserError(f"cannot use {error.filename}: {reason_of(error)}")
        finally:
            self.syncs_errors = is_within
        ranks_left = torch.tensor(self.world_size - self.rank if problem else 0)
        # On the CPU, because there may be no GPU.
        most = int(self._reduce(ranks_left, dist.ReduceOp.MAX))
        if most:
            raise self.broadcast(problem, self.world_size - most)

    def check_equal(self, values: dict[str, Any]) -> None:
        """Raises `UserError` on every rank if two ranks have different values of a key.

        The error names both ranks and the key. A key may be missing on some ranks: a rank that
        reads the cache loads fewer modules.
        """
        first = {}  # key: the first rank that has it, and its value
        for rank, others in enumerate(self.gather(values)):
            for name, value in others.items():
                first_rank, first_value = first.setdefault(name, (rank, value))
                if value != first_value:
                    raise UserError(
                        f"{name} differs between ranks: {value} on rank {rank}, "
                        f"{first_value} on rank {first_rank}"
                    )

    def close(self) -> None:
        """Leaves the process as it was: ends the process group, threads, files and handlers.

        With several ranks, it is called only after success: after a failure, another rank could be
        in a collective, and leaving the group would hang.
        """
        self.on_failure = None  # it may refer to a DDP module, which must not outlive the group
        self.cleanup.close()

    def first_failure(self, reason: str) -> tuple[str, bool]:
        """Records why the job ends, unless another rank already has.

        Returns the recorded reason, and whether it is from this rank.
        """
        with contextlib.suppress(dist.DistError):  # torchrun may have exited
            if self.store:
                recorded = self.store.compare_set("end", "", f"{self.rank} {reason}").decode()
                rank, _, first = recorded.partition(" ")
                return first, int(rank) == self.rank
        return reason, True

    def report_failure(self, error: BaseException) -> int:
        """Reports that the job fails; returns the exit status: that of a `UserError`, otherwise 1.

        Only the first rank to fail prints the error, with a traceback if `explain_failure` returns
        one.
        """
        trace, reason = explain_failure(error, self.rank)
        first, is_first = self.first_failure(reason)
        report = log_and_print if is_first else log.error
        report(f"{trace}error: {reason}")
        self.publish_failure(first, trace if is_first else "")
        return getattr(error, "status", 1)

    def publish_failure(self, reason: str, trace: str = "") -> None:
        """Passes the reason of a failure to torchrun and the hook `on_failure`, if they exist."""
        if self.is_distributed:
            write_error_file(f"{trace}error: {reason}")
        if self.on_failure:
            with contextlib.suppress(UserError):  # writing fails if the disk is full
                self.on_failure(reason)


# ---- Set-up --------------------------------------------------------------------------------------
def setup(ddp: Distributed) -> Distributed:
    """Joins the process group, selects this rank's device and returns `ddp`; raises `UserError`."""
    if ddp.is_distributed:
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
            name = "WORLD_SIZE" if "WORLD_SIZE" in os.environ else "RANK"
            raise UserError(
                f"the environment variable {name} is set, but not by torchrun ({error}): use "
                "torchrun, or unset the variable"
            ) from None
        join_group(ddp)
    else:
        ddp.store = dist.HashStore()
    ddp.cleanup.callback(torch.set_num_threads, torch.get_num_threads())
    ddp.threads = set_threads(ddp.local_world_size)
    with ddp.sync_errors():  # if one rank has no device, all ranks exit instead of waiting for it
        ddp.device = choose_device(ddp)
        if ddp.device.type == "cuda":
            torch.cuda.set_device(ddp.device)
            gpu = torch.cuda.get_device_properties(ddp.device).uuid
            first = int(ddp.store.compare_set(f"gpu/{gpu}", "", str(ddp.rank)))
            if first != ddp.rank:
                raise UserError(
                    f"ranks {first} and {ddp.rank} share a GPU: start one process per GPU, "
                    "or set CUDA_VISIBLE_DEVICES= to run on the CPU"
                )
    # Ranks on a CPU and on a GPU would wait for each other.
    ddp.check_equal({"device": ddp.device.type})
    return ddp


def set_threads(local_world_size: int) -> str:
    """Sets the number of torch's threads in this process; returns it and the reason as a text."""
    # With several ranks, torchrun sets this variable to 1 if the user has not set it.
    if os.environ.get("OMP_NUM_THREADS"):
        return f"{torch.get_num_threads()} (OMP_NUM_THREADS)"
    threads = optional("ddp_threads")
    if threads is None:
        return f"{torch.get_num_threads()} (chosen by torch)"
    num_threads, reason = threads.choose_threads(local_world_size)
    torch.set_num_threads(num_threads)
    return f"{num_threads} ({reason})"


def join_group(ddp: Distributed) -> None:
    """Joins the process group, and starts the watchdog; raises `UserError` if that fails."""
    startup_s = ddp.config.startup_timeout_s
    # Longer than the watchdog's limit, so that the watchdog reports first.
    timeout = timedelta(seconds=startup_s + ddp.config.timeout_s)
    # gloo in addition to nccl, so that ranks can agree on errors without a GPU
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    try:
        store = find_store(startup_s)
        store.set_timeout(timeout)
        # torchrun keeps its store across restarts, and across several groups of a process. Without
        # the prefix, ranks would use addresses of dead ranks.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        ddp.store = dist.PrefixStore(f"restart {restart}, group {next(group_numbers)}", store)
        watchdog = optional("ddp_watchdog")
        if watchdog is not None:  # without it, a hang ends with a timeout that does not name a rank
            watchdog.start_watchdog(ddp)
        dist.init_process_group(
            backend, store=ddp.store, rank=ddp.rank, world_size=ddp.world_size, timeout=timeout
        )
        ddp.cleanup.callback(leave_group)
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
    """Returns the store at MASTER_ADDR and MASTER_PORT; without torchrun, rank 0 creates it.

    Raises `futures.TimeoutError` if a different program uses the port, because it may never answer.
    """
    # torchrun creates its store before its processes. Without torchrun, rank 0 may start much later
    # than this rank.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit_s = min(40.0 if is_there else 300.0, longest_s)
    rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=limit_s))
    thread = futures.ThreadPoolExecutor(1)
    store, _, _ = thread.submit(next, rendezvous).result(1.25 * limit_s)
    thread.shutdown()
    return store


def leave_group() -> None:
    """Destroys the process group."""
    gc.collect()  # deletes DDP modules: one that outlives the group can deadlock with a gloo thread
    dist.destroy_process_group()


def choose_device(ddp: Distributed) -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none; raises `UserError` for too few GPUs."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = ddp.config.device_ids or list(range(visible))
    if not chosen:
        return torch.device("cpu")
    if visible == 1 and ddp.local_world_size > 1 and not ddp.config.device_ids:
        return torch.device("cuda", 0)  # a scheduler may show a different GPU to each process
    missing = set(chosen) - set(range(visible))
    if missing or ddp.local_world_size > len(chosen):
        raise UserError(
            f"{platform.node()} has {visible} GPUs for {ddp.local_world_size} processes with "
            f"ddp.device_ids={chosen}: set --nproc_per_node to the number of GPUs to use; to run "
            "on the CPU, set CUDA_VISIBLE_DEVICES= and 'ddp.device_ids=[]'"
        )
    return torch.device("cuda", chosen[ddp.local_rank])


def run(program: Callable[[Distributed], None], config: DDPConfig) -> int:
    """Calls `program` with this process's `Distributed`; returns the exit status.

    An exception on any rank ends the job: with several ranks, the process of the failed rank must
    exit with this status. A single process is left as it was.
    """
    ddp = Distributed(config)
    try:
        program(setup(ddp))
        ddp.close()
        return 0
    except BaseException as error:  # even SystemExit, because the other ranks would hang
        try:
            return ddp.report_failure(error)
        finally:
            if ddp.world_size == 1:
                ddp.close()
            else:
                # Keeps the objects of DDP alive, because freeing them can hang.
                sys.last_value = error


def library_versions() -> dict[str, str]:
    """Returns the versions that must be the same on all ranks."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip,
    }


def describe(ddp: Distributed) -> str:
    """Returns one line for each rank, and warnings about this rank's machine; a collective."""
    device = str(ddp.device)
    if ddp.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ddp.device)
        device += f" ({torch.cuda.get_device_name(ddp.device)}, {free / 2**30:.1f} GB free)"
    row = {
        "rank": ddp.rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "device": device,
        "threads": ddp.threads,
        **library_versions(),
    }
    lines = ddp.gather(", ".join(f"{name} {value}" for name, value in row.items()))
    threads = optional("ddp_threads")
    if ddp.device.type == "cpu" and threads is not None:
        lines += threads.notes_on_devices()
    return "\n".join(lines)
