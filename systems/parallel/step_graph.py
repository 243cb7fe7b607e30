"""A training step as one CUDA graph, so that the host launches it at once.

Source: CUDA C++ Programming Guide, section "CUDA Graphs"; torch's notes on `torch.cuda.graph`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
WARMUP_STEPS = 3  # compile, autotune, allocate optimizer state, and learn the order of layers


class GraphedStep(Generic[Result]):
    """A function that runs a training step, captured as a CUDA graph and replayed.

        def step():
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        graphed = GraphedStep(step)
        for batch in batches:
            inputs.copy_(batch.inputs)
            targets.copy_(batch.targets)
            loss = graphed()

    The model may be in any wrapper of `systems.parallel`; communication becomes a part of the
    graph. The constructor runs the function `warmup` times, which are real steps, and then captures
    it. A call replays the graph on the current stream and returns what the function returned, whose
    tensors have new values.

    A replay repeats the same kernels at the same addresses. So nothing may change between replays
    but the values of tensors: new inputs are copied into the old ones; no parameter may be frozen,
    replaced or used in some steps only; learning rates must be tensors to change
    (`capturable=True`). All ranks must replay equally often. A backward under `no_sync` is a graph
    of its own: run both functions a few times, then capture them in the order of use, with
    `warmup=0` and the `pool` of the first, while there are no gradients.

    Raises:
        RuntimeError: if there is no NVIDIA GPU, or the function does something that cannot be
            captured, such as reading a value of the GPU.
    """

    def __init__(
        self, function: Callable[[], Result], *, warmup: int = WARMUP_STEPS, pool: Any = None
    ):
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA graphs need an NVIDIA GPU")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._function = function  # what it uses must live as long as the graph
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for the state of events meanwhile, which "global" forbids.
        capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with _no_garbage_collection(), capture:
            self._result = function()
        self.pool = self._graph.pool()

    def __call__(self) -> Result:
        self._graph.replay()
        return self._result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and none in the `with` block.

    An old wrapper that is freed in a capture aborts the process, as its peer memory is unmapped.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
