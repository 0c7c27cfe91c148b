"""Files to `Tables`: the graph, and the samples measured on it.

`read_edges`, `read_knockouts` and `read_features` read the three tables, which docs/tables.md
describes. All may be gzipped (`.gz`), and any cell in quotes.

Shapes: N nodes, E edges, each of F features, n samples of T scores.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.utils import coalesce, scatter, to_undirected

from data_cells import SPLITS, number_names, read_header, read_rows, stable_order
from data_names import is_date, meanings, note_on_unknown, some_names
from errors import DataError

OUTLYING = 0.25  # share of the variance, from which on a row is noted
FEWEST_SCORES = 50  # of fewer, one may well have such a share
FEW_SCORES = 20  # which are looked at one by one
MIXING = -0x61C8864680B583EB  # 2**64 over the golden ratio, as a signed number
# Fields that the fingerprint leaves out: what is said of the files, and what `weight` comes from.
OF_FILES = ("left_out", "notes", "feature_names", "sd")
# Fields of samples and their files: with a checkpoint, the others are all that a prediction needs.
OF_SAMPLES = ("perturbed", "perturbed_ptr", "level", "y", "split", "weight", "sd")
OF_SAMPLES += ("left_out", "notes")


@dataclass
class Tables:
    """The graph, and the samples measured on it."""

    genes: list[str]  # name of each node
    relations: list[str]  # name of each relation
    edge_index: Tensor  # long [2, E], the edges of one relation after another
    edge_type: Tensor  # long [E], index into `relations`
    perturbed: Tensor  # long [total], the perturbed nodes of all samples, concatenated
    perturbed_ptr: Tensor  # long [n + 1]; sample i has, each once, those from ptr[i] to ptr[i + 1]
    y: Tensor  # float64 [n, T], or [n], the measured effects, nan where one is missing
    split: Tensor | None = None  # int8 [n], index into `SPLITS`, -1 for rows in none
    weight: Tensor | None = None  # float64 [n], of each sample in the loss
    sd: Tensor | None = None  # float64 [n], of each sample's scores, whose weight is then 1 / sd**2
    targets: Sequence[str] = ("score",)  # name of each of the T effects
    left_out: Sequence[str] = ()  # columns of the samples' table that are not read
    notes: Sequence[str] = ()  # sentences for the log on how the files were read
    edge_weight: Tensor | None = None  # float64 [E]; None: all are 1
    edge_attr: Tensor | None = None  # float32 [E, F], features of the edges; None: they have none
    features: Tensor | None = None  # float32 [N, F], of the nodes; None: they have none
    feature_names: Sequence[str] = ()  # name of each of these
    level: Tensor | None = None  # float64 [total], of each of `perturbed`; None: all are 0, deleted

    def __post_init__(self):
        if self.y.dim() == 1:
            self.y = self.y.unsqueeze(1)
        num_edges = len(self.edge_type)
        if self.edge_weight is None:
            self.edge_weight = torch.ones(num_edges, dtype=torch.float64)
        if self.edge_attr is None:
            self.edge_attr = torch.empty(num_edges, 0)
        if self.features is None:
            self.features = torch.empty(len(self.genes), 0)
        if self.sd is not None and self.weight is None:
            self.weight = self.sd**-2
        if self.level is None:
            self.level = torch.zeros(len(self.perturbed), dtype=torch.float64)

    @classmethod
    def of_graph(cls, fields: dict[str, Any]) -> "Tables":
        """Returns tables without samples, given `graph_fields`."""
        no_samples = {
            "perturbed": torch.empty(0, dtype=torch.long),
            "perturbed_ptr": torch.zeros(1, dtype=torch.long),
            "y": torch.empty(0, len(fields["targets"]), dtype=torch.float64),
            "split": torch.empty(0, dtype=torch.int8),
        }
        tables = cls(**fields, **no_samples)
        tables.edge_index = tables.edge_index.long()
        tables.edge_type = tables.edge_type.long()
        return tables

    def graph_fields(self) -> dict[str, Any]:
        """Returns all fields but those `OF_SAMPLES`, the edges in a third of their size."""
        fields = {name: value for name, value in vars(self).items() if name not in OF_SAMPLES}
        fields["edge_index"] = self.edge_index.int()
        fields["edge_type"] = self.edge_type.to(
            torch.uint8 if len(self.relations) < 256 else torch.int
        )
        fields["edge_weight"] = None if (self.edge_weight == 1).all() else self.edge_weight
        return fields

    def graph(self) -> HeteroData:
        """Returns the graph, with node type `gene` and one edge type per relation."""
        graph = HeteroData()
        graph["gene"].num_nodes = len(self.genes)
        graph["gene"].x = self.features
        for r, relation in enumerate(self.relations):
            chosen = self.edge_type == r
            edges = graph["gene", relation, "gene"]
            edges.edge_index = self.edge_index[:, chosen]
            edges.edge_weight = self.edge_weight[chosen]
            edges.edge_attr = self.edge_attr[chosen]
        return graph

    def is_in(self, split: str) -> Tensor:
        """Returns which rows are in a split, bool [n]."""
        return self.split == SPLITS.index(split)

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split, in ascending order."""
        return self.is_in(split).nonzero().flatten()

    def sample(self) -> Tensor:
        """Returns the row of each entry of `perturbed`, long [total]."""
        return torch.repeat_interleave(self.perturbed_ptr.diff())

    def score_weight(self, rows: Tensor | slice) -> Tensor:
        """Returns the weight of each score of these rows, 0 if it is missing, float64 [rows, T]."""
        present = (~self.y[rows].isnan()).double()
        if self.weight is None:
            return present
        return present * self.weight[rows].unsqueeze(1)

    def names(self, nodes: Tensor, levels: Tensor) -> Iterator[str]:
        """Yields what stands in a table for each perturbed node: `A`, or `A=0.3`.

        Where another node has that very name, a further 0 tells them apart: `A=00.3`.
        """
        genes = set(self.genes)
        for node, level in zip(nodes.tolist(), levels.tolist(), strict=True):
            name = self.genes[node]
            if level == 0 and "=" not in name:
                yield name
                continue
            level_text = f"{level:.15g}"
            while f"{name}={level_text}" in genes:
                level_text = f"0{level_text}"
            yield f"{name}={level_text}"

    def set_number(self) -> Tensor:
        """Returns the number of each row's set of nodes and levels, long [n], from 0.

        Sets are numbered in the order of their first rows.
        """
        return number_in_order(self.set_code(self.node_code()))

    def node_code(self) -> Tensor:
        """Returns a code of each perturbed node at its level, long [total]."""
        # Random 64-bit codes times odd numbers that stand for the levels, 1 for 0.
        codes = np.random.default_rng(0).integers(-(2**63), 2**63, len(self.genes))
        codes = torch.from_numpy(codes)
        mixed = self.level.view(torch.int64)
        for _ in range(2):  # as the bits of 0.5 or 2 are nearly all 0
            mixed = (mixed ^ (mixed >> 32)) * MIXING
        return codes[self.perturbed] * (1 + 2 * mixed)

    def set_code(self, node_code: Tensor) -> Tensor:
        """Returns the sum of the codes of each row's nodes, long [n].

        Equal sets have equal sums, others with a probability of about n * n / 2**57.
        """
        return scatter(node_code, self.sample(), dim_size=len(self.y))

    def is_seen(self) -> Tensor:
        """Returns which nodes are perturbed in a training row that has the score, bool [N, T]."""
        is_trained = self.is_in("train").unsqueeze(1) & ~self.y.isnan()
        count = scatter(is_trained[self.sample()].int(), self.perturbed, dim_size=len(self.genes))
        return count > 0

    def unseen(self, split: str) -> Tensor:
        """Returns how many perturbed nodes of each row of a split are not seen for a score.

        They are int [rows, T].
        """
        is_in_split = self.is_in(split)
        position = is_in_split.cumsum(0) - 1  # of each row in the split
        sample = self.sample()
        chosen = is_in_split[sample]
        is_unseen = ~self.is_seen()[self.perturbed[chosen]]
        return scatter(is_unseen.int(), position[sample[chosen]], dim_size=int(is_in_split.sum()))

    def unseen_share(self, split: str) -> float:
        """Returns the share of perturbed nodes that are not seen, over the scores of a split."""
        rows = self.rows(split)
        present = ~self.y[rows].isnan()
        count = self.perturbed_ptr.diff()[rows].unsqueeze(1)
        num_unseen = (self.unseen(split) * present).sum()
        share = num_unseen / (count * present).sum().clamp(min=1)
        return share.item()

    def fingerprint(self, without: Sequence[str] = ()) -> str:
        """Returns a hash of all fields, added ones too, but those `OF_FILES` and `without`."""

        def encode(tensor: Tensor) -> list:
            content = torch.as_tensor(tensor).ravel().view(torch.uint8).numpy()
            return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]

        digest = hashlib.sha256()
        for name, value in vars(self).items():
            if name in (*OF_FILES, *without):
                continue
            digest.update(json.dumps([name, value], default=encode).encode())
        return digest.hexdigest()


