"""Prints the test metrics of a run, or compares the test metrics of several runs.

    python analyse.py runs/s0                     # print the metrics of a run and of its rivals
    python analyse.py runs/s0 runs/s1 runs/s2     # compare runs, and evaluate their ensemble
    python analyse.py runs/fold*                  # evaluate the folds of a cross-validation
    python analyse.py runs/s0 --json              # print a JSON object

The metrics are computed from the predictions in test.tsv, a file in the run folder.

For one run, the first table contains the metrics of all test rows and of groups of test rows. If
test.tsv also contains predictions of a rival, its Pearson's r follows the model's, together with
the 95 % confidence interval (CI) of the difference. Your own metrics are reported in the same way.
The second table contains the metrics of more rivals, which predict the same rows without the model.
The command also writes the metrics to test.json, in the run folder.

For several runs, the command does not write files. The first table lists the options and code files
in which the runs differ, and the best step and metrics of each run; the run with the best
validation metric is first. The second table contains the test metrics of each run and of the
ensemble, whose prediction is the mean over the runs. Rivals are compared with the ensemble.

Runs with different test rows are folds of a cross-validation. The command prints the metrics of
each fold, and then the tables for one run, with the test rows of all folds. If a fold has several
runs, their ensemble is used.

With `--json`, the command prints only a JSON object. For one run, this is the content of test.json.
Undefined numbers are null. From Python, call `analyse_run` or `compare`.
"""

# Shapes: n rows of T targets. Arguments `rivals` that are collections of names contain the names of
# the rivals in test.tsv.

import json
import math
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

# See train.py.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # raised when PyG is imported

import torch

import data
from analyse_metrics import (
    MOST,
    ensemble_of,
    metrics_by_group,
    metrics_of_all,
    metrics_of_each,
    metrics_of_rivals,
    name_of_gain,
    with_pearson,
)
from analyse_results import Results, best_first, best_step, differing, folds_of, together
from config import Config, Parser, expand_path, load_config
from data_tables import Tables
from ddp_ends import end_process
from errors import UserError, counted
from losses import LOSSES
from metrics import first_metric
from parts import is_here, optional
from run_checkpoint import explain_write_errors, may_compare, read_checkpoint, write_atomically
from run_folder import read_metrics
from run_results import read_results, row_labels

SHOWN = 20  # largest number of targets that are printed
NO_RIVAL = "test.tsv has no predictions of a rival (see model.start), so there are no differences"
RIVALS = "rivals, which predict these rows without the model (differences are model minus rival):"
DIFFERENCE = "difference (95 % CI)"
# Titles of metrics. Those that are not in `METRICS` follow the columns of `METRICS`, in this order.
TITLES = {
    "row_pearson": "Pearson within rows",
    "mse_top20": "MSE of 20 largest scores",
    "spearman": "Spearman",
    "r2": "R2",
    "mse": "MSE",
    "auroc": "AUROC",
}


# ---- The command ---------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    `arguments` are the words of the command line, by default `sys.argv[1:]`.
    """
    num_threads = torch.get_num_threads()
    threads = optional("ddp_threads")
    if threads is not None:
        threads.set_threads(num_processes=1)
    try:
        return report(read_arguments(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except SystemExit:  # raised by --help
        return 0
    finally:
        torch.set_num_threads(num_threads)


def read_arguments(arguments: Sequence[str] | None) -> Namespace:
    """Returns the parsed command line; raises `UserError` if it is wrong."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parsed = parser.parse_args(arguments)
    parsed.runs = [Path(expand_path(run)) for run in parsed.runs]
    return parsed


def report(arguments: Namespace) -> int:
    """Prints the analysis, and returns the exit status; raises `UserError`."""
    if len(arguments.runs) == 1:
        analysis, lines = report_of_run(arguments.runs[0])
    else:
        analysis, lines = report_of_runs(arguments.runs)
    if arguments.json:
        lines = [as_json(analysis)]
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        pass  # the reader, such as `head`, has closed the pipe
    except OSError as error:
        advice = "redirect the output to a different place"
        print(f"error: cannot print the results: {error.strerror}: {advice}", file=sys.stderr)
        return 1
    return 0


