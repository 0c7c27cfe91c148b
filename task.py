"""The task: everything between the tables and the loss of a run, as one object.

`KnockoutTask` reads the tables, fits the baseline, builds graph, dataset and model, and says what a
prediction is worth. It never touches DDP, the optimiser, the order of the samples or a seed; those
are in train.py. A task of your own keeps the names that train.py and predict.py use.

Shapes: N nodes, n rows of T scores, B samples in a batch.
"""

import copy
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    mse_loss,
)
from torch_geometric.data import Data
from torch_geometric.profile import get_data_size

import data
from baseline import UNSOLVED, Baseline, blank_baseline, effective_share, load_baseline
from config import Config
from data import KnockoutDataset, make_loader, target_nodes, weight_scale
from data_tables import OF_SAMPLES, SPLITS, Tables
from ddp_setup import Distributed
from errors import UserError
from mask import SharedGraph
from metrics import compare, mse, weighted_mean
from model import PARTS, KnockoutGNN
from run_progress import progress_bar

log = logging.getLogger("task")
LARGE_BATCH = 8192  # samples that are predicted at once where each costs next to nothing
FEW = 0.1  # of the training rows, as which all count by their weights, from which the log says so
MOST_KEPT = 2**29  # bytes of batches that are kept for the next validation


@dataclass
class KnockoutTask:
    """The tables of a run, and what is made of them."""

    config: Config
    tables: Tables
    fingerprint: str  # a hash of the tables
    baseline: Baseline  # what is known without the graph, where training starts
    graph: SharedGraph  # on the device
    mean: Tensor  # float64 [T], of the scores, on the device; of binary ones, a logit
    std: Tensor  # float64 [T], of the scores, on the device; models predict in this unit
    dataset: KnockoutDataset
    route: str  # how the model passes messages, for the log

    @classmethod
    def load(cls, config: Config, env: Distributed) -> "KnockoutTask":
        """Returns the task of the tables that `config` names; wrong input raises on every rank."""
        with env.sync_errors():
            return cls.from_tables(data.load(config.data), config, env.device)

    @classmethod
    def from_tables(
        cls, tables: Tables, config: Config, device: torch.device | str = "cpu"
    ) -> "KnockoutTask":
        """Returns the task of tables with a split; raises `UserError` if the options do not fit."""
        check_scores(tables, config)
        fingerprint = tables.fingerprint()
        baseline = load_baseline(tables, fingerprint, config.data.cache_dir, config.optim.loss)
        graph = SharedGraph(tables.graph()).to(device, config.optim.dtype)
        mean = baseline.mean.to(device)
        std = baseline.std.to(device)
        dataset, route = make_dataset(tables, graph, config)
        return cls(config, tables, fingerprint, baseline, graph, mean, std, dataset, route)

    @classmethod
    def of_run(
        cls, config: Config, checkpoint: dict[str, Any], tables: Tables, graph: SharedGraph
    ) -> "KnockoutTask":
        """Returns the task in which a run's model predicts, whose tables have no samples yet."""
        size = (len(tables.genes), len(tables.targets))
        return cls(
            config=config,
            tables=tables,
            fingerprint=checkpoint["data"],
            baseline=blank_baseline(*size, checkpoint["basis"]),
            graph=graph,
            mean=checkpoint["mean"].to(graph.device),
            std=checkpoint["std"].to(graph.device),
            dataset=KnockoutDataset(tables, graph.degree),
            route="",
        )

    def planned_for(self, samples: Tables) -> "KnockoutTask":
        """Returns the task that predicts samples such as these, at least one, on the same graph."""
        dataset, route = make_dataset(samples, self.graph, self.config)
        return replace(self, tables=samples, dataset=dataset, route=route)

    def with_samples(self, samples: Tables) -> "KnockoutTask":
        """Returns the task that predicts other samples, on the same graph."""
        return replace(self, tables=samples, dataset=replace(self.dataset, tables=samples))

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split, in ascending order."""
        return self.tables.rows(split)

    def origin(self) -> dict[str, Any]:
        """Returns what a checkpoint says of where it is from."""
        return {
            "config": asdict(self.config),
            "data": self.fingerprint,
            "graph": self.tables.fingerprint(without=OF_SAMPLES),
            "nodes": self.tables.genes,
            "relations": self.tables.relations,
            "features": list(self.tables.feature_names),
            "targets": list(self.tables.targets),
            "mean": self.mean.cpu(),
            "std": self.std.cpu(),
            "basis": self.baseline.basis,
        }

    @property
    def evaluation_batch_size(self) -> int:
        """The samples that are predicted at once, over all ranks."""
        if self.config.model.has_knockout_pass:
            return self.config.data.batch_size
        return max(self.config.data.batch_size, LARGE_BATCH)

    def build_model(self) -> nn.Module:
        """Returns the model that is trained, on the CPU; raises `UserError`."""
        options = self.config.model
        nodes = target_nodes(self.tables) if options.readout == "nodes" else None
        return KnockoutGNN.from_tables(options, self.tables, self.baseline, nodes)

    def check_plan(self, model: nn.Module) -> None:
        """Drops the plan of batches, as the log says, if `model` computes other changes itself."""
        if self.dataset.transform is None:
            return
        from model_reach import is_exact

        some_rows = range(0, len(self.dataset), len(self.dataset) // 3 + 1)
        batch = self.dataset.__getitems__(some_rows).to(self.graph.device)
        if not is_exact(model, self.graph, batch):
            self.dataset = replace(self.dataset, transform=None)
            self.route = "shared"
            log.warning(
                "note      model_reach.py computes other changes of states than model.py: it is "
                "not used, which is slower; edit it, or delete it and set "
                "model.message_passing=shared"
            )

    def loss(self, prediction: Tensor, batch: Data) -> Tensor:
        """Returns the weighted sum of a batch's losses for each score, [T].

        A loss is a squared error over the variance of the scores or, for optim.loss=binary, a
        cross-entropy of logits. `prediction` is the model's, [B, T].
        """
        if self.config.optim.loss == "binary":
            logit = self.rescale(prediction)
            losses = binary_cross_entropy_with_logits(logit, batch.y, reduction="none")
        else:
            y = ((batch.y - self.mean) / self.std).to(prediction.dtype)
            losses = mse_loss(prediction, y, reduction="none")
        return (batch.weight * losses).sum(dim=0)

    def rescale(self, prediction: Tensor) -> Tensor:
        """Returns predictions of the model in the units of the scores, or logits, float64."""
        return self.mean + self.std * prediction

    def to_scores(self, prediction: Tensor) -> Tensor:
        """Returns predictions of the model as scores, or probabilities of 1, float64."""
        scores = self.rescale(prediction)
        return scores.sigmoid() if self.config.optim.loss == "binary" else scores

    def predict_parts(self, model: nn.Module, batch: Data) -> Tensor:
        """Returns the predictions of a batch and, behind each, its parts, float64 [B, T, 1 + 3].

        The `PARTS` are in the units of the scores or, for optim.loss=binary, of logits. What is
        known without the graph has the mean of the scores in it; those that the model does not have
        are 0.
        """
        parts = model.parts(self.graph, batch)
        prediction = sum(parts.values())
        none = torch.zeros_like(prediction)
        columns = [self.std * parts.get(name, none) for name in PARTS]
        columns[0] = self.mean + columns[0]
        return torch.stack([self.to_scores(prediction), *columns], dim=2)

    def metrics(self, split: str, prediction: Tensor) -> dict[str, float]:
        """Returns what predictions of a split's rows, [n, T], are worth, beside the baseline.

        A figure is the mean over the targets for which it is defined, nan if there are none: the
        weighted mean of `loss`, and metrics without and, if rows have weights, with these. `n` rows
        have a score, of `rows`.
        """
        rows = self.rows(split)
        y = self.tables.y[rows]
        weight = None if self.tables.weight is None else self.tables.weight[rows]
        if self.config.optim.loss == "binary":
            losses = binary_cross_entropy(prediction, y.nan_to_num(), reduction="none")
        else:
            losses = (prediction - y.nan_to_num()).square()
        loss = weighted_mean(losses, self.tables.score_weight(rows))
        if self.config.optim.loss == "squared":
            loss = loss / self.baseline.std.square()
        figures = {
            "loss": loss,
            "mse": mse(y, prediction),
            **compare(y, prediction, self.baseline.prediction[rows], weight),
        }
        means = {name: values.nanmean().item() for name, values in figures.items()}
        num_scored = int((~y.isnan()).any(dim=1).sum())
        return {**means, "n": num_scored, "rows": len(rows)}

    def result_lines(self, prediction: Tensor) -> Iterator[str]:
        """Yields the lines of test.tsv: for each test row its nodes, and those that are unseen.

        Of these, it gives the number, one for each score if they differ, and the names. Then follow
        the column `weight` or `sd` if the table has it, and for each target score, prediction
        [n, T] and baseline; a missing score is an empty cell.
        """
        tables = self.tables
        rows = tables.rows("test")
        baseline = self.baseline.prediction[rows]
        scores = torch.stack([tables.y[rows], prediction, baseline], dim=2)
        values = scores.flatten(start_dim=1)
        digits = torch.repeat_interleave(self.digits(), scores.size(2))
        header = ["genes", "unseen", "unseen_genes"]
        name = "weight" if tables.sd is None else "sd"
        of_rows = getattr(tables, name)
        if of_rows is not None:
            header.append(name)
            values = torch.cat([of_rows[rows].unsqueeze(1), values], dim=1)
            digits = torch.cat([torch.tensor([7]), digits])
        for target in tables.targets:
            header += [target, f"{target}_prediction", f"{target}_baseline"]
        yield "\t".join(header) + "\n"
        yield from table_lines(self._labels("test"), values, digits)

    def digits(self) -> Tensor:
        """Returns how many digits of each score are written, long [T].

        They are 7 and, where a score's mean is large, as many more as its deviations lie behind.
        """
        distance = (self.mean.abs() / self.std).cpu().clamp(min=1)
        return (7 + distance.log10().floor().long()).clamp(max=17)

    def _labels(self, split: str) -> Iterator[str]:
        """Yields the first cells of the lines of test.tsv."""
        tables = self.tables
        is_in_split = tables.is_in(split)[tables.sample()]
        perturbed = tables.perturbed[is_in_split]
        genes = tables.names(perturbed, tables.level[is_in_split])
        present = ~tables.y[tables.sample()[is_in_split]].isnan()
        is_named = (present & ~tables.is_seen()[perturbed]).any(dim=1)  # for a score of the row
        names = []
        for node, is_unseen in zip(perturbed.tolist(), is_named.tolist(), strict=True):
            names.append(tables.genes[node] if is_unseen else "")
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

    def summary(self) -> str:
        """Returns the numbers of nodes, edges and samples as a line for the log."""
        tables = self.tables
        perturbed = tables.perturbed.unique()
        has_edge = np.isin(perturbed, tables.edge_index)  # ten times faster than torch
        isolated = perturbed[~has_edge]
        counts = tables.perturbed_ptr.diff()
        splits = ", ".join(f"{len(tables.rows(split)):,} {split}" for split in SPLITS)
        some_targets = ", ".join(tables.targets[:5])
        text = (
            f"{len(tables.genes):,} nodes of {tables.features.size(1):,} features "
            f"({len(isolated):,} of {len(perturbed):,} knocked-out ones isolated), "
            f"{len(tables.edge_type):,} edges in {len(tables.relations)} relations "
            f"of {tables.edge_attr.size(1):,} features, "
            f"{len(tables.y):,} samples of {counts.min()} to {counts.max()} knock-outs: "
            f"{splits}, {(tables.split < 0).sum():,} in no split; "
            f"{len(tables.targets):,} scores: {some_targets}"
        )
        if tables.left_out:
            text += f"; columns left out: {', '.join(tables.left_out)}"
        if not self.baseline.is_combined:
            text += "; the baseline is a sum of effects, as the table is large"
        return text

    def notes(self) -> list[str]:
        """Returns sentences for the log on what may be wrong with the tables."""
        notes = list(self.tables.notes)
        error = self.baseline.error.max()
        if error > UNSOLVED:
            notes.append(f"the baseline's fit has not converged: {error:.0e} deviations are left")
        rows = self.tables.rows("train")
        share = effective_share(self.tables.score_weight(rows)).min().item()
        if share < FEW:
            notes.append(f"by weight, the training rows count as {share:.1%} of them would")
        return notes


def make_dataset(tables: Tables, graph: SharedGraph, config: Config) -> tuple[KnockoutDataset, str]:
    """Returns the dataset of tables on the graph, and how the model passes messages, a text."""
    scale = 1.0 if tables.split is None else weight_scale(tables)
    dataset = KnockoutDataset(tables, graph.degree, scale=scale)
    options = config.model
    if not options.has_knockout_pass:
        return dataset, f"no knock-out pass, as model.readout={options.readout}"
    if options.message_passing not in ("auto", "shared", "reach"):
        return dataset, options.message_passing
    if importlib.util.find_spec("model_reach") is None:  # a copy may do without it
        if options.message_passing != "shared":
            raise UserError("there is no model_reach.py: set model.message_passing=shared")
        return dataset, "shared"
    from model_reach import plan_route

    planner, route = plan_route(graph, dataset, options.message_passing, options.layers)
    return replace(dataset, transform=planner), route


def check_scores(tables: Tables, config: Config) -> None:
    """Raises `UserError` for scores that no training or validation row has, or of a wrong kind.

    Notes scores that are missing elsewhere, and options that do not suit.
    """
    for split in SPLITS:
        is_missing = tables.y[tables.rows(split)].isnan().all(dim=0)
        names = [name for name, missing in zip(tables.targets, is_missing, strict=True) if missing]
        if not names:
            continue
        problem = f"no {split} row has a score '{names[0]}'"
        if len(names) > 1:
            problem = f"no {split} row has a score {', '.join(names[:10])}"
        if split == "train" or (split == "val" and len(names) == len(tables.targets)):
            raise UserError(f"{problem}: remove that column, or change the split")
        log.warning(f"note      {problem}: it does not count there")
    binary = bool(((tables.y == 0) | (tables.y == 1) | tables.y.isnan()).all())
    if config.optim.loss == "binary" and not binary:
        raise UserError("optim.loss=binary needs scores of 0 and 1: set optim.loss=squared")
    if config.optim.loss == "squared" and binary:
        log.warning("note      all scores are 0 or 1: optim.loss=binary predicts probabilities")
    if config.model.readout != "nodes" and set(tables.targets) <= set(tables.genes):
        log.warning("note      all scores are named after nodes: model.readout=nodes suits them")


def batches_of_rank(task: KnockoutTask, rows: Tensor, env: Distributed) -> Sequence[Tensor]:
    """Returns the rows of each batch in which this rank predicts its share of some rows."""
    rows_of_rank = rows[env.rank :: env.world_size]
    return rows_of_rank.split(math.ceil(task.evaluation_batch_size / env.world_size))


class KeptBatches:
    """The batches in which this rank predicts its share of some rows, which are predicted often.

    Those that fit in `MOST_KEPT` are made, and planned, by the first iteration alone.
    """

    def __init__(self, task: KnockoutTask, rows: Tensor, env: Distributed):
        self.dataset = task.dataset
        self.batches = batches_of_rank(task, rows, env)
        self.device = env.device
        self.kept = []
        self.bytes_left = MOST_KEPT

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Data]:
        for batch in self.kept:
            yield copy.copy(batch)  # as `to` changes a batch in place
        others = self.batches[len(self.kept) :]
        for batch in make_loader(self.dataset, others, workers=0, device=self.device):
            self.bytes_left -= get_data_size(batch)
            if self.bytes_left >= 0:
                self.kept.append(copy.copy(batch))
            yield batch


def predict_rows(
    model: nn.Module,
    task: KnockoutTask,
    rows: Tensor,
    env: Distributed,
    kept: KeptBatches | None = None,
) -> Tensor:
    """Returns predictions of these rows of the task on every rank, float64 [len(rows), T].

    They are those of the bare model in the units of the scores, probabilities if optim.loss=binary.
    `kept` are the batches of these rows, if they are predicted often.
    """
    model.eval()

    def scores(batch: Data) -> Tensor:
        return task.to_scores(model(task.graph, batch))

    return compute_rows(scores, (len(task.tables.targets),), task, rows, env, kept)


@torch.no_grad()
def compute_rows(
    function: Callable[[Data], Tensor],
    shape: tuple[int, ...],
    task: KnockoutTask,
    rows: Tensor,
    env: Distributed,
    kept: KeptBatches | None = None,
) -> Tensor:
    """Returns a function of these rows of the task on every rank, float64 [len(rows), *shape].

    It takes a batch on the device, and gives [B, *shape]. Each row is computed on one rank; the
    all-reduce adds only zeros to it and is therefore exact.
    """
    values = torch.zeros((len(rows), *shape), dtype=torch.float64, device=env.device)
    values_of_rank = values[env.rank :: env.world_size]  # a view
    batches = kept
    if kept is None:
        rows_of_batches = batches_of_rank(task, rows, env)
        batches = make_loader(task.dataset, rows_of_batches, workers=0, device=env.device)
    start = 0
    for batch in progress_bar(batches, "predicting", unit="batch", is_shown=env.rank == 0):
        with env.phase("evaluation"):
            if env.stop and env.stop.code():  # all ranks will stop; the result is discarded
                break
            of_batch = function(batch.to(env.device, non_blocking=True))
            values_of_rank[start : start + len(of_batch)] = of_batch
            start += len(of_batch)
    return env.sum(values).cpu()


def table_lines(sets: Iterator[str], values: Tensor, digits: Tensor) -> Iterator[str]:
    """Yields a line for each row of values [n, C]: its set, and a cell each, empty for nan.

    `digits` says how many significant digits each column has, long [C].
    """
    template = "".join(f"\t%.{count}g" for count in digits.tolist()) + "\n"
    for some_values in values.split(100):  # as lists, they take four times the memory
        for row in some_values.tolist():
            yield next(sets) + (template % tuple(row)).replace("\tnan", "\t")
