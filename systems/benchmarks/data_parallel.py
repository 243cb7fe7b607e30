"""Data parallel training of a Transformer by strategy: step time, and what of it is communication.

python -m jobs.submit sweeps/ddp.yaml --local

Each rank leaves its step time, the time of a step without communication, and what the profiler saw
of communication; rank 0 draws one profiled step of every rank into timeline.png.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from systems import accounting
from systems.training.parallel_params import ParallelParams

if TYPE_CHECKING:
    import torch
    from torch import nn

    from systems.measure.communication_timeline import StepTimeline
    from systems.training.parallel_training import ParallelTraining

VERSION = 1
Strategy = Literal["naive", "flat", "overlapped", "bucketed", "torch", "torch_tuned"]
PROBE_BYTES = 256 * 10**6  # of the all-reduce that tells the rate, or of all gradients if less
PROBES = 20


class Params(ParallelParams):
    """A TransformerLM trained data parallel.

    strategy:
        naive, flat, overlapped, bucketed   of `systems.parallel.ddp`
        torch         torch's DistributedDataParallel as it comes, with buckets of 25 MiB
        torch_tuned   with gradient_as_bucket_view and static_graph, its buffers not broadcast
    bucket_size_mb: of bucketed, in 10^6 bytes.
    beside: another strategy, of which a step is drawn above this one's.
    """

    strategy: Strategy
    bucket_size_mb: Annotated[float, Field(gt=0)] | None = None
    beside: Literal["naive", "flat", "overlapped", "torch", "torch_tuned"] | None = None

    @model_validator(mode="after")
    def _bucketed_has_a_size(self) -> Self:
        if (self.strategy == "bucketed") != (self.bucket_size_mb is not None):
            given = "none" if self.bucket_size_mb is None else f"{self.bucket_size_mb:g}"
            raise ValueError(
                f"bucket_size_mb is of strategy: bucketed and it alone; given {given} with "
                f"strategy: {self.strategy}"
            )
        return self


def predict(params: Params) -> dict[str, Any]:
    """Bytes of gradients, and bytes that a rank sends in a step on a ring."""
    state = accounting.model_state_bytes(params.model_size, params.precision)
    sent = accounting.step_sent_bytes("ddp", state, params.world_size)
    return {"gradients_bytes": state["gradients"], "sent_bytes": sum(sent.values())}


def run(params: Params) -> dict[str, Any]:
    """This rank's facts. Phases: `train_step`; `alone`, the same step without communication, all
    ranks stepping at the same time in rounds that alternate with the others; of the profiled steps
    `communication`, the time in which any is on its way, and `exposed`, that in which nothing is
    computed beside it.

    Facts: `parallel_training.step_facts` and `exposed_facts` of the slowest rank, and by_rank;
    error, as `check_parallel` has it; and `model`, accounting's of buckets with the call's cost and
    the rate that this process group has.

    Raises:
        Unsupported: this machine cannot do what is asked.
        WrongOutput: ranks differ, or from one process on the batches of all.
        RuntimeError: the number of processes is not `world_size`.
    """
    from systems.measure.ranks import rank_process_group

    with rank_process_group(params.backend, params.world_size) as device:
        return measure(params, device)


def measure(params: Params, device: torch.device) -> dict[str, Any]:
    """`run`, in the process group that there is."""
    import torch.distributed as dist

    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.ranks import all_gather_objects
    from systems.training.parallel_check import check_parallel
    from systems.training.parallel_timing import (
        alternating_rounds,
        draw_timeline,
        exposed_facts,
        profiled_steps,
        step_facts,
    )
    from systems.training.parallel_training import ParallelTraining

    rank = dist.get_rank()
    alone = ParallelTraining(params, device, rank)
    training = ParallelTraining(params, device, rank, lambda module: wrapped(module, params))
    errors = check_parallel(training, alone)
    both = {"train_step": training, "alone": alone}
    samples = alternating_rounds(both, params.rounds, params.steps, params.warmup_steps)
    model = _bucket_model(params, alone)
    del alone, both
    gc.collect()
    peaks = peak_memory_by_phase({"train_step": training.step}, device)
    steps = profiled_steps(training)
    samples["communication"] = [step.communication_ms for step in steps]
    samples["exposed"] = [step.exposed_ms for step in steps]
    panels: dict[str, list[StepTimeline]] = {params.strategy: all_gather_objects(steps[-1])}
    if params.beside is not None:
        del training
        gc.collect()
        panels = {params.beside: _step_of(params.beside, params, device), **panels}
    draw_timeline(panels, params, device)
    mine = step_facts(samples)
    by_rank = all_gather_objects(mine | exposed_facts(mine))
    slowest = max(by_rank, key=lambda facts: float(facts["train_step_ms"]))
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **params.step_counts(),
        "facts": {**slowest, "by_rank": by_rank, "model": model, "error": errors},
    }


def _step_of(strategy: str, params: Params, device: torch.device) -> list[StepTimeline]:
    """A profiled step of another strategy, of every rank."""
    import torch.distributed as dist

    from systems.measure.ranks import all_gather_objects
    from systems.training.parallel_timing import profiled_steps
    from systems.training.parallel_training import ParallelTraining

    other = params.model_copy(update={"strategy": strategy, "bucket_size_mb": None})
    training = ParallelTraining(
        other, device, dist.get_rank(), lambda module: wrapped(module, other)
    )
    for _ in range(params.warmup_steps):
        training.step()
    return all_gather_objects(profiled_steps(training)[-1])


def wrapped(module: nn.Module, params: Params) -> nn.Module:
    """The module, made data parallel by the strategy that params names."""
    from torch.nn.parallel import DistributedDataParallel

    from systems import parallel

    if params.strategy == "naive":
        return parallel.NaiveDDP(module)
    if params.strategy == "flat":
        return parallel.FlatDDP(module)
    if params.strategy == "overlapped":
        return parallel.OverlappedDDP(module)
    if params.strategy == "bucketed":
        assert params.bucket_size_mb is not None
        return parallel.BucketedDDP(module, params.bucket_size_mb)
    if params.strategy == "torch":
        return DistributedDataParallel(module)
    return DistributedDataParallel(
        module, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )


def _bucket_model(params: Params, alone: ParallelTraining) -> dict[str, Any]:
    """Accounting's model of buckets, with o and w as this process group has them, and backward as
    this device takes it. A collective.

    Of overlapped a bucket is a parameter. Of naive and flat nothing is hidden, and torch fills its
    buckets in a way of its own: of those no exposed time is predicted.
    """
    from systems.measure.ranks import all_gather_objects
    from systems.measure.timing import clock_ms
    from systems.parallel.buckets import MB, fill_buckets

    backward = []
    for _ in range(3):
        clock_ms(alone.forward, alone.device)
        backward.append(clock_ms(alone.backward, alone.device))
        alone.zero_grad()
    backward_seconds = max(all_gather_objects(min(backward))) / 1e3
    parameters = list(alone.model.parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    call_seconds = _all_reduce_seconds(1, alone.device)
    probe = min(size, PROBE_BYTES) // 4
    bandwidth = 4 * probe / max(_all_reduce_seconds(probe, alone.device) - call_seconds, 1e-9)
    fit = size, bandwidth, call_seconds
    told: dict[str, Any] = {
        "call_us": call_seconds * 1e6,
        "all_reduce_gb_per_second": bandwidth / 1e9,
        "all_gradients_ms": (size / bandwidth + call_seconds) * 1e3,
        "backward_ms": backward_seconds * 1e3,
        "best_bucket_bytes": accounting.best_bucket_bytes(*fit),
        "largest_parameter_bytes": max(parameter.nbytes for parameter in parameters),
    }
    if params.strategy in ("overlapped", "bucketed"):
        buckets = len(fill_buckets(parameters, (params.bucket_size_mb or 0) * MB))
        overhead = accounting.ddp_overhead_seconds
        told["buckets"] = buckets
        told["exposed_ms"] = overhead(*fit, buckets) * 1e3
        told["exposed_beside_backward_ms"] = overhead(*fit, buckets, backward_seconds) * 1e3
    return told


def _all_reduce_seconds(elements: int, device: torch.device) -> float:
    """Of one float32 all-reduce of many back to back, on the slowest rank."""
    import torch
    import torch.distributed as dist

    from systems.measure.ranks import all_gather_objects, barrier
    from systems.measure.timing import synchronize

    buffer = torch.zeros(elements, device=device)
    dist.all_reduce(buffer)
    barrier(device)
    start = time.perf_counter()
    for _ in range(PROBES):
        dist.all_reduce(buffer)
    synchronize(device)
    return float(max(all_gather_objects((time.perf_counter() - start) / PROBES)))
