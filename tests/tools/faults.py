"""`python -m tests.check faults`: causes faults in runs, and checks that nothing is lost."""

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

import train
from ddp_ends import end_process
from ddp_setup import Distributed
from optim import OptimConfig
from parts import is_here
from run_checkpoint import TrainState
from task import KnockoutTask
from tests.few_rows import load_few_rows
from tests.tools.parity import BATCH_SIZE, TOLERANCE
from tests.tools.runs import (
    difference,
    launch,
    newest_checkpoint,
    relative_difference,
    series,
)

# A run has two epochs of four steps. It saves a checkpoint every three steps and after each epoch.
STEP_OF_SAVE = 6
EPOCH_END = 4


@dataclass(frozen=True)
class Fault:
    """A fault, which happens when `rank` enters `phase` after `step` completed steps.

    The run is launched twice. The fault happens in the first launch, and the second launch resumes.
    """

    name: str
    action: str  # what happens: the name of a signal, or an action of `inject`
    phase: str = "forward"
    step: int = 5
    rank: int = 1
    state: str = "failed"  # state in status.json that is expected after the first launch
    prints: str = ""  # text that is expected in the output of the first launch
    arguments: tuple[str, ...] = ()  # options of train.py for both launches
    torchrun: tuple[str, ...] = ()  # options of torchrun for the first launch
    repair: Callable[[Path], None] = lambda folder: None  # called between the two launches
    again_prints: str = ""  # text that is expected in the output of the second launch
    ranks: int = 2
    again_ranks: int = 0  # number of ranks of the second launch; 0: as many as in the first
    part: str = ""  # module of an optional part that the expected output needs


KILLED = {"prints": "another rank was killed or cannot be reached"}
STOPPED = {"state": "stopped", "prints": "the same command resumes the run"}
EXACT = {"arguments": ("optim.precision=fp64",)}
TIMEOUT = {"arguments": ("ddp.timeout_s=3",), "part": "ddp_watchdog"}
DAMAGED = {"again_prints": "skipped a damaged checkpoint"}

