"""The parameters that every study of parallel training shares. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from systems.training.params import Positive, TransformerParams


class ParallelParams(TransformerParams):
    """A TransformerLM trained on several ranks, one batch of batch_size on each.

    world_size: ranks; the same as the launch's nproc_per_node.
    backend: gloo (processors) or nccl (a GPU a rank).
    warmup_steps: steps before the first round.
    rounds: samples, each the mean of `steps` steps that follow on; a step without communication is
        timed in rounds of its own in between.
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
            raise ValueError("cuda_graph: what travels beside backward is not captured here")
        return self

    def step_counts(self) -> dict[str, Any]:
        """`flops` of one rank, as its device's peak is, and `tokens` of all together, of a step."""
        counts = self.counts(["train_step"])
        tokens = counts["tokens"]["train_step"] * self.world_size
        return {"flops": counts["flops"], "tokens": {"train_step": tokens}}
