"""The Triton hook of examples/cs336/adapters.py, called as the tests of the assignment do."""

from __future__ import annotations

import pytest
import torch

from examples.cs336.adapters import get_flashattention_autograd_function_triton
from tests.systems.kernels.attention_error import NAMES, assert_within_limits
from tests.systems.kernels.flash_cases import F32, ignore_overflow, inputs

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]


@pytest.mark.parametrize(("lengths", "is_causal"), [((128, 128), True), ((33, 50), False)])
def test_attention_in_triton(lengths: tuple[int, int], is_causal: bool) -> None:
    function = get_flashattention_autograd_function_triton()
    assert issubclass(function, torch.autograd.Function)
    q, k, v, dout = inputs(lengths, 64, F32, leading=(4,))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function.apply(*leaves, is_causal)
    (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:2]]
    out.backward(dout)
    results = (out.detach(), lse, *(leaf.grad for leaf in leaves))
    found = dict(zip(NAMES, results, strict=True))
    assert_within_limits(found, q, k, v, dout, is_causal, split_float32=True)
