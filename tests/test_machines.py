"""Several machines: two network namespaces joined by a cable."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, Finished, clean_environment, fork_ranks, join

RDZV = "alpha:29500"
SMALL = ["model.hidden=8", "model.readout=local", "log.every_steps=1"]
VARIABLES = {
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
}


def sh(*words: str, timeout: float = 30, **variables: str) -> str:
    environment = {**clean_environment(), **VARIABLES, **variables}
    result = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result.stdout


class Machine:
    """A network namespace and a folder, its local disk."""

    def __init__(self, name: str, address: str, disk: Path, run: Callable[..., Finished]):
        self.name, self.address, self.disk, self.run = name, address, disk, run
        self.space = f"{name}-{os.getpid()}"
        self.pool = ThreadPoolExecutor()
        self.run_folder = disk / "runs/default"

    def launch(self, *words: str, timeout: float = 120, **variables: str) -> "Future[Finished]":
        command = ["ip", "netns", "exec", self.space, "env", "-C", str(self.disk), str(ROOT / "launch.sh"), *words]
        variables = {**VARIABLES, "NNODES": "2", "RDZV": RDZV, "RDZV_TIMEOUT": "60", **variables}
        return self.pool.submit(self.run, command, timeout, **variables)


@pytest.fixture
def machines(run, tables, tmp_path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with the tables on their disks; each takes its own name for 127.0.1.1, as Debian does."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    pair = []
    for name, address in (("alpha", "10.77.0.1"), ("beta", "10.77.0.2")):
        (tmp_path / name).mkdir()
        for table in ("edges.tsv", "scores.tsv"):
            shutil.copy(tmp_path / table, tmp_path / name)
        pair.append(Machine(name, address, tmp_path / name, run))
    try:
        for machine, other in (pair, pair[::-1]):
            try:
                sh("ip", "netns", "add", machine.space)
            except AssertionError as error:
                pytest.skip(f"no network namespaces here: {error}")
            files = Path("/etc/netns", machine.space)  # what `ip netns exec` shows as /etc
            files.mkdir(parents=True)
            (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            (files / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{other.address} {other.name}\n"
            )
        alpha, beta = (machine.space for machine in pair)
        sh("ip", "link", "add", "cable", "netns", alpha, "type", "veth", "peer", "name", "cable", "netns", beta)
        for machine in pair:
            sh("ip", "-n", machine.space, "addr", "add", f"{machine.address}/24", "dev", "cable")
            sh("ip", "-n", machine.space, "link", "set", "lo", "up")
            sh("ip", "-n", machine.space, "link", "set", "cable", "up")
            sh("ip", "-n", machine.space, "route", "add", "default", "dev", "cable")
        yield pair[0], pair[1]
    finally:
        for machine in pair:
            subprocess.run(["ip", "netns", "del", machine.space], capture_output=True, timeout=30, check=False)
            shutil.rmtree(Path("/etc/netns", machine.space), ignore_errors=True)
        with contextlib.suppress(OSError):  # of other namespaces, or not there
            Path("/etc/netns").rmdir()


@pytest.fixture
def one_machine(tables, tmp_path) -> Callable[..., Path]:
    """one_machine(world_size, *overrides): the run folder of an uninterrupted run on this machine."""

    def start(world_size: int, *overrides: str) -> Path:
        _store, ranks = fork_ranks(tmp_path, world_size, "train.py", [*tables, *SMALL, *overrides, "run.name=one"])
        assert join(ranks) == [0] * world_size, (tmp_path / "rank0.stderr").read_text()
        return tmp_path / "runs/one"

    return start


def rows(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without times."""
    clocks = {"samples_per_s", "data_ms", "step_ms", "memory_mb"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in clocks} for row in lines if row["kind"] != "event"]


def events(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["event"] for row in lines if row["kind"] == "event"]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(max((folder / "checkpoints").glob("step_*.pt")), weights_only=True)["model"]


def assert_same_run(folder: Path, other: Path) -> None:
    assert rows(folder) == rows(other)
    there = parameters(other)
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, there[name]), name


