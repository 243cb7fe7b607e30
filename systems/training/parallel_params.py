"""Parameters shared by all data-parallel benchmarks. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from systems.training.params import Positive, TransformerParams


class ParallelParams(TransformerParams):
    """Parameters of the data-parallel training of a TransformerLM on several ranks.

    Each rank trains on a separate batch of batch_size sequences. With `cuda_graph`, a whole step is
    one graph, with its communication and the update.

    The same training without communication is timed beside it, in alternating rounds.
    """

    world_size: Positive  # number of ranks; must equal the number of processes torchrun starts
    backend: Literal["gloo", "nccl"] = "nccl"  # gloo: on CPUs; nccl: one GPU per rank
    # As in `TransformerParams`. With bf16_master, gradients are averaged in bf16.
    precision: Literal["fp32", "tf32", "bf16", "bf16_master"] = "fp32"
    mode: Literal["eager", "compiled_blocks"] = "eager"  # as in `TransformerParams`
    warmup_steps: Annotated[int, Field(ge=0)] = 3  # number of steps before the first round
    rounds: Positive = 5  # number of rounds of each training; a sample is the mean of a round
    steps: Positive = 10  # number of consecutive steps in a round

    def step_counts(self) -> dict[str, Any]:
        """Return flops of one rank and tokens of all ranks in a step, each a dict by phase.

        FLOPs are counted for one rank, because tables compare them with the peak of one GPU.
        """
        counts = self.counts(["train_step"])
        tokens = counts["tokens"]["train_step"] * self.world_size
        return {"flops": counts["flops"], "tokens": {"train_step": tokens}}
