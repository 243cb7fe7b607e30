"""The hooks of examples/cs336/adapters.py do what the tests of CS336, assignment 2, ask of them.

Ranks train with the distributed hooks in tests/systems/check/test_wrappers.py. Here, mocks note
what the hooks hand over.
"""

from __future__ import annotations

import inspect
import math
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from examples.cs336 import adapters
from systems.kernels.flash_attention import FlashAttentionPyTorch, FlashAttentionTriton

HOOKS = {  # parameters of each
    # editions 2025 and 2026
    "get_flashattention_autograd_function_pytorch": [],
    "get_flashattention_autograd_function_triton": [],
    "get_sharded_optimizer": ["params", "optimizer_cls", "kwargs"],
    # edition 2025
    "get_ddp_individual_parameters": ["module"],
    "ddp_individual_parameters_on_after_backward": ["ddp_model", "optimizer"],
    "get_ddp_bucketed": ["module", "bucket_size_mb"],
    "ddp_bucketed_on_after_backward": ["ddp_model", "optimizer"],
    "ddp_bucketed_on_train_batch_start": ["ddp_model", "optimizer"],
    # edition 2026
    "get_ddp": ["module"],
    "ddp_on_after_backward": ["ddp_model", "optimizer"],
    "get_fsdp": ["module", "compute_dtype"],
    "fsdp_on_after_backward": ["fsdp_model", "optimizer"],
    "fsdp_gather_full_params": ["fsdp_model"],
}


def test_every_hook_is_there() -> None:
    found = {name: list(inspect.signature(getattr(adapters, name)).parameters) for name in HOOKS}
    assert found == HOOKS


def test_a_copy_in_the_tests_of_the_assignment_is_importable(tmp_path: Path, monkeypatch) -> None:
    copy = tmp_path / "tests" / "adapters.py"
    copy.parent.mkdir()
    shutil.copy(adapters.__file__, copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "examples")]:
        monkeypatch.setitem(sys.modules, name, None)  # not importable there
    copied = runpy.run_path(str(copy), run_name="tests.adapters")
    assert (
        copied["get_flashattention_autograd_function_triton"]().__name__ == "FlashAttentionTriton"
    )


# ---- attention -----------------------------------------------------------------------------------


def test_hooks_of_attention_are_classes_with_tests_of_their_own() -> None:
    """In test_flash_pytorch.py, and in tests/interpreted/test_flash_autograd.py."""
    assert adapters.get_flashattention_autograd_function_pytorch() is FlashAttentionPyTorch
    assert adapters.get_flashattention_autograd_function_triton() is FlashAttentionTriton


# ---- wrappers and the optimizer ------------------------------------------------------------------


def test_hooks_hand_over_to_this_projects_classes() -> None:
    module, sgd, half = nn.Linear(2, 2), torch.optim.SGD, torch.float16
    for hook, given, kind, handed in (
        ("get_ddp", (module,), "OverlappedDDP", (module,)),
        ("get_ddp_individual_parameters", (module,), "OverlappedDDP", (module,)),
        ("get_ddp_bucketed", (module, 0.5), "BucketedDDP", (module, 0.5)),
        ("get_ddp_bucketed", (module, None), "BucketedDDP", (module, math.inf)),
        ("get_fsdp", (module, half), "FullyShardedDataParallel", (module, half)),
        ("get_sharded_optimizer", ([1], sgd), "ShardedOptimizer", ([1], sgd)),
    ):
        options = {"lr": 0.1} if hook == "get_sharded_optimizer" else {}
        with mock.patch.object(adapters, kind) as made:
            assert getattr(adapters, hook)(*given, **options) is made.return_value, hook
        made.assert_called_once_with(*handed, **options)


def test_hooks_call_the_methods_of_the_wrapper() -> None:
    finish = mock.call.finish_gradient_synchronization()
    for name in HOOKS:
        if "_on_" in name:
            wrapper = mock.Mock()
            getattr(adapters, name)(wrapper, None)
            calls = [finish] if name.endswith("after_backward") else []
            assert wrapper.method_calls == calls, name
    wrapper = mock.Mock()
    gathered = adapters.fsdp_gather_full_params(wrapper)
    assert gathered is wrapper.gather_full_parameters.return_value
