"""`python -m tests.check test RUN...`: what predictions of test rows are worth, of one run or more.

Shapes: n rows of T scores.
"""

import argparse
import json
import math
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import checkpoint
import config
import data
import metrics
import tables
import train
from errors import DataError, UserError
from tables import Tables

MOST = 3  # of deletions and unseen genes; rows with more are counted with those
LEVELS = 12  # most that are shown as groups of rows
CELLS = 10**8  # rows x targets x resamples of an interval, about, which takes half a minute
SHOWN = 20  # targets printed at most
POINTS = 2000  # in the plot at most
SIZE = 400  # of the plot
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
                end if math.isfinite(tables.parse_number(end)) else "0" for end in ends
            }  # the end of a name
            levels.append(ends.pop() if len(ends) == 1 else "several")
        return levels

    def deletions(self) -> Tensor:
        """Returns how many genes each row names, long [n]."""
        return torch.tensor([names.count(",") + 1 if names else 0 for names in self.genes])


# ---- The check -----------------------------------------------------------------------------------
def test(options: argparse.Namespace) -> None:
    """Prints what a run's test.tsv says; raises `UserError`.

    Writes it to test.json and test.svg beside test.tsv. Of several runs, it prints what they are
    worth as an ensemble.
    """
    if not options.arguments:
        raise UserError("test takes run folders, such as runs/default")
    folder = Path(options.arguments[0])
    rows = read_predictions(folder / "test.tsv")
    try:
        config = config.load_config(
            SimpleNamespace(config=folder / "config.yaml", overrides=[], checkpoint=None)
        )
    except UserError as error:
        advice = (
            "analyse a run with the version of the template that wrote it, or repeat it with this "
            "one"
        )
        raise UserError(f"{error} ({folder / 'config.yaml'}); {advice}") from None
    if options.threshold is not None and not (rows.y < options.threshold).any():
        raise UserError(
            f"{folder / 'test.tsv'} has no score below --threshold={options.threshold:g}"
        )
    if len(options.arguments) > 1:
        return test_ensemble(options, config.optim.loss)
    result = analyse(rows, config.optim.loss, options.threshold)
    print(f"{folder / 'test.tsv'}: rows {len(rows.y):,}, scores {len(rows.targets):,}")
    print("\n".join(table(result)))
    try:
        result["shared_pairs"] = shared_pairs(tables_of(rows, config.data))
        print(f"{result['shared_pairs']:,} rows knock out two nodes of a training row")
    except (DataError, UserError) as error:
        print(f"rows that knock out two nodes of a training row were not counted: {error}")
    write(folder / "test.json", json.dumps(without_nan(result), indent=1) + "\n")
    write(folder / "test.svg", scatter_svg(rows))
    print(f"written: {folder / 'test.json'}, {folder / 'test.svg'}")


def test_ensemble(options: argparse.Namespace, loss: str) -> None:
    """Prints the figures of several runs and of the mean of their predictions.

    Also prints whether their spread tells errors.
    """
    paths = [Path(folder, "test.tsv") for folder in options.arguments]
    members = [read_predictions(path) for path in paths]
    first = members[0]
    for path, member in zip(paths, members, strict=True):
        same = (member.genes, member.targets) == (first.genes, first.targets)
        if not (same and torch.equal(member.y.nan_to_num(), first.y.nan_to_num())):
            raise UserError(
                f"{path} has other test rows than {paths[0]}: compare runs of one split"
            )
    figures_of_members = []
    for member in members:
        each = target_figures(member.y, member.prediction, member.baseline, loss, options.threshold)
        figures_of_members.append({name: values.nanmean().item() for name, values in each.items()})
    means = {
        name: statistics.fmean(each[name] for each in figures_of_members)
        for name in figures_of_members[0]
    }
    std, mean = torch.std_mean(torch.stack([member.prediction for member in members]), dim=0)
    settings = {
        "loss": loss,
        "threshold": options.threshold,
        "resamples": number_of_resamples(first.y.numel()),
    }
    ensemble = summary(first.y, mean, first.baseline, **settings)
    lines = dict(zip(options.arguments, figures_of_members, strict=True))
    lines |= {"mean of these": means, "ensemble": ensemble}
    print(f"{len(paths)} runs: rows {len(first.y):,}, scores {len(first.targets):,}")
    print("\n".join(text_table(lines)))
    correlation, errors = uncertainty(first.y, mean, std)
    print(f"Spearman of standard deviation and absolute error: {cell(correlation)}")
    print(
        f"mean absolute error by fifths of the standard deviation: {', '.join(map(cell, errors))}"
    )


def read_predictions(path: Path) -> Predictions:
    """Returns the rows of a test.tsv; raises `UserError` if it is not as train.py writes it."""
    genes, unseen, numbers = [], [], array("d")
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
    with checkpoint.explain_write_errors(path, UserError, "copy the run folder"):
        checkpoint.write_atomically(path, [text])


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
    if y.size(1) > train.PROFILE:
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
    largest = y.abs().nan_to_num().topk(train.PROFILE, dim=1).indices
    error = (prediction - y).square().gather(1, largest)
    return {
        "row_pearson": metrics.pearson(y.T, prediction.T).nanmean().item(),
        "baseline_row_pearson": metrics.pearson(y.T, baseline.T).nanmean().item(),
        "mse_top20": error.nanmean().item(),
    }


