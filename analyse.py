"""Prints the test metrics of a run beside its rivals, or of several runs, alone and together.

    python analyse.py runs/s0                     # a run
    python analyse.py runs/s0 runs/s1 runs/s2     # one by one, and together
    python analyse.py runs/s0 --json              # for a program

It prints a table with the metrics of all test rows and of groups of them, each beside that of the
rival in test.tsv and with the 95 % interval of the difference. A second table has the metrics of
more rivals, which predict the same rows without the model. It writes test.json and a plot,
test.svg, into the run folder.

Of several runs, it writes no file. It prints a line for each: the options in which they differ,
best step and metrics. Then follow the metrics of each and of their mean prediction, the
95 % interval of the difference of the best two, and the correlation of the predictions' standard
deviation with the error of their mean.

With `--threshold X` it also says how well scores below X are found. With `--json` it prints a JSON
object and nothing else, of one run the content of test.json; null is a number that is not defined.
From Python, use `analyse_run` and `compare`.

Shapes: n rows of T targets.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# As in train.py.
sys.path.append(os.path.dirname(os.path.realpath(__file__)))

import torch

import analyse_intervals
import data
import metrics
from analyse_metrics import (
    difference_of_best,
    ensemble_of,
    metrics_by_group,
    metrics_of_rivals,
    metrics_together,
)
from analyse_results import Results, check_same_rows, read_results
from analyse_text import lines_of_run, lines_of_runs, text_table
from config import (
    Config,
    Parser,
    expand_path,
    load_config,
    read_options,
)
from data_tables import Tables
from ddp_ends import end_process
from ddp_setup import set_threads
from errors import UserError
from metrics import mean_and_std
from parts import is_here, optional
from run_checkpoint import explain_write_errors, read_checkpoint, write_atomically
from run_folder import read_metrics, read_status

POINTS = 2000  # in the plot at most
COLOURED = 6  # scores with a colour of their own there at most


# ---- The command ---------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Analyses as a command line says, by default this process's; returns the exit status."""
    num_threads = torch.get_num_threads()
    set_threads(local_world_size=1)
    try:
        return report(read_arguments(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except SystemExit:  # after --help
        return 0
    finally:
        torch.set_num_threads(num_threads)


def read_arguments(arguments: Sequence[str] | None) -> Namespace:
    """Returns the arguments of a command line; raises `UserError`."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="also how well scores below X are found"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object in place of text")
    parsed = parser.parse_args(arguments)
    parsed.runs = [Path(expand_path(run)) for run in parsed.runs]
    return parsed


def report(arguments: Namespace) -> int:
    """Prints what is asked for, and returns the exit status; raises `UserError`."""
    if len(arguments.runs) == 1:
        analysis, lines = report_of_run(arguments.runs[0], arguments.threshold)
    else:
        analysis, lines = report_of_runs(arguments.runs, arguments.threshold)
    if arguments.json:
        lines = [as_json(analysis)]
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        pass  # such as `head`, which wants no more lines
    except OSError as error:
        print(f"error: cannot print the figures: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def report_of_run(folder: Path, threshold: float | None) -> tuple[dict, list[str]]:
    """Writes test.json and test.svg into a run's folder.

    Returns the content of test.json, and the lines to print. Raises `UserError`.
    """
    rows = read_run(folder)
    analysis = metrics_of_run(folder, rows, threshold)
    files = {folder / "test.json": as_json(analysis) + "\n"}
    plots = optional("run_plots")
    if plots is not None:
        files[folder / "test.svg"] = plots.scatter_svg(*points_and_labels(rows))
    for file, text in files.items():
        with explain_write_errors(file, UserError, "copy the run folder"):
            write_atomically(file, [text])
    lines = [f"{folder / 'test.tsv'}: {rows.counts()}"]
    lines += lines_of_run(analysis, rows.rivals, has_noise=rows.sd is not None)
    lines.append(f"written: {', '.join(map(str, files))}")
    return analysis, lines


def report_of_runs(folders: list[Path], threshold: float | None) -> tuple[dict, list[str]]:
    """Returns the result of `compare`, and the lines to print; raises `UserError`."""
    members = read_runs(folders)
    analysis = metrics_of_runs(members, threshold)
    overview = {}
    for name, options in analysis["options"].items():
        texts = {key: str(value) for key, value in options.items()}
        overview[name] = texts | analysis["results"][name]
    titles = {key: key for cells in overview.values() for key in cells}
    lines = [*text_table(list(overview.items()), titles), ""]
    rows = next(iter(members.values()))
    lines.append(f"{len(folders)} runs: {rows.counts()}")
    return analysis, lines + lines_of_runs(analysis, rows.rivals)


def as_json(analysis: dict) -> str:
    """Returns the text of test.json, with null for numbers that are not finite."""
    without_nan = json.loads(json.dumps(analysis), parse_constant=lambda name: None)
    return json.dumps(without_nan, indent=1)


# ---- From Python ---------------------------------------------------------------------------------
def analyse_run(run: str | Path, threshold: float | None = None) -> dict[str, Any]:
    """Returns the metrics of a run's test predictions by name: the content of test.json.

    Nothing is printed or written. A metric that is not defined is nan. The keys are

    - `pearson`, `r2` and so on: of all rows; `gain`: the 95 % interval of Pearson's r less
      that of the rival in test.tsv, if there is one;
    - `by_unseen`, `by_deletions`, `by_level`: the same of groups of rows;
    - `targets`: the metrics of each target, if there are several;
    - `rivals`: the metrics of predictions without the model, or `no_rivals`: why there are none.

    Args:
        run: its folder.
        threshold: if given, also how well scores below it are found, in the units of the score.

    Raises:
        UserError: the run has not finished, is of another version, or has no such score.
    """
    folder = Path(run)
    return metrics_of_run(folder, read_run(folder), threshold)


def compare(runs: Sequence[str | Path], threshold: float | None = None) -> dict[str, Any]:
    """Returns the metrics of several runs' test predictions, of each run and of their mean.

    Nothing is printed or written. A metric that is not defined is nan. The keys are

    - `options`: of each run by its folder, the options in which they differ;
    - `results`: of each, the best step, and metrics of validation and test;
    - `figures`: the metrics of each, by folder; `mean`: the mean of these; `ensemble`: the metrics
      of the mean prediction;
    - `best_two`: the two `runs` of the highest Pearson's r, its `difference`, and as `gain` the
      95 % interval of that for other test rows, of which both runs get the same;
    - `uncertainty`: Spearman's correlation of the predictions' standard deviation with the error of
      their mean;
    - `rivals` or `no_rivals`: as in `analyse_run`, beside the ensemble.

    Args:
        runs: two or more folders of runs with the same test rows.
        threshold: if given, also how well scores below it are found, in the units of the score.

    Raises:
        UserError: a run has not finished, is of another version, was trained on other rows or
            tables than the first one, or is named twice.
    """
    folders = []
    if not isinstance(runs, str | Path):
        folders = [Path(run) for run in runs]
    if len(folders) < 2:
        raise UserError(f"compare takes a list of two runs or more, not {runs!r}: see analyse_run")
    return metrics_of_runs(read_runs(folders), threshold)


def metrics_of_run(folder: Path, rows: Results, threshold: float | None) -> dict[str, Any]:
    """Returns the result of `analyse_run`, given the rows of the run's test.tsv."""
    config = config_of(folder)
    check_threshold(threshold, rows, folder)
    analysis = metrics_by_group(rows, config.optim.loss, threshold)
    return analysis | rivals_or_reason(rows, config, folder)


def metrics_of_runs(members: dict[str, Results], threshold: float | None) -> dict[str, Any]:
    """Returns the result of `compare`, given the rows of each run's test.tsv, by folder."""
    folders = [Path(name) for name in members]
    configs = [config_of(folder) for folder in folders]
    loss = configs[0].optim.loss
    ensemble, std = ensemble_of(members)
    check_threshold(threshold, ensemble, folders[0])
    analysis = {"options": differing_options(folders), "results": {}}
    for folder in folders:
        analysis["results"][str(folder)] = best_step(read_metrics(folder / "metrics.jsonl"))
    analysis |= metrics_together(members, ensemble, loss, threshold)
    analysis["best_two"] = difference_of_best(members, loss)
    correlation = analyse_intervals.uncertainty(ensemble.y, ensemble.prediction, std)
    analysis["uncertainty"] = correlation
    return analysis | rivals_or_reason(ensemble, configs[0], folders[0])


def rivals_or_reason(rows: Results, config: Config, folder: Path) -> dict[str, Any]:
    """Returns the metrics of `rivals`, or `no_rivals`: why these are not known."""
    if not is_here("analyse_rivals"):
        return {"no_rivals": "analyse_rivals.py, which fits it, is not here"}
    from analyse_rivals import pair_rival, rivals

    try:
        tables = tables_of(config.data, folder)
    except UserError as error:
        return {"no_rivals": str(error)}
    loss = config.optim.loss
    predictions = rivals(tables, loss) | pair_rival(tables, loss, config.data.cache_dir)
    return {"rivals": metrics_of_rivals(rows, predictions, loss)}


# ---- Files ---------------------------------------------------------------------------------------
def read_run(folder: Path) -> Results:
    """Returns the rows of a run's test.tsv; raises `UserError`, also if it is not finished."""
    file = folder / "test.tsv"
    if not os.path.isdir(folder):
        raise UserError(f"there is no run folder {folder}: name one, such as runs/NAME")
    state = read_status(folder).get("state", "finished")
    if state != "finished" and not os.path.exists(file):
        problem = f"{folder} has no test.tsv, as it is {state}"
        raise UserError(f"{problem}: wait, or start it again, which resumes it")
    return read_results(file)


def read_runs(folders: list[Path]) -> dict[str, Results]:
    """Returns the rows of each run's test.tsv by folder.

    Raises `UserError`, also if they are not of the same loss and test rows, or a run is named
    twice.
    """
    places = set()
    for folder in folders:
        if folder.resolve() in places:
            raise UserError(f"{folder} is named twice: name each run once")
        places.add(folder.resolve())
    members = {str(folder): read_run(folder) for folder in folders}
    losses = {folder: config_of(folder).optim.loss for folder in folders}
    for folder, loss in losses.items():
        if loss != losses[folders[0]]:
            raise UserError(
                f"{folder} was trained with optim.loss={loss}, {folders[0]} with "
                f"{losses[folders[0]]}: compare runs of one loss"
            )
    check_same_rows(list(members.values()), [folder / "test.tsv" for folder in folders])
    return members


def config_of(folder: Path) -> Config:
    """Returns the configuration of a run; raises `UserError`."""
    try:
        return load_config([folder / "config.yaml"])
    except UserError as error:
        raise UserError(
            f"{error}; {folder} is a run of another version of the template: "
            "analyse it with that one, or repeat it"
        ) from None


def check_threshold(threshold: float | None, rows: Results, folder: Path) -> None:
    """Raises `UserError` if no score of the run is below the threshold."""
    if threshold is not None and not (rows.y < threshold).any():
        raise UserError(f"{folder / 'test.tsv'} has no score below --threshold={threshold:g}")


def tables_of(config: data.DataConfig, folder: Path) -> Tables:
    """Returns the tables of a run; raises `UserError` if they have changed since."""
    tables = data.load(config)
    if read_checkpoint(folder / "checkpoints/best.pt")["data"] != tables.fingerprint():
        raise UserError("the tables have changed since the run")
    return tables


# ---- Runs side by side ---------------------------------------------------------------------------
def differing_options(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Returns, by folder, the options of each run that differ between runs, but for names."""
    options = {folder: read_options(folder / "config.yaml") for folder in folders}
    keys = {}  # in order
    for of_run in options.values():
        keys |= dict.fromkeys(of_run)
    differing = []
    for key in keys:
        texts = {str(of_run.get(key)) for of_run in options.values()}
        if len(texts) > 1 and key not in ("run.name", "run.dir"):
            differing.append(key)
    differing_of_run = {}
    for folder, of_run in options.items():
        differing_of_run[str(folder)] = {key: of_run.get(key) for key in differing}
    return differing_of_run


def best_step(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the best step and its metrics in validation and test, of a run's metrics.jsonl."""
    shown = {}
    tests = [row for row in rows if row["kind"] == "test"]
    if tests:
        test = tests[-1]
        step = test.get("best_step")
        vals = [row for row in rows if row["kind"] == "val"]
        val = next((row for row in vals if row.get("step") == step), {})
        shown["best step"] = step
        for name in ("loss", *metrics.names_in(test)):
            shown[f"val {name}"] = val.get(name)
            shown[f"test {name}"] = test.get(name)
    return shown


def points_and_labels(rows: Results) -> tuple[list[tuple[str, list]], str, str]:
    """Returns points (prediction, y) of each score, and what both axes are called, for the plot.

    Before the points of a score stand its name and Pearson's r. Of several scores, each is in units
    of its standard deviation; more than `COLOURED` are plotted together.
    """
    y = rows.y
    prediction = rows.prediction
    unit = ""
    if len(rows.targets) > 1:
        mean, std = mean_and_std(y)
        y = (y - mean) / std
        prediction = (prediction - mean) / std
        unit = " (standard units)"
    columns = {target: [t] for t, target in enumerate(rows.targets)}
    if len(columns) > COLOURED:
        columns = {f"mean of {len(columns):,} scores": list(range(len(columns)))}
    pearson = metrics.pearson(rows.y, rows.prediction)
    most = POINTS // len(columns)
    groups = []
    for name, numbers in columns.items():
        points = torch.stack([prediction[:, numbers].flatten(), y[:, numbers].flatten()], dim=1)
        points = points[points.isfinite().all(dim=1)]
        if len(points) > most:
            chosen = torch.linspace(0, len(points) - 1, most, dtype=torch.float64)
            points = points[chosen.long()]
        label = f"{name:.30}: Pearson {pearson[numbers].nanmean():.4f}"
        groups.append((label, points.tolist()))
    return groups, f"prediction{unit}", f"score{unit}"


if __name__ == "__main__":
    end_process(main())
