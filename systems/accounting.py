"""The arithmetic behind the tables: FLOPs, bytes, communication, hardware peaks. No torch.

Every function is pure; what is not known (a GPU that is not listed) is None, never a guess.
"""

from __future__ import annotations

# FLOPs of each phase of attention in units of one matrix product of 2*N*N*D:
# forward has two (QK^T, PV), backward five (QK^T again, dV, dP, dQ, dK).
# FlashAttention-2 (Dao 2023), section 4.1: "4 * seqlen^2 * head dim * heads", half of it when
# causal, and backward 2.5 times forward.
_ATTENTION_MATMULS = {"forward": 2, "backward": 5, "forward_backward": 7}

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def attention_flops(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, causal: bool
) -> int:
    """Floating-point operations of softmax(QK^T)V and of its gradient, matrix products only.

    Args:
        phase: forward, backward or forward_backward.
        batch_size, num_heads, seq_len, head_dim: of q, k and v, all of one shape.
        causal: count the lower triangle only, as half.
    """
    one = 2 * batch_size * num_heads * seq_len * seq_len * head_dim
    total = _ATTENTION_MATMULS[phase] * one
    return total // 2 if causal else total


def attention_bytes(
    phase: str, batch_size: int, num_heads: int, seq_len: int, head_dim: int, dtype: str
) -> int:
    """The fewest bytes a fused kernel must move: each input read once, each output written once.

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


def all_reduce_bus_bytes(size_bytes: int, world_size: int) -> float:
    """Bytes each rank must send, and receive, to all-reduce `size_bytes`: 2 (n-1)/n of them.

    Divided by time this is nccl-tests' bus bandwidth, which can be compared with the link's speed
    whatever the number of ranks (nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    if world_size < 1:
        raise ValueError(f"world_size: given {world_size}, expected at least 1")
    return size_bytes * 2 * (world_size - 1) / world_size


# Dense peaks in FLOP/s, by the name nvidia-smi shows. bf16 and fp16 on tensor cores without
# sparsity; fp32 outside them. Sources: NVIDIA H100, H200 and A100 Tensor Core GPU datasheets (which
# print tensor rates with sparsity, twice these).
_PEAK_FLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12},
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 51.2e12},
    "NVIDIA H200": {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12},
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-80GB": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
}


def peak_flops(gpu_name: str | None, dtype: str) -> float | None:
    """FLOP/s a GPU can reach by its datasheet, or None where it is not known."""
    return _PEAK_FLOPS.get(gpu_name or "", {}).get(dtype)
