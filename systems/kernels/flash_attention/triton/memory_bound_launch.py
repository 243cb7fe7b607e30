"""Launches of the kernels that only move memory, of flash_triton and flash_hopper alike: float32 is
cut into parts, parts of an output are combined, parts of gradients added.
"""

from __future__ import annotations

import functools

import torch

from systems.kernels.flash_attention.configurations import MOVED, block_d
from systems.kernels.flash_attention.layout import Layout
from systems.kernels.launcher import Launch

LAUNCHES = 4096  # kept at most, of each


# A `Launch` is of one device and of tensors of one dtype each: what makes one is told of both.
@functools.lru_cache(maxsize=LAUNCHES)
def cutting(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """Of `parts_kernel`: (four float32 tensors, `count` of which are cut, their peaks, parts)."""
    from systems.kernels.flash_attention.triton.split_kernel import parts_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    return Launch(parts_kernel, (n_moving(of), count), numbers, moved(of))


@functools.lru_cache(maxsize=LAUNCHES)
def peaking(device: torch.device, count: int, of: Layout, n_seen: int) -> Launch:
    """Of `peak_kernel`: (four float32 tensors, of which `count` are looked at, their peaks)."""
    from systems.kernels.flash_attention.triton.split_kernel import peak_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows, n_seen)
    return Launch(peak_kernel, (n_moving(of), count), numbers, moved(of))


@functools.lru_cache(maxsize=LAUNCHES)
def combining(device: torch.device, dtype: torch.dtype, n_splits: int, out: Layout) -> Launch:
    """Of `combine_kernel`: (parts, their log-sum-exps, out, lse), out of this dtype."""
    from systems.kernels.flash_attention.triton.combine_kernel import combine_kernel

    numbers = (*out.strides, out.n_heads, out.heads, out.rows, n_splits)
    return Launch(combine_kernel, (n_moving(out),), numbers, moved(out))


@functools.lru_cache(maxsize=LAUNCHES)
def summing(
    device: torch.device,
    dtype: torch.dtype,
    n_splits: int,
    out: Layout,
    other: Layout | None = None,
) -> Launch:
    """Of `sum_kernel`: (parts, out, other), of this dtype; other being out where there is none."""
    from systems.kernels.flash_attention.triton.combine_kernel import sum_kernel

    numbers = (*out.strides, *(other or out).strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (n_moving(out), 1 if other is None else 2)
    return Launch(sum_kernel, grid, numbers, moved(out))


def moved(of: Layout) -> dict[str, int]:
    """Constants of the kernels that only move memory."""
    columns = block_d(of.head_dim)
    return {"HEAD_DIM": of.head_dim, "ROWS": MOVED // columns, "COLUMNS": columns}


def n_moving(of: Layout) -> int:
    """Programs of such a kernel."""
    return -(-of.rows // (MOVED // block_d(of.head_dim))) * of.n_heads
