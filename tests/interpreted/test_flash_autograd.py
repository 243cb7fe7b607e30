"""Tests of flash_triton under autograd, torch.compile, selective checkpointing and autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import library
from torch.utils.checkpoint import checkpoint

from systems import checkpointing
from systems.kernels import kernel_launch
from systems.kernels.flash_attention import autograd, flash_attention
from systems.kernels.flash_attention.autograd import (
    FlashAttentionTriton,
    flash_backward_op,
    flash_forward_op,
    operator_arguments,
)
from systems.kernels.flash_attention.call import Call, Packing
from systems.kernels.flash_attention.triton import launch
from systems.kernels.flash_attention.triton.launch import flash_backward, flash_forward
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    F32,
    assert_right,
    by_function,
    ignore_overflow,
    inputs,
    packed_inputs,
)
from tests.systems.kernels.random_cases import laid_out
from tests.systems.kernels.selection import slow

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]


def test_a_faulty_triton_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(kernel_launch, "TRITON_FAULT", "triton 3.7.0 was replaced")
    q, k, v, _ = inputs((19, 21), 16, F32, (2,))  # a shape without a cached plan
    with pytest.raises(RuntimeError, match=r"triton 3\.7\.0 was replaced"):
        flash_attention(q, k, v, implementation="flash_triton")


def test_is_causal_is_enough_and_one_log_sum_exp_is_saved():
    """As the tests of CS336, assignment 2, call it."""
    by = partial(by_function, function=FlashAttentionTriton)
    for is_causal in (True, False):
        assert_right(*inputs((33, 50), 16, F32, (2,)), Call(is_causal), by=by)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_computes_the_gradients_that_are_needed(wanted, monkeypatch):
    made = []

    def watched(*args, **kwargs):
        gradients = flash_backward(*args, **kwargs)
        made.append([gradient is not None for gradient in gradients])
        return gradients

    monkeypatch.setattr(launch, "flash_backward", watched)
    tensors = dict(zip("qkv", inputs((9, 9), 16, F32)[:3], strict=True))
    tensors[wanted].requires_grad_()
    FlashAttentionTriton.apply(*tensors.values()).sum().backward()
    assert made == [[True, False, False] if wanted == "q" else [False, True, True]]
    assert tensors[wanted].grad is not None


def test_a_second_derivative_is_refused():
    q, dout = torch.randn(2, 4, 16).requires_grad_().unbind()
    out = FlashAttentionTriton.apply(q, q, q)
    (gradient,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_one_graph_serves_all_windows():
    q = inputs((18, 18), 16, F16)[0]
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def attend(q, left):
        return FlashAttentionTriton.apply(q, q.clone(), q.clone(), Call(True, window_left=left))

    whole = torch.compile(attend, fullgraph=True, backend=count)
    for left in range(3, 9):
        whole(q, left)
    assert len(graphs) <= 2  # the first is for one value


FEATURES = Call(True, 0.3, window_left=7, lower_right=True, softcap=3.0)


@pytest.mark.parametrize(
    "case", ["rows", *map(slow, ("dense", "expanded", "five dimensions", "every feature"))]
)
def test_ops_are_what_torch_is_told_of_them(case):
    q, k, v, dout = inputs((6, 5), 16, F16, (2, 2))
    call = Call(True, -0.5)
    if case in ("rows", "expanded"):
        q, k, v = (laid_out(x, case) for x in (q, k, v))
    elif case == "five dimensions":
        q, k, v, dout = (x.unsqueeze(1) for x in (q, k, v, dout))
    elif case == "every feature":
        (q, k, v, dout), packing = packed_inputs([(6, 5), (3, 4)], (4, 2), 16, F16, 8)
        call = FEATURES._replace(packing=packing)
    options = operator_arguments(call)
    results = library.opcheck(flash_forward_op, (q, k, v, False, *options))
    assert set(results.values()) == {"SUCCESS"}
    out, lse = flash_forward(q, k, v, call)
    dlse = lse if case == "every feature" else None
    wanted = [(True, True), (True, False), (False, True)]
    for needs in wanted if case == "dense" else wanted[:1]:
        tensors = q, k, v, out, lse, dout, dlse
        results = library.opcheck(flash_backward_op, (*tensors, False, *needs, *options))
        assert set(results.values()) == {"SUCCESS"}


def _packed(q, k, v, starts):
    call = FEATURES._replace(packing=Packing(starts, starts, 20, 20), return_lse=True)
    return FlashAttentionTriton.apply(q, k, v, call)


CHANGED = {
    "compiled": torch.compile(_packed, fullgraph=True, backend="aot_eager"),
    "checkpointed": partial(checkpoint, _packed, use_reentrant=False),
}


@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("way", CHANGED)
def test_every_feature_in_a_function_that_torch_changes(way):
    (q, k, v, dout), packing = packed_inputs([(17, 17), (20, 20)], (4, 2), 16, F16, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for function in (_packed, CHANGED[way]):
        out, lse = function(*leaves, packing.starts_q)
        gradients = torch.autograd.grad((out, lse), leaves, (dout, lse.detach()))
        results.append([out, lse, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_selective_checkpointing_keeps_it(monkeypatch):
    q, k, v, _ = inputs((9, 9), 16, F32)
    q.requires_grad_()
    launched, forward = [], autograd._run_forward

    def counted(*args, **kwargs):
        launched.append(args[0])
        return forward(*args, **kwargs)

    def block(q):
        return FlashAttentionTriton.apply(2 * q, k, v, True).sin()

    (known,) = torch.autograd.grad(block(q).sum(), q)
    monkeypatch.setattr(autograd, "_run_forward", counted)
    (found,) = torch.autograd.grad(checkpointing.selective()([block], q).sum(), q)
    assert torch.equal(found, known) and len(launched) == 1
    (found,) = torch.autograd.grad(checkpointing.every_k_blocks(1)([block], q).sum(), q)
    assert torch.equal(found, known) and len(launched) == 3


def test_under_autocast_it_is_taken_in_16_bits():
    leaves = [x.requires_grad_() for x in inputs((9, 9), 16, F32)[:3]]
    with torch.autocast("cpu", dtype=BF16):
        out = FlashAttentionTriton.apply(*leaves, True)
    assert out.dtype == BF16
    assert torch.equal(out, FlashAttentionTriton.apply(*[x.to(BF16) for x in leaves], True))
    assert all(x.dtype == F32 for x in torch.autograd.grad(out.float().sum(), leaves))
