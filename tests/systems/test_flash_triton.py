"""FlashAttention-2 in Triton against float64: kernels interpreted, compiled for sm_90, on a GPU.

Right is within twice the error of torch's SDPA in the same dtype on the same input, and beyond that
of the largest value

    a roundoff of the dtype; 4 on a CPU, where torch keeps P and dS in float32
    as many roundoffs of float32 as the largest score has units: its rounding, in the exponent

Tests named `interpreted` run the kernels on a CPU; Triton decides that at import, so they run in a
process of their own, or by `TRITON_INTERPRET=1 pytest tests/systems/test_flash_triton.py`.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from systems.kernels.flash_attention import attention_reference, launch
from systems.kernels.flash_attention.autograd import FlashAttentionTriton
from systems.kernels.flash_attention.configurations import (
    MAX_BLOCK,
    MAX_ROW_STRIDE,
    TABLE,
    Configuration,
    Tile,
    block_d,
    configuration,
    heads_in_l2,
    ranges,
    splits,
)
from systems.kernels.flash_attention.launch import flash_backward, flash_forward
from systems.kernels.flash_attention.layout import layout
from systems.kernels.flash_attention.ops import flash_backward_op, flash_forward_op
from systems.kernels.launcher import Launch, compiling_only
from tests.triton_interpreter import (
    assert_interpreted_tests_pass,
    compiled,
    exact_bfloat16,
    interpreted,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (queries, keys): one tile and many, ragged and not, more queries than keys and fewer
LENGTHS = [(1, 1), (17, 3), (64, 33), (33, 64), (64, 64), (113, 203)]
# Tiles wider than high and higher than wide: the diagonal crosses several of either
WIDE, HIGH = Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)
TILES = {
    "wide": Configuration(WIDE, WIDE, WIDE),
    "high": Configuration(HIGH, HIGH, HIGH),
    "table": None,
}

pytestmark = pytest.mark.filterwarnings(
    # of Triton's interpreter, where a loop has a runtime bound
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    # where a score past the end overflows, and is masked
    "ignore:overflow encountered in exp2:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
)


@pytest.fixture(autouse=True)
def outputs_hold_nan(monkeypatch):
    """What is not written shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        function = getattr(torch, name)

        def filled(*args, function=function, **kwargs):
            made = function(*args, **kwargs)
            return made.fill_(math.nan) if made.is_floating_point() and not made.is_meta else made

        monkeypatch.setattr(launch.torch, name, filled)


