"""How a run ends: on request, by a signal or a STOP file, or because of a failure."""

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
log.addHandler(logging.NullHandler())  # without it, the preflight would print errors twice
PARENT_PID = os.getppid()  # the pid of torchrun, if torchrun launched this process


def report_error(text: str, is_printed: bool = True) -> None:
    """Logs an error, and prints it to stderr if `is_printed` is True."""
    log.error(text)
    if is_printed:
        with contextlib.suppress(OSError):  # stderr may be a closed pipe
            print(text, file=sys.stderr, flush=True)


class StopTraining(Exception):
    """Ends training on request. Every rank raises this exception after the same step.

    Its text is the reason, one of `StopRequest.REASONS`.
    """


class StopRequest:
    """Notices requests to stop training.

    A request is a signal, a STOP file, or the exit of the torchrun that launched this process.

    Args:
        file: the path of the STOP file.
        cleanup: gets callbacks that restore the previous signal handlers.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # Schedulers send these signals before a time limit.
    SIGNALS += (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    REASONS = ("", "STOP file", "torchrun exited", *(number.name for number in SIGNALS))

    def __init__(self, file: Path, cleanup: contextlib.ExitStack):
        # Under SLURM, launch.sh sets STOP_FILE.
        self.files = [file, Path(os.environ.get("STOP_FILE") or file)]
        self.reason = 0  # index in REASONS
        # Only the main thread can handle signals.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.SIGNALS:
            by_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not by_nohup:
                cleanup.callback(signal.signal, number, signal.signal(number, self._handle))

    def _handle(self, number: int, frame: object) -> None:
        reason = self.REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT and self.reason == reason:  # a second Ctrl-C interrupts at once
            raise KeyboardInterrupt
        self.reason = reason

    def code(self) -> int:
        """Returns the reason of the request as an index in `REASONS`; 0 means no request."""
        if not self.reason and dist.is_torchelastic_launched() and os.getppid() != PARENT_PID:
            self.reason = self.REASONS.index("torchrun exited")
        if not self.reason and any(map(os.path.exists, self.files)):
            self.reason = self.REASONS.index("STOP file")
        return self.reason


class Heartbeat(NamedTuple):
    """The progress of a rank. A watchdog compares it over time to detect that the rank hangs."""

    step: int = 0  # number of steps done
    changes: int = 0  # how often the phase has changed since the last step
    phase: str = "start"  # name of the phase that the rank is in, such as "forward"
    entered: int = 0  # number of phases entered so far; repeated phases count each time


def explain_failure(error: BaseException, rank: int) -> tuple[str, str]:
    """Returns the traceback and the reason of an error that ends the job.

    The reason is one message. The traceback is "" for errors that the reason explains completely,
    such as a `UserError` or a lack of memory.
    """
    # The name of a file need not be valid UTF-8, but the store and the log only accept UTF-8.
    reason = str(error).encode(errors="backslashreplace").decode()
    of_gloo = isinstance(error, RuntimeError) and "/gloo/" in reason
    allocated = re.search(r"tried to allocate ([\d.]+ \w+)", reason, re.IGNORECASE)
    if isinstance(error, UserError):
        return "", reason
    if isinstance(error, KeyboardInterrupt):
        return "", "interrupted"
    if isinstance(error, dist.DistError) or of_gloo:
        *_, cause = reason.split("Last error:")  # NCCL appends the cause to its message
        cause = " ".join(cause.split())
        if "NCCL" in reason and "ncclRemoteError" not in reason:
            return "", f"rank {rank}: NCCL reports: {cause}"
        problem = f"rank {rank}: another rank was killed or cannot be reached ({cause})"
        return "", f"{problem}: see the output and the logs of the other ranks"
    if allocated:
        problem = f"rank {rank}: out of memory when allocating {allocated[1]}"
        advice = "decrease model.hidden or data.batch_size, or increase optim.accumulate"
        return "", f"{problem}: {advice}"
    trace = "".join(traceback.format_exception(error))
    return trace, f"rank {rank}: {type(error).__name__}: {reason}"


def write_error_file(text: str) -> None:
    """Writes the reason why this process failed to the error file of torchrun.

    torchrun includes the content of this file in its report. Without torchrun, there is no such
    file, and this function does nothing.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


def end_process(status: int) -> None:
    """Ends this process with an exit status if it is not 0, otherwise returns.

    Under torchrun, the process exits without the interpreter's shutdown, which can hang. Without
    torchrun, the function raises `SystemExit`, which the kernel of a notebook survives. If stdout
    is a closed pipe, the process exits at once even with status 0, because Python would print an
    error during its shutdown.
    """
    try:
        print(end="", flush=True)
    except OSError:
        os._exit(status)
    if status and "WORLD_SIZE" in os.environ:
        os._exit(status)
    if status:
        sys.exit(status)
