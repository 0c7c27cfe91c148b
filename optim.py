"""The optimiser: its parameter groups, the learning-rate schedule, and which steps are skipped."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ddp_setup import Distributed
from errors import UserError
from losses import LOSSES

# {optim.precision: dtype of autocast}; other precisions do not use autocast
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class OptimConfig:
    epochs: int = field(default=20, metadata={"min": 1})
    lr: float = field(default=0.01, metadata={"min": 0})
    warmup: float = field(default=0.05, metadata={"min": 0, "max": 1})
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    lr_mult: dict = field(default_factory=dict, metadata={"resume": "fixed"})
    clip: float = field(default=1.0, metadata={"min": 0})
    patience: int = field(default=0, metadata={"min": 0})
    loss: Literal[tuple(LOSSES)] = field(default="squared", metadata={"resume": "fixed"})
    accumulate: int = field(default=1, metadata={"min": 1, "resume": "free"})
    zero: bool = field(default=False, metadata={"resume": "free"})
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    on_nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self):
        for key, value in self.lr_mult.items():
            is_factor = type(value) in (int, float) and 0 <= value < 1e30
            if not (isinstance(key, str) and is_factor):
                advice = "the key must be part of a parameter name, and the value a number >= 0"
                raise ValueError(f"optim.lr_mult: {key}: {value!r} is invalid: {advice}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters, graph and optimiser state."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that autocast uses for dense layers, or None if there is no autocast."""
        return AUTOCAST.get(self.precision)


def build_optimizer(
    model: nn.Module, optim: OptimConfig, ddp: Distributed
) -> torch.optim.Optimizer:
    """Returns AdamW. With optim.zero, its state is sharded over the ranks (ZeRO stage 1).

    The optimiser is fused, so that it can skip a step without waiting for the GPU; see `may_step`.
    """
    groups = parameter_groups(model, optim)
    if optim.zero and ddp.is_distributed:
        # This import is only here because it takes half a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=optim.lr, fused=True)
    return torch.optim.AdamW(groups, lr=optim.lr, fused=True)


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Returns groups of parameters that have the same learning rate and weight decay.

    The learning rate of a parameter is optim.lr times a factor. The factor is the value in
    optim.lr_mult whose key is part of the parameter's name. If several keys are part of the name,
    the longest key counts. If no key is part of it, the factor is 1. A factor of 0 freezes the
    parameter.

    A model can have a method `no_weight_decay`, as in timm. It returns the names of the parameters
    without weight decay.

    Raises `UserError` if a key is not part of any parameter's name, or if all parameters are
    frozen.
    """
    keys = sorted(optim.lr_mult, key=len)
    unused = set(keys)
    undecayed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups = {}  # {(factor of the learning rate, whether there is no weight decay): group}
    for name, parameter in model.named_parameters():
        fitting = [key for key in keys if key in name]
        unused -= set(fitting)
        multiplier = optim.lr_mult[fitting[-1]] if fitting else 1.0
        if multiplier == 0:
            parameter.requires_grad_(False)
        weight_decay = 0.0 if name in undecayed else optim.weight_decay
        new_group = {"params": [], "lr": multiplier * optim.lr, "weight_decay": weight_decay}
        group = groups.setdefault((multiplier, name in undecayed), new_group)
        group["params"].append(parameter)
    if unused or not any(parameter.requires_grad for parameter in model.parameters()):
        names = ", ".join(name for name, _ in model.named_parameters())
        raise UserError(
            f"optim.lr_mult={optim.lr_mult} has a key that is not part of any parameter name, or "
            f"freezes all parameters: use parts of these names as keys: {names:.300}"
        )
    return list(groups.values())


def schedule(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Returns the factor of the peak learning rate in a step.

    The factor increases linearly to 1 during the warm-up, and then decreases to 0 as half a cosine.
    """
    warmup = max(1, round(optim.warmup * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    angle = math.pi * (step - warmup) / max(1, total_steps - warmup)
    return 0.5 * (1 + math.cos(angle))


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets the learning rate of each group to its initial learning rate times a factor.

    On a GPU, the result is rounded to float32, because CUDA graphs read it from a float32 tensor.
    Eager steps therefore use the same learning rates as replayed steps.
    """
    for group in optimizer.param_groups:
        lr = factor * group.setdefault("initial_lr", group["lr"])
        group["lr"] = float(np.float32(lr)) if group["params"][0].is_cuda else lr


def may_step(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> bool:
    """Returns whether to call `optimizer.step`, given the gradient norm, a scalar tensor.

    If the norm is not finite, the step must not change the parameters. For a fused optimiser, this
    function always returns True: it sets `found_inf`, and the optimiser itself skips the step on
    the device. The host then does not wait for the norm. With any other optimiser, the host waits.
    """
    inner = getattr(optimizer, "optim", optimizer)  # the optimiser that ZeRO wraps
    if getattr(inner, "_step_supports_amp_scaling", False):
        inner.found_inf = (~grad_norm.isfinite()).float()  # as GradScaler does
        return True
    return bool(grad_norm.isfinite())
