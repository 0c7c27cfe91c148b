"""Errors that a user can mend: each is one sentence that says what is wrong, where, what to set.

Warnings are kept until the end of a run, where they are seen.
"""

import logging


class UserError(Exception):
    """The configuration or the input is wrong; the process exits with `status`."""

    status = 2


class DataError(UserError):
    """A table is wrong; the sentence names the file and, if known, the line."""


class RunError(UserError):
    """A run that had started failed."""

    status = 1


class KeptWarnings(logging.Handler):
    """Keeps the warnings of this process, each text once."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.WARNING and text not in self.texts:
            self.texts.append(text)


kept_warnings = KeptWarnings()
