"""What test_distributed.py runs under torchrun: `python -m tests.workers NAME`. Every rank asserts for itself."""

import copy
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

import ddp_setup
import train
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
    ddp_model = env.wrap(model, DDPConfig())
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


def evaluation() -> None:
    """The metrics of any number of rows are those of one process, also where ranks have no row."""
    env = setup(DDPConfig())
    graph, dataset, model = build(env)
    torch.manual_seed(0)
    nn.init.normal_(model.embedding)
    alone = Distributed(0, 0, 1, 1, env.device, launched=False)
    baseline = torch.linspace(-1, 1, 22, dtype=torch.float64)
    for num_rows in (1, 2, 3, 4, 5, 21, 22):
        rows = torch.arange(num_rows)
        arguments = (env.wrap(model, DDPConfig()).module, graph, dataset, baseline, rows, 6)
        ours, reference = train.evaluate(*arguments, env), train.evaluate(*arguments, alone)
        assert ours["n"] == reference["n"] == num_rows
        for name, value in reference.items():
            same = ours[name] == value if value is None else abs(ours[name] - value) <= 1e-12 * abs(value)
            assert same, (num_rows, name, ours[name], value)
        assert all(other == ours for other in env.gather(ours))
    env.close()


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
    try:
        env.check_ready(nn.Linear(1, 1))
    except SetupError as error:
        assert "torchrun started this process but the model is not under DDP" in str(error)
    else:
        raise AssertionError("no error")
    try:
        env.check_ready(env.wrap(nn.Linear(1, 1), DDPConfig()), nn.Linear(1, 1).to("meta" if env.rank == 3 else "cpu"))
    except SetupError as error:
        assert str(error) == "Linear.weight is on meta: move the module to cpu"
    else:
        raise AssertionError("no error")
    assert env.gather(env.rank) == [0, 1, 2, 3]
    assert env.from_main(lambda: f"made by {env.rank}") == "made by 0"
    assert env.sum(torch.ones(2)).tolist() == [4.0, 4.0]
    env.close()


def refused(config: DDPConfig, *parts: str) -> None:
    """`setup` fails with a sentence that has all `parts`, and the file says so."""
    try:
        setup(config)
    except SetupError as error:
        assert all(part in str(error) for part in parts), error
        dist.destroy_process_group()
        Path(f"refused{os.environ['RANK']}").touch()
    else:
        raise AssertionError("no error")


def pretend_gpus(count: int) -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: None


def too_few_gpus() -> None:
    """One machine of two has a GPU too few: both leave with the same sentence."""
    pretend_gpus(2)
    chosen = (0,) if os.environ["RANK"] == "1" else ()
    refused(DDPConfig(device_ids=chosen), "2 processes but 1 GPUs to use", "set --nproc_per_node to 1 or less")


def shared_gpu() -> None:
    """A scheduler shows one and the same GPU to both processes."""
    pretend_gpus(1)
    ddp_setup.gpu_id = lambda device: f"GPU-{device.index}"
    refused(DDPConfig(), "ranks 0, 1 share one GPU (GPU-0)", "set --nproc_per_node to the number of GPUs")


def own_gpu() -> None:
    """A scheduler shows each process a GPU of its own, which is number 0 to both."""
    pretend_gpus(1)
    ddp_setup.gpu_id = lambda device: f"GPU-{os.environ['RANK']}"
    env = setup(DDPConfig())
    assert env.device == torch.device("cuda", 0) and env.local_rank == int(os.environ["RANK"])
    dist.destroy_process_group()


def preflight_of_a_bad_machine() -> None:
    """Rank 1 is slow, has another torch and adds wrongly, and its clock is off."""
    if os.environ["RANK"] == "1":
        ddp_setup.compute_seconds = lambda device: 9.0
        versions = ddp_setup.library_versions()
        ddp_setup.library_versions = lambda: {**versions, "torch": "1.0"}
        now = time.time
        time.time = lambda: now() + 100
    ddp_setup.Distributed.sum = lambda env, values: values
    ddp_setup.main()


def unsynchronised() -> None:
    """What DDP is for: without it, ranks drift apart."""
    env = setup(DDPConfig())
    model = nn.Linear(2, 1)
    assert not same_gradient(env, model)
    assert same_gradient(env, env.wrap(model, DDPConfig()))
    env.close()


def same_gradient(env: Distributed, model: nn.Module) -> bool:
    model.zero_grad()
    model(torch.full((1, 2), float(env.rank + 1))).sum().backward()
    gradient = next(model.parameters()).grad
    return all(torch.equal(gradient, other) for other in env.gather(gradient))


