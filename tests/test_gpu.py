"""Tests that need a GPU: `./launch.sh test -m gpu`; otherwise GPUs are hidden from the tests."""

import copy

import pytest
import torch

from ddp_setup import DDPConfig, Distributed
from optim import OptimConfig, build_optimizer, optimizer_step
from tests.test_model import SETS, make_batch, make_model, outputs_and_gradients, shared  # noqa: F401
from tests.tools.gpu import same_draws
from train import Meter, criterion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or hidden: run with -m gpu"),
]


@pytest.mark.parametrize("readout", ["both", "local"])
def test_the_gpu_agrees_with_the_cpu(shared, readout):  # noqa: F811
    results = []
    for device in ("cpu", "cuda"):
        graph, batch = shared.to(device, torch.float64), make_batch(shared, SETS).to(device)
        results.append(
            outputs_and_gradients(
                make_model(torch.float64, readout=readout).to(device), graph, batch
            )
        )
    for ours, reference in zip(results[1], results[0], strict=True):
        assert (ours.cpu() - reference).norm() <= 1e-10 * reference.norm()


def test_random_numbers_have_the_bits_of_the_cpus():
    assert same_draws(torch.device("cuda"))[0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ten_training_steps_never_wait_for_the_gpu(shared, dtype):  # noqa: F811
    graph = shared.to("cuda")
    model = make_model(dropout=0.1).to("cuda").train()
    env = Distributed(DDPConfig())
    env.device = torch.device("cuda", 0)
    optimizer = build_optimizer(model, OptimConfig(), env)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    meter = Meter(env, OptimConfig())
    batch = make_batch(shared, SETS).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            on_gpu = copy.copy(batch).to(
                "cuda", non_blocking=True
            )  # Data.to moves the batch in place
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                prediction = model(graph, on_gpu)
            loss = criterion(prediction, on_gpu, model)
            scaler.scale(loss).backward()
            norm_and_scale = optimizer_step(model, optimizer, scaler, OptimConfig())
            meter.loss += loss.detach()
            meter.count(len(batch.y), len(batch.y), norm_and_scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_sync_batchnorm_shares_the_statistics(torchrun):
    torchrun(2, "-m", "tests.workers", "batchnorm").check()
