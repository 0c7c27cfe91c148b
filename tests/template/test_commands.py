"""The commands, called as functions: the results and output of `main`.

Each test also checks that the command leaves the process as it was.
"""

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import json
import logging
import math
import os
import re
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import analyse
import ddp_setup
import ddp_threads
import ddp_watchdog
import predict
import train
from config import restored_process
from ddp_ends import StopRequest
from predictor import Ensemble
from task import KnockoutTask
from tests.template.fixtures import DEFAULTS, ROOT, SMALL, write_defaults
from tests.tools.runs import difference

Train = Callable[..., int]


@pytest.fixture
def train_here(tmp_path, tables, monkeypatch) -> Train:
    """train_here(*overrides) calls `train.main` on the tiny tables, in the folder of the test.

    Commands use 3 threads.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ddp_threads, "choose_threads", lambda count: (3, "of this test"))
    write_defaults(tmp_path)

    def start(*overrides: str) -> int:
        return train.main([*tables, *SMALL, "--config", DEFAULTS, *overrides])

    return start


@pytest.fixture(autouse=True)
def _left_as_it_was(tmp_path):
    """Checks after each test of this file that the process is as it was before."""
    before = state_of_process(tmp_path)
    yield
    after = state_of_process(tmp_path)
    for name, state in before.items():
        assert after[name] == state, name


def state_of_process(folder: Path) -> dict[str, Any]:
    """Returns everything that a command could change, such as the files open in a folder."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself has one
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST")
    logger = logging.getLogger()
    return {
        "signals": {number: signal.getsignal(number) for number in StopRequest.SIGNALS},
        "wakeup fd": wakeup_fd,
        "handlers of the log": list(logger.handlers),
        "level of the log": logger.level,
        "raised by the log": logging.raiseExceptions,
        "warnings": warnings.showwarning,
        "environment": environment,
        "random numbers": torch.get_rng_state().tolist(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "threads of torch": torch.get_num_threads(),
        "type of numbers": torch.get_default_dtype(),
        "threads": [thread.name for thread in threading.enumerate()],
        "open files": [target for target in targets if target.startswith(str(folder))],
        "process group": dist.is_initialized(),
        "stdout": sys.stdout,
    }


def status_of(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "status.json").read_text())


# ---- Each command, twice -------------------------------------------------------------------------
def test_runs_are_trained_resumed_predicted_and_analysed_in_one_process(train_here, capsys):
    assert train_here("run.name=a", "run.deterministic=true") == 0
    first = capsys.readouterr()
    assert first.err == "" and first.out.count("test      loss") == 1
    assert ", threads 3 (of this test)," in first.out
    assert train_here("run.name=b") == 0
    second = capsys.readouterr()
    assert second.err == "" and second.out.count("test      loss") == 1
    assert difference(Path("runs/a"), Path("runs/b")) == ""
    for _ in range(2):
        assert predict.main(["scores.tsv", "runs/a", "runs/b"]) == 0
        assert capsys.readouterr().out.count("results for 200 rows") == 1
        assert analyse.main(["runs/a"]) == 0
        assert capsys.readouterr().out.count("written: ") == 1
    (command, *_) = Path("runs/a/environment.txt").read_text().splitlines()
    assert " train.py data.edges=edges.tsv " in command and command.endswith("=true")


def test_each_run_has_its_own_warnings(train_here):
    assert train_here() == 0
    assert train_here("optim.epochs=2", "optim.lr=0.5") == 0
    (warning,) = status_of("runs/default")["warnings"]
    assert "optim.lr=0.01" in warning
    assert train_here("run.name=other") == 0
    assert status_of("runs/other")["warnings"] == []


def test_help_is_a_success(capsys):
    for main in (train.main, predict.main, analyse.main):
        assert main(["--help"]) == 0
        assert capsys.readouterr().out.startswith("usage: ")


# ---- Failures ------------------------------------------------------------------------------------
def test_wrong_arguments_are_an_error_of_one_line(train_here, capsys):
    for _ in range(2):
        assert train_here("optim.lrr=1") == 2
        assert_one_line(capsys, "error: unknown option optim.lrr")
        assert predict.main(["scores.tsv"]) == 2
        assert_one_line(capsys, "error: the following arguments are required: RUN")
        assert analyse.main([]) == 2
        assert_one_line(capsys, "error: the following arguments are required: RUN")
        assert analyse.main(["runs/none"]) == 2
        assert_one_line(capsys, "error: runs/none has no test.tsv: ")


def assert_one_line(capsys: pytest.CaptureFixture, beginning: str) -> None:
    """Checks that stderr is one line with this beginning."""
    error = capsys.readouterr().err
    assert error.startswith(beginning) and error.count("\n") == 1


