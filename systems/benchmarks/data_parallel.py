"""Measure step time and exposed communication of data-parallel training.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/ddp.yaml --local

Each rank measures the time of a training step, and the time of the same step without communication.
Then each rank profiles a few steps and measures the communication in them. Communication is called
exposed during the time in which the rank computes nothing. Rank 0 keeps one profiled step of every
rank in the file timeline.plot.json, which `aggregate.py FOLDER --plot DIR` and the report draw.
"""

from __future__ import annotations

import gc
import statistics
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from systems import accounting, implementation_sources
from systems.benchmark import Sources, Unsupported, round_options
from systems.external.parameter import Implementation
from systems.external.reference import is_reference
from systems.training.parallel_params import ParallelParams

if TYPE_CHECKING:
    import torch
    from torch import nn

    from systems.measure.profiler.communication_timeline import StepTimeline
    from systems.training.parallel_training import ParallelTraining

VERSION = 1
STRATEGIES = ("naive", "flat", "overlapped", "bucketed", "peer", "torch", "torch_tuned")
BUCKETED = ("bucketed", "peer")  # strategies with a bucket size
BUCKET_SIZE_MB = 100.0  # default of bucket_size_mb with these strategies, in MB


class Params(ParallelParams):
    """Parameters of data-parallel training. Has all fields of `ParallelParams`."""

    # How gradients are averaged:
    #   naive         `systems.parallel.NaiveDDP`
    #   flat          `systems.parallel.FlatDDP`
    #   overlapped    `systems.parallel.OverlappedDDP`
    #   bucketed      `systems.parallel.BucketedDDP`
    #   peer          `systems.parallel.PeerDDP`: on one host, through the memory of other ranks
    #   torch         torch's DistributedDataParallel, default arguments (buckets of 25 MiB)
    #   torch_tuned   torch's DistributedDataParallel with gradient_as_bucket_view=True,
    #                 static_graph=True and broadcast_buffers=False
    #   FILE.py:NAME  a wrapper of your own, see `systems.training.external_wrappers`
    # torch.compile does not split compiled blocks in torch's DistributedDataParallel, also inside a
    # wrapper of your own (see `measure`).
    strategy: Annotated[str, Implementation("ddp", STRATEGIES)]
    # Bucket size in MB (10^6 bytes), for BUCKETED (default: 100) and for a wrapper of your own with
    # a parameter bucket_size_mb. Not allowed with other strategies.
    bucket_size_mb: Annotated[float, Field(gt=0)] | None = None
    # A second strategy to profile for comparison. The picture has it above `strategy`. None
    # profiles `strategy` only.
    beside: Literal["naive", "flat", "overlapped", "torch", "torch_tuned"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_size(cls, given: Any) -> Any:
        """Set the size of buckets, so that a run has the same id with and without the default."""
        if isinstance(given, dict) and given.get("strategy") in BUCKETED:
            size = given.get("bucket_size_mb")
            return given | {"bucket_size_mb": BUCKET_SIZE_MB if size is None else size}
        return given

    @model_validator(mode="after")
    def _only_buckets_have_a_size(self) -> Self:
        has_buckets = self.strategy in BUCKETED or is_reference(self.strategy)
        if self.bucket_size_mb is not None and not has_buckets:
            raise ValueError(
                f"bucket_size_mb is allowed only with `strategy: {'` or `'.join(BUCKETED)}` or a "
                f"wrapper of your own, got `strategy: {self.strategy}` and "
                f"`bucket_size_mb: {self.bucket_size_mb:g}`"
            )
        return self


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    chosen = {params.strategy, params.beside}
    wrappers: tuple[str, ...] = (
        ("ddp",) if {"naive", "flat", "overlapped", "bucketed"} & chosen else ()
    )
    wrappers += ("peer_ddp",) if "peer" in chosen else ()
    return implementation_sources.of_training(params.attention, params.optimizer, *wrappers)


def predict(params: Params) -> dict[str, Any]:
    """Predict the bytes of all gradients, and those that a rank sends in ring all-reduces."""
    state = accounting.model_state_bytes(params.model_size, params.precision)
    sent = accounting.step_sent_bytes("ddp", state, params.world_size)
    return {"gradients_bytes": state["gradients"], "sent_bytes": sum(sent.values())}


def run(params: Params) -> dict[str, Any]:
    """Check the data-parallel training and measure its steps on this rank.

    Steps are timed in rounds of consecutive steps. Rounds of data-parallel steps and rounds of
    steps without communication alternate, on all ranks at the same time. In a block, only the first
    execution includes the check and the profile.

    Phases:
        train_step: mean time of a data-parallel step, one sample per round.
        alone: mean time of the same step without communication, one sample per round.
        communication: time in a profiled step during which communication is in flight.
        exposed: part of `communication` during which this rank computes nothing.

    Facts:
        exposed_ms, exposed_std_ms, communication_share, alone_imbalance: communication that adds to
            the time of a step, see `exposed_facts`.
        train_step_ms, alone_ms, over_alone, profiled_communication_ms, profiled_exposed_ms,
            overlap_share: see `step_facts`.
        error: errors of loss, gradients and weights on this rank, see `check_parallel`.
        graph_error: those of replayed steps, see `check_captured`. Only with cuda_graph.
        host_ms: time of the host to launch a step on an idle GPU.
        profiled_computation_ms: time in a profiled step during which a kernel of this rank
            computes. Gaps between kernels do not count. Communication that runs at the same time
            makes it longer.
        profiled_sm_communication_ms: time in a profiled step during which a kernel of NCCL
            communicates, and takes multiprocessors from computation. Peer copies do not count: copy
            engines copy, and the kernels that wait for signals take a part of one.
        model.buckets: number of buckets, only with "overlapped", in which each parameter is a
            bucket, "bucketed" and "peer". Earlier records have more of a model.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if weights differ between ranks, or if losses, gradients or weights differ from
            those of a single process that trains on the batches of all ranks, or if the user's
            attention is not accurate enough.
        RuntimeError: if the number of processes is not `world_size`.
    """
    from systems.measure.ranks import rank_process_group

    with rank_process_group(params.backend, params.world_size) as device:
        return measure(params, device)


def measure(params: Params, device: torch.device) -> dict[str, Any]:
    """Check and measure like `run`, in the default process group."""
    import torch
    import torch._dynamo
    import torch.distributed as dist

    from systems.check.parallel_training import check_own_attention
    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.ranks import all_gather_objects
    from systems.measure.windows import during
    from systems.parallel.peer_memory import live_bytes
    from systems.training.parallel_timing import exposed_facts, keep_timeline, step_facts
    from systems.training.parallel_training import ParallelTraining, require_peer_memory

    # In the forward of torch's DistributedDataParallel, torch.compile would split each block into
    # pieces of about a bucket. The training without communication would execute the pieces, too,
    # because both trainings share their compiled code.
    torch._dynamo.config.optimize_ddp = False
    with during("init"):
        check_own_attention(params, device)
        if params.strategy == "peer":
            require_peer_memory(device)
        training = ParallelTraining(
            params, device, dist.get_rank(), lambda module: wrapped(module, params)
        )
    samples, facts, steps = compared_with_alone(params, training)
    gc.collect()  # the training without communication
    # Of a step that is launched. A graph allocates the same while it is captured.
    peaks = peak_memory_by_phase({"train_step": training.step}, device)
    peaks = {phase: peak + live_bytes() for phase, peak in peaks.items()}
    if steps:
        with during("profile"):
            panels: dict[str, list[StepTimeline]] = {params.strategy: all_gather_objects(steps[-1])}
            if params.beside is not None:
                del training
                gc.collect()
                panels = {params.beside: _step_of(params.beside, params, device), **panels}
            keep_timeline(panels, params, device)
    of_ranks = all_gather_objects(samples)
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **params.step_counts(),
        "facts": step_facts(of_ranks) | exposed_facts(of_ranks) | facts,
    }