@pytest.fixture(autouse=True)
def bfloat16_as_a_gpu_has_it(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") == "1":
        exact_bfloat16(monkeypatch)


def _inputs(
    lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, leading=(2,), device="cpu", seed=0
) -> list[Tensor]:
    """q, k, v, dout of unit variance."""
    generator = torch.Generator(device).manual_seed(seed)
    n_queries, n_keys = lengths
    return [
        torch.randn((*leading, n, head_dim), generator=generator, device=device).to(dtype)
        for n in (n_queries, n_keys, n_keys, n_queries)
    ]


def _by_sdpa(q, k, v, dout, is_causal, scale):
    """out, dq, dk, dv of torch, in the inputs' dtype."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def _by_triton(q, k, v, dout, is_causal, scale=None, *, tiles=None, n_splits=None, **options):
    """out, lse, dq, dk, dv of the kernels."""
    out, lse = flash_forward(q, k, v, is_causal, scale, tiles=tiles, n_splits=n_splits, **options)
    gradients = flash_backward(
        q, k, v, out, lse, dout, is_causal, scale, tiles=tiles, n_splits_dkdv=n_splits,
        n_splits_dq=n_splits, **options,
    )  # fmt: skip
    return out, lse, *gradients


def _check(q, k, v, dout, is_causal, scale=None, **options) -> None:
    exact = attention_reference(q, k, v, dout, is_causal, scale)
    others = _by_sdpa(q, k, v, dout, is_causal, scale)
    out, lse, dq, dk, dv = _by_triton(q, k, v, dout, is_causal, scale, **options)
    factor = abs(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    largest_score = factor * (q.float() @ k.float().transpose(-1, -2)).abs().max().item()
    roundoffs = 1 if q.is_cuda else 4
    allowance = roundoffs * torch.finfo(q.dtype).eps / 2 + largest_score * torch.finfo(F32).eps / 2
    assert lse.dtype == F32 and lse.shape == q.shape[:-1] and lse.is_contiguous()
    # A score is a sum of head_dim products in float32, and exp2 and log2 are good to 2 units
    assert (lse - exact.lse).abs().max().item() <= 16 * 2**-24 * max(1.0, largest_score)
    for name, given_, other in zip(
        ("out", "dq", "dk", "dv"), (out, dq, dk, dv), others, strict=True
    ):
        known = getattr(exact, name)
        assert given_.dtype == q.dtype and given_.shape == known.shape
        largest = known.abs().max().item()
        if largest < 1e-9:
            # Of one visible key dq and dk are zero: what is left is the rounding of dO v^T - D
            cancelled = (dout.float() @ v.float().transpose(-1, -2)).abs().max().item()
            largest = factor * cancelled * (k if name == "dq" else q).abs().max().item()
        limit = 2 * (other - known).abs().max().item() + allowance * largest
        error = (given_ - known).abs().max().item()
        assert error <= limit, f"{name}: {error:.2e} is more than {limit:.2e}"


def _assert_median_of_five_seeds(lengths, head_dim, dtype, is_causal, leading, device) -> None:
    """Relative L2 and largest error, of each output the median, at most twice SDPA's in the same
    dtype on the same inputs and a roundoff of the dtype; in float32 1.5 times SDPA's."""
    names = ("out", "dq", "dk", "dv")
    errors: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for seed in range(5):
        inputs = _inputs(lengths, head_dim, dtype, leading, device, seed)
        exact = attention_reference(*inputs, is_causal)
        out, lse, *gradients = _by_triton(*inputs, is_causal)
        both = {
            "ours": dict(zip(names, (out, *gradients), strict=True)),
            "theirs": dict(zip(names, _by_sdpa(*inputs, is_causal, None), strict=True)),
        }
        errors["ours", "lse", "largest"].append((lse - exact.lse).abs().max().item())
        for whose, name in itertools.product(both, names):
            known = getattr(exact, name)
            difference = both[whose][name] - known
            errors[whose, name, "L2"].append((difference.norm() / known.norm()).item())
            largest = difference.abs().max() / known.abs().max()
            errors[whose, name, "largest"].append(largest.item())
    median = {key: statistics.median(values) for key, values in errors.items()}
    factor, roundoff = 1.5 if dtype == F32 else 2, torch.finfo(dtype).eps / 2
    assert median["ours", "lse", "largest"] <= 1e-5
    for name, kind in itertools.product(names, ("L2", "largest")):
        limit = factor * median["theirs", name, kind] + roundoff
        assert median["ours", name, kind] <= limit, (name, kind)


# ---- what is chosen from shapes ------------------------------------------------------------------


def test_splits_worked_by_hand():
    assert splits(528, 1000, 132) == 1  # every place filled four times over
    assert splits(132, 1000, 132) == 2
    assert splits(128, 1000, 264) == 4  # 528 programs for 264 places, 4.1 times as many
    assert splits(132, 8, 264) == 2  # parts of four tiles
    assert splits(132, 3, 264) == 1
    assert splits(1, 10_000, 132) == 32
    assert splits(0, 10, 132) == 1


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 600))
def test_splits_leave_no_part_too_short(n_programs, n_tiles, slots):
    found = splits(n_programs, n_tiles, slots)
    assert 1 <= found <= 32
    assert found == 1 or n_tiles // found >= 4
    assert found == 1 or n_programs * found <= 2 * slots + n_programs / 2


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 40))
def test_ranges_hold_every_row_once_and_none_is_empty(length, n_splits, tiles):
    length = max(1, length)
    for wanted in (n_splits, None):
        count, size = ranges(length, 16, tiles, 132, wanted)
        assert size % 16 == 0
        assert (count - 1) * size < length <= count * size
        assert wanted is None or count <= wanted


def test_groups_of_heads_worked_by_hand():
    # keys and values of 16384 rows of 64 bfloat16 take 4 MiB
    assert heads_in_l2(16384, 64, 2, 100) == 8
    assert heads_in_l2(16384, 64, 2, 3) == 3
    assert heads_in_l2(1 << 20, 128, 4, 3) == 1


