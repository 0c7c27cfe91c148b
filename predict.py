"""Predicts the rows of a table with one trained run, or with several runs as an ensemble.

    python predict.py TABLE RUN... [section.key=value ...]
    torchrun --standalone --nproc_per_node=4 predict.py TABLE RUN...

for example

    python predict.py pairs.tsv runs/a runs/b          writes pairs.predictions.tsv
    python predict.py pairs.tsv runs/a --parts         also writes the terms of each prediction
    python predict.py pairs.tsv runs/a --explain 10    writes pairs.explained.tsv
    python predict.py all-pairs runs/a --rows 0:1000000

TABLE is a table whose header starts with `genes` (or `nodes`). It can also be `all-singles` or
`all-pairs`: all nodes of the graph, or all pairs of nodes, are deleted or, as in `all-singles=0.3`,
have this level.

RUN is a run folder, whose best.pt is used, or a checkpoint file. Besides the checkpoint, only the
graph.pt of the run is needed, so you can move the run folder. Options have the values of the
training; the command line can change a few of them, such as data.batch_size.

The output `<table>.predictions.tsv` in the working directory has a line for each row, in the same
order. Rows with unknown nodes have empty cells. For several runs, it has the mean of their
predictions and, next to it, their standard deviation, `sd`. From Python, use `Predictor`.
"""

import hashlib
import logging
import math
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# See train.py.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # raised when PyG is imported

import torch

from config import Parser, expand_path, run_command
from data import file_digest
from ddp_ends import end_process
from ddp_setup import DDPConfig, Distributed, library_versions
from errors import UserError
from parts import optional
from predict_tables import (
    BEYOND,
    Chunk,
    Survey,
    is_beyond,
    read_sets,
    screen,
    survey_sets,
    table_writer,
    unknown_nodes,
)
from predictor import Ensemble, Run, explainer_of, read_run
from predictor import Predictor as Predictor  # so that it can be imported from here
from run_progress import progress_bar
from run_results import table_lines

log = logging.getLogger("predict")
CELLS_AT_ONCE = 2**24
# The options that the command line may set. All others are those of the training.
OPTIONS = (
    "data.batch_size",
    "model.message_passing",
    "ddp.startup_timeout_s",
    "ddp.timeout_s",
)


@dataclass
class Settings:
    """The settings of a command line."""

    table: str
    runs: list[Run]
    parts: bool = False
    explain: int = 0  # largest number of nodes and pairs to list for each prediction
    rows: tuple[int, int] = (0, sys.maxsize)  # first row, and the row after the last

    @property
    def ddp(self) -> DDPConfig:
        # Not the device_ids of the training, which may have been on a different machine.
        return replace(self.runs[0].config.ddp, device_ids=[])

    def output(self, kind: str) -> Path:
        """Returns the name of the output file, which is in the working directory."""
        name = Path(self.table).name.removesuffix(".gz").removesuffix(".tsv")
        first, last = self.rows
        if (first, last) != (0, sys.maxsize):
            name += f".{first}-" if last == sys.maxsize else f".{first}-{last}"
        return Path(f"{name}.{kind}.tsv")

    def hashes(self) -> dict[str, str]:
        """Returns hashes of the table and of the models, to compare ranks; raises `UserError`."""
        size, _ = screen(self.table)
        of_table = self.table if size else file_digest(self.table)
        of_models = hashlib.sha256()
        for run in self.runs:
            for tensor in run.checkpoint["model"].values():
                of_models.update(tensor.flatten().view(torch.uint8).numpy())
        return {"TABLE (hash)": of_table, "RUN (hash)": of_models.hexdigest()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts as the command line says; returns the exit status.

    `arguments` is the command line, by default that of this process.
    """
    return run_command(arguments, read_settings, predict)


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Returns the settings of a command line, by default of this process; raises `UserError`."""
    parser = Parser(__doc__)
    parser.add_argument("table", metavar="TABLE")
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN",
        help="run folders or checkpoint files, and options section.key=value",
    )
    parser.add_argument(
        "--parts", action="store_true", help="also write the terms of each prediction"
    )
    parser.add_argument(
        "--explain",
        type=int,
        metavar="K",
        help="write explanations instead of predictions: the K nodes and pairs that contribute "
        "most",
    )
    parser.add_argument(
        "--rows", default=":", metavar="A:B", help="predict only rows A to B - 1, counted from 0"
    )
    parsed = parser.parse_intermixed_args(arguments)
    overrides = [word for word in parsed.words if is_override(word)]
    runs = [word for word in parsed.words if word not in overrides]
    if not runs:
        raise UserError("no run is given: use python predict.py TABLE RUN...")
    if parsed.explain is not None and (parsed.explain < 1 or parsed.parts):
        raise UserError("--explain needs a number above 0, and cannot be combined with --parts")
    for override in overrides:
        option, _, _ = override.partition("=")
        if option not in OPTIONS:
            raise UserError(
                f"{override} is an option of training: predict.py accepts only {', '.join(OPTIONS)}"
            )
    return Settings(
        table=expand_path(parsed.table),
        runs=[read_run(run, overrides) for run in runs],
        parts=parsed.parts,
        explain=parsed.explain or 0,
        rows=read_range(parsed.rows),
    )


