"""The run folder: lock, logs, checkpoints, metrics, status, curves and test.tsv.

Only rank 0 writes, except that each rank has its own log and trace. docs/runs.md describes the
files.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
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
    explain_write_errors,
    load_file,
    lock_file,
    read_checkpoint,
    save_atomically,
    write_atomically,
)

log = logging.getLogger("run_folder")


class Warnings(logging.Handler):
    """A logging handler that collects the texts of warnings, each text once."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = {}  # a dict used as an ordered set

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.texts[record.getMessage()] = None


warnings_so_far = Warnings()  # all warnings of this process


@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    dir: str = field(default="runs", metadata={"path": True})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**32 - 1, "resume": "fixed"})
    deterministic: bool = False
    resume: str = field(default="auto", metadata={"path": True})
    init: str = field(default="", metadata={"path": True})

    def __post_init__(self):
        folder = Path(self.dir).name
        first, *further = self.name.split("/")
        if {"", ".", ".."} & {first, *further} or (further and first == folder):
            raise ValueError(
                f"run.name={self.name!r} must be a path relative to run.dir, such as a/b; it must "
                f"not start with {folder} or contain empty parts, . or .."
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
    """The files of a run with a `config.Config`.

    `rivals` are the names of the predictions whose metrics are reported with the model's.
    """

    def __init__(self, config: Any, ddp: Distributed, origin: Origin, rivals: Sequence[str] = ()):
        self.config = config
        self.ddp = ddp
        self.origin = origin
        self.rivals = rivals
        self.path = Path(config.run.dir, config.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.saved = {"step": 0, "epoch": 0}  # the checkpoint that a restart would resume from
        self.rows = []  # the rows of metrics.jsonl
        self.profiler = None
        self.loss_and_speed = ""  # a text about the last steps
        self.first_step = 0  # the first step of this process, for its speed
        self.last_step = 0
        self.started_at = 0.0  # from `time.perf_counter`, in seconds

    # ---- Opening ---------------------------------------------------------------------------------
    @classmethod
    def open(cls, *arguments: Any) -> "RunFolder":
        """Creates and locks the folder, given the arguments of the class.

        Raises `UserError` on all ranks if the folder is not writable or in use.
        """
        folder = cls(*arguments)
        with folder.ddp.sync_errors():
            if folder.ddp.rank == 0:
                with explain_write_errors(folder.path, UserError):
                    folder.checkpoints.mkdir(parents=True, exist_ok=True)
                    folder._lock()
                    folder._log_to_file()
        return folder

    def _lock(self) -> None:
        """Locks the folder; raises `UserError` if it remains locked for 10 seconds.

        Ranks of a killed torchrun and their DataLoader workers need time to exit. The lock is a
        separate file, because users may move logs.
        """
        self.lock = self.ddp.cleanup.enter_context((self.checkpoints / ".lock").open("a"))
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                lock_file(self.lock)
                return
            time.sleep(0.1)
        raise UserError(
            f"another process is training in {self.path}: wait for it or set another run.name"
        )

    def _log_to_file(self) -> None:
        handler = logging.FileHandler(self.path / f"log.rank{self.ddp.rank}.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        self.ddp.cleanup.callback(handler.close)
        self.ddp.cleanup.callback(logging.getLogger().removeHandler, handler)

    def resume(self, state: TrainState, steps_per_epoch: int) -> None:
        """Restores the state from the checkpoint to resume from, if any, and opens the files.

        This is the newest checkpoint of the folder. In an empty folder, it is that of run.resume,
        or the parameters are initialised from run.init. A collective; raises `UserError` on every
        rank.
        """
        checkpoint = None
        with self.ddp.sync_errors():
            if self.ddp.rank == 0:
                checkpoint = self.newest_checkpoint()
                init = self.config.run.init
                if checkpoint is not None:
                    self._check_is_same_run(checkpoint)
                elif init:  # DDP broadcasts the parameters to the other ranks
                    from run_transfer import take_parameters

                    take_parameters(state.model, read_checkpoint(init), self.origin)
        checkpoint = self.ddp.broadcast(checkpoint)
        if checkpoint is not None:
            state.load_state_dict(checkpoint, self.config.optim.precision)
        self.saved = {"step": state.step, "epoch": state.epoch}
        self.first_step = state.step
        self.last_step = steps_per_epoch * self.config.optim.epochs
        changes = optional("run_changes")
        with self.ddp.sync_errors():
            if self.ddp.rank == 0 and state.step > 0 and changes is not None:
                changes.compare_steps(self, state, checkpoint, steps_per_epoch)
        self.ddp.heartbeat = self.ddp.heartbeat._replace(step=state.step)
        ranks = describe(self.ddp)
        with self.ddp.sync_errors():
            self._start_files(state, ranks, steps_per_epoch)
            if self.ddp.rank == 0 and state.best is not None:
                self._restore_best(checkpoint, state, steps_per_epoch)

    def _check_is_same_run(self, checkpoint: dict[str, Any]) -> None:
        """Raises `UserError` if the data or a fixed option differ from those of a checkpoint."""
        file = checkpoint["file"]
        advice = f"set another run.name; to start from its parameters, also set run.init={file}"
        if checkpoint["data"] != self.origin.data:
            raise UserError(f"{file} was trained on other data or another split: {advice}")
        given = self.config.options()
        for key, earlier in self.changed_options(checkpoint, "fixed").items():
            raise UserError(
                f"{file} was trained with {key}={earlier}, not {given[key]}: "
                f"restore that value, or {advice}"
            )

    def changed_options(self, checkpoint: dict[str, Any], rule: str) -> dict[str, Any]:
        """Returns {"section.key": earlier value} of the changed options with this `resume` rule.

        An option that the checkpoint does not have was at its default.
        """
        rules = self.config.resume_rules()
        defaults = type(self.config)().options()
        changed = {}
        for key, given in self.config.options().items():
            section, _, name = key.partition(".")
            earlier = checkpoint["config"].get(section, {}).get(name, defaults[key])
            if rules[key] == rule and earlier != given:
                changed[key] = earlier
        return changed

    def newest_checkpoint(self) -> dict[str, Any] | None:
        """Returns the newest readable checkpoint, that of run.resume, or None.

        Raises `UserError` if none of the folder's checkpoints can be read.
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
        if paths:  # the run would overwrite them
            problem = f"none of the checkpoints in {self.checkpoints} can be read"
            raise UserError(f"{problem}: move them away, or set another run.name")
        return None if resume == "auto" else read_checkpoint(resume)

    def step_files(self) -> list[Path]:
        """Returns the paths of the step checkpoints, newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def _start_files(self, state: TrainState, ranks: str, steps_per_epoch: int) -> None:
        """Opens the other ranks' logs; rank 0 writes configuration, environment and metrics."""
        with explain_write_errors(self.path, UserError):
            if self.ddp.rank != 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._log_to_file()
                return
            write_atomically(self.path / "config.yaml", [self.config.text()])
            self._add_environment(ranks)
            if not state.is_trained(self.config.optim, steps_per_epoch):
                # Left by an earlier end of the run.
                for name in ("test.tsv", "test.json", "test.svg"):
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
        """Restores best.pt, unless it already belongs to the best validation.

        The new file has the optimiser state of the checkpoint.
        """
        path = self.checkpoints / "best.pt"
        step = state.best["step"]
        with contextlib.suppress(Exception):  # reading a damaged file can raise any exception
            if load_file(path, mmap=True)["best"] == state.best:
                return
        saved = {name: value for name, value in checkpoint.items() if name != "file"}
        best = {**saved, "model": state.best_model, "best_model": None}
        best |= {"step": step, "epoch": step // steps_per_epoch}
        with explain_write_errors(path, UserError):
            if not self.step_files():  # otherwise, the next start would resume from best.pt
                save_atomically(self.checkpoints / f"step_{state.step:08d}.pt", saved)
            save_atomically(path, best)

    def _add_environment(self, ranks: str) -> None:
        """Adds this start to environment.txt, and logs versions that differ from the last start."""
        path = self.path / "environment.txt"
        earlier = path.read_text("utf-8") if path.exists() else ""
        this_start = environment(self.ddp.command, ranks)
        write_atomically(path, [earlier, this_start])
        changes = optional("run_changes")
        if changes is not None:
            changes.note_other_versions(earlier, this_start)

    def _open_metrics(self, state: TrainState) -> None:
        """Opens metrics.jsonl, and removes the rows that the run will repeat."""
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
        """Appends a row to metrics.jsonl; a row of kind val also redraws the curves.

        Non-finite numbers are written as null.
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
        """Writes this step's checkpoint and, if it `is_best`, best.pt, on rank 0.

        In best.pt, `model` contains the parameters that were validated, such as an average. A
        collective; raises `RunError` on every rank.
        """
        if hasattr(state.optimizer, "consolidate_state_dict"):  # ZeRO
            state.optimizer.consolidate_state_dict()  # collects the shards of all ranks
        with self.ddp.sync_errors(phase="save"):
            if self.ddp.rank != 0:
                return
            checkpoint = state.state_dict() | vars(self.origin)
            for name, tensor in checkpoint["model"].items():
                if not tensor.isfinite().all():
                    raise RunError(
                        f"{name} is not finite at step {state.step}, so no checkpoint was saved: "
                        "lower optim.lr"
                    )
            path = self.checkpoints / f"step_{state.step:08d}.pt"
            with explain_write_errors(path):
                # The rows must be on the disk before the checkpoint.
                os.fsync(self.metrics.fileno())
                # Write best.pt first: if the run is killed here, it resumes from the previous
                # checkpoint.
                if is_best:
                    validated = {"model": state.best_model, "best_model": None}
                    save_atomically(self.checkpoints / "best.pt", checkpoint | validated)
                save_atomically(path, checkpoint)
                saved = [other for other in self.step_files() if other.name <= path.name]
                for other in saved[self.config.checkpoint.keep_last :]:
                    other.unlink()
            self.saved = {"step": state.step, "epoch": state.epoch}
            self.write_status("running")

    def event(self, event: str, state: TrainState, reason: str = "") -> None:
        """Records an event in status.json and the metrics.

        Events are started, resumed, stopped, failed and finished.
        """
        self.write_status("running" if event in ("started", "resumed") else event, reason)
        self.write(
            "event",
            state,
            event=event,
            reason=reason,
            time=time.time(),
            world_size=self.ddp.world_size,
        )

    def write_status(self, state: str, reason: str = "") -> None:
        """Writes status.json, with the step of the last checkpoint and all warnings so far."""
        if self.ddp.rank != 0:
            return
        warnings = list(warnings_so_far.texts)
        row = {"state": state, **self.saved, "reason": reason, "warnings": warnings}
        with explain_write_errors(self.path / "status.json"):
            write_atomically(self.path / "status.json", [json.dumps(row), "\n"])

    def finish(self, state: TrainState, test: dict[str, Any], lines: Iterable[str]) -> None:
        """Writes the test row and test.tsv, and marks the run as finished.

        A collective; raises `RunError` on every rank.
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
        """Records that the run stopped on request, and removes the file STOP."""
        # Every rank does this, because the disk need not be shared. Another rank may already have
        # removed the file.
        (self.path / "STOP").unlink(missing_ok=True)
        self.event("stopped", state, reason)
        log.info(f"stopped   at step {state.step} ({reason}): the same command resumes the run")

    def progress(self, step: int) -> str:
        """Returns the remaining time of the run, if it is known, with the last loss and speed."""
        steps_done = step - self.first_step
        if steps_done == 0 or step == self.last_step:
            return self.loss_and_speed
        seconds = time.perf_counter() - self.started_at  # includes validations
        left = tqdm.format_interval(seconds / steps_done * (self.last_step - step))
        return f"run: {left} left  {self.loss_and_speed}".rstrip()

    # ---- Traces ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Traces log.profile_steps steps after three other steps; `profile_step` ends a step."""
        num_steps = self.config.log.profile_steps
        if not num_steps:
            yield
            return
        file = str(self.path / f"trace.rank{self.ddp.rank}.json")
        # Waiting and warm-up take 3 steps, so that the CUDA graph of the optimiser is captured (in
        # the third step) before tracing starts. Before CUDA 12.6, a capture may crash under CUPTI.
        schedule = torch.profiler.schedule(wait=1, warmup=2, active=num_steps, repeat=1)
        self.profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda profiler: profiler.export_chrome_trace(file)
        )
        with self.profiler:
            yield

    def profile_step(self) -> None:
        """Tells the profiler, if there is one, that a step has ended."""
        if self.profiler is not None:
            self.profiler.step()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl; raises `UserError` if it cannot be read."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}") from None
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):  # skips a line that a kill has cut off
            rows.append(json.loads(line))
    return rows


def read_status(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's status.json, {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "status.json").read_text("utf-8"))
    return {}


def environment(command: list[str], ranks: str) -> str:
    """Returns the text for environment.txt: command, git commit, versions and the ranks."""
    folder = shlex.quote(str(Path(__file__).resolve().parent))
    # These variables are set if git runs this process in a hook.
    here = f"env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE git -C {folder}"
    commit = subprocess.getoutput(f"{here} describe --always --dirty --abbrev=40")
    packages = ("torch-geometric", "numpy", "pyyaml", "tqdm")
    versions = library_versions() | {name: version(name) for name in packages}
    lines = [
        f"command: {shlex.join([sys.executable, *command])}",
        f"git commit: {commit}",
        *(f"{name}: {number}" for name, number in versions.items()),
        ranks,
    ]
    return "\n".join(lines) + "\n\n"
