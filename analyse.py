"""Says what the test predictions of a run are worth, or of several runs, alone and together.

    python analyse.py RUN... [--threshold X]

It prints a table of the test rows, all and by groups, each beside the baseline and with the 95 %
interval of the difference, and another one of what can be said of the same rows without the model.
It writes test.json and a plot, test.svg, into the run folder.
With `--threshold X` it also prints how well scores below X are found. Of several runs, it first
prints a line for each: the options in which they differ, best step, metrics and seconds; then what
the mean of their predictions is worth, and whether their standard deviation tells where it errs.

Shapes: n rows of T scores.
"""

import json
import math
import statistics
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import data
import metrics
from checkpoint import explain_write_errors, write_atomically
from config import Config, load_config, read_options
from ddp_setup import set_threads
from errors import UserError
from evaluation import (
    MOST,
    analyse,
    beside_rivals,
    means_of,
    number_of_resamples,
    summary,
    target_figures,
)
from plots import scatter_svg
from results import Predictions, check_same_rows, read_predictions
from rivals import shared_pairs
from run_folder import read_metrics, read_warnings
from tables import Tables, mean_and_std

SHOWN = 20  # targets printed at most
POINTS = 2000  # in the plot at most
COLUMNS = {
    "n": "rows",
    "rows": "with those without a score",
    "pearson": "Pearson",
    "baseline_pearson": "baseline",
    "gain": "difference (95 %)",
    "ceiling_pearson": "noise ceiling",
    "weighted_pearson": "weighted Pearson",
    "baseline_weighted_pearson": "weighted baseline",
    "row_pearson": "row Pearson",
    "baseline_row_pearson": "row baseline",
    "row_gain": "difference (95 %)",
    "mse_top20": "MSE of top 20",
    "spearman": "Spearman",
    "r2": "R2",
    "ceiling_r2": "R2 ceiling",
    "mse": "MSE",
    "auroc": "AUROC",
    "average_precision": "avg. precision",
}


# ---- The command ---------------------------------------------------------------------------------
def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="also how well scores below X are found"
    )
    arguments = parser.parse_args()
    set_threads(local_world_size=1)
    try:
        if len(arguments.runs) == 1:
            analyse_run(arguments.runs[0], arguments.threshold)
        else:
            analyse_runs(arguments.runs, arguments.threshold)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)


def analyse_run(folder: Path, threshold: float | None = None) -> None:
    """Prints what a run's test.tsv says, and writes test.json and test.svg beside it.

    Raises `UserError`.
    """
    file = folder / "test.tsv"
    rows = read_predictions(file)
    config = config_of(folder)
    check_threshold(threshold, rows, file)
    result = analyse(rows, config.optim.loss, threshold)
    print(f"{file}: {rows.counts()}")
    print_warnings(folder)
    print("\n".join(table(result)))
    print(
        f"95 % of {result['resamples']:,} samples of {result['sets_drawn']:,} sets of genes and "
        f"{result['genes_drawn']:,} unseen genes, each with all its rows"
    )
    if rows.sd is not None:
        print(noise_text(result))
    try:
        tables = tables_of(rows, config.data)
        result["shared_pairs"] = shared_pairs(tables)
        print(f"{result['shared_pairs']:,} rows knock out two nodes of a training row")
        result["rivals"] = beside_rivals(rows, tables, config.optim.loss)
        print("\n".join(["", *table_of_rivals(result["rivals"])]))
    except UserError as error:
        print(f"no comparison with what can be said without the model: {error}")
    without_nan = json.loads(json.dumps(result), parse_constant=lambda name: None)
    write(folder / "test.json", json.dumps(without_nan, indent=1) + "\n")
    write(folder / "test.svg", plot(rows))
    print(f"written: {folder / 'test.json'}, {folder / 'test.svg'}")


def print_warnings(folder: Path) -> None:
    for warning in read_warnings(folder):
        print(f"{folder} says: {' '.join(warning.split())}")


def noise_text(result: dict) -> str:
    """Returns how far a model comes where the noise of the scores is known."""
    share = result["r2_of_ceiling"]
    if math.isnan(share):
        return "the scores vary no more than their noise, by the column sd: R2 has no ceiling"
    return f"R2 is {share:.1%} of the ceiling that the noise leaves"


