"""Benchmarks: `python -m tests.bench.NAME [--json FILE]` prints Markdown tables.

- masks: ways to compute masks of edges.
- step: a training step on the shared graph, compared with masked copies of the graph.
- routes: computing only the states that change, compared with computing all states.
- host: the number of kernels of a step.
- tables: reading tables with millions of rows.
- quality: predictions of the model, compared with rivals in `baselines`.
- choices: rules that choose the best model of a run.

README.md has their results. Methods that are compared within one process are called in turn, so
that a slowdown of the machine affects all of them. Therefore, quote ratios, not times.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch_geometric.data import Data

from data import KnockoutDataset
from mask import SharedGraph
from model import ModelConfig
from model_reach import plan_route
from tests.sets import tables_of


def arguments(description: str, **options: dict) -> argparse.Namespace:
    """Parses the command line of a benchmark.

    `description` is its help text. `options` are options that only this benchmark has: each name
    has the arguments of `add_argument`.
    """
    # This package must not import the module `synthetic` earlier, because `python -m` may run it.
    from tests.bench.synthetic import PRESETS

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the tables to this file"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="yeast",
        help="synthetic graph to use (default: %(default)s)",
    )
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def machine(device: torch.device) -> str:
    """Returns a one-line description of the machine that was measured."""
    text = f"{cpu_name()}, {count_cores()} cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        text += f", {torch.cuda.get_device_name(device)}"
    return f"{text}, torch {torch.__version__}"


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def report(tables: dict[str, list[dict]], device: torch.device, path: Path | None) -> None:
    """Prints {title: rows} as Markdown tables, and a description of the machine.

    If `path` is given, it writes both to this file as JSON.
    """
    print(f"\n{machine(device)}")
    for title, rows in tables.items():
        print(f"\n{title}\n\n{markdown(rows)}")
    if path:
        path.write_text(json.dumps({"machine": machine(device), "tables": tables}, indent=1) + "\n")


def markdown(rows: list[dict]) -> str:
    """Returns rows as a Markdown table. All rows have the same columns."""
    columns = list(rows[0])
    cells = [columns]
    cells += [[format_cell(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def format_cell(value: object) -> str:
    if isinstance(value, float) and abs(value) < 1e4:
        return f"{value:,.4g}"
    if isinstance(value, int | float):
        return f"{value:,.0f}"
    return str(value)


def in_turn(
    functions: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: dict[str, int],
    warm: bool = False,
) -> dict:
    """Calls functions in turn, and returns the median time of each in ms.

    Args:
        functions: the functions by name.
        device: the device on which they run.
        repeats: the number of calls of each function.
        warm: whether to omit a first call of each function that is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    if not warm:
        for function in functions.values():
            milliseconds(function, device)
    for k in range(max(repeats.values())):
        for name, function in functions.items():
            if k < repeats[name]:
                times[name].append(milliseconds(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mb(function: Callable[[], object], device: torch.device) -> float:
    """Returns the peak memory in MB that a call of `function` adds to the memory in use."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    # glibc keeps freed memory and would reuse it, which would hide a part of the peak.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before = resident_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    function()
    return (resident_kb("VmHWM") - before) / 2**10


def resident_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def build_batch(
    shared: SharedGraph,
    num_samples: int,
    deletions: int = 3,
    model: ModelConfig | None = None,
    num_targets: int = 1,
    seed: int = 0,
) -> Data:
    """Returns a batch of random knock-outs on the graph's device.

    If `model` is given, the batch has the plan that its message passing needs.
    """
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(num_samples):
        nodes = torch.randperm(shared.num_nodes, generator=generator)
        sets.append(nodes[:deletions].tolist())
    scores = torch.randn(num_samples, num_targets, generator=generator)
    tables = tables_of(sets, scores)
    dataset = KnockoutDataset(tables, shared.degree, out_degree=shared.out_degree)
    if model is not None:
        dataset.transform, _ = plan_route(shared, dataset, model.message_passing, model.layers)
    batch = dataset.__getitems__(range(num_samples))
    batch.seed = torch.tensor(0)
    return batch.to(shared.device)
