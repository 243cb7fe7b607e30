"""What the tests of flash_triton share: inputs, peers, and what counts as right.

Right is within twice the error of torch's SDPA in the same dtype on the same input, and beyond that
of the largest value

    a roundoff of the dtype; 4 on a CPU, where torch keeps P and dS in float32
    as many roundoffs of float32 as the largest score has units: its rounding, in the exponent

A test file takes `quiet` for its marks, and the fixture `outputs_hold_nan` for all of its tests.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention import attention_reference
from systems.kernels.flash_attention.configurations import Configuration, Tile
from systems.kernels.flash_attention.launch import flash_backward, flash_forward

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (queries, keys): one tile and many, ragged and not, more queries than keys and fewer
LENGTHS = [(1, 1), (17, 3), (64, 33), (33, 64), (64, 64), (50, 83)]
# (batch, heads, queries, keys): whole tiles, ragged ones, more queries than keys and fewer
HOPPER_SHAPES = [
    (1, 2, 384, 384), (2, 3, 768, 768), (1, 2, 1000, 1000), (1, 1, 113, 203), (1, 2, 640, 128),
    (2, 1, 300, 1111), (1, 1, 1, 1), (1, 1, 1, 500), (1, 2, 65, 129), (1, 2, 4224, 4224),
]  # fmt: skip
# Tiles wider than high and higher than wide: the diagonal crosses several of either
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
quiet = pytest.mark.filterwarnings(
    # of Triton's interpreter, where a score past the end overflows, and is masked
    "ignore:overflow encountered in exp2:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
)


def inputs(
    lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, leading=(2,), device="cpu", seed=0
) -> list[Tensor]:
    """q, k, v, dout of unit variance."""
    generator = torch.Generator(device).manual_seed(seed)
    n_queries, n_keys = lengths
    return [
        torch.randn((*leading, n, head_dim), generator=generator, device=device).to(dtype)
        for n in (n_queries, n_keys, n_keys, n_queries)
    ]


def sdpa(q, k, v, is_causal=False, scale=None):
    """torch's SDPA of what its fused backends take, so that it rounds as they do: four dimensions,
    a head dim that 8 divides, and a scale above zero (they mask by -inf, and scale that)."""
    head_dim, leading = q.shape[-1], q.shape[:-2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if scale <= 0:
        q, scale = (0 * q, 1.0) if scale == 0 else (-q, -scale)
    four = math.prod(leading), 1
    q, k, v = (pad(x.reshape(*four, *x.shape[-2:]), (0, -head_dim % 8)) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    return out[..., :head_dim].reshape(*leading, out.shape[-2], head_dim)


def by_sdpa(q, k, v, dout, is_causal, scale):
    """out, dq, dk, dv of torch, in the inputs' dtype.

    Of copies: on a GPU torch 2.11's kernels for 16 bits read from any address as if 16 divided it,
    which ends in CUDA's misaligned address.
    """
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = sdpa(q, k, v, is_causal, scale)
    out.backward(dout.clone())
    return out.detach(), q.grad, k.grad, v.grad


def by_triton(q, k, v, dout, is_causal, scale=None, *, tiles=None, n_splits=None, **options):
    """out, lse, dq, dk, dv of the kernels."""
    out, lse = flash_forward(q, k, v, is_causal, scale, tiles=tiles, n_splits=n_splits, **options)
    gradients = flash_backward(
        q, k, v, out, lse, dout, is_causal, scale, tiles=tiles, n_splits_dkdv=n_splits,
        n_splits_dq=n_splits, **options,
    )  # fmt: skip
    return out, lse, *gradients


def assert_right(q, k, v, dout, is_causal, scale=None, **options) -> None:
    exact = attention_reference(q, k, v, dout, is_causal, scale)
    others = by_sdpa(q, k, v, dout, is_causal, scale)
    out, lse, dq, dk, dv = by_triton(q, k, v, dout, is_causal, scale, **options)
    factor = abs(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    largest_score = factor * (q.float() @ k.float().transpose(-1, -2)).abs().max().item()
    roundoffs = 1 if q.is_cuda else 4
    if q.dtype == F32 and q.shape[-1] < 16:
        roundoffs *= 4  # the product of the low parts, 2^-24 of |q| |k|, is left out
    allowance = roundoffs * torch.finfo(q.dtype).eps / 2 + largest_score * torch.finfo(F32).eps / 2
    assert lse.dtype == F32 and lse.shape == q.shape[:-1] and lse.is_contiguous()
    # A score is a sum of head_dim products in float32, and exp2 and log2 are good to 2 units
    assert (lse - exact.lse).abs().max().item() <= 16 * 2**-24 * max(1.0, largest_score)
    for name, given_, other in zip(
        ("out", "dq", "dk", "dv"), (out, dq, dk, dv), others, strict=True
    ):
        known = getattr(exact, name)
        assert given_.dtype == q.dtype and given_.shape == known.shape
        largest = known.abs().max().item()
        if largest < 1e-9:
            # Of one visible key dq and dk are zero: what is left is the rounding of dO v^T - D
            cancelled = (dout.float() @ v.float().transpose(-1, -2)).abs().max().item()
            largest = factor * cancelled * (k if name == "dq" else q).abs().max().item()
        limit = 2 * (other - known).abs().max().item() + allowance * largest
        error = (given_ - known).abs().max().item()
        assert error <= limit, f"{name}: {error:.2e} is more than {limit:.2e}"


def assert_median_of_five_seeds(lengths, head_dim, dtype, is_causal, leading, device) -> None:
    """Relative L2 and largest error, of each output the median, at most twice SDPA's in the same
    dtype on the same inputs and a roundoff of the dtype; in float32 1.5 times SDPA's."""
    names = ("out", "dq", "dk", "dv")
    errors: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for seed in range(5):
        given_inputs = inputs(lengths, head_dim, dtype, leading, device, seed)
        exact = attention_reference(*given_inputs, is_causal)
        out, lse, *gradients = by_triton(*given_inputs, is_causal)
        both = {
            "ours": dict(zip(names, (out, *gradients), strict=True)),
            "theirs": dict(zip(names, by_sdpa(*given_inputs, is_causal, None), strict=True)),
        }
        errors["ours", "lse", "largest"].append((lse - exact.lse).abs().max().item())
        for whose, name in itertools.product(both, names):
            known = getattr(exact, name)
            difference = both[whose][name] - known
            errors[whose, name, "L2"].append((difference.norm() / known.norm()).item())
            largest = difference.abs().max() / known.abs().max()
            errors[whose, name, "largest"].append(largest.item())
    median = {key: statistics.median(values) for key, values in errors.items()}
    factor, roundoff = 1.5 if dtype == F32 else 2, torch.finfo(dtype).eps / 2
    assert median["ours", "lse", "largest"] <= 1e-5
    for name, kind in itertools.product(names, ("L2", "largest")):
        limit = factor * median["theirs", name, kind] + roundoff
        assert median["ours", name, kind] <= limit, (name, kind)
