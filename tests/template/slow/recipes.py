"""Helpers of test_recipes*.py: what they do with a copy of the template and a patch."""

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
LEVELS = [{1: 0.3, 5: 0.0, 8: 3.0}, {}, {2: 0.5}]  # of nodes in three samples


def git_apply(copy: Path, name: str, *options: str) -> None:
    """Applies a patch to a copy, or takes it back with `--reverse`."""
    subprocess.run(["git", "apply", *options, f"tests/recipes/{name}.patch"], cwd=copy, check=True)


def adapt(copy: Path, names: str, overrides: list[str]) -> None:
    """Applies patches, lets ruff look at the result, writes the overrides into config.yaml."""
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
    """Runs a script of the copy on forked ranks, in the folder around it; returns what they print.

    All of them must end with the exit status `code`.
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
    """Makes the copy of docs/adapting.md that knows no graph, by its commands; returns it."""
    (block,) = [block for block in blocks(PAGE, "bash") if "recipes/classes" in block.text]
    commands, is_split, _ = block.text.partition("./launch.sh test")
    assert is_split
    commands = commands.replace("../mine", str(folder))
    subprocess.run(["bash", "-euc", commands], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def refuse(copy: Path, message: str, script: str, *arguments: str) -> None:
    """Runs a script of the copy, which must say once what is wrong with the input.

    The message may be the beginning of what it says.
    """
    output = launch(copy, 1, script, *arguments, code=2)
    assert output.count(f"error: {message}") == 1, output
    assert "Traceback" not in output


def train(
    copy: Path, *overrides: str, name: str = "run", script: str = "train.py"
) -> tuple[dict, list[dict]]:
    """Returns the last checkpoint and the metrics of a run on two ranks, which must finish."""
    launch(copy, 2, script, *overrides, f"run.name={name}")
    run = copy.parent / "runs" / name
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    (test,) = read_metrics(run, "test")
    assert test["loss"] > 0
    assert test["pearson"] is not None
    return torch.load(newest_checkpoint(run), weights_only=True), read_metrics(run)


def parity_holds(copy: Path, *options: str) -> bool:
    """Computes what `python -m tests.check parity --world-sizes 1,2` does, but starts faster."""
    folder = copy.parent / "parity"
    shutil.rmtree(folder, ignore_errors=True)
    for world_size in (1, 2):
        launch(copy, world_size, "tests/check.py", "parity-worker", str(folder), *options)
    return compare_runs([1, 2], folder)


def assert_parity(copy: Path) -> None:
    assert parity_holds(copy)


@contextlib.contextmanager
def edited(path: Path, changes: dict[str, str]) -> Iterator[None]:
    """In the block, a file has another text in place of each of some, which stand there once."""
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

if __name__ == "__main__":  # which processes that the tests start import
    multiprocessing.current_process().daemon = False  # or they could start none
    sys.exit(pytest.main({arguments}))
"""


def run_tests(copy: Path, file: str, *options: str) -> None:
    """Runs tests of the copy; all of them must pass."""
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", *options, str(copy / file)]
    (copy / "run_tests.py").write_text(RUN_TESTS.format(arguments=arguments))
    launch(copy, 1, "run_tests.py")


def assert_contract(copy: Path) -> None:
    """Runs what `./launch.sh test -m contract` does, except for its parity test."""
    run_tests(copy, "tests/test_contract.py", "-m", "contract", "-k", "not two_ranks")


def add_levels(folder: Path) -> None:
    """Gives names in the table of scores, of two thirds of the nodes, a level."""
    lines = (folder / "scores.tsv").read_text()
    for node in range(30):
        name = f"Y{node:02}"
        lines = lines.replace(name, name + ("", "=0.3", "=3")[node % 3])
    (folder / "scores.tsv").write_text(lines)


def graph_of_20() -> SharedGraph:
    """Returns a graph of 20 nodes, 60 edges of one relation, and then 30 of another."""
    preset = Preset(20, {"physical": 60, "b": 30}, 2, 10, (1, 3))
    return SharedGraph(synthetic_tables(preset, seed=0).graph())


def batch_of(graph: SharedGraph, sets: list) -> Data:
    """Returns a batch of sets of deleted nodes, or of {node: level}."""
    tables = tables_of(sets, torch.zeros(len(sets)))
    return KnockoutDataset(tables, graph.degree).__getitems__(range(len(sets)))
