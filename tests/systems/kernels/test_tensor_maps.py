"""Tests of the TMA descriptors."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.tensor_maps import TensorMaps

pytest.importorskip("triton")


def test_a_dimension_of_one_has_a_stride_that_the_engine_takes():
    maps = TensorMaps(torch.float32, (1, 1, 100, 64), (7, 3, 64, 1), (1, 1, 64, 64))
    assert maps.at(1 << 20).strides == [64, 64, 64, 1]


def test_another_dtype_is_refused():
    with pytest.raises(KeyError):
        TensorMaps(torch.float64, (100, 64), (64, 1), (64, 64))