def test_the_table_has_every_head_dim_and_dtype():
    assert [block_d(d) for d in (1, 16, 17, 24, 64, 80, 128)] == [16, 16, 32, 32, 64, 128, 128]
    for head_dim in range(1, 129):
        for dtype in (F32, BF16, F16):
            for tile in filter(None, configuration(head_dim, dtype)):
                assert tile.block_q in (16, 32, 64, 128) and tile.block_k in (16, 32, 64, 128)
                assert max(tile[:2]) <= MAX_BLOCK and tile.num_warps in (4, 8)


def test_offsets_within_any_tile_fit_in_32_bits():
    for head_dim in range(1, 129):
        of = layout((300, head_dim), (MAX_ROW_STRIDE - 1, 1))
        rows = max(MAX_BLOCK, launch._moved(of)["ROWS"])
        assert not of.is_copy and (rows - 1) * of.strides[-1] + head_dim <= 1 << 31
        assert layout((300, head_dim), (MAX_ROW_STRIDE, 1)).is_copy


# ---- what is refused -----------------------------------------------------------------------------


def test_all_that_does_not_fit_is_named_at_once():
    q, k, v = torch.ones(2, 5, 129), torch.ones(3, 5, 129), torch.ones(3, 5, 129).double()
    with pytest.raises(ValueError) as told:
        flash_forward(q, k, v, precision="fp8")
    for part in ("leading dim", "head_dim must be 1 to 128, got 129", "torch.float64", "'fp8'"):
        assert part in str(told.value)
    with pytest.raises(ValueError, match=r"\(\.\.\., rows, head_dim\), got q \(4,\)"):
        flash_forward(*[torch.ones(4)] * 3)


@compiled
def test_without_a_gpu_the_error_says_so():
    x = torch.ones(2, 4, 16)
    with pytest.raises(RuntimeError, match="need a GPU, got tensors on cpu; TRITON_INTERPRET=1"):
        FlashAttentionTriton.apply(x, x, x)


@compiled
def test_importing_it_does_not_import_triton():
    code = (
        "import torch, sys; before = set(sys.modules); "
        "import systems.kernels.flash_attention.autograd; "
        "print([m for m in set(sys.modules) - before if m.startswith('triton')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


# ---- the kernels, interpreted --------------------------------------------------------------------


@compiled
def test_the_kernels_in_the_interpreter():
    assert_interpreted_tests_pass(__file__)


@interpreted
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("tiles", "n_splits"), [("wide", 1), ("high", 3), ("table", None)])
def test_interpreted_against_float64(lengths, is_causal, tiles, n_splits):
    _check(*_inputs(lengths, 16, F32, (1,)), is_causal, tiles=TILES[tiles], n_splits=n_splits)


@interpreted
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 64), (70, 50)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_interpreted_16_bits(dtype, lengths, is_causal):
    for tiles, n_splits in (("wide", 2), ("table", 1)):
        _check(*_inputs(lengths, 32, dtype, (1,)), is_causal, tiles=TILES[tiles], n_splits=n_splits)


@interpreted
@pytest.mark.parametrize("is_causal", [False, True])
def test_interpreted_median_of_five_seeds(is_causal):
    _assert_median_of_five_seeds((60, 70), 32, F32, is_causal, (2,), "cpu")


@interpreted
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head_dim", [1, 8, 24, 64, 80, 128])
def test_interpreted_head_dims(head_dim, dtype):
    _check(*_inputs((40, 37), head_dim, dtype, (1,)), True, n_splits=2, tiles=TILES["wide"])


@interpreted
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 2)])
def test_interpreted_leading_dimensions_in_groups_of_two_heads(leading, monkeypatch):
    launch._forward.cache_clear()
    launch._backward.cache_clear()
    monkeypatch.setattr(launch, "heads_in_l2", lambda *_: 2)  # 3 heads: the last group has one
    _check(*_inputs((18, 17), 16, F32, leading), True, tiles=TILES["wide"])


@interpreted
@pytest.mark.parametrize("layout", ["rows", "columns", "slices", "shared", "five"])
@pytest.mark.parametrize("n_splits", [1, 2])
def test_interpreted_strides(layout, n_splits):
    made = _inputs((18, 17), 16, F32, (2, 3))
    if layout == "rows":  # (batch, rows, heads, head_dim), as projections give them
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    elif layout == "columns":
        made = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in made]
    elif layout == "slices":
        made = [torch.cat([x, x], -1)[..., 3:19] for x in made]
    elif layout == "shared":  # one head of keys and values for all, one number for dout
        q, k, v, dout = made
        k, v = (x[:, :1].expand(2, 3, -1, -1) for x in (k, v))
        made = [q, k, v, torch.full((), 0.5).expand(dout.shape)]
    else:  # leading dimensions that no view makes two of
        made = [x.view(1, 2, 3, *x.shape[2:]).expand(2, -1, -1, -1, -1) for x in made]
        made = [x.permute(2, 1, 0, 3, 4) for x in made]
    _check(*made, True, tiles=TILES["wide"], n_splits=n_splits)


