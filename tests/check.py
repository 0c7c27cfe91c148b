"""Checks a copy of the template that you have edited: its model, tables and options.

    python -m tests.check NAME [--config FILE] [section.key=value ...]

Each check except trace prints its findings and PASS or FAIL. The exit status is 0 for PASS, 1 for
FAIL, and 2 if the check could not run. `python -m tests.check NAME --help` describes one check.

parity    trains your model for a few steps on 1, 2 and 4 processes, with and without gradient
          accumulation, on the CPU in double precision. Parameters and metrics must agree.
faults    causes faults in runs of your model, mostly on 2 CPU processes: kills, signals, hangs,
          damaged checkpoints and more. It then restarts each run, whose result must be the same as
          the result of an undisturbed run, bit for bit if the number of processes is the same.
          (--only TEXT: only faults whose name contains TEXT)
devices   checks the device of every parameter, buffer, gradient, optimiser state, batch field and
          output of a training step, on all GPUs of this machine. It lists the tensors that are on a
          wrong device.
syncs     lists the file and line of every operation in ten steps of your model that makes the host
          wait for the GPU
rows      finds the rows that cause a step that is not finite. Give it the same options as the run.
          It prints the rows whose loss is not finite with the model of the newest checkpoint. If
          there are none, it prints the five training rows with the largest losses.
trace     shows how the steps that log.profile_steps traced spent their time:
          python -m tests.check trace RUN_FOLDER
"""

import argparse
import importlib
import logging
import re
import signal
import sys
from pathlib import Path

from errors import UserError
from tests.tools.audits import audit_worker, devices, syncs
from tests.tools.diagnose import rows, trace
from tests.tools.faults import fault_worker, faults
from tests.tools.parity import parity, parity_worker
from train import read_config

# Functions that a check runs on every rank, in processes that it launches.
WORKERS = {
    "parity-worker": parity_worker,
    "fault-worker": fault_worker,
    "audit-worker": audit_worker,
}


CHECKS = {
    "parity": parity,
    "faults": faults,
    "devices": devices,
    "syncs": syncs,
    "rows": rows,
    "trace": trace,
}
# A folder of tests may add checks in a module `checks`, whose docstring describes these checks.
FURTHER = [
    importlib.import_module(f"tests.{path.parent.name}.checks")
    for path in sorted(Path(__file__).parent.glob("*/checks.py"))
]
for module in FURTHER:
    CHECKS |= module.CHECKS


def world_sizes(text: str) -> list[int]:
    """Returns the numbers in a text such as `1,2,4`; raises `ValueError` if a number is below 1."""
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


def parse_arguments() -> argparse.Namespace:
    """Returns the options of a check. Its attribute `arguments` are the options of train.py."""
    description = "".join([__doc__, *(module.__doc__ for module in FURTHER)])
    for name in CHECKS.keys() & set(sys.argv[1:2]):
        of_check = re.search(rf"^{name}  .*(\n  .*)*", description, re.M)
        description = of_check[0] if of_check else description
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(CHECKS), help="the check to run")
    parser.add_argument(
        "--world-sizes",
        type=world_sizes,
        default="1,2,4",
        metavar="N,N",
        help="parity: numbers of processes (default: 1,2,4)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="run only the cases whose name contains TEXT",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="largest duration of a launch in seconds (default: 600)",
    )
    parser.set_defaults(cpu=True)
    options, arguments = parser.parse_known_args()
    options.arguments = arguments
    return options


def exit_on_sigterm(number: int, frame: object) -> None:
    """Exits with an exception, so that folders and processes are cleaned up."""
    sys.exit(128 + number)


def work(name: str, arguments: list[str]) -> None:
    """Runs the worker of a check on this rank."""
    if name != "fault-worker":  # the fault worker prints the log of a complete run
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    worker = WORKERS[name]
    worker(arguments[0], arguments[1:])


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in WORKERS:
        work(sys.argv[1], sys.argv[2:])
        return
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    options = parse_arguments()
    try:
        if options.name != "trace":
            read_config(options.arguments)
        passed = CHECKS[options.name](options)
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
