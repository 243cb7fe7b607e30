"""The weighted-sum kernels as an autograd function.

    y = weighted_sum(x, w)      # x (..., d), w (d,) -> y (...)
    y.sum().backward()

An autograd.Function has two static methods. `forward` computes the result and saves what `backward`
needs. `backward` takes dL/dy and returns dL/d(argument) for each argument of forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.device import on, runs_kernels
from systems.kernels.weighted_sum.reference import (
    weighted_sum_gradients,
    weighted_sum_reference,
)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048  # elements of a tile: 16 for each thread of 4 warps
MAX_COLUMNS = 256  # columns of a tile, at most: at least 512 contiguous bytes per row
# Maximum number of rows of the buffer of partial sums: the programs per tile of columns, enough to
# fill a GPU. It is a constant that does not depend on the GPU, so that dw is the same on all GPUs.
MAX_PROGRAMS = 256


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    """Compute y[...] = sum over d of x[..., d] w[d].

    Triton kernels compute the sum and its gradient on a GPU, and on a CPU with TRITON_INTERPRET=1.
    Other devices and float64 use the torch reference. Both sum in float32 (float64 for float64) and
    give bitwise equal results in every run. x is copied if its leading dimensions cannot be viewed
    as one.

    Args:
        x: (..., d), float32, bfloat16, float16 or float64, any strides; sizes may be 0.
        w: (d,), same dtype and device as x.

    Returns:
        Tensor (...) with the dtype of x.

    Raises:
        ValueError: if shapes, dtypes or devices do not match; the message names all mismatches.
    """
    errors = []
    if x.ndim < 1 or w.ndim != 1 or x.shape[-1] != w.shape[0]:
        errors.append(
            f"shapes must be (..., d) and (d,), got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if x.dtype != w.dtype or not x.is_floating_point():
        errors.append(f"dtypes must be equal and floating-point, got {x.dtype} and {w.dtype}")
    if x.device != w.device:
        errors.append(f"devices must be equal, got {x.device} and {w.device}")
    if errors:
        raise ValueError("; ".join(errors))
    return WeightedSum.apply(x, w)


class WeightedSum(torch.autograd.Function):
    """Autograd function of `weighted_sum`, without its checks. It is differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Map x (..., d) and w (d,) to y (...)."""
        ctx.save_for_backward(x, w)  # unlike attributes, these are checked for in-place changes
        if not _runs_kernel(x):
            return weighted_sum_reference(x, w)
        from systems.kernels.weighted_sum.kernel import forward_kernel

        rows = _as_matrix(x)
        n_rows, d = rows.shape
        tile_rows, tile_columns = tile(d)
        y = torch.empty(n_rows, dtype=x.dtype, device=x.device)
        with on(x.device):
            forward_kernel[(-(-n_rows // tile_rows),)](
                rows, w, y, n_rows, d, *rows.stride(), w.stride(0),
                ROWS=tile_rows, COLUMNS=tile_columns,
            )  # fmt: skip
        return y.view(x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Map dy (...) to dx (..., d) and dw (d,); each is None if it is not required."""
        x, w = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad
        if not _runs_kernel(x):
            return weighted_sum_gradients(dy, x, w)
        from systems.kernels.weighted_sum.kernel import backward_kernel

        rows, slopes = _as_matrix(x), dy.reshape(-1)
        n_rows, d = rows.shape
        tile_rows, tile_columns = tile(d)
        programs = min(MAX_PROGRAMS, -(-n_rows // tile_rows))
        dx = torch.empty(rows.shape if needs_dx else 0, dtype=x.dtype, device=x.device)
        shape = (programs, d) if needs_dw else (0, d)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        with on(x.device):
            backward_kernel[(-(-d // tile_columns), programs)](
                slopes, rows, w, dx, partial,
                n_rows, d, slopes.stride(0), *rows.stride(), w.stride(0),
                NEEDS_DX=needs_dx, NEEDS_DW=needs_dw, ROWS=tile_rows, COLUMNS=tile_columns,
            )  # fmt: skip
        return (
            dx.view(x.shape) if needs_dx else None,
            partial.sum(0).to(w.dtype) if needs_dw else None,
        )


def tile(d: int) -> tuple[int, int]:
    """Return the number of rows and columns of a tile, for rows of d elements.

    Tiles are narrow if d is small, so that few lanes are masked off.
    """
    columns = 16
    while columns < min(d, MAX_COLUMNS):
        columns *= 2
    return TILE // columns, columns


def _runs_kernel(x: Tensor) -> bool:
    return x.dtype in KERNEL_DTYPES and x.numel() > 0 and runs_kernels(x.device)


def _as_matrix(x: Tensor) -> Tensor:
    """Reshape (..., d) to (n_rows, d), a view if strides allow it."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
