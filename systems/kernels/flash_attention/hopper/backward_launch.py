"""The backward pass on Hopper, launched: `flash_backward` of what `hopper_launch` takes forward.

Three launches: `prepare_kernel`, a kernel of one pass for all three gradients, `convert_kernel`;
and one that adds parts of dK and dV where the pass is split over queries, as for few heads.

dQ is added up in an order that changes from run to run, in float32. Equal inputs give equal bits in
`launch.flash_backward`, which computes the scores twice.

As in `hopper_launch`, what a launch needs beside the tensors is kept between calls.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors, on
from systems.kernels.flash_attention.configurations import cut
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.hopper.forward_launch import readable, row_maps
from systems.kernels.flash_attention.hopper.splits import BLOCK_K, BLOCK_Q, backward_splits
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.triton.copy_launch import summing
from systems.kernels.flash_attention.triton.plans import LOG2E, PLANS
from systems.kernels.launcher import Launch
from systems.kernels.tensor_maps import TensorMaps

TILE = BLOCK_Q  # rows of every copy


def why_not(q: Tensor, needs_dq: bool = True, needs_dkdv: bool = True) -> str | None:
    """Why the gradients of attention of q are not to be had from here, or None if they are.

    For all three the kernels have been ahead of `launch.flash_backward` where both were measured:
    16 causal heads of 16k on an H200 take 2.5 ms in place of 3.6 with head_dim 64, 4.7 in place of
    6.5 with 128. For some of them they have as much to do, and each of the two passes less.
    """
    if not (needs_dq and needs_dkdv):
        return "flash_hopper has one pass for all gradients; one of flash_triton's two is faster"
    return forward_launch.why_not(q)


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch.flash_backward` on Hopper: the same arguments, which fit, and results but for dQ's
    last bits.

    Args:
        q, k, v, out, dout: bfloat16 or float16, head_dim 64 or 128. What the copy engine cannot
            read, for its address or strides, is copied first.
        n_splits: ranges of queries; by default `backward_splits`.
    """
    if not q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype:
        dtypes = [x.dtype for x in (q, k, v, out, dout)]
        raise ValueError(f"q, k, v, out and dout must have one dtype, got {dtypes}")
    gradients = empty_like(q), empty_like(k), empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    # Copies, if any, live until the launch: the memory of one must not become the next one's.
    given = [readable(x) for x in (q, k, v, out, dout)]
    given += [four_dimensional(x) for x in gradients]
    plan = _backward(
        q.device, q.dtype, (given[0].shape, given[1].shape), tuple([x.stride() for x in given]),
        is_causal, scale, n_splits,
    )  # fmt: skip
    with on(q.device):
        plan(lse, *given)
    return gradients


class Backward:
    """The launches of `flash_backward`, of what `readable` makes of tensors of one dtype, shape and
    stride.

    Args:
        strides: of q, k, v, out, dout, dq, dk, dv.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        strides: tuple[tuple[int, ...], ...],
        is_causal: bool,
        scale: float | None,
        n_splits: int | None,
    ):
        from systems.kernels.flash_attention.hopper.backward_common import (
            convert_kernel,
            prepare_kernel,
        )
        from systems.kernels.flash_attention.hopper.backward_d128 import wide_backward_kernel
        from systems.kernels.flash_attention.hopper.backward_kernel import backward_kernel

        (batch, heads, n_queries, head_dim), n_keys = shapes[0], shapes[1][2]
        of_q, of_k, of_v, of_out, of_dout, of_dq, of_dk, of_dv = strides
        scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
        n_programs = batch * heads
        n_blocks = -(-n_keys // BLOCK_K)
        n_tiles = -(-n_queries // TILE)
        n_multiprocessors = multiprocessors(device.index)
        if n_splits is None:
            n_splits = backward_splits(
                n_programs, n_blocks, n_tiles, is_causal, head_dim, n_multiprocessors
            )
        n_splits, tiles_a_split = cut(n_tiles, n_splits)
        self.n_splits = n_splits
        n_items = n_splits * n_programs * n_blocks
        self.n_rows = n_rows = n_programs * n_tiles * TILE
        self.head_dim = head_dim
        ends = (heads, n_queries, n_tiles * TILE)
        constants = {"HEAD_DIM": head_dim, "ROWS": TILE}
        self.prepare = Launch(
            prepare_kernel, (n_rows // TILE,), (*of_out[:3], *of_dout[:3], *ends), constants
        )
        self.convert = Launch(
            convert_kernel, (n_rows // TILE,), (*of_dq[:3], *ends, scale), constants
        )
        # As many heads at a time as have a block for each multiprocessor: more do not fit in the
        # L2 cache with what is added to them.
        group = -(-n_multiprocessors // n_blocks)
        numbers: tuple[float, ...] = (
            n_programs, heads, n_queries, n_keys, n_tiles * TILE, n_splits, tiles_a_split * TILE,
            group, n_items, scale, scale * LOG2E,
        )  # fmt: skip
        # Of what the kernel takes by descriptor, in its order
        tiles = (n_rows * head_dim // TILE, TILE)
        row_map = TensorMaps(torch.float32, (n_rows,), (1,), (TILE,))
        self.maps = [
            row_maps(dtype, shapes[0], of_q, TILE),
            row_maps(dtype, shapes[0], of_dout, TILE),
            row_maps(dtype, shapes[1], of_k, TILE),
            row_maps(dtype, shapes[1], of_v, TILE),
            row_map,
            row_map,
            TensorMaps(torch.float32, tiles, (TILE, 1), (TILE, TILE)),
        ]
        self.parts_shape = 2, n_splits, *shapes[1]
        if head_dim > 64:
            constants = {"IS_CAUSAL": is_causal, "SPLIT": n_splits > 1}
            self.maps += [row_maps(dtype, shapes[1], of, TILE) for of in (of_dk, of_dv)]
            kernel, grid = wide_backward_kernel, n_items
        else:
            target = [0, *of_dk[:3], 0, *of_dv[:3]]
            if n_splits > 1:
                n, a_head = math.prod(shapes[1]), n_keys * head_dim
                target = 2 * [n, heads * a_head, a_head, head_dim]
            numbers = (*target, *numbers)
            constants = {"IS_CAUSAL": is_causal}
            kernel, grid = backward_kernel, min(n_items, n_multiprocessors)
        self.differentiate = Launch(kernel, (grid,), numbers, constants, num_warps=4)
        layouts = layout(shapes[1], of_dk), layout(shapes[1], of_dv)
        self.sum = summing(device, dtype, n_splits, *layouts)

    def __call__(
        self, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        n, device = self.n_rows, q.device
        work = torch.empty(n * (self.head_dim + 2), dtype=torch.float32, device=device)
        dq_sum, log2_lse, minus_delta = work.split((n * self.head_dim, n, n))
        counter = torch.empty(1, dtype=torch.int32, device=device)
        self.prepare(out, dout, lse, log2_lse, minus_delta, dq_sum, counter)
        # As many of them as this kernel takes by descriptor
        tensors = (q, dout, k, v, log2_lse, minus_delta, dq_sum, dk, dv)[: len(self.maps)]
        given = zip(self.maps, tensors, strict=True)
        maps = [maps.at(x.data_ptr()) for maps, x in given]
        if self.n_splits == 1:
            self.differentiate(counter, dk, dv, maps=maps)
        else:
            parts = torch.empty(self.parts_shape, dtype=torch.float32, device=device)
            self.differentiate(counter, *parts.unbind(), maps=maps)
            self.sum(parts, dk, dv)
        self.convert(dq_sum, dq)


_backward = functools.lru_cache(maxsize=PLANS)(Backward)
