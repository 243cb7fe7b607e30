"""What the compiler makes of the attention kernels for sm_90, on a machine without a GPU.

    make compile-check

Prints registers of a thread, bytes that it spills and shared memory of a program for every default
configuration: head dimension, dtype, causal or full, pass. Exits 1 if one spills, or needs more
shared memory than a multiprocessor has for a program.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # the systems of this checkout
from systems.kernels.flash_attention.backward_kernel import delta_kernel, dkdv_kernel, dq_kernel
from systems.kernels.flash_attention.combine_kernel import combine_kernel, sum_kernel
from systems.kernels.flash_attention.configurations import Tile, block_d, configuration
from systems.kernels.flash_attention.forward_kernel import forward_kernel
from systems.kernels.flash_attention.launch import MOVED
from tests.hopper import compile_for_hopper, resources

SHARED_LIMIT = 227 << 10  # bytes a program may have on sm_90
HEAD_DIMS = (16, 32, 64, 80, 128)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PASSES = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel}
MOVERS = {"delta": delta_kernel, "combine": combine_kernel, "sum": sum_kernel}
FLOAT32 = {"lse", "delta", "parts", "part_lse"}  # pointers
OF_INPUTS = {"query", "key", "value", "out", "dout", "dkey", "dvalue", "dquery"}


class Resources(NamedTuple):
    """Of one compiled kernel: of a thread, of a thread in bytes, of a program in bytes."""

    registers: int
    spilled: int
    shared: int
    ptx: str


def compile_pass(
    name: str, head_dim: int, dtype: torch.dtype, is_causal: bool, tile: Tile
) -> Resources:
    """A kernel of PASSES for contiguous, aligned inputs."""
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k, "IS_CAUSAL": is_causal, "PRECISION": "tf32x3",
        "STAGES": tile.num_stages,
    }  # fmt: skip
    return _compile(PASSES[name], constants, head_dim, dtype, tile.num_warps)


def compile_mover(name: str, head_dim: int, dtype: torch.dtype) -> Resources:
    """A kernel of MOVERS for contiguous, aligned inputs."""
    columns = block_d(head_dim)
    constants = {"HEAD_DIM": head_dim, "ROWS": MOVED // columns, "COLUMNS": columns}
    return _compile(MOVERS[name], constants, head_dim, dtype, 4)


def _compile(
    kernel: Any, constants: dict[str, Any], head_dim: int, dtype: torch.dtype, warps: int
) -> Resources:
    def kind(argument: str) -> str:
        if argument in FLOAT32:
            return "*fp32"
        if argument in OF_INPUTS:
            return f"*{NAMES[dtype]}"
        return "fp32" if argument in ("scale", "scale_log2e") else "i32"

    def is_aligned(argument: str) -> bool:
        if argument in FLOAT32 | OF_INPUTS:
            return True
        return head_dim % 16 == 0 and argument.endswith(("_split", "_batch", "_head", "_row"))

    names = kernel.arg_names
    made = compile_for_hopper(
        kernel,
        {name: kind(name) for name in names if name not in constants},
        constants,
        warps,
        divisible_by_16=[name for name in names if is_aligned(name)],
    )
    with tempfile.TemporaryDirectory() as folder:
        used = resources(made, Path(folder))
    spilled = used["STACK"] + used["LOCAL"]
    return Resources(used["REG"], spilled, made.metadata.shared, made.asm["ptx"])


def main() -> int:
    rows: list[list[object]] = []
    bad = 0
    for dtype, head_dim in product(NAMES, HEAD_DIMS):
        made: list[tuple[list[object], Resources]] = []
        for name, is_causal in product(PASSES, (True, False)):
            tile: Tile = getattr(configuration(head_dim, dtype), name)
            found = compile_pass(name, head_dim, dtype, is_causal, tile)
            made.append(([name, "causal" if is_causal else "full", *tile], found))
        for name in MOVERS:
            made.append(([name, *[""] * 5], compile_mover(name, head_dim, dtype)))
        for labels, found in made:
            wrong = found.spilled > 0 or found.shared > SHARED_LIMIT
            bad += wrong
            row = [NAMES[dtype], head_dim, *labels, *found[:2], found.shared / 1024]
            rows.append([*row, "WRONG" if wrong else ""])
    headers = [
        "dtype", "head_dim", "pass", "mask", "block_q", "block_k", "warps", "stages",
        "registers", "spilled bytes", "shared KiB", "",
    ]  # fmt: skip
    print(tabulate(rows, headers))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
