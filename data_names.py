"""Guesses what a name means that no edge has: a misspelt node, several nodes, or a control.

A name that an edge has is that node, whatever it looks like.
"""

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence

# Without hyphens, underscores and blanks, in lower case.
CONTROL = re.compile(
    r"wt|nt|wildtype\d*|mock|untreated|unperturbed|scrambled?"
    r"|(neg|negative)?(control|ctrl|ntc|nontargeting|safetargeting)(control|guide|\d)*"
)
JOINTS = "+;|:/&_ "  # what people write between names in place of a comma
SHOWN = 10  # names in a note
# What spreadsheets take for months, and the names that these genes have got since.
MONTH = re.compile(r"(JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC)(CH|CHF|T|TIN)?|DELEC")
CASE = "upper and lower case"
VERSION = "a version such as .1"
SIGNS = "hyphens, underscores, dots and blanks"
DATE = "a spreadsheet's date or a newer name"
PART = "further text"
ONE_NODE = "; if it is one node, give it an edge, such as a loop"


def is_control(name: str) -> bool:
    """Returns whether a name is one of those that people write for an intact sample."""
    return CONTROL.fullmatch(re.sub(r"[-_\s]", "", name).casefold()) is not None


def misread(name: str, nodes: Container[str]) -> str:
    """Returns a text on what is wrong with a name that is no node; "" if nothing is.

    Nothing is if it may be the name of a node without edges.
    """
    are_controls = is_control(name)
    for joint in JOINTS:
        parts = [part for part in re.split(rf"(?:\s*{re.escape(joint)}\s*)+", name) if part]
        knocked_out = [part for part in parts if not is_control(part)]
        are_numbered = joint in "_ " and all(part.isdigit() for part in knocked_out)
        if parts and len(knocked_out) < len(parts) and (are_numbered or not knocked_out):
            are_controls = True
        is_joined = parts != [name] and knocked_out and all(part in nodes for part in knocked_out)
        if is_joined and not are_controls:
            names = ",".join(knocked_out)
            return f"{name}, which is no node but joins names: write {names}{ONE_NODE}"
    if are_controls:
        return f"{name}, a control: leave it out, as an intact sample has an empty cell{ONE_NODE}"
    return ""


def note_on_unknown(unknown: Sequence[str], nodes: Sequence[str], num_perturbed: int) -> str:
    """Returns a sentence on perturbed names that no edge has, "" if none is needed.

    None is needed if no name is nearly that of a node, and less than half of all names have no
    edge.
    """
    if not unknown:
        return ""
    near = nearly_nodes(unknown, nodes)
    are_most = 2 * len(unknown) >= num_perturbed
    if not near and not are_most:
        return ""
    count = f"{len(unknown):,} of {num_perturbed:,}"
    text = f"{count} knocked-out nodes have no edge"
    if are_most:
        text = f"MOST KNOCKED-OUT NODES, {count}, HAVE NO EDGE"
    text += f": {some_names(unknown, near)}"
    if not near:
        return f"{text}: do the tables use the same names?"
    ((difference, count),) = Counter(how for _, how in near.values()).most_common(1)
    if 2 * count > len(unknown):
        text += f"; what differs is only {difference}, for {count:,} of them"
    return text


def some_names(names: Sequence[str], near: Mapping[str, tuple[str, str]]) -> str:
    """Returns up to ten of the names as a text, those that are `near` a node first, with it."""
    shown = [f"{name} ({near[name][0]}?)" for name in names if name in near]
    shown += [name for name in names if name not in near]
    return f"{', '.join(shown[:SHOWN]):.500}"


def nearly_nodes(unknown: Sequence[str], nodes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the names that are nearly a node's, each with that node and how they differ."""
    found = {}
    keys = {CASE: str.casefold, VERSION: without_version, SIGNS: without_signs, DATE: month_of}
    for difference, key in keys.items():
        node_of = {key(node): node for node in reversed(nodes)}  # the first node of a key
        for name in unknown:
            node = node_of.get(key(name), "")
            # Two versions are two names, as in C. elegans.
            are_two_versions = difference == VERSION and key(name) not in (name, node)
            if node not in ("", name) and key(name) and not are_two_versions:
                found.setdefault(name, (node, difference))
    known = set(nodes)
    for name in unknown:
        for part in re.split(rf"[{re.escape(JOINTS)}\s]+", name):
            if part in known and part != name:
                found.setdefault(name, (part, PART))
    return found


def without_signs(name: str) -> str:
    return re.sub(r"[-_.\s\u200b\ufeff]", "", name).casefold()


def without_version(name: str) -> str:
    return re.sub(r"\.\d+$", "", name)


def month_of(name: str) -> str:
    """Returns month and number of `1-Mar`, `Mar-01`, MAR1 or MARCH1, such as MAR1; else ""."""
    match = re.fullmatch(r"0?(\d+)[-/ ]([A-Za-z]+)|([A-Za-z]+)[-/ ]?0?(\d+)", name)
    if match is None:
        return ""
    month = MONTH.fullmatch((match[2] or match[3]).upper())
    return f"{month[1] or 'DEC'}{match[1] or match[4]}" if month else ""
