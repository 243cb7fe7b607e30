"""Sizes, parameters, FLOPs and memory of the Transformer.

The model is `systems.model.TransformerLM` in eager mode. The tensors that it saves for backward are
counted one by one; tests compare the count with what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure", "bf16_master"]
# Attention by the tensors that it saves for backward:
# - materialised: the softmax of the scores, and contiguous copies of q, k and v for bmm.
# - math: the same with torch's SDPBackend.MATH, always in float32, and without a mask.
# - fused: q, k, v, the output, and one float32 per row.
Attention = Literal["materialised", "math", "fused"]
Phase = Literal["forward", "forward_backward", "train_step"]


@dataclass(frozen=True)
class TransformerSize:
    """Sizes of a TransformerLM."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000


# From Stanford CS336, assignment 2, table 1, except tiny, for machines without a GPU, and 10b.
MODEL_SIZES = {
    "tiny": TransformerSize(64, 256, 3, 4),
    "small": TransformerSize(768, 3072, 12, 12),
    "medium": TransformerSize(1024, 4096, 24, 16),
    "large": TransformerSize(1280, 5120, 36, 20),
    "xl": TransformerSize(1600, 6400, 48, 25),
    "2.7b": TransformerSize(2560, 10240, 32, 32),
    "10b": TransformerSize(4608, 12288, 50, 36),
}


def block_parameters(size: TransformerSize) -> dict[str, int]:
    """Return the number of parameters of one block, by part."""
    d = size.d_model
    return {"attention": 4 * d * d, "feed_forward": 3 * d * size.d_ff, "norms": 2 * d}


def transformer_parameters(size: TransformerSize) -> int:
    """Return the number of parameters of the model; embedding and output head are not tied."""
    block = sum(block_parameters(size).values())
    return size.num_layers * block + 2 * size.vocab_size * size.d_model + size.d_model


def multiplied_weights(size: TransformerSize) -> int:
    """Return the number of weights in matmuls: all but the gains of norms and the embedding."""
    return size.num_layers * _block_matrices(size) + size.vocab_size * size.d_model


def _block_matrices(size: TransformerSize) -> int:
    parts = block_parameters(size)
    return parts["attention"] + parts["feed_forward"]


def transformer_flops(
    phase: str, size: TransformerSize, batch_size: int, context_length: int
) -> int:
    """Return the FLOPs of the model's matmuls, without recomputation.

    Forward takes 2 FLOPs per weight and token, and backward twice that. The matmuls of attention
    are counted for all pairs of positions, masked or not (Chowdhery et al. 2022, PaLM, appendix B:
    6N + 12LHQT FLOPs per token, forward and backward).

    Args:
        phase: forward, backward, forward_backward or train_step. The last two are equal because
            the optimizer has no matmuls.
    """
    tokens = batch_size * context_length
    attention = size.num_layers * 4 * tokens * context_length * size.d_model
    forward = 2 * multiplied_weights(size) * tokens + attention
    factor = {"forward": 1, "backward": 2, "forward_backward": 3, "train_step": 3}[phase]
    return factor * forward


@dataclass(frozen=True)
class _Widths:
    """Bytes per element, by kind of tensor."""

    weight: int  # weights of the model, as stored
    gradient: int
    state: int  # optimizer state: both moments and the master weight together
    residual: int  # residual stream
    matmul: int  # inputs of matmuls
    cast: bool  # True if autocast saves a 16-bit copy of each weight for backward


_WIDTHS: dict[str, _Widths] = {
    "fp32": _Widths(4, 4, 8, 4, 4, False),
    "tf32": _Widths(4, 4, 8, 4, 4, False),
    "bf16": _Widths(4, 4, 8, 4, 2, True),
    "fp16": _Widths(4, 4, 8, 4, 2, True),
    "bf16_pure": _Widths(2, 2, 4, 2, 2, False),
    "bf16_master": _Widths(2, 2, 12, 2, 2, False),
}


