"""Launch the backward pass of attention with the Hopper kernels.

A backward pass launches three kernels. `prepare_kernel` prepares the inputs of the next kernel.
`backward_kernel` (head_dim 64), `d128_backward_kernel` (72 to 128), `d192_backward_kernel` (136 to
192, see `d192_supports`) or `d256_backward_kernel` (136 to 256) computes all three gradients,
with dQ as a float32 sum. `convert_kernel` converts this sum to dQ. If there are too few heads to
fill the GPU, the queries are split into ranges. In this case, a fourth kernel adds the dK and dV of
all ranges.

The float32 sum of dQ is computed in an order that changes from call to call, so the rounding errors
of dQ also change. On request, the order is fixed (see the module `backward.turns`), and the queries
are not split.

A launch plan holds prepared kernel launches. It is cached for each combination of shapes, strides,
dtype and options.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors, on
from systems.kernels.flash_attention.hopper import support
from systems.kernels.flash_attention.hopper.head_groups import (
    balanced_group,
    even_sizes,
    tiles_of_blocks,
)
from systems.kernels.flash_attention.hopper.kernel_options import KernelOptions, kernel_options
from systems.kernels.flash_attention.hopper.packed_order import PackedOrder
from systems.kernels.flash_attention.hopper.splits import BLOCK_Q, backward_splits, block_of_keys
from systems.kernels.flash_attention.hopper.tiles import (
    COPIED_COLUMNS,
    PACKED_HEAD_DIMS,
    kernel_head_dim,
    used_columns,
)
from systems.kernels.flash_attention.hopper.tma_rows import in_units, row_maps, tma_compatible
from systems.kernels.flash_attention.layout import empty_like, four_dimensional, layout
from systems.kernels.flash_attention.triton.base_plan import PackedSizes, packed_sizes
from systems.kernels.flash_attention.triton.memory_bound_launch import sum_launch
from systems.kernels.flash_attention.triton.work_splits import L2_BYTES, split_tiles
from systems.kernels.flash_attention.validation import MAX_PLANS
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant
from systems.kernels.kernel_launch import Launch
from systems.kernels.tensor_maps import TensorMaps

TILE = BLOCK_Q  # number of rows of every TMA copy, except those of keys in `backward.d192`
# Number of columns and of keys of a block of `backward.d192`, and of keys of its TMA copies
D192_COLUMNS, D192_KEYS, D192_COPIED_KEYS = 192, 96, 32
# Time of a step of `backward.d192`, in steps of `backward.d256`, which has 64 keys instead of 96.
# In a trial on an H100 (24 heads of 1,024 tokens, no mask), 3 blocks of 64 keys per multiprocessor
# took 0.247 ms, and 2 blocks of 96 keys 0.200 ms: (0.200 / 2) / (0.247 / 3) = 1.21.
D192_STEP_TIME = 1.2
MAX_STORED_COLUMNS = 128  # largest number of columns of dK and dV that a TMA copy stores
# Size of an element of a row of Q, dO and the float32 sum of dQ together, in bytes
ROW_BYTES = 2 + 2 + 4
# If the data of a group of heads do not fit in the L2 cache, at least so many blocks of each head
# run at the same time, so that they load most of its data from this cache.
SHARING_BLOCKS = 16
MAX_DETERMINISTIC_HEAD_DIM = 128  # largest head_dim for which additions can have a fixed order


def unsupported_reason(
    q: Tensor,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    value_dim: int | None = None,
) -> str | None:
    """Return the reason why the Hopper backward kernels should not be used, or None if they should.

    There is a reason if the Hopper kernels do not support q, or if not all gradients are needed.

    The Hopper kernels always compute all three gradients. If all of them are needed, the Hopper
    kernels are faster than `triton.launch.flash_backward`. Measured with 16 causal heads of 16k
    tokens on an H200, they take 2.5 ms instead of 3.6 ms with head_dim 64, and 4.7 ms instead of
    6.5 ms with head_dim 128. If only some gradients are needed, the Triton kernels do less work.
    `variant` and `is_packed`: see `registry.unsupported_reason`. The head dimension of v is that of
    q by default.
    """
    if not (needs_dq and needs_dkdv):
        return (
            "flash_hopper always computes all gradients; if only some are needed, flash_triton is "
            "faster"
        )
    return support.unsupported_reason(q, variant, is_packed, value_dim)


def d192_supports(
    dtype: torch.dtype, head_dim: int, value_dim: int, constants: dict[str, bool]
) -> bool:
    """Return whether `d192_backward_kernel` can compute the gradients.

    Its consumers compute different matrices. Those of `d256_backward_kernel` compute different
    columns, and it supports more inputs. `d192_backward_kernel` rounds probabilities to the dtype
    before it computes dQ and dK. In float16, probabilities below 6e-5 lose precision, and those
    below 3e-8 become 0. A large gradient of the output would make the errors of dQ and dK large, so
    float16 is left to `d256_backward_kernel`. `constants` are described by `KernelOptions`.
    """
    has_head_dim = 128 < head_dim <= 192 and value_dim == head_dim
    has_feature = constants["PACKED"] or constants["SOFTCAP"]
    return dtype == torch.bfloat16 and has_head_dim and not has_feature


def high_columns(head_dim: int) -> int:
    """Return how many columns past the first 128 `d256_backward_kernel` uses."""
    return 0 if head_dim <= 128 else 64 if head_dim <= 192 else 128


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
    variant: Variant = NO_VARIANT,
    packing: Packing | None = None,
    dlse: Tensor | None = None,
    n_splits: int | None = None,
    q_per_item: int | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention with respect to q, k and v with the Hopper kernels.

    q, k, v, out or dout is copied first if the kernels do not support its address or strides. The
    inputs and options are those of `forward_launch.flash_forward`, and out and lse its results.

    Args:
        lse: contiguous.
        dout: gradient of out, with out's shape and dtype.
        dlse: float32, with the shape of lse; None for zeros.
        n_splits: number of ranges into which the queries are split; by default from
            `splits.backward_splits`. With packed sequences, a left bound of the mask, a head_dim
            other than 64, 128, 192 or 256, or another head_dim of v, it is 1, and another number is
            an AssertionError.
        deterministic: whether gradients are bitwise equal in every call. n_splits must then be 1 or
            None, and head_dim at most `MAX_DETERMINISTIC_HEAD_DIM`.

    Returns:
        dq, dk, dv: shapes and dtype of q, k and v. Without `deterministic`, rounding errors of dq
            differ from call to call.

    Raises:
        ValueError: if q, k, v, out and dout do not have the same dtype, or head_dim is too large
            for `deterministic`.
    """
    if not q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype:
        dtypes = [x.dtype for x in (q, k, v, out, dout)]
        raise ValueError(f"q, k, v, out and dout must have the same dtype, got {dtypes}")
    if deterministic and q.shape[-1] > MAX_DETERMINISTIC_HEAD_DIM:
        raise ValueError(
            f"deterministic needs a head_dim of at most {MAX_DETERMINISTIC_HEAD_DIM}, got "
            f"{q.shape[-1]}"
        )
    gradients = empty_like(q), empty_like(k), empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    # These variables keep copies alive until the launch, so that their memory is not reused.
    tensors = [tma_compatible(x) for x in (q, k, v, out, dout)]
    tensors += [four_dimensional(x) for x in gradients]
    shapes, strides = tuple([x.shape for x in tensors[:3]]), tuple([x.stride() for x in tensors])
    plan = _backward_plan(
        q.device, q.dtype, shapes, strides, is_causal, scale, n_splits, q_per_item, dlse is not None,
        variant, packed_sizes(packing), deterministic,
    )  # fmt: skip
    with on(q.device):
        plan(packing, lse, None if dlse is None else dlse.contiguous(), *tensors)
    return gradients


