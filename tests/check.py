"""Proofs to run on an edited copy of the template: python -m tests.check NAME [--config FILE] [section.key=value ...]

parity    a few steps of your configuration and model give the same parameters and metrics on 1, 2 and 4 processes,
          with and without gradient accumulation; on the CPU, in double precision, without dropout
faults    runs of your configuration and model on 2 CPU processes are killed, stopped, starved and fed with NaN, and
          started again: they end as an undisturbed run does, bit for bit (--only WORD: faults whose name has that word)
devices   where every parameter, buffer, gradient, optimiser state, batch field and output of a live step lies, on all
          GPUs of this machine; what lies elsewhere is named
syncs     file and line of whatever makes the host wait for the device in ten steps of your configuration
rows      for a step that is not finite, with the run's own options: the rows whose squared error is not, by the run's
          newest checkpoint; if there are none, the five training rows that are furthest off
trace     python -m tests.check trace RUN_FOLDER: where the time of the steps went that log.profile_steps traced

Each but trace prints what it found and PASS or FAIL; the exit status is 0, 1 for FAIL, or 2 if it could not run.
"""

import argparse
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import data
import train
from data import SPLITS, Tables
from ddp_setup import Distributed, UserError, run

ROOT = Path(__file__).resolve().parents[1]
BATCH_SIZE, NUM_TRAIN, NUM_EVAL = 24, 77, 7  # the last step has 5 rows: too few for 4 ranks x 2 micro-batches
TOLERANCE = 1e-9


def parity(options: argparse.Namespace) -> bool:
    """Whether runs of the user's program in several world sizes agree with the first one."""
    with tempfile.TemporaryDirectory() as folder:
        for world_size in options.world_sizes:
            status, output = launch(world_size, ["parity-worker", folder, *options.words], options.timeout)
            if status:
                raise RuntimeError(f"{world_size} processes failed:\n{output}")
        reference, *others = [
            (f"{world_size} ranks, accumulate {accumulate}", Path(folder, f"{world_size}-{accumulate}"))
            for world_size in options.world_sizes
            for accumulate in (1, 2)
        ]
        print(f"against {reference[0]}: largest relative difference of a parameter tensor, and of a metric")
        passed = True
        for name, path in others:
            parameters = parameter_difference(path, reference[1])
            metrics = metric_difference(path, reference[1])
            same = max(parameters, metrics) <= TOLERANCE
            passed &= same
            print(f"{name:24s} {parameters:8.1e} {metrics:8.1e}  {'PASS' if same else 'FAIL'}")
    return passed


def parity_worker(folder: str, words: list[str]) -> None:
    """One world size's part: `train.train` itself, on a few rows of the user's tables."""
    config = train.load_config(train.parse_arguments(words))
    data.load = lambda options: few_rows(original(options))

    def program(env: Distributed) -> None:
        for accumulate in (1, 2):
            train.train(
                dataclasses.replace(
                    config,
                    run=train.RunConfig(name=f"{env.world_size}-{accumulate}", dir=folder),
                    data=dataclasses.replace(config.data, batch_size=BATCH_SIZE),
                    model=dataclasses.replace(config.model, dropout=0.0),
                    optim=dataclasses.replace(config.optim, epochs=2, accumulate=accumulate, precision="fp64"),
                    log=train.LogConfig(every_steps=1),
                ),
                env,
            )

    run(program, config.ddp)


original = data.load


def few_rows(tables: Tables) -> Tables:
    """The tables with most rows in no split; those that stay have as different numbers of deletions as there are."""
    counts = tables.perturbed_ptr.diff()
    split = torch.full_like(tables.split, -1)
    for number, name in enumerate(SPLITS):
        rows = tables.rows(name)
        turn = torch.zeros(len(rows), dtype=torch.long)  # the how-manieth row with its number of deletions
        for count in counts[rows].unique():
            of_count = (counts[rows] == count).nonzero().flatten()
            turn[of_count] = torch.arange(len(of_count))
        split[rows[turn.argsort(stable=True)][: NUM_TRAIN if name == "train" else NUM_EVAL]] = number
    return dataclasses.replace(tables, split=split)


def parameter_difference(path: Path, reference: Path) -> float:
    ours, theirs = (final_model(folder) for folder in (path, reference))
    return max(((ours[name] - value).norm() / value.norm().clamp(min=1e-300)).item() for name, value in theirs.items())


def final_model(folder: Path) -> dict[str, Tensor]:
    newest = max((folder / "checkpoints").glob("step_*.pt"))
    return torch.load(newest, weights_only=True)["model"]


def metric_difference(path: Path, reference: Path) -> float:
    names = ("loss", "mse", "pearson", "grad_norm")
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (path, reference)
    )
    pairs = [
        (mine[name], row[name])
        for mine, row in zip(ours, theirs, strict=True)
        for name in names
        if row.get(name) is not None
    ]
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)


def launch(
    world_size: int,
    words: list[str],
    timeout: float = 120,
    torchrun: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    cpu: bool = True,
) -> tuple[int, str]:
    """Run `tests.check` with `words` on CPU processes, one without torchrun if `world_size` is 1.

    Returns exit status and output.

    Raises:
        RuntimeError: it did not end in `timeout` seconds.
    """
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", *torchrun]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {}),
        **(variables or {}),
    }
    process = subprocess.Popen(
        [*command, "-m", "tests.check", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        # torchrun stops its workers, which are in sessions of their own, when it is asked to end.
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RuntimeError(f"{world_size} processes were not done after {timeout} s") from None
    return process.returncode, output


def world_sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


def main() -> None:
    from tests.audits import audit_worker, devices, syncs  # which import this module
    from tests.diagnose import rows, trace
    from tests.faults import fault_worker, faults

    workers = {"parity-worker": parity_worker, "fault-worker": fault_worker, "audit-worker": audit_worker}
    if worker := workers.get(sys.argv[1] if len(sys.argv) > 1 else ""):
        if worker is not fault_worker:  # which is a whole run, with all that it says
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
        return worker(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    proofs = {"parity": parity, "faults": faults, "devices": devices, "syncs": syncs, "rows": rows, "trace": trace}
    parser.add_argument("name", choices=list(proofs))
    parser.add_argument("--world-sizes", type=world_sizes, default="1,2,4", metavar="N,N", help="default: 1,2,4")
    parser.add_argument("--only", default="", metavar="WORD", help="faults: those with this word in their name")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each launch (default: 600)")
    options, options.words = parser.parse_known_args()  # the rest is for train.py
    try:
        if options.name != "trace":
            train.load_config(train.parse_arguments(options.words))
        passed = proofs[options.name](options)
    except (RuntimeError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    if passed is not None:
        print("PASS" if passed else "FAIL")
    sys.exit(passed is False)


if __name__ == "__main__":
    main()
