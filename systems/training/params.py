"""Parameters shared by all Transformer benchmarks. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from systems import accounting
from systems.accounting import MODEL_SIZES, TransformerSize
from systems.benchmark import AttentionName, BenchmarkParams

Positive = Annotated[int, Field(ge=1)]
Size = Literal[*MODEL_SIZES]  # type: ignore[valid-type]


class TransformerParams(BenchmarkParams):
    """Size of a TransformerLM and how it is trained."""

    size: Size  # name in `systems.accounting.MODEL_SIZES`
    context_length: Positive  # tokens per sequence
    batch_size: Positive = 4  # sequences per step (per rank, if there are several)
    # Vocabulary size, in tokens. At least 2: with a single token every loss is zero.
    vocab_size: Annotated[int, Field(ge=2)] = 10_000
    # The next four replace a dimension of `size`. None keeps the dimension of `size`.
    d_model: Positive | None = None  # width of the residual stream
    d_ff: Positive | None = None  # width of the feed-forward layer
    num_layers: Positive | None = None  # number of blocks
    num_heads: Positive | None = None  # attention heads per block
    # Numeric formats:
    #   fp32         everything in float32; matmuls do not use tensor cores
    #   tf32         as fp32, but matmuls use TF32 on tensor cores
    #   bf16, fp16   float32 weights, autocast to this dtype; fp16 with loss scaling
    #   bf16_pure    weights, gradients and optimizer state in bf16
    #   bf16_master  matrices and their gradients in bf16; master weights, gains of norms and
    #                optimizer state in float32. Needs optimizer: fused
    precision: accounting.Precision = "fp32"
    # eager; compiled (torch.compile of model and loss together); compiled_blocks (torch.compile of
    # each block, the final norm and the loss).
    mode: Literal["eager", "compiled", "compiled_blocks"] = "eager"
    # Capture forward, backward and the optimizer step as CUDA graphs, and replay them in each step.
    cuda_graph: bool = False
    attention: AttentionName = "naive"  # name in `systems.kernels.flash_attention.ATTENTIONS`
    # torch (torch.optim.AdamW with fused=True) or fused (`systems.kernels.adamw.FusedAdamW`).
    optimizer: Literal["torch", "fused"] = "torch"
    lr: Annotated[float, Field(gt=0)] = 1e-4  # learning rate
    # Activation checkpointing: none, or a policy of `systems.checkpointing`. every_k saves the
    # input of every checkpoint_every-th block.
    checkpointing: Literal["none", "every_k", "nested", "selective"] = "none"
    checkpoint_every: Positive = 1  # blocks; only with checkpointing: every_k
    seed: int = 0  # seed of the initial weights and of the batch

    @model_validator(mode="after")
    def _sizes_fit(self) -> TransformerParams:
        size = self.model_size
        if size.d_model % size.num_heads:
            raise ValueError(
                "d_model must be divisible by num_heads, got "
                f"d_model {size.d_model} and num_heads {size.num_heads}"
            )
        if (size.d_model // size.num_heads) % 2:
            raise ValueError(
                "head_dim must be even, because RoPE rotates pairs of elements, got "
                f"{size.d_model // size.num_heads} (d_model {size.d_model} / num_heads "
                f"{size.num_heads})"
            )
        if self.precision == "bf16_master" and self.optimizer != "fused":
            raise ValueError(
                "precision: bf16_master needs optimizer: fused, which keeps the master weights, "
                f"got optimizer: {self.optimizer}"
            )
        if self.precision == "fp16" and self.optimizer == "fused" and self.cuda_graph:
            raise ValueError(
                "precision: fp16 with cuda_graph needs optimizer: torch, got optimizer: fused. "
                "A step whose gradients overflow must be skipped, and in a CUDA graph only "
                "optimizer: torch can do so, because it makes the decision on the GPU"
            )
        if self.checkpoint_every != 1 and self.checkpointing != "every_k":
            raise ValueError(
                "checkpoint_every is allowed only with checkpointing: every_k, got "
                f"checkpoint_every {self.checkpoint_every} with checkpointing: {self.checkpointing}"
            )
        if self.checkpointing == "selective" and self.mode == "compiled_blocks":
            raise ValueError(
                "checkpointing: selective needs mode: eager or mode: compiled, got mode: "
                "compiled_blocks. The policy saves the outputs of single operations, and a "
                "compiled block writes them into buffers that cannot be saved"
            )
        return self

    @property
    def model_size(self) -> TransformerSize:
        """Dimensions of `size`, with those replaced that are given as separate parameters."""
        own = {"vocab_size": self.vocab_size}
        for name in ("d_model", "d_ff", "num_layers", "num_heads"):
            given = getattr(self, name)
            if given is not None:
                own[name] = given
        return replace(MODEL_SIZES[self.size], **own)

    @property
    def attention_kind(self) -> accounting.Attention:
        """Class of the attention in `systems.accounting`: how it saves the scores for backward.

        `sdpa`, where torch chooses the kernel, counts as fused.
        """
        kinds: dict[str, accounting.Attention] = {"naive": "materialised", "sdpa_math": "math"}
        return kinds.get(self.attention, "fused")

    def counts(self, phases: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return `flops` and `tokens` of a step by phase; the optimizer has tokens but no FLOPs."""
        point = (self.model_size, self.batch_size, self.context_length)
        return {
            "flops": {
                phase: accounting.transformer_flops(phase, *point)
                for phase in phases
                if phase != "optimizer"
            },
            "tokens": dict.fromkeys(phases, self.batch_size * self.context_length),
        }
