"""What test_distributed.py runs under torchrun: `python -m tests.workers NAME`. Every rank asserts for itself."""

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from data import KnockoutDataset, StepSampler, pack
from ddp_setup import DDPConfig, Distributed, SetupError, setup
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from tests.test_model import NUM_NODES
from train import squared_error


def build(env: Distributed) -> tuple:
    from torch_geometric.data import HeteroData

    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["gene"].num_nodes = NUM_NODES
    graph["gene", "a", "gene"].edge_index = torch.randint(NUM_NODES, (2, 40), generator=generator)
    shared = SharedGraph(graph).double()
    sets = [torch.randperm(NUM_NODES, generator=generator)[: 1 + row % 3].tolist() for row in range(22)]
    dataset = KnockoutDataset(*pack(sets), torch.randn(22, generator=generator), shared.degree)
    torch.manual_seed(env.rank)  # on purpose: DDP must make them equal
    model = KnockoutGNN(ModelConfig(hidden=8, dropout=0.0), NUM_NODES, 1).double()
    return shared, dataset, model


def gradients() -> None:
    """A step's gradient is that of the whole batch on one process, on every rank, padding included."""
    env = setup(DDPConfig())
    for accumulate in (1, 2):
        compare_gradients(env, accumulate)
    env.close()


def compare_gradients(env: Distributed, accumulate: int) -> None:
    graph, dataset, model = build(env)
    ddp_model = env.wrap(model)
    bare = copy.deepcopy(model)  # a backward pass of `model` itself would set off DDP's hooks
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(parameters, other) for other in env.gather(parameters))
    exchanges = []
    ddp_model.register_comm_hook(exchanges, counted_all_reduce)
    rows = torch.arange(22)
    sampler = StepSampler(rows, 8, accumulate, env.world_size, env.rank, seed=0)
    batches = iter(sampler)
    whole = iter(StepSampler(rows, 8, 1, 1, 0, seed=0))
    for step in range(3):  # the last one has 6 rows
        model.zero_grad()
        exchanges.clear()
        for micro in range(accumulate):
            batch = dataset.__getitems__(next(batches))
            with env.accumulating(ddp_model, last=micro == accumulate - 1):
                loss = squared_error(ddp_model(graph, batch), batch, model) / sampler.samples_in_step(step)
                (loss * env.world_size).backward()
        ours = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert len(exchanges) == len(set(exchanges)) > 0, "a bucket was reduced more than once in a step"
        bare.zero_grad()
        batch = dataset.__getitems__(next(whole))
        (squared_error(bare(graph, batch), batch, bare) / len(batch.y)).backward()
        reference = torch.cat([p.grad.flatten() for p in bare.parameters()])
        assert (ours - reference).norm() < 1e-12 * reference.norm()
        assert all(torch.equal(ours, other) for other in env.gather(ours))


def counted_all_reduce(exchanges: list, bucket: GradBucket) -> Future[torch.Tensor]:
    exchanges.append(bucket.index())
    return allreduce_hook(None, bucket)


def threads() -> None:
    env = setup(DDPConfig())
    reports = env.gather({"rank": env.rank, "threads": torch.get_num_threads(), "world_size": env.world_size})
    if env.is_main:
        print(*map(json.dumps, reports), sep="\n", flush=True)
    env.close()


def agreement() -> None:
    """An error on one rank is the same error on all; a value that differs is named."""
    env = setup(DDPConfig())
    try:
        with env.together(ValueError):
            if env.rank == 1:
                raise ValueError("only rank 1 knows")
    except SetupError as error:
        assert str(error) == "only rank 1 knows"
    else:
        raise AssertionError("no error")
    with env.together(ValueError):
        pass
    env.check_equal({"config": 1})
    try:
        env.check_equal({"config": 1, "data": env.rank // 2})
    except SetupError as error:
        assert str(error) == "rank 2 has another data than rank 0: 1 and 0"
    else:
        raise AssertionError("no error")
    assert env.gather(env.rank) == [0, 1, 2, 3]
    assert env.from_main(lambda: f"made by {env.rank}") == "made by 0"
    assert env.sum(torch.ones(2)).tolist() == [4.0, 4.0]
    env.close()


def too_few_gpus() -> None:
    """One machine of two has a GPU too few: both leave with the same sentence."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1 if os.environ["RANK"] == "1" else 2
    torch.cuda.set_device = lambda device: None
    try:
        setup(DDPConfig())
    except SetupError as error:
        assert "2 processes but 1 GPUs to use" in str(error) and "set --nproc_per_node to 1 or less" in str(error)
        dist.destroy_process_group()
        Path(f"refused{os.environ['RANK']}").touch()
    else:
        raise AssertionError("no error")


def unsynchronised() -> None:
    """What DDP is for: without it, ranks drift apart."""
    env = setup(DDPConfig())
    model = nn.Linear(2, 1)
    assert not same_gradient(env, model)
    assert same_gradient(env, env.wrap(model))
    env.close()


def same_gradient(env: Distributed, model: nn.Module) -> bool:
    model.zero_grad()
    model(torch.full((1, 2), float(env.rank + 1))).sum().backward()
    gradient = next(model.parameters()).grad
    return all(torch.equal(gradient, other) for other in env.gather(gradient))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
