"""Runs that are stopped by a signal, with and without processes of the DataLoader."""

import os
import signal
import sys

import pytest

from tests.template.fixtures import ROOT
from tests.template.slow.processes import SETTINGS, VARIABLES, started, status_of, wait_for_growth
from tests.tools.runs import difference


# ---- Signals -------------------------------------------------------------------------------------
def test_ctrl_c_of_launch_sh_ends_without_a_traceback_and_an_error_with_one(tmp_path, tables):
    command = ["bash", ROOT / "launch.sh", *tables, *SETTINGS]
    with started([*command, "optim.epochs=500"], tmp_path, **VARIABLES) as process:
        wait_for_growth(tmp_path / "runs/default/checkpoints/best.pt")
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines()[-1].endswith("(SIGINT): the same command resumes the run")
    assert errors.splitlines()[-1] == "torchrun  ended by SIGINT" and "Traceback" not in errors
    with started([*command, "optim.lr=0.0x"], tmp_path, **VARIABLES) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: " in errors and "ChildFailedError" in errors


def test_a_signal_to_torchrun_stops_cleanly_with_spawned_loader_processes(tmp_path, tables):
    """Loader processes are spawned, as on a machine with GPUs.

    torchrun sends the signal to the complete process group of each rank.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1"]
    command += [ROOT / "tests/template/faulty.py", "spawn_loader", "--", "train.py"]
    command += [*tables, *SETTINGS, "optim.epochs=500", "data.workers=1"]
    run = tmp_path / "runs/default"
    with started(command, tmp_path) as process:
        wait_for_growth(run / "checkpoints/step_00000004.pt")
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
    status = status_of(run)
    assert (status["state"], status["reason"]) == ("stopped", "SIGUSR1"), errors


def test_a_clean_stop_does_not_save_a_nonfinite_step(train, tmp_path):
    arguments = ["optim.epochs=2", "log.every_steps=4", "checkpoint.every_steps=3"]
    fault = "spoil_a_step_and_stop:5"
    train(0, *arguments, "run.name=whole").check()
    result = train(0, *arguments, fault=fault)
    assert result.returncode == 1 and "step 6 is not finite" in result.stderr
    train(0, *arguments, fault=fault).check()
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole") == ""


# ---- Signals before the first step ---------------------------------------------------------------
def test_without_torchrun_a_run_stops_before_its_first_step(train, tmp_path):
    result = train(2, *SETTINGS, fault="signal_while_loading:torchrun:SIGKILL", launcher=True)
    assert result.returncode == -signal.SIGKILL
    assert "stopped   at step 0 (torchrun exited)" in result.stdout
    status = status_of(tmp_path / "runs/default")
    assert status.pop("warnings") == []
    assert status == {"state": "stopped", "step": 0, "epoch": 0, "reason": "torchrun exited"}


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_a_signal_while_the_tables_are_read_ends_the_process_at_once(train, tmp_path, name):
    """There is nothing to save, so the run folder is not changed."""
    result = train(0, *SETTINGS, fault=f"signal_while_loading:rank:{name}", launcher=True)
    if name == "SIGINT":
        assert result.returncode == 1 and result.stderr == "error: interrupted\n"
    else:
        assert result.returncode == -signal.Signals[name] and result.stderr == ""
    assert not (tmp_path / "runs").exists()


# ---- Processes of the loader ---------------------------------------------------------------------
def test_loader_processes_need_few_file_descriptors(run):
    """A planned batch has hundreds of tensors, which must not need a file descriptor each.

    Systems usually allow 1,024 file descriptors.
    """
    options = "data.batch_size=1024 data.workers=4 optim.epochs=1 model.hidden=8"
    command = f"ulimit -n 1024; exec {sys.executable} {ROOT}/train.py {options}"
    result = run(["bash", "-c", command], timeout=240)
    assert "test      loss" in result.check().stdout


def test_a_batch_that_a_loader_process_cannot_send_ends_the_run_with_the_reason(train):
    result = train(0, *SETTINGS, "data.workers=1", fault="unsendable_batch", launcher=True)
    assert result.returncode == 1
    assert "with_a_function.<locals>.<lambda>" in result.stderr  # the object that is not sent
    assert "error: a DataLoader worker cannot send a batch (" in result.stderr
