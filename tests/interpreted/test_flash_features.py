"""Tests of grouped heads, packed sequences, masks, softcap and lse of flash_triton."""

from __future__ import annotations

import math

import pytest
import torch

from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.triton import layout
from tests.systems.kernels.attention_error import unit_roundoff
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    F32,
    TILES,
    assert_right,
    by_triton,
    ignore_overflow,
    inputs,
    packed_inputs,
)
from tests.systems.kernels.random_cases import laid_out

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]

# With bounds of 14, two less than a tile, an error of one row gives some tiles no mask.
MASKS = {
    "causal lower right": Call(True, lower_right=True),
    "window": Call(window_left=9, window_right=3),
    "window lower right": Call(window_left=9, window_right=3, lower_right=True),
    "left window": Call(window_left=14),
    "right window": Call(window_right=14),
    "one key each": Call(True, window_left=0, lower_right=True),
    "window past the ends": Call(window_left=10**10, window_right=10**10),
}
# A difference of 33 is one more than a tile: the last query of a tile sees one key of the next.
LENGTHS = [(34, 67), (67, 34)]
WAYS = [("wide", None), ("high", 3)]  # tiles and n_splits
# Keys past the last query and queries past the last key, with both kinds of tiles
CASES = [(mask, LENGTHS[i % 2], WAYS[i // 2 % 2]) for i, mask in enumerate(MASKS)]


@pytest.mark.parametrize(("mask", "lengths", "way"), CASES)
def test_masks(mask, lengths, way):
    tiles, n_splits = way
    given_inputs = inputs(lengths, 16, F32, (1,))
    assert_right(*given_inputs, MASKS[mask], tiles=TILES[tiles], n_splits=n_splits)


def test_grouped_heads_of_every_magnitude():
    """Heads of q and dout have scales of their own, also if they share a head of k and v."""
    q, k, v, dout = inputs((20, 33), 16, F32, (3,), kv_heads=1)
    powers = 2.0 ** torch.tensor([[0, 0], [30, -30], [-20, 40]])
    q, dout = (x * powers[:, i, None, None] for i, x in enumerate((q, dout)))
    assert_right(q, k * 2.0**-10, v, dout, Call(True, 2.0**-15), tiles=TILES["wide"])


@pytest.mark.parametrize(("dtype", "cap"), [(F32, 1e4), (BF16, 1e8), (F16, 1e6)])
def test_a_softcap_far_above_the_scores_changes_nothing(dtype, cap):
    """tanh(x) is x for small x, also if the cap multiplies its rounding error."""
    given_inputs = inputs((40, 50), 16, dtype, (1,))
    capped = by_triton(*given_inputs, Call(True, softcap=cap), tiles=TILES["wide"])
    plain = by_triton(*given_inputs, Call(True), tiles=TILES["wide"])
    limit = max(3e-6, unit_roundoff(dtype))
    for a, b in zip(capped, plain, strict=True):
        assert (a.double() - b.double()).norm() <= limit * b.double().norm()


def test_rows_of_the_output_that_are_too_far_apart(monkeypatch):
    """With a larger value_dim, the rows of the output would be further apart than those of q."""
    monkeypatch.setattr(layout, "MAX_ROW_STRIDE", 200)
    given_inputs = inputs((20, 20), 32, F32, (1, 4), value_dim=64)
    q, k, v, dout = (laid_out(x, "rows") for x in given_inputs)
    assert q.stride(-2) == 128  # and 256 in an output with the same order of dimensions
    assert_right(q, k, v, dout, Call(True), tiles=TILES["wide"])


def test_the_gradient_of_an_lse_that_is_minus_infinity_is_ignored():
    """The first queries see no key. The gradient of a function of their lse may be NaN."""
    q, k, v, dout = inputs((9, 4), 16, F32, (1,))
    dlse = torch.zeros(1, 9)
    dlse[:, :5] = math.nan
    out, lse, dq, dk, dv = by_triton(q, k, v, dout, Call(True, lower_right=True), dlse=dlse)
    assert torch.equal(lse[:, :5], torch.full((1, 5), -math.inf))
    assert not out[:, :5].any() and not dq[:, :5].any()
    assert dk.isfinite().all() and dv.isfinite().all()


def test_packed_sequences_of_other_numbers_of_queries_and_keys():
    tensors, packing = packed_inputs([(17, 5), (0, 3), (3, 20)], (2, 1), 16, F32)
    assert_right(*tensors, Call(True, packing=packing), tiles=TILES["wide"], n_splits=1)


@pytest.mark.slow
@pytest.mark.depends
def test_packed_sequences_are_as_precise_as_each_alone():
    """Each sequence has a scale of its own, and NaN in one of them does not reach the others."""
    (q, k, v, dout), packing = packed_inputs([(n, n) for n in (17, 40, 1, 33)], (2, 2), 16, F32)
    size = torch.tensor([1.0, 2.0**40, 1.0, 2.0**-40]).repeat_interleave(
        torch.tensor([17, 40, 1, 33])
    )
    call = Call(True, packing=packing)
    assert_right(q, k, v * size[:, None], dout, call, tiles=TILES["wide"], n_splits=1)
    v[:, 17 + 40] = math.nan
    results = by_triton(q, k, v, dout, call, tiles=TILES["wide"])
    for x in results:
        assert x[:, : 17 + 40].isfinite().all() and x[:, 17 + 41 :].isfinite().all()


def test_boundaries_outside_of_the_tensors_touch_no_other_memory():
    tensors, packing = packed_inputs([(20, 20), (20, 20)], (1, 1), 16, BF16)
    starts = torch.tensor([0, 20, 10_000], dtype=torch.int32)
    wrong = packing._replace(starts_q=starts, starts_k=starts)
    results, expected = (
        by_triton(*tensors, Call(True, packing=x), tiles=TILES["wide"]) for x in (wrong, packing)
    )
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
