"""The implementation flash_hopper: FlashAttention-3 for Hopper GPUs."""

from __future__ import annotations

from systems.kernels.flash_attention.autograd import FlashAttentionHopper
from systems.kernels.flash_attention.call import FEATURES, Implementation
from systems.kernels.flash_attention.hopper.forward_launch import plan_of
from systems.kernels.flash_attention.hopper.support import form_reason, unsupported_reason

IMPLEMENTATIONS = {
    "flash_hopper": Implementation(
        FlashAttentionHopper.apply, frozenset(FEATURES), unsupported_reason, form_reason,
        "H100, H200", any_scale=True, plan=plan_of,
    )
}  # fmt: skip
