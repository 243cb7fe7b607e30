"""Tests of which implementation `auto` chooses on a Hopper GPU, with tensors without data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from systems.kernels.flash_attention import implementations
from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.hopper import support
from systems.kernels.flash_attention.implementations import best_implementation
from systems.kernels.flash_attention.triton import attention as triton_attention

F32, BF16 = torch.float32, torch.bfloat16
CAUSAL = Call(True)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    for module in (implementations, support):
        monkeypatch.setattr(module, "is_hopper", lambda _: True)
    monkeypatch.setattr(implementations, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(triton_attention, "runs_kernels", lambda _: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)


def _meta(heads: int, n: int, head_dim: int, dtype: torch.dtype = BF16, **options: bool) -> Tensor:
    return torch.empty(1, heads, n, head_dim, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize(
    ("n", "head_dim", "dtype", "expected"),
    [
        (1024, 64, BF16, "sdpa"),
        (16_384, 64, BF16, "flash_hopper"),
        (1024, 64, F32, "sdpa"),
        (4096, 64, F32, "flash_triton"),
        (4096, 16, F32, "flash_triton"),
    ],
)
def test_launch_bound_inputs_are_for_torch(n, head_dim, dtype, expected):
    q = _meta(1, n, head_dim, dtype)
    assert best_implementation(q, q, q, CAUSAL) == expected


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "expected"),
    [(BF16, 8, "sdpa"), (BF16, 32, "flash_triton"), (F32, 8, "flash_triton")],
)
def test_grouped_heads_with_a_head_dim_that_flash_hopper_lacks(dtype, kv_heads, expected):
    q, k = (_meta(heads, 16_384, 60, dtype) for heads in (32, kv_heads))
    assert best_implementation(q, k, k, CAUSAL) == expected


@pytest.mark.parametrize(
    ("head_dims", "kv_heads", "tokens", "forward", "both"),
    [
        ((256, 256), 32, 4096, "flash_hopper", "flash_hopper"),
        ((256, 256), 8, 4096, "sdpa", "sdpa"),
        ((256, 256), 8, 8192, "flash_hopper", "flash_hopper"),
        ((192, 192), 32, 4096, "sdpa", "flash_hopper"),
        ((192, 192), 32, 8192, "flash_hopper", "flash_hopper"),
        ((192, 192), 8, 8192, "sdpa", "sdpa"),
        ((192, 128), 32, 4096, "flash_hopper", "sdpa"),
        ((160, 160), 32, 8192, "sdpa", "sdpa"),
    ],
)
def test_above_128_it_uses_what_was_measured(head_dims, kv_heads, tokens, forward, both):
    q, k, v = (
        _meta(heads, tokens, dim, requires_grad=True)
        for heads, dim in ((32, head_dims[0]), (kv_heads, head_dims[0]), (kv_heads, head_dims[1]))
    )
    assert best_implementation(q, k, v, CAUSAL) == both
    with torch.no_grad():
        assert best_implementation(q, k, v, CAUSAL) == forward


@pytest.mark.parametrize(
    ("heads", "call", "expected"),
    [
        (32, Call(True, softcap=30.0), "flash_hopper"),
        (1, Call(True, softcap=30.0), "flash_hopper"),  # its kernels can split the queries
        (32, Call(True, window_left=9), "flash_hopper"),
        (1, Call(True, window_left=9), "flash_triton"),
        (1, Call(True, lower_right=True), "flash_hopper"),
        (32, Call(True, softcap=600.0), "flash_triton"),
    ],
)
def test_features(heads, call, expected):
    q, k = (_meta(heads, n, 64) for n in (512, 4096))
    assert best_implementation(q, k, k, call) == expected
