"""Launch the backward pass of attention with the Hopper kernels.

A backward pass launches three kernels. `prepare_kernel` prepares the inputs of the next kernel.
`backward_kernel` (head_dim 64), `d128_backward_kernel` (72 to 128), `d192_backward_kernel` (136 to
192, see `d192_supports`) or `d256_backward_kernel` (136 to 256) computes all three gradients,
with dQ as a float32 sum. `convert_kernel` converts this sum to dQ. Several work items may have the
same keys: if heads of q that share them are divided (see `head_groups.heads_per_item`), or if there
are too few heads to fill the GPU, and the queries are split into ranges (see `splits`). Then dK and
dV are float32 sums, too (see the module `backward.sums`).

The float32 sums are computed in an order that changes from call to call, so the rounding errors of
the gradients also change. On request, the order is fixed (see the module `backward.turns`), and
work items do not have the same keys.

A launch plan holds prepared kernel launches. It is cached for each combination of shapes, strides,
dtype and options.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from systems.kernels.alignment import ALIGNMENT
from systems.kernels.device import current_stream, multiprocessors, on
from systems.kernels.flash_attention.call import (
    MAX_PLANS,
    PLAIN,
    Call,
    PackedSizes,
    Packing,
    Shapes,
    signature,
)
from systems.kernels.flash_attention.hopper.head_groups import (
    balanced_group,
    even_sizes,
    heads_per_item,
    tiles_of_blocks,
)
from systems.kernels.flash_attention.hopper.kernel_options import KernelOptions, kernel_options
from systems.kernels.flash_attention.hopper.packed_order import PackedOrder
from systems.kernels.flash_attention.hopper.splits import (
    BLOCK_Q,
    backward_splits,
    block_of_keys,
    fills_gpu,
)
from systems.kernels.flash_attention.hopper.tiles import (
    COPIED_COLUMNS,
    kernel_head_dim,
    used_columns,
)
from systems.kernels.flash_attention.hopper.tma_rows import (
    in_units,
    row_maps,
    tma_compatible,
    tma_layout,
)
from systems.kernels.flash_attention.triton.layout import Layout, output_strides
from systems.kernels.flash_attention.triton.work_splits import L2_BYTES, split_tiles
from systems.kernels.kernel_launch import Launch, Repeat, Repeats
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
MAX_BACKWARD_PLANS = 16  # of a plan of the forward pass: the strides of the gradient may differ
MAX_DETERMINISTIC_HEAD_DIM = 128  # largest head_dim for which additions can have a fixed order


def can_be_deterministic(k: Tensor) -> bool:
    """Return whether the kernels can add to dQ in a fixed order, and fill the GPU without a split.

    k is (..., heads, n_keys, head_dim).
    """
    return k.shape[-1] <= MAX_DETERMINISTIC_HEAD_DIM and fills_gpu(
        k.shape, multiprocessors(k.device.index)
    )


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
    call: Call = PLAIN,
    *,
    dlse: Tensor | None = None,
    n_splits: int | None = None,
    q_per_item: int | None = None,
    deterministic: bool = False,
    plans: dict[Any, HopperBackwardPlan] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention with respect to q, k and v with the Hopper kernels.

    q, k, v, out or dout is copied first if the kernels do not support its address or strides. The
    inputs and options are those of `forward_launch.flash_forward`, and out and lse its results.

    Args:
        lse: contiguous.
        dout: gradient of out, with out's shape and dtype.
        dlse: float32, with the shape of lse; None for zeros.
        n_splits: number of ranges into which the queries are split; by default from
            `splits.backward_splits`. With packed sequences or a left bound of the mask, it is 1,
            and another number is an AssertionError.
        q_per_item: number of heads of q that a work item processes, a divisor of the heads of q per
            head of k; by default from `head_groups.heads_per_item`.
        deterministic: whether gradients are bitwise equal in every call. n_splits and q_per_item
            must then be None, or 1 and all, and head_dim at most `MAX_DETERMINISTIC_HEAD_DIM`.
        plans: cache of plans for tensors with these shapes and device, and this call, by strides,
            dtype and the other options. It takes less time than the cache for all.

    Returns:
        dq, dk, dv: shapes and dtype of q, k and v. Without `deterministic`, rounding errors of dq,
            and of dk and dv if work items have the same keys, differ from call to call.

    Raises:
        ValueError: if q, k, v, out and dout do not have the same dtype, or head_dim is too large
            for `deterministic`.
    """
    if not q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype:
        dtypes = [x.dtype for x in (q, k, v, out, dout)]
        raise ValueError(f"q, k, v, out and dout must have the same dtype, got {dtypes}")
    options = n_splits, q_per_item, dlse is not None, deterministic
    strides = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
    key = strides, q.dtype, options
    plan = None if plans is None else plans.get(key)
    if plan is None:
        if deterministic and q.shape[-1] > MAX_DETERMINISTIC_HEAD_DIM:
            raise ValueError(
                f"deterministic needs a head_dim of at most {MAX_DETERMINISTIC_HEAD_DIM}, got "
                f"{q.shape[-1]}"
            )
        plan = _backward_plan(*signature(q, k, v), *strides[3:], call.for_plan(), *options)
        if plans is not None:
            if len(plans) >= MAX_BACKWARD_PLANS:
                plans.clear()
            plans[key] = plan
    return plan(q, k, v, out, lse, dout, call.packing, dlse)


