"""Sentences for the log on what may be wrong with the tables that were read.

`notes_on` is called once, at the end of reading. Names that no edge has may be misspelt nodes, or
controls; a name that an edge has is a node.

Shapes: N nodes, n rows of T targets.
"""

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from data_cells import SPLITS, parse_number
from data_names import (
    SHOWN,
    is_date,
    note_on_features,
    note_on_unknown,
    some_names,
    spelt_twice,
    stem_of,
    words_of,
)
from metrics import mean_and_std, weighted_mean

OUTLYING = 0.25  # share of the variance, from which on a row is noted
FAR = 5  # ranges of all other values, beyond which a value of several rows may be a code
HUGE = 30  # times the largest other score in size, from which on such a score is one
NINES = (99.0, 999.0, 9999.0, 99999.0)  # sizes of scores that are codes if they are less far
FEWEST_SCORES = 50  # of a column; one of fewer may well have such a share
FEW_TARGETS = 20  # up to which each is looked at by itself
MOST_SCORES = 2**20  # of more targets, as many of their scores are looked at
FEW_VALUES = 10  # of a column that may say how a sample was made, not what was measured
FEW_RELATIONS = 20  # up to which their names may be numbers
FEW = 0.1  # share of names up to which these are not as nearly all others
UNITS = 5  # between the deviations of two scores, from which on one `sd` is not of both
TOGETHER = 0.99  # correlation of ranks, from which on one column says what another says
MADE = 0.03  # share of a column's deviations, up to which they are left by a sum of other columns
WEIGHED = 0.9  # correlation of ranks, from which on weights may be a score
MORE = 1.5  # times the rows of any node with an edge, from which on a name is none
IN_MANY = 0.25  # share of the rows, from which on a node decides a split by nodes
# In the `words_of` a column that is beside scores, but is none.
NO_SCORE = re.compile(
    r"p|batch|plate|well|replicate|rep|level|fold|dose|concentration|temperature|weights"
    r"|(batch|plate|well|replicate) (id|number)|(n|num|number of) .+"
    r"|(.+ )?([pq] ?val(ue)?s?|p ?adj|fdr|sd|se|sem|std|std ?err|std ?dev)( .+)?"
    r"|(.+ )?(standard (error|deviation)|variance)( .+)?"
)
WEIGHT = re.compile(r"weights?|score|importance|confidence|probability|strength|correlation")


def notes_on(
    tables: Any,
    edges: str,
    perturbations: str,
    features: str,
    described: Mapping[str, Tensor],
    are_chosen: bool,
) -> list[str]:
    """Returns the sentences on `Tables`, each of which begins with the name of a file.

    Args:
        edges, perturbations, features: the files.
        described: what the file of features has of each name, [F].
        are_chosen: whether data.scores names the scores.
    """
    is_connected = torch.zeros(len(tables.genes), dtype=torch.bool)
    is_connected[tables.edge_index.flatten()] = True
    connected = names_at(tables, is_connected)
    notes = []
    notes += notes_on_edges(tables, edges, connected)
    notes += notes_on_ends(tables, edges, connected)
    notes += notes_on_constants(edges, tables.edge_feature_names, tables.edge_attr)
    notes += notes_on_knocked_out(tables, perturbations, connected)
    notes += notes_on_levels(tables, perturbations)
    if features:
        notes += notes_on_features(tables, features, described)
    notes += notes_on_replicates(tables, perturbations)
    notes += notes_on_outliers(tables, perturbations)
    notes += notes_on_codes(tables, perturbations)
    notes += notes_on_units(tables, perturbations)
    notes += notes_on_weights(tables, perturbations)
    if not are_chosen:
        notes += notes_on_columns(tables, perturbations)
    return notes


