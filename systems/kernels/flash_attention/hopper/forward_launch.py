"""Launch the forward pass of attention with the Hopper kernels.

With short sequences, most of the time is host overhead. To reduce this overhead, launch plans
(prepared kernel launches) are cached for each combination of shapes, strides, dtype and options.
TMA descriptors are cached by address.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors, on
from systems.kernels.flash_attention.hopper.head_groups import (
    balanced_group,
    even_sizes,
    tiles_of_blocks,
)
from systems.kernels.flash_attention.hopper.kernel_options import KernelOptions, kernel_options
from systems.kernels.flash_attention.hopper.packed_order import PackedOrder
from systems.kernels.flash_attention.hopper.splits import forward_splits

# The registry finds this function here, too.
from systems.kernels.flash_attention.hopper.support import unsupported_reason as unsupported_reason
from systems.kernels.flash_attention.hopper.tiles import (
    PACKED_HEAD_DIMS,
    ROWS,
    HopperTile,
    copied_columns,
    forward_tile,
    used_columns,
)
from systems.kernels.flash_attention.hopper.tma_rows import in_units, row_maps, tma_compatible
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.triton.base_plan import PackedSizes, packed_sizes
from systems.kernels.flash_attention.triton.memory_bound_launch import combine_launch
from systems.kernels.flash_attention.triton.work_splits import heads_in_l2, split_tiles
from systems.kernels.flash_attention.validation import MAX_PLANS, check_kernel_inputs, signature
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant
from systems.kernels.kernel_launch import Launch

# Shorter heads form groups as if they had this number of keys. The first blocks of a group read the
# keys and values of all its heads from memory at the same time. With larger groups, this takes
# longer than the matmuls.
MIN_GROUP_KEYS = 2048


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: Variant = NO_VARIANT,
    packing: Packing | None = None,
    tile: HopperTile | None = None,
    n_splits: int | None = None,
    reuse_counters: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v and the log-sum-exp of the scaled scores by Hopper kernels.

    q, k or v is copied first if the kernels do not support its address or strides. The results, and
    the arguments that are not listed, are those of `triton.launch.flash_forward`.

    Args:
        q: (..., heads, n_queries, head_dim), bfloat16 or float16, head_dim one of HEAD_DIMS.
        k, v: (..., heads, n_keys, head_dim), with the dtype, device and leading dimensions of q,
            but the number of heads may be a divisor of that of q, and the head_dim of v may be 128
            if that of q is above 128.
        tile: by default from `forward_tile`.
        n_splits: number of ranges into which the keys are split; by default from
            `splits.forward_splits`. With packed sequences, with a left bound of the mask, and if
            head_dim is below 128 but not 64, it is 1, and another number is an AssertionError.
        reuse_counters: whether to keep the work counters for later calls: two integers in GPU
            memory, with which the programs share the work. A custom operator must pass False:
            torch.compile may run it with the memory pool of a CUDA graph, whose memory must not be
            kept for later calls.

    Raises:
        ValueError: if the inputs are invalid; the message lists all errors.
        RuntimeError: if the kernels do not support the inputs (see `support.unsupported_reason`).
    """
    check_kernel_inputs(*signature(q, k, v))
    reason = unsupported_reason(q, variant, packing is not None, v.shape[-1])
    if reason:
        raise RuntimeError(reason)
    out = empty_like(q, v.shape[-1])
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[-2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if scale is not None and scale < 0:
        # The kernel uses max(scale * s) = scale * max(s), which needs a scale of at least 0.
        q, scale = -q, -scale
    # These variables keep copies alive until the launch, so that their memory is not reused.
    q, k, v, rows = tma_compatible(q), tma_compatible(k), tma_compatible(v), four_dimensional(out)
    plan = _forward_plan(
        q.device, q.dtype, (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride(), rows.stride()), is_causal, scale, tile, n_splits,
        variant, packed_sizes(packing),
    )  # fmt: skip
    with on(q.device):
        plan(q, k, v, rows, lse, reuse_counters, packing)
    return out, lse


class HopperForwardPlan:
    """Prepared kernel launches of `flash_forward` for given shapes, strides and dtype.

    A call `plan(q, k, v, out, lse, reuse_counters, packing)` runs the launches.

    Args:
        dtype: of q, k, v and out.
        shapes: shapes of q, k and v, all (batch, heads, rows, head_dim).
        strides: of q, k, v and out, in elements. TMA must support all of them.
        n_splits: ranges into which the keys are split; None for the result of `forward_splits`, or
            1 if a split is impossible or makes no sense.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
        strides: tuple[tuple[int, ...], ...],
        is_causal: bool,
        scale: float | None,
        tile: HopperTile | None,
        n_splits: int | None,
        variant: Variant,
        packed: PackedSizes | None,
    ):
        from systems.kernels.flash_attention.hopper.forward.kernel import hopper_forward_kernel

        (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = shapes[:2]
        value_dim = shapes[2][-1]
        out_shape = (*shapes[0][:3], value_dim)
        options = kernel_options(is_causal, variant, packed, (n_queries, n_keys), scale, head_dim)
        is_causal = options.constants["IS_CAUSAL"] and not options.is_bounded
        if tile is None and packed is not None:
            tile = forward_tile(
                head_dim, packed.max_queries, options.constants["IS_CAUSAL"], True, value_dim
            )
        n_multiprocessors = multiprocessors(device.index)
        tile = tile or forward_tile(
            head_dim, n_queries, is_causal, False, value_dim, batch * heads / n_multiprocessors
        )
        assert not tile.shares_ring or (used_columns(head_dim) == 192 and value_dim == head_dim), (
            "a shared ring with a head_dim other than 136 to 192, or another one of v"
        )
        n_programs, q_per_kv = batch * heads, heads // kv_heads
        n_blocks = -(-n_queries // (ROWS * tile.consumers))
        n_tiles = -(-(min(n_queries, n_keys) if is_causal else n_keys) // tile.block_k)
        # `combine_kernel` reads partial results without padding.
        if (head_dim not in PACKED_HEAD_DIMS and head_dim < 128) or not options.may_split:
            assert n_splits in (None, 1), "n_splits with a padded head_dim, packing or a left bound"
            n_splits = 1
        if n_splits is None:
            partial_bytes = n_programs * n_queries * value_dim * 4
            n_splits = forward_splits(
                n_programs, n_blocks, n_tiles, is_causal, partial_bytes, n_multiprocessors
            )
        n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)
        self.n_splits = n_splits
        self.order: PackedOrder | None = None
        if packed is not None:
            self.order = PackedOrder(
                packed.n_sequences, n_queries, packed.max_queries, ROWS * tile.consumers, False
            )
            n_blocks = self.order.n_blocks
        n_work = n_programs * n_blocks * n_splits
        block_q = ROWS * tile.consumers
        n_programs_at_once = n_multiprocessors * tile.resident
        group = _group(options, shapes, packed, block_q, tile.block_k, n_programs_at_once)
        numbers = (
            n_work, n_programs, heads, n_queries, n_keys, n_splits, tiles_per_split * tile.block_k,
            group, *options.bounds,
            *in_units(strides[3][:3]), *options.scales,
        )  # fmt: skip
        value_columns = value_dim if head_dim > 128 else used_columns(value_dim)
        constants = {
            "CONSUMERS": tile.consumers, "BLOCK_K": tile.block_k,
            "COLUMNS": used_columns(head_dim), "VALUE_COLUMNS": value_columns,
            "MASKED": is_causal or options.is_bounded or n_keys % tile.block_k != 0,
            **options.constants, "STAGES": tile.stages, "SHARED_RING": tile.shares_ring,
            "SPLIT": n_splits > 1, "Q_PER_KV": q_per_kv, "REGISTERS": tile.registers,
            "PRODUCER_REGISTERS": tile.producer_registers,
        }  # fmt: skip
        grid = (min(n_work, n_programs_at_once),)
        self.attend = Launch(hopper_forward_kernel, grid, numbers, constants, **tile.launch_options)
        copied, copied_values = copied_columns(head_dim, tile), copied_columns(value_dim, tile)
        tiles = (
            (ROWS, copied), (tile.block_k, copied), (tile.block_k, copied_values),
            (ROWS, copied_values),
        )  # fmt: skip
        self.maps = [
            row_maps(dtype, shape, of, *size)
            for shape, of, size in zip((*shapes, out_shape), strides, tiles, strict=True)
        ]
        self.partials_shape = n_splits, *out_shape
        self.combine = combine_launch(device, dtype, n_splits, layout(out_shape, strides[3]))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        reuse_counters: bool,
        packing: Packing | None = None,
    ) -> None:
        counters = _counters(q.device, reuse_counters)
        pairs = zip(self.maps, (q, k, v, out), strict=True)
        maps = [maps.at(x.data_ptr()) for maps, x in pairs]
        # Tensors that the kernel does not use are replaced by others.
        sequences = [counters] * 3
        if packing is not None and self.order is not None:
            sequences = [*packing[:2], self.order(packing.starts_q)]
        if self.n_splits == 1:
            self.attend(out, lse, lse, counters, *sequences, maps=maps)
            return
        partials = torch.empty(self.partials_shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(self.partials_shape[:-1], dtype=torch.float32, device=q.device)
        self.attend(out, partials, partial_lse, counters, *sequences, maps=maps)
        self.combine(partials, partial_lse, out, lse)


def _group(
    options: KernelOptions,
    shapes: tuple[tuple[int, ...], ...],
    packed: PackedSizes | None,
    block_q: int,
    block_k: int,
    n_programs_at_once: int,
) -> int:
    """Return how many heads of q the kernel processes together.

    It is a multiple of the heads of q for each head of k and v.

    Under a causal mask, large groups are preferred, because their short blocks fill the gaps at the
    end. Keys and values of a group fit in the L2 cache, if those of one head do. Heads with fewer
    than MIN_GROUP_KEYS keys count as heads with that many. Groups down to a quarter of the largest
    are tried, which is enough to find a balanced one. Without a causal mask, the smallest
    group that gives every running program a block is preferred. The fewer heads run at the same
    time, the more blocks read the same keys and values, and the less is read from memory.

    The longest blocks of all packed sequences start first, so the keys and values of all sequences
    of a head are in use at the same time. In trials on H100s, groups for which only the longest
    sequence was counted took 1.04 to 1.5 times as long with a causal mask, head_dim 128 and 32,768
    tokens in sequences of 1,024 to 8,192 (in turn) or of 1,024 each (one after another).
    """
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = shapes[:2]
    lengths = n_queries, n_keys
    n_heads, q_per_kv = batch * kv_heads, heads // kv_heads
    tiles = tiles_of_blocks(
        options, lengths, packed, block_q, block_k, by_keys=False, n_heads=batch * heads
    )
    most = heads_in_l2(max(n_keys, MIN_GROUP_KEYS), head_dim, 2, n_heads)
    if options.constants["IS_CAUSAL"]:
        sizes = even_sizes(n_heads, -(-most // 4), most)[::-1]
    else:
        least = -(-n_programs_at_once // (q_per_kv * len(tiles)))
        sizes = even_sizes(n_heads, least, max(least, most))
    sizes = [q_per_kv * size for size in sizes]
    return balanced_group(tiles, q_per_kv * n_heads, sizes, n_programs_at_once)


_forward_plan = functools.lru_cache(maxsize=MAX_PLANS)(HopperForwardPlan)


def _counters(device: torch.device, reuse_counters: bool) -> Tensor:
    """Return the two work counters of a kernel launch, int32 (2,), with the value zero.

    The programs of the kernel share the work items with these counters, and set them to zero again
    at the end. Launches on one stream run one after another, so all launches on a stream can use
    the same counters.

    A CUDA graph may be replayed on any stream. For this reason, a launch during the capture of a
    graph gets new counters, and the graph owns their memory. Without reuse_counters, every call
    returns new counters.
    """
    if not reuse_counters or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _stream_counters(device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.lru_cache(maxsize=256)
def _stream_counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)
