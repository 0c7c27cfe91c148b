"""Errors that users can fix.

Each message says where the error is, what is wrong, and what to do, separated by colons:
"scores.tsv:1: two columns have the name 'growth': rename one of them". The message is printed
without a traceback.
"""


class UserError(Exception):
    """The configuration or the input is wrong. The process then exits with `status`."""

    status = 2


class DataError(UserError):
    """A table is wrong. The message begins with its file and, if known, the line."""


class RunError(UserError):
    """A run failed after training had started."""

    status = 1


def reason_of(error: Exception) -> str:
    """Returns the reason why a file cannot be used, for a message."""
    return getattr(error, "strerror", None) or str(error)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number and its noun for a message, such as "1 row" and "2,000 rows".

    If the plural of the noun is not formed by appending an s, pass it as `plural`.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
