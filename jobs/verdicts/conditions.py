"""Tells how the conditions differ under which two lists of records were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from jobs.formatting import abridged, is_number
from jobs.frame.recorded import UNKNOWN, environment_value, recorded_value
from jobs.results.record import Record, throttle_reasons

OTHER_CLOCK = 0.01  # relative difference from which on two SM clocks count as different
MOST_NAMED = 3  # values in a line
Records = Sequence[Record]


def on_same_gpus(before: Records, after: Records) -> bool:
    """Return whether it is known that records are of the same GPUs."""
    gpus = _gpus(before)
    return bool(gpus) and None not in gpus and gpus == _gpus(after)


def differences(before: Records, after: Records) -> list[str]:
    """Return a line for each condition that differs, such as `driver: 570 before, 580 after`.

    Values that no record of one side contains are `unknown` there.
    """
    lines = ["other GPUs"] if _gpus(before) != _gpus(after) else []
    if _values(before, _of("host")) != _values(after, _of("host")):
        lines.append("other hosts")
    for name, of in _VALUES.items():
        ours, theirs = _values(before, of), _values(after, of)
        if ours != theirs:
            first, second = (abridged(values, MOST_NAMED) for values in (ours, theirs))
            lines.append(f"{name}: {first} before, {second} after")
    return [*lines, *_other_sources(before, after), *_other_clocks(before, after)]


def _of(*keys: str) -> Callable[[Record], Any]:
    return lambda record: environment_value(record, *keys)


_VALUES: dict[str, Callable[[Record], Any]] = {
    "driver": _of("driver"),
    "OpenMP threads": _of("threads"),
    "torch": _of("loaded", "torch"),
    "CUDA": _of("loaded", "cuda"),
    "cuDNN": _of("loaded", "cudnn"),
    "NCCL": _of("loaded", "nccl"),
    "Triton": _of("loaded", "triton"),
    "commit": lambda record: recorded_value(record, "commit").replace("-dirty", " with changes"),
}


def _values(records: Records, of: Callable[[Record], Any]) -> list[str]:
    found = {str(of(record) or UNKNOWN) for record in records}
    return sorted(found - {UNKNOWN}) or [UNKNOWN]


def _gpus(records: Records) -> set[Any]:
    """Return the UUIDs of the GPUs of some records, with None if one is unknown."""
    return {gpu.get("uuid") for record in records for gpu in record.gpus}


def _other_sources(before: Records, after: Records) -> list[str]:
    """Return a line on the number of runs whose sources differ. Unknown sources do not count."""
    ours, theirs = (
        {(r.run, r.source_hash) for r in side if r.source_hash} for side in (before, after)
    )
    common = {run for run, _ in ours} & {run for run, _ in theirs}
    other = {run for run, _ in ours ^ theirs} & common
    return [f"source hash: another one in {len(other)} of {len(common)} runs"] if other else []


def _other_clocks(before: Records, after: Records) -> list[str]:
    """Return lines on the SM clock and on what slowed down the GPUs."""
    lines = []
    ours, theirs = _clock(before), _clock(after)
    if ours and theirs and abs(theirs / ours - 1) > OTHER_CLOCK:
        lines.append(f"SM clock: {ours:.0f} MHz before, {theirs:.0f} MHz after")
    sides = [[throttle_reasons(r) for r in side if r.conditions] for side in (before, after)]
    for reason in sorted(set().union(*sides[0], *sides[1])) if all(sides) else ():
        first, second = (f"{fmean(reason in each for each in side):.0%}" for side in sides)
        if first != second:
            lines.append(f"slowed down by {reason}: {first} of processes before, {second} after")
    return lines


def _clock(records: Records) -> float | None:
    """Return the median SM clock over all phases, in MHz. None if it is unknown."""
    phases = [conditions for record in records for conditions in record.conditions.values()]
    clocks = [found.get("sm_clock_mhz") for found in phases]  # minimum, median, maximum
    known = [clock[len(clock) // 2] for clock in clocks if isinstance(clock, list) and clock]
    return median(filter(is_number, known)) if any(map(is_number, known)) else None
