"""Writes records: one JSON line each, into a file of the writer's own in DIR/records/.

A file grows by whole lines. Whatever dies, what was written before stays readable.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from jobs.results.record import Record


def _warn(text: str) -> None:
    """Say it on stderr, if that is not a file on the same full disk."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


class RecordWriter:
    """Appends records to a file of its own.

    The name holds host, process and time, so no two writers ever share a file, whatever the file
    system. A write that fails (a full disk) is undone and tried again, so that no half line is
    left for the next record to be glued to; if it never succeeds the record goes to stderr.
    """

    def __init__(self, folder: Path, name: str):
        unique = f"{name}-{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}"
        self.path = folder / f"{unique}.jsonl"

    def write(self, record: Record, tries: int = 5) -> bool:
        """Append one line and flush it to disk. Returns whether it could."""
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        for attempt in range(tries):
            if attempt:
                time.sleep(min(2**attempt, 30))
            try:
                self._append(line)
                return True
            except OSError as error:
                _warn(f"cannot write {self.path}: {error.strerror}")
        _warn(f"unwritten record: {line.decode()}")
        return False

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # a half line is there that could not be undone
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
