"""The commands and examples of README.md and docs/ work, and their output is that on the pages."""

import ast
import doctest
import itertools
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.template.fixtures import ROOT, SMALL, copy_template, fork, join, write_table
from tests.template.pages import DOCS, README, block_commands, blocks
from tests.template.slow.recipes import PAGE, adapt, assert_contract, launch, run_tests

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


@pytest.fixture
def here(tables, tmp_path):
    """Copies the template to `tmp_path`, next to small tables with the file names of the README."""
    copy_template(tmp_path)
    write_table(
        tmp_path / "pairs.tsv", [("genes",), ("Y01,Y02",), ("Y03",), ("",), ("no such gene",)]
    )
    (mine,) = blocks(README, "yaml")
    assert mine.text.startswith("# mine.yaml\n")
    (tmp_path / "mine.yaml").write_text(mine.text)
    return [*tables, *SMALL]


# The beginning of a command, and overrides that give its run a separate folder.
WAYS_TO_START = {
    "torchrun --standalone": ["run.name=torchrun"],
    "./launch.sh --config mine.yaml": [],
    "python predict.py": [],  # uses the run of the previous command
    "python analyse.py": [],
}
ENDS = ("predict.py", "analyse.py")  # commands that do not train


def test_each_way_to_start_works(run, here, tmp_path):
    """Runs one command of each kind. Overrides make training commands small."""
    for beginning, name in WAYS_TO_START.items():
        command = next(
            c for c in block_commands(README) if f"{c.text} ".startswith(f"{beginning} ")
        )
        more = [] if command.words[0] in ENDS else [*here, *name]
        line = f"{command.text} {shlex.join(more)}".replace("nproc_per_node=4", "nproc_per_node=2")
        result = run(["bash", "-c", line], PATH=PATH, **WITHOUT_GPU).check()
        if beginning.startswith("./launch.sh"):
            assert "32 samples over 2 ranks" in result.stdout
            assert "OMP_NUM_THREADS" not in result.stderr  # torchrun does not warn about it
            assert not (tmp_path / ".venv").exists()  # the active environment is used
    lines = (tmp_path / "pairs.predictions.tsv").read_text().splitlines()
    assert [bool(line.split("\t")[1]) for line in lines[1:]] == [True, True, True, False]


def test_training_commands_train(here, tmp_path):
    """Runs the options of each command in one forked process. Overrides make them small."""
    commands = [command for page in DOCS for command in block_commands(page) if command.trains]
    options = sorted({command.words[1:] for command in commands if "--help" not in command.words})
    assert len(options) >= 6
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/0.yaml").write_text("")
    for number, words in enumerate(options):
        command = [str(ROOT / "train.py"), *words, *here, f"run.name={number}"]
        codes = join([fork(tmp_path, f"command{number}", command, WITHOUT_GPU)])
        assert codes == [0], f"{words}\n{(tmp_path / f'command{number}.stderr').read_text()}"


def run_page(page: Path, command: Callable, folder: Path) -> int:
    """Runs the python blocks of a page that are followed by their output, and compares it.

    Returns the number of these blocks.
    """
    count = 0
    for block, output in itertools.pairwise(blocks(page)):
        if block.info == "python" and output.info == "":
            assert run_code(command, folder, block.text) == output.text
            count += 1
    return count


def run_code(command: Callable, folder: Path, text: str) -> str:
    """Runs code in a forked process, with the modules of a copy, and returns its output."""
    script = folder / "page.py"
    script.write_text(text)
    return command(0, script, MPLBACKEND="agg").check().stdout  # without windows


def run_commands(page: Path, command: Callable, folder: Path, beginning: str) -> int:
    """Runs the commands of a page with this beginning, in order, in forked processes of a copy.

    Returns the number of these commands.
    """
    commands = [c.words for c in block_commands(page) if c.text.startswith(beginning)]
    for script, *arguments in commands:
        command(0, folder / script, *arguments).check()
    return len(commands)


def test_the_example_of_tables(command, tmp_path):
    copy_template(tmp_path)
    page = ROOT / "docs/tables.md"
    for block in blocks(page, "tsv .*"):
        (tmp_path / block.info.split()[1]).write_text(block.text)
    assert run_page(page, command, tmp_path) == 1
    options = [f"data.{name}={file}.tsv" for name, file in FILES.items()]
    command(0, "train.py", *options, *SMALL, "data.batch_size=4").check()


FILES = {"edges": "edges", "perturbations": "scores", "features": "features"}


