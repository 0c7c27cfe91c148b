"""The commands of README.md work; its options with their values, files, modules, flags exist."""

import contextlib
import dataclasses
import io
import re
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from config import Config
from errors import UserError
from tests.conftest import ROOT, SMALL, copy_template, fork, join, write_table
from train import read_config

README = ROOT / "README.md"
PAGES = [README, ROOT / "tests/bench/README.md"]
SECTIONS = {section.name: {f.name for f in fields(section.type)} for section in fields(Config)}
PROGRAMS = ("./launch.sh", "torchrun", "python", "pip", "srun", "sbatch")
PLAIN = ("export", "cd", "cp", "touch", "tensorboard")  # which are not checked
VARIABLES = r"%a|\$s\b"  # launch.sh replaces %a with the array task's number, the shell $s
EXTERNAL = (
    "OMP_",
    "MALLOC_",
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "TORCH",
)  # variables that launch.sh does not read


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
        return program == "train.py" or (program == "./launch.sh" and words[:1] != ["test"])


def parse(text: str) -> Command:
    text = re.sub(r"^for .*; do (.*) & done; wait\b", r"\1", text)
    text = re.sub(VARIABLES, "0", text)
    words = shlex.split(text, comments=True)
    line = shlex.join(words)
    variables = []
    while words and ("=" in words[0] or words[0] == "export"):
        variables.append(words.pop(0))
    if words[:1] in (["srun"], ["sbatch"]):  # whose own options are not checked
        words = words[
            next(
                i for i, word in enumerate(words) if word in PROGRAMS[:3] or word.endswith(".sh")
            ) :
        ]
    if words[:1] == ["launch.sh"]:
        words[0] = "./launch.sh"
    if words[:1] == ["torchrun"]:
        words = torchrun_words(words[1:])
    elif words[:1] == ["python"]:
        words = words[2:] if words[1] == "-m" else words[1:]
    return Command(line, tuple(word for word in variables if word != "export"), tuple(words))


def torchrun_words(words: list[str]) -> list[str]:
    """Returns the script or module and its arguments; fails the test on an unknown option."""
    words = [
        re.sub(r"\$\{?\w+\}?", "1", word) for word in words
    ]  # a number in place of a shell variable
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = get_args_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"torchrun {shlex.join(words)}: {stderr.getvalue()}")
    return [options.training_script, *options.training_script_args]


def block_commands(page: Path) -> list[Command]:
    """Returns every command in the bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [parse(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def inline_commands(page: Path) -> list[Command]:
    """Returns every command within sentences and tables."""
    starts = re.compile(rf"([A-Z_]+=\S+ )*({'|'.join(map(re.escape, PROGRAMS))}) ?")
    return [
        parse(span)
        for span in spans(page)
        if starts.match(span) and span not in ("torchrun", "python", "sbatch")
    ]


def spans(page: Path) -> list[str]:
    """Returns the code spans within sentences and tables."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    )


