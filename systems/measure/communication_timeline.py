"""Find a step's communication in a torch.profiler trace, and the part that is exposed; draw it.

Communication is NCCL's kernels, or Gloo's calls on a CPU, including the wait for a slower rank.
Computation is all other kernels, or torch's operators on a CPU (compiled code has none there).
Communication is exposed while this rank computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from systems.measure.trace import (
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

PHASES = ("forward", "backward", "synchronize", "optimizer")
STEP = "train_step"
_COLOURS = dict(zip(PHASES, ("#4c72b0", "#55a868", "#937860", "#8172b3"), strict=True))


@dataclass(frozen=True)
class StepTimeline:
    """One step on one rank, in microseconds from its beginning."""

    length: float
    calls: dict[str, list[Span]]  # of communication, by collective
    computation: dict[str, list[Span]]  # by the phase that launched it

    @property
    def communication(self) -> list[Span]:
        """Spans with any communication in flight."""
        return merged(one for spans in self.calls.values() for one in spans)

    @property
    def busy(self) -> list[Span]:
        """Spans with any computation."""
        return merged(one for spans in self.computation.values() for one in spans)

    @property
    def exposed(self) -> list[Span]:
        """Spans with communication and no computation."""
        return without(self.communication, self.busy)

    @property
    def communication_ms(self) -> float:
        """Milliseconds with any communication in flight."""
        return total(self.communication) / 1e3

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of communication without computation."""
        return total(self.exposed) / 1e3

    def waits_ms(self, collective: str) -> list[float]:
        """Return for each call of the collective how many milliseconds at its end nothing was
        computed: 0 if computation still ran when it finished, so nothing waited for it."""
        waits, busy = [], self.busy
        for start, end in self.calls.get(collective, []):
            last = max((b for a, b in busy if a < end), default=0.0)
            waits.append(max(0.0, end - max(start, last)) / 1e3)
        return waits


def read_steps(path: Path) -> list[StepTimeline]:
    """Return the steps in a Chrome trace of `torch.profiler`: ranges named STEP, with ranges named
    as PHASES inside; the GPU must be idle at both ends of a step.

    Raises:
        ValueError: the trace has no such range.
    """
    return steps_of(read_events(path))


def steps_of(events: Iterable[Event]) -> list[StepTimeline]:
    """Return the steps in a trace's events, as `read_steps` does."""
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
        communication = [event for event in work if _is_nccl(event["name"])]
        work = [event for event in work if not _is_nccl(event["name"])]
    else:
        communication = [event for event in ranges if event["name"].startswith("gloo:")]
        # Only aten's: an autograd node's time has the hooks in it, which may wait.
        work = [e for e in categories.get("cpu_op", []) if e["name"].startswith("aten::")]
    computation: dict[str, list[Span]] = {}
    for event in work:
        # A kernel belongs to the phase of its launch: it may run when the host is past the phase.
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


def _is_nccl(name: str) -> bool:
    return name.startswith("nccl")


def _collective(name: str) -> str:
    """Return the collective: all_gather of ncclDevKernel_AllGather_RING_LL or gloo:all_gather."""
    letters = name.lower().replace("_", "")
    known = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    return next((name for name in known if name.replace("_", "") in letters), "other")


def _within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Clip spans to a step and count time from its start."""
    return [
        (max(low, start) - start, min(high, end) - start)
        for low, high in spans
        if low < end and high > start
    ]


def draw_steps(panels: Mapping[str, Sequence[StepTimeline]], title: str, path: Path) -> None:
    """Draw a panel per training, with one step of every rank: computation by phase above,
    communication below, darker where it is exposed. All panels have the same scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 0.9 + 0.8 * sum(map(len, panels.values()))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(step.length for steps in panels.values() for step in steps) / 1e3
    for panel, (name, steps) in zip(axes, panels.items(), strict=True):
        for rank, step in enumerate(steps):
            for phase, spans in step.computation.items():
                panel.broken_barh(_bars(spans), (rank, 0.4), color=_COLOURS[phase], lw=0)
            panel.broken_barh(_bars(step.communication), (rank + 0.42, 0.4), color="#f0b07c", lw=0)
            panel.broken_barh(_bars(step.exposed), (rank + 0.42, 0.4), color="#c44e52", lw=0)
        exposed_ms = max(step.exposed_ms for step in steps)
        panel.set_title(
            f"{name}: {max(step.length for step in steps) / 1e3:.4g} ms, communication exposed "
            f"{exposed_ms:.3g} ms",
            fontsize=9, loc="left",
        )  # fmt: skip
        panel.set_yticks([rank + 0.41 for rank in range(len(steps))])
        panel.set_yticklabels([f"rank {rank}" for rank in range(len(steps))])
        panel.invert_yaxis()
        panel.set_xlim(0, longest)
    axes[-1].set_xlabel("milliseconds, profiled")
    figure.suptitle(title, fontsize=10)
    used = [p for p in PHASES if any(s.computation.get(p) for ss in panels.values() for s in ss)]
    handles = [Patch(color=_COLOURS[phase], label=f"{phase}, computed") for phase in used]
    handles.append(Patch(color="#f0b07c", label="communication beside it"))
    handles.append(Patch(color="#c44e52", label="communication exposed"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)


def _bars(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """(start, width) in milliseconds."""
    return [(start / 1e3, (end - start) / 1e3) for start, end in merged(spans)]
