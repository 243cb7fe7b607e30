"""Test that the errors of the Triton kernels stay under half of their limits over many seeds."""

from __future__ import annotations

import itertools

import pytest

from tests.systems.kernels.attention_error import NAMES, attention_shares
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    F32,
    TILES,
    by_triton,
    ignore_overflow,
    inputs,
)
from tests.systems.margins import assert_margin

pytestmark = [ignore_overflow, pytest.mark.exhaustive, pytest.mark.timeout(3600)]
CASES = list(itertools.product(((1, 1), (17, 3), (64, 33), (33, 64), (1, 40)), (1, 16, 64, 128)))


@pytest.mark.parametrize("tiles", ["wide", "high"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_flash_triton_stays_under_half_of_its_limits(dtype, tiles):
    def shares_of(seed):
        lengths, head_dim = CASES[seed % len(CASES)]
        given = inputs(lengths, head_dim, dtype, (1,), seed=seed)
        is_causal, n_splits = seed % 40 > 19, 1 + seed % 3
        found = by_triton(*given, is_causal, tiles=TILES[tiles], n_splits=n_splits)
        found = dict(zip(NAMES, found, strict=True))
        return attention_shares(found, *given, is_causal, split_float32=True)

    assert_margin(shares_of)
