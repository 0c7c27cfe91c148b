"""What a name may mean that no edge has, or a second one of the edges: a node in another spelling.

It may also be a date, or several nodes.

For the notes on tables, and for the names of a table to predict.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
DATE = re.compile(rf"\d+-({MONTHS})|({MONTHS})-\d+|\d{{4}}-\d\d-\d\d( 00:00:00)?")
# Also in MAR1, MARCH1, SEPT1 and their newer names MARCHF1, SEPTIN1.
MONTH = re.compile(rf"0?(\d+)-({MONTHS})|({MONTHS})(?:CH|CHF|T|TIN)?-?0?(\d+)", re.IGNORECASE)
SIGNS = r"[\W_]+"  # between the words of a name
SHORT = 3  # letters of a name, below which it is a part of others by chance
SHOWN = 10  # names in a note
FEW_FORMS = 0.1  # share of names, below which those with the same text around others may be others


def note_on_unknown(unknown: Sequence[str], nodes: Sequence[str], perturbed: Sequence[str]) -> str:
    """Returns a sentence on `unknown` names of those perturbed, which no edge has, "" for none.

    None is if no name has one of the `meanings`, and they are less than half of all names.
    """
    if not unknown:
        return ""
    meaning_of = meanings(unknown, nodes, perturbed)
    are_most = 2 * len(unknown) >= len(perturbed)
    if not meaning_of and not are_most:
        return ""
    count = f"{len(unknown):,} of {len(perturbed):,}"
    text = f"{count} knocked-out nodes have no edge"
    if are_most:
        text = f"MOST KNOCKED-OUT NODES, {count}, HAVE NO EDGE"
    question = "" if meaning_of else ": do the tables use the same names?"
    return f"{text}: {some_names(unknown, meaning_of)}{question}"


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


def some_names(names: Sequence[str], meaning_of: Mapping[str, str]) -> str:
    """Returns up to ten of the names as a text, those that have a meaning first, with it."""
    shown = [f"{name} ({meaning_of[name]}?)" for name in names if name in meaning_of]
    shown += [name for name in names if name not in meaning_of]
    return f"{', '.join(shown[:SHOWN]):.500}"


def meanings(
    unknown: Sequence[str], nodes: Sequence[str], beside: Sequence[str] = ()
) -> dict[str, str]:
    """Returns the probable meaning of names that are no nodes: a node, or a spreadsheet's date.

    `beside` are all names of their table.
    """
    node_of = {}  # the first node of a spelling, or of a month
    for node in reversed(nodes):
        node_of[month_of(node)] = node
        node_of[without_signs(node)] = node
    node_of.pop("", None)
    known = set(nodes)
    have_number = any(map(str.isdigit, nodes))
    form_of_node = nodes_within(unknown, nodes, beside)
    meaning_of = {}
    for name in unknown:
        joined = nodes_joined(name, known)
        same = node_of.get(without_signs(name)) or node_of.get(month_of(name))
        if joined:
            meaning_of[name] = ",".join(joined)
        elif same:
            meaning_of[name] = same
        elif name in form_of_node:
            meaning_of[name] = form_of_node[name]
        elif is_date(name):
            meaning_of[name] = "a spreadsheet's date"
        elif name.isdigit() and len(name) < 3 and not have_number:
            meaning_of[name] = "part of a name with a comma"
    return meaning_of


def nodes_within(
    unknown: Sequence[str], nodes: Sequence[str], beside: Sequence[str]
) -> dict[str, str]:
    """Returns names that are a node's with other text around it, or the other way, with that node.

    Two nodes, or three if no sign parts it, must have that text, numbers aside, and no two nodes
    may differ by it; or its signs must be in the name of no node. Where such names are several, but
    few, and most of their nodes are `beside` them, as TP53 beside TP53-AS1, their table tells them
    apart.
    """
    node_of = {node.casefold(): node for node in reversed(nodes)}
    name_of = {name.casefold(): name for name in unknown}
    lengths = sorted(set(map(len, node_of)), reverse=True)
    lengths_of_unknown = sorted(set(map(len, name_of)), reverse=True)
    pairs = []  # text around, name, node
    for name in unknown:
        for around, within in parts_of(name, node_of, lengths)[:1]:
            pairs.append((around, name, node_of[within]))
    for node in nodes if unknown else []:
        for around, within in parts_of(node, name_of, lengths_of_unknown)[:1]:
            pairs.append((around, name_of[within], node))
    nodes_of = defaultdict(set)  # by text around
    for around, _, node in pairs:
        nodes_of[around].add(node)
    told_apart = set()
    for around, found in nodes_of.items():
        are_few = 1 < len(found) < FEW_FORMS * len(beside)
        if are_few and 2 * len(found.intersection(beside)) > len(found):
            told_apart.add(around)
    usual = set()
    for node in nodes if pairs else []:
        usual.update(around for around, _ in parts_of(node, node_of, lengths))
    letters = set("".join(nodes))
    meaning_of = {}
    for around, name, node in pairs:
        before, behind = around
        signs = before[-1:] + behind[:1]
        is_new = is_parted(around) and letters.isdisjoint(signs)
        is_series = re.fullmatch(r"[\W_][a-z]", before + behind)  # as YAL001C-A
        is_common = len(nodes_of[around]) >= (2 if is_parted(around) else 3)
        if around in told_apart:
            continue
        if not is_series and (is_new or (is_common and around not in usual)):
            meaning_of.setdefault(name, node)
    return meaning_of


def spelt_twice(tables: Any, connected: Sequence[str]) -> dict[str, str]:
    """Returns nodes named as another but for case, inner signs, form of Unicode or text around it.

    With each stands the other one.

    Most nodes that are written as the one must have such a twin, or names are told apart so. Two
    with an edge between them are two, and so is one that is only a source, or only a target, of
    relations in which the other is not: as a protein and its gene.
    """
    name_of = {}  # by its letters, and a sign at its end, as in CD4+
    pairs = names_in_others(connected)
    for name in connected:
        first = name_of.setdefault((without_signs(name), end_sign(name)), name)
        if first != name:
            pairs.append((name, first))
    if not pairs:
        return {}
    kind_count = Counter(map(kind_of_name, connected))
    twins = {name for pair in pairs for name in pair}
    twin_count = Counter(map(kind_of_name, twins))
    roles, links = edges_of(tables, twins)
    twice = {}
    for pair in pairs:
        rare, common = sorted(pair, key=lambda name: kind_count[kind_of_name(name)])
        kind = kind_of_name(rare)
        is_one_sided = any(len({end for end, _ in roles[name]}) == 1 for name in pair)
        differ_in_role = is_one_sided and roles[rare].isdisjoint(roles[common])
        are_linked = frozenset(pair) in links
        if 2 * twin_count[kind] >= kind_count[kind] and not differ_in_role and not are_linked:
            twice[rare] = common
    return twice


def edges_of(tables: Any, names: Container[str]) -> tuple[dict[str, set], set[frozenset]]:
    """Returns the ends and relations of each named node's edges, and the pairs of their nodes."""
    is_named = torch.tensor([name in names for name in tables.genes])
    chosen = is_named[tables.edge_index].any(dim=0)
    sources, targets = tables.edge_index[:, chosen].tolist()
    roles = defaultdict(set)
    links = set()
    relations = tables.edge_type[chosen].tolist()
    for source, target, relation in zip(sources, targets, relations, strict=True):
        start = tables.genes[source]
        end = tables.genes[target]
        roles[start].add(("source", relation))
        roles[end].add(("target", relation))
        links.add(frozenset((start, end)))
    return roles, links


