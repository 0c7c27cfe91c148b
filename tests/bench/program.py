"""`train.py` as a whole: against a bare loop, and its data loading.

    python -m tests.bench.program [--json FILE]

The bare loop has the same model, batches and optimiser step, but no logging, checkpoints or checks;
both run in turn in this process, on the default configuration. Data loading uses the yeast preset.
"""

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from config import Config
from data import KnockoutDataset, load
from data_loader import StepSampler
from ddp_setup import Distributed, setup
from optim import OptimConfig
from run_folder import RunConfig
from task import KnockoutTask
from tests.bench import arguments, report, synchronize
from tests.bench.synthetic import PRESETS, synthetic_tables, write
from tests.tools.runs import read_metrics
from train import read_config, train


def whole_program(config: Config, ddp: Distributed) -> float:
    """Returns samples per second in the training steps of `train.train`.

    It has logging and mid-epoch checkpoints.
    """
    with tempfile.TemporaryDirectory() as folder:
        train(replace(config, run=RunConfig(dir=folder)), ddp)
        rows = read_metrics(Path(folder, "default"), "train")
        for handler in list(logging.getLogger().handlers):
            logging.getLogger().removeHandler(handler)
            handler.close()
    step = 0
    num_samples = 0.0
    total_s = 0.0
    for row in rows:
        seconds = row["step_ms"] * (row["step"] - step) / 1e3
        num_samples += row["samples_per_s"] * seconds
        total_s += seconds
        step = row["step"]
    return num_samples / total_s


def bare_loop(config: Config, device: torch.device) -> float:
    """Returns samples per second of the same steps and nothing else."""
    task = KnockoutTask.from_tables(load(config.data), config, device)
    sampler = make_sampler(task, config.data.batch_size)
    torch.manual_seed(0)
    model = task.build_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    num_samples = 0
    start = time.perf_counter()
    for epoch in range(config.optim.epochs):
        sampler.set_epoch(epoch)
        for rows in sampler:
            batch = task.dataset.__getitems__(rows).to(device)
            batch.seed = torch.full((), num_samples, device=device)
            loss = task.loss(model(task.graph, batch), batch) / len(rows)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            num_samples += len(rows)
    synchronize(device)
    return num_samples / (time.perf_counter() - start)


def make_sampler(task: KnockoutTask, batch_size: int) -> StepSampler:
    """Returns the sampler of the training rows in one process."""
    return StepSampler(task.rows("train"), batch_size, accumulate=1, world_size=1, rank=0, seed=0)


def loading(config: Config, device: torch.device) -> list[dict]:
    """Measures how fast batches of 32 are built, and data loading's share in a yeast-sized step."""
    task = KnockoutTask.from_tables(load(config.data), config, device)
    dataset = KnockoutDataset(task.tables, task.graph.degree)  # without a plan
    batches = list(make_sampler(task, 32))
    start = time.perf_counter()
    for rows in batches:
        dataset.__getitems__(rows)
    rate = len(batches) / (time.perf_counter() - start)
    model = task.build_model().to(device)
    start = time.perf_counter()
    batch = dataset.__getitems__(batches[0]).to(device)
    batch.seed = torch.full((), 0, device=device)
    built = time.perf_counter()
    task.loss(model(task.graph, batch), batch).backward()
    synchronize(device)
    step = time.perf_counter() - built
    values = {
        "batches of 32 per second": rate,
        "% of a yeast step (hidden 64, 3 layers, B=32)": 100 / rate / step,
        "first batch, ms": 1e3 * (built - start),
    }
    return [{"data loading": name, "value": value} for name, value in values.items()]


def main() -> None:
    options = arguments(
        __doc__,
        rounds={"type": int, "default": 10},
        epochs={"type": int, "default": 5},
    )
    device = torch.device(options.device)
    config = Config(optim=OptimConfig(epochs=options.epochs))
    ddp = setup(Distributed(config.ddp))
    with tempfile.TemporaryDirectory() as folder:
        overrides = write(synthetic_tables(PRESETS["yeast"]), Path(folder))
        overrides.append(f"data.cache_dir={folder}/cache")
        yeast = read_config([*overrides, "model.hidden=64", "model.layers=3"])
        batches = loading(yeast, ddp.device)
    rates: dict[str, list[float]] = {"train.py": [], "bare loop": []}
    for _ in range(options.rounds):
        rates["train.py"].append(whole_program(config, ddp))
        rates["bare loop"].append(bare_loop(config, ddp.device))
    speed = [{"program": name, "samples/s": median(values)} for name, values in rates.items()]
    ratios = [ours / bare for ours, bare in zip(*rates.values(), strict=True)]
    speed.append({"program": "train.py / bare loop", "samples/s": median(ratios)})
    report({"Whole program": speed, "Data loading": batches}, device, options.json)


if __name__ == "__main__":
    main()
