"""The sets of knock-outs that are to be predicted: the rows of a table, or all of some size.

They are read, or listed, some at once, so that millions take little memory.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from data_cells import Rows, read_header, read_rows, split_level
from data_tables import Tables, checked_sets, pack
from errors import UserError
from parts import optional

# What makes a row an extrapolation.
BEYOND = (
    "nodes that no training row knocks out",
    "levels outside those of training",
    "more nodes than any training row",
)
SET_SIZES = {"all-singles": 1, "all-pairs": 2}
MOST = 16_384  # rows at once


@dataclass
class Chunk:
    """Some consecutive rows of a table to predict."""

    sets: Sequence[str]  # their cells of the column `genes`
    is_known: Tensor  # which of them have only nodes of the graph, bool [n]
    samples: Tables  # these, on the graph
    unknown: list[str]  # names that are no nodes of the graph, each once


@dataclass
class Survey:
    """What a table to predict has."""

    num_rows: int
    num_known: int  # rows with nodes of the graph only
    unknown: list[str]  # names that are no nodes of the graph, each once
    notes: list[str]  # sentences for the log on how the file was read


def survey_sets(
    path: str, tables: Tables, first: int = 0, last: int = sys.maxsize, has_bar: bool = False
) -> Survey:
    """Reads all that `read_sets` will, so that no error comes after hours of predictions.

    A bar, if asked for, shows how much is read. Raises `DataError`, and `UserError` if there are no
    rows from `first` to `last`.
    """
    size, _ = screen(path)
    if size:
        num_rows = math.comb(len(screened_nodes(tables)), size)
        num_rows = min(num_rows, last) - first
        survey = Survey(num_rows, num_rows, [], [])
    else:
        survey = Survey(0, 0, [], [])
        unknown = {}  # names, in their order
        for chunk in read_sets(path, tables, first, last, MOST, survey.notes, has_bar):
            survey.num_rows += len(chunk.sets)
            survey.num_known += len(chunk.samples.y)
            unknown |= dict.fromkeys(chunk.unknown)
        survey.unknown = list(unknown)
    if survey.num_rows < 1:
        raise UserError(f"{path} has no row {first}: its rows are counted from 0")
    return survey


def read_sets(
    path: str,
    tables: Tables,
    first: int = 0,
    last: int = sys.maxsize,
    most: int = MOST,
    notes: list[str] | None = None,
    has_bar: bool = False,
) -> Iterator[Chunk]:
    """Yields the rows of a table from `first` to `last` - 1, up to `most` at once.

    They are counted from 0. The graph is that of `tables`. Adds to `notes` how the file was read.
    Raises `DataError`.
    """
    size, level = screen(path)
    if size:
        yield from all_sets(tables, size, level, first, last, most)
        return
    header = read_header(path, [] if notes is None else notes, ("genes",))
    end = 0  # of the rows so far
    for rows in read_rows(path, header, skip_blank=False, has_bar=has_bar):
        begin = end
        end += len(rows.lines)
        start = max(first, begin)
        while start < min(last, end):
            stop = min(start + most, last, end)
            yield chunk_of(rows.select(start - begin, stop - begin), tables)
            start = stop
        if end >= last:
            return


def screen(path: str) -> tuple[int, float]:
    """Returns the number of nodes in each set of a screen, 0 for a table, and their level.

    Raises `UserError` for a wrong level.
    """
    kind, _, _ = path.partition("=")
    if kind not in SET_SIZES:
        return 0, 0.0
    _, level = split_level(path, node_names=())
    if math.isnan(level):
        raise UserError(f"{path} has no level from 0 to 10,000")
    return SET_SIZES[kind], level


def screened_nodes(tables: Tables) -> Sequence[int]:
    """Returns the nodes that a screen knocks out."""
    return range(len(tables.genes))


def chunk_of(rows: Rows, tables: Tables) -> Chunk:
    """Returns rows of a table to predict, with `tables` as their graph.

    Whatever else a batch is made of must be read here, too. Raises `DataError`.
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
    """Yields all sets of `size` nodes, each at the level, from `first` to `last` - 1."""
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
    """Returns whether samples are `BEYOND` a `training_range` in each way, bool [3, n]."""
    level = samples.level
    is_outside = (level < trained["lowest"]) | (level > trained["highest"])
    of_nodes = torch.stack([~trained["seen"][samples.perturbed], is_outside])
    of_samples = scatter(of_nodes.int(), samples.sample(), dim=1, dim_size=len(samples.y)) > 0
    is_larger = samples.perturbed_ptr.diff() > trained["largest"]
    return torch.cat([of_samples, is_larger.unsqueeze(0)])


def make_samples(tables: Tables, row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> Tables:
    """Returns rows without scores on the graph of `tables`, given those of each perturbed node."""
    y = tables.y.new_full((num_rows, len(tables.targets)), math.nan)
    perturbations = pack(row, node, level, num_rows)
    return replace(tables, **perturbations, y=y, split=None, weight=None, sd=None)


def unknown_nodes(names: Sequence[str], tables: Tables) -> str:
    """Returns a sentence that names up to ten nodes that the graph does not have."""
    named = f"{', '.join(names[:10]):.500}"
    data_notes = optional("data_notes")
    if data_notes:
        named = data_notes.some_names(names, data_notes.meanings(names, tables.genes))
    return f"{len(names)} nodes are not in the graph: {named}"
