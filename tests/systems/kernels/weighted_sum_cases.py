"""Shapes, layouts and the float64 comparison for the tests of the weighted sum."""

from __future__ import annotations

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
# Limit of the error, relative to the sum of the absolute values of the terms. For 16-bit dtypes it
# is a strict bound: the unit roundoff of the result plus a few of float32. For float32 it is 16
# unit roundoffs, 4 standard deviations for these lengths; with a shared row, all terms have the
# same rounding error. Float64, which torch computes, has the same number of its unit roundoffs.
ROUNDING = {F32: 2**-20, BF16: 2**-8 + 2**-20, F16: 2**-11 + 2**-20, F64: 2**-49}


def randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).to(device)


def make_x(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> Tensor:
    if layout == "shared":
        return randn(shape[-1:], 0, dtype, device).expand(shape)
    return laid_out(randn(shape, 0, dtype, device), layout)


def assert_against_float64(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str = "dense",
    device: str = "cpu",
    strided: bool = False,
) -> None:
    """Check each element of y, dx and dw against float64."""
    x = make_x(shape, layout, dtype, device).requires_grad_()
    w = randn((2 * shape[-1],), 1, dtype, device)[::2] if strided else None
    w = (randn(shape[-1:], 1, dtype, device) if w is None else w).requires_grad_()
    dy = randn((), 2, dtype, device).expand(shape[:-1]) if strided else None
    dy = randn(shape[:-1], 2, dtype, device) if dy is None else dy
    y = weighted_sum(x, w)
    assert y.shape == shape[:-1] and y.dtype == dtype
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert dx.shape == x.shape and dw.shape == w.shape and dx.dtype == dw.dtype == dtype

    x, w, dy = (t.detach().double() for t in (x, w, dy))
    column, leading = dy[..., None], tuple(range(x.ndim - 1))
    terms = column * x
    unit, step = ROUNDING[dtype], torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    for name, given, exact, size in (
        ("y", y, (x * w).sum(-1), (x * w).abs().sum(-1)),
        ("dx", dx, column * w, (column * w).abs()),
        ("dw", dw, terms.sum(leading) if leading else terms,
         terms.abs().sum(leading) if leading else terms.abs()),
    ):  # fmt: skip
        # The smallest step of a dtype, for float16 2^-24, may exceed `unit` of a small number.
        assert ((given.double() - exact).abs() <= unit * size + step).all(), name
