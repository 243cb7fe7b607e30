"""Tests of the layouts of views of any shape and strides: kernels address the right elements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from systems.kernels.flash_attention.triton.layout import empty_like, four_dimensional, layout


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Draw a view (..., rows, head_dim): permuted, sliced or expanded, with sizes of 0 and 1."""
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=1, max_size=5))
    shape.append(draw(st.sampled_from([1, 2, 4])))
    order = draw(st.permutations(range(len(shape))))
    room = [shape[i] + draw(st.integers(0, 1)) for i in order]
    step = draw(st.sampled_from([1, 1, 2]))
    room[order.index(len(shape) - 1)] *= step
    base = (
        torch.arange(math.prod(room))
        .view(room)
        .permute([order.index(i) for i in range(len(shape))])
    )
    x = base[tuple(slice(0, size) for size in shape[:-1])][..., ::step][..., : shape[-1]]
    for i in range(len(shape) - 1):
        if shape[i] > 1 and draw(st.booleans()) and draw(st.booleans()):
            x = x.narrow(i, 0, 1).expand(shape)
    return x


@settings(max_examples=200)
@given(views())
def test_a_layout_addresses_the_tensors_own_elements(x):
    of = layout(x.shape, x.stride())
    assert of.n_heads == math.prod(x.shape[:-2]) and of.shape[2:] == x.shape[-2:]
    if x.numel():
        addressed = (x.contiguous() if of.is_copy else x).as_strided(of.shape, (*of.strides, 1))
        assert torch.equal(addressed, x.reshape(of.shape))


@settings(max_examples=200)
@given(views())
def test_an_output_is_dense_and_written_in_place(x):
    out = empty_like(x)
    assert out.shape == x.shape and out.dtype == x.dtype
    if x.numel():
        assert not layout(out.shape, out.stride()).is_copy
        assert out.untyped_storage().nbytes() == x.numel() * x.itemsize
        assert four_dimensional(out).data_ptr() == out.data_ptr()
    dense = x.contiguous()
    assert empty_like(dense).stride() == dense.stride() or 1 in x.shape or not x.numel()


@pytest.mark.parametrize("head_dim", [8, 16])
def test_an_output_has_the_order_of_the_dimensions_of_its_input(head_dim):
    x = torch.empty(2, 3, 20, 16).transpose(1, 2)
    assert empty_like(x, head_dim).transpose(1, 2).is_contiguous()