def report_of_run(folder: Path) -> tuple[dict, list[str]]:
    """Writes test.json into the folder of a run.

    Returns the content of test.json, and the lines to print. Raises `UserError` if the run cannot
    be analysed, or if a file cannot be written.
    """
    rows = read_run(folder)
    analysis = metrics_of_run(folder, rows)
    file = folder / "test.json"
    with explain_write_errors(file, UserError, "copy the run folder"):
        write_atomically(file, [as_json(analysis), "\n"])
    lines = [f"{folder / 'test.tsv'}: {rows.counts()}"]
    lines += lines_of_run(analysis, rows.rivals)
    lines.append(f"written: {file}")
    return analysis, lines


def report_of_runs(folders: list[Path]) -> tuple[dict, list[str]]:
    """Returns the result of `compare`, and the lines to print; raises `UserError`."""
    analysis, rows = metrics_of_runs(read_runs(folders))
    title = "options and code files that differ between the runs, and metrics of their best steps:"
    lines = [title, *table_of_options(analysis), ""]
    lines += [f"note      {note}" for note in analysis["notes"]]
    runs = f"{len(folders)} runs"
    if "folds" in analysis:
        runs += f" of {len(analysis['folds'])} folds, each fold named after its first run"
    lines.append(f"{runs}: {rows.counts()}")
    lines += lines_of_runs(analysis, rows.rivals)
    return analysis, lines


def as_json(analysis: dict) -> str:
    """Returns the text of test.json, with null for numbers that are not finite."""
    without_nan = json.loads(json.dumps(analysis), parse_constant=lambda name: None)
    return json.dumps(without_nan, indent=1)


# ---- From Python ---------------------------------------------------------------------------------
def analyse_run(run: str | Path) -> dict[str, Any]:
    """Returns the metrics of a run's test predictions by name: the content of test.json.

    The function does not print or write anything. Undefined metrics are nan. The keys are

    - `pearson`, `r2` and so on: the metrics of all test rows;
    - `gain`: if test.tsv has predictions of a rival, the 95 % interval of the difference between
      the Pearson's r of the model and of the rival;
    - `by_unseen`, `by_deletions`, `by_level`: the same metrics for groups of rows;
    - `targets`: the metrics of each target, if there are several targets;
    - `rivals`: the metrics of rivals, which predict the rows without the model. If they cannot be
      computed, `no_rivals` is the reason.

    `run` is a run folder. Raises `UserError` if the run does not have a test.tsv, or if a different
    version of the template created it.
    """
    folder = Path(run)
    return metrics_of_run(folder, read_run(folder))


def compare(runs: Sequence[str | Path]) -> dict[str, Any]:
    """Returns the metrics of several runs' test predictions, for each run and for their ensemble.

    The function does not print or write anything. Undefined metrics are nan. The keys are

    - `options`: for each run folder, the options and hashes of code files that differ between runs;
    - `notes`: warnings about runs that are the same, or have scores in different units;
    - `results`: the best step of each run, and its metrics in validation and test; the run with the
      best validation metric is first;
    - `figures`: the test metrics of each run, by folder;
    - `mean` and `sd`: mean and standard deviation over the runs of these metrics;
    - `ensemble`: the metrics of the mean prediction of the runs;
    - `rivals` or `no_rivals`: as in `analyse_run`, with differences from the ensemble.

    Runs with different test rows are folds of a cross-validation. `folds` is then {first run of the
    fold: all its runs}. `figures` contains the metrics of each fold, for the mean prediction of its
    runs. `all_folds` is the result of `analyse_run` for the rows of all folds.

    `runs` are at least two folders. Raises `UserError` if a run does not have a test.tsv, was
    created by a different version of the template, is listed twice, or shares some of its test rows
    with another run, but not all.
    """
    folders = []
    if not isinstance(runs, str | Path):
        folders = [Path(run) for run in runs]
    if len(folders) < 2:
        raise UserError(
            f"compare needs a list of at least two runs, not {runs!r}: for one run, use analyse_run"
        )
    analysis, _ = metrics_of_runs(read_runs(folders))
    return analysis


