"""Mean of several tensors in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from systems.kernels.device import on, runs_kernels

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

BLOCK = 2048  # elements per program


@triton.jit
def _mean_kernel(
    output, own, others, count, row,
    OTHERS: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(own + at, mask=inside).to(SUM)
    other = others + at
    for _ in range(OTHERS):
        total += tl.load(other, mask=inside).to(SUM)
        other += row
    mean = (total / (OTHERS + 1)).to(output.dtype.element_ty)
    tl.store(output + at, mean, mask=inside)


def write_mean(output: Tensor, own: Tensor, others: Tensor) -> None:
    """Write the mean of a tensor and of the rows of another one.

    The sum has the dtype of the output, but at least float32, and is rounded once.

    Args:
        output: (n,), contiguous, may be `own`.
        own: (n,), contiguous.
        others: (rows, n), with contiguous rows, of the same dtype as `own`.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    if not runs_kernels(output.device) or wide.is_complex:
        total = own.to(wide, copy=True)
        for other in others:
            total += other
        output.copy_(total / (len(others) + 1))
    elif count := output.numel():
        with on(output.device):
            _mean_kernel[(triton.cdiv(count, BLOCK),)](
                output, own, others, count, others.stride(0),
                len(others), tl.float64 if wide == torch.float64 else tl.float32, BLOCK,
            )  # fmt: skip