def compared_with_alone(
    params: Params, training: ParallelTraining
) -> tuple[dict[str, list[float]], dict[str, Any], list[StepTimeline]]:
    """Check and time a training beside the same training without communication.

    Returns samples, facts, and the profiled steps of this rank, none if the round does not ask for
    checks. Steps of the training are launched afterwards.
    """
    import torch.distributed as dist

    from systems.check.parallel_training import check_again, check_and_capture
    from systems.measure.windows import during
    from systems.parallel.buckets import MB, fill_buckets
    from systems.training.parallel_timing import alternating_rounds, host_ms, profiled_steps
    from systems.training.parallel_training import ParallelTraining

    device, check = training.device, round_options().check
    facts, steps = dict[str, Any](), list["StepTimeline"]()
    with during("init"):
        alone = ParallelTraining(params, device, dist.get_rank())
    with during("check"):
        facts |= check_and_capture(training, alone)
    both = {"train_step": training, "alone": alone}
    samples = alternating_rounds(both, params.rounds, params.steps, params.warmup_steps)
    if check:
        with during("profile"):
            facts["host_ms"] = host_ms(training)
            steps = profiled_steps(training)
            samples["communication"] = [step.communication_ms for step in steps]
            samples["exposed"] = [step.exposed_ms for step in steps]
            facts["profiled_computation_ms"] = statistics.median(
                sum(end - start for start, end in step.busy) / 1e3 for step in steps
            )
            facts["profiled_sm_communication_ms"] = statistics.median(
                step.on_multiprocessors_ms for step in steps
            )
    training.drop_graphs()
    alone.drop_graphs()
    if check:
        with during("check"):
            check_again(training, alone)
        if params.strategy in ("overlapped", *BUCKETED):
            size = (params.bucket_size_mb or 0) * MB
            facts["model"] = {"buckets": len(fill_buckets(list(alone.model.parameters()), size))}
    return samples, facts, steps


