"""Formulas of attention agree with hand-computed cases."""

from __future__ import annotations

import pytest

from systems import accounting


def test_attention_flops_of_the_leaderboard_case():
    # B 1, H 16, N 16384, D 64, full: 4 N^2 D H = 4 * 2^28 * 64 * 16 = 2^40 forward, 2.5x backward
    sizes = (1, 16, 16384, 64)
    assert accounting.attention_flops("forward", *sizes, causal=False) == 2**40
    assert accounting.attention_flops("backward", *sizes, causal=False) == 5 * 2**39
    assert accounting.attention_flops("forward_backward", *sizes, causal=True) == 7 * 2**38


def test_attention_bytes_by_hand():
    # B 2, H 3, N 5, D 7: tensors of 210 elements, 420 bytes in bf16; 30 rows of 4 bytes of lse
    sizes = (2, 3, 5, 7)
    assert accounting.attention_bytes("forward", *sizes, "bf16") == 4 * 420 + 120
    assert accounting.attention_bytes("backward", *sizes, "bf16") == 8 * 420 + 120
    assert accounting.attention_bytes("forward_backward", *sizes, "fp32") == 12 * 840 + 240


@pytest.mark.parametrize("lengths", [(1, 1), (7, 4), (4, 7), (0, 3)])
@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (2, None), (3, 1), (0, 0)])
@pytest.mark.parametrize("lower_right", [False, True])
def test_visible_scores_are_those_of_the_mask(lengths, bounds, lower_right):
    (n_queries, n_keys), (left, right) = lengths, bounds
    shift = n_keys - n_queries if lower_right else 0
    counted = sum(
        (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
        for i in range(n_queries)
        for j in range(n_keys)
    )
    assert accounting.visible_scores(n_queries, n_keys, left, right, lower_right) == counted


def test_features_count_as_plain_attention_without_them():
    for phase in ("forward", "backward", "forward_backward"):
        plain = accounting.attention_flops(phase, 2, 3, 64, 16, False)
        assert accounting.scores_flops(phase, 2 * 3 * 64 * 64, 16, 16) == plain
        moved = accounting.attention_bytes(phase, 2, 3, 64, 16, "bf16")
        assert accounting.tensors_bytes(phase, 128, 128, (3, 3), (16, 16), "bf16") == moved


def test_packed_lengths_worked_by_hand():
    assert accounting.packed_lengths(1, 8) == [8]
    assert accounting.packed_lengths(3, 8) == [8, 1, 2, 4, 6, 1, 2]
    assert sum(accounting.packed_lengths(4, 8192)) == 4 * 8192
