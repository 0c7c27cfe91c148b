"""Sentences for the log on what may be wrong with the tables that were read.

Shapes: n rows of T targets.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from data_cells import SPLITS, parse_number, read_header, read_rows
from data_names import other_forms, some_names, words_of
from metrics import mean_and_std, weighted_mean

OUTLYING = 0.25  # share of the variance, from which on a row is noted
FAR = 5  # ranges of a column's other scores, from which on those behind a gap are noted
FEWEST_SCORES = 50  # of a column; one of fewer may well have such a share
FEW_TARGETS = 20  # up to which each is looked at by itself
MOST_SCORES = 2**20  # of more targets, as many of their scores are looked at
FEW_VALUES = 10  # of a column that may say how a sample was made, not what was measured
FEW_RELATIONS = 20  # up to which their names may be numbers
UNITS = 5  # between the deviations of two scores, from which on one `sd` is not of both
# In the `words_of` a column that is beside scores, but is none.
NO_SCORE = re.compile(
    r"p|batch|plate|well|replicate|rep|level|fold|dose|concentration|temperature|weights"
    r"|(batch|plate|well|replicate) (id|number)|(n|num|number of) .+"
    r"|(.+ )?([pq] ?val(ue)?s?|p ?adj|fdr|sd|se|sem|std|std ?err|std ?dev|counts?)( .+)?"
    r"|(.+ )?(standard (error|deviation)|variance)( .+)?"
)
WEIGHT = re.compile(r"weights?|score|importance|confidence|probability|strength|correlation")


# ---- Samples -------------------------------------------------------------------------------------
def note_samples(tables: Any, path: str, are_chosen: bool) -> None:
    """Notes what may be wrong with rows and scores; `are_chosen` says that data.scores names them.

    The sentences are added to `tables.notes`.
    """
    note_replicates(tables, path)
    note_outliers(tables, path)
    note_codes(tables, path)
    note_units(tables, path)
    if not are_chosen:
        note_no_scores(tables, path)


def variance_shares(tables: Any, rows: slice) -> Tensor:
    """Returns the share of each score in the variance of its column over the rows, [n, T]."""
    y = tables.y[rows]
    weight = tables.score_weight(rows)
    mean = weighted_mean(y.nan_to_num(), weight)  # without a median, which takes seconds
    squares = weight * (y - mean).nan_to_num().square()
    return (squares / squares.sum(dim=0)).nan_to_num()


def note_outliers(tables: Any, path: str) -> None:
    """Notes scores that make so much of the variance that they would make most of the loss.

    Of more than `FEW_TARGETS` columns, it notes rows that do so on average.
    """
    shares = variance_shares(tables, slice(None))
    names = [f"the {target:.60}" for target in tables.targets]
    if len(names) > FEW_TARGETS:
        shares = shares.mean(dim=1, keepdim=True)
        names = [f"the row of {len(names):,} scores"]
    largest, row_of_largest = shares.max(dim=0)
    present = (~tables.y.isnan()).sum(dim=0)
    # Of fewer scores, or of 0 and 1, any may have such a share.
    is_binary = ((tables.y == 0) | (tables.y == 1) | tables.y.isnan()).all(dim=0)
    is_judged = (present >= FEWEST_SCORES) & ~is_binary
    if len(names) < len(is_judged):
        is_judged = is_judged.any(dim=0, keepdim=True)
    is_noted = is_judged & (largest > OUTLYING)
    for k in is_noted.nonzero().flatten().tolist():
        line = line_of_row(path, int(row_of_largest[k]))
        tables.notes.append(
            f"{path}:{line}: {names[k]} makes {largest[k]:.0%} of the variance of all rows: "
            "remove it, give it a small weight, or clip or rank the scores"
        )


def note_codes(tables: Any, path: str) -> None:
    """Notes scores that several rows have far from all others, such as -999 for a missing one."""
    if len(tables.y) < FEWEST_SCORES:
        return
    step = 1
    if len(tables.targets) > FEW_TARGETS:
        step += tables.y.numel() // MOST_SCORES
    rows = slice(None, None, step)
    y = tables.y[rows]
    shares = variance_shares(tables, rows)
    is_far = behind_gap(y) & (shares.max(dim=0).values <= OUTLYING)  # or it is noted above
    is_noted = (shares * is_far).sum(dim=0) > OUTLYING
    is_far &= is_noted
    if is_noted.any():
        row, k = is_far.nonzero()[0].tolist()
        tables.notes.append(
            f"{path}:{line_of_row(path, row * step)}: the {tables.targets[k]:.60} is "
            f"{y[row, k]:g}, far from most, as are {is_far.sum():,} scores of "
            f"{is_noted.sum():,} columns: where that is a code for a missing one, empty the cell"
        )


def behind_gap(y: Tensor) -> Tensor:
    """Returns whether scores are parted from most of their column, bool [n, T].

    They are if the widest gap between the column's scores, in their order, is more than `FAR` times
    the range of those on the other side of it, which are most.
    """
    ordered = y.sort(dim=0).values  # the missing ones last
    num_scores = (~y.isnan()).sum(dim=0)
    gap, num_below = ordered.diff(dim=0).nan_to_num(-1).max(dim=0)
    num_below += 1

    def at(position: Tensor) -> Tensor:
        """Returns the score of each column at its position in the order, [T]."""
        return ordered.gather(0, position.clamp(0, len(y) - 1).unsqueeze(0)).squeeze(0)

    below = at(num_below - 1)  # the gap
    above = at(num_below)
    is_low = 2 * num_below < num_scores
    highest = at(num_scores - 1)
    range_of_most = torch.where(is_low, highest - above, below - ordered[0])
    is_wide = (num_scores >= FEWEST_SCORES) & (range_of_most > 0) & (gap > FAR * range_of_most)
    return is_wide & torch.where(is_low, y <= below, y >= above)


def note_units(tables: Any, path: str) -> None:
    """Notes that one column `sd` cannot be of scores whose deviations differ much."""
    if tables.sd is None or len(tables.targets) < 2:
        return
    _, std = mean_and_std(tables.y)
    smallest = int(std.argmin())
    largest = int(std.argmax())
    ratio = float(std[largest] / std[smallest])
    if ratio > UNITS:
        names = f"{tables.targets[largest]:.60} and {tables.targets[smallest]:.60}"
        tables.notes.append(
            f"{path}: sd is in the unit of all scores, but the deviations of {names} differ by a "
            f"factor of {ratio:,.0f}: bring the scores to one unit, or train each by itself"
        )


def note_no_scores(tables: Any, path: str) -> None:
    """Notes columns, of several, that may be no scores by their names or values."""
    if len(tables.targets) < 2:
        return
    nodes = set(tables.genes)
    reasons = {}  # by column
    for target in tables.targets:
        if target not in nodes and NO_SCORE.fullmatch(words_of(target)):
            reasons[target] = ["name"]
    if len(tables.targets) <= FEW_TARGETS:
        kinds = [kind_of_values(values[~values.isnan()]) for values in tables.y.unbind(1)]
        for target, kind in zip(tables.targets, kinds, strict=True):
            if kind and "" in kinds:  # or all scores are of that kind
                reasons.setdefault(target, []).append(kind)
    if not reasons:
        return
    shown = [f"{target} ({', '.join(reasons[target])})" for target in list(reasons)[:10]]
    left = [target for target in tables.targets if target not in reasons][:10]
    advice = f"data.scores={yaml_list(left)}" if left else "the scores in data.scores"
    tables.notes.append(
        f"{path}: all {len(tables.targets):,} columns are scores, as data.scores names none, but "
        f"by their names or values these may be none: {', '.join(shown)}: write {advice}"
    )


def kind_of_values(values: Tensor) -> str:
    """Returns what the values of a column are that may be no score; "" if they may well be one."""
    if len(values) < FEWEST_SCORES:
        return ""
    # The first values mostly say that there are many, without the time to sort all of them.
    if len(values[:1000].unique()) <= FEW_VALUES and len(values.unique()) <= FEW_VALUES:
        return "few values"
    if (values == values.round()).all():
        return "whole numbers"
    return ""


def yaml_list(names: Sequence[str]) -> str:
    """Returns names as a list in YAML, in which NO, say, is in quotes."""
    return yaml.safe_dump(
        list(names), default_flow_style=True, allow_unicode=True, width=10_000
    ).strip()


def line_of_row(path: str, row: int) -> int:
    """Returns the number of a row's line in its file; rows count from 0, without blank lines."""
    for rows in read_rows(path, read_header(path, [], ("genes",))):
        if row < len(rows.lines):
            return rows.lines[row]
        row -= len(rows.lines)
    raise IndexError(row)


