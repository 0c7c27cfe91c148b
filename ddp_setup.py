"""The process group, the device of this process, DDP wrapping, and agreement between ranks.

`setup` gives the same small object for one process and for many, so that nothing else asks which it is. Run as a script
it is the preflight check of the machines, in seconds:

    torchrun --standalone --nproc_per_node=4 ddp_setup.py
"""

import contextlib
import gc
import itertools
import json
import logging
import mmap
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("ddp_setup")

PARENT = os.getppid()  # torchrun, if it started this process
PATIENCE = timedelta(days=7)  # of the process group: the watchdog knows better what is a hang
FAILED_S = 5.0  # seconds that a rank gets to notice by itself that another one has failed
REACH_S = 20.0  # seconds until a rank gives up on reaching the store, which torchrun opens before it starts ranks
ANSWER_S = 300.0  # and on its answer: torch asks for the name of each address, 10 s a time if no name server answers


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
    store: dist.Store | None = None  # of this launch; it outlives torchrun's restarts
    stop_request: "StopRequest | None" = None
    watchdog: "Watchdog | None" = None
    on_phase: list[Callable[[str, int | None], None]] = field(default_factory=list)  # called as `phase` is
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
        """What this rank begins or goes on to do, for watchdog and profile; the step stays as it is if not given."""
        for listener in self.on_phase:
            listener(name, step)

    def note(self, key: str) -> None:
        """Remember `key` for this launch, through restarts of its workers by torchrun --max-restarts."""
        if self.store:
            self.store.set(key, "noted")

    def noted(self, key: str) -> bool:
        return self.store is not None and self.store.check([key])

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
        plain = waited or isinstance(error, RunError | KeyboardInterrupt)  # the trace explains nothing
        if isinstance(error, RunError):
            reason = str(error)
        elif isinstance(error, KeyboardInterrupt):
            reason = "interrupted"
        elif waited:
            reason = f"another rank was killed or cannot be reached ({reason.splitlines()[0]})"
        reason = f"rank {self.rank}: {reason}"
        first = self.watchdog.claim("failure", reason) if self.watchdog else reason
        log.error(f"{trace}{reason}")
        if first == reason:
            say_error(f"{'' if plain else trace}error: {reason}")
            if not plain:
                get_error_handler().record_exception(error)
        self.end(first)

    def end(self, reason: str) -> NoReturn:
        """Tell `on_failure`, and end this process at once: interpreter shutdown can wait for ever for other ranks."""
        for hook in self.on_failure:
            hook(reason)
        leave_process(1)

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
        self.signal, self.pid = 0, os.getpid()
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
        if dist.is_torchelastic_launched() and os.getppid() != PARENT:
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
        self.ended, self.failed_for = threading.Event(), 0.0
        self.asked_store = time.monotonic()  # when it last began a round of questions
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
        threading.Thread(target=self._guard, name="watchdog guard", daemon=True).start()
        woke = time.monotonic()
        for beat in itertools.count():
            self.asked_store = time.monotonic()
            late, woke = time.monotonic() - woke - self.period, time.monotonic()
            if late > self.limit / 4:  # this process was suspended, and perhaps the others: what is known is old
                self.heard.clear()
                self.place = (*self.place[:3], woke)
            count, phase, step, since = self.place
            idle = time.monotonic() - since
            try:
                self.store.set(f"words/{self.env.rank}", json.dumps([count, phase, step, idle, beat]))
                if idle > self.limit / 2:
                    self._listen()
                if (idle > self.limit and self._stuck()) or self.store.check(["stuck"]):
                    self._end_job()
                if self.store.check(["failure"]):
                    self.failed_for += self.period
                    if self.failed_for > FAILED_S:  # in a phase in which it waits for nobody
                        self.env.end(self.store.get("failure").decode())
            except dist.DistError:  # torchrun is gone
                if count == 0:
                    say_error(f"error: rank {self.env.rank}: torchrun has gone before all ranks had met")
                    self.env.end("torchrun is gone")
                if idle > self.limit:
                    self.env.end(f"rank {self.env.rank} has made no progress for {idle:.0f} s, and torchrun is gone")
            if self.ended.wait(self.period):
                return

    def _guard(self) -> None:
        """The store of a machine that is cut off neither answers nor fails: a question to it never ends."""
        strikes = 0  # two, because after a suspension of the job the watchdog itself needs a moment
        while not self.ended.wait(self.period):
            now = time.monotonic()
            silent = min(now - self.place[3], now - self.asked_store) > self.limit
            strikes = strikes + 1 if silent else 0
            if strikes == 2:
                reason = (
                    f"rank {self.env.rank} has made no progress for {now - self.place[3]:.0f} s (ddp.timeout_s and "
                    "ddp.startup_timeout_s), and torchrun's store does not answer: its machine is gone or cut off"
                )
                say_error(f"error: {reason}")
                self.env.end(reason)

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
            say_error("\n".join(told))
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
        SetupError: if the ranks cannot meet; and on every rank, if any rank has no device of its own.
    """
    launched = "WORLD_SIZE" in os.environ
    rank, local_rank, world_size, local_world_size = read_variables() if launched else (0, 0, 1, 1)
    torch.set_num_threads(cpu_threads(local_world_size))
    device, problem = choose_device(local_rank, local_world_size, config.device_ids)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    env = Distributed(rank, local_rank, world_size, local_world_size, device, launched)
    if launched:
        store = meet(env, config)
        env = replace(env, store=store)
        if agent_store():
            # torchrun keeps this store when it restarts the workers, who would wait for the addresses of the dead ones.
            store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        env = replace(env, watchdog=Watchdog(env, config, store))
        env.on_phase.append(env.watchdog.enter)
        env.watchdog.start()
        # gloo beside nccl: agreement between ranks stays off the GPU.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
        except RuntimeError as error:
            raise SetupError(
                f"rank {rank} on {platform.node()} cannot reach the other ranks ({str(error).splitlines()[0]}): let "
                "them connect to each other on all ports, or name the network interface in GLOO_SOCKET_IFNAME"
            ) from None
        get_error_handler().initialize()
    # A rank without a device leaves only now, together with all others, so that none waits for it.
    env._refuse(problem)
    env._refuse(shared_gpu(env.gather(gpu_id(device))))
    return env


def read_variables() -> tuple[int, int, int, int]:
    """RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, which torchrun sets.

    Raises:
        SetupError: one that is missing or impossible.
    """
    required = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    how = "start with torchrun, or unset WORLD_SIZE for a single process"
    if missing := [name for name in required if not os.environ.get(name)]:
        raise SetupError(f"WORLD_SIZE is set but {', '.join(missing)} is not: {how}")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    if wrong := [f"{name}={value}" for name, value in values.items() if not value.isdecimal()]:
        raise SetupError(f"{', '.join(wrong)} is not a whole number: {how}")
    rank, local_rank, world_size = (int(values[name]) for name in names[:3])
    local_world_size = int(values.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if not (local_rank <= rank < world_size and local_rank < local_world_size <= world_size):
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise SetupError(f"{shown} cannot be, ranks count from 0 and LOCAL_RANK on each machine: {how}")
    return rank, local_rank, world_size, local_world_size


def meet(env: Distributed, config: DDPConfig) -> dist.Store:
    """The store where all ranks meet, which torchrun or rank 0 keeps.

    A program that listens there and never answers ends this process, with status 2.

    Raises:
        SetupError: it cannot be reached.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    where = f"rank {env.rank} on {platform.node()} cannot reach MASTER_ADDR={address} MASTER_PORT={port}"
    serving = env.is_main and not agent_store()
    limit = config.startup_timeout_s if serving else min(ANSWER_S, config.startup_timeout_s)

    def give_up() -> None:
        say_error(f"error: {where} (it does not answer): look which program listens there")
        leave_process(2)

    silence = threading.Timer(limit + 2, give_up)  # of what listens and is no store, for which torch waits for ever
    silence.daemon = True
    try:
        if not serving:
            reach(address, port, min(REACH_S, config.startup_timeout_s))
        silence.start()
        # The one that serves waits here for the others.
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=limit)))
    except (OSError, dist.DistError, OverflowError, ValueError) as error:
        raise SetupError(
            f"{where} ({str(error).splitlines()[0]}): set the address of rank 0, check that rank 0 runs and listens "
            "there, and that no firewall stands between"
        ) from None
    finally:
        silence.cancel()
    store.set_timeout(PATIENCE)
    return store


