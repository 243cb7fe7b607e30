"""Writes records as JSON lines to DIR/records/, into a separate file for each writer.

Files grow by whole lines. If a process or machine dies, earlier records stay readable.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from jobs.results.record import Record


def _warn(text: str) -> None:
    """Print to stderr. Ignore errors: stderr may be a file on the same full disk."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


class RecordWriter:
    """Appends records to a file that no other writer uses.

    The file's name contains the host, the pid and the time, so it is unique on any file system. A
    write that fails, e.g. on a full disk, is undone and retried, so no partial line is left for the
    next record to be appended to. If every try fails, the record is printed to stderr.

    Args:
        folder: folder of the record files.
        name: beginning of the file's name.
    """

    def __init__(self, folder: Path, name: str):
        unique = f"{name}-{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}"
        self.path = folder / f"{unique}.jsonl"

    def write(self, record: Record, tries: int = 5) -> bool:
        """Append one record and flush it to disk, in at most `tries` tries.

        Returns:
            Whether it was written.
        """
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        for attempt in range(tries):
            if attempt:
                time.sleep(min(2**attempt, 30))
            try:
                self._append(line)
                return True
            except OSError as error:
                _warn(f"cannot write a record to {self.path}: {error.strerror}")
        _warn(f"record not written; to keep it, append this line to {self.path}: {line.decode()}")
        return False

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # end a partial line that could not be undone
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
