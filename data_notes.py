"""Warnings for the log about possible mistakes in tables, and names that are rejected.

`notes_on` is called once, after reading, and `notes_on_training` at each start. A name that has an
edge is a node. Other names may be misspelt nodes, or controls.

Shapes: N nodes, n rows of T targets.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import scatter

from data_cells import Rows, is_missing_name, parse_number
from losses import are_binary
from metrics import effective_share, weighted_mean
from parts import is_here

OUTLYING = 0.25  # above this share of the variance, there is a warning about a row
FAR = 5  # a value that is this many ranges away from all others may be a code
HUGE = 30  # and this many times as large as the largest other value
NINES = (99.0, 999.0, 9999.0, 99999.0)  # values of these sizes may be codes even if they are closer
FEWEST_SCORES = 50  # a column with fewer scores is not checked: one score may have a large share
FEW_TARGETS = 20  # up to this number, each target is checked separately
FEW_VALUES = 10  # with fewer rows or values than this, there are no warnings about them
PERCENT = 10  # if all levels are above 1 and the largest is at least this, they may be percentages
FEW_RELATIONS = 20  # up to this number of relations, their names may be numbers
FEW = 0.1  # effective share of the rows, below which there is a warning about weights
SHOWN = 10  # largest number of names in a warning
# Matches the `words_of` the name of a column that is next to scores, but is probably not a score.
NO_SCORE = re.compile(
    r"p|batch|plate|well|replicate|rep|level|fold|dose|concentration|temperature|weights"
    r"|(batch|plate|well|replicate) (id|number)|(n|num|number of) .+"
    r"|(.+ )?([pq] ?val(ue)?s?|p ?adj|fdr|sd|se|sem|std|std ?err|std ?dev)( .+)?"
    r"|(.+ )?(standard (error|deviation)|variance)( .+)?"
)
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
# Matches what spreadsheets, and then pandas, make of MARCH1.
DATE = re.compile(rf"\d+-({MONTHS})|({MONTHS})-\d+|\d{{4}}-\d\d-\d\d( 00:00:00)?")
# Also matches MAR1, MARC1, MARCH1, SEPT1 and their newer names MARCHF1 and SEPTIN1.
MONTH = re.compile(rf"0?(\d+)-({MONTHS})|({MONTHS})(?:C|CH|CHF|T|TIN)?-?0?(\d+)", re.IGNORECASE)
SIGNS = r"[\W_]+"  # characters between the words of a name
CONTROL = re.compile(r"((neg|negative)?(control|ctrl)|wt|wildtype|ntc?|nontargeting)+")
JOINTS = set("+;|:/&_ ")  # characters that users write between names instead of a comma


def notes_on(
    tables: Any, files: Sequence[str], described: Mapping, row: Tensor, are_chosen: bool
) -> Iterator[str]:
    """Yields warnings about the `Tables` of files: edges, knock-outs, and features or "".

    `described` maps each name in the file of features to its values, [F]. `row`, long [total], is
    the row of each name in `genes`. `are_chosen` says whether data.scores lists the scores.
    """
    edges, perturbations, features = files
    connected = [tables.genes[node] for node in tables.edge_index.unique().tolist()]
    yield from notes_on_relations(tables, edges)
    yield from notes_on_knocked_out(tables, perturbations, connected)
    yield from notes_on_levels(tables, perturbations, row)
    if features:
        yield from notes_on_features(tables, features, described)
    yield from notes_on_outliers(tables, perturbations)
    yield from notes_on_codes(perturbations, tables.targets, tables.y)
    if not are_chosen:
        yield from notes_on_columns(tables, perturbations)


def notes_on_training(tables: Any, config: Any) -> Iterator[str]:
    """Yields warnings about `Tables` with a split, and suggests options of a `Config`."""
    are_nodes = set(tables.targets) <= set(tables.genes)
    if are_nodes and config.model.readout != "nodes" and is_here("model_nodes"):
        yield "all scores are named after nodes: consider model.readout=nodes"
    if config.optim.loss == "squared" and are_binary(tables.y):
        yield "all scores are 0 or 1: consider optim.loss=binary, which predicts probabilities"
    share = effective_share(tables.score_weight(tables.rows("train"))).min().item()
    if share < FEW:
        yield (
            "because their weights are very unequal, the training rows count as much as "
            f"{share:.1%} of them would with equal weights"
        )
    is_perturbed = tables.perturbed_ptr.diff() > 0  # intact controls should be in every split
    has_nodes = is_like_training(tables, with_levels=False) & is_perturbed
    has_levels = is_like_training(tables, with_levels=True)
    same = "have the same nodes and levels as training rows: check the column split"
    yield from note_on_shared(tables, has_nodes & has_levels, same)
    other = (
        "have the same nodes as training rows, at other levels: data.split=sets puts such rows "
        "into the same split"
    )
    yield from note_on_shared(tables, has_nodes & ~has_levels, other)


def is_like_training(tables: Any, with_levels: bool) -> Tensor:
    """Returns whether a training row has the same nodes (and levels) as each row, bool [n]."""
    set_code = tables.set_code(tables.node_code(with_levels))
    return torch.isin(set_code, set_code[tables.is_in("train")])


def note_on_shared(tables: Any, is_shared: Tensor, problem: str) -> Iterator[str]:
    """Yields a warning if some of the shared rows, bool [n], are in test or validation."""
    num_test = (is_shared & tables.is_in("test")).sum()
    num_val = (is_shared & tables.is_in("val")).sum()
    if num_test + num_val > 0:
        yield f"{num_test:,} test rows and {num_val:,} validation rows {problem}"


def details(tables: Any) -> str:
    """Returns a text about rows, columns, scores, nodes and features, for the log."""
    count = torch.bincount(tables.perturbed_ptr.diff())
    rows = [f"{count[size]:,} of {size}" for size in count.nonzero().flatten().tolist()]
    present = (~tables.y.isnan()).sum(dim=0).tolist()
    scores = [f"{number:,}" for number in present]
    if len(present) > SHOWN:
        scores = [f"{min(present):,} to {max(present):,}"]
    num_sets = int(tables.set_number().max()) + 1
    perturbed = tables.perturbed.unique()
    num_unseen = (~tables.is_seen().any(dim=1)[perturbed]).sum()
    num_isolated = (~np.isin(perturbed, tables.edge_index)).sum()  # ten times as fast as torch
    texts = [
        f"rows by number of knock-outs: {', '.join(rows)}; {num_sets:,} distinct sets",
        f"{(tables.split < 0).sum():,} rows in no split",
        f"rows with each score: {', '.join(scores)}",
        f"{len(perturbed):,} knocked-out nodes, {num_isolated:,} of them without edges, "
        f"{num_unseen:,} in no training row",
    ]
    if tables.left_out:
        texts.append(f"unused columns: {', '.join(tables.left_out)}")
    if tables.feature_names:
        is_bare = (tables.features == 0).all(dim=1)  # features are standardised, and 0 if missing
        num_features = tables.features.size(1)
        texts.append(f"{num_features:,} node features; {is_bare.sum():,} nodes have none")
    return "; ".join(texts)


# ---- Samples -------------------------------------------------------------------------------------
def notes_on_outliers(tables: Any, path: str) -> Iterator[str]:
    """Yields warnings about scores with such a share of the variance that they dominate the loss.

    With more than `FEW_TARGETS` columns, it warns about rows that do so on average.
    """
    weight = tables.score_weight(slice(None))
    # Not `mean_and_std`, whose median takes seconds.
    mean = weighted_mean(tables.y.nan_to_num(), weight)
    squares = weight * (tables.y - mean).nan_to_num().square()
    shares = (squares / squares.sum(dim=0)).nan_to_num()
    # If there are few scores, or only scores of 0 and 1, any of them may have such a share.
    is_missing = tables.y.isnan()
    is_binary = ((tables.y == 0) | (tables.y == 1) | is_missing).all(dim=0)
    shares[:, is_binary | ((~is_missing).sum(dim=0) < FEWEST_SCORES)] = 0
    names = tables.targets
    if len(names) > FEW_TARGETS:
        names = [f"all {len(names):,} scores"]
        shares = shares.mean(dim=1, keepdim=True)
    for row, k in (shares > OUTLYING).nonzero().tolist():
        # A custom reader may not set the lines.
        place = f": row {row}" if tables.line is None else f":{tables.line[row]}"
        yield (
            f"{path}{place}: this row accounts for {shares[row, k]:.0%} of the variance of "
            f"{names[k]:.60}: remove it, give it a small weight, or clip or rank the scores"
        )


def notes_on_codes(path: str, names: Sequence[str], columns: Tensor) -> Iterator[str]:
    """Yields warnings about `codes` in columns [n, F], such as -999 for a missing value."""
    if len(names) > FEW_TARGETS:
        return
    for name, values in zip(names, columns.unbind(1), strict=True):
        for code in codes(values).tolist():
            yield (
                f"{path}: {(values == code).sum():,} values of the column {name:.60} are "
                f"{code:g}, far from all others: if this is a code for missing values, leave "
                "these cells empty"
            )


def codes(values: Tensor) -> Tensor:
    """Returns the smallest and the largest of a column's values [n] if these may be codes.

    A code occurs in several rows, and is far from all other values and large compared to them;
    zeros of dead strains are not codes. A code that consists of nines may be closer.
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


