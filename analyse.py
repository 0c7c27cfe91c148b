"""Says what the test predictions of a run are worth, or of several runs, alone and together.

    python analyse.py RUN... [--threshold X]

It prints a table of the test rows, all and by groups, each beside the additive baseline and with
the 95 % interval of the difference, and writes test.json and a plot, test.svg, into the run folder.
With `--threshold X` it also prints how well scores below X are found. Of several runs, it first
prints a line for each: the options in which they differ, best step, metrics and seconds; then what
the mean of their predictions is worth, and whether their standard deviation tells where it errs.

Shapes: n rows of T scores.
"""

import argparse
import json
import math
import statistics
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import data
from checkpoint import explain_write_errors, write_atomically
from config import Config, load_config, read_options
from errors import UserError
from metrics import (
    METRICS,
    as_ranked,
    auroc,
    average_precision,
    centred,
    interval,
    mse,
    pearson,
    pearson_of_rows,
    r2,
    resampled_mean,
    resampled_pearson,
    spearman,
    uncertainty,
)
from plots import scatter_svg
from tables import Tables, mean_and_std, parse_number

PROFILE = 20  # targets: with more of them, a row is a profile
MOST = 3  # of deletions and unseen genes; rows with more are counted with those
LEVELS = 12  # most that are shown as groups of rows
CELLS = 10**8  # rows x targets x resamples of an interval, about, which takes half a minute
SHOWN = 20  # targets printed at most
POINTS = 2000  # in the plot at most
COLUMNS = {
    "n": "rows",
    "pearson": "Pearson",
    "baseline_pearson": "baseline",
    "gain": "difference (95 %)",
    "row_pearson": "row Pearson",
    "baseline_row_pearson": "row baseline",
    "row_gain": "difference (95 %)",
    "mse_top20": "MSE of top 20",
    "spearman": "Spearman",
    "r2": "R2",
    "mse": "MSE",
    "auroc": "AUROC",
    "average_precision": "avg. precision",
}


@dataclass
class Predictions:
    """The content of a test.tsv."""

    genes: list[str]  # of each row, separated by commas
    unseen: Tensor  # long [n], how many of them occur in no training row
    targets: list[str]  # name of each of the T scores
    y: Tensor  # float64 [n, T], nan where a score is missing
    prediction: Tensor  # float64 [n, T]
    baseline: Tensor  # float64 [n, T], the additive one

    def levels(self) -> list[str]:
        """Returns the level that all genes of a row have, such as "0.3", or "several".

        It is "0" for a row without genes.
        """
        levels = []
        for names in self.genes:
            ends = {name.rpartition("=")[2] if "=" in name else "0" for name in names.split(",")}
            ends = {
                end if math.isfinite(parse_number(end)) else "0" for end in ends
            }  # the end of a name
            levels.append(ends.pop() if len(ends) == 1 else "several")
        return levels

    def deletions(self) -> Tensor:
        """Returns how many genes each row names, long [n]."""
        return torch.tensor([names.count(",") + 1 if names else 0 for names in self.genes])


# ---- The command ---------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="also how well scores below X are found"
    )
    arguments = parser.parse_args()
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
    rows = read_predictions(folder / "test.tsv")
    config = config_of(folder)
    check_threshold(threshold, rows, folder)
    result = analyse(rows, config.optim.loss, threshold)
    print(f"{folder / 'test.tsv'}: rows {len(rows.y):,}, scores {len(rows.targets):,}")
    print("\n".join(table(result)))
    try:
        result["shared_pairs"] = shared_pairs(tables_of(rows, config.data))
        print(f"{result['shared_pairs']:,} rows knock out two nodes of a training row")
    except UserError as error:
        print(f"rows that knock out two nodes of a training row were not counted: {error}")
    write(folder / "test.json", json.dumps(without_nan(result), indent=1) + "\n")
    write(folder / "test.svg", plot(rows))
    print(f"written: {folder / 'test.json'}, {folder / 'test.svg'}")


