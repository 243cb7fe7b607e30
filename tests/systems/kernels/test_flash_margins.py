"""Tests of the error limits: right kernels stay under half of them, wrong ones exceed them."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from systems.kernels.flash_attention import Call, FlashAttentionPyTorch
from systems.kernels.flash_attention.flash_pytorch import tiled_backward, tiled_forward
from tests.systems.kernels.attention_error import attention_shares
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    F32,
    by_function,
    by_hopper,
    by_triton,
    inputs,
    on_hopper,
)
from tests.systems.margins import assert_margin

CASES = list(
    itertools.product(((1, 1), (17, 3), (64, 33), (33, 64), (1, 40), (200, 150)), (1, 16, 64))
)


by_tiles = partial(by_function, function=FlashAttentionPyTorch)


def without_last_keys(q, k, v, dout):
    """Return the results of a kernel that leaves out the last keys."""
    left_out = (0, 0, 0, 6)
    out, lse, dq, dk, dv = by_tiles(q, k[:, :-6], v[:, :-6], dout)
    return out, lse, dq, pad(dk, left_out), pad(dv, left_out)


def with_wrong_d(q, k, v, dout):
    """Return results with D = rowsum(dO * O) 5% too large; backward uses out only to compute D."""
    out, lse = tiled_forward(q, k, v)
    return out, lse, *tiled_backward(q, k, v, 1.05 * out, lse, dout)


SLIPS = {
    "D 5% too large": with_wrong_d,
    "no scale": lambda *given: by_tiles(*given, Call(scale=1.0)),
    "last keys left out": without_last_keys,
    "mask on the wrong side": lambda *given: by_tiles(*given, Call(True)),
    "1% too large": lambda *given: [1.01 * x.double() for x in by_tiles(*given)],
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_past_the_limits(slip, dtype):
    given = inputs((200, 150), 64, dtype)
    shares = attention_shares(SLIPS[slip](*given), given)
    seen = {"D 5% too large": ("dq", "dk")}.get(slip, ("out", "dq", "dk", "dv"))
    if (slip, dtype) == ("1% too large", BF16):  # 1% is 2.6 roundoffs, within limits of dq and dk
        seen = ("out", "dv")
    assert all(max(shares[name], shares[f"{name} norm"]) > 1 for name in seen), shares


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_flash_pytorch_stays_under_half_of_its_limits(dtype):
    def shares_of(seed):
        lengths, head_dim = CASES[seed % len(CASES)]
        given, call = inputs(lengths, head_dim, dtype, seed=seed), Call(seed % 4 > 1)
        return attention_shares(by_tiles(*given, call), given, call)

    assert_margin(shares_of)


GPU_CASES = list(itertools.product(((113, 203), (640, 128), (1000, 1000), (1, 500)), (64, 128)))


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("by", [by_triton, pytest.param(by_hopper, marks=on_hopper)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("large", [False, True])
def test_gpu_kernels_stay_under_half_of_their_limits(by, dtype, large):
    if by is by_hopper and dtype == F32:
        pytest.skip("the Hopper kernels need 16-bit inputs")

    def shares_of(seed):
        lengths, head_dim = GPU_CASES[seed % len(GPU_CASES)]
        q, k, v, dout = inputs(lengths, head_dim, dtype, (1, 2), "cuda", seed)
        if large:
            q, k = 5 * q, 3 * k
        call = Call(seed % 16 > 7)
        given = q, k, v, dout
        return attention_shares(by(*given, call), given, call, split_float32=True)

    assert_margin(shares_of)
