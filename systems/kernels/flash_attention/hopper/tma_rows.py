"""Strides and tiles with which the Hopper kernels read and write tensors by TMA."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from systems.kernels.alignment import ALIGNMENT, are_aligned
from systems.kernels.flash_attention.call import MAX_PLANS
from systems.kernels.flash_attention.triton.layout import Layout, layout
from systems.kernels.tensor_maps import TensorMaps

UNIT = 8  # number of 16-bit elements in 16 bytes, of which all strides that TMA takes are multiples


def in_units(strides: Sequence[int]) -> list[int]:
    """Return strides in units of 8 elements, see `registers.in_elements`.

    The stride of a dimension of size 1 may be another number. The kernels do not use it.
    """
    return [stride // UNIT for stride in strides]


@functools.lru_cache(maxsize=MAX_PLANS)
def tma_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Return the layout with which the kernels read a 16-bit tensor (..., rows, head_dim).

    `is_copy` is True if TMA or `prepare_kernel`, which loads without TMA, does not support the
    strides. They are then those of a contiguous copy.
    """
    found = layout(shape, strides)
    sizes = found.shape[:-1]
    if all(n == 1 or stride > 0 for n, stride in zip(sizes, found.strides, strict=True)) and (
        are_aligned(found.shape, (*found.strides, 1), 2)
    ):
        return found
    return found._replace(strides=found.dense_strides, is_copy=True)


def tma_compatible(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if TMA does not support its address or strides."""
    if x.data_ptr() % ALIGNMENT == 0 and not tma_layout(x.shape, x.stride()).is_copy:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=MAX_PLANS)
def row_maps(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int
) -> TensorMaps:
    """Return the TMA descriptors of tensors with the given dtype, shape and strides.

    The tiles have the given numbers of rows of one head and of columns. A tile may extend past the
    last row of its head, or past the last column. The elements outside of the head are read as
    zeros and are not written, whatever follows in memory. The shape is (batch, heads, n_rows,
    head_dim), with head_dim one of HEAD_DIMS. The strides of the first three are in elements.
    """
    return TensorMaps(dtype, shape, (*strides, 1), (1, 1, rows, columns))
