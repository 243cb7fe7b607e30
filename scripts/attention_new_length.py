"""Print the host time of attention with a length for the first time and again, and what is kept.

    python scripts/attention_new_length.py [IMPLEMENTATION] [NUMBER OF LENGTHS]

On a GPU, the inputs are 16 causal heads in bf16, forward and backward. The first lengths compile
kernels and are left out. On a CPU, the inputs are float32 and the times those of the computation.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `systems` of this checkout
from systems.kernels.flash_attention import flash_attention

COMPILING = 40  # lengths until all forms of the kernels are compiled


def microseconds(length: int, implementation: str) -> float:
    """Return the host time of forward and backward with sequences of this length."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", None)
    q = torch.zeros(1, 16, length, 64, device=device, dtype=dtype, requires_grad=True)
    dout = torch.zeros_like(q)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    flash_attention(q, q, q, True, implementation=implementation).backward(dout)
    return (time.perf_counter() - start) * 1e6


def main(implementation: str = "auto", n_lengths: str = "1200") -> None:
    for length in range(1, COMPILING):
        microseconds(length, implementation)
    gc.collect()
    objects = len(gc.get_objects())
    times = []
    for length in range(COMPILING, COMPILING + int(n_lengths)):
        times.append([microseconds(length, implementation) for _ in range(2)])
    gc.collect()
    first, again = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{implementation}: {first:.0f} us with a new length, {again:.0f} us again (medians)")
    print(f"{len(gc.get_objects()) - objects:,} more objects after {n_lengths} lengths")


if __name__ == "__main__":
    main(*sys.argv[1:])
