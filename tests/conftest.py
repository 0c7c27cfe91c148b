"""Small tables, and processes that cannot outlive their test."""

import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch looks up names, which the tests must not wait for
MODULES = ("mask", "model", "data", "ddp_setup", "train")


# Imports torch once and forks processes from there, which start at once.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.faults"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files whose tests wait most of the time come first, for others to run beside them."""
    items.sort(key=lambda item: item.path.stem not in ("test_slurm", "test_machines"))


@dataclass
class Finished:
    returncode: int
    stdout: str
    stderr: str

    def check(self) -> "Finished":
        assert self.returncode == 0, f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    """run(command, timeout=...): the finished command, in `tmp_path`; whatever it started is killed after the test.

    torchrun puts each worker in a session of its own, so processes are found by a mark in their environment.
    """
    mark = f"TEST_MARK={uuid.uuid4()}"

    def start(command: list[str], timeout: float = 120, **env: str) -> Finished:
        environment = {**clean_environment(), "PYTHONPATH": str(ROOT), **env, **dict([mark.split("=")])}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill_marked(mark)
            stdout, stderr = process.communicate()
            pytest.fail(f"not finished after {timeout} s: {command}\n{stdout}\n{stderr}")
        return Finished(process.returncode, stdout, stderr)

    yield start
    _kill_marked(mark)


def clean_environment() -> dict[str, str]:
    """The environment without what makes launch.sh and train.py another job's part, or sets their size."""
    names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "RANK", "WORLD_SIZE", "NPROC", "NNODES", "RDZV", "RDZV_TIMEOUT")
    names += ("MAX_RESTARTS", "STOP_FILE")
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(("SLURM", "SBATCH"))}


def _kill_marked(mark: str) -> None:
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture
def torchrun(run: Callable[..., Finished]) -> Callable[..., Finished]:
    """torchrun(nproc, script or -m module, *arguments): under torchrun; nproc=0 is plain python."""

    def start(nproc: int, *words: str, timeout: float = 120, **env: str) -> Finished:
        command = [sys.executable]
        if nproc:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        return run([*command, *map(str, words)], timeout, **env)

    return start


@pytest.fixture
def train(torchrun: Callable[..., Finished], tables: list[str], tmp_path: Path) -> Callable[..., Finished]:
    """train(nproc, *overrides): train.py on the tiny tables, one epoch of a tiny model unless overridden.

    nproc=0 is what `python train.py` does. With launcher=True the ranks are under a real torchrun; without, they are
    forked processes with torchrun's variables, which start at once.
    """

    def start(
        nproc: int, *overrides: str, script: Path = ROOT / "train.py", launcher: bool = False, **env: str
    ) -> Finished:
        small = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1", "log.every_steps=1"]
        words = [*tables, *small, *overrides]
        if launcher:
            return torchrun(nproc, script, *words, **env)
        if nproc:
            _store, processes = fork_ranks(tmp_path, nproc, str(script), words, env)
        else:
            processes = [fork(tmp_path, "rank0", [str(script), *words], {"OMP_NUM_THREADS": "1", **env})]
        codes = join(processes)
        output = [
            "".join((tmp_path / f"rank{rank}.{stream}").read_text() for rank in range(len(processes)))
            for stream in ("stdout", "stderr")
        ]
        assert len(set(codes)) == 1, f"ranks left with {codes}\n{output[1]}"
        return Finished(codes[0], *output)

    return start


def fork(folder: Path, name: str, command: list[str], variables: dict[str, str]) -> Any:
    """A process that does `python SCRIPT ...` in `folder`; its output goes to <name>.stdout and <name>.stderr."""
    process = SERVER.Process(target=_run_script, args=(str(folder), name, command, variables), daemon=True)
    process.start()
    return process


def fork_ranks(
    folder: Path, world_size: int, script: str, words: list[str], more: dict[str, str] | None = None
) -> tuple[dist.TCPStore, list]:
    """Ranks that run `script` as under torchrun, whose store this process keeps: hold on to it as long as they run."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world_size):
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(more or {})}
        ranks.append(fork(folder, f"rank{rank}", [str(ROOT / script), *words], variables))
    return store, ranks


def launch_forked(
    world_size: int,
    words: list[str],
    torchrun: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    script: str = "tests/check.py",
) -> tuple[int, str]:
    """As `check.launch` does, without the seconds that imports take; the second word is a folder."""
    folder = Path(words[1])
    _store, ranks = fork_ranks(folder, world_size, script, words, variables)
    codes = join(ranks)
    outputs = [(folder / f"rank{r}.{name}").read_text() for r in range(world_size) for name in ("stdout", "stderr")]
    return max(map(abs, codes)), "\n".join(outputs)


@pytest.fixture
def workers(tmp_path: Path) -> Callable[..., None]:
    """workers(world_size, name, *words): a function of tests/workers.py on all ranks; it must not fail."""

    def start(world_size: int, *words: str) -> None:
        _store, ranks = fork_ranks(tmp_path, world_size, "tests/workers.py", [*words])
        codes = join(ranks)
        errors = [(tmp_path / f"rank{rank}.stderr").read_text() for rank in range(world_size)]
        assert codes == [0] * world_size, "\n".join(errors)

    return start


def _run_script(folder: str, name: str, command: list[str], variables: dict[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    for variable in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    os.environ.update(variables)
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", 1)))  # torch is loaded, too late for the variable
    sys.argv = command
    copy = next((str(parent) for parent in Path(command[0]).parents if (parent / "train.py").exists()), str(ROOT))
    if copy != str(ROOT):  # a copy of the template imports its own modules, not those that the server has loaded
        for module in list(sys.modules):
            if module.partition(".")[0] in (*MODULES, "tests"):
                del sys.modules[module]
        sys.path.insert(0, copy)
    for number, stream in ((0, os.devnull), (1, f"{name}.stdout"), (2, f"{name}.stderr")):
        handle = os.open(stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    runpy.run_path(command[0], run_name="__main__")


def join(processes: list, timeout: float = 120) -> list[int]:
    """The exit statuses; whatever is left after `timeout` seconds is killed and fails the test."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    hung = [process.pid for process in processes if process.exitcode is None]
    for process in processes:
        process.kill()
    assert not hung, f"processes {hung} did not end"
    return [process.exitcode for process in processes]


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    """Overrides that name two tiny tables: 30 genes in two relations, 200 samples of 1 to 3 deletions."""
    draw = random.Random(0)
    genes = [f"Y{i:02d}" for i in range(30)]
    edges = [(*draw.sample(genes[:28], 2), draw.choice(["physical", "regulatory"])) for _ in range(120)]
    effect = {gene: draw.gauss(0, 1) for gene in genes}
    samples = []
    for _ in range(200):
        dead = draw.sample(genes, draw.randint(1, 3))
        samples.append((",".join(dead), f"{sum(effect[g] for g in dead) + draw.gauss(0, 0.1):.4f}"))
    write_table(tmp_path / "edges.tsv", [("source", "target", "relation"), *edges])
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *samples])
    return ["data.source=tsv", "data.edges=edges.tsv", "data.perturbations=scores.tsv"]


def write_table(path: Path, rows: list[tuple]) -> Path:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path
