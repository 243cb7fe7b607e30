"""Weighted sum of each row as an autograd function with Triton kernels.

    y = weighted_sum(x, w)      # x (..., d), w (d,) -> y (...)
    y.sum().backward()

An autograd.Function has two static methods. `forward` computes the result and saves the tensors
that `backward` needs. `backward` takes the gradient of the loss with respect to the result, and
returns the gradient with respect to each argument of `forward`.
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
TILE = 2048  # number of elements of a tile: 16 for each of the 128 threads of 4 warps
MAX_COLUMNS = 256  # maximum number of columns of a tile, 512 bytes or more in each row
# Maximum number of programs for each tile of columns in backward. Each program writes one row to
# the buffer of partial sums. 256 programs are enough to fill a GPU. The number does not depend on
# the GPU, so that dw is the same on all GPUs.
MAX_PROGRAMS = 256


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    """Return the weighted sum of each row, y[...] = sum over i of x[..., i] w[i].

    Triton kernels compute the sum and its gradient on a GPU, and on a CPU with TRITON_INTERPRET=1.
    In all other cases, and for float64, torch operations compute them. Sums are accumulated in
    float32 (float64 for float64 inputs). Repeated runs give bitwise equal results. x is copied if
    its leading dimensions cannot be merged in a view.

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
    """Autograd function of the weighted sum. Call `weighted_sum`, which checks the arguments first.

    First derivatives are supported, second derivatives are not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Return the weighted sum (...) of each row of x (..., d), with weights w (d,)."""
        ctx.save_for_backward(x, w)  # autograd checks these for in-place changes
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
        """Return the gradients of x (..., d) and w (d,), from the gradient dy (...) of the result.

        If Triton kernels compute them, a gradient that autograd does not need is None.
        """
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
    """Return the number of rows and the number of columns of a tile, for rows of d elements.

    Tiles are narrow if d is small, so that few elements of a tile are masked.
    """
    columns = 16
    while columns < min(d, MAX_COLUMNS):
        columns *= 2
    return TILE // columns, columns


def _runs_kernel(x: Tensor) -> bool:
    return x.dtype in KERNEL_DTYPES and x.numel() > 0 and runs_kernels(x.device)


def _as_matrix(x: Tensor) -> Tensor:
    """Reshape x from (..., d) to (n_rows, d), as a view if its strides allow it."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
