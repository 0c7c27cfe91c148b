"""The list of optional parts: the files of each part, and what a copy loses without it."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL

from parts import FOLDER, NEEDS

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)  # nodes that may have a docstring
NO_OPTION = ("", "", "", ())
NO_CODE = (COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER)  # types of tokens that are not code


@dataclass(frozen=True)
class Part:
    """An optional part of the template.

    Its attributes `option`, `module`, `off` and `on` are the row of its option in `parts.NEEDS`.
    They are empty if the part has no option.

    Args:
        name: name of the part, for `./launch.sh copy --without`.
        patterns: patterns of the files and folders to delete. The first pattern is the file that
            the option needs. Two parts can share the other files, which both of them delete.
        loss: text about what a copy without the part does not have.
        words: regular expression for the words with which a page mentions the part. It does not
            include the names of the files, and the option with its values.
    """

    name: str
    patterns: tuple[str, ...]
    loss: str
    words: str

    def __post_init__(self):
        needs = [row for row in NEEDS if f"{row[1]}.py" == self.patterns[0]] or [NO_OPTION]
        for name, value in zip(("option", "module", "off", "on"), needs[0], strict=True):
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def is_asked_for(self, value: str) -> bool:
        """Returns whether the part is needed for this value of its option.

        The value is a text, as on a command line.
        """
        return value in self.on if self.on else value != self.off

    @property
    def is_code(self) -> bool:
        """Whether the part contains modules that runs can need, and not only checks."""
        return "/" not in self.patterns[0]

    @property
    def files(self) -> list[str]:
        """The paths of the files and folders of the part that exist in this folder."""
        paths = []
        for pattern in self.patterns:
            paths += sorted(FOLDER.glob(pattern))
        return [str(path.relative_to(FOLDER)) for path in paths]

    @property
    def mentions(self) -> str:
        """A regular expression for everything with which a page mentions the part."""
        names = [pattern.removeprefix("docs/") for pattern in self.patterns]
        if self.option:
            names += [f"{self.option}={value}" for value in self.on] or [self.option]
        found = [re.escape(name).replace(r"\*", r"\w*") for name in names]
        return "|".join([*found, self.words])

    def num_lines(self, folder: Path = FOLDER) -> int:
        """Returns the number of lines of code that the part has in a folder."""
        paths = []
        for file in self.files:
            path = folder / file
            paths += path.glob("*.py") if path.is_dir() else [path]
        return num_lines([path for path in paths if path.suffix == ".py" and path.exists()])


def num_lines(paths: Iterable[Path]) -> int:
    """Returns the total number of lines of code in some Python files.

    Comments, docstrings and blank lines do not count, so that nobody shortens them to save lines.
    """
    return sum(len(lines_of_code(path.read_text())) for path in paths)


@functools.cache
def lines_of_code(source: str) -> frozenset[int]:
    """Returns the numbers of the lines that have code."""
    numbers = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            numbers.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return frozenset(numbers)


PARTS = [
    Part(
        "baseline",
        ("baseline.py", "baseline_*.py", "analyse_rivals.py"),
        loss="training starts from the mean of the scores",
        words="baseline",
    ),
    Part(
        "pairs",
        ("model_pairs.py", "predict_pairs.py"),
        loss="the model does not use what knocked-out nodes have in common",
        words="pair features|features of (?:the )?pairs|PairTerm|PairIndex|`pairs`",
    ),
    Part(
        "nodes",
        ("model_nodes.py",),
        loss="no prediction of one score per node, such as expression profiles",
        words="expression.profile|NodeReadout|knocked-out target|readout `nodes`",
    ),
    Part(
        "graphs",
        ("model_graphs.py",),
        loss="training steps on a GPU are eager",
        words="CUDA graph|captur(?!es_steps)|eager|replay",
    ),
    Part(
        "reach",
        ("model_reach.py", "model_reach_*.py"),
        loss="a CPU computes the states of all nodes in all layers; fp32 results differ in their "
        "last digits",
        words="states that (?:a knock-out )?change|ReachPlan",
    ),
    Part(
        "copies",
        ("mask_copies.py",),
        loss="no layers that need a value for each edge",
        words="copies of the graph|CopiedGraph|ON_COPIES|attention|value for each edge",
    ),
    Part(
        "predict",
        ("predict.py", "predict_*.py", "predictor.py", "docs/predictions.md"),
        loss="no predictions of other tables; the complete template can predict with runs of the "
        "copy",
        words=r"predictor|--parts|--rows|all-(?:pairs|singles)|table to predict|tables to predict|"
        r"chunk_of|\w+\.predict\(|\w+\.parts\(",
    ),
    Part(
        "explain",
        ("predict_explain.py", "predict_pairs.py"),
        loss="no explanations of predictions",
        words=r"explanation|--explain|explained|\w+\.explain",
    ),
    Part(
        "analyse",
        ("analyse.py", "analyse_*.py"),
        loss="no analysis: test results are only in test.tsv, metrics.jsonl and the log",
        words="analyse_run|compare`|test.json|bootstrap|confidence interval|"
        "what.test.predictions.are.worth",
    ),
    Part(
        "notes",
        ("data_notes.py",),
        loss="fewer warnings about likely mistakes in tables",
        words="likely mistakes",
    ),
    Part(
        "cache",
        ("data_cache.py",),
        loss="tables are parsed at each start",
        words="cache(?!_dir:)",
    ),
    Part(
        "transfer",
        ("run_transfer.py",),
        loss="no initialisation from the parameters of another run",
        words="initialis|`ENTRIES`",
    ),
    Part(
        "changes",
        ("run_changes.py",),
        loss="no detection of changed options and code, between starts of a run and between ranks",
        words="changed code|changed options and code",
    ),
    Part(
        "plots",
        ("run_plots.py",),
        loss="no curves.svg",
        words="curves.svg",
    ),
    Part(
        "watchdog",
        ("ddp_watchdog.py",),
        loss="if a rank hangs, the timeout of the process group ends the job, without naming the "
        "rank",
        words="watchdog",
    ),
    Part(
        "threads",
        ("ddp_threads.py",),
        loss="torch and torchrun choose the number of threads; no warnings about the machine",
        words="number of threads",
    ),
    Part(
        "machines",
        ("ddp_machines.py",),
        loss="no preflight; on several machines, you must call torchrun yourself on each",
        words="preflight|several machines|`(?:NNODES|RDZV)|NNODES=|RDZV=|--nodes=",
    ),
    Part(
        "checks",
        ("tests/check.py", "tests/tools"),
        loss="no checks of an edited copy (parity, devices, waits, faults); no simulated GPU",
        words=r"tests\.check|tests\.tools|simulated GPU|checks before a long run",
    ),
]

# Matches words for what only the template has.
ONLY_IN_TEMPLATE = (
    r"\./launch\.sh copy|\./launch\.sh test --all|tests\.bench|tests\.check gpu|"
    "tests/recipes/classes"
)


def mentions(parts: Iterable[Part]) -> re.Pattern:
    """Returns a pattern for everything with which a page mentions some parts.

    It also matches `ONLY_IN_TEMPLATE`.
    """
    alternatives = "|".join([ONLY_IN_TEMPLATE, *(part.mentions for part in parts)])
    return re.compile(rf"(?<!\w)(?:{alternatives})", re.IGNORECASE)
