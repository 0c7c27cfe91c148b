"""Predictions with trained runs: `Predictor` for Python, and `Ensemble` for use on all ranks.

Shapes: n samples or sets of knock-outs, B samples in a batch, T scores. A model has C output
columns for each score.
"""

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from config import Config, all_options, by_key, expand_path, override
from data import KnockoutDataset
from data_cells import Rows
from data_tables import Tables
from ddp_setup import DDPConfig, Distributed
from errors import UserError, counted
from evaluate import compute_rows, evaluation_batch_size, predict_rows
from losses import LOSSES
from mask import SharedGraph
from parts import optional
from predict_tables import MOST, Chunk, chunk_of, read_graph, tables_of_graph, unknown_nodes
from run_checkpoint import load_model, read_checkpoint
from task import KnockoutTask, make_dataset

log = logging.getLogger("predictor")
# The names of the terms that add up to a prediction, in the order in which the model has them: the
# prediction without the graph, the local readout, the features of pairs, and the knock-out pass.
TERMS = ("without_graph", "local", "pairs", "knockout")
SETS_AT_ONCE = 100_000
# If the mean or the standard deviation of the scores differs between two runs by more than this, in
# units of the standard deviation, there is a warning. With several scores, the median decides.
MOST_OTHER = 0.4


# ---- Runs ----------------------------------------------------------------------------------------
@dataclass
class Run:
    """A trained run: its best.pt or another checkpoint, and its graph.pt."""

    checkpoint: dict[str, Any]
    config: Config
    graph: dict[str, Any]  # the fields of `Tables` that describe the graph
    trained: dict[str, Any]  # the `training_range` of the run's tables

    @property
    def file(self) -> str:  # the path of the checkpoint
        return self.checkpoint["file"]


