"""Parameters that all benchmarks of data parallel training share. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from systems.training.params import Positive, TransformerParams


class ParallelParams(TransformerParams):
    """A TransformerLM trained on several ranks, one batch of batch_size on each.

    world_size: ranks; the same as the launch's nproc_per_node.
    backend: gloo (CPUs) or nccl (one GPU per rank).
    warmup_steps: steps before the first round.
    rounds: samples, each the mean of `steps` steps in a row; rounds of a training without
        communication are timed in between.
    """

    world_size: Positive
    backend: Literal["gloo", "nccl"] = "nccl"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    mode: Literal["eager", "compiled_blocks"] = "eager"
    warmup_steps: Annotated[int, Field(ge=0)] = 3
    rounds: Positive = 5
    steps: Positive = 10

    @model_validator(mode="after")
    def _without_graphs(self) -> Self:
        if self.cuda_graph:
            raise ValueError("cuda_graph: communication during backward is not captured here")
        return self

    def step_counts(self) -> dict[str, Any]:
        """Return `flops` of one rank, to compare with its peak, and `tokens` of all, per step."""
        counts = self.counts(["train_step"])
        tokens = counts["tokens"]["train_step"] * self.world_size
        return {"flops": counts["flops"], "tokens": {"train_step": tokens}}
