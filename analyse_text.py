"""Metrics and rivals of runs as lines of text, in tables."""

import math
from collections.abc import Collection

import metrics
from analyse_metrics import MOST, name_of_gain, with_pearson

SHOWN = 20  # targets printed at most
NO_RIVAL = "test.tsv has no rival: groups of rows have no difference from one (see model.start)"
DIFFERENCE = "difference (95 %)"
# Titles of the columns behind those of `METRICS` and their rivals.
TITLES = {
    "ceiling_pearson": "noise ceiling",
    "mse_top20": "MSE of top 20",
    "spearman": "Spearman",
    "r2": "R2",
    "ceiling_r2": "R2 ceiling",
    "mse": "MSE",
    "auroc": "AUROC",
    "average_precision": "avg. precision",
}


def columns_beside(rivals: Collection[str]) -> dict[str, str]:
    """Returns the names and titles of all columns, those of rivals behind the model's."""
    titles = {"n": "rows", "rows": "with those without a score", "pearson": "Pearson"}
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


def lines_of_run(analysis: dict, rivals: Collection[str], has_noise: bool) -> list[str]:
    """Returns the metrics of a run as lines, with the ceiling of R2 if there is one.

    `rivals` are the names of those in its test.tsv.
    """
    num_resamples = analysis["resamples"]
    num_sets = analysis["sets_drawn"]
    num_genes = analysis["genes_drawn"]
    lines = table(analysis, rivals)
    if rivals or "rivals" in analysis:
        lines.append(
            f"95 % of {num_resamples:,} samples of {num_sets:,} sets of genes and "
            f"{num_genes:,} unseen genes, each with all its rows"
        )
    if has_noise:
        lines.append(noise_text(analysis))
    return lines + lines_of_rivals(analysis, rivals)


def lines_of_runs(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the metrics of several runs, alone and together, as lines.

    `rivals` are the names of those in their test.tsv.
    """
    rows = list(analysis["figures"].items())
    rows += [("mean of these", analysis["mean"]), ("ensemble", analysis["ensemble"])]
    lines = text_table(rows, columns_beside(rivals))
    best_two = analysis["best_two"]
    best, second = best_two["runs"]
    difference = cell(best_two["difference"])
    interval = cell(best_two["gain"])
    metric = columns_beside(rivals)[metrics.first_metric()]
    lines.append(f"best two, {best} less {second}: {metric} {difference}, 95 % {interval}")
    uncertainty = cell(analysis["uncertainty"])
    lines.append(f"Spearman of standard deviation and absolute error: {uncertainty}")
    return lines + lines_of_rivals(analysis, rivals)


def lines_of_rivals(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the metrics of the rivals as lines, or a line that says why they are not known.

    `rivals` are the names of those in test.tsv.
    """
    if "no_rivals" in analysis:
        reason = analysis["no_rivals"]
        return [f"no comparison with what can be said without the model: {reason}"]
    lines = [] if rivals else [NO_RIVAL]
    return [*lines, "", *table_of_rivals(analysis["rivals"])]


def noise_text(analysis: dict) -> str:
    """Returns a sentence with R2 as a share of its ceiling, the R2 that noisy scores allow."""
    ratio = analysis["r2_of_ceiling"]
    if math.isnan(ratio):
        return "the scores vary no more than their noise, by the column sd: R2 has no ceiling"
    return f"R2 is {ratio:.1%} of the ceiling that the noise leaves"


def table(analysis: dict, rivals: Collection[str]) -> list[str]:
    """Returns the lines of a table of metrics: all rows, each smaller group, the first targets."""
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
        text.append(f"and {len(targets) - SHOWN:,} more scores, which are in test.json")
    return text


def table_of_rivals(rivals: dict[str, dict]) -> list[str]:
    """Returns the lines of a table of `metrics_of_rivals`, and a sentence about the strongest.

    An end of the interval that is printed as 0 is none: equal predictions differ by the digits of
    their file.
    """
    strongest = next(iter(rivals))
    of_strongest = rivals[strongest]
    low, high = of_strongest[name_of_gain(metrics.first_metric())]
    place = "not clearly above it"
    if round(low, 4) > 0:
        place = "above it"
    if round(high, 4) < 0:
        place = "below it"
    sentence = f"strongest without the model: {strongest}; the model is {place}"
    return [*text_table(list(rivals.items()), columns_beside([])), sentence]


def text_table(rows: list[tuple[str, dict]], titles: dict[str, str]) -> list[str]:
    """Returns the lines of a table: a header, and the cells under each title that has some.

    A row is its label, and its cells by name; `titles` has the title of each name.
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
    """Returns the text of a cell: a text, an interval, or a number; "-" if it is not defined."""
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
