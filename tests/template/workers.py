"""Functions that tests run on every rank: `python -m tests.template.workers NAME`.

Each rank makes its own assertions. Functions with the argument `ddp` do not change its process
group. `python -m tests.template.workers in_one_group NAME ...` calls several of them in turn.
"""

import copy
import os
import sys
import timeit
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData

import ddp_ends
import ddp_machines
import ddp_setup
import train
from config import Config
from data import DataConfig, KnockoutDataset, weight_scale
from data_loader import StepSampler
from ddp_setup import DDPConfig, Distributed, setup
from errors import DataError, RunError, UserError
from evaluate import predict_rows
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from optim import OptimConfig, build_optimizer
from run_checkpoint import TrainState
from task import KnockoutTask
from tests.sets import tables_of
from tests.template.models import full_model
from tests.template.tasks import task_of

NUM_NODES = 12
NUM_ROWS = 22


def start(**options) -> Distributed:
    return setup(Distributed(DDPConfig(**options)))


def in_one_group(*names: str) -> None:
    """Calls functions of this module in turn, and creates a file after each success."""
    ddp = start()
    for name in names:
        globals()[name](ddp)
        Path(f"{name}{ddp.rank}").touch()
    ddp.close()


def wrap(model: nn.Module, ddp: Distributed) -> DistributedDataParallel:
    """Returns the model as train.py wraps it."""
    model = ddp.prepare_for_ddp(model)
    return DistributedDataParallel(model, device_ids=ddp.device_ids, **ddp.config.options)


def build(ddp: Distributed) -> tuple[KnockoutTask, KnockoutGNN]:
    """Returns a task of 22 rows, and a model whose parameters differ between ranks."""
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["gene"].num_nodes = NUM_NODES
    graph["gene", "a", "gene"].edge_index = torch.randint(NUM_NODES, (2, 40), generator=generator)
    shared = SharedGraph(graph).double()
    sets = []
    for row in range(NUM_ROWS):
        nodes = torch.randperm(NUM_NODES, generator=generator)
        sets.append(nodes[: 1 + row % 3].tolist())
    scores = torch.randn(NUM_ROWS, generator=generator)
    dataset = KnockoutDataset(tables_of(sets, scores), shared.degree)
    torch.manual_seed(ddp.rank)  # DDP must broadcast the parameters of rank 0
    model = full_model(ModelConfig(hidden=8, dropout=0.0), NUM_NODES, 1).double()
    for parameter in model.parameters():  # parameters that are zero initially would hide errors
        nn.init.normal_(parameter, std=0.3)
    return task_of(shared, dataset, Config(data=DataConfig(batch_size=6))), model


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def is_equal_on_all_ranks(tensor: Tensor, ddp: Distributed) -> bool:
    return all(torch.equal(tensor, other) for other in ddp.gather(tensor))


def gradients(ddp: Distributed) -> None:
    """On every rank, a step has the gradient of one process, even if batches are padded."""
    for accumulate in (1, 2):
        compare_gradients(ddp, accumulate)


class GradientKeeper:
    """Replaces an optimiser. It stores the gradients of a step as one vector."""

    def __init__(self, model: nn.Module):
        self.model = model

    def step(self) -> None:
        self.gradients = flat_gradients(self.model)

    def zero_grad(self) -> None:
        self.model.zero_grad()


def compare_gradients(ddp: Distributed, accumulate: int) -> None:
    task, model = build(ddp)
    task = replace(task, config=Config(optim=OptimConfig(accumulate=accumulate, clip=0)))
    ddp_model = wrap(model, ddp)
    bare = copy.deepcopy(model)  # a backward pass of `model` itself would trigger DDP's hooks
    assert is_equal_on_all_ranks(flat_parameters(model), ddp)
    exchanges = []
    ddp_model.register_comm_hook(exchanges, counted_all_reduce)
    state = TrainState(model, GradientKeeper(model), torch.amp.GradScaler("cpu", enabled=False))
    steps = train.StepParts(ddp_model, task.dataset, train.update_parameters)
    meter = train.Meter(task, ddp)
    rows = torch.arange(NUM_ROWS)
    sampler = StepSampler(rows, 8, accumulate, ddp.world_size, ddp.rank, seed=0)
    batches = map(task.dataset.__getitems__, sampler)
    whole_batches = iter(StepSampler(rows, 8, 1, 1, 0, seed=0))
    for step in range(3):  # the last one has 6 rows
        model.zero_grad()
        exchanges.clear()
        num_rows = len(sampler.rows_in_step(step))
        train.train_step(task, state, steps, batches, num_rows, meter, ddp)
        gradients = state.optimizer.gradients
        assert len(exchanges) == len(set(exchanges)) > 0, "a bucket was reduced twice in a step"
        bare.zero_grad()
        batch = task.dataset.__getitems__(next(whole_batches))
        loss_of_score = task.loss(bare(task.graph, batch), batch) / len(batch.y)
        loss_of_score.mean().backward()
        expected = flat_gradients(bare)
        assert (gradients - expected).norm() < 1e-12 * expected.norm()
        assert is_equal_on_all_ranks(gradients, ddp)


