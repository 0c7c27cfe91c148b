"""Guesses what a name means that no edge has: a misspelt node, several nodes, or a control.

A name that an edge has is that node, whatever it looks like.
"""

import re
from collections.abc import Container, Mapping, Sequence

CONTROL = re.compile(r"((neg|negative)?(control|ctrl)|wt|wildtype|ntc?|nontargeting)+")
JOINTS = "+;|:/&_ "  # what people write between names in place of a comma
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
DATE = re.compile(rf"\d+-({MONTHS})|({MONTHS})-\d+|\d{{4}}-\d\d-\d\d( 00:00:00)?")
# Also in MAR1, MARCH1, SEPT1 and their newer names MARCHF1, SEPTIN1.
MONTH = re.compile(rf"0?(\d+)-({MONTHS})|({MONTHS})(?:CH|CHF|T|TIN)?-?0?(\d+)", re.IGNORECASE)
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
        joined = [text for text in re.split(r"[+;|:/&_.\s]", name) if text in known]
        same = node_of.get(without_signs(name)) or node_of.get(month_of(name))
        if joined:
            meaning_of[name] = joined[0]
        elif same:
            meaning_of[name] = same
        elif is_date(name):
            meaning_of[name] = "a spreadsheet's date"
    return meaning_of


def without_signs(name: str) -> str:
    """Returns letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]", "", name).casefold()


def is_date(name: str) -> bool:
    """Returns whether a name is what spreadsheets, and pandas after them, make of MARCH1."""
    return DATE.fullmatch(name) is not None


def month_of(name: str) -> str:
    """Returns month and number, such as MAR 1, of `1-Mar`, `Mar-01`, MAR1 or MARCH1; else ""."""
    match = MONTH.fullmatch(name)
    if match is None:
        return ""
    return f"{match[2] or match[3]} {match[1] or match[4]}".upper()
