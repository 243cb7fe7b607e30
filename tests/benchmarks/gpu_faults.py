"""A benchmark whose runs fail in the ways in which a GPU kernel can fail."""

# Triton does not allow type annotations on the arguments of a kernel.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, Literal

from systems.benchmark import BenchmarkParams

VERSION = 1
PRELOAD = ("torch._dynamo",)  # as in real benchmarks: this import must not initialize CUDA


class Params(BenchmarkParams):
    what: Literal["ok", "oom", "assert", "illegal_access", "hang"]
    order: int = 0  # distinguishes the runs that should succeed


def run(params: Params) -> dict[str, Any]:
    import torch

    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    if params.what == "oom":
        held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
        del held
    elif params.what == "assert":
        x[torch.tensor([1 << 20], device="cuda")].sum().item()
    elif params.what == "illegal_access":
        _write_far_outside(x)
        torch.cuda.synchronize()
    elif params.what == "hang":
        while True:  # the GPU stays busy until the process is killed
            torch.cuda._sleep(10**9)
            torch.cuda.synchronize()
    return {"samples_ms": {"forward": [float(x.sum().item())]}}


def _write_far_outside(x: Any) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(pointer):
        tl.store(pointer + (1 << 40), 1.0)

    kernel[(1,)](x)
