"""What is left of a run that was killed, stopped or fed with NaN; `python -m tests.check faults` has them all."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_setup import DDPConfig, Distributed, RunError, StopRequest, Watchdog
from tests import check, faults
from tests.bench import CountSynchronisations
from tests.conftest import ROOT, fork_ranks, join, launch_forked
from tests.faults import FAULTS, difference, endure
from train import (
    Config,
    OptimConfig,
    RunConfig,
    RunFolder,
    SkippedSteps,
    build_optimizer,
    optimizer_step,
    write_atomically,
)

SETTINGS = ["data.batch_size=32", "model.hidden=8", "optim.epochs=8", "optim.accumulate=2", "log.every_steps=1"]
SETTINGS += ["checkpoint.every_steps=2", "checkpoint.keep_last=3"]


def test_sixteen_kills_at_random_moments_lose_nothing(tmp_path, tables):
    """Of one rank or of all, mostly in training, several in a row on one run."""
    words = [*tables, *SETTINGS]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*words, "run.name=whole"])
    assert join(ranks) == [0, 0]
    draw, kills, number = random.Random(), 0, 0
    seed = draw.randrange(10**6)
    draw.seed(seed)
    while kills < 16:
        folder = tmp_path / "runs" / str(number)
        _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*words, f"run.name={number}"])
        wait_for_growth(folder / "metrics.jsonl", ranks)
        time.sleep(draw.uniform(0, 0.7))
        victims = draw.choice([ranks, ranks[:1], ranks[1:]])
        kills += any(process.exitcode is None for process in victims)
        for process in victims:
            process.kill()
        codes = join(ranks)
        if codes == [0, 0]:  # it was over before
            assert difference(folder, tmp_path / "runs/whole", 0.0) == "", f"seed {seed}, {kills} kills"
            number += 1
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*words, f"run.name={number}"])
    assert join(ranks) == [0, 0]
    assert difference(tmp_path / "runs" / str(number), tmp_path / "runs/whole", 0.0) == "", f"seed {seed}"


def wait_for_growth(path: Path, ranks: list) -> None:
    before = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + 60
    while (path.stat().st_size if path.exists() else 0) <= before and time.monotonic() < deadline:
        if any(process.exitcode is not None for process in ranks):
            return
        time.sleep(0.01)


def test_kills_of_torchrun_at_random_moments_lose_nothing(tmp_path, tables):
    """Its workers save and leave by themselves, and the next start waits for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    words = [*tables, *SETTINGS]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*words, "run.name=whole"])
    assert join(ranks) == [0, 0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kill in (True, True, False):
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                [*command, *words], cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            if kill:
                wait_for_growth(tmp_path / "runs/default/metrics.jsonl", [])
                time.sleep(random.uniform(0, 0.3))
                process.kill()
            assert process.wait(60) == (-signal.SIGKILL if kill else 0), (tmp_path / "output").read_text()
    rows = (tmp_path / "runs/default/metrics.jsonl").read_text().splitlines()
    events = [json.loads(row).get("reason") for row in rows]
    assert events.count("the end of torchrun") >= 1
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole", 0.0) == ""


WITH_TORCHRUN = ["a rank killed under --max-restarts=3", "SIGTERM to torchrun"]
WITHOUT = [
    "a rank killed in the optimiser",
    "rank 0 killed with half a checkpoint written",
    "rank 0 killed between best.pt and the checkpoint",
    "SIGINT to a rank, mid-accumulation",
    "SIGUSR1 to a rank in evaluation",
    "a checkpoint that holds code",
    "the disk full at a checkpoint",
    "a NaN in one rank's loss",
    "an infinite loss",
    "a NaN with optim.on_nonfinite=skip",
    "weights that are not finite",
    "an exception in rank 0's data",
    "an exception in evaluation",
    "a rank asleep in its data",
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    parent = tmp_path_factory.mktemp("faults")
    status, output = launch_forked(2, ["fault-worker", str(parent), "run.name=reference"])
    assert status == 0, output
    return parent / "reference"


@pytest.mark.parametrize("name", WITH_TORCHRUN + WITHOUT)
def test_a_fault_loses_nothing(undisturbed, name):
    number, fault = next((i, fault) for i, fault in enumerate(FAULTS) if fault.name == name)
    folder = undisturbed.parent / str(number)
    words = ["fault-worker", str(undisturbed.parent), *fault.words]
    launch = check.launch if name in WITH_TORCHRUN else launch_forked
    assert endure(fault, folder, undisturbed, words, launch) == ""


def test_a_changed_result_is_seen(undisturbed, tmp_path):
    """What `faults` compares with, changed in one number."""
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    lines = (undisturbed / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines)
    newest = faults.newest(undisturbed)
    state = torch.load(newest, weights_only=True)
    torch.save(state, other / "checkpoints" / newest.name)
    assert difference(other, undisturbed, 0.0) == ""
    state["model"]["embedding"][0, 0] += 1e-6
    torch.save(state, other / "checkpoints" / newest.name)
    assert "embedding differs" in difference(other, undisturbed, 0.0)
    state["model"]["embedding"].copy_(torch.load(newest, weights_only=True)["model"]["embedding"])
    torch.save(state, other / "checkpoints" / newest.name)
    (other / "metrics.jsonl").write_text(lines.replace('"loss": 1.', '"loss": 2.', 1))
    assert "loss differs" in difference(other, undisturbed, 0.0)


def test_a_frozen_rank_is_named_and_the_job_ends(tmp_path, tables):
    words = [*tables, *SETTINGS, "optim.epochs=500", "ddp.timeout_s=2"]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", words)
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", ranks)
    time.sleep(0.5)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(30)
    assert ranks[0].exitcode == 1
    ranks[1].kill()
    join(ranks)
    output = (tmp_path / "rank0.stderr").read_text()
    assert "error: no progress for 2 s" in output and "rank 1: not heard of for " in output
    assert "rank 0: in " in output and "rank 0 is here:" in output and "train.py" in output
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed" and "rank 1: not heard of" in status["reason"]


def test_ctrl_c_in_one_process_stops_at_a_step_boundary(tmp_path, tables):
    words = [*tables, *SETTINGS, "optim.epochs=500", "checkpoint.every_steps=100000"]
    command = [sys.executable, ROOT / "train.py", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", [])
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "asked by SIGINT: the same command goes on from there" in output
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "stopped" and status["reason"] == "SIGINT"
    assert (tmp_path / f"runs/default/checkpoints/step_{status['step']:08d}.pt").exists()


def test_skipped_steps_are_counted_in_a_row_and_under_fp16_only_at_scale_one():
    alone = Distributed(0, 0, 1, 1, torch.device("cpu"), launched=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    skipped = SkippedSteps(OptimConfig(on_nonfinite="skip", max_skips=2))
    for step, (loss, norm) in enumerate([(bad, bad), (good, good), (good, bad), (good, good)], start=1):
        skipped.judge(loss, norm, scaler)
        assert skipped.too_many(alone, step) == 0
    assert skipped.total == 1  # the third was an overflow at a scale of 2
    scaler.update(1.0)
    for norm in (bad, bad, good):  # steps 5 to 7
        skipped.judge(good, norm, scaler)
    assert skipped.too_many(alone, 7) == 6 and skipped.total == 3
    skipped.load_state_dict([9, 7, 5])  # saved under a higher limit
    assert skipped.in_row == 1


def test_ranks_count_the_same_skipped_steps(workers):
    workers(2, "skipped_steps")


def test_a_step_and_its_count_wait_for_no_value():
    """What would be a host synchronisation on a GPU; the optimiser of `torch` in its default form would need one."""
    model = torch.nn.Linear(2, 1)
    for fused in (True, False):
        optimizer = build_optimizer(model, OptimConfig(), Distributed(0, 0, 1, 1, torch.device("cpu"), launched=False))
        if not fused:
            optimizer = torch.optim.AdamW(model.parameters())
        scaler, skipped = torch.amp.GradScaler("cpu", init_scale=1.0), SkippedSteps(OptimConfig())
        loss = model(torch.ones(1, 2)).sum()
        scaler.scale(loss).backward()
        with CountSynchronisations() as count:
            grad_norm = optimizer_step(model, optimizer, scaler, OptimConfig())
            skipped.judge(loss.detach(), grad_norm, scaler)
        assert (count.seen == []) is fused


def test_stop_requests_have_reasons(tmp_path):
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    try:
        stop = StopRequest(tmp_path / "STOP")
        assert stop.code() == 0 and StopRequest.reason(0) == ""
        (tmp_path / "STOP").touch()
        stop.next_look = 0
        assert StopRequest.reason(stop.code()) == "the file STOP"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert StopRequest.reason(stop.code()) == "SIGUSR1"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_rank_that_waits_for_a_slow_one_is_not_stuck():
    env = Distributed(0, 0, 2, 2, torch.device("cpu"), launched=False)
    watchdog = Watchdog(env, DDPConfig(timeout_s=3), dist.HashStore())
    watchdog.limit, now = 3, time.monotonic()
    waiting, moving = [7, "evaluation", 9, 4.0, 0], [7, "evaluation", 9, 0.1, 5]
    watchdog.heard = {0: (waiting, now), 1: (moving, now)}
    assert not watchdog._stuck()
    watchdog.heard[1] = (moving, now - 4)  # it was heard of four seconds ago
    assert watchdog._stuck()
    watchdog.heard[1] = ([6, "save", 9, 4.0, 8], now)
    assert watchdog._stuck()
    watchdog.heard[1] = ([6, "save", 9, 1.0, 8], now)
    assert not watchdog._stuck()
    verdict, others = watchdog._report(silent=[])
    assert verdict.endswith("rank 1: in save of step 9 for 1 s") and others == [
        "rank 0: in evaluation of step 9 for 4 s"
    ]


def test_the_watchdog_waits_longer_until_the_first_step_is_over():
    env = Distributed(0, 0, 1, 1, torch.device("cpu"), launched=False)
    watchdog = Watchdog(env, DDPConfig(startup_timeout_s=9, timeout_s=3), dist.HashStore())
    limits = []
    for phase, step in (("agreement", 7), ("forward", None), ("agreement", 8), ("forward", None)):
        watchdog.enter(phase, step)
        limits.append(watchdog.limit)
    assert limits == [9, 9, 3, 3]


def test_a_signal_to_all_processes_stops_cleanly_with_loader_processes(tmp_path, tables):
    """As Ctrl-C in a terminal and a cluster's cancel do."""
    words = [*tables, *SETTINGS, "optim.epochs=500", "data.workers=2"]
    command = [sys.executable, ROOT / "train.py", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", [])
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "asked by SIGTERM" in output, output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


STOPPED_AFTER_NAN = """
import os, pathlib, signal, train
learning_rate, squared_error = train.learning_rate, train.squared_error
def spoil(step, *arguments):
    if step == 5 and not pathlib.Path("done").exists():
        pathlib.Path("done").touch()
        train.squared_error = lambda *a: squared_error(*a) * float("nan")
        os.kill(os.getpid(), signal.SIGTERM)
    return learning_rate(step, *arguments)
train.learning_rate = spoil
train.main()
"""


def test_a_step_that_is_not_finite_is_not_saved_by_a_clean_stop(train, tmp_path):
    (tmp_path / "spoiled.py").write_text(STOPPED_AFTER_NAN)
    words = ["optim.epochs=2", "log.every_steps=4", "checkpoint.every_steps=3"]
    train(0, *words, "run.name=whole").check()
    result = train(0, *words, script=tmp_path / "spoiled.py")
    assert result.returncode == 1 and "step 6 is not finite" in result.stderr
    train(0, *words, script=tmp_path / "spoiled.py").check()
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole", 0.0) == ""


BUSY = """
import os, time, data
build, rank = data.KnockoutDataset.__getitems__, os.environ["RANK"]
def busy(*arguments):
    busy.calls += 1
    if busy.calls == 3:
        time.sleep(1000) if rank == "0" else 1 / 0
    return build(*arguments)
busy.calls = 0
data.KnockoutDataset.__getitems__ = busy
import train
train.main()
"""


def test_a_failure_ends_ranks_that_are_busy_with_something_else(tmp_path, tables):
    (tmp_path / "busy.py").write_text(BUSY)
    start = time.monotonic()
    _store, ranks = fork_ranks(tmp_path, 2, str(tmp_path / "busy.py"), [*tables, *SETTINGS])
    assert join(ranks) == [1, 1]
    assert time.monotonic() - start < 40  # FAILED_S and the start of the processes
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed" and status["reason"] == "rank 1: ZeroDivisionError: division by zero"


DIES_ONCE = """
import os, pathlib, train
learning_rate = train.learning_rate
def die(step, *arguments):
    if step == 7 and os.environ["RANK"] == "1" and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os._exit(9)
    return learning_rate(step, *arguments)
train.learning_rate = die
train.main()
"""


def test_never_goes_on_in_a_folder_of_its_own_launch_alone(torchrun, tables, tmp_path):
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    restarting = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command = [*restarting, tmp_path / "dies.py", *tables, "data.batch_size=32", "model.hidden=8", "run.resume=never"]
    result = torchrun(0, *command, "optim.epochs=2").check()
    assert (tmp_path / "died").exists() and "resumed at step 5" in result.stdout
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.pt")}
    result = torchrun(0, *command, "optim.epochs=3")
    assert result.returncode == 1
    assert (
        result.stderr.count("error: run.resume=never but runs/default is not empty") == 2
    )  # and again after a restart
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.pt")}


def test_files_that_are_not_what_their_names_say_are_passed_over(train, tmp_path):
    train(0, "optim.epochs=2").check()
    folder = tmp_path / "runs/default/checkpoints"
    newest = max(folder.glob("step_*.pt"))
    shutil.copy(newest, folder / "step_00000100.pt")
    (folder / "step_original.pt").touch()
    result = train(0, "optim.epochs=2").check()
    assert (
        f"passed over a damaged checkpoint: {folder.relative_to(tmp_path)}/step_00000100.pt is of step 10"
        in result.stdout
    )
    assert "resumed at step 10" in result.stdout


def test_the_best_model_must_be_there_and_the_right_one(tmp_path):
    alone = Distributed(0, 0, 1, 1, torch.device("cpu"), launched=False)
    folder = RunFolder(Config(run=RunConfig(dir=str(tmp_path), name="run")), alone, "")
    folder.checkpoints.mkdir(parents=True)
    with pytest.raises(RunError, match=r"best\.pt does not exist; the same command tests the last model instead"):
        folder.best_model(4)
    keys = ("model", "optimizer", "scaler", "skipped", "evaluated", "best", "config", "data")
    torch.save({**dict.fromkeys(keys), "step": 8}, folder.checkpoints / "best.pt")
    with pytest.raises(RunError, match=r"best\.pt is of step 8, not 4"):
        folder.best_model(4)


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_suspended_job_goes_on(tmp_path, tables):
    """As a scheduler suspends all its processes, for longer than ddp.timeout_s."""
    words = [*tables, *SETTINGS, "optim.epochs=40", "ddp.timeout_s=4"]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", words)
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", ranks)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(8 if number == signal.SIGSTOP else 0)
    assert join(ranks) == [0, 0], (tmp_path / "rank0.stderr").read_text()
