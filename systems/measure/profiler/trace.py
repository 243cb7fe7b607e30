"""Read Chrome traces of torch.profiler, and merge, add and subtract time spans.

A time span is a pair of start and end in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Span = tuple[float, float]  # start and end, in microseconds
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events on a GPU


def read_events(path: Path) -> list[Event]:
    """Return the events of a Chrome trace that torch.profiler exported."""
    with path.open(encoding="utf-8", errors="replace") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def by_category(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Group the events of a trace by category, such as kernel. Drop events without a duration."""
    categories: dict[str, list[Event]] = {}
    for event in events:
        if event.get("ph") == "X":
            categories.setdefault(event.get("cat", ""), []).append(event)
    return categories


def launches(categories: Mapping[str, Iterable[Event]]) -> dict[Any, Event]:
    """Return the CUDA calls of the host by correlation id, which they share with their GPU work."""
    return {
        event["args"]["correlation"]: event
        for category in ("cuda_runtime", "cuda_driver")
        for event in categories.get(category, [])
        if "correlation" in event.get("args", {})
    }


def span(event: Event) -> Span:
    """Return the start and end times of an event, in microseconds."""
    return float(event["ts"]), float(event["ts"] + event["dur"])


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge time spans that overlap, and return the merged spans in order of time."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def total(spans: Iterable[Span]) -> float:
    """Return the total time that is covered by the spans. Overlapping parts count once."""
    return sum(end - start for start, end in merged(spans))


def without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """Subtract time spans: return the parts of `spans` that are not covered by `taken`."""
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
