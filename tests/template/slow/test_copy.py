"""The commands in a copy of the template that has left files out or edited the layer."""

import json

import pytest

from tests.template.fixtures import SMALL, copy_template


@pytest.fixture
def run_in_copy(command, tmp_path):
    """run_in_copy(script, *arguments) runs a script of the copy, with its own modules alone."""
    copy = copy_template(tmp_path / "copy", tests=False)
    assert not (copy / "tests").exists()

    def start(script, *arguments):
        return command(0, copy / script, *arguments).check().stdout

    return start


def test_the_commands_work_without_the_tests(run_in_copy, tmp_path):
    assert "OK     versions" in run_in_copy("ddp_machines.py")
    run_in_copy("train.py", *SMALL)
    status = json.loads((tmp_path / "runs/default/status.json").read_text())
    assert status["state"] == "finished"
    (tmp_path / "ask.tsv").write_text("genes\nG00001\nG00002,G00003\n")
    run_in_copy("predict.py", "ask.tsv", "runs/default")
    header, *rows = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    assert header.startswith("genes\t") and len(rows) == 2
    assert "pearson" in run_in_copy("analyse.py", "runs/default").lower()


EDIT = """
from model import KnockoutConv

add = KnockoutConv.add


def squared(layer, x, h, update, record):
    return add(layer, x, h, update + update.square(), record)


KnockoutConv.add = squared
"""


def test_another_layer_is_trained_with_and_without_the_pass_that_knows_only_ours(
    command, tables, tmp_path
):
    """The log says so, and the numbers are those of a copy without model_reach.py."""
    copy = copy_template(tmp_path / "copy", tests=False)
    (copy / "edit.py").write_text(EDIT)
    code = (copy / "train.py").read_text()
    (copy / "train.py").write_text(
        code.replace("\nimport torch\n", "\nimport edit\nimport torch\n")
    )

    def start(script, *arguments):
        return command(0, copy / script, *arguments)

    arguments = [*tables, *SMALL, "optim.precision=fp64"]
    kept = start("train.py", *arguments, "run.name=kept").check().stdout
    assert "model_reach.py computes other changes of states than model.py" in kept
    (copy / "model_reach.py").unlink()
    refused = start("train.py", *arguments, "run.name=deleted")
    assert refused.returncode == 2
    option = "model.message_passing=shared"
    assert f"needs model_reach.py, which is not here: set {option}\n" in refused.stderr
    start("train.py", *arguments, "run.name=deleted", option).check()
    losses = {}
    for name in ("kept", "deleted"):
        rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["loss"] for row in map(json.loads, rows) if row["kind"] == "val"]
    assert len(losses["kept"]) == 2
    assert losses["kept"] == pytest.approx(losses["deleted"], rel=1e-12)
    predicted = start("predict.py", "all-singles", "runs/kept", option).check().stdout
    assert "30 predictions written" in predicted
