"""Tests of the Hopper kernels on a Hopper GPU, against float64, in graphs and in many launches.

With all features: windows, alignment, softcap, grouped heads and packed sequences, and backward
also with a fixed order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from systems.kernels.device import multiprocessors
from systems.kernels.flash_attention import (
    FlashAttentionHopper,
    flash_attention_packed,
)
from systems.kernels.flash_attention.call import PLAIN, Call, Packing
from systems.kernels.flash_attention.hopper.backward_launch import (
    MAX_DETERMINISTIC_HEAD_DIM,
    flash_backward,
)
from systems.kernels.flash_attention.hopper.forward_launch import flash_forward
from systems.kernels.flash_attention.hopper.tiles import PACKED_HEAD_DIMS, SHORT
from tests.systems.kernels.attention_error import assert_within_limits, attention_shares
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    PACKED_LENGTHS,
    assert_right,
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
VARIANTS = {
    "lower right": Call(True, lower_right=True),
    "window": Call(window_left=200, window_right=100),
    "narrow window": Call(window_left=3, window_right=2),
    "window lower right": Call(window_left=130, window_right=65, lower_right=True),
    "left window": Call(True, window_left=127),
    "right window": Call(window_right=70),
    "softcap": Call(softcap=0.7),
    "causal softcap": Call(True, softcap=30.0),
    "all": Call(True, window_left=150, lower_right=True, softcap=2.0),
}
CAUSAL = Call(True)
CALLS = {"full": PLAIN, "causal": CAUSAL, **VARIANTS}
# (head_dim, heads of q and heads of k and v)
PACKED_FORMS = [(64, (2, 2)), (64, (4, 1)), (128, (4, 2)), (192, (2, 2)), (256, (2, 1))]
all_head_dims = pytest.mark.parametrize("head_dim", PACKED_HEAD_DIMS)


@pytest.mark.parametrize("call", [PLAIN, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@all_head_dims
def test_gpu_against_float64(outputs_hold_nan, head_dim, dtype, call):
    for batch, heads, *lengths in SHAPES:
        given = inputs(tuple(lengths), head_dim, dtype, (batch, heads), "cuda")
        assert_right(*given, call, by=by_hopper)
        if head_dim <= MAX_DETERMINISTIC_HEAD_DIM:
            assert_right(*given, call, by=by_hopper, deterministic=True)
        if head_dim == 64:  # a tile that is otherwise only used with many heads
            found = flash_forward(*given[:3], call, tile=SHORT)
            assert_within_limits(attention_shares(found, given, call))


@pytest.mark.parametrize("name", ["full", "causal", "lower right"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [*DIMS, (192, 128)])
def test_gpu_splits(outputs_hold_nan, head_dim, value_dim, name):
    call = CALLS[name]
    for heads, kv_heads, *lengths in (
        (1, 1, 1000, 1000), (2, 1, 4224, 4224), (1, 1, 300, 1111), (1, 1, 1111, 300),
        (3, 3, 200, 2000), (4, 2, 200, 2000), (4, 1, 200, 2000),
    ):  # fmt: skip
        given = inputs(tuple(lengths), head_dim, BF16, (1, heads), "cuda", 0, kv_heads, value_dim)
        for n_splits in (2, 3, 7):
            assert_right(*given, call, by=by_hopper, n_splits=n_splits)


@all_head_dims
def test_gpu_scores_far_below_zero(outputs_hold_nan, head_dim):
    """exp2(-lse) is infinite, which keys past the end of a ragged block must not contribute."""
    q, k, v, dout = inputs((200, 200), head_dim, BF16, (1, 2), "cuda")
    _, lse, *gradients = by_hopper(q.abs() * 8, -k.abs() * 8, v, dout)
    assert lse.max() < -128
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize(
    ("dims", "name"),
    [
        *product(DIMS, ("full", "causal", "window", "causal softcap")),
        *product(OTHER_DIMS, ("full", "causal")),
    ],
)
def test_gpu_five_hundred_launches(dims, name):
    """All but dQ is bitwise equal in all launches; dQ differs only by the order of additions.

    Calls with features have packed sequences. In some of them, dK and dV are sums of two work
    items, one for each head of q. A sum of two numbers is the same in both orders.
    """
    call, (head_dim, value_dim) = CALLS[name], dims
    if name in VARIANTS:
        lengths = [(n, n) for n in (900, 64, 500, 130)] * 6
        tensors, packing = packed_inputs(lengths, (4, 2), head_dim, BF16, device="cuda")
        call = call._replace(packing=packing)
    else:
        tensors = inputs((900, 900), head_dim, BF16, (2, 40), "cuda", value_dim=value_dim)
    assert_right(*tensors, call, by=by_hopper)

    def results():
        out, lse, dq, dk, dv = by_hopper(*tensors, call)
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


def assert_same_but_for_order(found: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Assert that results for 300 tokens are equal, the last three but for the order of additions.

    These are dq, dk and dv: float32 sums of at most 8 terms, whose magnitudes add up to less than
    10. Two orders differ by less than 2 * 7 * 2**-24 * 10 < 1e-5, which may change the bfloat16
    number to which a sum is rounded to the next one, by up to 2**-7 of it.
    """
    for x, y in zip(found[:-3], known[:-3], strict=True):
        assert torch.equal(x, y)
    for x, y in zip(found[-3:], known[-3:], strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2**-7, atol=1e-5)


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
        assert_same_but_for_order((out, *gradients), (want, *expected))


