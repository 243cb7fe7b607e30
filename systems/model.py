"""A decoder-only Transformer language model: pre-norm RMSNorm, RoPE, SwiGLU, no biases.

    model = TransformerLM(10_000, 512, d_model=1600, num_layers=48, num_heads=25, d_ff=6400)
    logits = model(token_ids)           # vocab_size is 10,000 and context_length is 512

The attention function is an argument. `systems.training.attention_choice.implementation` returns
those of this project by name: `TransformerLM(..., attention=implementation("sdpa_cudnn"))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Function (q, k, v, is_causal=...) -> out. All tensors are (batch, heads, seq_len, head_dim).
Attention = Callable[..., Tensor]


class Linear(nn.Module):
    """Linear layer without bias, x W^T, where W is `weight` (d_out, d_in).

    W stacks `parts` matrices of equal size along d_out, for example 3 for q, k and v. Each is
    initialized like a separate layer of its size.
    """

    def __init__(
        self, d_in: int, d_out: int, *, parts: int = 1, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        # Variance of Glorot and Bengio 2010, equation 16, truncated at three standard deviations.
        _truncated_normal(self.weight, math.sqrt(2 / (d_in + d_out / parts)))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., d_in) to (..., d_out)."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Embedding layer that returns a row of `weight` (vocab_size, d_model) for each token id."""

    def __init__(self, vocab_size: int, d_model: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        _truncated_normal(self.weight, 1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map integer token ids (...) to vectors (..., d_model).

        Raises:
            ValueError: if a token id is out of range and the token ids are on a CPU. On a GPU, this
                check would synchronize, so an invalid token id fails a device-side assertion.
        """
        if token_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_range(token_ids, self.weight.shape[0])
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """RMSNorm layer (Zhang and Sennrich 2019, equation 4): x / sqrt(mean(x^2) + eps) * weight.

    The square of a 16-bit activation may overflow or lose precision. So the norm is computed in
    float32, or in float64 for float64 inputs. The result is cast to the dtype of x.
    """

    def __init__(self, d_model: int, *, eps: float = 1e-5, device: Any = None, dtype: Any = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., d_model). The result has the shape and dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding, RoPE (Su et al. 2021, section 3.4.2, equation 34).

    In the vector at position p, elements 2i and 2i+1 are rotated as a pair by the angle
    p * theta^(-2i / head_dim), with an even head_dim. The tables of cosines and sines stay in
    float32 even if the model is cast to 16 bits, because bf16 has only 8 significant bits. For a
    float64 model they are in float64.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        context_length: int,
        theta: float,
        *,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.head_dim, self.context_length, self.theta = head_dim, context_length, theta
        self._make_tables(torch.device(device or "cpu"), dtype or torch.get_default_dtype())

    def _make_tables(self, device: torch.device, dtype: torch.dtype) -> None:
        with device:
            pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
            positions = torch.arange(self.context_length, dtype=torch.float64)
        angle = torch.outer(positions, self.theta ** (-pairs / self.head_dim))
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("cos", angle.cos().to(wide), persistent=False)
        self.register_buffer("sin", angle.sin().to(wide), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Recompute the tables of cosines and sines instead of casting or moving them.

        torch calls this method in `.to()`, `.half()`, `.cuda()` and similar methods.
        """
        probe = fn(torch.empty(0, dtype=self.cos.dtype, device=self.cos.device))
        self._make_tables(probe.device, probe.dtype)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Rotate the vector at each position of x (..., seq_len, head_dim), in the dtype of x."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with RoPE. One Linear stacks q, k and v, in this order."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryEmbedding,
        attention: Attention,
        **kwargs: Any,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(d_model, 3 * d_model, parts=3, **kwargs)
        self.out = Linear(d_model, d_model, **kwargs)
        self.rope, self.attention = rope, attention

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, seq_len, d_model) to a tensor of the same shape."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq_len, head_dim)
        out = self.attention(self.rope(q), self.rope(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """SwiGLU feed-forward layer, down(silu(gate x) * up x) (Shazeer 2020, equation 6).

    One Linear stacks gate and up, in this order.
    """

    def __init__(self, d_model: int, d_ff: int, **kwargs: Any):
        super().__init__()
        self.gate_up = Linear(d_model, 2 * d_ff, parts=2, **kwargs)
        self.down = Linear(d_ff, d_model, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., d_model) to a tensor of the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class TransformerBlock(nn.Module):
    """Pre-norm Transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryEmbedding,
        attention: Attention,
        **kwargs: Any,
    ):
        super().__init__()
        self.attention_norm = RMSNorm(d_model, **kwargs)
        self.attention = CausalSelfAttention(d_model, num_heads, rope, attention, **kwargs)
        self.feed_forward_norm = RMSNorm(d_model, **kwargs)
        self.feed_forward = SwiGLU(d_model, d_ff, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, seq_len, d_model) to a tensor of the same shape."""
        return self.second_half(self.first_half(x))

    def first_half(self, x: Tensor) -> Tensor:
        """Return x + attention(norm(x))."""
        return x + self.attention(self.attention_norm(x))

    def second_half(self, x: Tensor) -> Tensor:
        """Return x + feed_forward(norm(x))."""
        return x + self.feed_forward(self.feed_forward_norm(x))


class TransformerLM(nn.Module):
    """Decoder-only Transformer that maps token ids to the logits of the next token.

    Token ids are 0 to vocab_size - 1. The function `attention` is called as (q, k, v,
    is_causal=True), with tensors (batch, heads, seq_len, head_dim).

    Raises:
        ValueError: if a size or rope_theta is not positive, if d_model is not divisible by
            num_heads, or if d_model / num_heads is odd, which RoPE does not support.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10000.0,
        *,
        attention: Attention = F.scaled_dot_product_attention,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        sizes = {
            "vocab_size": vocab_size, "context_length": context_length, "d_model": d_model,
            "num_layers": num_layers, "num_heads": num_heads, "d_ff": d_ff,
        }  # fmt: skip
        wrong = [f"{name} {size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise ValueError(f"sizes must be at least 1, got {', '.join(wrong)}")
        if d_model % num_heads:
            raise ValueError(
                f"d_model must be divisible by num_heads, got {d_model} and {num_heads}"
            )
        if not rope_theta > 0:
            raise ValueError(f"rope_theta must be more than 0, got {rope_theta}")
        head_dim = d_model // num_heads
        if head_dim % 2:
            raise ValueError(
                "head_dim must be even because RoPE rotates pairs of elements, "
                f"got {head_dim} (d_model {d_model} / num_heads {num_heads})"
            )
        self.context_length = context_length
        self.apply_blocks: Callable[[nn.ModuleList, Tensor], Tensor] = apply_in_order
        kwargs = {"device": device, "dtype": dtype}
        self.token_embedding = Embedding(vocab_size, d_model, **kwargs)
        rope = RotaryEmbedding(head_dim, context_length, rope_theta, **kwargs)
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, rope, attention, **kwargs)
            for _ in range(num_layers)
        )
        self.final_norm = RMSNorm(d_model, **kwargs)
        self.output_head = Linear(d_model, vocab_size, **kwargs)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map token ids (batch, seq_len) to logits (batch, seq_len, vocab_size).

        Raises:
            ValueError: if seq_len is larger than context_length. On a CPU, also if a token id is
                out of range.
        """
        seq_len = token_ids.shape[-1]
        if seq_len > self.context_length:
            raise ValueError(
                f"sequences must have at most context_length {self.context_length} tokens, "
                f"got {seq_len}"
            )
        x = self.apply_blocks(self.blocks, self.token_embedding(token_ids))
        return self.output_head(self.final_norm(x))


def apply_in_order(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Apply the blocks one after the other. `systems.checkpointing` has functions like this one."""
    for block in blocks:
        x = block(x)
    return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the targets, a 0-dimensional tensor.

    It is computed in float32, or in float64 for float64 logits. Logits are (batch, seq_len,
    vocab_size), and targets are token ids (batch, seq_len).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten())


@torch.no_grad()
def _truncated_normal(weight: Tensor, std: float) -> None:
    """Fill with a truncated normal distribution, drawn in at least float32 for precision."""
    wide = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight.copy_(nn.init.trunc_normal_(wide, std=std, a=-3 * std, b=3 * std))


def _check_range(token_ids: Tensor, vocab_size: int) -> None:
    if not token_ids.numel():
        return
    low, high = (int(end) for end in token_ids.aminmax())
    if low < 0 or high >= vocab_size:
        given = low if low < 0 else high
        raise ValueError(f"token ids must be in 0 to {vocab_size - 1}, got {given}")
