"""What a model's output means: its columns, the loss of each score, and what it predicts.

A loss is a class here and an entry of `LOSSES`, by whose name optim.loss asks for it. It names the
columns that a model has for each score. The first one predicts the score, in standard deviations
from the mean: what is known without the graph adds to it, and so do terms.
Columns that follow say more, such as how sure the model is; training starts with 0 in them.

Shapes: n rows of T scores, C columns of a score, M models.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from errors import UserError


class Criterion:
    """What all losses have; one of your own overrides what differs.

    `mean` and `std` are of the scores, as `unit` returns them, float64 [T].
    """

    columns: tuple[str, ...]  # names of the output's columns of a score
    link = ""  # what the terms of a prediction add up to, if that is not a score, such as "logit"
    is_binary = False  # whether scores are 0 and 1, and predictions probabilities of 1
    starts_from_mean = False  # True if the baseline, in the unit of `squared`, cannot be the start

    def __init__(self, mean: Tensor, std: Tensor):
        self.mean = mean
        self.std = std

    def to(self, device: torch.device | str) -> "Criterion":
        """Returns the same on a device."""
        return type(self)(self.mean.to(device), self.std.to(device))

    @staticmethod
    def check(y: Tensor) -> None:
        """Raises `UserError` for scores [n, T] that do not suit; a missing one is nan."""

    @staticmethod
    def unit(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the first column is 0, and its unit, in scores or what is linked, [T] each.

        Given are mean and standard deviation of the training scores.
        """
        return mean, std

    @staticmethod
    def inverse_link(total: Tensor) -> Tensor:
        """Returns predictions as scores, given the sum of their terms, such as logits."""
        return total

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of each score, [n, T], of outputs [n, T, C] and scores y [n, T].

        A missing score is any finite number, and its loss does not count.
        """
        raise NotImplementedError

    def standardise(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns scores [n, T] in the unit of the first column."""
        return ((y - self.mean) / self.std).to(dtype)

    def total(self, output: Tensor) -> Tensor:
        """Returns the sum of each prediction's terms, scores or what is linked, float64 [n, T]."""
        return self.mean + self.std * output.select(-1, 0)

    def predictions(self, output: Tensor) -> dict[str, Tensor]:
        """Returns all that is predicted by name, float64 [n, T] each, of outputs [n, T, C].

        `prediction`, in the unit of the scores, comes first.
        """
        return {"prediction": self.inverse_link(self.total(output))}

    @staticmethod
    def together(predictions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns means over models, [n, T], of predictions [M, n, T]; of several, also `sd`."""
        means = {name: of_models.mean(dim=0) for name, of_models in predictions.items()}
        of_models = predictions["prediction"]
        if len(of_models) > 1:
            means["sd"] = of_models.std(dim=0)
        return means


class Squared(Criterion):
    """Squared errors over the variance of the scores."""

    columns = ("mean",)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        (mean,) = output.unbind(-1)
        return mse_loss(mean, self.standardise(y, mean.dtype), reduction="none")


class Binary(Criterion):
    """The cross-entropy of scores of 0 and 1; predictions are probabilities of 1."""

    columns = ("logit",)
    link = "logit"
    is_binary = True

    @staticmethod
    def check(y: Tensor) -> None:
        if not are_binary(y):
            raise UserError(
                "optim.loss=binary needs scores that are 0 or 1: set optim.loss=squared"
            )

    @staticmethod
    def unit(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        return mean.logit(eps=1e-3), torch.ones_like(std)

    @staticmethod
    def inverse_link(total: Tensor) -> Tensor:
        return total.sigmoid()

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self.total(output), y, reduction="none")


def are_binary(y: Tensor) -> bool:
    """Returns whether all scores are 0 or 1 but for missing ones, which are nan."""
    return bool(((y == 0) | (y == 1) | y.isnan()).all())


LOSSES = {  # the values of optim.loss
    "squared": Squared,
    "binary": Binary,
}
