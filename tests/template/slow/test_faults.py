"""Runs that are killed, hang, fail or get a NaN.

`python -m tests.check faults` has more faults.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.template.fixtures import ROOT, fork_ranks, join, launch_forked
from tests.template.slow.processes import SETTINGS, started, status_of, wait_for_growth
from tests.tools.faults import FAULTS, Fault, lost, run_fault
from tests.tools.runs import difference, launch, newest_checkpoint, read_metrics

WITH_TORCHRUN = ["a rank killed under --max-restarts=3", "SIGTERM to torchrun", "torchrun killed"]
WITHOUT = [
    "a rank killed in the optimiser",
    "rank 0 killed with half a checkpoint written",
    "rank 0 killed between best.pt and the checkpoint",
    "SIGINT to a rank, mid-accumulation",
    "SIGUSR1 to a rank in evaluation",
    "a checkpoint that holds code",
    "a full disk at a checkpoint",
    "a NaN in one rank's loss",
    "non-finite weights",
    "an exception in rank 0's data loading",
    "a rank hanging in data loading",
]


@pytest.fixture
def start_ranks(tmp_path, tables) -> Callable[..., list]:
    """start_ranks(world_size, *overrides, fault="") starts train.py; returns its processes."""
    stores = []

    def start(world_size: int, *overrides: str, fault: str = "") -> list:
        script = "train.py"
        arguments = [*tables, *SETTINGS, *overrides]
        if fault:
            script = "tests/template/faulty.py"
            arguments = [*fault.split(), "--", "train.py", *arguments]
        store, ranks = fork_ranks(tmp_path, world_size, script, arguments)
        stores.append(store)  # the store must stay alive while the processes run
        return ranks

    return start


# ---- A kill --------------------------------------------------------------------------------------
def test_a_kill_while_steps_are_captured_loses_nothing(start_ranks, tmp_path):
    """Steps are captured at each start, also when a run resumes."""
    assert join(start_ranks(2, "run.name=whole", fault="simulate_gpu")) == [0, 0]
    assert join(start_ranks(2, fault="simulate_gpu stop_at_step:3")) == [0, 0]
    assert 0 not in join(start_ranks(2, fault="simulate_gpu kill_while_capturing:1"))
    assert join(start_ranks(2, fault="simulate_gpu")) == [0, 0]
    log = (tmp_path / "runs/default/log.rank0.txt").read_text()
    assert log.count("; CUDA graphs") == 2
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole") == ""


# ---- The faults of tests.check -------------------------------------------------------------------
@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    parent = tmp_path_factory.mktemp("faults")
    status, output = launch_forked(2, ["fault-worker", str(parent), "run.name=reference"])
    assert status == 0, output
    return parent / "reference"


def named(name: str) -> Fault:
    """Returns the fault with this name."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    return fault


@pytest.mark.parametrize("name", WITH_TORCHRUN + WITHOUT)
def test_a_fault_loses_nothing(undisturbed, name):
    fault = named(name)
    folder = undisturbed.parent / str(FAULTS.index(fault))
    arguments = ["fault-worker", str(undisturbed.parent), *fault.arguments]

    def launch_once(*positional: Any, **options: Any) -> tuple[int, str]:
        """Uses torchrun only for the first launch of faults that need it."""
        is_real = name in WITH_TORCHRUN and "torchrun" in options
        return (launch if is_real else launch_forked)(*positional, **options)

    assert run_fault(fault, folder, undisturbed, arguments, launch_once) == ""


def test_a_resumed_run_adds_the_gradients_of_three_ranks_in_the_same_order(tmp_path):
    """The sum of three numbers depends on the order in which they are added.

    DDP orders its buckets according to the first backward pass of the process.
    """
    fault = named("one of 3 ranks killed, mid-accumulation")
    arguments = ["fault-worker", str(tmp_path)]
    status, output = launch_forked(fault.ranks, [*arguments, "run.name=reference"])
    assert status == 0, output
    assert run_fault(fault, tmp_path / "0", tmp_path / "reference", arguments, launch_forked) == ""


