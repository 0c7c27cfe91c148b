"""A table that is written over hours, and goes on where a kill interrupted it."""

import contextlib
import fcntl
import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from errors import UserError
from run_checkpoint import explain_write_errors


class GrowingTable:
    """A file that gets its name when all of it is written.

    Until then, its lines are in `<path>.<key>.partial`. What stands there is kept by the next
    process with the same key, which must come to the same lines.

    Args:
        path: the file.
        header: its first line.
        key: a hash of all that the lines follow from.
        lines_per_row: of what the rows are written as.

    Raises:
        UserError: it cannot be written, another process writes it, or what was written of another
            table is in the way.
    """

    def __init__(self, path: Path, header: str, key: str, lines_per_row: int = 1):
        self.path = path
        self.partial = Path(f"{path}.{key}.partial")
        self.header = header
        with explain_errors(path):
            self.file = self.partial.open("a+b")
        try:
            self._lock(self.file)
            self._check_others()
        except UserError:
            self.file.close()
            raise
        self.num_rows = self._cut_to_whole_rows(lines_per_row)

    def _lock(self, file: BinaryIO) -> None:
        """Locks a file until it is closed; raises `UserError` if another process has."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {self.path}: wait for it") from None

    def _check_others(self) -> None:
        """Raises `UserError` if the same file is or was begun with another key."""
        pattern = f"{glob.escape(self.path.name)}.*.partial"
        for other in self.path.parent.glob(pattern):
            if other == self.partial:
                continue
            with contextlib.suppress(FileNotFoundError), other.open("rb") as file:
                self._lock(file)
                if other.stat().st_size:
                    raise UserError(
                        f"{other} was begun with another table, other runs or options: repeat that "
                        "command, or remove the file"
                    )

    def _cut_to_whole_rows(self, lines_per_row: int) -> int:
        """Removes the end of a row that a kill cut off, and returns how many rows there are."""
        num_rows = 0
        end = 0  # of the last whole row
        self.file.seek(0)
        position = len(self.file.readline())
        for num_lines, line in enumerate(self.file, 1):
            if not line.endswith(b"\n"):
                break
            position += len(line)
            if num_lines % lines_per_row == 0:
                num_rows += 1
                end = position
        self.file.truncate(end)
        return num_rows

    def append(self, lines: Iterable[str], num_rows: int) -> None:
        """Writes rows, whose lines have their ends; raises `UserError`."""
        with explain_errors(self.path):
            if not self.num_rows:
                self.file.write(self.header.encode())
            for line in lines:
                self.file.write(line.encode())
            self.file.flush()
        self.num_rows += num_rows

    def finish(self) -> None:
        """Gives the file its name; raises `UserError`."""
        with explain_errors(self.path):
            os.replace(self.partial, self.path)

    def close(self) -> None:
        """Ends writing, and removes a file without rows, from which nobody would go on."""
        with contextlib.suppress(OSError):  # the disk may be full
            self.file.flush()
        with contextlib.suppress(OSError):
            if not self.partial.stat().st_size:
                self.partial.unlink()
        with contextlib.suppress(OSError):
            self.file.close()


def explain_errors(path: Path) -> contextlib.AbstractContextManager:
    """Turns a failure to write a table into a `UserError`."""
    return explain_write_errors(path, UserError, "change the working folder")
