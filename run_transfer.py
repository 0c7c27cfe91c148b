"""Initialises parameters from a run on other tables, by names of nodes, relations and so on."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from errors import UserError
from run_checkpoint import Origin

log = logging.getLogger("run_transfer")
# For each class, its parameters with an entry for each node, relation, feature, output or effect of
# a node (here "responses"), and the dimension of the entries. Parameters that are fitted to the
# tables before training are not taken.
HEAD = (("head.2.weight", "outputs", 0), ("head.2.bias", "outputs", 0))
ENTRIES = {
    "Encoder": (
        ("embedding", "nodes", 0),
        ("identity", "nodes", 0),
        ("project.weight", "features", 1),
    ),
    "KnockoutConv": (("gate", "relations", 0),),
    "BaselineReadout": (("slope", "fitted", 0), ("effect", "fitted", 0), ("weights", "fitted", 0)),
    "LocalReadout": (
        ("embed.weight", "responses", 0),
        ("embed.bias", "responses", 0),
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
    """Returns the `ENTRIES` of a model's modules: {parameter name: {dimension: kind}}."""
    entries = {}
    for prefix, module in model.named_modules():
        for base in type(module).__mro__:
            for name, kind, dim in ENTRIES.get(base.__name__, ()):
                entries.setdefault(f"{prefix}.{name}".removeprefix("."), {})[dim] = kind
    return entries


def take_parameters(model: nn.Module, checkpoint: Mapping[str, Any], origin: Origin) -> None:
    """Copies the parameters of a checkpoint of any tables that match by name and shape.

    `ENTRIES` are the dimensions with an entry for each node, relation, feature, output or feature
    of pairs. In these, the entries whose names are in both the checkpoint and `origin` are copied.
    Parameters with entries for the effects of a node are copied if both have the same kinds of
    effects, such as losses and gains. Parameters that are fitted to the tables before training are
    not copied. Raises `UserError` if there is nothing to copy.
    """
    kinds_left = {"fitted"}
    if responses_of(checkpoint.get("basis")) != responses_of(origin.basis):
        kinds_left.add("responses")
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
    note_lacking(checkpoint, origin)


def same_but_for(dims: Collection[int], parameter: Tensor, saved: Tensor) -> bool:
    """Returns whether two parameters have the same shape except in some dimensions."""
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
    """Copies the entries whose names are in both parameters, in all dimensions with names.

    `kinds` maps these dimensions to the kind of their names. Returns how many names are shared in
    each.
    """
    ours = []  # positions in each dimension
    theirs = []
    counts = []
    for dim, size in enumerate(parameter.shape):
        places = saved_places = np.arange(size)
        if dim in kinds:
            names = getattr(origin, kinds[dim])
            saved_names = checkpoint.get(kinds[dim], [])
            shared, places, saved_places = np.intersect1d(names, saved_names, return_indices=True)
            counts.append(f"{len(shared):,} of {len(names):,} {kinds[dim]}")
        ours.append(places)
        theirs.append(saved_places)
    parameter[np.ix_(*ours)] = saved[np.ix_(*theirs)].to(parameter)
    return counts


def note_lacking(checkpoint: Mapping[str, Any], origin: Origin) -> None:
    """Logs the relations, features and targets of `origin` that a checkpoint does not have."""
    for kind in ("relations", "features", "targets"):
        saved_names = checkpoint.get(kind, [])
        lacking = [name for name in getattr(origin, kind) if name not in saved_names]
        if lacking:
            first = ", ".join(lacking[:10])
            log.warning(
                f"note      {checkpoint['file']} does not have the {kind} {first}: their "
                "parameters keep their initial values"
            )


def responses_of(basis: Tensor | None) -> list[list[bool]]:
    """Returns which of the three `mask.doses` each effect of a node depends on."""
    return [] if basis is None else (basis != 0).T.tolist()
