"""Time, profile and draw the steps of data-parallel trainings."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from systems.benchmark import artifacts_folder
from systems.measure.profiler.communication_timeline import (
    STEP,
    StepTimeline,
    read_steps,
    steps_data,
)
from systems.measure.ranks import barrier
from systems.measure.timing import synchronize
from systems.measure.windows import during, window
from systems.plot_data import SUFFIX, write_figure
from systems.training.parallel_params import ParallelParams
from systems.training.parallel_training import ParallelTraining
from systems.training.profiling import step_profiler

PROFILED_STEPS = 3  # number of profiled steps


def alternating_rounds(
    trainings: Mapping[str, ParallelTraining], rounds: int, steps: int, warmup_steps: int = 0
) -> dict[str, list[float]]:
    """Return the mean milliseconds of a step in each round, for several trainings in turn.

    A round is `steps` consecutive steps of one training. The order of the trainings is reversed
    after each round, so that a steady change of the machine affects all of them equally. All ranks
    must call this function. They start each round together. On each rank a round ends when its GPU
    is idle. Each training first runs its warm-up steps.
    """
    samples: dict[str, list[float]] = {name: [] for name in trainings}
    for name, training in trainings.items():
        with during(name):
            for _ in range(warmup_steps):
                training.step()
    order = list(trainings.items())
    for _ in range(rounds):
        for name, training in order:
            barrier(training.device)
            with during(name), window(name):
                start = time.perf_counter()
                for _ in range(steps):
                    training.step()
                synchronize(training.device)
            samples[name].append(round((time.perf_counter() - start) * 1e3 / steps, 6))
        order.reverse()
    return samples


def profiled_steps(training: ParallelTraining) -> list[StepTimeline]:
    """Return timelines of a few steps on this rank, from torch.profiler.

    A step that was captured is one phase, graph. All ranks must call this function.
    """
    phases = (
        {"graph": training.step}
        if training.is_captured
        else {
            "forward": training.forward,
            "backward": training.backward,
            "synchronize": training.synchronize_gradients,
            "optimizer": training.optimizer_step,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        with step_profiler(training.device, trace, PROFILED_STEPS) as profiler:
            for _ in range(1 + PROFILED_STEPS):
                barrier(training.device)
                with record_function(STEP):
                    for name, phase in phases.items():
                        with record_function(name):
                            phase()
                    synchronize(training.device)
                training.zero_grad()
                profiler.step()
        return read_steps(trace)


def host_ms(training: ParallelTraining) -> float:
    """Return the milliseconds in which the host launches a step on an idle GPU.

    It is the median of a few steps. All ranks must call this function.
    """
    times = []
    for _ in range(PROFILED_STEPS):
        barrier(training.device)
        start = time.perf_counter()
        training.step()
        times.append((time.perf_counter() - start) * 1e3)
        synchronize(training.device)
    return statistics.median(times)


def keep_timeline(
    panels: Mapping[str, Sequence[StepTimeline]], params: ParallelParams, device: torch.device
) -> None:
    """Write one training step of every rank to timeline.plot.json in the artifacts, on rank 0.

    A panel has the timelines of a strategy, for example a data-parallel wrapper, in rank order.
    """
    if dist.get_rank() != 0:
        return
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, Gloo"
    size = f"{params.size}, batch {params.batch_size} per rank, {params.precision}"
    title = f"A training step of {size}; {where}"
    write_figure(steps_data(panels, title), artifacts_folder() / f"timeline{SUFFIX}")


def step_facts(of_ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
    """Summarize the step times and the communication of a training on several ranks.

    Ranks wait for each other in every step, so a step takes as long as on the slowest rank. The
    time of a round is therefore the maximum over the ranks, with and without communication.

    Args:
        of_ranks: for each rank, milliseconds of the phases train_step, alone, communication and
            exposed, see `systems.benchmarks.data_parallel.run`. The last two are missing if no step
            was profiled.

    Returns:
        train_step_ms, alone_ms: mean of the rounds.
        over_alone: ratio of the two.
        profiled_communication_ms, profiled_exposed_ms: median of the profiled steps of the rank
            that takes longest for a step without communication. The other ranks wait for it, and
            this wait is no communication.
        overlap_share: share of profiled_communication_ms that overlaps with computation. Missing if
            there is no communication.
    """
    step, alone = (statistics.fmean(_rounds(of_ranks, name)) for name in ("train_step", "alone"))
    facts = {"train_step_ms": step, "alone_ms": alone, "over_alone": step / alone}
    slowest = max(of_ranks, key=lambda samples: statistics.fmean(samples["alone"]))
    if "communication" in slowest:
        communication = statistics.median(slowest["communication"])
        exposed = statistics.median(slowest["exposed"])
        facts |= {"profiled_communication_ms": communication, "profiled_exposed_ms": exposed}
        if communication:
            facts["overlap_share"] = 1 - exposed / communication
    return facts


def exposed_facts(of_ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
    """Return the time that communication adds to a training step, from the times of all ranks.

    The exposed communication of a round is the difference of a step with and without communication.
    They are measured one after the other, so that a slow change of the machine affects both. The
    result is valid only if both steps do the same computation.

    Args:
        of_ranks: as for `step_facts`.

    Returns:
        exposed_ms: mean difference of the rounds.
        exposed_std_ms: standard deviation of the differences. Missing if there is one round.
        communication_share: exposed_ms divided by the mean of train_step.
        alone_imbalance: how much longer the slowest rank takes than the fastest for a step without
            communication, relative to the fastest.
    """
    step, alone = _rounds(of_ranks, "train_step"), _rounds(of_ranks, "alone")
    exposed = [with_it - without for with_it, without in zip(step, alone, strict=True)]
    facts = {"exposed_ms": statistics.fmean(exposed)}
    if len(exposed) > 1:
        facts["exposed_std_ms"] = statistics.stdev(exposed)
    means = [statistics.fmean(rank["alone"]) for rank in of_ranks]
    return facts | {
        "communication_share": facts["exposed_ms"] / statistics.fmean(step),
        "alone_imbalance": max(means) / min(means) - 1,
    }


def _rounds(of_ranks: Sequence[Mapping[str, list[float]]], phase: str) -> list[float]:
    """Return the time of the slowest rank in each round."""
    return [max(times) for times in zip(*(rank[phase] for rank in of_ranks), strict=True)]
