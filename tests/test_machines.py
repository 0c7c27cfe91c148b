"""Several machines: two network namespaces joined by a cable, and a SLURM cluster of two nodes on this machine."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT, Finished, clean_environment, fork_ranks, join

SLURM = ROOT.parent / "shared/slurm"
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


PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SimpleNamespace]:
    """A cluster of the nodes n1 and n2: slurm.sh(command, ...) with its SLURM_CONF.

    Jobs of the partition `high` preempt those of `low`, which have some seconds to stop by themselves.
    """
    if not SLURM.is_dir():
        pytest.skip(f"{SLURM} is missing")
    if os.geteuid() != 0:
        pytest.skip("starting SLURM needs root")
    for tool in ("munged", "slurmctld", "slurmd", "sbatch"):
        if not shutil.which(tool, path=VARIABLES["PATH"]):
            pytest.skip(f"SLURM is not installed ({tool} is missing)")
    folder = tempfile.mkdtemp(prefix="slurm-", dir="/tmp")  # SLURM wants a short path
    try:
        sh(str(SLURM / "slurm_up.sh"), folder, timeout=120, SLURM_UP_CPUS="2")
        configuration = Path(folder, "slurm.conf")
        with configuration.open("a") as file:
            file.write(PREEMPTION)
        cluster = SimpleNamespace(sh=lambda *words: sh(*words, SLURM_CONF=str(configuration)))
        cluster.sh("scontrol", "reconfigure")
        yield cluster
    finally:
        sh(str(SLURM / "slurm_down.sh"), folder, timeout=120)
        shutil.rmtree(folder)


class Job:
    """A job of launch.sh in `folder`."""

    def __init__(self, slurm: SimpleNamespace, folder: Path, *words: str):
        self.sh, self.folder = slurm.sh, folder
        self.id = self.sh("sbatch", "--parsable", f"--chdir={folder}", "--time=60", *words).strip()

    def show(self, key: str) -> list[str]:
        """The values of a key, for each task of an array."""
        text = self.sh("scontrol", "--oneliner", "show", "job", self.id)
        return [word.partition("=")[2] for word in text.split() if word.startswith(f"{key}=")]

    def finish(self) -> "Job":
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        try:
            wait_until(lambda: ended.issuperset(self.show("JobState")), 150, self.log)
        finally:
            self.sh("scancel", self.id)
        return self

    def log(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("slurm-*.out")))


def test_slurm_stops_requeues_and_resumes_a_job_of_two_nodes(slurm, tables, one_machine, tmp_path):
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=60"]
    job = Job(slurm, tmp_path, "--nodes=2", str(ROOT / "launch.sh"), *words)
    wait_until(lambda: has_a_checkpoint(tmp_path / "runs/default"), 90, job.log)
    job.sh("scancel", "--batch", "--signal=USR1", job.id)
    job.finish()
    assert job.show("JobState") == ["COMPLETED"], job.log()
    assert job.show("ExitCode") == ["0:0"] and job.show("Restarts") == ["1"]
    assert events(tmp_path / "runs/default") == ["started", "stopped", "resumed"], job.log()
    assert not (tmp_path / "runs/default/STOP").exists()
    assert_same_run(tmp_path / "runs/default", one_machine(2, "data.batch_size=32", "optim.epochs=60"))
    for node in (0, 1):
        assert (tmp_path / f"slurm-{job.id}.node{node}.out").exists()
    log = (tmp_path / f"slurm-{job.id}.out").read_text()
    assert log.count("run folder runs/default") == 2 and "requeued" in log


def test_a_job_that_slurm_preempts_is_requeued_and_resumes(slurm, tables, one_machine, tmp_path):
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=60"]
    job = Job(slurm, tmp_path, "--nodes=2", "--partition=low", str(ROOT / "launch.sh"), *words)
    wait_until(lambda: has_a_checkpoint(tmp_path / "runs/default"), 90, job.log)
    job.sh("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    job.finish()
    assert job.show("JobState") == ["COMPLETED"], job.log()
    assert job.show("ExitCode") == ["0:0"] and job.show("Restarts") == ["1"]
    assert events(tmp_path / "runs/default") == ["started", "stopped", "resumed"], job.log()
    assert_same_run(tmp_path / "runs/default", one_machine(2, "data.batch_size=32", "optim.epochs=60"))


def test_slurm_gives_the_status_of_the_training(slurm, tables, tmp_path):
    wrong = Job(slurm, tmp_path, "--nodes=1", str(ROOT / "launch.sh"), *tables, "optim.lr=fast").finish()
    assert wrong.show("ExitCode") == ["2:0"], wrong.log()
    missing = [*tables, "data.edges=none.tsv"]
    failed = Job(slurm, tmp_path, "--nodes=2", str(ROOT / "launch.sh"), *missing).finish()
    assert failed.show("ExitCode") == ["1:0"], failed.log()
    log = (tmp_path / f"slurm-{failed.id}.out").read_text()
    assert log.endswith(f"error: the training ended with status 1: see slurm-{failed.id}.node*.out\n")


def test_slurm_does_not_requeue_a_job_whose_time_is_over_before_its_first_step(slurm, tables, tmp_path):
    job = Job(slurm, tmp_path, "--nodes=1", str(ROOT / "launch.sh"), *tables, *SMALL, "optim.epochs=10000")
    log = tmp_path / f"slurm-{job.id}.out"
    wait_until(lambda: log.exists() and "run folder" in log.read_text(), 90, job.log)
    job.sh("scancel", "--batch", "--signal=USR1", job.id)
    job.finish()
    assert job.show("ExitCode") == ["1:0"] and job.show("Restarts") == ["0"], job.log()
    told = "error: stopped before its first step: raise --time, or lower the seconds of --signal\n"
    assert log.read_text().endswith(told)


def test_slurm_requeues_the_task_that_was_asked_and_none_that_was_cancelled(slurm, tables, tmp_path):
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=100000", "run.name=seed%a"]
    part = ["--oversubscribe", "--cpus-per-task=1"]
    job = Job(slurm, tmp_path, "--array=0-1", *part, str(ROOT / "launch.sh"), *words)
    folders = [tmp_path / f"runs/seed{task}" for task in (0, 1)]
    wait_until(lambda: all(map(has_a_checkpoint, folders)), 90, job.log)
    (folders[0] / "STOP").touch()
    wait_until(lambda: "COMPLETED" in job.show("JobState"), 60, job.log)
    job.sh("scancel", "--batch", "--signal=USR1", f"{job.id}_1")
    wait_until(lambda: events(folders[1])[-1] == "resumed", 90, job.log)
    assert sorted(job.show("Restarts")) == ["0", "1"] and events(folders[0]) == ["started", "stopped"]
    job.sh("scancel", "--batch", "--signal=USR1", f"{job.id}_1")
    time.sleep(0.2)
    job.sh("scancel", f"{job.id}_1")
    time.sleep(20)  # as long as a requeued job would wait
    assert sorted(job.show("JobState")) == ["CANCELLED", "COMPLETED"], job.log()


def test_slurm_sweeps_with_an_array_of_jobs(slurm, tables, tmp_path):
    words = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=1", "run.seed=%a"]
    shared = Job(slurm, tmp_path, "--array=0-1", str(ROOT / "launch.sh"), *words).finish()
    assert shared.show("ExitCode") == ["1:0"] * 2
    assert "error: each task of an array needs its own run folder" in shared.log()
    job = Job(slurm, tmp_path, "--array=0-1", str(ROOT / "launch.sh"), *words, "run.name=seed%a").finish()
    assert job.show("ExitCode") == ["0:0"] * 2, job.log()
    for seed in (0, 1):
        assert f"seed: {seed}" in (tmp_path / f"runs/seed{seed}/config.yaml").read_text()
        assert json.loads((tmp_path / f"runs/seed{seed}/status.json").read_text())["state"] == "finished"
