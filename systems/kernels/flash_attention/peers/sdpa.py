"""torch's scaled_dot_product_attention with one backend, so that each backend can be measured."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from systems.kernels.flash_attention.features import GROUPED, VALUE_DIM
from systems.kernels.flash_attention.layout import aligned, aligning_gradient

HAS = frozenset({GROUPED, VALUE_DIM})
SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    implementation: str = "sdpa_flash",
) -> Tensor:
    """Compute attention with one backend of `torch.nn.functional.scaled_dot_product_attention`.

    The backends are sdpa_flash, sdpa_cudnn, sdpa_efficient and sdpa_math. q is (batch, heads,
    seq_len, head_dim). k and v may have fewer heads, as for `naive`.

    Raises:
        RuntimeError: if the backend does not support these inputs; see `sdpa_unsupported_reason`.
    """
    with sdpa_kernel([SDPA_BACKENDS[implementation]]):
        return sdpa_auto(q, k, v, is_causal, scale)


def sdpa_auto(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with `torch.nn.functional.scaled_dot_product_attention`.

    torch chooses the backend. The arguments are those of `sdpa`. On a GPU, inputs and gradients of
    the output that are not aligned are copied, except under torch.compile, which does so itself.
    """
    if q.is_cuda and not torch.compiler.is_compiling():
        q, k, v = aligned(q), aligned(k), aligned(v)
        return aligning_gradient(_sdpa(q, k, v, is_causal, scale))
    return _sdpa(q, k, v, is_causal, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    if scale == 0.0:
        q, scale = q * 0.0, 1.0  # torch multiplies the -inf of a causal mask by the scale on CPUs
    if q.shape[-3] == k.shape[-3]:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


def sdpa_unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, implementation: str
) -> str | None:
    """Return the reason why a backend of torch's attention does not support q, k and v, or None.

    None means that it supports these inputs, (batch, heads, seq_len, head_dim), on this machine.
    """
    if implementation == "sdpa_math":
        return None
    if not q.is_cuda:
        if implementation == "sdpa_flash":  # torch also has a FLASH_ATTENTION kernel for CPUs
            if q.shape[-1] == v.shape[-1]:
                return None
            return "sdpa_flash needs equal head dimensions of q and v on a CPU"
        return f"{implementation} needs a CUDA GPU"
    params = torch.backends.cuda.SDPAParams(
        q, k, v, None, 0.0, is_causal, bool(q.shape[-3] != k.shape[-3])
    )
    check = {
        "sdpa_flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa_cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "sdpa_efficient": torch.backends.cuda.can_use_efficient_attention,
    }[implementation]
    if check(params, debug=False):
        return None
    gpu = torch.cuda.get_device_name(q.device)
    return f"{implementation} does not support dtype {q.dtype} and shape {tuple(q.shape)} on {gpu}"
