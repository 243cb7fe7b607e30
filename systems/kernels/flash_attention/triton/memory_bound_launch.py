"""Cached launches of the memory-bound kernels of attention.

These kernels split float32 tensors into float16 halves, combine partial outputs, which flash_hopper
does too, and add partial gradients.

A launch is a `kernel_launch.Launch` object, which is valid for one device and one combination of
dtypes. Arguments `device` and `dtype` of the functions only separate the entries of their caches.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from systems.kernels.flash_attention.call import MAX_PLANS
from systems.kernels.flash_attention.triton.layout import Layout
from systems.kernels.flash_attention.triton.tile_table import MEMORY_BOUND_ELEMENTS, block_d
from systems.kernels.kernel_launch import Launch

# Maximum number of cached launches of each kernel. A plan for float32 needs up to four of one.
MAX_LAUNCHES = 3 * MAX_PLANS


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def fp16_split_launch(
    device: torch.device, count: int, of: Layout, n_seen: int, longest: int | None
) -> Launch:
    """Return a cached launch of `parts_kernel`, which splits float32 tensors into float16 halves.

    Call it with four float32 tensors, the boundaries of packed sequences (or a placeholder), the
    peaks as computed by `peak_kernel`, and the output tensor. Only the first `count` of the four
    tensors are split; the others are placeholders. They have the layout `of`, in which batch is the
    number of sequences if they are packed, `longest` rows at most. Rows of a sequence from n_seen
    on are replaced by zeros.
    """
    from systems.kernels.flash_attention.triton.fp16_split_kernel import parts_kernel

    return _fp16_launch(parts_kernel, count, of, n_seen, longest)


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def peak_launch(
    device: torch.device, count: int, of: Layout, n_seen: int, longest: int | None
) -> Launch:
    """Return a cached launch of `peak_kernel`, which computes the largest magnitude of each head.

    Call it as that of `fp16_split_launch`, with the peaks, which must be zeros, as the output.
    """
    from systems.kernels.flash_attention.triton.fp16_split_kernel import peak_kernel

    return _fp16_launch(peak_kernel, count, of, n_seen, longest)


def _fp16_launch(kernel: Any, count: int, of: Layout, n_seen: int, longest: int | None) -> Launch:
    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    blocks = of if longest is None else of._replace(rows=longest)
    constants = {**memory_bound_constants(of), "PACKED": longest is not None}
    return Launch(kernel, (memory_bound_programs(blocks), count), numbers, constants)


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def combine_launch(device: torch.device, dtype: torch.dtype, n_splits: int, out: Layout) -> Launch:
    """Return a cached launch of `combine_kernel`, which combines partial attention outputs.

    Call it with the partial outputs, their log-sum-exps, and for the result `out` and `lse`.
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
    """Return a cached launch of `sum_kernel`, which adds the partial gradients of all splits.

    Call it with the partial gradients of one tensor or of two (dK and dV), and two results. If
    there is only one result, pass it twice.
    """
    from systems.kernels.flash_attention.triton.combine_kernel import sum_kernel

    numbers = (*out.strides, *(other or out).strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (memory_bound_programs(out), 1 if other is None else 2)
    return Launch(sum_kernel, grid, numbers, memory_bound_constants(out))


def memory_bound_constants(of: Layout) -> dict[str, int]:
    """Return the constexpr arguments of a memory-bound kernel by name.

    ROWS is the number of rows per program, and COLUMNS is HEAD_DIM rounded up to a power of two, at
    least 16.
    """
    columns = block_d(of.head_dim)
    return {"HEAD_DIM": of.head_dim, "ROWS": MEMORY_BOUND_ELEMENTS // columns, "COLUMNS": columns}


def memory_bound_programs(of: Layout) -> int:
    """Return the number of programs: one for each block of rows of each head."""
    return -(-of.rows // (MEMORY_BOUND_ELEMENTS // block_d(of.head_dim))) * of.n_heads
