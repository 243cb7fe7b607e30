"""Sizes, parameters, FLOPs and memory of the Transformer.

The model is `systems.model.TransformerLM` in eager torch, so what is saved for backward can be
counted tensor by tensor; tests compare it with what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure", "bf16_master"]
# materialised: the scores' softmax is kept, and q, k and v as copies that bmm takes. math: the same
# as torch's own (SDPBackend.MATH), in float32 whatever it is given and without a mask to keep.
# fused: q, k, v, the output and one float32 a row.
Attention = Literal["materialised", "math", "fused"]
Phase = Literal["forward", "forward_backward", "train_step"]


@dataclass(frozen=True)
class TransformerSize:
    """Sizes of a TransformerLM; T below is batch_size * context_length."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000


# Stanford CS336, assignment 2, table 1; tiny, for machines without a GPU, and 10b are ours.
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
    """Count the parameters of one block, by part."""
    d = size.d_model
    return {"attention": 4 * d * d, "feed_forward": 3 * d * size.d_ff, "norms": 2 * d}


def transformer_parameters(size: TransformerSize) -> int:
    """Count the parameters of the model; embedding and output head are not tied."""
    block = sum(block_parameters(size).values())
    return size.num_layers * block + 2 * size.vocab_size * size.d_model + size.d_model


def multiplied_weights(size: TransformerSize) -> int:
    """Count the weights in matmuls: without gains of norms and the embedding, which is a lookup."""
    return size.num_layers * _block_matrices(size) + size.vocab_size * size.d_model


def _block_matrices(size: TransformerSize) -> int:
    parts = block_parameters(size)
    return parts["attention"] + parts["feed_forward"]


def transformer_flops(
    phase: str, size: TransformerSize, batch_size: int, context_length: int
) -> int:
    """Count the floating-point operations of matmuls that the model needs, without recomputation.

    Two for each weight and token forward, twice that backward; and the products of attention, over
    all pairs of positions, masked or not (Chowdhery et al. 2022, PaLM, appendix B: 6N + 12LHQT).

    Args:
        phase: forward, backward, forward_backward, or train_step (the optimizer multiplies no
            matrices).
    """
    tokens = batch_size * context_length
    attention = size.num_layers * 4 * tokens * context_length * size.d_model
    forward = 2 * multiplied_weights(size) * tokens + attention
    factor = {"forward": 1, "backward": 2, "forward_backward": 3, "train_step": 3}[phase]
    return factor * forward


@dataclass(frozen=True)
class _Widths:
    """Bytes per element, by kind of tensor."""

    weight: int  # what forward multiplies with, as it is stored
    gradient: int
    state: int  # optimizer: of both moments and of the master weight, together
    residual: int  # the residual stream
    matmul: int  # inputs of matrix products
    cast: bool  # autocast keeps a 16-bit copy of each weight for backward


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
    # Beside master weights the gains of norms stay in float32 and need no master.
    g = _WIDTHS["fp32"] if precision == "bf16_master" else w
    return {
        "weights": matrices * w.weight + gains * g.weight,
        "gradients": matrices * w.gradient + gains * g.gradient,
        "optimizer_state": matrices * w.state + gains * g.state,
    }


def model_state_bytes(size: TransformerSize, precision: Precision) -> dict[str, int]:
    """Return bytes of weights, gradients and AdamW's state, including master weights if any."""
    gains = (2 * size.num_layers + 1) * size.d_model
    return _state_bytes(transformer_parameters(size) - gains, gains, precision)


def block_gradient_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return bytes of the gradients of one block's parameters."""
    gains = block_parameters(size)["norms"]
    return _state_bytes(_block_matrices(size), gains, precision)["gradients"]


def weight_copy_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return bytes of the 16-bit copies of weights that autocast keeps for backward."""
    return 2 * multiplied_weights(size) if _WIDTHS[precision].cast else 0


def optimizer_step_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the least bytes AdamW moves: weights, gradients and state read, all but the gradients
    written. Where there are master weights, those are read and the model's own only written."""
    state = model_state_bytes(size, precision)
    gains = (2 * size.num_layers + 1) * size.d_model
    unread = 0
    if precision == "bf16_master":
        unread = state["weights"] - 4 * gains  # the gains have no master
    return 2 * sum(state.values()) - state["gradients"] - unread


def residual_stream_bytes(
    size: TransformerSize, batch_size: int, context_length: int, precision: Precision
) -> int:
    """Return bytes of the residual stream at one place, (batch_size, context_length, d_model)."""
    return batch_size * context_length * size.d_model * _WIDTHS[precision].residual


def block_saved_bytes(
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
) -> dict[str, int]:
    """Return bytes that one block saves for backward, by contributor, without its weights."""
    d, ff = size.d_model, size.d_ff
    tokens = batch_size * context_length
    pairs = tokens * size.num_heads * context_length
    w = _WIDTHS[precision]
    wide = 4  # norms, and the attention that torch calls math, are taken in float32
    # The norm saves its input in float32 (the residual stream itself, or a float32 copy of it),
    # that input scaled, and 1/rms of each row.
    norm = tokens * (2 * d * wide + wide)
    saved = {
        "attention norm": norm,
        "attention norm output": tokens * d * w.matmul,
        "feed-forward norm": norm,
        "feed-forward norm output": tokens * d * w.matmul,
        "attention output": tokens * d * w.matmul,
        # gate and up in one tensor, silu(gate), and the product that `down` takes
        "feed-forward gate, up": 2 * tokens * ff * w.matmul,
        "feed-forward silu(gate)": tokens * ff * w.matmul,
        "feed-forward product": tokens * ff * w.matmul,
    }
    if attention == "fused":
        # v is a view of the tensor that holds q, k and v as they were before RoPE.
        saved["q, k after RoPE"] = 2 * tokens * d * w.matmul
        saved["v, with q and k before RoPE"] = 3 * tokens * d * w.matmul
        saved["log-sum-exp"] = tokens * size.num_heads * 4
        if w.matmul == 2:
            # The 16-bit backends give their output the layout of q, a head after the other; the
            # projection takes a copy with a token after the other. float32's gives it so at once.
            saved["attention output, by head"] = tokens * d * w.matmul
    elif attention == "math":
        saved["q, k, v"] = 3 * tokens * d * wide
        saved["attention probabilities"] = pairs * wide
    else:
        saved["q, k, v"] = 3 * tokens * d * w.matmul
        # Autocast takes the softmax in float32 and multiplies a 16-bit copy of it.
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
    """Return the maximum of bytes saved for backward: at the end of forward, or with checkpoints
    when backward has recomputed a segment.

    Args:
        checkpoint_every: 0 keeps everything; k keeps the residual stream in front of every k-th
            block, and backward computes k blocks again at a time.
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
    """(bytes saved for backward, bytes of gradients) where one of them may be most: at the end of
    forward, before backward of each block, or of each segment computed again, and at the end."""
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
        # The first norm of a segment saves its input in float32: the checkpoint itself, where the
        # residual stream is float32, and else a copy.
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
    """Return the smallest k with the least `activation_bytes`: near sqrt(layers * residual / block)
    (Chen et al. 2016, section 4.1, with unequal costs of a checkpoint and of a block)."""

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
    """Return the peak of bytes, without temporaries of single operations.

    Args:
        phase: forward (its graph kept) or forward_backward, of a model without optimizer; or
            train_step (from the second step on, when the optimizer's state exists). Gradients are
            freed between steps.
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
        raise ValueError(f"phase: given {phase!r}, valid are {', '.join(extra)}")
    return state["weights"] + extra[phase]
