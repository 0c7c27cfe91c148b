"""`python -m tests.check soak`: causes random faults in a run, again and again until it finishes.

No launch has both a frozen rank (SIGSTOP) and a killed torchrun. A frozen process cannot notice
that its torchrun has exited, and no other process would end it, so it would always remain.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from errors import counted
from tests.template.machines import ADDRESSES, connect, two_machines
from tests.tools.faults import BALLAST, EXACT, lost
from tests.tools.parity import BATCH_SIZE, TOLERANCE
from tests.tools.runs import launch, newest_checkpoint, zero_a_block

EPOCHS = 6
STEPS_PER_EPOCH = 4
STEPS_PER_SAVE = 3
LAST_STEP = EPOCHS * STEPS_PER_EPOCH
LAUNCHES_WITH_FAULTS = 10  # number of launches of a run with faults; later launches have no fault
TIMEOUT_S = 6  # ddp.timeout_s
STARTUP_TIMEOUT_S = 30  # ddp.startup_timeout_s
# Largest time from one of these timeouts to the exit of the last process, in seconds. torchrun
# gives a frozen process 30 s.
GRACE_S = 40
LOST_S = 20  # largest duration of work, in seconds, that a fault may lose
DISK_MB = 512  # size of the disk that is filled
SHARE_DAMAGED = 0.2  # share of launches after which a checkpoint is damaged
TRUNCATED = 1000  # size of a truncated checkpoint in bytes
SHARE_FULL = 0.3  # share of full disks that stay full for the next launch
PHASES = ("data", "forward", "backward", "optimiser", "evaluation", "save")

KINDS = {  # the action of `faults.inject` for each kind of fault
    "a rank killed": "SIGKILL",
    "all ranks killed": "kill all",
    "torchrun killed": "SIGKILL torchrun",
    "a rank killed, half a checkpoint written": "kill half-way",
    "a rank killed between best.pt and checkpoint": "kill after best",
    "SIGTERM to torchrun": "SIGTERM torchrun",
    "SIGINT to torchrun": "SIGINT torchrun",
    "SIGUSR1 to torchrun": "SIGUSR1 torchrun",
    "SIGTERM to torchrun while a rank is slow": "SIGTERM torchrun, then slow",
    "SIGTERM to a rank": "SIGTERM",
    "SIGINT to a rank": "SIGINT",
    "SIGUSR1 to a rank": "SIGUSR1",
    "a STOP file": "STOP",
    "a file that may not grow": "disk full",
    "a full disk": "fill the disk",
    "a checkpoint that cannot be written": "blocked",
    "a NaN in the loss": "nan",
    "an infinite loss": "inf",
    "non-finite weights": "inf weights",
    "an exception": "raise",
    "a rank that hangs": "sleep",
    "a frozen rank (SIGSTOP)": "SIGSTOP",
    "a killed process of the loader": "kill loader",
    "a cut link between two machines": "cut the link",
}
KILLS_TORCHRUN = ("torchrun killed", "SIGUSR1 to torchrun")
OF_RANK_0 = ("kill half-way", "kill after best", "disk full", "blocked", "inf weights")
ONLY_PHASE = {
    "nan": "forward",
    "inf": "forward",
    "kill loader": "data",
    "blocked": "optimiser",
    "inf weights": "save",
}
DAMAGES = {  # damages to the newest checkpoint, given its path, between two launches
    "a truncated checkpoint": lambda path: os.truncate(path, TRUNCATED),
    "an empty checkpoint": lambda path: os.truncate(path, 0),
    "a checkpoint with zeros in its middle": zero_a_block,
    "a deleted checkpoint": lambda path: path.unlink(),
    "all checkpoints deleted": lambda path: shutil.rmtree(path.parent),
}
# Damages after which the newest checkpoint cannot be read, but older ones can.
TAKE_ONE = tuple(DAMAGES)[:4]


class LostError(Exception):
    """A run has lost something, or did not finish."""


@dataclass(frozen=True)
class Fault:
    """A fault of this kind, which happens when `rank` enters `phase` after `step` steps."""

    kind: str
    rank: int
    step: int
    phase: str

    def injected(self) -> list:
        """Returns the fault in the form that `faults.arm` expects."""
        return [self.rank, self.step, self.phase, KINDS[self.kind]]


def soak(options: argparse.Namespace) -> bool:
    """Trains runs with faults for `minutes`, and prints the faults that they survived.

    Returns whether they survived all faults.
    """
    seed = options.seed
    if seed is None:
        seed = random.randrange(10**6)
    problem = ""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spaces = stack.enter_context(available(two_machines(), "no network link is cut"))
        disk = stack.enter_context(available(small_disk(folder), "no disk is filled"))
        soaking = Soak(options, random.Random(seed), folder, disk or folder, spaces)
        deadline = time.monotonic() + 60 * options.minutes
        while time.monotonic() < deadline and not problem:
            try:
                soaking.train_a_run()
            except Exception as error:
                kept = tempfile.mkdtemp(prefix="soak-")
                without_ballast = shutil.ignore_patterns(BALLAST)
                shutil.copytree(soaking.disk, kept, dirs_exist_ok=True, ignore=without_ballast)
                problem = (
                    f"a run with --seed {seed} did not survive. Its files are in {kept}: "
                    f"{type(error).__name__}: {error}"
                )
    for kind, count in soaking.survived.most_common():
        print(f"{count:6d}  {kind}")
    print(problem or soaking.summary())
    return not problem


@contextlib.contextmanager
def available(resource: contextlib.AbstractContextManager, otherwise: str) -> Iterator:
    """Enters `resource`, which needs root, and yields its value.

    If this fails, prints `otherwise` and the reason, and yields None.
    """
    with contextlib.ExitStack() as stack:
        try:
            entered = stack.enter_context(resource)
        except RuntimeError as error:
            print(f"{otherwise}, because this failed: {str(error).splitlines()[0]}")
            entered = None
        yield entered


@contextlib.contextmanager
def small_disk(parent: Path) -> Iterator[Path]:
    """Yields the folder of a disk of `DISK_MB`; raises `RuntimeError` if it cannot be mounted."""
    folder = parent / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", str(folder)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(str(error)) from None
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


class Soak:
    """Trains runs in one folder, and counts the faults that they survived."""

    def __init__(
        self,
        options: argparse.Namespace,
        draw: random.Random,
        folder: Path,
        disk: Path,
        spaces: dict | None,
    ):
        self.options = options
        self.draw = draw
        self.folder = folder
        self.disk = disk
        self.spaces = spaces
        # Numbers of ranks by which a micro-batch can be divided.
        self.ranks = [number for number in options.ranks if BATCH_SIZE // 2 % number == 0]
        self.survived: Counter[str] = Counter()
        self.num_runs = 0
        self.num_launches = 0
        # Largest time from a fault to the exit of the last process, minus the limit of a hang.
        self.longest_s = 0.0
        self.lost_s = 0.0  # largest duration of work that a fault has lost

    def summary(self) -> str:
        return (
            f"{counted(self.survived.total(), 'fault')} in "
            f"{counted(self.num_launches, 'launch', 'launches')} of "
            f"{counted(self.num_runs, 'run')} lost nothing. At most {self.lost_s:.1f} s of work "
            "had to be repeated. After a fault, the last process exited at most "
            f"{max(0.0, self.longest_s):.0f} s later than ddp.timeout_s or ddp.startup_timeout_s."
        )

    def train_a_run(self) -> None:
        """Launches a run with faults until it has finished; raises `LostError`."""
        is_changing = self.draw.random() < 0.5  # whether its number of processes changes
        arguments = list(self.options.arguments)
        num_ranks = self.draw.choice(self.ranks)
        if is_changing:
            arguments += EXACT["arguments"]
            reference = self.reference(self.ranks[-1], arguments, "reference-in-fp64")
        else:
            reference = self.reference(num_ranks, arguments, f"reference-{num_ranks}")
        run = self.disk / f"run{self.num_runs}"
        survived: list[str] = []
        num_launches = 0
        while state(run) != "finished":
            if num_launches == 3 * LAUNCHES_WITH_FAULTS:
                raise LostError(
                    f"{run.name} has the state {state(run)} after {num_launches} launches"
                )
            if num_launches > 0:
                is_last = num_launches >= LAUNCHES_WITH_FAULTS
                survived += self.damage(run, is_last)
            if is_changing:
                num_ranks = self.draw.choice(self.ranks)
            faults = []
            if num_launches < LAUNCHES_WITH_FAULTS:
                faults = self.draw_faults(run, num_ranks)
            survived += self.launch(run, num_ranks, arguments, faults)
            num_launches += 1
        problem = lost(run, reference, TOLERANCE if is_changing else 0.0)
        if problem:
            raise LostError(problem)
        shutil.rmtree(run)
        self.survived.update(survived)
        self.num_runs += 1
        launches = counted(num_launches, "launch", "launches")
        print(f"{run.name}: {launches}, {', '.join(survived)}", flush=True)

    def reference(self, num_ranks: int, arguments: list[str], name: str) -> Path:
        """Returns the folder of an undisturbed run."""
        path = self.folder / name
        if not path.exists():
            self.launch(path, num_ranks, arguments, [])
        if state(path) != "finished":
            raise LostError("the undisturbed run failed")
        return path

    def draw_faults(self, run: Path, num_ranks: int) -> list[Fault]:
        """Returns one or two random faults in the steps that follow the newest checkpoint."""
        saved = [int(path.stem.removeprefix("step_")) for path in run.glob("checkpoints/step_*.pt")]
        kinds = [kind for kind, action in KINDS.items() if self.is_possible(action, num_ranks)]
        drawn = self.draw.sample(kinds, self.draw.choice((1, 1, 2)))
        if "a frozen rank (SIGSTOP)" in drawn:
            drawn = [kind for kind in drawn if kind not in KILLS_TORCHRUN]
        if "a cut link between two machines" in drawn:
            # On two machines, torchrun waits minutes for a torchrun that was stopped.
            drawn = [kind for kind in drawn if "torchrun" not in KINDS[kind]]
        faults = []
        for kind in drawn:
            action = KINDS[kind]
            phase = ONLY_PHASE.get(action, self.draw.choice(PHASES))
            first_step = max(saved, default=0)
            steps = [step for step in range(first_step, LAST_STEP + 1) if occurs(phase, step)]
            if not steps:  # after the last step, only an evaluation can follow
                steps = [LAST_STEP]
            step = self.draw.choice(steps[:6])
            rank = 0 if action in OF_RANK_0 else self.draw.randrange(num_ranks)
            faults.append(Fault(kind, rank, step, phase))
        return faults

    def is_possible(self, action: str, num_ranks: int) -> bool:
        if action == "fill the disk":
            return self.disk != self.folder
        if action == "cut the link":
            return self.spaces is not None and num_ranks % 2 == 0
        # A single process has no torchrun, and no other rank notices that it is frozen.
        return num_ranks > 1 or not (
            action.partition(" ")[2].startswith("torchrun") or action == "SIGSTOP"
        )

    def launch(
        self, run: Path, num_ranks: int, arguments: list[str], faults: list[Fault]
    ) -> list[str]:
        """Launches the run once; returns the kinds of the faults that happened.

        Raises `LostError` if the launch ended too late, or failed without a fault.
        """
        marks = self.folder / f"launch{self.num_launches}"
        marks.mkdir()
        self.num_launches += 1
        # Whether a fault of an earlier launch has left a full disk or a file STOP.
        was_disturbed = (run / BALLAST).exists() or (run / "STOP").exists()
        with ThreadPoolExecutor() as pool:
            torchruns = self.start(pool, run, num_ranks, arguments, faults, marks)
            hangs = []
            for number, fault in enumerate(faults):
                if num_ranks == 1 and KINDS[fault.kind] == "sleep":
                    hangs.append(marks / str(number))
            try:
                end = self.wait(torchruns, marks, hangs)
            except BaseException:  # includes a request to stop this check
                send(signal.SIGKILL, processes(marks))
                raise
        output = "\n".join(future.result()[1] for future in torchruns)
        kinds = []
        for number, fault in enumerate(faults):
            mark = marks / str(number)
            if mark.exists() and mark.read_text():
                self.check_losses(fault, mark, end, output)
                kinds.append(fault.kind)
        if not kinds and not was_disturbed and state(run) != "finished":
            raise LostError(f"{run.name} has the state {state(run)} without a fault:\n{output}")
        return kinds

    def start(
        self,
        pool: ThreadPoolExecutor,
        run: Path,
        num_ranks: int,
        arguments: list[str],
        faults: list[Fault],
        marks: Path,
    ) -> list[Future]:
        """Starts the run, on two machines if a link will be cut.

        Returns the exit status and the output of each torchrun, as futures.
        """
        injected = {}
        for number, fault in enumerate(faults):
            injected[str(marks / str(number))] = fault.injected()
        variables = {
            "FAULTS": json.dumps(injected),
            "FAULT_EPOCHS": str(EPOCHS),
            "SOAK": str(marks),
            "OMP_NUM_THREADS": "1",
        }
        actions = [KINDS[fault.kind] for fault in faults]
        worker = ["fault-worker", str(run.parent), *arguments, f"ddp.timeout_s={TIMEOUT_S}"]
        worker += [f"ddp.startup_timeout_s={STARTUP_TIMEOUT_S}"]
        if "kill loader" in actions:
            worker.append("data.workers=1")
        worker.append(f"run.name={run.name}")
        timeout = self.options.timeout
        if "cut the link" not in actions:
            torchrun = ("--standalone",)
            return [pool.submit(launch, num_ranks, worker, timeout, torchrun, variables)]
        torchruns = []
        for prefix, torchrun in self.commands_of_two_machines():
            half = num_ranks // 2
            future = pool.submit(launch, half, worker, timeout, torchrun, variables, True, prefix)
            torchruns.append(future)
        return torchruns

    def check_losses(self, fault: Fault, mark: Path, end: float, output: str) -> None:
        """Raises `LostError` if a fault lost too much work, or if the job ended too late after it.

        `end` is the time at which the job ended. The mark of the fault contains the lost seconds,
        and the limit of a hang.
        """
        lost_s, limit_s = json.loads(mark.read_text())
        hung_s = end - mark.stat().st_mtime
        self.lost_s = max(self.lost_s, lost_s)
        self.longest_s = max(self.longest_s, hung_s - limit_s)
        if hung_s > limit_s + GRACE_S or lost_s > LOST_S:
            raise LostError(
                f"{fault} ended after {hung_s:.0f} s and lost {lost_s:.0f} s:\n{output}"
            )

    def commands_of_two_machines(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Yields the words before the command, and the options of torchrun, for each machine."""
        for name, space in self.spaces.items():
            prefix = ("ip", "netns", "exec", space, "env", "GLOO_SOCKET_IFNAME=cable")
            is_host = int(name == "alpha")
            torchrun = (
                "--nnodes=2",
                f"--local-addr={ADDRESSES[name]}",
                "--rdzv-backend=c10d",
                "--rdzv-id=soak",
                f"--rdzv-endpoint={ADDRESSES['alpha']}:29500",
                f"--rdzv-conf=is_host={is_host},join_timeout=60",
            )
            yield prefix, torchrun

    def wait(self, torchruns: list[Future], marks: Path, hangs: list[Path]) -> float:
        """Waits for the end of a launch; returns the time at which its last process exited.

        If a link was cut, it returns the time at which the last rank exited, and connects the link
        then. If a mark of `hangs` exists, a process without torchrun hangs. It gets SIGINT until it
        exits, which a second SIGINT should achieve.
        """
        end = 0.0
        is_cut = len(torchruns) == 2
        while not all(future.done() for future in torchruns):
            time.sleep(0.2)
            has_fault = any(marks.glob("[0-9]*"))
            if is_cut and not end and has_fault and not processes(marks, "LOCAL_RANK="):
                end = time.time()
                connect(self.spaces)
            if any(mark.exists() for mark in hangs):
                send(signal.SIGINT, processes(marks))
                time.sleep(1)
        if not end:
            end = time.time()
        if is_cut:
            connect(self.spaces)
        deadline = time.monotonic() + 10
        left = processes(marks)
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = processes(marks)
        send(signal.SIGKILL, left)
        if left:
            raise LostError(f"processes that had to be killed: {len(left)}")
        return end

    def damage(self, run: Path, is_last: bool) -> list[str]:
        """Usually frees the disk, and sometimes damages a checkpoint; returns the damages."""
        for path in run.glob("checkpoints/*.tmp"):
            if path.is_dir():
                path.rmdir()
        if is_last or self.draw.random() > SHARE_FULL:
            (run / BALLAST).unlink(missing_ok=True)
        is_spared = is_last or self.draw.random() > SHARE_DAMAGED
        sizes = [path.stat().st_size for path in run.glob("checkpoints/step_*.pt")]
        names = list(DAMAGES)
        # If there is only one intact checkpoint, it must not be damaged.
        if sum(size > TRUNCATED for size in sizes) < 2:
            names = [name for name in names if name not in TAKE_ONE]
        if is_spared or not sizes or not names:
            return []
        name = self.draw.choice(names)
        DAMAGES[name](newest_checkpoint(run))
        return [name]


def occurs(phase: str, step: int) -> bool:
    """Returns whether a run is in `phase` after `step` steps."""
    is_epoch_end = step % STEPS_PER_EPOCH == 0
    if phase == "evaluation":
        return is_epoch_end
    if phase == "save":
        return is_epoch_end or step % STEPS_PER_SAVE == 0
    return step < LAST_STEP


def state(run: Path) -> str:
    """Returns the state in the status.json of a run, or `none` if it cannot be read."""
    try:
        return json.loads((run / "status.json").read_text())["state"]
    except (OSError, ValueError):  # it is missing, or incomplete because the disk was full
        return "none"


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def processes(marks: Path, variable: str = "") -> list[int]:
    """Returns the ids of the processes of a launch, given its folder of marks.

    With `variable`, returns only processes that have this environment variable.
    """
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has exited
            text = environ.read_text(errors="replace")
            if f"SOAK={marks}\0" in text and variable in text:
                found.append(int(environ.parent.name))
    return found
