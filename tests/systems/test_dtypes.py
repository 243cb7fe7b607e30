"""Sizes of dtypes in torch and in systems.accounting agree."""

from __future__ import annotations

from systems.accounting import DTYPE_BYTES, MATMUL_DTYPE
from systems.dtypes import TORCH_DTYPES


def test_torch_and_accounting_give_a_dtype_the_same_size():
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == DTYPE_BYTES
    assert set(MATMUL_DTYPE.values()) == set(DTYPE_BYTES)