def test_a_changed_result_is_detected(undisturbed, tmp_path):
    """`lost` compares the files in the reverse order of these changes."""
    other = tmp_path / "other"
    best = other / "checkpoints/best.pt"
    metrics = other / "metrics.jsonl"

    def spoil(path: Path) -> dict:
        state = torch.load(path, weights_only=True)
        state["model"]["encoder.embedding"][0, 0] += 1e-6
        torch.save(state, path)
        return state

    shutil.copytree(undisturbed, other)
    assert lost(other, undisturbed, 0.0) == ""
    state = spoil(best)
    assert "embedding in best.pt " in lost(other, undisturbed, 0.0)
    torch.save(state | {"step": state["step"] + 1}, best)
    assert "best.pt is of step" in lost(other, undisturbed, 0.0)
    metrics.write_text(metrics.read_text().replace('"loss": 1.', '"loss": 2.', 1))
    assert "loss differs" in lost(other, undisturbed, 0.0)
    spoil(newest_checkpoint(other))
    assert "the final encoder.embedding " in lost(other, undisturbed, 0.0)


# ---- Hangs ---------------------------------------------------------------------------------------
def test_a_frozen_rank_is_named_and_the_job_ends(start_ranks, tmp_path):
    run = tmp_path / "runs/default"
    ranks = start_ranks(2, "optim.epochs=500", "ddp.timeout_s=2")
    wait_for_growth(run / "metrics.jsonl", ranks)
    deadline = time.monotonic() + 60
    while not read_metrics(run, "train") and time.monotonic() < deadline:
        time.sleep(0.05)  # until the first step, ddp.startup_timeout_s is the limit
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(30)
    assert ranks[0].exitcode == 1
    ranks[1].kill()
    join(ranks)
    output = (tmp_path / "rank0.stderr").read_text()
    assert "error: no progress for 2 s" in output
    assert "rank 1: frozen or its machine has failed, last seen in " in output
    assert "stack of rank 0 (no progress" in output and "train.py" in output
    status = status_of(run)
    assert status["state"] == "failed" and "rank 1: frozen" in status["reason"]


def test_a_rank_that_waits_for_a_killed_one_reports_this_before_torchrun_kills_it(train, tmp_path):
    """After a failure, torchrun waits 30 s, even if the variable below has a larger value."""
    result = train(
        2,
        *SETTINGS,
        fault="kill_in_optimiser:1 hang_in_optimiser:0",
        launcher=True,
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="240",
    )
    assert result.returncode == 1
    status = status_of(tmp_path / "runs/default")
    assert status["state"] == "failed"
    assert status["reason"] == "rank 0: SIGTERM while waiting in optimiser of step 0"


def test_a_single_process_with_a_long_step_stops_after_it(tmp_path, tables):
    """This may take any time, because no torchrun kills the process."""
    command = [sys.executable, ROOT / "tests/template/faulty.py", "slow_data:0:3", "--", "train.py"]
    command += [*tables, *SETTINGS]
    run = tmp_path / "runs/default"
    with started(command, tmp_path, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2") as process:
        wait_for_growth(run / "checkpoints/best.pt")
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert status_of(run)["state"] == "stopped"


def test_a_suspended_job_continues(start_ranks, tmp_path):
    """All processes are suspended for longer than ddp.timeout_s, as a scheduler may do."""
    ranks = start_ranks(2, "optim.epochs=40", "ddp.timeout_s=4")
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", ranks)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(8)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGCONT)
    assert join(ranks) == [0, 0], (tmp_path / "rank0.stderr").read_text()


# ---- Failures ------------------------------------------------------------------------------------
def test_a_model_too_large_for_memory_is_an_error_with_one_message(train):
    result = train(0, "model.hidden=4000000000")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert re.fullmatch(
        r"error: rank 0: out of memory [^\n]*\n",
        result.stderr,
    )


def test_a_failure_ends_ranks_that_are_busy_with_something_else(start_ranks, tmp_path):
    start = time.monotonic()
    assert join(start_ranks(2, fault="fail_beside_a_busy_rank")) == [1, 1]
    assert time.monotonic() - start < 40  # GRACE_S, and the time to start the processes
    status = status_of(tmp_path / "runs/default")
    assert status["state"] == "failed"
    assert status["reason"] == "rank 1: ZeroDivisionError: division by zero"
