"""The results of runs: the rows of test.tsv, and the options and best steps of several runs.

Also groups the rows of test.tsv into bootstrap clusters, and runs into the folds of a
cross-validation.

Shapes: n rows of T targets.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from errors import UserError, counted
from metrics import first_metric, names_in, quality


@dataclass
class Results:
    """The content of a test.tsv."""

    genes: list[str]  # perturbed genes of each row, separated by commas
    unseen: Tensor  # long [n, T], number of genes that no training row with the score perturbs
    # genes of each row that are unseen for at least one of its scores, separated by commas
    unseen_genes: list[str]
    targets: list[str]  # name of each of the T targets
    y: Tensor  # float64 [n, T], nan if a score is missing
    # `prediction` and further predictions of the loss, such as `sd`, float64 [n, T] each
    predictions: dict[str, Tensor]
    rivals: dict[str, Tensor]  # predictions of rivals by name, float64 [n, T] each
    weight: Tensor | None = None  # float64 [n], weight of each row; None: all weights are 1
    # float64 [n], standard deviation of the noise in each row's scores; the weight is 1 / sd**2
    sd: Tensor | None = None

    def __post_init__(self):
        if self.sd is not None and self.weight is None:
            self.weight = self.sd**-2

    def select(self, is_chosen: Tensor) -> "Results":
        """Returns the rows that have a chosen score; scores that are not chosen become nan.

        `is_chosen` is bool [n, T] or [n, 1].
        """
        rows = is_chosen.any(dim=1)
        return replace(
            self,
            genes=list(compress(self.genes, rows.tolist())),
            unseen=self.unseen[rows],
            unseen_genes=list(compress(self.unseen_genes, rows.tolist())),
            y=self.y[rows].where(is_chosen[rows], math.nan),
            predictions={name: values[rows] for name, values in self.predictions.items()},
            rivals={name: values[rows] for name, values in self.rivals.items()},
            weight=None if self.weight is None else self.weight[rows],
            sd=None if self.sd is None else self.sd[rows],
        )

    def levels(self) -> list[str]:
        """Returns the level of the genes of each row as a text, such as "0.3".

        The text is "" for a row without genes, and for a row with genes at different levels.
        """
        levels = []
        for names in self.genes:
            of_genes = {level_of(name) for name in names.split(",") if name}
            levels.append(of_genes.pop() if len(of_genes) == 1 else "")
        return levels

    def deletions(self) -> Tensor:
        """Returns the number of genes in each row, long [n]."""
        return torch.tensor([names.count(",") + 1 if names else 0 for names in self.genes])

    def clusters(self) -> list[list[tuple[str, str]]]:
        """Returns the one or two bootstrap clusters of each row. A cluster is (kind, name).

        The rows of a cluster are drawn together, because their errors are correlated. A row is in
        the cluster of each of its unseen genes, ("gene", name). If it has more than two unseen
        genes, the two genes that are unseen in the most rows are used. If it does not have unseen
        genes, it is in the cluster of all rows with the same set of genes at any levels, ("set",
        names).
        """
        unseen_genes = [names.split(",") for names in self.unseen_genes]
        num_rows = Counter(chain.from_iterable(unseen_genes))
        clusters = []
        for genes, unseen in zip(self.genes, unseen_genes, strict=True):
            if unseen == [""]:
                names = [name.removesuffix(f"={level_of(name)}") for name in genes.split(",")]
                clusters.append([("set", ",".join(names))])
            else:
                of_most_rows = sorted(unseen, key=num_rows.__getitem__, reverse=True)[:2]
                clusters.append([("gene", name) for name in of_most_rows])
        return clusters

    def cluster_numbers(self) -> Tensor:
        """Returns the numbers of each row's clusters, long [n, 2].

        The second number is -1 if the row is in one cluster. Clusters are numbered in the order of
        their first rows.
        """
        number = {}
        rows = []
        for clusters in self.clusters():
            numbers = [number.setdefault(cluster, len(number)) for cluster in clusters]
            rows.append([*numbers, -1][:2])
        return torch.tensor(rows)

    def columns(self) -> tuple:
        """Returns the names of targets, predictions and rivals, and whether weight and sd exist."""
        names = [tuple(names) for names in (self.targets, self.predictions, self.rivals)]
        return *names, self.weight is not None, self.sd is not None

    @property
    def prediction(self) -> Tensor:
        return self.predictions["prediction"]

    def row_keys(self) -> list[tuple[str, str, str]]:
        """Returns a key for each row: its genes, scores and unseen genes.

        Scores are rounded to twelve digits, as in the files of earlier versions of the template.
        """
        template = "%.12g\t" * len(self.targets)
        scores = [template % tuple(of_row) for of_row in self.y.tolist()]
        return list(zip(self.genes, scores, self.unseen_genes, strict=True))

    @property
    def row_weight(self) -> Tensor | float:
        """The weight of each row in metrics, [n, 1] or 1."""
        return 1.0 if self.weight is None else self.weight.unsqueeze(1)

    def counts(self) -> str:
        """Returns a text with the numbers of rows and targets, and whether rows are weighted."""
        text = f"{counted(len(self.y), 'test row')}, {counted(len(self.targets), 'score')}"
        return text if self.weight is None else f"{text}; rows are weighted"


def level_of(name: str) -> str:
    """Returns the level at the end of a gene's name in test.tsv, "0" for a deletion."""
    _, sign, level = name.partition("=")
    return level if sign else "0"


