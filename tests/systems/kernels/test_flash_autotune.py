"""Tests of the search for tiles: saved results, and on a GPU, its time with empty caches."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from systems.kernels.flash_attention.triton.choose_tiles import (
    AUTOTUNE,
    cache_path,
    read_tiles,
    tuned_tiles,
    write_tiles,
)
from systems.kernels.flash_attention.triton.tile_search import search
from systems.kernels.flash_attention.triton.tile_table import TABLE, Tile, configuration

CPU = torch.device("cpu")


def test_what_is_kept_comes_back(tmp_path):
    for number, known in enumerate(TABLE.values()):
        path = tmp_path / "new" / f"{number}.json"
        write_tiles(path, known)
        assert read_tiles(path) == known
    assert len(list((tmp_path / "new").iterdir())) == len(TABLE)  # no temporary files are left


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[[1, 2]]", "[[64, 64, 4, 2, 1, 9], 1, 2, null]", "3", "null",
        '[["64", 64, 4, 2, 1], [64, 64, 4, 2, 1], [64, 64, 4, 2, 1], null]',
        "[[64, 64, 4, 2, 1], [64, 64, 4, 2, 1], [64, 64, 4, 2, 0], null]",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_searched_again(tmp_path, text):
    path = tmp_path / "kept.json"
    path.write_text(text)
    assert read_tiles(path) is None
    assert read_tiles(tmp_path / "missing.json") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    write_tiles(tmp_path / "file" / "kept.json", configuration(64, torch.bfloat16))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == ""


def test_the_place_depends_on_what_is_searched_and_on_the_cache_folder(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    given = {
        "gpu": "NVIDIA A100", "head_dim": 64, "dtype": torch.bfloat16, "precision": "fp16x3",
        "is_causal": True, "n_queries": 1000, "n_keys": 1000, "n_heads": 8,
    }  # fmt: skip
    others = {
        "gpu": "NVIDIA L40S", "head_dim": 128, "dtype": torch.float32, "is_causal": False,
        "n_queries": 2000, "n_keys": 2000, "n_heads": 16,
    }  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(**given)
    assert path.parent == tmp_path / "cluster-sweeps"
    changed = [given | {name: value} for name, value in others.items()]
    changed.append(given | {"dtype": torch.float32, "precision": "tf32"})
    assert len({path, *(cache_path(**x) for x in changed)}) == 9
    # bfloat16 and float16 share a file, as do head dimensions and lengths that round up alike.
    same = {"dtype": torch.float16, "precision": "tf32", "head_dim": 40, "n_keys": 600}
    assert cache_path(**given | same) == path
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path(**given).parent == Path.home() / ".cache" / "cluster-sweeps"


def test_what_is_empty_or_not_wanted_is_not_searched(monkeypatch):
    """No search is made; without a GPU a search would raise an error."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setenv(AUTOTUNE, "1")
    for sizes in ((0, 5, 2), (5, 0, 2), (5, 5, 0)):
        found = tuned_tiles(64, torch.bfloat16, "fp16x3", True, *sizes, gpu)
        assert found == configuration(64, torch.bfloat16)
    assert tuned_tiles(64, torch.bfloat16, "fp16x3", True, 100, 100, 1, CPU) == found
    monkeypatch.setenv(AUTOTUNE, "0")
    assert tuned_tiles(64, torch.bfloat16, "fp16x3", True, 5, 5, 1, gpu) == found


def test_an_unknown_wish_is_an_error_that_says_which_there_are(monkeypatch):
    monkeypatch.setenv(AUTOTUNE, "off")
    with pytest.raises(ValueError, match="must be 0, 1 or unset, got 'off'"):
        tuned_tiles(64, torch.bfloat16, "fp16x3", True, 5, 5, 1, CPU)


SEARCHES = """
import time, torch
from systems.kernels.flash_attention import FlashAttentionTriton
from systems.kernels.flash_attention.triton import tile_search
real = tile_search.search
tile_search.search = lambda *a, **k: (print("searched"), real(*a, **k))[1]
q, k, v = (torch.randn(1, 16, 16384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for _ in range(3))
torch.cuda.synchronize()
started = time.perf_counter()
FlashAttentionTriton.apply(q, k, v, True).sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - started)
"""


@pytest.mark.gpu
def test_gpu_the_leaderboard_case_from_cold_takes_less_than_a_minute_and_once(tmp_path):
    """With empty caches the first call compiles and searches; a second process does not search."""
    environment = {
        **os.environ,
        AUTOTUNE: "1",
        "XDG_CACHE_HOME": str(tmp_path / "tiles"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SEARCHES], env=environment, capture_output=True, text=True,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.split())
    assert lines[0][0] == "searched" and float(lines[0][-1]) < 60
    assert len(lines[1]) == 1 and float(lines[1][0]) < 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_every_candidate_agrees_with_the_table_or_is_left_out(dtype):
    """No candidate has wrong results, and most of them run, so that the search has a choice."""
    lines: list[str] = []
    started = time.perf_counter()
    found = search(4, 1000, 900, 64, dtype=dtype, is_causal=True, report=lines.append)
    assert time.perf_counter() - started < 120
    assert all(isinstance(tile, Tile) for tile in found[:3])
    assert not [line for line in lines if "differs" in line]
    assert len([line for line in lines if line.endswith(" ms")]) >= 24
