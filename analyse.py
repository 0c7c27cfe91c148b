"""Prints the test metrics of a run and of its rivals, or compares several runs and their ensemble.

    python analyse.py runs/s0                     # a run and its rivals
    python analyse.py runs/s0 runs/s1 runs/s2     # each run, and the ensemble
    python analyse.py runs/fold*                  # a cross-validation
    python analyse.py runs/s0 --json              # output for a program

For one run, the first table has the metrics of all test rows and of groups of test rows. Each
metric is reported with that of the rival in test.tsv and with the 95 % interval of the difference.
The second table has the metrics of more rivals, which predict the same rows without the model. The
command writes test.json and a plot, test.svg, into the run folder.

For several runs, it writes no file. The first table lists the options and code files in which the
runs differ, and the best step and metrics of each run, best validation metric first. The second
table has the metrics of each run and of the ensemble, which predicts the mean of the runs. Below
it is the 95 % interval of the difference of the two best runs.

Runs with different test rows are folds. For these, it prints the metrics of each fold, and those of
all test rows of all folds, as for one run. Several runs of one fold are replaced by their ensemble.

With `--json`, it prints only a JSON object, which for one run is the content of test.json. Numbers
that are not defined are null. From Python, use `analyse_run` and `compare`.
"""

# Shapes: n rows of T targets. Where `rivals` are names, they are those in test.tsv.

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
    difference_of_best,
    ensemble_of,
    metrics_by_group,
    metrics_of_all,
    metrics_of_each,
    metrics_of_rivals,
    name_of_gain,
    with_pearson,
)
from analyse_results import (
    Results,
    best_first,
    best_step,
    differing,
    folds_of,
    read_results,
    together,
)
from config import Config, Parser, expand_path, load_config
from data_tables import Tables
from ddp_ends import end_process
from ddp_setup import set_threads
from errors import UserError
from losses import LOSSES
from metrics import first_metric
from parts import is_here, optional
from run_checkpoint import explain_write_errors, read_checkpoint, write_atomically
from run_folder import read_metrics, read_status
from run_results import row_labels

SHOWN = 20  # largest number of targets that are printed
NO_RIVAL = "test.tsv has no rival, so there are no differences for groups of rows (see model.start)"
DIFFERENCE = "difference (95 %)"
# Titles of the columns after those of `METRICS` and their rivals.
TITLES = {
    "ceiling_pearson": "noise ceiling",
    "mse_top20": "MSE of top 20",
    "spearman": "Spearman",
    "r2": "R2",
    "ceiling_r2": "R2 ceiling",
    "r2_of_ceiling": "share of ceiling",
    "mse": "MSE",
    "auroc": "AUROC",
    "average_precision": "avg. precision",
    "within_1_sd": "within 1 sd (68 %)",
    "within_2_sd": "within 2 sd (95 %)",
}


# ---- The command ---------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Analyses runs as the command line says; returns the exit status.

    `arguments` is the command line, by default that of this process.
    """
    num_threads = torch.get_num_threads()
    set_threads(local_world_size=1)
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
    """Returns the arguments of a command line; raises `UserError`."""
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
        print(f"error: cannot print the figures: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def report_of_run(folder: Path) -> tuple[dict, list[str]]:
    """Writes test.json and test.svg to a run's folder.

    Returns the content of test.json, and the lines to print. Raises `UserError`.
    """
    rows = read_run(folder)
    analysis = metrics_of_run(folder, rows)
    files = {folder / "test.json": as_json(analysis) + "\n"}
    plots = optional("run_plots")
    if plots is not None:
        files[folder / "test.svg"] = plots.predictions_svg(rows.y, rows.prediction, rows.targets)
    for file, text in files.items():
        with explain_write_errors(file, UserError, "copy the run folder"):
            write_atomically(file, [text])
    lines = [f"{folder / 'test.tsv'}: {rows.counts()}"]
    lines += lines_of_run(analysis, rows.rivals)
    lines.append(f"written: {', '.join(map(str, files))}")
    return analysis, lines


def report_of_runs(folders: list[Path]) -> tuple[dict, list[str]]:
    """Returns the result of `compare`, and the lines to print; raises `UserError`."""
    analysis, rows = metrics_of_runs(read_runs(folders))
    lines = [*table_of_options(analysis), ""]
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

    Nothing is printed or written. An undefined metric is nan. The keys are

    - `pearson`, `r2` and so on: metrics of all rows; `gain`: the 95 % interval of Pearson's r
      minus that of the rival in test.tsv, if there is one;
    - `by_unseen`, `by_deletions`, `by_level`: the same for groups of rows;
    - `targets`: the metrics of each target, if there are several;
    - `rivals`: the metrics of predictions without the model, or `no_rivals`: the reason why
      there are none.

    `run` is a run folder. Raises `UserError` if the run has not finished, or was made with a
    different version of the template.
    """
    folder = Path(run)
    return metrics_of_run(folder, read_run(folder))


