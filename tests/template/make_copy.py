"""Creates a folder for your own experiment: ./launch.sh copy DIR [--without PART,...]

The copy contains the current state of these files, edited or not: the core, all parts except those
of --without, example/, docs/, and the tests that are valid for any model and tables. `--without
all` leaves out every part except the checks, and `--without all,checks` leaves out the checks, too.
Options of parts that are left out are turned off in the copy's config.yaml. The copy's .venv is a
link to the environment that creates the copy. If git is available, and the folder is not in a git
repository, the copy becomes the first commit of a new repository.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from errors import UserError  # noqa: E402
from tests.template.copied_pages import page_without, without_dead_links  # noqa: E402
from tests.template.parts_list import PARTS, Part, mentions, num_lines  # noqa: E402

PATTERNS = ("*.py", "*.yaml", "*.toml", "requirements*.txt", "launch.sh", "LICENSE", ".gitignore")
PATTERNS += (".gitattributes", ".github/workflows/*.yml")
PATTERNS += ("example/*", "docs/**/*", "tests/*.py", "tests/tools/*")
# Pages and pictures that are not copied, because they only concern the template.
STAYS = {"measured.md", "curves.svg", "dataflow.svg"}
# Matches the code of launch.sh for this command: a call and a function.
COMMAND = r"^(.* make_copy .*|make_copy\(\) \{[^}]*\n\}\n)\n"
USAGE = "./launch.sh copy DIR [--without PART,...], or --without all"
# The files that owners of a copy usually edit first, and what they change by that.
EDITED = {
    "config.yaml": "the options; each has a comment",
    "task.py": "the data, model and metrics of a run",
    "model.py": "the network",
    "losses.py": "the losses, and how outputs of the network become predictions",
    "data.py": "the splits, and the dataset, which builds batches",
    "metrics.py": "the metrics; the first one chooses the best model",
    "optim.py": "the optimiser, parameter groups and learning-rate schedule",
}


def main(arguments: Sequence[str]) -> int:
    try:
        folder, names = read_arguments(arguments)
        copy(folder, left_out(names))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot create the copy: {error}: choose another folder", file=sys.stderr)
        return 2
    return 0


def read_arguments(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns the folder to create, and the names of the parts to leave out.

    Raises `UserError` if there is not exactly one folder, or for an unknown option.
    """
    words = [word for word in arguments if not word.startswith("--without=")]
    names = [word.partition("=")[2] for word in arguments if word not in words]
    if "--without" in words[:-1]:
        place = words.index("--without")
        names.append(words[place + 1])
        del words[place : place + 2]
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"give one folder to create: {USAGE}")
    return Path(words[0]).expanduser().absolute(), ",".join(names).replace(" ", ",").split(",")


def left_out(names: Sequence[str]) -> list[Part]:
    """Returns the parts with these names. The name "all" means all parts except the checks.

    Raises `UserError` for an unknown name.
    """
    by_name = {part.name: part for part in PARTS}
    unknown = [name for name in names if name and name not in {*by_name, "all"}]
    if unknown:
        raise UserError(f"there is no part '{unknown[0]}': choose from {', '.join(by_name)}, all")
    return [part for part in PARTS if part.name in names or ("all" in names and part.is_code)]


