"""Tests that need a GPU: `./launch.sh test -m gpu`; otherwise GPUs are hidden from the tests."""

import pytest
import torch

from mask import SharedGraph
from tests.template.small_model import (
    SETS,
    graph_of_12_nodes,
    make_batch,
    make_model,
    outputs_and_gradients,
)
from tests.tools.gpu_checks import same_draws, ten_steps


@pytest.fixture
def shared() -> SharedGraph:
    return graph_of_12_nodes()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or hidden: run with -m gpu"),
]


@pytest.mark.parametrize("readout", ["both", "local"])
def test_the_gpu_agrees_with_the_cpu(shared, readout):
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
def test_ten_training_steps_never_wait_for_the_gpu(tmp_path, precision):
    device = torch.device("cuda", 0)
    is_right, figure = ten_steps(device, precision, False, "shared", tmp_path)
    assert is_right, figure


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_sync_batchnorm_shares_the_statistics(torchrun):
    torchrun(2, "-m", "tests.template.workers", "batchnorm").check()
