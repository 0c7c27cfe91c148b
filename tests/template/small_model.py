"""A small graph, batches of its samples and a model, which several test modules use."""

import torch
from torch_geometric.data import Data

from data import KnockoutDataset
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from model_reach_plan import ReachPlanner
from tests.sets import tables_of
from tests.template.models import full_model
from tests.template.tasks import small_graph

NUM_NODES = 12
NUM_FEATURES = 3
SETS = [[0, 3], [], [5], [8, 1], [2, 0, 7, 1, 11]]  # perturbed nodes; node 10 has no edges
TARGETS = [5, 0, 10, 8, 2, 6]  # nodes of the scores, for the readout `nodes`


def graph_of_12_nodes() -> SharedGraph:
    """Returns a graph with node features and three relations. Edges of relation b have weights."""
    generator = torch.Generator().manual_seed(0)
    graph = small_graph(generator)
    graph["gene"].x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator)
    graph["gene", "b", "gene"].edge_weight = torch.rand(25, generator=generator) + 0.1
    return SharedGraph(graph)


def make_dataset(
    shared: SharedGraph, sets: list[list[int]], planner: ReachPlanner | None = None
) -> KnockoutDataset:
    tables = tables_of(sets, torch.arange(len(sets)) / 3)
    return KnockoutDataset(tables, shared.degree, planner, out_degree=shared.out_degree)


def make_batch(
    shared: SharedGraph, sets: list[list[int]], planner: ReachPlanner | None = None
) -> Data:
    batch = make_dataset(shared, sets, planner).__getitems__(range(len(sets)))
    batch.seed = torch.tensor(0)
    return batch


def make_model(dtype: torch.dtype = torch.float32, **options) -> KnockoutGNN:
    torch.manual_seed(0)
    config = ModelConfig(**{"hidden": 8, "layers": 2, "dropout": 0.0, **options})
    model = full_model(
        config,
        NUM_NODES,
        num_relations=3,
        num_features=NUM_FEATURES,
        num_targets=len(TARGETS) if config.readout == "nodes" else 1,
        target_nodes=torch.tensor(TARGETS),
    ).to(dtype)
    for parameter in model.parameters():  # parameters that start at zero would hide errors
        torch.nn.init.normal_(parameter, std=0.3)
    if "without_graph" in model.terms:
        torch.nn.init.normal_(model.terms["without_graph"].readout.intercept)
    return model


def outputs_and_gradients(
    model: KnockoutGNN, shared: SharedGraph, batch: Data
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predictions [B, T * C], and the gradient of all parameters as one vector."""
    prediction = model(shared, batch)
    (prediction - batch.y.to(prediction.dtype)).square().sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return prediction.detach(), torch.cat([parameter.grad.flatten() for parameter in trained])
