"""Versions of Triton that compile the kernels wrongly, and what to install instead."""

from __future__ import annotations

import importlib.metadata

FAULTS = {
    "3.7.0": "can compute wrong gradients on Hopper GPUs (triton-lang/triton#9433); install "
    "triton 3.7.1, the version of torch 2.12.1",
}


def _fault() -> str | None:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"triton {version} {FAULTS[version]}" if version in FAULTS else None


# What is wrong with the version of Triton that is installed, or None. torch.compile traces the
# functions that read it, so it is a constant.
TRITON_FAULT = _fault()
