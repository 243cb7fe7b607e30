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
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from systems.benchmark import Unsupported
from systems.measure.ranks import all_gather_objects
from systems.model import cross_entropy
from systems.parallel import GraphedStep
from systems.parallel.collectives import group_or_world
from systems.parallel.peer_memory import reason_against
from systems.parallel.step_graph import WARMUP_STEPS
from systems.training.external_wrappers import finish_of
from systems.training.parallel_params import ParallelParams
from systems.training.training import (
    Training,
    batch,
    optimizer_class_and_options,
)

Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[..., Any]  # (parameters) -> Optimizer
MAX_REASON = 500  # characters of an error


class ParallelTraining(Training):
    """Data-parallel training, as seen by one rank. All ranks start with the same weights.

    Args:
        rank: determines the batch.
        wrap: returns the model in a data-parallel wrapper. None trains it without communication.
        make_optimizer: takes the parameters of the wrapped model. None: that of `params.optimizer`.
            Ignored if wrap is None, and with bf16_master, which keeps the optimizer of the model.
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
            with _other_stream(device, params.cuda_graph):
                self.wrapper = wrap(self.model)
            if params.precision != "bf16_master":  # else that of the model has master weights
                optimizer_class, options = optimizer_class_and_options(params)
                make = make_optimizer or partial(optimizer_class, **options)
                self.optimizer = make(self.wrapper.parameters())
        self.cross_entropy = cross_entropy
        if params.mode == "compiled_blocks":
            self.cross_entropy = torch.compile(cross_entropy, fullgraph=True)
        self._finish = finish_of(self.wrapper)
        self._is_warm = False
        self._graphs: list[GraphedStep[None]] = []

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return super().autocast() if self._autocasts else contextlib.nullcontext()

    def forward(self) -> None:
        with self.matmul_precision(), self.autocast():
            self.loss = self.cross_entropy(self.wrapper(self.tokens), self.targets)

    def synchronize_gradients(self) -> None:
        """Finish averaging the gradients after backward. Torch's wrappers average in backward."""
        if self._finish is not None:
            self._finish()

    def step_keeping_gradients(self) -> None:
        """Run forward, backward and the optimizer's update, but do not free the gradients."""
        self._gradients()
        self.optimizer_step()

    def step(self) -> None:
        if not self._graphs:
            self.step_keeping_gradients()
            self.zero_grad()
        for graph in self._graphs:
            graph()

    @property
    def warmup_steps(self) -> int:
        """Number of steps before a capture. torch's DDP measures its first ten, with events."""
        return 11 if isinstance(self.wrapper, DistributedDataParallel) else WARMUP_STEPS

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    @property
    def pool(self) -> Any:
        """Memory pool of the graphs, for the capture of another training."""
        return self._graphs[0].pool

    def drop_graphs(self) -> None:
        """Let `step` launch kernels again."""
        self._graphs = []
        self.loss = torch.zeros_like(self.loss)  # not in the memory of the graphs
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def capture(self, pool: Any = None) -> None:
        """Capture a step as a CUDA graph, which `step` replays from now on.

        All ranks must call this function. It calls `warm_up` if nobody did.

        Raises:
            Unsupported: on all ranks, if a step of any rank cannot be captured.
        """
        problem = None
        try:
            if not self._is_warm:
                self.warm_up()
            gc.collect()
            torch.cuda.empty_cache()  # graphs have memory of their own
            self._graphs = self._captured(pool)
        except RuntimeError as error:
            problem = f"a step cannot be captured as a CUDA graph: {str(error)[:MAX_REASON]}"
        problems = [each for each in all_gather_objects(problem) if each]
        if problems:
            raise Unsupported(problems[0])

    def warm_up(self, *, update: bool = True) -> None:
        """Run the steps that must precede a capture, while no graph has memory yet.

        All ranks must call this function. Without updates, the optimizer must have its state before
        the capture.
        """
        with _other_stream(self.device, graphed=True):
            for _ in range(self.warmup_steps):
                self._gradients()
                if update:
                    self.optimizer_step()
                self.zero_grad()
        self._is_warm = True

    def _captured(self, pool: Any) -> list[GraphedStep[None]]:
        if not hasattr(self.optimizer, "prepare"):
            return [GraphedStep(self.step, warmup=0, pool=pool)]
        # FusedAdamW must know the addresses of the gradients, which the first graph decides.
        gradients = GraphedStep(self._gradients, warmup=0, pool=pool)
        self.optimizer.prepare()
        update = GraphedStep(self.optimizer_step, warmup=0, pool=gradients.pool)
        self.zero_grad()
        return [gradients, update]

    def _gradients(self) -> None:
        self.forward()
        self.backward()
        self.synchronize_gradients()


def require_peer_memory(device: torch.device) -> None:
    """Raise Unsupported if the ranks cannot have peer memory. All ranks must call this function."""
    reason = reason_against(group_or_world(None), device)
    if reason is not None:
        raise Unsupported(f"the ranks cannot have peer memory: {reason}")


@contextlib.contextmanager
def _other_stream(device: torch.device, graphed: bool) -> Iterator[None]:
    """Use another stream than the default one, if a graph is captured later.

    torch's DDP makes nodes of autograd, which keep the stream. A graph cannot have the default one.
    """
    if not graphed:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def rank_batch(params: ParallelParams, device: torch.device, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a rank, each (batch_size, context_length).

    All ranks have different batches.
    """
    return batch(params.model_copy(update={"seed": params.seed + 1 + rank}), device)
