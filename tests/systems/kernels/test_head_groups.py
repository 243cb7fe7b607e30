"""Tests of the sizes of groups of heads that the Hopper kernels process together."""

from __future__ import annotations

import pytest

from systems.kernels.flash_attention.call import Call, PackedSizes
from systems.kernels.flash_attention.hopper.head_groups import (
    GOOD,
    MAX_BLOCKS,
    balanced_group,
    tiles_of_blocks,
    utilization,
)
from systems.kernels.flash_attention.hopper.kernel_options import kernel_options


@pytest.mark.parametrize(
    ("heads", "n", "sizes", "expected"),
    [(8, 8192, [3, 4, 8], 4), (16, 8192, [3, 4, 6, 8], 4), (16, 16384, [2, 3, 4], 2)],
)
def test_groups_leave_no_short_last_group(heads, n, sizes, expected):
    """Causal heads on 132 multiprocessors. Groups of 3 heads of 8,192 tokens were used before."""
    options = kernel_options(Call(True), (n, n), 128)
    tiles = tiles_of_blocks(options, (n, n), None, 128, 64, by_keys=True, n_heads=heads)
    assert balanced_group(tiles, heads, sizes, 132) == expected
    assert utilization(tiles, heads, expected, 132) > GOOD
    if n == 8192:
        assert utilization(tiles, heads, 3, 132) < 0.88


def test_groups_of_very_long_packed_sequences_are_found_quickly():
    """Blocks past MAX_BLOCKS are not counted, so the time does not grow with the lengths."""
    n = 1 << 30
    packed = PackedSizes(9, n, n)
    options = kernel_options(Call(True, packing=packed), (n, n), 128)
    for by_keys in (False, True):
        tiles = tiles_of_blocks(options, (n, n), packed, 128, 64, by_keys, 1)
        assert MAX_BLOCKS < len(tiles) <= 2 * MAX_BLOCKS
