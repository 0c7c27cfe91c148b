"""The faults of `python -m tests.check faults`: what befalls a run, and what must be left of it."""

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import data
import train
from ddp_setup import Distributed
from tests.check import BATCH_SIZE, TOLERANCE, few_rows, final_model, launch, original

STEP_OF_SAVE, EPOCH_END, LAST_STEP = 6, 4, 8  # two epochs of four steps, a checkpoint every three and at epoch ends


@dataclass(frozen=True)
class Fault:
    """`action` befalls `rank` when it enters `phase` at `step` (of those done) in the first of two runs."""

    name: str
    action: str
    phase: str = "forward"
    step: int = 5
    rank: int = 1
    state: str = "failed"  # in status.json after the first run
    says: str = ""  # in its output
    words: tuple[str, ...] = ()  # overrides for both runs
    torchrun: tuple[str, ...] = ()  # options for the first run
    mend: Callable[[Path], None] = lambda folder: None  # between the runs
    again_says: str = ""  # in the output of the second run
    again_ranks: int = 2


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*.pt"))


KILLED = {"says": "another rank was killed or cannot be reached"}
STOPPED = {"state": "stopped", "says": "the same command goes on from there"}
EXACT = {"words": ("model.dropout=0", "optim.precision=fp64")}
IMPATIENT = {"words": ("ddp.timeout_s=3",)}
PASSED_OVER = {"again_says": "passed over a damaged checkpoint"}

FAULTS = [
    Fault("a rank killed in data", "SIGKILL", "data", **KILLED),
    Fault("a rank killed in the forward pass", "SIGKILL", "forward", **KILLED),
    Fault("a rank killed in the backward pass, mid-accumulation", "SIGKILL", "backward", **KILLED),
    Fault("a rank killed in the optimiser", "SIGKILL", "optimiser", **KILLED),
    Fault("a rank killed in evaluation", "SIGKILL", "evaluation", EPOCH_END, **KILLED),
    Fault("a rank killed at an epoch's first step", "SIGKILL", "data", EPOCH_END, **KILLED),
    Fault("a rank killed before the first checkpoint", "SIGKILL", "backward", 1, **KILLED),
    Fault("rank 0 killed in the forward pass", "SIGKILL", rank=0, state="running"),
    Fault("rank 0 killed before a save", "SIGKILL", "save", STEP_OF_SAVE, 0, "running"),
    Fault("rank 0 killed with half a checkpoint written", "kill half-way", "save", STEP_OF_SAVE, 0, "running"),
    Fault("rank 0 killed between best.pt and the checkpoint", "kill after best", "save", LAST_STEP, 0, "running"),
    Fault("all ranks killed", "kill all", state="running"),
    Fault("torchrun killed", "SIGKILL torchrun", state="stopped"),
    Fault("a rank killed under --max-restarts=3", "SIGKILL", state="finished", torchrun=("--max-restarts=3",)),
    Fault("SIGTERM to torchrun", "SIGTERM torchrun", **STOPPED),
    Fault("SIGINT to torchrun", "SIGINT torchrun", **STOPPED),
    Fault("SIGUSR1 to torchrun, which it dies of", "SIGUSR1 torchrun", **STOPPED),
    Fault("SIGTERM to a rank", "SIGTERM", **STOPPED),
    Fault("SIGINT to a rank, mid-accumulation", "SIGINT", "backward", **STOPPED),
    Fault("SIGUSR1 to a rank in evaluation", "SIGUSR1", "evaluation", EPOCH_END, **STOPPED),
    Fault("SIGTERM to torchrun in the last evaluation", "SIGTERM torchrun", "evaluation", LAST_STEP, **STOPPED),
    Fault("SIGTERM to torchrun while a rank is slow", "SIGTERM torchrun, then slow", **STOPPED),
    Fault("SIGTERM to torchrun while rank 0 saves", "SIGTERM torchrun", "save", STEP_OF_SAVE, 0, **STOPPED),
    Fault("a file STOP", "STOP", **STOPPED),
    Fault("a checkpoint truncated", "SIGKILL", mend=lambda folder: os.truncate(newest(folder), 1000), **PASSED_OVER),
    Fault("a checkpoint emptied", "SIGKILL", mend=lambda folder: os.truncate(newest(folder), 0), **PASSED_OVER),
    Fault(
        "a checkpoint that holds code",
        "SIGKILL",
        mend=lambda folder: torch.save({"model": train.OptimConfig()}, newest(folder)),
        **PASSED_OVER,
    ),
    Fault("all checkpoints gone", "SIGKILL", mend=lambda folder: shutil.rmtree(folder / "checkpoints")),
    Fault("the disk full at a checkpoint", "disk full", "optimiser", rank=0, says="File too large"),
    Fault(
        "a checkpoint that cannot be written",
        "blocked",
        "optimiser",
        rank=0,
        says="Is a directory",
        mend=lambda folder: (folder / "checkpoints/step_00000006.pt.tmp").rmdir(),
    ),
    Fault("a NaN in one rank's loss", "nan", says="step 6 is not finite"),
    Fault("an infinite loss", "inf", says="step 6 is not finite"),
    Fault("a NaN with optim.on_nonfinite=skip", "nan", state="finished", words=("optim.on_nonfinite=skip",)),
    Fault("weights that are not finite", "inf weights", "save", STEP_OF_SAVE, 0, says="which is not saved"),
    Fault("an exception in the forward pass", "raise", says="ZeroDivisionError: injected"),
    Fault("an exception in rank 0's data", "raise", "data", rank=0, says="ZeroDivisionError: injected"),
    Fault("an exception in evaluation", "raise", "evaluation", EPOCH_END, says="ZeroDivisionError: injected"),
    Fault("a rank asleep in its data", "sleep", "data", says="rank 1: in data of step 5", **IMPATIENT),
    Fault("rank 0 asleep in a save", "sleep", "save", STEP_OF_SAVE, 0, says="rank 0: in save of step 6", **IMPATIENT),
    Fault("a rank frozen (SIGSTOP)", "SIGSTOP", says="rank 1: frozen, or its machine is gone, last in", **IMPATIENT),
    Fault("a rank killed, resumed on 1 rank", "SIGKILL", again_ranks=1, **EXACT, **KILLED),
    Fault("a rank killed, resumed on 4 ranks", "SIGKILL", again_ranks=4, **EXACT, **KILLED),
]


