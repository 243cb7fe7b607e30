"""Launch the forward pass of attention with the Hopper kernels.

With short sequences, most of the time is host overhead. To reduce this overhead, launch plans
(prepared kernel launches) are cached for each combination of shapes, strides, dtype and options,
and the encoded arguments of a launch for each combination of addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from systems.kernels.alignment import ALIGNMENT
from systems.kernels.device import current_stream, multiprocessors, on
from systems.kernels.flash_attention.arguments import check_kernel_inputs
from systems.kernels.flash_attention.call import (
    MAX_PLANS,
    PLAIN,
    Call,
    PackedSizes,
    Packing,
    Shapes,
    signature,
)
from systems.kernels.flash_attention.hopper import support
from systems.kernels.flash_attention.hopper.head_groups import (
    balanced_group,
    even_sizes,
    tiles_of_blocks,
)
from systems.kernels.flash_attention.hopper.kernel_options import KernelOptions, kernel_options
from systems.kernels.flash_attention.hopper.packed_order import PackedOrder
from systems.kernels.flash_attention.hopper.splits import forward_splits
from systems.kernels.flash_attention.hopper.tiles import (
    PACKED_HEAD_DIMS,
    ROWS,
    HopperTile,
    copied_columns,
    forward_tile,
    used_columns,
)
from systems.kernels.flash_attention.hopper.tma_rows import (
    in_units,
    row_maps,
    tma_compatible,
    tma_layout,
)
from systems.kernels.flash_attention.triton.layout import Layout, layout, output_strides
from systems.kernels.flash_attention.triton.memory_bound_launch import combine_launch
from systems.kernels.flash_attention.triton.work_splits import heads_in_l2, split_tiles
from systems.kernels.kernel_launch import Launch, Repeat, Repeats

# Shorter heads form groups as if they had this number of keys. The first blocks of a group read the
# keys and values of all its heads from memory at the same time. With larger groups, this takes
# longer than the matmuls.
MIN_GROUP_KEYS = 2048


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call = PLAIN,
    *,
    tile: HopperTile | None = None,
    n_splits: int | None = None,
    reuse_counters: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v and the log-sum-exp of the scaled scores by Hopper kernels.

    q, k or v is copied first if the kernels do not support its address or strides. The results, and
    the call, are those of `triton.launch.flash_forward`.

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
    if call.scale is not None and call.scale < 0:
        # The kernel uses max(scale * s) = scale * max(s), which needs a scale of at least 0.
        q, call = -q, call._replace(scale=-call.scale)
    plan = _forward_plan(*signature(q, k, v), call.for_plan(), tile, n_splits)
    return plan(q, k, v, call.packing, reuse_counters)


def plan_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> HopperForwardPlan | None:
    """Return the plan of `flash_forward` for such tensors, or None if the scale is negative."""
    if call.scale is not None and call.scale < 0:
        return None
    return _forward_plan(*signature(q, k, v), call, None, None)


class HopperForwardPlan:
    """Prepared kernel launches of `flash_forward` for inputs with fixed properties.

    A call of the plan with q, k and v, the packed sequences, if any, and reuse_counters returns the
    output and its log-sum-exp. It copies q, k and v first if TMA does not support their addresses
    or strides.

    Shapes, strides, dtypes and devices are those of q, k and v, from `call.signature`, and `call`
    is the result of `Call.for_plan`. `out_strides` are by default from `layout.output_strides` for
    q. The others are as given to `flash_forward`.

    Raises:
        ValueError, RuntimeError: as `flash_forward`.
    """

    def __init__(
        self,
        shapes: Shapes,
        strides: Shapes,
        dtypes: tuple[torch.dtype, ...],
        devices: tuple[torch.device, ...],
        call: Call,
        tile: HopperTile | None = None,
        n_splits: int | None = None,
        out_strides: tuple[int, ...] | None = None,
    ):
        check_kernel_inputs(shapes, dtypes, devices)
        dtype, device = dtypes[0], devices[0]
        reason = support.reason_for(device, dtype, shapes[0][-1], shapes[2][-1], call)
        if reason:
            raise RuntimeError(reason)
        from systems.kernels.flash_attention.hopper.forward.kernel import hopper_forward_kernel

        layouts = [tma_layout(*of) for of in zip(shapes, strides, strict=True)]
        self.copies = any(of.is_copy for of in layouts)
        self.call, self.options = call, (call, tile, n_splits)
        # Those of `backward_launch.flash_backward` for this call, by what else they depend on
        self.backward_plans: dict[Any, Any] = {}
        self.device, self.lse_shape = device, shapes[0][:-1]
        self.out_shape = (*self.lse_shape, shapes[2][-1])
        self.out_strides = out_strides or output_strides(shapes[0], strides[0], shapes[2][-1])
        like_out = layout(self.out_shape, self.out_strides)
        (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = (
            x.shape for x in layouts[:2]
        )
        value_dim = layouts[2].head_dim
        self.is_empty = 0 in (*like_out.shape, n_keys)
        if self.is_empty:
            self.copies = False  # nothing to copy
            return
        packed = call.packing
        assert not isinstance(packed, Packing), "a plan depends only on sizes"
        options = kernel_options(call, (n_queries, n_keys), head_dim)
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
        group = _group(options, layouts, packed, block_q, tile.block_k, n_programs_at_once)
        numbers = (
            n_work, n_programs, heads, n_queries, n_keys, n_splits, tiles_per_split * tile.block_k,
            group, *options.bounds,
            *in_units(like_out.strides), *options.scales,
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
            row_maps(dtype, of.shape, of.strides, *size)
            for of, size in zip((*layouts, like_out), tiles, strict=True)
        ]
        rows = n_splits * n_programs * n_queries
        self.partial_sizes = [rows * value_dim, rows]
        self.combine = combine_launch(device, dtype, n_splits, like_out)
        self.repeats = Repeats()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: Any = None,
        reuse_counters: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if self.copies or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            q, k, v = tma_compatible(q), tma_compatible(k), tma_compatible(v)
            plan = _forward_plan(*signature(q, k, v), *self.options, self.out_strides)
            return plan(q, k, v, packing, reuse_counters)
        out = q.new_empty_strided(self.out_shape, self.out_strides)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        if self.is_empty:
            return out.zero_(), lse.fill_(-math.inf)
        with on(self.device):
            stream = current_stream(self.device)
            tensors = [q, k, v, out, lse, _counters(self.device, stream, reuse_counters)]
            if self.n_splits > 1:
                size = sum(self.partial_sizes)
                tensors.append(torch.empty(size, dtype=torch.float32, device=self.device))
            if packing is not None and self.order is not None:
                tensors += [*packing[:2], self.order.allocate(self.device)]
            self.repeats(stream, tensors, lambda: self._launch(*tensors))
        return out, lse

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counters: Tensor,
        *others: Tensor,
    ) -> list[Repeat | None]:  # fmt: skip
        """Launch the kernels. `others` are float32 work space, or starts_q, starts_k and blocks."""
        pairs = zip(self.maps, (q, k, v, out), strict=True)
        maps = [maps.at(x.data_ptr()) for maps, x in pairs]
        unused = [counters] * 3
        if self.n_splits > 1:
            partials, partial_lse = others[0].split(self.partial_sizes)
            return [
                self.attend(out, partials, partial_lse, counters, *unused, maps=maps),
                self.combine(partials, partial_lse, out, lse),
            ]
        before = [] if self.order is None else [self.order(others[0], others[2])]
        sequences = others or unused
        return [*before, self.attend(out, lse, lse, counters, *sequences, maps=maps)]


def _group(
    options: KernelOptions,
    layouts: Sequence[Layout],
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
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = (x.shape for x in layouts[:2])
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


def _counters(device: torch.device, stream: int, reuse_counters: bool) -> Tensor:
    """Return the two work counters of a kernel launch, int32 (2,), with the value zero.

    The kernel sets them to zero again at the end. Launches on one stream run one after another, so
    they can use the same counters.

    A CUDA graph may be replayed on any stream. So a launch during the capture of a graph gets new
    counters, and the graph owns their memory. Without reuse_counters, every call returns new ones.
    """
    if not reuse_counters or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _stream_counters(device, stream)


@functools.lru_cache(maxsize=256)
def _stream_counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)
