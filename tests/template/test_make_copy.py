"""./launch.sh copy: the files and options of a copy, and that a failed copy leaves no files."""

import ast
import functools
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.template import make_copy
from tests.template.copied_pages import BLOCK, LINK, NO_HEADING, anchors, depth, page_without
from tests.template.fixtures import ROOT, copy_template
from tests.template.parts_list import PARTS, mentions

MOST_LINES_OF_CHECKS = 1700  # largest number of lines of code in the part checks
BY_NAME = {part.name: part for part in PARTS}


@pytest.fixture
def copied(tmp_path, capsys):
    """copied(*arguments) makes a copy in the folder `mine` of the test, and returns the output."""

    def make(*arguments: str) -> str:
        assert make_copy.main([str(tmp_path / "mine"), *arguments]) == 0
        return capsys.readouterr().out

    return make


@pytest.fixture(scope="module")
def copy_without(tmp_path_factory) -> Callable[[str], Path]:
    """copy_without(name) returns the folder of a copy without a part, or without all parts."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "mine"
        assert make_copy.main([str(folder), f"--without={name}"]) == 0
        return folder

    return make


def folders_in(folder):
    """Returns the names of the folders in a folder, except .git and links."""
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(path.name for path in folders if path.name != ".git")


def options_of(folder):
    """Returns the options in the config.yaml of a folder, by section and name."""
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_a_copy_has_the_code_the_pages_and_the_tests_that_are_valid_for_any_model(copied, tmp_path):
    printed = copied()
    copy = tmp_path / "mine"
    modules = {path.name for path in ROOT.glob("*.py")}
    assert {path.name for path in copy.glob("*.py")} == modules
    assert options_of(copy) == options_of(ROOT)
    assert folders_in(copy) == [".github", "docs", "example", "tests"]
    assert folders_in(copy / "tests") == ["tools"]
    assert os.access(copy / "launch.sh", os.X_OK)
    workflow = (copy / ".github/workflows/tests.yml").read_text()
    assert "run: ./launch.sh test\n" in workflow and ".ci" not in workflow
    assert f"all       {len(modules)} modules" in printed
    pages = {path.name for path in (ROOT / "docs").iterdir()} - {"measured.md", "figures"}
    assert {path.name for path in (copy / "docs").iterdir()} == pages


def test_venv_of_a_copy_is_a_link_to_the_active_environment(copied, tmp_path, monkeypatch):
    """If the active environment does not have the packages, it is the template's .venv, if any."""
    active = tmp_path / "active"
    monkeypatch.setattr(sys, "prefix", str(active))
    active.mkdir()
    (active / "pyvenv.cfg").touch()
    printed = copied()
    assert os.readlink(tmp_path / "mine/.venv") == str(active)
    assert f"python    .venv is a link to {active};" in printed
    monkeypatch.setattr(make_copy, "ROOT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert make_copy.environment() is None
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert make_copy.environment() == tmp_path / ".venv"


@pytest.mark.parametrize("name", BY_NAME)
def test_leaving_out_a_part_removes_its_files_and_tests_and_sets_its_option(copy_without, name):
    copy = copy_without(name)
    part = BY_NAME[name]
    for file in part.files:
        assert not (copy / file).exists()
        assert not list((copy / "tests").glob(f"test_{Path(file).name}"))
    if part.option:
        section, option = part.option.split(".")
        value = options_of(copy)[section][option]
        assert not part.is_asked_for(str(value).lower() if isinstance(value, bool) else str(value))
        (line,) = re.findall(rf"^  {option}: .*# (.*)", (copy / "config.yaml").read_text(), re.M)
        choices = [choice.partition(":")[0] for choice in line.split(" | ")]
        assert choices == ["the only value in this copy"] or not any(
            part.is_asked_for(choice) for choice in choices
        )
    assert options_of(copy).keys() == options_of(ROOT).keys()


def texts_of(copy: Path) -> dict[str, str]:
    """Returns what an owner of a copy reads: its pages, options and help.

    The README lists the parts that are left out. The result does not contain this list.
    """
    texts = {f"docs/{path.name}": path.read_text() for path in copy.glob("docs/*.md")}
    texts["README.md"] = (copy / "README.md").read_text().partition("Parts that are left out")[0]
    texts["config.yaml"] = (copy / "config.yaml").read_text()
    texts["launch.sh"] = (copy / "launch.sh").read_text().partition("#SBATCH")[0]
    for path in [*copy.glob("*.py"), *copy.glob("tests/check.py")]:
        if "__main__" in path.read_text():
            texts[path.name] = ast.get_docstring(ast.parse(path.read_text()))
    return texts


def code_in(folder: Path) -> str:
    """Returns the text of all modules in a folder, each after the name of its file."""
    paths = [*folder.glob("*.py"), *folder.glob("tests/*.py"), *folder.glob("tests/tools/*.py")]
    return "\n".join(f"def {path.name}\n{path.read_text()}" for path in paths)


@pytest.mark.parametrize("name", [*BY_NAME, "all"])
def test_a_copy_does_not_mention_parts_that_it_lacks(copy_without, name):
    """It has no words for them, no names of their code, and no dead links or empty sections."""
    copy = copy_without(name)
    unwanted = mentions(make_copy.left_out([name]))
    defined = set(re.findall(r"\b(?:def|class) (\w+(?:\.py)?)", code_in(ROOT)))
    gone = defined - set(re.findall(r"\w+(?:\.py)?", code_in(copy)))
    for file, text in texts_of(copy).items():
        assert [line for line in text.splitlines() if unwanted.search(line)] == [], file
        if not file.endswith(".md"):
            continue
        code = re.findall(r"\w+(?:\.py)?", " ".join(re.findall(r"`[^`\n]+`", text)))
        assert sorted(gone & set(code)) == [], file
        for _, page, anchor in LINK.findall(text):
            target = copy / Path(file).parent / page if page else copy / file
            assert target.exists(), f"{file}: {page}"
            assert not anchor or anchor in anchors(target.read_text()), f"{file}: {page}#{anchor}"
        assert unfinished(text) == [], file


def unfinished(page: str) -> list[str]:
    """Returns the headings, tables and introductions of a page that have nothing below them."""
    found = []
    for block, following in itertools.pairwise([*BLOCK.findall(page), "# End"]):
        is_empty_section = depth(block) >= depth(following)
        is_empty_table = block.startswith("|") and len(block.splitlines()) < 3
        is_introduction = block.endswith(":") and re.match("[#\\w]", following) is not None
        if (is_empty_section and depth(block) < NO_HEADING) or is_empty_table or is_introduction:
            found.append(block)
    return found


PAGE = """# Title

The plot is gone. It is gone, too. Only the first half of the code at the end of this line would
still fit into these 100 columns: `b c`.

The plot is gone. Without this last number, this long line would be complete, and the next line
would begin a list: 1 - x.

The plot is drawn by this code:

```python
draw()
```

```
drawn
```

| name | content |
|---|---|
| a plot | gone |
| loss | the loss; its plot |
| error | The error is here. The plot is not. |

This command makes a plot:

| option | value |
|---|---|
| width | 1 |

- Read the plot. It helps.
- The plot is gone. Read the log.
- Read the plot. In the second table, read all rows, and compare all of them with the rows of the
  first long table.

The following files are gone:

| file | content |
|---|---|
| the plot | gone |

```bash
python train.py
python plot.py
```

## A plot

Nobody reads this.

### Not even this

Gone.

## Empty

The plot.
"""
WITHOUT_PLOT = """# Title

Only the first half of the code at the end of this line would still fit into these 100 columns:
`b c`.

Without this last number, this long line would be complete, and the next line would begin a list:
1 - x.

| name | content |
|---|---|
| loss | the loss |
| error | The error is here. |

- Read the log.
- In the second table, read all rows, and compare all of them with the rows of the first long table.

```bash
python train.py
```
"""


def test_a_page_is_without_a_word():
    assert page_without(PAGE, re.compile("plot")) == WITHOUT_PLOT


def test_readme_and_pages_of_a_copy_have_the_commit_of_the_template(copied, tmp_path, monkeypatch):
    """Edits of the template are mentioned, and a template without git has no commit."""
    copied("--without=graphs,plots")
    copy = tmp_path / "mine"
    origin = make_copy.origin_of_copy()
    expected = f"From {origin}. Parts that are left out: graphs,plots."
    assert expected in (copy / "README.md").read_text()
    page = (copy / "docs/runs.md").read_text()
    assert page.startswith(f"# Runs\n\nFrom {origin}. ")
    monkeypatch.setattr(make_copy, "ROOT", copy)
    origin = make_copy.origin_of_copy()
    assert re.fullmatch(r"template [0-9a-f]{7,} of \d{4}-\d\d-\d\d", origin)
    (copy / "my_layers.py").touch()
    assert make_copy.origin_of_copy() == f"{origin}, with edits"
    monkeypatch.setattr(make_copy, "ROOT", copy / "docs")  # a folder inside a repository
    assert make_copy.origin_of_copy() == "template without git, of an unknown commit"


def test_a_copy_is_a_repository_unless_it_is_inside_one(copied, tmp_path, monkeypatch):
    assert "\ngit       " in copied()
    copy = tmp_path / "mine"
    assert make_copy.git(copy, "log", "--format=%D %s") == (
        f"HEAD -> main, template {make_copy.origin_of_copy()}"
    )
    assert make_copy.git(copy, "status", "--porcelain") == ""
    assert not make_copy.make_repository(copy / "docs", "inside")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/env").symlink_to(shutil.which("env"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without git
    assert make_copy.main([str(tmp_path / "other")]) == 0
    assert not (tmp_path / "other/.git").exists()


def test_a_copy_without_all_parts_is_the_core_with_the_checks(copied, tmp_path):
    copied("--without", "all")
    of_parts = {file for part in PARTS for file in part.files}
    left = {path.name for path in (tmp_path / "mine").glob("*.py")}
    assert left == {path.name for path in ROOT.glob("*.py")} - of_parts
    assert 1000 < BY_NAME["checks"].num_lines(tmp_path / "mine") <= MOST_LINES_OF_CHECKS


def test_edited_and_added_files_are_copied_but_not_runs(run, tmp_path):
    template = copy_template(tmp_path / "template")
    (template / "model.py").write_text((template / "model.py").read_text() + "# edited\n")
    (template / "my_layers.py").write_text("")
    (template / "model.py").chmod(0o444)
    for folder in ("runs", ".cache", ".venv", "__pycache__"):
        (template / folder).mkdir()
    run([str(template / "launch.sh"), "copy", "mine"]).check()
    copy = tmp_path / "mine"
    assert (copy / "model.py").read_text().endswith("# edited\n")
    # The file in the copy is writable, although it is read-only in the template.
    assert (copy / "model.py").stat().st_mode & 0o200
    assert (copy / "my_layers.py").exists()
    assert folders_in(copy) == ["docs", "example", "tests"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "give one folder"),
        (["one", "two"], "give one folder"),
        (["mine", "--with", "plots"], "give one folder"),
        (["mine", "--without", "plot"], "there is no part 'plot'"),
        (["full"], "already exists"),
        (["file"], "already exists"),
        (["no/folder"], "there is no folder"),
        (["/proc/mine"], "cannot create the copy"),
    ],
)
def test_wrong_arguments_give_a_one_line_error(monkeypatch, tmp_path, capsys, arguments, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "file").touch()
    assert make_copy.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and word in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_failed_copy_leaves_no_files(monkeypatch, tmp_path):
    copy_file = shutil.copyfile

    def full_disk(source, target):
        if source.name == "train.py":
            raise OSError(28, "No space left on device")
        return copy_file(source, target)

    monkeypatch.setattr(shutil, "copyfile", full_disk)
    assert make_copy.main([str(tmp_path / "mine")]) == 2
    assert not list(tmp_path.iterdir())


def test_settings_of_git_do_not_apply_to_a_copy(copied, tmp_path, monkeypatch):
    settings = tmp_path / "gitconfig"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "prepare-commit-msg").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "prepare-commit-msg").chmod(0o755)
    (tmp_path / "ignored").write_text("*.yaml\n*.tsv\n")
    settings.write_text(
        f"[core]\nhooksPath = {hooks}\nexcludesFile = {tmp_path / 'ignored'}\nautocrlf = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    assert "the branch template is the unchanged copy" in copied()
    files = make_copy.git(tmp_path / "mine", "ls-tree", "-r", "--name-only", "template")
    assert {"config.yaml", "example/edges.tsv", "launch.sh"} <= set(files.splitlines())


def test_a_copy_that_cannot_be_committed_says_so(tmp_path, monkeypatch):
    git = make_copy.git

    def git_without_commits(folder: Path, *words: str) -> str | None:
        return None if "commit" in words else git(folder, *words)

    monkeypatch.setattr(make_copy, "git", git_without_commits)
    assert "could not be committed" in make_copy.make_repository(tmp_path, "a message")
