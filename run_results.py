"""Files of a run for later use: graph.pt for predictions, and the test results, test.tsv.

graph.pt contains the fields `OF_GRAPH` of `Tables`, the hash of these fields as `graph`, and the
`training_range` as `trained`. test.tsv contains the scores of the test rows, and the predictions of
the model and the rivals.

In shapes, N is the number of nodes, n is the number of rows, and T is the number of targets.
"""

import functools
import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_cells import open_table, read_rows
from data_tables import OF_GRAPH, Tables
from errors import DataError, UserError
from run_checkpoint import explain_write_errors, save_atomically
from run_folder import RunFolder

WRITE_AGAIN = "repeat the command of the run to write the file again"
OF_NODES = ("genes", "unseen", "unseen_genes")  # the first columns of test.tsv
OUTPUT = "prediction_"  # prefix of the columns of all predictions except `prediction`


# ---- graph.pt ------------------------------------------------------------------------------------
def write_graph(folder: RunFolder, tables: Tables) -> None:
    """Writes graph.pt to a run's folder; raises `UserError` on all ranks if this fails."""
    path = folder.path / "graph.pt"
    with folder.ddp.sync_errors(), explain_write_errors(path, UserError):
        if folder.ddp.rank == 0:
            content = {"graph": folder.origin.graph, "trained": training_range(tables)}
            save_atomically(path, {**content, **fields_of_graph(tables)})


def fields_of_graph(tables: Tables) -> dict[str, Any]:
    """Returns the fields `OF_GRAPH` of tables, with edges in smaller dtypes to save memory."""
    fields = {name: getattr(tables, name) for name in OF_GRAPH}
    fields["edge_index"] = tables.edge_index.int()
    dtype = torch.uint8 if len(tables.relations) < 256 else torch.int
    fields["edge_type"] = tables.edge_type.to(dtype)
    if (tables.edge_weight == 1).all():
        fields["edge_weight"] = None
    return fields


def training_range(tables: Tables) -> dict[str, Any]:
    """Returns the range of the training rows that have a score. Predictions outside it extrapolate.

    - `seen`: whether a training row perturbs each node, bool [N].
    - `lowest` and `highest`: the range of the levels. It includes 1, the level of intact nodes.
    - `largest`: the number of nodes in the largest set.
    - `sets`: the distinct codes of the sets of nodes, from `named_sets`, long [sets].
    """
    is_trained = tables.is_in("train") & ~tables.y.isnan().all(dim=1)
    level = tables.level[is_trained[tables.sample()]]
    level = torch.cat([level.new_ones(1), level])
    size = tables.perturbed_ptr.diff() * is_trained
    trained = {"lowest": level.min().item(), "highest": level.max().item()}
    trained["sets"] = named_sets(tables)[is_trained].unique()
    return {**trained, "largest": size.max().item(), "seen": tables.is_seen().any(dim=1)}


def named_sets(tables: Tables) -> Tensor:
    """Returns a 64-bit hash of the names of each row's nodes, long [n]; it ignores levels.

    Rows with the same names have the same hash, also in different tables.
    """
    return tables.set_code(name_codes(tuple(tables.genes))[tables.perturbed])


@functools.cache
def name_codes(names: tuple[str, ...]) -> Tensor:
    """Returns a 64-bit hash of each name, long [N]."""
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.long)


# ---- test.tsv ------------------------------------------------------------------------------------
def result_lines(
    tables: Tables, predictions: dict[str, Tensor], rivals: dict[str, Tensor]
) -> Iterator[str]:
    """Yields the lines of test.tsv: the header, and one line for each test row.

    The first columns are:

    - the nodes of the row,
    - the number of unseen nodes, or one number for each target if these numbers differ,
    - the names of the unseen nodes,
    - the weight or the `sd` of the row, if the table has such a column.

    For each target, the next columns are:

    - `<target>`: the score, empty if it is missing,
    - `<target>_prediction`: the prediction of the score,
    - `<target>_prediction_<name>`: the other predictions of the loss,
    - `<target>_<rival>`: the predictions of the rivals.

    Args:
        tables: the tables of the run.
        predictions: the predictions of the test rows by name, [n, T] each. The first name is
            `prediction`.
        rivals: the predictions of the rivals for the test rows by name, [n, T] each.
    """
    rows = tables.rows("test")
    of_targets = [tables.y[rows], *predictions.values(), *rivals.values()]
    numbers = torch.stack(of_targets, dim=2).flatten(start_dim=1)
    names = [name if name == "prediction" else OUTPUT + name for name in predictions]
    suffixes = ["", *(f"_{name}" for name in [*names, *rivals])]
    header = [*OF_NODES]
    name = "weight" if tables.sd is None else "sd"
    of_rows = getattr(tables, name)
    if of_rows is not None:
        header.append(name)
        numbers = torch.cat([of_rows[rows].unsqueeze(1), numbers], dim=1)
    header += [target + suffix for target in tables.targets for suffix in suffixes]
    yield "\t".join(header) + "\n"
    yield from table_lines(row_labels(tables, "test"), numbers)


