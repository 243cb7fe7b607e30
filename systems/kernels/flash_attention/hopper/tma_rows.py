"""Addresses, strides and tiles with which the Hopper kernels read and write tensors by TMA."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from systems.kernels.flash_attention.layout import four_dimensional, is_aligned
from systems.kernels.flash_attention.triton.tile_table import MAX_ROW_STRIDE
from systems.kernels.flash_attention.validation import MAX_PLANS
from systems.kernels.tensor_maps import TensorMaps

UNIT = 8  # number of 16-bit elements in 16 bytes, of which all strides that TMA takes are multiples


def in_units(strides: Sequence[int]) -> list[int]:
    """Return strides in units of 8 elements, see `registers.in_elements`.

    The stride of a dimension of size 1 may be another number. The kernels do not use it.
    """
    return [stride // UNIT for stride in strides]


def tma_compatible(x: Tensor) -> Tensor:
    """Return x reshaped to (batch, heads, rows, head_dim), or a contiguous copy of this tensor.

    The copy is made if TMA or `prepare_kernel` does not support the address or the strides of x.
    """
    x = four_dimensional(x)
    if is_aligned(x) and _has_tma_strides(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=MAX_PLANS)
def _has_tma_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    # The limit MAX_ROW_STRIDE is for `prepare_kernel`, which loads out and dout without TMA.
    return (
        strides[-1] == 1
        and strides[-2] < MAX_ROW_STRIDE
        and all(n == 1 or stride > 0 for n, stride in zip(shape[:-1], strides[:-1], strict=True))
    )


@functools.lru_cache(maxsize=MAX_PLANS)
def row_maps(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int
) -> TensorMaps:
    """Return the TMA descriptors of tensors with the given dtype, shape and strides.

    The tiles have the given numbers of rows of one head and of columns. A tile may extend past the
    last row of its head, or past the last column. The elements outside of the head are read as
    zeros and are not written, whatever follows in memory. The shape is (batch, heads, n_rows,
    head_dim), with head_dim one of HEAD_DIMS. Strides are in elements.
    """
    return TensorMaps(dtype, shape, strides, (1, 1, rows, columns))
