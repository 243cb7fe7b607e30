"""Test of the Hopper kernels under compute-sanitizer's memcheck, with ragged and split shapes.

racecheck is not used. It reports a race wherever one warp passes an integer to another one through
shared memory and mbarriers, even in a kernel of twenty lines that does nothing else.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from systems.kernels.flash_attention.variant import Variant
from tests.systems.kernels.flash_cases import by_hopper, inputs, on_hopper, packed_inputs


@on_hopper
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer")
def test_gpu_no_access_is_out_of_bounds():
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.systems.kernels.test_flash_hopper_memcheck"],
        cwd=Path(__file__).parents[3],
        # Each tensor gets an allocation of its own, so that memcheck sees its ends.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def run_both_passes() -> None:
    from systems.kernels.flash_attention.hopper.backward_launch import (
        MAX_DETERMINISTIC_HEAD_DIM,
        flash_backward,
    )
    from systems.kernels.flash_attention.hopper.forward_launch import flash_forward

    lengths = ((300, 420), (65, 129))
    cases = itertools.product((64, 128, 192, 256), lengths, (False, True), (None, 2))
    for head_dim, (n_queries, n_keys), is_causal, n_splits in cases:
        q, k, v, dout = (
            torch.randn(1, 2, n, head_dim, device="cuda", dtype=torch.bfloat16)
            for n in (n_queries, n_keys, n_keys, n_queries)
        )
        out, lse = flash_forward(q, k, v, is_causal, n_splits=n_splits)
        flash_backward(q, k, v, out, lse, dout, is_causal, n_splits=n_splits)
        if head_dim <= MAX_DETERMINISTIC_HEAD_DIM:
            flash_backward(q, k, v, out, lse, dout, is_causal, deterministic=True)
    window, capped = Variant(100, None, lower_right=True), Variant(softcap=5.0)
    for head_dim, variant in itertools.product((64, 128, 192, 256), (window, capped)):
        q, k, v, dout = inputs((300, 420), head_dim, torch.bfloat16, (1, 2), "cuda")
        by_hopper(q, k, v, dout, True, variant=variant)
    for head_dim in (64, 128, 192, 256):
        lengths = [(0, 3), (65, 65), (5, 0), (300, 200)]
        tensors, packing = packed_inputs(lengths, (4, 2), head_dim, torch.bfloat16, device="cuda")
        by_hopper(*tensors, True, packing=packing)
    torch.cuda.synchronize()


if __name__ == "__main__":
    run_both_passes()