def gradient_of_an_epoch(ddp: Distributed) -> None:
    """The gradients of an epoch's steps add up to the gradient of the reported loss.

    The gradient of each step is multiplied by its number of rows. Many scores are missing, and the
    weights of rows are larger if the second of two scores is missing.
    """
    task, _ = build(ddp)
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(NUM_ROWS, 2, generator=generator).double()
    y[torch.rand(NUM_ROWS, generator=generator) < 0.7, 1] = float("nan")
    y[:2] = float("nan")
    weight = 0.1 + torch.rand(NUM_ROWS, generator=generator).double() + 9 * y[:, 1].isnan()
    split = torch.zeros(NUM_ROWS, dtype=torch.int8)
    targets = ["a", "b"]
    tables = replace(task.tables, y=y, weight=weight, split=split, targets=targets)
    dataset = KnockoutDataset(tables, task.graph.degree, scale=weight_scale(tables))
    optim = OptimConfig(accumulate=2, clip=0)
    task = replace(task, tables=tables, dataset=dataset, config=Config(optim=optim))
    torch.manual_seed(ddp.rank)
    model = full_model(ModelConfig(hidden=8, dropout=0.0), NUM_NODES, 1, num_targets=2).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ddp_model = wrap(model, ddp)
    bare = copy.deepcopy(model)
    state = TrainState(model, GradientKeeper(model), torch.amp.GradScaler("cpu", enabled=False))
    steps = train.StepParts(ddp_model, task.dataset, train.update_parameters)
    meter = train.Meter(task, ddp)
    sampler = StepSampler(torch.arange(NUM_ROWS), 8, 2, ddp.world_size, ddp.rank, seed=0)
    batches = map(task.dataset.__getitems__, sampler)
    total = 0.0
    for step in range(sampler.steps_per_epoch):
        model.zero_grad()
        num_rows = len(sampler.rows_in_step(step))
        train.train_step(task, state, steps, batches, num_rows, meter, ddp)
        total += num_rows * state.optimizer.gradients

    prediction = bare(task.graph, dataset.__getitems__(range(NUM_ROWS)))
    means = []
    for t in range(2):
        has_score = ~y[:, t].isnan()
        error = (prediction[has_score, t] - y[has_score, t]).square()
        means.append((weight[has_score] * error).sum() / weight[has_score].sum())
    (sum(means) / 2).backward()
    expected = flat_gradients(bare)
    assert (total / NUM_ROWS - expected).norm() < 1e-6 * expected.norm()  # weights are float32
    assert is_equal_on_all_ranks(total, ddp)


def evaluation(ddp: Distributed) -> None:
    """Predictions are the same as on one process, even if some ranks do not have rows."""
    task, model = build(ddp)
    wrap(model, ddp)  # broadcasts the parameters
    alone = copy.copy(ddp)
    alone.rank = 0
    alone.world_size = 1
    alone.is_distributed = False
    for num_rows in (1, 2, 3, 4, 5, 21, 22):
        rows = torch.arange(num_rows)
        predictions = predict_rows(model, task, rows, ddp)
        expected = predict_rows(model, task, rows, alone)
        assert expected.shape == (num_rows, 1, 1) and expected.all()
        torch.testing.assert_close(predictions, expected, rtol=1e-12, atol=0)
        assert is_equal_on_all_ranks(predictions, ddp)


def counted_all_reduce(exchanges: list, bucket: GradBucket) -> Future[Tensor]:
    exchanges.append(bucket.index())
    return allreduce_hook(None, bucket)


