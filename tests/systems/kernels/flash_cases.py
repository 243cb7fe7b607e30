"""Inputs, shapes, tiles and checks for the tests of flash_triton and flash_hopper.

The limits of errors are derived in attention_error.py. Test files add `ignore_overflow` to their
marks and use the fixture `outputs_hold_nan` in all tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.triton.launch import flash_backward, flash_forward
from systems.kernels.flash_attention.triton.tile_table import Configuration, Tile
from tests.systems.kernels.attention_error import NAMES, assert_within_limits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (queries, keys): one tile and several, ragged and whole, more queries than keys and fewer
LENGTHS = [(1, 1), (17, 3), (64, 33), (33, 64), (64, 64), (50, 83)]
# (batch, heads, queries, keys): whole and ragged tiles, more queries than keys and fewer
HOPPER_SHAPES = [
    (1, 2, 384, 384), (2, 3, 768, 768), (1, 2, 1000, 1000), (1, 1, 113, 203), (1, 2, 640, 128),
    (2, 1, 300, 1111), (1, 1, 1, 1), (1, 1, 1, 500), (1, 2, 65, 129), (1, 2, 4224, 4224),
]  # fmt: skip
# Tiles with more keys than queries and the opposite: the diagonal crosses several of both kinds.
WIDE, HIGH = Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)
TILES = {
    "wide": Configuration(WIDE, WIDE, WIDE),
    "high": Configuration(HIGH, HIGH, HIGH),
    "apart": Configuration(WIDE, WIDE, WIDE, dv=WIDE._replace(block_q=2 * WIDE.block_q)),
    "table": None,
}


def slow(*values: object) -> pytest.ParameterSet:
    """Mark a case of a parametrized test that runs only in make test-slow and make test-all."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Forms of the Hopper kernels to compile. "causal" covers the code of the others and the diagonal.
COMPILED_FORMS = ["causal", slow("full"), slow("split")]
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
) -> list[Tensor]:
    """Return normally distributed q, k, v and dout with unit variance."""
    generator = torch.Generator(device).manual_seed(seed)
    n_queries, n_keys = lengths
    return [
        torch.randn((*leading, n, head_dim), generator=generator, device=device).to(dtype)
        for n in (n_queries, n_keys, n_keys, n_queries)
    ]


def by_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None = None,
    *,
    tiles: Configuration | None = None,
    n_splits: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, dq, dk and dv of the Triton kernels."""
    out, lse = flash_forward(q, k, v, is_causal, scale, tiles=tiles, n_splits=n_splits, **options)
    dq, dk, dv = flash_backward(
        q, k, v, out, lse, dout, is_causal, scale, tiles=tiles, n_splits_dkdv=n_splits,
        n_splits_dq=n_splits, **options,
    )  # fmt: skip
    assert dq is not None and dk is not None and dv is not None
    return out, lse, dq, dk, dv


def assert_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None = None,
    **options: Any,
) -> None:
    """Assert that the results of the Triton kernels have right shapes, dtypes and small errors."""
    found = dict(zip(NAMES, by_triton(q, k, v, dout, is_causal, scale, **options), strict=True))
    lse = found["lse"]
    assert lse.dtype == F32 and lse.shape == q.shape[:-1] and lse.is_contiguous()
    for name, like in (("out", q), ("dq", q), ("dk", k), ("dv", v)):
        assert found[name].dtype == q.dtype and found[name].shape == like.shape
    assert_within_limits(found, q, k, v, dout, is_causal, scale, split_float32=True)
