r"""FlashAttention in Triton: the forward pass is a kernel, the backward pass is plain PyTorch.

A program of the kernel computes the output of a block of queries. It loops over tiles of keys and
keeps, for each query, the largest score so far, the sum of the exponentials and the weighted sum of
the values. If a tile contains a larger score, both sums are scaled down ("online softmax").
Backward recomputes the softmax from the log-sum-exp, with the full score matrix in memory. To write
backward in Triton, too, is an exercise. The runs below then show whether it is right.

Run these commands in the folder `examples/`. Triton's interpreter runs the kernel on the CPU:

    TRITON_INTERPRET=1 python -m jobs check triton_attention.py:TritonAttention
    TRITON_INTERPRET=1 python -m jobs.submit sweeps/quickstart.yaml --local --out logs/triton \
        'implementation=[naive, triton_attention.py:TritonAttention]' seq_len=100 num_heads=1
    python -m aggregate logs/triton

The status `ok` means that the results are right, also if seq_len is not a multiple of the tile
size. The times mean nothing, because the interpreter is slow. With Slurm and a GPU, the kernel is
compiled:

    python -m jobs.submit sweeps/flash.yaml --out logs/triton_gpu \
        'implementation=[sdpa_flash, triton_attention.py:TritonAttention]' \
        'seq_len=[1024, 4096, 16384]'
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_Q = 64  # number of queries per program
BLOCK_K = 32  # number of keys per tile


@triton.jit
def forward_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, seq_len, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of BLOCK_Q queries.

    Grid: (number of blocks of queries, batch). All tensors are contiguous. BLOCK_D is HEAD_DIM
    rounded up to a power of two, because Triton has no tiles of other sizes.
    """
    first_query = tl.program_id(0) * BLOCK_Q
    batch = tl.program_id(1).to(tl.int64)  # offsets in large tensors do not fit in 32 bits
    start = batch * seq_len * HEAD_DIM
    columns = tl.arange(0, BLOCK_D)
    queries = first_query + tl.arange(0, BLOCK_Q)
    q_offsets = start + queries[:, None] * HEAD_DIM + columns[None, :]
    q_mask = (queries[:, None] < seq_len) & (columns[None, :] < HEAD_DIM)
    q = tl.load(q_pointer + q_offsets, mask=q_mask, other=0.0)

    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    weighted = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    end = seq_len
    if IS_CAUSAL:
        end = tl.minimum(seq_len, first_query + BLOCK_Q)  # no query of the block sees later keys
    first_key = 0
    while first_key < end:  # the interpreter rejects `range(0, end)` with NumPy 2.4 and newer
        keys = first_key + tl.arange(0, BLOCK_K)
        k_offsets = start + keys[:, None] * HEAD_DIM + columns[None, :]
        k_mask = (keys[:, None] < seq_len) & (columns[None, :] < HEAD_DIM)
        k = tl.load(k_pointer + k_offsets, mask=k_mask, other=0.0)
        v = tl.load(v_pointer + k_offsets, mask=k_mask, other=0.0)
        # The default for float32 is TF32, whose error of about 1e-3 is above the limit of 5e-5.
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        visible = keys[None, :] < seq_len
        if IS_CAUSAL:
            visible = visible & (keys[None, :] <= queries[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # Every query sees key 0, which is in the first tile. So `higher` is never -inf.
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        weighted *= shrink[:, None]
        weighted += tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        highest = higher
        first_key += BLOCK_K

    out = weighted / total[:, None]
    tl.store(out_pointer + q_offsets, out.to(out_pointer.dtype.element_ty), mask=q_mask)
    lse_offsets = batch * seq_len + queries
    tl.store(lse_pointer + lse_offsets, highest + tl.log(total), mask=queries < seq_len)


class TritonAttention(torch.autograd.Function):
    """Compute softmax(q k^T / sqrt(head_dim)) v of q, k and v of (batch, seq_len, head_dim)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, seq_len, head_dim = q.shape
        out = torch.empty_like(q)
        lse = q.new_empty((batch, seq_len), dtype=torch.float32)
        block_d = max(16, triton.next_power_of_2(head_dim))
        grid = (triton.cdiv(seq_len, BLOCK_Q), batch)
        forward_kernel[grid](
            q, k, v, out, lse, seq_len, head_dim**-0.5,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
            IS_CAUSAL=is_causal,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = (x.float() for x in ctx.saved_tensors)
        dout = grads[0].float()
        scale = q.shape[-1] ** -0.5
        p = torch.exp(q @ k.mT * scale - lse[..., None])
        if ctx.is_causal:
            p = p.tril()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
        dtype = ctx.saved_tensors[0].dtype
        return (ds @ k).to(dtype), (ds.mT @ q).to(dtype), (p.mT @ dout).to(dtype), None
