"""The preflight of machines, errors of a launch, and the audits of tests/tools/audits.py."""

import re
import shutil
import socket
import warnings

import pytest
import torch
from torch import nn

from tests.template.fixtures import ROOT, fork, fork_ranks, join
from tests.tools.audits import WatchOnGPU, placement

SINGLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
SMALL = ["data.batch_size=16", "model.hidden=8"]


@pytest.mark.parametrize("nproc", [0, 4])
def test_preflight_of_a_good_machine(command, nproc):
    result = command(nproc, "ddp_machines.py", GLOO_SOCKET_IFNAME="lo").check()
    _, *ranks = result.stdout.partition("OK     versions")[0].splitlines()
    # After the lines of the ranks, there may be a note that other programs use the CPUs.
    hosts = [line.partition(", host ")[0] for line in ranks if not line.startswith("note ")]
    assert hosts == [f"rank {rank}" for rank in range(max(1, nproc))]
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith(("OK", "NOTE"))]
    expected = ["ranks", "versions", "speed"]
    if nproc:
        expected += ["all-reduce"] * 4
    assert [name for _, name, *_ in lines] == expected
    for verdict, name, *_ in lines:  # other processes may slow down a rank, which gives a NOTE
        assert verdict == "OK" or name == "speed"


def test_the_preflight_needs_no_tests(torchrun, tmp_path):
    for path in (*ROOT.glob("ddp_*.py"), ROOT / "errors.py", ROOT / "parts.py"):
        shutil.copy(path, tmp_path)
    script = tmp_path / "ddp_machines.py"
    result = torchrun(2, script, PYTHONPATH="", GLOO_SOCKET_IFNAME="lo").check()
    assert "OK     all-reduce" in result.stdout


@pytest.mark.parametrize(
    ("what", "status", "expected"),
    [
        ("slow", 0, r"NOTE   speed        a matrix .* to 9000.0 ms, slowest on rank 1"),
        ("torch", 2, r"error: torch differs between ranks: 1.0 on rank 1, "),
        (
            "sum",
            1,
            r"error: an all-reduce gives [12].0 instead of 3: do not train on these machines",
        ),
    ],
)
def test_preflight_of_a_bad_machine(tmp_path, what, status, expected):
    arguments = ["preflight_of_a_bad_machine", what]
    _store, ranks = fork_ranks(tmp_path, 2, "tests/template/workers.py", arguments)
    assert join(ranks) == [status] * 2
    output = "".join(path.read_text() for path in tmp_path.glob("rank*.std*"))
    assert len(re.findall(expected, output)) == 1, output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "one"},
            "WORLD_SIZE or RANK is set in the environment, .*'one'.*: use torchrun, ",
        ),
        ({"MASTER_PORT": ""}, "MASTER_ADDR=localhost MASTER_PORT= .*MASTER_PORT"),
        ({"MASTER_ADDR": "nowhere.invalid"}, "MASTER_ADDR=nowhere.invalid "),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR=localhost MASTER_PORT=1 .*: set the address of rank 0"),
        ({}, r"\(no answer\): .* a free port"),  # another program uses the port
    ],
)
def test_a_launch_that_cannot_work_is_an_error_with_one_message(
    tmp_path, tables, variables, message
):
    command = [str(ROOT / "train.py"), *tables, "ddp.startup_timeout_s=1"]
    with socket.create_server(("localhost", 0)) as server:
        store = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
        rank = fork(tmp_path, "train", command, {**SINGLE, **store, **variables})
        assert join([rank], timeout=30) == [2]
    error = (tmp_path / "train.stderr").read_text()
    if "RANK" not in variables:
        message = f"rank 1 on .* cannot reach the other ranks at .*{message}"
    assert re.search(f"^error: {message}.*\n", error, re.M), error
    assert "Traceback" not in error


def test_different_versions_on_a_rank_stop_the_run(train):
    result = train(2, fault="other_cuda_on_rank_1")
    assert result.returncode == 2
    assert len(re.findall("error: CUDA differs .*99.9 on rank 1", result.stderr)) == 1


def test_the_audit_of_devices_passes_on_the_template(command, tables):
    """test_copy.py tests the other audits."""
    result = command(0, "tests/check.py", "devices", *tables, *SMALL).check()
    assert "optimizer state" in result.stdout and result.stdout.splitlines()[-1] == "PASS"


def test_the_audit_of_a_gpu_reports_waits_but_not_the_warning_of_the_debug_mode(monkeypatch):
    notice = "Synchronization debug mode is a prototype feature and does not yet detect all"

    def set_mode(mode: str) -> None:
        if mode == "warn":
            warnings.warn(notice, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    watch = WatchOnGPU()
    watch.begin()
    warnings.warn("called a synchronizing operation (Triggered internally at ...)", stacklevel=1)
    assert [what for _, what in watch.end()] == ["called a synchronizing operation"]


def test_the_audit_names_misplaced_tensors():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.ones(1, 2, device="meta")
    model.register_buffer("scale", torch.ones(1, device="meta"))
    found = {"model": model, "optimizer": optimizer, "batch": {"y": [torch.ones(1)]}}
    lines = placement(found, torch.device("cpu"))
    assert [line.strip() for line in lines if "MISPLACED" in line] == [
        "MISPLACED  model.scale is on meta: move it to cpu",
        "MISPLACED  optimizer.state[weight].exp_avg is on meta: move it to cpu",
    ]
    assert "  optimizer state   5 on cpu, 1 on meta" in lines
    assert "  batch             1 on cpu" in lines
