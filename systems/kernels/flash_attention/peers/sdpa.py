"""torch's scaled_dot_product_attention with one backend, so that each backend can be measured."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from systems.kernels.alignment import aligned, aligning_gradient
from systems.kernels.flash_attention.call import GROUPED, VALUE_DIM, Call, Implementation

SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Compute attention with `torch.nn.functional.scaled_dot_product_attention`.

    torch chooses the backend. q is (batch, heads, seq_len, head_dim). k and v may have fewer heads,
    as for `naive`. On a GPU, inputs and gradients of the output that are not aligned are copied,
    except under torch.compile, which does so itself.
    """
    if q.is_cuda and not torch.compiler.is_compiling():
        q, k, v = aligned(q), aligned(k), aligned(v)
        return aligning_gradient(_sdpa(q, k, v, call.is_causal, call.scale))
    return _sdpa(q, k, v, call.is_causal, call.scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    if scale == 0.0:
        q, scale = q * 0.0, 1.0  # torch multiplies the -inf of a causal mask by the scale on CPUs
    if q.shape[-3] == k.shape[-3]:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


def _with_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    # torch's FLASH_ATTENTION kernel for CPUs needs a last stride of 1.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with sdpa_kernel([backend]):
        return sdpa(q, k, v, call)


def _unsupported_reason(name: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Return the reason why a backend does not support a call on this machine, or None."""
    if name == "sdpa_math":
        return None
    if not q.is_cuda:
        if name == "sdpa_flash":  # torch also has a FLASH_ATTENTION kernel for CPUs
            if q.shape[-1] == v.shape[-1]:
                return None
            return "sdpa_flash needs equal head dimensions of q and v on a CPU"
        return f"{name} needs a CUDA GPU"
    params = torch.backends.cuda.SDPAParams(
        q, k, v, None, 0.0, call.is_causal, bool(q.shape[-3] != k.shape[-3])
    )
    check = {
        "sdpa_flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa_cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "sdpa_efficient": torch.backends.cuda.can_use_efficient_attention,
    }[name]
    if check(params, debug=False):
        return None
    gpu = torch.cuda.get_device_name(q.device)
    return f"{name} does not support dtype {q.dtype} and shape {tuple(q.shape)} on {gpu}"


def _plan(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Call | None:
    return call if (call.scale or 0) >= 0 else None  # `api` makes the scale positive


_HAS = frozenset({GROUPED, VALUE_DIM})
IMPLEMENTATIONS = {
    "sdpa": Implementation(sdpa, _HAS, gpus="as torch", plan=_plan),
    **{
        name: Implementation(
            partial(_with_backend, backend), _HAS, partial(_unsupported_reason, name),
            gpus="as torch",
        )
        for name, backend in SDPA_BACKENDS.items()
    },
}  # fmt: skip
