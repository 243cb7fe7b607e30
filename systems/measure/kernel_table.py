"""Tabulate the kernels of a step, by annotated range, from a torch.profiler trace.

Pure functions of the exported Chrome trace (its format changes less than torch's Python objects).
A kernel belongs to the range in which it was launched, and the trace links the two by a correlation
id. For the phases that is exact because the GPU is idle at both ends of each. Kernels of backward
are launched by another thread, inside the evaluation of an autograd node. The node has the sequence
number of the forward operator that made it, so the kernel also belongs to that operator's range,
under the range's name and `_backward`.

On a CPU there are no kernels; operators take their place, each with its own time, without that of
the operators that it calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from systems.measure.kernel_names import kernel_class, short_kernel_name
from systems.measure.trace import (
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
STEP = "train_step"  # all three together
ATTENTION_RANGES = ("attention_scores", "attention_softmax", "attention_output")
_BACKWARD = "_backward"
LIMIT = 10  # rows of a table: the rest is a few percent

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """One kernel, memory copy or memory set on the device, or one operator on a CPU."""

    name: str
    start_us: float
    end_us: float
    own_us: float  # of an operator, without those that it calls
    phase: str | None
    part: str | None  # the range inside the phase, if it is in one


@dataclass(frozen=True)
class Profile:
    """The work of some training steps, and the spans of their phases, as a trace shows them."""

    work: list[Work]
    phase_spans: dict[str, list[Span]]  # on the host
    is_gpu: bool

    @property
    def steps(self) -> int:
        return len(self.phase_spans["forward"])


# ---- from a trace to work in ranges --------------------------------------------------------------


def read_profile(path: Path) -> Profile:
    """Read what `torch.profiler` exports as a Chrome trace."""
    return profile_of(read_events(path))


def profile_of(events: Iterable[Event]) -> Profile:
    """Return the work in a trace's events, with the ranges that it belongs to."""
    categories = by_category(events)
    operators = categories.get("cpu_op", [])
    ranges = _Ranges(categories.get("user_annotation", []), operators)
    on_gpu = [e for category in DEVICE_WORK for e in categories.get(category, [])]
    by_correlation = launches(categories)
    if by_correlation:
        work = []
        for event in on_gpu:
            # Without its launch, when it ran still tells its phase: the GPU is idle in between.
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
    """Spans that do not overlap, each with a value; `at` finds the value at a time."""

    def __init__(self, spans: Iterable[tuple[float, float, T]]):
        self._spans = sorted(spans, key=lambda span: span[0])
        self._starts = [start for start, _, _ in self._spans]

    def at(self, time: float) -> T | None:
        i = bisect_right(self._starts, time) - 1
        return self._spans[i][2] if i >= 0 and time < self._spans[i][1] else None


class _Ranges:
    """The annotated ranges of a trace; `find` returns those at a time on a thread."""

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
        """Return the range in which forward made each autograd node, by sequence number.

        An operator shows the number that the next node will get, whether it makes that node or
        calls another that does: of those with one number, the last to start made it.
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
        """Return the phase, and the range inside it, at a time on a thread."""
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
    """Return microseconds of each operator without those that it calls: on a thread they nest."""
    own: list[float] = [event["dur"] for event in operators]
    # The caller first where both start in the same tick.
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


# ---- from work to facts --------------------------------------------------------------------------


def kernel_facts(profile: Profile) -> dict[str, Any]:
    """Return facts of one step, the mean of the profiled ones, by range; times in milliseconds.

    kernels                 the ten that take longest: name, class, time, share, calls
    kernel_classes          the same by class, all of them
    kernel_ms               of all kernels together
    matmul_share, top_kernel, top_kernel_share   of that time
    and of the phases
    range_ms                from start to end on the host, the profiler's own cost included
    busy_share              of range_ms, the part in which at least one kernel ran
    and where attention was annotated, of forward and backward
    softmax_ms, attention_matmul_ms, softmax_over_matmul_time
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
        "counted": "GPU kernels" if profile.is_gpu else "CPU operators, without what they call",
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
    of: str
    time_ms: float
    share: float
    calls: float

    def facts(self) -> dict[str, float]:
        calls = int(self.calls) if self.calls.is_integer() else round(self.calls, 2)
        return {
            "time_ms": round(self.time_ms, 6),
            "time_share": round(self.share, 6),
            "calls": calls,
        }


def _table(work: list[Work], steps: int, key: Callable[[Work], str]) -> list[_Row]:
    """Sum time and calls by `key`, the longest first."""
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
    """Return how long the phases took on the host, and the share in which the device was busy."""
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
    """Compare the time of the softmax with that of attention's matmuls; scaling, masking and copies
    belong to neither."""
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
