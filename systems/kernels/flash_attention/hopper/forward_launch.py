"""FlashAttention on Hopper, launched: `flash_forward` of what `why_not` has nothing against.

At short lengths the host decides how long a call takes. So what a launch needs beside the tensors
is found out once for all that have the same shapes and strides, and a descriptor for the copy
engine made once for an address.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import is_hopper, multiprocessors, on
from systems.kernels.flash_attention.configurations import MAX_ROW_STRIDE, cut, heads_in_l2
from systems.kernels.flash_attention.hopper.splits import forward_splits
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.triton.copy_launch import combining
from systems.kernels.flash_attention.triton.plans import LOG2E, PLANS, check, described
from systems.kernels.launcher import Launch
from systems.kernels.tensor_maps import TensorMaps

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
    return _why_not(q.device, q.dtype, q.shape[-1])


@functools.lru_cache(maxsize=PLANS)
def _why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if not is_hopper(device):
        return "flash_hopper needs a Hopper GPU (compute capability 9.0)"
    if dtype not in DTYPES or head_dim not in FORWARD:
        return (
            f"flash_hopper takes {', '.join(map(str, DTYPES))} and head_dim "
            f"{', '.join(map(str, FORWARD))}, not {dtype} and {head_dim}"
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
        n_splits: ranges of keys; by default `forward_splits`.
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
    if scale is not None and scale < 0:
        q, scale = -q, -scale  # out of a maximum with it, so it is not negative
    # Copies, if any, live until the launch: the memory of one must not become the next one's.
    q, k, v, rows = readable(q), readable(k), readable(v), four_dimensional(out)
    plan = _forward(
        q.device, q.dtype, (q.shape, k.shape), (q.stride(), k.stride(), v.stride(), rows.stride()),
        is_causal, scale, tile, n_splits,
    )  # fmt: skip
    with on(q.device):
        plan(q, k, v, rows, lse, keeps_memory)
    return out, lse


class Forward:
    """The launches of `flash_forward`, of what `readable` makes of tensors of one dtype, shape and
    stride."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        strides: tuple[tuple[int, ...], ...],
        is_causal: bool,
        scale: float | None,
        tile: HopperTile | None,
        n_splits: int | None,
    ):
        from systems.kernels.flash_attention.hopper.forward_kernel import hopper_forward_kernel

        (batch, heads, n_queries, head_dim), n_keys = shapes[0], shapes[1][2]
        tile = tile or forward_tile(head_dim, n_queries, is_causal)
        scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
        n_programs = batch * heads
        n_blocks = -(-n_queries // (ROWS * tile.consumers))
        n_tiles = -(-(min(n_queries, n_keys) if is_causal else n_keys) // tile.block_k)
        n_multiprocessors = multiprocessors(device.index)
        if n_splits is None:
            part_bytes = n_programs * n_queries * head_dim * 4
            n_splits = forward_splits(
                n_programs, n_blocks, n_tiles, is_causal, part_bytes, n_multiprocessors
            )
        n_splits, tiles_a_split = cut(n_tiles, n_splits)
        self.n_splits = n_splits
        n_work = n_programs * n_blocks * n_splits
        numbers = (
            n_work, n_programs, heads, n_queries, n_keys, n_splits, tiles_a_split * tile.block_k,
            heads_in_l2(n_keys, head_dim, 2, n_programs), scale * LOG2E,
        )  # fmt: skip
        constants = {
            "CONSUMERS": tile.consumers, "BLOCK_K": tile.block_k, "HEAD_DIM": head_dim,
            "IS_CAUSAL": is_causal, "MASKED": is_causal or n_keys % tile.block_k != 0,
            "STAGES": tile.stages, "SPLIT": n_splits > 1, "REGISTERS": tile.registers,
            "PRODUCER_REGISTERS": tile.producer_registers,
        }  # fmt: skip
        grid = (min(n_work, n_multiprocessors),)
        self.attend = Launch(hopper_forward_kernel, grid, numbers, constants, num_warps=4)
        self.maps = [
            row_maps(dtype, shape, of, rows)
            for shape, of, rows in zip(
                (shapes[0], shapes[1], shapes[1], shapes[0]), strides,
                (ROWS, tile.block_k, tile.block_k, ROWS), strict=True,
            )
        ]  # fmt: skip
        self.parts_shape = n_splits, *shapes[0]
        self.combine = combining(device, dtype, n_splits, layout(shapes[0], strides[3]))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keeps_memory: bool
    ) -> None:
        counters = _counters(q.device, keeps_memory)
        given = zip(self.maps, (q, k, v, out), strict=True)
        maps = [maps.at(x.data_ptr()) for maps, x in given]
        if self.n_splits == 1:
            self.attend(lse, lse, counters, maps=maps)  # the first is not used
            return
        parts = torch.empty(self.parts_shape, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(self.parts_shape[:-1], dtype=torch.float32, device=q.device)
        self.attend(parts, part_lse, counters, maps=maps)
        self.combine(parts, part_lse, out, lse)


_forward = functools.lru_cache(maxsize=PLANS)(Forward)


_counters_of: dict[tuple[int, int], Tensor] = {}


def _counters(device: torch.device, keeps_memory: bool) -> Tensor:
    """int32 (2,), zero between launches: every launch leaves it so, and those on one stream follow
    one another. A graph may be replayed on any stream: it has its own, which it zeroes."""
    if not keeps_memory or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    place = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    made = _counters_of.get(place)
    if made is None:
        made = _counters_of[place] = torch.zeros(2, dtype=torch.int32, device=device)
    return made


def readable(x: Tensor) -> Tensor:
    """x as the copy engine can read it, of four dimensions; a copy if need be."""
    x = four_dimensional(x)
    if x.data_ptr() % ALIGNMENT == 0 and _has_readable_strides(x.shape, x.stride(), x.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=PLANS)
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


@functools.lru_cache(maxsize=PLANS)
def row_maps(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> TensorMaps:
    """Of tiles of `rows` of (batch, heads, n, head_dim). What of one is past n is zeros when read
    and is not written, though another head's rows may follow in memory."""
    return TensorMaps(dtype, shape, strides, (1, 1, rows, shape[-1]))