def analyse_runs(folders: list[Path], threshold: float | None = None) -> None:
    """Prints a table of the runs, what their mean prediction is worth, and what their spread tells.

    Raises `UserError` if they have different test rows.
    """
    print("\n".join([*overview(folders), ""]))
    for folder in folders:
        print_warnings(folder)
    files = [folder / "test.tsv" for folder in folders]
    members = [read_predictions(file) for file in files]
    check_same_rows(members, files)
    rows = members[0]
    config = config_of(folders[0])
    loss = config.optim.loss
    check_threshold(threshold, rows, files[0])
    lines = {}
    for folder, member in zip(folders, members, strict=True):
        each = target_figures(member, loss, threshold)
        lines[str(folder)] = means_of(each)
    means = {}
    for name in lines[str(folders[0])]:
        means[name] = statistics.fmean(figures[name] for figures in lines.values())
    lines["mean of these"] = means
    predictions = torch.stack([member.prediction for member in members])
    std, mean = torch.std_mean(predictions, dim=0)
    resamples = number_of_resamples(rows.y.numel())
    unit = rows.unit()
    ensemble = replace(rows, prediction=mean)
    lines["ensemble"] = summary(ensemble, unit, loss, threshold, resamples)
    print(f"{len(folders)} runs: {rows.counts()}")
    print("\n".join(text_table(lines, COLUMNS)))
    correlation, errors = metrics.uncertainty(rows.y, mean, std)
    fifths = ", ".join(map(cell, errors))
    print(f"Spearman of standard deviation and absolute error: {cell(correlation)}")
    print(f"mean absolute error by fifths of the standard deviation: {fifths}")
    try:
        of_rivals = beside_rivals(ensemble, tables_of(rows, config.data), loss)
        print("\n".join(["", *table_of_rivals(of_rivals)]))
    except UserError as error:
        print(f"no comparison with what can be said without the model: {error}")


def config_of(folder: Path) -> Config:
    """Returns the configuration of a run; raises `UserError`."""
    try:
        return load_config(folder / "config.yaml")
    except UserError as error:
        raise UserError(
            f"{error}; {folder} is a run of another version of the template: "
            "analyse it with that one, or repeat it"
        ) from None


def check_threshold(threshold: float | None, rows: Predictions, file: Path) -> None:
    """Raises `UserError` if no score is below the threshold."""
    if threshold is not None and not (rows.y < threshold).any():
        raise UserError(f"{file} has no score below --threshold={threshold:g}")


# ---- Runs side by side ---------------------------------------------------------------------------
def overview(folders: list[Path]) -> list[str]:
    """Returns a table of runs: options in which they differ, best step, metrics and seconds."""
    options = [read_options(folder / "config.yaml") for folder in folders]
    differing = []
    for key in options[0]:
        values = {str(each.get(key)) for each in options}
        if len(values) > 1 and key not in ("run.name", "run.dir"):
            differing.append(key)
    lines = {}
    for folder, each in zip(folders, options, strict=True):
        chosen = {key: str(each.get(key)) for key in differing}
        lines[str(folder)] = chosen | results_of(read_metrics(folder / "metrics.jsonl"))
    titles = {name: name for values in lines.values() for name in values}
    return text_table(lines, titles)


