"""Detects changes of options, versions and code since a run was trained.

Only code that affects the numbers of a model counts. A checkpoint contains hashes of this code,
from `code_of_steps`. A resumed run and a prediction compare these hashes with the hashes of the
current code. The ranks of a run compare their hashes with each other.
"""

import ast
import functools
import hashlib
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from errors import UserError
from parts import FOLDER
from run_checkpoint import TrainState

log = logging.getLogger("run_changes")
# The lines of environment.txt that are compared.
COMPARED = "python|torch|CUDA|float32 matmul precision|torch-geometric|numpy"
VERSION = re.compile(rf"^({COMPARED}): (.*)", re.M)
OLD_LENGTH = 12  # characters of the code digests in checkpoints of earlier versions
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)  # nodes that may have a docstring
# Files with these prefixes do not affect the numbers of a model.
NO_NUMBERS = ("ddp_", "run_", "predict", "analyse", "config.", "errors.", "parts.", "tests/")


def compare_steps(
    folder: Any, state: TrainState, checkpoint: Mapping[str, Any], steps_per_epoch: int
) -> None:
    """Compares the options and the code of a checkpoint with the current ones, and logs changes.

    Changes are refused if they would have no effect, because the run has no steps left. Exceptions
    are a smaller optim.epochs or optim.patience that ends the run here, and changed code if the run
    has not been tested yet.

    Args:
        folder: the `RunFolder` with the current options and code.
        state: the state that was restored from the checkpoint.
        checkpoint: the entries of the checkpoint.
        steps_per_epoch: the number of steps of an epoch.

    Raises:
        UserError: a change would have no effect.
    """
    changed = folder.config.changed_options(checkpoint["config"], "noted")
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
    # If an error in the code has made the test fail, the user may correct the code and test again.
    is_tested = (folder.path / "test.tsv").exists()
    is_trained = state.is_trained(optim, steps_per_epoch)
    if is_trained and ((changed and not only_ends_sooner) or (edited and is_tested)):
        raise UserError(
            f"{checkpoint['file']} finished training at step {state.step} with {made_with}: "
            "restore this option or code, increase optim.epochs or optim.patience to train "
            "further, or set another run.name"
        )
    log.warning(f"note      up to step {state.step}, this run was trained with {made_with}")


def note_other_versions(earlier: str, this_start: str) -> None:
    """Logs a warning if a version has changed since the run was last started.

    Different versions may change the last digits of the results.

    Args:
        earlier: the content of environment.txt, with all earlier starts.
        this_start: the text that this start adds to environment.txt.
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
    """Returns the hashes of the code that training uses, as in `code_digests`.

    They include modules that training may only load later.
    """
    return code_digests("train", "mask_copies", "model_graphs")


def code_digests(*scripts: str) -> dict[str, str]:
    """Returns a hash of each file of this project that affects the numbers of this process.

    These files are the loaded modules in this folder, including modules that users have added.

    Args:
        scripts: names of further modules, which may not be loaded or may run as `__main__`.

    Returns:
        {file name: hash}.
    """
    # Thousands of modules are loaded, but few of them have one of these names.
    ours = {path.stem for path in FOLDER.iterdir()}
    names = {name for name in {*sys.modules, *scripts} if name.partition(".")[0] in ours}
    places = [name.replace(".", "/") for name in names]
    files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py")]
    digests = {}
    for file in sorted(files):
        path = FOLDER / file
        if path.is_file() and not file.startswith(NO_NUMBERS):
            digests[file] = code_digest(path)[:16]
    return digests


def code_digest(path: Path) -> str:
    """Returns a hash of the code of a Python module.

    Comments, docstrings and layout do not count, and neither does the version of Python.
    """
    return digest_of_source(path.read_bytes(), str(path))


@functools.cache
def digest_of_source(source: bytes, file: str) -> str:
    tree = ast.parse(source, file)
    return hashlib.sha256(repr(content_of(tree)).encode()).hexdigest()


def comparable(digests: Mapping[str, str]) -> dict[str, str]:
    """Returns the digests of files without those from earlier versions of the template.

    Those were shorter, and also depended on comments.
    """
    return {file: digest for file, digest in digests.items() if len(digest) != OLD_LENGTH}


def content_of(value: Any) -> Any:
    """Returns a syntax tree as nested lists, without docstrings and fields that are empty."""
    if isinstance(value, list):
        return [content_of(item) for item in value]
    if not isinstance(value, ast.AST):
        return value
    if isinstance(value, DOCUMENTED) and ast.get_docstring(value, clean=False) is not None:
        del value.body[0]
    content = [type(value).__name__]
    for name, field in ast.iter_fields(value):
        if field not in (None, []):  # each version of Python adds fields
            content.append([name, content_of(field)])
    return content


def other_code(checkpoint: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Returns a text that lists the code files that differ from those of a checkpoint.

    The text is "" if no file differs. A checkpoint without hashes counts as equal, and so does a
    checkpoint with the hashes of earlier versions of the template, which also depended on comments.
    Files that only the checkpoint or only the current code has are ignored. Such a file belongs to
    an optional part, which options select, or else the module that imports it has changed, too.

    Args:
        checkpoint: the entries of a checkpoint.
        code: the current hashes, from `code_digests`.
    """
    earlier = comparable(checkpoint.get("code") or code)
    edited = sorted(file for file in code.keys() & earlier.keys() if code[file] != earlier[file])
    return f"a different version of {', '.join(edited)}" if edited else ""
