"""Warnings for the log about probable mistakes in tables, and errors for names that are not nodes.

`notes_on` is called once, after the tables have been read. Its warnings are stored with them.
`notes_on_training` is called at each start, because its warnings also depend on the options.

A name is known to be a node if it has an edge. Each other name may be a misspelt node, the name of
a control, or a node without edges.

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

from data_cells import Rows, is_missing_name
from errors import counted
from losses import are_binary
from metrics import weighted_mean
from parts import is_here

OUTLYING = 0.25  # largest share of a score's variance that a row may have without a warning
# A value may be a code for missing values if its distance to all other values is more than FAR
# times their range, and if its size is more than HUGE times the size of the largest of them.
FAR = 5
HUGE = 30
NINES = (99.0, 999.0, 9999.0, 99999.0)  # sizes of values that may be codes at smaller distances
FEWEST_SCORES = 50  # with fewer scores, a single one may have a large share of the variance
FEW_TARGETS = 20  # largest number of targets that are checked separately
FEW_VALUES = 10  # smallest number of rows or values for a warning about them
PERCENT = 10  # levels may be percentages if all are above 1 and the largest is at least this
FEW = 0.1  # smallest effective share of the training rows without a warning about weights
SHOWN = 10  # largest number of names in a warning
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
# Matches the dates into which spreadsheets, and then pandas, convert names such as MARCH1.
DATE = re.compile(rf"\d+-({MONTHS})|({MONTHS})-\d+|\d{{4}}-\d\d-\d\d( 00:00:00)?")
# Also matches MAR1, MARC1, MARCH1, SEPT1 and their newer names MARCHF1 and SEPTIN1.
MONTH = re.compile(rf"0?(\d+)-({MONTHS})|({MONTHS})(?:C|CH|CHF|T|TIN)?-?0?(\d+)", re.IGNORECASE)
SIGNS = r"[\W_]+"  # matches the characters between the words of a name
# Matches the letters of a control's name.
CONTROL = re.compile(r"((neg|negative)?(control|ctrl)|wt|wildtype|ntc?|nontargeting)+")
JOINTS = set("+;|:/&_ ")  # characters that users write between names instead of a comma


def notes_on(tables: Any, files: Sequence[str], described: Mapping, row: Tensor) -> Iterator[str]:
    """Yields warnings about tables that have been read from files.

    Args:
        tables: The `Tables`.
        files: Paths of the tables of edges, knock-outs and features; the last may be "".
        described: {name: values [F]} for each row in the table of features.
        row: The row of each name in the column genes, long [total]. Unlike `tables.perturbed`, it
            includes nodes at level 1.
    """
    _, perturbations, features = files
    connected = [tables.genes[node] for node in tables.edge_index.unique().tolist()]
    yield from notes_on_knocked_out(tables, perturbations, connected)
    yield from notes_on_levels(tables, perturbations, row)
    if features:
        yield from notes_on_features(tables, features, described)
    yield from notes_on_outliers(tables, perturbations)
    yield from notes_on_codes(perturbations, tables.targets, tables.y)


def notes_on_training(tables: Any, config: Any) -> Iterator[str]:
    """Yields warnings about `Tables` with a split, and about options of a `Config` for them."""
    are_nodes = set(tables.targets) <= set(tables.genes)
    if are_nodes and config.model.readout != "nodes" and is_here("model_nodes"):
        yield (
            "all scores are named after nodes of the graph, but model.readout="
            f"{config.model.readout} does not read them from the states of these nodes: if each "
            "score is an effect on its node, set model.readout=nodes"
        )
    if config.optim.loss == "squared" and are_binary(tables.y):
        yield (
            "all scores are 0 or 1, but optim.loss=squared treats them as measurements: if they "
            "are classes, set optim.loss=binary to predict probabilities"
        )
    weight = tables.score_weight(tables.rows("train"))
    # The effective number of rows (Kish 1965), divided by the number of rows, [T].
    shares = weight.sum(dim=0).square() / weight.square().sum(dim=0) / (weight > 0).sum(dim=0)
    share = shares.min().item()
    if share < FEW:
        yield (
            "a few training rows have most of the weight, as if the model were trained on only "
            f"{share:.1%} of the rows: check the largest values of the column weight, or the "
            "smallest values of the column sd"
        )
    is_perturbed = tables.perturbed_ptr.diff() > 0  # intact controls should be in every split
    shares_nodes = is_like_training(tables, with_levels=False) & is_perturbed
    shares_levels = is_like_training(tables, with_levels=True)
    same = (
        "have the same nodes and levels as training rows, so their metrics do not show how well "
        "new samples are predicted: check the column split"
    )
    yield from note_on_shared(tables, shares_nodes & shares_levels, same)
    different = (
        "have the same nodes as training rows, at different levels, so their metrics do not show "
        "how well new sets of nodes are predicted: to keep such rows in the same split, set "
        "data.split=sets or change the column split"
    )
    yield from note_on_shared(tables, shares_nodes & ~shares_levels, different)


def is_like_training(tables: Any, with_levels: bool) -> Tensor:
    """Returns whether each row has the same nodes as some training row, bool [n].

    If `with_levels`, the levels of the nodes must be the same, too.
    """
    set_code = tables.set_code(tables.node_code(with_levels))
    return torch.isin(set_code, set_code[tables.is_in("train")])


def note_on_shared(tables: Any, is_shared: Tensor, problem: str) -> Iterator[str]:
    """Yields a warning with this problem if some test or validation rows are shared.

    `is_shared` is whether each row has the same nodes, or nodes and levels, as a training row,
    bool [n].
    """
    num_test = int((is_shared & tables.is_in("test")).sum())
    num_val = int((is_shared & tables.is_in("val")).sum())
    if num_test + num_val > 0:
        yield f"{counted(num_test, 'test row')} and {counted(num_val, 'validation row')} {problem}"


def details(tables: Any) -> str:
    """Returns the numbers of sets, scores, nodes and features, as a text for the log."""
    size = tables.perturbed_ptr.diff()
    present = (~tables.y.isnan()).sum(dim=0)
    perturbed = tables.perturbed.unique()
    num_unseen = (~tables.is_seen().any(dim=1)[perturbed]).sum()
    num_isolated = (~np.isin(perturbed, tables.edge_index)).sum()  # ten times as fast as torch
    num_sets = int(tables.set_number().max()) + 1
    texts = [
        f"{counted(num_sets, 'distinct set')} of {size.min()} to {size.max()} nodes",
        f"{counted(int((tables.split < 0).sum()), 'row')} in no split",
        f"each score in {present.min():,} to {present.max():,} rows",
        f"{counted(len(perturbed), 'knocked-out node')}, {num_isolated:,} of them without edges, "
        f"{num_unseen:,} in no training row with a score",
    ]
    if tables.left_out:
        texts.append(f"unused columns: {', '.join(tables.left_out)}")
    if tables.feature_names:
        num_features = counted(len(tables.feature_names), "node feature")
        num_bare = int((tables.features == 0).all(dim=1).sum())  # missing features are 0
        texts.append(f"{num_features}; {counted(num_bare, 'node')} without features")
    return "; ".join(texts)


# ---- Samples -------------------------------------------------------------------------------------
def notes_on_outliers(tables: Any, path: str) -> Iterator[str]:
    """Yields warnings about rows that dominate the loss, with the line of the file.

    Such a row has more than the share `OUTLYING` of the variance of a score. If there are more than
    `FEW_TARGETS` scores, the mean of its shares over all scores is compared instead.
    """
    weight = tables.score_weight(slice(None))
    # Not `mean_and_std`, whose median takes seconds.
    mean = weighted_mean(tables.y.nan_to_num(), weight)
    squares = weight * (tables.y - mean).nan_to_num().square()
    shares = (squares / squares.sum(dim=0)).nan_to_num()
    # In a column of few scores, or of zeros and ones, a large share does not mean a mistake.
    is_missing = tables.y.isnan()
    is_binary = ((tables.y == 0) | (tables.y == 1) | is_missing).all(dim=0)
    shares[:, is_binary | ((~is_missing).sum(dim=0) < FEWEST_SCORES)] = 0
    names = tables.targets
    if len(names) > FEW_TARGETS:
        names = [f"all {len(names):,} scores"]
        shares = shares.mean(dim=1, keepdim=True)
    for row, k in (shares > OUTLYING).nonzero().tolist():
        # A custom reader may not set the lines. Rows are then counted from 0.
        place = f": row {row}" if tables.line is None else f":{tables.line[row]}"
        yield (
            f"{path}{place}: this row accounts for {shares[row, k]:.0%} of the variance of "
            f"{names[k]:.60}, so it may dominate the loss: remove it, give it a small weight, "
            "clip the scores, or replace them by ranks"
        )


def notes_on_codes(path: str, names: Sequence[str], columns: Tensor) -> Iterator[str]:
    """Yields warnings about `codes` in columns [n, F], such as -999 for a missing value.

    Checks at most `FEW_TARGETS` columns: if there are more, it yields nothing.
    """
    if len(names) > FEW_TARGETS:
        return
    for name, values in zip(names, columns.unbind(1), strict=True):
        for code in codes(values).tolist():
            yield (
                f"{path}: {(values == code).sum():,} values of the column {name:.60} are "
                f"{code:g}, far from all other values, and are read as numbers: if {code:g} means "
                "that a value is missing, leave these cells empty"
            )


def codes(values: Tensor) -> Tensor:
    """Returns the values of a column [n] that may be codes for missing values: none, one or two.

    Only the smallest and the largest value can be codes. A code occurs in several rows, is far
    from all other values, and is large compared to them. For example, the zeros of dead strains
    are not codes, because they are not large. Codes that consist of nines may be closer.
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