@interpreted
def test_interpreted_outputs_have_the_layout_of_the_inputs():
    q, k, v, dout = (x.transpose(1, 2) for x in torch.randn(4, 2, 20, 3, 16))
    out, lse = flash_forward(q, k, v)
    gradients = flash_backward(q, k, v, out, lse, dout)
    assert all(x.stride() == q.stride() for x in (out, *gradients))


@interpreted
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_interpreted_large_magnitudes(dtype, is_causal):
    q, k, v, dout = _inputs((50, 60), 32, F32, (1,))
    made = [x.to(dtype) for x in (5 * q, 3 * k, 3 * v, dout)]
    _check(*made, is_causal, tiles=TILES["wide"], n_splits=2)


@interpreted
@pytest.mark.parametrize("scale", [1, 0.0, -0.7])
@pytest.mark.parametrize("is_causal", [False, True])
def test_interpreted_scales(scale, is_causal):
    _check(*_inputs((33, 40), 16, F32, (1,)), is_causal, scale, tiles=TILES["high"])


@interpreted
def test_interpreted_scores_that_are_all_far_below_zero():
    q, k, v, dout = _inputs((20, 40), 16, F32, (1,))
    q, k = q.abs() * 10, -k.abs() * 10  # exp(-lse) of what lies past the end overflows
    _check(q, k, v, dout, False, tiles=TILES["high"])
    _check(q, k, v, dout, True, tiles=TILES["wide"])


@interpreted
@pytest.mark.parametrize("is_causal", [False, True])
def test_interpreted_without_keys_out_is_zero_and_lse_minus_infinity(is_causal):
    out, lse, dq, dk, dv = _by_triton(*_inputs((5, 0), 16, F32), is_causal)
    assert torch.equal(out, torch.zeros(2, 5, 16)) and torch.equal(dq, out)
    assert torch.equal(lse, torch.full((2, 5), -math.inf))
    assert dk.shape == dv.shape == (2, 0, 16)


@interpreted
@pytest.mark.parametrize(("leading", "lengths"), [((2,), (0, 5)), ((0,), (4, 5)), ((2, 0), (4, 5))])
def test_interpreted_without_queries_or_heads(leading, lengths):
    out, lse, dq, dk, dv = _by_triton(*_inputs(lengths, 16, F32, leading), True)
    assert out.shape == dq.shape == (*leading, lengths[0], 16) and lse.shape == out.shape[:-1]
    assert torch.equal(dk, torch.zeros(*leading, 5, 16)) and torch.equal(dv, dk)


@interpreted
def test_interpreted_a_part_without_a_visible_key_weighs_nothing():
    """The first queries see no key of the second range: its part is 0 with -inf."""
    q, k, v, dout = _inputs((48, 96), 16, F32, (1,))
    _check(q, k, v, dout, True, tiles=TILES["wide"], n_splits=3)


