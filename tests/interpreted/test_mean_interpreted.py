"""Tests of the kernel of means in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.mean import BLOCK, write_mean

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 2 * BLOCK + 48])
@pytest.mark.parametrize("others", [1, 2, 7])
def test_rounds_once(dtype, wide, count, others):
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(others + 1, count + 16, dtype=torch.float64, generator=generator).to(dtype)
    rows = rows[:, :count]  # with space between them
    own = rows[0].clone()
    output = torch.empty(count, dtype=torch.float32) if wide and dtype.itemsize < 4 else own
    write_mean(output, own, rows[1:])
    mean = rows.double().mean(0)
    # The sum rounds in float32 at least, the division and the output once each.
    scale = rows.double().abs().sum(0)
    limit = torch.finfo(output.dtype).eps * mean.abs() + torch.finfo(torch.float32).eps * scale
    assert (output.double() - mean).abs().le(limit).all()