def _state_bytes(matrices: int, gains: int, precision: Precision) -> dict[str, int]:
    w = _WIDTHS[precision]
    # With master weights, the gains of norms stay in float32 and need no master weights.
    g = _WIDTHS["fp32"] if precision == "bf16_master" else w
    return {
        "weights": matrices * w.weight + gains * g.weight,
        "gradients": matrices * w.gradient + gains * g.gradient,
        "optimizer_state": matrices * w.state + gains * g.state,
    }


def model_state_bytes(size: TransformerSize, precision: Precision) -> dict[str, int]:
    """Return the bytes of weights, gradients and AdamW's state, including any master weights."""
    gains = (2 * size.num_layers + 1) * size.d_model
    return _state_bytes(transformer_parameters(size) - gains, gains, precision)


def block_gradient_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the bytes of the gradients of one block's parameters."""
    gains = block_parameters(size)["norms"]
    return _state_bytes(_block_matrices(size), gains, precision)["gradients"]


def weight_copy_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the bytes of the 16-bit copies of weights that autocast saves for backward."""
    return 2 * multiplied_weights(size) if _WIDTHS[precision].cast else 0


def optimizer_step_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the minimum bytes that a step of AdamW moves.

    The step reads weights, gradients and state, and writes weights and state. With master weights,
    it reads only these and does not read the weights of the model.
    """
    state = model_state_bytes(size, precision)
    gains = (2 * size.num_layers + 1) * size.d_model
    unread = 0
    if precision == "bf16_master":
        unread = state["weights"] - 4 * gains  # gains have no master weights, so they are read
    return 2 * sum(state.values()) - state["gradients"] - unread


def residual_stream_bytes(
    size: TransformerSize, batch_size: int, context_length: int, precision: Precision
) -> int:
    """Return the bytes of a residual stream of shape (batch_size, context_length, d_model)."""
    return batch_size * context_length * size.d_model * _WIDTHS[precision].residual


def block_saved_bytes(
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
) -> dict[str, int]:
    """Return the bytes of the tensors that one block saves for backward, without its weights.

    Returns:
        Bytes by the name of the tensor.
    """
    d, ff = size.d_model, size.d_ff
    tokens = batch_size * context_length
    pairs = tokens * size.num_heads * context_length
    w = _WIDTHS[precision]
    wide = 4  # bytes of float32, in which norms and math attention are computed
    # A norm saves its input in float32 (the residual stream or a float32 copy), the scaled input,
    # and 1/rms of each row.
    norm = tokens * (2 * d * wide + wide)
    saved = {
        "attention norm": norm,
        "attention norm output": tokens * d * w.matmul,
        "feed-forward norm": norm,
        "feed-forward norm output": tokens * d * w.matmul,
        "attention output": tokens * d * w.matmul,
        # gate and up are one tensor; the product silu(gate) * up is the input of `down`
        "feed-forward gate, up": 2 * tokens * ff * w.matmul,
        "feed-forward silu(gate)": tokens * ff * w.matmul,
        "feed-forward product": tokens * ff * w.matmul,
    }
    if attention == "fused":
        # v is a view of the output of `qkv`, which also holds q and k before RoPE.
        saved["q, k after RoPE"] = 2 * tokens * d * w.matmul
        saved["v, with q and k before RoPE"] = 3 * tokens * d * w.matmul
        saved["log-sum-exp"] = tokens * size.num_heads * 4
        if w.matmul == 2:
            # The 16-bit backends return the output in the layout of q, head by head, and the
            # output projection takes a copy in token order. The float32 backend returns the output
            # in token order, which needs no copy.
            saved["attention output, by head"] = tokens * d * w.matmul
    elif attention == "math":
        saved["q, k, v"] = 3 * tokens * d * wide
        saved["attention probabilities"] = pairs * wide
    else:
        saved["q, k, v"] = 3 * tokens * d * w.matmul
        # Autocast computes the softmax in float32 and casts it to 16 bits for the matmul with v.
        saved["attention probabilities"] = pairs * (4 + w.matmul if w.cast else w.matmul)
        saved["causal mask"] = context_length * context_length
    return saved


