"""ddp_ends.py: requests to stop a run, and reasons of failures."""

import contextlib
import errno
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.distributed import DistBackendError

from ddp_ends import StopRequest, explain_failure, report_error
from errors import UserError
from tests.template.fixtures import ROOT


def test_stop_requests_have_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_FILE", str(tmp_path / "slurm.stop"))
    for name in ("STOP", "slurm.stop"):
        with contextlib.ExitStack() as cleanup:
            stop = StopRequest(tmp_path / "STOP", cleanup)
            assert StopRequest.REASONS[stop.code()] == ""
            (tmp_path / name).touch()
            assert StopRequest.REASONS[stop.code()] == "STOP file"
            (tmp_path / name).unlink()
            assert stop.code()  # a request cannot be withdrawn
    for name in ("SIGUSR1", "SIGUSR2", "SIGXCPU"):
        with contextlib.ExitStack() as cleanup:
            stop = StopRequest(tmp_path / "STOP", cleanup)
            os.kill(os.getpid(), signal.Signals[name])
            assert StopRequest.REASONS[stop.code()] == name


def test_only_a_second_ctrl_c_interrupts_a_run(tmp_path):
    """A scheduler may repeat SIGTERM, and a run that has received SIGTERM still saves its state."""
    with contextlib.ExitStack() as cleanup:
        stop = StopRequest(tmp_path / "STOP", cleanup)
        for name in ("SIGTERM", "SIGTERM", "SIGINT"):
            os.kill(os.getpid(), signal.Signals[name])
            assert StopRequest.REASONS[stop.code()] == name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_stops_after_the_exit_of_torchrun_but_not_of_another_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: False)
    with contextlib.ExitStack() as cleanup:
        stop = StopRequest(tmp_path / "STOP", cleanup)
        assert not stop.code()  # for example, with nohup
        monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
        assert StopRequest.REASONS[stop.code()] == "torchrun exited"


def test_an_empty_variable_stop_file_is_ignored(tmp_path, monkeypatch):
    """As a path, the empty text would be the working directory, which exists."""
    monkeypatch.setenv("STOP_FILE", "")
    with contextlib.ExitStack() as cleanup:
        stop = StopRequest(tmp_path / "STOP", cleanup)
        assert not stop.code()
        (tmp_path / "STOP").touch()
        assert StopRequest.REASONS[stop.code()] == "STOP file"


def test_a_temporary_failure_of_the_file_system_does_not_stop_a_run(tmp_path, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with contextlib.ExitStack() as cleanup:
        stop = StopRequest(tmp_path / "STOP", cleanup)
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fail)
            assert not stop.code()
        (tmp_path / "STOP").touch()
        assert StopRequest.REASONS[stop.code()] == "STOP file"


def test_the_reason_of_an_nccl_error_is_its_last_error():
    error = DistBackendError("NCCL error in: a long path, unhandled error\nLast error:\nno memory")
    assert explain_failure(error, 1)[1] == "rank 1: NCCL reports: no memory"
    error = DistBackendError(f"NCCL error\nncclRemoteError: lost\nLast error:\n{'closed ' * 50}")
    assert "another rank was killed" in explain_failure(error, 1)[1]
    assert "closed closed): see" in explain_failure(error, 1)[1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        # The allocators of the GPU and of the CPU write these messages.
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "allocating 2.00 GiB: "),
        (RuntimeError("you tried to allocate 64 bytes."), "allocating 64 bytes: "),
        (RuntimeError("[/x/gloo/pair.cc:1] closed"), "another rank was killed"),
        (UserError("cannot read \udcff.tsv"), "cannot read \\udcff.tsv"),
    ],
)
def test_the_message_of_an_expected_failure_has_no_traceback(error, expected):
    trace, reason = explain_failure(error, 1)
    assert trace == "" and expected in reason


def test_an_error_of_another_rank_is_only_logged(caplog, capsys):
    report_error("error: a reason", is_printed=False)
    assert caplog.messages == ["error: a reason"] and capsys.readouterr().err == ""


def test_a_failed_rank_prints_its_output_and_skips_the_shutdown():
    """Python buffers the output, because it is a pipe."""
    environment = {**os.environ, "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    code = "import atexit, ddp_ends; atexit.register(print, 'shutdown'); print('printed')"
    command = [sys.executable, "-c", f"{code}; ddp_ends.end_process(3)"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (result.returncode, result.stdout) == (3, "printed\n")


def test_under_nohup_sighup_does_not_stop_a_run(tmp_path):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.ExitStack() as cleanup:
            StopRequest(tmp_path / "STOP", cleanup)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)
