"""Tests of windows, alignment, softcap and packed sequences on a Hopper GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from systems.kernels.flash_attention import flash_attention_packed
from systems.kernels.flash_attention.call import PLAIN, Call, Packing
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.hopper.tiles import HopperTile
from tests.systems.kernels.attention_error import assert_within_limits
from tests.systems.kernels.flash_cases import (
    assert_right,
    assert_right_packed,
    by_hopper,
    inputs,
    on_hopper,
    packed_inputs,
)

pytestmark = [on_hopper, pytest.mark.gpu, pytest.mark.usefixtures("blocks_of_96_keys")]

BF16 = torch.bfloat16
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
CALLS = {"full": PLAIN, "causal": Call(True), **VARIANTS}
# (head_dim, heads of q, heads of k and v)
FORMS = [
    (64, 3, 3), (64, 4, 1), (128, 2, 2), (128, 4, 2), (192, 4, 2), (256, 2, 2), (256, 2, 1),
]  # fmt: skip
PACKED_FORMS = [(64, (2, 2)), (64, (4, 1)), (128, (4, 2)), (192, (2, 2)), (256, (2, 1))]
# (queries, keys) of packed sequences, with empty ones, and one that has many tiles
PACKED_LENGTHS = [(0, 3), (100, 100), (129, 64), (1, 1), (64, 200), (300, 77), (5, 0), (700, 700)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("head_dim", "heads"), PACKED_FORMS)
def test_gpu_packed_sequences(outputs_hold_nan, head_dim, heads, name):
    call = CALLS[name]
    # At head_dim 64, causal sequences of more than 4,096 queries have larger blocks of queries.
    longer = [(4200, 1300), (40, 1200), (193, 193)]
    for lengths in (PACKED_LENGTHS, [(900, 900)], [(64, 128), (128, 64), (192, 192)], longer):
        tensors, packing = packed_inputs(lengths, heads, head_dim, BF16, device="cuda")
        assert_right_packed(tensors, packing, call.is_causal, variant=call, by=by_hopper)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_many_packed_sequences(outputs_hold_nan, head_dim):
    """More sequences than the kernel that lists the blocks compares at a time."""
    torch.manual_seed(0)
    lengths = [(n, n) for n in torch.randint(0, 40, (200,)).tolist()]
    tensors, packing = packed_inputs(lengths, (2, 1), head_dim, BF16, device="cuda")
    longest = packing._replace(max_queries=9000, max_keys=9000)  # an upper bound is enough
    for of in (packing, longest):
        assert_right_packed(tensors, of, True, by=by_hopper)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), FORMS)
def test_gpu_splits(outputs_hold_nan, head_dim, heads, kv_heads):
    call = VARIANTS["lower right"]
    given = inputs((200, 2000), head_dim, BF16, (1, heads), "cuda", 0, kv_heads)
    for n_splits in (2, 3):
        assert_right(*given, True, variant=call, by=by_hopper, n_splits=n_splits)


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
    by_hopper(q, k, v, dout, True, packing=packing, deterministic=deterministic)
    assert len(buffers) == 4
    assert all((x[::2] == 7.0).all() for x in buffers)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_gradient_of_lse_of_queries_that_see_no_key(head_dim):
    """The gradient of a log-sum-exp of -inf may not be finite, and has no effect."""
    q, k, v, dout = inputs((170, 120), head_dim, BF16, (1, 2), "cuda")
    blind, call = torch.arange(170, device="cuda") < 50, Call(lower_right=True)
    dlse = torch.randn(1, 2, 170, device="cuda")
    found = by_hopper(q, k, v, dout, True, variant=call, dlse=dlse.masked_fill(blind, -math.inf))
    expected = by_hopper(q, k, v, dout, True, variant=call, dlse=dlse.masked_fill(blind, 0.0))
    for x, known in zip(found[3:], expected[3:], strict=True):
        assert x.isfinite().all() and torch.equal(x, known)
    assert found[2].isfinite().all()


@pytest.mark.parametrize(("consumers", "block_k"), [(2, 64), (3, 64), (2, 128), (3, 128)])
def test_gpu_every_tile_of_the_forward_kernel(outputs_hold_nan, consumers, block_k):
    registers = (160, 32) if consumers == 3 else (240, 24)
    tile = HopperTile(consumers, block_k, 3, *registers)
    window = Call(window_left=130, window_right=65)
    for lengths, call in (((511, 5), Call(window_left=0)), ((700, 700), window)):
        q, k, v, dout = inputs(lengths, 64, BF16, (1, 2), "cuda")
        out, lse = forward_launch.flash_forward(q, k, v, call, tile=tile)
        found = {"out": out, "lse": lse}
        assert_within_limits(found, q, k, v, dout, False, variant=call)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_long_sequences(outputs_hold_nan, head_dim, name):
    call = VARIANTS[name]
    given = inputs((4224, 4224), head_dim, BF16, (1, 2), "cuda")
    assert_right(*given, call.is_causal, variant=call, by=by_hopper)
