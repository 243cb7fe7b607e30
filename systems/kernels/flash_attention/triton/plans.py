"""What a call of the Triton kernels needs besides the tensors. It follows from their shapes,
strides and dtypes, so it is found out once for all tensors that have them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import is_hopper, multiprocessors, on, runs_kernels
from systems.kernels.flash_attention.autotune import tuned
from systems.kernels.flash_attention.configurations import (
    DTYPES,
    MAX_HEAD_DIM,
    PRECISIONS,
    Configuration,
    Tile,
    heads_in_l2,
    ranges,
)
from systems.kernels.flash_attention.layout import Layout, layout, strides_like
from systems.kernels.flash_attention.triton.copy_launch import (
    combining,
    cutting,
    moved,
    n_moving,
    peaking,
    summing,
)
from systems.kernels.launcher import Launch

LOG2E = math.log2(math.e)
PLANS = 4096  # kept at most, of each pass
Shapes = tuple[tuple[int, ...], ...]


def described(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any, Any]:
    """Shapes, strides, dtypes and devices: by these a plan is found again."""
    return (
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
    )


@functools.lru_cache(maxsize=PLANS)
def check(
    shapes: Shapes,
    strides: Shapes,
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    precision: str = "fp16x3",
) -> None:
    """Raise what `flash_forward` raises of tensors so `described`."""
    errors = []
    q, k, v = shapes
    told = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if min(len(q), len(k), len(v)) < 2:
        errors.append(f"q, k and v are (..., rows, head_dim), got {told}")
    else:
        if k != v or q[:-2] != k[:-2] or q[-1] != k[-1]:
            errors.append(
                "q must be (..., n_queries, head_dim) and k and v (..., n_keys, head_dim) with the "
                f"same leading dimensions, got {told}"
            )
        if not 1 <= q[-1] <= MAX_HEAD_DIM:
            errors.append(f"head_dim must be 1 to {MAX_HEAD_DIM}, got {q[-1]}")
    if dtypes[0] not in DTYPES or len(set(dtypes)) > 1:
        errors.append(f"q, k and v must have one dtype of {DTYPES}, got {list(dtypes)}")
    if len(set(devices)) > 1:
        errors.append(f"q, k and v must be on one device, got {[str(x) for x in devices]}")
    if precision not in PRECISIONS:
        errors.append(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if errors:
        raise ValueError("; ".join(errors))
    if not runs_kernels(devices[0]):
        raise RuntimeError(
            f"the Triton kernels need a GPU, got tensors on {devices[0]}; TRITON_INTERPRET=1 in "
            "the environment interprets them on a CPU"
        )


class Inputs:
    """What both passes find out of q, k and v, and how their kernels are told of it."""

    def __init__(
        self,
        shapes: Shapes,
        strides: Shapes,
        dtypes: tuple[torch.dtype, ...],
        devices: tuple[torch.device, ...],
        is_causal: bool,
        scale: float | None,
        precision: str,
        tiles: Configuration | None,
    ):
        check(shapes, strides, dtypes, devices, precision)
        self.shapes, self.dtype, self.device = shapes, dtypes[0], devices[0]
        # Outputs are laid out as inputs are: out and dq as q, dk as k, dv as v.
        self.strides_like = [strides_like(*both) for both in zip(shapes, strides, strict=True)]
        self.q, self.k, self.v = map(layout, shapes, strides)
        self.like_q, self.like_k, self.like_v = map(layout, shapes, self.strides_like)
        self.is_empty = math.prod(shapes[0]) == 0 or math.prod(shapes[1]) == 0
        self.is_causal = is_causal
        # An integer would be compiled for its value.
        self.scale = 1 / math.sqrt(self.q.head_dim) if scale is None else float(scale)
        self.parts = 2 if self.dtype == torch.float32 and precision == "fp16x3" else 1
        self.tiles = tiles or tuned(
            self.q.head_dim, self.dtype, precision, is_causal, self.q.rows, self.k.rows,
            self.q.n_heads, self.device,
        )  # fmt: skip
        # In the order of the kernels
        self.constants = {
            "IS_CAUSAL": is_causal, "PARTS": self.parts,
            "PRECISION": "tf32" if precision == "tf32" else "ieee",
        }  # fmt: skip
        self.moved = moved(self.q)

    def empty(self, index: int) -> Tensor:
        """An output like q, k or v."""
        return torch.empty_strided(
            self.shapes[index], self.strides_like[index], dtype=self.dtype, device=self.device
        )

    def float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def addressed(self, of: Layout) -> tuple[int, int, int]:
        """Strides of what `given` makes of a tensor."""
        return of.strides if self.parts == 1 else of.dense_strides

    def given(self, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        """What the kernels that multiply take: addressable, float32 in parts, and their peaks."""
        addressable = [
            x.contiguous() if of.is_copy else x for x, of in zip(tensors, layouts, strict=True)
        ]
        if self.parts == 1:
            return [*addressable, addressable[0]]  # in place of peaks, which are not read
        # Rows of 16 bytes: a launch is compiled for the alignment that it meets.
        shape = len(tensors), -(-layouts[0].n_heads // 4) * 4
        peaks = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if len(set(layouts)) == 1:  # one launch for all
            return [*self.cut(addressable, layouts[0], peaks).unbind(), peaks]
        each = zip(addressable, layouts, peaks, strict=True)
        return [*(self.cut([x], of, peak)[0] for x, of, peak in each), peaks]

    def cut(self, tensors: Sequence[Tensor], of: Layout, peaks: Tensor) -> Tensor:
        """(tensors, parts, batch, heads, rows, head_dim) of up to four float32 tensors; writes
        their peaks."""
        parts_shape = (len(tensors), self.parts, *of.shape)
        parts = torch.empty(parts_shape, dtype=torch.float16, device=self.device)
        four = (*tensors, *[tensors[0]] * (4 - len(tensors)))
        # A key that no query sees says nothing of the range of the others.
        n_seen = self.n_keys_seen() if of.rows == self.k.rows else of.rows
        peaking(self.device, len(tensors), of, n_seen)(*four, peaks)
        cutting(self.device, len(tensors), of, n_seen)(*four, peaks, parts)
        return parts

    def in_l2(self, of: Layout) -> int:
        """Heads of two such tensors that the L2 cache holds."""
        itemsize = 2 * self.parts if self.parts > 1 else self.dtype.itemsize
        return heads_in_l2(of.rows, of.head_dim, itemsize, of.n_heads)

    def n_keys_seen(self) -> int:
        return min(self.q.rows, self.k.rows) if self.is_causal else self.k.rows

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        of: Layout,
        n_splits: int,
        numbers: tuple[float, ...],
        **constants: bool,
    ) -> Launch:
        """Of a kernel whose programs are the blocks of rows of `of`."""
        block = tile.block_k if of is self.k else tile.block_q
        every = {
            "HEAD_DIM": self.moved["HEAD_DIM"], "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
            "BLOCK_D": self.moved["COLUMNS"], **self.constants, "STAGES": tile.num_stages,
            **constants,
        }  # fmt: skip
        grid = (-(-of.rows // block) * of.n_heads * n_splits,)
        return Launch(kernel, grid, numbers, every, **tile.options(is_hopper(self.device)))

    def ranges(self, tile: Tile, of: Layout, n_splits: int | None) -> tuple[int, int]:
        """How many ranges the other axis is cut into for programs of `of`, and rows of each."""
        if of is self.k:
            length, block, programs = self.q.rows, tile.block_q, -(-of.rows // tile.block_k)
        else:
            length, block, programs = self.n_keys_seen(), tile.block_k, -(-of.rows // tile.block_q)
        slots = tile.resident
        if self.device.type == "cuda":
            slots *= multiprocessors(self.device.index)
        return ranges(length, block, programs * of.n_heads, slots, n_splits)


class Forward(Inputs):
    """`flash_forward` of tensors of one shape, stride and dtype."""

    def __init__(self, *inputs: Any, n_splits: int | None):
        super().__init__(*inputs)
        if self.is_empty:
            return
        from systems.kernels.flash_attention.triton.forward_kernel import forward_kernel

        q, k, tile = self.q, self.k, self.tiles.forward
        self.n_splits, keys_a_split = self.ranges(tile, q, n_splits)
        part = (math.prod(q.shape), *q.dense_strides)
        numbers = (
            *self.addressed(q), *self.addressed(k), *self.addressed(self.v),
            *(part if self.n_splits > 1 else (0, *self.like_q.strides)),
            q.n_heads, q.heads, q.rows, k.rows, self.n_splits, keys_a_split, self.in_l2(k),
            self.scale * LOG2E,
        )  # fmt: skip
        self.attend = self.launch(forward_kernel, tile, q, self.n_splits, numbers)
        self.combine = combining(self.device, self.dtype, self.n_splits, self.like_q)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.empty(0), self.float32(*self.shapes[0][:-1])
        if self.is_empty:
            return out.zero_(), lse.fill_(-math.inf)
        with on(self.device):
            given = self.given((q, k, v), (self.q, self.k, self.v))
            if self.n_splits == 1:
                self.attend(*given, out, lse)
            else:
                parts = self.float32(self.n_splits, *self.q.shape)
                part_lse = self.float32(self.n_splits, *self.q.shape[:-1])
                self.attend(*given, parts, part_lse)
                self.combine(parts, part_lse, out, lse)
        return out, lse


class Backward(Inputs):
    """`flash_backward` of tensors of one shape, stride and dtype."""

    def __init__(
        self,
        *inputs: Any,
        out_strides: tuple[int, ...],
        dout_strides: tuple[int, ...],
        n_splits_dkdv: int | None,
        n_splits_dq: int | None,
        needs_dq: bool,
        needs_dkdv: bool,
    ):
        super().__init__(*inputs)
        self.needs_dq, self.needs_dkdv = needs_dq, needs_dkdv
        if self.is_empty:
            return
        from systems.kernels.flash_attention.triton.backward_kernel import (
            delta_kernel,
            dkdv_kernel,
            dq_kernel,
        )

        q, k = self.q, self.k
        self.out, self.dout = (layout(self.shapes[0], s) for s in (out_strides, dout_strides))
        self.delta = Launch(
            delta_kernel, (n_moving(q),),
            (*self.out.strides, *self.dout.strides, q.heads, q.rows), self.moved,
        )  # fmt: skip
        inputs = tuple(stride for x in (q, k, self.v, self.dout) for stride in self.addressed(x))
        lengths = (q.n_heads, q.heads, q.rows, k.rows)
        scales = (self.scale, self.scale * LOG2E)

        tile, dv = self.tiles.dkdv, self.tiles.dv
        self.n_splits_dkdv, a_split = self.ranges(tile, k, n_splits_dkdv)
        if dv is not None:  # dV's launch has the same ranges, and whole tiles of its own
            a_split = -(-a_split // dv.block_q) * dv.block_q
            self.n_splits_dkdv = -(-q.rows // a_split)
        targets = [0, *self.like_k.strides, 0, *self.like_v.strides]
        if self.n_splits_dkdv > 1:
            targets = 2 * [math.prod(k.shape), *k.dense_strides]
        numbers = (
            *inputs, *targets, *lengths, self.n_splits_dkdv, a_split, self.in_l2(q), *scales
        )  # fmt: skip
        sums = [(tile, True, dv is None)] + ([] if dv is None else [(dv, False, True)])
        self.dkdv = [
            self.launch(dkdv_kernel, tile, k, self.n_splits_dkdv, numbers, DK=has_dk, DV=has_dv)
            for tile, has_dk, has_dv in sums
        ]
        outputs = self.like_k, self.like_v
        self.sum_dkdv = summing(self.device, self.dtype, self.n_splits_dkdv, *outputs)

        tile = self.tiles.dq
        self.n_splits_dq, a_split = self.ranges(tile, q, n_splits_dq)
        targets = [0, *self.like_q.strides]
        if self.n_splits_dq > 1:
            targets = [math.prod(q.shape), *q.dense_strides]
        numbers = (
            *inputs, *targets, *lengths, self.n_splits_dq, a_split, self.in_l2(k), *scales
        )  # fmt: skip
        self.dq = self.launch(dq_kernel, tile, q, self.n_splits_dq, numbers)
        self.sum_dq = summing(self.device, self.dtype, self.n_splits_dq, self.like_q)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dq = self.empty(0) if self.needs_dq else None
        dk, dv = (self.empty(1), self.empty(2)) if self.needs_dkdv else (None, None)
        if self.is_empty:
            for gradient in (dq, dk, dv):
                if gradient is not None:
                    gradient.zero_()
            return dq, dk, dv
        with on(self.device):
            # float32 in parts is for products; delta is a sum.
            whole = dout.contiguous() if self.dout.is_copy else dout
            delta = torch.empty_like(lse)
            self.delta(out.contiguous() if self.out.is_copy else out, whole, delta)
            given = self.given((q, k, v, dout), (self.q, self.k, self.v, self.dout))
            if dk is not None and dv is not None:
                targets: tuple[Tensor, ...] = dk, dv
                parts = None
                if self.n_splits_dkdv > 1:
                    parts = self.float32(2, self.n_splits_dkdv, *self.k.shape)
                    targets = parts.unbind()
                for launch in self.dkdv:
                    launch(*given, lse, delta, *targets)
                if parts is not None:
                    self.sum_dkdv(parts, dk, dv)
            if dq is not None:
                if self.n_splits_dq == 1:
                    self.dq(*given, lse, delta, dq)
                else:
                    parts = self.float32(self.n_splits_dq, *self.q.shape)
                    self.dq(*given, lse, delta, parts)
                    self.sum_dq(parts, dq, dq)
        return dq, dk, dv


def planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    precision: str,
    tiles: Configuration,
    *,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
) -> tuple[Forward, Backward]:
    """What `flash_forward` and `flash_backward` call for such tensors, with the tiles given."""
    inputs = (*described(q, k, v), is_causal, None, precision, tiles)
    forward = Forward(*inputs, n_splits=None)
    return forward, Backward(
        *inputs, out_strides=forward.strides_like[0], dout_strides=dout.stride(),
        n_splits_dkdv=None, n_splits_dq=None, needs_dq=needs_dq, needs_dkdv=needs_dkdv,
    )  # fmt: skip
