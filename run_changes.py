"""Finds what has changed since a run made its steps: options, and the code that affects numbers.

A checkpoint contains hashes of its code, from `code_of_steps`. A resumed run and a prediction
compare them with their own, and ranks compare theirs with each other.
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
# Lines of environment.txt.
VERSION = re.compile(r"^(python|torch|CUDA|torch-geometric|numpy): (.*)", re.M)
# Prefixes of files that do not affect the numbers of a model.
NO_NUMBERS = ("ddp_", "run_", "predict", "analyse", "config.", "errors.", "parts.", "tests/")


def compare_steps(
    folder: Any, state: TrainState, checkpoint: Mapping[str, Any], steps_per_epoch: int
) -> None:
    """Logs the options and code files of a checkpoint that differ from those of a `RunFolder`.

    Raises `UserError` if no step is left to make and options differ, unless they only end the run
    sooner. Also raises it if no step is left to make and the run was tested with different code.
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
    # A run whose test failed because of an error in the code may be tested again after that is
    # fixed.
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
    """Logs the versions of this start that differ from those of the last start in environment.txt.

    They may change the last digits of the results.
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
    """Returns the `code_digests` of training, including modules that it may load later."""
    return code_digests("train", "mask_copies", "model_graphs")


def code_digests(*scripts: str) -> dict[str, str]:
    """Returns a hash of each file of this project that this process runs and that affects numbers.

    These are the loaded modules, including those that users have added, and `scripts`, which may
    run as `__main__`.
    """
    # Few names, while thousands of modules are loaded.
    ours = {path.stem for path in FOLDER.iterdir()}
    names = {name for name in {*sys.modules, *scripts} if name.partition(".")[0] in ours}
    places = [name.replace(".", "/") for name in names]
    files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py")]
    return hashes_of(file for file in files if not file.startswith(NO_NUMBERS))


def hashes_of(files: Iterable[str]) -> dict[str, str]:
    """Returns a hash of each file that exists in this folder."""
    digests = {}
    for file in sorted(files):
        path = FOLDER / file
        if path.is_file():
            digests[file] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return digests


def other_code(checkpoint: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Returns a text with the files of `code_digests` that differ for a checkpoint, "" if none.

    A checkpoint without hashes counts as equal. Files that only one of the two has are ignored:
    options select the files of optional parts, and for other files, the module that imports them
    has changed.
    """
    earlier = checkpoint.get("code") or code
    edited = sorted(file for file in code.keys() & earlier.keys() if code[file] != earlier[file])
    return f"a different version of {', '.join(edited)}" if edited else ""
