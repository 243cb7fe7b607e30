"""Random calls of flash_attention on flash_triton in Triton's interpreter; see random_cases.py."""

from __future__ import annotations

import functools

import pytest

from systems.kernels.flash_attention.triton import launch
from tests.systems.kernels.flash_cases import TILES, ignore_overflow
from tests.systems.kernels.random_cases import INTERPRETER, assert_cases_right, batches

pytestmark = [ignore_overflow, pytest.mark.usefixtures("outputs_hold_nan")]
WAYS = [("wide", 1), ("high", 3), ("apart", 2), ("table", None)]  # tiles and n_splits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seeds", batches(60, 10, 1, pytest.mark.slow, pytest.mark.depends))
def test_random_cases(seeds, way, monkeypatch):
    """Small tiles and more splits than the defaults give several of both to small inputs."""
    tiles, n = TILES[way[0]], way[1]
    splits = {"forward": {"n_splits": n}, "backward": {"n_splits_dkdv": n, "n_splits_dq": n}}
    for name, options in splits.items():
        function = getattr(launch, f"flash_{name}")
        patched = functools.partial(function, tiles=tiles, **options)
        monkeypatch.setattr(launch, f"flash_{name}", patched)
    assert_cases_right(seeds, INTERPRETER)