# ---- Files --------------------------------------------------------------------------------------
def read_tables(
    edges: str, perturbations: str, features: str, scores: Sequence[str], undirected: bool
) -> Tables:
    """Returns the files as `Tables`: nodes sorted by name, duplicate edges merged by mean.

    The arguments are the options of section `data`. Raises `DataError`.
    """
    node_number = {}
    notes = []
    relations, edge_index, edge_type, edge_values = read_edges(edges, node_number, notes)
    columns = read_knockouts(perturbations, node_number, notes, scores)
    genes = sorted(node_number)
    position = number_names(genes, node_number).argsort()  # of each number, that of its name
    perturbed = position[columns.pop("node")]
    row = columns.pop("row")
    level = columns.pop("level")
    samples = pack(row, perturbed, level, len(columns["y"]))
    # Each relation has its own range of node numbers, so that all are merged at once.
    merge = to_undirected if undirected else coalesce
    edge_index = position[edge_index] + edge_type * len(genes)
    edge_index, edge_values = merge(edge_index, edge_values, reduce="mean")
    edge_weight, edge_attr, present = edge_values.tensor_split(
        [1, 1 + edge_values.size(1) // 2], dim=1
    )
    node_features = read_features(features, genes, notes) if features else {}
    tables = Tables(
        genes=genes,
        relations=relations,
        edge_index=edge_index % len(genes),
        edge_type=edge_index[0] // len(genes),
        edge_weight=edge_weight.flatten(),
        edge_attr=(edge_attr / present).nan_to_num().float(),
        notes=notes,
        **node_features,
        **samples,
        **columns,
    )
    note_replicates(tables, perturbations)
    note_outliers(tables, perturbations)
    return tables


def note_outliers(tables: Tables, path: str) -> None:
    """Notes scores that make much of the variance of all, of which the loss would mostly be made.

    Of many scores, these are rows that do so on average.
    """
    weight = tables.score_weight(slice(None))
    mean = weighted_mean(tables.y.nan_to_num(), weight)  # without a median, which takes seconds
    squares = weight * (tables.y - mean).nan_to_num().square()
    shares = (squares / squares.sum(dim=0)).nan_to_num()
    names = [f"the {target:.60}" for target in tables.targets]
    if len(names) > FEW_SCORES:
        shares = shares.mean(dim=1, keepdim=True)
        names = [f"the row of {len(names):,} scores"]
    largest, row_of_largest = shares.max(dim=0)
    present = (~tables.y.isnan()).sum(dim=0)
    # Of fewer, or of 0 and 1, any may have such a share.
    are_others = ~((tables.y == 0) | (tables.y == 1) | tables.y.isnan()).all(dim=0)
    is_judged = (present >= FEWEST_SCORES) & are_others
    if len(names) < len(is_judged):
        is_judged = is_judged.any(dim=0, keepdim=True)
    is_noted = is_judged & (largest > OUTLYING)
    for k in is_noted.nonzero().flatten().tolist():
        line = line_of_row(path, int(row_of_largest[k]))
        tables.notes.append(
            f"{path}:{line}: {names[k]} makes {largest[k]:.0%} of the variance of all rows: "
            "remove it, give it a small weight, or clip or rank the scores"
        )


def line_of_row(path: str, row: int) -> int:
    """Returns in which line of a table a row stands, counted without blank lines from 0."""
    for rows in read_rows(path, read_header(path, [], ("genes",))):
        if row < len(rows.lines):
            return rows.lines[row]
        row -= len(rows.lines)
    raise IndexError(row)


def note_replicates(tables: Tables, path: str) -> None:
    """Notes how many sets of perturbed nodes have rows in more than one split of the table."""
    if tables.split is None:
        return
    perturbs = tables.perturbed_ptr.diff() > 0
    set_number = tables.set_number()[perturbs]
    split_number = set_number * len(SPLITS) + tables.split[perturbs]
    num_splits = torch.bincount(split_number.unique() // len(SPLITS))  # of each set
    num_shared = int((num_splits > 1).sum())
    if num_shared:
        tables.notes.append(
            f"{path}: sets of knock-outs that the column split puts on both sides: {num_shared:,}; "
            "a random split keeps their rows together"
        )


def number_in_order(values: Tensor) -> Tensor:
    """Returns a number for each of the values [n], equal for equal ones, from 0, by first rows."""
    _, group = values.unique(return_inverse=True)
    row = torch.arange(len(values))
    first_row = scatter(row, group, reduce="min")
    is_first = torch.zeros(len(values), dtype=torch.bool)
    is_first[first_row] = True
    number = is_first.cumsum(0) - 1  # of the value that has its first row there
    return number[first_row[group]]


def read_edges(
    path: str, node_number: dict[str, int], notes: list[str]
) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Returns the relations' names and, as in `Tables`, edge_index and edge_type.

    The last are the values of each edge, float64 [E, 1 + 2F]: its weight, its features, which are
    standardised and 0 where missing, and for each of these, 1 if it is there. Nodes that
    `node_number` lacks are added to it, sentences for the log to `notes`. Raises `DataError`.
    """
    header = read_header(path, notes, ("source", "target", "relation"), ("weight",))
    named = [name for name in header if name]
    names = [name for name in named[3:] if name != "weight"]
    relation_number = {}
    edges = []
    weights = []
    features = []
    for rows in read_rows(path, header, has_bar=True):
        source = number_names(rows.node_names("source"), node_number)
        target = number_names(rows.node_names("target"), node_number)
        relation = number_names(rows.names("relation"), relation_number)
        edges.append(torch.stack([source, target, relation]))
        weight = torch.ones(len(rows.lines), 1, dtype=torch.float64)
        if "weight" in header:
            weight = rows.numbers("weight", positive=True).unsqueeze(1)
        weights.append(weight)
        features.append(rows.table(names))
    edges = torch.cat(edges, dim=1)
    features = torch.cat(features)
    note_empty_columns(path, names, features, notes)
    features = standardise(features)
    present = ~features.isnan()
    values = torch.cat([torch.cat(weights), features.nan_to_num(), present], dim=1)
    return list(relation_number), edges[:2], edges[2], values


def read_knockouts(
    path: str, node_number: dict[str, int], notes: list[str], scores: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of `Tables` that a table of knock-outs has; raises `DataError`.

    In place of its perturbations stand the `row`, `node` and `level` of each, [total]. Nodes that
    `node_number` lacks are added to it, sentences for the log to `notes`. Without names of
    `scores`, all columns are scores that are nothing else.
    """
    chosen = list(map(str, scores))  # 1 is the name "1"
    header = read_header(path, notes, ("genes",), ("split", "weight", "sd"), kept=chosen)
    named = [name for name in header if name]
    score_columns = [name for name in named[1:] if name not in ("split", "weight", "sd")]
    if not score_columns or {"weight", "sd"} <= set(header):
        problem = "the header needs scores after genes, and weight or sd, not both"
        raise DataError(f"{path}:1: {problem}")
    targets = list(dict.fromkeys(chosen)) or score_columns
    if not set(targets) <= set(score_columns):
        problem = f"data.scores={scores}, but the scores are {score_columns[:20]}"
        raise DataError(f"{path}:1: {problem}")
    chunks = []
    num_rows = 0
    nodes = list(node_number)
    known = frozenset(nodes)
    for rows in read_rows(path, header, has_bar=True):
        row, name, names, level = rows.sets(known)
        node = number_names(names, node_number)[name]
        y = rows.table(targets, ": to leave that column out, name the others in data.scores")
        chunk = {"row": row + num_rows, "node": node, "level": level, "y": y}
        if "split" in header:
            chunk["split"] = rows.splits()
        if "weight" in header:
            chunk["weight"] = rows.numbers("weight", positive=True)
        if "sd" in header:
            chunk["sd"] = rows.numbers("sd", positive=True)
        chunks.append(chunk)
        num_rows += len(y)
    fields = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    unknown = list(node_number)[len(nodes) :]
    note = note_on_unknown(unknown, nodes, num_perturbed=len(fields["node"].unique()))
    if note:
        notes.append(f"{path}: {note}")
    left_out = [name for name in score_columns if name not in targets]
    return {**fields, "targets": targets, "left_out": left_out}


def read_features(path: str, genes: list[str], notes: list[str]) -> dict[str, Any]:
    """Returns the fields `features` and `feature_names` of `Tables`.

    Features are standardised, and 0 where missing. Sentences for the log are added to `notes`.
    Raises `DataError`.
    """
    header = read_header(path, notes, ("gene",))
    _, *names = [name for name in header if name]
    if not names:
        raise DataError(f"{path}:1: the header has no features after gene")
    row_of = {}  # by name
    chunks = []
    for rows in read_rows(path, header, has_bar=True):
        for row, name in enumerate(rows.names("gene")):
            if name in row_of:
                raise rows.error(row, "gene", "stands twice")
            row_of[name] = len(row_of)
        chunks.append(rows.table(names))
    row = torch.tensor([row_of.get(gene, -1) for gene in genes])
    if (row < 0).all():
        problem = "none of its nodes is in the tables of edges and knock-outs"
        raise DataError(f"{path}: {problem}")
    dates = [name for name in row_of if is_date(name) and name not in genes]
    if dates:
        shown = some_names(dates, meanings(dates, genes))
        notes.append(f"{path}: {len(dates):,} names are no nodes: {shown}")
    values = torch.cat(chunks)[row].where(row.unsqueeze(1) >= 0, math.nan)
    note_empty_columns(path, names, values, notes)
    return {"features": standardise(values).nan_to_num().float(), "feature_names": names}


def note_empty_columns(path: str, names: Sequence[str], values: Tensor, notes: list[str]) -> None:
    """Notes which of the named columns of values [n, F] have none."""
    for name, is_empty in zip(names, values.isnan().all(dim=0).tolist(), strict=True):
        if is_empty:
            notes.append(f"{path}: the column {name:.60} has no value, and says nothing")


def pack(row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> dict:
    """Returns `perturbed`, `perturbed_ptr` and `level` of `Tables`, given those of each name.

    A node at level 1 is intact, and left out.
    """
    num_nodes = int(node.max()) + 1 if len(node) else 0
    order = stable_order(row * num_nodes + node)
    order = order[level[order] != 1]
    return {
        "perturbed": node[order],
        "perturbed_ptr": index2ptr(row[order], num_rows),
        "level": level[order],
    }


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Returns the mean of each target's values, both [n, T], nan where no weight is over 0, [T]."""
    return (values * weight).sum(dim=0) / weight.sum(dim=0)


def mean_and_std(values: Tensor, weight: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns mean [T] and standard deviation [T], 1 where it would be 0, of values [n, T].

    Values that are nan do not count; others count by their `weight`, [n, T].
    """
    present = ~values.isnan()
    weight = (weight * present).to(values.dtype)
    middle = values.nanmedian(dim=0).values  # so that the mean of equal values is exact
    mean = middle + weighted_mean((values - middle).where(present, 0.0), weight)
    std = weighted_mean((values - mean).where(present, 0.0).square(), weight).sqrt()
    largest = values.nan_to_num().abs().amax(dim=0)
    return mean, std.where(std > 1e-12 * largest, 1.0)


def standardise(values: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Returns the values [n, T] less their mean and over their standard deviation; nan stays."""
    mean, std = mean_and_std(values, weight)
    return (values - mean) / std