def copy(folder: Path, without: Sequence[Part]) -> None:
    """Creates the copy, and prints its parts and sizes.

    If this fails, no files are left behind. Raises `UserError` if the folder is not suitable.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: choose a new or an empty folder")
    if not folder.parent.is_dir():
        raise UserError(f"there is no folder {folder.parent}: create it first")
    gone = {file for part in without for file in part.files}
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)
        for path in files_of_copy(gone):
            target = partial / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)  # without permissions: a template may be read-only
        for workflow in partial.glob(".github/workflows/*.yml"):
            workflow.write_text(workflow.read_text().replace(".ci/run", "./launch.sh test"))
        launcher = partial / "launch.sh"
        launcher.write_text(launcher_without(launcher.read_text(), without))
        launcher.chmod(0o755)
        python = environment()
        if python is not None:
            (partial / ".venv").symlink_to(python)
        switch_off(partial / "config.yaml", without)
        parts = [part for part in PARTS if (partial / part.files[0]).exists()]
        origin = origin_of_copy()
        (partial / "README.md").write_text(readme(folder.name, partial, parts, origin))
        write_pages((partial / "docs").resolve(), without, origin)
        about_git = make_repository(partial, origin)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(folder, parts)
    if about_git:
        print(f"git       {about_git}")
    if python is not None:
        print(
            f"python    .venv is a link to {python}; if you delete this link, ./launch.sh creates "
            "a new environment"
        )


def environment() -> Path | None:
    """Returns the folder of the environment with the packages, to which .venv will be a link.

    This is the active environment or, if that does not have the packages, the template's. If there
    is neither, it returns None.
    """
    active = Path(sys.prefix)
    is_environment = (active / "pyvenv.cfg").exists() or (active / "conda-meta").is_dir()
    if is_environment and importlib.util.find_spec("torch_geometric"):
        return active
    own = ROOT / ".venv"
    return own.resolve() if (own / "bin/python").exists() else None


def files_of_copy(gone: set[str]) -> list[Path]:
    """Returns the paths of the files to copy, given the names of files to leave out.

    Leaving out a module also leaves out its tests.
    """
    paths = []
    for pattern in PATTERNS:
        paths += [path for path in ROOT.glob(pattern) if path.is_file()]
    left = []
    for path in sorted(paths):
        name = path.relative_to(ROOT).as_posix()
        tested = path.name.removeprefix("test_")  # test_<module>.py has the tests of a module
        if not gone & {name, str(Path(name).parent), tested} and path.name not in STAYS:
            left.append(path)
    return left


def git(folder: Path, *words: str) -> str | None:
    """Returns the output of a git command in a folder, None if it fails or git is missing."""
    outside_hooks = ["env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE"]
    command = [*outside_hooks, "git", "-C", str(folder), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode else result.stdout.strip()


def origin_of_copy() -> str:
    """Returns a text about the commit that is copied, such as "template abc1234 of 2026-01-31"."""
    commit = git(ROOT, "log", "-1", "--date=short", "--format=%h of %cd")
    if commit is None or not (ROOT / ".git").exists():
        return "template without git, of an unknown commit"
    edits = ", with edits" if git(ROOT, "status", "--porcelain") else ""
    return f"template {commit}{edits}"


def make_repository(folder: Path, message: str) -> str:
    """Makes the folder a git repository with one commit, on the branches `template` and `main`.

    The settings of the user, such as hooks and ignored files, do not apply. Nothing is done if the
    folder is in a repository, or if git is missing.

    Args:
        folder: the folder of the copy.
        message: the message of the commit.

    Returns:
        A text for the user, "" if nothing was done.
    """
    if git(folder, "--version") is None or git(folder, "rev-parse", "--git-dir") is not None:
        return ""
    settings = {
        "user.name": "template",
        "user.email": "template",
        "commit.gpgsign": "false",
        "core.hooksPath": os.devnull,
        "core.excludesFile": os.devnull,
        "core.autocrlf": "false",
    }
    author = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    git(folder, "init", "-q", "--template=")
    git(folder, "symbolic-ref", "HEAD", "refs/heads/template")
    git(folder, *author, "add", "-A")
    git(folder, *author, "commit", "-q", "--no-verify", "-m", message)
    if git(folder, "checkout", "-q", "-b", "main", "template") is None:
        return (
            "the copy could not be committed, but later upgrades need this commit: run git commit "
            "in the folder on the branch template, then git checkout -b main"
        )
    return "the branch template is the unchanged copy, the branch main is for your changes"


def launcher_without(text: str, without: Sequence[Part]) -> str:
    """Returns the text of a copy's launch.sh. Its usage has no commands that the copy lacks."""
    unwanted = mentions(without)
    lines = re.sub(COMMAND, "", text, flags=re.M).splitlines(keepends=True)
    return "".join(
        line for line in lines if not (line.startswith("#   ") and unwanted.search(line))
    )


def write_pages(folder: Path, without: Sequence[Part], origin: str) -> None:
    """Removes from the pages in a folder what they say about parts that are left out.

    Below the title of each page, it adds the origin of the copy.
    """
    unwanted = mentions(without)
    texts = {path: page_without(path.read_text(), unwanted) for path in folder.glob("*.md")}
    texts[folder.parent / "README.md"] = (folder.parent / "README.md").read_text()
    note = f"From {origin}. Files that are missing here are in the template."
    for path in folder.glob("*.md"):
        text = without_dead_links(path, texts)
        path.write_text(text.replace("\n", f"\n\n{note}\n", 1))


