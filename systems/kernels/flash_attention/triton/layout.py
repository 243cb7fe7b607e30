"""Sizes and strides with which the kernels read and write tensors.

A tensor (..., rows, head_dim) is viewed as (batch, heads, rows, head_dim). The kernels take the
strides of the first three of these four dimensions as arguments.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.flash_attention.triton.tile_table import MAX_ROW_STRIDE

MAX_LAYOUTS = 1024  # maximum number of entries in each cache of strides


class Layout(NamedTuple):
    """Sizes and strides of a tensor that is viewed as (batch, heads, rows, head_dim).

    Fields:
        strides: of the first three dimensions, in elements. The stride of head_dim is 1.
        is_copy: whether the kernels do not support the strides of the tensor. It must then be
            copied, and `strides` are those of `tensor.contiguous()`.
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
        """Strides of the first three dimensions of a contiguous tensor with these sizes."""
        head_size = self.rows * self.head_dim
        return self.heads * head_size, head_size, self.head_dim


def layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor (..., rows, head_dim), or that of a contiguous copy.

    The kernels support strides under three conditions: the elements of a row are contiguous, the
    stride of the rows is below 2^23 elements (MAX_ROW_STRIDE), and all dimensions before the last
    three can be viewed as one dimension (batch). Strides are in elements.
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
    """Return the stride of several dimensions viewed as one, or None if that is impossible."""
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


def output_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], last_dim: int | None = None
) -> tuple[int, ...]:
    """Return the strides of the output tensor for an input with this shape and these strides.

    They are those of `torch.empty_like(input)`, which for a dense input are its own. They are
    instead those of a contiguous tensor if the input has more than four dimensions, if the stride
    of its last dimension is not 1, or if the kernels do not support the former. The last dimension
    of the output has size `last_dim`, by default that of the input. If the sizes differ, the output
    has the same order of dimensions in memory.
    """
    if last_dim is not None and last_dim != shape[-1]:
        like, found, span = output_strides(shape, strides), [1] * len(shape), last_dim
        for axis in sorted(range(len(shape) - 1), key=lambda axis: (like[axis], -axis)):
            found[axis] = span
            span *= max(1, shape[axis])
        if found[-2] < MAX_ROW_STRIDE:
            return tuple(found)
        return torch.empty((*shape[:-1], last_dim), device="meta").stride()
    if len(shape) <= 4 and strides[-1] == 1:
        like = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
        if like[-1] == 1 and like[-2] < MAX_ROW_STRIDE:
            return like
    return torch.empty(shape, device="meta").stride()


_cached_output_strides = functools.lru_cache(maxsize=MAX_LAYOUTS)(output_strides)


def empty_like(x: Tensor, head_dim: int | None = None) -> Tensor:
    """Allocate an output with the shape and dtype of x, and the strides of `output_strides`.

    `head_dim`, if given, is the size of its last dimension.
    """
    if head_dim is None or head_dim == x.shape[-1]:
        return x.new_empty_strided(x.shape, _cached_output_strides(x.shape, x.stride()))
    strides = _cached_output_strides(x.shape, x.stride(), head_dim)
    return x.new_empty_strided((*x.shape[:-1], head_dim), strides)


def four_dimensional(x: Tensor) -> Tensor:
    """Return x (..., rows, head_dim) as (batch, heads, rows, head_dim), if possible a view.

    Missing dimensions get size 1. Only x with more than four dimensions may need a copy.
    """
    if x.dim() == 4:
        return x
    *leading, rows, head_dim = x.shape
    heads = leading[-1] if leading else 1
    return x.reshape(math.prod(leading[:-1]), heads, rows, head_dim)
