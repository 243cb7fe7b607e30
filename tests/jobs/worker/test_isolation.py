"""Waiting in the worker: signals are handled in time, whichever thread the kernel gives them to."""

from __future__ import annotations

import signal
import threading
from multiprocessing import Pipe

from jobs.worker.isolation import wait_for


def test_a_signal_given_to_another_thread_is_handled_while_waiting() -> None:
    here, there = Pipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: there.send("handled"))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    assert other.ident is not None
    sender = threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGUSR1))
    try:
        sender.start()
        assert wait_for([here], 60.0) == [here]  # the handler ran before the timeout
        assert here.recv() == "handled"
    finally:
        done.set()
        sender.join()
        other.join()
        signal.signal(signal.SIGUSR1, before)