def notes_on_levels(tables: Any, path: str, row: Tensor) -> Iterator[str]:
    """Yields warnings about levels and empty cells that probably have a different meaning.

    `row` is the row of each name in the column genes, long [total], as in `notes_on`.
    """
    num_nodes = tables.perturbed_ptr.diff()
    is_named = torch.bincount(row, minlength=len(num_nodes)) > 0
    half = deviation(tables.y[num_nodes > 0]).nan_to_num() / 2
    varied = (
        "so they are read as replicates of the intact sample, but their scores are not similar: "
        "they vary more than half as much as the scores of other rows"
    )
    lost = (
        f"have an empty cell in the column genes, {varied}. If names were lost, for example when "
        "identifiers were mapped, remove these rows"
    )
    intact = (
        f"have only nodes at level 1, {varied}. If level 1 means a knock-out, write A or A=0 "
        "instead of A=1"
    )
    for problem, has_reason in {lost: ~is_named, intact: is_named}.items():
        is_intact = (num_nodes == 0) & has_reason
        varies = deviation(tables.y[is_intact]) > half  # [T]
        if is_intact.sum() >= FEW_VALUES and 2 * varies.sum() > len(varies):
            yield f"{path}: {is_intact.sum():,} rows {problem}"
    level = tables.level[tables.level > 0]
    if len(level) >= FEW_VALUES and level.min() > 1 and level.max() >= PERCENT:
        yield (
            f"{path}: all positive levels are above 1, so messages of these nodes are multiplied "
            f"by up to {level.max():g}: if the levels are percentages, divide them by 100"
        )
    num_levels = torch.bincount(tables.sample()[tables.level != 0], minlength=len(num_nodes))
    fewest = min((num_nodes == 1).sum(), (num_nodes > 1).sum())
    if fewest >= FEW_VALUES and (num_levels[num_nodes > 0] == 1).all():
        yield (
            f"{path}: every set has exactly one level, even if it has several nodes, but a level "
            "only applies to the node before it, so A,B=0.2 deletes A and sets B to level 0.2: to "
            "give both nodes this level, write A=0.2,B=0.2"
        )