class Lopsided(nn.Module):
    """Leaves a parameter out, and keeps a buffer."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def options() -> None:
    """Each option of DDP does what it says."""
    env = setup(DDPConfig())
    assert exchanges(env, bucket_cap_mb=25.0) < exchanges(env, bucket_cap_mb=1e-4)
    assert gradient_storages(env, gradient_as_bucket_view=True) == 1 < gradient_storages(env)
    assert same_buffer(env, broadcast_buffers=True)
    assert not same_buffer(env, broadcast_buffers=False)
    assert trains_lopsided(env, find_unused_parameters=True)
    assert trains_lopsided(env, static_graph=True)
    assert not trains_lopsided(env)
    env.close()


length = StepSampler.__len__


def wrapped(env: Distributed, model: nn.Module, **options) -> nn.Module:
    torch.manual_seed(0)
    return env.wrap(model, DDPConfig(**options))


def exchanges(env: Distributed, **options) -> int:
    """All-reduces of the second step; the first one only tells DDP the order of the gradients."""
    model, seen = wrapped(env, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **options), []
    model.register_comm_hook(seen, counted_all_reduce)
    for _ in range(2):
        seen.clear()
        model(torch.ones(1, 8)).sum().backward()
    return len(seen)


def gradient_storages(env: Distributed, **options) -> int:
    model = wrapped(env, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **options)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()})


def same_buffer(env: Distributed, **options) -> bool:
    model = wrapped(env, Lopsided(), find_unused_parameters=True, **options)
    model.module.seen.fill_(env.rank)
    model(torch.ones(1, 2)).sum().backward()
    return len({buffer.item() for buffer in env.gather(model.module.seen)}) == 1


def trains_lopsided(env: Distributed, **options) -> bool:
    model = wrapped(env, Lopsided(), **options)
    try:
        for _ in range(3):
            model.zero_grad()
            if not same_gradient(env, model):
                return False
    except RuntimeError as error:
        assert "did not receive grad" in str(error)
        return False
    return True


def unused() -> None:
    """The whole program names the parameters that would make DDP wait, and the rank with fewer batches."""
    env = setup(DDPConfig())
    if env.rank == 1:
        StepSampler.__len__ = lambda sampler: 3
    try:
        train.train(train.load_config(train.parse_arguments([*sys.argv[2:], "run.name=fewer"])), env)
    except SetupError as error:
        assert str(error) == "rank 1 has another batches an epoch than rank 0: 3 and 2"
    else:
        raise AssertionError("no error")
    StepSampler.__len__ = length
    build = train.build_model

    def build_lopsided(*arguments):
        model = build(*arguments)
        model.spare = nn.Linear(2, 1)
        return model

    train.build_model = build_lopsided
    for find in (False, True):
        options = train.parse_arguments([*sys.argv[2:], f"ddp.find_unused_parameters={find}", f"run.name={find}"])
        try:
            train.train(train.load_config(options), env)
        except SetupError as error:
            assert not find and "does not depend on spare.weight, spare.bias: use or delete" in str(error)
        else:
            assert find
    env.close()


def batchnorm() -> None:
    """On two GPUs: running statistics of a rank's own rows, or with the option those of all."""
    env = setup(DDPConfig())
    assert len(set(batchnorm_means(env, sync_batchnorm=False))) == 2
    assert len(set(batchnorm_means(env, sync_batchnorm=True))) == 1
    env.close()


def batchnorm_means(env: Distributed, sync_batchnorm: bool) -> list[float]:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).to(env.device)
    wrapped = env.wrap(model, DDPConfig(sync_batchnorm=sync_batchnorm, broadcast_buffers=False))
    wrapped(torch.full((4, 1), float(env.rank), device=env.device)).sum().backward()
    return env.gather(wrapped.module[0].running_mean.item())


def skipped_steps() -> None:
    """Under fp16 at a scale over 1 only the rank whose loss is not finite sees more than an overflow."""
    env = setup(DDPConfig())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    skipped = train.SkippedSteps(train.OptimConfig(on_nonfinite="skip", max_skips=2))
    bad, good = torch.tensor(float("nan")), torch.tensor(1.0)
    for step in range(1, 4):  # rank 0 is bad in step 2, rank 1 in step 3
        skipped.judge(bad if step == env.rank + 2 else good, bad if step > 1 else good, scaler)
    assert skipped.too_many(env, 3) == 3
    assert skipped.state_dict() == [2, 2, 3]
    env.close()


def zero() -> None:
    """Each rank holds a part of the optimiser state, and together they hold what one process would."""
    env = setup(DDPConfig())
    _, _, model = build(env)
    sizes = {}
    for optim in (train.OptimConfig(), train.OptimConfig(zero=True)):
        optimizer = train.build_optimizer(model, optim, env)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        local = optimizer.optim if optim.zero else optimizer
        state = [value for values in local.state.values() for value in values.values()]
        sizes[optim.zero] = env.gather(sum(value.nbytes for value in state))
    assert max(sizes[True]) < 0.7 * sizes[False][0]
    assert sum(sizes[True]) == sizes[False][0]
    env.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
