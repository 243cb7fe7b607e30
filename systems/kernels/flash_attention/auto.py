"""Choice of the implementation in `flash_attention(..., implementation="auto")`.

The choice is based on measurements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from systems.kernels.device import is_hopper, multiprocessors
from systems.kernels.flash_attention.features import features
from systems.kernels.flash_attention.hopper.splits import fills_gpu
from systems.kernels.flash_attention.hopper.tiles import PACKED_HEAD_DIMS
from systems.kernels.flash_attention.registry import HAS, unsupported_reason
from systems.kernels.flash_attention.variant import NO_VARIANT, Variant

# Inputs with fewer FLOPs are launch-bound, and torch has less launch overhead than our kernels. The
# FLOPs are those of forward and backward together, without a mask. Measured for one head on an H200
# (logs/h200/flash):
# - bfloat16, 128 to 1,024 tokens: 0.19 ms (median) with torch's fastest backend, 0.28 ms with
#   flash_hopper.
# - bfloat16, 16k tokens (2.4e11 FLOPs): 0.54 ms of GPU time with cuDNN, 0.27 ms with flash_hopper.
# - float32, 4k tokens (1.5e10 FLOPs): 1.36 ms with torch's efficient backend, 0.17 ms with
#   flash_triton. Head dimensions below 64 take torch's efficient backend as long as 64.
LAUNCH_BOUND_FLOPS = 2e11
LAUNCH_BOUND_FLOPS_FLOAT32 = 1e10
# Number of keys from which forward alone uses flash_hopper with head_dim 192
MEASURED_KEYS = 8192


def best_implementation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    return_lse: bool = False,
) -> str:
    """Return the name of the implementation of attention that is probably the fastest.

    On a Hopper GPU, the result is "flash_hopper" or "flash_triton" for large inputs that one of
    them supports, except that grouped heads and another head dimension of v in 16 bits leave out
    "flash_triton", few heads leave out "flash_hopper" if it cannot split the queries, and a
    head_dim above 128 in 16 bits leaves out both where `_is_faster_above_128` is False. In all
    other cases, it is "sdpa", torch's scaled_dot_product_attention. If sdpa lacks a feature that
    the call needs, it is the first of "flash_hopper", "flash_triton" and "naive" that supports the
    call, but not "flash_hopper" if there are too few heads and keys to fill the GPU.

    The arguments are those of `registry.unsupported_reason`.
    """
    call = is_causal, variant, is_packed, return_lse
    # Most calls need no feature. For small inputs, `features` is a considerable part of their time.
    is_usual = variant == NO_VARIANT and not is_packed and not return_lse
    needed = [] if is_usual and q.shape == k.shape == v.shape else features(q, k, v, *call)
    if needed and not set(needed) <= HAS["sdpa"]:
        may_split = not is_packed and variant.window_left is None
        for name in ("flash_hopper", "flash_triton"):
            if unsupported_reason(q, k, v, is_causal, name, *call[1:]) is None and (
                name != "flash_hopper" or _fills_gpu(k, v, may_split)
            ):
                return name
        return "naive"
    is_float32 = q.dtype == torch.float32
    is_plain = not needed
    head_dim = max(q.shape[-1], 64) if is_float32 else q.shape[-1]
    flops = 14.0 * math.prod(q.shape[:-1]) * head_dim * k.shape[-2]
    least = LAUNCH_BOUND_FLOPS_FLOAT32 if is_float32 else LAUNCH_BOUND_FLOPS
    if flops < least or not q.is_cuda:
        return "sdpa"
    if is_hopper(q.device):
        # In 16 bits cuDNN, which sdpa can choose, is faster than flash_triton where both were
        # measured (logs/h100/flash_leaderboard). With 4 heads of q per head of k (head_dim 128),
        # flash_hopper takes 0.82 to 0.95 times as long as cuDNN in forward and backward together
        # (logs/h100/flash_features), and with head_dim 80 and 96 0.85 to 0.87 times.
        names = ["flash_hopper"] + (["flash_triton"] if is_plain or is_float32 else [])
        if not is_float32 and q.shape[-1] > 128:
            names = ["flash_hopper"] if is_plain and _is_faster_above_128(q, k, v) else []
        for name in names:
            if unsupported_reason(q, k, v, is_causal, name) is None and (
                name != "flash_hopper" or _fills_gpu(k, v, True)
            ):
                return name
    return "sdpa"


def _is_faster_above_128(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether flash_hopper is faster than cuDNN for these inputs with head_dim above 128.

    Measured on an H100 (logs/h100/flash_features, 8,192 tokens): with head_dim 256, forward takes
    0.87 times as long as with cuDNN, and backward 0.99 times. With head_dim 192, forward takes 0.95
    times and backward 0.90 times as long. In a trial without a record, forward with head_dim 192
    takes 1.1 times as long with 2,048 tokens. Others are not measured.
    """
    if q.shape[-1] == 192:
        needs_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return needs_backward or k.shape[-2] >= MEASURED_KEYS
    return q.shape[-1] == 256


def _fills_gpu(k: Tensor, v: Tensor, may_split: bool) -> bool:
    """Return whether backward of flash_hopper has work for all multiprocessors of the GPU.

    A program of backward has 128 keys of one head of k, or 64 if head_dim is above 128. (Programs
    with 96 keys are used only where that is estimated to be faster.) If there are few programs, the
    queries may be split, for head_dim 64, 128, 192 and 256 of both k and v. k and v are (batch,
    heads, n_keys, head_dim), or packed (heads, rows, head_dim). For `may_split`, see
    `kernel_options.KernelOptions`.
    """
    splits = may_split and k.shape[-1] == v.shape[-1] and k.shape[-1] in PACKED_HEAD_DIMS
    return splits or fills_gpu(k.shape, multiprocessors(k.device.index))
