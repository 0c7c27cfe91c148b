"""Errors that users can fix. Each is one message: where, what is wrong, what to do."""

import os
from pathlib import Path


class UserError(Exception):
    """The configuration or the input is wrong. The process exits with `status`."""

    status = 2


class DataError(UserError):
    """A table is wrong. The message names the file and, if known, the line."""


class RunError(UserError):
    """A run failed after training had started."""

    status = 1


def reason_of(error: Exception) -> str:
    """Returns the reason why a file cannot be used.

    If a broken link is part of its path, the reason says where the link leads.
    """
    path = Path(getattr(error, "filename", None) or "")
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            return f"{place} is a link to {os.readlink(place)}, which cannot be reached"
    return getattr(error, "strerror", None) or str(error)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number and its noun for a message: "1 row", "2,000 rows".

    `plural` is for nouns whose plural is not formed with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
