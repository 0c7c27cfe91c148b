"""What has changed since a run has made its steps: options, and the code that decides numbers.

A checkpoint names the code of its steps by `code_of_steps`. A resumed run and a prediction compare
it with theirs, and ranks compare theirs with each other.
"""

import hashlib
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from errors import UserError
from parts import FOLDER
from run_checkpoint import TrainState

log = logging.getLogger("run_changes")
VERSION = re.compile(r"^(python|torch|CUDA|torch-geometric|numpy): (.*)", re.M)  # environment.txt
# How the names of files begin that decide no numbers of a model.
NO_NUMBERS = ("ddp_", "run_", "predict", "analyse", "config.", "errors.", "parts.", "tests/")


def compare_steps(
    folder: Any, state: TrainState, checkpoint: Mapping[str, Any], steps_per_epoch: int
) -> None:
    """Logs which options and code of a checkpoint's steps differ from those of a `RunFolder`.

    Raises `UserError` if no step is left to make and options differ, unless all that they do is to
    end the run sooner, or if it was tested by other code.
    """
    changed = folder.changed_options(checkpoint, "noted")
    edited = other_code(checkpoint, folder.origin.code)
    options = [f"{key}={value}" for key, value in changed.items()]
    made_with = ", ".join(filter(None, [*options, edited]))
    if not made_with:
        return
    optim = folder.config.optim
    epochs = changed.get("optim.epochs", optim.epochs)
    patience = changed.get("optim.patience", optim.patience)
    earlier = replace(optim, epochs=epochs, patience=patience)
    was_trained = state.is_trained(earlier, steps_per_epoch)
    only_ends_sooner = not was_trained and changed.keys() <= {"optim.epochs", "optim.patience"}
    # A run that failed in its test, by code that was mended since, is tested.
    is_tested = (folder.path / "test.tsv").exists()
    is_trained = state.is_trained(optim, steps_per_epoch)
    if is_trained and ((changed and not only_ends_sooner) or (edited and is_tested)):
        raise UserError(
            f"{checkpoint['file']} finished training at step {state.step} with {made_with}: undo "
            "this change, increase optim.epochs or optim.patience to train further, or set "
            "another run.name"
        )
    log.warning(f"note      the first {state.step} steps were made with {made_with}")


def note_other_versions(earlier: str, this_start: str) -> None:
    """Logs which versions of this start are others than those of the last one in environment.txt.

    They may change the last digits of what follows.
    """
    of_last = dict(VERSION.findall(earlier))
    changed = [
        f"{name} {of_last[name]}"
        for name, version in VERSION.findall(this_start)
        if version != of_last.get(name, version)
    ]
    if changed:
        log.warning(
            f"note      versions have changed: this run was last started with {', '.join(changed)}"
        )


def code_of_steps() -> dict[str, str]:
    """Returns the `code_digests` of a process that trains, with what it may load later."""
    return code_digests("train", "mask_copies", "model_graphs")


def code_digests(*scripts: str) -> dict[str, str]:
    """Returns a hash of each file of ours that this process runs and that decides numbers.

    These are the loaded modules, a user's own, too, and `scripts`, which may run as `__main__`.
    """
    ours = {path.stem for path in FOLDER.iterdir()}  # few, while thousands of modules are loaded
    names = {name for name in {*sys.modules, *scripts} if name.partition(".")[0] in ours}
    places = [name.replace(".", "/") for name in names]
    files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py")]
    return hashes_of(file for file in files if not file.startswith(NO_NUMBERS))


def hashes_of(files: Iterable[str]) -> dict[str, str]:
    """Returns a hash of each file of ours that is there."""
    digests = {}
    for file in sorted(files):
        path = FOLDER / file
        if path.is_file():
            digests[file] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return digests


def other_code(checkpoint: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Names the files of `code_digests` that were others for a checkpoint, "" if none was.

    A checkpoint that names no code is taken as it is. A file that only one of the two has does not
    count: options ask for those of parts, and of others, the one that imports it has changed.
    """
    earlier = checkpoint.get("code") or code
    edited = sorted(file for file in code.keys() & earlier.keys() if code[file] != earlier[file])
    return f"a different version of {', '.join(edited)}" if edited else ""
