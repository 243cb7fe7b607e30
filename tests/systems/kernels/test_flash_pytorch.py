"""Tests of FlashAttention in plain torch.

Results are compared with float64. Other tests check that the score matrix is never materialized,
that tiles above the diagonal are skipped and that backward is compiled once.
"""

from __future__ import annotations

import math
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from systems.kernels.flash_attention import Call, FlashAttentionPyTorch, attention_reference
from systems.kernels.flash_attention import flash_pytorch as flash_pytorch_module
from systems.kernels.flash_attention.flash_pytorch import tiled_forward
from tests.systems.kernels.attention_error import assert_within_limits
from tests.systems.kernels.selection import matrix, slow

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (queries, keys): lengths of FlashAttention's own tests, and empty ones
LENGTHS = [
    (1, 1), (239, 1), (799, 3), (113, 203), (128, 217), (108, 256), (384, 256), (640, 128),
    (1023, 1024), (1024, 1023), (0, 5), (5, 0), (0, 0),
]  # fmt: skip
SMALL = [(1, 1), (9, 9), (7, 12), (12, 7), (5, 1), (1, 5), (8, 6)]
GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 4 queries and 3 keys, so that short sequences have many, some diagonal."""
    monkeypatch.setattr(flash_pytorch_module, "QUERY_TILE", 4)
    monkeypatch.setattr(flash_pytorch_module, "KEY_TILE", 3)


def _inputs(
    lengths: tuple[int, int],
    dtype: torch.dtype,
    leading: tuple[int, ...] = (2, 3),
    head_dim: int = 16,
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """Return normally distributed q, k, v and dout with unit variance."""
    generator = torch.Generator().manual_seed(seed)
    n_queries, n_keys = lengths
    shapes = [(*leading, n, head_dim) for n in (n_queries, n_keys, n_keys, n_queries)]
    draw = {"generator": generator, "dtype": F64}
    return [torch.randn(shape, **draw).to(dtype).to(device) for shape in shapes]


def _results(function, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return out, dq, dk and dv of function(q, k, v)."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = function(*inputs)
    gradients = torch.autograd.grad(out, inputs, dout)
    return {"out": out.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def _flash(causal: bool, scale: float | None = None):
    return lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, causal, scale)


def _lse(out: Tensor) -> Tensor:
    """Return the saved log-sum-exp: the only saved tensor of its shape."""
    saved = [t for t in out.grad_fn.saved_tensors if t.shape == out.shape[:-1]]
    assert len(saved) == 1
    return saved[0]


def _assert_right(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> None:
    """Assert that out, lse and gradients have the right shapes and dtypes and small errors."""
    found = _results(_flash(causal), q, k, v, dout)
    for name, like in (("out", q), ("dq", q), ("dk", k), ("dv", v)):
        assert found[name].shape == like.shape and found[name].dtype == q.dtype
    lse = _lse(FlashAttentionPyTorch.apply(q.detach().requires_grad_(), k, v, causal))
    assert lse.dtype == F32 and lse.shape == q.shape[:-1]
    if q.numel() and k.numel():
        assert_within_limits(found | {"lse": lse}, q, k, v, dout, causal)
    else:
        assert not any(x.any() for x in found.values())


# Each of the lengths with both masks and two dtypes
CASES = list(zip(sorted(2 * LENGTHS), cycle((True, False)), cycle((F32, BF16, F16))))


@pytest.mark.parametrize(
    ("lengths", "causal", "dtype"), [slow(*x) if sum(x[0]) > 2000 else x for x in CASES]
)
def test_against_float64(lengths, causal, dtype):
    _assert_right(*_inputs(lengths, dtype, (1, 2), head_dim=64), causal)


@pytest.mark.slow
@pytest.mark.depends
def test_many_tiles_against_float64():
    _assert_right(*_inputs((4224, 4224), F32, (1, 1), head_dim=64), True)


@pytest.mark.parametrize(
    ("lengths", "causal"),
    matrix([((5, 7), True)], [(5, 7), (9, 9), (12, 7), (1, 5)], (False, True)),
)
def test_gradients_are_those_of_finite_differences(lengths, causal, small_tiles):
    q, k, v, _ = _inputs(lengths, F64, (2,), 3)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert torch.autograd.gradcheck(_flash(causal, 0.7), inputs)


@pytest.mark.parametrize(
    ("lengths", "causal", "scale"),
    list(zip(sorted(2 * SMALL), cycle((True, False)), cycle((None, 0.3, 0.0, -1.0, 0.7)))),
)
def test_float64_agrees_to_its_last_digits(lengths, scale, causal, small_tiles):
    q, k, v, dout = _inputs(lengths, F64)
    exact = attention_reference(q, k, v, dout, Call(causal, scale))
    for name, result in _results(_flash(causal, scale), q, k, v, dout).items():
        torch.testing.assert_close(result, getattr(exact, name), rtol=1e-12, atol=1e-12)
    lse = _lse(FlashAttentionPyTorch.apply(q.requires_grad_(), k, v, causal, scale))
    torch.testing.assert_close(lse, exact.lse, rtol=1e-12, atol=1e-12)


def test_saves_inputs_output_and_one_log_sum_exp():
    q, k, v, _ = _inputs((10, 12), BF16, (2,))
    q.requires_grad_()
    out = FlashAttentionPyTorch.apply(q, k, v, False)
    *rest, lse = out.grad_fn.saved_tensors
    assert all(a is b for a, b in zip(rest[:3], (q, k, v), strict=True))
    assert torch.equal(rest[3], out) and len(rest) == 4
    assert lse.dtype == F32 and lse.shape == (2, 10)


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_give_zero_and_minus_infinity(causal):
    q, k, v, dout = _inputs((5, 0), F32)
    q.requires_grad_()
    out = FlashAttentionPyTorch.apply(q, k, v, causal)
    assert (_lse(out) == -math.inf).all()
    out.backward(dout)
    assert not out.any() and q.grad is not None and not q.grad.any()


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)])
def test_no_sequences(leading):
    for name, result in _results(_flash(True), *_inputs((5, 6), F32, leading)).items():
        assert result.shape == (*leading, 6 if name in ("dk", "dv") else 5, 16)


def test_one_not_a_number_stays_in_its_sequence_and_below_the_diagonal(small_tiles):
    q, k, v, _ = _inputs((9, 9), F32)
    k[0, 0, 6] = math.nan
    out, lse = tiled_forward(q, k, v, True)
    assert lse[0, 0, 6:].isnan().all() and lse[0, 0, :6].isfinite().all()
    assert out[0, 0, 6:].isnan().all() and out[0, 0, :6].isfinite().all()
    assert out[1].isfinite().all() and out[0, 1:].isfinite().all()


def test_autocast_changes_no_bit(small_tiles):
    q, k, v, dout = _inputs((9, 7), F32)
    known = _results(_flash(True), q, k, v, dout)
    with torch.autocast("cpu", torch.bfloat16):
        given_ = _results(_flash(True), q, k, v, dout)
    assert all(torch.equal(given_[name], known[name]) for name in known)


def test_a_second_derivative_is_refused():
    q, k, v, _ = _inputs((3, 3), F32)
    out = FlashAttentionPyTorch.apply(q.requires_grad_(), k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# ---- tiling and compilation ----------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Record the size of the largest tensor that an operation returns, and count the matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += "bmm" in func.__name__
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_no_score_above_the_diagonal_and_never_all_of_them(causal, monkeypatch):
    monkeypatch.setattr(flash_pytorch_module, "QUERY_TILE", 64)
    monkeypatch.setattr(flash_pytorch_module, "KEY_TILE", 64)
    inputs = _inputs((512, 512), F32, (1,))
    tiles = 8 * 9 // 2 if causal else 64
    with _Watch() as watch:
        tiled_forward(*inputs[:3], causal)
    assert watch.products == 2 * tiles
    with _Watch() as watch:
        _results(_flash(causal), *inputs)
    assert watch.products == (2 + 5) * tiles
    assert watch.largest == 512 * 16  # the number of elements of q


@pytest.fixture
def counted(monkeypatch):
    """Compile backward with a backend that counts compilations and generates no code."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile_(f, backend=counter, **kw))
    monkeypatch.setattr(FlashAttentionPyTorch, "compiled", True)
    torch._dynamo.reset()
    flash_pytorch_module._compiled_backward_tile.cache_clear()
    yield counter
    flash_pytorch_module._compiled_backward_tile.cache_clear()


