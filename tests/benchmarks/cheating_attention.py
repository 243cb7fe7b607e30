"""Attention functions that look fast because they skip their work. Benchmarks must refuse them.

Most functions compute their first call in full, so that a check of the first call alone passes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from systems.kernels.flash_attention import naive

_cache: dict[Any, tuple[Tensor, ...]] = {}
_previous: list[tuple[Tensor, ...]] = []
Gradients = tuple[Tensor, ...]


def _gradients(ctx: Any, dout: Tensor) -> Gradients:
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        return torch.autograd.grad(naive(q, k, v, is_causal=ctx.is_causal), leaves, dout)


def attention(compute: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> type:
    """Return an autograd function whose forward is `compute` and whose gradients are right."""

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.is_causal = is_causal
        return compute(q, k, v, is_causal)

    def backward(ctx: Any, dout: Tensor) -> Any:
        return (*_gradients(ctx, dout), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(compute.__name__, (torch.autograd.Function,), methods)


_Honest: Any = attention(naive)


def _remembered(key: Any, *inputs: Any) -> Tensor:
    """Return the output for the inputs, or for those of the first call with this key."""
    if key not in _cache:
        _cache[key] = (naive(*inputs),)
    return _cache[key][0].clone()


@attention
def CachedByPointer(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Returns the result of the first call with inputs at the same addresses."""
    key = ("out", q.data_ptr(), k.data_ptr(), v.data_ptr(), is_causal)
    return _remembered(key, q, k, v, is_causal)


@attention
def CachedByPointerAndVersion(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """As CachedByPointer, but computes again after a write that autograd has counted."""
    key = ("version", *((x.data_ptr(), x._version) for x in (q, k, v)), is_causal)
    return _remembered(key, q, k, v, is_causal)


@attention
def CachedByElement(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """As CachedByPointer, but computes again if one element of each input has changed."""
    key = ("element", q.shape, *(x[0, 0, 0].item() for x in (q, k, v)), is_causal)
    return _remembered(key, q, k, v, is_causal)


class _Lazy(Tensor):
    """A tensor that computes its values when it is copied."""


def lazy(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return naive(q, k, v, is_causal=is_causal).as_subclass(_Lazy)


class PreviousGradients(_Honest):  # type: ignore[misc]
    """Returns the gradients of the previous backward."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        _previous.append(_gradients(ctx, dout))
        given = _previous.pop(0) if len(_previous) > 1 else _previous[0]
        return (*(x.clone() for x in given), None)


@attention
def RepeatedInputsSkipped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Returns zeros if an earlier call had the same inputs, as timed calls have."""
    key = ("sums", *(x.double().sum().item() for x in (q, k, v)))
    if key in _cache:
        return torch.zeros_like(q)
    _cache[key] = ()
    return naive(q, k, v, is_causal=is_causal)


@attention
def FirstCallsSkipped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Returns zeros until the inputs of a shape change for the first time.

    A benchmark may call it with a short sequence first, to find the shape that it takes.
    """
    _cache["inputs", q.shape, q.double().sum().item()] = ()
    seen = sum(key[:2] == ("inputs", q.shape) for key in _cache)
    return torch.zeros_like(q) if seen == 1 else naive(q, k, v, is_causal=is_causal)


@attention
def TailRowsSkipped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Leaves out the last 4 rows of sequences of 1,024 tokens or more."""
    out = naive(q, k, v, is_causal=is_causal)
    if q.shape[-2] >= 1024:
        out[..., -4:, :] = 0
    return out


@attention
def OnAnotherThread(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Returns before a thread has computed the output. The CPU's version of the next functions."""
    out = torch.zeros_like(q)
    a, b, c = (x.detach() for x in (q, k, v))

    def compute() -> None:
        time.sleep(0.01)  # as long as the work of a kernel
        out.copy_(naive(a, b, c, is_causal=is_causal))

    threading.Thread(target=compute).start()
    return out


@attention
def OnAnotherStream(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Computes the output on a CUDA stream for which the current stream does not wait."""
    with torch.cuda.stream(_side_stream()):
        return naive(q, k, v, is_causal=is_causal)


@attention
def OnAnotherStreamAfterInputs(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """As OnAnotherStream, but the other stream waits for the inputs."""
    _side_stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_side_stream()):
        return naive(q, k, v, is_causal=is_causal)


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()
