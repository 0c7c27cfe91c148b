"""Predicts the rows of a table with one trained run, or with several as an ensemble.

    python predict.py TABLE RUN... [--config FILE] [section.key=value ...]
    torchrun --standalone --nproc_per_node=4 predict.py TABLE RUN...

TABLE has a header that begins with `genes` (or `nodes`), or is `all-singles` or `all-pairs`, of the
graph's nodes, or these at a level: `all-singles=0.3`. A RUN is a run folder, of which best.pt
predicts, or a checkpoint file. Its options and tables are those that it was trained with, unless
the command line says otherwise. `<table>.predictions.tsv` in the working folder gets a line for
each row, in order; rows with unknown nodes get empty cells. Of several runs, that is the mean of
their predictions, and beside it their standard deviation, `sd`.
"""

import contextlib
import logging
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

# As in train.py.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import torch
from torch import Tensor, nn

from checkpoint import explain_write_errors, load_model, read_checkpoint
from config import Config, Parser, load_config, log_to_console, run_command
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from names import nearly_nodes, some_names
from rows import read_header, read_rows, split_level
from tables import Tables, pack
from task import KnockoutTask, predict_rows, table_lines

log = logging.getLogger("predict")
SET_SIZES = {"all-singles": 1, "all-pairs": 2}


@dataclass
class Settings:
    """What the command line says."""

    table: str
    checkpoints: list[dict[str, Any]]
    configs: list[Config]  # one for each checkpoint

    @property
    def ddp(self) -> DDPConfig:
        return self.configs[0].ddp


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
    checkpoints = []
    configs = []
    for run in runs:
        path = Path(run)
        if path.is_dir():
            path = path / "checkpoints" / "best.pt"
        checkpoint = read_checkpoint(path)
        saved = checkpoint["config"]
        checkpoints.append(checkpoint)
        configs.append(load_config(parsed.config, overrides, saved, checkpoint["file"]))
    return Settings(parsed.table, checkpoints, configs)


def predict(settings: Settings, env: Distributed) -> None:
    """Writes a prediction for each row of the table, in order; raises `UserError` on every rank."""
    predictor = Predictor.load(settings.checkpoints, settings.configs, env)
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
            cells[chunk.is_known] = predictor(chunk.samples)
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
        names = some_names(list(unknown), nearly_nodes(list(unknown), predictor.tables.genes))
        log.warning(f"{missing}: {len(unknown)} nodes are not in the graph: {names}")
    log.info(f"{num_predicted} predictions written to {output}")


def append_lines(path: Path, lines: Iterable[str], output: Path, env: Distributed) -> None:
    """Appends lines to the file that will be `output`, on rank 0; raises `UserError` on all."""
    with env.sync_errors(), explain_errors(output):
        if env.rank == 0:
            with path.open("a") as file:
                file.writelines(lines)


def explain_errors(output: Path) -> AbstractContextManager:
    """Turns a failure to write the predictions into a `UserError`."""
    return explain_write_errors(output, UserError, "change the working folder")


class Predictor:
    """Trained models that predict samples of their graph: one, or an ensemble.

    Args:
        tasks: the task of each model.
        models: the models, on the device.
        env: the ranks that share the work.
    """

    def __init__(self, tasks: list[KnockoutTask], models: list[nn.Module], env: Distributed):
        self.tasks = tasks
        self.models = models
        self.env = env
        self.tables = tasks[0].tables

    @classmethod
    def load(
        cls, checkpoints: list[dict[str, Any]], configs: list[Config], env: Distributed
    ) -> "Predictor":
        """Returns the models of checkpoints, with their options.

        Raises `UserError`, on every rank, if they are not of the same tables and loss.
        """
        first = KnockoutTask.load(configs[0], env)
        tasks = []
        models = []
        with env.sync_errors():
            for checkpoint, config in zip(checkpoints, configs, strict=True):
                check_origin(checkpoint, first)
                task = first.of_run(config, checkpoint)
                model = task.build_model()
                load_model(model, checkpoint)
                tasks.append(task)
                models.append(model.to(env.device, config.optim.dtype))
        return cls(tasks, models, env)

    def columns(self) -> list[str]:
        """Returns the names of what is predicted."""
        targets = self.tables.targets
        is_ensemble = len(self.models) > 1
        if len(targets) == 1:
            return ["prediction", "sd"] if is_ensemble else ["prediction"]
        if not is_ensemble:
            return list(targets)
        return [column for name in targets for column in (name, f"{name}_sd")]

    def digits(self) -> Tensor:
        """Returns how many significant digits each column is written with, long [C]."""
        columns_of_target = len(self.columns()) // len(self.tables.targets)
        return self.tasks[0].digits().repeat_interleave(columns_of_target)

    def __call__(self, samples: Tables) -> Tensor:
        """Returns each sample's predictions, float64 [n, T], on every rank.

        Of several models, they are the means; the standard deviation follows each, [n, 2 * T].
        """
        rows = torch.arange(len(samples.y))
        predictions = []
        for task, model in zip(self.tasks, self.models, strict=True):
            predictions.append(predict_rows(model, task.with_samples(samples), rows, self.env))
        if len(predictions) == 1:
            return predictions[0]
        std, mean = torch.std_mean(torch.stack(predictions), dim=0)
        return torch.stack([mean, std], dim=2).flatten(start_dim=1)


def check_origin(checkpoint: dict[str, Any], task: KnockoutTask) -> None:
    """Raises `UserError` if a checkpoint is of other tables or another loss than the task."""
    file = checkpoint["file"]
    if checkpoint["data"] != task.fingerprint:
        raise UserError(f"{file} was trained on different data from the configuration's")
    loss = checkpoint["config"]["optim"]["loss"]
    if loss != task.config.optim.loss:
        raise UserError(f"{file} was trained with optim.loss={loss}, not {task.config.optim.loss}")


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

    Whatever else a batch is made of must be read here, too. Raises `DataError`.
    """
    kind, _, _ = path.partition("=")
    if kind in SET_SIZES:
        _, level = split_level(path, node_names=())
        if math.isnan(level):
            raise UserError(f"{path} has no level from 0 to 10,000")
        yield from all_sets(tables, SET_SIZES[kind], level)
        return
    node_number = {gene: node for node, gene in enumerate(tables.genes)}
    notes = []
    header = read_header(path, notes, ("genes",))
    for rows in read_rows(path, header, skip_blank=False):
        for note in notes:
            log.warning(f"note      {note}")
        notes.clear()  # each once, after the first error
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
        yield Chunk(rows.cells["genes"], is_known, samples, unknown)


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
