"""From files to `Tables`: the graph, and the samples measured on it.

`read_edges`, `read_knockouts` and `read_features` read the three tables, whose format
docs/tables.md describes. All files may be gzipped (`.gz`), and any cell may be quoted.

Shapes: N nodes of F features, E edges, n samples of T targets.
"""

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.utils import coalesce, scatter, to_undirected

from data_cells import SPLITS, Rows, number_names, read_header, read_rows, stable_order
from errors import DataError
from metrics import standardise
from parts import optional

MIXING = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
# The fingerprint leaves out these fields: descriptions of the files, and the source of `weight`.
OF_FILES = ("left_out", "notes", "line", "feature_names", "sd")
# Fields of the graph, and the names of the scores: all that graph.pt needs for predictions.
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
    # long [n + 1]; sample i has those from ptr[i] to ptr[i + 1], without duplicates
    perturbed_ptr: Tensor
    y: Tensor  # float64 [n, T], or [n]; the scores, nan if missing
    split: Tensor | None = None  # int8 [n], index of `SPLITS`, -1 for rows in no split
    weight: Tensor | None = None  # float64 [n], weight of each sample in the loss
    # float64 [n], standard deviation of each sample's scores; its weight is then 1 / sd**2
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
        """Returns the number of each row's set of nodes and levels, by first row, long [n]."""
        return number_in_order(self.set_code(self.node_code(with_levels)))

    def node_code(self, with_levels: bool = True) -> Tensor:
        """Returns a 64-bit code of each perturbed node and its level, long [total]."""
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

        Equal sets have equal sums. Any two different sets among the rows have equal sums with a
        probability of about n * n / 2**57.
        """
        return scatter(node_code, self.sample(), dim_size=len(self.y))

    def is_seen(self) -> Tensor:
        """Returns whether a training row with the score perturbs the node, bool [N, T]."""
        is_trained = self.is_in("train").unsqueeze(1) & ~self.y.isnan()
        count = scatter(is_trained[self.sample()].int(), self.perturbed, dim_size=len(self.genes))
        return count > 0

    def unseen(self, split: str) -> Tensor:
        """Returns the number of unseen nodes in each row of a split, int [rows, T]."""
        is_unseen = ~self.is_seen()[self.perturbed]
        num_unseen = scatter(is_unseen.int(), self.sample(), dim_size=len(self.y))
        return num_unseen[self.is_in(split)]

    def unseen_share(self, split: str) -> float:
        """Returns the share of a split's perturbed nodes that are unseen, over all scores."""
        rows = self.rows(split)
        present = ~self.y[rows].isnan()
        count = self.perturbed_ptr.diff()[rows].unsqueeze(1)
        num_unseen = (self.unseen(split) * present).sum()
        share = num_unseen / (count * present).sum().clamp(min=1)
        return share.item()

    def fingerprint(self, names: Sequence[str] = ()) -> str:
        """Returns a hash of the named fields, or of all fields except `OF_FILES`.

        All fields include those that you have added.
        """

        def encode(tensor: Tensor) -> list:
            content = torch.as_tensor(tensor).ravel().view(torch.uint8).numpy()
            return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]

        digest = hashlib.sha256()
        for name, value in vars(self).items():
            if name in OF_FILES or (names and name not in names):
                continue
            digest.update(json.dumps([name, value], default=encode).encode())
        return digest.hexdigest()


# ---- Files ---------------------------------------------------------------------------------------
def cached_by_code(
    cache_dir: str, kind: str, function: Callable, key: str, build: Callable[[], Any]
) -> Any:
    """Returns the value of `build`, which is stored in a file of the folder, if there is one.

    The file depends on `key`, a text with everything except code that the value depends on, and on
    the code of the module of `function`. Without the optional part cache, the value is built each
    time.
    """
    data_cache = optional("data_cache") if cache_dir else None
    if data_cache is None:
        return build()
    return data_cache.cached(cache_dir, kind, f"{data_cache.source_digest(function)} {key}", build)


def read_tables(
    edges: str, perturbations: str, features: str, scores: Sequence[str], undirected: bool
) -> Tables:
    """Returns the tables in some files; raises `DataError`.

    Nodes are sorted by name, and duplicate edges are merged to their mean weight.
    """
    node_number = {}
    notes = []
    relations, edge_index, edge_type, edge_weight = read_edges(edges, node_number, notes)
    columns = read_knockouts(perturbations, node_number, notes, scores)
    genes = sorted(node_number)
    # Index in `genes` of the name with each number.
    position = number_names(genes, node_number).argsort()
    perturbed = position[columns.pop("node")]
    row = columns.pop("row")
    level = columns.pop("level")
    samples = pack(row, perturbed, level, len(columns["y"]))
    # Each relation has its own range of node numbers, so that the edges of all relations are merged
    # at once.
    merge = to_undirected if undirected else coalesce
    edge_index = position[edge_index] + edge_type * len(genes)
    edge_index, edge_weight = merge(edge_index, edge_weight, reduce="mean")
    node_features = {}
    described = {}  # {name: its row of the table of features, [F]}
    if features:
        node_features, described = read_features(features, genes, notes)
    tables = Tables(
        genes=genes,
        relations=relations,
        edge_index=edge_index % len(genes),
        edge_type=edge_index[0] // len(genes),
        edge_weight=edge_weight,
        notes=notes,
        **node_features,
        **samples,
        **columns,
    )
    data_notes = optional("data_notes")
    if data_notes:
        files = (edges, perturbations, features)
        tables.notes = [*notes, *data_notes.notes_on(tables, files, described, row, bool(scores))]
    return tables