def faults(options: argparse.Namespace) -> bool:
    """Whether every disturbed run ends, after the second start, as an undisturbed one does."""
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    launch_once = partial(launch, timeout=options.timeout)
    passed = 0
    with tempfile.TemporaryDirectory() as parent:
        for number, fault in enumerate(chosen):
            reference = Path(parent, "-".join(["reference", *fault.words]))
            words = ["fault-worker", parent, *options.words, *fault.words]
            if not reference.exists():
                status, output = launch_once(2, [*words, f"run.name={reference.name}"])
                if status:
                    raise RuntimeError(f"the undisturbed run failed:\n{output}")
            start = time.monotonic()
            problem = endure(
                fault, Path(parent, str(number)), reference, words, partial(launch, timeout=options.timeout)
            )
            passed += not problem
            outcome = problem or f"{fault.state}, then the undisturbed result; {time.monotonic() - start:.0f} s"
            print(f"{'FAIL' if problem else 'PASS'}  {fault.name:52s} {outcome}", flush=True)
    print(f"{passed} of {len(chosen)}: nothing lost")
    return passed == len(chosen) > 0


def endure(fault: Fault, folder: Path, reference: Path, words: list[str], launch: Callable) -> str:
    """Run with the fault, then again without, by `launch`; what is wrong with the outcome, or nothing."""
    words = [*words, f"run.name={folder.name}"]
    inject = json.dumps([fault.rank, fault.step, fault.phase, fault.action])
    status, output = launch(2, words, torchrun=fault.torchrun, variables={"FAULT": inject})
    path = folder / "status.json"
    state = json.loads(path.read_text())["state"] if path.exists() else "none"
    if left := orphans(folder):
        return f"processes {left} lived on:\n{output}"
    if not (folder / "fault").exists():
        return f"the fault did not happen:\n{output}"
    clean = state == "finished" or (state == "stopped" and "torchrun" not in fault.action)
    if state != fault.state or (status == 0) != clean:
        return f"exit status {status}, state {state}:\n{output}"
    if fault.says not in output:
        return f"'{fault.says}' was not said:\n{output}"
    if "skip" in fault.name:
        skipped = [row["skipped"] for row in metrics(folder) if "skipped" in row]
        return "" if skipped == [0] * 5 + [1] * 3 else f"skipped steps in metrics.jsonl: {skipped}"
    fault.mend(folder)
    status, output = launch(fault.again_ranks, words)
    if status or fault.again_says not in output:
        return f"exit status {status} of the second run:\n{output}"
    return difference(folder, reference, 0.0 if fault.again_ranks == 2 else TOLERANCE)


