"""The tiles of the Triton kernels that are fastest on this GPU, searched once and kept on disk.

    python -m systems.kernels.flash_attention.autotune --heads 16 --seq-len 16384 --head-dim 64

On an H100 or H200 the shipped `configurations.TABLE` is used and nothing is searched. On another
GPU, or everywhere with FLASH_ATTENTION_AUTOTUNE=1, the first call with a shape searches: candidates
are compiled side by side, each is held to the result of the first that runs, the table's own where
it fits this GPU, and the fastest are kept in $XDG_CACHE_HOME/cluster-sweeps (~/.cache by default)
for every later process. FLASH_ATTENTION_AUTOTUNE=0 never searches.

A call that comes first under CUDA graph capture, or with no memory left for a search, takes the
table's, and calls like it do so as long as the process lives.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.configurations import (
    MAX_HEAD_DIM,
    Configuration,
    Tile,
    block_d,
    configuration,
    kind,
)

SEARCH = "FLASH_ATTENTION_AUTOTUNE"
COMPILING_THREADS = 16
# Of a candidate's result from the first one's, relative: beyond rounding, a wrong kernel
AGREEMENT = {"16-bit": 1e-2, "fp16x3": 1e-4, "tf32": 1e-2}
SHAPES_Q = (
    (128, 128, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4)
)  # fmt: skip
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
    wanted = os.environ.get(SEARCH) or None
    if wanted not in (None, "0", "1"):
        raise ValueError(f"{SEARCH} must be 0 or 1 or not be set; given {wanted!r}")
    table = configuration(head_dim, dtype, precision)
    if device.type != "cuda" or wanted == "0" or 0 in (n_queries, n_keys, n_heads):
        return table
    if torch.cuda.is_current_stream_capturing():
        return table
    if wanted is None and is_hopper(device):
        return table
    gpu = torch.cuda.get_device_name(device)
    path = _path(gpu, head_dim, dtype, precision, is_causal, n_queries, n_keys, n_heads)
    known = _found.get(path) or _read(path)
    if known is None:
        try:
            with torch.cuda.device(device):
                known = search(
                    n_heads, n_queries, n_keys, head_dim, dtype=dtype, precision=precision,
                    is_causal=is_causal,
                )  # fmt: skip
        except torch.OutOfMemoryError:  # a search has tensors of its own
            return table
        _write(path, known)
    _found[path] = known
    return known


_found: dict[Path, Configuration] = {}  # also where no folder can be written


def search(
    n_heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    precision: str = "fp16x3",
    is_causal: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> Configuration:
    """The fastest candidate for each pass, on the current GPU, by the median of 20 ms of calls.

    Args:
        tell: is given a line for each candidate.
    """
    from triton.testing import do_bench

    from systems.kernels.launcher import compiling_only

    # Not the caller's generator, which is to draw the same whether a search was needed or not
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn((n_heads, n, head_dim), generator=generator, device="cuda").to(dtype)
        for n in (n_queries, n_keys, n_keys, n_queries)
    )
    # Of forward, which is searched first: what backward is given.
    results = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device="cuda")
    found = configuration(head_dim, dtype, precision)
    # Where dK and dV are launches of their own they stay as they are.
    names = ["forward", "dkdv", "dq"] if found.dv is None else ["forward", "dq"]
    make = functools.partial(_Pass, (q, k, v, *results, dout), found, is_causal, precision)
    tries = {
        name: [make(name, tile) for tile in (getattr(found, name), *candidates(name))]
        for name in names
    }
    with compiling_only(COMPILING_THREADS):
        for each in tries.values():
            for candidate in each:
                candidate()
    agreement = AGREEMENT[kind(dtype, precision)]
    for name, each in tries.items():
        right: list[Tensor] | None = None
        best, fastest = each[0], math.inf
        for candidate in each:
            try:
                made = candidate()
                error = 0.0 if right is None else max(map(_difference, made, right))
                if not error <= agreement:
                    tell(f"{name} {candidate.tile}: differs by {error:.1e}")
                    continue
                milliseconds = do_bench(candidate, warmup=5, rep=20, return_mode="median")
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # not compiled, or more shared memory than there is
                tell(f"{name} {candidate.tile}: {str(problem).splitlines()[0]}")
                continue
            right = right or made
            tell(f"{name} {candidate.tile}: {milliseconds:.4f} ms")
            if milliseconds < fastest:
                best, fastest = candidate, milliseconds
        if right is None:
            raise RuntimeError(
                f"none of {len(each)} tiles of the {name} pass runs on "
                f"{torch.cuda.get_device_name()} with {dtype} and head_dim {head_dim}"
            )
        tile = best.tile._replace(resident=best.launch.resident())
        found = found._replace(**{name: tile})
        if name == "forward":
            for given, made_once in zip(results, right, strict=True):
                given.copy_(made_once)
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
        from systems.kernels.flash_attention.triton.plans import planned

        q, k, v, out, lse, dout = tensors
        self.tile = tile
        self.run: Callable[[], Sequence[Tensor | None]]
        tiles = base._replace(**{name: tile})
        forward, backward = planned(
            q, k, v, dout, is_causal, precision, tiles, needs_dq=name == "dq",
            needs_dkdv=name == "dkdv",
        )  # fmt: skip
        if name == "forward":
            self.launch, self.run = forward.attend, lambda: forward(q, k, v)
        else:
            self.launch = backward.dq if name == "dq" else backward.dkdv[0]
            self.run = lambda: backward(q, k, v, out, lse, dout)

    def __call__(self) -> list[Tensor]:
        return [x for x in self.run() if x is not None]


def _difference(x: Tensor, known: Tensor) -> float:
    return float((x.float() - known.float()).norm() / known.float().norm())


def _path(
    gpu: str,
    head_dim: int,
    dtype: torch.dtype,
    precision: str,
    is_causal: bool,
    n_queries: int,
    n_keys: int,
    n_heads: int,
) -> Path:
    """Of a search's result: another GPU, Triton or kernel has another.

    Lengths and heads within a factor of two share their tiles.
    """
    import triton

    folder = Path(os.environ.get("XDG_CACHE_HOME") or _cache_of_user()) / "cluster-sweeps"
    sizes = [n.bit_length() for n in (n_queries, n_keys, n_heads)]
    described = [gpu, kind(dtype, precision), block_d(head_dim), bool(is_causal), *sizes]
    told = json.dumps([*described, triton.__version__, _sources()])
    return folder / f"flash_attention-{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


def _cache_of_user() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user need not have a home
        return Path(tempfile.gettempdir())


@functools.cache
def _sources() -> str:
    names = "tiles", "forward_kernel", "backward_kernel", "plans"
    here = Path(__file__)
    files = [here, here.with_name("configurations.py")]
    files += [here.with_name("triton") / f"{name}.py" for name in names]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(path: Path) -> Configuration | None:
    """None where there is none, or none that can be read."""
    try:
        forward, dkdv, dq, dv = json.loads(path.read_text())
        tiles = Tile(*forward), Tile(*dkdv), Tile(*dq)
        known = Configuration(*tiles, dv=None if dv is None else Tile(*dv))
        numbers = [n for tile in known if tile is not None for n in tile]
        return known if all(type(n) is int and n > 0 for n in numbers) else None
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
    errors = [
        f"--{name.replace('_', '-')} must be {least} to {most}; given {getattr(given, name)}"
        for name, least, most in (
            ("heads", 1, math.inf), ("seq_len", 1, math.inf), ("head_dim", 1, MAX_HEAD_DIM)
        )
        if not least <= getattr(given, name) <= most
    ]  # fmt: skip
    if not torch.cuda.is_available():
        errors.append("there is no GPU to measure on")
    if errors:
        parser.error("; ".join(errors))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(given.dtype, torch.float32)
    precision = "tf32" if given.dtype == "tf32" else "fp16x3"
    started = time.perf_counter()
    found = search(
        given.heads, given.seq_len, given.seq_len, given.head_dim, dtype=dtype,
        precision=precision, is_causal=not given.full, tell=print,
    )  # fmt: skip
    path = _path(
        torch.cuda.get_device_name(), given.head_dim, dtype, precision, not given.full,
        given.seq_len, given.seq_len, given.heads,
    )  # fmt: skip
    _write(path, found)
    print(f"{found}\nsearched in {time.perf_counter() - started:.1f} s, kept in {path}")


if __name__ == "__main__":
    main()
