"""Initialises parameters from a run on different tables, for the option run.init.

If a parameter has an entry for each node, relation, feature or output, the entries are matched by
name. For example, a node gets the embedding of the node with the same name.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from errors import UserError, counted
from run_checkpoint import Origin

log = logging.getLogger("run_transfer")
HEAD = (("head.2.weight", "outputs", 0), ("head.2.bias", "outputs", 0))  # last layer of a readout
# For each class of modules: the parameters that have an entry for each node, feature and so on, as
# (parameter name, kind, dimension of the entries). The entries of most kinds have names, in the
# field of `Origin` with the name of the kind. Two kinds do not have names:
# - "effects": an entry for each effect of a node. These parameters are only copied if both runs
#   have the same kinds of effects.
# - "fitted": parameters that are fitted to the tables before training, which are never copied.
ENTRIES = {
    "Encoder": (
        ("embedding", "nodes", 0),
        ("identity", "nodes", 0),
        ("project.weight", "features", 1),
    ),
    "KnockoutConv": (("gate", "relations", 0),),
    "BaselineReadout": (("slope", "fitted", 0), ("effect", "fitted", 0), ("weights", "fitted", 0)),
    "LocalReadout": (
        ("embed.weight", "effects", 0),
        ("embed.bias", "effects", 0),
        ("pair.weight", "outputs", 0),
        *HEAD,
    ),
    "PairTerm": (
        ("linear.weight", "outputs", 0),
        ("linear.weight", "pair_features", 1),
        ("input.weight", "pair_features", 1),
    ),
    "GlobalReadout": HEAD,
}


def entries_by_name(model: nn.Module) -> dict[str, dict[int, str]]:
    """Returns the `ENTRIES` of all modules of a model, {parameter name: {dimension: kind}}.

    Subclasses inherit the entries of their base classes.
    """
    entries = {}
    for prefix, module in model.named_modules():
        for base in type(module).__mro__:
            for name, kind, dim in ENTRIES.get(base.__name__, ()):
                entries.setdefault(f"{prefix}.{name}".removeprefix("."), {})[dim] = kind
    return entries


def take_parameters(model: nn.Module, checkpoint: Mapping[str, Any], origin: Origin) -> None:
    """Copies parameters from a checkpoint into a model, and logs which ones.

    A parameter is copied if the checkpoint has a parameter with the same name and shape. In
    dimensions whose entries have names, the sizes may differ: the entries whose names occur in both
    the checkpoint and `origin` are copied, and the other entries keep their initial values.
    `ENTRIES` lists these dimensions, and the parameters that are not copied.

    Args:
        model: the model, whose parameters this function modifies.
        checkpoint: the entries of a checkpoint, which can be from a run on different tables.
        origin: the origin of the model, with the names of its nodes, relations and so on.

    Raises:
        UserError: no parameter can be copied.
    """
    kinds_left = {"fitted"}
    if doses_of_effects(checkpoint.get("basis")) != doses_of_effects(origin.basis):
        kinds_left.add("effects")
    entries_of = entries_by_name(model)
    taken = []
    left = []
    for name, parameter in model.named_parameters():
        saved = checkpoint["model"].get(name)
        kinds = entries_of.get(name, {})
        names = {dim: kind for dim, kind in kinds.items() if hasattr(origin, kind)}
        stays = saved is None or bool(kinds_left & set(kinds.values()))
        if stays or not same_but_for(names, parameter, saved):
            left.append(name)
            continue
        counts = copy_entries(names, parameter.data, saved, origin, checkpoint)
        taken.append(" of ".join([name, *counts]))
    if not taken:
        raise UserError(
            f"run.init: {checkpoint['file']} has no parameter with a matching name and shape: "
            "use the model.* options of that run"
        )
    names_taken = ", ".join(taken)
    names_left = ", ".join(left)
    log.info(f"init      {checkpoint['file']}: copied {names_taken}; not copied: {names_left}")


def same_but_for(dims: Collection[int], parameter: Tensor, saved: Tensor) -> bool:
    """Returns whether two parameters have the same shape, ignoring the sizes of `dims`."""
    if parameter.dim() != saved.dim():
        return False
    sizes = enumerate(zip(parameter.shape, saved.shape, strict=True))
    return all(ours == theirs or dim in dims for dim, (ours, theirs) in sizes)


def copy_entries(
    kinds: Mapping[int, str],
    parameter: Tensor,
    saved: Tensor,
    origin: Origin,
    checkpoint: Mapping[str, Any],
) -> list[str]:
    """Copies the entries of a parameter whose names also occur in the checkpoint.

    Args:
        kinds: maps each dimension whose entries have names to their kind, such as "nodes".
        parameter: the parameter to modify.
        saved: the parameter of the checkpoint.
        origin: has the names of the entries of `parameter`.
        checkpoint: has the names of the entries of `saved`.

    Returns:
        For each dimension with names, a text for the log, such as "20 of 30 nodes".
    """
    ours = []  # for each dimension, the positions of the entries in `parameter`
    theirs = []  # for each dimension, the positions of the same entries in `saved`
    counts = []
    for dim, size in enumerate(parameter.shape):
        places = saved_places = np.arange(size)
        if dim in kinds:
            kind = kinds[dim]
            names = getattr(origin, kind)
            saved_names = checkpoint.get(kind, [])
            shared, places, saved_places = np.intersect1d(names, saved_names, return_indices=True)
            of_all = counted(len(names), kind.removesuffix("s"))
            counts.append(f"{len(shared):,} of {of_all}")
        ours.append(places)
        theirs.append(saved_places)
    parameter[np.ix_(*ours)] = saved[np.ix_(*theirs)].to(parameter)
    return counts


def doses_of_effects(basis: Tensor | None) -> list[list[bool]]:
    """Returns, for each effect of a node, which of the three `mask.doses` its dose depends on.

    Args:
        basis: the basis of the effects, [3, K], or None for a checkpoint without a basis.
    """
    return [] if basis is None else (basis != 0).T.tolist()
