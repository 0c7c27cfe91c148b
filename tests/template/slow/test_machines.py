"""Several machines, simulated by two network namespaces with a virtual cable between them."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.template.fixtures import ROOT, Finished
from tests.template.machines import ADDRESSES, connect, two_machines
from tests.template.slow.processes import (
    SMALL,
    VARIABLES,
    events,
    has_a_checkpoint,
    run_on_one_machine,
    sh,
    wait_until,
)
from tests.tools.runs import difference, read_metrics

RDZV = "alpha:29500"


class Machine:
    """A simulated machine: a network namespace, with a folder as its local disk."""

    def __init__(self, space: str, address: str, disk: Path, run: Callable[..., Finished]):
        self.space = space
        self.address = address
        self.disk = disk
        self.run = run
        self.pool = ThreadPoolExecutor()
        self.run_folder = disk / "runs/default"

    def launch(self, *arguments: str, timeout: float = 120, **variables: str) -> "Future[Finished]":
        command = ["ip", "netns", "exec", self.space, "env", "-C", str(self.disk)]
        command += [str(ROOT / "launch.sh"), *arguments]
        variables = {**VARIABLES, "NNODES": "2", "RDZV": RDZV, "RDZV_TIMEOUT": "60", **variables}
        return self.pool.submit(self.run, command, timeout, **variables)

    def wait_for_the_end_of_ranks(self) -> None:
        wait_until(
            lambda: not self.processes(b"LOCAL_RANK="),
            60,
            lambda: f"ranks of {self.space} are still running",
        )

    def processes(self, what: bytes) -> list[str]:
        """Returns the ids of its processes that have `what` in their command or environment."""
        found = []
        for pid in sh("ip", "netns", "pids", self.space).split():
            with contextlib.suppress(OSError):  # the process has exited
                texts = [Path("/proc", pid, file).read_bytes() for file in ("cmdline", "environ")]
                if any(what in text for text in texts):
                    found.append(pid)
        return found


@pytest.fixture
def machines(run, tables, tmp_path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, with the tables on the disk of each."""
    with contextlib.ExitStack() as stack:
        try:
            spaces = stack.enter_context(two_machines())
        except RuntimeError as error:
            pytest.skip(f"no network namespaces here: {error}")
        pair = []
        for name, space in spaces.items():
            (tmp_path / name).mkdir()
            for table in ("edges.tsv", "scores.tsv"):
                shutil.copy(tmp_path / table, tmp_path / name)
            pair.append(Machine(space, ADDRESSES[name], tmp_path / name, run))
        yield pair[0], pair[1]


def test_two_machines_with_one_and_two_processes_train_as_one(machines, tables, tmp_path):
    alpha, beta = machines
    arguments = [*tables, *SMALL, "data.batch_size=30", "optim.epochs=2"]
    address = f"{alpha.address}:29500"  # the other tests use a host name
    second = beta.launch(*arguments, NPROC="2", RDZV=address)
    first = alpha.launch(*arguments, RDZV=address).result().check()
    second.result().check()
    assert "samples over 3 ranks" in first.stdout
    assert first.stderr == ""
    for line in second.result().stderr.splitlines():
        # torchrun prints this warning if the machine that hosts its store has exited first.
        assert "failed to shutdown the rendezvous" in line
    whole = run_on_one_machine(tmp_path, tables, 3, "data.batch_size=30", "optim.epochs=2")
    assert difference(alpha.run_folder, whole) == ""
    assert {path.name for path in beta.run_folder.iterdir()} == {"log.rank1.txt", "log.rank2.txt"}
    for machine in machines:
        assert len(list((machine.disk / ".cache").glob("tables-*.pt"))) == 1


def test_machines_can_join_and_leave_an_elastic_run(machines, tables, tmp_path):
    alpha, beta = machines
    shared = f"run.dir={tmp_path}/shared"
    arguments = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=500", shared]
    elastic = {"NNODES": "1:2", "MAX_RESTARTS": "3", "RDZV_TIMEOUT": "60"}
    folder = tmp_path / "shared/default"

    def world_sizes() -> list[int]:
        rows = read_metrics(folder, "event")
        return [row["world_size"] for row in rows if row["event"] in ("started", "resumed")]

    first = alpha.launch(*arguments, **elastic)
    wait_until(lambda: has_a_checkpoint(folder), 120, lambda: "no checkpoint")
    second = beta.launch(*arguments, **elastic)
    wait_until(lambda: world_sizes() == [1, 2], 120, lambda: f"world sizes {world_sizes()}")
    sh("kill", "-9", *beta.processes(b"LOCAL_RANK="))
    wait_until(lambda: world_sizes() == [1, 2, 2], 120, lambda: f"world sizes {world_sizes()}")
    sh("kill", "-9", *sh("ip", "netns", "pids", beta.space).split())
    assert second.result().returncode != 0
    wait_until(lambda: world_sizes() == [1, 2, 2, 1], 150, lambda: f"world sizes {world_sizes()}")
    (folder / "STOP").touch()
    first.result().check()
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"


def test_a_machine_that_is_stopped_stops_the_other(machines, tables):
    alpha, beta = machines
    arguments = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=10000"]
    first, second = (machine.launch(*arguments) for machine in machines)
    wait_until(lambda: has_a_checkpoint(alpha.run_folder), 60, lambda: "no checkpoint")
    sh("kill", "-USR1", *beta.processes(b"torch.distributed.run"))
    assert second.result().returncode == 1
    alpha.wait_for_the_end_of_ranks()
    # Otherwise, this torchrun would wait minutes for the other torchrun.
    sh("kill", "-9", *alpha.processes(b"torch.distributed.run"))
    assert "error" not in first.result().stderr
    assert json.loads((alpha.run_folder / "status.json").read_text())["state"] == "stopped"


def test_a_network_cut_ends_both_machines_and_a_restart_resumes_the_run(machines, tables, tmp_path):
    alpha, beta = machines
    arguments = [*tables, *SMALL, "data.batch_size=32", "optim.epochs=60", "ddp.timeout_s=4"]
    both = [machine.launch(*arguments) for machine in machines]
    wait_until(lambda: has_a_checkpoint(alpha.run_folder), 60, lambda: "no checkpoint")
    sh("ip", "-n", alpha.space, "link", "set", "cable", "down")
    beta.wait_for_the_end_of_ranks()
    first = both[0].result()
    assert first.returncode == 1 and "error: no progress for 4 s" in first.stderr
    assert "rank 1: frozen or its machine has failed, last seen in" in first.stderr
    assert json.loads((alpha.run_folder / "status.json").read_text())["state"] == "failed"

    connect({"alpha": alpha.space, "beta": beta.space})
    # Only after the link is connected, this torchrun notices that the other torchrun has exited.
    second = both[1].result()
    assert second.returncode == 1 and "its machine has failed or cannot be reached" in second.stderr
    for future in [machine.launch(*arguments) for machine in machines]:
        future.result().check()
    assert events(alpha.run_folder) == ["started", "failed", "resumed", "finished"]
    whole = run_on_one_machine(tmp_path, tables, 2, "data.batch_size=32", "optim.epochs=60")
    assert difference(alpha.run_folder, whole) == ""
