"""ddp_ends.py: requests to stop a run, and reasons of failures."""

import contextlib
import errno
import os
import signal

from torch.distributed import DistBackendError

from ddp_ends import StopRequest, explain_failure


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


def test_under_nohup_sighup_does_not_stop_a_run(tmp_path):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.ExitStack() as cleanup:
            StopRequest(tmp_path / "STOP", cleanup)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)
