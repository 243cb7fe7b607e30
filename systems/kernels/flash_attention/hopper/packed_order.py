"""Launch of the kernel that lists the blocks of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from systems.kernels.kernel_launch import Launch, Repeat


class PackedOrder:
    """Prepared launch of `packed_blocks_kernel`.

    A call with the boundaries of the sequences, int32 (n_sequences + 1,), and a tensor of
    `allocate` fills the tensor with the list of their blocks, which is described there. It returns
    what a `Launch` returns. `n_rows` are those of all sequences, and `longest` those of the longest
    one. With `from_end`, the blocks at the start of a sequence take the longest. `n_blocks` is an
    upper bound of the number of blocks.
    """

    def __init__(self, n_sequences: int, n_rows: int, longest: int, block: int, from_end: bool):
        from systems.kernels.flash_attention.hopper.packed_blocks import (
            CHUNK,
            packed_blocks_kernel,
        )

        self.n_blocks = n_rows // block + n_sequences
        chunks = max(1, -(-min(longest, n_rows) // (block * CHUNK)))
        constants = {"BLOCK": block, "FROM_END": from_end, "CHUNK": CHUNK}
        numbers = n_sequences, n_rows, self.n_blocks
        self.launch = Launch(packed_blocks_kernel, (n_sequences, chunks), numbers, constants)

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(2 * (self.n_blocks + 1), dtype=torch.int32, device=device)

    def __call__(self, starts: Tensor, blocks: Tensor) -> Repeat | None:
        return self.launch(starts, blocks)
