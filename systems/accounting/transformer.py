"""Parameters, FLOPs and memory of `systems.model.TransformerLM` in eager mode.

Each tensor that the model saves for backward is counted. Tests compare the result with the tensors
that autograd saves.

Arguments that have the same meaning in all functions:

    size              sizes of the model
    batch_size        number of sequences
    context_length    number of tokens in each sequence
    precision         training precision, which determines the dtypes, for example "bf16" (autocast)
                      or "bf16_master" (bfloat16 weights with float32 master weights)
    attention         "materialised" (separate torch operations), "math" (SDPBackend.MATH) or
                      "fused"
    checkpoint_every  0 saves all activations. A number k > 0 saves only the input of every k-th
                      block, and backward recomputes segments of k blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure", "bf16_master"]
# Attention implementation, which determines the tensors that are saved for backward:
# - materialised: attention probabilities, contiguous copies of q, k and v for bmm, and the mask.
# - math (SDPBackend.MATH of torch): the same tensors in float32, without the mask.
# - fused: q, k, v, the output, and the log-sum-exp of each row in float32.
Attention = Literal["materialised", "math", "fused"]
Phase = Literal["forward", "forward_backward", "train_step"]


@dataclass(frozen=True)
class TransformerSize:
    """Widths, numbers of layers and heads, and vocabulary of `systems.model.TransformerLM`."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000


# Sizes from Stanford CS336, assignment 2, table 1, and two other sizes: tiny, which is for machines
# without a GPU, and 10b.
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
    """Return the number of parameters of each part of one Transformer block."""
    d = size.d_model
    return {"attention": 4 * d * d, "feed_forward": 3 * d * size.d_ff, "norms": 2 * d}


def transformer_parameters(size: TransformerSize) -> int:
    """Return the number of parameters of the model. Embedding and output head are not tied."""
    block = sum(block_parameters(size).values())
    return size.num_layers * block + 2 * size.vocab_size * size.d_model + size.d_model


def multiplied_weights(size: TransformerSize) -> int:
    """Return the number of weights in matmuls: all but the embedding and the gains of norms."""
    return size.num_layers * _block_matrices(size) + size.vocab_size * size.d_model


def _block_matrices(size: TransformerSize) -> int:
    parts = block_parameters(size)
    return parts["attention"] + parts["feed_forward"]


def transformer_flops(
    phase: str, size: TransformerSize, batch_size: int, context_length: int
) -> int:
    """Return the number of FLOPs of the model's matmuls, without recomputation.

    Forward takes 2 FLOPs for each token and each weight in a matmul. Backward takes twice as many.
    The matmuls of attention are counted for all pairs of positions, including masked pairs. PaLM
    (Chowdhery et al. 2022, appendix B) counts the same: 6N + 12LHQT FLOPs per token for forward and
    backward, with N such weights, L layers, H heads, head dimension Q and sequence length T. The
    phase is "forward", "backward", "forward_backward", or "train_step", which counts the same.
    """
    tokens = batch_size * context_length
    attention = size.num_layers * 4 * tokens * context_length * size.d_model
    forward = 2 * multiplied_weights(size) * tokens + attention
    factor = {"forward": 1, "backward": 2, "forward_backward": 3, "train_step": 3}[phase]
    return factor * forward


@dataclass(frozen=True)
class _Widths:
    """Bytes per element of each kind of tensor in a training precision."""

    weight: int  # weights of the model
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
    # In bf16_master, the gains of the norms are float32, so they need no master weights.
    g = _WIDTHS["fp32"] if precision == "bf16_master" else w
    return {
        "weights": matrices * w.weight + gains * g.weight,
        "gradients": matrices * w.gradient + gains * g.gradient,
        "optimizer_state": matrices * w.state + gains * g.state,
    }


def model_state_bytes(size: TransformerSize, precision: Precision) -> dict[str, int]:
    """Return the bytes of weights, gradients and AdamW's optimizer_state with master weights."""
    gains = (2 * size.num_layers + 1) * size.d_model
    return _state_bytes(transformer_parameters(size) - gains, gains, precision)


def block_gradient_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the bytes of the gradients of all parameters of one Transformer block."""
    gains = block_parameters(size)["norms"]
    return _state_bytes(_block_matrices(size), gains, precision)["gradients"]


def weight_copy_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the bytes of the 16-bit copies of weights that autocast saves for backward, or 0."""
    return 2 * multiplied_weights(size) if _WIDTHS[precision].cast else 0


def optimizer_step_bytes(size: TransformerSize, precision: Precision) -> int:
    """Return the minimum number of bytes that one AdamW step reads and writes.

    It reads weights, gradients and optimizer state, and writes weights and optimizer state. A
    weight with a float32 master weight is written but not read.
    """
    state = model_state_bytes(size, precision)
    gains = (2 * size.num_layers + 1) * size.d_model
    unread = 0
    if precision == "bf16_master":
        unread = state["weights"] - 4 * gains  # the gains have no master weights, so they are read
    return 2 * sum(state.values()) - state["gradients"] - unread


def residual_stream_bytes(
    size: TransformerSize, batch_size: int, context_length: int, precision: Precision
) -> int:
    """Return the bytes of the input of one block, (batch_size, context_length, d_model)."""
    return batch_size * context_length * size.d_model * _WIDTHS[precision].residual


def block_saved_bytes(
    size: TransformerSize,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
) -> dict[str, int]:
    """Return the bytes of the tensors that one block saves for backward, except its weights."""
    d, ff = size.d_model, size.d_ff
    tokens = batch_size * context_length
    pairs = tokens * size.num_heads * context_length
    w = _WIDTHS[precision]
    wide = 4  # bytes of float32, in which norms and math attention are computed
    # A norm saves three tensors in float32: its input (the residual stream or a float32 copy of
    # it), the scaled input, and 1/rms of each row.
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
        # v is a view of the output of `qkv`. That tensor also contains q and k before RoPE.
        saved["q, k after RoPE"] = 2 * tokens * d * w.matmul
        saved["v, with q and k before RoPE"] = 3 * tokens * d * w.matmul
        saved["log-sum-exp"] = tokens * size.num_heads * 4
        if w.matmul == 2:
            # The 16-bit backends return the output in the layout of q, head by head. The output
            # projection needs it in token order, so there is also a copy in token order. The
            # float32 backend returns the output in token order, so there is no copy.
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
    """Return the peak number of bytes of activations that are saved for backward.

    It is at the end of forward. With checkpointing, it may also be in backward, after a segment of
    blocks was recomputed.
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
    """Return (bytes of activations saved for backward, bytes of gradients) at possible peaks.

    These are the end of forward, the start of the backward of each block (with checkpointing: of
    each recomputed segment of blocks), and the end of backward.
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
        # The first norm of a segment saves its input in float32. If the residual stream is float32,
        # this tensor is the checkpoint itself. Otherwise it is a copy.
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
    """Return the number of blocks per activation checkpoint that minimizes `activation_bytes`.

    It is the smallest of several, and at least 1. It is near sqrt(num_layers * c / b), where c is
    the number of bytes of a checkpoint (the input of a block), and b is the number of bytes that a
    block saves for backward. Chen et al. 2016, section 4.1, has the same formula for c = b.
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
    """Return the peak bytes of a phase, without temporary tensors of single operations.

    "forward" and "forward_backward" have no optimizer state. "forward" keeps the tensors that it
    saves for backward. "train_step" is any step after the first, so the optimizer state exists.
    Gradients are freed between steps.

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
