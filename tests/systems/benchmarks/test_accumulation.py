"""Tests of the accumulation benchmark: sums with known rounding."""

from __future__ import annotations

import pytest

from systems.benchmarks.accumulation import Params, run


def test_a_sum_in_16_bits_stops_where_half_a_unit_is_more_than_the_term():
    ways = run(Params(terms=3000, addend=1.0))["facts"]["ways"]
    # 2048 + 1 is not a float16 number and 256 + 1 not a bfloat16 number. Both round to even, back
    # to the sum before the addition.
    results = {(way["sum"], way["term"]): float(way["result"]) for way in ways}
    assert results == {
        ("float32", "float32"): 3000.0,
        ("float16", "float16"): 2048.0,
        ("float32", "float16"): 3000.0,
        ("float32", "float16, cast to float32"): 3000.0,
        ("bfloat16", "bfloat16"): 256.0,
        ("float32", "bfloat16"): 3000.0,
    }
    errors = {way["sum"]: way["error_share"] for way in ways}
    assert errors["bfloat16"] == pytest.approx(256 / 3000 - 1)
