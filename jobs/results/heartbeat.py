"""Heartbeat of a local or debug submission: tells other hosts whether its process is alive.

While a process runs the jobs of a submission, it touches DIR/submissions/ID/heartbeat every 10
seconds. At its end, it notes this in handles.json and removes the file. If the file is old, the
process died, or its host is down.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from jobs.processes import ProcessHandle
from jobs.results.manifest import Manifest, write_handles

HEARTBEAT = "heartbeat"
BEAT_S = 10.0  # interval between two updates of the file, in seconds
# Age from which the process counts as dead, in seconds. A client of a network file system may show
# a time of the file that is outdated by a minute.
DEAD_S = 120.0


class RunsHere:
    """Records in the `with` block that this process runs the jobs of a submission."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        self._file = manifest.path / HEARTBEAT
        self._over = threading.Event()
        # A thread, because a debug submission executes its runs in the main thread.
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):  # before the handle: without a heartbeat, it counts for a day
            self._file.touch()
        self._write(ProcessHandle.of_this_process())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        interrupted = isinstance(error, KeyboardInterrupt)
        # If the disk is full, the file remains, and other hosts see that it becomes old.
        with suppress(OSError):
            self._write(ProcessHandle.of_this_process(interrupted, ended=True))
            self._file.unlink()

    def _write(self, handle: ProcessHandle) -> None:
        self._manifest.handles.update({job.index: handle for job in self._manifest.jobs})
        write_handles(self._manifest)

    def _beat(self) -> None:
        while True:
            with suppress(OSError):  # a full disk must not stop the jobs
                self._file.touch()
            if self._over.wait(BEAT_S):
                return