def orphans(folder: Path) -> list[int]:
    """Workers of the first run that have not ended a while after it."""
    pids = [int(path.read_text()) for path in folder.glob("pid.*")]
    alive = pids
    for _ in range(100):
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if alive:
            time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return alive


def metrics(folder: Path) -> list[dict]:
    """The rows of the series, without events and times."""
    times = ("samples_per_s", "data_ms", "step_ms", "memory_mb", "time")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in times} for row in rows if row["kind"] != "event"]


def difference(folder: Path, reference: Path, tolerance: float) -> str:
    ours, theirs = final_model(folder), final_model(reference)
    for name, value in theirs.items():
        if (ours[name] - value).norm() > tolerance * value.norm():
            return f"the final {name} differs from the undisturbed run's"
    for row, other in zip(metrics(folder), metrics(reference), strict=True):
        for key, value in other.items():
            same = row[key] == value
            if not same and isinstance(value, float):
                same = abs(row[key] - value) <= tolerance * abs(value)
            if not same:
                return f"{key} differs from the undisturbed run's: {row} and {other}"
    return ""


def fault_worker(parent: str, words: list[str]) -> None:
    """`train.main` on a few rows of the user's tables, with what FAULT in the environment says going wrong."""
    settings = {"run.dir": parent, "data.batch_size": BATCH_SIZE, "optim.epochs": 2}
    settings |= {"optim.accumulate": 2, "checkpoint.every_steps": 3, "checkpoint.keep_last": 2, "log.every_steps": 1}
    sys.argv[1:] = [*words, *(f"{key}={value}" for key, value in settings.items())]
    data.load = lambda options: few_rows(original(options))
    if "FAULT" in os.environ:
        (name,) = (word.removeprefix("run.name=") for word in words if word.startswith("run.name="))
        arm(Path(parent, name), *json.loads(os.environ["FAULT"]))
    train.main()


def arm(folder: Path, rank: int, step: int, phase: str, action: str) -> None:
    """Let the fault happen at its place, once, however often torchrun restarts the workers."""
    folder.mkdir(exist_ok=True)
    (folder / f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
    phase_of = Distributed.phase

    def phase_with_fault(env: Distributed, name: str) -> contextlib.AbstractContextManager:
        if (env.rank, env.place[0], name) == (rank, step, phase) and not (folder / "fault").exists():
            (folder / "fault").touch()
            context = phase_of(env, name)
            context.__enter__()  # so that a report names this phase
            befall(action, folder)
        return phase_of(env, name)

    Distributed.phase = phase_with_fault


def befall(action: str, folder: Path) -> None:
    name, _, whom = action.partition(" ")
    if name in signal.Signals.__members__:
        os.kill(os.getppid() if "torchrun" in whom else os.getpid(), signal.Signals[name])
        time.sleep(5 if "slow" in whom else 0.5)  # until torchrun has passed it on
    elif action == "kill all":
        pids = [int(path.read_text()) for path in folder.glob("pid.*")]
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)
    elif action == "kill half-way":
        torch.save = half_a_save
    elif action == "kill after best":
        os.replace = replace_and_die
    elif action == "STOP":
        (folder / "STOP").touch()
        time.sleep(1.1)  # it is looked for once a second
    elif action == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    elif action == "blocked":
        (folder / "checkpoints/step_00000006.pt.tmp").mkdir()
    elif action in ("nan", "inf"):
        spoil_the_next_loss(float(action))
    elif action == "inf weights":
        state_dict = train.TrainState.state_dict
        train.TrainState.state_dict = lambda state: spoiled(state_dict(state))
    elif action == "raise":
        raise ZeroDivisionError("injected")
    elif action == "sleep":
        time.sleep(1000)
    else:
        raise AssertionError(action)


def half_a_save(state: dict, file) -> None:
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def replace_and_die(source: Path, target: Path) -> None:
    os.rename(source, target)
    if Path(target).name == "best.pt":
        os.kill(os.getpid(), signal.SIGKILL)


def spoil_the_next_loss(value: float) -> None:
    squared_error = train.squared_error

    def spoiled_error(*arguments):
        train.squared_error = squared_error
        return squared_error(*arguments) * value

    train.squared_error = spoiled_error


def spoiled(state: dict) -> dict:
    next(iter(state["model"].values())).fill_(float("inf"))
    return state
