"""The run folder: its files, the checkpoint that a run resumes from, and errors of writing."""

import errno
import json
import math
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import Config, read_options
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from metrics import METRICS, first_metric
from optim import OptimConfig, schedule
from run_checkpoint import TrainState
from run_folder import RunFolder
from run_plots import curves_svg
from tests.tools.runs import ROOT, newest_checkpoint, read_metrics, zero_a_block

FIRST = first_metric()


def read_status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


# ---- The files of a run --------------------------------------------------------------------------
def test_a_run_writes_all_files_of_its_folder(train, tmp_path):
    options = ["run.name=08", "optim.epochs=3", "optim.accumulate=2"]
    output = train(2, *options).check().stdout
    folder = tmp_path / "runs/08"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        *("config.yaml", "environment.txt", "metrics.jsonl", "curves.svg", "test.tsv"),
        *("status.json", "graph.pt", "log.rank0.txt", "log.rank1.txt", "checkpoints/best.pt"),
        *("checkpoints/step_00000010.pt", "checkpoints/step_00000015.pt", "checkpoints/.lock"),
    }
    status = {"state": "finished", "step": 15, "epoch": 3, "reason": "", "warnings": []}
    assert read_status(folder) == status
    assert read_options(folder / "config.yaml")["run.name"] == "08"
    environment = (folder / "environment.txt").read_text()
    assert re.search(r"^rank 1, host \S+, pid \d+, device cpu, ", environment, re.M)
    assert f"torch: {torch.__version__}\n" in environment
    (test_row,) = read_metrics(folder, "test")
    last = output[output.index("test  ") :].splitlines()
    assert f"{FIRST.title()} {test_row[FIRST]:.4f}" in last[0]
    assert f", baseline {test_row[f'baseline_{FIRST}']:.4f}" in last[0]
    assert output.count("epoch 1/3") == 1  # only rank 0 prints
    plan = "batch     32 samples over 2 ranks and 2 micro-batches, 5 steps per epoch"
    assert plan in output


def test_environment_txt_has_the_commit_of_the_code(train, tmp_path, monkeypatch):
    """This also holds if a hook of another repository has set GIT_DIR."""
    expected = subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty --abbrev=40")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], cwd=tmp_path, check=True)
    commit = [*git, "commit", "--quiet", "--allow-empty", "--message=a"]
    subprocess.run(commit, cwd=tmp_path, check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / ".git/index"))
    train(0, "optim.epochs=1").check()
    text = (tmp_path / "runs/default/environment.txt").read_text()
    assert f"\ngit commit: {expected}\n" in text


def test_metrics_jsonl_has_a_row_for_each_step_and_each_validation(train, tmp_path):
    train(0, "optim.epochs=3", "optim.accumulate=2").check()
    folder = tmp_path / "runs/default"
    train_rows = read_metrics(folder, "train")
    val_rows = read_metrics(folder, "val")
    (test_row,) = read_metrics(folder, "test")
    assert [row["step"] for row in train_rows] == list(range(1, 16))
    assert [row["epoch"] for row in train_rows] == [1] * 5 + [2] * 5 + [3] * 5
    assert [(row["step"], row["epoch"]) for row in val_rows] == [(0, 0), (5, 1), (10, 2), (15, 3)]
    needed = {"loss", "lr", "grad_norm", "samples_per_s", "data_ms", "step_ms", "memory_mb"}
    for row in train_rows:
        assert needed <= row.keys()
        assert all(math.isfinite(row[key]) for key in needed)
    rates = [0.01 * schedule(step, 15, OptimConfig()) for step in range(15)]
    assert [row["lr"] for row in train_rows] == rates
    baselines = {f"baseline_{name}" for name in METRICS}
    needed = {"kind", "step", "epoch", "loss", "mse", "n", "rows", *METRICS, *baselines}
    assert all(row.keys() == needed for row in val_rows)
    assert test_row.keys() == {*needed, "best_step"}
    assert all(15 < row["n"] == row["rows"] < 25 for row in [*val_rows, test_row])
    loss_of_first_epoch = sum(row["loss"] for row in train_rows[:5])
    assert sum(row["loss"] for row in train_rows[-5:]) < loss_of_first_epoch


