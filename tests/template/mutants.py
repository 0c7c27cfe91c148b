"""Which faults do the quick tests notice?

    python -m tests.template.mutants [--number 100] [--seed 0] [--only TEXT] [--modules NAME ...]

Changes one token of the template's modules at a time, in a copy of it: an operator, a number,
`True`, `min`, `any` or `and` becomes another, or a condition is negated. Prints each mutant, and
whether a quick test notices it.
"""

import argparse
import ast
import functools
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import tokenize
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.template.fixtures import MODULES, ROOT, copy_template, kill_marked

TIMEOUT = 900  # seconds for all quick tests, one after the other
OTHER = {  # what a token becomes
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "/",
    "%": "//",
    "**": "*",
    "@": "*",
    "&": "|",
    "|": "&",
    "+=": "-=",
    "-=": "+=",
    "*=": "/=",
    "|=": "&=",
    "and": "or",
    "or": "and",
    "not": "",
    "in": "not in",
    "is": "is not",
    "if": "if not",
    "elif": "elif not",
    "while": "while not",
    "True": "False",
    "False": "True",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
}


@functools.cache
def original(module: str) -> str:
    return (ROOT / f"{module}.py").read_text()


class Mutant(NamedTuple):
    module: str
    line: int
    start: int
    end: int
    text: str  # in place of the characters `start` to `end` of the line

    def source(self) -> str:
        lines = original(self.module).splitlines(keepends=True)
        changed = lines[self.line - 1]
        lines[self.line - 1] = changed[: self.start] + self.text + changed[self.end :]
        return "".join(lines)

    def __str__(self) -> str:
        line = self.source().splitlines()[self.line - 1]
        return f"{self.module}.py:{self.line}:{self.start}: {line.strip()}"


def mutants(module: str) -> Iterator[Mutant]:
    """Yields every change of one token that leaves a program, outside annotations."""
    path = ROOT / f"{module}.py"
    annotations = set(annotated(ast.parse(path.read_text())))
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    for before, token in itertools.pairwise(tokens):
        text = OTHER.get(token.string)
        if token.type == tokenize.NUMBER:
            text = f"({token.string} + 1)"
        # zip(strict=True) guards against mistakes of other lines.
        is_strict = f"strict={token.string}" in token.line
        follows_name = token.string == "in" and before.type == tokenize.NAME  # `for x in`, `x in`
        is_loop = follows_name and " for " in token.line
        if text is None or token.start in annotations or is_strict or is_loop:
            continue
        mutant = Mutant(module, token.start[0], token.start[1], token.end[1], text)
        try:
            compile(mutant.source(), str(path), "exec")
        except SyntaxError:
            continue
        yield mutant


def annotated(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Yields the positions of all characters in annotations."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if annotation is None:
                continue
            for line in range(annotation.lineno, annotation.end_lineno + 1):
                start = annotation.col_offset if line == annotation.lineno else 0
                end = annotation.end_col_offset if line == annotation.end_lineno else 200
                for column in range(start, end):
                    yield line, column


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess | None:
    """Runs tests of a copy of the template, one after the other; returns None if they hang."""
    mark = str(uuid.uuid4())  # beside that of each test
    environment = {
        **os.environ,
        "MUTANT_MARK": mark,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_marked(f"MUTANT_MARK={mark}")


def fastest_first(folder: Path) -> list[str]:
    """Returns the quick tests in the order of their duration."""
    result = run_tests(folder, "-vv", "--durations=0")
    if result is None or result.returncode:
        sys.exit(f"the quick tests fail without any change: {result}")
    durations = re.findall(r"^([0-9.]+)s call +(.*?) *$", result.stdout, re.MULTILINE)
    durations.sort(key=lambda pair: float(pair[0]))
    return [test for _seconds, test in durations]


def outcome(mutant: Mutant, tests: list[str], folder: Path) -> str:
    """Returns `noticed`, `hangs` or `SURVIVED`, after the tests of a copy in `folder`."""
    path = folder / f"{mutant.module}.py"
    path.write_text(mutant.source())
    result = run_tests(folder, "-x", "-q", *tests)
    path.write_text(original(mutant.module))
    if result is None:
        return "hangs"
    if result.returncode or "not the template's" in result.stdout:
        return "noticed"
    return "SURVIVED"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--number", type=int, default=100, help="how many mutants are drawn (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="of those drawn, the ones whose line contains TEXT",
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        choices=MODULES,
        default=MODULES,
        metavar="NAME",
        help="draw from these (default: all)",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="how many are tested at a time (default: 2)"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    possible = [mutant for module in sorted(options.modules) for mutant in mutants(module)]
    number = min(options.number, len(possible))
    drawn = random.Random(options.seed).sample(possible, number)
    chosen = [mutant for mutant in drawn if options.only in str(mutant)]
    folders: Queue[Path] = Queue()

    def is_noticed(mutant: Mutant) -> bool:
        folder = folders.get()
        found = outcome(mutant, tests, folder)
        folders.put(folder)
        print(f"{found:8}  {mutant}", flush=True)
        return found != "SURVIVED"

    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            folders.put(copy_template(Path(parent, str(job))))
        tests = fastest_first(Path(parent, "0"))
        num_noticed = sum(pool.map(is_noticed, chosen))
    print(f"{num_noticed} of {len(chosen)} mutants noticed, of {len(possible)} possible ones")


if __name__ == "__main__":
    main()
