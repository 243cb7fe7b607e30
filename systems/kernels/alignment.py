"""Copies of tensors for kernels that load 16 bytes at a time, and need addresses that fit."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ALIGNMENT = 16  # of addresses and strides in bytes, for loads of 16 bytes and for TMA


def is_aligned(x: Tensor) -> bool:
    """Return whether the address of x and its strides are multiples of 16 bytes.

    The stride of the last dimension does not count. Those of a contiguous tensor are not checked:
    they are multiples of its last dimension.
    """
    return x.data_ptr() % ALIGNMENT == 0 and (
        x.is_contiguous() or are_aligned(x.shape, x.stride(), x.itemsize)
    )


@functools.lru_cache(maxsize=1024)
def are_aligned(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether strides, in elements, are multiples of 16 bytes, as in `is_aligned`."""
    return all(
        n == 1 or stride * itemsize % ALIGNMENT == 0
        for n, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if x is not aligned (see `is_aligned`).

    Kernels of other packages need this: torch's fused attention loads 16 bytes at a time, and does
    not check addresses (pytorch/pytorch#183484).
    """
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def aligning_gradient(out: Tensor) -> Tensor:
    """Return the output of another package's kernel, whose backward gets an aligned gradient."""
    if out.requires_grad:
        out.register_hook(aligned)
    return out
