"""Tests of the weighted sum kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.weighted_sum import autograd as autograd_module
from systems.kernels.weighted_sum import weighted_sum
from tests.systems.kernels.weighted_sum_cases import (
    F32,
    LAYOUTS,
    SHAPES,
    SUM,
    assert_against_float64,
    randn,
)


@pytest.mark.parametrize("dtype", SUM)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype):
    assert_against_float64(shape, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    assert_against_float64((3, 4, 33), F32, layout)


def test_many_tiles_a_program(monkeypatch):
    monkeypatch.setattr(autograd_module, "TILE", 64)
    monkeypatch.setattr(autograd_module, "MAX_COLUMNS", 16)
    monkeypatch.setattr(autograd_module, "MAX_PROGRAMS", 3)
    assert_against_float64((50, 41), F32)  # 13 tiles of rows over 3 programs, 3 tiles of columns


@pytest.mark.parametrize("only", [0, 1])
def test_what_needs_no_gradient_gets_none(only):
    leaves = x, w = randn((20, 6), 0, F32, "cpu"), randn((6,), 1, F32, "cpu")
    leaves[only].requires_grad_()
    weighted_sum(x, w).sum().backward()
    assert leaves[1 - only].grad is None
    torch.testing.assert_close(leaves[only].grad, (w.expand(20, 6), x.sum(0))[only])
