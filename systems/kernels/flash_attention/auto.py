"""The choice of implementation="auto": our kernels where they were measured to win, else torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.registry import unsupported_reason

# With fewer FLOPs, forward and backward are launch-bound, and torch launches faster than we do: in
# logs/h200/flash one head of 128 to 1,024 tokens in bf16 takes 0.19 ms (median) with torch's
# fastest backend and 0.28 ms with flash_hopper. With more our kernels win: one head of 16k tokens
# (2.4e11 FLOPs) takes 0.27 ms of GPU time with flash_hopper and 0.54 with cuDNN. In float32 one
# head of 4k tokens (1.5e10) takes 0.17 ms with flash_triton and 1.36 with the efficient backend,
# which is no faster for head dimensions below 64.
LAUNCH_BOUND_FLOPS = 2e11
LAUNCH_BOUND_FLOPS_FLOAT32 = 1e10


def best_implementation(q: Tensor, k: Tensor) -> str:
    """Choose our kernels on GPUs they are tuned for and for large enough inputs, else torch."""
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
