"""Data-parallel wrappers and optimizers from outside this project.

The forms are those of assignment 2 of Stanford CS336:

- DDP: a class or function `(module)` or `(module, bucket_size_mb)` that returns a module. After
  backward, its method `finish_gradient_synchronization` is called if it has one.
- FSDP: a class or function `(module, compute_dtype)` that returns a module with the methods
  `finish_gradient_synchronization` and `gather_full_params` (or `gather_full_parameters`).
- Sharded optimizer: a class or function `(params, optimizer_cls, **options)`.

The adapters of the assignment's tests work, too. Such a function `get_NAME` returns the wrapper.
The functions `NAME_on_after_backward(model, optimizer)`, whose optimizer is None here, and
`NAME_gather_full_params(model)` in the same file do what the methods do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from systems.external.loading import load
from systems.external.reference import BadReference

_FINISH = "finish_gradient_synchronization"
_ADAPTED_FINISH = "_finish_by_adapter"  # attribute with the function of an adapter
# Learning rate with which gradients change weights clearly, so that the difference is exact enough.
UPDATE_RATE = 2.0**12
_GATHER = ("gather_full_params", "gather_full_parameters")


def wrap_ddp(
    reference: str, module: nn.Module, bucket_size_mb: float | None, default_mb: float
) -> nn.Module:
    """Wrap a module in a DDP wrapper from outside this project, such as `my_ddp.py:MyDDP`.

    Sizes are in 10^6 bytes. Without bucket_size_mb, the default of the wrapper stays, or it gets
    default_mb if it requires a size.

    Raises:
        BadReference: if the reference names something that is not a DDP wrapper.
        NotImplementedError: if bucket_size_mb is given, but the wrapper does not take it.
    """
    make = load(reference)
    parameter = _parameters(make).get("bucket_size_mb")
    if bucket_size_mb is not None and parameter is None:
        raise NotImplementedError(f"{reference} has no parameter bucket_size_mb")
    if parameter is not None and parameter.default is parameter.empty:
        bucket_size_mb = bucket_size_mb or default_mb
    sizes = {} if bucket_size_mb is None else {"bucket_size_mb": bucket_size_mb}
    return _adapted(make, make(module, **sizes), reference)


def wrap_fsdp(reference: str, module: nn.Module, compute_dtype: torch.dtype | None) -> nn.Module:
    """Wrap a module in an FSDP wrapper from outside this project, such as `my_fsdp.py:MyFSDP`.

    compute_dtype is that of gathered weights. None keeps their dtype.

    Raises:
        BadReference: if the reference names something that is not an FSDP wrapper.
        NotImplementedError: if compute_dtype is given, but the wrapper does not take it.
    """
    make = load(reference)
    takes_dtype = "compute_dtype" in _parameters(make)
    if compute_dtype is not None and not takes_dtype:
        raise NotImplementedError(f"{reference} has no parameter compute_dtype")
    dtypes = {"compute_dtype": compute_dtype} if takes_dtype else {}
    wrapper = _adapted(make, make(module, **dtypes), reference)
    if not any(hasattr(wrapper, name) for name in _GATHER):
        companion = _companion(make, "gather_full_params")
        if companion is None:
            raise BadReference(
                f"{reference}: an FSDP wrapper must have the method {_GATHER[0]}, which returns "
                "all parameters unsharded, by name"
            )
        object.__setattr__(wrapper, _GATHER[0], partial(companion, wrapper))
    return wrapper


def full_parameters(wrapper: nn.Module, names: Iterable[str]) -> Mapping[str, Tensor]:
    """Gather the unsharded parameters of an external FSDP wrapper.

    A prefix `module.` of the wrapper's names is removed. `names` are those without the wrapper.

    Raises:
        ValueError: if a parameter is missing, or the wrapper returns no dict.
    """
    gather: Any = next(getattr(wrapper, name) for name in _GATHER if hasattr(wrapper, name))
    given: Mapping[str, Tensor] = gather()
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{_GATHER[0]} must return a dict of parameters by name, got {type(given).__name__}"
        )
    plain = {name.removeprefix("module."): value.detach() for name, value in given.items()}
    missing = [name for name in names if name not in plain]
    if missing:
        raise ValueError(
            f"{_GATHER[0]} must return every parameter by name, but these are missing: "
            f"{', '.join(missing[:5])}; it returned {', '.join(list(given)[:5])}"
        )
    return {name: plain[name] for name in names}


def full_gradients_by_update(
    wrapper: nn.Module, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the unsharded gradients of an external FSDP wrapper, whose shards have any layout.

    Plain gradient descent with a learning rate R changes each weight by -R times its gradient. The
    difference of the gathered weights is therefore the gradient. The weights are restored. All
    ranks must call this function, after the gradients of the wrapper were synchronized. `names` are
    those of the parameters without the wrapper.
    """
    names = list(names)
    own = [p for p in wrapper.parameters() if p.requires_grad]
    saved = [p.detach().clone() for p in own]
    before = {name: value.clone() for name, value in full_parameters(wrapper, names).items()}
    torch.optim.SGD(own, lr=UPDATE_RATE, foreach=False).step()
    after = full_parameters(wrapper, names)
    gradients = {name: (before[name] - after[name]) / UPDATE_RATE for name in names}
    with torch.no_grad():
        for parameter, value in zip(own, saved, strict=True):
            parameter.copy_(value)
    yield from gradients.items()


def make_sharded_optimizer(
    reference: str, parameters: Iterable[Tensor], optimizer_class: type, options: dict[str, Any]
) -> Optimizer:
    """Make an optimizer of a class such as `my_optimizer.py:MyShardedOptimizer`.

    Options are those of optimizer_class.
    """
    optimizer: Optimizer = load(reference)(parameters, optimizer_class, **options)
    return optimizer


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return {}


def finish_of(wrapper: nn.Module) -> Callable[[], Any] | None:
    """Return the function to call after backward, or None if the wrapper needs none."""
    function: Any = getattr(wrapper, _FINISH, None) or getattr(wrapper, _ADAPTED_FINISH, None)
    return function


def _companion(make: Any, suffix: str) -> Callable[..., Any] | None:
    """Return the function NAME_suffix in the file of an adapter get_NAME, or None."""
    if not inspect.isfunction(make) or not make.__name__.startswith("get_"):
        return None
    name = f"{make.__name__.removeprefix('get_')}_{suffix}"
    return getattr(sys.modules.get(make.__module__), name, None)


def _adapted(make: Any, wrapper: Any, reference: str) -> nn.Module:
    if not isinstance(wrapper, nn.Module):
        raise BadReference(
            f"{reference} must return a torch.nn.Module, got {type(wrapper).__name__}"
        )
    function = _companion(make, "on_after_backward")
    if function is not None:  # a wrapper may forward setattr to the module, object does not
        object.__setattr__(wrapper, _ADAPTED_FINISH, partial(function, wrapper, None))
    return wrapper
