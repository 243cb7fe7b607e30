"""Tests of the kernels that run before and after the Hopper backward kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

F16 = torch.float16


def test_preparation_is_of_whole_tiles():
    from systems.kernels.flash_attention.hopper.prepare_kernel import prepare_kernel

    torch.manual_seed(0)
    batch, heads, n, padded, d = 2, 3, 100, 128, 64
    out, dout = (torch.randn(batch, n, heads, d).to(F16).transpose(1, 2) for _ in range(2))
    lse = torch.randn(batch, heads, n)
    log2_lse, minus_delta = torch.full((2, batch, heads, padded), math.nan)
    dq_sum = torch.full((batch * heads * padded * d,), math.nan)
    counter = torch.full((1,), 7, dtype=torch.int32)
    prepare_kernel[batch * heads * padded // 64,](
        out, dout, lse, log2_lse, minus_delta, dq_sum, counter,
        *out.stride()[:3], *dout.stride()[:3], heads, n, padded, HEAD_DIM=d, ROWS=64,
    )  # fmt: skip

    # The kernel stores numbers by (thread of four, pair of columns, column of the pair).
    def in_order(x: Tensor) -> Tensor:
        return x.view(-1, 4, 8, 2).transpose(1, 2).reshape(batch, heads, padded)

    assert torch.allclose(in_order(log2_lse)[..., :n], lse * math.log2(math.e), rtol=1e-6)
    assert (in_order(log2_lse)[..., n:] == math.inf).all()
    want = -(out.float() * dout.float()).sum(-1)
    assert torch.allclose(in_order(minus_delta)[..., :n], want, atol=1e-4)
    assert (in_order(minus_delta)[..., n:] == 0).all()
    assert (dq_sum == 0).all() and counter.item() == 0


def test_conversion_turns_the_tiles():
    from systems.kernels.flash_attention.hopper.round_dq_kernel import convert_kernel

    batch, heads, n, padded, d = 2, 3, 100, 128, 64
    right = torch.randn(batch, heads, padded, d)
    tiles = right.view(batch, heads, padded // 64, 64, d).mT.contiguous()
    dq = torch.full((batch, n, heads, d), math.nan, dtype=F16).transpose(1, 2)
    convert_kernel[batch * heads * padded // 64,](
        tiles, dq, *dq.stride()[:3], heads, n, padded, 0.5, HEAD_DIM=d, ROWS=64
    )
    assert torch.equal(dq, (right[:, :, :n] * 0.5).to(F16))
