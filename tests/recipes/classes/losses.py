"""The losses: each gives that of each row, [n], of logits [n, C] and classes, long [n]."""

from functools import partial

from torch.nn.functional import cross_entropy

LOSSES = {"cross_entropy": partial(cross_entropy, reduction="none")}  # the values of optim.loss
