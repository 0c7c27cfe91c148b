"""The run folder: lock, logs, checkpoints, metrics, status, curves and test.tsv.

Rank 0 writes all files except the logs and traces of the other ranks. docs/runs.md describes the
files.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ddp_setup import Distributed, describe, library_versions
from errors import RunError, UserError, reason_of
from metrics import first_metric
from parts import optional
from run_checkpoint import (
    Origin,
    TrainState,
    best_checkpoint,
    explain_write_errors,
    load_file,
    may_compare,
    read_checkpoint,
    save_atomically,
    write_atomically,
)

log = logging.getLogger("run_folder")


# Collects all warnings of this process in its `buffer`, for status.json.
warnings_so_far = BufferingHandler(capacity=sys.maxsize)
warnings_so_far.addFilter(lambda record: record.levelno == logging.WARNING)


@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    dir: str = field(default="runs", metadata={"path": True})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**32 - 1, "resume": "fixed"})
    deterministic: bool = False
    resume: str = field(default="auto", metadata={"path": True})
    init: str = field(default="", metadata={"path": True})

    def __post_init__(self):
        if self.init and self.resume != "auto":
            raise ValueError("run.init and run.resume cannot be combined: set only one of them")
        folder = Path(self.dir).name
        first, *further = self.name.split("/")
        is_wrong = {"", ".", ".."} & {first, *further} or (further and first == folder)
        if is_wrong or set("${") & set(self.name):  # $ and { would be expanded in run.init
            raise ValueError(
                f"run.name={self.name!r} must be a path relative to run.dir, such as a/b: leave "
                f"out '{folder}/', '.', '..', empty parts, '$' and '{{'"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = field(default=1000, metadata={"min": 1})
    keep_last: int = field(default=2, metadata={"min": 1})


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = field(default=10, metadata={"min": 1})
    profile_steps: int = field(default=0, metadata={"min": 0})


class RunFolder:
    """The files of a run.

    Call `resume`, which creates, locks and opens the files, before the methods that write.

    Args:
        config: the `config.Config` of the run.
        ddp: the ranks of the run.
        origin: the origin that checkpoints contain.
        rivals: names of the rivals. The curves show their metrics next to the model's.
    """

    def __init__(self, config: Any, ddp: Distributed, origin: Origin, rivals: Sequence[str] = ()):
        self.config = config
        self.ddp = ddp
        self.origin = origin
        self.rivals = rivals
        self.path = Path(config.run.dir, config.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.rows = []  # the rows of metrics.jsonl
        self.profiler = None
        self.loss_and_speed = ""  # a text about the last steps, for the progress bar

    # ---- Opening ---------------------------------------------------------------------------------
    def _lock(self) -> None:
        """Locks the folder, and raises `UserError` if another process locks it for 10 seconds.

        The wait is necessary because the ranks of a killed torchrun and their DataLoader workers
        need time to exit. The lock is a separate file, because users may move the logs.
        """
        self.lock = self.ddp.cleanup.enter_context((self.checkpoints / ".lock").open("a"))
        for _ in range(100):
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)
            except OSError as error:  # a file system without locks, such as Lustre without flock
                problem = f"cannot be locked ({reason_of(error)}): let no other process write it"
                log.warning(f"note      {self.lock.name} {problem}")
                return
        raise UserError(
            f"another process is training in {self.path}: wait for it, or set another run.name"
        )

    def _log_to_file(self) -> None:
        handler = logging.FileHandler(self.path / f"log.rank{self.ddp.rank}.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        self.ddp.cleanup.callback(handler.close)
        self.ddp.cleanup.callback(logging.getLogger().removeHandler, handler)

    def resume(self, state: TrainState, steps_per_epoch: int) -> None:
        """Locks the folder, restores the state of training, and opens the files. A collective.

        The state comes from the newest checkpoint in the folder. If the folder has no checkpoint,
        the state comes from the file run.resume. With run.resume=auto, there is no such file: the
        state stays as it is, except that run.init can initialise the parameters.

        Args:
            state: the state, which this method modifies.
            steps_per_epoch: the number of steps of an epoch.

        Raises:
            UserError: a file cannot be read or written, another process uses the folder, or the
                checkpoint belongs to a different run. Every rank raises this error.
        """
        checkpoint = None
        with self.ddp.sync_errors(), explain_write_errors(self.path, UserError):
            if self.ddp.rank == 0:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                self._lock()
                self._log_to_file()
                checkpoint = self.newest_checkpoint()
                init = self.config.run.init
                if checkpoint is not None:
                    self._check_is_same_run(checkpoint)
                elif init:  # later, DDP broadcasts the parameters to the other ranks
                    from run_transfer import take_parameters

                    take_parameters(state.model, read_checkpoint(init), self.origin)
        checkpoint = self.ddp.broadcast(checkpoint)
        if checkpoint is not None:
            state.load_state_dict(checkpoint, self.config.optim.precision)
        # The step and epoch of the newest checkpoint, from which a restart would resume.
        self.saved = {"step": state.step, "epoch": state.epoch}
        self.first_step = state.step  # the step from which this process started or resumed
        self.last_step = steps_per_epoch * self.config.optim.epochs  # the last step of the run
        self.started_at = time.perf_counter()
        changes = optional("run_changes")
        self.ddp.heartbeat = self.ddp.heartbeat._replace(step=state.step)
        ranks = describe(self.ddp)
        with self.ddp.sync_errors(), explain_write_errors(self.path, UserError):
            if self.ddp.rank != 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._log_to_file()
                return
            if state.step > 0 and changes is not None:
                changes.compare_steps(self, state, checkpoint, steps_per_epoch)
            self._start_files(state, ranks, steps_per_epoch)
            if state.best is not None:
                self._restore_best(checkpoint, state, steps_per_epoch)

    def _check_is_same_run(self, checkpoint: dict[str, Any]) -> None:
        """Raises `UserError` if the data or a fixed option has changed since a checkpoint."""
        file = checkpoint["file"]
        start = f"To start from its parameters, set run.init={file} and leave out run.resume"
        advice = f"set another run.name. {start}"
        if not may_compare(checkpoint["data"], self.origin.data):
            log.warning(
                f"note      {file} was written by an earlier version of the template, so it cannot "
                "be checked whether tables, split and code are still the same"
            )
        elif checkpoint["data"] != self.origin.data:
            raise UserError(f"{file} was trained on different data or a different split: {advice}")
        given = self.config.options()
        changed = self.config.changed_options(checkpoint["config"], "fixed")
        for key, earlier in changed.items():
            raise UserError(
                f"{file} was trained with {key}={earlier}, not {given[key]}: "
                f"restore that value, or {advice}"
            )

    def newest_checkpoint(self) -> dict[str, Any] | None:
        """Returns the entries of the checkpoint to resume from, or None to start a run.

        It is the newest checkpoint in the folder that can be read. If the folder has no
        checkpoint, it is the file run.resume. Raises `UserError` if the folder has checkpoints, but
        all of them are damaged, or if run.resume cannot be read.
        """
        resume = self.config.run.resume
        paths = [*self.step_files(), *self.checkpoints.glob("best.pt")]
        for path in paths:
            try:
                checkpoint = read_checkpoint(path)
            except UserError as error:
                log.warning(f"skipped a damaged checkpoint: {error}")
                continue
            if self.config.run.init or resume != "auto":
                ignored = "run.init and run.resume are ignored"
                log.info(f"note      {self.path} resumes from {path}: {ignored}")
            return checkpoint
        if paths:  # a run from the start would overwrite them
            problem = f"cannot read any of the checkpoints in {self.checkpoints}"
            raise UserError(f"{problem}: move them away, or set another run.name")
        return None if resume == "auto" else read_checkpoint(resume)

    def step_files(self) -> list[Path]:
        """Returns the paths of the step checkpoints, newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def _start_files(self, state: TrainState, ranks: str, steps_per_epoch: int) -> None:
        """Writes the configuration and the environment, and opens the metrics."""
        write_atomically(self.path / "config.yaml", [self.config.text()])
        self._add_environment(ranks)
        if not state.is_trained(self.config.optim, steps_per_epoch):
            # The run has finished before, with fewer epochs. Its test results are outdated.
            for name in ("test.tsv", "test.json"):
                (self.path / name).unlink(missing_ok=True)
        self._open_metrics(state)
        is_resumed = state.step > 0 or state.best is not None
        self.event("resumed" if is_resumed else "started", state)
        self.ddp.on_failure = lambda reason: self.event("failed", state, reason)
        log.info(ranks)
        start = f"resumed at step {state.step}" if is_resumed else "from the start"
        log.info(f"run       {self.path}, {start}")

    def _restore_best(
        self, checkpoint: dict[str, Any], state: TrainState, steps_per_epoch: int
    ) -> None:
        """Writes best.pt again if it is missing, damaged or from a different validation.

        The model is the best model in the state. The state of the optimiser is from the checkpoint
        from which the run resumes.
        """
        path = self.checkpoints / "best.pt"
        step = state.best["step"]
        with contextlib.suppress(Exception):  # reading a damaged file can raise any exception
            found = load_file(path, mmap=True)
            is_same = repr(found["best"]) == repr(state.best)  # nan differs from itself
            # An earlier version of the template computed a different hash of the same graph.
            is_same &= found.get("graph", "") == self.origin.graph
            if is_same and found["best_model"] is None:
                return
        saved = {name: value for name, value in checkpoint.items() if name != "file"}
        saved["graph"] = self.origin.graph
        best = best_checkpoint(saved, state)
        best |= {"step": step, "epoch": step // steps_per_epoch}
        # Without this checkpoint, the next start would resume from best.pt.
        if not self.step_files():
            save_atomically(self.checkpoints / f"step_{state.step:08d}.pt", saved)
        save_atomically(path, best)

    def _add_environment(self, ranks: str) -> None:
        """Adds this start to environment.txt, and logs versions that have changed."""
        path = self.path / "environment.txt"
        earlier = path.read_text("utf-8") if path.exists() else ""
        folder = shlex.quote(str(Path(__file__).resolve().parent))
        # If a git hook runs this process, these variables point to the repository of the hook.
        here = f"env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE git -C {folder}"
        commit = subprocess.getoutput(f"{here} describe --always --dirty --abbrev=40")
        packages = ("torch-geometric", "numpy", "pyyaml", "tqdm")
        versions = library_versions() | {name: version(name) for name in packages}
        lines = [f"command: {shlex.join([sys.executable, *self.ddp.command])}"]
        lines.append(f"git commit: {commit}")
        lines += [f"{name}: {number}" for name, number in versions.items()]
        this_start = "\n".join([*lines, ranks, "", ""])
        write_atomically(path, [earlier, this_start])
        changes = optional("run_changes")
        if changes is not None:
            changes.note_other_versions(earlier, this_start)

    def _open_metrics(self, state: TrainState) -> None:
        """Opens metrics.jsonl, and removes the rows of steps that the run will repeat."""
        path = self.path / "metrics.jsonl"
        for row in read_metrics(path) if path.exists() else []:
            is_past = row["kind"] != "test" and row.get("step", 0) <= state.step
            if row["kind"] == "val":
                is_past = state.best is not None and row["epoch"] <= state.epoch
            if is_past or row["kind"] == "event":
                self.rows.append(row)
        write_atomically(path, (json.dumps(row) + "\n" for row in self.rows))
        self.metrics = self.ddp.cleanup.enter_context(path.open("a"))

    # ---- Writing ---------------------------------------------------------------------------------
    def write(self, kind: str, state: TrainState, **values: Any) -> None:
        """Appends a row to metrics.jsonl on rank 0. After a validation, also draws the curves.

        Args:
            kind: the kind of the row: train, val, test, event or your own kind.
            state: the state, whose step and epoch the row contains.
            values: further entries of the row. Numbers that are not finite are written as null.
        """
        if self.ddp.rank != 0:
            return
        epoch = state.epoch + 1 if kind == "train" else state.epoch
        row = {"kind": kind, "step": state.step, "epoch": epoch, **values}
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = None
        self.rows.append(row)
        with explain_write_errors(self.path / "metrics.jsonl"):
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
            plots = optional("run_plots")
            if kind == "val" and plots is not None:
                curves = plots.curves_svg(self.rows, first_metric(), self.rivals)
                write_atomically(self.path / "curves.svg", [curves])

    def save(self, state: TrainState, is_best: bool = False) -> None:
        """Writes a checkpoint on rank 0, and deletes old ones. A collective.

        Args:
            state: the state to save.
            is_best: whether to write best.pt as well. In best.pt, `model` contains the parameters
                that were validated.

        Raises:
            RunError: a parameter is not finite, or a file cannot be written. Every rank raises this
                error.
        """
        if hasattr(state.optimizer, "consolidate_state_dict"):  # ZeRO
            state.optimizer.consolidate_state_dict()  # collects the shards of all ranks on rank 0
        with self.ddp.sync_errors(phase="save"):
            if self.ddp.rank != 0:
                return
            checkpoint = state.state_dict() | vars(self.origin)
            for name, tensor in checkpoint["model"].items():
                if not tensor.isfinite().all():
                    raise RunError(
                        f"{name} is not finite at step {state.step}, so no checkpoint was saved: "
                        "decrease optim.lr"
                    )
            path = self.checkpoints / f"step_{state.step:08d}.pt"
            with explain_write_errors(path):
                # The rows of metrics.jsonl must be on the disk before the checkpoint, because a
                # resumed run does not repeat them.
                os.fsync(self.metrics.fileno())
                # best.pt is written first. If the run is killed after that, it resumes from the
                # previous checkpoint, and writes both files again.
                if is_best:
                    best = best_checkpoint(checkpoint, state)
                    save_atomically(self.checkpoints / "best.pt", best)
                save_atomically(path, checkpoint)
                saved = [other for other in self.step_files() if other.name <= path.name]
                for other in saved[self.config.checkpoint.keep_last :]:
                    other.unlink()
            self.saved = {"step": state.step, "epoch": state.epoch}
            self.write_status("running")

    def event(self, event: str, state: TrainState, reason: str = "") -> None:
        """Records an event in status.json and metrics.jsonl.

        Args:
            event: one of started, resumed, stopped, failed and finished.
            state: the state, whose step and epoch are recorded in metrics.jsonl.
            reason: the reason why the run was stopped or failed.
        """
        self.write_status("running" if event in ("started", "resumed") else event, reason)
        values = {"event": event, "reason": reason, "time": time.time()}
        self.write("event", state, **values, world_size=self.ddp.world_size)

    def write_status(self, state: str, reason: str = "") -> None:
        """Writes status.json on rank 0.

        It contains the state, the step of the last checkpoint and all warnings so far.

        Args:
            state: one of running, stopped, failed and finished.
            reason: the reason why the run was stopped or failed.
        """
        if self.ddp.rank != 0:
            return
        texts = [record.getMessage() for record in warnings_so_far.buffer]
        warnings = list(dict.fromkeys(texts))  # repeated texts are written once
        row = {"state": state, **self.saved, "reason": reason, "warnings": warnings}
        with explain_write_errors(self.path / "status.json"):
            write_atomically(self.path / "status.json", [json.dumps(row), "\n"])

    def finish(self, state: TrainState, test: dict[str, Any], lines: Iterable[str]) -> None:
        """Writes test.tsv and the test metrics, and marks the run as finished. A collective.

        Args:
            state: the state of the finished run.
            test: the metrics of the test rows.
            lines: the lines of test.tsv.

        Raises:
            RunError: a file cannot be written. Every rank raises this error.
        """
        path = self.path / "test.tsv"
        with self.ddp.sync_errors(phase="save"), explain_write_errors(path):
            if self.ddp.rank == 0:
                write_atomically(path, lines)
        self.write("test", state, **test, best_step=state.best["step"])
        self.event("finished", state)
        model = f"model of step {state.best['step']}"
        if state.best["step"] == 0:
            model += ": validation never improved on the starting point"
        log.info(f"run       {self.path}, {model}")

    def stop(self, state: TrainState, reason: str) -> None:
        """Records that the run stopped on request, and removes the STOP file."""
        # Every rank removes the file, because ranks may have separate disks. On a shared disk,
        # another rank may already have removed it.
        (self.path / "STOP").unlink(missing_ok=True)
        self.event("stopped", state, reason)
        log.info(f"stopped   at step {state.step} ({reason}): the same command resumes the run")

    def progress(self, step: int) -> str:
        """Returns a text for the progress bar: the remaining time of the run, loss and speed.

        The remaining time is omitted before the first step, because it is not known then.
        """
        steps_done = step - self.first_step
        if steps_done == 0 or step == self.last_step:
            return self.loss_and_speed
        seconds = time.perf_counter() - self.started_at  # includes validations
        left = tqdm.format_interval(seconds / steps_done * (self.last_step - step))
        return f"run: {left} left  {self.loss_and_speed}".rstrip()

    # ---- Traces ----------------------------------------------------------------------------------
    def profile(self) -> contextlib.AbstractContextManager:
        """Returns a context manager that traces log.profile_steps steps after the first three.

        In the block, call `profile_step` after each step. Each rank writes its own trace.
        """
        num_steps = self.config.log.profile_steps
        if not num_steps:
            return contextlib.nullcontext()
        file = str(self.path / f"trace.rank{self.ddp.rank}.json")
        # The third step captures the CUDA graph of the optimiser. Tracing starts after it, because
        # before CUDA 12.6, a capture may crash while CUPTI is tracing.
        schedule = torch.profiler.schedule(wait=1, warmup=2, active=num_steps, repeat=1)
        self.profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda profiler: profiler.export_chrome_trace(file)
        )
        return self.profiler

    def profile_step(self) -> None:
        """Signals the end of a step to the profiler, if there is one."""
        if self.profiler is not None:
            self.profiler.step()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file metrics.jsonl; raises `UserError` if it cannot be read."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}") from None
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):  # skips a line that is incomplete after a kill
            rows.append(json.loads(line))
    return rows
