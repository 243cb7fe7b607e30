"""Parameters of Transformers that are small enough to train in a test: on CPUs, GPUs and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from systems.benchmarks.train_step import Params

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
CPU = torch.device("cpu")
ON_CPU = ["fp32", "bf16", "fp16", "bf16_pure", "bf16_master"]  # precisions that a CPU supports
TINY: dict[str, Any] = {
    "size": "tiny", "context_length": 24, "batch_size": 2, "vocab_size": 101,
    "warmup_steps": 1, "measure_steps": 3,
}  # fmt: skip
PARALLEL: dict[str, Any] = {
    "size": "tiny", "num_layers": 2, "vocab_size": 50, "context_length": 8, "batch_size": 1,
    "world_size": 2, "rounds": 2, "steps": 1, "warmup_steps": 1,
}  # fmt: skip
GPU: dict[str, Any] = {
    "size": "tiny", "d_model": 256, "d_ff": 512, "num_heads": 4, "num_layers": 4,
    "context_length": 128, "batch_size": 4, "vocab_size": 1000, "lr": 1e-3,
    "warmup_steps": 0, "measure_steps": 5,
}  # fmt: skip


def params(**given: Any) -> Params:
    """Return TINY with the given parameters replaced."""
    if given.get("precision") == "bf16_master":
        given = {"optimizer": "fused", **given}
    return Params.model_validate(TINY | given)
