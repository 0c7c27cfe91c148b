"""From files to `Tables`: the graph, and the samples measured on it.

`read_edges`, `read_knockouts` and `read_features` read the three tables. docs/tables.md describes
their format. All files may be gzipped, and any cell may be quoted.

Shapes: N nodes of F features, E edges, n samples of T targets.
"""

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.utils import coalesce, scatter, to_undirected

from data_cells import SPLITS, Rows, number_names, read_header, read_rows
from errors import DataError
from metrics import standardise
from parts import optional
from run_checkpoint import FINGERPRINT

MIXING = -0x61C8864680B583EB  # 2**64 / golden ratio, interpreted as a signed number
# Columns of the table of knock-outs, after genes, that are not scores.
ROLES = ("split", "weight", "sd")
# Fields that are not part of the fingerprint: descriptions of the files, and `sd`, which `weight`
# replaces.
OF_FILES = ("left_out", "notes", "line", "feature_names", "sd")
# Fields that graph.pt contains for predictions: the fields of the graph, and the names of scores.
OF_GRAPH = (
    "genes",
    "relations",
    "edge_index",
    "edge_type",
    "edge_weight",
    "features",
    "feature_names",
    "targets",
)


@dataclass
class Tables:
    """The graph, and the samples measured on it."""

    genes: list[str]  # name of each node
    relations: list[str]  # name of each relation
    edge_index: Tensor  # long [2, E], sorted by relation
    edge_type: Tensor  # long [E], index into `relations`
    perturbed: Tensor  # long [total], the perturbed nodes of all samples, concatenated
    # long [n + 1]; sample i perturbs the nodes perturbed[ptr[i]:ptr[i + 1]], each only once
    perturbed_ptr: Tensor
    y: Tensor  # float64 [n, T], or [n]; the scores, nan if missing
    split: Tensor | None = None  # int8 [n], index of `SPLITS`, -1 for rows in no split
    # float64 [n], weight of each sample in the loss; None: 1 / sd**2 or, without `sd`, 1
    weight: Tensor | None = None
    # float64 [n], standard deviation of each sample's scores; None: unknown
    sd: Tensor | None = None
    targets: Sequence[str] = ("score",)  # name of each score
    left_out: Sequence[str] = ()  # columns of the table of knock-outs that are not read
    notes: Sequence[str] = ()  # warnings for the log about the files
    line: Tensor | None = None  # int [n], line of each sample in its file; None: unknown
    edge_weight: Tensor | None = None  # float64 [E]; None: all are 1
    features: Tensor | None = None  # float32 [N, F], features of the nodes; None: no features
    feature_names: Sequence[str] = ()  # name of each feature
    # float64 [total], level of each of `perturbed`; None: all are deleted (0)
    level: Tensor | None = None
    # Further columns of the samples, [n, ...] each.
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if self.y.dim() == 1:
            self.y = self.y.unsqueeze(1)
        if self.edge_weight is None:
            self.edge_weight = torch.ones(len(self.edge_type), dtype=torch.float64)
        if self.features is None:
            self.features = torch.empty(len(self.genes), 0)
        if self.sd is not None and self.weight is None:
            self.weight = self.sd**-2
        if self.level is None:
            self.level = torch.zeros(len(self.perturbed), dtype=torch.float64)

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
        return graph

    def is_in(self, split: str) -> Tensor:
        """Returns whether each row is in a split, bool [n]."""
        return self.split == SPLITS.index(split)

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split in ascending order, long [rows]."""
        return self.is_in(split).nonzero().flatten()

    def sample(self) -> Tensor:
        """Returns the row number of each perturbed node, long [total]."""
        return torch.repeat_interleave(self.perturbed_ptr.diff())

    def score_weight(self, rows: Tensor | slice) -> Tensor:
        """Returns the weight of each score of these rows, 0 if it is missing, float64 [rows, T]."""
        present = (~self.y[rows].isnan()).double()
        if self.weight is None:
            return present
        return present * self.weight[rows].unsqueeze(1)

    def names(self, nodes: Tensor, levels: Tensor) -> Iterator[str]:
        """Yields the text of each perturbed node in a table: `A`, or `A=0.3`."""
        for node, level in zip(nodes.tolist(), levels.tolist(), strict=True):
            name = self.genes[node]
            yield name if level == 0 else f"{name}={level:.15g}"

    def set_number(self, with_levels: bool = True) -> Tensor:
        """Returns the number of the set of each row, long [n].

        Rows with the same nodes and levels have the same number. Without `with_levels`, rows with
        the same nodes have the same number. The sets are numbered from 0, in the order of their
        first rows.
        """
        codes = self.set_code(self.node_code(with_levels)).numpy()
        _, first_row, group = np.unique(codes, return_index=True, return_inverse=True)
        number = first_row.argsort().argsort()  # the position of each set's first row among them
        return torch.from_numpy(number[group])

    def node_code(self, with_levels: bool = True) -> Tensor:
        """Returns a 64-bit code of each perturbed node, long [total].

        The code depends on the node and, with `with_levels`, also on its level.
        """
        codes = np.random.default_rng(0).integers(-(2**63), 2**63, len(self.genes))
        codes = torch.from_numpy(codes)[self.perturbed]
        if not with_levels:
            return codes
        # An odd number represents a level; it is 1 for level 0.
        mixed = self.level.view(torch.int64)
        for _ in range(2):  # twice, because nearly all bits of 0.5 or 2 are 0
            mixed = (mixed ^ (mixed >> 32)) * MIXING
        return codes * (1 + 2 * mixed)

    def set_code(self, node_code: Tensor) -> Tensor:
        """Returns the sum of the codes of each row's nodes, long [n].

        Equal sets have equal sums. The probability that any two different sets among the rows have
        equal sums is about n * n / 2**57.
        """
        return scatter(node_code, self.sample(), dim_size=len(self.y))

    def is_seen(self) -> Tensor:
        """Returns whether each node is seen for each score, bool [N, T].

        A node is seen for a score if a training row that has the score perturbs the node.
        """
        is_trained = self.is_in("train").unsqueeze(1) & ~self.y.isnan()
        count = scatter(is_trained[self.sample()].int(), self.perturbed, dim_size=len(self.genes))
        return count > 0

    def unseen(self, split: str) -> Tensor:
        """Returns the number of nodes in each row of a split that are unseen, int [rows, T].

        There is a column for each score, because a node may be unseen for some scores only.
        """
        is_unseen = ~self.is_seen()[self.perturbed]
        num_unseen = scatter(is_unseen.int(), self.sample(), dim_size=len(self.y))
        return num_unseen[self.is_in(split)]

    def unseen_share(self, split: str) -> float:
        """Returns the share of the perturbed nodes of a split that are unseen, over all scores.

        A perturbed node counts once for each score that its row has.
        """
        is_counted = (self.is_in(split).unsqueeze(1) & ~self.y.isnan())[self.sample()]
        is_unseen = is_counted & ~self.is_seen()[self.perturbed]
        return (is_unseen.sum() / is_counted.sum().clamp(min=1)).item()

    def fingerprint(self, names: Sequence[str] = ()) -> str:
        """Returns a SHA-256 hash of the named fields, or of all fields by default.

        All fields include the fields that you have added to the class. The fields in `OF_FILES` are
        always left out. Among all fields, a field at its default value does not count. A new field
        therefore does not change the hash of tables that do not use it.
        """

        def encode(tensor: Tensor) -> list:
            content = torch.as_tensor(tensor).ravel().view(torch.uint8).numpy()
            return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]

        defaults = {}
        for each in fields(self):
            has_factory = each.default_factory is not MISSING
            defaults[each.name] = each.default_factory() if has_factory else each.default
        digest = hashlib.sha256()
        for name, value in vars(self).items():
            if name in OF_FILES or (names and name not in names):
                continue
            content = json.dumps([name, value], default=encode)
            default = defaults.get(name, MISSING)
            has_default = default is not MISSING and not names
            if not has_default or content != json.dumps([name, default], default=encode):
                digest.update(content.encode())
        return digest.hexdigest() if names else FINGERPRINT + digest.hexdigest()


# ---- Files ---------------------------------------------------------------------------------------
def cached_by_code(
    cache_dir: str, kind: str, function: Callable, key: str, build: Callable[[], Any]
) -> Any:
    """Returns the value of `build`, from a file of the cache if it exists.

    The name of the file depends on `key`, and on the code of the module of `function` and of the
    modules that it imports. `key` is a text with everything else that the value depends on. Without
    a cache folder or without the optional part cache, the value is built each time.
    """
    data_cache = optional("data_cache") if cache_dir else None
    if data_cache is None:
        return build()
    return data_cache.cached(cache_dir, kind, f"{data_cache.source_digest(function)} {key}", build)


def read_tables(
    edges: str, perturbations: str, features: str, scores: Sequence[str], undirected: bool
) -> Tables:
    """Returns the tables in some files.

    Nodes are sorted by name. Duplicate edges are merged, and their weights are averaged.

    Args:
        edges: Path of the table of edges.
        perturbations: Path of the table of knock-outs.
        features: Path of the table of node features, or "".
        scores: Names of the score columns. If it is empty, all columns without a different meaning
            are scores.
        undirected: Whether the reverse of every edge is added.

    Raises:
        DataError: A file cannot be read, or its content is invalid.
    """
    node_number = {}
    relations, edge_index, edge_type, edge_weight = read_edges(edges, node_number)
    columns = read_knockouts(perturbations, node_number, scores)
    genes = sorted(node_number)
    # For each number of a node, the index of its name in `genes`.
    position = number_names(genes, node_number).argsort()
    row = columns.pop("row")
    node = position[columns.pop("node")]
    columns |= pack(row, node, columns.pop("level"), len(columns["y"]))
    # Each relation gets its own range of node numbers, so that edges of different relations are not
    # merged, although all relations are processed at once.
    merge = to_undirected if undirected else coalesce
    edge_index = position[edge_index] + edge_type * len(genes)
    edge_index, edge_weight = merge(edge_index, edge_weight, reduce="mean")
    # `described` is {name: its values in the table of features, [F]}.
    node_features, described = read_features(features, genes) if features else ({}, {})
    tables = Tables(
        genes=genes,
        relations=relations,
        edge_index=edge_index % len(genes),
        edge_type=edge_index[0] // len(genes),
        edge_weight=edge_weight,
        **node_features,
        **columns,
    )
    data_notes = optional("data_notes")
    if data_notes:
        files = (edges, perturbations, features)
        tables.notes = list(data_notes.notes_on(tables, files, described, row))
    return tables


def read_edges(path: str, node_number: dict[str, int]) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Returns relations, edge_index, edge_type and edge_weight of `Tables`.

    In edge_index, nodes have the numbers in `node_number`.

    Adds new nodes to `node_number`. Raises `DataError` if the table is invalid.
    """
    header = read_header(path, ("source", "target", "relation"))
    others = [name for name in header if name not in ("source", "target", "relation", "weight")]
    if others:
        problem = f"{path}:1: unknown column {', '.join(others)!r:.60}"
        advice = "rename it to weight or remove it; the recipe attention can use it as edge feature"
        raise DataError(f"{problem}: {advice}")
    relation_number = {}
    edges = []
    weights = []
    for rows in read_rows(path, header):
        source = number_names(rows.node_names("source"), node_number)
        target = number_names(rows.node_names("target"), node_number)
        relation = number_names(rows.names("relation"), relation_number)
        edges.append(torch.stack([source, target, relation]))
        if "weight" in header:
            weights.append(rows.numbers("weight", positive=True))
        else:
            weights.append(torch.ones(len(rows.lines), dtype=torch.float64))
    edges = torch.cat(edges, dim=1)
    return list(relation_number), edges[:2], edges[2], torch.cat(weights)


