"""Measure the communication of training steps, from a profiler trace.

The communication time includes the wait for slower ranks. Communication is exposed while the rank
computes nothing.

On a GPU, NCCL kernels count as communication, and so do copies from and to the memory of
another GPU with the kernels that signal and wait for them (peer copies). All other kernels count as
computation. On a CPU, Gloo calls and peer copies count as communication, and torch's other
operators count as computation. Code that torch.compile compiled for a CPU uses none of them, so it
is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from systems.measure.profiler.trace import (
    DEVICE_WORK,
    Event,
    Span,
    by_category,
    launches,
    merged,
    read_events,
    span,
    total,
    without,
)
from systems.plot_data import Spans

PHASES = ("forward", "backward", "synchronize", "optimizer", "graph")
PEER_COPY = "peer_copy"  # name of copies from and to the memory of other ranks
STEP = "train_step"  # name of the annotated range that contains one step
GAP_MS = 0.02  # `steps_data` fills shorter gaps in the computation


@dataclass(frozen=True)
class StepTimeline:
    """Communication and computation of one training step on one rank.

    Times are in microseconds from the start of the step.
    """

    length: float  # duration of the step
    calls: dict[str, list[Span]]  # time span of each call, by collective such as all_reduce
    computation: dict[str, list[Span]]  # time spans of computation, by phase

    @property
    def communication(self) -> list[Span]:
        """Time spans in which at least one communication call is in flight, merged."""
        return merged(one for spans in self.calls.values() for one in spans)

    @property
    def busy(self) -> list[Span]:
        """Time spans in which the rank computes."""
        return merged(one for spans in self.computation.values() for one in spans)

    @property
    def exposed(self) -> list[Span]:
        """Time spans in which communication is in flight and the rank computes nothing."""
        return without(self.communication, self.busy)

    @property
    def on_multiprocessors_ms(self) -> float:
        """Total time of collectives, which occupy multiprocessors of a GPU, in milliseconds."""
        return (
            total(merged(s for name in self.calls if name != PEER_COPY for s in self.calls[name]))
            / 1e3
        )

    @property
    def communication_ms(self) -> float:
        """Total time in which communication is in flight, in milliseconds."""
        return total(self.communication) / 1e3

    @property
    def exposed_ms(self) -> float:
        """Total time in which communication is in flight and the rank computes nothing, in ms."""
        return total(self.exposed) / 1e3

    def waits_ms(self, collective: str, phase: str | None = None) -> list[float]:
        """Return how long the rank waited for each call of one collective, in milliseconds.

        The wait ends when the call ends, and is 0 if computation is running then. It begins when
        the last computation before that ends, or when the call starts if that is later.

        With a phase, only calls count that start before the computation of this phase is over.
        """
        waits, busy = [], self.busy
        over = float("inf") if phase is None else max(b for _, b in self.computation[phase])
        for start, end in self.calls.get(collective, []):
            if start >= over:
                continue
            last = max((b for a, b in busy if a < end), default=0.0)
            waits.append(max(0.0, end - max(start, last)) / 1e3)
        return waits


def read_steps(path: Path) -> list[StepTimeline]:
    """Read the communication and computation of all training steps in a Chrome trace.

    torch.profiler exported the trace. The code of each step must be annotated with record_function
    as train_step, and its phases by the names in `PHASES`. The GPU must be idle at the start and at
    the end of each step.

    Raises:
        ValueError: if the trace has no range with the name train_step.
    """
    return steps_of(read_events(path))


def steps_of(events: Iterable[Event]) -> list[StepTimeline]:
    """Return the steps in the events of a trace, see `read_steps`."""
    categories = by_category(events)
    ranges = categories.get("user_annotation", [])
    steps = sorted(span(event) for event in ranges if event["name"] == STEP)
    if not steps:
        raise ValueError(f"the trace has no range named {STEP}")
    phases = sorted((*span(event), event["name"]) for event in ranges if event["name"] in PHASES)
    work = [event for category in DEVICE_WORK for event in categories.get(category, [])]
    launched_at = {
        correlation: float(event["ts"]) for correlation, event in launches(categories).items()
    }
    if work:
        communication = [event for event in work if _communicates(event)]
        work = [event for event in work if not _communicates(event)]
    else:
        communication = [e for e in ranges if e["name"].startswith(("gloo:", f"{PEER_COPY}:"))]
        copies = merged(span(e) for e in communication if e["name"].startswith(PEER_COPY))
        # Count only aten operators. The events of autograd nodes include hooks, which may wait for
        # communication.
        work = [e for e in categories.get("cpu_op", []) if e["name"].startswith("aten::")]
        work = [e for e in work if without([span(e)], copies)]
    computation: dict[str, list[Span]] = {}
    for event in work:
        # A kernel belongs to the phase in which it was launched. It may run later, when the host
        # has already left this phase.
        at = launched_at.get(event.get("args", {}).get("correlation"), float(event["ts"]))
        phase = next((name for start, end, name in phases if start <= at < end), None)
        if phase is not None:
            computation.setdefault(phase, []).append(span(event))
    computation = {phase: merged(spans) for phase, spans in computation.items()}
    calls: dict[str, list[Span]] = {}
    for event in sorted(communication, key=lambda event: float(event["ts"])):
        calls.setdefault(_collective(event["name"]), []).append(span(event))
    return [
        StepTimeline(
            end - start,
            {name: _within(spans, start, end) for name, spans in calls.items()},
            {phase: _within(spans, start, end) for phase, spans in computation.items()},
        )
        for start, end in steps
    ]


def _communicates(event: Event) -> bool:
    name = event["name"]
    return name.startswith(("nccl", "Memcpy PtoP")) or "symmetric_memory::" in name


def _collective(name: str) -> str:
    """Return the collective in the name of an NCCL kernel or Gloo call, or PEER_COPY.

    The kernel ncclDevKernel_AllGather_RING_LL, for example, belongs to all_gather. A copy from or
    to the memory of another rank, a signal and the wait for one belong to peer_copy.
    """
    if name.startswith((PEER_COPY, "Memcpy")) or "symmetric_memory::" in name:
        return PEER_COPY
    letters = name.lower().replace("_", "")
    known = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    return next((name for name in known if name.replace("_", "") in letters), "other")


def _within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Return the parts of time spans that are in a step, relative to the start of the step."""
    return [
        (max(low, start) - start, min(high, end) - start)
        for low, high in spans
        if low < end and high > start
    ]


