"""The baseline as a part of the model, which starts from it.

Shapes: N nodes, B samples with P perturbed nodes, T targets, K effects of a node.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from baseline import Baseline
from mask import SharedGraph, num_samples, sum_by_sample
from model import WildType


class BaselineReadout(nn.Module):
    """The baseline as a part of the model, which training goes on with: see `Baseline`.

    Its parameters are slope, effects and the weights of the sum, the largest and the smallest
    response. A node's response is the sum of its effects, each times its dose.
    """

    def __init__(self, num_nodes: int, num_targets: int, num_effects: int):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(num_targets))
        self.effect = nn.Parameter(torch.zeros(num_nodes, num_effects, num_targets))
        of_sum_alone = torch.tensor([1.0, 0.0, 0.0]).unsqueeze(1)
        self.weights = nn.Parameter(of_sum_alone.repeat(1, num_targets))
        self.register_buffer("intercept", torch.zeros(num_targets))
        # In place of the effects of hidden nodes.
        imputed = torch.zeros(num_nodes, num_effects, num_targets)
        self.register_buffer("imputed", imputed, persistent=False)

    @torch.no_grad()
    def start_from(self, baseline: Baseline, mean: Tensor, std: Tensor) -> None:
        """Copies a baseline, less the mean and in the unit of the model's predictions, [T] each."""
        self.intercept.copy_((baseline.intercept - mean) / std)
        self.slope.copy_(baseline.slope / std)
        self.effect.copy_(baseline.effect / std)
        self.weights.copy_(baseline.weights)
        self.imputed.copy_(baseline.imputed / std)

    def forward(self, is_known: Tensor, dose: Tensor, batch: Data) -> Tensor:
        """Returns the baseline of each sample, [B, T], given the doses of perturbed nodes, [P, K].

        `is_known`, bool [2, N], says whose effects and whose slopes count. In place of another
        effect stands the imputed one, in place of another slope 0.
        """
        node = batch.perturbed
        has_effect, has_slope = is_known.index_select(1, node).unsqueeze(2)
        effect = self.effect.index_select(0, node)
        imputed = self.imputed.index_select(0, node)
        effect = effect.where(has_effect.unsqueeze(2), imputed)
        response = (dose.unsqueeze(2) * effect).sum(dim=1)  # [P, T]
        change = (1 - batch.level).to(dose.dtype).unsqueeze(1)
        of_sum, of_largest, of_smallest = self.weights
        sums = sum_by_sample(change * self.slope * has_slope + of_sum * response, batch)
        largest, smallest = extremes_by_sample(response, batch)
        return self.intercept + sums + of_largest * largest + of_smallest * smallest


def extremes_by_sample(values: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
    """Returns the largest of the perturbed nodes' values [P, T] in each sample, and the smallest.

    They are [B, T], and 0 where the largest is negative or the smallest positive.
    """
    both = torch.cat([values, -values], dim=1)
    sample = batch.perturbed_batch.unsqueeze(1).expand_as(both)
    none = both.new_zeros(num_samples(batch), both.size(1))
    largest, opposite = none.scatter_reduce(0, sample, both, "amax").chunk(2, dim=1)
    return largest, -opposite


class WithoutGraph(nn.Module):
    """What is known without the graph, such as the baseline, in the first column of each target.

    `readout` maps which effects and slopes are known, the doses and the batch to [B, T].
    """

    def __init__(self, readout: nn.Module, num_columns: int):
        super().__init__()
        self.readout = readout
        self.num_columns = num_columns

    def forward(self, graph: SharedGraph, wild: WildType, dose: Tensor, batch: Data) -> Tensor:
        """Returns the term, [B, T * C]."""
        values = self.readout(wild.draws.is_known, dose, batch)
        columns = nn.functional.pad(values.unsqueeze(2), (0, self.num_columns - 1))
        return columns.flatten(start_dim=1)


def baseline_term(task: Any) -> WithoutGraph:
    """Returns the term of the model of a `KnockoutTask`, which starts from its fit."""
    tables = task.tables
    readout = BaselineReadout(len(tables.genes), len(tables.targets), task.basis.size(1))
    if task.start is not None and not task.criterion.starts_from_mean:
        criterion = task.criterion.to("cpu")
        readout.start_from(task.start, criterion.mean, criterion.std)
    if task.config.model.readout == "nodes":
        readout.requires_grad_(False)  # thousands of effects per node would learn noise
    return WithoutGraph(readout, len(task.criterion.columns))
