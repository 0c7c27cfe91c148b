"""What holds for the project as a whole."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

IMPORTS = {
    "mask": set(),
    "model": {"mask"},
    "data": set(),
    "ddp_setup": set(),
    "train": {"mask", "model", "data", "ddp_setup"},
}


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_is_content(command):
    result = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", IMPORTS)
def test_imports_point_one_way(module):
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & set(IMPORTS) == IMPORTS[module]


def test_runtime_requirements_are_four_and_pinned():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in lines] == ["torch", "torch-geometric", "pyyaml", "tqdm"]
    assert all("==" in line for line in lines)
