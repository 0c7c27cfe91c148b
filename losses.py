"""The meaning of the model's outputs: their columns, the loss of each score, and the predictions.

A loss is a class in this module and an entry of `LOSSES`; optim.loss selects it by the entry's
name. The class lists the columns that the model has for each score. The first column predicts the
score, in standard deviations from the mean. The baseline and all terms of the model add to it.
Further columns predict more, such as the uncertainty. They are 0 at the start of training.

Shapes: n rows of T scores, C columns of a score, M models.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from errors import UserError


class Criterion:
    """Base class of all losses. Your own loss overrides what differs.

    `mean` and `std` are the offset and the scale of the first column, from `unit`, float64 [T].
    """

    columns: tuple[str, ...]  # names of a score's columns in the output
    # Scale on which the terms of a prediction add up, such as "logit"; "": the score itself.
    link = ""
    is_binary = False  # whether scores are 0 and 1, and predictions are probabilities of 1
    # True if training cannot start from the baseline, which has the unit of `squared`.
    starts_from_mean = False

    def __init__(self, mean: Tensor, std: Tensor):
        self.mean = mean
        self.std = std

    def to(self, device: torch.device | str) -> "Criterion":
        """Returns a copy on the given device."""
        return type(self)(self.mean.to(device), self.std.to(device))

    @staticmethod
    def check(y: Tensor) -> None:
        """Raises `UserError` if scores [n, T] are not valid for this loss; missing ones are nan."""

    @staticmethod
    def origin_and_unit(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the offset and the scale of the first column, [T] each.

        The score, or its link, is offset + scale * column. `mean` and `std` are the mean and
        standard deviation of the training scores.
        """
        return mean, std

    @staticmethod
    def inverse_link(total: Tensor) -> Tensor:
        """Returns predictions as scores, given the sums of their terms, such as logits."""
        return total

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of each score, [n, T], given outputs [n, T, C] and scores y [n, T].

        A missing score may be any finite number, because the caller gives its loss the weight 0.
        """
        raise NotImplementedError

    def standardise(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns scores [n, T] in the unit of the first column."""
        return ((y - self.mean) / self.std).to(dtype)

    def total(self, output: Tensor) -> Tensor:
        """Returns the sum of each prediction's terms, on the scale of `link`, float64 [n, T]."""
        return self.mean + self.std * output.select(-1, 0)

    def predictions(self, output: Tensor) -> dict[str, Tensor]:
        """Returns all predictions by name, float64 [n, T] each, given outputs [n, T, C].

        The first is `prediction`, in the unit of the scores.
        """
        return {"prediction": self.inverse_link(self.total(output))}

    @staticmethod
    def together(predictions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns an ensemble's predictions by name, [n, T], given those of M models, [M, n, T].

        They are means over the models. With several models, `sd` is the standard deviation of their
        predictions.
        """
        means = {name: of_models.mean(dim=0) for name, of_models in predictions.items()}
        of_models = predictions["prediction"]
        if len(of_models) > 1:
            means["sd"] = of_models.std(dim=0)
        return means


class Squared(Criterion):
    """The squared error divided by the variance of the scores."""

    columns = ("mean",)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        (mean,) = output.unbind(-1)
        return mse_loss(mean, self.standardise(y, mean.dtype), reduction="none")


class Binary(Criterion):
    """The cross-entropy for scores of 0 and 1. Predictions are probabilities of 1."""

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
    def origin_and_unit(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        return mean.logit(eps=1e-3), torch.ones_like(std)

    @staticmethod
    def inverse_link(total: Tensor) -> Tensor:
        return total.sigmoid()

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self.total(output), y, reduction="none")


def are_binary(y: Tensor) -> bool:
    """Returns whether all scores are 0, 1 or missing (nan)."""
    return bool(((y == 0) | (y == 1) | y.isnan()).all())


LOSSES = {  # the values of optim.loss
    "squared": Squared,
    "binary": Binary,
}
