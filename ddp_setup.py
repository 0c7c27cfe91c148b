"""The process group, the device of this process, what DDP is given, and how ranks agree.

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

from ddp_ends import Heartbeat, StopRequest, explain_failure, log_and_print, tell_torchrun
from errors import UserError, reason_of
from parts import optional

log = logging.getLogger("ddp_setup")
log.addHandler(logging.NullHandler())  # or the preflight prints errors twice

group_numbers = itertools.count()  # of the process groups that this process joins
NO_COLLECTIVE = "a collective within sync_errors would hang if a rank has failed: move it out"
AGREEMENT_S = 0.5  # seconds from one agreement of the ranks on whether to stop to the next


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
    """Rank, device and collectives of this process; without torchrun, it is rank 0 of 1."""

    def __init__(self, config: DDPConfig):
        self.config = config
        self.is_distributed = "WORLD_SIZE" in os.environ or "RANK" in os.environ
        self.rank = self.local_rank = 0
        self.world_size = self.local_world_size = 1
        self.device = torch.device("cpu")
        self.threads = ""  # of this process, and why so many
        self.store: dist.Store | None = None  # torchrun's, or one of this process
        self.stop: StopRequest | None = None
        self.on_failure: Callable[[str], None] | None = None  # called with the reason on exit
        self.syncs_errors = False  # whether this rank is in a block of `sync_errors`
        self.heartbeat = Heartbeat()
        self.last_phase = ""  # that was entered
        self.agreed_at = 0.0  # when ranks last agreed whether to stop
        self.steps_since = 0
        self.steps_between = 1  # that and the next time, as they agreed
        self.limit_s = config.startup_timeout_s  # without progress, which a watchdog ends
        self.seconds = defaultdict(float)  # time spent in each phase
        self.command = sys.argv  # the words of the command line
        self.cleanup = contextlib.ExitStack()  # what `close` closes, the last one first

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
        """What `DistributedDataParallel` takes under this name: the GPU of this rank, or None."""
        return [self.device.index] if self.device.type == "cuda" else None

    def prepare_for_ddp(self, model: nn.Module) -> nn.Module:
        """Returns the model that `DistributedDataParallel` wraps, which must be on its device.

        BatchNorm layers become SyncBatchNorm, if asked for, or `UserError` on the CPU. Constant
        buffers are not broadcast.
        """
        if self.config.sync_batchnorm:
            if self.device.type == "cpu":
                raise UserError("ddp.sync_batchnorm=true needs GPUs: set it to false")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
        dist.set_debug_level_from_env()  # so that DDP names parameters without a gradient
        buffers = [name for name, _ in model.named_buffers()]
        has_statistics = any(name.endswith("running_mean") for name in buffers)
        if not has_statistics:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
        return model

    def stop_on_request(self, file: Path) -> None:
        """Makes signals and the file STOP ends of training, until this is closed."""
        self.stop = StopRequest(file)
        self.cleanup.callback(self.stop.close)

    def step_done(self, step: int) -> None:
        """Records that `step` steps are done."""
        self.heartbeat = self.heartbeat._replace(step=step, changes=0, phase="other work")
        self.steps_since += 1
        self.limit_s = self.config.timeout_s  # only the first one loads libraries

    def stop_reason(self, at_once: bool = True) -> str:
        """Returns the reason why all ranks must stop, "" if they need not.

        Ranks agree `at_once` or about every `AGREEMENT_S`; in between, this returns "". Each rank
        proposes the steps until the next time by its own speed, at most twice the last, as a host
        ahead of its device takes steps for faster than they are; the smallest counts. It travels on
        the device's backend: gloo would cost a thousand ranks tens of milliseconds.
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
        """Returns the picklable `value` of the rank `source` on every rank."""
        assert not self.syncs_errors, NO_COLLECTIVE
        values = [value]
        if self.is_distributed:
            dist.broadcast_object_list(values, source)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable `value` of every rank, in their order, on every rank."""
        assert not self.syncs_errors, NO_COLLECTIVE
        values = [value] * self.world_size
        if self.is_distributed:
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def sync_errors(self, phase: str = "set-up") -> Iterator[None]:
        """If the block raises `UserError` on any rank, every rank raises that of the lowest one.

        An `OSError` that names a file becomes one. The block must hold no collective, nor another
        such block, or an `AssertionError` ends it.
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
        most = int(self._reduce(ranks_left, dist.ReduceOp.MAX))  # on the CPU: there may be no GPU
        if most:
            raise self.broadcast(problem, self.world_size - most)

    def check_equal(self, values: dict[str, Any]) -> None:
        """Raises `UserError` on every rank, naming ranks and key, if two have other values of it.

        Not all need have a key: a rank that reads a cache loads fewer modules.
        """
        first = {}  # the first rank that has the key, and its value
        for rank, others in enumerate(self.gather(values)):
            for name, value in others.items():
                first_rank, first_value = first.setdefault(name, (rank, value))
                if value != first_value:
                    raise UserError(
                        f"{name} differs between ranks: {value} on rank {rank}, "
                        f"{first_value} on rank {first_rank}"
                    )

    def close(self) -> None:
        """Leaves the process as it was: ends process group, threads, files and handlers.

        Several ranks do so only after success: one of them in a collective would hang.
        """
        self.on_failure = None  # it may hold a DDP module, which must not outlive the group
        self.cleanup.close()

    def record_end_reason(self, reason: str) -> tuple[str, bool]:
        """Records why the job ends, if no rank has; returns the reason, and whether it is ours."""
        with contextlib.suppress(dist.DistError):  # torchrun is gone
            if self.store:
                recorded = self.store.compare_set("end", "", f"{self.rank} {reason}").decode()
                rank, _, first = recorded.partition(" ")
                return first, int(rank) == self.rank
        return reason, True

    def fail(self, error: BaseException) -> int:
        """Reports that the job fails; returns the exit status: of a `UserError` its own, else 1.

        Only the first rank to fail prints, of other errors with a traceback.
        """
        trace, reason = explain_failure(error, self.rank)
        first, is_first = self.record_end_reason(reason)
        report = log_and_print if is_first else log.error
        report(f"{trace}error: {reason}")
        self.record_failure(first, trace if is_first else "")
        return getattr(error, "status", 1)

    def record_failure(self, reason: str, trace: str = "") -> None:
        """Tells torchrun and the hook `on_failure`, if there are any, why the job ends."""
        if self.is_distributed:
            tell_torchrun(f"{trace}error: {reason}")
        if self.on_failure:
            with contextlib.suppress(UserError):  # the disk may be full
                self.on_failure(reason)


