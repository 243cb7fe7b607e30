"""Choose the number of splits of the Hopper kernels, so that a few heads can fill the GPU.

The number is the element of SPLITS with the shortest estimated time. The estimate simulates the
scheduling of the kernels: work items start in the order of `tile_ops.schedule`, each on the first
multiprocessor that is free.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

from systems.kernels.flash_attention.triton.work_splits import split_tiles

SPLITS = (1, 2, 3, 4, 6, 8)
# Measured on an H200. For the forward pass of one causal head with head_dim 64 and 128 and 4k to
# 32k tokens, the estimated time has a median error of 3% and a maximum error of 11%.
FORWARD_TILE_SECONDS = 1.5e-6  # time of a tile of keys
PARTIAL_BYTES_PER_SECOND = 1.2e12  # throughput of writing and reading partial results
ADD_SECONDS = 6e-6  # time of a kernel that adds partial results, without reading and writing them
# Fixed overhead of a work item in the forward pass, in units of FORWARD_TILE_SECONDS: of the values
# 0 to 3, the one with the best estimates for one head. For comparison: without a mask, 16k tokens
# in heads of 1k tokens take 1 to 2 us per item more than the same number of tiles in heads of 16k
# tokens. The estimate of the backward pass has no such term.
FORWARD_ITEM_TILES = 2
# Time of a step by head_dim, derived from 2.5 ms (64) and 4.7 ms (128) for the backward pass of 16
# causal heads of 16k tokens on an H200
BACKWARD_STEP_SECONDS = {64: 1.3e-6, 128: 2.3e-6}
BLOCK_K, BLOCK_Q = 128, 64  # keys per work item and queries per step of the backward pass


@functools.lru_cache(maxsize=1024)
def forward_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    partial_bytes: int,
    multiprocessors: int,
) -> int:
    """Return the number of ranges into which to split the keys of each block of queries.

    The result is 1 if there are at least two blocks per multiprocessor.

    Args:
        n_programs: batch * heads.
        n_blocks: blocks of queries per head.
        n_tiles: tiles of keys of the longest block. With a causal mask, the number of tiles is
            assumed to grow linearly with the index of the block.
        partial_bytes: size of the partial outputs of one split.
        multiprocessors: number of multiprocessors of the GPU.
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
    """Return the number of ranges into which to split the queries of each block of keys.

    The result is 1 if there are at least two blocks per multiprocessor.

    Args:
        n_programs: batch * heads.
        n_blocks: blocks of BLOCK_K keys per head.
        n_tiles: tiles of BLOCK_Q queries per head.
        multiprocessors: number of multiprocessors of the GPU.
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
    """Return the element of SPLITS with the shortest estimated time.

    Args:
        length: function (block, split, tiles per split) that returns the length of a work item, in
            tiles.
        tile_seconds: time of a tile, in seconds.
        add_seconds: time to add partial results, without reading and writing them, in seconds.
        partial_bytes: size of the partial results of one split.
    """
    from systems.kernels.flash_attention.triton.tile_ops import schedule

    def seconds(n_splits: int) -> float:
        n_splits, per_split = split_tiles(n_tiles, n_splits)
        free = [0] * multiprocessors
        for item in range(n_blocks * n_splits):
            # `schedule` needs only the ratio of rows per block to rows per tile. Take n_tiles rows
            # per block and n_blocks rows per tile, so that both axes have the same number of rows.
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
