"""Predicts the rows of a table with one trained run, or with several as an ensemble.

    python predict.py TABLE RUN... [--config FILE] [section.key=value ...]
    torchrun --standalone --nproc_per_node=4 predict.py TABLE RUN...

TABLE has a header that begins with `genes` (or `nodes`), or is `all-singles` or `all-pairs`, of the
graph's nodes, or these at a level: `all-singles=0.3`. A RUN is a run folder, of which best.pt
predicts, or a checkpoint file. The run's graph.pt is all else that is needed, so that a run can be
moved. Options are those of the training unless the command line says otherwise, as far as they do
not change what is predicted. `<table>.predictions.tsv` in the working folder gets a line for each
row, in order; rows with unknown nodes get empty cells. Of several runs, that is the mean of their
predictions, and beside it their standard deviation, `sd`. From Python, use `Predictor`.
"""

import contextlib
import logging
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

# As in train.py.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import numpy as np
import torch
from torch import Tensor

from checkpoint import explain_write_errors, load_model, read_checkpoint, read_graph
from config import Config, Parser, load_config, log_to_console, run_command
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from mask import SharedGraph
from names import nearly_nodes, some_names
from rows import Rows, read_header, read_rows, split_level
from tables import Tables, pack
from task import KnockoutTask, predict_rows, table_lines

log = logging.getLogger("predict")
SET_SIZES = {"all-singles": 1, "all-pairs": 2}
SETS_AT_ONCE = 100_000
IGNORED = ("run.", "data.", "checkpoint.", "log.")  # options of which only data.batch_size counts


@dataclass
class Run:
    """A trained run."""

    checkpoint: dict[str, Any]
    config: Config
    graph: dict[str, Any]  # what its graph.pt holds

    @property
    def file(self) -> str:
        return self.checkpoint["file"]


@dataclass
class Settings:
    """What the command line says."""

    table: str
    runs: list[Run]

    @property
    def ddp(self) -> DDPConfig:
        return self.runs[0].config.ddp


def main() -> None:
    log_to_console()
    run_command(read_settings, predict)


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Returns the settings of the command line; raises `UserError`."""
    parser = Parser(__doc__)
    parser.add_argument("table", metavar="TABLE")
    parser.add_argument("words", nargs="+", metavar="RUN", help="and section.key=value ...")
    parsed = parser.parse_intermixed_args(arguments)
    overrides = [word for word in parsed.words if re.match(r"\w+\.\w+=", word)]
    runs = [word for word in parsed.words if word not in overrides]
    if not runs:
        raise UserError("no run is named: python predict.py TABLE RUN...")
    for override in overrides:
        if override.startswith(IGNORED) and not override.startswith("data.batch_size="):
            raise UserError(
                f"{override} changes no prediction, as checkpoint and graph.pt are all it needs"
            )
    return Settings(parsed.table, [read_run(run, parsed.config, overrides) for run in runs])


def read_run(run: str | Path, config: str | None = None, overrides: Sequence[str] = ()) -> Run:
    """Returns a run, given its folder, of which best.pt predicts, or a checkpoint file.

    Its options are its own, overridden by those of a file and of `overrides`. Raises `UserError`.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "checkpoints" / "best.pt"
    checkpoint = read_checkpoint(path)
    lacking = {"graph", "basis"} - checkpoint.keys()
    if lacking:
        raise UserError(f"{path} is of another version of the template: predict with that one")
    graph = read_graph(path)
    if graph.pop("graph") != checkpoint["graph"]:
        raise UserError(f"the graph.pt of {path} is of another graph: copy that of its run folder")
    options = load_config(config, overrides, checkpoint["config"], checkpoint["file"])
    return Run(checkpoint, options, graph)


def predict(settings: Settings, env: Distributed) -> None:
    """Writes a prediction for each row of the table, in order; raises `UserError` on every rank."""
    with env.sync_errors():
        predictor = Predictor.of_ranks(settings.runs, env)
    columns = predictor.columns()
    digits = predictor.digits()
    name = Path(settings.table).name.removesuffix(".gz").removesuffix(".tsv")
    output = Path(f"{name}.predictions.tsv")
    temporary = Path(f"{output}.{uuid.uuid4().hex}.tmp")
    chunks = read_sets(settings.table, predictor.tables)
    num_rows = 0
    num_predicted = 0
    unknown = {}  # names, in their order
    try:
        append_lines(temporary, ["\t".join(["genes", *columns]) + "\n"], output, env)
        while True:
            with env.sync_errors():
                chunk = next(chunks, None)
            if chunk is None:
                break
            cells = torch.full((len(chunk.sets), len(columns)), math.nan, dtype=torch.float64)
            cells[chunk.is_known] = torch.stack(predictor(chunk.samples), dim=2).flatten(1)
            append_lines(temporary, table_lines(iter(chunk.sets), cells, digits), output, env)
            num_rows += len(chunk.sets)
            num_predicted += len(chunk.samples.y)
            unknown |= dict.fromkeys(chunk.unknown)
        with env.sync_errors(), explain_errors(output):
            if env.rank == 0:
                os.replace(temporary, output)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    if unknown:
        missing = f"{num_rows - num_predicted} rows have no prediction"
        log.warning(f"{missing}: {unknown_nodes(list(unknown), predictor.tables)}")
    log.info(f"{num_predicted} predictions written to {output}")