@all_head_dims
def test_gpu_in_a_graph(outputs_hold_nan, head_dim):
    given = inputs((300, 300), head_dim, BF16, (1, 2), "cuda")
    expected = by_hopper(*given, CAUSAL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = by_hopper(*given, CAUSAL)
    for _ in range(3):
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        assert_same_but_for_order(got, expected)


# ---- features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("head_dim", "heads"), PACKED_FORMS)
def test_gpu_packed_sequences(outputs_hold_nan, head_dim, heads, name):
    call = CALLS[name]
    # At head_dim 64, causal sequences of more than 4,096 queries have larger blocks of queries.
    longer = [(4200, 1300), (40, 1200), (193, 193)]
    for lengths in (PACKED_LENGTHS, [(900, 900)], [(64, 128), (128, 64), (192, 192)], longer):
        tensors, packing = packed_inputs(lengths, heads, head_dim, BF16, device="cuda")
        assert_right(*tensors, call._replace(packing=packing), by=by_hopper)


@all_head_dims
def test_gpu_many_packed_sequences(outputs_hold_nan, head_dim):
    """More sequences than the kernel that lists the blocks compares at a time."""
    torch.manual_seed(0)
    lengths = [(n, n) for n in torch.randint(0, 40, (200,)).tolist()]
    tensors, packing = packed_inputs(lengths, (2, 1), head_dim, BF16, device="cuda")
    longest = packing._replace(max_queries=9000, max_keys=9000)  # an upper bound is enough
    for of in (packing, longest):
        assert_right(*tensors, Call(True, packing=of), by=by_hopper)


def test_gpu_packed_through_the_api_in_a_graph():
    (q, k, v, _), packing = packed_inputs([(100, 100), (250, 250)], (4, 2), 64, BF16, device="cuda")
    rows = [x.transpose(0, 1) for x in (q, k, v)]

    def attend(starts: Tensor) -> Tensor:
        return flash_attention_packed(
            *rows, starts, starts, 300, 300, is_causal=True, implementation="flash_hopper"
        )

    starts = packing.starts_q
    attend(starts)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(starts)
    for boundary in (100, 33, 300):  # the lengths may change between replays
        starts[1] = boundary
        want = attend(starts)
        got.fill_(math.nan)
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    [(64, False), (64, True), (128, False), (128, True), (192, False), (256, False)],
)
def test_gpu_wrong_boundaries_write_nothing_outside(monkeypatch, head_dim, deterministic):
    """Overlapping and unsorted boundaries, which are not checked, on outputs within a buffer."""
    (q, k, v, dout), _ = packed_inputs([(300, 300)], (2, 2), head_dim, BF16, device="cuda")
    wrong = torch.tensor([50, 400, 20, 300], dtype=torch.int32, device="cuda")
    buffers: list[Tensor] = []

    def within_buffer(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        buffers.append(torch.full((3, *shape), 7.0, dtype=x.dtype, device=x.device))
        assert strides == buffers[-1][1].stride()
        return buffers[-1][1]

    monkeypatch.setattr(Tensor, "new_empty_strided", within_buffer)  # of out, dq, dk and dv
    packing = Packing(wrong, wrong, 300, 300)
    by_hopper(q, k, v, dout, Call(True, packing=packing), deterministic=deterministic)
    assert len(buffers) == 4
    assert all((x[::2] == 7.0).all() for x in buffers)


@pytest.mark.parametrize("name", VARIANTS)
@all_head_dims
def test_gpu_long_sequences(outputs_hold_nan, head_dim, name):
    given = inputs((4224, 4224), head_dim, BF16, (1, 2), "cuda")
    assert_right(*given, VARIANTS[name], by=by_hopper)


# ---- backward with a fixed order of the additions to dQ ------------------------------------------


def results_that_never_vary(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, *, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk and dv. Check that the gradients are equal in 200 other calls."""
    out, lse = flash_forward(q, k, v, call)
    of = partial(flash_backward, q, k, v, out, lse, dout, call, dlse=dlse, deterministic=True)
    first = of()
    unequal = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(200):
        unequal += sum((x != y).any() for x, y in zip(of(), first, strict=True))
    assert unequal.item() == 0
    return out, lse, *first


# Work items of 132 programs and many more, ragged and whole tiles
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("full", (1000, 1000)), ("causal", (1000, 1000)), ("causal", (300, 1111)),
        ("lower right", (300, 4111)), ("lower right", (1111, 300)), ("window", (1000, 1000)),
        ("left window", (1000, 1000)), ("causal softcap", (1000, 1000)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [(64, 20, 20), (64, 8, 2), (128, 20, 20), (128, 8, 2), (96, 4, 2)],
)
def test_gpu_in_a_fixed_order(outputs_hold_nan, head_dim, heads, kv_heads, name, lengths):
    given = inputs(lengths, head_dim, BF16, (2, heads), "cuda", kv_heads=kv_heads)
    assert_right(*given, CALLS[name], by=results_that_never_vary)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_more_blocks_in_a_head_than_multiprocessors(head_dim):
    """Work items wait for some that ran before, and must never wait for one that cannot start."""
    n = 2 * multiprocessors(0) * 128  # keys per work item
    for call in (PLAIN, CAUSAL):
        results_that_never_vary(*inputs((n, n), head_dim, BF16, (1, 1), "cuda"), call)


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (4, 4)), (128, (4, 2))])
def test_gpu_packed_sequences_in_a_fixed_order(outputs_hold_nan, head_dim, heads):
    tensors, packing = packed_inputs(PACKED_LENGTHS, heads, head_dim, BF16, device="cuda")
    for call in (CAUSAL, CALLS["all"]):
        assert_right(*tensors, call._replace(packing=packing), by=results_that_never_vary)
