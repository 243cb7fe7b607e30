"""How a pass of the Triton kernels is cut into programs: tiles, warps, stages, splits, groups.

All of it is chosen from shapes and dtypes alone, here, by pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_BLOCK_D = 16  # the least that tl.dot takes
MAX_HEAD_DIM = 128
MAX_BLOCK = 128  # rows of a tile
# Offsets within a tile are 32 bits wide, and 128 * 2^24 is the first that they do not hold.
MAX_ROW_STRIDE = (1 << 31) // MAX_BLOCK
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = ("tf32x3", "tf32", "ieee")  # of products of float32; 16-bit products are exact


class Tile(NamedTuple):
    """What a program of one pass works on at a time.

    block_q, block_k: rows of queries and of keys; powers of two, 16 to 128.
    num_warps: 4, or 8 for the two warpgroups of 64 rows each.
    num_stages: tiles of the inner loop on their way to shared memory at once.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Configuration(NamedTuple):
    """A tile for each pass."""

    forward: Tile
    dkdv: Tile
    dq: Tile


# By bytes of an element and block_d, the padded head dimension. Chosen from what the compiler makes
# of them for sm_90, not measured yet: `make compile-check` prints registers, spills, shared memory.
TABLE: dict[tuple[int, int], Configuration] = {
    (2, 16): Configuration(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    (2, 32): Configuration(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    (2, 64): Configuration(Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    (2, 128): Configuration(Tile(128, 128, 8, 2), Tile(32, 128, 8, 3), Tile(128, 64, 8, 2)),
    (4, 16): Configuration(Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (4, 32): Configuration(Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(128, 32, 8, 2)),
    (4, 64): Configuration(Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(128, 32, 8, 2)),
    # The three products of tf32 keep both halves of every operand in registers: larger tiles spill.
    (4, 128): Configuration(Tile(16, 32, 4, 2), Tile(16, 16, 4, 2), Tile(16, 32, 4, 2)),
}


def block_d(head_dim: int) -> int:
    """The power of two that head_dim is padded to inside of the kernels."""
    return max(MIN_BLOCK_D, 1 << (head_dim - 1).bit_length())


def configuration(head_dim: int, dtype: torch.dtype) -> Configuration:
    """What the table has for head_dim in 1 to MAX_HEAD_DIM and a dtype of DTYPES."""
    return TABLE[dtype.itemsize, block_d(head_dim)]


# Programs that a multiprocessor should get, so that the last of them leave few idle
WAVES = 4
# A part shorter than this many tiles costs more in writing and adding it than it saves
MIN_TILES = 4
MAX_SPLITS = 32


def splits(n_programs: int, n_tiles: int, multiprocessors: int) -> int:
    """Over how many programs each program's inner loop is to be spread.

    1 where the programs fill the multiprocessors twice as it is; else as many as give each
    multiprocessor WAVES programs, or fewer so that a part keeps MIN_TILES tiles.

    Args:
        n_programs: without a split.
        n_tiles: that the longest of them passes over.
        multiprocessors: of the GPU; an H200 has 132.
    """
    if n_programs == 0 or n_programs >= 2 * multiprocessors:
        return 1
    wanted = -(-WAVES * multiprocessors // n_programs)
    return max(1, min(wanted, n_tiles // MIN_TILES, MAX_SPLITS))


# Of an H200's 50 MiB of L2: the rest is for what the programs read once and write.
L2_BYTES = 32 << 20


def heads_in_l2(n_rows: int, head_dim: int, itemsize: int, n_programs: int) -> int:
    """Of how many heads the L2 cache holds keys and values, or queries and dO."""
    bytes_a_head = max(1, 2 * n_rows * head_dim * itemsize)
    return max(1, min(n_programs, L2_BYTES // bytes_a_head))
