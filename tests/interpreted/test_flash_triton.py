"""Tests of FlashAttention-2 in Triton, in Triton's interpreter, against float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from systems.kernels.flash_attention.naive import naive_with_lse
from systems.kernels.flash_attention.triton import base_plan, launch
from systems.kernels.flash_attention.triton.launch import flash_backward, flash_forward
from systems.kernels.flash_attention.variant import NO_VARIANT, Variant
from systems.kernels.kernel_launch import Launch, compiling_only
from tests.systems.kernels.attention_error import (
    NAMES,
    assert_within_limits,
)
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    F32,
    LENGTHS,
    TILES,
    assert_right,
    by_triton,
    ignore_overflow,
    inputs,
)
from tests.systems.kernels.selection import matrix, slow

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]


WAYS = [("wide", 1), ("high", 3), ("table", None)]  # tiles and n_splits
ALWAYS = [
    (WAYS[0], (17, 3), False), (WAYS[0], (33, 64), True), (WAYS[1], (50, 83), False),
    (WAYS[1], (64, 33), True), (WAYS[2], (33, 64), False), (WAYS[2], (50, 83), True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "lengths", "is_causal"), matrix(ALWAYS, WAYS, LENGTHS, (False, True))
)
def test_against_float64(way, lengths, is_causal):
    tiles, n_splits = way
    assert_right(*inputs(lengths, 16, F32, (1,)), is_causal, tiles=TILES[tiles], n_splits=n_splits)


@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("is_causal", [False, True])
def test_dk_and_dv_apart_in_ranges_that_are_whole_tiles_of_both(is_causal):
    assert_right(*inputs((113, 40), 16, F32, (1,)), is_causal, tiles=TILES["apart"], n_splits=3)


@pytest.mark.parametrize(
    ("dtype", "lengths", "is_causal"),
    [
        (BF16, (33, 64), False),
        (BF16, (70, 50), True),
        (F16, (33, 64), True),
        (F16, (70, 50), False),
    ],
)
def test_16_bits(dtype, lengths, is_causal):
    for tiles, n_splits in (("wide", 2), ("table", 1)):
        assert_right(
            *inputs(lengths, 32, dtype, (1,)), is_causal, tiles=TILES[tiles], n_splits=n_splits
        )


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    matrix(
        [(1, F32), (8, BF16), (24, F32), (64, BF16), (80, F32), (128, BF16)],
        (1, 8, 24, 64, 80, 128),
        (F32, BF16),
    ),
)
def test_head_dims(head_dim, dtype):
    assert_right(*inputs((40, 37), head_dim, dtype, (1,)), True, n_splits=2, tiles=TILES["wide"])


@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 2)])
def test_leading_dimensions_in_groups_of_two_heads(leading, monkeypatch):
    launch._forward_plan.cache_clear()
    launch._backward_plan.cache_clear()
    monkeypatch.setattr(base_plan, "heads_in_l2", lambda *_: 2)  # 3 heads: the last group has one
    assert_right(*inputs((18, 17), 16, F32, leading), True, tiles=TILES["wide"])


@pytest.mark.parametrize(
    ("layout", "dtype"),
    matrix(
        [("rows", BF16), ("columns", F32), ("slices", BF16), ("shared", BF16), ("five", F32)],
        ("rows", "columns", "slices", "shared", "five"),
        (F32, BF16),
    ),
)
def test_strides(layout, dtype):
    made = inputs((18, 17), 16, dtype, (2, 2))
    if layout == "rows":  # (batch, rows, heads, head_dim), as projections give them
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    elif layout == "columns":
        made = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in made]
    elif layout == "slices":
        made = [torch.cat([x, x], -1)[..., 3:19] for x in made]
    elif layout == "shared":  # all heads share keys and values, and dout is one expanded number
        q, k, v, dout = made
        k, v = (x[:, :1].expand(2, 2, -1, -1) for x in (k, v))
        made = [q, k, v, torch.full((), 0.5, dtype=dtype).expand(dout.shape)]
    else:  # leading dimensions that cannot be viewed as two
        made = [x.view(1, 2, 2, *x.shape[2:]).expand(2, -1, -1, -1, -1) for x in made]
        made = [x.permute(2, 1, 0, 3, 4) for x in made]
    n_splits = 1 if dtype == F32 else 2
    assert_right(*made, True, tiles=TILES["wide"], n_splits=n_splits)


@pytest.mark.slow
@pytest.mark.depends
def test_outputs_have_the_layout_of_the_inputs():
    q, k, v, dout = (x.transpose(1, 2) for x in torch.randn(4, 2, 20, 3, 16))
    out, lse = flash_forward(q, k, v)
    gradients = flash_backward(q, k, v, out, lse, dout)
    assert all(x.stride() == q.stride() for x in (out, *gradients))


@pytest.mark.parametrize(("dtype", "is_causal"), [(F32, True), (BF16, False)])
def test_large_magnitudes(dtype, is_causal):
    q, k, v, dout = inputs((50, 60), 32, F32, (1,))
    made = [x.to(dtype) for x in (5 * q, 3 * k, 3 * v, dout)]
    assert_right(*made, is_causal, tiles=TILES["wide"], n_splits=2)


@pytest.mark.parametrize(("scale", "is_causal"), [(1, False), (0.0, True), (-0.7, True)])
def test_scales(scale, is_causal):
    assert_right(*inputs((33, 40), 16, F32, (1,)), is_causal, scale, tiles=TILES["high"])


def test_scores_that_are_all_far_below_zero():
    q, k, v, dout = inputs((20, 40), 16, F32, (1,))
    q, k = q.abs() * 10, -k.abs() * 10  # exp(-lse) overflows for keys past the end
    assert_right(q, k, v, dout, False, tiles=TILES["high"])
    assert_right(q, k, v, dout, True, tiles=TILES["wide"])


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_keys_out_is_zero_and_lse_minus_infinity(is_causal):
    out, lse, dq, dk, dv = by_triton(*inputs((5, 0), 16, F32), is_causal)
    assert torch.equal(out, torch.zeros(2, 5, 16)) and torch.equal(dq, out)
    assert torch.equal(lse, torch.full((2, 5), -math.inf))
    assert dk.shape == dv.shape == (2, 0, 16)


@pytest.mark.parametrize(("leading", "lengths"), [((2,), (0, 5)), ((0,), (4, 5)), ((2, 0), (4, 5))])
def test_without_queries_or_heads(leading, lengths):
    out, lse, dq, dk, dv = by_triton(*inputs(lengths, 16, F32, leading), True)
    assert out.shape == dq.shape == (*leading, lengths[0], 16) and lse.shape == out.shape[:-1]
    assert torch.equal(dk, torch.zeros(*leading, 5, 16)) and torch.equal(dv, dk)


def test_a_part_without_a_visible_key_weighs_nothing():
    """The first queries see no key of the second range, whose part is 0 with a lse of -inf."""
    q, k, v, dout = inputs((48, 96), 16, F32, (1,))
    assert_right(q, k, v, dout, True, tiles=TILES["wide"], n_splits=3)


def test_float32_of_every_magnitude():
    """Magnitudes outside the range of float16 are supported, since each head has its own scale."""
    made = inputs((20, 33), 16, F32, (4,))
    # One row per head, with columns for q, k, v and dout
    powers = torch.tensor(
        [[0, 0, 60, -50], [0, 0, -60, 20], [40, -40, 10, 60], [-40, 40, -30, -40]]
    )
    q, k, v, dout = (x * 2.0 ** powers[:, i, None, None] for i, x in enumerate(made))
    v[1] = 0
    together = by_triton(q, k, v, dout, True, tiles=TILES["wide"])
    for head in range(4):
        found = {name: x[head] for name, x in zip(NAMES, together, strict=True)}
        own = (x[head] for x in (q, k, v, dout))
        assert_within_limits(found, *own, True, split_float32=True)
    alone = by_triton(*(x[2] for x in (q, k, v, dout)), True, tiles=TILES["wide"])
    assert all(torch.equal(a[2], b) for a, b in zip(together, alone, strict=True))


def test_float32_of_rows_of_every_magnitude():
    """The error limit of each row of out depends only on the values that its query sees."""
    q, k, v, dout = inputs((20, 20), 16, F32, (1,))
    v *= 2.0 ** (torch.arange(20) * 2 - 38)[:, None]  # a causal row sees no larger values
    assert_right(q, k, v, dout, True, tiles=TILES["wide"])


@pytest.mark.parametrize("beyond", [math.nan, 1e30])
def test_float32_keys_that_no_query_sees_say_nothing_of_the_range(beyond):
    q, k, v, dout = inputs((20, 45), 16, F32, (1,))
    known = by_triton(q, k[:, :20], v[:, :20], dout, True, tiles=TILES["wide"])
    k[:, 20:] = v[:, 20:] = beyond
    out, lse, dq, dk, dv = by_triton(q, k, v, dout, True, tiles=TILES["wide"])
    assert not dk[:, 20:].any() and not dv[:, 20:].any()
    found = out, lse, dq, dk[:, :20], dv[:, :20]
    assert all(torch.equal(a, b) for a, b in zip(found, known, strict=True))


REACHED = {"plain": NO_VARIANT, "window": Variant(window_left=5), "softcap": Variant(softcap=5.0)}


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
    made, variant = inputs((40, 40), 16, dtype, (2,)), REACHED[mask]
    options = {"variant": variant, "tiles": TILES["wide"]}
    known = by_triton(*made, True, **options)
    changed = made[["q", "k", "v", "dout"].index(which)]
    changed[1, 20, 3] = math.nan
    q, k, v = (x.clone().requires_grad_() for x in made[:3])
    out, lse = naive_with_lse(q, k, v, True, None, variant)
    defined = out, lse, *torch.autograd.grad(out, (q, k, v), made[3])
    changed[1, 20, 3] = value
    found = by_triton(*made, True, **options)
    for name, a, b, c in zip(NAMES, found, known, defined, strict=True):
        if name != "dk" or dtype == F32:  # in 16 bits, dK of other keys of its tile is not finite
            assert torch.equal(torch.where(c.isfinite(), a, b), b), name
    if which in "qk" and value != math.inf:
        assert found[0][1, 20].isnan().all()


@pytest.mark.slow
@pytest.mark.depends
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
    for precision in ("fp16x3", "tf32"):
        for dtype in (F32, BF16, F16):
            given_inputs = inputs((18, 17), 16, dtype, (1,))
            by_triton(*given_inputs, True, tiles=TILES["high"], n_splits=2, precision=precision)
    assert len(set(seen.values())) > 10


def test_while_one_thread_compiles_only_another_launches():
    given_inputs = inputs((18, 17), 16, F32, (1,))
    with compiling_only(1), ThreadPoolExecutor(1) as other:
        other.submit(assert_right, *given_inputs, True, n_splits=2, tiles=TILES["high"]).result()


@pytest.mark.parametrize("layout", ["dense", "rows", slow("columns"), slow("spread")])
def test_a_negative_scale_changes_no_layout(layout):
    """torch.compile infers the strides of outputs before the scale is known."""
    q, k, v, dout = inputs((18, 17), 32, BF16, (2, 2))
    if layout == "rows":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "columns":
        q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "spread":
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
        q, k, v, dout = (x[..., ::2] for x in (q, k, v, dout))
    positive = by_triton(-q, k, v, dout, True, 0.5, tiles=TILES["high"])
    negative = by_triton(q, k, v, dout, True, -0.5, tiles=TILES["high"])
    assert torch.equal(negative[2], -positive[2])
    assert all(torch.equal(negative[i], positive[i]) for i in (0, 1, 3, 4))
    given_ = by_triton(q, k, v, dout, True, 0.5, tiles=TILES["high"])
    assert [x.stride() for x in given_] == [x.stride() for x in negative]


@pytest.mark.slow
@pytest.mark.depends
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    head_dim=st.integers(1, 33),
    is_causal=st.booleans(),
    n_splits=st.integers(1, 4),
    tiles=st.sampled_from(["wide", "high"]),
    seed=st.integers(0, 100),
)
def test_any_shape(lengths, head_dim, is_causal, n_splits, tiles, seed):
    given_inputs = inputs(lengths, head_dim, F32, (1,), seed=seed)
    assert_right(*given_inputs, is_causal, tiles=TILES[tiles], n_splits=n_splits)
