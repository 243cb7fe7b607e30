"""Test of the Hopper kernels under compute-sanitizer's memcheck, with ragged and split shapes.

racecheck is not used. It reports a race wherever one warp passes an integer to another one through
shared memory and mbarriers, even in a kernel of twenty lines that does nothing else.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.hopper import backward_launch
from tests.systems.kernels.flash_cases import BF16, by_hopper, inputs, on_hopper, packed_inputs

COMPILERS = 8


@on_hopper
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer")
def test_gpu_no_access_is_out_of_bounds():
    folder = Path(__file__).parents[3]
    run = [sys.executable, "-m", "tests.systems.kernels.test_flash_hopper_memcheck"]
    # First compile the kernels in several processes. They stay in Triton's cache.
    compiling = [
        subprocess.Popen([*run, str(i), str(COMPILERS)], cwd=folder) for i in range(COMPILERS)
    ]
    returned = [process.wait() for process in compiling]
    assert not any(returned)
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, *run],
        cwd=folder,
        # Each tensor gets an allocation of its own, so that memcheck sees its ends.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def run_both_passes(first: int = 0, step: int = 1) -> None:
    """Run every step-th case, from number `first` on."""
    backward_launch.D192_STEP_TIME = 0.0  # so that `d192_backward_kernel` is checked, too
    for case in itertools.islice(_cases(), first, None, step):
        case()
    torch.cuda.synchronize()


def _cases() -> Iterator[Callable[[], object]]:
    masks = (Call(), Call(True))
    lengths = ((300, 420), (65, 129))
    for head_dim, rows, call, n_splits in itertools.product(
        (64, 128, 192, 256), lengths, masks, (None, 2)
    ):
        tensors = inputs(rows, head_dim, BF16, (1, 2), "cuda")
        yield functools.partial(by_hopper, *tensors, call, n_splits=n_splits)
        if head_dim <= backward_launch.MAX_DETERMINISTIC_HEAD_DIM and n_splits is None:
            yield functools.partial(by_hopper, *tensors, call, deterministic=True)
    others = ((80, 80), (96, 96), (136, 136), (200, 200), (136, 128), (192, 128))
    for (head_dim, value_dim), call in itertools.product(others, masks):
        tensors = inputs(lengths[0], head_dim, BF16, (1, 2), "cuda", value_dim=value_dim)
        yield functools.partial(by_hopper, *tensors, call)
    window, capped = Call(True, window_left=100, lower_right=True), Call(True, softcap=5.0)
    for head_dim, call in itertools.product((64, 96, 128, 192, 256), (window, capped)):
        tensors = inputs(lengths[0], head_dim, BF16, (1, 2), "cuda")
        yield functools.partial(by_hopper, *tensors, call)
    for head_dim in (64, 128, 192, 256):
        packed = [(0, 3), (65, 65), (5, 0), (300, 200)]
        tensors, packing = packed_inputs(packed, (4, 2), head_dim, BF16, device="cuda")
        yield functools.partial(by_hopper, *tensors, Call(True, packing=packing))


if __name__ == "__main__":
    run_both_passes(*map(int, sys.argv[1:]))