def target_figures(
    y: Tensor,
    prediction: Tensor,
    baseline: Tensor,
    loss: str = "squared",
    threshold: float | None = None,
) -> dict[str, Tensor]:
    """Returns each target's `figures`, and the baseline's Pearson.

    With a threshold, or binary scores, also `detection`. Scores below the threshold are to be found
    by low predictions, scores of 1 by high ones.
    """
    result = {**figures(y, prediction), "baseline_pearson": metrics.pearson(y, baseline)}
    if threshold is not None:
        result |= detection(y < threshold, -as_ranked(y, prediction))
    elif loss == "binary":
        result |= detection(y == 1, as_ranked(y, prediction))
    return result


def figures(y: Tensor, prediction: Tensor) -> dict[str, Tensor]:
    """Returns mse, r2, pearson and spearman of each target, [T], nan where undefined."""
    mse = metrics.mean_present((prediction - y).square(), y)
    r = metrics.pearson(y, prediction)
    _, std = tables.mean_and_std(y)
    return {
        "mse": mse,
        "r2": (1 - mse / std.square()).where(~r.isnan(), math.nan),
        "pearson": r,
        "spearman": metrics.pearson(rank(y), rank(as_ranked(y, prediction))),
    }


def uncertainty(y: Tensor, prediction: Tensor, sd: Tensor) -> tuple[float, list[float]]:
    """Returns Spearman's correlation of `sd` and the absolute error, and the error by `sd`.

    The latter is the mean in each fifth. Both are means over the targets; all are [n, T].
    """
    error = (prediction - y).abs()
    ranks = rank(sd.where(~y.isnan(), math.nan))
    correlation = metrics.pearson(rank(error), ranks).nanmean().item()
    fifth = ((ranks - 0.5) * 5 / (~y.isnan()).sum(dim=0)).floor()
    errors = [error.where(fifth == k, math.nan).nanmean(dim=0).nanmean().item() for k in range(5)]
    return correlation, errors


def rank(values: Tensor) -> Tensor:
    """Returns ranks from 1 among each target's values [n, T], float64; equal ones share the mean.

    A nan takes no rank and stays.
    """
    columns = values.T.nan_to_num(math.inf).contiguous()  # nan comes last
    ordered, order = columns.sort(dim=1)
    smaller = torch.searchsorted(ordered, ordered)
    not_larger = torch.searchsorted(ordered, ordered, right=True)
    of_ordered = (smaller + not_larger + 1).double() / 2
    ranks = torch.empty_like(of_ordered).scatter(1, order, of_ordered).T
    return ranks.where(~values.isnan(), math.nan)


def auroc(positive: Tensor, ranks: Tensor) -> Tensor:
    """Returns the AUROC of finding each target's `positive` rows, [n, T], by their ranks, [T].

    The most certain row has the highest rank. A nan rank is no row; it is nan without two classes.
    """
    num_positive = positive.sum(dim=0)
    num_negative = (~ranks.isnan()).sum(dim=0) - num_positive
    mean_rank = ranks.where(positive, math.nan).nanmean(dim=0)
    negatives_below = mean_rank - (num_positive + 1) / 2
    return negatives_below / num_negative


