"""Signals that end a submission: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call a function for each signal in the `with` block. Those ignored, as by nohup, stay so."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, earlier in before.items():
        if earlier is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Note signals in a list while the `with` block runs.

    An exception could lose the number of a job that was just accepted, or a new worker.
    """
    noted: list[int] = []
    with handled(lambda number, frame: noted.append(number)):
        yield noted
