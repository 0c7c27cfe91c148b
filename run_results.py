"""The results of a run, test.tsv: scores and predictions of the test rows, also of rivals.

Shapes: n rows of T targets.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from data_tables import Tables

NUMBER = ".12g"  # the format of all numbers in tables; with it, 1e6 + 1e-3 differs from 1e6
OUTPUT = "prediction_"  # prefix of the names of all predictions except `prediction`


def result_lines(
    tables: Tables, predictions: dict[str, Tensor], rivals: dict[str, Tensor]
) -> Iterator[str]:
    """Yields the lines of test.tsv: the header, and one line for each test row.

    A row begins with its nodes, the number of unseen nodes (for each target if these numbers
    differ) and the names of the unseen nodes. Then follow the weight or the `sd`, if the table has
    one. For each target, it has the score, the prediction, all other predictions as
    `<target>_prediction_<name>`, and the predictions of rivals as `<target>_<rival>`. A missing
    score is an empty cell. `predictions` and `rivals` are those of the test rows, by name, [n, T]
    each; `prediction` comes first.
    """
    rows = tables.rows("test")
    of_targets = [tables.y[rows], *predictions.values(), *rivals.values()]
    numbers = torch.stack(of_targets, dim=2).flatten(start_dim=1)
    names = [name if name == "prediction" else OUTPUT + name for name in predictions]
    suffixes = ["", *(f"_{name}" for name in [*names, *rivals])]
    header = ["genes", "unseen", "unseen_genes"]
    name = "weight" if tables.sd is None else "sd"
    of_rows = getattr(tables, name)
    if of_rows is not None:
        header.append(name)
        numbers = torch.cat([of_rows[rows].unsqueeze(1), numbers], dim=1)
    header += [target + suffix for target in tables.targets for suffix in suffixes]
    yield "\t".join(header) + "\n"
    yield from table_lines(row_labels(tables, "test"), numbers)


def row_labels(tables: Tables, split: str) -> Iterator[str]:
    """Yields the first three cells of each row of a split, as in `result_lines`."""
    is_in_split = tables.is_in(split)[tables.sample()]
    perturbed = tables.perturbed[is_in_split]
    genes = tables.names(perturbed, tables.level[is_in_split])
    present = ~tables.y[tables.sample()[is_in_split]].isnan()
    # Unseen for at least one score of the row.
    is_unseen = (present & ~tables.is_seen()[perturbed]).any(dim=1)
    names = []
    for node, is_named in zip(perturbed.tolist(), is_unseen.tolist(), strict=True):
        names.append(tables.genes[node] if is_named else "")
    unseen_genes = iter(names)
    unseen = tables.unseen(split)  # [rows, T]
    is_equal = (unseen == unseen[:, :1]).all(dim=1).tolist()
    counts = tables.perturbed_ptr.diff()[tables.rows(split)].tolist()
    for row, count in enumerate(counts):
        numbers = unseen[row, :1] if is_equal[row] else unseen[row]
        cells = [
            ",".join(islice(genes, count)),
            ",".join(map(str, numbers.tolist())),
            ",".join(filter(None, islice(unseen_genes, count))),
        ]
        yield "\t".join(cells)


def table_lines(labels: Iterator[str], numbers: Tensor) -> Iterator[str]:
    """Yields a line for each row of numbers [n, C]: its label, and one cell each, empty for nan."""
    template = f"\t%{NUMBER}" * numbers.size(1) + "\n"
    for some_numbers in numbers.split(100):  # in blocks, because lists take four times the memory
        for row in some_numbers.tolist():
            yield next(labels) + (template % tuple(row)).replace("\tnan", "\t")