class HopperBackwardPlan:
    """Prepared kernel launches of `flash_backward` for given shapes, strides and dtype.

    A call `plan(packing, lse, dlse, q, k, v, out, dout, dq, dk, dv)` runs the launches.

    Args:
        dtype: of all tensors except lse.
        shapes: shapes of q, k and v, all (batch, heads, rows, head_dim).
        strides: of q, k, v, out, dout, dq, dk and dv, in elements. TMA must support all of them.
        n_splits: ranges into which the queries are split; None for the result of `backward_splits`,
            or 1 if a split is impossible or makes no sense.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shapes: tuple[tuple[int, ...], ...],
        strides: tuple[tuple[int, ...], ...],
        is_causal: bool,
        scale: float | None,
        n_splits: int | None,
        q_per_item: int | None,
        has_dlse: bool,
        variant: Variant,
        packed: PackedSizes | None,
        deterministic: bool,
    ):
        (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = shapes[:2]
        value_dim = shapes[2][-1]
        options = kernel_options(is_causal, variant, packed, (n_queries, n_keys), scale, head_dim)
        q_per_kv = heads // kv_heads
        self.q_per_item = q_per_item or q_per_kv
        n_programs = batch * heads // self.q_per_item
        block_k = block_of_keys(head_dim)
        n_blocks = -(-n_keys // block_k)
        n_tiles = -(-n_queries // TILE)
        n_padded = n_tiles * TILE
        n_multiprocessors = multiprocessors(device.index)
        self.head_dim = kernel_head_dim(head_dim)
        if deterministic or not options.may_split:
            assert n_splits in (None, 1), "n_splits with packing, a left bound or a fixed order"
            n_splits = 1
        if n_splits is None:
            mask_is_causal = options.constants["IS_CAUSAL"] and not options.is_bounded
            n_splits = backward_splits(
                n_programs, n_blocks, n_tiles, mask_is_causal, kernel_head_dim(head_dim),
                n_multiprocessors, self.q_per_item,
            )
        self.n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)

        def most_blocks(keys: int) -> int:
            """Return how many blocks of `keys` keys the busiest multiprocessor gets."""
            return -(-n_programs * -(-n_keys // keys) // n_multiprocessors)

        self.uses_d192 = d192_supports(
            dtype, head_dim, value_dim, options.constants
        ) and D192_STEP_TIME * most_blocks(D192_KEYS) <= most_blocks(block_k)
        self.dq_columns = self.head_dim  # number of columns of the float32 sum of dQ
        if self.uses_d192:
            self.dq_columns = D192_COLUMNS
            block_k = D192_KEYS
            n_blocks = -(-n_keys // block_k)
        self.order: PackedOrder | None = None
        if packed is not None:
            self.order = PackedOrder(
                packed.n_sequences, n_keys, packed.max_keys, block_k, from_end=not deterministic
            )
            n_blocks = self.order.n_blocks
            n_padded = (n_queries + packed.n_sequences * TILE) // TILE * TILE
        n_items = self.n_splits * n_programs * n_blocks
        self.n_rows = batch * heads * n_padded
        self.is_summed = self.n_splits > 1 or self.q_per_item < q_per_kv
        # Sums of dK and dV, and two counters for each key, see `backward.sums`
        columns = used_columns(head_dim) + used_columns(value_dim)
        self.n_counters = 2 * batch * kv_heads * n_keys
        self.n_sums = batch * kv_heads * n_keys * (columns + 2) if self.is_summed else 0
        ends = heads, n_queries, n_padded, packed.n_sequences if packed else 1
        self._make_row_launches(
            strides, ends, options.scale, (head_dim, value_dim), packed is not None, has_dlse
        )
        if deterministic:
            # The long blocks of a head come last. If a block has the queries of several heads, the
            # fewer heads of k end together, the fewer multiprocessors wait.
            group = 1 if q_per_kv > 1 else -(-n_multiprocessors // n_blocks)
        else:
            group = self._group(options, shapes, packed, block_k, n_multiprocessors)
        numbers = (
            n_programs, heads // self.q_per_item, n_queries, n_keys, n_padded, self.n_splits,
            tiles_per_split * TILE, group, n_items, *options.bounds, options.scale,
            *options.scales,
        )  # fmt: skip
        grid = (min(n_items, n_multiprocessors) if self.head_dim == 64 else n_items,)
        # A counter for each head of q and key, see `backward.turns`
        self.n_turns = batch * heads * n_keys if deterministic else 0
        self._make_main_launch(dtype, shapes, strides, options.constants, numbers, grid)

    def _group(
        self,
        options: KernelOptions,
        shapes: tuple[tuple[int, ...], ...],
        packed: PackedSizes | None,
        block_k: int,
        n_multiprocessors: int,
    ) -> int:
        """Return how many heads of k and v the kernel processes together.

        Without packed sequences, a group has at least enough heads to give every multiprocessor a
        block, if there are so many. Small groups are preferred, because dQ, in float32, takes much
        of the L2 cache.

        With packed sequences, a group has at most as many heads as fit in the L2 cache, because
        blocks of a head that run at the same time may have no data in common. In a trial on an H100
        (16 sequences of 512 tokens, 16 heads, head_dim 128), larger groups took 1.3 times as long.
        """
        (batch, heads, n_queries, _), (_, kv_heads, n_keys, _) = shapes[:2]
        n_heads = batch * heads // self.q_per_item
        tiles = tiles_of_blocks(
            options, (n_queries, n_keys), packed, block_k, TILE, by_keys=True, n_heads=n_heads
        )
        head_bytes = self.q_per_item * n_queries * self.dq_columns * ROW_BYTES
        if packed is not None:
            least, most = 1, max(1, L2_BYTES // head_bytes)
        else:
            least = -(-n_multiprocessors // len(tiles))
            most = max(least, L2_BYTES // head_bytes, n_multiprocessors // SHARING_BLOCKS)
        sizes = even_sizes(n_heads, least, most)
        return balanced_group([self.q_per_item * n for n in tiles], n_heads, sizes, n_multiprocessors)

    def _make_row_launches(
        self,
        strides: tuple[tuple[int, ...], ...],
        ends: tuple[int, int, int, int],
        scale: float,
        head_dims: tuple[int, int],
        is_packed: bool,
        has_dlse: bool,
    ) -> None:
        """Create the launches of `prepare_kernel` and `convert_kernel`.

        The strides are those of q, k, v, out, dout, dq, dk and dv, in elements. `ends` has n_heads,
        n_queries, n_padded and n_sequences, and `head_dims` the head dimensions of q and of v.
        """
        from systems.kernels.flash_attention.hopper.backward.prepare import prepare_kernel
        from systems.kernels.flash_attention.hopper.backward.round_dq import convert_kernel

        out, dout, dq = strides[3:6]
        grid = (self.n_rows // TILE,)
        head_dim, value_dim = head_dims
        constants = {
            "HEAD_DIM": value_dim, "COLUMNS": kernel_head_dim(value_dim), "ROWS": TILE,
            "PACKED": is_packed, "HAS_DLSE": has_dlse, "DQ_COLUMNS": self.dq_columns,
        }  # fmt: skip
        numbers = *out[:3], *dout[:3], *ends, self.n_sums
        self.prepare = Launch(prepare_kernel, grid, numbers, constants)
        constants = {
            "HEAD_DIM": head_dim, "COLUMNS": self.head_dim, "DQ_COLUMNS": self.dq_columns,
            "ROWS": TILE, "PACKED": is_packed,
        }  # fmt: skip
        self.convert = Launch(convert_kernel, grid, (*dq[:3], *ends, scale), constants)

    def _make_main_launch(
        self,
        dtype: torch.dtype,
        shapes: tuple[tuple[int, ...], ...],
        strides: tuple[tuple[int, ...], ...],
        constants: dict[str, bool],
        numbers: tuple[float, ...],
        grid: tuple[int],
    ) -> None:
        """Create the launch of the kernel that computes the gradients, and its TMA descriptors.

        The docstring of this module lists the kernels.

        The shapes are those of q, k and v, all (batch, heads, rows, head_dim), and the strides are
        those of q, k, v, out, dout, dq, dk and dv, in elements. `constants` has the values of the
        constexpr parameters from IS_CAUSAL to SOFTCAP, and `numbers` those of the int and float
        parameters after the strides.
        """
        from systems.kernels.flash_attention.hopper.backward.d64 import backward_kernel
        from systems.kernels.flash_attention.hopper.backward.d128 import d128_backward_kernel
        from systems.kernels.flash_attention.hopper.backward.d192 import d192_backward_kernel
        from systems.kernels.flash_attention.hopper.backward.d256 import d256_backward_kernel

        q, k, v, _, dout, _, dk, dv = strides
        of_q, of_k, of_v = shapes
        of_out = (*of_q[:3], of_v[-1])
        row_map = TensorMaps(torch.float32, (self.n_rows,), (1,), (TILE,))
        dq_tiles = (self.n_rows * self.dq_columns // TILE, TILE)
        columns, value_columns = self.head_dim, kernel_head_dim(of_v[-1])
        stored, rows = min(columns, MAX_STORED_COLUMNS), TILE
        if self.uses_d192:
            columns = value_columns = stored = COPIED_COLUMNS
            rows = D192_COPIED_KEYS
        # In the order of the kernels' arguments: q, dout, k, v, lse, -delta, dq
        self.maps = [
            row_maps(dtype, of_q, q, TILE, columns),
            row_maps(dtype, of_out, dout, TILE, value_columns),
            row_maps(dtype, of_k, k, rows, columns),
            row_maps(dtype, of_v, v, rows, value_columns),
            row_map,
            row_map,
            TensorMaps(torch.float32, dq_tiles, (TILE, 1), (TILE, TILE), swizzles=False),
        ]
        kernel = backward_kernel
        all_constants: dict[str, int] = {**constants, "SUMMED": self.is_summed}
        if self.head_dim > 64:
            kernel = d128_backward_kernel
            self.maps.append(row_maps(dtype, of_k, dk, rows, stored))
            self.maps.append(row_maps(dtype, of_v, dv, rows, stored))
        all_constants["Q_PER_KV"] = of_q[1] // of_k[1]
        all_constants["Q_PER_ITEM"] = self.q_per_item
        all_constants["DETERMINISTIC"] = self.n_turns > 0
        if self.head_dim == 128:
            all_constants["COLUMNS"] = used_columns(of_q[-1])
        if self.uses_d192:
            kernel = d192_backward_kernel
        elif self.head_dim > 128:
            kernel = d256_backward_kernel
            all_constants["HIGH"] = high_columns(of_q[-1])
            all_constants["VALUE_HIGH"] = high_columns(of_v[-1])
        numbers = *in_units([*dk[:3], *dv[:3]]), *numbers
        self.differentiate = Launch(kernel, grid, numbers, all_constants, num_warps=4)

    def __call__(
        self, packing: Packing | None, lse: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, out: Tensor, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        n, device = self.n_rows, q.device
        sizes = n * self.dq_columns, n, n, self.n_sums
        work = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        dq_sum, log2_lse, minus_delta, sums = work.split(sizes)
        counter = turns = torch.empty(1, dtype=torch.int32, device=device)
        if self.n_turns:
            turns = torch.zeros(self.n_turns, dtype=torch.int32, device=device)
        if self.n_sums:
            turns = sums[-self.n_counters :].view(torch.int32)
        # Tensors that the kernels do not use are replaced by others.
        dlse = lse if dlse is None else dlse
        sequences = [counter] * 3
        if packing is not None and self.order is not None:
            sequences = [*packing[:2], self.order(packing.starts_k)]
        starts_q = sequences[0]
        self.prepare(out, dout, lse, dlse, starts_q, log2_lse, minus_delta, dq_sum, sums, counter)
        # The kernel for head_dim 64 has no descriptors of dk and dv.
        tensors = (q, dout, k, v, log2_lse, minus_delta, dq_sum, dk, dv)[: len(self.maps)]
        pairs = zip(self.maps, tensors, strict=True)
        maps = [maps.at(x.data_ptr()) for maps, x in pairs]
        self.differentiate(counter, turns, sums, dk, dv, *sequences, maps=maps)
        self.convert(dq_sum, dq, starts_q)


_backward_plan = functools.lru_cache(maxsize=MAX_PLANS)(HopperBackwardPlan)
