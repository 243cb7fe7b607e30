"""Launches of the memory-bound kernels, which flash_triton and flash_hopper share.

They split float32 tensors into float16 halves, combine partial outputs and add partial gradients.
A `Launch` is for one device and for tensors of one dtype each, so both are cache keys.
"""

from __future__ import annotations

import functools

import torch

from systems.kernels.flash_attention.layout import Layout
from systems.kernels.flash_attention.triton.tile_table import MEMORY_BOUND_ELEMENTS, block_d
from systems.kernels.kernel_launch import Launch

MAX_LAUNCHES = 4096  # cached, of each kernel


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def fp16_split_launch(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """`parts_kernel`; call it with four float32 tensors, of which the first `count` are split,
    their peaks, and the halves."""
    from systems.kernels.flash_attention.triton.fp16_split_kernel import parts_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    grid = (memory_bound_programs(of), count)
    return Launch(parts_kernel, grid, numbers, memory_bound_constants(of))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def peak_launch(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """`peak_kernel`; call it with four float32 tensors, of which the first `count` are read, and
    their peaks."""
    from systems.kernels.flash_attention.triton.fp16_split_kernel import peak_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    grid = (memory_bound_programs(of), count)
    return Launch(peak_kernel, grid, numbers, memory_bound_constants(of))


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def combine_launch(device: torch.device, dtype: torch.dtype, n_splits: int, out: Layout) -> Launch:
    """`combine_kernel`; call it with partial outputs and log-sum-exps, out (this dtype) and lse."""
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
    """`sum_kernel`; call it with partial sums, out and other of this dtype. Without a layout for
    `other`, pass out again."""
    from systems.kernels.flash_attention.triton.combine_kernel import sum_kernel

    numbers = (*out.strides, *(other or out).strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (memory_bound_programs(out), 1 if other is None else 2)
    return Launch(sum_kernel, grid, numbers, memory_bound_constants(out))


def memory_bound_constants(of: Layout) -> dict[str, int]:
    """Return the compile-time constants of a memory-bound kernel."""
    columns = block_d(of.head_dim)
    return {"HEAD_DIM": of.head_dim, "ROWS": MEMORY_BOUND_ELEMENTS // columns, "COLUMNS": columns}


def memory_bound_programs(of: Layout) -> int:
    """Return the number of programs of a memory-bound kernel."""
    return -(-of.rows // (MEMORY_BOUND_ELEMENTS // block_d(of.head_dim))) * of.n_heads
