"""Check the options of a parameter group, and derive from them how each parameter is updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16)


def hyper_values(group: dict[str, Any]) -> list[float | Tensor]:
    """Return [lr, beta1, beta2, eps, weight_decay] of a parameter group.

    The group is an element of `optimizer.param_groups`. The AdamW kernel reads the hyperparameters
    in this order. Tensors on a GPU are returned as they are, because the host would have to wait
    for their values.
    """
    values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return [v if isinstance(v, Tensor) and not v.is_cpu else float(v) for v in values]


def parameter_name(index: int, group: dict[str, Any], place: int) -> str:
    """Return how messages call parameter `index` of all, which is `place` in its group."""
    names = group.get("param_names")
    return f"parameter {index} ({names[place]})" if names else f"parameter {index}"


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
        if not (_is_number(value, tensor=name == "lr") and value >= 0):
            errors.append(f"{name} must be a number of at least 0, got {value!r}")
    betas = group["betas"]
    if len(betas) != 2 or not all(_is_number(b, tensor=True) and 0 <= b < 1 for b in betas):
        errors.append(f"betas must be two numbers in [0, 1), got {betas!r}")
    if group["state_dtype"] not in STATE_DTYPES:
        errors.append(f"state_dtype must be one of {STATE_DTYPES}, got {group['state_dtype']!r}")
    if not isinstance(group["seed"], int) or not 0 <= group["seed"] < 2**32:
        errors.append(f"seed must be an integer in [0, 2^32), got {group['seed']!r}")
    # Options in a state dict of torch.optim.AdamW or Adam. Those that are not named here, foreach,
    # fused and capturable, change no result.
    refused = ("amsgrad", "maximize", "differentiable")
    errors += [f"{name} is not supported" for name in refused if group.get(name)]
    if group.get("decoupled_weight_decay") is False and group["weight_decay"] != 0:
        errors.append("decoupled_weight_decay=False is not supported with a weight_decay")
    for i, param in enumerate(group["params"]):
        errors += parameter_errors(parameter_name(i, group, i), param)
    return errors


def _is_number(value: object, tensor: bool) -> bool:
    if tensor and isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real)


def parameter_errors(name: str, param: Tensor) -> list[str]:
    """Return an error message if the kernel cannot update a parameter, which it calls `name`."""
    if is_traceable_wrapper_subclass(param):  # a kernel cannot read it at its address
        return [f"{name} must be a plain tensor, got {type(param).__name__}; give its local tensor"]
    if param.dtype not in DTYPES:
        return [f"dtype of {name} must be one of {DTYPES}, got {param.dtype}"]
    if param.layout != torch.strided:
        return [f"{name} must be dense, got layout {param.layout}"]
    if _described(param) != _plain(param.dtype, param.shape, param.device):
        return [f"{name} must be contiguous, got {_described(param)}"]
    return []


def misfits(
    name: str, param: Tensor, others: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> list[str]:
    """Return one error message for each tensor that a step cannot use with a parameter.

    The kernels trust all tensors to have the size of the parameter. `others` are its step, gradient
    and state by name, and `dtypes` is that of each moment and of the master weights, if any.
    """
    grad = others["gradient"].dtype
    dtypes = {"gradient": grad if grad in DTYPES else param.dtype, **dtypes}
    wanted = {what: _plain(dtype, param.shape, param.device) for what, dtype in dtypes.items()}
    wanted["step"] = _plain(torch.int64, (), param.device)
    given = {what: _described(tensor) for what, tensor in others.items()}
    return parameter_errors(name, param) + [
        f"{what} of {name} must be {wanted.get(what, 'none')}, got {given.get(what, 'none')}"
        for what in {**wanted, **given}
        if wanted.get(what) != given.get(what)
    ]


def _plain(dtype: torch.dtype, shape: Iterable[int], device: torch.device) -> str:
    return f"{dtype} of shape {tuple(shape)} on {device}"


def _described(tensor: Tensor) -> str:
    """Return the properties of a tensor. If it is contiguous, they are those of `_plain`."""
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    freed = " without memory" if tensor.untyped_storage().nbytes() < tensor.nbytes else ""
    return _plain(tensor.dtype, tensor.shape, tensor.device) + strides + freed