def metrics_of_run(folder: Path, rows: Results) -> dict[str, Any]:
    """Returns the result of `analyse_run`, given the rows of test.tsv in the run folder."""
    config = config_of(folder)
    analysis = metrics_by_group(rows, config.optim.loss)
    return analysis | rivals_or_reason(rows, {str(folder): config})


def metrics_of_runs(members: dict[str, Results]) -> tuple[dict[str, Any], Results]:
    """Returns the result of `compare`, and all test rows with the ensemble's predictions.

    If the runs are folds, each row has the prediction of the ensemble of its fold. `members` are
    the rows of each run's test.tsv, by folder.
    """
    configs = {name: config_of(Path(name)) for name in members}
    losses = {config.optim.loss for config in configs.values()}
    loss = losses.pop() if len(losses) == 1 else "squared"  # whose ensemble predicts the mean
    folds = folds_of(members)  # {first run of a fold: all its runs}
    of_folds = {}
    for first, names in folds.items():
        of_folds[first] = ensemble_of([members[name] for name in names], loss)
    rows = together(list(of_folds.values()))
    rivals = rivals_or_reason(rows, {first: configs[first] for first in folds})
    analysis = about_runs(configs)
    if len(folds) == 1:  # all runs have the same test rows
        analysis["results"] = best_first(analysis["results"])
        analysis |= metrics_of_each(members, loss)
        analysis["ensemble"] = metrics_of_all(rows, loss)
        analysis |= rivals
    else:
        analysis |= metrics_of_each(of_folds, loss)
        analysis["folds"] = folds
        analysis["all_folds"] = metrics_by_group(rows, loss) | rivals
    return analysis, rows


def about_runs(configs: dict[str, Config]) -> dict[str, Any]:
    """Returns the `options`, `notes` and `results` of `compare`.

    `configs` is {run folder: its configuration}.
    """
    described = {name: config.options() for name, config in configs.items()}
    changes = optional("run_changes")
    notes = []
    checkpoints = []
    for name, of_run in described.items():
        try:
            checkpoint = read_checkpoint(Path(name, "checkpoints/best.pt"))
        except UserError as error:
            notes.append(str(error))
            continue
        if changes is not None:
            of_run |= changes.comparable(checkpoint.get("code", {}))
        checkpoints.append(checkpoint)
    predictor = optional("predictor")
    if predictor is not None:
        notes += predictor.notes_on_members(checkpoints)
    results = {name: best_step(read_metrics(Path(name, "metrics.jsonl"))) for name in configs}
    return {"options": differing(described), "notes": notes, "results": results}


def rivals_or_reason(rows: Results, configs: dict[str, Config]) -> dict[str, Any]:
    """Returns the metrics of all rivals as `rivals`, or the reason for not knowing as `no_rivals`.

    `configs` contains the folder and configuration of one run of each fold. Rivals are fitted in
    each fold. If a rival cannot be fitted in a fold, the sum of effects replaces it there. Rivals
    predict the test rows of the tables, which must be the rows of test.tsv in the same order.
    """
    if not is_here("analyse_rivals"):
        return {"no_rivals": "this copy does not compute them"}
    from analyse_rivals import pair_rival, rivals

    of_folds = []  # for each fold, {rival: its predictions}
    genes = []
    for folder, config in configs.items():
        loss = config.optim.loss  # in all folds, losses are for the same kind of scores
        try:
            tables = tables_of(config.data, Path(folder))
        except UserError as error:
            return {"no_rivals": str(error)}
        of_folds.append(rivals(tables, loss) | pair_rival(tables, loss, config.data.cache_dir))
        genes += [label.partition("\t")[0] for label in row_labels(tables, "test")]
    if genes != rows.genes:
        return {"no_rivals": "the rows of test.tsv are not the test rows of the tables"}
    predictions = {}
    for name in chain.from_iterable(of_folds):
        of_name = [fold.get(name, fold["sum of effects"]) for fold in of_folds]
        predictions[name] = torch.cat(of_name)
    return {"rivals": metrics_of_rivals(rows, predictions, loss)}