def deviation(values: Tensor) -> Tensor:
    """Returns the standard deviation of each column of values [n, T], [T].

    Missing values are ignored. The result is nan for a column without values.
    """
    return (values - values.nanmean(dim=0)).square().nanmean(dim=0).sqrt()


def notes_on_features(tables: Any, path: str, described: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields warnings about values of features, and about names in their file that are not nodes.

    `described` is {name: values [F]} for each row of the file. The names are a large share only if
    more than half of them are not nodes and, in addition, more than half of the nodes have no
    features: a file may describe more nodes than the graph has. See `note_on_names`.
    """
    nodes = set(tables.genes)
    unknown = [name for name in described if name not in nodes]
    lacking = [node for node in tables.genes if node not in described]
    are_most = 2 * len(unknown) > len(described) and 2 * len(lacking) > len(nodes)
    count = f"the other tables do not contain {len(unknown):,} of {len(described):,} names"
    effect = "so their features are not used"
    yield from note_on_names(path, count, effect, are_most, unknown, lacking)
    yield from notes_on_codes(path, tables.feature_names, torch.stack(list(described.values())))


# ---- Names ---------------------------------------------------------------------------------------
def notes_on_knocked_out(tables: Any, path: str, connected: Sequence[str]) -> Iterator[str]:
    """Yields a warning about knocked-out nodes without an edge, which may be misspelt.

    `connected` has the names of all nodes with an edge. The names are a large share if they are at
    least half of the knocked-out nodes. See `note_on_names`.
    """
    known = set(connected)
    perturbed = [tables.genes[node] for node in tables.perturbed.unique().tolist()]
    unknown = [name for name in perturbed if name not in known]
    are_most = 2 * len(unknown) >= len(perturbed) > 0
    share = f"{len(unknown):,} of {len(perturbed):,} knocked-out nodes"
    count = f"the table of edges does not contain {share}"
    effect = "so the graph has no information about them"
    yield from note_on_names(path, count, effect, are_most, unknown, connected)


def note_on_names(
    path: str, count: str, effect: str, are_most: bool, unknown: Sequence[str], nodes: Sequence[str]
) -> Iterator[str]:
    """Yields a warning about unknown names: their number, the effect, advice, and some names.

    There is no warning if the names have no `meanings` among the nodes, and if they are not a large
    share of all names, that is, `are_most` is false. Otherwise, their number is in capitals.
    """
    meaning_of = meanings(unknown, nodes)
    advice = "check that all tables use the same names"
    if meaning_of:
        advice = "correct these names if the meaning in brackets is right"
    names = some_names(unknown, meaning_of)
    if are_most or meaning_of:
        yield f"{path}: {count.upper() if are_most else count}, {effect}: {advice}: {names}"


def some_names(names: Sequence[str], meaning_of: Mapping[str, str]) -> str:
    """Returns up to `SHOWN` of the names as a text, such as "g0 (G0?), x".

    Names that have a meaning come first, followed by this meaning.
    """
    shown = [f"{name} ({meaning_of[name]}?)" for name in names if name in meaning_of]
    shown += [name for name in names if name not in meaning_of]
    return f"{', '.join(shown[:SHOWN]):.500}"


def meanings(unknown: Sequence[str], nodes: Sequence[str]) -> dict[str, str]:
    """Returns {name: probable meaning} for names that are not nodes, if they have a meaning.

    A meaning is a node with almost the same spelling, a list of nodes, or an explanation, such as
    "a spreadsheet's date".
    """
    # If nodes differ only in signs or case, the first of them is the meaning.
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
        elif any(map(DATE.fullmatch, [name, *dated])):  # a spreadsheet changed the name or a node
            meaning_of[name] = " or ".join(dated) or "a spreadsheet's date"
        elif name.isdigit() and len(name) < 3 and not have_number:
            meaning_of[name] = "part of a name with a comma"
    return meaning_of


def nodes_joined(name: str, nodes: Container[str]) -> tuple[str, list[str]]:
    """Returns the characters between nodes in a name, and the nodes: "+" and [A, B] for A+B.

    The list of nodes is empty if the name does not consist of nodes. Controls between the nodes
    are left out. A number such as 7.0, which pandas writes, does not join nodes.
    """
    for joint in (" x ", *re.findall(SIGNS, name)):
        texts = [text.strip() for text in name.split(joint) if text.strip()]
        joined = [text for text in texts if not is_control(text)]
        if joined and name not in joined and all(text in nodes for text in joined):
            return joint, [] if re.fullmatch(r"\d+\.\d+", name) else joined
    return "", []


def without_signs(name: str) -> str:
    """Returns the letters and digits of a name in lower case, to compare spellings.

    Signs between two digits become a blank, so that x1.2 and x12 remain different.
    """
    plain = unicodedata.normalize("NFKC", name).casefold()
    pieces = re.split(rf"(?<=\d){SIGNS}(?=\d)", plain)
    return " ".join(re.sub(SIGNS, "", piece) for piece in pieces)


def month_of(name: str) -> str:
    """Returns the month and the number in a name: "MAR 1" for `1-Mar`, `Mar-01`, MAR1 or MARCH1.

    The result is "" for any other name.
    """
    match = MONTH.fullmatch(name)
    return f"{match[2] or match[3]} {match[1] or match[4]}".upper() if match else ""


# ---- Names that are rejected ---------------------------------------------------------------------
def check_names(
    rows: Rows, row: Tensor, name: Tensor, names: Sequence[str], nodes: Container[str]
) -> None:
    """Raises `DataError` for the first name that is not in `nodes` and is probably not a node.

    Args:
        rows: The rows in which the names occur, for the error.
        row: The row of each perturbed node, long [total].
        name: The index of its name in `names`, long [total].
        names: The distinct names.
        nodes: The known names of nodes: in a table for training, the names with an edge; in a table
            to predict, the names of all nodes of the graph.
    """
    unknown = [number for number, text in enumerate(names) if text not in nodes]
    first_row = scatter(row, name, dim_size=len(names), reduce="min") if unknown else row
    for number in unknown:
        text = names[number]
        first = int(first_row[number])
        problem = misread(text, nodes)
        if text.isdigit() and re.search(rf"=\s*\d+,\s*{text}\s*(,|$)", rows.cells["genes"][first]):
            problem = (
                "a level with a decimal comma, but commas separate nodes: write a decimal point"
            )
        if problem:
            raise rows.error(first, "genes", f"contain {problem}")


def misread(name: str, nodes: Container[str]) -> str:
    """Returns the problem with a name that is not in `nodes`, and what to do.

    The result is "" if the name may be a node without edges.
    """
    a_node = "if it is a node, give it an edge, such as a self-loop"
    joint, joined = nodes_joined(name, nodes)
    if is_missing_name(name):
        return (
            f"the missing value {name}, which cannot be the name of a node: write the name that is "
            "missing, or leave the cell empty if the sample is intact"
        )
    if is_control(name):
        return (
            f"the control {name}, which is not a node: remove it, so that the cell is empty for an "
            f"intact sample, or, {a_node}"
        )
    if joined and JOINTS.issuperset(joint):
        return f"{name}, which joins names without a comma: write {','.join(joined)} or, {a_node}"
    return ""


def is_control(name: str) -> bool:
    """Returns whether a name probably means an intact sample, such as wild-type or control 1."""
    unnumbered = re.sub(r"[_\s]+\d+$", "", name)
    letters = re.sub(r"[\W_]+", "", unnumbered)
    return CONTROL.fullmatch(letters.lower()) is not None
