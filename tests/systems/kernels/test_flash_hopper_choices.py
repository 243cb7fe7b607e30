"""Tests of what the Hopper kernels choose for a call and what they refuse, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from systems.kernels.flash_attention.call import PLAIN, Call, PackedSizes
from systems.kernels.flash_attention.hopper import support
from systems.kernels.flash_attention.hopper.backward_launch import flash_backward
from systems.kernels.flash_attention.hopper.head_groups import (
    GOOD,
    MAX_BLOCKS,
    balanced_group,
    tiles_of_blocks,
    utilization,
)
from systems.kernels.flash_attention.hopper.kernel_options import kernel_options
from systems.kernels.flash_attention.hopper.splits import (
    backward_splits,
    block_of_keys,
    forward_splits,
)
from systems.kernels.flash_attention.hopper.tiles import PACKED_HEAD_DIMS
from systems.kernels.tensor_maps import TensorMaps
from tests.systems.kernels.flash_cases import BF16


def test_few_heads_are_split_and_many_are_not():
    pytest.importorskip("triton")  # the estimate calls `tile_ops.schedule`

    def forward(n, heads, is_causal=True, block_q=192):
        return forward_splits(heads, -(-n // block_q), n // 128, is_causal, heads * n * 256, 132)

    def backward(n, heads, is_causal=True, head_dim=64):
        n_blocks = -(-n // block_of_keys(head_dim))
        return backward_splits(heads, n_blocks, -(-n // 64), is_causal, head_dim, 132)

    for of in (forward, backward):
        assert of(16384, 16) == of(65536, 1) == of(128, 1) == 1
    assert all(forward(n, 1) > 1 for n in (4096, 8192, 16384))
    assert all(backward(n, 1, head_dim=d) > 1 for n in (4096, 8192) for d in PACKED_HEAD_DIMS)
    assert all(backward(16384, 1, head_dim=d) > 1 for d in (64, 128))
    # 128 blocks of equal length on 132 multiprocessors: a split would only add a second wave.
    assert forward(16384, 1, is_causal=False, block_q=128) == 1
    assert backward(16384, 1, is_causal=False) == 1


@pytest.mark.parametrize(
    ("heads", "n", "sizes", "expected"),
    [(8, 8192, [3, 4, 8], 4), (16, 8192, [3, 4, 6, 8], 4), (16, 16384, [2, 3, 4], 2)],
)
def test_groups_of_heads_leave_no_short_last_group(heads, n, sizes, expected):
    """Causal heads on 132 multiprocessors."""
    options = kernel_options(Call(True), (n, n), 128)
    tiles = tiles_of_blocks(options, (n, n), None, 128, 64, by_keys=True, n_heads=heads)
    assert balanced_group(tiles, heads, sizes, 132) == expected
    assert utilization(tiles, heads, expected, 132) > GOOD


def test_groups_of_very_long_packed_sequences_are_found_quickly():
    """Blocks past MAX_BLOCKS are not counted, so the time does not grow with the lengths."""
    n = 1 << 30
    packed = PackedSizes(9, n, n)
    options = kernel_options(Call(True, packing=packed), (n, n), 128)
    for by_keys in (False, True):
        tiles = tiles_of_blocks(options, (n, n), packed, 128, 64, by_keys, 1)
        assert MAX_BLOCKS < len(tiles) <= 2 * MAX_BLOCKS


def test_plain_masks_do_not_use_bounds():
    """A causal mask may be given in several forms, of which only one has fast kernels."""

    def is_bounded(lengths: tuple[int, int] = (9, 9), **options: Any) -> bool:
        return kernel_options(Call(**options), lengths, 64).is_bounded

    assert not any(is_bounded(is_causal=x) for x in (True, False))
    assert not is_bounded(window_right=0)
    assert not is_bounded(is_causal=True, lower_right=True)
    assert is_bounded((8, 9), is_causal=True, lower_right=True)
    assert is_bounded(is_causal=True, window_left=5) and is_bounded(window_right=3)
    assert not is_bounded(is_causal=True, window_left=9)
    assert is_bounded(is_causal=True, window_left=8)
    assert not is_bounded(window_left=9, window_right=100)


def test_descriptors_are_those_that_the_tma_engine_takes():
    pytest.importorskip("triton")
    maps = TensorMaps(torch.float32, (1, 1, 100, 64), (7, 3, 64, 1), (1, 1, 64, 64))
    assert maps.at(1 << 20).strides == [64, 64, 64, 1]
    with pytest.raises(KeyError):
        TensorMaps(torch.float64, (100, 64), (64, 1), (64, 64))


def test_what_the_kernels_lack_has_a_reason(monkeypatch):
    def reason(head_dim: int, call: Call = PLAIN, value_dim: int | None = None) -> str:
        dims = head_dim, value_dim or head_dim
        return support.reason_for(torch.device("cuda"), BF16, *dims, call) or ""

    monkeypatch.setattr(support, "is_hopper", lambda device: False)
    assert "Hopper GPU" in reason(64)
    monkeypatch.setattr(support, "is_hopper", lambda device: True)
    packed = Call(packing=PackedSizes(2, 9, 9))
    assert "a multiple of 8 from 64 to 256" in reason(100)
    assert "got torch.float32" in (support.form_reason(torch.float32, 64, 64) or "")
    assert "softcap of at most 512, got 600" in reason(64, Call(softcap=600.0))
    assert "head_dim 64, 128, 192 or 256 for packed sequences, got 96" in reason(96, packed)
    expected = "v to have the head_dim of q, or 128 if that of q is above 128, got {} for v"
    for head_dim, value_dim in ((128, 64), (192, 64), (64, 128)):
        assert expected.format(value_dim) in reason(head_dim, value_dim=value_dim)
    assert not reason(192, packed, 128)
    assert not reason(96, Call(softcap=30.0))
    assert not reason(128, packed._replace(softcap=30.0))
    q, lse = torch.zeros(1, 1, 4, 192, dtype=BF16), torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="a head_dim of at most 128, got 192"):
        flash_backward(q, q, q, q, lse, q, deterministic=True)
