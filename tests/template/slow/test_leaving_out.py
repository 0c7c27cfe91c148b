"""Copies without a part, or without all parts, train and compute the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import read_options
from tests.template import make_copy
from tests.template.fixtures import ROOT, SMALL
from tests.template.parts_list import PARTS, mentions, num_lines

BY_NAME = {part.name: part for part in PARTS}
EACH = [*BY_NAME, "all"]
# Without model_reach.py, sums of the first layer are added, and rounded, in a different order.
ROUNDING = {"reach": 1e-6, "all": 1e-6}
MOST_LINES = 3670  # largest number of lines of code in the core; the goal is 3,450


def parts_without(name: str) -> list:
    return PARTS if name == "all" else [BY_NAME[name]]


def as_typed(value: object) -> str:
    """Returns the value of an option in the form that a command line needs."""
    return value if isinstance(value, str) else json.dumps(value)


def rows_of(run: Path) -> list[dict]:
    """Returns the losses of a run, and its metrics that do not depend on rivals."""
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = ("step", "loss", "grad_norm", "mse", "pearson")
        rows.append({key: value for key, value in row.items() if key in names})
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="session")
def rows_of_template() -> dict[tuple, list[dict]]:
    """{(number of ranks, *options): rows} of runs of the template."""
    return {}


@pytest.mark.parametrize("name", EACH)
def test_a_copy_without_a_part_trains_as_the_template_does(
    command, tables, tmp_path, rows_of_template, name
):
    """The copy trains on two ranks; the copy without all parts also trains on one.

    Its logs and the help of its commands must not mention the part.
    """
    copy = tmp_path / "copy"
    assert make_copy.main([str(copy), "--without", name]) == 0
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "."]
    subprocess.run(ruff, cwd=copy, check=True, timeout=60)
    values = read_options(copy / "config.yaml")
    names = [part.option for part in parts_without(name) if part.option]
    off = sorted({f"{option}={as_typed(values[option])}" for option in names})
    options = [*tables, *SMALL]
    tolerance = ROUNDING.get(name, 0)
    for world_size in (2, 0) if name == "all" else (2,):
        own = f"own{world_size}"
        command(world_size, copy / "train.py", *options, f"run.name={own}", start=True).check()
        found = rows_of(tmp_path / "runs" / own)
        key = (world_size, *off)
        if key not in rows_of_template:
            command(world_size, "train.py", *options, *off, "run.name=template").check()
            rows_of_template[key] = rows_of(tmp_path / "runs/template")
            shutil.rmtree(tmp_path / "runs/template")
        expected = rows_of_template[key]
        assert len(found) == len(expected) >= 3
        for row, expected_row in zip(found, expected, strict=True):
            assert row == pytest.approx(expected_row, rel=tolerance, abs=tolerance)
    texts = [(tmp_path / "runs/own2/log.rank0.txt").read_text()]
    texts += run_the_other_commands(command, tmp_path, copy)
    if not (copy / "predict.py").exists():
        assert_template_predicts(command, tmp_path / "runs/own2")
    unwanted = mentions(make_copy.left_out([name]))
    lines = "\n".join(texts).splitlines()
    assert [line for line in lines if unwanted.search(line)] == []


def assert_template_predicts(command, run: Path) -> None:
    """The template predicts the test rows of a copy's run as the copy did."""
    header, *rows = [line.split("\t") for line in (run / "test.tsv").read_text().splitlines()]
    (run / "ask.tsv").write_text("\n".join(["genes", *(genes for genes, *_ in rows)]))
    command(0, "predict.py", run / "ask.tsv", run).check()
    _, *lines = (run.parents[1] / "ask.predictions.tsv").read_text().splitlines()
    predicted = [float(line.split("\t")[1]) for line in lines]
    column = header.index("score_prediction")
    assert predicted == pytest.approx([float(row[column]) for row in rows], rel=1e-5, abs=1e-5)
    assert len(predicted) > 10


def run_the_other_commands(command, folder: Path, copy: Path) -> list[str]:
    """Predicts and analyses with a copy, if it has these parts; returns the printed texts.

    They include the help of all commands.
    """
    scripts = ("train.py", "predict.py", "analyse.py", "tests/check.py")
    there = [copy / script for script in scripts if (copy / script).exists()]
    printed = [command(0, script, "--help", start=True).check().stdout for script in there]
    if (copy / "predict.py").exists():
        (folder / "ask.tsv").write_text("genes\nY01\nY02,Y03\n")
        arguments = [copy / "predict.py", "ask.tsv", "runs/own2"]
        printed.append(command(0, *arguments, start=True).check().stdout)
        assert len((folder / "ask.predictions.tsv").read_text().splitlines()) == 3
        if (copy / "predict_explain.py").exists():
            printed.append(command(0, *arguments, "--explain", "3", start=True).check().stdout)
    if (copy / "analyse.py").exists():
        printed.append(command(0, copy / "analyse.py", "runs/own2", start=True).check().stdout)
    return printed


def test_the_tests_of_a_copy_pass(run, tmp_path):
    """The command is `./launch.sh test`; test_copy.py runs it in an edited core copy."""
    copy = tmp_path / "copy"
    assert make_copy.main([str(copy)]) == 0
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tested = run([str(copy / "launch.sh"), "test"], timeout=600, PATH=path, PYTHONPATH="").check()
    assert " passed" in tested.stdout and "failed" not in tested.stdout


def test_the_core_is_small():
    of_parts = {file for part in PARTS for file in part.files}
    core = [path for path in ROOT.glob("*.py") if path.name not in of_parts]
    assert num_lines(core) <= MOST_LINES
