"""`python -m tests.check parity`: the same result on any number of processes."""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

import data
import run_folder
import train
from ddp_setup import Distributed, run
from tables import SPLITS, Tables
from tests.tools.runs import launch, parameters, read_metrics, relative_difference

NUM_EPOCHS = 2  # with each number of micro-batches
BATCH_SIZE, NUM_TRAIN, NUM_EVAL = (
    24,
    77,
    7,
)  # the last step has 5 rows: too few for 4 ranks x 2 micro-batches
TOLERANCE = 1e-9  # of a tensor over its own norm, for runs that were disturbed
# Right runs differ by 1e-16 and 1e-14 here, those with float32's errors by 1e-9 and 1e-7.
OVER_THE_MODEL = 1e-10  # of a tensor over the norm of the model
OF_METRICS = 1e-11


def parity(options: argparse.Namespace) -> bool:
    """Prints how runs with several world sizes differ from the first; returns if they agree."""
    with tempfile.TemporaryDirectory() as folder:
        for world_size in options.world_sizes:
            print(
                f"training {2 * NUM_EPOCHS} epochs of {NUM_TRAIN} rows on {world_size} processes",
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
        reference, *others = [
            (
                f"{world_size} ranks, accumulate {accumulate}",
                Path(folder, f"{world_size}-{accumulate}"),
            )
            for world_size in options.world_sizes
            for accumulate in (1, 2)
        ]
        print(
            f"compared with {reference[0]}: largest difference of a tensor over the model's norm, "
            "and of a metric"
        )
        passed = True
        for name, path in others:
            tensors = parameter_differences(path, reference[1])
            worst = max(tensors, key=tensors.get)
            of_metrics = metric_difference(path, reference[1])
            same = tensors[worst] <= OVER_THE_MODEL and of_metrics <= OF_METRICS
            passed &= same
            outcome = "PASS" if same else f"FAIL, the tensor that differs most is {worst}"
            print(f"{name:24s} {tensors[worst]:8.1e} {of_metrics:8.1e}  {outcome}")
    return passed


def parity_worker(folder: str, arguments: list[str]) -> None:
    """Runs `train.train` with one world size, on a few rows of the user's tables."""
    config = train.read_config(arguments)
    data.load = lambda options: few_rows(original(options))

    def program(env: Distributed) -> None:
        for accumulate in (1, 2):
            train.train(
                dataclasses.replace(
                    config,
                    run=run_folder.RunConfig(name=f"{env.world_size}-{accumulate}", dir=folder),
                    data=dataclasses.replace(config.data, batch_size=BATCH_SIZE),
                    optim=dataclasses.replace(
                        config.optim, epochs=NUM_EPOCHS, accumulate=accumulate, precision="fp64"
                    ),
                    log=run_folder.LogConfig(every_steps=1),
                ),
                env,
            )

    run(program, config.ddp)


original = data.load


def few_rows(tables: Tables) -> Tables:
    """Returns the tables with a few rows per split.

    They vary as much as possible in the number of deletions.
    """
    counts = tables.perturbed_ptr.diff()
    split = torch.full_like(tables.split, -1)
    for number, name in enumerate(SPLITS):
        rows = tables.rows(name)
        turn = torch.zeros(
            len(rows), dtype=torch.long
        )  # position among the rows with equally many deletions
        for count in counts[rows].unique():
            of_count = (counts[rows] == count).nonzero().flatten()
            turn[of_count] = torch.arange(len(of_count))
        split[rows[turn.argsort(stable=True)][: NUM_TRAIN if name == "train" else NUM_EVAL]] = (
            number
        )
    return dataclasses.replace(tables, split=split)


def parameter_differences(path: Path, reference: Path) -> dict[str, float]:
    """Returns the norm of the difference of each parameter and buffer over that of the whole model.

    Over its own, a bias would differ by any amount whose gradient is nothing but rounding errors.
    """
    ours, theirs = parameters(path), parameters(reference)
    numbers = torch.cat([value.flatten() for value in theirs.values() if value.is_floating_point()])
    return {
        name: relative_difference(ours[name], value, numbers.norm())
        for name, value in theirs.items()
    }


def metric_difference(path: Path, reference: Path) -> float:
    rows = zip(read_metrics(path), read_metrics(reference), strict=True)
    names = ("loss", "mse", "pearson", "grad_norm")
    pairs = [
        (ours[name], theirs[name])
        for ours, theirs in rows
        for name in names
        if theirs.get(name) is not None
    ]
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)
