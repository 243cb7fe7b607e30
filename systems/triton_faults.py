"""Versions of Triton with which the kernels of attention refuse to run, and what to install."""

from __future__ import annotations

import importlib.metadata

FAULTS = {
    "3.7.0": "was replaced by 3.7.1 because of faults (pytorch/pytorch#181248 and #187081); "
    "install triton 3.7.1, the version of torch 2.12.1",
}


def fault_of(version: str) -> str | None:
    """Return what is wrong with a version of Triton, or None."""
    known = FAULTS.get(version.split("+")[0])
    return f"triton {version} {known}" if known else None


def _fault_of_installed() -> str | None:
    try:
        return fault_of(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None


# torch.compile traces the functions that read it, so it is a constant.
TRITON_FAULT = _fault_of_installed()