def test_rows_of_additional_kinds_are_kept_up_to_the_step_of_the_checkpoint(tmp_path):
    rows = [{"kind": kind, "step": step} for step in (3, 4, 5) for kind in ("train", "probe")]
    rows.insert(0, {"kind": "probe", "x": 1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ddp = Distributed(DDPConfig())
    folder = SimpleNamespace(path=tmp_path, ddp=ddp, rows=[])
    RunFolder._open_metrics(folder, TrainState(None, None, None, step=4))
    ddp.close()
    assert folder.metrics.closed
    assert folder.rows == rows[:5]
    assert curves_svg(rows, FIRST, ["baseline"])


@pytest.mark.parametrize(("best", "is_kept"), [(None, False), ({"step": 0}, True)])
def test_a_validation_row_is_kept_if_the_checkpoint_includes_the_validation(
    tmp_path, best, is_kept
):
    """A run that is killed after writing the row, but before the checkpoint, validates again."""
    row = {"kind": "val", "step": 0, "epoch": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    ddp = Distributed(DDPConfig())
    folder = SimpleNamespace(path=tmp_path, ddp=ddp, rows=[])
    RunFolder._open_metrics(folder, TrainState(None, None, None, best=best))
    ddp.close()
    assert folder.rows == [row] * is_kept


def test_numbers_that_are_not_finite_are_null_in_the_metrics(tmp_path):
    values = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1, "reason": "nan"}
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as metrics:
        ddp = SimpleNamespace(rank=0)
        folder = SimpleNamespace(path=tmp_path, ddp=ddp, rows=[], metrics=metrics)
        RunFolder.write(folder, "train", TrainState(None, None, None), **values)
    expected = {"step": 0, "epoch": 1, **values, "loss": None, "grad_norm": None}
    assert read_metrics(tmp_path, "train") == folder.rows == [{"kind": "train", **expected}]
    assert '"loss": null, "grad_norm": null, "lr": 0.1, "reason": "nan"' in path.read_text()


def test_each_rank_removes_the_stop_file_if_it_still_exists(tmp_path):
    (tmp_path / "STOP").touch()
    folder = SimpleNamespace(path=tmp_path, event=lambda *values: None)
    for _ in range(2):
        RunFolder.stop(folder, TrainState(None, None, None), "STOP file")
        assert not (tmp_path / "STOP").exists()


def test_a_second_run_cannot_lock_the_folder(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("run_folder.time", SimpleNamespace(sleep=waits.append))
    first, second = (
        SimpleNamespace(path=tmp_path, checkpoints=tmp_path, ddp=Distributed(DDPConfig()))
        for _ in range(2)
    )
    RunFolder._lock(first)
    for path in tmp_path.glob("[!.]*"):  # users may delete logs
        path.unlink()
    with pytest.raises(UserError, match="another process is training in"):
        RunFolder._lock(second)
    assert sum(waits) == pytest.approx(10)
    # The first run ends while the second run waits.
    monkeypatch.setattr("run_folder.time.sleep", lambda seconds: first.ddp.close())
    RunFolder._lock(second)
    second.ddp.close()


# ---- Resuming ------------------------------------------------------------------------------------
def test_restarting_a_finished_run_repeats_its_result_and_more_epochs_extend_it(train, tmp_path):
    first = train(0, "run.name=long").check()
    again = train(0, "run.name=long", "log.every_steps=3", "run.resume=runs/other.pt").check()
    assert again.stdout.splitlines()[-3:] == first.stdout.splitlines()[-3:]
    assert "trained   1 epoch: increase optim.epochs to train further" in again.stdout
    note = "note      runs/long resumes from runs/long/checkpoints/step_00000005.pt"
    assert f"{note}: run.init and run.resume are ignored" in again.stdout
    more = train(0, "run.name=long", "optim.epochs=2", "run.init=runs/other.pt").check()
    assert "run.init and run.resume are ignored" in more.stdout
    twice = train(0, "run.name=long", "optim.epochs=2").check()
    assert "trained   2 epochs: increase optim.epochs" in twice.stdout
    folder = tmp_path / "runs/long"
    assert [row["step"] for row in read_metrics(folder, "train")] == list(range(1, 11))
    assert len(read_metrics(folder, "test")) == 1


@pytest.mark.parametrize("option", ["optim.lr=-1", "model.hidden=16", "run.seed=1"])
def test_a_wrong_option_leaves_the_status_of_a_finished_run(trained, train, tmp_path, option):
    """status.json has the result of the last run that started, and this run does not start."""
    trained()
    folder = tmp_path / "runs/default"
    names = ("status.json", "metrics.jsonl", "config.yaml", "test.tsv", "environment.txt")
    before = [(folder / name).read_text() for name in names]
    again = train(0, option)
    assert again.returncode == 2
    assert again.stderr.count("error: ") == 1
    assert read_status(folder)["state"] == "finished"
    assert [(folder / name).read_text() for name in names] == before


def test_damaged_checkpoints_are_skipped_and_named(train, tmp_path):
    train(0, "checkpoint.every_steps=2", "checkpoint.keep_last=9").check()
    folder = tmp_path / "runs/default"
    fifth, fourth = (folder / f"checkpoints/step_0000000{step}.pt" for step in (5, 4))
    zero_a_block(fifth)
    fourth.write_bytes(fourth.read_bytes()[:1000])
    result = train(0).check()
    assert "resumed at step 2" in result.stdout
    for text in (result.stdout, (folder / "log.rank0.txt").read_text()):
        assert fifth.name in text and fourth.name in text
    assert torch.load(fifth, weights_only=True)["step"] == 5


def test_a_folder_whose_checkpoints_cannot_be_read_is_not_changed(
    trained, train, tmp_path, monkeypatch
):
    """The disk may be the cause, and a run from the start would replace metrics and best.pt."""
    trained("run.name=run")
    folder = tmp_path / "runs/run"
    names = ("metrics.jsonl", "status.json", "test.tsv", "checkpoints/best.pt")
    before = [(folder / name).read_bytes() for name in names]

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("run_checkpoint.torch.load", fail)
    for option in ("run.resume=auto", "run.resume=runs/other.pt", "run.init=runs/other.pt"):
        result = train(0, "run.name=run", option)
        assert result.returncode == 2
        problem = "error: cannot read any of the checkpoints in runs/run/checkpoints: "
        assert result.stderr.startswith(problem) and result.stderr.count("\n") == 1
        assert "step_00000005.pt is not a readable checkpoint (OSError)" in result.stdout
        assert [(folder / name).read_bytes() for name in names] == before
    monkeypatch.undo()
    assert "resumed at step 5" in train(0, "run.name=run").check().stdout


def test_old_checkpoints_are_deleted_without_counting_damaged_ones(train, tmp_path):
    folder = tmp_path / "runs/run/checkpoints"
    options = ["run.name=run", "checkpoint.every_steps=1", "checkpoint.keep_last=2"]
    train(0, *options).check()
    (folder / "step_00000099.pt").write_bytes(b"")
    train(0, *options, "optim.epochs=2").check()
    names = sorted(path.name for path in folder.glob("*.pt"))
    assert names == ["best.pt", "step_00000009.pt", "step_00000010.pt", "step_00000099.pt"]


def test_an_empty_folder_starts_from_a_checkpoint_file(train, tmp_path):
    train(0, "run.name=old", "checkpoint.every_steps=3").check()
    branch = ["run.name=new", "run.resume=runs/old/checkpoints/step_00000003.pt", "optim.epochs=2"]
    train(0, *branch).check()
    steps = [row["step"] for row in read_metrics(tmp_path / "runs/new", "train")]
    assert steps == list(range(4, 11))
    # The folder has checkpoints, so run.resume is ignored.
    assert "resumed at step 10" in train(0, *branch).check().stdout
    train(0, "run.name=end", "run.resume=runs/old/checkpoints/step_00000005.pt").check()
    assert read_metrics(tmp_path / "runs/end", "test") == read_metrics(
        tmp_path / "runs/old", "test"
    )
    result = train(0, "run.name=none", "run.resume=none.pt")
    assert result.returncode == 2
    assert "none.pt is not a readable checkpoint (FileNotFoundError)" in result.stderr
    for option in ("run.resume", "run.init"):
        result = train(0, "run.name=none", f"{option}=runs/old")
        problem = "old is not a readable checkpoint (IsADirectoryError): Is a directory: "
        assert problem in result.stderr


def test_test_results_are_deleted_when_a_finished_run_is_extended(trained, train, tmp_path):
    trained("run.name=run")
    files = [tmp_path / "runs/run" / name for name in ("test.tsv", "test.json")]
    for file in files[1:]:
        file.touch()
    train(0, "run.name=run").check()  # this run has no steps left
    assert all(file.exists() for file in files)
    train(0, "run.name=run", "optim.epochs=2").check()
    assert [file.exists() for file in files] == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.readout=local", "step_00000005.pt does not match the current model: .*run.init="),
        ("data.batch_size=16", "step_00000005.pt was trained with data.batch_size=32, not 16: "),
        ("optim.lr_mult={a: 0.5}", r"was trained with optim.lr_mult=\{\}, not \{'a': 0.5\}: "),
        ("data.split_seed=1", "step_00000005.pt was trained on different data or a different "),
    ],
)
def test_a_checkpoint_of_a_different_run_is_not_resumed(trained, train, tmp_path, change, message):
    trained("run.name=run")
    before = (tmp_path / "runs/run/metrics.jsonl").read_text()
    result = train(0, "run.name=run", change)
    assert result.returncode == 2
    assert re.search(message, result.stderr)
    assert (tmp_path / "runs/run/metrics.jsonl").read_text() == before


def test_an_option_that_a_checkpoint_lacks_had_its_default():
    options = Config(optim=OptimConfig(lr=0.5))
    assert options.changed_options({"optim": {}}, "noted") == {"optim.lr": OptimConfig().lr}


@pytest.mark.slow
def test_best_pt_is_used_if_there_is_no_other_checkpoint(train, tmp_path):
    # With this learning rate, parameters do not change, and the first validation is the best.
    options = ["optim.lr=1e-30", "optim.epochs=2"]
    train(0, *options).check()
    for path in (tmp_path / "runs/default/checkpoints").glob("step_*"):
        path.unlink()
    assert "resumed at step 0" in train(0, *options).check().stdout


def test_best_pt_of_a_different_run_is_replaced(trained, train, tmp_path):
    trained()
    file = tmp_path / "runs/default/checkpoints/best.pt"
    own = torch.load(file, weights_only=True)
    torch.save(own | {"best": own["best"] | {"loss": 0.5}}, file)  # the step is the same
    train(0).check()
    assert torch.load(file, weights_only=True)["best"] == own["best"]
    newest = newest_checkpoint(tmp_path / "runs/default")  # of this run, but of a later step
    file.write_bytes(newest.read_bytes())
    train(0).check()
    assert torch.load(file, weights_only=True)["step"] == own["step"]


# ---- Errors of writing ---------------------------------------------------------------------------
def test_a_checkpoint_with_a_parameter_that_is_not_finite_is_not_saved(train, tmp_path):
    result = train(0, fault="save_an_infinite_weight")
    name = "encoder.embedding"
    assert result.stderr.startswith(f"error: {name} is not finite at step 0, ")
    assert result.stderr.count("\n") == 1
    assert not list((tmp_path / "runs/default/checkpoints").glob("*.pt"))


@pytest.mark.slow
def test_a_run_that_cannot_write_test_predictions_fails_and_can_resume(train, tmp_path):
    folder = tmp_path / "runs/default"
    failed = train(2, fault="fill_disk_in_test")
    assert failed.returncode == 1 and failed.stderr.count("error: ") == 1
    assert failed.stderr.startswith("error: cannot write runs/default/test.tsv: File too large: ")
    status = read_status(folder)
    assert status["state"] == "failed" and "test.tsv: File too large" in status["reason"]
    assert not list(folder.glob("test.tsv*"))
    assert read_metrics(folder, "test") == []
    train(2).check()
    result = (folder / "test.tsv").read_text()
    assert len(read_metrics(folder, "test")) == 1
    # If writing fails again after that, the earlier file is not changed.
    assert train(2, fault="fill_disk_in_test").returncode == 1
    assert [path.read_text() for path in folder.glob("test.tsv*")] == [result]
