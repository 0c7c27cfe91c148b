"""Trained runs that predict: `Predictor`, the same for the command, a script and a notebook.

Shapes: n sets of knock-outs, T scores.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import Config, load_config
from data import KnockoutDataset
from data_cells import Rows
from data_tables import Tables
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from mask import SharedGraph
from model import PARTS
from predict_explain import (
    Contribution,
    ShortestWays,
    check_explained,
    largest_contributions,
    name_contributions,
)
from predict_sets import MOST, Chunk, chunk_of, unknown_nodes
from run_checkpoint import load_model, read_checkpoint, read_graph
from run_folder import read_status
from task import KnockoutTask, compute_rows, predict_rows

log = logging.getLogger("predictor")
SETS_AT_ONCE = 100_000


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
    path = Path(run)
    if path.is_dir():
        state = read_status(path).get("state")
        if state not in ("finished", None):
            log.warning(f"note      {path} is {state}: its best model so far predicts")
        path = path / "checkpoints" / "best.pt"
    checkpoint = read_checkpoint(path)
    lacking = {"graph", "basis"} - checkpoint.keys()
    if lacking:
        raise UserError(f"{path} is of another version of the template: predict with that one")
    graph = read_graph(path)
    if graph.pop("graph") != checkpoint["graph"]:
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


def texts_of(sets: Iterable[str]) -> list[str]:
    """Returns sets of knock-outs as a list; raises `UserError` if they are not several texts."""
    if isinstance(sets, str):
        raise UserError(f"{sets!r:.60} is one text: give a list of them")
    texts = list(sets)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{text!r:.60} is no text such as 'A,B=0.3', or '' for no knock-out")
    return texts


class Prediction(NamedTuple):
    """What is predicted of n sets of knock-outs, in the units of the T scores."""

    mean: np.ndarray  # float64 [n, T]; of binary scores, the probability of 1; nan if not known
    sd: np.ndarray | None  # float64 [n, T], the standard deviation over several runs
    targets: list[str]  # name of each score


class Predictor:
    """Trained models that predict sets of knock-outs: of one run, or of several as an ensemble.

        predictor = Predictor("runs/a", "runs/b")
        mean, sd, targets = predictor.predict(["YAL001C,YBR002W=0.3", ""])

    A run is its folder, of which best.pt predicts, or a checkpoint file; its graph.pt is all else
    that it needs. Several must be of the same graph, scores and loss.

    Args:
        runs: folders or checkpoint files.
        device: where the models predict, such as "cpu"; by default a GPU, if there is one.

    Raises:
        UserError: a run cannot be read, or does not go with the first.
    """

    def __init__(self, *runs: str | Path, device: torch.device | str | None = None):
        if not runs:
            raise UserError("no run is named: Predictor('runs/NAME')")
        env = Distributed(DDPConfig())
        env.is_distributed = False
        default = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            env.device = torch.empty(0, device=device or default).device
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device={device!r}: {str(error).splitlines()[0]}") from None
        self._load([read_run(run) for run in runs], env)

    @classmethod
    def of_ranks(cls, runs: list[Run], env: Distributed) -> "Predictor":
        """Returns the predictor of the ranks of `env`, which share the rows of each call."""
        predictor = cls.__new__(cls)
        predictor._load(runs, env)
        return predictor

    def _load(self, runs: list[Run], env: Distributed) -> None:
        first = runs[0]
        for run in runs[1:]:
            check_same(first, run)
        self.env = env
        self.tables = Tables.of_graph(first.graph)
        self.graph = SharedGraph(self.tables.graph()).to(env.device, first.config.optim.dtype)
        self.files = [run.file for run in runs]
        self.tasks = []
        self.models = []
        for run in runs:
            task = KnockoutTask.of_run(run.config, run.checkpoint, self.tables, self.graph)
            model = task.build_model()
            load_model(model, run.checkpoint)
            self.tasks.append(task)
            self.models.append(model.to(env.device, run.config.optim.dtype).eval())
        self.is_planned = False
        self.lock = Lock()  # the planners of batches have memory of their own

    @property
    def targets(self) -> list[str]:
        """The name of each score."""
        return list(self.tables.targets)

    def columns(self, with_parts: bool = False) -> list[str]:
        """Returns the names of what is predicted, one score after another."""
        figures = ["prediction"]
        if len(self.models) > 1:
            figures.append("sd")
        if with_parts:
            if self.tasks[0].config.optim.loss == "binary":
                figures.append("logit")
            figures += PARTS
        if len(self.targets) == 1:
            return figures
        columns = []
        for target in self.targets:
            columns.append(target)
            columns += [f"{target}_{figure}" for figure in figures[1:]]
        return columns

    def digits(self, with_parts: bool = False) -> Tensor:
        """Returns how many significant digits each column is written with, long [C]."""
        columns_of_target = len(self.columns(with_parts)) // len(self.targets)
        return self.tasks[0].digits().repeat_interleave(columns_of_target)

    def predict(
        self,
        sets: Sequence[str],
        unknown: Literal["raise", "nan"] = "raise",
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> Prediction:
        """Predicts sets of knock-outs, each a text as in the column `genes` of a table.

        `"A,B=0.3"` deletes node A and keeps 0.3 of what B sends; `""` is an intact sample.

        Args:
            sets: n texts.
            unknown: what becomes of a set with a node that the graph does not have.
            columns: further columns of the table, for a dataset that reads some, n cells each.

        Raises:
            UserError: a text names no set, or, for `unknown="raise"`, an unknown node.
        """
        sets = texts_of(sets)
        if unknown not in ("raise", "nan"):
            raise UserError(f"unknown={unknown!r} is neither 'raise' nor 'nan'")
        num_figures = len(self.columns()) // len(self.targets)
        values = np.full((len(sets), len(self.targets), num_figures), math.nan)
        for row, chunk in self._chunks(sets, unknown, columns):
            values[row] = self(chunk.samples).numpy()
        sd = values[:, :, 1] if len(self.models) > 1 else None
        return Prediction(values[:, :, 0], sd, self.targets)

    def parts(
        self,
        sets: Sequence[str],
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns what the predictions of `predict` are the sums of, float64 [n, T] by name.

        `without_graph` is what is known without the graph, with the mean of the training scores in
        it, `local` what the readout of the knocked-out nodes adds, `knockout` what the change of
        the others' states does. Of binary scores they add up to the logit, the mean over runs. Of
        the arguments and errors of `predict`, all but `unknown` are the same.
        """
        sets = texts_of(sets)
        self.check_parts()
        values = np.full((len(sets), len(self.targets), len(PARTS)), math.nan)
        for row, chunk in self._chunks(sets, "raise", columns):
            values[row] = self(chunk.samples, with_parts=True)[:, :, -len(PARTS) :].numpy()
        return {name: values[:, :, number] for number, name in enumerate(PARTS)}

    def explain(
        self,
        sets: Sequence[str],
        num_nodes: int = 10,
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> list[list[list[Contribution]]]:
        """Returns the nodes whose changes of state contribute most to predictions.

        They are lists by set, by score and, the largest first, by node. Their sum over all nodes is
        the part `knockout` less that of a change of 0 (see `explain`).

        Args:
            sets, columns: those of `predict`.
            num_nodes: the most nodes of each set and score.

        Raises:
            UserError: as `predict`, or a model has no knock-out pass that can be explained.
        """
        self.check_explained()
        if num_nodes < 1:
            raise UserError(f"num_nodes={num_nodes}: ask for 1 or more")
        rows = []
        for _, chunk in self._chunks(texts_of(sets), "raise", columns):
            values = self.contributions(chunk.samples, min(num_nodes, len(self.tables.genes)))
            rows += self.name_nodes(values, chunk.samples)
        return rows

    def _chunks(
        self, sets: list[str], unknown: str, columns: Mapping[str, Sequence[str]] | None
    ) -> Iterator[tuple[np.ndarray, Chunk]]:
        """Yields some sets at once, and where those of them stand that have no unknown node."""
        columns = columns or {}
        for name, cells in columns.items():
            if len(cells) != len(sets):
                raise UserError(f"columns: {name} has {len(cells)} cells for {len(sets)} sets")
        for first in range(0, len(sets), SETS_AT_ONCE):
            last = min(first + SETS_AT_ONCE, len(sets))
            cells = {"genes": sets[first:last]}
            for name, column in columns.items():
                cells[name] = list(column[first:last])
            rows = Rows("sets", range(first, last), cells)
            chunk = chunk_of(rows, self.tables)
            if chunk.unknown and unknown == "raise":
                raise UserError(unknown_nodes(chunk.unknown, self.tables))
            yield np.flatnonzero(chunk.is_known.numpy()) + first, chunk

    def __call__(self, samples: Tables, with_parts: bool = False) -> Tensor:
        """Returns `columns` of n samples on the graph `self.tables`, float64 [n, T, columns of T].

        They are the mean of the models' predictions and, of several, the standard deviation. It is
        the same on every rank.
        """
        with self.lock:
            of_models = self._of_models(samples, with_parts)
        prediction, parts = of_models.mean(dim=0).tensor_split([1], dim=2)
        figures = [prediction]
        if len(of_models) > 1:
            figures.append(of_models[:, :, :, :1].std(dim=0))
        if with_parts and self.tasks[0].config.optim.loss == "binary":
            figures.append(parts.sum(dim=2, keepdim=True))
        return torch.cat([*figures, parts], dim=2)

    def _of_models(self, samples: Tables, with_parts: bool) -> Tensor:
        """Returns predictions of each of M models, float64 [M, n, T, 1 or, with parts, 4]."""
        if len(samples.y) and not self.is_planned:
            self.tasks = [task.planned_for(samples) for task in self.tasks]
            self.is_planned = True
        rows = torch.arange(len(samples.y))
        predictions = []
        for task, model in zip(self.tasks, self.models, strict=True):
            task = task.with_samples(samples)
            if with_parts:
                size = (len(self.targets), 1 + len(PARTS))
                function = partial(task.predict_parts, model)
                predictions.append(compute_rows(function, size, task, rows, self.env))
            else:
                prediction = predict_rows(model, task, rows, self.env)
                predictions.append(prediction.unsqueeze(2))
        return torch.stack(predictions)

    @property
    def rows_at_once(self) -> int:
        """How many rows are predicted, and then written, at once: some seconds of work."""
        return min(MOST, 4 * self.tasks[0].evaluation_batch_size)

    def check_parts(self) -> None:
        """Raises `UserError` if a model does not say what its predictions are the sums of."""
        for model, file in zip(self.models, self.files, strict=True):
            if not hasattr(model, "parts"):
                raise UserError(
                    f"the model of {file} has no parts: give it a method as `KnockoutGNN.parts`"
                )

    def check_explained(self) -> None:
        """Raises `UserError` if a model has no knock-out pass that can be explained."""
        for model, file in zip(self.models, self.files, strict=True):
            check_explained(model, file)

    def contributions(self, samples: Tables, num_nodes: int) -> Tensor:
        """Returns what `predict_explain.largest_contributions` does of n samples, on every rank."""
        units = [task.std for task in self.tasks]
        function = partial(largest_contributions, self.models, units, self.graph, num_nodes)
        size = (len(self.targets), num_nodes, 2)
        dataset = KnockoutDataset(samples, self.graph.degree)
        task = replace(self.tasks[0], tables=samples, dataset=dataset)
        return compute_rows(function, size, task, torch.arange(len(samples.y)), self.env)

    def name_nodes(self, values: Tensor, samples: Tables) -> Iterator[list[list[Contribution]]]:
        """Yields the `contributions` to the scores of each sample, without those of 0."""
        return name_contributions(values, samples, self.ways)

    @cached_property
    def ways(self) -> ShortestWays:
        """The shortest ways on the edges of the graph."""
        return ShortestWays(self.tables)
