"""Runs that were trained with different code, and ranks with different code."""

import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import run_changes
from ddp_setup import library_versions
from run_changes import code_digests, note_other_versions, other_code
from tests.template.fixtures import DEFAULTS, ROOT, SMALL, fork, join
from tests.tools.runs import newest_checkpoint

OTHER = "ANOTHER = 0\n"


def copy_code(folder: Path) -> Path:
    """Copies the modules and config.yaml into a new folder, and returns the folder."""
    folder.mkdir()
    for path in (*ROOT.glob("*.py"), ROOT / "config.yaml"):
        shutil.copy(path, folder)
    return folder


def edit(path: Path, *replacements: tuple[str, str]) -> None:
    """Makes the replacements in a file or, without replacements, appends a comment to it."""
    text = path.read_text()
    for before, after in replacements:
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text if replacements else text + OTHER)


def edit_checkpoints(folder: Path, code: dict[str, str] | None) -> None:
    """Changes the hashes of some files in the checkpoints of a run, or removes all hashes."""
    for path in (folder / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)
        if code is None:
            del state["code"]
        else:
            state["code"] |= code
        path.unlink()  # best.pt may be a link to another checkpoint
        torch.save(state, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs/default"


# ---- Which files count ---------------------------------------------------------------------------
def test_loaded_modules_count_if_they_affect_numbers(tmp_path, monkeypatch):
    """This includes modules that users have added."""
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
    commented = f'"""A docstring."""\n\n# A comment.\n{OTHER.replace(" ", "  ")}'
    (tmp_path / "layers/gat.py").write_text(commented)
    assert code_digests("script") == after


def test_a_checkpoint_has_hashes_of_the_code_that_affects_numbers(trained, folder):
    trained()
    state = torch.load(newest_checkpoint(folder), weights_only=True)
    for name in ("train.py", "task.py", "losses.py", "data.py", "optim.py", "mask.py"):
        assert name in state["code"]
    for name in ("run_folder.py", "ddp_setup.py", "predict.py", "config.py", "parts.py"):
        assert name not in state["code"]


def test_files_that_only_the_checkpoint_or_the_code_has_are_ignored(tmp_path, monkeypatch):
    """This also holds for files that exist but are not loaded, such as train.py in a prediction."""
    monkeypatch.setattr(run_changes, "FOLDER", tmp_path)
    for name in ("same.py", "edited.py", "new.py", "unloaded.py", "baseline.py"):
        (tmp_path / name).touch()
    ours = {"same.py": "1", "edited.py": "2", "new.py": "1", "baseline.py": "1"}
    earlier = {"same.py": "1", "edited.py": "1", "gone.py": "1", "unloaded.py": "1"}
    earlier["model_reach.py"] = "1"  # an optional part
    named = other_code({"code": earlier}, ours)
    assert named == "a different version of edited.py"
    assert other_code({"code": ours}, ours) == ""


def test_a_checkpoint_without_hashes_counts_as_equal():
    """In a copy without this part, checkpoints have an empty dict of hashes."""
    ours = {"task.py": "1"}
    assert other_code({}, ours) == other_code({"code": {}}, ours) == ""


# ---- One run -------------------------------------------------------------------------------------
def test_a_finished_run_is_refused_if_the_code_has_changed(train, folder, tmp_path):
    copy = copy_code(tmp_path / "copy")
    train(0, script=copy / "train.py").check()
    edit(copy / "run_plots.py")  # not listed, because it does not affect numbers
    before = (folder / "metrics.jsonl").read_text()
    edit(copy / "losses.py")
    edit(copy / "train.py")
    refused = train(0, script=copy / "train.py")
    assert refused.returncode == 2
    assert "at step 5 with a different version of losses.py, train.py: " in refused.stderr
    assert (folder / "metrics.jsonl").read_text() == before


def test_an_unfinished_run_logs_changed_code_and_versions(train, folder):
    train(0, "optim.epochs=2", fault="stop_at_step:6").check()
    edit_checkpoints(folder, {"mask.py": "another", "gone.py": "1"})
    environment = folder / "environment.txt"
    first_start = environment.read_text().replace(f"torch: {torch.__version__}", "torch: 2.8.0")
    environment.write_text(first_start)
    result = train(0, "optim.epochs=2").check()
    assert "step 7, this run was trained with a different version of mask.py\n" in result.stdout
    assert "this run was last started with torch 2.8.0\n" in result.stdout
    assert environment.read_text().startswith(f"{first_start}command: ")


def test_a_run_whose_test_failed_is_tested_with_corrected_code(trained, train, folder):
    trained()
    edit_checkpoints(folder, {"metrics.py": "another"})
    (folder / "test.tsv").unlink()
    result = train(0).check()
    assert "step 5, this run was trained with a different version of metrics.py\n" in result.stdout
    assert (folder / "test.tsv").exists()


def test_a_checkpoint_without_hashes_is_used_without_a_note(trained, train, predict, folder):
    trained()
    edit_checkpoints(folder, None)
    assert "different version" not in train(0).check().stdout
    assert "different version" not in predict(0, "all-singles", "runs/default").check().stdout


def test_a_prediction_with_changed_code_is_noted(trained, predict, folder):
    trained()
    assert "different version" not in predict(0, "all-singles", "runs/default").check().stdout
    edit_checkpoints(folder, {"model.py": "another", "mask.py": "another", "gone.py": "1"})
    best = folder / "checkpoints/best.pt"
    state = torch.load(best, weights_only=True)
    del state["code"]["metrics.py"]  # like a file that only a notebook has loaded
    torch.save(state, best)
    result = predict(0, "all-singles", "runs/default").check()
    assert result.stdout.count("trained with a different version of mask.py, model.py\n") == 1


# ---- Several ranks -------------------------------------------------------------------------------
@pytest.mark.parametrize("script", ["train.py", pytest.param("predict.py", marks=pytest.mark.slow)])
def test_ranks_with_different_code_are_refused(trained, tables, tmp_path, script):
    """For example, the machines do not have a common disk, and the code on one was edited."""
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
            edit(copy / "model_pairs.py")  # loaded when the model is built
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": str(rank)}
        variables |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks.append(fork(tmp_path, f"rank{rank}", [str(copy / script), *arguments], variables))
    assert join(ranks) == [2, 2]
    errors = "".join((tmp_path / f"rank{rank}.stderr").read_text() for rank in range(2))
    assert errors.startswith("error: model_pairs.py differs between ranks: ")
    assert errors.count("\n") == 1


# ---- Options -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_option_that_only_the_code_or_only_the_run_has_counts_as_its_default(
    train, predict, tmp_path
):
    """A copy of the code has an additional option, optim.momentum. Its default is 0.9."""
    copy = copy_code(tmp_path / "copy")
    edit(copy / "optim.py", ("    zero: bool", "    momentum: float = 0.9\n    zero: bool"))
    edit(copy / "config.yaml", ("  zero: false", "  momentum: 0.9\n  zero: false"))
    script = copy / "train.py"
    more = "optim.epochs=2"
    train(0, "run.name=a", script=script).check()
    predict(0, "all-singles", "runs/a").check()
    result = train(0, "run.name=a", more).check()
    assert "trained with optim.epochs=1, a different version of optim.py\n" in result.stdout
    train(0, "run.name=b", "optim.momentum=0.5", script=script).check()
    refused = predict(0, "all-singles", "runs/b")
    assert refused.returncode == 2
    assert "with the option optim.momentum, which this code does not have" in refused.stderr
    train(0, more, fault="stop_at_step:6").check()
    shutil.copytree(tmp_path / "runs/default", tmp_path / "runs/again")
    result = train(0, more, script=script).check()
    assert "this run was trained with a different version of optim.py\n" in result.stdout
    result = train(0, more, "run.name=again", "optim.momentum=0.5", script=script).check()
    assert "with optim.momentum=0.9, a different version of optim.py\n" in result.stdout


def test_a_changed_precision_of_float32_products_is_logged(monkeypatch, caplog):
    """For example, an environment variable of a container can change it."""
    texts = []
    for precision in ("high", "highest"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda value=precision: value)
        texts.append("".join(f"{name}: {value}\n" for name, value in library_versions().items()))
    note_other_versions(*texts)
    assert "float32 matmul precision high" in caplog.text