def compare(runs: Sequence[str | Path]) -> dict[str, Any]:
    """Returns the metrics of several runs' test predictions, for each run and for their ensemble.

    Nothing is printed or written. An undefined metric is nan. The keys are

    - `options`: for each run folder, the options and hashes of code files that differ between runs;
    - `notes`: warnings about runs that are the same, or have scores in different units;
    - `results`: the best step of each run, and its metrics in validation and test, best validation
      metric first;
    - `figures`: the metrics of each run, by folder; `mean` and `sd`: their mean and standard
      deviation; `ensemble`: the metrics of the mean prediction;
    - `best_two`: the two `runs` with the best first metric, the `difference` of this metric, and as
      `gain` its 95 % interval over resampled test rows, which are the same for both runs;
    - `rivals` or `no_rivals`: as in `analyse_run`, compared with the ensemble.

    Runs with different test rows are folds. `folds` then lists the runs of each fold, by its first
    run. `figures` are those of the folds, each with the mean prediction of its runs. `all_folds` is
    the result of `analyse_run` for the rows of all folds together.

    `runs` are at least two folders. Raises `UserError` if a run has not finished, was made with a
    different version of the template, is listed twice, or shares only some test rows with another
    run.
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
    """Returns the result of `analyse_run`, given the rows of the run's test.tsv."""
    config = config_of(folder)
    analysis = metrics_by_group(rows, config.optim.loss)
    return analysis | rivals_or_reason(rows, {str(folder): config})


def metrics_of_runs(members: dict[str, Results]) -> tuple[dict[str, Any], Results]:
    """Returns the result of `compare`, and all test rows with the mean prediction of each fold.

    `members` are the rows of each run's test.tsv, by folder.
    """
    configs = {name: config_of(Path(name)) for name in members}
    losses = {config.optim.loss for config in configs.values()}
    loss = losses.pop() if len(losses) == 1 else "squared"  # its ensemble is the mean
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
        analysis["best_two"] = difference_of_best(members, loss)
        analysis |= rivals
    else:
        analysis |= metrics_of_each(of_folds, loss)
        analysis["folds"] = folds
        analysis["all_folds"] = metrics_by_group(rows, loss) | rivals
    return analysis, rows


def about_runs(configs: dict[str, Config]) -> dict[str, Any]:
    """Returns the `options`, `notes` and `results` of `compare`, given each folder's options."""
    described = {name: config.options() for name, config in configs.items()}
    notes = []
    checkpoints = []
    for name, of_run in described.items():
        try:
            checkpoint = read_checkpoint(Path(name, "checkpoints/best.pt"))
        except UserError as error:
            notes.append(str(error))
            continue
        of_run |= checkpoint.get("code", {})
        checkpoints.append(checkpoint)
    predictor = optional("predictor")
    if predictor is not None:
        notes += predictor.notes_on_members(checkpoints)
    results = {name: best_step(read_metrics(Path(name, "metrics.jsonl"))) for name in configs}
    return {"options": differing(described), "notes": notes, "results": results}


def rivals_or_reason(rows: Results, configs: dict[str, Config]) -> dict[str, Any]:
    """Returns the metrics of `rivals`, or as `no_rivals` the reason why they are not known.

    `configs` has the folder of one run of each fold. Rivals are fitted in each fold; if a rival
    cannot be fitted in a fold, the sum of effects replaces it there. They predict the test rows of
    the tables, which must be the rows of test.tsv in the same order.
    """
    if not is_here("analyse_rivals"):
        return {"no_rivals": "this copy does not have analyse_rivals.py"}
    from analyse_rivals import pair_rival, rivals

    of_folds = []  # for each fold, {rival: its predictions}
    genes = []
    for folder, config in configs.items():
        loss = config.optim.loss  # the same in all folds, or at least for the same kind of scores
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
    """Returns the rows of a run's test.tsv; raises `UserError`, also for an unfinished run."""
    file = folder / "test.tsv"
    state = read_status(folder).get("state", "finished")
    if state != "finished" and not os.path.exists(file):
        raise UserError(
            f"{folder} has no test.tsv, because the run is {state}: wait until it has finished, or "
            "repeat its command to resume it"
        )
    return read_results(file)


