"""`train.py` as a whole: against a bare loop, its data loading, and its start-up.

    python -m tests.bench.program [--json FILE]

The bare loop has the same model, batches and optimiser step, but no logging, checkpoints or checks;
both run in turn in this process, on the default configuration. Data loading and start-up use the
yeast preset and a warm cache, start-up with 20 validation rows, as validation comes before the
first step.
"""

import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import config
import optim
import run_folder
import train
from baseline import additive_baseline
from data import KnockoutDataset, StepSampler, load
from ddp_setup import Distributed, setup
from mask import SharedGraph
from tests.bench import arguments, report, synchronize
from tests.bench.synthetic import PRESETS, synthetic_tables, write

ROOT = Path(__file__).resolve().parents[2]


def whole_program(config: config.Config, env: Distributed) -> float:
    """Returns samples per second in the training steps of `train.train`.

    It has logging and mid-epoch checkpoints.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = config.Config(**{**vars(config), "run": run_folder.RunConfig(dir=folder)})
        train.train(config, env)
        rows = [
            json.loads(line)
            for line in (Path(folder) / "default/metrics.jsonl").read_text().splitlines()
        ]
        for handler in list(logging.getLogger().handlers):
            logging.getLogger().removeHandler(handler)
            handler.close()
    rows = [row for row in rows if row["kind"] == "train"]
    steps = [
        row["step"] - before
        for row, before in zip(rows, [0, *(row["step"] for row in rows)], strict=False)
    ]
    seconds = [row["step_ms"] * count / 1e3 for row, count in zip(rows, steps, strict=True)]
    return sum(row["samples_per_s"] * part for row, part in zip(rows, seconds, strict=True)) / sum(
        seconds
    )


def bare_loop(config: config.Config, device: torch.device) -> float:
    """Returns samples per second of the same steps and nothing else."""
    tables = load(config.data)
    graph = SharedGraph(tables.graph()).to(device)
    dataset, _ = train.make_dataset(config, tables, graph)
    sampler = StepSampler(tables.rows("train"), config.data.batch_size, 1, 1, 0, seed=0)
    torch.manual_seed(0)
    model = train.build_model(config, tables, additive_baseline(tables)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    samples, start = 0, time.perf_counter()
    for epoch in range(config.optim.epochs):
        sampler.set_epoch(epoch)
        for rows in sampler:
            batch = dataset.__getitems__(rows).to(device)
            batch.seed = torch.full((), samples, device=device)
            loss = train.criterion(model(graph, batch), batch, model) / len(rows)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            samples += len(rows)
    synchronize(device)
    return samples / (time.perf_counter() - start)


def loading(config: config.Config, device: torch.device) -> list[dict]:
    """Measures how fast batches of 32 are built, and data loading's share in a yeast-sized step."""
    tables = load(config.data)
    graph = SharedGraph(tables.graph())
    dataset = KnockoutDataset(tables, graph.degree)
    batches = list(StepSampler(tables.rows("train"), 32, 1, 1, 0, seed=0))
    start = time.perf_counter()
    for rows in batches:
        dataset.__getitems__(rows)
    rate = len(batches) / (time.perf_counter() - start)
    model = train.build_model(config, tables, additive_baseline(tables)).to(device)
    graph = graph.to(device)
    start = time.perf_counter()
    batch = dataset.__getitems__(batches[0]).to(device)
    batch.seed = torch.full((), 0, device=device)
    built = time.perf_counter()
    train.criterion(model(graph, batch), batch, model).backward()
    synchronize(device)
    step = time.perf_counter() - built
    return [
        {"data loading": "batches of 32 per second", "value": rate},
        {
            "data loading": "% of a yeast step (hidden 64, 3 layers, B=32)",
            "value": 100 / rate / step,
        },
        {"data loading": "first batch, ms", "value": 1e3 * (built - start)},
    ]


def start_up(overrides: list[str], config: config.Config) -> list[dict]:
    """Measures the seconds from the command to the first step, and what they are spent on."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*overrides, f"run.dir={folder}", "data.batch_size=4", "log.every_steps=1"]
        metrics = Path(folder) / "default/metrics.jsonl"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *arguments], stdout=subprocess.DEVNULL
        )
        try:
            while not (metrics.exists() and '"train"' in metrics.read_text()):
                if process.poll() is not None:
                    raise RuntimeError(
                        f"train.py exited with {process.returncode} before its first step"
                    )
                time.sleep(0.01)
            total = time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
    parts = (
        "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    )

    def seconds(modules: str) -> float:
        command = [sys.executable, "-W", "ignore", "-c", parts.format(modules)]
        return float(
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        )

    imports = {name: seconds(name) for name in ("torch", "torch, torch_geometric.data", "train")}
    start = time.perf_counter()
    tables = load(config.data)
    loaded = time.perf_counter()
    SharedGraph(tables.graph())
    built = time.perf_counter()
    torch_s, pyg_s, all_s = imports.values()
    spent = {
        "import torch": torch_s,
        "import torch_geometric": pyg_s - torch_s,
        "import the rest": all_s - pyg_s,
        "tables from the cache": loaded - start,
        "shared graph": built - loaded,
    }
    rest = {"model, baseline, first step and the rest": total - sum(spent.values())}
    return [
        {"start-up": name, "s": value} for name, value in {**spent, **rest, "total": total}.items()
    ]


def main() -> None:
    options = arguments(
        __doc__, rounds={"type": int, "default": 10}, epochs={"type": int, "default": 5}
    )
    device = torch.device(options.device)
    config = config.Config(optim=optim.OptimConfig(epochs=options.epochs))
    env = setup(Distributed(config.ddp))
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *write(synthetic_tables(PRESETS["yeast"]), Path(folder)),
            f"data.cache_dir={folder}/cache",
        ]
        overrides.append(
            "data.val_fraction=0.001"
        )  # for start-up: validation comes before the first step
        yeast = train.read_config([*overrides, "model.hidden=64", "model.layers=3"])
        load(yeast.data)  # fills the cache
        start = start_up(overrides, yeast)
        batches = loading(yeast, env.device)
    rates: dict[str, list[float]] = {"train.py": [], "bare loop": []}
    for _ in range(options.rounds):
        rates["train.py"].append(whole_program(config, env))
        rates["bare loop"].append(bare_loop(config, env.device))
    speed = [{"program": name, "samples/s": median(values)} for name, values in rates.items()]
    ratios = [ours / bare for ours, bare in zip(*rates.values(), strict=True)]
    speed.append({"program": "train.py / bare loop", "samples/s": median(ratios)})
    tables = {"Whole program": speed, "Data loading": batches, "Start-up, yeast preset": start}
    report(tables, device, options.json)


if __name__ == "__main__":
    main()
