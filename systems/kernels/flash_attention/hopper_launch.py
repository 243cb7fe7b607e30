"""The Hopper forward kernel, launched: `flash_forward` of tensors that `why_not` has nothing against.

Descriptors and the compiled kernel are kept between calls, by what they depend on: at short lengths
the host decides how long a call takes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import on
from systems.kernels.flash_attention.configurations import heads_in_l2
from systems.kernels.flash_attention.launch import (
    LOG2E,
    _combine,
    _empty_like,
    _heads,
    _positive_scale,
    _multiprocessors,
)


class HopperTile(NamedTuple):
    consumers: int
    block_k: int
    stages: int
    registers: int
    producer_registers: int
    ping_pong: bool
    persistent: bool
    group: int = 0


TABLE = {
    64: HopperTile(3, 128, 2, 160, 32, False, True),
    128: HopperTile(2, 128, 2, 240, 24, False, True),
}


class _Pointer(NamedTuple):
    """What a descriptor needs of a tensor, without keeping its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=4096)
def _descriptor(address: int, dtype: torch.dtype, shape: Any, strides: Any, rows: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor(
        _Pointer(address, dtype), list(shape), list(strides), [1, 1, rows, shape[-1]], layout
    )


def _describe(x: Tensor, rows: int) -> Any:
    return _descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), rows)


_compiled: dict[Any, Any] = {}


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None, *,
    tile: HopperTile | None = None, n_splits: int = 1,
) -> tuple[Tensor, Tensor]:
    from systems.kernels.flash_attention.hopper_forward import hopper_forward_kernel

    out = _empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, scale = _positive_scale(q, scale)
    q, k, v, rows = _heads(q), _heads(k), _heads(v), _heads(out)
    batch, heads, n_queries, head_dim = q.shape
    n_keys = k.shape[2]
    t = tile or TABLE[head_dim]
    n_programs = batch * heads
    n_blocks = -(-n_queries // (64 * t.consumers))
    n_seen = min(n_queries, n_keys) if is_causal else n_keys
    n_tiles = -(-n_seen // t.block_k)
    tiles_a_split = -(-n_tiles // min(n_splits, n_tiles))
    n_splits = -(-n_tiles // tiles_a_split)
    parts, part_lse = lse, lse
    if n_splits > 1:
        parts = torch.empty((n_splits, *rows.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((n_splits, *lse.shape), dtype=torch.float32, device=q.device)
    n_work = n_programs * n_blocks * n_splits
    grid = min(n_work, _multiprocessors(q.device)) if t.persistent else n_work
    masked = is_causal or n_keys % t.block_k != 0
    arguments = (
        _describe(q, 64), _describe(k, t.block_k), _describe(v, t.block_k), _describe(rows, 64),
        parts, part_lse, n_work, n_programs, heads, n_queries, n_keys, tiles_a_split * t.block_k,
        min(t.group, n_programs) or heads_in_l2(n_keys, head_dim, k.itemsize, n_programs), scale * LOG2E,
        t.consumers, t.block_k, head_dim, is_causal, masked, t.stages, t.ping_pong, n_splits > 1, True,
        t.registers, t.producer_registers,
    )
    key = (q.device, q.dtype, arguments[14:])
    with on(q.device):
        compiled = _compiled.get(key)
        if compiled is None:
            _compiled[key] = hopper_forward_kernel[grid,](*arguments, num_warps=4)
        else:
            compiled[grid, 1, 1](*arguments)
        if n_splits > 1:
            _combine(parts, part_lse, rows, lse)
    return out, lse
