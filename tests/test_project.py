"""Properties of the project as a whole."""

import ast
import dataclasses
import subprocess
import sys

import pytest

import train
from config import Config
from tests import conftest
from tests.conftest import MODULES, ROOT

IMPORTS = {
    "mask": set(),
    "model": {"mask"},
    "data": set(),
    "ddp_setup": set(),
    "train": {"mask", "model", "data", "ddp_setup"},
}


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_passes(command):
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", IMPORTS)
def test_imports_point_one_way(module):
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & set(IMPORTS) == IMPORTS[module]


def test_the_tests_and_their_subprocesses_see_no_gpu(run):
    """GPUs are few, their sums not bitwise reproducible: only test_gpu.py uses them, `-m gpu`."""
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'] == '')"
    assert run([sys.executable, "-c", code]).check().stdout == "True\n"


def test_the_four_runtime_requirements_are_pinned():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in lines] == ["torch", "torch-geometric", "pyyaml", "tqdm"]
    assert all("==" in line for line in lines)


def test_every_option_is_used():
    """Validation in `__post_init__` does not count as a use."""
    code = ""
    for name in MODULES:
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if getattr(node, "name", None) == "__post_init__":
                node.body = [ast.Pass()]
        code += ast.unparse(tree).replace("self.", "config.")
    for section in dataclasses.fields(Config):
        for option in dataclasses.fields(section.type):
            forms = (f"config.{option.name}", f"{section.name}.{option.name}")
            assert any(form in code for form in forms), f"{section.name}.{option.name}"


def test_all_replaced_functions_are_named(monkeypatch):
    replaced = conftest.replaced.__wrapped__  # without the cache
    assert replaced() == ""
    monkeypatch.setattr(train, "build_model", lambda *arguments: None)
    assert replaced() == "train.build_model"
    monkeypatch.setattr(conftest, "EXAMPLE_SIZE", (1, 1, 1, 1))
    assert replaced() == "data.load, train.build_model"
