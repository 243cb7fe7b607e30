"""Print which features, dtypes and head dimensions each implementation of attention supports.

    python scripts/attention_support.py

The table is made from the functions and tables by which `flash_attention` accepts or refuses a
call. torch decides which shapes its backends support.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `systems` of this checkout
from systems.kernels.flash_attention.arguments import DTYPES
from systems.kernels.flash_attention.call import FEATURES
from systems.kernels.flash_attention.implementations import ATTENTIONS

NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
}  # fmt: skip
LARGEST = 4096  # largest head dimension that is tried


def row(name: str) -> list[str]:
    """Return the cells of an implementation: name, GPUs, dtypes, head dimensions, features."""
    found = ATTENTIONS[name]
    if found.gpus == "as torch":
        features = ["as torch" if feature in found.features else "" for feature in FEATURES]
        return [name, "as torch", "as torch", "as torch", *features]
    features = ["yes" if feature in found.features else "" for feature in FEATURES]
    dims = range(1, LARGEST + 1)

    def supports(dtype: torch.dtype, dim: int) -> bool:
        return found.form_reason(dtype, dim, dim) is None

    dtypes = [dtype for dtype in DTYPES if any(supports(dtype, dim) for dim in dims)]
    supported = [dim for dim in dims if supports(dtypes[0], dim)]
    names = "as torch" if name == "flex" else ", ".join(NAMES[dtype] for dtype in dtypes)
    return [name, found.gpus, names, span(supported), *features]


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
