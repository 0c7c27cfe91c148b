"""Runs that are killed, stopped or given a NaN; `python -m tests.check faults` runs all of them."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT, fork_ranks, join, launch_forked
from tests.test_data import loader_of_compared_workers
from tests.tools import soak
from tests.tools.faults import FAULTS, run_fault
from tests.tools.runs import difference, launch, newest_checkpoint, read_metrics

SETTINGS = [
    "data.batch_size=32",
    "model.hidden=8",
    "optim.epochs=8",
    "optim.accumulate=2",
    "log.every_steps=1",
]
SETTINGS += ["checkpoint.every_steps=2", "checkpoint.keep_last=3"]


def test_sixteen_kills_at_random_moments_lose_nothing(tmp_path, tables):
    """One rank or all are killed, mostly in training, several times in a row in the same run."""
    # Without torchrun, only the watchdog ends a rank whose gloo has missed that its peer was
    # killed.
    arguments = [*tables, *SETTINGS, "ddp.timeout_s=30"]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*arguments, "run.name=whole"])
    assert join(ranks) == [0, 0]
    draw, kills, number = random.Random(), 0, 0
    seed = draw.randrange(10**6)
    draw.seed(seed)
    while kills < 16:
        folder = tmp_path / "runs" / str(number)
        _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*arguments, f"run.name={number}"])
        wait_for_growth(folder / "metrics.jsonl", ranks)
        time.sleep(draw.uniform(0, 0.7))
        victims = draw.choice([ranks, ranks[:1], ranks[1:]])
        kills += any(process.exitcode is None for process in victims)
        for process in victims:
            process.kill()
        codes = join(ranks)
        if codes == [0, 0]:  # the run finished before the kill
            assert difference(folder, tmp_path / "runs/whole") == "", f"seed {seed}, {kills} kills"
            number += 1
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*arguments, f"run.name={number}"])
    assert join(ranks) == [0, 0]
    assert difference(tmp_path / "runs" / str(number), tmp_path / "runs/whole") == "", (
        f"seed {seed}"
    )


def wait_for_growth(path: Path, ranks: list) -> None:
    before = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + 60
    while (path.stat().st_size if path.exists() else 0) <= before and time.monotonic() < deadline:
        if any(process.exitcode is not None for process in ranks):
            return
        time.sleep(0.01)


def test_kills_of_torchrun_at_random_moments_lose_nothing(tmp_path, tables):
    """Its workers save and exit by themselves, and the next start waits for them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        ROOT / "train.py",
    ]
    arguments = [*tables, *SETTINGS]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*arguments, "run.name=whole"])
    assert join(ranks) == [0, 0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kill in (True, True, False):
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=tmp_path,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            if kill:
                wait_for_growth(tmp_path / "runs/default/metrics.jsonl", [])
                time.sleep(random.uniform(0, 0.3))
                process.kill()
            assert process.wait(60) == (-signal.SIGKILL if kill else 0), (
                tmp_path / "output"
            ).read_text()
    assert "torchrun exited" in [
        row.get("reason") for row in read_metrics(tmp_path / "runs/default", "event")
    ]
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole") == ""


WITH_TORCHRUN = ["a rank killed under --max-restarts=3", "SIGTERM to torchrun"]
WITHOUT = [
    "a rank killed in the optimiser",
    "rank 0 killed with half a checkpoint written",
    "rank 0 killed between best.pt and the checkpoint",
    "SIGINT to a rank, mid-accumulation",
    "SIGUSR1 to a rank in evaluation",
    "a checkpoint that holds code",
    "a full disk at a checkpoint",
    "a NaN in one rank's loss",
    "an infinite loss",
    "a NaN with optim.on_nonfinite=skip",
    "non-finite weights",
    "an exception in rank 0's data loading",
    "an exception in evaluation",
    "a rank hanging in data loading",
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
    arguments = ["fault-worker", str(undisturbed.parent), *fault.arguments]
    assert (
        run_fault(
            fault,
            folder,
            undisturbed,
            arguments,
            launch if name in WITH_TORCHRUN else launch_forked,
        )
        == ""
    )


@pytest.mark.parametrize(
    "name", ["one of 3 ranks killed, mid-accumulation", "one of 4 ranks killed in the forward pass"]
)
def test_a_resumed_run_adds_the_gradients_of_more_than_two_ranks_in_the_same_order(tmp_path, name):
    """Three numbers have sums that depend on the order.

    DDP orders its buckets by a process's first backward pass.
    """
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    arguments = ["fault-worker", str(tmp_path)]
    status, output = launch_forked(fault.ranks, [*arguments, "run.name=reference"])
    assert status == 0, output
    assert run_fault(fault, tmp_path / "0", tmp_path / "reference", arguments, launch_forked) == ""


def test_a_changed_result_is_detected(undisturbed, tmp_path):
    """Changes one number at a time in what `faults` compares."""
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    lines = (undisturbed / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines)
    newest = newest_checkpoint(undisturbed)
    state = torch.load(newest, weights_only=True)
    torch.save(state, other / "checkpoints" / newest.name)
    assert difference(other, undisturbed) == ""
    state["model"]["embedding"][0, 0] += 1e-6
    torch.save(state, other / "checkpoints" / newest.name)
    assert "embedding differs" in difference(other, undisturbed)
    state["model"]["embedding"].copy_(torch.load(newest, weights_only=True)["model"]["embedding"])
    torch.save(state, other / "checkpoints" / newest.name)
    (other / "metrics.jsonl").write_text(lines.replace('"loss": 1.', '"loss": 2.', 1))
    assert "loss differs" in difference(other, undisturbed)


def test_a_frozen_rank_is_named_and_the_job_ends(tmp_path, tables):
    arguments = [*tables, *SETTINGS, "optim.epochs=500", "ddp.timeout_s=2"]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", arguments)
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", ranks)
    deadline = time.monotonic() + 60
    while not read_metrics(tmp_path / "runs/default", "train") and time.monotonic() < deadline:
        time.sleep(0.05)  # until the first step, ddp.startup_timeout_s is the limit
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(30)
    assert ranks[0].exitcode == 1
    ranks[1].kill()
    join(ranks)
    output = (tmp_path / "rank0.stderr").read_text()
    assert (
        "error: no progress for 2 s" in output
        and "rank 1: frozen, or its machine is gone, last in " in output
    )
    assert "stack of rank 0 (no progress" in output and "train.py" in output
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed" and "rank 1: frozen" in status["reason"]


STUCK = """
import ctypes, ddp_setup, train
step, ddp_setup.SIGTERM_S = train.optimizer_step, 1.0
def stuck(*arguments):
    if train.os.environ["RANK"] == "0":
        mutex = ctypes.create_string_buffer(64)  # unlike sleep, it does not wake up for signals
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    return step(*arguments)
train.optimizer_step = stuck
train.main()
"""


def test_a_rank_that_hangs_outside_python_obeys_sigterm(tmp_path, tables):
    """So a rank waits in NCCL for one that was killed.

    torchrun would kill it, and its run would seem to go on.
    """
    (tmp_path / "stuck.py").write_text(STUCK)
    _store, ranks = fork_ranks(tmp_path, 2, str(tmp_path / "stuck.py"), [*tables, *SETTINGS])
    wait_for_growth(tmp_path / "runs/default/checkpoints/best.pt", ranks)
    time.sleep(2)
    ranks[0].terminate()
    ranks[0].join(20)
    assert ranks[0].exitcode == 1
    ranks[1].kill()
    join(ranks)
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == "rank 0: SIGTERM while it waits in optimiser of step 0"


BEHIND_A_KILLED_RANK = """
import ctypes, os, signal, train
def step(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
train.optimizer_step = step
train.main()
"""


def test_a_rank_stuck_behind_a_killed_one_says_so_before_torchrun_kills_it(
    torchrun, tables, tmp_path
):
    """torchrun gives it 30 s, however long it waits for ranks that it stops on request."""
    (tmp_path / "killed.py").write_text(BEHIND_A_KILLED_RANK)
    script = [tmp_path / "killed.py", *tables, *SETTINGS]
    assert torchrun(2, *script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="240").returncode == 1
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == "rank 0: SIGTERM while it waits in optimiser of step 0"


@contextlib.contextmanager
def started(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """Starts a command in `folder`, in its own process group, which does not outlive the block."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, **pipes
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


HUNG = """
import threading, train
train.criterion = lambda *arguments: threading.Event().wait()
train.main()
"""


@pytest.mark.parametrize("signalled", [False, True], ids=["no progress", "SIGTERM"])
def test_a_single_process_that_hangs_ends_with_a_report(tmp_path, tables, signalled):
    (tmp_path / "hung.py").write_text(HUNG)
    command = [sys.executable, "hung.py", *tables, *SETTINGS]
    if not signalled:
        command.append("ddp.startup_timeout_s=6")
    with started(command, tmp_path, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4") as process:
        wait_for_growth(tmp_path / "runs/default/checkpoints/best.pt", [])
        if signalled:
            process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "failed"
    if signalled:
        assert status["reason"] == "rank 0: SIGTERM while it waits in backward of step 0"
    else:
        assert (
            "no progress for 6 s" in errors and "rank 0: in backward of step 0" in status["reason"]
        )
    assert "stack of rank 0 (" in errors and "hung.py" in errors


def test_ctrl_c_in_one_process_stops_at_a_step_boundary(tmp_path, tables):
    arguments = [*tables, *SETTINGS, "optim.epochs=500", "checkpoint.every_steps=100000"]
    command = [sys.executable, ROOT / "train.py", *arguments]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_growth(tmp_path / "runs/default/checkpoints/best.pt", [])
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "(SIGINT): the same command resumes the run" in output
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "stopped" and status["reason"] == "SIGINT"
    assert (tmp_path / f"runs/default/checkpoints/step_{status['step']:08d}.pt").exists()


def test_a_signal_to_all_processes_stops_cleanly_with_loader_processes(tmp_path, tables):
    """Ctrl-C in a terminal and a scheduler's cancel signal all processes."""
    arguments = [*tables, *SETTINGS, "optim.epochs=500", "data.workers=2"]
    command = [sys.executable, ROOT / "train.py", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for_growth(
        tmp_path / "runs/default/checkpoints/best.pt", []
    )  # written when the loader is running
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "(SIGTERM)" in output, output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


SPAWNED = """
import data, train
loader = data.DataLoader
def spawned(*arguments, **options):
    context = "spawn" if options["num_workers"] else None
    return loader(*arguments, **{**options, "multiprocessing_context": context})
data.DataLoader = spawned
if __name__ == "__main__":
    train.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_to_torchrun_stops_cleanly_with_spawned_loader_processes(tmp_path, tables, name):
    """As on GPUs, where loader processes are spawned.

    torchrun signals the whole process group of each rank.
    """
    (tmp_path / "spawned.py").write_text(SPAWNED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += [
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1",
        "spawned.py",
        *tables,
        *SETTINGS,
    ]
    with started([*command, "optim.epochs=500", "data.workers=1"], tmp_path) as process:
        wait_for_growth(tmp_path / "runs/default/checkpoints/step_00000004.pt", [])
        process.send_signal(getattr(signal, name))
        _, errors = process.communicate(timeout=60)
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", name), errors


@pytest.fixture
def soak_forked(monkeypatch, capsys) -> Callable[[], tuple[bool, str]]:
    """soak_forked() soaks a run or two, without torchrun.

    It returns whether they survived, and what was printed. Forked ranks have no children, and
    nobody kills a frozen one. No user may mount a disk or cut a link.
    """
    kinds = {kind: action for kind, action in soak.KINDS.items() if "torchrun" not in action}
    for left_out in ("a frozen rank (SIGSTOP)", "a killed process of the loader"):
        del kinds[left_out]
    monkeypatch.setattr(soak, "KINDS", kinds)
    monkeypatch.setattr(soak, "available", lambda resource, otherwise: contextlib.nullcontext())
    monkeypatch.setattr(soak, "launch", launch_forked)
    monkeypatch.setattr(soak, "LAUNCHES_WITH_FAULTS", 2)

    def start() -> tuple[bool, str]:
        arguments = ["model.hidden=8"]
        survived = soak.soak(
            SimpleNamespace(minutes=0.1, ranks=[1, 2, 3], seed=6, timeout=60, arguments=arguments)
        )
        return survived, capsys.readouterr().out

    return start


def test_a_soak_counts_the_faults_that_a_run_survives(soak_forked):
    survived, output = soak_forked()
    assert survived, output
    count = re.search(
        r"^(\d+) faults in \d+ launches of \d+ runs lost nothing", output, re.MULTILINE
    )
    assert (
        int(count[1])
        == sum(int(line.split()[0]) for line in output.splitlines() if re.match(r" +\d+  ", line))
        > 1
    )


def test_a_soak_never_freezes_a_rank_and_kills_its_torchrun(tmp_path):
    soaking = soak.Soak(SimpleNamespace(ranks=[2]), random.Random(0), tmp_path, tmp_path, None)
    launches = [{fault.kind for fault in soaking.draw_faults(tmp_path, 2)} for _ in range(2000)]
    with_frozen = [kinds for kinds in launches if "a frozen rank (SIGSTOP)" in kinds]
    assert any(len(kinds) == 2 for kinds in with_frozen)
    assert not any(kinds & {"torchrun killed", "SIGUSR1 to torchrun"} for kinds in with_frozen)


def test_a_soak_notices_an_altered_checkpoint(soak_forked, monkeypatch):
    def alter(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        state["model"]["embedding"][0] += 0.1
        torch.save(state, path)

    monkeypatch.setattr(soak, "KINDS", {"a rank killed": "SIGKILL"})
    monkeypatch.setattr(soak, "SHARE_DAMAGED", 1.0)
    monkeypatch.setattr(soak, "DAMAGES", {"an altered checkpoint": alter})
    survived, output = soak_forked()
    assert not survived and "differs from the undisturbed run's" in output


def test_loader_processes_need_few_file_descriptors(run, tmp_path):
    """The hundreds of tensors of a planned batch would take one each; usually 1,024 are allowed."""
    options = "data.batch_size=1024 data.workers=4 optim.epochs=1 model.hidden=8"
    result = run(
        ["bash", "-c", f"ulimit -n 1024; exec {sys.executable} {ROOT}/train.py {options}"],
        timeout=240,
    )
    assert "test      loss" in result.check().stdout


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_loader_processes_beside_a_gpu_are_spawned():
    """A fork would break CUDA."""
    assert (
        loader_of_compared_workers("cuda", 1).multiprocessing_context.get_start_method() == "spawn"
    )


UNSENDABLE = """
import data, train
build = data.KnockoutDataset.__getitems__
def with_a_function(*arguments):
    batch = build(*arguments)
    batch.function = lambda: 0
    return batch
data.KnockoutDataset.__getitems__ = with_a_function
train.main()
"""


def test_a_batch_that_a_loader_process_cannot_send_ends_the_run_with_the_reason(
    torchrun, tables, tmp_path
):
    (tmp_path / "unsendable.py").write_text(UNSENDABLE)
    result = torchrun(0, tmp_path / "unsendable.py", *tables, *SETTINGS, "data.workers=1")
    assert result.returncode == 1
    assert "with_a_function.<locals>.<lambda>" in result.stderr  # what cannot be pickled
    assert "error: rank 0: RuntimeError: DataLoader worker" in result.stderr


def test_a_model_too_large_for_memory_is_an_error_of_one_sentence(train, tmp_path):
    result = train(0, "model.hidden=4000000000")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert re.fullmatch(
        r"error: rank 0: there is no memory for another \d+ bytes: lower model.hidden or [^\n]*\n",
        result.stderr,
    )


STOPPED_AFTER_NAN = """
import os, pathlib, signal, train
schedule, criterion = train.schedule, train.criterion
def spoil(step, *arguments):
    if step == 5 and not pathlib.Path("done").exists():
        pathlib.Path("done").touch()
        train.criterion = lambda *a: criterion(*a) * float("nan")
        os.kill(os.getpid(), signal.SIGTERM)
    return schedule(step, *arguments)
train.schedule = spoil
train.main()
"""


def test_a_clean_stop_does_not_save_a_nonfinite_step(train, tmp_path):
    (tmp_path / "spoiled.py").write_text(STOPPED_AFTER_NAN)
    arguments = ["optim.epochs=2", "log.every_steps=4", "checkpoint.every_steps=3"]
    train(0, *arguments, "run.name=whole").check()
    result = train(0, *arguments, script=tmp_path / "spoiled.py")
    assert result.returncode == 1 and "step 6 is not finite" in result.stderr
    train(0, *arguments, script=tmp_path / "spoiled.py").check()
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole") == ""


SIGNALLED_EARLY = """
import os, signal, sys, data, train
load, (target, number) = data.load, sys.argv.pop().split()
def load_and_signal(*arguments):
    if os.environ.get("RANK", "0") == "0":
        os.kill(os.getppid() if target == "torchrun" else os.getpid(), signal.Signals[number])
    return load(*arguments)
data.load = load_and_signal
train.main()
"""


def test_without_torchrun_a_run_stops_before_its_first_step(torchrun, tables, tmp_path):
    (tmp_path / "early.py").write_text(SIGNALLED_EARLY)
    result = torchrun(2, tmp_path / "early.py", *tables, *SETTINGS, "torchrun SIGKILL")
    assert result.returncode == -signal.SIGKILL
    assert "stopped   at step 0 (torchrun exited)" in result.stdout
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status == {"state": "stopped", "step": 0, "epoch": 0, "reason": "torchrun exited"}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_while_the_tables_are_read_ends_the_process_at_once(
    torchrun, tables, tmp_path, name
):
    """There is nothing to save; a run that stopped at a checkpoint is left as it was."""
    (tmp_path / "early.py").write_text(SIGNALLED_EARLY)
    result = torchrun(0, tmp_path / "early.py", *tables, *SETTINGS, f"rank {name}")
    assert result.returncode == 128 + signal.Signals[name] and result.stderr == ""
    assert not (tmp_path / "runs").exists()


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
    assert time.monotonic() - start < 40  # GRACE_S and the start of the processes
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert (
        status["state"] == "failed"
        and status["reason"] == "rank 1: ZeroDivisionError: division by zero"
    )


def test_a_suspended_job_continues(tmp_path, tables):
    """Suspends all processes, as a scheduler does, for longer than ddp.timeout_s."""
    arguments = [*tables, *SETTINGS, "optim.epochs=40", "ddp.timeout_s=4"]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", arguments)
    wait_for_growth(tmp_path / "runs/default/metrics.jsonl", ranks)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(8 if number == signal.SIGSTOP else 0)
    assert join(ranks) == [0, 0], (tmp_path / "rank0.stderr").read_text()


def test_a_failing_rank_ends_the_job_with_its_traceback(train, tmp_path):
    """Rank 1 fails for a reason other than wrong input, such as a bug in the code."""
    (tmp_path / "bug.py").write_text(
        "import os, torch, train\nif os.environ['RANK'] == '1':\n"
        "    torch.optim.AdamW.step = lambda *a, **k: 1 / 0\ntrain.main()\n"
    )
    result = train(2, script=tmp_path / "bug.py", launcher=True)
    assert result.returncode == 1
    assert "ZeroDivisionError: division by zero" in result.stderr
