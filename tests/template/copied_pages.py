"""Leaves out of the pages of a copy what they say about parts that the copy does not have.

A page consists of headings, paragraphs, tables and blocks of code. A sentence, a clause of a cell,
a row or a command is left out if it matches a pattern, and so is a section whose heading matches. A
sentence that ends with a colon introduces the table or code after it: if one of them is left out,
so is the other. A sentence such as "It is fast." refers to the sentence before it, and is left out
with that sentence.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH = 100  # largest number of characters in a line of a paragraph
NO_HEADING = 7  # depth of a block that is not a heading
CODE = r"```[^\n]*\n.*?^```$(?:\n\n```\n.*?^```$)?"  # with the block of its output
TABLE = r"\|[^\n]*(?:\n\|[^\n]*)*"
TEXT = r"[^\n]+(?:\n(?!```|\||- )[^\n]+)*"  # a heading, a paragraph or an item of a list
BLOCK = re.compile(rf"^(?:{CODE}|{TABLE}|{TEXT})", re.M | re.S)
SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z`[*\d])")
CLAUSE_END = re.compile(r"(?<=[.;])\s+")  # in a cell of a table
ITEMS = re.compile(r"^(- [^\n]*(?:\n  [^\n]*)*\n)\n(?=- )", re.M)  # an item and a blank line
COMMAND_END = re.compile(r"(?<!\\)\n")
# The beginning of a sentence that refers to the sentence before it.
REFERENCE = re.compile(r"(If )?(It|Its|They|Their|This|These|Then|Otherwise|Alternatively)\b", re.I)
# A word of a paragraph. Code is one word, and no line begins with the sign of an item or heading.
WORD = re.compile(r"(?:`[^`]*`|[^ `]| (?=[-+*#|] ))+")
LINK = re.compile(r"\[([^]]+)\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")


def page_without(page: str, unwanted: re.Pattern) -> str:
    """Returns the text of a page without everything that matches the pattern."""
    left = []
    lacks_introduction = False
    for block in without_sections(BLOCK.findall(page), unwanted):
        shorter = block
        if is_text(block):
            shorter = without_sentences(block, unwanted)
        elif lacks_introduction:
            shorter = ""
        elif unwanted.search(block):
            shorter = without_lines(block, unwanted)
            if not shorter and left[-1].endswith(":"):
                left[-1] = filled(SENTENCE_END.split(left[-1])[:-1])
        lacks_introduction = block.endswith(":") and not shorter.endswith(":")
        left.append(shorter)
    text = "\n\n".join(without_empty_sections([block for block in left if block]))
    return ITEMS.sub(r"\1", text) + "\n"


def depth(block: str) -> int:
    """Returns the depth of a heading, such as 2 for `## Heading`; otherwise `NO_HEADING`."""
    heading = re.match("(#+) ", block)
    return len(heading[1]) if heading else NO_HEADING


def is_text(block: str) -> bool:
    """Returns whether a block is a heading, a paragraph or an item of a list."""
    return not block.startswith(("```", "|"))


def without_sections(blocks: Sequence[str], unwanted: re.Pattern) -> list[str]:
    """Returns the blocks of a page without the sections whose heading matches."""
    left = []
    section = NO_HEADING  # depth of the heading of the section that is left out
    for block in blocks:
        if depth(block) <= section:
            section = NO_HEADING
            if depth(block) < NO_HEADING and unwanted.search(block):
                section = depth(block)
        if section == NO_HEADING:
            left.append(block)
    return left


def without_empty_sections(blocks: Sequence[str]) -> list[str]:
    """Returns the blocks of a page without headings that have nothing below them."""
    left = []
    depth_below = 0
    for block in reversed(blocks):
        if depth(block) == NO_HEADING or depth(block) < depth_below:
            left.append(block)
            depth_below = depth(block)
    return left[::-1]


def without_sentences(text: str, unwanted: re.Pattern) -> str:
    """Returns a paragraph without the sentences that match."""
    sign = "- " if text.startswith("- ") else ""
    sentences = SENTENCE_END.split(text.removeprefix(sign))
    left = wanted(sentences, unwanted)
    if left == sentences:
        return text
    return sign + filled(left).replace("\n", "\n" + " " * len(sign)) if left else ""


def wanted(sentences: Sequence[str], unwanted: re.Pattern) -> list[str]:
    """Returns the sentences that do not match, and do not refer to a sentence that is left out."""
    left = []
    is_wanted = True
    for sentence in sentences:
        refers = REFERENCE.match(sentence) is not None
        is_wanted = (is_wanted or not refers) and not unwanted.search(sentence)
        if is_wanted:
            left.append(sentence)
    return left


def filled(sentences: Sequence[str]) -> str:
    """Returns sentences as a paragraph with lines of up to `WIDTH` characters."""
    lines = [""]
    for word in WORD.findall(" ".join(" ".join(sentences).split())):
        if len(lines[-1]) + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(line.rstrip() for line in lines)


def without_lines(block: str, unwanted: re.Pattern) -> str:
    """Returns a table or code without the lines that match, "" if nothing is left.

    Code is only shortened if it consists of commands.
    """
    if block.startswith("|"):
        head, rule, *rows = block.splitlines()
        left = [row for row in (without_clauses(row, unwanted) for row in rows) if row]
        return "\n".join([head, rule, *left]) if left else ""
    head, *commands = COMMAND_END.split(block.removesuffix("\n```"))
    left = [command for command in commands if not unwanted.search(command)]
    return "\n".join([head, *left, "```"]) if left and head == "```bash" else ""


def without_clauses(row: str, unwanted: re.Pattern) -> str:
    """Returns a row of a table without the clauses that match, "" if nothing is left of a cell."""
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    for number, cell in enumerate(cells):
        clauses = wanted(CLAUSE_END.split(cell), unwanted)
        if not clauses:
            return ""
        if unwanted.search(cell):
            end = "." if cell.endswith(".") else ""
            cells[number] = " ".join(clauses).rstrip(";.") + end
    return f"| {' | '.join(cells)} |"


def anchors(page: str) -> list[str]:
    """Returns the anchors of the headings of a page, to which links can refer."""
    headings = [block for block in BLOCK.findall(page) if depth(block) < NO_HEADING]
    texts = [re.sub(r"[^\w -]", "", heading).strip() for heading in headings]
    return [text.lower().replace(" ", "-") for text in texts]


def without_dead_links(path: Path, texts: Mapping[Path, str]) -> str:
    """Returns the text of a page. Links to missing files and headings are only their words.

    `texts` contains the text of each page of a copy.
    """

    def replacement(link: re.Match) -> str:
        words, file, anchor = link.groups()
        target = (path.parent / file).resolve() if file else path
        is_dead = not target.exists() or (anchor and anchor not in anchors(texts[target]))
        return words if is_dead else link[0]

    return LINK.sub(replacement, texts[path])
