"""Reads the records of a results folder: JSON lines in DIR/records/.

Files whose jobs have ended may be compressed with gzip, and then end in .jsonl.gz. Lines that are
damaged, or that a later version wrote, are reported and skipped.
"""

from __future__ import annotations

import gc
import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.results.record import RECORDS, Record
from jobs.results.unreadable import BadLine, UnreadableResults, first_problem, names_in

UNREADABLE = (OSError, EOFError, zlib.error)  # errors of files, also of damaged compressed ones
_RUN_ID = re.compile(rb'"run":"([^"]*)"')


def parse_lines(
    data: bytes, path: Path, shared: dict[str, Any] | None = None
) -> Iterator[Record | BadLine]:
    """Yield a `Record` or a `BadLine` per line. `shared` is a cache of values of records."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = Record.model_validate_json(line, context=shared)
        except ValidationError as error:
            yield BadLine(path, number, first_problem(error))
            continue
        # pydantic's set of the given fields would take a fifth of the memory of a record.
        for part in (record, record.measurements, record.seconds):
            if part is not None:
                part.model_fields_set.clear()
        yield record


def _record_files(records: Path) -> list[Path]:
    """Return the files of records. Of a file and its compressed copy, only the former."""
    names = dict.fromkeys(names_in(records))
    plain = [name for name in names if name.endswith(".jsonl")]
    packed = [name for name in names if name.endswith(".jsonl.gz") and name[:-3] not in names]
    return [records / name for name in sorted(plain + packed)]


def _content(path: Path, start: int = 0) -> bytes:
    """Return the content of a file, if it is not compressed from a position on.

    Raises one of UNREADABLE.
    """
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    if path.suffix != ".gz":
        return data
    if not data:
        raise EOFError("the file is empty")
    return gzip.decompress(data)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would take a third of the time to read records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_records(folder: Path) -> tuple[list[Record], list[BadLine]]:
    """Return all records of a folder, oldest first, and bad lines. Raises UnreadableResults."""
    records: list[Record] = []
    bad: list[BadLine] = []
    shared: dict[str, Any] = {}
    with garbage_collection_paused():
        for path in _record_files(folder / RECORDS):
            try:
                data = _content(path)
            except UNREADABLE as error:
                bad.append(BadLine(path, 0, getattr(error, "strerror", None) or str(error)))
                continue
            for item in parse_lines(data, path, shared):
                if isinstance(item, Record):
                    records.append(item)
                else:
                    bad.append(item)
    records.sort(key=lambda record: record.finished_at)
    return records, bad


class RecordTail:
    """Reads new records of some runs in a results folder, while others write them."""

    def __init__(self, folder: Path, runs: set[str]):
        self._folder = folder / RECORDS
        # Compared as bytes, because a damaged line may contain bytes that are not UTF-8.
        self._runs = {run.encode() for run in runs}
        self._read: dict[Path, int] = {}
        self._shared: dict[str, Any] = {}

    def new(self) -> list[Record]:
        """Return the records since the previous call, except those that cannot be read yet."""
        records: list[Record] = []
        try:
            paths = _record_files(self._folder)
        except UnreadableResults:  # a network file system may fail for a moment; jobs must go on
            return records
        for path in paths:
            start = self._read.get(path, 0)
            try:
                # Nothing is added to a compressed file.
                if start and (path.suffix == ".gz" or path.stat().st_size <= start):
                    continue
                data = _content(path, start)
            except UNREADABLE:
                continue
            whole = data[: data.rfind(b"\n") + 1]  # the rest is still being written
            self._read[path] = start + len(whole)
            mine = [
                line
                for line in whole.split(b"\n")
                if (found := _RUN_ID.search(line[:200])) and found[1] in self._runs
            ]
            lines = parse_lines(b"\n".join(mine), path, self._shared)
            records += [item for item in lines if isinstance(item, Record)]
        return records