# ---- Files ---------------------------------------------------------------------------------------
def read_run(folder: Path) -> Results:
    """Returns the rows of a run's test.tsv; raises `UserError` if it cannot be read."""
    file = folder / "test.tsv"
    if not file.exists():
        advice = "correct the path, wait until the run has finished, or repeat its command"
        raise UserError(f"{folder} has no test.tsv: {advice}")
    return Results(**read_results(file))


def read_runs(folders: list[Path]) -> dict[str, Results]:
    """Returns the rows of each run's test.tsv, by folder.

    If the runs have different losses, only the predictions of the scores are kept, without further
    predictions such as an `sd`. Raises `UserError` if only some of the losses are for binary
    scores, or if a run is listed twice.
    """
    places = set()
    for folder in folders:
        if folder.resolve() in places:
            raise UserError(f"{folder} is listed twice: list each run once")
        places.add(folder.resolve())
    members = {str(folder): read_run(folder) for folder in folders}
    losses = {config_of(folder).optim.loss: folder for folder in folders}
    if len({LOSSES[loss].is_binary for loss in losses}) > 1:
        of_each = [f"{folder} has optim.loss={loss}" for loss, folder in losses.items()]
        raise UserError(
            f"{', '.join(of_each)}: binary scores cannot be compared with other scores: "
            "list runs of one kind"
        )
    if len(losses) > 1:
        for folder, rows in members.items():
            members[folder] = replace(rows, predictions={"prediction": rows.prediction})
    return members


def config_of(folder: Path) -> Config:
    """Returns the configuration of a run; raises `UserError` if it cannot be read."""
    try:
        return load_config([folder / "config.yaml"])
    except UserError as error:
        raise UserError(
            f"{error}. If a different version of the template created {folder}, "
            "analyse it with that version, or train it again"
        ) from None


def tables_of(config: data.DataConfig, folder: Path) -> Tables:
    """Returns the tables of a run; raises `UserError` if they have changed since the run."""
    tables = data.load(config)
    earlier = read_checkpoint(folder / "checkpoints/best.pt")["data"]
    fingerprint = tables.fingerprint()
    if may_compare(earlier, fingerprint) and earlier != fingerprint:
        raise UserError("the tables have changed since the run")
    return tables


# ---- Text ----------------------------------------------------------------------------------------
def columns_beside(rivals: Collection[str]) -> dict[str, str]:
    """Returns the titles of all columns of a table of metrics, {name: title}, in their order.

    The columns of rivals follow the model's column of the same metric.
    """
    titles = {"n": "rows", "rows": "incl. unscored rows"}
    for metric in [*with_pearson(), "row_pearson"]:
        title = TITLES.get(metric, metric.replace("_", " ").capitalize())
        titles[metric] = title
        for rival in rivals:
            titles[f"{rival}_{metric}"] = f"{rival} {title}"
        titles[name_of_gain(metric)] = f"{title} {DIFFERENCE}"
    titles["gain"] = DIFFERENCE
    return titles | TITLES


