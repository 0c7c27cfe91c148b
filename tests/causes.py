"""Usual causes of failures in edited code, in words that failing tests print."""

import re

import torch
from torch import Tensor, nn

# {pattern of the message of an error: usual cause}
CAUSES = {
    "expected device|the same device|other tensors on|(same|mixed) d(ata)?type|scalar type": (
        "A tensor is not on the device of the model, or does not have its dtype. Usually the code "
        "creates it without `device=` or `dtype=`, or it is a plain attribute of a module, which "
        "`Module.to` does not convert: use `register_buffer` for a tensor, and `nn.ModuleList` or "
        "`nn.ParameterList` for a list."
    ),
    "more than 1 value per channel": (
        "BatchNorm cannot train on a batch of one sample, such as the last batch of an epoch. It "
        "also makes predictions depend on other samples: use `nn.LayerNorm`."
    ),
    "did not receive grad": (
        "The loss does not depend on the parameters whose names are printed: use or remove them."
    ),
    "no attribute 'seed'": (
        "The model is in training mode, but the batch does not belong to a training step. Usually "
        "`predict_rows` in evaluate.py does not call `model.eval()`."
    ),
    "Storage' object has no attribute '(?!seed)": (
        "`forward` reads a field that the batch does not have. Usually a column is only added for "
        "one command: add it in `make_dataset` of task.py, or to `Tables.columns`."
    ),
}


def causes_of(report: str) -> list[str]:
    """Returns the causes of the errors in a report of pytest, and the place of the error."""
    errors = "\n".join(re.findall(r"^E .*|^\w*Error: .*", report, re.M))
    places = re.findall(r"^\w+\.py:\d+: .*", report, re.M)
    found = [f"The error comes from {place}." for place in places[-1:]]
    return found + [cause for pattern, cause in CAUSES.items() if re.search(pattern, errors)]


def suspects(model: nn.Module) -> list[str]:
    """Returns the names of layers and attributes of a model that often cause failures.

    They are layers of BatchNorm and dropout, and tensors and modules in plain attributes, which
    checkpoints do not contain.
    """
    found = []
    for path, module in model.named_modules():
        kind = type(module).__name__
        if "BatchNorm" in kind or "Dropout" in kind:
            found.append(f"{path} ({kind})")
        for name, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else value
            if not isinstance(value, dict | list | tuple):
                values = [value]
            is_state = any(isinstance(item, Tensor | nn.Module) for item in values)
            if is_state and not name.startswith("_"):
                found.append(f"{path}.{name} (a plain {type(value).__name__})")
    return found


def assert_close(found: Tensor, expected: Tensor, cause: str, tolerance: float = 1e-9) -> None:
    """Checks that two tensors are equal up to a tolerance. A failure begins with a usual cause."""
    __tracebackhide__ = True
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{cause}\n\n{text}"
    )
