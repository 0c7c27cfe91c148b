"""The pages README.md, docs/ and CHANGELOG.md: their blocks, code spans, sentences and commands."""

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
VARIABLES = r"%a|\$[ks]\b"  # launch.sh replaces %a with the array task's number, the shell $s


def name_of(page: Path) -> str:
    """Returns a page's name, for the names of tests."""
    return str(page.relative_to(ROOT))


# ---- Blocks, spans and sentences ----------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind the fence, and its lines."""

    info: str
    text: str


def blocks(page: Path, info: str = ".*") -> list[Block]:
    """Returns the fenced blocks whose info matches, in order."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(*block) for block in found if re.fullmatch(info, block[0])]


def prose(page: Path) -> str:
    """Returns the page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """Returns the code spans within sentences and tables."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def headings(page: Path) -> list[str]:
    return [line.lstrip("# ") for line in prose(page).splitlines() if line.startswith("#")]


def anchors(page: Path) -> list[str]:
    texts = [re.sub(r"[^\w -]", "", heading).strip() for heading in headings(page)]
    return [text.lower().replace(" ", "-") for text in texts]


def sentences(page: Path) -> list[str]:
    """Returns the sentences outside of blocks, tables and headings."""
    lines = []
    for line in prose(page).splitlines():
        is_prose = not line.startswith(("|", "#", "!["))
        item = re.match(r"(\d+\.|-) ", line)
        if item:
            lines.append("")  # an item of a list is a sentence of its own
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
    """A command line without comment and variables; its words without variables, launchers."""

    text: str
    variables: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def trains(self) -> bool:
        """Whether the words after the first are arguments of train.py."""
        program, *words = self.words or [""]
        is_launched = program == "./launch.sh" and words[:1] not in (["test"], ["copy"])
        return program == "train.py" or is_launched


def parse(text: str) -> Command:
    text = re.sub(r"^for .*?; do (.*?)( & |; )done(; wait)?\b", r"\1", text)
    text = re.sub(VARIABLES, "0", text)
    words = shlex.split(text, comments=True)
    line = shlex.join(words)
    variables = []
    while words and ("=" in words[0] or words[0] == "export"):
        variables.append(words.pop(0))
    if words[-1:] == ["&"]:
        words.pop()
    if words[:1] in (["srun"], ["sbatch"]):  # whose own options are not checked
        is_program = [word in PROGRAMS[:3] or word.endswith(".sh") for word in words]
        words = words[is_program.index(True) :]
    if words[:1] in (["launch.sh"], ["../template/launch.sh"]):
        words[0] = "./launch.sh"
    if words[:1] == ["torchrun"]:
        words = torchrun_words(words[1:])
    elif words[:1] == ["python"]:
        words = words[2:] if words[1] == "-m" else words[1:]
    return Command(line, tuple(word for word in variables if word != "export"), tuple(words))


def torchrun_words(words: list[str]) -> list[str]:
    """Returns the script or module and its arguments; fails the test on an unknown option."""
    words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in words]  # a number for a shell variable
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = get_args_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"torchrun {shlex.join(words)}: {stderr.getvalue()}")
    return [options.training_script, *options.training_script_args]


def block_commands(page: Path) -> list[Command]:
    """Returns every command in the bash blocks."""
    text = "".join(block.text for block in blocks(page, "bash"))
    lines = text.replace("\\\n", " ").splitlines()
    return [parse(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def inline_commands(page: Path) -> list[Command]:
    """Returns every command within sentences and tables."""
    starts = re.compile(rf"([A-Z_]+=\S+ )*({'|'.join(map(re.escape, PROGRAMS))}) ?")
    return [
        parse(span)
        for span in spans(page)
        if starts.match(span) and span not in ("torchrun", "python", "sbatch")
    ]
