"""What is found before and beside training: preflight, profile, audits, scaling."""

import json
import re
import socket
import sys
import time

import pytest
import torch
from torch import nn

import train as TRAIN
from ddp_setup import reach
from tests.audits import placement
from tests.bench.scaling import advice, fitted, ring_ms
from tests.conftest import ROOT, fork, fork_ranks, join

SINGLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("nproc", [0, 1, 2, 4])
def test_preflight_of_a_good_machine(torchrun, nproc):
    start = time.monotonic()
    result = torchrun(nproc, ROOT / "ddp_setup.py", GLOO_SOCKET_IFNAME="lo").check()
    assert time.monotonic() - start < 60  # 10 s on a machine that does nothing else
    lines = result.stdout.splitlines()
    header, *ranks = lines[: lines.index("")]
    assert header.split()[:5] == ["rank", "host", "pid", "LOCAL_RANK", "device"]
    assert [rank.split()[0] for rank in ranks] == [str(rank) for rank in range(max(1, nproc))]
    words = [line.split() for line in lines]
    found = {word[1]: word[0] for word in words if word and word[0] in ("OK", "NOTE", "WRONG")}
    assert found.pop("speed") in ("OK", "NOTE")  # other processes may be at work here
    names = ["variables", "devices", "versions", "environment"] + ["all-reduce", "clocks"] * (nproc > 0)
    assert found == dict.fromkeys(names, "OK")
    assert ("all-reduce: latency" in result.stdout) == (nproc > 0)


def test_preflight_of_a_bad_machine(tmp_path):
    _store, ranks = fork_ranks(
        tmp_path, 2, "tests/workers.py", ["preflight_of_a_bad_machine"], {"NCCL_TIMEOUT": "9", "NCCL_DEBUG": "WARN"}
    )
    assert join(ranks) == [1, 1]
    output = (tmp_path / "rank0.stdout").read_text()
    assert "WRONG  versions     rank 1 has another torch than rank 0: 1.0 and" in output
    assert "NOTE   environment  nothing in this PyTorch reads NCCL_TIMEOUT: unset it" in output
    assert "NOTE   speed        rank 1 takes 9000.0 ms for a matrix product" in output
    assert "WRONG  all-reduce   the sum over ranks is 1.0 to 1.0, not 3.0" in output
    assert re.search(r"NOTE   clocks       that of rank 1 is \+(99|100)\.\d s off rank 0's", output)
    assert (tmp_path / "rank1.stdout").read_text() == ""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCAL_RANK": "", "MASTER_PORT": ""}, "WORLD_SIZE is set but LOCAL_RANK, MASTER_PORT is not: start with"),
        ({"RANK": "one"}, "RANK=one is not a whole number: start with torchrun"),
        ({"RANK": "2"}, "RANK=2, LOCAL_RANK=1, WORLD_SIZE=2, MASTER_PORT=29500 cannot be"),
        ({"MASTER_ADDR": "nowhere.invalid"}, "rank 1 on .* cannot reach MASTER_ADDR=nowhere.invalid MASTER_PORT=29500"),
        ({"MASTER_PORT": "1"}, "cannot reach MASTER_ADDR=localhost MASTER_PORT=1 .*set the address of rank 0"),
    ],
)
def test_a_launch_that_cannot_work_is_refused_in_a_sentence(tmp_path, tables, variables, words):
    command = [str(ROOT / "train.py"), *tables, "ddp.startup_timeout_s=1"]
    (code,) = join([fork(tmp_path, "train", command, {**SINGLE, **variables})], timeout=30)
    error = (tmp_path / "train.stderr").read_text()
    assert code == 2
    assert re.fullmatch(f"error: .*{words}.*\n", error), error