def pearson_of_rows(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns Pearson's r over the scores of each row, [n], nan where undefined."""
    return metrics.pearson(y.T, prediction.T)


def as_ranked(y: Tensor, prediction: Tensor) -> Tensor:
    """Returns the predictions of scores that are there, else nan, in float32.

    Rounding must not order equal ones.
    """
    return prediction.float().where(~y.isnan(), math.nan)


def detection(positive: Tensor, certainty: Tensor) -> dict[str, Tensor]:
    """Returns AUROC and average precision of finding each target's `positive` rows, [n, T].

    The rows are ordered by their certainty.
    """
    found = at_least_as_certain(certainty, positive)
    precision = found / at_least_as_certain(certainty, ~certainty.isnan())
    return {
        "auroc": auroc(positive, rank(certainty)),
        "average_precision": precision.where(positive, math.nan).nanmean(dim=0),
    }


def at_least_as_certain(certainty: Tensor, counted: Tensor) -> Tensor:
    """Returns how many of the `counted` rows, bool [n, T], are at least as certain, [n, T]."""
    doubt = (-certainty).T.nan_to_num(math.inf).contiguous()
    ordered = doubt.where(counted.T, math.inf).sort(dim=1).values
    return torch.searchsorted(ordered, doubt, right=True).T


def resampled_pearson(y: Tensor, prediction: Tensor, resamples: int) -> Tensor:
    """Returns Pearson's r, the targets' mean, of rows drawn with replacement, [resamples].

    As many rows are drawn as there are. Calls for the same rows draw the same ones, so that the
    results of two predictions can be compared in pairs.
    """
    present = ~y.isnan()
    a = tables.standardise(y).nan_to_num()
    b = tables.standardise(prediction.where(present, math.nan)).nan_to_num()
    products = torch.stack([present.double(), a, b, a * a, b * b, a * b], dim=1)
    columns = products.flatten(start_dim=1)
    sums = [times @ columns for times in resampled_rows(len(y), resamples)]
    count, *sums = torch.cat(sums).view(resamples, 6, -1).unbind(dim=1)
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = (total / count for total in sums)
    variance_a = mean_aa - mean_a.square()
    variance_b = mean_bb - mean_b.square()
    r = (mean_ab - mean_a * mean_b) / (variance_a * variance_b).sqrt()
    # As in `metrics.pearson`; what differs by rounding is constant.
    r = r.where(variance_b > 1e-12, 0.0).where(variance_a > 1e-12, math.nan)
    return r.nanmean(dim=1)


def resampled_mean(values: Tensor, resamples: int) -> Tensor:
    """Returns the mean of the values [n] that are not nan, [resamples].

    The rows are those of `resampled_pearson`.
    """
    present = ~values.isnan()
    columns = torch.stack([values.nan_to_num(), present.double()], dim=1)
    total, count = torch.cat(
        [times @ columns for times in resampled_rows(len(values), resamples)]
    ).T
    return total / count


def resampled_rows(num_rows: int, resamples: int) -> Iterator[Tensor]:
    """Yields how often each row is drawn, some resamples at once, float64 [resamples, num_rows]."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, resamples, 32):
        draws = []
        for _ in range(min(32, resamples - start)):
            rows = torch.randint(num_rows, (num_rows,), generator=generator)
            draws.append(torch.bincount(rows, minlength=num_rows).double())
        yield torch.stack(draws)


def number_of_resamples(num_cells: int) -> int:
    """Returns how many resamples an interval takes from a table of so many scores."""
    return max(100, min(1000, CELLS // num_cells))


def centred(resampled: Tensor, estimate: float | Tensor) -> Tensor:
    """Returns resampled figures [R, ...] of profiles, moved so that their mean is the estimate.

    A target that one row changes loses its signal in a third of the resamples, which draw that row
    not once: Pearson's r of resamples is lower than that of the rows, often by more than it varies.
    """
    return resampled - resampled.nanmean(dim=0) + estimate


def interval(values: Tensor) -> list[float]:
    """Returns the ends of the interval that holds the middle 95 % of the values [R]."""
    return values.nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()


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


def scatter_svg(rows: Predictions) -> str:
    """Returns an SVG of scores against predictions, in units of a score's deviation if T > 1."""
    y, prediction, unit = rows.y, rows.prediction, ""
    if len(rows.targets) > 1:
        mean, std = tables.mean_and_std(y)
        y, prediction, unit = (y - mean) / std, (prediction - mean) / std, " (standard units)"
    pairs = torch.stack([prediction.flatten(), y.flatten()], dim=1)
    pairs = pairs[pairs.isfinite().all(dim=1)]
    if len(pairs) > POINTS:
        pairs = pairs[torch.linspace(0, len(pairs) - 1, POINTS, dtype=torch.float64).long()]
    low, high = pairs.aminmax() if len(pairs) else (0.0, 1.0)
    low, high = float(low), float(high)
    high = high if high > low else low + 1.0

    def place(value: float) -> float:
        return SIZE * (value - low) / (high - low)

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + 90} {SIZE + 90}" '
        'font-family="sans-serif" font-size="12">',
        "<style>text{fill:#495057} @media(prefers-color-scheme:dark){text{fill:#ced4da}}</style>",
        '<g transform="translate(70 20)" stroke="#868e96" fill="none">',
        f'<path d="M0 0V{SIZE}H{SIZE}"/><path d="M0 {SIZE}L{SIZE} 0" stroke-dasharray="6 4"/>',
        "</g>",
        f'<text x="{70 + SIZE / 2}" y="{SIZE + 60}" text-anchor="middle">prediction{unit}</text>',
        f'<text transform="translate(16 {20 + SIZE / 2}) rotate(-90)" '
        f'text-anchor="middle">score{unit}</text>',
    ]
    for tick in ticks(low, high):
        svg.append(
            f'<text x="{70 + place(tick):.1f}" y="{SIZE + 38}" '
            f'text-anchor="middle">{tick:.4g}</text>'
        )
        svg.append(
            f'<text x="62" y="{24 + SIZE - place(tick):.1f}" text-anchor="end">{tick:.4g}</text>'
        )
    svg.append('<g transform="translate(70 20)" fill="#228be6" fill-opacity=".5">')
    svg += [
        f'<circle cx="{place(x):.1f}" cy="{SIZE - place(score):.1f}" r="2.5"/>'
        for x, score in pairs.tolist()
    ]
    return "\n".join([*svg, "</g>", "</svg>\n"])


def ticks(low: float, high: float) -> list[float]:
    """Returns two to ten round numbers from `low` to `high`."""
    step = 10.0 ** math.floor(math.log10(high - low))
    if (high - low) / step < 4:
        step /= 4 if (high - low) / step < 2 else 2
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