def lines_of_run(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns lines with the metrics of a run and of its rivals."""
    lines = table(analysis, rivals)
    if rivals or "rivals" in analysis:
        lines.append(
            f"95 % CI from {analysis['resamples']:,} bootstrap samples of clusters of rows: "
            f"{counted(analysis['sets_drawn'], 'set of genes', 'sets of genes')} and "
            f"{counted(analysis['genes_drawn'], 'unseen gene')}"
        )
    return lines + lines_of_rivals(analysis, rivals)


def lines_of_runs(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns lines with the metrics of several runs, and then of their ensemble and its rivals.

    If the runs are folds, the lines contain the metrics of each fold, and then of the rows of all
    folds.
    """
    rows = [*analysis["figures"].items()]
    rows += [("mean", analysis["mean"]), ("standard deviation", analysis["sd"])]
    if "folds" in analysis:
        lines = text_table(rows, columns_beside(rivals))
        return [*lines, "", "rows of all folds:", *lines_of_run(analysis["all_folds"], rivals)]
    rows.append(("ensemble", analysis["ensemble"]))
    return text_table(rows, columns_beside(rivals)) + lines_of_rivals(analysis, rivals)


def lines_of_rivals(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns lines with the metrics of the rivals, or with the reason for not knowing them."""
    if "no_rivals" in analysis:
        reason = analysis["no_rivals"]
        return [f"no comparison with predictions that do not use the model: {reason}"]
    lines = [] if rivals else [NO_RIVAL]
    return [*lines, "", RIVALS, *table_of_rivals(analysis["rivals"])]


def table(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the lines of a table of metrics: all rows, smaller groups, and the first targets."""
    rows = [("all rows", analysis)]
    for name, noun in (("unseen", "unseen gene"), ("deletions", "perturbed gene")):
        for k, group in analysis[f"by_{name}"].items():
            title = f"{k}+ {noun}s" if k == str(MOST) else counted(int(k), noun)
            if 0 < group["cells"] < analysis["cells"]:
                rows.append((title, group))
    for level, group in analysis["by_level"].items():
        rows.append((f"level {level}", group))
    targets = analysis.get("targets", {})
    rows += list(targets.items())[:SHOWN]
    text = text_table(rows, columns_beside(rivals))
    if len(targets) > SHOWN:
        text.append(f"and {counted(len(targets) - SHOWN, 'more score')}: see test.json")
    return text


def table_of_options(analysis: dict) -> list[str]:
    """Returns the lines of a table of runs: options and code files that differ, and `best_step`."""
    rows = []
    for run, results in analysis["results"].items():
        options = {key: str(value) for key, value in analysis["options"][run].items()}
        rows.append((run, options | results))
    titles = {name: name for _, cells in rows for name in cells}
    return text_table(rows, titles)


def table_of_rivals(rivals: dict[str, dict]) -> list[str]:
    """Returns the lines of a table of `metrics_of_rivals`, and a line about the strongest rival.

    An end of the interval that is printed as 0.0000 counts as 0: the predictions in test.tsv are
    rounded, so equal predictions can differ slightly.
    """
    strongest = next(iter(rivals))
    of_strongest = rivals[strongest]
    metric = first_metric(of_strongest)
    low, high = of_strongest[name_of_gain(metric)]
    place = "not clearly higher"
    if round(low, 4) > 0:
        place = "higher"
    if round(high, 4) < 0:
        place = "lower"
    title = columns_beside([])[metric]
    sentence = f"strongest rival: {strongest}; the model's {title} is {place}"
    return [*text_table(list(rivals.items()), columns_beside([])), sentence]


def text_table(rows: list[tuple[str, dict]], titles: dict[str, str]) -> list[str]:
    """Returns the lines of a table: a header, and one line for each row.

    A row is a label and {name of a column: cell}. `titles` is {name: title} of the columns, in
    their order. Columns without cells are left out.
    """
    names = [name for name in titles if any(name in cells for _, cells in rows)]
    texts = [["", *(titles[name] for name in names)]]
    for label, cells in rows:
        texts.append([label, *(cell(cells.get(name, "")) for name in names)])
    label_width, *widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for label, *cells in texts:
        padded = map(str.rjust, cells, widths)
        lines.append("  ".join([label.ljust(label_width), *padded]))
    return lines


def cell(value: object) -> str:
    """Returns the text of a cell, which is a text, an interval or a number; "-" if undefined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        low, high = value
        return "-" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    if value is None or math.isnan(value):
        return "-"
    is_usual = value == 0 or 1e-3 < abs(value) < 1e4
    return f"{value:.4f}" if is_usual else f"{value:.3e}"


if __name__ == "__main__":
    end_process(main())
