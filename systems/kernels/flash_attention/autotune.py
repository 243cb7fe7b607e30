"""Search for the fastest tile sizes of the Triton kernels for one input shape, and save them.

    python -m systems.kernels.flash_attention.autotune --heads 16 --seq-len 16384 --head-dim 64

The search runs on the current GPU. It compiles a list of candidate tile sizes in parallel and
measures each, those of `triton.tile_table` first. A candidate is rejected if its results differ by
more than rounding errors from those of the first that runs.

The module `triton.choose_tiles` describes which calls of the kernels use the saved tile sizes, and
which calls start a search themselves.
"""

from __future__ import annotations

import argparse
import time

import torch

from systems.kernels.flash_attention.triton.choose_tiles import cache_path, write_tiles
from systems.kernels.flash_attention.triton.tile_search import search
from systems.kernels.flash_attention.triton.tile_table import MAX_HEAD_DIM


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the fastest tile sizes for an input shape.")
    parser.add_argument("--heads", type=int, default=16, help="batch size times number of heads")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "tf32"], default="bf16")
    parser.add_argument(
        "--full", action="store_true", help="search for attention without a causal mask"
    )
    args = parser.parse_args()
    errors = [
        f"--{name} must be at least 1, got {given}"
        for name, given in (("heads", args.heads), ("seq-len", args.seq_len))
        if given < 1
    ]
    if not 1 <= args.head_dim <= MAX_HEAD_DIM:
        errors.append(f"--head-dim must be 1 to {MAX_HEAD_DIM}, got {args.head_dim}")
    if not torch.cuda.is_available():
        errors.append("the search needs a GPU, but torch finds none")
    if errors:
        parser.error("; ".join(errors))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.dtype, torch.float32)
    precision = "tf32" if args.dtype == "tf32" else "fp16x3"
    started = time.perf_counter()
    found = search(
        args.heads, args.seq_len, args.seq_len, args.head_dim, dtype=dtype,
        precision=precision, is_causal=not args.full, report=print,
    )  # fmt: skip
    path = cache_path(
        torch.cuda.get_device_name(), args.head_dim, dtype, precision, not args.full,
        args.seq_len, args.seq_len, args.heads,
    )  # fmt: skip
    write_tiles(path, found)
    print(
        f"{found}\nThe search took {time.perf_counter() - started:.1f} s. "
        f"The tile sizes are saved in {path}"
    )


if __name__ == "__main__":
    main()