def test_backward_is_compiled_once_for_all_lengths(counted, small_tiles):
    for lengths, causal, scale in [
        ((9, 9), True, None),
        ((9, 9), False, None),
        ((31, 8), True, 0.5),
        ((4, 3), False, 2.0),
        ((6, 16), True, None),
    ]:
        inputs = _inputs(lengths, F64)
        exact = attention_reference(*inputs, Call(causal, scale))
        for name, result in _results(_flash(causal, scale), *inputs).items():
            torch.testing.assert_close(result, getattr(exact, name), rtol=1e-12, atol=1e-12)
    assert counted.frame_count == 1


@pytest.mark.slow
@pytest.mark.depends
def test_a_caller_that_is_compiled_takes_it_in(small_tiles):
    inputs = _inputs((9, 7), F64, (2,))
    known = _results(_flash(True), *inputs)
    function = torch.compile(_flash(True), fullgraph=True, backend="aot_eager")
    for name, result in _results(function, *inputs).items():
        torch.testing.assert_close(result, known[name], rtol=1e-12, atol=1e-12)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (4224, 4224)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_gpu_against_float64(dtype, lengths, causal):
    _assert_right(*_inputs(lengths, dtype, (1, 2), head_dim=64, device="cuda"), causal)


@pytest.mark.gpu
def test_gpu_gives_the_same_bits_every_time():
    inputs = _inputs((1500, 1300), BF16, (2, 4), 64, "cuda")
    known = _results(_flash(True), *inputs)
    for _ in range(20):
        again = _results(_flash(True), *inputs)
        assert all(torch.equal(again[name], known[name]) for name in known)


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_with_the_square_of_the_length():
    inputs = _inputs((16_384, 16_384), BF16, (1, 1), 64, "cuda")
    _results(_flash(True), *inputs)  # compile before measuring
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _results(_flash(True), *inputs)
    assert torch.cuda.max_memory_allocated() - before < 16_384 * 16_384 * 2 / 4