def test_files_in_a_folder_without_permission_are_an_error_of_one_line(
    train_here, tables, capsys, monkeypatch
):
    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any, *arguments: Any, **options: Any) -> Any:
            if "theirs" in str(path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *arguments, **options)

        return checked

    def is_refused(status: int) -> bool:
        """Returns whether a command with this status printed one line with the reason."""
        error = capsys.readouterr().err
        reason = re.match("error: .*theirs.*Permission denied.*\n$", error)
        return status == 2 and reason is not None

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, refused(getattr(os, name)))
    monkeypatch.setattr(builtins, "open", refused(open))
    monkeypatch.setattr(io, "open", builtins.open)
    assert is_refused(train_here("data.edges=theirs/e.tsv", "data.perturbations=theirs/s.tsv"))
    assert is_refused(train_here("run.dir=theirs/runs"))
    assert is_refused(train_here("run.resume=theirs/best.pt"))
    assert train_here("data.cache_dir=theirs/cache") == 0
    assert re.search("cannot be written, .*: .*Permission denied", capsys.readouterr().out)
    assert is_refused(predict.main(["scores.tsv", "theirs/run"]))
    assert is_refused(predict.main(["theirs/scores.tsv", "runs/default"]))


def test_a_run_that_has_failed_can_be_started_again(train_here, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(KnockoutTask, "loss", lambda *arguments: 1 / 0)
        for _ in range(2):
            assert train_here("run.deterministic=true") == 1
            error = capsys.readouterr().err
            assert error.startswith("Traceback ")
            assert error.endswith("\nerror: rank 0: ZeroDivisionError: division by zero\n")
            assert error.count("error: ") == 1
            assert status_of("runs/default")["state"] == "failed"
    assert train_here() == 0
    assert status_of("runs/default")["state"] == "finished"


def test_a_prediction_that_has_failed_can_be_started_again(train_here, capsys, monkeypatch):
    assert train_here() == 0
    with monkeypatch.context() as patch:
        patch.setattr(Ensemble, "predict", lambda *arguments: 1 / 0)
        for _ in range(2):
            assert predict.main(["scores.tsv", "runs/default"]) == 1
            assert capsys.readouterr().err.endswith(": ZeroDivisionError: division by zero\n")
    assert predict.main(["scores.tsv", "runs/default"]) == 0


def test_results_that_cannot_be_printed_are_a_failure(train_here, capsys, monkeypatch):
    assert train_here() == 0
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails
        monkeypatch.setattr("sys.stdout", full)
        assert analyse.main(["runs/default"]) == 1
    monkeypatch.undo()
    assert "error: cannot print the results: No space left" in capsys.readouterr().err


# ---- Callers of a command ------------------------------------------------------------------------
def test_a_failed_script_does_not_end_the_kernel_of_a_notebook(monkeypatch, capsys):
    """The command `%run train.py` of a notebook handles SystemExit."""
    monkeypatch.setattr("sys.argv", ["train.py", "optim.epochs=x"])
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("the process ends"))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_a_thread_can_train(train_here):
    """Only the main thread can handle signals, and it continues."""
    with ThreadPoolExecutor() as pool:
        assert pool.submit(train_here).result() == 0


def test_a_caller_that_captures_warnings_still_captures_them(train_here):
    logging.captureWarnings(True)
    show_warning = warnings.showwarning
    assert train_here("run.deterministic=true") == 0
    is_as_before = warnings.showwarning is show_warning
    logging.captureWarnings(False)
    assert is_as_before


def test_a_file_system_without_locks_is_used_with_a_warning(train_here, monkeypatch, capsys):
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert train_here() == 0
    reason = "cannot be locked (Function not implemented)"
    assert f"note      runs/default/checkpoints/.lock {reason}: let" in capsys.readouterr().out


def test_a_rank_without_torchrun_is_refused(train_here, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert train_here() == 2
    message = (
        "RANK is set in the environment, but not by torchrun (missing or invalid: 'LOCAL_RANK'): "
    )
    assert message in capsys.readouterr().err


def test_each_chunk_of_a_prediction_counts_as_progress(train_here, monkeypatch):
    """ddp.timeout_s is therefore the limit of each chunk, as it is for a training step."""
    assert train_here() == 0
    limits = []
    step_done = ddp_setup.Distributed.step_done

    def record(ddp: ddp_setup.Distributed, step: int) -> None:
        step_done(ddp, step)
        limits.append((step, ddp.limit_s))

    monkeypatch.setattr(ddp_setup.Distributed, "step_done", record)
    assert predict.main(["scores.tsv", "runs/default", "ddp.timeout_s=77"]) == 0
    assert limits == [(128, 77.0), (200, 77.0)]


# ---- Ctrl-C --------------------------------------------------------------------------------------
def press_ctrl_c(times: int) -> Callable[..., None]:
    """Returns a function that sends SIGINT to this process so many times."""

    def press(*arguments: object) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    return press


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_training_and_a_second_ctrl_c_interrupts_it(
    train_here, monkeypatch, capsys, times
):
    press = press_ctrl_c(times)
    loss = KnockoutTask.loss
    with monkeypatch.context() as patch:
        patch.setattr(KnockoutTask, "loss", lambda *arguments: press() or loss(*arguments))
        status = train_here()
    captured = capsys.readouterr()
    if times == 1:
        assert status == 0 and "(SIGINT): the same command resumes the run" in captured.out
        assert status_of("runs/default")["state"] == "stopped"
    else:
        assert status == 1 and captured.err == "error: interrupted\n"
        assert status_of("runs/default")["state"] == "failed"


def test_ctrl_c_before_training_interrupts_the_command(train_here, monkeypatch, capsys):
    monkeypatch.setattr(KnockoutTask, "load", press_ctrl_c(1))
    assert train_here() == 1
    assert capsys.readouterr().err == "error: interrupted\n"
    assert not Path("runs").exists()


# ---- Under torchrun ------------------------------------------------------------------------------
@pytest.fixture
def under_torchrun(monkeypatch, tmp_path) -> Iterator[pytest.MonkeyPatch]:
    """Sets the environment as if torchrun had launched this process as its only rank."""
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9)
    )
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"MASTER_PORT": store.port, "TORCHELASTIC_ERROR_FILE": "error.json"}
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        for name, value in variables.items():
            patch.setenv(name, str(value))
        yield patch


