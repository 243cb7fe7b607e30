"""Appends records as JSON lines. If a process or machine dies, earlier records stay readable."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from jobs.printing import say
from jobs.results.record import Record

RETRY_S = 2.0  # delay before a new try to write a record, in seconds


class RecordWriter:
    """Appends records to a file that no other writer uses. `name` is the start of its name.

    If a write fails, e.g. on a full disk, the partial line is removed and the write is repeated. If
    every try fails, the record is printed to stderr.
    """

    def __init__(self, folder: Path, name: str):
        unique = f"{name}-{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}"
        self.path = folder / f"{unique}.jsonl"
        self.error: OSError | None = None  # the latest error

    def write(self, record: Record, tries: int = 2) -> bool:
        """Append one record and flush it to disk. Return whether one of the tries succeeded."""
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        for attempt in range(tries):
            if attempt:
                time.sleep(RETRY_S)
            try:
                self._append(line)
                return True
            except OSError as error:
                self.error = error
                say(f"cannot write a record to {self.path}: {error.strerror}", sys.stderr)
        keep = f"to keep it, append this line to {self.path}: {line.decode()}"
        assert self.error is not None
        say(f"record not written; {keep}", sys.stderr)
        # `status` shows the last line.
        say(f"no record of a run: {self.error.strerror}", sys.stderr)
        return False

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # end an earlier partial line that could not be removed
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
