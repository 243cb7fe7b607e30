"""The weighted sum of each row: reference and kernel against float64, and what is compiled of it.

Tests named `interpreted` run the kernel on a CPU, in a process of their own, or by
`TRITON_INTERPRET=1 pytest tests/systems/test_weighted_sum.py -k interpreted`.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

from systems.kernels.weighted_sum import WeightedSum, weighted_sum, weighted_sum_reference
from systems.kernels.weighted_sum import autograd as autograd_module
from systems.kernels.weighted_sum.autograd import MAX_COLUMNS, tile
from tests.hopper import compile_for_hopper, resources
from tests.triton_interpreter import (
    assert_import_leaves_triton_alone,
    assert_interpreted_tests_pass,
    compiled,
    interpreted,
)

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# One row, one column, around a tile's edge, none at all, and leading dimensions of any number
SHAPES = [
    (7, 5), (1, 1), (1, 300), (129, 16), (2, 3, 65), (2, 1, 3, 17), (9,), (0, 4), (3, 0), (2, 0, 5)
]  # fmt: skip
LAYOUTS = ["contiguous", "transposed", "sliced", "permuted", "expanded"]
# Relative to the sum of the magnitudes of what is summed: the unit roundoff of the result, and
# float32's roundings on the way. The interpreter cuts bfloat16 off instead of rounding it.
ROUNDING = {F32: 2**-21, BF16: 2**-8 + 2**-20, F16: 2**-11 + 2**-20}


def _randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).to(device)


def _x(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    if layout == "transposed":
        return _randn(shape[::-1], 0, dtype, device).permute(*reversed(range(len(shape))))
    if layout == "sliced":  # every second element of every row, not from the first
        return _randn((*shape[:-1], 2 * shape[-1] + 1), 0, dtype, device)[..., 1::2]
    if layout == "permuted" and len(shape) > 2:  # no view has these rows in one dimension
        return _randn((shape[1], shape[0], *shape[2:]), 0, dtype, device).transpose(0, 1)
    if layout == "expanded":  # every row is the same one
        return _randn(shape[-1:], 0, dtype, device).expand(shape)
    return _randn(shape, 0, dtype, device)


def _assert_against_float64(shape, dtype, layout="contiguous", device="cpu", strided=False) -> None:
    """y, dx and dw against float64, an element at a time."""
    x = _x(shape, layout, dtype, device).requires_grad_()
    w = _randn((2 * shape[-1],), 1, dtype, device)[::2] if strided else None
    w = (_randn(shape[-1:], 1, dtype, device) if w is None else w).requires_grad_()
    dy = _randn((), 2, dtype, device).expand(shape[:-1]) if strided else None
    dy = _randn(shape[:-1], 2, dtype, device) if dy is None else dy
    y = weighted_sum(x, w)
    assert y.shape == shape[:-1] and y.dtype == dtype
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert dx.shape == x.shape and dw.shape == w.shape and dx.dtype == dw.dtype == dtype

    x, w, dy = (t.detach().double() for t in (x, w, dy))
    column, leading = dy[..., None], tuple(range(x.ndim - 1))
    terms = column * x
    unit = ROUNDING[dtype]
    if device == "cpu" and dtype == BF16 and os.environ.get("TRITON_INTERPRET") == "1":
        unit *= 2
    for name, given, exact, size in (
        ("y", y, (x * w).sum(-1), (x * w).abs().sum(-1)),
        ("dx", dx, column * w, (column * w).abs()),
        ("dw", dw, terms.sum(leading) if leading else terms,
         terms.abs().sum(leading) if leading else terms.abs()),
    ):  # fmt: skip
        # 2^-24: the least step of float16
        assert ((given.double() - exact).abs() <= unit * size + 2**-24).all(), name


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype):
    _assert_against_float64(shape, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    _assert_against_float64((3, 4, 33), F32, layout, strided=True)


@pytest.mark.parametrize("function", [weighted_sum, weighted_sum_reference])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (0, 3)])
def test_gradients_are_those_of_finite_differences(function, shape):
    x = _x(shape, "permuted", F64, "cpu").requires_grad_()
    w = _randn(shape[-1:], 1, F64, "cpu").requires_grad_()
    assert torch.autograd.gradcheck(function, (x, w))


def test_worked_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    w = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    y = weighted_sum(x, w)
    y.backward(torch.tensor([10.0, 1.0]))
    assert y.tolist() == [-2.0, -2.0]
    assert x.grad is not None and x.grad.tolist() == [[10.0, 0.0, -10.0], [1.0, 0.0, -1.0]]
    assert w.grad is not None and w.grad.tolist() == [14.0, 25.0, 36.0]


def test_every_error_is_named():
    with pytest.raises(ValueError) as error:
        weighted_sum(torch.ones(2, 3), torch.ones(2, dtype=F16, device="meta"))
    for part in ("not (2, 3) and (2,)", "torch.float32 and torch.float16", "cpu and meta"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"of floats, not torch\.int64"):
        weighted_sum(torch.ones(2, 3).long(), torch.ones(3).long())


def test_a_second_derivative_is_refused():
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(WeightedSum.apply(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_importing_the_package_leaves_triton_alone():
    assert_import_leaves_triton_alone("systems.kernels.weighted_sum")


@pytest.mark.parametrize("d", [1, 15, 16, 17, 255, 256, 10_000])
def test_tiles_are_powers_of_two_and_hardly_wider_than_a_row(d):
    rows, columns = tile(d)
    assert rows & (rows - 1) == columns & (columns - 1) == 0
    assert columns <= MAX_COLUMNS and (columns < 2 * d or columns == 16)


@compiled
@pytest.mark.timeout(900)  # of many tests, each with the usual one
def test_the_kernel_in_the_interpreter():
    assert_interpreted_tests_pass(__file__)


@interpreted
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted_against_float64(shape, dtype):
    _assert_against_float64(shape, dtype)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_interpreted_any_strides(layout):
    _assert_against_float64((3, 4, 33), F32, layout, strided=True)


@interpreted
def test_interpreted_many_tiles_a_program(monkeypatch):
    monkeypatch.setattr(autograd_module, "TILE", 64)
    monkeypatch.setattr(autograd_module, "MAX_COLUMNS", 16)
    monkeypatch.setattr(autograd_module, "MAX_PROGRAMS", 3)
    _assert_against_float64((50, 41), F32)  # 13 tiles of rows over 3 programs, 3 tiles of columns


@interpreted
@pytest.mark.parametrize("only", ["x", "w"])
def test_interpreted_what_needs_no_gradient_gets_none(only):
    x = _randn((20, 6), 0, F32, "cpu").requires_grad_(only == "x")
    w = _randn((6,), 1, F32, "cpu").requires_grad_(only == "w")
    weighted_sum(x, w).sum().backward()
    assert (x.grad is None) == (only == "w") and (w.grad is None) == (only == "x")
    if only == "x":
        assert torch.equal(x.grad, w.expand(20, 6))
    else:
        torch.testing.assert_close(w.grad, x.sum(0))


_TYPES = {F32: "*fp32", BF16: "*bf16", F16: "*fp16"}


def _made(which: str, dtype: torch.dtype, d: int):
    """As a launch on contiguous x, w and dy of an even d compiles it."""
    from systems.kernels.weighted_sum import kernel

    rows, columns = tile(d)
    constants = {"x_stride_d": 1, "w_stride": 1, "ROWS": rows, "COLUMNS": columns}
    t = _TYPES[dtype]
    sizes = {"n_rows": "i32", "d": "i32", "x_stride_row": "i32"}
    if which == "forward":
        signature = {"x": t, "w": t, "y": t, **sizes}
        function = kernel.forward_kernel
    else:
        signature = {"dy": t, "x": t, "w": t, "dx": t, "dw_partial": "*fp32", **sizes}
        constants |= {"dy_stride": 1, "NEEDS_DX": True, "NEEDS_DW": True}
        function = kernel.backward_kernel
    even = [name for name in signature if name != "n_rows"]
    return compile_for_hopper(function, signature, constants, num_warps=4, divisible_by_16=even)


@compiled
@pytest.mark.parametrize("d", [64, 4096])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_compiled_for_hopper_it_reads_16_bytes_and_spills_nothing(which, dtype, d, tmp_path):
    pytest.importorskip("triton")
    made = _made(which, dtype, d)
    used = resources(made, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128
    assert re.search(r"ld\.global\.v4\.b32", made.asm["ptx"])
    if which == "backward":
        assert re.search(r"st\.global\.v4\.b32", made.asm["ptx"])
        assert "atom" not in made.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 777), (3, 100_003)])
def test_gpu_against_float64(shape, dtype):
    _assert_against_float64(shape, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_any_strides(layout):
    _assert_against_float64((3, 4, 33), BF16, layout, device="cuda", strided=True)


@pytest.mark.gpu
def test_gpu_gives_the_same_bits_every_time():
    x, w = _randn((10_007, 513), 0, BF16, "cuda"), _randn((513,), 1, BF16, "cuda").requires_grad_()
    first = None
    for _ in range(50):
        (dw,) = torch.autograd.grad(weighted_sum(x, w).square().sum(), w)
        first = dw if first is None else first
        assert torch.equal(first, dw)


@pytest.mark.gpu
def test_gpu_float64_is_computed_by_torch():
    x = _randn((6, 5), 0, F64, "cuda").requires_grad_()
    w = _randn((5,), 1, F64, "cuda").requires_grad_()
    assert torch.autograd.gradcheck(weighted_sum, (x, w))


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
