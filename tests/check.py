"""Checks to run on an adapted template.

    python -m tests.check NAME [--config FILE] [section.key=value ...]

parity    trains a few steps of your configuration and model on 1, 2 and 4 processes, with and
          without gradient accumulation, on the CPU in double precision: parameters and metrics must
          agree
faults    kills, stops, hangs and corrupts runs of your configuration and model on 2 CPU processes,
          then restarts them: each must end bitwise equal to an undisturbed run (--only TEXT: faults
          whose name contains TEXT)
soak      does so at random, again and again on the same runs until they are finished, on changing
          numbers of processes, also with a full disk and a cut link (as root): --minutes 60,
          --ranks 1-4, --seed N
devices   reports the device of every parameter, buffer, gradient, optimiser state, batch field and
          output of a training step, on all GPUs of this machine, and names the tensors on a wrong
          device
syncs     reports file and line of whatever makes the host wait for the device in ten steps of your
          configuration
rows      explains a non-finite step, given the run's own options: prints the rows whose squared
          error under the newest checkpoint is not finite or, if there are none, the five training
          rows with the largest errors
gpu       proves on a machine with GPUs, in less than ten minutes, what the CPU cannot show: values
          by precision, no waits, NCCL, ZeRO, resuming to the same bits, speed; with two or more
          also parity, a killed rank, scaling (--only TEXT: checks whose name contains TEXT; runs of
          train.py take your configuration, the rest do not)
trace     python -m tests.check trace RUN_FOLDER: prints where the time went in the steps that
          log.profile_steps traced
test      python -m tests.check test RUN_FOLDER: prints what the predictions in a run's test.tsv are
          worth, by groups of rows and by score, with an interval, and writes test.json and a plot,
          test.svg (--threshold X: also how well scores below X are found); of several run folders,
          what the mean of their predictions is worth, and whether their standard deviation tells
          where it errs

Each but test and trace prints its findings and PASS or FAIL; the exit status is 0, 1 for FAIL, 2 if
it could not run.
"""

import argparse
import logging
import signal
import sys

import train
from errors import UserError
from tests.tools.analysis import test
from tests.tools.audits import audit_worker, devices, syncs
from tests.tools.diagnose import rows, trace
from tests.tools.faults import fault_worker, faults
from tests.tools.gpu import gpu
from tests.tools.parity import parity, parity_worker
from tests.tools.soak import soak


def world_sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


def rank_range(text: str) -> list[int]:
    first, last = text.split("-")
    if not 1 <= int(first) <= int(last):
        raise ValueError
    return list(range(int(first), int(last) + 1))


def main() -> None:
    workers = {
        "parity-worker": parity_worker,
        "fault-worker": fault_worker,
        "audit-worker": audit_worker,
    }
    if worker := workers.get(sys.argv[1] if len(sys.argv) > 1 else ""):
        if worker is not fault_worker:  # which prints what a full run prints
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
        return worker(sys.argv[2], sys.argv[3:])
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # cleans up: soak has mounted a disk
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checks = {"parity": parity, "faults": faults, "devices": devices, "syncs": syncs, "rows": rows}
    checks |= {"soak": soak, "gpu": gpu, "trace": trace, "test": test}
    parser.add_argument("name", choices=list(checks))
    parser.add_argument(
        "--world-sizes", type=world_sizes, default="1,2,4", metavar="N,N", help="default: 1,2,4"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="faults, gpu: only those whose name contains TEXT",
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="test: also how well scores below X are found"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="soak: how long (default: 60)")
    parser.add_argument(
        "--ranks",
        type=rank_range,
        default="1-4",
        metavar="N-N",
        help="soak: processes (default: 1-4)",
    )
    parser.add_argument("--seed", type=int, help="soak: of the faults (default: drawn)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds per launch (default: 600)"
    )
    parser.set_defaults(cpu=True)
    options, options.arguments = parser.parse_known_args()  # the rest is for train.py
    try:
        if options.name not in ("trace", "test"):
            train.read_config(options.arguments)
        passed = checks[options.name](options)
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
