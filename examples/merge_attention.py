"""Compute attention over two halves of the keys apart, and merge the results.

    python merge_attention.py

This is the step from which ring attention (Liu et al. 2023) and split decoding are built. The
log-sum-exp of a half says which share of the softmax it has; see `merge`. `flash_attention` returns
a log-sum-exp that is differentiable, so autograd computes the gradients of the merged result. The
program compares output and gradients with attention over all keys, and exits with 1 if they differ
by more than rounding errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from systems.kernels.flash_attention import flash_attention

HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM = 8, 2, 96, 256, 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative, in the L2 norm


def merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys.

    The result has lse = log(exp(lse_1) + exp(lse_2)), and each output has the weight
    exp(lse_i - lse).

    Args:
        out_1, out_2: (heads, n_queries, head_dim). lse_1, lse_2: float32 (heads, n_queries), -inf
            for a query that sees no key of the set, but not in both sets.
    """
    lse = torch.logaddexp(lse_1, lse_2)
    weight_1, weight_2 = ((part - lse).exp()[..., None] for part in (lse_1, lse_2))
    return (weight_1 * out_1 + weight_2 * out_2).to(out_1.dtype), lse


def in_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, aligned to the lower right corner, from two halves of the keys.

    There must be at most as many queries as keys in the second half.
    """
    half = k.shape[-2] // 2
    # The queries come after the keys of the first half, so they see all of these keys.
    first = flash_attention(q, k[..., :half, :], v[..., :half, :], return_lse=True)
    second = flash_attention(
        q, k[..., half:, :], v[..., half:, :], True, alignment="lower_right", return_lse=True
    )
    return merge(*first, *second)[0]


def main() -> int:
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    torch.manual_seed(0)
    shapes = (HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS)
    q, k, v = (
        torch.randn((*shape, HEAD_DIM), device=device, dtype=dtype, requires_grad=True)
        for shape in shapes
    )
    dout = torch.randn_like(q)
    whole = flash_attention(q, k, v, True, alignment="lower_right")
    merged = in_halves(q, k, v)
    results = [(out, *torch.autograd.grad(out, (q, k, v), dout)) for out in (whole, merged)]
    worst = 0.0
    for name, x, y in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        error = ((x - y).float().norm() / x.float().norm()).item()
        worst = max(worst, error)
        print(f"{name}: relative difference {error:.1e}")
    return 0 if worst <= TOLERANCE[dtype] else 1


if __name__ == "__main__":
    raise SystemExit(main())
