"""Helpers for test_recipes*.py: they apply patches to a copy of the template, and run the copy."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from torch_geometric.data import Data

from data import KnockoutDataset
from mask import SharedGraph
from tests.bench.synthetic import Preset, synthetic_tables
from tests.sets import tables_of
from tests.template.fixtures import ROOT, SMALL, fork_ranks, join
from tests.template.pages import blocks
from tests.tools.parity import compare_runs
from tests.tools.runs import newest_checkpoint, read_metrics

PAGE = ROOT / "docs/adapting.md"
LEVELS = [{1: 0.3, 5: 0.0, 8: 3.0}, {}, {2: 0.5}]  # {node: level} of three samples


def git_apply(copy: Path, name: str, *options: str) -> None:
    """Applies a patch to a copy, or undoes it with `--reverse`."""
    subprocess.run(["git", "apply", *options, f"tests/recipes/{name}.patch"], cwd=copy, check=True)


def adapt(copy: Path, names: str, overrides: list[str]) -> None:
    """Applies patches, checks the result with ruff, and writes the overrides into config.yaml."""
    for name in names.split():
        git_apply(copy, name)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
        result = subprocess.run(ruff, cwd=copy, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout
    config = yaml.safe_load((copy / "config.yaml").read_text())
    for override in [*SMALL, *overrides]:
        key, value = override.split("=")
        section, option = key.split(".")
        config[section][option] = yaml.safe_load(value)
    (copy / "config.yaml").write_text(yaml.safe_dump(config))


def launch(copy: Path, world_size: int, script: str, *arguments: str, code: int = 0) -> str:
    """Runs a script of the copy on forked ranks; returns their output.

    The working directory is the folder that contains the copy. All ranks must end with the exit
    status `code`.
    """
    _store, ranks = fork_ranks(copy.parent, world_size, str(copy / script), [*arguments])
    codes = join(ranks)
    output = ""
    for rank in range(world_size):
        for path in copy.parent.glob(f"rank{rank}.std*"):
            output += path.read_text() + "\n"
    assert codes == [code] * world_size, output
    return output


def copy_of_classes(folder: Path) -> Path:
    """Makes the copy without a graph, with the commands of docs/adapting.md; returns its folder."""
    (block,) = [block for block in blocks(PAGE, "bash") if "recipes/classes" in block.text]
    commands, is_split, _ = block.text.partition("./launch.sh test")
    assert is_split
    commands = commands.replace("../mine", str(folder))
    subprocess.run(["bash", "-euc", commands], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def refuse(copy: Path, message: str, script: str, *arguments: str) -> None:
    """Runs a script of the copy, which must print one error message about wrong input.

    The error message must start with `message`.
    """
    output = launch(copy, 1, script, *arguments, code=2)
    assert output.count(f"error: {message}") == 1, output
    assert "Traceback" not in output


def train(
    copy: Path, *overrides: str, name: str = "run", script: str = "train.py"
) -> tuple[dict, list[dict]]:
    """Trains on two ranks; returns the last checkpoint and the rows of metrics.jsonl.

    The run must finish.
    """
    launch(copy, 2, script, *overrides, f"run.name={name}")
    run = copy.parent / "runs" / name
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    (test,) = read_metrics(run, "test")
    assert test["loss"] > 0
    assert test["pearson"] is not None
    return torch.load(newest_checkpoint(run), weights_only=True), read_metrics(run)


def parity_holds(copy: Path, *options: str) -> bool:
    """Returns whether `tests.check parity --world-sizes 1,2` passes, with a faster start."""
    folder = copy.parent / "parity"
    shutil.rmtree(folder, ignore_errors=True)
    for world_size in (1, 2):
        launch(copy, world_size, "tests/check.py", "parity-worker", str(folder), *options)
    return compare_runs([1, 2], folder)


def assert_parity(copy: Path) -> None:
    assert parity_holds(copy)


@contextlib.contextmanager
def edited(path: Path, changes: dict[str, str]) -> Iterator[None]:
    """Replaces texts in a file inside the `with` block: `changes` is {old text: new text}.

    Each old text must occur exactly once.
    """
    original = path.read_text()
    text = original
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(original)


RUN_TESTS = """
import multiprocessing, sys
import pytest

if __name__ == "__main__":  # processes that the tests start import this file
    multiprocessing.current_process().daemon = False  # a daemon may not start processes
    sys.exit(pytest.main({arguments}))
"""


def run_tests(copy: Path, file: str, *options: str) -> None:
    """Runs the tests in a file of the copy; all of them must pass."""
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", *options, str(copy / file)]
    (copy / "run_tests.py").write_text(RUN_TESTS.format(arguments=arguments))
    launch(copy, 1, "run_tests.py")


def assert_contract(copy: Path) -> None:
    """Runs the tests of `./launch.sh test -m contract` in the copy; all of them must pass."""
    run_tests(copy, "tests/test_contract.py", "-m", "contract")


def add_levels(folder: Path) -> None:
    """Adds a level to two thirds of the nodes, wherever the table of scores lists them."""
    lines = (folder / "scores.tsv").read_text()
    for node in range(30):
        name = f"Y{node:02}"
        lines = lines.replace(name, name + ("", "=0.3", "=3")[node % 3])
    (folder / "scores.tsv").write_text(lines)


def graph_of_20() -> SharedGraph:
    """Returns a graph with 20 nodes, and two relations with 60 and 30 edges."""
    preset = Preset(20, {"physical": 60, "b": 30}, 2, 10, (1, 3))
    return SharedGraph(synthetic_tables(preset, seed=0).graph())


def batch_of(graph: SharedGraph, sets: list) -> Data:
    """Returns a batch with a sample for each set: a list of deleted nodes, or {node: level}."""
    tables = tables_of(sets, torch.zeros(len(sets)))
    return KnockoutDataset(tables, graph.degree).__getitems__(range(len(sets)))
