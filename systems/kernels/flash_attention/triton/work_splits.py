"""Splits of a kernel's inner loop over several programs, for calls with too few programs."""

from __future__ import annotations

# Wanted number of programs, in units of the programs that run at a time. With 2, few
# multiprocessors are idle during the last wave.
WAVES = 2
# Smallest number of tiles per split. With fewer tiles, writing and adding the partial results costs
# more than the split saves.
MIN_TILES = 4
MAX_SPLITS = 32


def default_splits(n_programs: int, n_tiles: int, slots: int) -> int:
    """Return the number of programs over which to split each program's inner loop.

    The result fills the GPU WAVES times, unless a split would then have fewer than MIN_TILES tiles.

    Args:
        n_programs: number of programs without a split.
        n_tiles: number of tiles of the longest inner loop.
        slots: number of programs that run on the GPU at a time: `Tile.resident` times the number of
            multiprocessors, which is 132 on an H200.
    """
    if n_programs == 0:
        return 1
    wanted = round(WAVES * slots / n_programs)
    return max(1, min(wanted, n_tiles // MIN_TILES, MAX_SPLITS))


def split_rows(
    length: int, block: int, n_programs: int, slots: int, n_splits: int | None = None
) -> tuple[int, int]:
    """Return the number of ranges into which to split an inner loop, and the rows per range.

    A range consists of whole tiles, so there may be fewer ranges than n_splits. The last range ends
    at the last row.

    Args:
        length: rows of the inner loop.
        block: rows per tile.
        n_programs: number of programs without a split.
        slots: number of programs that run on the GPU at a time.
        n_splits: requested number of ranges; `default_splits` by default.
    """
    n_tiles = -(-length // block)
    if n_splits is None:
        n_splits = default_splits(n_programs, n_tiles, slots)
    n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)
    return n_splits, tiles_per_split * block


def split_tiles(n_tiles: int, n_splits: int) -> tuple[int, int]:
    """Return the number of ranges, at most n_splits, and the tiles per range except the last.

    Raises:
        ValueError: if n_splits is below 1.
    """
    if n_splits < 1:
        raise ValueError(f"n_splits must be 1 or more, got {n_splits}")
    tiles_per_split = -(-n_tiles // min(n_splits, n_tiles))
    return -(-n_tiles // tiles_per_split), tiles_per_split


# L2 cache used for the operands of a group of heads, in bytes. An H200 has 50 MiB; the rest is for
# data that is read once and for outputs.
L2_BYTES = 32 << 20


def heads_in_l2(n_rows: int, head_dim: int, itemsize: int, n_programs: int) -> int:
    """Return the number of heads whose keys and values, or queries and dO, fit in the L2 cache.

    Args:
        n_rows: rows of each of the two tensors.
        itemsize: bytes per element.
        n_programs: batch size times number of heads, the largest result.
    """
    head_bytes = max(1, 2 * n_rows * head_dim * itemsize)
    return max(1, min(n_programs, L2_BYTES // head_bytes))