def test_a_program_that_listens_and_never_answers_is_told_of(tmp_path, tables):
    with socket.create_server(("localhost", 0)) as mute:
        variables = {**SINGLE, "MASTER_PORT": str(mute.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        command = [str(ROOT / "train.py"), *tables, "ddp.startup_timeout_s=1"]
        (code,) = join([fork(tmp_path, "train", command, variables)], timeout=30)
    error = (tmp_path / "train.stderr").read_text()
    assert code == 2
    assert re.fullmatch("error: rank 1 on .* cannot reach .* \\(it does not answer\\): look which .*\n", error), error


def test_reach_waits_for_a_listener_and_no_longer_than_it_should():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(OSError):
            reach("localhost", port, 1.0)
        assert time.monotonic() - start < 10
        taken.listen()
        reach("localhost", port, 1.0)


def test_other_versions_on_a_rank_stop_the_run(train, tmp_path):
    (tmp_path / "other.py").write_text(
        "import os, torch, train\nif os.environ['RANK'] == '1':\n    torch.version.cuda = '99.9'\ntrain.main()\n"
    )
    result = train(2, script=tmp_path / "other.py")
    assert result.returncode == 2
    assert result.stderr.count("error: rank 1 has another CUDA than rank 0: 99.9 and") == 1


def test_a_profile_traces_each_rank_and_names_the_slowest(train, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time, data, train\nif os.environ['RANK'] == '1':\n    build = data.KnockoutDataset.__getitems__\n"
        "    data.KnockoutDataset.__getitems__ = lambda *a: time.sleep(0.05) or build(*a)\ntrain.main()\n"
    )
    result = train(2, "log.profile_steps=3", "optim.epochs=2", script=tmp_path / "slow.py").check()
    shares = re.search(r"profile   3 steps of [\d.]+ ms: (.*)", result.stdout)[1]
    values = dict(part.rsplit(" ", 2)[:2] for part in shares.split(", "))
    assert list(values) == [*TRAIN.Profile.PHASES, "communication not hidden"]
    assert sum(map(float, values.values())) == pytest.approx(100, abs=0.5)
    assert float(values["data"]) > 15
    slowest = re.search(
        r"the slowest is rank (\d) with ([\d.]+) ms of its own a step, the median is ([\d.]+)", result.stdout
    )
    assert slowest[1] == "1" and float(slowest[2]) > float(slowest[3]) > 20
    for rank in (0, 1):
        events = json.loads((tmp_path / f"runs/default/trace.rank{rank}.json").read_text())["traceEvents"]
        phases = [
            event for event in events if event.get("name") == "backward" and event.get("cat") == "user_annotation"
        ]
        assert len(phases) == 3
        assert any(event.get("name") == "gloo:all_reduce" for event in events)


def test_without_a_profile_nothing_listens(train, tmp_path):
    (tmp_path / "none.py").write_text(
        "import torch, train\ntorch.profiler.profile = lambda *a, **k: 1 / 0\ntrain.main()\n"
    )
    train(1, script=tmp_path / "none.py").check()
    assert not list((tmp_path / "runs/default").glob("trace*"))


def test_spans_are_counted_once():
    assert TRAIN.covered([(0, 2), (1, 3), (1, 2), (10, 11)]) == 4
    assert TRAIN.covered([]) == 0


def test_the_audits_pass_on_the_template(run, tables):
    for name, found in (("devices", "optimizer state"), ("syncs", "nothing waits for the device")):
        command = [sys.executable, "-m", "tests.check", name, *tables, "data.batch_size=16", "model.hidden=8"]
        result = run(command).check()
        assert found in result.stdout and result.stdout.splitlines()[-1] == "PASS"


def test_the_audit_names_the_line_that_waits(run, tables, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\nclip = torch.nn.utils.clip_grad_norm_\n"
        "def waiting(*arguments):\n    norm = clip(*arguments)\n    norm.item()\n    return norm\n"
        "torch.nn.utils.clip_grad_norm_ = waiting\n"
    )
    command = [sys.executable, "-m", "tests.check", "syncs", *tables, "data.batch_size=16", "model.hidden=8"]
    result = run(command, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.returncode == 1
    assert re.search(
        r"WAITS  train.py:\d+ \(grad_norm = .*clip_grad_norm_.*_local_scalar_dense.*in 10 of 10", result.stdout
    )


def test_the_audit_names_what_lies_elsewhere():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.ones(1, 2, device="meta")
    model.register_buffer("scale", torch.ones(1, device="meta"))
    lines = placement({"model": model, "optimizer": optimizer, "batch": {"y": [torch.ones(1)]}}, torch.device("cpu"))
    assert [line.strip() for line in lines if "MISPLACED" in line] == [
        "MISPLACED  model.scale is on meta: move it to cpu",
        "MISPLACED  optimizer.state[weight].exp_avg is on meta: move it to cpu",
    ]
    assert "  optimizer state   5 on cpu, 1 on meta" in lines and "  batch             1 on cpu" in lines


def test_the_scaling_report(run):
    command = [
        sys.executable,
        "-m",
        "tests.bench.scaling",
        "--processes=2",
        "--preset=small",
        "--hidden=8",
        "--rounds=1",
    ]
    output = run(command).check().stdout
    for row in ("| weak    | 2 ", "| strong  | 2 ", "| ddp.static_graph=true", "| 1,024 "):
        assert row in output


def test_the_parts_of_the_scaling_report():
    latency, rate = fitted([(size, 0.5 + size / 2e6) for size in (1e3, 1e5, 1e7)])
    assert latency == pytest.approx(0.5) and rate == pytest.approx(2.0)
    assert ring_ms(8e6, 4, 10.0, 1.0) == pytest.approx(6 * (0.01 + 2.0))
    well = nn.Linear(1, 1)
    assert advice(0.1, 0.01, well, 4) == []
    assert [sentence.split(":")[0] for sentence in advice(0.4, 0.2, nn.BatchNorm1d(1), 4)] == ["advice"] * 3
    assert advice(0.1, 0.01, nn.BatchNorm1d(1), 64) == []
