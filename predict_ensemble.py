"""Trained runs that predict together, on all ranks: `Ensemble`, of one run or of several.

Shapes: M runs, n samples, B of them in a batch, T scores.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from baseline import blank_baseline
from config import Config, expand_path, load_config
from data import KnockoutDataset
from data_tables import Tables
from ddp_setup import Distributed
from errors import UserError
from evaluate import compute_rows, evaluation_batch_size, load_batches, predict_rows
from mask import SharedGraph
from model import PARTS
from predict_sets import MOST
from run_checkpoint import load_model, read_checkpoint, read_graph
from run_folder import read_status
from task import KnockoutTask, make_dataset

log = logging.getLogger("predict_ensemble")


@dataclass
class Run:
    """A trained run."""

    checkpoint: dict[str, Any]
    config: Config
    graph: dict[str, Any]  # what its graph.pt holds

    @property
    def file(self) -> str:
        return self.checkpoint["file"]


def read_run(run: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Returns a run, given its folder, of which best.pt predicts, or a checkpoint file.

    Its options are its own but for `overrides`. Raises `UserError`.
    """
    path = Path(expand_path(str(run)))
    if path.is_dir():
        state = read_status(path).get("state")
        if state not in ("finished", None):
            log.warning(f"note      {path} is {state}: its best model so far predicts")
        path = path / "checkpoints" / "best.pt"
    checkpoint = read_checkpoint(path)
    lacking = {"graph", "basis", "pair_features", "trained"} - checkpoint.keys()
    if lacking:
        raise UserError(f"{path} is of another version of the template: predict with that one")
    graph = read_graph(path)
    of_graph = graph.pop("graph")
    if not graph.keys() <= {field.name for field in fields(Tables)}:
        raise UserError(f"{path} is of another version of the template: predict with that one")
    if of_graph != checkpoint["graph"]:
        raise UserError(f"the graph.pt of {path} is of another graph: copy that of its run folder")
    options = load_config(None, overrides, checkpoint["config"], checkpoint["file"])
    return Run(checkpoint, options, graph)


def check_same(first: Run, run: Run) -> None:
    """Raises `UserError` if two runs do not predict the same scores on the same graph."""
    if Path(run.file).resolve() == Path(first.file).resolve():
        raise UserError(f"{run.file} is named twice: name each run once")
    if list(run.graph["targets"]) != list(first.graph["targets"]):
        raise UserError(f"{run.file} has other scores than {first.file}")
    if run.checkpoint["graph"] != first.checkpoint["graph"]:
        raise UserError(f"{run.file} was trained on another graph than {first.file}")
    loss = run.config.optim.loss
    if loss != first.config.optim.loss:
        raise UserError(
            f"{run.file} was trained with optim.loss={loss}, {first.file} with "
            f"{first.config.optim.loss}"
        )


def task_of_run(
    config: Config, checkpoint: dict[str, Any], tables: Tables, graph: SharedGraph
) -> KnockoutTask:
    """Returns the task in which a run's model predicts, of tables that have no samples yet."""
    return KnockoutTask(
        config=config,
        tables=tables,
        fingerprint=checkpoint["data"],
        baseline=blank_baseline(len(tables.genes), len(tables.targets), checkpoint["basis"]),
        graph=graph,
        mean=checkpoint["mean"].to(graph.device),
        std=checkpoint["std"].to(graph.device),
        dataset=KnockoutDataset(tables, graph.degree),
        route="",
    )


def predict_parts(model: nn.Module, task: KnockoutTask, batch: Data) -> Tensor:
    """Returns the predictions of a batch and, behind each, its parts, float64 [B, T, 1 + 4].

    The `PARTS` are in the units of the scores or, for optim.loss=binary, of logits. What is known
    without the graph has the mean of the scores in it; those that the model does not have are 0.
    """
    parts = model.parts(task.graph, batch)
    prediction = sum(parts.values())
    none = torch.zeros_like(prediction)
    columns = [task.std * parts.get(name, none) for name in PARTS]
    columns[0] = task.mean + columns[0]
    return torch.stack([task.to_scores(prediction), *columns], dim=2)


