"""Attention and hardware formulas agree with hand-computed cases."""

from __future__ import annotations

import subprocess
import sys

import pytest

from systems import accounting


def test_attention_flops_of_the_leaderboard_case():
    # B 1, H 16, N 16384, D 64, full: 4 N^2 D H = 4 * 2^28 * 64 * 16 = 2^40 forward, 2.5x backward
    sizes = (1, 16, 16384, 64)
    assert accounting.attention_flops("forward", *sizes, causal=False) == 2**40
    assert accounting.attention_flops("backward", *sizes, causal=False) == 5 * 2**39
    assert accounting.attention_flops("forward_backward", *sizes, causal=True) == 7 * 2**38


def test_attention_bytes_by_hand():
    # B 2, H 3, N 5, D 7: tensors of 210 elements, 420 bytes in bf16; 30 rows of 4 bytes of lse
    sizes = (2, 3, 5, 7)
    assert accounting.attention_bytes("forward", *sizes, "bf16") == 4 * 420 + 120
    assert accounting.attention_bytes("backward", *sizes, "bf16") == 8 * 420 + 120
    assert accounting.attention_bytes("forward_backward", *sizes, "fp32") == 12 * 840 + 240


@pytest.mark.parametrize(("world_size", "factor"), [(1, 0), (2, 1), (4, 1.5), (6, 5 / 3)])
def test_all_reduce_bus_bytes(world_size, factor):
    assert accounting.all_reduce_bus_bytes(1200, world_size) == pytest.approx(1200 * factor)


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        accounting.all_reduce_bus_bytes(1, 0)


def test_unknown_hardware_has_no_peak():
    assert accounting.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert accounting.peak_flops("NVIDIA H100 PCIe", "tf32") == 378e12
    assert accounting.peak_flops("cpu: some processor", "bf16") is None
    assert accounting.peak_flops("NVIDIA H200", "int8") is None
    assert accounting.peak_flops(None, "bf16") is None


def test_accounting_needs_the_standard_library_only():
    others = "[m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules]"
    code = f"import systems.accounting.__main__, sys; print({others})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
