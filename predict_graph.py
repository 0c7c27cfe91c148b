"""The file graph.pt of a run: with a checkpoint, all that a prediction needs.

It has the fields of `Tables` that are `OF_GRAPH`, as `graph` their hash, and as `trained` the
`training_range`.
"""

from pathlib import Path
from typing import Any

import torch

from data_tables import OF_GRAPH, Tables
from errors import UserError
from run_checkpoint import explain_write_errors, save_atomically
from run_folder import RunFolder


def write_graph(folder: RunFolder, tables: Tables) -> None:
    """Writes the graph of a run's tables into its folder; raises `UserError` on all ranks."""
    path = folder.path / "graph.pt"
    with folder.ddp.sync_errors(), explain_write_errors(path, UserError):
        if folder.ddp.rank == 0:
            content = {"graph": folder.origin.graph, "trained": training_range(tables)}
            save_atomically(path, {**content, **fields_of_graph(tables)})


def fields_of_graph(tables: Tables) -> dict[str, Any]:
    """Returns the fields that are `OF_GRAPH`, the edges in a third of their bytes."""
    fields = {name: getattr(tables, name) for name in OF_GRAPH}
    fields["edge_index"] = tables.edge_index.int()
    dtype = torch.uint8 if len(tables.relations) < 256 else torch.int
    fields["edge_type"] = tables.edge_type.to(dtype)
    if (tables.edge_weight == 1).all():
        fields["edge_weight"] = None
    return fields


def training_range(tables: Tables) -> dict[str, Any]:
    """Returns the range of the training rows with a score; predictions beyond extrapolate.

    `seen`, bool [N], says which nodes they knock out, `lowest` and `highest` are the extreme
    levels, and `largest` is the number of nodes in the largest set. Level 1 is always among the
    levels: it is that of intact nodes.
    """
    is_trained = tables.is_in("train") & ~tables.y.isnan().all(dim=1)
    level = tables.level[is_trained[tables.sample()]]
    level = torch.cat([level.new_ones(1), level])
    size = tables.perturbed_ptr.diff() * is_trained
    trained = {"lowest": level.min().item(), "highest": level.max().item()}
    return {**trained, "largest": size.max().item(), "seen": tables.is_seen().any(dim=1)}


def read_graph(checkpoint: Path) -> dict[str, Any]:
    """Returns the graph.pt of a checkpoint's run folder, or beside it; raises `UserError`."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        path = folder / "graph.pt"
        if path.exists():
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # a damaged file fails in many ways
                raise UserError(f"{path} is not readable ({type(error).__name__})") from None
    raise UserError(
        f"no graph.pt beside {checkpoint}: copy it from the run folder; starting a run again "
        "writes it, too"
    )


def tables_of_graph(fields: dict[str, Any]) -> Tables:
    """Returns tables without samples, given `fields_of_graph`."""
    no_samples = {
        "perturbed": torch.empty(0, dtype=torch.long),
        "perturbed_ptr": torch.zeros(1, dtype=torch.long),
        "y": torch.empty(0, len(fields["targets"]), dtype=torch.float64),
        "split": torch.empty(0, dtype=torch.int8),
    }
    tables = Tables(**fields, **no_samples)
    tables.edge_index = tables.edge_index.long()
    tables.edge_type = tables.edge_type.long()
    return tables
