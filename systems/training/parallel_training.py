"""Train a Transformer on several ranks, each with its own batch.

training = ParallelTraining(params, device, rank, wrap=NaiveDDP)
alone = ParallelTraining(params, device, rank)  # communicates nothing
errors = check_parallel(training, alone)
samples = alternating_rounds({"train_step": training, "alone": alone}, rounds=5, steps=10)

A step of `training` is timed against one of `alone` (`parallel_timing`), and its result is checked
against it (`parallel_check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from systems.model import cross_entropy
from systems.training.parallel_params import ParallelParams
from systems.training.training import Training, batch, optimizer_class_and_options

Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[..., Any]  # (parameters) -> Optimizer


class ParallelTraining(Training):
    """A Training on one rank's batch. All ranks start from the same weights.

    Args:
        rank: the rank whose batch it trains on.
        wrap: makes the model data parallel; without it nothing is communicated.
        make_optimizer: makes the optimizer of the wrapped model's parameters; by default the one
            that params names.
        autocasts: False where the wrapper casts by itself, instead of the autocast that the
            precision asks for.
    """

    def __init__(
        self,
        params: ParallelParams,
        device: torch.device,
        rank: int,
        wrap: Wrap | None = None,
        make_optimizer: MakeOptimizer | None = None,
        autocasts: bool = True,
    ):
        super().__init__(params, device)
        self.params: ParallelParams = params
        self._autocasts = autocasts
        self.tokens, self.targets = rank_batch(params, device, rank)
        self.wrapper: nn.Module = self.model
        if wrap is not None:
            self.wrapper = wrap(self.model)
            optimizer_class, options = optimizer_class_and_options(params)
            make = make_optimizer or partial(optimizer_class, **options)
            self.optimizer = make(self.wrapper.parameters())
        self.cross_entropy = cross_entropy
        if params.mode == "compiled_blocks":
            self.cross_entropy = torch.compile(cross_entropy, fullgraph=True)
        self._finish = getattr(self.wrapper, "finish_gradient_synchronization", None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return super().autocast() if self._autocasts else contextlib.nullcontext()

    def forward(self) -> None:
        with self.matmul_precision(), self.autocast():
            self.loss = self.cross_entropy(self.wrapper(self.tokens), self.targets)

    def synchronize_gradients(self) -> None:
        """Finish the averaging of this project's wrappers; torch's finish it in backward."""
        if self._finish is not None:
            self._finish()

    def step_keeping_gradients(self) -> None:
        """Run a step without `zero_grad`."""
        self.forward()
        self.backward()
        self.synchronize_gradients()
        self.optimizer_step()

    def step(self) -> None:
        self.step_keeping_gradients()
        self.zero_grad()


def rank_batch(params: ParallelParams, device: torch.device, rank: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank: tokens and targets."""
    return batch(params.model_copy(update={"seed": params.seed + 1 + rank}), device)
