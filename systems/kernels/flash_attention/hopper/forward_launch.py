"""Launch the forward pass of attention with the Hopper kernels.

With short sequences, most of the time is host overhead. To reduce this overhead, launch plans
(prepared kernel launches) are cached for each combination of shapes, strides, dtype and options.
TMA descriptors are cached by address.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import is_hopper, multiprocessors, on
from systems.kernels.flash_attention.hopper.head_groups import (
    balanced_group,
    even_sizes,
    tiles_of_blocks,
)
from systems.kernels.flash_attention.hopper.kernel_options import KernelOptions, kernel_options
from systems.kernels.flash_attention.hopper.packed_order import PackedOrder
from systems.kernels.flash_attention.hopper.splits import forward_splits
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.triton.base_plan import (
    MAX_SIMPLE_SOFTCAP,
    PackedSizes,
    packed_sizes,
    softcap_form,
)
from systems.kernels.flash_attention.triton.memory_bound_launch import combine_launch
from systems.kernels.flash_attention.triton.tile_table import MAX_ROW_STRIDE
from systems.kernels.flash_attention.triton.work_splits import heads_in_l2, split_tiles
from systems.kernels.flash_attention.validation import MAX_PLANS, check_kernel_inputs, signature
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant
from systems.kernels.kernel_launch import Launch
from systems.kernels.tensor_maps import TensorMaps

# Shorter heads form groups as if they had this number of keys. The first blocks of a group read the
# keys and values of all its heads from memory at the same time. With larger groups, this takes
# longer than the matmuls.
MIN_GROUP_KEYS = 2048
HOPPER_DTYPES = (torch.bfloat16, torch.float16)
ROWS = 64  # number of queries per consumer
COPIED_COLUMNS = 64  # columns that a TMA copy loads if keys and values share a ring
UNIT = 8  # number of 16-bit elements in 16 bytes, of which all strides that TMA takes are multiples
TMA_ALIGNMENT = 16  # required alignment of addresses and strides, in bytes


class HopperTile(NamedTuple):
    """Tile sizes and register budgets of the forward kernel.

    A program of the kernel has 2 or 3 consumer warpgroups, which compute attention, and a producer
    warp, which loads data.

    Fields:
        consumers: number of consumer warpgroups, 2 or 3. Each of them processes 64 queries.
        block_k: number of keys per tile, 64 or 128.
        stages: number of slots in shared memory for tiles of keys, and also number of slots for
            tiles of values. With shares_ring, it is the number of slots for both together.
        registers: registers per thread (setmaxnreg) of each consumer except consumer 0.
        producer_registers: registers per thread of the producer.
        shares_ring: whether keys and values share one ring. Each TMA copy then loads COPIED_COLUMNS
            columns, so that a tile has 192 columns in shared memory and not 256. q, k and v must
            have the same head_dim, 136 to 192.

    Consumer 0 gets the registers that the other warpgroups leave. To compute their number, note
    that the single warp of the producer counts as a whole warpgroup. Triton divides the 65,536
    registers of a multiprocessor evenly among the threads, and rounds down to a multiple of 8. With
    3 consumers, there are 4 warpgroups and 128 registers per thread. With 2 consumers, there are 3
    warpgroups and 168 registers per thread. The registers per thread of all warpgroups therefore
    add up to 4 * 128 = 512 or 3 * 168 = 504.
    """

    consumers: int
    block_k: int
    stages: int
    registers: int
    producer_registers: int
    shares_ring: bool = False


# Tile by `used_columns` of the head dimension. Registers limit the size of a tile at head_dim 64,
# and shared memory at larger ones.
FORWARD = {
    64: HopperTile(3, 128, 3, 160, 32),
    96: HopperTile(2, 128, 2, 240, 24),
    128: HopperTile(2, 128, 2, 240, 24),
    192: HopperTile(2, 128, 3, 240, 24, shares_ring=True),
    256: HopperTile(2, 64, 2, 240, 24),
}
# Tile for causal passes with head_dim 64 and up to SHORT_LENGTH queries. It has blocks of 128
# queries, because blocks of 192 queries compute many masked scores in a short causal pass. Compared
# with blocks of 128, blocks of 192 are 3% slower at 1,024 tokens and 9% faster at 2,048 tokens on
# an H200. With packed sequences of an eighth to all of the longest length, they are 5% slower if
# this is 2,048 tokens and 3% faster if it is 8,192, on an H100.
SHORT = HopperTile(2, 128, 3, 240, 24)
SHORT_LENGTH = 1024
SHORT_LENGTH_PACKED = 2048
# Tile for head_dim above 128 with a head_dim of v of 128, except with packed sequences. On an H100,
# blocks of 128 queries are 1% to 13% slower, with 1,024 to 8,192 causal tokens.
NARROW_VALUES = HopperTile(3, 64, 2, 160, 32)
# Head dimensions of tensors. TMA needs rows of a multiple of 16 bytes. Those below 64 are left to
# `flash_triton`, because the backward kernel for head_dim 64 stores dK and dV without TMA.
HEAD_DIMS = (64, *range(72, 257, 8))
# Head dimensions for packed sequences, whose rows the kernels also write without TMA
PACKED_HEAD_DIMS = (64, 128, 192, 256)
NARROW_VALUE_DIM = 128  # head dimension of v that may be combined with one of q above 128


def forward_tile(
    head_dim: int,
    n_queries: int,
    is_causal: bool,
    is_packed: bool = False,
    value_dim: int | None = None,
) -> HopperTile:
    """Return the tile sizes that are the fastest for the given inputs of the forward pass.

    Args:
        head_dim: head dimension of q and k, one of HEAD_DIMS.
        n_queries: number of queries; of the longest sequence with is_packed.
        value_dim: head dimension of v; that of q by default.
    """
    short_length = SHORT_LENGTH_PACKED if is_packed else SHORT_LENGTH
    if is_causal and n_queries <= short_length and head_dim == 64:
        return SHORT
    if head_dim > 128 and value_dim == NARROW_VALUE_DIM:
        # With packed sequences, three consumers need more registers than there are.
        return FORWARD[256] if is_packed else NARROW_VALUES
    return FORWARD[used_columns(head_dim)]


def unsupported_reason(
    q: Tensor,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    value_dim: int | None = None,
) -> str | None:
    """Return the reason why the Hopper kernels do not support q, or None if they support q.

    Args:
        value_dim: head dimension of v; that of q by default.
        variant, is_packed: see `registry.unsupported_reason`.
    """
    call = q.device, q.dtype, q.shape[-1], variant.softcap, is_packed, value_dim
    if torch.compiler.is_compiling():  # torch.compile warns of lru_cache
        return _unsupported_reason(*call)
    return _cached_reason(*call)


def _unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None,
    is_packed: bool,
    value_dim: int | None = None,
) -> str | None:
    if not is_hopper(device):
        return "flash_hopper needs a Hopper GPU (compute capability 9.0)"
    if softcap is not None and softcap_form(softcap) != 1:
        return f"flash_hopper needs a softcap of at most {MAX_SIMPLE_SOFTCAP}, got {softcap}"
    if is_packed and head_dim not in PACKED_HEAD_DIMS:
        return (
            f"flash_hopper needs head_dim {_listed(PACKED_HEAD_DIMS)} for packed sequences, "
            f"got {head_dim}"
        )
    if value_dim not in (None, head_dim) and (value_dim != NARROW_VALUE_DIM or head_dim <= 128):
        return (
            f"flash_hopper needs v to have the head_dim of q, or {NARROW_VALUE_DIM} if that of q "
            f"is above 128, got {value_dim} for v and {head_dim} for q"
        )
    return hopper_form_reason(dtype, head_dim)


def hopper_form_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the Hopper kernels do not support a dtype or head dimension, or None."""
    if dtype in HOPPER_DTYPES and head_dim in HEAD_DIMS:
        return None
    return (
        f"flash_hopper needs dtype {_listed(HOPPER_DTYPES)} and as head_dim a multiple of 8 from "
        f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, got {dtype} and head_dim {head_dim}"
    )


