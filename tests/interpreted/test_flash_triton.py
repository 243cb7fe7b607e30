"""Tests of FlashAttention-2 in Triton, in Triton's interpreter, against float64.

With all features: grouped heads, packed sequences, masks, softcap and lse.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.naive import naive_with_lse
from systems.kernels.kernel_launch import Launch, compiling_only
from tests.systems.kernels.attention_error import (
    NAMES,
    assert_within_limits,
    attention_shares,
    unit_roundoff,
)
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
from tests.systems.kernels.selection import matrix
from tests.systems.margins import assert_margin

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]
CAUSAL = Call(True)


def test_scores_that_are_all_far_below_zero():
    q, k, v, dout = inputs((20, 40), 16, F32, (1,))
    q, k = q.abs() * 10, -k.abs() * 10  # exp(-lse) overflows for keys past the end
    assert_right(q, k, v, dout, tiles=TILES["high"])
    assert_right(q, k, v, dout, CAUSAL, tiles=TILES["wide"])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("leading", "lengths"), [((2,), (5, 0)), ((2,), (0, 5)), ((0,), (4, 5)), ((2, 0), (4, 5))]
)
def test_without_keys_queries_or_heads(leading, lengths, is_causal):
    assert_right(*inputs(lengths, 16, F32, leading), Call(is_causal))


def test_float32_of_every_magnitude():
    """Magnitudes outside the range of float16 are supported, since each head has its own scale."""
    made = inputs((20, 33), 16, F32, (4,))
    # One row per head, with columns for q, k, v and dout
    powers = torch.tensor(
        [[0, 0, 60, -50], [0, 0, -60, 20], [40, -40, 10, 60], [-40, 40, -30, -40]]
    )
    q, k, v, dout = (x * 2.0 ** powers[:, i, None, None] for i, x in enumerate(made))
    v[1] = 0
    together = by_triton(q, k, v, dout, CAUSAL, tiles=TILES["wide"])
    for head in range(4):
        found, own = ([x[head] for x in of] for of in (together, (q, k, v, dout)))
        assert_within_limits(attention_shares(found, own, CAUSAL, split_float32=True))
    alone = by_triton(*(x[2] for x in (q, k, v, dout)), CAUSAL, tiles=TILES["wide"])
    assert all(torch.equal(a[2], b) for a, b in zip(together, alone, strict=True))


def test_float32_of_rows_of_every_magnitude():
    """The error limit of each row of out depends only on the values that its query sees."""
    q, k, v, dout = inputs((20, 20), 16, F32, (1,))
    v *= 2.0 ** (torch.arange(20) * 2 - 38)[:, None]  # a causal row sees no larger values
    assert_right(q, k, v, dout, CAUSAL, tiles=TILES["wide"])


@pytest.mark.parametrize("beyond", [math.nan, 1e30])
def test_float32_keys_that_no_query_sees_say_nothing_of_the_range(beyond):
    q, k, v, dout = inputs((20, 45), 16, F32, (1,))
    known = by_triton(q, k[:, :20], v[:, :20], dout, CAUSAL, tiles=TILES["wide"])
    k[:, 20:] = v[:, 20:] = beyond
    out, lse, dq, dk, dv = by_triton(q, k, v, dout, CAUSAL, tiles=TILES["wide"])
    assert not dk[:, 20:].any() and not dv[:, 20:].any()
    found = out, lse, dq, dk[:, :20], dv[:, :20]
    assert all(torch.equal(a, b) for a, b in zip(found, known, strict=True))


REACHED = {
    "plain": CAUSAL, "window": Call(True, window_left=5), "softcap": Call(True, softcap=5.0)
}  # fmt: skip


@pytest.mark.parametrize(
    ("which", "mask", "dtype", "value"),
    matrix(
        [("q", "plain", F32, math.nan), ("k", "window", F32, math.inf),
         ("v", "softcap", F32, math.nan), ("dout", "window", BF16, math.nan)],
        ["q", "k", "v", "dout"], REACHED, (F32, BF16), (math.nan, math.inf),
    ),
)  # fmt: skip
def test_what_is_not_finite_reaches_only_rows_that_it_reaches_by_definition(
    which, mask, dtype, value
):
    made, call = inputs((40, 40), 16, dtype, (2,)), REACHED[mask]
    known = by_triton(*made, call, tiles=TILES["wide"])
    changed = made[["q", "k", "v", "dout"].index(which)]
    changed[1, 20, 3] = math.nan
    q, k, v = (x.clone().requires_grad_() for x in made[:3])
    out, lse = naive_with_lse(q, k, v, call)
    defined = out, lse, *torch.autograd.grad(out, (q, k, v), made[3])
    changed[1, 20, 3] = value
    found = by_triton(*made, call, tiles=TILES["wide"])
    for name, a, b, c in zip(NAMES, found, known, defined, strict=True):
        if name != "dk" or dtype == F32:  # in 16 bits, dK of other keys of its tile is not finite
            assert torch.equal(torch.where(c.isfinite(), a, b), b), name
    if which in "qk" and value != math.inf:
        assert found[0][1, 20].isnan().all()


def test_a_launch_has_tensors_of_the_same_dtypes_always(monkeypatch):
    """A Launch keeps the kernel that was compiled for the dtypes of its first call.

    With tensors of other dtypes it would write wrong bits, or past the end.
    """
    seen: dict[Launch, tuple[torch.dtype, ...]] = {}
    run = Launch.__call__

    def watched(self, *tensors):
        dtypes = tuple(x.dtype for x in tensors)
        assert seen.setdefault(self, dtypes) == dtypes
        run(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", watched)
    for call in (CAUSAL, Call(True, precision="tf32")):
        for dtype in (F32, BF16, F16):
            given_inputs = inputs((18, 17), 16, dtype, (1,))
            by_triton(*given_inputs, call, tiles=TILES["high"], n_splits=2)
    assert len(set(seen.values())) > 10


def test_while_one_thread_compiles_only_another_launches():
    given_inputs = inputs((18, 17), 16, F32, (1,))
    with compiling_only(1), ThreadPoolExecutor(1) as other:
        other.submit(assert_right, *given_inputs, CAUSAL, n_splits=2, tiles=TILES["high"]).result()


def test_a_negative_scale_is_a_positive_one_with_minus_q():
    q, k, v, dout = inputs((18, 17), 32, BF16, (2, 2))
    positive = by_triton(-q, k, v, dout, Call(True, 0.5), tiles=TILES["high"])
    negative = by_triton(q, k, v, dout, Call(True, -0.5), tiles=TILES["high"])
    assert torch.equal(negative[2], -positive[2])
    assert all(torch.equal(negative[i], positive[i]) for i in (0, 1, 3, 4))


MARGINS = list(product(((1, 1), (17, 3), (64, 33), (33, 64), (1, 40)), (1, 16, 64, 128)))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tiles", ["wide", "high"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_errors_stay_under_half_of_their_limits(dtype, tiles):
    def shares_of(seed):
        lengths, head_dim = MARGINS[seed % len(MARGINS)]
        given = inputs(lengths, head_dim, dtype, (1,), seed=seed)
        call, n_splits = Call(seed % 40 > 19), 1 + seed % 3
        found = by_triton(*given, call, tiles=TILES[tiles], n_splits=n_splits)
        return attention_shares(found, given, call, split_float32=True)

    assert_margin(shares_of)


# ---- features ------------------------------------------------------------------------------------

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