# ---- Set-up --------------------------------------------------------------------------------------
def setup(ddp: Distributed) -> Distributed:
    """Joins the process group, selects this rank's device and returns `ddp`; raises `UserError`."""
    if ddp.is_distributed:
        tell_torchrun(
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
    with ddp.sync_errors():  # if one rank finds no device, all exit rather than wait for it
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
    ddp.check_equal({"device": ddp.device.type})  # ranks of two kinds would wait for each other
    return ddp


def set_threads(local_world_size: int) -> str:
    """Sets how many threads torch uses in this process; returns the number and the reason."""
    # Of several ranks, torchrun sets this to 1 if the user has not.
    if os.environ.get("OMP_NUM_THREADS"):
        return f"{torch.get_num_threads()} (OMP_NUM_THREADS)"
    threads = optional("ddp_threads")
    if threads is None:
        return f"{torch.get_num_threads()} (chosen by torch)"
    num_threads, reason = threads.choose_threads(local_world_size)
    torch.set_num_threads(num_threads)
    return f"{num_threads} ({reason})"


def join_group(ddp: Distributed) -> None:
    startup_s = ddp.config.startup_timeout_s
    timeout = timedelta(seconds=startup_s + ddp.config.timeout_s)  # a watchdog is earlier
    # gloo as well as nccl, so that ranks can agree on errors without a GPU.
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    try:
        store = find_store(startup_s)
        store.set_timeout(timeout)
        # torchrun keeps its store across restarts, and across the groups of a process: without the
        # prefix, ranks would use addresses of dead ones.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        ddp.store = dist.PrefixStore(f"restart {restart}, group {next(group_numbers)}", store)
        watchdog = optional("ddp_watchdog")
        if watchdog is not None:  # or a hang ends by the timeout, which names no rank
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
    """Returns the store at MASTER_ADDR and MASTER_PORT, which rank 0 makes if there is no torchrun.

    Raises `futures.TimeoutError` if another program has the port, which may never answer.
    """
    # torchrun's store is there before its processes; else, rank 0 may start much later.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit_s = min(40.0 if is_there else 300.0, longest_s)
    rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=limit_s))
    thread = futures.ThreadPoolExecutor(1)
    store, _, _ = thread.submit(next, rendezvous).result(1.25 * limit_s)
    thread.shutdown()
    return store


def leave_group() -> None:
    gc.collect()  # a DDP module that outlives the group can deadlock with a gloo thread
    dist.destroy_process_group()


def choose_device(ddp: Distributed) -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none; raises `UserError` for too few GPUs."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = ddp.config.device_ids or list(range(visible))
    if not chosen:
        return torch.device("cpu")
    if visible == 1 and ddp.local_world_size > 1 and not ddp.config.device_ids:
        return torch.device("cuda", 0)  # a scheduler may expose a different GPU to each process
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

    An exception on any rank ends the job: a rank of several that has failed must end its process,
    with this status. One process alone is left as it was.
    """
    ddp = Distributed(config)
    try:
        program(setup(ddp))
        ddp.close()
        return 0
    except BaseException as error:  # even SystemExit: the other ranks would hang
        try:
            return ddp.fail(error)
        finally:
            if ddp.world_size == 1:
                ddp.close()
            else:
                sys.last_value = error  # or what DDP holds would be freed, which can hang


def library_versions() -> dict[str, str]:
    """Returns the versions that must be the same on all ranks."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip,
    }


def describe(ddp: Distributed) -> str:
    """Returns a line for each rank, and notes on this rank's machine; a collective."""
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