@interpreted
def test_interpreted_a_launch_has_tensors_of_the_same_dtypes_always(monkeypatch):
    """It keeps what was compiled for the first of them: of another dtype it would write wrong bits,
    or past the end."""
    seen: dict[Launch, tuple[torch.dtype, ...]] = {}
    run = Launch.__call__

    def watched(self, *tensors):
        dtypes = tuple(x.dtype for x in tensors)
        assert seen.setdefault(self, dtypes) == dtypes
        run(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", watched)
    for precision in ("bf16x6", "tf32"):
        for dtype in (F32, BF16, F16):
            inputs = _inputs((18, 17), 16, dtype, (1,))
            _by_triton(*inputs, True, tiles=TILES["high"], n_splits=2, precision=precision)
    assert len(set(seen.values())) > 10


@interpreted
def test_interpreted_while_one_thread_compiles_only_another_launches():
    inputs = _inputs((18, 17), 16, F32, (1,))
    with compiling_only(1), ThreadPoolExecutor(1) as other:
        other.submit(_check, *inputs, True, n_splits=2, tiles=TILES["high"]).result()


@interpreted
@pytest.mark.parametrize("layout", ["dense", "rows", "columns", "spread"])
def test_interpreted_a_negative_scale_changes_no_layout(layout):
    """torch.compile is told of the outputs' strides before the scale is known."""
    q, k, v, dout = _inputs((18, 17), 32, F32, (2, 3))
    if layout == "rows":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "columns":
        q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "spread":
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
        q, k, v, dout = (x[..., ::2] for x in (q, k, v, dout))
    positive = _by_triton(-q, k, v, dout, True, 0.5, tiles=TILES["high"])
    negative = _by_triton(q, k, v, dout, True, -0.5, tiles=TILES["high"])
    assert torch.equal(negative[2], -positive[2])
    assert all(torch.equal(negative[i], positive[i]) for i in (0, 1, 3, 4))
    given_ = _by_triton(q, k, v, dout, True, 0.5, tiles=TILES["high"])
    assert [x.stride() for x in given_] == [x.stride() for x in negative]


@interpreted
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    head_dim=st.integers(1, 33),
    is_causal=st.booleans(),
    n_splits=st.integers(1, 4),
    tiles=st.sampled_from(["wide", "high"]),
    seed=st.integers(0, 100),
)
def test_interpreted_any_shape(lengths, head_dim, is_causal, n_splits, tiles, seed):
    inputs = _inputs(lengths, head_dim, F32, (1,), seed=seed)
    _check(*inputs, is_causal, tiles=TILES[tiles], n_splits=n_splits)


@interpreted
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_interpreted_autograd(leading):
    q, k, v, dout = _inputs((20, 20), 16, F32, leading)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    for is_causal in (False, True):
        out = FlashAttentionTriton.apply(q, k, v, is_causal)
        saved = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
        assert len(saved) == 1 and saved[0].dtype == F32
        exact = attention_reference(q, k, v, dout, is_causal)
        torch.testing.assert_close(saved[0].double(), exact.lse, rtol=1e-6, atol=1e-6)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        for found, known in zip(gradients, exact[2:], strict=True):
            torch.testing.assert_close(found.double(), known, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(FlashAttentionTriton.apply(q, k, v), out * 0 + _full(q, k, v))
    FlashAttentionTriton.apply(q, k, v).sum().backward()  # the gradient of a sum has no strides
    assert torch.isfinite(q.grad).all()


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, q * 0).out.float()


@interpreted
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_interpreted_computes_the_gradients_that_are_needed(wanted, monkeypatch):
    made = []
    backward = flash_backward

    def watched(*args, **kwargs):
        made.append([gradient is not None for gradient in backward(*args, **kwargs)])
        return backward(*args, **kwargs)

    monkeypatch.setattr(launch, "flash_backward", watched)
    tensors = dict(zip("qkv", _inputs((9, 9), 16, F32)[:3], strict=True))
    tensors[wanted].requires_grad_()
    FlashAttentionTriton.apply(*tensors.values()).sum().backward()
    assert made == [[True, False, False] if wanted == "q" else [False, True, True]]
    assert tensors[wanted].grad is not None


