"""Tabulate the kernels of training steps by phase and annotated range, from a profiler trace.

The input is a Chrome trace that torch.profiler exported. The format of this file changes less often
than torch's Python objects. Phases (forward, backward, optimizer) and ranges (parts of attention,
such as attention_softmax) are code that was annotated with record_function.

A kernel belongs to the phase and the range in which the host launched it. A correlation id in the
trace links the kernel to its launch. The GPU must be idle at the start and at the end of each
phase, so that a kernel also runs in the phase in which it was launched.

Another thread launches the kernels of backward. This thread executes autograd nodes. Each node has
the sequence number of the forward operator that created the node. If this operator was in an
range such as attention_softmax, the backward kernel belongs to attention_softmax_backward.

A CPU has no kernels, so the tables list torch's operators instead. The time of an operator excludes
the operators that it calls (self time).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from systems.measure.profiler.kernel_names import kernel_class, short_kernel_name
from systems.measure.profiler.trace import (
    DEVICE_WORK,
    Event,
    Span,
    by_category,
    launches,
    read_events,
    span,
    total,
)

PHASES = ("forward", "backward", "optimizer")
STEP = "train_step"  # key of the whole step, which is all phases together
ATTENTION_RANGES = ("attention_scores", "attention_softmax", "attention_output")
_BACKWARD = "_backward"
LIMIT = 10  # maximum number of rows in a table of kernels

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """Kernel, memory copy or memory set on a GPU, or torch operator on a CPU."""

    name: str
    start_us: float
    end_us: float
    own_us: float  # duration of the kernel, or self time of the operator
    phase: str | None  # None if launched outside of all phases
    part: str | None  # range inside the phase; None if launched outside of all ranges


@dataclass(frozen=True)
class Profile:
    """Kernels and phases of the training steps in a trace, or torch operators without a GPU."""

    work: list[Work]
    phase_spans: dict[str, list[Span]]  # for each phase, one time span per step, on the host
    is_gpu: bool  # True if `work` is GPU kernels, False if it is CPU operators

    @property
    def steps(self) -> int:
        return len(self.phase_spans["forward"])


# ---- reading a trace -----------------------------------------------------------------------------


def read_profile(path: Path) -> Profile:
    """Read the kernels and phases of training steps from a Chrome trace of torch.profiler."""
    return profile_of(read_events(path))


def profile_of(events: Iterable[Event]) -> Profile:
    """Return the kernels, or without them torch operators, and the phases in a Chrome trace."""
    categories = by_category(events)
    operators = categories.get("cpu_op", [])
    ranges = _Ranges(categories.get("user_annotation", []), operators)
    on_gpu = [e for category in DEVICE_WORK for e in categories.get(category, [])]
    by_correlation = launches(categories)
    if by_correlation:
        work = []
        for event in on_gpu:
            # If the trace lacks the launch, use the start time of the kernel. It gives the right
            # phase, because the GPU is idle between phases.
            cause = by_correlation.get(event.get("args", {}).get("correlation"), event)
            work.append(_work(event, event["dur"], ranges, cause))
    else:
        own = _own_times(operators)
        work = [_work(e, us, ranges, e) for e, us in zip(operators, own, strict=True)]
    return Profile(work, ranges.phase_spans, bool(by_correlation))


def _work(event: Event, own_us: float, ranges: _Ranges, cause: Event) -> Work:
    phase, part = ranges.find(cause["ts"], cause["tid"])
    return Work(event["name"], *span(event), own_us, phase, part)


class _Spans(Generic[T]):
    """Time spans that do not overlap, each with a value such as the name of a phase."""

    def __init__(self, spans: Iterable[tuple[float, float, T]]):
        self._spans = sorted(spans, key=lambda span: span[0])
        self._starts = [start for start, _, _ in self._spans]

    def at(self, time: float) -> T | None:
        i = bisect_right(self._starts, time) - 1
        return self._spans[i][2] if i >= 0 and time < self._spans[i][1] else None


class _Ranges:
    """Phases and ranges of a trace. Torch operators connect backward to ranges of forward."""

    def __init__(self, annotations: Sequence[Event], operators: Sequence[Event]):
        phases = [e for e in annotations if e["name"] in PHASES]
        self.phase_spans = {name: [span(e) for e in phases if e["name"] == name] for name in PHASES}
        self._phases = _Spans((*span(e), e["name"]) for e in phases)
        self._parts = _by_thread(
            (e for e in annotations if e["name"] in ATTENTION_RANGES), lambda e: str(e["name"])
        )
        self._nodes = _by_thread(
            (e for e in operators if e["name"].startswith("autograd::engine::evaluate_function")),
            _sequence_number,
        )
        self._made_in = self._parts_of_nodes(operators)

    def _parts_of_nodes(self, operators: Iterable[Event]) -> dict[int, str | None]:
        """Return the annotated range of forward in which each autograd node was created, by number.

        An operator has the sequence number of the autograd node that will be created next, even if
        the operator itself creates no node. So several operators can have the same number. Of
        these, the one that started last created the node.
        """
        last: dict[int, Event] = {}
        for event in operators:
            number = _sequence_number(event)
            if number is None or self._phases.at(event["ts"]) != "forward":
                continue
            if number not in last or event["ts"] >= last[number]["ts"]:
                last[number] = event
        return {number: self._part(e["ts"], e["tid"]) for number, e in last.items()}

    def _part(self, time: float, thread: Any) -> str | None:
        return self._parts[thread].at(time) if thread in self._parts else None

    def find(self, time: float, thread: Any) -> tuple[str | None, str | None]:
        """Return the phase and the range, or None, in which a thread was at a time in microseconds.

        In backward, the range is that of the forward operator, with the suffix `_backward`.
        """
        phase = self._phases.at(time)
        if phase == "forward":
            return phase, self._part(time, thread)
        if phase == "backward" and thread in self._nodes:
            node = self._nodes[thread].at(time)
            made_in = None if node is None else self._made_in.get(node)
            return phase, made_in and made_in + _BACKWARD
        return phase, None


def _by_thread(events: Iterable[Event], what: Callable[[Event], T]) -> dict[Any, _Spans[T]]:
    threads: dict[Any, list[tuple[float, float, T]]] = {}
    for event in events:
        threads.setdefault(event["tid"], []).append((*span(event), what(event)))
    return {thread: _Spans(spans) for thread, spans in threads.items()}


def _sequence_number(event: Event) -> int | None:
    number: int | None = event.get("args", {}).get("Sequence number")
    return number


def _own_times(operators: Sequence[Event]) -> list[float]:
    """Return the microseconds of each operator without those it calls on the same thread."""
    own: list[float] = [event["dur"] for event in operators]
    # If caller and callee start at the same time, the caller comes first.
    order = sorted(
        range(len(operators)), key=lambda i: (operators[i]["ts"], -operators[i]["dur"], i)
    )
    open_calls: dict[Any, list[int]] = {}
    for i in order:
        event = operators[i]
        calls = open_calls.setdefault(event["tid"], [])
        while calls and span(operators[calls[-1]])[1] <= event["ts"]:
            calls.pop()
        if calls:
            own[calls[-1]] -= event["dur"]
        calls.append(i)
    return [max(0.0, us) for us in own]


# ---- tables and facts ----------------------------------------------------------------------------


def kernel_facts(profile: Profile) -> dict[str, Any]:
    """Return tables and totals of the GPU kernels of training steps.

    On a CPU, torch operators are listed instead. Times are in milliseconds per step, averaged over
    the steps. Shares are fractions from 0 to 1.

    Returns:
        For each phase, the whole step (`train_step`) and each range:
        kernels: list of the ten kernels with the longest time. Each has a name, a class such as
            matmul, a time, a share of the time, and a number of calls.
        kernel_classes: time, share of the time, and number of calls of each class of kernels.
        kernel_ms: total time of all kernels.
        matmul_share: share of kernel_ms that matmuls take.
        top_kernel: name of the kernel with the longest time.
        top_kernel_share: share of kernel_ms that this kernel takes.

        For each phase and the whole step:
        range_ms: duration on the host, including the overhead of the profiler.
        busy_share: share of range_ms during which at least one kernel was running.

        For forward and backward, if the trace has annotated ranges:
        softmax_ms: time of the softmax of attention.
        attention_matmul_ms: time of the matmuls of attention.
        softmax_over_matmul_time: softmax_ms divided by attention_matmul_ms.

        Single values:
        counted: text that states whether GPU kernels or CPU operators are listed.
        profiled_steps: number of steps.
    """
    parts = [name + suffix for suffix in ("", _BACKWARD) for name in ATTENTION_RANGES]
    ranges: dict[str, list[Work]] = {name: [] for name in (*PHASES, STEP, *parts)}
    for work in profile.work:
        if work.phase is not None:
            ranges[work.phase].append(work)
            ranges[STEP].append(work)
        if work.part is not None:
            ranges[work.part].append(work)
    ranges = {name: work for name, work in ranges.items() if work}
    steps = profile.steps
    by_kernel = {name: _table(work, steps, lambda w: w.name) for name, work in ranges.items()}
    classes = {
        name: _table(work, steps, lambda w: kernel_class(w.name)) for name, work in ranges.items()
    }
    return {
        "counted": "GPU kernels" if profile.is_gpu else "CPU operators, self time only",
        "profiled_steps": steps,
        "kernels": {
            name: [
                {"kernel": short_kernel_name(r.of), "class": kernel_class(r.of), **r.facts()}
                for r in rows[:LIMIT]
            ]
            for name, rows in by_kernel.items()
        },
        "kernel_classes": {
            name: [{"class": row.of, **row.facts()} for row in rows]
            for name, rows in classes.items()
        },
        "kernel_ms": {
            name: round(_time_ms(work, steps), 6) for name, work in ranges.items()
        },
        "matmul_share": {
            name: next((row.facts()["time_share"] for row in rows if row.of == "matmul"), 0.0)
            for name, rows in classes.items()
        },
        "top_kernel": {name: short_kernel_name(rows[0].of) for name, rows in by_kernel.items()},
        "top_kernel_share": {
            name: rows[0].facts()["time_share"] for name, rows in by_kernel.items()
        },
        **_span_facts(profile, ranges),
        **_softmax_facts(ranges, steps),
    }  # fmt: skip


@dataclass(frozen=True)
class _Row:
    of: str  # name or class of the kernels
    time_ms: float  # milliseconds per step
    share: float  # fraction of the time of all rows
    calls: float  # number of calls per step

    def facts(self) -> dict[str, float]:
        calls = int(self.calls) if self.calls.is_integer() else round(self.calls, 2)
        return {
            "time_ms": round(self.time_ms, 6),
            "time_share": round(self.share, 6),
            "calls": calls,
        }


def _table(work: list[Work], steps: int, key: Callable[[Work], str]) -> list[_Row]:
    """Return time per step, its share, and calls per step of each group, the longest time first."""
    groups: dict[str, list[Work]] = {}
    for one in work:
        groups.setdefault(key(one), []).append(one)
    total = _time_ms(work, steps)
    rows = []
    for name, group in groups.items():
        ms = _time_ms(group, steps)
        rows.append(_Row(name, ms, ms / total if total else 0.0, len(group) / steps))
    return sorted(rows, key=lambda row: (-row.time_ms, row.of))


def _time_ms(work: Iterable[Work], steps: int) -> float:
    return sum(one.own_us for one in work) / 1e3 / steps


def _span_facts(profile: Profile, ranges: dict[str, list[Work]]) -> dict[str, Any]:
    """Return range_ms and busy_share, see `kernel_facts`."""
    range_us = {
        name: sum(end - start for start, end in spans)
        for name, spans in profile.phase_spans.items()
    }
    busy_us = {
        name: total((one.start_us, one.end_us) for one in ranges.get(name, [])) for name in range_us
    }
    for by_phase in (range_us, busy_us):
        by_phase[STEP] = sum(by_phase.values())
    return {
        "range_ms": {name: round(us / 1e3 / profile.steps, 6) for name, us in range_us.items()},
        "busy_share": {
            name: round(busy_us[name] / us, 6) for name, us in range_us.items() if us
        },
    }  # fmt: skip


def _softmax_facts(ranges: dict[str, list[Work]], steps: int) -> dict[str, Any]:
    """Return softmax_ms, attention_matmul_ms and softmax_over_matmul_time, or {} without ranges.

    The softmax is all kernels in the range attention_softmax. The matmuls are the matmul kernels in
    attention_scores and attention_output. Scaling, masking and copies there are not counted.
    """
    softmax: dict[str, float] = {}
    matmul: dict[str, float] = {}
    for phase, suffix in (("forward", ""), ("backward", _BACKWARD)):
        scores, middle, output = (ranges.get(name + suffix, []) for name in ATTENTION_RANGES)
        products = [one for one in (*scores, *output) if kernel_class(one.name) == "matmul"]
        if middle and products:
            softmax[phase] = round(_time_ms(middle, steps), 6)
            matmul[phase] = round(_time_ms(products, steps), 6)
    if not softmax:
        return {}
    return {
        "softmax_ms": softmax,
        "attention_matmul_ms": matmul,
        "softmax_over_matmul_time": {
            phase: round(softmax[phase] / ms, 6) for phase, ms in matmul.items() if ms
        },
    }
