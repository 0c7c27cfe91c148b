"""`python -m tests.check parity`: the same result with any number of processes."""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

from ddp_ends import end_process
from ddp_setup import Distributed, run
from run_folder import LogConfig, RunConfig
from tests.few_rows import load_few_rows
from tests.tools.runs import launch, parameters, read_metrics, relative_difference
from train import read_config, train

NUM_EPOCHS = 2  # epochs with each number of micro-batches
BATCH_SIZE = 24
# For gradients that are only rounding errors, AdamW makes steps of 1e-9 times the learning rate.
# Most correct runs differ by 1e-16, and their metrics by 1e-14. Runs with the errors of float32
# differ by 1e-9 and 1e-7.
TOLERANCE = 1e-9
# The metrics that are compared; the mse is left out, because a loss may leave it undetermined.
METRICS = ("loss", "pearson", "grad_norm")


def parity(options: argparse.Namespace) -> bool:
    """Prints how runs with several world sizes differ from the first; returns if they agree."""
    with tempfile.TemporaryDirectory() as folder:
        for world_size in options.world_sizes:
            print(
                f"training {2 * NUM_EPOCHS} epochs on few rows with {world_size} processes",
                file=sys.stderr,
            )
            status, output = launch(
                world_size,
                ["parity-worker", folder, *options.arguments],
                options.timeout,
                cpu=options.cpu,
            )
            if status:
                raise RuntimeError(f"{world_size} processes failed:\n{output}")
        return compare_runs(options.world_sizes, Path(folder))


def compare_runs(world_sizes: list[int], folder: Path) -> bool:
    """Prints how the runs in `folder` differ from the first; returns whether they agree."""
    runs = {}
    for world_size in world_sizes:
        for accumulate in (1, 2):
            name = f"{world_size} ranks, accumulate {accumulate}"
            runs[name] = folder / f"{world_size}-{accumulate}"
    first, *others = runs
    print(
        f"compared with {first}: the largest difference of a tensor, divided by the norm of the "
        "model, and the largest relative difference of a metric"
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
    return all_agree


def parity_worker(folder: str, arguments: list[str]) -> None:
    """Runs `train.train` with one world size, on few rows of the user's tables."""
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
    """Returns each parameter's and buffer's difference, as its norm over the norm of the model.

    With the norm of the tensor itself, a bias could differ by any amount if its gradient consists
    of rounding errors. Tensors that are equal, such as large constants, do not count for the
    model's norm.
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
