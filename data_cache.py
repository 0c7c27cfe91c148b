"""The cache: values in files, whose names contain a hash of everything that the value depends on.

If anything changes that a value depends on, the name of its file changes, and the value is built
again.
"""

import contextlib
import fcntl
import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import torch

from parts import optional
from run_checkpoint import load_file

log = logging.getLogger(__name__)


def cached(cache_dir: str, kind: str, key: str, build: Callable[[], Any]) -> Any:
    """Returns the value of `build`, from a file if it exists.

    Otherwise, one process builds the value and writes the file, while other processes wait. If the
    file cannot be written, a warning is logged, and the value is returned nevertheless.

    The tensors of a value that is read from the file are mapped into memory, which the processes of
    a machine share.

    Args:
        cache_dir: Folder of the file.
        kind: First part of the file's name, such as "tables". A hash of `key` follows.
        key: Text with everything that the value depends on, such as hashes of the files that are
            read, and the `source_digest` of the function that reads them.
        build: Function that returns the value.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = Path(cache_dir, f"{kind}-{digest[:32]}.pt")
    if not os.path.exists(path):
        log.info(f"cache     writing {path}")
    with contextlib.ExitStack() as stack:
        failure = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Without the lock, an existing file is read, but no file is written, because two processes
        # might write it at once.
        except OSError as error:
            failure = error
        if os.path.exists(path):  # also False if the folder is not accessible
            try:
                return load_file(path, mmap=True)
            except Exception as error:  # reading a damaged file can raise any exception
                log.warning(
                    f"cache     {path} is damaged and will be rebuilt: {type(error).__name__}"
                )
        content = build()
        temporary = path.with_suffix(".tmp")  # overwrites a file that a killed process has left
        try:
            if failure:
                raise failure
            torch.save(content, temporary)
            os.replace(temporary, path)
        # torch.save raises RuntimeError on a full disk.
        except (OSError, RuntimeError) as error:
            log.warning(
                f"cache     {path} cannot be written, so its content is computed again in each "
                f"run: {error}"
            )
            with contextlib.suppress(OSError):
                temporary.unlink()
    return content


@functools.cache
def source_digest(function: Callable) -> str:
    """Returns a SHA-256 hash of the code of a function's module and of all modules that it imports.

    Modules that are imported indirectly are included. Modules outside the folder of the function's
    module, and modules that are imported with `optional`, are not included. The hash does not
    depend on comments, docstrings and layout.
    """
    script = Path(inspect.getsourcefile(function))
    finder = ModuleFinder([str(script.parent)])
    finder.run_script(str(script))
    files = {module.__file__ for module in finder.modules.values()} - {None}
    digest = hashlib.sha256()
    changes = optional("run_changes")  # without this part, comments count, too
    for file in sorted(files):
        path = Path(file)
        digest.update(changes.code_digest(path).encode() if changes else path.read_bytes())
    return digest.hexdigest()
