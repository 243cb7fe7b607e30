"""FlashAttention on Hopper, launched: `flash_forward` of what `why_not` has nothing against.

At short lengths the host decides how long a call takes. So what a launch needs beside the tensors'
contents is kept between calls: descriptors for the copy engine by address and layout, the cut into
programs by shape, the compiled kernel by what is constant in it.
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors, on
from systems.kernels.flash_attention.configurations import MAX_ROW_STRIDE, heads_in_l2
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.movers import combining
from systems.kernels.flash_attention.plans import LOG2E, check, described

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 64  # queries of a consumer
ALIGNMENT = 16  # bytes, of what the copy engine reads: addresses and strides


class HopperTile(NamedTuple):
    """How the forward kernel is cut.

    consumers: 2 or 3 warpgroups of 64 queries each. block_k: keys of a tile, 64 or 128.
    stages: tiles of keys, and of values, in shared memory.
    registers, producer_registers: of a thread. A multiprocessor has 512 for one warp of each group,
        the producer's counted as a whole group; consumer 0 gets what the others leave.
    """

    consumers: int
    block_k: int
    stages: int
    registers: int
    producer_registers: int


# By head_dim. Registers are full at 64, shared memory at 128.
FORWARD = {64: HopperTile(3, 128, 3, 160, 32), 128: HopperTile(2, 128, 2, 240, 24)}
# Blocks of 192 queries waste much of a short triangle: 3% on an H200 at 1024, while at 2048 they
# are ahead by 9%.
SHORT = HopperTile(2, 128, 3, 240, 24)
SHORT_LENGTH = 1024


def forward_tile(head_dim: int, n_queries: int, is_causal: bool) -> HopperTile:
    """What is fastest, of head_dim 64 or 128."""
    is_short = is_causal and n_queries <= SHORT_LENGTH and head_dim == 64
    return SHORT if is_short else FORWARD[head_dim]


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
    keeps_memory: bool = True,
) -> tuple[Tensor, Tensor]:
    """`launch.flash_forward` on Hopper: the same arguments, which fit, and results.

    Args:
        q, k, v: bfloat16 or float16, head_dim 64 or 128. What the copy engine cannot read, for its
            address or strides, is copied first.
        tile: by default `forward_tile`.
        n_splits: ranges of keys; by default `best_splits`.
        keeps_memory: 8 bytes a stream, for the next call. Not in an op: torch.compile runs one with
            the memory pool of a CUDA graph, in which it lets nothing live that it does not know.

    Raises:
        ValueError: names all that does not fit.
        RuntimeError: `why_not`.
    """
    check(*described(q, k, v))
    reason = why_not(q)
    if reason:
        raise RuntimeError(reason)
    out = empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[-2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale  # out of a maximum with it, so it is not negative
    tile = tile or forward_tile(q.shape[-1], q.shape[-2], is_causal)
    device = q.device.index
    plan = _plan(q.shape, k.shape[-2], is_causal, tile, n_splits, device)
    parts, part_lse = lse, lse
    if plan.n_splits > 1:
        lead = (plan.n_splits, *q.shape[:-1])
        parts = torch.empty((*lead, q.shape[-1]), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(lead, dtype=torch.float32, device=q.device)
    # Copies, if any, live until the launch: the memory of one must not become the next one's.
    q, k, v, rows = _readable(q), _readable(k), _readable(v), out
    if out.dim() > 4:
        rows = four_dimensional(out)
    arguments = (
        _descriptor(q, ROWS), _descriptor(k, tile.block_k), _descriptor(v, tile.block_k),
        _descriptor(rows, ROWS), parts, part_lse,
    )  # fmt: skip
    if torch.cuda.current_device() == device:
        _launch(device, q.dtype, plan, arguments, scale, keeps_memory)
    else:
        with on(q.device):
            _launch(device, q.dtype, plan, arguments, scale, keeps_memory)
    if plan.n_splits > 1:
        with on(q.device):
            combining(q.device, out.dtype, plan.n_splits, layout(out.shape, out.stride()))(
                parts, part_lse, out, lse
            )
    return out, lse


class _Plan(NamedTuple):
    """What of a launch depends on shapes alone."""

    n_splits: int
    programs: int
    numbers: tuple[int, ...]  # of the kernel's arguments, from n_work to group
    constants: tuple[int | bool, ...]


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    n_keys: int,
    is_causal: bool,
    tile: HopperTile,
    n_splits: int | None,
    device: int,
) -> _Plan:
    *leading, n_queries, head_dim = shape
    n_programs = math.prod(leading)
    heads = leading[-1] if leading else 1
    n_blocks = -(-n_queries // (ROWS * tile.consumers))
    n_tiles = -(-(min(n_queries, n_keys) if is_causal else n_keys) // tile.block_k)
    n_multiprocessors = multiprocessors(device)
    if n_splits is None:
        part_bytes = n_programs * n_queries * head_dim * 4
        n_splits = best_splits(
            n_programs, n_blocks, n_tiles, is_causal, part_bytes, n_multiprocessors
        )
    tiles_a_split = -(-n_tiles // min(n_splits, n_tiles))
    n_splits = -(-n_tiles // tiles_a_split)
    n_work = n_programs * n_blocks * n_splits
    group = heads_in_l2(n_keys, head_dim, 2, n_programs)
    return _Plan(
        n_splits,
        min(n_work, n_multiprocessors),
        (n_work, n_programs, heads, n_queries, n_keys, tiles_a_split * tile.block_k, group),
        (
            tile.consumers, tile.block_k, head_dim, is_causal,
            is_causal or n_keys % tile.block_k != 0, tile.stages, n_splits > 1,
            tile.registers, tile.producer_registers,
        ),
    )  # fmt: skip


# Measured on an H200 with one causal head of 16k, head_dim 64 and 128, for each of SPLITS: a tile
# of keys; bytes of parts, written and read again by `combine_kernel`; that kernel without them.
# Of the 12 times the estimate is off by 8% at most.
TILE_SECONDS = 1.5e-6
PART_BYTES_A_SECOND = 1.2e12
COMBINE_SECONDS = 6e-6
SPLITS = (1, 2, 3, 4, 6, 8)


def best_splits(
    n_programs: int,
    n_blocks: int,
    n_tiles: int,
    is_causal: bool,
    part_bytes: int,
    multiprocessors: int,
) -> int:
    """Over how many programs each block of queries is spread, of SPLITS the fastest by estimate.

    1 where the blocks fill the multiprocessors twice as it is. Else the programs' tiles are dealt
    out as the kernel does it, each to the multiprocessor that is free first.

    Args:
        n_programs: batch * heads. n_blocks: of queries, a head. n_tiles: of keys, the most that a
            block passes over; in a causal pass the others' numbers rise evenly up to it.
        part_bytes: that one split writes.
    """
    if n_programs * n_blocks >= 2 * multiprocessors:
        return 1
    tiles = [n_tiles] * n_blocks
    if is_causal:
        tiles = [-(-(block + 1) * n_tiles // n_blocks) for block in range(n_blocks)]

    def seconds(n_splits: int) -> float:
        tiles_a_split = -(-n_tiles // n_splits)
        free = [0] * multiprocessors
        for split in range(n_splits):
            for n in reversed(tiles):
                mine = max(1, min(tiles_a_split, n - split * tiles_a_split))
                for _ in range(n_programs):
                    heapq.heapreplace(free, free[0] + mine)
        passes = max(free) * TILE_SECONDS
        if n_splits == 1:
            return passes
        return passes + COMBINE_SECONDS + n_splits * part_bytes / PART_BYTES_A_SECOND

    return min((n for n in SPLITS if n <= n_tiles), key=seconds)


_compiled: dict[Any, Any] = {}


def _launch(
    device: int,
    dtype: torch.dtype,
    plan: _Plan,
    arguments: tuple[Any, ...],
    scale: float,
    keeps_memory: bool,
) -> None:
    from triton.runtime import driver

    stream = driver.active.get_current_stream(device)
    counters = _counters(device, stream, keeps_memory)
    arguments = (*arguments, counters, *plan.numbers, scale * LOG2E, *plan.constants)
    # The compiled kernel is launched past the look that Triton has at every argument: all that it
    # finds out is in this key. Numbers are not specialised, addresses are aligned, descriptors
    # differ in what is not compiled in.
    key = (device, dtype, plan.constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[plan.programs, 1, 1](*arguments, stream=stream)
        return
    from systems.kernels.flash_attention.hopper_forward import hopper_forward_kernel

    _compiled[key] = hopper_forward_kernel[plan.programs,](*arguments, num_warps=4)


_counters_of: dict[tuple[int, int], Tensor] = {}


def _counters(device: int, stream: int, keeps_memory: bool) -> Tensor:
    """int32 (2,), zero between launches: every launch leaves it so, and those on one stream follow
    one another. A graph may be replayed on any stream: it has its own, which it zeroes."""
    if not keeps_memory or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=torch.device("cuda", device))
    made = _counters_of.get((device, stream))
    if made is None:
        made = torch.zeros(2, dtype=torch.int32, device=torch.device("cuda", device))
        _counters_of[device, stream] = made
    return made


class _Address(NamedTuple):
    """What a descriptor asks of a tensor. It does not keep the memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _readable(x: Tensor) -> Tensor:
    """x as the copy engine can read it, of four dimensions or fewer; a copy if need be."""
    if x.dim() > 4:
        x = four_dimensional(x)
    if x.data_ptr() % ALIGNMENT == 0 and _has_readable_strides(x.shape, x.stride(), x.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _has_readable_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    # `prepare_kernel` reads the rows of out and dout by addresses of its own.
    return (
        strides[-1] == 1
        and strides[-2] < MAX_ROW_STRIDE
        and all(
            n == 1 or (stride > 0 and stride * itemsize % ALIGNMENT == 0)
            for n, stride in zip(shape[:-1], strides[:-1], strict=True)
        )
    )


def _descriptor(x: Tensor, rows: int) -> Any:
    return _descriptor_of(x.data_ptr(), x.dtype, x.shape, x.stride(), rows)


@functools.lru_cache(maxsize=4096)
def _descriptor_of(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> Any:
    """Of blocks (1, 1, rows, head_dim) of (batch, heads, n, head_dim), 1 for what is not there.

    What of a block is past n is zeros when read and is not written, though another head's rows may
    follow in memory.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    missing = 4 - len(shape)
    sizes = [1] * missing + list(shape)
    # A dimension of one has a stride that nobody uses and that the engine may refuse.
    steps = [0] * missing + list(strides)
    steps = [shape[-1] if n == 1 else step for n, step in zip(sizes[:3], steps[:3], strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    base = _Address(address, dtype)
    return TensorDescriptor(base, sizes, [*steps, 1], [1, 1, rows, shape[-1]], layout)
