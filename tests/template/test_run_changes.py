"""Runs that another version of the code has made, and ranks with different code."""

import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import run_changes
from run_changes import code_digests, other_code
from tests.template.fixtures import DEFAULTS, ROOT, SMALL, fork, join, write_table
from tests.tools.runs import newest_checkpoint, read_metrics

OTHER = "# another comment\n"


def copy_code(folder: Path) -> Path:
    """Copies the modules and their options, and returns the folder."""
    folder.mkdir()
    for path in (*ROOT.glob("*.py"), ROOT / "config.yaml"):
        shutil.copy(path, folder)
    return folder


def edit(path: Path, *replacements: tuple[str, str]) -> None:
    """Replaces texts of a file, or adds a comment if there are none."""
    text = path.read_text()
    for before, after in replacements:
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text if replacements else text + OTHER)


def edit_checkpoints(folder: Path, code: dict[str, str] | None) -> None:
    """Changes what the checkpoints of a run say of some files; None: they say nothing of any."""
    for path in (folder / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)
        if code is None:
            del state["code"]
        else:
            state["code"] |= code
        path.unlink()  # best.pt is a link to one of the others
        torch.save(state, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs/default"


# ---- What counts ---------------------------------------------------------------------------------
def test_the_users_own_modules_count_and_files_that_decide_no_numbers_do_not(tmp_path, monkeypatch):
    """Nor do those that nobody has loaded."""
    for name in ("mine.py", "layers/__init__.py", "layers/gat.py", "run_mine.py", "tests/a.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        monkeypatch.setitem(sys.modules, module, sys)
    for name in ("script.py", "notes.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(run_changes, "FOLDER", tmp_path)
    counted = {"mine.py", "layers/__init__.py", "layers/gat.py", "script.py"}
    before = code_digests("script")
    assert before.keys() == counted
    (tmp_path / "layers/gat.py").write_text(OTHER)
    after = code_digests("script")
    assert {name for name in counted if after[name] != before[name]} == {"layers/gat.py"}


def test_a_checkpoint_names_the_code_of_steps_and_predictions(trained, folder):
    trained()
    state = torch.load(newest_checkpoint(folder), weights_only=True)
    for name in ("train.py", "task.py", "losses.py", "data.py", "optim.py", "mask.py"):
        assert name in state["code"]
    for name in ("run_folder.py", "ddp_setup.py", "predict.py", "config.py", "parts.py"):
        assert name not in state["code"]


def test_files_that_only_one_side_has_are_named_but_for_those_of_parts(tmp_path, monkeypatch):
    """Nor is a file that lies here and that nobody has loaded, as train.py in a prediction."""
    monkeypatch.setattr(run_changes, "FOLDER", tmp_path)
    for name in ("same.py", "edited.py", "new.py", "unloaded.py", "baseline.py"):
        (tmp_path / name).touch()
    ours = {"same.py": "1", "edited.py": "2", "new.py": "1", "baseline.py": "1"}
    earlier = {"same.py": "1", "edited.py": "1", "gone.py": "1", "unloaded.py": "1"}
    earlier["model_reach.py"] = "1"  # of another part
    named = other_code({"code": earlier}, ours)
    assert named == "a different version of edited.py"
    assert other_code({"code": ours}, ours) == ""


def test_a_checkpoint_that_says_nothing_of_its_code_is_of_the_same():
    """One of a copy without this part has {}."""
    ours = {"task.py": "1"}
    assert other_code({}, ours) == other_code({"code": {}}, ours) == ""


# ---- One run -------------------------------------------------------------------------------------
def test_a_finished_run_of_a_copy_that_was_edited_since_is_refused(train, folder, tmp_path):
    copy = copy_code(tmp_path / "copy")
    train(0, script=copy / "train.py").check()
    edit(copy / "run_plots.py")  # which changes no number, so that it is not named
    before = (folder / "metrics.jsonl").read_text()
    edit(copy / "losses.py")
    edit(copy / "train.py")
    refused = train(0, script=copy / "train.py")
    assert refused.returncode == 2
    assert (
        "step_00000005.pt finished training at step 5 with a different version of losses.py, "
        "train.py: undo this change, "
    ) in refused.stderr
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_run_in_the_middle_says_which_code_and_versions_its_steps_had(train, folder):
    train(0, "optim.epochs=2", fault="stop_at_step:6").check()
    edit_checkpoints(folder, {"mask.py": "another", "gone.py": "1"})
    environment = folder / "environment.txt"
    first_start = environment.read_text().replace(f"torch: {torch.__version__}", "torch: 2.8.0")
    environment.write_text(first_start)
    result = train(0, "optim.epochs=2").check()
    assert "the first 7 steps were made with a different version of mask.py\n" in result.stdout
    assert "this run was last started with torch 2.8.0\n" in result.stdout
    assert environment.read_text().startswith(f"{first_start}command: ")


def test_a_run_that_failed_in_its_test_is_tested_by_the_code_that_was_mended(
    trained, train, folder
):
    trained()
    edit_checkpoints(folder, {"metrics.py": "another"})
    (folder / "test.tsv").unlink()
    result = train(0).check()
    assert "the first 5 steps were made with a different version of metrics.py\n" in result.stdout
    assert (folder / "test.tsv").exists()


def test_a_checkpoint_that_says_nothing_of_its_code_is_taken_as_it_is(
    trained, train, predict, folder
):
    trained()
    edit_checkpoints(folder, None)
    assert "other code" not in train(0).check().stdout
    assert "other code" not in predict(0, "all-singles", "runs/default").check().stdout


def test_a_prediction_by_other_code_than_that_of_the_run_is_noted(trained, predict, folder):
    trained()
    assert "other code" not in predict(0, "all-singles", "runs/default").check().stdout
    edit_checkpoints(folder, {"model.py": "another", "mask.py": "another", "gone.py": "1"})
    best = folder / "checkpoints/best.pt"
    state = torch.load(best, weights_only=True)
    del state["code"]["metrics.py"]  # as of a file that only a notebook has loaded
    torch.save(state, best)
    result = predict(0, "all-singles", "runs/default").check()
    note = "note      runs/default/checkpoints/best.pt was trained with a different version of "
    assert result.stdout.count(f"{note}mask.py, model.py\n") == 1


# ---- Several ranks -------------------------------------------------------------------------------
@pytest.mark.parametrize("script", ["train.py", pytest.param("predict.py", marks=pytest.mark.slow)])
def test_ranks_with_other_code_are_refused(trained, tables, tmp_path, script):
    """As on machines without a common disk, where one copy was edited."""
    trained()
    arguments = ["all-singles", "runs/default"]
    if script == "train.py":
        arguments = [*tables, *SMALL, "run.name=other", "--config", DEFAULTS]
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    ranks = []
    for rank in range(2):
        copy = copy_code(tmp_path / f"copy{rank}")
        if rank == 1:
            edit(copy / "model_pairs.py")  # which is loaded with the model
        variables = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        ranks.append(fork(tmp_path, f"rank{rank}", [str(copy / script), *arguments], variables))
    assert join(ranks) == [2, 2]
    errors = "".join((tmp_path / f"rank{rank}.stderr").read_text() for rank in range(2))
    assert errors.startswith("error: model_pairs.py differs between ranks: ")
    assert errors.count("\n") == 1


# ---- Options -------------------------------------------------------------------------------------
@pytest.fixture
def copy_with_an_option(tmp_path):
    """A copy that has the option optim.momentum, by default 0.9."""
    copy = copy_code(tmp_path / "copy")
    edit(copy / "optim.py", ("    zero: bool", "    momentum: float = 0.9\n    zero: bool"))
    edit(copy / "config.yaml", ("  zero: false", "  momentum: 0.9\n  zero: false"))
    return copy


@pytest.mark.slow
def test_a_run_with_an_option_at_its_default_needs_no_code_that_has_it(
    train, predict, copy_with_an_option, folder, tmp_path
):
    write_table(tmp_path / "ask.tsv", [("genes",), ("Y01",)])
    train(0, script=copy_with_an_option / "train.py").check()
    predict(0, "ask.tsv", "runs/default").check()
    result = train(0, "optim.epochs=2").check()
    assert "made with optim.epochs=1, a different version of optim.py\n" in result.stdout
    assert [row["step"] for row in read_metrics(folder, "train")] == list(range(1, 11))
    own = ["run.name=own", "optim.momentum=0.5"]
    train(0, *own, script=copy_with_an_option / "train.py").check()
    refused = predict(0, "ask.tsv", "runs/own")
    assert refused.returncode == 2
    assert "with the option optim.momentum, which this code does not have" in refused.stderr


@pytest.mark.slow
def test_a_run_without_an_option_had_it_at_its_default(train, copy_with_an_option, tmp_path):
    train(0, "optim.epochs=2", fault="stop_at_step:6").check()
    shutil.copytree(tmp_path / "runs/default", tmp_path / "runs/again")
    script = copy_with_an_option / "train.py"
    result = train(0, "optim.epochs=2", script=script).check()
    assert "steps were made with a different version of optim.py\n" in result.stdout
    others = ["optim.epochs=2", "run.name=again", "optim.momentum=0.5"]
    result = train(0, *others, script=script).check()
    assert "with optim.momentum=0.9, a different version of optim.py\n" in result.stdout
