"""Parameters shared by all Transformer benchmarks. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from systems import accounting
from systems.accounting import MODEL_SIZES, TransformerSize
from systems.benchmark import AttentionChoice, BenchmarkParams

Positive = Annotated[int, Field(ge=1)]
Size = Literal[*MODEL_SIZES]  # type: ignore[valid-type]


class TransformerParams(BenchmarkParams):
    """Parameters of the training of a TransformerLM on one fixed batch."""

    size: Size  # model size, a key of `systems.accounting.MODEL_SIZES`
    context_length: Positive  # number of tokens per sequence
    batch_size: Positive = 4  # number of sequences per step; on several ranks, per step and rank
    # Number of tokens in the vocabulary. With a single token every loss would be zero.
    vocab_size: Annotated[int, Field(ge=2)] = 10_000
    # Each of the next four parameters replaces a dimension of `size`. None keeps that dimension.
    d_model: Positive | None = None  # width of the residual stream
    d_ff: Positive | None = None  # width of the feed-forward layer
    num_layers: Positive | None = None  # number of blocks
    num_heads: Positive | None = None  # number of attention heads per block
    # Numeric formats:
    #   fp32         Everything is in float32. Matmuls do not use tensor cores.
    #   tf32         As fp32, but matmuls use TF32 on tensor cores.
    #   bf16, fp16   Weights are in float32. Forward runs under autocast to bf16 or fp16. fp16 uses
    #                loss scaling.
    #   bf16_pure    Weights, gradients and optimizer state are in bf16.
    #   bf16_master  Weight matrices and their gradients are in bf16. Master weights, weights of
    #                norms and the optimizer state are in float32. Needs optimizer: fused.
    precision: accounting.Precision = "fp32"
    # What torch.compile compiles:
    #   eager            nothing
    #   compiled         model and loss together
    #   compiled_blocks  each block, the final norm and the loss separately
    mode: Literal["eager", "compiled", "compiled_blocks"] = "eager"
    # Whether to capture forward, backward and the optimizer's update as CUDA graphs and to replay
    # these in each step.
    cuda_graph: bool = False
    # Key of `systems.kernels.flash_attention.ATTENTIONS`, or FILE.py:NAME.
    attention: AttentionChoice = "naive"
    # torch: torch.optim.AdamW with fused=True. fused: `systems.kernels.adamw.FusedAdamW`.
    optimizer: Literal["torch", "fused"] = "torch"
    lr: Annotated[float, Field(gt=0)] = 1e-4  # learning rate
    # Activation checkpointing: none, or a policy of `systems.checkpointing`.
    checkpointing: Literal["none", "every_k", "half_blocks", "nested", "selective"] = "none"
    # With checkpointing: every_k, the input of every checkpoint_every-th block is saved.
    checkpoint_every: Positive = 1
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
                "`precision: bf16_master` needs `optimizer: fused`, which keeps the master "
                f"weights, got `optimizer: {self.optimizer}`"
            )
        if self.precision == "fp16" and self.optimizer == "fused" and self.cuda_graph:
            raise ValueError(
                "`precision: fp16` with `cuda_graph: true` needs `optimizer: torch`, got "
                "`optimizer: fused`. If gradients overflow, the update must be skipped. In a CUDA "
                "graph the GPU must decide whether to skip it, and only `optimizer: torch` "
                "supports that"
            )
        if self.checkpoint_every != 1 and self.checkpointing != "every_k":
            raise ValueError(
                "checkpoint_every is allowed only with `checkpointing: every_k`, got "
                f"`checkpoint_every: {self.checkpoint_every}` with "
                f"`checkpointing: {self.checkpointing}`"
            )
        if self.checkpointing == "selective" and self.mode == "compiled_blocks":
            raise ValueError(
                "`checkpointing: selective` needs `mode: eager` or `mode: compiled`, got `mode: "
                "compiled_blocks`. Selective checkpointing saves the outputs of single operations. "
                "A compiled block writes these outputs into buffers that cannot be saved"
            )
        if self.checkpointing == "half_blocks" and self.mode == "compiled_blocks":
            raise ValueError(
                "`checkpointing: half_blocks` needs `mode: eager` or `mode: compiled`, got `mode: "
                "compiled_blocks`, which compiles whole blocks"
            )
        return self

    @property
    def model_size(self) -> TransformerSize:
        """Dimensions of `size`, with vocab_size, and with d_model etc. if they are not None."""
        own = {"vocab_size": self.vocab_size}
        for name in ("d_model", "d_ff", "num_layers", "num_heads"):
            given = getattr(self, name)
            if given is not None:
                own[name] = given
        return replace(MODEL_SIZES[self.size], **own)

    @property
    def attention_kind(self) -> accounting.Attention:
        """Category of the attention function, which decides what it saves for backward.

        "materialised" is `naive`, which computes all scores as one tensor. "math" is torch's
        scaled_dot_product_attention with its math backend. All others are "fused", as is "sdpa",
        for which torch chooses the backend.
        """
        kinds: dict[str, accounting.Attention] = {"naive": "materialised", "sdpa_math": "math"}
        return kinds.get(self.attention, "fused")

    def counts(self, phases: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return the FLOPs of the matmuls, and the tokens of a step, for each phase.

        "flops" lacks the phase "optimizer". "tokens" are the same for all phases.
        """
        point = (self.model_size, self.batch_size, self.context_length)
        return {
            "flops": {
                phase: accounting.transformer_flops(phase, *point)
                for phase in phases
                if phase != "optimizer"
            },
            "tokens": dict.fromkeys(phases, self.batch_size * self.context_length),
        }