COMMANDS = list(
    dict.fromkeys(
        command for page in PAGES for command in block_commands(page) + inline_commands(page)
    )
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:60])
def test_what_a_command_refers_to_exists(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *words = command.words or ["export"]
    for variable in command.variables:
        name = variable.split("=")[0]
        assert name in (ROOT / "launch.sh").read_text() or name.startswith(EXTERNAL), variable
    if command.trains:
        assert (ROOT / program).is_file()
        (tmp_path / "mine.yaml").write_text("")  # the file of the section "Own tables"
        if not {"--checkpoint", "--help"} & set(words):  # which need no valid configuration here
            read_config(words)
        if "--help" not in words:
            parse_arguments(words)
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
    path = ROOT / (module.replace(".", "/") + ".py")
    assert path.is_file() or module.endswith(".NAME"), module
    if module == "tests.check" and words[0] != "NAME":
        proof, *words = words
        assert f'"{proof}": {proof}' in path.read_text(), f"tests.check has no {proof}"
        read_config([word for word in words if re.match(r"\w+\.\w+=", word)])
    sources = [path, path.with_name("__init__.py")] if path.is_file() else []
    for flag in (word for word in words if word.startswith("--")):
        name = flag[2:].split("=")[0]
        known = [f'"--{name}"', f" {name}={{", f'"{name}": {{']
        assert any(form in source.read_text() for source in sources for form in known), (
            f"{module} has no {flag}"
        )


def test_options_are_known_and_their_values_valid():
    """Includes those in sentences and tables, each tried alone."""
    text = re.sub(VARIABLES, "0", README.read_text())
    given = set(re.findall(rf"\b((?:{'|'.join(SECTIONS)})\.\w+)=([^\s`,;:)]+)", text))
    as_yaml = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.\w+): ([^`]+)`", text))
    assert len(given) > 10 and as_yaml
    files = ["data.edges=edges.tsv", "data.perturbations=p.tsv", "data.features=f.tsv"]
    for key, value in sorted(given | as_yaml):
        try:
            read_config([*files, f"{key}={value}"])
        except UserError as error:
            pytest.fail(f"{key}={value}: {error}")


def test_options_named_without_a_value_are_known():
    for span in spans(README):
        section, dot, key = span.partition(".")
        if dot and section in SECTIONS and key.isidentifier() and key != "py":
            assert key in SECTIONS[section], span


def test_files_modules_and_links_exist():
    for page in PAGES:
        text = page.read_text()
        anchors = {
            re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
            for line in headings(README)
        }
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = link.partition("#")
            assert "://" in link or (page.parent / file).exists(), link
            assert not anchor or anchor in anchors, link
        for module in re.findall(r"\btests(?:\.[a-z_]+)+", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or path.is_dir() or module.endswith(".py"), (
                module
            )
        for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|sh|toml))`", text):
            assert (ROOT / name).is_file() or (page.parent / name).is_file(), name


def headings(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return [line.lstrip("# ") for line in prose.splitlines() if line.startswith("#")]


@pytest.fixture
def here(tables, tmp_path):
    """Copies the template to `tmp_path`, next to small tables with the file names of the README."""
    copy_template(tmp_path)
    write_table(
        tmp_path / "pairs.tsv", [("genes",), ("Y01,Y02",), ("Y03",), ("",), ("no such gene",)]
    )
    (tmp_path / "mine.yaml").write_text(
        re.search(r"^```yaml\n# mine.yaml[^\n]*\n(.*?)^```$", README.read_text(), re.M | re.S)[1]
    )
    return [*tables, *SMALL]


WAYS_TO_START = {  # how each command begins, and an override where two would share a run folder
    "torchrun --standalone": ["run.name=torchrun"],
    "python train.py": [],
    "./launch.sh --config mine.yaml": [],
    "python train.py --predict": [],  # with the model that the command above trained
}


def test_each_way_to_start_works(run, here, tmp_path):
    """Runs one command of each kind; those that train get small overrides appended."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for beginning, name in WAYS_TO_START.items():
        command = next(
            c for c in block_commands(README) if f"{c.text} ".startswith(f"{beginning} ")
        )
        more = [] if "--predict" in command.words else [*here, *name]
        line = f"{command.text} {shlex.join(more)}"
        run(["bash", "-c", line], PATH=path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1").check()
    lines = (tmp_path / "pairs.predictions.tsv").read_text().splitlines()
    assert [bool(line.split("\t")[1]) for line in lines[1:]] == [True, True, True, False]


def test_training_commands_train(here, tmp_path):
    """Runs the options of each in one forked process, with small overrides appended."""
    options = {command.words[1:] for command in block_commands(README) if command.trains}
    options = sorted(words for words in options if not {"--predict", "--help"} & set(words))
    assert len(options) >= 3
    for number, words in enumerate(options):
        command = [str(ROOT / "train.py"), *words, *here, f"run.name={number}"]
        codes = join(
            [
                fork(
                    tmp_path,
                    f"command{number}",
                    command,
                    {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                )
            ]
        )
        assert codes == [0], f"{words}\n{(tmp_path / f'command{number}.stderr').read_text()}"


def test_config_yaml_lists_every_option_with_its_default_and_a_comment():
    text = (ROOT / "config.yaml").read_text()
    listed, defaults = (
        yaml.safe_load(text),
        yaml.safe_load(yaml.safe_dump(dataclasses.asdict(Config()))),
    )
    assert listed == defaults
    assert [list(section) for section in listed.values()] == [
        [option.name for option in dataclasses.fields(section.type)]
        for section in dataclasses.fields(Config)
    ]
    options = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(options) == sum(len(section) for section in listed.values())
    assert [line for line in options if "  # " not in line] == []
