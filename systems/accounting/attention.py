"""FLOPs and bytes of attention, softmax(QK^T)V, and of its gradient."""

from __future__ import annotations

from systems.accounting.dtypes import DTYPE_BYTES

# Number of matmuls in each phase, each of 2*N*N*D FLOPs. Forward has two (QK^T, PV), backward five
# (recomputed QK^T, dV, dP, dQ, dK). FlashAttention-2 (Dao 2023), section 4.1, counts the same:
# "4 * seqlen^2 * head dim * heads" forward, half of it when causal, and 2.5 times as much backward.
_ATTENTION_MATMULS = {"forward": 2, "backward": 5, "forward_backward": 7}


def attention_flops(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, causal: bool
) -> int:
    """Return the FLOPs of the matmuls in softmax(QK^T)V or in its gradient.

    Args:
        phase: forward, backward or forward_backward.
        batch_size, num_heads, seq_len, head_dim: shape of q, k and v.
        causal: count only the lower triangle of the scores, as half of the FLOPs.
    """
    one = 2 * batch_size * num_heads * seq_len * seq_len * head_dim
    total = _ATTENTION_MATMULS[phase] * one
    return total // 2 if causal else total


# Operations per score; an exp or a comparison counts as one operation. Forward: row maximum,
# subtraction, exp, row sum, division. Backward, dS = P * (dP - rowsum(P * dP)) (FlashAttention-2,
# section 2.2): multiplication, row sum, subtraction, multiplication.
_SOFTMAX_OPERATIONS = {"forward": 5, "backward": 4}


def softmax_over_matmul_flops(phase: str, head_dim: int) -> float:
    """Return the operations of the softmax divided by the FLOPs of the matmuls in attention.

    The attention materializes its scores, so it has two matmuls forward and four backward, each of
    2 * head_dim FLOPs per score. Scaling and masking are not counted.

    Args:
        phase: forward or backward.
        head_dim: head dimension of q, k and v.
    """
    products = {"forward": 2, "backward": 4}[phase]
    return _SOFTMAX_OPERATIONS[phase] / (products * 2 * head_dim)


def attention_bytes(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, dtype: str
) -> int:
    """Return the minimum bytes that a fused kernel moves: inputs read once, outputs written once.

    Forward reads q, k, v and writes o and the float32 log-sum-exp. Backward reads q, k, v, o, do
    and the log-sum-exp, and writes dq, dk, dv (FlashAttention-2, algorithms 1 and 2).
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
    """Return the memory of eager attention that materializes its scores, in bytes.

    A score matrix has batch_size * num_heads * seq_len^2 elements. Forward holds two of them at a
    time (input and output of the scaling, masking or softmax) and saves one, the probabilities P,
    for backward. Backward holds four: P, dP, dS, and P * dP, a temporary of torch's softmax. The
    causal mask takes one byte per pair of positions and is shared by the batch and the heads.

    Returns:
        Bytes allocated at three points: forward_peak, saved (between forward and backward) and
        backward_peak.
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
