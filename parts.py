"""The optional parts: modules that a copy of the template can delete.

If a part has an option, set it to the value in `NEEDS` that does not need the part. Nothing else
has to change, because no core module imports a part at its top. It imports the part inside the `if`
of its option, or with `optional`. docs/adapting.md lists the parts. All other modules are the core.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from errors import UserError

FOLDER = Path(__file__).parent.resolve()
# Each row: an option, the module that it needs, its value without the module, and the values that
# need the module. () means that all other values need it.
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
    """Returns the module of a part, or None if its file has been deleted.

    An installed package with the same name is never imported instead. Errors inside the module are
    raised.
    """
    return importlib.import_module(name) if is_here(name) else None


def is_here(name: str) -> bool:
    """Returns whether a module is in the same folder as parts.py."""
    return (FOLDER / f"{name}.py").exists()


def module_names() -> frozenset[str]:
    """Returns the file names of all modules of this copy."""
    return frozenset(path.name for path in FOLDER.glob("*.py"))


def check_parts(options: Mapping[str, Any]) -> None:
    """Raises `UserError` if the value of an option needs a part that has been deleted.

    `options` is {"section.key": value}.
    """
    for option, module, off, values in NEEDS:
        if option not in options or is_here(module):  # a copy may have removed the option
            continue
        value = str(options[option])
        if isinstance(options[option], bool):
            value = value.lower()
        if value in values or (not values and value != off):
            needed = f"needs {module}.py, which this copy does not have"
            raise UserError(f"{option}={value} {needed}: set {option}={off}")
