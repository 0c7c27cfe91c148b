"""Reads the pages: README.md, docs/, CHANGELOG.md, CONTRIBUTING.md and tests/bench/README.md.

Functions return the blocks, code spans, sentences and commands of a page, for tests.
"""

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.template.fixtures import ROOT

README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "tests/bench/README.md"]
CHANGELOG = ROOT / "CHANGELOG.md"
PROGRAMS = ("./launch.sh", "torchrun", "python", "pip", "srun", "sbatch")
# Matches what is replaced by a number: launch.sh replaces %a, and the shell replaces $k and $s.
VARIABLES = r"%a|\$[ks]\b"


def name_of(page: Path) -> str:
    """Returns the path of a page relative to the project, for the names of tests."""
    return str(page.relative_to(ROOT))


# ---- Blocks, spans and sentences ----------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    info: str  # text after the opening fence, such as `python`
    text: str  # lines between the fences


def blocks(page: Path, info: str = ".*") -> list[Block]:
    """Returns the fenced blocks whose `info` matches the regular expression, in order."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(*block) for block in found if re.fullmatch(info, block[0])]


def prose(page: Path) -> str:
    """Returns the page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """Returns the code spans in sentences and tables, without their backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def headings(page: Path) -> list[str]:
    """Returns the texts of the headings of a page."""
    return [line.lstrip("# ") for line in prose(page).splitlines() if line.startswith("#")]


def anchors(page: Path) -> list[str]:
    """Returns the anchors of the headings of a page, to which links can refer."""
    texts = [re.sub(r"[^\w -]", "", heading).strip() for heading in headings(page)]
    return [text.lower().replace(" ", "-") for text in texts]


def sentences(page: Path) -> list[str]:
    """Returns the sentences outside of blocks, tables and headings."""
    lines = []
    for line in prose(page).splitlines():
        is_prose = not line.startswith(("|", "#", "!["))
        item = re.match(r"(\d+\.|-) ", line)
        if item:
            lines.append("")  # each item of a list begins a new sentence
            line = line[item.end() :]
        lines.append(line if is_prose else "")
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    found = []
    for paragraph in paragraphs:
        text = " ".join(paragraph.split())
        found += re.split(r"(?<=[.?!:])\s+(?=[A-Z`\[*\d])", text) if text else []
    return found


# ---- Commands ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Command:
    """A command on a page."""

    text: str  # the command line without its comment
    variables: tuple[str, ...]  # settings of environment variables before the command
    words: tuple[str, ...]  # the program and its arguments, without launchers such as torchrun

    @property
    def trains(self) -> bool:
        """Whether the command trains: the words after the first are arguments of train.py."""
        program, *words = self.words or [""]
        is_launched = program == "./launch.sh" and words[:1] not in (["test"], ["copy"])
        return program == "train.py" or is_launched


def parse(text: str) -> Command:
    """Returns the command in a line of bash."""
    text = re.sub(r"^for .*?; do (.*?)( & |; )done(; wait)?\b", r"\1", text)
    text = re.sub(VARIABLES, "0", text)
    words = shlex.split(text, comments=True)
    line = shlex.join(words)
    variables = []
    while words and ("=" in words[0] or words[0] == "export"):
        variables.append(words.pop(0))
    if words[-1:] == ["&"]:
        words.pop()
    if words[:1] in (["srun"], ["sbatch"]):  # skip the options of srun and sbatch
        is_program = [word in PROGRAMS[:3] or word.endswith(".sh") for word in words]
        words = words[is_program.index(True) :]
    if words[:1] in (["launch.sh"], ["../template/launch.sh"], ["/tmp/old/launch.sh"]):
        words[0] = "./launch.sh"
    if words[:1] == ["torchrun"]:
        words = torchrun_words(words[1:])
    elif words[:1] == ["python"]:
        words = words[2:] if words[1] == "-m" else words[1:]
    return Command(line, tuple(word for word in variables if word != "export"), tuple(words))


def torchrun_words(words: list[str]) -> list[str]:
    """Returns the script or module that torchrun starts, and its arguments.

    `words` are the arguments of torchrun. An unknown option of torchrun fails the test.
    """
    words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in words]  # replaces shell variables
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = get_args_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"torchrun {shlex.join(words)}: {stderr.getvalue()}")
    return [options.training_script, *options.training_script_args]


def block_commands(page: Path) -> list[Command]:
    """Returns all commands in the bash blocks of a page."""
    text = "".join(block.text for block in blocks(page, "bash"))
    lines = text.replace("\\\n", " ").splitlines()
    return [parse(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def inline_commands(page: Path) -> list[Command]:
    """Returns all commands in the code spans of a page."""
    starts = re.compile(rf"([A-Z_]+=\S+ )*({'|'.join(map(re.escape, PROGRAMS))}) ?")
    return [
        parse(span)
        for span in spans(page)
        if starts.match(span) and span not in ("torchrun", "python", "sbatch")
    ]
