"""Measure memory and step time of data-parallel training with a sharded optimizer state.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/sharded_optimizer.yaml --local

For comparison, the same training can be measured with a replicated optimizer state: then every rank
keeps the full state. Gradients are averaged with `systems.parallel.BucketedDDP`, or `PeerDDP`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from systems import accounting, implementation_sources
from systems.accounting.data_parallel import Strategy
from systems.benchmark import Sources, round_options
from systems.external.parameter import Implementation
from systems.external.reference import is_reference
from systems.training.parallel_params import ParallelParams

if TYPE_CHECKING:
    import torch

    from systems.training.parallel_training import ParallelTraining

VERSION = 1
BUCKET_SIZE_MB = 100.0  # bucket size of the DDP wrapper, in MB (10^6 bytes)
STRATEGIES = ("replicated", "sharded", "peer", "torch_zero")


class Params(ParallelParams):
    """Parameters of data-parallel training. Has all fields of `ParallelParams`."""

    # How the optimizer state is stored:
    #   replicated   every rank keeps the full state
    #   sharded      `systems.parallel.ShardedOptimizer` shards the state
    #   peer         as sharded, but the ranks of a host copy through each other's memory, and each
    #                averages and keeps only the gradients of its parameters: `PeerDDP`
    #   torch_zero   torch's ZeroRedundancyOptimizer with parameters_as_bucket_view=True shards the
    #                state
    #   FILE.py:NAME   an optimizer class of your own, see `systems.training.external_wrappers`
    strategy: Annotated[str, Implementation("optimizer", STRATEGIES)]
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"  # as in `TransformerParams`


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    wrappers = {
        "sharded": ("ddp", "sharded_optimizer"),
        "peer": ("peer_ddp", "sharded_optimizer"),
    }.get(params.strategy, ("ddp",))
    return implementation_sources.of_training(params.attention, params.optimizer, *wrappers)


def predict(params: Params) -> dict[str, Any]:
    """Predict the bytes that a rank keeps after a step, and the bytes that it sends in a step.

    The prediction assumes that all ranks have shards of the same size.
    """
    state = accounting.model_state_bytes(params.model_size, params.precision)
    strategies: dict[str, Strategy] = {"replicated": "ddp", "peer": "zero2"}
    strategy = strategies.get(params.strategy, "sharded_optimizer")
    sent = accounting.step_sent_bytes(strategy, state, params.world_size)
    parts = accounting.rank_state_bytes(strategy, state, params.world_size)
    return {f"{part}_bytes": size for part, size in parts.items()} | {
        "sent_bytes": sum(sent.values())
    }


def run(params: Params) -> dict[str, Any]:
    """Check the data-parallel training and measure its memory and time on this rank.

    Steps are timed in rounds, as in the benchmark `data_parallel`. In a block, only the first
    execution includes the check.

    Phases with times:
        train_step, alone: as in the benchmark `data_parallel`.
        optimizer: time of the optimizer's update, including its communication.

    Phases with peak memory, on a GPU only:
        init: construction of model and optimizer. Not with `strategy: peer`.
        forward_backward: forward and backward of the first step.
        optimizer: the optimizer's update in the first step.
        train_step: the second step.

    Facts:
        after_init, before_step, after_step: memory in use after the construction of model and
            optimizer, before the first update, and after it, on the rank that uses most. Each is a
            dict with weights_bytes, gradients_bytes and optimizer_state_bytes, and on a GPU
            allocated_bytes (all allocated memory) and other_bytes (all but these three).
        over_alone, error, graph_error: as in the benchmark `data_parallel`.

    Raises:
        Unsupported, WrongOutput, RuntimeError: as in the benchmark `data_parallel`.
    """
    from systems.measure.ranks import rank_process_group

    with rank_process_group(params.backend, params.world_size) as device:
        return measure(params, device)


def measure(params: Params, device: torch.device) -> dict[str, Any]:
    """Check and measure like `run`, in the default process group."""
    import torch.distributed as dist

    from systems.check.parallel_training import (
        check_again,
        check_and_capture,
        check_optimizer_again,
        check_own_attention,
    )
    from systems.check.sharded_training import OWNED
    from systems.measure.ranks import all_gather_objects
    from systems.measure.windows import during
    from systems.training.parallel_timing import alternating_rounds, step_facts
    from systems.training.parallel_training import ParallelTraining, require_peer_memory

    with during("init"):
        check_own_attention(params, device)
        if params.strategy == "peer":
            require_peer_memory(device)
    memory, peaks = _memory(params, device)
    gc.collect()
    check = round_options().check
    with during("init"):
        training = sharded_training(params, device)
        alone = ParallelTraining(params, device, dist.get_rank())
    with during("check"):
        errors = check_and_capture(training, alone, OWNED)
    both = {"train_step": training, "alone": alone}
    samples = alternating_rounds(both, params.rounds, params.steps, params.warmup_steps)
    for either in (training, alone):
        either.drop_graphs()
    with during("optimizer"):
        samples["optimizer"] = _optimizer_ms(training, params.rounds)
    if check:
        with during("check"):
            check_again(training, alone, OWNED)
            check_optimizer_again(training)
    by_rank = all_gather_objects(memory)
    over_alone = step_facts(all_gather_objects(samples))["over_alone"]
    most = {moment: max((rank[moment] for rank in by_rank), key=_total) for moment in memory}
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **params.step_counts(),
        "facts": {**most, "over_alone": over_alone, **errors},
    }


def sharded_training(params: Params, device: torch.device) -> ParallelTraining:
    """Return the training of this rank with the optimizer that `params.strategy` selects."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from systems.parallel import BucketedDDP, PeerDDP, ShardedOptimizer
    from systems.training.external_wrappers import make_sharded_optimizer
    from systems.training.parallel_training import ParallelTraining
    from systems.training.training import optimizer_class_and_options

    optimizer_class, options = optimizer_class_and_options(params)
    wrapper = PeerDDP if params.strategy == "peer" else BucketedDDP

    made: list[Any] = []

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        made.append(wrapper(module, BUCKET_SIZE_MB))
        return made[0]

    def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> Any:
        if is_reference(params.strategy):
            return make_sharded_optimizer(params.strategy, parameters, optimizer_class, options)
        if params.strategy in ("sharded", "peer"):
            peer = params.strategy == "peer"
            return ShardedOptimizer(
                parameters,
                optimizer_class,
                peer_memory=peer,
                shard_gradients=made[0] if peer else None,
                **options,
            )
        if params.strategy == "torch_zero":
            return ZeroRedundancyOptimizer(
                parameters, optimizer_class, parameters_as_bucket_view=True, **options
            )
        return optimizer_class(parameters, **options)

    return ParallelTraining(
        params,
        device,
        dist.get_rank(),
        wrap,
        make_optimizer,
    )


def _memory(
    params: Params, device: torch.device
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return the memory in use, and on a GPU the peaks, of construction and the first two steps.

    The optimizer allocates its state in the first step. Only the second step has the peak memory of
    later steps, because the state exists from its start.
    """
    import torch

    from systems.measure.memory.state_memory import state_bytes
    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.parallel.peer_memory import live_bytes

    made: list[ParallelTraining] = []
    peaks = peak_memory_by_phase(
        {"init": lambda: made.append(sharded_training(params, device))}, device
    )
    training = made.pop()
    if params.strategy == "peer":
        # `PeerDDP` had a buffer of all gradients, which torch does not count, and which was freed
        # when the optimizer sharded them. Later phases have the peer memory that is live now.
        peaks.pop("init", None)

    def used_bytes() -> dict[str, int]:
        used = state_bytes(training.model.parameters(), training.optimizer)
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device) + live_bytes()
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
    return memory, {phase: peak + live_bytes() for phase, peak in peaks.items()}


def _total(used: dict[str, int]) -> int:
    return used.get("allocated_bytes", sum(used.values()))


def _optimizer_ms(training: ParallelTraining, count: int) -> list[float]:
    """Time `count` updates of the optimizer, in milliseconds; the ranks start each together."""
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