def test_the_example_of_runs(run, command, tmp_path):
    copy_template(tmp_path)
    page = ROOT / "docs/runs.md"
    assert run_commands(page, command, tmp_path, "python train.py run.name=short") == 2
    assert run_page(page, command, tmp_path) == 1
    (of_folds,) = [block.text for block in blocks(page, "bash") if "data.fold" in block.text]
    text = of_folds.replace("train.py", "train.py optim.epochs=1 model.readout=local")
    text = text.replace("0 1 2 3 4", "0 1").replace("/5", "/2")  # two folds take less time
    printed = run(["bash", "-c", text], timeout=500, PATH=PATH, **WITHOUT_GPU).check().stdout
    assert "\n2 runs of 2 folds, " in printed and " 6,000 test rows, 1 score\n" in printed
    command(0, tmp_path / "analyse.py", "runs/short").check()


def test_the_example_of_predictions(command, tmp_path):
    copy_template(tmp_path)
    page = ROOT / "docs/predictions.md"
    assert run_commands(page, command, tmp_path, "python train.py run.name=asked") == 1
    assert run_commands(page, command, tmp_path, "python predict.py") == 3
    for name, num_lines in (
        ("all-singles.predictions", 401),
        ("all-singles.explained", 2001),
        ("all-pairs.0-1000.predictions", 1001),
    ):
        assert len((tmp_path / f"{name}.tsv").read_text().splitlines()) == num_lines


def test_the_cells_of_notebook(command, tmp_path):
    """Runs the cells in order in one process, like a kernel, with or without matplotlib."""
    copy_template(tmp_path)
    page = ROOT / "docs/notebook.md"
    cells = blocks(page, "python")
    mark = "---- the next cell"
    script = f"\nprint({mark!r})\n".join(cell.text for cell in cells)
    printed = run_code(command, tmp_path, script)
    check_output = doctest.OutputChecker().check_output  # ... matches any text
    for cell, text, output in zip(cells, printed.split(f"{mark}\n"), blocks(page, ""), strict=True):
        assert check_output(output.text, text, doctest.ELLIPSIS), f"{cell.text}\n{text}"
    assert len(cells) >= 8


