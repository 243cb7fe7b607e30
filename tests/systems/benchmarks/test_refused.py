"""Benchmarks refuse parameters that do not fit together, and what they cannot measure here."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from systems.benchmark import Unsupported
from systems.benchmarks import (
    accumulation,
    attention,
    attention_latency,
    data_parallel,
    fsdp,
    memory,
    train_step,
)
from tests.systems.training.tiny_training import PARALLEL, no_gpu

ATTENTION = {"implementation": "naive", "seq_len": 16, "head_dim": 16}
SOFTCAP = {**ATTENTION, "softcap": 1.0}
MODEL = {"size": "tiny", "context_length": 16, "batch_size": 2}
COMPILED = {**MODEL, "mode": "compiled_blocks"}
GRAPH = {**MODEL, "cuda_graph": True}
FLAT = {**PARALLEL, "strategy": "flat"}
BLOCKS = {**PARALLEL, "strategy": "blocks"}

DO_NOT_FIT = [  # benchmark, parameters, words of the error
    (accumulation, {"terms": 1000, "addend": 1e3}, "got 1000 * 1000.0 = 1e+06"),
    (attention, {**ATTENTION, "num_heads": 4, "num_kv_heads": 3}, "must divide num_heads, 4, got"),
    (attention, {**ATTENTION, "packed": True, "num_queries": 3}, "must be null with packed"),
    (data_parallel, {**FLAT, "bucket_size_mb": 1.0}, "got `strategy: flat` and `bucket_"),
    (data_parallel, {**PARALLEL, "strategy": "torch", "bucket_size_mb": 25.0}, "`strategy: torch`"),
    (data_parallel, {**FLAT, "precision": "bf16_pure"}, "'bf16' or 'bf16_master'"),
    (fsdp, {**PARALLEL, "strategy": "layers", "mode": "compiled_blocks"}, "needs `mode: eager`"),
    (fsdp, {**BLOCKS, "precision": "bf16"}, "'fp32', 'tf32' or 'bf16_master'"),
    (fsdp, {**BLOCKS, "checkpointing": "half_blocks"}, "hooks of the block do not gather"),
    (memory, {**MODEL, "mode": "compiled"}, "needs `mode: eager` and `cuda_graph: false`"),
    (memory, GRAPH, "needs `mode: eager` and `cuda_graph: false`"),
    (train_step, {**MODEL, "num_heads": 3}, "got d_model 64 and num_heads 3"),
    (train_step, {**MODEL, "d_model": 36}, "must be even, "),
    (train_step, {**MODEL, "precision": "bf16_master"}, "needs `optimizer: fused`, "),
    (train_step, {**GRAPH, "precision": "fp16", "optimizer": "fused"}, "needs `optimizer: torch`"),
    (train_step, {**MODEL, "checkpoint_every": 4}, "only with `checkpointing: every_k`, got"),
    (train_step, {**COMPILED, "checkpointing": "selective"}, "got `mode: compiled_blocks`"),
    (train_step, {**COMPILED, "checkpointing": "half_blocks"}, "compiles whole blocks"),
]
UNSUPPORTED = [  # for want of a GPU, and features that an implementation lacks
    (attention, {**ATTENTION, "implementation": "sdpa_cudnn"}, "sdpa_cudnn needs a CUDA GPU"),
    (attention, {**ATTENTION, "implementation": "sdpa_efficient"}, "sdpa_efficient needs a CUDA"),
    (attention_latency, {"implementation": "flash_hopper", "seq_len": 16}, "needs a Hopper GPU"),
    (memory, {**MODEL, "snapshot": True}, "`snapshot: true` needs the CUDA allocator"),
    (train_step, GRAPH, "CUDA graphs need an NVIDIA GPU"),
    (train_step, {**MODEL, "precision": "tf32"}, "TF32 needs the tensor cores of an NVIDIA GPU"),
    (train_step, {**MODEL, "attention": "sdpa_cudnn"}, "sdpa_cudnn needs a CUDA GPU"),
    (attention, {**SOFTCAP, "implementation": "flash_pytorch"}, "flash_pytorch"),
    (attention, {**SOFTCAP, "implementation": "naive_compiled"}, "naive_compiled"),
]


@pytest.mark.parametrize(("benchmark", "given", "words"), DO_NOT_FIT)
def test_parameters_that_do_not_fit(
    benchmark: ModuleType, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        benchmark.Params(**given)


@no_gpu
@pytest.mark.parametrize(("benchmark", "given", "words"), UNSUPPORTED)
def test_what_is_not_supported(benchmark: ModuleType, given: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        benchmark.run(benchmark.Params(**given))