def read_results(path: Path) -> dict[str, Any]:
    """Returns the content of a test.tsv as the fields of `analyse_results.Results`.

    Raises `DataError` if the file cannot be read, or if `result_lines` does not write such a table.
    """
    with open_table(str(path)) as file:
        header = file.readline().rstrip("\n").split("\t")
    of_rows, targets, kinds = names_in_header(path, header)
    # Two columns can have the same name, such as s_prediction for the scores s and s_prediction.
    columns = [*OF_NODES, *(f"cell {number}" for number in range(4, len(header) + 1))]
    fields = {"genes": [], "unseen_genes": [], "targets": targets}
    unseen = []
    numbers = []
    for rows in read_rows(str(path), columns):
        for row, cell in enumerate(rows.cells["unseen"]):
            counts = cell.split(",")
            if len(counts) not in (1, len(targets)) or not all(map(str.isdecimal, counts)):
                problem = f"must be a number, or a number for each score: {WRITE_AGAIN}"
                raise rows.error(row, "unseen", problem)
            unseen.append(torch.tensor(list(map(int, counts))).expand(len(targets)))
        fields["genes"] += rows.cells["genes"]
        fields["unseen_genes"] += rows.cells["unseen_genes"]
        numbers.append(rows.table(columns[3:], f": {WRITE_AGAIN}"))
    fields["unseen"] = torch.stack(unseen)
    by_row, by_target = torch.cat(numbers).tensor_split([len(of_rows)], dim=1)
    fields |= zip(of_rows, by_row.unbind(dim=1), strict=True)
    fields["y"], *of_kinds = by_target.unflatten(1, (-1, len(kinds) + 1)).unbind(dim=2)
    fields["predictions"] = {}
    fields["rivals"] = {}
    for kind, column in zip(kinds, of_kinds, strict=True):
        if f"{kind}_".startswith(OUTPUT):
            fields["predictions"][kind.removeprefix(OUTPUT)] = column
        else:
            fields["rivals"][kind] = column
    return fields


def names_in_header(path: Path, header: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns the names in the header of a test.tsv, as three lists.

    They are the column `weight` or `sd` if there is one, the targets, and the names of the columns
    that each target has after its score. Raises `DataError` if `result_lines` does not write such a
    header.
    """
    targets = []
    for name, next_name in pairwise(header[3:]):
        if next_name == f"{name}_prediction":
            targets.append(name)
    first = header.index(targets[0], 3) if targets else len(header)
    width = (len(header) - first) // max(1, len(targets))  # number of columns of each target
    kinds = [name.removeprefix(f"{targets[0]}_") for name in header[first + 1 : first + width]]
    of_rows = header[3:first]
    expected = [*OF_NODES, *of_rows]
    for target in targets:
        expected += [target, *(f"{target}_{kind}" for kind in kinds)]
    if not targets or header != expected or of_rows not in ([], ["weight"], ["sd"]):
        raise DataError(f"{path}:1: the columns are not the columns of a test.tsv: {WRITE_AGAIN}")
    return of_rows, targets, kinds


def row_labels(tables: Tables, split: str) -> Iterator[str]:
    """Yields the first three cells of each row of a split, as `result_lines` describes them."""
    is_in_split = tables.is_in(split)[tables.sample()]
    perturbed = tables.perturbed[is_in_split]
    names = list(tables.names(perturbed, tables.level[is_in_split]))
    present = ~tables.y[tables.sample()[is_in_split]].isnan()
    # A node is listed if it is unseen for at least one score of the row.
    is_unseen = (present & ~tables.is_seen()[perturbed]).any(dim=1)
    unseen = tables.unseen(split)  # [rows, T]
    is_equal = (unseen == unseen[:, :1]).all(dim=1).tolist()
    counts = tables.perturbed_ptr.diff()[tables.rows(split)].tolist()
    end = 0
    for row, count in enumerate(counts):
        start = end
        end += count
        numbers = unseen[row, :1] if is_equal[row] else unseen[row]
        unseen_nodes = perturbed[start:end][is_unseen[start:end]].tolist()
        unseen_genes = [tables.genes[node] for node in unseen_nodes]
        cells = [names[start:end], map(str, numbers.tolist()), unseen_genes]
        yield "\t".join(map(",".join, cells))


def table_lines(labels: Iterator[str], numbers: Tensor, number_format: str = "%r") -> Iterator[str]:
    """Yields the lines of a table without its header.

    Args:
        labels: the first cells of each row, joined by tabs.
        numbers: the further cells of each row, [n, C]. Cells that are nan are left empty.
        number_format: the default writes as many digits as are needed to read the same number
            again.
    """
    template = f"\t{number_format}" * numbers.size(1) + "\n"
    # Blocks of rows save memory, because a list needs four times the memory of a tensor.
    for some_numbers in numbers.split(100):
        for row in some_numbers.tolist():
            yield next(labels) + (template % tuple(row)).replace("\tnan", "\t")
