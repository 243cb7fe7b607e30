"""FLOPs and bytes of attention, softmax(QK^T)V, in forward and backward."""

from __future__ import annotations

import itertools

from systems.accounting.dtypes import DTYPE_BYTES

# Number of matmuls in each phase. A matmul takes 2 * seq_len^2 * head_dim FLOPs for each head.
# Forward has two matmuls (QK^T and PV). Backward has five (the recomputed QK^T, dV, dP, dQ and dK).
# FlashAttention-2 (Dao 2023), section 4.1, has the same counts: "4 * seqlen^2 * head dim * heads"
# in forward, half as many if causal, and 2.5 times as many in backward.
_ATTENTION_MATMULS = {"forward": 2, "backward": 5, "forward_backward": 7}


def attention_flops(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, causal: bool
) -> int:
    """Return the number of FLOPs of the matmuls in attention.

    Phases are "forward", "backward" and "forward_backward". Backward recomputes the scores QK^T.
    With a causal mask, half of the FLOPs are counted.
    """
    one = 2 * batch_size * num_heads * seq_len * seq_len * head_dim
    total = _ATTENTION_MATMULS[phase] * one
    return total // 2 if causal else total


def packed_lengths(batch_size: int, seq_len: int) -> list[int]:
    """Return lengths of sequences that have batch_size * seq_len rows together.

    The first has seq_len rows. The others have an eighth, a quarter, a half and three quarters of
    it in turn, and the last one has the rest.
    """
    left, lengths = batch_size * seq_len, [seq_len]
    fractions = itertools.cycle((1, 2, 4, 6))
    while sum(lengths) < left:
        wanted = max(1, seq_len * next(fractions) // 8)
        lengths.append(min(wanted, left - sum(lengths)))
    return lengths


def visible_scores(
    n_queries: int, n_keys: int, left: int | None, right: int | None, lower_right: bool
) -> int:
    """Return the number of pairs of a query and a key that it sees.

    A query sees `left` keys before and `right` keys after its position; None for all. With
    `lower_right`, the last query has the position of the last key, otherwise the first that of the
    first.
    """
    shift = n_keys - n_queries if lower_right else 0
    total = 0
    for position in range(shift, shift + n_queries):
        first = 0 if left is None else max(0, position - left)
        end = n_keys if right is None else min(n_keys, position + right + 1)
        total += max(0, end - first)
    return total


def scores_flops(phase: str, scores: int, head_dim: int, value_dim: int) -> int:
    """Return the number of FLOPs of the matmuls in attention with any mask.

    Of the two matmuls of forward, PV has value_dim instead of head_dim. Of the five of backward, dV
    and dP have it. See `attention_flops`. `scores` is the number of pairs of a query and a key that
    it sees, for all heads and sequences.
    """
    forward, backward = head_dim + value_dim, 3 * head_dim + 2 * value_dim
    dims = {"forward": forward, "backward": backward, "forward_backward": forward + backward}
    return 2 * scores * dims[phase]


def tensors_bytes(
    phase: str, rows_q: int, rows_k: int, heads: tuple[int, int], dims: tuple[int, int], dtype: str
) -> int:
    """Return the minimum number of bytes that a fused attention kernel reads and writes.

    The tensors are those of `attention_bytes`. `rows_q` and `rows_k` are those of all sequences,
    `heads` those of q and of k and v, and `dims` the head dimensions of q and k and of v.
    """
    (q_heads, kv_heads), (head_dim, value_dim) = heads, dims
    q, out = rows_q * q_heads * head_dim, rows_q * q_heads * value_dim
    k, v = rows_k * kv_heads * head_dim, rows_k * kv_heads * value_dim
    lse = rows_q * q_heads * 4
    forward = (q + k + v + out) * DTYPE_BYTES[dtype] + lse
    backward = 2 * (q + k + v + out) * DTYPE_BYTES[dtype] + lse
    phases = {"forward": forward, "backward": backward, "forward_backward": forward + backward}
    return phases[phase]


# Number of softmax operations for each element of the scores S. An exp or a comparison counts as
# one operation. Forward computes P = softmax(S) with five operations: row maximum, subtraction,
# exp, row sum and division. Backward computes dS = P * (dP - rowsum(P * dP)) (FlashAttention-2,
# section 2.2) with four operations: multiplication, row sum, subtraction and multiplication.
_SOFTMAX_OPERATIONS = {"forward": 5, "backward": 4}


def softmax_over_matmul_flops(phase: str, head_dim: int) -> float:
    """Return the number of softmax operations divided by the number of matmul FLOPs in attention.

    The attention stores the scores and does not recompute them. It has two matmuls in forward and
    four in backward. A matmul takes 2 * head_dim FLOPs for each score. Scaling and masking are not
    counted. The phase is "forward" or "backward".
    """
    products = {"forward": 2, "backward": 4}[phase]
    return _SOFTMAX_OPERATIONS[phase] / (products * 2 * head_dim)


def attention_bytes(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, dtype: str
) -> int:
    """Return the minimum number of bytes that a fused attention kernel reads and writes.

    Each input is read once and each output is written once. Forward reads q, k and v. It writes the
    output o, and the log-sum-exp of each row of scores in float32. Backward reads q, k, v, o, the
    gradient of o and the log-sum-exp. It writes the gradients of q, k and v (FlashAttention-2,
    algorithms 1 and 2). The phases are those of `attention_flops`. The dtype is that of all tensors
    except the log-sum-exp: "bf16", "fp16", "tf32" or "fp32".
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
    """Return the peak and saved bytes of eager attention that materializes its scores.

    A score matrix has batch_size * num_heads * seq_len^2 elements. Forward holds two at a time: the
    input and the output of the current operation (scaling, masking or softmax). It saves one for
    backward, the probabilities P. Backward holds four: P, its gradient dP, the gradient dS of the
    scores, and P * dP, a temporary tensor of torch's softmax. The causal mask takes one byte for
    each pair of positions, and all heads and sequences share it. q, k, v and the gradient of the
    output are counted all the time, the output after forward, and the gradients of q, k and v in
    backward. The dtype is that of all tensors except the mask. The keys are "forward_peak", "saved"
    (between forward and backward) and "backward_peak".
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
