"""The parts: what a copy can leave out, by deleting files and setting an option to its off value.

No other line changes. The core imports no part at the top of a module, but inside the `if` of its
option, or by `optional`. Whatever is in no part is the core.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from errors import UserError

FOLDER = Path(__file__).parent.resolve()


@dataclass(frozen=True)
class Part:
    """A part of the template.

    Args:
        patterns: of the files to delete; the first is the file that its option needs. Two parts
            can share others, which go with either.
        option: the option that asks for it, `section.key`, "" if there is none.
        off: the option's value without the part, as on a command line.
        loss: what one loses, a text.
        on: the values that ask for it; none: all but `off`.
    """

    name: str
    patterns: tuple[str, ...]
    option: str = ""
    off: str = ""
    loss: str = ""
    on: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        """Those that are here."""
        paths = []
        for pattern in self.patterns:
            paths += sorted(FOLDER.glob(pattern))
        return [path.name for path in paths]

    def is_asked_for(self, value: str) -> bool:
        """Returns whether a value of the option, as on a command line, asks for the part."""
        return value in self.on if self.on else value != self.off


PARTS = [
    Part(
        "baseline",
        ("baseline.py", "baseline_*.py", "analyse_rivals.py"),
        option="model.start",
        off="mean",
        loss="training starts from the mean of the scores",
    ),
    Part(
        "pairs",
        ("model_pairs.py", "predict_pairs.py"),
        option="model.pairs",
        off="false",
        loss="the local readout does not see what knocked-out nodes share",
    ),
    Part(
        "nodes",
        ("model_nodes.py",),
        option="model.readout",
        off="both",
        on=("nodes",),
        loss="no effects on nodes as scores",
    ),
    Part(
        "graphs",
        ("model_graphs.py",),
        option="model.cuda_graphs",
        off="false",
        loss="steps on a GPU are launched kernel by kernel",
    ),
    Part(
        "reach",
        ("model_reach.py",),
        option="model.message_passing",
        off="shared",
        on=("auto", "reach"),
        loss="a CPU computes the states of all nodes",
    ),
    Part(
        "copies",
        ("mask_copies.py",),
        option="model.message_passing",
        off="shared",
        on=("expanded",),
        loss="no layers with values for each edge",
    ),
    Part(
        "predict",
        ("predict.py", "predict_*.py", "predictor.py"),
        loss="no predictions of other tables",
    ),
    Part("explain", ("predict_explain.py", "predict_pairs.py"), loss="no reasons of predictions"),
    Part(
        "analyse",
        ("analyse.py", "analyse_*.py"),
        loss="test.tsv and the log alone say how good a run is",
    ),
    Part(
        "notes",
        ("data_notes.py",),
        loss="fewer hints on what may be wrong with tables",
    ),
    Part(
        "cache",
        ("data_cache.py",),
        option="data.cache_dir",
        off="",
        loss="tables are parsed at each start",
    ),
    Part(
        "transfer",
        ("run_transfer.py",),
        option="run.init",
        off="",
        loss="no start from the parameters of another run",
    ),
    Part(
        "changes",
        ("run_changes.py",),
        loss="a resumed run names no changed options and code, and ranks may have different code",
    ),
    Part("plots", ("run_plots.py",), loss="no curves.svg and no test.svg"),
    Part(
        "watchdog",
        ("ddp_watchdog.py",),
        loss="a hang ends by the process group's timeout, which names no rank",
    ),
    Part(
        "threads",
        ("ddp_threads.py",),
        loss="as many threads as torch and torchrun choose, and no notes on the machine",
    ),
    Part("machines", ("ddp_rendezvous.py",), loss="one machine, or torchrun by hand on each"),
    Part("preflight", ("ddp_preflight.py",), loss="no check of machines before a long run"),
]


def optional(name: str) -> ModuleType | None:
    """Returns a part's module, None where its file is gone.

    A package of this name elsewhere is no part. An error inside the module is raised.
    """
    return importlib.import_module(name) if is_here(name) else None


def is_here(name: str) -> bool:
    """Returns whether a module lies beside this one."""
    return (FOLDER / f"{name}.py").exists()


def check_parts(options: Mapping[str, Any]) -> None:
    """Raises `UserError` for an option, of {"section.key": value}, whose part is gone."""
    for part in PARTS:
        if part.option not in options:  # none, or an edited copy has no such option
            continue
        value = str(options[part.option])
        if isinstance(options[part.option], bool):
            value = value.lower()
        file = part.patterns[0]
        if part.is_asked_for(value) and not is_here(Path(file).stem):
            raise UserError(
                f"{part.option}={value} needs {file}, which is not here: "
                f"set {part.option}={part.off}"
            )
