"""Steps of every wrapper on GPUs: they never wait, and a CUDA graph of them computes the same."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from systems.parallel import FullyShardedDataParallel, GraphedStep
from tests.systems.parallel.ranks import GPUS, RankContext, on_ranks
from tests.systems.parallel.situations import OURS, WRAPPERS, Net, Run, Wrapper

STEPS = 20
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
FSDP_IN_BF16 = {
    "fsdp_bf16": Wrapper(partial(FullyShardedDataParallel, **BF16)),
    "fsdp_bf16_blocks": Wrapper(partial(FullyShardedDataParallel, layers=(Net,), **BF16)),
}


class _Training(Run):
    """Training of this rank with a new batch in each step, launched or replayed."""

    def __init__(self, here: RankContext, name: str):
        super().__init__(here, (WRAPPERS | FSDP_IN_BF16)[name])
        self.x = torch.zeros(6, 6, device=here.device)
        with torch.cuda.stream(torch.cuda.Stream()):  # for torch's DDP
            self.make(lambda: nn.Sequential(Net(), nn.Flatten(0)))
        torch.cuda.synchronize()

    def make_optimizer(self, parameters: Any) -> Any:
        options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2, "capturable": True}
        assert self.wrapper is not None
        return self.wrapper.make_optimizer(self.model, parameters, **options)

    def loss(self) -> torch.Tensor:
        return (self.model(self.x) - self.x[:, 0]).square().mean()

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.update()
        self.zero_grad()
        return loss.detach()

    def accumulate(self) -> None:
        with self.no_sync():
            self.loss().backward()

    def take(self, number: int) -> None:
        generator = torch.Generator().manual_seed(2 * number + self.here.rank)
        self.x.copy_(torch.randn(6, 6, generator=generator))


@on_ranks(GPUS, repeats=1)
@pytest.mark.parametrize("name", [*OURS, *FSDP_IN_BF16])
def test_a_step_never_waits_for_the_device(here: RankContext, name: str) -> None:
    training = _Training(here, name)
    training.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            training.x[0, 0].item()  # checks that the debug mode detects synchronization
        for _ in range(2):
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_ranks(GPUS, repeats=1)
@pytest.mark.parametrize(
    ("name", "accumulates"),
    [
        *((name, False) for name in WRAPPERS),
        *((name, True) for name in ("flat", "bucketed", "peer", "sharded_gradients")),
    ],
)
def test_replays_equal_launches(here: RankContext, name: str, accumulates: bool) -> None:
    """A step without synchronization, which accumulates gradients, is a graph of its own."""
    launched, replayed = _Training(here, name), _Training(here, name)
    for training in (launched, replayed):
        for _ in range(11 if name.startswith("torch") else 3):
            if accumulates:
                training.accumulate()
            training.step()
    accumulate = GraphedStep(replayed.accumulate, warmup=0) if accumulates else None
    step = GraphedStep(replayed.step, warmup=0, pool=accumulate.pool if accumulate else None)
    for number in range(STEPS):
        launched.take(number)
        replayed.take(number)
        if accumulate:
            launched.accumulate()
            accumulate()
            launched.take(number + STEPS)
            replayed.take(number + STEPS)
        torch.testing.assert_close(step(), launched.step(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(replayed.values(), launched.values(), atol=1e-5, rtol=1e-5)


@on_ranks(GPUS, repeats=1)
def test_an_old_wrapper_is_not_freed_in_a_capture(here: RankContext) -> None:
    """Its peer memory cannot be unmapped there."""
    gc.disable()
    try:
        old: Any = _Training(here, "peer")
        old.step()
        old.itself = old
        del old
        training = _Training(here, "peer")
        training.step()

        def step() -> torch.Tensor:
            gc.collect()
            return training.step()

        GraphedStep(step, warmup=0)()
    finally:
        gc.enable()


def test_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        GraphedStep(lambda: None)
