r"""Attention in plain PyTorch, measured next to the implementations of this project.

`MyAttention` is a `torch.autograd.Function` with the signature of CS336, assignment 2:
`apply(q, k, v, is_causal)`, where q, k and v have the shape (batch, seq_len, head_dim). The sweep
passes batch and heads as one dimension. Forward and backward process a block of queries at a time,
so the full score matrix is never in memory. Backward recomputes the softmax from the log-sum-exp.

Run these commands in the folder `examples/`. No GPU is needed:

    python -m jobs check my_attention.py:MyAttention
    python -m jobs.submit sweeps/quickstart.yaml --local --out logs/my_attention \
        'implementation=[naive, my_attention.py:MyAttention]' 'seq_len=[128, 256, 512]'
    python -m aggregate logs/my_attention

The first command only checks the results. The second command also measures the time. Its runs end
as `ok` if the output and all gradients agree with float64. The tables have a column `MyAttention`,
with the speedup over `naive`. On a machine with Slurm and a GPU, submit a larger sweep:

    python -m jobs.submit sweeps/flash.yaml --out logs/my_attention_gpu \
        'implementation=[sdpa_flash, my_attention.py:MyAttention]' --where 'dtype == bf16'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # number of queries that are processed together


def scores_of(q: Tensor, k: Tensor, first: int, is_causal: bool) -> Tensor:
    """Return the scaled scores of a block of queries, (batch, block, seq_len).

    Args:
        q: queries of the block, (batch, block, head_dim).
        k: all keys, (batch, seq_len, head_dim).
        first: position of the first query of the block.
        is_causal: whether a query sees only the keys at its position and before.
    """
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        query = torch.arange(first, first + q.shape[1], device=q.device)
        key = torch.arange(k.shape[1], device=q.device)
        scores = scores.masked_fill(key > query[:, None], float("-inf"))
    return scores


class MyAttention(torch.autograd.Function):
    """Compute softmax(q k^T / sqrt(head_dim)) v, with an optional causal mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        keys, values = k.float(), v.float()  # compute in float32, round once at the end
        outs, lses = [], []
        for first in range(0, q.shape[1], BLOCK):
            scores = scores_of(q[:, first : first + BLOCK].float(), keys, first, is_causal)
            lse = scores.logsumexp(-1, keepdim=True)
            outs.append(torch.exp(scores - lse) @ values)
            lses.append(lse)
        out = torch.cat(outs, 1).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, torch.cat(lses, 1))
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = (x.float() for x in ctx.saved_tensors)
        dout = grads[0].float()
        delta = (dout * out).sum(-1, keepdim=True)  # D of the FlashAttention-2 paper
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for first in range(0, q.shape[1], BLOCK):
            rows = slice(first, first + BLOCK)
            p = torch.exp(scores_of(q[:, rows], k, first, ctx.is_causal) - lse[:, rows])
            ds = p * (dout[:, rows] @ v.mT - delta[:, rows]) / q.shape[-1] ** 0.5
            dq[:, rows] = ds @ k
            dk += ds.mT @ q[:, rows]
            dv += p.mT @ dout[:, rows]
        dtype = ctx.saved_tensors[0].dtype
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None
