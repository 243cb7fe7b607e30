"""Parameters shared by all data-parallel benchmarks. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from systems.training.params import Positive, TransformerParams


class ParallelParams(TransformerParams):
    """A TransformerLM trained on several ranks, each with a separate batch of batch_size sequences.

    Has all fields of `TransformerParams`. Steps are timed in rounds. Rounds of the parallel
    training alternate with rounds of the same training without communication (`alone`).
    """

    world_size: Positive  # number of ranks; must equal the number of processes torchrun starts
    backend: Literal["gloo", "nccl"] = "nccl"  # gloo: on CPUs; nccl: one GPU per rank
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"  # as in `TransformerParams`
    mode: Literal["eager", "compiled_blocks"] = "eager"  # as in `TransformerParams`
    warmup_steps: Annotated[int, Field(ge=0)] = 3  # untimed steps before the first round
    rounds: Positive = 5  # number of rounds; a round gives one sample, the mean time of its steps
    steps: Positive = 10  # consecutive steps in a round

    @model_validator(mode="after")
    def _without_graphs(self) -> Self:
        if self.cuda_graph:
            raise ValueError(
                "cuda_graph must be false: capturing the communication of a data-parallel step is "
                "not supported"
            )
        return self

    def step_counts(self) -> dict[str, Any]:
        """Return the `flops` of one rank and the `tokens` of all ranks in a step.

        FLOPs are per rank so that tables can compare them with the peak of one GPU.
        """
        counts = self.counts(["train_step"])
        tokens = counts["tokens"]["train_step"] * self.world_size
        return {"flops": counts["flops"], "tokens": {"train_step": tokens}}