def analyse_runs(folders: list[Path], threshold: float | None = None) -> None:
    """Prints a line for each run, and what the mean of their predictions is worth.

    Also prints whether their spread tells errors. Raises `UserError` if the runs have different
    test rows.
    """
    print("\n".join(text_table(overview(folders))))
    members = [read_predictions(folder / "test.tsv") for folder in folders]
    first = members[0]
    for folder, member in zip(folders, members, strict=True):
        is_same = (member.genes, member.targets) == (first.genes, first.targets)
        if not (is_same and torch.equal(member.y.nan_to_num(), first.y.nan_to_num())):
            paths = f"{folder / 'test.tsv'} has other test rows than {folders[0] / 'test.tsv'}"
            raise UserError(f"{paths}: compare runs of one split")
    loss = config_of(folders[0]).optim.loss
    check_threshold(threshold, first, folders[0])
    lines = {}
    for folder, member in zip(folders, members, strict=True):
        each = target_figures(member.y, member.prediction, member.baseline, loss, threshold)
        lines[str(folder)] = {name: values.nanmean().item() for name, values in each.items()}
    means = {}
    for name in lines[str(folders[0])]:
        means[name] = statistics.fmean(figures[name] for figures in lines.values())
    lines["mean of these"] = means
    std, mean = torch.std_mean(torch.stack([member.prediction for member in members]), dim=0)
    resamples = number_of_resamples(first.y.numel())
    lines["ensemble"] = summary(first.y, mean, first.baseline, loss, threshold, resamples)
    print(f"{len(folders)} runs: rows {len(first.y):,}, scores {len(first.targets):,}")
    print("\n".join(text_table(lines)))
    correlation, errors = uncertainty(first.y, mean, std)
    fifths = ", ".join(map(cell, errors))
    print(f"Spearman of standard deviation and absolute error: {cell(correlation)}")
    print(f"mean absolute error by fifths of the standard deviation: {fifths}")


def config_of(folder: Path) -> Config:
    """Returns the configuration of a run; raises `UserError`."""
    try:
        return load_config(folder / "config.yaml")
    except UserError as error:
        raise UserError(
            f"{error} ({folder / 'config.yaml'}); analyse a run with the version of the template "
            "that wrote it, or repeat it with this one"
        ) from None


def check_threshold(threshold: float | None, rows: Predictions, folder: Path) -> None:
    """Raises `UserError` if no score is below the threshold."""
    if threshold is not None and not (rows.y < threshold).any():
        raise UserError(f"{folder / 'test.tsv'} has no score below --threshold={threshold:g}")


