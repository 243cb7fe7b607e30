"""Tile sizes and launch options of the Triton kernels, by dtype and head dimension."""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_BLOCK_D = 16  # smallest block size that tl.dot supports
MAX_HEAD_DIM = 256
MAX_BLOCK = 128  # largest number of rows of a matmul tile
MEMORY_BOUND_ELEMENTS = 4096  # number of elements per program of a memory-bound kernel
# Row strides, in elements, must be below this limit, because offsets within a tile have 32 bits. A
# tile of a memory-bound kernel has up to 4096 / 16 = 256 rows, and the offset 256 * 2^23 = 2^31 is
# too large.
MAX_ROW_STRIDE = (1 << 31) // max(MAX_BLOCK, MEMORY_BOUND_ELEMENTS // MIN_BLOCK_D)
MAX_REGISTERS = 255  # hardware limit of registers per thread
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Precisions of matmuls of float32 inputs. Tensor cores multiply 16-bit inputs exactly.
PRECISIONS = ("fp16x3", "tf32")


class Tile(NamedTuple):
    """Tile sizes and launch options of one attention kernel.

    Fields:
        block_q, block_k: number of queries and number of keys in a tile; powers of two, 16 to 128.
        num_warps: number of warps per program: 4 (one warpgroup) or 8 (two warpgroups).
        num_stages: number of stages of the software pipeline of the inner loop.
        resident: number of programs that run on one multiprocessor at the same time, as limited by
            registers and shared memory. In TABLE, it is the number for the causal kernel on an H100
            or H200, and `make compile-check` verifies it.
        max_registers: limit of registers per thread, used on Hopper GPUs only.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 1
    max_registers: int = MAX_REGISTERS

    def options(self, on_hopper: bool) -> dict[str, int]:
        """Return the launch options of Triton for this tile, by name.

        maxnreg, the limit of registers per thread, is only for Hopper GPUs.
        """
        if on_hopper and self.max_registers < MAX_REGISTERS:
            return {"num_warps": self.num_warps, "maxnreg": self.max_registers}
        return {"num_warps": self.num_warps}


class Configuration(NamedTuple):
    """Tile sizes of all attention kernels, for one kind of matmul and one head dimension.

    Fields:
        forward: tile of the forward kernel.
        dkdv: tile of the kernel that computes dK and dV. If `dv` is given, this tile is for dK
            only.
        dq: tile of the kernel that computes dQ.
        dv: tile of a separate launch that computes dV, or None if one launch computes dK and dV.
            Separate launches are used if the registers cannot hold the accumulators of dK and dV
            together. The tiles `dv` and `dkdv` must have the same block_k.
    """

    forward: Tile
    dkdv: Tile
    dq: Tile
    dv: Tile | None = None


# Keys: kind of matmul (see `kind`) and padded head dimension (see `block_d`). The entries for
# fp16x3, and those for 16-bit with head dimension 64 or 128, are the fastest tiles found on an H200
# that do not spill registers. The other entries were chosen by their use of registers and shared
# memory, which `make compile-check` prints.
TABLE: dict[tuple[str, int], Configuration] = {
    ("16-bit", 16): Configuration(
        Tile(128, 64, 8, 3, 2), Tile(64, 64, 4, 2, 3, 168), Tile(128, 64, 8, 3, 2)
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
    ("16-bit", 256): Configuration(
        Tile(128, 64, 8, 2, 1), Tile(32, 128, 8, 2, 1), Tile(128, 32, 8, 2, 1),
        dv=Tile(32, 128, 8, 2, 1),
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
        dv=Tile(64, 128, 8, 2, 1),
    ),
    ("fp16x3", 256): Configuration(
        Tile(32, 64, 8, 1, 1), Tile(16, 32, 8, 2, 1), Tile(16, 64, 8, 2, 1),
        dv=Tile(32, 32, 8, 2, 1),
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
    ("tf32", 256): Configuration(
        Tile(32, 64, 8, 2, 1), Tile(32, 32, 8, 2, 1), Tile(32, 32, 8, 2, 1)
    ),
}  # fmt: skip

# Entries for scores with a softcap, which needs more registers. The others are those of TABLE.
SOFTCAP_TABLE: dict[tuple[str, int], Configuration] = {
    ("16-bit", 64): Configuration(
        Tile(128, 64, 8, 3, 2, 128), Tile(32, 64, 4, 3, 2), Tile(128, 32, 8, 3, 2, 128)
    ),
    ("16-bit", 128): Configuration(
        Tile(128, 128, 8, 3, 1), Tile(32, 128, 8, 3, 1), Tile(128, 64, 8, 3, 1)
    ),
}  # fmt: skip


def block_d(head_dim: int) -> int:
    """Return the columns of the tiles: head_dim rounded up to a power of two, at least 16."""
    return max(MIN_BLOCK_D, 1 << (head_dim - 1).bit_length())


def block_columns(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the number of columns of the tiles of Q and K, and of those of V and O.

    The smaller number is at least 64, or equal to the other. ptxas 12.8, a part of Triton 3.6,
    compiles wrong machine code for some kernels with at most 32 columns of V and more of Q: wrong
    outputs or illegal addresses on an H100 with head dimensions 59 and 3, 120 and 10, and 168 and
    28. That of ptxas 12.9 is right. For few columns of Q, no fault was seen.
    """
    columns = block_d(head_dim), block_d(value_dim)
    least = min(max(columns), 64)
    return max(columns[0], least), max(columns[1], least)


def kind(dtype: torch.dtype, precision: str) -> str:
    """Return the kind of matmul: "16-bit" for float16 and bfloat16 inputs, else the precision."""
    return precision if dtype == torch.float32 else "16-bit"


def configuration(
    head_dim: int, dtype: torch.dtype, precision: str = "fp16x3", softcap: bool = False
) -> Configuration:
    """Return the tile sizes of all kernels from TABLE, or with a softcap from SOFTCAP_TABLE.

    head_dim is 1 to 256, and dtype float32, bfloat16 or float16. precision is that of float32
    matmuls, "fp16x3" or "tf32".
    """
    key = kind(dtype, precision), block_d(head_dim)
    return SOFTCAP_TABLE.get(key, TABLE[key]) if softcap else TABLE[key]
