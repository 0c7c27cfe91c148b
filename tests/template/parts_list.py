"""The list of optional parts: the files of each part, and what a copy loses without it."""

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL

from parts import DOCUMENTED, FOLDER, NEEDS

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
    """

    name: str
    patterns: tuple[str, ...]
    loss: str

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

    def num_lines(self, folder: Path = FOLDER) -> int:
        """Returns the number of lines of code that the part has in a folder."""
        paths = []
        for file in self.files:
            path = folder / file
            paths += path.glob("*.py") if path.is_dir() else [path]
        return num_lines([path for path in paths if path.exists()])


def num_lines(paths: Iterable[Path]) -> int:
    """Returns the total number of lines of code in some Python files.

    Comments, docstrings and blank lines do not count, so that nobody shortens them to save lines.
    """
    return sum(len(lines_of_code(path.read_text())) for path in paths)


def lines_of_code(source: str) -> set[int]:
    """Returns the numbers of the lines that have code."""
    numbers = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            numbers.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return numbers


PARTS = [
    Part(
        "baseline",
        ("baseline.py", "baseline_*.py", "analyse_rivals.py"),
        loss="training starts from the mean of the scores",
    ),
    Part(
        "pairs",
        ("model_pairs.py", "predict_pairs.py"),
        loss="the model does not use what knocked-out nodes have in common",
    ),
    Part(
        "nodes",
        ("model_nodes.py",),
        loss="no prediction of one score per node, such as expression profiles",
    ),
    Part(
        "graphs",
        ("model_graphs.py",),
        loss="training steps on a GPU are eager",
    ),
    Part(
        "reach",
        ("model_reach.py", "model_reach_*.py"),
        loss="a CPU computes the states of all nodes in all layers; fp32 results differ in their "
        "last digits",
    ),
    Part(
        "copies",
        ("mask_copies.py",),
        loss="no layers that need a value for each edge",
    ),
    Part(
        "predict",
        ("predict.py", "predict_*.py", "predictor.py"),
        loss="no predictions of other tables; the complete template can predict with runs of the "
        "copy",
    ),
    Part(
        "explain", ("predict_explain.py", "predict_pairs.py"), loss="no explanations of predictions"
    ),
    Part(
        "analyse",
        ("analyse.py", "analyse_*.py"),
        loss="no analysis: test results are only in test.tsv, metrics.jsonl and the log",
    ),
    Part(
        "notes",
        ("data_notes.py",),
        loss="fewer warnings about likely mistakes in tables",
    ),
    Part(
        "cache",
        ("data_cache.py",),
        loss="tables are parsed at each start",
    ),
    Part(
        "transfer",
        ("run_transfer.py",),
        loss="no initialisation from the parameters of another run",
    ),
    Part(
        "changes",
        ("run_changes.py",),
        loss="no detection of changed options and code, between starts of a run and between ranks",
    ),
    Part("plots", ("run_plots.py",), loss="no curves.svg and no test.svg"),
    Part(
        "watchdog",
        ("ddp_watchdog.py",),
        loss="if a rank hangs, the timeout of the process group ends the job, without naming the "
        "rank",
    ),
    Part(
        "threads",
        ("ddp_threads.py",),
        loss="torch and torchrun choose the number of threads; no warnings about the machine",
    ),
    Part(
        "machines",
        ("ddp_machines.py",),
        loss="no preflight; on several machines, you must call torchrun yourself on each",
    ),
    Part(
        "checks",
        ("tests/check.py", "tests/tools"),
        loss="no checks of an edited copy (parity, devices, waits, faults); no simulated GPU",
    ),
]
