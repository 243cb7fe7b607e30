"""Data-parallel wrappers and optimizers from outside this project.

The forms are those of assignment 2 of Stanford CS336:

- DDP: a class or function `(module)` or `(module, bucket_size_mb)` that returns a module. After
  backward, its method `finish_gradient_synchronization` is called if it has one.
- FSDP: a class or function `(module, compute_dtype)` that returns a module with the methods
  `finish_gradient_synchronization` and `gather_full_params` (or `gather_full_parameters`).
- Sharded optimizer: a class or function `(params, optimizer_cls, **options)`.

Instead of these methods, the file may have the functions that the tests of the assignment use:
`ddp_on_after_backward`, `fsdp_on_after_backward` and `fsdp_gather_full_params`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from systems.external.loading import load
from systems.external.reference import BadReference

_FINISH = "finish_gradient_synchronization"
_GATHER = ("gather_full_params", "gather_full_parameters")


def wrap_ddp(reference: str, module: nn.Module, bucket_size_mb: float) -> nn.Module:
    """Wrap a module in a DDP wrapper from outside this project.

    Args:
        reference: reference to the wrapper, such as `my_ddp.py:MyDDP`.
        module: the module.
        bucket_size_mb: bucket size in MB (10^6 bytes). It is passed only to a wrapper with a
            parameter of this name.

    Raises:
        BadReference: if the reference names something that is not a DDP wrapper.
    """
    make = load(reference)
    sizes = (bucket_size_mb,) if "bucket_size_mb" in _parameters(make) else ()
    return _with_finish(make, make(module, *sizes), reference, "ddp_on_after_backward")


def wrap_fsdp(reference: str, module: nn.Module, compute_dtype: torch.dtype | None) -> nn.Module:
    """Wrap a module in an FSDP wrapper from outside this project.

    Args:
        reference: reference to the wrapper, such as `my_fsdp.py:MyFSDP`.
        module: the module.
        compute_dtype: dtype to which the wrapper casts gathered weights. None keeps their dtype.

    Raises:
        BadReference: if the reference names something that is not an FSDP wrapper.
        NotImplementedError: if compute_dtype is given, but the wrapper does not take it.
    """
    make = load(reference)
    takes_dtype = "compute_dtype" in _parameters(make)
    if compute_dtype is not None and not takes_dtype:
        raise NotImplementedError(f"{reference} has no parameter compute_dtype")
    dtypes = {"compute_dtype": compute_dtype} if takes_dtype else {}
    wrapper = _with_finish(make, make(module, **dtypes), reference, "fsdp_on_after_backward")
    if not any(hasattr(wrapper, name) for name in _GATHER):
        companion = _companion(make, "fsdp_gather_full_params")
        if companion is None:
            raise BadReference(
                f"{reference}: an FSDP wrapper must have the method {_GATHER[0]}, which returns "
                "all parameters unsharded, by name"
            )
        object.__setattr__(wrapper, _GATHER[0], partial(companion, wrapper))
    return wrapper


def full_parameters(wrapper: nn.Module, names: Iterable[str]) -> Mapping[str, Tensor]:
    """Gather the unsharded parameters of an external FSDP wrapper.

    Args:
        wrapper: module that `wrap_fsdp` returned.
        names: names of the parameters of the module without the wrapper.

    Returns:
        The parameters with these names. A prefix `module.` of the wrapper's names is removed.

    Raises:
        ValueError: if a parameter is missing.
    """
    gather: Any = next(getattr(wrapper, name) for name in _GATHER if hasattr(wrapper, name))
    given: Mapping[str, Tensor] = gather()
    plain = {name.removeprefix("module."): value.detach() for name, value in given.items()}
    missing = [name for name in names if name not in plain]
    if missing:
        raise ValueError(
            f"{_GATHER[0]} must return every parameter by name, but these are missing: "
            f"{', '.join(missing[:5])}; it returned {', '.join(list(given)[:5])}"
        )
    return {name: plain[name] for name in names}


def make_sharded_optimizer(
    reference: str, parameters: Iterable[Tensor], optimizer_class: type, options: dict[str, Any]
) -> Optimizer:
    """Make an optimizer of a class from outside this project that shards the optimizer state.

    Args:
        reference: reference to the class, such as `my_optimizer.py:MyShardedOptimizer`.
        parameters: parameters to optimize.
        optimizer_class: class of the wrapped optimizer, such as torch.optim.AdamW.
        options: keyword arguments of `optimizer_class`.
    """
    optimizer: Optimizer = load(reference)(parameters, optimizer_class, **options)
    return optimizer


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return {}


def _companion(make: Any, name: str) -> Callable[..., Any] | None:
    """Return the function with this name in the module that defines a wrapper, or None."""
    return getattr(sys.modules.get(getattr(make, "__module__", "")), name, None)


def _with_finish(make: Any, wrapper: Any, reference: str, companion: str) -> nn.Module:
    if not isinstance(wrapper, nn.Module):
        raise BadReference(
            f"{reference} must return a torch.nn.Module, got {type(wrapper).__name__}"
        )
    function = _companion(make, companion)
    if not hasattr(wrapper, _FINISH) and function is not None:
        object.__setattr__(wrapper, _FINISH, partial(function, wrapper, None))
    return wrapper
