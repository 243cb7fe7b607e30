"""Weighted sum of each row against float64: reference and, on a GPU, kernels.

tests/interpreted runs the kernels on a CPU.
"""

from __future__ import annotations

import pytest
import torch

from systems.kernels.weighted_sum import WeightedSum, weighted_sum
from tests.systems.kernels.weighted_sum_cases import (
    BF16,
    F16,
    F32,
    LAYOUTS,
    SHAPES,
    SUM,
    assert_against_float64,
    randn,
)

on_cpu_and_gpu = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", SUM)
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 777), (3, 100_003)])
def test_against_float64(shape, dtype, device):
    assert_against_float64(shape, dtype, device=device)


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, dtype, device):
    assert_against_float64((3, 4, 33), dtype, layout, device)


def test_every_error_is_named():
    with pytest.raises(ValueError) as error:
        weighted_sum(torch.ones(2, 3), torch.ones(2, dtype=F16, device="meta"))
    for part in ("got (2, 3) and (2,)", "torch.float32 and torch.float16", "cpu and meta"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"floating-point, got torch\.int64"):
        weighted_sum(torch.ones(2, 3).long(), torch.ones(3).long())


def test_a_second_derivative_is_refused():
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(WeightedSum.apply(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.gpu
def test_gpu_gives_the_same_bits_every_time():
    x, w = randn((10_007, 513), 0, BF16, "cuda"), randn((513,), 1, BF16, "cuda").requires_grad_()
    first = None
    for _ in range(50):
        (dw,) = torch.autograd.grad(weighted_sum(x, w).square().sum(), w)
        first = dw if first is None else first
        assert torch.equal(first, dw)


@pytest.mark.gpu
def test_gpu_past_two_to_the_31_elements():
    n_rows, d = (1 << 21) + 3, 1024
    if torch.cuda.mem_get_info()[0] < 3 * 2 * n_rows * d:
        pytest.skip("needs 13 GB of GPU memory")
    x = torch.ones(n_rows, d, dtype=BF16, device="cuda").requires_grad_()
    w = torch.full((d,), 2**-10, dtype=BF16, device="cuda").requires_grad_()
    y = weighted_sum(x, w)
    y.sum().backward()
    assert (y == 1).all()
    assert x.grad is not None and (x.grad == 2**-10).all()
    assert w.grad is not None and (w.grad == n_rows - 3).all()  # rounded to bfloat16