def steps_data(panels: Mapping[str, Sequence[StepTimeline]], title: str) -> Spans:
    """Return time spans in milliseconds to draw, two rows for each rank.

    The upper row is computation, by phase. The lower row is communication: overlapped while the
    rank computes, and exposed while it computes nothing. To keep the data small, a gap in the
    computation of a phase that is shorter than `GAP_MS` counts as computation. So a little less
    communication is exposed than in `StepTimeline`.

    `panels` has timelines in rank order, by name, such as that of a wrapper.
    """
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, steps in panels.items():
        for rank, step in enumerate(steps):
            phases = {phase: _closed(spans) for phase, spans in step.computation.items()}
            busy = merged(one for spans in phases.values() for one in spans)
            exposed = without(step.communication, busy)
            rows[f"{name}, rank {rank}, computation"] = {
                f"computation, {phase}": _in_ms(phases[phase])
                for phase in PHASES
                if phase in phases
            }
            rows[f"{name}, rank {rank}, communication"] = {
                "communication, overlapped": _in_ms(without(step.communication, exposed)),
                "communication, exposed": _in_ms(exposed),
            }
    return Spans(title=title, x_title="time in the profiled step (ms)", rows=rows)


def _closed(spans: Iterable[Span]) -> list[Span]:
    """Merge time spans with less than `GAP_MS` between them."""
    found: list[Span] = []
    for start, end in merged(spans):
        if found and start - found[-1][1] < GAP_MS * 1e3:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _in_ms(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(round(start / 1e3, 4), round(end / 1e3, 4)) for start, end in spans]
