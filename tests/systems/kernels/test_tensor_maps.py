"""Tests of the TMA descriptors that are cached by address."""

from __future__ import annotations

import pytest
import torch

from systems.kernels import tensor_maps
from systems.kernels.tensor_maps import TensorMaps

pytest.importorskip("triton")


def test_an_address_has_one_map_as_long_as_it_is_kept(monkeypatch):
    monkeypatch.setattr(tensor_maps, "MAX_ADDRESSES", 2)
    maps = TensorMaps(torch.bfloat16, (2, 3, 100, 64), (19200, 6400, 64, 1), (1, 1, 64, 64))
    first = maps.at(1 << 20)
    assert maps.at(1 << 20) is first and maps.at(1 << 21) is not first
    assert maps.at(1 << 20) is first
    maps.at(1 << 22)  # the third address exceeds MAX_ADDRESSES, which clears the cache
    assert maps.at(1 << 20) is not first
    assert maps.at(1 << 20).descriptor.base.data_ptr() == 1 << 20


def test_a_dimension_of_one_has_a_stride_that_the_engine_takes():
    maps = TensorMaps(torch.float32, (1, 1, 100, 64), (7, 3, 64, 1), (1, 1, 64, 64))
    assert maps.at(1 << 20).descriptor.strides == [64, 64, 64, 1]


def test_another_dtype_is_refused():
    with pytest.raises(KeyError):
        TensorMaps(torch.float64, (100, 64), (64, 1), (64, 64))
