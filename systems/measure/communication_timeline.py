"""What of a step's communication runs beside computation and what is exposed: from a torch.profiler
trace, step by step, and as a picture.

Communication is NCCL's kernels, or Gloo's calls on a CPU, the wait for a rank that comes later
included. Computation is all other kernels, or torch's operators (what is compiled for a CPU has
none). What is exposed is communication
while this rank computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "synchronize", "optimizer")
STEP = "train_step"
Span = tuple[float, float]  # start and end, microseconds
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_COLOURS = dict(zip(PHASES, ("#4c72b0", "#55a868", "#937860", "#8172b3"), strict=True))


@dataclass(frozen=True)
class StepTimeline:
    """One step on one rank, in microseconds from its beginning."""

    length: float
    calls: dict[str, list[Span]]  # of communication, by collective
    computation: dict[str, list[Span]]  # by the phase that launched it

    @property
    def communication(self) -> list[Span]:
        """When any communication is on its way."""
        return merged(span for spans in self.calls.values() for span in spans)

    @property
    def busy(self) -> list[Span]:
        """When anything is computed."""
        return merged(span for spans in self.computation.values() for span in spans)

    @property
    def exposed(self) -> list[Span]:
        """When there is communication and no computation."""
        return without(self.communication, self.busy)

    @property
    def communication_ms(self) -> float:
        """Milliseconds in which any communication is on its way."""
        return total(self.communication) / 1e3

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of those in which nothing is computed."""
        return total(self.exposed) / 1e3

    def waits_ms(self, collective: str) -> list[float]:
        """For each call of the collective, milliseconds at its end in which nothing was computed:
        0 where computation still went on when it was done, so that nobody can have waited."""
        waits, busy = [], self.busy
        for start, end in self.calls.get(collective, []):
            last = max((b for a, b in busy if a < end), default=0.0)
            waits.append(max(0.0, end - max(start, last)) / 1e3)
        return waits


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def total(spans: Iterable[Span]) -> float:
    """Length of what the spans cover, overlaps counted once."""
    return sum(end - start for start, end in merged(spans))


def without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """What of `spans` none of `taken` covers."""
    result: list[Span] = []
    holes = merged(taken)
    first = 0
    for start, end in merged(spans):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for low, high in holes[first:]:
            if low >= end:
                break
            if low > start:
                result.append((start, low))
            start = max(start, high)
        if start < end:
            result.append((start, end))
    return result


def read_steps(path: Path) -> list[StepTimeline]:
    """The steps in what `torch.profiler` exports as a Chrome trace: ranges named STEP, with ranges
    named as PHASES inside, each step begun and ended with the GPU idle.

    Raises:
        ValueError: the trace has no such range.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        return steps_of(json.load(file)["traceEvents"])


def steps_of(events: Iterable[Mapping[str, Any]]) -> list[StepTimeline]:
    """As `read_steps`, of a trace's events."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            by_kind.setdefault(event.get("cat", ""), []).append(event)
    ranges = by_kind.get("user_annotation", [])
    steps = sorted(_span(event) for event in ranges if event["name"] == STEP)
    if not steps:
        raise ValueError(f"the trace has no range named {STEP}")
    phases = sorted((*_span(event), event["name"]) for event in ranges if event["name"] in PHASES)
    work = [event for kind in _ON_GPU for event in by_kind.get(kind, [])]
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for kind in ("cuda_runtime", "cuda_driver")
        for event in by_kind.get(kind, [])
        if "correlation" in event.get("args", {})
    }
    if work:
        communication = [event for event in work if _is_nccl(event["name"])]
        work = [event for event in work if not _is_nccl(event["name"])]
    else:
        communication = [event for event in ranges if event["name"].startswith("gloo:")]
        # Only aten's: an autograd node's time has the hooks in it, which may wait.
        work = [e for e in by_kind.get("cpu_op", []) if e["name"].startswith("aten::")]
    computation: dict[str, list[Span]] = {}
    for event in work:
        # Of a kernel the phase is that of its launch: it may run when the host has gone on.
        at = launched.get(event.get("args", {}).get("correlation"), float(event["ts"]))
        phase = next((name for start, end, name in phases if start <= at < end), None)
        if phase is not None:
            computation.setdefault(phase, []).append(_span(event))
    computation = {phase: merged(spans) for phase, spans in computation.items()}
    calls: dict[str, list[Span]] = {}
    for event in sorted(communication, key=lambda event: float(event["ts"])):
        calls.setdefault(_collective(event["name"]), []).append(_span(event))
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
    """Of ncclDevKernel_AllGather_RING_LL, or of gloo:all_gather: all_gather."""
    letters = name.lower().replace("_", "")
    known = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    return next((each for each in known if each.replace("_", "") in letters), "other")


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"] + event["dur"])


def _within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """What of the spans lies in a step, from the step's beginning."""
    return [
        (max(low, start) - start, min(high, end) - start)
        for low, high in spans
        if low < end and high > start
    ]


def draw_steps(panels: Mapping[str, Sequence[StepTimeline]], title: str, path: Path) -> None:
    """A panel for each way to train, in it one step of every rank: above what is computed, by
    phase, below what is communicated, darker where it is exposed. All panels have one scale."""
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