def test_the_example_of_adapting(run, command, tmp_path):
    """Makes the edits of the page in a copy, and trains with them."""
    copy_template(tmp_path)
    page = ROOT / "docs/adapting.md"
    edits = [block for block in blocks(page) if re.match(r"# [a-z.]+(, in \w+)?\n", block.text)]
    assert len(edits) == 5
    for block in edits:
        apply_edit(tmp_path, block.text)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--ignore=F401"]
    run([*ruff, "losses.py", "metrics.py", "optim.py"]).check()
    trained = run_commands(page, command, tmp_path, "python train.py run.name=sgd")
    assert trained == 2  # the second one resumes
    lines = (tmp_path / "runs/sgd/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    validations = [row for row in rows if row["kind"] == "val"]
    assert all({"spearman", "baseline_spearman"} <= row.keys() for row in validations)
    table = (tmp_path / "runs/sgd/test.tsv").read_text().splitlines()
    tested = [[float(cell) for cell in line.split("\t")[-3:-1]] for line in table[1:]]
    best = torch.load(tmp_path / "runs/sgd/checkpoints/best.pt", weights_only=True)
    absolute = sum(abs(score - prediction) for score, prediction in tested) / len(tested)
    (test,) = [row for row in rows if row["kind"] == "test"]
    assert test["loss"] == pytest.approx(absolute / best["std"].item(), rel=1e-5)
    refused = command(0, tmp_path / "train.py", "optim.momentum=2")
    assert refused.returncode == 2
    assert "optim.momentum must be float >= 0 and <= 1" in refused.stderr


# The function in the page's line of `make_dataset`, and a term that uses its column.
SET_SIZE = """

def set_size(batch):
    return batch.perturbed_ptr.diff()


class SizeTerm(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_outputs))

    def forward(self, graph, wild, dose, batch):
        return batch.set_size.unsqueeze(1) * self.weight
"""


def test_all_commands_have_a_column_that_is_computed_from_the_batch(command, here, tmp_path):
    page = ROOT / "docs/adapting.md"
    (line,) = [block.text for block in blocks(page, "python") if "set_size" in block.text]
    text = (tmp_path / "task.py").read_text()
    before, first, rest = text.partition("    dataset = KnockoutDataset(")
    made, end, after = rest.partition("\n")
    term = '        terms["size"] = SizeTerm(self.num_outputs)\n        return model\n'
    before = before.replace("        return model\n", term)
    text = f"{before}{first}{made}{end}    {line}{after}{SET_SIZE}"
    (tmp_path / "task.py").write_text(text)
    command(0, tmp_path / "train.py", *here, "run.name=size").check()
    command(0, tmp_path / "predict.py", "pairs.tsv", "runs/size", "--parts").check()
    header, *rows = (tmp_path / "pairs.predictions.tsv").read_text().splitlines()
    place = header.split("\t").index("size")
    sizes = [float(row.split("\t")[place]) for row in rows[:3]]  # two nodes, one and none
    assert sizes[0] == pytest.approx(2 * sizes[1]) and sizes[1] != 0 == sizes[2]
    command(0, tmp_path / "analyse.py", "runs/size").check()


def test_rows_are_sampled_with_weights(tables, tmp_path):
    """With the edits of the page, rows with larger weights are drawn more often, on any ranks."""
    copy = copy_template(tmp_path / "copy")
    edits = [block.text for block in blocks(PAGE, "python") if ": add th" in block.text]
    assert len(edits) == 3
    attribute, draw, weights = (edit.partition("\n")[2] for edit in edits)
    order = "dtype=torch.int32)\n"
    for name, old, new in (
        ("data_loader.py", "    def __init__(", f"    {attribute}\n    def __init__("),
        ("data_loader.py", order, order + textwrap.indent(draw, " " * 8)),
        ("train.py", "    folder = RunFolder(", f"    {weights}    folder = RunFolder("),
    ):
        text = (copy / name).read_text()
        assert text.count(old) == 1
        (copy / name).write_text(text.replace(old, new))
    paths = [option.replace("=", f"={tmp_path}/") for option in tables]
    adapt(copy, "", paths)  # also checks the code with ruff
    (copy / "drawn.py").write_text(DRAWN)
    lone, heavy = json.loads(launch(copy, 1, "drawn.py"))
    assert sorted(lone) == list(range(50))  # without weights
    assert 0.7 < sum(row >= 25 for row in heavy) / 50 < 1 and len(set(heavy)) < 50
    assert_contract(copy)
    run_tests(copy, "tests/test_training.py")  # compares one process with two


# Prints the rows of an epoch: without weights, and with larger weights from row 25 on.
DRAWN = """
import json
import torch
from data_loader import StepSampler

epochs = []
for weights in (None, torch.tensor([1.0, 9.0]).repeat_interleave(25)):
    ranks = [StepSampler(torch.arange(50), 8, 1, 2, rank, seed=0) for rank in range(2)]
    for sampler in ranks:
        sampler.weights = weights
        sampler.set_epoch(1)
    batches = [row for rank in ranks for rows in rank for row in rows]
    epochs.append([row for row in batches if row >= 0])
print(json.dumps(epochs))
"""


def apply_edit(copy: Path, text: str) -> None:
    """Makes an edit of docs/adapting.md. Its first line names the file and a class or section."""
    first, _, body = text.partition("\n")
    name, _, place = first.removeprefix("# ").partition(", in ")
    lines = (copy / name).read_text().splitlines(keepends=True)
    if name == "config.yaml":
        lines.insert(lines.index(f"{place}:\n") + 1, body)
        (copy / name).write_text("".join(lines))
        return
    (new,) = ast.parse(body).body
    scope = ast.parse("".join(lines)).body
    if place:
        (owner,) = [node for node in scope if getattr(node, "name", None) == place]
        scope = owner.body
        body = textwrap.indent(body, "    ")
    same = [node for node in scope if bound_name(node) == bound_name(new)]
    if same:
        lines[same[0].lineno - 1 : same[0].end_lineno] = [body]
    else:  # a field, after the last one
        last = [node for node in scope if isinstance(node, ast.AnnAssign)][-1]
        lines.insert(last.end_lineno, body)
    (copy / name).write_text("".join(lines))


def bound_name(node: ast.stmt) -> str | None:
    """Returns the name that a statement defines: a function, class, field or variable."""
    target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
    return getattr(node, "name", None) or getattr(target, "id", None)


def test_the_example_of_measured(run):
    page = ROOT / "docs/measured.md"
    commands = [c.text for c in block_commands(page) if "tests.bench.masks" in c.text]
    assert len(commands) == 1
    line = f"{commands[0]} --preset small --samples 4 --repeats 1"
    assert "edge_masks" in run(["bash", "-c", line], PATH=PATH, **WITHOUT_GPU).check().stdout
