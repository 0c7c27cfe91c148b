"""The proofs for users: they pass on the template and fail on one that is broken."""

import re
import shutil
import sys
from types import SimpleNamespace

import pytest

from tests import check
from tests.conftest import ROOT, launch_forked

PARITY = [sys.executable, "-m", "tests.check", "parity", "model.hidden=8"]
BROKEN = {
    "loss divided by the local batch": (
        "train.py",
        "error / num_samples",
        "error / batch.weight.sum().clamp(min=1)",
    ),
    "DDP's average not undone": ("train.py", "num_samples * env.world_size", "num_samples"),
    "gradients exchanged too early": ("train.py", "last=micro == optim.accumulate - 1", "last=micro == 0"),
    "an order of its own on each rank": (
        "train.py",
        "env.rank, seed)\n    loader",
        "env.rank, seed + env.rank)\n    loader",
    ),
    "the same rows on each rank": ("data.py", "[:, :, self.rank]", "[:, :, 0]"),
}


def test_parity_holds_on_1_2_and_4_ranks(run, tables, tmp_path):
    result = run([*PARITY, *tables], timeout=240).check()
    lines = result.stdout.splitlines()
    assert lines[-1] == "PASS"
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        f"{ranks} ranks, accumulate {accumulate}" for ranks in (1, 2, 4) for accumulate in (1, 2)
    ][1:]


@pytest.mark.parametrize("name", BROKEN)
def test_parity_fails_on_a_broken_copy(tables, tmp_path, monkeypatch, capsys, name):
    file, right, wrong = BROKEN[name]
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT,
        copy,
        ignore=lambda folder, names: {n for n in names if not n.endswith(".py") and n not in ("tests", "bench")},
    )
    shutil.copy(ROOT / "config.yaml", copy)
    text = (copy / file).read_text()
    assert text.count(right) == 1
    (copy / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(
        check, "launch", lambda n, words, timeout: launch_forked(n, words, script=f"{copy}/tests/check.py")
    )
    words = ["model.hidden=8", *(re.sub(r"=(.*\.tsv)", rf"={tmp_path}/\1", word) for word in tables)]
    assert not check.parity(SimpleNamespace(world_sizes=[1, 2], words=words, timeout=60))
    assert "FAIL" in capsys.readouterr().out


def test_a_check_that_cannot_run_says_why(run):
    result = run([*PARITY, "optim.rate=1"])
    assert result.returncode == 2
    assert "unknown option optim.rate: did you mean optim." in result.stderr