def read_knockouts(
    path: str, node_number: dict[str, int], scores: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of `Tables` that the table of knock-outs contains.

    Instead of `perturbed` and `perturbed_ptr`, the result contains the `row`, the `node` and the
    `level` of each perturbed node, [total] each. Nodes have the numbers in `node_number`.

    If `scores` is empty, every column without a different meaning is a score. Adds new nodes to
    `node_number`. Raises `DataError` if the table is invalid.
    """
    chosen = list(map(str, scores))  # YAML reads the name 1 as a number
    header = read_header(path, ("genes",))
    score_columns = [name for name in header[1:] if name not in ROLES]
    for name in score_columns:
        if name.lower() in ROLES and name not in chosen:
            problem = f"is not {name.lower()!r}, which is in lower case: rename or remove it"
            raise DataError(f"{path}:1: the column {name!r} {problem}, or list it in data.scores")
    if not score_columns or {"weight", "sd"} <= set(header):
        problem = "the header needs at least one score column, and cannot have both weight and sd"
        raise DataError(f"{path}:1: {problem}: add or remove columns")
    targets = list(dict.fromkeys(chosen)) or score_columns
    if not set(targets) <= set(score_columns):
        problem = f"data.scores={scores} contains names that are not among the score columns"
        advice = "correct them, and quote names that YAML does not read as text, such as 'NO'"
        raise DataError(f"{path}:1: {problem} {score_columns[:20]}: {advice}")
    chunks = []
    num_rows = 0
    nodes = frozenset(node_number)
    for rows in read_rows(path, header):
        row, name, names, level = checked_sets(rows, nodes)
        node = number_names(names, node_number)[name]
        advice = ": correct it, list the scores in data.scores, or apply the recipe covariates"
        y = rows.table(targets, advice)
        line = torch.tensor(rows.lines, dtype=torch.int)
        chunk = {"row": row + num_rows, "node": node, "level": level, "line": line, "y": y}
        if "split" in header:
            chunk["split"] = rows.splits()
        for column in ("weight", "sd"):
            if column in header:
                chunk[column] = rows.numbers(column, positive=True)
        chunks.append(chunk)
        num_rows += len(y)
    fields = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    left_out = [name for name in score_columns if name not in targets]
    return {**fields, "targets": targets, "left_out": left_out}


def checked_sets(rows: Rows, nodes: Container[str]) -> tuple[Tensor, Tensor, list[str], Tensor]:
    """Returns the result of `Rows.sets`.

    With the optional part notes, it raises `DataError` for a name that is not in `nodes` and is
    probably not a node, such as a control.
    """
    row, name, names, level = rows.sets()
    data_notes = optional("data_notes")
    if data_notes:
        data_notes.check_names(rows, row, name, names, nodes)
    return row, name, names, level


def read_features(path: str, genes: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the fields `features` and `feature_names` of `Tables`, and the values of the file.

    The field `features` is standardised over the nodes, and 0 for missing values. The values of the
    file are {name: values [F]}, unchanged, for all rows.

    Raises `DataError` if the table is invalid or does not describe any node.
    """
    header = read_header(path, ("gene",))
    _, *names = header
    if not names:
        problem = f"{path}:1: the header has no feature columns after gene"
        raise DataError(f"{problem}: add one, or leave out data.features")
    row_of = {}  # {name: row in the file}
    chunks = []
    for rows in read_rows(path, header):
        for row, name in enumerate(rows.names("gene")):
            if name in row_of:
                raise rows.error(row, "gene", "has two rows: remove one of them")
            row_of[name] = len(row_of)
        chunks.append(rows.table(names))
    row = torch.tensor([row_of.get(gene, -1) for gene in genes])
    if (row < 0).all():
        problem = f"{path}: no node of this table is in the tables of edges and knock-outs"
        raise DataError(f"{problem}: check that all tables use the same names")
    table = torch.cat(chunks)
    values = table[row].where(row.unsqueeze(1) >= 0, math.nan)
    features = standardise(values).nan_to_num().float()
    return {"features": features, "feature_names": names}, dict(zip(row_of, table, strict=True))


def pack(row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> dict:
    """Returns the fields `perturbed`, `perturbed_ptr` and `level` of `Tables`.

    `row`, `node` and `level`, [total] each, describe the perturbed nodes, in any order. Nodes at
    level 1 are left out, because they are intact.
    """
    num_nodes = int(node.max()) + 1 if len(node) else 0
    # For keys that are nearly sorted, numpy is five times as fast as torch.
    order = torch.from_numpy(np.argsort((row * num_nodes + node).numpy(), kind="stable"))
    order = order[level[order] != 1]
    return {
        "perturbed": node[order],
        "perturbed_ptr": index2ptr(row[order], num_rows),
        "level": level[order],
    }
