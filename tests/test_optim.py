"""The optimiser: groups and rates of parameters, and a step that clips, skips and does not wait."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from config import Config
from ddp_setup import DDPConfig, Distributed
from optim import PRECISIONS, OptimConfig, build_optimizer, optimizer_step, schedule
from tests.tools.syncs import CountSynchronisations
from train import Meter


@pytest.mark.parametrize("factors", ["{embeding: 0.1}", "{a: 0, e: 0, o: 0}"])
def test_learning_rates_that_fit_nothing_or_freeze_everything_are_refused(train, factors):
    result = train(2, f"optim.lr_mult={factors}")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert re.search(
        r"error: optim.lr_mult=\{.*\} fits none or freezes all of embedding, identity, ",
        result.stderr,
    )


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_resumed_run_takes_its_rates_from_the_configuration(train, tmp_path, nproc):
    zero = f"optim.zero={nproc > 0}".lower()
    mult = "optim.lr_mult={embedding: 0.5, readout: 0.1, change_readout: 0.2, identity: 0}"
    train(nproc, zero, mult, "optim.weight_decay=0").check()
    train(nproc, zero, mult, "optim.epochs=2", "optim.weight_decay=0.7", "optim.lr=0.02").check()
    state = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    expected = {(rate, decay) for rate in (0.02, 0.002, 0.004) for decay in (0.7, 0.0)}
    expected |= {(0.01, 0.7), (0.0, 0.7)}
    assert {(group["initial_lr"], group["weight_decay"]) for group in groups} == expected
    assert len(groups) == len(expected)
    assert all(group["lr"] < 0.1 * group["initial_lr"] or group["lr"] == 0 for group in groups)
    assert (state["model"]["identity"] == 0).all()
    assert (state["model"]["layers.0.root.weight"] != 0).any()


def test_learning_rate_warms_up_and_decays_to_zero():
    optim = OptimConfig(warmup=0.1)
    rates = [schedule(step, 100, optim) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert schedule(0, 1, optim) == 1.0


# ---- A step --------------------------------------------------------------------------------------
@pytest.fixture
def env() -> Distributed:
    return Distributed(DDPConfig())


def test_a_step_and_its_meter_do_not_wait_for_the_device(env):
    """Counts what would make a GPU's host wait; AdamW without `fused=True` would need one wait."""
    model = torch.nn.Linear(2, 1)
    task = SimpleNamespace(tables=SimpleNamespace(targets=["score"]), config=Config())
    meter = Meter(task, env)
    for fused in (True, False):
        optimizer = build_optimizer(model, OptimConfig(), env)
        if not fused:
            optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        loss = model(torch.ones(1, 2)).sum()
        scaler.scale(loss).backward()
        with CountSynchronisations() as count:
            norm_and_scale = optimizer_step(model, optimizer, scaler, OptimConfig())
            meter.loss += loss.detach()
            meter.count(1, torch.ones(1), norm_and_scale)
        assert (count.seen == []) is fused


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])  # ZeRO steps as an optimiser that is not fused
@pytest.mark.parametrize("size", [1e20, math.inf, math.nan])
def test_a_step_whose_norm_is_not_finite_changes_nothing(env, size, fused, clip):
    """Gradients of 1e20 are finite, but their norm is not in fp32."""
    model = torch.nn.Linear(2, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    optim = OptimConfig(clip=clip)
    optimizer = torch.optim.AdamW(model.parameters())
    if fused:
        optimizer = build_optimizer(model, optim, env)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(size * model(torch.ones(1, 2)).sum()).backward()
    norm, _ = optimizer_step(model, optimizer, scaler, optim)
    assert not norm.isfinite()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_clips_the_unscaled_gradients(scale):
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optim = OptimConfig(clip=0.5, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model(torch.tensor([[3.0, 4.0]]))).sum().backward()
    assert optimizer_step(model, optimizer, scaler, optim).tolist() == pytest.approx([5, scale])
    assert model.weight.flatten().tolist() == pytest.approx([-0.3, -0.4])


def test_the_loss_is_scaled_in_half_precision_alone():
    scales = {name: OptimConfig(precision=name).init_scale for name in PRECISIONS}
    assert scales == {"fp64": 1.0, "fp32": 1.0, "bf16": 1.0, "fp16": 65536.0}
