"""Resuming a run with options that differ from the options of its earlier steps."""

import json
import signal
from pathlib import Path

import pytest
import torch
import yaml

from tests.template.fixtures import ON_ONE_AND_TWO
from tests.tools.runs import difference, newest_checkpoint, read_metrics

FILES = ("config.yaml", "test.tsv", "metrics.jsonl", "status.json", "environment.txt", "curves.svg")
CHANGED = ["optim.lr=0.001", "model.dropout=0.6", "optim.weight_decay=0", "optim.warmup=0.5"]
MADE_WITH = "model.dropout=0.1, optim.lr=0.01, optim.warmup=0.05, optim.weight_decay=0.1"
# Options of a run that a test stops in its second epoch.
LONG = ["optim.epochs=3", "checkpoint.every_steps=3"]


def contents(folder: Path) -> dict[str, bytes]:
    """Returns {name: content} of all files that a run has written, except for its logs."""
    paths = [folder / name for name in FILES] + list((folder / "checkpoints").iterdir())
    return {path.name: path.read_bytes() for path in paths}


def options(folder: Path) -> dict:
    return yaml.safe_load((folder / "config.yaml").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs/default"


# ---- A run that has finished training ------------------------------------------------------------
def test_a_finished_run_refuses_options_that_would_change_its_training(train, folder):
    """The error lists each changed option with its earlier value."""
    first = train(0, "optim.epochs=2").check()
    before = contents(folder)
    for changed, made_with in (
        (CHANGED, MADE_WITH),
        (["optim.clip=0.5"], "optim.clip=1.0"),
        (["optim.epochs=1"], "optim.epochs=2"),
        (["optim.patience=1"], "optim.patience=0"),
        (["optim.precision=fp64"], "optim.precision=fp32"),
        (["optim.on_nonfinite=skip"], "optim.on_nonfinite=stop"),
    ):
        result = train(0, "optim.epochs=2", *changed)
        assert result.returncode == 2
        file = "runs/default/checkpoints/step_00000010.pt"
        expected = f"error: {file} finished training at step 10 with {made_with}: "
        assert result.stderr.startswith(expected) and result.stderr.count("\n") == 1
        assert contents(folder) == before
    again = train(0, "optim.epochs=2").check()
    assert again.stdout.splitlines()[-2:] == first.stdout.splitlines()[-2:]


@ON_ONE_AND_TWO
def test_a_finished_run_accepts_options_that_do_not_change_its_training(train, folder, nproc):
    own = ["optim.zero=true"] if nproc else ["run.deterministic=true", "optim.accumulate=4"]
    first = train(nproc).check()
    given = [
        *("log.every_steps=2", "checkpoint.every_steps=3", "checkpoint.keep_last=1"),
        *("model.message_passing=expanded", "model.checkpointing=true"),
        *("data.cache_dir=other", "data.workers=1", "ddp.timeout_s=100"),
    ]
    result = train(nproc, *given, *own).check()
    assert "this run was trained with" not in result.stdout
    assert options(folder)["log"]["every_steps"] == 2
    # The line with the test metrics, and the next line.
    assert result.stdout.splitlines()[-2:] == first.stdout.splitlines()[-2:]


def test_the_status_of_a_killed_run_has_the_step_of_its_last_checkpoint(train, folder):
    assert train(0, *LONG, fault="kill_at_step:9:0").returncode == -signal.SIGKILL
    status = json.loads((folder / "status.json").read_text())
    newest = torch.load(newest_checkpoint(folder), weights_only=True)
    assert newest["step"] >= 8
    assert (status["state"], status["step"]) == ("running", newest["step"])
    assert status["epoch"] == newest["epoch"]


def test_the_status_of_a_failed_run_has_the_step_that_it_resumes_from(train, folder, monkeypatch):
    """metrics.jsonl has the step in which it failed."""

    def fail(step: int, *arguments: object) -> float:
        if step == 8:
            raise ZeroDivisionError
        return 1.0

    monkeypatch.setattr("train.schedule", fail)
    assert train(0, *LONG).returncode == 1
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"], status["epoch"]) == ("failed", 6, 1)
    assert newest_checkpoint(folder).name == "step_00000006.pt"
    assert read_metrics(folder, "event")[-1]["step"] == 8
    monkeypatch.undo()
    assert "resumed at step 6" in train(0, *LONG).check().stdout


def test_a_finished_run_continues_with_more_epochs_and_logs_the_earlier_options(train, folder):
    train(0).check()
    more = ["optim.epochs=2", "optim.clip=0.5"]
    killed = train(0, *more, fault="kill_at_step:6:0")
    assert killed.returncode == -signal.SIGKILL
    assert not (folder / "test.tsv").exists()  # a run with steps left has no result
    result = train(0, *more).check()
    sentence = "note      up to step 5, this run was trained with optim.epochs=1, optim.clip=1.0\n"
    assert sentence in result.stdout
    assert options(folder)["optim"]["epochs"] == 2
    assert (folder / "test.tsv").exists()
    assert [row["step"] for row in read_metrics(folder, "train")] == list(range(1, 11))
    back = train(0)
    assert back.returncode == 2
    assert "step 10 with optim.epochs=2, optim.clip=0.5: " in back.stderr


def test_a_run_that_ran_out_of_patience_only_accepts_more_patience(train, folder):
    ended = ["optim.lr=0", "optim.epochs=9"]
    train(0, *ended, "optim.patience=2").check()
    before = contents(folder)
    for refused in (["optim.patience=2", "optim.lr=0.1"], ["optim.patience=1"]):
        assert train(0, *ended, *refused).returncode == 2
        assert contents(folder) == before
    result = train(0, *ended, "optim.patience=3").check()
    assert "note      up to step 10, this run was trained with optim.patience=2" in result.stdout
    assert "trained   3 epochs: increase optim.patience to train further" in result.stdout


def test_stopping_a_finished_run_that_was_started_again_keeps_its_predictions(train, folder):
    train(0).check()
    before = contents(folder)
    (folder / "STOP").touch()
    result = train(0).check()
    assert "stopped   at step 5 (STOP file)" in result.stdout
    assert not (folder / "STOP").exists()
    after = contents(folder)
    for name in ("test.tsv", "config.yaml", "step_00000005.pt"):
        assert after[name] == before[name], name
    train(0).check()
    assert contents(folder)["test.tsv"] == before["test.tsv"]
    assert len(read_metrics(folder, "test")) == 1


# ---- In the middle of a run ----------------------------------------------------------------------
@ON_ONE_AND_TWO
def test_options_that_change_in_the_middle_of_a_run_are_logged(train, folder, nproc):
    train(nproc, *LONG, fault="stop_at_step:6").check()
    result = train(nproc, *LONG, *CHANGED).check()
    sentence = f"note      up to step 7, this run was trained with {MADE_WITH}"
    assert result.stdout.count(sentence) == 1
    assert sentence in (folder / "log.rank0.txt").read_text()
    found = options(folder)
    assert (found["optim"]["lr"], found["model"]["dropout"]) == (0.001, 0.6)
    rates = [row["lr"] for row in read_metrics(folder, "train")]
    assert min(rates[3:7]) > 0.004 > 0.001 >= max(rates[7:])
    # The same command again changes no option.
    assert "this run was trained with" not in train(nproc, *LONG, *CHANGED).check().stdout
    back = train(nproc, *LONG)
    assert back.returncode == 2 and back.stderr.count("error: ") == 1
    assert "at step 15 with model.dropout=0.6, optim.lr=0.001, " in back.stderr


def test_a_stopped_run_can_be_finished_with_fewer_epochs(train, folder):
    train(0, *LONG, fault="stop_at_step:6").check()
    refused = train(0, "optim.epochs=1", "optim.lr=0.5")
    assert refused.returncode == 2
    assert "at step 7 with optim.epochs=3, optim.lr=0.01: " in refused.stderr
    result = train(0, "optim.epochs=1").check()
    assert "note      up to step 7, this run was trained with optim.epochs=3\n" in result.stdout
    assert [row["step"] for row in read_metrics(folder, "test")] == [7]


@ON_ONE_AND_TWO
@pytest.mark.slow
def test_options_of_steps_that_were_not_saved_are_not_logged(train, folder, nproc):
    """The run is killed before it saves a step that it has made with these options."""
    train(nproc, *LONG, "run.name=whole").check()
    train(nproc, *LONG, fault="stop_at_step:6").check()
    faults = "kill_at_step:8:0 kill_at_step:8:1"  # each rank
    killed = train(nproc, *LONG, "optim.lr=0.1", fault=faults)
    assert killed.returncode == -signal.SIGKILL
    third = train(nproc, *LONG, "optim.lr=0.2", fault=faults)
    assert "note      up to step 7, this run was trained with optim.lr=0.01\n" in third.stdout
    assert "this run was trained with" not in train(nproc, *LONG).check().stdout
    assert difference(folder, folder.parent / "whole") == ""


@pytest.mark.slow
def test_all_options_can_change_before_the_first_step(train, folder):
    assert train(0, *LONG, fault="kill_at_step:0:0").returncode == -signal.SIGKILL
    assert newest_checkpoint(folder).name == "step_00000000.pt"
    result = train(0, *LONG, *CHANGED).check()
    assert "resumed at step 0" in result.stdout
    assert "this run was trained with" not in result.stdout
    train(0, *LONG, *CHANGED, "run.name=whole").check()
    assert difference(folder, folder.parent / "whole") == ""


@pytest.mark.slow
def test_options_of_the_steps_of_a_resumed_checkpoint_are_kept(train, folder):
    train(0, *LONG, "run.name=old", "checkpoint.keep_last=9").check()
    resume = "run.resume=runs/old/checkpoints/step_{:08d}.pt"
    train(0, *LONG, "optim.lr=0.1", resume.format(6)).check()
    result = train(0, *LONG, "optim.lr=0.1", resume.format(15), "run.name=end")
    assert result.returncode == 2
    assert "step_00000015.pt finished training at step 15 with optim.lr=0.01: " in result.stderr
