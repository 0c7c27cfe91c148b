"""Predictions with trained runs: `Predictor` for use from Python, `Ensemble` on all ranks.

Shapes: n samples or sets of knock-outs, B of them in a batch, T scores of C columns each.
"""

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
from errors import UserError
from evaluate import compute_rows, evaluation_batch_size, predict_rows
from losses import LOSSES
from mask import SharedGraph
from parts import optional
from predict_tables import MOST, Chunk, chunk_of, read_graph, tables_of_graph, unknown_nodes
from run_checkpoint import load_model, read_checkpoint
from run_folder import read_status
from task import KnockoutTask, make_dataset

log = logging.getLogger("predictor")
# The terms of a prediction, in the order in which they are built: what is known without the graph,
# the local readout, the features of pairs, and the knock-out pass.
TERMS = ("without_graph", "local", "pairs", "knockout")
SETS_AT_ONCE = 100_000
# Largest difference, in standard deviations, between most scores' means and deviations in the same
# unit.
MOST_OTHER = 0.4


# ---- Runs ----------------------------------------------------------------------------------------
@dataclass
class Run:
    """A trained run."""

    checkpoint: dict[str, Any]
    config: Config
    graph: dict[str, Any]  # fields of `Tables`, from its graph.pt
    trained: dict[str, Any]  # the `training_range`, from its graph.pt

    @property
    def file(self) -> str:
        return self.checkpoint["file"]