def reported() -> str:
    """Returns torchrun's report of a failure of this process, which is from its error file."""
    failure = ProcessFailure(0, os.getpid(), 1, "error.json")
    return ChildFailedError("train.py", {0: failure}).format_msg().rstrip("=")


def test_a_single_rank_leaves_its_process_group(train_here, under_torchrun, capsys, tmp_path):
    """Nothing in torchrun's store affects a later group, such as the failure of an earlier one."""
    with under_torchrun.context() as patch:
        assert train_here("run.name=good") == 0
        assert not dist.is_initialized()
        for problem in ("first", "second"):
            error = KeyError(problem)
            patch.setattr(KnockoutTask, "loss", lambda *arguments, error=error: raise_it(error))
            assert train_here(f"run.name={problem}") == 1
            assert not dist.is_initialized()
            status = json.loads((tmp_path / "runs" / problem / "status.json").read_text())
            assert problem in status["reason"]
    assert capsys.readouterr().err.count("\nerror: ") == 2


def test_ranks_that_torchrun_restarts_do_not_see_the_failure_of_earlier_ranks(under_torchrun):
    for start in range(2):
        under_torchrun.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        under_torchrun.setattr(ddp_setup, "group_numbers", itertools.count())  # a new process
        with restored_process():
            ddp = ddp_setup.setup(ddp_setup.Distributed(ddp_setup.DDPConfig()))
            try:
                assert ddp.first_failure(f"of start {start}") == (f"of start {start}", True)
            finally:
                ddp.close()


def test_a_group_has_both_time_limits_and_a_single_rank_none(under_torchrun):
    """The watchdog has its own connection to the store, because calls of the rank can block."""
    watchdogs = []
    of_groups = []
    start_thread = ddp_watchdog.Watchdog.start
    join_group = dist.init_process_group

    def start(watchdog: ddp_watchdog.Watchdog) -> None:
        watchdogs.append(watchdog)
        start_thread(watchdog)

    def init_process_group(backend: str, **options: Any) -> None:
        of_groups.append(options)
        join_group(backend, **options)

    under_torchrun.setattr(ddp_watchdog.Watchdog, "start", start)
    under_torchrun.setattr(dist, "init_process_group", init_process_group)
    limits = ddp_setup.DDPConfig(startup_timeout_s=40, timeout_s=3)
    with restored_process():
        ddp = ddp_setup.setup(ddp_setup.Distributed(limits))
        ddp.close()
    assert [options["timeout"] for options in of_groups] == [timedelta(seconds=43)]
    (watchdog,) = watchdogs
    assert watchdog.patience == math.inf and watchdog.store is not ddp.store


def raise_it(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("method", ["report_failure", "publish_failure"])
def test_an_interrupt_while_a_failure_is_reported_is_raised(train_here, monkeypatch, method):
    """For example, by a second Ctrl-C. A remaining thread would later end a notebook's kernel."""
    monkeypatch.setattr(KnockoutTask, "loss", lambda *arguments: 1 / 0)
    interrupt = KeyboardInterrupt()
    monkeypatch.setattr(ddp_setup.Distributed, method, lambda *arguments: raise_it(interrupt))
    with pytest.raises(KeyboardInterrupt):
        train_here()


def test_the_report_of_torchrun_ends_with_the_error(train_here, under_torchrun):
    assert train_here("optim.epochs=x") == 2
    assert reported().endswith("traceback : error: optim.epochs must be int >= 1, not 'x'\n")
    with under_torchrun.context() as patch:
        patch.setattr(KnockoutTask, "loss", lambda *arguments: 1 / 0)
        assert train_here() == 1
    assert reported().endswith("error: rank 0: ZeroDivisionError: division by zero\n")
    assert "Traceback (most recent" in reported()
    ddp = ddp_setup.Distributed(ddp_setup.DDPConfig())
    ddp.publish_failure("no progress for 3 s")  # the watchdog calls this
    assert "traceback : error: no progress for 3 s\n" in reported()
    assert train_here("run.name=killed") == 0
    # The file has the text that a SIGKILL would leave.
    assert "SIGKILL" in reported() and "repeat the command to resume" in reported()
