"""FlashAttention-2 in Triton, launched: `flash_forward` and `flash_backward` of any tensors.

Forward is one launch, two where it is split over keys; backward is three, and one more for each of
its two passes that is split. No atomics: equal inputs give equal bits, backward too. Tensors in
float32 are cut into parts first, a launch each.

What a call needs besides the tensors follows from their shapes, strides and dtypes, and is kept
from the first call with them on: a `_Forward` or a `_Backward`.

On a CPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1 was in the environment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors, on, runs_kernels
from systems.kernels.flash_attention.autotune import tuned
from systems.kernels.flash_attention.configurations import (
    DTYPES,
    MAX_HEAD_DIM,
    MOVED,
    PRECISIONS,
    Configuration,
    Tile,
    block_d,
    heads_in_l2,
    ranges,
)
from systems.kernels.flash_attention.layout import Layout, empty_like, layout, strides_like
from systems.kernels.launcher import Launch

LOG2E = math.log2(math.e)
PLANS = 4096  # kept at most, of each pass


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    precision: str = "bf16x6",
    tiles: Configuration | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v and its log-sum-exp, without the score matrix.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16 or float16, head_dim 1 to 128. Any strides;
            where the last is not 1 a copy is made.
        k, v: (..., n_keys, head_dim), of q's dtype, device and leading dimensions.
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        precision: of products of float32: "bf16x6", as exact as float32 (six products of bfloat16,
            and 6 bytes of memory an element while it runs), or "tf32", whose 11 bits give errors
            near 1e-3.
        tiles: by default those of `configurations.TABLE`.
        n_splits: ranges of keys, each of them a program's; by default `configurations.splits`.

    Returns:
        out: (..., n_queries, head_dim), of q's dtype and, where it is dense, layout; 0 for a query
            without a key.
        lse: float32 (..., n_queries), contiguous: natural-log log-sum-exp of the scaled scores;
            -inf for a query without a key.

    Raises:
        ValueError: names all that does not fit.
        RuntimeError: no GPU, and no interpreter.
    """
    if scale is not None and scale < 0:
        # The kernels take the scale out of a maximum, so it is not negative.
        q, scale = negated(q), -scale
    plan = _forward(*described(q, k, v), is_causal, scale, precision, tiles, n_splits)
    return plan(q, k, v)


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
    precision: str = "bf16x6",
    tiles: Configuration | None = None,
    n_splits_dkdv: int | None = None,
    n_splits_dq: int | None = None,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `flash_forward` by q, k and v, from what it returned.

    Args:
        q, k, v, is_causal, scale, precision, tiles: as they were given to `flash_forward`.
        out, lse: as it returned them; lse contiguous.
        dout: of out's shape and dtype, any strides; a copy is made where the last is not 1, as of
            the expanded gradient of a sum.
        n_splits_dkdv: ranges of queries, n_splits_dq: ranges of keys, each of them a program's; by
            default `configurations.splits`.
        needs_dq, needs_dkdv: what is False is not computed.

    Returns:
        dq, dk, dv: of the shapes and dtype of q, k and v, or None.
    """
    if scale is not None and scale < 0:
        dq, dk, dv = flash_backward(
            negated(q), k, v, out, lse, dout, is_causal, -scale, precision=precision, tiles=tiles,
            n_splits_dkdv=n_splits_dkdv, n_splits_dq=n_splits_dq, needs_dq=needs_dq,
            needs_dkdv=needs_dkdv,
        )  # fmt: skip
        return None if dq is None else dq.neg_(), dk, dv
    plan = _backward(
        *described(q, k, v), is_causal, scale, precision, tiles,
        out_strides=out.stride(), dout_strides=dout.stride(), n_splits_dkdv=n_splits_dkdv,
        n_splits_dq=n_splits_dq, needs_dq=needs_dq, needs_dkdv=needs_dkdv,
    )  # fmt: skip
    return plan(q, k, v, out, lse, dout)


def negated(q: Tensor) -> Tensor:
    """-q with the strides of an output like q: what is like it has those of what is like q."""
    return torch.neg(q.detach(), out=empty_like(q))


Shapes = tuple[tuple[int, ...], ...]


def described(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any, Any]:
    """Shapes, strides, dtypes and devices: by these a plan is found again."""
    return (
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
    )


class _Inputs:
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
        self.parts = 3 if self.dtype == torch.float32 and precision == "bf16x6" else 1
        self.tiles = tiles or tuned(
            self.q.head_dim, self.dtype, precision, is_causal, self.q.rows, self.k.rows,
            self.q.n_heads, self.device,
        )  # fmt: skip
        # In the order of the kernels
        self.constants = {
            "IS_CAUSAL": is_causal, "PARTS": self.parts,
            "PRECISION": "tf32" if precision == "tf32" else "ieee",
        }  # fmt: skip
        self.moved = _moved(self.q)

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

    def given(self, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> Sequence[Tensor]:
        """As the kernels that multiply take them: addressable, and float32 in parts."""
        addressable = [
            x.contiguous() if of.is_copy else x for x, of in zip(tensors, layouts, strict=True)
        ]
        if self.parts == 1:
            return addressable
        if len(set(layouts)) == 1:  # one launch for all
            return self.cut(addressable, layouts[0]).unbind()
        return [self.cut([x], of)[0] for x, of in zip(addressable, layouts, strict=True)]

    def cut(self, tensors: Sequence[Tensor], of: Layout) -> Tensor:
        """(tensors, parts, batch, heads, rows, head_dim) of up to four float32 tensors."""
        shape = (len(tensors), self.parts, *of.shape)
        parts = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        launch = cutting(self.device, len(tensors), of)
        launch(*tensors, *[tensors[0]] * (4 - len(tensors)), parts)
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
        grid = (-(-of.rows // block) * of.n_heads, n_splits)
        return Launch(kernel, grid, numbers, every, num_warps=tile.num_warps)

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


class _Forward(_Inputs):
    """`flash_forward` of tensors of one shape, stride and dtype."""

    def __init__(self, *inputs: Any, n_splits: int | None):
        super().__init__(*inputs)
        if self.is_empty:
            return
        from systems.kernels.flash_attention.forward_kernel import forward_kernel

        q, k, tile = self.q, self.k, self.tiles.forward
        self.n_splits, keys_a_split = self.ranges(tile, q, n_splits)
        part = (math.prod(q.shape), *q.dense_strides)
        numbers = (
            *self.addressed(q), *self.addressed(k), *self.addressed(self.v),
            *(part if self.n_splits > 1 else (0, *self.like_q.strides)),
            q.n_heads, q.heads, q.rows, k.rows, keys_a_split, self.in_l2(k), self.scale * LOG2E,
        )  # fmt: skip
        self.attend = self.launch(forward_kernel, tile, q, self.n_splits, numbers)
        self.combine = combining(self.device, self.dtype, self.n_splits, self.like_q)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.empty(0), self.float32(*self.shapes[0][:-1])
        if self.is_empty:
            return out.zero_(), lse.fill_(-math.inf)
        with on(self.device):
            q, k, v = self.given((q, k, v), (self.q, self.k, self.v))
            if self.n_splits == 1:
                self.attend(q, k, v, out, lse)
            else:
                parts = self.float32(self.n_splits, *self.q.shape)
                part_lse = self.float32(self.n_splits, *self.q.shape[:-1])
                self.attend(q, k, v, parts, part_lse)
                self.combine(parts, part_lse, out, lse)
        return out, lse


class _Backward(_Inputs):
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
        from systems.kernels.flash_attention.backward_kernel import (
            delta_kernel,
            dkdv_kernel,
            dq_kernel,
        )

        q, k = self.q, self.k
        self.out, self.dout = (layout(self.shapes[0], s) for s in (out_strides, dout_strides))
        self.delta = Launch(
            delta_kernel, (_n_moving(q),),
            (*self.out.strides, *self.dout.strides, q.heads, q.rows), self.moved,
        )  # fmt: skip
        inputs = tuple(stride for x in (q, k, self.v, self.dout) for stride in self.addressed(x))
        lengths = (q.n_heads, q.heads, q.rows, k.rows)
        scales = (self.scale, self.scale * LOG2E)

        tile = self.tiles.dkdv
        self.n_splits_dkdv, a_split = self.ranges(tile, k, n_splits_dkdv)
        targets = [0, *self.like_k.strides, 0, *self.like_v.strides]
        if self.n_splits_dkdv > 1:
            targets = 2 * [math.prod(k.shape), *k.dense_strides]
        numbers = (*inputs, *targets, *lengths, a_split, self.in_l2(q), *scales)
        dv = self.tiles.dv
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
        numbers = (*inputs, *targets, *lengths, a_split, self.in_l2(k), *scales)
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
            q, k, v, dout = self.given((q, k, v, dout), (self.q, self.k, self.v, self.dout))
            if dk is not None and dv is not None:
                targets: tuple[Tensor, ...] = dk, dv
                parts = None
                if self.n_splits_dkdv > 1:
                    parts = self.float32(2, self.n_splits_dkdv, *self.k.shape)
                    targets = parts.unbind()
                for launch in self.dkdv:
                    launch(q, k, v, dout, lse, delta, *targets)
                if parts is not None:
                    self.sum_dkdv(parts, dk, dv)
            if dq is not None:
                if self.n_splits_dq == 1:
                    self.dq(q, k, v, dout, lse, delta, dq)
                else:
                    parts = self.float32(self.n_splits_dq, *self.q.shape)
                    self.dq(q, k, v, dout, lse, delta, parts)
                    self.sum_dq(parts, dq, dq)
        return dq, dk, dv


@functools.lru_cache(maxsize=PLANS)
def _forward(
    shapes: Shapes, strides: Shapes, dtypes: Any, devices: Any, is_causal: bool,
    scale: float | None, precision: str, tiles: Configuration | None, n_splits: int | None,
) -> _Forward:  # fmt: skip
    return _Forward(
        shapes, strides, dtypes, devices, is_causal, scale, precision, tiles, n_splits=n_splits
    )


@functools.lru_cache(maxsize=PLANS)
def _backward(*inputs: Any, **options: Any) -> _Backward:
    return _Backward(*inputs, **options)


# A `Launch` is of one device and of tensors of one dtype each: what makes one is told of both.
@functools.lru_cache(maxsize=PLANS)
def cutting(device: torch.device, count: int, of: Layout) -> Launch:
    """Of `parts_kernel`: (four float32 tensors, of which `count` are cut, their parts)."""
    from systems.kernels.flash_attention.parts_kernel import parts_kernel

    numbers = (*of.strides, of.n_heads, of.heads, of.rows)
    return Launch(parts_kernel, (_n_moving(of), count), numbers, _moved(of))


@functools.lru_cache(maxsize=PLANS)
def combining(device: torch.device, dtype: torch.dtype, n_splits: int, out: Layout) -> Launch:
    """Of `combine_kernel`: (parts, their log-sum-exps, out, lse), out of this dtype."""
    from systems.kernels.flash_attention.combine_kernel import combine_kernel

    numbers = (*out.strides, out.n_heads, out.heads, out.rows, n_splits)
    return Launch(combine_kernel, (_n_moving(out),), numbers, _moved(out))


@functools.lru_cache(maxsize=PLANS)
def summing(
    device: torch.device,
    dtype: torch.dtype,
    n_splits: int,
    out: Layout,
    other: Layout | None = None,
) -> Launch:
    """Of `sum_kernel`: (parts, out, other), of this dtype; other being out where there is none."""
    from systems.kernels.flash_attention.combine_kernel import sum_kernel

    numbers = (*out.strides, *(other or out).strides, out.n_heads, out.heads, out.rows, n_splits)
    grid = (_n_moving(out), 1 if other is None else 2)
    return Launch(sum_kernel, grid, numbers, _moved(out))


def _moved(of: Layout) -> dict[str, int]:
    """Constants of the kernels that only move memory."""
    columns = block_d(of.head_dim)
    return {"HEAD_DIM": of.head_dim, "ROWS": MOVED // columns, "COLUMNS": columns}


def _n_moving(of: Layout) -> int:
    """Programs of such a kernel."""
    return -(-of.rows // (MOVED // block_d(of.head_dim))) * of.n_heads


def plans(
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
) -> tuple[_Forward, _Backward]:
    """What `flash_forward` and `flash_backward` call for such tensors, with the tiles given."""
    inputs = (*described(q, k, v), is_causal, None, precision, tiles)
    forward = _Forward(*inputs, n_splits=None)
    return forward, _Backward(
        *inputs, out_strides=forward.strides_like[0], dout_strides=dout.stride(),
        n_splits_dkdv=None, n_splits_dq=None, needs_dq=needs_dq, needs_dkdv=needs_dkdv,
    )  # fmt: skip


@functools.lru_cache(maxsize=PLANS)
def check(
    shapes: Shapes,
    strides: Shapes,
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    precision: str = "bf16x6",
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
