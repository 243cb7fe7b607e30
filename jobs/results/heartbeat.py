"""Heartbeat of a local or debug submission: tells other hosts whether its process is alive.

While a process runs the jobs of a submission, it touches DIR/submissions/ID/heartbeat every 10
seconds. At its end, it notes this in handles.json and removes the file. If the file is old, the
process died, or its host is down.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from jobs.processes import ProcessHandle
from jobs.results.manifest import Manifest, write_handles

HEARTBEAT = "heartbeat"
BEAT_S = 10.0  # interval between two updates of the file, in seconds
# Age from which the process counts as dead, in seconds. A client of a network file system may show
# a time of the file that is outdated by a minute.
DEAD_S = 120.0


@contextmanager
def runs_here(manifest: Manifest) -> Iterator[None]:
    """Record in the `with` block that this process runs the jobs of a submission."""
    file, over = manifest.path / HEARTBEAT, threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):  # a full disk must not stop the jobs
                file.touch()

    def note(handle: ProcessHandle) -> None:
        manifest.handles.update({job.index: handle for job in manifest.jobs})
        write_handles(manifest)

    with suppress(OSError):  # before the handle, which other hosts believe if the file is new
        file.touch()
    note(ProcessHandle.of_this_process())
    # A thread, because a debug submission executes its runs in the main thread.
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        over.set()
        thread.join()
        # If the disk is full, the file remains, and other hosts see that it becomes old.
        with suppress(OSError):
            note(ProcessHandle.of_this_process(interrupted, ended=True))
            file.unlink()
