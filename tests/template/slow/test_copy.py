"""Copies of the template: the checks of edited code, words, an upgrade, and the tests of a copy."""

import ast
import functools
import io
import os
import re
import shutil
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.template import make_copy
from tests.template.fixtures import ROOT, SMALL, launch_forked
from tests.template.pages import blocks
from tests.template.slow.recipes import (
    PAGE,
    assert_contract,
    copy_of_classes,
    edited,
    launch,
    parity_holds,
    train,
)
from tests.tools.faults import FAULTS, run_fault
from tests.tools.runs import read_metrics

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# ---- Checks --------------------------------------------------------------------------------------
OUTPUT = {  # the code of the model's output, in model.py of each kind of copy
    "core": "output.to(self.encoder.norm.weight.dtype)",
    "classes": "self.layers(batch.x)",
}
COUNT = "self.calls = getattr(self, 'calls', 0) + 1"  # a state that no checkpoint contains
HIDDEN = "model.hidden=8"


@pytest.fixture(scope="module")
def copy_of_kind(tmp_path_factory) -> Callable[[str], Path]:
    """copy_of_kind(kind) returns a copy that all tests share: `core` or `classes`."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "copy"
        if kind == "classes":
            copy_of_classes(folder)
            config = folder / "config.yaml"
            config.write_text(config.read_text().replace("rows: 2003", "rows: 300"))
            return folder
        assert make_copy.main([str(folder), "--without=all"]) == 0
        scores = folder / "example/scores.tsv"
        scores.write_text("\n".join(scores.read_text().splitlines()[:400]))
        return folder

    return make


def parity_finds(copy: Path) -> bool:
    return not parity_holds(copy, HIDDEN)


def syncs_finds(copy: Path) -> bool:
    return "WAITS  model.py:" in launch(copy, 1, "tests/check.py", "audit-worker", "syncs", HIDDEN)


def faults_finds(copy: Path) -> bool:
    (fault,) = [fault for fault in FAULTS if fault.name == "a rank killed in the forward pass"]
    launch_once = functools.partial(launch_forked, script=f"{copy}/tests/check.py")
    arguments = ["fault-worker", str(copy.parent), HIDDEN]
    reference = copy.parent / "reference"
    status, output = launch_once(2, [*arguments, f"run.name={reference.name}"])
    assert status == 0, output
    problem = run_fault(fault, copy.parent / "killed", reference, arguments, launch_once)
    assert not problem or "differs from the undisturbed run" in problem, problem
    return bool(problem)


def fake_gpu_finds(copy: Path) -> bool:
    arguments = ["train.py", HIDDEN, "optim.epochs=1"]
    try:
        launch(copy, 1, "tests/tools/fake_gpu.py", *arguments)
    except AssertionError as error:
        assert "Expected all tensors to be on the same device" in str(error), error
        return True
    return False


FINDS = {  # {error: (the check, a statement to add, the relative change of the outputs)}
    "a mixed device": (fake_gpu_finds, "", "Tensor([0.0])"),
    "a wait in a step": (syncs_finds, "", "0.0 * next(self.parameters()).sum().item()"),
    "a draw that depends on the rank": (parity_finds, "", "0.01 * Tensor(1).normal_()"),
    "a state that is not saved": (faults_finds, COUNT, "0.01 * self.calls"),
}


@pytest.mark.parametrize("name", FINDS)
@pytest.mark.parametrize("kind", OUTPUT)
def test_a_check_in_a_copy_passes_and_finds_an_edit(copy_of_kind, kind, name):
    """The check uses the tables and the model of the copy."""
    copy = copy_of_kind(kind)
    finds, statement, addition = FINDS[name]
    old = f"        return {OUTPUT[kind]}\n"
    new = f"        {statement}\n        return {OUTPUT[kind]} * (1 + {addition})\n"
    with edited(copy / "model.py", {old: new}):
        assert finds(copy)
    for folder in ("runs", "reference", "killed"):
        shutil.rmtree(copy.parent / folder, ignore_errors=True)
    assert not finds(copy)


# ---- Words ---------------------------------------------------------------------------------------
def words_of(path: Path) -> Iterator[str]:
    """Yields the comments and texts of a file, except in blocks with the condition `is_here`."""
    text = path.read_text()
    if path.suffix != ".py":
        yield text if path.name != "launch.sh" else "\n".join(re.findall(r"#.*", text))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    queue = [ast.parse(text)]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and "is_here(" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        queue.extend(ast.iter_child_nodes(node))


def test_a_core_copy_does_not_mention_files_that_it_lacks(tmp_path):
    """It does not mention missing files, folders, pages or commands, except for its pages.

    ../test_make_copy.py tests the pages, which can mention files of the template.
    """
    copy = tmp_path / "copy"
    assert make_copy.main([str(copy), "--without", "all,checks"]) == 0
    pages = {path.name for path in (copy / "docs").glob("*.md")}
    paths = [path for path in copy.rglob("*.*") if path.is_file() and "docs" not in path.parts]
    there = [*ROOT.glob("*.*"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.*")]
    gone = {path.name for path in there} - {path.name for path in paths} - pages
    assert {"model_reach.py", "measured.md", "CHANGELOG.md", "attention.patch"} <= gone
    names = [re.escape(name) for name in sorted(gone) if not name.startswith(".")]
    names += [r"tests[/.](?:template|bench|tools|recipes|check)", r"launch\.sh copy"]
    pattern = re.compile(rf"(?<!\*/)(?<![\w.])({'|'.join(names)})\b")
    found = {}
    for path in paths:
        for word in words_of(path):
            for match in pattern.finditer(word):
                found.setdefault(path.name, set()).add(match[1])
    assert found == {}


# ---- Upgrade -------------------------------------------------------------------------------------
OLD = "d8d8b4779fa2"  # a commit
MERGE = """! git merge template
git diff --name-only --diff-filter=U > ../conflicts
git merge --abort
git merge -X ours template"""


def here(block: str) -> str:
    """Returns commands of the page for the folders of a test; git decides about conflicts."""
    block = block.replace("/tmp/mine", "../fresh/mine").replace("/tmp/old", "../version")
    block = block.replace("../template/", f"{ROOT}/").replace("./launch.sh test\n", "")
    block = block.replace("PART,...", "explain,plots")  # the parts that the copy has left out
    return block.replace("git merge template", MERGE)


def skip_without_history(run: Callable, commit: str) -> None:
    if run(["git", "-C", str(ROOT), "cat-file", "-e", commit]).returncode:
        pytest.skip("the history of the template is missing")


def test_an_edited_copy_of_an_older_template_is_upgraded_by_the_commands_of_the_page(run, tmp_path):
    """The upgraded copy trains and passes its tests.

    Conflicts occur only in lines that both have changed, and the owner keeps their own version.
    """
    skip_without_history(run, OLD)
    (block,) = [block.text for block in blocks(PAGE, "bash") if "git merge template" in block.text]
    script = f". {ROOT}/tests/template/slow/owner.sh {ROOT} {OLD}\n{here(block)}"
    run(["bash", "-euc", script], PATH=PATH).check()
    conflicts = (tmp_path / "conflicts").read_text().split()
    assert conflicts == ["config.yaml", "losses.py", "metrics.py"]
    mine = tmp_path / "mine"
    assert (mine / "tests/check.py").exists() and not (mine / "predict_explain.py").exists()
    _, rows = train(mine, "optim.epochs=1")
    assert [row["agreement"] > 0.5 for row in rows if row["kind"] == "test"] == [True]
    assert_contract(mine)


OF_FOLDERS = "fa483e0"  # a commit whose copies are not git repositories
# What the owner of such a copy has done before an upgrade. $1: the template; $2: its commit.
OWNER = """
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
git clone -q --no-checkout "$1" template
mkdir old fresh
git -C template archive "$2" | tar x -C old
./old/launch.sh copy mine --without explain,plots
cd mine
test ! -e .git
touch -d "$(git -C ../template show -s --format=%cI "$2")" LICENSE
sed -i 's/  hidden: 32 /  hidden: 24 /' config.yaml
sed -i 's/^METRICS = .*/METRICS = {"pearson": pearson, "spearman": spearman}/' metrics.py
"""


def test_a_copy_that_is_not_a_repository_is_upgraded_by_the_commands_of_the_page(run, tmp_path):
    """The commands find the commit of the copy. The owner keeps their edits of two lines."""
    skip_without_history(run, OF_FOLDERS)
    texts = [block.text for block in blocks(PAGE, "bash")]
    (find,) = [text for text in texts if "rev-list" in text]
    (prepare,) = [text for text in texts if "-s ours" in text]
    (upgrade,) = [text for text in texts if "git merge template" in text]
    prepare = prepare.replace("COMMIT", '"$commit"')
    unchanged = "git diff --exit-code HEAD^ HEAD"  # HEAD^: the owner's commit before the merge
    script = f"{OWNER}\ncommit=$({find})\n{here(prepare)}\n{unchanged}\n{here(upgrade)}"
    script += "\necho upgraded from $commit"
    owner = {"GIT_CONFIG_GLOBAL": os.devnull}
    for role in ("AUTHOR", "COMMITTER"):
        owner |= {f"GIT_{role}_NAME": "owner", f"GIT_{role}_EMAIL": "owner"}
    command = ["bash", "-euc", script, "owner", str(ROOT), OF_FOLDERS]
    printed = run(command, PATH=PATH, **owner).check().stdout
    assert f"upgraded from {OF_FOLDERS}" in printed
    assert (tmp_path / "conflicts").read_text().split() == ["metrics.py"]
    mine = tmp_path / "mine"
    assert (mine / "tests/check.py").exists() and not (mine / "predict_explain.py").exists()
    checkpoint, rows = train(mine, "optim.epochs=1")
    assert checkpoint["config"]["model"]["hidden"] == 24
    assert [row["spearman"] > 0.5 for row in rows if row["kind"] == "test"] == [True]


WITH_EDGE_FEATURES = "fa483e0"  # a commit whose tables had further fields


def test_an_unfinished_run_of_an_older_template_is_resumed(run, tables, tmp_path):
    """The log says that the tables of the older run cannot be compared.

    The best model is the start, which the older template saved. It predicts, too.
    """
    git = f"git -C {ROOT}"
    unpack = f"mkdir old && {git} archive {WITH_EDGE_FEATURES} | tar -x -C old"
    skip_without_history(run, WITH_EDGE_FEATURES)
    run(["bash", "-euc", unpack]).check()
    options = [*tables, *SMALL, "model.readout=local", "data.cache_dir=", "optim.lr=1e-30"]
    for folder, epochs in ((tmp_path / "old", 1), (ROOT, 2)):
        command = [sys.executable, str(folder / "train.py"), *options, f"optim.epochs={epochs}"]
        output = run(command, PYTHONPATH=str(folder), OMP_NUM_THREADS="1").check().stdout
    assert "written by an earlier version of the template" in output
    assert "resumed at step 5" in output
    steps = [row["step"] for row in read_metrics(tmp_path / "runs/default", "train")]
    assert steps == list(range(1, 11))
    predict = [sys.executable, str(ROOT / "predict.py"), "all-singles", "runs/default"]
    assert "results for 30 rows" in run(predict).check().stdout


# ---- Tests ---------------------------------------------------------------------------------------
COUNTS = '''
class Counts(Squared):
    """Squared errors; scores that are not whole numbers are an error."""

    @staticmethod
    def check(y: Tensor) -> None:
        if not bool(((y == y.round()) | y.isnan()).all()):
            raise UserError("optim.loss=counts needs whole numbers")


LOSSES["counts"] = Counts
'''


@pytest.mark.usefixtures("tables")
def test_the_tests_of_an_edited_copy_pass(run, tmp_path):
    """The copy has a changed default, other tables, a loss with a check, and a changed output."""
    copy = tmp_path / "copy"
    assert make_copy.main([str(copy), "--without", "all"]) == 0
    lines = (tmp_path / "scores.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    scores = [f"{genes}\t{round(float(score))}" for genes, score in rows]
    (tmp_path / "scores.tsv").write_text("\n".join([lines[0], *scores, ""]))
    config = (copy / "config.yaml").read_text()
    for option, value in (
        ("edges", tmp_path / "edges.tsv"),
        ("perturbations", tmp_path / "scores.tsv"),
        ("hidden", 16),
        ("loss", "counts"),
    ):
        config = re.sub(rf"^  {option}: \S+", f"  {option}: {value}", config, flags=re.M)
    (copy / "config.yaml").write_text(config)
    with (copy / "losses.py").open("a") as file:
        file.write(COUNTS)
    with edited(copy / "model.py", {OUTPUT["core"]: f"{OUTPUT['core']}.tanh()"}):
        tested = run([str(copy / "launch.sh"), "test"], timeout=300, PATH=PATH, PYTHONPATH="")
    assert " passed" in tested.check().stdout and "failed" not in tested.stdout
