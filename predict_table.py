"""A table that is written for hours, and goes on where a kill interrupted it."""

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from ddp_setup import Distributed
from errors import UserError
from run_checkpoint import explain_write_errors, lock_file


class GrowingTable:
    """A file whose lines stand in `<path>.<key>.partial` until all of them are written.

    The next process with the same key, a hash of all that the lines follow from, goes on after the
    last whole row. All ranks make it and call its methods, and rank 0 writes. Raises `UserError` on
    every rank if the file cannot be written, another process writes it, or one that was begun with
    another key is in the way.
    """

    def __init__(self, path: Path, header: str, key: str, lines_per_row: int, ddp: Distributed):
        self.path = path
        self.partial = Path(f"{path}.{key}.partial")
        self.header = header
        self.ddp = ddp
        self.num_rows = 0
        self.is_finished = False
        with self._shared_errors():
            if ddp.rank == 0:
                self._check_others()
                self.file = self._lock_partial()
                self.num_rows = self._cut_to_whole_rows(lines_per_row)
        self.num_rows = ddp.broadcast(self.num_rows)

    def append(self, lines: Iterable[str], num_rows: int) -> None:
        """Writes rows, whose lines have their ends; raises `UserError` on every rank."""
        with self._shared_errors():
            if self.ddp.rank == 0:
                if not self.num_rows:
                    self.file.write(self.header.encode())
                self.file.writelines(line.encode() for line in lines)
                self.file.flush()
        self.num_rows += num_rows

    def finish(self) -> None:
        """Gives the file its name; raises `UserError` on every rank."""
        with self._shared_errors():
            if self.ddp.rank == 0:
                self.partial.rename(self.path)
                self.is_finished = True

    def close(self) -> None:
        """Ends writing, and removes a file without rows, from which nobody would go on."""
        if self.ddp.rank == 0:
            with contextlib.suppress(OSError):  # the disk may be full
                if not (self.is_finished or os.fstat(self.file.fileno()).st_size):
                    self.partial.unlink()
                self.file.close()

    @contextlib.contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Turns a failure to write of rank 0 into a `UserError` on every rank."""
        explain = explain_write_errors(self.path, UserError, "change the working folder")
        with self.ddp.sync_errors(), explain:
            yield

    def _check_others(self) -> None:
        """Raises `UserError` if another process writes the file, or began it with another key."""
        for other in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.partial"):
            with contextlib.suppress(FileNotFoundError), self._lock(other, "r+b") as file:
                if other != self.partial and os.fstat(file.fileno()).st_size:
                    raise UserError(
                        f"{other} was begun with another table, other runs or options: repeat that "
                        "command, or remove the file"
                    )

    def _lock_partial(self) -> BinaryIO:
        """Returns the file that is written, made if need be, and locked."""
        while True:
            file = self._lock(self.partial, "a+b")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.partial.stat()):
                    return file
            file.close()  # its process has just moved or removed it

    def _lock(self, partial: Path, mode: str) -> BinaryIO:
        """Returns a file that no other process can lock until it is closed."""
        file = partial.open(mode)
        try:
            lock_file(file)
        except BlockingIOError:
            file.close()
            raise UserError(f"another process is writing {self.path}: wait for it") from None
        return file

    def _cut_to_whole_rows(self, lines_per_row: int) -> int:
        """Removes the end of a row that a kill cut off, and returns how many rows there are."""
        self.file.seek(0)
        num_lines = sum(line.endswith(b"\n") for line in self.file)
        num_rows = max(0, num_lines - 1) // lines_per_row  # the first line is the header
        self.file.seek(0)
        lines = islice(self.file, 1 + num_rows * lines_per_row)
        size = sum(len(line) for line in lines)
        self.file.truncate(size if num_rows else 0)
        return num_rows
