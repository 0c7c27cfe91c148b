"""Properties of the project as a whole."""

import ast
import dataclasses
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from config import DEFAULTS, Config, compose, read_options
from task import KnockoutTask
from tests.template import fixtures
from tests.template.fixtures import MODULES, ROOT
from tests.template.parts_list import PARTS

COMMANDS = {"train", "predict", "analyse", "ddp_machines"}
FAMILIES = {"ddp", "run"}  # first words of module names that are not themselves modules
PART_MODULES = {Path(file).stem for part in PARTS for file in part.files}
CORE = set(MODULES) - PART_MODULES
MOST_LINES = 560  # largest number of lines of a module


def modules_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names of the modules that statements, or calls of `optional("module")`, import.

    For a module in a package, it is the name of the package.
    """
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "optional":
            names.add(node.args[0].value)
    return names


def imported_by(module: str) -> set[str]:
    """Returns the modules that a module imports, including imports in functions."""
    return modules_in(ast.walk(ast.parse((ROOT / f"{module}.py").read_text())))


def imported_at_the_top(module: str) -> set[str]:
    """Returns the modules that a module imports, except for imports in functions."""
    reached = []
    queue = [ast.parse((ROOT / f"{module}.py").read_text())]
    while queue:
        node = queue.pop()
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            reached.append(node)
            queue.extend(ast.iter_child_nodes(node))
    return modules_in(reached)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_passes(command):
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_the_core_imports_no_optional_part_at_the_top_of_a_module():
    found = {(module, name) for module in CORE for name in imported_at_the_top(module)}
    assert not {(module, name) for module, name in found if name in PART_MODULES}


def test_imports_make_no_circle_and_no_module_imports_a_command():
    imports = {module: imported_by(module) for module in MODULES}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError
    for module, imported in imports.items():
        assert not imported & COMMANDS, module


def test_every_command_is_known():
    for module in MODULES:
        ends_process = "end_process(main())" in (ROOT / f"{module}.py").read_text()
        assert ends_process == (module in COMMANDS), module


def test_a_module_name_begins_with_the_name_of_the_module_that_it_serves():
    """A sorted list of the files therefore shows the architecture."""
    for module in MODULES:
        assert module.partition("_")[0] in {*MODULES, *FAMILIES}, module


def test_no_module_imports_the_tests():
    """An experiment may therefore delete the folder tests."""
    for module in MODULES:
        assert "tests" not in imported_by(module), module


def test_modules_are_short_enough_to_read():
    for module in MODULES:
        assert len((ROOT / f"{module}.py").read_text().splitlines()) <= MOST_LINES, module


def test_the_tests_and_their_subprocesses_see_no_gpu(run):
    """`python -m tests.check gpu` tests GPUs. Here, GPUs are hidden.

    A machine has few GPUs, and their sums are not bitwise reproducible.
    """
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'] == '')"
    assert run([sys.executable, "-c", code]).check().stdout == "True\n"


def test_the_four_runtime_requirements_are_pinned():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in lines] == ["torch", "torch-geometric", "pyyaml", "tqdm"]
    assert all("==" in line for line in lines)


def test_the_workflow_takes_the_pinned_versions_and_the_oldest_that_launch_sh_accepts():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    commands = {}
    for name, job in jobs.items():
        commands[name] = [step["run"] for step in job["steps"] if "run" in step]
    assert commands["pinned"] == [".ci/run"] and (ROOT / ".ci/run").is_file()
    needed = re.findall(r"\('(\w+)', \((\d+), (\d+)\)\)", (ROOT / "launch.sh").read_text())
    assert len(needed) == 2
    for package, *version in needed:
        assert f" {package.replace('_', '-')}=={'.'.join(version)}." in commands["oldest"][0]


def test_every_option_is_used():
    """A check in `__post_init__` does not count as a use of an option."""
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
    replaced = fixtures.replaced.__wrapped__  # without the cache
    assert replaced() == ""
    monkeypatch.setattr(KnockoutTask, "build_model", lambda task: None)
    assert replaced() == "KnockoutTask.build_model"
    monkeypatch.setattr(fixtures, "EXAMPLE_SIZE", (1, 1, 1, 1))
    assert replaced() == "data.load, KnockoutTask.build_model"


def test_a_model_that_cannot_be_built_is_an_error_except_in_a_copy(monkeypatch, tmp_path):
    def build_model(task: KnockoutTask) -> None:
        raise ZeroDivisionError("a mistake")

    replaced = fixtures.replaced.__wrapped__  # without the cache
    monkeypatch.setattr(KnockoutTask, "build_model", build_model)
    with pytest.raises(ZeroDivisionError):
        replaced()
    monkeypatch.setattr(fixtures, "ROOT", tmp_path)
    named = "KnockoutTask.build_model, which raises ZeroDivisionError('a mistake')"
    assert replaced() == named


def test_config_yaml_has_the_default_and_a_comment_for_each_option():
    """config.yaml overrides the defaults of the dataclasses, so both must be edited together."""
    options = compose(read_options(DEFAULTS)).options()
    for key, default in Config().options().items():
        assert options[key] == default, f"{key}: edit both config.yaml and the dataclass"
    names = []
    has_comment_above = False
    for line in DEFAULTS.read_text().splitlines():
        is_comment = line.startswith("  #")
        if line.startswith("  ") and not is_comment:
            names.append(line.split(":")[0].strip())
            assert "  # " in line or has_comment_above, f"{names[-1]} has no comment"
        has_comment_above = is_comment
    assert names == [key.split(".")[1] for key in options]
