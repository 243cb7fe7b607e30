"""Views of tensors (..., rows, head_dim) with the four dimensions and strides of the kernels."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.flash_attention.triton.tile_table import MAX_ROW_STRIDE


class Layout(NamedTuple):
    """Sizes and strides (in elements) of a tensor viewed as (batch, heads, rows, head_dim).

    `strides` are those of the first three dimensions; the stride of the last dimension is 1. If
    `is_copy` is True, the kernels do not support the strides of the tensor, and this is the layout
    of `tensor.contiguous()`.
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
        """Batch size times number of heads."""
        return self.batch * self.heads

    @property
    def dense_strides(self) -> tuple[int, int, int]:
        """First three strides of a contiguous tensor of this shape."""
        head_size = self.rows * self.head_dim
        return self.heads * head_size, head_size, self.head_dim


def layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor, or of its contiguous copy if its strides are not supported.

    The kernels support strides under three conditions: the elements of a row are contiguous, the
    stride of the rows is below MAX_ROW_STRIDE, and the leading dimensions can be viewed as two
    dimensions. A copy takes far less time than reading rows whose elements are not contiguous.
    """
    *leading, rows, head_dim = shape
    heads = leading[-1] if leading else 1
    sizes = math.prod(leading[:-1]), heads, rows, head_dim
    batch_stride = _merged_stride(leading[:-1], strides[: len(leading) - 1]) if leading else 0
    if (strides[-1] != 1 and head_dim > 1) or strides[-2] >= MAX_ROW_STRIDE or batch_stride is None:
        copied = Layout(*sizes, (0, 0, 0), is_copy=True)
        return copied._replace(strides=copied.dense_strides)
    head_stride = strides[len(leading) - 1] if leading else 0
    return Layout(*sizes, (batch_stride, head_stride, strides[-2]), is_copy=False)


def _merged_stride(sizes: list[int], strides: tuple[int, ...]) -> int | None:
    """Return the stride of several dimensions viewed as one, or None if no such view exists."""
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


def output_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the output tensor for an input with this shape and these strides.

    They are the strides of `torch.empty_like(input)`. The output of a dense input has the strides
    of the input. The output of a slice is dense and has the dimension order of the slice. If the
    kernels do not support these strides, or if the input has more than four dimensions, the output
    is contiguous.
    """
    if len(shape) <= 4 and strides[-1] == 1:
        like = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
        if like[-1] == 1 and like[-2] < MAX_ROW_STRIDE:
            return like
    return torch.empty(shape, device="meta").stride()


_cached_output_strides = functools.lru_cache(maxsize=4096)(output_strides)


def empty_like(x: Tensor) -> Tensor:
    """Allocate an output with the shape and dtype of x and the strides of `output_strides`."""
    return x.new_empty_strided(x.shape, _cached_output_strides(x.shape, x.stride()))


def four_dimensional(x: Tensor) -> Tensor:
    """Return x (..., rows, head_dim) as a tensor (batch, heads, rows, head_dim).

    The result is a view of x if possible. Only more than two leading dimensions may require a copy.
    """
    if x.dim() == 4:
        return x
    *leading, rows, head_dim = x.shape
    heads = leading[-1] if leading else 1
    return x.reshape(math.prod(leading[:-1]), heads, rows, head_dim)