def unknown_nodes(names: Sequence[str], tables: Tables) -> str:
    """Returns a sentence that names up to ten nodes that the graph does not have."""
    near = nearly_nodes(names, tables.genes)
    return f"{len(names)} nodes are not in the graph: {some_names(names, near)}"


def append_lines(path: Path, lines: Iterable[str], output: Path, env: Distributed) -> None:
    """Appends lines to the file that will be `output`, on rank 0; raises `UserError` on all."""
    with env.sync_errors(), explain_errors(output):
        if env.rank == 0:
            with path.open("a") as file:
                file.writelines(lines)


def explain_errors(output: Path) -> AbstractContextManager:
    """Turns a failure to write the predictions into a `UserError`."""
    return explain_write_errors(output, UserError, "change the working folder")


class Prediction(NamedTuple):
    """What is predicted of n sets of knock-outs, in the units of the T scores."""

    mean: np.ndarray  # float64 [n, T]; of binary scores, the probability of 1; nan if not known
    sd: np.ndarray | None  # float64 [n, T], the standard deviation over several runs
    targets: list[str]  # name of each score


class Predictor:
    """Trained models that predict sets of knock-outs: of one run, or of several as an ensemble.

        predictor = Predictor("runs/a", "runs/b")
        mean, sd, targets = predictor.predict(["YAL001C,YBR002W=0.3", ""])

    A run is its folder, of which best.pt predicts, or a checkpoint file; its graph.pt is all else
    that it needs. Several must be of the same graph, scores and loss.

    Args:
        runs: folders or checkpoint files.
        device: where the models predict, such as "cpu"; by default a GPU, if there is one.

    Raises:
        UserError: a run cannot be read, or does not go with the first.
    """

    def __init__(self, *runs: str | Path, device: torch.device | str | None = None):
        if not runs:
            raise UserError("no run is named: Predictor('runs/NAME')")
        env = Distributed(DDPConfig())
        env.is_distributed = False
        env.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._load([read_run(run) for run in runs], env)

    @classmethod
    def of_ranks(cls, runs: list[Run], env: Distributed) -> "Predictor":
        """Returns the predictor of the ranks of `env`, which share the rows of each call."""
        predictor = cls.__new__(cls)
        predictor._load(runs, env)
        return predictor

    def _load(self, runs: list[Run], env: Distributed) -> None:
        first = runs[0]
        for run in runs[1:]:
            check_same(first, run)
        self.env = env
        self.tables = Tables.of_graph(first.graph)
        graph = SharedGraph(self.tables.graph()).to(env.device, first.config.optim.dtype)
        self.tasks = []
        self.models = []
        for run in runs:
            task = KnockoutTask.of_run(run.config, run.checkpoint, self.tables, graph)
            model = task.build_model()
            load_model(model, run.checkpoint)
            self.tasks.append(task)
            self.models.append(model.to(env.device, run.config.optim.dtype))
        self.is_planned = False

    @property
    def targets(self) -> list[str]:
        """The name of each score."""
        return list(self.tables.targets)

    def columns(self) -> list[str]:
        """Returns the names of what is predicted."""
        is_ensemble = len(self.models) > 1
        if len(self.targets) == 1:
            return ["prediction", "sd"] if is_ensemble else ["prediction"]
        if not is_ensemble:
            return self.targets
        return [column for name in self.targets for column in (name, f"{name}_sd")]

    def digits(self) -> Tensor:
        """Returns how many significant digits each column is written with, long [C]."""
        columns_of_target = len(self.columns()) // len(self.targets)
        return self.tasks[0].digits().repeat_interleave(columns_of_target)

    def predict(
        self,
        sets: Sequence[str],
        unknown: Literal["raise", "nan"] = "raise",
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> Prediction:
        """Predicts sets of knock-outs, each a text as in the column `genes` of a table.

        `"A,B=0.3"` deletes node A and keeps 0.3 of what B sends; `""` is an intact sample.

        Args:
            sets: n texts.
            unknown: what becomes of a set with a node that the graph does not have.
            columns: further columns of the table, for a dataset that reads some, n cells each.

        Raises:
            UserError: a text names no set, or, for `unknown="raise"`, an unknown node.
        """
        if isinstance(sets, str):
            raise UserError(f"{sets!r:.60} is one text: predict takes a list of them")
        mean = np.full((len(sets), len(self.targets)), math.nan)
        sd = mean.copy() if len(self.models) > 1 else None
        for first in range(0, len(sets), SETS_AT_ONCE):
            last = min(first + SETS_AT_ONCE, len(sets))
            cells = {"genes": list(sets[first:last])}
            for name, column in (columns or {}).items():
                cells[name] = list(column[first:last])
            rows = Rows("sets", range(first, last), cells)
            chunk = chunk_of(rows, self.tables)
            if chunk.unknown and unknown == "raise":
                raise UserError(unknown_nodes(chunk.unknown, self.tables))
            is_known = np.flatnonzero(chunk.is_known.numpy()) + first
            parts = self(chunk.samples)
            mean[is_known] = parts[0].numpy()
            if sd is not None:
                sd[is_known] = parts[1].numpy()
        return Prediction(mean, sd, self.targets)

    def __call__(self, samples: Tables) -> list[Tensor]:
        """Returns the mean of the models' predictions and, of several, the standard deviation.

        They are float64 [n, T], of n samples on the graph `self.tables`, the same on every rank.
        """
        if len(samples.y) and not self.is_planned:
            self.tasks = [task.planned_for(samples) for task in self.tasks]
            self.is_planned = True
        rows = torch.arange(len(samples.y))
        predictions = []
        for task, model in zip(self.tasks, self.models, strict=True):
            predictions.append(predict_rows(model, task.with_samples(samples), rows, self.env))
        if len(predictions) == 1:
            return predictions
        std, mean = torch.std_mean(torch.stack(predictions), dim=0)
        return [mean, std]


def check_same(first: Run, run: Run) -> None:
    """Raises `UserError` if two runs do not predict the same scores on the same graph."""
    if list(run.graph["targets"]) != list(first.graph["targets"]):
        raise UserError(f"{run.file} has other scores than {first.file}")
    if run.checkpoint["graph"] != first.checkpoint["graph"]:
        raise UserError(f"{run.file} was trained on another graph than {first.file}")
    loss = run.config.optim.loss
    if loss != first.config.optim.loss:
        raise UserError(
            f"{run.file} was trained with optim.loss={loss}, {first.file} with "
            f"{first.config.optim.loss}"
        )


# ---- Tables to predict ---------------------------------------------------------------------------
@dataclass
class Chunk:
    """Some consecutive rows of a table to predict."""

    sets: Sequence[str]  # their cells of the column `genes`
    is_known: Tensor  # which of them have only nodes of the graph, bool [n]
    samples: Tables  # these, on the graph
    unknown: list[str]  # names that are no nodes of the graph, each once


def read_sets(path: str, tables: Tables) -> Iterator[Chunk]:
    """Yields the rows of a table, some at once, with `tables` as their graph.

    Raises `DataError`.
    """
    kind, _, _ = path.partition("=")
    if kind in SET_SIZES:
        _, level = split_level(path, node_names=())
        if math.isnan(level):
            raise UserError(f"{path} has no level from 0 to 10,000")
        yield from all_sets(tables, SET_SIZES[kind], level)
        return
    notes = []
    header = read_header(path, notes, ("genes",))
    for rows in read_rows(path, header, skip_blank=False):
        for note in notes:
            log.warning(f"note      {note}")
        notes.clear()  # each once, and after an error none
        yield chunk_of(rows, tables)


def chunk_of(rows: Rows, tables: Tables) -> Chunk:
    """Returns rows of a table to predict, with `tables` as their graph.

    Whatever else a batch is made of must be read here, too. Raises `DataError`.
    """
    node_number = {gene: node for node, gene in enumerate(tables.genes)}
    row, name, names, level = rows.sets(node_number)
    numbers = [node_number.get(name, -1) for name in names]
    node = torch.tensor(numbers, dtype=torch.long)[name]
    is_known = torch.ones(len(rows.lines), dtype=torch.bool)
    is_known[row[node < 0]] = False
    num_known = int(is_known.sum())
    number_of_row = is_known.cumsum(0) - 1
    chosen = is_known[row]
    samples = make_samples(
        tables, number_of_row[row[chosen]], node[chosen], level[chosen], num_known
    )
    unknown = [name for name in names if name not in node_number]
    return Chunk(rows.cells["genes"], is_known, samples, unknown)


def all_sets(tables: Tables, size: int, level: float) -> Iterator[Chunk]:
    """Yields all sets of `size` nodes, each at the level, some at once."""
    num_nodes = len(tables.genes)
    level_of_each = torch.full((num_nodes,), level, dtype=torch.float64)
    names = list(tables.names(torch.arange(num_nodes), level_of_each))
    sets = combinations(range(num_nodes), size)
    while some_sets := list(islice(sets, 100_000)):
        nodes = torch.tensor(some_sets)
        row = torch.arange(len(nodes)).repeat_interleave(size)
        levels = torch.full((nodes.numel(),), level, dtype=torch.float64)
        samples = make_samples(tables, row, nodes.flatten(), levels, len(nodes))
        cells = [",".join(names[node] for node in one_set) for one_set in some_sets]
        yield Chunk(cells, torch.ones(len(nodes), dtype=torch.bool), samples, [])


def make_samples(tables: Tables, row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> Tables:
    """Returns rows without scores on the graph of `tables`, given those of each perturbed node."""
    y = tables.y.new_full((num_rows, len(tables.targets)), math.nan)
    perturbations = pack(row, node, level, num_rows)
    return replace(tables, **perturbations, y=y, split=None, weight=None, sd=None)


if __name__ == "__main__":
    main()
