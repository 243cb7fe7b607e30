"""Choose the tiles for a shape: those of the table, or those that a search found on this GPU.

On an H100 or H200 `tile_table.TABLE` is used and nothing is searched. On another GPU, or
everywhere with FLASH_ATTENTION_AUTOTUNE=1, the first call with a shape searches and writes what it
finds to a file in $XDG_CACHE_HOME/cluster-sweeps (~/.cache by default), which later processes read.
FLASH_ATTENTION_AUTOTUNE=0 never searches.

A first call during CUDA graph capture, or without enough free memory for a search, uses the table.
Its plan is cached, so later calls with the same shapes use the table, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.triton import tile_search
from systems.kernels.flash_attention.triton.tile_table import (
    Configuration,
    Tile,
    block_d,
    configuration,
    kind,
)

AUTOTUNE = "FLASH_ATTENTION_AUTOTUNE"  # environment variable: 0, 1 or not set
MAX_FOUND = 1024
_found: dict[Path, Configuration] = {}  # results of this process, for folders that are read-only


def tuned_tiles(
    head_dim: int,
    dtype: torch.dtype,
    precision: str,
    is_causal: bool,
    n_queries: int,
    n_keys: int,
    n_heads: int,
    device: torch.device,
) -> Configuration:
    """Return the tiles for a shape, from the table or a search. May take a minute to search.

    Args:
        n_heads: of all batches together.
    """
    setting = os.environ.get(AUTOTUNE) or None
    if setting not in (None, "0", "1"):
        raise ValueError(f"{AUTOTUNE} must be 0 or 1 or not be set; given {setting!r}")
    table = configuration(head_dim, dtype, precision)
    if device.type != "cuda" or setting == "0" or 0 in (n_queries, n_keys, n_heads):
        return table
    if torch.cuda.is_current_stream_capturing():
        return table
    if setting is None and is_hopper(device):
        return table
    gpu = torch.cuda.get_device_name(device)
    path = cache_path(gpu, head_dim, dtype, precision, is_causal, n_queries, n_keys, n_heads)
    if path in _found:
        return _found[path]
    tiles = read_tiles(path)
    if tiles is None:
        try:
            with torch.cuda.device(device):
                tiles = tile_search.search(
                    n_heads, n_queries, n_keys, head_dim, dtype=dtype, precision=precision,
                    is_causal=is_causal,
                )  # fmt: skip
        except torch.OutOfMemoryError:  # a search allocates tensors of its own
            return table
        write_tiles(path, tiles)
    if len(_found) >= MAX_FOUND:
        del _found[next(iter(_found))]  # the oldest
    _found[path] = tiles
    return tiles


def cache_path(
    gpu: str,
    head_dim: int,
    dtype: torch.dtype,
    precision: str,
    is_causal: bool,
    n_queries: int,
    n_keys: int,
    n_heads: int,
) -> Path:
    """Return the file of a search's result. Another GPU, Triton or kernel source has another file.

    Lengths and numbers of heads within a factor of two share a file.
    """
    import triton

    folder = Path(os.environ.get("XDG_CACHE_HOME") or _user_cache()) / "cluster-sweeps"
    sizes = [n.bit_length() for n in (n_queries, n_keys, n_heads)]
    key = json.dumps(
        [gpu, kind(dtype, precision), block_d(head_dim), bool(is_causal), *sizes,
         triton.__version__, _source_hash()]
    )  # fmt: skip
    return folder / f"flash_attention-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _user_cache() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user need not have a home
        return Path(tempfile.gettempdir())


@functools.cache
def _source_hash() -> str:
    """Hash the source code that decides which tiles are fastest."""
    here = Path(__file__).parent
    names = (
        "choose_tiles", "tile_search", "tile_ops", "tile_table", "work_splits", "forward_kernel",
        "backward_kernel", "plans",
    )  # fmt: skip
    files = [here / f"{name}.py" for name in names]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def read_tiles(path: Path) -> Configuration | None:
    """Return what `write_tiles` wrote, None if there is no valid file."""
    try:
        forward, dkdv, dq, dv = json.loads(path.read_text())
        tiles = Configuration(
            Tile(*forward), Tile(*dkdv), Tile(*dq), dv=None if dv is None else Tile(*dv)
        )
        numbers = [n for tile in tiles if tile is not None for n in tile]
        return tiles if all(type(n) is int and n > 0 for n in numbers) else None
    except (OSError, ValueError, TypeError):
        return None


def write_tiles(path: Path, tiles: Configuration) -> None:
    """Write the file atomically. A folder that cannot be written is no error: it costs a search."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(tiles, file)
        os.replace(file.name, path)
    except OSError:
        pass
