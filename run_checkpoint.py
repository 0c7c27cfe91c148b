"""Checkpoints, and atomic writing of files.

A checkpoint consists of the `TrainState` and its `Origin`. It is read with `weights_only=True`, so
that no code in it is executed.
"""

import contextlib
import fcntl
import logging
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor, nn

from errors import RunError, UserError, reason_of

log = logging.getLogger("run_checkpoint")
# Required entries of a checkpoint.
NEEDED = ("model", "optimizer", "scaler", "step", "epoch", "config", "data")


@dataclass(frozen=True)
class Origin:
    """The origin of a checkpoint: each field is stored in the file under its name.

    If you write your own task, only the first two are required.
    """

    config: dict[str, dict[str, Any]]  # {section: {option: value}}
    data: str  # hash of all tables and of the split
    graph: str = ""  # hash of nodes and edges only
    # Names of the nodes, in order; the next fields likewise.
    nodes: list[str] = field(default_factory=list)
    relations: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)  # names of the model's outputs
    mean: Tensor | None = None  # `mean` and `std` of `Criterion`, float64 [T]
    std: Tensor | None = None
    basis: Tensor | None = None  # `basis` of `KnockoutTask`, float64 [3, K]
    pair_features: list[str] = field(default_factory=list)  # [] for a model without pairs
    code: dict[str, str] = field(default_factory=dict)  # from `code_of_steps`; {} without that part
    free_options: list[str] = field(default_factory=list)  # from `Config.free_options`


@dataclass
class TrainState:
    """Everything that a checkpoint restores.

    Give your own fields a default, which is used if a checkpoint does not have the field. A field
    with a `state_dict`, such as a moving average or a scheduler of torch, is saved and restored
    with it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    epoch: int = 0  # completed epochs, including their validation
    best: dict | None = None  # step and metrics of the best validation
    best_model: dict | None = None  # the model's state dict at that step
    skipped: int = 0  # non-finite steps so far; they were not applied
    skipped_in_row: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save."""
        state = {}
        for name, value in vars(self).items():
            state[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return state

    def load_state_dict(self, state: dict[str, Any], precision: str) -> None:
        """Restores the state of a checkpoint, for a run with this `optim.precision`.

        Raises `UserError` if the model or its parameter groups differ from those of the checkpoint.
        """
        groups = self.optimizer.param_groups
        try:
            load_model(self.model, state)
            self.optimizer.load_state_dict(state["optimizer"])
        except (UserError, ValueError, KeyError) as error:
            raise UserError(
                f"{state['file']} does not match the current model or optimiser ({error}): to "
                f"start from its parameters, set run.init={state['file']} and another run.name"
            ) from None
        self.optimizer.param_groups = groups  # keep the learning rates of the configuration
        # ZeRO leaves the step counts on the CPU, but fused AdamW needs them on the device.
        inner = getattr(self.optimizer, "optim", self.optimizer)
        for parameter, values in inner.state.items():
            if "step" in values:  # SGD has no step counts
                values["step"] = values["step"].to(parameter.device)
        # The loss scale depends on the precision.
        if state["config"]["optim"]["precision"] == precision:
            self.scaler.load_state_dict(state["scaler"])
        others = state.keys() & vars(self).keys() - {"model", "optimizer", "scaler"}
        for name in others:
            value = getattr(self, name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])
        if self.best is not None and self.best_model is None:
            self.best_model = state["model"]

    def is_trained(self, optim: Any, steps_per_epoch: int) -> bool:
        """Returns whether no steps are left, given an `OptimConfig`.

        With a patience of 0, only the number of epochs counts.
        """
        best_step = 0 if self.best is None else self.best["step"]
        epochs_since_best = self.epoch - best_step // steps_per_epoch
        return self.epoch >= optim.epochs or 0 < optim.patience <= epochs_since_best


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Returns the entries of a checkpoint on the CPU, and its path as `file`.

    Raises `UserError` if it is missing or damaged.
    """
    try:
        state = load_file(path)
        return {**state, **{name: state[name] for name in NEEDED}, "file": str(path)}
    except Exception as error:  # reading a damaged file can raise any exception
        problem = f"{path} is not a readable checkpoint ({type(error).__name__})"
        if isinstance(error, OSError):
            problem += f": {reason_of(error)}: give a file such as runs/NAME/checkpoints/best.pt"
        raise UserError(problem) from None


def load_model(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Loads a checkpoint's parameters into the model.

    Raises `UserError` with the keys or shapes that do not match.
    """
    try:
        model.load_state_dict(checkpoint["model"])
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        file = checkpoint["file"]
        raise UserError(f"{file} does not match the current model: {reason}") from None


def load_file(path: str | Path, **options: Any) -> Any:
    """Returns the object that `torch.save` wrote, on the CPU; `options` are passed to `torch.load`.

    Raises any kind of exception for a damaged file. torch does not compare the checksums in the
    file; this function does.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True, **options)


# ---- Writing -------------------------------------------------------------------------------------
@contextlib.contextmanager
def atomic_file(path: Path, suffix: str = ".tmp") -> Iterator[BinaryIO]:
    """Opens a temporary file for writing, and moves it to `path` after it is on the disk."""
    temporary = path.with_name(path.name + suffix)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # on a full disk, logging the error needs this space


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes a text. Readers never see an incomplete file, even if two processes write it."""
    with atomic_file(path, f".{os.getpid()}.tmp") as file:
        file.writelines(line.encode() for line in lines)


def save_atomically(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes a checkpoint. Readers never see an incomplete file."""
    with atomic_file(path) as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:
            # torch hides the reason, such as a full disk.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def explain_write_errors(
    path: Path, kind: type[UserError] = RunError, advice: str = "set run.dir"
) -> Iterator[None]:
    """Turns an `OSError` in the block into an error of type `kind` with the `path` and `advice`."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"cannot write {path}: {reason_of(error)}: fix this or {advice}, and start again"
        ) from None


def lock_file(file: IO) -> None:
    """Locks an open file until it is closed; raises `BlockingIOError` if another process has it.

    If the file system does not support locks, such as Lustre without the option flock, it logs a
    warning.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        problem = f"cannot be locked ({reason_of(error)}): make sure no other process writes it"
        log.warning(f"note      {file.name} {problem}")