def wait_until(what: Callable[[], object], seconds: float, story: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, story()
        time.sleep(0.1)


def has_a_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*.pt"))


def test_two_machines_with_one_and_two_processes_train_as_one(machines, tables, one_machine):
    alpha, beta = machines
    words = [*tables, *SMALL, "data.batch_size=30", "optim.epochs=2"]
    second = beta.launch(*words, NPROC="2")
    first = alpha.launch(*words).result().check()
    second.result().check()
    assert "3 ranks x 10 samples" in first.stdout
    assert first.stderr == "" == second.result().stderr
    assert_same_run(alpha.run_folder, one_machine(3, "data.batch_size=30", "optim.epochs=2"))
    assert {path.name for path in beta.run_folder.iterdir()} == {"log.rank1.txt", "log.rank2.txt"}
    for machine in machines:
        assert len(list((machine.disk / ".cache").glob("tables-*.pt"))) == 1


def test_machines_of_an_elastic_run_come_and_go(machines, tables, tmp_path):
    alpha, beta = machines
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=500", f"run.dir={tmp_path}/shared"]
    elastic = {"NNODES": "1:2", "MAX_RESTARTS": "3", "RDZV_TIMEOUT": "60"}
    folder = tmp_path / "shared/default"

    def world_sizes() -> list[int]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["world_size"] for row in lines if row.get("event") in ("started", "resumed")]

    first = alpha.launch(*words, **elastic)
    wait_until(lambda: has_a_checkpoint(folder), 60, lambda: "no checkpoint")
    second = beta.launch(*words, **elastic)
    wait_until(lambda: world_sizes() == [1, 2], 60, lambda: f"world sizes {world_sizes()}")
    processes = sh("ip", "netns", "pids", beta.space).split()
    sh("kill", "-9", *[pid for pid in processes if b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()])
    wait_until(lambda: world_sizes() == [1, 2, 2], 60, lambda: f"world sizes {world_sizes()}")
    sh("kill", "-9", *sh("ip", "netns", "pids", beta.space).split())
    assert second.result().returncode != 0
    wait_until(lambda: world_sizes() == [1, 2, 2, 1], 90, lambda: f"world sizes {world_sizes()}")
    (folder / "STOP").touch()
    first.result().check()
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"


def test_a_machine_that_does_not_come_is_waited_for_so_long(machines, tables):
    alpha, beta = machines
    waiting = alpha.launch(*tables, RDZV_TIMEOUT="10", timeout=60)
    lost = beta.launch(*tables, RDZV="alpha:29501", RDZV_TIMEOUT="2", timeout=60)
    other = beta.launch(*tables, NNODES="3", timeout=60)
    start = "start the same command with NNODES=2 and RDZV"
    told = f"error: 2 machines (NNODES) did not come to {RDZV} (RDZV) in 10 s (RDZV_TIMEOUT)"
    assert waiting.result() == Finished(1, "", f"{told}: {start}={RDZV} on each machine\n")
    told = "error: nothing answered at alpha:29501 (RDZV) for 2 s (RDZV_TIMEOUT)"
    assert lost.result() == Finished(1, "", f"{told}: {start}=alpha:29501 on each machine\n")
    assert other.result().stderr.startswith("error: NNODES=3 here and NNODES=2 on another machine: start the same")


def test_a_program_that_listens_at_the_address_and_never_answers_is_told_of(machines, tables):
    alpha, beta = machines
    listen = "import socket, time; s = socket.create_server(('', 29500)); print(); time.sleep(100)"
    command = ["ip", "netns", "exec", alpha.space, sys.executable, "-uc", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as listener:
        listener.stdout.readline()
        result = beta.launch(*tables, RDZV_TIMEOUT="3", timeout=60).result()
        listener.kill()
    told = f"error: cannot use {RDZV} (RDZV), perhaps another program does (it does not answer)\n"
    assert (result.returncode, result.stderr) == (1, told)


def test_a_machine_that_is_stopped_stops_the_other(machines, tables):
    alpha, beta = machines
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=10000"]
    first, second = (machine.launch(*words) for machine in machines)
    wait_until(lambda: has_a_checkpoint(alpha.run_folder), 60, lambda: "no checkpoint")
    (agent,) = [
        p
        for p in sh("ip", "netns", "pids", beta.space).split()
        if "NNODES" in Path(f"/proc/{p}/cmdline").read_text()
        and b"LOCAL_RANK=" not in Path(f"/proc/{p}/environ").read_bytes()
    ]
    sh("kill", "-INT", agent)
    assert second.result().returncode == 130 and "Traceback" not in second.result().stderr
    assert "Traceback" not in first.result().check().stderr
    assert json.loads((alpha.run_folder / "status.json").read_text())["state"] == "stopped"


def test_a_cut_ends_both_machines_and_the_run_goes_on_when_they_are_back(machines, tables, one_machine):
    alpha, _ = machines
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=60", "ddp.timeout_s=4"]
    both = [machine.launch(*words, RDZV_TIMEOUT="30" if machine is alpha else "8") for machine in machines]
    wait_until(lambda: has_a_checkpoint(alpha.run_folder), 60, lambda: "no checkpoint")
    sh("ip", "-n", alpha.space, "link", "set", "cable", "down")
    first, second = (future.result() for future in both)
    assert first.returncode == second.returncode == 1
    assert "error: no progress for 4 s" in first.stderr and "rank 1: not heard of for" in first.stderr
    assert f"error: lost the machines that met at {RDZV} (RDZV), " in second.stderr.splitlines()[-1]
    assert json.loads((alpha.run_folder / "status.json").read_text())["state"] == "failed"

    sh("ip", "-n", alpha.space, "link", "set", "cable", "up")
    sh("ip", "-n", alpha.space, "route", "replace", "default", "dev", "cable")
    for future in [machine.launch(*words) for machine in machines]:
        future.result().check()
    assert events(alpha.run_folder) == ["started", "failed", "resumed"]
    assert_same_run(alpha.run_folder, one_machine(2, "data.batch_size=32", "optim.epochs=60"))
