"""Checkpoints: their content, and how files are written."""

import errno
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import Config
from ddp_setup import DDPConfig, Distributed
from errors import RunError
from run_checkpoint import (
    Origin,
    TrainState,
    explain_write_errors,
    load_file,
    save_atomically,
    write_atomically,
)
from run_folder import RunConfig, RunFolder
from tests.tools.runs import read_metrics, zero_a_block


# ---- The content of a checkpoint -----------------------------------------------------------------
def test_a_checkpoint_loads_without_pickle_and_contains_the_model_without_ddp(train, tmp_path):
    train(1, "run.name=saved").check()  # one process under torchrun also uses DDP
    state = torch.load(tmp_path / "runs/saved/checkpoints/best.pt", weights_only=True)
    assert "encoder.embedding" in state["model"]
    assert not any(name.startswith("module.") for name in state["model"])
    assert state["step"] == state["best"]["step"]
    assert state["config"]["model"]["hidden"] == 8


# With these options, the second of three epochs is the best.
SECOND_IS_BEST = ["optim.lr=0.1", "optim.epochs=3", "model.dropout=0", "model.pairs=false"]


@pytest.fixture
def best_is_early(train, tmp_path):
    """The checkpoints and the test row of a run whose best step is not its last step."""
    train(0, *SECOND_IS_BEST, "checkpoint.keep_last=9", "run.name=early").check()
    (test,) = read_metrics(tmp_path / "runs/early", "test")
    assert test["best_step"] == 10
    return tmp_path / "runs/early/checkpoints", test


def test_best_pt_contains_the_best_step_and_is_tested(predict, tmp_path, best_is_early):
    folder, test = best_is_early
    predict(0, "runs/early/test.tsv", "runs/early").check()
    lines = (tmp_path / "test.predictions.tsv").read_text().splitlines()[1:]
    tested = (tmp_path / "runs/early/test.tsv").read_text().splitlines()[1:]
    for line, row in zip(lines, tested, strict=True):
        prediction = float(row.split("\t")[4])
        assert float(line.split("\t")[1]) == pytest.approx(prediction, rel=1e-4, abs=1e-4)
    best = torch.load(folder / "best.pt", weights_only=True)
    last = torch.load(folder / "step_00000015.pt", weights_only=True)
    assert best["best"]["step"] == best["step"] == test["best_step"]
    assert best["best_model"] is None  # the model is the best model, and is stored once
    # The files are separate, so that they are not damaged together.
    assert not (folder / "step_00000010.pt").samefile(folder / "best.pt")
    assert_equal(last["best_model"], best["model"])


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_resumed_run_writes_best_pt_if_it_is_missing_or_damaged(train, tmp_path, best_is_early):
    """This also holds if no step after resuming is better."""
    folder, _ = best_is_early
    best = torch.load(folder / "best.pt", weights_only=True)
    resume = "run.resume=runs/early/checkpoints/step_00000015.pt"
    train(0, *SECOND_IS_BEST, resume, "run.name=again").check()
    again = tmp_path / "runs/again/checkpoints/best.pt"
    for damage in (Path.touch, Path.unlink, lambda path: path.write_bytes(b"PK"), zero_a_block):
        damage(again)
        train(0, *SECOND_IS_BEST, "run.name=again").check()
        found = torch.load(again, weights_only=True)
        assert (found["step"], found["epoch"]) == (best["step"], best["epoch"])
        assert found["best_model"] is None
        assert_equal(found["model"], best["model"])


def test_a_run_that_resumes_from_best_pt_tests_its_model(train, tmp_path, best_is_early):
    _, test = best_is_early
    resume = "run.resume=runs/early/checkpoints/best.pt"
    output = train(0, *SECOND_IS_BEST, resume, "run.name=again").check().stdout
    assert f"resumed at step {test['best_step']}" in output
    assert read_metrics(tmp_path / "runs/again", "test") == [test]


@dataclass
class OwnState(TrainState):
    """A state with two additional fields. Only the value of the first has a `state_dict`."""

    averaged: torch.nn.Module | None = None
    num_seen: int = 7


def test_additional_fields_are_restored_or_keep_their_values_for_earlier_files():
    def state_of(averaged: torch.nn.Module) -> OwnState:
        return OwnState(**vars(small_state()), averaged=averaged)

    state = state_of(torch.nn.Linear(3, 2))
    state.num_seen = 99
    meant = {"config": {"optim": {"precision": "fp32"}}, "file": "best.pt"}
    restored = state_of(torch.nn.Linear(3, 2))
    restored.load_state_dict(state.state_dict() | meant, "fp32")
    assert torch.equal(restored.averaged.weight, state.averaged.weight)
    assert restored.num_seen == 99
    averaged = torch.nn.Linear(3, 2)
    weight = averaged.weight.clone()
    later = state_of(averaged)
    later.load_state_dict(small_state().state_dict() | meant, "fp32")
    assert torch.equal(later.averaged.weight, weight)
    assert later.num_seen == 7


def resumed_folder(path: Path) -> RunFolder:
    """Returns the run folder of a run in `path`, after it has resumed a small state."""
    config = replace(Config(), run=RunConfig(dir=str(path)))
    origin = Origin(config=asdict(config), data="a hash")
    folder = RunFolder(config, Distributed(DDPConfig()), origin)
    folder.resume(small_state(), steps_per_epoch=5)
    return folder