FAULTS = [
    Fault("a rank killed in data loading", "SIGKILL", "data", **KILLED),
    Fault("a rank killed in the forward pass", "SIGKILL", "forward", **KILLED),
    Fault("a rank killed in the backward pass, mid-accumulation", "SIGKILL", "backward", **KILLED),
    Fault("a rank killed in the optimiser", "SIGKILL", "optimiser", **KILLED),
    Fault("a rank killed in evaluation", "SIGKILL", "evaluation", EPOCH_END, **KILLED),
    Fault(
        "rank 0 killed with half a checkpoint written",
        "kill half-way",
        "save",
        STEP_OF_SAVE,
        0,
        "running",
    ),
    Fault(
        "rank 0 killed between best.pt and the checkpoint",
        "kill after best",
        "save",
        0,
        0,
        "running",
    ),
    Fault("all ranks killed", "kill all", state="running"),
    Fault("torchrun killed", "SIGKILL torchrun", state="stopped"),
    Fault(
        "a rank killed under --max-restarts=3",
        "SIGKILL",
        state="finished",
        torchrun=("--max-restarts=3",),
    ),
    Fault("SIGTERM to torchrun", "SIGTERM torchrun", **STOPPED),
    Fault("SIGINT to a rank, mid-accumulation", "SIGINT", "backward", **STOPPED),
    Fault("SIGUSR1 to a rank in evaluation", "SIGUSR1", "evaluation", EPOCH_END, **STOPPED),
    Fault("SIGTERM to torchrun while a rank is slow", "SIGTERM torchrun, then slow", **STOPPED),
    Fault(
        "SIGTERM to torchrun while rank 0 saves",
        "SIGTERM torchrun",
        "save",
        STEP_OF_SAVE,
        0,
        **STOPPED,
    ),
    Fault("a STOP file", "STOP", **STOPPED),
    Fault(
        "a truncated checkpoint",
        "SIGKILL",
        repair=lambda folder: os.truncate(newest_checkpoint(folder), 1000),
        **DAMAGED,
    ),
    Fault(
        "a checkpoint that holds code",
        "SIGKILL",
        repair=lambda folder: torch.save({"model": OptimConfig()}, newest_checkpoint(folder)),
        **DAMAGED,
    ),
    Fault("a full disk at a checkpoint", "disk full", "optimiser", rank=0, prints="File too large"),
    Fault(
        "a checkpoint that cannot be written",
        "blocked",
        "optimiser",
        rank=0,
        prints="Is a directory",
        repair=lambda folder: (folder / "checkpoints/checkpoint.tmp").rmdir(),
    ),
    Fault("a NaN in one rank's loss", "nan", prints="step 6 is not finite"),
    Fault(
        "a NaN with optim.on_nonfinite=skip",
        "nan",
        state="finished",
        arguments=("optim.on_nonfinite=skip",),
    ),
    Fault(
        "non-finite weights",
        "inf weights",
        "save",
        STEP_OF_SAVE,
        0,
        prints="no checkpoint was saved",
    ),
    Fault("an exception in the forward pass", "raise", prints="ZeroDivisionError: injected"),
    Fault(
        "an exception in rank 0's data loading",
        "raise",
        "data",
        rank=0,
        prints="ZeroDivisionError: injected",
    ),
    Fault("an index out of bounds", "bad index", prints="error: rank 1: "),
    Fault(
        "a rank hanging in data loading",
        "sleep",
        "data",
        prints="rank 1: in data of step 5",
        **TIMEOUT,
    ),
    Fault(
        "a rank frozen (SIGSTOP)",
        "SIGSTOP",
        prints="rank 1: frozen or its machine has failed, last seen in",
        **TIMEOUT,
    ),
    Fault("one of 3 ranks killed, mid-accumulation", "SIGKILL", "backward", ranks=3, **KILLED),
    Fault("a rank killed, resumed on 1 rank", "SIGKILL", again_ranks=1, **EXACT, **KILLED),
    Fault("a rank killed, resumed on 4 ranks", "SIGKILL", again_ranks=4, **EXACT, **KILLED),
]


def faults(options: argparse.Namespace) -> bool:
    """Prints the outcome of each fault.

    Returns whether every run, after its second launch, has the result of an undisturbed run.
    """
    here = [fault for fault in FAULTS if not fault.part or is_here(fault.part)]
    chosen = [fault for fault in here if options.only in fault.name]
    if not options.cpu:
        chosen = list(map(on_gpus, chosen))
    launch_once = partial(launch, timeout=options.timeout, cpu=options.cpu)
    num_passed = 0
    with tempfile.TemporaryDirectory() as parent:
        for number, fault in enumerate(chosen):
            reference = Path(parent, "-".join(["reference", str(fault.ranks), *fault.arguments]))
            arguments = ["fault-worker", parent, *options.arguments, *fault.arguments]
            if not reference.exists():
                named = [*arguments, f"run.name={reference.name}"]
                status, output = launch_once(fault.ranks, named)
                if status:
                    raise RuntimeError(f"the undisturbed run failed:\n{output}")
            start = time.monotonic()
            problem = run_fault(fault, Path(parent, str(number)), reference, arguments, launch_once)
            seconds = time.monotonic() - start
            if problem:
                print(f"FAIL  {fault.name:52s} {problem}", flush=True)
            else:
                num_passed += 1
                outcome = f"{fault.state}, then resumed to the same result; {seconds:.0f} s"
                print(f"PASS  {fault.name:52s} {outcome}", flush=True)
    print(f"faults after which nothing was lost: {num_passed} of {len(chosen)}")
    return num_passed == len(chosen) > 0


def on_gpus(fault: Fault) -> Fault:
    """Returns the fault for a run on GPUs, which may print no message after a kill.

    There, a rank may wait in NCCL for a killed rank until it is ended itself.
    """
    return replace(fault, prints="") if fault.prints == KILLED["prints"] else fault


