"""flash_triton under autograd, torch.compile, selective checkpointing and autocast, interpreted.

As in test_flash_triton.py the tests run in a process of their own.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, library
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from systems.kernels.flash_attention import attention_reference, launch
from systems.kernels.flash_attention.autograd import FlashAttentionTriton
from systems.kernels.flash_attention.launch import flash_backward, flash_forward
from systems.kernels.flash_attention.ops import flash_backward_op, flash_forward_op
from tests.flash_cases import (
    BF16,
    F16,
    F32,
    inputs,
    quiet,
)
from tests.triton_interpreter import assert_interpreted_tests_pass, compiled, interpreted

pytestmark = [quiet, pytest.mark.usefixtures("outputs_hold_nan")]


@compiled
@pytest.mark.timeout(900)  # of many tests, each with the usual one
def test_they_pass_in_the_interpreter():
    assert_interpreted_tests_pass(__file__)


@interpreted
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_interpreted_autograd(leading):
    q, k, v, dout = inputs((20, 20), 16, F32, leading)
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
    tensors = dict(zip("qkv", inputs((9, 9), 16, F32)[:3], strict=True))
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


@interpreted
def test_interpreted_compiled_by_torch_it_is_an_op_without_a_break():
    *tensors, dout = inputs((18, 17), 16, F16, (2, 3))
    leaves = [x.requires_grad_() for x in tensors]
    whole = torch.compile(FlashAttentionTriton.apply, fullgraph=True, backend="aot_eager")
    results = []
    for function in (FlashAttentionTriton.apply, whole):
        out = function(*leaves, True, 0.3)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@interpreted
@pytest.mark.parametrize("layout", ["dense", "rows", "expanded", "five"])
def test_interpreted_ops_are_what_torch_is_told_of_them(layout):
    q, k, v, dout = inputs((6, 5), 16, F16, (2, 3))
    if layout == "rows":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "expanded":
        k, v = (x[:, :1].expand(2, 3, -1, -1) for x in (k, v))
    elif layout == "five":
        q, k, v, dout = (x.unsqueeze(1) for x in (q, k, v, dout))
    options = (True, -0.5, "fp16x3", "triton")
    told = library.opcheck(flash_forward_op, (q, k, v, *options))
    assert set(told.values()) == {"SUCCESS"}
    out, lse = flash_forward(q, k, v, True, -0.5)
    wanted = [(True, True), (True, False), (False, True)]
    for needs in wanted if layout == "dense" else wanted[:1]:
        told = library.opcheck(flash_backward_op, (q, k, v, out, lse, dout, *options, *needs))
        assert set(told.values()) == {"SUCCESS"}


@interpreted
def test_interpreted_selective_checkpointing_can_keep_it():
    q, k, v, _ = inputs((9, 9), 16, F32)
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
    leaves = [x.requires_grad_() for x in inputs((9, 9), 16, F32)[:3]]
    with torch.autocast("cpu", dtype=BF16):
        out = FlashAttentionTriton.apply(*leaves, True)
    assert out.dtype == BF16
    assert torch.equal(out, FlashAttentionTriton.apply(*[x.to(BF16) for x in leaves], True))
    assert all(x.dtype == F32 for x in torch.autograd.grad(out.float().sum(), leaves))
