"""Shapes, layouts and the float64 comparison for the tests of the weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from systems.kernels.weighted_sum import weighted_sum
from tests.systems.kernels.random_cases import laid_out

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# One row, one column, sizes close to a tile, empty tensors, and several leading dimensions.
SHAPES = [
    (7, 5), (1, 1), (1, 300), (129, 16), (2, 3, 65), (2, 1, 3, 17), (9,), (0, 4), (3, 0), (2, 0, 5)
]  # fmt: skip
# Those of `laid_out`, and one in which all rows share memory
LAYOUTS = ["dense", "columns", "rows", "slice", "spread", "shared"]
# Limits of the error. That of rounding the result, the unit roundoff of a 16-bit dtype, is relative
# to it. That of float32 and float64 arithmetic is relative to the sum of the absolute values of the
# terms: 16 unit roundoffs, 4 standard deviations for these lengths; with a shared row, all terms
# have the same rounding error.
RESULT = {F32: 0, BF16: 2**-8, F16: 2**-11, F64: 0}
SUM = {F32: 2**-20, BF16: 2**-20, F16: 2**-20, F64: 2**-49}


def randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).to(device)


def assert_against_float64(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str | None = None, device: str = "cpu"
) -> None:
    """Check each element of y, dx and dw against float64. With a layout of x, all are strided."""
    x, w, dy = (
        randn(of, seed, dtype, device) for seed, of in enumerate((shape, shape[-1:], shape[:-1]))
    )
    if layout is not None:
        x = x.flatten(0, -2)[0].expand_as(x) if layout == "shared" else laid_out(x, layout)
        w, dy = laid_out(w, "spread"), laid_out(dy, "sum")
    found = _results(weighted_sum, x, w, dy)
    x, w, dy = (t.double() for t in (x, w, dy))
    exact = _results(_plain, x, w, dy)
    sizes = _results(_plain, x.abs(), w.abs(), dy.abs())  # sums of absolute values
    # The smallest step of a dtype, for float16 2^-24, may exceed the roundoff of a small number.
    step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    for name, given, known, size in zip(("y", "dx", "dw"), found, exact, sizes, strict=True):
        assert given.shape == known.shape and given.dtype == dtype, name
        limit = RESULT[dtype] * known.abs() + SUM[dtype] * size + step
        assert ((given.double() - known).abs() <= limit).all(), name


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(-1)


def _results(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, ...]:
    """Return y, dx and dw."""
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = function(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy)
