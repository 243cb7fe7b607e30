"""Tests of which implementation `auto` chooses on a Hopper GPU, with tensors without data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from systems.kernels.flash_attention import auto
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.triton import attention as triton_attention
from systems.kernels.flash_attention.variant import Variant

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "expected"),
    [(BF16, 8, "sdpa"), (BF16, 32, "flash_triton"), (F32, 8, "flash_triton")],
)
def test_auto_with_grouped_heads_on_a_hopper_gpu(dtype, kv_heads, expected, monkeypatch):
    monkeypatch.setattr(auto, "is_hopper", lambda _: True)
    monkeypatch.setattr(triton_attention, "runs_kernels", lambda _: True)
    monkeypatch.setattr(forward_launch, "unsupported_reason", lambda *_: "head_dim 80")
    monkeypatch.setattr(Tensor, "is_cuda", True)
    q, k = (torch.empty(1, h, 16_384, 80, dtype=dtype, device="meta") for h in (32, kv_heads))
    assert auto.best_implementation(q, k, k, True) == expected


@pytest.mark.parametrize(
    ("heads", "head_dim", "expected"),
    [((32, 1), 96, "sdpa"), ((32, 8), 96, "flash_hopper"), ((32, 1), 128, "flash_hopper")],
)
def test_auto_leaves_few_heads_with_a_padded_head_dim(heads, head_dim, expected, monkeypatch):
    """Backward has one program per 128 keys, here 32 per head, for 132 multiprocessors."""
    monkeypatch.setattr(auto, "is_hopper", lambda _: True)
    monkeypatch.setattr(auto, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(forward_launch, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    q, k = (torch.empty(1, h, 4096, head_dim, dtype=BF16, device="meta") for h in heads)
    assert auto.best_implementation(q, k, k, True) == expected


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "requires_grad", "expected"),
    [
        (256, 32, False, "flash_hopper"),
        (192, 32, True, "flash_hopper"),
        (192, 32, False, "sdpa"),
        (160, 32, True, "sdpa"),
        (256, 8, False, "sdpa"),
    ],
)
def test_auto_above_128_uses_what_was_measured(
    head_dim, kv_heads, requires_grad, expected, monkeypatch
):
    monkeypatch.setattr(auto, "is_hopper", lambda _: True)
    monkeypatch.setattr(auto, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(forward_launch, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(triton_attention, "runs_kernels", lambda _: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    q, k = (
        torch.empty(1, h, 4096, head_dim, dtype=BF16, device="meta", requires_grad=requires_grad)
        for h in (32, kv_heads)
    )
    assert auto.best_implementation(q, k, k, True) == expected
    with torch.no_grad():
        assert auto.best_implementation(q, k, k, True) == ("sdpa" if head_dim == 192 else expected)
    if head_dim == 192:
        long = torch.empty(1, 32, 8192, head_dim, dtype=BF16, device="meta")
        assert auto.best_implementation(long, long, long, True) == "flash_hopper"


@pytest.mark.parametrize(
    ("heads", "options", "expected"),
    [
        (32, {"softcap": 30.0}, "flash_hopper"),
        (1, {"softcap": 30.0}, "flash_hopper"),  # its kernels can split the keys
        (32, {"window_left": 9}, "flash_hopper"),
        (1, {"window_left": 9}, "flash_triton"),
        (1, {"lower_right": True}, "flash_hopper"),
    ],
)
def test_auto_with_features_on_a_hopper_gpu(heads, options, expected, monkeypatch):
    monkeypatch.setattr(auto, "is_hopper", lambda _: True)
    monkeypatch.setattr(auto, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(forward_launch, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(triton_attention, "runs_kernels", lambda _: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    q, k = (torch.empty(1, heads, n, 64, dtype=BF16, device="meta") for n in (512, 4096))
    assert auto.best_implementation(q, k, k, True, Variant(**options)) == expected
