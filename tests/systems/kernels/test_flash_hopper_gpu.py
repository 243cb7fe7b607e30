"""Tests of the Hopper kernels on a Hopper GPU, against float64, in graphs and in many launches."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from systems.kernels.flash_attention import FlashAttentionHopper
from systems.kernels.flash_attention.call import PLAIN, Call
from systems.kernels.flash_attention.hopper.backward_launch import MAX_DETERMINISTIC_HEAD_DIM
from systems.kernels.flash_attention.hopper.forward_launch import flash_forward
from systems.kernels.flash_attention.hopper.tiles import PACKED_HEAD_DIMS, SHORT
from tests.systems.kernels.attention_error import assert_within_limits
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    assert_right,
    assert_right_packed,
    by_hopper,
    inputs,
    on_hopper,
    packed_inputs,
)

pytestmark = [on_hopper, pytest.mark.gpu, pytest.mark.usefixtures("blocks_of_96_keys")]

# (batch, heads, queries, keys): whole and ragged tiles, more queries than keys and fewer
SHAPES = [
    (1, 2, 384, 384), (2, 3, 768, 768), (1, 2, 1000, 1000), (1, 1, 113, 203), (1, 2, 640, 128),
    (2, 1, 300, 1111), (1, 1, 1, 1), (1, 1, 1, 500), (1, 2, 65, 129), (1, 2, 4224, 4224),
]  # fmt: skip
# (head_dim, value_dim)
DIMS = [(d, d) for d in PACKED_HEAD_DIMS]
OTHER_DIMS = [(96, 96), (192, 128)]
CALLS = {
    "full": PLAIN,
    "causal": Call(True),
    "packed window": Call(window_left=200, window_right=100),
    "packed softcap": Call(True, softcap=30.0),
}
both_masks = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
all_head_dims = pytest.mark.parametrize("head_dim", PACKED_HEAD_DIMS)


@both_masks
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@all_head_dims
def test_gpu_against_float64(outputs_hold_nan, head_dim, dtype, is_causal):
    for batch, heads, *lengths in SHAPES:
        given = inputs(tuple(lengths), head_dim, dtype, (batch, heads), "cuda")
        assert_right(*given, is_causal, by=by_hopper)
        if head_dim <= MAX_DETERMINISTIC_HEAD_DIM:
            assert_right(*given, is_causal, by=by_hopper, deterministic=True)
        if head_dim == 64:  # a tile that is otherwise only used with many heads
            out, lse = flash_forward(*given[:3], Call(is_causal), tile=SHORT)
            assert_within_limits({"out": out, "lse": lse}, *given, is_causal)


@all_head_dims
def test_gpu_without_queries_or_keys(outputs_hold_nan, head_dim):
    for lengths in ((300, 0), (0, 300)):
        assert_right(*inputs(lengths, head_dim, BF16, (1, 2), "cuda"), True, by=by_hopper)


@both_masks
@pytest.mark.parametrize(("head_dim", "value_dim"), [*DIMS, (192, 128)])
def test_gpu_split(outputs_hold_nan, head_dim, value_dim, is_causal):
    for heads, *lengths in ((1, 1000, 1000), (2, 4224, 4224), (1, 300, 1111), (1, 1111, 300)):
        given = inputs(
            tuple(lengths), head_dim, BF16, (1, heads), "cuda", kv_heads=1, value_dim=value_dim
        )
        for n_splits in (2, 3, 7):
            assert_right(*given, is_causal, by=by_hopper, n_splits=n_splits)


@all_head_dims
def test_gpu_scores_far_below_zero(outputs_hold_nan, head_dim):
    """exp2(-lse) is infinite, which keys past the end of a ragged block must not contribute."""
    q, k, v, dout = inputs((200, 200), head_dim, BF16, (1, 2), "cuda")
    _, lse, *gradients = by_hopper(q.abs() * 8, -k.abs() * 8, v, dout, False)
    assert lse.max() < -128
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize(
    ("dims", "name"),
    [*product(DIMS, CALLS), *product(OTHER_DIMS, ("full", "causal"))],
)
def test_gpu_five_hundred_launches(dims, name):
    """All but dQ is bitwise equal in all launches; dQ differs only by the order of additions."""
    call, (head_dim, value_dim), packing = CALLS[name], dims, None
    if name.startswith("packed"):
        lengths = [(n, n) for n in (900, 64, 500, 130)] * 6
        tensors, packing = packed_inputs(lengths, (4, 2), head_dim, BF16, device="cuda")
        assert_right_packed(tensors, packing, call.is_causal, variant=call, by=by_hopper)
    else:
        tensors = inputs((900, 900), head_dim, BF16, (2, 40), "cuda", value_dim=value_dim)
        assert_right(*tensors, call.is_causal, by=by_hopper)

    def results():
        out, lse, dq, dk, dv = by_hopper(*tensors, call.is_causal, variant=call, packing=packing)
        return dq.float(), (out, lse, dk, dv)

    first_dq, first = results()
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    farthest = torch.zeros((), device="cuda")
    for _ in range(500):
        dq, others = results()
        for x, known in zip(others, first, strict=True):
            unequal += (x != known).any()
        farthest = torch.maximum(farthest, (dq - first_dq).norm() / first_dq.norm())
    assert unequal.item() == 0
    assert farthest.item() < 1e-3


@all_head_dims
def test_gpu_compiled_by_torch_into_cuda_graphs(head_dim):
    """No memory of a CUDA graph may be kept, which torch checks before the second graph."""
    q, k, v, dout = inputs((300, 300), head_dim, BF16, (1, 2), "cuda")
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


@all_head_dims
def test_gpu_in_a_graph(outputs_hold_nan, head_dim):
    given = inputs((300, 300), head_dim, BF16, (1, 2), "cuda")
    out, lse, dq, dk, dv = by_hopper(*given, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = by_hopper(*given, True)
    for _ in range(3):
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        for i, known in ((0, out), (1, lse), (3, dk), (4, dv)):
            assert torch.equal(got[i], known)
        assert torch.allclose(got[2], dq, rtol=1e-2, atol=1e-3)