class HopperBackwardPlan:
    """Prepared kernel launches of `flash_backward` for inputs with fixed properties.

    A call of the plan with q, k, v, out, lse, dout, the packed sequences, if any, and the gradient
    of lse, if any, returns dq, dk and dv. It copies inputs first if TMA does not support their
    addresses or strides.

    Shapes, strides, dtypes and devices are those of q, k and v, from `call.signature`, and `call`
    is the result of `Call.for_plan`. `gradient_strides` are of dq, dk and dv, by default from
    `layout.output_strides`. Strides are in elements. The others are as given to `flash_backward`.
    """

    def __init__(
        self,
        shapes: Shapes,
        strides: Shapes,
        dtypes: tuple[torch.dtype, ...],
        devices: tuple[torch.device, ...],
        out_strides: tuple[int, ...],
        dout_strides: tuple[int, ...],
        call: Call,
        n_splits: int | None = None,
        q_per_item: int | None = None,
        has_dlse: bool = False,
        deterministic: bool = False,
        gradient_strides: Shapes | None = None,
    ):
        dtype, device = dtypes[0], devices[0]
        self.options = call, n_splits, q_per_item, has_dlse, deterministic
        self.device, self.shapes = device, shapes
        self.gradient_strides = gradient_strides or tuple(map(output_strides, shapes, strides))
        out_shape = (*shapes[0][:-1], shapes[2][-1])
        inputs = [
            tma_layout(*of)
            for of in zip(
                (*shapes, out_shape, out_shape), (*strides, out_strides, dout_strides), strict=True
            )
        ]
        self.copies = any(of.is_copy for of in inputs)
        (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, value_dim) = (
            inputs[0].shape, inputs[2].shape
        )  # fmt: skip
        self.is_empty = 0 in (*inputs[0].shape, n_keys)
        if self.is_empty:
            self.copies = False  # nothing to copy
            return
        gradients = [tma_layout(*of) for of in zip(shapes, self.gradient_strides, strict=True)]
        assert not any(of.is_copy for of in gradients), "gradients that TMA cannot write"
        layouts = (*inputs, *gradients)
        packed = call.packing
        assert not isinstance(packed, Packing), "a plan depends only on sizes"
        options = kernel_options(call, (n_queries, n_keys), head_dim)
        q_per_kv = heads // kv_heads
        block_k = block_of_keys(head_dim)
        n_multiprocessors = multiprocessors(device.index)
        if deterministic:
            assert q_per_item in (None, q_per_kv), "q_per_item with a fixed order"
            q_per_item = q_per_kv
        if q_per_item is None:
            may_use_d192 = d192_supports(dtype, head_dim, value_dim, options.constants)
            tiles = tiles_of_blocks(
                options, (n_queries, n_keys), packed, D192_KEYS if may_use_d192 else block_k, TILE,
                True, batch * heads,
            )  # fmt: skip
            q_per_item = heads_per_item(q_per_kv, batch * kv_heads, tiles, n_multiprocessors)
        self.q_per_item = q_per_item
        n_programs = batch * heads // q_per_item
        n_blocks = -(-n_keys // block_k)
        n_tiles = -(-n_queries // TILE)
        n_padded = n_tiles * TILE
        self.head_dim = kernel_head_dim(head_dim)
        if deterministic or not options.may_split:
            assert n_splits in (None, 1), "n_splits with packing, a left bound or a fixed order"
            n_splits = 1
        if n_splits is None:
            mask_is_causal = options.constants["IS_CAUSAL"] and not options.is_bounded
            n_splits = backward_splits(
                n_programs, n_blocks, n_tiles, mask_is_causal, head_dim, n_multiprocessors,
                q_per_item,
            )  # fmt: skip
        self.n_splits, tiles_per_split = split_tiles(n_tiles, n_splits)

        def most_blocks(keys: int) -> int:
            """Return how many blocks of `keys` keys the busiest multiprocessor gets."""
            return -(-n_programs * -(-n_keys // keys) // n_multiprocessors)

        self.uses_d192 = (
            self.n_splits == 1
            and d192_supports(dtype, head_dim, value_dim, options.constants)
            and D192_STEP_TIME * most_blocks(D192_KEYS) <= most_blocks(block_k)
        )
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
        self.is_summed = self.n_splits > 1 or q_per_item < q_per_kv
        # Sums of dK and dV, and two counters for each key, see `backward.sums`
        columns = used_columns(head_dim) + used_columns(value_dim)
        self.n_counters = 2 * batch * kv_heads * n_keys
        sum_rows = n_keys if packed is not None else -(-n_keys // block_k) * block_k
        n_sums = batch * kv_heads * sum_rows * columns + self.n_counters
        self.n_sums = n_sums if self.is_summed else 0
        # Sum of dQ, lse, -delta, counter of work items (one of 64 numbers), sums of dK and dV
        self.work_sizes = [self.n_rows * self.dq_columns, self.n_rows, self.n_rows, 64, self.n_sums]
        self.work_size = sum(self.work_sizes)
        ends = heads, n_queries, n_padded, packed.n_sequences if packed else 1
        self._make_row_launches(
            layouts, ends, options.scale, (head_dim, value_dim), packed is not None, has_dlse
        )
        if deterministic:
            # The long blocks of a head come last. If a block has the queries of several heads, the
            # fewer heads of k end together, the fewer multiprocessors wait.
            group = 1 if q_per_kv > 1 else -(-n_multiprocessors // n_blocks)
        else:
            group = self._group(options, layouts, packed, block_k, n_multiprocessors)
        numbers = (
            n_programs, heads // self.q_per_item, n_queries, n_keys, n_padded, self.n_splits,
            tiles_per_split * TILE, group, n_items, *options.bounds, options.scale,
            *options.scales,
        )  # fmt: skip
        grid = (min(n_items, n_multiprocessors) if self.head_dim == 64 else n_items,)
        # A counter for each head of q and key, see `backward.turns`
        self.n_turns = batch * heads * n_keys if deterministic else 0
        self._make_main_launch(dtype, layouts, options.constants, numbers, grid)
        self.repeats = Repeats()

    def _group(
        self,
        options: KernelOptions,
        layouts: Sequence[Layout],
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
        (batch, heads, n_queries, _), n_keys = layouts[0].shape, layouts[1].rows
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
        return balanced_group(
            [self.q_per_item * n for n in tiles], n_heads, sizes, n_multiprocessors
        )

    def _make_row_launches(
        self,
        layouts: Sequence[Layout],
        ends: tuple[int, int, int, int],
        scale: float,
        head_dims: tuple[int, int],
        is_packed: bool,
        has_dlse: bool,
    ) -> None:
        """Create the launches of `prepare_kernel` and `convert_kernel`.

        The layouts are those of q, k, v, out, dout, dq, dk and dv. `ends` has n_heads, n_queries,
        n_padded and n_sequences, and `head_dims` the head dimensions of q and of v.
        """
        from systems.kernels.flash_attention.hopper.backward.prepare import prepare_kernel
        from systems.kernels.flash_attention.hopper.backward.round_dq import convert_kernel

        out, dout, dq = (of.strides for of in layouts[3:6])
        grid = (self.n_rows // TILE,)
        head_dim, value_dim = head_dims
        constants = {
            "HEAD_DIM": value_dim, "COLUMNS": kernel_head_dim(value_dim), "ROWS": TILE,
            "PACKED": is_packed, "HAS_DLSE": has_dlse, "DQ_COLUMNS": self.dq_columns,
        }  # fmt: skip
        numbers = *out, *dout, *ends, self.n_sums
        self.prepare = Launch(prepare_kernel, grid, numbers, constants)
        constants = {
            "HEAD_DIM": head_dim, "COLUMNS": self.head_dim, "DQ_COLUMNS": self.dq_columns,
            "ROWS": TILE, "PACKED": is_packed,
        }  # fmt: skip
        self.convert = Launch(convert_kernel, grid, (*dq, *ends, scale), constants)

    def _make_main_launch(
        self,
        dtype: torch.dtype,
        layouts: Sequence[Layout],
        constants: dict[str, bool],
        numbers: tuple[float, ...],
        grid: tuple[int],
    ) -> None:
        """Create the launch of the kernel that computes the gradients, and its TMA descriptors.

        The layouts are those of q, k, v, out, dout, dq, dk and dv. `constants` has the constexpr
        parameters from IS_CAUSAL to SOFTCAP, and `numbers` the int and float parameters after the
        strides.
        """
        from systems.kernels.flash_attention.hopper.backward.d64 import backward_kernel
        from systems.kernels.flash_attention.hopper.backward.d128 import d128_backward_kernel
        from systems.kernels.flash_attention.hopper.backward.d192 import d192_backward_kernel
        from systems.kernels.flash_attention.hopper.backward.d256 import d256_backward_kernel

        q, k, v, _, dout, _, dk, dv = layouts
        row_map = TensorMaps(torch.float32, (self.n_rows,), (1,), (TILE,))
        dq_tiles = (self.n_rows * self.dq_columns // TILE, TILE)
        columns, value_columns = self.head_dim, kernel_head_dim(v.head_dim)
        stored, rows = min(columns, MAX_STORED_COLUMNS), TILE
        if self.uses_d192:
            columns = value_columns = stored = COPIED_COLUMNS
            rows = D192_COPIED_KEYS

        def maps(of: Layout, rows: int, columns: int) -> TensorMaps:
            return row_maps(dtype, of.shape, of.strides, rows, columns)

        # In the order of the kernels' arguments: q, dout, k, v, lse, -delta, dq
        self.maps = [
            maps(q, TILE, columns),
            maps(dout, TILE, value_columns),
            maps(k, rows, columns),
            maps(v, rows, value_columns),
            row_map,
            row_map,
            TensorMaps(torch.float32, dq_tiles, (TILE, 1), (TILE, TILE), swizzles=False),
        ]
        kernel = backward_kernel
        all_constants: dict[str, int] = {**constants, "SUMMED": self.is_summed}
        if self.head_dim > 64:
            kernel = d128_backward_kernel
            self.maps.append(maps(dk, rows, stored))
            self.maps.append(maps(dv, rows, stored))
        all_constants["Q_PER_KV"] = q.heads // k.heads
        all_constants["Q_PER_ITEM"] = self.q_per_item
        all_constants["DETERMINISTIC"] = self.n_turns > 0
        if self.head_dim == 128:
            all_constants["COLUMNS"] = used_columns(q.head_dim)
        if self.uses_d192:
            kernel = d192_backward_kernel
        elif self.head_dim > 128:
            kernel = d256_backward_kernel
            all_constants["HIGH"] = high_columns(q.head_dim)
            all_constants["VALUE_HIGH"] = high_columns(v.head_dim)
        numbers = *in_units([*dk.strides, *dv.strides]), *numbers
        self.differentiate = Launch(kernel, grid, numbers, all_constants, num_warps=4)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
        packing: Any = None, dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        pointers = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()
        if self.copies or pointers % ALIGNMENT:
            q, k, v, out, dout = (tma_compatible(x) for x in (q, k, v, out, dout))
            given = *signature(q, k, v), out.stride(), dout.stride()
            plan = _backward_plan(*given, *self.options, self.gradient_strides)
            return plan(q, k, v, out, lse, dout, packing, dlse)
        shapes, strides = self.shapes, self.gradient_strides
        dq = q.new_empty_strided(shapes[0], strides[0])
        dk = k.new_empty_strided(shapes[1], strides[1])
        dv = v.new_empty_strided(shapes[2], strides[2])
        if self.is_empty:
            return dq.zero_(), dk.zero_(), dv.zero_()
        dlse = lse if dlse is None else dlse.contiguous()
        work = torch.empty(self.work_size, dtype=torch.float32, device=self.device)
        tensors = [q, k, v, out, lse, dout, dlse, dq, dk, dv, work]
        if self.n_turns:
            tensors.append(torch.zeros(self.n_turns, dtype=torch.int32, device=self.device))
        if packing is not None and self.order is not None:
            tensors += [*packing[:2], self.order.allocate(self.device)]
        with on(self.device):
            self.repeats(current_stream(self.device), tensors, lambda: self._launch(*tensors))
        return dq, dk, dv

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, work: Tensor, *others: Tensor,
    ) -> list[Repeat | None]:  # fmt: skip
        """Launch the kernels. `others` are turns, and starts_q, starts_k and blocks, if needed."""
        dq_sum, log2_lse, minus_delta, counter, sums = work.split(self.work_sizes)
        counter = counter.view(torch.int32)
        # Tensors that the kernels do not use are replaced by others.
        turns, sequences = counter, [counter] * 3 if self.order is None else others[-3:]
        if self.n_turns:
            turns = others[0]
        elif self.is_summed:
            turns = sums[-self.n_counters :].view(torch.int32)
        starts_q, starts_k, blocks = sequences
        before = [] if self.order is None else [self.order(starts_k, blocks)]
        # The kernel for head_dim 64 has no descriptors of dk and dv.
        tensors = (q, dout, k, v, log2_lse, minus_delta, dq_sum, dk, dv)[: len(self.maps)]
        pairs = zip(self.maps, tensors, strict=True)
        maps = [maps.at(x.data_ptr()) for maps, x in pairs]
        return [
            *before,
            self.prepare(
                out, dout, lse, dlse, starts_q, log2_lse, minus_delta, dq_sum, sums, counter
            ),
            self.differentiate(counter, turns, sums, dk, dv, *sequences, maps=maps),
            self.convert(dq_sum, dq, starts_q),
        ]


_backward_plan = functools.lru_cache(maxsize=MAX_PLANS)(HopperBackwardPlan)