def run_fault(
    fault: Fault, folder: Path, reference: Path, arguments: list[str], launch: Callable
) -> str:
    """Launches a run with the fault, then without it; returns a problem of the outcome, or ""."""
    arguments = [*arguments, f"run.name={folder.name}"]
    place = [fault.rank, fault.step, fault.phase, fault.action]
    status, output = launch(
        fault.ranks,
        arguments,
        torchrun=("--standalone", *fault.torchrun),
        variables={"FAULTS": json.dumps({str(folder / "fault"): place})},
    )
    problem = problem_of_first_run(fault, folder, status, output)
    if problem:
        return problem
    if "skip" in fault.name:
        skipped = [row["skipped"] for row in series(folder) if "skipped" in row]
        return "" if skipped == [0] * 5 + [1] * 3 else f"wrong skipped in metrics.jsonl: {skipped}"
    fault.repair(folder)
    ranks = fault.again_ranks or fault.ranks
    status, output = launch(ranks, arguments)
    if status or fault.again_prints not in output:
        return f"exit status {status} of the second launch:\n{output}"
    return lost(folder, reference, 0.0 if ranks == fault.ranks else TOLERANCE)


def lost(folder: Path, reference: Path, tolerance: float) -> str:
    """Returns a text that names a difference from an undisturbed run, or "".

    It compares the last checkpoint, the metrics and best.pt.
    """
    problem = difference(folder, reference, tolerance)
    if problem:
        return problem
    best = torch.load(folder / "checkpoints/best.pt", weights_only=True)
    expected = torch.load(reference / "checkpoints/best.pt", weights_only=True)
    if best["step"] != expected["step"]:
        return (
            f"best.pt is of step {best['step']}, but of step {expected['step']} in the undisturbed "
            "run"
        )
    for name, value in expected["model"].items():
        norm = value.double().norm()
        if not relative_difference(best["model"][name], value, norm) <= tolerance:
            return f"{name} in best.pt differs from the undisturbed run"
    return ""


def problem_of_first_run(fault: Fault, folder: Path, status: int, output: str) -> str:
    """Returns a problem of how the launch with the fault ended, or ""."""
    path = folder / "status.json"
    state = json.loads(path.read_text())["state"] if path.exists() else "none"
    left = orphans(folder)
    if left:
        return f"processes are still running, with the ids {left}:\n{output}"
    if not (folder / "fault").exists():
        return f"the fault was not injected:\n{output}"
    is_clean = state == "finished" or (state == "stopped" and "torchrun" not in fault.action)
    if state != fault.state or (status == 0) != is_clean:
        return f"exit status {status}, state {state} in status.json:\n{output}"
    if fault.prints not in output:
        return f"'{fault.prints}' is missing from the output:\n{output}"
    return ""


def orphans(folder: Path) -> list[int]:
    """Waits ten seconds for the workers of the first launch; kills and returns the rest."""
    pids = [int(path.read_text()) for path in folder.glob("pid.*")]
    alive = pids
    for _ in range(100):
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if alive:
            time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return alive


# ---- In the processes of a run -------------------------------------------------------------------
def fault_worker(parent: str, arguments: list[str]) -> None:
    """Runs `train.main` on few rows of the user's tables, with the faults that FAULTS lists.

    FAULTS is an environment variable, with the `faults` of `arm` in JSON. The last of the
    `arguments` is `run.name=NAME`.
    """
    settings = {
        "run.dir": parent,
        "data.batch_size": BATCH_SIZE,
        "optim.epochs": 2,
        "optim.accumulate": 2,
        "checkpoint.every_steps": 3,
        "checkpoint.keep_last": 2,
        "log.every_steps": 1,
    }
    sys.argv[1:] = [*arguments, *(f"{key}={value}" for key, value in settings.items())]
    if "FAULTS" in os.environ:
        name = arguments[-1].removeprefix("run.name=")
        places = json.loads(os.environ["FAULTS"])
        arm(Path(parent, name), {Path(mark): place for mark, place in places.items()})
    with load_few_rows():
        status = train.main()
    end_process(status)


