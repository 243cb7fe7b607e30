"""The backward pass on Hopper, launched: `flash_backward` of what `hopper_launch` takes forward.

Three launches: `prepare_kernel`, a kernel of one pass for all three gradients, `convert_kernel`;
and one that adds parts of dK and dV where the pass is split over queries, as for few heads.

dQ is added up in an order that changes from run to run, in float32. Equal inputs give equal bits in
`launch.flash_backward`, which computes the scores twice.

As in `hopper_launch`, what a launch needs beside the tensors' contents is kept between calls.
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors, on
from systems.kernels.flash_attention import hopper_launch
from systems.kernels.flash_attention.hopper_launch import _Address, _descriptor, _readable
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.movers import summing
from systems.kernels.flash_attention.plans import LOG2E

BLOCK_K = 128  # keys of an item
TILE = 64  # queries of a step, and rows of every copy


def why_not(q: Tensor, needs_dq: bool = True, needs_dkdv: bool = True) -> str | None:
    """Why the gradients of attention of q are not to be had from here, or None if they are.

    For all three the kernels have been ahead of `launch.flash_backward` where both were measured:
    16 causal heads of 16k on an H200 take 2.5 ms in place of 3.6 with head_dim 64, 4.9 in place of
    6.5 with 128. For some of them they have as much to do, and each of the two passes less.
    """
    if not (needs_dq and needs_dkdv):
        return "flash_hopper has one pass for all gradients; one of flash_triton's two is faster"
    return hopper_launch.why_not(q)


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
        n_splits: ranges of queries; by default `best_splits`.
    """
    gradients = dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    # Copies, if any, live until the launch: the memory of one must not become the next one's.
    q, k, v, out, dout = (four_dimensional(_readable(x)) for x in (q, k, v, out, dout))
    plan = _plan(q.shape, k.shape[2], is_causal, n_splits, q.device.index)
    with on(q.device):
        dq_rows, dk_rows, dv_rows = map(four_dimensional, (dq, dk, dv))
        _launch(plan, q, k, v, out, lse, dout, dq_rows, dk_rows, dv_rows, scale)
    return gradients