def _listed(values: Sequence[object]) -> str:
    """Return the values as text, such as "64, 128 or 256"."""
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])])


def kernel_head_dim(head_dim: int) -> int:
    """Return the columns of a tile for this head_dim of the tensors: 64, 128 or 256.

    TMA pads tiles with zeros in shared memory, so the tensors need no padding.

    Args:
        head_dim: one of HEAD_DIMS.
    """
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def used_columns(head_dim: int) -> int:
    """Return the columns of a tile that matmuls use: 64, 96, 128, 192 or 256."""
    columns = kernel_head_dim(head_dim)
    three_quarters = columns // 4 * 3
    return three_quarters if 64 < head_dim <= three_quarters else columns


def copied_columns(head_dim: int, tile: HopperTile) -> int:
    """Return how many columns of a tile each TMA copy of the forward kernel loads."""
    return COPIED_COLUMNS if tile.shares_ring else kernel_head_dim(head_dim)


_cached_reason = functools.lru_cache(maxsize=MAX_PLANS)(_unsupported_reason)


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
    """Compute softmax(q k^T * scale) v, and the log-sum-exp of the scaled scores.

    Uses the Hopper kernels.

    q, k or v is copied first if the kernels do not support its address or strides.

    Args:
        q: (..., heads, n_queries, head_dim), bfloat16 or float16, head_dim one of HEAD_DIMS.
        k, v: (..., heads, n_keys, head_dim), with the dtype, device and leading dimensions of q,
            except that the number of heads may be a divisor of that of q, and the head_dim of v may
            be 128 if that of q is above 128.
        is_causal, scale, variant, packing: see `triton.launch.flash_forward`.
        tile: tile sizes; the result of `forward_tile` by default.
        n_splits: number of ranges into which the keys are split; the result of
            `splits.forward_splits` by default. With packed sequences, with a left bound of the
            mask, and if head_dim is below 128 but not 64, it is 1, and another number is an
            AssertionError.
        reuse_counters: whether to keep the work counters for later calls. These are two integers in
            GPU memory, with which the programs of the kernel share the work. A custom operator must
            pass False: torch.compile may run the operator with the memory pool of a CUDA graph, and
            memory of this pool must not be kept for later calls.

    Returns:
        out, lse: see `triton.launch.flash_forward`.

    Raises:
        ValueError: if the inputs are invalid; the message lists all errors.
        RuntimeError: if the kernels do not support the inputs (see `unsupported_reason`).
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
        dtype: dtype of q, k, v and out.
        shapes: shapes of q, k and v, all (batch, heads, rows, head_dim).
        strides: strides of q, k, v and out, in elements. TMA must support all of them.
        scale: multiplies the scores; None means 1/sqrt(head_dim).
        tile: tile sizes; None means the result of `forward_tile`.
        n_splits: number of ranges into which the keys are split; None means the result of
            `forward_splits`, or 1 if a split is impossible or makes no sense.
        packed: sizes of the packed sequences; None if the sequences are not packed.
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
        tile = tile or forward_tile(head_dim, n_queries, is_causal, False, value_dim)
        assert not tile.shares_ring or (used_columns(head_dim) == 192 and value_dim == head_dim), (
            "a shared ring with a head_dim other than 136 to 192, or another one of v"
        )
        n_programs, q_per_kv = batch * heads, heads // kv_heads
        n_blocks = -(-n_queries // (ROWS * tile.consumers))
        n_tiles = -(-(min(n_queries, n_keys) if is_causal else n_keys) // tile.block_k)
        n_multiprocessors = multiprocessors(device.index)
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
        group = _group(options, shapes, packed, block_q, tile.block_k, n_multiprocessors)
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
        grid = (min(n_work, n_multiprocessors),)
        self.attend = Launch(hopper_forward_kernel, grid, numbers, constants, num_warps=4)
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
    n_multiprocessors: int,
) -> int:
    """Return how many heads of q the kernel processes together.

    It is a multiple of the heads of q for each head of k and v.

    Under a causal mask, large groups are preferred, because their short blocks fill the gaps at the
    end. Keys and values of a group fit in the L2 cache, if those of one head do. Heads with fewer
    than MIN_GROUP_KEYS keys count as heads with that many. Groups down to a quarter of the largest
    are tried, which is enough to find a balanced one. Without a causal mask, the smallest
    group that gives every multiprocessor a block is preferred. The fewer heads run at the same
    time, the more blocks read the same keys and values, and the less is read from memory.
    """
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = shapes[:2]
    lengths = n_queries, n_keys
    n_heads, q_per_kv = batch * kv_heads, heads // kv_heads
    tiles = tiles_of_blocks(
        options, lengths, packed, block_q, block_k, by_keys=False, n_heads=batch * heads
    )
    longest = n_keys if packed is None else packed.max_keys
    most = heads_in_l2(max(longest, MIN_GROUP_KEYS), head_dim, 2, n_heads)
    if options.constants["IS_CAUSAL"]:
        sizes = even_sizes(n_heads, -(-most // 4), most)[::-1]
    else:
        least = -(-n_multiprocessors // (q_per_kv * len(tiles)))
        sizes = even_sizes(n_heads, least, max(least, most))
    sizes = [q_per_kv * size for size in sizes]
    return balanced_group(tiles, q_per_kv * n_heads, sizes, n_multiprocessors)


_forward_plan = functools.lru_cache(maxsize=MAX_PLANS)(HopperForwardPlan)


def _counters(device: torch.device, reuse_counters: bool) -> Tensor:
    """Return the two work counters of a kernel launch, int32 (2,), with the value zero.

    The programs of the kernel share the work items with these counters, and set them to zero again
    at the end. Launches on one stream run one after another, so all launches on a stream can use
    the same counters.

    A CUDA graph may be replayed on any stream. For this reason, a launch during the capture of a
    graph gets new counters, and the graph owns their memory.

    Args:
        reuse_counters: False to return new counters also when no graph is captured.
    """
    if not reuse_counters or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _stream_counters(device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.lru_cache(maxsize=256)
def _stream_counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def in_units(strides: Sequence[int]) -> list[int]:
    """Return strides in units of 8 elements, see `registers.in_elements`.

    The stride of a dimension of size 1 may be another number. The kernels do not use it.
    """
    return [stride // UNIT for stride in strides]


def tma_compatible(x: Tensor) -> Tensor:
    """Return x reshaped to (batch, heads, rows, head_dim), or a contiguous copy of this tensor.

    The copy is made if TMA or `prepare_kernel` does not support the address or the strides of x.
    """
    x = four_dimensional(x)
    if x.data_ptr() % TMA_ALIGNMENT == 0 and _has_tma_strides(x.shape, x.stride(), x.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=MAX_PLANS)
def _has_tma_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    # The limit MAX_ROW_STRIDE is for `prepare_kernel`, which loads out and dout without TMA.
    return (
        strides[-1] == 1
        and strides[-2] < MAX_ROW_STRIDE
        and all(
            n == 1 or (stride > 0 and stride * itemsize % TMA_ALIGNMENT == 0)
            for n, stride in zip(shape[:-1], strides[:-1], strict=True)
        )
    )


@functools.lru_cache(maxsize=MAX_PLANS)
def row_maps(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int
) -> TensorMaps:
    """Return the TMA descriptors of tensors with the given dtype, shape and strides.

    The tiles have the given numbers of rows of one head and of columns. A tile may extend past the
    last row of its head, or past the last column. The elements outside of the head are read as
    zeros and are not written, whatever follows in memory.

    Args:
        shape: (batch, heads, n_rows, head_dim), with head_dim one of HEAD_DIMS.
        strides: strides in elements.
        rows, columns: size of a tile.
    """
    return TensorMaps(dtype, shape, strides, (1, 1, rows, columns))
