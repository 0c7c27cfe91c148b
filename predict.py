"""Predicts the rows of a table with one trained run, or with several runs as an ensemble.

    python predict.py TABLE RUN... [section.key=value ...]
    torchrun --standalone --nproc_per_node=4 predict.py TABLE RUN...

Examples:

    python predict.py pairs.tsv runs/a runs/b          writes pairs.predictions.tsv
    python predict.py pairs.tsv runs/a --parts         also writes the terms of each prediction
    python predict.py all-pairs runs/a --rows 0:1000000

TABLE is the file of a table whose header starts with `genes` (or `nodes`), or one of two words:
`all-singles` predicts the deletion of each node of the graph, and `all-pairs` predicts the deletion
of each pair of nodes. For a level other than 0, write, for example, `all-singles=0.3`.

RUN is a run folder, whose best.pt is used, or a checkpoint file. Predictions only need the
checkpoint and the graph.pt of the run, so you can move the run folder. All options have the values
from training. You can only change data.batch_size, model.message_passing, ddp.timeout_s and
ddp.startup_timeout_s.

The output file `<table>.predictions.tsv` is written to the working directory. It has a line for
each row of the table, in the same order. Rows with unknown nodes have empty cells. With several
runs, the file contains the mean of their predictions, followed by the standard deviation, `sd`.
From Python, use the class `Predictor`.
"""

