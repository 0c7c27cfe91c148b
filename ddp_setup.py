"""The process group, the device of this process, DDP wrapping, and agreement between ranks.

`setup` gives the same small object for one process and for many, so that nothing else asks which it is. Run as a script
it shows what each rank got and whether the ranks can add up a number:

    torchrun --standalone --nproc_per_node=4 ddp_setup.py
"""

import contextlib
import gc
import itertools
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("ddp_setup")


class SetupError(RuntimeError):
    """This launch cannot work, as all ranks agree; the message is one sentence for the user."""


class RunError(RuntimeError):
    """The run cannot go on; the message is one sentence for the user."""


@dataclass(frozen=True)
class DDPConfig:
    device_ids: tuple[int, ...] = ()
    startup_timeout_s: float = 1800.0
    timeout_s: float = 300.0
    sync_batchnorm: bool = False
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float = 25.0

    def __post_init__(self):
        if len(set(self.device_ids)) < len(self.device_ids) or min(self.device_ids, default=0) < 0:
            raise ValueError(f"ddp.device_ids must name each GPU once, not {list(self.device_ids)}")
        if min(self.startup_timeout_s, self.timeout_s, self.bucket_cap_mb) <= 0:
            raise ValueError("ddp.startup_timeout_s, ddp.timeout_s and ddp.bucket_cap_mb must be over 0")


@dataclass(frozen=True)
class Distributed:
    """This process among the others. Without torchrun: rank 0 of 1, and no process group."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    launched: bool
    stop_request: "StopRequest | None" = None
    watchdog: "Watchdog | None" = None
    on_failure: list[Callable[[str], None]] = field(default_factory=list)  # called with the reason before a failed exit

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
        buffers = {} if config.broadcast_buffers else {"broadcast_buffers": False}  # torch 2.13 warns of the default
        return DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            **buffers,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            bucket_cap_mb=config.bucket_cap_mb,
        )

    def accumulating(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """The context of a micro-batch's forward and backward: only the last one of a step exchanges gradients."""
        return contextlib.nullcontext() if last or not self.launched else model.no_sync()

    def agree(self, *flags: int) -> list[int]:
        """The largest of each flag over all ranks, on every rank.

        Whatever makes ranks branch is decided by this one exchange. It runs on the CPU: no GPU is waited for.
        """
        if not self.launched:
            return list(flags)
        self.phase("agreement")
        votes = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return votes.tolist()

    def stopping(self, step: int) -> str:
        """Why all ranks must stop at `step`, or nothing: a signal to one of them, the file STOP, torchrun's end."""
        self.phase("agreement", step)
        (code,) = self.agree(self.stop_request.code() if self.stop_request else 0)
        return StopRequest.reason(code)

    @property
    def asked_to_stop(self) -> bool:
        """Whether `stopping` is going to say so: for leaving early what other ranks need not agree on."""
        return self.stop_request is not None and self.stop_request.code() > 0

    def phase(self, name: str, step: int | None = None) -> None:
        """What this rank begins or goes on to do, for the watchdog; the step stays as it is if not given."""
        if self.watchdog:
            self.watchdog.enter(name, step)

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
        """If the block raises one of `errors` on any rank, every rank raises it: a `RunError`, else a `SetupError`.

        Every rank must reach the block, and nothing inside it may wait for another rank.
        """
        problem, kind = None, SetupError
        try:
            yield
        except errors as error:
            problem, kind = str(error), RunError if isinstance(error, RunError) else SetupError
        self._refuse(problem, kind)

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
        self._refuse(problem)

    def close(self) -> None:
        """Only after success: destroying the group while another rank is in a collective makes both hang.

        The model that `wrap` gave must be out of scope.
        """
        if self.watchdog:
            self.watchdog.ended.set()
            self.watchdog.join()
        if self.launched:
            # A DDP module (in a reference cycle, often) frees a group that it outlives without letting go of the GIL,
            # and so may wait for ever for a gloo thread that needs it.
            gc.collect()
            dist.destroy_process_group()

    def crash(self, error: BaseException) -> NoReturn:
        """End this process with status 1; of all ranks, the one that failed first says why, with its traceback."""
        reason, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        waited = isinstance(error, dist.DistError) or "/gloo/" in reason
        if isinstance(error, RunError):
            reason = str(error)
        elif waited:
            reason = f"another rank was killed or cannot be reached ({reason.splitlines()[0]})"
        reason = f"rank {self.rank}: {reason}"
        first = self.watchdog.claim("failure", reason) if self.watchdog else reason
        if first == reason:
            bug = not waited and not isinstance(error, RunError)  # other traces explain nothing
            print(f"{trace if bug else ''}error: {reason}", file=sys.stderr, flush=True)
            if bug:
                get_error_handler().record_exception(error)
        log.error(f"{trace}{reason}")
        self.end(first)

    def end(self, reason: str) -> NoReturn:
        """Tell `on_failure`, and end this process at once: interpreter shutdown can wait for ever for other ranks."""
        for hook in self.on_failure:
            hook(reason)
        sys.stdout.flush()
        os._exit(1)

    def _refuse(self, problem: str | None, kind: type[Exception] = SetupError) -> None:
        """Raise the first rank's problem on every rank, if any has one."""
        if self.agree(problem is not None) == [1]:
            problem, kind = next(found for found in self.gather((problem, kind)) if found[0] is not None)
            raise kind(problem)