def arm(folder: Path, faults: dict[Path, list]) -> None:
    """Makes each fault happen when its rank enters its phase after its number of steps.

    `faults` maps the path of each fault's mark to [rank, step, phase, action]. The mark is a file
    that is written when the fault happens. The fault therefore does not happen again if torchrun
    restarts the workers.
    """
    folder.mkdir(exist_ok=True)
    for mark in faults:
        (mark.parent / f"pid.{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    phase_of = Distributed.phase

    def phase_with_faults(ddp: Distributed, name: str) -> contextlib.AbstractContextManager:
        for mark, (*place, action) in faults.items():
            if place == [ddp.rank, ddp.heartbeat.step, name] and not mark.exists():
                mark.touch()
                context = phase_of(ddp, name)
                context.__enter__()  # so that the report of a hang names this phase
                inject(action, folder, mark.parent, ddp.heartbeat.step)
        return phase_of(ddp, name)

    Distributed.phase = phase_with_faults


def inject(action: str, folder: Path, marks: Path, step: int) -> None:
    """Applies `action` to the run in `folder`, after `step` steps.

    `marks` is the folder with the process ids of the ranks.
    """
    name, _, target = action.partition(" ")
    if name in signal.Signals.__members__:
        os.kill(os.getppid() if "torchrun" in target else os.getpid(), signal.Signals[name])
        time.sleep(5 if "slow" in target else 0.5)  # wait until torchrun has forwarded the signal
    elif action == "kill all":
        kill_all(marks)
    elif action == "kill half-way":
        torch.save = half_a_save
    elif action == "kill after best":
        os.replace = replace_and_die
    elif action == "STOP":
        (folder / "STOP").touch()
        time.sleep(1.1)  # ranks look for the file twice a second
    elif action == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    elif action == "blocked":
        (folder / "checkpoints/checkpoint.tmp").mkdir(exist_ok=True)
    elif action == "nan":
        spoil_the_next_loss()
    elif action == "inf weights":
        spoil_the_weights_of_checkpoints()
    elif action == "raise":
        raise ZeroDivisionError("injected")
    elif action == "bad index":  # on a GPU, the error is reported later, or NCCL ends the process
        first = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
        first[first.long() + 7]
    elif action == "sleep":
        time.sleep(1000)
    else:
        raise AssertionError(action)


def kill_all(marks: Path) -> None:
    """Kills all ranks; this rank is the last one."""
    others = [int(path.read_text()) for path in marks.glob("pid.*")]
    others.remove(os.getpid())
    for pid in (*others, os.getpid()):
        os.kill(pid, signal.SIGKILL)


def half_a_save(state: dict, file: BinaryIO) -> None:
    """Replaces `torch.save`: writes an incomplete file, and kills this process."""
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def replace_and_die(source: Path, target: Path) -> None:
    """Replaces `os.replace`: kills this process after it has written best.pt."""
    os.rename(source, target)
    if Path(target).name == "best.pt":
        os.kill(os.getpid(), signal.SIGKILL)


def spoil_the_next_loss() -> None:
    """Makes the next loss of this rank nan."""
    original = KnockoutTask.loss

    def spoiled(*arguments: object) -> Tensor:
        KnockoutTask.loss = original
        return original(*arguments) * float("nan")

    KnockoutTask.loss = spoiled


def spoil_the_weights_of_checkpoints() -> None:
    """Makes the first tensor of each checkpoint infinite."""
    original = TrainState.state_dict

    def spoiled(state: TrainState) -> dict:
        saved = original(state)
        first = next(iter(saved["model"].values()))
        first.fill_(float("inf"))
        return saved

    TrainState.state_dict = spoiled
