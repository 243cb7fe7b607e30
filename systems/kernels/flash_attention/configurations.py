"""How a pass of the Triton kernels is cut into programs: tiles, warps, stages, splits, groups.

All of it is chosen from shapes and dtypes alone, here, by pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_BLOCK_D = 16  # the least that tl.dot takes
MAX_HEAD_DIM = 128
MAX_BLOCK = 128  # rows of a tile that is multiplied
MOVED = 4096  # elements to a program of the kernels that only move memory
# Offsets within a tile are 32 bits wide, and 256 * 2^23 is the first that they do not hold.
MAX_ROW_STRIDE = (1 << 31) // max(MAX_BLOCK, MOVED // MIN_BLOCK_D)
MAX_REGISTERS = 255  # of a thread, by any kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = ("fp16x3", "tf32")  # of products of float32; 16-bit products are exact


class Tile(NamedTuple):
    """What a program of one pass works on at a time.

    block_q, block_k: rows of queries and of keys; powers of two, 16 to 128.
    num_warps: 4, or 8 for the two warpgroups of 64 rows each.
    num_stages: tiles of the inner loop on their way to shared memory at once.
    resident: programs that a multiprocessor of an H100 or H200 has room for at a time, in a causal
        pass, by registers and shared memory; `make compile-check` compares.
    max_registers: of a thread, on those GPUs.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 1
    max_registers: int = MAX_REGISTERS

    def options(self, on_hopper: bool) -> dict[str, int]:
        """Of a launch."""
        if on_hopper and self.max_registers < MAX_REGISTERS:
            return {"num_warps": self.num_warps, "maxnreg": self.max_registers}
        return {"num_warps": self.num_warps}


class Configuration(NamedTuple):
    """A tile for each pass.

    dv: where dK and dV are launches of their own, for which registers do not hold both sums: the
        tile of dV's, its blocks of keys those of dkdv, which is then dK's.
    """

    forward: Tile
    dkdv: Tile
    dq: Tile
    dv: Tile | None = None


# By what is multiplied (16-bit tensors, or float32 ones in a precision) and block_d, the padded
# head dimension. fp16x3, and 64 and 128 in 16 bits: the fastest tried on an H200 that do not spill.
# The others: by what the compiler makes of them, which `make compile-check` prints.
TABLE: dict[tuple[str, int], Configuration] = {
    ("16-bit", 16): Configuration(
        Tile(128, 64, 8, 3, 2), Tile(64, 64, 4, 3, 3, 168), Tile(128, 64, 8, 3, 2)
    ),
    ("16-bit", 32): Configuration(
        Tile(128, 64, 8, 3, 2), Tile(64, 64, 4, 3, 2), Tile(128, 64, 8, 3, 2)
    ),
    ("16-bit", 64): Configuration(
        Tile(128, 64, 8, 3, 2, 128), Tile(64, 64, 4, 3, 2), Tile(128, 64, 8, 3, 2, 128)
    ),
    ("16-bit", 128): Configuration(
        Tile(128, 128, 8, 3, 1), Tile(32, 64, 4, 3, 2), Tile(128, 64, 8, 3, 1)
    ),
    ("fp16x3", 16): Configuration(
        Tile(64, 128, 4, 2, 2), Tile(64, 64, 4, 2, 2), Tile(64, 64, 4, 3, 4)
    ),
    ("fp16x3", 32): Configuration(
        Tile(64, 64, 4, 3, 4), Tile(64, 64, 4, 2, 2), Tile(64, 64, 4, 2, 3)
    ),
    ("fp16x3", 64): Configuration(
        Tile(128, 64, 8, 3, 1), Tile(32, 64, 4, 3, 2), Tile(128, 64, 8, 2, 1)
    ),
    ("fp16x3", 128): Configuration(
        Tile(128, 32, 8, 3, 1), Tile(32, 128, 8, 2, 1), Tile(128, 32, 8, 2, 1),
        dv=Tile(64, 128, 8, 1, 1),
    ),
    ("tf32", 16): Configuration(
        Tile(64, 64, 4, 2, 4, 128), Tile(32, 64, 4, 2, 4), Tile(64, 64, 4, 2, 4)
    ),
    ("tf32", 32): Configuration(
        Tile(64, 64, 4, 2, 2), Tile(32, 64, 4, 2, 4), Tile(64, 32, 4, 2, 4)
    ),
    ("tf32", 64): Configuration(
        Tile(128, 64, 8, 2, 1), Tile(32, 64, 4, 2, 2), Tile(128, 32, 8, 2, 2)
    ),
    ("tf32", 128): Configuration(
        Tile(128, 32, 8, 2, 1), Tile(16, 128, 8, 2, 1), Tile(128, 32, 8, 2, 1)
    ),
}  # fmt: skip


