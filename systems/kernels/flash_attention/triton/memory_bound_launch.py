"""Launches of the memory-bound kernels, used by flash_triton and flash_hopper.

The kernels split float32 tensors into float16 halves, combine partial outputs and add partial
gradients. A `Launch` is valid for one device and one combination of dtypes, so device and dtype are
arguments that only serve as cache keys.
"""

from __future__ import annotations

import functools

import torch

from systems.kernels.flash_attention.layout import Layout
from systems.kernels.flash_attention.triton.tile_table import MEMORY_BOUND_ELEMENTS, block_d
from systems.kernels.kernel_launch import Launch

MAX_LAUNCHES = 4096  # size of the cache of each kernel


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def fp16_split_launch(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """Return the launch of `parts_kernel`.

    Call it with four float32 tensors, their peaks and the halves. The first `count` tensors are
    split.
    """
    from systems.kernels.flash_attention.triton.fp16_split_kernel import parts_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    grid = (memory_bound_programs(of), count)
    return Launch(parts_kernel, grid, numbers, memory_bound_constants(of))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def peak_launch(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """Return the launch of `peak_kernel`.

    Call it with four float32 tensors and their peaks. The first `count` tensors are read.
    """
    from systems.kernels.flash_attention.triton.fp16_split_kernel import peak_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    grid = (memory_bound_programs(of), count)
    return Launch(peak_kernel, grid, numbers, memory_bound_constants(of))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def combine_launch(device: torch.device, dtype: torch.dtype, n_splits: int, out: Layout) -> Launch:
    """Return the launch of `combine_kernel`.

    Call it with partial outputs, their log-sum-exps, out (of this dtype) and lse.
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
    """Return the launch of `sum_kernel`.

    Call it with partial sums, out and other (both of this dtype). If the layout of other is None,
    pass out in its place.
    """
    from systems.kernels.flash_attention.triton.combine_kernel import sum_kernel

    numbers = (*out.strides, *(other or out).strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (memory_bound_programs(out), 1 if other is None else 2)
    return Launch(sum_kernel, grid, numbers, memory_bound_constants(out))


def memory_bound_constants(of: Layout) -> dict[str, int]:
    """Return the constexpr arguments of a memory-bound kernel."""
    columns = block_d(of.head_dim)
    return {"HEAD_DIM": of.head_dim, "ROWS": MEMORY_BOUND_ELEMENTS // columns, "COLUMNS": columns}


def memory_bound_programs(of: Layout) -> int:
    """Return the number of programs of a memory-bound kernel."""
    return -(-of.rows // (MEMORY_BOUND_ELEMENTS // block_d(of.head_dim))) * of.n_heads
