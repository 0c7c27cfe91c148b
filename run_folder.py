"""The run folder: lock, logs, checkpoints, metrics, status, curves and test.tsv.

Only global rank 0 writes, except for each rank's own log and trace. docs/runs.md describes the
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
    """Keeps the texts of warnings, each once, while it is a handler of a logger."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = {}  # whose keys they are, in order

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.texts[record.getMessage()] = None


warnings_so_far = Warnings()  # of this process


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
    """The files of a run of a `config.Config`.

    `rivals` are the names of other predictions, whose metrics stand beside the model's.
    """

    def __init__(self, config: Any, ddp: Distributed, origin: Origin, rivals: Sequence[str] = ()):
        self.config = config
        self.ddp = ddp
        self.origin = origin
        self.rivals = rivals
        self.path = Path(config.run.dir, config.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.saved = {"step": 0, "epoch": 0}  # of the checkpoint with which a start goes on
        self.rows = []  # of metrics.jsonl
        self.profiler = None
        self.loss_and_speed = ""  # of the last steps
        self.first_step = 0  # of this process: a resumed run's speed is not that of earlier ones
        self.last_step = 0
        self.started_at = 0.0  # seconds, as `time.perf_counter`

    # ---- Opening ---------------------------------------------------------------------------------
    @classmethod
    def open(cls, *arguments: Any) -> "RunFolder":
        """Makes and locks the folder, by the class's arguments; raises `UserError` on all ranks."""
        folder = cls(*arguments)
        with folder.ddp.sync_errors():
            if folder.ddp.rank == 0:
                with explain_write_errors(folder.path, UserError):
                    folder.checkpoints.mkdir(parents=True, exist_ok=True)
                    folder._lock()
                    folder._log_to_file()
        return folder

    def _lock(self) -> None:
        """Waits for ranks of a killed torchrun and their DataLoader workers, which take seconds.

        The file that is locked is none that people move away, as they do with logs.
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
        """Brings the state to where the run was, or to where it starts, and starts the files.

        That is the folder's newest checkpoint or, in an empty folder, what run.resume or run.init
        name. A collective; raises `UserError` on every rank.
        """
        checkpoint = None
        with self.ddp.sync_errors():
            if self.ddp.rank == 0:
                checkpoint = self.newest_checkpoint()
                init = self.config.run.init
                if checkpoint is not None:
                    self._check_is_same_run(checkpoint)
                elif init:  # the other ranks get the parameters from DDP
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
        """Returns {"section.key": earlier value} of options under this `resume` rule that differ.

        One that the checkpoint lacks was at its default.
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
        """Returns the newest readable one, or that of run.resume, if set; raises `UserError`."""
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
        if paths:  # which the run would overwrite
            problem = f"none of the checkpoints in {self.checkpoints} can be read"
            raise UserError(f"{problem}: move them away, or set another run.name")
        return None if resume == "auto" else read_checkpoint(resume)

    def step_files(self) -> list[Path]:
        """Returns the paths of the step checkpoints, newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def _start_files(self, state: TrainState, ranks: str, steps_per_epoch: int) -> None:
        """Opens the other ranks' logs, and records configuration, environment and metrics."""
        with explain_write_errors(self.path, UserError):
            if self.ddp.rank != 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._log_to_file()
                return
            write_atomically(self.path / "config.yaml", [self.config.text()])
            self._add_environment(ranks)
            if not state.is_trained(self.config.optim, steps_per_epoch):
                for name in ("test.tsv", "test.json", "test.svg"):  # of an earlier end
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
        """Writes best.pt, unless it is of that validation, with the checkpoint's optimiser."""
        path = self.checkpoints / "best.pt"
        step = state.best["step"]
        with contextlib.suppress(Exception):  # a damaged file fails in many ways
            if load_file(path, mmap=True)["best"] == state.best:
                return
        saved = {name: value for name, value in checkpoint.items() if name != "file"}
        best = {**saved, "model": state.best_model, "best_model": None}
        best |= {"step": step, "epoch": step // steps_per_epoch}
        with explain_write_errors(path, UserError):
            if not self.step_files():  # or the next start would go on from best.pt
                save_atomically(self.checkpoints / f"step_{state.step:08d}.pt", saved)
            save_atomically(path, best)

    def _add_environment(self, ranks: str) -> None:
        """Adds this start to environment.txt, and notes versions that its last start had not."""
        path = self.path / "environment.txt"
        earlier = path.read_text("utf-8") if path.exists() else ""
        this_start = environment(self.ddp.command, ranks)
        write_atomically(path, [earlier, this_start])
        changes = optional("run_changes")
        if changes is not None:
            changes.note_other_versions(earlier, this_start)

    def _open_metrics(self, state: TrainState) -> None:
        """Opens metrics.jsonl without the rows that the run will repeat."""
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
        """Appends a row to metrics.jsonl, null for non-finite numbers; a val row redraws curves."""
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
        """Writes this step's checkpoint on rank 0 and, if it `is_best`, best.pt.

        The `model` of best.pt is what was validated, the model's weights or, say, their average. A
        collective; raises `RunError` on every rank.
        """
        if hasattr(state.optimizer, "consolidate_state_dict"):  # ZeRO
            state.optimizer.consolidate_state_dict()  # each rank holds a shard
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
                os.fsync(self.metrics.fileno())  # never a checkpoint without its rows
                if is_best:  # first: a run that is killed here goes on from the step before
                    validated = {"model": state.best_model, "best_model": None}
                    save_atomically(self.checkpoints / "best.pt", checkpoint | validated)
                save_atomically(path, checkpoint)
                saved = [other for other in self.step_files() if other.name <= path.name]
                for other in saved[self.config.checkpoint.keep_last :]:
                    other.unlink()
            self.saved = {"step": state.step, "epoch": state.epoch}
            self.write_status("running")

    def event(self, event: str, state: TrainState, reason: str = "") -> None:
        """Records started, resumed, stopped, failed or finished in status.json and the metrics."""
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
        """Writes status.json, with the step of the last checkpoint and the warnings so far."""
        if self.ddp.rank != 0:
            return
        warnings = list(warnings_so_far.texts)
        row = {"state": state, **self.saved, "reason": reason, "warnings": warnings}
        with explain_write_errors(self.path / "status.json"):
            write_atomically(self.path / "status.json", [json.dumps(row), "\n"])

    def finish(self, state: TrainState, test: dict[str, Any], lines: Iterable[str]) -> None:
        """A collective that writes test row and test.tsv, and ends the run; raises `RunError`."""
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
        # Every rank, as the disk need not be shared; another one may have been faster.
        (self.path / "STOP").unlink(missing_ok=True)
        self.event("stopped", state, reason)
        log.info(f"stopped   at step {state.step} ({reason}): the same command resumes the run")

    def progress(self, step: int) -> str:
        """Returns the time left for the run, if there is some, and loss and speed."""
        steps_done = step - self.first_step
        if steps_done == 0 or step == self.last_step:
            return self.loss_and_speed
        seconds = time.perf_counter() - self.started_at  # validations included
        left = tqdm.format_interval(seconds / steps_done * (self.last_step - step))
        return f"run: {left} left  {self.loss_and_speed}".rstrip()

    # ---- Traces ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Traces log.profile_steps steps, if any, after three steps; `profile_step` ends a step."""
        num_steps = self.config.log.profile_steps
        if not num_steps:
            yield
            return
        file = str(self.path / f"trace.rank{self.ddp.rank}.json")
        # Waiting and warming up take 3 steps: with CUDA graphs, the optimiser's is captured in the
        # third, before tracing starts. Before CUDA 12.6, a capture may crash under CUPTI.
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
        with contextlib.suppress(ValueError):  # a line cut off by a kill
            rows.append(json.loads(line))
    return rows


def read_status(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's status.json, nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "status.json").read_text("utf-8"))
    return {}


def environment(command: list[str], ranks: str) -> str:
    """Returns the command, the git commit, the packages' versions and the table of ranks."""
    folder = shlex.quote(str(Path(__file__).resolve().parent))
    # A hook of git sets these variables.
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
