"""Sentences for the log on what may be wrong with the tables that were read.

`notes_on` is called once, at the end of reading. Names that no edge has may be misspelt nodes; a
name that an edge has is that node, whatever it looks like.

Shapes: N nodes, n rows of T targets.
"""

import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from data_cells import SPLITS, parse_number
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
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
DATE = re.compile(rf"\d+-({MONTHS})|({MONTHS})-\d+|\d{{4}}-\d\d-\d\d( 00:00:00)?")
# Also in MAR1, MARCH1, SEPT1 and their newer names MARCHF1, SEPTIN1.
MONTH = re.compile(rf"0?(\d+)-({MONTHS})|({MONTHS})(?:CH|CHF|T|TIN)?-?0?(\d+)", re.IGNORECASE)
SIGNS = r"[\W_]+"  # between the words of a name
HYPHENS = r"[\u2010-\u2015\u2212]"  # that PDF files and word processors write
SHOWN = 10  # names in a note


def notes_on(
    tables: Any,
    edges: str,
    perturbations: str,
    features: str,
    described: Sequence[str],
    are_chosen: bool,
) -> list[str]:
    """Returns the sentences on `Tables`, each of which begins with the name of a file.

    Args:
        edges, perturbations, features: the files.
        described: the names in the file of features.
        are_chosen: whether data.scores names the scores.
    """
    is_connected = torch.zeros(len(tables.genes), dtype=torch.bool)
    is_connected[tables.edge_index.flatten()] = True
    connected = names_at(tables, is_connected)
    notes = []
    notes += notes_on_edges(tables, edges, connected)
    notes += notes_on_constants(edges, tables.edge_feature_names, tables.edge_attr)
    notes += notes_on_knocked_out(tables, perturbations, connected)
    if features:
        notes += notes_on_described(tables.genes, features, described)
        notes += notes_on_constants(features, tables.feature_names, tables.features)
    notes += notes_on_replicates(tables, perturbations)
    notes += notes_on_outliers(tables, perturbations)
    notes += notes_on_codes(tables, perturbations)
    notes += notes_on_units(tables, perturbations)
    if not are_chosen:
        notes += notes_on_columns(tables, perturbations)
    return notes


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
    """Yields a note on scores of several rows far from all others, as -999 for a missing one."""
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
        yield (
            f"{place_of(tables, path, row * step)}: the {tables.targets[k]:.60} is "
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
    forms = other_forms(connected)
    if forms:
        yield (
            f"{path}: {len(forms):,} nodes are named as others, in other characters of Unicode: "
            f"{some_names(list(forms), forms)}"
        )


def notes_on_constants(path: str, names: Sequence[str], values: Tensor) -> Iterator[str]:
    """Yields notes on the named columns of standardised values [n, F] that do not vary."""
    for name, is_constant in zip(names, (values == 0).all(dim=0).tolist(), strict=True):
        if is_constant:
            yield f"{path}: the column {name:.60} has no value, or one everywhere: it says nothing"


# ---- Names ---------------------------------------------------------------------------------------
def notes_on_knocked_out(tables: Any, path: str, connected: Sequence[str]) -> Iterator[str]:
    """Yields a note on knocked-out nodes that are not `connected` by an edge, if one is needed."""
    is_perturbed = torch.zeros(len(tables.genes), dtype=torch.bool)
    is_perturbed[tables.perturbed] = True
    perturbed = names_at(tables, is_perturbed)
    nodes = set(connected)
    unknown = [name for name in perturbed if name not in nodes]
    note = note_on_unknown(unknown, connected, num_perturbed=len(perturbed))
    if note:
        yield f"{path}: {note}"


def names_at(tables: Any, is_chosen: Tensor) -> list[str]:
    """Returns the names of the chosen nodes, bool [N]."""
    return [tables.genes[node] for node in is_chosen.nonzero().flatten().tolist()]


def notes_on_described(genes: Sequence[str], path: str, described: Sequence[str]) -> Iterator[str]:
    """Yields a note on names of the table of features that are no nodes, if one is needed."""
    note = note_on_features(described, genes)
    if note:
        yield f"{path}: {note}"


def note_on_unknown(unknown: Sequence[str], nodes: Sequence[str], num_perturbed: int) -> str:
    """Returns a sentence on perturbed names that no edge has, "" if none is needed.

    None is if no name has one of the `meanings`, and they are less than half of all names.
    """
    if not unknown:
        return ""
    meaning_of = meanings(unknown, nodes)
    are_most = 2 * len(unknown) >= num_perturbed
    if not meaning_of and not are_most:
        return ""
    count = f"{len(unknown):,} of {num_perturbed:,}"
    text = f"{count} knocked-out nodes have no edge"
    if are_most:
        text = f"MOST KNOCKED-OUT NODES, {count}, HAVE NO EDGE"
    question = "" if meaning_of else ": do the tables use the same names?"
    return f"{text}: {some_names(unknown, meaning_of)}{question}"


def some_names(names: Sequence[str], meaning_of: Mapping[str, str]) -> str:
    """Returns up to ten of the names as a text, those that have a meaning first, with it."""
    shown = [f"{name} ({meaning_of[name]}?)" for name in names if name in meaning_of]
    shown += [name for name in names if name not in meaning_of]
    return f"{', '.join(shown[:SHOWN]):.500}"


def meanings(unknown: Sequence[str], nodes: Sequence[str]) -> dict[str, str]:
    """Returns the probable meaning of names that are no nodes: a node, or a spreadsheet's date."""
    node_of = {}  # the first node of a spelling, or of a month
    for node in reversed(nodes):
        node_of[month_of(node)] = node
        node_of[without_signs(node)] = node
    node_of.pop("", None)
    known = set(nodes)
    meaning_of = {}
    for name in unknown:
        joined = nodes_joined(name, known)
        same = node_of.get(without_signs(name)) or node_of.get(month_of(name))
        # Behind the name of a gene, others number its guides and transcripts.
        parts = [text for text in re.split(r"[+;|:/&_.\s]|-(?=\d+$)", name) if text in known]
        if joined:
            meaning_of[name] = ",".join(joined)
        elif same:
            meaning_of[name] = same
        elif parts:
            meaning_of[name] = parts[0]
        elif is_date(name):
            meaning_of[name] = "a spreadsheet's date"
    return meaning_of


def nodes_joined(name: str, nodes: Container[str]) -> list[str]:
    """Returns the nodes whose names, with any signs between them, are a name; [] if it is no such.

    A number such as 7.0, which pandas writes, joins none.
    """
    if re.fullmatch(r"\d+\.\d+", name):
        return []
    pieces = re.split(rf"(\s+x\s+|{SIGNS})", name)  # words, with the signs between them
    joined = []
    start = 0
    while start < len(pieces):
        for stop in range(len(pieces), start, -2):  # the longest name first, as it may have signs
            text = "".join(pieces[start:stop])
            if text in nodes:
                break
        else:
            return []
        joined.append(text)
        start = stop + 1
    return joined


def note_on_features(names: Sequence[str], genes: Sequence[str]) -> str:
    """Returns a sentence on names of the table of features that are no nodes, "" if none is needed.

    None is if no name has one of the `meanings` among the nodes without features, and not both
    most names are no nodes and most nodes have no features.
    """
    nodes = set(genes)
    described = set(names)
    unknown = [name for name in names if name not in nodes]
    lacking = [gene for gene in genes if gene not in described]
    meaning_of = meanings(unknown, lacking)
    if 2 * len(unknown) > len(names) and 2 * len(lacking) > len(genes):
        count = f"{len(unknown):,} of {len(names):,}"
        return f"MOST NAMES, {count}, ARE NO NODES: {some_names(unknown, meaning_of)}"
    if not meaning_of:
        return ""
    return f"{len(meaning_of):,} names are no nodes: {some_names(list(meaning_of), meaning_of)}"


def other_forms(names: Iterable[str]) -> dict[str, str]:
    """Returns the names that are another one in other characters of Unicode, with that one."""
    first = {}  # name of a form
    other = {}
    for name in sorted(names, key=str.isascii, reverse=True):
        form = name
        if not name.isascii():
            form = re.sub(HYPHENS, "-", unicodedata.normalize("NFKC", name))
        if first.setdefault(form, name) != name:
            other[name] = first[form]
    return other


def without_signs(name: str) -> str:
    """Returns letters and digits of a name, in lower case, with a blank where signs part digits."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    pieces = re.split(rf"(?<=\d){SIGNS}(?=\d)", plain)
    return " ".join(re.sub(SIGNS, "", piece) for piece in pieces)


def words_of(name: str) -> str:
    """Returns the words of a name in lower case, with blanks between them: pValue is p value."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.sub(SIGNS, " ", parted).strip().lower()


def is_date(name: str) -> bool:
    """Returns whether a name is what spreadsheets, and pandas after them, make of MARCH1."""
    return DATE.fullmatch(name) is not None


def month_of(name: str) -> str:
    """Returns month and number, such as MAR 1, of `1-Mar`, `Mar-01`, MAR1 or MARCH1; else ""."""
    match = MONTH.fullmatch(name)
    if match is None:
        return ""
    return f"{match[2] or match[3]} {match[1] or match[4]}".upper()