def read_run(run: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Reads a run, given its folder, whose best.pt is used, or a checkpoint file.

    The options are read from the checkpoint. `overrides` are options `section.key=value` that
    replace them. Raises `UserError`.
    """
    path = Path(expand_path(str(run)))
    if path.is_dir():
        state = "finished"  # is assumed if the run has no readable status.json
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads((path / "status.json").read_text("utf-8"))["state"]
        if state != "finished":
            log.warning(
                f"note      predictions use the best model of {path} so far, because the state of "
                f"this run is {state}"
            )
        path = path / "checkpoints" / "best.pt"
    checkpoint = read_checkpoint(path)
    graph = read_graph(path)
    of_graph = graph.pop("graph", None)
    trained = graph.pop("trained", None)
    lacking = {"graph", "basis", "pair_features"} - checkpoint.keys()
    if lacking or trained is None or not graph.keys() <= {field.name for field in fields(Tables)}:
        raise UserError(
            f"{path} was created by a different version of the template: predict with that version"
        )
    if of_graph != checkpoint["graph"]:
        raise UserError(
            f"the graph.pt of {path} describes a different graph: copy the graph.pt of its run"
        )
    return Run(checkpoint, options_of_run(checkpoint, overrides), graph, trained)


def options_of_run(checkpoint: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Returns the options of a checkpoint, with the `overrides` of the command line.

    An option of the checkpoint that this code does not have raises `UserError`, except if it is one
    of the checkpoint's `free_options`, which do not change the model. A wrong value raises
    `UserError`, too.
    """
    options = by_key(checkpoint["config"])
    unknown = options.keys() - all_options().keys() - set(checkpoint.get("free_options", []))
    if unknown:
        raise UserError(
            f"{checkpoint['file']} was trained with the option {min(unknown)}, which this code "
            "does not have: use the code that trained it, or train again"
        )
    return override(options, overrides)


def note_other_code(run: Run) -> None:
    """Logs which code files of this process differ from the files that trained a run."""
    changes = optional("run_changes")
    if changes is None:
        return
    # Modules that only one of them has loaded do not matter: a notebook may load more modules.
    edited = changes.other_code(run.checkpoint, changes.code_digests())
    if edited:
        log.warning(f"note      {run.file} was trained with {edited}")


def check_same(first: Run, run: Run) -> None:
    """Raises `UserError` if two runs do not predict the same scores on the same graph."""
    if Path(run.file).resolve() == Path(first.file).resolve():
        raise UserError(f"{run.file} is listed twice: list each run once")
    both = f"{run.file} and {first.file}"
    if list(run.graph["targets"]) != list(first.graph["targets"]):
        raise UserError(f"{both} were trained on different scores: give runs with the same scores")
    if run.checkpoint["graph"] != first.checkpoint["graph"]:
        raise UserError(f"{both} were trained on different graphs: give runs with the same graph")
    loss = run.config.optim.loss
    if loss != first.config.optim.loss:
        raise UserError(
            f"{run.file} was trained with optim.loss={loss}, but {first.file} with "
            f"optim.loss={first.config.optim.loss}: give runs with the same loss"
        )


def notes_on_members(checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields warnings about the checkpoints of an ensemble.

    A warning is about a run that has the same parameters as an earlier run, or whose scores seem to
    have a different unit from the first run's scores.
    """
    for number, run in enumerate(checkpoints):
        first = checkpoints[0]
        if any(are_equal(run["model"], other["model"]) for other in checkpoints[:number]):
            yield (
                f"{run['file']} has the same parameters as another run: train each run with a "
                "different run.seed"
            )
        if run.get("mean") is None:  # the checkpoint is from a custom task
            continue
        shift = (run["mean"] - first["mean"]).abs().maximum((run["std"] - first["std"]).abs())
        if (shift / run["std"].minimum(first["std"])).median() > MOST_OTHER:
            yield (
                f"the scores of {run['file']} and {first['file']} differ in their means or "
                "standard deviations: use the same unit for all runs"
            )


def are_equal(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Returns whether two state dicts have the same keys and equal tensors."""
    names = tensors.keys()
    return names == others.keys() and all(torch.equal(tensors[n], others[n]) for n in names)


def task_of_run(
    config: Config, checkpoint: dict[str, Any], tables: Tables, graph: SharedGraph
) -> KnockoutTask:
    """Returns a task that builds and applies a run's model; its `tables` have no samples yet."""
    criterion = LOSSES[config.optim.loss](checkpoint["mean"], checkpoint["std"])
    return KnockoutTask(
        config=config,
        tables=tables,
        fingerprint=checkpoint["data"],
        graph=graph,
        criterion=criterion.to(graph.device),
        dataset=KnockoutDataset(tables, graph.degree),
        route="",
        basis=checkpoint["basis"],
    )


def predict_parts(
    model: nn.Module, task: KnockoutTask, names: Sequence[str], batch: Data
) -> Tensor:
    """Returns the C outputs for each score of a batch, followed by the terms of the first output.

    The result is float64 [B, T, C + terms]; `names` selects the terms. The terms are in the unit of
    the scores or, if the loss has a link, of the link, such as logits. The first term, which is the
    prediction without the graph, includes the mean of the scores. Terms that the model does not
    have are 0.
    """
    parts = model.parts(task.graph, batch)
    output = sum(parts.values())
    none = torch.zeros_like(output)
    columns = []
    for name in names:
        part = task.by_score(parts.get(name, none), batch)
        columns.append(task.criterion.std * part[:, :, 0])
    columns[0] = task.criterion.mean + columns[0]
    return torch.cat([task.by_score(output, batch), torch.stack(columns, dim=2)], dim=2)


# ---- On all ranks --------------------------------------------------------------------------------
class Ensemble:
    """One or more trained models that predict the same samples, on the same graph.

    All ranks call `predict`. Each rank predicts some of the samples, and all ranks get the complete
    result.

    Args:
        runs: one or more runs with the same graph, scores and loss.
        ddp: the process group.

    Raises:
        UserError: the runs differ in their graph, scores or loss, or a run is listed twice.
    """

    def __init__(self, runs: Sequence[Run], ddp: Distributed):
        first = runs[0]
        for run in runs[1:]:
            check_same(first, run)
        self.ddp = ddp
        self.tables = tables_of_graph(first.graph)
        dtypes = [run.config.optim.dtype for run in runs]
        dtype = max(dtypes, key=lambda dtype: dtype.itemsize)  # all models use the widest dtype
        self.graph = SharedGraph(self.tables.graph()).to(ddp.device, dtype)
        self.files = [run.file for run in runs]
        self.tasks = []
        self.models = []
        for run in runs:
            task = task_of_run(run.config, run.checkpoint, self.tables, self.graph)
            model = task.build_model().to(ddp.device, dtype)  # before loading, which would round
            load_model(model, run.checkpoint)
            self.tasks.append(task)
            self.models.append(model.eval())
            note_other_code(run)
        for note in notes_on_members([run.checkpoint for run in runs]):
            log.warning(f"note      {note}")
        self.has_routes = False
        # Only one thread may predict at a time, because planners and masks reuse memory.
        self.lock = RLock()

    @property
    def parts(self) -> list[str]:
        """The names of the terms of a prediction: `TERMS`, then custom terms of the models."""
        names = list(TERMS)
        for model in self.models:
            names += [name for name in getattr(model, "terms", ()) if name not in names]
        return names

    @property
    def targets(self) -> list[str]:
        """The names of the scores."""
        return list(self.tables.targets)

    def names(self, with_parts: bool = False) -> list[str]:
        """Returns the names of a target's predictions; the first is `prediction`."""
        criterion = self.tasks[0].criterion.to("cpu")
        a_row = torch.zeros(1, len(self.targets), len(criterion.columns))
        names = list(self._together([criterion.predictions(a_row) for _ in self.models]))
        if with_parts:
            names += [criterion.link] if criterion.link else []
            names += self.parts
        return names

    def columns(self, with_parts: bool = False) -> list[str]:
        """Returns the names of the output table's columns: all `names` of each target in turn.

        With several targets, each name begins with the target.
        """
        names = self.names(with_parts)
        if len(self.targets) == 1:
            return names
        columns = []
        for target in self.targets:
            columns.append(target)
            columns += [f"{target}_{name}" for name in names[1:]]
        return columns

    def predict(self, samples: Tables, with_parts: bool = False) -> Tensor:
        """Returns the predictions of n samples, float64 [n, T, names], in the order of `names`.

        The samples have the graph of `self.tables`. `Criterion.together` combines the predictions
        of the models. With `with_parts`, the terms of the predictions follow, as means over the
        models.
        """
        if not len(samples.y):
            num_names = len(self.names(with_parts))
            return torch.empty(0, len(self.targets), num_names, dtype=torch.float64)
        with self.lock:
            of_models = self._predict_by_model(samples, with_parts)
        predictions, parts = zip(*of_models, strict=True)
        columns = list(self._together(predictions).values())
        if with_parts:
            mean_parts = torch.stack(parts).mean(dim=0)
            if self.tasks[0].criterion.link:
                columns.append(mean_parts.sum(dim=2))
            columns += mean_parts.unbind(2)
        return torch.stack(columns, dim=2)

    def _together(self, predictions: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Combines the predictions of each model, [n, T] by name, into those of the ensemble."""
        of_models = {}
        for name in predictions[0]:
            of_models[name] = torch.stack([of_model[name] for of_model in predictions])
        return self.tasks[0].criterion.together(of_models)

    def _predict_by_model(
        self, samples: Tables, with_parts: bool
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Returns `Criterion.predictions` and the terms of each model's predictions.

        The terms are float64 [n, T, terms]; without `with_parts`, there are 0 terms.
        """
        if not self.has_routes:
            self.choose_routes(samples)
        rows = torch.arange(len(samples.y))
        of_models = []
        for task, model in zip(self.tasks, self.models, strict=True):
            task = task.with_samples(samples)
            criterion = task.criterion.to("cpu")
            num_columns = len(criterion.columns)
            if with_parts:
                names = self.parts
                function = partial(predict_parts, model, task, names)
                size = evaluation_batch_size(task)
                shape = (len(self.targets), num_columns + len(names))
                values = compute_rows(function, task.dataset, rows, size, shape, self.ddp)
            else:
                values = predict_rows(model, task, rows, self.ddp)
            output, parts = values.tensor_split([num_columns], dim=2)
            of_models.append((criterion.predictions(output), parts))
        return of_models

    def choose_routes(self, samples: Tables) -> None:
        """Chooses the route of message passing for each model, and keeps it for all later calls.

        The choice depends on the samples, so there must be at least one sample.
        """
        for task, model in zip(self.tasks, self.models, strict=True):
            task.dataset, task.route = make_dataset(samples, self.graph, task.config)
            task.check_plan(model)
        self.has_routes = True

    @property
    def rows_at_once(self) -> int:
        """The number of rows that are predicted and then written at once, in a few seconds."""
        return min(MOST, 4 * evaluation_batch_size(self.tasks[0]))

    def check_parts(self) -> None:
        """Raises `UserError` if a model cannot return the terms of its predictions."""
        for model, file in zip(self.models, self.files, strict=True):
            if not hasattr(model, "parts"):
                raise UserError(
                    f"the model of {file} lacks a method parts: add it, as in `KnockoutGNN.parts`"
                )


# ---- From Python ---------------------------------------------------------------------------------
def texts_of(sets: Iterable[str]) -> list[str]:
    """Returns sets of knock-outs as a list; raises `UserError` if a set is not a text."""
    texts = list(sets)
    if isinstance(sets, str) or not all(isinstance(text, str) for text in texts):
        example = "['A,B=0.3', ''], where '' is an intact sample"
        raise UserError(f"sets={sets!r:.60} must be a list of texts, such as {example}")
    return texts


def explainer_of(ensemble: Ensemble) -> Any:
    """Returns the `predict_explain.Explainer` of an ensemble.

    Raises `UserError` if this optional part is missing.
    """
    predict_explain = optional("predict_explain")
    if predict_explain is None:
        raise UserError("explanations need predict_explain.py: copy this file from the template")
    return predict_explain.Explainer(ensemble)


class Prediction(NamedTuple):
    """The predictions of n sets of knock-outs, in the units of the T scores."""

    # Mean over the runs, float64 [n, T]; for binary scores, the probability of 1; nan for sets with
    # unknown nodes.
    mean: np.ndarray
    # Standard deviation over several runs, float64 [n, T]. For one run, the prediction `sd` of the
    # loss, or None if the loss does not predict it.
    sd: np.ndarray | None
    targets: list[str]  # the name of each score


class SetRows(Rows):
    """Sets in a list, as rows of a table. Errors report a set by its index in the list."""

    def place(self, row: int) -> str:
        return f"sets[{self.lines[row]}]"


class Predictor:
    """Predicts sets of knock-outs with one trained run, or with several runs as an ensemble.

        predictor = Predictor("runs/a", "runs/b")
        mean, sd, targets = predictor.predict(["YAL001C,YBR002W=0.3", ""])

    A run is a run folder, whose best.pt is used, or a checkpoint file. Predictions only need the
    checkpoint and the graph.pt of the run. Several runs must have the same graph, scores and loss.

    Args:
        runs: run folders or checkpoint files.
        device: the device of the models, such as "cpu". The default is a GPU if there is one, and
            otherwise the CPU.

    Raises:
        UserError: a run cannot be read, or its graph, scores or loss differ from the first run's.
    """

    def __init__(self, *runs: str | Path, device: torch.device | str | None = None):
        if not runs:
            raise UserError("no run is given: use Predictor('runs/NAME')")
        ddp = Distributed(DDPConfig())
        ddp.is_distributed = False
        default = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            ddp.device = torch.empty(0, device=device or default).device
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device={device!r}: {str(error).splitlines()[0]}") from None
        self.ensemble = Ensemble([read_run(run) for run in runs], ddp)

    @property
    def tables(self) -> Tables:
        """The graph of the runs, as `Tables` without samples."""
        return self.ensemble.tables

    @property
    def targets(self) -> list[str]:
        """The names of the scores."""
        return self.ensemble.targets

    def predict(
        self,
        sets: Sequence[str],
        unknown: Literal["raise", "nan"] = "raise",
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Prediction:
        """Predicts n sets of knock-outs.

        A set is a text like a cell of the column `genes` of a table. `"A,B=0.3"` deletes node A and
        multiplies the messages of node B by 0.3. `""` is an intact sample.

        Args:
            sets: n texts.
            unknown: what happens if a set has a node that is not in the graph. "raise" raises an
                error, and "nan" returns nan for this set.
            columns: further columns of the table by name, with n texts or numbers each. They are
                only necessary if your own code reads further columns of a table.

        Raises:
            UserError: a text is not a valid set or, with `unknown="raise"`, has an unknown node.
        """
        sets = texts_of(sets)
        if unknown not in ("raise", "nan"):
            raise UserError(f"unknown={unknown!r} must be 'raise' or 'nan'")
        names = self.ensemble.names()
        values = np.full((len(sets), len(self.targets), len(names)), math.nan)
        for row, chunk in self._chunks(sets, unknown, columns):
            values[row] = self.ensemble.predict(chunk.samples).numpy()
        sd = values[:, :, names.index("sd")] if "sd" in names else None
        return Prediction(values[:, :, 0], sd, self.targets)

    def parts(
        self, sets: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the terms of each prediction by name, float64 [n, T] each.

        They add up to the prediction or, for binary scores, to the logit. All are means over runs.

        - `without_graph` does not depend on the graph. It includes the mean of the training scores.
        - `local` is computed from the states of the knocked-out nodes.
        - `pairs` is computed from the features that pairs of these nodes have in common.
        - `knockout` is computed from the changes of the other nodes' states.

        Arguments and errors are the same as for `predict` with `unknown="raise"`.
        """
        sets = texts_of(sets)
        self.ensemble.check_parts()
        names = self.ensemble.parts
        values = np.full((len(sets), len(self.targets), len(names)), math.nan)
        for row, chunk in self._chunks(sets, "raise", columns):
            columns_of_chunk = self.ensemble.predict(chunk.samples, with_parts=True)
            values[row] = columns_of_chunk[:, :, -len(names) :].numpy()
        return {name: values[:, :, number] for number, name in enumerate(names)}

    def explain(
        self,
        sets: Sequence[str],
        num_nodes: int = 10,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[list[list[NamedTuple]]]:
        """Returns the nodes and pairs of nodes that contribute most to each prediction.

        The result has a list of `Contribution`s for each set and score. It begins with the
        knocked-out nodes, each with the prediction `without` it. Pairs of these nodes follow, named
        `A,B`, with the `features` that contribute most to the term `pairs`. Nodes whose state
        changes contribute most to the term `knockout` come last. In each group, the largest
        contributions come first. See predict_explain and predict_pairs.

        Args:
            sets, columns: as in `predict`.
            num_nodes: the largest number of nodes and pairs in a list.

        Raises:
            UserError: a text is not a valid set or has an unknown node, or predict_explain.py is
                missing.
        """
        if num_nodes < 1:
            raise UserError(f"num_nodes={num_nodes} must be at least 1")
        most = min(num_nodes, len(self.tables.genes))
        explainer = explainer_of(self.ensemble)
        rows = []
        for _, chunk in self._chunks(texts_of(sets), "raise", columns):
            rows += explainer.explain(chunk.samples, most)
        return rows

    def _chunks(
        self, sets: list[str], unknown: str, columns: Mapping[str, Sequence[Any]] | None
    ) -> Iterator[tuple[np.ndarray, Chunk]]:
        """Yields the sets in chunks; before each chunk, the indices of its sets that are known.

        A set is known if all of its nodes are in the graph. With `unknown="raise"`, another set
        raises `UserError`.
        """
        columns = columns or {}
        for name, cells in columns.items():
            if name == "genes":
                raise UserError("columns: the genes are in sets: remove genes from columns")
            if len(cells) != len(sets):
                raise UserError(
                    f"columns: {name} has {counted(len(cells), 'cell')} for "
                    f"{counted(len(sets), 'set')}: give one cell for each set"
                )
        for first in range(0, len(sets), SETS_AT_ONCE):
            last = min(first + SETS_AT_ONCE, len(sets))
            cells = {"genes": sets[first:last]}
            for name, column in columns.items():
                cells[name] = [str(cell) for cell in column[first:last]]
            chunk = chunk_of(SetRows("sets", range(first, last), cells), self.tables)
            if chunk.unknown and unknown == "raise":
                raise UserError(unknown_nodes(chunk.unknown, self.tables))
            yield np.flatnonzero(chunk.is_known.numpy()) + first, chunk
