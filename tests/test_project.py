"""Properties of the project as a whole."""

import ast
import dataclasses
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from config import DEFAULTS, Config, compose, read_options
from task import KnockoutTask
from tests import conftest
from tests.conftest import MODULES, ROOT

# The modules by shelf, and what each imports of the others.
SHELVES = {
    "commands": {
        "train": (
            "config data ddp_setup ddp_watchdog errors metrics model_graphs optim predict_rows "
            "run_checkpoint run_folder run_results task"
        ),
        "predict": (
            "config data data_range data_tables ddp_setup errors predict_ensemble predict_explain "
            "predict_sets predict_table predictor run_progress run_results"
        ),
        "analyse": (
            "analyse_metrics analyse_rivals analyse_text config data data_tables ddp_setup errors "
            "metrics run_checkpoint run_folder run_plots run_results"
        ),
    },
    "what you edit": {
        "task": (
            "baseline config data data_range data_tables ddp_setup errors mask metrics model "
            "model_pairs model_reach"
        ),
        "config": "data ddp_setup errors model optim run_folder run_progress",
        "model": "baseline mask model_pairs",
        "data": "data_cache data_cells data_tables errors",
        "metrics": "",
        "optim": "ddp_setup errors",
    },
    "families": {
        "analyse_metrics": "analyse_rivals metrics run_results",
        "analyse_rivals": (
            "baseline baseline_combination data data_tables mask metrics model_pairs run_results"
        ),
        "analyse_text": "analyse_metrics",
        "baseline": (
            "baseline_combination baseline_ridge data_cache data_tables mask metrics run_progress"
        ),
        "baseline_combination": "baseline_ridge run_progress",
        "baseline_ridge": "",
        "data_cache": "",
        "data_cells": "data_names errors run_progress",
        "data_names": "",
        "data_notes": "data_cells data_names metrics",
        "data_range": "data_tables",
        "data_tables": "data_cells data_names data_notes errors metrics",
        "ddp_rendezvous": "",
        "ddp_setup": "ddp_threads ddp_watchdog errors",
        "ddp_threads": "",
        "ddp_watchdog": "errors",
        "errors": "",
        "mask": "mask_product",
        "mask_product": "",
        "model_graphs": "mask",
        "model_pairs": "data data_cache mask run_progress",
        "model_reach": "mask mask_product model",
        "predict_ensemble": (
            "baseline config data data_tables ddp_setup errors mask model model_pairs "
            "predict_explain predict_pairs predict_rows predict_sets run_checkpoint run_folder "
            "task"
        ),
        "predict_explain": "data_tables mask model predict_pairs",
        "predict_pairs": "mask model model_pairs",
        "predict_rows": "data ddp_setup run_progress task",
        "predict_sets": "data_cells data_names data_tables errors",
        "predict_table": "data_cache ddp_setup errors run_checkpoint",
        "predictor": (
            "data_cells data_tables ddp_setup errors model predict_ensemble predict_explain "
            "predict_sets"
        ),
        "run_checkpoint": "errors",
        "run_folder": "data_cache ddp_setup errors run_checkpoint run_plots run_progress",
        "run_plots": "",
        "run_progress": "",
        "run_results": "data_cells data_tables errors",
    },
}
IMPORTS = {
    module: set(names.split()) for shelf in SHELVES.values() for module, names in shelf.items()
}
SERVED = [
    "analyse",
    "baseline",
    "data",
    "ddp",
    "errors",
    "mask",
    "model",
    "predict",
    "predictor",
    "run",
]
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


def test_modules_import_what_the_table_says():
    assert {
        module: imported_by(ROOT / f"{module}.py") & set(MODULES) for module in MODULES
    } == IMPORTS


def test_imports_make_no_circle_and_no_module_imports_a_command():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError
    for module, imported in IMPORTS.items():
        assert not imported & set(SHELVES["commands"]), module


def test_a_module_begins_with_the_name_of_the_one_that_it_serves():
    """So a sorted listing of the folder shows the architecture."""
    for module in SHELVES["families"]:
        assert module == "predictor" or module.partition("_")[0] in SERVED, module


def test_what_runs_outside_the_tests_does_not_need_them():
    """An experiment can leave the folder tests out."""
    for module in MODULES:
        assert "tests" not in imported_by(ROOT / f"{module}.py"), module


def test_modules_are_short_enough_to_read():
    for module in MODULES:
        assert len((ROOT / f"{module}.py").read_text().splitlines()) <= MOST_LINES, module


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


def test_config_yaml_has_the_defaults_of_the_dataclasses():
    """What config.yaml says counts, so that a default edited in a dataclass alone does nothing."""
    options = compose(read_options(DEFAULTS)).options()
    for key, default in Config().options().items():
        assert options[key] == default, f"{key}: edit both config.yaml and the dataclass"
