"""The meaning of the model's outputs: their loss, and how predictions are computed from them.

To add a loss, write a subclass of `Criterion`, and add it to `LOSSES`. Its name there is the value
of optim.loss.

The class lists the columns that the model outputs for each score. The first column predicts the
score, by default in standard deviations from the mean. The baseline is added to this column only.
Further columns can predict something else, such as the uncertainty. They are 0 at the start of
training.

Shapes: n rows of T scores, C columns of a score, M models.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from errors import UserError


class Criterion:
    """Base class of all losses. Your own loss overrides the attributes and methods that differ.

    `mean` and `std`, float64 [T] each, are the origin and the unit of the first column, from
    `origin_and_unit`.
    """

    columns: tuple[str, ...]  # names of the columns that the model outputs for each score
    # Name of the scale on which the terms of a prediction are added, such as "logit". "" means the
    # scale of the scores.
    link = ""
    is_binary = False  # whether scores are 0 and 1, and predictions are probabilities of 1

    def __init__(self, mean: Tensor, std: Tensor):
        self.mean = mean
        self.std = std

    def to(self, device: torch.device | str) -> "Criterion":
        """Returns a copy on the given device."""
        return type(self)(self.mean.to(device), self.std.to(device))

    @staticmethod
    def check(y: Tensor) -> None:
        """Raises `UserError` if a score is not valid for this loss.

        Missing scores in y [n, T] are nan.
        """

    @staticmethod
    def origin_and_unit(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the origin and the unit of the first column, [T] each.

        On the scale of `link`, a prediction is origin + unit * column. The arguments are the mean
        and the standard deviation of the training scores. By default, the function returns them.
        """
        return mean, std

    @staticmethod
    def inverse_link(total: Tensor) -> Tensor:
        """Returns predictions on the scale of the scores, given sums of terms, such as logits."""
        return total

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of each score, [n, T], given outputs [n, T, C] and scores y [n, T].

        For a missing score, y contains any finite number, and the caller multiplies its loss by 0.
        """
        raise NotImplementedError

    def standardise(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns scores [n, T] relative to the origin of the first column, and in its unit."""
        return ((y - self.mean) / self.std).to(dtype)

    def total(self, output: Tensor) -> Tensor:
        """Returns the sum of each prediction's terms on the scale of `link`, float64 [n, T]."""
        return self.mean + self.std * output.select(-1, 0)

    def predictions(self, output: Tensor) -> dict[str, Tensor]:
        """Returns {name: predictions, float64 [n, T]}, given outputs [n, T, C].

        The first name is `prediction`, the predicted score. Your own loss can add predictions, such
        as `sd`.
        """
        return {"prediction": self.inverse_link(self.total(output))}

    @staticmethod
    def together(predictions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the predictions of an ensemble, {name: [n, T]}.

        `predictions` contains the predictions of its M models, {name: [M, n, T]}. The result is the
        mean over the models. If there are several models, `sd` is the standard deviation of their
        predictions. If each model predicts an `sd`, the result is the standard deviation of the
        mixture of their distributions: the variance of the mixture is the mean of the variances
        plus the variance of the predictions.
        """
        means = {name: of_models.mean(dim=0) for name, of_models in predictions.items()}
        of_models = predictions["prediction"]
        if "sd" in predictions:
            variance = predictions["sd"].square().mean(dim=0) + of_models.var(dim=0, correction=0)
            means["sd"] = variance.sqrt()
        elif len(of_models) > 1:
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
            raise UserError("optim.loss=binary needs scores of 0 and 1: set optim.loss=squared")

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