def notes_on_columns(tables: Any, path: str) -> Iterator[str]:
    """Yields a warning about columns whose names suggest that they are not scores."""
    others = [name for name in tables.targets if NO_SCORE.fullmatch(words_of(name))]
    others = [name for name in others if name not in tables.genes]
    if others and len(tables.targets) > 1:
        yield (
            f"{path}: all {len(tables.targets):,} columns are used as scores, but some do not look "
            f"like scores: {', '.join(others[:SHOWN])}: list the scores in data.scores"
        )


def notes_on_levels(tables: Any, path: str, row: Tensor) -> Iterator[str]:
    """Yields warnings about levels and intact rows; `row`, long [total], is that of each name."""
    num_nodes = tables.perturbed_ptr.diff()
    is_named = torch.bincount(row, minlength=len(num_nodes)) > 0
    half = deviation(tables.y[num_nodes > 0]).nan_to_num() / 2
    lost = (
        "have an empty cell and count as intact samples, but their scores vary like those of other "
        "rows: if names were lost, for example when mapping identifiers, remove these rows"
    )
    intact = (
        "have only nodes at level 1 and count as intact samples, but their scores vary like those "
        "of other rows: if 1 means a knock-out, write A or A=0"
    )
    for problem, has_reason in {lost: ~is_named, intact: is_named}.items():
        is_intact = (num_nodes == 0) & has_reason
        varies = deviation(tables.y[is_intact]) > half  # [T]
        if is_intact.sum() >= FEW_VALUES and 2 * varies.sum() > len(varies):
            yield f"{path}: {is_intact.sum():,} rows {problem}"
    level = tables.level[tables.level > 0]
    if len(level) >= FEW_VALUES and level.min() > 1 and level.max() >= PERCENT:
        yield (
            f"{path}: all levels are above 1, up to {level.max():g}: if they are percentages, "
            "divide them by 100"
        )
    num_levels = torch.bincount(tables.sample()[tables.level != 0], minlength=len(num_nodes))
    fewest = min((num_nodes == 1).sum(), (num_nodes > 1).sum())
    if fewest >= FEW_VALUES and (num_levels[num_nodes > 0] == 1).all():
        advice = "to give both this level, write A=0.2,B=0.2"
        yield (
            f"{path}: every set has exactly one level, also sets of several nodes: A,B=0.2 deletes "
            f"A and keeps 0.2 of B; {advice}"
        )


