"""Properties of the project as a whole."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from task import KnockoutTask
from tests import conftest
from tests.conftest import MODULES, ROOT

# The modules by shelf, and what each imports of the others. Arrows point down: a module imports
# only what stands below it.
SHELVES = {
    "commands": {
        "train": (
            "task config data metrics optim run_folder checkpoint ddp_setup watchdog progress "
            "errors"
        ),
        "predict": (
            "predictor task config data explain sets growing_table ddp_setup progress errors"
        ),
        "analyse": (
            "config data evaluation metrics run_folder checkpoint tables rivals results plots "
            "ddp_setup errors"
        ),
    },
    "from Python": {
        "predictor": (
            "task config explain model data run_folder checkpoint sets mask tables rows ddp_setup "
            "errors"
        ),
    },
    "what you edit": {
        "task": "config model data metrics baseline reach mask tables ddp_setup progress errors",
        "config": "model data optim run_folder ddp_setup progress errors",
        "explain": "model reach mask tables errors",
        "model": "combination reach mask",
        "data": "tables cache errors",
        "evaluation": "metrics rivals results tables",
        "metrics": "tables",
        "optim": "ddp_setup errors",
    },
    "the engine": {
        "sets": "tables names rows errors",
        "growing_table": "checkpoint errors",
        "run_folder": "checkpoint cache ddp_setup plots errors",
        "checkpoint": "errors",
        "rivals": "baseline combination mask tables",
        "baseline": "combination ridge mask tables cache progress",
        "combination": "ridge mask progress",
        "ridge": "",
        "reach": "mask",
        "mask": "",
        "tables": "names rows errors",
        "results": "rows errors",
        "rows": "names progress errors",
        "names": "",
        "cache": "",
        "ddp_setup": "watchdog threads errors",
        "watchdog": "",
        "threads": "",
        "progress": "",
        "plots": "",
        "errors": "",
    },
}
IMPORTS = {
    module: set(names.split()) for shelf in SHELVES.values() for module, names in shelf.items()
}
MOST_LINES = 520  # of a module


def imported_by(path: Path) -> set[str]:
    """Returns the modules that a file imports, also within functions, without their packages."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_passes(command):
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_the_table_says(module):
    assert imported_by(ROOT / f"{module}.py") & set(MODULES) == IMPORTS[module]


def test_imports_point_down_the_shelves_only():
    """So there is no cycle, and no module imports a higher shelf's."""
    order = list(IMPORTS)
    assert set(order) == set(MODULES)
    for place, module in enumerate(order):
        assert IMPORTS[module] <= set(order[place + 1 :]), module


def test_commands_import_no_other_command():
    commands = set(SHELVES["commands"])
    for command in commands:
        assert not IMPORTS[command] & commands, command


@pytest.mark.parametrize("module", MODULES)
def test_what_runs_outside_the_tests_does_not_need_them(module):
    """An experiment can leave the folder tests out."""
    assert "tests" not in imported_by(ROOT / f"{module}.py")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_short_enough_to_read(module):
    assert len((ROOT / f"{module}.py").read_text().splitlines()) <= MOST_LINES


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
    monkeypatch.setattr(KnockoutTask, "build_model", lambda task: None)
    assert replaced() == "KnockoutTask.build_model"
    monkeypatch.setattr(conftest, "EXAMPLE_SIZE", (1, 1, 1, 1))
    assert replaced() == "data.load, KnockoutTask.build_model"
