"""The checks for users pass on the template and fail on broken copies of it."""

import math
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import copy_template, launch_forked
from tests.tools import parity
from tests.tools.runs import relative_difference

PARITY = [sys.executable, "-m", "tests.check", "parity", "model.hidden=8"]
BROKEN = {
    "loss divided by the local batch": (
        "train.py",
        "env.world_size / max(1, num_scores)",
        "env.world_size / batch.weight.sum().clamp(min=1)",
    ),
    "DDP's average not undone": (
        "train.py",
        "env.world_size / max(1, num_scores)",
        "1 / max(1, num_scores)",
    ),
    "gradients exchanged too early": (
        "train.py",
        "last=micro == optim.accumulate - 1",
        "last=micro == 0",
    ),
    "a different order on each rank": ("train.py", "seed=seed,", "seed=seed + env.rank,"),
    "errors of float32": (
        "train.py",
        "env.world_size / max(1, num_scores)",
        "env.world_size / max(1, num_scores) * (1 + 6e-8 * env.rank)",
    ),
    "the same rows on each rank": ("data.py", "[:, :, self.rank]", "[:, :, 0]"),
    "a buffer of integers": (
        "model.py",
        'self.register_buffer("y_offset"',
        'self.register_buffer("num_ranks", '
        'torch.tensor(int(__import__("os").environ.get("WORLD_SIZE", 1))))\n'
        '        self.register_buffer("y_offset"',
    ),
}


def test_parity_holds_on_1_2_and_4_ranks(run, tables, tmp_path):
    """A third of the names have levels."""
    path = tmp_path / "scores.tsv"
    path.write_text(re.sub(r"[036]\b(?=[,\t])", r"\g<0>=0.3", path.read_text()))
    assert path.read_text().count("=0.3") > 50
    result = run([*PARITY, *tables], timeout=240).check()
    lines = result.stdout.splitlines()
    assert lines[-1] == "PASS"
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        f"{ranks} ranks, accumulate {accumulate}" for ranks in (1, 2, 4) for accumulate in (1, 2)
    ][1:]


@pytest.mark.parametrize("name", BROKEN)
def test_parity_fails_on_a_broken_copy(tables, tmp_path, monkeypatch, capsys, name):
    file, right, wrong = BROKEN[name]
    copy = copy_template(tmp_path / "copy")
    text = (copy / file).read_text()
    assert text.count(right) == 1
    (copy / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(parity, "launch", partial(launch_forked, script=f"{copy}/tests/check.py"))
    arguments = [
        "model.hidden=8",
        *(re.sub(r"=(.*\.tsv)", rf"={tmp_path}/\1", override) for override in tables),
    ]
    assert not parity.parity(
        SimpleNamespace(world_sizes=[1, 2], arguments=arguments, timeout=60, cpu=True)
    )
    output = capsys.readouterr().out
    assert "FAIL, the tensor that differs most is " in output
    assert ("tensor that differs most is num_ranks" in output) == (name == "a buffer of integers")


def test_integers_and_bools_are_compared_by_equality():
    mask = torch.tensor([True, False])
    number = torch.tensor(2**53)
    norm = torch.tensor(5.0)
    assert (
        relative_difference(mask, mask.clone(), norm)
        == relative_difference(number, number.clone(), norm)
        == 0
    )
    assert (
        relative_difference(mask, ~mask, norm)
        == relative_difference(number, number + 1, norm)
        == math.inf
    )
    assert relative_difference(
        torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]), norm
    ) == pytest.approx(0.1)


def test_parity_holds_for_a_parameter_whose_gradient_is_rounding_errors(
    tables, tmp_path, monkeypatch
):
    """A shift of all outputs, less their mean, as before a softmax."""
    copy = copy_template(tmp_path / "copy")
    text = (copy / "model.py").read_text()
    for right, shifted in (
        (
            "        self.unseen =",
            "        self.shift = nn.Parameter(torch.zeros(1))\n        self.unseen =",
        ),
        (
            "        return self.y_offset + self.y_std * prediction.to(self.y_offset.dtype)\n",
            "        outputs = torch.cat([prediction, 0.3 * prediction, 0.7 * prediction], dim=1) "
            "+ self.shift\n"
            "        prediction = (outputs - outputs.mean(dim=1, keepdim=True)).narrow(1, 0, 1)\n"
            "        return self.y_offset + self.y_std * prediction\n",
        ),
    ):
        assert text.count(right) == 1
        text = text.replace(right, shifted)
    (copy / "model.py").write_text(text)
    monkeypatch.setattr(parity, "launch", partial(launch_forked, script=f"{copy}/tests/check.py"))
    arguments = [
        "model.hidden=8",
        *(re.sub(r"=(.*\.tsv)", rf"={tmp_path}/\1", override) for override in tables),
    ]
    assert parity.parity(
        SimpleNamespace(world_sizes=[1, 2], arguments=arguments, timeout=60, cpu=True)
    )


def test_a_check_that_cannot_run_says_why(run):
    result = run([*PARITY, "optim.rate=1"])
    assert result.returncode == 2
    assert "unknown option optim.rate: did you mean optim." in result.stderr
