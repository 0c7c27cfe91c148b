"""optim.py and steps: parameter groups, learning rates, clipping, skipped steps and waits."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data

from config import Config
from ddp_setup import DDPConfig, Distributed
from model import ModelConfig
from optim import OptimConfig, build_optimizer, parameter_groups, schedule
from run_checkpoint import TrainState
from tests.syncs import CountSynchronisations
from tests.template.fixtures import ON_ONE_AND_TWO
from tests.template.models import full_model
from train import Meter, StepParts, train_step, update_parameters


@pytest.mark.parametrize(("nproc", "factors"), [(0, "{embeding: 0.1}"), (2, "{a: 0, e: 0, o: 0}")])
def test_lr_mult_that_fits_no_parameter_or_freezes_all_is_refused(train, nproc, factors):
    result = train(nproc, f"optim.lr_mult={factors}")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert re.search(
        r"error: optim.lr_mult=\{.*\} has a key .* encoder.embedding, ",
        result.stderr,
    )


@ON_ONE_AND_TWO
def test_a_resumed_run_uses_the_learning_rates_of_its_configuration(train, tmp_path, nproc):
    zero = f"optim.zero={nproc > 0}".lower()
    mult = "optim.lr_mult={embedding: 0.5, terms: 0.1, knockout: 0.2, identity: 0}"
    train(nproc, zero, mult, "optim.weight_decay=0").check()
    train(nproc, zero, mult, "optim.epochs=2", "optim.weight_decay=0.7", "optim.lr=0.02").check()
    state = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    expected = {(rate, decay) for rate in (0.02, 0.002, 0.004) for decay in (0.7, 0.0)}
    expected |= {(0.01, 0.7), (0.0, 0.7)}
    assert {(group["initial_lr"], group["weight_decay"]) for group in groups} == expected
    assert len(groups) == len(expected)
    assert all(group["lr"] < 0.1 * group["initial_lr"] or group["lr"] == 0 for group in groups)
    assert (state["model"]["encoder.identity"] == 0).all()
    assert (state["model"]["encoder.first.root.weight"] != 0).any()


def test_learning_rate_warms_up_and_decays_to_zero():
    optim = OptimConfig(warmup=0.1)
    rates = [schedule(step, 100, optim) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert schedule(0, 1, optim) == 1.0


def test_biases_norms_and_the_baseline_have_no_weight_decay():
    model = full_model(ModelConfig(hidden=4, layers=1), 5, num_relations=2, num_features=3)
    groups = parameter_groups(model, OptimConfig(weight_decay=0.7))
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    without = {name for name, parameter in model.named_parameters() if decays[id(parameter)] == 0}
    vectors = {name for name, parameter in model.named_parameters() if parameter.dim() == 1}
    baseline = {f"terms.without_graph.readout.{name}" for name in ("effect", "weights")}
    assert without == vectors | baseline
    assert set(decays.values()) == {0.0, 0.7}


# ---- A step --------------------------------------------------------------------------------------
class Summed(torch.nn.Linear):
    """A linear layer with the interface that `train_step` calls."""

    def forward(self, graph: None, batch: Data) -> torch.Tensor:
        return super().forward(batch.x)


def make_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options) -> TrainState:
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", **options))


def one_step(state: TrainState, x: list[float], optim: OptimConfig) -> torch.Tensor:
    """Makes a step whose loss is the model's output for x; returns gradient norm and loss scale."""
    task = SimpleNamespace(
        config=Config(optim=optim),
        graph=None,
        num_targets=1,
        loss=lambda prediction, batch: prediction.sum(dim=0),
    )
    ddp = Distributed(DDPConfig())
    meter = Meter(task, ddp)
    batches = iter([Data(x=torch.tensor([x]))])
    steps = StepParts(state.model, None, update_parameters)
    with CountSynchronisations() as count:
        norm_and_scale = train_step(task, state, steps, batches, 1, meter, ddp)
        meter.count(1, torch.ones(1), norm_and_scale)
    state.waits = count.seen
    return norm_and_scale


def test_a_step_and_its_meter_do_not_wait_for_the_device():
    """Counts the calls that would make the host wait for a GPU.

    An optimiser that is not fused needs one such call.
    """
    model = Summed(2, 1)
    fused = build_optimizer(model, OptimConfig(), Distributed(DDPConfig()))
    for optimizer in (fused, torch.optim.SGD(model.parameters(), lr=0.1)):
        state = make_state(model, optimizer, enabled=False)
        one_step(state, [1.0, 1.0], OptimConfig())
        assert len(state.waits) == (optimizer is not fused)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["fused", "in ZeRO", "not fused"])
@pytest.mark.parametrize("size", [1e20, math.inf, math.nan])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_with_a_non_finite_gradient_norm_changes_no_parameter(size, kind, clip, precision):
    """Gradients of 1e20 are finite in fp32, but their norm is not.

    The optimiser has made a step before, so its moments would change the parameters.
    """
    model = Summed(2, 1)
    optim = OptimConfig(clip=clip, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    if kind != "not fused":
        optimizer = build_optimizer(model, optim, Distributed(DDPConfig()))
    if kind == "in ZeRO":  # ZeRO calls the step of an inner optimiser
        optimizer.optim = build_optimizer(model, optim, Distributed(DDPConfig()))
        optimizer.step = lambda: optimizer.optim.step()
    state = make_state(model, optimizer, enabled=precision == "fp16", init_scale=1.0)
    start = [parameter.clone() for parameter in model.parameters()]
    one_step(state, [1.0, 1.0], optim)
    assert not any(map(torch.equal, model.parameters(), start))
    before = [parameter.clone() for parameter in model.parameters()]
    norm, _ = one_step(state, [size, size], optim)
    assert not norm.isfinite()
    assert all(map(torch.equal, model.parameters(), before))
    one_step(state, [1.0, 1.0], optim)
    assert not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize(("clip", "expected"), [(0.5, [-0.3, -0.4]), (0.0, [-3.0, -4.0])])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_clips_the_unscaled_gradients_unless_clip_is_0(scale, clip, expected):
    model = Summed(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optim = OptimConfig(clip=clip, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = make_state(model, optimizer, init_scale=scale)
    assert one_step(state, [3.0, 4.0], optim).tolist() == pytest.approx([5, scale])
    assert model.weight.flatten().tolist() == pytest.approx(expected)


def test_the_loss_is_only_scaled_with_fp16(train, tmp_path):
    for precision in ("fp32", "bf16", "fp16"):
        name = f"run.name={precision}"
        train(0, name, f"optim.precision={precision}", "optim.on_nonfinite=skip").check()
        path = tmp_path / f"runs/{precision}/checkpoints/best.pt"
        scaler = torch.load(path, weights_only=True)["scaler"]
        assert ("scale" in scaler) is (precision == "fp16")