def details(tables: Any) -> str:
    """Returns a text on rows, columns, scores, nodes and features, for the log."""
    count = torch.bincount(tables.perturbed_ptr.diff())
    sizes = count.nonzero().flatten().tolist()
    rows = [f"{count[size]:,} of {size}" for size in sizes[:SHOWN]]
    if len(sizes) > SHOWN:
        rows.append(f"{count[sizes[SHOWN:]].sum():,} of more")
    is_present = ~tables.y.isnan()
    present = is_present.sum(dim=0).tolist()
    scores = [f"{number:,}" for number in present[:SHOWN]]
    if len(present) > SHOWN:
        scores = [f"{min(present):,} to {max(present):,}"]
    num_sets = int(tables.set_number().max()) + 1
    is_seen = tables.is_seen().any(dim=1)
    perturbed = tables.perturbed.unique()
    num_unseen = len(perturbed) - is_seen[perturbed].sum()
    num_isolated = (~np.isin(perturbed, tables.edge_index)).sum()  # ten times faster than torch
    texts = [f"columns left out: {', '.join(tables.left_out)}"] if tables.left_out else []
    texts.append(f"rows by knock-outs: {', '.join(rows)}, in {num_sets:,} distinct sets")
    texts.append(f"{(tables.split < 0).sum():,} rows in no split")
    texts.append(f"rows with each score: {', '.join(scores)}")
    texts.append(
        f"{num_isolated:,} of {len(perturbed):,} knocked-out nodes isolated, "
        f"{num_unseen:,} in no training row"
    )
    num_features = tables.features.size(1)
    texts.append(f"features: {num_features:,} of nodes, {tables.edge_attr.size(1):,} of edges")
    if tables.feature_names:
        is_bare = (tables.features == 0).all(dim=1)  # standardised, and 0 where missing
        texts.append(f"{is_bare.sum():,} nodes without features")
    return "; ".join(texts)


# ---- Samples ------------------------------------------------------------------------------------
def variance_shares(tables: Any, rows: slice) -> Tensor:
    """Returns the share of each score in the variance of its column over the rows, [n, T]."""
    y = tables.y[rows]
    weight = tables.score_weight(rows)
    mean = weighted_mean(y.nan_to_num(), weight)  # without a median, which takes seconds
    squares = weight * (y - mean).nan_to_num().square()
    return (squares / squares.sum(dim=0)).nan_to_num()


