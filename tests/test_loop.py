"""Parts of the training loop: the meter, the optimiser step, and what is written."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

from checkpoint import TrainState, explain_write_errors, write_atomically
from ddp_setup import DDPConfig, Distributed
from errors import RunError
from optim import OptimConfig, build_optimizer, optimizer_step
from plots import curves_svg
from run_folder import RunFolder
from tests.tools.syncs import CountSynchronisations
from train import MAX_SKIPS, Meter


@pytest.fixture
def meter() -> Meter:
    return Meter(Distributed(DDPConfig()), OptimConfig(on_nonfinite="skip"))


def test_skipped_steps_are_counted_but_fp16_overflows_are_not(meter):
    good, bad = 1.0, math.nan
    state = TrainState(None, None, None)

    def take(*norms: float, scale: float = 1.0) -> dict:
        for norm in norms:
            state.step += 1
            meter.count(1, 1, torch.tensor([norm, scale]))
        return meter.read(state)

    assert take(good, bad, scale=2.0)["skipped"] == 0  # an overflow at a scale of 2
    assert take(bad, good, *[bad] * (MAX_SKIPS - 1))["skipped"] == MAX_SKIPS
    with pytest.raises(
        RunError, match=f"step {state.step + 1} is not finite, {MAX_SKIPS} in a row"
    ):
        take(bad)


def test_a_row_has_the_mean_loss_and_times_since_the_previous_row(meter, monkeypatch):
    state = TrainState(None, None, None)
    for total, num_samples in ((3.0, 2), (1.0, 2), (2.0, 1)):
        meter.loss += total
        meter.count(num_samples, num_samples, torch.ones(2))
    meter.env.seconds["data"] = 1.5
    monkeypatch.setattr("train.time", SimpleNamespace(perf_counter=lambda: meter.start + 4.5))
    row = meter.read(state)
    assert row["loss"] == pytest.approx(6.0 / 5)
    times = {name: row[name] for name in ("samples_per_s", "data_ms", "step_ms")}
    assert times == pytest.approx({"samples_per_s": 1.1, "data_ms": 500.0, "step_ms": 1500.0})


def test_a_step_and_its_meter_do_not_wait_for_the_device(meter):
    """Counts what would make a GPU's host wait; AdamW without `fused=True` would need one wait."""
    model = torch.nn.Linear(2, 1)
    for fused in (True, False):
        optimizer = build_optimizer(model, OptimConfig(), meter.env)
        if not fused:
            optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        loss = model(torch.ones(1, 2)).sum()
        scaler.scale(loss).backward()
        with CountSynchronisations() as count:
            norm_and_scale = optimizer_step(model, optimizer, scaler, OptimConfig())
            meter.loss += loss.detach()
            meter.count(1, 1, norm_and_scale)
        assert (count.seen == []) is fused


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])  # ZeRO steps as an optimiser that is not fused
@pytest.mark.parametrize("size", [1e20, math.inf, math.nan])
def test_a_step_whose_norm_is_not_finite_changes_nothing(meter, size, fused, clip):
    """Gradients of 1e20 are finite, but their norm is not in fp32."""
    model = torch.nn.Linear(2, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    optim = OptimConfig(clip=clip)
    optimizer = (
        build_optimizer(model, optim, meter.env) if fused else torch.optim.AdamW(model.parameters())
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(size * model(torch.ones(1, 2)).sum()).backward()
    norm, _ = optimizer_step(model, optimizer, scaler, optim)
    assert not norm.isfinite()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_clips_the_unscaled_gradients(meter, scale):
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optim = OptimConfig(clip=0.5, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model(torch.tensor([[3.0, 4.0]]))).sum().backward()
    assert optimizer_step(model, optimizer, scaler, optim).tolist() == pytest.approx([5, scale])
    assert model.weight.flatten().tolist() == pytest.approx([-0.3, -0.4])


def test_rows_of_the_users_own_kinds_are_kept_up_to_the_step_of_the_checkpoint(tmp_path):
    rows = [{"kind": kind, "step": step} for step in (3, 4, 5) for kind in ("train", "probe")]
    rows.insert(0, {"kind": "probe", "x": 1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = SimpleNamespace(path=tmp_path, rows=[])
    RunFolder._open_metrics(folder, TrainState(None, None, None, step=4))
    folder.metrics.close()
    assert folder.rows == rows[:5] and curves_svg(rows)


def test_each_rank_removes_the_stop_file_unless_another_one_has(tmp_path):
    (tmp_path / "STOP").touch()
    folder = SimpleNamespace(path=tmp_path, event=lambda *values: None)
    for _ in range(2):
        RunFolder.stop(folder, TrainState(None, None, None), "STOP file")
        assert not (tmp_path / "STOP").exists()


def test_a_second_run_does_not_get_the_lock_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("train.time", SimpleNamespace(sleep=lambda seconds: None))
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert RunFolder._acquire_lock(SimpleNamespace(lock=first))
        assert not RunFolder._acquire_lock(SimpleNamespace(lock=second))


def test_a_resumed_optimiser_has_its_step_counts_beside_its_parameters():
    """ZeRO loads them on the CPU (pytorch #124133), where fused AdamW of a GPU refuses them."""
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    nothing = SimpleNamespace(load_state_dict=lambda state: None)
    inner = SimpleNamespace(state={parameter: {"step": torch.tensor(3.0)}})
    zero = SimpleNamespace(optim=inner, param_groups=[{}], load_state_dict=lambda state: None)
    checkpoint = TrainState(None, None, None).state_dict() | {
        "config": {"optim": {"precision": "bf16"}}
    }
    TrainState(nothing, zero, nothing).load_state_dict(checkpoint, OptimConfig())
    assert inner.state[parameter]["step"].device == parameter.device


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "file", ["text"])
    assert list(tmp_path.iterdir()) == []


def test_the_reason_of_a_write_error_is_its_own(tmp_path):
    """mkdir(parents=True) meets a missing folder before the one it may not write.

    torch.save wraps errors.
    """
    for outer, inner in (
        (PermissionError(13, "Permission denied"), OSError(2, "No such file")),
        (RuntimeError("wrap"), OSError(28, "Permission denied")),
    ):
        with (
            pytest.raises(RunError, match=r"cannot write .*: Permission denied; "),
            explain_write_errors(tmp_path),
        ):
            try:
                raise inner
            except OSError:
                raise outer  # noqa: B904
