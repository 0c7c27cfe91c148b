"""Errors that a user can mend: each is one sentence that says what is wrong, where, what to set."""

import os
from pathlib import Path


class UserError(Exception):
    """The configuration or the input is wrong; the process exits with `status`."""

    status = 2


class DataError(UserError):
    """A table is wrong; the sentence names the file and, if known, the line."""


class RunError(UserError):
    """A run that had started failed."""

    status = 1


def reason_of(error: Exception) -> str:
    """Returns why a file cannot be used; of a link in its path that leads nowhere, says where."""
    path = Path(getattr(error, "filename", None) or "")
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            return f"{place} is a link to {os.readlink(place)}, which cannot be reached"
    return getattr(error, "strerror", None) or str(error)