def notes_on_outliers(tables: Any, path: str) -> Iterator[str]:
    """Yields notes on scores of so much variance that they would make most of the loss.

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
        place = place_of(tables, path, int(row_of_largest[k]))
        yield (
            f"{place}: {names[k]} makes {largest[k]:.0%} of the variance of all rows: "
            "remove it, give it a small weight, or clip or rank the scores"
        )


def notes_on_codes(tables: Any, path: str) -> Iterator[str]:
    """Yields a note on scores that are `codes`, such as -999 for a missing one."""
    step = 1
    if len(tables.targets) > FEW_TARGETS:
        step += tables.y.numel() // MOST_SCORES
    rows = slice(None, None, step)
    y = tables.y[rows]
    is_outlier = variance_shares(tables, rows).max(dim=0).values > OUTLYING  # noted above
    is_code = torch.zeros_like(y, dtype=torch.bool)
    for k, values in enumerate(y.unbind(1)):
        if not is_outlier[k]:
            is_code[:, k] = torch.isin(values, codes(values))
    if is_code.any():
        row, k = is_code.nonzero()[0].tolist()
        yield (
            f"{place_of(tables, path, row * step)}: the {tables.targets[k]:.60} is "
            f"{y[row, k]:g}, far from most, as are {is_code.sum():,} scores of "
            f"{is_code.any(dim=0).sum():,} columns: where that is a code for a missing one, "
            "empty the cell"
        )


def codes(values: Tensor) -> Tensor:
    """Returns the smallest and the largest of a column's values [n] if these may be codes.

    A code stands in several rows, far from all other values, however few these are; and it is large
    beside them, as people choose what cannot be measured: zeros of dead strains are none. One that
    is written in nines may be less far.
    """
    present = values[~values.isnan()]
    if len(present) < FEW_VALUES:
        return present[:0]
    ends = torch.stack([present.min(), present.max()])
    others = present[~torch.isin(present, ends)]
    if len(others[:1000].unique()) < FEW_VALUES:
        return present[:0]
    gap = torch.stack([others.min() - ends[0], ends[1] - others.max()])
    spread = others.max() - others.min()
    is_huge = (ends.abs() > HUGE * others.abs().max()) & (gap > FAR * spread)
    is_in_nines = torch.isin(ends.abs(), ends.new_tensor(NINES)) & (gap > spread / 2)
    count = (present == ends.unsqueeze(1)).sum(dim=1)
    return ends[(is_huge | is_in_nines) & (count > 1)]


def notes_on_units(tables: Any, path: str) -> Iterator[str]:
    """Yields a note if the deviations of the scores differ too much for one column `sd`."""
    if tables.sd is None or len(tables.targets) < 2:
        return
    _, std = mean_and_std(tables.y)
    smallest = int(std.argmin())
    largest = int(std.argmax())
    ratio = float(std[largest] / std[smallest])
    if ratio > UNITS:
        names = f"{tables.targets[largest]:.60} and {tables.targets[smallest]:.60}"
        yield (
            f"{path}: sd is in the unit of all scores, but the deviations of {names} differ by a "
            f"factor of {ratio:,.0f}: bring the scores to one unit, or train each by itself"
        )


def notes_on_columns(tables: Any, path: str) -> Iterator[str]:
    """Yields a note on columns, of several, that may be no scores by their names or values."""
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
        for k, reason in repeated_columns(tables.y).items():
            reasons.setdefault(tables.targets[k], []).append(reason.format(*tables.targets))
    if not reasons:
        return
    shown = [f"{target} ({', '.join(reasons[target])})" for target in list(reasons)[:10]]
    left = [target for target in tables.targets if target not in reasons][:10]
    advice = f"data.scores={yaml_list(left)}" if left else "the scores in data.scores"
    yield (
        f"{path}: all {len(tables.targets):,} columns are scores, as data.scores names none, but "
        f"by their names or values these may be none: {', '.join(shown)}: write {advice}"
    )


def kind_of_values(values: Tensor) -> str:
    """Returns "few values" or "whole numbers" for a column [n] that may be no score, else ""."""
    if len(values) < FEWEST_SCORES:
        return ""
    # The first values mostly say that there are many, without the time to sort all of them.
    if len(values[:1000].unique()) <= FEW_VALUES and len(values.unique()) <= FEW_VALUES:
        return "few values"
    if (values == values.round()).all() and len(values.unique()) < len(values):  # or it ranks
        return "whole numbers"
    return ""


def repeated_columns(y: Tensor) -> dict[int, str]:
    """Returns the columns of scores [n, T] that say what earlier ones say, and a text on how.

    They are a function of one of these that only rises or falls, from zero on or throughout, such
    as a P-value; or a sum of several, each times a number, as the ends of an interval are.
    """
    y = y[:: 1 + y.numel() // MOST_SCORES]
    y = y[~y.isnan().any(dim=1)]
    if len(y) < FEWEST_SCORES:
        return {}
    texts = {}
    for k in range(1, y.size(1)):
        values = y[:, k]
        earlier = y[:, :k]
        alike = [j for j in range(k) if moves_with(values, earlier[:, j])]
        if alike:
            texts[k] = f"moves with {{{alike[0]}}}"
        elif is_sum(values, earlier):
            texts[k] = "a sum of others"
    return texts


def moves_with(x: Tensor, y: Tensor) -> bool:
    """Returns whether x [n] rises or falls with y [n] or its size, or the size of x with y."""
    pairs = [(x, y), (x, y.abs()), (x.abs(), y)]
    return any(abs(rank_correlation(*pair)) > TOGETHER for pair in pairs)


def is_sum(values: Tensor, others: Tensor) -> bool:
    """Returns whether most values [n] are a constant and a sum of multiples of others [n, T]."""
    terms = torch.cat([torch.ones_like(others[:, :1]), others], dim=1)
    factors = torch.linalg.lstsq(terms, values.unsqueeze(1)).solution
    left = values - (terms @ factors).squeeze(1)
    deviation = values - values.median()
    return bool(left.abs().median() < MADE * deviation.abs().median())


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Returns the correlation of two columns' ranks [n], in which equal values have one rank."""
    ranks = [values.unique(return_inverse=True)[1].double() for values in (x, y)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].nan_to_num().item()


def notes_on_weights(tables: Any, path: str) -> Iterator[str]:
    """Yields a note if the column weight moves with a score, as the weight of an animal may."""
    if tables.weight is None or tables.sd is not None or len(tables.targets) > FEW_TARGETS:
        return
    step = 1 + tables.y.numel() // MOST_SCORES
    weight = tables.weight[::step]
    for target, values in zip(tables.targets, tables.y[::step].unbind(1), strict=True):
        present = ~values.isnan()
        correlation = rank_correlation(weight[present], values[present])
        if present.sum() >= FEWEST_SCORES and abs(correlation) > WEIGHED:
            yield (
                f"{path}: weight, which says how much a row counts in the loss, moves with "
                f"{target:.60} (rank correlation {correlation:.2f}): if it is a score, rename it"
            )


def notes_on_levels(tables: Any, path: str) -> Iterator[str]:
    """Yields a note if levels stand as if one held for all names of a row, as in `A,B=0.2`."""
    num_nodes = tables.perturbed_ptr.diff()
    has_level = torch.bincount(tables.sample()[tables.level != 0], minlength=len(num_nodes))
    of_single = has_level[num_nodes == 1]
    of_several = has_level[num_nodes > 1]
    is_enough = min(len(of_single), len(of_several)) >= FEW_VALUES
    if is_enough and (of_single == 1).all() and (of_several == 1).all():
        yield (
            f"{path}: all single knock-outs have a level, but in each larger set one node alone: "
            "A,B=0.2 deletes A and keeps 0.2 of B; where both are knocked down, write A=0.2,B=0.2"
        )


