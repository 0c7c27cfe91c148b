"""Jobs in a SLURM cluster with two nodes, which is simulated on this machine."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.template.fixtures import ROOT
from tests.template.slow.processes import (
    SMALL,
    VARIABLES,
    events,
    has_a_checkpoint,
    run_on_one_machine,
    sh,
    wait_until,
)
from tests.tools.runs import difference

SLURM = ROOT.parent / "shared/slurm"
LAUNCH = str(ROOT / "launch.sh")
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SimpleNamespace]:
    """A cluster with the nodes n1 and n2. slurm.sh(command, ...) runs a command in this cluster.

    Jobs in the partition `high` preempt jobs in `low`, which get time to stop by themselves.
    """
    if not SLURM.is_dir():
        pytest.skip(f"{SLURM} is missing")
    if os.geteuid() != 0:
        pytest.skip("starting SLURM needs root")
    for tool in ("munged", "slurmctld", "slurmd", "sbatch"):
        if not shutil.which(tool, path=VARIABLES["PATH"]):
            pytest.skip(f"SLURM is not installed ({tool} is missing)")
    folder = tempfile.mkdtemp(prefix="slurm-", dir="/tmp")  # SLURM needs a short path
    try:
        sh(str(SLURM / "slurm_up.sh"), folder, timeout=120, SLURM_UP_CPUS="2")
        configuration = Path(folder, "slurm.conf")
        with configuration.open("a") as file:
            file.write(PREEMPTION)
        cluster = SimpleNamespace(
            sh=lambda *arguments: sh(*arguments, SLURM_CONF=str(configuration))
        )
        cluster.sh("scontrol", "reconfigure")
        yield cluster
    finally:
        sh(str(SLURM / "slurm_down.sh"), folder, timeout=120)
        shutil.rmtree(folder)


class Job:
    """A submitted job that runs launch.sh in `folder`."""

    def __init__(self, slurm: SimpleNamespace, folder: Path, *arguments: str):
        self.sh, self.folder = slurm.sh, folder
        self.id = self.sh(
            "sbatch", "--parsable", f"--chdir={folder}", "--time=60", *arguments
        ).strip()

    def show(self, key: str) -> list[str]:
        """Returns the values of a key, one for each task of an array."""
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
        return "\n".join(
            f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("slurm-*.out"))
        )


def test_a_job_of_two_nodes_is_stopped_preempted_and_resumed(slurm, tables, tmp_path):
    folder, length = tmp_path / "runs/default", ["data.batch_size=32", "optim.epochs=120"]
    job = Job(slurm, tmp_path, "--nodes=2", "--partition=low", LAUNCH, *tables, *SMALL, *length)
    wait_until(lambda: has_a_checkpoint(folder), 90, job.log)
    job.sh("scancel", "--batch", "--signal=USR1", job.id)
    wait_until(lambda: events(folder)[-1] == "resumed", 90, job.log)
    job.sh(
        "sbatch",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 3",
    )
    job.finish()
    assert job.show("JobState") == ["COMPLETED"], job.log()
    assert job.show("ExitCode") == ["0:0"] and job.show("Restarts") == ["2"], job.log()
    assert events(folder) == ["started", "stopped", "resumed", "stopped", "resumed", "finished"], (
        job.log()
    )
    assert difference(folder, run_on_one_machine(tmp_path, tables, 2, *length)) == ""
    for node in (0, 1):
        assert (tmp_path / f"slurm-{job.id}.node{node}.out").exists()
    assert (tmp_path / f"slurm-{job.id}.out").read_text().count("stopped, requeued") == 2
    assert not list(tmp_path.glob("*.stop"))


def test_a_job_has_the_exit_status_of_its_training(slurm, tables, tmp_path):
    folder = tmp_path / "runs/default"
    arguments = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=100000", "run.seed=%a"]
    shared = Job(slurm, tmp_path, "--array=0-1", LAUNCH, *arguments)
    wait_until(
        lambda: has_a_checkpoint(folder) and "FAILED" in shared.show("JobState"), 90, shared.log
    )
    (folder / "STOP").touch()  # only now, so that the run stayed locked until a task had failed
    shared.finish()
    assert sorted(shared.show("ExitCode")) == ["0:0", "1:0"], shared.log()
    assert shared.log().count("\nerror: another process is training in runs/default") == 1
    failed = Job(slurm, tmp_path, "--nodes=2", LAUNCH, *tables, "data.edges=none.tsv").finish()
    assert failed.show("ExitCode") == ["1:0"], failed.log()
    log = (tmp_path / f"slurm-{failed.id}.out").read_text()
    assert log.endswith(f"slurm-{failed.id}.node*.out\n") and "status 1" in log


def test_an_array_requeues_a_signalled_task_but_not_a_stopped_or_cancelled_task(
    slurm, tables, tmp_path
):
    (tmp_path / "sweep").mkdir()
    for task in (0, 1):
        (tmp_path / f"sweep/{task}.yaml").write_text(f"run: {{name: seed{task}, seed: {task}}}\n")
    arguments = [
        "--config",
        "sweep/%a.yaml",
        *tables,
        *SMALL,
        "data.batch_size=32",
        "optim.epochs=100000",
    ]
    job = Job(
        slurm, tmp_path, "--array=0-1", "--oversubscribe", "--cpus-per-task=1", LAUNCH, *arguments
    )
    folders = [tmp_path / f"runs/seed{task}" for task in (0, 1)]
    wait_until(lambda: all(map(has_a_checkpoint, folders)), 90, job.log)
    assert all(f"seed: {task}\n" in (folders[task] / "config.yaml").read_text() for task in (0, 1))
    (folders[0] / "STOP").touch()
    wait_until(lambda: "COMPLETED" in job.show("JobState"), 60, job.log)
    job.sh("scancel", "--batch", "--signal=USR1", f"{job.id}_1")
    wait_until(lambda: events(folders[1])[-1] == "resumed", 90, job.log)
    assert sorted(job.show("Restarts")) == ["0", "1"] and events(folders[0]) == [
        "started",
        "stopped",
    ]
    job.sh("scancel", "--batch", "--signal=USR1", f"{job.id}_1")
    time.sleep(0.2)
    job.sh("scancel", f"{job.id}_1")
    wait_until(lambda: "COMPLETING" not in job.show("JobState"), 60, job.log)
    time.sleep(2)
    assert sorted(job.show("JobState")) == ["CANCELLED", "COMPLETED"], job.log()
