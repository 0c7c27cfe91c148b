"""What a copy with dense.patch must hold: `python -m pytest tests/recipes/dense.py`."""

import pytest
import torch

from mask import SharedGraph
from tests.test_mask import NUM_NODES, assert_propagates_as_dense_products, graph  # noqa: F401
from tests.tools import gpu


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("density", "names"), [(0.0, ["a", "b"]), (0.2, ["a"])])
@pytest.mark.parametrize(
    ("dtype", "dense", "tolerance"),
    [(torch.float64, torch.float64, 1e-7), (torch.float32, torch.bfloat16, 1e-2)],
)
def test_values_and_gradients(graph, monkeypatch, gated, density, names, dtype, dense, tolerance):  # noqa: F811
    monkeypatch.setattr(SharedGraph, "DENSITY", density)
    shared = SharedGraph(graph).to(dtype)
    assert shared.densify(dense) == names
    assert_propagates_as_dense_products(shared, graph, gated, torch.bfloat16, tolerance)


def test_only_dense_relations_are_multiplied_so_and_only_under_autocast(graph, monkeypatch):  # noqa: F811
    monkeypatch.setattr(SharedGraph, "DENSITY", 0.0)
    shared = SharedGraph(graph)
    x = torch.randn(NUM_NODES, 1, 8)
    exact = shared.propagate(x)
    shared.densify(torch.bfloat16)
    assert torch.equal(shared.propagate(x), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(shared.propagate(x), exact)
    assert {buffer.device.type for buffer in shared.to("meta").buffers()} == {"meta"}
    assert not shared.state_dict()
    monkeypatch.setattr(SharedGraph, "DENSITY", 1.0)
    assert SharedGraph(graph).densify(torch.bfloat16) == []


def test_the_gpu_check_measures_them(capsys):
    report = gpu.Report()
    gpu.products(report, torch.device("cpu"), "small")
    lines = capsys.readouterr().out.splitlines()
    assert report.num_wrong == 0
    assert sum("dense: physical, coexpression" in line for line in lines) == 2