class StopRequest:
    """Whether this process was asked to stop: by a signal, by a file, or by the end of the torchrun that started it."""

    FILE, ORPHANED = 1, 2  # and 100 + the number of a signal
    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self, file: Path):
        self.file = file
        self.signal, self.pid, self.parent = 0, os.getpid(), os.getppid()
        self.next_look, self.found = 0.0, False
        for number in self.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup ignores
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self.pid:  # a loader process has this handler too: its parent decides when it ends
            return
        if number == self.signal == signal.SIGINT:
            os._exit(128 + number)  # Ctrl-C twice: at once
        self.signal = number

    def code(self) -> int:
        """0 for no request. The file is looked for once a second."""
        if self.signal:
            return 100 + self.signal
        if dist.is_torchelastic_launched() and os.getppid() != self.parent:
            return self.ORPHANED
        if time.monotonic() > self.next_look:
            self.found = self.found or self.file.exists()  # asked is asked, also if somebody removes it
            self.next_look = time.monotonic() + 1
        return self.FILE if self.found else 0

    @classmethod
    def reason(cls, code: int) -> str:
        words = {0: "", cls.FILE: "the file STOP", cls.ORPHANED: "the end of torchrun"}
        return words[code] if code in words else signal.Signals(code - 100).name


class Watchdog(threading.Thread):
    """Ends the job, in words, when a rank makes no progress for too long.

    Each rank's thread tells the store that torchrun started with how far its rank is. The first one whose own rank is
    idle for too long, and not for a slower one that moves, asks for the stacks of all and says who is behind or silent.
    """

    def __init__(self, env: Distributed, config: DDPConfig, store: dist.Store):
        super().__init__(name="watchdog", daemon=True)
        self.store = store.clone()  # a connection of its own: a wait on the other one must not block it
        self.env, self.config = env, config
        self.limit = config.startup_timeout_s
        self.period = min(2.0, min(config.timeout_s, config.startup_timeout_s) / 8)
        self.ended = threading.Event()
        self.place = (0, "start", 0, time.monotonic())  # how many phases before, phase, step, since
        self.heard: dict[int, tuple[list, float]] = {}  # of each rank: its last words, and when they came

    def enter(self, phase: str, step: int | None) -> None:
        count, before, step_before, _ = self.place
        step = step_before if step is None else step
        # Every rank goes through the same phases; only the batches of an evaluation differ in number.
        count += (phase, step) != ("evaluation", step_before) or before != "evaluation"
        if step > step_before > 0:
            self.limit = self.config.timeout_s
        self.place = (count, phase, step, time.monotonic())

    def claim(self, key: str, value: str) -> str:
        """The value of the first rank that claimed `key`."""
        try:
            return self.store.compare_set(key, "", value).decode()
        except dist.DistError:  # torchrun is gone
            return value

    def run(self) -> None:
        for beat in itertools.count():
            count, phase, step, since = self.place
            idle = time.monotonic() - since
            try:
                self.store.set(f"words/{self.env.rank}", json.dumps([count, phase, step, idle, beat]))
                if idle > self.limit / 2:
                    self._listen()
                if (idle > self.limit and self._stuck()) or self.store.check(["stuck"]):
                    self._end_job()
            except dist.DistError:
                if idle > self.limit:
                    self.env.end(f"rank {self.env.rank} has made no progress for {idle:.0f} s, and torchrun is gone")
            if self.ended.wait(self.period):
                return

    def _listen(self) -> None:
        for rank in range(self.env.world_size):
            if self.store.check([f"words/{rank}"]):
                words = json.loads(self.store.get(f"words/{rank}"))
                if rank not in self.heard or self.heard[rank][0] != words:
                    self.heard[rank] = (words, time.monotonic())

    def _stuck(self) -> bool:
        """Whether all that are furthest behind have been idle for too long: a slow one that moves is waited for."""
        least, now = min(words[0] for words, _ in self.heard.values()), time.monotonic()
        return all(
            idle + now - when > self.limit for (count, _, _, idle, _), when in self.heard.values() if count == least
        )

    def _end_job(self) -> None:
        rank, world = self.env.rank, range(self.env.world_size)
        frame = sys._current_frames().get(threading.main_thread().ident)
        stack = "".join(traceback.format_stack(frame)).rstrip()
        self.store.set(f"stack/{rank}", stack)
        log.error(f"rank {rank} is here:\n{stack}")
        if self.claim("stuck", str(rank)) == str(rank):
            time.sleep(2 * self.period + 0.5)  # the others answer
            self._listen()
            stacks = {r: self.store.get(f"stack/{r}").decode() for r in world if self.store.check([f"stack/{r}"])}
            verdict, lines = self._report(silent=[r for r in world if r not in stacks])
            told = [f"error: {verdict}", *lines, *(f"rank {r} is here:\n{stacks[r]}" for r in stacks)]
            print("\n".join(told), file=sys.stderr, flush=True)
            log.error("\n".join(told[: 1 + len(lines)]))
            self.store.set("verdict", verdict)
        self.store.wait(["verdict"], timedelta(seconds=30))
        self.env.end(self.store.get("verdict").decode())

    def _report(self, silent: list[int]) -> tuple[str, list[str]]:
        """What is wrong, in a sentence, and a line for each rank."""
        lines = {}
        for rank, ((_, phase, step, idle, _), when) in self.heard.items():
            ago = time.monotonic() - when
            lines[rank] = f"rank {rank}: in {phase} of step {step} for {idle + ago:.0f} s"
            if rank in silent:
                lines[rank] = (
                    f"rank {rank}: not heard of for {ago:.0f} s (frozen, or its machine is gone), "
                    f"last in {phase} of step {step}"
                )
        least = min(words[0] for words, _ in self.heard.values())
        behind = silent or [rank for rank, (words, _) in self.heard.items() if words[0] == least]
        culprits = [lines.get(rank, f"rank {rank}: never heard of") for rank in behind]
        if len(behind) == self.env.world_size:
            culprits = ["all ranks are in the same phase"]
        verdict = f"no progress for {self.limit:.0f} s (ddp.timeout_s and ddp.startup_timeout_s): {'; '.join(culprits)}"
        return verdict, [line for rank, line in sorted(lines.items()) if rank not in behind]


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
        # Longer than the watchdog waits, which knows more.
        patience = timedelta(seconds=60 + max(config.startup_timeout_s, config.timeout_s))
        store, _, _ = next(dist.rendezvous("env://", timeout=patience))
        # torchrun keeps its store when it restarts the workers, which would wait for the addresses of the dead ones.
        store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
    env = Distributed(rank, local_rank, world_size, local_world_size, device, launched)
    # A rank without a device leaves only now, together with all others, so that none waits for it.
    env._refuse(problem)
    if launched:
        get_error_handler().initialize()
        env = replace(env, watchdog=Watchdog(env, config, store))
        env.watchdog.start()
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


def leave(message: str, env: Distributed | None = None) -> NoReturn:
    """Say `message` once and end this process with status 2; every rank must call it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        dist.barrier()
    for hook in env.on_failure if env else ():
        hook(message)
    # At once: torchrun kills the slower ones as soon as one is gone, and interpreter shutdown is slow.
    sys.stdout.flush()
    os._exit(2)


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
