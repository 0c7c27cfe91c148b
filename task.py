"""The task of a run: one object for everything between the input tables and the loss.

`KnockoutTask` reads the tables, and builds the graph, the dataset and the model. It also computes
the loss of a batch, and the metrics of the model and of its rivals. A rival is a prediction without
the model, such as the baseline. The task does not use DDP, the optimiser, the order of the samples
or a seed, because these belong to train.py. If you write your own task, keep the names that other
modules use; docs/adapting.md lists them.

Shapes: N nodes, n rows of T targets, B samples in a batch, C columns of a target.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import data
from config import Config
from data import KnockoutDataset, basis_of, training_mean_and_std, weight_scale
from data_cells import SPLITS
from data_tables import OF_GRAPH, Tables
from ddp_setup import Distributed
from errors import RunError, UserError, counted
from losses import LOSSES, Criterion
from mask import SharedGraph
from metrics import check_metrics, mean_and_std, metrics_beside_rivals, mse, weighted_mean
from model import GlobalReadout, KnockoutGNN, LocalReadout
from parts import optional
from run_checkpoint import Origin
from run_results import result_lines

log = logging.getLogger("task")
# Smallest standard deviation of a score, relative to its largest value. With a smaller one, float64
# would lose digits.
LEAST_STD = 1e-9


@dataclass
class KnockoutTask:
    """The tables of a run, and the graph, dataset and baseline that are built from them."""

    config: Config
    tables: Tables
    fingerprint: str  # hash of the tables
    graph: SharedGraph  # on the training device
    criterion: Criterion  # loss and meaning of the model's outputs, on the training device
    dataset: KnockoutDataset
    route: str  # the method of message passing, for the log
    # Maps the three `mask.doses` of a level to the K doses of a node's effects, float64 [3, K].
    basis: Tensor
    baseline: Any = None  # the fitted `Baseline`; None with model.start=mean
    # {name of a rival: its predictions for all rows, float64 [n, T]}
    rivals: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def load(cls, config: Config, ddp: Distributed) -> "KnockoutTask":
        """Reads the tables of `config.data`, and returns the task for them.

        A collective. If the input is wrong on any rank, it raises `UserError` on every rank.
        """
        with ddp.sync_errors():
            return cls.from_tables(data.load(config.data), config, ddp.device)

    @classmethod
    def from_tables(
        cls, tables: Tables, config: Config, device: torch.device | str = "cpu"
    ) -> "KnockoutTask":
        """Returns the task for tables that have a split.

        Raises `UserError` if the options do not fit the tables.
        """
        if not (config.model.embedding or config.data.features):
            raise UserError("model.embedding=false needs node features: set data.features")
        check_scores(tables, config)
        fingerprint = tables.fingerprint()
        baseline = None
        rivals = {}
        if config.model.start == "baseline":
            from baseline import load_baseline  # an optional part

            baseline = load_baseline(tables, fingerprint, config.data.cache_dir, config.optim.loss)
            rivals["baseline"] = baseline.prediction
        graph = SharedGraph(tables.graph()).to(device, config.optim.dtype)
        loss = LOSSES[config.optim.loss]
        mean, std = loss.origin_and_unit(*training_mean_and_std(tables))
        criterion = loss(mean, std).to(device)
        check_metrics(tables.y[tables.rows("train")], loss(mean, std), config.optim.loss)
        dataset, route = make_dataset(tables, graph, config)
        if config.model.has_pairs:
            from model_pairs import add_pair_features  # an optional part

            add_pair_features(dataset, graph, config.data.cache_dir, fingerprint)
        return cls(
            config=config,
            tables=tables,
            fingerprint=fingerprint,
            graph=graph,
            criterion=criterion,
            dataset=dataset,
            route=route,
            basis=basis_of(tables),
            baseline=baseline,
            rivals=rivals,
        )

    def with_samples(self, samples: Tables) -> "KnockoutTask":
        """Returns the task for other samples on the same graph, such as a table to predict."""
        return replace(self, tables=samples, dataset=self.dataset.with_samples(samples))

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split in ascending order, long [rows]."""
        return self.tables.rows(split)

    def origin(self, code: dict[str, str]) -> Origin:
        """Returns the `Origin` to store in checkpoints.

        `code` is the result of `code_of_steps`: hashes of the code that makes the training steps.
        """
        pair_features = []
        if self.config.model.has_pairs:
            from model_pairs import pair_names

            pair_features = pair_names(self.graph)
        return Origin(
            config=asdict(self.config),
            data=self.fingerprint,
            graph=self.tables.fingerprint(OF_GRAPH),
            nodes=self.tables.genes,
            relations=self.tables.relations,
            features=list(self.tables.feature_names),
            targets=list(self.tables.targets),
            outputs=self.output_names(),
            mean=self.criterion.mean.cpu(),
            std=self.criterion.std.cpu(),
            basis=self.basis,
            pair_features=pair_features,
            code=code,
            free_options=self.config.free_options(),
        )

    def build_model(self) -> nn.Module:
        """Returns a new model to train, on the CPU.

        Raises `UserError` if the options of the model do not fit the task.
        """
        options = self.config.model
        tables = self.tables
        sizes = (len(tables.genes), len(tables.relations), tables.features.size(1))
        unseen = tables.unseen_share("val")  # the fraction of nodes that a training step hides
        model = KnockoutGNN(options, *sizes, unseen, self.basis, len(self.criterion.columns))
        # The output is the sum of these terms. Append your own terms at the end.
        terms = model.terms
        hidden = options.hidden
        reach = optional("model_reach")
        if reach is not None and self.dataset.transform is not None:
            reach.record_states(model)
        if options.start == "baseline" and options.readout != "global":
            from baseline import baseline_term  # an optional part

            terms["without_graph"] = baseline_term(self)
        if options.has_local:
            terms["local"] = LocalReadout(hidden, self.num_outputs, self.basis.size(1))
        if options.has_pairs:
            from model_pairs import PairTerm, units_of_pairs  # an optional part

            units = units_of_pairs(self.graph, self.dataset)
            terms["pairs"] = PairTerm(units, hidden, self.num_outputs, terms["local"].read)
        if options.readout == "nodes":
            from model_nodes import node_readout  # an optional part

            terms["knockout"] = node_readout(self)
        elif options.has_knockout_pass:
            terms["knockout"] = GlobalReadout(len(tables.genes), hidden, self.num_outputs)
        return model

    @property
    def num_targets(self) -> int:
        """The number of targets, T."""
        return len(self.tables.targets)

    @property
    def output_shape(self) -> tuple[int, int]:
        """The shape of one sample's outputs, (T, C), after `by_score` has split them by target."""
        return self.num_targets, len(self.criterion.columns)

    @property
    def num_outputs(self) -> int:
        """The number of the model's outputs for one sample, T * C."""
        return math.prod(self.output_shape)

    @property
    def captures_steps(self) -> bool:
        """Whether train.py should try to capture training steps as CUDA graphs."""
        return self.config.model.cuda_graphs and self.graph.is_on_gpu

    @property
    def is_cheap_per_sample(self) -> bool:
        """Whether samples need so little memory that thousands can be predicted at once.

        This is the case without a knock-out pass. On a GPU, it is also the case for `shared`
        message passing, which computes the states of the samples in blocks of limited size.
        """
        model = self.config.model
        in_blocks = self.graph.is_on_gpu and model.message_passing in ("auto", "shared")
        return in_blocks or not model.has_knockout_pass

    def output_names(self) -> list[str]:
        """Returns the names of the T * C outputs: all columns of a target, target by target."""
        columns = self.criterion.columns
        return [f"{target} {column}" for target in self.tables.targets for column in columns]

    def check_plan(self, model: nn.Module) -> None:
        """Removes the plan from the dataset if `model` does not support it.

        A plan lists the node states that the knock-outs of a batch change, so that only these are
        computed. Only a `KnockoutGNN` supports plans. If its layers were edited, the states that
        are computed with a plan may differ from the model's own; in this case, the log reports it.
        """
        if not isinstance(model, KnockoutGNN):
            self.dataset = replace(self.dataset, transform=None)
            self.route = type(model).__name__
        reach = optional("model_reach")
        if reach is None or self.dataset.transform is None:
            return
        if not reach.use_plans(model, self.graph, self.dataset):
            self.dataset = replace(self.dataset, transform=None)
            self.route = "message_passing=shared"

    def loss(self, output: Tensor, batch: Data) -> Tensor:
        """Returns the weighted sum of a batch's losses for each score, [T].

        Raises `RunError` if the shape of `output` is wrong.
        """
        losses = self.criterion.losses(self.by_score(output, batch), batch.y)
        return (batch.weight * losses).sum(dim=0)

    def by_score(self, output: Tensor, batch: Data) -> Tensor:
        """Returns the model's outputs [B, T * C] as [B, T, C].

        Raises `RunError` if their shape is wrong.
        """
        columns = self.criterion.columns
        num_samples = len(batch.y)
        if output.shape != (num_samples, self.num_outputs):
            raise RunError(
                f"the model returned {list(output.shape)} for {counted(num_samples, 'sample')}, "
                f"not [{num_samples}, {self.num_outputs}]: in KnockoutTask.build_model, build a "
                f"model with {counted(self.num_outputs, 'output')} per sample "
                f"({', '.join(columns)} for each score, see losses.py)"
            )
        return output.unflatten(1, self.output_shape)

    def predictions(self, output: Tensor) -> dict[str, Tensor]:
        """Returns {name: predictions, [n, T]}, computed from outputs [n, T, C]."""
        return self.criterion.to(output.device).predictions(output)

    def metrics(self, split: str, output: Tensor) -> dict[str, float]:
        """Returns {name: value} of the metrics of the model and of the rivals on a split.

        `output` [n, T, C] contains the model's outputs for the rows of the split. The rows are
        weighted. Each metric is the mean over the targets for which it is defined, or nan if there
        are none. The entry `rows` is the number of rows, and `n` is the number of rows with at
        least one score.
        """
        rows = self.rows(split)
        y = self.tables.y[rows]
        weight = 1.0 if self.tables.weight is None else self.tables.weight[rows].unsqueeze(1)
        losses = self.criterion.to(output.device).losses(output, y.nan_to_num())
        loss = weighted_mean(losses, self.tables.score_weight(rows))
        predictions = self.predictions(output)
        each = {
            "loss": loss,
            "mse": mse(y, predictions["prediction"], weight),
            **metrics_beside_rivals(y, predictions, self.rivals_of(rows), weight),
        }
        means = {name: metric.nanmean().item() for name, metric in each.items()}
        num_scored = int((~y.isnan()).any(dim=1).sum())
        return {**means, "n": num_scored, "rows": len(rows)}

    def result_lines(self, output: Tensor) -> Iterator[str]:
        """Yields the lines of test.tsv, given the model's outputs for the test rows, [n, T, C]."""
        rivals = self.rivals_of(self.rows("test"))
        return result_lines(self.tables, self.predictions(output), rivals)

    def rivals_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns {name of a rival: its predictions for the given rows, float64 [rows, T]}."""
        return {name: prediction[rows] for name, prediction in self.rivals.items()}

    def summary(self) -> str:
        """Returns a text for the log with the numbers of nodes, edges, samples and scores."""
        tables = self.tables
        splits = ", ".join(f"{len(tables.rows(split)):,} {split}" for split in SPLITS)
        text = (
            f"{counted(len(tables.genes), 'node')}, {counted(len(tables.edge_type), 'edge')} in "
            f"{counted(len(tables.relations), 'relation')}, {counted(len(tables.y), 'sample')}: "
            f"{splits}; {counted(len(tables.targets), 'score')}: {', '.join(tables.targets[:5])}"
        )
        data_notes = optional("data_notes")
        if data_notes is not None:
            text += f"; {data_notes.details(tables)}"
        if tables.weight is not None:
            text += "; rows are weighted in loss and metrics"
        return text

    def notes(self) -> list[str]:
        """Returns warnings for the log, about the tables and about options that do not fit them."""
        notes = list(self.tables.notes)
        if self.baseline is not None:
            notes += self.baseline.notes(self)
        data_notes = optional("data_notes")
        if data_notes is not None:
            notes += data_notes.notes_on_training(self.tables, self.config)
        predict_tables = optional("predict_tables")
        if self.config.run.init and predict_tables is not None:
            notes += predict_tables.notes_on_leaks(self.config.run.init, self.tables)
        return notes


def make_dataset(tables: Tables, graph: SharedGraph, config: Config) -> tuple[KnockoutDataset, str]:
    """Returns the dataset, and a text for the log about the method of message passing."""
    scale = 1.0 if tables.split is None else weight_scale(tables)
    dataset = KnockoutDataset(tables, graph.degree, scale=scale, out_degree=graph.out_degree)
    options = config.model
    if not options.has_knockout_pass:
        return dataset, f"no knock-out pass, because model.readout={options.readout}"
    reach = optional("model_reach")
    if reach is None or options.message_passing not in ("auto", "shared", "reach"):
        return dataset, f"message_passing={options.message_passing}"
    planner, route = reach.plan_route(graph, dataset, options.message_passing, options.layers)
    return replace(dataset, transform=planner), route


def check_scores(tables: Tables, config: Config) -> None:
    """Checks that every split has values of the scores, and that the loss accepts all values.

    Raises `UserError` if a score has no value in training, if validation has no value of any score,
    if the digits of a score would be lost, or if a value is invalid for the loss. Logs a warning if
    a split has no value of a score, but training is possible.
    """
    for split in SPLITS:
        is_missing = tables.y[tables.rows(split)].isnan().all(dim=0)
        names = [name for name, missing in zip(tables.targets, is_missing, strict=True) if missing]
        if not names:
            continue
        problem = f"no {split} row has a value of score {', '.join(names[:10])}"
        if split == "train" or (split == "val" and len(names) == len(tables.targets)):
            raise UserError(f"{problem}: remove the column, or change the split")
        log.warning(f"note      {problem}, so the {split} metrics ignore it")
    y = tables.y[tables.rows("train")]
    centred = y - y.nanmedian(dim=0).values
    _, std = mean_and_std(centred)
    varies = (centred.nan_to_num() != 0).any(dim=0)
    is_lost = varies & (std < LEAST_STD * y.nan_to_num().abs().amax(dim=0))
    names = [name for name, lost in zip(tables.targets, is_lost.tolist(), strict=True) if lost]
    if names:
        problem = f"the standard deviation of {names[0]!r} is too small"
        reason = f"because it is below {LEAST_STD:g} of the largest value"
        raise UserError(f"{problem}, {reason}: subtract a constant from this score")
    LOSSES[config.optim.loss].check(tables.y)
