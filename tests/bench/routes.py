"""A training step that computes only the states that a knock-out changes, against one with all.

    python -m tests.bench.routes [--json FILE] [section.key=value ...]

The options name tables and model, such as data.edges=edges.tsv; the routes set
model.message_passing and, unless it is `nodes`, model.readout. Without any, the presets `small` and
`expression` are measured. A step builds its batch, plans it on the host where the route needs that,
and does forward, backward and optimiser, for the first batch of training rows. The routes are
called in turn.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

import baseline
import config
import data
import train
from mask import SharedGraph
from tables import Tables
from tests.bench import in_turn, report
from tests.bench.synthetic import PRESETS, synthetic_tables, write

CONTESTANTS = {  # (model.message_passing, model.readout)
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
    """One training step of a route, on the same rows each time."""

    def __init__(self, config: config.Config, tables: Tables, graph: SharedGraph):
        torch.manual_seed(0)
        baseline = baseline.load_baseline(
            tables, tables.fingerprint(), config.data, config.optim.loss
        )
        self.model = train.build_model(config, tables, baseline).to(graph.device).train()
        self.dataset, self.note = train.make_dataset(config, tables, graph)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.graph, self.rows = graph, tables.rows("train")[: config.data.batch_size].tolist()

    def planned(self) -> data.Data:
        return self.dataset.__getitems__(self.rows)

    def __call__(self) -> None:
        batch = self.planned().to(self.graph.device)
        batch.seed = torch.zeros((), dtype=torch.long, device=self.graph.device)
        loss = train.criterion(self.model(self.graph, batch), batch, self.model) / len(self.rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(name: str, overrides: list[str], repeats: int, device: torch.device) -> list[dict]:
    """Returns a row for each route on the tables that the options name."""
    config = config.load_config(SimpleNamespace(config=None, overrides=overrides, checkpoint=None))
    tables = data.load(config.data)
    graph = SharedGraph(tables.graph()).to(device)
    contestants = OF_PROFILES if config.model.readout == "nodes" else CONTESTANTS
    steps = {}
    for route, (message_passing, readout) in contestants.items():
        model = replace(config.model, message_passing=message_passing, readout=readout)
        steps[route] = Step(replace(config, model=model), tables, graph)
    times = in_turn(steps, device, dict.fromkeys(steps, repeats))
    batches = {f"{route}, batch": step.planned for route, step in steps.items()}
    times |= in_turn(batches, device, dict.fromkeys(batches, repeats))
    return [
        {
            "tables": f"{name}, {config.model.layers} layers, B={len(step.rows)}",
            "step": route,
            "ms per sample": times[route] / len(step.rows),
            "building and planning the batch": times[f"{route}, batch"] / len(step.rows),
            "speed-up": times[next(iter(steps))] / times[route],
            "route": step.note,
        }
        for route, step in steps.items()
    ]


def of_presets(repeats: int, device: torch.device) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for preset, overrides in OPTIONS_OF_PRESETS.items():
            written = write(synthetic_tables(PRESETS[preset]), Path(folder, preset))
            rows += measure(
                preset, [*written, f"data.cache_dir={folder}/cache", *overrides], repeats, device
            )
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
    rows = (
        measure("given", overrides, options.repeats, device)
        if overrides
        else of_presets(options.repeats, device)
    )
    report({"Training step by route": rows}, device, options.json)


if __name__ == "__main__":
    main()
