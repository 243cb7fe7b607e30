"""How many heads a Hopper kernel processes together, so that all multiprocessors stay busy.

The blocks of a group of heads run at about the same time, and share the L2 cache. Under a causal
mask, the longest blocks start first. If the last group has too few blocks, its longest blocks start
late, and most multiprocessors wait for them. With 8 causal heads of 8,192 tokens on 132
multiprocessors, groups of 3, 3 and 2 heads take 1.17 times as long as two groups of 4. Group sizes
are therefore chosen by a simulation of how the multiprocessors take the blocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from systems.kernels.flash_attention.call import PackedSizes
from systems.kernels.flash_attention.hopper.kernel_options import KernelOptions

# Duration of the start and the end of a block, in tiles. Of the values 0 to 3, 2 gives the best
# estimates of the forward pass for one head (see `splits.FORWARD_ITEM_TILES`). Backward uses the
# same value: the longer the blocks, the less it matters.
OVERHEAD_TILES = 2
# Duration of the additions of dK and dV of a block to sums, in tiles. For 28 heads of q on 4, 40 on
# 8 and 64 on 8, 4,096 causal tokens and one head of q a block, the simulation then gives 1.04 times
# the duration without groups. On an H100, it is 1.04 to 1.05 times (a trial).
SUM_TILES = 1.5
# Utilization from which the first group size is taken. The first sizes share the L2 cache best.
# With 0.99, backward of 256 causal heads of 1,024 tokens has groups of 52 heads instead of 20. In a
# trial on an H100 (head_dim 64), it then took 0.338 ms instead of 0.319 ms.
GOOD = 0.96
# With more blocks, the last group is a small part of all, so nothing is simulated. A simulation of
# 8,192 blocks takes 1 to 2 ms on the CPU for each group size (a trial).
MAX_BLOCKS = 1 << 13
# Mean tiles of a block, relative to the longest, above which blocks count as equally long. It is
# 0.5 under a causal mask, and about 1 without a mask or with a window.
EVEN = 0.75


def tiles_seen(
    n_rows: int, n_columns: int, block: int, tile: int, before: int, after: int
) -> list[int]:
    """Return how many tiles each block processes, at least 1.

    In the forward pass, rows are queries and columns are keys. In the backward pass, rows are keys
    and columns are the queries that see them. Row i has the columns from i - before to i + after. A
    block has `block` rows, and a tile has `tile` columns.
    """
    counts = []
    for first in range(0, n_rows, block):
        start = max(first - before, 0)
        end = min(first + block + after, n_columns)
        counts.append(max(1, -(-end // tile) - start // tile))
    return counts


def tiles_of_blocks(
    options: KernelOptions,
    lengths: tuple[int, int],
    packed: PackedSizes | None,
    block: int,
    tile: int,
    by_keys: bool,
    n_heads: int,
) -> list[int]:
    """Return how many tiles each block of a head processes, in the order of execution.

    The lengths of packed sequences are known only on the GPU. They are assumed to be evenly
    distributed, from an eighth of the longest to the longest. Their blocks are assumed to start in
    the order of decreasing length. If there are more than MAX_BLOCKS blocks of all heads, the rest
    of the sequences is left out. `lengths` are the queries and keys of a head, of all sequences if
    they are packed. With `by_keys`, blocks consist of keys and tiles of queries, else the opposite.
    """

    def of_sequence(n_queries: int, n_keys: int) -> list[int]:
        lower, upper = options.visible(n_queries, n_keys)
        if by_keys:
            return tiles_seen(n_keys, n_queries, block, tile, upper, -lower)
        return tiles_seen(n_queries, n_keys, block, tile, -lower, upper)

    if packed is None:
        tiles = of_sequence(*lengths)
        # The kernels start with the longest block only under a causal mask.
        return sorted(tiles, reverse=True) if options.constants["IS_CAUSAL"] else tiles
    tiles = []
    n_rows = lengths[by_keys]
    # No sequence is longer than all sequences together, and MAX_BLOCKS blocks are enough.
    most = [min(n, MAX_BLOCKS * block) for n in lengths]
    longest = min(packed.max_queries, most[0]), min(packed.max_keys, most[1])
    for eighths in itertools.cycle(range(8, 0, -1)):
        if n_rows <= 0 or len(tiles) * n_heads > MAX_BLOCKS:
            break
        sizes = [max(1, n * eighths // 8) for n in longest]
        tiles += of_sequence(*sizes)
        n_rows -= sizes[by_keys]
    return sorted(tiles, reverse=True)


def even_sizes(n_heads: int, least: int, most: int) -> list[int]:
    """Return the sizes of groups, ascending, that divide heads most evenly into 1, 2, ... groups.

    The sizes are from `least` to `most`. If there is none between them, the result is `least`, or
    n_heads if there are fewer heads.
    """
    sizes = [
        size
        for size in range(least, min(most, n_heads) + 1)
        if size == -(-n_heads // -(-n_heads // size))
    ]
    return sizes or [min(least, n_heads)]


def utilization(lengths: Sequence[float], n_heads: int, group: int, multiprocessors: int) -> float:
    """Return the fraction of the time in which the multiprocessors work, from 0 to 1.

    A multiprocessor that has ended a block takes the next one: the first block of all heads of a
    group, then the second one of all heads, and so on, then those of the next group. `lengths` are
    the durations of the blocks of a head, in the order of execution. The last group may have fewer
    heads than `group`.
    """
    ends = [0.0] * multiprocessors
    for first in range(0, n_heads, group):
        size = min(group, n_heads - first)
        for length in lengths:
            for _ in range(size):
                heapq.heapreplace(ends, ends[0] + length)
    return n_heads * sum(lengths) / (multiprocessors * max(ends))


def balanced_group(
    tiles: Sequence[int], n_heads: int, sizes: Sequence[int], multiprocessors: int
) -> int:
    """Return the first group size with a good utilization, or else the one with the best.

    `tiles` are those of each block of a head, in the order of execution. Preferred sizes come
    first.
    """
    if min(tiles) == max(tiles) or len(tiles) * n_heads > MAX_BLOCKS:
        return sizes[0]
    lengths = [n + OVERHEAD_TILES for n in tiles]
    found: dict[float, int] = {}
    for size in sizes:
        used = utilization(lengths, n_heads, size, multiprocessors)
        if used >= GOOD:
            return size
        found.setdefault(used, size)
    return found[max(found)]


def heads_per_item(
    q_per_kv: int, n_kv_heads: int, tiles: Sequence[int], multiprocessors: int
) -> int:
    """Return how many heads of q a work item of backward processes, a divisor of q_per_kv.

    Work items with the same keys add dK and dV to sums in memory, which takes time. But if the
    blocks of a head have different lengths, work items that process many heads of q are soon at
    different heads. Their data no longer fit together in the L2 cache: with 8 heads of q per head
    of k, 64 of q, head_dim 128 and 4,096 causal tokens, work items with all 8 take 1.33 times as
    long as those with 2 (a trial on an H100). With a single head of k and v, 2 are slower than 1.

    Of the sizes that remain, the result is the one for which a simulation of how the
    multiprocessors take the blocks ends first. `tiles` are those of each block of a head of q, in
    the order of execution, and n_kv_heads is batch * heads of k.
    """
    sizes = [2] if q_per_kv % 2 == 0 and n_kv_heads > 1 else []
    if sum(tiles) > EVEN * len(tiles) * max(tiles):
        sizes = [q_per_kv, *sizes]
    sizes = list(dict.fromkeys([*sizes, 1]))
    n_blocks = len(tiles) * n_kv_heads * q_per_kv
    if len(sizes) == 1 or n_blocks // sizes[0] > MAX_BLOCKS:
        return sizes[0]

    def duration(size: int) -> float:
        overhead = OVERHEAD_TILES + (SUM_TILES if size < q_per_kv else 0)
        lengths, n_heads = [n * size + overhead for n in tiles], n_kv_heads * q_per_kv // size
        return n_heads * sum(lengths) / utilization(lengths, n_heads, n_heads, multiprocessors)

    return min(sizes, key=duration)
