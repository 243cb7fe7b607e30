"""Memory and step time of optimizers with sharded state, compared with a replicated optimizer.

python -m jobs.submit sweeps/sharded_optimizer.yaml --local

All strategies average gradients with `systems.parallel.BucketedDDP`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from systems import accounting
from systems.training.parallel_params import ParallelParams

if TYPE_CHECKING:
    import torch

    from systems.training.parallel_training import ParallelTraining

VERSION = 1
BUCKET_SIZE_MB = 100.0  # of BucketedDDP, in 10^6 bytes
Strategy = Literal["replicated", "sharded", "torch_zero"]
_ACCOUNTING: dict[str, Literal["ddp", "sharded_optimizer"]] = {
    "replicated": "ddp",
    "sharded": "sharded_optimizer",
    "torch_zero": "sharded_optimizer",
}


class Params(ParallelParams):
    """A TransformerLM trained data-parallel. Has all fields of `ParallelParams`."""

    # Where the optimizer state is:
    #   replicated   every rank has the full state
    #   sharded      `systems.parallel.ShardedOptimizer`
    #   torch_zero   torch's ZeroRedundancyOptimizer with parameters_as_bucket_view=True
    strategy: Strategy


def predict(params: Params) -> dict[str, Any]:
    """Predict the bytes that a rank keeps, if all shards are equal, and sends per step."""
    state = accounting.model_state_bytes(params.model_size, params.precision)
    strategy = _ACCOUNTING[params.strategy]
    sent = accounting.step_sent_bytes(strategy, state, params.world_size)
    parts = accounting.rank_state_bytes(strategy, state, params.world_size)
    return {f"{part}_bytes": size for part, size in parts.items()} | {
        "sent_bytes": sum(sent.values())
    }


def run(params: Params) -> dict[str, Any]:
    """Join the process group, check and measure the training; return the results of this rank.

    Phases:
        train_step: a step of the data-parallel training.
        alone: a step without communication and sharding. Its rounds alternate with those of
            train_step.
        optimizer: the optimizer's step, including its communication.

    Peak memory is measured on a GPU, for init (construction), forward_backward and optimizer of the
    first step, and train_step (the second step).

    Facts:
        after_init, before_step, after_step: memory after construction, and before and after the
            first step of the optimizer, on the rank that uses most at that time. Each has
            weights_bytes, gradients_bytes and optimizer_state_bytes; on a GPU also allocated_bytes
            and other_bytes, the allocated bytes that are none of these three.
        by_rank: these facts, of every rank.
        error: errors that `check_parallel` returns.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if weights differ between ranks, or if the training differs from a single
            process that trains on the batches of all ranks.
        RuntimeError: if the number of processes is not `world_size`.
    """
    from systems.measure.ranks import rank_process_group

    with rank_process_group(params.backend, params.world_size) as device:
        return measure(params, device)


def measure(params: Params, device: torch.device) -> dict[str, Any]:
    """Measure in the current process group; `run` describes the result."""
    import torch.distributed as dist

    from systems.measure.ranks import all_gather_objects
    from systems.training.parallel_check import check_parallel
    from systems.training.parallel_timing import alternating_rounds
    from systems.training.parallel_training import ParallelTraining

    memory, peaks = _memory(params, device)
    gc.collect()
    training = sharded_training(params, device)
    alone = ParallelTraining(params, device, dist.get_rank())
    errors = check_parallel(training, alone)
    both = {"train_step": training, "alone": alone}
    samples = alternating_rounds(both, params.rounds, params.steps, params.warmup_steps)
    samples["optimizer"] = _optimizer_ms(training, params.rounds)
    by_rank = all_gather_objects(memory)
    most = {moment: max((rank[moment] for rank in by_rank), key=_total) for moment in memory}
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **params.step_counts(),
        "facts": {**most, "by_rank": by_rank, "error": errors},
    }


def sharded_training(params: Params, device: torch.device) -> ParallelTraining:
    """Return this rank's training with the optimizer of `params.strategy`."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from systems.parallel import BucketedDDP, ShardedOptimizer
    from systems.training.parallel_training import ParallelTraining
    from systems.training.training import optimizer_class_and_options

    optimizer_class, options = optimizer_class_and_options(params)

    def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> Any:
        if params.strategy == "sharded":
            return ShardedOptimizer(parameters, optimizer_class, **options)
        if params.strategy == "torch_zero":
            return ZeroRedundancyOptimizer(
                parameters, optimizer_class, parameters_as_bucket_view=True, **options
            )
        return optimizer_class(parameters, **options)

    return ParallelTraining(
        params,
        device,
        dist.get_rank(),
        lambda module: BucketedDDP(module, BUCKET_SIZE_MB),
        make_optimizer,
    )


def _memory(
    params: Params, device: torch.device
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Measure memory in use and peak memory of this rank from construction to the second step.

    Returns:
        Bytes in use by kind, at after_init, before_step and after_step; and peak bytes by phase.
        The second step is measured because it is the first in which all optimizer state exists from
        the start.
    """
    import torch

    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.state_memory import state_bytes

    made: list[ParallelTraining] = []
    peaks = peak_memory_by_phase(
        {"init": lambda: made.append(sharded_training(params, device))}, device
    )
    training = made.pop()

    def used_bytes() -> dict[str, int]:
        # ZeroRedundancyOptimizer updates its shard with an inner optimizer, which has the state.
        optimizer = getattr(training.optimizer, "optim", training.optimizer)
        used = state_bytes(training.model.parameters(), optimizer)
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device)
            used["other_bytes"] = allocated - sum(used.values())
            used["allocated_bytes"] = allocated
        return used

    def forward_backward() -> None:
        training.forward()
        training.backward()
        training.synchronize_gradients()

    def second_step() -> None:
        training.zero_grad()
        training.step()

    gc.collect()
    memory = {"after_init": used_bytes()}
    peaks |= peak_memory_by_phase({"forward_backward": forward_backward}, device)
    memory["before_step"] = used_bytes()
    peaks |= peak_memory_by_phase({"optimizer": training.optimizer_step}, device)
    memory["after_step"] = used_bytes()
    peaks |= peak_memory_by_phase({"train_step": second_step}, device)
    return memory, peaks


def _total(used: dict[str, int]) -> int:
    return used.get("allocated_bytes", sum(used.values()))


def _optimizer_ms(training: ParallelTraining, count: int) -> list[float]:
    """Time the optimizer's step with Python's clock; all ranks start together.

    Returns:
        Milliseconds of each of `count` steps.
    """
    from systems.measure.ranks import barrier
    from systems.measure.timing import clock_ms

    samples = []
    for _ in range(count):
        training.forward()
        training.backward()
        training.synchronize_gradients()
        barrier(training.device)
        samples.append(clock_ms(training.optimizer_step, training.device))
        training.zero_grad()
    return samples