def results_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns best step, its metrics in validation and test, and seconds of the rows of a run."""
    result = {}
    tests = [row for row in rows if row["kind"] == "test"]
    if tests:
        test = tests[-1]
        best_step = test["best_step"]
        val = next((row for row in rows if row["kind"] == "val" and row["step"] == best_step), {})
        result["best step"] = best_step
        for name in ("loss", *metrics.names_in(test)):
            result[f"val {name}"] = val.get(name)
            result[f"test {name}"] = test.get(name)
    return result | {"seconds": round(seconds_of(rows))}


def seconds_of(rows: list[dict[str, Any]]) -> float:
    """Returns the time between the starts and the ends of a run; a killed one has no end."""
    total = 0.0
    start = None
    for row in rows:
        event = row.get("event")
        if event in ("started", "resumed"):
            start = row["time"]
        elif event and start is not None:
            total += row["time"] - start
            start = None
    return total


# ---- Files ---------------------------------------------------------------------------------------
def tables_of(rows: Predictions, config: data.DataConfig) -> Tables:
    """Returns the tables that these rows are from; raises `UserError` if they cannot be read."""
    tables = data.load(config)
    test = tables.rows("test")
    y = tables.y[test]
    deletions = tables.perturbed_ptr.diff()[test]
    has_same_size = y.shape == rows.y.shape and torch.equal(deletions, rows.deletions())
    mean, std = mean_and_std(tables.y[tables.rows("train")])  # as in `KnockoutTask.digits`
    y = (y - mean) / std
    written = (rows.y - mean) / std
    if not (has_same_size and torch.allclose(y, written, rtol=1e-5, atol=1e-5, equal_nan=True)):
        raise UserError("the tables have changed since the run")
    return tables


def write(path: Path, text: str) -> None:
    with explain_write_errors(path, UserError, "copy the run folder"):
        write_atomically(path, [text])


# ---- What is shown -------------------------------------------------------------------------------
def table(result: dict) -> list[str]:
    """Returns the lines of a table: all rows, each smaller group, and the first targets."""
    lines = {"all": result}
    for name in ("unseen", "deletions"):
        for k, group in result[f"by_{name}"].items():
            or_more = "+" if k == str(MOST) else ""
            if 0 < group["cells"] < result["cells"]:
                lines[f"{name} {k}{or_more}"] = group
    for level, group in result["by_level"].items():
        lines[f"level {level}"] = group
    targets = result.get("targets", {})
    lines |= dict(list(targets.items())[:SHOWN])
    text = text_table(lines, COLUMNS)
    if len(targets) > SHOWN:
        text.append(f"and {len(targets) - SHOWN:,} more scores, which are in test.json")
    for name, title in (("pearson", "Pearson"), ("baseline_pearson", "baseline")):
        if f"{name}_quartiles" in result:
            quartiles = ", ".join(map(cell, result[f"{name}_quartiles"]))
            text.append(f"{title}, quartiles over the scores: {quartiles}")
    return text


def table_of_rivals(figures: dict[str, dict]) -> list[str]:
    """Returns the lines of a table of `beside_rivals`, and a sentence about the strongest."""
    strongest = next(iter(figures))
    low, high = figures[strongest]["gain"]
    place = "not clearly above it"
    if low > 0:
        place = "above it"
    if high < 0:
        place = "below it"
    sentence = f"strongest without the model: {strongest}; the model is {place}"
    return [*text_table(figures, COLUMNS), sentence]


def text_table(lines: dict[str, dict], titles: dict[str, str]) -> list[str]:
    """Returns the lines of a table: a header, and figures under each title that has some."""
    names = [name for name in titles if any(name in figures for figures in lines.values())]
    rows = [["", *(titles[name] for name in names)]]
    for label, figures in lines.items():
        rows.append([label, *(cell(figures.get(name, "")) for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for label, *cells in rows:
        padded = map(str.rjust, cells, widths[1:])
        text.append("  ".join([label.ljust(widths[0]), *padded]))
    return text


def cell(value: object) -> str:
    """Returns a text, an interval, a whole number or a number as a text, "-" if undefined."""
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


def plot(rows: Predictions) -> str:
    """Returns an SVG of scores against predictions; of several scores, in units of their std."""
    y = rows.y
    prediction = rows.prediction
    unit = ""
    if len(rows.targets) > 1:
        mean, std = mean_and_std(y)
        y = (y - mean) / std
        prediction = (prediction - mean) / std
        unit = " (standard units)"
    points = torch.stack([prediction.flatten(), y.flatten()], dim=1)
    points = points[points.isfinite().all(dim=1)]
    if len(points) > POINTS:
        chosen = torch.linspace(0, len(points) - 1, POINTS, dtype=torch.float64)
        points = points[chosen.long()]
    return scatter_svg(points.tolist(), f"prediction{unit}", f"score{unit}")


if __name__ == "__main__":
    main()