class _Plan(NamedTuple):
    """What of a launch depends on shapes alone."""

    n_splits: int
    n_padded: int  # queries of a head, rounded up to whole tiles
    programs: int
    numbers: tuple[int, ...]  # of the kernel's arguments, from n_programs to n_items
    is_causal: bool


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...], n_keys: int, is_causal: bool, n_splits: int | None, device: int
) -> _Plan:
    batch, heads, n_queries, head_dim = shape
    n_programs = batch * heads
    n_blocks = -(-n_keys // BLOCK_K)
    n_tiles = -(-n_queries // TILE)
    n_multiprocessors = multiprocessors(device)
    if n_splits is None:
        n_splits = best_splits(
            n_programs, n_blocks, n_tiles, is_causal, head_dim, n_multiprocessors
        )
    tiles_a_split = -(-n_tiles // min(n_splits, n_tiles))
    n_splits = -(-n_tiles // tiles_a_split)
    n_items = n_splits * n_programs * n_blocks
    # As many heads at a time as have a block for each multiprocessor: more do not fit in the L2
    # cache with what is added to them.
    group = -(-n_multiprocessors // n_blocks)
    return _Plan(
        n_splits,
        n_tiles * TILE,
        n_items if head_dim > 64 else min(n_items, n_multiprocessors),
        (
            n_programs, heads, n_queries, n_keys, n_tiles * TILE, tiles_a_split * TILE, group,
            n_items,
        ),
        is_causal,
    )  # fmt: skip


# A step, from 2.6 and 5.2 ms for 16 causal heads of 16k on an H200. The others are the forward
# pass's (`hopper_launch`): bytes of parts, written and read again, and a kernel that adds them.
STEP_SECONDS = {64: 1.3e-6, 128: 2.6e-6}
PART_BYTES_A_SECOND = 1.2e12
SUM_SECONDS = 6e-6
SPLITS = (1, 2, 3, 4, 6, 8)


@functools.lru_cache(maxsize=1024)
def best_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    head_dim: int,
    multiprocessors: int,
) -> int:
    """Into how many ranges the queries of each block of keys go, of SPLITS the fastest by estimate.

    1 where the blocks fill the multiprocessors twice as it is. Else the items' steps are dealt out
    to the multiprocessor that is free first.

    Args:
        n_programs: batch * heads. n_blocks: of BLOCK_K keys, a head. n_tiles: of TILE queries.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1
    tiles_a_block = BLOCK_K // TILE

    def seconds(n_splits: int) -> float:
        tiles_a_split = -(-n_tiles // n_splits)
        free = [0] * multiprocessors
        for split in range(n_splits):
            end = min(n_tiles, (split + 1) * tiles_a_split)
            for block in range(n_blocks):
                first = max(split * tiles_a_split, block * tiles_a_block * is_causal)
                for _ in range(n_programs):
                    heapq.heapreplace(free, free[0] + max(1, end - first))
        passes = max(free) * STEP_SECONDS[head_dim]
        if n_splits == 1:
            return passes
        part_bytes = 2 * n_programs * n_blocks * BLOCK_K * head_dim * 4
        return passes + 2 * SUM_SECONDS + n_splits * part_bytes / PART_BYTES_A_SECOND

    return min((n for n in SPLITS if n <= n_tiles), key=seconds)


def _launch(
    plan: _Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    from systems.kernels.flash_attention.hopper_backward import backward_kernel
    from systems.kernels.flash_attention.hopper_backward_parts import (
        convert_kernel,
        prepare_kernel,
    )
    from systems.kernels.flash_attention.hopper_backward_wide import wide_backward_kernel

    n_programs, heads, n_queries = plan.numbers[:3]
    head_dim = q.shape[3]
    n_rows = n_programs * plan.n_padded
    work = torch.empty(n_rows * (head_dim + 2), dtype=torch.float32, device=q.device)
    dq_sum, log2_lse, delta = work.split((n_rows * head_dim, n_rows, n_rows))
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    dk_target, dv_target = dk, dv
    if plan.n_splits > 1:
        shape = (2, plan.n_splits, *dk.shape)
        parts = torch.empty(shape, dtype=torch.float32, device=q.device)
        dk_target, dv_target = parts.unbind()

    ends = (heads, n_queries, plan.n_padded)
    constants = (head_dim, TILE)
    _run(
        prepare_kernel, n_rows // TILE, constants,
        (out, dout, lse, log2_lse, delta, dq_sum, counter),
        (*out.stride()[:3], *dout.stride()[:3]), ends,
    )  # fmt: skip
    descriptors = (
        _descriptor(q, TILE), _descriptor(dout, TILE), _descriptor(k, TILE), _descriptor(v, TILE),
        _floats(log2_lse.data_ptr(), (n_rows,)), _floats(delta.data_ptr(), (n_rows,)),
        _floats(dq_sum.data_ptr(), (n_rows * head_dim // TILE, TILE)),
    )  # fmt: skip
    _run(
        wide_backward_kernel if head_dim > 64 else backward_kernel, plan.programs,
        (plan.is_causal,), (counter, dk_target, dv_target),
        (
            0 if plan.n_splits == 1 else dk_target.stride(0), *dk_target.stride()[-4:-1],
            0 if plan.n_splits == 1 else dv_target.stride(0), *dv_target.stride()[-4:-1],
        ),
        (*plan.numbers, scale, scale * LOG2E), descriptors,
    )  # fmt: skip
    if plan.n_splits > 1:
        layouts = layout(dk.shape, dk.stride()), layout(dv.shape, dv.stride())
        summing(q.device, dk.dtype, plan.n_splits, *layouts)(parts, dk, dv)
    _run(convert_kernel, n_rows // TILE, constants, (dq_sum, dq), dq.stride()[:3], (*ends, scale))


_compiled: dict[Any, Any] = {}


def _run(
    kernel: Any,
    programs: int,
    constants: tuple[int | bool, ...],
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    numbers: tuple[int | float, ...],
    descriptors: tuple[Any, ...] = (),
) -> None:
    """Launch, past the look that Triton has at every argument: what it finds out is in the key.

    Strides are specialised, addresses for their alignment. Numbers are not; descriptors differ
    in what is not compiled in.
    """
    arguments = (*descriptors, *tensors, *strides, *numbers, *constants)
    aligned = tuple(x.data_ptr() % 16 == 0 for x in tensors)
    dtypes = tuple(x.dtype for x in tensors)
    read = descriptors[0].base.dtype if descriptors else None
    key = (kernel, tensors[0].device.index, constants, strides, aligned, dtypes, read)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*arguments)
        return
    _compiled[key] = kernel[programs,](*arguments, num_warps=4)


@functools.lru_cache(maxsize=4096)
def _floats(address: int, shape: tuple[int, ...]) -> Any:
    """A descriptor of contiguous float32, in blocks of TILE by TILE or of TILE."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [TILE] * len(shape)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    strides = [TILE, 1] if len(shape) == 2 else [1]
    return TensorDescriptor(_Address(address, torch.float32), list(shape), strides, block, layout)
