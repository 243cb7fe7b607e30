"""Parameters that all benchmarks of the Transformer share. No torch."""

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
    """The Transformer and how it is trained.

    precision:
        fp32         everything in float32, matmuls without tensor cores
        tf32         the same, matmuls in TF32 on tensor cores
        bf16, fp16   float32 weights under autocast; fp16 with a scaled loss
        bf16_pure    weights, gradients and optimizer state in bf16
        bf16_master  bf16 matrices and their gradients; float32 master weights, gains of norms and
                     optimizer state
    mode: eager; compiled (model and loss as one torch.compile); compiled_blocks (each block).
    cuda_graph: forward, backward and optimizer are captured once and replayed.
    optimizer: torch (AdamW, fused) or fused (`systems.kernels.adamw`).
    checkpointing: none, every_k (checkpoint_every blocks at a time), nested or selective.
    """

    size: Size
    context_length: Positive
    batch_size: Positive = 4
    vocab_size: Annotated[int, Field(ge=2)] = 10_000  # with one token every loss is zero
    # Where given, instead of the size's own:
    d_model: Positive | None = None
    d_ff: Positive | None = None
    num_layers: Positive | None = None
    num_heads: Positive | None = None
    precision: accounting.Precision = "fp32"
    mode: Literal["eager", "compiled", "compiled_blocks"] = "eager"
    cuda_graph: bool = False
    attention: AttentionName = "naive"
    optimizer: Literal["torch", "fused"] = "torch"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    checkpointing: Literal["none", "every_k", "nested", "selective"] = "none"
    checkpoint_every: Positive = 1
    seed: int = 0

    @model_validator(mode="after")
    def _sizes_fit(self) -> TransformerParams:
        size = self.model_size
        if size.d_model % size.num_heads:
            raise ValueError(
                f"d_model {size.d_model} is not divisible by num_heads {size.num_heads}"
            )
        if (size.d_model // size.num_heads) % 2:
            raise ValueError(
                f"head_dim {size.d_model // size.num_heads} (d_model {size.d_model} / num_heads "
                f"{size.num_heads}) is odd; RoPE rotates pairs"
            )
        if self.precision == "bf16_master" and self.optimizer != "fused":
            raise ValueError(
                "precision bf16_master keeps its master weights in optimizer: fused, "
                f"not {self.optimizer}"
            )
        if self.precision == "fp16" and self.optimizer == "fused" and self.cuda_graph:
            raise ValueError(
                "precision fp16 skips a step whose gradients overflow; under cuda_graph optimizer: "
                "torch decides that on the GPU, fused would have to ask the CPU"
            )
        if self.checkpoint_every != 1 and self.checkpointing != "every_k":
            raise ValueError(
                f"checkpoint_every {self.checkpoint_every} is of checkpointing: every_k, not "
                f"{self.checkpointing}"
            )
        if self.checkpointing == "selective" and self.mode == "compiled_blocks":
            raise ValueError(
                "checkpointing selective tells operations apart, and a compiled block writes its "
                "products into buffers that cannot be kept: valid are mode: eager and compiled"
            )
        return self

    @property
    def model_size(self) -> TransformerSize:
        """The named size, with what is given replaced."""
        own = {"vocab_size": self.vocab_size}
        for name in ("d_model", "d_ff", "num_layers", "num_heads"):
            given = getattr(self, name)
            if given is not None:
                own[name] = given
        return replace(MODEL_SIZES[self.size], **own)

    @property
    def attention_kind(self) -> accounting.Attention:
        """Accounting's class of the attention, by whether and how scores are kept. `sdpa`, for
        which torch chooses, is a fused one."""
        kinds: dict[str, accounting.Attention] = {"naive": "materialised", "sdpa_math": "math"}
        return kinds.get(self.attention, "fused")

    def counts(self, phases: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return `flops` and `tokens` of phases, as in a record; an optimizer has no FLOPs."""
        point = (self.model_size, self.batch_size, self.context_length)
        return {
            "flops": {
                phase: accounting.transformer_flops(phase, *point)
                for phase in phases
                if phase != "optimizer"
            },
            "tokens": dict.fromkeys(phases, self.batch_size * self.context_length),
        }
