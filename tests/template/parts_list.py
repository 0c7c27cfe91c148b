"""The parts as a list: what each is made of, and what one loses without it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from parts import FOLDER, NEEDS

NO_OPTION = ("", "", "", ())


@dataclass(frozen=True)
class Part:
    """A part of the template.

    Args:
        patterns: of the files and folders to delete; the first is the file that its option needs.
            Two parts can share others, which go with either.
        loss: what one loses, a text.
    """

    name: str
    patterns: tuple[str, ...]
    loss: str

    def __post_init__(self):
        needs = [row for row in NEEDS if f"{row[1]}.py" == self.patterns[0]] or [NO_OPTION]
        for name, value in zip(("option", "module", "off", "on"), needs[0], strict=True):
            object.__setattr__(self, name, value)  # `off` is its value without the part

    def is_asked_for(self, value: str) -> bool:
        """Returns whether a value of the option, as on a command line, asks for the part."""
        return value in self.on if self.on else value != self.off

    @property
    def is_code(self) -> bool:
        """Whether runs can need it."""
        return "/" not in self.patterns[0]

    @property
    def files(self) -> list[str]:
        """The files and folders that are here."""
        paths = []
        for pattern in self.patterns:
            paths += sorted(FOLDER.glob(pattern))
        return [str(path.relative_to(FOLDER)) for path in paths]

    def num_lines(self, folder: Path = FOLDER) -> int:
        """Returns how many lines of Python it has in a folder."""
        paths = []
        for file in self.files:
            path = folder / file
            paths += path.glob("*.py") if path.is_dir() else [path]
        return num_lines([path for path in paths if path.exists()])


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


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
        loss="no prediction of scores for each node, such as expression profiles",
    ),
    Part(
        "graphs",
        ("model_graphs.py",),
        loss="training steps on a GPU are eager",
    ),
    Part(
        "reach",
        ("model_reach.py",),
        loss="a CPU computes the states of all nodes, also in the first layer; fp32 results differ "
        "in their last digits",
    ),
    Part(
        "copies",
        ("mask_copies.py",),
        loss="no layers that need a value for each edge",
    ),
    Part(
        "predict",
        ("predict.py", "predict_*.py", "predictor.py"),
        loss="no predictions of other tables",
    ),
    Part(
        "explain", ("predict_explain.py", "predict_pairs.py"), loss="no explanations of predictions"
    ),
    Part(
        "analyse",
        ("analyse.py", "analyse_*.py"),
        loss="results of a run are only in test.tsv and the log",
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
        loss="changed options and code are not detected, neither on resuming nor between ranks",
    ),
    Part("plots", ("run_plots.py",), loss="no curves.svg and no test.svg"),
    Part(
        "watchdog",
        ("ddp_watchdog.py",),
        loss="a hang ends by the timeout of the process group, which does not name the rank",
    ),
    Part(
        "threads",
        ("ddp_threads.py",),
        loss="torch and torchrun choose the number of threads; no notes on the machine",
    ),
    Part(
        "machines",
        ("ddp_machines.py",),
        loss="no preflight; on several machines, torchrun must be started by hand on each",
    ),
    Part(
        "checks",
        ("tests/check.py", "tests/tools"),
        loss="no checks of an edited copy for parity, devices, waits and faults; no simulated GPU",
    ),
]
