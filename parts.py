"""The optional parts: files that a copy can delete after setting an option to its off value.

Nothing else needs to change, because the core does not import a part at the top of a module. It
imports it inside the `if` of its option, or with `optional`. docs/adapting.md lists the parts;
everything else is the core.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from errors import UserError

FOLDER = Path(__file__).parent.resolve()
# An option, the module that it needs, its value without the module, and the values that need the
# module; (): all other values.
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
    """Returns the module of a part, None if its file has been deleted.

    A package with the same name elsewhere does not count. Errors inside the module are raised.
    """
    return importlib.import_module(name) if is_here(name) else None


def is_here(name: str) -> bool:
    """Returns whether a module is in the same folder as this one."""
    return (FOLDER / f"{name}.py").exists()


def check_parts(options: Mapping[str, Any]) -> None:
    """Raises `UserError` for an option of {"section.key": value} whose part has been deleted."""
    for option, module, off, values in NEEDS:
        if option not in options or is_here(module):  # an edited copy may have removed the option
            continue
        value = str(options[option])
        if isinstance(options[option], bool):
            value = value.lower()
        if value in values or (not values and value != off):
            needed = f"needs {module}.py, which this copy does not have"
            raise UserError(f"{option}={value} {needed}: set {option}={off}")
