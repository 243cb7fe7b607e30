"""Tests of grouped heads, masks, softcap, lse and packing in the API, against float64, on a CPU."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from systems.kernels.flash_attention import (
    ATTENTIONS,
    Call,
    api,
    attention_reference,
    flash_attention,
    flash_attention_packed,
    flash_pytorch,
    scaled_dot_product_attention,
    unsupported_reason,
)
from systems.kernels.flash_attention import reference as reference_module
from systems.kernels.flash_attention.arguments import make_packing
from systems.kernels.flash_attention.call import PLAIN
from tests.systems.kernels.attention_error import NAMES, attention_limits, precision_of
from tests.systems.kernels.flash_cases import F32, inputs

F64 = torch.float64
VARIANTS = {
    "lower right": Call(True, lower_right=True),
    "window": Call(window_left=3, window_right=2),
    "window lower right": Call(window_left=3, window_right=2, lower_right=True),
    "left window": Call(True, window_left=2),
    "softcap": Call(softcap=0.7),
    "all": Call(True, 0.3, 4, 6, True, 2.0),
}


assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block_bytes", [1, 1 << 29])  # one row per block, or all rows in one
def test_the_reference_is_attention_by_its_definition(block_bytes, monkeypatch):
    """Random cases compare what the limits of errors call exact with autograd, in `naive`."""
    monkeypatch.setattr(reference_module, "BLOCK_BYTES", block_bytes)
    for call, lengths in product((PLAIN, *VARIANTS.values()), ((9, 14), (14, 9))):
        given = inputs(lengths, 8, F64, (4,), kv_heads=2)
        exact = attention_limits(given, call, precision_of(F64)).exact
        for name, found in zip(NAMES, attention_reference(*given, call), strict=True):
            assert_close(found, exact[name])


def test_scores_beyond_the_range_of_float16():
    q = torch.full((4, 64), 40.0, dtype=torch.float16)  # q k^T is 102,400
    assert flash_attention(q, q, q, window=(1, 1)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["auto", "naive", "sdpa", "flash_pytorch"])
def test_compiled_as_a_whole(implementation, monkeypatch):
    """One tensor is q, k and v. `flash_pytorch` has several tiles."""
    monkeypatch.setattr(flash_pytorch, "QUERY_TILE", 4)
    monkeypatch.setattr(flash_pytorch, "KEY_TILE", 3)
    torch._dynamo.reset()  # functions of other tests count as recompilations of this one

    def attend(x: Tensor, scale: float) -> Tensor:
        return flash_attention(x, x, x, True, scale, implementation)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for leading, scale in (((2,), 0.3), ((2,), 0.4), ((2,), 0.5), ((), 0.3), ((2, 1, 3), 0.3)):
        x = inputs((9, 9), 8, F64, leading)[0].requires_grad_()
        found, expected = compiled(x, scale), attend(x, scale)
        assert_close(found, expected)
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
        assert_close(*gradients)


def test_numbers_of_other_libraries_are_numbers():
    q, k, v, _ = inputs((9, 9), 8, F64, (2,))
    found = flash_attention(
        q, k, v, scale=np.float32(0.5), window=[np.int64(2), 10**30], softcap=Fraction(1, 2)
    )
    assert_close(found, flash_attention(q, k, v, scale=0.5, window=(2, None), softcap=0.5))


def test_every_error_is_named_at_once():
    q, k, v, _ = inputs((5, 6), 8, F64, (2, 3))
    with pytest.raises(ValueError) as error:
        flash_attention(
            q, k[:, :2].float(), v.to("meta"), torch.ones(5, 6), math.nan, "flash_pytroch",
            window=(-1, 2), alignment="right", softcap=0.0, layout="shd", return_lse=1,
        )  # fmt: skip
    for part in (
        "did you mean 'flash_pytorch'?", "k (2, 2, 6, 8)", "torch.float64, torch.float32", "meta",
        "is_causal must be True or False", "scale must be a finite number",
        "(-1, 2)", "softcap", "upper_left, lower_right, got 'right'", "'shd'", "got 1",
    ):  # fmt: skip
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("starts", "sizes", "message"),
    [
        ([0, 5, 13], (), "int64"),
        ([[0, 13]], (), r"shape \(1, 2\)"),
        ([0, 5, 12], (), "rows, 13"),
        ([0, 9, 5, 13], (), "without decreasing"),
        ([0, 2**31 - 1, -5, 13], (), "without decreasing"),
        ([1, 13], (), "from 0"),
        ([0, 5], (13,), "rows, 13"),
        ([0, 5, 13], (8, 7), "max_seqlen_k must be at least .* 8, got 7"),
    ],
)
def test_wrong_boundaries(starts, sizes, message):
    q, k, v, _ = (x.transpose(0, 1) for x in inputs((13, 13), 8, F64, (2,)))
    starts = torch.tensor(starts, dtype=torch.int64 if message == "int64" else torch.int32)
    with pytest.raises(ValueError, match=message):
        flash_attention_packed(q, k, v, starts, None, *sizes)


def test_a_packed_length_is_at_most_the_number_of_rows():
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    packing = make_packing(8, 8, starts, starts, 2**31 - 1, 5)
    assert packing[2:] == (8, 5)  # a program is launched for each block of this length


def test_masks_that_are_causal_by_another_name():
    q, k, v, _ = inputs((9, 9), 8, F64, (2,))
    expected = flash_attention(q, k, v, True)
    for call in ({"window": (None, 0)}, {"window": (None, 7), "is_causal": True}):
        assert_close(flash_attention(q, k, v, implementation="sdpa", **call), expected)


def test_packed_self_attention_is_aligned_as_flash_attn_4_has_it(monkeypatch):
    """It has only the lower-right alignment, which is here the same as the upper-left one."""
    calls = []
    watched = ATTENTIONS["naive"]._replace(attend=lambda *given: calls.append(given[3]) or given[0])
    monkeypatch.setitem(ATTENTIONS, "naive", watched)
    q, starts = torch.randn(8, 2, 64), torch.tensor([0, 4, 8], dtype=torch.int32)
    flash_attention_packed(q, q, q, starts, is_causal=True, implementation="naive")
    assert calls[0].lower_right


def test_shapes_in_messages_are_those_of_the_caller():
    q, k, v, _ = inputs((6, 3), 8, F64, (2, 4))
    with pytest.raises(ValueError, match=r"n_queries, heads, .* k \(2, 4, 3, 8\)"):
        flash_attention(q, k, v[:1], layout="bshd")
    with pytest.raises(ValueError, match=r"packed q must be \(rows .* got q \(2, 4, 6, 8\)"):
        flash_attention_packed(q, k, v, torch.tensor([0, 6], dtype=torch.int32))


@pytest.mark.parametrize("function", [flash_attention, flash_attention_packed])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_tensor_is_named_by_its_type(function):
    nested = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (3, 5)])
    message = "q must be a tensor, got a value of type ndarray; v must not be a nested"
    with pytest.raises(ValueError, match=message):
        function(np.zeros((2, 50, 8)), torch.randn(2, 3, 4), nested, torch.tensor([0, 3]))


class TestDropIn:
    @pytest.mark.filterwarnings("ignore:scaled_dot_product_attention uses torch's")
    def test_is_torchs_function(self):
        for call in (
            {}, {"is_causal": True, "scale": 0.3}, {"enable_gqa": True},
            {"attn_mask": torch.ones(9, 14, dtype=torch.bool).tril()},
        ):  # fmt: skip
            kv_heads = 2 if "enable_gqa" in call else 4
            q, k, v, _ = inputs((9, 14), 8, F64, (2, 4), kv_heads=kv_heads)
            expected = functional.scaled_dot_product_attention(q, k, v, **call)
            assert_close(scaled_dot_product_attention(q, k, v, **call), expected)

    def test_says_once_that_it_falls_back(self, monkeypatch):
        monkeypatch.setattr(api, "_warned", set())
        q, k, v, _ = inputs((5, 5), 8, F64)
        with pytest.warns(UserWarning, match="uses torch's implementation: dropout_p is not 0"):
            scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            scaled_dot_product_attention(q, k, v, is_causal=True)

    @pytest.mark.filterwarnings("ignore:scaled_dot_product_attention uses torch's")
    def test_takes_what_torch_takes(self):
        x = inputs((5, 5), 8, F64, (2, 4))[0]
        ours, torchs = scaled_dot_product_attention, functional.scaled_dot_product_attention
        assert_close(torch.vmap(ours)(x, x, x), torchs(x, x, x))
        gradient = torch.func.grad(lambda a: ours(a, a, a).sum())(x)
        assert_close(gradient, torch.func.grad(lambda a: torchs(a, a, a).sum())(x))
        scale = torch.tensor(0.3)
        assert_close(ours(x, x, x, scale=scale), torchs(x, x, x, scale=scale))
        rows = [torch.randn(n, 4, 8) for n in (3, 5)]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        assert_close(ours(*[jagged] * 3).values(), torchs(*[jagged] * 3).values())

    @pytest.mark.filterwarnings("ignore:scaled_dot_product_attention uses torch's")
    def test_fewer_heads_of_k_need_enable_gqa(self):
        q, k, v, _ = inputs((5, 5), 8, F64, (2, 4), kv_heads=2)
        with pytest.raises(RuntimeError, match="size of tensor"):
            scaled_dot_product_attention(q, k, v)

    def test_it_needs_no_fallback_under_autocast(self):
        """Autocast gives all of them one dtype, also keys in float32 after RoPE."""
        q, k, v, _ = inputs((5, 5), 8, F32, (2, 4))
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")
            out = scaled_dot_product_attention(q, k, v.bfloat16(), is_causal=True)
        assert out.dtype == torch.bfloat16


def _windowed(q: Tensor) -> Tensor:
    unsupported_reason(q, q, q, "flash_hopper")
    return flash_attention(q, q, q, True, window=(2, 0), return_lse=True)[0]


@pytest.mark.parametrize("function", [_windowed, lambda q: scaled_dot_product_attention(q, q, q)])
def test_compiled_as_a_whole_without_a_warning(function):
    """torch.compile warns if it traces a call of a function with lru_cache."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    q = inputs((5, 6), 8, F64)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(compiled(q), function(q))
