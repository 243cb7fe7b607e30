r"""Attention with one mistake: backward does not multiply dK by the scale.

The output is right, and so are dQ and dV. A test of the output would not find this mistake, and a
model may still train, but worse. Every run of the benchmark compares the output and all gradients
with float64, once before it measures anything and once after.

Run these commands in the folder `examples/`. No GPU is needed:

    python -m jobs check wrong_attention.py:WrongAttention
    python -m jobs.submit sweeps/quickstart.yaml --local --out logs/wrong_attention \
        'implementation=[naive, wrong_attention.py:WrongAttention]' seq_len=128
    python -m aggregate logs/wrong_attention

The run ends as `wrong`, the message contains `dk 7.00e+00`, and the table shows `wrong` instead of
a time. The relative error is ||dK - reference|| / ||reference||. It is 7 because dK is too large by
a factor of sqrt(head_dim) = 8: if a factor f is missing, the error is |1/f - 1|. The message also
contains the limit, which is above the rounding errors of a right implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WrongAttention(torch.autograd.Function):
    """Compute attention from the full score matrix. The gradient of k is wrong."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        scale = q.shape[-1] ** -0.5
        scores = q @ k.mT * scale
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        p = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        q, k, v, p = ctx.saved_tensors
        dp = dout @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        dq = ds @ k * ctx.scale
        dk = ds.mT @ q  # the mistake: `* ctx.scale` is missing
        return dq, dk, p.mT @ dout, None
