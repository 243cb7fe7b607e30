"""Tests of flash_triton without a GPU: splits, schedule, tiles, errors and code for sm_90."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import accumulate, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from systems.kernels.flash_attention.autograd import FlashAttentionTriton
from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.triton.launch import flash_forward
from systems.kernels.flash_attention.triton.layout import layout
from systems.kernels.flash_attention.triton.memory_bound_launch import memory_bound_constants
from systems.kernels.flash_attention.triton.tile_table import (
    MAX_BLOCK,
    MAX_ROW_STRIDE,
    block_d,
    configuration,
)
from systems.kernels.flash_attention.triton.work_splits import (
    default_splits,
    heads_in_l2,
    split_rows,
)
from tests.systems.kernels.flash_cases import BF16, F16, F32
from tests.systems.kernels.selection import slow


def test_splits_and_groups_of_heads_worked_by_hand():
    assert default_splits(528, 1000, 132) == 1  # 4 waves of programs without a split
    assert default_splits(132, 1000, 132) == 2
    assert default_splits(128, 1000, 264) == 4  # 512 programs for 264 slots: nearly 2 waves
    assert default_splits(132, 8, 264) == 2  # 2 splits of 4 tiles; 4 splits would be too short
    assert default_splits(132, 3, 264) == 1
    assert default_splits(1, 10_000, 132) == 32
    assert default_splits(0, 10, 132) == 1
    # Keys and values of 16,384 rows of 64 bfloat16 numbers take 4 MiB of the 32 MiB.
    assert heads_in_l2(16384, 64, 2, 100) == 8
    assert heads_in_l2(16384, 64, 2, 3) == 3
    assert heads_in_l2(1 << 20, 128, 4, 3) == 1


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 40))
def test_ranges_hold_every_row_once_and_none_is_empty(length, n_splits, tiles):
    length = max(1, length)
    for wanted in (n_splits, None):
        count, size = split_rows(length, 16, tiles, 132, wanted)
        assert size % 16 == 0
        assert (count - 1) * size < length <= count * size
        assert wanted is None or count <= wanted


@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 6), st.sampled_from([(16, 16), (32, 16), (48, 32)]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_schedule_has_every_item_once_and_of_a_causal_head_the_longest_first(
    n_rows, n_others, n_programs, group, n_splits, blocks, is_causal, by_keys
):
    pytest.importorskip("triton")
    from systems.kernels.flash_attention.triton.tile_ops import schedule

    block, other_block = blocks
    n_blocks = -(-n_rows // block)
    n_splits, a_split = split_rows(n_others, other_block, n_blocks, 132, n_splits)
    order = [
        schedule.fn(item, n_blocks, n_programs, n_splits, a_split, group, block, is_causal, by_keys)
        for item in range(n_blocks * n_programs * n_splits)
    ]
    everything = product(range(n_blocks), range(n_programs), range(n_splits))
    assert sorted(order) == sorted(everything)
    groups = [head // group for _, head, _ in order]
    assert groups == sorted(groups)
    if is_causal:
        # A later item may be longer than an earlier one by up to a block, by the rows that the last
        # split is short of, and by the queries that see all keys, which add to every block equally.
        short_of_last = n_splits * a_split - n_others
        past_all_keys = max(0, n_others - n_rows) if by_keys else 0
        for head in range(n_programs):
            lengths = [
                seen(b, s, block, a_split, n_others, by_keys) for b, h, s in order if h == head
            ]
            lengths = [length for length in lengths if length > 0]
            longest_after = list(accumulate(reversed(lengths), max))[::-1]
            for length, longest in zip(lengths, longest_after, strict=True):
                assert longest <= length + block + short_of_last + past_all_keys


def seen(which, split, block, a_split, n_others, by_keys):
    """Return how many rows of a split the last query of a block sees.

    If by_keys, return how many queries of the split see the first key of the block.
    """
    first, end = split * a_split, min(n_others, (split + 1) * a_split)
    if by_keys:
        return end - max(first, which * block)
    return min(end, (which + 1) * block) - first


def test_the_table_has_every_head_dim_and_dtype():
    assert [block_d(d) for d in (1, 16, 17, 24, 64, 80, 128, 256)] == [
        16, 16, 32, 32, 64, 128, 128, 256,
    ]  # fmt: skip
    for head_dim in range(1, 257):
        for dtype in (F32, BF16, F16):
            for tile in filter(None, configuration(head_dim, dtype)):
                assert tile.block_q in (16, 32, 64, 128) and tile.block_k in (16, 32, 64, 128)
                assert max(tile[:2]) <= MAX_BLOCK and tile.num_warps in (4, 8)


def test_offsets_within_any_tile_fit_in_32_bits():
    for head_dim in range(1, 257):
        of = layout((300, head_dim), (MAX_ROW_STRIDE - 1, 1))
        rows = max(MAX_BLOCK, memory_bound_constants(of)["ROWS"])
        assert not of.is_copy and (rows - 1) * of.strides[-1] + head_dim <= 1 << 31
        assert layout((300, head_dim), (MAX_ROW_STRIDE, 1)).is_copy


def test_all_that_does_not_fit_is_named_at_once():
    q, k, v = torch.ones(2, 5, 257), torch.ones(3, 5, 257), torch.ones(3, 5, 257).double()
    with pytest.raises(ValueError) as error:
        flash_forward(q, k, v, Call(precision="fp8"))
    for part in ("leading dim", "head_dim must be 1 to 256, got 257", "torch.float64", "'fp8'"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"\(\.\.\., heads, n_queries, head_dim\).*got q \(4,\)"):
        flash_forward(*[torch.ones(4)] * 3)


def test_without_a_gpu_the_error_says_so():
    x = torch.ones(2, 4, 16)
    with pytest.raises(
        RuntimeError, match=r"need a GPU, got tensors on cpu; set TRITON_INTERPRET=1"
    ):
        FlashAttentionTriton.apply(x, x, x)


def test_importing_kernels_does_not_import_triton():
    code = (
        "import sys, torch; before = set(sys.modules); import systems.kernels.adamw, "
        "systems.kernels.flash_attention.autograd, systems.kernels.weighted_sum; "
        "print([m for m in set(sys.modules) - before if m.startswith('triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("head_dim", [64, slow(128)])
@pytest.mark.parametrize("form", ["causal", slow("full"), slow("split")])
def test_compiled_for_hopper_nothing_spills(head_dim, form):
    """The kernels for bfloat16; `make compile-check` checks the whole table, and has the limits."""
    pytest.importorskip("triton")
    from scripts.compile_check import compile_triton, fault

    tiles = configuration(head_dim, BF16)
    made = compile_triton(head_dim, BF16, form, tiles)
    assert made.keys() >= {"forward", "delta", "dkdv", "dq"}
    assert form != "split" or made.keys() >= {"combine", "sum"}
    for name, kernel in made.items():
        tile = getattr(tiles, name, None)
        assert not fault(kernel, 0, tile.resident if tile else 1)
        # There are no atomic additions, whose order could change from run to run.
        assert not re.search(r"^\s*(@\S+\s+)?(atom|red)\.", kernel.ptx, re.MULTILINE)
        if tile is None:
            assert "ld.global.v4.b32" in kernel.ptx
            continue
        assert form == "full" or kernel.resident == tile.resident
        assert "wgmma.mma_async" in kernel.ptx and "mma.sync" not in kernel.ptx
        # Tiles of the inner loop are copied to shared memory asynchronously, 16 bytes at a time.
        assert "cp.async.cg.shared.global" in kernel.ptx
