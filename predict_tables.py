"""Inputs and output of predictions: the graph of a run, the sets to predict, and the output table.

A prediction only needs a checkpoint and the file graph.pt of its run; see run_results.py. The sets
of knock-outs to predict are the rows of a table, or all sets of one or two nodes. They are read or
generated in chunks, so that millions of sets need little memory.

Shapes: N nodes, n rows.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from data_cells import Rows, read_header, read_rows, split_level
from data_tables import Tables, checked_sets, pack
from ddp_setup import Distributed
from errors import UserError, counted
from parts import optional
from run_checkpoint import atomic_file, explain_write_errors, load_file
from run_results import named_sets

# If a row has one of these, its prediction is an extrapolation.
BEYOND = (
    "nodes that no training row knocks out",
    "levels outside the range of training",
    "more nodes than any training row",
)
SET_SIZES = {"all-singles": 1, "all-pairs": 2}
MOST = 16_384  # largest number of rows in a chunk


# ---- The graph of a run --------------------------------------------------------------------------
def is_trained_on(samples: Tables, sorted_sets: Tensor) -> Tensor:
    """Returns whether the set of each sample is among trained sets, bool [n].

    `sorted_sets` has their `named_sets` in ascending order. Samples without nodes do not count.
    """
    sets = named_sets(samples)
    place = torch.searchsorted(sorted_sets, sets)
    # The hash of a set without nodes is 0.
    found = torch.cat([sorted_sets, sorted_sets.new_zeros(1)])[place]
    return (found == sets) & (samples.perturbed_ptr.diff() > 0)


def read_graph(checkpoint: Path) -> dict[str, Any]:
    """Returns the content of graph.pt, next to a checkpoint or in the folder above.

    Raises `UserError` if it is missing or damaged.
    """
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        path = folder / "graph.pt"
        if path.exists():
            try:
                return load_file(path, mmap=True)
            except Exception as error:  # reading a damaged file can raise any exception
                raise UserError(
                    f"cannot read {path} ({type(error).__name__}): copy it again from the run "
                    "folder"
                ) from None
    raise UserError(
        f"there is no graph.pt next to {checkpoint}: copy it from the run folder, or repeat the "
        "command of the run, which writes it again"
    )


def notes_on_leaks(file: str, tables: Tables) -> Iterator[str]:
    """Yields a warning if a checkpoint was trained on test rows of `tables`, or if this is unknown.

    A test row counts if the checkpoint was trained on its set of nodes, but no training row of
    `tables` has this set. It also counts if the checkpoint was trained on one of its nodes that is
    unseen in `tables`. `file` is the path of the checkpoint.
    """
    try:
        graph = read_graph(Path(file))
        trained_sets = graph["trained"]["sets"]
    except (UserError, KeyError):  # graph.pt is missing, damaged or from an earlier version
        yield (
            f"{file}: cannot check whether it was trained on test rows, because its graph.pt is "
            "missing, damaged or from an earlier version"
        )
        return
    sets = named_sets(tables)
    is_trained_here = torch.isin(sets, sets[tables.rows("train")])
    has_leak = torch.isin(sets, trained_sets) & ~is_trained_here & (tables.perturbed_ptr.diff() > 0)
    trained_names = {graph["genes"][node] for node in graph["trained"]["seen"].nonzero()}
    was_trained = torch.tensor([name in trained_names for name in tables.genes])
    is_leaked = was_trained & ~tables.is_seen().any(dim=1)
    has_leak[tables.sample()[is_leaked[tables.perturbed]]] = True
    is_test = tables.is_in("test")
    num_leaked = (has_leak & is_test).sum()
    if num_leaked > 0:
        yield (
            f"{file} was trained on sets or nodes of {num_leaked:,} of {is_test.sum():,} test "
            "rows, which are therefore not held out"
        )


def tables_of_graph(fields: dict[str, Any]) -> Tables:
    """Returns tables without samples, given `fields_of_graph`."""
    empty = torch.empty(0, dtype=torch.long)
    no_samples = pack(empty, empty, empty.double(), 0)
    y = torch.empty(0, len(fields["targets"]), dtype=torch.float64)
    tables = Tables(**fields, **no_samples, y=y, split=empty.to(torch.int8))
    tables.edge_index = tables.edge_index.long()
    tables.edge_type = tables.edge_type.long()
    return tables


# ---- Sets to predict -----------------------------------------------------------------------------
@dataclass
class Chunk:
    """n consecutive rows of a table to predict."""

    sets: Sequence[str]  # the rows' cells in the column `genes`
    is_known: Tensor  # whether all nodes of each row are in the graph, bool [n]
    samples: Tables  # the known rows, with the graph
    unknown: list[str]  # distinct names that are not nodes of the graph


@dataclass
class Survey:
    """The number of rows of a table to predict, and its problems."""

    num_rows: int
    num_known: int  # number of rows whose nodes are all in the graph
    unknown: list[str]  # distinct names that are not nodes of the graph


def survey_sets(path: str, tables: Tables, first: int = 0, last: int = sys.maxsize) -> Survey:
    """Reads all rows that `read_sets` will read, so that errors occur before the first prediction.

    Raises `DataError` if the table is wrong, and `UserError` if it does not have a row `first`.
    """
    size, _ = screen(path)
    if size:
        num_rows = math.comb(len(screened_nodes(tables)), size)
        num_rows = min(num_rows, last) - first
        survey = Survey(num_rows, num_rows, [])
    else:
        survey = Survey(0, 0, [])
        unknown = {}  # a dict, because its keys are distinct and keep their order
        for chunk in read_sets(path, tables, first, last):
            survey.num_rows += len(chunk.sets)
            survey.num_known += len(chunk.samples.y)
            unknown |= dict.fromkeys(chunk.unknown)
        survey.unknown = list(unknown)
    if survey.num_rows < 1:
        raise UserError(f"{path} has no row {first}: rows are counted from 0")
    return survey


def read_sets(
    path: str,
    tables: Tables,
    first: int = 0,
    last: int = sys.maxsize,
    most: int = MOST,
) -> Iterator[Chunk]:
    """Yields the rows of a table from `first` to `last` - 1 in chunks. Raises `DataError`.

    Args:
        path: the table, or `all-singles` or `all-pairs` with an optional level.
        tables: has the graph.
        first, last: the first row, counted from 0, and the row after the last.
        most: largest number of rows in a chunk.
    """
    size, level = screen(path)
    if size:
        yield from all_sets(tables, size, level, first, last, most)
        return
    header = read_header(path, ("genes",))
    end = 0  # number of rows so far
    for rows in read_rows(path, header, skip_blank=False):
        begin = end
        end += len(rows.lines)
        for start in range(max(first, begin), min(last, end), most):
            stop = min(start + most, last, end)
            part = slice(start - begin, stop - begin)
            cells = {name: column[part] for name, column in rows.cells.items()}
            yield chunk_of(replace(rows, lines=rows.lines[part], cells=cells), tables)
        if end >= last:
            return


def screen(path: str) -> tuple[int, float]:
    """Returns the size and the level of all sets to predict, such as 2 and 0.3 for `all-pairs=0.3`.

    The size is 0 if `path` is a table. Raises `UserError` if the level is invalid.
    """
    kind, _, _ = path.partition("=")
    if kind not in SET_SIZES:
        return 0, 0.0
    _, level = split_level(path)
    if math.isnan(level):
        raise UserError(f"{path}: the level must be a number from 0 to 10,000")
    return SET_SIZES[kind], level


def screened_nodes(tables: Tables) -> Sequence[int]:
    """Returns the nodes that `all-singles` and `all-pairs` knock out."""
    return range(len(tables.genes))


def chunk_of(rows: Rows, tables: Tables) -> Chunk:
    """Returns rows of a table as a `Chunk`, with the graph of `tables`; raises `DataError`.

    If your batches contain further columns of a table, read these columns here, too.
    """
    node_number = {gene: node for node, gene in enumerate(tables.genes)}
    row, name, names, level = checked_sets(rows, node_number)
    numbers = [node_number.get(name, -1) for name in names]
    node = torch.tensor(numbers, dtype=torch.long)[name]
    is_known = torch.ones(len(rows.lines), dtype=torch.bool)
    is_known[row[node < 0]] = False
    num_known = int(is_known.sum())
    number_of_row = is_known.cumsum(0) - 1
    chosen = is_known[row]
    samples = make_samples(
        tables, number_of_row[row[chosen]], node[chosen], level[chosen], num_known
    )
    unknown = [name for name in names if name not in node_number]
    return Chunk(rows.cells["genes"], is_known, samples, unknown)


def all_sets(
    tables: Tables, size: int, level: float, first: int, last: int, most: int
) -> Iterator[Chunk]:
    """Yields all sets of `size` nodes at a level in chunks of at most `most` sets.

    It starts with set number `first` and ends before set number `last`.
    """
    num_nodes = len(tables.genes)
    level_of_each = torch.full((num_nodes,), level, dtype=torch.float64)
    names = list(tables.names(torch.arange(num_nodes), level_of_each))
    sets = islice(combinations(screened_nodes(tables), size), first, last)
    while some_sets := list(islice(sets, most)):
        nodes = torch.tensor(some_sets)
        row = torch.arange(len(nodes)).repeat_interleave(size)
        levels = torch.full((nodes.numel(),), level, dtype=torch.float64)
        samples = make_samples(tables, row, nodes.flatten(), levels, len(nodes))
        cells = [",".join(names[node] for node in one_set) for one_set in some_sets]
        yield Chunk(cells, torch.ones(len(nodes), dtype=torch.bool), samples, [])


def is_beyond(samples: Tables, trained: dict[str, Any]) -> Tensor:
    """Returns whether n samples are outside a `training_range`, for each reason in `BEYOND`.

    The result is bool [3, n].
    """
    level = samples.level
    is_outside = (level < trained["lowest"]) | (level > trained["highest"])
    of_nodes = torch.stack([~trained["seen"][samples.perturbed], is_outside])
    of_samples = scatter(of_nodes.int(), samples.sample(), dim=1, dim_size=len(samples.y)) > 0
    is_larger = samples.perturbed_ptr.diff() > trained["largest"]
    return torch.cat([of_samples, is_larger.unsqueeze(0)])


def make_samples(tables: Tables, row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> Tables:
    """Returns `num_rows` rows without scores, with the graph of `tables`.

    `row` is the row of each perturbed node, `node` is its index, and `level` is its level.
    """
    y = tables.y.new_full((num_rows, len(tables.targets)), math.nan)
    perturbations = pack(row, node, level, num_rows)
    return replace(tables, **perturbations, y=y, split=None, weight=None, sd=None)


def unknown_nodes(names: Sequence[str], tables: Tables) -> str:
    """Returns a message with the number of nodes that are not in the graph, and up to ten names."""
    named = f"{', '.join(names[:10]):.500}"
    data_notes = optional("data_notes")
    if data_notes:
        named = data_notes.some_names(names, data_notes.meanings(names, tables.genes))
    return f"the graph does not contain {counted(len(names), 'node')}: {named}"


# ---- The output table ----------------------------------------------------------------------------
@contextlib.contextmanager
def table_writer(path: Path, ddp: Distributed) -> Iterator[Callable[[Iterable[str]], None]]:
    """Yields a function that writes lines to a file. The lines must have line ends.

    The file only appears at `path` once the block ends without an error. All ranks enter the block
    and call the function, but only rank 0 writes. If the file cannot be written, all ranks raise
    `UserError`.
    """

    explain = partial(explain_write_errors, path, UserError, "change the working directory")

    def write(lines: Iterable[str]) -> None:
        with ddp.sync_errors(), explain():
            if ddp.rank == 0:
                file.writelines(line.encode() for line in lines)
                file.flush()  # without this, a full disk could be detected hours later

    # If the file cannot be written, closing it at the end of the block raises the error again.
    with explain(), contextlib.ExitStack() as files:
        with ddp.sync_errors(), explain():
            if ddp.rank == 0:
                file = files.enter_context(atomic_file(path, f"{path.name}.{os.getpid()}.partial"))
        yield write
        with ddp.sync_errors(), explain():
            files.close()