def number_in_order(values: Tensor) -> Tensor:
    """Numbers the distinct values among [n] from 0, in the order of their first rows, [n]."""
    _, group = values.unique(return_inverse=True)
    row = torch.arange(len(values))
    first_row = scatter(row, group, reduce="min")
    is_first = torch.zeros(len(values), dtype=torch.bool)
    is_first[first_row] = True
    number = is_first.cumsum(0) - 1  # the number of the value whose first row this is
    return number[first_row[group]]


def read_edges(
    path: str, node_number: dict[str, int], notes: list[str]
) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Returns relations, edge_index, edge_type and edge_weight of `Tables`.

    Adds new nodes to `node_number`, and warnings for the log to `notes`. Raises `DataError`.
    """
    header = read_header(path, notes, ("source", "target", "relation"), ("weight",))
    others = [name for name in header if name not in ("source", "target", "relation", "weight")]
    if others:
        raise DataError(
            f"{path}:1: unknown column {', '.join(others)!r:.60}: if it is the weight of edges, "
            "rename it to weight; otherwise remove it, or apply the recipe attention, which uses "
            "edge features"
        )
    relation_number = {}
    edges = []
    weights = []
    for rows in read_rows(path, header, has_bar=True):
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
    path: str, node_number: dict[str, int], notes: list[str], scores: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of `Tables` that the table of knock-outs has; raises `DataError`.

    Instead of `perturbed` and `perturbed_ptr`, it returns the `row`, `node` and `level` of each
    perturbed node, [total]. Adds new nodes to `node_number`, and warnings for the log to `notes`.
    If `scores` is empty, every column without a different meaning is a score.
    """
    chosen = list(map(str, scores))  # 1 is the name "1"
    header = read_header(path, notes, ("genes",), ("split", "weight", "sd"), kept=chosen)
    score_columns = [name for name in header[1:] if name not in ("split", "weight", "sd")]
    if not score_columns or {"weight", "sd"} <= set(header):
        problem = (
            "the header needs at least one score column after genes, and cannot have both weight "
            "and sd"
        )
        raise DataError(f"{path}:1: {problem}")
    targets = list(dict.fromkeys(chosen)) or score_columns
    if not set(targets) <= set(score_columns):
        raise DataError(
            f"{path}:1: data.scores={scores} contains other names than the score columns "
            f"{score_columns[:20]}: quote names that YAML does not read as text, such as 'NO'"
        )
    chunks = []
    num_rows = 0
    nodes = frozenset(node_number)
    for rows in read_rows(path, header, has_bar=True):
        row, name, names, level = checked_sets(rows, nodes)
        node = number_names(names, node_number)[name]
        y = rows.table(targets, ": correct it, or list other columns in data.scores")
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
    """Returns `Rows.sets`; the optional part notes rejects names that are not nodes."""
    row, name, names, level = rows.sets()
    data_notes = optional("data_notes")
    if data_notes:
        data_notes.check_names(rows, row, name, names, nodes)
    return row, name, names, level


def read_features(
    path: str, genes: list[str], notes: list[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the fields `features` and `feature_names` of `Tables`, and {name: values [F]}.

    Features are standardised, and 0 if missing. The values are those of the file. Warnings for the
    log are added to `notes`. Raises `DataError`.
    """
    header = read_header(path, notes, ("gene",))
    _, *names = header
    if not names:
        raise DataError(f"{path}:1: the header has no feature columns after gene")
    row_of = {}  # {name: row in the file}
    chunks = []
    for rows in read_rows(path, header, has_bar=True):
        for row, name in enumerate(rows.names("gene")):
            if name in row_of:
                raise rows.error(row, "gene", "has two rows: remove one of them")
            row_of[name] = len(row_of)
        chunks.append(rows.table(names))
    row = torch.tensor([row_of.get(gene, -1) for gene in genes])
    if (row < 0).all():
        raise DataError(f"{path}: no node of this table is in the tables of edges and knock-outs")
    table = torch.cat(chunks)
    values = table[row].where(row.unsqueeze(1) >= 0, math.nan)
    features = standardise(values).nan_to_num().float()
    return {"features": features, "feature_names": names}, dict(zip(row_of, table, strict=True))


def pack(row: Tensor, node: Tensor, level: Tensor, num_rows: int) -> dict:
    """Returns fields of `Tables`, given unsorted perturbed nodes; leaves out level 1, intact."""
    num_nodes = int(node.max()) + 1 if len(node) else 0
    order = stable_order(row * num_nodes + node)
    order = order[level[order] != 1]
    return {
        "perturbed": node[order],
        "perturbed_ptr": index2ptr(row[order], num_rows),
        "level": level[order],
    }
