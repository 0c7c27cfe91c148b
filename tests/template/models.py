"""Functions that build a model with all of its terms without a task."""

from torch import Tensor

from baseline import Baseline, BaselineReadout, WithoutGraph
from data import training_mean_and_std
from data_tables import Tables
from mask import LINEAR
from model import GlobalReadout, KnockoutGNN, LocalReadout, ModelConfig
from model_nodes import NodeReadout
from model_pairs import PairTerm
from model_reach import record_states


def full_model(
    config: ModelConfig,
    num_nodes: int,
    num_relations: int,
    num_features: int = 0,
    num_targets: int = 1,
    target_nodes: Tensor | None = None,
    basis: Tensor = LINEAR,
    pairs: Tensor | None = None,
    num_columns: int = 1,
) -> KnockoutGNN:
    """Returns the same model as `KnockoutTask.build_model`, but one that starts from the mean.

    Args:
        target_nodes: node of each target, long [T], for the readout `nodes`.
        pairs: result of `units_of_pairs`. None: the model does not read pair features.
    """
    model = KnockoutGNN(config, num_nodes, num_relations, num_features, 0.0, basis, num_columns)
    terms = model.terms
    hidden = config.hidden
    num_outputs = num_targets * num_columns
    if config.readout != "global":
        baseline = BaselineReadout(num_nodes, num_targets, basis.size(1))
        baseline.requires_grad_(config.readout != "nodes")
        terms["without_graph"] = WithoutGraph(baseline, num_columns)
    if config.has_local:
        terms["local"] = LocalReadout(hidden, num_outputs, basis.size(1))
    if config.has_local and pairs is not None:
        terms["pairs"] = PairTerm(pairs, hidden, num_outputs, terms["local"].read)
    if config.readout == "nodes":
        terms["knockout"] = NodeReadout(num_nodes, hidden, target_nodes)
    elif config.has_knockout_pass:
        terms["knockout"] = GlobalReadout(num_nodes, hidden, num_outputs)
    record_states(model)
    return model


def model_of_tables(config: ModelConfig, tables: Tables, baseline: Baseline) -> KnockoutGNN:
    """Returns a model that starts from a baseline, for tables without node features."""
    sizes = (len(tables.genes), len(tables.relations), 0, len(tables.targets))
    model = full_model(config, *sizes, basis=baseline.basis)
    model.terms["without_graph"].readout.start_from(baseline, *training_mean_and_std(tables))
    return model
