"""The tiles of the Triton kernels that are fastest on this GPU, searched once and kept on disk.

    python -m systems.kernels.flash_attention.autotune --heads 16 --seq-len 16384 --head-dim 64

On an H100 or H200 the shipped `configurations.TABLE` is used and nothing is searched. On another
GPU, or everywhere with FLASH_ATTENTION_AUTOTUNE=1, the first call with a shape searches: candidates
are compiled side by side, each is held to the table's own result, and the fastest are kept in
$XDG_CACHE_HOME/cluster-sweeps (~/.cache by default) for every later process.
FLASH_ATTENTION_AUTOTUNE=0 never searches.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from systems.kernels.flash_attention.configurations import (
    Configuration,
    Tile,
    block_d,
    configuration,
)

SEARCH = "FLASH_ATTENTION_AUTOTUNE"
COMPILING_THREADS = 16
# Of a candidate's result from the table's own, relative: beyond rounding, a wrong kernel
AGREEMENT = {"16-bit": 1e-2, "bf16x6": 1e-4, "tf32": 1e-2}
SHAPES_Q = ((128, 128, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 64, 4), (64, 32, 4))
SHAPES_KV = ((64, 128, 8), (32, 128, 8), (16, 128, 8), (64, 64, 4), (32, 64, 4), (128, 64, 4))
STAGES = (2, 3, 4)


def candidates(name: str) -> list[Tile]:
    """Tiles to try for the pass "forward", "dkdv" or "dq"."""
    shapes = SHAPES_KV if name == "dkdv" else SHAPES_Q
    return [Tile(*shape, stages) for shape in shapes for stages in STAGES]


def tuned(
    head_dim: int,
    dtype: torch.dtype,
    precision: str,
    is_causal: bool,
    n_queries: int,
    n_keys: int,
    n_heads: int,
    device: torch.device,
) -> Configuration:
    """The configuration for a shape: the table's, or what a search found on this kind of GPU.

    Args:
        n_heads: of all batches together.
    """
    wanted = os.environ.get(SEARCH)
    if device.type != "cuda" or wanted == "0" or torch.cuda.is_current_stream_capturing():
        return configuration(head_dim, dtype, precision)
    if wanted != "1" and torch.cuda.get_device_capability(device) == (9, 0):
        return configuration(head_dim, dtype, precision)
    kind = precision if dtype == torch.float32 else "16-bit"
    # Lengths and heads within a factor of two share their tiles.
    sizes = [n.bit_length() for n in (n_queries, n_keys, n_heads)]
    gpu = torch.cuda.get_device_name(device)
    path = _path([gpu, kind, block_d(head_dim), is_causal, *sizes])
    known = _read(path)
    if known is None:
        with torch.cuda.device(device):
            known = search(
                n_heads, n_queries, n_keys, head_dim, dtype=dtype, precision=precision,
                is_causal=is_causal,
            )  # fmt: skip
        _write(path, known)
    return known


def search(
    n_heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    precision: str = "bf16x6",
    is_causal: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> Configuration:
    """The fastest candidate for each pass, on the current GPU, by the median of 20 ms of calls.

    Args:
        tell: is given a line for each candidate.
    """
    from triton.testing import do_bench

    from systems.kernels.launcher import compiling_only

    shapes = [(n_heads, n, head_dim) for n in (n_queries, n_keys, n_keys, n_queries)]
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    base = configuration(head_dim, dtype, precision)
    # Where dK and dV are launches of their own they stay as they are.
    names = ["forward", "dkdv", "dq"] if base.dv is None else ["forward", "dq"]
    make = functools.partial(_Pass, tensors, base, is_causal, precision)
    tries = {name: [make(name, tile) for tile in candidates(name)] for name in names}
    with compiling_only(COMPILING_THREADS):
        for each in tries.values():
            for candidate in each:
                candidate()
    agreement = AGREEMENT["16-bit" if dtype != torch.float32 else precision]
    found = base
    for name, each in tries.items():
        known = make(name, getattr(base, name))
        right, fastest = known(), do_bench(known, warmup=5, rep=20, return_mode="median")
        tell(f"{name} {getattr(base, name)}: {fastest:.4f} ms, the table's")
        for candidate in each:
            try:
                error = max(map(_difference, candidate(), right))
                if not error <= agreement:
                    tell(f"{name} {candidate.tile}: differs by {error:.1e}")
                    continue
                milliseconds = do_bench(candidate, warmup=5, rep=20, return_mode="median")
            except Exception as problem:  # not compiled, or more shared memory than there is
                tell(f"{name} {candidate.tile}: {str(problem).splitlines()[0]}")
                continue
            tell(f"{name} {candidate.tile}: {milliseconds:.4f} ms")
            if milliseconds < fastest:
                fastest = milliseconds
                tile = candidate.tile._replace(resident=candidate.launch.resident())
                found = found._replace(**{name: tile})
    return found


class _Pass:
    """One pass with a tile, to be called again and again."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        base: Configuration,
        is_causal: bool,
        precision: str,
        name: str,
        tile: Tile,
    ):
        from systems.kernels.flash_attention.launch import plans

        q, k, v, dout = tensors
        self.tile = tile
        self.run: Callable[[], Sequence[Tensor | None]]
        tiles = base._replace(**{name: tile})
        forward, backward = plans(
            q, k, v, dout, is_causal, precision, tiles, needs_dq=name == "dq",
            needs_dkdv=name == "dkdv",
        )  # fmt: skip
        if name == "forward":
            self.launch, self.run = forward.attend, lambda: forward(q, k, v)
        else:
            out, lse = plans(q, k, v, dout, is_causal, precision, base)[0](q, k, v)
            self.launch = backward.dq if name == "dq" else backward.dkdv[0]
            self.run = lambda: backward(q, k, v, out, lse, dout)

    def __call__(self) -> list[Tensor]:
        return [x for x in self.run() if x is not None]


