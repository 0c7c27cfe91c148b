"""The run folder: lock, logs, checkpoints, metrics, status, curves and test.tsv.

Only global rank 0 writes, except for each rank's own log and trace. docs/runs.md describes the
files.
"""

import contextlib
import fcntl
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from data_cache import cache_file, cached
from ddp_setup import Distributed, describe
from errors import RunError, UserError, kept_warnings
from run_checkpoint import (
    TrainState,
    explain_write_errors,
    first_nonfinite,
    link_atomically,
    read_checkpoint,
    save_atomically,
    take_parameters,
    write_atomically,
)
from run_plots import curves_svg
from run_progress import RunProgress

log = logging.getLogger("run_folder")
# Options of a run that must stay when it is resumed: section and name.
MUST_STAY = (("run", "seed"), ("data", "batch_size"), ("optim", "loss"), ("optim", "lr_mult"))
# Sections and options that leave training as it is, but for rounding, once the hash of the data and
# the options that must stay are the same.
SAME_TRAINING = (
    *("run", "data", "ddp", "checkpoint", "log"),
    *("model.message_passing", "model.checkpointing", "optim.accumulate", "optim.zero"),
)
SHOWN_WARNINGS = 10  # at the end of a run


@dataclass(frozen=True)
class RunConfig:
    name: str = "default"
    dir: str = "runs"
    seed: int = field(default=0, metadata={"min": 0, "max": 2**32 - 1})
    deterministic: bool = False
    resume: str = "auto"
    init: str = ""

    def __post_init__(self):
        if {"", ".", ".."} & set(self.name.split("/")):
            problem = "no relative path such as a/b, with neither empty parts nor . or .."
            raise ValueError(f"run.name={self.name!r} is {problem}")


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

    Args:
        config: the `config.Config` of the run.
        origin: what each checkpoint says of where it is from: configuration, hash of the data,
            names of nodes and relations.
        metric: the one whose curve is drawn.
    """

    def __init__(self, config: Any, env: Distributed, origin: dict[str, Any], metric: str):
        self.config = config
        self.env = env
        self.origin = origin
        self.metric = metric
        self.path = Path(config.run.dir, config.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.rows = []  # of metrics.jsonl
        self.profiler = None
        self.progress = RunProgress(num_steps=0, is_at_most=False, is_shown=False)

    # ---- Opening ---------------------------------------------------------------------------------
    @classmethod
    def open(
        cls, config: Any, env: Distributed, origin: dict[str, Any], metric: str
    ) -> "RunFolder":
        """Makes the folder and locks it; raises `UserError` on every rank if that is not possible.

        The arguments are those of the class.
        """
        folder = cls(config, env, origin, metric)
        with env.sync_errors():
            if env.rank == 0:
                with explain_write_errors(folder.path, UserError):
                    folder.checkpoints.mkdir(parents=True, exist_ok=True)
                    folder._lock()
                    folder._log_to_file()
        return folder

    def _lock(self) -> None:
        """Waits for ranks of a killed torchrun and their DataLoader workers, which take seconds."""
        self.lock = self.env.cleanup.enter_context((self.path / "log.rank0.txt").open("a"))
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.1)
        raise UserError(
            f"another process is training in {self.path}: wait for it or set another run.name"
        )

    def _log_to_file(self) -> None:
        handler = logging.FileHandler(self.path / f"log.rank{self.env.rank}.txt")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        self.env.cleanup.callback(handler.close)
        self.env.cleanup.callback(logging.getLogger().removeHandler, handler)

    def resume(self, state: TrainState, steps_per_epoch: int) -> None:
        """Brings the state to where the run was, or to where it starts, and starts the files.

        That is the folder's newest checkpoint or, in an empty folder, what run.resume or run.init
        name. A collective; raises `UserError` on every rank, also if the options differ from those
        of the steps that were made, and none is left to make.
        """
        checkpoint = None
        is_trained = False
        with self.env.sync_errors():
            if self.env.rank == 0:
                checkpoint = self._find_checkpoint()
                init = self.config.run.init
                if checkpoint is None and init:  # the other ranks get the parameters from DDP
                    take_parameters(state.model, read_checkpoint(init), self.origin)
        checkpoint = self.env.broadcast(checkpoint)
        if checkpoint is not None:
            state.load_state_dict(checkpoint, self.config.optim.precision)
            optim = self.config.optim
            saved = checkpoint["config"]["optim"]
            is_trained = state.is_trained(optim.epochs, optim.patience, steps_per_epoch)
            was_trained = state.is_trained(saved["epochs"], saved["patience"], steps_per_epoch)
            self._compare_options(checkpoint, is_trained, was_trained)
        self.env.heartbeat = self.env.heartbeat._replace(step=state.step)
        ranks = describe(self.env)
        with self.env.sync_errors():
            self._start_files(state, ranks, is_trained)

    def _find_checkpoint(self) -> dict[str, Any] | None:
        """Returns the checkpoint to go on from; raises `UserError` if it is another run's."""
        checkpoint = self.newest_checkpoint()
        if checkpoint is None:
            return None
        file = checkpoint["file"]
        advice = f"in an empty run folder, run.init={file} alone starts from its parameters"
        if checkpoint["data"] != self.origin["data"]:
            raise UserError(f"{file} was trained on different data or splits: {advice}")
        for section, name in MUST_STAY:
            saved = checkpoint["config"][section][name]
            given = self.origin["config"][section][name]
            if saved != given:
                raise UserError(
                    f"{file} was trained with {section}.{name}={saved}, not {given}: "
                    f"set it so, or, {advice}"
                )
        return checkpoint

    def _compare_options(
        self, checkpoint: dict[str, Any], is_trained: bool, was_trained: bool
    ) -> None:
        """Says which options differ from those of a checkpoint's steps, and records those.

        Raises `UserError` if they differ and the run `is_trained` to its end, unless it was not
        before, and only ends sooner.
        """
        step = checkpoint["step"]
        recorded = dict(checkpoint.get("earlier_options", {}))
        # Those of this very step mean that the checkpoint's own options have made none yet.
        options_of_steps = recorded.pop(step, {})
        self.origin["earlier_options"] = recorded
        earlier = {}
        for section, given in self.origin["config"].items():
            saved = checkpoint["config"].get(section, {})
            for name, value in given.items():
                key = f"{section}.{name}"
                stays = section in SAME_TRAINING or key in SAME_TRAINING
                value_of_steps = options_of_steps.get(key, saved.get(name, value))
                if not stays and value_of_steps != value:
                    earlier[key] = value_of_steps
        if step == 0 or not earlier:
            return
        made_with = ", ".join(f"{key}={value}" for key, value in earlier.items())
        only_ends_sooner = not was_trained and earlier.keys() <= {"optim.epochs", "optim.patience"}
        if is_trained and not only_ends_sooner:
            raise UserError(
                f"{checkpoint['file']} is trained to its end, step {step}, with {made_with}: set "
                "it so, raise optim.epochs or optim.patience, or set another run.name"
            )
        log.warning(f"note      the {step} steps so far were made with {made_with}")
        recorded[step] = earlier

    def newest_checkpoint(self) -> dict[str, Any] | None:
        """Returns the folder's newest readable checkpoint, else that of run.resume, if set."""
        resume = self.config.run.resume
        for path in [*self.step_files(), *self.checkpoints.glob("best.pt")]:
            try:
                checkpoint = read_checkpoint(path)
            except UserError as error:
                log.warning(f"skipped a damaged checkpoint: {error}")
                continue
            if self.config.run.init or resume != "auto":
                ignored = "run.init and run.resume are ignored"
                log.info(f"note      {self.path} goes on from {path}: {ignored}")
            return checkpoint
        return None if resume == "auto" else read_checkpoint(resume)

    def step_files(self) -> list[Path]:
        """Returns the paths of the step checkpoints, newest first."""
        return sorted(self.checkpoints.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def _start_files(self, state: TrainState, ranks: str, is_trained: bool) -> None:
        """Opens the other ranks' logs, and records configuration, environment and metrics.

        A run that `is_trained` to its end keeps its test.tsv.
        """
        with explain_write_errors(self.path, UserError):
            if self.env.rank != 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._log_to_file()
                return
            write_atomically(self.path / "config.yaml", self._config_lines())
            write_atomically(self.path / "environment.txt", [environment(self.env.command, ranks)])
            if not is_trained:
                (self.path / "test.tsv").unlink(missing_ok=True)  # of an earlier end
            self._open_metrics(state)
        is_resumed = state.step > 0 or state.best is not None
        self.event("resumed" if is_resumed else "started", state)
        self.env.on_failure = lambda reason: self.event("failed", state, reason)
        log.info(ranks)
        start = f"resumed at step {state.step}" if is_resumed else "from the start"
        log.info(f"run       {self.path}, {start}")

    def write_graph(self, fields: dict[str, Any]) -> None:
        """Writes graph.pt: `Tables.graph_fields`, and their hash. Raises `UserError` on all ranks.

        Runs on the same graph share one file, where the disk has links.
        """
        path = self.path / "graph.pt"
        with self.env.sync_errors(), explain_write_errors(path, UserError):
            if self.env.rank != 0:
                return
            content = {"graph": self.origin["graph"], **fields}
            of_cache = (self.config.data.cache_dir, "graph", self.origin["graph"])
            cached(*of_cache, lambda: content)
            if cache_file(*of_cache).exists():
                link_atomically(cache_file(*of_cache), path)
            else:
                save_atomically(path, content)

    def _config_lines(self) -> Iterator[str]:
        """Yields the lines of config.yaml, and comments on options that earlier steps had."""
        for step, options in self.origin.get("earlier_options", {}).items():
            for key, value in options.items():
                yield f"# up to step {step}: {key}={value}\n"
        yield yaml.safe_dump(self.origin["config"], sort_keys=False)

    def _open_metrics(self, state: TrainState) -> None:
        """Opens metrics.jsonl without the rows that the run will repeat."""
        path = self.path / "metrics.jsonl"
        for row in read_metrics(path) if path.exists() else []:
            with contextlib.suppress(TypeError, KeyError):  # a row that nobody here has written
                is_past = row["kind"] != "test" and row.get("step", 0) <= state.step
                if row["kind"] == "val":
                    is_past = state.best is not None and row["epoch"] <= state.epoch
                if is_past or row["kind"] == "event":
                    self.rows.append(row)
        write_atomically(path, (json.dumps(row) + "\n" for row in self.rows))
        self.metrics = self.env.cleanup.enter_context(path.open("a"))

    # ---- Writing ---------------------------------------------------------------------------------
    def write(self, kind: str, state: TrainState, **values: Any) -> None:
        """Appends a row to metrics.jsonl, with null for non-finite numbers.

        A val row also redraws curves.svg.
        """
        if self.env.rank != 0:
            return
        epoch = state.epoch + 1 if kind == "train" else state.epoch
        row = {"kind": kind, "step": state.step, "epoch": epoch, **values}
        self.rows.append(json.loads(json.dumps(row), parse_constant=lambda name: None))
        with explain_write_errors(self.path / "metrics.jsonl"):
            self.metrics.write(json.dumps(self.rows[-1]) + "\n")
            self.metrics.flush()
            if kind == "val":
                write_atomically(self.path / "curves.svg", [curves_svg(self.rows, self.metric)])

    def save(self, state: TrainState, is_best: bool = False) -> None:
        """Writes this step's checkpoint on rank 0; if it `is_best`, best.pt is the same file.

        A collective; raises `RunError` on every rank.
        """
        if hasattr(state.optimizer, "consolidate_state_dict"):  # ZeRO
            state.optimizer.consolidate_state_dict()  # each rank holds a shard
        with self.env.sync_errors(phase="save"):
            if self.env.rank != 0:
                return
            checkpoint = state.state_dict() | self.origin
            name = first_nonfinite(checkpoint["model"])
            if name:
                raise RunError(
                    f"{name} is not finite at step {state.step}, no checkpoint is saved: "
                    "lower optim.lr"
                )
            path = self.checkpoints / f"step_{state.step:08d}.pt"
            best_path = self.checkpoints / "best.pt"
            with explain_write_errors(path):
                os.fsync(self.metrics.fileno())  # never a checkpoint without its rows
                if is_best:  # first: a run that is killed here goes on from the step before
                    save_atomically(best_path, checkpoint)
                    link_atomically(best_path, path)
                else:
                    save_atomically(path, checkpoint)
                saved = [other for other in self.step_files() if other.name <= path.name]
                for other in saved[self.config.checkpoint.keep_last :]:
                    other.unlink()

    def event(self, event: str, state: TrainState, reason: str = "") -> None:
        """Records started, resumed, stopped, failed or finished in status.json and the metrics."""
        if self.env.rank != 0:
            return
        self.write_status(event, state, reason)
        self.write(
            "event",
            state,
            event=event,
            reason=reason,
            time=time.time(),
            world_size=self.env.world_size,
        )

    def write_status(self, event: str, state: TrainState, reason: str = "") -> None:
        """Writes status.json, with the warnings so far."""
        if self.env.rank != 0:
            return
        status = "running" if event in ("started", "resumed") else event
        row = {"state": status, "step": state.step, "epoch": state.epoch, "reason": reason}
        row["warnings"] = kept_warnings.texts
        with explain_write_errors(self.path / "status.json"):
            write_atomically(self.path / "status.json", [json.dumps(row), "\n"])

    def finish(self, state: TrainState, test: dict[str, Any], lines: Iterable[str]) -> None:
        """Writes the test row and the lines of test.tsv, and records the end of the run.

        A collective; raises `RunError` on every rank.
        """
        path = self.path / "test.tsv"
        with self.env.sync_errors(phase="save"), explain_write_errors(path):
            if self.env.rank == 0:
                write_atomically(path, lines)
        self.write("test", state, **test, best_step=state.best["step"])
        self.event("finished", state)
        log.info(f"run       {self.path}, model of step {state.best['step']}")

    def stop(self, state: TrainState, reason: str) -> None:
        """Records that the run stopped on request, and removes the file STOP."""
        # Every rank, as the disk need not be shared; another one may have been faster.
        (self.path / "STOP").unlink(missing_ok=True)
        self.event("stopped", state, reason)
        log.info(f"stopped   at step {state.step} ({reason}): the same command resumes the run")

    def repeat_warnings(self) -> None:
        """Logs the warnings of this start once more, as progress bars have moved them away."""
        texts = kept_warnings.texts
        if texts:
            log.info(f"warnings  {len(texts)}, as above:")
        for text in texts[:SHOWN_WARNINGS]:
            log.info(text)
        if len(texts) > SHOWN_WARNINGS:
            log.info(f"and {len(texts) - SHOWN_WARNINGS} more above")

    # ---- Traces ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Traces log.profile_steps steps, if any, after three steps; `profile_step` ends a step."""
        num_steps = self.config.log.profile_steps
        if not num_steps:
            yield
            return
        file = str(self.path / f"trace.rank{self.env.rank}.json")
        schedule = torch.profiler.schedule(wait=1, warmup=2, active=num_steps, repeat=1)
        self.profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda profiler: profiler.export_chrome_trace(file)
        )
        with self.profiler:
            yield

    def show_progress(self, num_steps: int) -> None:
        """Starts `progress`, whose bar and time left are of the steps that this process makes."""
        is_at_most = self.config.optim.patience > 0
        self.progress = RunProgress(num_steps, is_at_most, is_shown=self.env.rank == 0)

    def profile_step(self) -> None:
        """Tells the profiler, if there is one, that a step has ended."""
        if self.profiler is not None:
            self.profiler.step()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl; raises `UserError` if it cannot be read."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line cut off by a kill
            row = json.loads(line)
            if isinstance(row, dict) and "kind" in row:
                rows.append(row)
    return rows


def read_status(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's status.json, nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((folder / "status.json").read_text())
        if isinstance(status, dict):
            return status
    return {}


def read_warnings(folder: Path) -> list[str]:
    """Returns the warnings of a run's last start, none if its status cannot be read."""
    warnings = read_status(folder).get("warnings")
    if not isinstance(warnings, list):
        return []
    return list(map(str, warnings))


def environment(command: list[str], ranks: str) -> str:
    """Returns the command, the git commit, the packages' versions and the table of ranks."""
    folder = shlex.quote(str(Path(__file__).resolve().parent))
    commit = subprocess.getoutput(f"git -C {folder} describe --always --dirty --abbrev=40")
    packages = ("torch", "torch-geometric", "pyyaml", "tqdm")
    lines = [
        f"command: {shlex.join([sys.executable, *command])}",
        f"git commit: {commit}",
        *(f"{name}: {version(name)}" for name in packages),
        ranks,
    ]
    return "\n".join(lines) + "\n"
