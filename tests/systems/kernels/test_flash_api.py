"""Tests of flash_attention: all implementations, leading dimensions and errors."""

from __future__ import annotations

import inspect
import math
import sys
from functools import partial
from pathlib import Path

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
    unsupported_reason,
)
from systems.kernels.flash_attention.peers import sdpa
from tests.systems.kernels.flash_cases import BF16, F32, inputs
from tests.systems.kernels.random_cases import laid_out
from tests.systems.training.tiny_training import no_gpu

F64 = torch.float64
PROBE = [torch.empty(1, 1, 2, 2)] * 3
ON_CPU = ["auto", *(name for name in ATTENTIONS if unsupported_reason(*PROBE, name) is None)]
# (queries, keys) and leading dimensions, the last three without elements
SHAPES = [
    ((1, 1), (2, 3)), ((17, 17), (2, 3)), ((9, 33), (2, 3)), ((33, 9), (2, 3)),
    ((5, 0), (2, 3)), ((0, 5), (2,)), ((5, 6), (0,)),
]  # fmt: skip
# Largest relative L2 error. It allows for `naive`, which rounds the scores to the inputs' dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SHIFTED = partial(laid_out, strides="shifted")


def _assert_right(implementation, q, k, v, dout, causal, scale=None) -> None:
    exact = attention_reference(q, k, v, dout, Call(causal, scale))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flash_attention(*leaves, causal, scale, implementation)
    assert out.shape == dout.shape and out.dtype == q.dtype
    gradients = torch.autograd.grad(out, leaves, dout)
    whole = dout.double().norm()
    for name, given in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        known = getattr(exact, name)
        assert given.shape == known.shape and given.isfinite().all()
        # If a query sees one key only, dq and dk are 0: compare the rounding errors with dout.
        size = known.norm() if known.norm() > 1e-9 * whole else whole
        assert (given.double() - known).norm() <= TOLERANCE[q.dtype] * size, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("lengths", "leading"), SHAPES)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_every_implementation_is_the_same_function(implementation, lengths, leading, causal):
    for scale in (None, 0.3, -0.5):
        _assert_right(implementation, *inputs(lengths, 8, F64, leading), causal, scale=scale)


@no_gpu
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_auto_is_fused_whatever_the_leading_dimensions(leading):
    q, k, v, _ = inputs((9, 7), 8, F32, leading)
    with torch.profiler.profile() as profile:
        flash_attention(q, k, v, True)
    seen = {operator.key for operator in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in seen


def test_auto_chooses_on_a_hopper_gpu_what_the_documentation_says(capsys):
    pytest.importorskip("triton")
    from scripts import attention_choice

    attention_choice.main()
    page = Path(__file__).parents[3] / "docs" / "attention.md"
    assert capsys.readouterr().out in page.read_text()


@pytest.mark.parametrize(
    ("valid", "invalid"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"scale": 0.3}, {"scale": "0.3"}),
        ({}, {"scale": math.inf}),
        ({}, {"scale": torch.ones((), requires_grad=True)}),  # its gradient would be lost silently
        ({"implementation": "naive"}, {"implementation": ["naive"]}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({}, {"window": [None]}),
    ],
)
def test_invalid_options_are_refused_also_after_equal_valid_ones(valid, invalid):
    q, k, v, _ = inputs((4, 4), 8, F64)
    flash_attention(q, k, v, **valid)
    with pytest.raises(ValueError, match=f"{next(iter(invalid))} must be"):
        flash_attention(q, k, v, **invalid)


def test_a_mask_first_asked_for_without_autograd_is_one_for_autograd_too():
    from systems.kernels.flash_attention.peers.flex import _causal_mask

    with torch.inference_mode():
        mask = _causal_mask(131, 130, torch.device("cpu"))
    assert not mask.kv_num_blocks.is_inference()


@pytest.mark.parametrize(
    "shapes",
    [
        [(8,), (8,), (8,)],
        [(5, 8), (6, 4), (6, 4)],
        [(5, 8), (6, 8), (7, 8)],
        [(2, 5, 8), (6, 8), (6, 8)],
        [(5, 8), (8,), (8,)],
        [(2, 4, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)],  # 3 heads do not divide 4
        [(2, 4, 5, 8), (2, 8, 6, 8), (2, 8, 6, 8)],
    ],
)
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match="q must be"):
        flash_attention(*(torch.ones(shape) for shape in shapes))


