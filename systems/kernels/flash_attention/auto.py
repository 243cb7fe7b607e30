"""Choice of the implementation for implementation="auto", based on measurements."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.registry import unsupported_reason

# Below this number of FLOPs, forward and backward together (counted without a mask), the calls are
# launch-bound, and torch has less launch overhead than our kernels: one head of 128 to 1,024 tokens
# in bfloat16 takes 0.19 ms (median) with torch's fastest backend and 0.28 ms with flash_hopper.
# Above it our kernels are faster: one head of 16k tokens (2.4e11 FLOPs) takes 0.27 ms of GPU time
# with flash_hopper and 0.54 ms with cuDNN. In float32, one head of 4k tokens (1.5e10 FLOPs) takes
# 0.17 ms with flash_triton and 1.36 ms with torch's efficient backend. That backend is no faster
# for head dimensions below 64. Measured on an H200 (logs/h200/flash).
LAUNCH_BOUND_FLOPS = 2e11
LAUNCH_BOUND_FLOPS_FLOAT32 = 1e10


def best_implementation(q: Tensor, k: Tensor) -> str:
    """Return the fastest implementation: our kernels for large inputs on Hopper GPUs, else sdpa.

    Args:
        q, k: (batch, heads, seq_len, head_dim).
    """
    is_float32 = q.dtype == torch.float32
    head_dim = max(q.shape[-1], 64) if is_float32 else q.shape[-1]
    flops = 14.0 * math.prod(q.shape[:-1]) * head_dim * k.shape[-2]
    least = LAUNCH_BOUND_FLOPS_FLOAT32 if is_float32 else LAUNCH_BOUND_FLOPS
    if flops < least or not q.is_cuda:
        return "sdpa"
    if is_hopper(q.device):
        for name in ("flash_hopper", "flash_triton"):
            if unsupported_reason(q, q, q, False, name) is None:
                return name
    return "sdpa"
