"""Tests of the Hopper backward kernels with a fixed order of the additions to dQ.

On a Hopper GPU, their gradients are compared with float64, and with those of 200 other calls.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from systems.kernels.device import multiprocessors
from systems.kernels.flash_attention import flash_attention
from systems.kernels.flash_attention.call import PLAIN, Call
from systems.kernels.flash_attention.hopper.backward_launch import flash_backward
from systems.kernels.flash_attention.hopper.forward_launch import flash_forward
from tests.systems.kernels.flash_cases import (
    BF16,
    PACKED_LENGTHS,
    assert_right,
    inputs,
    on_hopper,
    packed_inputs,
)

pytestmark = [on_hopper, pytest.mark.gpu]

REPEATS = 200
BLOCK_K = 128  # keys per work item
# (call, queries, keys): work items of 132 programs and many more, ragged and whole tiles
FORMS = {
    "full": (PLAIN, 1000, 1000),
    "causal": (Call(True), 1000, 1000),
    "fewer queries": (Call(True), 300, 1111),
    "lower right": (Call(True, lower_right=True), 300, 4111),
    "more queries": (Call(True, lower_right=True), 1111, 300),
    "window": (Call(window_left=200, window_right=100), 1000, 1000),
    "left window": (Call(True, window_left=127), 1000, 1000),
    "softcap": (Call(True, softcap=5.0), 1000, 1000),
}
# (head_dim, heads of q, heads of k and v)
HEADS = [(64, 20, 20), (64, 8, 2), (128, 20, 20), (128, 8, 2), (96, 4, 2)]


def results_that_never_vary(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call, *, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk and dv. Check that the gradients are equal in every call."""
    out, lse = flash_forward(q, k, v, call)
    of = partial(flash_backward, q, k, v, out, lse, dout, call, dlse=dlse, deterministic=True)
    first = of()
    unequal = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(REPEATS):
        unequal += sum((x != y).any() for x, y in zip(of(), first, strict=True))
    assert unequal.item() == 0
    return out, lse, *first


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), HEADS)
def test_gpu_gradients_are_right_and_never_vary(outputs_hold_nan, head_dim, heads, kv_heads, form):
    call, n_queries, n_keys = FORMS[form]
    tensors = inputs((n_queries, n_keys), head_dim, BF16, (2, heads), "cuda", kv_heads=kv_heads)
    assert_right(*tensors, call, by=results_that_never_vary)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_more_blocks_in_a_head_than_multiprocessors(head_dim):
    """Work items wait for some that ran before, and must never wait for one that cannot start."""
    n = 2 * multiprocessors(0) * BLOCK_K
    for is_causal in (True, False):
        tensors = inputs((n, n), head_dim, BF16, (1, 1), "cuda")
        results_that_never_vary(*tensors, Call(is_causal))


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (4, 4)), (128, (4, 2))])
def test_gpu_packed_sequences(outputs_hold_nan, head_dim, heads):
    tensors, packing = packed_inputs(PACKED_LENGTHS, heads, head_dim, BF16, device="cuda")
    for call in (Call(True), Call(True, window_left=150, lower_right=True)):
        assert_right(*tensors, call._replace(packing=packing), by=results_that_never_vary)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_torch_asks_for_it(head_dim):
    q, k, v, dout = (
        x.requires_grad_() for x in inputs((2000, 2000), head_dim, BF16, (1, 10), "cuda")
    )
    out, lse = flash_forward(q.detach(), k.detach(), v.detach(), Call(True))
    expected = flash_backward(q, k, v, out, lse, dout, Call(True), deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        given = flash_attention(q, k, v, True, implementation="flash_hopper")
        found = torch.autograd.grad(given, (q, k, v), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
