"""Choose the number of ranges into which the Hopper kernels split the keys or the queries.

With only a few heads, there may be fewer work items than multiprocessors. A split makes more and
shorter work items, so that they fill the GPU. The forward pass splits the keys, and the backward
pass splits the queries. In forward, an additional kernel then combines the partial outputs. In
backward, the work items of all ranges add to the same sums, see `backward.sums`.

If there is enough work without a split, the number is 1. Otherwise, it is the number in SPLITS with
the shortest estimated time. The estimate simulates the scheduling of the work items. The work items
start in the order of `tile_ops.schedule`, and each of them runs on the multiprocessor that is free
first.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence

from systems.kernels.flash_attention.triton.work_splits import split_tiles

SPLITS = (1, 2, 3, 4, 6, 8)  # numbers of splits to choose from
# Measured on an H200. The estimated time of the forward pass, without the host, has a median error
# of 3% and a maximum error of 12%, for one causal head with head_dim 64 or 128 and 4k to 32k
# tokens. It was not checked for the tiles of 64 keys of larger head dimensions.
FORWARD_TILE_SECONDS = 1.5e-6  # time of one tile of keys
PARTIAL_BYTES_PER_SECOND = 1.2e12  # throughput of writing and reading partial results
# Time of the kernel that combines partial outputs, without reading and writing them (6 us), and of
# the host to launch it and to allocate them (10 us). With short sequences, the host decides.
COMBINE_SECONDS = 16e-6
SUM_SECONDS = 6e-6  # time until work items have written and read sums, without their bytes
# Fixed overhead of a work item in the forward pass, in units of FORWARD_TILE_SECONDS. Of the values
# 0 to 3, this one gives the best estimates for one head. The backward estimate has no such term.
FORWARD_ITEM_TILES = 2
# Time of one step by head_dim, in seconds. Derived from the backward pass of 16 causal heads, which
# took 2.5 ms (head_dim 64) and 4.7 ms (128) with 16k tokens on an H200, and 2.8 ms (192) and
# 3.4 ms (256) with 8k tokens on an H100, both by `backward.d256`.
BACKWARD_STEP_SECONDS = {64: 1.3e-6, 128: 2.3e-6, 192: 2.8e-6, 256: 3.4e-6}
BLOCK_Q = 64  # backward pass: number of queries per step


def block_of_keys(head_dim: int) -> int:
    """Return the number of keys per work item of the backward pass.

    Those of `backward.d192` have 96. It is used only where the pass is then estimated to be faster,
    see `backward_launch.D192_STEP_TIME`.
    """
    return 128 if head_dim <= 128 else 64


def _step_seconds(head_dim: int) -> float:
    return next(time for most, time in BACKWARD_STEP_SECONDS.items() if head_dim <= most)


def fills_gpu(k_shape: Sequence[int], multiprocessors: int) -> bool:
    """Return whether backward has work for all multiprocessors without a split.

    `k_shape` is (batch, heads, n_keys, head_dim), or packed (heads, rows, head_dim).
    """
    return (
        math.prod(k_shape[:-2]) * -(-k_shape[-2] // block_of_keys(k_shape[-1])) >= multiprocessors
    )


@functools.lru_cache(maxsize=1024)
def forward_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    partial_bytes: int,
    multiprocessors: int,
) -> int:
    """Return the number of ranges into which the forward pass splits the keys.

    The result is 1 if all heads together have at least two blocks per multiprocessor. `n_programs`
    is batch * heads, and `n_blocks` the blocks of queries per head. The last one processes n_tiles
    tiles of keys. The others do too, or with a causal mask a number that is assumed to grow
    linearly with the index of the block. `partial_bytes` is the size of the partial outputs of one
    range.
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
        FORWARD_TILE_SECONDS, COMBINE_SECONDS, partial_bytes,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def backward_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    head_dim: int,
    multiprocessors: int,
    q_per_item: int = 1,
) -> int:
    """Return the number of ranges into which the backward pass splits the queries.

    The result is 1 if all heads together have at least two blocks per multiprocessor. `n_programs`
    is batch * heads of q / q_per_item, `n_blocks` the blocks of keys and `n_tiles` the tiles of 64
    queries per head. `q_per_item` are the heads of q of a work item.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1

    block_k = block_of_keys(head_dim)

    def length(block: int, split: int, per_split: int) -> int:
        first = max(split * per_split, block * (block_k // BLOCK_Q) * is_causal)
        return max(1, min(n_tiles, (split + 1) * per_split) - first)

    return _fastest(
        length, n_blocks, n_tiles, is_causal, True, n_programs, multiprocessors,
        q_per_item * _step_seconds(head_dim), SUM_SECONDS,
        2 * n_programs * n_blocks * block_k * head_dim * 4,
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
    """Return the number of splits in SPLITS with the shortest estimated time.

    `length` returns the duration of a work item, in units of tile_seconds, for (block, split, tiles
    per split). Blocks are of keys and tiles of queries if by_keys, or else the opposite.
    `add_seconds` is the time to add the partial results, without reading and writing them.
    `partial_bytes` is the size of the partial results of one split.
    """
    from systems.kernels.flash_attention.triton.tile_ops import schedule

    def seconds(n_splits: int) -> float:
        n_splits, per_split = split_tiles(n_tiles, n_splits)
        free = [0] * multiprocessors
        for item in range(n_blocks * n_splits):
            # For `schedule`, only the ratio of rows per block to rows per tile matters. With
            # n_tiles rows per block and n_blocks rows per tile, both axes have equally many rows.
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
