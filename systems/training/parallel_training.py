"""Data-parallel training of a Transformer: each rank trains on a separate batch.

    training = ParallelTraining(params, device, rank, wrap=NaiveDDP)
    alone = ParallelTraining(params, device, rank)  # the same without communication
    errors = check_parallel(training, alone)
    samples = alternating_rounds({"train_step": training, "alone": alone}, rounds=5, steps=10)

The training without communication is a reference: `systems.check.parallel_training` compares
losses, gradients and weights with it, and `alternating_rounds` times both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from systems.model import cross_entropy
from systems.training.external_wrappers import finish_of
from systems.training.parallel_params import ParallelParams
from systems.training.training import (
    Training,
    batch,
    optimizer_class_and_options,
)

Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[..., Any]  # (parameters) -> Optimizer


class ParallelTraining(Training):
    """Data-parallel training, as seen by one rank. All ranks start with the same weights.

    Args:
        rank: determines the batch.
        wrap: returns the model in a data-parallel wrapper. None trains it without communication.
        make_optimizer: takes the parameters of the wrapped model. None: that of `params.optimizer`.
            Ignored if wrap is None.
        autocasts: whether forward runs under autocast if `params.precision` needs it. Use False if
            the wrapper itself casts weights and inputs.

    Raises:
        Unsupported: if the device does not support the parameters.
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
        self._finish = finish_of(self.wrapper)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return super().autocast() if self._autocasts else contextlib.nullcontext()

    def forward(self) -> None:
        with self.matmul_precision(), self.autocast():
            self.loss = self.cross_entropy(self.wrapper(self.tokens), self.targets)

    def synchronize_gradients(self) -> None:
        """Finish averaging the gradients over the ranks. Call it after backward.

        With a wrapper of torch, this method does nothing, because torch averages in backward.
        """
        if self._finish is not None:
            self._finish()

    def step_keeping_gradients(self) -> None:
        """Run forward, backward and the optimizer's update, but do not free the gradients."""
        self.forward()
        self.backward()
        self.synchronize_gradients()
        self.optimizer_step()

    def step(self) -> None:
        self.step_keeping_gradients()
        self.zero_grad()


def rank_batch(params: ParallelParams, device: torch.device, rank: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a rank, each of shape (batch_size, context_length).

    They depend on the seed in `params` and on the rank, so all ranks have different batches.
    """
    return batch(params.model_copy(update={"seed": params.seed + 1 + rank}), device)
