"""Parameters from a run on other tables, by the names of nodes, relations, features, outputs."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

log = logging.getLogger("run_transfer")


def entries_by_name(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Returns of what a parameter has entries, and in which dimension, by `ENTRIES` of modules."""
    entries = {}
    for prefix, module in model.named_modules():
        for name, kind, dim in getattr(module, "ENTRIES", ()):
            entries[f"{prefix}.{name}".removeprefix(".")] = (kind, dim)
    return entries


def take_parameters(
    model: nn.Module, checkpoint: Mapping[str, Any], origin: Mapping[str, Any]
) -> None:
    """Copies the parameters of a checkpoint, on any tables, that match by name and shape.

    The `ENTRIES` of the model's modules say which of them have an entry for each node, relation,
    feature or output. Of these, the entries are copied whose names, in `origin`, both have. Those
    with entries for the responses of a node are copied if both have the same responses, such as to
    losses and to gains. Those that are fitted to the tables before training stay.
    """
    has_same_responses = responses_of(checkpoint) == responses_of(origin)
    parameters = dict(model.named_parameters())
    entries_of = entries_by_name(model)
    taken = []
    left = []
    for name, parameter in parameters.items():
        saved = checkpoint["model"].get(name)
        kind, dim = entries_of.get(name, ("", 0))
        if saved is None or kind == "fitted":
            left.append(name)
            continue
        if kind == "responses" and not has_same_responses:
            left.append(name)
            continue
        if kind in origin and parameter.size(dim) == len(origin[kind]):
            names = origin[kind]
            saved_names = checkpoint.get(kind, [])
            shared, entries, saved_entries = np.intersect1d(names, saved_names, return_indices=True)
            ours = parameter.data.movedim(dim, 0)  # a view
            theirs = saved.movedim(dim, 0)
            if ours.shape[1:] == theirs.shape[1:]:
                ours[entries] = theirs[saved_entries].to(parameter)
                taken.append(f"{name} of {len(shared):,} of {len(names):,} {kind}")
                continue
        elif saved.shape == parameter.shape:
            parameter.data.copy_(saved)
            taken.append(name)
            continue
        left.append(name)
    names_taken = ", ".join(taken)
    names_left = ", ".join(left)
    log.info(f"init      from {checkpoint['file']}: {names_taken}; not from it: {names_left}")
    note_lacking(checkpoint, origin)


def note_lacking(checkpoint: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
    """Notes the relations, features and targets of `origin` that a checkpoint has not."""
    for kind in ("relations", "features", "targets"):
        saved_names = checkpoint.get(kind, [])
        lacking = [name for name in origin[kind] if name not in saved_names]
        if lacking:
            first = ", ".join(lacking[:10])
            log.warning(f"note      {checkpoint['file']} has no {kind} {first}: they start anew")


def responses_of(origin: Mapping[str, Any]) -> list[list[bool]]:
    """Returns which of the three `mask.doses` each response of a node is to, given an origin."""
    if "basis" not in origin:
        return []
    return (origin["basis"] != 0).T.tolist()
