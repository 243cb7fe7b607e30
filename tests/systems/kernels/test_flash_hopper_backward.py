"""Tests of the Hopper backward kernels on a Hopper GPU, against float64, and of their splits."""

from __future__ import annotations

import math

import pytest
import torch

from systems.kernels.flash_attention import FlashAttentionHopper
from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.hopper.backward_launch import flash_backward
from systems.kernels.flash_attention.hopper.forward_launch import flash_forward
from systems.kernels.flash_attention.hopper.splits import backward_splits, block_of_keys
from tests.systems.kernels.attention_error import assert_within_limits
from tests.systems.kernels.flash_cases import (
    HOPPER_SHAPES,
    on_hopper,
)

pytestmark = pytest.mark.usefixtures("blocks_of_96_keys")

BF16, F16 = torch.bfloat16, torch.float16
HEAD_DIMS = (64, 128, 192, 256)


def test_few_heads_are_split_and_many_are_not():
    pytest.importorskip("triton")  # the estimate calls `tile_ops.schedule`

    def of(n, heads, is_causal=True, head_dim=64):
        n_blocks = -(-n // block_of_keys(head_dim))
        return backward_splits(heads, n_blocks, -(-n // 64), is_causal, head_dim, 132)

    assert of(16384, 16) == of(65536, 1) == of(128, 1) == 1
    assert all(of(n, 1, head_dim=d) > 1 for n in (4096, 8192) for d in HEAD_DIMS)
    assert all(of(16384, 1, head_dim=d) > 1 for d in (64, 128))
    # 128 items of equal length on 132 multiprocessors: a split would only add a second wave.
    assert of(16384, 1, is_causal=False) == 1


def test_what_it_does_not_take_has_a_reason():
    q, lse = torch.zeros(1, 1, 4, 192, dtype=BF16), torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="a head_dim of at most 128, got 192"):
        flash_backward(q, q, q, q, lse, q, deterministic=True)


def inputs(batch, heads, n_queries, n_keys, head_dim, dtype, kv_heads=None):
    torch.manual_seed(n_queries + n_keys)
    of_q, of_k = (heads, n_queries), (kv_heads or heads, n_keys)
    shapes = [(batch, *rows, head_dim) for rows in (of_q, of_k, of_k, of_q)]
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


def check(q, k, v, dout, is_causal, scale=None, dlse=None, **options):
    call = Call(is_causal, scale)
    out, lse = flash_forward(q, k, v, call)
    gradients = flash_backward(q, k, v, out, lse, dout, call, dlse=dlse, **options)
    for x, like in zip(gradients, (q, k, v), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
    found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    assert_within_limits(found, q, k, v, dout, is_causal, scale, dlse=dlse)
    return gradients


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_against_float64(outputs_hold_nan, head_dim, dtype, is_causal):
    for shape in HOPPER_SHAPES:
        check(*inputs(*shape, head_dim, dtype), is_causal)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_a_query_that_sees_one_key(outputs_hold_nan, head_dim):
    q, k, v, dout = inputs(1, 1, 1, 500, head_dim, BF16)
    out, lse = flash_forward(q, k, v, Call(True))
    dq, dk, dv = flash_backward(q, k, v, out, lse, dout, Call(True))
    assert torch.equal(dv[..., :1, :], dout) and (dv[..., 1:, :] == 0).all()
    assert_within_limits({"dq": dq, "dk": dk}, q, k, v, dout, True)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_split_over_queries(outputs_hold_nan, head_dim, is_causal):
    for shape in ((1, 1, 1000, 1000), (1, 2, 4224, 4224), (1, 1, 300, 1111), (1, 1, 1111, 300)):
        for n_splits in (2, 3, 7):
            check(*inputs(*shape, head_dim, BF16, kv_heads=1), is_causal, n_splits=n_splits)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_scores_far_below_zero(outputs_hold_nan, head_dim):
    """exp2(-lse) is infinite, which keys past the end of a ragged block must not contribute."""
    q, k, v, dout = inputs(1, 2, 200, 200, head_dim, BF16)
    q, k = q.abs() * 8, -k.abs() * 8
    out, lse = flash_forward(q, k, v)
    assert lse.max() < -128
    assert all(x.isfinite().all() for x in flash_backward(q, k, v, out, lse, dout))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_two_hundred_launches(head_dim, is_causal):
    """dK and dV are bitwise equal in all launches; dQ differs only by the order of additions."""
    q, k, v, dout = inputs(2, 40, 900, 900, head_dim, BF16)
    first = check(q, k, v, dout, is_causal)
    call = Call(is_causal)
    out, lse = flash_forward(q, k, v, call)
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    farthest = torch.zeros((), device="cuda")
    for _ in range(200):
        dq, dk, dv = flash_backward(q, k, v, out, lse, dout, call)
        unequal += (dk != first[1]).any() | (dv != first[2]).any()
        far = (dq.float() - first[0].float()).norm() / first[0].float().norm()
        farthest = torch.maximum(farthest, far)
    assert unequal.item() == 0
    assert farthest.item() < 1e-3


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_compiled_by_torch_into_cuda_graphs(head_dim):
    """No memory of a CUDA graph may be kept, which torch checks before the second graph."""
    q, k, v, dout = inputs(1, 2, 300, 300, head_dim, BF16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = torch.compile(FlashAttentionHopper.apply, mode="reduce-overhead", fullgraph=True)
    want = FlashAttentionHopper.apply(*leaves, True)
    expected = torch.autograd.grad(want, leaves, dout)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = whole(*leaves, True)
        gradients = torch.autograd.grad(out, leaves, dout)
        assert torch.equal(out, want)
        assert torch.equal(gradients[1], expected[1]) and torch.equal(gradients[2], expected[2])
        assert torch.allclose(gradients[0], expected[0], rtol=1e-2, atol=1e-3)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gpu_empty_and_in_a_graph(outputs_hold_nan, head_dim):
    q, k, v, dout = inputs(1, 2, 300, 300, head_dim, BF16)
    out, lse = flash_forward(q, k, v, Call(True))
    given = (q, k, v, out, lse, dout, Call(True))
    want = flash_backward(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_backward(*given)
    for _ in range(3):
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
        assert torch.allclose(got[0], want[0], rtol=1e-2, atol=1e-3)
    nothing = k[..., :0, :]
    gradients = flash_backward(q, nothing, nothing, torch.zeros_like(q), lse, dout)
    assert (gradients[0] == 0).all() and gradients[1].shape == nothing.shape
