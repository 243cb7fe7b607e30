"""Attention: FLOPs and bytes of softmax(QK^T)V and of its gradient."""

from __future__ import annotations

from systems.accounting.dtypes import DTYPE_BYTES

# FLOPs of each phase of attention in units of one matrix product of 2*N*N*D:
# forward has two (QK^T, PV), backward five (QK^T again, dV, dP, dQ, dK).
# FlashAttention-2 (Dao 2023), section 4.1: "4 * seqlen^2 * head dim * heads", half of it when
# causal, and backward 2.5 times forward.
_ATTENTION_MATMULS = {"forward": 2, "backward": 5, "forward_backward": 7}


def attention_flops(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, causal: bool
) -> int:
    """Count floating-point operations of softmax(QK^T)V and of its gradient, matmuls only.

    Args:
        phase: forward, backward or forward_backward.
        batch_size, num_heads, seq_len, head_dim: of q, k and v, all of one shape.
        causal: count the lower triangle only, as half.
    """
    one = 2 * batch_size * num_heads * seq_len * seq_len * head_dim
    total = _ATTENTION_MATMULS[phase] * one
    return total // 2 if causal else total


# Operations a score, each exp and each comparison counted as one. Forward: the row's maximum,
# subtract it, exp, add up, divide. Backward, dS = P * (dP - rowsum(P * dP)) (FlashAttention-2,
# section 2.2): multiply, add up, subtract, multiply.
_SOFTMAX_OPERATIONS = {"forward": 5, "backward": 4}


def softmax_over_matmul_flops(phase: str, head_dim: int) -> float:
    """Return operations of attention's softmax per FLOP of its matmuls, with materialised scores:
    two matmuls forward, four backward, each of 2 * head_dim operations a score. Scaling and masking
    belong to neither.

    Args:
        phase: forward or backward.
        head_dim: of q, k and v.
    """
    products = {"forward": 2, "backward": 4}[phase]
    return _SOFTMAX_OPERATIONS[phase] / (products * 2 * head_dim)


def attention_bytes(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, dtype: str
) -> int:
    """Return the least bytes a fused kernel moves: inputs read once, outputs written once.

    forward reads q, k, v and writes o and the float32 log-sum-exp; backward reads q, k, v, o, do
    and the log-sum-exp and writes dq, dk, dv (FlashAttention-2, algorithms 1 and 2).
    """
    rows = batch_size * num_heads * seq_len
    tensor, lse = rows * head_dim * DTYPE_BYTES[dtype], rows * 4
    forward, backward = 4 * tensor + lse, 8 * tensor + lse
    return {
        "forward": forward,
        "backward": backward,
        "forward_backward": forward + backward,
    }[phase]


def materialised_attention_bytes(
    batch_size: int, num_heads: int, seq_len: int, head_dim: int, dtype: str, causal: bool
) -> dict[str, int]:
    """Return bytes alive at three times in attention with materialised scores, in eager torch.

    One score matrix is S = batch_size * num_heads * seq_len^2 elements. Forward holds two at once
    (before and after scaling, masking, softmax) and keeps one, the probabilities P, for backward;
    backward holds P, dP, dS and the product of P and dP, a temporary of torch's softmax.
    The causal mask is one byte a pair of positions, shared by batch and heads.

    Returns:
        forward_peak, saved (alive between forward and backward) and backward_peak.
    """
    element = DTYPE_BYTES[dtype]
    scores = batch_size * num_heads * seq_len * seq_len * element
    tensor = batch_size * num_heads * seq_len * head_dim * element
    mask = seq_len * seq_len if causal else 0
    inputs = 4 * tensor  # q, k, v and the gradient of the output
    return {
        "forward_peak": 2 * scores + mask + inputs,
        "saved": scores + mask + inputs + tensor,
        "backward_peak": 4 * scores + mask + inputs + 4 * tensor,
    }
