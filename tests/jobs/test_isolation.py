"""Waiting in the worker: a stop must be heard whichever thread the kernel gives it to."""

from __future__ import annotations

import signal
import threading
import time
from multiprocessing import Pipe

from jobs.isolation import wait_for


def test_a_signal_given_to_another_thread_is_handled_while_waiting() -> None:
    handled: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(time.monotonic()))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    assert other.ident is not None
    sender = threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGUSR1))
    silent, _end = Pipe()
    try:
        sender.start()
        start = time.monotonic()
        assert wait_for([silent], 4.0) == []
        assert time.monotonic() - start >= 4.0
    finally:
        done.set()
        sender.join()
        other.join()
        signal.signal(signal.SIGUSR1, before)
    assert handled and handled[0] - start < 2.0


def test_what_is_ready_ends_the_wait() -> None:
    here, there = Pipe()
    there.send("now")
    start = time.monotonic()
    assert wait_for([here], 60.0) == [here]
    assert time.monotonic() - start < 5.0
