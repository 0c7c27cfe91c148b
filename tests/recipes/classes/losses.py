"""The losses: functions of logits [n, C] and classes, long [n], that return losses [n]."""

from functools import partial

from torch.nn.functional import cross_entropy

LOSSES = {"cross_entropy": partial(cross_entropy, reduction="none")}  # the values of optim.loss
