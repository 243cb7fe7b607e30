"""Tests of FlashAttention in plain torch.

Results are compared with float64. Other tests check that the score matrix is never materialized,
that tiles above the diagonal are skipped and that backward is compiled once.
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from systems.kernels.flash_attention import Call, FlashAttentionPyTorch
from systems.kernels.flash_attention import flash_pytorch as flash_pytorch_module
from systems.kernels.flash_attention.flash_pytorch import tiled_forward
from tests.systems.kernels import flash_cases
from tests.systems.kernels.flash_cases import BF16, F16, F32, by_function, inputs

# (queries, keys): lengths of FlashAttention's own tests, and empty ones
LENGTHS = [
    (1, 1), (239, 1), (799, 3), (113, 203), (128, 217), (108, 256), (384, 256), (640, 128),
    (0, 5), (5, 0), (0, 0),
]  # fmt: skip
LONG = [(1023, 1024), (1024, 1023), (4224, 4224)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 4 queries and 3 keys, so that short sequences have many, some diagonal."""
    monkeypatch.setattr(flash_pytorch_module, "QUERY_TILE", 4)
    monkeypatch.setattr(flash_pytorch_module, "KEY_TILE", 3)


by_pytorch = partial(by_function, function=FlashAttentionPyTorch)
assert_right = partial(flash_cases.assert_right, by=by_pytorch, split_float32=False)


# Each of the lengths with both masks and two dtypes
CASES = list(zip(sorted(2 * LENGTHS), cycle((True, False)), cycle((F32, BF16, F16))))


@pytest.mark.parametrize(("lengths", "causal", "dtype"), CASES)
def test_against_float64(lengths, causal, dtype):
    assert_right(*inputs(lengths, 64, dtype, (1, 2)), Call(causal))


def test_one_not_a_number_stays_in_its_sequence_and_below_the_diagonal(small_tiles):
    q, k, v, _ = inputs((9, 9), 16, F32, (2, 3))
    k[0, 0, 6] = math.nan
    out, lse = tiled_forward(q, k, v, True)
    assert lse[0, 0, 6:].isnan().all() and lse[0, 0, :6].isfinite().all()
    assert out[0, 0, 6:].isnan().all() and out[0, 0, :6].isfinite().all()
    assert out[1].isfinite().all() and out[0, 1:].isfinite().all()


def test_autocast_changes_no_bit(small_tiles):
    given = inputs((9, 7), 16, F32)
    known = by_pytorch(*given, Call(True))
    with torch.autocast("cpu", torch.bfloat16):
        found = by_pytorch(*given, Call(True))
    assert all(map(torch.equal, found, known))


def test_a_second_derivative_is_refused():
    q, k, v, _ = inputs((3, 3), 16, F32)
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
    given = inputs((512, 512), 16, F32, (1,))
    tiles = 8 * 9 // 2 if causal else 64
    with _Watch() as watch:
        tiled_forward(*given[:3], causal)
    assert watch.products == 2 * tiles
    with _Watch() as watch:
        by_pytorch(*given, Call(causal))
    assert watch.products == (2 + 5) * tiles
    assert watch.largest == 512 * 16  # the number of elements of q


def test_backward_is_compiled_once_for_all_lengths(small_tiles, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled = cache(flash_pytorch_module._compiled_backward_tile.__wrapped__)
    monkeypatch.setattr(flash_pytorch_module, "_compiled_backward_tile", compiled)
    monkeypatch.setattr(FlashAttentionPyTorch, "compiled", True)
    torch._dynamo.reset()
    for lengths, call in (
        ((9, 9), Call(True)), ((9, 9), Call()), ((31, 8), Call(True, 0.5)),
        ((4, 3), Call(scale=2.0)), ((6, 16), Call(True)),
    ):  # fmt: skip
        assert_right(*inputs(lengths, 16, F32), call)
    assert counter.frame_count == 1


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, *LONG])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_gpu_against_float64(dtype, lengths, causal):
    assert_right(*inputs(lengths, 64, dtype, (1, 2), "cuda"), Call(causal))


@pytest.mark.gpu
def test_gpu_gives_the_same_bits_every_time():
    given = inputs((1500, 1300), 64, BF16, (2, 4), "cuda")
    known = by_pytorch(*given, Call(True))
    for _ in range(20):
        assert all(map(torch.equal, by_pytorch(*given, Call(True)), known))


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_with_the_square_of_the_length():
    given = inputs((16_384, 16_384), 64, BF16, (1, 1), "cuda")
    by_pytorch(*given, Call(True))  # compile before measuring
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    by_pytorch(*given, Call(True))
    assert torch.cuda.max_memory_allocated() - before < 16_384 * 16_384 * 2 / 4