def notes_on_split(tables: Any, config: Any) -> Iterator[str]:
    """Yields notes on the split by a `DataConfig`, or on options that a column replaces."""
    if tables.split is not None:
        default = type(config)()
        options = ("split_seed", "val_fraction", "test_fraction")
        names = [name for name in options if getattr(config, name) != getattr(default, name)]
        if names:
            replaced = ", ".join(f"data.{name}" for name in names)
            yield f"{config.perturbations}: its column split takes the place of {replaced}"
    elif config.split == "nodes":
        yield from notes_on_node_split(tables, config)


def notes_on_node_split(tables: Any, config: Any) -> Iterator[str]:
    """Yields notes on a split by nodes, given the `DataConfig` that asks for it.

    They are on nodes in so many rows that one of them decides it, and on test nodes that the split
    of a smaller seed has, too.
    """
    path = config.perturbations
    count = torch.bincount(tables.perturbed, minlength=len(tables.genes))
    num_perturbed = int((count > 0).sum())
    num_test = round(num_perturbed * config.test_fraction)
    if not config.fold and (config.split_seed + 1) * num_test > num_perturbed:
        yield (
            f"data.split_seed={config.split_seed} tests nodes that smaller seeds test, too: "
            "for a cross-validation, set data.fold"
        )
    for node in (count > IN_MANY * len(tables.y)).nonzero().flatten().tolist()[:SHOWN]:
        yield (
            f"{path}: {tables.genes[node]:.60} is knocked out in {count[node] / len(tables.y):.0%} "
            "of the rows, which data.split=nodes keeps together: if all rows have it, as a marker, "
            "leave it out"
        )


def yaml_list(names: Sequence[str]) -> str:
    """Returns names as a list in YAML, in which NO, say, is in quotes."""
    return yaml.safe_dump(
        list(names), default_flow_style=True, allow_unicode=True, width=10_000
    ).strip()


def place_of(tables: Any, path: str, row: int) -> str:
    """Returns where a row stands: its line or, of a reader without lines, its number from 0."""
    if tables.line is None:
        return f"{path}: row {row}"
    return f"{path}:{tables.line[row]}"