import hashlib
import logging
import math
import os
import re
import sys
import warnings
from argparse import SUPPRESS
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
from errors import UserError, counted
from parts import is_here, module_names, optional
from predict_tables import (
    BEYOND,
    Chunk,
    Survey,
    is_beyond,
    is_trained_on,
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
NUMBER_FORMAT = "%.15g"  # for millions of rows, faster than all digits of test.tsv
CELLS_AT_ONCE = 2**24  # largest number of output cells that are computed and written at once
# The options that the command line may set. All other options have their values from training.
OPTIONS = ("data.batch_size", "model.message_passing", "ddp.startup_timeout_s", "ddp.timeout_s")


@dataclass
class Settings:
    """The settings of a command line."""

    table: str
    runs: list[Run]
    parts: bool = False  # whether to write the terms of each prediction
    explain: int = 0  # largest number of nodes and pairs to list for each prediction
    rows: tuple[int, int] = (0, sys.maxsize)  # first row, and the row after the last

    @property
    def ddp(self) -> DDPConfig:
        # The device_ids are not used, because training may have run on a different machine.
        return replace(self.runs[0].config.ddp, device_ids=[])

    def output(self, kind: str) -> Path:
        """Returns the path of the output file, which is in the working directory.

        `kind` is the word before `.tsv`. If `--rows` is given, the name contains the range of rows.
        """
        name = Path(self.table).name.removesuffix(".gz").removesuffix(".tsv")
        first, last = self.rows
        if (first, last) != (0, sys.maxsize):
            name += f".{first}-" if last == sys.maxsize else f".{first}-{last}"
        return Path(f"{name}.{kind}.tsv")

    def hashes(self) -> dict[str, str]:
        """Returns hashes of the table and of all models, to check that they are equal on all ranks.

        Raises `UserError` if the table cannot be read, or if the level of `all-pairs` is invalid.
        """
        size, _ = screen(self.table)
        of_table = self.table if size else file_digest(self.table)
        of_models = hashlib.sha256()
        for run in self.runs:
            for tensor in run.checkpoint["model"].values():
                of_models.update(tensor.flatten().view(torch.uint8).numpy())
        return {"TABLE (hash)": of_table, "RUN (hash)": of_models.hexdigest()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs predict.py and returns the exit status.

    `arguments` are the words of a command line; the default is the command line of this process.
    """
    return run_command(arguments, read_settings, predict)


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Returns the settings of a command line, and reads its runs; raises `UserError`.

    `arguments` are the words of a command line; the default is the command line of this process.
    """
    parser = Parser(__doc__)
    parser.add_argument("table", metavar="TABLE")
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN",
        help="run folders or checkpoint files; you can also give options section.key=value here",
    )
    parser.add_argument(
        "--parts", action="store_true", help="also write the terms of each prediction"
    )
    about_explain = (
        "write explanations instead of predictions: for each row and score, the K nodes and pairs "
        "of nodes that contribute most"
    )
    parser.add_argument(
        "--explain",
        type=int,
        metavar="K",
        help=about_explain if is_here("predict_explain") else SUPPRESS,
    )
    parser.add_argument(
        "--rows", default=":", metavar="A:B", help="predict only rows A to B - 1; the first is 0"
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
                f"{override} cannot be set in predict.py: it accepts only {', '.join(OPTIONS)}"
            )
    return Settings(
        table=expand_path(parsed.table),
        runs=[read_run(run, overrides) for run in runs],
        parts=parsed.parts,
        explain=parsed.explain or 0,
        rows=read_range(parsed.rows),
    )


def is_override(word: str) -> bool:
    """Returns whether a word is an option `section.key=value`, and not the path of a run."""
    return re.match(r"\w+\.\w+=", word) is not None and not os.path.exists(word)


def read_range(text: str) -> tuple[int, int]:
    """Returns the first row of a range `A:B`, and the row after its last; raises `UserError`.

    The default of A is 0, and the default of B is the largest integer.
    """
    match = re.fullmatch("([0-9]*):([0-9]*)", text)
    if not match:
        raise UserError(f"--rows={text} must be A:B, such as 0:1000000")
    first, last = match.groups()
    first_row = int(first or 0)
    last_row = min(int(last or sys.maxsize), sys.maxsize)
    if last_row <= first_row:
        raise UserError(f"--rows={text} selects no rows: the end must be larger than the start")
    return first_row, last_row


def predict(settings: Settings, ddp: Distributed) -> None:
    """Writes the output that the command line selects; raises `UserError` on every rank."""
    with ddp.sync_errors():
        hashes = settings.hashes()
    ddp.check_equal({**hashes, **library_versions(), "the list of modules": module_names()})
    with ddp.sync_errors():
        ensemble = Ensemble(settings.runs, ddp)
        settings.explain = min(settings.explain, len(ensemble.tables.genes))
        survey = survey_sets(settings.table, ensemble.tables, *settings.rows)
        if settings.parts:
            ensemble.check_parts()
        explainer = explainer_of(ensemble) if settings.explain else None
    changes = optional("run_changes")
    if changes is not None:
        ddp.check_equal(changes.code_digests())  # all modules that the models need are imported
    if survey.unknown:
        missing = counted(survey.num_rows - survey.num_known, "row")
        reason = unknown_nodes(survey.unknown, ensemble.tables)
        log.warning(f"note      no prediction for {missing}: {reason}")
    if settings.explain:
        for file in explainer.unexplained():
            log.warning(
                f"note      no living nodes are listed for {file}, because its model does not have "
                "a knock-out pass that can be explained"
            )
    write_table(settings, ensemble, survey, explainer)


def write_table(settings: Settings, ensemble: Ensemble, survey: Survey, explainer: Any) -> None:
    """Writes the predictions of all rows or, with an `explainer`, their explanations.

    At the end, the log reports how many rows are extrapolations, and how many have sets of the
    training rows. Raises `UserError` if the file cannot be written, or if two columns have the same
    name. For example, this is the case for the `sd` of a score `a` and a score `a_sd`.
    """
    kind = "predictions"
    columns = ensemble.columns(settings.parts)
    lines_per_row = 1
    if explainer:
        kind = "explained"
        columns = ["score", *explainer.columns]
        lines_per_row = settings.explain * len(ensemble.targets)
    name, num_columns = Counter(columns).most_common(1)[0]
    if num_columns > 1:
        problem = f"{num_columns} output columns would have the name {name}"
        raise UserError(f"{problem}: use `Predictor` from Python")
    output = settings.output(kind)
    header = "\t".join(["genes", *columns]) + "\n"
    bar = progress_bar(survey.num_rows, kind, " rows", is_shown=ensemble.ddp.rank == 0)
    most = max(1, min(ensemble.rows_at_once, CELLS_AT_ONCE // len(columns) // lines_per_row))
    ranges = [run.trained for run in settings.runs]
    num_beyond = torch.zeros(len(BEYOND), dtype=torch.long)
    # A graph.pt of an earlier version does not have these sets.
    sets = [trained.get("sets", torch.empty(0, dtype=torch.long)) for trained in ranges]
    trained_sets = torch.cat(sets).unique()  # in ascending order
    num_trained = 0
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
            num_trained += int(is_trained_on(chunk.samples, trained_sets).sum())
            ensemble.ddp.step_done(num_done)
            bar.update(len(chunk.sets))
    for kind, count in zip(BEYOND, num_beyond.tolist(), strict=True):
        if count:
            rows = counted(count, "row")
            log.warning(f"note      predictions are extrapolations for {rows} with {kind}")
    if num_trained:
        log.info(
            f"note      rows whose set of nodes a run was trained on: {num_trained:,}; their "
            "predictions do not show how good the runs are"
        )
    log.info(f"output    results for {counted(survey.num_known, 'row')} are in {output}")


def predicted_lines(settings: Settings, ensemble: Ensemble, chunk: Chunk) -> Iterator[str]:
    """Predicts the rows of a chunk, and returns an iterator over their lines.

    Cells of rows with unknown nodes are empty. The iterator formats the lines, so only the rank
    that writes them spends time on it.
    """
    predicted = ensemble.predict(chunk.samples, settings.parts).flatten(1)
    cells = torch.full((len(chunk.sets), predicted.size(1)), math.nan, dtype=torch.float64)
    cells[chunk.is_known] = predicted
    return table_lines(iter(chunk.sets), cells, NUMBER_FORMAT)


if __name__ == "__main__":
    end_process(main())
