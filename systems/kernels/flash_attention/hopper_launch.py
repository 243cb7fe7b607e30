"""FlashAttention on Hopper, launched: `flash_forward` of tensors that `why_not` has nothing against.

What a launch needs beside the tensors' contents is kept between calls: descriptors for the copy
engine by address and layout, the compiled kernel by what is constant in it. At short lengths the
host decides how long a call takes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import on
from systems.kernels.flash_attention.configurations import heads_in_l2, splits
from systems.kernels.flash_attention.launch import (
    LOG2E,
    _combine,
    _empty_like,
    _heads,
    _multiprocessors,
    _parts,
    _positive_scale,
)

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 64  # queries of a consumer
ALIGNMENT = 16  # bytes, of what the copy engine reads: addresses and strides


class HopperTile(NamedTuple):
    """How the forward kernel is cut.

    consumers: 2 or 3 warpgroups of 64 queries each. block_k: keys of a tile, 64 or 128.
    stages: tiles of keys, and of values, in shared memory.
    registers, producer_registers: of a thread. The four warps of consumer 0 get what is left of
        512 for a warp of each group, the producer's counted as a whole group.
    """

    consumers: int
    block_k: int
    stages: int
    registers: int
    producer_registers: int
    mode: str = "dynamic"
    ping_pong: bool = False
    group: int = 0


# By head_dim. Registers are full at head_dim 64, shared memory at 128.
FORWARD = {64: HopperTile(3, 128, 3, 160, 32), 128: HopperTile(2, 128, 2, 240, 24)}


def why_not(q: Tensor) -> str | None:
    """Why the Hopper kernel does not take attention of q, or None if it does."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "flash_hopper needs a Hopper GPU (compute capability 9.0)"
    if q.dtype not in DTYPES or q.shape[-1] not in FORWARD:
        return (
            f"flash_hopper takes {', '.join(map(str, DTYPES))} and head_dim "
            f"{', '.join(map(str, FORWARD))}, not {q.dtype} and {q.shape[-1]}"
        )
    return None


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    tile: HopperTile | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`launch.flash_forward` on Hopper: the same arguments and results.

    Args:
        q, k, v: bfloat16 or float16, head_dim 64 or 128. What the copy engine cannot read, for its
            address or strides, is copied first.
        tile: by default that of FORWARD.
        n_splits: ranges of keys; by default `configurations.splits`.
    """
    out = _empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[-2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, scale = _positive_scale(q, scale)
    q, k, v, rows = _readable(q), _readable(k), _readable(v), _heads(out)
    batch, heads, n_queries, head_dim = q.shape
    n_keys = k.shape[2]
    tile = tile or FORWARD[head_dim]
    n_programs = batch * heads
    n_blocks = -(-n_queries // (ROWS * tile.consumers))
    n_tiles = -(-(min(n_queries, n_keys) if is_causal else n_keys) // tile.block_k)
    multiprocessors = _multiprocessors(q.device)
    if n_splits is None:
        n_splits = splits(n_programs * n_blocks, n_tiles, multiprocessors)
    tiles_a_split = -(-n_tiles // min(n_splits, n_tiles))
    n_splits = -(-n_tiles // tiles_a_split)
    parts, part_lse = lse, lse
    if n_splits > 1:
        parts = _parts(n_splits, rows)
        part_lse = torch.empty((n_splits, *lse.shape), dtype=torch.float32, device=q.device)
    n_work = n_programs * n_blocks * n_splits
    arguments = (
        _descriptor(q, ROWS), _descriptor(k, tile.block_k), _descriptor(v, tile.block_k),
        _descriptor(rows, ROWS), parts, part_lse, _counters(q.device),
        n_work, n_programs, heads, n_queries, n_keys, tiles_a_split * tile.block_k,
        min(tile.group, n_programs) or heads_in_l2(n_keys, head_dim, k.itemsize, n_programs), scale * LOG2E,
    )  # fmt: skip
    constants = (
        tile.consumers, tile.block_k, head_dim, is_causal,
        is_causal or n_keys % tile.block_k != 0, tile.stages, n_splits > 1, tile.ping_pong, tile.mode == "dynamic",
        tile.registers, tile.producer_registers,
    )  # fmt: skip
    with on(q.device):
        _launch(q, n_work if tile.mode == "plain" else min(n_work, multiprocessors), arguments, constants)
        if n_splits > 1:
            _combine(parts, part_lse, rows, lse)
    return out, lse


_compiled: dict[Any, Any] = {}


def _launch(q: Tensor, programs: int, arguments: tuple[Any, ...], constants: Any) -> None:
    """The kernel as it was compiled for these constants, past the launcher's look at arguments.

    All that it would look at is the same for equal keys: numbers are not specialised, addresses
    are aligned, descriptors differ in what is not compiled in.
    """
    key = (q.device.index, q.dtype, constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*arguments, *constants)
        return
    from systems.kernels.flash_attention.hopper_forward import hopper_forward_kernel

    _compiled[key] = hopper_forward_kernel[programs,](*arguments, *constants, num_warps=4)


_counters_of: dict[tuple[int, int], Tensor] = {}


def _counters(device: torch.device) -> Tensor:
    """int32 (2,), zero between launches: each launch leaves it so, and launches on one stream follow
    one another. A graph may be replayed on any, so it gets its own, zeroed in it."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    made = _counters_of.get((device.index, stream))
    if made is None:
        made = torch.zeros(2, dtype=torch.int32, device=device)
        _counters_of[device.index, stream] = made
    return made


def _readable(x: Tensor) -> Tensor:
    """(batch, heads, rows, head_dim) of (..., rows, head_dim), a copy where the engine needs one."""
    x = _heads(x)
    step = ALIGNMENT // x.itemsize
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(
        length == 1 or (stride > 0 and stride % step == 0)
        for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    )
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


class _Address(NamedTuple):
    """What a descriptor asks of a tensor. It does not keep the memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _descriptor(x: Tensor, rows: int) -> Any:
    """Of blocks (1, 1, rows, head_dim) of x, (batch, heads, n, head_dim)."""
    return _descriptor_of(x.data_ptr(), x.dtype, x.shape, x.stride(), rows)


@functools.lru_cache(maxsize=4096)
def _descriptor_of(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # A dimension of one row has a stride that nobody uses, and that may be none to the engine.
    used = [s if n > 1 else shape[-1] for n, s in zip(shape[:3], strides[:3], strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    base = _Address(address, dtype)
    return TensorDescriptor(base, list(shape), [*used, 1], [1, 1, rows, shape[-1]], layout)
