"""Tests of the kernels that run before and after the Hopper backward kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

F16 = torch.float16


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(("d", "columns"), [(64, 64), (72, 128)])
def test_preparation_is_of_whole_tiles(d, columns, has_dlse):
    from systems.kernels.flash_attention.hopper.prepare_kernel import prepare_kernel

    torch.manual_seed(0)
    batch, heads, n, padded = 2, 3, 100, 128
    out, dout = (torch.randn(batch, n, heads, d).to(F16).transpose(1, 2) for _ in range(2))
    lse, dlse = torch.randn(2, batch, heads, n)
    log2_lse, minus_delta = torch.full((2, batch, heads, padded), math.nan)
    dq_sum = torch.full((batch * heads * padded * columns,), math.nan)
    counter = torch.full((1,), 7, dtype=torch.int32)
    prepare_kernel[batch * heads * padded // 64,](
        out, dout, lse, dlse, log2_lse, minus_delta, dq_sum, counter,
        *out.stride()[:3], *dout.stride()[:3], heads, n, padded,
        HEAD_DIM=d, COLUMNS=columns, ROWS=64, HAS_DLSE=has_dlse,
    )  # fmt: skip

    # The kernel stores numbers by (thread of four, pair of columns, column of the pair).
    def in_order(x: Tensor) -> Tensor:
        return x.view(-1, 4, 8, 2).transpose(1, 2).reshape(batch, heads, padded)

    assert torch.allclose(in_order(log2_lse)[..., :n], lse * math.log2(math.e), rtol=1e-6)
    assert (in_order(log2_lse)[..., n:] == math.inf).all()
    want = -(out.float() * dout.float()).sum(-1) + has_dlse * dlse
    assert torch.allclose(in_order(minus_delta)[..., :n], want, atol=1e-4)
    assert (in_order(minus_delta)[..., n:] == 0).all()
    assert (dq_sum == 0).all() and counter.item() == 0


@pytest.mark.parametrize(("d", "columns"), [(64, 64), (72, 128)])
def test_conversion_turns_the_tiles(d, columns):
    from systems.kernels.flash_attention.hopper.round_dq_kernel import convert_kernel

    batch, heads, n, padded = 2, 3, 100, 128
    right = torch.randn(batch, heads, padded, columns)
    tiles = right.view(batch, heads, padded // 64, 64, columns).mT.contiguous()
    dq = torch.full((batch, n, heads, d), math.nan, dtype=F16).transpose(1, 2)
    convert_kernel[batch * heads * padded // 64,](
        tiles, dq, *dq.stride()[:3], heads, n, padded, 0.5, HEAD_DIM=d, COLUMNS=columns, ROWS=64
    )
    assert torch.equal(dq, (right[:, :, :n, :d] * 0.5).to(F16))
