"""Functions that tests run on every rank: `python -m tests.workers NAME`.

Each rank makes its own assertions.
"""

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

import config
import ddp_setup
import optim
import task
from data import DataConfig, KnockoutDataset, StepSampler
from ddp_setup import DDPConfig, Distributed, setup
from errors import RunError, UserError
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from tests.test_model import NUM_NODES
from tests.tools import preflight
from tests.tools.runs import gather, tables_of
from train import criterion


def start(**options) -> Distributed:
    return setup(Distributed(DDPConfig(**options)))


def build(env: Distributed) -> tuple:
    from torch_geometric.data import HeteroData

    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["gene"].num_nodes = NUM_NODES
    graph["gene", "a", "gene"].edge_index = torch.randint(NUM_NODES, (2, 40), generator=generator)
    shared = SharedGraph(graph).double()
    sets = [
        torch.randperm(NUM_NODES, generator=generator)[: 1 + row % 3].tolist() for row in range(22)
    ]
    dataset = KnockoutDataset(tables_of(sets, torch.randn(22, generator=generator)), shared.degree)
    torch.manual_seed(
        env.rank
    )  # differs between ranks on purpose: DDP must broadcast rank 0's parameters
    model = KnockoutGNN(ModelConfig(hidden=8, dropout=0.0), NUM_NODES, 1).double()
    for parameter in model.parameters():  # parts that are initialised to zero would hide errors
        nn.init.normal_(parameter, std=0.3)
    return shared, dataset, model


def gradients() -> None:
    """A step's gradient is, on every rank, that of the batch on one process, even with padding."""
    env = start()
    for accumulate in (1, 2):
        compare_gradients(env, accumulate)
    env.close()


def compare_gradients(env: Distributed, accumulate: int) -> None:
    graph, dataset, model = build(env)
    ddp_model = env.wrap(model)
    bare = copy.deepcopy(model)  # a backward pass of `model` itself would trigger DDP's hooks
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(parameters, other) for other in gather(parameters, env))
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
                loss = criterion(ddp_model(graph, batch), batch, model) / dataset.num_scores(
                    sampler.rows_in_step(step)
                )
                (loss * env.world_size).backward()
        ours = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert len(exchanges) == len(set(exchanges)) > 0, (
            "a bucket was reduced more than once in a step"
        )
        bare.zero_grad()
        batch = dataset.__getitems__(next(whole))
        (criterion(bare(graph, batch), batch, bare) / len(batch.y)).backward()
        reference = torch.cat([p.grad.flatten() for p in bare.parameters()])
        assert (ours - reference).norm() < 1e-12 * reference.norm()
        assert all(torch.equal(ours, other) for other in gather(ours, env))


def evaluation() -> None:
    """Predictions are those of one process for any number of rows, even if some ranks have none."""
    env = start()
    graph, dataset, model = build(env)
    alone = copy.copy(env)
    alone.rank, alone.world_size, alone.launched = 0, 1, False
    config = config.Config(data=DataConfig(batch_size=6))
    for num_rows in (1, 2, 3, 4, 5, 21, 22):
        rows = torch.arange(num_rows)
        arguments = (env.wrap(model).module, graph, dataset, rows, config)
        ours, reference = task.predict_rows(*arguments, env), task.predict_rows(*arguments, alone)
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
        assert reference[:num_rows].all() and not reference[num_rows:].any()
        assert all(torch.equal(ours, other) for other in gather(ours, env))
    env.close()


def counted_all_reduce(exchanges: list, bucket: GradBucket) -> Future[torch.Tensor]:
    exchanges.append(bucket.index())
    return allreduce_hook(None, bucket)