class Ensemble:
    """Trained models of one graph and of the same scores, which predict the same samples.

    `predict` is called on all ranks, which share the samples; what it returns is the same on every
    rank.

    Args:
        runs: one or more.
        env: the ranks.

    Raises:
        UserError: a run does not go with the first.
    """

    def __init__(self, runs: Sequence[Run], env: Distributed):
        first = runs[0]
        for run in runs[1:]:
            check_same(first, run)
        self.env = env
        self.tables = Tables.of_graph(first.graph)
        dtypes = [run.config.optim.dtype for run in runs]
        dtype = max(dtypes, key=lambda dtype: dtype.itemsize)  # all models predict in the widest
        self.graph = SharedGraph(self.tables.graph()).to(env.device, dtype)
        self.files = [run.file for run in runs]
        self.tasks = []
        self.models = []
        for run in runs:
            task = task_of_run(run.config, run.checkpoint, self.tables, self.graph)
            model = task.build_model()
            load_model(model, run.checkpoint)
            self.tasks.append(task)
            self.models.append(model.to(env.device, dtype).eval())
        self.is_planned = False
        self.lock = RLock()  # planners and masks have memory of their own

    @property
    def targets(self) -> list[str]:
        """The name of each target."""
        return list(self.tables.targets)

    def columns(self, with_parts: bool = False) -> list[str]:
        """Returns the names of the columns that are predicted, one target after another."""
        names = ["prediction"]
        if len(self.models) > 1:
            names.append("sd")
        if with_parts:
            if self.tasks[0].config.optim.loss == "binary":
                names.append("logit")
            names += PARTS
        if len(self.targets) == 1:
            return names
        columns = []
        for target in self.targets:
            columns.append(target)
            columns += [f"{target}_{name}" for name in names[1:]]
        return columns

    def digits(self, with_parts: bool = False) -> Tensor:
        """Returns the number of significant digits of each column, long [C]."""
        columns_of_target = len(self.columns(with_parts)) // len(self.targets)
        return self.tasks[0].digits().repeat_interleave(columns_of_target)

    def predict(self, samples: Tables, with_parts: bool = False) -> Tensor:
        """Returns `columns` of n samples on the graph `self.tables`, float64 [n, T, columns of T].

        They are the mean of the models' predictions and, of several, the standard deviation.
        """
        if not len(samples.y):
            num_columns = len(self.columns(with_parts)) // len(self.targets)
            return torch.empty(0, len(self.targets), num_columns, dtype=torch.float64)
        with self.lock:
            of_models = self._predict_by_model(samples, with_parts)
        prediction, parts = of_models.mean(dim=0).tensor_split([1], dim=2)
        columns = [prediction]
        if len(of_models) > 1:
            columns.append(of_models[:, :, :, :1].std(dim=0))
        if with_parts and self.tasks[0].config.optim.loss == "binary":
            columns.append(parts.sum(dim=2, keepdim=True))
        return torch.cat([*columns, parts], dim=2)

    def _predict_by_model(self, samples: Tables, with_parts: bool) -> Tensor:
        """Returns predictions of each model, float64 [M, n, T, 1 or, with parts, 5]."""
        if not self.is_planned:
            self.plan(samples)
        rows = torch.arange(len(samples.y))
        predictions = []
        for task, model in zip(self.tasks, self.models, strict=True):
            task = task.with_samples(samples)
            if with_parts:
                batch_size = evaluation_batch_size(task)
                batches = load_batches(task.dataset, rows, batch_size, self.env)
                shape = (len(rows), len(self.targets), 1 + len(PARTS))
                function = partial(predict_parts, model, task)
                predictions.append(compute_rows(function, batches, shape, self.env))
            else:
                prediction = predict_rows(model, task, rows, self.env)
                predictions.append(prediction.unsqueeze(2))
        return torch.stack(predictions)

    def plan(self, samples: Tables) -> None:
        """Chooses how each model passes messages, for samples such as these, at least one."""
        for task, model in zip(self.tasks, self.models, strict=True):
            task.dataset, task.route = make_dataset(samples, self.graph, task.config)
            task.check_plan(model)
        self.is_planned = True

    @property
    def rows_at_once(self) -> int:
        """How many rows are predicted, and then written, at once: some seconds of work."""
        return min(MOST, 4 * evaluation_batch_size(self.tasks[0]))

    def check_parts(self) -> None:
        """Raises `UserError` if a model does not say what its predictions are the sums of."""
        for model, file in zip(self.models, self.files, strict=True):
            if not hasattr(model, "parts"):
                raise UserError(
                    f"the model of {file} has no parts: give it a method as `KnockoutGNN.parts`"
                )
