"""Time data-parallel trainings in alternating rounds, and profile and draw their steps."""

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
from systems.measure.communication_timeline import STEP, StepTimeline, draw_steps, read_steps
from systems.measure.ranks import barrier
from systems.measure.timing import synchronize
from systems.training.parallel_params import ParallelParams
from systems.training.parallel_training import ParallelTraining
from systems.training.profiling import step_profiler

PROFILED_STEPS = 3


def alternating_rounds(
    trainings: Mapping[str, ParallelTraining], rounds: int, steps: int, warmup_steps: int = 0
) -> dict[str, list[float]]:
    """Time the trainings in turn, round by round, with Python's clock. A collective.

    In a round all ranks start together. It ends when this rank's GPU is idle.

    Args:
        trainings: trainings by name.
        rounds: number of rounds of each training.
        steps: consecutive steps in a round.
        warmup_steps: untimed steps of each training before the first round.

    Returns:
        Mean time of a step in each round, in milliseconds, by name.
    """
    samples: dict[str, list[float]] = {name: [] for name in trainings}
    for training in trainings.values():
        for _ in range(warmup_steps):
            training.step()
    for _ in range(rounds):
        for name, training in trainings.items():
            barrier(training.device)
            start = time.perf_counter()
            for _ in range(steps):
                training.step()
            synchronize(training.device)
            samples[name].append(round((time.perf_counter() - start) * 1e3 / steps, 6))
    return samples


def profiled_steps(training: ParallelTraining) -> list[StepTimeline]:
    """Run PROFILED_STEPS under torch.profiler and return a timeline of each. A collective."""
    phases = {
        "forward": training.forward,
        "backward": training.backward,
        "synchronize": training.synchronize_gradients,
        "optimizer": training.optimizer_step,
    }
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


def draw_timeline(
    panels: Mapping[str, Sequence[StepTimeline]], params: ParallelParams, device: torch.device
) -> None:
    """Draw one step of every rank into the artifact timeline.png; does nothing except on rank 0.

    Args:
        panels: timelines of all ranks in rank order, by name of the strategy.
        params: parameters that the title shows.
        device: device of this rank.
    """
    if dist.get_rank() != 0:
        return
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, Gloo"
    size = f"{params.size}, batch {params.batch_size} per rank, {params.precision}"
    path = artifacts_folder() / "timeline.png"
    draw_steps(panels, f"A training step of {size}; {where}", path)


def step_facts(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the medians of one rank's samples, in milliseconds, and overlap_share.

    Args:
        samples: milliseconds of the phases train_step, alone, communication and exposed.

    Returns:
        train_step_ms, alone_ms, profiled_communication_ms and profiled_exposed_ms; and
        overlap_share, the part of the profiled communication that overlaps with computation. It is
        missing if there is no communication.
    """
    middle = {name: statistics.median(ms) for name, ms in samples.items()}
    facts = {
        "train_step_ms": middle["train_step"],
        "alone_ms": middle["alone"],
        "profiled_communication_ms": middle["communication"],
        "profiled_exposed_ms": middle["exposed"],
    }
    if middle["communication"]:
        facts["overlap_share"] = 1 - middle["exposed"] / middle["communication"]
    return facts


def exposed_facts(facts: Mapping[str, float]) -> dict[str, float]:
    """Return the time that communication adds to a step, from the result of `step_facts`.

    This is valid only if `alone` does the same computation as train_step.

    Returns:
        exposed_ms: train_step_ms - alone_ms.
        communication_share: exposed_ms as a share of train_step_ms.
    """
    exposed = facts["train_step_ms"] - facts["alone_ms"]
    return {"exposed_ms": exposed, "communication_share": exposed / facts["train_step_ms"]}