def agreement() -> None:
    """An error on one rank is raised on all, and a value that differs is named."""
    env = start()
    for error, kind in (
        (ValueError("only rank 1 knows"), UserError),
        (RunError("only rank 1 knows"), RunError),
    ):
        try:
            with env.sync_errors(ValueError):
                if env.rank == 1:
                    raise error
        except UserError as raised:
            assert str(raised) == "only rank 1 knows" and type(raised) is kind
        else:
            raise AssertionError("no error")
    with env.sync_errors(ValueError):
        pass
    env.check_equal({"config": 1})
    try:
        env.check_equal({"config": 1, "data": env.rank // 2})
    except UserError as error:
        assert str(error) == "data differs between ranks: 1 on rank 2, 0 on rank 0"
    else:
        raise AssertionError("no error")
    assert env.broadcast(f"made by {env.rank}") == "made by 0"
    assert env.sum(torch.ones(2)).tolist() == [4.0, 4.0]
    env.close()


def refused(config: DDPConfig, *parts: str) -> None:
    """Asserts that `setup` fails with a message containing all `parts`; leaves a file as proof."""
    try:
        setup(Distributed(config))
    except UserError as error:
        assert all(part in str(error) for part in parts), error
        dist.destroy_process_group()
        Path(f"refused{os.environ['RANK']}").touch()
    else:
        raise AssertionError("no error")


def pretend_gpus(count: int, uuid: str = "") -> None:
    torch.cuda.is_available, dist.is_nccl_available = (
        lambda: True,
        lambda: False,
    )  # NCCL would look for them
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: None


def too_few_gpus() -> None:
    """Rank 1 lists fewer GPUs than its machine has processes: both fail with the same message."""
    pretend_gpus(2)
    chosen = [0] if os.environ["RANK"] == "1" else []
    refused(
        DDPConfig(device_ids=chosen),
        "2 processes on",
        "ddp.device_ids=[0]: set --nproc_per_node to the number of",
    )


def shared_gpu() -> None:
    """A scheduler exposes the same GPU to both processes."""
    pretend_gpus(1, uuid="GPU-0")
    refused(DDPConfig(), " share a GPU: start one process per GPU")


def own_gpu() -> None:
    """A scheduler exposes a different GPU to each process, which is number 0 in both."""
    pretend_gpus(1, uuid=f"GPU-{os.environ['RANK']}")
    env = start()
    assert env.device == torch.device("cuda", 0) and env.local_rank == int(os.environ["RANK"])
    dist.destroy_process_group()


def preflight_of_a_bad_machine(what: str) -> None:
    """Rank 1 is slow or has another torch version, or the sum over ranks is wrong."""
    if what == "slow" and os.environ["RANK"] == "1":
        original = preflight.timeit.repeat

        def slow_once(*_: object, **__: object) -> list[float]:
            preflight.timeit.repeat = original
            return [9.0] * 12

        preflight.timeit.repeat = slow_once
    if what == "torch" and os.environ["RANK"] == "1":
        versions = preflight.library_versions()
        preflight.library_versions = lambda: {**versions, "torch": "1.0"}
    if what == "sum":
        ddp_setup.Distributed.sum = lambda env, values: values
    ddp_setup.run(preflight.preflight, DDPConfig())


def options() -> None:
    """`ddp.options` reach DDP: a tiny bucket_cap_mb gives several buckets."""
    env = start(options={"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True})
    assert exchanged_buckets(env) > 1
    env.close()  # no DDP module may outlive the group


def buffers() -> None:
    """A forward pass broadcasts rank 0's buffers only if some change, as BatchNorm's do."""
    env = start()
    for norm, expected in ((nn.LayerNorm(4), env.rank), (nn.BatchNorm1d(4), 0)):
        module = nn.Sequential(nn.Linear(4, 4), norm)
        module.register_buffer("constant", torch.zeros(()))
        model = env.wrap(module)
        module.constant.fill_(env.rank)
        model(torch.randn(3, 4)).sum().backward()
        assert module.constant.item() == expected
        del model, module  # no DDP module may outlive the group
    env.close()


def exchanged_buckets(env: Distributed) -> int:
    model, seen = env.wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), []
    assert model.gradient_as_bucket_view
    model.register_comm_hook(seen, counted_all_reduce)
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        seen.clear()
        model(torch.ones(1, 8)).sum().backward()
    return len(seen)


def batchnorm() -> None:
    """On two GPUs, running statistics are those of a rank's rows or, with the option, of all."""
    env = start(options={"broadcast_buffers": False})
    assert len(set(batchnorm_means(env, sync_batchnorm=False))) == 2
    assert len(set(batchnorm_means(env, sync_batchnorm=True))) == 1
    env.close()


def batchnorm_means(env: Distributed, sync_batchnorm: bool) -> list[float]:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).to(env.device)
    env.config = DDPConfig(sync_batchnorm=sync_batchnorm, options=env.config.options)
    wrapped = env.wrap(model)
    wrapped(torch.full((4, 1), float(env.rank), device=env.device)).sum().backward()
    return gather(wrapped.module[0].running_mean.item(), env)


def zero() -> None:
    """Each rank holds a shard of the optimiser state; together they hold what one process would."""
    env = start()
    _, _, model = build(env)
    sizes = {}
    for optim in (optim.OptimConfig(), optim.OptimConfig(zero=True)):
        optimizer = optim.build_optimizer(model, optim, env)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        local = optimizer.optim if optim.zero else optimizer
        state = [value for values in local.state.values() for value in values.values()]
        sizes[optim.zero] = gather(sum(value.nbytes for value in state), env)
    assert max(sizes[True]) < 0.7 * sizes[False][0]
    assert sum(sizes[True]) == sizes[False][0]
    env.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
