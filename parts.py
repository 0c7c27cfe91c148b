"""The parts: what a copy can leave out, by deleting files and setting an option to its off value.

No other line changes. The core imports no part at the top of a module, but inside the `if` of its
option, or by `optional`. docs/adapting.md lists the parts; whatever is in none is the core.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from errors import UserError

FOLDER = Path(__file__).parent.resolve()
# An option, the module that it needs, its value without, and those that need it; (): all others.
NEEDS = (
    ("model.start", "baseline", "mean", ()),
    ("model.pairs", "model_pairs", "false", ()),
    ("model.readout", "model_nodes", "both", ("nodes",)),
    ("model.cuda_graphs", "model_graphs", "false", ()),
    ("model.message_passing", "model_reach", "shared", ("auto", "reach")),
    ("model.message_passing", "mask_copies", "shared", ("expanded",)),
    ("data.cache_dir", "data_cache", "", ()),
    ("run.init", "run_transfer", "", ()),
)


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
    for option, module, off, values in NEEDS:
        if option not in options or is_here(module):  # an edited copy may have no such option
            continue
        value = str(options[option])
        if isinstance(options[option], bool):
            value = value.lower()
        if value in values or (not values and value != off):
            needed = f"needs {module}.py, which this copy does not have"
            raise UserError(f"{option}={value} {needed}: set {option}={off}")
