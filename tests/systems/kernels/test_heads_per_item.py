"""Tests of the number of heads of q that a work item of the Hopper backward pass processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.hopper.head_groups import heads_per_item, tiles_of_blocks
from systems.kernels.flash_attention.hopper.kernel_options import kernel_options

H100 = 132  # multiprocessors


def chosen(q_per_kv: int, kv_heads: int, n: int, is_causal: bool) -> int:
    """Return the choice for n queries and keys and blocks of 128 keys."""
    options, n_heads = kernel_options(Call(is_causal), (n, n), 128), q_per_kv * kv_heads
    tiles = tiles_of_blocks(options, (n, n), None, 128, 64, True, n_heads)
    return heads_per_item(q_per_kv, kv_heads, tiles, H100)


@given(
    st.integers(1, 12), st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 200),
)  # fmt: skip
def test_the_choice_divides_the_heads(q_per_kv, kv_heads, tiles, multiprocessors):
    assert q_per_kv % heads_per_item(q_per_kv, kv_heads, tiles, multiprocessors) == 0


@pytest.mark.parametrize(
    ("q_per_kv", "kv_heads", "n", "is_causal", "heads"),
    [
        (8, 8, 4096, False, 8),  # 256 equal blocks for 132 multiprocessors, twice
        (8, 8, 1 << 18, False, 8),  # too many blocks to simulate
        (8, 1, 4096, False, 1),  # 32 blocks with all heads, 128 with two and 256 with one
        (8, 8, 4096, True, 2),
        (8, 8, 1 << 17, True, 2),
        (3, 8, 4096, True, 1),
        (1, 64, 4096, True, 1),
        (8, 1, 4096, True, 1),
        (8, 1, 1 << 17, True, 1),
    ],
)
def test_heads_per_item(q_per_kv, kv_heads, n, is_causal, heads):
    assert chosen(q_per_kv, kv_heads, n, is_causal) == heads
