"""Base class of the launch plans of the Triton kernels.

A plan is a callable that runs a forward or backward pass for inputs with fixed shapes, strides,
dtypes and device, and with fixed options. It holds the prepared kernel launches of the pass and the
strides of the outputs. It does not depend on the data, so the module `launch` caches plans and uses
a plan for all inputs with these properties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import is_hopper, multiprocessors
from systems.kernels.flash_attention.call import Call, Packing, Shapes
from systems.kernels.flash_attention.triton.layout import Layout, layout, output_strides
from systems.kernels.flash_attention.triton.memory_bound_launch import (
    fp16_split_launch,
    peak_launch,
)
from systems.kernels.flash_attention.triton.tile_table import Configuration, Tile, block_columns
from systems.kernels.flash_attention.triton.work_splits import heads_in_l2, split_rows
from systems.kernels.kernel_launch import Launch

LOG2E = math.log2(math.e)
# Largest bound of a window in the kernels, which add it to lengths in 32 bits
MAX_WINDOW = 1 << 30
MAX_SIMPLE_SOFTCAP = 512  # largest softcap for which the simple formula of tanh suffices


def softcap_form(softcap: float | None) -> int:
    """Return the constant SOFTCAP of the kernels: 0 for no softcap, 1, or 2 for a precise tanh.

    The simple formula of tanh has an absolute error near 2^-22, so that of a capped score is near
    softcap * 2^-22. Up to a softcap of 512 this is at most 2^-13, a quarter of the rounding error
    of a float16 probability.
    """
    if softcap is None:
        return 0
    return 1 if softcap <= MAX_SIMPLE_SOFTCAP else 2


class TritonPlan:
    """Base class of the launch plans of the forward and backward passes.

    Shapes, strides, dtypes and devices are those of q, k and v, from `call.signature`, and valid
    (see `arguments.check_kernel_inputs`). `call` is the result of `Call.for_plan`.
    """

    def __init__(
        self,
        shapes: Shapes,
        strides: Shapes,
        dtypes: tuple[torch.dtype, ...],
        devices: tuple[torch.device, ...],
        call: Call,
        tiles: Configuration,
    ):
        self.dtype, self.device = dtypes[0], devices[0]
        assert not isinstance(call.packing, Packing), "a plan depends only on sizes"
        self.packed = call.packing
        # Outputs take their strides from inputs: dq and out from q, dk from k, dv from v.
        value_dim = shapes[2][-1]
        self.shapes = (*shapes, (*shapes[0][:-1], value_dim))
        self.output_strides = [
            *(output_strides(shape, stride) for shape, stride in zip(shapes, strides, strict=True)),
            output_strides(shapes[0], strides[0], value_dim),
        ]
        self.q, self.k, self.v = map(layout, shapes, strides)
        outputs = map(layout, self.shapes, self.output_strides)
        self.like_q, self.like_k, self.like_v, self.like_out = outputs
        self.is_empty = math.prod(shapes[0]) == 0 or math.prod(shapes[1]) == 0
        self.q_per_kv = self.q.heads // self.k.heads if self.k.heads else 1
        self.n_sequences, self.max_queries, self.max_keys = self.packed or (
            1,
            self.q.rows,
            self.k.rows,
        )
        self.mask = call.mask
        # Triton specializes kernels on integer arguments, so this must be a float.
        self.scale = 1 / math.sqrt(self.q.head_dim) if call.scale is None else float(call.scale)
        self.fp16x3 = self.dtype == torch.float32 and call.precision == "fp16x3"
        self.tiles = tiles
        # In the order of the kernels' constexpr arguments
        self.constants = {
            "Q_PER_KV": self.q_per_kv, "PACKED": self.packed is not None,
            "HAS_LEFT": self.mask.left is not None, "HAS_RIGHT": self.mask.right is not None,
            "IS_CAUSAL": self.mask.right == 0, "LOWER_RIGHT": self.mask.lower_right,
            "SOFTCAP": softcap_form(call.softcap), "FP16X3": self.fp16x3,
            "PRECISION": "tf32" if call.precision == "tf32" else "ieee",
        }  # fmt: skip
        window = [min(bound or 0, MAX_WINDOW) for bound in (self.mask.left, self.mask.right)]
        # Numbers that the forward kernel and the kernels of backward have in common
        self.sizes = self.q.n_heads * self.n_sequences, self.q.heads, self.q.rows, self.k.rows
        self.window = tuple(window)
        self.cap_log2e = float(call.softcap or 0.0) * LOG2E

    def empty(self, index: int) -> Tensor:
        """Allocate an output with the dtype of q, and the strides of a dense input.

        Index 0 stands for q (used for dq), 1 for k (dk), 2 for v (dv), 3 for the attention output.
        See `layout.output_strides`.
        """
        return torch.empty_strided(
            self.shapes[index], self.output_strides[index], dtype=self.dtype, device=self.device
        )

    def float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def kernel_strides(self, strides: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the strides with which kernels address a tensor (batch, heads, rows, head_dim).

        For packed sequences, batch counts sequences, and its stride is 0, because the kernels add
        the first row of the sequence.
        """
        return strides if self.packed is None else (0, *strides[1:])

    def operand_strides(self, of: Layout) -> tuple[int, int, int]:
        """Return the strides with which the kernels read the first three dimensions of an input.

        With fp16x3, they are those of a contiguous float16 half of the input.
        """
        return self.kernel_strides(of.dense_strides if self.fp16x3 else of.strides)

    def target_strides(self, n_splits: int, of: Layout) -> tuple[int, int, int, int]:
        """Return the strides with which a kernel writes (splits, batch, heads, rows, head_dim).

        With several splits, these are partial results, contiguous. Otherwise, it is the result
        itself.
        """
        if n_splits == 1:
            return 0, *self.kernel_strides(of.strides)
        return math.prod(of.shape), *self.kernel_strides(of.dense_strides)

    def operands(
        self, tensors: Sequence[Tensor], layouts: Sequence[Layout], packing: Packing | None
    ) -> list[Tensor]:
        """Return the inputs in the form that the kernels read, followed by three other tensors.

        With fp16x3, each float32 input is split into a tensor of two float16 halves. Otherwise, an
        input is copied only if the kernels do not support its strides. The first of the other
        tensors has the peaks, the largest magnitudes of each head, with which the kernels undo a
        scaling. The last two are the boundaries of packed sequences of queries and of keys. A
        placeholder replaces tensors that do not exist. In backward, the inputs are q, k, v and
        dout.
        """
        addressable = [
            x.contiguous() if of.is_copy else x for x, of in zip(tensors, layouts, strict=True)
        ]
        starts = [addressable[0]] * 2 if packing is None else [packing.starts_q, packing.starts_k]
        if not self.fp16x3:
            return [*addressable, addressable[0], *starts]
        # Triton specializes kernels on pointer alignment, so each row starts at a multiple of 16 B.
        shape = len(tensors), -(-self.sizes[0] // 4) * 4
        peaks = torch.zeros(shape, dtype=torch.int32, device=self.device)
        # Keys past the last one that a query sees must not affect the scale of the others. Keys
        # before a window, and keys of a packed sequence that no query sees, still do.
        n_seen = self.q.rows, self.n_keys_seen(), self.n_keys_seen(), self.q.rows
        if len(set(layouts)) == 1 and packing is None:  # one launch of each kernel for all tensors
            all_halves = self.split_fp16(addressable, layouts[0], n_seen[1], starts[0], None, peaks)
            return [*all_halves.unbind(), peaks, *starts]
        sides = (starts[0], self.max_queries), (starts[1], self.max_keys)
        halves = [
            self.split_fp16(
                [x], layouts[i], n_seen[i], side[0], packing and side[1], peaks[i]
            )[0]
            for i, (x, side) in enumerate(zip(addressable, (*sides, *sides[::-1]), strict=False))
        ]  # fmt: skip
        return [*halves, peaks, *starts]

    def split_fp16(
        self,
        tensors: Sequence[Tensor],
        of: Layout,
        n_seen: int,
        starts: Tensor,
        longest: int | None,
        peaks: Tensor,
    ) -> Tensor:
        """Split up to four float32 tensors with the layout `of` into float16 halves.

        The result is float16 (number of tensors, 2, batch, heads, rows, head_dim), the high half
        before the low half.

        Args:
            n_seen: number of rows of each head that are read; later rows are replaced by zeros.
            peaks: zeros, output: the largest magnitude of each head (see `tile_ops.peak_of`).
        """
        shape = (len(tensors), 2, *of.shape)
        halves = torch.empty(shape, dtype=torch.float16, device=self.device)
        four = (*tensors, *[tensors[0]] * (4 - len(tensors)))
        if longest is not None:
            of = of._replace(batch=self.n_sequences, strides=self.kernel_strides(of.strides))
        peak_launch(self.device, len(tensors), of, n_seen, longest)(*four, starts, peaks)
        launch = fp16_split_launch(self.device, len(tensors), of, n_seen, longest)
        launch(*four, starts, peaks, halves)
        return halves

    def n_keys_seen(self) -> int:
        """Return the number of keys up to the last one that some query sees."""
        _, upper = self.mask.bounds(self.q.rows, self.k.rows)
        if upper is None or self.packed is not None:
            return self.k.rows
        return max(0, min(self.k.rows, self.q.rows + upper))

    def heads_per_group(self, of: Layout) -> int:
        """Return how many heads a kernel should process at the same time, at least 1.

        For this number, the two tensors of its inner loop, such as k and v, fit together in the L2
        cache.
        """
        itemsize = 4 if self.fp16x3 else self.dtype.itemsize
        rows, n_heads = self.max_queries if of is self.q else self.max_keys, of.n_heads
        heads = heads_in_l2(rows, of.head_dim, itemsize, n_heads * self.n_sequences)
        # Programs that loop over keys process heads of queries, and the others heads of keys.
        return heads * self.q_per_kv if of is self.k else max(1, heads // self.q_per_kv)

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        of: Layout,
        n_splits: int,
        numbers: tuple[float, ...],
        **constants: bool,
    ) -> Launch:
        """Prepare the launch of a kernel: a program for each block of rows, head and split.

        `of` is the layout of q or k, whose rows are divided into blocks. `constants` are the
        constexpr parameters that only this kernel has.
        """
        block, longest = (
            (tile.block_k, self.max_keys) if of is self.k else (tile.block_q, self.max_queries)
        )
        columns, value_columns = block_columns(self.q.head_dim, self.v.head_dim)
        all_constants = {
            "HEAD_DIM": self.q.head_dim, "VALUE_DIM": self.v.head_dim, "BLOCK_Q": tile.block_q,
            "BLOCK_K": tile.block_k, "BLOCK_D": columns, "BLOCK_V": value_columns,
            **self.constants, "STAGES": tile.num_stages, **constants,
        }  # fmt: skip
        grid = (-(-longest // block) * of.n_heads * self.n_sequences * n_splits,)
        options = tile.options(is_hopper(self.device))
        return Launch(kernel, grid, numbers, all_constants, **options)

    def split_rows(self, tile: Tile, of: Layout, n_splits: int | None) -> tuple[int, int]:
        """Return the number of ranges into which an inner loop is split, and the rows per range.

        `of` is the layout of q or k, of which a program has a block. By default, n_splits is the
        result of `work_splits.default_splits`, or 1 if the mask has a left bound: a block then sees
        few of the ranges.
        """
        if of is self.k:
            length, block, programs = self.max_queries, tile.block_q, -(-of.rows // tile.block_k)
        else:
            length = self.max_keys if self.packed else self.n_keys_seen()
            block, programs = tile.block_k, -(-of.rows // tile.block_q)
        if n_splits is None and self.mask.left is not None:
            n_splits = 1
        slots = tile.resident
        if self.device.type == "cuda":
            slots *= multiprocessors(self.device.index)
        return split_rows(max(1, length), block, programs * of.n_heads, slots, n_splits)
