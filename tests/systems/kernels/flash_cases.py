"""Inputs, shapes, tiles and checks for the tests of flash_triton and flash_hopper.

The limits of errors are derived in attention_error.py. Test files use the fixture
`outputs_hold_nan` in all tests, and add `ignore_overflow` to their marks if they are interpreted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.call import PLAIN, Call, Packing
from systems.kernels.flash_attention.triton.launch import flash_backward, flash_forward
from systems.kernels.flash_attention.triton.tile_table import Configuration, Tile
from tests.systems.kernels.attention_error import (
    NAMES,
    assert_within_limits,
    attention_shares,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (queries, keys): one tile and several, ragged and whole, more queries than keys and fewer
LENGTHS = [(1, 1), (17, 3), (64, 33), (33, 64), (64, 64), (50, 83)]
# The same for packed sequences, with empty ones, and one that has many tiles
PACKED_LENGTHS = [(0, 3), (100, 100), (129, 64), (1, 1), (64, 200), (300, 77), (5, 0), (700, 700)]
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
    call: Call = PLAIN,
    *,
    tiles: Configuration | None = None,
    n_splits: int | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, dq, dk and dv of the Triton kernels."""
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
    call: Call = PLAIN,
    *,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, dq, dk and dv of the Hopper kernels."""
    from systems.kernels.flash_attention.hopper import backward_launch, forward_launch

    out, lse = forward_launch.flash_forward(q, k, v, call, **options)
    gradients = backward_launch.flash_backward(
        q, k, v, out, lse, dout, call, dlse=dlse, deterministic=deterministic, **options
    )
    return out, lse, *gradients


def by_function(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call = PLAIN, *, function: Any, **_: Any
) -> tuple[Tensor, ...]:
    """Return out, the saved log-sum-exp, dq, dk and dv of an autograd function."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function.apply(*leaves, call.is_causal, *([] if call.scale is None else [call.scale]))
    (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


def packed_inputs(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
    device: str = "cpu",
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
        (total_queries, total_keys), head_dim, dtype, (heads[0],), device, 0, heads[1], value_dim
    )
    starts_q, starts_k = (x.to(torch.int32).to(device) for x in starts)
    longest = (max(n) for n in zip(*lengths, strict=True))
    return tensors, Packing(starts_q, starts_k, *longest)


def assert_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    call: Call = PLAIN,
    *,
    dlse: Tensor | None = None,
    by: Callable[..., tuple[Tensor, ...]] = by_triton,
    split_float32: bool = True,
    **options: Any,
) -> None:
    """Assert that the results of kernels have right shapes, right dtypes and small errors.

    Each of packed sequences is compared with the attention of this sequence alone.
    """
    results = dict(zip(NAMES, by(q, k, v, dout, call, dlse=dlse, **options), strict=True))
    lse = results["lse"]
    assert lse.dtype == F32 and lse.shape == q.shape[:-1] and lse.is_contiguous()
    for name, like in (("out", dout), ("dq", q), ("dk", k), ("dv", v)):
        assert results[name].dtype == q.dtype and results[name].shape == like.shape
    starts: Sequence[Sequence[int]] = [(0, q.shape[-2]), (0, k.shape[-2])]
    if isinstance(call.packing, Packing):
        starts = [x.tolist() for x in call.packing[:2]]
    for found, given, of_lse in each_sequence(starts, results, (q, k, v, dout), dlse):
        shares = attention_shares(found.values(), given, call, split_float32, of_lse)
        assert_within_limits(shares)


def each_sequence(
    starts: Iterable[Sequence[int]],
    results: dict[str, Tensor],
    inputs: Sequence[Tensor],
    dlse: Tensor | None,
) -> Iterator[tuple[dict[str, Tensor], list[Tensor], Tensor | None]]:
    """Yield the results, the inputs q, k, v and dout, and the gradient of lse of each sequence.

    Sequences without queries or keys are left out, after a check that their results say so.

    Args:
        starts: the first rows of the sequences of queries, and of keys, with the number of rows.
    """
    for rows in zip(*map(itertools.pairwise, starts), strict=True):
        of_q, of_k = (slice(*ends) for ends in rows)
        found = {
            name: x[..., of_q] if name == "lse"
            else x[..., of_k if name in ("dk", "dv") else of_q, :]
            for name, x in results.items()
        }  # fmt: skip
        given = [x[..., of, :] for x, of in zip(inputs, (of_q, of_k, of_k, of_q), strict=True)]
        if all(x.numel() for x in given):
            yield found, given, None if dlse is None else dlse[..., of_q]
        else:
            assert all(x.eq(-math.inf if name == "lse" else 0).all() for name, x in found.items())