def notes_on_replicates(tables: Any, path: str) -> Iterator[str]:
    """Yields a note on the number of sets of knock-outs whose rows are in more than one split."""
    if tables.split is None:
        return
    perturbs = tables.perturbed_ptr.diff() > 0
    set_number = tables.set_number()[perturbs]
    split_number = set_number * len(SPLITS) + tables.split[perturbs]
    num_splits = torch.bincount(split_number.unique() // len(SPLITS))  # of each set
    num_shared = int((num_splits > 1).sum())
    if num_shared:
        yield (
            f"{path}: sets of knock-outs that the column split puts on both sides: {num_shared:,}; "
            "a random split keeps their rows together"
        )


# ---- Edges and features --------------------------------------------------------------------------
def notes_on_edges(tables: Any, path: str, connected: Sequence[str]) -> Iterator[str]:
    """Yields notes on scores in the place of relations or of weights, and on nodes of two names.

    `connected` are the nodes that have an edge.
    """
    numbers = [name for name in tables.relations if abs(parse_number(name)) < float("inf")]
    if len(numbers) > FEW_RELATIONS:
        yield (
            f"{path}: {len(numbers):,} relations are numbers, such as {numbers[0]:.60}: if these "
            "are scores, name that column weight, and give each edge the name of its relation"
        )
    is_weighted = bool((tables.edge_weight != 1).any())
    for name in tables.edge_feature_names:
        if WEIGHT.search(words_of(name)) and not is_weighted:
            yield (
                f"{path}: the column {name:.60} weighs no edge, as it is a feature of the edges, "
                "which the layers do not read: if it is their weight, name it weight"
            )


def notes_on_ends(tables: Any, path: str, connected: Sequence[str]) -> Iterator[str]:
    """Yields notes on ends of edges that are no names, and on nodes that are spelt twice."""
    if {"source", "target"} <= set(connected) and "relation" in tables.relations:
        yield f"{path}: a row is the header again: remove it"
    odd = [name for name in connected if is_date(name) or abs(parse_number(name)) < float("inf")]
    if 0 < len(odd) < FEW * len(connected):
        yield (
            f"{path}: {len(odd):,} nodes are dates or numbers, as nearly all others are not: "
            f"{some_names(odd, {})}: does a spreadsheet write names so, or is a cell missing?"
        )
    forms = spelt_twice(tables, connected)
    if forms:
        yield (
            f"{path}: {len(forms):,} nodes are named as others but for case, signs or text around: "
            f"{some_names(list(forms), forms)}"
        )


def notes_on_constants(path: str, names: Sequence[str], values: Tensor) -> Iterator[str]:
    """Yields notes on the named columns of standardised values [n, F] that do not vary."""
    for name, is_constant in zip(names, (values == 0).all(dim=0).tolist(), strict=True):
        if is_constant:
            yield f"{path}: the column {name:.60} has no value, or one everywhere: it says nothing"


def notes_on_features(tables: Any, path: str, described: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields notes on the features of nodes, and on names in their table that are no nodes.

    `described` has the values of each name, [F], as they stand there.
    """
    note = note_on_features(list(described), tables.genes)
    if note:
        yield f"{path}: {note}"
    yield from notes_on_constants(path, tables.feature_names, tables.features)
    values = torch.stack(list(described.values()))
    yield from notes_on_feature_codes(path, tables.feature_names, values)


def notes_on_feature_codes(path: str, names: Sequence[str], features: Tensor) -> Iterator[str]:
    """Yields notes on `codes` in the named columns of features [n, F], as they were read."""
    for name, values in zip(names, features.unbind(1), strict=True):
        for code in codes(values).tolist():
            yield (
                f"{path}: {(values == code).sum():,} values of the column {name:.60} are "
                f"{code:g}, far from all others: where that is a code for a missing one, "
                "empty the cell"
            )


# ---- Names ---------------------------------------------------------------------------------------
def notes_on_knocked_out(tables: Any, path: str, connected: Sequence[str]) -> Iterator[str]:
    """Yields a note on knocked-out nodes that are not `connected` by an edge, if one is needed."""
    is_perturbed = torch.zeros(len(tables.genes), dtype=torch.bool)
    is_perturbed[tables.perturbed] = True
    perturbed = names_at(tables, is_perturbed)
    nodes = set(connected)
    unknown = [name for name in perturbed if name not in nodes]
    note = note_on_unknown(unknown, connected, perturbed)
    if note:
        yield f"{path}: {note}"
    yield from notes_on_controls(tables, path, nodes)


def names_at(tables: Any, is_chosen: Tensor) -> list[str]:
    """Returns the names of the chosen nodes, bool [N]."""
    return [tables.genes[node] for node in is_chosen.nonzero().flatten().tolist()]


def notes_on_controls(tables: Any, path: str, connected: Container[str]) -> Iterator[str]:
    """Yields notes on names that may be controls: without an edge, but in more rows than any node.

    Nearly all other names must have one. Names that only differ in the number at their end count
    together if they have a tenth of the rows.
    """
    is_connected = torch.tensor([name in connected for name in tables.genes])
    num_nodes = tables.perturbed_ptr.diff()
    is_alone = (num_nodes == 1)[tables.sample()]
    count = torch.bincount(tables.perturbed, minlength=len(tables.genes))
    count_alone = torch.bincount(tables.perturbed[is_alone], minlength=len(tables.genes))
    limit = MORE * (count * is_connected).max().item()
    limit_alone = MORE * (count_alone * is_connected).max().item()
    unknown = ((count > 0) & ~is_connected).nonzero().flatten().tolist()
    known_stems = {stem_of(name) for name in connected} if unknown else set()
    groups = defaultdict(list)
    for node in unknown:
        stem = stem_of(tables.genes[node])
        groups[tables.genes[node] if stem in known_stems else stem].append(node)
    most_others = FEW * (count > 0).sum()
    for nodes in groups.values():
        rows = count[nodes].sum()
        is_more = rows > limit or count_alone[nodes].sum() > limit_alone
        least = FEW_VALUES if len(nodes) == 1 else FEW * len(tables.y)
        if is_more and rows >= least and len(unknown) - len(nodes) <= most_others:
            names = some_names([tables.genes[node] for node in nodes], {})
            yield (
                f"{path}: {names} without an edge, as nearly all others have one, stands in "
                f"{rows:,} rows, more than any node: if it is a control, leave it out, as an "
                "intact sample has an empty cell; if it is a node, give it an edge, such as a loop"
            )
