"""Notes which phase of a benchmark runs, and when the kept samples of a phase are measured.

The launcher samples clocks, power and temperature of the GPUs beside the run, and uses the windows
to tell the phases apart. If memory runs out, it records the phase in which that happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_windows: dict[str, list[tuple[float, float]]] = {}
_failed: list[str] = []  # the phase that failed, or nothing


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Name the phase that runs in the `with` block, for the case that it raises an exception.

    If blocks are nested, the outermost phase counts. A forward pass in the check is the check.
    """
    try:
        yield
    except BaseException:
        _failed[:] = [phase]
        raise


@contextmanager
def window(phase: str | None) -> Iterator[None]:
    """Note the start and the end of the `with` block, in which samples of a phase are measured.

    All work must have ended at the end of the block. Without a phase, nothing is noted.
    """
    start = time.monotonic()
    yield
    if phase is not None:
        _windows.setdefault(phase, []).append((start, time.monotonic()))


def forget() -> None:
    """Remove all notes."""
    _windows.clear()
    _failed.clear()


def windows() -> dict[str, list[tuple[float, float]]]:
    """Return start and end of each window by phase, in seconds on the monotonic clock."""
    return {phase: list(spans) for phase, spans in _windows.items()}


def failed_phase() -> str | None:
    """Return the phase in which an exception was raised, or None."""
    return _failed[0] if _failed else None