def agreement(ddp: Distributed) -> None:
    """An error on some ranks is raised on all ranks, and an error lists the value that differs."""
    for kind in (UserError, DataError, RunError):
        try:
            with ddp.sync_errors():
                if ddp.rank in (1, 3):
                    raise kind(f"only rank {ddp.rank} knows")
        except UserError as raised:
            assert str(raised) == "only rank 1 knows" and type(raised) is kind
        else:
            raise AssertionError("no error")
    with ddp.sync_errors():
        pass
    loaded_by_rank_0 = {"cache.py": "a hash"} if ddp.rank == 0 else {}
    ddp.check_equal({"config": 1, **loaded_by_rank_0})
    loaded_by_others = {"edited.py": ddp.rank} if ddp.rank in (1, 3) else {}
    others_than_first = [
        ({"data": ddp.rank // 2}, "data differs between ranks: 1 on rank 2, 0 on rank 0"),
        (loaded_by_others, "edited.py differs between ranks: 3 on rank 3, 1 on rank 1"),
    ]
    for values, message in others_than_first:
        try:
            ddp.check_equal({"config": 1, **values})
        except UserError as error:
            assert str(error).startswith(f"{message}: ")
        else:
            raise AssertionError("no error")
    assert ddp.broadcast(f"made by {ddp.rank}") == "made by 0"
    assert ddp.sum(torch.ones(2)).tolist() == [4.0, 4.0]
    assert ddp.gather(f"made by {ddp.rank}") == [f"made by {rank}" for rank in range(4)]


def refused(config: DDPConfig, *expected: str) -> None:
    """Asserts that `setup` fails with a message that contains all texts, and creates a file."""
    try:
        setup(Distributed(config))
    except UserError as error:
        assert all(text in str(error) for text in expected), error
        dist.destroy_process_group()
        Path(f"refused{os.environ['RANK']}").touch()
    else:
        raise AssertionError("no error")


def simulate_gpus(count: int, uuid: str = "") -> None:
    torch.cuda.is_available = lambda: True
    dist.is_nccl_available = lambda: False  # NCCL would look for real GPUs
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: None


def fake_gpus() -> None:
    """On simulated GPUs, operators raise errors like real GPUs, and empty tensors are nan.

    An operator must not overwrite pinned memory that a GPU may still read. Replayed updates give
    the same results as eager updates.
    """
    from tests.template import gpu_graphs
    from tests.tools import fake_gpu

    os.environ["LOCAL_WORLD_SIZE"] = "4"
    fake_gpu.install()
    assert torch.cuda.device_count() == 4
    first = torch.arange(4.0, device="cuda")
    assert str(first.device) == "cuda:0" and (first + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    torch.cuda.set_device(3)
    fourth = torch.ones(4, device="cuda")
    on_cpu = torch.arange(4)
    mixed = {
        "two GPUs": lambda: first + fourth,
        "a sum": lambda: first + on_cpu,
        "indices": lambda: on_cpu[first.long()],
        "values": lambda: first.index_put((first.long(),), torch.ones(4)),
        "a mask": lambda: on_cpu.double().index_put((first > 1,), first[first > 1].double()),
        "numbers": lambda: torch.stack([first[0], torch.tensor(1.0)]),
        "a product": lambda: torch.sparse_csr_tensor(on_cpu.new_zeros(5), first.long(), first),
    }
    for name, mix in mixed.items():
        with pytest.raises(RuntimeError, match="at least two devices"):
            mix()
            raise AssertionError(name)
    with pytest.raises(TypeError):
        first.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(4, device="cuda:4")
    with pytest.raises(RuntimeError, match="a 'cuda' device type for generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())
    assert f"{first[1]:.2f}" == "1.00"
    assert first[on_cpu].cpu().numpy().tolist() == [0, 1, 2, 3]

    waiting = {
        "item": lambda: first.sum().item(),
        "bool": lambda: bool(first.sum()),
        "tolist": lambda: first.tolist(),
        "mask": lambda: first[first > 1],
        "indices": lambda: first[on_cpu],
        "number": lambda: first.index_put((first.long(),), torch.tensor(1.0)),
        "bincount": lambda: first.long().bincount(minlength=9),
        "equal": lambda: torch.equal(first, first),
        "repr": lambda: print(first),
        "synchronize": lambda: torch.cuda.synchronize(),
        "repeat_interleave": lambda: torch.repeat_interleave(first.long()),
        "cpu": lambda: first.cpu(),
        "to": lambda: on_cpu.to("cuda"),
        "copy_": lambda: first.copy_(on_cpu),
        "not pinned": lambda: first.copy_(on_cpu, non_blocking=True),
        "coalesce": lambda: sparse.coalesce(),
        "tensor": lambda: torch.tensor(1.0, device="cuda"),
        "new_tensor": lambda: first.new_tensor(1.0),
        "asarray": lambda: torch.asarray([1.0], device="cuda"),
    }
    sparse = torch.sparse_coo_tensor(first.long().unsqueeze(0), first, (4,))
    pinned = on_cpu.pin_memory()
    with fake_gpu.no_waiting():
        pinned.to("cuda", non_blocking=True)
        first.copy_(pinned, non_blocking=True)
        first[first > 1] = 1.0
        for name, wait in waiting.items():
            with pytest.raises(RuntimeError, match="the host waits for the GPU"):
                wait()
                raise AssertionError(name)
    writes = {
        "copy_": lambda: pinned.copy_(on_cpu),
        "a view": lambda: pinned[1:].add_(1),
        "out": lambda: torch.add(on_cpu, 1, out=pinned),
        "a list": lambda: torch._foreach_zero_([on_cpu, pinned]),
    }
    with fake_gpu.no_waiting(may_wait=True):
        first.sum().item()  # does not count, because it could be rarer on a real GPU
    for name, write in writes.items():
        with pytest.raises(RuntimeError, match=r"workers.py, line \d+: aten.* to pinned memory"):
            write()
            raise AssertionError(name)
    pinned = on_cpu.pin_memory()  # new memory, as for each batch of a loader
    pinned.zero_()
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.zero_()
    fresh = [first.new_empty(2), torch.empty_like(first), torch.empty(2, device="cuda:0")]
    assert torch.cat(fresh).isnan().all()
    assert (torch.empty(2, dtype=torch.long, device="cuda") > 2**62).all()
    ptr = torch.arange(5, device="cuda:0")
    matrix = torch.sparse_csr_tensor(ptr, ptr[:4], first.new_ones(4), (4, 4))
    unsteady = {
        "cumsum": lambda: first.cumsum(0),
        "product": lambda: matrix @ first.view(4, 1),
        "scatter_reduce": lambda: first.scatter_reduce(0, ptr[:4], first, "prod"),
    }
    torch.use_deterministic_algorithms(True, warn_only=True)
    ptr.cumsum(0)
    for name, add_up in unsteady.items():
        with pytest.raises(RuntimeError, match="is not deterministic on a GPU"):
            add_up()
            raise AssertionError(name)
    torch.use_deterministic_algorithms(False)
    for precision in ("fp32", "fp64"):
        is_same, figure = gpu_graphs.replayed_updates(first.device, precision, Path())
        assert is_same, figure


def gpu_checks(kind: str) -> None:
    """Runs the checks of `tests.check gpu` in this process, on a small graph with few timed steps.

    They import `train_step` before the GPUs are simulated, because the simulation replaces it by a
    function that fails if it waits for the GPU, and some steps of these checks may wait. Only two
    readouts, two precisions and some of the timed functions are checked.
    """
    from tests.bench.synthetic import PRESETS
    from tests.template import gpu, gpu_checks, gpu_graphs
    from tests.tools import fake_gpu

    gpu_graphs.NUM_STEPS = 1
    gpu_graphs.TIMED_STEPS = 2
    gpu_graphs.TIMED_ROWS = 100
    PRESETS["yeast"] = replace(PRESETS["small"], num_samples=300)
    gpu.READOUTS = ("both", "nodes")
    gpu.TIMED = gpu.TIMED[1::2]
    gpu_checks.MOST_COLUMNS = 2**12
    for tolerances in (gpu.MODEL_TOLERANCES, gpu.GRAPH_TOLERANCES):
        del tolerances["fp64"], tolerances["bf16"]
    fake_gpu.install()
    report = gpu.Report(limit_s=1000.0)
    device = torch.device("cuda", 0)
    folder = Path()
    if kind == "values":
        gpu.products(report, device, "yeast")
        gpu.models(report, device, folder)
        gpu.draws(report, device)
        gpu.steps(report, device, folder)
    else:
        gpu.graphs(report, device, folder)
        gpu.speeds(report, device, folder)
        gpu.failed_captures(report, device, folder)


def too_few_gpus() -> None:
    """On rank 1, ddp.device_ids has fewer GPUs than there are processes. Both ranks fail."""
    simulate_gpus(2)
    chosen = [0] if os.environ["RANK"] == "1" else []
    refused(
        DDPConfig(device_ids=chosen),
        "2 GPUs for 2 processes with ddp.device_ids=[0]: set --nproc_per_node",
        "set CUDA_VISIBLE_DEVICES= and 'ddp.device_ids=[]'",
    )


def shared_gpu() -> None:
    """A scheduler assigns the same GPU to both processes."""
    simulate_gpus(1, uuid="GPU-0")
    refused(DDPConfig(), " share a GPU: ")


def no_gpu_on_rank_0() -> None:
    """For example, a driver has failed. Ranks with different backends would wait forever."""
    simulate_gpus(2 * int(os.environ["RANK"]))
    refused(DDPConfig(), "device differs between ranks: cuda on rank 1, cpu on rank 0")


def own_gpu() -> None:
    """A scheduler assigns a different GPU to each process. In both, the GPU has the index 0."""
    simulate_gpus(1, uuid=f"GPU-{os.environ['RANK']}")
    ddp = start()
    assert ddp.device == torch.device("cuda", 0) and ddp.local_rank == int(os.environ["RANK"])
    dist.destroy_process_group()


def preflight_of_a_bad_machine(what: str) -> None:
    """Rank 1 is slow, rank 1 has a different version of torch, or the sum over ranks is wrong."""
    if what == "slow" and os.environ["RANK"] == "1":
        original = timeit.repeat

        def slow_once(*_: object, **__: object) -> list[float]:
            timeit.repeat = original
            return [9.0] * 12

        timeit.repeat = slow_once
    if what == "torch" and os.environ["RANK"] == "1":
        versions = ddp_setup.library_versions()
        ddp_machines.library_versions = lambda: {**versions, "torch": "1.0"}
    if what == "sum":
        Distributed.sum = lambda ddp, values: values
    ddp_ends.end_process(ddp_setup.run(ddp_machines.preflight, DDPConfig()))


def options(ddp: Distributed) -> None:
    """DDP receives ddp.options: with a tiny bucket_cap_mb, it has several buckets."""
    ddp = copy.copy(ddp)
    ddp.config = DDPConfig(options={"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True})
    assert exchanged_buckets(ddp) > 1


def buffers(ddp: Distributed) -> None:
    """DDP broadcasts the buffers of rank 0 only if the model has running statistics."""
    for norm, expected in ((nn.LayerNorm(4), ddp.rank), (nn.BatchNorm1d(4), 0)):
        module = nn.Sequential(nn.Linear(4, 4), norm)
        module.register_buffer("constant", torch.zeros(()))
        model = wrap(module, ddp)
        module.constant.fill_(ddp.rank)
        model(torch.randn(3, 4)).sum().backward()
        assert module.constant.item() == expected


def exchanged_buckets(ddp: Distributed) -> int:
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ddp)
    assert model.gradient_as_bucket_view
    exchanges = []
    model.register_comm_hook(exchanges, counted_all_reduce)
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        exchanges.clear()
        model(torch.ones(1, 8)).sum().backward()
    return len(exchanges)


def batchnorm() -> None:
    """With sync_batchnorm, both GPUs have the same running statistics; otherwise, they differ."""
    ddp = start(options={"broadcast_buffers": False})
    assert len(set(batchnorm_means(ddp, sync_batchnorm=False))) == 2
    assert len(set(batchnorm_means(ddp, sync_batchnorm=True))) == 1
    ddp.close()


def batchnorm_means(ddp: Distributed, sync_batchnorm: bool) -> list[float]:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).to(ddp.device)
    ddp.config = DDPConfig(sync_batchnorm=sync_batchnorm, options=ddp.config.options)
    ddp_model = wrap(model, ddp)
    ddp_model(torch.full((4, 1), float(ddp.rank), device=ddp.device)).sum().backward()
    return ddp.gather(ddp_model.module[0].running_mean.item())


def zero(ddp: Distributed) -> None:
    """With ZeRO, each rank has a part of the optimiser state, and the parts make up all of it."""
    _, model = build(ddp)
    sizes = {}
    for optim in (OptimConfig(), OptimConfig(zero=True)):
        optimizer = build_optimizer(model, optim, ddp)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        local = optimizer.optim if optim.zero else optimizer
        state = [value for values in local.state.values() for value in values.values()]
        sizes[optim.zero] = ddp.gather(sum(value.nbytes for value in state))
    assert max(sizes[True]) < 0.7 * sizes[False][0]
    assert sum(sizes[True]) == sizes[False][0]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
