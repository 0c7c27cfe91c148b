"""All benchmarks one after the other, as one page of Markdown tables, each under the command that made it.

    python -m tests.bench.all --json FILE [--only TEXT] [--yeast FOLDER]

The page is printed at the end, and FILE keeps what is done: after an interruption, the same command on the same commit
goes on. It takes hours, in which the machine should be idle. `--yeast` is a folder with the tables edges.tsv
and digenic.tsv of real yeast, without which those parts are left out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.bench import machine, markdown
from tests.tools.runs import ROOT

YEAST = "data.edges={0}/edges.tsv data.perturbations={0}/digenic.tsv"
COMMANDS = {  # with the number of threads, 0: all cores
    "masks": 1,
    "step": 0,
    "routes": 1,
    f"routes data.undirected=true model.hidden=64 {YEAST}": 1,
    f"routes data.undirected=true model.hidden=64 model.layers=3 data.batch_size=64 {YEAST}": 1,
    "growth": 1,
    "host": 1,
    "program": 0,
    "screen": 0,
    f"screen model.readout=local {YEAST}": 0,
    "tables --edges 1000000": 0,
    "scaling": 1,
    "quality --preset small --seeds 3 --splits random:0 --models both": 1,
    f"quality --config tests/bench/yeast.yaml --models local --seeds 5 {YEAST}": 1,
    f"quality --config tests/bench/yeast.yaml --models permuted --splits random:0 nodes:0 {YEAST}": 1,
    "quality --preset network --splits nodes:0 nodes:1 nodes:2 --models local both --seeds 3": 1,
    "quality --config tests/bench/expression.yaml --preset expression --splits random:0 nodes:0 --models nodes": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="what is measured is kept here")
    parser.add_argument("--only", default="", metavar="TEXT", help="only commands that contain TEXT")
    parser.add_argument("--yeast", metavar="FOLDER", type=Path, help="real tables (default: without them)")
    options = parser.parse_args()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    yeast = options.yeast.resolve() if options.yeast else ""
    measured = json.loads(options.json.read_text()) if options.json.exists() else {}
    if measured.get("commit") != commit.strip():
        measured = {"commit": commit.strip(), "machine": machine(torch.device("cpu")), "results": {}}
    chosen = [command for command in COMMANDS if options.only in command and (options.yeast or YEAST not in command)]
    for number, command in enumerate(chosen, 1):
        if command not in measured["results"]:
            print(f"{number} of {len(chosen)}: {command}", file=sys.stderr, flush=True)
            measured["results"][command] = measure(command.format(yeast), COMMANDS[command])
            options.json.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"Commit {measured['commit']}, {measured['machine']}, Python {platform.python_version()}.")
    for command, result in measured["results"].items():
        threads = f"OMP_NUM_THREADS={COMMANDS[command]} " if COMMANDS[command] else ""
        shown = command.format("yeast")
        print(f"\n```bash\n{threads}python -m tests.bench.{shown}    # {result['minutes']:.0f} minutes\n```")
        for title, rows in result["tables"].items():
            if not title.startswith("Each split"):
                print(f"\n{title}\n\n{markdown(rows)}")


def measure(command: str, num_threads: int) -> dict:
    """Returns the tables that a benchmark writes, and how long it takes; exits if it fails."""
    name, *arguments = command.split()
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(num_threads)} if num_threads else {})}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tables.json")
        shell = [sys.executable, "-m", f"tests.bench.{name}", *arguments, "--json", str(path)]
        status = subprocess.run(shell, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode
        if status:
            sys.exit(f"tests.bench.{command} ended with exit status {status}")
        tables = json.loads(path.read_text())["tables"]
    return {"minutes": (time.perf_counter() - start) / 60, "tables": tables}


if __name__ == "__main__":
    main()
