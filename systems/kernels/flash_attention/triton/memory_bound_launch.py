"""Cached launches of the memory-bound kernels, used by flash_triton and flash_hopper.

These kernels split float32 tensors into float16 halves, combine partial outputs, and add partial
gradients. A `Launch` is valid for one device and one combination of dtypes. So some functions have
the arguments `device` and `dtype`, which are only keys of the cache.
"""

from __future__ import annotations

import functools

import torch

from systems.kernels.flash_attention.layout import Layout
from systems.kernels.flash_attention.triton.tile_table import MEMORY_BOUND_ELEMENTS, block_d
from systems.kernels.kernel_launch import Launch

MAX_LAUNCHES = 4096  # maximum number of cached launches of each kernel


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def fp16_split_launch(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """Return the launch of `parts_kernel`, which splits float32 tensors into float16 halves.

    Call the launch with four float32 tensors, their peaks, and the output for the halves. Only the
    first `count` tensors are split.

    Args:
        count: number of tensors to split.
        of: layout of the tensors.
        n_seen: number of rows of each head that are read; later rows are replaced by zeros.
    """
    from systems.kernels.flash_attention.triton.fp16_split_kernel import parts_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    grid = (memory_bound_programs(of), count)
    return Launch(parts_kernel, grid, numbers, memory_bound_constants(of))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def peak_launch(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """Return the launch of `peak_kernel`, which computes the largest magnitude of each head.

    Call the launch with four float32 tensors and the output for their peaks. Only the first `count`
    tensors are read. The arguments are those of `fp16_split_launch`.
    """
    from systems.kernels.flash_attention.triton.fp16_split_kernel import peak_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    grid = (memory_bound_programs(of), count)
    return Launch(peak_kernel, grid, numbers, memory_bound_constants(of))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def combine_launch(device: torch.device, dtype: torch.dtype, n_splits: int, out: Layout) -> Launch:
    """Return the launch of `combine_kernel`, which combines the partial outputs of all splits.

    Call the launch with the partial outputs, their log-sum-exps, out and lse.

    Args:
        dtype: dtype of out.
        n_splits: number of splits.
        out: layout of out.
    """
    from systems.kernels.flash_attention.triton.combine_kernel import combine_kernel

    numbers = (*out.strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (memory_bound_programs(out),)
    return Launch(combine_kernel, grid, numbers, memory_bound_constants(out))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def sum_launch(
    device: torch.device,
    dtype: torch.dtype,
    n_splits: int,
    out: Layout,
    other: Layout | None = None,
) -> Launch:
    """Return the launch of `sum_kernel`, which adds the partial gradients of all splits.

    Call the launch with the partial gradients, out and other. To add up only one gradient, let the
    argument `other` be None, and pass out twice in the call.

    Args:
        dtype: dtype of out and other.
        n_splits: number of splits.
        out, other: layouts of the gradients.
    """
    from systems.kernels.flash_attention.triton.combine_kernel import sum_kernel

    numbers = (*out.strides, *(other or out).strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (memory_bound_programs(out), 1 if other is None else 2)
    return Launch(sum_kernel, grid, numbers, memory_bound_constants(out))


def memory_bound_constants(of: Layout) -> dict[str, int]:
    """Return the constexpr arguments of a memory-bound kernel for tensors with this layout."""
    columns = block_d(of.head_dim)
    return {"HEAD_DIM": of.head_dim, "ROWS": MEMORY_BOUND_ELEMENTS // columns, "COLUMNS": columns}


def memory_bound_programs(of: Layout) -> int:
    """Return the number of programs of a memory-bound kernel for tensors with this layout."""
    return -(-of.rows // (MEMORY_BOUND_ELEMENTS // block_d(of.head_dim))) * of.n_heads