def names_in_others(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the names that are another one with text around it, as 9606.A, each with that one.

    Signs must part the text, and a tenth of the names must have it, numbers aside.
    """
    name_of = {name.casefold(): name for name in names}
    lengths = sorted(set(map(len, name_of)), reverse=True)
    pairs_of = defaultdict(list)  # by text around
    for name in names:
        for around, within in parts_of(name, name_of, lengths)[:1]:
            if is_parted(around):
                pairs_of[around].append((name, name_of[within]))
    fewest = max(2, FEW_FORMS * len(names))
    return [pair for pairs in pairs_of.values() if len(pairs) >= fewest for pair in pairs]


def parts_of(
    name: str, known: Container[str], lengths: Sequence[int]
) -> list[tuple[tuple[str, str], str]]:
    """Returns the names in lower case that are `known` and part of a name, the longest first.

    `lengths` are those of the known names, from the longest on. Before each part stands the text
    before and behind it, in which all numbers are 0. A part does not begin or end within a number,
    nor, if it is short, within a word.
    """
    text = name.casefold()
    found = []
    for length in lengths:
        for start in range(len(text) - length + 1):
            within = text[start : start + length]
            if within not in known or within == text:
                continue
            around = (text[:start], text[start + length :])
            cuts_number = re.search(r"\d\0\d", "\0".join([around[0], within, around[1]]))
            if not cuts_number and (length >= SHORT or is_parted(around)):
                found.append((tuple(re.sub(r"\d+", "0", part) for part in around), within))
    return found


def is_parted(around: tuple[str, str]) -> bool:
    """Returns whether signs part a name from the text before and behind it."""
    before, behind = around
    return not any(map(str.isalnum, before[-1:] + behind[:1]))


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


def without_signs(name: str) -> str:
    """Returns letters and digits of a name, in lower case, with a blank where signs part digits."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    pieces = re.split(rf"(?<=\d){SIGNS}(?=\d)", plain)
    return " ".join(re.sub(SIGNS, "", piece) for piece in pieces)


def end_sign(name: str) -> str:
    """Returns the visible sign at a name's end, "" if there is none."""
    return name[-1] if unicodedata.category(name[-1])[0] in "PS" else ""


def kind_of_name(name: str) -> tuple:
    """Returns how a name is written: its case, its signs, and whether it is ASCII."""
    signs = "".join(sorted(set(re.sub(r"[^\W_]", "", name))))
    return name[:1].isupper(), name.isupper(), name.islower(), name.isascii(), signs


def stem_of(name: str) -> str:
    """Returns a name without the number at its end, and the signs before it."""
    return re.sub(r"[\W_]*\d[\d\W_]*$", "", name)


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