def test_no_columns_and_integers_are_refused():
    empty, integers = torch.ones(5, 0), torch.ones(2, 5, 8, dtype=torch.int64)
    for x, word in ((empty, "head_dim"), (integers, "int64")):
        with pytest.raises(ValueError, match=word):
            flash_attention(x, x, x)


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        pytest.param("flash_triton", {}, "needs a CUDA GPU", marks=no_gpu),
        pytest.param("sdpa_cudnn", {}, "needs a CUDA GPU", marks=no_gpu),
        ("sdpa", {"window": (1, 1)}, "does not support windows"),
        ("sdpa", {"softcap": 1.0}, "does not support softcap"),
        ("sdpa", {"return_lse": True}, "does not support log-sum-exp"),
        ("sdpa", {"is_causal": True, "alignment": "lower_right"}, "does not support lower-right"),
    ],
)
def test_what_an_implementation_lacks_is_told_with_those_that_have_it(name, call, message):
    q, k, v, _ = inputs((5, 6), 8, F32, (2, 3))
    others = "implementations that support these inputs: auto, naive"
    with pytest.raises(RuntimeError, match=f"{name} {message}.*; {others}"):
        flash_attention(q, k, v, implementation=name, **call)


def _odd(x: Tensor) -> Tensor:
    """Return a copy whose row stride is one more than its head_dim."""
    return torch.cat((x, x[..., :1]), -1)[..., :-1]


@pytest.mark.parametrize("view", [torch.clone, SHIFTED, _odd])
def test_torchs_kernels_on_a_gpu_get_aligned_tensors(view, monkeypatch):
    attention, seen = functional.scaled_dot_product_attention, []

    def watched(*tensors, **_):
        seen.extend(tensors)
        out = attention(*tensors, is_causal=True)
        out.grad_fn.register_prehook(lambda gradients: seen.extend(gradients))
        return out

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", watched)
    *leaves, dout = (view(x) for x in inputs((9, 9), 8, BF16, (2, 3)))
    with monkeypatch.context() as gpu:
        gpu.setattr(Tensor, "is_cuda", True)
        out = sdpa.sdpa(*[x.requires_grad_() for x in leaves], Call(True))
    gradients = torch.autograd.grad(out, leaves, dout)
    assert len(seen) == 4
    for x in seen:
        places = x.data_ptr(), *(2 * stride for stride in x.stride()[:-1])
        assert all(place % 16 == 0 for place in places)
    if view is torch.clone:  # no copies
        assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (*leaves, dout)]
    known = attention(*leaves, is_causal=True)
    assert torch.equal(out, known)
    for a, b in zip(gradients, torch.autograd.grad(known, leaves, dout), strict=True):
        assert torch.equal(a, b)


def test_no_cache_grows_with_the_number_of_shapes(monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith("systems.kernels.flash_attention.")
    ]:
        for cached in vars(sys.modules[name]).values():
            if hasattr(cached, "cache_info"):
                limit = cached.cache_parameters()["maxsize"]
                # Those without a limit depend on the machine alone.
                assert limit is None or limit <= 1536, cached
                assert limit or set(inspect.signature(cached).parameters) <= {"index"}, cached
    monkeypatch.setattr(api, "_chosen", {})
    monkeypatch.setattr(api, "MAX_PLANS", 3)
    for n in range(1, 6):
        flash_attention(*inputs((n, n), 8, F64)[:3])
    assert len(api._chosen) == 3


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("implementation", ["auto", *ATTENTIONS])
def test_gpu_every_implementation_is_the_same_function(implementation, leading, causal):
    given = inputs((64, 64), 8, BF16, leading, "cuda")
    probe = [torch.empty(1, 1, 64, 8, dtype=torch.bfloat16, device="cuda")] * 3
    if implementation != "auto" and unsupported_reason(*probe, implementation, Call(causal)):
        pytest.skip(f"{implementation} does not support these inputs")
    _assert_right(implementation, *given, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("view", [SHIFTED, _odd])
@pytest.mark.parametrize("implementation", ["auto", *ATTENTIONS])
def test_gpu_inputs_and_gradients_of_any_alignment(implementation, view):
    given = [view(x) for x in inputs((200, 200), 64, BF16, (2, 3), "cuda")]
    if implementation != "auto" and unsupported_reason(*given[:3], implementation, Call(True)):
        pytest.skip(f"{implementation} does not support these inputs")
    _assert_right(implementation, *given, True)