@interpreted
def test_interpreted_a_second_derivative_is_refused():
    q, dout = torch.randn(2, 4, 16).requires_grad_().unbind()
    out = FlashAttentionTriton.apply(q, q, q)
    (gradient,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---- the kernels, compiled for a GPU that need not be here ---------------------------------------


@interpreted
def test_interpreted_compiled_by_torch_it_is_an_op_without_a_break():
    *inputs, dout = _inputs((18, 17), 16, F16, (2, 3))
    leaves = [x.requires_grad_() for x in inputs]
    whole = torch.compile(FlashAttentionTriton.apply, fullgraph=True, backend="aot_eager")
    results = []
    for function in (FlashAttentionTriton.apply, whole):
        out = function(*leaves, True, 0.3)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@interpreted
@pytest.mark.parametrize("layout", ["dense", "rows", "expanded", "five"])
def test_interpreted_ops_are_what_torch_is_told_of_them(layout):
    q, k, v, dout = _inputs((6, 5), 16, F16, (2, 3))
    if layout == "rows":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "expanded":
        k, v = (x[:, :1].expand(2, 3, -1, -1) for x in (k, v))
    elif layout == "five":
        q, k, v, dout = (x.unsqueeze(1) for x in (q, k, v, dout))
    options = (True, -0.5, "bf16x6", "triton")
    torch.library.opcheck(flash_forward_op, (q, k, v, *options))
    out, lse = flash_forward(q, k, v, True, -0.5)
    wanted = [(True, True), (True, False), (False, True)]
    for needs in wanted if layout == "dense" else wanted[:1]:
        torch.library.opcheck(flash_backward_op, (q, k, v, out, lse, dout, *options, *needs))


@interpreted
def test_interpreted_selective_checkpointing_can_keep_it():
    q, k, v, _ = _inputs((9, 9), 16, F32)
    q.requires_grad_()
    launched = []

    def policy(context, op, *args, **kwargs):
        launched.append(op)
        kept = op == torch.ops.cluster_sweeps.flash_forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q):
        return FlashAttentionTriton.apply(2 * q, k, v, True).sin()

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(block, q, use_reentrant=False, context_fn=context)
    assert torch.ops.cluster_sweeps.flash_forward.default in launched
    (found,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(found, torch.autograd.grad(block(q).sum(), q)[0])


@interpreted
def test_interpreted_under_autocast_it_is_taken_in_16_bits():
    leaves = [x.requires_grad_() for x in _inputs((9, 9), 16, F32)[:3]]
    with torch.autocast("cpu", dtype=BF16):
        out = FlashAttentionTriton.apply(*leaves, True)
    assert out.dtype == BF16
    assert torch.equal(out, FlashAttentionTriton.apply(*[x.to(BF16) for x in leaves], True))
    assert all(x.dtype == F32 for x in torch.autograd.grad(out.float().sum(), leaves))


@compiled
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiled_for_hopper_nothing_spills(head_dim, name, is_causal):
    """bfloat16; `make compile-check` has all of the table."""
    pytest.importorskip("triton")
    from scripts.compile_check import SHARED_LIMIT, compile_pass

    tile = getattr(configuration(head_dim, BF16), name)
    made = compile_pass(name, head_dim, BF16, is_causal, tile)
    assert made.spilled == 0
    assert made.shared <= SHARED_LIMIT
    assert "wgmma.mma_async" in made.ptx and "mma.sync" not in made.ptx
    # Tiles of the inner loop come by 16 bytes a copy, past the registers
    assert "cp.async.cg.shared.global" in made.ptx
    # One order of additions, equal bits
    assert not re.search(r"^\s*(@\S+\s+)?(atom|red)\.", made.ptx, re.MULTILINE)


@compiled
@pytest.mark.parametrize("name", ["delta", "combine", "sum"])
def test_compiled_for_hopper_movers_spill_nothing(name):
    pytest.importorskip("triton")
    from scripts.compile_check import compile_mover

    made = compile_mover(name, 64, BF16)
    assert made.spilled == 0
    assert "ld.global.v4.b32" in made.ptx


# ---- on a GPU ------------------------------------------------------------------------------------

GPU_LENGTHS = [*LENGTHS, (239, 1), (799, 3), (128, 217), (640, 128), (1023, 1024), (1024, 1023)]


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [*GPU_LENGTHS, (4224, 4224)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_against_float64(lengths, head_dim, dtype, is_causal):
    for n_splits in (None, 1, 3):
        _check(*_inputs(lengths, head_dim, dtype, (2, 2), "cuda"), is_causal, n_splits=n_splits)


@pytest.mark.gpu
def test_gpu_one_shape_in_every_dtype():
    for dtype in (F32, BF16, F16, F32):
        _check(*_inputs((640, 512), 64, dtype, (1, 2), "cuda"), True, n_splits=3)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(113, 203), (1024, 1023), (4224, 4224)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_median_of_five_seeds(lengths, head_dim, dtype, is_causal):
    _assert_median_of_five_seeds(lengths, head_dim, dtype, is_causal, (2, 2), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("head_dim", [1, 8, 16, 24, 32, 80, 96, 127])
def test_gpu_head_dims(head_dim, dtype, is_causal):
    for lengths in ((113, 203), (1024, 1023)):
        _check(*_inputs(lengths, head_dim, dtype, (3,), "cuda"), is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gpu_large_magnitudes(dtype, is_causal):
    q, k, v, dout = _inputs((1023, 1024), 64, F32, (2, 2), "cuda")
    _check(*[x.to(dtype) for x in (5 * q, 3 * k, 3 * v, dout)], is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["rows", "columns", "sum"])
def test_gpu_strides(layout):
    made = _inputs((300, 257), 64, BF16, (2, 3), "cuda")
    if layout == "rows":
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    elif layout == "columns":
        made = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in made]
    else:
        made[3] = torch.ones((), dtype=BF16, device="cuda").expand(made[3].shape)
    _check(*made, True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("kind", "columns"), TABLE)
def test_gpu_fifty_repeats_of_every_configuration_are_bit_equal(kind, columns, is_causal):
    """A compiler's race may show in one run of many; the first of them is held to float64."""
    dtype = BF16 if kind == "16-bit" else F32
    options = {"precision": "tf32"} if kind == "tf32" else {}
    inputs = _inputs((1024, 1024), columns, dtype, (2, 4), "cuda")
    if kind != "tf32":
        _check(*inputs, is_causal)
    for n_splits in (1, 4):
        first = _by_triton(*inputs, is_causal, n_splits=n_splits, **options)
        for _ in range(50):
            again = _by_triton(*inputs, is_causal, n_splits=n_splits, **options)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_gpu_one_product_of_tf32():
    inputs = _inputs((1024, 1024), 64, F32, (2,), "cuda")
    exact = attention_reference(*inputs, True)
    out, _, *gradients = _by_triton(*inputs, True, precision="tf32")
    known = (exact.out, *exact[2:])
    for found, right in zip((out, *gradients), known, strict=True):
        error = (found - right).norm() / right.norm()
        assert 1e-6 < error < 3e-3  # tf32 rounds to 2^-11


@pytest.mark.gpu
def test_gpu_heads_past_two_to_the_31_elements():
    heads = (1 << 31) // (128 * 64) + 2
    if torch.cuda.mem_get_info()[0] < 10 * heads * 128 * 64 * 2:
        pytest.skip("needs 43 GB of GPU memory")
    q, k, v, dout = torch.empty(4, heads, 128, 64, dtype=BF16, device="cuda").normal_()
    found = _by_triton(q, k, v, dout, True)
    last = slice(heads - 2, None)
    exact = attention_reference(q[last], k[last], v[last], dout[last], True)
    for given_, known in zip(found, exact, strict=True):
        assert (given_[last] - known).norm() <= 1e-2 * known.norm()


@pytest.mark.gpu
def test_gpu_rows_past_two_to_the_31_elements():
    stride = 1 << 19
    rows = (1 << 31) // stride + 100
    if torch.cuda.mem_get_info()[0] < 3 * rows * stride * 2:
        pytest.skip("needs 14 GB of GPU memory")
    base = torch.empty(rows, stride, dtype=BF16, device="cuda")
    q, k, v, dout = (base[:, 64 * i : 64 * i + 64].normal_() for i in range(4))
    _check(q, k, v, dout, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gpu_compiled_by_torch_gives_the_same(dtype, monkeypatch):
    monkeypatch.undo()  # the compiler keeps outputs that are made NaN
    q, k, v, dout = _inputs((512, 512), 64, dtype, (1, 4), "cuda")
    results = []
    compiled_function = torch.compile(FlashAttentionTriton.apply, fullgraph=True)
    for function in (FlashAttentionTriton.apply, compiled_function):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, True)
        out.backward(dout)
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_gpu_in_a_cuda_graph():
    q, k, v, dout = _inputs((300, 257), 64, BF16, (2,), "cuda")
    _by_triton(q, k, v, dout, True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _by_triton(q, k, v, dout, True)
    fresh = _inputs((300, 257), 64, BF16, (2,), "cuda", seed=1)
    for static, new in zip((q, k, v, dout), fresh, strict=True):
        static.copy_(new)
    graph.replay()
    for found, known in zip(captured, _by_triton(*fresh, True), strict=True):
        assert torch.equal(found, known)


@pytest.mark.gpu
def test_gpu_unaligned_addresses_after_aligned_ones():
    """One shape, and so one plan, whose variants Triton compiles by alignment."""
    made = _inputs((257, 257), 64, BF16, (2,), "cuda")
    _check(*made, True)
    shifted = []
    for x in made:
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        shifted.append(room[1:].view_as(x).copy_(x))
    assert shifted[0].data_ptr() % 16
    _check(*shifted, True)
    _check(*made, True)
