"""Four GPUs on a machine without one: fake tensors have a device and a shape, but no values.

Code that would mix devices on a machine with four GPUs raises here, and so does code that would
wait for the GPU (reading a value, a shape that depends on values). Whole commands, with values and
gradients, run in test_fake_gpu.py.
"""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from mask import SharedGraph
from mask_product import CSR
from model import ModelConfig
from model_reach import ReachPlanner
from tests.template.small_model import (
    NUM_FEATURES,
    NUM_NODES,
    SETS,
    graph_of_12_nodes,
    make_batch,
    make_dataset,
)
from tests.tools.models import full_model
from tests.tools.runs import task_of


@pytest.fixture
def shared() -> SharedGraph:
    return graph_of_12_nodes()


class FakeGPUs:
    """Turns tensors and modules on the CPU into fakes on one of four GPUs."""

    def __init__(self):
        self.mode = FakeTensorMode()

    def tensor(self, tensor: Tensor, device: str = "cuda:3") -> Tensor:
        fake = self.mode.from_tensor(tensor.detach())
        with self.mode:
            return fake.to(device)

    def module(self, module: nn.Module) -> nn.Module:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = self.tensor(buffer)
            for name, parameter in part.named_parameters(recurse=False):
                part._parameters[name] = nn.Parameter(self.tensor(parameter), requires_grad=False)
        return module


def product_of_fakes(matrix: CSR, x: Tensor) -> Tensor:
    """Stands in for a sparse product, whose matrix torch does not make without a real GPU."""
    ptr, col, value = matrix
    assert ptr.device == col.device == value.device == x.device
    return x.new_empty(len(ptr) - 1, x.size(1))


@pytest.fixture
def gpus(monkeypatch):
    gpus = FakeGPUs()
    # The method looks for a real GPU, the operator that it calls does not.
    monkeypatch.setattr(Tensor, "contiguous", lambda tensor: torch.ops.aten.contiguous(tensor))
    for module in ("mask_product", "model_reach"):
        monkeypatch.setattr(f"{module}.sparse_product", product_of_fakes)
    with torch.no_grad():
        yield gpus


@pytest.mark.parametrize("route", ["shared", "reach", "expanded"])
@pytest.mark.parametrize("readout", ["both", "local", "global"])
def test_masks_model_and_loss_stay_on_their_gpu_without_syncs(
    gpus,
    shared,
    monkeypatch,
    route,
    readout,
):
    monkeypatch.setattr(SharedGraph, "samples_at_once", lambda graph, states: 2)
    planner = {"shared": ReachPlanner(shared, 1), "reach": ReachPlanner(shared, 2)}.get(route)
    dataset = make_dataset(shared, SETS, planner)
    batch = make_batch(shared, SETS, planner).apply(gpus.tensor)
    graph = gpus.module(shared)
    config = ModelConfig(hidden=8, message_passing=route, readout=readout)
    model = gpus.module(full_model(config, NUM_NODES, 3, NUM_FEATURES)).train()
    with gpus.mode:
        results = [graph.keep(batch), graph.levels(batch), graph.dead_edges(batch)]
        results += [*graph.edge_masks(batch).values(), *graph.expand(batch).values()]
        task = task_of(graph, dataset)
        prediction = model(graph, batch)
        loss = task.loss(prediction, batch)
        results += [prediction, task.to_scores(task.by_score(prediction, batch))]
    assert {result.device for result in (*results, loss)} == {torch.device("cuda:3")}
    assert loss.shape == (1,) and all(result.numel() for result in results if result.size(-1))


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("readout", ["both", "local"])
def test_a_batch_on_another_device_is_refused(gpus, shared, device, readout):
    batch = make_batch(shared, SETS).apply(lambda tensor: gpus.tensor(tensor, device))
    graph = gpus.module(shared)
    model = gpus.module(
        full_model(ModelConfig(hidden=8, readout=readout), NUM_NODES, num_relations=3)
    )
    message = f"the batch is on {device} but the graph is on cuda:3"
    advice = r": call batch = batch.to\('cuda:3'\)"
    calls = [
        graph.check,
        graph.keep,
        graph.levels,
        graph.dead_edges,
        graph.edge_masks,
        graph.expand,
        lambda batch: model(graph, batch),
    ]
    for call in calls:
        with gpus.mode, pytest.raises(RuntimeError, match=message + advice):
            call(batch)


def test_the_fakes_catch_mixed_devices_and_syncs(gpus, shared: SharedGraph):
    graph = gpus.module(shared)
    indices = gpus.tensor(torch.tensor([1, 2]), "cuda:0")
    with gpus.mode:
        with pytest.raises(RuntimeError, match="device"):
            graph.edge_weight.index_select(0, indices)
        with pytest.raises(DataDependentOutputException):
            graph.edge_weight.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            torch.repeat_interleave(graph.edge_counts)
