"""Choose the tile sizes for an input shape, from a table or by a search on the current GPU.

On an H100 or H200, the tile sizes are those of `tile_table.TABLE`. On another GPU, the first call
with an input shape searches for the fastest tile sizes. It saves them in a file in the folder
$XDG_CACHE_HOME/cluster-sweeps (by default ~/.cache/cluster-sweeps). Later processes read this file
and do not search. The environment variable FLASH_ATTENTION_AUTOTUNE=1 enables the search on all
GPUs, and FLASH_ATTENTION_AUTOTUNE=0 disables it.

A call does not search with a softcap, during CUDA graph capture, or if there is not enough free
memory for a search. It then uses the table. The module `launch` caches this choice, so later calls
of the process with the same shapes also use the table.
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

AUTOTUNE = "FLASH_ATTENTION_AUTOTUNE"  # environment variable, must be 0, 1 or unset
MAX_FOUND = 1024  # maximum number of entries in _found
_found: dict[Path, Configuration] = {}  # results of searches, in case no file can be written


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
    """Return the tile sizes of all kernels for an input shape, as the module describes.

    A new search takes about a minute. n_heads includes the batch size.

    Raises:
        ValueError: if the environment variable FLASH_ATTENTION_AUTOTUNE is set to a value other
            than 0 or 1.
        RuntimeError: if a search finds no tile sizes that run on this GPU.
    """
    setting = os.environ.get(AUTOTUNE) or None
    if setting not in (None, "0", "1"):
        raise ValueError(f"{AUTOTUNE} must be 0, 1 or unset, got {setting!r}")
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
        except torch.OutOfMemoryError:  # a search allocates additional tensors
            return table
        write_tiles(path, tiles)
    if len(_found) >= MAX_FOUND:
        del _found[next(iter(_found))]  # the oldest entry
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
    """Return the path of the file for the result of a search for the fastest tile sizes.

    It depends on the properties of the inputs, on the GPU, on the version of Triton and on the
    source code of the kernels. n_queries, n_keys and n_heads change it only if their number of
    binary digits changes. So the lengths 1,024 and 2,047 have the same path. n_heads includes the
    batch size.
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
    except RuntimeError:  # the user of a container may have no home folder
        return Path(tempfile.gettempdir())


@functools.cache
def _source_hash() -> str:
    """Return a hash of the source files that determine which tile sizes are fastest."""
    here = Path(__file__).parent
    names = (
        "choose_tiles", "tile_search", "tile_ops", "mask_ops", "tile_table", "work_splits",
        "forward_kernel", "backward_ops", "dkdv_kernel", "dq_kernel", "base_plan", "plans",
    )  # fmt: skip
    files = [here / f"{name}.py" for name in names]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def read_tiles(path: Path) -> Configuration | None:
    """Return the tile sizes in a file of `write_tiles`, or None without a valid file."""
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
    """Save tile sizes in a file, atomically. Errors are ignored: other processes search again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(tiles, file)
        os.replace(file.name, path)
    except OSError:
        pass