def agent_store() -> bool:
    """Whether torchrun keeps the store; otherwise rank 0 does, for as long as it lives."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def reach(address: str, port: int, limit_s: float) -> None:
    """Return once something listens there; torch's own store tries for longer and fails with pages of frames."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(1.0, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


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
    if visible == 1 and local_world_size > 1 and not device_ids:
        return torch.device("cuda", 0), None  # a scheduler may show each process a GPU of its own: see shared_gpu
    chosen = device_ids or tuple(range(visible))
    if local_world_size > len(chosen):
        return cpu, (
            f"{local_world_size} processes but {len(chosen)} GPUs to use {where}: "
            f"set --nproc_per_node to {len(chosen)} or less, or CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return torch.device("cuda", chosen[local_rank]), None


def gpu_id(device: torch.device) -> str:
    """What no other GPU in the world has; nothing for the CPU, which processes may share."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def shared_gpu(gpus: list[str]) -> str | None:
    """What is wrong if two ranks have the same GPU, which NCCL refuses or hangs on."""
    for gpu in set(gpus) - {""}:
        ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(ranks) > 1:
            return (
                f"ranks {', '.join(map(str, ranks))} share one GPU ({gpu}): set --nproc_per_node to the number of "
                "GPUs, let CUDA_VISIBLE_DEVICES show each process its own or all, or set it empty for the CPU"
            )
    return None


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
    return max(1, count_cores() // local_world_size)


def count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave(message: str, env: Distributed | None = None) -> NoReturn:
    """Say `message` once and end this process with status 2; every rank must call it, once there is a group."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        say_error(f"error: {message}")
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a rank may be dead
            dist.barrier()
    for hook in env.on_failure if env else ():
        hook(message)
    leave_process(2)


def say_error(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be reading any more
        print(text, file=sys.stderr, flush=True)


def leave_process(status: int) -> NoReturn:
    """At once: torchrun kills the slower ones as soon as one is gone, and interpreter shutdown is slow, or waits."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


def describe(env: Distributed) -> list[str]:
    """A table of where each rank runs and with what, as lines; the same on every rank."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = env.gather(
        {
            "rank": env.rank,
            "host": platform.node(),
            "pid": os.getpid(),
            "LOCAL_RANK": env.local_rank,
            "device": str(env.device),
            "name": torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else platform.machine(),
            "GPUs": f"{visible} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all') or 'none'}",
            "backend": dist.get_backend_config() if env.launched else "none",
            "threads": torch.get_num_threads(),
            "free GB": f"{free_bytes(env.device) / 2**30:.1f}",
            **library_versions(),
        }
    )
    cells = [list(rows[0]), *(list(map(str, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def library_versions() -> dict[str, str]:
    """Of what must be the same on all ranks."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": nccl,
    }


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def unread_variables() -> list[str]:
    """Set variables that look like those of NCCL, gloo or torch.distributed, and that no loaded library mentions."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_")
    unread = {name for name in os.environ if name.startswith(prefixes)}
    maps = Path("/proc/self/maps")
    if not unread or not maps.exists():
        return []
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if line.endswith(".so") or ".so." in line}
    for path in libraries:
        if any(word in Path(path).name for word in ("torch", "c10", "nccl", "gloo")):
            with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                unread = {name for name in unread if content.find(f"\0{name}\0".encode()) < 0}
    return sorted(unread)


def time_collectives(env: Distributed, sizes: tuple[int, ...], limit_s: float = 0.5) -> list[dict[str, float]]:
    """Seconds that an all-reduce and a broadcast of so many bytes take, the median over repeats of the slowest rank.

    Sizes that would take longer than `limit_s`, by those before, are left out.
    """
    rows: list[dict[str, float]] = []
    for size in sizes:
        if rows and rows[-1]["all_reduce"] * size / rows[-1]["bytes"] > limit_s:
            break
        tensor = torch.zeros(size // 4, device=env.device)
        row: dict[str, float] = {"bytes": size}
        for name, collective in (("all_reduce", dist.all_reduce), ("broadcast", partial(dist.broadcast, src=0))):
            times = []
            for _ in range(1 + max(2, min(20, 10_000_000 // size))):
                dist.barrier()
                start = time.perf_counter()
                collective(tensor)
                if env.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            row[name] = max(env.gather(statistics.median(times[1:])))
        rows.append(row)
    return rows


def clock_offsets(env: Distributed) -> list[float]:
    """Seconds that each rank's clock is ahead of rank 0's, as far as a barrier can tell."""
    readings = []
    for _ in range(5):
        dist.barrier()
        readings.append(env.gather(time.time()))
    return [min((reading[rank] - reading[0] for reading in readings), key=abs) for rank in range(env.world_size)]


def compute_seconds(device: torch.device) -> float:
    """The best time of a matrix product of fixed size."""
    matrix = torch.randn(1024, 1024, device=device)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()
        times.append(time.perf_counter() - start)
    return min(times)


def preflight(env: Distributed) -> bool:
    """Print who runs where, what works between the ranks and how fast, and advice; whether all is well."""
    passed, cpu = True, env.device.type == "cpu"

    def say(line: str) -> None:
        if env.is_main:
            print(line, flush=True)

    def check(name: str, finding: str, problem: str | None, fatal: bool = True) -> None:
        nonlocal passed
        passed &= not (problem and fatal)
        say(f"{('WRONG' if fatal else 'NOTE') if problem else 'OK':7s}{name:13s}{problem or finding}")

    say("\n".join([*describe(env), ""]))
    check("variables", "as torchrun sets them" if env.launched else "none of torchrun: a single process", None)
    check("devices", "the CPU, no GPU is visible" if cpu else "each rank has a GPU of its own", None)
    check("versions", "the same on all ranks", different_versions(env))
    unread = sorted({name for names in env.gather(unread_variables()) for name in names})
    check("environment", "no variable without an effect", unread_note(unread), fatal=False)
    times = [1e3 * seconds for seconds in env.gather(compute_seconds(env.device))]
    usual, slowest = statistics.median_low(times), max(range(env.world_size), key=times.__getitem__)
    slow = (
        f"rank {slowest} takes {times[slowest]:.1f} ms for a matrix product and others {usual:.1f}, and all wait for "
        "it: look what else runs there, or leave that machine out"
    )
    found = f"a matrix product takes {min(times):.1f} to {max(times):.1f} ms"
    check("speed", found, slow if times[slowest] > 1.5 * usual else None, fatal=False)
    if not env.launched:
        return passed

    total = env.sum(torch.full((1000,), env.rank + 1.0, device=env.device))
    expected = env.world_size * (env.world_size + 1) / 2
    wrong = f"the sum over ranks is {total.min().item()} to {total.max().item()}, not {expected}: do not train here"
    check("all-reduce", "adds up", None if (total == expected).all() else wrong)
    offsets = clock_offsets(env)
    off = max(range(env.world_size), key=lambda rank: abs(offsets[rank]))
    skew = f"that of rank {off} is {offsets[off]:+.1f} s off rank 0's, which confuses logs: set it by NTP"
    check("clocks", f"within {1e3 * abs(offsets[off]):.1f} ms", skew if abs(offsets[off]) > 1 else None, fatal=False)

    say("\n      bytes            all-reduce             broadcast")
    rows = time_collectives(env, tuple(10**i for i in range(3, 9)))
    for row in rows:
        parts = [f"{1e3 * row[n]:9.2f} ms {row['bytes'] / row[n] / 1e9:5.2f} GB/s" for n in ("all_reduce", "broadcast")]
        say(f"{row['bytes']:11,d} {'  '.join(parts)}")
    latency, rate = rows[0]["all_reduce"], rows[-1]["bytes"] / rows[-1]["all_reduce"] / 1e9
    say(f"all-reduce: latency {1e3 * latency:.2f} ms, {rate:.2f} GB/s")
    advice = []
    if cpu and env.local_world_size > (cores := count_cores()):
        advice.append(f"{env.local_world_size} processes share {cores} cores: start no more than {cores}.")
    elif latency > 5e-3:
        advice.append(
            f"No all-reduce takes less than {1e3 * latency:.0f} ms: exchange less often with optim.accumulate."
        )
    if not cpu and rate < 1:
        advice.append(f"{rate:.2f} GB/s is plain Ethernet: name the fast network in NCCL_SOCKET_IFNAME or NCCL_IB_HCA.")
    for sentence in advice:
        say(f"advice: {sentence}")
    return passed


def different_versions(env: Distributed) -> str | None:
    try:
        env.check_equal(library_versions())
    except SetupError as error:
        return f"{error}: install the same versions everywhere"
    return None


def unread_note(names: list[str]) -> str | None:
    if not names:
        return None
    return f"nothing in this PyTorch reads {', '.join(names)}: unset it, and see ddp.timeout_s for the timeout"


def main() -> None:
    env = None
    try:
        env = setup(DDPConfig(startup_timeout_s=30.0))
        passed = preflight(env)
        env.close()
    except SetupError as error:
        leave(str(error), env)
    except BaseException as error:
        if env is None:
            raise
        env.crash(error)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
