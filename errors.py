"""Errors that a user can mend: each is one sentence that says what is wrong, where, what to set."""


class UserError(Exception):
    """The configuration or the input is wrong; the process exits with `status`."""

    status = 2


class DataError(UserError):
    """A table is wrong; the sentence names the file and, if known, the line."""


class RunError(UserError):
    """A run that had started failed."""

    status = 1


def reason_of(error: Exception) -> str:
    """Returns why a file cannot be used."""
    return getattr(error, "strerror", None) or str(error)