def deviation(values: Tensor) -> Tensor:
    """Returns the standard deviation of values [n, T], nan if there are none, [T]."""
    return (values - values.nanmean(dim=0)).square().nanmean(dim=0).sqrt()


def notes_on_relations(tables: Any, path: str) -> Iterator[str]:
    """Yields a warning if relations are numbers, such as scores of edges in the wrong column."""
    numbers = [name for name in tables.relations if abs(parse_number(name)) < float("inf")]
    if len(numbers) > FEW_RELATIONS:
        yield (
            f"{path}: {len(numbers):,} relations are numbers, such as {numbers[0]:.60}: if these "
            "are scores of edges, rename the column to weight, and add a column with the relation"
        )


def notes_on_features(tables: Any, path: str, described: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields warnings about the features of nodes, and about names that are not nodes.

    `described` has the values of each name in the file, [F].
    """
    nodes = set(tables.genes)
    unknown = [name for name in described if name not in nodes]
    lacking = [node for node in tables.genes if node not in described]
    meaning_of = meanings(unknown, lacking)
    are_most = 2 * len(unknown) > len(described) and 2 * len(lacking) > len(nodes)
    if are_most or meaning_of:
        count = f"{len(unknown):,} of {len(described):,} names are not in the other tables"
        yield f"{path}: {text_on_names(count, are_most, unknown, meaning_of)}"
    yield from notes_on_codes(path, tables.feature_names, torch.stack(list(described.values())))


# ---- Names ---------------------------------------------------------------------------------------
def notes_on_knocked_out(tables: Any, path: str, connected: Sequence[str]) -> Iterator[str]:
    """Yields a warning about knocked-out nodes that are not `connected` by an edge, if necessary.

    It is not necessary if none of the names has one of the `meanings`, and they are less than half
    of all names.
    """
    known = set(connected)
    perturbed = [tables.genes[node] for node in tables.perturbed.unique().tolist()]
    unknown = [name for name in perturbed if name not in known]
    meaning_of = meanings(unknown, connected)
    are_most = 2 * len(unknown) >= len(perturbed) > 0
    if are_most or meaning_of:
        count = f"{len(unknown):,} of {len(perturbed):,} knocked-out nodes have no edge"
        yield f"{path}: {text_on_names(count, are_most, unknown, meaning_of)}"


def text_on_names(
    count: str, are_most: bool, unknown: Sequence[str], meaning_of: Mapping[str, str]
) -> str:
    """Returns a text about unknown names and their number, in capitals if they are the majority."""
    text = f"{count.upper() if are_most else count}: {some_names(unknown, meaning_of)}"
    return text if meaning_of else f"{text}: check that all tables use the same names"


def some_names(names: Sequence[str], meaning_of: Mapping[str, str]) -> str:
    """Returns up to ten of the names as a text; names with a meaning come first, followed by it."""
    shown = [f"{name} ({meaning_of[name]}?)" for name in names if name in meaning_of]
    shown += [name for name in names if name not in meaning_of]
    return f"{', '.join(shown[:SHOWN]):.500}"


def meanings(unknown: Sequence[str], nodes: Sequence[str]) -> dict[str, str]:
    """Returns the probable meaning of names that are not nodes: a node, or a spreadsheet's date."""
    # Of several nodes with the same spelling, the first.
    node_of = {without_signs(node): node for node in reversed(nodes)}
    node_of.pop("", None)
    nodes_of_month = defaultdict(list)
    for node in nodes:
        nodes_of_month[month_of(node)].append(node)
    known = set(nodes)
    have_number = any(map(str.isdigit, nodes))
    meaning_of = {}
    for name in unknown:
        _, joined = nodes_joined(name, known)
        same = node_of.get(without_signs(name))
        month = month_of(name)
        dated = nodes_of_month[month] if month else []
        if joined or same:
            meaning_of[name] = ",".join(joined) or same
        elif any(map(DATE.fullmatch, [name, *dated])):  # one of the two was made by a spreadsheet
            meaning_of[name] = " or ".join(dated) or "a spreadsheet's date"
        elif name.isdigit() and len(name) < 3 and not have_number:
            meaning_of[name] = "part of a name with a comma"
    return meaning_of


def nodes_joined(name: str, nodes: Container[str]) -> tuple[str, list[str]]:
    """Returns the characters between the nodes in a name, and these nodes; [] if it is not a list.

    Controls among them are left out. A number such as 7.0, which pandas writes, is not a list.
    """
    for joint in (" x ", *re.findall(SIGNS, name)):
        texts = [text.strip() for text in name.split(joint) if text.strip()]
        joined = [text for text in texts if not is_control(text)]
        if joined and name not in joined and all(text in nodes for text in joined):
            return joint, [] if re.fullmatch(r"\d+\.\d+", name) else joined
    return "", []


def without_signs(name: str) -> str:
    """Returns a name's letters and digits in lower case, with a blank where signs part digits."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    pieces = re.split(rf"(?<=\d){SIGNS}(?=\d)", plain)
    return " ".join(re.sub(SIGNS, "", piece) for piece in pieces)


def words_of(name: str) -> str:
    """Returns the words of a name in lower case, separated by blanks: pValue becomes p value."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.sub(SIGNS, " ", parted).strip().lower()


def month_of(name: str) -> str:
    """Returns month and number, such as MAR 1, of `1-Mar`, `Mar-01`, MAR1 or MARCH1; else ""."""
    match = MONTH.fullmatch(name)
    return f"{match[2] or match[3]} {match[1] or match[4]}".upper() if match else ""


# ---- Names that are rejected ---------------------------------------------------------------------
def check_names(
    rows: Rows, row: Tensor, name: Tensor, names: Sequence[str], nodes: Container[str]
) -> None:
    """Raises `DataError` for the first name that is not a node and is `misread`.

    `row` and `name`, long [total], are the row of each perturbed node and the number of its name.
    """
    unknown = [number for number, text in enumerate(names) if text not in nodes]
    first_row = scatter(row, name, dim_size=len(names), reduce="min") if unknown else row
    for number in unknown:
        text = names[number]
        first = int(first_row[number])
        problem = misread(text, nodes)
        if text.isdigit() and re.search(rf"=\s*\d+,\s*{text}\s*(,|$)", rows.cells["genes"][first]):
            problem = "a level with a decimal comma: write a decimal point"
        if problem:
            raise rows.error(first, "genes", f"contain {problem}")


def misread(name: str, nodes: Container[str]) -> str:
    """Returns the problem with a name that is not a node; "" if it may be a node without edges."""
    a_node = "if it is a node, give it an edge, such as a self-loop"
    joint, joined = nodes_joined(name, nodes)
    if is_missing_name(name):
        return f"the missing value {name}: leave the cell empty for an intact sample"
    if is_control(name):
        return f"the control {name}: leave the cell empty for an intact sample; {a_node}"
    if joined and JOINTS.issuperset(joint):
        return f"{name}, which joins several names: write {','.join(joined)}; {a_node}"
    return ""


def is_control(name: str) -> bool:
    """Returns whether a name is one that users write for an intact sample."""
    unnumbered = re.sub(r"[_\s]+\d+$", "", name)
    letters = re.sub(r"[\W_]+", "", unnumbered)
    return CONTROL.fullmatch(letters.lower()) is not None