def _step_of(strategy: str, params: Params, device: torch.device) -> list[StepTimeline]:
    """Profile steps with another strategy, on all ranks; return the last one of each rank.

    They are replayed if `params.cuda_graph` is true, as those of `params.strategy`.
    """
    import torch.distributed as dist

    from systems.measure.ranks import all_gather_objects
    from systems.training.parallel_timing import profiled_steps
    from systems.training.parallel_training import ParallelTraining

    other = params.model_copy(update={"strategy": strategy, "bucket_size_mb": None})
    training = ParallelTraining(
        other, device, dist.get_rank(), lambda module: wrapped(module, other)
    )
    if params.cuda_graph:
        training.capture()
    for _ in range(params.warmup_steps):
        training.step()
    return all_gather_objects(profiled_steps(training)[-1])


def wrapped(module: nn.Module, params: Params) -> nn.Module:
    """Return the module in the data-parallel wrapper that `params.strategy` selects."""
    from torch.nn.parallel import DistributedDataParallel

    from systems import parallel
    from systems.training.external_wrappers import wrap_ddp

    if is_reference(params.strategy):
        try:
            return wrap_ddp(params.strategy, module, params.bucket_size_mb, BUCKET_SIZE_MB)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
    if params.strategy == "naive":
        return parallel.NaiveDDP(module)
    if params.strategy == "flat":
        return parallel.FlatDDP(module)
    if params.strategy == "overlapped":
        return parallel.OverlappedDDP(module)
    if params.strategy == "bucketed":
        assert params.bucket_size_mb is not None
        return parallel.BucketedDDP(module, params.bucket_size_mb)
    if params.strategy == "peer":
        assert params.bucket_size_mb is not None
        return parallel.PeerDDP(module, params.bucket_size_mb)
    if params.strategy == "torch":
        return DistributedDataParallel(module)
    return DistributedDataParallel(
        module, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )
