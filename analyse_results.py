"""Reads the results of runs: rows of test.tsv, their clusters, folds, options and best steps.

Shapes: n rows of T targets.
"""

import math
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import UserError, reason_of
from metrics import first_metric, names_in, quality
from run_results import OUTPUT


@dataclass
class Results:
    """The content of a test.tsv."""

    genes: list[str]  # the genes of each row, separated by commas
    unseen: Tensor  # long [n, T], number of genes that no training row with the score perturbs
    # For each row, its genes that are unseen for at least one of its scores.
    unseen_genes: list[str]
    targets: list[str]  # name of each of the T targets
    y: Tensor  # float64 [n, T], nan if a score is missing
    # `prediction` and the loss's further predictions, float64 [n, T]
    predictions: dict[str, Tensor]
    rivals: dict[str, Tensor]  # predictions of rivals by name, float64 [n, T] each
    weight: Tensor | None = None  # float64 [n], weight of each row; None: all are 1
    # float64 [n], standard deviation of each row's scores; the weight is then 1 / sd**2
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
        """Returns the level of each row's genes as a text, such as "0.3".

        It is "" if a row has no genes, or genes at different levels.
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
        """Returns the one or two bootstrap clusters of each row, each as (kind, name).

        A row is in the cluster of each of its unseen genes, ("gene", name). If it has none, it is
        in the cluster of its set of genes at any levels, ("set", names). The errors of rows in a
        cluster are correlated. If a row has more than two unseen genes, the two with the most rows
        are used.
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
        """Returns the numbers of each row's clusters, long [n, 2], -1 if there is no second one.

        Clusters are numbered in the order of their first rows.
        """
        number = {}
        rows = []
        for clusters in self.clusters():
            numbers = [number.setdefault(cluster, len(number)) for cluster in clusters]
            rows.append([*numbers, -1][:2])
        return torch.tensor(rows)

    def columns(self) -> tuple:
        """Returns the names of all score columns, and whether there are a weight and an `sd`."""
        names = [tuple(names) for names in (self.targets, self.predictions, self.rivals)]
        return *names, self.weight is not None, self.sd is not None

    @property
    def prediction(self) -> Tensor:
        return self.predictions["prediction"]

    def row_keys(self) -> list[tuple[str, bytes, str]]:
        """Returns the genes, scores and unseen genes of each row, which identify it."""
        scores = [of_row.tobytes() for of_row in self.y.numpy()]
        return list(zip(self.genes, scores, self.unseen_genes, strict=True))

    @property
    def row_weight(self) -> Tensor | float:
        """The weight of each row in metrics, [n, 1] or 1."""
        return 1.0 if self.weight is None else self.weight.unsqueeze(1)

    def counts(self) -> str:
        """Returns a text with the numbers of rows and scores, and whether rows are weighted."""
        text = f"rows {len(self.y):,}, scores {len(self.targets):,}"
        return text if self.weight is None else f"{text}; rows are weighted"


def level_of(name: str) -> str:
    """Returns the level at the end of a gene's name in test.tsv, "0" for a deletion."""
    _, sign, level = name.partition("=")
    return level if sign else "0"


def read_results(path: Path) -> Results:
    """Returns the rows of a test.tsv; raises `UserError` if its format is wrong."""
    genes = []
    unseen = []
    unseen_genes = []
    weights = array("d")
    numbers = array("d")
    line_number = 1
    try:
        with path.open(encoding="utf-8") as file:
            header = file.readline().rstrip("\n").split("\t")
            of_rows, targets, predicted, rivals = names_in_header(header)
            for line in file:
                line_number += 1
                cells = line.rstrip("\n").split("\t")
                if len(cells) != len(header):
                    raise ValueError(f"{len(cells)} cells, but the header has {len(header)}")
                genes.append(cells[0])
                counts = [int(count) for count in cells[1].split(",")]
                if len(counts) not in (1, len(targets)):
                    raise ValueError(
                        f"{len(counts)} numbers of unseen genes for {len(targets)} scores"
                    )
                unseen.append(torch.tensor(counts).expand(len(targets)))
                unseen_genes.append(cells[2])
                weights.extend(map(float, cells[3 : len(of_rows)]))
                numbers.extend([float(cell or "nan") for cell in cells[len(of_rows) :]])
            if not genes:
                raise ValueError("there are no rows")
    except OSError as error:
        problem = f"cannot read {path}: {reason_of(error)}"
        raise UserError(f"{problem}: give the folder of a run that has finished") from None
    except ValueError as error:
        raise UserError(
            f"{path}:{line_number}: {error}: repeat the command of the run to write the file again"
        ) from None
    scores = torch.frombuffer(numbers, dtype=torch.float64).view(len(genes), len(targets), -1)
    y, *columns = scores.movedim(2, 0).contiguous()
    rows = Results(
        genes=genes,
        unseen=torch.stack(unseen),
        unseen_genes=unseen_genes,
        targets=targets,
        y=y,
        predictions=dict(zip(predicted, columns, strict=False)),
        rivals=dict(zip(rivals, columns[len(predicted) :], strict=True)),
    )
    if weights:
        weight = torch.tensor(weights, dtype=torch.float64)
        rows = replace(rows, **{of_rows[-1]: weight})
    return rows


def names_in_header(header: list[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Returns the names of the columns of rows, of the targets, the predictions and the rivals.

    Raises `ValueError` if they are not those of `run_results.result_lines`.
    """
    of_rows = ["genes", "unseen", "unseen_genes"]
    if len(header) > 3 and header[3] in ("weight", "sd"):
        of_rows.append(header[3])
    columns = header[len(of_rows) :]
    targets = []
    for name, next_name in pairwise(columns):
        if next_name == f"{name}_prediction":
            targets.append(name)
    num_columns = len(columns) // max(1, len(targets))
    suffixes = [name.removeprefix(columns[0]) for name in columns[:num_columns]]
    expected = [target + suffix for target in targets for suffix in suffixes]
    if not targets or header != [*of_rows, *expected]:
        names = "genes, unseen, unseen_genes and the same columns for each score"
        raise ValueError(f"the header is not {names}")
    names = [suffix.removeprefix("_") for suffix in suffixes[1:]]
    predicted = [name.removeprefix(OUTPUT) for name in names if f"{name}_".startswith(OUTPUT)]
    return of_rows, targets, predicted, names[len(predicted) :]


def folds_of(members: dict[str, Results]) -> dict[str, list[str]]:
    """Returns the names of the members with the same test rows, by the name of the first one.

    Different folds have different rows. In a split by nodes, a row may be in the folds of two of
    its nodes, but then different nodes are unseen in the two folds, or several nodes are. Raises
    `UserError` if folds have other rows in common.
    """
    by_rows = defaultdict(list)
    for name, rows in members.items():
        by_rows[rows.columns(), tuple(rows.row_keys())].append(name)
    folds = {names[0]: names for names in by_rows.values()}
    tables = set()  # the columns of all members
    num_folds = Counter()  # number of folds of each row
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
    """Returns the rows of folds with the same `columns`, one fold after another.

    If several folds test a row, its unseen genes are those of all these folds, because its errors
    are correlated.
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


def are_equal_in_files(prediction: Tensor, other: Tensor) -> bool:
    """Returns whether two predictions [n, T] are equal up to the rounding in files.

    They may differ by 1e-4 of the standard deviation of `other` over the rows.
    """
    tolerance = 1e-4 * other.std(dim=0, correction=0)
    return bool(((prediction - other).abs() <= tolerance).all())


# ---- Comparison of runs --------------------------------------------------------------------------
def differing(described: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns {run: {key: value}} of the keys whose values differ between runs, except names.

    If a run does not have a key, its value is None, and does not count as different.
    """
    keys = []
    in_order = dict.fromkeys(chain.from_iterable(described.values()))
    for key in in_order:
        texts = {str(of_run[key]) for of_run in described.values() if key in of_run}
        if len(texts) > 1 and key not in ("run.name", "run.dir"):
            keys.append(key)
    return {name: {key: of_run.get(key) for key in keys} for name, of_run in described.items()}


def best_step(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the best step of a metrics.jsonl, and its metrics in validation and test."""
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
    """Returns the `best_step` of runs, sorted by `metrics.quality` in validation, best first."""

    def validated(name: str) -> tuple[float, float]:
        values = {"loss": math.nan}
        for key in (first_metric(), "loss"):
            value = results[name].get(f"val {key}")
            if value is not None:
                values[key] = value
        return quality(values)

    names = sorted(results, key=validated, reverse=True)
    return {name: results[name] for name in names}