def activation_bytes(
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    checkpoint_every: int = 0,
) -> int:
    """Return the largest number of bytes saved for backward at any time.

    The maximum is at the end of forward or, with activation checkpointing, after backward has
    recomputed a segment.

    Args:
        checkpoint_every: 0 saves all activations. k > 0 saves only the input of every k-th block,
            and backward recomputes segments of k blocks.
    """
    point = (size, batch_size, context_length, precision, attention, checkpoint_every)
    return max(saved for saved, _ in _moments(*point))


def _moments(
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    checkpoint_every: int,
) -> list[tuple[int, int]]:
    """Return pairs of (bytes saved for backward, bytes of gradients) at possible peaks of memory.

    The peaks are at the end of forward, before the backward of each block (or each recomputed
    segment), and at the end of backward.
    """
    w, n = _WIDTHS[precision], size.num_layers
    tokens = batch_size * context_length
    block = sum(block_saved_bytes(size, batch_size, context_length, precision, attention).values())
    block += 2 * _block_matrices(size) if w.cast else 0
    residual = residual_stream_bytes(size, batch_size, context_length, precision)
    end = tokens * (2 * size.d_model * 4 + 4 + size.d_model * w.matmul)  # the final norm
    end += 2 * size.d_model * size.vocab_size if w.cast else 0
    end += tokens * size.vocab_size * 4  # the loss saves log-probabilities in float32
    if not checkpoint_every:
        kept = n * block
        segments = [(first + 1, (first + 1) * block) for first in range(n)]
    else:
        starts = range(0, n, checkpoint_every)
        kept = len(starts) * residual
        # The first norm of a segment saves its input in float32. This is the checkpoint itself if
        # the residual stream is float32, otherwise a copy.
        shared = residual if w.residual == 4 else 0
        segments = []
        for i, start in enumerate(starts):
            stop = min(start + checkpoint_every, n)
            segments.append((stop, (i + 1) * residual + (stop - start) * block - shared))
    of_block = block_gradient_bytes(size, precision)
    of_head = _state_bytes(size.vocab_size * size.d_model, size.d_model, precision)["gradients"]
    return [
        (kept + end, 0),
        *((saved, of_head + (n - stop) * of_block) for stop, saved in segments),
        (0, model_state_bytes(size, precision)["gradients"]),
    ]


def best_checkpoint_interval(
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
) -> int:
    """Return the smallest `checkpoint_every` that minimizes `activation_bytes`.

    It is near sqrt(num_layers * residual / block), where residual and block are the bytes of a
    checkpoint and of the saved tensors of a block (Chen et al. 2016, section 4.1, in which both
    are equal).
    """

    def bytes_with(k: int) -> int:
        return activation_bytes(size, batch_size, context_length, precision, attention, k)

    return min(range(1, size.num_layers + 1), key=bytes_with)


def peak_memory_bytes(
    phase: Phase,
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    checkpoint_every: int = 0,
) -> int:
    """Return the peak memory of a phase in bytes, without temporaries of single operations.

    Args:
        phase: forward or forward_backward, without an optimizer, or train_step. forward keeps its
            autograd graph. train_step is any step after the first, when the optimizer state
            exists. Gradients are freed between steps.
        checkpoint_every: as for `activation_bytes`.

    Raises:
        ValueError: if phase is unknown.
    """
    state = model_state_bytes(size, precision)
    moments = _moments(size, batch_size, context_length, precision, attention, checkpoint_every)
    at_end_of_forward, _ = moments[0]
    peak = max(saved + gradients for saved, gradients in moments)
    extra = {
        "forward": at_end_of_forward,
        "forward_backward": peak,
        "train_step": state["optimizer_state"] + peak,
    }
    if phase not in extra:
        raise ValueError(f"phase must be one of {', '.join(extra)}, got {phase!r}")
    return state["weights"] + extra[phase]
