"""Split the inner loop of a kernel over several programs, for calls with few programs."""

from __future__ import annotations

# Desired number of programs, divided by the number of programs that run at the same time. With 2,
# few multiprocessors are idle during the last wave.
WAVES = 2
# Smallest number of tiles per split. With fewer tiles, writing and adding the partial results costs
# more than the split saves.
MIN_TILES = 4
MAX_SPLITS = 32


def default_splits(n_programs: int, n_tiles: int, slots: int) -> int:
    """Return the number of ranges into which to split the inner loop, with one program each.

    The number is chosen so that there are about WAVES * slots programs. It is smaller if a range
    would otherwise have fewer than MIN_TILES tiles, and at most MAX_SPLITS.

    Args:
        n_programs: number of programs without a split.
        n_tiles: number of tiles of the longest inner loop.
        slots: number of programs that run on the GPU at the same time: `Tile.resident` times the
            number of multiprocessors (132 on an H200).
    """
    if n_programs == 0:
        return 1
    wanted = round(WAVES * slots / n_programs)
    return max(1, min(wanted, n_tiles // MIN_TILES, MAX_SPLITS))


def split_rows(
    length: int, block: int, n_programs: int, slots: int, n_splits: int | None = None
) -> tuple[int, int]:
    """Return the number of ranges into which to split an inner loop, and the rows per range.

    Ranges consist of whole tiles, so there may be fewer ranges than n_splits. The last range may be
    shorter than the others.

    Args:
        length: number of rows of the inner loop.
        block: number of rows per tile.
        n_programs: number of programs without a split.
        slots: number of programs that run on the GPU at the same time.
        n_splits: requested number of ranges; `default_splits` by default.
    """
    n_tiles = -(-length // block)
    if n_splits is None:
        n_splits = default_splits(n_programs, n_tiles, slots)
    n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)
    return n_splits, tiles_per_split * block


def split_tiles(n_tiles: int, n_splits: int) -> tuple[int, int]:
    """Return the number of ranges (at most n_splits) and the number of tiles per range.

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
    """Return the number of heads whose operands fit in the L2 cache.

    The operands of a head are two tensors: keys and values, or queries and dO.

    Args:
        n_rows: number of rows of each of the two tensors.
        head_dim: number of columns of each tensor.
        itemsize: bytes per element.
        n_programs: batch size times number of heads, the largest result.
    """
    head_bytes = max(1, 2 * n_rows * head_dim * itemsize)
    return max(1, min(n_programs, L2_BYTES // head_bytes))
