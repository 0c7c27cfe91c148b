"""`train.py` as a whole: against a bare loop, its data loading, and its start-up.

    python -m tests.bench.program [--json FILE]

The bare loop has the same model, batches and optimiser step, but no logging, checkpoints or checks;
both run in turn in this process, on the default configuration. Data loading and start-up use the
yeast preset and a warm cache, start-up with 20 validation rows, as validation comes before the
first step.
"""

import logging
import subprocess
import sys
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
from mask import SharedGraph
from optim import OptimConfig
from run_folder import RunConfig
from task import KnockoutTask
from tests.bench import arguments, report, synchronize
from tests.bench.synthetic import PRESETS, synthetic_tables, write
from tests.tools.runs import ROOT, read_metrics
from train import read_config, train

IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


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


def start_up(overrides: list[str], config: Config) -> list[dict]:
    """Measures the seconds from the command to the first step, and what they are spent on."""
    total = seconds_to_first_step(overrides)
    torch_s = seconds_of_import("torch")
    pyg_s = seconds_of_import("torch, torch_geometric.data")
    all_s = seconds_of_import("train")
    start = time.perf_counter()
    tables = load(config.data)
    loaded = time.perf_counter()
    SharedGraph(tables.graph())
    built = time.perf_counter()
    spent = {
        "import torch": torch_s,
        "import torch_geometric": pyg_s - torch_s,
        "import the rest": all_s - pyg_s,
        "tables from the cache": loaded - start,
        "shared graph": built - loaded,
    }
    spent["model, baseline, first step and the rest"] = total - sum(spent.values())
    spent["total"] = total
    return [{"start-up": name, "s": seconds} for name, seconds in spent.items()]


def seconds_to_first_step(overrides: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = [*overrides, f"run.dir={folder}", "data.batch_size=4", "log.every_steps=1"]
        metrics = Path(folder) / "default/metrics.jsonl"
        command = [sys.executable, ROOT / "train.py", *options]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not (metrics.exists() and '"train"' in metrics.read_text()):
                if process.poll() is not None:
                    raise RuntimeError(
                        f"train.py exited with {process.returncode} before its first step"
                    )
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()


def seconds_of_import(modules: str) -> float:
    """Returns how long a new process imports these modules."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT.format(modules)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(process.stdout)


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
        overrides.append("data.val_fraction=0.001")  # validation comes before the first step
        yeast = read_config([*overrides, "model.hidden=64", "model.layers=3"])
        load(yeast.data)  # fills the cache
        start = start_up(overrides, yeast)
        batches = loading(yeast, ddp.device)
    rates: dict[str, list[float]] = {"train.py": [], "bare loop": []}
    for _ in range(options.rounds):
        rates["train.py"].append(whole_program(config, ddp))
        rates["bare loop"].append(bare_loop(config, ddp.device))
    speed = [{"program": name, "samples/s": median(values)} for name, values in rates.items()]
    ratios = [ours / bare for ours, bare in zip(*rates.values(), strict=True)]
    speed.append({"program": "train.py / bare loop", "samples/s": median(ratios)})
    tables = {"Whole program": speed, "Data loading": batches, "Start-up, yeast preset": start}
    report(tables, device, options.json)


if __name__ == "__main__":
    main()
