"""`python -m tests.check parity`: checks that any number of processes gives the same result."""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

from ddp_ends import end_process
from ddp_setup import Distributed, run
from errors import counted
from run_folder import LogConfig, RunConfig
from tests.few_rows import load_few_rows
from tests.tools.runs import launch, parameters, read_metrics, relative_difference
from train import read_config, train

NUM_EPOCHS = 2  # epochs of each run
BATCH_SIZE = 24
# Parameters of correct runs usually differ by 1e-16, and metrics by 1e-14. Both may differ more if
# a gradient consists of rounding errors, for which AdamW makes steps of 1e-9 times the learning
# rate. Runs with errors of float32 differ by 1e-9 in parameters and 1e-7 in metrics.
TOLERANCE = 1e-9
# Metrics to compare. The mse is not compared, because some losses leave it undetermined.
METRICS = ("loss", "pearson", "grad_norm")


def parity(options: argparse.Namespace) -> bool:
    """Trains runs with several numbers of processes, and prints how they differ from the first.

    Returns whether they agree.
    """
    with tempfile.TemporaryDirectory() as folder:
        for world_size in options.world_sizes:
            processes = counted(world_size, "process", "processes")
            print(f"training {2 * NUM_EPOCHS} epochs on few rows with {processes}", file=sys.stderr)
            status, output = launch(
                world_size,
                ["parity-worker", folder, *options.arguments],
                options.timeout,
                cpu=options.cpu,
            )
            if status:
                raise RuntimeError(f"the run with {processes} failed:\n{output}")
        return compare_runs(options.world_sizes, Path(folder))


def compare_runs(world_sizes: list[int], folder: Path) -> bool:
    """Prints how the runs in `folder` differ from the first; returns whether they agree."""
    runs = {}
    for world_size in world_sizes:
        for accumulate in (1, 2):
            name = f"{counted(world_size, 'rank')}, accumulate {accumulate}"
            runs[name] = folder / f"{world_size}-{accumulate}"
    first, *others = runs
    print(
        f"differences from {first}: the largest one of a tensor, divided by the norm of the model, "
        "and the largest relative one of a metric"
    )
    all_agree = True
    for name in others:
        differences = parameter_differences(runs[name], runs[first])
        of_metrics = metric_differences(runs[name], runs[first])
        tensor = max(differences, key=differences.get)
        metric = max(of_metrics, key=of_metrics.get)
        outcome = "PASS"
        if of_metrics[metric] > TOLERANCE:
            outcome = f"FAIL, {metric} is the metric with the largest difference"
        if differences[tensor] > TOLERANCE:
            outcome = f"FAIL, {tensor} is the tensor with the largest difference"
        all_agree = all_agree and outcome == "PASS"
        print(f"{name:24s} {differences[tensor]:8.1e} {of_metrics[metric]:8.1e}  {outcome}")
    if not all_agree:
        print(
            "Usually the loss is a mean per rank, or `forward` depends on other samples of its "
            "batch: see the table of causes in docs/runs.md"
        )
    return all_agree


def parity_worker(folder: str, arguments: list[str]) -> None:
    """Trains with and without gradient accumulation, on few rows of the user's tables."""
    config = read_config(arguments)

    def program(ddp: Distributed) -> None:
        for accumulate in (1, 2):
            name = f"{ddp.world_size}-{accumulate}"
            optim = dataclasses.replace(
                config.optim, epochs=NUM_EPOCHS, accumulate=accumulate, precision="fp64"
            )
            short = dataclasses.replace(
                config,
                run=RunConfig(name=name, dir=folder),
                data=dataclasses.replace(config.data, batch_size=BATCH_SIZE),
                optim=optim,
                log=LogConfig(every_steps=1),
            )
            train(short, ddp)

    with load_few_rows():
        status = run(program, config.ddp)
    end_process(status)


def parameter_differences(path: Path, reference: Path) -> dict[str, float]:
    """Returns the difference of each parameter and buffer between two runs.

    The difference is its norm, divided by the norm of the model. If it were divided by the norm of
    the tensor itself, a bias whose gradient consists of rounding errors could differ by any amount.
    Tensors that are equal in both runs, such as large constants, do not count for the norm of the
    model.
    """
    ours = parameters(path)
    theirs = parameters(reference)
    numbers = [torch.zeros(1)]
    for name, value in theirs.items():
        if value.is_floating_point() and not torch.equal(ours[name], value):
            numbers.append(value.flatten())
    norm = torch.cat(numbers).norm()
    return {name: relative_difference(ours[name], value, norm) for name, value in theirs.items()}


def metric_differences(path: Path, reference: Path) -> dict[str, float]:
    """Returns the largest relative difference of each metric of two runs."""
    largest = dict.fromkeys(METRICS, 0.0)
    for ours, theirs in zip(read_metrics(path), read_metrics(reference), strict=True):
        for name in METRICS:
            if theirs.get(name) is not None:
                difference = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-300)
                largest[name] = max(largest[name], difference)
    return largest
