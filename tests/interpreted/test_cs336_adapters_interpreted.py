"""The Triton hook of examples/cs336/adapters.py, called as the tests of the assignment do."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from examples.cs336.adapters import get_flashattention_autograd_function_triton
from systems.kernels.flash_attention.call import Call
from tests.systems.kernels.flash_cases import (
    F32,
    assert_right,
    by_function,
    ignore_overflow,
    inputs,
)

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]


@pytest.mark.parametrize(("lengths", "is_causal"), [((128, 128), True), ((33, 50), False)])
def test_attention_in_triton(lengths: tuple[int, int], is_causal: bool) -> None:
    function = get_flashattention_autograd_function_triton()
    assert issubclass(function, torch.autograd.Function)
    by = partial(by_function, function=function)
    assert_right(*inputs(lengths, 64, F32, (4,)), Call(is_causal), by=by)