def block_d(head_dim: int) -> int:
    """The power of two that head_dim is padded to inside of the kernels."""
    return max(MIN_BLOCK_D, 1 << (head_dim - 1).bit_length())


def kind(dtype: torch.dtype, precision: str) -> str:
    """What is multiplied, as TABLE has it."""
    return precision if dtype == torch.float32 else "16-bit"


def configuration(head_dim: int, dtype: torch.dtype, precision: str = "fp16x3") -> Configuration:
    """What the table has for head_dim in 1 to MAX_HEAD_DIM and a dtype of DTYPES."""
    return TABLE[kind(dtype, precision), block_d(head_dim)]


# Programs for every place on a multiprocessor: the last of them leave few places idle
WAVES = 2
# A part shorter than this many tiles costs more in writing and adding it than it saves
MIN_TILES = 4
MAX_SPLITS = 32


def splits(n_programs: int, n_tiles: int, slots: int) -> int:
    """Over how many programs each program's inner loop is to be spread.

    As many as fill all places WAVES times, or fewer so that a part keeps MIN_TILES tiles.

    Args:
        n_programs: without a split.
        n_tiles: that the longest of them passes over.
        slots: programs that the GPU has room for at a time: `Tile.resident` on each of its
            multiprocessors, of which an H200 has 132.
    """
    if n_programs == 0:
        return 1
    wanted = round(WAVES * slots / n_programs)
    return max(1, min(wanted, n_tiles // MIN_TILES, MAX_SPLITS))


def ranges(
    length: int, block: int, n_programs: int, slots: int, n_splits: int | None = None
) -> tuple[int, int]:
    """How many ranges an inner loop over `length` rows is cut into, and rows of each.

    A range is whole tiles of `block` rows, so there may be fewer than n_splits, by default
    `splits`. The last has no end but that of its rows: what a causal pass does not see adds
    nothing.
    """
    n_tiles = -(-length // block)
    if n_splits is None:
        n_splits = splits(n_programs, n_tiles, slots)
    n_splits, tiles_a_split = cut(n_tiles, n_splits)
    return n_splits, tiles_a_split * block


def cut(n_tiles: int, n_splits: int) -> tuple[int, int]:
    """Into how many ranges n_tiles go, n_splits or fewer, and tiles of each but the last.

    Raises:
        ValueError: n_splits is below 1.
    """
    if n_splits < 1:
        raise ValueError(f"n_splits must be 1 or more, got {n_splits}")
    tiles_a_split = -(-n_tiles // min(n_splits, n_tiles))
    return -(-n_tiles // tiles_a_split), tiles_a_split


# Of an H200's 50 MiB of L2: the rest is for what the programs read once and write.
L2_BYTES = 32 << 20


def heads_in_l2(n_rows: int, head_dim: int, itemsize: int, n_programs: int) -> int:
    """Of how many heads the L2 cache holds keys and values, or queries and dO."""
    bytes_a_head = max(1, 2 * n_rows * head_dim * itemsize)
    return max(1, min(n_programs, L2_BYTES // bytes_a_head))