def switch_off(path: Path, without: Sequence[Part]) -> None:
    """Turns off the options of the parts that are left out, in a copy's config.yaml.

    Their comments then only list the values that the copy supports.
    """
    lines = path.read_text().splitlines()
    section = ""
    for number, line in enumerate(lines):
        if re.match(r"\w+:", line):
            section = line.partition(":")[0]
        found = re.match(r"  (\w+): (\S+) *# (.*)", line)
        if not found:
            continue
        option, value, comment = found.groups()
        for part in without:
            if part.option != f"{section}.{option}":
                continue
            if part.is_asked_for(value.strip('"')):
                value = off_value(part)
            choices = comment.split(" | ")
            left = [text for text in choices if not part.is_asked_for(text.partition(":")[0])]
            comment = " | ".join(left)
            if len(left) < 2:
                comment = f"{comment}; the only value in this copy".removeprefix("; ")
        start = f"  {option}: {value}".ljust(found.start(3) - 2)
        lines[number] = f"{start}# {comment}"
    path.write_text("\n".join([*lines, ""]))


def off_value(part: Part) -> str:
    """Returns the value of a part's option without the part, as it is written in config.yaml."""
    return part.off or '""'


def readme(name: str, folder: Path, parts: Sequence[Part], origin: str) -> str:
    """Returns the text of the README of a copy.

    Args:
        name: title of the README.
        folder: folder of the copy, which already has all other files.
        parts: parts that the copy has.
        origin: the text of `origin_of_copy`.
    """
    edited = [f"| `{file}` | {text} |" for file, text in EDITED.items() if (folder / file).exists()]
    checks = []
    of_parts = []
    for part in parts:
        if part.name == "checks":
            checks.append("python -m tests.check --help    # list the checks of your code and data")
        option = f"`{part.option}: {off_value(part)}`" if part.option else ""
        files = ", ".join(file for file in part.files if (folder / file).exists())
        of_parts.append(f"| {part.name} | {files} | {option} |")
    lines = [
        f"# {name}",
        "",
        "This folder trains a model with PyTorch, in one or many processes, on GPUs or on CPUs.",
        "",
        "```bash",
        "./launch.sh         # train with the options of config.yaml",
        "./launch.sh test    # run the tests, which are valid for any model, loss and data",
        "torchrun --standalone --nproc_per_node=4 train.py     # train with four processes",
        *checks,
        "```",
        "",
        "## What to edit",
        "",
        "| file | what you change there |",
        "|---|---|",
        *edited,
        "",
    ]
    if parts:
        lines += [
            "## Optional parts",
            "",
            "To remove a part, delete its files, and set its option to the value in the last",
            "column. You do not need to change any other line.",
            "",
            "| part | files | option without the part |",
            "|---|---|---|",
            *of_parts,
            "",
        ]
    without = [part.name for part in PARTS if part not in parts]
    lines += [
        "## Origin",
        "",
        f"From {origin}. Parts that are left out: {','.join(without) or 'none'}.",
        "The documentation is in [docs](docs). To upgrade to a newer version of the template, see",
        "[adapting](docs/adapting.md#upgrade).",
        "",
    ]
    return "\n".join(lines)


def report(folder: Path, parts: Sequence[Part]) -> None:
    """Prints the parts of a copy, and its numbers of modules, tests and lines."""
    for part in parts:
        print(f"part      {part.name}: {part.num_lines(folder):,} lines of code")
    of_parts = {file for part in PARTS for file in part.files}
    modules = list(folder.glob("*.py"))
    core = [path for path in modules if path.name not in of_parts]
    tests = list((folder / "tests").rglob("*.py"))
    print(f"core      {len(core)} modules, {num_lines(core):,} lines of code")
    print(f"all       {len(modules)} modules, {num_lines(modules):,} lines of code")
    print(f"tests     {len(tests)} files, {num_lines(tests):,} lines of code")
    print(
        f"created   {folder}: in this folder, run ./launch.sh to train, and ./launch.sh test to "
        "run the tests"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
