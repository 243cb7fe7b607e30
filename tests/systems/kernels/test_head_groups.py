"""Tests of the sizes of groups of heads that the Hopper kernels process together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from systems.kernels.flash_attention.call import Call, PackedSizes
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.hopper.head_groups import (
    GOOD,
    MAX_BLOCKS,
    balanced_group,
    even_sizes,
    tiles_of_blocks,
    utilization,
)
from systems.kernels.flash_attention.hopper.kernel_options import kernel_options
from systems.kernels.flash_attention.triton.layout import Layout, layout

SMALL = st.integers(1, 40)
BOUNDS = st.none() | st.integers(0, 50)
CALLS = st.builds(
    lambda *mask: Call(mask[0], None, *mask[1:]), st.booleans(), BOUNDS, BOUNDS, st.booleans()
)


@given(SMALL, SMALL, CALLS, st.booleans())
def test_blocks_process_the_tiles_that_they_see(n_queries, n_keys, call, by_keys):
    options = kernel_options(call, (n_queries, n_keys), 64)
    found = tiles_of_blocks(options, (n_queries, n_keys), None, 8, 4, by_keys, 1)
    mask = call.mask
    shift = n_keys - n_queries if mask.lower_right else 0

    def sees(query: int, key: int) -> bool:
        after = key - query - shift
        return (mask.right is None or after <= mask.right) and (
            mask.left is None or -after <= mask.left
        )

    rows, columns = (n_keys, n_queries) if by_keys else (n_queries, n_keys)
    expected = []
    for first in range(0, rows, 8):
        # A block may have rows past the end, which see columns as if they existed.
        seen = {
            column // 4
            for row in range(first, first + 8)
            for column in range(columns)
            if (sees(column, row) if by_keys else sees(row, column))
        }
        expected.append(max(1, len(seen)))
    # Only under a causal mask do the kernels start with the longest block.
    assert found == (sorted(expected, reverse=True) if mask.right == 0 else expected)


@given(st.lists(SMALL, min_size=1, max_size=9), SMALL, SMALL, SMALL)
def test_utilization_is_that_of_the_longest_multiprocessor(lengths, n_heads, group, n):
    ends = [0] * n
    for first in range(0, n_heads, group):
        for length in lengths:
            for _ in range(first, min(first + group, n_heads)):
                ends[ends.index(min(ends))] += length
    found = utilization(lengths, n_heads, group, n)
    assert found == pytest.approx(sum(ends) / n / max(ends))
    assert 0 < found <= 1


@given(SMALL, SMALL, SMALL)
def test_even_sizes_make_the_last_group_as_large_as_possible(n_heads, least, more):
    sizes = even_sizes(n_heads, least, least + more)
    assert sizes == sorted(set(sizes)) and sizes
    for size in sizes:
        n_groups = -(-n_heads // size)
        assert size in (least, n_heads) or size == -(-n_heads // n_groups)


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


def test_equal_blocks_and_many_blocks_need_no_simulation():
    assert balanced_group([5] * 100, 16, [3, 4], 132) == 3
    assert balanced_group(range(1, 1001), 1000, [7, 8], 132) == 7


def _dense(*shape: int) -> Layout:
    return layout(shape, torch.empty(shape, device="meta").stride())


@pytest.mark.parametrize(
    ("is_causal", "batch", "heads", "kv_heads", "n", "head_dim", "expected"),
    [
        # Without a mask: the fewest heads that give each of 132 multiprocessors a block
        (False, 16, 16, 16, 1024, 128, 18),  # 17 would leave a last group of one head
        (False, 2, 16, 16, 8192, 128, 3),
        (False, 1, 32, 8, 4096, 128, 8),  # a multiple of the heads of q per head of k
        # Causal: as many as fit in the L2 cache, if they are balanced
        (True, 2, 16, 16, 8192, 128, 8),
        (True, 8, 16, 16, 2048, 128, 32),
        (True, 16, 16, 16, 1024, 128, 32),  # not 64: keys of all would be read at the same time
    ],
)
def test_groups_of_forward(is_causal, batch, heads, kv_heads, n, head_dim, expected):
    options = kernel_options(Call(is_causal), (n, n), head_dim)
    layouts = [_dense(batch, of, n, head_dim) for of in (heads, kv_heads)]
    assert forward_launch._group(options, layouts, None, 128, 128, 132) == expected


@pytest.mark.parametrize(
    ("is_causal", "rows", "longest", "expected"),
    [
        # Keys and values of a head take 2 MiB of 32 for each 4,096 rows of all sequences.
        (True, 32_768, 8192, 2),
        (True, 32_768, 1024, 2),
        (True, 131_072, 1024, 1),
    ],
)
def test_groups_of_packed_sequences_count_the_rows_of_all(is_causal, rows, longest, expected):
    packed = PackedSizes(rows // longest, longest, longest)
    options = kernel_options(Call(is_causal, packing=packed), (rows, rows), 128)
    layouts = [_dense(1, 16, rows, 128)] * 2
    assert forward_launch._group(options, layouts, packed, 128, 128, 132) == expected


def test_groups_of_very_long_packed_sequences_are_found_quickly():
    """Blocks past MAX_BLOCKS are not counted, so the time does not grow with the lengths."""
    n = 1 << 30
    packed = PackedSizes(9, n, n)
    options = kernel_options(Call(True, packing=packed), (n, n), 128)
    for by_keys in (False, True):
        tiles = tiles_of_blocks(options, (n, n), packed, 128, 64, by_keys, 1)
        assert MAX_BLOCKS < len(tiles) <= 2 * MAX_BLOCKS


def test_packed_sequences():
    """Lengths are unknown, but the number of rows is not."""
    packed = PackedSizes(9, 512, 512)
    options = kernel_options(Call(True, packing=packed), (2048, 2048), 128)
    for by_keys in (False, True):
        tiles = tiles_of_blocks(options, (2048, 2048), packed, 128, 64, by_keys, 1)
        assert 2048 / 128 <= len(tiles) <= 2048 / 128 + 4
        assert max(tiles) == 512 // 64 and min(tiles) <= 2
