"""Tests of the kernels that run before and after the Hopper backward kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

F16 = torch.float16
# Lengths of packed sequences, with empty ones
LENGTHS = [0, 100, 1, 64, 0, 130, 63]


def in_order(x: Tensor, *shape: int) -> Tensor:
    """Return numbers in the order of rows.

    The kernel stores 16 numbers by (thread of four, pair of columns, column of the pair).
    """
    return x.view(-1, 4, 2, 2).transpose(1, 2).reshape(shape)


def dq_tiles(rows: Tensor) -> Tensor:
    """Return rows (..., n, columns) in the order in which the backward kernels add dQ."""
    *leading, n, columns = rows.shape
    split = rows.view(-1, n // 64, 8, 8, columns // 64, 64)
    return split.permute(0, 1, 4, 2, 5, 3).contiguous().view(*leading, n, columns)


def packed_starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def padded_places(lengths: list[int]) -> tuple[list[int], int]:
    """Return the padded row of each row, if sequence s starts at the multiple of 64 below
    starts[s] + 64 s, and the number of padded rows.
    """
    starts = packed_starts(lengths).tolist()
    places = [
        (starts[s] + 64 * s) // 64 * 64 + row for s, n in enumerate(lengths) for row in range(n)
    ]
    return places, (starts[-1] + 64 * len(lengths)) // 64 * 64


@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("block", [64, 192])
@pytest.mark.parametrize("lengths", [LENGTHS, [5], [0], [70 * n % 400 for n in range(150)], [9000]])
def test_blocks_of_packed_sequences(lengths, block, from_end):
    from systems.kernels.flash_attention.hopper.packed_blocks import CHUNK, packed_blocks_kernel

    most = sum(lengths) // block + len(lengths)
    blocks = torch.full((2 * (most + 1),), -1, dtype=torch.int32)
    chunks = max(lengths) // (block * CHUNK) + 1
    packed_blocks_kernel[len(lengths), chunks](
        packed_starts(lengths), blocks, len(lengths), sum(lengths), most,
        BLOCK=block, FROM_END=from_end, CHUNK=CHUNK,
    )  # fmt: skip
    counts = [-(-n // block) for n in lengths]
    ranked = sorted((-j, s) for s, count in enumerate(counts) for j in range(count))
    expected = [(s, counts[s] - 1 + j if from_end else -j) for j, s in ranked]
    assert blocks[0] == len(expected) <= most
    assert blocks[2 : 2 + 2 * len(expected)].view(-1, 2).tolist() == [list(x) for x in expected]


def test_overlapping_sequences_do_not_overflow_the_list():
    from systems.kernels.flash_attention.hopper.packed_blocks import CHUNK, packed_blocks_kernel

    starts = torch.tensor([0, 640, 0, 640, 0, 640], dtype=torch.int32)
    blocks = torch.full((40,), -1, dtype=torch.int32)
    packed_blocks_kernel[5, 1](starts, blocks, 5, 640, 15, BLOCK=64, FROM_END=False, CHUNK=CHUNK)
    assert blocks[0] == 15 and (blocks[32:] == -1).all()


def test_preparation_and_conversion_of_packed_sequences():
    from systems.kernels.flash_attention.hopper.backward.prepare import prepare_kernel
    from systems.kernels.flash_attention.hopper.backward.round_dq import convert_kernel

    torch.manual_seed(0)
    heads, n, d = 3, sum(LENGTHS), 64
    starts, (places, padded) = packed_starts(LENGTHS), padded_places(LENGTHS)
    out, dout = (torch.randn(n, heads, d).to(F16).transpose(0, 1)[None] for _ in range(2))
    lse = torch.randn(1, heads, n)
    log2_lse, minus_delta = torch.full((2, 1, heads, padded), math.nan)
    dq_sum, sums = torch.full((heads * padded * d,), math.nan), torch.full((5000,), math.nan)
    counter = torch.full((1,), 7, dtype=torch.int32)
    prepare_kernel[heads * padded // 64,](
        out, dout, lse, lse, starts, log2_lse, minus_delta, dq_sum, sums, counter,
        *out.stride()[:3], *dout.stride()[:3], heads, n, padded, len(LENGTHS),
        len(sums), HEAD_DIM=d, COLUMNS=d, ROWS=64, PACKED=True, HAS_DLSE=False, DQ_COLUMNS=d,
    )  # fmt: skip
    log2_lse, minus_delta = (in_order(x, heads, padded) for x in (log2_lse, minus_delta))
    empty = torch.ones(padded, dtype=torch.bool)
    empty[places] = False
    assert torch.allclose(log2_lse[:, places], lse[0] * math.log2(math.e), rtol=1e-6)
    assert (log2_lse[:, empty] == math.inf).all() and (minus_delta[:, empty] == 0).all()
    want = -(out.float() * dout.float()).sum(-1)[0]
    assert torch.allclose(minus_delta[:, places], want, atol=1e-4)
    assert (dq_sum == 0).all() and (sums == 0).all() and counter.item() == 0

    right = torch.randn(heads, padded, d)
    tiles = dq_tiles(right)
    dq = torch.full((n, heads, d), math.nan, dtype=F16).transpose(0, 1)[None]
    convert_kernel[heads * padded // 64,](
        tiles, dq, starts, *dq.stride()[:3], heads, n, padded, len(LENGTHS), 0.5,
        HEAD_DIM=d, COLUMNS=d, DQ_COLUMNS=d, ROWS=64, PACKED=True,
    )  # fmt: skip
    assert torch.equal(dq[0], (right[:, places] * 0.5).to(F16))


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(
    ("d", "columns", "dq_columns", "n_sums"),
    [(64, 64, 64, 0), (72, 128, 128, 1), (128, 128, 256, 50_000), (136, 256, 192, 99_000)],
)
def test_preparation_is_of_whole_tiles(d, columns, dq_columns, n_sums, has_dlse):
    from systems.kernels.flash_attention.hopper.backward.prepare import prepare_kernel

    torch.manual_seed(0)
    batch, heads, n, padded = 2, 3, 100, 128
    out, dout = (torch.randn(batch, n, heads, d).to(F16).transpose(1, 2) for _ in range(2))
    lse, dlse = torch.randn(2, batch, heads, n)
    log2_lse, minus_delta = torch.full((2, batch, heads, padded), math.nan)
    dq_sum = torch.full((batch * heads * padded * dq_columns,), math.nan)
    # One program writes at most 4,096 zeros at once. The last element is not part of the sums.
    sums = torch.full((n_sums + 1,), math.nan)
    counter = torch.full((1,), 7, dtype=torch.int32)
    prepare_kernel[batch * heads * padded // 64,](
        out, dout, lse, dlse, counter, log2_lse, minus_delta, dq_sum, sums, counter,
        *out.stride()[:3], *dout.stride()[:3], heads, n, padded, 1,
        n_sums, HEAD_DIM=d, COLUMNS=columns, ROWS=64, PACKED=False, HAS_DLSE=has_dlse,
        DQ_COLUMNS=dq_columns,
    )  # fmt: skip

    log2_lse, minus_delta = (in_order(x, batch, heads, padded) for x in (log2_lse, minus_delta))
    assert torch.allclose(log2_lse[..., :n], lse * math.log2(math.e), rtol=1e-6)
    assert (log2_lse[..., n:] == math.inf).all()
    want = -(out.float() * dout.float()).sum(-1) + has_dlse * dlse
    assert torch.allclose(minus_delta[..., :n], want, atol=1e-4)
    assert (minus_delta[..., n:] == 0).all()
    assert (dq_sum == 0).all() and counter.item() == 0
    assert (sums[:n_sums] == 0).all() and sums[n_sums].isnan()


def test_preparation_of_a_query_that_sees_no_key():
    """Its log-sum-exp is -inf, and the gradient of that may be infinite."""
    from systems.kernels.flash_attention.hopper.backward.prepare import prepare_kernel

    out = torch.zeros(1, 1, 64, 64, dtype=F16)
    lse, dlse = torch.full((2, 1, 1, 64), -math.inf)
    log2_lse, minus_delta, counter = torch.empty(64), torch.full((64,), math.nan), torch.empty(1)
    prepare_kernel[1,](
        out, out, lse, dlse, counter, log2_lse, minus_delta, torch.empty(4096), counter, counter,
        *out.stride()[:3], *out.stride()[:3], 1, 64, 64, 1, 0,
        HEAD_DIM=64, COLUMNS=64, ROWS=64, PACKED=False, HAS_DLSE=True, DQ_COLUMNS=64,
    )  # fmt: skip
    assert (minus_delta == 0).all()


@pytest.mark.parametrize(
    ("d", "columns", "dq_columns"), [(64, 64, 64), (72, 128, 128), (136, 256, 256), (136, 256, 192)]
)
def test_conversion_turns_the_tiles(d, columns, dq_columns):
    from systems.kernels.flash_attention.hopper.backward.round_dq import convert_kernel

    batch, heads, n, padded = 2, 3, 100, 128
    right = torch.randn(batch, heads, padded, dq_columns)
    tiles = dq_tiles(right)
    dq = torch.full((batch, n, heads, d), math.nan, dtype=F16).transpose(1, 2)
    convert_kernel[batch * heads * padded // 64,](
        tiles, dq, tiles, *dq.stride()[:3], heads, n, padded, 1, 0.5,
        HEAD_DIM=d, COLUMNS=columns, DQ_COLUMNS=dq_columns, ROWS=64, PACKED=False,
    )  # fmt: skip
    assert torch.equal(dq, (right[:, :, :n, :d] * 0.5).to(F16))