def folds_of(members: dict[str, Results]) -> dict[str, list[str]]:
    """Returns the folds of a cross-validation, {first member: all members with its test rows}.

    `members` are the rows of each run's test.tsv, by name. Different folds must have different
    rows. The only exception is a row with several nodes in a split by nodes: it may be in the folds
    of two of its nodes. Either different nodes of the row are unseen in the two folds, or several
    nodes are. Raises `UserError` if folds have other rows in common.
    """
    by_rows = defaultdict(list)
    for name, rows in members.items():
        by_rows[rows.columns(), tuple(rows.row_keys())].append(name)
    folds = {names[0]: names for names in by_rows.values()}
    tables = set()  # the different columns of members
    num_folds = Counter()  # number of folds with each row, for rows with at most one unseen gene
    for columns, keys in by_rows:
        tables.add(columns)
        num_folds.update({key for key in keys if "," not in key[2]})
    if len(tables) > 1 or max(num_folds.values(), default=0) > 1:
        raise UserError(
            f"{', '.join(folds)} share some test rows but not all, or have different columns: "
            "compare runs with the same table and split, or folds with the same data.split_seed, "
            "such as data.fold=0/5 and 1/5"
        )
    return folds


def together(folds: list[Results]) -> Results:
    """Returns the rows of all folds, concatenated. The folds have the same `columns`.

    If several folds test a row, the unseen genes of all these folds become its unseen genes. The
    row is then in the same bootstrap clusters in all these folds, because its errors are
    correlated.
    """
    joined = {}
    for name, values in vars(folds[0]).items():
        of_folds = [getattr(rows, name) for rows in folds]
        if isinstance(values, Tensor):
            joined[name] = torch.cat(of_folds)
        elif name in ("genes", "unseen_genes"):
            joined[name] = list(chain.from_iterable(of_folds))
        elif isinstance(values, dict):
            joined[name] = {key: torch.cat([fold[key] for fold in of_folds]) for key in values}
    rows = replace(folds[0], **joined)
    unseen = defaultdict(dict)  # names as keys, in order
    for genes, scores, names in rows.row_keys():
        unseen[genes, scores] |= dict.fromkeys(filter(None, names.split(",")))
    merged = [",".join(unseen[genes, scores]) for genes, scores, _ in rows.row_keys()]
    return replace(rows, unseen_genes=merged)


# ---- Comparison of runs --------------------------------------------------------------------------
def differing(described: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns {run: {key: value}} of the keys whose values differ between runs.

    `run.name` and `run.dir` are left out. A run without a key gets the value None, which does not
    count as a different value.
    """
    keys = []
    in_order = dict.fromkeys(chain.from_iterable(described.values()))
    for key in in_order:
        texts = {str(of_run[key]) for of_run in described.values() if key in of_run}
        if len(texts) > 1 and key not in ("run.name", "run.dir"):
            keys.append(key)
    return {name: {key: of_run.get(key) for key in keys} for name, of_run in described.items()}


def best_step(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the best step of a run, and the metrics of this step in validation and test.

    `rows` are the rows of the run's metrics.jsonl.
    """
    test = next((row for row in reversed(rows) if row["kind"] == "test"), {})
    step = test.get("best_step")
    vals = [row for row in rows if row["kind"] == "val" and row.get("step") == step]
    val = vals[0] if vals else {}
    shown = {"best step": step}
    for name in ("loss", *names_in(test)):
        shown[f"val {name}"] = val.get(name)
        shown[f"test {name}"] = test.get(name)
    return shown


def best_first(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the same results, sorted by `metrics.quality` in validation, best run first.

    `results` contains the result of `best_step` for each run.
    """

    def validated(name: str) -> tuple[float, float]:
        values = {"loss": math.nan}
        for key in (first_metric(), "loss"):
            value = results[name].get(f"val {key}")
            if value is not None:
                values[key] = value
        return quality(values)

    names = sorted(results, key=validated, reverse=True)
    return {name: results[name] for name in names}
