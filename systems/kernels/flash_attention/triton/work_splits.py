"""Split the inner loop of a kernel over several programs.

This is useful if a call has too few programs to fill the GPU. The inner loop goes over tiles of
keys, or over tiles of queries in the kernel for dK and dV. It is split into ranges of tiles, and a
separate program processes each range.
"""

from __future__ import annotations

# Desired number of programs, divided by the number of programs that run at the same time. With 2,
# few multiprocessors are idle during the last wave.
WAVES = 2
# Smallest number of tiles per split. With fewer tiles, writing and adding the partial results costs
# more than the split saves.
MIN_TILES = 4
MAX_SPLITS = 32


def default_splits(n_programs: int, n_tiles: int, slots: int) -> int:
    """Return the number of ranges into which the inner loop of each program should be split.

    The kernel then has about 2 * slots programs, if that needs at most 32 ranges of at least 4
    tiles. n_programs is without a split, n_tiles that of the longest inner loop, and `slots` the
    number of programs that can run on the GPU at the same time.
    """
    if n_programs == 0:
        return 1
    wanted = round(WAVES * slots / n_programs)
    return max(1, min(wanted, n_tiles // MIN_TILES, MAX_SPLITS))


def split_rows(
    length: int, block: int, n_programs: int, slots: int, n_splits: int | None = None
) -> tuple[int, int]:
    """Return the number of ranges into which an inner loop is split, and the rows per range.

    Each range consists of whole tiles, so there may be fewer than requested, and the last may be
    shorter. `default_splits` describes n_programs and `slots`, and its result is the default of
    n_splits.
    """
    n_tiles = -(-length // block)
    if n_splits is None:
        n_splits = default_splits(n_programs, n_tiles, slots)
    n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)
    return n_splits, tiles_per_split * block


def split_tiles(n_tiles: int, n_splits: int) -> tuple[int, int]:
    """Divide n_tiles >= 1 into at most n_splits ranges; return their number and tiles per range.

    The last range may have fewer tiles.

    Raises:
        ValueError: if n_splits is below 1.
    """
    if n_splits < 1:
        raise ValueError(f"n_splits must be 1 or more, got {n_splits}")
    tiles_per_split = -(-n_tiles // min(n_splits, n_tiles))
    return -(-n_tiles // tiles_per_split), tiles_per_split


# Size of the L2 cache that a group of heads may fill with operands, in bytes. The L2 cache of an
# H200 has 50 MiB; the rest is for outputs and for data that are read only once.
L2_BYTES = 32 << 20


def heads_in_l2(n_rows: int, head_dim: int, itemsize: int, n_programs: int) -> int:
    """Return the number of heads whose data fit together in the L2 cache.

    All programs of a head loop over the same two tensors: keys and values, or queries and the
    gradient of the output. The result is at least 1 and at most n_programs, the batch size times
    the number of heads.
    """
    head_bytes = max(1, 2 * n_rows * head_dim * itemsize)
    return max(1, min(n_programs, L2_BYTES // head_bytes))
