"""The benchmarks one after the other: one page of tables, each under the command that made it.

    python -m tests.bench.all --json FILE [--only TEXT] [--yeast FOLDER]

The page is printed at the end, and FILE keeps what is done: after an interruption, the same command
on the same commit goes on. It takes hours, in which the machine should be idle and the working tree
stay as it is. `--yeast` is a folder with the tables edges.tsv and digenic.tsv of real yeast,
without which those parts are left out.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import markdown
from tests.tools.runs import ROOT

YEAST = "data.edges={0}/edges.tsv data.perturbations={0}/digenic.tsv"
FOLDS = "nodes:0 nodes:1 nodes:2 nodes:3 nodes:4"
COMMANDS = {  # with the number of threads, 0: all cores
    "masks": 1,
    "step": 0,
    "routes": 1,
    f"routes data.undirected=true model.hidden=64 {YEAST}": 1,
    f"routes data.undirected=true model.hidden=64 model.layers=3 data.batch_size=64 {YEAST}": 1,
    "growth": 1,
    "host": 1,
    "program": 1,
    "screen": 0,
    f"screen model.readout=local {YEAST}": 0,
    "tables --edges 1000000": 0,
    "scaling": 1,
    "coverage": 1,
    "quality --preset small --seeds 3 --splits random:0 --models both": 1,
    "quality --preset small --splits random:0 --models permuted": 1,
    "quality --preset planted --splits random:0 --models both": 1,
    "quality --preset planted-neighbours --splits random:0 --models both": 1,
    "quality --preset planted-targets --splits random:0 --models both": 1,
    "quality --preset planted-edge --splits random:0 --models both": 1,
    "quality --preset planted-paths --splits random:0 --models both": 1,
    "quality --config tests/bench/yeast.yaml --models local --seeds 5 --splits random:0 random:1 "
    f"random:2 {YEAST}": 1,
    f"quality --config tests/bench/yeast.yaml --models local --seeds 5 --splits {FOLDS} {YEAST}": 1,
    "quality --config tests/bench/yeast.yaml --models permuted --splits random:0 nodes:0 "
    f"--seeds 5 {YEAST}": 1,
    "quality --preset network --splits nodes:0 nodes:1 nodes:2 --models both --seeds 5": 1,
    "quality --preset dose --models both --seeds 3 --splits random:0 random:1 random:2 levels:0 "
    "levels:1 levels:2": 1,
    f"quality --config tests/bench/yeast.yaml --models both --splits random:0 nodes:0 {YEAST}": 1,
    "quality --config tests/bench/expression.yaml --preset expression --splits random:0 nodes:0 "
    "--models nodes": 1,
}


def main() -> None:
    # So that SIGTERM ends the benchmark, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, required=True, help="what is measured is kept here"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only commands that contain TEXT"
    )
    parser.add_argument(
        "--yeast", metavar="FOLDER", type=Path, help="real tables (default: without them)"
    )
    options = parser.parse_args()
    yeast = options.yeast.resolve() if options.yeast else ""
    measured = {"commit": commit(), "results": {}}
    if options.json.exists():
        measured = json.loads(options.json.read_text())
    possible = [command for command in COMMANDS if yeast or YEAST not in command]
    chosen = [command for command in possible if options.only in command]
    for number, command in enumerate(chosen, 1):
        if command in measured["results"]:
            continue
        if measured["commit"] != commit():
            was = measured["commit"]
            sys.exit(f"{options.json} is of commit {was}, the working tree is {commit()}")
        print(f"{number} of {len(chosen)}: {command}", file=sys.stderr, flush=True)
        measured["results"][command] = measure(command.format(yeast), COMMANDS[command])
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    print_page(measured)


def print_page(measured: dict) -> None:
    print(f"Commit {measured['commit']}, Python {platform.python_version()}.")
    for command in COMMANDS:
        if command not in measured["results"]:
            continue
        result = measured["results"][command]
        threads = f"OMP_NUM_THREADS={COMMANDS[command]} " if COMMANDS[command] else ""
        shown = f"{threads}python -m tests.bench.{command.format('yeast')}"
        print(f"\n`{shown}`: {result['minutes']:.0f} minutes on {result['machine']}")
        for title, rows in result["tables"].items():
            if not title.startswith("Each split"):
                print(f"\n{title}\n\n{markdown(rows)}")


def measure(command: str, num_threads: int) -> dict:
    """Returns the machine, the tables that a benchmark writes and its time; exits if it fails."""
    name, *arguments = command.split()
    environment = dict(os.environ)
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tables.json")
        shell = [sys.executable, "-m", f"tests.bench.{name}", *arguments, "--json", str(path)]
        process = subprocess.Popen(shell, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        try:
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
        if status:
            sys.exit(f"tests.bench.{command} ended with exit status {status}")
        return {"minutes": (time.perf_counter() - start) / 60, **json.loads(path.read_text())}


def commit() -> str:
    """Returns the commit of the working tree, which ends with -dirty if it differs."""
    command = ["git", "describe", "--always", "--dirty"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return process.stdout.strip()


if __name__ == "__main__":
    main()