def note_replicates(tables: Any, path: str) -> None:
    """Notes the number of sets of perturbed nodes whose rows are in more than one split."""
    if tables.split is None:
        return
    perturbs = tables.perturbed_ptr.diff() > 0
    set_number = tables.set_number()[perturbs]
    split_number = set_number * len(SPLITS) + tables.split[perturbs]
    num_splits = torch.bincount(split_number.unique() // len(SPLITS))  # of each set
    num_shared = int((num_splits > 1).sum())
    if num_shared:
        tables.notes.append(
            f"{path}: sets of knock-outs that the column split puts on both sides: {num_shared:,}; "
            "a random split keeps their rows together"
        )


# ---- Edges and columns ---------------------------------------------------------------------------
def note_edges(
    path: str,
    columns: Sequence[str],
    relations: Iterable[str],
    nodes: Iterable[str],
    notes: list[str],
) -> None:
    """Notes scores in the place of relations or of weights, and nodes that have two names."""
    numbers = [name for name in relations if abs(parse_number(name)) < float("inf")]
    if len(numbers) > FEW_RELATIONS:
        notes.append(
            f"{path}: {len(numbers):,} relations are numbers, such as {numbers[0]:.60}: if these "
            "are scores, name that column weight, and give each edge the name of its relation"
        )
    for name in columns:
        if "weight" not in columns and WEIGHT.search(words_of(name)):
            notes.append(
                f"{path}: the column {name:.60} weighs no edge, as it is a feature of the edges, "
                "which the layers do not read: if it is their weight, name it weight"
            )
    forms = other_forms(nodes)
    if forms:
        notes.append(
            f"{path}: {len(forms):,} nodes are named as others, in other characters of Unicode: "
            f"{some_names(list(forms), forms)}"
        )


def note_empty_columns(path: str, names: Sequence[str], values: Tensor, notes: list[str]) -> None:
    """Notes the named columns of values [n, F] that are all nan."""
    for name, is_empty in zip(names, values.isnan().all(dim=0).tolist(), strict=True):
        if is_empty:
            notes.append(f"{path}: the column {name:.60} has no value, and says nothing")
