"""Tests that need a GPU: `./launch.sh test -m gpu`; otherwise GPUs are hidden from the tests."""

import copy

import pytest
import torch

from ddp_setup import DDPConfig, Distributed
from optim import OptimConfig, build_optimizer, optimizer_step
from tests.test_model import (
    SETS,
    make_batch,
    make_dataset,
    make_model,
    outputs_and_gradients,
    shared,  # noqa: F401
)
from tests.tools.gpu import same_draws
from tests.tools.runs import task_of
from train import Meter, autocast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or hidden: run with -m gpu"),
]


@pytest.mark.parametrize("readout", ["both", "local"])
def test_the_gpu_agrees_with_the_cpu(shared, readout):  # noqa: F811
    results = []
    for device in ("cpu", "cuda"):
        graph = shared.to(device, torch.float64)
        batch = make_batch(shared, SETS).to(device)
        model = make_model(torch.float64, readout=readout).to(device)
        results.append(outputs_and_gradients(model, graph, batch))
    for ours, reference in zip(results[1], results[0], strict=True):
        assert (ours.cpu() - reference).norm() <= 1e-10 * reference.norm()


def test_random_numbers_have_the_bits_of_the_cpus():
    assert same_draws(torch.device("cuda"))[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_training_steps_never_wait_for_the_gpu(shared, precision):  # noqa: F811
    optim = OptimConfig(precision=precision)
    graph = shared.to("cuda")
    task = task_of(graph, make_dataset(shared, SETS))
    model = make_model(dropout=0.1).to("cuda").train()
    env = Distributed(DDPConfig())
    env.device = torch.device("cuda", 0)
    optimizer = build_optimizer(model, optim, env)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    meter = Meter(env, optim)
    batch = make_batch(shared, SETS).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            # `Data.to` moves a batch in place.
            on_gpu = copy.copy(batch).to("cuda", non_blocking=True)
            with autocast(optim, env):
                prediction = model(graph, on_gpu)
            loss = task.loss(prediction, on_gpu)
            scaler.scale(loss).backward()
            norm_and_scale = optimizer_step(model, optimizer, scaler, optim)
            meter.loss += loss.detach()
            meter.count(len(batch.y), len(batch.y), norm_and_scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_sync_batchnorm_shares_the_statistics(torchrun):
    torchrun(2, "-m", "tests.workers", "batchnorm").check()
