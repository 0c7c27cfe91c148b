"""Predictions from Python: `Predictor`, the same for a script and a notebook.

Shapes: n sets of knock-outs, T scores.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from data_cells import Rows
from data_tables import Tables
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from parts import optional
from predict_ensemble import Ensemble, read_run
from predict_sets import Chunk, chunk_of, unknown_nodes

SETS_AT_ONCE = 100_000


class SetRows(Rows):
    """Sets of a list as rows of a table, which errors name by their place in the list."""

    def place(self, row: int) -> str:
        return f"sets[{self.lines[row]}]"


def texts_of(sets: Iterable[str]) -> list[str]:
    """Returns sets of knock-outs as a list; raises `UserError` if they are not several texts."""
    if isinstance(sets, str):
        raise UserError(f"{sets!r:.60} is one text: give a list of them")
    texts = list(sets)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{text!r:.60} is no text such as 'A,B=0.3', or '' for no knock-out")
    return texts


def explainer_of(ensemble: Ensemble) -> Any:
    """Returns `predict_explain.Explainer` of an ensemble; raises `UserError` without that part."""
    predict_explain = optional("predict_explain")
    if predict_explain is None:
        raise UserError("reasons of predictions need predict_explain.py, which is not here")
    return predict_explain.Explainer(ensemble)


class Prediction(NamedTuple):
    """What is predicted of n sets of knock-outs, in the units of the T scores."""

    mean: np.ndarray  # float64 [n, T]; of binary scores, the probability of 1; nan if not known
    sd: np.ndarray | None  # float64 [n, T], over several runs, or what the loss predicts as `sd`
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

        `"A,B=0.3"` deletes node A and keeps 0.3 of what B sends; `""` is an intact sample.

        Args:
            sets: n texts.
            unknown: what becomes of a set with a node that the graph does not have.
            columns: further columns of the table, for a dataset that reads some, n texts or numbers
                each.

        Raises:
            UserError: a text names no set, or, for `unknown="raise"`, an unknown node.
        """
        sets = texts_of(sets)
        if unknown not in ("raise", "nan"):
            raise UserError(f"unknown={unknown!r} is neither 'raise' nor 'nan'")
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
        """Returns the terms of each prediction by name, float64 [n, T] each; they add up to it.

        `without_graph` is what is known without the graph, with the mean of the training scores in
        it, `local` what the states of the knocked-out nodes add, `pairs` what these nodes have in
        common, `knockout` what the change of the others' states does. Of binary scores they add up
        to the logit, the mean over runs. Of the arguments and errors of `predict`, all but
        `unknown` are the same.
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
        """Returns the nodes, and pairs of them, that predictions hang on: `Contribution`s.

        They are lists by set and by score of three groups, the largest first in each. First come
        the knocked-out nodes, with the prediction `without` each and what it is less. Then come
        pairs of these, as `A,B`, by what they add to the part `pairs`, with their largest features
        in `relations`; a model without features of pairs has none (see predict_pairs). Last come
        nodes by the changes of their states. The sum of these over all nodes is the part `knockout`
        less that of a change of 0; a model without a knock-out pass that can be explained has none
        (see predict_explain).

        Args:
            sets, columns: those of `predict`.
            num_nodes: the most nodes and pairs of each set and score.

        Raises:
            UserError: as `predict`, or there is no predict_explain.py.
        """
        if num_nodes < 1:
            raise UserError(f"num_nodes={num_nodes}: ask for 1 or more")
        most = min(num_nodes, len(self.tables.genes))
        rows = []
        for _, chunk in self._chunks(texts_of(sets), "raise", columns):
            rows += self._explainer.explain(chunk.samples, most)
        return rows

    @cached_property
    def _explainer(self) -> Any:
        return explainer_of(self.ensemble)

    def _chunks(
        self, sets: list[str], unknown: str, columns: Mapping[str, Sequence[Any]] | None
    ) -> Iterator[tuple[np.ndarray, Chunk]]:
        """Yields some sets at once, and where those of them stand that have no unknown node."""
        columns = columns or {}
        for name, cells in columns.items():
            if name == "genes":
                raise UserError("columns: genes are the sets themselves: give the other columns")
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
