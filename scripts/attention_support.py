"""Print which features, dtypes and head dimensions each implementation of attention supports.

    python scripts/attention_support.py

The table is made from the functions and tables by which `flash_attention` accepts or refuses a
call. torch decides which shapes its backends support.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `systems` of this checkout
from systems.kernels.flash_attention.arguments import DTYPES
from systems.kernels.flash_attention.features import FEATURES
from systems.kernels.flash_attention.hopper.support import hopper_form_reason
from systems.kernels.flash_attention.peers.flash_attn_4 import flash_attn_4_form_reason
from systems.kernels.flash_attention.peers.flex import flex_form_reason
from systems.kernels.flash_attention.peers.sdpa import SDPA_BACKENDS
from systems.kernels.flash_attention.registry import ATTENTIONS, HAS
from systems.kernels.flash_attention.triton.attention import triton_form_reason

Reason = Callable[[torch.dtype, int], str | None]  # (dtype, head_dim) -> why not, or None
# GPUs on which an implementation runs, and the forms of inputs that it supports. Those without an
# entry run on all devices with all forms.
GPU = {
    "flash_attn_4": "Hopper, Blackwell", "flash_hopper": "H100, H200", "flash_triton": "CUDA GPU",
    "flex": "CUDA GPU",
}  # fmt: skip
FORM: dict[str, Reason] = {
    "flash_hopper": hopper_form_reason,
    "flash_attn_4": flash_attn_4_form_reason,
    "flash_triton": triton_form_reason,
    "flex": lambda dtype, head_dim: flex_form_reason(head_dim),
}
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
}  # fmt: skip
LARGEST = 4096  # largest head dimension that is tried


def row(name: str) -> list[str]:
    """Return the cells of an implementation: name, GPUs, dtypes, head dimensions, features."""
    if name in ("sdpa", *SDPA_BACKENDS):
        features = ["as torch" if feature in HAS[name] else "" for feature in FEATURES]
        return [name, "as torch", "as torch", "as torch", *features]
    features = ["yes" if feature in HAS[name] else "" for feature in FEATURES]
    reason = FORM.get(name, lambda dtype, head_dim: None)
    dims = range(1, LARGEST + 1)
    dtypes = [dtype for dtype in DTYPES if any(reason(dtype, dim) is None for dim in dims)]
    supported = [dim for dim in dims if reason(dtypes[0], dim) is None]
    names = "as torch" if name == "flex" else ", ".join(NAMES[dtype] for dtype in dtypes)
    return [name, GPU.get(name, "any device"), names, span(supported), *features]


def span(dims: list[int]) -> str:
    """Return a short text for the head dimensions `dims`, which are ascending."""
    if dims[-1] == LARGEST and len(dims) == LARGEST:
        return "any"
    if dims == list(range(dims[0], dims[-1] + 1)):
        return f"{dims[0]} to {dims[-1]}"
    step = dims[1] - dims[0]
    if len(dims) > 2 and dims == list(range(dims[0], dims[-1] + 1, step)):
        first = "" if dims[0] == step else f"from {dims[0]} "
        return f"multiples of {step} {first}to {dims[-1]}"
    if dims[-1] == LARGEST:
        return ", ".join(map(str, dims[:2])) + ", ..."
    return ", ".join(map(str, dims))


def main() -> None:
    headers = ["implementation", "GPU", "dtypes", "head dimensions", *FEATURES]
    print(tabulate([row(name) for name in ATTENTIONS], headers, tablefmt="pipe"))


if __name__ == "__main__":
    main()
