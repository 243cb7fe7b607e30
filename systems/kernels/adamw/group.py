"""Check the options of a parameter group, and derive from them how each parameter is updated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16)


def hyper_values(group: dict[str, Any]) -> list[float]:
    """Return [lr, beta1, beta2, eps, weight_decay] of a parameter group.

    The group is an element of `optimizer.param_groups`. The AdamW kernel reads the hyperparameters
    in this order.
    """
    values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return [float(value) for value in values]


def state_dtypes(param: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """Return the dtype of each optimizer state tensor of a parameter, by name.

    The names are exp_avg, exp_avg_sq and, if the parameter has master weights, master.
    """
    state_dtype = group["state_dtype"]
    dtypes = {"exp_avg": state_dtype, "exp_avg_sq": state_dtype}
    wanted = group["master_weights"]
    if param.dtype != torch.float32 and (
        state_dtype == torch.float32 if wanted is None else wanted
    ):
        dtypes["master"] = torch.float32
    return dtypes


def is_stochastic(param: Tensor, group: dict[str, Any], has_master: bool) -> bool:
    """Return True if the AdamW step of a parameter rounds any tensor stochastically.

    Bfloat16 tensors that have no float32 copy are rounded stochastically, unless the option
    stochastic_rounding of the group is False. Bfloat16 moments never have a float32 copy. A
    bfloat16 parameter has one if it has master weights.
    """
    if group["stochastic_rounding"] is False:
        return False
    only_copy = not has_master and param.dtype == torch.bfloat16
    return only_copy or group["state_dtype"] == torch.bfloat16


def errors_of(group: dict[str, Any]) -> list[str]:
    """Return one error message for each invalid option or parameter of a parameter group."""
    errors = []
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if not isinstance(value, int | float) or not value >= 0:
            errors.append(f"{name} must be a number of at least 0, got {value!r}")
    betas = group["betas"]
    if len(betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
        errors.append(f"betas must be two numbers in [0, 1), got {betas!r}")
    if group["state_dtype"] not in STATE_DTYPES:
        errors.append(f"state_dtype must be one of {STATE_DTYPES}, got {group['state_dtype']!r}")
    if not isinstance(group["seed"], int) or not 0 <= group["seed"] < 2**32:
        errors.append(f"seed must be an integer in [0, 2^32), got {group['seed']!r}")
    # Options in a state dict of torch.optim.AdamW.
    errors += [f"{name} is not supported" for name in ("amsgrad", "maximize") if group.get(name)]
    for i, param in enumerate(group["params"]):
        if param.dtype not in DTYPES:
            errors.append(f"dtype of parameter {i} must be one of {DTYPES}, got {param.dtype}")
        elif param.layout != torch.strided or not param.is_contiguous():
            errors.append(
                f"parameter {i} must be dense and contiguous, got layout {param.layout} and shape "
                f"{tuple(param.shape)}"
            )
    return errors