def test_best_pt_contains_the_validated_parameters(tmp_path):
    """They can differ from the model's, for example as their average. This survives a resume."""
    state = small_state()
    state.best = {"step": 0}
    state.best_model = {name: value + 1 for name, value in state.model.state_dict().items()}
    folder = resumed_folder(tmp_path)
    folder.save(state, is_best=True)
    folder.ddp.close()
    best_path = folder.checkpoints / "best.pt"
    for is_lost in (False, True):
        if is_lost:
            best_path.unlink()
            resumed_folder(tmp_path).ddp.close()
        best = load_file(best_path)
        of_step = load_file(folder.checkpoints / "step_00000000.pt")
        assert best["best_model"] is None
        assert_equal(of_step["model"], state.model.state_dict())
        assert_equal(of_step["best_model"], state.best_model)
        assert_equal(best["model"], state.best_model)


def small_state() -> TrainState:
    model = torch.nn.Linear(2, 1)
    return TrainState(model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu"))


def test_step_counts_of_a_resumed_optimiser_are_on_the_device_of_its_parameters():
    """ZeRO loads them on the CPU (pytorch #124133), but fused AdamW needs them on the GPU."""
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    nothing = SimpleNamespace(load_state_dict=lambda state: None, state_dict=dict)
    inner = SimpleNamespace(state={parameter: {"step": torch.tensor(3.0)}})
    zero = SimpleNamespace(
        optim=inner, param_groups=[{}], load_state_dict=lambda state: None, state_dict=dict
    )
    saved = TrainState(nothing, zero, nothing).state_dict()
    saved["config"] = {"optim": {"precision": "bf16"}}
    TrainState(nothing, zero, nothing).load_state_dict(saved, "fp32")
    assert inner.state[parameter]["step"].device == parameter.device


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32")])
def test_resuming_with_a_different_precision_resets_the_loss_scale(train, tmp_path, before, after):
    train(0, f"optim.precision={before}").check()
    train(0, f"optim.precision={after}", "optim.epochs=2").check()
    state = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)
    assert (state["scaler"].get("scale", 1) > 1) is (after == "fp16")


def test_a_checkpoint_of_a_different_optimiser_is_not_resumed(train):
    train(0, fault="other_optimiser").check()
    assert "resumed at step 5" in train(0, "optim.epochs=2", fault="other_optimiser").check().stdout
    result = train(0, "optim.epochs=3")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "does not match the current model or optimiser ('step'): to" in result.stderr


def test_a_checkpoint_with_different_parameter_groups_is_not_resumed(trained, train):
    trained()
    result = train(0, "optim.epochs=2", fault="other_groups")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "does not match the current model or optimiser (loaded state" in result.stderr


# ---- Writing -------------------------------------------------------------------------------------
def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "file", ["text"])
    assert list(tmp_path.iterdir()) == []


def test_a_write_error_reports_its_own_reason(tmp_path):
    """mkdir(parents=True) handles a missing folder before it fails without permission."""
    with (
        pytest.raises(RunError, match=r"cannot write .*: Permission denied: "),
        explain_write_errors(tmp_path),
    ):
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file")
        except OSError:
            raise PermissionError(errno.EACCES, "Permission denied")  # noqa: B904


@pytest.mark.parametrize("num_bytes", [0, 700, 30_000])
def test_a_full_disk_is_reported_as_a_write_error(tmp_path, num_bytes):
    """torch.save raises its own errors, which depend on where in the file writing fails."""
    state = {"a": torch.zeros(3000), "b": [1, 2, 3], "c": torch.zeros(5000).double()}
    save_atomically(tmp_path / "whole.pt", state)
    assert (tmp_path / "whole.pt").stat().st_size > 53_000
    path = tmp_path / "cut.pt"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with (
            pytest.raises(RunError, match=r"cannot write .*cut.pt: File too large: "),
            explain_write_errors(path),
        ):
            save_atomically(path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in tmp_path.iterdir()] == ["whole.pt"]


class Unsaveable:
    """An object in a state dict that raises an error when it is saved."""

    def __reduce__(self) -> tuple:
        return torch.ones, (torch.ones(2) @ torch.ones(3),)


def lines_with_a_bug() -> Iterator[str]:
    yield "genes\n"
    yield str(torch.ones(2) @ torch.ones(3))


def test_an_error_in_the_content_is_not_reported_as_a_write_error(tmp_path):
    """For example, shapes in a custom model do not match, which raises `RuntimeError`."""
    for write, content in (
        (save_atomically, {"a": torch.zeros(3), "b": Unsaveable()}),
        (write_atomically, lines_with_a_bug()),
    ):
        with (
            pytest.raises(RuntimeError, match="inconsistent tensor size"),
            explain_write_errors(tmp_path / "file"),
        ):
            write(tmp_path / "file", content)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_that_write_a_text_at_once_do_not_share_a_temporary_file(
    tmp_path, monkeypatch
):
    path = tmp_path / "test.json"

    def lines_of_first():
        yield "first\n"
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)  # another process writes at the same time
            write_atomically(path, ["second\n"])
        assert path.read_text() == "second\n"
        yield "line\n"

    write_atomically(path, lines_of_first())
    assert path.read_text() == "first\nline\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_of_a_killed_save_is_overwritten(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, **options: None)  # a killed process cannot
        patch.setattr(os, "replace", lambda *paths: None)
        save_atomically(tmp_path / "step_00000001.pt", {})
    assert len(list(tmp_path.iterdir())) == 1
    save_atomically(tmp_path / "step_00000002.pt", {})
    assert list(tmp_path.iterdir()) == [tmp_path / "step_00000002.pt"]


def test_best_pt_is_not_written_again_if_a_metric_is_undefined(tmp_path):
    state = small_state()
    state.best = {"step": 0, "pearson": math.nan}
    state.best_model = state.model.state_dict()
    folder = resumed_folder(tmp_path)
    folder.save(state, is_best=True)
    folder.ddp.close()
    written = (folder.checkpoints / "best.pt").stat().st_ino
    resumed_folder(tmp_path).ddp.close()
    assert (folder.checkpoints / "best.pt").stat().st_ino == written
