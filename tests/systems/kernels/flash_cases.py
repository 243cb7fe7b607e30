"""Inputs, shapes, tiles and checks for the tests of flash_triton and flash_hopper.

The limits of errors are derived in attention_error.py. Test files add `ignore_overflow` to their
marks and use the fixture `outputs_hold_nan` in all tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.call import PLAIN, Call, Packing
from systems.kernels.flash_attention.triton.launch import flash_backward, flash_forward
from systems.kernels.flash_attention.triton.tile_table import Configuration, Tile
from tests.systems.kernels.attention_error import NAMES, assert_within_limits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (queries, keys): one tile and several, ragged and whole, more queries than keys and fewer
LENGTHS = [(1, 1), (17, 3), (64, 33), (33, 64), (64, 64), (50, 83)]
# Tiles with more keys than queries and the opposite: the diagonal crosses several of both kinds.
WIDE, HIGH = Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)
TILES = {
    "wide": Configuration(WIDE, WIDE, WIDE),
    "high": Configuration(HIGH, HIGH, HIGH),
    "apart": Configuration(WIDE, WIDE, WIDE, dv=WIDE._replace(block_q=2 * WIDE.block_q)),
    "table": None,
}


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(torch.device("cuda")),
    reason="needs a Hopper GPU",
)
ignore_overflow = pytest.mark.filterwarnings(
    # Triton's interpreter warns if a score past the end overflows; the kernel masks that score.
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
)


def inputs(
    lengths: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    leading: tuple[int, ...] = (2,),
    device: str = "cpu",
    seed: int = 0,
    kv_heads: int | None = None,
    value_dim: int | None = None,
) -> list[Tensor]:
    """Return normally distributed q, k, v and dout with unit variance.

    Args:
        kv_heads: number of heads of k and v; that of q by default.
        value_dim: head dimension of v and dout; that of q and k by default.
    """
    generator = torch.Generator(device).manual_seed(seed)
    n_queries, n_keys = lengths
    value_dim = head_dim if value_dim is None else value_dim
    kv_leading = leading if kv_heads is None else (*leading[:-1], kv_heads)
    shapes = (
        (*leading, n_queries, head_dim), (*kv_leading, n_keys, head_dim),
        (*kv_leading, n_keys, value_dim), (*leading, n_queries, value_dim),
    )  # fmt: skip
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def by_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None = None,
    *,
    variant: Call = PLAIN,
    packing: Packing | None = None,
    precision: str = PLAIN.precision,
    tiles: Configuration | None = None,
    n_splits: int | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, dq, dk and dv of the Triton kernels."""
    call = variant._replace(is_causal=is_causal, scale=scale, packing=packing, precision=precision)
    out, lse = flash_forward(q, k, v, call, tiles=tiles, n_splits=n_splits)
    dq, dk, dv = flash_backward(
        q, k, v, out, lse, dout, call, tiles=tiles, n_splits_dkdv=n_splits, n_splits_dq=n_splits,
        dlse=dlse,
    )  # fmt: skip
    assert dq is not None and dk is not None and dv is not None
    return out, lse, dq, dk, dv


def by_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None = None,
    *,
    variant: Call = PLAIN,
    packing: Packing | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, dq, dk and dv of the Hopper kernels."""
    from systems.kernels.flash_attention.hopper import backward_launch, forward_launch

    call = variant._replace(is_causal=is_causal, scale=scale, packing=packing)
    out, lse = forward_launch.flash_forward(q, k, v, call, **options)
    gradients = backward_launch.flash_backward(
        q, k, v, out, lse, dout, call, dlse=dlse, deterministic=deterministic, **options
    )
    return out, lse, *gradients


def by_function(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None = None,
    *,
    function: Any,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Return out, the saved log-sum-exp, dq, dk and dv of an autograd function."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function.apply(*leaves, is_causal, *([] if scale is None else [scale]))
    (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


def assert_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None = None,
    *,
    variant: Call = PLAIN,
    dlse: Tensor | None = None,
    by: Callable[..., tuple[Tensor, ...]] = by_triton,
    split_float32: bool = True,
    **options: Any,
) -> None:
    """Assert that the results of kernels have right shapes, right dtypes and small errors."""
    results = by(q, k, v, dout, is_causal, scale, variant=variant, dlse=dlse, **options)
    found = dict(zip(NAMES, results, strict=True))
    lse = found["lse"]
    assert lse.dtype == F32 and lse.shape == q.shape[:-1] and lse.is_contiguous()
    for name, like in (("out", dout), ("dq", q), ("dk", k), ("dv", v)):
        assert found[name].dtype == q.dtype and found[name].shape == like.shape
    if 0 in (q.shape[-2], k.shape[-2]):
        _assert_nothing(found)
        return
    assert_within_limits(
        found, q, k, v, dout, is_causal, scale, split_float32, variant=variant, dlse=dlse
    )


def _assert_nothing(found: dict[str, Tensor]) -> None:
    """Assert that the results are those without queries or without keys."""
    assert not any(found[name].any() for name in ("out", "dq", "dk", "dv"))
    assert found["lse"].eq(-math.inf).all()


def packed_inputs(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[list[Tensor], Packing]:
    """Return q, k, v and dout of packed sequences, (heads, rows of all sequences, head_dim).

    Args:
        lengths: number of queries and number of keys of each sequence.
        heads: number of heads of q, and number of heads of k and v.
    """
    starts = [
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0) for n in zip(*lengths, strict=True)
    ]
    total_queries, total_keys = (int(x[-1]) for x in starts)
    tensors = inputs(
        (total_queries, total_keys), head_dim, dtype, (heads[0],), device, seed, heads[1], value_dim
    )
    starts_q, starts_k = (x.to(torch.int32).to(device) for x in starts)
    longest = (max(n) for n in zip(*lengths, strict=True))
    return tensors, Packing(starts_q, starts_k, *longest)


def assert_right_packed(
    tensors: Sequence[Tensor],
    packing: Packing,
    is_causal: bool,
    scale: float | None = None,
    *,
    variant: Call = PLAIN,
    dlse: Tensor | None = None,
    by: Callable[..., tuple[Tensor, ...]] = by_triton,
    **options: Any,
) -> None:
    """Assert that kernels compute the attention of each packed sequence."""
    q, k, v, dout = tensors
    results = by(
        q, k, v, dout, is_causal, scale, variant=variant, packing=packing, dlse=dlse, **options
    )
    starts = packing.starts_q.tolist(), packing.starts_k.tolist()
    for rows_q, rows_k in zip(*(list(itertools.pairwise(x)) for x in starts), strict=True):
        of_q, of_k = (slice(None), slice(*rows_q)), (slice(None), slice(*rows_k))
        found = {
            name: x[of_k if name in ("dk", "dv") else of_q]
            for name, x in zip(NAMES, results, strict=True)
        }
        one = [x[rows] for x, rows in zip(tensors, (of_q, of_k, of_k, of_q), strict=True)]
        if 0 in (one[0].shape[-2], one[1].shape[-2]):
            _assert_nothing(found)
            continue
        of_lse = None if dlse is None else dlse[of_q]
        assert_within_limits(
            found, *one, is_causal, scale, split_float32=True, variant=variant, dlse=of_lse
        )
