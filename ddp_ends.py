"""The ends of a run: requests to stop it, as signals and STOP files are, and failures."""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from errors import UserError

log = logging.getLogger("ddp_ends")
log.addHandler(logging.NullHandler())  # or the preflight prints errors twice
PARENT_PID = os.getppid()  # torchrun, if it launched this process


def log_and_print(text: str) -> None:
    log.error(text)
    with contextlib.suppress(OSError):  # stderr may be a closed pipe
        print(text, file=sys.stderr, flush=True)


class StopTraining(Exception):
    """Training ends on request; every rank raises this after the same step."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """Notices a request to stop: a signal, a STOP file, or the exit of this process's torchrun."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    SIGNALS += (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of schedulers, before a limit
    REASONS = ("", "STOP file", "torchrun exited", *(number.name for number in SIGNALS))

    def __init__(self, file: Path):
        self.files = [file, Path(os.environ.get("STOP_FILE") or file)]  # of launch.sh, for SLURM
        self.reason = 0  # a position in REASONS
        self.undo = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():  # no other one can
            self._take_signals()

    def _take_signals(self) -> None:
        for number in self.SIGNALS:
            by_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not by_nohup:
                self.undo.callback(signal.signal, number, signal.signal(number, self._handle))

    def _handle(self, number: int, frame: object) -> None:
        reason = self.REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT and self.reason == reason:  # the second Ctrl-C
            raise KeyboardInterrupt
        self.reason = reason

    def close(self) -> None:
        """Gives signals the effects that they had before."""
        self.undo.close()

    def code(self) -> int:
        """Returns a position in `REASONS`, 0 for no request."""
        if not self.reason and dist.is_torchelastic_launched() and os.getppid() != PARENT_PID:
            self.reason = self.REASONS.index("torchrun exited")
        if not self.reason and any(map(os.path.exists, self.files)):
            self.reason = self.REASONS.index("STOP file")
        return self.reason


class Heartbeat(NamedTuple):
    """How far a rank has come, as it tells the other ranks."""

    step: int = 0  # steps done
    changes: int = 0  # of the phase, since the last step
    phase: str = "start"  # what it is doing
    entered: int = 0  # phases entered in total, the same one again included


def explain_failure(error: BaseException, rank: int) -> tuple[str, str]:
    """Returns the traceback of an error, "" for one that says enough, and the reason as a text."""
    reason = str(error)
    of_gloo = isinstance(error, RuntimeError) and "/gloo/" in reason
    allocated = re.search(r"tried to allocate ([\d.]+ \w+)", reason, re.IGNORECASE)
    if isinstance(error, UserError):
        return "", reason
    if isinstance(error, KeyboardInterrupt):
        return "", "interrupted"
    if isinstance(error, dist.DistError) or of_gloo:
        *_, cause = reason.split("Last error:")  # of NCCL, which names it at the end
        detail = " ".join(cause.split())[:99]
        return "", f"rank {rank}: another rank was killed or cannot be reached ({detail})"
    if allocated:
        return "", (
            f"rank {rank}: out of memory when allocating {allocated[1]}: decrease model.hidden or "
            "data.batch_size, or increase optim.accumulate"
        )
    trace = "".join(traceback.format_exception(error))
    return trace, f"rank {rank}: {type(error).__name__}: {reason}"


def tell_torchrun(text: str) -> None:
    """Writes why this process has failed where torchrun looks, whose report ends with it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


def end_process(status: int) -> None:
    """Ends this process after a failure: a rank without interpreter shutdown, which can hang.

    One process alone may be a notebook's kernel, which SystemExit does not end. After success, this
    returns unless stdout is a closed pipe, of which Python would complain.
    """
    try:
        print(end="", flush=True)
    except OSError:
        os._exit(status)
    if status and "WORLD_SIZE" in os.environ:
        os._exit(status)
    if status:
        sys.exit(status)
