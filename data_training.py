"""What the training rows tell of scores and levels: units, weights, and how many doses there are.

Shapes: n rows of T targets, K responses of a node to its level.
"""

import torch
from torch import Tensor

from data_tables import Tables
from mask import doses
from metrics import mean_and_std


def basis_of(tables: Tables) -> Tensor:
    """Returns the matrix that maps the `mask.doses` of a level to K doses, float64 [3, K].

    There are as many doses, and so effects of a node, as the levels in training identify. Gains are
    apart from losses if there are both; deletions are apart from losses if there are also levels
    between 0 and 1. Each column is scaled so that the mean square of its doses that are not 0 is 1
    in training: one penalty then suits all.
    """
    is_trained = tables.is_in("train") & ~tables.y.isnan().all(dim=1)
    level, count = tables.level[is_trained[tables.sample()]].unique(return_counts=True)
    count = count.double()
    columns = [[1.0, 1.0, 0.0]]  # 1 - level
    if (level < 1).any() and (level > 1).any():
        columns = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    if (level == 0).any() and ((level > 0) & (level < 1)).any():
        columns.append([0.0, 0.0, 1.0])
    basis = torch.tensor(columns, dtype=torch.float64).T
    dose = doses(level) @ basis
    mean_square = (count @ dose.square()) / (count @ (dose != 0).double())
    return basis / mean_square.sqrt().nan_to_num(1.0)


def mean_one_weight(tables: Tables) -> Tensor:
    """Returns weights with a mean of 1 over the training rows of each target, float64 [n, T].

    They are 0 where y is missing.
    """
    weight = tables.score_weight(slice(None))
    of_train = tables.score_weight(tables.rows("train"))
    return weight * ((of_train > 0).sum(dim=0) / of_train.sum(dim=0))


def training_mean_and_std(tables: Tables) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of the training scores, by their weight, [T] each."""
    rows = tables.rows("train")
    return mean_and_std(tables.y[rows], mean_one_weight(tables)[rows])


def effective_share(weight: Tensor) -> Tensor:
    """Returns the effective number of rows (Kish 1965), as a share of those with a weight, [T].

    It is 1 for equal weights [n, T], and small where a few rows have nearly all the weight. The
    weights of the others are small then, and so must be the penalties.
    """
    effective = weight.sum(dim=0).square() / weight.square().sum(dim=0)
    return effective / (weight > 0).sum(dim=0)
