"""Compares training steps that compute only the states that change with steps that compute all.

    python -m tests.bench.routes [--json FILE] [section.key=value ...]

The options select the tables and the model, such as data.edges=edges.tsv. Without options, the
presets `small` and `expression` are measured. Each route sets model.message_passing and, if
model.readout is not `nodes`, also model.readout.

A step builds the first batch of training rows, plans it on the host if the route needs a plan, and
runs the forward pass, the backward pass and the optimiser. The routes are called in turn.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch_geometric.data import Data

import data
from config import Config, load_config
from data_tables import Tables
from task import KnockoutTask
from tests.bench import in_turn, report
from tests.bench.synthetic import PRESETS, synthetic_tables, write

CONTESTANTS = {  # model.message_passing and model.readout of each route
    "shared": ("shared", "both"),
    "reach": ("reach", "both"),
    "readout=local": ("auto", "local"),
}
OF_PROFILES = {
    "shared, readout=nodes": ("shared", "nodes"),
    "reach, readout=nodes": ("reach", "nodes"),
}
OPTIONS_OF_PRESETS = {"small": [], "expression": ["model.readout=nodes", "data.batch_size=64"]}


class Step:
    """A training step with a route. Each call uses the same rows."""

    def __init__(self, config: Config, tables: Tables, device: torch.device):
        torch.manual_seed(0)
        self.device = device
        self.task = KnockoutTask.from_tables(tables, config, device)
        self.model = self.task.build_model().to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.rows = tables.rows("train")[: config.data.batch_size].tolist()

    def planned(self) -> Data:
        return self.task.dataset.__getitems__(self.rows)

    def __call__(self) -> None:
        batch = self.planned().to(self.device)
        batch.seed = torch.zeros((), dtype=torch.long, device=self.device)
        losses = self.task.loss(self.model(self.task.graph, batch), batch)  # one for each score
        loss = losses.sum() / len(self.rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(name: str, overrides: list[str], repeats: int, device: torch.device) -> list[dict]:
    """Returns a row for each route, on the tables that the options select."""
    config = load_config(overrides=overrides)
    tables = data.load(config.data)
    contestants = OF_PROFILES if config.model.readout == "nodes" else CONTESTANTS
    steps = {}
    for route, (message_passing, readout) in contestants.items():
        model = replace(config.model, message_passing=message_passing, readout=readout)
        steps[route] = Step(replace(config, model=model), tables, device)
    times = in_turn(steps, device, dict.fromkeys(steps, repeats))
    batches = {f"{route}, batch": step.planned for route, step in steps.items()}
    times |= in_turn(batches, device, dict.fromkeys(batches, repeats))
    reference = next(iter(steps))
    rows = []
    for route, step in steps.items():
        num_samples = len(step.rows)
        rows.append(
            {
                "tables": f"{name}, {config.model.layers} layers, B={num_samples}",
                "step": route,
                "ms per sample": times[route] / num_samples,
                "building and planning the batch": times[f"{route}, batch"] / num_samples,
                "speed-up": times[reference] / times[route],
                "route": step.task.route,
            }
        )
    return rows


def of_presets(repeats: int, device: torch.device) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for preset, overrides in OPTIONS_OF_PRESETS.items():
            written = write(synthetic_tables(PRESETS[preset]), Path(folder, preset))
            options = [*written, f"data.cache_dir={folder}/cache", *overrides]
            rows += measure(preset, options, repeats, device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the table to this file"
    )
    options, overrides = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if overrides:
        rows = measure("given", overrides, options.repeats, device)
    else:
        rows = of_presets(options.repeats, device)
    report({"Training step by route": rows}, device, options.json)


if __name__ == "__main__":
    main()
