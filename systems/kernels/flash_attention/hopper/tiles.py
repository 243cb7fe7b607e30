"""Tile sizes of the Hopper forward kernel, and the columns of tiles for each head dimension."""

from __future__ import annotations

import math
from typing import NamedTuple

from systems.kernels.kernel_launch import REGISTERS

ROWS = 64  # number of queries per consumer
COPIED_COLUMNS = 64  # columns that a TMA copy loads if keys and values share a ring


class HopperTile(NamedTuple):
    """Tile sizes and register budgets of the forward kernel.

    A program of the kernel has 2 or 3 consumer warpgroups, which compute attention, and a producer
    warp, which loads data.

    Fields:
        consumers: number of consumer warpgroups, 2 or 3. Each of them processes 64 queries.
        block_k: number of keys per tile, 64 or 128.
        stages: number of slots in shared memory for tiles of keys, and also number of slots for
            tiles of values. With shares_ring, it is the number of slots for both together.
        registers: registers per thread (setmaxnreg) of each consumer except consumer 0.
        producer_registers: registers per thread of the producer.
        shares_ring: whether keys and values share one ring. Each TMA copy then loads COPIED_COLUMNS
            columns, so that a tile has 192 columns in shared memory and not 256. q, k and v must
            have the same head_dim, 136 to 192.
        resident: number of programs that run on a multiprocessor at the same time, 1 or 2. Two
            programs overlap the start and the end of a block of one with matmuls of the other.

    Consumer 0 gets the registers that the other warpgroups leave. To compute their number, note
    that the single warp of the producer counts as a whole warpgroup. Triton divides the 65,536
    registers of a multiprocessor evenly among the threads, and rounds down to a multiple of 8. With
    3 consumers, there are 4 warpgroups and 128 registers per thread. With 2 consumers, there are 3
    warpgroups and 168 registers per thread. The registers per thread of all warpgroups therefore
    add up to 4 * 128 = 512 or 3 * 168 = 504. With two resident programs of 2 consumers, there are
    80 registers per thread, and 3 * 80 = 240 altogether.
    """

    consumers: int
    block_k: int
    stages: int
    registers: int
    producer_registers: int
    shares_ring: bool = False
    resident: int = 1

    @property
    def launch_options(self) -> dict[str, int]:
        """Options of Triton for a launch with this tile."""
        options = {"num_warps": 4}
        if self.resident > 1:  # Triton's default leaves no registers for a second program
            options["maxnreg"] = REGISTERS // self.resident // (128 * (self.consumers + 1)) // 8 * 8
        return options


# Tile by `used_columns` of the head dimension. Registers limit the size of a tile at head_dim 64,
# and shared memory at larger ones.
FORWARD = {
    64: HopperTile(3, 128, 3, 160, 32),
    96: HopperTile(2, 128, 2, 240, 24),
    128: HopperTile(2, 128, 2, 240, 24),
    192: HopperTile(2, 128, 3, 240, 24, shares_ring=True),
    256: HopperTile(2, 64, 2, 240, 24),
}
# Tile for causal passes with head_dim 64 and up to SHORT_LENGTH queries. It has blocks of 128
# queries, because blocks of 192 queries compute many masked scores in a short causal pass. With
# 1,024 tokens, a block has only 4.5 tiles of 128 keys on average. If one program runs at a time,
# the start and the end of the block then take a third of its time. In trials on an H100, compared
# with FEW_BLOCKS, SHORT takes 0.83 times as long with 256 tokens, 0.90 with 1,024 and 0.93 with
# 1,536. Compared with FORWARD[64], it takes 0.97 times as long with 1,536 tokens and 1.01 with
# 2,048. With packed sequences of an eighth to all of the longest length, it takes 0.96 times as
# long if this is 4,096 tokens, and 1.04 if it is 8,192.
SHORT = HopperTile(2, 64, 3, 104, 24, resident=2)
SHORT_LENGTH = 1536
SHORT_LENGTH_PACKED = 4096
# Tile instead of SHORT if a multiprocessor has at most one block. In trials on an H100, SHORT takes
# 1.1 to 1.2 times as long then.
FEW_BLOCKS = HopperTile(2, 128, 3, 240, 24)
# Tile for head_dim above 128 with a head_dim of v of 128, except with packed sequences. On an H100,
# blocks of 128 queries are 1% to 13% slower, with 1,024 to 8,192 causal tokens.
NARROW_VALUES = HopperTile(3, 64, 2, 160, 32)
# Head dimensions of tensors. TMA needs rows of a multiple of 16 bytes. Those below 64 are left to
# `flash_triton`, because the backward kernel for head_dim 64 stores dK and dV without TMA.
HEAD_DIMS = (64, *range(72, 257, 8))
# Head dimensions for packed sequences, whose rows the kernels also write without TMA
PACKED_HEAD_DIMS = (64, 128, 192, 256)
NARROW_VALUE_DIM = 128  # head dimension of v that may be combined with one of q above 128


def forward_tile(
    head_dim: int,
    n_queries: int,
    is_causal: bool,
    is_packed: bool = False,
    value_dim: int | None = None,
    heads_per_multiprocessor: float = math.inf,
) -> HopperTile:
    """Return the tile sizes that are the fastest for the given inputs of the forward pass.

    With `is_packed`, n_queries is that of the longest sequence. `heads_per_multiprocessor` is batch
    * heads per multiprocessor, not used with `is_packed`. v has the head_dim of q by default.
    """
    short_length = SHORT_LENGTH_PACKED if is_packed else SHORT_LENGTH
    if is_causal and n_queries <= short_length and head_dim == 64:
        n_blocks = -(-n_queries // (ROWS * SHORT.consumers))
        return SHORT if is_packed or n_blocks * heads_per_multiprocessor > 1 else FEW_BLOCKS
    if head_dim > 128 and value_dim == NARROW_VALUE_DIM:
        # With packed sequences, three consumers need more registers than there are.
        return FORWARD[256] if is_packed else NARROW_VALUES
    return FORWARD[used_columns(head_dim)]


def kernel_head_dim(head_dim: int) -> int:
    """Return the columns of a tile for this head_dim of the tensors: 64, 128 or 256.

    TMA pads tiles with zeros in shared memory, so the tensors need no padding. head_dim is one of
    HEAD_DIMS.
    """
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def used_columns(head_dim: int) -> int:
    """Return the columns of a tile that matmuls use: 64, 96, 128, 192 or 256."""
    columns = kernel_head_dim(head_dim)
    three_quarters = columns // 4 * 3
    return three_quarters if 64 < head_dim <= three_quarters else columns


def copied_columns(head_dim: int, tile: HopperTile) -> int:
    """Return how many columns of a tile each TMA copy of the forward kernel loads."""
    return COPIED_COLUMNS if tile.shares_ring else kernel_head_dim(head_dim)
