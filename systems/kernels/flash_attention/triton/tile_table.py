"""Choose how the passes are divided into programs: tiles, warps, stages, splits, groups of heads.

Pure functions of shapes and dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_BLOCK_D = 16  # the smallest that tl.dot takes
MAX_HEAD_DIM = 128
MAX_BLOCK = 128  # rows of a matmul's tile
MEMORY_BOUND_ELEMENTS = 4096  # elements per program of a memory-bound kernel
# Offsets within a tile are 32-bit, and 256 * 2^23 is the first that does not fit.
MAX_ROW_STRIDE = (1 << 31) // max(MAX_BLOCK, MEMORY_BOUND_ELEMENTS // MIN_BLOCK_D)
MAX_REGISTERS = 255  # per thread, of any kernel
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = ("fp16x3", "tf32")  # of float32 matmuls; products of 16-bit numbers are exact


class Tile(NamedTuple):
    """Tile sizes and launch options of one pass.

    block_q, block_k: rows of queries and of keys; powers of two, 16 to 128.
    num_warps: 4, or 8 for two warpgroups of 64 rows each.
    num_stages: stages of the software pipeline of the inner loop.
    resident: programs that fit on a multiprocessor of an H100 or H200 at a time (the occupancy), in
        a causal pass, by registers and shared memory; `make compile-check` compares.
    max_registers: limit per thread on those GPUs.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 1
    max_registers: int = MAX_REGISTERS

    def options(self, on_hopper: bool) -> dict[str, int]:
        """Return the options of a launch."""
        if on_hopper and self.max_registers < MAX_REGISTERS:
            return {"num_warps": self.num_warps, "maxnreg": self.max_registers}
        return {"num_warps": self.num_warps}


class Configuration(NamedTuple):
    """Tiles of all passes.

    dv: tile of dV's own launch, used if registers do not hold the sums of dK and dV together; dkdv
        is then dK's, and both have the same block_k.
    """

    forward: Tile
    dkdv: Tile
    dq: Tile
    dv: Tile | None = None


# By `kind` and block_d, the padded head dimension. fp16x3, and 16-bit with 64 and 128: the fastest
# found on an H200 that do not spill. The others: by registers and shared memory, which
# `make compile-check` prints.
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
    """Return the power of two to which the kernels pad head_dim."""
    return max(MIN_BLOCK_D, 1 << (head_dim - 1).bit_length())


def kind(dtype: torch.dtype, precision: str) -> str:
    """Return the kind of matmul, a key of TABLE: "16-bit", "fp16x3" or "tf32"."""
    return precision if dtype == torch.float32 else "16-bit"


def configuration(head_dim: int, dtype: torch.dtype, precision: str = "fp16x3") -> Configuration:
    """Return the table's entry for head_dim in 1 to MAX_HEAD_DIM and a dtype of KERNEL_DTYPES."""
    return TABLE[kind(dtype, precision), block_d(head_dim)]
