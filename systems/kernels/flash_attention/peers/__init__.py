"""Attention of other packages: torch's fused kernels, FlexAttention and flash-attn-4."""
