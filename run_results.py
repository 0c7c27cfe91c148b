"""The results of a run, test.tsv: scores, predictions and those of rivals, of the test rows.

Shapes: n rows of T targets.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from data_tables import Tables

NUMBER = ".12g"  # the format of all numbers in tables, in which 1e6 + 1e-3 is not 1e6
OUTPUT = "prediction_"  # begins the suffix of a column of what is predicted beside the score


def result_lines(
    tables: Tables, predictions: dict[str, Tensor], rivals: dict[str, Tensor]
) -> Iterator[str]:
    """Yields the lines of test.tsv: the header, and one for each test row.

    A row has its nodes; the number of those that are unseen, for each target if these numbers
    differ; and their names. Then follow the weight or the `sd` if the table has them, and for each
    target score, prediction, what else is predicted, as `<target>_prediction_<name>`, and the
    predictions of the rivals, as `<target>_<rival>`. A missing score is an empty cell. Predictions
    are [n, T] each by name, of the test rows; `prediction` comes first.
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
    is_unseen = (present & ~tables.is_seen()[perturbed]).any(dim=1)  # for a score of the row
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
    """Yields a line for each row of numbers [n, C]: its label, and a cell each, empty for nan."""
    template = f"\t%{NUMBER}" * numbers.size(1) + "\n"
    for some_numbers in numbers.split(100):  # as lists, they take four times the memory
        for row in some_numbers.tolist():
            yield next(labels) + (template % tuple(row)).replace("\tnan", "\t")
