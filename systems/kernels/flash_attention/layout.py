"""Where the rows of a tensor (..., rows, head_dim) lie, as the Triton kernels are told of it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.flash_attention.configurations import MAX_ROW_STRIDE


class Layout(NamedTuple):
    """(batch, heads, rows, head_dim) of a tensor of any leading dimensions, in elements.

    Elements of a row lie side by side. is_copy: not those of the tensor given, which the kernels
    could not address, but of `tensor.contiguous()`.
    """

    batch: int
    heads: int
    rows: int
    head_dim: int
    strides: tuple[int, int, int]
    is_copy: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self[:4]

    @property
    def n_heads(self) -> int:
        """Of all batches together."""
        return self.batch * self.heads

    @property
    def dense_strides(self) -> tuple[int, int, int]:
        """Of a contiguous tensor of this shape."""
        a_head = self.rows * self.head_dim
        return self.heads * a_head, a_head, self.head_dim


def layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """A view unless the rows cannot be addressed or the leading dimensions not made two.

    A copy costs far less than reading rows element by element, what a last stride that is not 1
    would come to.
    """
    *leading, rows, head_dim = shape
    heads = leading[-1] if leading else 1
    sizes = math.prod(leading[:-1]), heads, rows, head_dim
    batch_stride = _one_stride(leading[:-1], strides[: len(leading) - 1]) if leading else 0
    if (strides[-1] != 1 and head_dim > 1) or strides[-2] >= MAX_ROW_STRIDE or batch_stride is None:
        copied = Layout(*sizes, (0, 0, 0), is_copy=True)
        return copied._replace(strides=copied.dense_strides)
    head_stride = strides[len(leading) - 1] if leading else 0
    return Layout(*sizes, (batch_stride, head_stride, strides[-2]), is_copy=False)


def _one_stride(sizes: list[int], strides: tuple[int, ...]) -> int | None:
    """Of dimensions taken as one; None if there is none."""
    found, span = 0, 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if span == 1:
            found = stride
        elif stride != found * span:
            return None
        span *= size
    return found


def strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Of an output like this input: its own if it is dense and the kernels can address it, in the
    same order if the input is a part of something, and else those of a contiguous tensor."""
    if len(shape) <= 4 and strides[-1] == 1:
        like = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
        if like[-1] == 1 and like[-2] < MAX_ROW_STRIDE:
            return like
    return torch.empty(shape, device="meta").stride()


_kept_strides_like = functools.lru_cache(maxsize=4096)(strides_like)


def empty_like(x: Tensor) -> Tensor:
    """An output like the input x."""
    return x.new_empty_strided(x.shape, _kept_strides_like(x.shape, x.stride()))


def four_dimensional(x: Tensor) -> Tensor:
    """(batch, heads, rows, head_dim) of (..., rows, head_dim): a view unless five or more
    dimensions have strides of their own each."""
    if x.dim() == 4:
        return x
    *leading, rows, head_dim = x.shape
    heads = leading[-1] if leading else 1
    return x.reshape(math.prod(leading[:-1]), heads, rows, head_dim)
