"""The implementations of attention by name, what they support, and which one `auto` chooses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from systems.attentions import ATTENTIONS as NAMES
from systems.kernels.device import is_hopper, multiprocessors
from systems.kernels.flash_attention import flash_pytorch, naive
from systems.kernels.flash_attention.call import PLAIN, Call, Implementation, features
from systems.kernels.flash_attention.hopper import attention as flash_hopper
from systems.kernels.flash_attention.hopper.splits import fills_gpu
from systems.kernels.flash_attention.peers import flash_attn_4, flex, sdpa
from systems.kernels.flash_attention.triton import attention as flash_triton

# The sources of a run leave out this module, so an edit of one implementation does not count as an
# edit of the others.
_FOUND = {
    name: implementation
    for module in (naive, flash_pytorch, flash_triton, flash_hopper, flash_attn_4, sdpa, flex)
    for name, implementation in module.IMPLEMENTATIONS.items()
}
ATTENTIONS: dict[str, Implementation] = {name: _FOUND[name] for name in NAMES}

# Inputs with fewer FLOPs are launch-bound, and torch has less launch overhead than our kernels. The
# FLOPs are those of forward and backward together, without a mask. Measured for one head on an H200
# (logs/h200/flash):
# - bfloat16, 128 to 1,024 tokens: 0.22 ms of wall time (median) with torch's fastest backend,
#   0.26 ms with flash_hopper.
# - bfloat16, 16k tokens (2.4e11 FLOPs): 0.54 ms of GPU time with cuDNN, 0.27 ms with flash_hopper.
# - float32, 4k tokens (1.5e10 FLOPs): 1.36 ms with torch's efficient backend, 0.17 ms with
#   flash_triton. Head dimensions below 64 take torch's efficient backend as long as 64.
LAUNCH_BOUND_FLOPS = 2e11
LAUNCH_BOUND_FLOPS_FLOAT32 = 1e10
# Above head dimension 128: head dimension of q, that of v, whether heads are grouped, and whether
# backward follows -> number of keys from which flash_hopper was measured to take less time than
# cuDNN, forward and backward together if both are run. Others are slower, or not measured. Time
# over that of cuDNN on an H100 (logs/h100/flash_features):
# - 256, 8,192 tokens: forward 0.87, backward 1.00, together 0.97; with 8 heads of q for one of k
#   0.77, 1.01 and 0.96.
# - 192, 8,192 tokens: forward 0.87, backward 0.71, together 0.74. In an older trial without a
#   record, forward took 1.1 times as long with 2,048 tokens.
# - 192 and 128, 4,096 tokens: forward 0.91, backward 1.38, together 1.27.
FASTER_ABOVE_128 = {
    (256, 256, False, False): 0,
    (256, 256, False, True): 0,
    (256, 256, True, False): 8192,
    (256, 256, True, True): 8192,
    (192, 192, False, False): 8192,
    (192, 192, False, True): 0,
    (192, 128, False, False): 4096,
}


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, implementation: str, call: Call = PLAIN
) -> str | None:
    """Return why an implementation does not support a call on this machine, or None if it does.

    `implementation` is a key of ATTENTIONS. Tensors are (batch, heads, rows, head_dim), or packed
    (heads, rows, head_dim).
    """
    chosen = ATTENTIONS[implementation]
    missing = [name for name in features(q, k, v, call) if name not in chosen.features]
    if missing:
        return f"{implementation} does not support {', '.join(missing)}"
    return chosen.unsupported_reason(q, k, v, call)


def best_implementation(q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN) -> str:
    """Return the name of the implementation of attention that is probably the fastest.

    docs/attention.md has a table of the choices, and the functions below have the reasons.
    """
    needed = set(features(q, k, v, call))
    if needed <= ATTENTIONS["sdpa"].features:
        names = (*_ahead_of_torch(q, k, v, bool(needed)), "sdpa")
    else:
        names = ("flash_hopper", "flash_triton", "naive")
    return next(
        name
        for name in names
        if unsupported_reason(q, k, v, name, call) is None
        and (name != "flash_hopper" or _fills_gpu(k, call))
    )


def _ahead_of_torch(q: Tensor, k: Tensor, v: Tensor, needs_more: bool) -> tuple[str, ...]:
    """Return the implementations that are faster than torch's for such tensors, if they fit.

    `needs_more` tells whether heads are grouped, or v has another head dimension.
    """
    is_float32 = q.dtype == torch.float32
    head_dim = max(q.shape[-1], 64) if is_float32 else q.shape[-1]
    flops = 14.0 * math.prod(q.shape[:-1]) * head_dim * k.shape[-2]
    least = LAUNCH_BOUND_FLOPS_FLOAT32 if is_float32 else LAUNCH_BOUND_FLOPS
    if flops < least or not q.is_cuda or not is_hopper(q.device):
        return ()
    if is_float32:
        return ("flash_triton",)
    if head_dim > 128:
        return ("flash_hopper",) if _is_faster_above_128(q, k, v) else ()
    # flash_triton takes head dimensions below 64, where it was faster than cuDNN with one head
    # (logs/h200/flash). It was not measured with grouped heads or another head dimension of v.
    return ("flash_hopper",) if needs_more else ("flash_hopper", "flash_triton")


def _is_faster_above_128(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether flash_hopper is faster than cuDNN, by FASTER_ABOVE_128."""
    is_grouped = q.shape[-3] != k.shape[-3]
    needs_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    least = FASTER_ABOVE_128.get((q.shape[-1], v.shape[-1], is_grouped, needs_backward))
    return least is not None and k.shape[-2] >= least


def _fills_gpu(k: Tensor, call: Call) -> bool:
    """Return whether backward of flash_hopper fills the GPU, or may split the queries to do so."""
    may_split = call.packing is None and call.window_left is None
    return may_split or fills_gpu(k.shape, multiprocessors(k.device.index))