def read_runs(folders: list[Path]) -> dict[str, Results]:
    """Returns the rows of each run's test.tsv by folder; raises `UserError`.

    If the runs have different losses, only the predictions of the score are kept. It is an error if
    only some losses are for scores of 0 and 1, or if a run is listed twice.
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
            f"{', '.join(of_each)}: runs with binary scores cannot be compared with others"
        )
    if len(losses) > 1:
        for folder, rows in members.items():
            members[folder] = replace(rows, predictions={"prediction": rows.prediction})
    return members


def config_of(folder: Path) -> Config:
    """Returns the configuration of a run; raises `UserError`."""
    try:
        return load_config([folder / "config.yaml"])
    except UserError as error:
        raise UserError(
            f"{error}; {folder} was created by another version of the template: "
            "analyse it with that version, or train it again"
        ) from None


def tables_of(config: data.DataConfig, folder: Path) -> Tables:
    """Returns the tables of a run; raises `UserError` if they have changed since the run."""
    tables = data.load(config)
    if read_checkpoint(folder / "checkpoints/best.pt")["data"] != tables.fingerprint():
        raise UserError("the tables have changed since the run")
    return tables


# ---- Text ----------------------------------------------------------------------------------------
def columns_beside(rivals: Collection[str]) -> dict[str, str]:
    """Returns {name: title} of all columns; those of rivals follow the model's."""
    titles = {"n": "rows", "rows": "all rows", "pearson": "Pearson"}
    for rival in rivals:
        titles[f"{rival}_pearson"] = rival
    titles["gain"] = DIFFERENCE
    for metric in with_pearson():
        if metric != "pearson":
            titles[metric] = metric.replace("_", " ").capitalize()
            for rival in rivals:
                titles[f"{rival}_{metric}"] = f"{rival} {titles[metric]}"
            titles[name_of_gain(metric)] = f"{titles[metric]} {DIFFERENCE}"
    titles["row_pearson"] = "row Pearson"
    for rival in rivals:
        titles[f"{rival}_row_pearson"] = f"row {rival}"
    return titles | TITLES


def lines_of_run(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the metrics of a run and of its rivals, as lines."""
    lines = table(analysis, rivals)
    if rivals or "rivals" in analysis:
        lines.append(
            f"95 % intervals from {analysis['resamples']:,} bootstrap samples of clusters: "
            f"{analysis['sets_drawn']:,} sets of genes and {analysis['genes_drawn']:,} unseen genes"
        )
    return lines + lines_of_rivals(analysis, rivals)


def lines_of_runs(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the metrics of several runs or folds, and of all together, as lines."""
    rows = [*analysis["figures"].items()]
    rows += [("mean", analysis["mean"]), ("standard deviation", analysis["sd"])]
    if "folds" in analysis:
        lines = text_table(rows, columns_beside(rivals))
        return [*lines, "", "all folds together:", *lines_of_run(analysis["all_folds"], rivals)]
    rows.append(("ensemble", analysis["ensemble"]))
    lines = text_table(rows, columns_beside(rivals))
    best_two = analysis["best_two"]
    best, second = best_two["runs"]
    difference = cell(best_two["difference"])
    interval = cell(best_two["gain"])
    metric = columns_beside(rivals)[first_metric(analysis["ensemble"])]
    lines.append(
        f"best two runs, {best} minus {second}: {metric} {difference}, 95 % interval {interval}"
    )
    return lines + lines_of_rivals(analysis, rivals)


def lines_of_rivals(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the metrics of the rivals as lines, or a line with the reason why there are none."""
    if "no_rivals" in analysis:
        reason = analysis["no_rivals"]
        return [f"no comparison with predictions that do not use the model: {reason}"]
    lines = [] if rivals else [NO_RIVAL]
    return [*lines, "", *table_of_rivals(analysis["rivals"])]


def table(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns a table of metrics as lines: all rows, each smaller group, and the first targets."""
    rows = [("all", analysis)]
    for name in ("unseen", "deletions"):
        for k, group in analysis[f"by_{name}"].items():
            or_more = "+" if k == str(MOST) else ""
            if 0 < group["cells"] < analysis["cells"]:
                rows.append((f"{name} {k}{or_more}", group))
    for level, group in analysis["by_level"].items():
        rows.append((f"level {level}", group))
    targets = analysis.get("targets", {})
    rows += list(targets.items())[:SHOWN]
    text = text_table(rows, columns_beside(rivals))
    if len(targets) > SHOWN:
        text.append(f"and {len(targets) - SHOWN:,} more scores, see test.json")
    return text


def table_of_options(analysis: dict) -> list[str]:
    """Returns a table of runs as lines: options and code that differ between them, and results."""
    rows = []
    for run, results in analysis["results"].items():
        options = {key: str(value) for key, value in analysis["options"][run].items()}
        rows.append((run, options | results))
    titles = {name: name for _, cells in rows for name in cells}
    return text_table(rows, titles)


def table_of_rivals(rivals: dict[str, dict]) -> list[str]:
    """Returns a table of `metrics_of_rivals` as lines, and a sentence about the strongest rival.

    An end of the interval that is printed as 0 counts as 0, because equal predictions differ by the
    rounding of their files.
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
    """Returns the lines of a table: a header, and the cells of each row.

    A row is a label and {name: cell}. `titles` maps the names to titles of columns; columns without
    cells are left out.
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
    """Returns the text of a cell: a text, an interval or a number; "-" if it is undefined."""
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
