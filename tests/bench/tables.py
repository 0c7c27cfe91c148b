"""Measures tables of the size of a full screen: reading, later starts, memory and batches.

    python -m tests.bench.tables [--rows N] [--edges N] [--genes N] [--folder DIR] [--json FILE]

Each phase runs in a separate process:

- first read: the time to read the tables and to fit the baseline, and the peak memory.
- graph: the time to read the edges and to build the shared graph.
- later start: the time from the command to the first batch of training, including imports. The
  tables are memory-mapped from the cache, so that ranks share them. Private memory is the memory
  that a rank cannot share (Private_Dirty in the kernel's smaps_rollup).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch

from baseline import load_baseline
from data import DataConfig, KnockoutDataset, load
from data_loader import StepSampler, make_loader
from data_tables import read_edges
from mask import SharedGraph
from tests.bench import report, resident_kb

BATCH_SIZE = 128


def write_tables(folder: Path, rows: int, edges: int, genes: int) -> None:
    """Writes random tables of pairs and edges."""
    draw = np.random.default_rng(0)
    names = np.array([f"Y{i:05d}W" for i in range(genes)])
    with (folder / "scores.tsv").open("w") as file:
        file.write("genes\tscore\n")
        for start in range(0, rows, 10**6):
            pairs = names[draw.integers(genes, size=(min(10**6, rows - start), 2))]
            scores = draw.normal(size=len(pairs))
            for (a, b), score in zip(pairs.tolist(), scores, strict=True):
                file.write(f"{a},{b}\t{score:.5f}\n")
    with (folder / "edges.tsv").open("w") as file:
        file.write("source\ttarget\trelation\n")
        for start in range(0, edges, 10**6):
            ends = names[draw.integers(genes, size=(min(10**6, edges - start), 2))].tolist()
            file.writelines(f"{a}\t{b}\tr{i % 9}\n" for i, (a, b) in enumerate(ends))


def config_of(folder: str) -> DataConfig:
    return DataConfig(
        edges=f"{folder}/edges.tsv",
        perturbations=f"{folder}/scores.tsv",
        cache_dir=f"{folder}/cache",
    )


def first_read(folder: str) -> dict[str, float]:
    start = time.perf_counter()
    config = config_of(folder)
    tables = load(config)
    read = time.perf_counter() - start
    load_baseline(tables, tables.fingerprint(), config.cache_dir, "squared")
    return {
        "read": read,
        "with baseline": time.perf_counter() - start,
        "peak GB": resident_kb("VmHWM") / 2**20,
    }


def read_graph(folder: str) -> dict[str, float]:
    start = time.perf_counter()
    read_edges(f"{folder}/edges.tsv", {})
    read = time.perf_counter() - start
    tables = load(config_of(folder))
    start = time.perf_counter()
    graph = SharedGraph(tables.graph())
    return {
        "read": read,
        "build": time.perf_counter() - start,
        "edges": float(graph.edge_index.size(1)),
    }


def later_start(folder: str) -> dict[str, float]:
    config = config_of(folder)
    tables = load(config)
    dataset = KnockoutDataset(tables, torch.ones(len(tables.genes), dtype=torch.long))
    sampler = StepSampler(
        tables.rows("train"), BATCH_SIZE, accumulate=1, world_size=1, rank=0, seed=0
    )
    load_baseline(tables, tables.fingerprint(), config.cache_dir, "squared")
    tables.unseen_share("val")
    sampler.set_epoch(1, first_step=sampler.steps_per_epoch // 2)  # a resumed run
    loader = make_loader(dataset, sampler, 0, torch.device("cpu"))
    batches = chain.from_iterable(repeat(loader))  # an endless iterator
    next(batches)
    since = time.time() - float(os.environ["STARTED"])
    start = time.perf_counter()
    for _ in range(1000):
        next(batches)
    rate = 1000 / (time.perf_counter() - start)
    private = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    kilobytes = sum(int(line[1]) for line in private if line[0] == "Private_Dirty:")
    return {"seconds": since, "private MB": kilobytes / 2**10, "batches per s": rate}


PHASES = {"first read": first_read, "graph": read_graph, "later start": later_start}


def run(phase: str, folder: Path) -> dict[str, float]:
    arguments = ["--phase", phase, "--folder", str(folder)]
    command = [sys.executable, "-m", "tests.bench.tables", *arguments]
    environment = {**os.environ, "STARTED": str(time.time())}
    process = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(process.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=13_500_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--genes", type=int, default=6_600)
    parser.add_argument(
        "--folder", type=Path, help="folder of the tables (default: a temporary folder)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to this file"
    )
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        print(json.dumps(PHASES[options.phase](str(options.folder))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "edges.tsv").exists():
            write_tables(folder, options.rows, options.edges, options.genes)
        rows = []
        for phase in PHASES:
            figures = [f"{name} {value:,.2f}" for name, value in run(phase, folder).items()]
            rows.append({"phase": phase, "figures": "; ".join(figures)})
    title = f"{options.rows:,} pairs, {options.edges:,} edges"
    report({title: rows}, torch.device("cpu"), options.json)


if __name__ == "__main__":
    main()
