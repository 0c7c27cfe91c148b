"""Guesses what a name means that no edge has: a misspelt node, several nodes, or a control.

A name that an edge has is that node, whatever it looks like.
"""

import re
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence

CONTROL = re.compile(r"((neg|negative)?(control|ctrl)|wt|wildtype|ntc?|nontargeting)+")
JOINTS = "+;|:/&_ "  # what people write between names in place of a comma
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
DATE = re.compile(rf"\d+-({MONTHS})|({MONTHS})-\d+|\d{{4}}-\d\d-\d\d( 00:00:00)?")
# Also in MAR1, MARCH1, SEPT1 and their newer names MARCHF1, SEPTIN1.
MONTH = re.compile(rf"0?(\d+)-({MONTHS})|({MONTHS})(?:CH|CHF|T|TIN)?-?0?(\d+)", re.IGNORECASE)
SIGNS = r"[\W_]+"  # between the words of a name
HYPHENS = r"[\u2010-\u2015\u2212]"  # that PDF files and word processors write
SHOWN = 10  # names in a note
ONE_NODE = "; if it is one node, give it an edge, such as a loop"


def is_control(name: str) -> bool:
    """Returns whether a name is one of those that people write for an intact sample."""
    unnumbered = re.sub(r"[_\s]+\d+$", "", name)
    return CONTROL.fullmatch(without_signs(unnumbered)) is not None


def misread(name: str, nodes: Container[str]) -> str:
    """Returns a text on what is wrong with a name that is no node; "" if it may be one
    without edges.
    """
    if is_control(name):
        return f"{name}, a control: leave it out, as an intact sample has an empty cell{ONE_NODE}"
    for joint in JOINTS:
        joined = [text.strip() for text in name.split(joint) if text.strip()]
        knocked_out = [text for text in joined if not is_control(text)]
        if joint in name and knocked_out and all(text in nodes for text in knocked_out):
            names = ",".join(knocked_out)
            return f"{name}, which is no node but joins names: write {names}{ONE_NODE}"
    return ""


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


def note_on_features(names: Container[str], genes: Sequence[str]) -> str:
    """Returns a sentence on names of the table of features that are no nodes, "" if none is needed.

    None is if no name has one of the `meanings` among the nodes without features, and not both
    most names are no nodes and most nodes have no features.
    """
    nodes = set(genes)
    unknown = [name for name in names if name not in nodes]
    lacking = [gene for gene in genes if gene not in names]
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
