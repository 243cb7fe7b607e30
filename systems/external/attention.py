"""Attention functions from outside this project, called like the functions of this project.

Three forms are accepted:

- a function `(q, k, v, is_causal)`, whose last parameter may be named `causal`, or be missing,
- a `torch.autograd.Function` with the same parameters of `apply`, as in assignment 2 of Stanford
  CS336,
- a function without parameters that returns one of these, as the adapters of the assignment do.

Some functions take q, k and v of shape (batch, heads, seq_len, head_dim). Others, such as those of
the assignment, take (batch, seq_len, head_dim). Then batch and heads are passed as one dimension.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from systems.external.loading import load
from systems.external.reference import BadReference
from systems.kernels.flash_attention.call import Call, autocast
from systems.kernels.flash_attention.reference import attention_reference
from systems.kernels.triton_interpreter import mend_interpreter

PROBE_LENGTH = 256  # maximum number of tokens of the inputs that show which shape a function takes
PROBE_ERROR = 0.1  # maximum relative error of a function that got inputs of the right shape
_CAUSAL = ("is_causal", "causal")  # names of the parameter that selects the causal mask


class ExternalAttention:
    """An attention function from outside this project.

    With `takes_heads`, the function takes (batch, heads, seq_len, head_dim), otherwise (batch *
    heads, seq_len, head_dim). `find_shape` corrects the first guess.

    Raises:
        BadReference: if the reference names something that is not an attention function.
        Exception: any that the code raises while it is imported, or called to return a function.
    """

    def __init__(self, reference: str):
        self.reference = reference
        found = load(reference)
        if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
            mend_interpreter()
        if inspect.isfunction(found) and not inspect.signature(found).parameters:
            found = found()
        if isinstance(found, type):
            if not issubclass(found, torch.autograd.Function):
                raise BadReference(
                    f"{reference} is a class; attention must be a function that takes (q, k, v, "
                    "is_causal) or a torch.autograd.Function"
                )
            self._function: Callable[..., Any] = found.apply
            parameters = list(inspect.signature(found.forward).parameters.values())
            if found.setup_context is torch.autograd.Function.setup_context:
                parameters = parameters[1:]  # ctx
            self._causal = "" if _is_positional(parameters, 3) else None
        elif callable(found):
            self._function = found
            self._causal = _causal_parameter(found)
        else:
            raise BadReference(
                f"{reference} must be a function or a torch.autograd.Function, got {found!r}"
            )
        self.takes_heads = not isinstance(found, type)

    def unsupported_reason(self, is_causal: bool) -> str | None:
        """Return why the function cannot be called with this mask, or None if it can."""
        if is_causal and self._causal is None:
            return f"{self.reference} has no parameter is_causal, so it supports only causal=False"
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Compute attention of q, k and v of shape (batch, heads, seq_len, head_dim).

        With activation checkpointing, the tensors that the function saves for backward are kept
        and not recomputed. Checkpointing would let the function read them only once.

        Raises:
            ValueError: if the result is not a tensor of the shape of q.
        """
        q, k, v = autocast(q, k, v)
        leading = q.shape[:2]
        if not self.takes_heads:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        with _keeping_saved_tensors():
            if self._causal is None:
                out = self._function(q, k, v)
            elif self._causal:
                out = self._function(q, k, v, **{self._causal: is_causal})
            else:
                out = self._function(q, k, v, is_causal)
        if not isinstance(out, Tensor) or out.shape != q.shape:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"{self.reference} must return a tensor of shape {tuple(q.shape)}, got {got}"
            )
        return out if self.takes_heads else out.unflatten(0, leading)

    def find_shape(self, like: Tensor, is_causal: bool) -> None:
        """Find out whether the function takes a separate dimension of heads; set `takes_heads`.

        The function is called with small inputs: first in the shape that functions of its form
        usually take, then in the other. The first shape with a right output is kept. If none is
        right, the first without an exception is kept, whose errors then appear in the run. `like`
        is (batch, heads, seq_len, head_dim), with the dtype, device, head_dim and the largest
        seq_len of the inputs.

        Raises:
            NotImplementedError: if the function launches a Triton kernel and there is no GPU.
        """
        shape = (2, 2, min(like.shape[-2], PROBE_LENGTH), like.shape[-1])
        generator = torch.Generator(like.device).manual_seed(0)
        q, k, v = (
            torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
            for _ in range(3)
        )
        exact = attention_reference(q, k, v, torch.zeros_like(q), Call(is_causal)).out
        usual = self.takes_heads
        without_exception = []
        for takes_heads in (usual, not usual):
            self.takes_heads = takes_heads
            try:
                with torch.no_grad():
                    out = self(q, k, v, is_causal)
                error = torch.linalg.vector_norm(out.double() - exact).item()
            except Exception as error:
                if "active drivers" in str(error):  # of Triton
                    raise NotImplementedError(
                        "the Triton kernel needs a GPU; on a CPU, set TRITON_INTERPRET=1 in the "
                        "environment to run it in Triton's interpreter"
                    ) from error
                continue
            without_exception.append(takes_heads)
            if error <= PROBE_ERROR * torch.linalg.vector_norm(exact).item():
                return
        self.takes_heads = (without_exception or [usual])[0]


def _keeping_saved_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors are saved for backward as they are.

    Without active hooks of saved tensors, hooks of our own would only take time on the host.
    """
    if torch.compiler.is_compiling():  # compiled code reads saved tensors once
        return nullcontext()
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def _causal_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter of the causal mask, "" if passed by position, or None."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature, such as scaled_dot_product_attention
        return _CAUSAL[0]
    for parameter in parameters:
        if parameter.name in _CAUSAL and parameter.kind is not parameter.POSITIONAL_ONLY:
            return parameter.name
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _CAUSAL[0]
    return "" if _is_positional(parameters, 3) else None


def _is_positional(parameters: list[inspect.Parameter], index: int) -> bool:
    """Return whether the parameter at an index can be the causal mask, passed by position.

    One whose default is not a boolean is another option, for example a scale.
    """
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    if len(positional) <= index:
        return False
    parameter = positional[index]
    return parameter.default is parameter.empty or isinstance(parameter.default, bool)
