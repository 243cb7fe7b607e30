"""Tests of the Hopper forward kernel on a Hopper GPU, against float64, and of its tiles."""

from __future__ import annotations

import math

import pytest
import torch

from systems.kernels.flash_attention.call import PLAIN, Call
from systems.kernels.flash_attention.hopper.forward_launch import flash_forward
from systems.kernels.flash_attention.hopper.splits import forward_splits
from systems.kernels.flash_attention.hopper.support import form_reason, unsupported_reason
from systems.kernels.flash_attention.hopper.tiles import (
    FEW_BLOCKS,
    FORWARD,
    PACKED_HEAD_DIMS,
    SHORT,
    forward_tile,
)
from tests.systems.kernels.attention_error import assert_within_limits
from tests.systems.kernels.flash_cases import (
    HOPPER_SHAPES,
    on_hopper,
)

BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("head_dim", "n", "is_causal", "is_packed", "heads", "expected"),
    [
        (64, 1024, True, False, 512, SHORT),
        (64, 1536, True, False, 512, SHORT),
        (64, 2048, True, False, 512, FORWARD[64]),
        (64, 1024, False, False, 512, FORWARD[64]),
        (128, 1024, True, False, 512, FORWARD[128]),
        (64, 1024, True, False, 17, SHORT),  # 136 blocks on 132 multiprocessors
        (64, 1024, True, False, 16, FEW_BLOCKS),
        (64, 4096, True, True, 1, SHORT),
        (64, 8192, True, True, 1, FORWARD[64]),
    ],
)
def test_tile_of_short_sequences(head_dim, n, is_causal, is_packed, heads, expected):
    assert forward_tile(head_dim, n, is_causal, is_packed, None, heads / 132) == expected


def test_few_heads_are_split_and_many_are_not():
    pytest.importorskip("triton")  # the estimate calls `tile_ops.schedule`

    def of(n, heads, is_causal=True, block_q=192):
        return forward_splits(heads, -(-n // block_q), n // 128, is_causal, heads * n * 256, 132)

    assert of(16384, 16) == of(65536, 1) == of(128, 1) == 1
    assert all(of(n, 1) > 1 for n in (4096, 8192, 16384))
    # 128 blocks of equal length on 132 multiprocessors: a split would only add a second wave.
    assert of(16384, 1, is_causal=False, block_q=128) == 1


def inputs(batch, heads, n_queries, n_keys, head_dim, dtype, scale=1.0, kv_heads=None):
    torch.manual_seed(n_queries + n_keys)
    kv_heads = kv_heads or heads
    rows = (heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys)
    shapes = [(batch, *of, head_dim) for of in rows]
    return [(torch.randn(s, device="cuda") * scale).to(dtype) for s in shapes]


def check(q, k, v, is_causal, scale=None, **options):
    out, lse = flash_forward(q, k, v, Call(is_causal, scale), **options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    found = {"out": out, "lse": lse}
    assert_within_limits(found, q, k, v, torch.zeros_like(q), is_causal, scale)
    return out, lse


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("head_dim", PACKED_HEAD_DIMS)
def test_gpu_against_float64(outputs_hold_nan, head_dim, dtype, is_causal):
    for shape in HOPPER_SHAPES:
        check(*inputs(*shape, head_dim, dtype), is_causal)
        if head_dim == 64:  # otherwise only used with many heads
            check(*inputs(*shape, head_dim, dtype), is_causal, tile=SHORT)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", PACKED_HEAD_DIMS)
def test_gpu_split_over_keys(outputs_hold_nan, head_dim, is_causal):
    for shape in ((1, 1, 1000, 1000), (1, 2, 4224, 4224), (1, 1, 300, 1111), (1, 1, 1111, 300)):
        for n_splits in (2, 3, 7):
            check(*inputs(*shape, head_dim, BF16, kv_heads=1), is_causal, n_splits=n_splits)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [*PACKED_HEAD_DIMS, 96])
def test_gpu_thousand_launches_are_bit_equal(head_dim, is_causal):
    q, k, v = inputs(2, 40, 900, 900, head_dim, BF16)
    call = Call(is_causal)
    first = flash_forward(q, k, v, call)
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = flash_forward(q, k, v, call)
        unequal += (out != first[0]).any() | (lse != first[1]).any()
    assert unequal.item() == 0


@on_hopper
@pytest.mark.gpu
def test_gpu_empty_and_in_a_graph(outputs_hold_nan):
    q, k, v = inputs(1, 2, 300, 300, 64, BF16)
    out, lse = flash_forward(q, k[..., :0, :], v[..., :0, :])
    assert (out == 0).all() and (lse == -math.inf).all()
    assert flash_forward(q[..., :0, :], k, v)[0].shape == (1, 2, 0, 64)
    want = flash_forward(q, k, v, Call(True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_forward(q, k, v, Call(True))
    for _ in range(3):
        got[0].fill_(math.nan)
        graph.replay()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@on_hopper
@pytest.mark.gpu
def test_gpu_a_wrong_head_dim_of_v_is_an_error():
    for head_dim, value_dim in ((128, 64), (192, 64), (64, 128)):
        q, k, v = inputs(1, 2, 64, 64, max(head_dim, value_dim), BF16)
        q, k, v = q[..., :head_dim], k[..., :head_dim], v[..., :value_dim]
        with pytest.raises(RuntimeError, match=f"got {value_dim} for v and {head_dim} for q"):
            flash_forward(q, k, v)


def test_what_it_does_not_take_has_a_reason():
    assert "a multiple of 8 from 64 to 256" in (form_reason(BF16, 100, 100) or "")
    assert form_reason(BF16, 96, 96) is None
    q = torch.zeros(1, 1, 4, 64, dtype=BF16)
    assert "Hopper GPU" in (unsupported_reason(q, q, q, PLAIN) or "")
