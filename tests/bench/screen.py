"""Every pair of nodes predicted, by one model and by five: `predict.py all-pairs` in its process.

    python -m tests.bench.screen [--members 5] [--json FILE] [section.key=value ...]

The options name tables and model. The members are trained for one epoch each, which is not
measured; a prediction is measured from the command to its end, by one process.
"""

import argparse
import dataclasses
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from config import Config
from errors import UserError
from tests.bench import report
from tests.tools.runs import ROOT
from train import read_config


def configuration(arguments: list[str]) -> Config:
    """Returns the configuration of train.py's arguments.

    Paths of tables are absolute; raises `UserError`.
    """
    config = read_config(arguments)
    paths = {}
    for name in ("edges", "perturbations", "features"):
        path = getattr(config.data, name)
        if path:
            paths[name] = str(Path(path).resolve())
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **paths))


def run(script: str, arguments: list[str], folder: Path) -> float:
    """Returns the seconds that a script of the template takes, in `folder`."""
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / script), *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def predict(runs: list[str], folder: Path) -> dict:
    """Returns a row of the table, for the models of these runs together."""
    seconds = run("predict.py", ["all-pairs", *runs], folder)
    written = folder / "all-pairs.predictions.tsv"
    with written.open() as file:
        pairs = sum(1 for _ in file) - 1
    megabytes = written.stat().st_size / 2**20
    return {
        "models": len(runs),
        "pairs": pairs,
        "s": seconds,
        "pairs per s": pairs / seconds,
        "MB": megabytes,
    }


def main() -> None:
    # So that SIGTERM ends the command, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the table to this file"
    )
    options, overrides = parser.parse_known_args()
    try:
        config = configuration(overrides)
    except UserError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
        runs = []
        for seed in range(options.members):
            member = ["run.dir=runs", f"run.name={seed}", f"run.seed={seed}"]
            run("train.py", ["--config", "config.yaml", "optim.epochs=1", *member], folder)
            runs.append(f"runs/{seed}")
        rows = [predict(runs[:1], folder), predict(runs, folder)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report({"All pairs of nodes": rows}, device, options.json)


if __name__ == "__main__":
    main()
