"""Choose how many programs share a block of rows on Hopper, so that few heads fill the GPU.

The fastest of SPLITS by an estimate that simulates the kernels' scheduling: work items in the order
of `tile_ops.schedule`, each on the multiprocessor that is free first.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

from systems.kernels.flash_attention.triton.work_splits import split_tiles

SPLITS = (1, 2, 3, 4, 6, 8)
# Measured on an H200: the time of a tile of keys; the throughput of writing and reading partial
# results; the time of a kernel that adds them, without that. For the forward pass of one causal
# head with head_dim 64 and 128 and 4k to 32k tokens, the estimate is off by 3% in the median and by
# 11% at most.
FORWARD_TILE_SECONDS = 1.5e-6
PARTIAL_BYTES_PER_SECOND = 1.2e12
ADD_SECONDS = 6e-6
# Overhead of an item in the forward pass, in tiles: the value of 0 to 3 with the best estimates for
# one head. (16k tokens in full heads of 1k take 1 to 2 us per item longer than their tiles do in
# heads of 16k.) Not fitted for backward.
FORWARD_ITEM_TILES = 2
# Time of a step by head_dim, from 2.5 and 4.7 ms for 16 causal heads of 16k tokens on an H200
BACKWARD_STEP_SECONDS = {64: 1.3e-6, 128: 2.3e-6}
BLOCK_K, BLOCK_Q = 128, 64  # keys of an item and queries of a step, in backward


@functools.lru_cache(maxsize=1024)
def forward_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    partial_bytes: int,
    multiprocessors: int,
) -> int:
    """Return into how many ranges to split the keys of each block of queries.

    1 if the blocks fill the multiprocessors twice without a split.

    Args:
        n_programs: batch * heads. n_blocks: blocks of queries per head. n_tiles: tiles of keys of
            the longest block; in a causal pass those of the others rise evenly up to it.
        partial_bytes: written by one split.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1
    tiles = [n_tiles] * n_blocks
    if is_causal:
        tiles = [-(-(block + 1) * n_tiles // n_blocks) for block in range(n_blocks)]

    def length(block: int, split: int, per_split: int) -> int:
        return FORWARD_ITEM_TILES + max(1, min(per_split, tiles[block] - split * per_split))

    return _fastest(
        length, n_blocks, n_tiles, is_causal, False, n_programs, multiprocessors,
        FORWARD_TILE_SECONDS, ADD_SECONDS, partial_bytes,
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
    """Return into how many ranges to split the queries of each block of keys.

    1 if the blocks fill the multiprocessors twice without a split.

    Args:
        n_programs: batch * heads. n_blocks: blocks of BLOCK_K keys per head. n_tiles: tiles of
            BLOCK_Q queries.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1

    def length(block: int, split: int, per_split: int) -> int:
        first = max(split * per_split, block * (BLOCK_K // BLOCK_Q) * is_causal)
        return max(1, min(n_tiles, (split + 1) * per_split) - first)

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
    partial_bytes: int,
) -> int:
    """Return the fastest of SPLITS.

    Args:
        length: returns the length of an item in tiles, from its block, split and tiles per split.
    """
    from systems.kernels.flash_attention.triton.tile_ops import schedule

    def seconds(n_splits: int) -> float:
        n_splits, per_split = split_tiles(n_tiles, n_splits)
        free = [0] * multiprocessors
        for item in range(n_blocks * n_splits):
            # In units of rows such that a block has n_tiles rows and a tile n_blocks.
            block, _, split = schedule.fn(
                item, n_blocks, 1, n_splits, per_split * n_blocks, 1, n_tiles, is_causal, by_keys
            )
            for _ in range(n_programs):
                heapq.heapreplace(free, free[0] + length(block, split, per_split))
        passes = max(free) * tile_seconds
        if n_splits == 1:
            return passes
        return passes + add_seconds + n_splits * partial_bytes / PARTIAL_BYTES_PER_SECOND

    return min((n for n in SPLITS if n <= n_tiles), key=seconds)