def _difference(x: Tensor, known: Tensor) -> float:
    return float((x.float() - known.float()).norm() / known.float().norm())


def _path(described: list[Any]) -> Path:
    """Of a search's result: another GPU, Triton or kernel has another."""
    import triton

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cluster-sweeps"
    told = json.dumps([*described, triton.__version__, _sources()])
    return folder / f"flash_attention-{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


@functools.cache
def _sources() -> str:
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in ("tiles", "forward_kernel", "backward_kernel")]
    return hashlib.sha256(
        b"".join(file.read_bytes() for file in [*files, here / __file__])
    ).hexdigest()


def _read(path: Path) -> Configuration | None:
    """None where there is none, or none that can be read."""
    try:
        forward, dkdv, dq, dv = json.loads(path.read_text())
        tiles = Tile(*forward), Tile(*dkdv), Tile(*dq)
        return Configuration(*tiles, dv=None if dv is None else Tile(*dv))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, found: Configuration) -> None:
    """Whole or not at all, whoever else writes; a folder that cannot be written costs a search."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, path)
    except OSError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Search the tiles for a shape and keep them.")
    parser.add_argument("--heads", type=int, default=16, help="of all batches together")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "tf32"], default="bf16")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(given.dtype, torch.float32)
    precision = "tf32" if given.dtype == "tf32" else "bf16x6"
    started = time.perf_counter()
    found = search(
        given.heads, given.seq_len, given.seq_len, given.head_dim, dtype=dtype,
        precision=precision, is_causal=not given.full, tell=print,
    )  # fmt: skip
    sizes = [n.bit_length() for n in (given.seq_len, given.seq_len, given.heads)]
    kind = "16-bit" if dtype != torch.float32 else precision
    gpu = torch.cuda.get_device_name()
    path = _path([gpu, kind, block_d(given.head_dim), not given.full, *sizes])
    _write(path, found)
    print(f"{found}\nsearched in {time.perf_counter() - started:.1f} s, kept in {path}")


if __name__ == "__main__":
    main()