# ---- Runs side by side ---------------------------------------------------------------------------
def overview(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Returns for each run the options in which they differ, best step, metrics and seconds."""
    options = [read_options(folder / "config.yaml") for folder in folders]
    keys = [key for key in options[0] if key not in ("run.name", "run.dir")]
    differing = [key for key in keys if len({str(each.get(key)) for each in options}) > 1]
    lines = {}
    for folder, each in zip(folders, options, strict=True):
        chosen = {key: str(each.get(key)) for key in differing}
        lines[str(folder)] = {**chosen, **results_of(read_metrics(folder))}
    return lines


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics.jsonl; raises `UserError` if it cannot be read."""
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def results_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns best step, its metrics in validation and test, and seconds of the rows of a run."""
    tests = [row for row in rows if row["kind"] == "test"]
    result = {}
    if tests:
        best_step = tests[-1]["best_step"]
        validated = [row for row in rows if row["kind"] == "val" and row["step"] == best_step]
        result["best step"] = best_step
        for name in ("loss", *METRICS):
            result[f"val {name}"] = validated[-1].get(name) if validated else None
            result[f"test {name}"] = tests[-1].get(name)
    result["seconds"] = round(seconds_of(rows))
    return result


def seconds_of(rows: list[dict[str, Any]]) -> float:
    """Returns the time between the starts and the ends of a run; a killed one has no end."""
    total = 0.0
    start = None
    for row in rows:
        if row["kind"] != "event":
            continue
        if row["event"] in ("started", "resumed"):
            start = row["time"]
        elif start is not None:
            total += row["time"] - start
            start = None
    return total


# ---- Files ---------------------------------------------------------------------------------------
def read_predictions(path: Path) -> Predictions:
    """Returns the rows of a test.tsv; raises `UserError` if it is not as train.py writes it."""
    genes = []
    unseen = []
    numbers = array("d")
    line_number = 1
    try:
        with path.open(encoding="utf-8") as file:
            header = file.readline().rstrip("\n").split("\t")
            targets = header[2::3]
            columns = [
                name + suffix for name in targets for suffix in ("", "_prediction", "_baseline")
            ]
            if not targets or header != ["genes", "unseen", *columns]:
                raise ValueError(
                    "the header is not genes, unseen, and three columns for each score"
                )
            for line in file:
                line_number += 1
                cells = line.rstrip("\n").split("\t")
                if len(cells) != len(header):
                    raise ValueError(f"{len(cells)} cells under {len(header)} columns")
                genes.append(cells[0])
                unseen.append(int(cells[1]))
                numbers.extend([float(cell or "nan") for cell in cells[2:]])
            if not genes:
                raise ValueError("there are no rows")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; a run writes it when it finishes"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path}:{line_number}: {error}; start the run again, which writes it anew"
        ) from None
    scores = torch.frombuffer(numbers, dtype=torch.float64).view(len(genes), len(targets), 3)
    y, prediction, baseline = (values.clone() for values in scores.unbind(dim=2))
    return Predictions(genes, torch.tensor(unseen), targets, y, prediction, baseline)


def tables_of(rows: Predictions, config: data.DataConfig) -> Tables:
    """Returns the tables that these rows are from.

    Raises `DataError` or `UserError` if they cannot be read.
    """
    tables = data.load(config)
    test = tables.rows("test")
    y = tables.y[test]
    same = y.shape == rows.y.shape and torch.equal(
        tables.perturbed_ptr.diff()[test], rows.deletions()
    )
    if not (same and torch.allclose(y, rows.y, rtol=1e-6, equal_nan=True)):
        raise UserError("the tables have changed since the run")
    return tables


def write(path: Path, text: str) -> None:
    with explain_write_errors(path, UserError, "copy the run folder"):
        write_atomically(path, [text])


def without_nan(value: object) -> object:
    """Returns nested results with None, which JSON knows, in place of nan."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- Figures -------------------------------------------------------------------------------------
def analyse(rows: Predictions, loss: str = "squared", threshold: float | None = None) -> dict:
    """Returns `summary` of all rows, by number of unseen and deleted genes, by level if there are 2
    to 12, and each target's figures if T > 1."""
    resamples = number_of_resamples(rows.y.numel())
    options = {"loss": loss, "threshold": threshold, "resamples": resamples}
    result = summary(rows.y, rows.prediction, rows.baseline, **options)

    def of_group(chosen: Tensor) -> dict:
        return summary(rows.y[chosen], rows.prediction[chosen], rows.baseline[chosen], **options)

    for name, count in {"unseen": rows.unseen, "deletions": rows.deletions()}.items():
        group = count.clamp(max=MOST)
        result[f"by_{name}"] = {}
        for k in group.unique().tolist():
            result[f"by_{name}"][str(k)] = of_group(group == k)
    levels = rows.levels()
    result["by_level"] = {}
    if 1 < len(set(levels)) <= LEVELS:
        numbers = sorted(set(levels) - {"several"}, key=float)
        for level in [*numbers, *{"several"}.intersection(levels)]:
            result["by_level"][level] = of_group(torch.tensor([own == level for own in levels]))
    if len(rows.targets) > 1:
        each = target_figures(rows.y, rows.prediction, rows.baseline, loss, threshold)
        result["targets"] = {
            target: {name: values[t].item() for name, values in each.items()}
            for t, target in enumerate(rows.targets)
        }
    return result


def summary(
    y: Tensor,
    prediction: Tensor,
    baseline: Tensor,
    loss: str,
    threshold: float | None,
    resamples: int,
) -> dict:
    """Returns the number of rows, the means over targets of `target_figures`, and `gain`.

    That is the 95 % interval of Pearson's r less the baseline's. Of profiles, also
    `profile_figures`, the 95 % interval of Pearson's r over the targets of a row less the
    baseline's, and quartiles over the targets.
    """
    each = target_figures(y, prediction, baseline, loss, threshold)
    means = {name: values.nanmean().item() for name, values in each.items()}
    gains = resampled_pearson(y, prediction, resamples) - resampled_pearson(y, baseline, resamples)
    result = {"n": len(y), **means, "gain": interval(gains)}
    if y.size(1) > PROFILE:
        result["gain"] = interval(centred(gains, means["pearson"] - means["baseline_pearson"]))
        quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        for name in ("pearson", "baseline_pearson"):
            result[f"{name}_quartiles"] = each[name].nanquantile(quartiles).tolist()
        result |= profile_figures(y, prediction, baseline)
        row_gains = pearson_of_rows(y, prediction) - pearson_of_rows(y, baseline)
        result["row_gain"] = interval(resampled_mean(row_gains, resamples))
    return result


def profile_figures(y: Tensor, prediction: Tensor, baseline: Tensor) -> dict[str, float]:
    """Returns what is usual for profiles: Pearson's r over the targets of a row, averaged over the
    rows, and the squared error of the targets that change most in each row."""
    largest = y.abs().nan_to_num().topk(PROFILE, dim=1).indices
    error = (prediction - y).square().gather(1, largest)
    return {
        "row_pearson": pearson(y.T, prediction.T).nanmean().item(),
        "baseline_row_pearson": pearson(y.T, baseline.T).nanmean().item(),
        "mse_top20": error.nanmean().item(),
    }


def target_figures(
    y: Tensor,
    prediction: Tensor,
    baseline: Tensor,
    loss: str = "squared",
    threshold: float | None = None,
) -> dict[str, Tensor]:
    """Returns the figures of each target, [T], nan where undefined.

    With a threshold, or binary scores, these are also how well rows are found: scores below the
    threshold by low predictions, scores of 1 by high ones.
    """
    result = {
        "mse": mse(y, prediction),
        "r2": r2(y, prediction),
        "pearson": pearson(y, prediction),
        "spearman": spearman(y, prediction),
        "baseline_pearson": pearson(y, baseline),
    }
    positive = None
    certainty = as_ranked(y, prediction)
    if threshold is not None:
        positive = y < threshold
        certainty = -certainty
    elif loss == "binary":
        positive = y == 1
    if positive is not None:
        result["auroc"] = auroc(positive, certainty)
        result["average_precision"] = average_precision(positive, certainty)
    return result


def number_of_resamples(num_cells: int) -> int:
    """Returns how many resamples an interval takes from a table of so many scores."""
    return max(100, min(1000, CELLS // num_cells))


def shared_pairs(tables: Tables) -> int:
    """Returns how many test rows knock out two nodes of a training row.

    Only rows of at most 10 deletions count.
    """
    row = tables.sample()
    few = tables.perturbed_ptr.diff()[row] <= 10
    row, node = row[few], tables.perturbed[few]
    pairs = []
    for k in range(1, 10):  # nodes that stand k apart in the same row
        pair = torch.stack([node[:-k] * len(tables.genes) + node[k:], row[:-k]])
        pairs.append(pair[:, row[:-k] == row[k:]])
    pair, row = torch.cat(pairs, dim=1)
    is_train, is_test = tables.is_in("train")[row], tables.is_in("test")[row]
    shared = torch.isin(pair[is_test], pair[is_train])
    return len(row[is_test][shared].unique())


# ---- What is shown -------------------------------------------------------------------------------
def table(result: dict) -> list[str]:
    """Returns the lines of a table: all rows, each smaller group, and the first targets."""
    lines = {"all": result}
    for name in ("unseen", "deletions"):
        for k, group in result[f"by_{name}"].items():
            if group["n"] < result["n"]:
                lines[f"{name} {k}+" if k == str(MOST) else f"{name} {k}"] = group
    lines |= {f"level {level}": group for level, group in result["by_level"].items()}
    targets = result.get("targets", {})
    lines |= dict(list(targets.items())[:SHOWN])
    text = text_table(lines)
    if len(targets) > SHOWN:
        text.append(f"and {len(targets) - SHOWN:,} more scores, which are in test.json")
    for name, title in (("pearson", "Pearson"), ("baseline_pearson", "baseline")):
        if f"{name}_quartiles" in result:
            quartiles = ", ".join(map(cell, result[f"{name}_quartiles"]))
            text.append(f"{title}, quartiles over the scores: {quartiles}")
    return text


def text_table(lines: dict[str, dict]) -> list[str]:
    """Returns the lines of a table: a header, and figures under each label."""
    columns = [name for name in COLUMNS if any(name in values for values in lines.values())]
    cells = [["", *(COLUMNS[name] for name in columns)]]
    cells += [
        [label, *(cell(values.get(name)) for name in columns)] for label, values in lines.items()
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
    ]


def cell(value: object) -> str:
    """Returns a figure as text: an interval, a number of rows, or a number, "-" if undefined."""
    if value is None:
        return ""
    if isinstance(value, list):
        low, high = value
        return "-" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if 1e-3 < abs(value) < 1e4 or value == 0 else f"{value:.3e}"


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
        chosen = torch.linspace(0, len(points) - 1, POINTS, dtype=torch.float64).long()
        points = points[chosen]
    return scatter_svg(points.tolist(), f"prediction{unit}", f"score{unit}")


if __name__ == "__main__":
    main()
