"""Group the CUDA calls of the host by purpose, from a trace of torch.profiler.

The first step of a process makes calls that later steps do not: it loads the code of each kernel
when the kernel is launched for the first time, and it requests memory from the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from systems.measure.profiler.trace import (
    DEVICE_WORK,
    Event,
    Span,
    launches,
    merged,
    span,
    total,
    without,
)

CALLS = ("cuda_runtime", "cuda_driver")  # categories of calls of the host
# Parts of the names of calls, in lower case. The first match decides.
_PURPOSES = (
    ("waiting", ("synchronize",)),
    ("memory", ("malloc", "cudafree", "memfree", "hostalloc", "memcreate", "memmap", "memaddress")),
    ("loading", ("module", "library", "getkernel", "funcgetattribute", "funcsetattribute",
                 "occupancy", "kernelgetfunction")),
)  # fmt: skip


def purpose(name: str) -> str:
    """Return the purpose of a CUDA call that launches no work, by the name of the call.

    "memory" requests and returns memory, "loading" loads code or reads its attributes, "waiting"
    waits for the GPU. The rest is "other".
    """
    lower = name.lower()
    for found, parts in _PURPOSES:
        if any(part in lower for part in parts):
            return found
    return "other"


def host_times(
    categories: Mapping[str, Sequence[Event]], steps: Sequence[Span]
) -> list[dict[str, Any]]:
    """Split the time of each step by what the host does.

    `categories` is the result of `trace.by_category`. The trace begins with the first step of the
    process. Steps are in order and in microseconds.

    Returns:
        For each step, milliseconds by name. Calls of several threads at the same time count once,
        for the first of these names:
            step_ms: the whole step.
            first_launches_ms: launches of kernels that were not launched before, and other calls
                that load code.
            memory_ms: requests of memory from the driver, and returns.
            launches_ms: further launches of kernels, copies and fills.
            waiting_ms: waits for the GPU.
            no_call_ms: no call: torch, libraries and Python.
        and two counts: new_kernels, the kernels that were not launched before, and memory_requests,
        the calls that count for memory_ms.
    """
    kernels = {
        event["args"]["correlation"]: event["name"]
        for category in DEVICE_WORK
        for event in categories.get(category, [])
        if "correlation" in event.get("args", {})
    }
    launched = launches(categories)
    calls = sorted(
        (event for category in CALLS for event in categories.get(category, [])), key=span
    )
    seen: set[str] = set()
    by_step: list[list[tuple[str, Span]]] = [[] for _ in steps]
    new_kernels = [0] * len(steps)
    for call in calls:
        index = next((i for i, (low, high) in enumerate(steps) if low <= call["ts"] < high), None)
        correlation = call.get("args", {}).get("correlation")
        kernel = kernels.get(correlation) if launched.get(correlation) is call else None
        if kernel is None:
            kind = purpose(call["name"])
        else:
            kind = "launches" if kernel in seen else "loading"
            if kernel not in seen and index is not None:
                new_kernels[index] += 1
            seen.add(kernel)
        if index is not None:
            by_step[index].append((kind, span(call)))
    return [
        _times(step, found, count)
        for step, found, count in zip(steps, by_step, new_kernels, strict=True)
    ]


def _times(step: Span, found: Sequence[tuple[str, Span]], new_kernels: int) -> dict[str, Any]:
    times: dict[str, Any] = {"step_ms": _ms(step[1] - step[0])}
    taken: list[Span] = []
    for kind, name in (
        ("loading", "first_launches_ms"),
        ("memory", "memory_ms"),
        ("launches", "launches_ms"),
        ("waiting", "waiting_ms"),
    ):
        spans = without([s for k, s in found if k == kind], taken)
        times[name] = _ms(total(spans))
        taken = merged([*taken, *spans])
    others = merged([*taken, *(s for _, s in found)])
    times["no_call_ms"] = _ms(total(without([step], others)))
    times["new_kernels"] = new_kernels
    times["memory_requests"] = sum(kind == "memory" for kind, _ in found)
    return times


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 6)
