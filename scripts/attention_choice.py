"""Print which implementation of attention `auto` chooses on an H100 or H200, by inputs.

    python scripts/attention_choice.py

The table is made by the function that chooses. Its inputs are tensors without data, and the GPU is
a stand-in with 132 multiprocessors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `systems` of this checkout
from systems.kernels.flash_attention.call import Call, PackedSizes
from systems.kernels.flash_attention.implementations import best_implementation

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)
SMALL, LARGE = (1, 1024), (16, 8192)  # heads and tokens
GROUP = 4  # heads of queries per head of keys
CAUSAL = Call(True)


def choice(
    head_dim: int,
    heads: int,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    group: int = 1,
    needs_gradient: bool = True,
    call: Call = CAUSAL,
) -> str:
    """Return the implementation that is chosen for attention of such inputs."""

    def tensor(heads: int) -> torch.Tensor:
        shape = (heads, tokens, head_dim) if call.packing else (1, heads, tokens, head_dim)
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=needs_gradient)

    q, k = tensor(heads), tensor(heads // group)
    return best_implementation(q, k, k, call)


# Inputs, size, and further arguments of `choice`
ROWS: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("bf16", SMALL, {}),
    ("bf16", LARGE, {}),
    ("bf16, forward only", (16, 4096), {"needs_gradient": False}),
    ("bf16, grouped heads", LARGE, {"group": GROUP}),
    ("bf16, window of keys before", SMALL, {"call": Call(True, window_left=255)}),
    ("bf16, window of keys before", LARGE, {"call": Call(True, window_left=255)}),
    ("bf16, softcap", SMALL, {"call": Call(True, softcap=30.0)}),
    ("bf16, softcap", LARGE, {"call": Call(True, softcap=30.0)}),
    ("bf16, packed sequences", SMALL, {"call": Call(True, packing=PackedSizes(4, 1024, 1024))}),
    ("bf16, packed sequences", LARGE, {"call": Call(True, packing=PackedSizes(4, 1024, 1024))}),
    ("fp32", SMALL, {"dtype": torch.float32}),
    ("fp32", LARGE, {"dtype": torch.float32}),
]


def main() -> None:
    gpu = SimpleNamespace(multi_processor_count=132)
    with (
        FakeTensorMode(),
        patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        patch("torch.cuda.get_device_properties", lambda *_: gpu),
    ):
        table = [
            [inputs, *size, *(choice(dim, *size, **options) for dim in HEAD_DIMS)]
            for inputs, size, options in ROWS
        ]
    headers = ["inputs", "heads", "tokens", *(f"head_dim {dim}" for dim in HEAD_DIMS)]
    print(tabulate(table, headers, tablefmt="pipe", intfmt=","))


if __name__ == "__main__":
    main()
