"""Checkpoints, and atomic writing of files.

A checkpoint is a file with the `TrainState` of a run and its `Origin`. It is loaded with
`weights_only=True`, so that loading a checkpoint never executes code from the file.
"""

import contextlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from errors import RunError, UserError, reason_of

# The first characters of the fingerprints of tables. Earlier versions of the template only wrote a
# hash, which also depended on fields that the tables do not use.
FINGERPRINT = "v2:"
# The entries that every checkpoint must have.
NEEDED = ("model", "optimizer", "scaler", "step", "epoch", "config", "data")


@dataclass(frozen=True)
class Origin:
    """The options, the data and the code with which a checkpoint was trained.

    The checkpoint contains each field under its name. If you write your own task, only the first
    two fields are required.
    """

    config: dict[str, dict[str, Any]]  # {section: {option: value}}
    data: str  # hash of all tables and of the split
    graph: str = ""  # hash of nodes and edges only
    # Names of the nodes, relations, features, targets and outputs of the model, in their order.
    nodes: list[str] = field(default_factory=list)
    relations: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    mean: Tensor | None = None  # `mean` and `std` of `Criterion`, float64 [T]
    std: Tensor | None = None
    basis: Tensor | None = None  # `basis` of `KnockoutTask`, float64 [3, K]
    pair_features: list[str] = field(default_factory=list)  # names; [] for a model without pairs
    # Hashes of the code, from `code_of_steps`. Without this optional part, they are {}.
    code: dict[str, str] = field(default_factory=dict)
    free_options: list[str] = field(default_factory=list)  # from `Config.free_options`


@dataclass
class TrainState:
    """The state of training, which a checkpoint saves and restores.

    If you add your own fields, give them a default. It is used for checkpoints that do not have the
    field. If the value of a field has a `state_dict`, such as a moving average or a scheduler of
    torch, this state dict is saved and restored.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    epoch: int = 0  # completed epochs, including their validation
    best: dict | None = None  # step and metrics of the best validation
    best_model: dict | None = None  # the model's state dict at that step
    skipped: int = 0  # number of non-finite steps so far, which were not applied
    skipped_in_row: int = 0  # number of consecutive non-finite steps up to this step

    def state_dict(self) -> dict[str, Any]:
        """Returns {field: value}, with the `state_dict` of each value that has one."""
        state = {}
        for name, value in vars(self).items():
            state[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return state

    def load_state_dict(self, state: dict[str, Any], precision: str) -> None:
        """Restores the state from the entries of a checkpoint.

        Args:
            state: the entries of the checkpoint, from `read_checkpoint`.
            precision: the option optim.precision of this run. If it differs from the checkpoint's
                precision, the loss scale is not restored.

        Raises:
            UserError: the checkpoint has a different model, optimiser or parameter groups.
        """
        groups = self.optimizer.param_groups
        try:
            load_model(self.model, state)
            self.optimizer.load_state_dict(state["optimizer"])
        except (UserError, ValueError, KeyError) as error:
            problem = f"{state['file']} does not match the current model or optimiser ({error})"
            advice = f"to start from its parameters, set run.init={state['file']} and run.name"
            raise UserError(f"{problem}: {advice}") from None
        self.optimizer.param_groups = groups  # keeps the learning rates of the configuration
        # ZeRO loads the step counts on the CPU, but fused AdamW needs them on the device.
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
        """Returns whether the run has no steps left.

        Training ends after `optim.epochs` epochs or, if `optim.patience` is not 0, after that many
        epochs since the best validation.

        Args:
            optim: an `OptimConfig`.
            steps_per_epoch: the number of steps of an epoch.
        """
        best_step = 0 if self.best is None else self.best["step"]
        epochs_since_best = self.epoch - best_step // steps_per_epoch
        return self.epoch >= optim.epochs or 0 < optim.patience <= epochs_since_best


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint, and returns its entries. Tensors are on the CPU.

    The path is added as the entry `file`. Raises `UserError` if the file is missing or damaged, or
    is not a checkpoint.
    """
    try:
        state = load_file(path)
        return {**state, **{name: state[name] for name in NEEDED}, "file": str(path)}
    except Exception as error:  # reading a damaged file can raise any exception
        problem = f"{path} is not a readable checkpoint ({type(error).__name__})"
        if isinstance(error, OSError):
            problem += f": {reason_of(error)}: give a file such as runs/NAME/checkpoints/best.pt"
        raise UserError(problem) from None


def best_checkpoint(checkpoint: dict[str, Any], state: TrainState) -> dict[str, Any]:
    """Returns the entries of best.pt, given the entries of the state's own checkpoint."""
    return {**checkpoint, "model": state.best_model, "best_model": None}


def may_compare(fingerprint: str, other: str) -> bool:
    """Returns whether two fingerprints of tables were computed by the same method."""
    return fingerprint.startswith(FINGERPRINT) == other.startswith(FINGERPRINT)


def load_model(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Loads the parameters of a checkpoint into a model.

    Raises `UserError` if they do not match. The message contains the keys or shapes that differ.
    """
    try:
        model.load_state_dict(checkpoint["model"])
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        file = checkpoint["file"]
        raise UserError(f"{file} does not match the current model: {reason}") from None


def load_file(path: str | Path, **options: Any) -> Any:
    """Loads a file that `torch.save` wrote. Tensors are on the CPU.

    In addition to `torch.load`, this function verifies the checksums in the file. For a damaged
    file, it can raise any exception.

    Args:
        path: the file.
        options: further arguments of `torch.load`.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True, **options)


# ---- Writing -------------------------------------------------------------------------------------
@contextlib.contextmanager
def atomic_file(path: Path, temporary_name: str) -> Iterator[BinaryIO]:
    """Returns a context manager that writes a file atomically.

    It opens a temporary file next to `path`. After the block, it writes the file to the disk and
    renames it to `path`. If the block raises an exception, a file at `path` is unchanged.

    Args:
        path: the file to write.
        temporary_name: name of the temporary file.
    """
    temporary = path.with_name(temporary_name)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # If the disk is full, this frees the space that logging the error needs.
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes a text file. Readers never see an incomplete file, even if two processes write it."""
    with atomic_file(path, f"{path.name}.{os.getpid()}.tmp") as file:
        file.writelines(line.encode() for line in lines)


def save_atomically(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes a checkpoint with `torch.save`. Readers never see an incomplete file.

    All temporary files have one name, so that the next save overwrites the file of a killed save.
    """
    with atomic_file(path, "checkpoint.tmp") as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:
            # torch replaces the error of the file system, which has the reason (such as a full
            # disk), by its own error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def explain_write_errors(
    path: Path, kind: type[UserError] = RunError, advice: str = "set run.dir"
) -> Iterator[None]:
    """Returns a context manager that replaces an `OSError` by an error that users can understand.

    Args:
        path: the file or folder that is being written, for the message.
        kind: the class of the new error.
        advice: the message asks users to correct the problem or to do this.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"cannot write {path}: {reason_of(error)}: fix this or {advice}, and start again"
        ) from None
