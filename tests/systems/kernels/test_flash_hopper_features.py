"""Tests of windows, alignment, softcap and packed sequences in the Hopper kernels.

On a Hopper GPU, the results are compared with float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from systems.kernels.flash_attention import flash_attention, flash_attention_packed
from systems.kernels.flash_attention.hopper import backward_launch, forward_launch, support
from systems.kernels.flash_attention.hopper.kernel_options import kernel_options
from systems.kernels.flash_attention.hopper.tiles import HopperTile
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant
from tests.systems.kernels.attention_error import assert_within_limits
from tests.systems.kernels.flash_cases import (
    assert_right,
    assert_right_packed,
    by_hopper,
    inputs,
    on_hopper,
    packed_inputs,
)

pytestmark = pytest.mark.usefixtures("blocks_of_96_keys")

BF16 = torch.bfloat16
PLAIN = {"full": (False, NO_VARIANT), "causal": (True, NO_VARIANT)}
VARIANTS = {
    "lower right": (True, Variant(lower_right=True)),
    "window": (False, Variant(200, 100)),
    "narrow window": (False, Variant(3, 2)),
    "window lower right": (False, Variant(130, 65, lower_right=True)),
    "left window": (True, Variant(127)),
    "right window": (False, Variant(None, 70)),
    "softcap": (False, Variant(softcap=0.7)),
    "causal softcap": (True, Variant(softcap=30.0)),
    "all": (True, Variant(150, None, True, 2.0)),
}
# (head_dim, heads of q, heads of k and v)
FORMS = [
    (64, 3, 3), (64, 4, 1), (128, 2, 2), (128, 4, 2), (192, 4, 2), (256, 2, 2), (256, 2, 1),
]  # fmt: skip
PACKED_FORMS = [(64, (2, 2)), (64, (4, 1)), (128, (4, 2)), (192, (2, 2)), (256, (2, 1))]
# (queries, keys) of packed sequences, with empty ones, and one that has many tiles
PACKED_LENGTHS = [(0, 3), (100, 100), (129, 64), (1, 1), (64, 200), (300, 77), (5, 0), (700, 700)]


def test_plain_masks_do_not_use_bounds():
    """A causal mask may be given in several forms, of which only one has fast kernels."""

    def is_bounded(is_causal: bool, variant: Variant, lengths: tuple[int, int] = (9, 9)) -> bool:
        return kernel_options(is_causal, variant, None, lengths, None, 64).is_bounded

    assert not any(is_bounded(x, NO_VARIANT) for x in (True, False))
    assert not is_bounded(False, Variant(None, 0))
    assert not is_bounded(True, Variant(lower_right=True))
    assert is_bounded(True, Variant(lower_right=True), (8, 9))
    assert is_bounded(True, Variant(5)) and is_bounded(False, Variant(None, 3))
    assert not is_bounded(True, Variant(9)) and is_bounded(True, Variant(8))
    assert not is_bounded(False, Variant(9, 100))


def test_what_the_kernels_lack_has_a_reason(monkeypatch):
    monkeypatch.setattr(support, "is_hopper", lambda device: True)
    device = torch.device("cuda")
    reason = support._unsupported_reason(device, BF16, 64, 600.0, False)
    assert "softcap of at most 512, got 600" in reason
    reason = support._unsupported_reason(device, BF16, 96, None, True)
    assert "head_dim 64, 128, 192 or 256 for packed sequences, got 96" in reason
    reason = support._unsupported_reason(device, BF16, 128, None, False, 64)
    assert "v to have the head_dim of q, or 128 if that of q is above 128, got 64 for v" in reason
    assert support._unsupported_reason(device, BF16, 192, None, True, 128) is None
    assert support._unsupported_reason(device, BF16, 96, 30.0, False) is None
    assert support._unsupported_reason(device, BF16, 128, 30.0, True) is None


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "causal", *VARIANTS])
@pytest.mark.parametrize(("head_dim", "heads"), PACKED_FORMS)
def test_gpu_packed_sequences(outputs_hold_nan, head_dim, heads, name):
    is_causal, variant = {**PLAIN, **VARIANTS}[name]
    # At head_dim 64, causal sequences of more than 4,096 queries have larger blocks of queries.
    longer = [(4200, 1300), (40, 1200), (193, 193)]
    for lengths in (PACKED_LENGTHS, [(900, 900)], [(64, 128), (128, 64), (192, 192)], longer):
        tensors, packing = packed_inputs(lengths, heads, head_dim, BF16, device="cuda")
        assert_right_packed(tensors, packing, is_causal, variant=variant, by=by_hopper)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_many_packed_sequences(outputs_hold_nan, head_dim):
    """More sequences than the kernel that lists the blocks compares at a time."""
    torch.manual_seed(0)
    lengths = [(n, n) for n in torch.randint(0, 40, (200,)).tolist()]
    tensors, packing = packed_inputs(lengths, (2, 1), head_dim, BF16, device="cuda")
    longest = packing._replace(max_queries=9000, max_keys=9000)  # an upper bound is enough
    for of in (packing, longest):
        assert_right_packed(tensors, of, True, by=by_hopper)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), FORMS)
def test_gpu_splits(outputs_hold_nan, head_dim, heads, kv_heads):
    is_causal, variant = VARIANTS["lower right"]
    given = inputs((200, 2000), head_dim, BF16, (1, heads), "cuda", 0, kv_heads)
    for n_splits in (2, 3):
        assert_right(*given, is_causal, variant=variant, by=by_hopper, n_splits=n_splits)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["window", "causal softcap"])
def test_gpu_two_hundred_launches(head_dim, name):
    """out, dK and dV are bitwise equal in all launches."""
    is_causal, variant = VARIANTS[name]
    lengths = [(n, n) for n in (900, 64, 500, 130)] * 6
    tensors, packing = packed_inputs(lengths, (4, 2), head_dim, BF16, device="cuda")

    def results() -> tuple[Tensor, ...]:
        out, lse, _, dk, dv = by_hopper(*tensors, is_causal, variant=variant, packing=packing)
        return out, lse, dk, dv

    first = results()
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for x, known in zip(results(), first, strict=True):
            unequal += (x != known).any()
    assert unequal.item() == 0


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_through_the_api_compiled_and_in_a_graph(head_dim):
    torch._dynamo.reset()
    q, k, v, dout = (x.requires_grad_() for x in inputs((300, 420), head_dim, BF16, (1, 4), "cuda"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(
            q, k, v, True, implementation="flash_hopper", window=(99, None), softcap=20.0,
            alignment="lower_right",
        )  # fmt: skip

    want = attend(q, k, v)
    expected = torch.autograd.grad(want, (q, k, v), dout)
    out = torch.compile(attend, fullgraph=True)(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(out, want)
    assert torch.equal(gradients[1], expected[1]) and torch.equal(gradients[2], expected[2])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = attend(q, k, v)
    got.fill_(math.nan)
    graph.replay()
    assert torch.equal(got, want)


@on_hopper
@pytest.mark.gpu
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


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    [(64, False), (64, True), (128, False), (128, True), (192, False), (256, False)],
)
def test_gpu_wrong_boundaries_write_nothing_outside(monkeypatch, head_dim, deterministic):
    """Overlapping and unsorted boundaries, which are not checked, on outputs within a buffer."""
    (q, k, v, dout), _ = packed_inputs([(300, 300)], (2, 2), head_dim, BF16, device="cuda")
    wrong = torch.tensor([50, 400, 20, 300], dtype=torch.int32, device="cuda")
    buffers: list[Tensor] = []

    def within_buffer(x: Tensor, *_: int) -> Tensor:
        buffers.append(torch.full((3, *x.shape), 7.0, dtype=x.dtype, device=x.device))
        return buffers[-1][1]

    for module in (forward_launch, backward_launch):
        monkeypatch.setattr(module, "empty_like", within_buffer)
    packing = Packing(wrong, wrong, 300, 300)
    by_hopper(q, k, v, dout, True, packing=packing, deterministic=deterministic)
    assert len(buffers) == 4
    assert all((x[::2] == 7.0).all() for x in buffers)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_gradient_of_lse_of_queries_that_see_no_key(head_dim):
    """The gradient of a log-sum-exp of -inf may not be finite, and has no effect."""
    q, k, v, dout = inputs((170, 120), head_dim, BF16, (1, 2), "cuda")
    blind, variant = torch.arange(170, device="cuda") < 50, Variant(lower_right=True)
    dlse = torch.randn(1, 2, 170, device="cuda")
    found = by_hopper(q, k, v, dout, True, variant=variant, dlse=dlse.masked_fill(blind, -math.inf))
    expected = by_hopper(q, k, v, dout, True, variant=variant, dlse=dlse.masked_fill(blind, 0.0))
    for x, known in zip(found[3:], expected[3:], strict=True):
        assert x.isfinite().all() and torch.equal(x, known)
    assert found[2].isfinite().all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("consumers", "block_k"), [(2, 64), (3, 64), (2, 128), (3, 128)])
def test_gpu_every_tile_of_the_forward_kernel(outputs_hold_nan, consumers, block_k):
    registers = (160, 32) if consumers == 3 else (240, 24)
    tile = HopperTile(consumers, block_k, 3, *registers)
    for lengths, variant in (((511, 5), Variant(0)), ((700, 700), Variant(130, 65))):
        q, k, v, dout = inputs(lengths, 64, BF16, (1, 2), "cuda")
        out, lse = forward_launch.flash_forward(q, k, v, variant=variant, tile=tile)
        found = {"out": out, "lse": lse}
        assert_within_limits(found, q, k, v, dout, False, variant=variant)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gpu_long_sequences(outputs_hold_nan, head_dim, name):
    is_causal, variant = VARIANTS[name]
    given = inputs((4224, 4224), head_dim, BF16, (1, 2), "cuda")
    assert_right(*given, is_causal, variant=variant, by=by_hopper)


@on_hopper
@pytest.mark.gpu
def test_gpu_narrower_values_many_times_and_split(outputs_hold_nan):
    tensors = inputs((900, 900), 192, BF16, (2, 40), "cuda", value_dim=128)
    _, lse, _, *first = by_hopper(*tensors, True)
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        _, again, _, *gradients = by_hopper(*tensors, True)
        for x, known in zip((again, *gradients), (lse, *first), strict=True):
            unequal += (x != known).any()
    assert unequal.item() == 0
    q, k, v, dout = inputs((300, 420), 192, BF16, (2, 4), "cuda", kv_heads=2, value_dim=128)
    out, lse = forward_launch.flash_forward(q, k, v, True, n_splits=3)
    assert_within_limits({"out": out, "lse": lse}, q, k, v, dout, True)
