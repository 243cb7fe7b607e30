"""Launch plans of the forward and backward passes with the Triton kernels.

The module `base_plan` explains plans.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import on
from systems.kernels.flash_attention.call import Packing
from systems.kernels.flash_attention.triton.base_plan import LOG2E, TritonPlan
from systems.kernels.flash_attention.triton.layout import layout
from systems.kernels.flash_attention.triton.memory_bound_launch import (
    combine_launch,
    memory_bound_constants,
    memory_bound_programs,
    sum_launch,
)
from systems.kernels.kernel_launch import Launch


class ForwardPlan(TritonPlan):
    """Launch plan of `launch.flash_forward`, called with q, k, v and the packed sequences, if any.

    `inputs` are the arguments of `TritonPlan`, and n_splits that of `launch.flash_forward`.
    """

    def __init__(self, *inputs: Any, n_splits: int | None):
        super().__init__(*inputs)
        if self.is_empty:
            return
        from systems.kernels.flash_attention.triton.forward_kernel import forward_kernel

        q, k, tile = self.q, self.k, self.tiles.forward
        self.n_splits, keys_per_split = self.split_rows(tile, q, n_splits)
        numbers = (
            *self.operand_strides(q), *self.operand_strides(k), *self.operand_strides(self.v),
            *self.target_strides(self.n_splits, self.like_out), *self.sizes, self.n_splits,
            keys_per_split, self.heads_per_group(k), *self.window, self.scale * LOG2E,
            self.cap_log2e,
        )  # fmt: skip
        self.attend = self.launch(forward_kernel, tile, q, self.n_splits, numbers)
        self.combine = combine_launch(self.device, self.dtype, self.n_splits, self.like_out)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = self.empty(3), self.float32(*self.shapes[0][:-1])
        if self.is_empty:
            return out.zero_(), lse.fill_(-math.inf)
        with on(self.device):
            operands = self.operands((q, k, v), (self.q, self.k, self.v), packing)
            if self.n_splits == 1:
                self.attend(*operands, out, lse)
            else:
                partials = self.float32(self.n_splits, *self.like_out.shape)
                partial_lse = self.float32(self.n_splits, *self.like_out.shape[:-1])
                self.attend(*operands, partials, partial_lse)
                self.combine(partials, partial_lse, out, lse)
        return out, lse


class BackwardPlan(TritonPlan):
    """Launch plan of `launch.flash_backward`.

    It is called with q, k, v, out, lse, dout, the packed sequences, if any, and the gradient of
    lse, if any. `inputs` are the arguments of `TritonPlan`. Strides are in elements. The others are
    as given to `launch.flash_backward`.
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
        from systems.kernels.flash_attention.triton.backward_ops import delta_kernel
        from systems.kernels.flash_attention.triton.dkdv_kernel import dkdv_kernel
        from systems.kernels.flash_attention.triton.dq_kernel import dq_kernel

        q, k = self.q, self.k
        self.out, self.dout = (layout(self.shapes[3], s) for s in (out_strides, dout_strides))
        self.delta = Launch(
            delta_kernel, (memory_bound_programs(self.out),),
            (*self.out.strides, *self.dout.strides, q.heads, q.rows),
            memory_bound_constants(self.out),
        )  # fmt: skip
        operands = q, k, self.v, self.dout
        inputs = tuple(stride for x in operands for stride in self.operand_strides(x))
        rest = *self.window, self.scale, self.scale * LOG2E, self.cap_log2e

        tile, dv = self.tiles.dkdv, self.tiles.dv
        self.n_splits_dkdv, queries_per_split = self.split_rows(tile, k, n_splits_dkdv)
        if dv is not None:  # the launch of dV has the same ranges, in multiples of its block_q
            queries_per_split = -(-queries_per_split // dv.block_q) * dv.block_q
            self.n_splits_dkdv = max(1, -(-self.max_queries // queries_per_split))
        numbers = (
            *inputs, *self.target_strides(self.n_splits_dkdv, self.like_k),
            *self.target_strides(self.n_splits_dkdv, self.like_v), *self.sizes, self.n_splits_dkdv,
            queries_per_split, self.heads_per_group(q), *rest,
        )  # fmt: skip
        passes = [(tile, True, dv is None)] + ([] if dv is None else [(dv, False, True)])
        self.dkdv = [
            self.launch(dkdv_kernel, tile, k, self.n_splits_dkdv, numbers, DK=has_dk, DV=has_dv)
            for tile, has_dk, has_dv in passes
        ]
        # One launch adds the partial gradients of both tensors if they have the same shape.
        both = (self.like_k, self.like_v)
        sums = [both] if k.shape == self.v.shape else [(x,) for x in both]
        self.sum_dkdv = [
            sum_launch(self.device, self.dtype, self.n_splits_dkdv, *outputs) for outputs in sums
        ]

        tile = self.tiles.dq
        self.n_splits_dq, keys_per_split = self.split_rows(tile, q, n_splits_dq)
        numbers = (
            *inputs, *self.target_strides(self.n_splits_dq, self.like_q), *self.sizes,
            self.n_splits_dq, keys_per_split, self.heads_per_group(k), *rest,
        )  # fmt: skip
        self.dq = self.launch(dq_kernel, tile, q, self.n_splits_dq, numbers)
        self.sum_dq = sum_launch(self.device, self.dtype, self.n_splits_dq, self.like_q)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        packing: Packing | None = None,
        dlse: Tensor | None = None,
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
            if dlse is not None:
                # P is the derivative of lse, so dS = P * (dP - D + dlse). A query that sees no key
                # has a constant lse.
                delta = (delta - dlse).masked_fill_(lse == -math.inf, 0)
            layouts = self.q, self.k, self.v, self.dout
            inputs = (*self.operands((q, k, v, full_dout), layouts, packing), lse, delta)
            if dk is not None and dv is not None:
                self._compute_dkdv(inputs, dk, dv)
            if dq is not None:
                if self.n_splits_dq == 1:
                    self.dq(*inputs, dq)
                else:
                    partials = self.float32(self.n_splits_dq, *self.q.shape)
                    self.dq(*inputs, partials)
                    self.sum_dq(partials, dq, dq)
        return dq, dk, dv

    def _compute_dkdv(self, inputs: tuple[Tensor, ...], dk: Tensor, dv: Tensor) -> None:
        n_splits = self.n_splits_dkdv
        targets: tuple[Tensor, ...] = dk, dv
        if n_splits > 1 and len(self.sum_dkdv) == 1:
            both = self.float32(2, n_splits, *self.k.shape)
            targets = both.unbind()
        elif n_splits > 1:
            targets = tuple(self.float32(n_splits, *x.shape) for x in (self.k, self.v))
        for launch in self.dkdv:
            launch(*inputs, *targets)
        if n_splits == 1:
            return
        if len(self.sum_dkdv) == 1:
            self.sum_dkdv[0](both, dk, dv)
        else:
            for launch, partials, gradient in zip(self.sum_dkdv, targets, (dk, dv), strict=True):
                launch(partials, gradient, gradient)
