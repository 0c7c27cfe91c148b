"""Commands, options, files, names and links on the pages exist, and sentences are short.

The pages are README.md, docs/, CHANGELOG.md, CONTRIBUTING.md and tests/bench/README.md.
test_examples.py runs their commands and examples.
"""

import dataclasses
import importlib
import re
import statistics
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import predict
import predictor
from config import Config
from ddp_setup import Distributed
from errors import UserError
from mask import SharedGraph
from metrics import METRICS
from tests import check
from tests.template.fixtures import MODULES, ROOT
from tests.template.pages import (
    CHANGELOG,
    DOCS,
    PAGES,
    README,
    VARIABLES,
    anchors,
    block_commands,
    blocks,
    headings,
    inline_commands,
    name_of,
    prose,
    sentences,
    spans,
)
from train import read_config

SECTIONS = {section.name: {f.name for f in fields(section.type)} for section in fields(Config)}
# Programs whose arguments are not checked.
PLAIN = ("export", "cd", "cmp", "cp", "rm", "patch", "touch", "tensorboard", "git")
# Prefixes of environment variables that launch.sh does not read.
EXTERNAL = ("OMP_", "MALLOC_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "GOMP_", "MASTER_")
EXTERNAL += ("MKL_", "ATEN_")
COMMANDS = list(
    dict.fromkeys(
        command for page in PAGES for command in block_commands(page) + inline_commands(page)
    )
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:60])
def test_files_options_and_variables_of_a_command_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *words = command.words or ["export"]
    for variable in command.variables:
        name = variable.split("=")[0]
        assert name in (ROOT / "launch.sh").read_text() or name.startswith(EXTERNAL), variable
    if command.trains:
        assert (ROOT / program).is_file()
        for name in ("mine.yaml", "sweep/0.yaml"):  # files that the reader writes
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text("")
        if "--help" not in words:
            read_config(words)
    elif program == "predict.py":
        saved = dataclasses.asdict(Config())
        hashes = {"graph": "0", "basis": None, "pair_features": []}
        monkeypatch.setattr(predictor, "read_graph", lambda path: {"graph": "0", "trained": {}})
        monkeypatch.setattr(
            predictor,
            "read_checkpoint",
            lambda path: {"config": saved, "file": str(path), **hashes},
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert predict.read_settings(words).runs
    elif program == "analyse.py":
        flags = [word for word in words if word.startswith("--")]
        assert words and all(f'"{flag}"' in (ROOT / program).read_text() for flag in flags)
    elif program == "./launch.sh":
        if "-m" in words:
            marker = words[words.index("-m") + 1]
            assert f'"{marker}:' in (ROOT / "pyproject.toml").read_text(), (
                f"no tests are marked {marker}"
            )
    elif program == "pip":
        assert words[:2] == ["install", "-r"] and (ROOT / words[2]).is_file()
    elif program.endswith((".py", ".sh", ".sbatch")):
        assert (ROOT / program).is_file()
    elif program.startswith("tests."):
        check_module(program, words)
    elif program not in PLAIN:
        pytest.fail(f"this test does not know the command {command.text}")


def check_module(module: str, words: list[str]) -> None:
    """Checks that a module of tests/ exists, and that it has the options in `words`."""
    path = ROOT / (module.replace(".", "/") + ".py")
    assert path.is_file() or module.endswith(".NAME"), module
    sources = [path, path.with_name("__init__.py")] if path.is_file() else []
    if module == "tests.check" and words[0] != "NAME":
        proof, *words = words
        assert proof in check.CHECKS, f"tests.check has no {proof}"
        sources.append(ROOT / "tests/template/checks.py")
        read_config([word for word in words if re.match(r"\w+\.\w+=", word)])
    for flag in (word for word in words if word.startswith("--")):
        name = flag[2:].split("=")[0]
        known = [f'"--{name}"', f" {name}={{", f'"{name}": {{']
        assert any(form in source.read_text() for source in sources for form in known), (
            f"{module} has no {flag}"
        )


# ---- Options, files and names --------------------------------------------------------------------
def test_options_exist_and_their_values_are_valid():
    """Each option on the pages is tried separately, also options in sentences and tables."""
    text = re.sub(VARIABLES, "0", "\n".join(page.read_text() for page in DOCS))
    given = set(re.findall(rf"\b((?:{'|'.join(SECTIONS)})\.\w+)=([^\s`,;:)\"]+)", text))
    as_yaml = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.\w+): ([^`]+)`", text))
    assert len(given) > 20 and len(as_yaml) > 1
    files = ["data.edges=edges.tsv", "data.perturbations=p.tsv", "data.features=f.tsv"]
    for key, value in sorted(given | as_yaml):
        try:
            read_config([*files, f"{key}={value}"])
        except UserError as error:
            pytest.fail(f"{key}={value}: {error}")


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_options_without_a_value_exist(page):
    for span in spans(page):
        section, dot, key = span.partition(".")
        is_name = dot and section in SECTIONS and key.isidentifier() and key != "py"
        if is_name and key not in SECTIONS[section]:
            owner = VARIABLES_OF.get(section) or importlib.import_module(section)
            assert has_name(owner, key), span


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=name_of)
def test_files_modules_and_links_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert "://" in link or target.exists(), link
        assert not anchor or anchor in anchors(target), link
    if page == CHANGELOG:
        return  # it contains old names
    for module in re.findall(r"\btests(?:\.[a-z_]+)+", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir() or module.endswith(".py"), module
    for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|sh|toml|patch))`", text):
        is_placeholder = name.endswith("NAME.patch")
        assert is_placeholder or (ROOT / name).is_file() or (page.parent / name).is_file(), name
    for folder in re.findall(r"`((?:[a-z]+/)+)`", prose(page)):
        assert folder == "checkpoints/" or (ROOT / folder).is_dir(), folder


def test_files_in_the_drawing_exist():
    names = re.findall(r"[\w/]+\.py\b", (ROOT / "docs/figures/dataflow.svg").read_text())
    assert len(set(names)) > 5
    assert [name for name in names if not (ROOT / name).is_file()] == []


OF_TESTS = [ROOT / "tests/check.py", ROOT / "tests/test_contract.py"]
TEXTS = {path: path.read_text() for path in [*ROOT.glob("*.py"), *OF_TESTS]}
WORDS = set(re.findall(r"[A-Za-z_]\w*", "\n".join(TEXTS.values())))
for _source in ("config.yaml", "launch.sh", "pyproject.toml", *ROOT.glob("tests/recipes/*.patch")):
    WORDS |= set(re.findall(r"[A-Za-z_]\w*", (ROOT / _source).read_text()))
WORDS |= {path.stem for path in ROOT.glob("tests/recipes/*.patch")}
for _metric in METRICS:  # the names from `metrics_beside_rivals`
    WORDS.add(f"baseline_{_metric}")
# The class or module of each variable in spans such as `ddp.rank`.
VARIABLES_OF = {"graph": SharedGraph, "torch": torch, "ddp": Distributed}
FILE = re.compile(r".*\.(py|sh|md|yaml|toml|txt|tsv|pt|json|jsonl|svg|gz|h5ad|patch)")


def named_things() -> Iterator[tuple[Path, str]]:
    """Yields each code span with its page. In the changelog, only new names are included."""
    for page in DOCS:
        for span in spans(page):
            yield page, span
    for line in CHANGELOG.read_text().splitlines():
        if line.startswith("| "):  # | old name | new name |
            for span in re.findall(r"`([^`]+)`", line.split(" | ")[1]):
                yield CHANGELOG, span


def test_functions_classes_and_words_in_code_exist():
    count = 0
    for page, span in named_things():
        name = re.sub(r"\(.*\)$", "", span)
        if FILE.fullmatch(span) or not re.fullmatch(r"[A-Za-z_][\w.]*\w", name):
            continue
        first, *rest = name.split(".")
        count += 1
        if not rest:
            in_examples = "\n".join(block.text for block in blocks(page))
            is_variable = name.isupper() and name.startswith(EXTERNAL)
            assert name in WORDS or is_variable or name in in_examples, f"{page.name}: {span}"
        elif first != "tests":
            assert exists(first, rest), f"{page.name}: {span}"
    assert count > 200


def exists(first: str, rest: list[str]) -> bool:
    """Returns whether a dotted name exists: an option, or a name of a module, class or variable."""
    if rest[0] in SECTIONS.get(first, ()):
        return True
    if first == "batch":
        is_field = re.search(rf"\b{rest[0]} ?=", TEXTS[ROOT / "data.py"])
        return bool(is_field) or f"batch.{rest[0]}" in TEXTS[ROOT / "train.py"]
    owner = VARIABLES_OF.get(first)
    if owner is None and first in MODULES:
        owner = importlib.import_module(first)
    for module in map(importlib.import_module, MODULES):
        owner = owner or vars(module).get(first)
    return owner is not None and has_name(owner, rest[0])


def has_name(owner: Any, name: str) -> bool:
    """Returns whether a module or class has a name, including attributes that __init__ sets."""
    if hasattr(owner, name) or isinstance(owner, ModuleType):
        return hasattr(owner, name)
    is_field = name in getattr(owner, "__dataclass_fields__", ())
    source = (ROOT / f"{owner.__module__}.py").read_text()
    body = source.partition(f"class {owner.__name__}")[2]
    return is_field or re.search(rf"\bself\.{name}\b", body) is not None


def test_the_page_lists_the_names_of_a_task_that_commands_use():
    page = (ROOT / "docs/adapting.md").read_text()
    for script in ("train.py", "evaluate.py", "predictor.py"):
        rows = re.findall(rf"^\| `{script}` \| (`[a-z].*) \|$", page, re.M)
        listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
        text = TEXTS[ROOT / script]
        used = set(re.findall(r"\b(?:task|KnockoutTask|tasks\[0\])\.(\w+)", text))
        assert used <= listed, f"{script} uses {used - listed}"
        assert all(f".{name}" in text for name in listed)


# ---- Readability ---------------------------------------------------------------------------------
def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 240
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("page", [*DOCS, CHANGELOG], ids=name_of)
def test_sentences_are_short_and_lines_fit(page):
    lengths = [len(sentence.split()) for sentence in sentences(page)]
    assert statistics.fmean(lengths) <= 20
    lines = prose(page).splitlines() + "\n".join(b.text for b in blocks(page)).splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_the_readme_lists_all_modules():
    (tree,) = [block.text for block in blocks(README, "") if "Optional parts" in block.text]
    lines = [line for line in tree.splitlines() if line.startswith("  ")]  # without the titles
    listed = [line.split()[0] for line in lines]
    assert len(set(listed)) == len(listed)
    expected = {f"{module}.py" for module in MODULES} | {"config.yaml", "launch.sh"}
    assert set(listed) == expected | {"example/", "docs/", "tests/"}
    assert all((ROOT / name).exists() for name in listed)


@pytest.mark.parametrize(
    "words",
    [
        "absolute or a difference",
        "one relation or several",
        "normalised",
        "knocked-out target",
        "layers reach",
        "leave a node out",
    ],
)
def test_a_heading_contains_the_words_of_a_frequent_question(words):
    assert any(words in heading.lower() for page in DOCS for heading in headings(page))