def is_override(word: str) -> bool:
    """Returns whether a word is `section.key=value`, and not the path of a run."""
    return re.match(r"\w+\.\w+=", word) is not None and not os.path.exists(word)


def read_range(text: str) -> tuple[int, int]:
    """Returns the first row of `A:B` and the row after the last; raises `UserError`."""
    match = re.fullmatch("([0-9]*):([0-9]*)", text)
    if not match:
        raise UserError(f"--rows={text} must be A:B, such as 0:1000000")
    first, last = match.groups()
    first_row = int(first or 0)
    last_row = min(int(last or sys.maxsize), sys.maxsize)
    if last_row <= first_row:
        raise UserError(f"--rows={text} selects no row: the end must be larger than the start")
    return first_row, last_row


def predict(settings: Settings, ddp: Distributed) -> None:
    """Writes the output that the command line selects; raises `UserError` on every rank."""
    with ddp.sync_errors():
        hashes = settings.hashes()
    ddp.check_equal({**hashes, **library_versions()})
    with ddp.sync_errors():
        ensemble = Ensemble(settings.runs, ddp)
        settings.explain = min(settings.explain, len(ensemble.tables.genes))
        is_first = ddp.rank == 0
        survey = survey_sets(settings.table, ensemble.tables, *settings.rows, has_bar=is_first)
        if settings.parts:
            ensemble.check_parts()
        explainer = explainer_of(ensemble) if settings.explain else None
        if not settings.explain:
            check_names(ensemble.columns(settings.parts))
    changes = optional("run_changes")
    if changes is not None:
        ddp.check_equal(changes.code_digests())  # includes the modules that the models need
    for note in survey.notes:
        log.warning(f"note      {note}")
    if survey.unknown:
        missing = f"{survey.num_rows - survey.num_known} rows have no prediction"
        log.warning(f"{missing}: {unknown_nodes(survey.unknown, ensemble.tables)}")
    if settings.explain:
        for file in explainer.unexplained():
            log.warning(
                f"note      the model of {file} has no knock-out pass that can be explained, so no "
                "living nodes are listed for it"
            )
        if not any(run.checkpoint["step"] for run in settings.runs):
            log.warning(
                "note      best.pt is the starting point of training, where living nodes may not "
                "contribute yet"
            )
    write_table(settings, ensemble, survey, explainer)


def check_names(columns: list[str]) -> None:
    """Raises `UserError` if two columns have the same name, such as for scores `a` and `a_sd`."""
    for name, count in Counter(columns).items():
        if count > 1:
            raise UserError(
                f"two output columns would have the name {name}: use `Predictor` from Python"
            )


def write_table(settings: Settings, ensemble: Ensemble, survey: Survey, explainer: Any) -> None:
    """Writes the predictions of each row or, with an `explainer`, explanations.

    Raises `UserError` if the file cannot be written.
    """
    kind = "predictions"
    columns = ensemble.columns(settings.parts)
    lines_per_row = 1
    if explainer:
        kind = "explained"
        columns = ["score", *explainer.columns]
        lines_per_row = settings.explain * len(ensemble.targets)
    output = settings.output(kind)
    header = "\t".join(["genes", *columns]) + "\n"
    bar = progress_bar(survey.num_rows, kind, " rows", is_shown=ensemble.ddp.rank == 0)
    most = max(1, min(ensemble.rows_at_once, CELLS_AT_ONCE // len(columns) // lines_per_row))
    ranges = [run.trained for run in settings.runs]
    num_beyond = torch.zeros(len(BEYOND), dtype=torch.long)
    num_done = 0
    with bar, table_writer(output, ensemble.ddp) as write:
        write([header])
        for chunk in read_sets(settings.table, ensemble.tables, *settings.rows, most):
            if explainer:
                lines = explainer.lines(chunk, settings.explain)
            else:
                lines = predicted_lines(settings, ensemble, chunk)
            write(lines)
            num_done += len(chunk.sets)
            are_beyond = [is_beyond(chunk.samples, trained) for trained in ranges]
            num_beyond += torch.stack(are_beyond).all(dim=0).sum(dim=1)
            ensemble.ddp.step_done(num_done)
            bar.update(len(chunk.sets))
    for kind, count in zip(BEYOND, num_beyond.tolist(), strict=True):
        if count:
            log.warning(f"note      {count:,} rows have {kind}: predictions are extrapolations")
    log.info(f"{survey.num_known} predictions written to {output}")


def predicted_lines(settings: Settings, ensemble: Ensemble, chunk: Chunk) -> Iterator[str]:
    """Yields the lines of some rows, which are formatted when they are read."""
    predicted = ensemble.predict(chunk.samples, settings.parts).flatten(1)
    cells = torch.full((len(chunk.sets), predicted.size(1)), math.nan, dtype=torch.float64)
    cells[chunk.is_known] = predicted
    return table_lines(iter(chunk.sets), cells)


if __name__ == "__main__":
    end_process(main())
