"""Launch plans of the Triton kernels.

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

from systems.kernels.device import is_hopper, multiprocessors, on
from systems.kernels.flash_attention.layout import Layout, layout, output_strides
from systems.kernels.flash_attention.triton.memory_bound_launch import (
    combine_launch,
    fp16_split_launch,
    memory_bound_constants,
    memory_bound_programs,
    peak_launch,
    sum_launch,
)
from systems.kernels.flash_attention.triton.tile_table import Configuration, Tile, block_d
from systems.kernels.flash_attention.triton.work_splits import heads_in_l2, split_rows
from systems.kernels.flash_attention.validation import Shapes
from systems.kernels.kernel_launch import Launch

LOG2E = math.log2(math.e)


class TritonPlan:
    """Base class of the launch plans of the forward and backward passes.

    A launch plan holds the kernel launches of a pass, prepared for inputs with fixed shapes,
    strides, dtypes and device.

    Args:
        shapes, strides, dtypes, devices: those of q, k and v, as returned by
            `validation.signature`. They must be valid (see `validation.check_kernel_inputs`).
        is_causal, scale, precision: as given to `launch.flash_forward`.
        tiles: tile sizes of all kernels.
    """

    def __init__(
        self,
        shapes: Shapes,
        strides: Shapes,
        dtypes: tuple[torch.dtype, ...],
        devices: tuple[torch.device, ...],
        is_causal: bool,
        scale: float | None,
        precision: str,
        tiles: Configuration,
    ):
        self.shapes, self.dtype, self.device = shapes, dtypes[0], devices[0]
        # Outputs take their strides from inputs: out and dq from q, dk from k, dv from v.
        self.output_strides = [
            output_strides(shape, stride) for shape, stride in zip(shapes, strides, strict=True)
        ]
        self.q, self.k, self.v = map(layout, shapes, strides)
        self.like_q, self.like_k, self.like_v = map(layout, shapes, self.output_strides)
        self.is_empty = math.prod(shapes[0]) == 0 or math.prod(shapes[1]) == 0
        self.is_causal = is_causal
        # Triton specializes kernels on integer arguments, so this must be a float.
        self.scale = 1 / math.sqrt(self.q.head_dim) if scale is None else float(scale)
        self.fp16x3 = self.dtype == torch.float32 and precision == "fp16x3"
        self.tiles = tiles
        # In the order of the kernels' constexpr arguments
        self.constants = {
            "IS_CAUSAL": is_causal, "FP16X3": self.fp16x3,
            "PRECISION": "tf32" if precision == "tf32" else "ieee",
        }  # fmt: skip
        self.memory_bound_constants = memory_bound_constants(self.q)

    def empty(self, index: int) -> Tensor:
        """Allocate an output with the shape and dtype of q, k or v.

        The strides are those of the input if the input is dense (see `layout.output_strides`).

        Args:
            index: 0 for q (used for out and dq), 1 for k (used for dk), 2 for v (used for dv).
        """
        return torch.empty_strided(
            self.shapes[index], self.output_strides[index], dtype=self.dtype, device=self.device
        )

    def float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def operand_strides(self, of: Layout) -> tuple[int, int, int]:
        """Return the strides of the first three dimensions with which the kernels read an input.

        Without fp16x3, they are the strides of the input. With fp16x3, the kernels read the
        contiguous float16 halves of the input instead, and the strides are those of one half.

        Args:
            of: layout (sizes and strides) of the input.
        """
        return of.dense_strides if self.fp16x3 else of.strides

    def operands(self, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        """Return the inputs in the form that the kernels read, followed by a tensor of peaks.

        With fp16x3, each float32 input is split into a tensor that contains its two float16 halves.
        The peaks are the largest magnitudes of each head, and the kernels need them to undo a
        scaling. Otherwise, an input is copied only if the kernels do not support its strides. The
        last tensor is then a placeholder that the kernels do not read.

        Args:
            tensors: inputs, up to four.
            layouts: layout (sizes and strides) of each input.
        """
        addressable = [
            x.contiguous() if of.is_copy else x for x, of in zip(tensors, layouts, strict=True)
        ]
        if not self.fp16x3:
            return [*addressable, addressable[0]]  # placeholder for the peaks
        # Triton specializes kernels on pointer alignment, so each row starts at a multiple of 16 B.
        shape = len(tensors), -(-layouts[0].n_heads // 4) * 4
        peaks = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if len(set(layouts)) == 1:  # one launch of each kernel for all tensors
            return [*self.split_fp16(addressable, layouts[0], peaks).unbind(), peaks]
        each = zip(addressable, layouts, peaks, strict=True)
        return [*(self.split_fp16([x], of, peak)[0] for x, of, peak in each), peaks]

    def split_fp16(self, tensors: Sequence[Tensor], of: Layout, peaks: Tensor) -> Tensor:
        """Split up to four float32 tensors into float16 halves.

        Args:
            tensors: tensors to split, all with the same layout.
            of: layout (sizes and strides) of the tensors.
            peaks: zeros. The method writes the largest magnitude of each head here (see
                `tile_ops.peak_of`).

        Returns:
            The halves, float16 (number of tensors, 2, batch, heads, rows, head_dim). In the second
            dimension, index 0 is the high half, and index 1 is the low half.
        """
        shape = (len(tensors), 2, *of.shape)
        halves = torch.empty(shape, dtype=torch.float16, device=self.device)
        four = (*tensors, *[tensors[0]] * (4 - len(tensors)))
        # Keys that no query sees must not affect the scale of the other keys.
        n_seen = self.n_keys_seen() if of.rows == self.k.rows else of.rows
        peak_launch(self.device, len(tensors), of, n_seen)(*four, peaks)
        fp16_split_launch(self.device, len(tensors), of, n_seen)(*four, peaks, halves)
        return halves

    def heads_per_group(self, of: Layout) -> int:
        """Return the number of heads that the programs of a kernel should process at the same time.

        The inner loop of a kernel goes over two tensors, such as k and v. For this number of heads,
        both tensors fit together in the L2 cache. The result is at least 1.

        Args:
            of: layout (sizes and strides) of one of the two tensors.
        """
        itemsize = 4 if self.fp16x3 else self.dtype.itemsize
        return heads_in_l2(of.rows, of.head_dim, itemsize, of.n_heads)

    def n_keys_seen(self) -> int:
        return min(self.q.rows, self.k.rows) if self.is_causal else self.k.rows

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        of: Layout,
        n_splits: int,
        numbers: tuple[float, ...],
        **constants: bool,
    ) -> Launch:
        """Prepare the launch of a kernel.

        The launch has one program for each block of rows of each head and each range of the inner
        loop.

        Args:
            kernel: forward_kernel, dkdv_kernel or dq_kernel.
            tile: tile sizes of the kernel.
            of: layout of q or k. The rows of this tensor are divided into blocks.
            n_splits: number of ranges into which the inner loop is split.
            numbers: values of the int and float parameters of the kernel.
            constants: values of the constexpr parameters that only this kernel has.
        """
        block = tile.block_k if of is self.k else tile.block_q
        all_constants = {
            "HEAD_DIM": of.head_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
            "BLOCK_D": block_d(of.head_dim), **self.constants, "STAGES": tile.num_stages,
            **constants,
        }  # fmt: skip
        grid = (-(-of.rows // block) * of.n_heads * n_splits,)
        options = tile.options(is_hopper(self.device))
        return Launch(kernel, grid, numbers, all_constants, **options)

    def split_rows(self, tile: Tile, of: Layout, n_splits: int | None) -> tuple[int, int]:
        """Return the number of ranges into which an inner loop is split, and the rows per range.

        Each program has a block of queries and loops over keys, or has a block of keys and loops
        over queries. With several ranges, a separate program processes each range of the loop.

        Args:
            tile: tile sizes of the kernel.
            of: layout of q if a program has a block of queries; layout of k if it has a block of
                keys.
            n_splits: requested number of ranges; None for the result of
                `work_splits.default_splits`.
        """
        if of is self.k:
            length, block, programs = self.q.rows, tile.block_q, -(-of.rows // tile.block_k)
        else:
            length, block, programs = self.n_keys_seen(), tile.block_k, -(-of.rows // tile.block_q)
        slots = tile.resident
        if self.device.type == "cuda":
            slots *= multiprocessors(self.device.index)
        return split_rows(length, block, programs * of.n_heads, slots, n_splits)


class ForwardPlan(TritonPlan):
    """Launch plan of `launch.flash_forward`: its kernel launches for inputs with fixed properties.

    A call of the plan with q, k and v runs the forward pass.

    Args:
        inputs: the arguments of `TritonPlan`.
        n_splits: number of ranges into which the keys are split, with one program for each range;
            None for the result of `work_splits.default_splits`.
    """

    def __init__(self, *inputs: Any, n_splits: int | None):
        super().__init__(*inputs)
        if self.is_empty:
            return
        from systems.kernels.flash_attention.triton.forward_kernel import forward_kernel

        q, k, tile = self.q, self.k, self.tiles.forward
        self.n_splits, keys_per_split = self.split_rows(tile, q, n_splits)
        partial_strides = (math.prod(q.shape), *q.dense_strides)
        numbers = (
            *self.operand_strides(q), *self.operand_strides(k), *self.operand_strides(self.v),
            *(partial_strides if self.n_splits > 1 else (0, *self.like_q.strides)),
            q.n_heads, q.heads, q.rows, k.rows, self.n_splits, keys_per_split,
            self.heads_per_group(k), self.scale * LOG2E,
        )  # fmt: skip
        self.attend = self.launch(forward_kernel, tile, q, self.n_splits, numbers)
        self.combine = combine_launch(self.device, self.dtype, self.n_splits, self.like_q)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.empty(0), self.float32(*self.shapes[0][:-1])
        if self.is_empty:
            return out.zero_(), lse.fill_(-math.inf)
        with on(self.device):
            operands = self.operands((q, k, v), (self.q, self.k, self.v))
            if self.n_splits == 1:
                self.attend(*operands, out, lse)
            else:
                partials = self.float32(self.n_splits, *self.q.shape)
                partial_lse = self.float32(self.n_splits, *self.q.shape[:-1])
                self.attend(*operands, partials, partial_lse)
                self.combine(partials, partial_lse, out, lse)
        return out, lse


class BackwardPlan(TritonPlan):
    """Launch plan of `launch.flash_backward`: its kernel launches for inputs with fixed properties.

    A call of the plan with q, k, v, out, lse and dout runs the backward pass.

    Args:
        inputs: the arguments of `TritonPlan`.
        out_strides, dout_strides: strides of out and dout, in elements.
        n_splits_dkdv, n_splits_dq, needs_dq, needs_dkdv: as given to `launch.flash_backward`.
    """

    def __init__(
        self,
        *inputs: Any,
        out_strides: tuple[int, ...],
        dout_strides: tuple[int, ...],
        n_splits_dkdv: int | None,
        n_splits_dq: int | None,
        needs_dq: bool,
        needs_dkdv: bool,
    ):
        super().__init__(*inputs)
        self.needs_dq, self.needs_dkdv = needs_dq, needs_dkdv
        if self.is_empty:
            return
        from systems.kernels.flash_attention.triton.backward_kernel import (
            delta_kernel,
            dkdv_kernel,
            dq_kernel,
        )

        q, k = self.q, self.k
        self.out, self.dout = (layout(self.shapes[0], s) for s in (out_strides, dout_strides))
        self.delta = Launch(
            delta_kernel, (memory_bound_programs(q),),
            (*self.out.strides, *self.dout.strides, q.heads, q.rows),
            self.memory_bound_constants,
        )  # fmt: skip
        operands = q, k, self.v, self.dout
        inputs = tuple(stride for x in operands for stride in self.operand_strides(x))
        lengths = (q.n_heads, q.heads, q.rows, k.rows)
        scales = (self.scale, self.scale * LOG2E)

        tile, dv = self.tiles.dkdv, self.tiles.dv
        self.n_splits_dkdv, queries_per_split = self.split_rows(tile, k, n_splits_dkdv)
        if dv is not None:  # the launch of dV has the same ranges, in multiples of its block_q
            queries_per_split = -(-queries_per_split // dv.block_q) * dv.block_q
            self.n_splits_dkdv = -(-q.rows // queries_per_split)
        targets = [0, *self.like_k.strides, 0, *self.like_v.strides]
        if self.n_splits_dkdv > 1:
            targets = 2 * [math.prod(k.shape), *k.dense_strides]
        numbers = (
            *inputs, *targets, *lengths, self.n_splits_dkdv, queries_per_split,
            self.heads_per_group(q), *scales,
        )  # fmt: skip
        passes = [(tile, True, dv is None)] + ([] if dv is None else [(dv, False, True)])
        self.dkdv = [
            self.launch(dkdv_kernel, tile, k, self.n_splits_dkdv, numbers, DK=has_dk, DV=has_dv)
            for tile, has_dk, has_dv in passes
        ]
        outputs = self.like_k, self.like_v
        self.sum_dkdv = sum_launch(self.device, self.dtype, self.n_splits_dkdv, *outputs)

        tile = self.tiles.dq
        self.n_splits_dq, keys_per_split = self.split_rows(tile, q, n_splits_dq)
        targets = [0, *self.like_q.strides]
        if self.n_splits_dq > 1:
            targets = [math.prod(q.shape), *q.dense_strides]
        numbers = (
            *inputs, *targets, *lengths, self.n_splits_dq, keys_per_split,
            self.heads_per_group(k), *scales,
        )  # fmt: skip
        self.dq = self.launch(dq_kernel, tile, q, self.n_splits_dq, numbers)
        self.sum_dq = sum_launch(self.device, self.dtype, self.n_splits_dq, self.like_q)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dq = self.empty(0) if self.needs_dq else None
        dk, dv = (self.empty(1), self.empty(2)) if self.needs_dkdv else (None, None)
        if self.is_empty:
            for gradient in (dq, dk, dv):
                if gradient is not None:
                    gradient.zero_()
            return dq, dk, dv
        with on(self.device):
            # delta needs no matmul, so it is computed from dout itself and not from float16 halves.
            full_dout = dout.contiguous() if self.dout.is_copy else dout
            delta = torch.empty_like(lse)
            self.delta(out.contiguous() if self.out.is_copy else out, full_dout, delta)
            operands = self.operands((q, k, v, dout), (self.q, self.k, self.v, self.dout))
            if dk is not None and dv is not None:
                targets: tuple[Tensor, ...] = dk, dv
                partials = None
                if self.n_splits_dkdv > 1:
                    partials = self.float32(2, self.n_splits_dkdv, *self.k.shape)
                    targets = partials.unbind()
                for launch in self.dkdv:
                    launch(*operands, lse, delta, *targets)
                if partials is not None:
                    self.sum_dkdv(partials, dk, dv)
            if dq is not None:
                if self.n_splits_dq == 1:
                    self.dq(*operands, lse, delta, dq)
                else:
                    partials = self.float32(self.n_splits_dq, *self.q.shape)
                    self.dq(*operands, lse, delta, partials)
                    self.sum_dq(partials, dq, dq)
        return dq, dk, dv
