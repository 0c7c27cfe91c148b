"""Small tables, and processes that cannot outlive their test."""

import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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
        clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "NPROC")}
        environment = {**clean, "PYTHONPATH": str(ROOT), **env, **dict([mark.split("=")])}
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
def train(torchrun: Callable[..., Finished], tables: list[str]) -> Callable[..., Finished]:
    """train(nproc, *overrides): train.py on the tiny tables, one epoch of a tiny model unless overridden."""

    def start(nproc: int, *overrides: str, **env: str) -> Finished:
        small = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1", "log.every_steps=1"]
        return torchrun(nproc, ROOT / "train.py", *tables, *small, *overrides, **env)

    return start


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