def read_run(run: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Returns a run, given its folder, whose best.pt is used, or a checkpoint file.

    Its options are its own, except for `overrides`. Raises `UserError`.
    """
    path = Path(expand_path(str(run)))
    if path.is_dir():
        state = read_status(path).get("state")
        if state not in ("finished", None):
            log.warning(f"note      {path} is {state}: predictions use its best model so far")
        path = path / "checkpoints" / "best.pt"
    checkpoint = read_checkpoint(path)
    graph = read_graph(path)
    of_graph = graph.pop("graph", None)
    trained = graph.pop("trained", None)
    lacking = {"graph", "basis", "pair_features"} - checkpoint.keys()
    if lacking or trained is None or not graph.keys() <= {field.name for field in fields(Tables)}:
        raise UserError(
            f"{path} was created by another version of the template: use that version to predict"
        )
    if of_graph != checkpoint["graph"]:
        raise UserError(
            f"the graph.pt next to {path} is of another graph: copy graph.pt from its run folder"
        )
    return Run(checkpoint, options_of_run(checkpoint, overrides), graph, trained)


def options_of_run(checkpoint: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Returns the options of a checkpoint, overridden by those of the command line.

    Raises `UserError` for a wrong option, and for an option of the checkpoint that this code does
    not have, unless it is one of the checkpoint's `free_options`.
    """
    options = by_key(checkpoint["config"])
    unknown = options.keys() - all_options().keys() - set(checkpoint.get("free_options", []))
    if unknown:
        raise UserError(
            f"{checkpoint['file']} was trained with the option {min(unknown)}, which this code "
            "does not have: use the code that trained it, or train again"
        )
    return override(options, overrides, [checkpoint["file"]])


def note_other_code(run: Run) -> None:
    """Logs which code files of a run differ from those of this process."""
    changes = optional("run_changes")
    if changes is None:
        return
    code = changes.code_digests()
    # A notebook may have loaded more modules.
    of_run = code.keys() & run.checkpoint.get("code", code).keys()
    edited = changes.other_code(run.checkpoint, {file: code[file] for file in of_run})
    if edited:
        log.warning(f"note      {run.file} was trained with {edited}")


def check_same(first: Run, run: Run) -> None:
    """Raises `UserError` if two runs do not predict the same scores on the same graph."""
    if Path(run.file).resolve() == Path(first.file).resolve():
        raise UserError(f"{run.file} is listed twice: list each run once")
    if list(run.graph["targets"]) != list(first.graph["targets"]):
        raise UserError(f"{run.file} was trained on other scores than {first.file}")
    if run.checkpoint["graph"] != first.checkpoint["graph"]:
        raise UserError(f"{run.file} was trained on another graph than {first.file}")
    loss = run.config.optim.loss
    if loss != first.config.optim.loss:
        raise UserError(
            f"{run.file} was trained with optim.loss={loss}, {first.file} with "
            f"{first.config.optim.loss}"
        )


def notes_on_members(checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a warning for each run that is the same as an earlier one, or has different units."""
    for number, run in enumerate(checkpoints):
        first = checkpoints[0]
        if any(are_equal(run["model"], other["model"]) for other in checkpoints[:number]):
            yield (
                f"{run['file']} has the same parameters as another run: train each run with "
                "another run.seed"
            )
        if run.get("mean") is None:  # made by a custom task
            continue
        shift = (run["mean"] - first["mean"]).abs().maximum((run["std"] - first["std"]).abs())
        if (shift / run["std"].minimum(first["std"])).median() > MOST_OTHER:
            yield (
                f"{run['file']} was trained on scores with another mean or standard deviation than "
                f"{first['file']}: use the same unit for all runs"
            )


def are_equal(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Returns whether two state dicts have the same names and values."""
    names = tensors.keys()
    return names == others.keys() and all(torch.equal(tensors[n], others[n]) for n in names)


def task_of_run(
    config: Config, checkpoint: dict[str, Any], tables: Tables, graph: SharedGraph
) -> KnockoutTask:
    """Returns the task that predicts with a run's model, given tables that have no samples yet."""
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
    """Returns the outputs for a batch, followed by its named parts, float64 [B, T, C + parts].

    The parts are those of the first column, in the unit of the scores or of their link, such as
    logits. The first part, which is known without the graph, includes the mean of the scores. Parts
    that the model does not have are 0.
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
    """Trained models with the same graph and scores, which predict the same samples.

    All ranks call `predict`, share the samples, and get the same result.

    Args:
        runs: one or more.
        ddp: the ranks.

    Raises:
        UserError: a run does not fit the first one.
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
            model = task.build_model()
            load_model(model, run.checkpoint)
            self.tasks.append(task)
            self.models.append(model.to(ddp.device, dtype).eval())
            note_other_code(run)
        for note in notes_on_members([run.checkpoint for run in runs]):
            log.warning(f"note      {note}")
        self.has_routes = False
        self.lock = RLock()  # planners and masks reuse memory, so only one thread may predict

    @property
    def parts(self) -> list[str]:
        """The names of the parts of a prediction: `TERMS`, and further terms of the models."""
        names = list(TERMS)
        for model in self.models:
            names += [name for name in getattr(model, "terms", ()) if name not in names]
        return names

    @property
    def targets(self) -> list[str]:
        """The name of each target."""
        return list(self.tables.targets)

    def names(self, with_parts: bool = False) -> list[str]:
        """Returns the names of all predictions of a target; `prediction` is the first."""
        criterion = self.tasks[0].criterion.to("cpu")
        a_row = torch.zeros(1, len(self.targets), len(criterion.columns))
        names = list(self._together([criterion.predictions(a_row) for _ in self.models]))
        if with_parts:
            names += [criterion.link] if criterion.link else []
            names += self.parts
        return names

    def columns(self, with_parts: bool = False) -> list[str]:
        """Returns the names of all predicted columns, grouped by target."""
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

        The samples are on the graph `self.tables`. Predictions are those of `Criterion.together`,
        and parts are means over the models.
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
        """Returns the predictions of the ensemble by name, [n, T] each."""
        of_models = {}
        for name in predictions[0]:
            of_models[name] = torch.stack([of_model[name] for of_model in predictions])
        return self.tasks[0].criterion.together(of_models)

    def _predict_by_model(
        self, samples: Tables, with_parts: bool
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Returns each model's `predictions` and its parts, float64 [n, T, parts, or 0]."""
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
        """Chooses each model's message passing for samples such as these; there must be one."""
        for task, model in zip(self.tasks, self.models, strict=True):
            task.dataset, task.route = make_dataset(samples, self.graph, task.config)
            task.check_plan(model)
        self.has_routes = True

    @property
    def rows_at_once(self) -> int:
        """The number of rows that are predicted and then written at once: some seconds of work."""
        return min(MOST, 4 * evaluation_batch_size(self.tasks[0]))

    def check_parts(self) -> None:
        """Raises `UserError` if a model cannot return the parts of its predictions."""
        for model, file in zip(self.models, self.files, strict=True):
            if not hasattr(model, "parts"):
                raise UserError(
                    f"the model of {file} has no method parts: add one like `KnockoutGNN.parts`"
                )


# ---- From Python ---------------------------------------------------------------------------------
def texts_of(sets: Iterable[str]) -> list[str]:
    """Returns sets of knock-outs as a list; raises `UserError` if they are not a list of texts."""
    if isinstance(sets, str):
        raise UserError(f"expected a list of sets, not the single text {sets!r:.60}")
    texts = list(sets)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(
                f"{text!r:.60} is not a text such as 'A,B=0.3', or '' for an intact sample"
            )
    return texts


def explainer_of(ensemble: Ensemble) -> Any:
    """Returns the `predict_explain.Explainer` of an ensemble.

    Raises `UserError` if this optional part has been deleted.
    """
    predict_explain = optional("predict_explain")
    if predict_explain is None:
        raise UserError("explanations need predict_explain.py, which this copy does not have")
    return predict_explain.Explainer(ensemble)


class Prediction(NamedTuple):
    """The predictions of n sets of knock-outs, in the units of the T scores."""

    # float64 [n, T]; for binary scores, the probability of 1; nan if a node is unknown
    mean: np.ndarray
    # float64 [n, T], standard deviation over several runs, or the loss's own prediction `sd`
    sd: np.ndarray | None
    targets: list[str]  # name of each score


class SetRows(Rows):
    """Sets in a list as rows of a table; errors name them by their index in the list."""

    def place(self, row: int) -> str:
        return f"sets[{self.lines[row]}]"


class Predictor:
    """Predicts sets of knock-outs with one trained run, or with several as an ensemble.

        predictor = Predictor("runs/a", "runs/b")
        mean, sd, targets = predictor.predict(["YAL001C,YBR002W=0.3", ""])

    A run is a run folder, whose best.pt is used, or a checkpoint file. Apart from it, only the
    run's graph.pt is needed. Several runs must have the same graph, scores and loss.

    Args:
        runs: folders or checkpoint files.
        device: the device of the models, such as "cpu"; by default a GPU, if there is one.

    Raises:
        UserError: a run cannot be read, or does not fit the first one.
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
        """The graph, without samples."""
        return self.ensemble.tables

    @property
    def targets(self) -> list[str]:
        """The name of each score."""
        return self.ensemble.targets

    def predict(
        self,
        sets: Sequence[str],
        unknown: Literal["raise", "nan"] = "raise",
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Prediction:
        """Predicts sets of knock-outs, each a text as in the column `genes` of a table.

        `"A,B=0.3"` deletes node A and multiplies the messages of B by 0.3; `""` is an intact
        sample.

        Args:
            sets: n texts.
            unknown: "raise" or "nan", for sets with nodes that are not in the graph.
            columns: further columns of the table, for a dataset that reads them, n texts or numbers
                each.

        Raises:
            UserError: a text is not a set, or, with `unknown="raise"`, has an unknown node.
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
        self,
        sets: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the parts of each prediction by name, float64 [n, T] each; they add up to it.

        `without_graph` is known without the graph, and includes the mean of the training scores.
        `local` is computed from the states of the knocked-out nodes, `pairs` from what these nodes
        have in common, and `knockout` from the changes of the other nodes' states. For binary
        scores, the sum is the logit, as a mean over runs. Arguments and errors are those of
        `predict` with `unknown="raise"`.
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
        """Returns the nodes and pairs that predictions depend on most, as `Contribution`s.

        For each set and score, there are three groups, each with the largest contributions first:
        the knocked-out nodes, with the prediction `without` each of them; pairs of them, `A,B`, by
        their contribution to the part `pairs`, with the `features` that contribute most; and nodes
        by the contribution of their changes to the part `knockout` (see predict_explain and
        predict_pairs).

        Args:
            sets, columns: as in `predict`.
            num_nodes: the largest number of nodes and pairs for each set and score.

        Raises:
            UserError: as in `predict`, or predict_explain.py is missing.
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
        """Yields sets in chunks, with the positions of those that have no unknown nodes."""
        columns = columns or {}
        for name, cells in columns.items():
            if name == "genes":
                raise UserError("columns cannot contain genes, which are given by the sets")
            if len(cells) != len(sets):
                raise UserError(f"columns: {name} has {len(cells)} cells for {len(sets)} sets")
        for first in range(0, len(sets), SETS_AT_ONCE):
            last = min(first + SETS_AT_ONCE, len(sets))
            cells = {"genes": sets[first:last]}
            for name, column in columns.items():
                cells[name] = [str(cell) for cell in column[first:last]]
            chunk = chunk_of(SetRows("sets", range(first, last), cells), self.tables)
            if chunk.unknown and unknown == "raise":
                raise UserError(unknown_nodes(chunk.unknown, self.tables))
            yield np.flatnonzero(chunk.is_known.numpy()) + first, chunk
