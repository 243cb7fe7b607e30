"""How many programs share a block of rows on Hopper, so that few heads fill the machine: of SPLITS
the fastest by estimate. The items of work are dealt out as the kernels do it, in the order of
`tiles.schedule`, each to the multiprocessor that is free first.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

from systems.kernels.flash_attention.configurations import cut

SPLITS = (1, 2, 3, 4, 6, 8)
# Measured on an H200: a tile of keys; bytes of parts, written and read again; a kernel that adds
# them up, without these. For the forward pass of one causal head, head_dim 64 and 128, 4k to
# 32k, the estimate is off by 3% in the middle case and 11% in the worst.
FORWARD_TILE_SECONDS = 1.5e-6
PART_BYTES_A_SECOND = 1.2e12
ADD_SECONDS = 6e-6
# What an item costs a forward pass beside its tiles, as so many of them: of 0 to 3 what estimates
# one head best. (16k tokens in full heads of 1k take 1 to 2 us an item longer than their tiles do
# in heads of 16k.) Not looked for in backward.
FORWARD_ITEM_TILES = 2
# A step, by head_dim, from 2.5 and 4.7 ms for 16 causal heads of 16k on an H200
BACKWARD_STEP_SECONDS = {64: 1.3e-6, 128: 2.3e-6}
BLOCK_K, BLOCK_Q = 128, 64  # keys of an item, and queries of a step, backward


@functools.lru_cache(maxsize=1024)
def forward_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    part_bytes: int,
    multiprocessors: int,
) -> int:
    """Into how many ranges the keys of each block of queries go; 1 where the blocks fill the
    multiprocessors twice as it is.

    Args:
        n_programs: batch * heads. n_blocks: of queries, a head. n_tiles: of keys, the most that a
            block passes over; in a causal pass the others' numbers rise evenly up to it.
        part_bytes: that one split writes.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1
    tiles = [n_tiles] * n_blocks
    if is_causal:
        tiles = [-(-(block + 1) * n_tiles // n_blocks) for block in range(n_blocks)]

    def length(block: int, split: int, a_split: int) -> int:
        return FORWARD_ITEM_TILES + max(1, min(a_split, tiles[block] - split * a_split))

    return _fastest(
        length, n_blocks, n_tiles, is_causal, False, n_programs, multiprocessors,
        FORWARD_TILE_SECONDS, ADD_SECONDS, part_bytes,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def backward_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    head_dim: int,
    multiprocessors: int,
) -> int:
    """Into how many ranges the queries of each block of keys go; 1 where the blocks fill the
    multiprocessors twice as it is.

    Args:
        n_programs: batch * heads. n_blocks: of BLOCK_K keys, a head. n_tiles: of BLOCK_Q queries.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1

    def length(block: int, split: int, a_split: int) -> int:
        first = max(split * a_split, block * (BLOCK_K // BLOCK_Q) * is_causal)
        return max(1, min(n_tiles, (split + 1) * a_split) - first)

    return _fastest(
        length, n_blocks, n_tiles, is_causal, True, n_programs, multiprocessors,
        BACKWARD_STEP_SECONDS[head_dim], 2 * ADD_SECONDS,
        2 * n_programs * n_blocks * BLOCK_K * head_dim * 4,
    )  # fmt: skip


def _fastest(
    length: Callable[[int, int, int], int],
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    by_keys: bool,
    n_programs: int,
    multiprocessors: int,
    tile_seconds: float,
    add_seconds: float,
    part_bytes: int,
) -> int:
    """length: how many tiles an item is worth, by block, split and tiles of a split."""
    from systems.kernels.flash_attention.triton.tiles import schedule

    def seconds(n_splits: int) -> float:
        n_splits, a_split = cut(n_tiles, n_splits)
        free = [0] * multiprocessors
        for item in range(n_blocks * n_splits):
            # Rows are counted so that a block has n_tiles of them and a tile n_blocks.
            block, _, split = schedule.fn(
                item, n_blocks, 1, n_splits, a_split * n_blocks, 1, n_tiles, is_causal, by_keys
            )
            for _ in range(n_programs):
                heapq.heapreplace(free, free[0] + length(block, split, a_split))
        passes = max(free) * tile_seconds
        if n_splits == 1:
            return passes
        return passes + add_seconds + n_splits * part_bytes / PART_BYTES_A_SECOND

    return min((n for n in SPLITS if n <= n_tiles), key=seconds)
