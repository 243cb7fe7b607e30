"""How the other axis of a kernel is split where its programs alone would leave a GPU idle."""

from __future__ import annotations

WAVES = 2  # of programs: enough that the last wave leaves few multiprocessors idle
MIN_TILES = 4  # per split: with fewer, writing and adding partial results costs more than is saved
MAX_SPLITS = 32


def default_splits(n_programs: int, n_tiles: int, slots: int) -> int:
    """Return over how many programs to split each program's inner loop.

    As many as fill the GPU WAVES times, or fewer so that each keeps MIN_TILES tiles.

    Args:
        n_programs: without a split.
        n_tiles: of the longest inner loop.
        slots: programs that fit on the GPU at a time: `Tile.resident` on each of its
            multiprocessors, of which an H200 has 132.
    """
    if n_programs == 0:
        return 1
    wanted = round(WAVES * slots / n_programs)
    return max(1, min(wanted, n_tiles // MIN_TILES, MAX_SPLITS))


def split_rows(
    length: int, block: int, n_programs: int, slots: int, n_splits: int | None = None
) -> tuple[int, int]:
    """Return into how many ranges to split an inner loop over `length` rows, and rows of each.

    A range is whole tiles of `block` rows, so there may be fewer ranges than n_splits, which is
    `default_splits` by default. The last range ends with the rows, also in a causal pass: hidden
    keys add nothing.
    """
    n_tiles = -(-length // block)
    if n_splits is None:
        n_splits = default_splits(n_programs, n_tiles, slots)
    n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)
    return n_splits, tiles_per_split * block


def split_tiles(n_tiles: int, n_splits: int) -> tuple[int, int]:
    """Return the number of ranges, at most n_splits, and the tiles of each but the last.

    Raises:
        ValueError: n_splits is below 1.
    """
    if n_splits < 1:
        raise ValueError(f"n_splits must be 1 or more, got {n_splits}")
    tiles_per_split = -(-n_tiles // min(n_splits, n_tiles))
    return -(-n_tiles // tiles_per_split), tiles_per_split


# Of an H200's 50 MiB of L2; the rest is for data that is read once or written.
L2_BYTES = 32 << 20


def heads_in_l2(n_rows: int, head_dim: int, itemsize: int, n_programs: int) -> int:
    """Return for how many heads keys and values, or queries and dO, fit in the L2 cache."""
    head_bytes = max(1, 2 * n_rows * head_dim * itemsize)
    return max(1, min(n_programs, L2_BYTES // head_bytes))
